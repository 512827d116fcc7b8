//! What people ask: lists, one event's story, counts. On connections that cannot write, time-boxed.
//!
//! Each answer is one snapshot, with the counts that are still in this node's memory added. Those in the memory of other
//! nodes show half a second later.
//!
//! Does not: know where to look for the events of a list; `search` does.

use std::collections::{BTreeMap, HashMap};

use bytes::Bytes;
use mysql_async::Row;
use oncehook_verify::{EventKey, UnixMicros};

use super::MysqlJournal;
use super::connection::{Pool, Session};
use super::engine_error::EngineError;
use super::queries::parse_latest;
use super::row::{IDS, bytes, count, digest, event, id, ids, maybe_number, maybe_text, number, small, text};
use super::search::{self, summaries, summary};
use crate::delivery::{DeliveryId, DeliveryState};
use crate::event::EventId;
use crate::journal::server::aliases;
use crate::journal::server::shared::Shared;
use crate::journal::tally::remember;
use crate::journal::{
    ATTEMPTS_SHOWN, Attempt, AuditEntry, Backlog, BoxFuture, Conflict, Delivery, EventDetail, EventPage,
    EventQuery, EventSummary, JournalReader, ORDERS_SHOWN, ReadError, RecentKey, SourceCounts, Standing,
    Stats, StoredBody,
};
use crate::ordering::NO_TIME;

/// One snapshot for all queries of an answer.
const BEGIN: &str = "START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY";

pub(super) struct Readers<'r> {
    pool: &'r Pool,
    shared: &'r Shared,
}

/// Reads in one snapshot, while nothing moves from memory into the tables.
macro_rules! read {
    ($readers:expr, |$session:ident| $read:expr) => {{
        let _still = $readers.shared.moving.read().await;
        let mut $session = $readers.pool.take().await.map_err(read_error)?;
        $session.run(BEGIN).await.map_err(read_error)?;
        let answer = $read.await.map_err(read_error)?;
        $session.run("COMMIT").await.map_err(read_error)?;
        $session.keep();
        Ok(answer)
    }};
}

fn read_error(error: EngineError) -> ReadError {
    if error.is_too_slow() { ReadError::TooSlow } else { ReadError::Engine(error.message) }
}

impl MysqlJournal {
    pub(super) fn readers(&self) -> Readers<'_> {
        Readers { pool: &self.readers, shared: &self.shared }
    }
}

