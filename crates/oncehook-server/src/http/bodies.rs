//! The memory that bodies may take, and the bodies that are still on their way in.
//!
//! Promises: all bodies together hold no more than `in_flight_bytes`. When that is short, the slowest unfinished body is
//! evicted first, so a sender that stops in the middle of a body cannot keep others out. A quarter of the budget is for
//! small bodies alone. Bytes count when they have arrived, never because a request has announced them.
//!
//! A body that is complete with its first read costs one addition. The lock is for the others, and for when memory is short.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

/// Up to this size a body may use the reserve.
const SMALL: usize = 64 << 10;

/// The part of the budget that is for small bodies alone.
const RESERVE: usize = 4;

/// What an unfinished body takes beside its own buffer: hyper's, and the state of its request.
const BESIDE: usize = 16 << 10;

/// An eviction frees at least this part of the budget, so that a flood does not make us search for every piece.
const AT_ONCE: usize = 64;

/// How fast a body must arrive on average.
const LEAST_PER_SECOND: u64 = 1 << 10;

/// How long a body may take before the least rate counts.
const LEAST_AFTER: Duration = Duration::from_secs(5);

/// The time over which a body's present rate is measured. A body that is silent for longer is stalled.
const WINDOW: Duration = Duration::from_secs(1);

/// How long a body of which so much has arrived may have taken so far.
pub(super) fn patience(arrived: usize) -> Duration {
    LEAST_AFTER + Duration::from_millis(arrived as u64 * 1_000 / LEAST_PER_SECOND)
}

/// The budget. Shared by all connections of the front door.
#[derive(Debug)]
pub(super) struct Bodies {
    limit: usize,
    /// What is left for bodies that are not small.
    large_limit: usize,
    held: AtomicUsize,
    unfinished: Mutex<Unfinished>,
}

#[derive(Debug, Default)]
struct Unfinished {
    next: u64,
    bodies: HashMap<u64, Arriving>,
}

/// A body that is not complete.
#[derive(Debug)]
struct Arriving {
    /// Bytes of the budget that it has.
    held: usize,
    arrived: usize,
    /// Who sends it; nothing for a listed proxy, which sends for everybody.
    sender: Option<IpAddr>,
    last: Instant,
    /// When the present window and the one before it began, and what had arrived by then.
    window: (Instant, usize),
    previous: (Instant, usize),
    evict: oneshot::Sender<()>,
}

impl Arriving {
    fn note(&mut self, bytes: usize, now: Instant) {
        if now.saturating_duration_since(self.window.0) >= WINDOW {
            self.previous = self.window;
            self.window = (now, self.arrived);
        }
        self.arrived += bytes;
        self.last = now;
    }

    /// Bytes per second of late: over one or two windows.
    fn rate(&self, now: Instant) -> u64 {
        if now.saturating_duration_since(self.last) >= WINDOW {
            return 0;
        }
        let (since, before) = self.previous;
        let millis = now.saturating_duration_since(since).as_millis().max(1);
        u64::try_from((self.arrived - before) as u128 * 1_000 / millis).unwrap_or(u64::MAX)
    }
}

impl Bodies {
    /// A budget of `limit` bytes that has room for at least one body of `largest`.
    pub(super) fn new(limit: usize, largest: usize) -> Self {
        let limit = limit.max(largest + BESIDE);
        let reserve = (limit / RESERVE).min(limit - largest - BESIDE);
        Self {
            limit,
            large_limit: limit - reserve,
            held: AtomicUsize::new(0),
            unfinished: Mutex::new(Unfinished::default()),
        }
    }

    /// Takes the bytes of a complete body; `false` if there is no room and nothing that could make room. Whoever took them
    /// gives them back.
    pub(super) fn take(&self, bytes: usize) -> bool {
        let held = self.held.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let limit = self.limit_for(bytes);
        if held <= limit || self.make_room(&mut self.lock(), limit, Instant::now()) {
            return true;
        }
        self.give_back(bytes);
        false
    }

    /// Gives back what [`take`](Self::take) or [`Arrival::finish`] gave.
    pub(super) fn give_back(&self, bytes: usize) {
        self.held.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Enters a body that is not complete. `sender` is nothing for a listed proxy.
    pub(super) fn arrive(&self, sender: Option<IpAddr>, now: Instant) -> Arrival<'_> {
        let (evict, evicted) = oneshot::channel();
        let start = (now, 0);
        let body = Arriving { held: 0, arrived: 0, sender, last: now, window: start, previous: start, evict };
        let mut unfinished = self.lock();
        unfinished.next += 1;
        let id = unfinished.next;
        unfinished.bodies.insert(id, body);
        Arrival { bodies: self, id, evicted }
    }

