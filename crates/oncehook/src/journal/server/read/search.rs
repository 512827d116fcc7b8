//! Finds the events of a list: which way a query goes, and the walk.
//!
//! Looks at the buckets in which the index says that a value occurs, and at all events that are not in the index yet, so a list
//! never lags behind the accepts. What is held, waits or ended badly is found by the engine's own indexes.
//!
//! Promises: newest first, and each page goes on below the last event of the one before. A source, a type, an entity, a key or
//! a status costs what it finds, and not the whole history. The index only names candidates: the scan decides.
//! Does not: bound the time of two filters that are common alone and rare together; the reader's deadline ends that.

use oncehook_verify::EventKey;

use super::super::engine::Session;
use super::super::error::EngineError;
use super::super::value::{Param, Row};
use super::Reads;
use super::buckets::{self, Part, ahead_value, before, behind, bounds, bucket_of, first_of_bucket, usual, value_of};
use crate::event::EventId;
use crate::journal::{EventQuery, EventStatus, EventSummary, Flag};

/// Candidates that are looked at by one statement: few at first, because a page may be full soon.
const FIRST_CANDIDATES: i64 = 4;
const MOST_CANDIDATES: i64 = 256;

/// How many of the newest events are looked at before a queue that is not in their order is sorted.
const STRETCH: i64 = 1_000;

/// Finds one event more than the page holds, newest first. The choice of the way is here and nowhere else.
pub(super) async fn find<E: Reads>(
    session: &mut E::Session,
    query: &EventQuery,
) -> Result<Vec<EventSummary>, EngineError> {
    let wanted = query.limit.saturating_add(1);
    if let Some(key) = &query.key {
        return find_by_key::<E>(session, query, key, wanted).await;
    }
    let mut events = match buckets::ahead(query) {
        Some(above) => in_buckets::<E>(session, query, ahead_value(), above, wanted).await?,
        None => Vec::new(),
    };
    let (usual, rest) = (usual(query), wanted - events.len());
    let status = query.status.filter(|status| is_listed(*status));
    events.extend(match (status, value_of(query)) {
        // An entity has fewer events than a status, and a type or source not many more.
        (Some(status), _) if query.entity.is_none() => in_status::<E>(session, query, status, usual, rest).await?,
        (_, Some(value)) => in_buckets::<E>(session, query, value, usual, rest).await?,
        (_, None) => scan::<E>(session, query, &[usual], rest).await?,
    });
    Ok(events)
}

/// Whether an index knows the events in this status: not nearly all events, and not those that the buckets know.
fn is_listed(status: EventStatus) -> bool {
    !matches!(status, EventStatus::Succeeded | EventStatus::Unrouted)
}

/// Asks the ledger. Keys are scoped to a source, so every source is asked.
async fn find_by_key<E: Reads>(
    session: &mut E::Session,
    query: &EventQuery,
    key: &EventKey,
    wanted: usize,
) -> Result<Vec<EventSummary>, EngineError> {
    let rows = session.rows(E::READ.by_key, &[key.into()]).await?;
    let mut events = ids(&rows)?;
    events.sort_unstable_by(|older, newer| newer.cmp(older));
    let parts = events.into_iter().map(|event| Part::of_one(event).within(bounds(query)));
    let parts: Vec<Part> = parts.filter(|part| !part.is_empty()).collect();
    scan::<E>(session, query, &parts, wanted).await
}

/// The events that rows name.
pub(in crate::journal) fn ids(rows: &[impl Row]) -> Result<Vec<EventId>, EngineError> {
    rows.iter().map(|row| row.event(0)).collect()
}

/// Looks at all events that are not in the index yet, then at the buckets in which this value occurs.
async fn in_buckets<E: Reads>(
    session: &mut E::Session,
    query: &EventQuery,
    value: i64,
    within: Part,
    wanted: usize,
) -> Result<Vec<EventSummary>, EngineError> {
    let row = session.row(E::READ.indexed, &[]).await?;
    let last = row.ok_or_else(EngineError::damaged)?.event(0)?;
    let young = Part::from(behind(last)).within(within);
    let mut events = match young.is_empty() {
        true => Vec::new(),
        false => scan::<E>(session, query, &[young], wanted).await?,
    };
    let indexed = Part::to(last).within(within);
    let rest = wanted - events.len();
    events.extend(follow::<E>(session, query, Candidates::Buckets(value), indexed, rest).await?);
    Ok(events)
}

/// Looks at the events of which a delivery is in this state, or that are held.
async fn in_status<E: Reads>(
    session: &mut E::Session,
    query: &EventQuery,
    status: EventStatus,
    mut within: Part,
    wanted: usize,
) -> Result<Vec<EventSummary>, EngineError> {
    let mut events = Vec::new();
    let is_queue =
        matches!(status, EventStatus::Ready | EventStatus::Retrying | EventStatus::Running | EventStatus::Parked);
    if is_queue {
        // The index of a queue is not in the order of events, and all of its part is sorted for each page. A long queue fills a
        // page right here instead.
        let asked = [Param::from(within.from), within.to.into(), STRETCH.into()];
        let Some(row) = session.row(E::READ.stretch, &asked).await? else {
            return scan::<E>(session, query, &[within], wanted).await;
        };
        let from = row.event(0)?;
        events = scan::<E>(session, query, &[Part { from, ..within }], wanted).await?;
        within.to = before(from);
    }
    let rest = wanted - events.len();
    events.extend(follow::<E>(session, query, Candidates::Status(status, is_queue), within, rest).await?);
    Ok(events)
}

