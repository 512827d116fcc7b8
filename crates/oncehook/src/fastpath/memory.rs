//! Keys that are known to be durable: a bounded cache in this process.
//!
//! Promises: holds only what a journal's receipt has said, so a hit is a fact and not a guess; says nothing once the key's
//! time is over, or the journal has begun another life; takes a bounded amount of memory, whatever senders do.
//! Does not: know every durable key, or ever say that a key is new. A miss means: ask the journal.

use std::hash::RandomState;

use oncehook_verify::{EventKey, UnixMicros};
use quick_cache::sync::{Cache, DefaultLifecycle};
use quick_cache::{Equivalent, Weighter};

use crate::event::{EventId, NewEvent, SourceName};
use crate::journal::{Era, RecentKey};

/// All keys together weigh at most this, as [`Weight`] counts.
const BYTES: u64 = 16 << 20;

/// What a key weighs beside its own bytes, roughly: names, digest, id, and the cache's own bookkeeping.
const BYTES_PER_KEY: u64 = 176;

/// A source and a key of it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Name {
    pub(super) source: SourceName,
    pub(super) key: EventKey,
}

impl Name {
    pub(super) fn of(event: &NewEvent) -> Self {
        Self { source: event.source.clone(), key: event.key.clone() }
    }

    /// The same, borrowed: it hashes alike, and is compared without a copy.
    pub(super) fn borrowed(event: &NewEvent) -> (&SourceName, &EventKey) {
        (&event.source, &event.key)
    }
}

impl Equivalent<Name> for (&SourceName, &EventKey) {
    fn equivalent(&self, name: &Name) -> bool {
        *self.1 == name.key && *self.0 == name.source
    }
}

/// What is known of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Fact {
    /// The key's first event.
    pub(super) event: EventId,
    /// The digest of its body.
    pub(super) digest: [u8; 32],
    /// When the journal may forget the key.
    pub(super) expires_at: UnixMicros,
}

impl Fact {
    pub(super) fn of(recent: &RecentKey) -> Self {
        Self { event: recent.event, digest: recent.digest, expires_at: recent.expires_at }
    }
}

#[derive(Clone)]
struct Weight;

/// A fact and the life of the journal in which it was learnt.
type Learnt = (Era, Fact);

impl Weighter<Name, Learnt> for Weight {
    fn weight(&self, name: &Name, _: &Learnt) -> u64 {
        BYTES_PER_KEY + name.key.as_bytes().len() as u64
    }
}

pub(super) struct KnownKeys {
    // The hasher is keyed: senders choose keys.
    cache: Cache<Name, Learnt, Weight, RandomState, DefaultLifecycle<Name, Learnt>>,
}

impl Default for KnownKeys {
    fn default() -> Self {
        let items = (BYTES / (BYTES_PER_KEY + 32)) as usize;
        Self { cache: Cache::with(items, BYTES, Weight, RandomState::new(), DefaultLifecycle::default()) }
    }
}

impl KnownKeys {
    /// What was learnt of the event's key in that era, unless its time is over.
    pub(super) fn get(&self, event: &NewEvent, era: Era) -> Option<Fact> {
        let (learnt_in, fact) = self.cache.get(&Name::borrowed(event))?;
        (learnt_in == era && event.received_at < fact.expires_at).then_some(fact)
    }

    /// A receipt has said so, and was asked for in that era.
    pub(super) fn learn(&self, name: Name, fact: Fact, era: Era) {
        self.cache.insert(name, (era, fact));
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{NOW, event, fact_for};
    use super::*;
    use crate::journal::Incarnation;

    #[test]
    fn r17_a_key_is_known_to_its_source_until_its_time_is_over_or_the_journal_begins_another_life() {
        let (known, life, first) = (KnownKeys::default(), Incarnation::named("one"), event("evt_1", 1));
        let (fact, before) = (fact_for(10), life.era().unwrap());
        assert_eq!(known.get(&first, before), None);
        known.learn(Name::of(&first), fact, before);
        let at = |micros: i64| NewEvent { received_at: UnixMicros(NOW.0 + micros), ..event("evt_1", 1) };
        let of_bank = NewEvent { source: SourceName::new("bank").unwrap(), ..event("evt_1", 1) };
        life.confirm("two");
        let after = life.era().unwrap();
        for (copy, era, expected) in [
            (at(0), before, Some(fact)),
            (at(9), before, Some(fact)),
            (at(10), before, None),
            (at(0), after, None),
            (of_bank, before, None),
        ] {
            assert_eq!(known.get(&copy, era), expected, "{copy:?}");
        }
    }

    #[test]
    fn r5_the_cache_is_bounded_in_bytes() {
        let (known, era) = (KnownKeys::default(), Incarnation::nameless().era().unwrap());
        for number in 0..200_000 {
            known.learn(Name::of(&event(&format!("{number:0>250}"), 1)), fact_for(0), era);
        }
        assert!(known.cache.weight() <= BYTES, "{}", known.cache.weight());
        assert!((20_001..70_000).contains(&known.cache.len()), "{}", known.cache.len());
    }
}
