//! The hot path: read a bounded body, verify it on its raw bytes, identify it, hand it to the journal, answer.
//!
//! Promises: nothing unverified goes further than this file; a 2xx is sent only after the journal (or the spool, for sources
//! that have one) has said that the event is durable, or has said so before; everything else is an error that names itself and says whether to try again.
//!
//! Cancellation: hyper drops [`answer`] when the sender hangs up. Before the body is complete nothing has happened; after
//! it was submitted the journal goes on by itself, and only the answer is lost. The sender's retry is then a duplicate.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

use bytes::{Bytes, BytesMut};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Incoming};
use oncehook::event::{NewEvent, NewEvents};
use oncehook::fastpath::Settled;
use oncehook::intake::{Refused, SpoolError, Taken};
use oncehook::journal::{AppendError, Layer, Receipt, Verdict};
use oncehook_verify::{
    Ack, Action, FetchedKey, Identified, Item, KeyRequest, Rejection, Reply, Secret, UnixMicros,
};
use prometheus_client::metrics::gauge::Gauge;

use super::address;
use super::error::HttpError;
use super::gate::{Gate, Source, Visit};
use super::handover::{self, Kept};
use super::keys::NoKey;
use super::result::{self, Awaited, Waited};
use super::tap::Tap;

pub(super) type Answer = Response<Full<Bytes>>;

/// Answers one request to the front door, whatever it is.
pub(super) async fn answer(gate: &Gate, peer: SocketAddr, tap: &Tap, request: Request<Incoming>) -> Answer {
    let started = Instant::now();
    let in_flight = InFlight::enter(&gate.metrics.in_flight);
    let answer = receive(gate, peer, tap, request, started).await.unwrap_or_else(HttpError::into_response);
    drop(in_flight);
    if answer.status().is_success() && answer.extensions().get::<Waited>().is_none() {
        gate.metrics.ack.observe(started.elapsed());
    }
    tap.reset();
    answer
}

/// A request that is counted until it is answered, or until its sender hangs up and the future is dropped.
struct InFlight<'g>(&'g Gauge);

