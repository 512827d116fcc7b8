//! `POST /api/events/{id}/retry`, `/replay`, `/skip`, `/release`: what an operator can order for one event.
//!
//! Promises: a dry run changes nothing and says what the order would do. An order that was given twice does its work once: what took effect stays as it is, and a forced replay names
//! the epoch that it makes. Every order is written down with who gave it.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use http::StatusCode;
use oncehook::delivery::RouteName;
use oncehook::event::EventId;
use oncehook::journal::{OrderError, Ordered, Verb, Who, WorkError};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::events::{Located, locate, no_event, read_error};
use super::input::{Input, Operator};
use crate::http::admin::Admin;
use crate::http::error::HttpError;
use crate::order::{NoRoute, NotSkipped, forecast, order, void_before_skip};

/// What to do, in detail. Everything may be left out, and the body too.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct OrderJson {
    /// Only this route
    route: Option<String>,
    /// Why, for the audit
    reason: Option<String>,
    /// Only say what would be done
    #[serde(default)]
    dry_run: bool,
}

/// What to replay, in detail. Everything may be left out, and the body too.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ReplayJson {
    /// Only this route
    route: Option<String>,
    /// Why, for the audit; needed with `force`
    reason: Option<String>,
    /// Run it again although it took effect
    #[serde(default)]
    force: bool,
    /// The new epoch, one more than the event's latest; needed with `force`
    epoch: Option<u32>,
    /// Only say what would be done
    #[serde(default)]
    dry_run: bool,
}

/// What an order changed; of a dry run, what it would change.
#[derive(Serialize, ToSchema)]
pub(crate) struct OrderedJson {
    event: String,
    /// true for a dry run: nothing has changed
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    dry_run: bool,
    /// Routes whose delivery was changed or made
    routes: Vec<String>,
    /// The event's latest epoch then
    epoch: u32,
}

#[utoipa::path(post, path = "/api/events/{id}/retry", request_body = OrderJson,
    params(("id" = String, Path, description = "The event's id, or the beginning of it")), responses(
    (status = 200, description = "What failed is tried again now", body = OrderedJson),
    (status = 404, description = "There is no such event"),
    (status = 409, description = "Nothing of it can be retried"),
))]
pub(crate) async fn retry(
    state: State<Arc<Admin>>,
    id: Path<String>,
    operator: Operator,
    input: Input<OrderJson>,
) -> Result<Json<OrderedJson>, HttpError> {
    plain(state, id, operator, input, Verb::Retry).await
}

#[utoipa::path(post, path = "/api/events/{id}/replay", request_body = ReplayJson,
    params(("id" = String, Path, description = "The event's id, or the beginning of it")), responses(
    (status = 200, description = "It is offered again; what took effect stays as it is, unless forced", body = OrderedJson),
    (status = 400, description = "`force` without `epoch` and `reason`"),
    (status = 404, description = "There is no such event, or `force` names a route that its source does not have"),
    (status = 409, description = "The epoch is not the next one, or there is nothing to replay"),
))]
pub(crate) async fn replay(
    State(admin): State<Arc<Admin>>,
    Path(id): Path<String>,
    operator: Operator,
    Input(input): Input<ReplayJson>,
) -> Result<Json<OrderedJson>, HttpError> {
    let who = operator.because(input.reason)?;
    let verb = match (input.force, input.epoch) {
        (false, None) => Verb::Replay,
        (true, Some(epoch)) => forced(epoch, &who)?,
        (true, None) => {
            return Err(HttpError::bad_request("epoch", "a forced replay names its `epoch`: one more than the latest"));
        }
        (false, Some(_)) => {
            return Err(HttpError::bad_request("epoch", "`epoch` goes with \"force\": true only"));
        }
    };
    let given = Given { verb, route: input.route, who, dry_run: input.dry_run };
    give(&admin, &id, given).await
}

#[utoipa::path(post, path = "/api/events/{id}/skip", request_body = OrderJson,
    params(("id" = String, Path, description = "The event's id, or the beginning of it")), responses(
    (status = 200, description = "What is pending or dead is given up", body = OrderedJson),
    (status = 404, description = "There is no such event"),
    (status = 409, description = "Nothing of it can be skipped"),
))]
pub(crate) async fn skip(
    state: State<Arc<Admin>>,
    id: Path<String>,
    operator: Operator,
    input: Input<OrderJson>,
) -> Result<Json<OrderedJson>, HttpError> {
    plain(state, id, operator, input, Verb::Skip).await
}

