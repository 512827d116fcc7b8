//! The ledger on a connection of its own: every place a key can be, every moment a transaction can end.

use std::sync::Arc;

use bytes::Bytes;
use oncehook_verify::{EventKey, Integrity, UnixMicros};
use rusqlite::{Connection, ErrorCode, TransactionBehavior};

use super::super::queries::Statements;
use super::super::{connection, schema};
use super::*;
use crate::event::{EventIds, SourceName};
use crate::journal::{Appended, Verdict};

const NOW: UnixMicros = UnixMicros(1_790_000_000_000_000);

struct Bench {
    _directory: tempfile::TempDir,
    connection: Connection,
    ids: EventIds,
    ledger: Ledger,
}

impl Bench {
    fn new(full_at: usize) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut connection = connection::open_writer(&directory.path().join("journal.db")).unwrap();
        schema::migrate(&mut connection, NOW).unwrap();
        let mut ledger = Ledger::new(full_at, Arc::default());
        ledger.rebuild(&mut connection).unwrap();
        Self { _directory: directory, connection, ids: EventIds::above(0, 1), ledger }
    }

    /// One batch as the writer does it. `end` decides what becomes of the transaction.
    fn batch(&mut self, keys: &[&str], end: End) -> Vec<Appended> {
        self.try_batch(keys, end).unwrap()
    }

    fn try_batch(&mut self, keys: &[&str], end: End) -> rusqlite::Result<Vec<Appended>> {
        self.ledger.begin();
        let transaction = self.connection.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
        let mut appended = Vec::new();
        {
            let mut statements = Statements::prepare(&transaction)?;
            for key in keys {
                appended.push(statements.append(&mut self.ids, &mut self.ledger, &event(key), UnixMicros(0))?);
            }
        }
        if let End::CommitWithMerge(most) = end
            && let Some(merge) = &mut self.ledger.merge
        {
            merge.advance(&transaction, &mut self.ledger.filter, most)?;
        }
        if end == End::Rollback {
            self.ledger.merge_along(&transaction, keys.len())?;
            transaction.rollback()?;
            return Ok(appended);
        }
        transaction.commit()?;
        self.ledger.committed();
        Ok(appended)
    }

    fn verdicts(&mut self, keys: &[&str]) -> Vec<Verdict> {
        self.batch(keys, End::Commit).into_iter().map(|appended| appended.verdict).collect()
    }

    /// The process is gone: what is in memory too.
    fn crash(&mut self) {
        self.ledger = Ledger::new(self.ledger.full_at, Arc::default());
        self.ledger.rebuild(&mut self.connection).unwrap();
    }

    fn in_table(&self) -> i64 {
        self.connection.query_row("SELECT count(*) FROM oncehook_keys", [], |row| row.get(0)).unwrap()
    }

    fn merged_to(&self) -> i64 {
        merged_to(&self.connection).unwrap()
    }
}

#[derive(Clone, Copy, PartialEq)]
enum End {
    Commit,
    CommitWithMerge(usize),
    Rollback,
}

fn event(key: &str) -> NewEvent {
    NewEvent {
        id: None,
        source: SourceName::new("shop").unwrap(),
        key: EventKey::from_bytes(key.as_bytes()).unwrap(),
        key_signed: true,
        kind: None,
        entity: None,
        occurred_at: None,
        version: None,
        received_at: NOW,
        expires_at: UnixMicros(NOW.0 + 77),
        integrity: Integrity::Body,
        headers: Bytes::new(),
        body: Bytes::new(),
        digest: [1; 32],
        quarantine: None,
        routes: Default::default(),
        by_entity: false,
        peer: [127, 0, 0, 1].into(),
    }
}

use Verdict::{Duplicate, New};