impl<'g> InFlight<'g> {
    fn enter(gauge: &'g Gauge) -> Self {
        gauge.inc();
        Self(gauge)
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// One request from its head to its answer. All branching of the front door is here.
async fn receive(
    gate: &Gate,
    peer: SocketAddr,
    tap: &Tap,
    request: Request<Incoming>,
    started: Instant,
) -> Result<Answer, HttpError> {
    let (head, body) = request.into_parts();
    let source = find_source(gate, &head)?;
    if !gate.is_open() && gate.intake_of(source).is_none() {
        source.metrics.count_unavailable("not_ready");
        return Err(HttpError::unavailable("not_ready"));
    }
    check_framing(&head, tap)?;
    let sender = address::sender(peer.ip(), &head.headers, &gate.trusted_proxies);
    if !source.allow_ips.is_empty() && !address::contains(&source.allow_ips, sender) {
        refuse(gate, source, sender, "address");
        return Err(HttpError::new(StatusCode::FORBIDDEN, "address", "this address may not deliver here"));
    }

    source.limiter.take_of(sender, Instant::now()).map_err(|after| {
        refuse(gate, source, sender, "rate_limit_peer");
        // The body is not read; whatever of it is under way must not be taken for a request.
        HttpError::too_many(after).closing()
    })?;

    let asked = |body: &'_ Bytes| -> Option<Reply> {
        let request = as_request(&head, body);
        source.handshakes.answer_unsigned(&request, &source.verifier)
    };
    if head.method != Method::POST {
        let reply = asked(&Bytes::new())
            .ok_or_else(|| HttpError::method_not_allowed("POST", "webhooks are delivered with POST"))?;
        return handshake(gate, source, reply).await;
    }
    let mut visit = gate.visit();
    let body = read_body(gate, source, &mut visit, body).await?;
    if !visit.enter() {
        source.metrics.count_unavailable("in_flight");
        return Err(HttpError::unavailable("overloaded"));
    }
    if let Some(reply) = asked(&body) {
        return handshake(gate, source, reply).await;
    }
    let now = gate.clock.now();
    let request = as_request(&head, &body);
    let refused = |rejection: Rejection| {
        refuse(gate, source, sender, rejection.code());
        HttpError::new(StatusCode::UNAUTHORIZED, "signature", rejection.to_string())
    };
    let key = match source.verifier.key_request(&request).map_err(refused)? {
        None => None,
        Some(wanted) => {
            Some(fetch_key(gate, source, wanted).await?.ok_or(Rejection::KeyUnknown).map_err(refused)?)
        }
    };
    let verified = source.verifier.verify_with(&request, now, key.as_deref()).map_err(refused)?;
    if let Some(reply) = source.handshakes.answer(&verified, &source.verifier) {
        return handshake(gate, source, reply).await;
    }
    source.limiter.take(Instant::now()).map_err(|after| {
        refuse(gate, source, sender, "rate_limit");
        HttpError::too_many(after)
    })?;
    let identified = source.identifier.identify(&verified).map_err(|unidentified| {
        refuse(gate, source, sender, unidentified.code());
        HttpError::bad_request(unidentified.code(), unidentified.to_string())
    })?;

    let headers = keep_headers(source, &head.headers);
    let event = |item: Item| new_event(gate, source, item, &headers, &body, now, sender);
    let (events, batch): (NewEvents, bool) = match identified {
        Identified::One(item) => (std::iter::once(event(item)).collect(), false),
        Identified::Batch(items) => (items.into_iter().map(event).collect(), true),
    };
    let awaited = source.wait.as_ref().filter(|_| !batch).map(|wait| Awaited::new(wait, &events));
    let (receipt, spooled) = match store(gate, source, events).await? {
        Taken::Journal(settled) => {
            for appended in &settled.receipt {
                source.metrics.count(appended.verdict, settled.layer);
            }
            (settled.receipt, false)
        }
        Taken::Spool(receipt) => {
            receipt.iter().for_each(|appended| source.metrics.count_spooled(appended.verdict));
            (receipt, true)
        }
    };
    if source.endpoint && receipt.iter().any(|appended| appended.verdict == Verdict::Conflict) {
        return Err(result::key_reused());
    }
    if let (Some(awaited), [appended]) = (awaited, receipt.as_slice()) {
        gate.metrics.ack.observe(started.elapsed());
        // Whoever waits holds a place among those who wait, not one that an event needs.
        drop(visit);
        return if spooled {
            Ok(result::pending(&awaited, *appended))
        } else {
            result::answer(gate, source, &awaited, *appended).await
        };
    }
    Ok(match &source.ack {
        None => accepted(&receipt, batch),
        Some(ack) => acknowledged(ack, &receipt),
    })
}

/// Exactly one path per source; nothing is decoded, folded or trimmed.
fn find_source<'g>(gate: &'g Gate, head: &Parts) -> Result<&'g Source, HttpError> {
    let source = head
        .uri
        .path()
        .strip_prefix("/webhooks/")
        .and_then(|name| gate.sources.get(name))
        .filter(|_| head.uri.authority().is_none())
        .ok_or_else(HttpError::not_found)?;
    if head.method != Method::POST
        && !source.handshakes.methods().any(|method| method == head.method.as_str())
    {
        return Err(HttpError::method_not_allowed("POST", "webhooks are delivered with POST"));
    }
    Ok(source)
}

/// The request as the verifier sees it.
fn as_request<'r>(head: &'r Parts, body: &'r [u8]) -> oncehook_verify::Request<'r> {
    oncehook_verify::Request {
        method: head.method.as_str(),
        path: head.uri.path_and_query().map_or("/", http::uri::PathAndQuery::as_str),
        headers: &head.headers,
        body,
    }
}

/// The provider's key for this request; nothing if the provider has none. While the provider does not answer, the sender
/// must try again: whether the request is genuine is not known.
async fn fetch_key(
    gate: &Gate,
    source: &Source,
    wanted: KeyRequest,
) -> Result<Option<Arc<FetchedKey>>, HttpError> {
    match gate.keys.key(source.name.as_str(), &source.verifier, wanted, &source.params).await {
        Ok(key) => Ok(Some(key)),
        Err(NoKey::Unusable) => Ok(None),
        Err(NoKey::Unavailable) => {
            source.metrics.count_unavailable("key");
            Err(HttpError::unavailable("key_unavailable"))
        }
    }
}

