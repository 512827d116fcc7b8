//! Id buckets: stretches of about four seconds of event ids, and which values occur in each.
//!
//! An index on the events for every filter would make each accept slower. Instead one table says which sources, types and
//! entities occur in a bucket, whether an event without deliveries does, and whether an id there runs ahead of its event's
//! receipt; and the first and the last millisecond of the bucket in which the value occurs. [`index`](crate::journal::server)
//! fills the table behind the accepts. `search` reads it.
//!
//! Promises: pure. A bucket may promise a value that is not there (values are hashes, and events are forgotten); it never
//! leaves one out. A bound leaves out nothing that matches.
//! Does not: read or write anything.

use std::collections::BTreeMap;

use super::Result;
use super::value::{Column, Param, Row};
use crate::event::{EventId, NewEvent};
use crate::journal::{EventQuery, EventStatus};

/// The milliseconds of a bucket, as a power of two. The schemas say the same.
const BUCKET_BITS: u32 = 12;

/// Events younger than this are not in the index yet. Every append must be committed or undone within this time less
/// [`LATE_MICROS`]; the servers' timeouts for appends are shorter.
pub(crate) const SETTLED_MICROS: i64 = 30_000_000;

/// An event that is older than this when it is stored adds itself to its bucket.
pub(crate) const LATE_MICROS: i64 = 5_000_000;

/// An id that is at least this far ahead of its event's receipt is in its bucket under [`ahead_value`].
pub(crate) const AHEAD_MILLIS: i64 = 2_000;

/// A value in the index: the first bytes of a digest of the field's letter and the text. Two texts that share a value cost
/// some reading, and nothing else.
fn value(letter: &str, text: &str) -> i64 {
    let digest = oncehook_verify::digest(format!("{letter}{text}").as_bytes());
    digest.first_chunk().map_or(0, |bytes| i64::from_be_bytes(*bytes))
}

/// Stands for ids that run ahead of their events' receipt.
pub(crate) fn ahead_value() -> i64 {
    value("b", "")
}

/// The value by which the events of a query are found, if by any: an entity has fewer events than a type, and a type not
/// more than its source.
pub(crate) fn value_of(query: &EventQuery) -> Option<i64> {
    match query {
        EventQuery { entity: Some(entity), .. } => Some(value("e", entity)),
        EventQuery { kind: Some(kind), .. } => Some(value("t", kind)),
        EventQuery { source: Some(source), .. } => Some(value("s", source)),
        EventQuery { status: Some(EventStatus::Unrouted), .. } => Some(value("u", "")),
        _ => None,
    }
}

/// What the index knows of an event.
pub(crate) struct Indexed<'e> {
    pub(crate) id: EventId,
    pub(crate) source: &'e str,
    pub(crate) kind: Option<&'e str>,
    pub(crate) entity: Option<&'e str>,
    pub(crate) received_at: i64,
    /// Whether it has deliveries.
    pub(crate) routed: bool,
}

/// Values with the buckets in which they occur, and there the first and the last millisecond. In the order of the table.
#[derive(Debug, Default)]
pub(crate) struct Occurrences(BTreeMap<(i64, i64), (i64, i64)>);

impl Occurrences {
    pub(crate) fn add(&mut self, event: &Indexed<'_>) {
        let millis = millis_of(event.id);
        let at = millis & ((1 << BUCKET_BITS) - 1);
        let mut add = |value: i64| {
            let (first, last) = self.0.entry((value, bucket_of(event.id))).or_insert((at, at));
            (*first, *last) = (at.min(*first), at.max(*last));
        };
        add(value("s", event.source));
        event.kind.into_iter().for_each(|kind| add(value("t", kind)));
        event.entity.into_iter().for_each(|entity| add(value("e", entity)));
        if !event.routed {
            add(value("u", ""));
        }
        if millis >= event.received_at / 1_000 + AHEAD_MILLIS {
            add(ahead_value());
        }
    }

