//! `/api/routes`: where events go and how much waits; and pausing the handling of a route or of a whole source.
//!
//! Promises: pausing stops handling, never accepting, and lasts until somebody resumes, also over a restart.

use std::collections::HashSet;
use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use http::StatusCode;
use oncehook::journal::{Backlog, Pausable, Pause};
use oncehook::route::Route;
use oncehook_verify::UnixMicros;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::input::{Input, Operator};
use super::orders::work_error;
use crate::backlog::left_behind;
use crate::http::admin::Admin;
use crate::http::error::HttpError;

/// Every configured route, and every route that has left something behind.
#[derive(Serialize, ToSchema)]
pub(crate) struct RoutesJson {
    routes: Vec<RouteJson>,
}

#[derive(Serialize, ToSchema)]
struct RouteJson {
    name: String,
    /// Whether it is in the configuration. What waits for a route that is not, waits for ever: `skip` ends that, and so does
    /// putting the route back
    configured: bool,
    /// null if it is not configured
    source: Option<String>,
    /// Globs; empty means every type
    types: Vec<String>,
    /// sql, http or function; null if it is not configured
    handler: Option<&'static str>,
    /// The route that must have taken effect first
    after: Option<String>,
    /// Whether its handling is stopped, by its own pause or its source's
    paused: bool,
    /// Whether its source is paused
    source_paused: bool,
    /// closed, open (the destination is down and left alone) or half_open (one delivery tries it)
    breaker: &'static str,
    backlog: BacklogJson,
}

/// What waits.
#[derive(Serialize, ToSchema)]
pub(super) struct BacklogJson {
    /// Deliveries that are due or will be
    waiting: u64,
    /// Deliveries that are being handled
    running: u64,
    /// Deliveries that failed for good
    dead: u64,
    /// How long the oldest waiting one has been due
    oldest_seconds: Option<f64>,
    /// Of those that wait, the ones that wait for an earlier event of their entity
    blocked: u64,
    /// How long the first of them has waited
    blocked_seconds: Option<f64>,
}

/// Why, for the audit. May be left out, and the body too.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct PauseJson {
    reason: Option<String>,
}

/// What is paused or not now.
#[derive(Serialize, ToSchema)]
pub(crate) struct PausedJson {
    #[serde(skip_serializing_if = "Option::is_none")]
    source: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    route: Option<String>,
    paused: bool,
}

#[utoipa::path(get, path = "/api/routes", operation_id = "list_routes", responses(
    (status = 200, description = "Every route, with what waits for it", body = RoutesJson),
))]
pub(crate) async fn list(State(admin): State<Arc<Admin>>) -> Result<Json<RoutesJson>, HttpError> {
    let backlogs = admin.deliveries.backlog().await.map_err(work_error)?;
    let paused: HashSet<Pausable> = admin.deliveries.paused().await.map_err(work_error)?.into_iter().collect();
    let now = admin.gate.steady();
    let breaker = |route: &Route| admin.worker.get().map_or("closed", |worker| worker.breaker(route.name.as_str()));
    let configured = admin.routes.iter();
    let configured = configured.map(|route| route_json(route, breaker(route), &backlogs, &paused, now));
    let left = left_behind(&admin.routes, &backlogs).map(|backlog| left_json(backlog, &paused, now));
    Ok(Json(RoutesJson { routes: configured.chain(left).collect() }))
}

#[utoipa::path(post, path = "/api/sources/{name}/pause", request_body = PauseJson,
    params(("name" = String, Path, description = "The source's name")), responses(
    (status = 200, description = "Its events are accepted, and wait", body = PausedJson),
    (status = 404, description = "There is no such source"),
))]
pub(crate) async fn pause_source(
    state: State<Arc<Admin>>,
    Path(name): Path<String>,
    operator: Operator,
    input: Input<PauseJson>,
) -> Result<Json<PausedJson>, HttpError> {
    set(state, Pausable::Source(name), true, operator, input).await
}

#[utoipa::path(post, path = "/api/sources/{name}/resume", request_body = PauseJson,
    params(("name" = String, Path, description = "The source's name")), responses(
    (status = 200, description = "Its events are handled", body = PausedJson),
    (status = 404, description = "There is no such source"),
))]
pub(crate) async fn resume_source(
    state: State<Arc<Admin>>,
    Path(name): Path<String>,
    operator: Operator,
    input: Input<PauseJson>,
) -> Result<Json<PausedJson>, HttpError> {
    set(state, Pausable::Source(name), false, operator, input).await
}

#[utoipa::path(post, path = "/api/routes/{name}/pause", request_body = PauseJson,
    params(("name" = String, Path, description = "The route's name")), responses(
    (status = 200, description = "Its deliveries wait", body = PausedJson),
    (status = 404, description = "There is no such route"),
))]
pub(crate) async fn pause_route(
    state: State<Arc<Admin>>,
    Path(name): Path<String>,
    operator: Operator,
    input: Input<PauseJson>,
) -> Result<Json<PausedJson>, HttpError> {
    set(state, Pausable::Route(name), true, operator, input).await
}

