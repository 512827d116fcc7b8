//! What people ask: lists, one event's story, counts. On read-only connections, time-boxed.
//!
//! A long read would keep the write-ahead log from starting over, so every query has a deadline. Nothing here can write.

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use oncehook_verify::UnixMicros;
use rusqlite::{Connection, ErrorCode};

use super::ledger::{self, Filter, KeyHasher};
use super::search::find;
use super::statements::{self, Statements};
use super::syncer::LogFile;
use super::{Shared, SqliteJournal, connection};
use crate::delivery::DeliveryId;
use crate::event::EventId;
use crate::journal::sql::aliases;
use crate::journal::sql::error::EngineError;
use crate::journal::sql::story::{self, Tells, delivery_columns};
use crate::journal::{
    BoxFuture, EventDetail, EventPage, EventQuery, JournalReader, ReadError, RecentKey, Standing, Stats, StoredBody,
};

impl Tells for Statements<'_> {
    const DELIVERIES: &'static str = concat!(
        "SELECT (SELECT id FROM oncehook_events WHERE seq = d.event)",
        delivery_columns!(),
        "FROM oncehook_deliveries d WHERE d.event IN (SELECT value FROM json_each($1)) ORDER BY d.event, d.route, d.epoch"
    );
    const STANDINGS: &'static str = "SELECT t.key + 1, d.state, d.result, d.error, d.cause
        FROM json_each($1) t CROSS JOIN oncehook_deliveries d
          ON d.event = t.value ->> 0 AND d.route = t.value ->> 1 AND d.epoch = t.value ->> 2";
    // An event's row says all that the ledger does.
    const RECENT_KEYS: &'static str = "
        SELECT source, key, id, digest, key_expires_at FROM oncehook_events ORDER BY seq DESC LIMIT $1";
    const KEEP_ALIASES: &'static str = "INSERT INTO oncehook_spool_aliases (alias, event)
        SELECT unhex(t.value ->> 0), t.value ->> 1 FROM json_each($1) t WHERE true
        ON CONFLICT (alias) DO NOTHING";
    const RESOLVE_ALIAS: &'static str = "
        SELECT e.id FROM oncehook_spool_aliases a JOIN oncehook_events e ON a.event = e.seq
         WHERE a.alias = $1_id";
}

/// The longest that a read may take.
const DEADLINE: Duration = Duration::from_secs(5);

/// How often a read is done over because counts moved from memory into the tables while it ran.
const RETRIES: u32 = 2;

/// How many idle connections are kept.
const IDLE_KEPT: usize = 4;

pub(super) struct Readers {
    path: PathBuf,
    idle: Mutex<Vec<Connection>>,
    shared: Arc<Shared>,
}

