//! The spool at work in a gateway: drained while the gateway runs, watched for events that wait too long, and given a last chance
//! at the end.

use std::sync::Arc;
use std::time::Duration;

use oncehook::intake::{Intake, SpoolState};
use oncehook::observe::SpoolFigures;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::http::admin::Admin;

/// How often it is looked whether events wait too long, and how often that is said.
const LOOK_EVERY: Duration = Duration::from_secs(1);
const SAY_EVERY: u32 = 60;

/// How long the spool is drained at the end, if there is time. A journal that is away would use up any time.
const DRAIN_AT_THE_END: Duration = Duration::from_secs(10);

/// How long the tasks may take to notice the end.
const A_MOMENT: Duration = Duration::from_secs(1);

/// What is kept of the time at the end for the tasks and for closing the file.
const CLOSE: Duration = Duration::from_secs(3);

/// A spool that is so full, in per cent, will soon answer 503.
const NEARLY_FULL: u8 = 80;

/// The spool's figures now.
pub(crate) fn figures(state: &SpoolState, admin: &Admin) -> SpoolFigures {
    let waited = state.oldest.map_or(0, |oldest| admin.gate.now().0.saturating_sub(oldest.0));
    let age = u64::try_from(waited / 1_000_000).unwrap_or(0);
    let late = state.oldest.is_some() && age >= admin.spool_alarm.as_secs();
    let alarm = late || state.percent >= NEARLY_FULL || state.set_aside > 0 || state.failing.is_some();
    SpoolFigures { events: state.events, bytes: state.bytes, age, set_aside: state.set_aside, alarm }
}

/// A spool that is being drained.
pub(crate) struct Draining {
    intake: Arc<Intake>,
    end: watch::Sender<bool>,
    tasks: [JoinHandle<()>; 2],
}

/// Begins to drain, if there is a spool.
pub(crate) fn start(admin: &Arc<Admin>) -> Option<Draining> {
    let intake = Arc::clone(admin.gate.intake()?);
    let waiting = intake.spool().state().events;
    if waiting > 0 {
        tracing::warn!(waiting, "the spool holds {waiting} events of an earlier run; draining them");
    }
    let end = watch::Sender::new(false);
    let usable = {
        let admin = Arc::clone(admin);
        // Not the gate: it is closed when the gateway ends, and the spool is drained for a while longer.
        move || admin.self_test.borrow().is_ok() && admin.journal.state().failing.is_none()
    };
    let drain = Arc::clone(&intake).drain(Arc::clone(&admin.journal), usable, end.subscribe());
    let watched = look(Arc::clone(admin), Arc::clone(&intake), end.subscribe());
    Some(Draining { intake, end, tasks: [tokio::spawn(drain), tokio::spawn(watched)] })
}

impl Draining {
    /// Drains for a while, then stops and closes the file, all of it before the deadline. Returns how many events are left.
    pub(crate) async fn finish(self, deadline: Instant) -> u64 {
        let spool = self.intake.spool();
        let empty = async {
            while spool.state().events > 0 {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let drained_by = (Instant::now() + DRAIN_AT_THE_END).min(deadline - CLOSE);
        let _ = tokio::time::timeout_at(drained_by, empty).await;
        // The tasks may be gone.
        let _ = self.end.send(true);
        let stopped_by = Instant::now() + A_MOMENT;
        for mut task in self.tasks {
            // One that hangs in the journal goes on where it was at the next start.
            if tokio::time::timeout_at(stopped_by, &mut task).await.is_err() {
                task.abort();
            }
        }
        if !spool.close(deadline.saturating_duration_since(Instant::now())).await {
            tracing::error!("the spool did not close in time; events that it was still storing were not acknowledged");
        }
        let left = spool.state().events;
        if left > 0 {
            let path = spool.path().display();
            tracing::error!(left, "{left} accepted events stay in the spool {path}; start again to drain them");
        }
        left
    }
}

/// Raises the alarm in the log.
async fn look(admin: Arc<Admin>, intake: Arc<Intake>, mut end: watch::Receiver<bool>) {
    let (mut said, mut spooling) = (0, false);
    loop {
        tokio::select! {
            () = tokio::time::sleep(LOOK_EVERY) => {}
            _ = end.wait_for(|end| *end) => return,
        }
        let state = intake.spool().state();
        let figures = figures(&state, &admin);
        if spooling != (figures.events > 0) {
            spooling = figures.events > 0;
            match spooling {
                true => tracing::warn!(waiting = figures.events, "events wait in the spool"),
                false => tracing::info!("the spool is empty"),
            }
        }
        if figures.alarm && said == 0 {
            tracing::error!(
                waiting = figures.events,
                oldest_seconds = figures.age,
                percent_full = state.percent,
                set_aside = figures.set_aside,
                failing = state.failing,
                "the spool needs attention"
            );
        }
        said = if figures.alarm { (said + 1) % SAY_EVERY } else { 0 };
    }
}
