//! The journal: where an accepted event becomes durable, and where duplicates are decided.
//!
//! Promises of every backend, checked by one suite (`oncehook-testkit`, `journal.rs`):
//!
//! - An answer `Ok` from an append means the events are durable at the level that [`Journal::state`] names.
//! - Of all appends of one (source, key), exactly one is [`Verdict::New`] (or `Quarantined`), whatever races, and the
//!   unique key decides it inside the append. There is no "exists" to ask first.
//! - The events of one request become durable together or not at all.
//! - Any error means "not stored, or unknown": the sender must try again, and the retry is settled by the key.
//!
//! Three traits, three readers: [`Journal`] is what the front door uses, [`Deliveries`] is for workers and operators,
//! [`JournalReader`] is for people (lists, one event's story, counts). None can do another's work.

pub(crate) mod decide;
mod deliveries;
mod incarnation;
pub mod memory;
#[cfg(any(feature = "sqlite", feature = "postgres", feature = "mysql"))]
mod migration;
#[cfg(feature = "mysql")]
pub mod mysql;
#[cfg(any(feature = "sqlite", feature = "postgres", feature = "mysql"))]
pub mod open;
#[cfg(feature = "postgres")]
pub mod postgres;
mod read;
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub mod server;
#[cfg(any(feature = "postgres", feature = "mysql"))]
mod silence;
#[cfg(any(feature = "sqlite", feature = "postgres", feature = "mysql"))]
pub(crate) mod sql;
#[cfg(feature = "sqlite")]
pub mod sqlite;
mod tally;

use std::future::Future;
use std::net::IpAddr;
use std::pin::Pin;

use oncehook_verify::{EventKey, UnixMicros};
use smallvec::SmallVec;
use tokio::sync::oneshot;

use crate::delivery::DeliveryId;
use crate::event::{EventId, NewEvents, SourceName};

pub use decide::forget::ClockDoubt;
pub(crate) use decide::forget::{ClockMemory, JUMP, look};
pub(crate) use deliveries::TRUST_CLOCK;
pub use deliveries::{
    Backlog, Deliveries, Forgotten, Order, OrderError, Ordered, Pausable, Pause, Paused, Progress, Retention, Verb,
    Who, WorkError,
};
pub use incarnation::{Era, Incarnation};
pub use read::{
    Attempt, AuditEntry, Conflict, Delivery, DuplicateSeen, EventDetail, EventPage, EventQuery, EventStatus,
    EventSummary, Flag, ReadError, RecentKey, SourceCounts, Standing, Stats, StoredBody,
};

/// A future that a trait object can return. Only calls off the hot path use it.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A statement of a handler that would fail as the tables are now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Misfit {
    /// Which statement of the handler, from 1.
    pub statement: usize,
    /// What the engine says, such as `no such table: orders`.
    pub reason: String,
}

words! {
    /// What the append decided about one event, and the word that the sender is answered.
    pub enum Verdict {
        /// First of its key: stored, and on its way to its handlers.
        New = "accepted",
        /// First of its key: stored, but held until an operator releases it.
        Quarantined = "quarantined",
        /// The key is known and the body is the same.
        Duplicate = "duplicate",
        /// The key is known and the body differs. The first event goes on untouched; this body was kept beside it.
        Conflict = "conflict",
    }
}

/// The fate of one appended event. For a duplicate or a conflict the id is the first event's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Appended {
    /// The event that holds the key.
    pub id: EventId,
    /// What was decided.
    pub verdict: Verdict,
    /// Until when the journal remembers the key at least.
    pub expires_at: UnixMicros,
}

words! {
    /// Where a duplicate was recognised, and the word in metrics.
    pub enum Layer {
        /// In the journal itself.
        Journal = "journal",
        /// In this process, by what a receipt of the journal had said before.
        Memory = "memory",
        /// In Redis, by what a receipt of the journal had said to some node before.
        Redis = "redis",
    }
}

