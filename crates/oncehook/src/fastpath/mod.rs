//! The fast path: copies of an event that is known to be durable do not reach the journal.
//!
//! Three means: a cache of keys that receipts have named, in this process (`memory`); one append for copies that arrive
//! together (`flights`); and the same kind of cache for all nodes together (`shared`, in `redis`). They make things
//! faster, never truer: all rest on a receipt of the journal, of its present life, and whatever they do not know, or must not
//! decide, goes there. That is every new key, every other body under a known key, every key whose time is over, and a
//! request of several events unless all of them are known here.
//!
//! Does not: decide anything while it is in doubt which life of the journal this is.

mod flights;
mod memory;
#[cfg(feature = "redis")]
mod redis;
mod shared;
mod trouble;

use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;
use tokio::time::{Instant, timeout};

use crate::clock::Clock;
use crate::event::{NewEvent, NewEvents, SourceName};
use crate::journal::{AppendError, Appended, Era, Journal, JournalReader, KnownCopy, Layer, Receipt, Verdict};
use crate::planted::{self, Bug};
use flights::{Boarding, Flights, Landing, Leader};
use memory::{Fact, KnownKeys, Name, NameOf};
#[cfg(feature = "redis")]
pub use redis::RedisAddress;
pub use shared::SharedState;
use shared::{Heading, SharedKeys, WARM_KEYS, WARM_WAIT};
use trouble::Refusals;
pub use trouble::Trouble;

/// What became of a request's events, and who knew it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settled {
    /// One outcome per event.
    pub receipt: Receipt,
    /// Where duplicates were recognised.
    pub layer: Layer,
}

/// Why a request has no receipt. The sender must try again.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotStored {
    /// The journal refused, or the outcome is unknown.
    #[error(transparent)]
    Refused(#[from] AppendError),
    /// The journal did not answer in time.
    #[error("the journal did not answer in time")]
    Slow,
}

/// See the module's text. One per gateway, in front of one journal.
#[derive(Default)]
pub struct FastPath {
    known: KnownKeys,
    flights: Flights,
    refusals: Refusals,
    shared: Option<SharedKeys>,
    /// The mistake that the tests must find: facts are written before they are facts.
    #[cfg(test)]
    written_too_early: bool,
}

/// The journal's life before an append: what the receipt says is written down under this one.
struct Life {
    era: Option<Era>,
    /// The name under which other nodes know it, if there is somebody to tell.
    name: Option<Arc<str>>,
}

impl Life {
    /// Under what an event's fact will be written down for others.
    fn heading(&self, event: &NewEvent) -> Option<Heading> {
        self.name.as_ref().map(|name| Heading::of(name, event))
    }
}

impl FastPath {
    /// With a cache that is shared with other nodes. [`run`](Self::run) connects it.
    #[cfg(feature = "redis")]
    #[must_use]
    pub fn with_redis(address: RedisAddress) -> Self {
        Self::with_store(Box::new(redis::RedisStore::new(address)))
    }

    #[cfg(any(feature = "redis", test))]
    fn with_store(store: Box<dyn shared::Store>) -> Self {
        Self { shared: Some(SharedKeys::new(store)), ..Self::default() }
    }

    /// How the cache that is shared with other nodes is doing, if there is one and it is in use.
    #[must_use]
    pub fn shared(&self) -> Option<SharedState> {
        self.shared.as_ref().filter(|shared| shared.is_running()).map(SharedKeys::state)
    }

    /// Warms the caches with the keys that came last, and looks after the shared one for as long as it is polled. Without
    /// it the fast path works, but nothing is shared.
    pub async fn run(&self, journal: &dyn Journal, reader: &dyn JournalReader, clock: &Clock) {
        self.warm(journal, reader).await;
        if let Some(shared) = &self.shared {
            shared.run(journal, reader, clock).await;
        }
    }

    /// Learns the keys that came last before the start.
    async fn warm(&self, journal: &dyn Journal, reader: &dyn JournalReader) {
        let Some(era) = journal.incarnation().era() else { return };
        let Ok(Ok(recent)) = timeout(WARM_WAIT, reader.recent_keys(WARM_KEYS)).await else { return };
        // The oldest first: what came last is forgotten last.
        for recent in recent.into_iter().rev() {
            let Ok(source) = SourceName::new(&recent.source) else { continue };
            let fact = Fact { event: recent.event, digest: recent.digest, expires_at: recent.expires_at };
            self.known.learn(Name { source, key: recent.key }, fact, era);
        }
    }

    /// As [`append`](Self::append), but waits for so long at most, and notes how it went for [`trouble`](Self::trouble).
    pub async fn append_within(
        &self,
        patience: Duration,
        journal: &dyn Journal,
        events: NewEvents,
    ) -> Result<Settled, NotStored> {
        let began = Instant::now();
        let settled = match timeout(patience, self.append(journal, events)).await {
            Ok(settled) => settled.map_err(NotStored::from),
            Err(_) => Err(NotStored::Slow),
        };
        match &settled {
            // Whoever is answered from memory learns nothing about the journal.
            Ok(settled) if settled.layer != Layer::Journal => {}
            Ok(_) => self.refusals.stored(),
            Err(error) => self.refusals.refused(began, error.to_string()),
        }
        settled
    }

    /// Since when the journal has refused every append, if it does.
    #[must_use]
    pub fn trouble(&self) -> Option<Trouble> {
        self.refusals.trouble()
    }

