//! A circuit breaker: a destination that is down is left alone for a while, and then asked by one delivery first.
//!
//! Closed, it lets everything through. Failures in a row open it; then it rests. After the rest one probe goes through
//! (half open): its success closes the breaker, its failure opens it for twice as long, up to the longest rest.
//!
//! Promises: while the destination is not known to be up again there is one probe at a time. A permit of which nothing
//! is heard any more does not stop a route for ever: it lapses after [`PROBE_PATIENCE`].
//!
//! Pure: it reads no clock, and it is told what came of the attempts. Which failures count is the caller's matter: a poison
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
#[derive(Debug, Clone)]
pub(crate) struct Breaker {
    policy: BreakerPolicy,
    state: State,
}

#[derive(Debug, Clone, Copy)]
enum State {
    Closed { failures: u32 },
    Open { until: Instant, rest: Duration },
    HalfOpen { lapses: Instant, rest: Duration },
}

impl Breaker {
    /// A closed breaker.
    pub(crate) fn new(policy: BreakerPolicy) -> Self {
        Self { policy, state: State::Closed { failures: 0 } }
    }

    /// How many deliveries may leave now. A permit for one is taken by asking for it.
    pub(crate) fn allows(&mut self, now: Instant) -> Permit {
        let (until, rest) = match self.state {
            State::Closed { .. } => return Permit::All,
            State::Open { until, rest } => (until, rest),
            State::HalfOpen { lapses, rest } => (lapses, rest),
        };
        if now < until {
            return Permit::None { until };
        }
        self.state = State::HalfOpen { lapses: now + PROBE_PATIENCE, rest };
        Permit::One
    }

    /// An attempt reached the destination: it is up.
    pub(crate) fn succeeded(&mut self) {
        self.state = State::Closed { failures: 0 };
    }

    /// An attempt failed at the destination.
    pub(crate) fn failed(&mut self, now: Instant) {
        let longest = self.policy.longest_rest.min(LONGEST_REST);
        self.state = match self.state {
            State::Closed { failures } if failures.saturating_add(1) < self.policy.failures => {
                State::Closed { failures: failures.saturating_add(1) }
            }
            State::Closed { .. } => open(now, self.policy.rest.min(longest)),
            State::HalfOpen { rest, .. } => open(now, rest.saturating_mul(2).min(longest)),
            // A straggler that left before the breaker opened. It says nothing new.
            open @ State::Open { .. } => open,
        };
    }

    /// A permit for one was not used: there was nothing to deliver. The next who asks gets it.
    pub(crate) fn unused(&mut self, now: Instant) {
        if let State::HalfOpen { rest, .. } = self.state {
            self.state = State::Open { until: now, rest };
        }
    }

    /// How long it rests in all, while it is open.
    pub(crate) fn rest(&self) -> Option<Duration> {
        match self.state {
            State::Open { rest, .. } => Some(rest),
            State::Closed { .. } | State::HalfOpen { .. } => None,
        }
    }

    /// The word for people and metrics.
    pub(crate) fn state(&self) -> &'static str {
        match self.state {
            State::Closed { .. } => "closed",
            State::Open { .. } => "open",
            State::HalfOpen { .. } => "half_open",
        }
    }
}

