//! The admin API as operators and scripts see it: its shapes are a promise.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use oncehook_testkit::gateway::{Gateway, now};
use oncehook_testkit::sender::{Answer, ask};
use oncehook_verify::UnixMicros;
use serde_json::{Value, json};

use crate::kit::{Rig, Signs, check_error, run, soon, text};

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
        "flags": [], "integrity": "body", "occurred_at": "2023-11-14T22:13:20.000000Z", "received_at": listed["received_at"],
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
    assert!(
        !headers.iter().any(|header| header[0] == "host" || header[0] == "content-length"),
        "{headers:?}"
    );
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
                            next.bytes()
                                .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_'),
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
    for id in [
        "00000000-0000-7000-8000-000000000000",
        "nothing",
        "1",
        "%00",
        "..",
        "ffffffff-ffff-ffff-ffff-ffffffffffff",
    ] {
        for path in [format!("/api/events/{id}"), format!("/api/events/{id}/body")] {
            let answer = rig.gateway.get(&path).await;
            assert_eq!(answer.status, 404, "{path}");
            assert!(
                answer.json()["error"]["code"].is_string(),
                "{path}: {}",
                String::from_utf8_lossy(&answer.body)
            );
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

async fn admin(rig: &Rig, path: &str, host: &str, authorization: Option<&str>) -> Answer {
    let authorization = authorization.map_or_else(String::new, |value| format!("authorization: {value}\r\n"));
    let request = format!("GET {path} HTTP/1.1\r\nhost: {host}\r\n{authorization}connection: close\r\n\r\n");
    soon(ask(rig.gateway.admin, request.as_bytes())).await.unwrap()
}

const GUARDED: [&str; 8] = [
    "/metrics",
    "/api/events",
    "/api/stats",
    "/api/openapi.json",
    "/api/events/x",
    "/api/events/x/body",
    "/api/nothing",
    "/",
];

#[tokio::test]
async fn fault_100_a_token_is_asked_for_on_every_call() {
    let secrets = [SECRETS[0], SECRETS[1], ("token", "s3cret-admin-token\n")];
    let rig = Rig::start("admin_token = \"file:token\"", SOURCES, &secrets);
    for path in ["/healthz", "/readyz"] {
        assert_eq!(admin(&rig, path, "localhost", None).await.status, 200, "{path}");
    }
    for path in GUARDED {
        for wrong in [
            None,
            Some("Bearer wrong"),
            Some("Bearer "),
            Some("Bearer"),
            Some("Basic czNjcmV0LWFkbWluLXRva2Vu"),
            Some("s3cret-admin-token"),
            Some("Bearer s3cret-admin-toke"),
            Some("Bearer s3cret-admin-token2"),
            Some("Bearer S3CRET-ADMIN-TOKEN"),
            Some("Bearer  s3cret-admin-token"),
        ] {
            let answer = admin(&rig, path, "localhost", wrong).await;
            check_error(&answer, 401, "token");
        }
        let right = admin(&rig, path, "localhost", Some("Bearer s3cret-admin-token")).await.status;
        assert!(matches!(right, 200 | 404), "{path}: {right}");
        assert_eq!(admin(&rig, path, "localhost", Some("bearer s3cret-admin-token")).await.status, right);
    }
    // A token in the query is no token.
    check_error(&admin(&rig, "/api/events?token=s3cret-admin-token", "localhost", None).await, 401, "token");
    // Health checks say nothing beyond health.
    let ready = admin(&rig, "/readyz", "localhost", None).await.json();
    assert!(!ready.to_string().contains("stripe"), "{ready}");
}

#[tokio::test]
async fn fault_100_a_foreign_host_is_refused_everywhere() {
    let rig = Rig::start("admin_hosts = [\"Gateway.Internal\"]", SOURCES, &SECRETS);
    let port = rig.gateway.admin.port();
    for path in GUARDED.iter().chain(&["/healthz", "/readyz"]) {
        for foreign in [
            "evil.example",
            &format!("evil.example:{port}"),
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "evil.example@localhost",
            "localhost@evil.example",
            "",
            "[::1",
            "gateway.internal.evil.example",
            "localhost.",
        ] {
            let answer = admin(&rig, path, foreign, None).await;
            assert!(matches!(answer.status, 400 | 403), "{path} at {foreign:?}: {}", answer.status);
            if answer.status == 403 {
                check_error(&answer, 403, "host");
            }
        }
        for own in [
            "localhost",
            &format!("localhost:{port}"),
            "LOCALHOST",
            "127.0.0.1",
            &format!("127.0.0.1:{port}"),
            "[::1]",
            "192.0.2.7",
            "gateway.internal",
            &format!("GATEWAY.internal:{port}"),
        ] {
            let answer = admin(&rig, path, own, None).await;
            assert!(matches!(answer.status, 200 | 404), "{path} at {own}: {}", answer.status);
        }
    }
    // None, and two.
    for hosts in
        ["", "host: localhost\r\nhost: evil.example\r\n", "host: evil.example\r\nhost: localhost\r\n"]
    {
        let request = format!("GET /api/events HTTP/1.1\r\n{hosts}connection: close\r\n\r\n");
        let answer = soon(ask(rig.gateway.admin, request.as_bytes())).await.unwrap();
        assert!(matches!(answer.status, 400 | 403), "{hosts:?}: {}", answer.status);
    }
    // An absolute form does not get around it.
    for request in [
        "GET http://localhost/api/events HTTP/1.1\r\nhost: evil.example",
        "GET http://evil.example/api/events HTTP/1.1\r\nhost: evil.example",
    ] {
        let answer =
            soon(ask(rig.gateway.admin, format!("{request}\r\nconnection: close\r\n\r\n").as_bytes()))
                .await
                .unwrap();
        check_error(&answer, 403, "host");
    }
}

#[test]
fn a_public_admin_listener_needs_a_token() {
    let config = format!("[server]\ningress = \"127.0.0.1:0\"\nadmin = \"0.0.0.0:0\"\n{SOURCES}");
    let directory = crate::kit::directory(&config, &SECRETS);
    let (code, _, err) = run(directory.path(), &["serve"]);
    assert_eq!(code, 1);
    assert!(err.contains("is not on a loopback address and has no `admin_token`"), "{err}");
    assert!(!directory.path().join("oncehook.db").exists(), "nothing was started");
}

/// Reads OpenMetrics text as strictly as a scraper would: samples by name and labels.
fn parse_metrics(text: &str) -> BTreeMap<String, f64> {
    assert!(text.ends_with("\n# EOF\n"), "{text}");
    let mut types: BTreeMap<&str, &str> = BTreeMap::new();
    let mut samples = BTreeMap::new();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            assert!(types.insert(name, kind).is_none(), "{name} is declared twice");
            continue;
        }
        if line.starts_with("# HELP ") || line.starts_with("# UNIT ") || line == "# EOF" {
            continue;
        }
        let (series, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("{line:?}"));
        let name = series.split('{').next().unwrap();
        assert!(name.starts_with("oncehook_"), "{line}");
        let family = ["_total", "_bucket", "_sum", "_count"]
            .iter()
            .find_map(|suffix| name.strip_suffix(suffix))
            .filter(|family| types.contains_key(family))
            .unwrap_or(name);
        match (types.get(family), name.strip_prefix(family).unwrap()) {
            (Some(&"counter"), "_total")
            | (Some(&"gauge"), "")
            | (Some(&"histogram"), "_bucket" | "_sum" | "_count") => {}
            found => panic!("{line}: {found:?}"),
        }
        assert!(
            samples.insert(series.to_owned(), value.parse().unwrap()).is_none(),
            "{series} is there twice"
        );
    }
    samples
}

