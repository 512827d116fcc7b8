//! Forgetting: old events, then the keys that outlive them, then the audit; a whole day or a small batch at a time.
//!
//! Promises: what is pending is never forgotten, dead and quarantined events only when the operator said how long they are
//! kept; a key only after its window and when nothing more can come of its event. Each batch is one short transaction, and
//! of several nodes one forgets at a time. An event is locked before it is looked at for the last time, so an order that
//! comes at that moment finds it whole or finds nothing.
//!
//! A day that is old as a whole is dropped (`days`), and what stood beside its events is swept behind it (`sweep`). Row by row
//! go: what has no day; days with few events, which costs little and keeps to the minute; and all days if the retention is
//! shorter than [`SHORT`]. Of other days nothing is forgotten before all of it may go, so their events stay up to a day
//! longer than the retention.
//!
//! Nothing goes while the clock is in doubt (`journal::forgetting`): each batch looks at it first. The time that counts is the
//! earlier one of the database's and this node's, so one wrong clock alone forgets nothing too early.
//!
//! A round makes missing days, goes over the events from the oldest on, then over the days of attempts, the sweeps and the ledger.
//! Where it is, is kept in memory by the caller; a restart begins a new round, which costs reading and nothing else.

use oncehook_verify::UnixMicros;
use tokio_postgres::error::SqlState;
use uuid::Uuid;

use super::connection::{EngineError, Session};
use super::days::{self, DAY_MICROS, Day, Dropped, When};
use super::{Postgres, search, sweep};
use crate::journal::server::operate::audit;
use crate::journal::{ClockDoubt, ClockMemory, Forgotten, Retention, TRUST_CLOCK, Who, look, spans};

/// Where a round is.
#[derive(Debug, Clone)]
pub(super) enum Round {
    /// Among the events, from this id on. In the middle of a day: that day goes row by row.
    Events(Uuid),
    /// At a day of events that is to be dropped.
    Day(Day, Walked),
    /// At the days of attempts.
    Attempts,
    /// Behind days that were dropped.
    Sweep(sweep::Place),
    /// In the ledger, behind this key.
    Keys(String, Vec<u8>),
}

/// Whether the events of a day were gone over one by one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Walked {
    Yes,
    No,
}

/// A day of at most this many events goes row by row.
const FEW: i64 = 10_000;

/// With a retention shorter than this, a day more or less would not be what the operator asked for (microseconds).
const SHORT: i64 = 2 * DAY_MICROS;

impl Default for Round {
    fn default() -> Self {
        Self::Events(Uuid::nil())
    }
}

/// One node at a time: the number is `forget` in ASCII.
const LOCK: &str = "SELECT pg_try_advisory_xact_lock(112632776975732)";

/// Forgets a batch. Returns also where the round is then.
pub(super) async fn batch(
    session: &Session,
    given: Option<i64>,
    wall: i64,
    round: &Round,
    retention: &Retention,
) -> Result<(Forgotten, Round), EngineError> {
    if matches!(round, Round::Events(from) if from.is_nil()) {
        days::make(session, given, When::Round).await?;
    }
    session.run("BEGIN").await?;
    let now = time(session, given).await?.min(wall);
    let mut forgotten = Forgotten { stopped: look_at_clock(session, now).await?, ..Forgotten::default() };
    if forgotten.stopped.is_some() {
        session.run("COMMIT").await?;
        return Ok((forgotten, round.clone()));
    }
    let given = Some(now);
    let locked = session.row(LOCK, &[]).await?.is_some_and(|row| row.get(0));
    if !locked {
        session.run("COMMIT").await?;
        return Ok((forgotten, round.clone()));
    }
    let next = match round {
        Round::Events(from) => Some(events(session, given, *from, retention, &mut forgotten).await?),
        Round::Day(day, _) if !days::of_events(session).await?.contains(day) => {
            // Another node was faster.
            Some(Round::Events(day.beyond()))
        }
        Round::Day(day, walked) => {
            let dropped = days::drop_events(session, given, retention.dead.map(micros), day, KEPT).await;
            Some(match settle(session, dropped).await? {
                Some(Dropped::Gone(events)) => {
                    forgotten.events = events;
                    Round::Events(day.beyond())
                }
                Some(Dropped::Crowded) if *walked == Walked::No => Round::Events(spans::behind(day.first())),
                // Somebody is in the way, or much of it has to stay: the next round looks again.
                Some(Dropped::Crowded) | None => Round::Events(day.beyond()),
            })
        }
        Round::Attempts => {
            let time = time(session, given).await?;
            let alone = days::of_attempts_alone(session).await?;
            let old = alone.iter().find(|day| day.ends() <= time - micros(retention.payload));
            let dropped = match old {
                Some(day) => settle(session, days::drop_attempts(session, day).await).await?,
                None => None,
            };
            let again = matches!(dropped, Some(Dropped::Gone(_)));
            Some(if again { Round::Attempts } else { Round::Sweep(sweep::Place::default()) })
        }
        Round::Sweep(place) => Some(match sweep::batch(session, place, limit(retention.batch)).await? {
            Some(place) => Round::Sweep(place),
            None => Round::Keys(String::new(), Vec::new()),
        }),
        Round::Keys(source, key) => keys(session, given, (source, key), retention, &mut forgotten).await?,
    };
    let sql = "DELETE FROM oncehook.audit WHERE id IN (
                 SELECT id FROM oncehook.audit WHERE at <= coalesce($1::bigint, oncehook.micros()) - $2 ORDER BY id LIMIT $3)";
    let audit = session.change(sql, &[&given, &micros(retention.audit), &limit(retention.batch)]).await?;
    session.run("COMMIT").await?;
    if forgotten.events > 0 && matches!(round, Round::Day(..)) {
        crate::crash::point("day_dropped");
    }
    forgotten.audit = usize::try_from(audit).unwrap_or(usize::MAX);
    forgotten.more = next.is_some() || forgotten.audit == retention.batch;
    Ok((forgotten, next.unwrap_or_default()))
}

