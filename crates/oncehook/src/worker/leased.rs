//! The lane of a leased route: its attempts leave the process (HTTP, an external database), run foreign code, or ask the
//! provider first. Several are under way at once, each under a lease that is renewed while it runs; outcomes that come together
//! are settled together.
//!
//! Does not: know what an attempt does (`attempt`), or forget guards (`janitor`); it only starts both.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::task::{self, JoinError, JoinSet};

use super::attempt::{Attempts, Outcome, UNREACHED};
use super::breaker::{Breaker, Permit};
use super::lane::{ended, reclaim, rest, until_due};
use super::outage::Outage;
use super::{LOOK_EVERY, Shared, janitor, locked};
use crate::delivery::{Cause, Claim, FailedAttempt, Fence, Settled, Settlement, Verdict};
use crate::handler::Handler;
use crate::handler::elsewhere::Comparison;
use crate::journal::WorkError;
use crate::retry::Chance;
use crate::route::{Route, Tried};

/// How long attempts may take to end once the worker is to stop.
const GRACE: Duration = Duration::from_secs(5);

/// The pause between the last tries to write outcomes down when the worker stops.
const BETWEEN_LAST_TRIES: Duration = Duration::from_millis(250);

/// The mark of a journal that does not know its own. Guards with it are kept.
const NO_MARK: i64 = 0;

/// What the attempts of a batch came to, or that it panicked.
type Ended = Result<(task::Id, Vec<Outcome>), JoinError>;

struct Lane {
    shared: Arc<Shared>,
    route: Arc<Route>,
    attempts: Arc<Attempts>,
    breaker: Breaker,
    /// What the breaker said last, and what the log knows of it.
    breaker_state: &'static str,
    outage: Outage,
    /// What was wrong with the destination the last time.
    trouble: Cow<'static, str>,
    chance: Chance,
    running: JoinSet<Vec<Outcome>>,
    /// What runs, since when, so that it can be renewed and given back.
    claims: HashMap<task::Id, (Vec<Claim>, Instant)>,
    /// What came to an end and is not settled yet, and what the log says of it if it failed.
    ended: Vec<(Settlement, Option<FailedAttempt>)>,
    /// What is given back, and is not yet.
    back: Vec<Fence>,
}

/// Runs a route until the end.
pub(super) async fn run(shared: Arc<Shared>, route: Arc<Route>, mut end: watch::Receiver<bool>) {
    let mark = match route.handler {
        Handler::Elsewhere(_) => loop {
            match shared.deliveries.mark().await {
                Ok(mark) => break mark,
                Err(WorkError::Unsupported(_)) => break NO_MARK,
                Err(WorkError::Unavailable(_)) if rest(shared.after_trouble(), &mut end).await => return,
                Err(WorkError::Unavailable(_)) => {}
            }
        },
        _ => NO_MARK,
    };
    let comparison = Comparison::of(&route);
    let attempts = Arc::new(Attempts { shared, route, mark, comparison });
    let lane = Lane::new(Arc::clone(&attempts));
    if mark == NO_MARK {
        return lane.run(end).await;
    }
    tokio::join!(lane.run(end.clone()), janitor::forget_guards(&attempts, end));
}

impl Lane {
    fn new(attempts: Arc<Attempts>) -> Self {
        Self {
            shared: Arc::clone(&attempts.shared),
            route: Arc::clone(&attempts.route),
            breaker: Breaker::new(attempts.route.breaker),
            attempts,
            breaker_state: "closed",
            outage: Outage::default(),
            trouble: "".into(),
            chance: Chance::random(),
            running: JoinSet::new(),
            claims: HashMap::new(),
            ended: Vec::new(),
            back: Vec::new(),
        }
    }

    async fn run(mut self, mut end: watch::Receiver<bool>) {
        let mut changes = self.shared.deliveries.changes();
        let mut paused = self.shared.paused.subscribe();
        let mut renewals = tokio::time::interval(self.shared.renew_every());
        renewals.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        while !*end.borrow() {
            changes.mark_unchanged();
            let wait = self.step().await;
            tokio::select! {
                biased;
                () = ended(&mut end) => {}
                // Before the outcomes: however many there are, leases are kept.
                _ = renewals.tick() => self.renew().await,
                Some(over) = self.running.join_next_with_id(), if !self.running.is_empty() => self.collect(over),
                _ = changes.changed() => {}
                _ = paused.changed() => {}
                () = tokio::time::sleep(wait) => {}
            }
        }
        self.stop().await;
    }

    /// Settles what ended and takes what is due. Returns how long there is nothing else to do.
    async fn step(&mut self) -> Duration {
        while let Some(ended) = self.running.try_join_next_with_id() {
            self.collect(ended);
        }
        if !self.settle().await {
            return self.shared.after_trouble();
        }
        loop {
            if let Some(wait) = self.take().await {
                return wait;
            }
        }
    }

