//! Repeatable randomness: a seed gives the same history on every machine. Tests print the seed when they fail.

/// SplitMix64. Small, fast and good enough to choose test inputs.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// The sequence of that seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A new sequence each time. Prints its seed, which `ONCEHOOK_TEST_SEED` brings back.
    #[must_use]
    #[expect(clippy::disallowed_methods, reason = "a test's seed is no configuration of the gateway")]
    pub fn from_environment() -> Self {
        let given = std::env::var("ONCEHOOK_TEST_SEED").ok().map(|seed| seed.parse().unwrap());
        let seed = given.unwrap_or_else(|| crate::gateway::now().0.unsigned_abs());
        eprintln!("seed {seed} (repeat with ONCEHOOK_TEST_SEED={seed})");
        Self(seed)
    }

    /// The next number.
    #[expect(clippy::should_implement_trait, reason = "it never ends, so an Option would only be in the way")]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `limit`, which must not be zero.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// One of the items.
    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        let index = self.below(items.len() as u64) as usize;
        &items[index]
    }
}

/// How many times as long as usual the long tests are to be: `ONCEHOOK_TEST_SCALE`, or once.
#[expect(clippy::disallowed_methods, reason = "a test's size is no configuration of the gateway")]
#[must_use]
pub fn scale() -> usize {
    std::env::var("ONCEHOOK_TEST_SCALE").ok().map_or(1, |scale| scale.parse().unwrap())
}
