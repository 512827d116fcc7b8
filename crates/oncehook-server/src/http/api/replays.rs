//! `/api/replays`: orders for many events at once. `replay.rs` says what they promise.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use oncehook::journal::{EventQuery, Verb};
use oncehook::route::Routes;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::events::{Conditions, read_error};
use super::input::{Input, Operator};
use super::orders::{forced, no_route, route_name};
use crate::http::admin::Admin;
use crate::http::error::HttpError;
use crate::order::can_force;
use crate::replay::{Desk, Job, Plan, Progress, Survey, survey};

/// Events per second, unless the order says otherwise, and at most.
const USUAL_RATE: u32 = 200;
const MOST_RATE: u32 = 10_000;

/// What to do with which events.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ReplaysJson {
    /// Which events; at least one condition
    #[serde(default)]
    filter: FilterJson,
    /// What to do with each; `replay` if not given
    #[serde(default)]
    verb: VerbJson,
    /// The new epoch of every event; needed for `force`
    epoch: Option<u32>,
    /// Why, for the audit; needed for `force`
    reason: Option<String>,
    /// Only this route
    route: Option<String>,
    /// Events per second, 1 to 10,000; 200 if not given
    rate: Option<u32>,
    /// Only count what would be touched
    #[serde(default)]
    dry_run: bool,
    /// How many events the filter should find, as a dry run has told: if it finds another number now, nothing is done
    expect: Option<u64>,
}

/// What to do with each event.
#[derive(Debug, Default, Clone, Copy, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum VerbJson {
    /// Try what failed again
    Retry,
    /// Offer it again; what took effect stays as it is
    #[default]
    Replay,
    /// Run it again although it took effect
    Force,
}

/// Which events. All conditions must hold.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct FilterJson {
    source: Option<String>,
    r#type: Option<String>,
    status: Option<String>,
    key: Option<String>,
    entity: Option<String>,
    since: Option<String>,
    until: Option<String>,
}

/// A replay that began.
#[derive(Serialize, ToSchema)]
pub(crate) struct StartedJson {
    /// Ask `/api/replays/{id}` how far it is
    replay: String,
}

#[utoipa::path(post, path = "/api/replays", operation_id = "start_replay", request_body = ReplaysJson, responses(
    (status = 200, description = "A dry run: what would be touched", body = Survey),
    (status = 202, description = "It has begun", body = StartedJson),
    (status = 400, description = "Something in the order is wrong"),
    (status = 404, description = "`force` names a route that is not configured for the events"),
    (status = 409, description = "Another one is running, or the filter does not find the number that was expected"),
))]
pub(crate) async fn start(
    State(admin): State<Arc<Admin>>,
    operator: Operator,
    Input(input): Input<ReplaysJson>,
) -> Result<Response, HttpError> {
    let (dry_run, expect) = (input.dry_run, input.expect);
    let mut plan = plan(input, operator, &admin.routes)?;
    if dry_run || expect.is_some() {
        let now = admin.gate.now();
        let found = survey(admin.reader.as_ref(), &plan.query, now).await.map_err(read_error)?;
        if let Some(expect) = expect.filter(|expect| !found.complete || found.matched != *expect) {
            return Err(not_as_expected(&found, expect));
        }
        if dry_run {
            return Ok(Json(found).into_response());
        }
        // What was counted, and nothing that comes after.
        plan.query.until = Some(plan.query.until.map_or(now, |until| until.min(now)));
    }
    let desk = Desk {
        reader: Arc::clone(&admin.reader),
        deliveries: Arc::clone(&admin.deliveries),
        routes: admin.routes.clone(),
    };
    let job = admin.replays.start(new_id()?, desk, plan).map_err(|running| {
        let message = format!("replay {running} is running; wait for it or cancel it");
        HttpError::new(StatusCode::CONFLICT, "busy", message)
    })?;
    let started = StartedJson { replay: job.progress().replay };
    Ok((StatusCode::ACCEPTED, Json(started)).into_response())
}

