//! The lanes: a few tasks that append, each with a connection of its own.
//!
//! A request goes to the lane of its key, so that copies that arrive together meet in one batch. Group commit without a timer:
//! while one batch is stored, the next gathers in the queue. If a row spoils a batch, its requests are stored one by one, so
//! that a bad request costs only itself.
//!
//! A lane that lost its connection refuses at once, and tries again by itself until the database is there, is the primary and
//! passes the self-test. The outcome of an append whose commit was not answered is unknown: its sender is asked to try again,
//! and the retry finds the key if it was stored.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot};

use super::append::{Appends, Outcome};
use super::engine::{Connected, Purpose, Session};
use super::error::{EngineError, Tries};
use super::self_test;
use super::shared::Shared;
use crate::event::NewEvents;
use crate::journal::{AppendError, Receipt};
use crate::retry::{Chance, Reconnect};

/// What a lane is asked to do.
#[expect(clippy::large_enum_variant, reason = "nearly every command is an append, and it is moved once")]
pub(super) enum Command {
    Append(Request),
    Close(oneshot::Sender<()>),
}

/// The events of one request, and where to send the outcome.
pub(in crate::journal) struct Request {
    pub(super) events: NewEvents,
    pub(super) answer: oneshot::Sender<Result<Receipt, AppendError>>,
}

impl Request {
    /// What the events weigh in memory, roughly.
    pub(super) fn bytes(&self) -> usize {
        self.events.iter().map(|event| event.body.len() + event.headers.len()).sum()
    }
}

/// A batch ends at this many events or bytes, whichever comes first.
const BATCH_EVENTS: usize = 512;
const BATCH_BYTES: usize = 8 << 20;

/// How often an idle lane looks whether its connection is still there, and how often it asks the server for that.
const TICK: Duration = Duration::from_millis(100);
const ASK_EVERY: Duration = Duration::from_millis(250);

pub(super) struct Lane<E: Appends> {
    pub(super) number: usize,
    pub(super) shard: i64,
    pub(super) engine: Arc<E>,
    pub(super) shared: Arc<Shared>,
    /// `None` while the lane is failing.
    pub(super) session: Option<E::Session>,
    pub(super) memory: E::LaneMemory,
    /// When the server was last asked whether the connection is there.
    pub(super) asked: Instant,
}

impl<E: Appends> Lane<E> {
    /// Runs until it is closed, or until the journal is gone.
    pub(super) async fn run(mut self, mut commands: mpsc::Receiver<Command>) {
        let mut batch = Vec::new();
        loop {
            if self.session.as_ref().is_some_and(Connected::is_closed) {
                self.fail("the connection to the database was lost");
            }
            if self.session.is_none() && self.wait_for_database(&mut commands).await {
                return;
            }
            let close = match tokio::time::timeout(TICK, commands.recv()).await {
                Err(_) => {
                    self.look_after_connection().await;
                    None
                }
                Ok(None) => return,
                Ok(Some(Command::Close(done))) => Some(done),
                Ok(Some(Command::Append(request))) => {
                    let close = self.gather(request, &mut commands, &mut batch);
                    self.store(&mut batch).await;
                    close
                }
            };
            if let Some(done) = close {
                self.drain(&mut commands).await;
                // The one who asked may be gone.
                let _ = done.send(());
                return;
            }
        }
    }

    /// Stores what is still queued. Nothing is queued behind a close.
    async fn drain(&mut self, commands: &mut mpsc::Receiver<Command>) {
        let mut batch = Vec::new();
        while let Ok(Command::Append(request)) = commands.try_recv() {
            self.gather(request, commands, &mut batch);
            self.store(&mut batch).await;
        }
    }

    async fn look_after_connection(&mut self) {
        if self.asked.elapsed() < ASK_EVERY {
            return;
        }
        self.asked = Instant::now();
        let _asked = self.shared.silence.ask(self.number);
        if let Some(session) = &mut self.session
            && !session.is_alive().await
        {
            self.fail("the connection to the database was lost");
        }
    }

    /// Fills the batch from the queue. Returns who asked to close, if a close was queued.
    fn gather(
        &self,
        first: Request,
        commands: &mut mpsc::Receiver<Command>,
        batch: &mut Vec<Request>,
    ) -> Option<oneshot::Sender<()>> {
        let most = self.session.as_ref().map_or(BATCH_BYTES, |session| session.batch_bytes().min(BATCH_BYTES));
        let (mut events, mut bytes) = (first.events.len(), first.bytes());
        batch.push(first);
        let mut close = None;
        while events < BATCH_EVENTS && bytes < most && close.is_none() {
            match commands.try_recv() {
                Ok(Command::Append(request)) => {
                    events += request.events.len();
                    bytes += request.bytes();
                    batch.push(request);
                }
                Ok(Command::Close(done)) => close = Some(done),
                Err(_) => break,
            }
        }
        self.shared.queued_bytes.fetch_sub(bytes, Ordering::Relaxed);
        close
    }