    /// What an event adds that is about to be stored, if it is late at this time of the database: the index may have
    /// passed its bucket already.
    pub(crate) fn add_late(&mut self, now: i64, id: EventId, event: &NewEvent) {
        if millis_of(id) < (now - LATE_MICROS) / 1_000 {
            self.add(&Indexed {
                id,
                source: event.source.as_str(),
                kind: event.kind.as_deref(),
                entity: event.entity.as_deref(),
                received_at: event.received_at.0,
                routed: event.quarantine.is_none() && !event.routes.is_empty(),
            });
        }
    }

    /// Value, bucket, first, last.
    pub(crate) fn rows(&self) -> impl Iterator<Item = [i64; 4]> {
        self.0.iter().map(|((value, bucket), (first, last))| [*value, *bucket, *first, *last])
    }

    /// The rows as tables of at most this many.
    pub(crate) fn tables(&self, most: usize) -> Vec<Param<'static>> {
        let rows: Vec<[i64; 4]> = self.rows().collect();
        let table = |rows: &[[i64; 4]]| {
            let column = |at: usize| Column::ints(rows.iter().filter_map(|row| row.get(at).copied()));
            Param::Table((0..4).map(column).collect())
        };
        rows.chunks(most).map(table).collect()
    }
}

/// A part of the ids, both ends included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) from: EventId,
    pub(crate) to: EventId,
}

impl Part {
    /// One id.
    pub(crate) fn of_one(id: EventId) -> Self {
        Self { from: id, to: id }
    }

    /// Every id.
    pub(crate) fn all() -> Self {
        Self { from: number(0), to: number(u128::MAX) }
    }

    /// What of a bucket is between two of its milliseconds.
    pub(crate) fn of_bucket(bucket: i64, first: i64, last: i64) -> Self {
        let start = bucket << BUCKET_BITS;
        Self { from: first_of(start + first), to: before(first_of(start + last + 1)) }
    }

    pub(crate) fn is_empty(self) -> bool {
        self.from > self.to
    }

    pub(crate) fn within(self, other: Self) -> Self {
        Self { from: self.from.max(other.from), to: self.to.min(other.to) }
    }
}

/// The events that rows name.
pub(crate) fn ids(rows: &[impl Row]) -> Result<Vec<EventId>> {
    rows.iter().map(|row| row.event(0)).collect()
}

fn number(id: u128) -> EventId {
    EventId::from_bytes(id.to_be_bytes())
}

/// The first id of a millisecond.
pub(crate) fn first_of(millis: i64) -> EventId {
    let millis = millis.clamp(0, (1 << 48) - 1).unsigned_abs();
    number(u128::from(millis) << 80)
}

/// The first id of a bucket.
pub(crate) fn first_of_bucket(bucket: i64) -> EventId {
    first_of(bucket << BUCKET_BITS)
}

pub(crate) fn before(id: EventId) -> EventId {
    number(u128::from_be_bytes(*id.as_bytes()).saturating_sub(1))
}

/// The next id.
pub(crate) fn behind(id: EventId) -> EventId {
    number(u128::from_be_bytes(*id.as_bytes()).saturating_add(1))
}

fn millis_of(id: EventId) -> i64 {
    id.sequence() >> 15
}

pub(crate) fn bucket_of(id: EventId) -> i64 {
    millis_of(id) >> BUCKET_BITS
}

/// The ids that a query can match, as far as they tell.
pub(crate) fn bounds(query: &EventQuery) -> Part {
    // An id is never below the millisecond of receipt, so this bound loses nothing. There is no such bound for `until`:
    // after the clock was set back, ids run ahead of it. A day of slack keeps old pages cheap.
    let since = query.since.map_or(number(0), |since| first_of(since.0 / 1_000));
    let until = query.until.map_or(number(u128::MAX), |until| before(first_of(until.0 / 1_000 + 86_400_000)));
    let after = query.after.map_or(number(u128::MAX), before);
    Part { from: since, to: until.min(after) }
}

