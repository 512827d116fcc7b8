//! The reference journal: in memory, as simple as can be. It defines the behaviour that the suite asks of every backend.
//!
//! Promises: the same verdicts, lists and counts as a real journal, and the same answers to workers and operators
//! (`deliveries`).
//! Does not: survive anything, or run handlers that need a database. It is for tests and for reading.

mod deliveries;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use oncehook_verify::{EventKey, Quarantine, UnixMicros};
use tokio::sync::{oneshot, watch};

use self::deliveries::Record;
use super::decide::append::{Holder, Known, rule};
use super::tally::remember;
use super::{
    Alias, AppendError, Appended, AuditEntry, BoxFuture, CONFLICTS_KEPT, ClockMemory, Conflict, DuplicateSeen,
    Durability, EventDetail, EventPage, EventQuery, EventStatus, EventSummary, Flag, Journal, JournalReader,
    JournalState, KnownCopy, ORDERS_SHOWN, Paused, ReadError, Receipt, RecentKey, SelfTestError, SourceCounts, Stats,
    StoredBody, Ticket, Verdict, WorkError,
};
use crate::clock::Clock;
use crate::delivery::{DeliveryState, RouteName};
use crate::event::{EventId, EventIds, NewEvent, NewEvents, SourceName};
use crate::ordering::Standing;
use crate::route::Route;

/// See the module's text.
#[derive(Debug)]
pub struct MemoryJournal {
    clock: Clock,
    changes: watch::Sender<u64>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    closed: bool,
    ids: EventIds,
    /// What the ledger knows of keys. It outlives their events.
    keys: HashMap<(SourceName, EventKey), Known>,
    events: BTreeMap<EventId, Stored>,
    /// Further ids, and the events that they stand for.
    aliases: HashMap<EventId, EventId>,
    counts: BTreeMap<String, SourceCounts>,
    pauses: Vec<Paused>,
    /// What is known of entities, by scope and entity.
    entities: BTreeMap<(String, String), Standing>,
    /// Routes that look at entities, as they were last claimed from.
    lines: HashMap<RouteName, Arc<Route>>,
    /// What was done, to what: the id of an event, or the kind and name of what was paused.
    audit: Vec<(String, AuditEntry)>,
    clock: Option<ClockMemory>,
}

#[derive(Debug)]
struct Stored {
    event: NewEvent,
    flags: Vec<Flag>,
    conflicts: Vec<Conflict>,
    duplicates: u64,
    seen: Option<(UnixMicros, UnixMicros)>,
    latest: VecDeque<DuplicateSeen>,
    /// By route and epoch.
    deliveries: BTreeMap<(RouteName, u32), Record>,
}

impl Default for MemoryJournal {
    fn default() -> Self {
        Self::new()
    }
}

impl MemoryJournal {
    /// An empty journal on the machine's clock.
    pub fn new() -> Self {
        Self::with_clock(Clock::system())
    }

    /// An empty journal on that clock.
    pub fn with_clock(clock: Clock) -> Self {
        Self { clock, changes: watch::Sender::new(0), state: Mutex::default() }
    }