#[test]
fn r12_a_key_is_known_wherever_it_is() {
    let mut bench = Bench::new(4);
    assert_eq!(bench.verdicts(&["d", "d", "b"]), [New, Duplicate, New], "in its batch");
    assert_eq!(bench.verdicts(&["d", "b"]), [Duplicate; 2], "in the current generation");
    let ids = bench.batch(&["a", "c"], End::Commit);
    assert!(bench.ledger.is_merging() || bench.ledger.merge.is_some());
    assert_eq!(bench.verdicts(&["a", "b", "c", "d"]), [Duplicate; 4], "frozen");
    bench.batch(&["e"], End::CommitWithMerge(3));
    assert_eq!((bench.in_table(), bench.merged_to()), (3, 0), "half merged: the watermark waits");
    assert_eq!(bench.verdicts(&["a", "b", "c", "d", "e"]), [Duplicate; 5], "half merged");
    bench.batch(&["e"], End::CommitWithMerge(1));
    assert_eq!((bench.in_table(), bench.merged_to()), (4, ids[1].id.sequence()));
    assert_eq!(bench.verdicts(&["a", "b", "c", "d", "e", "f"])[..5], [Duplicate; 5], "in the table");
    bench.crash();
    assert_eq!(bench.verdicts(&["f", "e", "d", "c", "b", "a"]), [Duplicate; 6], "after a crash");
    let expires: i64 = bench
        .connection
        .query_row("SELECT expires_at FROM oncehook_keys WHERE key = x'61'", [], |row| row.get(0))
        .unwrap();
    assert_eq!(expires, NOW.0 + 77);
}

#[test]
fn fault_1_a_crash_between_any_two_merged_keys_forgets_none() {
    let keys = ["a", "b", "c", "d", "e", "f"];
    for merged in 0..=keys.len() {
        let mut bench = Bench::new(keys.len());
        let first = bench.batch(&keys, End::Commit);
        if merged > 0 {
            bench.batch(&["a"], End::CommitWithMerge(merged));
            assert_eq!(bench.in_table(), merged as i64);
        }
        bench.crash();
        let again = bench.batch(&keys, End::Commit);
        for (first, again) in first.iter().zip(&again) {
            assert_eq!((again.id, again.verdict), (first.id, Duplicate), "crash after {merged}");
        }
        assert_eq!(bench.in_table(), 6, "the start merges what fills a generation");
        assert_eq!(bench.merged_to(), first[5].id.sequence());
    }
}

#[test]
fn a_batch_that_is_rolled_back_leaves_no_key_and_no_progress() {
    let mut bench = Bench::new(2);
    bench.batch(&["a", "b"], End::Commit);
    // Sorting ends sometime; then the rolled-back transaction had merged everything and moved the watermark.
    while !bench.ledger.is_merging() {
        std::thread::yield_now();
    }
    assert_eq!(bench.batch(&["x", "x"], End::Rollback)[1].verdict, Duplicate, "within its own batch");
    assert_eq!((bench.in_table(), bench.merged_to()), (0, 0));
    assert_eq!(bench.verdicts(&["x", "a", "b"]), [New, Duplicate, Duplicate]);
    while bench.ledger.merge_alone(&mut bench.connection, 1).unwrap() {}
    assert_eq!(bench.in_table(), 2);
    assert_eq!(bench.verdicts(&["x", "a", "b"]), [Duplicate; 3]);
}

#[test]
fn fault_5_a_merge_that_finds_the_disk_full_goes_on_when_there_is_room() {
    let mut bench = Bench::new(400);
    let keys: Vec<String> = (0..400).map(|number| format!("{number:0>200}")).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    bench.batch(&keys, End::Commit);
    bench.ledger.merge_alone(&mut bench.connection, 100).unwrap();
    let pages: i64 = bench.connection.query_row("PRAGMA page_count", [], |row| row.get(0)).unwrap();
    let room = |connection: &Connection, pages: i64| {
        let set = connection.query_row(&format!("PRAGMA max_page_count = {pages}"), [], |row| row.get::<_, i64>(0));
        assert_eq!(set.unwrap(), pages);
    };
    room(&bench.connection, pages + 2);
    let error = bench.ledger.merge_alone(&mut bench.connection, usize::MAX).unwrap_err();
    assert_eq!(error.sqlite_error_code(), Some(ErrorCode::DiskFull));
    assert_eq!((bench.in_table(), bench.merged_to()), (100, 0));
    // A batch that takes keys along is refused whole, and leaves nothing.
    bench.ledger.full_at = 0;
    let refused = bench.try_batch(&["new"], End::CommitWithMerge(300)).unwrap_err();
    assert_eq!(refused.sqlite_error_code(), Some(ErrorCode::DiskFull));
    bench.ledger.full_at = 400;
    room(&bench.connection, pages + 1_000);
    for crashed in [false, true] {
        if crashed {
            bench.crash();
            assert_eq!(bench.in_table(), 400);
        }
        let verdicts = bench.verdicts(&keys);
        assert!(verdicts.iter().all(|verdict| *verdict == Duplicate));
        assert_eq!(bench.batch(&["new"], End::Rollback)[0].verdict, New);
    }
}

