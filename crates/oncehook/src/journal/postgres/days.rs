//! The days of the events and attempts: partitions of the two tables, made ahead of time and dropped when all of a day
//! is old.
//!
//! Promises: accepting never waits for a day and is never refused for want of one: what has no day goes to the rest
//! (the default partition), where rows are forgotten one by one. A dropped day takes nothing with it that must be kept:
//! that moves to the rest in the same transaction. What is dropped leaves a row in `sweeps`, so that what stands beside
//! it in other tables is found after a crash, too (`sweep`).
//!
//! While a day is made beside a big rest, a constraint keeps the day's events out of the rest (a promise). An event of
//! that day that comes meanwhile goes first: the promise is taken back, the event goes to the rest, and the day gets no
//! partition.
//!
//! Does not: wait for long. Both need locks that others hold for moments: what is not had soon is tried again in the
//! next round. Makes no more than [`MOST`] days, because the server locks all of them for a statement that cannot say
//! whose day it needs; with a longer retention the others are forgotten row by row.

use std::time::Duration;

use tokio_postgres::error::SqlState;
use uuid::Uuid;

use super::connection::{EngineError, Session};
use super::queries::uuid;
use crate::journal::server::error::Meaning;
use crate::journal::server::read::buckets::first_of;

/// Days that are made ahead, besides today.
const AHEAD: i64 = 3;

/// Days that there are at once, at most.
const MOST: usize = 45;

/// Events of a day that move to the rest when it is dropped, at most. If there are more, the others are deleted one by
/// one.
const MOVED_AT_MOST: i64 = 10_000;

/// The locks that all accepts might have to wait behind are asked for this long, and what is done under them ends soon.
const PATIENCE: &str = "SET LOCAL lock_timeout = 500; SET LOCAL statement_timeout = 5000";

/// One node at a time makes days: the number is `days` in ASCII. Held over several transactions; a lost connection ends
/// it.
const LOCK: &str = "SELECT pg_try_advisory_lock(1684109683)";
const UNLOCK: &str = "SELECT pg_advisory_unlock(1684109683)";

/// Orders for an event share this lock, and a node that drops a day holds it alone. The number is `orders` in ASCII.
pub(super) const ORDERS: i64 = 122_537_101_324_915;

/// Whether reading the rest takes longer than others should wait.
const BIG_REST: &str =
    "SELECT pg_relation_size('oncehook.events_rest') + pg_relation_size('oncehook.attempts_rest') > 33554432";

/// How promises of the rest are named, before the day.
const PROMISE: &str = "without_";

/// How long one table of a big rest may be read.
const READING_TIME: Duration = Duration::from_secs(300);

/// Tries to take a promise back for an event that waits to be stored. Each takes half a second at most.
const TAKE_BACK_TRIES: usize = 2;

/// Ends the validation of a promise that is running. The session that validates is the one that makes days ([`LOCK`]).
const END_VALIDATION: &str = "
    SELECT pg_cancel_backend(l.pid) FROM pg_catalog.pg_locks l
     WHERE l.locktype = 'advisory' AND l.classid = 0 AND l.objid = 1684109683 AND l.objsubid = 1 AND l.granted
       AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())
       AND EXISTS (SELECT 1 FROM pg_catalog.pg_constraint c
                    WHERE c.conname = $1::text::name AND NOT c.convalidated
                      AND c.conrelid IN (to_regclass('oncehook.events_rest'), to_regclass('oncehook.attempts_rest')))";

pub(super) const DAY_MICROS: i64 = 86_400_000_000;

/// A day that has a partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::journal) struct Day {
    /// Days since 1970.
    number: i64,
    /// As partitions are named: year, month, day.
    name: String,
}

impl Day {
    /// When it begins.
    pub(super) fn begins(&self) -> i64 {
        self.number.saturating_mul(DAY_MICROS)
    }

    /// When it is over.
    pub(super) fn ends(&self) -> i64 {
        self.begins().saturating_add(DAY_MICROS)
    }

    /// Its first id.
    pub(super) fn first(&self) -> Uuid {
        uuid(first_of(self.begins() / 1_000))
    }

