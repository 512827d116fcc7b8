//! Callers who wait for what comes of their event.
//!
//! Promises: one reader per node looks for all of them together, however many wait and for however many deliveries, and
//! looks only while somebody waits; a delivery that another node handles is seen as well. Everybody who waits for a delivery
//! hears the same. The number of those who wait is bounded, and so is the time. Whoever goes away changes nothing.
//! Does not: make anything happen. The worker does its work whether somebody waits or not.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use oncehook::delivery::{DeliveryId, DeliveryState};
use oncehook::journal::{JournalReader, Standing};
use tokio::sync::{Notify, watch};

/// How often to look while somebody waits. (What wakes workers would wake this far too often: it tells of every accept.)
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// How long to gather before a look: those who come together are looked up together.
const GATHER: Duration = Duration::from_millis(2);

/// How long to rest after a look that failed: a database that is away is not asked two hundred times a second.
const REST: Duration = Duration::from_millis(100);

/// The longest that one look may take.
const LOOK_WAIT: Duration = Duration::from_secs(2);

/// Deliveries that are asked for at once.
const BATCH: usize = 500;

/// What was heard of a delivery.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) enum Word {
    /// Nobody has looked yet.
    #[default]
    Unknown,
    /// It stands like this; `None` if there is no such delivery (yet).
    Told(Option<Standing>),
}

impl Word {
    /// Whether there is nothing to wait for: it is final, or a try of it has failed and the next one comes later.
    fn is_over(&self) -> bool {
        match self {
            Self::Told(Some(standing)) => !standing.state.is_pending() || standing.state == DeliveryState::Retrying,
            Self::Unknown | Self::Told(None) => false,
        }
    }
}

/// See the module's text. One per gateway.
pub(crate) struct Waiting {
    awaited: Mutex<HashMap<DeliveryId, watch::Sender<Word>>>,
    arrived: Notify,
    inside: AtomicUsize,
    limit: usize,
    /// Whether everybody was let go.
    over: AtomicBool,
}

