//! Spans: stretches of about four seconds into which the search index of a shared journal cuts the ids of events.
//!
//! `search` of each such journal marks a span with what occurs in it, behind the accepts. Here is what does not depend on the
//! database: which ids belong to a span, which part of the ids a query can match, and by what an event is looked for.
//!
//! Promises: pure. A bound leaves out nothing that matches; where an id may run ahead of its event's receipt, a mark says so.
//! Does not: read or write anything.

use uuid::Uuid;

use super::{EventQuery, EventStatus};

/// The milliseconds of a span, as a power of two. The schemas say the same.
const SPAN_BITS: u32 = 12;

/// The milliseconds of a slot, as a power of two: a span has 32, one for each bit of [`Slots`].
const SLOT_BITS: u32 = SPAN_BITS - 5;

/// Events younger than this are not marked yet.
pub(super) const SETTLED_MICROS: i64 = 30_000_000;

/// An event that is older than this when it is stored marks its own span.
pub(super) const LATE_MICROS: i64 = 5_000_000;

/// An id is not further ahead of the millisecond of receipt than this, or its span is marked with [`AHEAD`].
pub(super) const AHEAD_MILLIS: i64 = 2_000;

/// Events that are marked at once.
pub(super) const MARKED_AT_ONCE: i64 = 5_000;

/// How many of the newest events are looked at before a queue that is not in their order is sorted.
pub(super) const STRETCH: i64 = 1_000;

/// Candidates that are looked at by one statement: few at first, because a page may be full soon.
pub(super) const FIRST_CANDIDATES: i64 = 4;
pub(super) const MOST_CANDIDATES: i64 = 256;

/// How many are looked at after so many.
pub(super) fn more_candidates(at_once: i64) -> i64 {
    (at_once * 4).min(MOST_CANDIDATES)
}

/// The mark of a span in which an event has no deliveries.
pub(super) const UNROUTED: &str = "u";

/// The mark of a span in which an id runs ahead of its event's receipt.
pub(super) const AHEAD: &str = "b";

/// By which mark the spans of a query are found, if by any: an entity has fewer events than a type, and a type not more than its
/// source.
pub(super) fn mark_of(query: &EventQuery) -> Option<String> {
    match query {
        EventQuery { entity: Some(entity), .. } => Some(format!("e{entity}")),
        EventQuery { kind: Some(kind), .. } => Some(format!("t{kind}")),
        EventQuery { source: Some(source), .. } => Some(format!("s{source}")),
        EventQuery { status: Some(EventStatus::Unrouted), .. } => Some(UNROUTED.to_owned()),
        _ => None,
    }
}

/// In which slots of a span a mark is true, where the journal writes that down: what is rare is then looked for among its
/// neighbours of a moment, and not among all events of the span.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Slots(pub(super) u32);

/// The most parts into which a span is cut. What occurs oftener is looked for between its first and its last slot.
const MOST_RUNS: usize = 4;

impl Slots {
    /// The slot of an id.
    pub(super) fn of(id: Uuid) -> Self {
        Self(1 << ((millis_of(id) >> SLOT_BITS) & 31))
    }

    /// The ids of these slots of a span, the newest first.
    pub(super) fn parts(self, span: i64) -> Vec<Part> {
        let slots = |first: u32, last: u32| {
            let at = |slot: u32| first_of((span << SPAN_BITS) + (i64::from(slot) << SLOT_BITS));
            Part { from: at(first), to: before(at(last + 1)) }
        };
        let mut left = self.0;
        let mut runs = Vec::new();
        while left != 0 {
            let last = left.ilog2();
            let length = (left << (31 - last)).leading_ones();
            let first = last + 1 - length;
            if runs.len() == MOST_RUNS {
                return vec![slots(self.0.trailing_zeros(), self.0.ilog2())];
            }
            runs.push(slots(first, last));
            left &= (1 << first) - 1;
        }
        runs
    }
}

/// A part of the ids, both ends included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) from: Uuid,
    pub(super) to: Uuid,
}

impl Part {
    pub(super) const ALL: Self = Self { from: Uuid::nil(), to: Uuid::max() };

    /// One id.
    pub(super) fn of_one(id: Uuid) -> Self {
        Self { from: id, to: id }
    }

    /// The ids of some spans.
    pub(super) fn of_spans(first: i64, last: i64) -> Self {
        Self { from: first_of_span(first), to: before(first_of_span(last + 1)) }
    }

    pub(super) fn is_empty(self) -> bool {
        self.from > self.to
    }

    pub(super) fn within(self, other: Self) -> Self {
        Self { from: self.from.max(other.from), to: self.to.min(other.to) }
    }
}

/// The first id of a millisecond.
pub(super) fn first_of(millis: i64) -> Uuid {
    let millis = millis.clamp(0, (1 << 48) - 1).unsigned_abs();
    Uuid::from_u64_pair(millis << 16, 0)
}

/// The first id of a span.
pub(super) fn first_of_span(span: i64) -> Uuid {
    first_of(span << SPAN_BITS)
}

