//! The reference journal: in memory, as simple as can be. It defines the behaviour that the suite asks of every backend.
//!
//! Promises: the same verdicts, lists and counts as a real journal.
//! Does not: survive anything. It is for tests and for reading.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use oncehook_verify::{EventKey, Quarantine, UnixMicros};
use tokio::sync::oneshot;

use super::tally::remember;
use super::{
    AppendError, Appended, BoxFuture, CONFLICTS_KEPT, Conflict, DuplicateSeen, Durability, EventDetail,
    EventPage, EventQuery, EventStatus, EventSummary, Flag, Journal, JournalReader, JournalState, Layer,
    ReadError, Receipt, SelfTestError, SourceCounts, Stats, StoredBody, Ticket, Verdict,
};
use crate::event::{EventId, EventIds, NewEvent, NewEvents, SourceName};

/// See the module's text.
#[derive(Debug)]
pub struct MemoryJournal {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    open: bool,
    ids: EventIds,
    keys: HashMap<(SourceName, EventKey), EventId>,
    events: BTreeMap<EventId, Stored>,
    counts: BTreeMap<String, SourceCounts>,
}

#[derive(Debug)]
struct Stored {
    event: NewEvent,
    flags: Vec<Flag>,
    conflicts: Vec<Conflict>,
    duplicates: u64,
    seen: Option<(oncehook_verify::UnixMicros, oncehook_verify::UnixMicros)>,
    latest: VecDeque<DuplicateSeen>,
}

impl Default for MemoryJournal {
    fn default() -> Self {
        Self::new()
    }
}

impl MemoryJournal {
    /// An empty journal.
    #[must_use]
    pub fn new() -> Self {
        let state = State {
            open: true,
            ids: EventIds::above(0, 0),
            keys: HashMap::new(),
            events: BTreeMap::new(),
            counts: BTreeMap::new(),
        };
        Self { state: Mutex::new(state) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn append(&mut self, event: NewEvent) -> Appended {
        let source = event.source.as_str().to_owned();
        let counts = self
            .counts
            .entry(source.clone())
            .or_insert_with(|| SourceCounts { source, ..Default::default() });
        let key = (event.source.clone(), event.key.clone());
        let Some(&id) = self.keys.get(&key) else {
            let id = self.ids.next(event.received_at);
            let expires_at = event.expires_at;
            let verdict = match event.quarantine {
                Some(_) => Verdict::Quarantined,
                None => Verdict::New,
            };
            counts.events += 1;
            counts.quarantined += u64::from(event.quarantine.is_some());
            let replayed = !event.key_signed
                && self.events.values().any(|other| {
                    !other.event.key_signed
                        && other.event.source == event.source
                        && other.event.digest == event.digest
                });
            let mut flags = Vec::new();
            flags.extend(replayed.then_some(Flag::SuspectedReplay));
            flags.extend(event.quarantine.map(|_: Quarantine| Flag::Quarantined));
            self.keys.insert(key, id);
            let stored = Stored {
                event,
                flags,
                conflicts: Vec::new(),
                duplicates: 0,
                seen: None,
                latest: VecDeque::new(),
            };
            self.events.insert(id, stored);
            return Appended { id, verdict, expires_at };
        };
        let Some(first) = self.events.get_mut(&id) else {
            return Appended { id, verdict: Verdict::Duplicate, expires_at: event.expires_at };
        };
        let expires_at = first.event.expires_at;
        if first.event.digest == event.digest {
            counts.duplicates += 1;
            first.note_duplicate(event.received_at, event.peer);
            Appended { id, verdict: Verdict::Duplicate, expires_at }
        } else {
            counts.conflicts += 1;
            first.note_conflict(&event);
            Appended { id, verdict: Verdict::Conflict, expires_at }
        }
    }
}

impl Stored {
    fn note_duplicate(&mut self, at: UnixMicros, peer: IpAddr) {
        self.duplicates += 1;
        self.seen = Some(self.seen.map_or((at, at), |(first, last)| (first, last.max(at))));
        remember(&mut self.latest, DuplicateSeen { at, peer });
    }

    fn note_conflict(&mut self, event: &NewEvent) {
        if !self.flags.contains(&Flag::Conflict) {
            self.flags.push(Flag::Conflict);
            self.flags.sort();
        }
        let kept = self.conflicts.iter().filter(|conflict| conflict.digest.is_some()).count();
        let known = self.conflicts.iter().any(|conflict| conflict.digest == Some(event.digest));
        let digest = (known || kept < CONFLICTS_KEPT).then_some(event.digest);
        match self.conflicts.iter_mut().find(|conflict| conflict.digest == digest) {
            Some(conflict) => {
                conflict.count += 1;
                conflict.last_at = event.received_at;
            }
            None => self.conflicts.push(Conflict {
                digest,
                count: 1,
                first_at: event.received_at,
                last_at: event.received_at,
                size: digest.map_or(0, |_| event.body.len() as u64),
            }),
        }
    }

    fn summary(&self, id: EventId) -> EventSummary {
        let event = &self.event;
        let held = self.flags.contains(&Flag::Quarantined);
        EventSummary {
            id,
            source: event.source.as_str().to_owned(),
            key: event.key.clone(),
            kind: event.kind.clone(),
            entity: event.entity.clone(),
            status: if held { EventStatus::Quarantined } else { EventStatus::Unrouted },
            flags: self.flags.clone(),
            integrity: event.integrity.as_str().to_owned(),
            occurred_at: event.occurred_at,
            received_at: event.received_at,
            size: event.body.len() as u64,
            duplicates: self.duplicates,
            deliveries: Vec::new(),
        }
    }
}

fn matches(query: &EventQuery, event: &EventSummary) -> bool {
    let same = |wanted: &Option<String>, found: Option<&String>| {
        wanted.as_ref().is_none_or(|wanted| Some(wanted) == found)
    };
    same(&query.source, Some(&event.source))
        && same(&query.kind, event.kind.as_ref())
        && same(&query.entity, event.entity.as_ref())
        && query.status.is_none_or(|status| status == event.status)
        && query.key.as_ref().is_none_or(|key| *key == event.key)
        && query.since.is_none_or(|since| event.received_at >= since)
        && query.until.is_none_or(|until| event.received_at < until)
        && query.after.is_none_or(|after| event.id < after)
}

impl Journal for MemoryJournal {
    fn submit(&self, events: NewEvents) -> Result<Ticket, AppendError> {
        let mut state = self.lock();
        if !state.open {
            return Err(AppendError::Closed);
        }
        let receipt: Receipt = events.into_iter().map(|event| state.append(event)).collect();
        let (answer, ticket) = oneshot::channel();
        // The ticket is in our hands, so the answer arrives.
        let _ = answer.send(Ok(receipt));
        Ok(ticket)
    }

    fn note_duplicate(
        &self,
        event: EventId,
        source: &SourceName,
        at: UnixMicros,
        peer: IpAddr,
        _: Layer,
    ) -> bool {
        let mut state = self.lock();
        let Some(first) = state.events.get_mut(&event) else { return false };
        first.note_duplicate(at, peer);
        if let Some(counts) = state.counts.get_mut(source.as_str()) {
            counts.duplicates += 1;
        }
        true
    }

    fn state(&self) -> JournalState {
        JournalState {
            kind: "memory",
            durability: Durability::None,
            failing: None,
            queued: 0,
            queue_limit: usize::MAX,
            index_lag: 0,
            wal_pages: 0,
        }
    }

    fn self_test(&self) -> BoxFuture<'_, Result<(), SelfTestError>> {
        Box::pin(async { Ok(()) })
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async { self.lock().open = false })
    }
}

