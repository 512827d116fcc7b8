//! The mistakes of [`crate::planted`] that the fast path makes, or must not hide. Only in tests and in builds with the feature
//! `planted`.
//!
//! Promises: without a choice at run time nothing changes. Does not: exist in a release.

use std::time::Duration;

use oncehook_verify::UnixMicros;

use super::memory::Fact;
use super::{Draft, FastPath};
use crate::event::EventId;
use crate::planted::{Bug, has};

/// Whether the journal forgets keys by mistake. The caches would know them still.
#[cfg(feature = "planted")]
pub(super) fn asks_the_journal_alone() -> bool {
    has(Bug::SelectThenInsert) || has(Bug::ShortMemory)
}

impl FastPath {
    /// [`Bug::CacheFirst`]: facts are written before they are facts.
    pub(super) async fn write_too_early(&self, drafts: &[Draft]) {
        let too_early = has(Bug::CacheFirst);
        #[cfg(test)]
        let too_early = too_early || self.written_too_early;
        for draft in drafts.iter().filter(|_| too_early) {
            let (event, expires_at) = (EventId::from_bytes([7; 16]), UnixMicros(draft.received_at.0 + 60_000_000));
            self.learn(Draft { name: None, ..draft.clone() }, Fact { event, digest: draft.digest, expires_at });
        }
        if has(Bug::CacheFirst) {
            // Redis is written beside us. The mistake is that it knows first, so it gets the time.
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}
