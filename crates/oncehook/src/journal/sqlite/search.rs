//! Finding events: which way a list query goes, and the walk itself.
//!
//! Promises: newest first, and each page goes on below the last event of the one before. Any one filter costs what it finds and
//! not the whole history: the ledger, the filters of groups and blocks and the partial indexes of the deliveries name the
//! candidates, and the event itself decides.
//!
//! Does not: bound the time. What is common in each of two ways and rare in both at once, and a success behind a long queue,
//! are walked; the reader's deadline ends that.

use oncehook_verify::EventKey;
use rusqlite::{Connection, OptionalExtension, Params, Row, named_params};

use super::bloom::{self, Item};
use super::statements::{Cells, of_engine};
use super::{follower, groups};
use crate::event::EventId;
use crate::journal::sql::story;
use crate::journal::{EventQuery, EventStatus, EventSummary};

/// How many of the newest events are looked at before an index that is not in their order is sorted.
const STRETCH: usize = 1_000;

/// The columns of a summary. `e` is the event.
const SUMMARY: &str = "SELECT e.id, e.source, e.key, e.type, e.entity, s.status, e.integrity, e.occurred_at,
       e.received_at, length(e.body), coalesce(d.journal + d.memory + d.redis, 0),
       (SELECT group_concat(f.flag || coalesce(':' || f.reason, '')) FROM oncehook_flags f WHERE f.event = e.seq)";

/// The tables beside the event, each by its key.
const BESIDE: &str = "JOIN oncehook_event_status s ON s.event = e.seq
  LEFT JOIN oncehook_duplicates d ON d.event = e.seq";

/// Finds one event more than the page holds, newest first. The choice of the way is here and nowhere else.
/// `recent`: the events that the ledger's memory names for the key.
pub(super) fn find(
    connection: &Connection,
    query: &EventQuery,
    recent: &[EventId],
) -> rusqlite::Result<Vec<EventSummary>> {
    let mut search = Search { connection, query, wanted: query.limit + 1, found: Vec::new() };
    if let Some(key) = &query.key {
        search.by_key(key, recent)?;
        return Ok(search.found);
    }
    let span = usual(query);
    search.ahead(span)?;
    let items = groups::wanted(query);
    // An entity has fewer events than a status.
    if query.entity.is_none()
        && let Some((sql, in_order)) = query.status.and_then(marks)
    {
        search.by_status(&sql, in_order, span)?;
    } else if items.is_empty() {
        search.scan(span)?;
    } else {
        search.by_blocks(&items, span)?;
    }
    Ok(search.found)
}

/// A search under way.
struct Search<'s> {
    connection: &'s Connection,
    query: &'s EventQuery,
    wanted: usize,
    found: Vec<EventSummary>,
}