/// The ids that a query can match, without those that run ahead.
pub(crate) fn usual(query: &EventQuery) -> Part {
    let bounds = bounds(query);
    let until = query.until.map_or(bounds.to, |until| before(first_of(until.0 / 1_000 + AHEAD_MILLIS + 1)));
    Part { to: until.min(bounds.to), ..bounds }
}

/// The ids above the usual ones: of events that were received before `until`, but whose ids run ahead. There are some where
/// a clock had been set back.
pub(crate) fn ahead(query: &EventQuery) -> Option<Part> {
    query.until?;
    let above = Part { from: behind(usual(query).to), ..bounds(query) };
    (!above.is_empty()).then_some(above)
}

#[cfg(test)]
mod tests {
    use oncehook_verify::UnixMicros;

    use super::*;

    fn event(millis: i64) -> Indexed<'static> {
        let (kind, entity) = (Some("paid"), None);
        Indexed { id: first_of(millis), source: "shop", kind, entity, received_at: millis * 1_000, routed: true }
    }

    #[test]
    fn a_bucket_has_its_ids_and_no_others() {
        let part = Part::of_bucket(7, 0, 4_095);
        assert_eq!((bucket_of(part.from), bucket_of(part.to)), (7, 7));
        assert_eq!((bucket_of(before(part.from)), bucket_of(behind(part.to))), (6, 8));
        assert_eq!((part.from, millis_of(first_of(123_456))), (first_of_bucket(7), 123_456));
        let (from, to) = (part.to, part.from);
        assert!(Part { from, to }.is_empty());
    }

    #[test]
    fn a_value_occurs_between_its_first_and_its_last_event_of_a_bucket() {
        let mut found = Occurrences::default();
        let start = 7 << BUCKET_BITS;
        [start + 300, start + 100, start + 4_095, start + 4_096].iter().for_each(|at| found.add(&event(*at)));
        found.add(&Indexed { routed: false, received_at: 0, ..event(start + 200) });
        let shop: Vec<_> = found.rows().filter(|[found, ..]| *found == value("s", "shop")).collect();
        assert_eq!(shop.iter().map(|[_, rest @ ..]| *rest).collect::<Vec<_>>(), [[7, 100, 4_095], [8, 0, 0]]);
        for odd in [value("u", ""), ahead_value()] {
            let odd: Vec<_> = found.rows().filter(|[found, ..]| *found == odd).collect();
            assert_eq!(odd.iter().map(|[_, rest @ ..]| *rest).collect::<Vec<_>>(), [[7, 200, 200]]);
        }
        let part = Part::of_bucket(7, 200, 200);
        assert_eq!((part.from, behind(part.to)), (first_of(start + 200), first_of(start + 201)));
        assert_eq!(found.tables(4).len(), found.rows().count().div_ceil(4));
    }

    #[test]
    fn what_is_usual_and_what_runs_ahead_are_all_within_the_bounds() {
        let query = EventQuery { until: Some(UnixMicros(50_000_000)), ..Default::default() };
        let (usual, above) = (usual(&query), ahead(&query).unwrap());
        assert_eq!((usual.from, behind(usual.to), above.to), (first_of(0), above.from, bounds(&query).to));
        assert_eq!(millis_of(above.from), 52_001);
        assert_eq!(ahead(&EventQuery::default()), None);
    }

    #[test]
    fn the_rarest_filter_is_looked_for() {
        let text = |text: &str| Some(text.to_owned());
        let mut query = EventQuery { source: text("shop"), ..Default::default() };
        assert_eq!(value_of(&query), Some(value("s", "shop")));
        query.kind = text("paid");
        assert_eq!(value_of(&query), Some(value("t", "paid")));
        query.entity = text("o1");
        assert_eq!(value_of(&query), Some(value("e", "o1")));
        let status = EventQuery { status: Some(EventStatus::Unrouted), ..Default::default() };
        assert_eq!(value_of(&status), Some(value("u", "")));
        assert_eq!(value_of(&EventQuery::default()), None);
    }
}
