//! Effects of the real program in a user's tables: whatever happens on the way, an event has one order, or a cause that can be
//! read and mended.

use std::time::Duration;

use oncehook_testkit::gateway::{CONFIG, Gateway};
use oncehook_testkit::inbox::{Inbox, Mood};
use oncehook_testkit::promises::Senders;
use oncehook_testkit::sender::{Wire, ask};
use oncehook_testkit::shop::{self, ORDERS, SHIPMENTS, Shop, delivery, drained, outcomes};
use serde_json::json;
use tokio::time::sleep;

use crate::kit::{BINARY, run, soon, text};

fn new_shop(routes: &[&str]) -> Shop {
    Shop::new(BINARY, env!("CARGO_TARGET_TMPDIR"), routes)
}

/// Delivers an event once more. Returns `(status, event)` of the answer.
async fn deliver(gateway: &Gateway, senders: &Senders, key: &str) -> (String, String) {
    let answer = soon(ask(gateway.ingress, &senders.request(key))).await.unwrap();
    assert!(senders.promises.record(key, &answer), "{key}: {answer:?}");
    (text(&answer.json()["status"]), text(&answer.json()["event"]))
}

/// A database that refuses one event, after the statement has left its trace.
fn poison(shop: &Shop, key: &str) {
    let trigger = format!(
        "CREATE TRIGGER poison AFTER INSERT ON orders WHEN NEW.key = '{key}'
         BEGIN SELECT RAISE(FAIL, 'nobody can digest this'); END"
    );
    shop.database().execute_batch(&trigger).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_19_r20_1000_copies_in_parallel_make_one_order() {
    let inbox = Inbox::start().await;
    let shop = new_shop(&[ORDERS, SHIPMENTS, &shop::mails(&inbox)]);
    let mut gateway = shop.start();
    let senders = Senders::new(600, 0);
    let mut wires = Vec::new();
    for _ in 0..1_000 {
        wires.push(soon(Wire::connect(gateway.ingress)).await.unwrap());
    }
    let request = senders.request("evt_0");
    let copies: Vec<_> = wires
        .into_iter()
        .map(|mut wire| {
            let request = request.clone();
            tokio::spawn(async move { wire.ask(&request).await })
        })
        .collect();
    let mut accepted = 0;
    for copy in copies {
        let answer = soon(copy).await.unwrap().unwrap();
        assert!(senders.promises.record("evt_0", &answer), "{answer:?}");
        accepted += usize::from(answer.json()["status"] == "accepted");
    }
    assert_eq!(accepted, 1);
    assert_eq!(drained(&gateway).await, 0);
    assert!(gateway.stop().success());
    assert_eq!(shop.check_once(&[]), 1);
    inbox.check_once(["evt_0"]);
    assert_eq!(inbox.arrivals(), 1, "nothing went wrong, so nothing was sent twice");
}

/// The handler takes longer than its lease, which is renewed meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn fault_20_a_duplicate_while_the_first_is_in_its_handler_runs_nothing() {
    let inbox = Inbox::start().await;
    inbox.set(Mood::Hesitant);
    let shop = new_shop(&[&shop::http("forward", "source = \"stripe\"", &inbox.url("/"))]);
    let gateway = shop.start_with(&["--lease", "300"]);
    let senders = Senders::new(600, 0);
    let (status, event) = deliver(&gateway, &senders, "evt_0").await;
    assert_eq!(status, "accepted");
    soon(async {
        while inbox.arrivals() == 0 {
            sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    for _ in 0..30 {
        assert_eq!(delivery(&gateway, &event, "forward").await["state"], "running");
        assert_eq!(
            deliver(&gateway, &senders, "evt_0").await,
            ("duplicate".to_owned(), event.clone()),
            "durable already"
        );
        sleep(Duration::from_millis(40)).await;
    }
    assert_eq!(inbox.arrivals(), 1);
    inbox.set(Mood::Well);
    assert_eq!(drained(&gateway).await, 0);
    assert_eq!(deliver(&gateway, &senders, "evt_0").await.0, "duplicate");
    sleep(Duration::from_millis(300)).await;
    assert_eq!((inbox.arrivals(), inbox.effects()), (1, 1));
    assert_eq!(outcomes(&delivery(&gateway, &event, "forward").await), ["succeeded"]);
}

/// The seed incident turned harmless: a statement names a column that no longer exists.
#[tokio::test(flavor = "multi_thread")]
async fn r27_the_seed_incident_ends_dead_with_a_cause_and_one_retry_applies_it_once() {
    let shop = new_shop(&[ORDERS, SHIPMENTS]);
    let mut gateway = shop.start();
    let senders = Senders::new(600, 0);
    let rename = |from: &str, to: &str| {
        shop.database().execute_batch(&format!("ALTER TABLE orders RENAME COLUMN {from} TO {to}")).unwrap();
    };
    // One before the incident, so that the statement has worked before.
    senders.send_new(gateway.ingress, 1, 1).await;
    assert_eq!(drained(&gateway).await, 0);
    rename("payment", "payment_intent");
    let keys = senders.send_new(gateway.ingress, 5, 2).await;
    assert_eq!(drained(&gateway).await, 5);
    for key in &keys {
        assert_eq!(deliver(&gateway, &senders, key).await.0, "duplicate");
    }
    assert_eq!(shop.count("SELECT count(*) FROM orders"), 1);

    // Nothing of it is lost with the process.
    gateway.kill();
    let gateway = shop.start();
    assert_eq!(senders.promises.check(&gateway).await.stored, 6);
    let event = senders.event(&keys[0]);
    let dead = delivery(&gateway, &event, "orders").await;
    assert_eq!(outcomes(&dead), ["failed", "failed", "failed"]);
    assert_eq!((&dead["state"], &dead["cause"]), (&json!("dead"), &json!("handler")));
    assert!(text(&dead["error"]).contains("has no column named payment"), "{dead}");

    // What an operator sees and does.
    let config = shop.client(&gateway);
    let command = |arguments: &[&str]| run(shop.path(), &[&["--config", config], arguments].concat());
    let (code, out, _) = command(&["events", "--status", "dead", "--json"]);
    assert_eq!(code, 0);
    assert_eq!(out.matches("\"dead\"").count() / 2, 5, "five events with one dead delivery each: {out}");
    let (code, out, _) = command(&["show", &event]);
    assert!(code == 0 && out.contains("has no column named payment"), "{out}");

    rename("payment_intent", "payment");
    let (code, out, err) = command(&["retry", &event, "--reason", "the column is back"]);
    assert_eq!(code, 0, "{out}{err}");
    assert_eq!(drained(&gateway).await, 4);
    assert_eq!(shop.count("SELECT count(*) FROM orders"), 2);
    let (code, _, err) = command(&["retry", &event]);
    assert!(code != 0 && !err.is_empty(), "a second retry was taken: {code} {err}");
    let refused = gateway.post(&format!("/api/events/{event}/retry"), &json!({})).await;
    assert_eq!(refused.status, 409, "{refused:?}");
    assert_eq!(deliver(&gateway, &senders, &keys[0]).await, ("duplicate".to_owned(), event.clone()));
    let applied = delivery(&gateway, &event, "orders").await;
    assert_eq!(outcomes(&applied), ["failed", "failed", "failed", "succeeded"]);
    let story = gateway.json(&format!("/api/events/{event}")).await;
    assert!(story.to_string().contains("the column is back"), "the order is in the audit: {story}");

    for key in &keys[1..] {
        let answer = gateway.post(&format!("/api/events/{}/retry", senders.event(key)), &json!({})).await;
        assert_eq!(answer.status, 200, "{answer:?}");
    }
    assert_eq!(drained(&gateway).await, 0);
    assert_eq!(shop.check_once(&[]), 6);
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_50_a_poison_event_among_10000_costs_only_itself() {
    let shop = new_shop(&[ORDERS, SHIPMENTS]);
    poison(&shop, "evt_5000");
    let mut gateway = shop.start();
    let senders = Senders::new(300, 0);
    let keys = senders.send_new(gateway.ingress, 10_000, 32).await;
    assert_eq!(drained(&gateway).await, 1);
    let dead = delivery(&gateway, &senders.event("evt_5000"), "orders").await;
    assert_eq!(outcomes(&dead), ["failed", "failed", "failed"]);
    assert!(text(&dead["error"]).contains("nobody can digest this"), "{dead}");
    assert!(gateway.stop().success());
    assert_eq!(shop.check_once(&["evt_5000"]), keys.len() - 1);
    // The neighbours did not pay with attempts.
    assert_eq!(shop.count("SELECT count(*) FROM oncehook_attempts WHERE outcome <> 'succeeded'"), 3);
    assert_eq!(shop.count("SELECT count(*) FROM oncehook_deliveries WHERE attempt <> 1"), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_21_fault_40_r32_keys_outlive_payloads_and_what_is_not_final_stays() {
    let shop = new_shop(&[]);
    shop.configure(&format!("[retention]\npayload = \"1s\"\n{CONFIG}"), &[ORDERS, SHIPMENTS]);
    poison(&shop, "evt_1");
    let mut gateway = shop.start();
    let senders = Senders::new(600, 0);
    // evt_0 succeeds, evt_1 dies, evt_2 waits for its shipment.
    let [done, dead, waiting] = ["evt_0", "evt_1", "evt_2"];
    senders.send_new(gateway.ingress, 2, 1).await;
    assert_eq!(drained(&gateway).await, 1);
    assert_eq!(gateway.post("/api/routes/shipments/pause", &json!({})).await.status, 200);
    senders.send_new(gateway.ingress, 1, 1).await;
    soon(async {
        while shop.count("SELECT count(*) FROM orders") < 2 {
            sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    sleep(Duration::from_millis(1_100)).await;
    assert!(gateway.stop().success());

    // The janitor goes round when the gateway starts.
    let status =
        async |gateway: &Gateway, key: &str| gateway.get(&format!("/api/events/{}", senders.event(key))).await.status;
    let forgotten = async |gateway: &Gateway, key: &str| {
        soon(async {
            while status(gateway, key).await != 404 {
                sleep(Duration::from_millis(10)).await;
            }
        })
        .await;
    };
    let mut gateway = shop.start();
    forgotten(&gateway, done).await;
    sleep(Duration::from_millis(300)).await;
    assert_eq!((status(&gateway, dead).await, status(&gateway, waiting).await), (200, 200));
    let body = gateway.get(&format!("/api/events/{}/body", senders.event(waiting))).await;
    assert!(body.body == senders.body_of(waiting), "what is pending keeps its payload");
    for key in [done, dead, waiting] {
        assert_eq!(deliver(&gateway, &senders, key).await, ("duplicate".to_owned(), senders.event(key)));
    }
    assert_eq!(gateway.post("/api/routes/shipments/resume", &json!({})).await.status, 200);
    assert_eq!(drained(&gateway).await, 1);
    assert!(gateway.stop().success());

    let gateway = shop.start();
    forgotten(&gateway, waiting).await;
    assert_eq!(status(&gateway, dead).await, 200, "dead letters stay");
    for key in [done, dead, waiting] {
        assert_eq!(deliver(&gateway, &senders, key).await, ("duplicate".to_owned(), senders.event(key)));
    }
    assert_eq!(drained(&gateway).await, 1);
    for table in ["orders", "shipments"] {
        for key in [done, waiting] {
            assert_eq!(shop.count(&format!("SELECT count(*) FROM {table} WHERE key = '{key}'")), 1);
        }
        assert_eq!(shop.count(&format!("SELECT count(*) FROM {table}")), 2);
    }
}