#[utoipa::path(get, path = "/api/replays/{id}", operation_id = "show_replay",
    params(("id" = String, Path, description = "The replay's id")), responses(
    (status = 200, description = "How far it has come", body = Progress),
    (status = 404, description = "There is no such replay in this process"),
))]
pub(crate) async fn show(State(admin): State<Arc<Admin>>, Path(id): Path<String>) -> Result<Json<Progress>, HttpError> {
    Ok(Json(find(&admin, &id)?.progress()))
}

#[utoipa::path(delete, path = "/api/replays/{id}", operation_id = "cancel_replay",
    params(("id" = String, Path, description = "The replay's id")), responses(
    (status = 200, description = "It ends after the orders that are under way", body = Progress),
    (status = 404, description = "There is no such replay in this process"),
))]
pub(crate) async fn cancel(
    State(admin): State<Arc<Admin>>,
    Path(id): Path<String>,
) -> Result<Json<Progress>, HttpError> {
    let job = find(&admin, &id)?;
    job.cancel();
    Ok(Json(job.progress()))
}

fn find(admin: &Admin, id: &str) -> Result<Arc<Job>, HttpError> {
    admin.replays.get(id).ok_or_else(|| {
        let message = "there is no such replay; a restart forgets them, and giving it again is safe";
        HttpError::new(StatusCode::NOT_FOUND, "no_replay", message)
    })
}

/// What somebody agreed to is not what would be done.
fn not_as_expected(found: &Survey, expect: u64) -> HttpError {
    let at_least = if found.complete { "" } else { "at least " };
    let message = format!("the filter finds {at_least}{} events now, not {expect}; look again first", found.matched);
    HttpError::new(StatusCode::CONFLICT, "expect", message)
}

fn plan(input: ReplaysJson, operator: Operator, routes: &Routes) -> Result<Plan, HttpError> {
    let query = query(input.filter)?;
    let who = operator.because(input.reason)?;
    let verb = match (input.verb, input.epoch) {
        (VerbJson::Retry, None) => Verb::Retry,
        (VerbJson::Replay, None) => Verb::Replay,
        (VerbJson::Force, Some(epoch)) => forced(epoch, &who)?,
        (VerbJson::Force, None) => {
            return Err(HttpError::bad_request("epoch", "\"force\" needs the `epoch` that every event gets"));
        }
        (VerbJson::Retry | VerbJson::Replay, Some(_)) => {
            return Err(HttpError::bad_request("epoch", "`epoch` goes with \"verb\": \"force\" only"));
        }
    };
    let rate = input.rate.unwrap_or(USUAL_RATE);
    if !(1..=MOST_RATE).contains(&rate) {
        return Err(HttpError::bad_request("rate", format!("`rate` must be between 1 and {MOST_RATE}")));
    }
    let route = input.route.map(|route| route_name(&route)).transpose()?;
    if let (Verb::ForceReplay { .. }, Some(named)) = (verb, &route) {
        can_force(routes, named, query.source.as_deref()).map_err(no_route)?;
    }
    Ok(Plan { query, verb, route, who, rate })
}

/// A filter without a condition would be everything, which nobody means.
fn query(filter: FilterJson) -> Result<EventQuery, HttpError> {
    let FilterJson { source, r#type, status, key, entity, since, until } = filter;
    let texts = [&source, &r#type, &status, &key, &entity, &since, &until];
    if texts.iter().all(|text| text.is_none()) {
        return Err(HttpError::bad_request("filter", "`filter` needs at least one condition"));
    }
    Conditions { source, r#type, status, key, entity, since, until }.read("filter")
}

fn new_id() -> Result<String, HttpError> {
    let mut bytes = [0; 8];
    aws_lc_rs::rand::fill(&mut bytes)
        .map_err(|_| HttpError::unavailable_read("random", "the system gives no random bytes; try again"))?;
    Ok(hex::encode(bytes))
}
