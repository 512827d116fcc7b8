//! Orders for many events at once.

use std::time::{Duration, Instant};

use oncehook_testkit::gateway::Gateway;
use serde_json::json;

use super::{call, client, deliver, execute, finished, number, order, parsed, post, rig, until, write_client_config};
use crate::kit::{BINARY, check_error, text};

#[tokio::test]
async fn many_dead_letters_are_retried_at_once() {
    let rig = rig();
    let mut events = Vec::new();
    for number in 0..25 {
        events.push(deliver(&rig, &format!("evt_{number}"), "gone").await);
    }
    let fine = deliver(&rig, "evt_fine", "order.paid").await;
    for event in &events {
        until(&rig, event, "dead").await;
    }
    until(&rig, &fine, "succeeded").await;
    execute(&rig, "CREATE TABLE later (event TEXT)");
    let filter = json!({ "status": "dead", "source": "stripe", "type": "gone" });

    // A dry run touches nothing.
    let found = order(&rig, "/api/replays", &json!({ "filter": filter, "verb": "retry", "dry_run": true })).await;
    assert_eq!((&found["matched"], &found["complete"]), (&json!(25), &json!(true)), "{found}");
    assert_eq!(found["statuses"], json!({ "dead": 25 }));
    assert_eq!(found["events"].as_array().unwrap().len(), 10);
    assert_eq!(found["events"][0], json!(events.last().unwrap()));
    let (code, out, err) = client(&rig, &["retry", "--status", "dead", "--dry-run"]);
    assert!(code == 0 && err.is_empty() && out.starts_with("retry: 25 events\n  25 dead\n"), "{out}{err}");
    assert_eq!(number(&rig, "SELECT count(*) FROM later"), 0);

    // Without a terminal somebody must have said yes.
    let (code, out, err) = client(&rig, &["retry", "--status", "dead"]);
    assert!(code == 1 && out.is_empty() && err.contains("--yes"), "{err}");
    assert!(err.contains("retry: 25 events"), "what it would have done is shown: {err}");
    assert_eq!(number(&rig, "SELECT count(*) FROM later"), 0);

    let (code, out, _) =
        client(&rig, &["retry", "--status", "dead", "--type", "gone", "--yes", "--json", "--reason", "made it"]);
    let progress = parsed(&out);
    assert_eq!(code, 0, "{out}");
    for (name, value) in [
        ("state", json!("done")),
        ("matched", json!(25)),
        ("done", json!(25)),
        ("changed", json!(25)),
        ("failed", json!(0)),
        ("errors", json!([])),
    ] {
        assert_eq!(progress[name], value, "{name} of {progress}");
    }
    for event in &events {
        let shown = until(&rig, event, "succeeded").await;
        assert_eq!(shown["audit"][0]["reason"], "made it");
    }
    assert_eq!(number(&rig, "SELECT count(*) FROM later"), 25);
    // Once more there is nothing to do.
    let (code, out, _) = client(&rig, &["retry", "--status", "dead", "--yes"]);
    assert_eq!((code, out.as_str()), (0, "done: 0 found, 0 changed, 0 left as they were, 0 failed\n"));
    // And replaying what took effect changes nothing, however often (fault 54).
    for _ in 0..2 {
        let (code, out, _) = client(&rig, &["replay", "--source", "stripe", "--yes"]);
        assert_eq!((code, out.as_str()), (0, "done: 26 found, 0 changed, 26 left as they were, 0 failed\n"));
    }
    assert_eq!((number(&rig, "SELECT count(*) FROM later"), number(&rig, "SELECT count(*) FROM orders")), (25, 1));
}

#[tokio::test]
async fn events_from_before_a_route_are_offered_to_it() {
    let mut rig = rig();
    let event = deliver(&rig, "evt_1", "refund").await;
    assert_eq!(rig.show(&event).await["status"], "unrouted");
    assert!(rig.gateway.stop().success());
    let path = rig.directory.path().join("oncehook.toml");
    let config = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, config.replace("[\"order.*\"]", "[\"order.*\", \"refund\"]")).unwrap();
    rig.gateway = Gateway::start(BINARY.as_ref(), rig.directory.path());
    write_client_config(&rig, "");
    let (code, out, err) = client(&rig, &["replay", "--status", "unrouted", "--yes"]);
    assert!(code == 0 && out.starts_with("done: 1 found, 1 changed"), "{out}{err}");
    until(&rig, &event, "succeeded").await;
    assert_eq!(number(&rig, "SELECT count(*) FROM orders"), 1);
}

