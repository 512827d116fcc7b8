//! Finding events: what is marked behind the accepts, which way a list query goes, and the walk itself.
//!
//! An index on the events for every filter would make each accept dearer. Instead the ids are cut into spans of about four seconds
//! (`spans`), and `oncehook_marks` says which sources, types and entities occur in a span, and whether an event without
//! deliveries does, or one whose id runs ahead of its receipt; and in which slots of the span, so that what is rare is not looked
//! for among all that came within four seconds. [`mark`] fills it behind the accepts. Readers look at the
//! spans that are marked with what they want, and at all events behind the last one that was marked, so nobody sees a lag. What
//! ended badly is written down by event (`ends`), what is held is found by its flag, and what waits by the queues' index.
//!
//! Promises: newest first, and each page goes on below the last event of the one before. A source, a type, an entity, a key or
//! a status costs what it finds, and not the whole history. A mark may promise too much, never too little: events are
//! marked once [`SETTLED_MICROS`] have passed; one that is not committed by then is waited for, and one that is stored
//! only later than [`LATE_MICROS`] marks its span itself.
//! Does not: bound the time of two filters that are common alone and rare together; the reader's deadline ends that.
//!
//! Hints stand where the optimizer could take another way that reads everything. There are no lateral joins on all
//! servers, so several parts of the events are one statement with several ranges.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use mysql_async::{Row, Value};
use oncehook_verify::{EventKey, UnixMicros};
use serde_json::json;
use uuid::Uuid;

use super::connection::{Insert, Session};
use super::engine_error::EngineError;
use super::row::{bytes, count, event, list, maybe_number, maybe_text, number, small, text};
use crate::event::{EventId, NewEvent};
use crate::journal::spans::{
    self, AHEAD, AHEAD_MILLIS, FIRST_CANDIDATES, LATE_MICROS, MARKED_AT_ONCE, MOST_CANDIDATES, Part,
    SETTLED_MICROS, STRETCH, Slots, UNROUTED, before, behind, bounds, first_of, first_of_span, mark_of,
    millis_of, more_candidates, span_of, usual,
};
use crate::journal::{EventQuery, EventStatus, EventSummary, Flag};

fn uuid(event: EventId) -> Uuid {
    Uuid::from_bytes(*event.as_bytes())
}

fn id(id: Uuid) -> Value {
    Value::from(&id.as_bytes()[..])
}

/// Finds one event more than the page holds, newest first. The choice of the way is here and nowhere else.
pub(super) async fn find(
    session: &mut Session,
    query: &EventQuery,
) -> Result<Vec<EventSummary>, EngineError> {
    let wanted = query.limit.saturating_add(1);
    if let Some(key) = &query.key {
        return find_by_key(session, query, key, wanted).await;
    }
    let usual = usual(query);
    let mut events = match spans::ahead(query) {
        Some(above) => marked(session, query, AHEAD, above, wanted).await?,
        None => Vec::new(),
    };
    let rest = wanted - events.len();
    // An entity has fewer events than a status, and a type or source not many more.
    if query.entity.is_none()
        && let Some(way) = query.status.and_then(Way::of_status)
    {
        events.extend(follow(session, query, way, usual, rest).await?);
        return Ok(events);
    }
    events.extend(match mark_of(query) {
        Some(mark) => marked(session, query, &mark, usual, rest).await?,
        None => scan(session, query, &[usual], rest).await?,
    });
    Ok(events)
}

/// Asks the ledger. Keys are scoped to a source, so every source is asked.
async fn find_by_key(
    session: &mut Session,
    query: &EventQuery,
    key: &EventKey,
    wanted: usize,
) -> Result<Vec<EventSummary>, EngineError> {
    let sql = "SELECT k.event FROM (SELECT DISTINCT source FROM oncehook_totals) t
                STRAIGHT_JOIN oncehook_keys k FORCE INDEX (PRIMARY) ON k.source = t.source AND k.`key` = ?";
    let rows = session.rows(sql, vec![key.as_bytes().into()]).await?;
    let bounds = bounds(query);
    let mut parts: Vec<Part> = ones(&rows)?.map(|part| part.within(bounds)).collect();
    parts.retain(|part| !part.is_empty());
    scan(session, query, &parts, wanted).await
}

