//! What people see of a journal: queries and answers of [`JournalReader`](super::JournalReader).
//!
//! These are plain data. How they look as JSON is the server's matter.

use std::collections::VecDeque;
use std::net::IpAddr;

use bytes::Bytes;
use oncehook_verify::{EventKey, Quarantine, UnixMicros};

use super::tally::{Pending, Tally, remember};
use crate::delivery::DeliveryState;
use crate::event::EventId;

/// Which events to list. All conditions must hold.
#[derive(Debug, Clone, Default)]
pub struct EventQuery {
    /// Only this source.
    pub source: Option<String>,
    /// Only this type, exactly.
    pub kind: Option<String>,
    /// Only this status.
    pub status: Option<EventStatus>,
    /// Only this key, byte by byte.
    pub key: Option<EventKey>,
    /// Only this entity.
    pub entity: Option<String>,
    /// Received at or after.
    pub since: Option<UnixMicros>,
    /// Received before.
    pub until: Option<UnixMicros>,
    /// Go on after this event (the last one of the page before).
    pub after: Option<EventId>,
    /// At most this many.
    pub limit: usize,
}

/// A page of events, newest first.
#[derive(Debug, Clone, Default)]
pub struct EventPage {
    /// The events.
    pub events: Vec<EventSummary>,
    /// Where the next page starts, if there may be more.
    pub next: Option<EventId>,
}

impl EventPage {
    /// With the duplicates that are counted in memory.
    pub(super) fn with_pending(mut self, tally: &Tally) -> Self {
        self.events.iter_mut().for_each(|event| event.duplicates += tally.get(event.id).map_or(0, Pending::count));
        self
    }
}

/// An event without its bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventSummary {
    /// The event's id.
    pub id: EventId,
    /// The source it came through.
    pub source: String,
    /// Its key.
    pub key: EventKey,
    /// Its type.
    pub kind: Option<String>,
    /// What it is about.
    pub entity: Option<String>,
    /// Derived from its deliveries.
    pub status: EventStatus,
    /// What is odd about it.
    pub flags: Vec<Flag>,
    /// Why it is held, if it is.
    pub quarantine: Option<Quarantine>,
    /// `body`, `fields` or `none`: how much the signature covered.
    pub integrity: String,
    /// When it happened, as the provider says.
    pub occurred_at: Option<UnixMicros>,
    /// When it arrived.
    pub received_at: UnixMicros,
    /// Bytes of its body.
    pub size: u64,
    /// How many more times it was delivered to us.
    pub duplicates: u64,
    /// Its deliveries to routes.
    pub deliveries: Vec<Delivery>,
}

/// What is known of a key that came lately.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecentKey {
    /// The source.
    pub source: String,
    /// The key.
    pub key: EventKey,
    /// Its first event.
    pub event: EventId,
    /// The digest of that event's body.
    pub digest: [u8; 32],
    /// Until when the journal remembers the key at least.
    pub expires_at: UnixMicros,
}

/// One event's whole story.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventDetail {
    /// The event.
    pub event: EventSummary,
    /// SHA-256 of the body, volatile fields left out.
    pub digest: [u8; 32],
    /// First and last time a duplicate came.
    pub duplicates_seen: Option<(UnixMicros, UnixMicros)>,
    /// The latest duplicates, oldest first.
    pub duplicates_latest: Vec<DuplicateSeen>,
    /// Other bodies that came under this key.
    pub conflicts: Vec<Conflict>,
    /// What operators did with it: the latest [`ORDERS_SHOWN`](super::ORDERS_SHOWN), oldest first.
    pub audit: Vec<AuditEntry>,
    /// How often operators did something with it.
    pub audit_total: u64,
}

impl EventDetail {
    /// An event's story, with the duplicates that are counted in memory.
    pub(super) fn with_pending(found: Option<Self>, tally: &Tally) -> Option<Self> {
        let mut detail = found?;
        if let Some(pending) = tally.get(detail.event.id) {
            detail.event.duplicates += pending.count();
            let (first, last) = detail.duplicates_seen.unwrap_or((pending.first_at, pending.last_at));
            detail.duplicates_seen = Some((first, last.max(pending.last_at)));
            let mut latest = VecDeque::from(detail.duplicates_latest);
            pending.latest.iter().for_each(|duplicate| remember(&mut latest, *duplicate));
            detail.duplicates_latest = latest.into();
        }
        Some(detail)
    }
}

