//! What the tasks of one server journal share.

use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock};

use tokio::sync::{Notify, watch};

use crate::clock::Clock;
use crate::event::{EventId, EventIds, NewEvent};
use crate::journal::Incarnation;
use crate::journal::silence::Silence;
use crate::journal::tally::Tally;

/// Rows of `totals` per source. Usually more than there are writers, so that writers do not wait for each other.
const SHARDS: u64 = 64;

pub(in crate::journal) struct Shared {
    pub(in crate::journal) clock: Clock,
    /// Set once, under the write lock. Appends are queued under the read lock, so none can slip in behind a lane that closes
    /// and wait for ever.
    pub(in crate::journal) closed: RwLock<bool>,
    ids: Mutex<EventIds>,
    tally: Mutex<Tally>,
    /// Held for writing while counts move from the tally into the tables, for reading while a reader adds up both.
    pub(in crate::journal) moving: tokio::sync::RwLock<()>,
    /// Why a lane cannot store, by lane.
    failing: Mutex<Vec<Option<String>>>,
    /// How long the database has not answered a lane.
    pub(in crate::journal) silence: Silence,
    /// Bytes of bodies in the queues.
    pub(in crate::journal) queued_bytes: AtomicUsize,
    /// Which life of the database this is.
    pub(in crate::journal) incarnation: Incarnation,
    /// Grows when deliveries may have become due.
    pub(in crate::journal) changes: watch::Sender<u64>,
    /// Tells the task that informs other nodes.
    pub(in crate::journal) announce: Notify,
    /// A name for this process, by which it knows its own notifications.
    pub(in crate::journal) node: String,
    /// For counts that are written behind the accepts.
    pub(in crate::journal) shard: i64,
    /// How far the database's clock is ahead of this node's, in microseconds. Measured every second.
    pub(in crate::journal) database_ahead: AtomicI64,
}

impl Shared {
    /// `last` is the highest event that is stored, `ahead` how far the database's clock is ahead.
    pub(in crate::journal) fn new(
        clock: Clock,
        lanes: usize,
        last: Option<EventId>,
        identity: &str,
        ahead: i64,
    ) -> Self {
        let last = last.map_or(0, |id| id.sequence());
        Self {
            clock,
            closed: RwLock::new(false),
            ids: Mutex::new(EventIds::above(last, random())),
            tally: Mutex::default(),
            moving: tokio::sync::RwLock::new(()),
            failing: Mutex::new(vec![None; lanes]),
            silence: Silence::of(lanes),
            queued_bytes: AtomicUsize::new(0),
            incarnation: Incarnation::named(identity),
            changes: watch::Sender::new(0),
            announce: Notify::new(),
            node: format!("{:016x}", random()),
            shard: random_shard(),
            database_ahead: AtomicI64::new(ahead),
        }
    }

    /// This node did something by which deliveries may have become due.
    pub(in crate::journal) fn changed(&self) {
        self.woken();
        self.announce.notify_one();
    }

    /// Deliveries may have become due.
    pub(in crate::journal) fn woken(&self) {
        self.changes.send_modify(|count| *count = count.wrapping_add(1));
    }

    pub(in crate::journal) fn tally(&self) -> MutexGuard<'_, Tally> {
        self.tally.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The id that an event gets if it is new: its own, if it has one. Later ids are above it.
    pub(in crate::journal) fn id_for(&self, event: &NewEvent) -> EventId {
        let mut ids = self.ids.lock().unwrap_or_else(PoisonError::into_inner);
        match event.id {
            None => ids.next(event.received_at),
            Some(id) => {
                ids.stay_above(id.sequence());
                id
            }
        }
    }

    /// The time that stands in for the database's, if a test gave one.
    pub(in crate::journal) fn given_time(&self) -> Option<i64> {
        self.clock.given().map(|now| now.0)
    }

    /// About the database's time. Where it must be exact, the database is asked.
    pub(in crate::journal) fn database_time(&self) -> i64 {
        let ahead = self.clock.given().map_or_else(|| self.database_ahead.load(Ordering::Relaxed), |_| 0);
        self.clock.now().0.saturating_add(ahead)
    }

    pub(in crate::journal) fn set_failing(&self, lane: usize, reason: Option<String>) {
        let mut failing = self.failing.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(entry) = failing.get_mut(lane) {
            *entry = reason;
        }
    }

    pub(in crate::journal) fn failing(&self) -> Option<String> {
        let failing = self.failing.lock().unwrap_or_else(PoisonError::into_inner);
        failing.iter().flatten().next().cloned().or_else(|| self.silence.told())
    }
}

pub(in crate::journal) fn random() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    let mut bytes = [0; 8];
    match aws_lc_rs::rand::fill(&mut bytes) {
        Ok(()) => u64::from_ne_bytes(bytes),
        // The standard library has a source of its own for its hashers.
        Err(_) => RandomState::new().hash_one(0),
    }
}

pub(in crate::journal) fn random_shard() -> i64 {
    i64::try_from(random() % SHARDS).unwrap_or(0)
}