impl Readers {
    pub(super) fn new(path: &Path, shared: Arc<Shared>) -> Self {
        Self { path: path.to_path_buf(), idle: Mutex::new(Vec::new()), shared }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Asks by the statements that all journals share.
    pub(super) fn ask<T>(
        &self,
        query: impl AsyncFn(&mut Statements<'_>) -> Result<T, EngineError>,
    ) -> Result<T, ReadError> {
        self.read(|connection| statements::run(connection, UnixMicros(0), &query))
    }

    fn list(&self, query: &EventQuery) -> Result<EventPage, ReadError> {
        // Before the tables: keys move from memory to there.
        let recent = query.key.as_ref().map(|key| self.shared.recent().events_of(key)).unwrap_or_default();
        self.ask(async |session| {
            let events = find(session.connection, query, &recent);
            let events = session.noting(events)?;
            let page = story::page(session, events, query.limit).await?;
            Ok(self.shared.with_tally(|tally| page.with_pending(tally)))
        })
    }

    fn recent_keys(&self, limit: usize) -> Result<Vec<RecentKey>, ReadError> {
        let keys = self.ask(async |session| story::recent_keys(session, limit).await)?;
        // The caller will tell senders that these are stored, so what was read is on the disk first.
        let synced = LogFile::open(&self.path).and_then(|log| log.sync());
        synced.map_err(|error| ReadError::Engine(error.to_string()))?;
        // A new handle does not hear of a sync that failed before it was opened.
        match &*self.shared.failing() {
            Some(reason) => Err(ReadError::Engine(reason.clone())),
            None => Ok(keys),
        }
    }

    /// Makes a filter of the whole table of keys. Nothing if that fails, or if the journal is closed meanwhile.
    pub(super) fn load_filter(&self, hasher: &KeyHasher) -> Option<Filter> {
        let (mut filter, mut cursor) = (Filter::default(), Default::default());
        while !self.shared.is_closed() {
            let walked = self.read(|connection| {
                let mut hashes = Vec::new();
                let next = ledger::load(connection, hasher, &cursor, |hash| hashes.push(hash))?;
                Ok((next, hashes))
            });
            let warn = |error: &ReadError| tracing::warn!(%error, "the filter of keys could not be loaded; every key is looked up");
            let (next, hashes) = walked.inspect_err(warn).ok()?;
            hashes.into_iter().for_each(|hash| filter.insert(hash));
            let Some(next) = next else { return Some(filter) };
            cursor = next;
        }
        None
    }

    /// Runs a query in one read transaction, so that its parts agree with each other.
    ///
    /// Counts stand in the tables or in memory. A query that began before a flush was committed and looked into memory
    /// after it finds them in neither place, so it runs again. A query that is slower than the flushes is not worth more.
    fn read<T>(&self, query: impl Fn(&Connection) -> Result<T, rusqlite::Error>) -> Result<T, ReadError> {
        let mut connection = self.take().map_err(read_error)?;
        let deadline = Instant::now() + DEADLINE;
        connection.progress_handler(10_000, Some(move || Instant::now() >= deadline)).map_err(read_error)?;
        let mut retries = 0;
        let answer = loop {
            let flushes = self.shared.flushes.load(Ordering::Acquire);
            let answer = connection.transaction().and_then(|transaction| {
                let answer = query(&transaction)?;
                transaction.commit()?;
                Ok(answer)
            });
            let settled = self.shared.flushes.load(Ordering::Acquire) == flushes;
            if settled || answer.is_err() || retries == RETRIES {
                break answer;
            }
            retries += 1;
        };
        if answer.is_ok() {
            self.give_back(connection);
        }
        answer.map_err(read_error)
    }

    fn take(&self) -> Result<Connection, rusqlite::Error> {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        idle.map_or_else(|| connection::open_reader(&self.path), Ok)
    }

    /// Closes the idle connections.
    pub(super) fn close_idle(&self) {
        let idle = std::mem::take(&mut *self.idle.lock().unwrap_or_else(PoisonError::into_inner));
        idle.into_iter().for_each(connection::abandon);
    }

    fn give_back(&self, connection: Connection) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < IDLE_KEPT {
            idle.push(connection);
        }
    }
}

impl JournalReader for SqliteJournal {
    fn list(&self, query: EventQuery) -> BoxFuture<'_, Result<EventPage, ReadError>> {
        self.read(move |readers| readers.list(&query))
    }

    fn show(&self, id: EventId) -> BoxFuture<'_, Result<Option<EventDetail>, ReadError>> {
        self.read(move |readers| {
            readers.ask(async |session| {
                let detail = story::show(session, id).await?;
                Ok(readers.shared.with_tally(|tally| EventDetail::with_pending(detail, tally)))
            })
        })
    }

    fn body(&self, id: EventId) -> BoxFuture<'_, Result<Option<StoredBody>, ReadError>> {
        self.read(move |readers| readers.ask(async |session| story::body(session, id).await))
    }

    fn resolve(&self, alias: EventId) -> BoxFuture<'_, Result<Option<EventId>, ReadError>> {
        self.read(move |readers| readers.ask(async |session| aliases::resolve(session, alias).await))
    }

    fn stats(&self) -> BoxFuture<'_, Result<Stats, ReadError>> {
        self.read(move |readers| {
            readers.ask(async |session| {
                let stats = story::stats(session).await?;
                Ok(readers.shared.with_tally(|tally| stats.with_pending(tally)))
            })
        })
    }

    fn standings(&self, deliveries: Vec<DeliveryId>) -> BoxFuture<'_, Result<Vec<Option<Standing>>, ReadError>> {
        self.read(move |readers| readers.ask(async |session| story::standings(session, &deliveries).await))
    }

    fn recent_keys(&self, limit: usize) -> BoxFuture<'_, Result<Vec<RecentKey>, ReadError>> {
        self.read(move |readers| readers.recent_keys(limit))
    }
}

fn read_error(error: rusqlite::Error) -> ReadError {
    match error.sqlite_error_code() {
        Some(ErrorCode::OperationInterrupted) => ReadError::TooSlow,
        _ => ReadError::Engine(error.to_string()),
    }
}
