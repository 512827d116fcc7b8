//! The embedded journal: the suite, random histories, and what only a file can go through.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use oncehook::clock::Clock;
use oncehook::event::{EventIds, NewEvent, SourceName};
use oncehook::journal::sqlite::{OpenError, SqliteJournal, SqliteOptions};
use oncehook::journal::{AppendError, Durability, EventQuery, Journal, JournalReader, Layer, Verdict};
use oncehook_testkit::deliveries::{compare_deliveries, exercise_deliveries, exercise_ordering};
use oncehook_testkit::journal::{NOW, Subject, append, event, exercise, try_append};
use oncehook_testkit::model::compare;
use rusqlite::Connection;

fn open_in(directory: &Path) -> Result<SqliteJournal, OpenError> {
    SqliteJournal::open(&SqliteOptions::new(directory.join("journal.db")))
}

#[tokio::test(flavor = "multi_thread")]
async fn r12_the_embedded_journal_behaves_like_a_journal() {
    let open = |directory: &Path, clock: Clock| {
        let options = SqliteOptions { clock, ..SqliteOptions::new(directory.join("journal.db")) };
        Arc::new(SqliteJournal::open(&options).unwrap())
    };
    exercise(&Subject { open: Box::new(open), survives: true }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r12_random_histories_end_as_in_the_reference() {
    for seed in 1..=20 {
        let directory = tempfile::tempdir().unwrap();
        let journal = open_in(directory.path()).unwrap();
        compare(&journal, seed, 300).await;
        journal.close().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn r14_the_embedded_journal_hands_out_work_like_a_journal() {
    let open = |directory: &Path, clock: Clock| {
        let options = SqliteOptions { clock, ..SqliteOptions::new(directory.join("journal.db")) };
        Arc::new(SqliteJournal::open(&options).unwrap())
    };
    exercise_deliveries(&Subject { open: Box::new(open), survives: true }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r14_random_histories_of_work_end_as_in_the_reference() {
    for seed in 1..=10 {
        let directory = tempfile::tempdir().unwrap();
        let clock = Clock::manual(NOW);
        let options = SqliteOptions { clock: clock.clone(), ..SqliteOptions::new(directory.path().join("journal.db")) };
        let journal = SqliteJournal::open(&options).unwrap();
        compare_deliveries(&journal, &clock, seed, 300).await;
        journal.close().await;
    }
}

#[tokio::test]
async fn r3_durability_is_read_back() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let journal = open_in(directory.path()).unwrap();
    let state = journal.state();
    assert_eq!((state.kind, state.durability, state.failing), ("sqlite", Durability::DurableFsync, None));
}

#[tokio::test]
async fn fault_8_a_second_process_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let first = open_in(directory.path()).unwrap();
    assert!(matches!(open_in(directory.path()), Err(OpenError::InUse { .. })));
    first.close().await;
    open_in(directory.path()).unwrap();
}

/// What a crash leaves in the log may never have been synced. It is made durable before anybody is told "duplicate".
#[tokio::test]
async fn fault_2_r3_an_inherited_log_is_made_durable_before_anything_is_answered() {
    let directory = tempfile::tempdir().unwrap();
    let journal = open_in(directory.path()).unwrap();
    let first = append(&journal, [event("evt_1", "{}")]).await[0];
    // The files as a crash would leave them.
    let after_crash = tempfile::tempdir().unwrap();
    for name in ["journal.db", "journal.db-wal"] {
        std::fs::copy(directory.path().join(name), after_crash.path().join(name)).unwrap();
    }
    let log = after_crash.path().join("journal.db-wal");
    assert!(std::fs::metadata(&log).unwrap().len() > 0, "the event is in the log only");
    let reopened = open_in(after_crash.path()).unwrap();
    assert_eq!(std::fs::metadata(&log).unwrap().len(), 0, "the log was written to the database file and synced");
    let again = append(&reopened, [event("evt_1", "{}")]).await[0];
    assert_eq!((again.id, again.verdict), (first.id, Verdict::Duplicate));
    reopened.close().await;
    journal.close().await;
}

/// Two names for one file are one file.
#[tokio::test]
async fn fault_8_a_link_to_the_file_does_not_get_around_the_lock() {
    let directory = tempfile::tempdir().unwrap();
    let journal = open_in(directory.path()).unwrap();
    let link = directory.path().join("other.db");
    std::os::unix::fs::symlink(directory.path().join("journal.db"), &link).unwrap();
    assert!(matches!(SqliteJournal::open(&SqliteOptions::new(&link)), Err(OpenError::InUse { .. })));
    journal.close().await;
}

#[tokio::test]
async fn fault_10_a_missing_or_read_only_place_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    assert!(matches!(open_in(&directory.path().join("nowhere")), Err(OpenError::Place { .. })));
    let file = directory.path().join("journal.db");
    std::fs::create_dir(&file).unwrap();
    assert!(SqliteJournal::open(&SqliteOptions::new(&file)).is_err());
}

/// Another program changes the file while it is closed: the journal must not open.
#[tokio::test]
async fn fault_105_r44_a_changed_ledger_is_found_before_the_first_request() {
    for change in [
        "ALTER TABLE oncehook_keys RENAME COLUMN key TO idempotency_key",
        "DROP TABLE oncehook_keys",
        // An event's row is the record of its key until that is merged.
        "ALTER TABLE oncehook_events RENAME COLUMN key TO idempotency_key",
        "ALTER TABLE oncehook_events RENAME COLUMN digest TO hash",
        "ALTER TABLE oncehook_events DROP COLUMN key_expires_at",
        "DROP TABLE oncehook_meta",
        "ALTER TABLE oncehook_keys RENAME TO k; CREATE TABLE oncehook_keys AS SELECT * FROM k; DROP TABLE k",
        "CREATE TABLE k (source TEXT NOT NULL, key TEXT NOT NULL COLLATE NOCASE, event BLOB, digest BLOB, first_seen INTEGER, expires_at INTEGER, PRIMARY KEY (source, key)) WITHOUT ROWID; DROP TABLE oncehook_keys; ALTER TABLE k RENAME TO oncehook_keys",
        "CREATE TRIGGER oncehook_trick AFTER INSERT ON oncehook_keys BEGIN DELETE FROM oncehook_keys; END",
    ] {
        let directory = tempfile::tempdir().unwrap();
        let journal = open_in(directory.path()).unwrap();
        append(&journal, [event("evt_1", "{}")]).await;
        journal.close().await;
        drop(journal);
        let other = Connection::open(directory.path().join("journal.db")).unwrap();
        other.execute_batch(change).unwrap();
        drop(other);
        let refused = open_in(directory.path()).err().map(|error| error.to_string());
        assert!(refused.as_ref().is_some_and(|error| error.contains("oncehook_")), "{change}: {refused:?}");
    }
}

/// Another program changes the file while it is open: appends fail, and the self-test says why.
#[tokio::test]
async fn fault_105_r44_a_running_journal_notices_a_changed_ledger() {
    let directory = tempfile::tempdir().unwrap();
    let journal = open_in(directory.path()).unwrap();
    append(&journal, [event("evt_1", "{}")]).await;
    let other = Connection::open(directory.path().join("journal.db")).unwrap();
    other.execute_batch("ALTER TABLE oncehook_keys RENAME COLUMN key TO idempotency_key").unwrap();
    assert!(matches!(try_append(&journal, [event("evt_1", "{}")]).await, Err(AppendError::Unavailable(_))));
    assert!(journal.self_test().await.is_err());
    other.execute_batch("ALTER TABLE oncehook_keys RENAME COLUMN idempotency_key TO key").unwrap();
    drop(other);
    // It mends itself, and still knows the key.
    let mut verdict = None;
    for _ in 0..100 {
        if let Ok(receipt) = try_append(&journal, [event("evt_1", "{}")]).await {
            verdict = Some(receipt[0].verdict);
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(verdict, Some(Verdict::Duplicate));
    assert!(journal.self_test().await.is_ok());
    journal.close().await;
}

/// Another program holds the write lock: the answer is a refusal within seconds, then all goes on.
#[tokio::test]
async fn a_locked_file_refuses_and_recovers() {
    let directory = tempfile::tempdir().unwrap();
    let journal = open_in(directory.path()).unwrap();
    let other = Connection::open(directory.path().join("journal.db")).unwrap();
    other.execute_batch("CREATE TABLE orders (id INTEGER); BEGIN IMMEDIATE; INSERT INTO orders VALUES (1)").unwrap();
    assert!(matches!(try_append(&journal, [event("evt_1", "{}")]).await, Err(AppendError::Unavailable(_))));
    other.execute_batch("COMMIT").unwrap();
    assert_eq!(append(&journal, [event("evt_1", "{}")]).await[0].verdict, Verdict::New);
    journal.close().await;
}

/// The log starts over under constant load instead of growing.
#[tokio::test(flavor = "multi_thread")]
async fn fault_7_the_log_stays_bounded_while_people_read() {
    let directory = tempfile::tempdir().unwrap();
    let journal = Arc::new(open_in(directory.path()).unwrap());
    let body = "x".repeat(4_000);
    let mut number = 0;
    for _ in 0..60 {
        let request = (0..500).map(|_| {
            number += 1;
            event(&format!("evt_{number}"), &body)
        });
        append(&*journal, request.collect::<Vec<_>>()).await;
        journal.list(EventQuery { limit: 10, ..Default::default() }).await.unwrap();
        // The helper that copies the log needs a moment of the processor too, where others use all of it.
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let log = std::fs::metadata(directory.path().join("journal.db-wal")).unwrap().len();
    assert!(log < 160 << 20, "the log has {log} bytes");
    assert_eq!(journal.stats().await.unwrap().sources[0].events, 30_000);
    journal.close().await;
}

/// Enough events for several blocks of the search index, with rare values among them.
#[tokio::test(flavor = "multi_thread")]
async fn r34_rare_events_are_found_in_a_long_history() {
    let directory = tempfile::tempdir().unwrap();
    let journal = open_in(directory.path()).unwrap();
    let mut rare = Vec::new();
    for chunk in 0..35 {
        let events = (0..100).map(|number| NewEvent {
            source: SourceName::new(if chunk == 7 && number == 3 { "seldom" } else { "shop" }).unwrap(),
            kind: Some(if chunk % 10 == 2 && number == 5 { "odd".to_owned() } else { format!("type-{}", number % 3) }),
            entity: Some(format!("entity-{}", (chunk * 100 + number) / 2)),
            ..event(&format!("evt_{chunk}_{number}"), "{}")
        });
        let receipt = append(&journal, events.collect::<Vec<_>>()).await;
        if chunk % 10 == 2 {
            rare.push(receipt[5].id);
        }
    }
    while journal.state().index_lag >= 1_000 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let find = async |query: EventQuery| {
        let page = journal.list(EventQuery { limit: 1_000, ..query }).await.unwrap();
        page.events.into_iter().map(|event| event.id).collect::<Vec<_>>()
    };
    rare.reverse();
    assert_eq!(find(EventQuery { kind: Some("odd".to_owned()), ..Default::default() }).await, rare);
    assert_eq!(find(EventQuery { source: Some("seldom".to_owned()), ..Default::default() }).await.len(), 1);
    for entity in [0, 1, 499, 500, 999, 1_749] {
        let query = EventQuery { entity: Some(format!("entity-{entity}")), ..Default::default() };
        assert_eq!(find(query).await.len(), 2, "entity-{entity}");
    }
    assert!(find(EventQuery { entity: Some("nobody".to_owned()), ..Default::default() }).await.is_empty());
    journal.close().await;
    let blocks: i64 = Connection::open(directory.path().join("journal.db"))
        .unwrap()
        .query_row("SELECT count(*) FROM oncehook_blocks", [], |row| row.get(0))
        .unwrap();
    assert_eq!(blocks, 3);
}

/// Counts wait in memory for the next flush. While none can be stored they do not pile up without end, and none is lost.
#[tokio::test(flavor = "multi_thread")]
async fn r16_duplicates_are_counted_by_layer_and_never_without_bound() {
    let directory = tempfile::tempdir().unwrap();
    let journal = open_in(directory.path()).unwrap();
    append(&journal, [event("evt_0_0", "{}")]).await;
    let mut ids = EventIds::above(0, 0);
    let ids: Vec<_> = (0..150_000).map(|_| ids.next(event("evt", "{}").received_at)).collect();
    let file = Connection::open(directory.path().join("journal.db")).unwrap();
    let counted = || -> (i64, i64) {
        file.query_row(
            "SELECT coalesce(sum(memory), 0), coalesce(sum(journal), 0) FROM oncehook_duplicates",
            [],
            |row| Ok((row.get(0)?, row.get(1)?)),
        )
        .unwrap()
    };
    // Another program holds the write lock: nothing can be flushed.
    file.execute_batch("BEGIN IMMEDIATE").unwrap();
    let shop = event("evt", "{}").source;
    let peer = [192, 0, 2, 1].into();
    let note = |id| journal.note_duplicate(id, &shop, event("evt", "{}").received_at, peer, Layer::Memory);
    let taken = ids.iter().filter(|id| note(**id)).count();
    // Those of a flush that waits for the lock are held beside the new ones.
    assert!((16_384..=70_000).contains(&taken), "{taken} of {}", ids.len());
    assert_eq!(journal.stats().await.unwrap().sources[0].duplicates, taken as u64);
    // A flush has been tried meanwhile, and its counts came back.
    tokio::time::sleep(Duration::from_millis(4_000)).await;
    file.execute_batch("COMMIT").unwrap();
    append(&journal, [event("evt_0_0", "{}")]).await;
    for _ in 0..200 {
        if counted() == (taken as i64, 1) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(counted(), (taken as i64, 1));
    assert_eq!(journal.stats().await.unwrap().sources[0].duplicates, taken as u64 + 1);
    journal.close().await;
}

#[tokio::test]
async fn the_views_people_expect_are_there() {
    let directory = tempfile::tempdir().unwrap();
    let journal = open_in(directory.path()).unwrap();
    let id = append(&journal, [event("evt_1", "{}"), event("evt_1", "{}")]).await[0].id;
    journal.close().await;
    let reader = Connection::open(directory.path().join("journal.db")).unwrap();
    let row: (String, String, String, i64) = reader
        .query_row("SELECT event_id, key, status, duplicates FROM oncehook_processed_events", [], |row| {
            Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?))
        })
        .unwrap();
    assert_eq!(row, (id.to_string(), "evt_1".to_owned(), "unrouted".to_owned(), 1));
    let retries: i64 = reader.query_row("SELECT count(*) FROM oncehook_retry_logs", [], |row| row.get(0)).unwrap();
    assert_eq!(retries, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn r13_r24_r29_r30_the_embedded_journal_keeps_the_lines_of_entities() {
    let open = |directory: &Path, clock: Clock| {
        let options = SqliteOptions { clock, ..SqliteOptions::new(directory.join("journal.db")) };
        Arc::new(SqliteJournal::open(&options).unwrap())
    };
    exercise_ordering(&Subject { open: Box::new(open), survives: true }).await;
}