/// The parts that rows of ids name.
fn ones(rows: &[Row]) -> Result<impl Iterator<Item = Part>, EngineError> {
    let ids: Vec<EventId> = rows.iter().map(|row| event(row, 0)).collect::<Result<_, _>>()?;
    Ok(ids.into_iter().map(|id| Part::of_one(uuid(id))))
}

/// Looks at all events behind the last marked one, then at the spans that are marked with this.
async fn marked(
    session: &mut Session,
    query: &EventQuery,
    mark: &str,
    within: Part,
    wanted: usize,
) -> Result<Vec<EventSummary>, EngineError> {
    let row = session.row("SELECT last FROM oncehook_marked WHERE one = 1", Vec::new()).await?;
    let last = row.map_or(Ok(Uuid::nil()), |row| event(&row, 0).map(uuid))?;
    let young = Part { from: behind(last), ..Part::ALL }.within(within);
    let mut events =
        if young.is_empty() { Vec::new() } else { scan(session, query, &[young], wanted).await? };
    let rest = Part { to: last, ..Part::ALL }.within(within);
    if events.len() < wanted && !rest.is_empty() {
        let way = Way::Marks(value(mark));
        events.extend(follow(session, query, way, rest, wanted - events.len()).await?);
    }
    Ok(events)
}