impl Search<'_> {
    fn is_full(&self) -> bool {
        self.found.len() >= self.wanted
    }

    /// Asks the ledger. Keys are scoped to a source, so without one every source is asked.
    fn by_key(&mut self, key: &EventKey, recent: &[EventId]) -> rusqlite::Result<()> {
        let sql =
            "SELECT k.event FROM oncehook_totals t CROSS JOIN oncehook_keys k ON k.source = t.source AND k.key = ?1";
        let mut statement = self.connection.prepare_cached(sql)?;
        let stored = statement.query_map([key.as_bytes()], |row| Ok(EventId::from_bytes(row.get(0)?)))?;
        let mut events = stored.collect::<rusqlite::Result<Vec<_>>>()?;
        events.extend_from_slice(recent);
        events.sort_unstable_by(|a, b| b.cmp(a));
        events.dedup();
        events.into_iter().try_for_each(|event| self.scan(Span::of(event.sequence())))
    }

    /// Newest first: what is behind the last block, then the blocks that may hold a match; behind the last group one by one, and
    /// in groups those of the groups that may.
    fn by_blocks(&mut self, items: &[Item], span: Span) -> rusqlite::Result<()> {
        let sealed_to = follower::sealed_to(self.connection)?;
        let grouped_to = groups::grouped_to(self.connection)?;
        self.scan(Span { from: span.from.max(sealed_to + 1), ..span })?;
        self.look_through(Span { from: span.from.max(grouped_to + 1), ..span })?;
        if self.is_full() {
            return Ok(());
        }
        groups::each(self.connection, (span.from, span.to.min(grouped_to)), items, |first, last| {
            self.look_through(Span { from: span.from.max(first), to: span.to.min(last) })?;
            Ok(self.is_full())
        })
    }

    /// Looks at the blocks of a span until the page is full.
    fn look_through(&mut self, span: Span) -> rusqlite::Result<()> {
        // The last one is the first that reaches to the span's end: without it the walk would begin at the newest block of all.
        let mut statement = self.connection.prepare_cached(
            "SELECT first, last, sources, types, entities, unrouted FROM oncehook_blocks
              WHERE last >= ?1 AND first <= ?2
                AND last <= coalesce((SELECT min(last) FROM oncehook_blocks WHERE last >= ?2), ?2) ORDER BY last DESC",
        )?;
        let query = self.query;
        let entity = query.entity.as_deref().map(groups::entity);
        // As they stand in a block's lists.
        let source = query.source.as_deref().map(follower::listed);
        let kind = query.kind.as_deref().map(follower::listed);
        // No list means that anything may be there. A list is not parsed: the name as it was written is hint enough.
        let lists = |block: &Row<'_>, column: usize, name: &Option<String>| -> rusqlite::Result<bool> {
            let Some(name) = name else { return Ok(true) };
            Ok(block.get_ref(column)?.as_str_or_null()?.is_none_or(|listed| listed.contains(name)))
        };
        let mut blocks = statement.query([span.from, span.to])?;
        while !self.is_full()
            && let Some(block) = blocks.next()?
        {
            let entity_may = match entity {
                Some(entity) => bloom::may_contain(block.get_ref(4)?.as_blob()?, entity),
                None => true,
            };
            let unrouted_may =
                query.status != Some(EventStatus::Unrouted) || block.get::<_, Option<bool>>(5)? != Some(false);
            if entity_may && unrouted_may && lists(block, 2, &source)? && lists(block, 3, &kind)? {
                self.scan(Span { from: span.from.max(block.get(0)?), to: span.to.min(block.get(1)?) })?;
            }
        }
        Ok(())
    }

    /// The events above the usual ones: they were received before `until`, but their ids run ahead. There are some where the
    /// clock had been set back.
    fn ahead(&mut self, usual: Span) -> rusqlite::Result<()> {
        let Some(until) = self.query.until else { return Ok(()) };
        self.look_at(
            "SELECT seq FROM oncehook_events INDEXED BY oncehook_events_ahead
              WHERE seq / 32768 > received_at / 1000 + 1000 AND seq > ?1 AND seq <= ?2 AND received_at < ?3 ORDER BY seq DESC",
            (usual.to, bounds(self.query).to, until.0),
        )
    }

    /// Looks at the marked events only. A mark is one delivery's, the status is the event's: the scan decides.
    fn by_status(&mut self, sql: &str, in_order: bool, mut span: Span) -> rusqlite::Result<()> {
        if !in_order {
            // A long queue fills a page right here. Without this, every page of it would sort all of it.
            let Some(from) = after_stretch(self.connection, span, STRETCH + self.query.limit)? else {
                return self.scan(span);
            };
            self.scan(Span { from, ..span })?;
            span.to = from - 1;
        }
        self.look_at(sql, (span.from, span.to))
    }

    /// Looks at the events that a statement names, until the page is full. One that is named several times in a row is looked at
    /// once.
    fn look_at(&mut self, sql: &str, params: impl Params) -> rusqlite::Result<()> {
        let mut statement = self.connection.prepare_cached(sql)?;
        let mut events = statement.query(params)?;
        let mut last = None;
        while !self.is_full()
            && let Some(row) = events.next()?
        {
            let event: i64 = row.get(0)?;
            if last.replace(event) != Some(event) {
                self.scan(Span::of(event))?;
            }
        }
        Ok(())
    }

    /// Walks the events of a span until the page is full.
    fn scan(&mut self, span: Span) -> rusqlite::Result<()> {
        let query = self.query;
        // Events without a delivery are found by reading the deliveries of the span once. The status would look for those of each
        // event by itself, and the deeper the tables, the longer that takes.
        let unrouted = if query.status == Some(EventStatus::Unrouted) {
            "AND e.seq NOT IN (SELECT d.event FROM oncehook_deliveries d WHERE d.event >= :from AND d.event <= :to)"
        } else {
            ""
        };
        let sql = format!(
            "{SUMMARY} FROM oncehook_events e {BESIDE}
              WHERE e.seq >= :from AND e.seq <= :to {unrouted}
                AND (:source IS NULL OR e.source = :source)
                AND (:type   IS NULL OR e.type   = :type)
                AND (:entity IS NULL OR e.entity = :entity)
                AND (:status IS NULL OR s.status = :status)
                AND (:since  IS NULL OR e.received_at >= :since)
                AND (:until  IS NULL OR e.received_at <  :until)
              ORDER BY e.seq DESC LIMIT :limit"
        );
        let bounds = bounds(query);
        let mut statement = self.connection.prepare_cached(&sql)?;
        let params = named_params! {
            ":from": span.from.max(bounds.from),
            ":to": span.to.min(bounds.to),
            ":source": query.source,
            ":type": query.kind,
            ":entity": query.entity,
            ":status": query.status.map(EventStatus::as_str),
            ":since": query.since.map(|at| at.0),
            ":until": query.until.map(|at| at.0),
            ":limit": i64::try_from(self.wanted - self.found.len()).unwrap_or(i64::MAX),
        };
        for event in statement.query_map(params, |row| story::summary(&Cells::of(row)?).map_err(of_engine))? {
            self.found.push(event?);
        }
        Ok(())
    }
}

