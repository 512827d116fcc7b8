//! A PostgreSQL database that is not the journal's, and in which effects happen once: see [`Guarded`].
//!
//! The guards stand in a schema of their own, `oncehook_guard`, so that a journal may live in the same database. It is made
//! at the first use; guards of an earlier version, under the table's former name, are taken over. Every statement about
//! guards names its conflict target, so a table or a key that somebody has changed is an error and not silence.
//!
//! Promises: a guard and the effect it stands for commit together; the guard is asked before the statements run, so
//! whatever those would make of a second run (a unique key, a missing table) does not matter. Whatever goes wrong with the
//! guards themselves is [`Applied::Unreached`]: no delivery is to blame for it.
//!
//! Does not: settle anything. And it does not notice if somebody empties the guards: what was applied and not settled at
//! that moment would run again.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use uuid::Uuid;

use super::OpenError;
use super::Postgres;
use super::connection::{EngineError, Pool, Purpose, Session};
use super::queries::{event_id, uuid};
use super::queue::{int, number, route_name};
use super::standing;
use super::user_sql::{self, Prepared, Settings, Trouble};
use crate::delivery::{Claim, DeliveryId, Failure, Fence, HandedEvent};
use crate::handler::SqlHandler;
use crate::handler::elsewhere::{Answer, Applied, Guarded, Round, Task, Voided};
use crate::handler::entities::{self, Turn};
use crate::handler::sql::ended_transaction;
use crate::journal::server::{self, engine::Engine};

/// Connections to one such database, for all routes.
const CONNECTIONS: usize = 8;

/// How long other transactions that are in the way are put up with; what is left then is for another turn.
const PATIENCE: Duration = Duration::from_secs(2);

/// A guard that another transaction is writing is not waited for for long: that transaction decides, and it is asked again.
const GUARD_SETTINGS: &str = "SET LOCAL lock_timeout = 2000; SET LOCAL plan_cache_mode = force_custom_plan";
pub(super) const SETTINGS: Settings = Settings {
    theirs: "SET LOCAL lock_timeout TO DEFAULT; SET LOCAL plan_cache_mode = auto",
    ours: "SET LOCAL plan_cache_mode = force_custom_plan",
};

/// The guards. `attempt` is the one that wrote the row; `journal` says whose delivery it is, because several gateways may use
/// the database.
const TABLE: &str = r#"CREATE TABLE oncehook_guard.oncehook_applied (
  event   uuid NOT NULL,
  route   text COLLATE "C" NOT NULL,
  epoch   integer NOT NULL,
  attempt integer NOT NULL,
  void    boolean NOT NULL,
  result  text,
  journal bigint NOT NULL,
  at      timestamptz NOT NULL,
  CONSTRAINT applied_once PRIMARY KEY (event, route, epoch)
) WITH (fillfactor = 90)"#;

const NAME: &str = "oncehook_guard.oncehook_applied";

fn gone(table: &str) -> EngineError {
    EngineError::other(format!(
        "{table} is gone, and with it the memory of what was applied; put it back, or restart the gateway to begin with an \
         empty one"
    ))
}

const BOTH: &str = "there are guards in oncehook_guard.oncehook_applied and, of an earlier version, in oncehook_guard.applied; both know \
                    what was applied: end all gateways of that version, bring the rows together, and drop the second";

/// These read the catalogue's tables: `to_regclass` and its like may answer from before a lock was granted.
const SCHEMA_EXISTS: &str =
    "SELECT EXISTS (SELECT FROM pg_catalog.pg_namespace WHERE nspname = 'oncehook_guard')";
const TABLES_EXIST: &str = "SELECT coalesce(bool_or(c.relname = 'oncehook_applied'), false), coalesce(bool_or(c.relname = 'applied'), false),
       coalesce(bool_or(c.relname = 'oncehook_applied_entities'), false)
  FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname = 'oncehook_guard' AND c.relkind IN ('r', 'p')";

