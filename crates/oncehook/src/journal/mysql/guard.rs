//! A MySQL or MariaDB database that is not the journal's, and in which effects happen once: see [`Guarded`].
//!
//! The guards stand in a table of their own, `oncehook_applied`, made at the first use. Sessions never commit by themselves, so
//! everything between two COMMITs is one transaction. There is no conflict target to name here: a guard that exists is looked
//! for and locked first, and an insert that meets one all the same (somebody else's, of this moment) is a collision.
//!
//! Promises: a guard and the effect it stands for commit together; the guard is asked before the statements run, so
//! whatever those would make of a second run (a unique key, a missing table) does not matter. Whatever goes wrong with the
//! guards themselves is [`Applied::Unreached`]: no delivery is to blame for it.
//!
//! Does not: settle anything. And it does not notice if somebody empties the guards: what was applied and not settled at
//! that moment would run again.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use mysql_async::{Row, Value};
use serde_json::json;

use super::Mysql;
use super::OpenError;
use super::connection::{Insert, Pool, Purpose, Session};
use super::engine_error::EngineError;
use super::row::{event, hex, id, is_true, list, maybe_text, small, text};
use super::standing;
use super::user_sql::{self, Prepared, Trouble};
use crate::delivery::{Claim, DeliveryId, Failure, Fence, HandedEvent, RouteName};
use crate::handler::SqlHandler;
use crate::handler::elsewhere::{Answer, Applied, Guarded, Round, Task, Voided};
use crate::handler::entities::{self, Turn};
use crate::handler::sql::ended_transaction;
use crate::journal::server::{self, engine::Engine};

/// Connections to one such database, for all routes.
const CONNECTIONS: usize = 8;

/// How long a statement of a `sql` handler may take.
const HANDLER_TIME: Duration = Duration::from_secs(10);

/// How long other transactions that are in the way are put up with; what is left then is for another turn.
const PATIENCE: Duration = Duration::from_secs(2);

/// The guards. `attempt` is the one that wrote the row; `journal` says whose delivery it is, because several gateways may use
/// the database.
const TABLE: &str = "CREATE TABLE IF NOT EXISTS oncehook_applied (
  event   BINARY(16) NOT NULL,
  route   VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  epoch   INT UNSIGNED NOT NULL,
  attempt INT UNSIGNED NOT NULL,
  void    TINYINT NOT NULL,
  result  MEDIUMTEXT CHARACTER SET utf8mb4,
  journal BIGINT NOT NULL,
  at      BIGINT NOT NULL,
  PRIMARY KEY (event, route, epoch)
) ENGINE = InnoDB";

/// What the catalogue says about it. A trigger or another unique key would show here too.
const EXPECTED: [&str; 10] = [
    "column at bigint not null",
    "column attempt int not null",
    "column epoch int not null",
    "column event binary not null",
    "column journal bigint not null",
    "column result mediumtext",
    "column route varchar not null collate ascii_bin",
    "column void tinyint not null",
    "key PRIMARY event,route,epoch",
    "table InnoDB",
];

const SHAPE: &str = "
SELECT CONCAT('table ', ENGINE) FROM information_schema.TABLES
 WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME = ?
UNION ALL
SELECT CONCAT('column ', COLUMN_NAME, ' ', DATA_TYPE, IF(IS_NULLABLE = 'YES', '', ' not null'),
              IF(COLUMN_NAME = 'route', CONCAT(' collate ', COLLATION_NAME), ''))
  FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME = ?
UNION ALL
SELECT CONCAT('key ', INDEX_NAME, ' ', GROUP_CONCAT(COLUMN_NAME, COALESCE(SUB_PART, '') ORDER BY SEQ_IN_INDEX))
  FROM information_schema.STATISTICS
 WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME = ? AND NON_UNIQUE = 0 GROUP BY INDEX_NAME
UNION ALL
SELECT CONCAT('trigger ', TRIGGER_NAME) FROM information_schema.TRIGGERS
 WHERE EVENT_OBJECT_SCHEMA = DATABASE() AND EVENT_OBJECT_TABLE = ?";

const NAME: &str = "oncehook_applied";

fn gone(table: &str) -> EngineError {
    EngineError::other(format!(
        "{table} is gone, and with it the memory of what was applied; put it back, or restart the gateway to begin with an \
         empty one"
    ))
}

