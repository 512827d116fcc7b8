//! The embedded journal: one SQLite file, one writer thread, group commit.
//!
//! Promises: an answered append is in the write-ahead log and synced. Accepts commit with `synchronous = NORMAL`, and the
//! `syncer` syncs the log before it answers; everything else commits with `FULL`. Both settings are read back, not assumed. One
//! process per file; a failed sync is never followed by a commit into the same log; the schema is the one this program
//! expects, or it does not start; a file whose log was lost is not opened without the operator's word (`answered`); no other
//! user of the machine can read, write or lock the files (`place`).
//!
//! Does not: share the file with another oncehook (lock file), run on network disks, hold write locks while people read.
//!
//! The parts, in the order of an append: [`SqliteJournal::submit`] puts it on a bounded queue; `writer` takes what has
//! gathered while the last commit ran, asks the `ledger` which keys are known, stores the rest in one transaction
//! (`queries`) and answers; `follower` fills the search index behind it; `checkpoint` moves the log into the database file. `reader` serves people from read-only
//! connections, `search` finds what they look for. `place`, `connection` and `schema` check the ground before anything is accepted.
//!
//! On the way out, `deliveries` hands jobs to the same writer: `queue` takes and settles deliveries, `apply` runs the
//! user's statements (`user_sql`) in the transaction that settles them, `orders` does what operators ask, `forget` removes
//! what is old. `rehearse` tells at the start which of the user's statements would fail.

mod aliases;
mod answered;
mod apply;
mod bloom;
mod busy;
pub(crate) mod checkpoint;
pub(crate) mod connection;
mod database_file;
mod deliveries;
mod entity;
mod follower;
mod forget;
mod groups;
mod intake;
mod ledger;
mod orders;
pub(crate) mod place;
mod priority;
mod queries;
mod queue;
mod reader;
mod rehearse;
mod schema;
mod search;
mod self_test;
mod syncer;
mod user_sql;
pub(crate) mod writer;

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::time::{Duration, Instant};

use crossbeam_channel::{Sender, TrySendError};
use oncehook_verify::UnixMicros;
use tokio::sync::{Semaphore, oneshot, watch};

use super::tally::Tally;
use super::{
    Alias, AppendError, BoxFuture, Durability, EventDetail, EventPage, EventQuery, Incarnation, Journal, JournalReader,
    JournalState, KnownCopy, Layer, ReadError, RecentKey, SelfTestError, Standing, Stats, StoredBody, Ticket,
    WorkError,
};
use crate::clock::Clock;
use crate::delivery::DeliveryId;
use crate::event::{EventId, NewEvents, SourceName};
use crate::retry::Chance;
use crate::route::KnownLines;
use answered::Found;
use ledger::Recent;
use place::LockFile;
use reader::Readers;
use writer::{Command, Ground, Post, Work, Writer};

/// How the embedded journal is set up.
#[derive(Debug, Clone)]
pub struct SqliteOptions {
    /// The database file. It may hold the user's own tables too.
    pub path: PathBuf,
    /// How many appends may wait for the writer. Beyond that they are refused.
    pub queue_limit: usize,
    /// Where time comes from.
    pub clock: Clock,
    /// Open a file of which a part is missing ([`OpenError::Incomplete`]) all the same: what the operator has to say, once.
    pub accept_lost_log: bool,
    /// How many keys gather in memory before they are merged into the table. For tests; the usual value is best.
    #[doc(hidden)]
    pub ledger_generation: usize,
}

impl SqliteOptions {
    /// The usual set-up for a file.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            queue_limit: 8_192,
            clock: Clock::system(),
            accept_lost_log: false,
            ledger_generation: ledger::GENERATION,
        }
    }
}