impl Readers<'_> {
    pub(super) async fn list(&self, query: &EventQuery) -> Result<EventPage, ReadError> {
        read!(self, |session| self.page(&mut session, query))
    }

    async fn page(&self, session: &mut Session, query: &EventQuery) -> Result<EventPage, EngineError> {
        let mut events = search::find(session, query).await?;
        let more = events.len() > query.limit;
        events.truncate(query.limit);
        self.complete(session, &mut events).await?;
        let next = events.last().filter(|_| more).map(|event| event.id);
        Ok(EventPage { events, next })
    }

    pub(super) async fn show(&self, id: EventId) -> Result<Option<EventDetail>, ReadError> {
        read!(self, |session| self.story(&mut session, id))
    }

    async fn story(&self, session: &mut Session, id: EventId) -> Result<Option<EventDetail>, EngineError> {
        let sql = format!("{} WHERE e.id = ?", summaries());
        let Some(row) = session.row(&sql, vec![super::row::id(id)]).await? else { return Ok(None) };
        let mut events = vec![summary(&row)?];
        self.complete(session, &mut events).await?;
        let Some(mut event) = events.pop() else { return Ok(None) };
        tell_attempts(session, &mut event).await?;
        let sql = "SELECT first_at, last_at, latest FROM oncehook_duplicates WHERE event = ?";
        let (mut seen, mut latest) = (None, std::collections::VecDeque::new());
        if let Some(stored) = session.row(sql, vec![super::row::id(id)]).await? {
            seen = Some((UnixMicros(number(&stored, 0)?), UnixMicros(number(&stored, 1)?)));
            latest = parse_latest(&text(&stored, 2)?).into();
        }
        if let Some(pending) = self.shared.tally().get(id) {
            seen = Some(seen.map_or((pending.first_at, pending.last_at), |(first, last)| {
                (first, last.max(pending.last_at))
            }));
            pending.latest.iter().for_each(|duplicate| remember(&mut latest, *duplicate));
        }
        let (audit, audit_total) = audit(session, id).await?;
        Ok(Some(EventDetail {
            event,
            digest: digest(&row, 12)?,
            duplicates_seen: seen,
            duplicates_latest: latest.into_iter().collect(),
            conflicts: conflicts(session, id).await?,
            audit,
            audit_total,
        }))
    }

    pub(super) async fn resolve(&self, alias: EventId) -> Result<Option<EventId>, ReadError> {
        read!(self, |session| aliases::resolve::<super::Mysql>(&mut session, alias))
    }

    /// How deliveries stand, all in one statement.
    pub(super) async fn standings(
        &self,
        deliveries: &[DeliveryId],
    ) -> Result<Vec<Option<Standing>>, ReadError> {
        read!(self, |session| standings(&mut session, deliveries))
    }

    /// Keys of the latest events, as the ledger has them.
    pub(super) async fn recent_keys(&self, limit: usize) -> Result<Vec<RecentKey>, ReadError> {
        read!(self, |session| recent_keys(&mut session, limit))
    }

    pub(super) async fn body(&self, id: EventId) -> Result<Option<StoredBody>, ReadError> {
        read!(self, |session| body(&mut session, id))
    }

    pub(super) async fn stats(&self) -> Result<Stats, ReadError> {
        read!(self, |session| self.counts(&mut session))
    }

    async fn counts(&self, session: &mut Session) -> Result<Stats, EngineError> {
        let sql = "SELECT source, CAST(SUM(events) AS SIGNED), CAST(SUM(duplicates) AS SIGNED), CAST(SUM(conflicts) AS SIGNED),
                          CAST(SUM(quarantined) AS SIGNED)
                     FROM oncehook_totals GROUP BY source ORDER BY source";
        let rows = session.rows(sql, Vec::new()).await?;
        let counts = |row: &Row| {
            Ok(SourceCounts {
                source: text(row, 0)?,
                events: count(row, 1)?,
                duplicates: count(row, 2)?,
                conflicts: count(row, 3)?,
                quarantined: count(row, 4)?,
            })
        };
        let mut sources: Vec<SourceCounts> = rows.iter().map(counts).collect::<Result<_, EngineError>>()?;
        for (_, pending) in self.shared.tally().iter() {
            if let Some(counts) = sources.iter_mut().find(|counts| counts.source == pending.source.as_str()) {
                counts.duplicates += pending.count();
            }
        }
        Ok(Stats { sources })
    }

    /// What waits, per route.
    pub(super) async fn backlog(&self) -> Result<Vec<Backlog>, ReadError> {
        read!(self, |session| backlog(&mut session))
    }

    /// Adds what stands in other tables, or is still in memory.
    async fn complete(&self, session: &mut Session, events: &mut [EventSummary]) -> Result<(), EngineError> {
        let mut deliveries = deliveries(session, events.iter().map(|event| event.id)).await?;
        let tally = self.shared.tally();
        for event in events {
            event.duplicates += tally.get(event.id).map_or(0, |pending| pending.count());
            event.deliveries = deliveries.remove(&event.id).unwrap_or_default();
        }
        Ok(())
    }
}

async fn standings(
    session: &mut Session,
    deliveries: &[DeliveryId],
) -> Result<Vec<Option<Standing>>, EngineError> {
    let asked = deliveries
        .iter()
        .map(|id| serde_json::json!([super::row::hex(id.event), id.route.as_str(), id.epoch]));
    let sql = "SELECT t.place, d.state, d.result, d.error, d.cause
                 FROM JSON_TABLE(?, '$[*]' COLUMNS (place FOR ORDINALITY, event VARCHAR(32) PATH '$[0]', route VARCHAR(64) CHARACTER SET utf8mb4 PATH '$[1]',
                                                    epoch INT UNSIGNED PATH '$[2]')) t
                 STRAIGHT_JOIN oncehook_deliveries d ON d.event = UNHEX(t.event) AND d.route = t.route AND d.epoch = t.epoch";
    let mut standings = vec![None; deliveries.len()];
    for row in session.rows(sql, vec![super::row::list(asked)]).await? {
        let place = usize::try_from(number(&row, 0)? - 1).unwrap_or(usize::MAX);
        if let (Some(standing), Some(state)) =
            (standings.get_mut(place), DeliveryState::parse(&text(&row, 1)?))
        {
            let (result, error, cause) = (maybe_text(&row, 2)?, maybe_text(&row, 3)?, maybe_text(&row, 4)?);
            *standing = Some(Standing { state, result, error, cause });
        }
    }
    Ok(standings)
}