/// Where candidates are written down.
enum Way {
    /// Spans that are marked with this.
    Marks(MarkValue),
    /// Events, in their order: a statement that names those between two ids, the newest so many.
    Events(&'static str),
    /// The same, but the index is not in the order of the events, and all of its part is sorted for each page.
    Queue(&'static str),
}

impl Way {
    fn of_status(status: EventStatus) -> Option<Self> {
        match status {
            EventStatus::Quarantined => Some(Self::Events(
                "SELECT event FROM oncehook_flags FORCE INDEX (oncehook_flags_flag)
                  WHERE flag = 'quarantined' AND event BETWEEN ? AND ? ORDER BY event DESC LIMIT ?",
            )),
            EventStatus::Dead => Some(Self::Events(
                "SELECT event FROM oncehook_ends FORCE INDEX (PRIMARY)
                  WHERE state = 'dead' AND event BETWEEN ? AND ? ORDER BY event DESC LIMIT ?",
            )),
            EventStatus::Superseded => Some(Self::Events(
                "SELECT event FROM oncehook_ends FORCE INDEX (PRIMARY)
                  WHERE state = 'superseded' AND event BETWEEN ? AND ? ORDER BY event DESC LIMIT ?",
            )),
            EventStatus::Skipped => Some(Self::Events(
                "SELECT event FROM oncehook_ends FORCE INDEX (PRIMARY)
                  WHERE state = 'skipped' AND event BETWEEN ? AND ? ORDER BY event DESC LIMIT ?",
            )),
            EventStatus::Parked => Some(Self::Queue(
                "SELECT DISTINCT event FROM oncehook_deliveries FORCE INDEX (oncehook_deliveries_place)
                  WHERE place = 3 AND event BETWEEN ? AND ? ORDER BY event DESC LIMIT ?",
            )),
            EventStatus::Running => Some(Self::Queue(
                "SELECT DISTINCT event FROM oncehook_deliveries FORCE INDEX (oncehook_deliveries_place)
                  WHERE place = 1 AND event BETWEEN ? AND ? ORDER BY event DESC LIMIT ?",
            )),
            EventStatus::Retrying => Some(Self::Queue(
                "SELECT DISTINCT event FROM oncehook_deliveries FORCE INDEX (oncehook_deliveries_place)
                  WHERE place = 0 AND state = 'retrying' AND event BETWEEN ? AND ? ORDER BY event DESC LIMIT ?",
            )),
            EventStatus::Ready => Some(Self::Queue(
                "SELECT DISTINCT event FROM oncehook_deliveries FORCE INDEX (oncehook_deliveries_place)
                  WHERE place = 0 AND state = 'ready' AND event BETWEEN ? AND ? ORDER BY event DESC LIMIT ?",
            )),
            // Nearly every event, or marked.
            EventStatus::Succeeded | EventStatus::Unrouted => None,
        }
    }
}

/// Looks at candidates only, newest first. What is written down there is a part of the truth: the scan decides.
async fn follow(
    session: &mut Session,
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
        let sql = "SELECT id FROM oncehook_events FORCE INDEX (PRIMARY) WHERE id BETWEEN ? AND ?
                    ORDER BY id DESC LIMIT 1 OFFSET ?";
        let Some(row) = session.row(sql, vec![id(rest.from), id(rest.to), STRETCH.into()]).await? else {
            return scan(session, query, &[rest], wanted).await;
        };
        let from = uuid(event(&row, 0)?);
        events = scan(session, query, &[Part { from, ..rest }], wanted).await?;
        rest.to = before(from);
    }
    while events.len() < wanted && !rest.is_empty() {
        let (parts, oldest) = match &way {
            Way::Marks(value) => marked_parts(session, value, rest, at_once).await?,
            Way::Events(sql) | Way::Queue(sql) => {
                let asked = vec![id(rest.from), id(rest.to), at_once.into()];
                let parts: Vec<Part> = ones(&session.rows(sql, asked).await?)?.collect();
                let oldest = parts.last().map(|part| part.from);
                (parts, oldest)
            }
        };
        let Some(oldest) = oldest else { break };
        events.extend(scan(session, query, &parts, wanted - events.len()).await?);
        if oldest.is_nil() {
            break;
        }
        rest.to = before(oldest);
        at_once = more_candidates(at_once);
    }
    Ok(events)
}

/// What of a part is marked with a value, in its newest so many spans that are; and where the oldest of these begins.
async fn marked_parts(
    session: &mut Session,
    value: &MarkValue,
    within: Part,
    at_once: i64,
) -> Result<(Vec<Part>, Option<Uuid>), EngineError> {
    let sql = "SELECT span, slots FROM oncehook_marks FORCE INDEX (PRIMARY) WHERE value = ? AND span BETWEEN ? AND ?
                ORDER BY span DESC LIMIT ?";
    let (first, last) = (span_of(within.from), span_of(within.to));
    let asked = vec![Value::from(&value[..]), first.into(), last.into(), at_once.into()];
    let (mut parts, mut oldest) = (Vec::new(), None);
    for row in session.rows(sql, asked).await? {
        let span = number(&row, 0)?;
        let slots = Slots(small(&row, 1)?).parts(span).into_iter().map(|part| part.within(within));
        parts.extend(slots.filter(|part| !part.is_empty()));
        oldest = Some(first_of_span(span));
    }
    Ok((parts, oldest))
}

/// An event's status, derived: quarantined, else unrouted, else the worst of its deliveries.
const STATUS: &str = "CASE
   WHEN EXISTS (SELECT 1 FROM oncehook_flags f WHERE f.event = e.id AND f.flag = 'quarantined') THEN 'quarantined'
   ELSE COALESCE((SELECT CONVERT(w.state USING utf8mb4) FROM oncehook_deliveries w WHERE w.event = e.id
                   ORDER BY FIELD(w.state, 'dead', 'parked', 'retrying', 'running', 'ready', 'superseded', 'skipped', 'succeeded')
                   LIMIT 1), 'unrouted') END";

/// The columns of a summary, and where they come from.
pub(super) fn summaries() -> String {
    format!(
        "SELECT e.id, e.source, e.`key`, e.type, e.entity, {STATUS}, e.integrity, e.occurred_at, e.received_at, e.size,
                COALESCE((SELECT d.journal + d.memory + d.redis FROM oncehook_duplicates d WHERE d.event = e.id), 0),
                (SELECT GROUP_CONCAT(f.flag, COALESCE(CONCAT(':', f.reason), '')) FROM oncehook_flags f WHERE f.event = e.id), e.digest
           FROM oncehook_events e"
    )
}

pub(super) fn summary(row: &Row) -> Result<EventSummary, EngineError> {
    let flags = maybe_text(row, 11)?;
    let (flags, quarantine) = Flag::parse_list(flags.as_deref());
    Ok(EventSummary {
        id: event(row, 0)?,
        source: text(row, 1)?,
        key: EventKey::from_bytes(bytes(row, 2)?).ok_or_else(EngineError::damaged)?,
        kind: maybe_text(row, 3)?,
        entity: maybe_text(row, 4)?,
        status: EventStatus::parse(&text(row, 5)?).unwrap_or(EventStatus::Unrouted),
        flags,
        quarantine,
        integrity: text(row, 6)?,
        occurred_at: maybe_number(row, 7)?.map(UnixMicros),
        received_at: UnixMicros(number(row, 8)?),
        size: count(row, 9)?,
        duplicates: count(row, 10)?,
        deliveries: Vec::new(),
    })
}

/// Walks parts of the events from the newest on, with one statement; each part is one range of the table. Only the
/// conditions that were given are in the statement, so that each is planned for itself.
async fn scan(
    session: &mut Session,
    query: &EventQuery,
    parts: &[Part],
    wanted: usize,
) -> Result<Vec<EventSummary>, EngineError> {
    let Some(last) = parts.last() else { return Ok(Vec::new()) };
    // 1, 4, 16 … ranges, the last one again and again, so that a few prepared statements serve all.
    let mut ranges = 1;
    while ranges < parts.len() {
        ranges *= 4;
    }
    let mut conditions = vec![format!("({})", vec!["e.id BETWEEN ? AND ?"; ranges].join(" OR "))];
    let padded = parts.iter().chain(std::iter::repeat_n(last, ranges - parts.len()));
    let mut parameters: Vec<Value> = padded.flat_map(|part| [id(part.from), id(part.to)]).collect();
    let mut also = |condition: &str, parameter: Option<Value>| {
        if let Some(parameter) = parameter {
            conditions.push(condition.to_owned());
            parameters.push(parameter);
        }
    };
    let text = |text: &Option<String>| text.as_deref().map(Value::from);
    also("e.source = ?", text(&query.source));
    also("e.type = ?", text(&query.kind));
    also("e.entity = ?", text(&query.entity));
    also("e.received_at >= ?", query.since.map(|at| at.0.into()));
    also("e.received_at < ?", query.until.map(|at| at.0.into()));
    if let Some(status) = query.status {
        // Last: it is asked of two other tables.
        conditions.extend(needed(status));
        conditions.push(format!("{STATUS} = ?"));
        parameters.push(status.as_str().into());
    }
    parameters.push(u64::try_from(wanted).unwrap_or(u64::MAX).into());
    let sql = format!(
        "{} FORCE INDEX (PRIMARY) WHERE {} ORDER BY e.id DESC LIMIT ?",
        summaries(),
        conditions.join(" AND ")
    );
    session.rows(&sql, parameters).await?.iter().map(summary).collect()
}

/// What an event in a status must have, where that is cheaper to ask than the whole status and true of few. The limit keeps
/// the optimizer from beginning with the deliveries.
fn needed(status: EventStatus) -> Option<String> {
    let delivery = "SELECT 1 FROM oncehook_deliveries q FORCE INDEX (PRIMARY) WHERE q.event = e.id";
    match status {
        EventStatus::Unrouted => Some(format!("({delivery} LIMIT 1) IS NULL")),
        EventStatus::Parked | EventStatus::Retrying | EventStatus::Running | EventStatus::Ready => {
            Some(format!("({delivery} AND q.state = '{}' LIMIT 1) IS NOT NULL", status.as_str()))
        }
        // Nearly every event, or found by name.
        EventStatus::Succeeded
        | EventStatus::Quarantined
        | EventStatus::Dead
        | EventStatus::Superseded
        | EventStatus::Skipped => None,
    }
}

/// What stands in `oncehook_marks.value`: the first bytes of SHA-256. Two marks that share one promise too much together.
type MarkValue = [u8; 8];

fn value(mark: &str) -> MarkValue {
    let digest = oncehook_verify::digest(mark.as_bytes());
    digest.first_chunk().copied().unwrap_or_default()
}

/// Marks with their slots, in the order of their table.
type Marks = BTreeMap<(MarkValue, i64), u32>;

/// What is looked for in an event.
struct Marked<'e> {
    id: Uuid,
    source: &'e str,
    kind: Option<&'e str>,
    entity: Option<&'e str>,
    received_at: i64,
    /// Whether it has deliveries.
    routed: bool,
}

