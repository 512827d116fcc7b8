//! The hot path: read a bounded body, verify it on its raw bytes, identify it, hand it to the journal, answer.
//!
//! Promises: nothing unverified goes further than this file; a 2xx is sent only after the journal (or the spool, for sources
//! that have one) has said that the event is durable, or has said so before; everything else is an error that names itself and says whether to try again.
//!
//! Cancellation: hyper drops [`answer`] when the sender hangs up. Before the body is complete nothing has happened; after
//! it was submitted the journal goes on by itself, and only the answer is lost. The sender's retry is then a duplicate.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use bytes::{Bytes, BytesMut};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Incoming};
use oncehook::event::{NewEvent, NewEvents};
use oncehook::fastpath::{NotStored, Settled};
use oncehook::intake::{Refused, SpoolError, Taken};
use oncehook::journal::{AppendError, Layer, Receipt, Verdict};
use oncehook_verify::{Ack, Action, Identified, Item, KeyRequest, Quarantine, Rejection, Reply, Secret, UnixMicros};
use prometheus_client::metrics::gauge::Gauge;

use super::connections::Connection;
use super::error::HttpError;
use super::gate::{Gate, Source, Visit};
use super::handover::{self, Kept};
use super::keys::{GoodKey, NoKey};
use super::rate::network;
use super::rejections::Refusal;
use super::result::{self, Awaited, Waited};
use super::tap::Tap;
use super::{address, bodies};

pub(super) type Answer = Response<Full<Bytes>>;

/// Why a request is refused whose provider key is not to be had now.
const NO_KEY: &str = "key";

/// Answers one request to the front door, whatever it is.
pub(super) async fn answer(gate: &Gate, connection: &Connection, request: Request<Incoming>) -> Answer {
    let started = Instant::now();
    let in_flight = InFlight::enter(&gate.metrics.in_flight);
    let chunked = is_chunked(&request);
    let mut visitor = Visitor { source: None, sender: connection.peer.ip() };
    let answer = match receive(gate, connection, request, started, &mut visitor).await {
        Ok(answer) => answer,
        // The one place at which requests are refused, so that none is refused unseen.
        Err(error) => {
            gate.refuse(visitor.source, visitor.sender, Refusal::from(&error));
            // An outage of ours is not the sender's doing. A key that cannot be had is: a stranger can name any.
            let theirs = error.status.is_client_error() || error.reason == NO_KEY;
            let too_many = theirs && connection.mark_refused();
            if too_many { error.closing() } else { error }.into_response()
        }
    };
    drop(in_flight);
    if answer.status().is_success() && answer.extensions().get::<Waited>().is_none() {
        gate.metrics.ack.observe(started.elapsed());
    }
    connection.tap.reset(chunked);
    connection.end();
    answer
}

/// Whether the raw head will be looked at.
fn is_chunked<B>(request: &Request<B>) -> bool {
    request.headers().contains_key(header::TRANSFER_ENCODING)
}

