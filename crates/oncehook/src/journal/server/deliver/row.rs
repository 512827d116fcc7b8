//! Deliveries and their events, read from rows.

use oncehook_verify::EventKey;

use super::steps::Due;
use crate::delivery::{Claim, DeliveryId, Fence, HandedEvent};
use crate::event::SourceName;
use crate::journal::server::error::EngineError;
use crate::journal::server::value::Row;
use crate::ordering::{Candidate, Mark, Place};
use crate::route::Route;

/// How many columns an event has: id, source, key, type, entity, occurred_at, received_at, headers, body, result, version.
pub(in crate::journal) const EVENT_COLUMNS: usize = 11;

/// An event from the first [`EVENT_COLUMNS`] columns.
pub(in crate::journal) fn handed(row: &mut impl Row, route: &Route) -> Result<HandedEvent, EngineError> {
    let source = row.text(1)?;
    Ok(HandedEvent {
        id: row.event(0)?,
        source: if source == route.source.as_str() {
            route.source.clone()
        } else {
            // The route was given another source since. The event keeps its own.
            SourceName::new(&source).map_err(|_| EngineError::damaged())?
        },
        key: EventKey::from_bytes(row.bytes(2)?).ok_or_else(EngineError::damaged)?,
        kind: row.maybe_text(3)?,
        entity: row.maybe_text(4)?,
        occurred_at: row.maybe_time(5)?,
        received_at: row.time(6)?,
        headers: row.take_bytes(7)?,
        body: row.take_bytes(8)?,
        result: row.maybe_text(9)?,
        version: row.maybe_int(10)?,
        state: None,
        current: None,
    })
}

/// A due delivery with its event: the event's columns, then epoch, attempt, attempt_limit, parked_at, whether it is in the
/// queue of its entity, whether the entity is locked.
pub(in crate::journal) fn due(row: &mut impl Row, route: &Route) -> Result<Due, EngineError> {
    let event = handed(row, route)?;
    let at = |column: usize| EVENT_COLUMNS + column;
    let place = Place { version: event.version, event: event.id, epoch: row.small(at(0))? };
    Ok(Due {
        candidate: Candidate {
            entity: event.entity.clone(),
            place,
            mark: Mark { version: event.version, at: event.occurred_at },
            kind: event.kind.clone(),
            parked_at: row.maybe_time(at(3))?,
        },
        attempt: row.small(at(1))?,
        attempt_limit: row.maybe_small(at(2))?.unwrap_or(route.retry.max_attempts),
        parked_at: row.maybe_time(at(3))?,
        queued: row.is_true(at(4))?,
        entity_locked: row.is_true(at(5))?,
        state: None,
        event: Some(event),
    })
}

/// A due delivery without its event: event, epoch, attempt, attempt_limit, parked_at, whether it is in the queue of its
/// entity, whether the entity is locked; then the event's entity, version, occurred_at, type.
pub(in crate::journal) fn due_without_event(row: &impl Row, route: &Route) -> Result<Due, EngineError> {
    let version = row.maybe_int(8)?;
    Ok(Due {
        candidate: Candidate {
            entity: row.maybe_text(7)?,
            place: Place { version, event: row.event(0)?, epoch: row.small(1)? },
            mark: Mark { version, at: row.maybe_time(9)? },
            kind: row.maybe_text(10)?,
            parked_at: row.maybe_time(4)?,
        },
        attempt: row.small(2)?,
        attempt_limit: row.maybe_small(3)?.unwrap_or(route.retry.max_attempts),
        parked_at: row.maybe_time(4)?,
        queued: row.is_true(5)?,
        entity_locked: row.is_true(6)?,
        state: None,
        event: None,
    })
}

/// A leased delivery: the event's columns, then epoch, attempt, attempt_limit, parked_at.
pub(in crate::journal) fn claim(row: &mut impl Row, route: &Route) -> Result<Claim, EngineError> {
    let event = handed(row, route)?;
    let at = |column: usize| EVENT_COLUMNS + column;
    let delivery = DeliveryId { event: event.id, route: route.name.clone(), epoch: row.small(at(0))? };
    Ok(Claim {
        fence: Fence { delivery, attempt: row.small(at(1))? },
        attempt_limit: row.small(at(2))?,
        parked_at: row.maybe_time(at(3))?,
        event,
    })
}
