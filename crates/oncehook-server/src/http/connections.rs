//! The open connections of a listener, and which of them goes when there is no place for a new one.
//!
//! Promises: a connection that is of no use does not keep a newcomer out. When every place is taken, the idlest connection
//! is closed: the one whose last genuine request is longest ago, one that never sent any before all others. A connection
//! whose request is complete is never closed.
//!
//! A request costs a few atomic stores. The lock is for connections that come and go.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use oncehook::observe::Metrics;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::AbortHandle;

use super::tap::Tap;
use crate::memory;

/// A connection that is so young may not have had the time to send a request.
const YOUNG: Duration = Duration::from_millis(250);

/// A newcomer waits so long for the place of a connection that was told to go, then has another one go: somebody else may have
/// taken the place.
const MAKING_ROOM: Duration = Duration::from_millis(50);

/// How often it does so.
const TRIES: usize = 20;

/// Connections whose head is longer than usual and not complete. Beyond, the idlest of them makes room: a head is memory that
/// no budget counts.
const LONG_HEADS: usize = 1_024;

/// The idlest connections are looked for so many at a time, so that a flood does not make us search for every newcomer.
const AT_ONCE: usize = 128;

/// A connection of which so many requests in a row were refused is closed with the last answer: the sender of a flood has to
/// connect again, and unread answers never fill the connection.
const REFUSED_IN_A_ROW: u8 = 8;

/// So many connections are a crowd, whose memory is worth giving back.
const CROWD: usize = 256;

/// What a connection is doing.
mod phase {
    /// Between two requests.
    pub(super) const IDLE: u8 = 0;
    /// In a request that is not complete.
    pub(super) const READING: u8 = 1;
    /// In a request that is complete.
    pub(super) const ANSWERING: u8 = 2;
    /// Chosen to make room. Its task is being ended.
    pub(super) const LEAVING: u8 = 3;
}

/// One open connection.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) peer: SocketAddr,
    pub(super) tap: Tap,
    accepted: Instant,
    phase: AtomicU8,
    /// When the last genuine request came, in milliseconds after `accepted`, plus one; zero if none came.
    genuine: AtomicU64,
    /// Requests that were refused since the last genuine one.
    refused: AtomicU8,
    /// Whether an answer waits for the peer to read what came before it.
    stuck: AtomicBool,
    task: OnceLock<AbortHandle>,
}

impl Connection {
    fn new(peer: SocketAddr, now: Instant) -> Self {
        Self {
            peer,
            tap: Tap::default(),
            accepted: now,
            phase: AtomicU8::new(phase::IDLE),
            genuine: AtomicU64::new(0),
            refused: AtomicU8::new(0),
            stuck: AtomicBool::new(false),
            task: OnceLock::new(),
        }
    }

    /// A request has begun. `false` if the connection is being closed to make room.
    pub(super) fn begin(&self) -> bool {
        self.change(phase::IDLE, phase::READING)
    }

    /// The request is complete: from now on the connection stays. `false` if it is being closed to make room.
    pub(super) fn complete(&self) -> bool {
        self.change(phase::READING, phase::ANSWERING)
    }

    /// The request is answered.
    pub(super) fn end(&self) {
        if !self.change(phase::ANSWERING, phase::IDLE) {
            // Refused before it was complete; or leaving, which stays so.
            self.change(phase::READING, phase::IDLE);
        }
    }

    /// The request was genuine: this connection is of use.
    pub(super) fn mark_genuine(&self, now: Instant) {
        let millis = now.saturating_duration_since(self.accepted).as_millis();
        self.genuine.store(u64::try_from(millis).unwrap_or(u64::MAX - 1) + 1, Ordering::Relaxed);
        self.refused.store(0, Ordering::Relaxed);
    }

    /// The request was refused. `true` if there were so many in a row that the connection is to be closed.
    pub(super) fn mark_refused(&self) -> bool {
        self.refused.fetch_add(1, Ordering::Relaxed) + 1 >= REFUSED_IN_A_ROW
    }

    /// The peer does not read its answers, or does again.
    pub(super) fn set_stuck(&self, stuck: bool) {
        self.stuck.store(stuck, Ordering::Relaxed);
    }

    fn change(&self, from: u8, to: u8) -> bool {
        self.phase.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// The higher, the sooner it goes. `head` is how long a connection may be idle: one that was of use is never older.
    fn idleness(&self, head: Duration, now: Instant) -> Duration {
        let age = now.saturating_duration_since(self.accepted);
        // Those who have sent nothing genuine so far may be about to. Of these nothing good is to be expected.
        if self.stuck.load(Ordering::Relaxed) || self.tap.is_long() {
            return age + 2 * head;
        }
        match self.genuine.load(Ordering::Relaxed) {
            0 if age < YOUNG => age,
            0 => age + head,
            at => age.saturating_sub(Duration::from_millis(at - 1)),
        }
    }

    /// Ends it, unless its request is complete.
    fn evict(&self) -> bool {
        let leaves = self.change(phase::IDLE, phase::LEAVING) || self.change(phase::READING, phase::LEAVING);
        if let Some(task) = self.task.get().filter(|_| leaves) {
            task.abort();
        }
        leaves
    }
}

/// All open connections of a listener.
#[derive(Debug)]
pub(super) struct Connections {
    places: Arc<Semaphore>,
    head: Duration,
    metrics: Option<Arc<Metrics>>,
    long_heads: AtomicUsize,
    open: Mutex<Open>,
}

#[derive(Debug, Default)]
struct Open {
    next: u64,
    connections: HashMap<u64, Arc<Connection>>,
    /// The most connections since a crowd has left.
    most: usize,
    /// The idlest when they were last looked for, the idlest last, with what `genuine` was then.
    idlest: Vec<(u64, u64)>,
}

impl Connections {
    pub(super) fn new(places: usize, head: Duration, metrics: Option<Arc<Metrics>>) -> Arc<Self> {
        let places = Arc::new(Semaphore::new(places));
        Arc::new(Self { places, head, metrics, long_heads: AtomicUsize::new(0), open: Mutex::default() })
    }

