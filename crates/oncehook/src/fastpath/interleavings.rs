//! Two nodes, one journal, one Redis, and whatever can happen between them: in every order that chance comes up with, and in
//! every order there is for a short story (`exhaustive`).
//!
//! The fast path is the real one; journal and store are models whose every step waits until the schedule lets it happen:
//! an append is handed over, then commits, then is answered, and a crash, a flush, a failover to a stale replica, a restore of
//! the database from an earlier time, or mere time may come between any two. After each step, every answer that was given
//! must name an event that is in the journal at that moment.
//!
//! A schedule is made of a seed; a failure names it.

mod exhaustive;

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use oncehook_verify::{EventKey, UnixMicros};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::shared::{Entry, Store, StoreError};
use super::tests::{NOW, event, settle};
use super::*;
use crate::event::{EventId, EventIds};
use crate::journal::{
    BoxFuture, Durability, EventDetail, EventPage, EventQuery, Incarnation, JournalState, ReadError, RecentKey,
    SelfTestError, Stats, StoredBody, Ticket,
};

const NODES: usize = 2;
const STEPS: usize = 120;

/// A committed event: its id and its digest.
type Committed = HashMap<EventKey, (EventId, [u8; 32])>;

/// What a step does to the world, and the answer that it then has.
type Deed = Box<dyn FnOnce(&mut World) -> Box<dyn FnOnce() + Send> + Send>;

/// A step that somebody waits for.
struct Step {
    node: usize,
    /// To the journal; otherwise to the store.
    to_journal: bool,
    stage: Stage,
}

enum Stage {
    /// On its way there.
    Going(Deed),
    /// Done, and the answer is on its way back.
    Coming(Box<dyn FnOnce() + Send>),
}

struct World {
    committed: Committed,
    ids: EventIds,
    /// Which life the database is in.
    life: u32,
    store: HashMap<Vec<u8>, Vec<u8>>,
    /// As they were at some time before.
    old_committed: Committed,
    old_store: HashMap<Vec<u8>, Vec<u8>>,
    steps: Vec<Step>,
}

impl World {
    fn new() -> Shared {
        Arc::new(Mutex::new(Self {
            committed: HashMap::new(),
            ids: EventIds::above(0, 1),
            life: 0,
            store: HashMap::new(),
            old_committed: HashMap::new(),
            old_store: HashMap::new(),
            steps: Vec::new(),
        }))
    }
}

type Shared = Arc<Mutex<World>>;

fn lock(world: &Shared) -> MutexGuard<'_, World> {
    world.lock().unwrap()
}

/// Does a deed later, when the schedule says so.
fn later<T: Send + 'static>(
    world: &Shared,
    node: usize,
    to_journal: bool,
    deed: impl FnOnce(&mut World) -> T + Send + 'static,
) -> oneshot::Receiver<T> {
    let (answer, heard) = oneshot::channel();
    let deed: Deed = Box::new(move |world| {
        let outcome = deed(world);
        Box::new(move || drop(answer.send(outcome)))
    });
    lock(world).steps.push(Step { node, to_journal, stage: Stage::Going(deed) });
    heard
}

/// The journal as one node reaches it.
struct NodeJournal {
    node: usize,
    world: Shared,
    incarnation: Incarnation,
    /// Whether its connection stands.
    connected: Mutex<bool>,
}

impl Journal for NodeJournal {
    fn submit(&self, events: NewEvents) -> Result<Ticket, AppendError> {
        if !*self.connected.lock().unwrap() {
            return Err(AppendError::Unavailable("not connected".to_owned()));
        }
        Ok(later(&self.world, self.node, true, move |world| {
            let append = |event: &NewEvent| {
                let known = world.committed.get(&event.key).copied();
                let (id, verdict) = match known {
                    None => {
                        let id = world.ids.next(NOW);
                        world.committed.insert(event.key.clone(), (id, event.digest));
                        (id, Verdict::New)
                    }
                    Some((id, digest)) if digest == event.digest => (id, Verdict::Duplicate),
                    Some((id, _)) => (id, Verdict::Conflict),
                };
                Appended { id, verdict, expires_at: event.expires_at }
            };
            Ok(events.iter().map(append).collect())
        }))
    }