/// Refuses requests whose end is a matter of opinion, and bodies that would have to be decoded first.
fn check_framing(head: &Parts, tap: &Tap) -> Result<(), HttpError> {
    if let Some(first) = head.headers.get(header::TRANSFER_ENCODING) {
        let only = head.headers.get_all(header::TRANSFER_ENCODING).iter().count() == 1;
        let chunked = first.as_bytes().eq_ignore_ascii_case(b"chunked");
        if !only || !chunked || !tap.is_plainly_chunked(head.method.as_str(), head.headers.len()) {
            let message = "the request's length is ambiguous";
            return Err(HttpError::bad_request("framing", message).closing());
        }
    }
    if head.headers.contains_key(header::UPGRADE) {
        return Err(HttpError::bad_request("upgrade", "this connection is not upgraded").closing());
    }
    let encoded = head.headers.get_all(header::CONTENT_ENCODING).iter();
    if encoded.into_iter().any(|encoding| !encoding.as_bytes().eq_ignore_ascii_case(b"identity")) {
        let message = "send the body without a content encoding: it is verified byte for byte";
        return Err(HttpError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "content_encoding", message).closing());
    }
    Ok(())
}

/// Reads the whole body, or refuses it whole: never a part of it.
async fn read_body(
    gate: &Gate,
    source: &Source,
    visit: &mut Visit<'_>,
    body: Incoming,
) -> Result<Bytes, HttpError> {
    let limit = gate.limits.body_bytes;
    let too_large = || {
        let message = format!("a body may have at most {limit} bytes");
        HttpError::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message).closing()
    };
    if body.size_hint().lower() > limit as u64 {
        return Err(too_large());
    }
    let read = async {
        let mut body = body;
        let mut whole = Chunks::default();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|_| {
                HttpError::bad_request("body_incomplete", "the body ended before its end").closing()
            })?;
            let Ok(data) = frame.into_data() else { continue };
            if whole.len() + data.len() > limit {
                return Err(too_large());
            }
            if !visit.take_bytes(data.len()) {
                source.metrics.count_unavailable("memory");
                return Err(HttpError::unavailable("overloaded").closing());
            }
            whole.push(data);
        }
        Ok(whole.finish())
    };
    match tokio::time::timeout(gate.limits.body, read).await {
        Ok(body) => body,
        Err(_) => {
            let message = "the body took too long to arrive";
            Err(HttpError::new(StatusCode::REQUEST_TIMEOUT, "body_timeout", message).closing())
        }
    }
}

/// A body on its way in. Usually it is one chunk, which is then not copied.
#[derive(Default)]
struct Chunks {
    first: Bytes,
    rest: BytesMut,
}

impl Chunks {
    fn len(&self) -> usize {
        self.first.len() + self.rest.len()
    }

    fn push(&mut self, data: Bytes) {
        if self.first.is_empty() && self.rest.is_empty() {
            self.first = data;
        } else {
            if self.rest.is_empty() {
                self.rest.extend_from_slice(&std::mem::take(&mut self.first));
            }
            self.rest.extend_from_slice(&data);
        }
    }

    fn finish(self) -> Bytes {
        if self.rest.is_empty() { self.first } else { self.rest.freeze() }
    }
}

fn refuse(gate: &Gate, source: &Source, sender: IpAddr, reason: &'static str) {
    source.metrics.count_rejected(reason);
    gate.rejections.count(source.name.as_str(), sender, reason);
}

/// Headers that say nothing about the event, or that carry credentials.
fn is_kept(name: &header::HeaderName) -> bool {
    !matches!(
        name.as_str(),
        "accept"
            | "accept-encoding"
            | "accept-language"
            | "authorization"
            | "connection"
            | "content-length"
            | "cookie"
            | "expect"
            | "forwarded"
            | "host"
            | "keep-alive"
            | "proxy-authorization"
            | "te"
            | "transfer-encoding"
            | "upgrade"
            | "via"
            | "x-forwarded-for"
            | "x-forwarded-host"
            | "x-forwarded-proto"
    )
}

