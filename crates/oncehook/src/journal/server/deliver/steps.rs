//! The steps of the way out that an engine has to say: locking what is due, settling, entity queues.
//!
//! Each step runs for a whole batch, in the transaction that its caller has begun, unless it says otherwise. `now` is the time
//! of that transaction.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::future::Future;
use std::time::Duration;

use oncehook_verify::UnixMicros;

use crate::delivery::{Claim, DeliveryId, Fence, HandedEvent, RouteName, Verdict};
use crate::event::EventId;
use crate::handler::Function;
use crate::journal::server::error::EngineError;
use crate::journal::server::user_sql::{Trouble, UserSql};
use crate::ordering::{Candidate, Line, Mark, Place};
use crate::route::Route;

/// The texts of plain statements. `now` is null where a statement may read the database's own clock.
pub(in crate::journal) struct DeliverSql {
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
    /// `$1` now, `$2` route, `$3` places (table), then the time that means "blocked".
    pub(in crate::journal) block: &'static str,
    /// `$1` fences (table). Writes the entity into parked deliveries, by which they are found.
    pub(in crate::journal) name_parked: &'static str,
    /// `$1` ids (table). Returns id, entity, version, occurred_at, type of events that have an entity.
    pub(in crate::journal) subjects: &'static str,
    /// `$1` route, `$2` the time that means "blocked", `$3` limit. Returns entities of which a delivery is blocked.
    pub(in crate::journal) blocked_entities: &'static str,
}

/// A delivery that is due and locked until the transaction ends.
pub(in crate::journal) struct Due {
    /// As the rules of ordering see it.
    pub(in crate::journal) candidate: Candidate,
    /// Attempts so far.
    pub(in crate::journal) attempt: u32,
    pub(in crate::journal) attempt_limit: u32,
    /// Since when it has waited for a prerequisite, if it has.
    pub(in crate::journal) parked_at: Option<UnixMicros>,
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
    /// Which attempt this is.
    pub(in crate::journal) fn try_of(&self) -> Try {
        let Place { event, epoch, .. } = self.candidate.place;
        Try { event, epoch, attempt: self.attempt }
    }

    pub(in crate::journal) fn delivery(&self, route: &Route) -> DeliveryId {
        let Place { event, epoch, .. } = self.candidate.place;
        DeliveryId { event, route: route.name.clone(), epoch }
    }
}

/// A delivery of a route with the attempts that it has had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::journal) struct Try {
    pub(in crate::journal) event: EventId,
    pub(in crate::journal) epoch: u32,
    pub(in crate::journal) attempt: u32,
}

/// Which due deliveries to lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::journal) enum Wanted {
    /// The longest due, at most this many, with their events, as many as fit into memory. With `settle_ahead`, those that
    /// never failed are settled as succeeded by the same statement.
    Batch { limit: usize, settle_ahead: bool },
    /// The longest due, at most this many, to be leased. Their events need not be read.
    Lease { limit: usize },
    /// Just this one, if it is still due with that attempt.
    Only(Try),
}

/// What was locked.
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

/// Whether attempts to be settled were leased, or ran inside the transaction that settles them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::journal) enum Held {
    /// Leased: the delivery is `running` and its attempt has the fence's number.
    Lease,
    /// Leased, and the lease ran out.
    LostLease,
    /// Not leased: the delivery is due and locked, and the fence's number is the next one.
    Lock,
}

/// An attempt that is over.
pub(in crate::journal) struct Ended<'s> {
    pub(in crate::journal) fence: &'s Fence,
    pub(in crate::journal) verdict: &'s Verdict,
    pub(in crate::journal) followups: &'s [RouteName],
}

/// When attempts are settled.
#[derive(Debug, Clone, Copy)]
pub(in crate::journal) struct SettleTime {
    /// The transaction's time; `None`: the statement reads the database's clock.
    pub(in crate::journal) now: Option<i64>,
    /// The time from which the verdicts' due times are counted.
    pub(in crate::journal) from: UnixMicros,
}

/// What a leased delivery is about.
pub(in crate::journal) struct Subject {
    pub(in crate::journal) entity: String,
    pub(in crate::journal) mark: Mark,
    pub(in crate::journal) kind: Option<String>,
}

/// An engine that can deliver.
pub(in crate::journal) trait Delivers: UserSql {
    const DELIVER: DeliverSql;
    /// Whether settling leased attempts is one statement that needs no transaction around it.
    const SETTLES_ALONE: bool;

