//! The statements of the writer, one named function each. What is written behind the accepts is in `follower`, what people
//! ask in `reader`.
//!
//! Promises: an append asks the ledger and stores what follows from the answer in the caller's transaction.
//! Does not: commit an append; the writer does.

use oncehook_verify::UnixMicros;
use rusqlite::{CachedStatement, Connection, OptionalExtension, Transaction, TransactionBehavior, params};
use std::collections::VecDeque;

use super::ledger::{Fact, Ledger};
use crate::event::{EventId, EventIds, NewEvent};
use crate::journal::tally::{Pending, Tally, latest_text, parse_latest, remember};
use crate::journal::{Appended, CONFLICTS_KEPT, SourceCounts, Verdict};

/// The statements of an append, prepared once per batch.
pub(super) struct Statements<'t> {
    transaction: &'t Transaction<'t>,
    insert_event: CachedStatement<'t>,
    insert_delivery: CachedStatement<'t>,
}

impl<'t> Statements<'t> {
    pub(super) fn prepare(transaction: &'t Transaction<'t>) -> rusqlite::Result<Self> {
        Ok(Self {
            transaction,
            insert_event: transaction.prepare_cached(
                "INSERT INTO oncehook_events (seq, id, source, key, key_signed, type, entity, occurred_at, received_at,
                                              key_expires_at, integrity, digest, headers, body, version)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15)",
            )?,
            // The event is new, so its deliveries are: a conflict here is a broken journal, and an error.
            insert_delivery: transaction.prepare_cached(
                "INSERT INTO oncehook_deliveries (event, route, state, run_at, entity, version)
                 VALUES (?1, ?2, 'ready', ?3, ?4, ?5)",
            )?,
        })
    }

    /// Decides New, Duplicate or Conflict by the ledger, and stores what follows from it.
    pub(super) fn append(
        &mut self,
        ids: &mut EventIds,
        ledger: &mut Ledger,
        event: &NewEvent,
        now: UnixMicros,
    ) -> rusqlite::Result<Appended> {
        let hash = ledger.hash(event);
        let known = ledger.recall(self.transaction, hash, event)?;
        #[cfg(feature = "planted")]
        let known = super::planted::recalled(known, event);
        let Some(Fact { event: first, digest, expires_at, .. }) = known else {
            let appended = self.insert_event(ids.next(event.received_at), event, now)?;
            ledger.stage(hash, event, appended.id);
            return Ok(appended);
        };
        if digest == event.digest {
            return Ok(Appended { id: first, verdict: Verdict::Duplicate, expires_at });
        }
        keep_conflict(self.transaction, first, event)?;
        flag(self.transaction, first, "conflict", event.received_at, None)?;
        Ok(Appended { id: first, verdict: Verdict::Conflict, expires_at })
    }

    fn insert_event(&mut self, id: EventId, event: &NewEvent, now: UnixMicros) -> rusqlite::Result<Appended> {
        let expires_at = event.remembered_until(id);
        self.insert_event.execute(params![
            id.sequence(),
            id.as_bytes(),
            event.source.as_str(),
            event.key.as_bytes(),
            event.key_signed,
            event.kind,
            event.entity,
            event.occurred_at.map(|at| at.0),
            event.received_at.0,
            expires_at.0,
            event.integrity.as_str(),
            event.digest,
            &event.headers[..],
            &event.body[..],
            event.version,
        ])?;
        let Some(reason) = event.quarantine else {
            let entity = event.entity.as_deref().filter(|_| event.by_entity);
            let version = event.version.filter(|_| event.by_entity);
            for route in &event.routes {
                let delivery = params![id.sequence(), route.as_str(), now.0, entity, version];
                self.insert_delivery.execute(delivery)?;
            }
            return Ok(Appended { id, verdict: Verdict::New, expires_at });
        };
        flag(self.transaction, id, "quarantined", event.received_at, Some(reason.as_str()))?;
        if event.is_replay() {
            flag(self.transaction, id, "suspected_replay", event.received_at, None)?;
        }
        Ok(Appended { id, verdict: Verdict::Quarantined, expires_at })
    }
}

/// Keeps another body under a known key: one row per digest, at most [`CONFLICTS_KEPT`] of them, the rest counted in a
/// row with an empty digest.
fn keep_conflict(connection: &Connection, first: EventId, event: &NewEvent) -> rusqlite::Result<()> {
    let sql = "UPDATE oncehook_conflicts SET count = count + 1, last_at = ?3 WHERE event = ?1 AND digest = ?2";
    let seen = params![first.sequence(), event.digest, event.received_at.0];
    if connection.prepare_cached(sql)?.execute(seen)? == 1 {
        return Ok(());
    }
    let sql = "SELECT count(*) < ?2 FROM oncehook_conflicts WHERE event = ?1 AND digest <> x''";
    let keep = connection
        .prepare_cached(sql)?
        .query_row(params![first.sequence(), CONFLICTS_KEPT as i64], |row| row.get(0))?;
    let (digest, headers, body): (&[u8], &[u8], &[u8]) =
        if keep { (&event.digest, &event.headers, &event.body) } else { (&[], &[], &[]) };
    let sql = "INSERT INTO oncehook_conflicts (event, digest, count, first_at, last_at, headers, body)
               VALUES (?1, ?2, 1, ?3, ?3, ?4, ?5)
               ON CONFLICT (event, digest) DO UPDATE SET count = count + 1, last_at = excluded.last_at";
    let row = params![first.sequence(), digest, event.received_at.0, headers, body];
    connection.prepare_cached(sql)?.execute(row)?;
    Ok(())
}

