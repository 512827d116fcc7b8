//! Appends under way, so that copies of an event that arrive together share one.
//!
//! Promises: a follower hears what became of the first append, good or bad, or that its leader has gone away without
//! hearing it; then it boards again, and one of the followers leads.
//! Does not: decide anything. A copy that finds no append under way simply leads the next; the journal tells it the
//! truth.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use hashbrown::HashTable;
use quick_cache::Equivalent;
use tokio::sync::oneshot;

use super::memory::{Fact, Name, NameOf};
use crate::event::NewEvent;
use crate::journal::AppendError;

/// Locks are held for a few map operations; this many make meeting at one unlikely.
const SHARDS: usize = 16;

/// How an append ended.
#[derive(Debug, Clone)]
pub(super) enum Landing {
    /// The key is durable, and this is what is known of it.
    Known(Fact),
    /// Another body holds the key. Every copy of this one has to be counted by the journal.
    Conflict,
    /// Nothing was stored, or the outcome is unknown.
    Failed(AppendError),
}

struct Flight {
    hash: u64,
    /// Tells it from every other one, so that its leader finds it again without its name.
    number: u64,
    name: Name,
    digest: [u8; 32],
    followers: Vec<oneshot::Sender<Landing>>,
}

#[derive(Default)]
pub(super) struct Flights {
    hasher: RandomState,
    shards: [Mutex<HashTable<Flight>>; SHARDS],
    next: AtomicU64,
}

/// What a copy of an event finds.
pub(super) enum Boarding<'f> {
    /// Nothing under way: it leads.
    Leads(Leader<'f>),
    /// A copy of it is under way.
    Follows(oneshot::Receiver<Landing>),
    /// The key is under way with another body. The journal will settle it.
    Apart,
}

impl Flights {
    pub(super) fn board(&self, event: &NewEvent) -> Boarding<'_> {
        let name = NameOf(event);
        let hash = self.hasher.hash_one(name);
        let mut shard = self.shard(hash);
        match shard.find_mut(hash, |flight| name.equivalent(&flight.name)) {
            None => {
                let number = self.next.fetch_add(1, Ordering::Relaxed);
                let (digest, name) = (event.digest, name.to_owned());
                let flight = Flight { hash, number, name, digest, followers: Vec::new() };
                shard.insert_unique(hash, flight, |flight| flight.hash);
                drop(shard);
                Boarding::Leads(Leader { flights: self, hash, number: Some(number) })
            }
            Some(flight) if flight.digest == event.digest => {
                let (tell, landing) = oneshot::channel();
                flight.followers.push(tell);
                Boarding::Follows(landing)
            }
            Some(_) => Boarding::Apart,
        }
    }

    fn remove(&self, hash: u64, number: u64) -> Option<Flight> {
        let mut shard = self.shard(hash);
        let found = shard.find_entry(hash, |flight| flight.number == number);
        found.ok().map(|found| found.remove().0)
    }

    fn shard(&self, hash: u64) -> MutexGuard<'_, HashTable<Flight>> {
        // The table uses the lowest and the highest bits itself.
        let at = (hash >> 32) as usize % SHARDS;
        // The remainder is always below the length; an empty array would be the only way to miss.
        let shard = self.shards.get(at).unwrap_or(&self.shards[0]);
        shard.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The duty to answer the followers. If it is dropped before it lands, their channels close, and they board again.
pub(super) struct Leader<'f> {
    flights: &'f Flights,
    hash: u64,
    number: Option<u64>,
}

impl Leader<'_> {
    /// Tells the followers how it ended. Gives the name back, which was made for the flight.
    pub(super) fn land(mut self, landing: &Landing) -> Option<Name> {
        let flight = self.flights.remove(self.hash, self.number.take()?)?;
        for follower in flight.followers {
            // A follower may have hung up.
            let _ = follower.send(landing.clone());
        }
        Some(flight.name)
    }
}

impl Drop for Leader<'_> {
    fn drop(&mut self) {
        if let Some(number) = self.number.take() {
            // Dropping the flight drops its followers' senders.
            drop(self.flights.remove(self.hash, number));
        }
    }
}
