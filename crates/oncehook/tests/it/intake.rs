//! The intake in front of a journal that the test can take away: what is accepted is kept, in order, and applied once.

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncehook::event::{EventId, NewEvent, NewEvents};
use oncehook::fastpath::FastPath;
use oncehook::intake::{Intake, Refused, Spool, SpoolError, SpoolOptions, Taken};
use oncehook::journal::memory::MemoryJournal;
use oncehook::journal::sqlite::{OpenError, SqliteJournal, SqliteOptions};
use oncehook::journal::{
    Alias, AppendError, BoxFuture, EventQuery, Journal, JournalReader, JournalState, KnownCopy, Receipt, SelfTestError,
    Ticket, Verdict, WorkError,
};
use oncehook::observe::Metrics;
use oncehook_testkit::journal::event;
use oncehook_testkit::random::Random;
use tokio::sync::{oneshot, watch};

/// What the journal does with an append.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mood {
    Well,
    /// Refuses at once.
    Away,
    /// Stores, and loses its answer.
    Cut,
    /// Says nothing.
    Silent,
}

/// A journal whose mood the test decides, and which remembers in which order events came to it first.
struct Moody<J> {
    inner: J,
    mood: Mutex<Mood>,
    /// Refuses events with this key, whatever its mood.
    poison: Option<&'static str>,
    order: Mutex<Vec<String>>,
    /// Tickets of appends that will never be answered.
    unanswered: Mutex<Vec<oneshot::Sender<Result<Receipt, AppendError>>>>,
    appends: AtomicU64,
}

impl<J: Journal> Moody<J> {
    fn new(inner: J, mood: Mood) -> Arc<Self> {
        Arc::new(Self {
            inner,
            mood: Mutex::new(mood),
            poison: None,
            order: Mutex::default(),
            unanswered: Mutex::default(),
            appends: AtomicU64::new(0),
        })
    }

    fn set(&self, mood: Mood) {
        *self.mood.lock().unwrap() = mood;
    }

    fn is_well(&self) -> bool {
        *self.mood.lock().unwrap() == Mood::Well
    }
}

impl<J: Journal> Journal for Moody<J> {
    fn submit(&self, events: NewEvents) -> Result<Ticket, AppendError> {
        let mood = *self.mood.lock().unwrap();
        let refused = || AppendError::Unavailable("the test says so".to_owned());
        if mood == Mood::Away || events.iter().any(|event| self.poison == Some(&*event.key.display())) {
            return Err(refused());
        }
        let (answer, silence) = oneshot::channel();
        if mood == Mood::Silent {
            self.unanswered.lock().unwrap().push(answer);
            return Ok(silence);
        }
        self.appends.fetch_add(1, Ordering::Relaxed);
        let mut order = self.order.lock().unwrap();
        for event in &events {
            let key = event.key.display().into_owned();
            if !order.contains(&key) {
                order.push(key);
            }
        }
        let ticket = self.inner.submit(events)?;
        if mood == Mood::Cut {
            let _ = answer.send(Err(AppendError::Gone));
            return Ok(silence);
        }
        Ok(ticket)
    }

    fn note_duplicates(&self, copies: &[KnownCopy<'_>]) -> bool {
        self.inner.note_duplicates(copies)
    }

    fn keep_aliases(&self, aliases: Vec<Alias>) -> BoxFuture<'_, Result<(), WorkError>> {
        match self.is_well() {
            true => self.inner.keep_aliases(aliases),
            false => Box::pin(async { Err(WorkError::Unavailable("the test says so".to_owned())) }),
        }
    }

    fn state(&self) -> JournalState {
        self.inner.state()
    }

    fn self_test(&self) -> BoxFuture<'_, Result<(), SelfTestError>> {
        match self.is_well() {
            true => self.inner.self_test(),
            false => Box::pin(async { Err(SelfTestError("the test says so".to_owned())) }),
        }
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        self.inner.close()
    }
}

struct Rig<J> {
    intake: Arc<Intake>,
    journal: Arc<Moody<J>>,
    fast_path: FastPath,
    metrics: Arc<Metrics>,
    usable: AtomicBool,
    end: watch::Sender<bool>,
}

fn open(path: &Path) -> Spool {
    Spool::open(&SpoolOptions::new(path)).unwrap()
}

