//! What the breakers of the routes say, and which changes of it are worth a log line.
//!
//! A line is logged when a destination counts as down, each time its rest grows, as a reminder every [`REMIND_EVERY`] while
//! it stays down, and when it works again. A probe that begins is not worth a line.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::failures::in_words;

/// How often the log says that a destination is still down.
const REMIND_EVERY: Duration = Duration::from_secs(300);

/// What a breaker says after an attempt.
pub(super) struct BreakerNote {
    pub(super) state: &'static str,
    /// How long the destination is left alone, while the breaker is open.
    pub(super) rest: Option<Duration>,
    /// What was wrong with the destination the last time, in our own words.
    pub(super) trouble: Cow<'static, str>,
}

/// What the breakers said last, by route.
#[derive(Default)]
pub(super) struct Outages(Mutex<HashMap<String, Known>>);

struct Known {
    state: &'static str,
    down: Option<Down>,
}

/// A destination that is down.
struct Down {
    since: Instant,
    /// The longest rest that the log knows of.
    rest: Duration,
    told_at: Instant,
}

/// What is to be logged.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Line {
    Down { rest: Duration, trouble: Cow<'static, str>, still: bool },
    Up { after: Duration },
}

impl Outages {
    /// `closed`, `open` or `half_open`.
    pub(super) fn state(&self, route: &str) -> &'static str {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.get(route).map_or("closed", |known| known.state)
    }

    /// Takes note. Returns whether the state changed, and what is to be logged.
    pub(super) fn note(&self, route: &str, note: BreakerNote, now: Instant) -> (bool, Option<Line>) {
        let mut routes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let BreakerNote { state, rest, trouble } = note;
        let Some(known) = routes.get_mut(route) else {
            let down = rest.map(|rest| Down { since: now, rest, told_at: now });
            routes.insert(route.to_owned(), Known { state, down });
            return (state != "closed", rest.map(|rest| Line::Down { rest, trouble, still: false }));
        };
        let changed = std::mem::replace(&mut known.state, state) != state;
        let line = match (rest, &mut known.down) {
            (Some(rest), None) => {
                known.down = Some(Down { since: now, rest, told_at: now });
                Some(Line::Down { rest, trouble, still: false })
            }
            (Some(rest), Some(down)) => {
                let due = now.saturating_duration_since(down.told_at) >= REMIND_EVERY;
                (rest > down.rest || due).then(|| {
                    (down.rest, down.told_at) = (rest, now);
                    Line::Down { rest, trouble, still: true }
                })
            }
            (None, down) if state == "closed" => {
                down.take().map(|down| Line::Up { after: now.saturating_duration_since(down.since) })
            }
            (None, _) => None,
        };
        (changed, line)
    }
}

impl Line {
    /// Writes it. `waiting`: how many deliveries wait, if that is known.
    pub(super) fn log(self, route: &str, waiting: Option<u64>) {
        let wait = match waiting {
            Some(1) => ", 1 delivery waits".to_owned(),
            Some(count) => format!(", {count} deliveries wait"),
            None => String::new(),
        };
        match self {
            Self::Down { rest, trouble, still } => {
                let (next_in, reason) = (in_words(rest), trouble.as_ref());
                let still = if still { "still failing" } else { "failing, so it is left alone for a while" };
                tracing::warn!(
                    route,
                    reason,
                    next_in = next_in.as_str(),
                    waiting,
                    "route {route}: destination {still} ({reason}); next try in {next_in}{wait}"
                );
            }
            Self::Up { after } => {
                let after = in_words(after);
                tracing::info!(route, waiting, "route {route}: destination works again after {after}{wait}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(state: &'static str, rest: Option<u64>) -> BreakerNote {
        BreakerNote { state, rest: rest.map(Duration::from_secs), trouble: "HTTP 503".into() }
    }

    fn down(rest: u64, still: bool) -> Option<Line> {
        Some(Line::Down { rest: Duration::from_secs(rest), trouble: "HTTP 503".into(), still })
    }

    #[test]
    fn a_breaker_is_told_when_it_opens_when_its_rest_grows_and_when_it_closes() {
        let (outages, start) = (Outages::default(), Instant::now());
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let told = |state, rest, second| outages.note("orders", note(state, rest), at(second)).1;
        assert_eq!(told("closed", None, 0), None);
        assert_eq!(told("open", Some(1), 1), down(1, false));
        assert_eq!(told("open", Some(1), 1), None, "the same state again");
        assert_eq!(told("half_open", None, 2), None, "a probe is no news");
        assert_eq!(told("open", Some(2), 2), down(2, true));
        for second in 3..200 {
            assert_eq!(told("half_open", None, second), None);
            assert_eq!(told("open", Some(2), second), None, "it rests as long as before");
        }
        assert_eq!(told("open", Some(2), 302), down(2, true), "a reminder");
        assert_eq!(outages.state("orders"), "open");
        assert_eq!(told("closed", None, 400), Some(Line::Up { after: Duration::from_secs(399) }));
        assert_eq!(told("closed", None, 401), None);
        assert_eq!((outages.state("orders"), outages.state("other")), ("closed", "closed"));
    }
}
