//! What strangers send: through the real front door, with nothing but a socket.

use std::time::{Duration, Instant};

use oncehook_testkit::gateway::now;
use oncehook_testkit::sender::Wire;
use serde_json::Value;

use crate::kit::{
    Headers, Rig, Signs, check_error, chunks, exchange, raw, soon, statuses, text, value, with, write_headers,
};

const STRIPE: &str = "whsec_hostile_stripe_9f2";
const GITHUB: &str = "github hostile secret 77";

const SECRETS: [(&str, &str); 2] = [("stripe.secret", STRIPE), ("github.secret", GITHUB)];

const SOURCES: &str = r#"
[[source]]
name = "stripe"
provider = "stripe"
secrets = ["file:stripe.secret"]

[[source]]
name = "held"
provider = "stripe"
secrets = ["file:stripe.secret"]
missing_key = "quarantine"

[[source]]
name = "strict"
provider = "stripe"
secrets = ["file:stripe.secret"]
missing_key = "reject"

[[source]]
name = "github"
provider = "github"
secrets = ["file:github.secret"]

[[source]]
name = "pair"
provider = "custom"
secrets = ["file:github.secret"]
[source.verify]
algorithm = "hmac-sha256"
key = "utf8"
content = "{body}"
signature = { header = "x-hub-signature-256", grammar = { prefix = "sha256=" }, encoding = "hex" }
[source.identify]
key = ["/a", "/b"]
"#;

fn rig(server: &str) -> Rig {
    Rig::start(server, SOURCES, &SECRETS)
}

fn stripe() -> Signs {
    Signs::preset("stripe", STRIPE, "stripe")
}

fn github() -> Signs {
    Signs::preset("github", GITHUB, "github")
}