    /// The first id that is not its own any more.
    pub(super) fn beyond(&self) -> Uuid {
        uuid(first_of(self.ends() / 1_000))
    }

    /// The constraint by which the rest promises to hold nothing of it.
    fn promise(&self) -> String {
        format!("{PROMISE}{}", self.name)
    }
}

/// Whether a text is how partitions name a day.
pub(super) fn is_name(day: &str) -> bool {
    day.len() == 8 && day.bytes().all(|byte| byte.is_ascii_digit())
}

/// The days of the events, in order.
pub(super) async fn of_events(session: &Session) -> Result<Vec<Day>, EngineError> {
    list(session, "events").await
}

/// Days of attempts whose events have none (any more), in order.
pub(super) async fn of_attempts_alone(session: &Session) -> Result<Vec<Day>, EngineError> {
    let events = list(session, "events").await?;
    let mut attempts = list(session, "attempts").await?;
    attempts.retain(|day| !events.contains(day));
    Ok(attempts)
}

async fn list(session: &Session, table: &str) -> Result<Vec<Day>, EngineError> {
    let sql = "SELECT (to_date(right(c.relname, 8), 'YYYYMMDD') - DATE '1970-01-01')::bigint, right(c.relname, 8)
                 FROM pg_catalog.pg_inherits h JOIN pg_catalog.pg_class c ON c.oid = h.inhrelid
                WHERE h.inhparent = to_regclass('oncehook.' || $1::text) AND c.relname ~ ('^' || $1 || '_[0-9]{8}$')
                ORDER BY 1";
    let rows = session.rows(sql, &[&table]).await?;
    Ok(rows.iter().map(|row| Day { number: row.get(0), name: row.get(1) }).collect())
}

/// Makes today and the days ahead where they are missing. What cannot be made now is left for the next time.
/// `in_round`: the janitor calls, who has time; a start waits for it.
pub(super) async fn make(session: &Session, given: Option<i64>, in_round: bool) -> Result<(), EngineError> {
    let there = list(session, "events").await?;
    let sql = "SELECT n, to_char(DATE '1970-01-01' + n::integer, 'YYYYMMDD'), n - today
                 FROM (SELECT coalesce($1::bigint, oncehook.micros()) / 86400000000 AS today) t,
                      generate_series(today, today + $2) AS n";
    let rows = session.rows(sql, &[&given, &AHEAD]).await?;
    let wanted = rows.iter().map(|row| (Day { number: row.get(0), name: row.get(1) }, row.get::<_, i64>(2)));
    let missing: Vec<(Day, i64)> = wanted.filter(|(day, _)| !there.contains(day)).collect();
    if missing.is_empty() && promises(session).await?.is_empty() {
        return Ok(());
    }
    if !session.row(LOCK, &[]).await?.is_some_and(|row| row.get(0)) {
        return Ok(());
    }
    // A node ended before it had made the day of a promise.
    take_back_promises(session).await?;
    let big = session.row(BIG_REST, &[]).await?.is_none_or(|row| row.get(0));
    for (day, ahead) in missing.iter().take(MOST.saturating_sub(there.len())) {
        let made = match big {
            false => attach(session, day, false).await,
            // Events of that day come only from a node whose clock is wrong.
            true if in_round && *ahead >= 2 => attach_beside_a_big_rest(session, day).await,
            true => Ok(()),
        };
        if let Err(error) = made {
            // Accepting goes on without the day. If the connection is lost, this fails too.
            session.run("ROLLBACK").await?;
            if is_hindered(&error) {
                tracing::debug!(day = day.name.as_str(), %error, "a day was not made now");
            } else {
                tracing::warn!(day = day.name.as_str(), %error, "a day cannot be made");
            }
            take_back_promises(session).await?;
        }
    }
    session.row(UNLOCK, &[]).await?;
    Ok(())
}

/// Another transaction is in the way, or the rest has rows of that day, or this role may not make tables.
fn is_hindered(error: &EngineError) -> bool {
    let codes = [SqlState::CHECK_VIOLATION, SqlState::INSUFFICIENT_PRIVILEGE];
    error.is_too_slow() || error.is_collision() || codes.iter().any(|code| error.has_code(code.code()))
}

