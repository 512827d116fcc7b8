//! Finding events: what is marked behind the accepts, which way a list query goes, and the walk itself.
//!
//! An index on the events for every filter would cost each accept a third more. Instead the ids are cut into spans of about
//! four seconds, and `marks` says which sources, types and entities occur in a span, and whether an event without
//! deliveries does, or one whose id runs ahead of its receipt. [`mark`] fills it behind the accepts. Readers look at the spans that are marked with what they want, and
//! at all events behind the last marked span, so nobody sees a lag.
//!
//! Promises: newest first, and each page goes on below the last event of the one before. A source, a type, an entity, a key or
//! a status costs what it finds, and not the whole history. A mark may promise too much, never too little: a span is
//! marked once [`SETTLED_MICROS`] have passed, and an event that is stored later than that marks its span itself (`queries`).
//! Does not: bound the time of two filters that are common alone and rare together; the reader's deadline ends that. Needs
//! every append to be committed or undone within [`SETTLED_MICROS`] less [`LATE_MICROS`](spans::LATE_MICROS); the server's own timeout for them
//! is a fifth of that.

use oncehook_verify::{EventKey, UnixMicros};
use tokio_postgres::Row;
use tokio_postgres::types::ToSql;
use uuid::Uuid;

use super::connection::{EngineError, Session};
use super::queries::event_id;
use super::reader::count;
use crate::journal::spans::{
    self, AHEAD, FIRST_CANDIDATES, MARKED_AT_ONCE, MOST_CANDIDATES, Part, SETTLED_MICROS, STRETCH, before,
    bounds, first_of, first_of_span, mark_of, more_candidates, span_of, usual,
};
use crate::journal::{EventQuery, EventStatus, EventSummary, Flag};

/// The events above the usual ones.
async fn ahead(
    session: &Session,
    query: &EventQuery,
    wanted: usize,
) -> Result<Vec<EventSummary>, EngineError> {
    let Some(above) = spans::ahead(query) else { return Ok(Vec::new()) };
    marked(session, query, AHEAD.to_owned(), above, wanted).await
}

/// Finds one event more than the page holds, newest first. The choice of the way is here and nowhere else.
pub(super) async fn find(session: &Session, query: &EventQuery) -> Result<Vec<EventSummary>, EngineError> {
    let wanted = query.limit.saturating_add(1);
    if let Some(key) = &query.key {
        return find_by_key(session, query, key, wanted).await;
    }
    let usual = usual(query);
    let mut events = ahead(session, query, wanted).await?;
    let rest = wanted - events.len();
    // An entity has fewer events than a status, and a type or source not many more.
    if query.entity.is_none()
        && let Some(way) = query.status.and_then(Way::of_status)
    {
        events.extend(follow(session, query, way, usual, rest).await?);
        return Ok(events);
    }
    let Some(mark) = mark_of(query) else {
        events.extend(scan(session, query, usual, rest).await?);
        return Ok(events);
    };
    events.extend(marked(session, query, mark, usual, rest).await?);
    Ok(events)
}

/// Asks the ledger, in a statement of its own: planned together with the list, it might be asked for every event. Keys are
/// scoped to a source, so every source is asked. (The limit keeps the planner from reading the whole ledger.)
async fn find_by_key(
    session: &Session,
    query: &EventQuery,
    key: &EventKey,
    wanted: usize,
) -> Result<Vec<EventSummary>, EngineError> {
    let sql = "SELECT k.event FROM (SELECT DISTINCT source FROM oncehook.totals) t
                CROSS JOIN LATERAL (SELECT event FROM oncehook.keys k WHERE k.source = t.source AND k.key = $1 LIMIT 1) k";
    let rows = session.rows(sql, &[&key.as_bytes()]).await?;
    let bounds = bounds(query);
    let parts = rows.iter().map(|row| Part::of_one(row.get(0)).within(bounds));
    let parts: Vec<Part> = parts.filter(|part| !part.is_empty()).collect();
    if parts.is_empty() {
        return Ok(Vec::new());
    }
    scan_parts(session, query, &parts, wanted).await
}