/// Where the clock's memory stands: among the entities, under a scope that no route and no machine can have.
const CLOCK: (&str, &str) = ("clock:forgetting", "seen");

/// Compares the clock with the time that was believed last. Returns the doubt in which nothing may be forgotten.
async fn look_at_clock(session: &Session, now: i64) -> Result<Option<ClockDoubt>, EngineError> {
    let sql = "SELECT state FROM oncehook.entities WHERE scope = $1 AND entity = $2";
    let stored = session.row(sql, &[&CLOCK.0, &CLOCK.1]).await?;
    let stored = stored.and_then(|row| row.get::<_, Option<&str>>(0).and_then(ClockMemory::parse));
    let newest = match stored {
        Some(_) => None,
        None => session.row("SELECT received_at FROM oncehook.events ORDER BY id DESC LIMIT 1", &[]).await?,
    };
    let (memory, doubt) = look(stored, newest.map(|row| UnixMicros(row.get(0))), UnixMicros(now));
    if memory.is_news(stored.as_ref()) {
        remember_clock(session, &memory).await?;
    }
    Ok(doubt)
}

async fn remember_clock(session: &Session, memory: &ClockMemory) -> Result<(), EngineError> {
    let sql = "INSERT INTO oncehook.entities (scope, entity, state) VALUES ($1, $2, $3)
                ON CONFLICT (scope, entity) DO UPDATE SET state = excluded.state";
    session.change(sql, &[&CLOCK.0, &CLOCK.1, &memory.text()]).await.map(|_| ())
}

/// An operator says that the time is right.
pub(super) async fn trust_clock(
    session: &mut Session,
    given: Option<i64>,
    wall: i64,
    who: &Who,
) -> Result<(), EngineError> {
    let now = time(session, given).await?.min(wall);
    session.run("BEGIN").await?;
    remember_clock(session, &ClockMemory::believing(UnixMicros(now))).await?;
    let (action, subject) = TRUST_CLOCK;
    audit::<Postgres>(session, now, who, action, subject, None).await?;
    session.run("COMMIT").await
}

/// What came of a drop; nothing if others were in the way. Then the transaction is undone, and another one begun.
async fn settle(
    session: &Session,
    dropped: Result<Dropped, EngineError>,
) -> Result<Option<Dropped>, EngineError> {
    match dropped {
        Ok(dropped) => Ok(Some(dropped)),
        Err(error) if error.is_too_slow() => {
            tracing::debug!(%error, "a day was not dropped now");
            session.run("ROLLBACK; BEGIN").await?;
            Ok(None)
        }
        // Made by another role. Its rows can be deleted all the same.
        Err(error) if error.has_code(SqlState::INSUFFICIENT_PRIVILEGE.code()) => {
            session.run("ROLLBACK; BEGIN").await?;
            Ok(Some(Dropped::Crowded))
        }
        Err(error) => Err(error),
    }
}

