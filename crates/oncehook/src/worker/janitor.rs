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
        if wait == pace.idle {
            tell_blocked(&shared).await;
        }
        if rest(wait, &mut end).await {
            return;
        }
    }
}

/// Lines that stand still for so long are said aloud.
const BLOCKED_TOO_LONG: Duration = Duration::from_secs(300);

/// Says which routes have an entity whose events have waited for their turn for too long: most often a dead one is at the head
/// of the line, and somebody has to retry or skip it.
async fn tell_blocked(shared: &Shared) {
    let Ok(backlogs) = shared.deliveries.backlog().await else { return };
    let now = shared.clock.steady();
    for backlog in backlogs {
        let Some(since) = backlog.blocked_since else { continue };
        let waited = Duration::from_micros(now.0.saturating_sub(since.0).max(0).unsigned_abs());
        if waited >= BLOCKED_TOO_LONG {
            tracing::warn!(
                route = backlog.route.as_str(),
                blocked = backlog.blocked,
                dead = backlog.dead,
                seconds = waited.as_secs(),
                "events wait for an earlier one of their entity; if it is dead, retry or skip it"
            );
        }
    }
}
