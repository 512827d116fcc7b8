//! What is written behind the accepts: the search index for people, and the hunt for suspected replays.
//!
//! Index rows per event on the accept path would cost it a third of its speed. Instead every thousand events get one row
//! that says what may be found among them ([`seal`]); readers skip the blocks that cannot match and look at the events of
//! the others, and at those behind the last block, so nobody sees a lag.
//!
//! A suspected replay is the same body under a new key that the signature does not cover ([`find_replays`]).

use std::collections::BTreeSet;

use oncehook_verify::UnixMicros;
use rusqlite::{Connection, OptionalExtension, TransactionBehavior, params};

use super::bloom::Bloom;
use super::queries::flag;
use crate::event::EventId;

/// Events per block: few enough to look through in a moment, enough to make the index small.
pub(super) const BLOCK: u64 = 1_000;

/// Events looked at for replays at once.
const REPLAY_BATCH: i64 = 1_000;

/// A block with more types than this does not list them.
const TYPES_LISTED: usize = 100;

/// Seals the next block, if there are enough events behind the last one. `no_replays` says that none of them waits to be
/// looked at for replays, so that search need not walk them later.
pub(super) fn seal(connection: &mut Connection, no_replays: bool) -> Result<bool, rusqlite::Error> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let mut sources = BTreeSet::new();
    let mut types = BTreeSet::new();
    let mut entities = Bloom::for_items(BLOCK as usize);
    let (mut first, mut last, mut count) = (0_i64, 0_i64, 0);
    {
        let mut statement = transaction.prepare_cached(
            "SELECT seq, source, type, entity FROM oncehook_events WHERE seq > ?1 ORDER BY seq LIMIT ?2",
        )?;
        let mut rows = statement.query([sealed_to(&transaction)?, BLOCK.cast_signed()])?;
        while let Some(row) = rows.next()? {
            last = row.get(0)?;
            first = if count == 0 { last } else { first };
            count += 1;
            insert_new(&mut sources, row.get_ref(1)?.as_str()?);
            if let Some(kind) = row.get_ref(2)?.as_str_or_null()? {
                insert_new(&mut types, kind);
            }
            if let Some(entity) = row.get_ref(3)?.as_str_or_null()? {
                entities.insert(entity.as_bytes());
            }
        }
    }
    if count < BLOCK {
        return Ok(false);
    }
    let list = |names: &BTreeSet<String>| serde_json::to_string(names).unwrap_or_else(|_| "[]".to_owned());
    let types = (types.len() <= TYPES_LISTED).then(|| list(&types));
    transaction
        .prepare_cached(
            "INSERT INTO oncehook_blocks (last, first, sources, types, entities) VALUES (?1, ?2, ?3, ?4, ?5)",
        )?
        .execute(params![last, first, list(&sources), types, entities.as_bytes()])?;
    if no_replays {
        set_replays_to(&transaction, last)?;
    }
    transaction.commit()?;
    Ok(true)
}

fn insert_new(names: &mut BTreeSet<String>, name: &str) {
    if !names.contains(name) {
        names.insert(name.to_owned());
    }
}

/// The last event that is in a block.
pub(super) fn sealed_to(connection: &Connection) -> Result<i64, rusqlite::Error> {
    connection
        .prepare_cached("SELECT coalesce(max(last), 0) FROM oncehook_blocks")?
        .query_row([], |row| row.get(0))
}

/// How many events are behind the last block. Counts rows: for start-up only.
pub(super) fn unsealed(connection: &Connection) -> Result<u64, rusqlite::Error> {
    let count: i64 = connection
        .prepare("SELECT count(*) FROM oncehook_events WHERE seq > ?1")?
        .query_row([sealed_to(connection)?], |row| row.get(0))?;
    Ok(count.unsigned_abs())
}

/// Looks at the next events whose keys are unsigned. Returns whether there may be more.
pub(super) fn find_replays(connection: &mut Connection, now: UnixMicros) -> Result<bool, rusqlite::Error> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let checked: Option<i64> = transaction
        .prepare_cached("SELECT value FROM oncehook_meta WHERE name = 'replays_to'")?
        .query_row([], |row| row.get(0))
        .optional()?;
    let mut reached = None;
    let mut count = 0;
    {
        let mut next = transaction.prepare_cached(
            "SELECT id, source, digest, key_signed FROM oncehook_events WHERE seq > ?1 ORDER BY seq LIMIT ?2",
        )?;
        // The first event with a body owns the row; the conflict target is named.
        let mut claim = transaction.prepare_cached(
            "INSERT INTO oncehook_bodies (source, digest, event) VALUES (?1, ?2, ?3)
             ON CONFLICT (source, digest) DO NOTHING",
        )?;
        let mut rows = next.query([checked.unwrap_or(0), REPLAY_BATCH])?;
        while let Some(row) = rows.next()? {
            let event = EventId::from_bytes(row.get(0)?);
            reached = Some(event.sequence());
            count += 1;
            let (source, digest) = (row.get_ref(1)?.as_str()?, row.get_ref(2)?.as_blob()?);
            let signed: bool = row.get(3)?;
            if !signed && claim.execute(params![source, digest, event.sequence()])? == 0 {
                flag(&transaction, event, "suspected_replay", now, None)?;
            }
        }
    }
    if let Some(reached) = reached {
        set_replays_to(&transaction, reached)?;
    }
    transaction.commit()?;
    Ok(count == REPLAY_BATCH)
}

/// Remembers up to which event there is nothing left to look at. Never goes back.
fn set_replays_to(connection: &Connection, event: i64) -> Result<(), rusqlite::Error> {
    connection
        .prepare_cached(
            "INSERT INTO oncehook_meta (name, value) VALUES ('replays_to', ?1)
             ON CONFLICT (name) DO UPDATE SET value = max(value, excluded.value)",
        )?
        .execute([event])?;
    Ok(())
}