/// The time that counts.
async fn time(session: &Session, given: Option<i64>) -> Result<i64, EngineError> {
    match given {
        Some(time) => Ok(time),
        None => search::time(session).await,
    }
}

fn limit(batch: usize) -> i64 {
    i64::try_from(batch).unwrap_or(i64::MAX)
}

/// An age. One that is longer than there has been time is as long as that.
fn micros(age: std::time::Duration) -> i64 {
    i64::try_from(age.as_micros()).unwrap_or(i64::MAX).min(i64::MAX / 2)
}

/// What stands in the way of forgetting: something pending, or something that an operator may still want and that ended
/// (or, if it is held, came) not long enough ago. `$2` is how long such things are kept; null is for ever.
const KEPT: &str = "
    EXISTS (SELECT 1 FROM oncehook.deliveries d WHERE d.event = e.id
               AND (d.state IN ('ready', 'running', 'retrying', 'parked')
                    OR d.state = 'dead' AND ($2::bigint IS NULL OR coalesce(d.settled_at, e.received_at)
                                             > coalesce($1::bigint, oncehook.micros()) - $2)))
 OR EXISTS (SELECT 1 FROM oncehook.flags f WHERE f.event = e.id AND f.flag = 'quarantined'
               AND ($2::bigint IS NULL OR e.received_at > coalesce($1::bigint, oncehook.micros()) - $2))";

/// Goes on among the events. Returns where the round is then. How each day goes is decided here and nowhere else.
async fn events(
    session: &Session,
    given: Option<i64>,
    from: Uuid,
    retention: &Retention,
    forgotten: &mut Forgotten,
) -> Result<Round, EngineError> {
    let oldest_kept = time(session, given).await? - micros(retention.payload);
    let days = days::of_events(session).await?;
    let next_day = days.into_iter().find(|day| day.beyond() > from);
    let Some(day) = next_day else {
        return Ok(match walk(session, given, (from, Uuid::max()), retention, forgotten).await? {
            Walk::To(id) => Round::Events(id),
            Walk::Through | Walk::Young => Round::Attempts,
        });
    };
    if from < day.first() {
        return Ok(match walk(session, given, (from, day.first()), retention, forgotten).await? {
            Walk::To(id) => Round::Events(id),
            Walk::Through => Round::Events(day.first()),
            Walk::Young => Round::Attempts,
        });
    }
    let whole = day.ends() <= oldest_kept;
    if from == day.first() {
        if day.begins() > oldest_kept {
            return Ok(Round::Attempts);
        }
        let short = !whole && micros(retention.payload) < SHORT;
        if !short && !has_few(session, &day).await? {
            return Ok(if whole { Round::Day(day, Walked::No) } else { Round::Attempts });
        }
    }
    Ok(match walk(session, given, (from, day.beyond()), retention, forgotten).await? {
        Walk::To(id) => Round::Events(id),
        // All that is left of it is kept.
        Walk::Through if whole => Round::Day(day, Walked::Yes),
        Walk::Through => Round::Events(day.beyond()),
        Walk::Young => Round::Attempts,
    })
}

/// Whether a day has few events.
async fn has_few(session: &Session, day: &Day) -> Result<bool, EngineError> {
    let sql = "SELECT 1 FROM oncehook.events WHERE id >= $1 AND id < $2 ORDER BY id OFFSET $3 LIMIT 1";
    Ok(session.row(sql, &[&day.first(), &day.beyond(), &FEW]).await?.is_none())
}

/// Where a batch of events that were looked at one by one ended.
enum Walk {
    /// Full; it goes on with this id.
    To(Uuid),
    /// At the end of the part that was given.
    Through,
    /// At an event that is too young, as all behind it are.
    Young,
}