    fn limit_for(&self, size: usize) -> usize {
        if size <= SMALL { self.limit } else { self.large_limit }
    }

    fn lock(&self) -> MutexGuard<'_, Unfinished> {
        self.unfinished.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Evicts the slowest until no more than `limit` is held; `false` if that cannot be reached.
    fn make_room(&self, unfinished: &mut Unfinished, limit: usize, now: Instant) -> bool {
        let over = self.held.load(Ordering::Relaxed).saturating_sub(limit);
        if over == 0 {
            return true;
        }
        let wanted = over.max(self.limit / AT_ONCE);
        let mut freed = 0;
        for id in self.slowest_first(unfinished, now) {
            if freed >= wanted {
                break;
            }
            if let Some(body) = unfinished.bodies.remove(&id) {
                freed += body.held;
                self.give_back(body.held);
                // Its reader may have ended by itself.
                let _ = body.evict.send(());
            }
        }
        freed >= over
    }

    /// First what has stalled, then the bodies of senders who hold more than their share, then the rest; each from the slowest.
    fn slowest_first(&self, unfinished: &Unfinished, now: Instant) -> Vec<u64> {
        let mut by_sender: HashMap<IpAddr, usize> = HashMap::new();
        for body in unfinished.bodies.values() {
            if let Some(sender) = body.sender {
                *by_sender.entry(sender).or_default() += body.held;
            }
        }
        let share = self.limit / by_sender.len().max(1);
        let mut ranked: Vec<_> = unfinished
            .bodies
            .iter()
            .map(|(id, body)| {
                let rate = body.rate(now);
                let old = now.saturating_duration_since(body.previous.0) >= WINDOW;
                let of_sender = body.sender.and_then(|sender| by_sender.get(&sender)).copied();
                let class = match (old && rate < LEAST_PER_SECOND, of_sender) {
                    (true, _) => 0,
                    (false, Some(held)) if held > share => 1,
                    (false, _) => 2,
                };
                (class, rate, Reverse(now.saturating_duration_since(body.last)), *id)
            })
            .collect();
        ranked.sort_unstable();
        ranked.into_iter().map(|(.., id)| id).collect()
    }
}

/// A body on its way in. Gives its bytes back when dropped, unless it is [finished](Self::finish).
pub(super) struct Arrival<'b> {
    bodies: &'b Bodies,
    id: u64,
    evicted: oneshot::Receiver<()>,
}

impl Arrival<'_> {
    /// Counts bytes that have arrived, and takes what the buffer for them has in all. `false` if there is no room: the
    /// body must be refused, whether it was evicted or is itself the slowest.
    pub(super) fn grow(&self, bytes: usize, in_all: usize, now: Instant) -> bool {
        let mut unfinished = self.bodies.lock();
        let Some(body) = unfinished.bodies.get_mut(&self.id) else { return false };
        body.note(bytes, now);
        let more = (in_all + BESIDE).saturating_sub(body.held);
        body.held += more;
        let held = self.bodies.held.fetch_add(more, Ordering::Relaxed) + more;
        let limit = self.bodies.limit_for(in_all);
        held <= limit
            || (self.bodies.make_room(&mut unfinished, limit, now) && unfinished.bodies.contains_key(&self.id))
    }

    /// Returns when the body was evicted.
    pub(super) async fn evicted(&mut self) {
        // An error would mean that the entry is gone, which is an eviction too.
        let _ = (&mut self.evicted).await;
    }

    /// The body is complete and cannot be evicted any more. Returns the bytes that it holds, which the caller gives back.
    pub(super) fn finish(self) -> Option<usize> {
        self.bodies.lock().bodies.remove(&self.id).map(|body| body.held)
    }
}