    fn note_duplicate(&self, _: EventId, _: &SourceName, _: UnixMicros, _: IpAddr, _: Layer) -> bool {
        true
    }

    fn state(&self) -> JournalState {
        JournalState {
            kind: "model",
            durability: Durability::None,
            failing: None,
            queued: 0,
            queue_limit: 0,
            index_lag: 0,
            wal_pages: 0,
        }
    }

    fn incarnation(&self) -> &Incarnation {
        &self.incarnation
    }

    fn self_test(&self) -> BoxFuture<'_, Result<(), SelfTestError>> {
        Box::pin(async { Ok(()) })
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {})
    }
}

fn nobody_asks<T>() -> BoxFuture<'static, Result<T, ReadError>>
where
    T: Send + 'static,
{
    Box::pin(async { panic!("nobody asks for this here") })
}

impl JournalReader for NodeJournal {
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
    fn recent_keys(&self, limit: usize) -> BoxFuture<'_, Result<Vec<RecentKey>, ReadError>> {
        let heard = later(&self.world, self.node, true, move |world| {
            let keys = world.committed.iter().take(limit).map(|(key, (id, digest))| RecentKey {
                source: "shop".to_owned(),
                key: key.clone(),
                event: *id,
                digest: *digest,
                expires_at: event("any", 1).expires_at,
            });
            keys.collect()
        });
        Box::pin(async { heard.await.map_err(|_| ReadError::Engine("cut off".to_owned())) })
    }
}

/// The store as one node reaches it.
struct NodeStore {
    node: usize,
    world: Shared,
}

impl NodeStore {
    fn later<T: Send + 'static>(
        &self,
        deed: impl FnOnce(&mut World) -> T + Send + 'static,
    ) -> BoxFuture<'_, Result<T, StoreError>> {
        let heard = later(&self.world, self.node, false, deed);
        Box::pin(async { heard.await.map_err(|_| StoreError::Away("cut off".to_owned())) })
    }
}

impl Store for NodeStore {
    fn probe(&self) -> BoxFuture<'_, Result<(), StoreError>> {
        self.later(|_| ())
    }

    fn get(&self, key: Vec<u8>) -> BoxFuture<'_, Result<Option<Vec<u8>>, StoreError>> {
        self.later(move |world| world.store.get(&key).cloned())
    }

    fn put(&self, entries: Vec<Entry>) -> BoxFuture<'_, Result<(), StoreError>> {
        self.later(move |world| {
            for entry in entries {
                world.store.entry(entry.key).or_insert(entry.value);
            }
        })
    }

    fn mark(&self, key: Vec<u8>, _: Duration) -> BoxFuture<'_, Result<bool, StoreError>> {
        self.later(move |world| world.store.insert(key, b"warm".to_vec()).is_none())
    }
}

/// A process.
struct Node {
    path: Arc<FastPath>,
    journal: Arc<NodeJournal>,
    running: JoinHandle<()>,
    requests: Vec<(NewEvent, JoinHandle<Result<Settled, AppendError>>)>,
}

impl Node {
    fn start(number: usize, world: &Shared, planted: bool) -> Self {
        let store = NodeStore { node: number, world: Arc::clone(world) };
        let mut path = FastPath::with_store(Box::new(store));
        path.written_too_early = planted;
        let incarnation = Incarnation::named(&life_name(lock(world).life));
        let journal =
            Arc::new(NodeJournal { node: number, world: Arc::clone(world), incarnation, connected: Mutex::new(true) });
        let path = Arc::new(path);
        let (run, home) = (Arc::clone(&path), Arc::clone(&journal));
        let running = tokio::spawn(async move { run.run(&*home, &*home, &Clock::manual(NOW)).await });
        Self { path, journal, running, requests: Vec::new() }
    }

    fn send(&mut self, event: NewEvent) {
        let (path, journal) = (Arc::clone(&self.path), Arc::clone(&self.journal));
        let events = std::iter::once(event.clone()).collect();
        let answer = tokio::spawn(async move { path.append(&*journal, events).await });
        self.requests.push((event, answer));
    }

    fn is_connected(&self) -> bool {
        *self.journal.connected.lock().unwrap()
    }