/// Whether the rest holds something of a day.
async fn is_taken(session: &Session, day: &Day) -> Result<bool, EngineError> {
    let sql = "SELECT EXISTS (SELECT 1 FROM oncehook.events_rest WHERE id >= $1 AND id < $2)
                   OR EXISTS (SELECT 1 FROM oncehook.attempts_rest WHERE event >= $1 AND event < $2)";
    Ok(session.row(sql, &[&day.first(), &day.beyond()]).await?.is_none_or(|row| row.get(0)))
}

/// Whether both tables of the rest have promised to hold nothing of a day, and the promises are validated.
async fn is_promised(session: &Session, day: &Day) -> Result<bool, EngineError> {
    let sql = "SELECT count(*) = 2 FROM pg_catalog.pg_constraint
                WHERE conrelid IN (to_regclass('oncehook.events_rest'), to_regclass('oncehook.attempts_rest'))
                  AND conname = $1::text::name AND convalidated";
    Ok(session.row(sql, &[&day.promise()]).await?.is_some_and(|row| row.get(0)))
}

/// Makes a day, in one transaction. The server takes no lock that accepts wait for, except where they go to the rest.
/// `promised`: the rest has promised to hold nothing of that day. Without a promise the server reads all of the rest, while
/// every statement waits that needs it.
async fn attach(session: &Session, day: &Day, promised: bool) -> Result<(), EngineError> {
    let (name, promise) = (&day.name, day.promise());
    let (first, beyond) = (day.first(), day.beyond());
    session.run(&format!("BEGIN; {PATIENCE}")).await?;
    let taken = is_taken(session, day).await?;
    // The statement above has locked the rest, so a promise that is there now stays until the end of the transaction.
    if !taken && (!promised || is_promised(session, day).await?) {
        for table in ["events", "attempts"] {
            session
                .run(&format!(
                    "CREATE TABLE oncehook.{table}_{name} (LIKE oncehook.{table} INCLUDING ALL);
                     ALTER TABLE oncehook.{table} ATTACH PARTITION oncehook.{table}_{name}
                       FOR VALUES FROM ('{first}') TO ('{beyond}');
                     ALTER TABLE oncehook.{table}_rest DROP CONSTRAINT IF EXISTS {promise}"
                ))
                .await?;
        }
    }
    session.run("COMMIT").await
}

/// The same where reading the rest takes long. First the rest promises to hold nothing of that day, which the server
/// validates while all others go on; then it need not read the rest to attach the day. Until the day is attached an
/// event of that day makes the rest take its promise back ([`give_way`]), so this is done days ahead.
async fn attach_beside_a_big_rest(session: &Session, day: &Day) -> Result<(), EngineError> {
    let promise = day.promise();
    let (first, beyond) = (day.first(), day.beyond());
    let each = |what: &dyn Fn(&str, &str) -> String| what("events", "id") + &what("attempts", "event");
    let give = each(&|table, id| {
        format!(
            "; ALTER TABLE oncehook.{table}_rest
                 ADD CONSTRAINT {promise} CHECK ({id} < '{first}' OR {id} >= '{beyond}') NOT VALID"
        )
    });
    session.run(&format!("BEGIN; {PATIENCE}{give}")).await?;
    // The rest is locked: after the commit no row of that day comes into it.
    if is_taken(session, day).await? {
        return session.run("ROLLBACK").await;
    }
    session.run("COMMIT").await?;
    let validate = each(&|table, _| format!("; ALTER TABLE oncehook.{table}_rest VALIDATE CONSTRAINT {promise}"));
    let validate = format!(
        "BEGIN; SET LOCAL lock_timeout = 500; SET LOCAL statement_timeout = {}{validate}; COMMIT",
        READING_TIME.as_millis()
    );
    match tokio::time::timeout(READING_TIME * 3, session.batch_execute(&validate)).await {
        Ok(validated) => validated?,
        Err(_) => return Err(EngineError::away("the rest was not read in time")),
    }
    attach(session, day, true).await
}