/// Where candidates are written down.
#[derive(Clone, Copy)]
enum Candidates {
    /// Buckets in which this value occurs.
    Buckets(i64),
    /// Events in this status; whether they are sorted for each page.
    Status(EventStatus, bool),
}

/// Looks at candidates only, newest first.
async fn follow<E: Reads>(
    session: &mut E::Session,
    query: &EventQuery,
    candidates: Candidates,
    mut rest: Part,
    wanted: usize,
) -> Result<Vec<EventSummary>, EngineError> {
    let mut events = Vec::new();
    let mut at_once = match candidates {
        Candidates::Status(_, true) => MOST_CANDIDATES,
        _ => FIRST_CANDIDATES,
    };
    while events.len() < wanted && !rest.is_empty() {
        let (parts, oldest) = match candidates {
            Candidates::Buckets(value) => parts_with::<E>(session, value, rest, at_once).await?,
            Candidates::Status(status, _) => {
                let found = newest_in::<E>(session, status, rest, at_once).await?;
                let oldest = found.last().copied();
                (found.into_iter().map(Part::of_one).collect(), oldest)
            }
        };
        let Some(oldest) = oldest else { break };
        events.extend(scan::<E>(session, query, &parts, wanted - events.len()).await?);
        if oldest <= rest.from {
            break;
        }
        rest.to = before(oldest);
        at_once = (at_once * 4).min(MOST_CANDIDATES);
    }
    Ok(events)
}

async fn newest_in<E: Reads>(
    session: &mut E::Session,
    status: EventStatus,
    within: Part,
    limit: i64,
) -> Result<Vec<EventId>, EngineError> {
    if status != EventStatus::Quarantined {
        return E::newest_in(session, status, within, limit).await;
    }
    let asked = [Param::from(within.from), within.to.into(), limit.into()];
    ids(&session.rows(E::READ.held, &asked).await?)
}

/// Where in a part a value occurs, in the newest few of its buckets that have it; and where the oldest of these buckets begins.
async fn parts_with<E: Reads>(
    session: &mut E::Session,
    value: i64,
    within: Part,
    limit: i64,
) -> Result<(Vec<Part>, Option<EventId>), EngineError> {
    let asked = [Param::from(value), bucket_of(within.from).into(), bucket_of(within.to).into(), limit.into()];
    let (mut parts, mut oldest) = (Vec::new(), None);
    for row in session.rows(E::READ.buckets, &asked).await? {
        let bucket = row.int(0)?;
        parts.push(Part::of_bucket(bucket, row.int(1)?, row.int(2)?).within(within));
        oldest = Some(first_of_bucket(bucket));
    }
    parts.retain(|part| !part.is_empty());
    Ok((parts, oldest))
}

/// Walks parts of the events, given newest first, with one statement. Only the conditions that were given are in it, so that
/// each is planned for itself.
async fn scan<E: Reads>(
    session: &mut E::Session,
    query: &EventQuery,
    parts: &[Part],
    wanted: usize,
) -> Result<Vec<EventSummary>, EngineError> {
    if parts.is_empty() {
        return Ok(Vec::new());
    }
    let mut params: Vec<Param<'_>> = vec![wanted.into()];
    let mut conditions = String::new();
    let needed = query.status.and_then(needed::<E>);
    conditions.extend(needed.map(|needed| format!(" AND {needed}")));
    for (condition, param) in [
        ("e.source", query.source.as_ref().map(|source| ("=", source.into()))),
        ("e.type", query.kind.as_ref().map(|kind| ("=", kind.into()))),
        ("e.entity", query.entity.as_ref().map(|entity| ("=", entity.into()))),
        ("e.received_at", query.since.map(|since| (">=", since.into()))),
        ("e.received_at", query.until.map(|until| ("<", until.into()))),
        // Last: it asks two other tables.
        (E::READ.status, query.status.map(|status| ("=", status.as_str().into()))),
    ] {
        if let Some((is, param)) = param {
            params.push(param);
            conditions.push_str(&format!(" AND {condition} {is} ${}", params.len()));
        }
    }
    let sql = E::scan(parts, &conditions, &mut params);
    let rows = session.rows(&sql, &params).await?;
    let mut events: Vec<EventSummary> = rows.iter().map(summary).collect::<Result<_, _>>()?;
    events.sort_unstable_by_key(|event| std::cmp::Reverse(event.id));
    events.truncate(wanted);
    Ok(events)
}

/// What an event in a status must have, where that is cheaper to ask than the whole status and true of few.
fn needed<E: Reads>(status: EventStatus) -> Option<String> {
    let delivery = E::READ.delivery;
    match status {
        EventStatus::Unrouted => Some(format!("{delivery} LIMIT 1) IS NULL")),
        EventStatus::Parked | EventStatus::Retrying | EventStatus::Running | EventStatus::Ready => {
            Some(format!("{delivery} AND q.state = '{}' LIMIT 1) IS NOT NULL", status.as_str()))
        }
        // Nearly every event, or found by name.
        _ => None,
    }
}

pub(super) fn summary(row: &impl Row) -> Result<EventSummary, EngineError> {
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