#[tokio::test]
async fn a_forced_replay_of_many_is_safe_to_repeat() {
    let rig = rig();
    let mut events = Vec::new();
    for number in 0..5 {
        events.push(deliver(&rig, &format!("evt_{number}"), "order.paid").await);
    }
    for event in &events {
        until(&rig, event, "succeeded").await;
    }
    // One of them is ahead of the others.
    let one = format!("/api/events/{}/replay", events[0]);
    order(&rig, &one, &json!({ "force": true, "epoch": 1, "reason": "x" })).await;
    let (code, _, err) = client(&rig, &["replay", "--source", "stripe", "--force", "--reason", "r", "--yes"]);
    assert!(code == 1 && err.contains("--epoch"), "{err}");
    let forced = ["replay", "--source", "stripe", "--force", "--epoch", "1", "--reason", "r", "--yes"];
    let (code, out, _) = client(&rig, &forced);
    assert_eq!((code, out.as_str()), (0, "done: 5 found, 4 changed, 1 left as they were, 0 failed\n"));
    for event in &events {
        until(&rig, event, "succeeded").await;
    }
    let (code, out, _) = client(&rig, &forced);
    assert_eq!((code, out.as_str()), (0, "done: 5 found, 0 changed, 5 left as they were, 0 failed\n"));
    assert_eq!(number(&rig, "SELECT count(*) FROM orders"), 10);
    // An epoch that none of them has reached is a mistake, told event by event.
    let (code, out, _) =
        client(&rig, &["replay", "--source", "stripe", "--force", "--epoch", "9", "--reason", "r", "--yes"]);
    assert!(code == 1 && out.starts_with("done: 5 found, 0 changed, 0 left as they were, 5 failed\n"), "{out}");
    assert_eq!(out.matches("the next epoch is 2").count(), 5, "{out}");
    assert_eq!(number(&rig, "SELECT count(*) FROM orders"), 10);
}

#[tokio::test]
async fn one_replay_at_a_time_paced_and_cancelled() {
    let rig = rig();
    order(&rig, "/api/routes/gone/pause", &json!({})).await;
    for number in 0..30 {
        deliver(&rig, &format!("evt_{number}"), "gone").await;
    }
    let slow = json!({ "filter": { "type": "gone" }, "rate": 2 });
    let answer = post(&rig, "/api/replays", &slow).await;
    assert_eq!(answer.status, 202);
    let replay = text(&answer.json()["replay"]);
    let busy = post(&rig, "/api/replays", &slow).await;
    check_error(&busy, 409, "busy");
    assert!(text(&busy.json()["error"]["message"]).contains(&replay));
    // A dry run is no replay.
    let found = order(&rig, "/api/replays", &json!({ "filter": { "type": "gone" }, "dry_run": true })).await;
    assert_eq!(found["matched"], 30);
    tokio::time::sleep(Duration::from_millis(1_600)).await;
    let progress = rig.gateway.json(&format!("/api/replays/{replay}")).await;
    assert_eq!((&progress["state"], &progress["matched"]), (&json!("running"), &json!(30)));
    assert!(progress["done"].as_u64().is_some_and(|done| (2..=5).contains(&done)), "{progress}");
    assert_eq!(call(&rig, "DELETE", &format!("/api/replays/{replay}"), &[], "").await.status, 200);
    let progress = finished(&rig, &replay).await;
    assert_eq!(progress["state"], "cancelled");
    assert!(progress["done"].as_u64().is_some_and(|done| done < 10), "{progress}");
    // The place is free again, and a fast one is fast.
    let started = Instant::now();
    let answer = post(&rig, "/api/replays", &json!({ "filter": { "type": "gone" }, "rate": 10_000 })).await;
    let progress = finished(&rig, &text(&answer.json()["replay"])).await;
    assert_eq!((&progress["state"], &progress["done"]), (&json!("done"), &json!(30)));
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());

    for (body, code) in [
        (json!({}), "filter"),
        (json!({ "filter": {} }), "filter"),
        (json!({ "filter": { "status": "deaf" } }), "filter"),
        (json!({ "filter": { "since": "yesterday" } }), "filter"),
        (json!({ "filter": { "typ": "x" } }), "body"),
        (json!({ "filter": { "type": "x" }, "dryrun": true }), "body"),
        (json!({ "filter": { "type": "x" }, "verb": "skip" }), "body"),
        (json!({ "filter": { "type": "x" }, "verb": "force", "reason": "r" }), "epoch"),
        (json!({ "filter": { "type": "x" }, "verb": "force", "epoch": 1 }), "reason"),
        (json!({ "filter": { "type": "x" }, "verb": "retry", "epoch": 1 }), "epoch"),
        (json!({ "filter": { "type": "x" }, "rate": 0 }), "rate"),
        (json!({ "filter": { "type": "x" }, "rate": 10_001 }), "rate"),
        (json!({ "filter": { "type": "x" }, "route": "A" }), "route"),
        (json!([]), "body"),
    ] {
        check_error(&post(&rig, "/api/replays", &body).await, 400, code);
    }
}