async fn recent_keys(session: &mut Session, limit: usize) -> Result<Vec<RecentKey>, EngineError> {
    let sql = "SELECT k.source, k.`key`, k.event, k.digest, k.expires_at
                 FROM (SELECT id, source, `key` FROM oncehook_events ORDER BY id DESC LIMIT ?) e
                 STRAIGHT_JOIN oncehook_keys k ON k.source = e.source AND k.`key` = e.`key` AND k.event = e.id
                ORDER BY k.event DESC";
    let rows = session.rows(sql, vec![u64::try_from(limit).unwrap_or(u64::MAX).into()]).await?;
    let mut keys = Vec::with_capacity(rows.len());
    for row in &rows {
        let Some(key) = EventKey::from_bytes(bytes(row, 1)?) else { continue };
        keys.push(RecentKey {
            source: text(row, 0)?,
            key,
            event: event(row, 2)?,
            digest: digest(row, 3)?,
            expires_at: UnixMicros(number(row, 4)?),
        });
    }
    Ok(keys)
}

async fn deliveries(
    session: &mut Session,
    events: impl Iterator<Item = EventId>,
) -> Result<HashMap<EventId, Vec<Delivery>>, EngineError> {
    let sql = format!(
        "SELECT d.event, d.route, d.epoch, d.state, d.attempt, IF(d.run_at = {}, COALESCE(d.blocked_at, d.run_at), d.run_at),
                d.result, d.error, d.cause, d.settled_at, d.blocked_at, d.parked_at
           FROM {IDS} STRAIGHT_JOIN oncehook_deliveries d ON d.event = UNHEX(t.id) ORDER BY d.event, d.route, d.epoch",
        NO_TIME.0
    );
    let mut found: HashMap<EventId, Vec<Delivery>> = HashMap::new();
    for row in session.rows(&sql, vec![ids(events)]).await? {
        found.entry(event(&row, 0)?).or_default().push(Delivery {
            route: text(&row, 1)?,
            epoch: small(&row, 2)?,
            state: text(&row, 3)?,
            attempt: small(&row, 4)?,
            run_at: UnixMicros(number(&row, 5)?),
            result: maybe_text(&row, 6)?,
            error: maybe_text(&row, 7)?,
            cause: maybe_text(&row, 8)?,
            settled_at: maybe_number(&row, 9)?.map(UnixMicros),
            blocked_at: maybe_number(&row, 10)?.map(UnixMicros),
            parked_at: maybe_number(&row, 11)?.map(UnixMicros),
            attempts: Vec::new(),
        });
    }
    Ok(found)
}

/// Adds the latest tries to an event's deliveries. Lists do without.
async fn tell_attempts(session: &mut Session, event: &mut EventSummary) -> Result<(), EngineError> {
    let sql = "SELECT a.route, a.epoch, a.attempt, a.started_at, a.finished_at, a.outcome, a.error
                 FROM oncehook_attempts a JOIN oncehook_deliveries d USING (event, route, epoch)
                WHERE a.event = ? AND a.attempt + ? > d.attempt ORDER BY a.route, a.epoch, a.attempt";
    for row in session.rows(sql, vec![id(event.id), ATTEMPTS_SHOWN.into()]).await? {
        let (route, epoch) = (text(&row, 0)?, small(&row, 1)?);
        let attempt = Attempt {
            number: small(&row, 2)?,
            started_at: UnixMicros(number(&row, 3)?),
            finished_at: maybe_number(&row, 4)?.map(UnixMicros),
            outcome: maybe_text(&row, 5)?,
            error: maybe_text(&row, 6)?,
        };
        let of = |delivery: &&mut Delivery| delivery.route == route && delivery.epoch == epoch;
        event.deliveries.iter_mut().filter(of).for_each(|delivery| delivery.attempts.push(attempt.clone()));
    }
    for delivery in &mut event.deliveries {
        let unleased = delivery.unleased_success(delivery.attempts.last());
        delivery.attempts.extend(unleased);
    }
    Ok(())
}

/// The latest orders, oldest first, and how many there are.
async fn audit(session: &mut Session, event: EventId) -> Result<(Vec<AuditEntry>, u64), EngineError> {
    let subject = event.to_string();
    let sql = "SELECT COUNT(*) FROM oncehook_audit WHERE subject = ?";
    let total = match session.row(sql, vec![subject.as_str().into()]).await? {
        Some(row) => count(&row, 0)?,
        None => 0,
    };
    let sql = "SELECT at, who, action, reason, detail FROM oncehook_audit WHERE subject = ? ORDER BY id DESC LIMIT ?";
    let rows = session.rows(sql, vec![subject.into(), ORDERS_SHOWN.into()]).await?;
    let entry = |row: &Row| {
        Ok(AuditEntry {
            at: UnixMicros(number(row, 0)?),
            who: text(row, 1)?,
            action: text(row, 2)?,
            reason: maybe_text(row, 3)?,
            detail: maybe_text(row, 4)?,
        })
    };
    let latest: Result<Vec<AuditEntry>, EngineError> = rows.iter().rev().map(entry).collect();
    Ok((latest?, total))
}

