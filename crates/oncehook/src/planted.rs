//! Mistakes that can be made on purpose, to show that the proof notices them.
//!
//! Only in builds with the feature `planted`, which tests and `make prove` switch on and releases do not: elsewhere
//! [`has`] is `false` at compile time and no mistake is left. Which mistake is made is chosen at run time; without
//! a choice the build behaves like any other. The mistakes themselves stand where they are made, each behind the feature:
//! `journal::sqlite::planted`, `journal::server::planted` (around PostgreSQL and MariaDB), `fastpath::planted`.

use std::sync::atomic::{AtomicU8, Ordering};

words! {
    /// A mistake that the literature, or we ourselves, could have made.
    pub enum Bug {
        /// The journal, or the server that it is on, does not sync its log before it answers.
        NormalSync = "normal-sync",
        /// A delivery is settled, committed, and only then run.
        MarkFirst = "mark-first",
        /// An attempt is settled whether or not it is the latest.
        NoFence = "no-fence",
        /// Keys are forgotten after a second.
        ShortMemory = "short-memory",
        /// Whether a key is known is asked before the batch, not inside it.
        SelectThenInsert = "select-then-insert",
        /// A sender that hangs up takes the transaction with it.
        TiedToClient = "tied-to-client",
        /// The answer goes out before the commit.
        EarlyAnswer = "early-answer",
        /// A key is written to Redis before the journal has it.
        CacheFirst = "cache-first",
    }
}

/// No mistake.
const NONE: u8 = u8::MAX;

static CHOSEN: AtomicU8 = AtomicU8::new(NONE);

/// Whether this mistake is made.
#[inline(always)]
pub fn has(bug: Bug) -> bool {
    cfg!(feature = "planted") && CHOSEN.load(Ordering::Relaxed) == bug as u8
}

/// Makes this mistake from now on, in the whole process, or none. `false`: this build has no mistakes to choose from.
#[must_use]
pub fn plant(bug: Option<Bug>) -> bool {
    CHOSEN.store(bug.map_or(NONE, |bug| bug as u8), Ordering::Relaxed);
    cfg!(feature = "planted")
}