impl Marked<'_> {
    /// Adds the marks of its span.
    fn add_to(&self, marks: &mut Marks) {
        let (span, Slots(slot)) = (span_of(self.id), Slots::of(self.id));
        let mut add = |mark: &str| *marks.entry((value(mark), span)).or_default() |= slot;
        add(&format!("s{}", self.source));
        if let Some(kind) = self.kind {
            add(&format!("t{kind}"));
        }
        if let Some(entity) = self.entity {
            add(&format!("e{entity}"));
        }
        if !self.routed {
            add(UNROUTED);
        }
        if millis_of(self.id) >= self.received_at / 1_000 + AHEAD_MILLIS {
            add(AHEAD);
        }
    }
}

/// Those that are there gain slots, and are locked like new ones: nobody removes them before the commit.
const MARKS: Insert<'static> = Insert {
    head: "INSERT INTO oncehook_marks (value, span, slots)",
    row: "(?, ?, ?)",
    tail: " ON DUPLICATE KEY UPDATE slots = oncehook_marks.slots | VALUES(slots)",
};

async fn write(session: &mut Session, marks: Marks) -> Result<(), EngineError> {
    let row = |((value, span), slots): ((MarkValue, i64), u32)| {
        vec![Value::from(&value[..]), span.into(), slots.into()]
    };
    session.insert(MARKS, marks.into_iter().map(row).collect()).await?;
    Ok(())
}

