//! The journal as a worker and an operator see it: deliveries that are due, attempts that end, orders that are given.
//!
//! Promises of every backend, checked by one suite (`oncehook-testkit`, `deliveries`):
//!
//! - A delivery is settled once per epoch. A settlement with an attempt that is not the latest writes nothing
//!   ([`Settled::Lost`]); the fence stands in the statement, the lease only makes sure that another worker goes on.
//! - An effect in the journal's database and its settlement commit together, or neither does.
//! - Follow-ups are written in the transaction that settles what they follow.
//! - What is pending is never forgotten; a key is forgotten only after its window, and only if nothing can come of its event.
//!
//! Every time that is written here (due, leases, attempts, the audit) or compared (what is old) is of the journal's own
//! [`steady`](crate::clock::Clock::steady) clock, so that an attempt never ends before it began. A clock that jumps, while
//! the process runs or between two starts, forgets nothing (`forgetting`). A time has come when it is now: leases end and windows pass at the very microsecond.

use std::sync::Arc;
use std::time::Duration;

use oncehook_verify::UnixMicros;
use tokio::sync::watch;

use super::{BoxFuture, ClockDoubt, Misfit};
use crate::delivery::{Claim, DeliveryId, FailedAttempt, Fence, RouteName, Settled, Settlement, Verdict};
use crate::event::EventId;
use crate::handler::SqlHandler;
use crate::route::Route;

/// What a worker and an operator ask of a journal.
pub trait Deliveries: Send + Sync + 'static {
    /// Changes whenever deliveries may have become due. Only wakes; a worker that misses it finds the work by looking.
    /// Looking for work, claiming and renewing change nothing here, or a worker would wake itself.
    fn changes(&self) -> watch::Receiver<u64>;

    /// Runs due deliveries of a `sql` route: takes up to `limit` in a transaction, runs the statements, settles, commits.
    /// A failing delivery costs only itself.
    fn apply(&self, route: Arc<Route>, limit: usize) -> BoxFuture<'_, Result<Progress, WorkError>>;

    /// Leases due deliveries of a route whose handler leaves the process or runs foreign code. Each is another attempt,
    /// counted before it begins, so that one that ends the process is counted too.
    ///
    /// Due is what is `ready` or `retrying` and whose time has come; what became due first comes first, then the older
    /// event, then the older epoch. No two callers get the same attempt. The limit of attempts is the delivery's own, or
    /// else the route's. A follow-up is handed the result of the route before it: of its own epoch, or else of the
    /// latest epoch before.
    ///
    /// A route that looks at entities ([`Ordering`](crate::ordering::Ordering)) gets of each entity at most one, and only
    /// whose turn it is, as [`plan`](crate::ordering::plan) decides under the entity's lock. The others are taken out of the
    /// queue; settling the one before puts the next one back, under the same lock. Up to [`PEEK`](crate::ordering::PEEK)
    /// deliveries are looked at, so that a crowd of one entity does not stand in the way of others.
    fn claim(&self, route: Arc<Route>, limit: usize, lease: Duration) -> BoxFuture<'_, Result<Vec<Claim>, WorkError>>;

    /// Runs a `function` route on leased deliveries, or a `sql` route that fetched something for them, and settles each in the
    /// transaction of its effect.
    fn call(&self, route: Arc<Route>, claims: Vec<Claim>) -> BoxFuture<'_, Result<Vec<Settled>, WorkError>>;

    /// Settles attempts. One transaction, one answer per settlement, in order.
    ///
    /// Only a delivery that is `running` with the attempt of the fence is settled; a lease that has run out but was not
    /// taken away yet still settles, because no other attempt has begun. Success keeps the result, clears the error and makes
    /// the follow-ups: in the same epoch, due now, unless they exist. A failure makes none.
    fn settle(&self, settlements: Vec<Settlement>) -> BoxFuture<'_, Result<Vec<Settled>, WorkError>>;

    /// Prolongs leases, counted from now. Those that are lost stay lost.
    fn renew(&self, fences: Vec<Fence>, lease: Duration) -> BoxFuture<'_, Result<(), WorkError>>;

    /// Gives leases back without an outcome, due at once: `ready` if the delivery never failed, else `retrying`. The
    /// attempt keeps its number but is not held against the delivery: its limit is one more than the claim said. Fences
    /// that are lost change nothing.
    fn give_back(&self, fences: Vec<Fence>) -> BoxFuture<'_, Result<(), WorkError>>;

    /// Takes leases of a route away that have run out: due again after the route's back-off, or dead if it was the last
    /// attempt ([`Failure::never_ended`](crate::delivery::Failure::never_ended) either way). Returns how many.
    ///
    /// Also looks after those that wait for others: parked deliveries whose time has come are due again, and so is the first
    /// of a line that nothing is before any more (a dead one was forgotten, or the route is not ordered any longer).
    fn reclaim(&self, route: Arc<Route>) -> BoxFuture<'_, Result<usize, WorkError>>;

    /// When the next delivery of a route is due; in the past if one is due already. Leased ones do not count.
    fn next_due(&self, route: RouteName) -> BoxFuture<'_, Result<Option<UnixMicros>, WorkError>>;

    /// How much waits, runs and is dead, by route name. Routes with none of these are left out.
    fn backlog(&self) -> BoxFuture<'_, Result<Vec<Backlog>, WorkError>>;

    /// Carries out an operator's order for one event, and writes it down: an order that changed something has a row in the
    /// audit. One that was refused, or that found nothing to change, wrote nothing.
    ///
    /// Reasons to refuse are looked for in this order: no such event, the event is held (or, for a release, is not), no
    /// reason given, not the next epoch, nothing to do.
    fn order(&self, order: Order) -> BoxFuture<'_, Result<Ordered, OrderError>>;

    /// Stops or resumes the handling of a source or route, and writes it into the audit, unless it is so already. Accepting goes
    /// on. Survives a restart. This is a note for workers: `claim` and `apply` do not look at it.
    fn set_paused(&self, pause: Pause, who: Who) -> BoxFuture<'_, Result<(), WorkError>>;

    /// What is paused: routes, then sources, by name.
    fn paused(&self) -> BoxFuture<'_, Result<Vec<Pausable>, WorkError>>;

    /// The same with since when, and who paused it and why as far as the audit remembers.
    fn pauses(&self) -> BoxFuture<'_, Result<Vec<Paused>, WorkError>>;

    /// Forgets a small batch of what is old. Returns what was forgotten, and whether there is more to do at once.
    ///
    /// - An event goes when `payload` has passed since its receipt and nothing of it is pending. No person acted on a dead
    ///   or a held event yet, so it stays until `dead` has passed too: since the last delivery died, or since the receipt
    ///   of a held one. What no route wanted goes like what succeeded.
    /// - A key goes when its window has passed and its event is gone, or is neither pending nor dead nor held: as long as
    ///   a retry could still have an effect, a late copy must find the key.
    /// - What is kept does not stop what comes after it from being forgotten.
    /// - While the clock is in doubt ([`Forgotten::stopped`]) nothing goes.
    fn forget(&self, retention: Retention) -> BoxFuture<'_, Result<Forgotten, WorkError>>;

    /// An operator says that the clock is right: forgetting goes on, and the audit says so.
    fn trust_clock(&self, _who: Who) -> BoxFuture<'_, Result<(), WorkError>> {
        Box::pin(async { Err(WorkError::Unsupported("this journal does not doubt its clock".to_owned())) })
    }

    /// A number that tells this journal from others, the same for its whole life: the microsecond in which it was made.
    /// Guards in other databases carry it. A journal that cannot say has its guards kept for ever.
    fn mark(&self) -> BoxFuture<'_, Result<i64, WorkError>> {
        Box::pin(async { Err(WorkError::Unsupported("this journal does not know when it was made".to_owned())) })
    }

    /// Those of these deliveries of which something can still come: pending ones, and dead ones, which an operator may
    /// retry. What the journal has forgotten is not among them.
    fn unsettled(&self, deliveries: Vec<DeliveryId>) -> BoxFuture<'_, Result<Vec<DeliveryId>, WorkError>> {
        // To be on the safe side: all of them.
        Box::pin(async { Ok(deliveries) })
    }

    /// The statements of a handler that would fail as the tables are now; none, as here, if the journal runs no statements.
    fn rehearse(&self, _handler: Arc<SqlHandler>) -> BoxFuture<'_, Result<Vec<Misfit>, String>> {
        Box::pin(async { Ok(Vec::new()) })
    }
}

