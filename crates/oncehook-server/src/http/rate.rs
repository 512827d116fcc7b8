//! Rate limits of a source: for all its genuine events together, and for each address that delivers.
//!
//! Promises: no more than `burst` at once and `per_second` in the long run, and an answer that says when the next may come. The
//! limit of an address counts every request, before its body is read; the limit of the source counts genuine ones only, so
//! forged requests cannot use it up. Memory is bounded: beyond so many addresses that were seen lately, further ones share a bucket.
//! An IPv6 sender is its network (/64): addresses within one cost nothing.
//!
//! Does not: share counts between nodes. Each node has its own.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::config::{Rate, RateLimits};

/// Addresses are held in so many maps of so many entries.
const SHARDS: usize = 16;
const HELD: usize = 4_096;

/// A full map is searched for addresses that have been quiet at most this often.
const SWEEP_EVERY: Duration = Duration::from_secs(1);

/// What a source counts. Without limits, nothing.
pub(super) struct Limiter {
    source: Option<(Rate, Mutex<Bucket>)>,
    peer: Option<(Rate, Peers)>,
}

impl Limiter {
    pub(super) fn new(limits: RateLimits, now: Instant) -> Self {
        Self {
            source: limits.source.map(|rate| (rate, Mutex::new(Bucket::full(rate, now)))),
            peer: limits.peer.map(|rate| (rate, Peers::new(rate, now))),
        }
    }

    /// Counts a genuine request. An error tells when the next one may come.
    pub(super) fn take(&self, now: Instant) -> Result<(), Duration> {
        match &self.source {
            None => Ok(()),
            Some((rate, bucket)) => bucket.lock().unwrap_or_else(PoisonError::into_inner).take(*rate, now),
        }
    }

    /// Counts a request of an address. An error tells when its next one may come.
    pub(super) fn take_of(&self, peer: IpAddr, now: Instant) -> Result<(), Duration> {
        match &self.peer {
            None => Ok(()),
            Some((rate, peers)) => peers.take(network(peer), *rate, now),
        }
    }
}

/// Tokens that come back with time.
#[derive(Debug, Clone, Copy)]
struct Bucket {
    tokens: f64,
    at: Instant,
}

impl Bucket {
    fn full(rate: Rate, now: Instant) -> Self {
        Self { tokens: f64::from(rate.burst), at: now }
    }

    fn refill(&mut self, rate: Rate, now: Instant) {
        let passed = now.saturating_duration_since(self.at).as_secs_f64();
        self.tokens = (self.tokens + passed * f64::from(rate.per_second)).min(f64::from(rate.burst));
        self.at = self.at.max(now);
    }

    fn take(&mut self, rate: Rate, now: Instant) -> Result<(), Duration> {
        self.refill(rate, now);
        if self.tokens >= 1.0 {
            self.tokens -= 1.0;
            return Ok(());
        }
        Err(Duration::from_secs_f64((1.0 - self.tokens) / f64::from(rate.per_second.max(1))))
    }
}

struct Peers {
    hasher: RandomState,
    shards: [Mutex<Shard>; SHARDS],
}

struct Shard {
    buckets: HashMap<IpAddr, Bucket>,
    /// For all for whom there is no room.
    others: Bucket,
    swept: Instant,
}

impl Peers {
    fn new(rate: Rate, now: Instant) -> Self {
        let shard = || Shard { buckets: HashMap::new(), others: Bucket::full(rate, now), swept: now };
        Self { hasher: RandomState::new(), shards: std::array::from_fn(|_| Mutex::new(shard())) }
    }

    fn take(&self, peer: IpAddr, rate: Rate, now: Instant) -> Result<(), Duration> {
        let at = self.hasher.hash_one(peer) as usize % SHARDS;
        // The remainder is always below the length.
        let Some(shard) = self.shards.get(at) else { return Ok(()) };
        let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
        let shard = &mut *shard;
        if let Some(bucket) = shard.buckets.get_mut(&peer) {
            return bucket.take(rate, now);
        }
        if shard.buckets.len() >= HELD && now.saturating_duration_since(shard.swept) >= SWEEP_EVERY {
            shard.swept = now;
            // A bucket that is full again says nothing that a new one would not.
            shard.buckets.retain(|_, bucket| {
                bucket.refill(rate, now);
                bucket.tokens < f64::from(rate.burst)
            });
        }
        if shard.buckets.len() >= HELD {
            return shard.others.take(rate, now);
        }
        shard.buckets.entry(peer).or_insert_with(|| Bucket::full(rate, now)).take(rate, now)
    }
}

/// Who an address counts as.
pub(super) fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => address.into(),
        IpAddr::V6(address) => {
            let [a, b, c, d, ..] = address.segments();
            Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0).into()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: Rate = Rate { per_second: 10, burst: 3 };

    fn limiter(now: Instant) -> Limiter {
        Limiter::new(RateLimits { source: Some(RATE), peer: Some(RATE) }, now)
    }

    #[test]
    fn r6_a_bucket_gives_its_burst_and_then_its_rate() {
        let start = Instant::now();
        let limiter = limiter(start);
        for _ in 0..3 {
            assert_eq!(limiter.take(start), Ok(()));
        }
        let wait = limiter.take(start).unwrap_err();
        assert!((wait.as_secs_f64() - 0.1).abs() < 1e-6, "{wait:?}");
        assert!(limiter.take(start + Duration::from_millis(99)).is_err());
        assert_eq!(limiter.take(start + Duration::from_millis(101)), Ok(()));
        // A day of quiet is worth one burst.
        let later = start + Duration::from_secs(86_400);
        assert_eq!((0..10).filter(|_| limiter.take(later).is_ok()).count(), 3);
        // Ten a second over ten seconds, asked for twice as often.
        let taken = (1..=200).filter(|step| limiter.take(later + Duration::from_millis(50 * step)).is_ok());
        assert_eq!(taken.count(), 100);
    }

    #[test]
    fn r6_each_address_has_its_own_and_a_network_is_one() {
        let start = Instant::now();
        let limiter = limiter(start);
        let of = |text: &str| (0..5).filter(|_| limiter.take_of(text.parse().unwrap(), start).is_ok()).count();
        assert_eq!((of("192.0.2.1"), of("192.0.2.2")), (3, 3));
        assert_eq!(of("::ffff:192.0.2.1"), 0, "the same address, written otherwise");
        assert_eq!((of("2001:db8::1"), of("2001:db8::2"), of("2001:db8:0:1::1")), (3, 0, 3));
    }

    #[test]
    fn r5_r6_addresses_without_end_cost_no_memory_without_end() {
        let start = Instant::now();
        let limiter = limiter(start);
        let (_, peers) = limiter.peer.as_ref().unwrap();
        let address = |number: u32| IpAddr::from(number.to_be_bytes());
        for number in 0..200_000 {
            let _ = limiter.take_of(address(number), start);
        }
        let held = || peers.shards.iter().map(|shard| shard.lock().unwrap().buckets.len()).sum::<usize>();
        assert_eq!(held(), SHARDS * HELD);
        assert!(limiter.take_of(address(1_000_000), start).is_err(), "those without room share");
        // The quiet ones make room.
        let later = start + Duration::from_secs(5);
        for number in 2_000_000..2_001_000 {
            assert_eq!(limiter.take_of(address(number), later), Ok(()));
        }
        assert_eq!(held(), 1_000);
    }
}
