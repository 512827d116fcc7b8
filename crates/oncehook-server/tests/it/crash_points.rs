//! The program ends at each of its named places, as kill -9 would end it, at least twenty times each; every effect happens
//! once all the same.
//!
//! The places exist in builds for tests only; `only_tests_can_end_the_process_where_they_like` proves that.

use std::collections::HashMap;
use std::os::unix::process::ExitStatusExt as _;
use std::sync::Mutex;
use std::time::Duration;

use oncehook_testkit::gateway::CONFIG;
use oncehook_testkit::inbox::Inbox;
use oncehook_testkit::promises::{Answers, Senders};
use oncehook_testkit::random::Random;
use oncehook_testkit::sender::ask;
use oncehook_testkit::shop::{self, ORDERS, SHIPMENTS, Shop};

use crate::kit::BINARY;
use crate::{elsewhere, postgres_days};

const KILLS: usize = 20;

/// What a series of kills left behind.
struct Left {
    /// Attempts of the retry log that ended with the process.
    lost: i64,
    /// Requests that reached the destination beyond the first of each event.
    repeated: usize,
}

/// Ends the gateway at a place again and again, each time after so many passings at most, under a load with many copies;
/// then lets it finish and checks every promise and every effect.
async fn kill_at(point: &str, passings: u64) -> Left {
    let mut random = Random::from_environment();
    let inbox = Inbox::start().await;
    let shop = Shop::new(BINARY, env!("CARGO_TARGET_TMPDIR"), &[ORDERS, SHIPMENTS, &shop::mails(&inbox)]);
    let senders = Senders::new(600, 50);
    let mut heard = Answers::default();
    for _ in 0..KILLS {
        let mut gateway = shop.start_armed(point, 1 + random.below(passings));
        let sending = senders.start(gateway.ingress, 4, &mut random);
        let status = tokio::task::block_in_place(|| gateway.wait(Duration::from_secs(30)));
        assert_eq!(status.signal(), Some(9), "{point}: {}", gateway.log());
        heard.add(sending.finish().await);
    }
    assert!(heard.of(200) > 50, "there was no load to speak of: {heard:?}");

    let mut gateway = shop.start();
    assert_eq!(shop::drained(&gateway).await, 0, "{}", gateway.log());
    let kept = senders.promises.check(&gateway).await;
    assert!(gateway.stop().success());
    assert_eq!(senders.promises.check_file(&shop.file(), |key| senders.body_of(key)).stored, kept.stored);
    assert_eq!(shop.check_once(&[]), kept.stored);
    let events = shop.events();
    inbox.check_once(events.iter().map(String::as_str));
    let lost = shop.count("SELECT count(*) FROM oncehook_attempts WHERE outcome = 'lost'");
    let repeated = inbox.arrivals() - kept.stored;
    eprintln!("{point}: {kept:?}, {heard:?}; {lost} attempts lost, {repeated} requests repeated");
    Left { lost, repeated }
}

