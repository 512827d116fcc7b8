//! `/api/events`: what was received.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::response::{IntoResponse, Response};
use http::{HeaderName, HeaderValue, StatusCode, header};
use oncehook::delivery::DeliveryState;
use oncehook::event::EventId;
use oncehook::intake::Spooled;
use oncehook::journal::{
    Attempt, AuditEntry, Conflict, Delivery, EventDetail, EventQuery, EventStatus, EventSummary, Flag, Paused,
    ReadError, StoredBody,
};
use oncehook_verify::{EventKey, Quarantine, UnixMicros};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::{IntoParams, ToSchema};

use crate::http::admin::Admin;
use crate::http::embed::embedded;
use crate::http::error::HttpError;
use crate::pauses::holds;

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
    /// conflict, suspected_replay, quarantined; key_missing if its source has a place for the key, nothing stood there, and
    /// the body's digest is the key instead
    flags: Vec<&'static str>,
    /// Why, for each of these flags
    reasons: BTreeMap<&'static str, String>,
    /// Whether a delivery of it is held by a pause of its source or route
    paused: bool,
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
    /// Whether it waits because its source or route is paused
    paused: bool,
    /// Tries so far
    attempt: u32,
    /// When it is due, or was
    run_at: String,
    /// What it waits for, if it waits for others: `turn` (an earlier event of its entity) or `prerequisite`
    #[serde(skip_serializing_if = "Option::is_none")]
    waits_for: Option<&'static str>,
    /// Since when
    #[serde(skip_serializing_if = "Option::is_none")]
    waits_since: Option<String>,
    /// What the handler returned, as JSON
    #[schema(value_type = Option<serde_json::Value>)]
    result: Option<Box<RawValue>>,
    /// Why the last try failed
    error: Option<String>,
    /// Whose fault that was: destination, handler, ours or poison
    cause: Option<String>,
    /// When it became final
    settled_at: Option<String>,
    /// The latest 100 tries, oldest first; only where one event is shown. `attempt` says how many there were
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
    /// What operators ordered for it: the latest 50, oldest first
    audit: Vec<AuditJson>,
    /// How many orders there were
    audit_total: u64,
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

#[utoipa::path(get, path = "/api/events", operation_id = "list_events", params(ListParams), responses(
    (status = 200, description = "A page of events, newest first", body = PageJson),
    (status = 400, description = "A parameter is wrong"),
))]
pub(crate) async fn list(
    State(admin): State<Arc<Admin>>,
    params: Result<Query<ListParams>, QueryRejection>,
) -> Result<Json<PageJson>, HttpError> {
    let Query(params) = params.map_err(|rejection| HttpError::bad_request("query", rejection.body_text()))?;
    let page = admin.reader.list(query(params)?).await.map_err(read_error)?;
    let paused = admin.pauses.now();
    Ok(Json(PageJson {
        events: page.events.iter().map(|event| flagged(&admin, event, event_json(event, &paused))).collect(),
        next: page.next.map(|id| id.to_string()),
    }))
}

#[utoipa::path(get, path = "/api/events/{id}", operation_id = "show_event",
    params(("id" = String, Path, description = "The event's id, or the beginning of it")), responses(
    (status = 200, description = "The event with its whole story", body = DetailJson),
    (status = 404, description = "There is no such event"),
    (status = 409, description = "Several ids begin so"),
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
    let mut json = detail_json(&detail, &stored.headers, &admin.pauses.now());
    json.event = flagged(&admin, &detail.event, json.event);
    Ok(Json(json))
}