/// Who asks, as far as it is known.
struct Visitor<'g> {
    source: Option<&'g Source>,
    sender: IpAddr,
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
///
/// Every open connection has room for this future, an idle one too. So what only some requests need is boxed.
async fn receive<'g>(
    gate: &'g Gate,
    connection: &Connection,
    request: Request<Incoming>,
    started: Instant,
    visitor: &mut Visitor<'g>,
) -> Result<Answer, HttpError> {
    let leaving = || HttpError::unavailable("connections").closing();
    let (head, body) = request.into_parts();
    if !connection.begin() {
        return Err(leaving());
    }
    let sender = address::sender(visitor.sender, &head.headers, &gate.trusted_proxies);
    visitor.sender = sender;
    // Nothing here is worth a connection: neither a name that is asked for nor a method that is refused.
    let source = find_source(gate, &head).map_err(HttpError::closing)?;
    visitor.source = Some(source);
    check_method(source, &head).map_err(HttpError::closing)?;
    if !gate.is_open() && gate.intake_of(source).is_none() {
        return Err(HttpError::unavailable("not_ready"));
    }
    check_framing(&head, &connection.tap)?;
    if !source.allow_ips.is_empty() && !address::contains(&source.allow_ips, sender) {
        return Err(HttpError::new(StatusCode::FORBIDDEN, "address", "this address may not deliver here"));
    }

    source.limiter.take_of(sender, Instant::now()).map_err(|after| {
        // The body is not read; whatever of it is under way must not be taken for a request.
        HttpError::too_many(after).because("rate_limit_peer").closing()
    })?;

    let asked = |body: &'_ Bytes| -> Option<Reply> {
        let request = as_request(&head, body);
        source.handshakes.answer_unsigned(&request, &source.verifier)
    };
    if head.method != Method::POST {
        let reply = asked(&Bytes::new()).ok_or_else(|| not_a_post().closing())?;
        if !connection.complete() {
            return Err(leaving());
        }
        return Box::pin(handshake(source, reply)).await;
    }
    let mut visit = gate.visit();
    let body = read_body(gate, source, &mut visit, sender, started, body).await?;
    if !connection.complete() {
        return Err(leaving());
    }
    enter(&mut visit)?;
    if let Some(reply) = asked(&body) {
        return Box::pin(handshake(source, reply)).await;
    }
    let now = gate.clock.now();
    let request = as_request(&head, &body);
    let refused = |rejection: Rejection| {
        let error = HttpError::new(StatusCode::UNAUTHORIZED, "signature", rejection.to_string());
        error.because(rejection.code())
    };
    let key = match source.verifier.key_request(&request).map_err(refused)? {
        None => None,
        Some(wanted) => {
            let key = Box::pin(find_key(source, &mut visit, &wanted, sender, body.len())).await?;
            Some(key.ok_or(Rejection::KeyUnknown).map_err(refused)?)
        }
    };
    let verified = source.verifier.verify_with(&request, now, key.as_ref().map(|key| &key.key)).map_err(refused)?;
    connection.mark_genuine(started);
    if let Some(key) = &key {
        source.keys.prove(key);
    }
    if let Some(reply) = source.handshakes.answer(&verified, &source.verifier) {
        return Box::pin(handshake(source, reply)).await;
    }
    source.limiter.take(Instant::now()).map_err(HttpError::too_many)?;
    let identified = source
        .identifier
        .identify(&verified)
        .map_err(|unidentified| HttpError::bad_request(unidentified.code(), unidentified.to_string()))?;

    let headers = keep_headers(source, &head.headers);
    let event = |item: Item| new_event(gate, source, item, &headers, &body, now, sender);
    let (events, batch): (NewEvents, bool) = match identified {
        Identified::One(item) => (std::iter::once(event(hold_replay(source, item))).collect(), false),
        Identified::Batch(items) => (items.into_iter().map(event).collect(), true),
    };
    let awaited = source.wait.as_ref().filter(|_| !batch).map(|wait| Awaited::new(wait, &events));
    let held: Vec<Option<Quarantine>> = match events.iter().any(|event| event.quarantine.is_some()) {
        true => events.iter().map(|event| event.quarantine).collect(),
        false => Vec::new(),
    };
    let (receipt, layer, spooled) = match store(gate, source, events).await? {
        Taken::Journal(settled) => {
            for appended in &settled.receipt {
                source.metrics.count(appended.verdict, settled.layer);
            }
            (settled.receipt, settled.layer.as_str(), false)
        }
        Taken::Spool(receipt) => {
            receipt.iter().for_each(|appended| source.metrics.count_spooled(appended.verdict));
            (receipt, "spool", true)
        }
    };
    for (place, appended) in receipt.iter().enumerate() {
        let quarantine = held.get(place).copied().flatten();
        source.arrivals.note(source.name.as_str(), appended, layer, quarantine);
    }
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
            Box::pin(result::answer(gate, source, &awaited, *appended)).await
        };
    }
    Ok(match &source.ack {
        None => accepted(&receipt, batch),
        Some(ack) => acknowledged(ack, &receipt),
    })
}

/// Exactly one path per source; nothing is decoded, folded or trimmed.
fn find_source<'g>(gate: &'g Gate, head: &Parts) -> Result<&'g Source, HttpError> {
    let name = head.uri.path().strip_prefix("/webhooks/");
    let name = name.filter(|_| head.uri.authority().is_none()).ok_or_else(HttpError::not_found)?;
    gate.sources.get(name).ok_or_else(|| HttpError::not_found().because("unknown_source"))
}

/// Whether the source takes this method: POST, or one that its provider asks with before it sends.
fn check_method(source: &Source, head: &Parts) -> Result<(), HttpError> {
    if head.method != Method::POST && !source.handshakes.methods().any(|method| method == head.method.as_str()) {
        return Err(not_a_post());
    }
    Ok(())
}

