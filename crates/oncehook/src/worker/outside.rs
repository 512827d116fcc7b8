//! A lane whose attempts leave the process: HTTP. Several are under way at once, each under a lease that is renewed while
//! it runs; outcomes that come together are settled together.

use std::sync::Arc;
use std::time::Instant;

use tokio::sync::watch;
use tokio::task::JoinSet;

use super::breaker::{Breaker, Permit};
use super::lane::{ended, reclaim, rest, until_due};
use super::{AFTER_TROUBLE, GRACE, Shared};
use crate::delivery::{Cause, Claim, Failure, Fence, Settled, Settlement, Verdict};
use crate::handler::HttpHandler;
use crate::retry::Chance;
use crate::route::Route;

/// An attempt that came to an end.
struct Ended {
    claim: Claim,
    outcome: Result<Option<String>, Failure>,
    took: std::time::Duration,
}

struct Lane {
    shared: Arc<Shared>,
    route: Arc<Route>,
    handler: Arc<HttpHandler>,
    breaker: Breaker,
    chance: Chance,
    running: JoinSet<Ended>,
    /// What runs, so that it can be renewed and given back.
    claims: Vec<Claim>,
    /// What came to an end and is not settled yet.
    ended: Vec<Settlement>,
}

/// Runs a route until the end.
pub(super) async fn run(
    shared: Arc<Shared>,
    route: Arc<Route>,
    handler: Arc<HttpHandler>,
    mut end: watch::Receiver<bool>,
) {
    let mut changes = shared.deliveries.changes();
    let mut paused = shared.paused.subscribe();
    let mut lane = Lane {
        breaker: Breaker::new(route.breaker),
        chance: Chance::random(),
        running: JoinSet::new(),
        claims: Vec::new(),
        ended: Vec::new(),
        shared,
        route,
        handler,
    };
    let mut renewals = tokio::time::interval(lane.shared.renew_every());
    renewals.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    while !*end.borrow() {
        changes.mark_unchanged();
        let wait = lane.step().await;
        tokio::select! {
            biased;
            () = ended(&mut end) => {}
            Some(over) = lane.running.join_next(), if !lane.running.is_empty() => lane.collect(over),
            _ = renewals.tick() => lane.renew().await,
            _ = changes.changed() => {}
            _ = paused.changed() => {}
            () = tokio::time::sleep(wait) => {}
        }
    }
    lane.stop().await;
}

impl Lane {
    /// Settles what ended and takes what is due. Returns how long there is nothing else to do.
    async fn step(&mut self) -> std::time::Duration {
        while let Some(ended) = self.running.try_join_next() {
            self.collect(ended);
        }
        if !self.settle().await {
            return AFTER_TROUBLE;
        }
        let free = self.route.concurrency.saturating_sub(self.claims.len());
        if free == 0 || self.shared.is_paused(&self.route) {
            return super::LOOK_EVERY;
        }
        let now = Instant::now();
        let (limit, probe) = match self.breaker.allows(now) {
            Permit::All => (free, false),
            Permit::One => (1, true),
            Permit::None { until } => return until.saturating_duration_since(now).min(super::LOOK_EVERY),
        };
        self.shared.note_breaker(&self.route, self.breaker.state());
        let claimed = self.shared.deliveries.claim(Arc::clone(&self.route), limit, self.shared.lease).await;
        let claims = claimed.unwrap_or_else(|error| {
            tracing::debug!(route = self.route.name.as_str(), %error, "the journal refused work");
            Vec::new()
        });
        if claims.is_empty() {
            if probe {
                self.breaker.unused(Instant::now());
            }
            return until_due(&self.shared, &self.route.name).await.max(std::time::Duration::from_millis(1));
        }
        let full = claims.len() == limit;
        claims.into_iter().for_each(|claim| self.begin(claim));
        if full { super::LOOK_EVERY } else { until_due(&self.shared, &self.route.name).await }
    }

    fn begin(&mut self, claim: Claim) {
        self.claims.push(claim.clone());
        let (handler, clock) = (Arc::clone(&self.handler), self.shared.clock.clone());
        let follows = self.route.after.is_some();
        self.running.spawn(async move {
            crate::crash::point(if follows { "in_follow_up" } else { "in_handler" });
            let started = Instant::now();
            // A panic in the attempt is a failure of the attempt.
            let attempt = {
                let claim = claim.clone();
                tokio::spawn(async move { handler.deliver(&claim, clock.now()).await })
            };
            let outcome = AbortOnDrop(attempt).await.unwrap_or_else(|error| {
                Err(Failure::retry(Cause::Ours, format!("the attempt panicked: {error}")))
            });
            Ended { claim, outcome, took: started.elapsed() }
        });
    }