/// A list of deliveries, as the table that it becomes.
const DELIVERIES: &str = "JSON_TABLE(?, '$[*]' COLUMNS (event VARCHAR(32) PATH '$[0]', route VARCHAR(64) PATH '$[1]',
                                              epoch INT UNSIGNED PATH '$[2]', attempt INT UNSIGNED PATH '$[3]')) t";

/// A database of the user's on MySQL or MariaDB.
pub struct MysqlElsewhere {
    pool: Pool,
    shown: String,
    /// Whether the guards were found sound since the last trouble.
    sound: AtomicBool,
    /// Whether they were ever there. Then they are not made anew: what they knew would be lost in silence.
    seen: AtomicBool,
}

impl MysqlElsewhere {
    /// Reads the URL. Nothing is connected before the first use, so a database that is down stops nobody from starting.
    pub fn new(url: &str) -> Result<Self, OpenError> {
        let connector = Arc::new(Mysql::new(url, HANDLER_TIME)?);
        let shown = connector.shown();
        let pool = Pool::new(connector, Purpose::Work, CONNECTIONS);
        Ok(Self { pool, shown, sound: AtomicBool::new(false), seen: AtomicBool::new(false) })
    }

    /// Makes sure that the guards are there and as they should be. Outside of a transaction: making them would end one.
    async fn prepare(&self, session: &mut Session) -> Result<(), EngineError> {
        if self.sound.load(Ordering::Acquire) {
            return Ok(());
        }
        let tables =
            [(NAME, TABLE, &EXPECTED[..]), (standing::NAME, standing::TABLE, &standing::EXPECTED[..])];
        let mut shapes = Vec::with_capacity(tables.len());
        for (name, table, expected) in tables {
            let mut found = shape(session, name).await?;
            if found.is_empty() {
                if self.seen.load(Ordering::Acquire) {
                    return Err(gone(name));
                }
                session.run(table).await?;
                tracing::info!(database = self.shown, "made a table for the guards of effects: {name}");
                found = shape(session, name).await?;
            }
            shapes.push((name, expected, found));
        }
        self.seen.store(true, Ordering::Release);
        for (name, expected, found) in shapes {
            if let Some(line) = expected.iter().find(|line| !found.iter().any(|found| found == *line)) {
                return Err(EngineError::other(format!("{name}: this is missing, or changed: {line}")));
            }
            if let Some(line) = found.iter().find(|found| !expected.contains(&found.as_str())) {
                return Err(EngineError::other(format!("{name}: this is not ours: {line}")));
            }
        }
        self.sound.store(true, Ordering::Release);
        Ok(())
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
        let mut session = self.pool.take().await?;
        self.prepare(&mut session).await?;
        // The guards are asked even if the statements cannot be prepared.
        let prepared = match user_sql::prepare(&mut session, task.statements).await {
            Ok(prepared) => Ok(prepared),
            Err(Trouble::Failed(failure) | Trouble::Deferred(failure)) => Err(failure),
            Err(Trouble::Collision | Trouble::Ended(_)) => {
                return Err(EngineError::other("a statement could not be prepared now"));
            }
            Err(Trouble::Engine(error)) => return Err(error),
        };
        // Looking at the tables has begun a transaction.
        session.run("ROLLBACK").await?;
        let mut batch = Batch { session: &mut session, task, prepared };
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
        let mut session = self.pool.take().await?;
        self.prepare(&mut session).await?;
        let voided = void(&mut session, journal, fences).await?;
        session.run("COMMIT").await?;
        session.keep();
        Ok(voided)
    }

    async fn aged_of(&self, round: &Round) -> Result<Vec<DeliveryId>, EngineError> {
        let mut session = self.pool.take().await?;
        self.prepare(&mut session).await?;
        let aged = aged(&mut session, round).await?;
        session.run("ROLLBACK").await?;
        session.keep();
        Ok(aged)
    }

    async fn forget_all(&self, deliveries: &[DeliveryId]) -> Result<(), EngineError> {
        let mut session = self.pool.take().await?;
        let asked =
            list(deliveries.iter().map(|one| json!([hex(one.event), one.route.as_str(), one.epoch, 0])));
        let sql = format!(
            "DELETE a FROM {DELIVERIES} STRAIGHT_JOIN oncehook_applied a
                 ON a.event = UNHEX(t.event) AND a.route = t.route AND a.epoch = t.epoch"
        );
        session.change(&sql, vec![asked]).await?;
        session.run("COMMIT").await?;
        session.keep();
        Ok(())
    }
}