/// The table was called `applied` once. A gateway of that time that still runs finds the view and stops at its shape; without
/// it, it would make an empty table, and know nothing of what was applied.
const TAKE_OVER: &str = "ALTER TABLE oncehook_guard.applied RENAME TO oncehook_applied;
CREATE VIEW oncehook_guard.applied AS SELECT * FROM oncehook_guard.oncehook_applied";

async fn exists(session: &Session, sql: &str) -> Result<bool, EngineError> {
    Ok(session.row(sql, &[]).await?.is_some_and(|row| row.get(0)))
}

/// Which of our tables there are.
#[derive(Default)]
struct Tables {
    guards: bool,
    /// Under their former name.
    former: bool,
    entities: bool,
}

impl Tables {
    async fn find(session: &Session) -> Result<Self, EngineError> {
        let row = session.row(TABLES_EXIST, &[]).await?;
        Ok(row.map_or_else(Self::default, |row| Self {
            guards: row.get(0),
            former: row.get(1),
            entities: row.get(2),
        }))
    }
}

/// What the catalogue says about it. A trigger, a rule or a table that is not logged would show here too.
const EXPECTED: [&str; 10] = [
    "column at timestamp with time zone not null",
    "column attempt integer not null",
    "column epoch integer not null",
    "column event uuid not null",
    "column journal bigint not null",
    "column result text",
    "column route text not null collate C",
    "column void boolean not null",
    "key applied_once (event,route,epoch)",
    "table r logged",
];

const SHAPE: &str = r#"
SELECT 'table ' || c.relkind::text || CASE c.relpersistence WHEN 'p' THEN ' logged' ELSE ' not logged' END COLLATE "C" AS line
  FROM pg_catalog.pg_class c WHERE c.oid = $1::text::regclass
UNION ALL
SELECT 'column ' || a.attname || ' ' || format_type(a.atttypid, a.atttypmod)
       || CASE WHEN a.attnotnull THEN ' not null' ELSE '' END
       || CASE WHEN o.collname IS NULL OR o.collname = 'default' THEN '' ELSE ' collate ' || o.collname END
  FROM pg_catalog.pg_attribute a LEFT JOIN pg_catalog.pg_collation o ON o.oid = a.attcollation
 WHERE a.attrelid = $1::text::regclass AND a.attnum > 0 AND NOT a.attisdropped
UNION ALL
SELECT 'key ' || i.relname || ' ('
       || (SELECT string_agg(a.attname, ',' ORDER BY k.place)
             FROM unnest(x.indkey::int2[]) WITH ORDINALITY AS k(attribute, place)
             JOIN pg_catalog.pg_attribute a ON a.attrelid = x.indrelid AND a.attnum = k.attribute)
       || ')' || CASE WHEN x.indisvalid AND x.indisready AND x.indimmediate AND x.indpred IS NULL THEN '' ELSE ' useless' END
  FROM pg_catalog.pg_index x JOIN pg_catalog.pg_class i ON i.oid = x.indexrelid
 WHERE x.indrelid = $1::text::regclass AND x.indisunique
UNION ALL
SELECT 'trigger ' || g.tgname FROM pg_catalog.pg_trigger g
 WHERE g.tgrelid = $1::text::regclass AND NOT g.tgisinternal
UNION ALL
SELECT 'rule ' || r.rulename FROM pg_catalog.pg_rewrite r WHERE r.ev_class = $1::text::regclass
 ORDER BY 1"#;

async fn check_shape(session: &Session, table: &str, expected: &[&str]) -> Result<(), EngineError> {
    let rows = session.rows(SHAPE, &[&table]).await?;
    let found: Vec<&str> = rows.iter().map(|row| row.get(0)).collect();
    if let Some(line) = expected.iter().find(|line| !found.contains(line)) {
        return Err(EngineError::other(format!("{table}: this is missing, or changed: {line}")));
    }
    match found.iter().find(|line| !expected.contains(line)) {
        Some(line) => Err(EngineError::other(format!("{table}: this is not ours: {line}"))),
        None => Ok(()),
    }
}

/// A database of the user's on PostgreSQL.
pub struct PostgresElsewhere {
    pool: Pool,
    shown: String,
    /// Whether the guards were found sound since the last trouble.
    sound: AtomicBool,
    /// Whether they were ever there. Then they are not made anew: what they knew would be lost in silence.
    seen: AtomicBool,
}