/// Makes room for an event that an append could not store because the rest has promised to hold nothing of its day: ends
/// the validation of the promise, and takes it back. Returns the error of the append; it is a collision if the same
/// append can store the event now.
///
/// Needs the owner of the tables, who made the promise. The caller is in no transaction.
pub(super) async fn give_way(session: &Session, error: EngineError) -> EngineError {
    let day = error.constraint.as_deref().and_then(|name| name.strip_prefix(PROMISE));
    let Some(day) = day.filter(|day| is_name(day)) else { return error };
    let promise = format!("{PROMISE}{day}");
    for _ in 0..TAKE_BACK_TRIES {
        if let Err(error) = session.rows(END_VALIDATION, &[&promise]).await {
            tracing::warn!(day, %error, "the validation of a day cannot be ended for an event");
        }
        if take_back(session, &promise).await.unwrap_or(false) {
            tracing::info!(day, "an event came for a day that was being made; the day stays in the rest");
            let meaning = Meaning { collision: true, ..Meaning::default() };
            return EngineError { meaning, ..error };
        }
    }
    error
}

/// Takes back every promise of the rest, where no other transaction is in the way.
async fn take_back_promises(session: &Session) -> Result<(), EngineError> {
    for promise in promises(session).await? {
        take_back(session, &promise).await?;
    }
    Ok(())
}

/// Takes a promise back, in a transaction of its own. Returns whether it is gone; the error is that of the connection.
async fn take_back(session: &Session, promise: &str) -> Result<bool, EngineError> {
    let drop = |table| format!("ALTER TABLE oncehook.{table}_rest DROP CONSTRAINT IF EXISTS {promise}");
    let (events, attempts) = (drop("events"), drop("attempts"));
    match session.run(&format!("BEGIN; {PATIENCE}; {events}; {attempts}; COMMIT")).await {
        Ok(()) => Ok(true),
        Err(error) => {
            session.run("ROLLBACK").await?;
            tracing::debug!(promise, %error, "a promise of the rest could not be taken back now");
            Ok(false)
        }
    }
}

/// Promises of the rest that are still there.
async fn promises(session: &Session) -> Result<Vec<String>, EngineError> {
    let sql = "SELECT DISTINCT quote_ident(conname::text) FROM pg_catalog.pg_constraint
                WHERE conrelid IN (to_regclass('oncehook.events_rest'), to_regclass('oncehook.attempts_rest'))
                  AND starts_with(conname::text, $1)";
    let rows = session.rows(sql, &[&PROMISE]).await?;
    Ok(rows.iter().map(|row| row.get(0)).collect())
}

/// What came of dropping a day.
pub(super) enum Dropped {
    /// It is gone, with this many events.
    Gone(usize),
    /// Too much of it has to be kept.
    Crowded,
}

/// Events that may have to be kept: something of them waits, runs or is dead, or they are held. Found in the partial
/// indexes, where the usual event is not. `kept` decides.
const CANDIDATES: &str = "
    SELECT event FROM oncehook.deliveries WHERE state = 'dead' AND event >= $3 AND event < $4
     UNION ALL
    SELECT event FROM oncehook.deliveries WHERE state IN ('parked', 'superseded', 'skipped') AND state = 'parked'
       AND event >= $3 AND event < $4
     UNION ALL
    SELECT event FROM oncehook.deliveries WHERE state IN ('ready', 'retrying') AND event >= $3 AND event < $4
     UNION ALL
    SELECT event FROM oncehook.deliveries WHERE state = 'running' AND event >= $3 AND event < $4
     UNION ALL
    SELECT event FROM oncehook.flags WHERE flag = 'quarantined' AND event >= $3 AND event < $4";

