//! What people read: one event's story (its deliveries and their tries, its copies, other bodies under its key, what
//! operators did), counts, bodies, and how deliveries stand.
//!
//! Does not: count what is still in memory. The journal adds that (`with_pending`).

use std::collections::{BTreeMap, HashMap};

use oncehook_verify::EventKey;

use super::error::EngineError;
use super::value::{Param, Row};
use super::{Result, Session};
use crate::delivery::{DeliveryId, DeliveryState};
use crate::event::EventId;
use crate::journal::tally::parse_latest;
use crate::journal::{
    ATTEMPTS_SHOWN, Attempt, AuditEntry, Backlog, Conflict, Delivery, EventDetail, EventPage, EventStatus,
    EventSummary, Flag, ORDERS_SHOWN, RecentKey, SourceCounts, Standing, Stats, StoredBody,
};

/// An event's status, derived: quarantined, else unrouted, else the worst of its deliveries.
macro_rules! status {
    () => {
        "CASE WHEN EXISTS (SELECT 1 FROM oncehook.flags f WHERE f.event = e.id AND f.flag = 'quarantined') THEN 'quarantined'
              ELSE coalesce((SELECT w.state FROM oncehook.deliveries w WHERE w.event = e.id
                              ORDER BY CASE w.state WHEN 'dead' THEN 0 WHEN 'parked' THEN 1 WHEN 'retrying' THEN 2
                                                    WHEN 'running' THEN 3 WHEN 'ready' THEN 4 WHEN 'superseded' THEN 5
                                                    WHEN 'skipped' THEN 6 ELSE 7 END
                              LIMIT 1), 'unrouted') END"
    };
}
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(crate) use status;

/// The columns of a delivery `d` behind its event.
macro_rules! delivery_columns {
    () => {
        ", d.route, d.epoch, d.state, d.attempt,
         CASE WHEN d.run_at = 9223372036854775807 THEN coalesce(d.blocked_at, d.run_at) ELSE d.run_at END,
         d.result, d.error, d.cause, d.settled_at, d.blocked_at, d.parked_at "
    };
}
pub(crate) use delivery_columns;

