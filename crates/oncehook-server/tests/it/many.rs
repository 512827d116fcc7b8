//! Orders that must not do more than somebody meant: forced replays by route, and orders for many events that are counted
//! first.

use serde_json::json;

use crate::kit::{check_error, text};
use crate::operate::{CONFIG, client, deliver, execute, finished, number, order, parsed, post, rig, rig_with, until};

/// Another source with a route of its own.
const OTHER: &str = r#"
[[source]]
name = "other"
provider = "stripe"
secrets = ["file:stripe.secret"]

[[route]]
name = "others"
source = "other"
[route.sql]
statement = "SELECT 1"
"#;

#[tokio::test]
async fn a_forced_replay_is_for_routes_that_can_run_it() {
    let rig = rig_with("", &format!("{CONFIG}{OTHER}"));
    let event = deliver(&rig, "evt_1", "order.paid").await;
    until(&rig, &event, "succeeded").await;
    let path = format!("/api/events/{event}/replay");
    let forced = |route: &str| json!({ "force": true, "epoch": 1, "reason": "r", "route": route });
    for (route, said) in [("nowhere", "no route `nowhere`"), ("others", "source `other` only")] {
        let answer = post(&rig, &path, &forced(route)).await;
        check_error(&answer, 404, "no_route");
        assert!(text(&answer.json()["error"]["message"]).contains(said), "{said}");
        let many =
            json!({ "filter": { "source": "stripe" }, "verb": "force", "epoch": 1, "reason": "r", "route": route });
        check_error(&post(&rig, "/api/replays", &many).await, 404, "no_route");
        let (code, out, err) = client(&rig, &["replay", &event, "--force", "--reason", "r", "--route", route]);
        assert!(code == 1 && out.is_empty() && err.contains(said), "{err}");
    }
    // Nothing waits for a name that nobody listens to.
    assert_eq!(rig.show(&event).await["deliveries"].as_array().unwrap().len(), 2);
    assert_eq!(rig.show(&event).await["audit"], json!([]));
    // Without a source in the filter it shows with each event.
    let args = ["replay", "--type", "order.paid", "--force", "--epoch", "1", "--reason", "r", "--yes"];
    let (code, out, _) = client(&rig, &[&args[..], &["--route", "others"]].concat());
    assert!(code == 1 && out.starts_with("done: 1 found, 0 changed, 0 left as they were, 1 failed"), "{out}");
    assert!(out.contains("source `other` only"), "{out}");
    // A follow-up can be run again by itself, and what is left behind by a route that is gone can still be skipped.
    order(&rig, &path, &forced("mails")).await;
    until(&rig, &event, "succeeded").await;
    assert_eq!((number(&rig, "SELECT count(*) FROM orders"), number(&rig, "SELECT count(*) FROM mails")), (1, 2));
    let skip = post(&rig, &format!("/api/events/{event}/skip"), &json!({ "route": "nowhere" })).await;
    check_error(&skip, 409, "unfit");
}

#[tokio::test]
async fn an_epoch_of_another_route_is_not_taken_for_done() {
    let rig = rig();
    let event = deliver(&rig, "evt_1", "order.paid").await;
    until(&rig, &event, "succeeded").await;
    let path = format!("/api/events/{event}/replay");
    order(&rig, &path, &json!({ "force": true, "epoch": 1, "reason": "r", "route": "mails" })).await;
    until(&rig, &event, "succeeded").await;
    let args = ["replay", "--source", "stripe", "--force", "--epoch", "1", "--reason", "r", "--yes"];
    // The orders did not run again, so it must not look as if they had.
    for more in [&[][..], &["--route", "orders"]] {
        let (code, out, _) = client(&rig, &[&args[..], more].concat());
        assert!(code == 1 && out.starts_with("done: 1 found, 0 changed, 0 left as they were, 1 failed"), "{out}");
        assert!(out.contains("the next epoch is 2"), "{out}");
    }
    // The mails did.
    let (code, out, _) = client(&rig, &[&args[..], &["--route", "mails"]].concat());
    assert!(code == 0 && out.starts_with("done: 1 found, 0 changed, 1 left as they were, 0 failed"), "{out}");
    // An event that nothing can be run for is told too.
    deliver(&rig, "evt_2", "unwanted").await;
    let (code, out, _) =
        client(&rig, &["replay", "--type", "unwanted", "--force", "--epoch", "1", "--reason", "r", "--yes"]);
    assert!(code == 1 && out.contains("1 failed") && out.contains("no route wants this event"), "{out}");
    assert_eq!(number(&rig, "SELECT count(*) FROM orders"), 1);
}

#[tokio::test]
async fn an_order_for_many_does_what_was_counted() {
    let rig = rig();
    for number in 0..3 {
        let event = deliver(&rig, &format!("evt_{number}"), "gone").await;
        until(&rig, &event, "dead").await;
    }
    let dry = json!({ "filter": { "type": "gone" }, "verb": "retry", "dry_run": true });
    let found = order(&rig, "/api/replays", &dry).await;
    let (matched, until_then) = (found["matched"].clone(), found["until"].clone());
    assert_eq!(matched, 3);
    // A fourth one comes after the count.
    let late = deliver(&rig, "evt_late", "gone").await;
    until(&rig, &late, "dead").await;
    execute(&rig, "CREATE TABLE later (event TEXT)");
    let counted = json!({ "filter": { "type": "gone" }, "verb": "retry", "expect": matched });
    let answer = post(&rig, "/api/replays", &counted).await;
    check_error(&answer, 409, "expect");
    assert!(text(&answer.json()["error"]["message"]).contains("finds 4 events now, not 3"), "{:?}", answer.json());
    assert_eq!(rig.show(&late).await["audit"], json!([]));
    let exact = json!({
        "filter": { "type": "gone", "until": until_then }, "verb": "retry", "expect": matched, "rate": 10_000,
    });
    let answer = post(&rig, "/api/replays", &exact).await;
    let progress = finished(&rig, &text(&answer.json()["replay"])).await;
    assert_eq!((&progress["matched"], &progress["changed"]), (&json!(3), &json!(3)), "{progress}");
    assert_eq!(rig.show(&late).await["status"], "dead", "it was not among the three");
    // A dry run can be asked what it should find, too.
    let asked = json!({ "filter": { "type": "gone" }, "dry_run": true, "expect": 7 });
    check_error(&post(&rig, "/api/replays", &asked).await, 409, "expect");
}

#[tokio::test]
async fn nothing_found_is_nothing_begun() {
    let rig = rig();
    order(&rig, "/api/routes/gone/pause", &json!({})).await;
    for number in 0..20 {
        deliver(&rig, &format!("evt_{number}"), "gone").await;
    }
    let slow = json!({ "filter": { "type": "gone" }, "rate": 1 });
    assert_eq!(post(&rig, "/api/replays", &slow).await.status, 202);
    // A second replay would be refused, but there is no need for one.
    let (code, out, err) = client(&rig, &["retry", "--status", "dead"]);
    assert_eq!((code, err.as_str()), (0, ""), "{out}");
    assert_eq!(out, "done: 0 found, 0 changed, 0 left as they were, 0 failed\n");
    let (code, out, _) = client(&rig, &["retry", "--status", "dead", "--json"]);
    assert_eq!((code, parsed(&out)["state"].clone(), parsed(&out)["matched"].clone()), (0, json!("done"), json!(0)));
    let (code, _, err) = client(&rig, &["retry", "--type", "gone", "--yes"]);
    assert!(code == 1 && err.contains("[busy]"), "{err}");
}
