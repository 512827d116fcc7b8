//! Keys that are known to be durable, shared by all nodes: facts of the journal in a store beside it.
//!
//! Promises: a hit is what a receipt of the present life of the journal has said, to this node or another one, and whose
//! time is not over. Only what is committed is written, and only afterwards. A slow or broken store costs a few milliseconds
//! once: then the breaker is open, nobody asks, and a probe in the background finds out when it is well again. What waits
//! to be written is bounded; what does not fit is dropped, because a missing fact is only a question to the journal.
//! Does not: know every durable key, or ever say that a key is new. A flushed, evicting, restarted or failed-over store
//! only forgets. It must not be writable for strangers: whoever forges a fact can make an event a duplicate.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use oncehook_verify::UnixMicros;
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};

use super::memory::Fact;
use crate::clock::Clock;
use crate::event::{EventId, NewEvent};
use crate::journal::{BoxFuture, Journal, JournalReader, RecentKey};

/// The longest that a request waits for the store.
const READ_WAIT: Duration = Duration::from_millis(3);

/// So many answers in a row that came too late open the breaker. An error opens it at once.
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

/// A place for facts that all nodes reach. Redis is one; the tests have another.
pub(super) trait Store: Send + Sync + 'static {
    /// Makes the store usable, connecting anew if needed, and shows that it answers.
    fn probe(&self) -> BoxFuture<'_, Result<(), StoreError>>;

    /// What stands under a key.
    fn get(&self, key: Vec<u8>) -> BoxFuture<'_, Result<Option<Vec<u8>>, StoreError>>;

    /// Writes what is not there yet, each for its own time.
    fn put(&self, entries: Vec<Entry>) -> BoxFuture<'_, Result<(), StoreError>>;

    /// Writes a mark; `false` if it was there already.
    fn mark(&self, key: Vec<u8>, life: Duration) -> BoxFuture<'_, Result<bool, StoreError>>;
}

/// A fact on its way to the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) key: Vec<u8>,
    pub(super) value: Vec<u8>,
    pub(super) life: Duration,
}

/// Under what a fact will be written down, made before the event is handed over.
#[derive(Debug, Clone)]
pub(super) struct Heading {
    key: Vec<u8>,
    received_at: UnixMicros,
}

impl Heading {
    pub(super) fn of(incarnation: &str, event: &NewEvent) -> Self {
        Self { key: key_of(incarnation, event), received_at: event.received_at }
    }
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

#[derive(Debug, Default)]
struct Counts {
    hits: AtomicU64,
    misses: AtomicU64,
    unanswered: AtomicU64,
    written: AtomicU64,
    dropped: AtomicU64,
}

/// See the module's text.
pub(super) struct SharedKeys {
    store: Box<dyn Store>,
    /// Nobody asks while it is set. It is, until the first probe.
    open: AtomicBool,
    /// Answers in a row that came too late.
    late: AtomicU32,
    tripped: Notify,
    problem: Mutex<Option<String>>,
    queue: mpsc::Sender<Entry>,
    /// Taken by the one who runs it.
    waiting: Mutex<Option<mpsc::Receiver<Entry>>>,
    counts: Counts,
}

impl SharedKeys {
    pub(super) fn new(store: Box<dyn Store>) -> Self {
        let (queue, waiting) = mpsc::channel(QUEUE);
        Self {
            store,
            open: AtomicBool::new(true),
            late: AtomicU32::new(0),
            tripped: Notify::new(),
            problem: Mutex::new(Some("not connected yet".to_owned())),
            queue,
            waiting: Mutex::new(Some(waiting)),
            counts: Counts::default(),
        }
    }

