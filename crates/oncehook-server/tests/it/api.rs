//! The admin API as operators and scripts see it: its shapes are a promise.

mod access;
mod answers;
mod health;
mod ledger;

use std::time::{Duration, Instant};

use oncehook_testkit::gateway::now;
use oncehook_testkit::sender::ask;
use oncehook_verify::UnixMicros;
use serde_json::{Value, json};

use crate::kit::{Rig, Signs, check_error, soon, text};

const STRIPE: &str = "whsec_api_stripe";
const GITHUB: &str = "github api secret";
const SECRETS: [(&str, &str); 2] = [("stripe.secret", STRIPE), ("github.secret", GITHUB)];

const SOURCES: &str = r#"
[[source]]
name = "stripe"
provider = "stripe"
secrets = ["file:stripe.secret"]

[[source]]
name = "github"
provider = "github"
secrets = ["file:github.secret"]
on_outage = "retry"

[[source]]
name = "batch"
provider = "custom"
secrets = ["file:github.secret"]
[source.verify]
algorithm = "hmac-sha256"
key = "utf8"
content = "{body}"
signature = { header = "x-hub-signature-256", grammar = { prefix = "sha256=" }, encoding = "hex" }
[source.identify]
items = "/events"
key = "/id"
type = "/type"
entity = "/about"
"#;

fn rig() -> Rig {
    Rig::start("", SOURCES, &SECRETS)
}

fn stripe(body: &str) -> Vec<u8> {
    Signs::preset("stripe", STRIPE, "stripe").post(&[], body.as_bytes())
}

fn github(delivery: &str, body: &str) -> Vec<u8> {
    let headers = [("x-github-delivery", delivery), ("x-github-event", "issues")];
    Signs::preset("github", GITHUB, "github").post(&headers, body.as_bytes())
}

fn batch(body: &str) -> Vec<u8> {
    Signs::preset("github", GITHUB, "batch").post(&[], body.as_bytes())
}

fn names(value: &Value) -> Vec<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

fn check_time(value: &Value) {
    let time = value.as_str().unwrap();
    assert!(time.ends_with('Z') && UnixMicros::parse_rfc3339(time).is_some(), "{time}");
}

#[tokio::test]
async fn an_event_has_the_promised_fields() {
    let rig = rig();
    let before = now();
    let body = r#"{"id":"evt_1","type":"charge.paid","created":1700000000,"data":{"object":{"id":"ch_1"}}}"#;
    let (_, event) = rig.deliver(&stripe(body)).await;
    for _ in 0..3 {
        assert_eq!(rig.deliver(&stripe(body)).await, ("duplicate".to_owned(), event.clone()));
    }
    let listed = rig.gateway.json("/api/events").await;
    assert_eq!(names(&listed), ["events", "next"]);
    assert_eq!(listed["next"], Value::Null);
    let listed = &listed["events"][0];
    let mut promised = [
        "id",
        "source",
        "key",
        "type",
        "entity",
        "status",
        "flags",
        "reasons",
        "paused",
        "integrity",
        "occurred_at",
        "received_at",
        "size",
        "duplicates",
        "deliveries",
    ];
    promised.sort_unstable();
    assert_eq!(names(listed), promised);
    let received = text(&listed["received_at"]);
    check_time(&listed["received_at"]);
    let received = UnixMicros::parse_rfc3339(&received).unwrap();
    assert!(received >= before && received <= now());
    let mut expected = json!({
        "id": event, "source": "stripe", "key": "evt_1", "type": "charge.paid", "entity": "ch_1", "status": "unrouted",
        "flags": [], "reasons": {}, "paused": false, "integrity": "body", "occurred_at": "2023-11-14T22:13:20.000000Z", "received_at": listed["received_at"],
        "size": body.len(), "duplicates": 3, "deliveries": [],
    });
    assert_eq!(*listed, expected);

    let shown = rig.show(&event).await;
    for (name, value) in expected.as_object_mut().unwrap() {
        assert_eq!(shown[name], *value, "{name}");
    }
    assert_eq!(shown["digest"].as_str().unwrap().len(), 64);
    let headers = shown["headers"].as_array().unwrap();
    assert!(headers.iter().any(|header| header[0] == "stripe-signature"), "{headers:?}");
    assert!(!headers.iter().any(|header| header[0] == "host" || header[0] == "content-length"), "{headers:?}");
    let seen = &shown["duplicates_seen"];
    check_time(&seen["first_at"]);
    check_time(&seen["last_at"]);
    assert_eq!(seen["latest"].as_array().unwrap().len(), 3);
    assert_eq!(seen["latest"][0]["peer"], "127.0.0.1");
    check_time(&seen["latest"][0]["at"]);
    assert_eq!(shown["conflicts"], json!([]));

    // An event about which less is known.
    let (_, bare) = rig.deliver(&stripe("{}")).await;
    let shown = rig.show(&bare).await;
    for name in ["type", "entity", "occurred_at", "duplicates_seen"] {
        assert_eq!(shown[name], Value::Null, "{name}");
    }
}

