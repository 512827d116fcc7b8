//! The embedded journal's ledger with generations of a few keys, so that keys are always on their way into the table.

use std::path::Path;
use std::time::Duration;

use oncehook::clock::Clock;
use oncehook::journal::sqlite::{SqliteJournal, SqliteOptions};
use oncehook::journal::{EventQuery, Journal, JournalReader, Verdict};
use oncehook_testkit::journal::{NOW, Subject, append, event, exercise};
use oncehook_testkit::model::{compare, compare_reopening};
use oncehook_verify::UnixMicros;
use rusqlite::Connection;
use std::sync::Arc;

fn open(directory: &Path, keys: usize, clock: Clock) -> SqliteJournal {
    let options = SqliteOptions { ledger_generation: keys, clock, ..SqliteOptions::new(directory.join("journal.db")) };
    SqliteJournal::open(&options).unwrap()
}

fn merged(directory: &Path) -> (i64, i64) {
    let file = Connection::open(directory.join("journal.db")).unwrap();
    file.query_row(
        "SELECT (SELECT count(*) FROM oncehook_keys),
                (SELECT count(*) FROM oncehook_events
                  WHERE seq <= (SELECT coalesce(max(value), 0) FROM oncehook_meta WHERE name = 'ledger_to'))",
        [],
        |row| Ok((row.get(0)?, row.get(1)?)),
    )
    .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn r12_small_generations_behave_like_a_journal() {
    for keys in [1, 3] {
        let open = move |directory: &Path, clock: Clock| Arc::new(open(directory, keys, clock));
        exercise(&Subject { open: Box::new(open), survives: true }).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn r12_random_histories_across_restarts_end_as_in_the_reference() {
    for seed in 1..=12 {
        let directory = tempfile::tempdir().unwrap();
        // One run leaves a tail that is many generations of the next.
        let keys = [1, 2, 7, 30];
        let runs = std::cell::Cell::new(0);
        let open = || {
            runs.set(runs.get() + 1);
            open(directory.path(), keys[(runs.get() + seed as usize) % keys.len()], Clock::system())
        };
        compare_reopening(open, seed, 300).await;
        assert!(runs.get() > 5, "{} runs", runs.get());
    }
    for seed in 1..=4 {
        let directory = tempfile::tempdir().unwrap();
        let journal = open(directory.path(), 5, Clock::system());
        compare(&journal, seed, 300).await;
        journal.close().await;
    }
}

#[tokio::test]
async fn r34_a_key_is_found_before_and_after_its_merge() {
    let directory = tempfile::tempdir().unwrap();
    let journal = open(directory.path(), 3, Clock::system());
    let mut ids = Vec::new();
    for number in 0..20 {
        ids.push(append(&journal, [event(&format!("evt_{number}"), "{}")]).await[0].id);
        for (number, id) in ids.iter().enumerate() {
            let key = oncehook_verify::EventKey::from_bytes(format!("evt_{number}").as_bytes());
            let page = journal.list(EventQuery { key, limit: 10, ..Default::default() }).await.unwrap();
            let found: Vec<_> = page.events.iter().map(|event| event.id).collect();
            assert_eq!(found, [*id], "evt_{number}");
        }
    }
    journal.close().await;
}

/// Nobody sends: what was frozen is merged all the same, and no further.
#[tokio::test]
async fn an_idle_journal_merges_what_is_full() {
    let directory = tempfile::tempdir().unwrap();
    let journal = open(directory.path(), 50, Clock::system());
    append(&journal, (0..120).map(|number| event(&format!("evt_{number}"), "{}")).collect::<Vec<_>>()).await;
    append(&journal, [event("evt_last", "{}")]).await;
    for _ in 0..200 {
        if merged(directory.path()) == (120, 120) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(merged(directory.path()), (120, 120));
    journal.close().await;
}

/// The janitor to come deletes merged events. With the clock set back, new ids must still lie behind the watermark, or
/// their keys would not be read back.
#[tokio::test]
async fn fault_18_ids_stay_above_the_ledger_when_events_are_forgotten_and_the_clock_goes_back() {
    let directory = tempfile::tempdir().unwrap();
    let journal = open(directory.path(), 2, Clock::manual(NOW));
    append(&journal, [event("evt_1", "{}"), event("evt_2", "{}")]).await;
    while merged(directory.path()) != (2, 2) {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    journal.close().await;
    drop(journal);
    let file = Connection::open(directory.path().join("journal.db")).unwrap();
    file.execute_batch("DELETE FROM oncehook_events").unwrap();
    drop(file);
    let early = UnixMicros(NOW.0 - 86_400_000_000);
    let mut late = event("evt_3", "{}");
    late.received_at = early;
    for verdict in [Verdict::New, Verdict::Duplicate] {
        let journal = open(directory.path(), 2, Clock::manual(early));
        assert_eq!(append(&journal, [late.clone()]).await[0].verdict, verdict);
        assert_eq!(append(&journal, [event("evt_1", "{}")]).await[0].verdict, Verdict::Duplicate);
        journal.close().await;
    }
}
