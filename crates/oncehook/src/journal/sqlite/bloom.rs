//! A small Bloom filter: may this block hold that entity? It may say yes wrongly (about once in a hundred), never no.

/// Bits per item, for about one wrong yes in a hundred with seven probes.
const BITS_PER_ITEM: usize = 10;
const PROBES: u64 = 7;

pub(super) struct Bloom(Vec<u8>);

impl Bloom {
    /// An empty filter for about so many items.
    pub(super) fn for_items(items: usize) -> Self {
        Self(vec![0; (items * BITS_PER_ITEM).div_ceil(8).max(8)])
    }

    pub(super) fn from_bytes(bytes: Vec<u8>) -> Self {
        Self(bytes)
    }

    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    pub(super) fn insert(&mut self, item: &[u8]) {
        for bit in probes(item, self.0.len()) {
            if let Some(byte) = self.0.get_mut(bit / 8) {
                *byte |= 1 << (bit % 8);
            }
        }
    }

    pub(super) fn may_contain(&self, item: &[u8]) -> bool {
        probes(item, self.0.len())
            .all(|bit| self.0.get(bit / 8).is_some_and(|byte| byte & (1 << (bit % 8)) != 0))
    }
}

/// Double hashing with the two halves of a digest. The digest is fixed for ever: filters are stored.
fn probes(item: &[u8], bytes: usize) -> impl Iterator<Item = usize> {
    let digest = oncehook_verify::digest(item);
    let half = |range: std::ops::Range<usize>| {
        digest.get(range).and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_le_bytes)
    };
    let (first, step) = (half(0..8), half(8..16) | 1);
    let bits = (bytes as u64 * 8).max(1);
    (0..PROBES).map(move |probe| (first.wrapping_add(probe.wrapping_mul(step)) % bits) as usize)
}

#[cfg(test)]
mod tests {
    use super::Bloom;

    #[test]
    fn never_a_wrong_no_and_seldom_a_wrong_yes() {
        let mut bloom = Bloom::for_items(1_000);
        for item in 0..1_000 {
            bloom.insert(format!("in {item}").as_bytes());
        }
        let bloom = Bloom::from_bytes(bloom.as_bytes().to_vec());
        assert!((0..1_000).all(|item| bloom.may_contain(format!("in {item}").as_bytes())));
        let wrong = (0..10_000).filter(|item| bloom.may_contain(format!("out {item}").as_bytes())).count();
        assert!(wrong < 300, "{wrong} of 10,000");
        assert!(!Bloom::for_items(0).may_contain(b"x"));
    }
}
