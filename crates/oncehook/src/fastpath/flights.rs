//! Appends under way, so that copies of an event that arrive together share one.
//!
//! Promises: a follower hears what became of the first append, good or bad, or that its leader has gone away without
//! hearing it; then the follower asks the journal itself.
//! Does not: decide anything. A copy that finds no append under way simply leads the next; the journal tells it the truth.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Mutex, MutexGuard, PoisonError};

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
    digest: [u8; 32],
    followers: Vec<oneshot::Sender<Landing>>,
}

#[derive(Default)]
pub(super) struct Flights {
    hasher: RandomState,
    shards: [Mutex<HashMap<Name, Flight>>; SHARDS],
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
        let name = NameOf(event).to_owned();
        let mut shard = self.shard(&name);
        match shard.get_mut(&name) {
            None => {
                shard.insert(name.clone(), Flight { digest: event.digest, followers: Vec::new() });
                drop(shard);
                Boarding::Leads(Leader { flights: self, name: Some(name) })
            }
            Some(flight) if flight.digest == event.digest => {
                let (tell, landing) = oneshot::channel();
                flight.followers.push(tell);
                Boarding::Follows(landing)
            }
            Some(_) => Boarding::Apart,
        }
    }

    fn shard(&self, name: &Name) -> MutexGuard<'_, HashMap<Name, Flight>> {
        let at = self.hasher.hash_one(name) as usize % SHARDS;
        // The remainder is always below the length; an empty array would be the only way to miss.
        let shard = self.shards.get(at).unwrap_or(&self.shards[0]);
        shard.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The right to tell the others. Dropped without a word, the followers learn that nobody will tell them.
pub(super) struct Leader<'f> {
    flights: &'f Flights,
    name: Option<Name>,
}

impl Leader<'_> {
    /// Tells the followers how it ended. Gives the name back, which was made for the flight.
    pub(super) fn land(mut self, landing: &Landing) -> Option<Name> {
        let name = self.name.take()?;
        let flight = self.flights.shard(&name).remove(&name);
        for follower in flight.into_iter().flat_map(|flight| flight.followers) {
            // A follower may have hung up.
            let _ = follower.send(landing.clone());
        }
        Some(name)
    }
}

impl Drop for Leader<'_> {
    fn drop(&mut self) {
        if let Some(name) = self.name.take() {
            // Dropping the flight drops its followers' senders.
            self.flights.shard(&name).remove(&name);
        }
    }
}
