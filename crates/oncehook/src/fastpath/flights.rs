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

use super::memory::{Fact, Name};
use crate::event::NewEvent;
use crate::journal::AppendError;

/// How an append ended. With a fact: the key is durable, and this is what is known of it. Without one: another body holds
/// the key, and the journal has to count every copy of this one. An error: nothing was stored, or the outcome is unknown.
pub(super) type Landing = Result<Option<Fact>, AppendError>;

struct Flight {
    hash: u64,
    /// Differs for each flight, so that the leader finds its own again without the name.
    number: u64,
    name: Name,
    digest: [u8; 32],
    followers: Vec<oneshot::Sender<Landing>>,
}

#[derive(Default)]
pub(super) struct Flights {
    hasher: RandomState,
    /// Locked for one operation of the table at a time.
    under_way: Mutex<HashTable<Flight>>,
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
        let name = Name::borrowed(event);
        let hash = self.hasher.hash_one(name);
        let mut under_way = self.lock();
        match under_way.find_mut(hash, |flight| name.equivalent(&flight.name)) {
            None => {
                let number = self.next.fetch_add(1, Ordering::Relaxed);
                let (digest, name) = (event.digest, Name::of(event));
                let flight = Flight { hash, number, name, digest, followers: Vec::new() };
                under_way.insert_unique(hash, flight, |flight| flight.hash);
                Boarding::Leads(Leader { flights: self, hash, number })
            }
            Some(flight) if flight.digest == event.digest => {
                let (tell, landing) = oneshot::channel();
                flight.followers.push(tell);
                Boarding::Follows(landing)
            }
            Some(_) => Boarding::Apart,
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashTable<Flight>> {
        self.under_way.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The duty to answer the followers. If it is dropped before it lands, their channels close, and they board again.
pub(super) struct Leader<'f> {
    flights: &'f Flights,
    hash: u64,
    number: u64,
}

impl Leader<'_> {
    /// Sends the followers how it ended. Gives the name back, which was made for the flight.
    pub(super) fn land(self, landing: &Landing) -> Option<Name> {
        let flight = self.remove()?;
        for follower in flight.followers {
            // A follower may have hung up.
            let _ = follower.send(landing.clone());
        }
        Some(flight.name)
    }

    /// Takes the flight out of the table. Nothing if it has landed.
    fn remove(&self) -> Option<Flight> {
        let mut under_way = self.flights.lock();
        let found = under_way.find_entry(self.hash, |flight| flight.number == self.number);
        found.ok().map(|found| found.remove().0)
    }
}

impl Drop for Leader<'_> {
    fn drop(&mut self) {
        // Dropping the flight drops its followers' senders.
        drop(self.remove());
    }
}