/// The headers that matter, as `name: value` lines. hyper has bounded the head they come from.
fn keep_headers(source: &Source, headers: &HeaderMap) -> Bytes {
    let mut kept = BytesMut::with_capacity(256);
    for (name, value) in headers {
        if is_kept(name) && !source.secret_headers.contains(name) {
            kept.extend_from_slice(name.as_str().as_bytes());
            kept.extend_from_slice(b": ");
            kept.extend_from_slice(value.as_bytes());
            kept.extend_from_slice(b"\n");
        }
    }
    kept.freeze()
}

fn new_event(
    gate: &Gate,
    source: &Source,
    item: Item,
    headers: &Bytes,
    body: &Bytes,
    now: UnixMicros,
    sender: IpAddr,
) -> NewEvent {
    NewEvent {
        id: None,
        routes: gate.routes.wanting(&source.name, item.kind.as_deref()),
        source: source.name.clone(),
        key: item.key,
        key_signed: source.identifier.key_is_signed(),
        kind: item.kind,
        entity: item.entity,
        occurred_at: item.occurred_at,
        received_at: now,
        expires_at: UnixMicros(now.0.saturating_add(gate.window_micros)),
        integrity: source.verifier.integrity(),
        headers: headers.clone(),
        body: body.slice(item.body),
        digest: item.digest,
        quarantine: item.quarantine,
        peer: sender,
    }
}

/// Waits until the journal or the spool has the events, or the journal is known to have them. An empty batch has nothing to
/// wait for.
async fn store(gate: &Gate, source: &Source, events: NewEvents) -> Result<Taken, HttpError> {
    if events.is_empty() {
        return Ok(Taken::Journal(Settled { receipt: Receipt::new(), layer: Layer::Journal }));
    }
    let unavailable = |reason: &'static str| {
        source.metrics.count_unavailable(reason);
        HttpError::unavailable(reason)
    };
    if let Some(intake) = gate.intake_of(source) {
        let taken = intake.append(&gate.fast_path, &*gate.journal, events, gate.is_open()).await;
        return taken.map_err(|refused| unavailable(refusal(&refused)));
    }
    let append = gate.fast_path.append(&*gate.journal, events);
    match tokio::time::timeout(gate.limits.commit, append).await {
        Ok(settled) => settled.map(Taken::Journal).map_err(|error| unavailable(reason(&error))),
        Err(_) => Err(unavailable("journal_slow")),
    }
}

fn refusal(refused: &Refused) -> &'static str {
    match refused {
        Refused::Journal(error) => reason(error),
        Refused::Slow => "journal_slow",
        Refused::Spool(SpoolError::Full) => "spool_full",
        Refused::Spool(SpoolError::Unavailable(_) | SpoolError::Closed) => "spool_failed",
    }
}

fn reason(error: &AppendError) -> &'static str {
    match error {
        AppendError::Full => "journal_full",
        AppendError::Unavailable(_) => "journal_failed",
        AppendError::Closed => "journal_closed",
        AppendError::Gone => "journal_gone",
    }
}