fn not_a_post() -> HttpError {
    HttpError::method_not_allowed("POST", "webhooks are delivered with POST")
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

fn enter(visit: &mut Visit<'_>) -> Result<(), HttpError> {
    if visit.enter() { Ok(()) } else { Err(HttpError::unavailable("overloaded").because("in_flight")) }
}

/// The provider's key for this request; nothing if the provider has none. While the provider does not answer, the sender
/// must try again: whether the request is genuine is not known. A request that waits for a key holds a place among those of its
/// source who wait, not one that another source needs.
async fn find_key(
    source: &Source,
    visit: &mut Visit<'_>,
    wanted: &KeyRequest,
    sender: IpAddr,
    bytes: usize,
) -> Result<Option<Arc<GoodKey>>, HttpError> {
    let key = match source.keys.at_hand(wanted) {
        Some(known) => known,
        None => {
            visit.leave();
            let key = source.keys.fetch(wanted, sender, bytes).await;
            enter(visit)?;
            key
        }
    };
    match key {
        Ok(key) => Ok(Some(key)),
        Err(NoKey::Unusable) => Ok(None),
        Err(NoKey::Unavailable) => Err(HttpError::unavailable("key_unavailable").because(NO_KEY)),
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

/// Reads the whole body, or refuses it whole: never a part of it. A body that came with its head is not copied.
async fn read_body(
    gate: &Gate,
    source: &Source,
    visit: &mut Visit<'_>,
    sender: IpAddr,
    started: Instant,
    mut body: Incoming,
) -> Result<Bytes, HttpError> {
    let limit = source.body_bytes.min(gate.journal.largest_body());
    let declared = body.size_hint().exact();
    if declared.is_some_and(|size| size > limit as u64) {
        return Err(too_large(limit, declared));
    }
    let Some(data) = next_data(gate, &mut body, 0, started).await? else { return Ok(Bytes::new()) };
    if !body.is_end_stream() {
        return Box::pin(read_rest(gate, visit, sender, started, limit, data, body)).await;
    }
    if visit.take_bytes(data.len()) { Ok(data) } else { Err(no_room()) }
}

/// Reads a body that did not come at once into a buffer of its own. Until it is complete it may be evicted.
async fn read_rest(
    gate: &Gate,
    visit: &mut Visit<'_>,
    sender: IpAddr,
    started: Instant,
    limit: usize,
    mut data: Bytes,
    mut body: Incoming,
) -> Result<Bytes, HttpError> {
    let most = body.size_hint().exact().map_or(limit, |rest| data.len() + usize::try_from(rest).unwrap_or(limit));
    let proxy = address::contains(&gate.trusted_proxies, sender);
    let mut arrival = gate.bodies.arrive((!proxy).then(|| network(sender)), started);
    let mut whole: Vec<u8> = Vec::new();
    loop {
        let length = whole.len() + data.len();
        if length > limit {
            return Err(too_large(limit, None));
        }
        // What is allocated is what counts.
        let capacity = if length > whole.capacity() { (2 * length).min(most).max(length) } else { whole.capacity() };
        if !arrival.grow(data.len(), capacity, Instant::now()) {
            return Err(no_room());
        }
        whole.reserve_exact(capacity - whole.len());
        whole.extend_from_slice(&data);
        // hyper reads on into the same buffer when nobody holds a part of it.
        drop(data);
        if body.is_end_stream() {
            break;
        }
        let next = tokio::select! {
            next = next_data(gate, &mut body, length, started) => next?,
            () = arrival.evicted() => return Err(no_room()),
        };
        match next {
            Some(next) => data = next,
            None => break,
        }
    }
    if visit.take_arrived(arrival) { Ok(whole.into()) } else { Err(no_room()) }
}

/// The next bytes of a body of which so many have arrived; nothing at its end.
async fn next_data(
    gate: &Gate,
    body: &mut Incoming,
    arrived: usize,
    started: Instant,
) -> Result<Option<Bytes>, HttpError> {
    let deadline = started + bodies::patience(arrived).min(gate.limits.body);
    loop {
        let frame = match tokio::time::timeout_at(deadline.into(), body.frame()).await {
            Ok(None) => return Ok(None),
            Ok(Some(Ok(frame))) => frame,
            Ok(Some(Err(_))) => {
                let message = "the body ended before its end";
                return Err(HttpError::bad_request("body_incomplete", message).closing());
            }
            Err(_) => {
                let message = "the body took too long to arrive";
                return Err(HttpError::new(StatusCode::REQUEST_TIMEOUT, "body_timeout", message).closing());
            }
        };
        // The others are trailers, which mean nothing here.
        if let Ok(data) = frame.into_data() {
            return Ok(Some(data));
        }
    }
}

/// All memory for bodies is taken by others who are faster.
fn no_room() -> HttpError {
    HttpError::unavailable("overloaded").because("memory").closing()
}

fn too_large(limit: usize, declared: Option<u64>) -> HttpError {
    let size = declared.map_or_else(|| "a body of undeclared size".to_owned(), |size| format!("{size} bytes"));
    let message = format!("a body may have at most {limit} bytes");
    HttpError {
        detail: Some(format!("{size}, and this source takes at most {limit}")),
        ..HttpError::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message).closing()
    }
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

/// Holds an event that came with a value which its sender has used for another one.
fn hold_replay(source: &Source, mut item: Item) -> Item {
    let is_replay = |once: [u8; 32]| source.used_once.is_used_by_another(once, &item.key, Instant::now());
    if item.once.is_some_and(is_replay) {
        item.quarantine.get_or_insert(Quarantine::SuspectedReplay);
    }
    item
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
    if source.lacks_key(&item.key) && item.quarantine.is_none() && source.metrics.count_key_missing() {
        tracing::warn!(
            source = source.name.as_str(),
            "an event's key is not where this source says, so its body's digest is its key; copies that differ in one \
             byte count as new events. Look at `key` of the source (oncehook_key_missing_total counts such events)"
        );
    }
    NewEvent {
        id: None,
        routes: gate.routes.wanting(&source.name, item.kind.as_deref()),
        by_entity: gate.routes.look_at_entities(&source.name),
        source: source.name.clone(),
        key: item.key,
        key_signed: source.identifier.key_is_signed(),
        kind: item.kind,
        entity: item.entity,
        occurred_at: item.occurred_at,
        version: item.version,
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
    if let Some(intake) = gate.intake_of(source) {
        let taken = Box::pin(intake.append(&gate.fast_path, &*gate.journal, events, gate.is_open())).await;
        return taken.map_err(|refused| HttpError::unavailable(refusal(&refused)));
    }
    let settled = gate.fast_path.append_within(gate.limits.commit, &*gate.journal, events).await;
    settled.map(Taken::Journal).map_err(|error| HttpError::unavailable(refusal(&error.into())))
}

fn refusal(refused: &Refused) -> &'static str {
    match refused {
        Refused::Journal(NotStored::Refused(error)) => reason(error),
        Refused::Journal(NotStored::Slow) => "journal_slow",
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
async fn handshake(source: &Source, reply: Reply) -> Result<Answer, HttpError> {
    match &reply.action {
        None => {}
        Some(Action::Confirm { url }) => {
            if let Err(error) = source.keys.confirm(url).await {
                tracing::warn!(source = source.name.as_str(), %error, "a subscription could not be confirmed");
                return Err(HttpError::unavailable("confirm_failed").because("confirm"));
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
        return Err(HttpError::new(StatusCode::FORBIDDEN, "handover", "this source takes no secret from a request"));
    };
    let kept = tokio::task::spawn_blocking(move || handover::keep(&path, &secret)).await;
    match kept {
        Ok(Ok(Kept::New)) => {
            tracing::warn!(source = source.name.as_str(), "a secret was handed over and waits to be confirmed");
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
        if let (Ok(name), Ok(value)) = (header::HeaderName::from_bytes(name.as_bytes()), HeaderValue::from_str(&value))
        {
            headers.insert(name, value);
        }
    }
    response
}

/// The front door as a hyper service for one connection.
pub(super) fn service(
    gate: Arc<Gate>,
    connection: Arc<Connection>,
) -> impl hyper::service::Service<
    Request<Incoming>,
    Response = Answer,
    Error = std::convert::Infallible,
    Future = impl Future<Output = Result<Answer, std::convert::Infallible>> + Send,
> + Send {
    hyper::service::service_fn(move |request| {
        let (gate, connection) = (Arc::clone(&gate), Arc::clone(&connection));
        // Here and not when it is first polled: by then hyper may have read a part of the body.
        connection.tap.close(is_chunked(&request));
        async move { Ok(answer(&gate, &connection, request).await) }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ten thousand idle connections hold ten thousand of these.
    #[test]
    fn fault_76_a_request_future_is_small() {
        fn size_of_future<S: hyper::service::Service<Request<Incoming>>>(
            _: fn(Arc<Gate>, Arc<Connection>) -> S,
        ) -> usize {
            size_of::<S::Future>()
        }
        let size = size_of_future(service);
        assert!(size < 6_144, "{size} bytes");
    }
}