fn open(now: Instant, rest: Duration) -> State {
    State::Open { until: now + rest, rest }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::retry::Chance;

    const POLICY: BreakerPolicy =
        BreakerPolicy { failures: 3, rest: Duration::from_secs(1), longest_rest: Duration::from_secs(5) };

    fn at(start: Instant, millis: u64) -> Instant {
        start + Duration::from_millis(millis)
    }

    /// Fails until it opens, at `now`.
    fn opened(now: Instant) -> Breaker {
        let mut breaker = Breaker::new(POLICY);
        for _ in 0..POLICY.failures {
            breaker.failed(now);
        }
        breaker
    }

    #[test]
    fn r28_failures_in_a_row_open_it_and_others_do_not() {
        let start = Instant::now();
        let mut breaker = Breaker::new(POLICY);
        for _ in 0..10 {
            breaker.failed(start);
            breaker.failed(start);
            breaker.succeeded();
        }
        assert_eq!((breaker.allows(start), breaker.state()), (Permit::All, "closed"));
        breaker.failed(start);
        breaker.failed(start);
        assert_eq!(breaker.allows(start), Permit::All);
        breaker.failed(start);
        assert_eq!((breaker.allows(start), breaker.state()), (Permit::None { until: at(start, 1_000) }, "open"));
    }

    #[test]
    fn r28_one_probe_goes_through_and_its_success_closes() {
        let start = Instant::now();
        let mut breaker = opened(start);
        assert_eq!(breaker.allows(at(start, 999)), Permit::None { until: at(start, 1_000) });
        assert_eq!((breaker.allows(at(start, 1_000)), breaker.state()), (Permit::One, "half_open"));
        let lapses = at(start, 1_000) + PROBE_PATIENCE;
        for later in [1_000, 1_001, 20_000, 200_000] {
            assert_eq!(breaker.allows(at(start, later)), Permit::None { until: lapses });
        }
        breaker.succeeded();
        assert_eq!((breaker.allows(at(start, 2_000)), breaker.state()), (Permit::All, "closed"));
        // It starts anew: the failures before are forgotten, and so is the longer rest.
        breaker.failed(at(start, 2_000));
        assert_eq!(breaker.allows(at(start, 2_000)), Permit::All);
    }

    #[test]
    fn r28_the_rest_doubles_up_to_the_longest() {
        let start = Instant::now();
        let mut breaker = opened(start);
        let mut now = start;
        let mut rests = Vec::new();
        for _ in 0..6 {
            let Permit::None { until } = breaker.allows(now) else { panic!("it rests") };
            rests.push((until - now).as_secs());
            now = until;
            assert_eq!(breaker.allows(now), Permit::One);
            breaker.failed(now);
        }
        assert_eq!(rests, [1, 2, 4, 5, 5, 5]);
        breaker.succeeded();
        for _ in 0..POLICY.failures {
            breaker.failed(now);
        }
        assert_eq!(breaker.allows(now), Permit::None { until: now + POLICY.rest });
    }

    #[test]
    fn stragglers_do_not_prolong_the_rest() {
        let start = Instant::now();
        let mut breaker = opened(start);
        for later in 0..100 {
            breaker.failed(at(start, later));
        }
        assert_eq!(breaker.allows(at(start, 1_000)), Permit::One);
    }

    #[test]
    fn a_permit_that_is_not_used_goes_to_the_next() {
        let start = Instant::now();
        let mut breaker = opened(start);
        assert_eq!(breaker.allows(at(start, 1_000)), Permit::One);
        breaker.unused(at(start, 1_100));
        assert_eq!(breaker.allows(at(start, 1_100)), Permit::One);
        // And one that is lost does not stop the route for ever.
        let lapses = at(start, 1_100) + PROBE_PATIENCE;
        assert_eq!(breaker.allows(lapses - Duration::from_millis(1)), Permit::None { until: lapses });
        assert_eq!(breaker.allows(lapses), Permit::One);
        // Giving back what was not taken changes nothing.
        breaker.succeeded();
        breaker.unused(lapses);
        assert_eq!(breaker.state(), "closed");
    }

    #[test]
    fn odd_policies_are_harmless() {
        let start = Instant::now();
        let odd = BreakerPolicy { failures: 0, rest: Duration::from_secs(9), longest_rest: Duration::ZERO };
        let mut breaker = Breaker::new(odd);
        breaker.failed(start);
        assert_eq!(breaker.allows(start), Permit::One);
        let endless = BreakerPolicy { failures: 1, rest: Duration::MAX, longest_rest: Duration::MAX };
        let mut breaker = Breaker::new(endless);
        breaker.failed(start);
        assert_eq!(breaker.allows(start), Permit::None { until: start + LONGEST_REST });
    }

    /// What the breaker should say, worked out from the whole history instead of kept as a state.
    fn expected(history: &[(Instant, Step)], now: Instant) -> Permit {
        let mut row = 0;
        let mut openings = 0;
        let mut closed_until: Option<Instant> = None;
        let mut probe: Option<Instant> = None;
        for (when, step) in history {
            match step {
                Step::Success => (row, openings, closed_until, probe) = (0, 0, None, None),
                Step::Probe => probe = Some(*when),
                Step::Unused if probe.is_some() => (probe, closed_until) = (None, Some(*when)),
                Step::Unused => {}
                Step::Failure => {
                    row += 1;
                    let opens = if openings == 0 { row >= POLICY.failures } else { probe.is_some() };
                    if opens {
                        openings += 1;
                        let rest = POLICY.rest * 2_u32.pow(openings.min(10) - 1);
                        (probe, closed_until) = (None, Some(*when + rest.min(POLICY.longest_rest)));
                    }
                }
            }
        }
        let waits = probe.map(|taken| taken + PROBE_PATIENCE).or(closed_until);
        match waits {
            None => Permit::All,
            Some(until) if now < until => Permit::None { until },
            Some(_) => Permit::One,
        }
    }

    #[derive(Debug, Clone, Copy)]
    enum Step {
        Success,
        Failure,
        Probe,
        Unused,
    }

    #[test]
    fn random_histories_end_as_worked_out() {
        for seed in 1..=300 {
            let mut chance = Chance::seeded(seed * 7_919);
            let mut now = Instant::now();
            let mut breaker = Breaker::new(POLICY);
            let mut history = Vec::new();
            for _ in 0..200 {
                now += Duration::from_millis((chance.draw() * chance.draw() * 3_000.0) as u64);
                let draw = chance.draw();
                if draw < 0.5 {
                    breaker.failed(now);
                    history.push((now, Step::Failure));
                } else if draw < 0.6 {
                    breaker.succeeded();
                    history.push((now, Step::Success));
                } else if draw < 0.65 {
                    breaker.unused(now);
                    history.push((now, Step::Unused));
                } else if draw < 0.66 {
                    now += PROBE_PATIENCE;
                } else {
                    let permit = breaker.allows(now);
                    assert_eq!(permit, expected(&history, now), "seed {seed}: {history:?}");
                    if permit == Permit::One {
                        history.push((now, Step::Probe));
                    }
                }
            }
        }
    }
}
