//! Forgetting: old events, then the keys that outlive them, then the audit; a small batch at a time.
//!
//! Promises: what is pending is never forgotten, dead and quarantined events only when the operator said how long they are
//! kept; a key only after its window and when nothing more can come of its event. Each batch is one short transaction, and
//! of several nodes one forgets at a time. An event is locked before it is looked at for the last time, so an order that
//! comes at that moment finds it whole or finds nothing.
//!
//! Nothing goes while the clock is in doubt (`journal::forgetting`): each batch looks at it first. The time that counts is the
//! earlier one of the database's and this node's, so one wrong clock alone forgets nothing too early.
//!
//! A round goes over the events from the oldest on, then over the ledger. Where it is, is kept in memory by the caller; a
//! restart begins a new round, which costs reading and nothing else.
//!
//! Does not: drop day partitions. A unique key of a partitioned table would have to hold the day.

use oncehook_verify::UnixMicros;

use super::connection::Session;
use super::engine_error::EngineError;
use super::row::{IDS, bytes, event, id, ids, is_true, maybe_text, number, text};
use super::{Mysql, ends, search};
use crate::event::EventId;
use crate::journal::server::operate::audit;
use crate::journal::{ClockDoubt, ClockMemory, Forgotten, Retention, TRUST_CLOCK, Who, look};

/// Where a round is.
#[derive(Debug, Clone)]
pub(super) enum Round {
    /// Among the events, behind this one.
    Events(EventId),
    /// In the ledger, behind this key.
    Keys(String, Vec<u8>),
}

impl Default for Round {
    fn default() -> Self {
        Self::Events(EventId::from_bytes([0; 16]))
    }
}

/// One node at a time. Named locks are the whole server's, and belong to the session: they end with it, too.
const LOCK: &str = "CONCAT('oncehook-forget-', SHA1(DATABASE()))";

/// Forgets a batch. Returns also where the round is then.
pub(super) async fn batch(
    session: &mut Session,
    given: Option<i64>,
    wall: i64,
    round: &Round,
    retention: &Retention,
) -> Result<(Forgotten, Round), EngineError> {
    let now = session.now(given).await?.min(wall);
    let mut forgotten = Forgotten { stopped: look_at_clock(session, now).await?, ..Forgotten::default() };
    session.run("COMMIT").await?;
    if forgotten.stopped.is_some() {
        return Ok((forgotten, round.clone()));
    }
    let locked = session.row(&format!("SELECT GET_LOCK({LOCK}, 0)"), Vec::new()).await?;
    if locked.map(|row| is_true(&row, 0)).transpose()? != Some(true) {
        session.run("COMMIT").await?;
        return Ok((forgotten, round.clone()));
    }
    let next = match round {
        Round::Events(after) => events(session, now, *after, retention, &mut forgotten).await?,
        Round::Keys(source, key) => keys(session, now, (source, key), retention, &mut forgotten).await?,
    };
    let sql = "DELETE FROM oncehook_audit WHERE at <= ? ORDER BY id LIMIT ?";
    let old = now.saturating_sub(micros(retention.audit));
    let audit = session.change(sql, vec![old.into(), limit(retention.batch).into()]).await?;
    session.run("COMMIT").await?;
    session.row(&format!("SELECT RELEASE_LOCK({LOCK})"), Vec::new()).await?;
    session.run("COMMIT").await?;
    forgotten.audit = usize::try_from(audit).unwrap_or(usize::MAX);
    forgotten.more = next.is_some() || forgotten.audit == retention.batch;
    Ok((forgotten, next.unwrap_or_default()))
}

/// Where the clock's memory stands: among the entities, under a scope that no route and no machine can have.
const CLOCK: (&str, &str) = ("clock:forgetting", "seen");