/// Looks at all events behind the last marked span, then at the spans that are marked with this.
async fn marked(
    session: &Session,
    query: &EventQuery,
    mark: String,
    within: Part,
    wanted: usize,
) -> Result<Vec<EventSummary>, EngineError> {
    let young = first_of_span(marked_to(session).await? + 1);
    let mut events = Vec::new();
    let behind = Part { from: young, ..Part::ALL }.within(within);
    if !behind.is_empty() {
        events = scan(session, query, behind, wanted).await?;
    }
    if events.len() < wanted && young > within.from {
        let rest = Part { to: before(young), ..Part::ALL }.within(within);
        events.extend(follow(session, query, Way::Marks(mark), rest, wanted - events.len()).await?);
    }
    Ok(events)
}

/// Where candidates are written down.
enum Way {
    /// Spans that are marked with this.
    Marks(String),
    /// Events, in their order: a statement that names those between `$1` and `$2`, the newest `$3`.
    Events(&'static str),
    /// The same, but the index is not in the order of the events, and all of its part is sorted for each page.
    Queue(&'static str),
}

impl Way {
    fn of_status(status: EventStatus) -> Option<Self> {
        match status {
            EventStatus::Quarantined => Some(Self::Events(
                "SELECT event FROM oncehook.flags WHERE flag = 'quarantined' AND event BETWEEN $1 AND $2
                  ORDER BY event DESC LIMIT $3",
            )),
            EventStatus::Dead => Some(Self::Events(
                "SELECT event FROM oncehook.deliveries WHERE state = 'dead' AND event BETWEEN $1 AND $2
                  GROUP BY event ORDER BY event DESC LIMIT $3",
            )),
            EventStatus::Parked => Some(Self::Events(
                "SELECT event FROM oncehook.deliveries
                  WHERE state IN ('parked', 'superseded', 'skipped') AND state = 'parked' AND event BETWEEN $1 AND $2
                  GROUP BY event ORDER BY event DESC LIMIT $3",
            )),
            EventStatus::Superseded => Some(Self::Events(
                "SELECT event FROM oncehook.deliveries
                  WHERE state IN ('parked', 'superseded', 'skipped') AND state = 'superseded' AND event BETWEEN $1 AND $2
                  GROUP BY event ORDER BY event DESC LIMIT $3",
            )),
            EventStatus::Skipped => Some(Self::Events(
                "SELECT event FROM oncehook.deliveries
                  WHERE state IN ('parked', 'superseded', 'skipped') AND state = 'skipped' AND event BETWEEN $1 AND $2
                  GROUP BY event ORDER BY event DESC LIMIT $3",
            )),
            EventStatus::Retrying => Some(Self::Queue(
                "SELECT event FROM oncehook.deliveries
                  WHERE state IN ('ready', 'retrying') AND state = 'retrying' AND event BETWEEN $1 AND $2
                  GROUP BY event ORDER BY event DESC LIMIT $3",
            )),
            EventStatus::Ready => Some(Self::Queue(
                "SELECT event FROM oncehook.deliveries
                  WHERE state IN ('ready', 'retrying') AND state = 'ready' AND event BETWEEN $1 AND $2
                  GROUP BY event ORDER BY event DESC LIMIT $3",
            )),
            EventStatus::Running => Some(Self::Queue(
                "SELECT event FROM oncehook.deliveries WHERE state = 'running' AND event BETWEEN $1 AND $2
                  GROUP BY event ORDER BY event DESC LIMIT $3",
            )),
            // Nearly every event, or marked.
            EventStatus::Succeeded | EventStatus::Unrouted => None,
        }
    }
}

/// Looks at candidates only, newest first. What is written down there is a part of the truth: the scan decides.
async fn follow(
    session: &Session,
    query: &EventQuery,
    way: Way,
    within: Part,
    wanted: usize,
) -> Result<Vec<EventSummary>, EngineError> {
    let mut rest = within;
    let mut events = Vec::new();
    let mut at_once = FIRST_CANDIDATES;
    if let Way::Queue(_) = way {
        // A long queue fills a page right here. Without this, every page of it would sort all of it.
        at_once = MOST_CANDIDATES;
        let sql =
            "SELECT id FROM oncehook.events WHERE id BETWEEN $1 AND $2 ORDER BY id DESC OFFSET $3 LIMIT 1";
        let Some(row) = session.row(sql, &[&rest.from, &rest.to, &STRETCH]).await? else {
            return scan(session, query, rest, wanted).await;
        };
        let from: Uuid = row.get(0);
        events = scan(session, query, Part { from, ..rest }, wanted).await?;
        rest.to = before(from);
    }
    while events.len() < wanted && !rest.is_empty() {
        let parts = match &way {
            Way::Marks(mark) => {
                let sql = "SELECT DISTINCT span FROM oncehook.marks WHERE value = hashtextextended($1, 0) AND span BETWEEN $2 AND $3
                            ORDER BY span DESC LIMIT $4";
                let (first, last) = (span_of(rest.from), span_of(rest.to));
                let rows = session.rows(sql, &[mark, &first, &last, &at_once]).await?;
                rows.iter().map(|row| Part::of_spans(row.get(0), row.get(0)).within(rest)).collect::<Vec<_>>()
            }
            Way::Events(sql) | Way::Queue(sql) => {
                let rows = session.rows(sql, &[&rest.from, &rest.to, &at_once]).await?;
                rows.iter().map(|row| Part::of_one(row.get(0))).collect()
            }
        };
        let Some(last) = parts.last() else { break };
        rest.to = before(last.from);
        events.extend(scan_parts(session, query, &parts, wanted - events.len()).await?);
        at_once = more_candidates(at_once);
    }
    Ok(events)
}

/// The columns of a summary; the status is derived in [`BESIDE`].
pub(super) const SUMMARY: &str =
    "SELECT e.id, e.source, e.key, e.type, e.entity, s.status, e.integrity, e.occurred_at, e.received_at,
       octet_length(e.body)::bigint, coalesce(d.journal + d.memory + d.redis, 0),
       (SELECT string_agg(f.flag || coalesce(':' || f.reason, ''), ',') FROM oncehook.flags f WHERE f.event = e.id)";

pub(super) const BESIDE: &str = "LEFT JOIN oncehook.duplicates d ON d.event = e.id
 CROSS JOIN LATERAL (
   SELECT CASE
            WHEN EXISTS (SELECT 1 FROM oncehook.flags f WHERE f.event = e.id AND f.flag = 'quarantined') THEN 'quarantined'
            ELSE coalesce((SELECT w.state FROM oncehook.deliveries w WHERE w.event = e.id
                            ORDER BY CASE w.state WHEN 'dead' THEN 0 WHEN 'parked' THEN 1 WHEN 'retrying' THEN 2
                                                  WHEN 'running' THEN 3 WHEN 'ready' THEN 4 WHEN 'superseded' THEN 5
                                                  WHEN 'skipped' THEN 6 ELSE 7 END
                            LIMIT 1), 'unrouted')
          END AS status) s";

/// Walks a part of the events.
async fn scan(
    session: &Session,
    query: &EventQuery,
    part: Part,
    limit: usize,
) -> Result<Vec<EventSummary>, EngineError> {
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let conditions = Conditions::of(query);
    let mut parameters: Vec<&(dyn ToSql + Sync)> = vec![&limit, &part.from, &part.to];
    let also = conditions.add_to(&mut parameters);
    let sql = format!(
        "{SUMMARY} FROM oncehook.events e {BESIDE} WHERE e.id BETWEEN $2 AND $3{also} ORDER BY e.id DESC LIMIT $1"
    );
    session.rows(&sql, &parameters).await?.iter().map(summary).collect()
}

/// Walks several parts, given newest first, with one statement.
async fn scan_parts(
    session: &Session,
    query: &EventQuery,
    parts: &[Part],
    wanted: usize,
) -> Result<Vec<EventSummary>, EngineError> {
    let limit = i64::try_from(wanted).unwrap_or(i64::MAX);
    let conditions = Conditions::of(query);
    let from: Vec<Uuid> = parts.iter().map(|part| part.from).collect();
    let to: Vec<Uuid> = parts.iter().map(|part| part.to).collect();
    let mut parameters: Vec<&(dyn ToSql + Sync)> = vec![&limit, &from, &to];
    let also = conditions.add_to(&mut parameters);
    let sql = format!(
        "SELECT f.* FROM unnest($2::uuid[], $3::uuid[]) AS p(first, last) CROSS JOIN LATERAL (
           {SUMMARY} FROM oncehook.events e {BESIDE} WHERE e.id BETWEEN p.first AND p.last{also}
            ORDER BY e.id DESC LIMIT $1) f"
    );
    let rows = session.rows(&sql, &parameters).await?;
    let mut events = rows.iter().map(summary).collect::<Result<Vec<_>, _>>()?;
    events.sort_unstable_by_key(|event| std::cmp::Reverse(event.id));
    events.truncate(wanted);
    Ok(events)
}

/// What is asked of an event besides its id and its key. Only the conditions that were given are in the statement, so that each is
/// planned for itself.
struct Conditions<'q> {
    query: &'q EventQuery,
    status: Option<&'static str>,
    since: Option<i64>,
    until: Option<i64>,
}