/// A range of sequences, both ends included.
#[derive(Clone, Copy)]
struct Span {
    from: i64,
    to: i64,
}

impl Span {
    /// One event.
    fn of(event: i64) -> Self {
        Self { from: event, to: event }
    }
}

/// The sequences that a query can match, as far as they tell.
fn bounds(query: &EventQuery) -> Span {
    // A sequence is never below the millisecond of receipt, so this bound loses nothing. There is no such bound for
    // `until`: after the clock was set back, sequences run ahead of it.
    let since = query.since.map_or(i64::MIN, |since| first_sequence(since.0 / 1_000));
    let after = query.after.map_or(i64::MAX, |after| after.sequence() - 1);
    Span { from: since, to: after }
}

/// A sequence is not further ahead of the millisecond of receipt than this, or the index of those that are has it.
const AHEAD_MILLIS: i64 = 1_000;

/// The sequences that a query can match, without those that run ahead.
fn usual(query: &EventQuery) -> Span {
    let bounds = bounds(query);
    let until = query.until.map_or(i64::MAX, |until| first_sequence(until.0 / 1_000 + AHEAD_MILLIS + 1));
    Span { to: bounds.to.min(until), ..bounds }
}

/// Names the events between two sequences that may be in a status, newest first; one that has several marks comes several times in
/// a row. And whether the index is in the order of the events: otherwise all of its part is sorted for each page.
fn marks(status: EventStatus) -> Option<(String, bool)> {
    let (table, state, in_order) = match status {
        EventStatus::Quarantined => ("flags", "flag = 'quarantined'", true),
        EventStatus::Dead => ("deliveries INDEXED BY oncehook_deliveries_dead", "state = 'dead'", true),
        EventStatus::Retrying => (DUE, "state IN ('ready', 'retrying') AND state = 'retrying'", false),
        EventStatus::Ready => (DUE, "state IN ('ready', 'retrying') AND state = 'ready'", false),
        EventStatus::Running => ("deliveries INDEXED BY oncehook_deliveries_leased", "state = 'running'", false),
        EventStatus::Parked => (ASIDE, "state = 'parked'", true),
        EventStatus::Superseded => (ASIDE, "state = 'superseded'", true),
        EventStatus::Skipped => (ASIDE, "state = 'skipped'", true),
        // Nearly every event, or in the filters of blocks.
        EventStatus::Unrouted | EventStatus::Succeeded => return None,
    };
    let sql =
        format!("SELECT event FROM oncehook_{table} WHERE {state} AND event BETWEEN ?1 AND ?2 ORDER BY event DESC");
    Some((sql, in_order))
}

const DUE: &str = "deliveries INDEXED BY oncehook_deliveries_due";
const ASIDE: &str = "deliveries INDEXED BY oncehook_deliveries_aside";

/// The sequence of the event that comes `count` after the newest of a span, if the span has that many.
fn after_stretch(connection: &Connection, span: Span, count: usize) -> rusqlite::Result<Option<i64>> {
    let sql = "SELECT seq FROM oncehook_events WHERE seq BETWEEN ?1 AND ?2 ORDER BY seq DESC LIMIT 1 OFFSET ?3";
    let params = (span.from, span.to, i64::try_from(count).unwrap_or(i64::MAX));
    connection.prepare_cached(sql)?.query_row(params, |row| row.get(0)).optional()
}

