//! Fills the search index behind the accepts, and measures how far the database's clock is ahead.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::watch;

use super::engine::{Engine, Session};
use super::error::EngineError;
use super::pool::Pool;
use super::shared::Shared;

/// How long to wait when there is nothing to index, and between two parts of a long history.
const IDLE: Duration = Duration::from_secs(1);
const BUSY: Duration = Duration::from_millis(100);

/// Runs until the journal is closed or gone.
pub(super) async fn run<E: Engine>(shared: Arc<Shared>, pool: Arc<Pool<E>>, mut end: watch::Receiver<bool>) {
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

async fn index_some<E: Engine>(shared: &Shared, pool: &Pool<E>) -> Result<bool, EngineError> {
    let mut session = pool.take().await?;
    let ahead = session.database_time().await? - shared.clock.now().0;
    shared.database_ahead.store(ahead, Ordering::Relaxed);
    let more = E::index(&mut session, shared.given_time()).await?;
    session.keep();
    Ok(more)
}
