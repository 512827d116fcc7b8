//! The ledger on a connection of its own: every place a key can be, every moment a transaction can end.

use std::sync::Arc;

use oncehook_verify::UnixMicros;
use rusqlite::{Connection, ErrorCode, TransactionBehavior};

use super::super::queries::Statements;
use super::super::{connection, schema};
use super::*;
use crate::event::EventIds;
use crate::fastpath::tests::event;
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
        let mut statements = Statements::prepare(&transaction)?;
        let append = |key| statements.append(&mut self.ids, &mut self.ledger, &event(key, 1), UnixMicros(0));
        let appended = keys.iter().copied().map(append).collect::<rusqlite::Result<_>>()?;
        drop(statements);
        match (end, &mut self.ledger.merge) {
            (End::CommitWithMerge(most), Some(merge)) => {
                merge.advance(&transaction, &mut self.ledger.filter, most)?;
            }
            (End::Rollback, _) => {
                self.ledger.merge_along(&transaction, keys.len())?;
                transaction.rollback()?;
                return Ok(appended);
            }
            _ => {}
        }
        transaction.commit()?;
        self.ledger.committed();
        Ok(appended)
    }

    /// Merges everything that is frozen.
    fn merge_all(&mut self) {
        while self.ledger.merge_alone(&mut self.connection, usize::MAX).unwrap() {}
    }

    fn number(&self, sql: &str) -> i64 {
        self.connection.query_row(sql, [], |row| row.get(0)).unwrap()
    }

    /// The keys in the table, and up to which event they are all there.
    fn merged(&self) -> (i64, i64) {
        (self.number("SELECT count(*) FROM oncehook_keys"), merged_to(&self.connection).unwrap())
    }

    /// The ledger refuses to begin anew.
    fn is_refused(&mut self) {
        contradicts(self.ledger.rebuild(&mut self.connection), "hold the same key");
    }

    fn verdicts(&mut self, keys: &[&str]) -> Vec<Verdict> {
        self.batch(keys, End::Commit).into_iter().map(|appended| appended.verdict).collect()
    }

    /// The process is gone: what is in memory too.
    fn crash(&mut self) {
        self.ledger = Ledger::new(self.ledger.full_at, Arc::default());
        self.ledger.rebuild(&mut self.connection).unwrap();
    }
}

fn contradicts<T, E: ToString>(outcome: Result<T, E>, reason: &str) {
    let error = outcome.err().unwrap().to_string();
    assert!(error.contains(reason), "{error}");
}

enum End {
    Commit,
    CommitWithMerge(usize),
    Rollback,
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
    assert_eq!(bench.merged(), (3, 0), "half merged: the watermark waits");
    assert_eq!(bench.verdicts(&["a", "b", "c", "d", "e"]), [Duplicate; 5], "half merged");
    bench.batch(&["e"], End::CommitWithMerge(1));
    assert_eq!(bench.merged(), (4, ids[1].id.sequence()));
    assert_eq!(bench.verdicts(&["a", "b", "c", "d", "e", "f"])[..5], [Duplicate; 5], "in the table");
    bench.crash();
    assert_eq!(bench.verdicts(&["f", "e", "d", "c", "b", "a"]), [Duplicate; 6], "after a crash");
    assert_eq!(bench.number("SELECT expires_at FROM oncehook_keys WHERE key = x'61'"), NOW.0 + 1_000);
}

