//! `/api/events`: what was received.

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::response::{IntoResponse, Response};
use http::{HeaderName, HeaderValue, StatusCode, header};
use oncehook::event::EventId;
use oncehook::intake::Spooled;
use oncehook::journal::{
    Attempt, AuditEntry, Conflict, Delivery, EventDetail, EventQuery, EventStatus, EventSummary, Flag,
    ReadError, StoredBody,
};
use oncehook_verify::{EventKey, UnixMicros};
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};
use utoipa::{IntoParams, ToSchema};

use crate::http::admin::Admin;
use crate::http::error::HttpError;

/// Which events to list. All conditions must hold.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct ListParams {
    source: Option<String>,
    /// Exactly this type
    r#type: Option<String>,
    /// quarantined, unrouted, dead, parked, retrying, running, ready, superseded, skipped or succeeded
    status: Option<String>,
    key: Option<String>,
    entity: Option<String>,
    /// Received at or after (RFC 3339)
    since: Option<String>,
    /// Received before (RFC 3339)
    until: Option<String>,
    /// At most this many, 1 to 1,000; 100 if not given
    limit: Option<usize>,
    /// `next` of the page before
    cursor: Option<String>,
}

/// A page of events, newest first.
#[derive(Serialize, ToSchema)]
pub(crate) struct PageJson {
    events: Vec<EventJson>,
    /// Pass as `cursor` to get the next page; null at the end
    next: Option<String>,
}

/// An event.
#[derive(Serialize, ToSchema)]
pub(crate) struct EventJson {
    id: String,
    source: String,
    /// The idempotency key; `hex:…` if it is not printable text
    key: String,
    r#type: Option<String>,
    entity: Option<String>,
    /// quarantined, unrouted, dead, parked, retrying, running, ready, superseded, skipped or succeeded; `spooled` while it
    /// waits in the node's own file for the journal
    status: &'static str,
    /// conflict, suspected_replay, quarantined
    flags: Vec<&'static str>,
    /// How much the signature covered: body, fields or none
    integrity: String,
    occurred_at: Option<String>,
    received_at: String,
    /// Bytes of the body
    size: u64,
    /// How many more times it was delivered
    duplicates: u64,
    deliveries: Vec<DeliveryJson>,
}

#[derive(Serialize, ToSchema)]
struct DeliveryJson {
    route: String,
    epoch: u32,
    state: String,
    /// Tries so far
    attempt: u32,
    /// When it is due, or was
    run_at: String,
    /// What the handler returned, as JSON
    #[schema(value_type = Option<serde_json::Value>)]
    result: Option<Box<RawValue>>,
    /// Why the last try failed
    error: Option<String>,
    /// Whose fault that was: destination, handler, ours or poison
    cause: Option<String>,
    /// When it became final
    settled_at: Option<String>,
    /// Every try, oldest first; only where one event is shown
    #[serde(skip_serializing_if = "Option::is_none")]
    attempts: Option<Vec<AttemptJson>>,
}

#[derive(Serialize, ToSchema)]
struct AttemptJson {
    attempt: u32,
    started_at: String,
    finished_at: Option<String>,
    /// succeeded, failed, lost or given_back
    outcome: Option<String>,
    error: Option<String>,
}

#[derive(Serialize, ToSchema)]
struct AuditJson {
    at: String,
    who: String,
    action: String,
    reason: Option<String>,
    /// What it changed, as JSON
    #[schema(value_type = Option<serde_json::Value>)]
    detail: Option<Box<RawValue>>,
}

/// An event with its whole story.
#[derive(Serialize, ToSchema)]
pub(crate) struct DetailJson {
    #[serde(flatten)]
    event: EventJson,
    /// SHA-256 of the body without its volatile fields
    digest: String,
    /// The headers that were kept
    headers: Vec<(String, String)>,
    duplicates_seen: Option<DuplicatesJson>,
    conflicts: Vec<ConflictJson>,
    /// What operators ordered for it, oldest first
    audit: Vec<AuditJson>,
}