/// Why the journal did not open.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Another process has it.
    #[error("{path} is in use by another oncehook process (its lock file {lock} is held){owner}")]
    InUse {
        /// The database file.
        path: PathBuf,
        /// The lock file.
        lock: PathBuf,
        /// Whose lock file it is, in brackets, if it is not ours.
        owner: String,
    },
    /// A part of what the file must hold is gone.
    #[error(
        "{path}: {missing}. Deliveries of missing events would take effect again. Bring the -wal file back to its place beside \
         the database and start again; or, if it cannot be found, start once with --accept-lost-log"
    )]
    Incomplete {
        /// The database file.
        path: PathBuf,
        /// What is missing, and how that can have come about.
        missing: &'static str,
    },
    /// The file cannot be made or written where it is.
    #[error("{path}: {reason}")]
    Place {
        /// The database file.
        path: PathBuf,
        /// What is wrong with the place.
        reason: String,
    },
    /// The engine is not set up so that an acknowledged event is durable.
    #[error("durability check failed: {0}")]
    Durability(String),
    /// The schema is not what this program expects.
    #[error("schema check failed: {0}")]
    Schema(String),
    /// Keys are not remembered as they must be.
    #[error(transparent)]
    SelfTest(#[from] SelfTestError),
    /// Two events hold one key, or another sign that the memory of keys is damaged.
    #[error("{0}")]
    Ledger(String),
    /// SQLite said no.
    #[error("SQLite: {0}")]
    Sqlite(#[from] rusqlite::Error),
}

impl OpenError {
    /// An error of the ledger's: SQLite's own, or what [`ledger`] found to be wrong.
    fn of_ledger(error: rusqlite::Error) -> Self {
        match error {
            rusqlite::Error::ToSqlConversionFailure(what) => Self::Ledger(what.to_string()),
            error => Self::Sqlite(error),
        }
    }
}

/// The queue holds at most this many bytes of bodies, whoever still waits for them.
const QUEUE_BYTES: usize = 64 << 20;

/// How long to wait before a full queue is tried again.
const QUEUE_FULL_WAIT: Duration = Duration::from_millis(2);

/// Each read has a connection with its own cache.
const READS_AT_ONCE: usize = 8;

/// The embedded journal. See the module's text.
pub struct SqliteJournal {
    queue: Sender<Command>,
    queue_limit: usize,
    durability: Durability,
    readers: Arc<Readers>,
    /// Reads at once; further ones wait.
    reading: Semaphore,
    shared: Arc<Shared>,
    /// Drawn at each start: whether the file was put back meanwhile, nothing in it could tell.
    incarnation: Incarnation,
    /// Where forgetting has come to.
    round: Arc<Mutex<forget::Round>>,
    chance: Arc<Mutex<Chance>>,
    lines: Arc<KnownLines>,
}

/// What the writer thread and the rest look at together.
#[derive(Default)]
struct Shared {
    /// Set once, under the write lock, when the writer ends. Appends are queued under the read lock, so none can slip
    /// in behind the writer's back and wait for ever.
    closed: RwLock<bool>,
    tally: Mutex<Tally>,
    /// Held while the tally moves into the tables: then its counts stand in neither place.
    flushing: Mutex<()>,
    /// How often the tally has moved into the tables. Grows under `flushing`.
    flushes: AtomicU64,
    failing: Mutex<Option<String>>,
    /// Keys that may not be in the table yet.
    recent: Arc<RwLock<Recent>>,
    wal_pages: AtomicU64,
    index_lag: AtomicU64,
    /// Bytes of bodies in the queue.
    queued_bytes: AtomicUsize,
    /// Grows when deliveries may have become due.
    changes: watch::Sender<u64>,
}

impl Shared {
    fn close(&self) {
        *self.closed.write().unwrap_or_else(PoisonError::into_inner) = true;
    }

    fn changed(&self) {
        self.changes.send_modify(|count| *count = count.wrapping_add(1));
    }

    fn is_closed(&self) -> bool {
        *self.closed.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn recent(&self) -> RwLockReadGuard<'_, Recent> {
        self.recent.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn tally(&self) -> MutexGuard<'_, Tally> {
        self.tally.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The tally as people may see it: not while it is on its way into the tables.
    fn settled_tally(&self) -> SettledTally<'_> {
        let settled = self.flushing.lock().unwrap_or_else(PoisonError::into_inner);
        SettledTally { tally: self.tally(), _settled: settled }
    }

    fn failing(&self) -> MutexGuard<'_, Option<String>> {
        self.failing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct SettledTally<'s> {
    tally: MutexGuard<'s, Tally>,
    _settled: MutexGuard<'s, ()>,
}

impl std::ops::Deref for SettledTally<'_> {
    type Target = Tally;

    fn deref(&self) -> &Tally {
        &self.tally
    }
}