#[utoipa::path(get, path = "/api/events/{id}/body", operation_id = "event_body", params(("id" = String, Path, description = "The event's id")), responses(
    (status = 200, description = "The body, byte for byte", content_type = "application/octet-stream"),
    (status = 404, description = "There is no such event"),
))]
pub(crate) async fn body(State(admin): State<Arc<Admin>>, Path(id): Path<String>) -> Result<Response, HttpError> {
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
            Some(key) => Some(EventKey::from_display(&key).ok_or_else(|| bad("key is not a key".to_owned()))?),
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

/// Finds out what an id, or the beginning of one, stands for. The spool first: what is not there any more has its alias in
/// the journal.
pub(super) async fn locate(admin: &Admin, id: &str) -> Result<Located, HttpError> {
    let id = match id.parse() {
        Ok(id) => id,
        Err(_) => find_by_beginning(admin, id).await?,
    };
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

/// Ids that are named where several begin so.
const NAMED: usize = 10;

/// The one event of the journal whose id begins so.
async fn find_by_beginning(admin: &Admin, beginning: &str) -> Result<EventId, HttpError> {
    let beginning = beginning.to_ascii_lowercase();
    let after = EventId::after_all_that_begin(&beginning).ok_or_else(no_event)?;
    let query = EventQuery { after: Some(after), limit: NAMED, ..EventQuery::default() };
    let page = admin.reader.list(query).await.map_err(read_error)?;
    let ids = page.events.iter().map(|event| event.id);
    let found: Vec<EventId> = ids.take_while(|id| id.to_string().starts_with(&beginning)).collect();
    match found.as_slice() {
        [] => Err(no_event()),
        [only] => Ok(*only),
        several => {
            let ids: Vec<String> = several.iter().map(ToString::to_string).collect();
            let more = if several.len() == NAMED { " and perhaps more" } else { "" };
            let message = format!("several ids begin with {beginning}: {}{more}", ids.join(", "));
            Err(HttpError::new(StatusCode::CONFLICT, "ambiguous", message))
        }
    }
}

pub(super) fn no_event() -> HttpError {
    HttpError::new(StatusCode::NOT_FOUND, "no_event", "there is no such event")
}

/// The reason goes to the log; the caller learns whether to try again.
pub(super) fn read_error(error: ReadError) -> HttpError {
    match error {
        ReadError::TooSlow => HttpError::unavailable_read("too_slow", "the query took too long; narrow it down"),
        ReadError::Engine(error) => {
            tracing::error!(error, "reading the journal failed");
            HttpError::unavailable_read("journal", "the journal could not be read; try again")
        }
    }
}

/// Adds the flag that is not stored: it shows in the key, if the source is still configured.
fn flagged(admin: &Admin, event: &EventSummary, mut json: EventJson) -> EventJson {
    let held = event.flags.contains(&Flag::Quarantined);
    if !held && admin.gate.lacks_key(&event.source, &event.key) {
        json.flags.push("key_missing");
        let reason = "nothing stands where its source looks for the key, so the body's digest is the key";
        json.reasons.insert("key_missing", reason.to_owned());
    }
    json
}

fn event_json(event: &EventSummary, paused: &[Paused]) -> EventJson {
    let deliveries: Vec<DeliveryJson> =
        event.deliveries.iter().map(|delivery| delivery_json(delivery, &event.source, paused)).collect();
    EventJson {
        id: event.id.to_string(),
        source: event.source.clone(),
        key: event.key.display().into_owned(),
        r#type: event.kind.clone(),
        entity: event.entity.clone(),
        status: event.status.as_str(),
        flags: event.flags.iter().map(|flag| flag.as_str()).collect(),
        reasons: reasons(&event.flags, event.quarantine),
        paused: deliveries.iter().any(|delivery| delivery.paused),
        integrity: event.integrity.clone(),
        occurred_at: event.occurred_at.map(|at| at.to_rfc3339()),
        received_at: event.received_at.to_rfc3339(),
        size: event.size,
        duplicates: event.duplicates,
        deliveries,
    }
}

/// Why an event has its flags.
fn reasons(flags: &[Flag], quarantine: Option<Quarantine>) -> BTreeMap<&'static str, String> {
    let reason = |flag: &Flag| match flag {
        Flag::Conflict => "another body came under the same key; the first one counts".to_owned(),
        Flag::SuspectedReplay => {
            "the same body came before under another key that the signature does not cover".to_owned()
        }
        Flag::Quarantined => quarantine.map_or_else(
            || "unknown".to_owned(),
            |quarantine| format!("{}: {}", quarantine.as_str(), quarantine.explain()),
        ),
    };
    flags.iter().map(|flag| (flag.as_str(), reason(flag))).collect()
}

fn delivery_json(delivery: &Delivery, source: &str, paused: &[Paused]) -> DeliveryJson {
    let waits = DeliveryState::parse(&delivery.state)
        .is_some_and(|state| state.is_pending() && state != DeliveryState::Running);
    DeliveryJson {
        paused: waits && holds(paused, source, &delivery.route),
        route: delivery.route.clone(),
        epoch: delivery.epoch,
        state: delivery.state.clone(),
        attempt: delivery.attempt,
        run_at: delivery.run_at.to_rfc3339(),
        waits_for: delivery.waits_for().map(|(what, _)| what),
        waits_since: delivery.waits_for().map(|(_, since)| since.to_rfc3339()),
        result: delivery.result.as_deref().map(embedded),
        error: delivery.error.clone(),
        cause: delivery.cause.clone(),
        settled_at: delivery.settled_at.map(|at| at.to_rfc3339()),
        attempts: None,
    }
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
        detail: entry.detail.as_deref().map(embedded),
    }
}

fn detail_json(detail: &EventDetail, headers: &[u8], paused: &[Paused]) -> DetailJson {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let mut event = event_json(&detail.event, paused);
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
        audit_total: detail.audit_total,
    }
}

/// An event that the journal does not know yet: it has no deliveries, and nobody can order anything for it.
fn spooled_json(spooled: &Spooled) -> DetailJson {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let event = &spooled.event;
    let flags: Vec<Flag> = event.quarantine.iter().map(|_| Flag::Quarantined).collect();
    DetailJson {
        event: EventJson {
            id: spooled.id.to_string(),
            source: event.source.to_string(),
            key: event.key.display().into_owned(),
            r#type: event.kind.clone(),
            entity: event.entity.clone(),
            status: "spooled",
            flags: flags.iter().map(|flag| flag.as_str()).collect(),
            reasons: reasons(&flags, event.quarantine),
            paused: false,
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
        audit_total: 0,
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