impl PostgresElsewhere {
    /// Reads the URL. Nothing is connected before the first use, so a database that is down stops nobody from starting.
    pub fn new(url: &str) -> Result<Self, OpenError> {
        // A statement of the user's may take as long as one in the journal's own database.
        let connector = Arc::new(Postgres::new(url, super::HANDLER_TIME)?);
        let shown = connector.shown();
        let pool = Pool::new(connector, Purpose::Work, CONNECTIONS);
        Ok(Self { pool, shown, sound: AtomicBool::new(false), seen: AtomicBool::new(false) })
    }

    /// Makes sure that the guards are there and as they should be.
    async fn prepare(&self, session: &Session) -> Result<(), EngineError> {
        if self.sound.load(Ordering::Acquire) {
            return Ok(());
        }
        let seen = self.seen.load(Ordering::Acquire);
        match Tables::find(session).await? {
            Tables { guards: true, former: true, .. } => return Err(EngineError::other(BOTH)),
            Tables { guards: true, entities: true, .. } => {}
            Tables { guards: false, former: false, .. } if seen => return Err(gone(NAME)),
            Tables { entities: false, .. } if seen => return Err(gone(standing::NAME)),
            Tables { .. } => self.make(session).await?,
        }
        self.seen.store(true, Ordering::Release);
        check_shape(session, NAME, &EXPECTED).await?;
        check_shape(session, standing::NAME, &standing::EXPECTED).await?;
        self.sound.store(true, Ordering::Release);
        Ok(())
    }

    /// Makes the guards, or takes over those of an earlier version. Those who come at once do it once. A role that may not
    /// create schemas can use one that exists.
    async fn make(&self, session: &Session) -> Result<(), EngineError> {
        let lock = i64::from_be_bytes(*b"oncguard");
        session.run(&format!("BEGIN; SELECT pg_advisory_xact_lock({lock})")).await?;
        let tables = Tables::find(session).await?;
        match tables {
            Tables { guards: true, .. } => {}
            Tables { former: true, .. } => {
                session.run(TAKE_OVER).await?;
                tracing::info!(database = self.shown, "the guards of effects have a new name: {NAME}");
            }
            Tables { .. } => {
                if !exists(session, SCHEMA_EXISTS).await? {
                    session.run("CREATE SCHEMA oncehook_guard").await?;
                }
                session.run(TABLE).await?;
                tracing::info!(database = self.shown, "made the guards of effects: {NAME}");
            }
        }
        if !tables.entities {
            session.run(standing::TABLE).await?;
        }
        session.run("COMMIT").await
    }

    /// The guards are looked at anew before they are used again.
    fn doubt(&self, error: &EngineError) -> String {
        self.sound.store(false, Ordering::Release);
        format!("{}: {}", self.shown, error.message)
    }

    async fn apply_all(
        &self,
        task: Task<'_>,
        claims: &[Claim],
        outcomes: &mut [Option<Applied>],
    ) -> Result<(), EngineError> {
        let session = self.pool.take().await?;
        self.prepare(&session).await?;
        // Outside of a transaction: an error here must not end one. The guards are asked all the same.
        let prepared = match user_sql::prepare(&session, task.statements).await {
            Ok(prepared) => Ok(prepared),
            Err(Trouble::Failed(failure) | Trouble::Deferred(failure)) => Err(failure),
            Err(Trouble::Collision | Trouble::Ended(_)) => {
                return Err(EngineError::other("a statement could not be prepared now"));
            }
            Err(Trouble::Engine(error)) => return Err(error),
        };
        let mut batch = Batch { session: &session, task, prepared };
        let fresh: Vec<usize> = places(claims, |claim| claim.fence.attempt == 1);
        let tried: Vec<usize> = places(claims, |claim| claim.fence.attempt > 1);
        let alone = match batch.together(claims, &fresh, outcomes).await? {
            Together::Done => tried,
            Together::Spoilt => fresh.into_iter().chain(tried).collect(),
        };
        let mut waited = Duration::ZERO;
        for place in alone {
            let (Some(claim), Some(outcome)) = (claims.get(place), outcomes.get_mut(place)) else { continue };
            // Somebody stands in the way, and perhaps in that of all others too.
            if waited >= PATIENCE {
                break;
            }
            let started = Instant::now();
            let applied = batch.alone(claim).await?;
            if applied == Applied::Collided {
                waited += started.elapsed();
            }
            *outcome = Some(applied);
        }
        session.keep();
        Ok(())
    }

