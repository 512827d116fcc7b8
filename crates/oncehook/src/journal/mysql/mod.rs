//! The journal on MariaDB and MySQL, in tables named `oncehook_…` beside the user's own. Any number of nodes share it.
//!
//! Promises: an answered append is committed on a server that syncs its log at every commit (the settings are read back on
//! every connection, not assumed); the unique key of the ledger decides duplicates between all nodes; the schema is the one
//! this program expects, or it does not start; a lost database is a refusal at once, and is taken up again without a
//! restart. Times that decide anything are of the database's clock.
//!
//! Does not: promise more than the server does. After a failover to a replica that misses the last commits, those are
//! gone. Needs MariaDB 10.6 or MySQL 8.0.16; the tests run on MariaDB.
//!
//! The parts, in the order of an append: [`MysqlJournal::submit`] puts it on the bounded queue of a lane; `writer` takes
//! what has gathered while the last commit ran, and stores it in one transaction (`queries`); `follower` adds up
//! duplicates behind it and marks what lists will look for (`search`). `reader` serves people. `connection`, `ground` and `schema` check what all of it stands on.
//!
//! On the way out, `deliveries` is what workers and operators call: `queue` takes and settles deliveries, `apply` runs the
//! user's statements (`user_sql`) in the transaction that settles them and `function` the user's Rust functions, `orders` does what operators ask, `forget` removes
//! what is old, `wake` looks for what other nodes did. Where order matters, `turn` says whose turn it is and `lines` knows who
//! stands where.

mod aliases;
mod apply;
mod connection;
mod deliveries;
mod ends;
mod engine_error;
mod follower;
mod forget;
mod function;
mod ground;
mod guard;
mod incarnation;
mod lines;
mod many_rows;
mod orders;
mod queries;
mod queue;
mod reader;
mod rehearse;
mod row;
mod schema;
mod search;
mod self_test;
mod settle;
mod standing;
mod tls;
mod turn;
mod user_sql;
mod wake;
mod writer;

use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use oncehook_verify::UnixMicros;
use tokio::sync::{mpsc, oneshot, watch};

use super::silence::Silence;
use super::tally::Tally;
use super::{
    Alias, AppendError, BoxFuture, Durability, EventDetail, EventPage, EventQuery, Incarnation, Journal,
    JournalReader, JournalState, KnownCopy, Layer, ReadError, RecentKey, SelfTestError, Standing, Stats,
    StoredBody, Ticket, WorkError,
};
use crate::clock::Clock;
use crate::delivery::{DeliveryId, RouteName};
use crate::event::{EventId, EventIds, NewEvent, NewEvents, SourceName};
use crate::retry::Chance;
use crate::route::KnownLines;
use connection::{Connector, Pool, Purpose};
use engine_error::EngineError;
pub use guard::MysqlElsewhere;
use reader::Readers;
pub use rehearse::{Misfit, check_url, forbidden, shown_url};
use writer::{Called, Command, Lane, Work};

/// How the journal on MariaDB or MySQL is set up.
#[derive(Clone)]
pub struct MysqlOptions {
    /// `mysql://user:password@host:port/database`; several hosts may be named, the first that can be written to is taken.
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

impl MysqlOptions {
    /// The usual set-up for a database.
    #[must_use]
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

impl std::fmt::Debug for MysqlOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The URL holds a password.
        f.debug_struct("MysqlOptions").field("lanes", &self.lanes).finish_non_exhaustive()
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
    /// The server said no.
    #[error("the database: {0}")]
    Engine(String),
}

impl From<EngineError> for OpenError {
    fn from(error: EngineError) -> Self {
        if error.unsound {
            Self::Durability(error.told)
        } else if error.is_away() {
            Self::Away(error.told)
        } else {
            Self::Engine(error.told)
        }
    }
}

/// The longest that a function may take, whatever the options say: its delivery is leased, and its session idle, for little longer.
const FUNCTION_TIME: Duration = Duration::from_secs(10);

/// The queues hold at most this many bytes of bodies, whoever still waits for them.
const QUEUE_BYTES: usize = 64 << 20;

/// Reads at once; further ones wait.
const READS_AT_ONCE: usize = 4;

/// The database's time in microseconds since 1970, whatever the time zone of session and server.
const NOW: &str = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))";