/// One delivery, as far as it exists.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Delivery {
    /// The route it is for.
    pub route: String,
    /// 0, or the number of the forced replay.
    pub epoch: u32,
    /// Where it stands.
    pub state: String,
    /// Tries so far.
    pub attempt: u32,
    /// When it is due. While it waits for its turn it has no such time; then this is when it began to wait.
    pub run_at: UnixMicros,
    /// Since when it has waited for its turn among the events of its entity, or had to before its last look.
    pub blocked_at: Option<UnixMicros>,
    /// Since when it has waited for a prerequisite.
    pub parked_at: Option<UnixMicros>,
    /// What the handler returned.
    pub result: Option<String>,
    /// Why the last try failed. A success clears it.
    pub error: Option<String>,
    /// Whose fault it is that it is dead.
    pub cause: Option<String>,
    /// When it succeeded, died, was superseded or was skipped.
    pub settled_at: Option<UnixMicros>,
    /// The latest [`ATTEMPTS_SHOWN`](super::ATTEMPTS_SHOWN) tries, the first first, where one event is shown; lists leave them
    /// out. The attempt of a success that was never leased is made from the delivery itself.
    pub attempts: Vec<Attempt>,
}

impl Delivery {
    /// What it waits for, if it waits for others, and since when.
    pub fn waits_for(&self) -> Option<(&'static str, UnixMicros)> {
        match DeliveryState::parse(&self.state)? {
            DeliveryState::Parked => self.parked_at.map(|since| ("prerequisite", since)),
            DeliveryState::Ready | DeliveryState::Retrying => self.blocked_at.map(|since| ("turn", since)),
            _ => None,
        }
    }

    /// Tries up to this number are not shown.
    pub(super) fn shown_after(&self) -> u32 {
        self.attempt.saturating_sub(super::ATTEMPTS_SHOWN)
    }

    /// The try that took effect, if it is not written down as one: handlers that run inside the journal's transaction
    /// are not leased, so that the usual case costs no row. `last` is the latest try that is written down.
    pub(super) fn unleased_success(&self, last: Option<&Attempt>) -> Option<Attempt> {
        let missing =
            self.state == DeliveryState::Succeeded.as_str() && last.is_none_or(|attempt| attempt.number < self.attempt);
        let at = self.settled_at.filter(|_| missing)?;
        Some(Attempt {
            number: self.attempt,
            started_at: at,
            finished_at: Some(at),
            outcome: Some("succeeded".to_owned()),
            error: None,
        })
    }
}

/// How a delivery stands, for a caller that waits for its result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standing {
    /// Where it stands.
    pub state: DeliveryState,
    /// What the handler returned, as JSON.
    pub result: Option<String>,
    /// Why the last try failed.
    pub error: Option<String>,
    /// Whose fault it is that it is dead.
    pub cause: Option<String>,
}

impl Standing {
    pub(super) fn of(delivery: Delivery) -> Option<Self> {
        let Delivery { state, result, error, cause, .. } = delivery;
        Some(Self { state: DeliveryState::parse(&state)?, result, error, cause })
    }
}

/// One try of a delivery.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attempt {
    /// Its number, from 1: the fence.
    pub number: u32,
    /// When it began.
    pub started_at: UnixMicros,
    /// When it ended; `None` while it runs.
    pub finished_at: Option<UnixMicros>,
    /// `succeeded`, `failed`, `lost` (its lease ran out) or `given_back`; `None` while it runs.
    pub outcome: Option<String>,
    /// Why it failed.
    pub error: Option<String>,
}

/// What an operator did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditEntry {
    /// When.
    pub at: UnixMicros,
    /// Who.
    pub who: String,
    /// What: the word of the order.
    pub action: String,
    /// Why.
    pub reason: Option<String>,
    /// What it changed, as JSON.
    pub detail: Option<String>,
}

/// When and from where a duplicate came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DuplicateSeen {
    /// When.
    pub at: UnixMicros,
    /// From where.
    pub peer: IpAddr,
}

/// Another body under a known key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conflict {
    /// Its digest; `None` sums up the bodies beyond the ones that are kept.
    pub digest: Option<[u8; 32]>,
    /// How often it came.
    pub count: u64,
    /// When it came first.
    pub first_at: UnixMicros,
    /// When it came last.
    pub last_at: UnixMicros,
    /// Bytes of its body.
    pub size: u64,
}