fn first_sequence(millis: i64) -> i64 {
    millis.clamp(0, (1 << 48) - 1) << 15
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use oncehook_verify::UnixMicros;

    use super::*;
    use crate::event::EventIds;
    use crate::journal::sqlite::schema;

    const EVENTS: i64 = 20_000;

    /// Sequences are never below the time of receipt.
    const FIRST: i64 = 1_000_000;

    /// So many events, numbered by their time of receipt, with the values that SQL makes of `value`. Then runs `more`.
    pub(in super::super) fn made(events: i64, [seq, source, kind, entity]: [&str; 4], more: &str) -> Connection {
        let mut connection = Connection::open_in_memory().unwrap();
        schema::migrate(&mut connection, UnixMicros(0)).unwrap();
        connection
            .execute_batch(&format!(
                "INSERT INTO oncehook_events (seq, id, source, key, key_signed, type, entity, occurred_at, received_at, key_expires_at,
                                              integrity, digest, headers, body)
                 SELECT {seq}, zeroblob(16), {source}, X'6B', 1, {kind}, {entity}, NULL, value, 0, 'body', zeroblob(32), X'', X''
                   FROM (WITH RECURSIVE n(value) AS (SELECT 1 UNION ALL SELECT value + 1 FROM n LIMIT {events})
                         SELECT value FROM n);
                 {more}"
            ))
            .unwrap();
        connection
    }

    /// What a query finds, and how many hundreds of SQLite's steps it takes.
    pub(in super::super) fn counted(connection: &mut Connection, query: &EventQuery) -> (Vec<i64>, u64) {
        let steps = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&steps);
        let step = move || {
            counter.fetch_add(1, Ordering::Relaxed);
            false
        };
        connection.progress_handler(100, Some(step)).unwrap();
        let events = find(connection, query, &[]).unwrap();
        (events.iter().map(|event| event.received_at.0).collect(), steps.load(Ordering::Relaxed))
    }

    /// A long history in which everything succeeded, but for what `odd` says about some events (`@7` is the seventh).
    fn history(odd: &str) -> Connection {
        let seq = format!("{FIRST} + value");
        let succeeded = "INSERT INTO oncehook_deliveries (event, route, state, run_at)
                         SELECT seq, 'orders', 'succeeded', -seq FROM oncehook_events;";
        let odd = odd.replace('@', &format!("{FIRST} + "));
        made(EVENTS, [&seq, "iif(value % 2, 'odd', 'even')", "NULL", "NULL"], &format!("{succeeded} {odd}"))
    }

    /// What a query finds on `count` pages of two, and the most work that a page took, in hundreds of SQLite's steps.
    fn pages(connection: &mut Connection, query: &EventQuery, count: usize) -> (Vec<i64>, u64) {
        let mut query = EventQuery { limit: 2, ..query.clone() };
        let (mut found, mut most) = (Vec::new(), 0);
        for _ in 0..count {
            let (page, steps) = counted(connection, &query);
            most = most.max(steps);
            found.extend(page.iter().take(query.limit));
            let id_of = |number: &i64| EventIds::above(FIRST + number - 1, 0).next(UnixMicros(0));
            query.after = found.last().map(id_of);
            if page.len() <= query.limit {
                break;
            }
        }
        (found, most)
    }

    /// A walk over this history takes some 7,500 hundreds of steps, sorting a queue as long as it 2,600; a stretch of it, about 500.
    const LITTLE: u64 = 1_000;

    #[test]
    fn few_events_in_a_status_are_found_at_once_in_a_long_history() {
        let mut connection = history(
            "INSERT INTO oncehook_deliveries (event, route, state, run_at) VALUES
               (@100, 'a', 'dead', 9), (@100, 'b', 'dead', 1), (@100, 'c', 'running', 1), (@7000, 'a', 'dead', 7),
               (@15000, 'a', 'dead', 2), (@19990, 'a', 'dead', 3), (@101, 'a', 'dead', 1),
               (@200, 'a', 'retrying', 9), (@7200, 'a', 'retrying', 5), (@19980, 'a', 'retrying', 1), (@200, 'b', 'ready', 1),
               (@300, 'a', 'ready', 1), (@7300, 'a', 'ready', 9), (@7300, 'b', 'ready', 9), (@19970, 'a', 'ready', 1),
               (@400, 'a', 'running', 1), (@7400, 'a', 'running', 1), (@19960, 'a', 'running', 1),
               (@500, 'a', 'parked', 1), (@7500, 'a', 'parked', 1), (@7500, 'b', 'skipped', 1), (@19940, 'a', 'parked', 1),
               (@600, 'a', 'superseded', 1), (@7600, 'a', 'superseded', 1), (@19930, 'a', 'superseded', 1),
               (@700, 'a', 'skipped', 1), (@7700, 'a', 'skipped', 1), (@19920, 'a', 'skipped', 1);
             INSERT INTO oncehook_flags VALUES (@101, 'quarantined', 0, NULL), (@8000, 'quarantined', 0, NULL),
               (@8000, 'conflict', 0, NULL), (@9000, 'conflict', 0, NULL), (@19950, 'quarantined', 0, NULL);",
        );
        let with = |status| EventQuery { status: Some(status), ..EventQuery::default() };
        for (status, wanted) in [
            (EventStatus::Dead, &[19_990, 15_000, 7_000, 100][..]),
            (EventStatus::Retrying, &[19_980, 7_200, 200]),
            (EventStatus::Ready, &[19_970, 7_300, 300]),
            (EventStatus::Running, &[19_960, 7_400, 400]),
            (EventStatus::Quarantined, &[19_950, 8_000, 101]),
            (EventStatus::Parked, &[19_940, 7_500, 500]),
            (EventStatus::Superseded, &[19_930, 7_600, 600]),
            (EventStatus::Skipped, &[19_920, 7_700, 700]),
        ] {
            let (found, most) = pages(&mut connection, &with(status), 10);
            assert_eq!(found, wanted, "{}", status.as_str());
            assert!(most < LITTLE, "{} took {most}", status.as_str());
        }
        // Every other condition still holds.
        let odd = EventQuery { source: Some("odd".to_owned()), ..with(EventStatus::Quarantined) };
        assert_eq!(pages(&mut connection, &odd, 10).0, [101]);
        let between =
            EventQuery { since: Some(UnixMicros(101)), until: Some(UnixMicros(15_000)), ..with(EventStatus::Dead) };
        assert_eq!(pages(&mut connection, &between, 10).0, [7_000]);
        let key = EventQuery { kind: Some("none".to_owned()), ..with(EventStatus::Retrying) };
        assert_eq!(pages(&mut connection, &key, 10).0, [0; 0]);
    }

    #[test]
    fn a_page_of_a_long_queue_does_not_sort_all_of_it() {
        let mut connection = history("UPDATE oncehook_deliveries SET state = 'ready'");
        let query = EventQuery { status: Some(EventStatus::Ready), ..EventQuery::default() };
        let (found, most) = pages(&mut connection, &query, 3);
        assert_eq!(found, (EVENTS - 5..=EVENTS).rev().collect::<Vec<_>>());
        assert!(most < LITTLE, "it took {most}");
    }

    #[test]
    fn what_came_while_the_clock_was_set_back_is_found_by_its_time() {
        let mut connection = history("");
        // Ids of an hour later, the time of receipt as before.
        connection
            .execute_batch(
                "INSERT INTO oncehook_events SELECT (3600000 << 15) + seq, id, source, key, key_signed, type, entity, occurred_at,
                        received_at, key_expires_at, integrity, digest, headers, body, version
                   FROM oncehook_events WHERE received_at IN (90, 100, 110)",
            )
            .unwrap();
        for (source, wanted) in [
            (None, [100, 90, 100, 99, 98]),
            (Some("odd"), [99, 97, 95, 93, 91]),
            (Some("even"), [100, 90, 100, 98, 96]),
        ] {
            let (until, source) = (Some(UnixMicros(101)), source.map(str::to_owned));
            let query = EventQuery { until, source, limit: 4, ..EventQuery::default() };
            assert_eq!(counted(&mut connection, &query).0, wanted);
        }
    }

    #[test]
    fn one_event_s_audit_is_found_by_an_index() {
        let connection = history("");
        let plan: String = connection
            .query_row("EXPLAIN QUERY PLAN SELECT at FROM oncehook_audit WHERE subject = 'x'", [], |row| row.get(3))
            .unwrap();
        assert!(plan.contains("oncehook_audit_subject"), "{plan}");
    }
}