/// What a batch of a `sql` route came to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Progress {
    /// Deliveries that took effect.
    pub succeeded: usize,
    /// Attempts that failed and will be made again.
    pub retrying: usize,
    /// Deliveries that wait for a prerequisite now.
    pub parked: usize,
    /// Deliveries that came too late, and were settled without an effect.
    pub superseded: usize,
    /// Deliveries that are dead now.
    pub dead: usize,
    /// The attempts that failed, for the log.
    pub failed: Vec<FailedAttempt>,
    /// Whether there may be more that is due now.
    pub more: bool,
    /// Whether others that waited for what happened may be due now.
    pub woken: bool,
}

impl Progress {
    /// Counts what an attempt with this number and limit came to.
    pub(super) fn count(&mut self, event: EventId, attempt: u32, limit: u32, verdict: &Verdict, now: UnixMicros) {
        self.failed.extend(FailedAttempt::of(event, attempt, limit, verdict, now));
        match verdict {
            Verdict::Succeeded(_) => self.succeeded += 1,
            Verdict::RetryAt(..) => self.retrying += 1,
            Verdict::Parked(..) => self.parked += 1,
            Verdict::Superseded(_) => self.superseded += 1,
            Verdict::Dead(_) => self.dead += 1,
        }
    }

    /// Adds what another batch came to.
    pub(super) fn add(&mut self, other: Self) {
        self.succeeded += other.succeeded;
        self.retrying += other.retrying;
        self.parked += other.parked;
        self.superseded += other.superseded;
        self.dead += other.dead;
        self.failed.extend(other.failed);
        self.more |= other.more;
        self.woken |= other.woken;
    }
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
    /// Its deliveries that are due or will be: `ready`, `retrying`, `parked`.
    pub waiting: u64,
    /// Its deliveries that are leased.
    pub running: u64,
    /// Its dead deliveries.
    pub dead: u64,
    /// The earliest time at which a waiting one is or was due. Those that wait for their turn do not count.
    pub oldest: Option<UnixMicros>,
    /// Of those that wait, the ones that wait for their turn among the events of their entity.
    pub blocked: u64,
    /// Since when the first of them has.
    pub blocked_since: Option<UnixMicros>,
}

