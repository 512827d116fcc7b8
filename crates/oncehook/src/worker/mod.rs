//! The worker: takes what is due and sees that it takes effect, one lane per route.
//!
//! Promises: a slow or failing route holds up no other; a paused one rests while accepting goes on; nothing is kept in
//! memory that a crash could lose, because the journal holds every attempt before it begins.
//!
//! Does not: know how a journal stores. `sql` routes run inside the journal's own transaction ([`Deliveries::apply`]),
//! all others are leased first (`leased`), whether they go over HTTP, to an external database or run Rust code (`attempt`).

mod attempt;
mod breaker;
mod janitor;
mod lane;
mod leased;
mod outage;

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::clock::Clock;
use crate::journal::{ClockDoubt, Deliveries, Pausable, Retention, WorkError};
use crate::observe::Metrics;
use crate::retry::{Chance, Reconnect};
use crate::route::{Route, Routes};

/// How long a lease usually holds. It is renewed while its handler runs.
const USUAL_LEASE: Duration = Duration::from_secs(15);

/// How often a lane looks without being woken, and how often it learns what other nodes have paused.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// How long a log line waits for the count of what waits.
const COUNT_WAIT: Duration = Duration::from_secs(2);

/// What every lane shares.
struct Shared {
    deliveries: Arc<dyn Deliveries>,
    clock: Clock,
    metrics: Arc<Metrics>,
    paused: watch::Sender<HashSet<Pausable>>,
    /// Held while it is read what is paused, or an older answer might replace a newer one.
    learning: tokio::sync::Mutex<()>,
    /// How long lanes wait after the journal refused work. All lanes work on one journal, so they share it.
    trouble: Mutex<Reconnect>,
    /// How long a lease holds.
    lease: Duration,
    /// What the breakers say, by route. One that has never opened is not here.
    breakers: Mutex<HashMap<String, &'static str>>,
    /// What the janitor's last look at the clock came to; nothing before the first.
    clock_seen: Mutex<Option<Result<(), ClockDoubt>>>,
    /// Leased attempts that run now.
    under_way: AtomicUsize,
}

/// A panic of another thread leaves nothing half-done behind these locks.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    fn new(deliveries: Arc<dyn Deliveries>, clock: Clock, metrics: Arc<Metrics>, lease: Duration) -> Self {
        Self {
            deliveries,
            clock,
            metrics,
            paused: watch::Sender::new(HashSet::new()),
            learning: tokio::sync::Mutex::default(),
            trouble: Mutex::new(Reconnect::new(Chance::random())),
            // A lease of no time at all could not be renewed.
            lease: lease.max(Duration::from_millis(30)),
            breakers: Mutex::default(),
            clock_seen: Mutex::default(),
            under_way: AtomicUsize::new(0),
        }
    }

    /// How often leases are renewed, and looked at for those that ran out: two renewals may fail before one does.
    fn renew_every(&self) -> Duration {
        self.lease / 3
    }

    /// How long to wait after the journal refused work.
    fn after_trouble(&self) -> Duration {
        locked(&self.trouble).wait()
    }

    /// The journal works.
    fn is_well(&self) {
        locked(&self.trouble).is_back();
    }

    fn is_paused(&self, route: &Route) -> bool {
        let paused = self.paused.borrow();
        // Usually nothing is, and this is asked before every batch.
        !paused.is_empty()
            && (paused.contains(&Pausable::Route(route.name.as_str().to_owned()))
                || paused.contains(&Pausable::Source(route.source.as_str().to_owned())))
    }

    /// How many deliveries of a route wait, unless that takes too long.
    async fn count_waiting(&self, route: &str) -> Option<u64> {
        let backlogs = tokio::time::timeout(COUNT_WAIT, self.deliveries.backlog()).await.ok()?.ok()?;
        Some(backlogs.iter().find(|backlog| backlog.route == route).map_or(0, |backlog| backlog.waiting))
    }

    async fn learn_pauses(&self) -> Result<(), WorkError> {
        let _alone = self.learning.lock().await;
        let paused: HashSet<Pausable> = self.deliveries.paused().await?.into_iter().collect();
        self.is_well();
        self.paused.send_if_modified(|known| std::mem::replace(known, paused) != *known);
        Ok(())
    }
}