/// The id before.
pub(super) fn before(id: Uuid) -> Uuid {
    Uuid::from_u128(id.as_u128().saturating_sub(1))
}

/// The next id.
pub(super) fn behind(id: Uuid) -> Uuid {
    Uuid::from_u128(id.as_u128().saturating_add(1))
}

/// The millisecond of an id.
pub(super) fn millis_of(id: Uuid) -> i64 {
    (id.as_u64_pair().0 >> 16).cast_signed()
}

/// The span of an id.
pub(super) fn span_of(id: Uuid) -> i64 {
    millis_of(id) >> SPAN_BITS
}

/// The ids that a query can match, as far as they tell.
pub(super) fn bounds(query: &EventQuery) -> Part {
    // An id is never below the millisecond of receipt, so this bound loses nothing. There is no such bound for `until`:
    // after the clock was set back, ids run ahead of it. A day of slack keeps old pages cheap.
    let since = query.since.map_or(Uuid::nil(), |since| first_of(since.0 / 1_000));
    let until = query.until.map_or(Uuid::max(), |until| before(first_of(until.0 / 1_000 + 86_400_000)));
    let after = query.after.map_or(Uuid::max(), |after| before(Uuid::from_bytes(*after.as_bytes())));
    Part { from: since, to: until.min(after) }
}

/// The ids that a query can match, without those that run ahead.
pub(super) fn usual(query: &EventQuery) -> Part {
    let until = query.until.map_or(Uuid::max(), |until| first_of(until.0 / 1_000 + AHEAD_MILLIS + 1));
    Part { to: before(until), ..Part::ALL }.within(bounds(query))
}

/// The ids above the usual ones: of events that were received before `until`, but whose ids run ahead. There are some where a
/// clock had been set back.
pub(super) fn ahead(query: &EventQuery) -> Option<Part> {
    query.until?;
    let above = Part { from: behind(usual(query).to), ..Part::ALL }.within(bounds(query));
    (!above.is_empty()).then_some(above)
}

#[cfg(test)]
mod tests {
    use oncehook_verify::UnixMicros;

    use super::*;

    #[test]
    fn a_span_has_its_ids_and_no_others() {
        let part = Part::of_spans(7, 8);
        assert_eq!((span_of(part.from), span_of(part.to)), (7, 8));
        assert_eq!((span_of(before(part.from)), span_of(behind(part.to))), (6, 9));
        assert_eq!(millis_of(first_of(123_456)), 123_456);
        assert!(Part { from: part.to, to: part.from }.is_empty());
    }

    #[test]
    fn a_mark_that_is_true_of_a_few_slots_has_their_ids_and_no_others() {
        let has = |slots: Slots, id: Uuid| slots.parts(7).iter().any(|part| part.from <= id && id <= part.to);
        // The first and the last, two runs, all, and so many runs that they are one.
        for bits in [1, 1 << 31, 0b1100_0110, u32::MAX, 0b1_0101_0101] {
            let slots = Slots(bits);
            for slot in 0..32 {
                let millis = (7 << SPAN_BITS) + (slot << SLOT_BITS);
                let (first, last) = (first_of(millis), before(first_of(millis + (1 << SLOT_BITS))));
                assert_eq!((Slots::of(first), Slots::of(last)), (Slots(1 << slot), Slots(1 << slot)));
                let wanted = if bits == 0b1_0101_0101 { slot <= 8 } else { bits & (1 << slot) != 0 };
                assert_eq!((has(slots, first), has(slots, last)), (wanted, wanted), "{bits:b}, slot {slot}");
            }
            let parts = slots.parts(7);
            assert!(parts.is_sorted_by(|newer, older| newer.from > older.to), "{parts:?}");
        }
        assert_eq!(Slots(u32::MAX).parts(7), [Part::of_spans(7, 7)]);
        assert_eq!(Slots(0).parts(7), []);
    }

    #[test]
    fn what_is_usual_and_what_runs_ahead_are_all_within_the_bounds() {
        let query = EventQuery { until: Some(UnixMicros(50_000_000)), ..Default::default() };
        let (usual, above) = (usual(&query), ahead(&query).unwrap());
        assert_eq!((usual.from, behind(usual.to), above.to), (Uuid::nil(), above.from, bounds(&query).to));
        assert_eq!(millis_of(above.from), 52_001);
        assert_eq!(ahead(&EventQuery::default()), None);
    }

    #[test]
    fn the_rarest_filter_is_looked_for() {
        let text = |text: &str| Some(text.to_owned());
        let mut query = EventQuery { source: text("shop"), ..Default::default() };
        assert_eq!(mark_of(&query).as_deref(), Some("sshop"));
        query.kind = text("paid");
        assert_eq!(mark_of(&query).as_deref(), Some("tpaid"));
        query.entity = text("o1");
        assert_eq!(mark_of(&query).as_deref(), Some("eo1"));
        let status = EventQuery { status: Some(EventStatus::Unrouted), ..Default::default() };
        assert_eq!(mark_of(&status).as_deref(), Some("u"));
        assert_eq!(mark_of(&EventQuery::default()), None);
    }
}
