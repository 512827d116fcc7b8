//! What somebody who watches over a gateway relies on: gauges of what waits, warnings at the start, and an end when it is
//! wanted.

use std::time::Duration;

use oncehook_testkit::gateway::Gateway;
use oncehook_testkit::inbox::{Inbox, Mood};
use oncehook_testkit::promises::Senders;
use oncehook_testkit::shop::{self, ORDERS, Shop};
use serde_json::json;

use crate::kit::{BINARY, Rig, run, soon};
use crate::operate::{deliver, execute, order, parsed, rig, until};

/// The values of a metric by route.
async fn gauges(rig: &Rig, name: &str) -> Vec<(String, i64)> {
    let text = String::from_utf8(rig.gateway.get("/metrics").await.body).unwrap();
    let start = format!("{name}{{route=\"");
    let of = |line: &str| {
        let (route, value) = line.strip_prefix(&start)?.split_once("\"} ")?;
        Some((route.to_owned(), value.parse().unwrap()))
    };
    let mut found: Vec<_> = text.lines().filter_map(of).collect();
    found.sort();
    found
}

fn routes(values: [(&str, i64); 3]) -> Vec<(String, i64)> {
    values.map(|(route, value)| (route.to_owned(), value)).to_vec()
}

#[tokio::test]
async fn r35_every_route_has_its_gauges_of_what_waits() {
    let mut rig = rig();
    for name in ["oncehook_backlog", "oncehook_dead_letters", "oncehook_backlog_age_seconds"] {
        assert_eq!(gauges(&rig, name).await, routes([("gone", 0), ("mails", 0), ("orders", 0)]), "{name}");
    }
    order(&rig, "/api/routes/orders/pause", &json!({})).await;
    deliver(&rig, "evt_1", "order.paid").await;
    deliver(&rig, "evt_2", "order.paid").await;
    let dead = deliver(&rig, "evt_3", "gone").await;
    until(&rig, &dead, "dead").await;
    assert_eq!(gauges(&rig, "oncehook_backlog").await, routes([("gone", 0), ("mails", 0), ("orders", 2)]));
    assert_eq!(gauges(&rig, "oncehook_dead_letters").await, routes([("gone", 1), ("mails", 0), ("orders", 0)]));
    tokio::time::sleep(Duration::from_millis(1_100)).await;
    let ages = gauges(&rig, "oncehook_backlog_age_seconds").await;
    assert!(ages[2].1 >= 1 && ages[0].1 == 0, "{ages:?}");
    // What was done counts no more.
    order(&rig, "/api/routes/orders/resume", &json!({})).await;
    order(&rig, &format!("/api/events/{dead}/skip"), &json!({})).await;
    let drained = async {
        while gauges(&rig, "oncehook_backlog").await != routes([("gone", 0), ("mails", 0), ("orders", 0)]) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    soon(drained).await;
    assert_eq!(gauges(&rig, "oncehook_dead_letters").await, routes([("gone", 0), ("mails", 0), ("orders", 0)]));

    // A route that is gone is there for as long as something of it waits.
    order(&rig, "/api/routes/gone/pause", &json!({})).await;
    let left = deliver(&rig, "evt_4", "gone").await;
    assert!(rig.gateway.stop().success());
    let path = rig.directory.path().join("oncehook.toml");
    let config = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, config.split_once("[[route]]\nname = \"gone\"").unwrap().0).unwrap();
    rig.gateway = Gateway::start(BINARY.as_ref(), rig.directory.path());
    assert_eq!(gauges(&rig, "oncehook_backlog").await, routes([("gone", 1), ("mails", 0), ("orders", 0)]));
    order(&rig, &format!("/api/events/{left}/skip"), &json!({ "route": "gone" })).await;
    assert_eq!(gauges(&rig, "oncehook_backlog").await, routes([("gone", 1), ("mails", 0), ("orders", 0)])[1..]);
}

#[tokio::test]
async fn statements_that_do_not_fit_the_tables_are_told_at_the_start() {
    let mut rig = rig();
    let log = rig.gateway.log();
    let lines: Vec<_> = log.lines().filter(|line| line.contains("would fail")).collect();
    assert!(
        matches!(lines[..], [line] if line.contains("route=\"gone\" statement=1") && line.contains("no such table: later")),
        "{log}"
    );
    // It runs all the same. `check` looks into the same file, whether it runs or not.
    let (code, out, err) = run(rig.directory.path(), &["check", "--database"]);
    assert_eq!((code, out.as_str()), (1, ""));
    assert!(err.contains("route gone: statement 1 would fail") && err.contains("no such table: later"), "{err}");
    let (code, out, _) = run(rig.directory.path(), &["check", "--database", "--json"]);
    let report = parsed(&out);
    assert_eq!((code, &report["ok"]), (1, &json!(false)), "{out}");
    assert_eq!(report["problems"], json!([{ "route": "gone", "statement": 1, "problem": "no such table: later" }]));
    assert_eq!(run(rig.directory.path(), &["check"]).0, 0, "tables are asked for only on demand");

    execute(&rig, "CREATE TABLE later (event TEXT)");
    assert_eq!(run(rig.directory.path(), &["check", "--database"]).0, 0);
    assert!(rig.gateway.stop().success());
    rig.gateway = Gateway::start(BINARY.as_ref(), rig.directory.path());
    assert!(!rig.gateway.log().contains("would fail"), "{}", rig.gateway.log());
    assert!(rig.gateway.stop().success());
    std::fs::remove_file(rig.journal()).unwrap();
    let (code, _, err) = run(rig.directory.path(), &["check", "--database"]);
    assert!(code == 1 && err.contains("is not there yet"), "{err}");
    assert!(!rig.journal().exists(), "looking makes nothing");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_signal_ends_it_at_once() {
    let inbox = Inbox::start().await;
    inbox.set(Mood::Hesitant);
    let slow = shop::http("slow", "source = \"stripe\"", &inbox.url("/"));
    let shop = Shop::new(BINARY, env!("CARGO_TARGET_TMPDIR"), &[ORDERS, &slow]);
    let mut gateway = shop.start();
    let senders = Senders::new(10, 0);
    senders.send_new(gateway.ingress, 5, 1).await;
    let arrived = async {
        while inbox.arrivals() == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    soon(arrived).await;
    // It waits for its attempts, for some seconds.
    gateway.signal("TERM");
    let ending = async {
        while !gateway.log().contains("stopping:") {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    soon(ending).await;
    let log = gateway.log();
    let said = log.lines().find(|line| line.contains("stopping:")).unwrap();
    assert!(said.contains("0 open requests,") && said.contains("at most 30 s"), "{said}");
    assert!(!said.contains(" 0 attempts under way"), "{said}");
    // Said twice at once means the same.
    gateway.signal("TERM");
    tokio::time::sleep(Duration::from_millis(800)).await;
    assert!(!gateway.log().contains("a second time"), "{}", gateway.log());
    gateway.signal("INT");
    let status = gateway.wait(Duration::from_secs(2));
    assert_eq!(status.code(), Some(1));
    assert!(gateway.log().contains("a second time"), "{}", gateway.log());
    assert!(!gateway.log().contains("stopped"), "{}", gateway.log());
    // Nothing was lost by that.
    inbox.set(Mood::Well);
    let mut gateway = shop.start();
    assert_eq!(shop::drained(&gateway).await, 0);
    assert!(gateway.stop().success());
    inbox.check_once(shop.events().iter().map(String::as_str));
}
