//! The janitor: forgets what is old, a small batch at a time, with pauses in between, so that nothing waits for it.
//!
//! Promises: the journal looks at the clock before each batch. While it is in doubt (`journal::forgetting`) nothing is
//! forgotten, and the janitor says so. A guard in an external database is forgotten only if it is old, by the earlier one of
//! two clocks, and the journal knows that nothing can come of its delivery any more. Guards of other gateways in the same
//! database are left alone.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use super::attempt::Attempts;
use super::lane::rest;
use super::{Shared, locked};
use crate::delivery::DeliveryId;
use crate::handler::elsewhere::Round;
use crate::handler::{Elsewhere, Handler};
use crate::journal::{ClockDoubt, Retention};

/// Between two batches while there is something to forget.
const BUSY: Duration = Duration::from_millis(50);

/// Between two rounds.
const IDLE: Duration = Duration::from_secs(60);

/// Guards that are looked at in one go.
const GUARDS: usize = 500;

/// Goes round until the end.
pub(super) async fn run(shared: std::sync::Arc<Shared>, retention: Retention, mut end: watch::Receiver<bool>) {
    let mut logged: Option<Instant> = None;
    loop {
        let wait = match shared.deliveries.forget(retention).await {
            Ok(forgotten) => {
                shared.note_clock(forgotten.stopped);
                log_doubt(forgotten.stopped, &mut logged);
                shared.metrics.forgotten(forgotten.events, forgotten.keys);
                if forgotten.more { BUSY } else { IDLE }
            }
            Err(error) => {
                tracing::debug!(%error, "nothing could be forgotten now");
                IDLE
            }
        };
        if wait == IDLE {
            log_blocked(&shared).await;
        }
        if rest(wait, &mut end).await {
            return;
        }
    }
}

/// Forgets the guards of a route whose effects are in an external database, until the end.
pub(super) async fn forget_guards(attempts: &Attempts, mut end: watch::Receiver<bool>) {
    let Attempts { shared, route, mark: journal, .. } = attempts;
    let Handler::Elsewhere(external) = &route.handler else { return };
    let mut behind = None;
    // Not at once: a gateway that starts has other things to do first.
    while !rest(if behind.is_some() { BUSY } else { IDLE }, &mut end).await {
        // Only if the clock has been looked at and is not in doubt.
        if !matches!(*locked(&shared.clock_seen), Some(Ok(()))) {
            behind = None;
            continue;
        }
        let (route_name, now) = (route.name.clone(), shared.clock.now());
        let round = Round { route: route_name, journal: *journal, behind, age: external.keep, now, limit: GUARDS };
        behind = forget_some(shared, external, &round).await.unwrap_or_else(|reason| {
            tracing::debug!(route = route.name.as_str(), reason, "no guards could be forgotten now");
            None
        });
    }
}

/// Forgets what may be forgotten of the next guards. Returns the last one that was looked at, unless that was the end.
async fn forget_some(shared: &Shared, external: &Elsewhere, round: &Round) -> Result<Option<DeliveryId>, String> {
    let mut aged = external.database.aged(round).await?;
    let last = aged.last().cloned().filter(|_| aged.len() == round.limit);
    let unsettled = shared.deliveries.unsettled(aged.clone()).await.map_err(|error| error.to_string())?;
    aged.retain(|delivery| !unsettled.contains(delivery));
    if !aged.is_empty() {
        external.database.forget(&aged).await?;
    }
    Ok(last)
}

impl Shared {
    /// Keeps what a look at the clock came to, for the guards and for people.
    pub(super) fn note_clock(&self, doubt: Option<ClockDoubt>) {
        *locked(&self.clock_seen) = Some(doubt.map_or(Ok(()), Err));
        self.metrics.set_forgetting_stopped(doubt.is_some());
    }
}

/// How often the log repeats that nothing is forgotten.
const REPEAT_EVERY: Duration = Duration::from_secs(3_600);

/// Says that forgetting has stopped, why, and what to do; and that it goes on.
fn log_doubt(doubt: Option<ClockDoubt>, logged: &mut Option<Instant>) {
    match doubt {
        Some(doubt) if logged.is_none_or(|at| at.elapsed() >= REPEAT_EVERY) => {
            tracing::error!(
                "nothing is forgotten: {doubt}. Set the clock right. If it is right (the gateway was off for a while), say \
                 `oncehook resume --forgetting`, or wait: it is believed after three days of running"
            );
            *logged = Some(Instant::now());
        }
        None if logged.take().is_some() => {
            tracing::info!("the clock is believed again; what is old is forgotten again");
        }
        _ => {}
    }
}

/// Entity queues that stand still for this long are logged.
const BLOCKED_TOO_LONG: Duration = Duration::from_secs(300);

/// Says which routes have an entity whose events have waited for their turn for too long: most often a dead one is at the head
/// of the queue, and an operator has to retry or skip it.
async fn log_blocked(shared: &Shared) {
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
