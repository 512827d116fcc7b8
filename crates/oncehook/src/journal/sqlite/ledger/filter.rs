//! Is a key surely not in `oncehook_keys`? A Bloom filter in memory that spares fresh keys the look into the table.
//!
//! Promises: never a wrong "surely not" for a key that was inserted; about ten bits of memory per key, and a limit on
//! all of it, beyond which it gives up and every key is looked up.
//! Does not: ever decide that a key is known. "Maybe" means: look.

/// Bits per key, for about one needless look in fifty.
const BITS_PER_KEY: usize = 10;
const PROBES: u32 = 7;

/// The first layer has room for so many keys, each further one for twice as many as the one before.
const FIRST_LAYER: usize = 1 << 18;

/// All layers together take at most this (some fifty million keys).
const MOST_BYTES: usize = 64 << 20;

/// As many bits as a cache line has: a key's bits all lie in one block, so a look costs one access to memory.
type Block = [u64; 8];

#[derive(Default)]
pub(in super::super) struct Filter {
    layers: Vec<Layer>,
    /// There were more keys than fit.
    gave_up: bool,
}

struct Layer {
    blocks: Vec<Block>,
    room: usize,
}

impl Filter {
    pub(in super::super) fn insert(&mut self, hash: u64) {
        if self.gave_up {
            return;
        }
        if self.layers.last().is_none_or(|layer| layer.room == 0) {
            self.grow();
        }
        if let Some(layer) = self.layers.last_mut() {
            layer.insert(hash);
        }
    }

    /// `false`: the key was never inserted. `true`: look.
    pub(in super::super) fn may_contain(&self, hash: u64) -> bool {
        self.gave_up || self.layers.iter().any(|layer| layer.may_contain(hash))
    }

    /// Knows from now on what the other knows too.
    pub(in super::super) fn adopt(&mut self, mut other: Self) {
        // The fuller one first: the last layer is the one that is added to.
        other.layers.append(&mut self.layers);
        self.layers = other.layers;
        self.gave_up |= other.gave_up;
        self.keep_the_limit(0);
    }

    fn grow(&mut self) {
        let keys = self.layers.iter().map(Layer::capacity).max().map_or(FIRST_LAYER, |most| most * 2);
        let layer = Layer::new(keys);
        if self.keep_the_limit(layer.bytes()) {
            self.layers.push(layer);
        }
    }

    fn keep_the_limit(&mut self, more: usize) -> bool {
        let bytes = self.layers.iter().map(Layer::bytes).sum::<usize>() + more;
        if self.gave_up || bytes > MOST_BYTES {
            self.gave_up = true;
            self.layers = Vec::new();
        }
        !self.gave_up
    }
}

impl Layer {
    fn new(keys: usize) -> Self {
        Self { blocks: vec![[0; 8]; (keys * BITS_PER_KEY).div_ceil(512)], room: keys }
    }

    fn bytes(&self) -> usize {
        self.blocks.len() * size_of::<Block>()
    }

    fn capacity(&self) -> usize {
        self.blocks.len() * 512 / BITS_PER_KEY
    }

    fn insert(&mut self, hash: u64) {
        self.room = self.room.saturating_sub(1);
        let block = self.block_of(hash);
        if let Some(block) = self.blocks.get_mut(block) {
            for (word, mask) in block.iter_mut().zip(bits(hash)) {
                *word |= mask;
            }
        }
    }

    fn may_contain(&self, hash: u64) -> bool {
        let block = self.blocks.get(self.block_of(hash));
        block.is_some_and(|block| block.iter().zip(bits(hash)).all(|(word, mask)| word & mask == mask))
    }

    /// The upper half of the hash, scaled to the number of blocks.
    fn block_of(&self, hash: u64) -> usize {
        (((hash >> 32) * self.blocks.len() as u64) >> 32) as usize
    }
}

/// A key's bits within its block, from the whole hash mixed once more.
fn bits(hash: u64) -> Block {
    let mut mixed = hash.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed ^= mixed >> 29;
    let mut mask = [0; 8];
    for probe in 0..PROBES {
        let bit = (mixed >> (9 * probe)) & 511;
        if let Some(word) = mask.get_mut((bit / 64) as usize) {
            *word |= 1 << (bit % 64);
        }
    }
    mask
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
            assert!(filter.layers.iter().map(Layer::bytes).sum::<usize>() <= MOST_BYTES);
            number += 1;
            assert!(number < 100, "it grows without end");
        }
        assert!(filter.layers.is_empty() && filter.may_contain(hash(u64::MAX)));
    }
}
