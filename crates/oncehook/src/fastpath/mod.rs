//! The fast path: copies of an event that is known to be durable do not reach the journal.
//!
//! Three means: a cache of keys that receipts have named, in this process (`memory`); one append for copies that
//! arrive together (`flights`); and the same kind of cache for all nodes together (`shared`, in `redis`). They make
//! things faster, never truer: all rest on a receipt of the journal, of its present life, and whatever they do not
//! know, or must not decide, goes there. That is every new key, every other body under a known key, every key whose
//! time is over, and a request of several events unless all of them are known here.
//!
//! Does not: decide anything while it is in doubt which life of the journal this is.

mod flights;
mod memory;
#[cfg(any(test, feature = "planted"))]
mod planted;
#[cfg(feature = "redis")]
mod redis;
mod shared;
mod trouble;

use std::time::Duration;

use oncehook_verify::UnixMicros;
use smallvec::SmallVec;
use tokio::time::{Instant, timeout};

use crate::clock::Clock;
use crate::event::{NewEvent, NewEvents, SourceName};
use crate::journal::{AppendError, Appended, Era, Journal, JournalReader, KnownCopy, Layer, Receipt, Verdict};
use flights::{Boarding, Flights, Leader};
use memory::{Fact, KnownKeys, Name};
#[cfg(feature = "redis")]
pub use redis::RedisAddress;
pub use shared::SharedState;
use shared::{SharedKeys, WARM_KEYS, WARM_WAIT, key_of};
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

type Outcome = Result<Settled, AppendError>;

/// What is needed to write an event's fact down once its receipt has come, taken before the event is handed over.
#[derive(Clone)]
struct Draft {
    /// A leader gets it back from its flight.
    name: Option<Name>,
    digest: [u8; 32],
    received_at: UnixMicros,
    /// The journal's life before the append: the receipt is believed in this one only.
    era: Option<Era>,
    /// The key in the store that other nodes read, if there is one.
    shared_key: Option<Vec<u8>>,
}

impl FastPath {
    /// With a cache that is shared with other nodes. [`run`](Self::run) connects it.
    #[cfg(feature = "redis")]
    pub fn with_redis(address: RedisAddress) -> Self {
        Self::with_store(Box::new(redis::RedisStore::new(address)))
    }

    #[cfg(any(feature = "redis", test))]
    fn with_store(store: Box<dyn shared::Store>) -> Self {
        Self { shared: Some(SharedKeys::new(store)), ..Self::default() }
    }

