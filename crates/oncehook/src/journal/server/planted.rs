//! The mistakes of [`crate::planted`] that a journal on a server can make. Only in builds with the feature `planted`.
//!
//! Promises: [`Planted`] is an engine that passes every step on to the engine it holds. Without a choice at run time it changes
//! nothing. With one it does a step wrongly, in the way that the choice names. Probes of the self-test are always appended
//! correctly: a journal that fails its self-test does not open, which is another way to notice a mistake.
//!
//! Does not: exist in a release.

use std::sync::Arc;
use std::time::Duration;

use oncehook_verify::UnixMicros;
use tokio::sync::{Mutex, watch};

use super::OpenError;
use super::append::{AppendSql, Appends, Stored, known_keys};
use super::deliver::settle::settle;
use super::deliver::steps::{DeliverSql, Delivers, Due, Locked, SettleSql, Wanted};
use super::engine::{AppendContext, Candidate, Engine, Purpose, Session as _};
use super::error::EngineError;
use super::lane::Request;
use super::pool::Pool;
use super::read::{Reads, buckets::Part};
use super::schema::Schema;
use super::shared::Shared;
use super::user_sql::{Ran, Surroundings, Trouble, UserSql};
use super::value::{Column, Param};
use crate::delivery::{Failure, HandedEvent, Settlement, Verdict};
use crate::event::EventId;
use crate::handler::{Dialect, Found, Function, SqlHandler};
use crate::journal::decide::outcome::Held;
use crate::journal::migration::Migration;
use crate::journal::sql::Result;
use crate::journal::tally::Pending;
use crate::journal::{BoxFuture, EventStatus, PROBE_SOURCE};
use crate::planted::{Bug, has};
use crate::route::Route;

/// How long a mistake waits between two steps that should be one, so that another node or a kill can come in between.
const BETWEEN: Duration = Duration::from_millis(20);

/// How long [`Bug::ShortMemory`] remembers a key, in microseconds.
const MEMORY: i64 = 1_000_000;

/// An engine, with mistakes. See the module's text.
#[expect(private_bounds, reason = "engines are this crate's own")]
pub struct Planted<E: Engine> {
    engine: Arc<E>,
    /// For [`Bug::NormalSync`]: switches the sync on before a connection is opened, which checks it, and off afterwards.
    switch: Mutex<Option<E::Session>>,
}

/// What mistakes look like in an engine's SQL.
pub(in crate::journal) trait Mistakes: Delivers + Appends + Reads {
    /// Has commits synced; has them answered before they are synced.
    const SYNCED: &'static str;
    const UNSYNCED: &'static str;
    /// What a leased delivery must be, in the texts that settle it.
    const FENCE: &'static str;
    /// `$1`: time, `$2`: table of source, key. Forgets the keys that were first seen before then.
    const FORGET_KEYS: &'static str;
}

#[expect(private_bounds, reason = "engines are this crate's own")]
impl<E: Mistakes> Planted<E> {
    /// [`Bug::NormalSync`]: a connection that was checked, and then set to answer commits before they are synced.
    async fn open_unsynced(&self, purpose: Purpose) -> Result<E::Session> {
        let mut switch = self.switch.lock().await;
        let is_on = match &mut *switch {
            Some(session) => session.run(E::SYNCED).await.is_ok(),
            None => false,
        };
        if !is_on {
            // A server that has just been started syncs.
            *switch = Some(self.engine.open(Purpose::Work).await?);
        }
        let mut session = self.engine.open(purpose).await?;
        session.run(E::UNSYNCED).await?;
        session.commit().await?;
        Ok(session)
    }

    /// [`Bug::ShortMemory`] and [`Bug::SelectThenInsert`]: forgets keys in a transaction before that of the append.
    async fn forget_keys(session: &mut E::Session, before: i64, candidates: &[Candidate<'_>]) -> Result<()> {
        let (sources, keys) =
            candidates.iter().map(Candidate::key).map(|(source, key)| (Some(source), Some(key))).unzip();
        let forgotten = Param::Table(vec![Column::Texts(sources), Column::Bytes(keys)]);
        session.change(E::FORGET_KEYS, &[before.into(), forgotten]).await?;
        session.commit().await
    }

    /// The candidates whose keys the ledger did not hold a moment ago.
    async fn unknown<'c>(session: &mut E::Session, candidates: &[Candidate<'c>]) -> Result<Vec<Candidate<'c>>> {
        let known = known_keys::<E>(session, candidates.iter().map(Candidate::key)).await?;
        session.commit().await?;
        tokio::time::sleep(BETWEEN).await;
        let unknown = candidates.iter().enumerate().filter(|(place, _)| !known.contains_key(place));
        Ok(unknown.map(|(_, candidate)| *candidate).collect())
    }
}