/// Marks the spans of events that were just stored, by this transaction, and that [`mark`] may have passed already. `now` is the
/// database's time after they were stored: one that is young by then is waited for.
pub(super) async fn mark_late<'e>(
    session: &mut Session,
    now: i64,
    stored: impl Iterator<Item = (EventId, &'e NewEvent)>,
) -> Result<(), EngineError> {
    let late = (now - LATE_MICROS) / 1_000;
    let mut marks = Marks::new();
    for (id, event) in stored.map(|(id, event)| (uuid(id), event)).filter(|(id, _)| millis_of(*id) < late) {
        let marked = Marked {
            id,
            source: event.source.as_str(),
            kind: event.kind.as_deref(),
            entity: event.entity.as_deref(),
            received_at: event.received_at.0,
            routed: event.quarantine.is_none() && !event.routes.is_empty(),
        };
        marked.add_to(&mut marks);
    }
    if marks.is_empty() { Ok(()) } else { write(session, marks).await }
}

/// Marks the next few events, in one transaction. Returns whether there may be more to do at once.
///
/// The events are locked to be read, so one that is stored and not committed yet is waited for, and cannot appear behind the
/// marks.
pub(super) async fn mark(session: &mut Session, given: Option<i64>) -> Result<bool, EngineError> {
    // One node at a time: whoever has the row.
    let sql = "SELECT last FROM oncehook_marked WHERE one = 1 FOR UPDATE SKIP LOCKED";
    let Some(row) = session.row(sql, Vec::new()).await? else {
        session.run("ROLLBACK").await?;
        return Ok(false);
    };
    let done = event(&row, 0)?;
    let settled = first_of((session.now(given).await? - SETTLED_MICROS) / 1_000);
    let sql = "SELECT id, source, type, entity, received_at FROM oncehook_events FORCE INDEX (PRIMARY)
                WHERE id > ? AND id < ? ORDER BY id LIMIT ? LOCK IN SHARE MODE";
    let asked = vec![super::row::id(done), id(settled), MARKED_AT_ONCE.into()];
    let rows = session.rows(sql, asked).await?;
    let (Some(first), Some(last)) = (rows.first(), rows.last()) else {
        session.run("ROLLBACK").await?;
        return Ok(false);
    };
    let (first, last) = (event(first, 0)?, event(last, 0)?);
    let sql =
        "SELECT DISTINCT event FROM oncehook_deliveries FORCE INDEX (PRIMARY) WHERE event BETWEEN ? AND ?";
    let routed = session.rows(sql, vec![super::row::id(first), super::row::id(last)]).await?;
    let routed: HashSet<EventId> = routed.iter().map(|row| event(row, 0)).collect::<Result<_, _>>()?;
    let mut marks = Marks::new();
    for row in &rows {
        let id = event(row, 0)?;
        let (kind, entity) = (maybe_text(row, 2)?, maybe_text(row, 3)?);
        let marked = Marked {
            id: uuid(id),
            source: &text(row, 1)?,
            kind: kind.as_deref(),
            entity: entity.as_deref(),
            received_at: number(row, 4)?,
            routed: routed.contains(&id),
        };
        marked.add_to(&mut marks);
    }
    write(session, marks).await?;
    session.change("UPDATE oncehook_marked SET last = ? WHERE one = 1", vec![super::row::id(last)]).await?;
    session.run("COMMIT").await?;
    Ok(i64::try_from(rows.len()).unwrap_or(i64::MAX) >= MARKED_AT_ONCE)
}

