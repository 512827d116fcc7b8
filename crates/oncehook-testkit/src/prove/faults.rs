//! Faults 1 to 57 of FAULTS.md: which test or scenario shows each, or why none does.
//!
//! Tests that carry `fault_N` in their name are found by looking; here stands what their names do not tell.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// A fault: its number, what it is, and what shows it beside the tests that carry its number. Words in back-ticks are
/// tests; `prove:` begins the name of a scenario; anything else is an explanation.
pub const FAULTS: [(u32, &str, &str); 57] = [
    (1, "kill -9 at every stage", "prove: kills, kills at crash points"),
    (2, "power cut", "prove: power cuts; with `r47_planted_a_journal_that_does_not_sync_is_noticed`"),
    (3, "EIO from a sync", "prove: every call"),
    (4, "the directory is not synced", "prove: power cuts (a file whose directory was not synced vanishes)"),
    (5, "ENOSPC", "prove: every call"),
    (
        6,
        "ENOSPC for the dead letter",
        "in part, prove: every call fails the settling writes of effects and follow-ups; a dead letter is written by the same statement, in the same transaction",
    ),
    (7, "the log grows while people read", ""),
    (8, "two processes on one file", ""),
    (
        9,
        "an SQLite with the WAL-reset bug",
        "not covered: the library is built in, and its version is checked at every start; an older one cannot be linked in a test",
    ),
    (
        10,
        "a place that is no local, writable disk",
        "network file systems are refused by their type; no test mounts one",
    ),
    (
        11,
        "bit flips and truncation",
        "a file that SQLite finds damaged is refused; bodies carry their digest, which nobody re-reads yet",
    ),
    (12, "commit of unknown outcome", "prove: simulation, two nodes on PostgreSQL"),
    (
        13,
        "the client hangs up at any moment",
        "prove: senders that hang up, in every scenario; with `r47_planted_an_append_tied_to_its_sender_is_noticed`",
    ),
    (
        14,
        "the handler is cancelled",
        "on the embedded journal statements run on a thread that nobody can cancel; their time is bounded",
    ),
    (15, "panics", ""),
    (16, "OOM kill, SIGTERM, SIGTERM twice", "prove: kills"),
    (17, "a worker frozen past its lease", "prove: freezes, a zombie and its successor, simulation"),
    (18, "clock jumps", "prove: clock jumps"),
    (19, "the same event 1,000 times in parallel", "prove: races"),
    (20, "a duplicate while the first is in its handler", ""),
    (21, "a duplicate after success, death or purge", ""),
    (
        22,
        "a retry after the dedup window",
        "`fault_108_all_mistakes_are_reported_at_once_with_their_places` (a window that is shorter than the provider retries)",
    ),
    (
        23,
        "a window that slides",
        "the expiry stands in the event's row and is never written again; with `r47_planted_a_memory_of_a_second_is_noticed`",
    ),
    (
        24,
        "same id, different body",
        "`another_body_is_a_conflict_and_the_first_stays` and, in every scenario of prove, other bodies under known ids",
    ),
    (25, "same id, volatile fields differ", "`volatile_values_do_not_change_the_digest_and_others_do`"),
    (26, "same id from two sources", "`keys_are_scoped_to_their_source`"),
    (27, "ids that look alike", ""),
    (28, "strange ids", ""),
    (29, "no id", ""),
    (30, "composite keys", ""),
    (31, "lookup before verification", ""),
    (
        32,
        "an id that the signature does not cover",
        "`the_same_body_under_an_unsigned_key_is_a_suspected_replay`",
    ),
    (33, "Redis evicts keys", "prove: two nodes on PostgreSQL (Redis restarts empty)"),
    (34, "Redis lost, flushed, slow", "prove: two nodes on PostgreSQL"),
    (35, "Redis knows more than the database", "with `r47_planted_redis_before_the_commit_is_noticed`"),
    (36, "a missing consumer group", "does not apply: Redis is a cache here, not a queue"),
    (
        37,
        "failover to an asynchronous replica",
        "such a replica loses its lag by design; the window is documented in GUARANTEES.md",
    ),
    (38, "a replica instead of the primary", ""),
    (39, "crash between effect and broker acknowledgement", "does not apply yet: there is no broker intake"),
    (40, "purge races a late retry", ""),
    (
        41,
        "the lease expires while the handler runs",
        "prove: a zombie and its successor, simulation; with `r47_planted_a_missing_fence_is_noticed`",
    ),
    (42, "late acknowledgement to a broker", "does not apply yet: there is no broker intake"),
    (43, "consumer timeout of a broker", "does not apply yet: there is no broker intake"),
    (44, "a broker's short dedup window", "does not apply yet: there is no broker intake"),
    (45, "unroutable publish", "does not apply yet: there is no broker intake"),
    (
        46,
        "a poller by ascending id",
        "deliveries are claimed by state and time, never by a high-water mark; prove: two nodes on PostgreSQL",
    ),
    (47, "crash after sending, before noting it", "prove: kills at crash points (before_settle)"),
    (48, "a lost notification", "workers look every second whether or not they are woken"),
    (
        49,
        "a long transaction of somebody else",
        "not covered by a test yet: readers are bounded on our side; the database's oldest transaction is the operator's to watch",
    ),
    (50, "a poison event", ""),
    (51, "a poison event in an ordered key", ""),
    (52, "out of order", "in storm: `r46_oncehook_on_sqlite_stands_every_hazard_and_a_retry_schedule`"),
    (53, "a hot key", "not covered by a test of its own; lanes are per route, not per key"),
    (54, "a replay of many while live traffic flows", "`one_replay_at_a_time_paced_and_cancelled`"),
    (55, "two operators force a replay", ""),
    (56, "a dead letter that was superseded meanwhile", ""),
    (57, "a destination that is down for an hour", ""),
];

