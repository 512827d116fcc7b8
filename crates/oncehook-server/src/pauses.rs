//! What is paused, told where operators look: the log, `/readyz`, the metrics and every delivery that is held.
//!
//! Promises: the journal is asked every [`LOOK_EVERY`], so every node knows of a pause within seconds, whoever ordered it. What
//! is paused at the start is logged, and so is every later change.
//!
//! Does not: hold anything. Workers do (`oncehook::worker`).

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use oncehook::journal::{Pausable, Paused};
use oncehook::text::printable;
use tokio::sync::watch;

use crate::http::admin::Admin;
use crate::http::listener::ended;

/// How often the journal is asked, and how long it may take to answer.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// What was paused when the journal was asked last.
#[derive(Debug, Default)]
pub(crate) struct Pauses(Mutex<Arc<Vec<Paused>>>);

impl Pauses {
    pub(crate) fn now(&self) -> Arc<Vec<Paused>> {
        Arc::clone(&self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Takes the journal's answer. Returns what was known before.
    fn set(&self, paused: Vec<Paused>) -> Arc<Vec<Paused>> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *known, Arc::new(paused))
    }
}

/// Whether a pause holds the deliveries of a route for events of a source.
pub(crate) fn holds(paused: &[Paused], source: &str, route: &str) -> bool {
    paused.iter().any(|paused| match &paused.what {
        Pausable::Source(name) => name == source,
        Pausable::Route(name) => name == route,
    })
}

/// Follows what is paused until the end.
pub(crate) async fn follow(admin: Arc<Admin>, mut end: watch::Receiver<bool>) {
    loop {
        look(&admin).await;
        tokio::select! {
            () = tokio::time::sleep(LOOK_EVERY) => {}
            () = ended(&mut end) => return,
        }
    }
}

/// Asks the journal what is paused, and tells what has changed. If it does not answer, what was known stands.
pub(crate) async fn look(admin: &Admin) {
    let Ok(Ok(paused)) = tokio::time::timeout(LOOK_EVERY, admin.deliveries.pauses()).await else { return };
    let before = admin.pauses.set(paused);
    let now = admin.pauses.now();
    let is_in = |list: &[Paused], what: &Pausable| list.iter().any(|paused| paused.what == *what);
    now.iter().filter(|paused| !is_in(&before, &paused.what)).for_each(tell);
    for Paused { what, .. } in before.iter().filter(|paused| !is_in(&now, &paused.what)) {
        let (kind, name) = what.parts();
        tracing::info!(kind, name, "{kind} {name} is not paused any more");
    }
}

/// Sets the gauges to what is known now.
pub(crate) fn measure(admin: &Admin) {
    let routes = admin.routes.iter().map(|route| Pausable::Route(route.name.to_string()));
    let sources = admin.gate.source_names().map(|name| Pausable::Source(name.to_owned()));
    admin.metrics.set_paused(routes.chain(sources), &admin.pauses.now());
}

fn tell(paused: &Paused) {
    let (kind, name) = paused.what.parts();
    let since = paused.since.to_rfc3339();
    let who = paused.who.as_deref().map_or_else(String::new, |who| format!(" by {}", printable(who)));
    let why = paused.reason.as_deref().map_or_else(String::new, |why| format!(" ({})", printable(why)));
    tracing::warn!(
        kind,
        name,
        since,
        "{kind} {name} is paused since {since}{who}{why}: its events are accepted and wait. To go on: oncehook resume --{kind} {name}"
    );
}