/// A copy of an event that was recognised before it reached the journal.
#[derive(Debug, Clone, Copy)]
pub struct KnownCopy<'c> {
    /// The event that holds the key.
    pub event: EventId,
    /// Its source.
    pub source: &'c SourceName,
    /// When the copy arrived.
    pub at: UnixMicros,
    /// Who sent it.
    pub peer: IpAddr,
    /// Where it was recognised.
    pub layer: Layer,
}

/// One [`Appended`] per event of the request, in the request's order.
pub type Receipt = SmallVec<[Appended; 1]>;

/// Why an append gave no receipt. In every case the sender may, and should, try again.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AppendError {
    /// The queue to the journal is full. Nothing was stored.
    #[error("the journal's queue is full")]
    Full,
    /// The journal cannot store now, or the outcome of its commit is unknown.
    #[error("the journal is unavailable: {0}")]
    Unavailable(String),
    /// The journal is shutting down. Nothing was stored.
    #[error("the journal is closed")]
    Closed,
    /// The journal went away without an answer. The outcome is unknown.
    #[error("the journal is gone")]
    Gone,
}

/// Listens for the outcome of an append. Dropping it cancels nothing: the append belongs to the journal from the moment
/// it was submitted, so a sender that hangs up can neither lose nor half-store an event.
pub type Ticket = oneshot::Receiver<Result<Receipt, AppendError>>;

words! {
    /// Which crashes an acknowledged event survives, and the word in `/readyz`, logs and metrics.
    pub enum Durability {
        /// Nothing: the data is in this process' memory. Tests only.
        None = "none",
        /// A crash of the process, but not of the machine (a memory file system).
        ProcessCrashOnly = "process-crash-only",
        /// A crash of the machine and power loss: synced to this machine's disk.
        DurableFsync = "durable-fsync",
    }
}

/// How a journal is doing. Read for `/readyz`, `/metrics` and `/api/stats`; never decides anything about an event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JournalState {
    /// The kind of journal, for people: `sqlite`, `postgres`, `mysql`, `memory`.
    pub kind: &'static str,
    /// The level in force, read back from the engine.
    pub durability: Durability,
    /// Why the journal cannot store at the moment, or `None` if it can.
    pub failing: Option<String>,
    /// Appends waiting in memory.
    pub queued: usize,
    /// The most appends that may wait.
    pub queue_limit: usize,
    /// Events that should be in the search index and are not yet. Falls to 0 when nothing is appended for a while.
    pub index_lag: u64,
    /// Pages in the write-ahead log, where there is one.
    pub wal_pages: u64,
}

/// An id that an intake before the journal has answered, and the event that it stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Alias {
    /// The id that the sender was answered.
    pub alias: EventId,
    /// What the event is called in the journal.
    pub event: EventId,
}

/// Why the self-test failed: the memory of keys does not do what it must.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("dedup self-test failed: {0}")]
pub struct SelfTestError(pub String);

/// Where events become durable. Cheap to share behind an `Arc`.
pub trait Journal: Send + Sync + 'static {
    /// Hands the events of one request over. Returns at once: the ticket tells the outcome.
    ///
    /// `Err` means that nothing was taken over.
    fn submit(&self, events: NewEvents) -> Result<Ticket, AppendError>;

    /// Counts the duplicates of one request that were recognised before they reached the journal: further deliveries of events
    /// whose receipts the caller has seen. All of them, or none. `false`: there is no room to count them now, and they have to
    /// be appended like any others.
    fn note_duplicates(&self, copies: &[KnownCopy<'_>]) -> bool;

    /// Counts one duplicate.
    fn note_duplicate(&self, event: EventId, source: &SourceName, at: UnixMicros, peer: IpAddr, layer: Layer) -> bool {
        self.note_duplicates(&[KnownCopy { event, source, at, peer, layer }])
    }

    /// Remembers what else events are called, for as long as the events are kept. To say it again changes nothing. A journal
    /// that cannot, as here, must not stand behind a spool; the suite asks it of every backend.
    fn keep_aliases(&self, _aliases: Vec<Alias>) -> BoxFuture<'_, Result<(), WorkError>> {
        let reason = "this journal has no other names for events";
        Box::pin(async move { Err(WorkError::Unsupported(reason.to_owned())) })
    }

    /// The largest body that it can store, in bytes. A larger one is refused at the door: it would be refused by the
    /// journal every time it is sent.
    fn largest_body(&self) -> usize {
        usize::MAX
    }

    /// How the journal is doing.
    fn state(&self) -> JournalState;

    /// Which life of the journal this is. What receipts said in another one is not believed any more.
    ///
    /// Without a name, as here, nothing about this journal is shared with other nodes.
    fn incarnation(&self) -> &Incarnation {
        static ONLY: Incarnation = Incarnation::nameless();
        &ONLY
    }

    /// Proves, in a transaction that leaves nothing behind, that a key is refused the second time, that keys are
    /// compared byte by byte, and that the schema is the one this program expects.
    fn self_test(&self) -> BoxFuture<'_, Result<(), SelfTestError>>;

    /// Stores what is queued and counted, then stops. Later appends are refused.
    fn close(&self) -> BoxFuture<'_, ()>;
}

