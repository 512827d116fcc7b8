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
//! The parts, in the order of an append: [`SqliteJournal::submit`] puts it on a bounded queue (`commands`); `writer` takes what
//! has gathered while the last commit ran, asks the `ledger` which keys are known, and stores the rest in one transaction
//! (`queries`); `syncer` answers; `follower` fills the search index behind it; `checkpoint` moves the log into the database
//! file. `reader` serves people from read-only connections, `search` finds what they look for. `place`, `connection` and `schema` check the ground before anything is accepted.
//!
//! On the way out, `deliveries` hands jobs to the same writer: `queue` takes and settles deliveries, `apply` runs the
//! user's statements (`user_sql`) in the transaction that settles them, `orders` does what operators ask, `forget` removes
//! what is old. `rehearse` tells at the start which of the user's statements would fail.

mod answered;
mod apply;
mod bloom;
mod busy;
pub(crate) mod checkpoint;
pub(crate) mod commands;
pub(crate) mod connection;
mod database_file;
mod deliveries;
mod entity;
mod follower;
mod forget;
mod groups;
mod helper;
mod ledger;
pub(crate) mod place;
#[cfg(feature = "planted")]
mod planted;
mod priority;
mod queries;
mod queue;
mod reader;
mod rehearse;
mod schema;
mod search;
mod self_test;
mod statements;
mod syncer;
mod user_sql;
pub(crate) mod writer;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};

use rusqlite::Connection;
use tokio::sync::{Semaphore, watch};

use super::sql::aliases;
use super::tally::Tally;
use super::{
    Alias, AppendError, BoxFuture, Durability, Incarnation, Journal, JournalState, KnownCopy, ReadError, SelfTestError,
    Ticket, WorkError,
};
use crate::clock::Clock;
use crate::event::NewEvents;
use crate::retry::Chance;
use crate::route::KnownLines;
use answered::Found;
use commands::{CommandQueue, QueueState};
use ledger::Recent;
use place::Place;
use reader::Readers;
use writer::{Job, Writer, WriterSetup};

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
    Sqlite(#[source] rusqlite::Error),
}

impl OpenError {
    /// What is wrong with the place of a file, or with the file.
    pub(crate) fn place<E: ToString>(path: &Path) -> impl Fn(E) -> Self + Copy {
        move |error| Self::Place { path: path.to_path_buf(), reason: error.to_string() }
    }
}

/// SQLite's own error, or what [`ledger`] found to be wrong.
impl From<rusqlite::Error> for OpenError {
    fn from(error: rusqlite::Error) -> Self {
        match error {
            rusqlite::Error::ToSqlConversionFailure(what) => Self::Ledger(what.to_string()),
            error => Self::Sqlite(error),
        }
    }
}

/// Each read has a connection with its own cache.
const READS_AT_ONCE: usize = 8;

/// The embedded journal. See the module's text.
pub struct SqliteJournal {
    queue: CommandQueue<Job>,
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
    queue: Arc<QueueState>,
    tally: Mutex<Tally>,
    /// Held while the tally moves into the tables: then its counts stand in neither place.
    flushing: Mutex<()>,
    /// How often the tally has moved into the tables. Grows under `flushing`.
    flushes: AtomicU64,
    /// Keys that may not be in the table yet.
    recent: Arc<RwLock<Recent>>,
    wal_pages: AtomicU64,
    index_lag: AtomicU64,
    /// Grows when deliveries may have become due.
    changes: watch::Sender<u64>,
}

impl Shared {
    fn changed(&self) {
        self.changes.send_modify(|count| *count = count.wrapping_add(1));
    }

    fn is_closed(&self) -> bool {
        self.queue.is_closed()
    }

    fn recent(&self) -> RwLockReadGuard<'_, Recent> {
        self.recent.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn tally(&self) -> MutexGuard<'_, Tally> {
        self.tally.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The tally as people may see it: not while it is on its way into the tables.
    fn with_tally<T>(&self, look: impl FnOnce(&Tally) -> T) -> T {
        let _settled = self.flushing.lock().unwrap_or_else(PoisonError::into_inner);
        look(&self.tally())
    }

    fn failing(&self) -> MutexGuard<'_, Option<String>> {
        self.queue.failing()
    }
}

