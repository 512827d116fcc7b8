//! The spool: a small SQLite file of this node's own that takes events while the journal cannot.
//!
//! Promises: an accepted event is in the file's log and synced, like in the embedded journal (`synchronous=FULL`, read back);
//! events come out in the order in which they were accepted, and leave only when the drain says so; the file is
//! bounded in events and bytes; one process per file; a file that was removed under the process takes no more events, and
//! what is in it can still be drained; damaged rows are set aside and reported, never handed on.
//!
//! Does not: decide about duplicates for good. It recognises the copies of what it holds itself; the journal settles the
//! rest when the events are drained. Nor does it outlive its disk: it needs one that stays with the node.

mod rows;
mod writer;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use oncehook_verify::UnixMicros;
use tokio::sync::oneshot;

use crate::event::{EventId, NewEvent, NewEvents};
use crate::journal::sqlite::OpenError;
use crate::journal::sqlite::commands::{Command, CommandQueue, QueueState, refused};
use crate::journal::sqlite::place::Place;
use crate::journal::{AppendError, Ticket};
use writer::{Job, Writer};

/// How the spool is set up.
#[derive(Debug, Clone)]
pub struct SpoolOptions {
    /// The file. Nothing else may be in it.
    pub path: PathBuf,
    /// At most this many events.
    pub max_events: u64,
    /// At most this many bytes of events, about.
    pub max_bytes: u64,
}

impl SpoolOptions {
    /// The usual set-up for a file.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), max_events: 1_000_000, max_bytes: 1 << 30 }
    }
}

/// Why the spool did not do what it was asked to.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SpoolError {
    /// It holds as much as it may. Nothing was stored.
    #[error("the spool is full")]
    Full,
    /// Its file cannot be used, or the outcome is unknown.
    #[error("the spool is unavailable: {0}")]
    Unavailable(String),
    /// It is shutting down. Nothing was stored.
    #[error("the spool is closed")]
    Closed,
}

/// What the queue in front of the spool says is said by the spool.
impl From<AppendError> for SpoolError {
    fn from(error: AppendError) -> Self {
        match error {
            AppendError::Full => Self::Full,
            AppendError::Unavailable(reason) => Self::Unavailable(reason),
            AppendError::Closed => Self::Closed,
            AppendError::Gone => Self::Unavailable("its writer is gone".to_owned()),
        }
    }
}

/// An event that waits to be drained.
#[derive(Debug, Clone)]
pub struct Spooled {
    /// Its place in the order.
    pub seq: i64,
    /// The id that its sender was answered.
    pub id: EventId,
    /// The event, as it would have gone to the journal, with that id.
    pub event: NewEvent,
    /// How many more times it was delivered since.
    pub copies: u64,
    /// Why it is not drained any more, if it is not.
    pub aside: Option<String>,
}

/// How the spool is doing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SpoolState {
    /// Events that wait to be drained.
    pub events: u64,
    /// What the file's events weigh.
    pub bytes: u64,
    /// When the first that waits was received.
    pub oldest: Option<UnixMicros>,
    /// Events that cannot be drained: damaged, or refused by a journal that is well.
    pub set_aside: u64,
    /// How much of what it may hold it holds, in per cent.
    pub percent: u8,
    /// Why the file cannot be used, if it cannot.
    pub failing: Option<String>,
}

/// The queue holds at most this many requests.
const QUEUE: usize = 8_192;

/// See the module's text.
pub struct Spool {
    path: PathBuf,
    queue: CommandQueue<Job>,
    shared: Arc<Shared>,
}