    /// A place for a new connection, if there is one or one can be made.
    pub(super) fn place(self: &Arc<Self>) -> Option<Place> {
        if let Ok(place) = Arc::clone(&self.places).try_acquire_owned() {
            return Some(Place::Free(place));
        }
        self.evict_idlest(Instant::now()).then(|| Place::Promised(Arc::clone(self)))
    }

    /// Enters a connection and runs its task, which is ended if the connection has to make room. The task holds the entry.
    pub(super) fn run<F>(self: &Arc<Self>, peer: SocketAddr, task: impl FnOnce(Arc<Connection>, Entry) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let connection = Arc::new(Connection::new(peer, Instant::now()));
        let entry = self.enter(&connection);
        let task = tokio::spawn(task(Arc::clone(&connection), entry));
        // Set once, here.
        let _ = connection.task.set(task.abort_handle());
        if connection.phase.load(Ordering::Acquire) == phase::LEAVING {
            // Evicted before there was anything to abort.
            task.abort();
        }
    }

    /// Returns when every connection has ended.
    pub(super) async fn wait_for_end(&self, places: usize) {
        // Fails only if the semaphore is closed, which nobody does.
        let _ = self.places.acquire_many(u32::try_from(places).unwrap_or(u32::MAX)).await;
    }

    /// Counts a head that is longer than usual, until what is returned is dropped.
    pub(super) fn count_long_head(self: &Arc<Self>) -> LongHead {
        if self.long_heads.fetch_add(1, Ordering::Relaxed) >= LONG_HEADS {
            self.evict_idlest(Instant::now());
        }
        LongHead(Arc::clone(self))
    }

    fn enter(self: &Arc<Self>, connection: &Arc<Connection>) -> Entry {
        if let Some(metrics) = &self.metrics {
            metrics.connections.inc();
        }
        let mut open = self.lock();
        open.next += 1;
        let id = open.next;
        open.connections.insert(id, Arc::clone(connection));
        open.most = open.most.max(open.connections.len());
        Entry { connections: Arc::clone(self), id }
    }

    fn lock(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the idlest connection; `false` if all of them have something to answer.
    fn evict_idlest(&self, now: Instant) -> bool {
        let mut open = self.lock();
        // The second time over it is a new search, after which there is nothing to be found.
        for _ in 0..2 {
            while let Some((id, genuine)) = open.idlest.pop() {
                let found = open.connections.get(&id);
                let found = found.filter(|found| found.genuine.load(Ordering::Relaxed) == genuine);
                if found.is_some_and(|found| found.evict()) {
                    return true;
                }
            }
            open.find_idlest(self.head, now);
        }
        false
    }
}

impl Open {
    /// Takes a connection out. When three of four have gone since there were most, a crowd has left.
    fn leave(&mut self, id: u64) {
        self.connections.remove(&id);
        if self.most >= CROWD && self.connections.len() <= self.most / 4 {
            self.most = self.connections.len();
            self.connections.shrink_to(self.most);
            memory::crowd_has_left();
        }
    }

    fn find_idlest(&mut self, head: Duration, now: Instant) {
        let evictable =
            |connection: &Connection| matches!(connection.phase.load(Ordering::Relaxed), phase::IDLE | phase::READING);
        let mut found: Vec<_> = self
            .connections
            .iter()
            .filter(|(_, connection)| evictable(connection))
            .map(|(id, connection)| (connection.idleness(head, now), *id, connection.genuine.load(Ordering::Relaxed)))
            .collect();
        found.sort_unstable();
        let few = AT_ONCE.min(self.connections.len() / AT_ONCE + 1);
        self.idlest =
            found.split_off(found.len().saturating_sub(few)).into_iter().map(|(_, id, at)| (id, at)).collect();
    }
}

/// A place among the open connections, or the promise of one.
#[derive(Debug)]
pub(super) enum Place {
    Free(OwnedSemaphorePermit),
    /// The connection that had it was told to go.
    Promised(Arc<Connections>),
}

impl Place {
    /// The place itself; nothing if nobody leaves.
    pub(super) async fn get(self) -> Option<OwnedSemaphorePermit> {
        let connections = match self {
            Self::Free(place) => return Some(place),
            Self::Promised(connections) => connections,
        };
        for _ in 0..TRIES {
            let place = Arc::clone(&connections.places).acquire_owned();
            if let Ok(place) = tokio::time::timeout(MAKING_ROOM, place).await {
                // It fails only if the semaphore is closed, which nobody does.
                return place.ok();
            }
            connections.evict_idlest(Instant::now());
        }
        None
    }
}

/// A head that is longer than usual.
pub(super) struct LongHead(Arc<Connections>);

impl Drop for LongHead {
    fn drop(&mut self) {
        self.0.long_heads.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A connection's entry. It goes however its task ends.
pub(super) struct Entry {
    connections: Arc<Connections>,
    id: u64,
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.connections.lock().leave(self.id);
        if let Some(metrics) = &self.connections.metrics {
            metrics.connections.dec();
        }
    }
}
