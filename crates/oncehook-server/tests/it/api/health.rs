//! What is told about the gateway itself: metrics, its description, health, numbers.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::{github, names, rig, stripe};
use crate::kit::{Signs, text};

/// Reads OpenMetrics text as strictly as a scraper would: samples by name and labels.
pub(super) fn parse_metrics(text: &str) -> BTreeMap<String, f64> {
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
        assert!(samples.insert(series.to_owned(), value.parse().unwrap()).is_none(), "{series} is there twice");
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
    assert_eq!(answer.header("content-type"), Some("application/openmetrics-text; version=1.0.0; charset=utf-8"));
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
    let readable = names(&document["paths"]).into_iter().filter(|path| document["paths"][path]["get"].is_object());
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
    assert_eq!(parameters, ["source", "type", "status", "key", "entity", "since", "until", "limit", "cursor"]);
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
    assert_eq!(names(&ready), ["durability", "failing", "journal", "paused", "ready", "self_test", "status"]);
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
    for (name, value) in [("events", 3), ("duplicates", 1), ("conflicts", 1), ("quarantined", 1), ("rejected", 1)] {
        assert_eq!(stats[name], value, "{name}: {stats}");
    }
    assert_eq!(stats["duplicate_rate"], 0.25);
    let sources: Vec<_> = stats["sources"]
        .as_array()
        .unwrap()
        .iter()
        .map(|source| {
            (text(&source["source"]), source["events"].as_u64().unwrap(), source["rejected"].as_u64().unwrap())
        })
        .collect();
    assert_eq!(sources, [("batch".to_owned(), 0, 0), ("github".to_owned(), 1, 1), ("stripe".to_owned(), 2, 0)]);
    for name in ["kind", "durability", "queued", "queue_limit", "index_lag", "wal_pages", "failing"] {
        assert!(stats["journal"].get(name).is_some(), "{name}: {stats}");
    }
    assert!(!stats.to_string().contains("probe"), "the self-test shows: {stats}");
}
