//! A lane whose attempts leave the process, over HTTP or to another database. Several are under way at once, each under a
//! lease that is renewed while it runs; outcomes that come together are settled together.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use tokio::sync::watch;
use tokio::task::{self, JoinError, JoinSet};

use super::breaker::{Breaker, Permit};
use super::errand::{Came, Errand, UNREACHED};
use super::lane::{ended, reclaim, until_due};
use super::{BreakerNote, GRACE, Shared};
use crate::delivery::{Cause, Claim, FailedAttempt, Fence, Settled, Settlement, Verdict};
use crate::retry::Chance;
use crate::route::{Route, Tried};

/// The pause between the last tries to write outcomes down when the worker stops.
const BETWEEN_LAST_TRIES: std::time::Duration = std::time::Duration::from_millis(250);

/// What the attempts of a batch came to, or that it panicked.
type Ended = Result<(task::Id, Vec<Came>), JoinError>;

struct Lane {
    shared: Arc<Shared>,
    route: Arc<Route>,
    errand: Errand,
    breaker: Breaker,
    chance: Chance,
    running: JoinSet<Vec<Came>>,
    /// What runs, since when, so that it can be renewed and given back.
    claims: HashMap<task::Id, (Vec<Claim>, Instant)>,
    /// What came to an end and is not settled yet, and what the log says of it if it failed.
    ended: Vec<Settlement>,
    failed: Vec<Option<FailedAttempt>>,
    /// What is given back, and is not yet.
    back: Vec<Fence>,
    /// What was wrong with the destination the last time.
    trouble: Cow<'static, str>,
}

