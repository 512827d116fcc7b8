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
use super::buckets::{
    self, Part, ahead_value, before, behind, bounds, bucket_of, first_of_bucket, ids, usual, value_of,
};
use crate::event::EventId;
use crate::journal::sql::Result;
use crate::journal::sql::story::summary;
use crate::journal::{EventQuery, EventStatus, EventSummary};

/// Candidates that are looked at by one statement: few at first, because a page may be full soon.
const FIRST_CANDIDATES: i64 = 4;
const MOST_CANDIDATES: i64 = 256;

/// How many of the newest events are looked at before a queue that is not in their order is sorted.
const STRETCH: i64 = 1_000;

/// Returns held events between `$1` and `$2`, newest first, at most `$3`.
const HELD: &str = "SELECT event FROM oncehook.flags /*! FORCE INDEX (oncehook_flags_flag) */
                     WHERE flag = 'quarantined' AND event BETWEEN $1 AND $2 ORDER BY event DESC LIMIT $3";

/// Returns the event that comes `$3` events behind the newest one between `$1` and `$2`.
const BEHIND_STRETCH: &str = "SELECT id FROM oncehook.events /*! FORCE INDEX (PRIMARY) */ WHERE id BETWEEN $1 AND $2
                               ORDER BY id DESC LIMIT 1 OFFSET $3";

/// Returns the last event that, with all before it, is in the index.
const INDEXED: &str = "SELECT last FROM oncehook.indexed";

/// The beginning of a subquery for deliveries `q` of an event `e`, in which a condition or a limit goes on.
const DELIVERY: &str = "(SELECT 1 FROM oncehook.deliveries q /*! FORCE INDEX (PRIMARY) */ WHERE q.event = e.id";

/// Finds one event more than the page holds, newest first. The choice of the way is here and nowhere else.
pub(super) async fn find<E: Reads>(session: &mut E::Session, query: &EventQuery) -> Result<Vec<EventSummary>> {
    let wanted = query.limit.saturating_add(1);
    let mut search = Search::<E> { session, query, wanted, events: Vec::new() };
    if let Some(key) = &query.key {
        search.by_key(key).await?;
        return Ok(search.events);
    }
    if let Some(above) = buckets::ahead(query) {
        search.in_buckets(ahead_value(), above).await?;
    }
    let status = query.status.filter(|status| is_listed(*status));
    match (status, value_of(query)) {
        // An entity has fewer events than a status, and a type or source not many more.
        (Some(status), _) if query.entity.is_none() => search.in_status(status, usual(query)).await?,
        (_, Some(value)) => search.in_buckets(value, usual(query)).await?,
        (_, None) => search.scan(&[usual(query)]).await?,
    }
    Ok(search.events)
}

/// Whether an index knows the events in this status: not nearly all events, and not those that the buckets know.
fn is_listed(status: EventStatus) -> bool {
    !matches!(status, EventStatus::Succeeded | EventStatus::Unrouted)
}

/// Where candidates are written down.
#[derive(Clone, Copy)]
enum Candidates {
    /// Buckets in which this value occurs.
    Buckets(i64),
    /// Events in this status; whether they are sorted for each page.
    Status(EventStatus, bool),
}

/// A list that is being filled, newest first.
struct Search<'s, E: Reads> {
    session: &'s mut E::Session,
    query: &'s EventQuery,
    /// How many events are wanted.
    wanted: usize,
    /// What was found.
    events: Vec<EventSummary>,
}