#[tokio::test(flavor = "multi_thread")]
async fn r20_killed_before_the_insert_20_times() {
    kill_at("before_insert", 30).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r20_killed_after_the_insert_20_times() {
    kill_at("after_insert", 30).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r20_killed_after_the_commit_and_before_its_sync_20_times() {
    kill_at("after_commit", 30).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r20_killed_after_the_sync_and_before_the_answer_20_times() {
    kill_at("after_sync", 30).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r20_killed_in_the_handler_20_times() {
    kill_at("in_handler", 60).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r20_killed_after_the_effect_20_times() {
    kill_at("after_effect", 60).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r25_killed_in_a_follow_up_20_times() {
    let left = kill_at("in_follow_up", 60).await;
    assert!(left.lost > 0, "no attempt that left the process was ever killed");
}

#[tokio::test(flavor = "multi_thread")]
async fn r25_fault_47_killed_between_the_destinations_answer_and_its_record_20_times() {
    let left = kill_at("before_settle", 20).await;
    assert!(left.lost >= 20, "each kill leaves an attempt without an end, and the log says so: {}", left.lost);
    assert!(left.repeated >= 20, "what was answered and not recorded is sent again: {}", left.repeated);
}

/// Effects in another database: its transaction and the journal's are two, and the guard makes them one.
#[tokio::test(flavor = "multi_thread")]
async fn r20_killed_after_the_guard_and_before_the_effect_in_another_database() {
    elsewhere::kill_at("guard_taken", 20, 10).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r20_r25_killed_between_the_commits_of_the_other_database_and_the_journal() {
    elsewhere::kill_at("between_commits", 20, 20).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r27_killed_after_a_delivery_was_made_void_and_before_it_is_dead() {
    elsewhere::kill_at("after_void", 20, 10).await;
}

/// A day of events is dropped on PostgreSQL; what stood beside them is swept by the next process.
#[tokio::test(flavor = "multi_thread")]
async fn r33_killed_between_dropping_a_day_and_sweeping_behind_it() {
    postgres_days::kill_at("day_dropped", 3).await;
}

/// The same for the spool: another process locks the journal's file, so events are spooled; then it lets go, and they are
/// drained; somewhere on the way the gateway ends. An event that was drained and not removed is
/// brought again.
async fn spool_kill_at(point: &str, passings: u64) {
    let mut random = Random::from_environment();
    let shop = Shop::new(BINARY, env!("CARGO_TARGET_TMPDIR"), &[]);
    let spooling = CONFIG.replace("[[source]]", "[spool]\nafter = \"100ms\"\n[[source]]") + "on_outage = \"spool\"\n";
    shop.configure(&spooling, &[ORDERS]);
    let senders = Senders::new(600, 0);
    let told: Mutex<HashMap<String, String>> = Mutex::default();
    for _ in 0..KILLS {
        let mut gateway = shop.start_armed(point, 1 + random.below(passings));
        let other = shop.database();
        other.busy_timeout(Duration::from_secs(10)).unwrap();
        // What is left from the last time may end it at once.
        let locked = other.execute_batch("BEGIN IMMEDIATE").is_ok();
        let mut release_at = 10 + random.below(30);
        loop {
            let key = senders.key(&mut random);
            let Ok(answer) = ask(gateway.ingress, &senders.request(&key)).await else { break };
            assert_eq!(answer.status, 200, "{answer:?}");
            told.lock().unwrap().insert(key, answer.json()["event"].as_str().unwrap().to_owned());
            release_at = release_at.saturating_sub(1);
            if release_at == 0 && locked {
                other.execute_batch("COMMIT").unwrap();
                break;
            }
        }
        drop(other);
        if matches!(point, "spooling" | "spooled") {
            // Whatever is not spooled does not pass there.
            gateway.kill();
            continue;
        }
        let status = tokio::task::block_in_place(|| gateway.wait(Duration::from_secs(30)));
        assert_eq!(status.signal(), Some(9), "{point}: {}", gateway.log());
    }
    let mut gateway = shop.start();
    assert_eq!(shop::drained(&gateway).await, 0, "{}", gateway.log());
    while gateway.json("/readyz").await["spool"]["events"] != 0 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(shop::drained(&gateway).await, 0, "{}", gateway.log());
    let told = told.into_inner().unwrap();
    assert!(told.len() > 100, "there was no load to speak of: {}", told.len());
    for (key, id) in &told {
        assert_eq!(gateway.json(&format!("/api/events/{id}")).await["key"], key.as_str(), "{id}");
    }
    let stored = gateway.events().await.len();
    assert!(gateway.stop().success());
    assert_eq!(shop.count("SELECT count(*) FROM orders") as usize, stored);
    assert_eq!(shop.count("SELECT count(DISTINCT key) FROM orders") as usize, stored);
    eprintln!("{point}: {} told, {stored} stored", told.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn r4_killed_before_the_spools_commit_20_times() {
    spool_kill_at("spooling", 20).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r4_killed_after_the_spools_commit_and_before_the_answer_20_times() {
    spool_kill_at("spooled", 20).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r4_killed_when_the_journal_has_what_was_spooled_20_times() {
    spool_kill_at("drained", 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r4_killed_when_a_spooled_event_has_its_alias_20_times() {
    spool_kill_at("aliased", 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r4_killed_when_what_was_drained_has_left_the_spool_20_times() {
    spool_kill_at("cleared", 1).await;
}
