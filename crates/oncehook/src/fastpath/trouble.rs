//! Whether the journal stores what senders bring, as the senders see it.
//!
//! A journal may look well and store nothing: a table is locked, and every append is given up in time. This module notes
//! since when every append was refused. One that is stored ends it, and so does a probe that passes.
//!
//! Does not: decide anything about an event. Only readiness looks at it.

use std::sync::{Mutex, MutexGuard, PoisonError};

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
#[derive(Default)]
pub(super) struct Refusals(Mutex<Seen>);

#[derive(Default)]
struct Seen {
    /// When the journal last showed that it stores.
    stored_at: Option<Instant>,
    trouble: Option<Trouble>,
}

impl Refusals {
    /// An append was stored at that time, or a probe that began then has passed.
    pub(super) fn stored(&self, at: Instant) {
        let mut seen = self.lock();
        seen.stored_at = seen.stored_at.max(Some(at));
        seen.trouble.take_if(|trouble| trouble.last <= at);
    }

    /// An append that began then was refused, or not answered in time.
    pub(super) fn refused(&self, began: Instant, reason: String) {
        let (mut seen, last) = (self.lock(), Instant::now());
        let lasting = seen.trouble.as_ref().map(|trouble| trouble.first);
        let first = lasting.unwrap_or_else(|| seen.stored_at.map_or(began, |stored_at| stored_at.max(began)));
        seen.trouble = Some(Trouble { first, last, reason });
    }

    pub(super) fn trouble(&self) -> Option<Trouble> {
        self.lock().trouble.clone()
    }

    fn lock(&self) -> MutexGuard<'_, Seen> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn trouble_begins_with_a_refusal_and_ends_with_an_append_or_a_later_probe() {
        let (refusals, second) = (Refusals::default(), Duration::from_secs(1));
        let refused = |began| refusals.refused(began, "slow".to_owned());
        // How long ago the trouble began, and how long ago it was seen last.
        let trouble = || refusals.trouble().map(|trouble| (trouble.first.elapsed(), trouble.last.elapsed()));
        assert_eq!(trouble(), None);
        refusals.refused(Instant::now(), "locked".to_owned());
        tokio::time::advance(second).await;
        let began = Instant::now();
        tokio::time::advance(second).await;
        refused(Instant::now());
        assert_eq!(trouble(), Some((2 * second, Duration::ZERO)));
        assert_eq!(refusals.trouble().unwrap().reason, "slow");
        refusals.stored(began);
        assert!(trouble().is_some(), "an append was refused after the probe began");
        refusals.stored(Instant::now());
        assert_eq!(trouble(), None);
        // One that waited for long counts from its beginning, or from the last one that was stored beside it.
        let began = Instant::now();
        tokio::time::advance(second).await;
        refusals.stored(Instant::now());
        tokio::time::advance(second).await;
        refused(began);
        assert_eq!(trouble(), Some((second, Duration::ZERO)));
        refusals.stored(Instant::now());
        assert_eq!(trouble(), None);
    }
}