/// Drops a day of events, in the transaction of its caller. `kept` is the condition under which an event `e` stays; its
/// parameters are the time and how long the dead are kept.
///
/// First, orders wait (only an order could make an event worth keeping again), and so do events of that day that come
/// very late. Accepts and workers go on while this finds out what must stay. Then all of them wait for a moment: the
/// day is detached, what stays is inserted again, which puts it into the rest, and the table is dropped. So an order
/// finds the event whole, or finds nothing.
pub(super) async fn drop_events(
    session: &Session,
    given: Option<i64>,
    dead: Option<i64>,
    day: &Day,
    kept: &str,
) -> Result<Dropped, EngineError> {
    let name = &day.name;
    let (first, beyond) = (day.first(), day.beyond());
    // Orders wait before they lock anything, or they and this would wait for each other.
    let orders = format!("SELECT pg_advisory_xact_lock({ORDERS})");
    session.run(&format!("{PATIENCE}; {orders}; LOCK TABLE oncehook.events_{name} IN EXCLUSIVE MODE")).await?;
    let sql = format!("SELECT e.id FROM oncehook.events_{name} e WHERE e.id IN ({CANDIDATES}) AND ({kept}) LIMIT $5");
    let rows = session.rows(&sql, &[&given, &dead, &first, &beyond, &(MOVED_AT_MOST + 1)]).await?;
    let stay: Vec<Uuid> = rows.iter().map(|row| row.get(0)).collect();
    if i64::try_from(stay.len()).unwrap_or(i64::MAX) > MOVED_AT_MOST {
        return Ok(Dropped::Crowded);
    }
    let sql = format!("SELECT count(*) FROM oncehook.events_{name}");
    let count: i64 = session.row(&sql, &[]).await?.map_or(0, |row| row.get(0));
    // Dead ones stand in lines and are counted for people, so those that may go do not wait for the sweep.
    let sql =
        "DELETE FROM oncehook.deliveries WHERE state = 'dead' AND event >= $1 AND event < $2 AND event <> ALL ($3)";
    session.change(sql, &[&first, &beyond, &stay]).await?;
    let gone = usize::try_from(count).unwrap_or(usize::MAX).saturating_sub(stay.len());
    if gone > 0 {
        let sql = "INSERT INTO oncehook.sweeps (first, beyond) VALUES ($1, $2) ON CONFLICT (first) DO NOTHING";
        session.change(sql, &[&first, &beyond]).await?;
    }
    session.run(&format!("ALTER TABLE oncehook.events DETACH PARTITION oncehook.events_{name}")).await?;
    let sql =
        format!("INSERT INTO oncehook.events SELECT * FROM oncehook.events_{name} WHERE id = ANY ($1) ORDER BY id");
    session.change(&sql, &[&stay]).await?;
    session.run(&format!("DROP TABLE oncehook.events_{name}")).await?;
    session.forget_statements();
    Ok(Dropped::Gone(gone))
}

/// Drops a day of attempts whose events have none any more, in the transaction of its caller. Attempts of events that
/// are still there go to the rest.
pub(super) async fn drop_attempts(session: &Session, day: &Day) -> Result<Dropped, EngineError> {
    let name = &day.name;
    let (first, beyond) = (day.first(), day.beyond());
    session.run(PATIENCE).await?;
    let sql = "SELECT id FROM oncehook.events WHERE id >= $1 AND id < $2 LIMIT $3";
    let rows = session.rows(sql, &[&first, &beyond, &(MOVED_AT_MOST + 1)]).await?;
    if i64::try_from(rows.len()).unwrap_or(i64::MAX) > MOVED_AT_MOST {
        return Ok(Dropped::Crowded);
    }
    session.run(&format!("ALTER TABLE oncehook.attempts DETACH PARTITION oncehook.attempts_{name}")).await?;
    let sql = format!(
        "INSERT INTO oncehook.attempts
         SELECT a.* FROM (SELECT id FROM oncehook.events WHERE id >= $1 AND id < $2) e
          CROSS JOIN LATERAL (SELECT * FROM oncehook.attempts_{name} WHERE event = e.id OFFSET 0) a"
    );
    session.change(&sql, &[&first, &beyond]).await?;
    session.run(&format!("DROP TABLE oncehook.attempts_{name}")).await?;
    session.forget_statements();
    Ok(Dropped::Gone(0))
}
