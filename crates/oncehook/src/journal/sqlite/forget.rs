//! Forgetting: old events, then the keys that outlive them, then the audit; a small batch at a time.
//!
//! Promises: what is pending is never forgotten, dead and quarantined events only when the operator said how long they are
//! kept; a key only after its window and when its event is final or gone. Each batch is one short transaction.
//!
//! Two hands go round: one over the events from the oldest on, one over the ledger. Where they are is kept in memory by
//! the caller; a restart begins a new round, which costs reading and nothing else.

use oncehook_verify::UnixMicros;
use rusqlite::{Connection, TransactionBehavior, params};

use super::ledger;
use crate::event::EventId;
use crate::journal::{Forgotten, Retention};

/// Where the hands are.
#[derive(Debug, Clone, Default)]
pub(super) struct Round {
    event: i64,
    key: Option<(String, Vec<u8>)>,
}

/// A key costs far less to look at than an event.
const KEYS_PER_EVENT: usize = 4;

/// Forgets a batch.
pub(super) fn batch(
    connection: &mut Connection,
    round: &mut Round,
    retention: &Retention,
    now: UnixMicros,
) -> Result<Forgotten, rusqlite::Error> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let mut next = round.clone();
    let mut forgotten = Forgotten::default();
    let events_left = events(&transaction, &mut next, retention, now, &mut forgotten)?;
    if forgotten.events > 0 {
        drop_blocks(&transaction, next.event)?;
    }
    let keys_left = keys(&transaction, &mut next, retention, now, &mut forgotten)?;
    forgotten.audit = transaction
        .prepare_cached(
            "DELETE FROM oncehook_audit WHERE id IN (SELECT id FROM oncehook_audit WHERE at < ?1 LIMIT ?2)",
        )?
        .execute(params![before(now, retention.audit), limit(retention.batch)])?;
    transaction.commit()?;
    *round = next;
    forgotten.more = events_left || keys_left || forgotten.audit == retention.batch;
    Ok(forgotten)
}

fn limit(batch: usize) -> i64 {
    i64::try_from(batch).unwrap_or(i64::MAX)
}

fn before(now: UnixMicros, age: std::time::Duration) -> i64 {
    now.0.saturating_sub(i64::try_from(age.as_micros()).unwrap_or(i64::MAX))
}

/// Returns whether the hand has not come round yet.
fn events(
    connection: &Connection,
    round: &mut Round,
    retention: &Retention,
    now: UnixMicros,
    forgotten: &mut Forgotten,
) -> Result<bool, rusqlite::Error> {
    let old = before(now, retention.payload);
    let old_dead = retention.dead.map_or(i64::MIN, |dead| before(now, dead));
    // An event whose key is not in the ledger yet is the only record of it, and stays.
    // What stands in the way of forgetting: something pending, or something an operator may still want.
    let mut statement = connection.prepare_cached(
        "SELECT e.seq, e.received_at, e.source, e.digest,
                EXISTS (SELECT 1 FROM oncehook_deliveries d WHERE d.event = e.seq
                           AND d.state IN ('ready', 'running', 'retrying', 'parked')),
                EXISTS (SELECT 1 FROM oncehook_deliveries d WHERE d.event = e.seq AND d.state = 'dead')
             OR EXISTS (SELECT 1 FROM oncehook_flags f WHERE f.event = e.seq AND f.flag = 'quarantined')
           FROM oncehook_events e WHERE e.seq > ?1 AND e.seq <= ?3 ORDER BY e.seq LIMIT ?2",
    )?;
    let mut rows =
        statement.query(params![round.event, limit(retention.batch), ledger::merged_to(connection)?])?;
    let mut seen = 0;
    while let Some(row) = rows.next()? {
        let (event, received_at): (i64, i64) = (row.get(0)?, row.get(1)?);
        // Events stand in the order in which they came; behind the first young one there are no old ones.
        if received_at >= old {
            round.event = 0;
            return Ok(false);
        }
        seen += 1;
        round.event = event;
        let (pending, wanted): (bool, bool) = (row.get(4)?, row.get(5)?);
        if !pending && (!wanted || received_at < old_dead) {
            delete(connection, event, row.get_ref(2)?.as_str()?, row.get_ref(3)?.as_blob()?)?;
            forgotten.events += 1;
        }
    }
    if seen < retention.batch {
        round.event = 0;
    }
    Ok(seen == retention.batch)
}

/// Drops blocks of the search index that have no event left. The last block stays: it remembers how far ids went.
fn drop_blocks(connection: &Connection, reached: i64) -> Result<(), rusqlite::Error> {
    connection
        .prepare_cached(
            "DELETE FROM oncehook_blocks
              WHERE (?1 = 0 OR last <= ?1) AND last < (SELECT max(last) FROM oncehook_blocks)
                AND NOT EXISTS (SELECT 1 FROM oncehook_events WHERE seq BETWEEN first AND last)",
        )?
        .execute([reached])?;
    Ok(())
}

/// Removes an event and all that stands beside it, except its key.
fn delete(connection: &Connection, event: i64, source: &str, digest: &[u8]) -> Result<(), rusqlite::Error> {
    for sql in [
        "DELETE FROM oncehook_deliveries WHERE event = ?1",
        "DELETE FROM oncehook_attempts   WHERE event = ?1",
        "DELETE FROM oncehook_conflicts  WHERE event = ?1",
        "DELETE FROM oncehook_duplicates WHERE event = ?1",
        "DELETE FROM oncehook_flags      WHERE event = ?1",
        "DELETE FROM oncehook_events     WHERE seq = ?1",
    ] {
        connection.prepare_cached(sql)?.execute([event])?;
    }
    connection
        .prepare_cached("DELETE FROM oncehook_bodies WHERE source = ?1 AND digest = ?2 AND event = ?3")?
        .execute(params![source, digest, event])?;
    Ok(())
}

/// Returns whether the hand has not come round yet.
fn keys(
    connection: &Connection,
    round: &mut Round,
    retention: &Retention,
    now: UnixMicros,
    forgotten: &mut Forgotten,
) -> Result<bool, rusqlite::Error> {
    let wanted = retention.batch.saturating_mul(KEYS_PER_EVENT);
    let (source, key) = round.key.take().unwrap_or_default();
    let seen: Vec<(String, Vec<u8>, [u8; 16], i64)> = connection
        .prepare_cached(
            "SELECT source, key, event, expires_at FROM oncehook_keys WHERE (source, key) > (?1, ?2)
              ORDER BY source, key LIMIT ?3",
        )?
        .query_map(params![source, key, limit(wanted)], |row| {
            Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?))
        })?
        .collect::<Result<_, _>>()?;
    for (source, key, event, expires_at) in &seen {
        // As long as the event is here its key is: whoever asks about the event must find it.
        let event = EventId::from_bytes(*event).sequence();
        if *expires_at < now.0 && !is_here(connection, event)? {
            forgotten.keys += connection
                .prepare_cached("DELETE FROM oncehook_keys WHERE source = ?1 AND key = ?2")?
                .execute(params![source, key])?;
        }
    }
    let full = seen.len() == wanted;
    round.key = seen.into_iter().next_back().filter(|_| full).map(|(source, key, ..)| (source, key));
    Ok(full)
}

fn is_here(connection: &Connection, event: i64) -> Result<bool, rusqlite::Error> {
    connection.prepare_cached("SELECT 1 FROM oncehook_events WHERE seq = ?1")?.exists([event])
}