async fn conflicts(session: &mut Session, event: EventId) -> Result<Vec<Conflict>, EngineError> {
    let sql = "SELECT digest, count, first_at, last_at, LENGTH(body) FROM oncehook_conflicts
                WHERE event = ? ORDER BY first_at, digest";
    let rows = session.rows(sql, vec![id(event)]).await?;
    let conflict = |row: &Row| {
        Ok(Conflict {
            digest: bytes(row, 0)?.try_into().ok(),
            count: count(row, 1)?,
            first_at: UnixMicros(number(row, 2)?),
            last_at: UnixMicros(number(row, 3)?),
            size: count(row, 4)?,
        })
    };
    rows.iter().map(conflict).collect()
}

async fn body(session: &mut Session, event: EventId) -> Result<Option<StoredBody>, EngineError> {
    let row = session.row("SELECT headers, body FROM oncehook_events WHERE id = ?", vec![id(event)]).await?;
    let bytes = |row: &Row, column: usize| bytes(row, column).map(Bytes::copy_from_slice);
    row.map(|row| Ok(StoredBody { headers: bytes(&row, 0)?, body: bytes(&row, 1)? })).transpose()
}

async fn backlog(session: &mut Session) -> Result<Vec<Backlog>, EngineError> {
    // Walks the part of the queues' index that is not over, so it costs what waits and not what was. What waits for its turn
    // is due at no time: the largest number.
    let sql =
        "SELECT place, route, COUNT(*), MIN(NULLIF(place_at, 9223372036854775807)) FROM oncehook_deliveries
                WHERE place IN (0, 1, 2, 3) GROUP BY place, route";
    let mut routes: BTreeMap<String, Backlog> = BTreeMap::new();
    for row in session.rows(sql, Vec::new()).await? {
        let (route, many) = (text(&row, 1)?, count(&row, 2)?);
        let backlog = routes.entry(route.clone()).or_insert_with(|| Backlog::none(route));
        match number(&row, 0)? {
            1 => backlog.running = many,
            2 => backlog.dead = many,
            place => {
                backlog.waiting += many;
                if place == 0 {
                    backlog.oldest = maybe_number(&row, 3)?.map(UnixMicros);
                }
            }
        }
    }
    let sql = "SELECT route, COUNT(*), MIN(blocked_at) FROM oncehook_deliveries
                WHERE place = 0 AND place_at = 9223372036854775807 AND blocked_at IS NOT NULL GROUP BY route";
    for row in session.rows(sql, Vec::new()).await? {
        if let Some(backlog) = routes.get_mut(&text(&row, 0)?) {
            (backlog.blocked, backlog.blocked_since) =
                (count(&row, 1)?, maybe_number(&row, 2)?.map(UnixMicros));
        }
    }
    Ok(routes.into_values().collect())
}

impl JournalReader for MysqlJournal {
    fn list(&self, query: EventQuery) -> BoxFuture<'_, Result<EventPage, ReadError>> {
        Box::pin(async move { self.readers().list(&query).await })
    }

    fn show(&self, id: EventId) -> BoxFuture<'_, Result<Option<EventDetail>, ReadError>> {
        Box::pin(async move { self.readers().show(id).await })
    }

    fn body(&self, id: EventId) -> BoxFuture<'_, Result<Option<StoredBody>, ReadError>> {
        Box::pin(async move { self.readers().body(id).await })
    }

    fn resolve(&self, alias: EventId) -> BoxFuture<'_, Result<Option<EventId>, ReadError>> {
        Box::pin(async move { self.readers().resolve(alias).await })
    }

    fn stats(&self) -> BoxFuture<'_, Result<Stats, ReadError>> {
        Box::pin(async move { self.readers().stats().await })
    }

    fn standings(
        &self,
        deliveries: Vec<DeliveryId>,
    ) -> BoxFuture<'_, Result<Vec<Option<Standing>>, ReadError>> {
        Box::pin(async move { self.readers().standings(&deliveries).await })
    }

    fn recent_keys(&self, limit: usize) -> BoxFuture<'_, Result<Vec<RecentKey>, ReadError>> {
        Box::pin(async move { self.readers().recent_keys(limit).await })
    }
}
