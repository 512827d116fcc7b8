//! Keys that are known to be durable, shared by all nodes: facts of the journal in a store beside it.
//!
//! Promises: a hit is what a receipt of the present life of the journal has said, to this node or another one, and
//! whose time is not over. Only what is committed is written, and only afterwards. A slow or broken store costs a
//! few milliseconds once: then the breaker is open, requests do not ask, and a probe in the background finds out
//! when it is well again. What waits to be written is bounded; what does not fit is dropped, because a missing fact
//! is only a question to the journal.
//! Does not: know every durable key, or ever say that a key is new. A flushed, evicting, restarted or failed-over
//! store only forgets. It must not be writable for strangers: a forged fact makes an event a duplicate.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use oncehook_verify::{EventKey, UnixMicros};
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};

use super::memory::Fact;
use crate::clock::Clock;
use crate::event::{EventId, NewEvent};
use crate::journal::{BoxFuture, Journal, JournalReader};

/// The longest that a request waits for the store.
const READ_WAIT: Duration = Duration::from_millis(3);

/// This many answers in a row that came too late open the breaker. An error opens it at once.
const LATE_LIMIT: u32 = 3;

/// The longest that writing a batch may take.
const WRITE_WAIT: Duration = Duration::from_millis(500);

/// The longest that connecting may take.
const PROBE_WAIT: Duration = Duration::from_secs(2);

/// How long an open breaker rests before the next probe: doubled from the first to the longest.
const FIRST_REST: Duration = Duration::from_millis(100);
const LONGEST_REST: Duration = Duration::from_secs(5);

/// After so long without trouble the next rest is a first one again.
const STEADY: Duration = Duration::from_secs(10);

/// Facts that may wait to be written.
const QUEUE: usize = 8_192;

/// Facts that are written together.
const BATCH: usize = 256;

/// How often to look whether the store has been emptied, or the journal has begun another life.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// Keys that warm an empty store.
pub(super) const WARM_KEYS: usize = 10_000;

/// The longest that the journal may take to name them.
pub(super) const WARM_WAIT: Duration = Duration::from_secs(30);

/// For how long a store remembers that it was warmed.
const WARM_LIFE: Duration = Duration::from_secs(86_400);

/// What a store will answer.
pub(super) type Answer<'a, T> = BoxFuture<'a, Result<T, StoreError>>;

/// A place for facts that all nodes reach. Redis is one; the tests have another.
pub(super) trait Store: Send + Sync + 'static {
    /// Makes the store usable, connecting anew if needed, and shows that it answers.
    fn probe(&self) -> Answer<'_, ()>;

    /// What stands under a key.
    fn get(&self, key: Vec<u8>) -> Answer<'_, Option<Vec<u8>>>;

    /// Writes what is not there yet, each for its own time. The answer is how many were not there.
    fn put(&self, entries: Vec<Entry>) -> Answer<'_, usize>;
}

/// A fact on its way to the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) key: Vec<u8>,
    pub(super) value: Vec<u8>,
    pub(super) life: Duration,
}

/// Why the store did not do it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum StoreError {
    /// It cannot be used now; it has to be probed again.
    #[error("{0}")]
    Away(String),
    /// It works, and does not take this now (it is full, for example).
    #[error("{0}")]
    Refused(String),
}

/// How the shared keys are doing. For people and metrics; decides nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SharedState {
    /// What is wrong, if something is. Events are accepted all the same.
    pub problem: Option<String>,
    /// Questions that were answered with a fact.
    pub hits: u64,
    /// Questions that were answered with nothing.
    pub misses: u64,
    /// Questions that were not answered, or too late.
    pub unanswered: u64,
    /// Facts that were written.
    pub written: u64,
    /// Facts that were not: no room in the queue, or the store did not take them.
    pub dropped: u64,
}

