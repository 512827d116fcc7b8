//! The admin listener: health, metrics and the API, for operators only.
//!
//! Promises: on every call the `Host` must be an IP address, `localhost` or a configured name (so a page on the internet
//! cannot reach it through a name of its own), and the bearer token must be right, except for health checks and where a
//! loopback listener has no token set. A call that changes something must not come from a strange page in a browser.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use aws_lc_rs::constant_time::verify_slices_are_equal;
use axum::Router;
use axum::extract::{Request, State};
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::routing::{get, post};
use http::{HeaderMap, StatusCode, header};
use oncehook::journal::{Deliveries, Journal, JournalReader, SelfTestError};
use oncehook::observe::Metrics;
use oncehook::route::Routes;
use oncehook::worker::WorkerHandle;
use oncehook_verify::{Secret, digest};
use tokio::sync::watch;

use super::api;
use super::error::HttpError;
use super::gate::Gate;
use super::site;
use crate::config::{Limits, ServerConfig};
use crate::pauses::Pauses;
use crate::replay::Replays;

/// When senders have been refused for so long, with no event stored in between, the gateway is not ready. Longer than a probe of
/// a journal that is well takes, so that one event which cannot be stored does not count.
const SHOWN_AFTER: Duration = Duration::from_secs(2);

/// What the admin routes work on.
pub struct Admin {
    pub(crate) gate: Arc<Gate>,
    pub(crate) journal: Arc<dyn Journal>,
    pub(crate) reader: Arc<dyn JournalReader>,
    pub(crate) deliveries: Arc<dyn Deliveries>,
    /// Set once the worker runs.
    pub(crate) worker: OnceLock<WorkerHandle>,
    pub(crate) routes: Routes,
    pub(crate) replays: Replays,
    /// What is paused.
    pub(crate) pauses: Pauses,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) access: Access,
    pub(crate) limits: Limits,
    /// How long an event may wait in the spool before somebody should look.
    pub(crate) spool_alarm: Duration,
    /// The latest verdict of the self-test.
    pub(crate) self_test: watch::Sender<Result<(), SelfTestError>>,
}

impl Admin {
    /// Whether the journal takes events. The gate follows the journal a moment later; this is how things are now.
    pub(crate) fn is_ready(&self) -> bool {
        self.gate.is_open() && self.self_test.borrow().is_ok() && self.failing().is_none()
    }

    /// Why the journal cannot store, by what it says itself or by what senders have met for a while.
    pub(crate) fn failing(&self) -> Option<String> {
        self.journal.state().failing.or_else(|| {
            let trouble = self.gate.fast_path().trouble().filter(|trouble| trouble.first.elapsed() >= SHOWN_AFTER)?;
            let (seconds, reason) = (trouble.first.elapsed().as_secs(), trouble.reason);
            Some(format!("every event was refused for {seconds} s: {reason}"))
        })
    }
}

impl Admin {
    /// Why nothing is forgotten, if nothing is.
    pub(crate) fn clock_doubt(&self) -> Option<String> {
        self.worker.get()?.clock_doubt().map(|doubt| doubt.to_string())
    }
}

/// Who may ask.
pub struct Access {
    token: Option<Secret>,
    hosts: Vec<String>,
}

impl Access {
    pub(crate) fn new(server: &ServerConfig) -> Self {
        Self { token: server.admin_token.clone(), hosts: server.admin_hosts.clone() }
    }

    /// A browser that was tricked into coming here brings the name it was tricked with.
    fn knows_host(&self, headers: &HeaderMap) -> bool {
        let mut hosts = headers.get_all(header::HOST).iter();
        let (Some(host), None) = (hosts.next(), hosts.next()) else { return false };
        let Ok(host) = host.to_str() else { return false };
        let Ok(authority) = host.parse::<http::uri::Authority>() else { return false };
        // A host has no user; what parses as one was put together by somebody.
        if host.contains('@') {
            return false;
        }
        let name = authority.host().to_ascii_lowercase();
        let bare = name.trim_start_matches('[').trim_end_matches(']');
        name == "localhost" || bare.parse::<std::net::IpAddr>().is_ok() || self.hosts.contains(&name)
    }