    /// What is known of an event's key in that life of the journal. `None`: ask the journal.
    pub(super) async fn find(&self, incarnation: &str, event: &NewEvent) -> Option<Fact> {
        if self.open.load(Ordering::Acquire) {
            return None;
        }
        match timeout(READ_WAIT, self.store.get(key_of(incarnation, event))).await {
            Ok(Ok(found)) => {
                self.late.store(0, Ordering::Relaxed);
                let fact = found.and_then(|value| decode(&value)).filter(|fact| event.received_at < fact.expires_at);
                let counter = if fact.is_some() { &self.counts.hits } else { &self.counts.misses };
                counter.fetch_add(1, Ordering::Relaxed);
                fact
            }
            Ok(Err(error)) => {
                self.counts.unanswered.fetch_add(1, Ordering::Relaxed);
                self.trip(error.to_string());
                None
            }
            Err(_) => {
                self.counts.unanswered.fetch_add(1, Ordering::Relaxed);
                if self.late.fetch_add(1, Ordering::Relaxed) + 1 >= LATE_LIMIT {
                    self.trip(format!("no answer within {} ms", READ_WAIT.as_millis()));
                }
                None
            }
        }
    }

    /// Writes a fact down for the other nodes, some time soon. The journal has said so.
    pub(super) fn offer(&self, heading: Heading, fact: &Fact) {
        let Some(entry) = entry(heading.key, heading.received_at, fact) else { return };
        if self.queue.try_send(entry).is_err() {
            self.counts.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Whether somebody looks after it.
    pub(super) fn is_running(&self) -> bool {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    pub(super) fn state(&self) -> SharedState {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        SharedState {
            problem: self.problem().clone(),
            hits: count(&self.counts.hits),
            misses: count(&self.counts.misses),
            unanswered: count(&self.counts.unanswered),
            written: count(&self.counts.written),
            dropped: count(&self.counts.dropped),
        }
    }

    /// Probes, writes and warms for as long as it is polled. All waiting is here; requests only ask and offer.
    pub(super) async fn run(&self, journal: &dyn Journal, reader: &dyn JournalReader, clock: &Clock) {
        let Some(mut waiting) = self.waiting.lock().unwrap_or_else(PoisonError::into_inner).take() else {
            return;
        };
        let mut rest = FIRST_REST;
        loop {
            match in_time(PROBE_WAIT, self.store.probe()).await {
                Ok(()) => {
                    let begun = Instant::now();
                    self.close();
                    self.serve(&mut waiting, journal, reader, clock).await;
                    rest = if begun.elapsed() >= STEADY { FIRST_REST } else { rest };
                }
                Err(error) => *self.problem() = Some(error.to_string()),
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
                // It may have been told before; the loop's condition decides.
                () = self.tripped.notified() => {}
                _ = waiting.recv_many(&mut batch, BATCH) => self.write(std::mem::take(&mut batch)).await,
                _ = look.tick() => self.warm(journal, reader, clock).await,
            }
        }
    }

    async fn write(&self, entries: Vec<Entry>) {
        let count = entries.len() as u64;
        match in_time(WRITE_WAIT, self.store.put(entries)).await {
            Ok(()) => {
                self.counts.written.fetch_add(count, Ordering::Relaxed);
                *self.problem() = None;
            }
            Err(error) => {
                self.counts.dropped.fetch_add(count, Ordering::Relaxed);
                match error {
                    StoreError::Away(reason) => self.trip(reason),
                    // What is there can still be read.
                    StoreError::Refused(reason) => *self.problem() = Some(reason),
                }
            }
        }
    }

    /// Fills an empty store with the keys that came last. Of several nodes that see it empty, one does.
    async fn warm(&self, journal: &dyn Journal, reader: &dyn JournalReader, clock: &Clock) {
        let Some((era, incarnation)) = journal.incarnation().name() else { return };
        let mark = format!("oncehook:{incarnation}").into_bytes();
        match in_time(WRITE_WAIT, self.store.mark(mark, WARM_LIFE)).await {
            Ok(false) => return *self.problem() = None,
            Ok(true) => {}
            Err(StoreError::Away(reason)) => return self.trip(reason),
            Err(StoreError::Refused(reason)) => return *self.problem() = Some(reason),
        }
        let Ok(Ok(recent)) = timeout(WARM_WAIT, reader.recent_keys(WARM_KEYS)).await else { return };
        // What was read is of the life in whose name it is written only if that has not ended meanwhile.
        if journal.incarnation().era() != Some(era) {
            return;
        }
        let now = clock.now();
        for keys in recent.chunks(BATCH) {
            let entries = keys.iter().filter_map(|recent| entry_of(&incarnation, recent, now)).collect();
            self.write(entries).await;
            if self.open.load(Ordering::Acquire) {
                return;
            }
        }
        tracing::info!(keys = recent.len(), "an empty Redis was warmed from the journal");
    }

    fn trip(&self, reason: String) {
        if !self.open.swap(true, Ordering::AcqRel) {
            tracing::warn!(%reason, "Redis is left alone for a while; the journal decides by itself");
            *self.problem() = Some(reason);
            self.tripped.notify_one();
        }
    }

    fn close(&self) {
        *self.problem() = None;
        self.late.store(0, Ordering::Relaxed);
        if self.open.swap(false, Ordering::AcqRel) {
            tracing::info!("Redis answers");
        }
    }

    fn problem(&self) -> MutexGuard<'_, Option<String>> {
        self.problem.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn in_time<T>(wait: Duration, answer: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
    match timeout(wait, answer).await {
        Ok(answer) => answer,
        Err(_) => Err(StoreError::Away(format!("no answer within {} ms", wait.as_millis()))),
    }
}

/// `oncehook:`, the journal's life, the source, the key. A source's name has no colon, so no two keys meet.
fn key_of(incarnation: &str, event: &NewEvent) -> Vec<u8> {
    joined(incarnation, event.source.as_str(), event.key.as_bytes())
}

fn joined(incarnation: &str, source: &str, key: &[u8]) -> Vec<u8> {
    let mut joined = Vec::with_capacity(11 + incarnation.len() + source.len() + key.len());
    for part in [b"oncehook".as_slice(), incarnation.as_bytes(), source.as_bytes()] {
        joined.extend_from_slice(part);
        joined.push(b':');
    }
    joined.extend_from_slice(key);
    joined
}

/// A fact with the time that is left of it; nothing if that is over.
fn entry(key: Vec<u8>, now: UnixMicros, fact: &Fact) -> Option<Entry> {
    let left = u64::try_from(fact.expires_at.0.saturating_sub(now.0)).ok().filter(|left| *left >= 1_000)?;
    Some(Entry { key, value: encode(fact), life: Duration::from_micros(left) })
}

/// The same for a key that was read from the journal.
fn entry_of(incarnation: &str, recent: &RecentKey, now: UnixMicros) -> Option<Entry> {
    let key = joined(incarnation, &recent.source, recent.key.as_bytes());
    let fact = Fact { event: recent.event, digest: recent.digest, expires_at: recent.expires_at };
    entry(key, now, &fact)
}

/// Tells this layout from any later one.
const LAYOUT: u8 = 1;

fn encode(fact: &Fact) -> Vec<u8> {
    let mut value = Vec::with_capacity(57);
    value.push(LAYOUT);
    value.extend_from_slice(fact.event.as_bytes());
    value.extend_from_slice(&fact.digest);
    value.extend_from_slice(&fact.expires_at.0.to_be_bytes());
    value
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
    use super::super::tests::{NOW, event};
    use super::*;
    use crate::event::{EventIds, SourceName};

    #[test]
    fn what_is_written_is_read_back_and_nothing_else_is() {
        let fact = Fact { event: EventIds::above(0, 7).next(NOW), digest: [9; 32], expires_at: UnixMicros(NOW.0 + 5) };
        let value = encode(&fact);
        assert_eq!(decode(&value), Some(fact));
        for length in 0..value.len() {
            assert_eq!(decode(&value[..length]), None);
        }
        let mut longer = value.clone();
        longer.push(0);
        assert_eq!(decode(&longer), None);
        let other_layout: Vec<u8> = std::iter::once(2).chain(value[1..].iter().copied()).collect();
        assert_eq!(decode(&other_layout), None);
    }

    /// A store that connects and then never answers.
    #[derive(Default)]
    struct Silent {
        asked: std::sync::Arc<AtomicU32>,
    }

    impl Store for Silent {
        fn probe(&self) -> BoxFuture<'_, Result<(), StoreError>> {
            Box::pin(async { Ok(()) })
        }
        fn get(&self, _: Vec<u8>) -> BoxFuture<'_, Result<Option<Vec<u8>>, StoreError>> {
            self.asked.fetch_add(1, Ordering::Relaxed);
            Box::pin(std::future::pending())
        }
        fn put(&self, _: Vec<Entry>) -> BoxFuture<'_, Result<(), StoreError>> {
            Box::pin(std::future::pending())
        }
        fn mark(&self, _: Vec<u8>, _: Duration) -> BoxFuture<'_, Result<bool, StoreError>> {
            Box::pin(async { Ok(false) })
        }
    }