/// What the writer thread and the rest look at together.
#[derive(Default)]
struct Shared {
    queue: Arc<QueueState>,
    /// Events that wait in the file, and those on their way into it.
    outstanding: AtomicUsize,
    /// Ids stay above this sequence, which the journal has given.
    above: AtomicI64,
    /// All but why the file cannot be used.
    state: Mutex<SpoolState>,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, SpoolState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Spool {
    /// Opens the file, making it if need be, and checks it. Blocking.
    pub fn open(options: &SpoolOptions) -> Result<Self, OpenError> {
        let (place, lock) = Place::claim(&options.path)?;
        let (queue, commands) = CommandQueue::bounded(QUEUE, "the spool's writer has died");
        let shared = Arc::new(Shared { queue: Arc::clone(&queue.state), ..Shared::default() });
        let options = SpoolOptions { path: place.path.clone(), ..options.clone() };
        let writer = Writer::open(options, lock, Arc::clone(&shared))?;
        place.sync_directory()?;
        std::thread::Builder::new()
            .name("spool-writer".to_owned())
            .spawn(move || writer.run(&commands))
            .map_err(OpenError::place(&place.path))?;
        Ok(Self { path: place.path, queue, shared })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How it is doing.
    pub fn state(&self) -> SpoolState {
        SpoolState { failing: self.shared.queue.failing().clone(), ..self.shared.state().clone() }
    }

    /// New ids stay above the journal's, so that ids tell the order also after the clock was set back.
    pub(super) fn stay_above(&self, id: EventId) {
        self.shared.above.fetch_max(id.sequence(), Ordering::Relaxed);
    }

    /// Events that wait, and those on their way in.
    pub(super) fn outstanding(&self) -> usize {
        self.shared.outstanding.load(Ordering::Acquire)
    }

    /// Hands the events of one request over. Returns at once: the ticket tells the outcome. They are stored together or not
    /// at all.
    pub(super) fn submit(&self, events: NewEvents) -> Result<Ticket, SpoolError> {
        let count = events.len();
        self.shared.outstanding.fetch_add(count, Ordering::AcqRel);
        let submitted = self.queue.submit(events).inspect_err(|_| {
            self.shared.outstanding.fetch_sub(count, Ordering::AcqRel);
        });
        Ok(submitted?)
    }

    /// The first events that wait. Whatever was submitted before is in the file by then, or was refused.
    pub(super) async fn read(&self, limit: usize, bytes: u64) -> Result<Vec<Spooled>, SpoolError> {
        self.ask(move |writer| writer.read(limit, bytes)).await
    }

    /// The event that was answered this id, if it is still here.
    pub async fn find(&self, id: EventId) -> Result<Option<Spooled>, SpoolError> {
        self.ask(move |writer| writer.with(|connection| rows::find(connection, id))).await
    }

    /// Removes events that are in the journal.
    pub(super) async fn remove(&self, seqs: Vec<i64>) -> Result<(), SpoolError> {
        self.ask(move |writer| writer.change(|connection, counts| rows::delete(connection, &seqs, counts))).await
    }

    /// Keeps an event, but does not hand it out again.
    pub(super) async fn set_aside(&self, seq: i64, reason: String) -> Result<(), SpoolError> {
        self.ask(move |writer| writer.set_aside(seq, &reason)).await
    }

    /// Refuses what comes from now on, stores what is queued, then stops. Returns whether that was done within `patience`. If not,
    /// the writer goes on by itself; a sender that waits for an append has no answer yet, and so no promise.
    pub async fn close(&self, patience: Duration) -> bool {
        self.queue.state.close();
        tokio::time::timeout(patience, self.queue.close()).await.is_ok()
    }

    async fn ask<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Writer) -> Result<T, SpoolError> + Send + 'static,
    ) -> Result<T, SpoolError> {
        let (answer, outcome) = oneshot::channel();
        // The caller may be gone.
        let job: Job = Box::new(move |writer| drop(answer.send(work(writer))));
        self.queue.try_send(Command::Job(job)).map_err(refused)?;
        outcome.await.unwrap_or_else(|_| Err(AppendError::Gone.into()))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::fastpath::tests::event;

    const PLENTY: Duration = Duration::from_secs(60);

    /// A spool whose writer is kept from committing.
    struct Rig {
        spool: Arc<Spool>,
        lock: rusqlite::Connection,
        _directory: tempfile::TempDir,
    }

    impl Rig {
        fn new() -> Self {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("spool.db");
            let spool = Arc::new(Spool::open(&SpoolOptions::new(&path)).unwrap());
            let lock = rusqlite::Connection::open(&path).unwrap();
            lock.execute_batch("BEGIN IMMEDIATE").unwrap();
            Self { spool, lock, _directory: directory }
        }

        fn submit(&self, key: &str) -> Result<Ticket, SpoolError> {
            self.spool.submit([event(key, 1)].into_iter().collect())
        }

        /// The writer is in the middle of a commit that the lock holds up.
        async fn hold_up_a_commit(&self) -> Ticket {
            let first = self.submit("evt_first").unwrap();
            until(|| self.spool.queue.commands.is_empty()).await;
            first
        }

        fn close(&self) -> tokio::task::JoinHandle<bool> {
            let spool = Arc::clone(&self.spool);
            tokio::spawn(async move { spool.close(PLENTY).await })
        }

        fn unlock(&self) {
            self.lock.execute_batch("ROLLBACK").unwrap();
        }

        fn stored(&self) -> i64 {
            self.lock.query_row("SELECT count(*) FROM oncehook_spool", [], |row| row.get(0)).unwrap()
        }
    }

    async fn until(seen: impl Fn() -> bool) {
        let begun = Instant::now();
        while !seen() {
            assert!(begun.elapsed() < PLENTY);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    #[tokio::test]
    async fn what_is_submitted_while_the_spool_closes_is_stored_or_refused_and_never_dropped() {
        let rig = Rig::new();
        let first = rig.hold_up_a_commit().await;
        let closing = rig.close();
        tokio::task::yield_now().await;
        // A caller looks for an event, then another one arrives.
        let _ = rig.spool.queue.try_send(Command::Job(Box::new(|_| {})));
        let second = rig.submit("evt_second");
        rig.unlock();
        assert!(first.await.unwrap().is_ok());
        match second {
            Err(error) => assert_eq!(error, SpoolError::Closed, "nothing was stored, and the sender learns it"),
            Ok(ticket) => assert!(matches!(ticket.await, Ok(Ok(_))), "the append was dropped"),
        }
        assert!(closing.await.unwrap());
    }

    #[tokio::test]
    async fn a_close_behind_a_full_queue_waits_until_all_of_it_is_stored() {
        let rig = Rig::new();
        let mut tickets = vec![rig.hold_up_a_commit().await];
        while let Ok(ticket) = rig.submit(&format!("evt_{}", tickets.len())) {
            tickets.push(ticket);
        }
        assert_eq!(tickets.len(), QUEUE + 1);
        let closing = rig.close();
        tokio::task::yield_now().await;
        rig.unlock();
        assert!(closing.await.unwrap());
        for ticket in &mut tickets {
            assert!(ticket.try_recv().is_ok(), "the close is over, and an append has no answer yet");
        }
        assert_eq!(rig.stored(), QUEUE as i64 + 1);
    }

    #[tokio::test]
    async fn a_close_ends_at_its_deadline_although_the_writer_does_not() {
        let rig = Rig::new();
        let first = rig.hold_up_a_commit().await;
        let begun = Instant::now();
        assert!(!rig.spool.close(Duration::from_millis(50)).await, "the writer cannot have ended");
        assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
        // What was queued before is stored all the same.
        rig.unlock();
        assert!(first.await.unwrap().is_ok());
        assert!(rig.spool.close(PLENTY).await);
        assert_eq!(rig.stored(), 1);
    }
}
