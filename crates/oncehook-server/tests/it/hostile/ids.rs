//! Ids that look alike, are strange, missing, put together of parts, or forged.

use oncehook_testkit::gateway::now;
use serde_json::Value;

use super::{GITHUB, STRIPE, event, github, rig, stripe};
use crate::kit::{Headers, Rig, Signs, raw, text, with};

pub(super) async fn check_distinct(rig: &Rig, requests: &[Vec<u8>]) -> Vec<String> {
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
        let found: Vec<_> = found["events"].as_array().unwrap().iter().map(|event| text(&event["id"])).collect();
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
    let requests: Vec<_> =
        ids.iter().map(|id| raw("/webhooks/github", &with(&headers, "x-github-delivery", id), body)).collect();
    let events = check_distinct(&rig, &requests).await;
    assert_eq!(rig.show(&events[0]).await["key"], "hex:6480");
    assert_eq!(rig.show(&events[3]).await["key"], "d\u{e9}");
    // The page of all events is still JSON.
    assert_eq!(rig.gateway.events().await.len(), 4);
}

#[tokio::test]
async fn fault_29_an_event_without_an_id_follows_the_declared_policy() {
    let rig = rig("");
    let keyless =
        [r#"{"type":"a"}"#, r#"{"type":"b"}"#, r#"{"id":null,"type":"a"}"#, r#"{"id":"","type":"a"}"#, "[]", "no json"];
    // Each source: the same bodies.
    let by_digest: Vec<_> = keyless.iter().map(|body| stripe().post(&[], body.as_bytes())).collect();
    let events = check_distinct(&rig, &by_digest).await;
    for event in &events {
        let shown = rig.show(event).await;
        assert!(text(&shown["key"]).starts_with("sha256:"), "{shown}");
        assert_eq!(shown["flags"], serde_json::json!(["key_missing"]), "{shown}");
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
    assert_eq!((&stats["events"], &stats["duplicates"], &stats["conflicts"]), (&1.into(), &0.into(), &0.into()));
    assert_eq!(stats["rejected"], 62);
    assert_eq!(rig.deliver(&raw("/webhooks/stripe", &genuine, body)).await.0, "duplicate");
}