/// Rows of `totals` per source. More than there are writers, mostly, so that they do not wait for each other.
const SHARDS: u64 = 64;

/// The journal on MariaDB or MySQL. See the module's text.
pub struct MysqlJournal {
    lanes: Vec<mpsc::Sender<Command>>,
    lane_limit: usize,
    hasher: RandomState,
    workers: Arc<Pool>,
    readers: Readers,
    shared: Arc<Shared>,
    /// Where forgetting has come to.
    round: Mutex<forget::Round>,
    chance: Mutex<Chance>,
    /// Routes whose last batch was full.
    busy: Mutex<HashSet<RouteName>>,
    /// The rules of routes that look at entities.
    lines: KnownLines,
    /// How long a function may take.
    function_time: Duration,
    /// Ends what runs behind the accepts, also by being dropped.
    end: watch::Sender<bool>,
}

/// What the tasks of a journal look at together.
struct Shared {
    clock: Clock,
    /// Set once, under the write lock. Appends are queued under the read lock, so none can slip in behind a lane's back
    /// and wait for ever.
    closed: RwLock<bool>,
    ids: Mutex<EventIds>,
    tally: Mutex<Tally>,
    /// Held for writing while counts move from the tally into the tables, for reading while somebody looks at both.
    moving: tokio::sync::RwLock<()>,
    /// Why a lane cannot store, by lane.
    failing: Mutex<Vec<Option<String>>>,
    /// A key that some lane has stored, for lanes that have stored none yet.
    witness: Mutex<Option<Called>>,
    /// How long the database has owed a lane its answer.
    silence: Silence,
    /// Which life of the database this is.
    incarnation: Incarnation,
    /// Bytes of bodies in the queues.
    queued_bytes: AtomicUsize,
    /// Grows when deliveries may have become due.
    changes: watch::Sender<u64>,
    /// For counts that are written behind the accepts.
    shard: u16,
    /// How far the database's clock is ahead of this node's, in microseconds. Looked at every second.
    database_ahead: AtomicI64,
}

impl Shared {
    /// Deliveries may have become due.
    fn changed(&self) {
        self.changes.send_modify(|count| *count = count.wrapping_add(1));
    }

    fn tally(&self) -> MutexGuard<'_, Tally> {
        self.tally.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The id that an event gets if it is new: its own, if it has one. Later ones are above it.
    fn id_for(&self, event: &NewEvent) -> EventId {
        let mut ids = self.ids.lock().unwrap_or_else(PoisonError::into_inner);
        match event.id {
            None => ids.next(event.received_at),
            Some(id) => {
                ids.stay_above(id.sequence());
                id
            }
        }
    }

    /// The time that stands in for the database's, if one was given.
    fn given_time(&self) -> Option<i64> {
        self.clock.given().map(|now| now.0)
    }

    /// About the database's time. Where it must be exact, the database is asked.
    fn database_time(&self) -> i64 {
        let ahead = self.clock.given().map_or_else(|| self.database_ahead.load(Ordering::Relaxed), |_| 0);
        self.clock.now().0.saturating_add(ahead)
    }

    fn set_failing(&self, lane: usize, reason: Option<String>) {
        let mut failing = self.failing.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(place) = failing.get_mut(lane) {
            *place = reason;
        }
    }

    fn failing(&self) -> Option<String> {
        let failing = self.failing.lock().unwrap_or_else(PoisonError::into_inner);
        failing.iter().flatten().next().cloned().or_else(|| self.silence.told())
    }
}

