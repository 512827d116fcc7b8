//! The journal as a worker and an operator see it: deliveries that are due, attempts that end, orders that are given.
//!
//! Promises of every backend, checked by one suite (`oncehook-testkit`, `deliveries.rs`):
//!
//! - A delivery is settled once per epoch. Whoever settles with an attempt that is not the latest writes nothing
//!   ([`Settled::Lost`]); the fence stands in the statement, the lease only makes sure that somebody goes on.
//! - An effect in the journal's database and its settlement commit together, or neither does.
//! - Follow-ups are written in the transaction that settles what they follow.
//! - What is pending is never forgotten; a key is forgotten only after its window and only if its event is final.
//!
//! Times (`due`, leases) are the journal's own [`steady`](crate::clock::Clock::steady) clock.

use std::sync::Arc;
use std::time::Duration;

use oncehook_verify::UnixMicros;
use tokio::sync::watch;

use super::BoxFuture;
use crate::delivery::{Claim, Fence, RouteName, Settled, Settlement};
use crate::event::EventId;
use crate::route::Route;

/// What a worker and an operator ask of a journal.
pub trait Deliveries: Send + Sync + 'static {
    /// Changes whenever deliveries may have become due. Only wakes; a worker that misses it finds the work by looking.
    fn changes(&self) -> watch::Receiver<u64>;

    /// Runs due deliveries of a `sql` route: takes up to `limit`, runs the statements, settles, commits. A failing
    /// delivery costs only itself.
    fn apply(&self, route: Arc<Route>, limit: usize) -> BoxFuture<'_, Result<Progress, WorkError>>;

    /// Leases due deliveries of a route whose handler leaves the process or runs foreign code. Each is another attempt,
    /// counted before it begins, so that one that ends the process is counted too.
    fn claim(
        &self,
        route: Arc<Route>,
        limit: usize,
        lease: Duration,
    ) -> BoxFuture<'_, Result<Vec<Claim>, WorkError>>;

    /// Runs a `function` route on leased deliveries and settles each in the transaction of its effect.
    fn call(&self, route: Arc<Route>, claims: Vec<Claim>) -> BoxFuture<'_, Result<Vec<Settled>, WorkError>>;

    /// Settles attempts. One transaction, one answer per settlement, in order.
    fn settle(&self, settlements: Vec<Settlement>) -> BoxFuture<'_, Result<Vec<Settled>, WorkError>>;

    /// Prolongs leases. Those that are lost stay lost.
    fn renew(&self, fences: Vec<Fence>, lease: Duration) -> BoxFuture<'_, Result<(), WorkError>>;

    /// Gives leases back without an outcome, due at once. The attempt keeps its number but is not held against the
    /// delivery.
    fn give_back(&self, fences: Vec<Fence>) -> BoxFuture<'_, Result<(), WorkError>>;

    /// Takes leases away that have run out: due again after a back-off, or dead if it was the last attempt. Returns how
    /// many.
    fn reclaim(&self, route: Arc<Route>) -> BoxFuture<'_, Result<usize, WorkError>>;

    /// When the next delivery of a route is due.
    fn next_due(&self, route: RouteName) -> BoxFuture<'_, Result<Option<UnixMicros>, WorkError>>;

    /// How much waits, per route and state.
    fn backlog(&self) -> BoxFuture<'_, Result<Vec<Backlog>, WorkError>>;

    /// Carries out an operator's order for one event, and writes it down.
    fn order(&self, order: Order) -> BoxFuture<'_, Result<Ordered, OrderError>>;

    /// Stops or resumes the handling of a source or route. Accepting goes on. Survives a restart.
    fn set_paused(&self, pause: Pause, who: Who) -> BoxFuture<'_, Result<(), WorkError>>;

    /// What is paused.
    fn paused(&self) -> BoxFuture<'_, Result<Vec<Pausable>, WorkError>>;

    /// Forgets a small batch of what is old. Returns what was forgotten, and whether there is more to do at once.
    fn forget(&self, retention: Retention) -> BoxFuture<'_, Result<Forgotten, WorkError>>;
}

