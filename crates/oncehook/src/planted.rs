//! Mistakes that can be made on purpose, to show that the proof notices them.
//!
//! Only in builds with the feature `planted`, which tests and `make prove` switch on and releases do not: elsewhere
//! [`has`] is `false` at compile time and no mistake is left. Which mistake is made is chosen at run time; without
//! a choice the build behaves like any other. The mistakes themselves stand where they are made, each behind the feature:
//! `journal::sqlite::planted`, `journal::server::planted` (around PostgreSQL and MariaDB), `fastpath::planted`.

use std::sync::atomic::{AtomicU8, Ordering};

/// A mistake that the literature, or we ourselves, could have made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Bug {
    /// The journal, or the server that it is on, does not sync its log before it answers.
    NormalSync = 1,
    /// A delivery is settled, committed, and only then run.
    MarkFirst,
    /// An attempt is settled whether or not it is the latest.
    NoFence,
    /// Keys are forgotten after a second.
    ShortMemory,
    /// Whether a key is known is asked before the batch, not inside it.
    SelectThenInsert,
    /// A sender that hangs up takes the transaction with it.
    TiedToClient,
    /// The answer goes out before the commit.
    EarlyAnswer,
    /// A key is written to Redis before the journal has it.
    CacheFirst,
}

impl Bug {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::NormalSync,
        Self::MarkFirst,
        Self::NoFence,
        Self::ShortMemory,
        Self::SelectThenInsert,
        Self::TiedToClient,
        Self::EarlyAnswer,
        Self::CacheFirst,
    ];

    /// Its name in the environment and in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::NormalSync => "normal-sync",
            Self::MarkFirst => "mark-first",
            Self::NoFence => "no-fence",
            Self::ShortMemory => "short-memory",
            Self::SelectThenInsert => "select-then-insert",
            Self::TiedToClient => "tied-to-client",
            Self::EarlyAnswer => "early-answer",
            Self::CacheFirst => "cache-first",
        }
    }

    /// The one of that name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|bug| bug.name() == name)
    }
}

static CHOSEN: AtomicU8 = AtomicU8::new(0);

/// Whether this mistake is made.
#[inline(always)]
#[must_use]
pub fn has(bug: Bug) -> bool {
    cfg!(feature = "planted") && CHOSEN.load(Ordering::Relaxed) == bug as u8
}

/// Makes this mistake from now on, in the whole process, or none. `false`: this build has no mistakes to choose from.
#[must_use]
pub fn plant(bug: Option<Bug>) -> bool {
    CHOSEN.store(bug.map_or(0, |bug| bug as u8), Ordering::Relaxed);
    cfg!(feature = "planted")
}