/// Waits until nobody marks, and keeps it so until the transaction ends: whoever marks has the events locked, and they would be
/// passed over by whoever forgets them. If that takes too long (it waits for an append that hangs), it goes without.
pub(super) async fn wait_for_marks(session: &mut Session) -> Result<(), EngineError> {
    match session.row("SELECT last FROM oncehook_marked WHERE one = 1 FOR UPDATE", Vec::new()).await {
        Err(error) if error.is_collision() => Ok(()),
        other => other.map(|_| ()),
    }
}

/// Marks that are removed by one statement.
const REMOVED_AT_ONCE: usize = 2_000;

/// Removes the marks of spans in which no event is left, among those of events that this transaction has removed. Others need not
/// be asked for: whoever removes the last event of a span has looked at it.
///
/// Marks are locked first, and the events looked at again then: a late event that keeps such a mark is committed, and seen, or
/// has the mark locked, and it is passed over; and one that comes now waits, and writes the mark anew.
pub(super) async fn forget_marks(session: &mut Session, gone: &[EventId]) -> Result<(), EngineError> {
    let spans: BTreeSet<i64> = gone.iter().map(|event| span_of(uuid(*event))).collect();
    let left = occupied(session, &spans).await?;
    let empty: BTreeSet<i64> = spans.difference(&left).copied().collect();
    if empty.is_empty() {
        return Ok(());
    }
    let sql = "SELECT m.value, m.span FROM JSON_TABLE(?, '$[*]' COLUMNS (span BIGINT PATH '$')) t
                STRAIGHT_JOIN oncehook_marks m FORCE INDEX (oncehook_marks_span) ON m.span = t.span FOR UPDATE SKIP LOCKED";
    let rows = session.rows(sql, vec![list(empty.iter().map(|span| json!(span)))]).await?;
    let left = occupied(session, &empty).await?;
    let mut marks = Vec::with_capacity(rows.len());
    for row in &rows {
        let span = number(row, 1)?;
        if !left.contains(&span) {
            marks.push(json!([hex::encode(bytes(row, 0)?), span]));
        }
    }
    let sql = "DELETE m FROM JSON_TABLE(?, '$[*]' COLUMNS (value VARCHAR(16) PATH '$[0]', span BIGINT PATH '$[1]')) t
                STRAIGHT_JOIN oncehook_marks m FORCE INDEX (PRIMARY) ON m.value = UNHEX(t.value) AND m.span = t.span";
    for some in marks.chunks(REMOVED_AT_ONCE) {
        session.change(sql, vec![list(some.iter().cloned())]).await?;
    }
    Ok(())
}

/// Those of some neighbouring spans in which there are events.
async fn occupied(session: &mut Session, spans: &BTreeSet<i64>) -> Result<BTreeSet<i64>, EngineError> {
    let (Some(first), Some(last)) = (spans.first(), spans.last()) else { return Ok(BTreeSet::new()) };
    let mut found = BTreeSet::new();
    // Whoever forgets has just been through all but the last, and knows that few are left there; the last may hold thousands, of
    // which one will do.
    let all = "SELECT id FROM oncehook_events FORCE INDEX (PRIMARY) WHERE id BETWEEN ? AND ?";
    let one = "SELECT id FROM oncehook_events FORCE INDEX (PRIMARY) WHERE id BETWEEN ? AND ? LIMIT 1";
    let before_last = Part { from: first_of_span(*first), to: before(first_of_span(*last)) };
    for (sql, part) in [(all, before_last), (one, Part::of_spans(*last, *last))] {
        if !part.is_empty() {
            let rows = session.rows(sql, vec![id(part.from), id(part.to)]).await?;
            found.extend(ones(&rows)?.map(|part| span_of(part.from)));
        }
    }
    Ok(found)
}