    /// Finds the database again, in whatever life it is.
    fn connect(&self, world: &Shared) {
        self.journal.incarnation.confirm(&life_name(lock(world).life));
        *self.journal.connected.lock().unwrap() = true;
    }

    fn crash(&mut self) {
        self.running.abort();
        self.requests.drain(..).for_each(|(_, answer)| answer.abort());
    }
}

fn life_name(life: u32) -> String {
    format!("life-{life}")
}

/// Numbers that look like chance and are the same for the same seed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((z ^ (z >> 31)) % limit as u64).unwrap()
    }
}

/// What a schedule came to, so that the test can see that it was about something.
#[derive(Debug, Default)]
struct Seen {
    journal: usize,
    memory: usize,
    redis: usize,
    conflicts: usize,
    errors: usize,
    restores: usize,
    crashes: usize,
}

/// Plays one schedule. The error is an answer that was not true.
async fn play(seed: u64, planted: bool, seen: &mut Seen) -> Result<(), String> {
    let mut dice = Dice(seed);
    let world = World::new();
    let mut nodes: Vec<Node> = (0..NODES).map(|number| Node::start(number, &world, planted)).collect();
    let mut said = Vec::new();
    connect(&world).await;
    for _ in 0..STEPS {
        let what = dice.below(100);
        let number = dice.below(NODES);
        let node = &mut nodes[number];
        match what {
            0..=24 => {
                let key = ["evt_1", "evt_2", "evt_3", "evt_4"][dice.below(4)];
                let digest = if dice.below(8) == 0 { 2 } else { 1 };
                said.push(format!("node {number} is sent {key} ({digest})"));
                node.send(event(key, digest));
            }
            25..=84 => {
                let waiting = lock(&world).steps.len();
                if waiting > 0 {
                    // Half of the time the one that waits longest, or hardly anything would ever be finished.
                    let at = if dice.below(2) == 0 { 0 } else { dice.below(waiting) };
                    said.push(format!("step {at} of {waiting} goes on"));
                    go_on(&world, at);
                }
            }
            85..=87 => {
                said.push("Redis is flushed".to_owned());
                lock(&world).store.clear();
            }
            88..=89 => {
                said.push("Redis fails over to a stale replica".to_owned());
                let mut world = lock(&world);
                world.store = world.old_store.clone();
            }
            90..=91 => {
                said.push("backups are made".to_owned());
                let mut world = lock(&world);
                (world.old_committed, world.old_store) = (world.committed.clone(), world.store.clone());
            }
            92..=93 => {
                said.push(format!("node {number} crashes"));
                seen.crashes += 1;
                node.crash();
                cut(&world, |step| step.node == number, dice.below(2) == 0);
                *node = Node::start(number, &world, planted);
                connect(&world).await;
            }
            94..=95 => {
                said.push("the database is restored".to_owned());
                seen.restores += 1;
                restore(&world, &nodes);
            }
            96..=97 => {
                said.push(format!("node {number} is cut off from Redis"));
                cut(&world, |step| step.node == number && !step.to_journal, dice.below(2) == 0);
            }
            _ => {
                said.push("time passes".to_owned());
                tokio::time::advance(Duration::from_millis([2, 4, 150, 2_500][dice.below(4)])).await;
            }
        }
        // A node that lost the database finds it again at some time.
        let node = &nodes[number];
        if !node.is_connected() && dice.below(3) == 0 {
            said.push(format!("node {number} connects again"));
            node.connect(&world);
        }
        settle().await;
        if let Err(fault) = hear(&world, &mut nodes, seen).await {
            return Err(format!("seed {seed}: {fault}, after\n{}", said.join("\n")));
        }
    }
    nodes.iter_mut().for_each(Node::crash);
    settle().await;
    Ok(())
}

/// Hears the answers that have come, and judges them. A false one ends both nodes.
async fn hear(world: &Shared, nodes: &mut [Node], seen: &mut Seen) -> Result<(), String> {
    let mut verdict = Ok(());
    for node in nodes.iter_mut() {
        for (event, answer) in std::mem::take(&mut node.requests) {
            if answer.is_finished() {
                let answer = answer.await.unwrap();
                verdict = verdict.and(judge(&lock(world).committed, &event, answer, seen));
            } else {
                node.requests.push((event, answer));
            }
        }
    }
    if verdict.is_err() {
        nodes.iter_mut().for_each(Node::crash);
    }
    verdict
}