impl SqliteJournal {
    /// Opens the file, making it if need be; migrates it, checks it and proves that it remembers keys. Blocking.
    pub fn open(options: &SqliteOptions) -> Result<Self, OpenError> {
        connection::check_library()?;
        let place = place::check(&options.path)?;
        let lock = LockFile::take(&place.path)?;
        place.keep_private()?;
        let found = Found::look(&place.path, &lock)?;
        let mut connection = connection::open_writer(&place.path)?;
        // A log left by a crash may hold commits that were written but never synced. They look stored, and a retry would
        // be answered as a duplicate: make them durable before anything is.
        checkpoint::empty_the_log(&connection)?;
        schema::migrate(&mut connection, options.clock.now())?;
        schema::check(&connection)?;
        place.sync_directory()?;
        if let Some(missing) = found.missing(&connection)? {
            let path = place.path.clone();
            if !options.accept_lost_log {
                return Err(OpenError::Incomplete { path, missing });
            }
            tracing::warn!(path = %path.display(), "{missing}. Accepted as the operator says: later copies of them are new events");
        }
        self_test::run(&mut connection, options.clock.now())?;
        let answered = answered::begin_use(&connection, &place.path, &lock)?;
        answered::set_in_use(&connection, true)?;
        // Into the file itself. If somebody who reads is in the way, the helper's next pass does it.
        if let Err(error) = checkpoint::empty_the_log(&connection) {
            tracing::debug!(%error, "the database file does not say yet that it is in use");
        }
        // Before the first event can come with a time of the same clock.
        forget::look_at_clock(&connection, options.clock.now())?;
        queue::begin_anew(&connection, options.clock.steady())?;

        let shared = Arc::new(Shared::default());
        let readers = Arc::new(Readers::new(&place.path, Arc::clone(&shared)));
        let (queue, commands) = crossbeam_channel::bounded(options.queue_limit);
        let ground = Ground {
            path: place.path,
            clock: options.clock.clone(),
            lock,
            answered,
            readers: Arc::clone(&readers),
            ledger_generation: options.ledger_generation,
        };
        let writer = Writer::new(connection, ground, Arc::clone(&shared))?;
        let post = Post { commands, shared: Arc::clone(&shared) };
        std::thread::Builder::new()
            .name("journal-writer".to_owned())
            .spawn(move || writer.run(&post.commands))
            .map_err(|error| OpenError::Place { path: options.path.clone(), reason: error.to_string() })?;
        Ok(Self {
            queue,
            queue_limit: options.queue_limit,
            durability: place.durability,
            readers,
            reading: Semaphore::new(READS_AT_ONCE),
            shared,
            incarnation: drawn(),
            round: Arc::default(),
            chance: Arc::new(Mutex::new(Chance::random())),
            lines: Arc::default(),
        })
    }

    /// Makes the schema and stops. Safe to repeat, and safe to be killed at any moment. Blocking.
    pub fn migrate(path: &Path, clock: &Clock) -> Result<Vec<String>, OpenError> {
        connection::check_library()?;
        let place = place::check(path)?;
        let _lock = LockFile::take(&place.path)?;
        place.keep_private()?;
        let mut connection = connection::open_writer(&place.path)?;
        checkpoint::empty_the_log(&connection)?;
        let applied = schema::migrate(&mut connection, clock.now())?;
        schema::check(&connection)?;
        place.sync_directory()?;
        self_test::run(&mut connection, clock.now())?;
        Ok(applied)
    }

    /// Puts a command into the writer's queue; one that is full is tried again until it has room. Returns false if the journal
    /// is closed. Dropping this half-way leaves nothing behind.
    async fn hand_over(&self, mut command: Command) -> bool {
        loop {
            // Under the lock, so that nothing slips in behind a writer that has ended.
            let sent = {
                let closed = self.shared.closed.read().unwrap_or_else(PoisonError::into_inner);
                if *closed { Err(TrySendError::Disconnected(command)) } else { self.queue.try_send(command) }
            };
            command = match sent {
                Ok(()) => return true,
                Err(TrySendError::Disconnected(_)) => return false,
                Err(TrySendError::Full(command)) => command,
            };
            tokio::time::sleep(QUEUE_FULL_WAIT).await;
        }
    }

    fn read<T: Send + 'static>(
        &self,
        query: impl FnOnce(&Readers) -> Result<T, ReadError> + Send + 'static,
    ) -> BoxFuture<'_, Result<T, ReadError>> {
        let readers = Arc::clone(&self.readers);
        Box::pin(async move {
            // A closed semaphore is not a thing that happens here; reading without a permit would be harmless.
            let _permit = self.reading.acquire().await;
            match tokio::task::spawn_blocking(move || query(&readers)).await {
                Ok(answer) => answer,
                Err(error) => Err(ReadError::Engine(error.to_string())),
            }
        })
    }
}