/// Forgets events one by one, between two ids (the second excluded).
async fn walk(
    session: &Session,
    given: Option<i64>,
    (from, beyond): (Uuid, Uuid),
    retention: &Retention,
    forgotten: &mut Forgotten,
) -> Result<Walk, EngineError> {
    let dead = retention.dead.map(micros);
    let sql = format!(
        "SELECT e.id, e.received_at > coalesce($1::bigint, oncehook.micros()) - $4 AS young, {KEPT} AS kept
           FROM oncehook.events e WHERE e.id >= $3 AND e.id < $6 ORDER BY e.id LIMIT $5"
    );
    let rows = session
        .rows(&sql, &[&given, &dead, &from, &micros(retention.payload), &limit(retention.batch), &beyond])
        .await?;
    // Events stand in the order in which they came; behind the first young one there are no old ones. (Nodes whose clocks
    // differ may mix the last of them; those are for the next round.)
    let old: Vec<(Uuid, bool)> =
        rows.iter().take_while(|row| !row.get::<_, bool>(1)).map(|row| (row.get(0), row.get(2))).collect();
    let chosen: Vec<Uuid> = old.iter().filter(|(_, kept)| !kept).map(|(id, _)| *id).collect();
    if !chosen.is_empty() {
        let sql = "SELECT id FROM oncehook.events WHERE id = ANY($1) ORDER BY id FOR UPDATE SKIP LOCKED";
        let locked: Vec<Uuid> = session.rows(sql, &[&chosen]).await?.iter().map(|row| row.get(0)).collect();
        // Looked at again now that nobody can order anything for them.
        let sql = format!("SELECT e.id FROM oncehook.events e WHERE e.id = ANY($3) AND NOT ({KEPT})");
        let rows = session.rows(&sql, &[&given, &dead, &locked]).await?;
        let gone: Vec<Uuid> = rows.iter().map(|row| row.get(0)).collect();
        delete(session, &gone).await?;
        forgotten.events = gone.len();
    }
    if let (Some((first, _)), Some((last, _))) = (old.first(), old.last()) {
        search::forget_marks(session, *first, *last).await?;
    }
    Ok(match old.last() {
        _ if old.len() < rows.len() => Walk::Young,
        Some((last, _)) if old.len() == retention.batch => Walk::To(spans::behind(*last)),
        _ => Walk::Through,
    })
}

/// Removes events and all that stands beside them, except their keys.
async fn delete(session: &Session, events: &Vec<Uuid>) -> Result<(), EngineError> {
    for sql in [
        "DELETE FROM oncehook.bodies b USING oncehook.events e
          WHERE e.id = ANY($1) AND NOT e.key_signed AND b.source = e.source AND b.digest = e.digest AND b.event = e.id",
        "DELETE FROM oncehook.deliveries WHERE event = ANY($1)",
        "DELETE FROM oncehook.attempts   WHERE event = ANY($1)",
        "DELETE FROM oncehook.conflicts  WHERE event = ANY($1)",
        "DELETE FROM oncehook.duplicates WHERE event = ANY($1)",
        "DELETE FROM oncehook.flags      WHERE event = ANY($1)",
        "DELETE FROM oncehook.spool_aliases WHERE event = ANY($1)",
        "DELETE FROM oncehook.events     WHERE id = ANY($1)",
    ] {
        session.change(sql, &[events]).await?;
    }
    Ok(())
}

/// Goes on in the ledger. Returns where the round is then; nowhere if it is over.
async fn keys(
    session: &Session,
    given: Option<i64>,
    (source, key): (&str, &[u8]),
    retention: &Retention,
    forgotten: &mut Forgotten,
) -> Result<Option<Round>, EngineError> {
    let sql =
        "SELECT source, key FROM oncehook.keys WHERE (source, key) > ($1, $2) ORDER BY source, key LIMIT $3";
    let rows = session.rows(sql, &[&source, &key, &limit(retention.batch)]).await?;
    let (sources, keys): (Vec<&str>, Vec<&[u8]>) =
        rows.iter().map(|row| (row.get::<_, &str>(0), row.get::<_, &[u8]>(1))).unzip();
    if let (Some(last_source), Some(last_key)) = (sources.last(), keys.last()) {
        // A key goes if nothing more can come of its event, short of a forced replay. An event that is gone has neither of
        // these rows.
        let deleted = session
            .change(
                "DELETE FROM oncehook.keys k
                  USING unnest($2::text[], $3::bytea[]) AS t(source, key)
                  WHERE k.source = t.source AND k.key = t.key AND k.expires_at <= coalesce($1::bigint, oncehook.micros())
                    AND NOT EXISTS (SELECT 1 FROM oncehook.deliveries d WHERE d.event = k.event
                                       AND d.state IN ('ready', 'running', 'retrying', 'parked', 'dead'))
                    AND NOT EXISTS (SELECT 1 FROM oncehook.flags f WHERE f.event = k.event AND f.flag = 'quarantined')",
                &[&given, &sources, &keys],
            )
            .await?;
        forgotten.keys = usize::try_from(deleted).unwrap_or(usize::MAX);
        if rows.len() == retention.batch {
            return Ok(Some(Round::Keys((*last_source).to_owned(), (*last_key).to_vec())));
        }
    }
    Ok(None)
}
