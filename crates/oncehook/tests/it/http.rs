//! The HTTP handler against a real listener that behaves well and badly.

use std::time::{Duration, Instant};

use bytes::Bytes;
use oncehook::delivery::{Cause, Claim, DeliveryId, Failure, Fence, HandedEvent, Remedy, RouteName};
use oncehook::event::{EventIds, SourceName};
use oncehook::handler::{Expression, HttpHandler, HttpOptions, OnClientError, Template};
use oncehook::verify::{EventKey, Preset, Request, Secret, UnixMicros, Verifier};
use oncehook_testkit::receiver::{Arrived, Receiver, Reply};

const NOW: UnixMicros = UnixMicros(1_700_000_000_000_000);
const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

/// One attempt to deliver an event.
pub(crate) fn claim(attempt: u32) -> Claim {
    let id = EventIds::above(0, 1).next(NOW);
    let event = HandedEvent {
        id,
        source: SourceName::new("shop").unwrap(),
        key: EventKey::from_parts(&[b"evt_1"]),
        kind: Some("order.paid".to_owned()),
        entity: None,
        occurred_at: None,
        received_at: NOW,
        headers: Bytes::from_static(b"accept: */*\ncontent-type: application/json; charset=utf-8\nx-a: b\n"),
        body: Bytes::from_static(br#"{"id": "evt_1",  "amount": 1.50}"#),
        result: None,
        version: None,
        state: None,
        current: None,
    };
    let delivery = DeliveryId { event: id, route: RouteName::new("mail").unwrap(), epoch: 0 };
    Claim { fence: Fence { delivery, attempt }, attempt_limit: 8, parked_at: None, event }
}

fn handler(options: HttpOptions) -> HttpHandler {
    HttpHandler::new(options).unwrap()
}

/// What one attempt at such an answer comes to.
async fn asked(reply: Reply) -> Result<Option<String>, Failure> {
    let receiver = Receiver::start(move |_, _| reply.clone()).await;
    let mut options = HttpOptions::new(receiver.url("/"));
    options.timeout = Duration::from_millis(500);
    handler(options).deliver(&claim(1), NOW).await
}

fn body_of(result: Result<Option<String>, Failure>) -> serde_json::Value {
    let json: serde_json::Value = serde_json::from_str(&result.unwrap().unwrap()).unwrap();
    assert_eq!(json["status"], 200);
    json["body"].clone()
}

fn is_genuine(arrived: &Arrived, at: UnixMicros) -> bool {
    let preset = Preset::named("standard-webhooks").unwrap();
    let verifier = Verifier::new(&preset.verify, &[Secret::new(SECRET).unwrap()], None).unwrap();
    let mut headers = http::HeaderMap::new();
    for (name, value) in &arrived.headers {
        headers.append(name.parse::<http::HeaderName>().unwrap(), value.parse().unwrap());
    }
    let request = Request { method: "POST", path: "/hook", headers: &headers, body: &arrived.body };
    verifier.verify(&request, at).is_ok()
}

#[tokio::test]
async fn r23_the_key_is_stable_and_each_attempt_is_signed_afresh() {
    let receiver = Receiver::start(|_, _| Reply::status(503, "")).await;
    let mut options = HttpOptions::new(receiver.url("/hook?a=b"));
    options.secret = Some(Secret::new(SECRET).unwrap());
    options.headers = vec![("Authorization".to_owned(), "Bearer abc".to_owned())];
    let handler = handler(options);
    let times = [NOW, UnixMicros(NOW.0 + 2_000_000), UnixMicros(NOW.0 + 3_600_000_000)];
    let mut claim = claim(1);
    // Bytes that no serialiser would give back as they are.
    claim.event.body = Bytes::from_static(b"\xff\x00{ \"a\" :1.0, \"a\":2 }\r\n");
    for (attempt, now) in (1..).zip(times) {
        claim.fence.attempt = attempt;
        handler.deliver(&claim, now).await.unwrap_err();
    }
    let arrived = receiver.requests();
    let key = claim.fence.delivery.idempotency_key();
    assert_eq!(arrived.len(), 3);
    for (index, (request, now)) in arrived.iter().zip(times).enumerate() {
        assert_eq!(request.line, "POST /hook?a=b HTTP/1.1");
        assert_eq!(request.body, claim.event.body);
        for (name, value) in [
            ("idempotency-key", key.as_str()),
            ("webhook-id", key.as_str()),
            ("webhook-timestamp", &now.as_secs().to_string()),
            ("content-type", "application/json; charset=utf-8"),
            ("oncehook-event", &claim.event.id.to_string()),
            ("oncehook-source", "shop"),
            ("oncehook-type", "order.paid"),
            ("oncehook-attempt", &(index + 1).to_string()),
            ("user-agent", concat!("oncehook/", env!("CARGO_PKG_VERSION"))),
            ("authorization", "Bearer abc"),
        ] {
            assert_eq!(request.header(name), Some(value), "{name}");
        }
        assert_eq!(request.header("cookie"), None);
        assert!(is_genuine(request, now), "attempt {index} is not genuine");
        // A receiver five minutes off would refuse it: the time is the attempt's, not the event's.
        assert!(!is_genuine(request, UnixMicros(now.0 + 301_000_000)));
    }
    let signatures: std::collections::BTreeSet<_> =
        arrived.iter().map(|request| request.header("webhook-signature").unwrap()).collect();
    assert_eq!(signatures.len(), 3, "each attempt has its own signature");
}

#[tokio::test]
async fn without_a_secret_nothing_is_signed_and_odd_types_stay_out_of_the_headers() {
    let receiver = Receiver::start(|_, _| Reply::status(200, "")).await;
    let mut options = HttpOptions::new(receiver.url("/"));
    options.headers = vec![("User-Agent".to_owned(), "shop".to_owned())];
    let handler = handler(options);
    let mut claim = claim(1);
    claim.event.kind = Some("order\r\nx-evil: 1".to_owned());
    claim.event.headers = Bytes::new();
    handler.deliver(&claim, NOW).await.unwrap();
    let arrived = &receiver.requests()[0];
    for absent in ["webhook-signature", "oncehook-type", "x-evil", "content-type"] {
        assert_eq!(arrived.header(absent), None, "{absent}");
    }
    assert_eq!(arrived.header("webhook-timestamp"), Some("1700000000"));
    assert_eq!(arrived.header("user-agent"), Some("shop"));
}

#[tokio::test]
async fn r21_a_template_is_filled_and_signed_as_it_is_sent() {
    let receiver = Receiver::start(|_, _| Reply::status(200, "")).await;
    let mut options = HttpOptions::new(receiver.url("/hook"));
    let body = Template::parse(r#"{"order": {{$result/id}}, "amount": {{/amount}}}"#).unwrap();
    assert!(body.any(Expression::needs_result));
    options.body = Some(body);
    options.secret = Some(Secret::new(SECRET).unwrap());
    let handler = handler(options);
    let mut claim = claim(1);
    claim.event.headers = Bytes::from_static(b"content-type: text/csv\n");
    let failure = handler.deliver(&claim, NOW).await.unwrap_err();
    assert_eq!((failure.cause, failure.remedy), (Cause::Poison, Remedy::GiveUp));
    assert_eq!(receiver.connections(), 0, "nothing was sent");
    claim.event.result = Some(r#"{"id":7}"#.to_owned());
    handler.deliver(&claim, NOW).await.unwrap();
    let arrived = &receiver.requests()[0];
    assert_eq!(arrived.body, br#"{"order": 7, "amount": 1.50}"#);
    assert_eq!(arrived.header("content-type"), Some("application/json"));
    assert!(is_genuine(arrived, NOW));
}

#[tokio::test]
async fn r26_each_status_has_one_meaning() {
    let receiver = Receiver::start(|_, request| {
        let status = request.header("x-status").unwrap().parse().unwrap();
        Reply::status(status, if status == 204 { "" } else { "said so" })
    })
    .await;
    for policy in [OnClientError::Retry, OnClientError::GiveUp, OnClientError::Result] {
        for status in (200..=599).filter(|status| status % 100 < 30) {
            let mut options = HttpOptions::new(receiver.url("/"));
            options.headers = vec![("x-status".to_owned(), status.to_string())];
            options.on_4xx = policy;
            let outcome = handler(options).deliver(&claim(1), NOW).await;
            let remedy = outcome.as_ref().err().map(|failure| failure.remedy);
            let expected = match (status, policy) {
                (200..=299, _) => None,
                (410, OnClientError::Retry | OnClientError::GiveUp) => Some(Remedy::GiveUp),
                (425, _) => Some(Remedy::Defer),
                (408 | 429, _) | (300..=399 | 500..=599, _) => Some(Remedy::Retry(None)),
                (_, OnClientError::Retry) => Some(Remedy::Retry(None)),
                (_, OnClientError::GiveUp) => Some(Remedy::GiveUp),
                (_, OnClientError::Result) => None,
            };
            assert_eq!(remedy, expected, "{status} {policy:?}");
            if let Err(failure) = outcome {
                let cause = if status == 425 { Cause::Prerequisite } else { Cause::Destination };
                assert_eq!(failure.cause, cause);
                let names_it = failure.message.starts_with(&receiver.url(" answered ")) || status < 400;
                assert!(names_it && failure.message.contains(&status.to_string()), "{failure}");
                assert!(failure.message.contains(": said so") || status < 400, "{failure}");
            }
        }
    }
}

#[tokio::test]
async fn r26_the_destination_may_ask_for_patience() {
    let after = async |text: &str| {
        let failure = asked(Reply::status(429, "").with("retry-after", text)).await.unwrap_err();
        let Remedy::Retry(after) = failure.remedy else { panic!("{failure:?}") };
        after
    };
    assert_eq!(after("120").await, Some(Duration::from_secs(120)));
    assert_eq!(after(" 0 ").await, Some(Duration::ZERO));
    assert_eq!(after("99999999999999999999999").await, Some(Duration::from_secs(u64::MAX)));
    // NOW is 2023-11-14 22:13:20. All three forms that HTTP knows, and a date that has passed.
    assert_eq!(after("Tue, 14 Nov 2023 22:14:20 GMT").await, Some(Duration::from_secs(60)));
    assert_eq!(after("Tuesday, 14-Nov-23 22:14:20 GMT").await, Some(Duration::from_secs(60)));
    assert_eq!(after("Tue Nov 14 22:14:20 2023").await, Some(Duration::from_secs(60)));
    assert_eq!(after("Tue, 14 Nov 2023 22:00:00 GMT").await, Some(Duration::ZERO));
    for nonsense in ["", "soon", "-5", "1e3", "Tue, 99 Nov 2023 22:14:20 GMT", "12 34"] {
        assert_eq!(after(nonsense).await, None, "{nonsense:?}");
    }
    let failure = asked(Reply::status(503, "").with("retry-after", "7")).await.unwrap_err();
    assert_eq!(failure.remedy, Remedy::Retry(Some(Duration::from_secs(7))));
}

#[tokio::test]
async fn r22_the_answer_is_the_result() {
    use serde_json::{Value, json};
    assert_eq!(body_of(asked(Reply::status(200, "")).await), Value::Null);
    assert_eq!(body_of(asked(Reply::status(200, r#" {"id": 7, "n": 1.50} "#)).await), json!({"id": 7, "n": 1.50}));
    assert_eq!(body_of(asked(Reply::status(200, "done \"well\"\0")).await), "done \"well\"\0");
    assert_eq!(body_of(asked(Reply::status(200, b"\xff\xfe".as_slice())).await), "\u{fffd}\u{fffd}");
    assert_eq!(body_of(asked(Reply::status(200, "[".repeat(4_000))).await), "[".repeat(1_000));
    // Large JSON is a piece of text, cut between characters.
    let large = body_of(asked(Reply::status(200, format!("\"{}\"", "ä".repeat(3_000)))).await);
    assert_eq!(large, format!("\"{}", "ä".repeat(499)));
    // A digit is not rewritten on its way through.
    let raw = asked(Reply::status(200, r#"{"n":1.500}"#)).await.unwrap();
    assert_eq!(raw.as_deref(), Some(r#"{"status":200,"body":{"n":1.500}}"#));
}

#[tokio::test]
async fn fault_95_answers_without_end_are_not_waited_for() {
    let chunked = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n".to_vec();
    let started = Instant::now();
    assert_eq!(body_of(asked(Reply::Endless(chunked)).await), "x".repeat(1_000));
    let promised = b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n".to_vec();
    assert_eq!(body_of(asked(Reply::Endless(promised)).await), "x".repeat(1_000));
    let failure = asked(Reply::Endless(b"HTTP/1.1 500 No\r\n\r\n".to_vec())).await.unwrap_err();
    assert!(failure.message.len() < 400, "{failure}");
    // Exactly the limit and no more: the connection stays open, and nobody waits for it.
    let mut limit = b"HTTP/1.1 200 OK\r\ncontent-length: 70000\r\n\r\n".to_vec();
    limit.resize(limit.len() + 65_536, b'y');
    assert_eq!(body_of(asked(Reply::Stall(limit)).await), "y".repeat(1_000));
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
    // Headers without end.
    let failure = asked(Reply::Endless(b"HTTP/1.1 200 OK\r\nx-a: ".to_vec())).await.unwrap_err();
    assert_eq!((failure.cause, failure.remedy), (Cause::Destination, Remedy::Retry(None)));
}

#[tokio::test]
async fn r26_exchanges_that_break_are_tried_again() {
    let text = |bytes: &str| bytes.as_bytes().to_vec();
    let half = "HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nonly this";
    for (what, reply, said) in [
        ("silence", Reply::Stall(Vec::new()), "no answer within 500ms"),
        ("half a head", Reply::Stall(text("HTTP/1.1 200 OK\r\nx")), "no answer within 500ms"),
        ("closed", Reply::Raw(Vec::new()), "gave no answer"),
        ("reset", Reply::Reset, "gave no answer"),
        ("not HTTP", Reply::Raw(text("SSH-2.0-OpenSSH_9.9\r\n")), "gave no answer"),
        ("half a body, then closed", Reply::Raw(text(half)), "answered 200 OK: only this, but its answer broke off"),
        ("half a body, then silence", Reply::Stall(text(half)), "but its answer broke off: the time was up"),
        ("a bad chunk", Reply::Raw(text("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n")), "broke off"),
        (
            "a failure that stalls",
            Reply::Stall(text("HTTP/1.1 502 No\r\ncontent-length: 9\r\n\r\nwhy")),
            "502 Bad Gateway: why",
        ),
        ("a change of protocol", Reply::Raw(text("HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\n")), "answer"),
    ] {
        let started = Instant::now();
        let failure = asked(reply).await.unwrap_err();
        assert!(failure.message.contains(said), "{what}: {failure}");
        assert_eq!((failure.cause, failure.remedy), (Cause::Destination, Remedy::Retry(None)), "{what}");
        assert!(started.elapsed() < Duration::from_secs(2), "{what} took {:?}", started.elapsed());
    }
    let gone = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let failure = handler(HttpOptions::new(format!("http://{gone}/"))).deliver(&claim(1), NOW).await.unwrap_err();
    assert!(failure.message.contains("cannot be reached: Connection refused"), "{failure}");
}

#[tokio::test]
async fn a_failure_that_stalls_keeps_its_retry_after() {
    let stalls = b"HTTP/1.1 503 No\r\nretry-after: 9\r\ncontent-length: 9\r\n\r\n".to_vec();
    let failure = asked(Reply::Stall(stalls)).await.unwrap_err();
    assert_eq!(failure.remedy, Remedy::Retry(Some(Duration::from_secs(9))));
}

#[tokio::test]
async fn connections_are_kept_and_hang_ups_in_between_do_no_harm() {
    let receiver = Receiver::start(|_, _| Reply::status(200, "{}")).await;
    let handler = handler(HttpOptions::new(receiver.url("/")));
    for attempt in 1..=20 {
        handler.deliver(&claim(attempt), NOW).await.unwrap();
    }
    assert_eq!((receiver.requests().len(), receiver.connections()), (20, 1));
    // Refused answers leave the connection usable too.
    let receiver = Receiver::start(|_, _| Reply::status(500, "no")).await;
    let handler = self::handler(HttpOptions::new(receiver.url("/")));
    for attempt in 1..=5 {
        handler.deliver(&claim(attempt), NOW).await.unwrap_err();
    }
    assert_eq!(receiver.connections(), 1);
}

#[tokio::test]
async fn r9_no_error_repeats_a_secret() {
    const TOKEN: &str = "tok_d41d8cd98f00b204";
    let receiver = Receiver::start(|_, request| {
        let echo = format!("you sent {:?} to {}", request.header("authorization"), request.line);
        match request.line.as_bytes().get(6) {
            Some(b'e') => Reply::status(400, echo),
            Some(b'r') => Reply::status(302, "").with("location", format!("/next?token={TOKEN}")),
            Some(b'h') => Reply::Raw(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n".to_vec()),
            _ => Reply::Reset,
        }
    })
    .await;
    for path in ["echo", "redirect", "half", "closed"] {
        let mut options = HttpOptions::new(receiver.url(&format!("/{path}")));
        options.secret = Some(Secret::new(SECRET).unwrap());
        options.headers = vec![("authorization".to_owned(), format!("Bearer {TOKEN}"))];
        let options_shown = format!("{options:?}");
        let handler = handler(options);
        let failure = handler.deliver(&claim(1), NOW).await.unwrap_err();
        let everything = format!("{failure:?} {handler:?} {options_shown}");
        assert!(!everything.contains(TOKEN) && !everything.contains("MfKQ9r8G"), "{path}: {everything}");
        assert!(path != "echo" || failure.message.contains("(hidden)"), "{failure}");
    }
    // A token in the path or the query is not repeated either, whether somebody listens or not.
    for url in [receiver.url(&format!("/x/{TOKEN}?t={TOKEN}")), format!("http://127.0.0.1:1/{TOKEN}?t={TOKEN}")] {
        let failure = handler(HttpOptions::new(url)).deliver(&claim(1), NOW).await.unwrap_err();
        assert!(!format!("{failure:?}").contains(TOKEN), "{failure:?}");
    }
    for url in [format!("http://me:{TOKEN}@localhost/"), format!("http://{TOKEN}@localhost/")] {
        let error = HttpHandler::new(HttpOptions::new(url)).unwrap_err();
        assert!(error.contains("password") && !error.contains(TOKEN), "{error}");
    }
}

#[test]
fn fault_94_headers_that_frame_the_message_cannot_be_configured() {
    let with = |name: &str, value: &str| {
        let mut options = HttpOptions::new("http://127.0.0.1/");
        options.headers = vec![(name.to_owned(), value.to_owned())];
        HttpHandler::new(options).map(|_| ())
    };
    for name in [
        "Host",
        "content-length",
        "Transfer-Encoding",
        "connection",
        "te",
        "trailer",
        "upgrade",
        "expect",
        "Idempotency-Key",
        "webhook-id",
        "webhook-anything",
        "oncehook-event",
        "proxy-authorization",
        "a b",
        "",
        "x\r\ny",
        "ü",
    ] {
        assert!(with(name, "v").is_err(), "{name:?}");
    }
    for value in ["a\r\nx-evil: 1", "a\nb", "a\0b", "ü\r"] {
        let error = with("x-a", value).unwrap_err();
        assert!(error.contains("`x-a`") && !error.contains(value), "{error}");
    }
    with("X-Tenant", "a b").unwrap();
    with("content-type", "text/plain").unwrap();
    let mut twice = HttpOptions::new("http://127.0.0.1/");
    twice.headers = vec![("a".to_owned(), "1".to_owned()), ("A".to_owned(), "2".to_owned())];
    assert!(HttpHandler::new(twice).unwrap_err().contains("twice"));
}

#[test]
fn options_that_cannot_work_are_refused() {
    for timeout in [Duration::ZERO, Duration::from_secs(301), Duration::MAX] {
        let mut options = HttpOptions::new("http://127.0.0.1/");
        options.timeout = timeout;
        assert!(HttpHandler::new(options).unwrap_err().contains("timeout"));
    }
    let mut options = HttpOptions::new("http://127.0.0.1/");
    options.secret = Some(Secret::new("whsec_%%%not-base64-at-all").unwrap());
    let error = HttpHandler::new(options).unwrap_err();
    assert!(!error.contains("not-base64"), "{error}");
}

/// No process-wide cryptography is installed in this binary, so this would panic or fail to build without our own.
#[tokio::test]
async fn https_needs_nothing_installed_and_speaks_tls() {
    let receiver = Receiver::start(|_, _| Reply::status(200, "")).await;
    let url = format!("https://{}/", receiver.address());
    let mut options = HttpOptions::new(url);
    options.timeout = Duration::from_millis(500);
    let failure = handler(options).deliver(&claim(1), NOW).await.unwrap_err();
    assert_eq!((failure.cause, failure.remedy), (Cause::Destination, Remedy::Retry(None)));
    assert_eq!((receiver.connections(), receiver.requests().len()), (1, 0), "{failure}");
}

/// Runs as a test of its own, and once more from the next one with proxies in the environment.
#[tokio::test]
async fn a_delivery_goes_straight_to_its_destination() {
    let receiver = Receiver::start(|_, _| Reply::status(200, "")).await;
    handler(HttpOptions::new(receiver.url("/"))).deliver(&claim(1), NOW).await.unwrap();
    assert_eq!(receiver.requests()[0].line, "POST / HTTP/1.1");
}

#[tokio::test]
async fn fault_93_r43_proxies_in_the_environment_are_not_asked() {
    let canary = Receiver::start(|_, _| Reply::status(200, "")).await;
    let proxy = canary.url("");
    let mut test = std::process::Command::new(std::env::current_exe().unwrap());
    test.args(["--exact", "http::a_delivery_goes_straight_to_its_destination"]);
    for name in ["HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"] {
        test.env(name, &proxy);
    }
    test.env_remove("NO_PROXY").env_remove("no_proxy");
    let output = tokio::task::spawn_blocking(move || test.output()).await.unwrap().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
    assert_eq!(canary.connections(), 0);
}
