//! The journal on PostgreSQL, in a schema of its own (`oncehook`) beside the user's tables. Any number of nodes share it.
//!
//! Promises: an answered append is committed on a primary that syncs its log (`fsync`, `full_page_writes` and
//! `synchronous_commit` are read back on every connection, not assumed); the unique key of the ledger decides duplicates
//! between all nodes; the schema is the one this program expects, or it does not start; a lost database is a refusal at
//! once, and is taken up again without a restart. Times that decide anything are of the database's clock.
//!
//! Does not: promise more than the server does. After a failover to a replica that misses the last commits, those are
//! gone. Needs PostgreSQL 14 or later, and connections that keep their session (`pooler` refuses others).
//!
//! The parts, in the order of an append: [`PostgresJournal::submit`] puts it on the bounded queue of a lane; `writer` takes
//! what has gathered while the last statement ran, and stores it with one statement (`queries`); `follower` adds up
//! duplicates behind it and marks what lists will look for (`search`). `reader` serves people. `connection` and `schema` check the ground before anything is accepted.
//!
//! On the way out, `deliveries` is what workers and operators call: `queue` takes and settles deliveries (from its `front` on), `apply` runs the
//! user's statements (`user_sql`, `wrapped`) and `function` the user's Rust code in the transaction that settles them, `orders` does what operators ask, `forget` removes
//! what is old, `wake` tells other nodes. `guard` is for routes whose effects are in another database than the journal.

mod aliases;
mod apply;
mod connection;
mod days;
mod deliveries;
mod follower;
mod forget;
mod front;
mod function;
mod guard;
mod hosts;
mod incarnation;
mod lines;
mod orders;
mod pooler;
mod queries;
mod queue;
mod reader;
mod rehearse;
mod schema;
mod search;
mod self_test;
mod settle;
mod standing;
mod sweep;
mod tls;
mod turn;
mod user_sql;
mod wake;
mod wrapped;
mod writer;

use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use oncehook_verify::UnixMicros;
use tokio::sync::{Notify, mpsc, oneshot, watch};

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
use connection::{Connector, EngineError, Pool, Purpose};
pub use guard::PostgresElsewhere;
use reader::Readers;
pub use rehearse::{Misfit, check_url, forbidden, shown_url};
use writer::{Command, Lane, Work};

/// How the journal on PostgreSQL is set up.
#[derive(Clone)]
pub struct PostgresOptions {
    /// `postgres://user:password@host:port/database`; several hosts may be named, the primary is found among them.
    pub url: String,
    /// How many appends may wait. Beyond that they are refused.
    pub queue_limit: usize,
    /// Connections that append.
    pub lanes: usize,
    /// Connections for workers and operators.
    pub workers: usize,
    /// How long a statement of a `sql` handler may take.
    pub handler_time: Duration,
    /// Where time comes from that is not the database's. A manual clock (in tests) also stands in for the database's.
    pub clock: Clock,
}

impl PostgresOptions {
    /// The usual set-up for a database.
    #[must_use]
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            queue_limit: 8_192,
            lanes: 2,
            workers: 8,
            handler_time: HANDLER_TIME,
            clock: Clock::system(),
        }
    }
}

impl std::fmt::Debug for PostgresOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The URL holds a password.
        f.debug_struct("PostgresOptions").field("lanes", &self.lanes).finish_non_exhaustive()
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
    /// The server said no.
    #[error("PostgreSQL: {0}")]
    Engine(String),
}

impl From<EngineError> for OpenError {
    fn from(error: EngineError) -> Self {
        if error.constraint.as_deref() == Some(connection::DURABILITY) {
            Self::Durability(error.told)
        } else if error.is_away() {
            Self::Away(error.told)
        } else {
            Self::Engine(error.told)
        }
    }
}

/// The queues hold at most this many bytes of bodies, whoever still waits for them.
const QUEUE_BYTES: usize = 64 << 20;

/// How long a statement of a `sql` handler may take, unless told otherwise.
const HANDLER_TIME: Duration = Duration::from_secs(10);

/// Reads at once; further ones wait.
const READS_AT_ONCE: usize = 4;

/// Rows of `totals` per source. More than there are writers, mostly, so that they do not wait for each other.
const SHARDS: u64 = 64;

/// The journal on PostgreSQL. See the module's text.
pub struct PostgresJournal {
    lanes: Vec<mpsc::Sender<Command>>,
    lane_limit: usize,
    hasher: RandomState,
    workers: Arc<Pool>,
    readers: Readers,
    shared: Arc<Shared>,
    /// Where forgetting has come to.
    round: Mutex<forget::Round>,
    chance: Mutex<Chance>,
    lines: KnownLines,
    /// Where the queues of routes begin.
    fronts: front::Fronts,
    /// Routes whose last batch was full.
    busy: Mutex<HashSet<RouteName>>,
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
    /// How long the database has owed a lane its answer.
    silence: Silence,
    /// Bytes of bodies in the queues.
    queued_bytes: AtomicUsize,
    /// Which life of the database this is.
    incarnation: Incarnation,
    /// Grows when deliveries may have become due.
    changes: watch::Sender<u64>,
    /// Other nodes should be told.
    announce: Notify,
    /// A name for this process, to know its own notifications.
    node: String,
    /// For counts that are written behind the accepts.
    shard: i16,
    /// How far the database's clock is ahead of this node's, in microseconds. Looked at every second.
    database_ahead: AtomicI64,
}