/// A running worker.
pub struct Worker {
    shared: Arc<Shared>,
    end: watch::Sender<bool>,
    lanes: JoinSet<()>,
}

/// What others may ask of a running worker.
#[derive(Clone)]
pub struct WorkerHandle(Arc<Shared>);

impl WorkerHandle {
    /// Reads anew what is paused, and wakes the lanes. Each looks before its next batch; what it has taken before comes to
    /// its end.
    pub async fn learn_pauses(&self) -> Result<(), WorkError> {
        self.0.learn_pauses().await
    }

    /// How many leased attempts run now. Statements that run inside the journal's transaction are not leased.
    pub fn under_way(&self) -> usize {
        self.0.under_way.load(Ordering::Relaxed)
    }

    /// Why nothing is forgotten, if the janitor doubts the clock.
    pub fn clock_doubt(&self) -> Option<ClockDoubt> {
        locked(&self.0.clock_seen).and_then(Result::err)
    }

    /// The clock was declared right: says so before the janitor looks again.
    pub fn clock_trusted(&self) {
        self.0.note_clock(None);
    }

    /// What the breaker of a route says: `closed`, `open` or `half_open`.
    pub fn breaker(&self, route: &str) -> &'static str {
        locked(&self.0.breakers).get(route).copied().unwrap_or("closed")
    }
}

impl Worker {
    /// Starts a lane for each route, and the janitor. Must be called inside a tokio runtime.
    #[must_use]
    pub fn start(
        deliveries: Arc<dyn Deliveries>,
        routes: &Routes,
        retention: Retention,
        clock: Clock,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self::start_with_lease(deliveries, routes, retention, clock, metrics, USUAL_LEASE)
    }

    /// The same with leases of another length. A lease decides how soon others go on after a worker that died or froze,
    /// never whether an effect happens twice; so it is no setting for users, and short ones are for tests.
    #[must_use]
    pub fn start_with_lease(
        deliveries: Arc<dyn Deliveries>,
        routes: &Routes,
        retention: Retention,
        clock: Clock,
        metrics: Arc<Metrics>,
        lease: Duration,
    ) -> Self {
        let shared = Arc::new(Shared::new(deliveries, clock, metrics, lease));
        let end = watch::Sender::new(false);
        let mut lanes = JoinSet::new();
        lanes.spawn(watch_pauses(Arc::clone(&shared), end.subscribe()));
        lanes.spawn(flush_failures(routes.iter().cloned().collect(), end.subscribe()));
        lanes.spawn(janitor::run(Arc::clone(&shared), retention, end.subscribe()));
        for route in routes.iter() {
            lanes.spawn(lane::run(Arc::clone(&shared), Arc::clone(route), end.subscribe()));
        }
        Self { shared, end, lanes }
    }

    /// For those who operate it.
    pub fn handle(&self) -> WorkerHandle {
        WorkerHandle(Arc::clone(&self.shared))
    }

    /// Takes nothing new, lets what runs come to an end for a moment, and gives the rest back.
    pub async fn stop(mut self) {
        // Lanes that have ended early do not mind.
        let _ = self.end.send(true);
        while self.lanes.join_next().await.is_some() {}
    }
}

/// Logs the failed attempts that were counted and not logged yet.
async fn flush_failures(routes: Vec<Arc<Route>>, mut end: watch::Receiver<bool>) {
    while !lane::rest(LOOK_EVERY, &mut end).await {
        let now = Instant::now();
        routes.iter().for_each(|route| route.failures.flush(route.name.as_str(), now));
    }
}

/// Follows what is paused, also by other nodes.
async fn watch_pauses(shared: Arc<Shared>, mut end: watch::Receiver<bool>) {
    let mut wait = Duration::ZERO;
    while !lane::rest(wait, &mut end).await {
        wait = match shared.learn_pauses().await {
            Ok(()) => LOOK_EVERY,
            Err(error) => {
                tracing::debug!(%error, "what is paused could not be read");
                shared.after_trouble().max(LOOK_EVERY)
            }
        };
    }
}
