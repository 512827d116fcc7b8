//! The gateway on a PostgreSQL that misbehaves: sockets cut around a commit, a server that is silent, read-only, locked or
//! away. What was acknowledged is there once, what is unknown is 503, and the gateway gets up by itself.

use std::time::{Duration, Instant};

use oncehook_testkit::chaos_proxy::{ChaosProxy, Cut, Direction, Trap};
use oncehook_testkit::gateway::Gateway;
use oncehook_testkit::postgres::{Database, Server};
use oncehook_testkit::promises::{Senders, assert_is_unavailable};
use oncehook_testkit::random::Random;
use oncehook_testkit::sender::ask;

use crate::hanging_up::requests_dropped_at_any_moment;
use crate::kit::not_ready_while_locked;
use crate::postgres::{SHOP, check_once, serve_at, try_serve, until_ready};

/// A shop on a server, a proxy in front of it.
fn behind_a_proxy(server: &Server) -> (Database<'_>, ChaosProxy) {
    let database = server.database();
    database.query(SHOP);
    (database, ChaosProxy::start(server.port()))
}

/// Sends a key until it is promised. Returns what the promise said.
async fn until_promised(gateway: &Gateway, senders: &Senders, key: &str) -> String {
    let begun = Instant::now();
    loop {
        let answer = ask(gateway.ingress, &senders.request(key)).await.unwrap();
        if senders.promises.record(key, &answer) {
            return answer.json()["status"].as_str().unwrap().to_owned();
        }
        assert_is_unavailable(&answer);
        assert!(begun.elapsed() < Duration::from_secs(60), "{key} is never promised:\n{}", gateway.log());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_12_a_socket_cut_around_an_append_is_503_and_the_key_settles_it() {
    let (database, proxy) = behind_a_proxy(Server::shared());
    let directory = tempfile::tempdir().unwrap();
    let gateway = serve_at(&database.url_at(proxy.port()), directory.path(), &[]);
    let senders = Senders::new(600, 0);
    for round in 0..8 {
        let key = format!("evt_{}", 1_000 + round);
        let trap = Trap::on(Direction::ToServer, &key).ending([Cut::Reset, Cut::Finish][round % 2]);
        // The key goes with the rows, so the statement has not arrived yet, or has and was not answered.
        let (trap, then) = match round % 4 {
            0 | 1 => (trap, "accepted"),
            _ => (trap.swallowing_the_answer(), "duplicate"),
        };
        let trap = proxy.set(trap);
        assert_is_unavailable(&ask(gateway.ingress, &senders.request(&key)).await.unwrap());
        trap.wait();
        assert_eq!(until_promised(&gateway, &senders, &key).await, then, "round {round}");
    }
    assert_eq!(check_once(&database).await, 8);
    assert_eq!(senders.promises.check(&gateway).await.promised, 8);
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_12_a_socket_cut_around_the_commit_of_an_effect_applies_it_once() {
    let (database, proxy) = behind_a_proxy(Server::shared());
    let directory = tempfile::tempdir().unwrap();
    let door = serve_at(&database.url(), directory.path(), &["ingest", "admin"]);
    let worker = serve_at(&database.url_at(proxy.port()), directory.path(), &["worker"]);
    let senders = Senders::new(600, 0);
    let orders = || database.query("SELECT count(*) FROM orders").parse::<usize>().unwrap();
    let (mut unsent, mut unheard) = (0, 0);
    for round in 0..40 {
        until_ready(&worker).await;
        let before = orders();
        let commit = match round % 2 {
            0 => Trap::on(Direction::ToServer, "COMMIT\0"),
            _ => Trap::on(Direction::ToClient, "COMMIT\0"),
        };
        let trap = proxy.set(commit);
        senders.send_new(door.ingress, 1, 1).await;
        trap.wait();
        // A worker that looked by itself and found nothing commits too; such a round shows nothing.
        match (round % 2, orders() - before) {
            (0, 0) => unsent += 1,
            (1, 1) => unheard += 1,
            _ => {}
        }
        if unsent >= 4 && unheard >= 4 {
            break;
        }
        let begun = Instant::now();
        while orders() != before + 1 {
            assert!(begun.elapsed() < Duration::from_secs(60), "{}", worker.log());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    assert!(unsent >= 4 && unheard >= 4, "{unsent} commits were not sent, {unheard} not answered");
    let once = check_once(&database).await;
    assert_eq!(senders.promises.check(&door).await.promised, once);
    let failed = database.query("SELECT count(*) FROM oncehook.attempts");
    assert_eq!(failed, "0", "a lost connection is nobody's failed attempt");
}

/// Connections are cut, bytes held and trickled at random while everything runs.
#[tokio::test(flavor = "multi_thread")]
async fn fault_12_r20_a_bad_network_loses_and_doubles_nothing() {
    let mut random = Random::from_environment();
    let (database, proxy) = behind_a_proxy(Server::shared());
    let directory = tempfile::tempdir().unwrap();
    let gateway = serve_at(&database.url_at(proxy.port()), directory.path(), &[]);
    let senders = Senders::new(600, 40);
    let sending = senders.start(gateway.ingress, 8, &mut random);
    for _ in 0..25 {
        match random.below(6) {
            0 => proxy.cut(Cut::Reset),
            1 => proxy.cut(Cut::Finish),
            2 => drop(proxy.set(Trap::after(Direction::ToServer, random.below(200_000)))),
            3 => drop(proxy.set(Trap::after(Direction::ToClient, random.below(20_000)))),
            4 => drop(proxy.set(Trap::on(Direction::ToClient, "COMMIT\0").sparing(random.below(5) as usize))),
            _ => {
                proxy.stall();
                tokio::time::sleep(Duration::from_millis(random.below(300))).await;
                proxy.resume();
            }
        }
        tokio::time::sleep(Duration::from_millis(random.below(300))).await;
    }
    // What is asked at the end must not be what springs the last of them.
    proxy.disarm();
    let heard = sending.finish().await;
    until_ready(&gateway).await;
    let once = check_once(&database).await;
    let kept = senders.promises.check(&gateway).await;
    eprintln!("{kept:?} {heard:?}");
    assert_eq!(kept.stored, once);
    assert!(heard.of(200) > 100 && heard.of(503) > 0, "{heard:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_13_requests_that_are_dropped_at_any_moment_are_stored_once_or_not_at_all() {
    let database = Server::shared().database();
    database.query(SHOP);
    let directory = tempfile::tempdir().unwrap();
    let gateway = serve_at(&database.url(), directory.path(), &[]);
    requests_dropped_at_any_moment(&gateway, async || check_once(&database).await).await;
    let idle = "SELECT count(*) FROM pg_stat_activity
                 WHERE datname = current_database() AND state LIKE 'idle in transaction%'";
    assert_eq!(database.query(idle), "0");
}

/// How long senders wait for the refusal: the middle one, and the worst.
async fn refusals(gateway: &Gateway, senders: &Senders) -> (Duration, Duration) {
    let mut waits = Vec::new();
    for number in 0..100 {
        let request = senders.request(&format!("evt_{}", 5_000 + number));
        let begun = Instant::now();
        assert_is_unavailable(&ask(gateway.ingress, &request).await.unwrap());
        waits.push(begun.elapsed());
    }
    waits.sort();
    (waits[50], waits[99])
}

async fn until_not_ready(gateway: &Gateway) -> Duration {
    let begun = Instant::now();
    while gateway.get("/readyz").await.status == 200 {
        assert!(begun.elapsed() < Duration::from_secs(30), "it stays ready");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    begun.elapsed()
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_12_r4_r15_without_its_database_a_gateway_refuses_at_once_and_is_ready_again_by_itself() {
    let (database, proxy) = behind_a_proxy(Server::shared());
    let directory = tempfile::tempdir().unwrap();
    let gateway = serve_at(&database.url_at(proxy.port()), directory.path(), &[]);
    let senders = Senders::new(600, 0);
    senders.send_new(gateway.ingress, 20, 2).await;
    let check = |(middle, worst): (Duration, Duration)| {
        assert!(middle < Duration::from_millis(50), "{middle:?}");
        assert!(worst < Duration::from_secs(1), "{worst:?}");
    };

    // Gone: connections are reset, and new ones refused.
    proxy.down();
    let noticed = until_not_ready(&gateway).await;
    let refused = refusals(&gateway, &senders).await;
    check(refused);
    assert_eq!(gateway.get("/healthz").await.status, 200);
    assert!(gateway.get("/readyz").await.json()["failing"].is_string());
    proxy.up();
    let back = until_ready(&gateway).await;
    eprintln!("gone: noticed in {noticed:?}, refused in {refused:?}, back in {back:?}");
    assert!(back < Duration::from_secs(20), "{back:?}");
    senders.send_new(gateway.ingress, 20, 2).await;

    // Silent: everything is taken, nothing answered. One sender waits for an answer, the others do not.
    proxy.stall();
    let first = {
        let (address, request) = (gateway.ingress, senders.request("evt_4000"));
        tokio::spawn(async move { ask(address, &request).await.unwrap() })
    };
    let noticed = until_not_ready(&gateway).await;
    assert!(noticed < Duration::from_secs(8), "{noticed:?}");
    let refused = refusals(&gateway, &senders).await;
    check(refused);
    proxy.resume();
    let back = until_ready(&gateway).await;
    eprintln!("silent: noticed in {noticed:?}, refused in {refused:?}, back in {back:?}");
    assert!(back < Duration::from_secs(20), "{back:?}");
    senders.promises.record("evt_4000", &first.await.unwrap());
    until_promised(&gateway, &senders, "evt_4000").await;
    senders.send_new(gateway.ingress, 20, 2).await;
    senders.check_some(gateway.ingress, &mut Random::new(1), 20).await;
    assert_eq!(check_once(&database).await, 61);
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_38_a_server_that_turned_read_only_is_not_written_to_and_costs_no_attempts() {
    let server = Server::start(&[]);
    let database = server.database();
    database.query(SHOP);
    let directory = tempfile::tempdir().unwrap();
    let gateway = serve_at(&database.url(), directory.path(), &[]);
    let senders = Senders::new(600, 0);
    senders.send_new(gateway.ingress, 20, 2).await;
    let turn = |read_only: &str| {
        database.query(&format!("ALTER SYSTEM SET default_transaction_read_only = {read_only}"));
        database.query("SELECT pg_reload_conf()");
    };
    turn("on");
    let begun = Instant::now();
    // The server takes a moment to turn. A new key each time: one that is known would be answered without asking it.
    let (mut accepted, mut key) = (0, "evt_4000".to_owned());
    loop {
        let answer = ask(gateway.ingress, &senders.request(&key)).await.unwrap();
        if !senders.promises.record(&key, &answer) {
            assert_is_unavailable(&answer);
            break;
        }
        assert!(begun.elapsed() < Duration::from_secs(30), "it writes on");
        tokio::time::sleep(Duration::from_millis(20)).await;
        accepted += 1;
        key = format!("evt_{}", 4_000 + accepted);
    }
    until_not_ready(&gateway).await;
    let failing = gateway.get("/readyz").await.json()["failing"].as_str().unwrap().to_owned();
    assert!(failing.contains("read-only") || failing.contains("does not allow writes"), "{failing}");
    turn("off");
    until_ready(&gateway).await;
    until_promised(&gateway, &senders, &key).await;
    senders.send_new(gateway.ingress, 20, 2).await;
    assert_eq!(check_once(&database).await, 41 + accepted);
    assert_eq!(database.query("SELECT count(*) FROM oncehook.attempts"), "0");
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_12_a_ledger_that_somebody_locks_is_503_in_time_and_the_connection_is_kept() {
    let database = Server::shared().database();
    database.query(SHOP);
    let directory = tempfile::tempdir().unwrap();
    let gateway = serve_at(&database.url(), directory.path(), &["ingest", "admin"]);
    let senders = Senders::new(600, 0);
    senders.send_new(gateway.ingress, 10, 2).await;
    let locked = std::thread::scope(|scope| {
        let holding = scope
            .spawn(|| database.query("BEGIN; LOCK TABLE oncehook.keys; SELECT pg_sleep(6); ROLLBACK; SELECT 'held'"));
        let waiting = scope.spawn(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                tokio::time::sleep(Duration::from_secs(1)).await;
                let begun = Instant::now();
                let answer = ask(gateway.ingress, &senders.request("evt_4000")).await.unwrap();
                (answer, begun.elapsed())
            })
        });
        assert_eq!(holding.join().unwrap(), "held");
        waiting.join().unwrap()
    });
    let (answer, waited) = locked;
    assert_is_unavailable(&answer);
    assert!(waited > Duration::from_secs(2) && waited < Duration::from_secs(8), "{waited:?}");
    until_ready(&gateway).await;
    assert_eq!(until_promised(&gateway, &senders, "evt_4000").await, "accepted", "nothing was stored");
    senders.send_new(gateway.ingress, 10, 2).await;
    assert!(!gateway.log().contains("the journal cannot store"), "{}", gateway.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_12_a_database_that_comes_later_than_the_gateway_is_waited_for() {
    let (database, proxy) = behind_a_proxy(Server::shared());
    let directory = tempfile::tempdir().unwrap();
    let url = database.url_at(proxy.port());
    proxy.refuse();
    // Not for ever.
    let begun = Instant::now();
    let gone = try_serve(&url, directory.path(), &["--database-wait", "1"]).err().unwrap();
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    assert!(gone.contains("waiting up to 1 s for the database"), "{gone}");
    assert!(gone.contains("open the journal") && gone.contains("the database is not there"), "{gone}");
    // What waiting does not mend is told at once.
    let begun = Instant::now();
    let unknown = url.replace(database.name(), "no_such_database");
    proxy.accept();
    let refused = try_serve(&unknown, directory.path(), &[]).err().unwrap();
    assert!(refused.contains("no_such_database") && !refused.contains("waiting"), "{refused}");
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());

    proxy.refuse();
    let gateway = std::thread::scope(|scope| {
        let starting = scope.spawn(|| serve_at(&url, directory.path(), &[]));
        std::thread::sleep(Duration::from_secs(1));
        assert!(!starting.is_finished(), "there is nothing to serve on");
        proxy.accept();
        starting.join().unwrap()
    });
    let senders = Senders::new(600, 0);
    senders.send_new(gateway.ingress, 10, 2).await;
    assert_eq!(check_once(&database).await, 10);
}

/// The lock outlives every statement's patience, so the database answers now and then, always in vain.
#[tokio::test(flavor = "multi_thread")]
async fn fault_12_while_a_table_is_locked_the_gateway_is_not_ready_and_afterwards_it_is() {
    let database = Server::shared().database();
    database.query(SHOP);
    let directory = tempfile::tempdir().unwrap();
    let gateway = serve_at(&database.url(), directory.path(), &["ingest", "admin"]);
    let senders = Senders::new(600, 0);
    senders.send_new(gateway.ingress, 10, 2).await;
    let lock = "BEGIN; LOCK TABLE oncehook.keys IN ACCESS EXCLUSIVE MODE; SELECT pg_sleep(16); ROLLBACK";
    let held = "SELECT count(*) FROM pg_locks WHERE relation = 'oncehook.keys'::regclass
                  AND mode = 'AccessExclusiveLock' AND granted";
    let lock = || drop(database.query(lock));
    not_ready_while_locked(&gateway, &senders, lock, || database.query(held) == "1");
    until_ready(&gateway).await;
    assert_eq!(until_promised(&gateway, &senders, "evt_4000").await, "accepted", "nothing was stored");
}