impl<'q> Conditions<'q> {
    fn of(query: &'q EventQuery) -> Self {
        Self {
            query,
            status: query.status.map(EventStatus::as_str),
            since: query.since.map(|at| at.0),
            until: query.until.map(|at| at.0),
        }
    }

    /// The text of the conditions; their values go behind those that are there.
    fn add_to<'c>(&'c self, parameters: &mut Vec<&'c (dyn ToSql + Sync)>) -> String {
        let given: [(&str, Option<&'c (dyn ToSql + Sync)>); 6] = [
            ("e.source = $", self.query.source.as_ref().map(|source| source as _)),
            ("e.type = $", self.query.kind.as_ref().map(|kind| kind as _)),
            ("e.entity = $", self.query.entity.as_ref().map(|entity| entity as _)),
            ("s.status = $", self.status.as_ref().map(|status| status as _)),
            ("e.received_at >= $", self.since.as_ref().map(|since| since as _)),
            ("e.received_at < $", self.until.as_ref().map(|until| until as _)),
        ];
        let mut text = String::new();
        for (condition, parameter) in given {
            if let Some(parameter) = parameter {
                parameters.push(parameter);
                text.push_str(&format!(" AND {condition}{}", parameters.len()));
            }
        }
        text
    }
}

pub(super) fn summary(row: &Row) -> Result<EventSummary, EngineError> {
    let key = EventKey::from_bytes(row.get(2));
    let flags: Option<&str> = row.get(11);
    let (flags, quarantine) = Flag::parse_list(flags);
    Ok(EventSummary {
        id: event_id(row.get(0)),
        source: row.get(1),
        key: key.ok_or_else(|| EngineError::other("a key in the journal is damaged"))?,
        kind: row.get(3),
        entity: row.get(4),
        status: EventStatus::parse(row.get(5)).unwrap_or(EventStatus::Unrouted),
        flags,
        quarantine,
        integrity: row.get(6),
        occurred_at: row.get::<_, Option<i64>>(7).map(UnixMicros),
        received_at: UnixMicros(row.get(8)),
        size: count(row, 9),
        duplicates: count(row, 10),
        deliveries: Vec::new(),
    })
}