impl MysqlJournal {
    /// Connects, migrates, checks the ground and proves that keys are remembered. Must be called inside a tokio runtime.
    pub async fn open(options: &MysqlOptions) -> Result<Self, OpenError> {
        let connector = Arc::new(Connector::new(&options.url, options.handler_time)?);
        let mut first = connector.open(Purpose::Append).await?;
        schema::migrate(&mut first).await?;
        schema::check(&mut first).await?;
        self_test::run(&mut first).await?;
        let ahead = first.now(None).await? - options.clock.now().0;
        let last = queries::last_id(&mut first).await?.map_or(0, |id| id.sequence());

        let lanes = options.lanes.max(1);
        let shared = Arc::new(Shared {
            clock: options.clock.clone(),
            closed: RwLock::new(false),
            ids: Mutex::new(EventIds::above(last, random())),
            tally: Mutex::default(),
            moving: tokio::sync::RwLock::new(()),
            failing: Mutex::new(vec![None; lanes]),
            witness: Mutex::default(),
            silence: Silence::of(lanes),
            incarnation: Incarnation::named(&incarnation::name(&mut first).await?),
            queued_bytes: AtomicUsize::new(0),
            changes: watch::Sender::new(0),
            shard: random_shard(),
            database_ahead: AtomicI64::new(ahead),
        });
        let lane_limit = options.queue_limit.div_ceil(lanes).max(1);
        let mut queues = Vec::with_capacity(lanes);
        let mut session = Some(first);
        for number in 0..lanes {
            let session = match session.take() {
                Some(session) => session,
                None => connector.open(Purpose::Append).await?,
            };
            let (queue, commands) = mpsc::channel(lane_limit);
            let lane = Lane {
                number,
                shard: random_shard(),
                connector: Arc::clone(&connector),
                shared: Arc::clone(&shared),
                session: Some(session),
                witness: None,
            };
            tokio::spawn(lane.run(commands));
            queues.push(queue);
        }
        let workers = Arc::new(Pool::new(Arc::clone(&connector), Purpose::Work, options.workers.max(2)));
        let end = watch::Sender::new(false);
        tokio::spawn(follower::run(Arc::clone(&shared), Arc::clone(&workers), end.subscribe()));
        tokio::spawn(follower::mark(Arc::clone(&shared), Arc::clone(&workers), end.subscribe()));
        tokio::spawn(incarnation::watch(Arc::clone(&shared), Arc::clone(&connector), end.subscribe()));
        tokio::spawn(wake::look(Arc::clone(&shared), Arc::clone(&workers), end.subscribe()));
        let readers = Readers::new(Pool::new(connector, Purpose::Read, READS_AT_ONCE), Arc::clone(&shared));
        Ok(Self {
            lanes: queues,
            lane_limit,
            hasher: RandomState::new(),
            workers,
            readers,
            shared,
            round: Mutex::default(),
            chance: Mutex::new(Chance::random()),
            busy: Mutex::default(),
            lines: KnownLines::default(),
            function_time: options.handler_time.min(FUNCTION_TIME),
            end,
        })
    }

    /// Makes or upgrades the schema and stops. Safe to repeat, and safe to be killed at any moment.
    pub async fn migrate(url: &str) -> Result<Vec<String>, OpenError> {
        let connector = Connector::new(url, Duration::from_secs(60))?;
        let mut session = connector.open(Purpose::Append).await?;
        let applied = schema::migrate(&mut session).await?;
        schema::check(&mut session).await?;
        self_test::run(&mut session).await?;
        Ok(applied)
    }

    /// What the catalogue says about the schema. For the test that keeps the expected shape up to date.
    #[doc(hidden)]
    pub async fn shape(url: &str) -> Result<Vec<String>, OpenError> {
        let mut session = Connector::new(url, Duration::from_secs(60))?.open(Purpose::Append).await?;
        schema::migrate(&mut session).await?;
        schema::shape(&mut session).await
    }
}

fn random() -> u64 {
    let mut bytes = [0; 8];
    match aws_lc_rs::rand::fill(&mut bytes) {
        Ok(()) => u64::from_ne_bytes(bytes),
        // The standard library has a source of its own for its hashers.
        Err(_) => RandomState::new().hash_one(0),
    }
}

fn random_shard() -> u16 {
    u16::try_from(random() % SHARDS).unwrap_or(0)
}

