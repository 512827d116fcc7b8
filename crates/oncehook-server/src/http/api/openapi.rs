//! `/api/openapi.json`: the admin API, described by itself.

use axum::Json;
use utoipa::OpenApi;

use super::{events, health, stats};

#[derive(OpenApi)]
#[openapi(
    info(title = "oncehook admin API", description = "What the gateway has received, and how it is doing."),
    paths(
        health::healthz,
        health::readyz,
        health::metrics,
        events::list,
        events::show,
        events::body,
        stats::stats,
    )
)]
struct Document;

pub(crate) async fn document() -> Json<utoipa::openapi::OpenApi> {
    Json(Document::openapi())
}
