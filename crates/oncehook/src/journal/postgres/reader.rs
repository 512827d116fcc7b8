//! What people ask: lists, one event's story, counts. On connections that cannot write, time-boxed.
//!
//! Each answer is one snapshot, with the counts that are still in this node's memory added. Those in the memory of other
//! nodes show half a second later.
//!
//! Does not: choose the way to the events of a list; that is `search`.

use std::collections::{BTreeMap, HashMap};

use bytes::Bytes;
use oncehook_verify::{EventKey, UnixMicros};
use tokio_postgres::Row;
use uuid::Uuid;

use super::PostgresJournal;
use super::connection::{EngineError, Pool, Session};
use super::queries::{digest, event_id, parse_latest, uuid};
use super::queue::number;
use super::search::{self, BESIDE, SUMMARY, summary};
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
const BEGIN: &str = "BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY";

pub(super) struct Readers<'r> {
    pool: &'r Pool,
    shared: &'r Shared,
}

/// Reads in one snapshot, while nothing moves from memory into the tables.
macro_rules! read {
    ($readers:expr, |$session:ident| $read:expr) => {{
        let _still = $readers.shared.moving.read().await;
        #[allow(unused_mut)]
        let mut $session = $readers.pool.take().await.map_err(read_error)?;
        $session.run(BEGIN).await.map_err(read_error)?;
        let answer = $read.await.map_err(read_error)?;
        $session.run("COMMIT").await.map_err(read_error)?;
        $session.check_replicated().map_err(read_error)?;
        $session.keep();
        Ok(answer)
    }};
}

fn read_error(error: EngineError) -> ReadError {
    if error.is_too_slow() { ReadError::TooSlow } else { ReadError::Engine(error.message) }
}

impl PostgresJournal {
    pub(super) fn readers(&self) -> Readers<'_> {
        Readers { pool: &self.readers, shared: &self.shared }
    }
}