#[derive(Serialize, ToSchema)]
struct DuplicatesJson {
    first_at: String,
    last_at: String,
    /// The latest few, oldest first
    latest: Vec<DuplicateJson>,
}

#[derive(Serialize, ToSchema)]
struct DuplicateJson {
    at: String,
    peer: String,
}

#[derive(Serialize, ToSchema)]
struct ConflictJson {
    /// null sums up the bodies beyond the ones that are kept
    digest: Option<String>,
    count: u64,
    first_at: String,
    last_at: String,
    size: u64,
}

#[utoipa::path(get, path = "/api/events", params(ListParams), responses(
    (status = 200, body = PageJson),
    (status = 400, description = "A parameter is wrong"),
))]
pub(crate) async fn list(
    State(admin): State<Arc<Admin>>,
    params: Result<Query<ListParams>, QueryRejection>,
) -> Result<Json<PageJson>, HttpError> {
    let Query(params) = params.map_err(|rejection| HttpError::bad_request("query", rejection.body_text()))?;
    let page = admin.reader.list(query(params)?).await.map_err(read_error)?;
    Ok(Json(PageJson {
        events: page.events.iter().map(event_json).collect(),
        next: page.next.map(|id| id.to_string()),
    }))
}

#[utoipa::path(get, path = "/api/events/{id}", params(("id" = String, Path, description = "The event's id")), responses(
    (status = 200, body = DetailJson),
    (status = 404, description = "There is no such event"),
))]
pub(crate) async fn show(
    State(admin): State<Arc<Admin>>,
    Path(id): Path<String>,
) -> Result<Json<DetailJson>, HttpError> {
    let id = match locate(&admin, &id).await? {
        Located::Spooled(spooled) => return Ok(Json(spooled_json(&spooled))),
        Located::Journal(id) => id,
    };
    let detail = admin.reader.show(id).await.map_err(read_error)?.ok_or_else(no_event)?;
    let stored = admin.reader.body(id).await.map_err(read_error)?.ok_or_else(no_event)?;
    Ok(Json(detail_json(&detail, &stored.headers)))
}

#[utoipa::path(get, path = "/api/events/{id}/body", params(("id" = String, Path, description = "The event's id")), responses(
    (status = 200, description = "The body, byte for byte", content_type = "application/octet-stream"),
    (status = 404, description = "There is no such event"),
))]
pub(crate) async fn body(
    State(admin): State<Arc<Admin>>,
    Path(id): Path<String>,
) -> Result<Response, HttpError> {
    let stored = match locate(&admin, &id).await? {
        Located::Spooled(spooled) => StoredBody { headers: spooled.event.headers, body: spooled.event.body },
        Located::Journal(id) => admin.reader.body(id).await.map_err(read_error)?.ok_or_else(no_event)?,
    };
    let mut response = stored.body.into_response();
    let headers = response.headers_mut();
    // Never the sender's own content type: a browser must not run what a stranger sent.
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    headers.insert(header::CONTENT_DISPOSITION, HeaderValue::from_static("attachment"));
    let sent = header_lines(&stored.headers).find(|(name, _)| *name == b"content-type");
    if let Some(sent) = sent.and_then(|(_, value)| HeaderValue::from_bytes(value).ok()) {
        headers.insert(HeaderName::from_static("oncehook-content-type"), sent);
    }
    Ok(response)
}

/// What an event must be like, as a caller writes it.
pub(super) struct Conditions {
    pub(super) source: Option<String>,
    pub(super) r#type: Option<String>,
    pub(super) status: Option<String>,
    pub(super) key: Option<String>,
    pub(super) entity: Option<String>,
    pub(super) since: Option<String>,
    pub(super) until: Option<String>,
}