/// A session by which people read.
pub(crate) trait Tells: Session {
    /// Id, source, key, type, entity, status, integrity, occurred, received, size, duplicates, flags with reasons (`flag:reason,…`),
    /// digest, of events `e`. Ends with the tables; a condition goes behind it.
    const SUMMARY: &'static str = concat!(
        "SELECT e.id, e.source, e.key, e.type, e.entity, ",
        status!(),
        ", e.integrity, e.occurred_at, e.received_at, octet_length(e.body),
           coalesce((SELECT d.journal + d.memory + d.redis FROM oncehook.duplicates d WHERE d.event = e.id), 0),
           (SELECT string_agg(f.flag || coalesce(':' || f.reason, ''), ',') FROM oncehook.flags f WHERE f.event = e.id),
           e.digest
      FROM oncehook.events e"
    );
    /// `$1`: table of events. Returns event, route, epoch, state, attempt, due (or since when it waits for its turn), result, error,
    /// cause, settled, blocked, parked.
    const DELIVERIES: &'static str = concat!(
        "SELECT d.event",
        delivery_columns!(),
        "FROM oncehook.deliveries d WHERE d.event = ANY($1) ORDER BY d.event, d.route, d.epoch"
    );
    /// `$1`: event, `$2`: how many of each delivery. Returns route, epoch, attempt, started, finished, outcome, error.
    const ATTEMPTS: &'static str = "SELECT a.route, a.epoch, a.attempt, a.started_at, a.finished_at, a.outcome, a.error
         FROM oncehook.attempts a JOIN oncehook.deliveries d USING (event, route, epoch)
        WHERE a.event = $1 AND a.attempt + $2 > d.attempt ORDER BY a.route, a.epoch, a.attempt";
    /// `$1`: event. Returns first, last, and the latest as JSON.
    // Whatever the column's type is, a concatenation is text.
    const DUPLICATES: &'static str = "
        SELECT first_at, last_at, concat(latest, '') FROM oncehook.duplicates WHERE event = $1";
    /// `$1`: subject, `$2`: limit. Returns time, who, action, reason, detail, and how many there are; newest first.
    const AUDIT: &'static str = "SELECT at, who, action, reason, detail, count(*) OVER () FROM oncehook.audit
        WHERE subject = $1 ORDER BY id DESC LIMIT $2";
    /// `$1`: event. Returns digest, count, first, last, size.
    const CONFLICTS: &'static str = "
        SELECT digest, count, first_at, last_at, octet_length(body) FROM oncehook.conflicts
         WHERE event = $1 ORDER BY first_at, digest";
    /// `$1`: event. Returns headers, body.
    const BODY: &'static str = "SELECT e.headers, e.body FROM oncehook.events e WHERE e.id = $1";
    /// Returns the highest id that is stored.
    const LAST_ID: &'static str = "SELECT id FROM oncehook.events ORDER BY id DESC LIMIT 1";
    /// Returns source, events, duplicates, conflicts, quarantined; a source may have several rows.
    const STATS: &'static str = "SELECT source, events, duplicates, conflicts, quarantined FROM oncehook.totals";
    /// `$1`: table of deliveries. Returns place, state, result, error, cause.
    const STANDINGS: &'static str = "SELECT w.place, d.state, d.result, d.error, d.cause
        FROM unnest($1::uuid[], $2::text[], $3::int[]) WITH ORDINALITY AS w(event, route, epoch, place)
        JOIN oncehook.deliveries d ON d.event = w.event AND d.route = w.route AND d.epoch = w.epoch";
    /// `$1`: limit. Returns source, key, event, digest, expiry; newest first.
    // Copies of these will be answered without asking the journal again. So, as in `first_ids`, a message in the log makes
    // the commit wait until the synchronous replicas have all that was seen.
    const RECENT_KEYS: &'static str = "SELECT k.source, k.key, k.event, k.digest, k.expires_at,
              (SELECT CASE WHEN current_setting('synchronous_standby_names') <> ''
                           THEN pg_logical_emit_message(true, 'oncehook', '') END)
         FROM (SELECT id, source, key FROM oncehook.events ORDER BY id DESC LIMIT $1) e
         JOIN oncehook.keys k ON k.source = e.source AND k.key = e.key AND k.event = e.id
        ORDER BY k.event DESC";
    /// Returns what (0 waits, 1 runs, 2 is dead, 3 is parked, 4 is blocked), route, how many, and since when.
    // Each part walks one of the partial indexes, so it costs what waits and not what was. What waits for its turn is due at
    // no time: the largest number.
    const BACKLOG: &'static str = "SELECT 0, route, count(*), nullif(min(run_at), 9223372036854775807)
          FROM oncehook.deliveries WHERE state IN ('ready', 'retrying') GROUP BY route
        UNION ALL SELECT 1, route, count(*), NULL FROM oncehook.deliveries WHERE state = 'running' GROUP BY route
        UNION ALL SELECT 2, route, count(*), NULL FROM oncehook.deliveries WHERE state = 'dead' GROUP BY route
        UNION ALL SELECT 3, route, count(*), NULL FROM oncehook.deliveries WHERE state = 'parked' GROUP BY route
        UNION ALL SELECT 4, route, count(*), min(blocked_at) FROM oncehook.deliveries
         WHERE blocked_at IS NOT NULL AND state IN ('ready', 'retrying') AND run_at = 9223372036854775807 GROUP BY route";
    /// `$1`: table of alias (bytes), event. The first of an alias stays.
    const KEEP_ALIASES: &'static str = "INSERT INTO oncehook.spool_aliases (alias, event)
        SELECT encode(t.alias, 'hex')::uuid, t.event FROM unnest($1::bytea[], $2::uuid[]) AS t(alias, event)
        ON CONFLICT (alias) DO NOTHING";
    /// `$1`: alias. Returns the event that it stands for.
    const RESOLVE_ALIAS: &'static str = "
        SELECT e.id FROM oncehook.spool_aliases a JOIN oncehook.events e ON a.event = e.id
         WHERE a.alias = $1";
}