    async fn void_all(&self, journal: i64, fences: &[Fence]) -> Result<Vec<Voided>, EngineError> {
        let session = self.pool.take().await?;
        self.prepare(&session).await?;
        session.run(&format!("BEGIN; {GUARD_SETTINGS}")).await?;
        let voided = void(&session, journal, fences).await?;
        session.run("COMMIT").await?;
        session.keep();
        Ok(voided)
    }

    async fn aged_of(&self, round: &Round) -> Result<Vec<DeliveryId>, EngineError> {
        let session = self.pool.take().await?;
        self.prepare(&session).await?;
        let aged = aged(&session, round).await?;
        session.keep();
        Ok(aged)
    }

    async fn forget_all(&self, deliveries: &[DeliveryId]) -> Result<(), EngineError> {
        let session = self.pool.take().await?;
        let keys = Keys::of(deliveries);
        let sql = "DELETE FROM oncehook_guard.oncehook_applied a
          USING unnest($1::uuid[], $2::text[], $3::integer[]) AS t(event, route, epoch)
          WHERE a.event = t.event AND a.route = t.route AND a.epoch = t.epoch";
        session.change(sql, &[&keys.events, &keys.routes, &keys.epochs]).await?;
        session.keep();
        Ok(())
    }
}

impl Guarded for PostgresElsewhere {
    fn shown(&self) -> &str {
        &self.shown
    }

    fn apply<'a>(&'a self, task: Task<'a>, claims: &'a [Claim]) -> Answer<'a, Vec<Applied>> {
        Box::pin(async move {
            let mut outcomes: Vec<Option<Applied>> = claims.iter().map(|_| None).collect();
            let unreached = match self.apply_all(task, claims, &mut outcomes).await {
                Ok(()) => Applied::Collided,
                Err(error) if error.is_collision() => Applied::Collided,
                // What came to its end before stays.
                Err(error) => Applied::Unreached(self.doubt(&error)),
            };
            outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(|| unreached.clone())).collect()
        })
    }

    fn void<'a>(&'a self, journal: i64, fences: &'a [Fence]) -> Answer<'a, Result<Vec<Voided>, String>> {
        Box::pin(async move { self.void_all(journal, fences).await.map_err(|error| self.doubt(&error)) })
    }

    fn aged<'a>(&'a self, round: &'a Round) -> Answer<'a, Result<Vec<DeliveryId>, String>> {
        Box::pin(async move { self.aged_of(round).await.map_err(|error| self.doubt(&error)) })
    }

    fn forget<'a>(&'a self, deliveries: &'a [DeliveryId]) -> Answer<'a, Result<(), String>> {
        Box::pin(async move { self.forget_all(deliveries).await.map_err(|error| self.doubt(&error)) })
    }

    fn rehearse<'a>(
        &'a self,
        statements: &'a SqlHandler,
    ) -> Answer<'a, Result<Vec<(usize, String)>, String>> {
        Box::pin(async move {
            let mut session = self.pool.take().await.map_err(|error| self.doubt(&error))?;
            let misfits = server::rehearse::rehearse::<Postgres>(&mut session, statements).await;
            let misfits = misfits.map_err(|error| self.doubt(&error))?;
            session.keep();
            Ok(misfits.into_iter().map(|misfit| (misfit.statement, misfit.reason)).collect())
        })
    }
}

fn places(claims: &[Claim], wanted: impl Fn(&Claim) -> bool) -> Vec<usize> {
    claims.iter().enumerate().filter(|(_, claim)| wanted(claim)).map(|(place, _)| place).collect()
}