/// A life that nobody has seen before. Without chance there is no name, and nothing is shared.
fn drawn() -> Incarnation {
    let mut name = [0; 16];
    match aws_lc_rs::rand::fill(&mut name) {
        Ok(()) => Incarnation::named(&hex::encode(name)),
        Err(_) => Incarnation::nameless(),
    }
}

impl Journal for SqliteJournal {
    fn submit(&self, events: NewEvents) -> Result<Ticket, AppendError> {
        let closed = self.shared.closed.read().unwrap_or_else(PoisonError::into_inner);
        if *closed {
            return Err(AppendError::Closed);
        }
        let (answer, ticket) = oneshot::channel();
        let work = Work { events, answer, submitted: Instant::now() };
        let bytes = work.bytes();
        if self.shared.queued_bytes.fetch_add(bytes, Ordering::Relaxed) > QUEUE_BYTES {
            self.shared.queued_bytes.fetch_sub(bytes, Ordering::Relaxed);
            return Err(AppendError::Full);
        }
        self.queue.try_send(Command::Append(Box::new(work))).map_err(|error| {
            self.shared.queued_bytes.fetch_sub(bytes, Ordering::Relaxed);
            match error {
                TrySendError::Full(_) => AppendError::Full,
                TrySendError::Disconnected(_) => AppendError::Closed,
            }
        })?;
        Ok(ticket)
    }

    fn note_duplicate(&self, event: EventId, source: &SourceName, at: UnixMicros, peer: IpAddr, layer: Layer) -> bool {
        self.note_duplicates(&[KnownCopy { event, source, at, peer, layer }])
    }

    fn note_duplicates(&self, copies: &[KnownCopy<'_>]) -> bool {
        self.shared.tally().add_all(copies)
    }

    fn keep_aliases(&self, kept: Vec<Alias>) -> BoxFuture<'_, Result<(), WorkError>> {
        self.work(move |connection, _| aliases::keep(connection, &kept))
    }

    fn state(&self) -> JournalState {
        JournalState {
            kind: "sqlite",
            durability: self.durability,
            failing: self.shared.failing().clone(),
            queued: self.queue.len(),
            queue_limit: self.queue_limit,
            index_lag: self.shared.index_lag.load(Ordering::Relaxed),
            wal_pages: self.shared.wal_pages.load(Ordering::Relaxed),
        }
    }

    fn incarnation(&self) -> &Incarnation {
        &self.incarnation
    }

    fn self_test(&self) -> BoxFuture<'_, Result<(), SelfTestError>> {
        Box::pin(async move {
            let gone = || SelfTestError("the journal's writer is gone".to_owned());
            let (answer, verdict) = oneshot::channel();
            if !self.hand_over(Command::SelfTest(answer)).await {
                return Err(gone());
            }
            verdict.await.unwrap_or_else(|_| Err(gone()))
        })
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            let (done, closed) = oneshot::channel();
            if self.hand_over(Command::Close(done)).await {
                // An error means that the writer is gone already, which is what was asked for.
                let _ = closed.await;
            }
        })
    }
}

impl JournalReader for SqliteJournal {
    fn list(&self, query: EventQuery) -> BoxFuture<'_, Result<EventPage, ReadError>> {
        self.read(move |readers| readers.list(&query))
    }

    fn show(&self, id: EventId) -> BoxFuture<'_, Result<Option<EventDetail>, ReadError>> {
        self.read(move |readers| readers.show(id))
    }

    fn body(&self, id: EventId) -> BoxFuture<'_, Result<Option<StoredBody>, ReadError>> {
        self.read(move |readers| readers.body(id))
    }

    fn resolve(&self, alias: EventId) -> BoxFuture<'_, Result<Option<EventId>, ReadError>> {
        self.read(move |readers| readers.resolve(alias))
    }

    fn stats(&self) -> BoxFuture<'_, Result<Stats, ReadError>> {
        self.read(Readers::stats)
    }

    fn standings(&self, deliveries: Vec<DeliveryId>) -> BoxFuture<'_, Result<Vec<Option<Standing>>, ReadError>> {
        self.read(move |readers| readers.standings(&deliveries))
    }

    fn recent_keys(&self, limit: usize) -> BoxFuture<'_, Result<Vec<RecentKey>, ReadError>> {
        self.read(move |readers| readers.recent_keys(limit))
    }
}