/// The last span that, with all before it, is marked.
async fn marked_to(session: &Session) -> Result<i64, EngineError> {
    let row = session.row("SELECT span FROM oncehook.marked", &[]).await?;
    Ok(row.map_or(-1, |row| row.get(0)))
}

/// One node at a time: the number is `marks` in ASCII.
const LOCK: &str = "SELECT pg_try_advisory_xact_lock(470021384051)";

/// Marks the next few spans, in one transaction. Returns whether there may be more to do at once.
pub(super) async fn mark(session: &Session, given: Option<i64>) -> Result<bool, EngineError> {
    session.run("BEGIN").await?;
    if !session.row(LOCK, &[]).await?.is_some_and(|row| row.get(0)) {
        session.run("COMMIT").await?;
        return Ok(false);
    }
    let sql = "SELECT span, coalesce($1::bigint, oncehook.micros()) FROM oncehook.marked";
    let row = session.row(sql, &[&given]).await?;
    let (done, now): (i64, i64) = row.map_or((-1, 0), |row| (row.get(0), row.get(1)));
    // The span before the one that events may still be stored in.
    let settled = span_of(first_of((now - SETTLED_MICROS) / 1_000)) - 1;
    if settled <= done {
        session.run("COMMIT").await?;
        return Ok(false);
    }
    let open = Part::of_spans(done + 1, settled);
    let sql = "SELECT (SELECT id FROM oncehook.events WHERE id BETWEEN $1 AND $2 ORDER BY id LIMIT 1),
                      (SELECT id FROM oncehook.events WHERE id BETWEEN $1 AND $2 ORDER BY id OFFSET $3 LIMIT 1)";
    let row = session.row(sql, &[&open.from, &open.to, &MARKED_AT_ONCE]).await?;
    let (first, beyond): (Option<Uuid>, Option<Uuid>) =
        row.map_or((None, None), |row| (row.get(0), row.get(1)));
    // Whole spans only, and at least one.
    let last = match (first, beyond) {
        (Some(first), Some(beyond)) => (span_of(beyond) - 1).max(span_of(first)),
        _ => settled,
    };
    if first.is_some() {
        let part = Part::of_spans(done + 1, last);
        session.change(MARK, &[&part.from, &part.to]).await?;
    }
    session.change("UPDATE oncehook.marked SET span = $1", &[&last]).await?;
    session.run("COMMIT").await?;
    Ok(beyond.is_some())
}