enum Together {
    /// The transaction is committed, and every outcome is known.
    Done,
    /// The transaction is undone. Nothing is known of any of them.
    Spoilt,
}

/// Attempts of one route on one connection.
struct Batch<'b> {
    session: &'b Session,
    task: Task<'b>,
    /// The user's statements, or why they cannot even be prepared.
    prepared: Result<Prepared, Failure>,
}

impl Batch<'_> {
    /// All in one transaction.
    async fn together(
        &self,
        claims: &[Claim],
        places: &[usize],
        outcomes: &mut [Option<Applied>],
    ) -> Result<Together, EngineError> {
        let chosen: Vec<&Claim> = places.iter().filter_map(|place| claims.get(*place)).collect();
        if chosen.len() < 2 {
            return Ok(Together::Spoilt);
        }
        let Ok(prepared) = &self.prepared else { return Ok(Together::Spoilt) };
        match self.transaction(prepared, &chosen).await {
            Ok(found) => {
                for (place, found) in places.iter().zip(found) {
                    if let Some(outcome) = outcomes.get_mut(*place) {
                        *outcome = Some(found);
                    }
                }
                Ok(Together::Done)
            }
            Err(Trouble::Engine(error)) => Err(error),
            Err(Trouble::Ended(_)) => {
                let ended = self.have_ended().await?;
                for place in places {
                    if let Some(outcome) = outcomes.get_mut(*place) {
                        *outcome = Some(ended.clone());
                    }
                }
                Ok(Together::Done)
            }
            Err(Trouble::Failed(_) | Trouble::Deferred(_) | Trouble::Collision) => {
                self.session.run("ROLLBACK").await?;
                Ok(Together::Spoilt)
            }
        }
    }

    /// The statements have ended the transaction, and the guards are committed with what they did, or undone with it. Whoever gives
    /// the delivery up asks the guard which of the two it was.
    async fn have_ended(&self) -> Result<Applied, EngineError> {
        let failure = ended_transaction();
        tracing::error!(error = failure.message.as_str(), "a handler's statements are not as they should be");
        self.session.run("ROLLBACK").await?;
        Ok(Applied::Failed(failure.answered()))
    }

    /// One in a transaction of its own, again if another one was in the way, and once more if its tables have changed since the
    /// statements were prepared.
    async fn alone(&mut self, claim: &Claim) -> Result<Applied, EngineError> {
        let started = Instant::now();
        let mut anew = false;
        loop {
            let tried = match &self.prepared {
                Ok(prepared) => self.transaction(prepared, &[claim]).await,
                Err(failure) => self.guard_only(claim, failure).await,
            };
            match tried {
                Ok(found) => return Ok(found.into_iter().next().unwrap_or(Applied::Collided)),
                Err(Trouble::Engine(error)) => return Err(error),
                Err(Trouble::Ended(_)) => return self.have_ended().await,
                Err(Trouble::Failed(failure)) => {
                    let renewed = match &self.prepared {
                        Ok(prepared) if !anew => {
                            user_sql::renewed(self.session, self.task.statements, prepared, &failure).await
                        }
                        _ => None,
                    };
                    self.session.run("ROLLBACK").await?;
                    let Some(renewed) = renewed else {
                        return Ok(Applied::Failed(failure.answered()));
                    };
                    (self.prepared, anew) = (Ok(renewed), true);
                    continue;
                }
                Err(Trouble::Deferred(failure)) => {
                    self.session.run("ROLLBACK").await?;
                    return Ok(Applied::Failed(failure.answered()));
                }
                Err(Trouble::Collision) => self.session.run("ROLLBACK").await?,
            }
            if started.elapsed() >= PATIENCE {
                return Ok(Applied::Collided);
            }
        }
    }

    /// Statements that cannot be prepared do not run, but what happened at an earlier attempt is known all the same.
    async fn guard_only(&self, claim: &Claim, failure: &Failure) -> Result<Vec<Applied>, Trouble> {
        self.session.run(&format!("BEGIN; {GUARD_SETTINGS}")).await.map_err(Trouble::Engine)?;
        let found = take(self.session, self.task.journal, &[claim]).await.map_err(guard_trouble)?;
        match found.into_iter().next().flatten() {
            Some(known) => {
                self.session.run("COMMIT").await.map_err(Trouble::Engine)?;
                Ok(vec![known])
            }
            None => Err(Trouble::Failed(failure.clone())),
        }
    }

    /// Guards, entities, statements, results, commit. On an error the transaction is still open, unless the commit itself failed.
    async fn transaction(&self, prepared: &Prepared, claims: &[&Claim]) -> Result<Vec<Applied>, Trouble> {
        let Task { statements, journal, comparison } = self.task;
        self.session.run(&format!("BEGIN; {GUARD_SETTINGS}")).await.map_err(Trouble::Engine)?;
        let mut found = take(self.session, journal, claims).await.map_err(guard_trouble)?;
        let mut standings = match comparison {
            Some(comparison) => {
                let taken = claims.iter().zip(&found).filter(|(_, known)| known.is_none());
                let names = entities::names(taken.map(|(claim, _)| &claim.event));
                Some(standing::lock(self.session, journal, comparison, &names).await.map_err(guard_trouble)?)
            }
            None => None,
        };
        let (mut bound, mut passed) = (Vec::with_capacity(claims.len()), Vec::new());
        for (claim, known) in claims.iter().zip(&mut found).filter(|(_, known)| known.is_none()) {
            let turn = standings.as_mut().map_or(Turn::Run(None), |known| known.judge(&claim.event));
            let state = match turn {
                Turn::Run(state) => state,
                Turn::Pass(outcome) => {
                    passed.push(&claim.fence.delivery);
                    *known = Some(outcome);
                    continue;
                }
            };
            let event = HandedEvent { state, ..claim.event.clone() };
            let values = statements.values(&event).map_err(Trouble::Failed)?;
            bound.push(user_sql::bind(statements, prepared, &values).map_err(Trouble::Failed)?);
        }
        give_up(self.session, &passed).await.map_err(guard_trouble)?;
        crate::crash::point("guard_taken");
        let about = claims.first().filter(|_| claims.len() == 1).map(|claim| &claim.event);
        let ran = user_sql::run(self.session, statements, prepared, &bound, SETTINGS, about).await?;
        let mut ran = ran.into_iter();
        let mut outcomes = Vec::with_capacity(claims.len());
        let mut results: Vec<(&Fence, String)> = Vec::new();
        for (claim, known) in claims.iter().zip(found) {
            if let Some(known) = known {
                outcomes.push(known);
                continue;
            }
            let unanswered = || Trouble::Engine(EngineError::other("a statement was not answered"));
            // What has to wait fails as a whole, and the guard goes with it.
            let result = ran.next().ok_or_else(unanswered)?.map_err(Trouble::Deferred)?;
            results.extend(result.clone().map(|result| (&claim.fence, result)));
            outcomes.push(Applied::Done(result));
        }
        crate::crash::point("after_effect");
        keep_results(self.session, &results).await.map_err(guard_trouble)?;
        if let (Some(comparison), Some(standings)) = (comparison, &standings) {
            standing::keep(self.session, journal, comparison, standings).await.map_err(guard_trouble)?;
        }
        // A commit that the server refused (a deferred constraint) is the statements' failure; one that was not answered is
        // not known to have failed.
        self.session.run("COMMIT").await.map_err(user_sql::trouble)?;
        crate::crash::point("between_commits");
        Ok(outcomes)
    }
}

