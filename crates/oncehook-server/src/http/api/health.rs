//! `/healthz`: the process answers. `/readyz`: events are accepted, and how safe they are. `/metrics`: numbers.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::IntoResponse;
use http::{StatusCode, header};
use oncehook::journal::Paused;
use serde::Serialize;
use utoipa::ToSchema;

use super::stats::{SpoolJson, spool_json};
use crate::backlog;
use crate::http::admin::Admin;
use crate::pauses;
use crate::spool::figures;

/// The process is alive.
#[derive(Serialize, ToSchema)]
pub(crate) struct Health {
    /// `ok`
    status: &'static str,
}

/// A source or route whose deliveries are held.
#[derive(Serialize, ToSchema)]
struct PausedJson {
    /// `source` or `route`
    kind: &'static str,
    name: String,
    since: String,
}

impl PausedJson {
    fn of(paused: &Paused) -> Self {
        let (kind, name) = paused.what.parts();
        Self { kind, name: name.to_owned(), since: paused.since.to_rfc3339() }
    }
}

/// Whether events are accepted.
#[derive(Serialize, ToSchema)]
pub(crate) struct Readiness {
    ready: bool,
    /// `ready`, `degraded` (the journal is away; events of sources with a spool are accepted, others are not) or `not_ready`
    status: &'static str,
    /// The journal's kind
    journal: &'static str,
    /// What an acknowledged event survives: `durable-fsync`, `process-crash-only`
    durability: &'static str,
    /// Sources and routes whose deliveries an operator holds. Events are accepted all the same
    paused: Vec<PausedJson>,
    /// `passed`, or why not
    self_test: String,
    /// Why the journal cannot store, if it cannot
    failing: Option<String>,
    /// Why nothing is forgotten, if this node's clock or the database's is in doubt. Events are accepted all the same
    #[serde(skip_serializing_if = "Option::is_none")]
    forgetting_stopped: Option<String>,
    /// What waits in this node's spool. Only where it has one
    #[serde(skip_serializing_if = "Option::is_none")]
    spool: Option<SpoolJson>,
    /// `ok`, or what is wrong with Redis; without it events are accepted all the same. Only where it is configured
    #[serde(skip_serializing_if = "Option::is_none")]
    redis: Option<String>,
}

#[utoipa::path(get, path = "/healthz", responses((status = 200, description = "The process answers", body = Health)))]
pub(crate) async fn healthz() -> Json<Health> {
    Json(Health { status: "ok" })
}

#[utoipa::path(get, path = "/readyz", responses(
    (status = 200, description = "Events are accepted, at least into the spool", body = Readiness),
    (status = 503, description = "Events are refused", body = Readiness),
))]
pub(crate) async fn readyz(State(admin): State<Arc<Admin>>) -> impl IntoResponse {
    let state = admin.journal.state();
    let self_test = admin.self_test.borrow().clone();
    let (ready, degraded) = (admin.is_ready(), admin.gate.has_usable_spool());
    let readiness = Readiness {
        ready: ready || degraded,
        status: match (ready, degraded) {
            (true, _) => "ready",
            (false, true) => "degraded",
            (false, false) => "not_ready",
        },
        journal: state.kind,
        durability: state.durability.as_str(),
        paused: admin.pauses.now().iter().map(PausedJson::of).collect(),
        self_test: self_test.map_or_else(|error| error.to_string(), |()| "passed".to_owned()),
        failing: admin.failing(),
        forgetting_stopped: admin.clock_doubt(),
        spool: spool_json(&admin),
        redis: admin.gate.fast_path().shared().map(|shared| match shared.problem {
            None => "ok".to_owned(),
            Some(problem) => format!("degraded: {problem}"),
        }),
    };
    let status = if ready || degraded { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(readiness))
}

#[utoipa::path(get, path = "/metrics", responses((status = 200, description = "OpenMetrics text", body = String)))]
pub(crate) async fn metrics(State(admin): State<Arc<Admin>>) -> impl IntoResponse {
    backlog::measure(&admin).await;
    pauses::measure(&admin);
    if let Some(intake) = admin.gate.intake() {
        admin.metrics.set_spool(figures(&intake.spool().state(), &admin));
    }
    if let Some(shared) = admin.gate.fast_path().shared() {
        admin.metrics.set_shared(&shared);
    }
    let text = admin.metrics.render(&admin.journal.state(), admin.is_ready());
    ([(header::CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], text)
}
