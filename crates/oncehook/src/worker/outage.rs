//! What the breaker of a route says, and which changes of it are worth a log line.
//!
//! A line is logged when a destination counts as down, each time its rest grows, as a reminder every [`REMIND_EVERY`] while
//! it stays down, and when it works again. A probe that begins is not worth a line.

use std::time::{Duration, Instant};

use crate::failures::in_words;

/// How often the log says that a destination is still down.
const REMIND_EVERY: Duration = Duration::from_secs(300);

/// The outage of a route's destination, while it is down.
#[derive(Default)]
pub(super) struct Outage(Option<Down>);

struct Down {
    since: Instant,
    /// The longest rest that the log knows of.
    rest: Duration,
    logged_at: Instant,
}

/// What is to be logged.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Line {
    Down { rest: Duration, trouble: String, still: bool },
    Up { after: Duration },
}

impl Outage {
    /// Takes note of what the breaker says after an attempt: its state, how long the destination is left alone while it is
    /// open, and what was wrong the last time, in our own words. Returns what is to be logged.
    pub(super) fn note(
        &mut self,
        (state, rest): (&'static str, Option<Duration>),
        trouble: &str,
        now: Instant,
    ) -> Option<Line> {
        let line = |rest, still| Some(Line::Down { rest, trouble: trouble.to_owned(), still });
        match (rest, &mut self.0) {
            (Some(rest), None) => {
                self.0 = Some(Down { since: now, rest, logged_at: now });
                line(rest, false)
            }
            (Some(rest), Some(down))
                if rest > down.rest || now.saturating_duration_since(down.logged_at) >= REMIND_EVERY =>
            {
                (down.rest, down.logged_at) = (rest, now);
                line(rest, true)
            }
            (None, down) if state == "closed" => {
                down.take().map(|down| Line::Up { after: now.saturating_duration_since(down.since) })
            }
            _ => None,
        }
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
                let (next_in, reason) = (in_words(rest), trouble.as_str());
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

    #[test]
    fn a_breaker_is_logged_when_it_opens_when_its_rest_grows_and_when_it_closes() {
        let (mut outage, start) = (Outage::default(), Instant::now());
        let mut noted = |state, rest: Option<u64>, second| {
            let now = start + Duration::from_secs(second);
            outage.note((state, rest.map(Duration::from_secs)), "HTTP 503", now)
        };
        let down =
            |rest, still| Some(Line::Down { rest: Duration::from_secs(rest), trouble: "HTTP 503".into(), still });
        assert_eq!(noted("closed", None, 0), None);
        assert_eq!(noted("open", Some(1), 1), down(1, false));
        assert_eq!(noted("open", Some(1), 1), None, "the same state again");
        assert_eq!(noted("half_open", None, 2), None, "a probe is no news");
        assert_eq!(noted("open", Some(2), 2), down(2, true));
        for second in 3..200 {
            assert_eq!(noted("half_open", None, second), None);
            assert_eq!(noted("open", Some(2), second), None, "it rests as long as before");
        }
        assert_eq!(noted("open", Some(2), 302), down(2, true), "a reminder");
        assert_eq!(noted("closed", None, 400), Some(Line::Up { after: Duration::from_secs(399) }));
        assert_eq!(noted("closed", None, 401), None);
    }
}