impl Shared {
    /// Deliveries may have become due, and this node did it.
    fn changed(&self) {
        self.woken();
        self.announce.notify_one();
    }

    /// Deliveries may have become due.
    fn woken(&self) {
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

impl PostgresJournal {
    /// Connects, migrates, checks the ground and proves that keys are remembered. Must be called inside a tokio runtime.
    pub async fn open(options: &PostgresOptions) -> Result<Self, OpenError> {
        let connector = Arc::new(Connector::new(&options.url, options.handler_time)?);
        let first = connector.open(Purpose::Append).await?;
        pooler::refuse(&connector, &first).await?;
        schema::migrate(&first).await?;
        schema::check(&first).await?;
        if let Err(error) = self_test::run(&first).await {
            return Err(if first.is_closed() { OpenError::Away(error.0) } else { error.into() });
        }
        days::make(&first, options.clock.given().map(|now| now.0), days::When::Start).await?;
        let last = queries::last_id(&first).await?.map_or(0, |id| id.sequence());
        let ahead = search::time(&first).await? - options.clock.now().0;

        let lanes = options.lanes.max(1);
        let shared = Arc::new(Shared {
            clock: options.clock.clone(),
            closed: RwLock::new(false),
            ids: Mutex::new(EventIds::above(last, random())),
            tally: Mutex::default(),
            moving: tokio::sync::RwLock::new(()),
            failing: Mutex::new(vec![None; lanes]),
            silence: Silence::of(lanes),
            queued_bytes: AtomicUsize::new(0),
            incarnation: Incarnation::named(&incarnation::name(&first).await?),
            changes: watch::Sender::new(0),
            announce: Notify::new(),
            node: format!("{:016x}", random()),
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
                wary: 0,
            };
            tokio::spawn(lane.run(commands));
            queues.push(queue);
        }
        let workers = Arc::new(Pool::new(Arc::clone(&connector), Purpose::Work, options.workers.max(2)));
        let end = watch::Sender::new(false);
        tokio::spawn(follower::run(Arc::clone(&shared), Arc::clone(&workers), end.subscribe()));
        tokio::spawn(follower::mark(Arc::clone(&shared), Arc::clone(&workers), end.subscribe()));
        tokio::spawn(wake::announce(Arc::clone(&shared), Arc::clone(&workers), end.subscribe()));
        tokio::spawn(incarnation::watch(Arc::clone(&shared), Arc::clone(&connector), end.subscribe()));
        let ear = wake::hear(&shared, &connector).await?;
        tokio::spawn(wake::listen(Arc::clone(&shared), Arc::clone(&connector), ear, end.subscribe()));
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
            lines: KnownLines::default(),
            fronts: front::Fronts::default(),
            busy: Mutex::default(),
            end,
        })
    }

    /// Makes or upgrades the schema and stops. Safe to repeat, and safe to be killed at any moment.
    pub async fn migrate(url: &str) -> Result<Vec<String>, OpenError> {
        let connector = Connector::new(url, Duration::from_secs(60))?;
        let session = connector.open(Purpose::Work).await?;
        pooler::refuse(&connector, &session).await?;
        let applied = schema::migrate(&session).await?;
        schema::check(&session).await?;
        self_test::run(&session).await?;
        Ok(applied)
    }

    /// What the catalogue says about the schema. For the test that keeps the expected shape up to date.
    #[doc(hidden)]
    pub async fn shape(url: &str) -> Result<Vec<String>, OpenError> {
        let session = Connector::new(url, Duration::from_secs(60))?.open(Purpose::Work).await?;
        schema::migrate(&session).await?;
        schema::shape(&session).await
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

fn random_shard() -> i16 {
    i16::try_from(random() % SHARDS).unwrap_or(0)
}

impl Journal for PostgresJournal {
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

    fn state(&self) -> JournalState {
        let queued = self.lanes.iter().map(|lane| lane.max_capacity() - lane.capacity()).sum();
        JournalState {
            kind: "postgres",
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
            let session = self.workers.take().await.map_err(|error| SelfTestError(error.told))?;
            self_test::run(&session).await?;
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

impl JournalReader for PostgresJournal {
    fn list(&self, query: EventQuery) -> BoxFuture<'_, Result<EventPage, ReadError>> {
        Box::pin(async move { self.readers.list(&query).await })
    }

    fn show(&self, id: EventId) -> BoxFuture<'_, Result<Option<EventDetail>, ReadError>> {
        Box::pin(self.readers.show(id))
    }

    fn body(&self, id: EventId) -> BoxFuture<'_, Result<Option<StoredBody>, ReadError>> {
        Box::pin(self.readers.body(id))
    }

    fn resolve(&self, alias: EventId) -> BoxFuture<'_, Result<Option<EventId>, ReadError>> {
        Box::pin(self.readers.resolve(alias))
    }

    fn stats(&self) -> BoxFuture<'_, Result<Stats, ReadError>> {
        Box::pin(self.readers.stats())
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
