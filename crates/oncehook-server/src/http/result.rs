//! The answer of a source that waits: what came of the event, the same for everybody who sends it.
//!
//! Promises: body and status depend on the event and on how its delivery stands, never on who asks: the first request, a
//! copy that came together with it, a copy on another node and one after a restart get the same bytes once the delivery is
//! final. Which of them this was stands in the header `oncehook-status`. The event is durable before any of this begins, so
//! whatever happens while waiting is 202 at worst.
//!
//! | the delivery | a webhook's answer | an endpoint's answer (`provider = "idempotency-key"`) |
//! | --- | --- | --- |
//! | succeeded | 200, with the result | the handler's own status and body; 200 and the result of a statement |
//! | still pending, or tried in vain and due again | 202 | 202; 409 for a copy, if the source does not wait |
//! | dead | 502, with the stored error | the same |
//! | skipped or superseded | 200, with the state | the same |
//!
//! Does not: wait for what is in the spool (202), for batches, for events that are held, or for those that the route does not want.

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use http_body_util::Full;
use oncehook::delivery::{DeliveryId, DeliveryState};
use oncehook::event::NewEvents;
use oncehook::handler::Handler;
use oncehook::journal::{Appended, Receipt, Standing, Verdict};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::embed::embedded;
use super::error::HttpError;
use super::gate::{Gate, Source};
use super::ingest::{Answer, accepted};
use crate::config::WaitConfig;
use crate::waiting::Word;

/// What a request waits for.
pub(super) struct Awaited<'s> {
    wait: &'s WaitConfig,
    /// Whether the route wants the event at all.
    wanted: bool,
}

impl<'s> Awaited<'s> {
    pub(super) fn new(wait: &'s WaitConfig, events: &NewEvents) -> Self {
        Self { wait, wanted: events.iter().any(|event| event.routes.contains(&wait.root)) }
    }
}

/// Marks an answer whose time says nothing about how fast events are accepted.
#[derive(Debug, Clone, Copy)]
pub(super) struct Waited;

/// Waits and answers. All branching is here.
pub(super) async fn answer(
    gate: &Gate,
    source: &Source,
    awaited: &Awaited<'_>,
    appended: Appended,
) -> Result<Answer, HttpError> {
    match appended.verdict {
        Verdict::New | Verdict::Duplicate if awaited.wanted => {}
        Verdict::New | Verdict::Duplicate | Verdict::Quarantined | Verdict::Conflict => {
            return Ok(marked(accepted(&Receipt::from_elem(appended, 1), false), appended));
        }
    }
    let copy = appended.verdict == Verdict::Duplicate;
    let WaitConfig { route, up_to, .. } = awaited.wait;
    let delivery = DeliveryId { event: appended.id, route: route.clone(), epoch: 0 };
    let word = match gate.waiting.enter() {
        Some(place) if !up_to.is_zero() => gate.waiting.outcome(&place, delivery, *up_to).await,
        Some(place) if copy => gate.waiting.look(&place, delivery).await,
        // Too many wait, or nobody is to wait.
        _ => Word::Unknown,
    };
    let standing = match word {
        Word::Told(Some(standing)) if !standing.state.is_pending() => standing,
        Word::Told(_) | Word::Unknown if source.endpoint && up_to.is_zero() && copy => {
            let message = "a request with this idempotency key is being handled; ask again later";
            let error = HttpError::new(StatusCode::CONFLICT, "in_progress", message);
            return Err(HttpError { retry_after: Some(1), ..error });
        }
        Word::Told(Some(standing)) => {
            let answer = told(StatusCode::ACCEPTED, awaited, appended, standing.state, None);
            return Ok(marked(answer, appended));
        }
        Word::Told(None) | Word::Unknown => return Ok(pending(awaited, appended)),
    };
    let answer = match standing.state {
        DeliveryState::Succeeded if source.endpoint => {
            replayed(is_http(gate, awaited.wait), standing.result.as_deref())
        }
        DeliveryState::Dead => told(StatusCode::BAD_GATEWAY, awaited, appended, standing.state, Some(&standing)),
        state => told(StatusCode::OK, awaited, appended, state, Some(&standing)),
    };
    Ok(marked(answer, appended))
}

/// What an endpoint says to another body under a known key.
pub(super) fn key_reused() -> HttpError {
    let message = "this idempotency key belongs to a request with another body; do not send this one again";
    HttpError::new(StatusCode::UNPROCESSABLE_ENTITY, "key_reused", message)
}

/// The answer while nothing is known of the delivery; also for an event that waits in the spool.
pub(super) fn pending(awaited: &Awaited<'_>, appended: Appended) -> Answer {
    marked(told(StatusCode::ACCEPTED, awaited, appended, DeliveryState::Ready, None), appended)
}

fn is_http(gate: &Gate, wait: &WaitConfig) -> bool {
    let route = gate.routes.get(wait.route.as_str());
    route.is_some_and(|route| matches!(route.handler, Handler::Http(_)))
}