/// See the module's text.
pub(super) struct SharedKeys {
    store: Box<dyn Store>,
    /// The breaker. Requests do not ask while it is set. It is, until the first probe.
    open: AtomicBool,
    /// Answers in a row that came too late.
    late: AtomicU32,
    tripped: Notify,
    state: Mutex<SharedState>,
    queue: mpsc::Sender<Entry>,
    /// Locked by [`run`](Self::run) for as long as it is polled.
    waiting: tokio::sync::Mutex<mpsc::Receiver<Entry>>,
}

impl SharedKeys {
    pub(super) fn new(store: Box<dyn Store>) -> Self {
        let (queue, waiting) = mpsc::channel(QUEUE);
        let problem = Some("not connected yet".to_owned());
        Self {
            store,
            open: AtomicBool::new(true),
            late: AtomicU32::new(0),
            tripped: Notify::new(),
            state: Mutex::new(SharedState { problem, ..SharedState::default() }),
            queue,
            waiting: tokio::sync::Mutex::new(waiting),
        }
    }

    /// What is known of an event's key in that life of the journal. `None`: ask the journal.
    pub(super) async fn find(&self, incarnation: &str, event: &NewEvent) -> Option<Fact> {
        if self.open.load(Ordering::Acquire) {
            return None;
        }
        let key = key_of(incarnation, event.source.as_str(), &event.key);
        let problem = match timeout(READ_WAIT, self.store.get(key)).await {
            Ok(Ok(found)) => {
                self.late.store(0, Ordering::Relaxed);
                let fact = found.and_then(|value| decode(&value)).filter(|fact| event.received_at < fact.expires_at);
                let mut state = self.lock();
                let count = if fact.is_some() { &mut state.hits } else { &mut state.misses };
                *count += 1;
                return fact;
            }
            Ok(Err(error)) => Some(error.to_string()),
            Err(_) => {
                let open = self.late.fetch_add(1, Ordering::Relaxed) + 1 >= LATE_LIMIT;
                open.then(|| too_late(READ_WAIT))
            }
        };
        self.lock().unanswered += 1;
        problem.into_iter().for_each(|problem| self.trip(problem));
        None
    }

    /// Writes a fact down for the other nodes, some time soon. The journal has said so.
    pub(super) fn offer(&self, key: Vec<u8>, now: UnixMicros, fact: &Fact) {
        if entry(key, now, fact).is_some_and(|entry| self.queue.try_send(entry).is_err()) {
            self.lock().dropped += 1;
        }
    }

    /// Whether [`run`](Self::run) looks after it.
    pub(super) fn is_running(&self) -> bool {
        self.waiting.try_lock().is_err()
    }

    pub(super) fn state(&self) -> SharedState {
        self.lock().clone()
    }

    /// Probes, writes and warms for as long as it is polled. All waiting is here; requests only ask and offer.
    pub(super) async fn run(&self, journal: &dyn Journal, reader: &dyn JournalReader, clock: &Clock) {
        let mut waiting = self.waiting.lock().await;
        let mut rest = FIRST_REST;
        loop {
            match in_time(PROBE_WAIT, self.store.probe()).await {
                Ok(()) => {
                    let begun = Instant::now();
                    self.close();
                    self.serve(&mut waiting, journal, reader, clock).await;
                    rest = if begun.elapsed() >= STEADY { FIRST_REST } else { rest };
                }
                Err(error) => self.lock().problem = Some(error.to_string()),
            }
            tokio::time::sleep(rest).await;
            rest = (rest * 2).min(LONGEST_REST);
        }
    }

    /// Writes what is offered and keeps the store warm until the breaker opens.
    async fn serve(
        &self,
        waiting: &mut mpsc::Receiver<Entry>,
        journal: &dyn Journal,
        reader: &dyn JournalReader,
        clock: &Clock,
    ) {
        let mut look = interval(LOOK_EVERY);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut batch = Vec::with_capacity(BATCH);
        while !self.open.load(Ordering::Acquire) {
            tokio::select! {
                // The notice may be of an earlier trip; the loop's condition decides.
                () = self.tripped.notified() => {}
                _ = waiting.recv_many(&mut batch, BATCH) => self.write(std::mem::take(&mut batch)).await,
                _ = look.tick() => self.warm(journal, reader, clock).await,
            }
        }
    }