    /// Takes what is due, as much as goes together. Returns how long there is nothing else to do, or nothing if there may
    /// be more that can leave at once.
    async fn take(&mut self) -> Option<Duration> {
        let (batch, at_once) = self.attempts.limits();
        let free = at_once.saturating_sub(self.claims.len());
        if free == 0 || self.shared.is_paused(&self.route) {
            return Some(LOOK_EVERY);
        }
        let now = Instant::now();
        let (limit, probe) = match self.breaker.allows(now) {
            // Requests leave one by one, but are leased together.
            Permit::All => (if batch == 1 { free } else { batch }, false),
            Permit::One => (1, true),
            Permit::None { until } => return Some(until.saturating_duration_since(now).min(LOOK_EVERY)),
        };
        self.note_breaker();
        let claimed = self.shared.deliveries.claim(Arc::clone(&self.route), limit, self.shared.lease).await;
        let claims = claimed.unwrap_or_else(|error| {
            tracing::debug!(route = self.route.name.as_str(), %error, "the journal refused work");
            Vec::new()
        });
        if claims.is_empty() {
            if probe {
                self.breaker.unused(Instant::now());
            }
            return Some(until_due(&self.shared, &self.route.name).await.max(Duration::from_millis(1)));
        }
        let full = claims.len() == limit;
        let mut claims = claims.into_iter().peekable();
        while claims.peek().is_some() {
            self.begin(claims.by_ref().take(batch).collect());
        }
        // The next round looks whether there is a place for more.
        if full || self.claims.len() >= at_once { None } else { Some(until_due(&self.shared, &self.route.name).await) }
    }

    fn begin(&mut self, claims: Vec<Claim>) {
        let (attempts, running) = (Arc::clone(&self.attempts), claims.clone());
        self.shared.under_way.fetch_add(claims.len(), Ordering::Relaxed);
        let attempt = self.running.spawn(async move {
            crate::crash::point(if attempts.route.after.is_some() { "in_follow_up" } else { "in_handler" });
            attempts.run(running).await
        });
        self.claims.insert(attempt.id(), (claims, Instant::now()));
    }

    /// Decides what becomes of the deliveries of a batch.
    fn collect(&mut self, ended: Ended) {
        let id = ended.as_ref().map_or_else(JoinError::id, |(id, _)| *id);
        let Some((claims, started)) = self.claims.remove(&id) else { return };
        self.shared.under_way.fetch_sub(claims.len(), Ordering::Relaxed);
        // Functions run inside the process, and one after the other: the time of a batch says nothing of them.
        if self.route.fetch.is_some() || !matches!(self.route.handler, Handler::Function(_)) {
            let metrics = self.shared.metrics.route(self.route.name.as_str());
            claims.iter().for_each(|_| metrics.took(started.elapsed()));
        }
        // A panic in the attempt is a failure of the attempt.
        let failed = |panic| claims.iter().map(|claim| self.attempts.panicked(claim, &panic)).collect();
        let outcomes = ended.map_or_else(failed, |(_, outcomes)| outcomes);
        claims.into_iter().zip(outcomes).for_each(|(claim, outcome)| self.decide(claim, outcome));
        self.note_breaker();
    }

    fn note_breaker(&mut self) {
        let (name, state) = (self.route.name.as_str(), self.breaker.state());
        if std::mem::replace(&mut self.breaker_state, state) != state {
            self.shared.metrics.route(name).set_breaker(state);
            locked(&self.shared.breakers).insert(name.to_owned(), state);
        }
        if let Some(line) = self.outage.note((state, self.breaker.rest()), &self.trouble, Instant::now()) {
            let (shared, route) = (Arc::clone(&self.shared), name.to_owned());
            // Counting what waits may take a while, and the lane goes on meanwhile.
            tokio::spawn(async move { line.log(&route, shared.count_waiting(&route).await) });
        }
    }

    fn decide(&mut self, claim: Claim, outcome: Outcome) {
        match &outcome {
            Outcome::Took(_) | Outcome::Superseded(_) | Outcome::Settled(_) => self.breaker.succeeded(),
            // It answered, so it is up.
            Outcome::Failed(failure) if failure.answered => self.breaker.succeeded(),
            Outcome::Failed(failure) if failure.cause == Cause::Destination => {
                self.trouble = failure.summary.clone();
                self.breaker.failed(Instant::now());
            }
            Outcome::Back { down: true } => {
                self.trouble = Cow::Borrowed(UNREACHED);
                self.breaker.failed(Instant::now());
            }
            // The destination was never asked. If this was a probe, another one may go.
            Outcome::Failed(_) | Outcome::Back { down: false } => self.breaker.unused(Instant::now()),
        }
        let (attempt, limit) = (claim.fence.attempt, claim.attempt_limit);
        let now = self.shared.clock.steady();
        let verdict = match outcome {
            Outcome::Took(result) => Verdict::Succeeded(result),
            Outcome::Superseded(reason) => Verdict::Superseded(reason),
            Outcome::Failed(failure) => {
                let tried = Tried { attempt, limit, parked_at: claim.parked_at };
                self.route.after_failure(failure, tried, now, self.chance.draw())
            }
            Outcome::Settled(settled) => {
                let metrics = self.shared.metrics.route(self.route.name.as_str());
                return metrics.count("settled", usize::from(settled == Settled::Done));
            }
            Outcome::Back { .. } => return self.back.push(claim.fence),
        };
        let failed = FailedAttempt::of(claim.event.id, attempt, limit, &verdict, now);
        let followups = self.route.followups.clone();
        self.ended.push((Settlement { fence: claim.fence, verdict, followups }, failed));
    }