#[utoipa::path(post, path = "/api/events/{id}/release", request_body = OrderJson,
    params(("id" = String, Path, description = "The event's id, or the beginning of it")), responses(
    (status = 200, description = "It goes to its handlers", body = OrderedJson),
    (status = 404, description = "There is no such event"),
    (status = 409, description = "It is not held"),
))]
pub(crate) async fn release(
    state: State<Arc<Admin>>,
    id: Path<String>,
    operator: Operator,
    input: Input<OrderJson>,
) -> Result<Json<OrderedJson>, HttpError> {
    plain(state, id, operator, input, Verb::Release).await
}

async fn plain(
    State(admin): State<Arc<Admin>>,
    Path(id): Path<String>,
    operator: Operator,
    Input(input): Input<OrderJson>,
    verb: Verb,
) -> Result<Json<OrderedJson>, HttpError> {
    let who = operator.because(input.reason)?;
    let given = Given { verb, route: input.route, who, dry_run: input.dry_run };
    give(&admin, &id, given).await
}

/// A forced replay runs effects again: somebody must stand for it.
pub(super) fn forced(epoch: u32, who: &Who) -> Result<Verb, HttpError> {
    match (&who.reason, epoch) {
        (None, _) => Err(HttpError::bad_request("reason", "a forced replay needs a `reason`")),
        (_, 0) => Err(HttpError::bad_request("epoch", "`epoch` is 1 or more; 0 is the first delivery")),
        _ => Ok(Verb::ForceReplay { epoch }),
    }
}

/// An order as it came.
struct Given {
    verb: Verb,
    route: Option<String>,
    who: Who,
    dry_run: bool,
}

async fn give(admin: &Admin, id: &str, given: Given) -> Result<Json<OrderedJson>, HttpError> {
    let Given { verb, route, who, dry_run } = given;
    let id = match locate(admin, id).await? {
        Located::Journal(id) => id,
        Located::Spooled(_) => {
            let message = "the event waits in this node's spool until the journal is back; give the order then";
            return Err(HttpError::new(StatusCode::CONFLICT, "spooled", message));
        }
    };
    let route = route.map(|route| route_name(&route)).transpose()?;
    let detail = admin.reader.show(id).await.map_err(read_error)?.ok_or_else(no_event)?;
    let order = order(&admin.routes, &detail.event, verb, route, who).map_err(no_route)?;
    if dry_run {
        let foreseen = forecast(&detail.event, &order).map_err(order_error)?;
        return Ok(Json(ordered_json(id, &foreseen, true)));
    }
    if verb == Verb::Skip {
        let voided = void_before_skip(&admin.routes, &*admin.deliveries, &detail.event, &order).await;
        voided.map_err(not_skipped)?;
    }
    let ordered = admin.deliveries.order(order).await.map_err(order_error)?;
    Ok(Json(ordered_json(id, &ordered, false)))
}

pub(super) fn no_route(error: NoRoute) -> HttpError {
    HttpError::new(StatusCode::NOT_FOUND, "no_route", error.to_string())
}

/// The name may be of a route that is gone: what it left behind can still be skipped.
pub(super) fn route_name(text: &str) -> Result<RouteName, HttpError> {
    RouteName::new(text).map_err(|error| HttpError::bad_request("route", error.to_string()))
}

fn ordered_json(event: EventId, ordered: &Ordered, dry_run: bool) -> OrderedJson {
    OrderedJson {
        event: event.to_string(),
        dry_run,
        routes: ordered.routes.iter().map(ToString::to_string).collect(),
        epoch: ordered.epoch,
    }
}

fn order_error(error: OrderError) -> HttpError {
    match error {
        OrderError::NoEvent => no_event(),
        OrderError::Epoch { next } => {
            HttpError::new(StatusCode::CONFLICT, "epoch", format!("the next epoch is {next}"))
        }
        OrderError::Unfit(message) => HttpError::new(StatusCode::CONFLICT, "unfit", message),
        OrderError::Work(error) => work_error(error),
    }
}

fn not_skipped(error: NotSkipped) -> HttpError {
    match error {
        NotSkipped::TookEffect(_) => HttpError::new(StatusCode::CONFLICT, "took_effect", error.to_string()),
        NotSkipped::Unreached(_, ref reason) => {
            tracing::warn!(reason, "a delivery to another database could not be skipped");
            HttpError::unavailable_read("database", error.to_string())
        }
        NotSkipped::Journal(error) => work_error(error),
    }
}

/// The reason goes to the log; the caller learns that giving the order again is safe.
pub(super) fn work_error(error: WorkError) -> HttpError {
    tracing::error!(%error, "an operator's order could not be carried out");
    let message = "the journal does not take orders now; give it again, nothing is done twice";
    HttpError::unavailable_read("journal", message)
}
