//! Is a key surely not in `oncehook_keys`? A Bloom filter in memory that spares fresh keys the look into the table.
//!
//! Promises: never a wrong "surely not" for a key that was inserted; about ten bits of memory per key, and a limit on
//! all of it, beyond which it gives up and every key is looked up.
//! Does not: ever decide that a key is known. "Maybe" means: look.

use super::super::bloom::{Bloom, CACHE_LINE, KeyHash, may_contain};

/// Bits per key, for about one needless look in fifty.
const BITS_PER_KEY: usize = 10;

/// The first layer has room for this many keys, each further one for twice as many as the one before.
const FIRST_LAYER: usize = 1 << 18;

/// All layers together take at most this (some fifty million keys).
const MOST_BYTES: usize = 64 << 20;

#[derive(Default)]
pub(in super::super) struct Filter {
    layers: Vec<Layer>,
    /// There were more keys than fit.
    gave_up: bool,
}

struct Layer {
    keys: Bloom,
    /// Further keys that it has room for.
    room: usize,
}

impl Filter {
    pub(in super::super) fn insert(&mut self, hash: u64) {
        if !self.gave_up && self.layers.last().is_none_or(|layer| layer.room == 0) {
            let largest = self.layers.iter().map(|layer| layer.keys.as_bytes().len() * 8 / BITS_PER_KEY).max();
            let room = largest.map_or(FIRST_LAYER, |most| most * 2);
            let lines = (room * BITS_PER_KEY).div_ceil(CACHE_LINE * 8);
            self.layers.push(Layer { keys: Bloom::of_bytes(lines * CACHE_LINE), room });
            self.keep_the_limit();
        }
        if let Some(layer) = self.layers.last_mut() {
            layer.room = layer.room.saturating_sub(1);
            layer.keys.insert(KeyHash(hash));
        }
    }

    /// `false`: the key was never inserted. `true`: look.
    pub(in super::super) fn may_contain(&self, hash: u64) -> bool {
        self.gave_up || self.layers.iter().any(|layer| may_contain(layer.keys.as_bytes(), KeyHash(hash)))
    }

    /// Knows from now on what the other knows too.
    pub(in super::super) fn adopt(&mut self, mut other: Self) {
        // The fuller one first: the last layer is the one that is added to.
        other.layers.append(&mut self.layers);
        self.layers = other.layers;
        self.gave_up |= other.gave_up;
        self.keep_the_limit();
    }

    fn bytes(&self) -> usize {
        self.layers.iter().map(|layer| layer.keys.as_bytes().len()).sum()
    }

    fn keep_the_limit(&mut self) {
        if self.gave_up || self.bytes() > MOST_BYTES {
            *self = Self { layers: Vec::new(), gave_up: true };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(number: u64) -> u64 {
        use std::hash::BuildHasher;
        std::hash::BuildHasherDefault::<std::hash::DefaultHasher>::default().hash_one(number)
    }

    #[test]
    fn never_a_wrong_no_and_seldom_a_needless_look() {
        let mut filter = Filter::default();
        assert!(!filter.may_contain(hash(1)));
        let count = FIRST_LAYER as u64 * 4;
        (0..count).for_each(|number| filter.insert(hash(number)));
        assert!((0..count).all(|number| filter.may_contain(hash(number))));
        let wrong = (count..count + 100_000).filter(|number| filter.may_contain(hash(*number))).count();
        assert!(wrong < 8_000, "{wrong} of 100,000 in {} layers", filter.layers.len());

        let mut other = Filter::default();
        (count..count + 1_000).for_each(|number| other.insert(hash(number)));
        other.adopt(filter);
        assert!((0..count + 1_000).all(|number| other.may_contain(hash(number))));
        other.insert(hash(count + 1_000));
        assert!(other.may_contain(hash(count + 1_000)));
    }

    #[test]
    fn memory_is_bounded_and_giving_up_means_looking() {
        let mut filter = Filter::default();
        let mut number = 0;
        while !filter.gave_up {
            // Filling 50 million would take long; only the growth is of interest.
            filter.insert(hash(number));
            filter.layers.iter_mut().for_each(|layer| layer.room = 0);
            assert!(filter.bytes() <= MOST_BYTES);
            number += 1;
            assert!(number < 100, "it grows without end");
        }
        assert!(filter.layers.is_empty() && filter.may_contain(hash(u64::MAX)));
    }
}