/// The table of the document, and what is wrong with it: tests that are named and do not exist, faults that nothing is said
/// about.
#[must_use]
pub fn table(crates: &Path) -> (String, Vec<String>) {
    let mut names = BTreeSet::new();
    collect(crates, &mut names);
    let mut by_fault: BTreeMap<u32, Vec<&str>> = BTreeMap::new();
    for name in &names {
        for part in name.split("fault_").skip(1) {
            if let Ok(number) = part.split('_').next().unwrap_or_default().parse() {
                by_fault.entry(number).or_default().push(name);
            }
        }
    }
    let mut problems = Vec::new();
    let mut table = String::from("| # | fault | shown by |\n| --- | --- | --- |\n");
    for (number, title, said) in FAULTS {
        for name in said.split('`').skip(1).step_by(2) {
            if !names.contains(name) {
                problems.push(format!("fault {number} names `{name}`, which is no test"));
            }
        }
        let mut parts: Vec<String> =
            by_fault.get(&number).into_iter().flatten().map(|name| format!("`{name}`")).collect();
        if !said.is_empty() {
            parts.push(said.to_owned());
        }
        if parts.is_empty() {
            parts.push("not covered yet: what it is about is not built".to_owned());
        }
        table.push_str(&format!("| {number} | {title} | {} |\n", parts.join(" ")));
    }
    (table, problems)
}

/// The names of all functions below a directory that could be tests.
fn collect(directory: &Path, names: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            collect(&path, names);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read_to_string(&path).unwrap_or_default();
            let found = text.lines().filter_map(|line| line.split("fn ").nth(1)?.split(['(', '<']).next());
            names.extend(found.map(str::to_owned));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fault_is_in_the_table_and_names_tests_that_exist() {
        let numbers: Vec<u32> = FAULTS.iter().map(|(number, ..)| *number).collect();
        assert_eq!(numbers, (1..=57).collect::<Vec<_>>());
        let (table, problems) = table(&Path::new(env!("CARGO_MANIFEST_DIR")).join(".."));
        assert!(problems.is_empty(), "{problems:#?}");
        assert!(table.contains("| 2 | power cut | `fault_2_"), "{table}");
    }
}