/// A body as it was received.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredBody {
    /// `name: value` lines.
    pub headers: Bytes,
    /// The bytes.
    pub body: Bytes,
}

words! {
    /// What is odd about an event.
    pub enum Flag {
        /// Another body came under the same key.
        Conflict = "conflict",
        /// The same body was seen before under another key that the signature does not cover.
        SuspectedReplay = "suspected_replay",
        /// Held until an operator releases it.
        Quarantined = "quarantined",
    }
}

impl Flag {
    /// The flags of an event, as the engines read them: words separated by commas, each with its reason behind a colon if it
    /// has one. With them why the event is held, if it is.
    pub(super) fn parse_list(text: Option<&str>) -> (Vec<Self>, Option<Quarantine>) {
        let (mut flags, mut quarantine) = (Vec::new(), None);
        for word in text.into_iter().flat_map(|text| text.split(',')) {
            let (flag, reason) = word.split_once(':').unwrap_or((word, ""));
            flags.extend(Self::parse(flag));
            quarantine = quarantine.or(Quarantine::parse(reason));
        }
        flags.sort_unstable();
        (flags, quarantine)
    }
}

words! {
    /// Where an event stands, derived: quarantined, else unrouted (no delivery), else the worst of its deliveries.
    pub enum EventStatus {
        /// Held until released.
        Quarantined = "quarantined",
        /// No route wanted it; it is kept.
        Unrouted = "unrouted",
        /// A delivery failed for good.
        Dead = "dead",
        /// A delivery waits for a prerequisite.
        Parked = "parked",
        /// A delivery failed and will be tried again.
        Retrying = "retrying",
        /// A delivery is being handled.
        Running = "running",
        /// A delivery is due.
        Ready = "ready",
        /// A newer event made it moot.
        Superseded = "superseded",
        /// An operator skipped it.
        Skipped = "skipped",
        /// All deliveries took effect.
        Succeeded = "succeeded",
    }
}

impl From<DeliveryState> for EventStatus {
    fn from(state: DeliveryState) -> Self {
        // Each state of a delivery is a status of the same name.
        Self::parse(state.as_str()).unwrap_or(Self::Unrouted)
    }
}

/// Counts since the journal was made. Forgetting events does not lower them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stats {
    /// One entry per source that ever stored an event, by name.
    pub sources: Vec<SourceCounts>,
}

impl Stats {
    /// With the duplicates that are counted in memory.
    pub(super) fn with_pending(mut self, tally: &Tally) -> Self {
        for (_, pending) in tally.iter() {
            if let Some(counts) = self.sources.iter_mut().find(|counts| counts.source == pending.source.as_str()) {
                counts.duplicates += pending.count();
            }
        }
        self
    }
}

/// Counts of one source.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SourceCounts {
    /// The source.
    pub source: String,
    /// Events stored.
    pub events: u64,
    /// Further deliveries of stored events with the same body.
    pub duplicates: u64,
    /// Deliveries of another body under a known key.
    pub conflicts: u64,
    /// Events held at arrival.
    pub quarantined: u64,
}

/// Why a journal could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// It took longer than a read may.
    #[error("the query took too long")]
    TooSlow,
    /// The engine said no.
    #[error("the journal could not be read: {0}")]
    Engine(String),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_state_of_a_delivery_is_a_status_of_that_name() {
        for state in DeliveryState::ALL {
            assert_eq!(EventStatus::from(state).as_str(), state.as_str());
        }
    }

    #[test]
    fn a_success_without_a_lease_is_shown_once() {
        let mut delivery = Delivery {
            state: "succeeded".to_owned(),
            attempt: 2,
            settled_at: Some(UnixMicros(9)),
            ..Default::default()
        };
        let success = delivery.unleased_success(None).unwrap();
        assert_eq!((success.number, success.started_at, success.finished_at), (2, UnixMicros(9), Some(UnixMicros(9))));
        assert_eq!((success.outcome.as_deref(), success.error.as_deref()), (Some("succeeded"), None));
        let failed = Attempt { number: 1, ..success.clone() };
        assert_eq!(delivery.unleased_success(Some(&failed)), Some(success.clone()));
        assert_eq!(delivery.unleased_success(Some(&success)), None, "it was leased, so it is written down");
        delivery.state = "retrying".to_owned();
        assert_eq!(delivery.unleased_success(None), None);
    }
}
