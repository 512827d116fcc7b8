//! How often rare things happened. A proof in which one of them never did has proved less than it says, and fails.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// Counters by name.
#[derive(Debug, Default)]
pub struct Coverage(Mutex<BTreeMap<&'static str, u64>>);

impl Coverage {
    /// Adds to a counter; zero makes it known, so that it is asked for at the end.
    pub fn add(&self, what: &'static str, count: u64) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(what).or_default() += count;
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