    /// Decides what becomes of a delivery.
    fn collect(&mut self, ended: Result<Ended, tokio::task::JoinError>) {
        // The task itself does nothing that could fail; if it was aborted, its claim is given back.
        let Ok(Ended { claim, outcome, took }) = ended else { return };
        let metrics = self.shared.metrics.route(self.route.name.as_str());
        metrics.took(took);
        self.claims.retain(|running| running.fence != claim.fence);
        let verdict = match outcome {
            Ok(result) => {
                self.breaker.succeeded();
                metrics.succeeded(1);
                Verdict::Succeeded(result)
            }
            Err(failure) => {
                if failure.cause == Cause::Destination {
                    self.breaker.failed(Instant::now());
                }
                let (attempt, limit) = (claim.fence.attempt, claim.attempt_limit);
                let now = self.shared.clock.steady();
                self.route.retry.after_failure(failure, attempt, limit, now, self.chance.draw())
            }
        };
        match &verdict {
            Verdict::Succeeded(_) => {}
            Verdict::RetryAt(..) => metrics.retrying(1),
            Verdict::Dead(failure) => {
                metrics.dead();
                let (event, route) = (claim.fence.delivery.event, self.route.name.as_str());
                tracing::error!(%event, route, error = failure.message.as_str(), "a delivery is dead");
            }
        }
        self.shared.note_breaker(&self.route, self.breaker.state());
        let followups = self.route.followups.clone();
        self.ended.push(Settlement { fence: claim.fence, verdict, followups });
    }

    /// Writes outcomes down. What could not be written is kept for the next time; its lease is the journal's patience.
    async fn settle(&mut self) -> bool {
        if self.ended.is_empty() {
            return true;
        }
        crate::crash::point("before_settle");
        match self.shared.deliveries.settle(self.ended.clone()).await {
            Ok(settled) => {
                let lost = settled.iter().filter(|settled| **settled == Settled::Lost).count();
                if lost > 0 {
                    self.shared.metrics.route(self.route.name.as_str()).lost(lost);
                    tracing::warn!(
                        route = self.route.name.as_str(),
                        lost,
                        "attempts ended after their leases"
                    );
                }
                self.ended.clear();
                true
            }
            Err(error) => {
                tracing::warn!(route = self.route.name.as_str(), %error, "outcomes could not be written yet");
                false
            }
        }
    }

    fn fences(&self) -> Vec<Fence> {
        self.claims.iter().map(|claim| claim.fence.clone()).collect()
    }

    /// Keeps the leases of what runs, and takes those back that nobody holds.
    async fn renew(&mut self) {
        let mut fences = self.fences();
        fences.extend(self.ended.iter().map(|settlement| settlement.fence.clone()));
        if !fences.is_empty()
            && let Err(error) = self.shared.deliveries.renew(fences, self.shared.lease).await
        {
            tracing::debug!(route = self.route.name.as_str(), %error, "leases could not be renewed");
        }
        reclaim(&self.shared, &self.route).await;
    }

    /// Lets what runs come to an end for a moment, then gives the rest back.
    async fn stop(mut self) {
        let deadline = tokio::time::Instant::now() + GRACE;
        while let Ok(Some(ended)) = tokio::time::timeout_at(deadline, self.running.join_next()).await {
            self.collect(ended);
        }
        self.running.shutdown().await;
        let mut end = watch::Sender::new(false).subscribe();
        for _ in 0..3 {
            if self.settle().await {
                break;
            }
            rest(AFTER_TROUBLE, &mut end).await;
        }
        if !self.claims.is_empty()
            && let Err(error) = self.shared.deliveries.give_back(self.fences()).await
        {
            tracing::warn!(route = self.route.name.as_str(), %error, "leases could not be given back; they will run out");
        }
    }
}

/// Ends the inner task with the outer one.
struct AbortOnDrop<T>(tokio::task::JoinHandle<T>);

impl<T> std::future::Future for AbortOnDrop<T> {
    type Output = Result<T, tokio::task::JoinError>;

    fn poll(
        mut self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Self::Output> {
        std::pin::Pin::new(&mut self.0).poll(context)
    }
}

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}