impl<J: Journal + JournalReader> Rig<J> {
    fn new(spool: Spool, journal: Arc<Moody<J>>) -> Arc<Self> {
        let metrics = Arc::new(Metrics::new());
        let intake = Intake::new(spool, Duration::from_millis(200), Arc::clone(&metrics));
        let (intake, end) = (Arc::new(intake), watch::Sender::new(false));
        Arc::new(Self { intake, journal, fast_path: FastPath::default(), metrics, usable: AtomicBool::new(true), end })
    }

    /// Begins to drain.
    fn drain(&self) -> tokio::task::JoinHandle<()> {
        let journal = Arc::clone(&self.journal);
        let watched = Arc::clone(&self.journal);
        let usable = move || watched.is_well();
        tokio::spawn(Arc::clone(&self.intake).drain(journal, usable, self.end.subscribe()))
    }

    async fn append(&self, event: NewEvent) -> Result<Taken, Refused> {
        self.append_all([event]).await
    }

    async fn append_all(&self, events: impl IntoIterator<Item = NewEvent>) -> Result<Taken, Refused> {
        let usable = self.usable.load(Ordering::Relaxed);
        self.intake.append(&self.fast_path, &*self.journal, events.into_iter().collect(), usable).await
    }

    async fn spooled(&self, event: NewEvent) -> (EventId, Verdict) {
        match self.append(event).await.unwrap() {
            Taken::Spool(receipt) => (receipt[0].id, receipt[0].verdict),
            Taken::Journal(settled) => panic!("the journal took it: {settled:?}"),
        }
    }