#[utoipa::path(post, path = "/api/routes/{name}/resume", request_body = PauseJson,
    params(("name" = String, Path, description = "The route's name")), responses(
    (status = 200, description = "Its deliveries are handled", body = PausedJson),
    (status = 404, description = "There is no such route"),
))]
pub(crate) async fn resume_route(
    state: State<Arc<Admin>>,
    Path(name): Path<String>,
    operator: Operator,
    input: Input<PauseJson>,
) -> Result<Json<PausedJson>, HttpError> {
    set(state, Pausable::Route(name), false, operator, input).await
}

/// Whether what is old is forgotten.
#[derive(Serialize, ToSchema)]
pub(crate) struct ForgettingJson {
    forgetting: bool,
}

#[utoipa::path(post, path = "/api/forgetting/resume", request_body = PauseJson, responses(
    (status = 200, description = "The clock is right: what is old is forgotten again", body = ForgettingJson),
))]
pub(crate) async fn resume_forgetting(
    State(admin): State<Arc<Admin>>,
    operator: Operator,
    Input(input): Input<PauseJson>,
) -> Result<Json<ForgettingJson>, HttpError> {
    let who = operator.because(input.reason)?;
    admin.deliveries.trust_clock(who).await.map_err(work_error)?;
    if let Some(worker) = admin.worker.get() {
        worker.clock_trusted();
    }
    Ok(Json(ForgettingJson { forgetting: true }))
}

async fn set(
    State(admin): State<Arc<Admin>>,
    what: Pausable,
    paused: bool,
    operator: Operator,
    Input(input): Input<PauseJson>,
) -> Result<Json<PausedJson>, HttpError> {
    let who = operator.because(input.reason)?;
    // What was paused and then taken out of the configuration can still be resumed.
    let known = is_configured(&admin, &what)
        || (!paused && admin.deliveries.paused().await.map_err(work_error)?.contains(&what));
    if !known {
        let (kind, _) = what.parts();
        let code = if kind == "source" { "no_source" } else { "no_route" };
        return Err(HttpError::new(StatusCode::NOT_FOUND, code, format!("there is no such {kind}")));
    }
    admin.deliveries.set_paused(Pause { what: what.clone(), paused }, who).await.map_err(work_error)?;
    // A worker would find out by itself within a second; an operator should not have to wait and see.
    if let Some(worker) = admin.worker.get() {
        worker.learn_pauses().await.map_err(work_error)?;
    }
    crate::pauses::look(&admin).await;
    let (source, route) = match what {
        Pausable::Source(name) => (Some(name), None),
        Pausable::Route(name) => (None, Some(name)),
    };
    Ok(Json(PausedJson { source, route, paused }))
}

fn is_configured(admin: &Admin, what: &Pausable) -> bool {
    match what {
        Pausable::Source(name) => admin.gate.source_names().any(|known| known == name),
        Pausable::Route(name) => admin.routes.get(name).is_some(),
    }
}

fn route_json(
    route: &Route,
    breaker: &'static str,
    backlogs: &[Backlog],
    paused: &HashSet<Pausable>,
    now: UnixMicros,
) -> RouteJson {
    let source_paused = paused.contains(&Pausable::Source(route.source.to_string()));
    RouteJson {
        name: route.name.to_string(),
        configured: true,
        source: Some(route.source.to_string()),
        types: route.types.iter().map(|glob| glob.as_str().to_owned()).collect(),
        handler: Some(route.handler.kind()),
        after: route.after.as_ref().map(ToString::to_string),
        paused: source_paused || paused.contains(&Pausable::Route(route.name.to_string())),
        source_paused,
        breaker,
        backlog: backlog_json(backlogs.iter().find(|backlog| backlog.route == route.name.as_str()), now),
    }
}

fn left_json(backlog: &Backlog, paused: &HashSet<Pausable>, now: UnixMicros) -> RouteJson {
    RouteJson {
        name: backlog.route.clone(),
        configured: false,
        source: None,
        types: Vec::new(),
        handler: None,
        after: None,
        paused: paused.contains(&Pausable::Route(backlog.route.clone())),
        source_paused: false,
        breaker: "closed",
        backlog: backlog_json(Some(backlog), now),
    }
}

/// A route without a backlog has nothing that waits.
pub(super) fn backlog_json(backlog: Option<&Backlog>, now: UnixMicros) -> BacklogJson {
    let age = |due: UnixMicros| {
        let millis = now.0.saturating_sub(due.0).max(0) / 1_000;
        millis as f64 / 1_000.0
    };
    BacklogJson {
        waiting: backlog.map_or(0, |backlog| backlog.waiting),
        running: backlog.map_or(0, |backlog| backlog.running),
        dead: backlog.map_or(0, |backlog| backlog.dead),
        oldest_seconds: backlog.and_then(|backlog| backlog.oldest).map(age),
        blocked: backlog.map_or(0, |backlog| backlog.blocked),
        blocked_seconds: backlog.and_then(|backlog| backlog.blocked_since).map(age),
    }
}