impl Readers<'_> {
    pub(super) async fn list(&self, query: &EventQuery) -> Result<EventPage, ReadError> {
        // No text of ours has a zero character, and the database takes none.
        let names = [&query.source, &query.kind, &query.entity];
        if names.into_iter().flatten().any(|name| name.contains('\0')) {
            return Ok(EventPage::default());
        }
        read!(self, |session| self.page(&session, query))
    }

    async fn page(&self, session: &Session, query: &EventQuery) -> Result<EventPage, EngineError> {
        let mut events = search::find(session, query).await?;
        let more = events.len() > query.limit;
        events.truncate(query.limit);
        self.complete(session, &mut events).await?;
        let next = events.last().filter(|_| more).map(|event| event.id);
        Ok(EventPage { events, next })
    }

    pub(super) async fn show(&self, id: EventId) -> Result<Option<EventDetail>, ReadError> {
        read!(self, |session| self.story(&session, id))
    }

    async fn story(&self, session: &Session, id: EventId) -> Result<Option<EventDetail>, EngineError> {
        let sql = format!("{SUMMARY}, e.digest FROM oncehook.events e {BESIDE} WHERE e.id = $1");
        let Some(row) = session.row(&sql, &[&uuid(id)]).await? else { return Ok(None) };
        let mut events = vec![summary(&row)?];
        self.complete(session, &mut events).await?;
        let Some(mut event) = events.pop() else { return Ok(None) };
        tell_attempts(session, &mut event).await?;
        let sql = "SELECT first_at, last_at, latest::text FROM oncehook.duplicates WHERE event = $1";
        let stored = session.row(sql, &[&uuid(id)]).await?;
        let mut seen = stored.as_ref().map(|row| (UnixMicros(row.get(0)), UnixMicros(row.get(1))));
        let mut latest: std::collections::VecDeque<_> =
            stored.map(|row| parse_latest(row.get(2))).unwrap_or_default().into();
        if let Some(pending) = self.shared.tally().get(id) {
            seen = Some(seen.map_or((pending.first_at, pending.last_at), |(first, last)| {
                (first, last.max(pending.last_at))
            }));
            pending.latest.iter().for_each(|duplicate| remember(&mut latest, *duplicate));
        }
        let (audit, audit_total) = audit(session, id).await?;
        Ok(Some(EventDetail {
            event,
            digest: digest(row.get(12))?,
            duplicates_seen: seen,
            duplicates_latest: latest.into_iter().collect(),
            conflicts: conflicts(session, id).await?,
            audit,
            audit_total,
        }))
    }

    pub(super) async fn resolve(&self, alias: EventId) -> Result<Option<EventId>, ReadError> {
        read!(self, |session| aliases::resolve::<super::Postgres>(&mut session, alias))
    }

    pub(super) async fn body(&self, id: EventId) -> Result<Option<StoredBody>, ReadError> {
        read!(self, |session| body(&session, id))
    }

    pub(super) async fn stats(&self) -> Result<Stats, ReadError> {
        read!(self, |session| self.counts(&session))
    }

    async fn counts(&self, session: &Session) -> Result<Stats, EngineError> {
        let sql = "SELECT source, sum(events)::bigint, sum(duplicates)::bigint, sum(conflicts)::bigint, sum(quarantined)::bigint
                     FROM oncehook.totals GROUP BY source ORDER BY source";
        let rows = session.rows(sql, &[]).await?;
        let mut sources: Vec<SourceCounts> = rows
            .iter()
            .map(|row| SourceCounts {
                source: row.get(0),
                events: count(row, 1),
                duplicates: count(row, 2),
                conflicts: count(row, 3),
                quarantined: count(row, 4),
            })
            .collect();
        for (_, pending) in self.shared.tally().iter() {
            if let Some(counts) = sources.iter_mut().find(|counts| counts.source == pending.source.as_str()) {
                counts.duplicates += pending.count();
            }
        }
        Ok(Stats { sources })
    }

    /// How deliveries stand, all in one statement.
    pub(super) async fn standings(
        &self,
        deliveries: &[DeliveryId],
    ) -> Result<Vec<Option<Standing>>, ReadError> {
        read!(self, |session| standings(&session, deliveries))
    }

    /// Keys of the latest events, as the ledger has them.
    pub(super) async fn recent_keys(&self, limit: usize) -> Result<Vec<RecentKey>, ReadError> {
        read!(self, |session| recent_keys(&session, limit))
    }

    /// What waits, per route.
    pub(super) async fn backlog(&self) -> Result<Vec<Backlog>, ReadError> {
        read!(self, |session| backlog(&session))
    }

    /// Adds what stands in other tables, or is still in memory.
    async fn complete(&self, session: &Session, events: &mut [EventSummary]) -> Result<(), EngineError> {
        let ids: Vec<Uuid> = events.iter().map(|event| uuid(event.id)).collect();
        let mut deliveries = deliveries(session, &ids).await?;
        let tally = self.shared.tally();
        for event in events {
            event.duplicates += tally.get(event.id).map_or(0, |pending| pending.count());
            event.deliveries = deliveries.remove(&uuid(event.id)).unwrap_or_default();
        }
        Ok(())
    }
}

async fn standings(
    session: &Session,
    deliveries: &[DeliveryId],
) -> Result<Vec<Option<Standing>>, EngineError> {
    let events: Vec<Uuid> = deliveries.iter().map(|id| uuid(id.event)).collect();
    let routes: Vec<&str> = deliveries.iter().map(|id| id.route.as_str()).collect();
    let epochs: Vec<i32> = deliveries.iter().map(|id| i32::try_from(id.epoch).unwrap_or(i32::MAX)).collect();
    let sql = "SELECT w.place, d.state, d.result, d.error, d.cause
             FROM unnest($1::uuid[], $2::text[], $3::int[]) WITH ORDINALITY AS w(event, route, epoch, place)
             JOIN oncehook.deliveries d ON d.event = w.event AND d.route = w.route AND d.epoch = w.epoch";
    let mut standings = vec![None; deliveries.len()];
    for row in session.rows(sql, &[&events, &routes, &epochs]).await? {
        let place = usize::try_from(row.get::<_, i64>(0) - 1).unwrap_or(usize::MAX);
        if let (Some(standing), Some(state)) = (standings.get_mut(place), DeliveryState::parse(row.get(1))) {
            *standing = Some(Standing { state, result: row.get(2), error: row.get(3), cause: row.get(4) });
        }
    }
    Ok(standings)
}

