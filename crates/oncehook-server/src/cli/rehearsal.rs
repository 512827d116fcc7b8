//! Do the statements of the sql routes fit the tables as they are now? Told to people, by `serve` and `check --database`.
//!
//! Does not: stop anybody. The tables are the user's, and may come later.

use std::sync::Arc;

use oncehook::handler::{Elsewhere, Handler, SqlHandler};
use oncehook::journal::open::Opened;
use oncehook::journal::{Journal, Misfit};
use oncehook::route::{Route, Routes};
use oncehook_verify::Preset;
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

/// Writes what does not fit the journal's own database into the log.
pub(super) async fn warn(config: &Config, journal: &Opened) {
    for (route, handler) in sql_routes(config) {
        match journal.deliveries.rehearse(Arc::clone(handler)).await {
            Ok(misfits) => misfits.iter().for_each(|misfit| log(route, misfit.statement, &misfit.reason)),
            Err(error) => tracing::warn!(error, "the statements of the routes could not be tried out"),
        }
    }
}

/// Writes what does not fit other databases into the log. One of them may be down, so nobody should wait for this.
pub(super) async fn warn_on_others(routes: Routes) {
    for (route, elsewhere) in routes_elsewhere(&routes) {
        match elsewhere.database.rehearse(&elsewhere.statements).await {
            Ok(misfits) => misfits.iter().for_each(|(statement, reason)| log(route, *statement, reason)),
            Err(reason) => {
                tracing::warn!(
                    route = route.name.as_str(),
                    reason,
                    "the database of a route cannot be reached now; its deliveries wait"
                );
            }
        }
    }
}

fn log(route: &Route, statement: usize, reason: &str) {
    tracing::warn!(
        route = route.name.as_str(),
        statement,
        reason,
        "a statement would fail as the tables are now; its deliveries are tried again until they are dead"
    );
}

/// What does not fit, in a journal that nobody needs to run.
pub(super) fn findings(config: &Config) -> anyhow::Result<Vec<Finding>> {
    let mut findings = Vec::new();
    for (route, handler) in sql_routes(config) {
        for Misfit { statement, reason } in super::wait(config.journal.rehearse(handler))?? {
            findings.push(Finding { route: route.name.to_string(), statement, problem: reason });
        }
    }
    for (route, elsewhere) in routes_elsewhere(&config.routes) {
        let misfits = super::wait(elsewhere.database.rehearse(&elsewhere.statements))?;
        for (statement, problem) in misfits.map_err(anyhow::Error::msg)? {
            findings.push(Finding { route: route.name.to_string(), statement, problem });
        }
    }
    Ok(findings)
}

/// The largest body that the journal's database stores, in a journal that nobody needs to run.
pub(super) fn largest_body(config: &Config) -> anyhow::Result<usize> {
    Ok(super::wait(config.journal.largest_body())??)
}

/// Sources that take less than their provider sends, in words. What they refuse is lost if the provider gives up on 413.
pub(super) fn small_sources(config: &Config, largest_body: usize) -> Vec<String> {
    let mut told = Vec::new();
    for source in &config.sources {
        let name = &source.name;
        let sent = Preset::named(&source.provider).and_then(|preset| preset.max_body_bytes.map(|most| (preset, most)));
        let wanted = sent.map_or(source.body_bytes, |(_, most)| most.max(source.body_bytes));
        if largest_body < source.body_bytes {
            told.push(format!(
                "source {name}: bodies may have up to {wanted} bytes, and the database takes {largest_body}; larger ones are \
                 refused with 413. Set max_allowed_packet of the server to {} or more",
                wanted.saturating_mul(2)
            ));
        } else if let Some((preset, most)) = sent.filter(|(_, most)| *most > source.body_bytes) {
            told.push(format!(
                "source {name}: {} sends bodies of up to {most} bytes, and this source takes {}; larger ones are refused with \
                 413. Set body_bytes of the source, and in_flight_bytes in [server.limits] to twice as much",
                preset.title, source.body_bytes
            ));
        }
    }
    told
}

/// Writes the same into the log.
pub(super) fn warn_of_small_sources(config: &Config, journal: &dyn Journal) {
    for told in small_sources(config, journal.largest_body()) {
        tracing::warn!("{told}");
    }
}

fn routes_elsewhere(routes: &Routes) -> impl Iterator<Item = (&Route, &Arc<Elsewhere>)> {
    routes.iter().filter_map(|route| match &route.handler {
        Handler::Elsewhere(elsewhere) => Some((route.as_ref(), elsewhere)),
        Handler::Sql(_) | Handler::Http(_) | Handler::Function(_) => None,
    })
}

fn sql_routes(config: &Config) -> impl Iterator<Item = (&Route, &Arc<SqlHandler>)> {
    config.routes.iter().filter_map(|route| match &route.handler {
        Handler::Sql(handler) => Some((route.as_ref(), handler)),
        Handler::Elsewhere(_) | Handler::Http(_) | Handler::Function(_) => None,
    })
}