/// [`Bug::NoFence`]: the text without what a leased delivery must be. Kept for ever, which a process that is there to be wrong
/// can afford.
fn unfenced<E: Mistakes>(sql: &str) -> &'static str {
    sql.replace(E::FENCE, "1 = 1").leak()
}

impl<E: Mistakes> Engine for Planted<E> {
    type Session = E::Session;

    const KIND: &'static str = E::KIND;
    const IDENTITY_EVERY: Duration = E::IDENTITY_EVERY;

    fn new(url: &str, handler_time: Duration) -> Result<Self, OpenError> {
        Ok(Self { engine: Arc::new(E::new(url, handler_time)?), switch: Mutex::default() })
    }

    fn shown(&self) -> String {
        self.engine.shown()
    }

    async fn open(&self, purpose: Purpose) -> Result<E::Session> {
        if has(Bug::NormalSync) { self.open_unsynced(purpose).await } else { self.engine.open(purpose).await }
    }

    fn largest_body(&self) -> usize {
        self.engine.largest_body()
    }

    async fn make_ready(session: &mut E::Session, given: Option<i64>) -> Result<()> {
        E::make_ready(session, given).await
    }

    async fn identity(&self, session: &mut E::Session) -> Result<String> {
        self.engine.identity(session).await
    }

    /// With a small pool of its own: the journal's is one of this engine.
    async fn share_changes(
        shared: Arc<Shared>,
        pool: Arc<Pool<Self>>,
        end: watch::Receiver<bool>,
    ) -> Result<BoxFuture<'static, ()>> {
        let own = Pool::new(Arc::clone(&pool.engine.engine), Purpose::Work, 1);
        E::share_changes(shared, Arc::new(own), end).await
    }
}

impl<E: Mistakes> Schema for Planted<E> {
    const MIGRATION: Migration = E::MIGRATION;
    const RECORDED: &'static str = E::RECORDED;
    const RECORD: &'static str = E::RECORD;
    const SHAPE: &'static str = E::SHAPE;
    const EXPECTED: &'static str = E::EXPECTED;

    async fn begin_migration(&self, session: &mut E::Session) -> Result<(), OpenError> {
        self.engine.begin_migration(session).await
    }

    async fn make_tables(session: &mut E::Session) -> Result<()> {
        E::make_tables(session).await
    }

    async fn end_migration(session: &mut E::Session) -> Result<()> {
        E::end_migration(session).await
    }

    fn expected_for(found: &[String]) -> Vec<String> {
        E::expected_for(found)
    }
}

impl<E: Mistakes> Appends for Planted<E> {
    type LaneMemory = E::LaneMemory;

    const APPEND_COMMITS: bool = E::APPEND_COMMITS;
    const APPEND: AppendSql = E::APPEND;

    async fn append(
        &self,
        session: &mut E::Session,
        memory: &mut E::LaneMemory,
        context: AppendContext,
        candidates: &[Candidate<'_>],
    ) -> Result<Stored> {
        let is_probe = candidates.iter().any(|candidate| candidate.event.source.as_str() == PROBE_SOURCE);
        if !is_probe && has(Bug::ShortMemory) {
            Self::forget_keys(session, context.about_now - MEMORY, candidates).await?;
        }
        if !is_probe && has(Bug::SelectThenInsert) {
            let unknown = Self::unknown(session, candidates).await?;
            Self::forget_keys(session, i64::MAX, &unknown).await?;
        }
        let mut careful = E::careful();
        let mut memory = memory;
        if !is_probe && (has(Bug::EarlyAnswer) || has(Bug::TiedToClient)) {
            // What was answered early is committed now, when the answers have left. What comes is committed by `commit`, and not by the engine, which
            // has to take the way that leaves a transaction sound.
            if has(Bug::EarlyAnswer) {
                tokio::time::sleep(BETWEEN).await;
            }
            session.commit().await?;
            session.begin(context.given).await?;
            memory = &mut careful;
        }
        self.engine.append(session, memory, context, candidates).await
    }

    async fn commit(session: &mut E::Session, batch: &[Request]) -> Result<()> {
        if has(Bug::EarlyAnswer) {
            Ok(())
        } else if has(Bug::TiedToClient) {
            let is_left = batch.iter().any(|request| request.answer.is_closed());
            if is_left { session.rollback().await } else { session.commit().await }
        } else {
            E::commit(session, batch).await
        }
    }

    async fn store_duplicates(session: &mut E::Session, pending: &[(EventId, &Pending)]) -> Result<()> {
        E::store_duplicates(session, pending).await
    }

    fn careful() -> E::LaneMemory {
        E::careful()
    }

    fn is_refused_key(error: &EngineError) -> bool {
        E::is_refused_key(error)
    }
}

impl<E: Mistakes> UserSql for Planted<E> {
    type Prepared = E::Prepared;
    type Bound = E::Bound;
    type Statement = E::Statement;

    const DIALECT: Dialect = E::DIALECT;
    const ALLOWED: &'static [&'static str] = E::ALLOWED;
    const CODE: &'static str = E::CODE;