/// Compares the clock with the time that was believed last. Returns the doubt in which nothing may be forgotten.
async fn look_at_clock(session: &mut Session, now: i64) -> Result<Option<ClockDoubt>, EngineError> {
    let sql = "SELECT state FROM oncehook_entities WHERE scope = ? AND entity = ?";
    let stored = session.row(sql, vec![CLOCK.0.into(), CLOCK.1.into()]).await?;
    let stored = stored.map(|row| maybe_text(&row, 0)).transpose()?.flatten();
    let stored = stored.as_deref().and_then(ClockMemory::parse);
    let newest = match stored {
        Some(_) => None,
        None => {
            let sql = "SELECT received_at FROM oncehook_events ORDER BY id DESC LIMIT 1";
            session.row(sql, Vec::new()).await?.map(|row| number(&row, 0)).transpose()?
        }
    };
    let (memory, doubt) = look(stored, newest.map(UnixMicros), UnixMicros(now));
    if memory.is_news(stored.as_ref()) {
        remember_clock(session, &memory).await?;
    }
    Ok(doubt)
}

async fn remember_clock(session: &mut Session, memory: &ClockMemory) -> Result<(), EngineError> {
    let sql = "INSERT INTO oncehook_entities (scope, entity, state) VALUES (?, ?, ?) ON DUPLICATE KEY UPDATE state = ?";
    let text = memory.text();
    let row = vec![CLOCK.0.into(), CLOCK.1.into(), text.as_str().into(), text.as_str().into()];
    session.change(sql, row).await.map(|_| ())
}

/// An operator says that the time is right.
pub(super) async fn trust_clock(
    session: &mut Session,
    given: Option<i64>,
    wall: i64,
    who: &Who,
) -> Result<(), EngineError> {
    let now = session.now(given).await?.min(wall);
    remember_clock(session, &ClockMemory::believing(UnixMicros(now))).await?;
    let (action, subject) = TRUST_CLOCK;
    audit::<Mysql>(session, now, who, action, subject, None).await?;
    session.run("COMMIT").await
}

fn limit(batch: usize) -> u64 {
    u64::try_from(batch).unwrap_or(u64::MAX)
}

/// An age. One that is longer than there has been time is as long as that.
fn micros(age: std::time::Duration) -> i64 {
    i64::try_from(age.as_micros()).unwrap_or(i64::MAX).min(i64::MAX / 2)
}

/// What stands in the way of forgetting: something pending, or something that an operator may still want and that ended
/// (or, if it is held, came) not long enough ago: after the time that is asked for twice. Null keeps such things for ever.
const KEPT: &str = "
   (EXISTS (SELECT 1 FROM oncehook_deliveries d WHERE d.event = e.id
               AND (d.state IN ('ready', 'running', 'retrying', 'parked')
                    OR d.state = 'dead' AND COALESCE(COALESCE(d.settled_at, e.received_at) > ?, TRUE)))
 OR EXISTS (SELECT 1 FROM oncehook_flags f WHERE f.event = e.id AND f.flag = 'quarantined' AND COALESCE(e.received_at > ?, TRUE)))";

/// Goes on among the events. Returns where the round is then.
async fn events(
    session: &mut Session,
    now: i64,
    after: EventId,
    retention: &Retention,
    forgotten: &mut Forgotten,
) -> Result<Option<Round>, EngineError> {
    let dead = retention.dead.map(|dead| now.saturating_sub(micros(dead)));
    let young = now.saturating_sub(micros(retention.payload));
    let sql = format!(
        "SELECT e.id, e.received_at > ?, {KEPT} FROM oncehook_events e WHERE e.id > ? ORDER BY e.id LIMIT ?"
    );
    let asked = vec![young.into(), dead.into(), dead.into(), id(after), limit(retention.batch).into()];
    // Events stand in the order in which they came; behind the first young one there are no old ones. (Nodes whose clocks
    // differ may mix the last of them; those are for the next round.)
    let mut old: Vec<(EventId, bool)> = Vec::new();
    for row in session.rows(&sql, asked).await? {
        if is_true(&row, 1)? {
            break;
        }
        old.push((event(&row, 0)?, is_true(&row, 2)?));
    }
    let chosen: Vec<EventId> = old.iter().filter(|(_, kept)| !kept).map(|(id, _)| *id).collect();
    if !chosen.is_empty() {
        search::wait_for_marks(session).await?;
        let sql = format!(
            "SELECT e.id FROM {IDS} STRAIGHT_JOIN oncehook_events e ON e.id = UNHEX(t.id) FOR UPDATE SKIP LOCKED"
        );
        let locked = found(session, &sql, vec![ids(chosen)]).await?;
        // Looked at again now that nobody can order anything for them.
        let sql = format!(
            "SELECT e.id FROM {IDS} STRAIGHT_JOIN oncehook_events e ON e.id = UNHEX(t.id) WHERE NOT {KEPT}"
        );
        let gone = found(session, &sql, vec![ids(locked), dead.into(), dead.into()]).await?;
        delete(session, &gone).await?;
        search::forget_marks(session, &gone).await?;
        forgotten.events = gone.len();
    }
    let through = old.len() < retention.batch;
    let reached = old.last().map_or(after, |(id, _)| *id);
    Ok(Some(if through { Round::Keys(String::new(), Vec::new()) } else { Round::Events(reached) }))
}