/// Copies of these will be answered without asking the journal again. So, as in [`first_ids`](super::queries::first_ids), a mark in
/// the log makes the commit wait until the synchronous replicas have all that was seen.
async fn recent_keys(session: &Session, limit: usize) -> Result<Vec<RecentKey>, EngineError> {
    let sql = "SELECT k.source, k.key, k.event, k.digest, k.expires_at,
                      (SELECT CASE WHEN current_setting('synchronous_standby_names') <> ''
                                   THEN pg_logical_emit_message(true, 'oncehook', '') END)
                 FROM (SELECT id, source, key FROM oncehook.events ORDER BY id DESC LIMIT $1) e
                 JOIN oncehook.keys k ON k.source = e.source AND k.key = e.key AND k.event = e.id
                ORDER BY k.event DESC";
    let rows = session.rows(sql, &[&i64::try_from(limit).unwrap_or(i64::MAX)]).await?;
    let mut keys = Vec::with_capacity(rows.len());
    for row in &rows {
        let Some(key) = EventKey::from_bytes(row.get(1)) else { continue };
        keys.push(RecentKey {
            source: row.get(0),
            key,
            event: event_id(row.get(2)),
            digest: digest(row.get(3))?,
            expires_at: UnixMicros(row.get(4)),
        });
    }
    Ok(keys)
}

pub(super) fn count(row: &Row, column: usize) -> u64 {
    row.get::<_, i64>(column).unsigned_abs()
}

async fn deliveries(
    session: &Session,
    events: &Vec<Uuid>,
) -> Result<HashMap<Uuid, Vec<Delivery>>, EngineError> {
    let sql = "SELECT event, route, epoch, state, attempt, CASE WHEN run_at = $2 THEN coalesce(blocked_at, run_at) ELSE run_at END,
                      result, error, cause, settled_at, blocked_at, parked_at
                 FROM oncehook.deliveries WHERE event = ANY($1) ORDER BY event, route, epoch";
    let mut found: HashMap<Uuid, Vec<Delivery>> = HashMap::new();
    for row in session.rows(sql, &[events, &NO_TIME.0]).await? {
        found.entry(row.get(0)).or_default().push(Delivery {
            route: row.get(1),
            epoch: number(row.get(2)),
            state: row.get(3),
            attempt: number(row.get(4)),
            run_at: UnixMicros(row.get(5)),
            result: row.get(6),
            error: row.get(7),
            cause: row.get(8),
            settled_at: row.get::<_, Option<i64>>(9).map(UnixMicros),
            blocked_at: row.get::<_, Option<i64>>(10).map(UnixMicros),
            parked_at: row.get::<_, Option<i64>>(11).map(UnixMicros),
            attempts: Vec::new(),
        });
    }
    Ok(found)
}

/// Adds the latest tries to an event's deliveries. Lists do without.
async fn tell_attempts(session: &Session, event: &mut EventSummary) -> Result<(), EngineError> {
    let sql = "SELECT a.route, a.epoch, a.attempt, a.started_at, a.finished_at, a.outcome, a.error
                 FROM oncehook.attempts a JOIN oncehook.deliveries d USING (event, route, epoch)
                WHERE a.event = $1 AND a.attempt > d.attempt - $2 ORDER BY a.route, a.epoch, a.attempt";
    let shown = i32::try_from(ATTEMPTS_SHOWN).unwrap_or(i32::MAX);
    for row in session.rows(sql, &[&uuid(event.id), &shown]).await? {
        let (route, epoch): (&str, u32) = (row.get(0), number(row.get(1)));
        let of = |delivery: &&mut Delivery| delivery.route == route && delivery.epoch == epoch;
        event.deliveries.iter_mut().filter(of).for_each(|delivery| {
            delivery.attempts.push(Attempt {
                number: number(row.get(2)),
                started_at: UnixMicros(row.get(3)),
                finished_at: row.get::<_, Option<i64>>(4).map(UnixMicros),
                outcome: row.get(5),
                error: row.get(6),
            });
        });
    }
    for delivery in &mut event.deliveries {
        let unleased = delivery.unleased_success(delivery.attempts.last());
        delivery.attempts.extend(unleased);
    }
    Ok(())
}

