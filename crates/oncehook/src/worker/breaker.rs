//! A circuit breaker: a destination that is down is left alone for a while, and then asked by one delivery first.
//!
//! Closed, it lets everything through. Failures in a row open it; then it rests. After the rest one probe goes through
//! (half open): its success closes the breaker, its failure opens it for twice as long, up to the longest rest.
//!
//! Promises: while the destination is not known to be up again there is one probe at a time. A probe that is never
//! reported does not stop a route for ever: it lapses after [`PROBE_PATIENCE`].
//!
//! Pure: it reads no clock, and the caller says what came of the attempts. Which failures count is the caller's matter: a poison
//! event says nothing about the destination.

use std::time::{Duration, Instant};

use crate::route::BreakerPolicy;

/// After this time a probe that was never reported is taken for lost. Longer than an attempt over HTTP may take.
const PROBE_PATIENCE: Duration = Duration::from_secs(600);

/// No rest is longer, whatever the policy says.
const LONGEST_REST: Duration = Duration::from_secs(24 * 3_600);

/// How many deliveries may leave now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Permit {
    /// As many as the route's concurrency allows.
    All,
    /// One, as a probe. It must be reported: [`Breaker::succeeded`], [`Breaker::failed`], or [`Breaker::unused`].
    One,
    /// None before that time.
    None {
        /// When to ask again.
        until: Instant,
    },
}

/// The breaker of one route.
pub(crate) struct Breaker {
    policy: BreakerPolicy,
    /// In a row.
    failures: u32,
    /// Nothing while the breaker is closed.
    down: Option<Down>,
}

/// Open until that time; or half open, with a probe that is taken for lost at that time.
struct Down {
    until: Instant,
    rest: Duration,
    probing: bool,
}

impl Breaker {
    /// A closed breaker.
    pub(crate) fn new(policy: BreakerPolicy) -> Self {
        Self { policy, failures: 0, down: None }
    }

    /// How many deliveries may leave now. A permit for one is taken by asking for it.
    pub(crate) fn allows(&mut self, now: Instant) -> Permit {
        let Some(down) = &mut self.down else { return Permit::All };
        if now < down.until {
            return Permit::None { until: down.until };
        }
        (down.until, down.probing) = (now + PROBE_PATIENCE, true);
        Permit::One
    }

    /// An attempt reached the destination: it is up.
    pub(crate) fn succeeded(&mut self) {
        (self.failures, self.down) = (0, None);
    }

    /// An attempt failed at the destination.
    pub(crate) fn failed(&mut self, now: Instant) {
        let rest = match &self.down {
            // A straggler that left before the breaker opened. It says nothing new.
            Some(down) if !down.probing => return,
            Some(down) => down.rest.saturating_mul(2),
            None => {
                self.failures = self.failures.saturating_add(1);
                if self.failures < self.policy.failures {
                    return;
                }
                self.policy.rest
            }
        };
        let rest = rest.min(self.policy.longest_rest).min(LONGEST_REST);
        self.down = Some(Down { until: now + rest, rest, probing: false });
    }

    /// A permit for one was not used: there was nothing to deliver. The next caller that asks gets it.
    pub(crate) fn unused(&mut self, now: Instant) {
        if let Some(down) = self.down.as_mut().filter(|down| down.probing) {
            (down.until, down.probing) = (now, false);
        }
    }

    /// How long it rests in all, while it is open.
    pub(crate) fn rest(&self) -> Option<Duration> {
        self.down.as_ref().filter(|down| !down.probing).map(|down| down.rest)
    }

