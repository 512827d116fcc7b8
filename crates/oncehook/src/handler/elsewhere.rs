//! SQL in a database that is not the journal's: effect and guard commit there in one transaction, the journal settles
//! afterwards.
//!
//! The guard is a row per delivery, in the database of the effect, written in the transaction of the effect and before it.
//! Whoever finds one knows that the effect happened, and what its result was; the statements do not run again. So it does
//! not matter whether a process dies between the two commits, or whether the answer to the first one was heard.
//!
//! A guard can also be void: the delivery is not to take effect by the attempt of that number or by any before. That is
//! written before a delivery is given up, so that an attempt that everybody has forgotten cannot commit afterwards. A later
//! attempt (an operator's retry) has a higher number, and takes the void guard's place.
//!
//! Beside the guards stands what is known of entities, where a route compares events with it: the newest that took effect, the
//! state of a machine. An attempt that does not run because of that leaves its guard void, so that none before it can run
//! at a time when it fits again.
//!
//! Does not: know an engine. What a database must be able to do is [`Guarded`]; `journal::server::external` does it
//! for PostgreSQL, MariaDB and MySQL.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use oncehook_verify::UnixMicros;

use super::SqlHandler;
use crate::delivery::{Claim, DeliveryId, Failure, Fence, RouteName};
use crate::ordering::Ordering;
use crate::route::Route;

/// An answer that is on its way.
pub type Answer<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// The statements of a route, and the database they run in.
pub struct Elsewhere {
    /// What to run.
    pub statements: SqlHandler,
    /// Where.
    pub database: Arc<dyn Guarded>,
    /// How long guards are kept: at least as long as the journal remembers keys.
    pub keep: Duration,
}

/// By which rules a route compares events with what took effect before, and the name under which that is remembered.
#[derive(Debug, Clone)]
pub struct Comparison {
    /// The route or machine that the entities are known to.
    pub scope: String,
    /// The rules.
    pub rules: Ordering,
}

impl Comparison {
    /// That of a route, if it compares anything.
    pub fn of(route: &Route) -> Option<Self> {
        let rules = route.ordering.clone();
        rules.compares().then(|| Self { scope: rules.scope(route.name.as_str()), rules })
    }
}

/// What is to be done for claims.
#[derive(Clone, Copy)]
pub struct Task<'t> {
    /// What to run.
    pub statements: &'t SqlHandler,
    /// The mark of the journal that the claims are of: several may use one database.
    pub journal: i64,
    /// What decides whether they run.
    pub comparison: Option<&'t Comparison>,
}

/// What an attempt in another database came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Applied {
    /// It took effect, now or at an earlier attempt; the result is JSON, if the statements returned one.
    Done(Option<String>),
    /// The statements failed, or it does not fit what took effect before. Nothing of it stays.
    Failed(Failure),
    /// It came too late, for this reason. Nothing was run.
    Superseded(String),
    /// This attempt may not take effect any more: its delivery was given up. Nothing was run.
    Void,
    /// Another transaction was in the way. Nothing stays, and it is nobody's failure.
    Collided,
    /// The database, or the guards in it, could not be reached. Whether the effect is there is not known.
    Unreached(String),
}

/// What voiding came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Voided {
    /// The attempt and all before it cannot take effect any more.
    Done,
    /// It took effect already, with this result.
    TookEffect(Option<String>),
}

/// Guards that may be forgotten are looked for behind a place, and up to so many.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Round {
    /// The route whose guards are meant.
    pub route: RouteName,
    /// Whose guards: other gateways may use the same database. See [`Guarded::apply`].
    pub journal: i64,
    /// Only guards behind this one.
    pub behind: Option<DeliveryId>,
    /// Only guards that are at least so old, of events that are at least so old.
    pub age: Duration,
    /// The time by this node's clock. The database's own time counts if it is earlier: one wrong clock alone makes nothing old.
    pub now: UnixMicros,
    /// At most so many.
    pub limit: usize,
}

/// A database in which effects are guarded.
pub trait Guarded: Send + Sync + 'static {
    /// Where it is, for people: without what is secret.
    fn shown(&self) -> &str;

    /// Runs the statements for each claim that has no guard yet, and writes its guard in the same transaction. One outcome
    /// per claim, in order; a failing one undoes only itself. Where events are compared with what took effect before, the rows of
    /// their entities are locked there, and change in the same transaction too.
    ///
    /// Dropped half-way, what was not committed is undone; what was is found by the next attempt.
    fn apply<'a>(&'a self, task: Task<'a>, claims: &'a [Claim]) -> Answer<'a, Vec<Applied>>;

    /// Sees to it that none of these attempts, nor any before them, can take effect from now on. One answer per fence, in
    /// order. An error means that nothing is known.
    fn void<'a>(&'a self, journal: i64, fences: &'a [Fence]) -> Answer<'a, Result<Vec<Voided>, String>>;

    /// Old guards, in a fixed order.
    fn aged<'a>(&'a self, round: &'a Round) -> Answer<'a, Result<Vec<DeliveryId>, String>>;

    /// Forgets guards. The caller knows that nothing can come of these deliveries any more.
    fn forget<'a>(&'a self, deliveries: &'a [DeliveryId]) -> Answer<'a, Result<(), String>>;

    /// The statements that would fail as the tables are now: which one, from 1, and why. Changes nothing.
    fn rehearse<'a>(&'a self, statements: &'a SqlHandler) -> Answer<'a, Result<Vec<(usize, String)>, String>>;
}
