//! Forgetting: old events, then the keys that outlive them, then the audit; a small batch at a time.
//!
//! Promises: what is pending is never forgotten, dead and quarantined events only when the operator said how long they are
//! kept; a key only after its window and when nothing more can come of its event. Each batch is one short transaction.
//!
//! Nothing goes while the clock is in doubt (`journal::forgetting`): each batch looks at it first.
//!
//! A round goes over the events from the oldest on, then over the ledger. Where it is, is kept in memory by the caller; a
//! restart begins a new round, which costs reading and nothing else.

use oncehook_verify::UnixMicros;
use rusqlite::{Connection, OptionalExtension, TransactionBehavior, params};

use super::ledger::{self, Ledger};
use super::{groups, orders};
use crate::event::EventId;
use crate::journal::{ClockDoubt, ClockMemory, Forgotten, Retention, TRUST_CLOCK, Who, look};

/// Where a round is.
#[derive(Debug, Clone)]
pub(super) enum Round {
    /// Among the events, behind this one.
    Events(i64),
    /// In the ledger, behind this key.
    Keys(String, Vec<u8>),
}

impl Default for Round {
    fn default() -> Self {
        Self::Events(0)
    }
}

/// Forgets a batch.
pub(super) fn batch(
    connection: &mut Connection,
    ledger: &mut Ledger,
    round: &mut Round,
    retention: &Retention,
    now: UnixMicros,
) -> Result<Forgotten, rusqlite::Error> {
    let stopped = look_at_clock(connection, now)?;
    if stopped.is_some() {
        return Ok(Forgotten { stopped, ..Forgotten::default() });
    }
    if merge_first(connection, ledger, retention, now)? {
        return Ok(Forgotten { more: true, ..Forgotten::default() });
    }
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let mut forgotten = Forgotten::default();
    let next = match round {
        Round::Events(after) => events(&transaction, *after, retention, now, &mut forgotten)?,
        Round::Keys(source, key) => keys(&transaction, (source, key), retention, now, &mut forgotten)?,
    };
    forgotten.audit = transaction
        .prepare_cached(
            "DELETE FROM oncehook_audit WHERE id IN (SELECT id FROM oncehook_audit ORDER BY id LIMIT ?2) AND at <= ?1",
        )?
        .execute(params![before(now, retention.audit), limit(retention.batch)])?;
    transaction.commit()?;
    forgotten.more = next.is_some() || forgotten.audit == retention.batch;
    *round = next.unwrap_or_default();
    Ok(forgotten)
}

/// Compares the clock with the time that was believed last. Returns the doubt in which nothing may be forgotten.
pub(super) fn look_at_clock(connection: &Connection, now: UnixMicros) -> Result<Option<ClockDoubt>, rusqlite::Error> {
    let stored: Option<String> = connection
        .prepare_cached("SELECT value FROM oncehook_meta WHERE name = 'clock'")?
        .query_row([], |row| row.get(0))
        .optional()?;
    let stored = stored.as_deref().and_then(ClockMemory::parse);
    let newest = match stored {
        Some(_) => None,
        None => connection
            .prepare_cached("SELECT received_at FROM oncehook_events ORDER BY seq DESC LIMIT 1")?
            .query_row([], |row| row.get(0).map(UnixMicros))
            .optional()?,
    };
    let (memory, doubt) = look(stored, newest, now);
    if memory.is_news(stored.as_ref()) {
        remember_clock(connection, &memory)?;
    }
    Ok(doubt)
}

fn remember_clock(connection: &Connection, memory: &ClockMemory) -> Result<(), rusqlite::Error> {
    let sql = "INSERT INTO oncehook_meta (name, value) VALUES ('clock', ?1)
                ON CONFLICT (name) DO UPDATE SET value = excluded.value";
    connection.prepare_cached(sql)?.execute([memory.text()]).map(|_| ())
}

/// An operator says that this time is right.
pub(super) fn trust_clock(connection: &Connection, who: &Who, now: UnixMicros) -> Result<(), rusqlite::Error> {
    remember_clock(connection, &ClockMemory::believing(now))?;
    let (action, subject) = TRUST_CLOCK;
    orders::write_down(connection, who, action, subject, None, now)
}

/// An event whose key is not in the ledger yet is the only record of it, so keys that are old go there first. Returns
/// whether there was something to do. (With the usual settings keys are there days before.)
fn merge_first(
    connection: &mut Connection,
    ledger: &mut Ledger,
    retention: &Retention,
    now: UnixMicros,
) -> Result<bool, rusqlite::Error> {
    // The oldest of them speaks for all: looking at each would cost a walk through the newest events.
    let waiting: Option<bool> = connection
        .prepare_cached(
            "SELECT received_at <= ?2 OR key_expires_at <= ?3 FROM oncehook_events WHERE seq > ?1 ORDER BY seq LIMIT 1",
        )?
        .query_row(params![ledger::merged_to(connection)?, before(now, retention.payload), now.0], |row| row.get(0))
        .optional()?;
    let waiting = waiting.unwrap_or(false);
    if waiting {
        ledger.freeze();
        ledger.merge_alone(connection, ledger::MERGED_ALONE)?;
    }
    Ok(waiting)
}

fn limit(batch: usize) -> i64 {
    i64::try_from(batch).unwrap_or(i64::MAX)
}

fn before(now: UnixMicros, age: std::time::Duration) -> i64 {
    now.0.saturating_sub(i64::try_from(age.as_micros()).unwrap_or(i64::MAX))
}