/// Whatever happens to a guard is not the statements' fault.
fn guard_trouble(error: EngineError) -> Trouble {
    if error.is_collision() || error.is_too_slow() { Trouble::Collision } else { Trouble::Engine(error) }
}

/// Columns that name deliveries.
struct Keys<'k> {
    events: Vec<Uuid>,
    routes: Vec<&'k str>,
    epochs: Vec<i32>,
}

impl<'k> Keys<'k> {
    fn of(deliveries: impl IntoIterator<Item = &'k DeliveryId>) -> Self {
        let mut keys = Self { events: Vec::new(), routes: Vec::new(), epochs: Vec::new() };
        for delivery in deliveries {
            keys.events.push(uuid(delivery.event));
            keys.routes.push(delivery.route.as_str());
            keys.epochs.push(int(delivery.epoch));
        }
        keys
    }
}

/// Takes the guards of attempts. Nothing for each that was taken, and so may run; what is known of the others.
///
/// Sorted, so that two batches that share deliveries do not deadlock. One who is writing the same guard is waited for.
async fn take(
    session: &Session,
    journal: i64,
    claims: &[&Claim],
) -> Result<Vec<Option<Applied>>, EngineError> {
    let deliveries: Vec<&DeliveryId> = claims.iter().map(|claim| &claim.fence.delivery).collect();
    let keys = Keys::of(deliveries.iter().copied());
    let attempts: Vec<i32> = claims.iter().map(|claim| int(claim.fence.attempt)).collect();
    let taken = session
        .rows(
            "INSERT INTO oncehook_guard.oncehook_applied AS a (event, route, epoch, attempt, void, journal, at)
             SELECT t.event, t.route, t.epoch, t.attempt, false, $5, now()
               FROM unnest($1::uuid[], $2::text[], $3::integer[], $4::integer[]) AS t(event, route, epoch, attempt)
              ORDER BY t.event, t.route, t.epoch
             ON CONFLICT (event, route, epoch) DO UPDATE
                SET attempt = excluded.attempt, void = false, result = NULL, journal = excluded.journal, at = excluded.at
              WHERE a.void AND a.attempt < excluded.attempt
             RETURNING event, route, epoch",
            &[&keys.events, &keys.routes, &keys.epochs, &attempts, &journal],
        )
        .await?;
    if taken.len() == claims.len() {
        return Ok(claims.iter().map(|_| None).collect());
    }
    let mut ours = HashSet::with_capacity(taken.len());
    for row in &taken {
        ours.insert(delivery(row)?);
    }
    let known = look(session, deliveries.iter().copied().filter(|delivery| !ours.contains(delivery))).await?;
    let told = deliveries.iter().map(|delivery| match known.get(delivery) {
        _ if ours.contains(delivery) => None,
        Some(Guard { void: false, result }) => Some(Applied::Done(result.clone())),
        Some(Guard { void: true, .. }) => Some(Applied::Void),
        // It was there a moment ago. Another turn will see.
        None => Some(Applied::Collided),
    });
    Ok(told.collect())
}