async fn found(
    session: &mut Session,
    sql: &str,
    parameters: Vec<mysql_async::Value>,
) -> Result<Vec<EventId>, EngineError> {
    session.rows(sql, parameters).await?.iter().map(|row| event(row, 0)).collect()
}

/// Removes events and all that stands beside them, except their keys.
async fn delete(session: &mut Session, events: &[EventId]) -> Result<(), EngineError> {
    if events.is_empty() {
        return Ok(());
    }
    ends::forget(session, events).await?;
    let bodies = format!(
        "DELETE b FROM {IDS} STRAIGHT_JOIN oncehook_events e ON e.id = UNHEX(t.id)
            STRAIGHT_JOIN oncehook_bodies b ON b.source = e.source AND b.digest = e.digest AND b.event = e.id
          WHERE NOT e.key_signed"
    );
    session.change(&bodies, vec![ids(events.iter().copied())]).await?;
    for (table, column) in [
        ("oncehook_deliveries", "event"),
        ("oncehook_attempts", "event"),
        ("oncehook_conflicts", "event"),
        ("oncehook_duplicates", "event"),
        ("oncehook_flags", "event"),
        ("oncehook_spool_aliases", "event"),
        ("oncehook_events", "id"),
    ] {
        let sql = format!("DELETE o FROM {IDS} STRAIGHT_JOIN {table} o ON o.{column} = UNHEX(t.id)");
        session.change(&sql, vec![ids(events.iter().copied())]).await?;
    }
    Ok(())
}

/// Goes on in the ledger. Returns where the round is then; nowhere if it is over.
async fn keys(
    session: &mut Session,
    now: i64,
    (source, key): (&str, &[u8]),
    retention: &Retention,
    forgotten: &mut Forgotten,
) -> Result<Option<Round>, EngineError> {
    let sql = "SELECT source, `key`, expires_at FROM oncehook_keys
                WHERE source > ? OR source = ? AND `key` > ? ORDER BY source, `key` LIMIT ?";
    let asked = vec![source.into(), source.into(), key.into(), limit(retention.batch).into()];
    let rows = session.rows(sql, asked).await?;
    let mut expired = Vec::new();
    for row in &rows {
        if number(row, 2)? <= now {
            expired.push(serde_json::json!([text(row, 0)?, hex::encode(bytes(row, 1)?)]));
        }
    }
    if !expired.is_empty() {
        // A key goes if nothing more can come of its event, short of a forced replay. An event that is gone has neither of
        // these rows.
        let sql = "DELETE k FROM JSON_TABLE(?, '$[*]' COLUMNS (source VARCHAR(64) CHARACTER SET utf8mb4 PATH '$[0]', name VARCHAR(510) PATH '$[1]')) t
                     STRAIGHT_JOIN oncehook_keys k ON k.source = t.source AND k.`key` = UNHEX(t.name)
                    WHERE k.expires_at <= ?
                      AND NOT EXISTS (SELECT 1 FROM oncehook_deliveries d WHERE d.event = k.event
                                         AND d.state IN ('ready', 'running', 'retrying', 'parked', 'dead'))
                      AND NOT EXISTS (SELECT 1 FROM oncehook_flags f WHERE f.event = k.event AND f.flag = 'quarantined')";
        let deleted = session.change(sql, vec![super::row::list(expired), now.into()]).await?;
        forgotten.keys = usize::try_from(deleted).unwrap_or(usize::MAX);
    }
    match rows.last() {
        Some(last) if rows.len() == retention.batch => {
            Ok(Some(Round::Keys(text(last, 0)?, bytes(last, 1)?.to_vec())))
        }
        _ => Ok(None),
    }
}