impl Drop for Arrival<'_> {
    fn drop(&mut self) {
        let body = self.bodies.lock().bodies.remove(&self.id);
        if let Some(body) = body {
            self.bodies.give_back(body.held);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: usize = 1 << 10;

    fn address(last: u8) -> Option<IpAddr> {
        Some([192, 0, 2, last].into())
    }

    fn is_evicted(arrival: &mut Arrival<'_>) -> bool {
        arrival.evicted.try_recv() != Err(oneshot::error::TryRecvError::Empty)
    }

    /// A budget of 1 MiB, 768 KiB of it for large bodies too.
    fn bodies() -> Bodies {
        Bodies::new(1 << 20, 512 * KIB)
    }

    #[test]
    fn fault_76_a_quarter_is_left_for_small_bodies() {
        let (bodies, now) = (bodies(), Instant::now());
        assert!(bodies.take(512 * KIB));
        assert!(!bodies.take(512 * KIB), "complete bodies cannot be evicted");
        assert!(bodies.take(256 * KIB));
        assert!(!bodies.take(65 * KIB));
        assert!(!bodies.arrive(None, now).grow(65 * KIB, 65 * KIB, now));
        for _ in 0..4 {
            assert!(bodies.take(64 * KIB));
        }
        assert!(!bodies.take(1));
        bodies.give_back(64 * KIB);
        assert!(bodies.take(1));
    }

    #[test]
    fn fault_76_one_body_of_the_largest_size_always_fits() {
        let (bodies, now) = (Bodies::new(1 << 20, 1 << 20), Instant::now());
        let arrival = bodies.arrive(None, now);
        assert!(arrival.grow(1 << 20, 1 << 20, now));
        assert_eq!(arrival.finish(), Some((1 << 20) + BESIDE));
        assert!(!bodies.take(1));
    }

    #[test]
    fn fault_76_the_body_that_has_stopped_is_evicted_before_one_that_flows() {
        let (bodies, start) = (bodies(), Instant::now());
        let mut stopped = bodies.arrive(address(1), start);
        // Fast, at first: what counts is how fast it is now.
        assert!(stopped.grow(200 * KIB, 200 * KIB, start));
        let mut flowing = bodies.arrive(address(2), start);
        let mut dripping = bodies.arrive(address(3), start);
        assert!(dripping.grow(60 * KIB, 60 * KIB, start));
        for step in 1..=30 {
            let now = start + Duration::from_millis(100 * step);
            assert!(flowing.grow(10 * KIB, 10 * KIB * step as usize, now));
            assert!(dripping.grow(1, 60 * KIB, now));
        }
        // 608 KiB are held; a large newcomer finds 160 KiB.
        let now = start + Duration::from_secs(3);
        let newcomer = bodies.arrive(address(4), now);
        assert!(newcomer.grow(200 * KIB, 200 * KIB, now));
        assert!(is_evicted(&mut stopped) && !is_evicted(&mut dripping) && !is_evicted(&mut flowing));
        assert!(!stopped.grow(1, 1, now), "an evicted body takes no more");
        assert_eq!(stopped.finish(), None);
        assert!(newcomer.grow(200 * KIB, 400 * KIB, now));
        assert!(is_evicted(&mut dripping) && !is_evicted(&mut flowing), "next is the one that drips");
        assert!(newcomer.grow(80 * KIB, 480 * KIB, now));
        assert!(is_evicted(&mut flowing));
    }

    #[test]
    fn fault_76_a_sender_over_its_share_goes_first_but_never_a_listed_proxy() {
        let (bodies, now) = (bodies(), Instant::now());
        let later = now + Duration::from_millis(10);
        let arrive = |sender, held| {
            let arrival = bodies.arrive(sender, now);
            assert!(arrival.grow(held, held, later));
            arrival
        };
        let mut modest = arrive(address(1), 40 * KIB);
        let mut greedy: Vec<_> = (0..10).map(|_| arrive(address(2), 60 * KIB)).collect();
        let mut proxy: Vec<_> = (0..2).map(|_| arrive(None, 30 * KIB)).collect();
        for _ in 0..4 {
            assert!(bodies.take(64 * KIB), "room is made");
        }
        assert!(!is_evicted(&mut modest), "the slowest of all, and within its share");
        assert!(!proxy.iter_mut().any(is_evicted));
        assert!(greedy.iter_mut().any(is_evicted));
    }

    #[test]
    fn fault_76_everything_comes_back() {
        let (bodies, now) = (bodies(), Instant::now());
        let finished = bodies.arrive(None, now);
        assert!(finished.grow(10, 20, now));
        assert_eq!(finished.finish(), Some(20 + BESIDE));
        let dropped = bodies.arrive(None, now);
        assert!(dropped.grow(10, 30, now));
        drop(dropped);
        assert_eq!(bodies.held.load(Ordering::Relaxed), 20 + BESIDE);
        bodies.give_back(20 + BESIDE);
        assert!(bodies.lock().bodies.is_empty());
        assert!(bodies.take(700 * KIB));
    }

    #[test]
    fn fault_76_patience_grows_with_what_has_arrived() {
        assert_eq!(patience(0), Duration::from_secs(5));
        assert_eq!(patience(10 * KIB), Duration::from_secs(15));
    }
}
