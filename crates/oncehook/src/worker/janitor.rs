//! The janitor: forgets what is old, a small batch at a time, with pauses in between, so that nobody waits for it.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use super::Shared;
use super::lane::rest;
use crate::journal::Retention;

/// How fast the janitor goes.
#[derive(Debug, Clone, Copy)]
pub struct Pace {
    /// Between two batches while there is something to forget.
    pub busy: Duration,
    /// Between two rounds.
    pub idle: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Self { busy: Duration::from_millis(50), idle: Duration::from_secs(60) }
    }
}

/// Goes round until the end.
pub(super) async fn run(
    shared: Arc<Shared>,
    retention: Retention,
    pace: Pace,
    mut end: watch::Receiver<bool>,
) {
    loop {
        let wait = match shared.deliveries.forget(retention).await {
            Ok(forgotten) => {
                shared.metrics.forgotten(forgotten.events, forgotten.keys);
                if forgotten.more { pace.busy } else { pace.idle }
            }
            Err(error) => {
                tracing::debug!(%error, "nothing could be forgotten now");
                pace.idle
            }
        };
        if rest(wait, &mut end).await {
            return;
        }
    }
}
