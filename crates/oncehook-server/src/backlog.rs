//! What waits, told where operators look: the log at the start, and the metrics whenever they are read.
//!
//! Promises: deliveries of a route that is not in the configuration are named at every start, once, with their number; every
//! configured route has its gauges, at zero if nothing waits. If the journal cannot be asked there are none: an
//! old number would be a wrong one.
//!
//! Does not: touch what was left behind. Its route may come back; an operator may skip it.

use std::time::Duration;

use oncehook::journal::Backlog;
use oncehook::route::Routes;

use crate::http::admin::Admin;

/// How long reading metrics may wait for the journal.
const ASK: Duration = Duration::from_secs(2);

/// What waits for, runs for or died of routes that are not configured.
pub(crate) fn left_behind<'b>(routes: &'b Routes, backlogs: &'b [Backlog]) -> impl Iterator<Item = &'b Backlog> {
    backlogs.iter().filter(|backlog| routes.get(&backlog.route).is_none())
}

/// Says what would wait for ever.
pub(crate) async fn warn_of_left_behind(admin: &Admin) {
    match admin.deliveries.backlog().await {
        Ok(backlogs) => {
            for Backlog { route, waiting, running, dead, .. } in left_behind(&admin.routes, &backlogs) {
                tracing::warn!(
                    route,
                    waiting = waiting + running,
                    dead,
                    "deliveries of a route that is not in the configuration; they wait until it is back, or until they are skipped"
                );
            }
        }
        Err(error) => tracing::warn!(%error, "what waits could not be read"),
    }
}

/// Sets the gauges to how things are now.
pub(crate) async fn measure(admin: &Admin) {
    let backlogs = match tokio::time::timeout(ASK, admin.deliveries.backlog()).await {
        Ok(Ok(backlogs)) => Some(backlogs),
        Ok(Err(error)) => {
            tracing::warn!(%error, "what waits could not be read");
            None
        }
        Err(_) => {
            tracing::warn!("what waits could not be counted in time");
            None
        }
    };
    let configured = admin.routes.iter().map(|route| route.name.as_str());
    admin.metrics.set_backlog(configured, backlogs.as_deref(), admin.gate.steady());
}