    #[tokio::test(start_paused = true)]
    async fn r17_a_slow_store_is_asked_a_few_times_and_then_left_alone() {
        let store = Silent::default();
        let asked = std::sync::Arc::clone(&store.asked);
        let shared = std::sync::Arc::new(SharedKeys::new(Box::new(store)));
        let find = async || shared.find("life", &event("evt_1", 1)).await;
        assert_eq!(find().await, None);
        assert_eq!(asked.load(Ordering::Relaxed), 0, "nobody asks before it was probed");
        let running = std::sync::Arc::clone(&shared);
        let journal = crate::journal::memory::MemoryJournal::new();
        tokio::spawn(async move { running.run(&journal, &journal, &Clock::manual(NOW)).await });
        tokio::time::sleep(Duration::from_millis(1)).await;
        assert_eq!(shared.state().problem, None);

        let begun = Instant::now();
        for _ in 0..50 {
            assert_eq!(find().await, None);
        }
        assert_eq!(asked.load(Ordering::Relaxed), LATE_LIMIT, "then the breaker is open");
        assert!(begun.elapsed() <= 4 * READ_WAIT, "{:?}", begun.elapsed());
        assert!(shared.state().problem.is_some());
        // It is probed, asked again, and left alone for longer each time.
        for _ in 0..2_000 {
            tokio::time::sleep(Duration::from_millis(10)).await;
            assert_eq!(find().await, None);
        }
        let asked = asked.load(Ordering::Relaxed);
        assert!((LATE_LIMIT * 2..=LATE_LIMIT * 12).contains(&asked), "{asked} in 20 s");
        assert_eq!(shared.state().unanswered, u64::from(asked));
    }

    #[test]
    fn no_two_names_share_a_key() {
        let in_source = |source: &str, key: &str| {
            let event = NewEvent { source: SourceName::new(source).unwrap(), ..event(key, 1) };
            key_of("life", &event)
        };
        assert_ne!(in_source("a", "b:c"), in_source("b", "c"));
        assert_ne!(in_source("shop", "a"), in_source("shop", "A"));
        assert_ne!(key_of("one", &event("a", 1)), key_of("two", &event("a", 1)));
    }

    #[test]
    fn r18_a_fact_lives_as_long_as_its_key() {
        let of = |left: i64| {
            let fact =
                Fact { event: EventIds::above(0, 7).next(NOW), digest: [9; 32], expires_at: UnixMicros(NOW.0 + left) };
            entry(Vec::new(), NOW, &fact).map(|entry| entry.life)
        };
        assert_eq!(of(35 * 86_400 * 1_000_000), Some(Duration::from_secs(35 * 86_400)));
        assert_eq!((of(0), of(-1), of(999)), (None, None, None), "a life of less than a millisecond is none");
    }
}
