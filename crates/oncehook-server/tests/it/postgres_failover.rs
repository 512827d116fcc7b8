//! The gateway on a primary with a synchronous replica: the primary dies, the replica takes over.

use std::time::{Duration, Instant};

use oncehook_testkit::gateway::Gateway;
use oncehook_testkit::postgres::{Database, Server};
use oncehook_testkit::promises::{Senders, assert_is_unavailable};
use oncehook_testkit::random::Random;
use oncehook_testkit::sender::ask;

use crate::postgres::{SHOP, check_once, serve_at, try_serve, until_ready};

/// A primary whose commits wait for its replica to have them, not to show them.
fn pair() -> (Server, Server) {
    let primary = Server::start(&[]);
    let replica = primary.replica();
    let postgres = primary.database();
    postgres.query("ALTER SYSTEM SET synchronous_standby_names = '*'");
    postgres.query("SELECT pg_reload_conf()");
    until(&postgres, "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'", "1");
    (primary, replica)
}

fn until(database: &Database<'_>, sql: &str, wanted: &str) {
    let begun = Instant::now();
    while database.query(sql) != wanted {
        assert!(begun.elapsed() < Duration::from_secs(60), "{sql}: {}", database.query(sql));
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_37_fault_38_r15_a_failover_to_a_synchronous_replica_loses_nothing_and_needs_no_restart() {
    let mut random = Random::from_environment();
    let (primary, replica) = pair();
    let database = primary.database();
    // The replica is asked next: it has to show the database, too.
    database.query(&format!("SET synchronous_commit = remote_apply; {SHOP}"));
    let directory = tempfile::tempdir().unwrap();
    let both =
        format!("postgres://postgres@127.0.0.1:{},127.0.0.1:{}/{}", replica.port(), primary.port(), database.name());
    // The replica alone is nothing to write to.
    let alone = replica.same(&database).url();
    let refused = try_serve(&alone, directory.path(), &["--database-wait", "1"]).err().unwrap();
    assert!(refused.contains("does not allow writes"), "{refused}");

    let nodes: Vec<Gateway> = (0..2).map(|_| serve_at(&both, directory.path(), &[])).collect();
    let senders = Senders::new(600, 30);
    let sending: Vec<_> = nodes.iter().map(|node| senders.start(node.ingress, 4, &mut random)).collect();
    tokio::time::sleep(Duration::from_secs(2)).await;
    primary.crash();
    let died = Instant::now();
    let promised_before = senders.promises.len();
    tokio::time::sleep(Duration::from_millis(500)).await;
    for node in &nodes {
        assert_eq!(node.get("/readyz").await.status, 503, "a replica that nobody promoted is no database");
    }
    replica.promote();
    let promoted = Instant::now();
    for node in &nodes {
        until_ready(node).await;
    }
    let (down, took) = (died.elapsed(), promoted.elapsed());
    tokio::time::sleep(Duration::from_secs(1)).await;
    let mut heard = oncehook_testkit::promises::Answers::default();
    for sending in sending {
        heard.add(sending.finish().await);
    }
    let after = replica.same(&database);
    let once = check_once(&after).await;
    let kept = senders.promises.check(&nodes[0]).await;
    eprintln!("down {down:?}, ready {took:?} after the promotion; {kept:?} {heard:?}");
    assert_eq!(kept.stored, once);
    assert!(promised_before > 20 && kept.promised > promised_before + 20, "{promised_before} {kept:?}");
    assert!(took < Duration::from_secs(30), "{took:?}");
}

/// A commit that the replica has not confirmed is nobody's promise: not when it is made, not when it is interrupted, and
/// not when its sender comes again and finds it.
#[tokio::test(flavor = "multi_thread")]
async fn fault_37_what_no_replica_has_is_not_acknowledged_not_even_as_a_duplicate() {
    let (primary, replica) = pair();
    let database = primary.database();
    database.query(SHOP);
    let directory = tempfile::tempdir().unwrap();
    let gateway = serve_at(&database.url(), directory.path(), &["ingest", "admin"]);
    let senders = Senders::new(600, 0);
    senders.send_new(gateway.ingress, 10, 2).await;
    replica.crash();
    let stored = "SELECT count(*) FROM oncehook.keys WHERE key = ";
    for (key, interrupt) in [("evt_4000", "pg_cancel_backend"), ("evt_4001", "pg_terminate_backend")] {
        until_ready(&gateway).await;
        let waiting = {
            let (address, request) = (gateway.ingress, senders.request(key));
            tokio::spawn(async move { ask(address, &request).await.unwrap() })
        };
        let waits = "FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND datname = current_database()";
        until(&database, &format!("SELECT count(*) > 0 {waits}"), "t");
        database.query(&format!("SELECT {interrupt}(pid) {waits}"));
        let answer = waiting.await.unwrap();
        assert_is_unavailable(&answer);
        // It is committed here, and nowhere else.
        until(&database, &format!("{stored} '{key}'"), "1");
        until_ready(&gateway).await;
        let begun = Instant::now();
        let again = ask(gateway.ingress, &senders.request(key)).await.unwrap();
        assert_is_unavailable(&again);
        eprintln!("{interrupt}: refused again after {:?}", begun.elapsed());
        database.query(&format!("SELECT pg_terminate_backend(pid) {waits}"));
    }
    // A gateway that starts now reads the keys that came last; those that no replica has are not among them.
    let another = tempfile::tempdir().unwrap();
    let fresh = serve_at(&database.url(), another.path(), &["ingest", "admin"]);
    until_ready(&fresh).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_is_unavailable(&ask(fresh.ingress, &senders.request("evt_4001")).await.unwrap());
    replica.restart();
    until_ready(&gateway).await;
    for key in ["evt_4000", "evt_4001"] {
        let begun = Instant::now();
        loop {
            let answer = ask(gateway.ingress, &senders.request(key)).await.unwrap();
            if senders.promises.record(key, &answer) {
                assert_eq!(answer.json()["status"], "duplicate");
                break;
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "{key}: {answer:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
    primary.crash();
    replica.promote();
    let kept = replica.same(&database).query("SELECT count(*) FROM oncehook.events");
    assert_eq!(kept, "12");
}