    fn forbidden(word: &str) -> Option<String> {
        E::forbidden(word)
    }

    async fn prepare_one(session: &mut E::Session, statement: &str) -> Result<E::Statement, Trouble> {
        E::prepare_one(session, statement).await
    }

    async fn prepare(session: &mut E::Session, of: &SqlHandler, at: Surroundings) -> Result<E::Prepared, Trouble> {
        E::prepare(session, of, at).await
    }

    fn bind(handler: &SqlHandler, prepared: &E::Prepared, values: &[Found<'_>]) -> Result<E::Bound, Failure> {
        E::bind(handler, prepared, values)
    }

    async fn run(
        session: &mut E::Session,
        handler: &SqlHandler,
        prepared: &E::Prepared,
        deliveries: Vec<E::Bound>,
        surroundings: Surroundings,
        about: Option<&HandedEvent>,
    ) -> Result<Vec<Ran>, Trouble> {
        E::run(session, handler, prepared, deliveries, surroundings, about).await
    }

    async fn renewed(
        session: &mut E::Session,
        handler: &SqlHandler,
        prepared: &E::Prepared,
        failure: &Failure,
    ) -> Option<E::Prepared> {
        E::renewed(session, handler, prepared, failure).await
    }

    fn is_outdated(failure: &Failure) -> bool {
        E::is_outdated(failure)
    }
}

impl<E: Mistakes> Delivers for Planted<E> {
    const DELIVER: DeliverSql = E::DELIVER;

    fn settle_sql() -> SettleSql {
        match E::settle_sql() {
            settle if !has(Bug::NoFence) => settle,
            SettleSql::AtOnce { leased, locked, succeeded, wake_parked } => {
                SettleSql::AtOnce { leased: unfenced::<E>(leased), locked, succeeded, wake_parked }
            }
            SettleSql::InSteps { live, leased, locked, follow } => {
                let (live, leased) = (unfenced::<E>(live), leased.map(unfenced::<E>));
                SettleSql::InSteps { live, leased, locked, follow }
            }
        }
    }

    async fn begin_batch(session: &mut E::Session, given: Option<i64>) -> Result<i64> {
        E::begin_batch(session, given).await
    }

    fn settles_ahead(prepared: &E::Prepared) -> bool {
        has(Bug::MarkFirst) || E::settles_ahead(prepared)
    }

    /// [`Bug::MarkFirst`]: what may be settled ahead is, and the transaction in which it is settled ends before it runs.
    async fn lock_due(&self, session: &mut E::Session, now: i64, route: &Route, wanted: Wanted<'_>) -> Result<Locked> {
        let Wanted::Batch { limit, settle_ahead: true } = wanted else {
            return self.engine.lock_due(session, now, route, wanted).await;
        };
        if !has(Bug::MarkFirst) {
            return self.engine.lock_due(session, now, route, wanted).await;
        }
        let wanted = Wanted::Batch { limit, settle_ahead: false };
        let mut locked = self.engine.lock_due(session, now, route, wanted).await?;
        let never_failed = locked.due.iter().filter(|due| due.attempt == 0).map(|due| due.fence(route));
        let succeeded = |fence| Settlement { fence, verdict: Verdict::Succeeded(None), followups: Vec::new() };
        let marked: Vec<Settlement> = never_failed.map(succeeded).collect();
        settle::<E>(session, Some(now), UnixMicros(now), Held::Lock, &marked).await?;
        session.commit().await?;
        E::begin_batch(session, None).await?;
        locked.settled_ahead = marked.len();
        Ok(locked)
    }

    async fn lease_at_once(
        &self,
        session: &mut E::Session,
        given: Option<i64>,
        route: &Route,
        limit: usize,
        lease: i64,
    ) -> Result<Option<Vec<Due>>> {
        self.engine.lease_at_once(session, given, route, limit, lease).await
    }

    async fn call(
        session: &mut E::Session,
        given: Option<i64>,
        function: &dyn Function,
        event: &HandedEvent,
        time: Duration,
    ) -> Result<(i64, Option<String>), Trouble> {
        E::call(session, given, function, event, time).await
    }
}

impl<E: Mistakes> Reads for Planted<E> {
    const STATUS_IS: &'static str = E::STATUS_IS;
    const BY_KEY: &'static str = E::BY_KEY;
    const BUCKETS: &'static str = E::BUCKETS;
    const ADD_TO_BUCKETS: &'static str = E::ADD_TO_BUCKETS;

    fn scan(parts: &[Part], conditions: &str, params: &mut Vec<Param<'_>>) -> String {
        E::scan(parts, conditions, params)
    }

    async fn newest_in(
        session: &mut E::Session,
        status: EventStatus,
        within: Part,
        limit: i64,
    ) -> Result<Vec<EventId>> {
        E::newest_in(session, status, within, limit).await
    }
}
