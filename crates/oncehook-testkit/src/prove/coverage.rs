//! How often rare things happened. A proof in which one of them never did has proved less than it says, and fails.
//!
//! Promises: a [whole](Coverage::whole) proof asks for everything that is listed here, whether or not the scenario that brings it
//! was run; and nothing is counted that is not listed, so a misspelt counter is a panic and not a hole.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// Everything that is counted.
pub const ALL: [&str; 51] = [
    // What is done to the embedded journal.
    "kills",
    "kills at crash points",
    "power cuts",
    "power cuts that undid writes",
    "power cuts that kept some writes",
    "writes undone",
    "torn pages",
    "EIO at a call",
    "ENOSPC at a call",
    "EIO injected by strace",
    "ENOSPC injected by strace",
    "journal reopened after a failed call",
    "freezes past a lease",
    "clock jumps",
    "races",
    // What is done to two nodes on a server.
    "nodes killed",
    "nodes killed at crash points",
    "nodes frozen past a lease",
    "clocks of nodes moved",
    "connections to the database cut",
    "connections to Redis cut",
    "database server crashed",
    "Redis restarted",
    "Redis frozen",
    // What senders saw.
    "duplicates answered",
    "conflicts answered",
    "senders that hung up",
    "answers cut off",
    "answers 503",
    // What became of it inside.
    "duplicates that memory knew",
    "duplicates that Redis knew",
    "duplicates that the journal knew",
    "attempts that ended with their process",
    "keys merged into the ledger's table",
    "events spooled",
    "ids of spooled events that others had",
    "effects in another database",
    "dead deliveries with a reason",
    // What the simulation met.
    "zombies turned away",
    "commits that failed",
    "commits of unknown outcome",
    "answers lost",
    "conflicts",
    "answered by the fast path",
    "leases that ran out",
    "stored by a node that was gone by then",
    "requests that the destination knew",
    "answers of the destination lost",
    "refused connections",
    "crashes",
    "freezes",
];

/// Counters by name.
#[derive(Debug, Default)]
pub struct Coverage(Mutex<BTreeMap<&'static str, u64>>);

impl Coverage {
    /// All counters, at zero: each is asked for at the end. The default asks only for what somebody has named.
    #[must_use]
    pub fn whole() -> Self {
        Self(Mutex::new(ALL.into_iter().map(|what| (what, 0)).collect()))
    }

    /// Adds to a counter; zero makes it known, so that it is asked for at the end.
    pub fn add(&self, what: &'static str, count: u64) {
        assert!(ALL.contains(&what), "nobody asks for `{what}`");
        *self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(what).or_default() += count;
    }

    /// Adds to a counter that only a whole proof asks for.
    pub fn note(&self, what: &'static str, count: u64) {
        if count > 0 {
            self.add(what, count);
        }
    }

    /// All of them.
    #[must_use]
    pub fn all(&self) -> BTreeMap<&'static str, u64> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Those that stayed at zero.
    #[must_use]
    pub fn missing(&self) -> Vec<&'static str> {
        self.all().into_iter().filter(|(_, count)| *count == 0).map(|(what, _)| what).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r47_a_whole_proof_asks_for_everything_and_others_for_what_they_named() {
        let whole = Coverage::whole();
        assert_eq!(whole.missing().len(), ALL.len());
        whole.add("kills", 2);
        assert!(!whole.missing().contains(&"kills") && whole.missing().contains(&"power cuts"));
        let part = Coverage::default();
        part.add("kills", 1);
        part.add("torn pages", 0);
        assert_eq!(part.missing(), ["torn pages"]);
        assert!(std::panic::catch_unwind(|| Coverage::default().add("kils", 1)).is_err());
    }
}
