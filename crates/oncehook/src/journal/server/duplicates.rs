//! Writes the counts of duplicates behind the accepts, a few times a second.
//!
//! While counts move from memory into the tables readers wait, so that people never see them twice or not at all. A crash
//! forgets at most the last half second of counts; it never forgets an event.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::append::{Appends, Totals, add_totals};
use super::engine::Session;
use super::error::{EngineError, Tries};
use super::pool::Pool;
use super::shared::Shared;
use crate::event::EventId;
use crate::journal::tally::{Pending, Tally};

const TICK: Duration = Duration::from_millis(100);
const FLUSH_EVERY: Duration = Duration::from_millis(500);

/// Flushes now and then until the journal is closed or gone.
pub(super) async fn run<E: Appends>(shared: Arc<Shared>, pool: Arc<Pool<E>>, mut end: watch::Receiver<bool>) {
    let mut flushed = Instant::now();
    loop {
        tokio::select! {
            () = tokio::time::sleep(TICK) => {}
            // Closing flushes by itself.
            _ = end.changed() => return,
        }
        let full = shared.tally().is_full();
        if !full && flushed.elapsed() < FLUSH_EVERY {
            continue;
        }
        let moving = match full {
            true => Ok(shared.moving.write().await),
            false => shared.moving.try_write(),
        };
        if moving.is_ok() {
            flush(&shared, &pool).await;
            flushed = Instant::now();
        }
    }
}

/// Stores the counts. The caller holds `moving`. If it fails, they stay in memory for the next time; if only the answer was
/// lost, these duplicates count twice.
pub(super) async fn flush<E: Appends>(shared: &Shared, pool: &Pool<E>) {
    let pending = shared.tally().take();
    if pending.is_empty() {
        return;
    }
    let mut tries = Tries::default();
    let stored = loop {
        match store(shared, pool, &pending).await {
            Ok(()) => break Ok(()),
            Err(error) => {
                if let Err(error) = tries.again(error) {
                    break Err(error);
                }
            }
        }
    };
    if let Err(error) = stored {
        tracing::debug!(%error, "duplicates could not be counted now");
        shared.tally().give_back(pending);
    }
}

async fn store<E: Appends>(shared: &Shared, pool: &Pool<E>, tally: &Tally) -> Result<(), EngineError> {
    let mut pending: Vec<(EventId, &Pending)> = tally.iter().map(|(event, pending)| (*event, pending)).collect();
    pending.sort_unstable_by_key(|(event, _)| *event);
    let mut totals = Totals::new();
    for (_, pending) in &pending {
        totals.entry(pending.source.as_str()).or_default().duplicates += pending.count();
    }
    let mut session = pool.take().await?;
    session.begin(shared.given_time()).await?;
    E::store_duplicates(&mut session, &pending).await?;
    add_totals::<E>(&mut session, shared.shard, &totals).await?;
    session.commit().await?;
    session.keep();
    Ok(())
}
