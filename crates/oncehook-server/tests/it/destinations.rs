//! Destinations of the real program that are slow or down, and a program that is frozen, stopped or paused while attempts are
//! under way: every event arrives at least once under one key, and nobody else waits.
//!
//! On the embedded journal one process is the only worker: nobody can take over what it leased while it is frozen. That a
//! lost claim commits nothing is proved where two can meet, by the suites of the journals (`fault_17_fault_41_…`).

use std::time::{Duration, Instant};

use oncehook_testkit::gateway::Gateway;
use oncehook_testkit::inbox::{Inbox, Mood};
use oncehook_testkit::promises::Senders;
use oncehook_testkit::random::Random;
use oncehook_testkit::shop::{self, ORDERS, SHIPMENTS, Shop, delivery, drained, outcomes, pending, route};
use oncehook_verify::UnixMicros;
use serde_json::{Value, json};
use tokio::time::sleep;

use crate::kit::{BINARY, run, soon};

fn new_shop(routes: &[&str]) -> Shop {
    Shop::new(BINARY, env!("CARGO_TARGET_TMPDIR"), routes)
}

/// Waits until something is so.
async fn until(mut so: impl AsyncFnMut() -> bool) {
    soon(async {
        while !so().await {
            sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

fn check_inbox(inbox: &Inbox, shop: &Shop) {
    inbox.check_once(shop.events().iter().map(String::as_str));
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_57_r28_a_destination_that_is_down_delays_nobody_else_and_gets_everything_later() {
    let (mut down, up) = (Inbox::start().await, Inbox::start().await);
    let policies = r#"source = "stripe"
concurrency = 8
retry = { max_attempts = 100, base = "100ms", cap = "1s" }
breaker = { failures = 5, rest = "100ms", longest_rest = "400ms" }"#;
    let to_down = shop::http("down", policies, &down.url("/"));
    let to_up = shop::http("up", "source = \"stripe\"", &up.url("/"));
    let shop = new_shop(&[ORDERS, SHIPMENTS, &to_down, &to_up]);
    let mut gateway = shop.start();
    let senders = Senders::new(600, 0);

    // Nobody listens.
    down.close().await;
    senders.send_new(gateway.ingress, 200, 8).await;
    for name in ["orders", "shipments", "up"] {
        until(async || pending(&gateway, name).await == 0).await;
    }
    until(async || route(&gateway, "down").await["breaker"] == "open").await;
    assert_eq!(pending(&gateway, "down").await, 200);
    assert_eq!(route(&gateway, "up").await["breaker"], "closed");
    assert_eq!(shop.check_once(&[]), 200);
    check_inbox(&up, &shop);

    // Somebody listens, and says that it cannot. It is asked by one at a time, with rests.
    down.set(Mood::Failing(503));
    down.open().await;
    until(async || down.refused() > 0).await;
    let (asked, since) = (down.refused(), Instant::now());
    senders.send_new(gateway.ingress, 100, 8).await;
    until(async || pending(&gateway, "up").await == 0).await;
    sleep(Duration::from_millis(1_500)).await;
    let (asked, since) = (down.refused() - asked, since.elapsed());
    assert!(asked as u128 <= 2 + since.as_millis() / 100, "{asked} requests within {since:?}");
    assert_ne!(route(&gateway, "down").await["breaker"], "closed");
    assert_eq!(pending(&gateway, "down").await, 300);
    assert_eq!(down.effects(), 0);

    // It is well again: everything arrives without anybody's help.
    down.set(Mood::Well);
    assert_eq!(drained(&gateway).await, 0);
    assert_eq!(route(&gateway, "down").await["breaker"], "closed");
    assert!(gateway.stop().success());
    assert_eq!(shop.check_once(&[]), 300);
    check_inbox(&up, &shop);
    check_inbox(&down, &shop);
    assert_eq!(up.arrivals(), 300, "what went well was not repeated");
    assert_eq!(down.arrivals() - down.refused(), 300, "each was applied by the first request that was not refused");
    senders.promises.check_file(&shop.file(), |key| senders.body_of(key));
}

fn time(attempt: &Value, field: &str) -> UnixMicros {
    UnixMicros::parse_rfc3339(attempt[field].as_str().unwrap()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn r26_attempts_that_failed_together_do_not_come_back_together() {
    const EVENTS: usize = 80;
    let inbox = Inbox::start().await;
    inbox.set(Mood::Failing(503));
    let policies = r#"source = "stripe"
concurrency = 100
retry = { max_attempts = 100, base = "1s", cap = "1s" }
breaker = { failures = 100000 }"#;
    let shop = new_shop(&[&shop::http("forward", policies, &inbox.url("/"))]);
    let gateway = shop.start();
    let senders = Senders::new(600, 0);
    let keys = senders.send_new(gateway.ingress, EVENTS, 8).await;
    until(async || inbox.seen() == EVENTS).await;
    inbox.set(Mood::Well);
    assert_eq!(drained(&gateway).await, 0);
    check_inbox(&inbox, &shop);
    let mut waits = Vec::new();
    for key in &keys {
        let delivery = delivery(&gateway, &senders.event(key), "forward").await;
        let attempts = delivery["attempts"].as_array().unwrap();
        assert_eq!(attempts[0]["outcome"], "failed");
        let wait = time(&attempts[1], "started_at").0 - time(&attempts[0], "finished_at").0;
        waits.push(wait / 1_000);
    }
    waits.sort_unstable();
    // Evenly spread over a second: that fewer than three of 80 fall into a stretch of 0.4 s happens once in 10^14 runs. A
    // fixed wait, or one that is spread over a small part, has an empty stretch at one end.
    assert!(waits[2] < 400, "nobody came back early: {waits:?}");
    assert!(waits[EVENTS - 3] > 600, "nobody came back late: {waits:?}");
    let mut different = waits.clone();
    different.dedup();
    assert!(different.len() > 10, "they came back in groups: {waits:?}");
}

/// Frozen for longer than its leases, again and again, with attempts under way and senders at the door.
#[tokio::test(flavor = "multi_thread")]
async fn fault_17_fault_41_frozen_past_its_leases_and_thawed_every_effect_happens_once() {
    let mut random = Random::from_environment();
    let inbox = Inbox::start().await;
    let shop = new_shop(&[ORDERS, SHIPMENTS, &shop::mails(&inbox)]);
    let mut gateway = shop.start_with(&["--lease", "150"]);
    let senders = Senders::new(600, 30);
    let sending = senders.start(gateway.ingress, 4, &mut random);
    for round in 0..6 {
        sleep(Duration::from_millis(50 + random.below(100))).await;
        let arrived = inbox.arrivals();
        inbox.set(Mood::Hesitant);
        until(async || inbox.arrivals() > arrived).await;
        gateway.signal("STOP");
        // The answers come while nobody can read them, or after all of it.
        if round % 2 == 0 {
            sleep(Duration::from_millis(250)).await;
            inbox.set(Mood::Well);
        }
        sleep(Duration::from_millis(400)).await;
        gateway.signal("CONT");
        if round % 2 == 1 {
            sleep(Duration::from_millis(random.below(300))).await;
            inbox.set(Mood::Well);
        }
    }
    let heard = sending.finish().await;
    assert!(heard.of(200) > 100 && heard.cut == 0, "{heard:?}");
    assert_eq!(drained(&gateway).await, 0);
    assert!(gateway.stop().success());
    let kept = senders.promises.check_file(&shop.file(), |key| senders.body_of(key));
    assert_eq!(shop.check_once(&[]), kept.stored);
    check_inbox(&inbox, &shop);
    check_log(&shop, "mails");
    let attempts = shop.count("SELECT count(*) FROM oncehook_attempts WHERE route = 'mails'");
    let lost = shop.count("SELECT count(*) FROM oncehook_attempts WHERE outcome = 'lost'");
    assert!(attempts >= inbox.arrivals() as i64, "a request without an attempt in the log");
    eprintln!("{kept:?}, {heard:?}, {} requests, {lost} of {attempts} attempts lost", inbox.arrivals());
}

/// Every attempt has an end, the last of each delivery is its success, and there is no other.
fn check_log(shop: &Shop, route: &str) {
    let of_route = format!("FROM oncehook_attempts WHERE route = '{route}'");
    assert_eq!(shop.count(&format!("SELECT count(*) {of_route} AND outcome IS NULL")), 0);
    let succeeded = format!("SELECT count(*) {of_route} AND outcome = 'succeeded'");
    assert_eq!(shop.count(&succeeded), shop.count("SELECT count(*) FROM oncehook_events"));
    let last =
        "SELECT count(*) FROM oncehook_attempts a JOIN oncehook_deliveries d USING (event, route, epoch, attempt)
                 WHERE a.outcome = 'succeeded' AND d.state = 'succeeded'";
    assert_eq!(shop.count(&format!("{last} AND a.route = '{route}'")), shop.count(&succeeded));
}

/// Frozen past its leases and never thawed: the next process tries again, under the same keys, and the log says why.
#[tokio::test(flavor = "multi_thread")]
async fn fault_17_frozen_and_killed_the_attempts_are_lost_in_the_log_and_made_again() {
    let inbox = Inbox::start().await;
    inbox.set(Mood::Hesitant);
    let policies = "source = \"stripe\"\nconcurrency = 8\nretry = { base = \"50ms\", cap = \"50ms\" }";
    let shop = new_shop(&[&shop::http("forward", policies, &inbox.url("/"))]);
    let mut gateway = shop.start_with(&["--lease", "150"]);
    let senders = Senders::new(600, 0);
    let keys = senders.send_new(gateway.ingress, 8, 1).await;
    until(async || inbox.arrivals() == 8).await;
    gateway.signal("STOP");
    sleep(Duration::from_millis(400)).await;
    gateway.kill();
    assert_eq!(shop.count("SELECT count(*) FROM oncehook_deliveries WHERE state = 'running'"), 8);
    inbox.set(Mood::Well);
    let mut gateway = shop.start();
    assert_eq!(drained(&gateway).await, 0);
    for key in &keys {
        let delivery = delivery(&gateway, &senders.event(key), "forward").await;
        assert_eq!(outcomes(&delivery), ["lost", "succeeded"], "{delivery}");
    }
    assert!(gateway.stop().success());
    assert_eq!((inbox.arrivals(), inbox.effects()), (16, 8));
    check_inbox(&inbox, &shop);
    check_log(&shop, "forward");
}

/// What is under way when the end is near may finish; what does not is given back, which costs no attempt and no wait.
#[tokio::test(flavor = "multi_thread")]
async fn fault_16_sigterm_lets_attempts_finish_and_gives_the_rest_back() {
    // A failed attempt would wait for minutes: this is how a lease that was given back differs from one that ran out.
    let patient = "source = \"stripe\"\nconcurrency = 8\nretry = { max_attempts = 2, base = \"10m\", cap = \"10m\" }";
    let inbox = Inbox::start().await;
    let shop = new_shop(&[&shop::http("forward", patient, &inbox.url("/"))]);
    let senders = Senders::new(600, 0);
    let states = |state: &str| shop.count(&format!("SELECT count(*) FROM oncehook_deliveries WHERE state = '{state}'"));

    let mut gateway = shop.start();
    inbox.set(Mood::Hesitant);
    let finished = senders.send_new(gateway.ingress, 8, 1).await;
    until(async || inbox.arrivals() == 8).await;
    gateway.signal("TERM");
    sleep(Duration::from_millis(300)).await;
    inbox.set(Mood::Well);
    let started = Instant::now();
    assert_eq!(gateway.wait(Duration::from_secs(13)).code(), Some(0), "{}", gateway.log());
    assert!(started.elapsed() < Duration::from_secs(3), "it waited for nobody: {:?}", started.elapsed());
    assert_eq!((states("succeeded"), inbox.arrivals()), (8, 8));

    let mut gateway = shop.start();
    inbox.set(Mood::Hesitant);
    let given_back = senders.send_new(gateway.ingress, 8, 1).await;
    until(async || inbox.arrivals() == 16).await;
    let started = Instant::now();
    assert_eq!(gateway.stop().code(), Some(0), "{}", gateway.log());
    assert!(started.elapsed() < Duration::from_secs(13), "{:?}", started.elapsed());
    assert_eq!((states("succeeded"), states("ready")), (8, 8), "given back means due");

    inbox.set(Mood::Well);
    let gateway = shop.start();
    let started = Instant::now();
    assert_eq!(drained(&gateway).await, 0);
    assert!(started.elapsed() < Duration::from_secs(5), "they run at once: {:?}", started.elapsed());
    assert_eq!((inbox.arrivals(), inbox.effects()), (24, 16));
    check_inbox(&inbox, &shop);
    for (keys, ends) in [(finished, &["succeeded"][..]), (given_back, &["given_back", "succeeded"])] {
        for key in keys {
            assert_eq!(outcomes(&delivery(&gateway, &senders.event(&key), "forward").await), ends);
        }
    }
}

/// Nothing runs, for longer than a lane goes without looking.
async fn rests(gateway: &Gateway, shop: &Shop, orders: i64, mails: usize, inbox: &Inbox) {
    sleep(Duration::from_millis(1_200)).await;
    assert_eq!(shop.count("SELECT count(*) FROM orders"), orders, "{}", gateway.log());
    assert_eq!(inbox.arrivals(), mails, "{}", gateway.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn r28_r48_what_is_paused_is_accepted_and_rests_until_resumed_also_over_a_restart() {
    let inbox = Inbox::start().await;
    let shop = new_shop(&[ORDERS, SHIPMENTS, &shop::mails(&inbox)]);
    let senders = Senders::new(600, 0);
    let mut gateway = shop.start();
    let command = |gateway: &Gateway, arguments: &[&str]| {
        let (code, out, err) = run(shop.path(), &[&["--config", shop.client(gateway)], arguments].concat());
        assert_eq!(code, 0, "{arguments:?}: {out}{err}");
    };

    // The source, over the API.
    let paused = gateway.post("/api/sources/stripe/pause", &json!({ "reason": "a test" })).await;
    assert_eq!(paused.status, 200, "{paused:?}");
    senders.send_new(gateway.ingress, 40, 4).await;
    rests(&gateway, &shop, 0, 0, &inbox).await;
    gateway.kill();
    let mut gateway = shop.start();
    senders.send_new(gateway.ingress, 10, 4).await;
    rests(&gateway, &shop, 0, 0, &inbox).await;
    assert_eq!(route(&gateway, "orders").await["paused"], true);
    assert_eq!(pending(&gateway, "orders").await, 50);
    assert_eq!(gateway.post("/api/sources/stripe/resume", &json!({})).await.status, 200);
    assert_eq!(drained(&gateway).await, 0);
    assert_eq!(shop.check_once(&[]), 50);
    check_inbox(&inbox, &shop);

    // One route, on the command line: the others go on.
    command(&gateway, &["pause", "--route", "mails"]);
    senders.send_new(gateway.ingress, 30, 4).await;
    for name in ["orders", "shipments"] {
        until(async || pending(&gateway, name).await == 0).await;
    }
    rests(&gateway, &shop, 80, 50, &inbox).await;
    assert!(gateway.stop().success());
    let mut gateway = shop.start();
    rests(&gateway, &shop, 80, 50, &inbox).await;
    command(&gateway, &["resume", "--route", "mails"]);
    assert_eq!(drained(&gateway).await, 0);
    assert!(gateway.stop().success());
    assert_eq!(shop.check_once(&[]), 80);
    check_inbox(&inbox, &shop);
    assert_eq!(inbox.arrivals(), 80);
}