/// One event's story, without the duplicates that are still in memory.
pub(crate) async fn show<S: Tells>(session: &mut S, id: EventId) -> Result<Option<EventDetail>> {
    let Some(row) = session.row(&format!("{} WHERE e.id = $1", S::SUMMARY), &[id.into()]).await? else {
        return Ok(None);
    };
    let mut events = [summary(&row)?];
    add_deliveries(session, &mut events).await?;
    let [mut event] = events;
    add_attempts(session, &mut event).await?;
    let (mut duplicates_seen, mut latest) = (None, String::new());
    if let Some(row) = session.row(S::DUPLICATES, &[id.into()]).await? {
        (duplicates_seen, latest) = (Some((row.time(0)?, row.time(1)?)), row.text(2)?);
    }
    let audited = session.rows(S::AUDIT, &[(&id.to_string()).into(), ORDERS_SHOWN.into()]).await?;
    let conflicts = session.rows(S::CONFLICTS, &[id.into()]).await?;
    Ok(Some(EventDetail {
        event,
        digest: row.digest(12)?,
        duplicates_seen,
        duplicates_latest: parse_latest(&latest).into(),
        conflicts: conflicts.iter().map(conflict).collect::<Result<_>>()?,
        // Oldest first.
        audit: audited.iter().rev().map(audit_entry).collect::<Result<_>>()?,
        audit_total: audited.first().map_or(Ok(0), |row| row.count(5))?,
    }))
}

/// The page that these events make, with their deliveries: one event more than `limit` says that there may be more.
pub(crate) async fn page<S: Tells>(session: &mut S, mut events: Vec<EventSummary>, limit: usize) -> Result<EventPage> {
    let more = events.len() > limit;
    events.truncate(limit);
    add_deliveries(session, &mut events).await?;
    let next = events.last().filter(|_| more).map(|event| event.id);
    Ok(EventPage { events, next })
}

async fn add_deliveries<S: Tells>(session: &mut S, events: &mut [EventSummary]) -> Result<()> {
    let asked = Param::ids(events.iter().map(|event| event.id));
    let mut found: HashMap<EventId, Vec<Delivery>> = HashMap::new();
    for row in session.rows(S::DELIVERIES, &[asked]).await? {
        found.entry(row.event(0)?).or_default().push(delivery(&row)?);
    }
    events.iter_mut().for_each(|event| event.deliveries = found.remove(&event.id).unwrap_or_default());
    Ok(())
}

/// Adds the latest tries to an event's deliveries. Lists do without.
async fn add_attempts<S: Tells>(session: &mut S, event: &mut EventSummary) -> Result<()> {
    for row in session.rows(S::ATTEMPTS, &[event.id.into(), ATTEMPTS_SHOWN.into()]).await? {
        let (route, epoch) = (row.text(0)?, row.small(1)?);
        let of = |delivery: &&mut Delivery| delivery.route == route && delivery.epoch == epoch;
        if let Some(delivery) = event.deliveries.iter_mut().find(of) {
            delivery.attempts.push(Attempt {
                number: row.small(2)?,
                started_at: row.time(3)?,
                finished_at: row.maybe_time(4)?,
                outcome: row.maybe_text(5)?,
                error: row.maybe_text(6)?,
            });
        }
    }
    for delivery in &mut event.deliveries {
        let unleased = delivery.unleased_success(delivery.attempts.last());
        delivery.attempts.extend(unleased);
    }
    Ok(())
}

pub(crate) fn summary(row: &impl Row) -> Result<EventSummary> {
    let (flags, quarantine) = Flag::parse_list(row.maybe_text(11)?.as_deref());
    Ok(EventSummary {
        id: row.event(0)?,
        source: row.text(1)?,
        key: EventKey::from_bytes(row.bytes(2)?).ok_or_else(EngineError::damaged)?,
        kind: row.maybe_text(3)?,
        entity: row.maybe_text(4)?,
        status: EventStatus::parse(&row.text(5)?).unwrap_or(EventStatus::Unrouted),
        flags,
        quarantine,
        integrity: row.text(6)?,
        occurred_at: row.maybe_time(7)?,
        received_at: row.time(8)?,
        size: row.count(9)?,
        duplicates: row.count(10)?,
        deliveries: Vec::new(),
    })
}