impl SqliteJournal {
    /// Opens the file, making it if need be; migrates it, checks it and proves that it remembers keys. Blocking.
    pub fn open(options: &SqliteOptions) -> Result<Self, OpenError> {
        let (place, lock) = Place::claim(&options.path)?;
        let found = Found::look(&place.path, &lock)?;
        let (mut connection, _) = prepare(&place, &options.clock)?;
        if let Some(missing) = found.missing(&connection)? {
            let path = place.path.clone();
            if !options.accept_lost_log {
                return Err(OpenError::Incomplete { path, missing });
            }
            tracing::warn!(path = %path.display(), "{missing}. Accepted as the operator says: later copies of them are new events");
        }
        self_test::run(&mut connection, options.clock.now())??;
        let answered = answered::begin_use(&connection, &place.path, &lock)?;
        answered::set_in_use(&connection, true)?;
        // Into the file itself. If a reader is in the way, the helper's next pass does it.
        if let Err(error) = checkpoint::empty_the_log(&connection) {
            tracing::debug!(%error, "the database file does not say yet that it is in use");
        }
        // Before the first event can come with a time of the same clock.
        forget::look_at_clock(&connection, options.clock.now())?;
        queue::begin_anew(&connection, options.clock.steady())?;

        let (queue, commands) = CommandQueue::bounded(options.queue_limit, "the journal's writer has died");
        let shared = Arc::new(Shared { queue: Arc::clone(&queue.state), ..Shared::default() });
        let readers = Arc::new(Readers::new(&place.path, Arc::clone(&shared)));
        let setup = WriterSetup {
            path: place.path,
            clock: options.clock.clone(),
            _lock: lock,
            answered,
            readers: Arc::clone(&readers),
            shared: Arc::clone(&shared),
        };
        let writer = Writer::new(connection, setup, options.ledger_generation)?;
        std::thread::Builder::new()
            .name("journal-writer".to_owned())
            .spawn(move || writer.run(&commands))
            .map_err(OpenError::place(&options.path))?;
        Ok(Self {
            queue,
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
        let (place, _lock) = Place::claim(path)?;
        let (mut connection, applied) = prepare(&place, clock)?;
        self_test::run(&mut connection, clock.now())??;
        Ok(applied)
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

/// A connection to a file with the tables that this program expects, and the migrations that were applied now.
fn prepare(place: &Place, clock: &Clock) -> Result<(Connection, Vec<String>), OpenError> {
    let mut connection = checkpoint::open_emptied(&place.path)?;
    let applied = schema::migrate(&mut connection, clock.now())?;
    schema::check(&connection)?;
    place.sync_directory()?;
    Ok((connection, applied))
}

/// An identity that was never used before. Without random bytes there is no name, and nothing is shared.
fn drawn() -> Incarnation {
    let mut name = [0; 16];
    match aws_lc_rs::rand::fill(&mut name) {
        Ok(()) => Incarnation::named(&hex::encode(name)),
        Err(_) => Incarnation::nameless(),
    }
}

impl Journal for SqliteJournal {
    fn submit(&self, events: NewEvents) -> Result<Ticket, AppendError> {
        self.queue.submit(events)
    }

    fn note_duplicates(&self, copies: &[KnownCopy<'_>]) -> bool {
        self.shared.tally().add_all(copies)
    }

    fn keep_aliases(&self, kept: Vec<Alias>) -> BoxFuture<'_, Result<(), WorkError>> {
        self.share(async move |session| aliases::keep(session, &kept).await)
    }

    fn state(&self) -> JournalState {
        JournalState {
            kind: "sqlite",
            durability: self.durability,
            failing: self.shared.failing().clone(),
            queued: self.queue.commands.len(),
            queue_limit: self.queue.commands.capacity().unwrap_or_default(),
            index_lag: self.shared.index_lag.load(Ordering::Relaxed),
            wal_pages: self.shared.wal_pages.load(Ordering::Relaxed),
        }
    }

    fn incarnation(&self) -> &Incarnation {
        &self.incarnation
    }

    fn self_test(&self) -> BoxFuture<'_, Result<(), SelfTestError>> {
        let tested = self.work_at(|context| self_test::run(context.connection, context.wall));
        Box::pin(async move {
            tested.await.unwrap_or_else(|error| match error {
                WorkError::Unavailable(reason) | WorkError::Unsupported(reason) => Err(SelfTestError(reason)),
            })
        })
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(self.queue.close())
    }
}
