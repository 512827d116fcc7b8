//! Forgetting in the embedded journal: texts, and what its ledger and its search index ask for.
//!
//! Promises: an event is forgotten only when its key is in the table of keys. Before that the event is the only record of
//! its key.

use std::convert::Infallible;
use std::future::{Future, ready};

use oncehook_verify::UnixMicros;
use rusqlite::{Connection, OptionalExtension, params};

use super::groups;
use super::ledger::{self, Ledger};
use super::statements::{self, Statements};
use crate::event::EventId;
use crate::journal::decide::forget::{ClockDoubt, micros};
use crate::journal::sql::Result as Answer;
use crate::journal::sql::forget::{self as shared, Batch, Forgets, is_done, kept};
use crate::journal::{Forgotten, Retention};

pub(super) type Round = shared::Round<Infallible>;

/// Events whose ids run ahead of their receipt, by the index that has them.
macro_rules! ahead {
    () => {
        "oncehook_events INDEXED BY oncehook_events_ahead WHERE seq / 32768 > received_at / 1000 + 1000 "
    };
}

impl Forgets for Statements<'_> {
    type Place = Infallible;

    const CLOCK: &'static str = "SELECT value FROM oncehook_meta WHERE name = 'clock'";
    const NEWEST: &'static str = "SELECT received_at FROM oncehook_events ORDER BY seq DESC LIMIT 1";
    const REMEMBER_CLOCK: &'static str = "INSERT INTO oncehook_meta (name, value) VALUES ('clock', $3)
        ON CONFLICT (name) DO UPDATE SET value = excluded.value";
    const LOCK: &'static str = "SELECT 1";
    // A bucket is 4096 milliseconds, which are above 15 bits of a sequence.
    const BUCKET_AHEAD: &'static str =
        concat!("SELECT min(seq) >> 27 FROM ", ahead!(), "AND seq >= $1 << 27 AND seq < ($2 + 1) << 27");
    const LOOK: &'static str = concat!(
        "SELECT e.id, e.received_at <= $5 AND e.seq <= (SELECT value FROM oncehook_meta WHERE name = 'ledger_to')
                          AND NOT (",
        kept!(),
        ") FROM oncehook_events e WHERE e.seq >= $3 AND e.id >= $3_id AND e.seq < $4 ORDER BY e.seq LIMIT $6"
    );
    const LOCK_EVENTS: &'static str = "SELECT id FROM oncehook_events WHERE seq IN (SELECT value FROM json_each($1))";
    const DELETE_BODIES: &'static str = "DELETE FROM oncehook_bodies WHERE (source, digest, event) IN (
        SELECT source, digest, seq FROM oncehook_events WHERE seq IN (SELECT value FROM json_each($1)))";
    const DELETE_BESIDE: &'static str = "DELETE FROM oncehook_{} WHERE event IN (SELECT value FROM json_each($1))";
    const DELETE_EVENTS: &'static str = "DELETE FROM oncehook_events WHERE seq IN (SELECT value FROM json_each($1))";
    // By the columns of the table itself: for values out of JSON, SQLite would use the first column of the key alone.
    const DELETE_KEYS: &'static str = concat!(
        "DELETE FROM oncehook_keys WHERE (source, key) IN (
           SELECT k.source, k.key FROM json_each($2) t
            CROSS JOIN oncehook_keys k ON k.source = t.value ->> 0 AND k.key = unhex(t.value ->> 1)
            WHERE k.expires_at <= $1 AND ",
        is_done!("t.value ->> 2"),
        ")"
    );
    const DELETE_TRACES: Option<&'static str> = Some(concat!(
        "DELETE FROM oncehook_{} WHERE event IN (SELECT t.value ->> 2 FROM json_each($2) t WHERE ",
        is_done!("t.value ->> 2"),
        ")"
    ));
    // The first ones only: there is no index on the time.
    const DELETE_AUDIT: &'static str = "DELETE FROM oncehook_audit
        WHERE id IN (SELECT id FROM oncehook_audit ORDER BY id LIMIT $2) AND at <= $1";

    fn step(&mut self, _: &mut Batch<'_>, place: &Infallible) -> impl Future<Output = Answer<Round>> + Send {
        let never = *place;
        async move { match never {} }
    }

    fn forget_buckets(&mut self, gone: &[EventId]) -> impl Future<Output = Answer<()>> + Send {
        let dropped = match (gone.first(), gone.last()) {
            (Some(first), Some(last)) => drop_blocks(self.connection, first.sequence(), last.sequence()),
            _ => Ok(()),
        };
        ready(self.noting(dropped))
    }
}

/// Drops blocks of the search index that have no event left, between two events that are gone. The last block stays: it
/// remembers how far ids went.
fn drop_blocks(connection: &Connection, first: i64, last: i64) -> Result<(), rusqlite::Error> {
    let dropped = connection
        .prepare_cached(
            "DELETE FROM oncehook_blocks
              WHERE last >= ?1 AND first <= ?2 AND last < (SELECT max(last) FROM oncehook_blocks)
                AND NOT EXISTS (SELECT 1 FROM oncehook_events WHERE seq BETWEEN first AND last)",
        )?
        .execute([first, last])?;
    if dropped > 0 { groups::drop_empty(connection, last) } else { Ok(()) }
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
    let done =
        statements::run(connection, now, async |session| shared::batch(session, None, now.0, round, retention).await);
    done.map(|(forgotten, next)| {
        *round = next;
        forgotten
    })
}

/// Compares the clock with the time that was believed last. Returns the doubt in which nothing may be forgotten.
pub(super) fn look_at_clock(connection: &Connection, now: UnixMicros) -> Result<Option<ClockDoubt>, rusqlite::Error> {
    statements::run(connection, now, async |session| shared::look_at_clock(session, now.0).await)
}

/// Keys of events that are old go to the table first. Returns whether there was something to do. (With the usual
/// settings keys are there days before.)
fn merge_first(
    connection: &mut Connection,
    ledger: &mut Ledger,
    retention: &Retention,
    now: UnixMicros,
) -> Result<bool, rusqlite::Error> {
    let (merged, old) = (ledger::merged_to(connection)?, now.0.saturating_sub(micros(retention.payload)));
    // The oldest of them speaks for all: looking at each would cost a walk through the newest events. But the oldest may
    // have come while the clock was ahead. Then the ids of those behind it run ahead of their receipt.
    let sql = concat!(
        "SELECT received_at <= ?2 OR key_expires_at <= ?3 OR EXISTS (SELECT 1 FROM ",
        ahead!(),
        "AND seq > ?1 AND received_at <= ?2) FROM oncehook_events WHERE seq > ?1 ORDER BY seq LIMIT 1"
    );
    let waiting: Option<bool> =
        connection.prepare_cached(sql)?.query_row(params![merged, old, now.0], |row| row.get(0)).optional()?;
    let waiting = waiting.unwrap_or(false);
    if waiting {
        ledger.freeze();
        ledger.merge_alone(connection, ledger::MERGED_ALONE)?;
    }
    Ok(waiting)
}