/// What people ask of a journal.
pub trait JournalReader: Send + Sync + 'static {
    /// Events that match, newest first.
    fn list(&self, query: EventQuery) -> BoxFuture<'_, Result<EventPage, ReadError>>;

    /// One event with its whole story.
    fn show(&self, id: EventId) -> BoxFuture<'_, Result<Option<EventDetail>, ReadError>>;

    /// One event's body, with the headers that were kept.
    fn body(&self, id: EventId) -> BoxFuture<'_, Result<Option<StoredBody>, ReadError>>;

    /// The event that an alias stands for; nothing if it is none, as here, where there are none.
    fn resolve(&self, _alias: EventId) -> BoxFuture<'_, Result<Option<EventId>, ReadError>> {
        Box::pin(async { Ok(None) })
    }

    /// Counts since the journal was made.
    fn stats(&self) -> BoxFuture<'_, Result<Stats, ReadError>>;

    /// How deliveries stand, one answer per delivery; `None` where there is no such delivery (yet). Asked many times a
    /// second while callers wait for a result, so a backend answers all of them at once.
    fn standings(&self, deliveries: Vec<DeliveryId>) -> BoxFuture<'_, Result<Vec<Option<Standing>>, ReadError>> {
        Box::pin(async move {
            let mut standings = Vec::with_capacity(deliveries.len());
            for id in deliveries {
                let event = self.show(id.event).await?.map(|detail| detail.event);
                let found = event.and_then(|event| {
                    event
                        .deliveries
                        .into_iter()
                        .find(|found| found.route == id.route.as_str() && found.epoch == id.epoch)
                });
                standings.push(found.and_then(Standing::of));
            }
            Ok(standings)
        })
    }

    /// Keys of the events that were received last, at most `limit`: those that are most likely to come again. They warm
    /// the caches after a start. A journal that tells none is only slower.
    fn recent_keys(&self, _limit: usize) -> BoxFuture<'_, Result<Vec<RecentKey>, ReadError>> {
        Box::pin(async { Ok(Vec::new()) })
    }
}

/// At most this many different bodies are kept per key; further ones are only counted.
pub const CONFLICTS_KEPT: usize = 8;

/// At most this many of the latest duplicates of an event are remembered one by one.
pub const DUPLICATES_REMEMBERED: usize = 8;

/// At most this many of the latest orders for an event are shown with it.
pub const ORDERS_SHOWN: u32 = 50;

/// At most this many of the latest attempts of a delivery are shown with it.
pub const ATTEMPTS_SHOWN: u32 = 100;

/// The source of the self-test's probe keys. Not a valid [`crate::event::SourceName`], so it can never meet a real one.
pub(crate) const PROBE_SOURCE: &str = "~self-test";

/// A key made for probing, and the same key in another case, which must count as another key.
pub(crate) fn probe_keys(nonce: u64) -> (EventKey, EventKey) {
    let lower = format!("probe-{nonce:016x}");
    (EventKey::from_parts(&[lower.as_bytes()]), EventKey::from_parts(&[lower.to_uppercase().as_bytes()]))
}