#[tokio::test]
async fn counts_outlive_the_flush() {
    let rig = rig();
    let body = r#"{"id":"evt_1"}"#;
    let (_, event) = rig.deliver(&stripe(body)).await;
    for _ in 0..20 {
        rig.deliver(&stripe(body)).await;
    }
    // From memory first, from the tables later, and never both.
    let started = Instant::now();
    while started.elapsed() < Duration::from_millis(1_500) {
        assert_eq!(rig.show(&event).await["duplicates"], 20);
        assert_eq!(rig.gateway.json("/api/stats").await["duplicates"], 20);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let shown = rig.show(&event).await;
    assert_eq!(shown["duplicates_seen"]["latest"].as_array().unwrap().len(), 8, "the last eight are kept");
}

/// Keys of the events that a query finds, newest first.
async fn found(rig: &Rig, query: &str) -> Vec<String> {
    let page = rig.gateway.json(&format!("/api/events?{query}")).await;
    page["events"].as_array().unwrap().iter().map(|event| text(&event["key"])).collect()
}

#[tokio::test]
async fn events_are_found_by_every_filter() {
    let rig = rig();
    rig.deliver(&stripe(r#"{"id":"s1","type":"a.b","data":{"object":{"id":"x&y=1"}}}"#)).await;
    rig.deliver(&stripe(r#"{"id":"s2","type":"a.c","data":{"object":{"id":"pi_2"}}}"#)).await;
    rig.deliver(&stripe(r#"{"id":"s3","type":"a.b","type":"q"}"#)).await;
    let (_, s4) = rig.deliver(&stripe(r#"{"id":"s4","type":"A.B"}"#)).await;
    tokio::time::sleep(Duration::from_millis(20)).await;
    let between = now().to_rfc3339();
    tokio::time::sleep(Duration::from_millis(20)).await;
    rig.deliver(&github("g1", r#"{"action":"opened","repository":{"id":7}}"#)).await;
    rig.deliver(&github("s4", r#"{"action":"closed","repository":{"id":7}}"#)).await;

    let quarantined = found(&rig, "status=quarantined").await;
    assert!(quarantined.len() == 1 && quarantined[0].starts_with("sha256:"), "{quarantined:?}");
    for (query, keys) in [
        ("source=github", &["s4", "g1"][..]),
        ("source=nobody", &[]),
        ("type=a.b", &["s1"]),
        ("type=a", &[]),
        ("type=A.B", &["s4"]),
        ("type=issues.opened", &["g1"]),
        ("entity=x%26y%3D1", &["s1"]),
        ("entity=7", &["s4", "g1"]),
        ("entity=7&type=issues.closed", &["s4"]),
        ("entity=7&source=stripe", &[]),
        ("key=s2", &["s2"]),
        ("key=S2", &[]),
        ("key=s4", &["s4", "s4"]),
        ("key=s4&source=stripe", &["s4"]),
        ("status=unrouted&source=stripe", &["s4", "s2", "s1"]),
        ("status=succeeded", &[]),
        ("limit=2", &["s4", "g1"]),
        (&format!("since={between}"), &["s4", "g1"]),
        (&format!("until={between}&type=a.b"), &["s1"]),
        (&format!("until={between}&limit=1"), &["s4"]),
        (&format!("since={between}&until={between}"), &[]),
        ("since=2020-01-01T00:00:00Z&until=2020-01-02T00:00:00%2B01:00", &[]),
    ] {
        assert_eq!(found(&rig, query).await, keys, "{query}");
    }
    // The boundaries: since includes, until does not.
    let at = text(&rig.show(&s4).await["received_at"]);
    assert_eq!(found(&rig, &format!("since={at}&source=stripe")).await, ["s4"]);
    assert_eq!(found(&rig, &format!("until={at}&type=A.B")).await, Vec::<String>::new());
}

#[tokio::test]
async fn pages_follow_each_other_without_gaps_or_repeats() {
    let rig = rig();
    for number in 0..25 {
        rig.deliver(&stripe(&format!(r#"{{"id":"e{number:02}","type":"t{}"}}"#, number % 2))).await;
    }
    for (filter, total) in [("", 25), ("&source=stripe", 25), ("&type=t1", 12), ("&status=unrouted", 25)] {
        for limit in [1, 4, 5, 24, 25, 26] {
            let mut keys = Vec::new();
            let mut cursor = String::new();
            loop {
                assert!(keys.len() <= total, "limit={limit}{filter}: the pages do not end");
                let page = rig.gateway.json(&format!("/api/events?limit={limit}{filter}{cursor}")).await;
                let events = page["events"].as_array().unwrap();
                assert!(events.len() <= limit);
                keys.extend(events.iter().map(|event| text(&event["key"])));
                match page["next"].as_str() {
                    Some(next) => {
                        assert!(
                            next.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_'),
                            "{next}"
                        );
                        cursor = format!("&cursor={next}");
                    }
                    None => break,
                }
                // What comes in meanwhile does not disturb.
                rig.deliver(&stripe(r#"{"id":"e00","type":"t0"}"#)).await;
            }
            assert_eq!(keys.len(), total, "limit={limit}{filter}");
            assert!(keys.is_sorted_by(|a, b| a > b), "{keys:?}");
        }
    }
}

#[tokio::test]
async fn wrong_parameters_are_400_and_unknown_ids_404() {
    let rig = rig();
    rig.deliver(&stripe(r#"{"id":"e1"}"#)).await;
    for query in [
        "limit=0",
        "limit=1001",
        "limit=-1",
        "limit=ten",
        "limit=1.5",
        "limit=99999999999999999999",
        "limit=",
        "status=done",
        "status=",
        "since=yesterday",
        "until=1700000000",
        "since=",
        "since=2026-13-01T00:00:00Z",
        "cursor=1",
        "cursor=",
        "cursor=%00",
        "key=",
        "key=hex:zz",
        "key=hex:",
        "colour=red",
        "Source=stripe",
        "limit=1&limit=2",
    ] {
        let answer = rig.gateway.get(&format!("/api/events?{query}")).await;
        assert_eq!(answer.status, 400, "{query}: {}", String::from_utf8_lossy(&answer.body));
        check_error(&answer, 400, "query");
    }
    for id in
        ["00000000-0000-7000-8000-000000000000", "nothing", "1", "%00", "..", "ffffffff-ffff-ffff-ffff-ffffffffffff"]
    {
        for path in [format!("/api/events/{id}"), format!("/api/events/{id}/body")] {
            let answer = rig.gateway.get(&path).await;
            assert_eq!(answer.status, 404, "{path}");
            assert!(answer.json()["error"]["code"].is_string(), "{path}: {}", String::from_utf8_lossy(&answer.body));
        }
    }
    // A known id with another tail is another id.
    let id = text(&rig.gateway.events().await[0]["id"]);
    let other = format!("{}{}", &id[..35], if id.ends_with('0') { '1' } else { '0' });
    for path in [format!("/api/events/{other}"), format!("/api/events/{other}/body")] {
        check_error(&rig.gateway.get(&path).await, 404, "no_event");
    }
    check_error(&rig.gateway.get("/api/nothing").await, 404, "not_found");
    check_error(&rig.gateway.get("/").await, 404, "not_found");
    for (method, path) in [("POST", "/api/events"), ("DELETE", "/api/stats"), ("PUT", "/healthz")] {
        let request = format!("{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n");
        let answer = soon(ask(rig.gateway.admin, request.as_bytes())).await.unwrap();
        check_error(&answer, 405, "method");
        assert!(answer.header("allow").is_some_and(|allow| allow.contains("GET")), "{}", answer.head);
    }
    // The front door is not here, and this is not there.
    let answer = soon(ask(rig.gateway.admin, &stripe(r#"{"id":"e2"}"#))).await.unwrap();
    assert_eq!(answer.status, 404);
    assert_eq!(rig.stored().await, 1);
}
