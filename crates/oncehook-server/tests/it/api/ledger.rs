//! A ledger that somebody has changed: the gate is closed, and readiness says so.

use std::time::{Duration, Instant};

use oncehook_testkit::gateway::Gateway;

use super::health::parse_metrics;
use super::{rig, stripe};
use crate::kit::{Rig, run, soon};

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