    /// Tells workers to look. Called under the lock; they look once it is free.
    fn wake(&self) {
        self.changes.send_modify(|changes| *changes += 1);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn look<'a, T: 'a, E: 'a>(&'a self, look: impl FnOnce(&State) -> T + Send + 'a) -> BoxFuture<'a, Result<T, E>> {
        Box::pin(async move { Ok(look(&self.lock())) })
    }
}

impl State {
    /// Nothing only if the holder of the key were unknown, which cannot be here.
    fn append(&mut self, event: NewEvent, now: UnixMicros) -> Option<Appended> {
        let source = event.source.as_str().to_owned();
        let key = (event.source.clone(), event.key.clone());
        let holder = match self.keys.get(&key) {
            // The event may be forgotten already: its key still decides.
            Some(known) => Holder::Known(*known),
            None => Holder::Stored(Known::of(event.id.unwrap_or_else(|| self.ids.next(event.received_at)), &event)),
        };
        let appended = rule(&event, holder)?;
        let counts = self.counts.entry(source.clone()).or_insert_with(|| SourceCounts { source, ..Default::default() });
        let first = self.events.get_mut(&appended.id).into_iter();
        match (holder, appended.verdict) {
            (Holder::Stored(known), verdict) => {
                counts.events += 1;
                counts.quarantined += u64::from(verdict == Verdict::Quarantined);
                self.ids.stay_above(known.event.sequence());
                self.keys.insert(key, known);
                let stored = self.store(event, now);
                self.events.insert(known.event, stored);
            }
            (_, Verdict::Duplicate) => {
                counts.duplicates += 1;
                first.for_each(|first| first.note_duplicate(event.received_at, event.peer));
            }
            (_, Verdict::Conflict) => {
                counts.conflicts += 1;
                first.for_each(|first| first.note_conflict(&event));
            }
            (_, Verdict::New | Verdict::Quarantined) => {}
        }
        Some(appended)
    }

    /// A new event with its flags and, unless it is held, its deliveries.
    fn store(&self, event: NewEvent, now: UnixMicros) -> Stored {
        let replayed = event.is_replay()
            || !event.key_signed
                && self.events.values().any(|other| {
                    !other.event.key_signed && other.event.source == event.source && other.event.digest == event.digest
                });
        let mut flags = Vec::new();
        flags.extend(replayed.then_some(Flag::SuspectedReplay));
        flags.extend(event.quarantine.map(|_: Quarantine| Flag::Quarantined));
        let mut stored = Stored {
            event,
            flags,
            conflicts: Vec::new(),
            duplicates: 0,
            seen: None,
            latest: VecDeque::new(),
            deliveries: BTreeMap::new(),
        };
        if !stored.is_held() {
            for route in stored.event.routes.clone() {
                stored.deliver(route, 0, now);
            }
        }
        stored
    }
}

impl Stored {
    fn note_duplicate(&mut self, at: UnixMicros, peer: IpAddr) {
        self.duplicates += 1;
        self.seen = Some(self.seen.map_or((at, at), |(first, last)| (first, last.max(at))));
        remember(&mut self.latest, DuplicateSeen { at, peer });
    }

    fn note_conflict(&mut self, event: &NewEvent) {
        self.flags.push(Flag::Conflict);
        self.flags.sort();
        self.flags.dedup();
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

    fn is_held(&self) -> bool {
        self.flags.contains(&Flag::Quarantined)
    }

    fn status(&self) -> EventStatus {
        if self.is_held() {
            return EventStatus::Quarantined;
        }
        let worst =
            DeliveryState::ALL.into_iter().find(|state| self.deliveries.values().any(|record| record.state == *state));
        worst.map_or(EventStatus::Unrouted, EventStatus::from)
    }

    fn summary(&self, id: EventId) -> EventSummary {
        let event = &self.event;
        EventSummary {
            id,
            source: event.source.as_str().to_owned(),
            key: event.key.clone(),
            kind: event.kind.clone(),
            entity: event.entity.clone(),
            status: self.status(),
            flags: self.flags.clone(),
            quarantine: event.quarantine.filter(|_| self.is_held()),
            integrity: event.integrity.as_str().to_owned(),
            occurred_at: event.occurred_at,
            received_at: event.received_at,
            size: event.body.len() as u64,
            duplicates: self.duplicates,
            deliveries: self.deliveries.iter().map(|((route, epoch), record)| record.summary(route, *epoch)).collect(),
        }
    }
}

fn matches(query: &EventQuery, event: &EventSummary) -> bool {
    let same =
        |wanted: &Option<String>, found: Option<&String>| wanted.as_ref().is_none_or(|wanted| Some(wanted) == found);
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
        if state.closed {
            return Err(AppendError::Closed);
        }
        let now = self.clock.steady();
        let receipt: Option<Receipt> = events.into_iter().map(|event| state.append(event, now)).collect();
        self.wake();
        let (answer, ticket) = oneshot::channel();
        // The ticket is in our hands, so the answer arrives.
        let _ = answer.send(receipt.ok_or(AppendError::Gone));
        Ok(ticket)
    }