#[test]
fn fault_1_a_crash_between_any_two_merged_keys_forgets_none() {
    let keys = ["a", "b", "c", "d", "e", "f"];
    for merged in 0..=keys.len() {
        let mut bench = Bench::new(keys.len());
        let first = bench.batch(&keys, End::Commit);
        if merged > 0 {
            bench.batch(&["a"], End::CommitWithMerge(merged));
            assert_eq!(bench.merged().0, merged as i64);
        }
        bench.crash();
        let again = bench.batch(&keys, End::Commit);
        for (first, again) in first.iter().zip(&again) {
            assert_eq!((again.id, again.verdict), (first.id, Duplicate), "crash after {merged}");
        }
        assert_eq!(bench.merged(), (6, first[5].id.sequence()), "the start merges what fills a generation");
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
    assert_eq!(bench.merged(), (0, 0));
    assert_eq!(bench.verdicts(&["x", "a", "b"]), [New, Duplicate, Duplicate]);
    while bench.ledger.merge_alone(&mut bench.connection, 1).unwrap() {}
    assert_eq!(bench.merged().0, 2);
    assert_eq!(bench.verdicts(&["x", "a", "b"]), [Duplicate; 3]);
}

#[test]
fn fault_5_a_merge_that_finds_the_disk_full_goes_on_when_there_is_room() {
    let mut bench = Bench::new(400);
    let keys: Vec<String> = (0..400).map(|number| format!("{number:0>200}")).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    bench.batch(&keys, End::Commit);
    bench.ledger.merge_alone(&mut bench.connection, 100).unwrap();
    let pages = bench.number("PRAGMA page_count");
    let room = |bench: &Bench, pages: i64| assert_eq!(bench.number(&format!("PRAGMA max_page_count = {pages}")), pages);
    room(&bench, pages + 2);
    let error = bench.ledger.merge_alone(&mut bench.connection, usize::MAX).unwrap_err();
    assert_eq!(error.sqlite_error_code(), Some(ErrorCode::DiskFull));
    assert_eq!(bench.merged(), (100, 0));
    // A batch that takes keys along is refused whole, and leaves nothing.
    bench.ledger.full_at = 0;
    let refused = bench.try_batch(&["new"], End::CommitWithMerge(300)).unwrap_err();
    assert_eq!(refused.sqlite_error_code(), Some(ErrorCode::DiskFull));
    bench.ledger.full_at = 400;
    room(&bench, pages + 1_000);
    for crashed in [false, true] {
        if crashed {
            bench.crash();
            assert_eq!(bench.merged().0, 400);
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
    let taken = "INSERT INTO oncehook_keys VALUES ('shop', x'62', zeroblob(16), zeroblob(32), 0, 0)";
    bench.connection.execute_batch(taken).unwrap();
    contradicts(bench.ledger.merge_alone(&mut bench.connection, 9), "hold the same key");
    assert_eq!(bench.merged().1, 0);
    bench.is_refused();
}

#[test]
fn fault_105_two_events_with_one_key_are_found_at_the_start() {
    let mut bench = Bench::new(100);
    bench.batch(&["a", "b"], End::Commit);
    bench.connection.execute_batch("UPDATE oncehook_events SET key = x'61'").unwrap();
    bench.is_refused();
}

#[test]
fn r44_the_first_key_of_a_batch_is_looked_up_whatever_the_filter_says() {
    let mut bench = Bench::new(2);
    bench.batch(&["a", "b"], End::Commit);
    bench.merge_all();
    assert!(bench.ledger.filter_is_whole);
    bench.ledger.filter = Filter::default();
    contradicts(bench.try_batch(&["a"], End::Commit), "the filter does not know");
}

#[test]
fn a_filter_that_is_loaded_while_keys_are_merged_misses_none() {
    let mut bench = Bench::new(10_000);
    let stored: Vec<String> = (0..10_000).map(|number| format!("m{number:05}")).collect();
    bench.batch(&stored.iter().map(String::as_str).collect::<Vec<_>>(), End::Commit);
    bench.merge_all();

    // A new process begins to load; meanwhile keys before and behind the walk are merged.
    bench.crash();
    bench.ledger.full_at = 4;
    assert!(!bench.ledger.filter_is_whole);
    let mut loaded = Filter::default();
    let (mut cursor, mut known) = (Some(Default::default()), Vec::new());
    while let Some(place) = cursor {
        let keys = ["a", "m", "y", "z"].map(|letter| format!("{letter}{}x", known.len()));
        bench.batch(&keys.each_ref().map(String::as_str), End::Commit);
        bench.merge_all();
        known.extend(keys);
        let hasher = bench.ledger.hasher.clone();
        cursor = load(&bench.connection, &hasher, &place, |hash| loaded.insert(hash)).unwrap();
    }
    assert!(known.len() >= 3 * 4, "{} steps show nothing", known.len() / 4);
    bench.ledger.loading = Some(std::thread::spawn(|| Some(loaded)));
    bench.ledger.await_filter();
    assert!(bench.ledger.filter_is_whole);
    known.extend(stored.into_iter().step_by(7));
    for key in &known {
        // The second of the batch: the first is looked up in any case.
        assert_eq!(bench.batch(&["m00000", key], End::Rollback)[1].verdict, Duplicate, "{key}");
    }
}