/// Our own answer: `{"status":…,"event":…}`, for a batch `{"events":[…]}`.
pub(super) fn accepted(receipt: &Receipt, batch: bool) -> Answer {
    let mut body = String::with_capacity(96 * receipt.len().max(1));
    if batch {
        body.push_str("{\"events\":[");
    }
    for (index, appended) in receipt.iter().enumerate() {
        if index > 0 {
            body.push(',');
        }
        // Both parts are made of plain letters, digits and hyphens.
        body.push_str("{\"status\":\"");
        body.push_str(appended.verdict.as_str());
        body.push_str("\",\"event\":\"");
        body.push_str(appended.id.encode(&mut [0; 36]));
        body.push_str("\"}");
    }
    if batch {
        body.push_str("]}");
    }
    let mut response = Response::new(Full::new(Bytes::from(body)));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// The answer that a provider insists on. What we would have said stands in headers.
fn acknowledged(ack: &Ack, receipt: &Receipt) -> Answer {
    let body = ack.body.as_ref().map_or_else(Bytes::new, |body| Bytes::from(body.clone()));
    let mut response = Response::new(Full::new(body));
    *response.status_mut() = StatusCode::from_u16(ack.status).unwrap_or(StatusCode::OK);
    let headers = response.headers_mut();
    if let Some(content_type) = ack.content_type.as_ref().and_then(|text| HeaderValue::from_str(text).ok()) {
        headers.insert(header::CONTENT_TYPE, content_type);
    }
    if let Some(appended) = receipt.first() {
        headers.insert("oncehook-status", HeaderValue::from_static(appended.verdict.as_str()));
        if let Ok(id) = HeaderValue::from_str(&appended.id.to_string()) {
            headers.insert("oncehook-event", id);
        }
    }
    response
}

/// Does what a handshake asks for, and answers. Nothing is answered before it is done.
async fn handshake(gate: &Gate, source: &Source, reply: Reply) -> Result<Answer, HttpError> {
    match &reply.action {
        None => {}
        Some(Action::Confirm { url }) => {
            if let Err(error) = gate.keys.confirm(url).await {
                tracing::warn!(source = source.name.as_str(), %error, "a subscription could not be confirmed");
                source.metrics.count_unavailable("confirm");
                return Err(HttpError::unavailable("confirm_failed"));
            }
            tracing::info!(source = source.name.as_str(), "a subscription was confirmed");
        }
        Some(Action::Secret(secret)) => take_secret(source, secret.clone()).await?,
    }
    Ok(replied(reply))
}

/// Keeps a handed-over secret for the operator, or refuses it.
async fn take_secret(source: &Source, secret: Secret) -> Result<(), HttpError> {
    let Some(path) = source.handover.clone() else {
        return Err(HttpError::new(
            StatusCode::FORBIDDEN,
            "handover",
            "this source takes no secret from a request",
        ));
    };
    let kept = tokio::task::spawn_blocking(move || handover::keep(&path, &secret)).await;
    match kept {
        Ok(Ok(Kept::New)) => {
            tracing::warn!(
                source = source.name.as_str(),
                "a secret was handed over and waits to be confirmed"
            );
            Ok(())
        }
        Ok(Ok(Kept::Again)) => Ok(()),
        Ok(Ok(Kept::Occupied)) => {
            Err(HttpError::new(StatusCode::CONFLICT, "handover", "another secret waits to be confirmed"))
        }
        Ok(Err(_)) | Err(_) => Err(HttpError::unavailable("handover_failed")),
    }
}

/// A handshake's reply. Echoed values must not be taken for a page.
fn replied(reply: Reply) -> Answer {
    let mut response = Response::new(Full::new(Bytes::from(reply.body)));
    *response.status_mut() = StatusCode::from_u16(reply.status).unwrap_or(StatusCode::OK);
    let headers = response.headers_mut();
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    if let Some(content_type) = reply.content_type.and_then(|text| HeaderValue::from_str(&text).ok()) {
        headers.insert(header::CONTENT_TYPE, content_type);
    }
    for (name, value) in reply.headers {
        if let (Ok(name), Ok(value)) =
            (header::HeaderName::from_bytes(name.as_bytes()), HeaderValue::from_str(&value))
        {
            headers.insert(name, value);
        }
    }
    response
}

/// The front door as a hyper service for one connection.
pub(super) fn service(
    gate: Arc<Gate>,
    peer: SocketAddr,
    tap: Arc<Tap>,
) -> impl hyper::service::Service<
    Request<Incoming>,
    Response = Answer,
    Error = std::convert::Infallible,
    Future = impl Future<Output = Result<Answer, std::convert::Infallible>> + Send,
> + Send {
    hyper::service::service_fn(move |request| {
        let (gate, tap) = (Arc::clone(&gate), Arc::clone(&tap));
        async move { Ok(answer(&gate, peer, &tap, request).await) }
    })
}