impl Guarded for MysqlElsewhere {
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
            let misfits = server::rehearse::rehearse::<Mysql>(&mut session, statements).await;
            let misfits = misfits.map_err(|error| self.doubt(&error))?;
            session.keep();
            Ok(misfits.into_iter().map(|misfit| (misfit.statement, misfit.reason)).collect())
        })
    }
}

/// What the catalogue says; nothing if there is no such table.
async fn shape(session: &mut Session, table: &str) -> Result<Vec<String>, EngineError> {
    let rows = session.rows(SHAPE, vec![table.into(); 4]).await?;
    let lines = rows.iter().map(|row| text(row, 0)).collect();
    session.run("ROLLBACK").await?;
    lines
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
    session: &'b mut Session,
    task: Task<'b>,
    /// The user's statements, or why they cannot even be prepared.
    prepared: Result<Prepared, Failure>,
}

impl Batch<'_> {
    /// All in one transaction.
    async fn together(
        &mut self,
        claims: &[Claim],
        places: &[usize],
        outcomes: &mut [Option<Applied>],
    ) -> Result<Together, EngineError> {
        let chosen: Vec<&Claim> = places.iter().filter_map(|place| claims.get(*place)).collect();
        if chosen.len() < 2 || self.prepared.is_err() {
            return Ok(Together::Spoilt);
        }
        match self.transaction(&chosen).await {
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
                for place in places {
                    if let Some(outcome) = outcomes.get_mut(*place) {
                        *outcome = Some(have_ended());
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

    /// One in a transaction of its own, again if another one was in the way.
    async fn alone(&mut self, claim: &Claim) -> Result<Applied, EngineError> {
        let started = Instant::now();
        loop {
            match self.transaction(&[claim]).await {
                Ok(found) => return Ok(found.into_iter().next().unwrap_or(Applied::Collided)),
                Err(Trouble::Engine(error)) => return Err(error),
                Err(Trouble::Ended(_)) => return Ok(have_ended()),
                Err(Trouble::Failed(failure) | Trouble::Deferred(failure)) => {
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

    /// Guards, entities, statements, results, commit. On an error the transaction must be undone: after a deadlock it is gone,
    /// after other errors only the last statement is.
    async fn transaction(&mut self, claims: &[&Claim]) -> Result<Vec<Applied>, Trouble> {
        let Task { statements, journal, comparison } = self.task;
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
            bound.push(user_sql::bind(statements, &values));
        }
        give_up(self.session, &passed).await.map_err(guard_trouble)?;
        crate::crash::point("guard_taken");
        let mut ran = Vec::new();
        if !bound.is_empty() {
            let prepared = self.prepared.as_ref().map_err(|failure| Trouble::Failed(failure.clone()))?;
            let about = claims.first().filter(|_| claims.len() == 1);
            let about = about.map(|claim| (statements, &claim.event));
            ran = match user_sql::run(self.session, prepared, bound, about).await {
                Err(Trouble::Ended(ran)) => {
                    // The guards are committed, also those of claims that were not run any more: these take no effect.
                    let taken = claims.iter().zip(&found).filter(|(_, known)| known.is_none()).skip(ran);
                    let left: Vec<_> = taken.map(|(claim, _)| &claim.fence.delivery).collect();
                    self.session.run("ROLLBACK").await.map_err(Trouble::Engine)?;
                    give_up(self.session, &left).await.map_err(guard_trouble)?;
                    self.session.run("COMMIT").await.map_err(Trouble::Engine)?;
                    return Err(Trouble::Ended(ran));
                }
                ran => ran?,
            };
        }
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
            let result = ran.next().ok_or_else(unanswered)?.map_err(Trouble::Failed)?;
            results.extend(result.clone().map(|result| (&claim.fence, result)));
            outcomes.push(Applied::Done(result));
        }
        crate::crash::point("after_effect");
        keep_results(self.session, results).await.map_err(guard_trouble)?;
        if let (Some(comparison), Some(standings)) = (comparison, &standings) {
            standing::keep(self.session, journal, comparison, standings).await.map_err(guard_trouble)?;
        }
        // A commit that was not answered is not known to have failed.
        self.session.run("COMMIT").await.map_err(Trouble::Engine)?;
        crate::crash::point("between_commits");
        Ok(outcomes)
    }
}

/// The statements have ended the transaction, and the guards are committed with what they did. Whoever gives the delivery up asks
/// the guard whether it took effect.
fn have_ended() -> Applied {
    let failure = ended_transaction();
    tracing::error!(error = failure.message.as_str(), "a handler's statements are not as they should be");
    Applied::Failed(failure.answered())
}

/// Whatever happens to a guard is not the statements' fault.
fn guard_trouble(error: EngineError) -> Trouble {
    // 1062: somebody has written the same guard since we looked.
    let met = error.has_code("1062");
    if met || error.is_collision() || error.is_too_slow() {
        Trouble::Collision
    } else {
        Trouble::Engine(error)
    }
}

/// A guard that exists.
struct Guard {
    attempt: u32,
    void: bool,
    result: Option<String>,
}

fn delivery(row: &Row) -> Result<DeliveryId, EngineError> {
    let route = RouteName::new(&text(row, 1)?).map_err(|_| EngineError::damaged())?;
    Ok(DeliveryId { event: event(row, 0)?, route, epoch: small(row, 2)? })
}

/// The guards of these deliveries, locked until the transaction ends. One who is writing one is waited for. The key is named:
/// if it is gone, that is an error.
async fn look<'d>(
    session: &mut Session,
    deliveries: impl Iterator<Item = &'d DeliveryId>,
) -> Result<HashMap<DeliveryId, Guard>, EngineError> {
    let asked = list(deliveries.map(|one| json!([hex(one.event), one.route.as_str(), one.epoch, 0])));
    let sql = format!(
        "SELECT a.event, a.route, a.epoch, a.attempt, a.void, a.result FROM {DELIVERIES}
          STRAIGHT_JOIN oncehook_applied a FORCE INDEX (PRIMARY)
             ON a.event = UNHEX(t.event) AND a.route = t.route AND a.epoch = t.epoch
            FOR UPDATE"
    );
    let rows = session.rows(&sql, vec![asked]).await?;
    let guard = |row: &Row| {
        let guard = Guard { attempt: small(row, 3)?, void: is_true(row, 4)?, result: maybe_text(row, 5)? };
        Ok((delivery(row)?, guard))
    };
    rows.iter().map(guard).collect()
}

const NEW_GUARDS: Insert<'static> = Insert {
    head: "INSERT INTO oncehook_applied (event, route, epoch, attempt, void, journal, at)",
    row: "(?, ?, ?, ?, ?, ?, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)))",
    tail: "",
};

/// Writes guards that were not there a moment ago, in a fixed order, so that two batches that share deliveries do not
/// deadlock.
async fn write(
    session: &mut Session,
    journal: i64,
    void: bool,
    mut fences: Vec<&Fence>,
) -> Result<(), EngineError> {
    if fences.is_empty() {
        return Ok(());
    }
    fences.sort_by_key(|fence| (fence.delivery.event, fence.delivery.epoch));
    let rows = fences.into_iter().map(|fence| -> Vec<Value> {
        let DeliveryId { event, route, epoch } = &fence.delivery;
        let (epoch, attempt) = (i64::from(*epoch), i64::from(fence.attempt));
        vec![
            id(*event),
            route.as_str().into(),
            epoch.into(),
            attempt.into(),
            i64::from(void).into(),
            journal.into(),
        ]
    });
    session.insert(NEW_GUARDS, rows.collect()).await.map(|_| ())
}

/// Takes the guards of attempts. Nothing for each that was taken, and so may run; what is known of the others.
async fn take(
    session: &mut Session,
    journal: i64,
    claims: &[&Claim],
) -> Result<Vec<Option<Applied>>, EngineError> {
    let known = look(session, claims.iter().map(|claim| &claim.fence.delivery)).await?;
    let (mut fresh, mut retaken) = (Vec::new(), Vec::new());
    let mut told = Vec::with_capacity(claims.len());
    for claim in claims {
        told.push(match known.get(&claim.fence.delivery) {
            None => {
                fresh.push(&claim.fence);
                None
            }
            Some(Guard { void: false, result, .. }) => Some(Applied::Done(result.clone())),
            Some(Guard { attempt, .. }) if *attempt < claim.fence.attempt => {
                retaken.push(&claim.fence);
                None
            }
            Some(_) => Some(Applied::Void),
        });
    }
    write(session, journal, false, fresh).await?;
    if !retaken.is_empty() {
        // They are locked, and so still as they were seen.
        let asked = list(retaken.iter().map(|Fence { delivery, attempt }| {
            json!([hex(delivery.event), delivery.route.as_str(), delivery.epoch, attempt])
        }));
        let sql = format!(
            "UPDATE {DELIVERIES} STRAIGHT_JOIN oncehook_applied a
                 ON a.event = UNHEX(t.event) AND a.route = t.route AND a.epoch = t.epoch
                SET a.attempt = t.attempt, a.void = 0, a.result = NULL, a.journal = ?, a.at = {}",
            super::NOW
        );
        session.change(&sql, vec![asked, journal.into()]).await?;
    }
    Ok(told)
}

/// Guards that were taken, and whose deliveries do not run after all, are void: no attempt before this one may run at a time
/// when it would fit.
async fn give_up(session: &mut Session, deliveries: &[&DeliveryId]) -> Result<(), EngineError> {
    if deliveries.is_empty() {
        return Ok(());
    }
    let asked = list(deliveries.iter().map(|one| json!([hex(one.event), one.route.as_str(), one.epoch, 0])));
    let sql = format!(
        "UPDATE {DELIVERIES} STRAIGHT_JOIN oncehook_applied a
             ON a.event = UNHEX(t.event) AND a.route = t.route AND a.epoch = t.epoch
            SET a.void = 1"
    );
    session.change(&sql, vec![asked]).await?;
    Ok(())
}

/// Results are kept in the guards, for whoever settles after a crash.
async fn keep_results(session: &mut Session, results: Vec<(&Fence, String)>) -> Result<(), EngineError> {
    if results.is_empty() {
        return Ok(());
    }
    let sql = "UPDATE oncehook_applied SET result = ? WHERE event = ? AND route = ? AND epoch = ?";
    let statement = session.prepared(sql).await?;
    for (fence, result) in results {
        let DeliveryId { event, route, epoch } = &fence.delivery;
        let row = vec![result.into(), id(*event), route.as_str().into(), i64::from(*epoch).into()];
        session.rows_of(&statement, row).await?;
    }
    Ok(())
}

/// Voids attempts: see [`Guarded::void`].
async fn void(session: &mut Session, journal: i64, fences: &[Fence]) -> Result<Vec<Voided>, EngineError> {
    let known = look(session, fences.iter().map(|fence| &fence.delivery)).await?;
    let fresh = fences.iter().filter(|fence| !known.contains_key(&fence.delivery)).collect();
    write(session, journal, true, fresh).await?;
    let mut voided = Vec::with_capacity(fences.len());
    for fence in fences {
        voided.push(match known.get(&fence.delivery) {
            Some(Guard { void: false, result, .. }) => Voided::TookEffect(result.clone()),
            _ => Voided::Done,
        });
    }
    let asked = list(fences.iter().map(|Fence { delivery, attempt }| {
        json!([hex(delivery.event), delivery.route.as_str(), delivery.epoch, attempt])
    }));
    let sql = format!(
        "UPDATE {DELIVERIES} STRAIGHT_JOIN oncehook_applied a
             ON a.event = UNHEX(t.event) AND a.route = t.route AND a.epoch = t.epoch
            SET a.attempt = GREATEST(a.attempt, t.attempt), a.at = {} WHERE a.void = 1",
        super::NOW
    );
    session.change(&sql, vec![asked]).await?;
    Ok(voided)
}

/// Old guards behind a place. Ids of events begin with their time, so no index on time is needed.
async fn aged(session: &mut Session, round: &Round) -> Result<Vec<DeliveryId>, EngineError> {
    let behind = round.behind.as_ref();
    let after: Value = behind.map_or_else(|| Value::Bytes(vec![0; 16]), |delivery| id(delivery.event));
    let epoch = behind.map_or(-1, |delivery| i64::from(delivery.epoch));
    let age = i64::try_from(round.age.as_micros()).unwrap_or(i64::MAX).min(100 * 365 * 86_400_000_000);
    let limit = i64::try_from(round.limit).unwrap_or(i64::MAX);
    // The first 48 bits of an id are milliseconds.
    let sql = format!(
        "SELECT event, route, epoch FROM oncehook_applied
          WHERE event >= ? AND (event > ? OR epoch > ?)
            AND event < UNHEX(RPAD(LPAD(HEX(({now} - ?) DIV 1000), 12, '0'), 32, '0'))
            AND route = ? AND journal = ? AND at < {now} - ?
          ORDER BY event, route, epoch LIMIT ?",
        now = format!("LEAST({}, {})", super::NOW, round.now.0)
    );
    let route = round.route.as_str();
    let parameters = vec![
        after.clone(),
        after,
        epoch.into(),
        age.into(),
        route.into(),
        round.journal.into(),
        age.into(),
        limit.into(),
    ];
    session.rows(&sql, parameters).await?.iter().map(delivery).collect()
}