/// Goes on among the events. Returns where the round is then.
fn events(
    connection: &Connection,
    after: i64,
    retention: &Retention,
    now: UnixMicros,
    forgotten: &mut Forgotten,
) -> Result<Option<Round>, rusqlite::Error> {
    let old = before(now, retention.payload);
    let old_dead = retention.dead.map_or(i64::MIN, |dead| before(now, dead));
    // What stands in the way of forgetting: something pending, or something that an operator may still want and that
    // ended (or, if it is held, came) not long enough ago.
    let mut statement = connection.prepare_cached(
        "SELECT e.seq, e.received_at, e.source, e.digest,
                EXISTS (SELECT 1 FROM oncehook_deliveries d WHERE d.event = e.seq
                           AND (d.state IN ('ready', 'running', 'retrying', 'parked')
                                OR d.state = 'dead' AND coalesce(d.settled_at, e.received_at) > ?3))
             OR EXISTS (SELECT 1 FROM oncehook_flags f WHERE f.event = e.seq AND f.flag = 'quarantined'
                           AND e.received_at > ?3)
           FROM oncehook_events e WHERE e.seq > ?1 ORDER BY e.seq LIMIT ?2",
    )?;
    let mut rows = statement.query(params![after, limit(retention.batch), old_dead])?;
    let mut seen = 0;
    let mut reached = after;
    while let Some(row) = rows.next()? {
        // Events stand in the order in which they came; behind the first young one there are no old ones.
        if row.get::<_, i64>(1)? > old {
            break;
        }
        seen += 1;
        reached = row.get(0)?;
        let kept: bool = row.get(4)?;
        if !kept {
            delete(connection, reached, row.get_ref(2)?.as_str()?, row.get_ref(3)?.as_blob()?)?;
            forgotten.events += 1;
        }
    }
    if forgotten.events > 0 {
        drop_blocks(connection, reached)?;
    }
    let through = seen < retention.batch;
    Ok(Some(if through { Round::Keys(String::new(), Vec::new()) } else { Round::Events(reached) }))
}

/// Drops blocks of the search index that have no event left. The last block stays: it remembers how far ids went.
fn drop_blocks(connection: &Connection, reached: i64) -> Result<(), rusqlite::Error> {
    let dropped = connection
        .prepare_cached(
            "DELETE FROM oncehook_blocks
              WHERE last <= ?1 AND last < (SELECT max(last) FROM oncehook_blocks)
                AND NOT EXISTS (SELECT 1 FROM oncehook_events WHERE seq BETWEEN first AND last)",
        )?
        .execute([reached])?;
    if dropped > 0 {
        groups::drop_empty(connection, reached)?;
    }
    Ok(())
}

/// What copies of an event leave beside it, also after it was forgotten.
const BESIDE: [&str; 4] = [
    "DELETE FROM oncehook_conflicts  WHERE event = ?1",
    "DELETE FROM oncehook_duplicates WHERE event = ?1",
    "DELETE FROM oncehook_flags      WHERE event = ?1",
    "DELETE FROM oncehook_spool_aliases WHERE event = ?1",
];

/// Removes an event and all that stands beside it, except its key.
fn delete(connection: &Connection, event: i64, source: &str, digest: &[u8]) -> Result<(), rusqlite::Error> {
    for sql in BESIDE.iter().chain([
        &"DELETE FROM oncehook_deliveries WHERE event = ?1",
        &"DELETE FROM oncehook_attempts   WHERE event = ?1",
        &"DELETE FROM oncehook_events     WHERE seq = ?1",
    ]) {
        connection.prepare_cached(sql)?.execute([event])?;
    }
    connection
        .prepare_cached("DELETE FROM oncehook_bodies WHERE source = ?1 AND digest = ?2 AND event = ?3")?
        .execute(params![source, digest, event])?;
    Ok(())
}

/// Goes on in the ledger. Returns where the round is then; nowhere if it is over.
fn keys(
    connection: &Connection,
    (source, key): (&str, &[u8]),
    retention: &Retention,
    now: UnixMicros,
    forgotten: &mut Forgotten,
) -> Result<Option<Round>, rusqlite::Error> {
    let seen: Vec<(String, Vec<u8>, [u8; 16], i64)> = connection
        .prepare_cached(
            "SELECT source, key, event, expires_at FROM oncehook_keys WHERE (source, key) > (?1, ?2)
              ORDER BY source, key LIMIT ?3",
        )?
        .query_map(params![source, key, limit(retention.batch)], |row| {
            Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?))
        })?
        .collect::<Result<_, _>>()?;
    for (source, key, event, expires_at) in &seen {
        let event = EventId::from_bytes(*event).sequence();
        if *expires_at <= now.0 && is_done(connection, event)? {
            forgotten.keys += connection
                .prepare_cached("DELETE FROM oncehook_keys WHERE source = ?1 AND key = ?2")?
                .execute(params![source, key])?;
            // Copies that came after the event was forgotten have left their traces.
            for sql in BESIDE {
                connection.prepare_cached(sql)?.execute([event])?;
            }
        }
    }
    let full = seen.len() == retention.batch;
    Ok(seen.into_iter().next_back().filter(|_| full).map(|(source, key, ..)| Round::Keys(source, key)))
}

/// Whether nothing more can come of an event, short of a forced replay. One that is gone has neither of these rows.
fn is_done(connection: &Connection, event: i64) -> Result<bool, rusqlite::Error> {
    connection
        .prepare_cached(
            "SELECT NOT EXISTS (SELECT 1 FROM oncehook_deliveries WHERE event = ?1
                                   AND state IN ('ready', 'running', 'retrying', 'parked', 'dead'))
                AND NOT EXISTS (SELECT 1 FROM oncehook_flags WHERE event = ?1 AND flag = 'quarantined')",
        )?
        .query_row([event], |row| row.get(0))
}