    /// Writes outcomes down. What could not be written is kept for the next time; its lease is the journal's patience.
    async fn settle(&mut self) -> bool {
        if !self.back.is_empty() {
            if let Err(error) = self.shared.deliveries.give_back(self.back.clone()).await {
                tracing::warn!(route = self.route.name.as_str(), %error, "leases could not be given back yet");
                return false;
            }
            self.back.clear();
        }
        if self.ended.is_empty() {
            return true;
        }
        crate::crash::point("before_settle");
        let settlements = self.ended.iter().map(|(settlement, _)| settlement.clone()).collect();
        let settled = self.shared.deliveries.settle(settlements).await.inspect_err(|error| {
            tracing::warn!(route = self.route.name.as_str(), %error, "outcomes could not be written yet");
        });
        let Ok(settled) = settled else { return false };
        for ((settlement, failed), settled) in self.ended.iter().zip(settled) {
            self.note(settlement, failed.as_slice(), settled);
        }
        self.ended.clear();
        true
    }

    /// Counts an outcome that was written down, and logs it if it failed.
    fn note(&self, settlement: &Settlement, failed: &[FailedAttempt], settled: Settled) {
        let (route, metrics) = (self.route.name.as_str(), self.shared.metrics.route(self.route.name.as_str()));
        let event = settlement.fence.delivery.event;
        match settled {
            Settled::Lost => {
                metrics.count("lost", 1);
                tracing::warn!(%event, route, "an attempt ended after its lease");
            }
            Settled::Done => {
                metrics.count(settlement.verdict.state().as_str(), 1);
                self.route.report(failed);
            }
        }
    }

    fn fences(&self) -> Vec<Fence> {
        self.claims.values().flat_map(|(claims, _)| claims).map(|claim| claim.fence.clone()).collect()
    }

    /// Keeps the leases of what runs, and takes those back that have run out.
    async fn renew(&mut self) {
        let mut fences = self.fences();
        fences.extend(self.ended.iter().map(|(settlement, _)| settlement.fence.clone()));
        fences.extend(self.back.iter().cloned());
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
        while let Ok(Some(ended)) = tokio::time::timeout_at(deadline, self.running.join_next_with_id()).await {
            self.collect(ended);
        }
        self.running.shutdown().await;
        let cut_off = self.fences();
        self.shared.under_way.fetch_sub(cut_off.len(), Ordering::Relaxed);
        for _ in 0..3 {
            if self.settle().await {
                break;
            }
            tokio::time::sleep(BETWEEN_LAST_TRIES).await;
        }
        if !cut_off.is_empty()
            && let Err(error) = self.shared.deliveries.give_back(cut_off).await
        {
            tracing::warn!(route = self.route.name.as_str(), %error, "leases could not be given back; they will run out");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Clock;
    use crate::delivery::{DeliveryId, Failure, HandedEvent, RouteName};
    use crate::event::{EventId, SourceName};
    use crate::journal::Journal as _;
    use crate::journal::sqlite::{SqliteJournal, SqliteOptions};
    use crate::observe::Metrics;

    #[tokio::test(start_paused = true)]
    async fn at_the_end_an_outcome_is_offered_three_times_with_a_pause_between() {
        let directory = tempfile::tempdir().unwrap();
        let closed = SqliteJournal::open(&SqliteOptions::new(directory.path().join("journal"))).unwrap();
        closed.close().await;
        let metrics = Arc::new(Metrics::new());
        let shared = Arc::new(Shared::new(Arc::new(closed), Clock::system(), metrics, Duration::from_secs(15)));
        let name = RouteName::new("orders").unwrap();
        let nothing = |_: &rusqlite::Connection, _: &HandedEvent| Ok::<_, Failure>(None);
        let source = SourceName::new("shop").unwrap();
        let route = Arc::new(Route::new(name.clone(), source, Handler::Function(Arc::new(nothing))));
        let mut lane = Lane::new(Arc::new(Attempts { shared, route, mark: NO_MARK, comparison: None }));
        let delivery = DeliveryId { event: EventId::from_bytes([7; 16]), route: name, epoch: 0 };
        let (fence, verdict) = (Fence { delivery, attempt: 1 }, Verdict::Succeeded(None));
        lane.ended.push((Settlement { fence, verdict, followups: Vec::new() }, None));
        let begun = tokio::time::Instant::now();
        lane.stop().await;
        assert_eq!(begun.elapsed(), 3 * BETWEEN_LAST_TRIES, "a pause after each of three tries that were refused");
    }
}
