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

use super::engine::Session;
use super::error::EngineError;
use super::pool::Pool;
use super::read::buckets::{Indexed, Occurrences, SETTLED_MICROS, first_of};
use super::read::{Reads, ids};
use super::shared::Shared;
use super::value::{Param, Row};
use crate::event::EventId;

/// How long to wait when there is nothing to index, and between two parts of a long history.
const IDLE: Duration = Duration::from_secs(1);
const BUSY: Duration = Duration::from_millis(100);

/// Events that enter the index in one transaction, and rows that are added by one statement.
const EVENTS_AT_ONCE: usize = 5_000;
const ROWS_AT_ONCE: usize = 2_000;

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

async fn index_some<E: Reads>(shared: &Shared, pool: &Pool<E>) -> Result<bool, EngineError> {
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
async fn add_next<E: Reads>(session: &mut E::Session, now: i64) -> Result<usize, EngineError> {
    let Some(indexed) = session.row(E::READ.lock_indexed, &[]).await? else { return Ok(0) };
    let settled = first_of((now - SETTLED_MICROS) / 1_000);
    let asked = [Param::from(indexed.event(0)?), settled.into(), EVENTS_AT_ONCE.into()];
    let rows = session.rows(E::READ.unindexed, &asked).await?;
    let (Some(first), Some(last)) = (rows.first(), rows.last()) else { return Ok(0) };
    let (first, last) = (first.event(0)?, last.event(0)?);
    let routed = session.rows(E::READ.routed, &[first.into(), last.into()]).await?;
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
    session.change(E::READ.set_indexed, &[last.into()]).await?;
    Ok(rows.len())
}

/// Adds to the index what occurs in its buckets.
pub(in crate::journal) async fn add<E: Reads>(
    session: &mut E::Session,
    found: &Occurrences,
) -> Result<(), EngineError> {
    for table in found.tables(ROWS_AT_ONCE) {
        session.change(E::READ.add_to_buckets, &[table]).await?;
    }
    Ok(())
}
