//! The journal on a database server, written once for all engines. Any number of nodes share one database.
//!
//! Promises: an answered append is committed on a primary that syncs its log (the settings are read back on every connection,
//! not assumed); the unique key of the ledger decides duplicates between all nodes; the schema is the one this program
//! expects, or the journal does not open; a lost database is a refusal at once, and is taken up again without a restart.
//! Times that decide anything are of the database's clock.
//!
//! Does not: promise more than the server does. After a failover to a replica that misses the last commits, those are gone.
//!
//! What is an engine's own (connections, schema, statements) stands in `postgres` and `mysql`, behind [`engine::Engine`].
//!
//! The parts, in the order of an append: [`ServerJournal::submit`] puts it on the bounded queue of a lane; `lane` takes what has
//! gathered while the last batch was stored, and stores it; `duplicates` adds up copies behind it. `index` fills the search
//! index, and `read` serves people.

pub(in crate::journal) mod append;
pub(in crate::journal) mod deliver;
mod deliveries;
mod duplicates;
pub(in crate::journal) mod engine;
pub(in crate::journal) mod external;
pub(in crate::journal) mod hosts;
mod identity;
pub(in crate::journal) mod index;
mod lane;
mod operate;
#[cfg(feature = "planted")]
mod planted;
pub(in crate::journal) mod pool;
pub(in crate::journal) mod read;
pub(in crate::journal) mod rehearse;
pub(in crate::journal) mod schema;
mod self_test;
pub(in crate::journal) mod shared;
pub(in crate::journal) mod user_sql;
pub(in crate::journal) mod work;

use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot, watch};

use super::{
    Alias, AppendError, BoxFuture, Durability, Incarnation, Journal, JournalState, KnownCopy, SelfTestError, Ticket,
    WorkError,
};
use crate::clock::Clock;
use crate::delivery::RouteName;
use crate::event::NewEvents;
use crate::journal::sql::story::Tells;
use crate::journal::sql::{aliases, forget};
pub(in crate::journal) use crate::journal::sql::{error, value};
use crate::retry::Chance;
use crate::route::KnownLines;
use append::Appends;
use engine::{Connected, Engine, Purpose, Session};
use error::EngineError;
use lane::{Command, Lane, Request};
use pool::Pool;
use read::Reads;
use shared::{Shared, random_shard};
use value::Row;

/// How the journal on a database server is set up.
#[derive(Clone)]
pub struct ServerOptions {
    /// `postgres://user:password@host:port/database` or `mysql://…`; several hosts may be named, the primary is found among
    /// them.
    pub url: String,
    /// How many appends may wait. Beyond that they are refused.
    pub queue_limit: usize,
    /// Connections that append.
    pub lanes: usize,
    /// Connections for workers and operators.
    pub workers: usize,
    /// How long a statement of a `sql` handler may take, and a function as a whole; for a function ten seconds at most.
    pub handler_time: Duration,
    /// Where time comes from that is not the database's. A manual clock (in tests) also stands in for the database's.
    pub clock: Clock,
}

impl ServerOptions {
    /// The usual set-up for a database.
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            queue_limit: 8_192,
            lanes: 2,
            workers: 8,
            handler_time: Duration::from_secs(10),
            clock: Clock::system(),
        }
    }
}

impl std::fmt::Debug for ServerOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The URL holds a password.
        f.debug_struct("ServerOptions").field("lanes", &self.lanes).finish_non_exhaustive()
    }
}