    /// Digests are compared, in constant time, so that not even the token's length shows.
    fn accepts_token(&self, headers: &HeaderMap) -> bool {
        let Some(token) = &self.token else { return true };
        let Some(shown) = headers.get(header::AUTHORIZATION) else { return false };
        let shown = shown.as_bytes();
        let Some((scheme, shown)) = shown.split_at_checked(7) else { return false };
        let shown = digest(shown);
        scheme.eq_ignore_ascii_case(b"Bearer ")
            && verify_slices_are_equal(&shown, &digest(token.reveal().as_bytes())).is_ok()
    }
}

/// Every admin route; without the API, those that every gateway serves.
pub fn router(admin: Arc<Admin>, with_api: bool) -> Router {
    Router::new()
        .route("/healthz", get(api::health::healthz))
        .route("/readyz", get(api::health::readyz))
        .route("/metrics", get(api::health::metrics))
        .merge(if with_api { api_routes() } else { Router::new() })
        .fallback(|| async { HttpError::not_found() })
        .method_not_allowed_fallback(|| async {
            // The router adds the methods that it takes.
            HttpError::new(StatusCode::METHOD_NOT_ALLOWED, "method", "this route does not take that method")
        })
        .layer(middleware::from_fn_with_state(Arc::clone(&admin), guard))
        .with_state(admin)
}

fn api_routes() -> Router<Arc<Admin>> {
    Router::new()
        .route("/api/events", get(api::events::list))
        .route("/api/events/{id}", get(api::events::show))
        .route("/api/events/{id}/body", get(api::events::body))
        .route("/api/events/{id}/retry", post(api::orders::retry))
        .route("/api/events/{id}/replay", post(api::orders::replay))
        .route("/api/events/{id}/skip", post(api::orders::skip))
        .route("/api/events/{id}/release", post(api::orders::release))
        .route("/api/replays", post(api::replays::start))
        .route("/api/replays/{id}", get(api::replays::show).delete(api::replays::cancel))
        .route("/api/routes", get(api::routes::list))
        .route("/api/routes/{name}/pause", post(api::routes::pause_route))
        .route("/api/routes/{name}/resume", post(api::routes::resume_route))
        .route("/api/sources/{name}/pause", post(api::routes::pause_source))
        .route("/api/sources/{name}/resume", post(api::routes::resume_source))
        .route("/api/forgetting/resume", post(api::routes::resume_forgetting))
        .route("/api/stats", get(api::stats::stats))
        .route("/api/openapi.json", get(api::openapi::document))
}

/// Checks who asks, and makes every answer harmless to a browser.
async fn guard(State(admin): State<Arc<Admin>>, request: Request, next: Next) -> Result<Response, HttpError> {
    if !admin.access.knows_host(request.headers()) {
        let message = "ask by IP address or localhost, or add the name to server.admin_hosts";
        return Err(HttpError::new(StatusCode::FORBIDDEN, "host", message));
    }
    if !site::is_safe(request.method()) && site::is_foreign(request.headers()) {
        let message = "this call comes from another site; make it from a program or from here";
        return Err(HttpError::new(StatusCode::FORBIDDEN, "cross_site", message));
    }
    let open = matches!(request.uri().path(), "/healthz" | "/readyz");
    if !open && !admin.access.accepts_token(request.headers()) {
        return Err(HttpError::new(StatusCode::UNAUTHORIZED, "token", "a valid bearer token is needed"));
    }
    let mut response = next.run(request).await;
    let headers = response.headers_mut();
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, http::HeaderValue::from_static("nosniff"));
    headers.insert(header::CONTENT_SECURITY_POLICY, http::HeaderValue::from_static("default-src 'none'"));
    headers.insert(header::CACHE_CONTROL, http::HeaderValue::from_static("no-store"));
    Ok(response)
}
