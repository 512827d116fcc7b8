//! The fast path: copies of an event that is known to be durable do not reach the journal.
//!
//! Two means, both in this process: a cache of keys that receipts have named (`memory`), and one append for copies that
//! arrive together (`flights`). They make things faster, never truer: both rest on a receipt of the journal, and whatever they
//! do not know, or must not decide, goes there. That is every new key, every other body under a known key, every key
//! whose time is over, and a request of several events unless all of them are known duplicates.
//!
//! Does not: outlive the process, or speak to other nodes.

mod flights;
mod memory;

use crate::event::{NewEvent, NewEvents};
use crate::journal::{AppendError, Appended, Journal, Layer, Receipt, Verdict};
use crate::planted::{self, Bug};
use flights::{Boarding, Flights, Landing, Leader};
use memory::{Fact, KnownKeys, NameOf};

/// What became of a request's events, and who knew it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settled {
    /// One outcome per event.
    pub receipt: Receipt,
    /// Where duplicates were recognised.
    pub layer: Layer,
}

/// See the module's text. One per gateway, in front of one journal.
#[derive(Default)]
pub struct FastPath {
    known: KnownKeys,
    flights: Flights,
}

impl FastPath {
    /// Stores the events of a request, or finds that they are known. All branching of the fast path is here.
    ///
    /// If the future is dropped half-way, an append that was submitted goes on in the journal; followers of it ask there.
    pub async fn append(&self, journal: &dyn Journal, events: NewEvents) -> Result<Settled, AppendError> {
        if planted::has(Bug::SelectThenInsert) || planted::has(Bug::ShortMemory) {
            return self.ask(journal, events).await;
        }
        if let Some(receipt) = self.recall(journal, &events) {
            return Ok(Settled { receipt, layer: Layer::Memory });
        }
        let [event] = events.as_slice() else {
            return self.ask(journal, events).await;
        };
        match self.flights.board(event) {
            Boarding::Apart => self.ask(journal, events).await,
            Boarding::Leads(leader) => self.lead(journal, events, leader).await,
            Boarding::Follows(landing) => match landing.await {
                Ok(Landing::Known(fact)) if note(journal, event, &fact) => {
                    Ok(Settled { receipt: Receipt::from_elem(duplicate(&fact), 1), layer: Layer::Memory })
                }
                Ok(Landing::Failed(error)) => Err(error),
                // The leader's sender hung up, the copy counts as a conflict, or there is no room to count it here.
                Ok(Landing::Known(_) | Landing::Conflict) | Err(_) => self.ask(journal, events).await,
            },
        }
    }

    /// The receipt, if every event is a known duplicate.
    fn recall(&self, journal: &dyn Journal, events: &NewEvents) -> Option<Receipt> {
        let known = |event: &NewEvent| self.known.get(event).filter(|fact| fact.digest == event.digest);
        let facts: smallvec::SmallVec<[Fact; 1]> = events.iter().map(known).collect::<Option<_>>()?;
        let mut noted = events.iter().zip(&facts).map(|(event, fact)| note(journal, event, fact));
        noted.all(|noted| noted).then(|| facts.iter().map(duplicate).collect())
    }

    /// Appends a single event for all who wait for it.
    async fn lead(
        &self,
        journal: &dyn Journal,
        events: NewEvents,
        leader: Leader<'_>,
    ) -> Result<Settled, AppendError> {
        let digest = events.first().map(|event| event.digest).unwrap_or_default();
        let outcome = submit(journal, events).await;
        let landing = match &outcome {
            Ok(receipt) => {
                receipt.first().map_or(Landing::Conflict, |appended| match fact(appended, digest) {
                    Some(fact) => Landing::Known(fact),
                    None => Landing::Conflict,
                })
            }
            Err(error) => Landing::Failed(error.clone()),
        };
        if let (Some(name), Landing::Known(fact)) = (leader.land(&landing), landing) {
            self.known.learn(name, fact);
        }
        outcome.map(|receipt| Settled { receipt, layer: Layer::Journal })
    }

    /// Asks the journal for this request alone.
    async fn ask(&self, journal: &dyn Journal, events: NewEvents) -> Result<Settled, AppendError> {
        let names: Vec<_> = events.iter().map(|event| (NameOf(event).to_owned(), event.digest)).collect();
        let receipt = submit(journal, events).await?;
        for ((name, digest), appended) in names.into_iter().zip(&receipt) {
            if let Some(fact) = fact(appended, digest) {
                self.known.learn(name, fact);
            }
        }
        Ok(Settled { receipt, layer: Layer::Journal })
    }
}

async fn submit(journal: &dyn Journal, events: NewEvents) -> Result<Receipt, AppendError> {
    journal.submit(events)?.await.unwrap_or(Err(AppendError::Gone))
}

/// What a receipt says of a key. After a conflict nothing: it does not tell the first body's digest.
fn fact(appended: &Appended, digest: [u8; 32]) -> Option<Fact> {
    match appended.verdict {
        Verdict::New | Verdict::Quarantined | Verdict::Duplicate => {
            Some(Fact { event: appended.id, digest, expires_at: appended.expires_at })
        }
        Verdict::Conflict => None,
    }
}

fn duplicate(fact: &Fact) -> Appended {
    Appended { id: fact.event, verdict: Verdict::Duplicate, expires_at: fact.expires_at }
}

fn note(journal: &dyn Journal, event: &NewEvent, fact: &Fact) -> bool {
    journal.note_duplicate(fact.event, &event.source, event.received_at, event.peer, Layer::Memory)
}

#[cfg(test)]
mod tests;
