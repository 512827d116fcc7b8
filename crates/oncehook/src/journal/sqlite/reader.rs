//! What people ask: lists, one event's story, counts. On read-only connections, time-boxed.
//!
//! A long read would keep the write-ahead log from starting over, so every query has a deadline. Nothing here can write.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use oncehook_verify::{EventKey, UnixMicros};
use rusqlite::{Connection, ErrorCode, OptionalExtension, params};

use super::ledger::{self, Filter, KeyHasher};
use super::search::{by_sequence, count, find};
use super::syncer::LogFile;
use super::{Shared, connection};
use crate::delivery::{DeliveryId, DeliveryState};
use crate::event::EventId;
use crate::journal::tally::{parse_latest, remember};
use crate::journal::{
    Attempt, AuditEntry, Backlog, Conflict, Delivery, EventDetail, EventPage, EventQuery, EventSummary, ORDERS_SHOWN,
    ReadError, RecentKey, SourceCounts, Standing, Stats, StoredBody,
};
use crate::ordering::NO_TIME;

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

    pub(super) fn list(&self, query: &EventQuery) -> Result<EventPage, ReadError> {
        // Before the tables: keys move from memory to there.
        let recent = query.key.as_ref().map(|key| self.shared.recent().events_of(key)).unwrap_or_default();
        self.read(|connection| {
            let mut events = find(connection, query, &recent)?;
            let more = events.len() > query.limit;
            events.truncate(query.limit);
            for event in &mut events {
                self.complete(connection, event)?;
            }
            let next = events.last().filter(|_| more).map(|event| event.id);
            Ok(EventPage { events, next })
        })
    }

    pub(super) fn show(&self, id: EventId) -> Result<Option<EventDetail>, ReadError> {
        self.read(|connection| {
            let Some(mut event) = by_sequence(connection, id.sequence())?.filter(|event| event.id == id) else {
                return Ok(None);
            };
            self.complete(connection, &mut event)?;
            for delivery in &mut event.deliveries {
                delivery.attempts = attempts(connection, id, delivery)?;
            }
            let digest = connection
                .prepare_cached("SELECT digest FROM oncehook_events WHERE seq = ?1")?
                .query_row([id.sequence()], |row| row.get(0))?;
            let (mut seen, mut latest) = match duplicates_seen(connection, id)? {
                Some((first, last, latest)) => (Some((first, last)), parse_latest(&latest)),
                None => (None, std::collections::VecDeque::new()),
            };
            if let Some(pending) = self.shared.settled_tally().get(id) {
                seen =
                    Some(seen.map_or((pending.first_at, pending.last_at), |(first, last)| {
                        (first, last.max(pending.last_at))
                    }));
                pending.latest.iter().for_each(|duplicate| remember(&mut latest, *duplicate));
            }
            let conflicts = conflicts(connection, id)?;
            let (audit, audit_total) = audit(connection, id)?;
            Ok(Some(EventDetail {
                event,
                digest,
                duplicates_seen: seen,
                duplicates_latest: latest.into_iter().collect(),
                conflicts,
                audit,
                audit_total,
            }))
        })
    }

    pub(super) fn body(&self, id: EventId) -> Result<Option<StoredBody>, ReadError> {
        self.read(|connection| {
            connection
                .prepare_cached("SELECT headers, body FROM oncehook_events WHERE seq = ?1 AND id = ?2")?
                .query_row(params![id.sequence(), id.as_bytes()], |row| {
                    Ok(StoredBody {
                        headers: Bytes::from(row.get::<_, Vec<u8>>(0)?),
                        body: Bytes::from(row.get::<_, Vec<u8>>(1)?),
                    })
                })
                .optional()
        })
    }

    pub(super) fn resolve(&self, alias: EventId) -> Result<Option<EventId>, ReadError> {
        self.read(|connection| super::aliases::resolve(connection, alias))
    }

    pub(super) fn stats(&self) -> Result<Stats, ReadError> {
        self.read(|connection| {
            let mut sources: Vec<SourceCounts> = connection
                .prepare_cached(
                    "SELECT source, events, duplicates, conflicts, quarantined FROM oncehook_totals ORDER BY source",
                )?
                .query_map([], |row| {
                    Ok(SourceCounts {
                        source: row.get(0)?,
                        events: count(row, 1)?,
                        duplicates: count(row, 2)?,
                        conflicts: count(row, 3)?,
                        quarantined: count(row, 4)?,
                    })
                })?
                .collect::<Result<_, _>>()?;
            for (_, pending) in self.shared.settled_tally().iter() {
                if let Some(counts) = sources.iter_mut().find(|counts| counts.source == pending.source.as_str()) {
                    counts.duplicates += pending.count();
                }
            }
            Ok(Stats { sources })
        })
    }

    /// How deliveries stand: a look at one row each.
    pub(super) fn standings(&self, deliveries: &[DeliveryId]) -> Result<Vec<Option<Standing>>, ReadError> {
        self.read(|connection| {
            let mut query = connection.prepare_cached(
                "SELECT state, result, error, cause FROM oncehook_deliveries WHERE event = ?1 AND route = ?2 AND epoch = ?3",
            )?;
            let mut standings = Vec::with_capacity(deliveries.len());
            for id in deliveries {
                let found = query
                    .query_row(params![id.event.sequence(), id.route.as_str(), id.epoch], |row| {
                        let state: String = row.get(0)?;
                        let [result, error, cause] = [row.get(1)?, row.get(2)?, row.get(3)?];
                        let state = DeliveryState::parse(&state);
                        Ok(state.map(|state| Standing { state, result, error, cause }))
                    })
                    .optional()?;
                standings.push(found.flatten());
            }
            Ok(standings)
        })
    }

    /// Keys of the latest events. (An event's row says all that the ledger does.) Whoever asks will tell senders that these are
    /// stored, so what was read is on the disk first.
    pub(super) fn recent_keys(&self, limit: usize) -> Result<Vec<RecentKey>, ReadError> {
        let keys = self.latest_keys(limit)?;
        let synced = LogFile::open(&self.path).and_then(|log| log.sync());
        synced.map_err(|error| ReadError::Engine(error.to_string()))?;
        // A new handle does not hear of a sync that failed before it was opened.
        match &*self.shared.failing() {
            Some(reason) => Err(ReadError::Engine(reason.clone())),
            None => Ok(keys),
        }
    }

    fn latest_keys(&self, limit: usize) -> Result<Vec<RecentKey>, ReadError> {
        self.read(|connection| {
            connection
                .prepare_cached(
                    "SELECT source, key, id, digest, key_expires_at FROM oncehook_events ORDER BY seq DESC LIMIT ?1",
                )?
                .query_map([i64::try_from(limit).unwrap_or(i64::MAX)], |row| {
                    let key: Vec<u8> = row.get(1)?;
                    let known = EventKey::from_bytes(&key).map(|key| {
                        Ok(RecentKey {
                            source: row.get(0)?,
                            key,
                            event: EventId::from_bytes(row.get(2)?),
                            digest: row.get(3)?,
                            expires_at: UnixMicros(row.get(4)?),
                        })
                    });
                    known.transpose()
                })?
                .filter_map(Result::transpose)
                .collect()
        })
    }

    /// What waits, per route.
    pub(super) fn backlog(&self) -> Result<Vec<Backlog>, ReadError> {
        self.read(|connection| {
            let mut routes: BTreeMap<String, Backlog> = BTreeMap::new();
            // Each part walks one of the partial indexes, so it costs what waits and not what was.
            for (part, sql) in [
                // What waits for its turn is due at no time: the largest number.
                "SELECT route, count(*), nullif(min(run_at), 9223372036854775807)
                   FROM oncehook_deliveries INDEXED BY oncehook_deliveries_due
                  WHERE state IN ('ready', 'retrying') GROUP BY route",
                "SELECT route, count(*), NULL FROM oncehook_deliveries INDEXED BY oncehook_deliveries_leased
                  WHERE state = 'running' GROUP BY route",
                "SELECT route, count(*), NULL FROM oncehook_deliveries INDEXED BY oncehook_deliveries_dead
                  WHERE state = 'dead' GROUP BY route",
                "SELECT route, count(*), NULL FROM oncehook_deliveries INDEXED BY oncehook_deliveries_parked
                  WHERE state = 'parked' GROUP BY route",
                "SELECT route, count(*), min(blocked_at) FROM oncehook_deliveries INDEXED BY oncehook_deliveries_blocked
                  WHERE blocked_at IS NOT NULL AND state IN ('ready', 'retrying') AND run_at = 9223372036854775807
                  GROUP BY route",
            ]
            .into_iter()
            .enumerate()
            {
                let mut statement = connection.prepare_cached(sql)?;
                let mut rows = statement.query([])?;
                while let Some(row) = rows.next()? {
                    let route: String = row.get(0)?;
                    let backlog = routes.entry(route.clone()).or_insert_with(|| Backlog::none(route));
                    let found = count(row, 1)?;
                    let since = row.get::<_, Option<i64>>(2)?.map(UnixMicros);
                    match part {
                        0 => (backlog.waiting, backlog.oldest) = (found, since),
                        1 => backlog.running = found,
                        2 => backlog.dead = found,
                        3 => backlog.waiting += found,
                        _ => (backlog.blocked, backlog.blocked_since) = (found, since),
                    }
                }
            }
            Ok(routes.into_values().collect())
        })
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

    /// Adds what stands in other tables, or is still in memory.
    fn complete(&self, connection: &Connection, event: &mut EventSummary) -> Result<(), rusqlite::Error> {
        if let Some(pending) = self.shared.settled_tally().get(event.id) {
            event.duplicates += pending.count();
        }
        event.deliveries = deliveries(connection, event.id)?;
        Ok(())
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

fn read_error(error: rusqlite::Error) -> ReadError {
    match error.sqlite_error_code() {
        Some(ErrorCode::OperationInterrupted) => ReadError::TooSlow,
        _ => ReadError::Engine(error.to_string()),
    }
}

/// Where the deliveries of an event stand. Their attempts are read where somebody wants to see them.
fn deliveries(connection: &Connection, event: EventId) -> Result<Vec<Delivery>, rusqlite::Error> {
    connection
        .prepare_cached(
            "SELECT route, epoch, state, attempt, iif(run_at = ?2, coalesce(blocked_at, run_at), run_at), result, error, cause,
                    settled_at, blocked_at, parked_at
               FROM oncehook_deliveries
              WHERE event = ?1 ORDER BY route, epoch",
        )?
        .query_map(params![event.sequence(), NO_TIME.0], |row| {
            Ok(Delivery {
                route: row.get(0)?,
                epoch: row.get(1)?,
                state: row.get(2)?,
                attempt: row.get(3)?,
                run_at: UnixMicros(row.get(4)?),
                result: row.get(5)?,
                error: row.get(6)?,
                cause: row.get(7)?,
                settled_at: row.get::<_, Option<i64>>(8)?.map(UnixMicros),
                blocked_at: row.get::<_, Option<i64>>(9)?.map(UnixMicros),
                parked_at: row.get::<_, Option<i64>>(10)?.map(UnixMicros),
                attempts: Vec::new(),
            })
        })?
        .collect()
}

fn attempts(connection: &Connection, event: EventId, delivery: &Delivery) -> Result<Vec<Attempt>, rusqlite::Error> {
    let mut attempts = connection
        .prepare_cached(
            "SELECT attempt, started_at, finished_at, outcome, error FROM oncehook_attempts
              WHERE event = ?1 AND route = ?2 AND epoch = ?3 AND attempt > ?4 ORDER BY attempt",
        )?
        .query_map(params![event.sequence(), delivery.route, delivery.epoch, delivery.shown_after()], |row| {
            Ok(Attempt {
                number: row.get(0)?,
                started_at: UnixMicros(row.get(1)?),
                finished_at: row.get::<_, Option<i64>>(2)?.map(UnixMicros),
                outcome: row.get(3)?,
                error: row.get(4)?,
            })
        })?
        .collect::<Result<Vec<_>, _>>()?;
    attempts.extend(delivery.unleased_success(attempts.last()));
    Ok(attempts)
}

/// The latest orders, oldest first, and how many there are.
fn audit(connection: &Connection, event: EventId) -> Result<(Vec<AuditEntry>, u64), rusqlite::Error> {
    let subject = event.to_string();
    let total = connection
        .prepare_cached("SELECT count(*) FROM oncehook_audit INDEXED BY oncehook_audit_subject WHERE subject = ?1")?
        .query_row([&subject], |row| count(row, 0))?;
    let mut latest: Vec<AuditEntry> = connection
        .prepare_cached(
            "SELECT at, who, action, reason, detail FROM oncehook_audit INDEXED BY oncehook_audit_subject
              WHERE subject = ?1 ORDER BY id DESC LIMIT ?2",
        )?
        .query_map(params![subject, ORDERS_SHOWN], |row| {
            Ok(AuditEntry {
                at: UnixMicros(row.get(0)?),
                who: row.get(1)?,
                action: row.get(2)?,
                reason: row.get(3)?,
                detail: row.get(4)?,
            })
        })?
        .collect::<Result<_, _>>()?;
    latest.reverse();
    Ok((latest, total))
}

fn duplicates_seen(
    connection: &Connection,
    event: EventId,
) -> Result<Option<(UnixMicros, UnixMicros, String)>, rusqlite::Error> {
    connection
        .prepare_cached("SELECT first_at, last_at, latest FROM oncehook_duplicates WHERE event = ?1")?
        .query_row([event.sequence()], |row| Ok((UnixMicros(row.get(0)?), UnixMicros(row.get(1)?), row.get(2)?)))
        .optional()
}

fn conflicts(connection: &Connection, event: EventId) -> Result<Vec<Conflict>, rusqlite::Error> {
    connection
        .prepare_cached(
            "SELECT digest, count, first_at, last_at, length(body) FROM oncehook_conflicts
              WHERE event = ?1 ORDER BY first_at, digest",
        )?
        .query_map([event.sequence()], |row| {
            Ok(Conflict {
                digest: row.get::<_, Vec<u8>>(0)?.try_into().ok(),
                count: count(row, 1)?,
                first_at: UnixMicros(row.get(2)?),
                last_at: UnixMicros(row.get(3)?),
                size: count(row, 4)?,
            })
        })?
        .collect()
}