/// Runs a route until the end.
pub(super) async fn run(shared: Arc<Shared>, route: Arc<Route>, errand: Errand, mut end: watch::Receiver<bool>) {
    let mut changes = shared.deliveries.changes();
    let mut paused = shared.paused.subscribe();
    let mut lane = Lane {
        breaker: Breaker::new(route.breaker),
        chance: Chance::random(),
        running: JoinSet::new(),
        claims: HashMap::new(),
        ended: Vec::new(),
        failed: Vec::new(),
        trouble: "".into(),
        back: Vec::new(),
        shared,
        route,
        errand,
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
    async fn take(&mut self) -> Option<std::time::Duration> {
        let at_once = self.errand.at_once(self.route.concurrency);
        let free = at_once.saturating_sub(self.claims.len());
        if free == 0 || self.shared.is_paused(&self.route) {
            return Some(super::LOOK_EVERY);
        }
        let batch = self.errand.batch();
        let now = Instant::now();
        let (limit, probe) = match self.breaker.allows(now) {
            // Requests leave one by one, but are leased together.
            Permit::All => (if batch == 1 { free } else { batch }, false),
            Permit::One => (1, true),
            Permit::None { until } => {
                return Some(until.saturating_duration_since(now).min(super::LOOK_EVERY));
            }
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
            let wait = until_due(&self.shared, &self.route.name).await;
            return Some(wait.max(std::time::Duration::from_millis(1)));
        }
        let full = claims.len() == limit;
        let mut claims = claims.into_iter().peekable();
        while claims.peek().is_some() {
            self.begin(claims.by_ref().take(batch).collect());
        }
        if full { None } else { Some(until_due(&self.shared, &self.route.name).await) }
    }

    fn begin(&mut self, claims: Vec<Claim>) {
        let (errand, clock) = (self.errand.clone(), self.shared.clock.clone());
        let follows = self.route.after.is_some();
        let running = claims.clone();
        let under_way = self.shared.begin(claims.len());
        let attempt = self.running.spawn(async move {
            let _under_way = under_way;
            crate::crash::point(if follows { "in_follow_up" } else { "in_handler" });
            errand.run(&running, &clock).await
        });
        self.claims.insert(attempt.id(), (claims, Instant::now()));
    }

    /// Decides what becomes of the deliveries of a batch.
    fn collect(&mut self, ended: Ended) {
        let (id, came) = match ended {
            Ok((id, came)) => (id, Ok(came)),
            Err(error) => (error.id(), Err(format!("the attempt panicked: {error}"))),
        };
        let Some((claims, started)) = self.claims.remove(&id) else { return };
        let metrics = self.shared.metrics.route(self.route.name.as_str());
        claims.iter().for_each(|_| metrics.took(started.elapsed()));
        match came {
            Ok(came) => claims.into_iter().zip(came).for_each(|(claim, came)| self.decide(claim, came)),
            // A panic in the attempt is a failure of the attempt.
            Err(told) => claims.into_iter().for_each(|claim| {
                let came = self.errand.panicked(&claim, &told);
                self.decide(claim, came);
            }),
        }
        self.note_breaker();
    }

    fn note_breaker(&self) {
        let (state, rest) = (self.breaker.state(), self.breaker.rest());
        self.shared.note_breaker(&self.route, BreakerNote { state, rest, trouble: self.trouble.clone() });
    }

    fn decide(&mut self, claim: Claim, came: Came) {
        let verdict = match came {
            Came::Took(result) => {
                self.breaker.succeeded();
                Verdict::Succeeded(result)
            }
            Came::Superseded(reason) => {
                self.breaker.succeeded();
                Verdict::Superseded(reason)
            }
            Came::Settled(settled) => {
                // The provider has told what was asked.
                self.breaker.succeeded();
                let metrics = self.shared.metrics.route(self.route.name.as_str());
                metrics.settled(usize::from(settled == Settled::Done));
                return;
            }
            Came::Back { down } => {
                let now = Instant::now();
                if down {
                    self.trouble = Cow::Borrowed(UNREACHED);
                    self.breaker.failed(now)
                } else {
                    self.breaker.unused(now)
                }
                self.back.push(claim.fence);
                return;
            }
            Came::Failed(failure) => {
                match failure.cause {
                    // It answered, so it is up.
                    _ if failure.answered => self.breaker.succeeded(),
                    Cause::Destination => {
                        self.trouble = failure.summary.clone();
                        self.breaker.failed(Instant::now());
                    }
                    // The destination was never asked. If this was a probe, another one may go.
                    Cause::Handler | Cause::Ours | Cause::Poison | Cause::Prerequisite => {
                        self.breaker.unused(Instant::now())
                    }
                }
                let (attempt, limit) = (claim.fence.attempt, claim.attempt_limit);
                let tried = Tried { attempt, limit, parked_at: claim.parked_at };
                let (now, chance) = (self.shared.clock.steady(), self.chance.draw());
                self.route.after_failure(failure, tried, now, chance)
            }
        };
        let followups = self.route.followups.clone();
        let (event, attempt, now) = (claim.event.id, claim.fence.attempt, self.shared.clock.steady());
        self.failed.push(FailedAttempt::of(event, attempt, claim.attempt_limit, &verdict, now));
        self.ended.push(Settlement { fence: claim.fence, verdict, followups });
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
        match self.shared.deliveries.settle(self.ended.clone()).await {
            Ok(settled) => {
                for ((settlement, failed), settled) in self.ended.iter().zip(&self.failed).zip(settled) {
                    self.note(settlement, failed.as_slice(), settled);
                }
                self.ended.clear();
                self.failed.clear();
                true
            }
            Err(error) => {
                tracing::warn!(route = self.route.name.as_str(), %error, "outcomes could not be written yet");
                false
            }
        }
    }

    /// Counts an outcome that was written down, and logs it if it failed.
    fn note(&self, settlement: &Settlement, failed: &[FailedAttempt], settled: Settled) {
        let (route, metrics) = (self.route.name.as_str(), self.shared.metrics.route(self.route.name.as_str()));
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
            (Verdict::Dead(_), Settled::Done) => metrics.dead(1),
        }
        if settled == Settled::Done {
            self.route.report(failed);
        }
    }

    fn fences(&self) -> Vec<Fence> {
        self.claims.values().flat_map(|(claims, _)| claims).map(|claim| claim.fence.clone()).collect()
    }

    /// Keeps the leases of what runs, and takes those back that nobody holds.
    async fn renew(&mut self) {
        let mut fences = self.fences();
        fences.extend(self.ended.iter().map(|settlement| settlement.fence.clone()));
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
        for _ in 0..3 {
            if self.settle().await {
                break;
            }
            tokio::time::sleep(BETWEEN_LAST_TRIES).await;
        }
        if !self.claims.is_empty()
            && let Err(error) = self.shared.deliveries.give_back(self.fences()).await
        {
            tracing::warn!(route = self.route.name.as_str(), %error, "leases could not be given back; they will run out");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use oncehook_verify::UnixMicros;

    use super::*;
    use crate::clock::Clock;
    use crate::delivery::{DeliveryId, Failure, HandedEvent, RouteName};
    use crate::event::SourceName;
    use crate::handler::Handler;
    use crate::journal::{
        Backlog, BoxFuture, Deliveries, Forgotten, Order, OrderError, Ordered, Pausable, Pause, Paused, Progress,
        Retention, Who, WorkError,
    };
    use crate::observe::Metrics;
    use crate::retry::Reconnect;
    use crate::worker::errand::What;
    use crate::worker::outages::Outages;

    /// A journal that refuses everything and counts how often it was to settle.
    #[derive(Default)]
    struct Refusing {
        settles: AtomicUsize,
        changes: watch::Sender<u64>,
    }

    fn refused<T: Send + 'static>() -> BoxFuture<'static, Result<T, WorkError>> {
        Box::pin(async { Err(WorkError::Unavailable("the test says so".to_owned())) })
    }

    impl Deliveries for Refusing {
        fn changes(&self) -> watch::Receiver<u64> {
            self.changes.subscribe()
        }
        fn apply(&self, _: Arc<Route>, _: usize) -> BoxFuture<'_, Result<Progress, WorkError>> {
            refused()
        }
        fn claim(&self, _: Arc<Route>, _: usize, _: Duration) -> BoxFuture<'_, Result<Vec<Claim>, WorkError>> {
            refused()
        }
        fn call(&self, _: Arc<Route>, _: Vec<Claim>) -> BoxFuture<'_, Result<Vec<Settled>, WorkError>> {
            refused()
        }
        fn settle(&self, _: Vec<Settlement>) -> BoxFuture<'_, Result<Vec<Settled>, WorkError>> {
            self.settles.fetch_add(1, Ordering::Relaxed);
            refused()
        }
        fn renew(&self, _: Vec<Fence>, _: Duration) -> BoxFuture<'_, Result<(), WorkError>> {
            refused()
        }
        fn give_back(&self, _: Vec<Fence>) -> BoxFuture<'_, Result<(), WorkError>> {
            refused()
        }
        fn reclaim(&self, _: Arc<Route>) -> BoxFuture<'_, Result<usize, WorkError>> {
            refused()
        }
        fn next_due(&self, _: RouteName) -> BoxFuture<'_, Result<Option<UnixMicros>, WorkError>> {
            refused()
        }
        fn backlog(&self) -> BoxFuture<'_, Result<Vec<Backlog>, WorkError>> {
            refused()
        }
        fn order(&self, _: Order) -> BoxFuture<'_, Result<Ordered, OrderError>> {
            Box::pin(async { Err(OrderError::NoEvent) })
        }
        fn set_paused(&self, _: Pause, _: Who) -> BoxFuture<'_, Result<(), WorkError>> {
            refused()
        }
        fn paused(&self) -> BoxFuture<'_, Result<Vec<Pausable>, WorkError>> {
            refused()
        }
        fn pauses(&self) -> BoxFuture<'_, Result<Vec<Paused>, WorkError>> {
            refused()
        }
        fn forget(&self, _: Retention) -> BoxFuture<'_, Result<Forgotten, WorkError>> {
            refused()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn at_the_end_an_outcome_is_offered_three_times_with_a_pause_between() {
        let journal = Arc::new(Refusing::default());
        let shared = Arc::new(Shared {
            deliveries: Arc::clone(&journal) as Arc<dyn Deliveries>,
            clock: Clock::system(),
            metrics: Arc::new(Metrics::new()),
            paused: watch::Sender::new(HashSet::new()),
            learning: tokio::sync::Mutex::default(),
            lease: Duration::from_secs(15),
            trouble: Mutex::new(Reconnect::new(Chance::random())),
            outages: Outages::default(),
            clock_seen: Mutex::default(),
            under_way: AtomicUsize::new(0),
        });
        let name = RouteName::new("orders").unwrap();
        let nothing = |_: &rusqlite::Connection, _: &HandedEvent| Ok::<_, Failure>(None);
        let source = SourceName::new("shop").unwrap();
        let route = Arc::new(Route::new(name.clone(), source, Handler::Function(Arc::new(nothing))));
        let what = What::Inside(Arc::clone(&shared.deliveries), Arc::clone(&route));
        let delivery = DeliveryId { event: crate::fastpath::tests::guessed_id(), route: name, epoch: 0 };
        let lane = Lane {
            errand: Errand::new(&route, what),
            breaker: Breaker::new(route.breaker),
            chance: Chance::random(),
            running: JoinSet::new(),
            claims: HashMap::new(),
            ended: vec![Settlement {
                fence: Fence { delivery, attempt: 1 },
                verdict: Verdict::Succeeded(None),
                followups: Vec::new(),
            }],
            failed: vec![None],
            trouble: Cow::Borrowed(""),
            back: Vec::new(),
            shared,
            route,
        };
        let begun = tokio::time::Instant::now();
        lane.stop().await;
        assert_eq!(journal.settles.load(Ordering::Relaxed), 3);
        assert!(begun.elapsed() >= 2 * BETWEEN_LAST_TRIES, "three tries in {:?}", begun.elapsed());
    }
}
