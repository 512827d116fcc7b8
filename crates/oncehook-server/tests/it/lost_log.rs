//! The write-ahead log beside the database file: a graceful stop leaves nothing in it, and a start notices that it is gone.

use std::process::Command;

use oncehook_testkit::gateway::Gateway;
use oncehook_testkit::promises::Senders;
use oncehook_testkit::random::Random;
use oncehook_testkit::sender::ask;
use tempfile::TempDir;

use crate::crash::{prepared, start};
use crate::kit::BINARY;

fn try_start(directory: &TempDir, arguments: &[&str]) -> Result<Gateway, String> {
    let mut command = Command::new(BINARY);
    command.arg("serve").args(arguments);
    Gateway::try_start(command, directory.path())
}

/// A place with nothing but a copy of the database file.
fn bare_copy(of: &TempDir) -> TempDir {
    let copy = prepared();
    std::fs::copy(of.path().join("journal.db"), copy.path().join("journal.db")).unwrap();
    copy
}

/// Sends that many new events and returns their keys.
async fn send(gateway: &Gateway, senders: &Senders, count: usize) -> Vec<String> {
    let mut random = Random::from_environment();
    let keys: Vec<String> = (0..count).map(|_| senders.key(&mut random)).collect();
    for key in &keys {
        let answer = ask(gateway.ingress, &senders.request(key)).await.unwrap();
        assert_eq!(answer.json()["status"], "accepted", "{answer:?}");
    }
    keys
}

/// Every one of them is a duplicate.
async fn knows(gateway: &Gateway, senders: &Senders, keys: &[String]) {
    for key in keys {
        let answer = ask(gateway.ingress, &senders.request(key)).await.unwrap();
        assert_eq!(answer.json()["status"], "duplicate", "{answer:?}");
    }
}

fn refused(started: Result<Gateway, String>) -> String {
    match started {
        Ok(gateway) => panic!("it started although its log is gone:\n{}", gateway.log()),
        Err(log) => log,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_of_the_database_file_after_a_graceful_stop_holds_every_key() {
    let (directory, senders) = (prepared(), Senders::new(300, 0));
    let mut gateway = start(&directory);
    let keys = send(&gateway, &senders, 50).await;
    // Somebody has looked: a reader's connection is open while it stops.
    gateway.json("/api/events").await;
    assert!(gateway.stop().success());
    let log = directory.path().join("journal.db-wal");
    let left = std::fs::metadata(&log).map_or(0, |log| log.len());
    assert_eq!(left, 0, "bytes that only the log has");
    let copy = bare_copy(&directory);
    let gateway = start(&copy);
    knows(&gateway, &senders, &keys).await;
    assert_eq!(gateway.json("/api/stats").await["events"], 50);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_file_whose_log_is_gone_is_refused_until_the_operator_accepts_the_loss() {
    let (directory, senders) = (prepared(), Senders::new(300, 0));
    let mut gateway = start(&directory);
    send(&gateway, &senders, 50).await;
    let while_it_runs = bare_copy(&directory);
    gateway.kill();
    let after_a_kill = bare_copy(&directory);
    for name in ["journal.db-wal", "journal.db-shm"] {
        std::fs::remove_file(directory.path().join(name)).unwrap();
    }
    for (what, place) in
        [("copied while it ran", &while_it_runs), ("copied after a kill", &after_a_kill), ("deleted", &directory)]
    {
        for _ in 0..2 {
            let log = refused(try_start(place, &[]));
            assert!(log.contains("write-ahead log") && log.contains("--accept-lost-log"), "{what}: {log}");
        }
        let mut gateway = try_start(place, &["--accept-lost-log"]).unwrap();
        assert!(gateway.log().contains("are missing") || gateway.log().contains("may be missing"), "{what}");
        assert!(gateway.stop().success());
        // Said once, it is settled.
        assert!(try_start(place, &[]).unwrap().stop().success());
    }
}

/// Another program recovers, copies and removes the log when it is the last to close the file: nothing is missing then.
#[tokio::test(flavor = "multi_thread")]
async fn a_log_that_another_program_has_copied_into_the_file_is_not_missed() {
    let (directory, senders) = (prepared(), Senders::new(300, 0));
    let mut keys = Vec::new();
    for _ in 0..3 {
        let mut gateway = start(&directory);
        keys.extend(send(&gateway, &senders, 20).await);
        gateway.kill();
        let shell = rusqlite::Connection::open(directory.path().join("journal.db")).unwrap();
        shell.execute_batch("CREATE TABLE IF NOT EXISTS mine (id INTEGER)").unwrap();
        drop(shell);
        assert!(!directory.path().join("journal.db-wal").exists());
    }
    // Killed at once, before anything was stored, and what was killed has its log emptied at the next start.
    for _ in 0..3 {
        start(&directory).kill();
    }
    knows(&start(&directory), &senders, &keys).await;
}
