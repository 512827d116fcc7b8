//! Whether the journal stores what senders bring, as the senders see it.
//!
//! A journal may look well and store nothing: somebody has locked a table, and every append is given up in time. Here it is
//! noted since when every append was refused. One that is stored ends it, and so does a probe that passes.
//!
//! Does not: decide anything about an event. Only readiness looks at it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Since when the journal has stored nothing although senders came.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trouble {
    first: Instant,
    last: Instant,
    reason: String,
}

impl Trouble {
    /// How long ago the first append began that was refused, with none stored since.
    #[must_use]
    pub fn lasts(&self) -> Duration {
        self.first.elapsed()
    }

    /// How long ago the latest append was refused.
    #[must_use]
    pub fn quiet(&self) -> Duration {
        self.last.elapsed()
    }

    /// Why the latest append was refused.
    #[must_use]
    pub fn reason(&self) -> &str {
        &self.reason
    }
}

/// See the module's text.
pub(super) struct Refusals {
    born: Instant,
    /// When an append was stored, in microseconds since then.
    stored_at: AtomicU64,
    /// Whether there is trouble: all that an append which was stored has to look at.
    any: AtomicBool,
    trouble: Mutex<Option<Trouble>>,
}

impl Default for Refusals {
    fn default() -> Self {
        let (stored_at, any, trouble) = (AtomicU64::new(0), AtomicBool::new(false), Mutex::default());
        Self { born: Instant::now(), stored_at, any, trouble }
    }
}

impl Refusals {
    /// An append was stored.
    pub(super) fn stored(&self) {
        let micros = u64::try_from(self.born.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.stored_at.store(micros, Ordering::Relaxed);
        if self.any.load(Ordering::Relaxed) {
            self.end(|_| true);
        }
    }

    /// An append that began then was refused, or nobody answered it in time.
    pub(super) fn refused(&self, began: Instant, reason: String) {
        let stored_at = self.born + Duration::from_micros(self.stored_at.load(Ordering::Relaxed));
        let (last, mut trouble) = (Instant::now(), self.lock());
        let first = trouble.as_ref().map_or(began.max(stored_at), |trouble| trouble.first);
        *trouble = Some(Trouble { first, last, reason });
        self.any.store(true, Ordering::Relaxed);
    }

    /// A probe that began then has passed. Appends that were refused since know better.
    pub(super) fn probed(&self, began: Instant) {
        self.end(|trouble| trouble.last <= began);
    }

    pub(super) fn trouble(&self) -> Option<Trouble> {
        self.lock().clone()
    }

    fn end(&self, if_so: impl FnOnce(&Trouble) -> bool) {
        let mut trouble = self.lock();
        if trouble.take_if(|trouble| if_so(trouble)).is_some() {
            self.any.store(false, Ordering::Relaxed);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Trouble>> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn trouble_begins_with_a_refusal_and_ends_with_an_append_or_a_later_probe() {
        let second = Duration::from_secs(1);
        let refusals = Refusals::default();
        assert_eq!(refusals.trouble(), None);
        refusals.refused(Instant::now(), "locked".to_owned());
        tokio::time::advance(second).await;
        let began = Instant::now();
        tokio::time::advance(second).await;
        refusals.refused(Instant::now(), "slow".to_owned());
        let trouble = refusals.trouble().unwrap();
        assert_eq!((trouble.lasts(), trouble.quiet(), trouble.reason()), (2 * second, Duration::ZERO, "slow"));
        refusals.probed(began);
        assert!(refusals.trouble().is_some(), "an append was refused after the probe began");
        refusals.probed(Instant::now());
        assert_eq!(refusals.trouble(), None);
        // One that waited for long counts from its beginning, or from the last one that was stored beside it.
        let began = Instant::now();
        tokio::time::advance(second).await;
        refusals.stored();
        tokio::time::advance(second).await;
        refusals.refused(began, "slow".to_owned());
        assert_eq!(refusals.trouble().unwrap().lasts(), second);
        refusals.stored();
        assert_eq!(refusals.trouble(), None);
    }
}
