//! When a failed delivery is tried again: exponential back-off with full jitter, a cap, and a last attempt.
//!
//! Pure: the chance comes in as a number, so that every delay can be tested. Delays live in the journal, never in a timer.

use std::time::Duration;

use oncehook_verify::UnixMicros;

use crate::delivery::{Failure, Remedy, Verdict};

/// How often and how patiently a route tries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetryPolicy {
    /// After this many attempts a delivery is dead.
    pub max_attempts: u32,
    /// The longest wait after the first failure; it doubles with each further one.
    pub base: Duration,
    /// No wait is longer than this, unless the destination asks for more.
    pub cap: Duration,
}

/// A destination that asks for more patience than this is not believed.
const LONGEST_ASKED: Duration = Duration::from_secs(24 * 3_600);

impl Default for RetryPolicy {
    fn default() -> Self {
        Self { max_attempts: 8, base: Duration::from_secs(2), cap: Duration::from_secs(3_600) }
    }
}

impl RetryPolicy {
    /// The usual patience with a destination outside: about three hours, so that an hour's outage makes no dead letters. An
    /// error in one's own database ([`default`](Self::default)) is said after minutes: a person has to mend it.
    pub fn patient() -> Self {
        Self { max_attempts: 16, ..Self::default() }
    }

    /// How long to wait after the attempt of that number (from 1): evenly spread between nothing and the back-off, so
    /// that failures that came together do not return together. `chance` is in 0..1.
    pub fn delay(&self, attempt: u32, chance: f64) -> Duration {
        let doublings = attempt.saturating_sub(1).min(32);
        let longest = self.base.saturating_mul(2_u32.saturating_pow(doublings)).min(self.cap);
        longest.mul_f64(chance.clamp(0.0, 1.0))
    }

    /// What becomes of a delivery whose attempt failed.
    pub fn after_failure(
        &self,
        failure: Failure,
        attempt: u32,
        attempt_limit: u32,
        now: UnixMicros,
        chance: f64,
    ) -> Verdict {
        let asked = match failure.remedy {
            Remedy::GiveUp => return Verdict::Dead(failure),
            Remedy::Retry(asked) => asked,
            // Who knows how to park does not ask here.
            Remedy::Defer => None,
        };
        if attempt >= attempt_limit {
            return Verdict::Dead(failure);
        }
        let asked = asked.unwrap_or_default().min(LONGEST_ASKED);
        let wait = self.delay(attempt, chance).max(asked);
        Verdict::RetryAt(later(now, wait), failure)
    }
}

/// A time and a while after it.
pub(crate) fn later(at: UnixMicros, wait: Duration) -> UnixMicros {
    UnixMicros(at.0.saturating_add(i64::try_from(wait.as_micros()).unwrap_or(i64::MAX)))
}

/// The time from one to the other; none if the other is not later.
pub(crate) fn between(from: UnixMicros, to: UnixMicros) -> Duration {
    Duration::from_micros(to.0.saturating_sub(from.0).max(0).unsigned_abs())
}

/// How long to leave a database alone that was lost: up to a quarter of a second at first, up to twice as long each time, and never
/// longer than four seconds; with full jitter, so that a fleet does not knock in step at a server that comes back.
#[derive(Debug)]
pub struct Reconnect {
    tries: u32,
    chance: Chance,
}

impl Reconnect {
    const POLICY: RetryPolicy =
        RetryPolicy { max_attempts: u32::MAX, base: Duration::from_millis(250), cap: Duration::from_secs(4) };

    /// With chances of its own.
    pub fn new(chance: Chance) -> Self {
        Self { tries: 0, chance }
    }

    /// How long to wait after one more failure.
    pub fn wait(&mut self) -> Duration {
        self.tries = self.tries.saturating_add(1);
        Self::POLICY.delay(self.tries, self.chance.draw())
    }

    /// It is back: the next failure is a first one.
    pub fn is_back(&mut self) {
        self.tries = 0;
    }
}

/// A small generator of chances for jitter (xorshift). Not for secrets.
#[derive(Debug, Clone)]
pub struct Chance(u64);