    /// Stores a batch and answers it. All branching about what can go wrong is here.
    async fn store(&mut self, batch: &mut Vec<Request>) {
        let asked = self.shared.silence.ask(self.number);
        let mut tries = Tries::default();
        let stored = loop {
            match self.append(batch).await {
                Ok(outcome) => break Ok(outcome),
                // Nothing was stored.
                Err(error) => {
                    let undone = match &mut self.session {
                        Some(session) => session.rollback().await,
                        None => Ok(()),
                    };
                    if let Err(error) = tries.again(error).and(undone) {
                        break Err(error);
                    }
                }
            }
        };
        drop(asked);
        match stored {
            Ok(Outcome { receipts, trouble }) => {
                let unknown = || AppendError::Unavailable("the outcome is unknown".to_owned());
                for (request, receipt) in batch.drain(..).zip(receipts) {
                    // The sender may have hung up. The event is stored all the same.
                    let _ = request.answer.send(receipt.ok_or_else(unknown));
                }
                if let Some(error) = trouble {
                    self.fail(&error.message);
                }
            }
            Err(error) if error.meaning.row && batch.len() > 1 => {
                for request in std::mem::take(batch) {
                    Box::pin(self.store(&mut vec![request])).await;
                }
            }
            Err(error) if error.meaning.row => {
                tracing::error!(%error, "an event could not be stored");
                refuse(batch, "the event could not be stored");
            }
            // Another transaction held a lock. This one is undone, and the connection is sound.
            Err(error) if error.is_too_slow() || error.is_collision() => {
                tracing::warn!(%error, "a batch could not be stored in time");
                refuse(batch, "the database is too slow");
            }
            Err(error) => {
                refuse(batch, "the database could not be written");
                self.fail(&error.message);
            }
        }
    }

    fn fail(&mut self, reason: &str) {
        tracing::error!(lane = self.number, reason, "the journal cannot store; refusing events until it can");
        self.shared.set_failing(self.number, Some(reason.to_owned()));
        (self.session, self.memory) = (None, E::LaneMemory::default());
    }

    /// Refuses what comes until there is a sound connection. Returns whether the journal was closed meanwhile.
    async fn wait_for_database(&mut self, commands: &mut mpsc::Receiver<Command>) -> bool {
        let mut reconnect = Reconnect::new(Chance::random());
        loop {
            let engine = Arc::clone(&self.engine);
            let opening = async move {
                let mut session = engine.open(Purpose::Append).await?;
                let tested = self_test::run(engine.as_ref(), &mut session).await;
                tested.map_err(|error| EngineError::other(error.to_string()))?;
                Ok::<_, EngineError>(session)
            };
            let Some(opened) = self.refuse_until(opening, commands).await else { return true };
            match opened {
                Ok(session) => {
                    self.session = Some(session);
                    self.shared.set_failing(self.number, None);
                    tracing::info!(lane = self.number, "the journal stores again");
                    return false;
                }
                Err(error) => self.shared.set_failing(self.number, Some(error.message)),
            }
            if self.refuse_until(tokio::time::sleep(reconnect.wait()), commands).await.is_none() {
                return true;
            }
        }
    }

    /// Waits for something and refuses what is sent meanwhile. `None`: the journal was closed.
    async fn refuse_until<T>(
        &self,
        wanted: impl Future<Output = T>,
        commands: &mut mpsc::Receiver<Command>,
    ) -> Option<T> {
        tokio::pin!(wanted);
        loop {
            let command = tokio::select! {
                done = &mut wanted => return Some(done),
                command = commands.recv() => command,
            };
            match command {
                Some(Command::Append(request)) => {
                    self.shared.queued_bytes.fetch_sub(request.bytes(), Ordering::Relaxed);
                    refuse(&mut vec![request], "the database is not there");
                }
                Some(Command::Close(done)) => {
                    let _ = done.send(());
                    return None;
                }
                None => return None,
            }
        }
    }
}

fn refuse(batch: &mut Vec<Request>, reason: &str) {
    for request in batch.drain(..) {
        // The sender may have hung up.
        let _ = request.answer.send(Err(AppendError::Unavailable(reason.to_owned())));
    }
}