impl<E: Reads> Search<'_, E> {
    /// Asks the ledger. Keys are scoped to a source, so every source is asked.
    async fn by_key(&mut self, key: &EventKey) -> Result<()> {
        let mut events = ids(&self.session.rows(E::BY_KEY, &[key.into()]).await?)?;
        events.sort_unstable_by(|older, newer| newer.cmp(older));
        let parts: Vec<Part> = events.into_iter().map(|event| Part::of_one(event).within(bounds(self.query))).collect();
        self.scan(&parts).await
    }

    /// Looks at all events that are not in the index yet, then at the buckets in which this value occurs.
    async fn in_buckets(&mut self, value: i64, within: Part) -> Result<()> {
        let last = self.session.row(INDEXED, &[]).await?.ok_or_else(EngineError::damaged)?.event(0)?;
        self.scan(&[Part { from: behind(last), ..Part::all() }.within(within)]).await?;
        self.follow(Candidates::Buckets(value), Part { to: last, ..Part::all() }.within(within)).await
    }

    /// Looks at the events of which a delivery is in this state, or that are held.
    async fn in_status(&mut self, status: EventStatus, mut within: Part) -> Result<()> {
        let is_queue =
            matches!(status, EventStatus::Ready | EventStatus::Retrying | EventStatus::Running | EventStatus::Parked);
        if is_queue {
            // The index of a queue is not in the order of events, and all of its part is sorted for each page. A long queue
            // fills a page right here instead.
            let asked = [Param::from(within.from), within.to.into(), STRETCH.into()];
            let Some(row) = self.session.row(BEHIND_STRETCH, &asked).await? else { return self.scan(&[within]).await };
            let from = row.event(0)?;
            self.scan(&[Part { from, ..within }]).await?;
            within.to = before(from);
        }
        self.follow(Candidates::Status(status, is_queue), within).await
    }

    /// Looks at candidates only, newest first.
    async fn follow(&mut self, candidates: Candidates, mut rest: Part) -> Result<()> {
        let mut at_once = match candidates {
            Candidates::Status(_, true) => MOST_CANDIDATES,
            _ => FIRST_CANDIDATES,
        };
        while self.events.len() < self.wanted && !rest.is_empty() {
            let (parts, oldest) = match candidates {
                Candidates::Buckets(value) => self.parts_with(value, rest, at_once).await?,
                Candidates::Status(status, _) => {
                    let found = self.newest_in(status, rest, at_once).await?;
                    let oldest = found.last().copied();
                    (found.into_iter().map(Part::of_one).collect(), oldest)
                }
            };
            let Some(oldest) = oldest else { break };
            self.scan(&parts).await?;
            if oldest <= rest.from {
                break;
            }
            rest.to = before(oldest);
            at_once = (at_once * 4).min(MOST_CANDIDATES);
        }
        Ok(())
    }

    async fn newest_in(&mut self, status: EventStatus, within: Part, limit: i64) -> Result<Vec<EventId>> {
        if status != EventStatus::Quarantined {
            return E::newest_in(self.session, status, within, limit).await;
        }
        ids(&self.session.rows(HELD, &[within.from.into(), within.to.into(), limit.into()]).await?)
    }

    /// Where in a part a value occurs, in the newest few of its buckets that have it; and where the oldest of these buckets
    /// begins.
    async fn parts_with(&mut self, value: i64, within: Part, limit: i64) -> Result<(Vec<Part>, Option<EventId>)> {
        let asked = [Param::from(value), bucket_of(within.from).into(), bucket_of(within.to).into(), limit.into()];
        let (mut parts, mut oldest) = (Vec::new(), None);
        for row in self.session.rows(E::BUCKETS, &asked).await? {
            let bucket = row.int(0)?;
            parts.push(Part::of_bucket(bucket, row.int(1)?, row.int(2)?).within(within));
            oldest = Some(first_of_bucket(bucket));
        }
        Ok((parts, oldest))
    }

    /// Walks parts of the events, given newest first, with one statement. Only the conditions that were given are in it, so
    /// that each is planned for itself.
    async fn scan(&mut self, parts: &[Part]) -> Result<()> {
        let parts: Vec<Part> = parts.iter().copied().filter(|part| !part.is_empty()).collect();
        let (query, wanted) = (self.query, self.wanted - self.events.len());
        if parts.is_empty() || wanted == 0 {
            return Ok(());
        }
        let mut params: Vec<Param<'_>> = vec![wanted.into()];
        let mut conditions = String::new();
        conditions.extend(query.status.and_then(needed).map(|needed| format!(" AND {needed}")));
        for (condition, param) in [
            ("e.source =", query.source.as_ref().map(Param::from)),
            ("e.type =", query.kind.as_ref().map(Param::from)),
            ("e.entity =", query.entity.as_ref().map(Param::from)),
            ("e.received_at >=", query.since.map(Param::from)),
            ("e.received_at <", query.until.map(Param::from)),
            // Last: it asks two other tables.
            (E::STATUS_IS, query.status.map(|status| status.as_str().into())),
        ] {
            if let Some(param) = param {
                params.push(param);
                conditions.push_str(&format!(" AND {condition} ${}", params.len()));
            }
        }
        let sql = E::scan(&parts, &conditions, &mut params);
        let rows = self.session.rows(&sql, &params).await?;
        let mut found: Vec<EventSummary> = rows.iter().map(summary).collect::<Result<_>>()?;
        found.sort_unstable_by_key(|event| std::cmp::Reverse(event.id));
        found.truncate(wanted);
        self.events.extend(found);
        Ok(())
    }
}

/// What an event in a status must have, where that is cheaper to ask than the whole status and true of few.
fn needed(status: EventStatus) -> Option<String> {
    match status {
        EventStatus::Unrouted => Some(format!("{DELIVERY} LIMIT 1) IS NULL")),
        EventStatus::Parked | EventStatus::Retrying | EventStatus::Running | EventStatus::Ready => {
            Some(format!("{DELIVERY} AND q.state = '{}' LIMIT 1) IS NOT NULL", status.as_str()))
        }
        // Nearly every event, or found by name.
        _ => None,
    }
}