#[test]
fn fault_105_a_key_that_another_event_holds_stops_the_merge_and_the_next_start() {
    let mut bench = Bench::new(2);
    bench.batch(&["a", "b"], End::Commit);
    bench
        .connection
        .execute_batch("INSERT INTO oncehook_keys VALUES ('shop', x'62', zeroblob(16), zeroblob(32), 0, 0)")
        .unwrap();
    let error = bench.ledger.merge_alone(&mut bench.connection, 9).unwrap_err().to_string();
    assert!(error.contains("hold the same key"), "{error}");
    assert_eq!(bench.merged_to(), 0);
    let error = bench.ledger.rebuild(&mut bench.connection).unwrap_err().to_string();
    assert!(error.contains("hold the same key"), "{error}");
}

#[test]
fn fault_105_two_events_with_one_key_are_found_at_the_start() {
    let mut bench = Bench::new(100);
    bench.batch(&["a", "b"], End::Commit);
    bench.connection.execute_batch("UPDATE oncehook_events SET key = x'61'").unwrap();
    let error = bench.ledger.rebuild(&mut bench.connection).unwrap_err().to_string();
    assert!(error.contains("hold the same key"), "{error}");
}

#[test]
fn r44_the_first_key_of_a_batch_is_looked_up_whatever_the_filter_says() {
    let mut bench = Bench::new(2);
    bench.batch(&["a", "b"], End::Commit);
    while bench.ledger.merge_alone(&mut bench.connection, 9).unwrap() {}
    assert!(bench.ledger.filter_is_whole);
    bench.ledger.filter = Filter::default();
    let error = bench.try_batch(&["a"], End::Commit).unwrap_err().to_string();
    assert!(error.contains("the filter does not know"), "{error}");
}

#[test]
fn a_filter_that_is_loaded_while_keys_are_merged_misses_none() {
    let mut bench = Bench::new(10_000);
    let stored: Vec<String> = (0..10_000).map(|number| format!("m{number:05}")).collect();
    bench.batch(&stored.iter().map(String::as_str).collect::<Vec<_>>(), End::Commit);
    while bench.ledger.merge_alone(&mut bench.connection, usize::MAX).unwrap() {}

    // A new process begins to load; meanwhile keys before and behind the walk are merged.
    bench.crash();
    bench.ledger.full_at = 4;
    assert!(!bench.ledger.filter_is_whole);
    let mut loaded = Filter::default();
    let mut place = Place::default();
    let mut step = 0;
    loop {
        let keys = [format!("a{step}"), format!("m{step}x"), format!("y{step}"), format!("z{step}")];
        bench.batch(&keys.each_ref().map(String::as_str), End::Commit);
        while bench.ledger.merge_alone(&mut bench.connection, usize::MAX).unwrap() {}
        let hasher = bench.ledger.hasher.clone();
        match load(&bench.connection, &hasher, &place, |hash| loaded.insert(hash)).unwrap() {
            std::ops::ControlFlow::Continue(next) => place = next,
            std::ops::ControlFlow::Break(()) => break,
        }
        step += 1;
    }
    assert!(step >= 2, "{step} steps show nothing");
    bench.ledger.loading = Some(std::thread::spawn(|| Some(loaded)));
    bench.ledger.await_filter();
    assert!(bench.ledger.filter_is_whole);
    for key in stored.iter().step_by(7) {
        // The second of the batch: the first is looked up in any case.
        assert_eq!(bench.batch(&["a0", key], End::Rollback)[1].verdict, Duplicate, "{key}");
    }
    for step in 0..=step {
        let keys = [format!("a{step}"), format!("m{step}x"), format!("y{step}"), format!("z{step}")];
        for key in &keys {
            assert_eq!(bench.batch(&["a0", key], End::Rollback)[1].verdict, Duplicate, "{key}");
        }
    }
}
