//! Moving a full generation into `oncehook_keys`, in the table's order and a little at a time.
//!
//! Promises: every row that it leaves behind belongs to the event that the generation says, or it is an error; the
//! watermark moves in the same transaction as the last row and never before; a merge that is cut short at any point can
//! be done again from its beginning.
//! Does not: commit. Rows ride in the transaction of a batch of appends, and count only once that has committed.

use std::sync::Arc;
use std::thread::JoinHandle;

use rusqlite::{Connection, OptionalExtension, params};

use super::super::queries::{raise_watermark, watermark};
use super::filter::Filter;
use super::generation::{Entry, Fact, Generation};
use super::{broken, same_key};

pub(super) struct Merge {
    generation: Arc<Generation>,
    /// Makes the order beside the writer, which has acknowledgements to give.
    sorting: Option<JoinHandle<Vec<u32>>>,
    /// Positions in the table's order, once it is made.
    order: Vec<u32>,
    /// How much of the order is in the table.
    done: usize,
    /// How much will be once the transaction that is under way has committed.
    pending: usize,
}

impl Merge {
    pub(super) fn new(generation: Arc<Generation>) -> Self {
        let sorted = Arc::clone(&generation);
        let thread = std::thread::Builder::new().name("journal-ledger".to_owned());
        let sorting = thread.spawn(move || sorted.in_table_order()).ok();
        // No thread to be had: the writer does it.
        let order = if sorting.is_some() { Vec::new() } else { generation.in_table_order() };
        Self { generation, sorting, order, done: 0, pending: 0 }
    }

    /// Whether there is something to merge without waiting.
    pub(super) fn is_ready(&self) -> bool {
        self.sorting.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Puts up to `most` further keys into the table, and the watermark after the last one. The filter knows a key before
    /// the table can have it.
    pub(super) fn advance(
        &mut self,
        connection: &Connection,
        filter: &mut Filter,
        most: usize,
    ) -> rusqlite::Result<()> {
        if let Some(sorting) = self.sorting.take() {
            // Sorting does not panic; if it did, the order is made here.
            self.order = sorting.join().unwrap_or_else(|_| self.generation.in_table_order());
        }
        let chunk = self.order.iter().skip(self.pending).take(most).filter_map(|at| self.generation.get(*at));
        let mut insert = connection.prepare_cached(
            // The conflict target is named. A row may be there already if an earlier merge was cut short.
            "INSERT INTO oncehook_keys (source, key, event, digest, first_seen, expires_at)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6)
             ON CONFLICT (source, key) DO NOTHING",
        )?;
        for entry in chunk {
            filter.insert(entry.hash);
            let inserted = insert.execute(params![
                entry.source.as_str(),
                entry.key.as_bytes(),
                entry.fact.event.as_bytes(),
                entry.fact.digest,
                entry.fact.first_seen.0,
                entry.fact.expires_at.0,
            ]);
            if inserted.map_err(not_a_row)? == 0 {
                expect_ours(connection, entry)?;
            }
            self.pending += 1;
        }
        if self.pending == self.order.len()
            && let Some(last) = self.generation.last
        {
            raise_watermark(connection, MERGED_TO, last)?;
        }
        Ok(())
    }

    /// The transaction that was under way came to nothing.
    pub(super) fn rolled_back(&mut self) {
        self.pending = self.done;
    }

    /// It has committed. Returns whether the whole generation is in the table now.
    pub(super) fn committed(&mut self) -> bool {
        self.done = self.pending;
        self.done == self.generation.entries.len()
    }
}

/// A key that the table refuses is not the fault of the appends that it travels with.
fn not_a_row(error: rusqlite::Error) -> rusqlite::Error {
    match error.sqlite_error_code() {
        Some(rusqlite::ErrorCode::ConstraintViolation) => broken(format!("a key was refused: {error}")),
        _ => error,
    }
}

/// The key is in the table. It must stand for the same event, or one of the two events has been accepted wrongly.
fn expect_ours(connection: &Connection, entry: &Entry) -> rusqlite::Result<()> {
    match find_in_table(connection, entry.source.as_str(), entry.key.as_bytes())? {
        Some(known) if known.event == entry.fact.event => Ok(()),
        Some(known) => Err(same_key(known.event, entry.fact.event)),
        None => Err(broken(format!("the key of {} was refused, but no event holds it", entry.fact.event))),
    }
}

/// Looks a key up in `oncehook_keys`: the exact answer for every key that has been merged.
pub(super) fn find_in_table(connection: &Connection, source: &str, key: &[u8]) -> rusqlite::Result<Option<Fact>> {
    let sql = "SELECT event, digest, first_seen, expires_at FROM oncehook_keys WHERE source = ?1 AND key = ?2";
    connection.prepare_cached(sql)?.query_row(params![source, key], |row| Fact::read(row, 0)).optional()
}

/// Up to which event every key is in `oncehook_keys`.
///
/// **Only events at or below it may ever be forgotten.** A later event's row is the only durable record of its key.
pub(in super::super) fn merged_to(connection: &Connection) -> rusqlite::Result<i64> {
    watermark(connection, MERGED_TO)
}

const MERGED_TO: &str = "ledger_to";
