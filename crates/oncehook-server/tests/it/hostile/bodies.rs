//! Bodies that are too big, encoded, shorter or longer than they say, or JSON made to hurt.

use std::time::{Duration, Instant};

use oncehook_testkit::gateway::now;

use super::ids::check_distinct;
use super::{SHORT, event, rig, stripe};
use crate::kit::{exchange, raw, statuses, text, write_headers};

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
    for encoding in
        ["gzip", "zstd", "br", "deflate", "GZIP", "x-gzip", "identity, gzip", "gzip, identity", "compress", "utf-8"]
    {
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
    let (status, _) = rig.deliver(&stripe().post(&[], br#"{"id":"evt_1","x":1,"x":2,"data":{"y":1,"y":2}}"#)).await;
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