    /// The word for people and metrics.
    pub(crate) fn state(&self) -> &'static str {
        match &self.down {
            None => "closed",
            Some(down) if down.probing => "half_open",
            Some(_) => "open",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::retry::Chance;

    const POLICY: BreakerPolicy =
        BreakerPolicy { failures: 3, rest: Duration::from_secs(1), longest_rest: Duration::from_secs(5) };

    /// Milliseconds in which a lost probe lapses.
    const LAPSE: u64 = PROBE_PATIENCE.as_millis() as u64;

    #[derive(Debug, Clone, Copy)]
    enum Step {
        Failed,
        Succeeded,
        Unused,
        /// It is asked, and must allow all, one, or none before a time: because it is open, or because a probe is away.
        All,
        One,
        Open(u64),
        Probing(u64),
    }
    use Step::*;

    /// Takes the steps, each at its time in milliseconds.
    fn check(policy: BreakerPolicy, steps: impl IntoIterator<Item = (u64, Step)>) {
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        let mut breaker = Breaker::new(policy);
        for (number, (millis, step)) in steps.into_iter().enumerate() {
            let now = at(millis);
            let asked = |breaker: &mut Breaker, permit, state| {
                assert_eq!((breaker.allows(now), breaker.state()), (permit, state), "step {number}");
            };
            match step {
                Failed => breaker.failed(now),
                Succeeded => breaker.succeeded(),
                Unused => breaker.unused(now),
                All => asked(&mut breaker, Permit::All, "closed"),
                One => asked(&mut breaker, Permit::One, "half_open"),
                Open(until) => asked(&mut breaker, Permit::None { until: at(until) }, "open"),
                Probing(until) => asked(&mut breaker, Permit::None { until: at(until) }, "half_open"),
            }
        }
    }

    /// The breaker fails until it opens, at 0, and then takes the steps.
    fn check_opened(steps: impl IntoIterator<Item = (u64, Step)>) {
        check(POLICY, [(0, Failed); 3].into_iter().chain(steps));
    }

    #[test]
    fn r28_failures_in_a_row_open_it_and_others_do_not() {
        let others = [Failed, Failed, Succeeded].repeat(10);
        let row = [All, Failed, Failed, All, Failed, Open(1_000)];
        check(POLICY, others.into_iter().chain(row).map(|step| (0, step)));
    }

    #[test]
    fn r28_one_probe_goes_through_and_its_success_closes() {
        let asked = [(999, Open(1_000)), (1_000, One)];
        let probing = [1_000, 1_001, 20_000, 200_000].map(|later| (later, Probing(1_000 + LAPSE)));
        // It starts anew: the failures before are forgotten, and so is the longer rest.
        let closed = [Succeeded, All, Failed, All].map(|step| (2_000, step));
        check_opened(asked.into_iter().chain(probing).chain(closed));
    }

    #[test]
    fn r28_the_rest_doubles_up_to_the_longest() {
        let mut now = 0;
        let mut steps = Vec::new();
        for rest in [1_000, 2_000, 4_000, 5_000, 5_000, 5_000] {
            steps.extend([(now, Open(now + rest)), (now + rest, One), (now + rest, Failed)]);
            now += rest;
        }
        steps.extend([Succeeded, Failed, Failed, Failed, Open(now + 1_000)].map(|step| (now, step)));
        check_opened(steps);
    }

    #[test]
    fn stragglers_do_not_prolong_the_rest() {
        check_opened((0..100).map(|later| (later, Failed)).chain([(1_000, One)]));
    }

    #[test]
    fn a_permit_that_is_not_used_goes_to_the_next() {
        let lapses = 1_100 + LAPSE;
        let unused = [(1_000, One), (1_100, Unused), (1_100, One)];
        // And one that is lost does not stop the route for ever.
        let lost = [(lapses - 1, Probing(lapses)), (lapses, One)];
        // Giving back what was not taken changes nothing.
        let not_taken = [Succeeded, Unused, All].map(|step| (lapses, step));
        check_opened(unused.into_iter().chain(lost).chain(not_taken));
    }

    #[test]
    fn odd_policies_are_harmless() {
        let odd = BreakerPolicy { failures: 0, rest: Duration::from_secs(9), longest_rest: Duration::ZERO };
        check(odd, [(0, Failed), (0, One)]);
        let endless = BreakerPolicy { failures: 1, rest: Duration::MAX, longest_rest: Duration::MAX };
        check(endless, [(0, Failed), (0, Open(LONGEST_REST.as_millis() as u64))]);
    }

    /// What the breaker should allow, worked out from the whole history instead of kept as a state.
    fn expected(history: &[(u64, Step)], now: u64) -> Step {
        let (mut row, mut openings) = (0, 0);
        let (mut closed_until, mut probe) = (None, None);
        for (when, step) in history {
            match step {
                Succeeded => (row, openings, closed_until, probe) = (0, 0, None, None),
                One => probe = Some(*when),
                Unused if probe.is_some() => (probe, closed_until) = (None, Some(*when)),
                Failed => {
                    row += 1;
                    let opens = if openings == 0 { row >= POLICY.failures } else { probe.is_some() };
                    if opens {
                        openings += 1;
                        let rest = 1_000 * 2_u64.pow(openings.min(10) - 1);
                        (probe, closed_until) = (None, Some(*when + rest.min(5_000)));
                    }
                }
                Unused | All | Open(_) | Probing(_) => {}
            }
        }
        match (probe.map(|taken| taken + LAPSE), closed_until) {
            (None, None) => All,
            (Some(lapses), _) if now < lapses => Probing(lapses),
            (None, Some(until)) if now < until => Open(until),
            _ => One,
        }
    }

    #[test]
    fn random_histories_end_as_worked_out() {
        for seed in 1..=300 {
            let mut chance = Chance::seeded(seed * 7_919);
            let mut now = 0;
            let mut history = Vec::new();
            for _ in 0..200 {
                now += (chance.draw() * chance.draw() * 3_000.0) as u64;
                let step = match chance.draw() {
                    ..0.5 => Failed,
                    0.5..0.6 => Succeeded,
                    0.6..0.65 => Unused,
                    0.65..0.66 => {
                        now += LAPSE;
                        continue;
                    }
                    _ => expected(&history, now),
                };
                history.push((now, step));
            }
            check(POLICY, history);
        }
    }
}
