//! Failed attempts in the log: one line each while they are few, added up when they are many.
//!
//! Promises: of one route at most [`ATTEMPTS_TOLD`] failed attempts and [`DEAD_TOLD`] dead deliveries have a line of their own
//! in a [`WINDOW`]; the others are counted, and one line says how many they were. A line holds ids, counts and our own
//! words ([`FailedAttempt::summary`]), never anything that an event, a destination or a database said.

use std::borrow::Cow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::delivery::FailedAttempt;

/// For how long failures of a route are added up.
const WINDOW: Duration = Duration::from_secs(10);

/// Failed attempts of a route that have a line of their own in a window.
const ATTEMPTS_TOLD: u32 = 5;

/// Dead deliveries of a route that have a line of their own in a window.
const DEAD_TOLD: u32 = 20;

/// The failures of one route since the window began.
#[derive(Debug, Default)]
pub struct FailureLog {
    counts: Mutex<Counts>,
    noted: AtomicU64,
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Counts {
    since: Option<Instant>,
    /// Those that have a line of their own.
    attempts_told: u32,
    dead_told: u32,
    /// Those that have none, and what failed last.
    attempts: u64,
    dead: u64,
    summary: Cow<'static, str>,
}

impl FailureLog {
    /// Failed attempts that were noted since the start.
    pub fn noted(&self) -> u64 {
        self.noted.load(Ordering::Relaxed)
    }

    /// Logs an attempt that failed, or counts it.
    pub(crate) fn note(&self, route: &str, failed: &FailedAttempt, now: Instant) {
        self.noted.fetch_add(1, Ordering::Relaxed);
        self.flush(route, now);
        if !self.counts.lock().unwrap_or_else(PoisonError::into_inner).add(failed, now) {
            return;
        }
        let FailedAttempt { event, attempt, limit, cause, summary, next_in } = failed;
        let (cause, reason) = (cause.as_str(), summary.as_ref());
        match next_in {
            Some(wait) => {
                let wait = in_words(*wait);
                tracing::warn!(
                    %event, route, attempt, limit, cause, reason, next_in = wait.as_str(),
                    "route {route}: attempt {attempt} of {limit} failed ({reason}); next try in {wait}"
                );
            }
            None => tracing::error!(
                %event, route, attempt, limit, cause, reason,
                "a delivery is dead: route {route}, attempt {attempt} ({reason}). To see it: oncehook show {event}; after the fix: oncehook retry {event}"
            ),
        }
    }

    /// Logs what was counted, once its window is over. Called now and then, or the last failures would never be logged.
    pub(crate) fn flush(&self, route: &str, now: Instant) {
        let ended = self.counts.lock().unwrap_or_else(PoisonError::into_inner).end_window(now);
        let Some(Counts { attempts, dead, summary, .. }) = ended else { return };
        let (reason, seconds) = (summary.as_ref(), WINDOW.as_secs());
        tracing::warn!(
            route,
            attempts,
            dead,
            reason,
            "route {route}: {attempts} more attempts failed and {dead} more deliveries are dead since {seconds} s ago (last: {reason})"
        );
    }
}

impl Counts {
    /// If the window is over, begins anew. Returns what had no line of its own in it.
    fn end_window(&mut self, now: Instant) -> Option<Self> {
        let over = self.since.is_some_and(|since| now.saturating_duration_since(since) >= WINDOW);
        over.then(|| std::mem::take(self)).filter(|ended| ended.attempts + ended.dead > 0)
    }

    /// Returns whether the failure gets a line of its own.
    fn add(&mut self, failed: &FailedAttempt, now: Instant) -> bool {
        self.since.get_or_insert(now);
        let (told, most, untold) = match failed.next_in {
            Some(_) => (&mut self.attempts_told, ATTEMPTS_TOLD, &mut self.attempts),
            None => (&mut self.dead_told, DEAD_TOLD, &mut self.dead),
        };
        if *told < most {
            *told += 1;
            return true;
        }
        *untold += 1;
        self.summary = failed.summary.clone();
        false
    }
}

/// A wait as people say it.
pub(crate) fn in_words(wait: Duration) -> String {
    match wait.as_secs() {
        0 => format!("{} ms", wait.as_millis()),
        seconds @ 1..120 => format!("{seconds} s"),
        seconds @ 120..7_200 => format!("{} min", seconds / 60),
        seconds => format!("{} h", seconds / 3_600),
    }
}

#[cfg(test)]
mod tests {
    use oncehook_verify::UnixMicros;

    use super::*;
    use crate::delivery::{Cause, Failure, Verdict};
    use crate::event::EventId;

    fn failed(dead: bool) -> FailedAttempt {
        let failure = Failure::retry(Cause::Destination, "it is down");
        let verdict = match dead {
            false => Verdict::RetryAt(UnixMicros(4_000_000), failure),
            true => Verdict::Dead(failure),
        };
        FailedAttempt::of(EventId::from_bytes([7; 16]), 1, 8, &verdict, UnixMicros(0)).unwrap()
    }

    #[test]
    fn a_flood_of_failures_is_a_few_lines_and_a_sum() {
        let (mut counts, start) = (Counts::default(), Instant::now());
        let told = (0..10_000).filter(|_| counts.add(&failed(false), start)).count();
        let dead = (0..10_000).filter(|_| counts.add(&failed(true), start)).count();
        assert_eq!((told, dead), (ATTEMPTS_TOLD as usize, DEAD_TOLD as usize));
        assert_eq!(counts.end_window(start + WINDOW / 2), None);
        let untold = counts.end_window(start + WINDOW).unwrap();
        assert_eq!((untold.attempts, untold.dead, &*untold.summary), (9_995, 9_980, "it is down"));
        // A new window: the next ones have their lines again, and nothing is told twice.
        assert_eq!(counts.end_window(start + WINDOW * 2), None);
        assert!(counts.add(&failed(false), start + WINDOW * 2));
    }

    #[test]
    fn waits_are_said_in_one_unit() {
        let said = [0.25, 1.0, 4.9, 119.0, 120.0, 7_199.0, 7_200.0].map(Duration::from_secs_f64).map(in_words);
        assert_eq!(said, ["250 ms", "1 s", "4 s", "119 s", "2 min", "119 min", "2 h"]);
    }
}
