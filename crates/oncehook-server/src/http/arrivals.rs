//! Duplicates, conflicts and held events of one source in the log.
//!
//! The first copy of an event has a line with the event's id, and so have the first other body under its key and an event that
//! is held; what comes after that is added up. Keys, types and bodies are never logged: they may be personal.

use std::collections::{HashSet, VecDeque};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use oncehook::event::EventId;
use oncehook::journal::{Appended, Verdict};
use oncehook_verify::Quarantine;

/// How often the sums are logged.
const SUM_EVERY: Duration = Duration::from_secs(10);

/// Lines of a source about single events between two calls of [`Arrivals::flush`].
const LINES: u32 = 20;

/// Events that are remembered as told.
const REMEMBERED: usize = 1_024;

#[derive(Debug, Default)]
pub(super) struct Arrivals(Mutex<Told>);

#[derive(Debug, Default)]
struct Told {
    events: HashSet<(EventId, &'static str)>,
    order: VecDeque<(EventId, &'static str)>,
    lines: u32,
    untold: Untold,
    summed_at: Option<Instant>,
}

/// How many have no line of their own.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Untold {
    duplicates: u64,
    conflicts: u64,
    held: u64,
}

impl Arrivals {
    /// Logs what an event was to the journal, or counts it. New events are neither.
    pub(super) fn note(&self, source: &str, appended: &Appended, layer: &'static str, quarantine: Option<Quarantine>) {
        let Appended { id: event, verdict, .. } = appended;
        if *verdict == Verdict::New || !self.tell(*event, *verdict) {
            return;
        }
        match verdict {
            Verdict::New => {}
            Verdict::Duplicate => tracing::info!(
                %event, source, layer,
                "event {event} came again, a duplicate that changes nothing; further copies are added up"
            ),
            Verdict::Conflict => tracing::warn!(
                %event, source, layer,
                "another body came under the key of event {event}; the first one counts. To compare: oncehook show {event}"
            ),
            Verdict::Quarantined => {
                let reason = quarantine.map_or("unknown", Quarantine::as_str);
                tracing::warn!(
                    %event, source, reason,
                    "event {event} is held ({reason}) and goes to no route until it is released. To see it: oncehook show {event}"
                );
            }
        }
    }

    /// Whether it gets a line of its own.
    fn tell(&self, event: EventId, verdict: Verdict) -> bool {
        let mut told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (event, verdict.as_str());
        if told.lines < LINES && !told.events.contains(&key) {
            told.remember(key);
            told.lines += 1;
            return true;
        }
        match verdict {
            Verdict::New => {}
            Verdict::Duplicate => told.untold.duplicates += 1,
            Verdict::Conflict => told.untold.conflicts += 1,
            Verdict::Quarantined => told.untold.held += 1,
        }
        false
    }

    /// Logs the sums now and then. Called about once a second.
    pub(super) fn flush(&self, source: &str, now: Instant) {
        let Untold { duplicates, conflicts, held } = self.take_sums(now);
        if duplicates > 0 {
            tracing::info!(source, count = duplicates, "further duplicates of known events");
        }
        if conflicts > 0 {
            tracing::warn!(source, count = conflicts, "further requests with another body under a known key");
        }
        if held > 0 {
            tracing::warn!(
                source,
                count = held,
                "further events are held; to list them: oncehook events --status quarantined"
            );
        }
    }

    fn take_sums(&self, now: Instant) -> Untold {
        let mut told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        told.lines = 0;
        let since = *told.summed_at.get_or_insert(now);
        if now.saturating_duration_since(since) < SUM_EVERY {
            return Untold::default();
        }
        told.summed_at = Some(now);
        std::mem::take(&mut told.untold)
    }
}

impl Told {
    fn remember(&mut self, key: (EventId, &'static str)) {
        if self.order.len() == REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.events.remove(&oldest);
        }
        self.order.push_back(key);
        self.events.insert(key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(number: u16) -> EventId {
        let mut bytes = [0; 16];
        bytes[..2].copy_from_slice(&number.to_be_bytes());
        EventId::from_bytes(bytes)
    }

    #[test]
    fn one_line_for_an_event_few_lines_a_second_and_the_rest_as_a_sum() {
        let (arrivals, start) = (Arrivals::default(), Instant::now());
        assert_eq!(arrivals.take_sums(start), Untold::default());
        let told = (0..100).filter(|_| arrivals.tell(event(1), Verdict::Duplicate)).count();
        assert_eq!(told, 1);
        assert!(arrivals.tell(event(1), Verdict::Conflict), "a conflict is other news");
        let told = (2..1_000).filter(|number| arrivals.tell(event(*number), Verdict::Duplicate)).count();
        assert_eq!(told as u32, LINES - 2);
        let sums = arrivals.take_sums(start + SUM_EVERY);
        assert_eq!(sums, Untold { duplicates: 99 + 998 - u64::from(LINES - 2), conflicts: 0, held: 0 });
        assert_eq!(arrivals.take_sums(start + SUM_EVERY * 2), Untold::default());
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let arrivals = Arrivals::default();
        for number in 0..5_000 {
            arrivals.tell(event(number), Verdict::Duplicate);
            arrivals.take_sums(Instant::now());
        }
        let told = arrivals.0.lock().unwrap();
        assert_eq!((told.events.len(), told.order.len()), (REMEMBERED, REMEMBERED));
    }
}
