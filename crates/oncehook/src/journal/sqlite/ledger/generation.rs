//! Keys that are in the event log but not yet in `oncehook_keys`, held in memory.
//!
//! Promises: exact answers (a hash only finds candidates; source and key are compared byte by byte), and a size that its
//! owner can bound (`bytes`).
//! Does not: know about transactions. What is put in here must be committed, or be thrown away with the batch.

use std::collections::HashSet;
use std::hash::{BuildHasher, Hasher, RandomState};

use hashbrown::HashTable;
use oncehook_verify::{EventKey, UnixMicros};
use rusqlite::Row;

use crate::event::{EventId, SourceName};

/// Hashes (source, key). The seed is drawn at random: senders choose keys, and must not be able to choose collisions.
#[derive(Debug, Clone, Default)]
pub(in super::super) struct KeyHasher(RandomState);

impl KeyHasher {
    pub(in super::super) fn hash(&self, source: &str, key: &[u8]) -> u64 {
        let mut hasher = self.0.build_hasher();
        hasher.write(source.as_bytes());
        // No source name contains this byte, so no two pairs run together.
        hasher.write_u8(0xff);
        hasher.write(key);
        hasher.finish()
    }
}

/// What is known of a key: a row of `oncehook_keys` without its key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) struct Fact {
    /// The first event of the key.
    pub(in super::super) event: EventId,
    /// The digest of its body.
    pub(in super::super) digest: [u8; 32],
    pub(super) first_seen: UnixMicros,
    /// Until when the key is remembered at least.
    pub(in super::super) expires_at: UnixMicros,
}

impl Fact {
    /// The fact in the columns of a row from this one on.
    pub(super) fn read(row: &Row<'_>, first: usize) -> rusqlite::Result<Self> {
        Ok(Self {
            event: EventId::from_bytes(row.get(first)?),
            digest: row.get(first + 1)?,
            first_seen: UnixMicros(row.get(first + 2)?),
            expires_at: UnixMicros(row.get(first + 3)?),
        })
    }
}

pub(super) struct Entry {
    pub(super) hash: u64,
    pub(super) source: SourceName,
    pub(super) key: EventKey,
    pub(super) fact: Fact,
}

/// The keys of a run of consecutive events.
#[derive(Default)]
pub(super) struct Generation {
    pub(super) entries: Vec<Entry>,
    /// Positions in `entries`.
    index: HashTable<u32>,
    /// Every source that has had a key in here.
    pub(super) sources: HashSet<SourceName>,
    /// What it weighs in memory, roughly.
    pub(super) bytes: usize,
    /// The last event whose key is in here.
    pub(super) last: Option<i64>,
}

impl Generation {
    /// An empty generation with room for some keys. (The kernel gives the memory when it is first written to.)
    pub(super) fn with_capacity(keys: usize) -> Self {
        Self { entries: Vec::with_capacity(keys), index: HashTable::with_capacity(keys), ..Self::default() }
    }

    pub(super) fn find(&self, hash: u64, source: &str, key: &[u8]) -> Option<&Fact> {
        let is_it =
            |entry: &Entry| entry.hash == hash && entry.key.as_bytes() == key && entry.source.as_str() == source;
        let position = self.index.find(hash, |position| self.get(*position).is_some_and(is_it))?;
        self.get(*position).map(|entry| &entry.fact)
    }

    /// Adds a key that is not in here yet.
    pub(super) fn insert(&mut self, entry: Entry) {
        // A generation is full long before its positions run out.
        let Ok(position) = u32::try_from(self.entries.len()) else { return };
        if !self.sources.contains(&entry.source) {
            self.sources.insert(entry.source.clone());
        }
        self.last = self.last.max(Some(entry.fact.event.sequence()));
        self.bytes += size_of::<Entry>() + size_of::<u32>() + entry.key.as_bytes().len();
        let (entries, hash) = (&self.entries, entry.hash);
        self.index
            .insert_unique(hash, position, |position| entries.get(*position as usize).map_or(0, |entry| entry.hash));
        self.entries.push(entry);
    }

    /// Takes everything out of another generation.
    pub(super) fn absorb(&mut self, other: &mut Self) {
        other.entries.drain(..).for_each(|entry| self.insert(entry));
        other.clear();
    }

    pub(super) fn clear(&mut self) {
        self.entries.clear();
        self.index.clear();
        self.sources.clear();
        self.bytes = 0;
        self.last = None;
    }

    pub(super) fn get(&self, position: u32) -> Option<&Entry> {
        self.entries.get(position as usize)
    }

    /// Positions in the order of the table: by source, then by key.
    pub(super) fn in_table_order(&self) -> Vec<u32> {
        let mut sources: Vec<&SourceName> = self.sources.iter().collect();
        sources.sort_unstable();
        // The first bytes of a key decide nearly every comparison, and following a pointer for it costs more than all else.
        let mut order: Vec<(usize, u128, u32)> = (0_u32..)
            .zip(&self.entries)
            .map(|(position, entry)| {
                let rank = sources.binary_search(&&entry.source).unwrap_or_default();
                (rank, prefix(entry.key.as_bytes()), position)
            })
            .collect();
        order.sort_unstable_by(|a, b| {
            let key = |position| self.get(position).map(|entry| &entry.key);
            (a.0, a.1).cmp(&(b.0, b.1)).then_with(|| key(a.2).cmp(&key(b.2)))
        });
        order.into_iter().map(|(_, _, position)| position).collect()
    }
}

/// The first sixteen bytes as a number that sorts like them.
fn prefix(key: &[u8]) -> u128 {
    let mut first = [0; 16];
    first.iter_mut().zip(key).for_each(|(to, from)| *to = *from);
    u128::from_be_bytes(first)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::EventIds;

    /// Keys in this order, each with a hash.
    fn generation(keys: &[(&str, &[u8])], hash: impl Fn(usize) -> u64) -> Generation {
        let mut ids = EventIds::above(0, 0);
        let mut generation = Generation::with_capacity(4);
        for (number, (source, key)) in keys.iter().enumerate() {
            assert_eq!(generation.find(hash(number), source, key), None);
            let event = ids.next(UnixMicros(1_000_000));
            let fact = Fact { event, digest: [7; 32], first_seen: UnixMicros(1), expires_at: UnixMicros(2) };
            let (source, key) = (SourceName::new(source).unwrap(), EventKey::from_bytes(key).unwrap());
            generation.insert(Entry { hash: hash(number), source, key, fact });
        }
        generation
    }

    #[test]
    fn keys_with_the_same_hash_are_told_apart() {
        let keys: [(&str, &[u8]); 3] = [("a", b"k1"), ("a", b"k2"), ("b", b"k1")];
        let generation = generation(&keys, |_| 9);
        let found = keys.map(|(source, key)| generation.find(9, source, key).unwrap().event.sequence());
        assert!(found[0] < found[1] && found[1] < found[2], "{found:?}");
        assert_eq!(generation.find(9, "b", b"k2"), None);
        assert_eq!(generation.last, found.last().copied());
    }

    #[test]
    fn the_order_is_the_tables_order() {
        let long = [b'x'; 20];
        let keys: [(&str, &[u8]); 7] =
            [("b", b"a"), ("a", b"b"), ("a", &long), ("a", &long[..17]), ("a", b"a\0"), ("a", b"a"), ("a", b"A")];
        assert_eq!(generation(&keys, |number| number as u64).in_table_order(), [6, 5, 4, 1, 3, 2, 0]);
    }
}
