//! The sweep behind a dropped day: what stood beside its events in other tables, a small batch at a time.
//!
//! Promises: removes only rows whose event is gone, all of them, and then the day's row in `sweeps`, which the drop left. A crash
//! in between costs reading the day again. Meanwhile nobody is shown these rows and nobody runs them: lists and stories begin
//! with the event, and everything that was pending was kept with its event.
//!
//! Does not: look outside of the days that were dropped. What is forgotten row by row goes with its event.

use uuid::Uuid;

use super::connection::{EngineError, Session};
use super::read::{self, next_id};

/// Tables in which rows stand beside an event. Attempts that have days are dropped with them.
const TABLES: [&str; 7] =
    ["deliveries", "attempts_rest", "conflicts", "duplicates", "flags", "spool_aliases", "bodies"];

/// Where a sweep is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(in crate::journal) struct Place {
    /// In which table; behind the last one is the search index.
    table: usize,
    /// From this event on; the nil id is the beginning of the day.
    from: Uuid,
}

/// Sweeps a batch behind the oldest of the days that were dropped. Returns where it is then; nowhere if nothing is left.
pub(super) async fn batch(session: &Session, place: &Place, limit: i64) -> Result<Option<Place>, EngineError> {
    let sql = "SELECT first, beyond FROM oncehook.sweeps ORDER BY first LIMIT 1";
    let Some(row) = session.row(sql, &[]).await? else { return Ok(None) };
    let (first, beyond): (Uuid, Uuid) = (row.get(0), row.get(1));
    let from = place.from.max(first);
    let on = match TABLES.get(place.table) {
        Some(table) => beside(session, table, (from, beyond), limit).await?,
        None => read::sweep_buckets(session, (from, beyond), limit).await?,
    };
    Ok(Some(match on {
        Some(from) => Place { from, ..*place },
        None if place.table < TABLES.len() => Place { table: place.table + 1, from: Uuid::nil() },
        None => {
            session.change("DELETE FROM oncehook.sweeps WHERE first = $1", &[&first]).await?;
            Place::default()
        }
    }))
}

/// Removes rows of a table whose event is gone. All rows of an event are looked at together, so that the next batch can go on
/// behind it. Returns from where on; nowhere if that was all.
async fn beside(
    session: &Session,
    table: &str,
    (from, beyond): (Uuid, Uuid),
    limit: i64,
) -> Result<Option<Uuid>, EngineError> {
    let sql = format!(
        "WITH looked AS MATERIALIZED (
           SELECT t.ctid AS row, t.event FROM oncehook.{table} t WHERE t.event >= $1 AND t.event < $2
            ORDER BY t.event FETCH FIRST ($3) ROWS WITH TIES
         ), gone AS (
           DELETE FROM oncehook.{table} WHERE ctid = ANY (ARRAY (
             SELECT l.row FROM looked l WHERE (SELECT true FROM oncehook.events e WHERE e.id = l.event LIMIT 1) IS NULL))
         )
         SELECT count(*), (SELECT event FROM looked ORDER BY event DESC LIMIT 1) FROM looked"
    );
    let row = session.row(&sql, &[&from, &beyond, &limit]).await?;
    let (looked, last): (i64, Option<Uuid>) = row.map_or((0, None), |row| (row.get(0), row.get(1)));
    Ok(last.filter(|_| looked >= limit).map(next_id))
}
