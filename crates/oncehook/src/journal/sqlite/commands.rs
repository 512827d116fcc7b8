//! The queue of commands to a thread that writes a database file. The embedded journal has one, and the spool.
//!
//! Promises: the queue is bounded in commands and in bytes of bodies, a batch in events, bytes and in the jobs that wait for it. A
//! command that was queued is served or dropped, and dropping it answers the caller, however the thread ends, by a panic
//! too. Nothing is queued behind a thread that has ended.
//! Does not: store anything, or look at what it carries.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, TrySendError};
use tokio::sync::oneshot;

use crate::event::NewEvents;
use crate::journal::{AppendError, Receipt, Ticket};

/// The queue holds at most this many bytes of bodies, also of senders that have hung up.
const QUEUE_BYTES: usize = 64 << 20;

/// How long to wait before a full queue is tried again.
const QUEUE_FULL_WAIT: Duration = Duration::from_millis(2);

/// A batch ends at this many events or bytes, whichever comes first.
const BATCH_EVENTS: usize = 512;
const BATCH_BYTES: usize = 8 << 20;

/// Jobs that wait for a batch at most.
const BATCH_JOBS: usize = 64;

/// Events that are taken from the queue at once.
const TAKEN_AT_ONCE: usize = 32;

/// Room that is made for a batch at its beginning.
pub(super) const BATCH_USUAL: usize = 128;

/// What the thread is asked to do.
pub(crate) enum Command<J> {
    /// In a box: the queue has thousands of places, and each is as large as the largest command.
    Append(Box<Work>),
    /// Something else to do with the file. It answers its caller by itself.
    Job(J),
    Close(oneshot::Sender<()>),
}

/// The events of one request, and where to send the outcome.
pub(crate) struct Work {
    pub(crate) events: NewEvents,
    pub(crate) answer: oneshot::Sender<Result<Receipt, AppendError>>,
    /// When it was put into the queue.
    pub(super) submitted: Instant,
}

impl Work {
    /// What the events weigh in memory, roughly.
    fn bytes(&self) -> usize {
        self.events.iter().map(|event| event.body.len() + event.headers.len()).sum()
    }
}

pub(crate) fn refuse(works: impl IntoIterator<Item = Work>, reason: &str) {
    for work in works {
        // The sender may have hung up.
        let _ = work.answer.send(Err(AppendError::Unavailable(reason.to_owned())));
    }
}

/// What both ends of the queue look at.
#[derive(Default)]
pub(crate) struct QueueState {
    /// Set once, under the write lock, when the queue is closed or the thread ends. Commands are queued under the read lock,
    /// so none can slip in behind the thread's back and wait for ever.
    closed: RwLock<bool>,
    /// Bytes of bodies in the queue.
    queued_bytes: AtomicUsize,
    /// Why the file cannot be written, if it cannot.
    failing: Mutex<Option<String>>,
}

impl QueueState {
    pub(crate) fn close(&self) {
        *self.closed.write().unwrap_or_else(PoisonError::into_inner) = true;
    }

    pub(super) fn is_closed(&self) -> bool {
        *self.closed.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn failing(&self) -> MutexGuard<'_, Option<String>> {
        self.failing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why the file cannot be written, for an answer.
    pub(crate) fn reason(&self) -> String {
        self.failing().clone().unwrap_or_default()
    }
}

/// The callers' end of the queue.
pub(crate) struct CommandQueue<J> {
    pub(crate) commands: Sender<Command<J>>,
    pub(crate) state: Arc<QueueState>,
}

impl<J> CommandQueue<J> {
    /// A queue for at most `limit` commands, and the thread's end of it. `died`: what to say if the thread has panicked.
    pub(crate) fn bounded(limit: usize, died: &'static str) -> (Self, Commands<J>) {
        let (commands, receiver) = crossbeam_channel::bounded(limit);
        let state = Arc::new(QueueState::default());
        (Self { commands, state: Arc::clone(&state) }, Commands { receiver, state, died })
    }

    /// Hands the events of one request over. Returns at once: the ticket has the outcome.
    pub(crate) fn submit(&self, events: NewEvents) -> Result<Ticket, AppendError> {
        let (answer, ticket) = oneshot::channel();
        let work = Box::new(Work { events, answer, submitted: Instant::now() });
        let bytes = work.bytes();
        let sent = match self.state.queued_bytes.fetch_add(bytes, Ordering::Relaxed) > QUEUE_BYTES {
            true => Err(AppendError::Full),
            false => self.try_send(Command::Append(work)).map_err(refused),
        };
        sent.map(|()| ticket).inspect_err(|_| {
            self.state.queued_bytes.fetch_sub(bytes, Ordering::Relaxed);
        })
    }

