//! The search index for people, filled behind the accepts.
//!
//! Index rows on the accept path would cost it a third of its speed, so they are added in batches, in key order, at most
//! about a second later. Readers look at the index and at the events behind it, so nobody sees the lag.
//!
//! On the way it finds suspected replays: the same body under a new key that the signature does not cover.

use oncehook_verify::UnixMicros;
use rusqlite::{Connection, OptionalExtension, Transaction, TransactionBehavior, params};

use super::queries::flag;
use crate::event::EventId;

/// Events per batch: enough to share pages of the index, few enough that waiting acknowledgements do not notice.
pub(super) const BATCH: u64 = 1_000;

struct Row {
    id: EventId,
    source: String,
    kind: Option<String>,
    entity: Option<String>,
    /// Set only if the key is unsigned.
    digest: Option<[u8; 32]>,
}

/// Indexes the next batch. Returns how many events that were.
pub(super) fn follow(connection: &mut Connection, now: UnixMicros) -> Result<u64, rusqlite::Error> {
    let indexed_to = indexed_to(connection)?;
    let rows = next_rows(connection, indexed_to)?;
    let Some(last) = rows.last() else { return Ok(0) };
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    insert_lookups(&transaction, &rows)?;
    for row in &rows {
        flag_replay(&transaction, row, now)?;
    }
    transaction
        .prepare_cached(
            "INSERT INTO oncehook_meta (name, value) VALUES ('indexed_to', ?1)
             ON CONFLICT (name) DO UPDATE SET value = excluded.value",
        )?
        .execute([last.id.sequence()])?;
    transaction.commit()?;
    Ok(rows.len() as u64)
}

/// How many events are not in the index yet. Counts rows: for start-up only.
pub(super) fn behind(connection: &Connection) -> Result<u64, rusqlite::Error> {
    let indexed_to = indexed_to(connection)?;
    let behind: i64 = connection
        .prepare("SELECT count(*) FROM oncehook_events WHERE seq > ?1")?
        .query_row([indexed_to], |row| row.get(0))?;
    Ok(behind.unsigned_abs())
}

/// The last event that is in the index.
pub(super) fn indexed_to(connection: &Connection) -> Result<i64, rusqlite::Error> {
    let found = connection
        .prepare_cached("SELECT value FROM oncehook_meta WHERE name = 'indexed_to'")?
        .query_row([], |row| row.get(0))
        .optional()?;
    Ok(found.unwrap_or(0))
}

fn next_rows(connection: &Connection, indexed_to: i64) -> Result<Vec<Row>, rusqlite::Error> {
    connection
        .prepare_cached(
            "SELECT id, source, type, entity, iif(key_signed, NULL, digest) FROM oncehook_events
              WHERE seq > ?1 ORDER BY seq LIMIT ?2",
        )?
        .query_map([indexed_to, BATCH.cast_signed()], |row| {
            Ok(Row {
                id: EventId::from_bytes(row.get(0)?),
                source: row.get(1)?,
                kind: row.get(2)?,
                entity: row.get(3)?,
                digest: row.get(4)?,
            })
        })?
        .collect()
}

fn insert_lookups(transaction: &Transaction<'_>, rows: &[Row]) -> Result<(), rusqlite::Error> {
    let mut lookups = Vec::with_capacity(rows.len() * 3);
    for row in rows {
        let event = row.id.sequence();
        lookups.push(("source", row.source.clone().into_bytes(), event));
        lookups.extend(row.kind.iter().map(|kind| ("type", kind.clone().into_bytes(), event)));
        lookups.extend(row.entity.iter().map(|entity| ("entity", entity.clone().into_bytes(), event)));
        lookups.extend(row.digest.iter().map(|digest| ("body", body_value(&row.source, digest), event)));
    }
    // Neighbours in the index are written together.
    lookups.sort_unstable();
    let mut insert = transaction.prepare_cached(
        "INSERT INTO oncehook_lookups (field, value, event) VALUES (?1, ?2, ?3)
         ON CONFLICT (field, value, event) DO NOTHING",
    )?;
    for lookup in lookups {
        insert.execute(lookup)?;
    }
    Ok(())
}

/// Bodies are compared within a source only.
fn body_value(source: &str, digest: &[u8; 32]) -> Vec<u8> {
    let mut value = digest.to_vec();
    value.extend_from_slice(source.as_bytes());
    value
}

/// Flags an event whose body came before. Runs after the batch is in the index, so neighbours see each other.
fn flag_replay(transaction: &Transaction<'_>, row: &Row, now: UnixMicros) -> Result<(), rusqlite::Error> {
    let Some(digest) = &row.digest else { return Ok(()) };
    let seen: bool = transaction
        .prepare_cached(
            "SELECT EXISTS (SELECT 1 FROM oncehook_lookups WHERE field = 'body' AND value = ?1 AND event < ?2)",
        )?
        .query_row(params![body_value(&row.source, digest), row.id.sequence()], |row| row.get(0))?;
    if seen {
        flag(transaction, row.id, "suspected_replay", now, None)?;
    }
    Ok(())
}