/// The body of an answer.
#[derive(Serialize)]
struct Told<'t> {
    /// Always `accepted`: the event is stored.
    status: &'static str,
    event: String,
    delivery: ToldDelivery<'t>,
}

#[derive(Serialize)]
struct ToldDelivery<'t> {
    route: &'t str,
    state: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    result: Option<Box<RawValue>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'t str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cause: Option<&'t str>,
}

fn told(
    status: StatusCode,
    awaited: &Awaited<'_>,
    appended: Appended,
    state: DeliveryState,
    standing: Option<&Standing>,
) -> Answer {
    let result = standing.and_then(|standing| standing.result.as_deref().map(embedded));
    let body = Told {
        status: Verdict::New.as_str(),
        event: appended.id.to_string(),
        delivery: ToldDelivery {
            route: awaited.wait.route.as_str(),
            state: state.as_str(),
            result,
            error: standing.and_then(|standing| standing.error.as_deref()),
            cause: standing.and_then(|standing| standing.cause.as_deref()),
        },
    };
    json(status, serde_json::to_string(&body).unwrap_or_default())
}

/// What an HTTP handler's result holds.
#[derive(Deserialize)]
struct Kept<'r> {
    status: u16,
    #[serde(borrow)]
    body: &'r RawValue,
    #[serde(default, rename = "type")]
    kind: Option<String>,
    /// Whether the body is kept as a text, whatever its type says.
    #[serde(default)]
    text: bool,
}

/// The handler's own answer. JSON is said again byte for byte, other texts as texts.
fn replayed(http: bool, result: Option<&str>) -> Answer {
    let kept = result.filter(|_| http).and_then(|result| serde_json::from_str::<Kept<'_>>(result).ok());
    let Some(kept) = kept else {
        return json(StatusCode::OK, result.unwrap_or("null").to_owned());
    };
    let is_json = !kept.text && kept.kind.as_deref().is_none_or(|kind| kind.contains("json"));
    let text = serde_json::from_str::<String>(kept.body.get()).ok().filter(|_| !is_json);
    let body = match text {
        Some(text) => text,
        None if kept.body.get() == "null" && !is_json => String::new(),
        None => kept.body.get().to_owned(),
    };
    let mut response = json(StatusCode::from_u16(kept.status).unwrap_or(StatusCode::OK), body);
    let headers = response.headers_mut();
    // What another program wrote must not be taken for a page of ours.
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    if let Some(kind) = kept.kind.and_then(|kind| HeaderValue::from_str(&kind).ok()) {
        headers.insert(header::CONTENT_TYPE, kind);
    }
    response
}

fn json(status: StatusCode, body: String) -> Answer {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// What differs from caller to caller stands in headers.
fn marked(mut answer: Answer, appended: Appended) -> Answer {
    let headers = answer.headers_mut();
    headers.insert("oncehook-status", HeaderValue::from_static(appended.verdict.as_str()));
    if let Ok(id) = HeaderValue::from_str(&appended.id.to_string()) {
        headers.insert("oncehook-event", id);
    }
    answer.extensions_mut().insert(Waited);
    answer
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt as _;

    use super::*;

    async fn seen(answer: Answer) -> (u16, String, String) {
        let status = answer.status().as_u16();
        let kind = answer.headers()[header::CONTENT_TYPE].to_str().unwrap().to_owned();
        let body = answer.into_body().collect().await.unwrap().to_bytes();
        (status, kind, String::from_utf8(body.to_vec()).unwrap())
    }

    #[tokio::test]
    async fn r19_a_handlers_answer_is_said_again() {
        let json = "application/json".to_owned();
        for (result, status, kind, body) in [
            (r#"{"status":201,"body":{ "id": 1 },"type":"application/json"}"#, 201, &json, r#"{ "id": 1 }"#),
            (r#"{"status":200,"body":"hi","type":"text/plain"}"#, 200, &"text/plain".to_owned(), "hi"),
            (r#"{"status":200,"body":"hi","type":"application/json"}"#, 200, &json, r#""hi""#),
            (r#"{"status":200,"body":17,"type":"text/plain"}"#, 200, &"text/plain".to_owned(), "17"),
            (r#"{"status":204,"body":null,"type":"text/plain"}"#, 204, &"text/plain".to_owned(), ""),
            (r#"{"status":422,"body":{"no":1},"type":null}"#, 422, &json, r#"{"no":1}"#),
            (r#"{"status":200,"body":"[1,","type":"application/json","text":true}"#, 200, &json, "[1,"),
        ] {
            assert_eq!(seen(replayed(true, Some(result))).await, (status, kind.clone(), body.to_owned()));
        }
        assert_eq!(
            seen(replayed(false, Some(r#"{"status":7}"#))).await,
            (200, json.clone(), r#"{"status":7}"#.to_owned())
        );
        assert_eq!(seen(replayed(false, None)).await, (200, json, "null".to_owned()));
    }
}
