//! The steps of the way out that an engine has to say: locking what is due, leasing, settling, entity queues.
//!
//! Each step runs for a whole batch, in the transaction that its caller has begun, unless it says otherwise. `now` is the time
//! of that transaction. Most steps are texts: the shared code binds their parameters and reads their rows. Where one engine
//! does a step by one statement and another needs several, the text is one of two kinds.
//!
//! Does not: decide anything. What an outcome writes and who is eligible is decided by `journal::decide` and `ordering`.

use std::future::Future;
use std::time::Duration;

use crate::delivery::{DeliveryId, Fence, HandedEvent};
use crate::handler::Function;
use crate::journal::server::engine::Session;
use crate::journal::server::error::EngineResult;
use crate::journal::server::user_sql::{Trouble, UserSql};
use crate::ordering::{Candidate, Place};
use crate::route::Route;

/// The texts of plain statements. `now` is null where a statement may read the database's own clock.
pub(in crate::journal) struct DeliverSql {
    /// `$1` now, `$2` route, `$3` the route before it, `$4` the lease in microseconds, `$5` the most attempts, `$6` table of
    /// event, epoch, attempt. One after the other: lease deliveries that are locked, and write the attempts down before they
    /// begin. The last one returns the events of those that are leased now: the event's columns, then the epoch.
    pub(in crate::journal) lease: &'static [&'static str],
    /// `$1` now, `$2` fences (table), then the lease in microseconds.
    pub(in crate::journal) renew: &'static str,
    /// `$1` now, `$2` fences (table). Due at once, the attempt's number stays, and one more attempt is granted in its place.
    pub(in crate::journal) give_back: &'static str,
    /// `$1` now, `$2` route. Returns the entities of leases that have run out.
    pub(in crate::journal) expired_entities: &'static str,
    /// `$1` now, `$2` route. Locks deliveries whose leases have run out: event, epoch, attempt, attempt_limit.
    pub(in crate::journal) lock_expired: &'static str,
    /// `$1` now, `$2` route, `$3` the time that means "blocked". Returns the time until the next one is due.
    pub(in crate::journal) next_due: &'static str,
    /// Returns when the journal was made.
    pub(in crate::journal) created_at: &'static str,
    /// `$1` deliveries (table). Returns those that are pending or dead: event, route, epoch.
    pub(in crate::journal) unsettled: &'static str,
    /// `$1` the route before, `$2` places (table). Returns the event's columns, then the epoch. None where the statement that
    /// locks deliveries reads their events.
    pub(in crate::journal) load_events: Option<&'static str>,
    pub(in crate::journal) settle: SettleSql,
    /// `$1` fences (table). Writes the entity into parked deliveries, by which they are found.
    pub(in crate::journal) name_parked: &'static str,
    /// `$1` route, `$2` places (table). Puts deliveries into the queue of their entity that were made before the route
    /// looked at entities.
    pub(in crate::journal) adopt: &'static str,
    /// `$1` route, `$2` entities (table), one after the other. Locks them until the transaction ends, and waits for others
    /// that hold one.
    pub(in crate::journal) lock_entities: &'static [&'static str],
    /// `$1` scope, `$2` entities (table). Returns entity, newest, last_at, state, version.
    pub(in crate::journal) entity_states: &'static str,
    /// `$1` scope, `$2` table of entity, version, last_at, state, newest.
    pub(in crate::journal) keep_entity_states: &'static str,
    /// Returns event, route, epoch, attempt, entity, state, version, and whether it is due. The entities are locked.
    pub(in crate::journal) queues: QueueSql,
    /// `$1` now, `$2` route, `$3` places (table), then the time that means "blocked".
    pub(in crate::journal) block: &'static str,
    /// Puts the first blocked deliveries of each entity back into the queue, at most as many as are given.
    pub(in crate::journal) unblock: UnblockSql,
    /// `$1` now, `$2` route, `$3` the time that means "blocked". Puts every blocked delivery of a route back into the queue.
    pub(in crate::journal) unblock_all: MoveSql,
    /// `$1` now, `$2` entities (table). Something of these entities took effect: parked deliveries look again.
    pub(in crate::journal) wake_parked: MoveSql,
    /// `$1` now, `$2` route. Parked deliveries of a route whose time has come look again.
    pub(in crate::journal) wake_due_parked: MoveSql,
    /// `$1` ids (table). Returns id, entity, version, occurred_at, type of events that have an entity.
    pub(in crate::journal) subjects: &'static str,
    /// `$1` route, `$2` the time that means "blocked", `$3` limit. Returns entities of which a delivery is blocked.
    pub(in crate::journal) blocked_entities: &'static str,
    /// `$1` route, `$2` entities (table), then whether a dead delivery is in the way of others, and the time that means
    /// "blocked". Returns those in whose queues every delivery is blocked and none is leased. They are locked.
    pub(in crate::journal) stranded: &'static str,
}

