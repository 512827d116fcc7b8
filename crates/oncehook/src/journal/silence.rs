//! A circuit breaker for a database that says nothing: no error, no lost connection, just no answer.
//!
//! Promises: once a statement of a lane has waited for two seconds, further appends are refused at once and the journal says
//! that it is failing, until the statement is answered or given up. Senders then hear 503 without a wait. One lane speaks for
//! all: they talk to the same server, and each would find out by two seconds of its own.
//!
//! Does not: end the statement. Its own deadline does.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How long an answer may take before nobody else is made to wait for it.
const PATIENCE: Duration = Duration::from_secs(2);

pub(in crate::journal) struct Silence {
    born: Instant,
    /// Per lane: when its statement was sent, in milliseconds since then, or [`NOTHING`].
    asked: Vec<Arc<AtomicU64>>,
}

const NOTHING: u64 = u64::MAX;

/// A statement under way. It is over when this is dropped.
pub(in crate::journal) struct Asked(Option<Arc<AtomicU64>>);

impl Drop for Asked {
    fn drop(&mut self) {
        if let Some(asked) = &self.0 {
            asked.store(NOTHING, Ordering::Relaxed);
        }
    }
}

impl Silence {
    pub(in crate::journal) fn of(lanes: usize) -> Self {
        let asked = (0..lanes).map(|_| Arc::new(AtomicU64::new(NOTHING))).collect();
        Self { born: Instant::now(), asked }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.born.elapsed().as_millis()).unwrap_or(NOTHING - 1)
    }

    /// A lane sends a statement.
    pub(in crate::journal) fn ask(&self, lane: usize) -> Asked {
        let asked = self.asked.get(lane).cloned();
        if let Some(asked) = &asked {
            asked.store(self.now(), Ordering::Relaxed);
        }
        Asked(asked)
    }

    /// How long the longest of them has waited.
    fn longest(&self) -> Option<Duration> {
        let since = self.asked.iter().map(|asked| asked.load(Ordering::Relaxed)).min()?;
        (since != NOTHING).then(|| Duration::from_millis(self.now().saturating_sub(since)))
    }

    /// Whether nobody else should be made to wait now.
    pub(in crate::journal) fn is_too_long(&self) -> bool {
        self.longest().is_some_and(|longest| longest > PATIENCE)
    }

    /// What there is to say about it.
    pub(in crate::journal) fn told(&self) -> Option<String> {
        let longest = self.longest().filter(|longest| *longest > PATIENCE)?;
        Some(format!("the database has not answered for {} s", longest.as_secs()))
    }
}
