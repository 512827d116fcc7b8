//! What is written behind the accepts: the counts of duplicates, a few times a second, and the search index.
//!
//! While they move from memory into the tables nobody reads, so that people never see them twice or not at all. A crash
//! forgets at most the last half second of counts; it never forgets an event.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::connection::Pool;
use super::engine_error::{EngineError, Tries};
use super::{Shared, queries, search};

const TICK: Duration = Duration::from_millis(100);
const FLUSH_EVERY: Duration = Duration::from_millis(500);

/// How often it is looked whether there is something to mark for lists.
const MARK_EVERY: Duration = Duration::from_secs(1);

/// Flushes now and then until the journal is closed or gone.
pub(super) async fn run(shared: Arc<Shared>, pool: Arc<Pool>, mut end: watch::Receiver<bool>) {
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
        if full {
            let _moving = shared.moving.write().await;
            flush(&shared, &pool).await;
            flushed = Instant::now();
        } else if let Ok(_moving) = shared.moving.try_write() {
            flush(&shared, &pool).await;
            flushed = Instant::now();
        }
    }
}

/// Marks what lists will look for, until the journal is closed or gone.
pub(super) async fn mark(shared: Arc<Shared>, pool: Arc<Pool>, mut end: watch::Receiver<bool>) {
    loop {
        let more = match mark_some(&shared, &pool).await {
            Ok(more) => more,
            Err(error) => {
                tracing::debug!(%error, "nothing could be marked now");
                false
            }
        };
        // A long history is marked without haste.
        let wait = if more { TICK } else { MARK_EVERY };
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            _ = end.changed() => return,
        }
    }
}

async fn mark_some(shared: &Shared, pool: &Pool) -> Result<bool, EngineError> {
    let mut session = pool.take().await?;
    let ahead = session.now(None).await? - shared.clock.now().0;
    shared.database_ahead.store(ahead, Ordering::Relaxed);
    let more = search::mark(&mut session, shared.given_time()).await?;
    session.keep();
    Ok(more)
}

/// Stores the counts. The caller holds `moving`. If it fails, they stay in memory for the next time; if only the answer was
/// lost, these duplicates count twice.
pub(super) async fn flush(shared: &Shared, pool: &Pool) {
    let pending = shared.tally().take();
    if pending.is_empty() {
        return;
    }
    let mut tries = Tries::default();
    let stored = loop {
        let stored = match pool.take().await {
            Ok(mut session) => match queries::store_duplicates(&mut session, shared.shard, &pending).await {
                Ok(()) => {
                    session.keep();
                    Ok(())
                }
                Err(error) => Err(error),
            },
            Err(error) => Err(error),
        };
        match stored {
            Ok(()) => break Ok(()),
            Err(error) => match tries.again(error) {
                Ok(()) => {}
                Err(error) => break Err(error),
            },
        }
    };
    if let Err(error) = stored {
        tracing::debug!(%error, "duplicates could not be counted now");
        shared.tally().give_back(pending);
    }
}