/// How attempts are settled. `$1` now, `$2` table of event, route, epoch, attempt; state, wait, result, error, cause; 1 if it
/// counts as an attempt or else 0; outcome and error of the attempt's row, no outcome if there is none. Then a table of
/// follow-ups: event, route, epoch, and the route that follows. The fence stands in every statement: event, route, epoch,
/// state and attempt must be what the claim said, or no row changes.
pub(in crate::journal) enum SettleSql {
    /// One statement, which needs no transaction around it, and returns event, route, epoch, attempt of those that it settled.
    AtOnce {
        leased: &'static str,
        locked: &'static str,
        /// What ran under a lock, in the usual case: everything succeeded, and nothing follows. `$2` has the result behind
        /// the fence, and nothing else.
        succeeded: &'static str,
        /// `$1` now, `$2` ids (table). Something of the entities of these events took effect: parked deliveries look again.
        wake_parked: &'static str,
    },
    /// Several. The deliveries and the rows of the attempts have a statement each.
    InSteps {
        /// `$1` fences (table). Locks what is leased, and returns the places in the table that were the latest.
        live: &'static str,
        leased: [&'static str; 2],
        locked: [&'static str; 2],
        /// Makes the follow-ups. Those that exist stay as they are.
        follow: &'static str,
    },
}

/// How the fronts of queues are read: whatever is leased, and the first deliveries of each queue that are not.
pub(in crate::journal) enum QueueSql {
    /// `$1` route, `$2` table of entity and how many, then now, whether a dead delivery is in the way of others, and whether
    /// the order of a queue matters.
    AtOnce(&'static str),
    InSteps {
        /// `$1` route, `$2` entities (table). What is leased.
        leased: &'static str,
        /// Where a dead delivery is in the way of others.
        blocking: FrontSql,
        /// Where it is not.
        passing: FrontSql,
        /// `$1` route, `$2` places (table), `$3` now.
        found: &'static str,
    },
}

/// Reads the fronts of queues where one statement can return only the first of each. `$1` route, `$2` entities (table),
/// `$3` now, `$4` the time that means "blocked".
pub(in crate::journal) struct FrontSql {
    /// Returns event, route, epoch, 0, entity: what the index knows.
    pub(in crate::journal) first: &'static str,
    /// Of one queue: `$2` is the entity, `$5` how many.
    pub(in crate::journal) more: &'static str,
}

/// How the first blocked deliveries of queues are put back.
pub(in crate::journal) enum UnblockSql {
    /// `$1` now, `$2` route, `$3` table of entity and how many, then the time that means "blocked".
    AtOnce(&'static str),
    /// What they find is put back as [`DeliverSql::unblock_all`] does it.
    Found(FrontSql),
}

/// A change of rows, which may have to be found before.
pub(in crate::journal) struct MoveSql {
    /// Returns event, route, epoch, attempt. The parameters are those of the step.
    pub(in crate::journal) find: Option<&'static str>,
    /// The parameters are those of the step; if the rows were found before: `$1` now, `$2` fences (table), then the time that
    /// means "blocked".
    pub(in crate::journal) change: &'static str,
}

/// A delivery that is due and locked until the transaction ends.
pub(in crate::journal) struct Due {
    /// As the rules of ordering see it.
    pub(in crate::journal) candidate: Candidate,
    /// Attempts so far.
    pub(in crate::journal) attempt: u32,
    pub(in crate::journal) attempt_limit: u32,
    /// Whether it stands in the queue of its entity.
    pub(in crate::journal) queued: bool,
    /// Whether that entity is locked with it.
    pub(in crate::journal) entity_locked: bool,
    /// The state that the machine of its route gets to by it.
    pub(in crate::journal) state: Option<String>,
    /// Its event, if it was read already.
    pub(in crate::journal) event: Option<HandedEvent>,
}

impl Due {
    /// The attempt that comes next.
    pub(in crate::journal) fn fence(&self, route: &Route) -> Fence {
        let Place { event, epoch, .. } = self.candidate.place;
        Fence { delivery: DeliveryId { event, route: route.name.clone(), epoch }, attempt: self.attempt + 1 }
    }
}

/// Which due deliveries to lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::journal) enum Wanted<'w> {
    /// The longest due, at most this many, with their events, as many as fit into memory. With `settle_ahead`, those that
    /// never failed are settled as succeeded by the same statement.
    Batch { limit: usize, settle_ahead: bool },
    /// The longest due, at most this many, to be leased. Their events need not be read.
    Lease { limit: usize },
    /// Just the delivery whose next attempt this is, if it is still due.
    Only(&'w Fence),
}

/// What was locked.
#[derive(Default)]
pub(in crate::journal) struct Locked {
    /// In the order of their due times.
    pub(in crate::journal) due: Vec<Due>,
    /// Whether there may be more that is due.
    pub(in crate::journal) full: bool,
    /// Whether the search began behind the beginning of the queue, and found little.
    pub(in crate::journal) unseen: bool,
    /// How many are settled as succeeded already.
    pub(in crate::journal) settled_ahead: usize,
}

/// An engine that can deliver.
pub(in crate::journal) trait Delivers: UserSql {
    const DELIVER: DeliverSql;
    /// Whether settling leased attempts is one statement that needs no transaction around it.
    const SETTLES_ALONE: bool = matches!(Self::DELIVER.settle, SettleSql::AtOnce { .. });

    /// How attempts are settled.
    fn settle_sql() -> SettleSql {
        Self::DELIVER.settle
    }

    /// Begins the transaction of a batch and returns its time.
    fn begin_batch(session: &mut Self::Session, given: Option<i64>) -> impl Future<Output = EngineResult<i64>> + Send {
        session.begin(given)
    }

    /// Whether these statements can only succeed without a result, or fail, and the engine can settle such ahead.
    fn settles_ahead(_prepared: &Self::Prepared) -> bool {
        false
    }

    /// Locks due deliveries; skips rows that another worker has locked. Of a route that looks at entities, locks the entities
    /// with them and leaves out those that another worker has locked.
    fn lock_due(
        &self,
        session: &mut Self::Session,
        now: i64,
        route: &Route,
        wanted: Wanted<'_>,
    ) -> impl Future<Output = EngineResult<Locked>> + Send;

    /// Leases due deliveries of a route that does not look at entities, as [`DeliverSql::lease`] does it, in one transaction
    /// of one statement. None where the engine needs several.
    fn lease_at_once(
        &self,
        _session: &mut Self::Session,
        _given: Option<i64>,
        _route: &Route,
        _limit: usize,
        _lease: i64,
    ) -> impl Future<Output = EngineResult<Option<Vec<Due>>>> + Send {
        async { Ok(None) }
    }

    /// Begins a transaction and calls a function of the user's with it, for `time` at most. Returns the transaction's time and
    /// the function's result.
    fn call(
        session: &mut Self::Session,
        given: Option<i64>,
        function: &dyn Function,
        event: &HandedEvent,
        time: Duration,
    ) -> impl Future<Output = Result<(i64, Option<String>), Trouble>> + Send;
}
