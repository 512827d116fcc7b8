//! Bloom filters: may this be among them? A filter may say yes wrongly, never no.
//!
//! Promises: the bits of an [`Item`] are the same for ever, because filters of items are stored.
//! Does not: grow. Its owner says how large it is, and what its probes are.

/// Bits per item, for about one wrong yes in seven hundred with seven probes. (Filters of before have ten, and one in a hundred.)
const BITS_PER_ITEM: usize = 14;
const PROBES: u64 = 7;

/// What is put into a filter.
pub(super) trait Probes {
    /// Its bits in a filter of this size.
    fn probes(self, bytes: usize) -> impl Iterator<Item = usize>;
}

/// What a stored filter is asked for: the digest of a value, in parts.
#[derive(Debug, Clone, Copy)]
pub(super) struct Item {
    first: u64,
    step: u64,
    third: u64,
}

impl Item {
    pub(super) fn of(value: &[u8]) -> Self {
        let digest = oncehook_verify::digest(value);
        let part = |range: std::ops::Range<usize>| {
            digest.get(range).and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_le_bytes)
        };
        Self { first: part(0..8), step: part(8..16) | 1, third: part(16..24) }
    }

    /// One of the cells, whatever the probes are.
    pub(super) fn cell(self, cells: usize) -> usize {
        usize::try_from(self.third % (cells as u64).max(1)).unwrap_or(0)
    }
}

impl Probes for Item {
    /// Double hashing.
    fn probes(self, bytes: usize) -> impl Iterator<Item = usize> {
        let bits = (bytes as u64 * 8).max(1);
        (0..PROBES).map(move |probe| (self.first.wrapping_add(probe.wrapping_mul(self.step)) % bits) as usize)
    }
}

/// The hash of a key, for a filter in memory. Its bits all lie in one block as large as a cache line, so a look costs one access to
/// memory.
#[derive(Clone, Copy)]
pub(super) struct KeyHash(pub(super) u64);

/// Bytes of a block.
pub(super) const CACHE_LINE: usize = 64;

impl Probes for KeyHash {
    /// The upper half of the hash, scaled to the number of blocks; and the whole hash, mixed once more.
    fn probes(self, bytes: usize) -> impl Iterator<Item = usize> {
        let block = ((self.0 >> 32) * (bytes / CACHE_LINE) as u64) >> 32;
        let mixed = self.0.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mixed = mixed ^ (mixed >> 29);
        (0..PROBES).map(move |probe| (block * 512 + ((mixed >> (9 * probe)) & 511)) as usize)
    }
}

/// Whether a filter as it is stored may hold an item.
pub(super) fn may_contain(bytes: &[u8], item: impl Probes) -> bool {
    item.probes(bytes.len()).all(|bit| bytes.get(bit / 8).is_some_and(|byte| byte & (1 << (bit % 8)) != 0))
}

#[derive(Clone)]
pub(super) struct Bloom(Vec<u8>);

impl Bloom {
    /// An empty filter for about this many items.
    pub(super) fn for_items(items: usize) -> Self {
        Self::of_bytes((items * BITS_PER_ITEM).div_ceil(8).max(8))
    }

    /// An empty filter of a size.
    pub(super) fn of_bytes(bytes: usize) -> Self {
        Self(vec![0; bytes])
    }

    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    pub(super) fn insert(&mut self, item: impl Probes) {
        for bit in item.probes(self.0.len()) {
            if let Some(byte) = self.0.get_mut(bit / 8) {
                *byte |= 1 << (bit % 8);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Bloom, Item, may_contain};

    #[test]
    fn never_a_wrong_no_and_seldom_a_wrong_yes() {
        let mut bloom = Bloom::for_items(1_000);
        for item in 0..1_000 {
            bloom.insert(Item::of(format!("in {item}").as_bytes()));
        }
        let holds = |text: String| may_contain(bloom.as_bytes(), Item::of(text.as_bytes()));
        assert!((0..1_000).all(|item| holds(format!("in {item}"))));
        let wrong = (0..10_000).filter(|item| holds(format!("out {item}"))).count();
        assert!(wrong < 50, "{wrong} of 10,000");
        assert!(!may_contain(Bloom::for_items(0).as_bytes(), Item::of(b"x")));
    }
}