impl JournalReader for MemoryJournal {
    fn list(&self, query: EventQuery) -> BoxFuture<'_, Result<EventPage, ReadError>> {
        Box::pin(async move {
            let state = self.lock();
            let newest_first = state.events.iter().rev().map(|(id, stored)| stored.summary(*id));
            let mut events: Vec<_> =
                newest_first.filter(|event| matches(&query, event)).take(query.limit + 1).collect();
            let more = events.len() > query.limit;
            events.truncate(query.limit);
            let next = events.last().filter(|_| more).map(|event| event.id);
            Ok(EventPage { events, next })
        })
    }

    fn show(&self, id: EventId) -> BoxFuture<'_, Result<Option<EventDetail>, ReadError>> {
        Box::pin(async move {
            Ok(self.lock().events.get(&id).map(|stored| EventDetail {
                event: stored.summary(id),
                digest: stored.event.digest,
                duplicates_seen: stored.seen,
                duplicates_latest: stored.latest.iter().copied().collect(),
                conflicts: stored.conflicts.clone(),
            }))
        })
    }

    fn body(&self, id: EventId) -> BoxFuture<'_, Result<Option<StoredBody>, ReadError>> {
        Box::pin(async move {
            Ok(self.lock().events.get(&id).map(|stored| StoredBody {
                headers: stored.event.headers.clone(),
                body: stored.event.body.clone(),
            }))
        })
    }

    fn stats(&self) -> BoxFuture<'_, Result<Stats, ReadError>> {
        Box::pin(async move { Ok(Stats { sources: self.lock().counts.values().cloned().collect() }) })
    }
}