    /// How the cache that is shared with other nodes is doing, if there is one and it is in use.
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
            if let Ok(source) = SourceName::new(&recent.source) {
                self.known.learn(Name { source, key: recent.key.clone() }, Fact::of(&recent), era);
            }
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
        let settled = timeout(patience, self.append(journal, events)).await;
        let settled = settled.map_or(Err(NotStored::Slow), |settled| settled.map_err(NotStored::from));
        match &settled {
            // An answer from a cache says nothing about the journal.
            Ok(settled) if settled.layer != Layer::Journal => {}
            Ok(_) => self.refusals.stored(Instant::now()),
            Err(error) => self.refusals.refused(began, error.to_string()),
        }
        settled
    }

    /// Since when the journal has refused every append, if it does.
    pub fn trouble(&self) -> Option<Trouble> {
        self.refusals.trouble()
    }

    /// The journal has stored a probe that was begun then. Appends that were refused since know better.
    pub fn probed(&self, began: Instant) {
        self.refusals.stored(began);
    }

    /// Stores the events of a request, or finds that they are known. All branching of the fast path is here.
    ///
    /// If the future is dropped half-way, an append that was submitted goes on in the journal; followers of it ask there.
    pub async fn append(&self, journal: &dyn Journal, events: NewEvents) -> Outcome {
        #[cfg(feature = "planted")]
        if planted::asks_the_journal_alone() {
            return self.ask(journal, events, None).await;
        }
        if let Some(settled) = self.recall(journal, &events) {
            return Ok(settled);
        }
        let [event] = events.as_slice() else {
            return self.ask(journal, events, None).await;
        };
        let leader = loop {
            match self.flights.board(event) {
                Boarding::Apart => break None,
                Boarding::Leads(leader) => {
                    if let Some((era, fact)) = self.find(journal, event).await
                        && let Some(settled) = duplicates(journal, &events, &[fact], Layer::Redis)
                    {
                        if let Some(name) = leader.land(&Ok(Some(fact))) {
                            self.known.learn(name, fact, era);
                        }
                        return Ok(settled);
                    }
                    break Some(leader);
                }
                Boarding::Follows(landing) => {
                    // The leader's sender hung up, or waited too long for a slow journal. One of those who followed leads now,
                    // and the others follow it: a slow journal is not asked by all of them at once.
                    let Ok(landed) = landing.await else { continue };
                    match landed?.and_then(|fact| duplicates(journal, &events, &[fact], Layer::Memory)) {
                        Some(settled) => return Ok(settled),
                        // The journal has to count the copy.
                        None => break None,
                    }
                }
            }
        };
        self.ask(journal, events, leader).await
    }

    /// The answer, if every event is a known duplicate.
    pub fn recall(&self, journal: &dyn Journal, events: &NewEvents) -> Option<Settled> {
        let era = journal.incarnation().era()?;
        let known = |event: &NewEvent| self.known.get(event, era).filter(|fact| fact.digest == event.digest);
        let facts: SmallVec<[Fact; 1]> = events.iter().map(known).collect::<Option<_>>()?;
        duplicates(journal, events, &facts, Layer::Memory)
    }

    /// What other nodes know of an event, if it is the same event and the journal lives on.
    async fn find(&self, journal: &dyn Journal, event: &NewEvent) -> Option<(Era, Fact)> {
        let shared = self.shared.as_ref()?;
        let (era, name) = journal.incarnation().name()?;
        let fact = shared.find(&name, event).await.filter(|fact| fact.digest == event.digest)?;
        // The journal may have begun another life while the answer was under way.
        (journal.incarnation().era() == Some(era)).then_some((era, fact))
    }

    /// Asks the journal, for this request alone or for all who follow its single event, and writes down what it says.
    async fn ask(&self, journal: &dyn Journal, events: NewEvents, leader: Option<Leader<'_>>) -> Outcome {
        let drafts = events.iter().map(|event| self.draft(journal, event, leader.is_none()));
        let mut drafts: SmallVec<[Draft; 1]> = drafts.collect();
        #[cfg(any(test, feature = "planted"))]
        self.write_too_early(&drafts).await;
        let outcome = match journal.submit(events) {
            Ok(ticket) => ticket.await.unwrap_or(Err(AppendError::Gone)),
            Err(error) => Err(error),
        };
        if let (Some(leader), [draft]) = (leader, drafts.as_mut_slice()) {
            let first = |receipt: &Receipt| receipt.first().and_then(|appended| fact(appended, draft.digest));
            draft.name = leader.land(&outcome.as_ref().map(first).map_err(AppendError::clone));
        }
        let receipt = outcome?;
        for (draft, appended) in drafts.into_iter().zip(&receipt) {
            if let Some(fact) = fact(appended, draft.digest) {
                self.learn(draft, fact);
            }
        }
        Ok(Settled { receipt, layer: Layer::Journal })
    }

    fn draft(&self, journal: &dyn Journal, event: &NewEvent, named: bool) -> Draft {
        let (era, shared_key) = match self.shared.as_ref().and_then(|_| journal.incarnation().name()) {
            Some((era, life)) => (Some(era), Some(key_of(&life, event.source.as_str(), &event.key))),
            None => (journal.incarnation().era(), None),
        };
        let name = named.then(|| Name::of(event));
        Draft { name, digest: event.digest, received_at: event.received_at, era, shared_key }
    }

    /// Writes a fact down, here and for other nodes. Only ever called with what a receipt has said.
    fn learn(&self, draft: Draft, fact: Fact) {
        if let (Some(era), Some(name)) = (draft.era, draft.name) {
            self.known.learn(name, fact, era);
        }
        if let (Some(shared), Some(key)) = (&self.shared, draft.shared_key) {
            shared.offer(key, draft.received_at, &fact);
        }
    }
}

/// What a receipt says of a key. After a conflict nothing: it does not hold the first body's digest.
fn fact(appended: &Appended, digest: [u8; 32]) -> Option<Fact> {
    let Appended { id: event, verdict, expires_at } = *appended;
    (verdict != Verdict::Conflict).then_some(Fact { event, digest, expires_at })
}

/// Counts copies of known events, and answers for them. Nothing if the journal has no room to count them now.
fn duplicates(journal: &dyn Journal, events: &[NewEvent], facts: &[Fact], layer: Layer) -> Option<Settled> {
    let copies = events.iter().zip(facts).map(|(event, fact)| {
        let NewEvent { source, received_at: at, peer, .. } = event;
        KnownCopy { event: fact.event, source, at: *at, peer: *peer, layer }
    });
    let copies: SmallVec<[KnownCopy<'_>; 1]> = copies.collect();
    let duplicate = |fact: &Fact| Appended { id: fact.event, verdict: Verdict::Duplicate, expires_at: fact.expires_at };
    journal.note_duplicates(&copies).then(|| Settled { receipt: facts.iter().map(duplicate).collect(), layer })
}

#[cfg(test)]
mod interleavings;
#[cfg(test)]
mod model;
#[cfg(test)]
pub(crate) mod tests;
