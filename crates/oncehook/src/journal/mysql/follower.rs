//! What is written behind the accepts: the counts of duplicates, a few times a second.
//!
//! While they move from memory into the tables nobody reads, so that people never see them twice or not at all. A crash
//! forgets at most the last half second of counts; it never forgets an event.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::connection::{Pool, Tries};
use super::{Shared, queries};

const TICK: Duration = Duration::from_millis(100);
const FLUSH_EVERY: Duration = Duration::from_millis(500);

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