/// A guard that exists.
struct Guard {
    void: bool,
    result: Option<String>,
}

async fn look<'d>(
    session: &Session,
    deliveries: impl Iterator<Item = &'d DeliveryId>,
) -> Result<HashMap<DeliveryId, Guard>, EngineError> {
    let keys = Keys::of(deliveries);
    let rows = session
        .rows(
            "SELECT a.event, a.route, a.epoch, a.void, a.result
               FROM unnest($1::uuid[], $2::text[], $3::integer[]) AS t(event, route, epoch)
               JOIN oncehook_guard.oncehook_applied a ON a.event = t.event AND a.route = t.route AND a.epoch = t.epoch",
            &[&keys.events, &keys.routes, &keys.epochs],
        )
        .await?;
    rows.iter().map(|row| Ok((delivery(row)?, Guard { void: row.get(3), result: row.get(4) }))).collect()
}

fn delivery(row: &tokio_postgres::Row) -> Result<DeliveryId, EngineError> {
    Ok(DeliveryId { event: event_id(row.get(0)), route: route_name(row.get(1))?, epoch: number(row.get(2)) })
}

/// Guards that were taken, and whose deliveries do not run after all, are void: no attempt before this one may run at a time
/// when it would fit.
async fn give_up(session: &Session, deliveries: &[&DeliveryId]) -> Result<(), EngineError> {
    if deliveries.is_empty() {
        return Ok(());
    }
    let keys = Keys::of(deliveries.iter().copied());
    let sql = "UPDATE oncehook_guard.oncehook_applied a SET void = true
                 FROM unnest($1::uuid[], $2::text[], $3::integer[]) AS t(event, route, epoch)
                WHERE a.event = t.event AND a.route = t.route AND a.epoch = t.epoch";
    session.change(sql, &[&keys.events, &keys.routes, &keys.epochs]).await?;
    Ok(())
}

