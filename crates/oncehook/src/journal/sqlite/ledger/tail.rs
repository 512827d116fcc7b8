//! What is read back at the start: the keys of the events behind the watermark, and the filter over the table.
//!
//! Promises: after `Ledger::rebuild` memory and table together know every key of every stored event, exactly; two events with one
//! key are found here, before anything is accepted.
//! Does not: need a clean end of the last process. Nothing is written when one ends, so there is nothing to miss.

use oncehook_verify::EventKey;
use rusqlite::{Connection, OptionalExtension, Row, params};

use super::filter::Filter;
use super::generation::{Entry, Fact, KeyHasher};
use super::same_key;
use crate::event::{EventId, SourceName};
use crate::journal::PROBE_SOURCE;

/// Events read at once.
pub(super) const PAGE: i64 = 4_096;

/// One page of the events after one, oldest first, for [`entry`].
pub(super) const EVENTS: &str = "SELECT source, key, id, digest, received_at, key_expires_at FROM oncehook_events
                                  WHERE seq > ?1 ORDER BY seq LIMIT ?2";

/// The key of an event that was read back.
pub(super) fn entry(row: &Row<'_>, hasher: &KeyHasher) -> rusqlite::Result<Entry> {
    let damaged = |column: usize| rusqlite::Error::IntegralValueOutOfRange(column, 0);
    let (source, key) = (row.get_ref(0)?.as_str()?, row.get_ref(1)?.as_blob()?);
    let hash = hasher.hash(source, key);
    let source = match source {
        PROBE_SOURCE => SourceName::probe(),
        source => SourceName::new(source).map_err(|_| damaged(0))?,
    };
    let key = EventKey::from_bytes(key).ok_or_else(|| damaged(1))?;
    Ok(Entry { hash, source, key, fact: Fact::read(row, 2)? })
}

/// Refuses two events that hold one key, one of them merged and one behind the watermark: the ledger failed at some time.
pub(super) fn refuse_contradiction(connection: &Connection, after: i64) -> rusqlite::Result<()> {
    let sql = "SELECT k.event, e.id FROM oncehook_events e
                CROSS JOIN oncehook_keys k ON k.source = e.source AND k.key = e.key
                WHERE e.seq > ?1 AND k.event <> e.id LIMIT 1";
    let found = connection.query_row(sql, [after], |row| Ok([row.get(0)?, row.get(1)?].map(EventId::from_bytes)));
    found.optional()?.map_or(Ok(()), |[merged, unmerged]| Err(same_key(merged, unmerged)))
}

/// Where a walk through the table has come to: source and key. It begins before every key, at the empty text.
pub(in super::super) type TableCursor = (String, Vec<u8>);

/// Keys of the table that are put into the filter by one read.
const KEYS_AT_ONCE: i64 = 4_096;

/// Puts the next keys of the table into the filter. Returns where to go on, if there may be more. The walk is in steps, so that no read keeps the log from starting over.
pub(in super::super) fn load(
    connection: &Connection,
    hasher: &KeyHasher,
    (after_source, after_key): &TableCursor,
    mut insert: impl FnMut(u64),
) -> rusqlite::Result<Option<TableCursor>> {
    let mut statement = connection.prepare_cached(
        "SELECT source, key FROM oncehook_keys WHERE (source, key) > (?1, ?2) ORDER BY source, key LIMIT ?3",
    )?;
    let mut rows = statement.query(params![after_source, after_key, KEYS_AT_ONCE])?;
    let (mut last, mut count) = (None, 0);
    while let Some(row) = rows.next()? {
        let (source, key) = (row.get_ref(0)?.as_str()?, row.get_ref(1)?.as_blob()?);
        insert(hasher.hash(source, key));
        count += 1;
        if count == KEYS_AT_ONCE {
            last = Some((source.to_owned(), key.to_vec()));
        }
    }
    Ok(last)
}

/// Whether there is anything to load.
pub(super) fn table_is_empty(connection: &Connection) -> rusqlite::Result<bool> {
    connection.query_row("SELECT NOT EXISTS (SELECT 1 FROM oncehook_keys)", [], |row| row.get(0))
}

/// A filter on its way, made beside the writer.
pub(in super::super) type Loading = std::thread::JoinHandle<Option<Filter>>;