/// A place among those who wait.
pub(crate) struct Place<'w>(&'w Waiting);

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.inside.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Waiting {
    pub(crate) fn new(limit: usize) -> Self {
        Self {
            awaited: Mutex::default(),
            arrived: Notify::new(),
            inside: AtomicUsize::new(0),
            limit,
            over: AtomicBool::new(false),
        }
    }

    /// A place, if there is one.
    pub(crate) fn enter(&self) -> Option<Place<'_>> {
        let before = self.inside.fetch_add(1, Ordering::Relaxed);
        let place = Place(self);
        (before < self.limit).then_some(place)
    }

    /// What comes of a delivery, or how it stands when the time is up.
    pub(crate) async fn outcome(&self, _place: &Place<'_>, delivery: DeliveryId, up_to: Duration) -> Word {
        self.heard(delivery, up_to, Word::is_over).await
    }

    /// How a delivery stands now.
    pub(crate) async fn look(&self, _place: &Place<'_>, delivery: DeliveryId) -> Word {
        self.heard(delivery, LOOK_WAIT, |word| *word != Word::Unknown).await
    }

    async fn heard(&self, delivery: DeliveryId, up_to: Duration, enough: impl Fn(&Word) -> bool) -> Word {
        let mut words = {
            let mut awaited = self.awaited();
            if self.over.load(Ordering::Acquire) {
                return Word::Unknown;
            }
            let word = awaited.entry(delivery).or_insert_with(|| watch::Sender::new(Word::Unknown));
            if word.receiver_count() == 0 {
                // What somebody heard who is gone may be old.
                word.send_replace(Word::Unknown);
            }
            word.subscribe()
        };
        self.arrived.notify_one();
        // Neither the end of the time nor that of the reader is an error: what was heard last counts.
        let _ = tokio::time::timeout(up_to, words.wait_for(|word| enough(word))).await;
        words.borrow().clone()
    }

    /// Lets everybody go who waits, and whoever comes later, with what was heard last: nothing more will happen here.
    pub(crate) fn let_go(&self) {
        self.over.store(true, Ordering::Release);
        self.awaited().clear();
    }

    /// Looks for as long as it is polled.
    pub(crate) async fn run(&self, reader: &dyn JournalReader) {
        loop {
            tokio::time::sleep(GATHER).await;
            let ids = self.prune();
            if ids.is_empty() {
                self.arrived.notified().await;
                continue;
            }
            let mut failed = false;
            for ids in ids.chunks(BATCH) {
                match tokio::time::timeout(LOOK_WAIT, reader.standings(ids.to_vec())).await {
                    Ok(Ok(standings)) => self.tell(ids, standings),
                    // What could not be read is read the next time.
                    Ok(Err(_)) | Err(_) => failed = true,
                }
            }
            if failed {
                tokio::time::sleep(REST).await;
                continue;
            }
            tokio::select! {
                () = tokio::time::sleep(LOOK_EVERY) => {}
                () = self.arrived.notified() => {}
            }
        }
    }

    /// Forgets deliveries that nobody waits for any more; names the others.
    fn prune(&self) -> Vec<DeliveryId> {
        let mut awaited = self.awaited();
        awaited.retain(|_, words| words.receiver_count() > 0);
        awaited.keys().cloned().collect()
    }

    fn tell(&self, ids: &[DeliveryId], standings: Vec<Option<Standing>>) {
        let mut awaited = self.awaited();
        for (id, standing) in ids.iter().zip(standings) {
            let word = Word::Told(standing);
            let over = word.is_over();
            if let Some(words) = awaited.get(id) {
                words.send_if_modified(|before| {
                    let news = *before != word;
                    *before = word;
                    news
                });
            }
            if over {
                // Whoever comes later looks anew: an operator may have had it tried again.
                awaited.remove(id);
            }
        }
    }

    fn awaited(&self) -> MutexGuard<'_, HashMap<DeliveryId, watch::Sender<Word>>> {
        self.awaited.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use oncehook::delivery::RouteName;
    use oncehook::event::EventId;
    use oncehook::journal::{BoxFuture, EventDetail, EventPage, EventQuery, ReadError, Stats, StoredBody};

    use super::*;

    /// A journal whose answers the test sets, and that counts how often it is asked.
    #[derive(Default)]
    struct Told {
        state: Mutex<Option<DeliveryState>>,
        away: std::sync::atomic::AtomicBool,
        looks: AtomicUsize,
    }

    fn nobody_asks<T: Send + 'static>() -> BoxFuture<'static, Result<T, ReadError>> {
        Box::pin(async { panic!("nobody asks for this here") })
    }

    impl JournalReader for Told {
        fn list(&self, _: EventQuery) -> BoxFuture<'_, Result<EventPage, ReadError>> {
            nobody_asks()
        }
        fn show(&self, _: EventId) -> BoxFuture<'_, Result<Option<EventDetail>, ReadError>> {
            nobody_asks()
        }
        fn body(&self, _: EventId) -> BoxFuture<'_, Result<Option<StoredBody>, ReadError>> {
            nobody_asks()
        }
        fn stats(&self) -> BoxFuture<'_, Result<Stats, ReadError>> {
            nobody_asks()
        }
        fn standings(&self, ids: Vec<DeliveryId>) -> BoxFuture<'_, Result<Vec<Option<Standing>>, ReadError>> {
            self.looks.fetch_add(1, Ordering::Relaxed);
            let state = *self.state.lock().unwrap();
            if self.away.load(Ordering::Relaxed) {
                return Box::pin(async { Err(ReadError::Engine("away".to_owned())) });
            }
            Box::pin(async move { Ok(vec![state.map(standing); ids.len()]) })
        }
    }

    fn standing(state: DeliveryState) -> Standing {
        Standing { state, result: None, error: None, cause: None }
    }

    fn delivery() -> DeliveryId {
        DeliveryId { event: EventId::from_bytes([7; 16]), route: RouteName::new("orders").unwrap(), epoch: 0 }
    }

    fn start(limit: usize) -> (Arc<Waiting>, Arc<Told>) {
        let (waiting, told) = (Arc::new(Waiting::new(limit)), Arc::new(Told::default()));
        let (run, reader) = (Arc::clone(&waiting), Arc::clone(&told));
        tokio::spawn(async move { run.run(&*reader).await });
        (waiting, told)
    }

    #[tokio::test]
    async fn r19_many_who_wait_for_one_delivery_are_one_question() {
        let (waiting, told) = start(1_000);
        let callers: Vec<_> = (0..500)
            .map(|_| {
                let waiting = Arc::clone(&waiting);
                tokio::spawn(async move {
                    let place = waiting.enter().unwrap();
                    waiting.outcome(&place, delivery(), Duration::from_secs(20)).await
                })
            })
            .collect();
        tokio::time::sleep(Duration::from_millis(100)).await;
        *told.state.lock().unwrap() = Some(DeliveryState::Succeeded);
        for caller in callers {
            assert_eq!(caller.await.unwrap(), Word::Told(Some(standing(DeliveryState::Succeeded))));
        }
        let looks = told.looks.load(Ordering::Relaxed);
        assert!((1..100).contains(&looks), "{looks}");
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert_eq!(told.looks.load(Ordering::Relaxed), looks, "nobody waits, nobody looks");
        assert!(waiting.awaited().is_empty());
    }

    #[tokio::test]
    async fn r19_a_wait_ends_with_its_time_or_with_a_failed_try() {
        let (waiting, told) = start(10);
        let place = waiting.enter().unwrap();
        let short = Duration::from_millis(60);
        assert_eq!(waiting.outcome(&place, delivery(), short).await, Word::Told(None));
        *told.state.lock().unwrap() = Some(DeliveryState::Running);
        let running = Word::Told(Some(standing(DeliveryState::Running)));
        assert_eq!(waiting.look(&place, delivery()).await, running);
        assert_eq!(waiting.outcome(&place, delivery(), short).await, running);
        *told.state.lock().unwrap() = Some(DeliveryState::Retrying);
        let ended = waiting.outcome(&place, delivery(), Duration::from_secs(20)).await;
        assert_eq!(ended, Word::Told(Some(standing(DeliveryState::Retrying))));
    }

    #[tokio::test(start_paused = true)]
    async fn r19_a_journal_that_is_away_is_not_hammered_and_is_heard_when_it_is_back() {
        let (waiting, told) = start(10);
        let place = waiting.enter().unwrap();
        told.away.store(true, Ordering::Relaxed);
        assert_eq!(waiting.outcome(&place, delivery(), Duration::from_secs(5)).await, Word::Unknown);
        let looks = told.looks.load(Ordering::Relaxed);
        assert!((10..=51).contains(&looks), "{looks} in five seconds");
        told.away.store(false, Ordering::Relaxed);
        *told.state.lock().unwrap() = Some(DeliveryState::Succeeded);
        let word = waiting.outcome(&place, delivery(), Duration::from_secs(5)).await;
        assert_eq!(word, Word::Told(Some(standing(DeliveryState::Succeeded))));
    }

    #[test]
    fn r5_the_number_of_those_who_wait_is_bounded() {
        let waiting = Waiting::new(2);
        let places = [waiting.enter(), waiting.enter()];
        assert!(places.iter().all(Option::is_some) && waiting.enter().is_none());
        drop(places);
        assert!(waiting.enter().is_some());
    }
}
