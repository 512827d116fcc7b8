//! The janitor: forgets what is old, a small batch at a time, with pauses in between, so that nobody waits for it.
//!
//! The journal looks at the clock before each batch. While it is in doubt nothing is forgotten, and the janitor says so.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use super::Shared;
use super::lane::rest;
use crate::journal::{ClockDoubt, Retention};

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
pub(super) async fn run(shared: Arc<Shared>, retention: Retention, pace: Pace, mut end: watch::Receiver<bool>) {
    let mut told: Option<Instant> = None;
    loop {
        let wait = match shared.deliveries.forget(retention).await {
            Ok(forgotten) => {
                shared.note_clock(forgotten.stopped);
                tell_doubt(forgotten.stopped, &mut told);
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

impl Shared {
    /// Keeps what a look at the clock came to, for the guards and for people.
    pub(super) fn note_clock(&self, doubt: Option<ClockDoubt>) {
        *self.clock_seen() = Some(doubt.map_or(Ok(()), Err));
        self.metrics.set_forgetting_stopped(doubt.is_some());
    }
}

/// How often it is said again that nothing is forgotten.
const TELL_EVERY: Duration = Duration::from_secs(3_600);

/// Says that forgetting has stopped, why, and what to do; and that it goes on.
fn tell_doubt(doubt: Option<ClockDoubt>, told: &mut Option<Instant>) {
    match doubt {
        Some(doubt) if told.is_none_or(|at| at.elapsed() >= TELL_EVERY) => {
            tracing::error!(
                "nothing is forgotten: {doubt}. Set the clock right. If it is right (the gateway was off for a while), say \
                 `oncehook resume --forgetting`, or wait: it is believed after three days of running"
            );
            *told = Some(Instant::now());
        }
        None if told.is_some() => {
            tracing::info!("the clock is believed again; what is old is forgotten again");
            *told = None;
        }
        _ => {}
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