impl Conditions {
    /// Checks them. `code` is the error's.
    pub(super) fn read(self, code: &'static str) -> Result<EventQuery, HttpError> {
        let bad = |message: String| HttpError::bad_request(code, message);
        let time = |name: &str, text: Option<String>| match text {
            None => Ok(None),
            Some(text) => match UnixMicros::parse_rfc3339(&text) {
                Some(time) => Ok(Some(time)),
                None => Err(bad(format!("{name} must be a time such as 2026-11-15T02:20:17Z"))),
            },
        };
        let status = match self.status {
            None => None,
            Some(word) => Some(EventStatus::parse(&word).ok_or_else(|| {
                let known: Vec<_> = EventStatus::ALL.iter().map(|status| status.as_str()).collect();
                bad(format!("status must be one of {}", known.join(", ")))
            })?),
        };
        let key = match self.key {
            None => None,
            Some(key) => {
                Some(EventKey::from_display(&key).ok_or_else(|| bad("key is not a key".to_owned()))?)
            }
        };
        Ok(EventQuery {
            source: self.source,
            kind: self.r#type,
            status,
            key,
            entity: self.entity,
            since: time("since", self.since)?,
            until: time("until", self.until)?,
            after: None,
            limit: 0,
        })
    }
}

fn query(params: ListParams) -> Result<EventQuery, HttpError> {
    let ListParams { source, r#type, status, key, entity, since, until, limit, cursor } = params;
    let bad = |message: &str| HttpError::bad_request("query", message);
    let query = Conditions { source, r#type, status, key, entity, since, until }.read("query")?;
    let after = match cursor {
        None => None,
        Some(cursor) => Some(cursor.parse().map_err(|_| bad("cursor is not one that we gave"))?),
    };
    let limit = limit.unwrap_or(100);
    if !(1..=1_000).contains(&limit) {
        return Err(bad("limit must be between 1 and 1000"));
    }
    Ok(EventQuery { after, limit, ..query })
}

/// Where the event of an id is.
pub(super) enum Located {
    /// It waits in this node's spool.
    Spooled(Box<Spooled>),
    /// It is, or was, in the journal under this id, which may be another than the one that was asked for.
    Journal(EventId),
}

/// Finds out what an id stands for. The spool first: what is not there any more has its alias in the journal.
pub(super) async fn locate(admin: &Admin, id: &str) -> Result<Located, HttpError> {
    let id = event_id(id)?;
    if let Some(intake) = admin.gate.intake() {
        match intake.spool().find(id).await {
            Ok(Some(spooled)) => return Ok(Located::Spooled(Box::new(spooled))),
            Ok(None) => {}
            Err(error) => tracing::warn!(%error, "the spool could not be asked for an event"),
        }
    }
    let alias = admin.reader.resolve(id).await.map_err(read_error)?;
    Ok(Located::Journal(alias.unwrap_or(id)))
}

pub(super) fn event_id(text: &str) -> Result<EventId, HttpError> {
    text.parse().map_err(|_| no_event())
}

pub(super) fn no_event() -> HttpError {
    HttpError::new(StatusCode::NOT_FOUND, "no_event", "there is no such event")
}

/// The reason goes to the log; the caller learns whether to try again.
pub(super) fn read_error(error: ReadError) -> HttpError {
    match error {
        ReadError::TooSlow => {
            HttpError::unavailable_read("too_slow", "the query took too long; narrow it down")
        }
        ReadError::Engine(error) => {
            tracing::error!(error, "reading the journal failed");
            HttpError::unavailable_read("journal", "the journal could not be read; try again")
        }
    }
}

fn event_json(event: &EventSummary) -> EventJson {
    EventJson {
        id: event.id.to_string(),
        source: event.source.clone(),
        key: event.key.display().into_owned(),
        r#type: event.kind.clone(),
        entity: event.entity.clone(),
        status: event.status.as_str(),
        flags: event.flags.iter().map(|flag| flag.as_str()).collect(),
        integrity: event.integrity.clone(),
        occurred_at: event.occurred_at.map(|at| at.to_rfc3339()),
        received_at: event.received_at.to_rfc3339(),
        size: event.size,
        duplicates: event.duplicates,
        deliveries: event.deliveries.iter().map(delivery_json).collect(),
    }
}

fn delivery_json(delivery: &Delivery) -> DeliveryJson {
    DeliveryJson {
        route: delivery.route.clone(),
        epoch: delivery.epoch,
        state: delivery.state.clone(),
        attempt: delivery.attempt,
        run_at: delivery.run_at.to_rfc3339(),
        result: delivery.result.as_deref().map(raw_json),
        error: delivery.error.clone(),
        cause: delivery.cause.clone(),
        settled_at: delivery.settled_at.map(|at| at.to_rfc3339()),
        attempts: None,
    }
}

/// A result as it was stored, number for number. One that is not JSON is a text.
fn raw_json(text: &str) -> Box<RawValue> {
    RawValue::from_string(text.to_owned())
        .or_else(|_| to_raw_value(text))
        .unwrap_or_else(|_| RawValue::NULL.to_owned())
}

fn attempt_json(attempt: &Attempt) -> AttemptJson {
    AttemptJson {
        attempt: attempt.number,
        started_at: attempt.started_at.to_rfc3339(),
        finished_at: attempt.finished_at.map(|at| at.to_rfc3339()),
        outcome: attempt.outcome.clone(),
        error: attempt.error.clone(),
    }
}

fn audit_json(entry: &AuditEntry) -> AuditJson {
    AuditJson {
        at: entry.at.to_rfc3339(),
        who: entry.who.clone(),
        action: entry.action.clone(),
        reason: entry.reason.clone(),
        detail: entry.detail.as_deref().map(raw_json),
    }
}

fn detail_json(detail: &EventDetail, headers: &[u8]) -> DetailJson {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let mut event = event_json(&detail.event);
    for (shown, delivery) in event.deliveries.iter_mut().zip(&detail.event.deliveries) {
        shown.attempts = Some(delivery.attempts.iter().map(attempt_json).collect());
    }
    DetailJson {
        event,
        digest: hex::encode(detail.digest),
        headers: header_lines(headers).map(|(name, value)| (text(name), text(value))).collect(),
        duplicates_seen: detail.duplicates_seen.map(|(first_at, last_at)| DuplicatesJson {
            first_at: first_at.to_rfc3339(),
            last_at: last_at.to_rfc3339(),
            latest: detail
                .duplicates_latest
                .iter()
                .map(|seen| DuplicateJson { at: seen.at.to_rfc3339(), peer: seen.peer.to_string() })
                .collect(),
        }),
        conflicts: detail.conflicts.iter().map(conflict_json).collect(),
        audit: detail.audit.iter().map(audit_json).collect(),
    }
}

/// An event that the journal does not know yet: it has no deliveries, and nobody can order anything for it.
fn spooled_json(spooled: &Spooled) -> DetailJson {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let event = &spooled.event;
    DetailJson {
        event: EventJson {
            id: spooled.id.to_string(),
            source: event.source.to_string(),
            key: event.key.display().into_owned(),
            r#type: event.kind.clone(),
            entity: event.entity.clone(),
            status: "spooled",
            flags: event.quarantine.iter().map(|_| Flag::Quarantined.as_str()).collect(),
            integrity: event.integrity.as_str().to_owned(),
            occurred_at: event.occurred_at.map(|at| at.to_rfc3339()),
            received_at: event.received_at.to_rfc3339(),
            size: event.body.len() as u64,
            duplicates: spooled.copies,
            deliveries: Vec::new(),
        },
        digest: hex::encode(event.digest),
        headers: header_lines(&event.headers).map(|(name, value)| (text(name), text(value))).collect(),
        duplicates_seen: None,
        conflicts: Vec::new(),
        audit: Vec::new(),
    }
}

fn conflict_json(conflict: &Conflict) -> ConflictJson {
    ConflictJson {
        digest: conflict.digest.map(hex::encode),
        count: conflict.count,
        first_at: conflict.first_at.to_rfc3339(),
        last_at: conflict.last_at.to_rfc3339(),
        size: conflict.size,
    }
}

/// The `name: value` lines of stored headers.
fn header_lines(headers: &[u8]) -> impl Iterator<Item = (&[u8], &[u8])> {
    headers.split(|byte| *byte == b'\n').filter_map(|line| {
        let colon = line.iter().position(|byte| *byte == b':')?;
        let (name, value) = line.split_at(colon);
        Some((name, value.get(2..).unwrap_or_default()))
    })
}
