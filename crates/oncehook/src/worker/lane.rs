//! A lane: one route's work, batch after batch. Statements that run inside the journal's transaction are run here; all other
//! routes are `leased`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use oncehook_verify::UnixMicros;
use tokio::sync::watch;

use super::{LOOK_EVERY, Shared, leased};
use crate::delivery::RouteName;
use crate::handler::Handler;
use crate::route::{Route, SQL_BATCH};

/// Runs a route until the end.
pub(super) async fn run(shared: Arc<Shared>, route: Arc<Route>, mut end: watch::Receiver<bool>) {
    // Nothing runs before it is known what is paused; a journal that cannot say is asked again.
    while shared.learn_pauses().await.is_err() {
        if rest(shared.after_trouble(), &mut end).await {
            return;
        }
    }
    match (&route.handler, &route.fetch) {
        (Handler::Sql(_), None) => apply(&shared, &route, end).await,
        // To fetch takes time, and nothing is locked meanwhile: leased, and run inside the journal afterwards.
        _ => leased::run(shared, route, end).await,
    }
}

/// Runs batches of statements until the end.
async fn apply(shared: &Shared, route: &Arc<Route>, mut end: watch::Receiver<bool>) {
    let mut changes = shared.deliveries.changes();
    let mut paused = shared.paused.subscribe();
    let mut reclaimed: Option<Instant> = None;
    while !*end.borrow() {
        if shared.is_paused(route) {
            tokio::select! {
                _ = paused.changed() => {}
                () = ended(&mut end) => {}
            }
            continue;
        }
        if reclaimed.is_none_or(|at| at.elapsed() >= shared.renew_every()) {
            reclaim(shared, route).await;
            reclaimed = Some(Instant::now());
        }
        changes.mark_unchanged();
        let progress = match shared.deliveries.apply(Arc::clone(route), SQL_BATCH).await {
            Ok(progress) => progress,
            Err(error) => {
                tracing::debug!(route = route.name.as_str(), %error, "the journal refused work");
                rest(shared.after_trouble(), &mut end).await;
                continue;
            }
        };
        shared.is_well();
        let metrics = shared.metrics.route(route.name.as_str());
        metrics.count("succeeded", progress.succeeded);
        metrics.count("retrying", progress.retrying);
        metrics.count("parked", progress.parked);
        metrics.count("superseded", progress.superseded);
        metrics.count("dead", progress.dead);
        route.report(&progress.failed);
        if !progress.more {
            let wait = until_due(shared, &route.name).await;
            tokio::select! {
                // The sender lives as long as the journal, which the lane holds.
                _ = changes.changed() => {}
                () = tokio::time::sleep(wait) => {}
                _ = paused.changed() => {}
                () = ended(&mut end) => {}
            }
        }
    }
}

/// Takes back leases that have run out.
pub(super) async fn reclaim(shared: &Shared, route: &Arc<Route>) {
    match shared.deliveries.reclaim(Arc::clone(route)).await {
        Ok(0) => {}
        Ok(count) => {
            shared.metrics.route(route.name.as_str()).count("lost", count);
            tracing::warn!(route = route.name.as_str(), count, "leases ran out");
        }
        Err(error) => tracing::debug!(route = route.name.as_str(), %error, "leases could not be looked at"),
    }
}

/// What is due and could not be had is another worker's at the moment, which may be done with it soon.
const ANOTHER_WORKERS: Duration = Duration::from_millis(5);

/// How long there is nothing to do, as far as is known.
pub(super) async fn until_due(shared: &Shared, route: &RouteName) -> Duration {
    match shared.deliveries.next_due(route.clone()).await {
        Ok(Some(UnixMicros(due))) => match due.saturating_sub(shared.clock.steady().0) {
            wait @ 1.. => Duration::from_micros(wait.unsigned_abs()).min(LOOK_EVERY),
            _ => ANOTHER_WORKERS,
        },
        Ok(None) => LOOK_EVERY,
        Err(_) => shared.after_trouble(),
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