    /// Begins the transaction of a batch and returns its time.
    fn begin_batch(
        session: &mut Self::Session,
        given: Option<i64>,
    ) -> impl Future<Output = Result<i64, EngineError>> + Send;

    /// Whether these statements can only succeed without a result, or fail, and the engine can settle such ahead.
    fn settles_ahead(prepared: &Self::Prepared) -> bool;

    /// Locks due deliveries; skips rows that another worker has locked. Of a route that looks at entities, locks the entities
    /// with them and leaves out those that another worker has locked.
    fn lock_due(
        &self,
        session: &mut Self::Session,
        now: i64,
        route: &Route,
        wanted: Wanted,
    ) -> impl Future<Output = Result<Locked, EngineError>> + Send;

    /// Reads the events of locked deliveries that were not read with them.
    fn load_events(
        session: &mut Self::Session,
        route: &Route,
        due: &mut [Due],
    ) -> impl Future<Output = Result<(), EngineError>> + Send;

    /// Leases due deliveries of a route that does not look at entities, and writes the attempts down before they begin. Its own
    /// transaction.
    fn lease_due(
        &self,
        session: &mut Self::Session,
        given: Option<i64>,
        route: &Route,
        limit: usize,
        lease: i64,
    ) -> impl Future<Output = Result<Vec<Claim>, EngineError>> + Send;

    /// Leases deliveries that the transaction has locked, and writes the attempts down before they begin. In any order.
    fn lease_locked(
        session: &mut Self::Session,
        now: i64,
        route: &Route,
        lease: i64,
        due: Vec<Due>,
    ) -> impl Future<Output = Result<Vec<Claim>, EngineError>> + Send;

    /// Settles attempts, each delivery at most once, and makes the follow-ups of those that succeeded. Returns the fences that
    /// were the latest; of the others nothing was written. The fence stands in every statement: event, route, epoch, state and
    /// attempt must be what the claim said, or no row changes.
    fn settle(
        session: &mut Self::Session,
        time: SettleTime,
        held: Held,
        ended: &[Ended<'_>],
    ) -> impl Future<Output = Result<HashSet<Fence>, EngineError>> + Send;

    /// The front of each entity's queue, at least as long as its candidates; and whether one of it is leased. Not what is
    /// remembered of the entity. The entities are locked.
    fn entity_queues(
        session: &mut Self::Session,
        now: i64,
        route: &Route,
        candidates: &BTreeMap<&str, Vec<Place>>,
    ) -> impl Future<Output = Result<HashMap<String, Line>, EngineError>> + Send;

    /// Puts the first blocked deliveries of each entity back into the queue, at most as many as are given.
    fn unblock(
        session: &mut Self::Session,
        now: i64,
        route: &RouteName,
        entities: &[(&str, usize)],
    ) -> impl Future<Output = Result<(), EngineError>> + Send;

    /// Something of these entities took effect: parked deliveries look again. Returns whether there was any.
    fn wake_parked(
        session: &mut Self::Session,
        now: i64,
        entities: &BTreeSet<&str>,
    ) -> impl Future<Output = Result<bool, EngineError>> + Send;

    /// The same for the entities of events, as a transaction of its own. Called where [`SETTLES_ALONE`](Self::SETTLES_ALONE).
    fn wake_parked_of(
        session: &mut Self::Session,
        given: Option<i64>,
        events: &[EventId],
    ) -> impl Future<Output = Result<bool, EngineError>> + Send;

    /// Parked deliveries of a route whose time has come look again. Returns whether there was any.
    fn wake_due_parked(
        session: &mut Self::Session,
        now: i64,
        route: &RouteName,
    ) -> impl Future<Output = Result<bool, EngineError>> + Send;

    /// Puts every blocked delivery of a route back that does not look at entities any more. Returns whether there was any.
    fn unblock_all(
        session: &mut Self::Session,
        now: i64,
        route: &RouteName,
    ) -> impl Future<Output = Result<bool, EngineError>> + Send;

    /// Those of these entities in whose queues every delivery is blocked and none is leased. They are locked.
    fn stranded(
        session: &mut Self::Session,
        route: &Route,
        entities: &BTreeSet<&str>,
    ) -> impl Future<Output = Result<Vec<String>, EngineError>> + Send;

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
