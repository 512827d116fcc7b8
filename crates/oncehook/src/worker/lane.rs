//! A lane: one route's work, batch after batch, for handlers that run inside the journal. Those that leave the process
//! are in `outside`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use oncehook_verify::UnixMicros;
use tokio::sync::watch;

use super::errand::{Errand, What};
use super::{LOOK_EVERY, Shared, guards, outside};
use crate::delivery::{RouteName, Settled};
use crate::handler::Handler;
use crate::journal::WorkError;
use crate::route::{Route, SQL_BATCH};

/// Calls of a function that are leased together.
const FUNCTION_BATCH: usize = 16;

/// Runs a route until the end.
pub(super) async fn run(shared: Arc<Shared>, route: Arc<Route>, mut end: watch::Receiver<bool>) {
    // Nothing runs before it is known what is paused; a journal that cannot say is asked again.
    while shared.learn_pauses().await.is_err() {
        if rest(shared.after_trouble(), &mut end).await {
            return;
        }
    }
    match (route.handler.clone(), route.fetch.is_some()) {
        (Handler::Http(handler), _) => {
            let errand = Errand::new(&route, What::Http(handler));
            return outside::run(shared, route, errand, end).await;
        }
        (Handler::Elsewhere(elsewhere), _) => return guards::run(shared, route, elsewhere, end).await,
        // To ask somebody takes time, and nothing is locked meanwhile: leased, and run inside the journal afterwards.
        (Handler::Sql(_) | Handler::Function(_), true) => {
            let inside = What::Inside(Arc::clone(&shared.deliveries), Arc::clone(&route));
            let errand = Errand::new(&route, inside);
            return outside::run(shared, route, errand, end).await;
        }
        (Handler::Sql(_) | Handler::Function(_), false) => {}
    }
    let mut changes = shared.deliveries.changes();
    let mut paused = shared.paused.subscribe();
    let mut reclaimed: Option<Instant> = None;
    while !*end.borrow() {
        if shared.is_paused(&route) {
            wait_for_change(&mut paused, &mut end).await;
            continue;
        }
        if reclaimed.is_none_or(|at| at.elapsed() >= shared.renew_every()) {
            reclaim(&shared, &route).await;
            reclaimed = Some(Instant::now());
        }
        changes.mark_unchanged();
        let worked = match &route.handler {
            Handler::Sql(_) => apply(&shared, &route).await,
            Handler::Function(_) | Handler::Http(_) | Handler::Elsewhere(_) => call(&shared, &route).await,
        };
        match worked {
            Ok(true) => shared.is_well(),
            Ok(false) => {
                shared.is_well();
                let wait = until_due(&shared, &route.name).await;
                tokio::select! {
                    // The sender lives as long as the journal, which the lane holds.
                    _ = changes.changed() => {}
                    () = tokio::time::sleep(wait) => {}
                    _ = paused.changed() => {}
                    () = ended(&mut end) => {}
                }
            }
            Err(error) => {
                tracing::debug!(route = route.name.as_str(), %error, "the journal refused work");
                rest(shared.after_trouble(), &mut end).await;
            }
        }
    }
}

/// Runs a batch of statements. Returns whether there may be more to do at once.
async fn apply(shared: &Shared, route: &Arc<Route>) -> Result<bool, WorkError> {
    let progress = shared.deliveries.apply(Arc::clone(route), SQL_BATCH).await?;
    let metrics = shared.metrics.route(route.name.as_str());
    metrics.succeeded(progress.succeeded);
    metrics.retrying(progress.retrying);
    metrics.parked(progress.parked);
    metrics.superseded(progress.superseded);
    metrics.dead(progress.dead);
    route.report(&progress.failed);
    Ok(progress.more)
}

/// Leases a batch and runs the function on each, one job after the other, so that accepting goes on in between. Returns
/// whether there may be more to do at once.
async fn call(shared: &Arc<Shared>, route: &Arc<Route>) -> Result<bool, WorkError> {
    let mut claims = shared.deliveries.claim(Arc::clone(route), FUNCTION_BATCH, shared.lease).await?;
    let full = claims.len() == FUNCTION_BATCH;
    claims.reverse();
    let mut renewed = Instant::now();
    while let Some(claim) = claims.pop() {
        if renewed.elapsed() >= shared.renew_every() {
            // Those before took their time. If it fails, the fence is what counts.
            let held = std::iter::once(&claim).chain(&claims).map(|claim| claim.fence.clone()).collect();
            if let Err(error) = shared.deliveries.renew(held, shared.lease).await {
                tracing::debug!(route = route.name.as_str(), %error, "leases could not be renewed");
            }
            renewed = Instant::now();
        }
        let _under_way = shared.begin(1);
        match shared.deliveries.call(Arc::clone(route), vec![claim.clone()]).await {
            Ok(settled) => {
                let done = settled.iter().filter(|settled| **settled == Settled::Done).count();
                shared.metrics.route(route.name.as_str()).settled(done);
            }
            Err(error) => {
                // The journal refused; none of these has run to its end.
                let fences = std::iter::once(&claim).chain(&claims).map(|claim| claim.fence.clone()).collect();
                shared.deliveries.give_back(fences).await?;
                return Err(error);
            }
        }
    }
    Ok(full)
}

/// Takes back what nobody holds any more.
pub(super) async fn reclaim(shared: &Shared, route: &Arc<Route>) {
    match shared.deliveries.reclaim(Arc::clone(route)).await {
        Ok(0) => {}
        Ok(count) => {
            shared.metrics.route(route.name.as_str()).lost(count);
            tracing::warn!(route = route.name.as_str(), count, "leases ran out");
        }
        Err(error) => tracing::debug!(route = route.name.as_str(), %error, "leases could not be looked at"),
    }
}

/// What is due and could not be had is somebody else's at the moment, who may be done with it soon.
const SOMEBODY_ELSES: Duration = Duration::from_millis(5);

/// How long there is nothing to do, as far as is known.
pub(super) async fn until_due(shared: &Shared, route: &RouteName) -> Duration {
    match shared.deliveries.next_due(route.clone()).await {
        Ok(Some(UnixMicros(due))) => match due.saturating_sub(shared.clock.steady().0) {
            wait @ 1.. => Duration::from_micros(wait.unsigned_abs()).min(LOOK_EVERY),
            _ => SOMEBODY_ELSES,
        },
        Ok(None) => LOOK_EVERY,
        Err(_) => shared.after_trouble(),
    }
}

/// Waits until what is paused changes.
pub(super) async fn wait_for_change<T>(changes: &mut watch::Receiver<T>, end: &mut watch::Receiver<bool>) {
    tokio::select! {
        _ = changes.changed() => {}
        () = ended(end) => {}
    }
}

/// Waits. Returns whether the end has come.
pub(super) async fn rest(wait: Duration, end: &mut watch::Receiver<bool>) -> bool {
    tokio::select! {
        () = tokio::time::sleep(wait) => false,
        () = ended(end) => true,
    }
}

/// Waits for the end. A worker that is gone has ended too.
pub(super) async fn ended(end: &mut watch::Receiver<bool>) {
    let _ = end.wait_for(|end| *end).await;
}
