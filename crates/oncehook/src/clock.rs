//! The one door through which time enters.
//!
//! Everything that needs the wall clock is given a [`Clock`] or a value read from one. Tests hand in a clock that they
//! move themselves. The wall clock may jump, so durations are measured with `tokio::time` or `std::time::Instant`, and
//! what is due later (retries, leases) is written in [`Clock::steady`] time, which does not jump while the process runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Instant;

use oncehook_verify::UnixMicros;

/// A source of wall-clock time. Cheap to clone; clones share the same time.
#[derive(Debug, Clone)]
pub struct Clock(Source);

#[derive(Debug, Clone)]
enum Source {
    System { started: Instant, wall: UnixMicros },
    Manual(Arc<AtomicI64>),
}

impl Clock {
    /// The machine's clock.
    pub fn system() -> Self {
        Self(Source::System { started: Instant::now(), wall: system_now() })
    }

    /// A clock that stands still until it is [`set`](Self::set).
    pub fn manual(start: UnixMicros) -> Self {
        Self(Source::Manual(Arc::new(AtomicI64::new(start.0))))
    }

    /// The time now.
    pub fn now(&self) -> UnixMicros {
        self.given().unwrap_or_else(system_now)
    }

    /// The time since this clock was made, added to the wall clock's time back then: comparable with stored times, and
    /// unmoved when the wall clock is set (fault 18).
    pub fn steady(&self) -> UnixMicros {
        match &self.0 {
            Source::System { started, wall } => {
                let elapsed = i64::try_from(started.elapsed().as_micros()).unwrap_or(i64::MAX);
                UnixMicros(wall.0.saturating_add(elapsed))
            }
            Source::Manual(_) => self.now(),
        }
    }

    /// The time of a manual clock; nothing if this is the machine's.
    pub(crate) fn given(&self) -> Option<UnixMicros> {
        match &self.0 {
            Source::System { .. } => None,
            Source::Manual(micros) => Some(UnixMicros(micros.load(Ordering::Relaxed))),
        }
    }

    /// Moves a manual clock, backwards too. Does nothing to the system clock.
    pub fn set(&self, now: UnixMicros) {
        if let Source::Manual(micros) = &self.0 {
            micros.store(now.0, Ordering::Relaxed);
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "this is the door")]
fn system_now() -> UnixMicros {
    match std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH) {
        Ok(since) => UnixMicros(i64::try_from(since.as_micros()).unwrap_or(i64::MAX)),
        // A clock before 1970 is a broken clock. Zero makes every signed timestamp look far ahead, so nothing is
        // accepted until it is mended.
        Err(_) => UnixMicros(0),
    }
}