/// What a batch of a `sql` route came to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Progress {
    /// Deliveries that took effect.
    pub succeeded: usize,
    /// Attempts that failed and will be made again.
    pub retrying: usize,
    /// Deliveries that are dead now, with their errors.
    pub dead: Vec<(EventId, String)>,
    /// Whether there may be more that is due now.
    pub more: bool,
}

/// Why work could not be done. Nothing was settled; it is due as before.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WorkError {
    /// The journal cannot be written now.
    #[error("the journal is unavailable: {0}")]
    Unavailable(String),
    /// This journal cannot run this kind of handler.
    #[error("{0}")]
    Unsupported(String),
}

/// Deliveries of a route in a state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Backlog {
    /// The route.
    pub route: String,
    /// Its deliveries that are due or will be.
    pub waiting: u64,
    /// Its deliveries that are leased.
    pub running: u64,
    /// Its dead deliveries.
    pub dead: u64,
    /// When the oldest waiting one became due.
    pub oldest: Option<UnixMicros>,
}

/// Who ordered something, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Who {
    /// A name or address.
    pub name: String,
    /// Why.
    pub reason: Option<String>,
}

/// An operator's order for one event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Order {
    /// The event.
    pub event: EventId,
    /// What to do.
    pub verb: Verb,
    /// Only this route.
    pub route: Option<RouteName>,
    /// Who says so.
    pub who: Who,
    /// The routes that want the event as things are now, for verbs that make deliveries.
    pub wanting: Vec<RouteName>,
    /// How many more attempts a revived delivery gets.
    pub attempts: u32,
}

/// What an operator can order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    /// Try what failed again, now: dead deliveries, and those that wait for their next attempt.
    Retry,
    /// Offer the event again: as `Retry`, and deliveries for routes that did not exist when it came. What took effect
    /// stays as it is.
    Replay,
    /// Run it again although it took effect: a new epoch of every delivery. The number must be the next one, so that two
    /// operators who mean the same thing do it once.
    ForceReplay {
        /// The new epoch.
        epoch: u32,
    },
    /// Give up what is pending or dead.
    Skip,
    /// Let a held event go to its handlers.
    Release,
}

impl Verb {
    /// The word in the audit.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Retry => "retry",
            Self::Replay => "replay",
            Self::ForceReplay { .. } => "force_replay",
            Self::Skip => "skip",
            Self::Release => "release",
        }
    }
}

/// What an order changed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ordered {
    /// Routes whose delivery was changed or made.
    pub routes: Vec<RouteName>,
    /// The latest epoch of the event.
    pub epoch: u32,
}

/// Why an order was not carried out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OrderError {
    /// There is no such event.
    #[error("there is no such event")]
    NoEvent,
    /// A forced replay named an epoch that is not the next.
    #[error("the next epoch is {next}")]
    Epoch {
        /// The one that would be accepted.
        next: u32,
    },
    /// The order does not fit the event's state.
    #[error("{0}")]
    Unfit(String),
    /// The journal cannot be written now.
    #[error(transparent)]
    Work(#[from] WorkError),
}

/// Something that can be paused.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Pausable {
    /// All routes of a source.
    Source(String),
    /// One route.
    Route(String),
}

impl Pausable {
    /// `source` or `route`, and the name.
    #[must_use]
    pub fn parts(&self) -> (&'static str, &str) {
        match self {
            Self::Source(name) => ("source", name),
            Self::Route(name) => ("route", name),
        }
    }
}

/// A change of what is paused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pause {
    /// What.
    pub what: Pausable,
    /// Paused or not.
    pub paused: bool,
}

/// How long things are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retention {
    /// Bodies of final events, from their receipt.
    pub payload: Duration,
    /// Dead letters; `None` keeps them for ever.
    pub dead: Option<Duration>,
    /// The audit.
    pub audit: Duration,
    /// At most this many events and keys are looked at.
    pub batch: usize,
}

/// What was forgotten.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Forgotten {
    /// Events with their bodies and deliveries.
    pub events: usize,
    /// Keys.
    pub keys: usize,
    /// Audit rows.
    pub audit: usize,
    /// Whether there is more to forget now.
    pub more: bool,
}
