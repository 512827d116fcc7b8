//! The worker: takes what is due and sees that it takes effect, one lane per route.
//!
//! Promises: a slow or failing route holds up no other; a paused one rests while accepting goes on; nothing is kept in
//! memory that a crash could lose, because the journal holds every attempt before it begins.
//!
//! Does not: know how a journal stores. `sql` routes run inside the journal's own transaction ([`Deliveries::apply`]),
//! all others are leased first (`outside`), whether they go over HTTP or to another database (`errand`, `guards`).

mod breaker;
mod errand;
mod guards;
mod janitor;
mod lane;
mod outside;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::clock::Clock;
use crate::journal::{Deliveries, Pausable, Retention, WorkError};
use crate::observe::Metrics;
use crate::route::{Route, Routes};

pub use janitor::Pace;

/// How long a lease holds, unless the worker is told otherwise. It is renewed while its handler runs.
const USUAL_LEASE: Duration = Duration::from_secs(15);

/// How often a lane looks without being woken, and how often it learns what other nodes have paused.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// How long a lane waits after the journal refused work.
const AFTER_TROUBLE: Duration = Duration::from_millis(250);

/// How long attempts that left the process may take to end once the worker is told to stop.
const GRACE: Duration = Duration::from_secs(5);

/// What every lane shares.
struct Shared {
    deliveries: Arc<dyn Deliveries>,
    clock: Clock,
    metrics: Arc<Metrics>,
    paused: watch::Sender<HashSet<Pausable>>,
    /// Held while it is read what is paused, or an older answer might be told after a newer one.
    learning: tokio::sync::Mutex<()>,
    /// How long a lease holds.
    lease: Duration,
    /// What the breakers say, by route.
    breakers: Mutex<HashMap<String, &'static str>>,
}

impl Shared {
    /// How often leases are renewed, and looked at for those that ran out: two renewals may fail before one does.
    fn renew_every(&self) -> Duration {
        self.lease / 3
    }

    fn is_paused(&self, route: &Route) -> bool {
        let paused = self.paused.borrow();
        // Usually nothing is, and this is asked before every batch.
        !paused.is_empty()
            && (paused.contains(&Pausable::Route(route.name.as_str().to_owned()))
                || paused.contains(&Pausable::Source(route.source.as_str().to_owned())))
    }

    fn note_breaker(&self, route: &Route, state: &'static str) {
        let mut breakers = self.breakers.lock().unwrap_or_else(PoisonError::into_inner);
        let before = breakers.insert(route.name.as_str().to_owned(), state);
        if before.unwrap_or("closed") != state {
            tracing::warn!(route = route.name.as_str(), state, "the breaker changed");
            self.metrics.route(route.name.as_str()).set_breaker(state);
        }
    }

    async fn learn_pauses(&self) -> Result<(), WorkError> {
        let _alone = self.learning.lock().await;
        let paused: HashSet<Pausable> = self.deliveries.paused().await?.into_iter().collect();
        self.paused.send_if_modified(|known| {
            let changed = *known != paused;
            if changed {
                *known = paused;
            }
            changed
        });
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
    /// Reads anew what is paused, and tells the lanes. Each looks before its next batch; what it has taken before comes to
    /// its end.
    pub async fn learn_pauses(&self) -> Result<(), WorkError> {
        self.0.learn_pauses().await
    }

    /// What the breaker of a route says: `closed`, `open` or `half_open`.
    #[must_use]
    pub fn breaker(&self, route: &str) -> &'static str {
        let breakers = self.0.breakers.lock().unwrap_or_else(PoisonError::into_inner);
        breakers.get(route).copied().unwrap_or("closed")
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
        let shared = Arc::new(Shared {
            deliveries,
            clock,
            metrics,
            paused: watch::Sender::new(HashSet::new()),
            learning: tokio::sync::Mutex::default(),
            // A lease of no time at all could not be renewed.
            lease: lease.max(Duration::from_millis(30)),
            breakers: Mutex::default(),
        });
        let end = watch::Sender::new(false);
        let mut lanes = JoinSet::new();
        lanes.spawn(watch_pauses(Arc::clone(&shared), end.subscribe()));
        lanes.spawn(janitor::run(Arc::clone(&shared), retention, Pace::default(), end.subscribe()));
        for route in routes.iter() {
            lanes.spawn(lane::run(Arc::clone(&shared), Arc::clone(route), end.subscribe()));
        }
        Self { shared, end, lanes }
    }

    /// For those who operate it.
    #[must_use]
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

/// Follows what is paused, also by other nodes.
async fn watch_pauses(shared: Arc<Shared>, mut end: watch::Receiver<bool>) {
    let mut looks = tokio::time::interval(LOOK_EVERY);
    looks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = looks.tick() => {
                if let Err(error) = shared.learn_pauses().await {
                    tracing::debug!(%error, "what is paused could not be read");
                }
            }
            () = lane::ended(&mut end) => return,
        }
    }
}
