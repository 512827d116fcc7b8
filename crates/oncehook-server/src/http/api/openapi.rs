//! `/api/openapi.json`: the admin API, described by itself.

use axum::Json;
use utoipa::OpenApi;

use super::{events, health, orders, replays, routes, stats};

#[derive(OpenApi)]
#[openapi(
    info(
        title = "oncehook admin API",
        description = "What the gateway has received, what came of it, and how it is doing."
    ),
    paths(
        health::healthz,
        health::readyz,
        health::metrics,
        events::list,
        events::show,
        events::body,
        orders::retry,
        orders::replay,
        orders::skip,
        orders::release,
        replays::start,
        replays::show,
        replays::cancel,
        routes::list,
        routes::pause_route,
        routes::resume_route,
        routes::pause_source,
        routes::resume_source,
        routes::resume_forgetting,
        stats::stats,
        document,
    )
)]
struct Document;

#[utoipa::path(get, path = "/api/openapi.json", operation_id = "openapi", responses(
    (status = 200, description = "This document", body = serde_json::Value),
))]
pub(crate) async fn document() -> Json<utoipa::openapi::OpenApi> {
    Json(Document::openapi())
}