    /// Puts a command into the queue, if there is room.
    pub(crate) fn try_send(&self, command: Command<J>) -> Result<(), TrySendError<Command<J>>> {
        let closed = self.state.closed.read().unwrap_or_else(PoisonError::into_inner);
        if *closed { Err(TrySendError::Disconnected(command)) } else { self.commands.try_send(command) }
    }

    /// Puts a command into the queue; one that is full is tried again until it has room. Returns false if the queue is closed.
    /// Dropping this half-way leaves nothing behind.
    pub(super) async fn hand_over(&self, command: Command<J>) -> bool {
        until_room(command, |command| self.try_send(command)).await
    }

    /// Has the thread serve what is queued and end. Also behind a queue that is closed already.
    pub(crate) async fn close(&self) {
        let (done, closed) = oneshot::channel();
        if until_room(Command::Close(done), |command| self.commands.try_send(command)).await {
            // An error means that the thread has ended already.
            let _ = closed.await;
        }
    }
}

async fn until_room<T>(mut command: T, send: impl Fn(T) -> Result<(), TrySendError<T>>) -> bool {
    loop {
        command = match send(command) {
            Ok(()) => return true,
            Err(TrySendError::Disconnected(_)) => return false,
            Err(TrySendError::Full(command)) => command,
        };
        tokio::time::sleep(QUEUE_FULL_WAIT).await;
    }
}

pub(crate) fn refused<T>(error: TrySendError<T>) -> AppendError {
    if error.is_full() { AppendError::Full } else { AppendError::Closed }
}

/// The thread's end of the queue.
pub(crate) struct Commands<J> {
    pub(crate) receiver: Receiver<Command<J>>,
    state: Arc<QueueState>,
    died: &'static str,
}

impl<J> Drop for Commands<J> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            *self.state.failing() = Some(self.died.to_owned());
        }
        self.state.close();
        // Dropping a command answers its caller.
        while self.receiver.try_recv().is_ok() {}
    }
}

/// What is taken from the queue at once. Jobs that stand between the appends are set aside: they come after the appends.
pub(crate) struct Batch<'q, J> {
    /// `None`: nothing is added.
    queue: Option<&'q Commands<J>>,
    pub(crate) works: Vec<Work>,
    pub(crate) jobs: Vec<J>,
    /// Set if the queue is to be closed. The batch ends there.
    pub(crate) close: Option<oneshot::Sender<()>>,
    pub(super) events: usize,
    bytes: usize,
}

impl<'q, J> Batch<'q, J> {
    /// A batch that begins with a command from the queue.
    pub(crate) fn begin(first: Command<J>, queue: &'q Commands<J>) -> Self {
        let room = if matches!(first, Command::Append(_)) { BATCH_USUAL } else { 0 };
        let mut batch = Self { queue: Some(queue), ..Self::of(Vec::with_capacity(room)) };
        batch.put(first, queue);
        batch
    }

    /// One request by itself.
    pub(crate) fn alone(work: Work) -> Self {
        Self::of(vec![work])
    }

    fn of(works: Vec<Work>) -> Self {
        Self { queue: None, works, jobs: Vec::new(), close: None, events: 0, bytes: 0 }
    }

    /// Adds some of what waits in the queue. Returns whether there was an append.
    pub(crate) fn take(&mut self) -> bool {
        let Some(queue) = self.queue else { return false };
        let (had, end) = (self.works.len(), self.events + TAKEN_AT_ONCE);
        while self.has_room()
            && self.events < end
            && let Ok(command) = queue.receiver.try_recv()
        {
            self.put(command, queue);
        }
        self.works.len() > had
    }

    fn put(&mut self, command: Command<J>, queue: &Commands<J>) {
        match command {
            Command::Append(work) => {
                let bytes = work.bytes();
                queue.state.queued_bytes.fetch_sub(bytes, Ordering::Relaxed);
                self.events += work.events.len();
                self.bytes += bytes;
                self.works.push(*work);
            }
            Command::Job(job) => self.jobs.push(job),
            Command::Close(done) => self.close = Some(done),
        }
    }

    pub(super) fn has_room(&self) -> bool {
        self.events < BATCH_EVENTS
            && self.bytes < BATCH_BYTES
            && self.jobs.len() < BATCH_JOBS
            && self.close.is_none()
            && self.queue.is_some()
    }
}
