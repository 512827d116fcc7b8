//! A journal, a store and processes for the tests of the fast path. The fast path is the real one; every step of
//! journal and store waits until the test lets it happen: it goes there and is done (an append commits), then its
//! answer comes back.
//!
//! Does not: check what a journal or Redis does. It only says the truth about what is committed.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use oncehook_verify::EventKey;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::shared::{Answer, Entry, Store, StoreError};
use super::tests::{NOW, event};
use super::*;
use crate::event::EventId;
use crate::journal::memory::MemoryJournal;
use crate::journal::{
    BoxFuture, EventDetail, EventPage, EventQuery, Incarnation, JournalState, ReadError, RecentKey, SelfTestError,
    Stats, StoredBody, Ticket,
};

type Committed = HashMap<EventKey, (EventId, [u8; 32])>;
type Stored = HashMap<Vec<u8>, Vec<u8>>;

#[derive(Default)]
pub(super) struct World {
    /// The first event of each key, and its digest.
    pub(super) committed: Committed,
    pub(super) store: Stored,
    /// The two as they were at some time before.
    old: (Committed, Stored),
    ids: u128,
    /// Which life the database is in.
    life: u32,
    pub(super) steps: Vec<Step>,
    /// What the journal has counted, by [`Verdict`].
    pub(super) counts: [usize; 4],
    /// How many duplicates can be counted before the journal, if that is bounded.
    pub(super) room: Option<usize>,
    /// The next append fails with this.
    pub(super) refuses: Option<AppendError>,
}

/// A step that a node waits for.
pub(super) struct Step {
    pub(super) node: usize,
    /// To the journal; otherwise to the store.
    pub(super) to_journal: bool,
    stage: Stage,
}

enum Stage {
    /// On its way there.
    Going(Box<dyn FnOnce(&mut World) -> Coming + Send>),
    Coming(Coming),
}

/// Done, and the answer is on its way back. Returns whether it is still waited for.
type Coming = Box<dyn FnOnce() -> bool + Send>;

impl World {
    fn append(&mut self, event: &NewEvent) -> Appended {
        self.ids += 1;
        let new = (EventId::from_bytes(self.ids.to_be_bytes()), event.digest);
        let (id, digest) = *self.committed.entry(event.key.clone()).or_insert(new);
        let verdict = match digest == event.digest {
            true if id == new.0 => Verdict::New,
            true => Verdict::Duplicate,
            false => Verdict::Conflict,
        };
        self.counts[verdict as usize] += 1;
        Appended { id, verdict, expires_at: event.expires_at }
    }

    pub(super) fn back_up(&mut self) {
        self.old = (self.committed.clone(), self.store.clone());
    }

    /// The database goes back to its backup: another life.
    pub(super) fn restore(&mut self) {
        self.committed = self.old.0.clone();
        self.life += 1;
    }

    /// Redis goes back to a replica that was behind.
    pub(super) fn fail_over(&mut self) {
        self.store = self.old.1.clone();
    }
}

#[derive(Clone, Default)]
pub(super) struct Scene(Arc<Mutex<World>>);

impl Scene {
    pub(super) fn lock(&self) -> MutexGuard<'_, World> {
        self.0.lock().unwrap()
    }

    /// Does a deed later, when the test says so.
    fn later<T: Send + 'static>(
        &self,
        node: usize,
        to_journal: bool,
        deed: impl FnOnce(&mut World) -> T + Send + 'static,
    ) -> oneshot::Receiver<T> {
        let (answer, heard) = oneshot::channel();
        let stage = Stage::Going(Box::new(move |world| {
            let outcome = deed(world);
            Box::new(move || answer.send(outcome).is_ok())
        }));
        self.lock().steps.push(Step { node, to_journal, stage });
        heard
    }

    /// One step goes one stage further. Returns whether it is still waited for.
    pub(super) fn go_on(&self, at: usize) -> bool {
        let mut world = self.lock();
        let step = world.steps.remove(at);
        match step.stage {
            Stage::Going(deed) => {
                let stage = Stage::Coming(deed(&mut world));
                world.steps.push(Step { stage, ..step });
                true
            }
            Stage::Coming(answer) => answer(),
        }
    }

    /// These steps are not answered any more. Those on their way there may still arrive, now.
    pub(super) fn cut(&self, which: impl FnMut(&mut Step) -> bool, arrive: bool) {
        let mut world = self.lock();
        let lost: Vec<Step> = world.steps.extract_if(.., which).collect();
        for step in lost.into_iter().filter(|_| arrive) {
            if let Stage::Going(deed) = step.stage {
                drop(deed(&mut world));
            }
        }
    }
}

/// Journal and store as one node reaches them.
struct Reach {
    node: usize,
    scene: Scene,
    /// In doubt while the connection to the journal is lost.
    incarnation: Incarnation,
}

