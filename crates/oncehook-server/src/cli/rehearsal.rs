//! Do the statements of the sql routes fit the tables as they are now? Told to people, by `serve` and `check --database`.
//!
//! Does not: stop anybody. The tables are the user's, and may come later.

use std::sync::Arc;

use oncehook::handler::{Handler, SqlHandler};
use oncehook::journal::sqlite::{Misfit, SqliteJournal};
use oncehook::route::Route;
use serde::Serialize;

use crate::config::Config;

/// A statement that would fail now.
#[derive(Debug, Serialize)]
pub(super) struct Finding {
    pub(super) route: String,
    /// From 1
    pub(super) statement: usize,
    pub(super) problem: String,
}

/// Writes what does not fit into the log.
pub(super) async fn warn(config: &Config, journal: &SqliteJournal) {
    for (route, handler) in sql_routes(config) {
        match journal.rehearse(Arc::clone(handler)).await {
            Ok(misfits) => misfits.iter().for_each(|misfit| {
                tracing::warn!(
                    route = route.name.as_str(),
                    statement = misfit.statement,
                    reason = misfit.reason,
                    "a statement would fail as the tables are now; its deliveries are tried again until they are dead"
                );
            }),
            Err(error) => tracing::warn!(%error, "the statements of the routes could not be tried out"),
        }
    }
}

/// What does not fit, in a journal that nobody needs to run.
pub(super) fn findings(config: &Config) -> anyhow::Result<Vec<Finding>> {
    let mut findings = Vec::new();
    for (route, handler) in sql_routes(config) {
        for Misfit { statement, reason } in SqliteJournal::rehearse_in(&config.journal.path, handler)? {
            findings.push(Finding { route: route.name.to_string(), statement, problem: reason });
        }
    }
    Ok(findings)
}

fn sql_routes(config: &Config) -> impl Iterator<Item = (&Route, &Arc<SqlHandler>)> {
    config.routes.iter().filter_map(|route| match &route.handler {
        Handler::Sql(handler) => Some((route.as_ref(), handler)),
        Handler::Http(_) | Handler::Function(_) => None,
    })
}