/// The latest orders, oldest first, and how many there are.
async fn audit(session: &Session, event: EventId) -> Result<(Vec<AuditEntry>, u64), EngineError> {
    let subject = event.to_string();
    let sql = "SELECT count(*) FROM oncehook.audit WHERE subject = $1";
    let total = session.row(sql, &[&subject]).await?.map_or(0, |row| count(&row, 0));
    let sql = "SELECT at, who, action, reason, detail FROM oncehook.audit
                WHERE subject = $1 ORDER BY id DESC LIMIT $2";
    let rows = session.rows(sql, &[&subject, &i64::from(ORDERS_SHOWN)]).await?;
    let entry = |row: &Row| AuditEntry {
        at: UnixMicros(row.get(0)),
        who: row.get(1),
        action: row.get(2),
        reason: row.get(3),
        detail: row.get(4),
    };
    Ok((rows.iter().rev().map(entry).collect(), total))
}

async fn conflicts(session: &Session, event: EventId) -> Result<Vec<Conflict>, EngineError> {
    let sql = "SELECT digest, count, first_at, last_at, octet_length(body)::bigint FROM oncehook.conflicts
                WHERE event = $1 ORDER BY first_at, digest";
    let rows = session.rows(sql, &[&uuid(event)]).await?;
    let conflict = |row: &Row| Conflict {
        digest: row.get::<_, &[u8]>(0).try_into().ok(),
        count: count(row, 1),
        first_at: UnixMicros(row.get(2)),
        last_at: UnixMicros(row.get(3)),
        size: count(row, 4),
    };
    Ok(rows.iter().map(conflict).collect())
}

async fn body(session: &Session, id: EventId) -> Result<Option<StoredBody>, EngineError> {
    let row = session.row("SELECT headers, body FROM oncehook.events WHERE id = $1", &[&uuid(id)]).await?;
    let bytes = |row: &Row, column: usize| Bytes::copy_from_slice(row.get(column));
    Ok(row.map(|row| StoredBody { headers: bytes(&row, 0), body: bytes(&row, 1) }))
}

async fn backlog(session: &Session) -> Result<Vec<Backlog>, EngineError> {
    let mut routes: BTreeMap<String, Backlog> = BTreeMap::new();
    // Each part walks one of the partial indexes, so it costs what waits and not what was.
    for (part, sql) in [
        // What waits for its turn is due at no time: the largest number.
        "SELECT route, count(*), nullif(min(run_at), 9223372036854775807)
           FROM oncehook.deliveries WHERE state IN ('ready', 'retrying') GROUP BY route",
        "SELECT route, count(*), NULL::bigint FROM oncehook.deliveries WHERE state = 'running' GROUP BY route",
        "SELECT route, count(*), NULL::bigint FROM oncehook.deliveries WHERE state = 'dead' GROUP BY route",
        "SELECT route, count(*), NULL::bigint FROM oncehook.deliveries WHERE state = 'parked' GROUP BY route",
        "SELECT route, count(*), min(blocked_at) FROM oncehook.deliveries
          WHERE blocked_at IS NOT NULL AND state IN ('ready', 'retrying') AND run_at = 9223372036854775807 GROUP BY route",
    ]
    .into_iter()
    .enumerate()
    {
        for row in session.rows(sql, &[]).await? {
            let route: String = row.get(0);
            let backlog = routes.entry(route.clone()).or_insert_with(|| Backlog::none(route));
            let (found, since) = (count(&row, 1), row.get::<_, Option<i64>>(2).map(UnixMicros));
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
}

impl JournalReader for PostgresJournal {
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
