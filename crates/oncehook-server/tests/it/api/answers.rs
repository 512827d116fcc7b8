//! Bodies, and what senders are answered that the API tells as well: conflicts, batches, suspected replays.

use std::time::{Duration, Instant};

use serde_json::json;

use super::{STRIPE, batch, check_time, github, names, rig, stripe};
use crate::kit::{Signs, soon, text};

#[tokio::test]
async fn fault_99_a_body_is_a_download_and_never_a_page() {
    let rig = rig();
    let body = "<script>alert(1)</script>";
    let page = Signs::preset("stripe", STRIPE, "stripe")
        .post(&[("content-type", "text/html; charset=utf-7")], body.as_bytes());
    let (_, event) = rig.deliver(&page).await;
    let answer = rig.gateway.get(&format!("/api/events/{event}/body")).await;
    assert_eq!(answer.body, body.as_bytes());
    for (name, value) in [
        ("content-type", "application/octet-stream"),
        ("content-disposition", "attachment"),
        ("x-content-type-options", "nosniff"),
        ("oncehook-content-type", "text/html; charset=utf-7"),
        ("content-security-policy", "default-src 'none'"),
        ("cache-control", "no-store"),
    ] {
        assert_eq!(answer.header(name), Some(value), "{}", answer.head);
    }
    // The other answers are JSON and say so, and nobody is allowed to read them from elsewhere.
    for path in ["/api/events", &format!("/api/events/{event}"), "/api/stats", "/api/openapi.json", "/healthz"] {
        let answer = rig.gateway.get(path).await;
        assert_eq!(answer.header("content-type"), Some("application/json"), "{path}");
        assert_eq!(answer.header("x-content-type-options"), Some("nosniff"), "{path}");
        assert_eq!(answer.header("access-control-allow-origin"), None, "{path}");
    }
}

#[tokio::test]
async fn another_body_under_a_known_key_is_a_conflict() {
    let rig = rig();
    let (_, event) = rig.deliver(&stripe(r#"{"id":"e1","amount":1}"#)).await;
    let first = rig.show(&event).await;
    for _ in 0..3 {
        assert_eq!(rig.deliver(&stripe(r#"{"id":"e1","amount":2}"#)).await, ("conflict".to_owned(), event.clone()));
    }
    let shown = rig.show(&event).await;
    assert_eq!(shown["flags"], json!(["conflict"]));
    assert_eq!((&shown["digest"], &shown["size"], &shown["duplicates"]), (&first["digest"], &first["size"], &0.into()));
    assert_eq!(rig.body(&event).await, br#"{"id":"e1","amount":1}"#);
    let conflicts = shown["conflicts"].as_array().unwrap();
    assert_eq!(conflicts.len(), 1);
    assert_eq!(names(&conflicts[0]), ["count", "digest", "first_at", "last_at", "size"]);
    assert_eq!((&conflicts[0]["count"], &conflicts[0]["size"]), (&3.into(), &22.into()));
    assert_ne!(conflicts[0]["digest"], shown["digest"]);
    check_time(&conflicts[0]["first_at"]);
    // One row per body, eight at most, the rest counted.
    for amount in 3..15 {
        assert_eq!(rig.deliver(&stripe(&format!(r#"{{"id":"e1","amount":{amount}}}"#))).await.0, "conflict");
    }
    let shown = rig.show(&event).await;
    let conflicts = shown["conflicts"].as_array().unwrap();
    let kept = conflicts.iter().filter(|conflict| conflict["digest"].is_string()).count();
    let beyond = conflicts.iter().find(|conflict| conflict["digest"].is_null()).unwrap();
    assert_eq!((kept, &beyond["count"]), (8, &5.into()), "{shown}");
    // The genuine one is a duplicate still, and a field that changes between attempts is no conflict.
    assert_eq!(rig.deliver(&stripe(r#"{"id":"e1","amount":1}"#)).await.0, "duplicate");
    rig.deliver(&stripe(r#"{"id":"e2","pending_webhooks":1}"#)).await;
    assert_eq!(rig.deliver(&stripe(r#"{"id":"e2","pending_webhooks":2}"#)).await.0, "duplicate");
    assert_eq!(rig.stored().await, 2);
}

#[tokio::test]
async fn a_batch_is_answered_event_by_event() {
    let rig = rig();
    let request = batch(
        r#"{"events":[{"id":"b1","type":"t","about":"x"}, {"id":"b2"},{"id":"b1","type":"t","about":"x"},{"id":"b2","z":1}]}"#,
    );
    let answer = rig.send(&request).await;
    assert_eq!(answer.status, 200);
    let json = answer.json();
    assert_eq!(names(&json), ["events"]);
    let events = json["events"].as_array().unwrap();
    let statuses: Vec<_> = events.iter().map(|event| text(&event["status"])).collect();
    assert_eq!(statuses, ["accepted", "accepted", "duplicate", "conflict"]);
    assert_eq!(events[0]["event"], events[2]["event"]);
    assert_eq!(events[1]["event"], events[3]["event"]);
    let shown = rig.show(&text(&events[0]["event"])).await;
    assert_eq!((&shown["key"], &shown["type"], &shown["entity"]), (&"b1".into(), &"t".into(), &"x".into()));
    assert_eq!(rig.body(&text(&events[0]["event"])).await, br#"{"id":"b1","type":"t","about":"x"}"#);
    assert_eq!(rig.send(&batch(r#"{"events":[]}"#)).await.json(), json!({ "events": [] }));
    rig.refused(&batch(r#"{"event":[]}"#), 400, "not_a_batch").await;
    let many: Vec<_> = (0..1_001).map(|number| format!("{{\"id\":\"m{number}\"}}")).collect();
    rig.refused(&batch(&format!("{{\"events\":[{}]}}", many.join(","))), 400, "too_many_items").await;
    assert_eq!(rig.stored().await, 2, "all or nothing");
    let thousand = rig.send(&batch(&format!("{{\"events\":[{}]}}", many[..1_000].join(",")))).await;
    assert_eq!(thousand.json()["events"].as_array().unwrap().len(), 1_000);
    assert_eq!(rig.stored().await, 1_002);
}

#[tokio::test]
async fn the_same_body_under_a_new_unsigned_key_is_a_suspected_replay() {
    let rig = rig();
    let body = r#"{"action":"opened","issue":{"number":1}}"#;
    let (_, first) = rig.deliver(&github("d1", body)).await;
    let (status, second) = rig.deliver(&github("d2", body)).await;
    let (_, other) = rig.deliver(&github("d3", r#"{"action":"closed"}"#)).await;
    assert_eq!(status, "accepted");
    let started = Instant::now();
    let flagged = async {
        while rig.show(&second).await["flags"] != json!(["suspected_replay"]) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    soon(flagged).await;
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
    for event in [first, other] {
        assert_eq!(rig.show(&event).await["flags"], json!([]));
    }
    // Where the signature covers the key, the same content twice is nothing odd.
    let (_, event) = rig.deliver(&stripe(r#"{"id":"e1"}"#)).await;
    tokio::time::sleep(Duration::from_millis(600)).await;
    assert_eq!(rig.show(&event).await["flags"], json!([]));
}