    async fn empty(&self) {
        let begun = std::time::Instant::now();
        while self.intake.spool().state().events > 0 {
            assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", self.intake.spool().state());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    async fn stored(&self) -> Vec<String> {
        let query = EventQuery { limit: 100_000, ..EventQuery::default() };
        let page = self.journal.inner.list(query).await.unwrap();
        page.events.iter().map(|event| event.key.display().into_owned()).collect()
    }
}

fn place() -> (tempfile::TempDir, std::path::PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("spool.db");
    (directory, path)
}

fn memory(mood: Mood) -> Arc<Moody<MemoryJournal>> {
    Moody::new(MemoryJournal::new(), mood)
}

/// Twelve senders, each with an entity of its own, send one event after the other, some of them twice; the journal changes its
/// mood all the time.
#[tokio::test(flavor = "multi_thread")]
async fn r4_whatever_the_journal_does_nothing_is_lost_or_doubled_and_entities_keep_their_order() {
    let mut random = Random::from_environment();
    let (_directory, path) = place();
    let rig = Rig::new(open(&path), memory(Mood::Well));
    let drain = rig.drain();
    let stop = Arc::new(AtomicBool::new(false));
    let senders: Vec<_> = (0..12)
        .map(|sender| {
            let (rig, stop, mut random) = (Arc::clone(&rig), Arc::clone(&stop), Random::new(random.next()));
            tokio::spawn(async move {
                let (mut accepted, mut spooled) = (Vec::new(), 0);
                for number in 0.. {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    let key = format!("evt_{sender}_{number}");
                    for _ in 0..=random.below(2) {
                        let taken = rig.append(event(&key, "{}")).await.unwrap();
                        spooled += usize::from(matches!(taken, Taken::Spool(_)));
                    }
                    accepted.push(key);
                }
                (accepted, spooled)
            })
        })
        .collect();
    for _ in 0..40 {
        let mood = *random.pick(&[Mood::Well, Mood::Away, Mood::Cut, Mood::Silent]);
        rig.journal.set(mood);
        // What the gate believes comes later than the truth.
        tokio::time::sleep(Duration::from_millis(random.below(30))).await;
        rig.usable.store(mood == Mood::Well, Ordering::Relaxed);
        tokio::time::sleep(Duration::from_millis(random.below(60))).await;
    }
    rig.journal.set(Mood::Well);
    rig.usable.store(true, Ordering::Relaxed);
    stop.store(true, Ordering::Relaxed);
    let (mut total, mut spooled) = (0, 0);
    let mut accepted = HashMap::new();
    for (sender, sending) in senders.into_iter().enumerate() {
        let (keys, through_spool) = sending.await.unwrap();
        total += keys.len();
        spooled += through_spool;
        accepted.insert(sender, keys);
    }
    rig.empty().await;
    let order = rig.journal.order.lock().unwrap().clone();
    for (sender, keys) in &accepted {
        let prefix = format!("evt_{sender}_");
        let came: Vec<&String> = order.iter().filter(|key| key.starts_with(&prefix)).collect();
        assert_eq!(came, keys.iter().collect::<Vec<_>>(), "sender {sender}");
    }
    assert_eq!(rig.stored().await.len(), total);
    assert!(total > 200 && spooled > 50, "{total} events, {spooled} of them through the spool");
    rig.end.send_replace(true);
    drain.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn r4_the_spool_empties_under_constant_load_and_the_way_to_the_journal_opens() {
    let (_directory, path) = place();
    let rig = Rig::new(open(&path), memory(Mood::Away));
    for number in 0..2_000 {
        rig.usable.store(false, Ordering::Relaxed);
        if number % 100 == 0 {
            let batch = (0..100).map(|part| event(&format!("first_{number}_{part}"), "{}"));
            assert!(matches!(rig.append_all(batch).await.unwrap(), Taken::Spool(_)));
        }
    }
    let stop = Arc::new(AtomicBool::new(false));
    let senders: Vec<_> = (0..8)
        .map(|sender| {
            let (rig, stop) = (Arc::clone(&rig), Arc::clone(&stop));
            tokio::spawn(async move {
                let mut last = None;
                for number in 0.. {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    last = Some(rig.append(event(&format!("evt_{sender}_{number}"), "{}")).await.unwrap());
                }
                last.unwrap()
            })
        })
        .collect();
    rig.journal.set(Mood::Well);
    rig.usable.store(true, Ordering::Relaxed);
    let drain = rig.drain();
    rig.empty().await;
    // They go on, and nothing goes into the spool any more.
    tokio::time::sleep(Duration::from_millis(300)).await;
    stop.store(true, Ordering::Relaxed);
    for sender in senders {
        let last = sender.await.unwrap();
        assert!(matches!(last, Taken::Journal(_)), "{last:?}");
    }
    assert_eq!(rig.intake.spool().state().events, 0);
    rig.end.send_replace(true);
    drain.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn r4_copies_and_other_bodies_in_the_spool_end_as_they_would_have_in_the_journal() {
    let (_directory, path) = place();
    let rig = Rig::new(open(&path), memory(Mood::Away));
    let (first, verdict) = rig.spooled(event("evt_1", "{}")).await;
    assert_eq!(verdict, Verdict::New);
    for _ in 0..3 {
        assert_eq!(rig.spooled(event("evt_1", "{}")).await, (first, Verdict::Duplicate));
    }
    for _ in 0..2 {
        assert_eq!(rig.spooled(event("evt_1", "other")).await, (first, Verdict::Conflict));
    }
    let shown = rig.intake.spool().find(first).await.unwrap().unwrap();
    assert_eq!((shown.copies, &shown.event.body[..]), (3, &b"{}"[..]));
    assert_eq!(rig.intake.spool().state().events, 2);

    rig.journal.set(Mood::Well);
    let drain = rig.drain();
    rig.empty().await;
    let story = rig.journal.inner.show(first).await.unwrap().unwrap();
    assert_eq!((story.event.duplicates, story.conflicts.len()), (3, 1), "{story:?}");
    assert!(rig.intake.spool().find(first).await.unwrap().is_none());
    let text = rig.metrics.render(&rig.journal.state(), true);
    for line in [r#"drained_total{outcome="new"} 1"#, r#"drained_total{outcome="conflict"} 1"#] {
        assert!(text.contains(line), "{text}");
    }
    rig.end.send_replace(true);
    drain.await.unwrap();
}

/// The journal stored the event, its answer was cut, and the spool took it too; or another node was first.
#[tokio::test(flavor = "multi_thread")]
async fn r4_a_key_that_the_journal_holds_drains_to_a_duplicate_and_both_ids_lead_to_the_event() {
    let (directory, path) = place();
    let journal = SqliteJournal::open(&SqliteOptions::new(directory.path().join("journal.db"))).unwrap();
    let rig = Rig::new(open(&path), Moody::new(journal, Mood::Cut));
    let (told, verdict) = rig.spooled(event("evt_1", "{}")).await;
    assert_eq!(verdict, Verdict::New);
    rig.journal.set(Mood::Away);
    let (other, _) = rig.spooled(event("evt_2", "{}")).await;
    rig.journal.set(Mood::Well);
    let drain = rig.drain();
    rig.empty().await;
    let reader = &rig.journal.inner;
    for (told, key) in [(told, "evt_1"), (other, "evt_2")] {
        let id = reader.resolve(told).await.unwrap().unwrap();
        assert_eq!(reader.show(id).await.unwrap().unwrap().event.key.display(), key);
    }
    assert_eq!(rig.stored().await, ["evt_2", "evt_1"]);
    rig.end.send_replace(true);
    drain.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn r4_an_event_that_a_well_journal_refuses_is_set_aside_and_holds_up_nobody() {
    let (_directory, path) = place();
    let mut journal = Arc::into_inner(memory(Mood::Away)).unwrap();
    journal.poison = Some("poison");
    let rig = Rig::new(open(&path), Arc::new(journal));
    for key in ["evt_1", "poison", "evt_2"] {
        rig.spooled(event(key, "{}")).await;
    }
    rig.journal.set(Mood::Well);
    let drain = rig.drain();
    rig.empty().await;
    assert_eq!(rig.stored().await.len(), 2);
    assert_eq!(rig.intake.spool().state().set_aside, 1);
    assert!(matches!(rig.append(event("evt_3", "{}")).await.unwrap(), Taken::Journal(_)));
    rig.end.send_replace(true);
    drain.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn r4_r5_a_full_spool_refuses_and_takes_again_when_there_is_room() {
    let (_directory, path) = place();
    let spool = Spool::open(&SpoolOptions { max_events: 3, ..SpoolOptions::new(&path) }).unwrap();
    let rig = Rig::new(spool, memory(Mood::Away));
    rig.usable.store(false, Ordering::Relaxed);
    rig.spooled(event("evt_1", "{}")).await;
    let pair = || [event("evt_2", "{}"), event("evt_3", "{}")];
    assert!(matches!(rig.append_all(pair()).await.unwrap(), Taken::Spool(_)));
    // All of a request or nothing; copies need no room.
    let refused = rig.append_all([event("evt_3", "{}"), event("evt_4", "{}")]).await;
    assert_eq!(refused, Err(Refused::Spool(SpoolError::Full)));
    assert_eq!(rig.spooled(event("evt_2", "{}")).await.1, Verdict::Duplicate);
    assert_eq!(rig.intake.spool().state().events, 3);

    rig.journal.set(Mood::Well);
    let drain = rig.drain();
    rig.empty().await;
    rig.spooled(event("evt_4", "{}")).await;
    rig.empty().await;
    assert_eq!(rig.stored().await.len(), 4);
    rig.end.send_replace(true);
    drain.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn r4_what_an_earlier_process_left_in_the_spool_comes_first() {
    let (_directory, path) = place();
    let rig = Rig::new(open(&path), memory(Mood::Away));
    let mut told = Vec::new();
    for number in 0..5 {
        told.push(rig.spooled(event(&format!("evt_{number}"), "{}")).await.0);
    }
    assert!(told.is_sorted());
    let in_use = Spool::open(&SpoolOptions::new(&path)).err();
    assert!(matches!(in_use, Some(OpenError::InUse { .. })), "{in_use:?}");
    assert!(rig.intake.spool().close(Duration::from_secs(60)).await);
    assert_eq!(
        rig.append(event("late", "{}")).await,
        Err(Refused::Journal(AppendError::Unavailable("the test says so".to_owned()).into()))
    );

    let rig = Rig::new(open(&path), memory(Mood::Well));
    assert_eq!(rig.intake.spool().state().events, 5);
    // Well or not, it waits behind the others.
    let (last, _) = rig.spooled(event("evt_5", "{}")).await;
    assert!(told.iter().all(|id| *id < last));
    let drain = rig.drain();
    rig.empty().await;
    let order = rig.journal.order.lock().unwrap().clone();
    assert_eq!(order, ["evt_0", "evt_1", "evt_2", "evt_3", "evt_4", "evt_5"]);
    assert!(rig.journal.inner.show(told[0]).await.unwrap().is_some(), "the id is kept where it can be");
    rig.end.send_replace(true);
    drain.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_11_a_damaged_event_in_the_spool_is_set_aside_and_a_copy_takes_its_place() {
    let (_directory, path) = place();
    let rig = Rig::new(open(&path), memory(Mood::Away));
    let (body, mut told) = (r#"{"amount":100}"#, Vec::new());
    for number in 0..4 {
        told.push(rig.spooled(event(&format!("evt_{number}"), body)).await.0);
    }
    assert!(rig.intake.spool().close(Duration::from_secs(60)).await);
    let file = rusqlite::Connection::open(&path).unwrap();
    for change in [
        r#"body = CAST('{"amount":900}' AS BLOB) WHERE seq = 2"#,
        // Not even a text any more: the row alone is at fault, not the file.
        "routes = CAST(x'ff' AS TEXT) WHERE seq = 3",
    ] {
        assert_eq!(file.execute(&format!("UPDATE oncehook_spool SET {change}"), []).unwrap(), 1);
    }
    drop(file);

    let rig = Rig::new(open(&path), memory(Mood::Well));
    let drain = rig.drain();
    rig.empty().await;
    let mut stored = rig.stored().await;
    stored.sort();
    assert_eq!(stored, ["evt_0", "evt_3"]);
    assert_eq!(rig.intake.spool().state().set_aside, 2);

    // Delivered again, the event is whole again, under the id that was answered.
    rig.journal.set(Mood::Away);
    for number in [1, 2] {
        let again = rig.spooled(event(&format!("evt_{number}"), body)).await;
        assert_eq!(again, (told[number], Verdict::New));
        let copy = rig.spooled(event(&format!("evt_{number}"), body)).await;
        assert_eq!(copy, (told[number], Verdict::Duplicate));
    }
    let state = rig.intake.spool().state();
    assert_eq!((state.events, state.set_aside), (2, 0));
    rig.journal.set(Mood::Well);
    rig.empty().await;
    assert_eq!((rig.stored().await.len(), rig.intake.spool().state().bytes), (4, 0));
    rig.end.send_replace(true);
    drain.await.unwrap();
}

#[test]
fn fault_11_a_file_that_is_no_spool_or_damaged_is_refused() {
    let (directory, path) = place();
    std::fs::write(&path, b"this is not a database, whatever its name says. ".repeat(100)).unwrap();
    let refused = Spool::open(&SpoolOptions::new(&path)).err().unwrap().to_string();
    assert!(refused.contains("not a database"), "{refused}");

    let other = directory.path().join("shop.db");
    rusqlite::Connection::open(&other).unwrap().execute_batch("CREATE TABLE orders (id INTEGER)").unwrap();
    let refused = Spool::open(&SpoolOptions::new(&other)).err().unwrap().to_string();
    assert!(refused.contains("not a spool"), "{refused}");

    let nowhere = directory.path().join("missing/spool.db");
    let refused = Spool::open(&SpoolOptions::new(nowhere)).err().unwrap().to_string();
    assert!(refused.contains("does not exist"), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn r4_a_spool_whose_file_is_gone_takes_nothing_and_what_it_held_is_drained() {
    let (_directory, path) = place();
    let rig = Rig::new(open(&path), memory(Mood::Away));
    rig.usable.store(false, Ordering::Relaxed);
    rig.spooled(event("evt_1", "{}")).await;
    std::fs::remove_file(&path).unwrap();
    let refused = rig.append(event("evt_2", "{}")).await;
    assert!(matches!(refused, Err(Refused::Spool(SpoolError::Unavailable(_)))), "{refused:?}");
    assert!(rig.intake.spool().state().failing.unwrap().contains("was removed or replaced"));
    // A journal that is well takes it straight: durable is worth more than in order.
    rig.journal.set(Mood::Well);
    rig.usable.store(true, Ordering::Relaxed);
    assert!(matches!(rig.append(event("evt_3", "{}")).await.unwrap(), Taken::Journal(_)));
    let drain = rig.drain();
    rig.empty().await;
    let mut stored = rig.stored().await;
    stored.sort();
    assert_eq!(stored, ["evt_1", "evt_3"]);
    // Empty, it makes a new file and takes events again.
    let begun = std::time::Instant::now();
    while rig.intake.spool().state().failing.is_some() {
        assert!(begun.elapsed() < Duration::from_secs(20));
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    rig.journal.set(Mood::Away);
    rig.spooled(event("evt_2", "{}")).await;
    assert!(path.exists());
    rig.end.send_replace(true);
    drain.await.unwrap();
}