/// Results are kept in the guards, for whoever settles after a crash.
async fn keep_results(session: &Session, results: &[(&Fence, String)]) -> Result<(), EngineError> {
    if results.is_empty() {
        return Ok(());
    }
    let keys = Keys::of(results.iter().map(|(fence, _)| &fence.delivery));
    let texts: Vec<&str> = results.iter().map(|(_, result)| result.as_str()).collect();
    let kept = session
        .change(
            "UPDATE oncehook_guard.oncehook_applied a SET result = t.result
               FROM unnest($1::uuid[], $2::text[], $3::integer[], $4::text[]) AS t(event, route, epoch, result)
              WHERE a.event = t.event AND a.route = t.route AND a.epoch = t.epoch",
            &[&keys.events, &keys.routes, &keys.epochs, &texts],
        )
        .await?;
    match usize::try_from(kept) {
        Ok(kept) if kept == results.len() => Ok(()),
        _ => Err(EngineError::other("a guard is gone that was written a moment ago")),
    }
}

/// Voids attempts: see [`Guarded::void`].
async fn void(session: &Session, journal: i64, fences: &[Fence]) -> Result<Vec<Voided>, EngineError> {
    let keys = Keys::of(fences.iter().map(|fence| &fence.delivery));
    let attempts: Vec<i32> = fences.iter().map(|fence| int(fence.attempt)).collect();
    session
        .rows(
            "INSERT INTO oncehook_guard.oncehook_applied AS a (event, route, epoch, attempt, void, journal, at)
             SELECT t.event, t.route, t.epoch, t.attempt, true, $5, now()
               FROM unnest($1::uuid[], $2::text[], $3::integer[], $4::integer[]) AS t(event, route, epoch, attempt)
              ORDER BY t.event, t.route, t.epoch
             ON CONFLICT (event, route, epoch) DO UPDATE
                SET attempt = greatest(a.attempt, excluded.attempt), at = excluded.at
              WHERE a.void",
            &[&keys.events, &keys.routes, &keys.epochs, &attempts, &journal],
        )
        .await?;
    let known = look(session, fences.iter().map(|fence| &fence.delivery)).await?;
    let told = fences.iter().map(|fence| match known.get(&fence.delivery) {
        Some(Guard { void: true, .. }) => Ok(Voided::Done),
        Some(Guard { void: false, result }) => Ok(Voided::TookEffect(result.clone())),
        None => Err(EngineError::other("a guard is gone that was written a moment ago")),
    });
    told.collect()
}

/// Old guards behind a place. Ids of events begin with their time, so no index on time is needed.
async fn aged(session: &Session, round: &Round) -> Result<Vec<DeliveryId>, EngineError> {
    let behind = round.behind.as_ref();
    let event = behind.map_or(Uuid::nil(), |delivery| uuid(delivery.event));
    let epoch = behind.map_or(-1, |delivery| int(delivery.epoch));
    let age = i64::try_from(round.age.as_secs()).unwrap_or(i64::MAX).min(100 * 365 * 86_400);
    let limit = i64::try_from(round.limit).unwrap_or(i64::MAX);
    let rows = session
        .rows(
            "SELECT event, route, epoch FROM oncehook_guard.oncehook_applied,
                    (SELECT least(now(), to_timestamp($7::bigint / 1000000.0)) AS now) AS t
              WHERE (event, route, epoch) > ($1::uuid, $2::text, $3::integer)
                AND event < (lpad(to_hex((1000 * extract(epoch FROM t.now))::bigint - 1000 * $4::bigint), 12, '0')
                             || repeat('0', 20))::uuid
                AND route = $2::text AND journal = $5 AND at < t.now - $4::bigint * interval '1 second'
              ORDER BY event, route, epoch LIMIT $6",
            &[&event, &round.route.as_str(), &epoch, &age, &round.journal, &limit, &round.now.0],
        )
        .await?;
    rows.iter().map(delivery).collect()
}
