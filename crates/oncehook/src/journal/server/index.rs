//! Fills the search index ([`buckets`](super::read::buckets)) behind the accepts, and measures how far the database's clock is
//! ahead.
//!
//! Events enter the index in the order of their ids, once [`SETTLED_MICROS`] have passed. A later one with a lower id adds itself
//! when it is stored. One node at a time fills the index: the one that has locked its row.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::watch;

use super::engine::{Connected, Session};
use super::pool::Pool;
use super::read::Reads;
use super::shared::Shared;
use super::value::{Param, Row};
use crate::event::EventId;
use crate::journal::sql::Result;
use crate::journal::sql::buckets::{Indexed, Occurrences, SETTLED_MICROS, first_of, ids};

/// How long to wait when there is nothing to index, and between two parts of a long history.
const IDLE: Duration = Duration::from_secs(1);
const BUSY: Duration = Duration::from_millis(100);

/// Events that enter the index in one transaction, and rows that are added by one statement.
const EVENTS_AT_ONCE: usize = 5_000;
const ROWS_AT_ONCE: usize = 2_000;

/// Locks the last event that, with all before it, is in the index. Returns nothing if another node has locked it.
const LOCK_INDEXED: &str = "SELECT last FROM oncehook.indexed FOR UPDATE SKIP LOCKED";

const SET_INDEXED: &str = "UPDATE oncehook.indexed SET last = $1";

/// Returns the events behind `$1` and before `$2`, in the order of ids, at most `$3`. On MySQL the lock waits for events that
/// are stored and not committed, so that none appears behind the index; PostgreSQL bounds the time of an append.
const UNINDEXED: &str = "SELECT id, source, type, entity, received_at FROM oncehook.events /*! FORCE INDEX (PRIMARY) */
                          WHERE id > $1 AND id < $2 ORDER BY id LIMIT $3 /*! LOCK IN SHARE MODE */";

/// Returns the events between `$1` and `$2` that have deliveries.
const ROUTED: &str = "SELECT DISTINCT event FROM oncehook.deliveries /*! FORCE INDEX (PRIMARY) */
                       WHERE event BETWEEN $1 AND $2";

/// Runs until the journal is closed or gone.
pub(super) async fn run<E: Reads>(shared: Arc<Shared>, pool: Arc<Pool<E>>, mut end: watch::Receiver<bool>) {
    loop {
        let more = index_some(&shared, &pool).await.unwrap_or_else(|error| {
            tracing::debug!(%error, "the search index could not be filled now");
            false
        });
        tokio::select! {
            () = tokio::time::sleep(if more { BUSY } else { IDLE }) => {}
            _ = end.changed() => return,
        }
    }
}

async fn index_some<E: Reads>(shared: &Shared, pool: &Pool<E>) -> Result<bool> {
    let mut session = pool.take().await?;
    let ahead = session.database_time().await? - shared.clock.now().0;
    shared.database_ahead.store(ahead, Ordering::Relaxed);
    let now = session.begin(shared.given_time()).await?;
    let added = add_next::<E>(&mut session, now).await?;
    session.commit().await?;
    session.keep();
    Ok(added >= EVENTS_AT_ONCE)
}

/// Adds the next events to the index. Returns how many.
async fn add_next<E: Reads>(session: &mut E::Session, now: i64) -> Result<usize> {
    let Some(indexed) = session.row(LOCK_INDEXED, &[]).await? else { return Ok(0) };
    let settled = first_of((now - SETTLED_MICROS) / 1_000);
    let asked = [Param::from(indexed.event(0)?), settled.into(), EVENTS_AT_ONCE.into()];
    let rows = session.rows(UNINDEXED, &asked).await?;
    let (Some(first), Some(last)) = (rows.first(), rows.last()) else { return Ok(0) };
    let (first, last) = (first.event(0)?, last.event(0)?);
    let routed = session.rows(ROUTED, &[first.into(), last.into()]).await?;
    let routed: HashSet<EventId> = ids(&routed)?.into_iter().collect();
    let mut found = Occurrences::default();
    for row in &rows {
        let (id, source, kind, entity) = (row.event(0)?, row.text(1)?, row.maybe_text(2)?, row.maybe_text(3)?);
        found.add(&Indexed {
            id,
            source: &source,
            kind: kind.as_deref(),
            entity: entity.as_deref(),
            received_at: row.int(4)?,
            routed: routed.contains(&id),
        });
    }
    add::<E>(session, &found).await?;
    session.change(SET_INDEXED, &[last.into()]).await?;
    Ok(rows.len())
}

/// Adds to the index what occurs in its buckets.
pub(in crate::journal) async fn add<E: Reads>(session: &mut E::Session, found: &Occurrences) -> Result<()> {
    for table in found.tables(ROWS_AT_ONCE) {
        session.change(E::ADD_TO_BUCKETS, &[table]).await?;
    }
    Ok(())
}