impl Backlog {
    /// Of a route of which nothing waits.
    pub(super) fn none(route: String) -> Self {
        Self { route, waiting: 0, running: 0, dead: 0, oldest: None, blocked: 0, blocked_since: None }
    }
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
    /// Only this route's deliveries. Of `wanting`, only this route.
    pub route: Option<RouteName>,
    /// Who says so.
    pub who: Who,
    /// The routes that want the event as things are now, for verbs that make deliveries.
    pub wanting: Vec<RouteName>,
    /// How many more attempts a revived delivery gets.
    pub attempts: u32,
}

impl Order {
    /// Whether the order is for that route's deliveries.
    pub fn is_for(&self, route: &RouteName) -> bool {
        self.route.as_ref().is_none_or(|only| only == route)
    }
}

/// What an operator can order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    /// Try what failed again, now: dead deliveries, and those that wait for their next attempt, of every epoch. Refused if
    /// there is none. The attempt goes on counting; the limit becomes [`Order::attempts`] more.
    Retry,
    /// Offer the event again: as `Retry`, and first deliveries (epoch 0) for the routes of [`Order::wanting`] that never
    /// had one. What took effect stays as it is, and if everything did, nothing changes.
    Replay,
    /// Run it again although it took effect: deliveries in a new epoch for the routes of [`Order::wanting`], or for the
    /// one of [`Order::route`] (which may be a follow-up). The number must be the next one, so that two operators who
    /// mean the same thing do it once. Needs a reason. Deliveries of earlier epochs go on as they were.
    ForceReplay {
        /// The new epoch.
        epoch: u32,
    },
    /// Give up what is pending or dead. What is leased cannot be called back until its lease has run out. Refused while one of these is running, and if there is none.
    Skip,
    /// Let a held event go to the routes of [`Order::wanting`]. Refused if it is not held. Every other verb but `Skip`
    /// is refused until then.
    Release,
}

impl Verb {
    /// The word in the audit.
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

impl Who {
    /// Whether a reason was given that says something.
    pub fn has_reason(&self) -> bool {
        self.reason.as_ref().is_some_and(|reason| !reason.trim().is_empty())
    }
}

/// What an order changed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ordered {
    /// Routes of which a delivery was changed or made, by name, each once.
    pub routes: Vec<RouteName>,
    /// The latest epoch of the event's deliveries; 0 if it has none.
    pub epoch: u32,
}

impl Ordered {
    /// Whether anything is different now. Only then is the order written down, or the audit would grow with every replay of what
    /// took effect. A release changes the event also if no route wants it.
    pub(super) fn changed_anything(&self, verb: Verb) -> bool {
        !self.routes.is_empty() || verb == Verb::Release
    }

    /// As the audit keeps it.
    pub fn to_json(&self) -> String {
        let routes: Vec<&str> = self.routes.iter().map(RouteName::as_str).collect();
        serde_json::json!({ "routes": routes, "epoch": self.epoch }).to_string()
    }
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
    /// What the journal's words stand for.
    pub(super) fn from_parts(kind: &str, name: String) -> Self {
        if kind == "source" { Self::Source(name) } else { Self::Route(name) }
    }

    /// `source` or `route`, and the name.
    pub fn parts(&self) -> (&'static str, &str) {
        match self {
            Self::Source(name) => ("source", name),
            Self::Route(name) => ("route", name),
        }
    }
}

/// Something that is paused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Paused {
    /// What.
    pub what: Pausable,
    /// Since when.
    pub since: UnixMicros,
    /// Who paused it.
    pub who: Option<String>,
    /// Why.
    pub reason: Option<String>,
}

/// A change of what is paused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pause {
    /// What.
    pub what: Pausable,
    /// Paused or not.
    pub paused: bool,
}

impl Pause {
    /// The word in the audit.
    pub fn as_str(&self) -> &'static str {
        if self.paused { "pause" } else { "resume" }
    }
}

/// How long things are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retention {
    /// Bodies of final events, from their receipt.
    pub payload: Duration,
    /// Dead letters, from their death, and held events, from their receipt; `None` keeps them for ever.
    pub dead: Option<Duration>,
    /// The audit.
    pub audit: Duration,
    /// At most this many events, this many keys and this many audit rows are forgotten in one go.
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
    /// Why nothing is forgotten, if the clock is in doubt.
    pub stopped: Option<ClockDoubt>,
}

/// What an order to trust the clock is called in the audit, and what it is about.
pub(crate) const TRUST_CLOCK: (&str, &str) = ("resume", "forgetting");