/// Marks an event. The first mark of a kind stays.
pub(super) fn flag(
    connection: &Connection,
    event: EventId,
    flag: &str,
    at: UnixMicros,
    reason: Option<&str>,
) -> rusqlite::Result<()> {
    let sql = "INSERT INTO oncehook_flags (event, flag, at, reason) VALUES (?1, ?2, ?3, ?4)
               ON CONFLICT (event, flag) DO NOTHING";
    connection.prepare_cached(sql)?.execute(params![event.sequence(), flag, at.0, reason])?;
    Ok(())
}

/// Adds to a source's counts.
pub(super) fn add_totals(connection: &Connection, source: &str, counts: &SourceCounts) -> rusqlite::Result<()> {
    let sql = "INSERT INTO oncehook_totals (source, events, duplicates, conflicts, quarantined)
               VALUES (?1, ?2, ?3, ?4, ?5)
               ON CONFLICT (source) DO UPDATE SET
                 events      = events      + excluded.events,
                 duplicates  = duplicates  + excluded.duplicates,
                 conflicts   = conflicts   + excluded.conflicts,
                 quarantined = quarantined + excluded.quarantined";
    let [events, duplicates, conflicts, quarantined] =
        [counts.events, counts.duplicates, counts.conflicts, counts.quarantined].map(u64::cast_signed);
    connection.prepare_cached(sql)?.execute(params![source, events, duplicates, conflicts, quarantined])?;
    Ok(())
}

/// Stores the pending counts of duplicates in one transaction.
pub(super) fn store_duplicates(connection: &mut Connection, tally: &Tally) -> rusqlite::Result<()> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    for (event, pending) in tally.iter() {
        store_duplicates_of(&transaction, *event, pending)?;
    }
    transaction.commit()
}

fn store_duplicates_of(connection: &Connection, event: EventId, pending: &Pending) -> rusqlite::Result<()> {
    let sql = "SELECT latest FROM oncehook_duplicates WHERE event = ?1";
    let stored: Option<String> =
        connection.prepare_cached(sql)?.query_row([event.sequence()], |row| row.get(0)).optional()?;
    let mut latest = stored.map_or_else(VecDeque::new, |text| parse_latest(&text));
    pending.latest.iter().for_each(|seen| remember(&mut latest, *seen));
    let sql = "INSERT INTO oncehook_duplicates (event, journal, memory, redis, first_at, last_at, latest)
               VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)
               ON CONFLICT (event) DO UPDATE SET
                 journal = journal + excluded.journal,
                 memory  = memory + excluded.memory,
                 redis   = redis + excluded.redis,
                 last_at = max(last_at, excluded.last_at),
                 latest  = excluded.latest";
    let [journal, memory, redis] = [pending.journal, pending.memory, pending.redis].map(u64::cast_signed);
    let (first, last, latest) = (pending.first_at.0, pending.last_at.0, latest_text(&latest));
    let row = params![event.sequence(), journal, memory, redis, first, last, latest];
    connection.prepare_cached(sql)?.execute(row)?;
    let counts = SourceCounts { duplicates: pending.count(), ..SourceCounts::default() };
    add_totals(connection, pending.source.as_str(), &counts)
}

/// Up to which event something is done; 0 at first.
pub(super) fn watermark(connection: &Connection, name: &str) -> rusqlite::Result<i64> {
    let sql = "SELECT coalesce(max(value), 0) FROM oncehook_meta WHERE name = ?1";
    connection.prepare_cached(sql)?.query_row([name], |row| row.get(0))
}

/// Raises a watermark. It never goes back.
pub(super) fn raise_watermark(connection: &Connection, name: &str, event: i64) -> rusqlite::Result<()> {
    let sql = "INSERT INTO oncehook_meta (name, value) VALUES (?1, ?2)
               ON CONFLICT (name) DO UPDATE SET value = max(value, excluded.value)";
    connection.prepare_cached(sql)?.execute(params![name, event])?;
    Ok(())
}

/// The highest sequence ever stored, so that new ids stay above it.
pub(super) fn last_sequence(connection: &Connection) -> rusqlite::Result<i64> {
    // Events may have been forgotten while their keys live on; the blocks and the ledger remember how far it went. (An id
    // at or below the ledger's mark would not be read back at the next start.)
    connection.query_row(
        "SELECT max(coalesce((SELECT max(seq) FROM oncehook_events), 0),
                    coalesce((SELECT max(last) FROM oncehook_blocks), 0),
                    coalesce((SELECT value FROM oncehook_meta WHERE name = 'ledger_to'), 0))",
        [],
        |row| row.get(0),
    )
}