    async fn write(&self, entries: Vec<Entry>) {
        let count = entries.len() as u64;
        match in_time(WRITE_WAIT, self.store.put(entries)).await {
            Ok(_) => {
                let mut state = self.lock();
                state.written += count;
                state.problem = None;
            }
            Err(error) => {
                self.lock().dropped += count;
                self.failed(error);
            }
        }
    }

    fn failed(&self, error: StoreError) {
        match error {
            StoreError::Away(reason) => self.trip(reason),
            // What is there can still be read.
            StoreError::Refused(reason) => self.lock().problem = Some(reason),
        }
    }

    /// Fills an empty store with the keys that came last. Of several nodes that see it empty, one does.
    async fn warm(&self, journal: &dyn Journal, reader: &dyn JournalReader, clock: &Clock) {
        let Some((era, incarnation)) = journal.incarnation().name() else { return };
        let key = format!("oncehook:{incarnation}").into_bytes();
        let mark = Entry { key, value: b"warm".to_vec(), life: WARM_LIFE };
        match in_time(WRITE_WAIT, self.store.put(vec![mark])).await {
            Ok(0) => return self.lock().problem = None,
            Ok(_) => {}
            Err(error) => return self.failed(error),
        }
        let Ok(Ok(recent)) = timeout(WARM_WAIT, reader.recent_keys(WARM_KEYS)).await else { return };
        // What was read is of the life in whose name it is written only if that has not ended meanwhile.
        if journal.incarnation().era() != Some(era) {
            return;
        }
        let now = clock.now();
        for keys in recent.chunks(BATCH) {
            let entries = keys.iter().filter_map(|recent| {
                let key = key_of(&incarnation, &recent.source, &recent.key);
                entry(key, now, &Fact::of(recent))
            });
            self.write(entries.collect()).await;
            if self.open.load(Ordering::Acquire) {
                return;
            }
        }
        tracing::info!(keys = recent.len(), "an empty Redis was warmed from the journal");
    }

    fn trip(&self, reason: String) {
        if !self.open.swap(true, Ordering::AcqRel) {
            tracing::warn!(%reason, "Redis is left alone for a while; the journal decides by itself");
            self.lock().problem = Some(reason);
            self.tripped.notify_one();
        }
    }

    fn close(&self) {
        self.lock().problem = None;
        self.late.store(0, Ordering::Relaxed);
        if self.open.swap(false, Ordering::AcqRel) {
            tracing::info!("Redis answers");
        }
    }

    fn lock(&self) -> MutexGuard<'_, SharedState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn in_time<T>(wait: Duration, answer: Answer<'_, T>) -> Result<T, StoreError> {
    timeout(wait, answer).await.unwrap_or_else(|_| Err(StoreError::Away(too_late(wait))))
}

fn too_late(wait: Duration) -> String {
    format!("no answer within {} ms", wait.as_millis())
}

/// `oncehook:`, the journal's life, the source, the key. A source's name has no colon, so no two keys meet.
pub(super) fn key_of(incarnation: &str, source: &str, key: &EventKey) -> Vec<u8> {
    [b"oncehook", incarnation.as_bytes(), source.as_bytes(), key.as_bytes()].join(&b':')
}

/// A fact with the time that is left of it; nothing if that is over.
fn entry(key: Vec<u8>, now: UnixMicros, fact: &Fact) -> Option<Entry> {
    let left = u64::try_from(fact.expires_at.0.saturating_sub(now.0)).ok().filter(|left| *left >= 1_000)?;
    Some(Entry { key, value: encode(fact), life: Duration::from_micros(left) })
}

/// Tells this layout from any later one.
const LAYOUT: u8 = 1;

fn encode(fact: &Fact) -> Vec<u8> {
    [&[LAYOUT], fact.event.as_bytes().as_slice(), &fact.digest, &fact.expires_at.0.to_be_bytes()].concat()
}