#[tokio::test]
async fn metrics_are_openmetrics_with_the_promised_names() {
    let rig = rig();
    rig.deliver(&stripe(r#"{"id":"e1"}"#)).await;
    rig.deliver(&stripe(r#"{"id":"e1"}"#)).await;
    rig.deliver(&stripe(r#"{"id":"e1","x":1}"#)).await;
    rig.deliver(&stripe(r#"{"id":"e2","id":"e3"}"#)).await;
    rig.refused(&Signs::preset("stripe", "whsec_other", "stripe").post(&[], b"{}"), 401, "signature").await;
    rig.refused(&crate::kit::raw("/webhooks/stripe", &vec![], b"{}"), 401, "signature").await;
    let answer = rig.gateway.get("/metrics").await;
    assert_eq!(
        answer.header("content-type"),
        Some("application/openmetrics-text; version=1.0.0; charset=utf-8")
    );
    let samples = parse_metrics(std::str::from_utf8(&answer.body).unwrap());
    for (name, value) in [
        ("oncehook_accepted_total{source=\"stripe\"}", 2.0),
        ("oncehook_accepted_total{source=\"github\"}", 0.0),
        // The gateway that stored it has the receipt, so the copy never reaches the journal.
        ("oncehook_duplicates_total{source=\"stripe\",layer=\"memory\"}", 1.0),
        ("oncehook_duplicates_total{source=\"stripe\",layer=\"journal\"}", 0.0),
        ("oncehook_conflicts_total{source=\"stripe\"}", 1.0),
        ("oncehook_quarantined_total{source=\"stripe\"}", 1.0),
        ("oncehook_rejected_total{source=\"stripe\",reason=\"signature_mismatch\"}", 1.0),
        ("oncehook_rejected_total{source=\"stripe\",reason=\"missing_header\"}", 1.0),
        ("oncehook_ack_seconds_count", 4.0),
        ("oncehook_ack_seconds_bucket{le=\"+Inf\"}", 4.0),
        ("oncehook_ready", 1.0),
        ("oncehook_in_flight", 0.0),
    ] {
        assert_eq!(samples.get(name), Some(&value), "{name}: {samples:#?}");
    }
    assert!(samples.contains_key("oncehook_ack_seconds_bucket{le=\"0.01\"}"), "{samples:#?}");
    assert!(samples.keys().any(|name| name.starts_with("oncehook_durability{")), "{samples:#?}");
    // Buckets only ever grow.
    let mut buckets: Vec<(f64, f64)> = samples
        .iter()
        .filter_map(|(name, value)| {
            let bound = name.strip_prefix("oncehook_ack_seconds_bucket{le=\"")?.strip_suffix("\"}")?;
            Some((bound.replace("+Inf", "inf").parse().unwrap(), *value))
        })
        .collect();
    buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
    assert!(buckets.len() > 10 && buckets.is_sorted_by(|a, b| a.1 <= b.1), "{buckets:?}");
}

#[tokio::test]
async fn the_api_describes_itself() {
    let rig = rig();
    let document = rig.gateway.json("/api/openapi.json").await;
    assert!(text(&document["openapi"]).starts_with("3.1"), "{}", document["openapi"]);
    assert!(document["info"]["title"].is_string() && document["info"]["version"].is_string());
    let (_, event) = rig.deliver(&stripe(r#"{"id":"e1"}"#)).await;
    for path in [
        "/healthz",
        "/readyz",
        "/metrics",
        "/api/events",
        "/api/events/{id}",
        "/api/events/{id}/body",
        "/api/routes",
        "/api/stats",
    ] {
        assert!(document["paths"][path]["get"]["responses"]["200"].is_object(), "{path} is not described");
    }
    let readable =
        names(&document["paths"]).into_iter().filter(|path| document["paths"][path]["get"].is_object());
    // There is no replay to look at; `operate.rs` has one.
    for path in readable.filter(|path| !path.starts_with("/api/replays")) {
        assert_eq!(
            rig.gateway.get(&path.replace("{id}", &event)).await.status,
            200,
            "{path} is described but not there"
        );
    }
    let parameters: Vec<_> = document["paths"]["/api/events"]["get"]["parameters"]
        .as_array()
        .unwrap()
        .iter()
        .map(|parameter| text(&parameter["name"]))
        .collect();
    assert_eq!(
        parameters,
        ["source", "type", "status", "key", "entity", "since", "until", "limit", "cursor"]
    );
    // Every field of an event is described, and every described one is there.
    let described = names(&document["components"]["schemas"]["EventJson"]["properties"]).len();
    assert_eq!(described, rig.gateway.events().await[0].as_object().unwrap().len());
    // References lead somewhere.
    let whole = document.to_string();
    for reference in whole.split("\"#/").skip(1) {
        let pointer = format!("/{}", reference.split('"').next().unwrap());
        assert!(document.pointer(&pointer).is_some(), "{pointer}");
    }
}

#[tokio::test]
async fn health_and_readiness() {
    let rig = rig();
    assert_eq!(rig.gateway.json("/healthz").await, json!({ "status": "ok" }));
    let ready = rig.gateway.json("/readyz").await;
    assert_eq!(names(&ready), ["durability", "failing", "journal", "ready", "self_test", "status"]);
    assert_eq!(
        (&ready["ready"], &ready["status"], &ready["journal"]),
        (&true.into(), &"ready".into(), &"sqlite".into())
    );
    assert_eq!((&ready["self_test"], &ready["failing"]), (&"passed".into(), &Value::Null));
    assert!(matches!(ready["durability"].as_str(), Some("durable-fsync" | "process-crash-only")), "{ready}");
}

#[tokio::test]
async fn stats_add_up() {
    let rig = rig();
    rig.deliver(&stripe(r#"{"id":"e1"}"#)).await;
    rig.deliver(&stripe(r#"{"id":"e1"}"#)).await;
    rig.deliver(&stripe(r#"{"id":"e1","x":1}"#)).await;
    rig.deliver(&stripe(r#"{"id":"e2","id":"e3"}"#)).await;
    rig.deliver(&github("g1", "{}")).await;
    rig.refused(&crate::kit::raw("/webhooks/github", &vec![], b"{}"), 401, "signature").await;
    let stats = rig.gateway.json("/api/stats").await;
    for (name, value) in
        [("events", 3), ("duplicates", 1), ("conflicts", 1), ("quarantined", 1), ("rejected", 1)]
    {
        assert_eq!(stats[name], value, "{name}: {stats}");
    }
    assert_eq!(stats["duplicate_rate"], 0.25);
    let sources: Vec<_> = stats["sources"]
        .as_array()
        .unwrap()
        .iter()
        .map(|source| {
            (
                text(&source["source"]),
                source["events"].as_u64().unwrap(),
                source["rejected"].as_u64().unwrap(),
            )
        })
        .collect();
    assert_eq!(
        sources,
        [("batch".to_owned(), 0, 0), ("github".to_owned(), 1, 1), ("stripe".to_owned(), 2, 0)]
    );
    for name in ["kind", "durability", "queued", "queue_limit", "index_lag", "wal_pages", "failing"] {
        assert!(stats["journal"].get(name).is_some(), "{name}: {stats}");
    }
    assert!(!stats.to_string().contains("probe"), "the self-test shows: {stats}");
}

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
    for path in
        ["/api/events", &format!("/api/events/{event}"), "/api/stats", "/api/openapi.json", "/healthz"]
    {
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
        assert_eq!(
            rig.deliver(&stripe(r#"{"id":"e1","amount":2}"#)).await,
            ("conflict".to_owned(), event.clone())
        );
    }
    let shown = rig.show(&event).await;
    assert_eq!(shown["flags"], json!(["conflict"]));
    assert_eq!(
        (&shown["digest"], &shown["size"], &shown["duplicates"]),
        (&first["digest"], &first["size"], &0.into())
    );
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

fn alter(rig: &Rig, sql: &str) {
    let connection = rusqlite::Connection::open(rig.journal()).unwrap();
    connection.busy_timeout(Duration::from_secs(5)).unwrap();
    connection.execute_batch(sql).unwrap();
}

async fn wait_until_ready(rig: &Rig, ready: bool) -> Duration {
    let started = Instant::now();
    let changed = async {
        while rig.gateway.get("/readyz").await.status != if ready { 200 } else { 503 } {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    soon(changed).await;
    started.elapsed()
}

#[tokio::test]
async fn fault_105_a_ledger_that_forgets_closes_the_gate_until_it_is_mended() {
    let rig = rig();
    let (_, event) = rig.deliver(&stripe(r#"{"id":"e1"}"#)).await;
    alter(&rig, "ALTER TABLE oncehook_keys RENAME COLUMN key TO idempotency_key");
    // A copy of what this process has a receipt for is what it is. Neither a new event nor another body is waved through.
    assert_eq!(rig.deliver(&stripe(r#"{"id":"e1"}"#)).await, ("duplicate".to_owned(), event.clone()));
    for body in [r#"{"id":"e2"}"#, r#"{"id":"e1","x":1}"#] {
        let answer = rig.send(&stripe(body)).await;
        assert_eq!(answer.status, 503, "{}", String::from_utf8_lossy(&answer.body));
        assert!(answer.header("retry-after").is_some());
    }
    assert!(wait_until_ready(&rig, false).await < Duration::from_secs(2));
    let ready = rig.gateway.get("/readyz").await.json();
    assert_eq!((&ready["ready"], &ready["status"]), (&false.into(), &"not_ready".into()));
    assert!(ready["failing"].is_string(), "{ready}");
    assert_eq!(rig.send(&stripe(r#"{"id":"e3"}"#)).await.status, 503);
    // It is alive, and says so; it is not ready, and says so too.
    assert_eq!(rig.gateway.get("/healthz").await.status, 200);
    let metrics = rig.gateway.get("/metrics").await.body;
    assert_eq!(parse_metrics(std::str::from_utf8(&metrics).unwrap())["oncehook_ready"], 0.0);
    // It stays so for as long as the column has the wrong name, for copies too.
    tokio::time::sleep(Duration::from_millis(700)).await;
    rig.refused(&stripe(r#"{"id":"e3"}"#), 503, "not_ready").await;
    rig.refused(&stripe(r#"{"id":"e1"}"#), 503, "not_ready").await;

    alter(&rig, "ALTER TABLE oncehook_keys RENAME COLUMN idempotency_key TO key");
    assert!(wait_until_ready(&rig, true).await < Duration::from_secs(3));
    assert_eq!(rig.deliver(&stripe(r#"{"id":"e1"}"#)).await, ("duplicate".to_owned(), event));
    assert_eq!(rig.deliver(&stripe(r#"{"id":"e2"}"#)).await.0, "accepted");
    assert_eq!(rig.stored().await, 2);
}

#[tokio::test]
async fn fault_105_a_broken_schema_opens_no_port() {
    for change in [
        "ALTER TABLE oncehook_keys RENAME COLUMN key TO idempotency_key",
        "DROP TABLE oncehook_keys; CREATE TABLE oncehook_keys (source TEXT, key BLOB, event BLOB, digest BLOB, first_seen INTEGER, expires_at INTEGER)",
        "DROP TABLE oncehook_keys",
    ] {
        let mut rig = rig();
        assert!(rig.gateway.stop().success());
        alter(&rig, change);
        let mut command = std::process::Command::new(crate::kit::BINARY);
        command.arg("serve");
        let log = match Gateway::try_start(command, rig.directory.path()) {
            Ok(_) => panic!("it started after {change}"),
            Err(log) => log,
        };
        assert!(log.contains("schema check failed"), "{log}");
        assert!(!log.contains("http://"), "{log}");
        let (code, _, _) = run(rig.directory.path(), &["serve"]);
        assert_eq!(code, 1);
    }
}
