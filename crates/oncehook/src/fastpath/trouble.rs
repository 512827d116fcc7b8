//! Whether the journal stores what senders bring, as the senders see it.
//!
//! A journal may look well and store nothing: a table is locked, and every append is given up in time. This module notes
//! since when every append was refused. One that is stored ends it, and so does a probe that passes.
//!
//! Does not: decide anything about an event. Only readiness looks at it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Since when the journal has stored nothing although senders came.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trouble {
    /// When the first append began that was refused, with none stored since.
    pub first: Instant,
    /// When the latest append was refused.
    pub last: Instant,
    /// Why.
    pub reason: String,
}

/// See the module's text.
pub(super) struct Refusals {
    born: Instant,
    /// When the journal last showed that it stores, as [`Refusals::nanos`] counts; 0 if it has not yet.
    stored_at: AtomicU64,
    /// The latest trouble. It is over if something was stored since.
    latest: Mutex<Option<Trouble>>,
}

impl Default for Refusals {
    fn default() -> Self {
        Self { born: Instant::now(), stored_at: AtomicU64::new(0), latest: Mutex::default() }
    }
}

impl Refusals {
    /// An append was stored at that time, or a probe that began then has passed.
    pub(super) fn stored(&self, at: Instant) {
        self.stored_at.fetch_max(self.nanos(at), Ordering::Relaxed);
    }

    /// An append that began then was refused, or not answered in time.
    pub(super) fn refused(&self, began: Instant, reason: String) {
        let stored_at = self.born + Duration::from_nanos(self.stored_at.load(Ordering::Relaxed).saturating_sub(1));
        let (last, mut latest) = (Instant::now(), self.lock());
        let lasting = latest.as_ref().filter(|trouble| self.lasts(trouble));
        let first = lasting.map_or(began.max(stored_at), |trouble| trouble.first);
        *latest = Some(Trouble { first, last, reason });
    }

    pub(super) fn trouble(&self) -> Option<Trouble> {
        self.lock().clone().filter(|trouble| self.lasts(trouble))
    }

    fn lasts(&self, trouble: &Trouble) -> bool {
        self.nanos(trouble.last) > self.stored_at.load(Ordering::Relaxed)
    }

    /// Nanoseconds from just before our beginning: never 0.
    fn nanos(&self, at: Instant) -> u64 {
        u64::try_from((at - self.born).as_nanos()).map_or(u64::MAX, |nanos| nanos.saturating_add(1))
    }

    fn lock(&self) -> MutexGuard<'_, Option<Trouble>> {
        self.latest.lock().unwrap_or_else(PoisonError::into_inner)
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
        assert_eq!(
            (trouble.first.elapsed(), trouble.last.elapsed(), &*trouble.reason),
            (2 * second, Duration::ZERO, "slow")
        );
        refusals.stored(began);
        assert!(refusals.trouble().is_some(), "an append was refused after the probe began");
        refusals.stored(Instant::now());
        assert_eq!(refusals.trouble(), None);
        // One that waited for long counts from its beginning, or from the last one that was stored beside it.
        let began = Instant::now();
        tokio::time::advance(second).await;
        refusals.stored(Instant::now());
        tokio::time::advance(second).await;
        refusals.refused(began, "slow".to_owned());
        assert_eq!(refusals.trouble().unwrap().first.elapsed(), second);
        refusals.stored(Instant::now());
        assert_eq!(refusals.trouble(), None);
    }
}