    fn note_duplicates(&self, copies: &[KnownCopy<'_>]) -> bool {
        let state = &mut *self.lock();
        copies.iter().all(|copy| {
            let Some(first) = state.events.get_mut(&copy.event) else { return false };
            first.note_duplicate(copy.at, copy.peer);
            let counts = state.counts.get_mut(copy.source.as_str());
            counts.into_iter().for_each(|counts| counts.duplicates += 1);
            true
        })
    }

    fn keep_aliases(&self, aliases: Vec<Alias>) -> BoxFuture<'_, Result<(), WorkError>> {
        Box::pin(async move {
            let mut state = self.lock();
            for Alias { alias, event } in aliases {
                state.aliases.entry(alias).or_insert(event);
            }
            Ok(())
        })
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
        Box::pin(async { self.lock().closed = true })
    }
}

impl JournalReader for MemoryJournal {
    fn list(&self, query: EventQuery) -> BoxFuture<'_, Result<EventPage, ReadError>> {
        self.look(move |state| {
            let newest_first = state.events.iter().rev().map(|(id, stored)| stored.summary(*id));
            let mut events: Vec<_> =
                newest_first.filter(|event| matches(&query, event)).take(query.limit + 1).collect();
            let more = events.len() > query.limit;
            events.truncate(query.limit);
            let listed = events.iter_mut().flat_map(|event| &mut event.deliveries);
            listed.for_each(|delivery| delivery.attempts.clear());
            let next = events.last().filter(|_| more).map(|event| event.id);
            EventPage { events, next }
        })
    }

    fn recent_keys(&self, limit: usize) -> BoxFuture<'_, Result<Vec<RecentKey>, ReadError>> {
        self.look(move |state| {
            let newest_first = state.events.iter().rev().take(limit);
            let keys = newest_first.map(|(id, stored)| RecentKey {
                source: stored.event.source.as_str().to_owned(),
                key: stored.event.key.clone(),
                event: *id,
                digest: stored.event.digest,
                expires_at: stored.event.expires_at,
            });
            keys.collect()
        })
    }

    fn show(&self, id: EventId) -> BoxFuture<'_, Result<Option<EventDetail>, ReadError>> {
        self.look(move |state| {
            let subject = id.to_string();
            let done = state.audit.iter().filter(|(about, _)| *about == subject).map(|(_, entry)| entry);
            let done: Vec<&AuditEntry> = done.collect();
            let latest = done.iter().skip(done.len().saturating_sub(ORDERS_SHOWN as usize));
            let stored = state.events.get(&id)?;
            let mut event = stored.summary(id);
            for delivery in &mut event.deliveries {
                let after = delivery.shown_after();
                delivery.attempts.retain(|attempt| attempt.number > after);
            }
            Some(EventDetail {
                event,
                digest: stored.event.digest,
                duplicates_seen: stored.seen,
                duplicates_latest: stored.latest.iter().copied().collect(),
                conflicts: stored.conflicts.clone(),
                audit: latest.map(|entry| (*entry).clone()).collect(),
                audit_total: done.len() as u64,
            })
        })
    }

    fn body(&self, id: EventId) -> BoxFuture<'_, Result<Option<StoredBody>, ReadError>> {
        self.look(move |state| {
            let event = &state.events.get(&id)?.event;
            Some(StoredBody { headers: event.headers.clone(), body: event.body.clone() })
        })
    }

    fn resolve(&self, alias: EventId) -> BoxFuture<'_, Result<Option<EventId>, ReadError>> {
        self.look(move |state| state.aliases.get(&alias).copied().filter(|event| state.events.contains_key(event)))
    }

    fn stats(&self) -> BoxFuture<'_, Result<Stats, ReadError>> {
        self.look(|state| Stats { sources: state.counts.values().cloned().collect() })
    }
}