/// The database goes back to its backup: another life. Everybody loses the connection.
fn restore(world: &Shared, nodes: &[Node]) {
    {
        let mut world = lock(world);
        world.committed = world.old_committed.clone();
        world.life += 1;
    }
    for node in nodes {
        *node.journal.connected.lock().unwrap() = false;
        node.journal.incarnation.doubt();
    }
    cut(world, |step| step.to_journal, false);
}

/// Lets processes that have just started find Redis, as they nearly always do.
async fn connect(world: &Shared) {
    for _ in 0..8 {
        settle().await;
        let first = lock(world).steps.iter().position(|step| !step.to_journal);
        if let Some(at) = first {
            go_on(world, at);
        }
    }
}

/// One step goes one stage further.
fn go_on(world: &Shared, at: usize) {
    let mut guard = lock(world);
    let Step { node, to_journal, stage } = guard.steps.remove(at);
    match stage {
        Stage::Going(deed) => {
            let stage = Stage::Coming(deed(&mut guard));
            guard.steps.push(Step { node, to_journal, stage });
        }
        Stage::Coming(answer) => {
            drop(guard);
            answer();
        }
    }
}

/// Nobody hears of these steps any more. Those on their way there may still arrive, now.
fn cut(world: &Shared, which: impl Fn(&Step) -> bool, arrive: bool) {
    let mut guard = lock(world);
    let (lost, kept) = std::mem::take(&mut guard.steps).into_iter().partition(which);
    guard.steps = kept;
    let lost: Vec<Step> = lost;
    for step in lost {
        if let Stage::Going(deed) = step.stage
            && arrive
        {
            drop(deed(&mut guard));
        }
    }
}

/// An answer must be true at the moment it is given.
fn judge(
    committed: &Committed,
    event: &NewEvent,
    answer: Result<Settled, AppendError>,
    seen: &mut Seen,
) -> Result<(), String> {
    let Ok(settled) = answer else {
        seen.errors += 1;
        return Ok(());
    };
    match settled.layer {
        Layer::Journal => seen.journal += 1,
        Layer::Memory => seen.memory += 1,
        Layer::Redis => seen.redis += 1,
    }
    let appended = settled.receipt[0];
    let key = event.key.display();
    let Some((id, digest)) = committed.get(&event.key) else {
        return Err(format!("{key} was answered from {:?} and is not in the journal", settled.layer));
    };
    if *id != appended.id {
        return Err(format!("{key} was answered from {:?} with another event", settled.layer));
    }
    let same = *digest == event.digest;
    seen.conflicts += usize::from(!same);
    match appended.verdict {
        Verdict::Conflict if !same => Ok(()),
        Verdict::New | Verdict::Duplicate if same => Ok(()),
        verdict => Err(format!("{key} was answered {verdict:?} from {:?}", settled.layer)),
    }
}

fn schedules() -> u64 {
    #[expect(clippy::disallowed_methods, reason = "how long a test looks is for whoever runs it to say")]
    let scale = std::env::var("ONCEHOOK_TEST_SCALE").ok().and_then(|scale| scale.parse().ok());
    1_000 * scale.unwrap_or(1)
}

#[tokio::test(start_paused = true)]
async fn r17_no_schedule_answers_for_an_event_that_is_not_durable() {
    let mut seen = Seen::default();
    for seed in 0..schedules() {
        if let Err(fault) = play(seed, false, &mut seen).await {
            panic!("{fault}");
        }
    }
    let Seen { journal, memory, redis, conflicts, errors, restores, crashes } = seen;
    println!("{} schedules: {seen:?}", schedules());
    // All of it was met, and often.
    for met in [journal, memory, redis, conflicts, errors, restores, crashes] {
        assert!(met > 40, "{seen:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn r17_facts_that_are_written_before_the_commit_are_found_out() {
    let mut seen = Seen::default();
    for seed in 0..schedules() {
        if let Err(fault) = play(seed, true, &mut seen).await {
            assert!(fault.contains("from Redis"), "{fault}");
            return;
        }
    }
    panic!("the planted mistake was not found: {seen:?}");
}