/// Marks the spans of some events with what occurs in them. In the order of the index, so that neighbours share its pages.
const MARK: &str = "
INSERT INTO oncehook.marks (value, span)
SELECT DISTINCT m.value, oncehook.span(e.id) AS span
  FROM oncehook.events e
 CROSS JOIN LATERAL (VALUES (hashtextextended('s' || e.source, 0)), (hashtextextended('t' || e.type, 0)),
                            (hashtextextended('e' || e.entity, 0)),
                            (CASE WHEN NOT EXISTS (SELECT 1 FROM oncehook.deliveries d WHERE d.event = e.id)
                                  THEN hashtextextended('u', 0) END),
                            (CASE WHEN e.id >= oncehook.first_id(e.received_at + 2000000) THEN hashtextextended('b', 0) END))
         AS m(value)
 WHERE e.id BETWEEN $1 AND $2 AND m.value IS NOT NULL
 ORDER BY m.value, span";

/// Removes marks of spans in which no event is left, among those of events that were just looked at. Others need not be asked for:
/// whoever removes the last event of a span has looked at it.
pub(super) async fn forget_marks(session: &Session, first: Uuid, last: Uuid) -> Result<(), EngineError> {
    remove_marks(session, span_of(first), span_of(last) + 1, i64::MAX).await?;
    Ok(())
}

/// Removes marks of spans in which no event is left, from one span to another (excluded), so many at most. Returns how many.
async fn remove_marks(session: &Session, from: i64, to: i64, limit: i64) -> Result<u64, EngineError> {
    let sql = "DELETE FROM oncehook.marks WHERE ctid = ANY (ARRAY (
                 SELECT m.ctid FROM oncehook.marks m
                  WHERE m.span >= $1 AND m.span < $2
                    AND (SELECT true FROM oncehook.events e WHERE e.id >= oncehook.first_id(m.span * 4096000)
                            AND e.id < oncehook.first_id((m.span + 1) * 4096000) LIMIT 1) IS NULL
                  LIMIT $3))";
    session.change(sql, &[&from, &to, &limit]).await
}

/// Spans whose marks are looked at by one statement.
const SPANS_SWEPT: i64 = 512;

/// Removes marks of spans in which no event is left, between two ids. Returns from which id on there may be more.
pub(super) async fn sweep_marks(
    session: &Session,
    (from, beyond): (Uuid, Uuid),
    limit: i64,
) -> Result<Option<Uuid>, EngineError> {
    let span = span_of(from);
    // A day does not begin with a span; the mark of one that two days share goes with the later one.
    let next = (span + SPANS_SWEPT).min(span_of(beyond));
    let gone = remove_marks(session, span, next, limit).await?;
    if i64::try_from(gone).unwrap_or(i64::MAX) >= limit {
        return Ok(Some(from));
    }
    Ok((next < span_of(beyond)).then(|| first_of_span(next)))
}