/// Why the journal did not open.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The URL cannot be used.
    #[error("the database URL: {0}")]
    Url(String),
    /// The server is not set up so that an acknowledged event is durable.
    #[error("durability check failed: {0}")]
    Durability(String),
    /// The schema is not what this program expects.
    #[error("schema check failed: {0}")]
    Schema(String),
    /// Keys are not remembered as they must be.
    #[error(transparent)]
    SelfTest(#[from] SelfTestError),
    /// The server cannot be reached, or cannot serve yet. Later it may.
    #[error("the database is not there: {0}")]
    Away(String),
    /// Connections do not keep their sessions.
    #[error("{0}")]
    Pooler(&'static str),
    /// The server refused.
    #[error("the database: {0}")]
    Engine(String),
}

impl From<EngineError> for OpenError {
    fn from(error: EngineError) -> Self {
        if error.meaning.unsound {
            Self::Durability(error.message)
        } else if error.meaning.away {
            Self::Away(error.message)
        } else {
            Self::Engine(error.message)
        }
    }
}

/// The queues hold at most this many bytes of bodies.
const QUEUE_BYTES: usize = 64 << 20;

/// Reads at once; further ones wait.
pub(in crate::journal) const READS_AT_ONCE: usize = 4;

/// The longest that a function may take, whatever the options say: its delivery is leased, and its session idle, for little
/// longer.
const FUNCTION_TIME: Duration = Duration::from_secs(10);

/// The journal on a database server. See the module's text.
#[expect(private_bounds, reason = "engines are this crate's own; users name the journals by their aliases")]
pub struct ServerJournal<E: Engine> {
    lanes: Vec<mpsc::Sender<Command>>,
    lane_limit: usize,
    hasher: RandomState,
    pub(in crate::journal) workers: Arc<Pool<E>>,
    pub(in crate::journal) readers: Pool<E>,
    pub(in crate::journal) shared: Arc<Shared>,
    pub(in crate::journal) chance: Mutex<Chance>,
    /// The rules of routes that look at entities.
    pub(in crate::journal) lines: KnownLines,
    /// Routes whose last batch was full.
    pub(in crate::journal) busy: Mutex<HashSet<RouteName>>,
    /// How long a function may take.
    pub(in crate::journal) function_time: Duration,
    /// Where forgetting has come to.
    round: Mutex<forget::Round<<E::Session as forget::Forgets>::Place>>,
    /// Ends what runs behind the accepts, also by being dropped.
    end: watch::Sender<bool>,
}

#[expect(private_bounds, reason = "engines are this crate's own")]
impl<E: Reads + Appends> ServerJournal<E> {
    /// Connects, makes the schema, checks durability and proves that keys are remembered. Must be called inside a tokio runtime.
    pub async fn open(options: &ServerOptions) -> Result<Self, OpenError> {
        let engine = Arc::new(E::new(&options.url, options.handler_time)?);
        let mut first = engine.open(Purpose::Append).await?;
        schema::migrate(engine.as_ref(), &mut first).await?;
        schema::check::<E>(&mut first).await?;
        if let Err(error) = self_test::run(engine.as_ref(), &mut first).await {
            return Err(if first.is_closed() { OpenError::Away(error.0) } else { error.into() });
        }
        E::make_ready(&mut first, options.clock.given().map(|now| now.0)).await?;
        let ahead = first.database_time().await? - options.clock.now().0;
        // New ids stay above it. If there are no events left, there is nothing that they could disturb.
        let last = first.row(E::Session::LAST_ID, &[]).await?.map(|row| row.event(0)).transpose()?;
        first.commit_single().await?;
        let identity = identity::name(engine.as_ref(), &mut first).await?;

        let lanes = options.lanes.max(1);
        let shared = Arc::new(Shared::new(options.clock.clone(), lanes, last, &identity, ahead));
        let lane_limit = options.queue_limit.div_ceil(lanes).max(1);
        let mut queues = Vec::with_capacity(lanes);
        let mut session = Some(first);
        for number in 0..lanes {
            let session = match session.take() {
                Some(session) => session,
                None => engine.open(Purpose::Append).await?,
            };
            let (queue, commands) = mpsc::channel(lane_limit);
            let lane = Lane {
                number,
                shard: random_shard(),
                engine: Arc::clone(&engine),
                shared: Arc::clone(&shared),
                session: Some(session),
                memory: E::LaneMemory::default(),
                asked: Instant::now(),
            };
            tokio::spawn(lane.run(commands));
            queues.push(queue);
        }
        let workers = Arc::new(Pool::new(Arc::clone(&engine), Purpose::Work, options.workers.max(2)));
        let end = watch::Sender::new(false);
        tokio::spawn(duplicates::run(Arc::clone(&shared), Arc::clone(&workers), end.subscribe()));
        tokio::spawn(index::run(Arc::clone(&shared), Arc::clone(&workers), end.subscribe()));
        tokio::spawn(identity::watch(Arc::clone(&shared), Arc::clone(&engine), end.subscribe()));
        let sharing = E::share_changes(Arc::clone(&shared), Arc::clone(&workers), end.subscribe()).await?;
        tokio::spawn(sharing);
        Ok(Self {
            lanes: queues,
            lane_limit,
            hasher: RandomState::new(),
            workers,
            readers: Pool::new(engine, Purpose::Read, READS_AT_ONCE),
            shared,
            chance: Mutex::new(Chance::random()),
            lines: KnownLines::default(),
            busy: Mutex::default(),
            function_time: options.handler_time.min(FUNCTION_TIME),
            round: Mutex::default(),
            end,
        })
    }

    /// Makes the schema and stops. Safe to repeat, and safe to be killed at any moment. Returns what was applied.
    pub async fn migrate(url: &str) -> Result<Vec<String>, OpenError> {
        let engine = E::new(url, Duration::from_secs(60))?;
        let mut session = engine.open(Purpose::Append).await?;
        let applied = schema::migrate(&engine, &mut session).await?;
        schema::check::<E>(&mut session).await?;
        self_test::run(&engine, &mut session).await?;
        Ok(applied)
    }

    /// What the catalogue says about the schema. For the test that keeps the expected shape up to date.
    #[doc(hidden)]
    pub async fn shape(url: &str) -> Result<Vec<String>, OpenError> {
        let engine = E::new(url, Duration::from_secs(60))?;
        let mut session = engine.open(Purpose::Append).await?;
        schema::migrate(&engine, &mut session).await?;
        schema::shape::<E>(&mut session).await
    }
}

impl<E: Appends> Journal for ServerJournal<E> {
    fn submit(&self, events: NewEvents) -> Result<Ticket, AppendError> {
        let closed = self.shared.closed.read().unwrap_or_else(PoisonError::into_inner);
        if *closed {
            return Err(AppendError::Closed);
        }
        if self.shared.silence.is_too_long() {
            // A sender that waited in the queue would get the same answer later.
            return Err(AppendError::Unavailable("the database does not answer".to_owned()));
        }
        // Copies of a key meet in one lane. A request with several keys goes with its first.
        let key = events.first().map(|event| (event.source.as_str(), event.key.as_bytes()));
        let lanes = u64::try_from(self.lanes.len()).unwrap_or(1).max(1);
        let lane = usize::try_from(self.hasher.hash_one(key) % lanes).unwrap_or(0);
        let lane = self.lanes.get(lane).ok_or(AppendError::Closed)?;
        let (answer, ticket) = oneshot::channel();
        let request = Request { events, answer };
        let bytes = request.bytes();
        if self.shared.queued_bytes.fetch_add(bytes, Ordering::Relaxed) > QUEUE_BYTES {
            self.shared.queued_bytes.fetch_sub(bytes, Ordering::Relaxed);
            return Err(AppendError::Full);
        }
        lane.try_send(Command::Append(request)).map_err(|error| {
            self.shared.queued_bytes.fetch_sub(bytes, Ordering::Relaxed);
            match error {
                mpsc::error::TrySendError::Full(_) => AppendError::Full,
                mpsc::error::TrySendError::Closed(_) => AppendError::Closed,
            }
        })?;
        Ok(ticket)
    }

    fn note_duplicates(&self, copies: &[KnownCopy<'_>]) -> bool {
        self.shared.tally().add_all(copies)
    }

    fn keep_aliases(&self, kept: Vec<Alias>) -> BoxFuture<'_, Result<(), WorkError>> {
        Box::pin(async move { work::work!(self, |session| aliases::keep(&mut *session, &kept)) })
    }

    fn largest_body(&self) -> usize {
        self.workers.engine.largest_body()
    }

    fn state(&self) -> JournalState {
        let queued = self.lanes.iter().map(|lane| lane.max_capacity() - lane.capacity()).sum();
        JournalState {
            kind: E::KIND,
            durability: Durability::DurableFsync,
            failing: self.shared.failing(),
            queued,
            queue_limit: self.lane_limit * self.lanes.len(),
            index_lag: 0,
            wal_pages: 0,
        }
    }

    fn incarnation(&self) -> &Incarnation {
        &self.shared.incarnation
    }

    fn self_test(&self) -> BoxFuture<'_, Result<(), SelfTestError>> {
        Box::pin(async move {
            let mut session = self.workers.take().await.map_err(|error| SelfTestError(error.message))?;
            self_test::run(self.workers.engine.as_ref(), &mut session).await?;
            session.keep();
            Ok(())
        })
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            *self.shared.closed.write().unwrap_or_else(PoisonError::into_inner) = true;
            for lane in &self.lanes {
                let (done, closed) = oneshot::channel();
                if lane.send(Command::Close(done)).await.is_ok() {
                    // An error means that the lane is gone already, which is what was asked for.
                    let _ = closed.await;
                }
            }
            self.end.send_replace(true);
            let _moving = self.shared.moving.write().await;
            duplicates::flush(&self.shared, &self.workers).await;
            self.workers.close();
        })
    }
}
