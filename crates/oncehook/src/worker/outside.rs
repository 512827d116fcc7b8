//! A lane whose attempts leave the process: HTTP. Several are under way at once, each under a lease that is renewed while
//! it runs; outcomes that come together are settled together.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use tokio::sync::watch;
use tokio::task::{self, JoinError, JoinSet};

use super::breaker::{Breaker, Permit};
use super::lane::{ended, reclaim, rest, until_due};
use super::{AFTER_TROUBLE, GRACE, Shared};
use crate::delivery::{Cause, Claim, Failure, Fence, Settled, Settlement, Verdict};
use crate::handler::HttpHandler;
use crate::retry::Chance;
use crate::route::{Route, Tried};

/// What an attempt came to, or that it panicked.
type Ended = Result<(task::Id, Result<Option<String>, Failure>), JoinError>;

struct Lane {
    shared: Arc<Shared>,
    route: Arc<Route>,
    handler: Arc<HttpHandler>,
    breaker: Breaker,
    chance: Chance,
    running: JoinSet<Result<Option<String>, Failure>>,
    /// What runs, since when, so that it can be renewed and given back.
    claims: HashMap<task::Id, (Claim, Instant)>,
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
        claims: HashMap::new(),
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
            // Before the outcomes: however many there are, leases are kept.
            _ = renewals.tick() => lane.renew().await,
            Some(over) = lane.running.join_next_with_id(), if !lane.running.is_empty() => lane.collect(over),
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
        while let Some(ended) = self.running.try_join_next_with_id() {
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
        let (handler, clock) = (Arc::clone(&self.handler), self.shared.clock.clone());
        let follows = self.route.after.is_some();
        let running = claim.clone();
        let attempt = self.running.spawn(async move {
            crate::crash::point(if follows { "in_follow_up" } else { "in_handler" });
            handler.deliver(&running, clock.now()).await
        });
        self.claims.insert(attempt.id(), (claim, Instant::now()));
    }

    /// Decides what becomes of a delivery.
    fn collect(&mut self, ended: Ended) {
        let (id, outcome) = match ended {
            Ok(ended) => ended,
            // A panic in the attempt is a failure of the attempt.
            Err(error) => {
                (error.id(), Err(Failure::retry(Cause::Ours, format!("the attempt panicked: {error}"))))
            }
        };
        let Some((claim, started)) = self.claims.remove(&id) else { return };
        self.shared.metrics.route(self.route.name.as_str()).took(started.elapsed());
        let verdict = match outcome {
            Ok(result) => {
                self.breaker.succeeded();
                Verdict::Succeeded(result)
            }
            Err(failure) => {
                match failure.cause {
                    // It answered, so it is up.
                    _ if failure.answered => self.breaker.succeeded(),
                    Cause::Destination => self.breaker.failed(Instant::now()),
                    // The destination was never asked. If this was a probe, another one may go.
                    Cause::Handler | Cause::Ours | Cause::Poison | Cause::Prerequisite => {
                        self.breaker.unused(Instant::now())
                    }
                }
                let (attempt, limit) = (claim.fence.attempt, claim.attempt_limit);
                let tried = Tried { attempt, limit, parked_at: claim.parked_at };
                self.route.after_failure(failure, tried, self.shared.clock.steady(), self.chance.draw())
            }
        };
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
                for (settlement, settled) in self.ended.iter().zip(settled) {
                    self.note(settlement, settled);
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

    /// Counts an outcome that was written down, and says aloud what a person must look at.
    fn note(&self, settlement: &Settlement, settled: Settled) {
        let (route, metrics) =
            (self.route.name.as_str(), self.shared.metrics.route(self.route.name.as_str()));
        let event = settlement.fence.delivery.event;
        match (&settlement.verdict, settled) {
            (_, Settled::Lost) => {
                metrics.lost(1);
                tracing::warn!(%event, route, "an attempt ended after its lease");
            }
            (Verdict::Succeeded(_), Settled::Done) => metrics.succeeded(1),
            (Verdict::RetryAt(..), Settled::Done) => metrics.retrying(1),
            (Verdict::Parked(..), Settled::Done) => metrics.parked(1),
            (Verdict::Superseded(_), Settled::Done) => metrics.superseded(1),
            (Verdict::Dead(failure), Settled::Done) => {
                metrics.dead();
                tracing::error!(%event, route, error = failure.message.as_str(), "a delivery is dead");
            }
        }
    }

    fn fences(&self) -> Vec<Fence> {
        self.claims.values().map(|(claim, _)| claim.fence.clone()).collect()
    }

    /// Keeps the leases of what runs, and takes those back that nobody holds.
    async fn renew(&mut self) {
        let mut fences = self.fences();
        fences.extend(self.ended.iter().map(|settlement| settlement.fence.clone()));
        if !fences.is_empty()
            && let Err(error) = self.shared.deliveries.renew(fences, self.shared.lease).await
        {
            // Then nothing is taken back either: it might be our own.
            tracing::debug!(route = self.route.name.as_str(), %error, "leases could not be renewed");
            return;
        }
        reclaim(&self.shared, &self.route).await;
    }

    /// Lets what runs come to an end for a moment, then gives the rest back.
    async fn stop(mut self) {
        let deadline = tokio::time::Instant::now() + GRACE;
        while let Ok(Some(ended)) = tokio::time::timeout_at(deadline, self.running.join_next_with_id()).await
        {
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