    /// The journal has stored a probe that was begun then.
    pub fn probed(&self, began: Instant) {
        self.refusals.probed(began);
    }

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
        loop {
            let landing = match self.flights.board(event) {
                Boarding::Apart => return self.ask(journal, events).await,
                Boarding::Leads(leader) => match self.find(journal, event).await {
                    Some((era, fact)) if note(journal, event, &fact, Layer::Redis) => {
                        if let Some(name) = leader.land(&Landing::Known(fact)) {
                            self.known.learn(name, fact, era);
                        }
                        let receipt = Receipt::from_elem(duplicate(&fact), 1);
                        return Ok(Settled { receipt, layer: Layer::Redis });
                    }
                    _ => return self.lead(journal, events, leader).await,
                },
                Boarding::Follows(landing) => landing,
            };
            match landing.await {
                Ok(Landing::Known(fact)) if note(journal, event, &fact, Layer::Memory) => {
                    let receipt = Receipt::from_elem(duplicate(&fact), 1);
                    return Ok(Settled { receipt, layer: Layer::Memory });
                }
                Ok(Landing::Failed(error)) => return Err(error),
                // The copy counts as a conflict, or there is no room to count it here.
                Ok(Landing::Known(_) | Landing::Conflict) => return self.ask(journal, events).await,
                // The leader's sender hung up, or waited too long for a slow journal. One of those who followed leads now, and
                // the others follow it: a slow journal is not asked by all of them at once.
                Err(_) => {}
            }
        }
    }

    /// The receipt, if every event is a known duplicate.
    pub fn recall(&self, journal: &dyn Journal, events: &NewEvents) -> Option<Receipt> {
        let era = journal.incarnation().era()?;
        let known = |event: &NewEvent| self.known.get(event, era).filter(|fact| fact.digest == event.digest);
        let facts: SmallVec<[Fact; 1]> = events.iter().map(known).collect::<Option<_>>()?;
        let copies = events.iter().zip(&facts).map(|(event, fact)| copy(event, fact, Layer::Memory));
        let copies: SmallVec<[KnownCopy<'_>; 1]> = copies.collect();
        journal.note_duplicates(&copies).then(|| facts.iter().map(duplicate).collect())
    }

    /// What other nodes know of an event, if it is the same event and the journal lives on.
    async fn find(&self, journal: &dyn Journal, event: &NewEvent) -> Option<(Era, Fact)> {
        let shared = self.shared.as_ref()?;
        let (era, name) = journal.incarnation().name()?;
        let fact = shared.find(&name, event).await.filter(|fact| fact.digest == event.digest)?;
        // The journal may have begun another life while the answer was under way.
        (journal.incarnation().era() == Some(era)).then_some((era, fact))
    }

    /// Appends a single event for all who wait for it.
    async fn lead(&self, journal: &dyn Journal, events: NewEvents, leader: Leader<'_>) -> Result<Settled, AppendError> {
        let life = self.life(journal);
        let digest = events.first().map(|event| event.digest).unwrap_or_default();
        let heading = events.first().and_then(|event| life.heading(event));
        if let Some(event) = events.first().filter(|_| planted::has(Bug::CacheFirst)) {
            let guessed = crate::event::EventId::from_bytes([7; 16]);
            self.tell(heading.clone(), &Fact { event: guessed, digest, expires_at: event.expires_at });
            // Redis is told beside us. The mistake is that it knows first, so it gets the time.
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
        #[cfg(test)]
        if let Some(event) = events.first().filter(|_| self.written_too_early) {
            let fact = Fact { event: tests::guessed_id(), digest, expires_at: event.expires_at };
            self.tell(heading.clone(), &fact);
        }
        let outcome = submit(journal, events).await;
        let landing = match &outcome {
            Ok(receipt) => receipt.first().map_or(Landing::Conflict, |appended| match fact(appended, digest) {
                Some(fact) => Landing::Known(fact),
                None => Landing::Conflict,
            }),
            Err(error) => Landing::Failed(error.clone()),
        };
        let name = leader.land(&landing);
        if let Landing::Known(fact) = landing {
            self.tell(heading, &fact);
            if let (Some(name), Some(era)) = (name, life.era) {
                self.known.learn(name, fact, era);
            }
        }
        outcome.map(|receipt| Settled { receipt, layer: Layer::Journal })
    }

    /// Asks the journal for this request alone.
    async fn ask(&self, journal: &dyn Journal, events: NewEvents) -> Result<Settled, AppendError> {
        let life = self.life(journal);
        let asked = events.iter().map(|event| (NameOf(event).to_owned(), event.digest, life.heading(event)));
        let asked: Vec<_> = asked.collect();
        let receipt = submit(journal, events).await?;
        for ((name, digest, heading), appended) in asked.into_iter().zip(&receipt) {
            let Some(fact) = fact(appended, digest) else { continue };
            self.tell(heading, &fact);
            if let Some(era) = life.era {
                self.known.learn(name, fact, era);
            }
        }
        Ok(Settled { receipt, layer: Layer::Journal })
    }

    fn life(&self, journal: &dyn Journal) -> Life {
        match self.shared.as_ref().and_then(|_| journal.incarnation().name()) {
            Some((era, name)) => Life { era: Some(era), name: Some(name) },
            None => Life { era: journal.incarnation().era(), name: None },
        }
    }

    /// Tells other nodes. Only ever called with what a receipt has said.
    fn tell(&self, heading: Option<Heading>, fact: &Fact) {
        if let (Some(shared), Some(heading)) = (&self.shared, heading) {
            shared.offer(heading, fact);
        }
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

fn copy<'e>(event: &'e NewEvent, fact: &Fact, layer: Layer) -> KnownCopy<'e> {
    KnownCopy { event: fact.event, source: &event.source, at: event.received_at, peer: event.peer, layer }
}

fn note(journal: &dyn Journal, event: &NewEvent, fact: &Fact, layer: Layer) -> bool {
    journal.note_duplicates(&[copy(event, fact, layer)])
}

#[cfg(test)]
mod interleavings;
#[cfg(test)]
pub(crate) mod tests;
