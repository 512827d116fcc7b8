//! Duplicates counted in memory between two flushes.
//!
//! A retry storm must not cost a write per copy, so duplicates are added up here and stored in batches, at least once a
//! second and at shutdown. A crash forgets at most that second's worth of counts; it never forgets an event. Readers add
//! what is pending to what is stored, so people always see the exact number.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;

use oncehook_verify::UnixMicros;
use serde::{Deserialize, Serialize};

use super::{DUPLICATES_REMEMBERED, DuplicateSeen, KnownCopy, Layer};
use crate::event::{EventId, SourceName};

/// What is pending for one event.
#[derive(Debug, Clone)]
pub(crate) struct Pending {
    pub(crate) source: SourceName,
    /// Recognised by the journal.
    pub(crate) journal: u64,
    /// Recognised in memory, before the journal.
    pub(crate) memory: u64,
    /// Recognised in Redis, before the journal.
    pub(crate) redis: u64,
    pub(crate) first_at: UnixMicros,
    pub(crate) last_at: UnixMicros,
    /// The latest few, oldest first.
    pub(crate) latest: VecDeque<DuplicateSeen>,
}

/// All pending counts. Bounded: the owner flushes once [`is_full`](Self::is_full).
#[derive(Debug, Default)]
pub(crate) struct Tally {
    // Ids are made by us, never by senders, but the default hasher is keyed anyway.
    events: HashMap<EventId, Pending>,
}

const EVENTS_HELD: usize = 16_384;

impl Pending {
    pub(crate) fn count(&self) -> u64 {
        self.journal + self.memory + self.redis
    }
}

impl Tally {
    pub(crate) fn add(&mut self, event: EventId, source: &SourceName, at: UnixMicros, peer: IpAddr, layer: Layer) {
        let pending = self.events.entry(event).or_insert_with(|| Pending {
            source: source.clone(),
            journal: 0,
            memory: 0,
            redis: 0,
            first_at: at,
            last_at: at,
            latest: VecDeque::new(),
        });
        match layer {
            Layer::Journal => pending.journal += 1,
            Layer::Memory => pending.memory += 1,
            Layer::Redis => pending.redis += 1,
        }
        pending.last_at = pending.last_at.max(at);
        remember(&mut pending.latest, DuplicateSeen { at, peer });
    }

    /// Adds the duplicates of one request, or none of them while there is no room. A request is counted whole: its last copies
    /// may exceed the bound by a few.
    pub(crate) fn add_all(&mut self, copies: &[KnownCopy<'_>]) -> bool {
        // Counts that no flush takes away must not pile up without end.
        let room = self.events.len() < 2 * EVENTS_HELD;
        if room {
            copies.iter().for_each(|copy| self.add(copy.event, copy.source, copy.at, copy.peer, copy.layer));
        }
        room
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    pub(crate) fn is_full(&self) -> bool {
        self.events.len() >= EVENTS_HELD
    }

    pub(crate) fn get(&self, event: EventId) -> Option<&Pending> {
        self.events.get(&event)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&EventId, &Pending)> {
        self.events.iter()
    }

    /// Takes everything out, to be stored.
    pub(crate) fn take(&mut self) -> Self {
        std::mem::take(self)
    }

    /// What was taken out could not be stored. It is older than what has come since.
    pub(crate) fn give_back(&mut self, taken: Self) {
        for (event, mut older) in taken.events {
            if let Some(newer) = self.events.remove(&event) {
                older.journal += newer.journal;
                older.memory += newer.memory;
                older.redis += newer.redis;
                older.last_at = older.last_at.max(newer.last_at);
                newer.latest.into_iter().for_each(|seen| remember(&mut older.latest, seen));
            }
            self.events.insert(event, older);
        }
    }
}

/// One remembered duplicate as it stands in `duplicates.latest`: `[time, "peer"]`.
#[derive(Serialize, Deserialize)]
struct LatestRow(i64, IpAddr);

/// The text of remembered duplicates, oldest first.
pub(crate) fn latest_text(latest: &VecDeque<DuplicateSeen>) -> String {
    let rows: Vec<LatestRow> = latest.iter().map(|seen| LatestRow(seen.at.0, seen.peer)).collect();
    serde_json::to_string(&rows).unwrap_or_else(|_| "[]".to_owned())
}

/// The remembered duplicates of an event, oldest first. Text that is not ours gives none.
pub(crate) fn parse_latest(text: &str) -> VecDeque<DuplicateSeen> {
    let rows: Vec<LatestRow> = serde_json::from_str(text).unwrap_or_default();
    rows.into_iter().map(|LatestRow(at, peer)| DuplicateSeen { at: UnixMicros(at), peer }).collect()
}

/// Appends to a list of the latest few.
pub(crate) fn remember(latest: &mut VecDeque<DuplicateSeen>, seen: DuplicateSeen) {
    if latest.len() == DUPLICATES_REMEMBERED {
        latest.pop_front();
    }
    latest.push_back(seen);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::EventIds;

    #[test]
    fn the_duplicates_of_a_request_are_counted_all_or_none() {
        let (mut ids, source) = (EventIds::above(0, 0), SourceName::new("shop").unwrap());
        let mut copies = |count: usize| -> Vec<KnownCopy<'_>> {
            let mut copy = || KnownCopy {
                event: ids.next(UnixMicros(1)),
                source: &source,
                at: UnixMicros(1),
                peer: [127, 0, 0, 1].into(),
                layer: Layer::Memory,
            };
            (0..count).map(|_| copy()).collect()
        };
        let mut tally = Tally::default();
        assert!(tally.add_all(&copies(2 * EVENTS_HELD - 1)));
        let last = copies(3);
        assert!(tally.add_all(&last));
        assert!(last.iter().all(|copy| tally.get(copy.event).is_some_and(|pending| pending.count() == 1)));
        let refused = copies(2);
        assert!(!tally.add_all(&refused));
        assert!(refused.iter().all(|copy| tally.get(copy.event).is_none()));
    }
}
