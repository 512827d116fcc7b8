//! How long a thread waits for another process that writes to the database file.
//!
//! Promises: a sender is refused [`BUSY_WAIT`] after it came, however much else waited for the same lock meanwhile. The
//! deadline belongs to the request ([`until`]), not to the statement. What is done for others than senders waits as long for
//! a lock once; while the same lock is still held, it only tries.
//! Does not: know who holds the lock, or when it is let go.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// How long a transaction waits for another process. Ingest answers 503 after that.
pub(super) const BUSY_WAIT: Duration = Duration::from_secs(2);

/// How long one waits who comes after that time.
const GLANCE: Duration = Duration::from_millis(5);

/// A lock that was not met for so long is taken for another one.
const OVER: Duration = Duration::from_secs(1);

/// What this thread knows about the lock.
#[derive(Debug, Clone, Copy)]
struct Wait {
    /// Until when the sender that is served now can wait.
    deadline: Option<Instant>,
    /// When the lock was met first and last.
    met: Option<(Instant, Instant)>,
    /// The end of the present wait.
    end: Option<Instant>,
    /// Whether not to wait at all.
    never: bool,
}

impl Wait {
    const FRESH: Self = Self { deadline: None, met: None, end: None, never: false };
}

thread_local! {
    static WAIT: Cell<Wait> = const { Cell::new(Wait::FRESH) };
}

/// Runs something that must not wait for others.
pub(super) fn without_waiting<T>(work: impl FnOnce() -> T) -> T {
    WAIT.set(Wait { never: true, ..WAIT.get() });
    let outcome = work();
    WAIT.set(Wait { never: false, ..WAIT.get() });
    outcome
}

/// Sets the deadline of those who are served now; `None` for work without one.
pub(super) fn until(deadline: Option<Instant>) {
    WAIT.set(Wait { deadline, ..WAIT.get() });
}

/// The lock was free.
pub(super) fn passed() {
    WAIT.set(Wait { met: None, ..WAIT.get() });
}

/// SQLite's busy handler: waits for a moment, or says that it was enough. `tries` counts from zero for each lock that is
/// asked for.
pub(super) fn wait(tries: i32) -> bool {
    if WAIT.get().never {
        return false;
    }
    let now = Instant::now();
    let next = WAIT.get().met_at(now, tries == 0);
    WAIT.set(next);
    let go_on = next.end.is_some_and(|end| now < end);
    if go_on {
        std::thread::sleep(Duration::from_millis(u64::from(tries.unsigned_abs().saturating_add(1).min(10))));
    }
    go_on
}

impl Wait {
    /// What is known when the lock is met now, for the first time in this wait or again.
    fn met_at(self, now: Instant, first: bool) -> Self {
        let known = self.met.filter(|(_, last)| now.saturating_duration_since(*last) < OVER);
        let since = known.map_or(now, |(since, _)| since);
        let end = match self.end {
            Some(end) if !first => end,
            _ => self.deadline.unwrap_or(since + BUSY_WAIT).max(now + GLANCE),
        };
        Self { met: Some((since, now)), end: Some(end), ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_waited_for_once_and_by_each_sender_until_its_deadline() {
        let begun = Instant::now();
        let after = |millis| begun + Duration::from_millis(millis);
        let first = Wait::FRESH.met_at(begun, true);
        assert_eq!(first.end, Some(after(2_000)));
        let mut met = first;
        for millis in (0..2_000).step_by(500) {
            met = met.met_at(after(millis), false);
            assert_eq!(met.end, first.end);
        }
        let next_job = met.met_at(after(2_100), true);
        assert_eq!(next_job.end, Some(after(2_105)), "it only tries");
        let sender = Wait { deadline: Some(after(3_000)), ..next_job }.met_at(after(2_200), true);
        assert_eq!(sender.end, Some(after(3_000)));
        let late = Wait { deadline: Some(after(3_000)), ..sender }.met_at(after(3_050), true);
        assert_eq!(late.end, Some(after(3_055)));
        let much_later = Wait { deadline: None, ..late }.met_at(after(9_000), true);
        assert_eq!(much_later.end, Some(after(11_000)), "that is another lock");
    }
}