fn decode(value: &[u8]) -> Option<Fact> {
    let (layout, rest) = value.split_first()?;
    let (event, rest) = rest.split_first_chunk::<16>()?;
    let (digest, rest) = rest.split_first_chunk::<32>()?;
    let expires_at = rest.try_into().ok().map(i64::from_be_bytes)?;
    let event = EventId::from_bytes(*event);
    (*layout == LAYOUT).then_some(Fact { event, digest: *digest, expires_at: UnixMicros(expires_at) })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::tests::{NOW, event, fact_for};
    use super::*;

    #[test]
    fn what_is_written_is_read_back_and_nothing_else_is() {
        let value = encode(&fact_for(5));
        assert_eq!(decode(&value), Some(fact_for(5)));
        let shorter = (0..value.len()).map(|length| value[..length].to_vec());
        for other in shorter.chain([[&value[..], &[0]].concat(), [&[2], &value[1..]].concat()]) {
            assert_eq!(decode(&other), None, "{other:?}");
        }
    }

    /// A store that connects and then never answers. Counts the questions.
    struct Silent(Arc<AtomicU32>);

    impl Store for Silent {
        fn probe(&self) -> Answer<'_, ()> {
            Box::pin(async { Ok(()) })
        }
        fn get(&self, _: Vec<u8>) -> Answer<'_, Option<Vec<u8>>> {
            self.0.fetch_add(1, Ordering::Relaxed);
            Box::pin(std::future::pending())
        }
        fn put(&self, _: Vec<Entry>) -> Answer<'_, usize> {
            Box::pin(std::future::pending())
        }
    }

    #[tokio::test(start_paused = true)]
    async fn r17_a_slow_store_is_asked_a_few_times_and_then_left_alone() {
        let asked = Arc::<AtomicU32>::default();
        let shared = Arc::new(SharedKeys::new(Box::new(Silent(Arc::clone(&asked)))));
        let asked = || asked.load(Ordering::Relaxed);
        let find = async || assert_eq!(shared.find("life", &event("evt_1", 1)).await, None);
        find().await;
        assert_eq!(asked(), 0, "it is not asked before it was probed");
        let running = Arc::clone(&shared);
        let journal = crate::journal::memory::MemoryJournal::new();
        tokio::spawn(async move { running.run(&journal, &journal, &Clock::manual(NOW)).await });
        tokio::time::sleep(Duration::from_millis(1)).await;
        assert_eq!(shared.state().problem, None);

        let begun = Instant::now();
        for _ in 0..50 {
            find().await;
        }
        assert_eq!(asked(), LATE_LIMIT, "then the breaker is open");
        assert!(begun.elapsed() <= 4 * READ_WAIT, "{:?}", begun.elapsed());
        assert!(shared.state().problem.is_some());
        // It is probed, asked again, and left alone for longer each time.
        for _ in 0..2_000 {
            tokio::time::sleep(Duration::from_millis(10)).await;
            find().await;
        }
        assert!((LATE_LIMIT * 2..=LATE_LIMIT * 12).contains(&asked()), "{} in 20 s", asked());
        assert_eq!(shared.state().unanswered, u64::from(asked()));
    }

    #[test]
    fn no_two_names_share_a_key() {
        let key_of = |life, source, key: &str| key_of(life, source, &event(key, 1).key);
        assert_ne!(key_of("life", "a", "b:c"), key_of("life", "b", "c"));
        assert_ne!(key_of("life", "shop", "a"), key_of("life", "shop", "A"));
        assert_ne!(key_of("one", "shop", "a"), key_of("two", "shop", "a"));
    }

    #[test]
    fn r18_a_fact_lives_as_long_as_its_key() {
        let of = |left: i64| entry(Vec::new(), NOW, &fact_for(left)).map(|entry| entry.life);
        assert_eq!(of(35 * 86_400 * 1_000_000), Some(Duration::from_secs(35 * 86_400)));
        assert_eq!((of(0), of(-1), of(999)), (None, None, None), "a life of less than a millisecond is none");
    }
}