/// A genuine Stripe event whose id is this JSON value.
fn event(id_json: &str) -> Vec<u8> {
    stripe().post(&[], format!(r#"{{"id":{id_json},"type":"a.b"}}"#).as_bytes())
}

async fn check_distinct(rig: &Rig, requests: &[Vec<u8>]) -> Vec<String> {
    let mut events = Vec::new();
    for (number, request) in requests.iter().enumerate() {
        let (status, event) = rig.deliver(request).await;
        assert_eq!(status, "accepted", "request {number}");
        assert!(!events.contains(&event), "request {number}");
        events.push(event);
    }
    for (number, (request, event)) in requests.iter().zip(&events).enumerate() {
        assert_eq!(rig.deliver(request).await, ("duplicate".to_owned(), event.clone()), "request {number}");
    }
    assert_eq!(rig.stored().await, requests.len() as u64);
    events
}

#[tokio::test]
async fn fault_27_ids_that_look_alike_are_different_events() {
    let rig = rig("");
    let longest = "x".repeat(255);
    let ids = [
        "evt_a".to_owned(),
        "EVT_A".to_owned(),
        "evt_A".to_owned(),
        "evt_a ".to_owned(),
        " evt_a".to_owned(),
        "evt_a\\t".to_owned(),
        "evt_\u{e1}".to_owned(),   // á in one character
        "evt_a\u{301}".to_owned(), // and in two
        "evt_\u{ff41}".to_owned(), // full width
        "evt_\u{df}".to_owned(),
        "evt_ss".to_owned(),
        longest.clone(),
        format!("{longest}x"),
        format!("{longest}y"),
    ];
    let requests: Vec<_> = ids.iter().map(|id| event(&format!("\"{id}\""))).collect();
    let events = check_distinct(&rig, &requests).await;
    // And each is found again by its key alone.
    for (id, event) in ids.iter().zip(&events) {
        let shown = text(&rig.show(event).await["key"]);
        if !id.contains('\\') && id.len() <= 255 {
            assert_eq!(shown, *id);
        }
        let escaped: String = shown.bytes().map(|byte| format!("%{byte:02x}")).collect();
        let found = rig.gateway.json(&format!("/api/events?key={escaped}")).await;
        let found: Vec<_> =
            found["events"].as_array().unwrap().iter().map(|event| text(&event["id"])).collect();
        assert_eq!(found, std::slice::from_ref(event), "{id:?}");
    }
}

#[tokio::test]
async fn fault_28_strange_ids_are_bytes() {
    let rig = rig("");
    let long = "e".repeat(64 << 10);
    let requests = [
        event(r#""evt""#),
        event("\"evt\\u0000\""),
        event("\"evt\\u0000x\""),
        event("\"\\u0000\""),
        event("\"'; DROP TABLE oncehook_events; --\""),
        event(r#""*3\r\n$3\r\nSET\r\n""#),
        event(&format!("\"{long}\"")),
        event(&format!("\"{long}f\"")),
    ];
    let events = check_distinct(&rig, &requests).await;
    assert_eq!(rig.show(&events[2]).await["key"], "hex:6576740078");
    assert_eq!(rig.show(&events[4]).await["key"], "'; DROP TABLE oncehook_events; --");
    let long_key = text(&rig.show(&events[6]).await["key"]);
    assert!(long_key.starts_with("sha256-id:") && long_key.len() == 74, "{long_key}");
}

#[tokio::test]
async fn fault_28_header_ids_that_are_not_utf8_are_bytes() {
    let rig = rig("");
    let body = br#"{"action":"opened"}"#;
    let headers = github().headers(&[("x-github-event", "issues")], body, "", now());
    let ids: [&[u8]; 4] = [b"d\x80", b"d\xff\xfe", b"d\xc3\x28", b"d\xc3\xa9"];
    let requests: Vec<_> = ids
        .iter()
        .map(|id| raw("/webhooks/github", &with(&headers, "x-github-delivery", id), body))
        .collect();
    let events = check_distinct(&rig, &requests).await;
    assert_eq!(rig.show(&events[0]).await["key"], "hex:6480");
    assert_eq!(rig.show(&events[3]).await["key"], "d\u{e9}");
    // The page of all events is still JSON.
    assert_eq!(rig.gateway.events().await.len(), 4);
}

#[tokio::test]
async fn fault_29_an_event_without_an_id_follows_the_declared_policy() {
    let rig = rig("");
    let keyless = [
        r#"{"type":"a"}"#,
        r#"{"type":"b"}"#,
        r#"{"id":null,"type":"a"}"#,
        r#"{"id":"","type":"a"}"#,
        "[]",
        "no json",
    ];
    // Each source: the same bodies.
    let by_digest: Vec<_> = keyless.iter().map(|body| stripe().post(&[], body.as_bytes())).collect();
    let events = check_distinct(&rig, &by_digest).await;
    for event in &events {
        let shown = rig.show(event).await;
        assert!(text(&shown["key"]).starts_with("sha256:"), "{shown}");
        assert_eq!(shown["flags"], Value::Array(vec![]), "{shown}");
    }

    let held = Signs::preset("stripe", STRIPE, "held");
    for body in keyless {
        let (status, event) = rig.deliver(&held.post(&[], body.as_bytes())).await;
        assert_eq!(status, "quarantined", "{body}");
        let shown = rig.show(&event).await;
        assert_eq!((&shown["status"], &shown["flags"][0]), (&"quarantined".into(), &"quarantined".into()));
    }
    let again = rig.deliver(&held.post(&[], keyless[0].as_bytes())).await;
    assert_eq!(again.0, "duplicate");
    assert_eq!(rig.stored().await, 12);

    let strict = Signs::preset("stripe", STRIPE, "strict");
    for body in keyless {
        rig.refused(&strict.post(&[], body.as_bytes()), 400, "missing_key").await;
    }
    assert_eq!(rig.stored().await, 12);
    assert_eq!(rig.deliver(&strict.post(&[], br#"{"id":"e1"}"#)).await.0, "accepted");
}

#[tokio::test]
async fn fault_30_composite_keys_do_not_run_into_each_other() {
    let rig = rig("");
    let pair = Signs::preset("github", GITHUB, "pair");
    let bodies = [
        r#"{"a":"ab","b":"c"}"#,
        r#"{"a":"a","b":"bc"}"#,
        r#"{"a":"2:ab,1:c","b":"x"}"#,
        r#"{"a":"1:a","b":"2:bc"}"#,
        r#"{"a":"a,1:b","b":"c"}"#,
        r#"{"a":"a","b":"1:b,c"}"#,
        r#"{"a":1,"b":23}"#,
        r#"{"a":12,"b":3}"#,
    ];
    let requests: Vec<_> = bodies.iter().map(|body| pair.post(&[], body.as_bytes())).collect();
    check_distinct(&rig, &requests).await;
    // A part is missing: never the empty string in its place.
    let (status, event) = rig.deliver(&pair.post(&[], br#"{"a":"ab"}"#)).await;
    assert_eq!(status, "accepted");
    assert!(text(&rig.show(&event).await["key"]).starts_with("sha256:"));
}

#[tokio::test]
async fn fault_31_forged_copies_of_a_known_event_are_401_and_leave_no_trace() {
    let rig = rig("");
    let body = br#"{"id":"evt_known","type":"a"}"#;
    let genuine = stripe().headers(&[], body, "", now());
    let (_, event) = rig.deliver(&raw("/webhooks/stripe", &genuine, body)).await;
    let unsigned = Headers::new();
    let forged = Signs::preset("stripe", "whsec_somebody_else", "stripe").headers(&[], body, "", now());
    let other_body = br#"{"id":"evt_known","type":"b"}"#;
    for _ in 0..20 {
        rig.refused(&raw("/webhooks/stripe", &unsigned, body), 401, "signature").await;
        rig.refused(&raw("/webhooks/stripe", &forged, body), 401, "signature").await;
        rig.refused(&raw("/webhooks/stripe", &genuine, other_body), 401, "signature").await;
    }
    // An unknown event is refused in exactly the same words: no oracle.
    let known = rig.send(&raw("/webhooks/stripe", &forged, body)).await.body;
    let unknown = rig.send(&raw("/webhooks/stripe", &forged, br#"{"id":"evt_other","type":"a"}"#)).await.body;
    assert_eq!(known, unknown);
    let shown = rig.show(&event).await;
    assert_eq!(shown["duplicates"], 0, "{shown}");
    assert_eq!(shown["duplicates_seen"], Value::Null);
    assert_eq!(shown["flags"], Value::Array(vec![]));
    let stats = rig.gateway.json("/api/stats").await;
    assert_eq!(
        (&stats["events"], &stats["duplicates"], &stats["conflicts"]),
        (&1.into(), &0.into(), &0.into())
    );
    assert_eq!(stats["rejected"], 62);
    assert_eq!(rig.deliver(&raw("/webhooks/stripe", &genuine, body)).await.0, "duplicate");
}

const SHORT: &str = "[server.limits]\nhead = \"1s\"\nbody = \"1s\"\n";

/// Waits until the other side closes; fails if that takes longer than the deadline and a little.
async fn check_closes(wire: &mut Wire, since: Instant, what: &str) {
    let closed = tokio::time::timeout(Duration::from_secs(6), wire.is_closed()).await;
    assert_eq!(closed, Ok(true), "{what} stayed open");
    let took = since.elapsed();
    assert!(took < Duration::from_secs(4), "{what} was open for {took:?}");
}

#[tokio::test]
async fn fault_76_slow_and_idle_connections_are_closed_in_time() {
    let rig = rig(SHORT);
    let since = Instant::now();
    let mut idle = rig.connect().await;
    let mut kept = rig.connect().await;
    assert_eq!(soon(kept.ask(&event(r#""evt_kept""#))).await.unwrap().status, 200);
    let mut head = rig.connect().await;
    head.send(b"POST /webhooks/stripe HTTP/1.1\r\nhost: localhost\r\n").await.unwrap();
    let mut body = rig.connect().await;
    body.send(b"POST /webhooks/stripe HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n")
        .await
        .unwrap();
    let mut in_chunks = rig.connect().await;
    let chunked =
        b"POST /webhooks/stripe HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n";
    in_chunks.send(chunked).await.unwrap();

    // Drip: a byte now and then must not buy more time.
    let drip = async {
        for number in 0..40 {
            let alive = head.send(format!("x-{number}: y\r\n").as_bytes()).await.is_ok();
            let alive = body.send(b" ").await.is_ok() || alive;
            let alive = in_chunks.send(b"1\r\nx\r\n").await.is_ok() || alive;
            if !alive {
                break;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    soon(drip).await;
    check_closes(&mut idle, since, "an idle connection").await;
    check_closes(&mut kept, since, "an idle connection after a request").await;
    assert!(since.elapsed() < Duration::from_secs(5), "the drip was not stopped: {:?}", since.elapsed());
    assert_eq!(rig.stored().await, 1);

    // Who waits is told why.
    let since = Instant::now();
    let mut wire = rig.connect().await;
    wire.send(b"POST /webhooks/stripe HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
        .await
        .unwrap();
    let answer = soon(wire.answer()).await.unwrap();
    check_error(&answer, 408, "body_timeout");
    check_closes(&mut wire, since, "a slow body").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fault_76_a_thousand_slow_connections_do_not_slow_a_genuine_client() {
    let rig = rig("[server.limits]\nhead = \"4s\"\nbody = \"4s\"\n");
    let mut slow = Vec::new();
    for number in 0..1_500 {
        let mut wire = rig.connect().await;
        match number % 3 {
            0 => {}
            1 => wire.send(b"POST /webhooks/stripe HTTP/1.1\r\nhost: l").await.unwrap(),
            _ => {
                let head =
                    b"POST /webhooks/stripe HTTP/1.1\r\nhost: l\r\ncontent-length: 1000\r\n\r\n{\"id\"";
                wire.send(head).await.unwrap();
            }
        }
        slow.push(wire);
    }
    let mut slowest = Duration::ZERO;
    for number in 0..100 {
        let started = Instant::now();
        let request = event(&format!("\"evt_{number}\""));
        // New connections and a kept one alike.
        assert_eq!(rig.deliver(&request).await.0, "accepted");
        slowest = slowest.max(started.elapsed());
    }
    assert!(slowest < Duration::from_secs(1), "{slowest:?}");
    assert!(rig.gateway.json("/readyz").await["ready"].as_bool().unwrap());
    // All of them are sent away in the end.
    let started = Instant::now();
    for wire in &mut slow {
        assert!(soon(wire.is_closed()).await);
    }
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
    assert_eq!(rig.stored().await, 100);
}

#[tokio::test]
async fn fault_76_beyond_the_cap_connections_get_503_and_places_come_back() {
    let rig = rig("[server.limits]\nconnections = 20\nhead = \"30s\"\n");
    let mut held = Vec::new();
    for number in 0..20 {
        let mut wire = rig.connect().await;
        // An answer proves that the place is taken.
        assert_eq!(soon(wire.ask(&event(&format!("\"evt_{number}\"")))).await.unwrap().status, 200);
        held.push(wire);
    }
    for _ in 0..5 {
        let mut turned_away = rig.connect().await;
        let answer = soon(turned_away.answer()).await.unwrap();
        check_error(&answer, 503, "connections");
        assert!(soon(turned_away.is_closed()).await);
    }
    // Those inside are served on, and operators too.
    assert_eq!(soon(held[7].ask(&event("\"evt_inside\""))).await.unwrap().status, 200);
    let metrics = String::from_utf8(rig.gateway.get("/metrics").await.body).unwrap();
    assert!(
        metrics.contains("oncehook_unavailable_total{source=\"-\",reason=\"connections\"} 5"),
        "{metrics}"
    );
    held.truncate(10);
    let recovered = async {
        loop {
            let mut wire = rig.connect().await;
            if wire.ask(&event("\"evt_after\"")).await.is_ok_and(|answer| answer.status == 200) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    soon(recovered).await;
}

/// Dawdlers hold connections, not the places that honest senders need.
#[tokio::test]
async fn fault_76_senders_that_dawdle_in_the_body_take_no_place() {
    let rig = rig("[server.limits]\nin_flight = 5\nbody = \"30s\"\n");
    let mut dawdlers = Vec::new();
    for number in 0..20 {
        let request = event(&format!("\"evt_slow_{number}\""));
        let mut wire = rig.connect().await;
        wire.send(&request[..request.len() - 1]).await.unwrap();
        dawdlers.push((wire, request[request.len() - 1]));
    }
    tokio::time::sleep(Duration::from_millis(200)).await;
    for number in 0..10 {
        let answer = soon(rig.connect().await.ask(&event(&format!("\"evt_{number}\"")))).await.unwrap();
        assert_eq!(answer.status, 200);
    }
    // And a dawdler that ends is served like anybody.
    let (mut wire, last) = dawdlers.pop().unwrap();
    assert_eq!(soon(wire.ask(&[last])).await.unwrap().status, 200);
}

fn sized(bytes: usize) -> Vec<u8> {
    let start = r#"{"id":"evt_sized","pad":""#;
    let mut body = start.as_bytes().to_vec();
    body.resize(bytes - 2, b'x');
    body.extend_from_slice(b"\"}");
    body
}

#[tokio::test]
async fn fault_77_bodies_over_the_limit_are_413_and_never_cut() {
    let limits = "[server.limits]\nbody_bytes = 4096\nbody = \"2s\"\n";
    let rig = rig(limits);
    let signs = stripe();
    let large = sized(4097);

    // By its length alone, before a byte of the body.
    let request = signs.post(&[], &large);
    let head = request.len() - large.len();
    let answer = rig.refused(&request[..head], 413, "body_too_large").await;
    assert_eq!(answer.header("connection"), Some("close"));
    // And with all of it, in one piece or in chunks.
    rig.refused(&request, 413, "body_too_large").await;
    rig.refused(&signs.chunked(&[], &large, 1), 413, "body_too_large").await;
    rig.refused(&signs.chunked(&[], &large, 1000), 413, "body_too_large").await;
    rig.refused(&signs.chunked(&[], &large, 8000), 413, "body_too_large").await;
    // A body whose first 4096 bytes are a genuine event of their own is not cut there.
    let mut trailing = sized(4096);
    let headers = signs.headers(&[], &trailing, "", now());
    trailing.push(b' ');
    rig.refused(&raw("/webhooks/stripe", &headers, &trailing), 413, "body_too_large").await;
    assert_eq!(rig.stored().await, 0);

    // Exactly at the limit is fine.
    let exact = sized(4096);
    let (status, event) = rig.deliver(&signs.post(&[], &exact)).await;
    assert_eq!(status, "accepted");
    assert_eq!(rig.body(&event).await, exact);
    assert_eq!(rig.deliver(&signs.chunked(&[], &exact, 100)).await, ("duplicate".to_owned(), event));
    assert_eq!(rig.stored().await, 1);
}

#[tokio::test]
async fn fault_77_a_sender_of_a_huge_body_still_sees_the_413() {
    let rig = rig("[server.limits]\nbody_bytes = 4096\n");
    let mut refused = 0;
    for _ in 0..10 {
        let request = stripe().post(&[], &sized(3 << 20));
        let received = exchange(rig.gateway.ingress, &request).await.expect("the connection is closed");
        if statuses(&received) == [413] {
            refused += 1;
        }
    }
    assert_eq!(refused, 10, "senders that saw their 413, of 10");
    assert_eq!(rig.stored().await, 0);
}

#[tokio::test]
async fn fault_77_a_lying_length_stores_nothing() {
    let rig = rig(SHORT);
    let body = br#"{"id":"evt_lie","type":"a"}"#;
    let headers = stripe().headers(&[], body, "", now());
    let lie = |length: &str| {
        let mut request = format!("POST /webhooks/stripe HTTP/1.1\r\nhost: l\r\n{length}").into_bytes();
        write_headers(&mut request, &headers);
        request.extend_from_slice(b"\r\n");
        request.extend_from_slice(body);
        request
    };
    // Shorter than the body: what was signed is not what arrived, and the rest is no request.
    let received = exchange(rig.gateway.ingress, &lie("content-length: 5\r\n")).await.unwrap();
    assert_eq!(statuses(&received)[0], 401, "{}", String::from_utf8_lossy(&received));
    assert!(!statuses(&received).contains(&200));
    // Longer than the body: it never ends.
    let received = exchange(rig.gateway.ingress, &lie("content-length: 2000\r\n")).await.unwrap();
    assert!(matches!(statuses(&received)[..], [400 | 408]), "{}", String::from_utf8_lossy(&received));
    // No length at all: the body is empty.
    let received = exchange(rig.gateway.ingress, &lie("")).await.unwrap();
    assert_eq!(statuses(&received)[0], 401);
    // Lengths that are none, or two.
    for length in [
        "content-length: -1\r\n",
        "content-length: +27\r\n",
        "content-length: 0x1b\r\n",
        "content-length: 27, 27\r\n",
        "content-length: 99999999999999999999\r\n",
        "content-length: 27\r\ncontent-length: 28\r\n",
        "content-length: 27abc\r\n",
        "content-length:\r\n",
    ] {
        let received = exchange(rig.gateway.ingress, &lie(length)).await.unwrap();
        assert!(!statuses(&received).contains(&200), "{length:?}: {}", String::from_utf8_lossy(&received));
    }
    assert_eq!(rig.stored().await, 0);
}

#[tokio::test]
async fn fault_78_encoded_bodies_are_415() {
    let rig = rig("");
    let body = br#"{"id":"evt_enc","type":"a"}"#;
    for encoding in [
        "gzip",
        "zstd",
        "br",
        "deflate",
        "GZIP",
        "x-gzip",
        "identity, gzip",
        "gzip, identity",
        "compress",
        "utf-8",
    ] {
        let request = stripe().post(&[("content-encoding", encoding)], body);
        rig.refused(&request, 415, "content_encoding").await;
    }
    rig.refused(
        &stripe().post(&[("content-encoding", "identity"), ("content-encoding", "gzip")], body),
        415,
        "content_encoding",
    )
    .await;
    assert_eq!(rig.stored().await, 0);
    for encoding in ["identity", "Identity"] {
        rig.deliver(&stripe().post(&[("content-encoding", encoding)], body)).await;
    }
    assert_eq!(rig.stored().await, 1);
}

const LARGE: &str = "[server.limits]\nbody_bytes = 8388608\n";

#[tokio::test]
async fn fault_79_monstrous_json_is_stored_byte_for_byte() {
    let rig = rig(LARGE);
    let deep = 100_000;
    let keys: String = (0..100_000).map(|number| format!("\"k{number}\":{number},")).collect();
    let bodies = [
        format!(r#"{{"id":"deep","data":{}1{}}}"#, "[".repeat(deep), "]".repeat(deep)),
        format!(r#"{{"id":"deep_object","data":{}1{}}}"#, r#"{"object":"#.repeat(deep), "}".repeat(deep)),
        format!("{}{}", "[".repeat(deep), "]".repeat(deep)),
        format!(r#"{{"id":"number","other":{}}}"#, "7".repeat(1_000_000)),
        format!(r#"{{"id":{},"data":1}}"#, "7".repeat(1_000_000)),
        format!(r#"{{"created":{},"id":"time"}}"#, "9".repeat(1_000)),
        r#"{"created":1e999999999,"id":"exponent"}"#.to_owned(),
        format!(r#"{{{keys}"id":"wide"}}"#),
        format!(r#"{{"id":"nul","data":"a{}b"}}"#, "\\u0000"),
        r#"{"id":"surrogate","other":"\ud800"}"#.to_owned(),
        "{\"id\":\"cut".to_owned(),
        String::new(),
    ];
    for body in &bodies {
        let started = Instant::now();
        let (status, event) = rig.deliver(&stripe().post(&[], body.as_bytes())).await;
        let start: String = body.chars().take(40).collect();
        assert_eq!(status, "accepted", "{start}");
        assert!(started.elapsed() < Duration::from_secs(5), "{start}: {:?}", started.elapsed());
        assert_eq!(rig.body(&event).await, body.as_bytes(), "{start}");
        assert_eq!(rig.deliver(&stripe().post(&[], body.as_bytes())).await, ("duplicate".to_owned(), event));
    }
    // Bytes that are no text at all.
    let bytes: Vec<u8> = (0..=255).collect();
    let (_, event) = rig.deliver(&stripe().post(&[], &bytes)).await;
    assert_eq!(rig.body(&event).await, bytes);
    assert_eq!(rig.gateway.events().await.len(), bodies.len() + 1);
}

#[tokio::test]
async fn fault_79_json_that_parsers_read_differently_is_quarantined() {
    let rig = rig("");
    let number = format!(r#"{{"id":"number","data":{}}}"#, "7".repeat(100_000));
    let bodies = [
        // Infinity to some parsers and an error to others, where we look for an object.
        number.as_str(),
        r#"{"id":"evt_1","id":"evt_2","type":"a"}"#,
        r#"{"id":"evt_1","\u0069d":"evt_2","type":"a"}"#,
        r#"{"id":"evt_3","type":"a","type":"b"}"#,
        r#"{"id":"evt_4","data":{"object":{"id":"x"}},"data":{"object":{"id":"y"}}}"#,
        r#"{"id":"evt_5","data":{"object":{"id":"x","id":"y"}}}"#,
        r#"{"id":"evt_\ud800","type":"a"}"#,
        r#"{"id":"evt_6","type":"a\ud800"}"#,
    ];
    for body in bodies {
        let (status, event) = rig.deliver(&stripe().post(&[], body.as_bytes())).await;
        assert_eq!(status, "quarantined", "{body}");
        let shown = rig.show(&event).await;
        assert_eq!(shown["status"], "quarantined", "{shown}");
        assert_eq!(shown["flags"], serde_json::json!(["quarantined"]), "{shown}");
        assert!(text(&shown["key"]).starts_with("sha256:"), "it stays out of the others' ids: {shown}");
        assert_eq!(rig.body(&event).await, body.as_bytes());
    }
    let listed = rig.gateway.json("/api/events?status=quarantined").await;
    assert_eq!(listed["events"].as_array().unwrap().len(), bodies.len());
    // Repeated names elsewhere are nobody's business.
    let (status, _) =
        rig.deliver(&stripe().post(&[], br#"{"id":"evt_1","x":1,"x":2,"data":{"y":1,"y":2}}"#)).await;
    assert_eq!(status, "accepted");
}

#[tokio::test]
async fn fault_79_numeric_ids_beyond_2_to_the_53_stay_distinct() {
    let rig = rig("");
    let requests: Vec<_> = [
        "9007199254740992",
        "9007199254740993",
        "18446744073709551615",
        "18446744073709551616",
        "1e3",
        "1000",
        "1.0",
        "1",
    ]
    .iter()
    .map(|id| event(id))
    .collect();
    let events = check_distinct(&rig, &requests).await;
    assert_eq!(rig.show(&events[1]).await["key"], "9007199254740993");
}

#[tokio::test]
async fn fault_80_keys_made_to_collide_cost_nothing() {
    let rig = rig(LARGE);
    // Strings that collide under common unkeyed hashes (Java's, djb2): combinations of "Aa" and "BB".
    let mut names = vec![String::new()];
    for _ in 0..16 {
        names = names.iter().flat_map(|name| [format!("{name}Aa"), format!("{name}BB")]).collect();
    }
    let members: String = names.iter().map(|name| format!("\"{name}\":0,")).collect();
    let body = format!(r#"{{{members}"id":"flood"}}"#);
    let started = Instant::now();
    let (status, event) = rig.deliver(&stripe().post(&[], body.as_bytes())).await;
    assert_eq!(status, "accepted");
    assert!(started.elapsed() < Duration::from_secs(3), "{:?}", started.elapsed());
    assert_eq!(rig.show(&event).await["key"], "flood");
    // The same as ids and as header names.
    for name in names.iter().take(200) {
        rig.deliver(&self::event(&format!("\"{name}\""))).await;
    }
    let headers: Vec<_> = names.iter().take(80).map(|name| (name.as_str(), "1")).collect();
    rig.deliver(&stripe().post(&headers, br#"{"id":"headers"}"#)).await;
    assert_eq!(rig.stored().await, 202);
}

/// A head with a genuine signature over `body`, and whatever framing.
fn framed(framing: &str, signed: &[u8], rest: &[u8]) -> Vec<u8> {
    let mut request = b"POST /webhooks/stripe HTTP/1.1\r\nhost: localhost\r\n".to_vec();
    write_headers(&mut request, &stripe().headers(&[], signed, "", now()));
    request.extend_from_slice(framing.as_bytes());
    request.extend_from_slice(b"\r\n");
    request.extend_from_slice(rest);
    request
}

#[tokio::test]
async fn fault_81_ambiguous_lengths_are_refused_and_nothing_is_smuggled() {
    let rig = rig(SHORT);
    let body = br#"{"id":"evt_outer","type":"a"}"#;
    let smuggled = event(r#""evt_smuggled""#);
    let chunked = chunks(body, 100);
    let both = chunked.len();
    let plain = body.len();
    // The framing, and the bytes after the head up to the request that must not be processed.
    let cases: Vec<(String, &[u8])> = vec![
        (format!("content-length: {both}\r\ntransfer-encoding: chunked\r\n"), &chunked),
        (format!("transfer-encoding: chunked\r\ncontent-length: {both}\r\n"), &chunked),
        (format!("content-length: {plain}\r\ntransfer-encoding: chunked\r\n"), &chunked),
        (format!("Content-Length : {plain}\r\ntransfer-encoding: chunked\r\n"), &chunked),
        (format!("content-length: {plain}\r\ntransfer-encoding: identity\r\n"), body),
        ("transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n".into(), &chunked),
        ("transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n".into(), &chunked),
        ("transfer-encoding: identity\r\ntransfer-encoding: chunked\r\n".into(), &chunked),
        ("transfer-encoding: gzip, chunked\r\n".into(), &chunked),
        ("transfer-encoding: chunked, chunked\r\n".into(), &chunked),
        ("transfer-encoding: chunked, identity\r\n".into(), &chunked),
        ("transfer-encoding: xchunked\r\n".into(), &chunked),
        ("transfer-encoding: chunkedx\r\n".into(), &chunked),
        ("transfer-encoding: \x0bchunked\r\n".into(), &chunked),
        ("transfer-encoding:\r\n".into(), &chunked),
        ("transfer-encoding : chunked\r\n".into(), &chunked),
        ("transfer-encoding: \"chunked\"\r\n".into(), &chunked),
        (format!("content-length: {plain}\r\ncontent-length: {both}\r\n"), body),
        (format!("content-length: {plain}, {both}\r\n"), body),
        (format!("content-length: {plain}\r\nx: y\r\n folded\r\n"), body),
        (format!("content-length: {plain}\r\ntransfer-encoding:\r\n chunked\r\n"), body),
    ];
    for (framing, rest) in cases {
        let mut bytes = framed(&framing, body, rest);
        bytes.extend_from_slice(&smuggled);
        let received = exchange(rig.gateway.ingress, &bytes).await;
        let received = received.unwrap_or_else(|| panic!("{framing:?}: the connection stayed open"));
        let shown = String::from_utf8_lossy(&received);
        assert_eq!(statuses(&received), [400], "{framing:?}: {shown}");
    }
    assert_eq!(rig.stored().await, 0);
}

#[tokio::test]
async fn fault_81_the_same_on_paths_that_do_not_exist() {
    let rig = rig(SHORT);
    let smuggled = event(r#""evt_smuggled""#);
    for line in ["POST /nowhere HTTP/1.1", "GET /webhooks/stripe HTTP/1.1", "PUT /webhooks/stripe HTTP/1.1"] {
        for framing in [
            "content-length: 5\r\ntransfer-encoding: chunked\r\n",
            "transfer-encoding: chunked\r\ncontent-length: 5\r\n",
        ] {
            let mut bytes = format!("{line}\r\nhost: l\r\n{framing}\r\n0\r\n\r\n").into_bytes();
            bytes.extend_from_slice(&smuggled);
            let received = exchange(rig.gateway.ingress, &bytes).await;
            let received =
                received.unwrap_or_else(|| panic!("{line} {framing:?}: the connection stayed open"));
            let statuses = statuses(&received);
            assert_eq!(statuses.len(), 1, "{line} {framing:?}: {}", String::from_utf8_lossy(&received));
            assert!(matches!(statuses[0], 400 | 404 | 405), "{line} {framing:?}: {statuses:?}");
        }
    }
    assert_eq!(rig.stored().await, 0);
}

#[tokio::test]
async fn fault_81_a_pipelined_request_cannot_hide_its_length() {
    let rig = rig(SHORT);
    let body = br#"{"id":"evt_outer","type":"a"}"#;
    let chunked = chunks(body, 100);
    // The second request's length arrives together with the first request; what is read after the first answer looks
    // like the beginning of a plainly chunked one.
    let mut first = event(r#""evt_first""#);
    let hidden = framed(
        &format!(
            "content-length: {}\r\nx-a: POST /webhooks/stripe HTTP/1.1\r\ntransfer-encoding: chunked\r\n",
            body.len()
        ),
        body,
        &chunked,
    );
    let split = hidden.windows(4).position(|window| window == b"POST").map(|start| {
        let rest = &hidden[start + 4..];
        start + 4 + rest.windows(4).position(|window| window == b"POST").unwrap()
    });
    let (early, late) = hidden.split_at(split.unwrap());
    first.extend_from_slice(early);
    let mut wire = rig.connect().await;
    let answer = soon(wire.ask(&first)).await.unwrap();
    assert_eq!(answer.status, 200);
    wire.send(late).await.unwrap();
    let answer = soon(wire.answer()).await.unwrap();
    assert_eq!(answer.status, 400, "{}", String::from_utf8_lossy(&answer.body));
    assert!(soon(wire.is_closed()).await);
    assert_eq!(rig.stored().await, 1);
}

#[tokio::test]
async fn fault_81_broken_chunks_are_refused() {
    let rig = rig(SHORT);
    let body = br#"{"id":"evt_chunks","type":"a"}"#;
    let text = std::str::from_utf8(body).unwrap();
    let length = body.len();
    let smuggled = event(r#""evt_smuggled""#);
    let cases = [
        format!("-1\r\n{text}\r\n0\r\n\r\n"),
        format!("+{length:x}\r\n{text}\r\n0\r\n\r\n"),
        format!("0x{length:x}\r\n{text}\r\n0\r\n\r\n"),
        format!("zz\r\n{text}\r\n0\r\n\r\n"),
        format!("\r\n{text}\r\n0\r\n\r\n"),
        format!("fffffffffffffffff\r\n{text}\r\n0\r\n\r\n"),
        format!("10000000000000000{length:x}\r\n{text}\r\n0\r\n\r\n"),
        format!("{:x}\r\n{text}\r\n0\r\n\r\n", length - 1),
        format!("{:x}\r\n{text}0\r\n\r\n", length),
        format!("{length:x}\n{text}\n0\n\n"),
        format!("{length:x}\r{text}\r\n0\r\n\r\n"),
        format!("{length:x}; ext\n=x\r\n{text}\r\n0\r\n\r\n"),
        format!("{length:x};{}\r\n{text}\r\n0\r\n\r\n", "e".repeat(100_000)),
    ];
    for case in cases {
        let mut bytes = framed("transfer-encoding: chunked\r\n", body, case.as_bytes());
        bytes.extend_from_slice(&smuggled);
        let received = exchange(rig.gateway.ingress, &bytes).await;
        let start: String = case.chars().take(30).collect();
        let received = received.unwrap_or_else(|| panic!("{start:?}: the connection stayed open"));
        let statuses = statuses(&received);
        // Whoever breaks off in the middle may have seen his last byte.
        assert!(
            matches!(statuses[..], [] | [400 | 413]),
            "{start:?}: {}",
            String::from_utf8_lossy(&received)
        );
    }
    assert_eq!(rig.stored().await, 0);
}

#[tokio::test]
async fn fault_81_honest_framing_is_accepted() {
    let rig = rig(SHORT);
    let body = br#"{"id":"evt_plain","type":"a"}"#;
    // Chunked, again and again on one connection, with all that the standard allows.
    let mut wire = rig.connect().await;
    for (number, size) in [1, 7, 1_000].into_iter().enumerate() {
        let answer = soon(wire.ask(&stripe().chunked(&[], body, size))).await.unwrap();
        assert_eq!(answer.status, 200, "chunks of {size}: {}", String::from_utf8_lossy(&answer.body));
        assert_eq!(answer.json()["status"], if number == 0 { "accepted" } else { "duplicate" });
    }
    for framing in ["Transfer-Encoding: Chunked\r\n", "TRANSFER-ENCODING:chunked\r\n"] {
        let answer = soon(wire.ask(&framed(framing, body, &chunks(body, 9)))).await.unwrap();
        assert_eq!(answer.status, 200, "{framing}");
    }
    // Trailers are read and dropped.
    let mut trailed = chunks(body, 100);
    trailed.truncate(trailed.len() - 2);
    trailed.extend_from_slice(b"stripe-signature: nonsense\r\n\r\n");
    let answer = soon(wire.ask(&framed("transfer-encoding: chunked\r\n", body, &trailed))).await.unwrap();
    assert_eq!(answer.status, 200);
    // With a length in between.
    assert_eq!(soon(wire.ask(&stripe().post(&[], body))).await.unwrap().status, 200);
    let events = rig.gateway.events().await;
    assert_eq!((events.len(), &events[0]["duplicates"]), (1, &6.into()));
}

#[tokio::test]
async fn fault_81_http_1_0_and_upgrades() {
    let rig = rig(SHORT);
    let body = br#"{"id":"evt_old","type":"a"}"#;
    let old = |framing: &str, rest: &[u8]| {
        let request = framed(framing, body, rest);
        let text = String::from_utf8(request).unwrap();
        text.replacen("HTTP/1.1", "HTTP/1.0", 1).into_bytes()
    };
    // HTTP/1.0 closes, unless it asks to go on; then the next request is answered.
    let received = exchange(rig.gateway.ingress, &old(&format!("content-length: {}\r\n", body.len()), body))
        .await
        .unwrap();
    assert_eq!(statuses(&received), [200]);
    let mut wire = rig.connect().await;
    let keep = old(&format!("content-length: {}\r\nconnection: keep-alive\r\n", body.len()), body);
    assert_eq!(soon(wire.ask(&keep)).await.unwrap().status, 200);
    assert_eq!(soon(wire.ask(&keep)).await.unwrap().status, 200);
    // HTTP/1.0 knows no chunks.
    let mut bytes = old("transfer-encoding: chunked\r\nconnection: keep-alive\r\n", &chunks(body, 10));
    bytes.extend_from_slice(&event(r#""evt_smuggled""#));
    assert_eq!(statuses(&exchange(rig.gateway.ingress, &bytes).await.unwrap()), [400]);
    // An upgrade that nobody offered: refused, and what follows is not read as a request.
    for upgrade in [
        "connection: upgrade\r\nupgrade: websocket\r\n",
        "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n",
        "upgrade: h2c\r\n",
    ] {
        let mut bytes = framed(&format!("content-length: {}\r\n{upgrade}", body.len()), body, body);
        bytes.extend_from_slice(&event(r#""evt_smuggled""#));
        let received = exchange(rig.gateway.ingress, &bytes).await.unwrap();
        assert_eq!(statuses(&received), [400], "{upgrade:?}");
    }
    // HTTP/2 by prior knowledge, other versions, and noise.
    let smuggled = event(r#""evt_smuggled""#);
    for bytes in [
        &b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"[..],
        b"POST /webhooks/stripe HTTP/9.9\r\n\r\n",
        b"POST /webhooks/stripe\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"CONNECT localhost:80 HTTP/1.1\r\nhost: l\r\nconnection: close\r\n\r\n",
        b"\x00\x00\x00\r\n\r\n",
    ] {
        let received = exchange(rig.gateway.ingress, &[bytes, &smuggled].concat()).await.unwrap();
        assert!(!statuses(&received).contains(&200), "{bytes:?}: {}", String::from_utf8_lossy(&received));
    }
    assert_eq!(rig.stored().await, 1);
}

#[tokio::test]
async fn fault_81_pipelined_requests_are_answered_in_order() {
    let rig = rig(SHORT);
    let mut bytes = Vec::new();
    for number in 0..20 {
        bytes.extend_from_slice(&event(&format!("\"evt_{number}\"")));
        bytes.extend_from_slice(&raw("/webhooks/stripe", &Headers::new(), b"{}"));
    }
    let mut wire = rig.connect().await;
    wire.send(&bytes).await.unwrap();
    let mut events = Vec::new();
    for number in 0..20 {
        let answer = soon(wire.answer()).await.unwrap();
        assert_eq!(answer.status, 200, "{number}");
        events.push(text(&answer.json()["event"]));
        assert_eq!(soon(wire.answer()).await.unwrap().status, 401, "{number}");
    }
    for (number, event) in events.iter().enumerate() {
        assert_eq!(rig.show(event).await["key"], format!("evt_{number}"));
    }
}

#[tokio::test]
async fn fault_83_nothing_from_a_request_reaches_the_log() {
    let mut rig = Rig::start_with(SHORT, SOURCES, &SECRETS, &[("ONCEHOOK_LOG", "debug")]);
    const MARK: &str = "Zq7Mark";
    let nasty = [
        format!("{MARK}\u{1b}[31mred"),
        format!("{MARK}\u{202e}gnp.exe"),
        format!("{MARK}%0d%0a2026-01-01 INFO forged"),
        format!("{MARK}{}", "x".repeat(8_000)),
    ];
    for field in &nasty {
        let body = format!(r#"{{"id":"{MARK}","type":"{MARK}"}}"#);
        let mut headers = stripe().headers(&[], body.as_bytes(), "", now());
        for name in ["user-agent", "x-request-id", "x-forwarded-for", "content-type", "referer"] {
            headers = with(&headers, name, field);
            if field.len() > 1_000 {
                break;
            }
        }
        // Accepted, refused, misrouted, malformed.
        exchange(
            rig.gateway.ingress,
            &[raw("/webhooks/stripe", &with(&headers, "connection", "close"), body.as_bytes())].concat(),
        )
        .await;
        exchange(
            rig.gateway.ingress,
            &raw("/webhooks/stripe", &with(&headers, "stripe-signature", field), body.as_bytes()),
        )
        .await;
        exchange(rig.gateway.ingress, &raw(&format!("/webhooks/{field}"), &headers, body.as_bytes())).await;
        exchange(rig.gateway.ingress, format!("{field} / HTTP/1.1\r\n{field}: x\r\n\r\n").as_bytes()).await;
        exchange(
            rig.gateway.ingress,
            format!("POST / HTTP/1.1\r\nx: a\rb\nINFO {MARK}\0\r\n\r\n").as_bytes(),
        )
        .await;
    }
    let megabyte = format!("POST /webhooks/stripe HTTP/1.1\r\nx: {MARK}{}\r\n\r\n", "y".repeat(1 << 20));
    let received = exchange(rig.gateway.ingress, megabyte.as_bytes()).await.unwrap();
    assert!(matches!(statuses(&received)[..], [] | [431]), "{:?}", statuses(&received));
    let path = format!("POST /webhooks/{MARK}{} HTTP/1.1\r\n\r\n", "z".repeat(1 << 20));
    let received = exchange(rig.gateway.ingress, path.as_bytes()).await.unwrap();
    assert!(matches!(statuses(&received)[..], [] | [414 | 431]), "{:?}", statuses(&received));
    // The admin listener too.
    for field in &nasty {
        exchange(
            rig.gateway.admin,
            format!("GET /api/events/{field} HTTP/1.1\r\nhost: {MARK}.example\r\nconnection: close\r\n\r\n")
                .as_bytes(),
        )
        .await;
    }
    assert!(rig.gateway.stop().success());
    let log = rig.gateway.log();
    assert!(log.contains("refused requests"), "{log}");
    assert!(!log.contains(MARK), "{log}");
    for line in log.lines() {
        assert!(line.len() < 1_000, "{line}");
        assert!(!line.chars().any(char::is_control), "{line:?}");
    }
}

#[tokio::test]
async fn fault_84_forwarded_addresses_are_believed_from_proxies_only() {
    let sources = SOURCES.replacen(
        "secrets = [\"file:stripe.secret\"]",
        "secrets = [\"file:stripe.secret\"]\nallow_ips = [\"203.0.113.0/24\", \"2001:db8::/32\"]",
        1,
    );
    let body = br#"{"id":"evt_ip"}"#;
    let request = |forwarded: &[&str]| {
        let headers: Vec<_> = forwarded.iter().map(|value| ("x-forwarded-for", *value)).collect();
        stripe().post(&headers, body)
    };
    {
        // No proxy is trusted: the peer is the loopback address, whatever it claims.
        let rig = Rig::start("", &sources, &SECRETS);
        for forwarded in
            [&[][..], &["203.0.113.9"], &["203.0.113.9", "203.0.113.9"], &["127.0.0.1, 203.0.113.9"]]
        {
            rig.refused(&request(forwarded), 403, "address").await;
        }
        let spoofed = stripe().post(
            &[
                ("forwarded", "for=203.0.113.9"),
                ("x-real-ip", "203.0.113.9"),
                ("cf-connecting-ip", "203.0.113.9"),
            ],
            body,
        );
        rig.refused(&spoofed, 403, "address").await;
        // A forged request is not told whether its signature was right.
        rig.refused(&raw("/webhooks/stripe", &Headers::new(), body), 403, "address").await;
        // The other sources are open.
        rig.deliver(&Signs::preset("stripe", STRIPE, "held").post(&[], body)).await;
    }
    let rig = Rig::start("trusted_proxies = [\"127.0.0.0/8\", \"10.0.0.1\"]", &sources, &SECRETS);
    for forwarded in [
        &["203.0.113.9"][..],
        &["1.2.3.4, 203.0.113.9"],
        &["1.2.3.4", "203.0.113.9"],
        &["203.0.113.9, 10.0.0.1"],
        &["203.0.113.9:4711"],
        &["[2001:db8::7]:443"],
        &["2001:db8::7"],
    ] {
        rig.deliver(&request(forwarded)).await;
    }
    for forwarded in [
        &[][..],
        &["203.0.113.9, 198.51.100.1"],
        &["203.0.113.9", "198.51.100.1"],
        &["203.0.113.9, 10.0.0.2"],
        &["203.0.113.9, unknown"],
        &["203.0.113.9,"],
        &["::ffff:198.51.100.1"],
        &["2001:db9::7"],
    ] {
        rig.refused(&request(forwarded), 403, "address").await;
    }
    let event = &rig.gateway.events().await[0];
    let shown = rig.show(&text(&event["id"])).await;
    assert_eq!(shown["duplicates"], 6);
    let peers: Vec<_> = shown["duplicates_seen"]["latest"]
        .as_array()
        .unwrap()
        .iter()
        .map(|seen| text(&seen["peer"]))
        .collect();
    assert_eq!(
        peers,
        ["203.0.113.9", "203.0.113.9", "203.0.113.9", "203.0.113.9", "2001:db8::7", "2001:db8::7"]
    );
}

#[tokio::test]
async fn fault_85_one_path_per_source_and_nothing_else() {
    let rig = rig("");
    let body = br#"{"id":"evt_path"}"#;
    let headers = stripe().headers(&[], body, "", now());
    for path in [
        "/",
        "/webhooks",
        "/webhooks/",
        "/webhooks/stripe/",
        "/webhooks//stripe",
        "//webhooks/stripe",
        "/webhooks/Stripe",
        "/WEBHOOKS/stripe",
        "/webhooks/stripe/..",
        "/webhooks/./stripe",
        "/webhooks/x/../stripe",
        "/x/../webhooks/stripe",
        "/webhooks%2fstripe",
        "/webhooks/%73tripe",
        "/webhooks/stripe%00",
        "/webhooks/stripe%20",
        "/webhooks/stripe;x",
        "/webhooks/%c0%afstripe",
        "/webhooks/..%2fwebhooks/stripe",
        "/webhooks/stripe%2f",
        "/webhooks/strip",
        "/webhooks/stripex",
        "/api/events",
        "/healthz",
        "/metrics",
        "/webhooks/oncehook",
        "/webhooks/-",
        "http://localhost/webhooks/stripe",
        "http://evil.example/webhooks/stripe",
        "*",
    ] {
        let answer = rig.send(&raw(path, &headers, body)).await;
        assert!(
            matches!(answer.status, 404 | 400),
            "{path}: {} {}",
            answer.status,
            String::from_utf8_lossy(&answer.body)
        );
        if answer.status == 404 {
            check_error(&answer, 404, "not_found");
        }
    }
    // Bytes that no URI has.
    for path in [
        "/webhooks/stripe\u{ff0f}",
        "/webhooks/\u{0}stripe",
        "/webhooks/stripe x",
        "\\webhooks\\stripe",
        "webhooks/stripe",
    ] {
        let received =
            exchange(rig.gateway.ingress, &raw(path, &with(&headers, "connection", "close"), body))
                .await
                .unwrap();
        assert!(
            matches!(statuses(&received)[..], [400 | 404]),
            "{path:?}: {}",
            String::from_utf8_lossy(&received)
        );
    }
    assert_eq!(rig.stored().await, 0);
    for method in ["GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "post", "POSTX"] {
        let request =
            String::from_utf8(raw("/webhooks/stripe", &with(&headers, "connection", "close"), body)).unwrap();
        let request = request.replacen("POST", method, 1);
        let received = exchange(rig.gateway.ingress, request.as_bytes()).await.unwrap();
        assert_eq!(statuses(&received), [405], "{method}");
        assert!(String::from_utf8_lossy(&received).to_lowercase().contains("allow: post"), "{method}");
    }
    assert_eq!(rig.stored().await, 0);
    // A query is not part of the path.
    assert_eq!(rig.deliver(&raw("/webhooks/stripe", &headers, body)).await.0, "accepted");
    assert_eq!(rig.deliver(&raw("/webhooks/stripe?x=/../y", &headers, body)).await.0, "duplicate");
    assert_eq!(rig.deliver(&raw("/webhooks/stripe?", &headers, body)).await.0, "duplicate");
}

#[tokio::test]
async fn fault_70_a_refusal_never_tells_the_signature() {
    let mut rig = Rig::start_with(SHORT, SOURCES, &SECRETS, &[("ONCEHOOK_LOG", "trace")]);
    let body = br#"{"id":"evt_mac"}"#;
    let genuine = stripe().headers(&[], body, "", now());
    let signature = value(&genuine, "stripe-signature");
    let (_, expected) = signature.split_once("v1=").unwrap();
    let zeros = signature.replace(expected, &"0".repeat(64));
    let upper = signature.replace(
        expected,
        &format!("{}{}", &expected[..63], if expected.ends_with('0') { '1' } else { '0' }),
    );
    let mut seen = String::new();
    for wrong in [
        zeros,
        upper,
        signature.replace("v1=", "v0="),
        signature[..signature.len() - 1].to_owned(),
        "t=1".to_owned(),
    ] {
        let answer = rig
            .refused(
                &raw("/webhooks/stripe", &with(&genuine, "stripe-signature", wrong), body),
                401,
                "signature",
            )
            .await;
        seen.push_str(&answer.head);
        seen.push_str(&String::from_utf8_lossy(&answer.body));
    }
    seen.push_str(&String::from_utf8_lossy(&rig.gateway.get("/metrics").await.body));
    assert!(rig.gateway.stop().success());
    seen.push_str(&rig.gateway.log());
    for part in [expected, &expected[..16], &expected[48..]] {
        assert!(!seen.contains(part), "{seen}");
    }
}

#[tokio::test]
async fn fault_102_secrets_show_up_nowhere() {
    const CANARY: &str = "canary5e1f0";
    let stripe_secret = format!("whsec_{CANARY}_stripe");
    let gitlab_secret = format!("gitlab-{CANARY}-token");
    let admin_token = format!("admin-{CANARY}-token");
    let sources = "[[source]]\nname = \"stripe\"\nprovider = \"stripe\"\nsecrets = [\"file:stripe.secret\"]\n\
                   [[source]]\nname = \"gitlab\"\nprovider = \"gitlab\"\nsecrets = [\"file:gitlab.secret\"]\n";
    let secrets = [
        ("stripe.secret", stripe_secret.as_str()),
        ("gitlab.secret", &gitlab_secret),
        ("admin.token", &admin_token),
    ];
    let mut rig = Rig::start_with(
        "admin_token = \"file:admin.token\"",
        sources,
        &secrets,
        &[("ONCEHOOK_LOG", "trace")],
    );
    let mut seen = Vec::new();

    let gitlab = Signs::preset("gitlab", &gitlab_secret, "gitlab");
    let body = br#"{"object_kind":"issue"}"#;
    let credentials = [
        ("idempotency-key", "k1"),
        ("authorization", "Bearer canary5e1f0"),
        ("cookie", "s=canary5e1f0"),
        ("proxy-authorization", "canary5e1f0"),
    ];
    let (_, event) = rig.deliver(&gitlab.post(&credentials, body)).await;
    // The same with a conflict and a duplicate, and refusals around it.
    for request in [
        gitlab.post(&credentials, br#"{"object_kind":"push"}"#),
        gitlab.post(&credentials, body),
        Signs::preset("gitlab", &format!("{gitlab_secret}x"), "gitlab")
            .post(&[("idempotency-key", "k1")], body),
        Signs::preset("stripe", &stripe_secret, "stripe").post(&[], br#"{"id":"evt_1"}"#),
        Signs::preset("stripe", &gitlab_secret, "stripe").post(&[], br#"{"id":"evt_1"}"#),
        raw(
            "/webhooks/gitlab",
            &vec![
                ("x-gitlab-token".into(), gitlab_secret.clone().into()),
                ("x-gitlab-token".into(), gitlab_secret.clone().into()),
            ],
            body,
        ),
        raw(&format!("/webhooks/{gitlab_secret}"), &Headers::new(), body),
    ] {
        let answer = rig.send(&request).await;
        seen.extend_from_slice(answer.head.as_bytes());
        seen.extend_from_slice(&answer.body);
    }
    let admin = rig.gateway.admin;
    for path in [
        "/api/events",
        &format!("/api/events/{event}"),
        &format!("/api/events/{event}/body"),
        "/api/stats",
        "/metrics",
        "/readyz",
        "/healthz",
        "/api/openapi.json",
        "/api/nothing",
    ] {
        for authorization in [&admin_token, &format!("{admin_token}x")] {
            let request = format!(
                "GET {path} HTTP/1.1\r\nhost: {admin}\r\nauthorization: Bearer {authorization}\r\n\r\n"
            );
            let answer = soon(oncehook_testkit::sender::ask(admin, request.as_bytes())).await.unwrap();
            seen.extend_from_slice(answer.head.as_bytes());
            seen.extend_from_slice(&answer.body);
            if path == format!("/api/events/{event}") && authorization == &admin_token {
                assert_eq!(answer.status, 200);
                let headers = answer.json()["headers"].to_string();
                assert!(
                    headers.contains("idempotency-key") && !headers.contains("x-gitlab-token"),
                    "{headers}"
                );
            }
        }
    }
    assert!(rig.gateway.stop().success());
    seen.extend_from_slice(rig.gateway.log().as_bytes());
    for arguments in [&["check"][..], &["check", "--json"], &["--help"], &["events"]] {
        let (_, out, err) = crate::kit::run(rig.directory.path(), arguments);
        seen.extend_from_slice(out.as_bytes());
        seen.extend_from_slice(err.as_bytes());
    }
    // The journal itself holds what was kept, and no token.
    for file in ["journal.db", "journal.db-wal"] {
        seen.extend_from_slice(&std::fs::read(rig.directory.path().join(file)).unwrap_or_default());
    }
    assert!(seen.len() > 10_000);
    let found = seen.windows(CANARY.len()).filter(|window| *window == CANARY.as_bytes()).count();
    assert_eq!(found, 0, "a secret was shown");
}