impl Chance {
    /// Starts from a seed.
    pub fn seeded(seed: u64) -> Self {
        Self(seed | 1)
    }

    /// Starts from the operating system's randomness.
    pub fn random() -> Self {
        let mut bytes = [0; 8];
        // Without randomness the jitter is the same in every process; nothing else depends on it.
        let _ = aws_lc_rs::rand::fill(&mut bytes);
        Self::seeded(u64::from_ne_bytes(bytes))
    }

    /// The next number in 0..1.
    pub fn draw(&mut self) -> f64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as f64 / (1_u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::delivery::Cause;

    const POLICY: RetryPolicy =
        RetryPolicy { max_attempts: 5, base: Duration::from_secs(2), cap: Duration::from_secs(60) };

    #[test]
    fn delays_double_up_to_the_cap() {
        let longest: Vec<u64> = (1..=8).map(|attempt| POLICY.delay(attempt, 1.0).as_secs()).collect();
        assert_eq!(longest, [2, 4, 8, 16, 32, 60, 60, 60]);
        assert_eq!(POLICY.delay(u32::MAX, 1.0), POLICY.cap);
        assert_eq!(POLICY.delay(3, 0.0), Duration::ZERO);
    }

    #[test]
    fn jitter_is_full_and_even() {
        let mut chance = Chance::seeded(7);
        let delays: Vec<f64> = (0..10_000).map(|_| POLICY.delay(2, chance.draw()).as_secs_f64()).collect();
        let mean = delays.iter().sum::<f64>() / delays.len() as f64;
        assert!((1.9..2.1).contains(&mean), "{mean}");
        assert!(delays.iter().any(|delay| *delay < 0.1) && delays.iter().any(|delay| *delay > 3.9));
        assert!(delays.iter().all(|delay| (0.0..=4.0).contains(delay)));
    }

    #[test]
    fn a_lost_database_is_left_alone_for_longer_and_longer() {
        let mut longest = vec![Duration::ZERO; 8];
        for seed in 0..2_000 {
            let mut reconnect = Reconnect::new(Chance::seeded(seed * 7_919));
            reconnect.chance.draw();
            for longest in &mut longest {
                *longest = (*longest).max(reconnect.wait());
            }
            reconnect.is_back();
            assert!(reconnect.wait() <= Duration::from_millis(250));
        }
        for (found, limit) in longest.iter().zip([250, 500, 1_000, 2_000, 4_000, 4_000, 4_000, 4_000]) {
            let limit = Duration::from_millis(limit);
            assert!(*found <= limit && *found > limit.mul_f64(0.9), "{found:?} of {limit:?}");
        }
    }

    #[test]
    fn the_last_attempt_is_the_last() {
        let now = UnixMicros(1_000_000);
        let failure = Failure::retry(Cause::Destination, "no");
        assert!(matches!(POLICY.after_failure(failure.clone(), 4, 5, now, 0.5), Verdict::RetryAt(..)));
        assert!(matches!(POLICY.after_failure(failure.clone(), 5, 5, now, 0.5), Verdict::Dead(_)));
        // A manual retry raises the limit.
        assert!(matches!(POLICY.after_failure(failure, 5, 10, now, 0.5), Verdict::RetryAt(..)));
        let hopeless = Failure::permanent(Cause::Poison, "never");
        assert!(matches!(POLICY.after_failure(hopeless, 1, 5, now, 0.5), Verdict::Dead(_)));
    }

    #[test]
    fn a_destination_may_ask_for_patience() {
        let failure = Failure::retry(Cause::Destination, "busy").after(Duration::from_secs(600));
        let Verdict::RetryAt(at, _) = POLICY.after_failure(failure, 1, 5, UnixMicros(0), 0.9) else { panic!() };
        assert_eq!(at, UnixMicros(600_000_000));
        let forever = Failure::retry(Cause::Destination, "busy").after(Duration::from_secs(u64::MAX));
        let Verdict::RetryAt(at, _) = POLICY.after_failure(forever, 1, 5, UnixMicros(0), 0.9) else { panic!() };
        assert_eq!(at, UnixMicros(24 * 3_600 * 1_000_000));
    }
}