impl Journal for MysqlJournal {
    fn submit(&self, events: NewEvents) -> Result<Ticket, AppendError> {
        let closed = self.shared.closed.read().unwrap_or_else(PoisonError::into_inner);
        if *closed {
            return Err(AppendError::Closed);
        }
        // Copies of a key meet in one lane. A request with several keys goes with its first.
        let key = events.first().map(|event| (event.source.as_str(), event.key.as_bytes()));
        let lanes = u64::try_from(self.lanes.len()).unwrap_or(1).max(1);
        let lane = usize::try_from(self.hasher.hash_one(key) % lanes).unwrap_or(0);
        if self.shared.silence.is_too_long() {
            // Whoever waits in that queue would hear the same later.
            return Err(AppendError::Unavailable("the database does not answer".to_owned()));
        }
        let lane = self.lanes.get(lane).ok_or(AppendError::Closed)?;
        let (answer, ticket) = oneshot::channel();
        let work = Work { events, answer };
        let bytes = work.bytes();
        if self.shared.queued_bytes.fetch_add(bytes, Ordering::Relaxed) > QUEUE_BYTES {
            self.shared.queued_bytes.fetch_sub(bytes, Ordering::Relaxed);
            return Err(AppendError::Full);
        }
        lane.try_send(Command::Append(work)).map_err(|error| {
            self.shared.queued_bytes.fetch_sub(bytes, Ordering::Relaxed);
            match error {
                mpsc::error::TrySendError::Full(_) => AppendError::Full,
                mpsc::error::TrySendError::Closed(_) => AppendError::Closed,
            }
        })?;
        Ok(ticket)
    }

    fn note_duplicate(
        &self,
        event: EventId,
        source: &SourceName,
        at: UnixMicros,
        peer: IpAddr,
        layer: Layer,
    ) -> bool {
        self.note_duplicates(&[KnownCopy { event, source, at, peer, layer }])
    }

    fn note_duplicates(&self, copies: &[KnownCopy<'_>]) -> bool {
        self.shared.tally().add_all(copies)
    }

    fn keep_aliases(&self, kept: Vec<Alias>) -> BoxFuture<'_, Result<(), WorkError>> {
        Box::pin(self.keep(kept))
    }

    fn largest_body(&self) -> usize {
        self.workers.largest_body()
    }

    fn incarnation(&self) -> &Incarnation {
        &self.shared.incarnation
    }

    fn state(&self) -> JournalState {
        let queued = self.lanes.iter().map(|lane| lane.max_capacity() - lane.capacity()).sum();
        JournalState {
            kind: "mysql",
            durability: Durability::DurableFsync,
            failing: self.shared.failing(),
            queued,
            queue_limit: self.lane_limit * self.lanes.len(),
            index_lag: 0,
            wal_pages: 0,
        }
    }

    fn self_test(&self) -> BoxFuture<'_, Result<(), SelfTestError>> {
        Box::pin(async move {
            let mut session = self.workers.take().await.map_err(|error| SelfTestError(error.told))?;
            self_test::run(&mut session).await?;
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
            follower::flush(&self.shared, &self.workers).await;
            self.workers.close();
        })
    }
}

impl JournalReader for MysqlJournal {
    fn list(&self, query: EventQuery) -> BoxFuture<'_, Result<EventPage, ReadError>> {
        Box::pin(async move { self.readers.list(&query).await })
    }

    fn show(&self, id: EventId) -> BoxFuture<'_, Result<Option<EventDetail>, ReadError>> {
        Box::pin(self.readers.show(id))
    }

    fn body(&self, id: EventId) -> BoxFuture<'_, Result<Option<StoredBody>, ReadError>> {
        Box::pin(self.readers.body(id))
    }

    fn stats(&self) -> BoxFuture<'_, Result<Stats, ReadError>> {
        Box::pin(self.readers.stats())
    }
    fn resolve(&self, alias: EventId) -> BoxFuture<'_, Result<Option<EventId>, ReadError>> {
        Box::pin(self.readers.resolve(alias))
    }

    fn standings(
        &self,
        deliveries: Vec<DeliveryId>,
    ) -> BoxFuture<'_, Result<Vec<Option<Standing>>, ReadError>> {
        Box::pin(async move { self.readers.standings(&deliveries).await })
    }

    fn recent_keys(&self, limit: usize) -> BoxFuture<'_, Result<Vec<RecentKey>, ReadError>> {
        Box::pin(self.readers.recent_keys(limit))
    }
}