impl Journal for Reach {
    fn submit(&self, events: NewEvents) -> Result<Ticket, AppendError> {
        if self.incarnation.era().is_none() {
            return Err(AppendError::Unavailable("not connected".to_owned()));
        }
        Ok(self.scene.later(self.node, true, move |world| match world.refuses.take() {
            None => Ok(events.iter().map(|event| world.append(event)).collect()),
            Some(error) => Err(error),
        }))
    }

    fn note_duplicates(&self, copies: &[KnownCopy<'_>]) -> bool {
        let mut world = self.scene.lock();
        let enough = world.room.is_none_or(|room| room >= copies.len());
        world.counts[Verdict::Duplicate as usize] += if enough { copies.len() } else { 0 };
        enough
    }

    fn state(&self) -> JournalState {
        MemoryJournal::new().state()
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

impl JournalReader for Reach {
    fn list(&self, _: EventQuery) -> BoxFuture<'_, Result<EventPage, ReadError>> {
        unreachable!()
    }
    fn show(&self, _: EventId) -> BoxFuture<'_, Result<Option<EventDetail>, ReadError>> {
        unreachable!()
    }
    fn body(&self, _: EventId) -> BoxFuture<'_, Result<Option<StoredBody>, ReadError>> {
        unreachable!()
    }
    fn stats(&self) -> BoxFuture<'_, Result<Stats, ReadError>> {
        unreachable!()
    }
    fn recent_keys(&self, limit: usize) -> BoxFuture<'_, Result<Vec<RecentKey>, ReadError>> {
        let heard = self.scene.later(self.node, true, move |world| {
            let expires_at = event("any", 1).expires_at;
            let keys = world.committed.iter().take(limit).map(|(key, (event, digest))| {
                let (source, key) = ("shop".to_owned(), key.clone());
                RecentKey { source, key, event: *event, digest: *digest, expires_at }
            });
            keys.collect()
        });
        Box::pin(async { heard.await.map_err(|_| ReadError::Engine("cut off".to_owned())) })
    }
}

impl Reach {
    fn to_store<T: Send + 'static>(&self, deed: impl FnOnce(&mut World) -> T + Send + 'static) -> Answer<'_, T> {
        let heard = self.scene.later(self.node, false, deed);
        Box::pin(async { heard.await.map_err(|_| StoreError::Away("cut off".to_owned())) })
    }
}

impl Store for Arc<Reach> {
    fn probe(&self) -> Answer<'_, ()> {
        self.to_store(|_| ())
    }
    fn get(&self, key: Vec<u8>) -> Answer<'_, Option<Vec<u8>>> {
        self.to_store(move |world| world.store.get(&key).cloned())
    }
    fn put(&self, entries: Vec<Entry>) -> Answer<'_, usize> {
        self.to_store(move |world| {
            let before = world.store.len();
            for entry in entries {
                world.store.entry(entry.key).or_insert(entry.value);
            }
            world.store.len() - before
        })
    }
}

pub(super) type Appending = JoinHandle<Result<Settled, AppendError>>;

/// A process.
pub(super) struct Node {
    path: Arc<FastPath>,
    reach: Arc<Reach>,
    running: Option<JoinHandle<()>>,
    pub(super) requests: Vec<(NewEvent, Appending)>,
}

impl Node {
    /// One that is not started: without a store, and cold.
    pub(super) fn alone(scene: &Scene) -> Self {
        Self::new(0, scene, |_| FastPath::default())
    }

    pub(super) fn start(node: usize, scene: &Scene, written_too_early: bool) -> Self {
        let mut node = Self::new(node, scene, |reach| {
            let store = Box::new(Arc::clone(reach));
            FastPath { written_too_early, ..FastPath::with_store(store) }
        });
        let (path, reach) = (Arc::clone(&node.path), Arc::clone(&node.reach));
        node.running = Some(tokio::spawn(async move { path.run(&*reach, &*reach, &Clock::manual(NOW)).await }));
        node
    }

    fn new(node: usize, scene: &Scene, path: impl FnOnce(&Arc<Reach>) -> FastPath) -> Self {
        let incarnation = Incarnation::named(&scene.lock().life.to_string());
        let reach = Arc::new(Reach { node, scene: scene.clone(), incarnation });
        Self { path: Arc::new(path(&reach)), reach, running: None, requests: Vec::new() }
    }

    pub(super) fn append(&self, events: NewEvents) -> Appending {
        let (path, journal) = (Arc::clone(&self.path), Arc::clone(&self.reach));
        tokio::spawn(async move { path.append(&*journal, events).await })
    }

    pub(super) fn send(&mut self, event: NewEvent) {
        let answer = self.append(std::iter::once(event.clone()).collect());
        self.requests.push((event, answer));
    }

    pub(super) fn incarnation(&self) -> &Incarnation {
        &self.reach.incarnation
    }

    /// Finds the database again, in the life that it is in.
    pub(super) fn connect(&self) {
        self.reach.incarnation.confirm(&self.reach.scene.lock().life.to_string());
    }

    pub(super) fn crash(&mut self) {
        self.running.iter().for_each(JoinHandle::abort);
        self.requests.drain(..).for_each(|(_, answer)| answer.abort());
    }
}