fn delivery(row: &impl Row) -> Result<Delivery> {
    Ok(Delivery {
        route: row.text(1)?,
        epoch: row.small(2)?,
        state: row.text(3)?,
        attempt: row.small(4)?,
        run_at: row.time(5)?,
        result: row.maybe_text(6)?,
        error: row.maybe_text(7)?,
        cause: row.maybe_text(8)?,
        settled_at: row.maybe_time(9)?,
        blocked_at: row.maybe_time(10)?,
        parked_at: row.maybe_time(11)?,
        attempts: Vec::new(),
    })
}

fn audit_entry(row: &impl Row) -> Result<AuditEntry> {
    let (at, who, action) = (row.time(0)?, row.text(1)?, row.text(2)?);
    Ok(AuditEntry { at, who, action, reason: row.maybe_text(3)?, detail: row.maybe_text(4)? })
}

fn conflict(row: &impl Row) -> Result<Conflict> {
    let (digest, count, first_at) = (row.bytes(0)?.try_into().ok(), row.count(1)?, row.time(2)?);
    Ok(Conflict { digest, count, first_at, last_at: row.time(3)?, size: row.count(4)? })
}

pub(crate) async fn body<S: Tells>(session: &mut S, id: EventId) -> Result<Option<StoredBody>> {
    let row = session.row(S::BODY, &[id.into()]).await?;
    row.map(|mut row| Ok(StoredBody { headers: row.take_bytes(0)?, body: row.take_bytes(1)? })).transpose()
}

/// Counts of every source, without the duplicates that are still in memory.
pub(crate) async fn stats<S: Tells>(session: &mut S) -> Result<Stats> {
    let mut sources: BTreeMap<String, SourceCounts> = BTreeMap::new();
    for row in session.rows(S::STATS, &[]).await? {
        let source = row.text(0)?;
        let counts = sources.entry(source.clone()).or_insert_with(|| SourceCounts { source, ..Default::default() });
        counts.events += row.count(1)?;
        counts.duplicates += row.count(2)?;
        counts.conflicts += row.count(3)?;
        counts.quarantined += row.count(4)?;
    }
    Ok(Stats { sources: sources.into_values().collect() })
}

/// How deliveries stand, all in one statement.
pub(crate) async fn standings<S: Tells>(session: &mut S, asked: &[DeliveryId]) -> Result<Vec<Option<Standing>>> {
    let mut standings = vec![None; asked.len()];
    for row in session.rows(S::STANDINGS, &[Param::deliveries(asked)]).await? {
        let state = DeliveryState::parse(&row.text(1)?);
        if let (Some(standing), Some(state)) = (standings.get_mut(row.place(0)?), state) {
            let (result, error, cause) = (row.maybe_text(2)?, row.maybe_text(3)?, row.maybe_text(4)?);
            *standing = Some(Standing { state, result, error, cause });
        }
    }
    Ok(standings)
}

/// Keys of the latest events, as the ledger has them.
pub(crate) async fn recent_keys<S: Tells>(session: &mut S, limit: usize) -> Result<Vec<RecentKey>> {
    let rows = session.rows(S::RECENT_KEYS, &[limit.into()]).await?;
    let mut keys = Vec::with_capacity(rows.len());
    for row in &rows {
        let Some(key) = EventKey::from_bytes(row.bytes(1)?) else { continue };
        let (source, event, digest) = (row.text(0)?, row.event(2)?, row.digest(3)?);
        keys.push(RecentKey { source, key, event, digest, expires_at: row.time(4)? });
    }
    Ok(keys)
}

/// What waits, per route.
pub(crate) async fn backlog<S: Tells>(session: &mut S) -> Result<Vec<Backlog>> {
    let mut routes: BTreeMap<String, Backlog> = BTreeMap::new();
    for row in session.rows(S::BACKLOG, &[]).await? {
        let (route, many, since) = (row.text(1)?, row.count(2)?, row.maybe_time(3)?);
        let backlog = routes.entry(route.clone()).or_insert_with(|| Backlog::none(route));
        match row.int(0)? {
            0 => (backlog.waiting, backlog.oldest) = (backlog.waiting + many, since),
            1 => backlog.running = many,
            2 => backlog.dead = many,
            3 => backlog.waiting += many,
            _ => (backlog.blocked, backlog.blocked_since) = (many, since),
        }
    }
    Ok(routes.into_values().collect())
}
