//! Deliveries and their events, read from rows.

use std::collections::HashMap;

use oncehook_verify::EventKey;

use super::steps::{Delivers, Due};
use crate::delivery::{Claim, HandedEvent};
use crate::event::{EventId, SourceName};
use crate::journal::server::engine::Session;
use crate::journal::server::error::{EngineError, EngineResult};
use crate::journal::server::value::{Param, Row};
use crate::ordering::{Candidate, Mark, Place};
use crate::route::Route;

/// How many columns an event has: id, source, key, type, entity, occurred_at, received_at, headers, body, result, version.
pub(in crate::journal) const EVENT_COLUMNS: usize = 11;

/// An event from the first [`EVENT_COLUMNS`] columns.
fn handed(row: &mut impl Row, route: &Route) -> EngineResult<HandedEvent> {
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

/// What the rules of ordering need of an event: id, entity, version, occurred_at, type.
pub(in crate::journal) fn candidate(row: &impl Row) -> EngineResult<Candidate> {
    let version = row.maybe_int(2)?;
    Ok(Candidate {
        entity: row.maybe_text(1)?,
        place: Place { version, event: row.event(0)?, epoch: 0 },
        mark: Mark { version, at: row.maybe_time(3)? },
        kind: row.maybe_text(4)?,
        parked_at: None,
    })
}

/// A due delivery without its event: the columns of a [`candidate`], then epoch, attempt, attempt_limit, parked_at, whether
/// it is in the queue of its entity, whether the entity is locked.
pub(in crate::journal) fn due(row: &impl Row, route: &Route) -> EngineResult<Due> {
    due_of(row, route, candidate(row)?, 5)
}

/// A due delivery with its event: the event's columns, then the same.
pub(in crate::journal) fn due_with_event(row: &mut impl Row, route: &Route) -> EngineResult<Due> {
    let event = handed(row, route)?;
    let candidate = Candidate {
        entity: event.entity.clone(),
        place: Place { version: event.version, event: event.id, epoch: 0 },
        mark: Mark { version: event.version, at: event.occurred_at },
        kind: event.kind.clone(),
        parked_at: None,
    };
    Ok(Due { event: Some(event), ..due_of(row, route, candidate, EVENT_COLUMNS)? })
}

fn due_of(row: &impl Row, route: &Route, mut candidate: Candidate, first: usize) -> EngineResult<Due> {
    candidate.place.epoch = row.small(first)?;
    candidate.parked_at = row.maybe_time(first + 3)?;
    Ok(Due {
        candidate,
        attempt: row.small(first + 1)?,
        attempt_limit: row.maybe_small(first + 2)?.unwrap_or(route.retry.max_attempts),
        queued: row.is_true(first + 4)?,
        entity_locked: row.is_true(first + 5)?,
        state: None,
        event: None,
    })
}

/// Reads the events of locked deliveries, where the statement that locked them did not.
pub(in crate::journal) async fn load_events<E: Delivers>(
    session: &mut E::Session,
    route: &Route,
    due: &mut [Due],
) -> EngineResult {
    let Some(sql) = E::DELIVER.load_events.filter(|_| !due.is_empty()) else { return Ok(()) };
    let places = due.iter().map(|due| (due.candidate.place.event, due.candidate.place.epoch));
    let params = [route.after.as_ref().into(), Param::places(places)];
    with_events(session.rows(sql, &params).await?, route, due)
}

/// Gives each delivery its event: the event's columns, then the epoch. An event that is not there is an error.
pub(super) fn with_events(rows: Vec<impl Row>, route: &Route, due: &mut [Due]) -> EngineResult {
    let mut events: HashMap<(EventId, u32), HandedEvent> = HashMap::with_capacity(rows.len());
    for mut row in rows {
        let epoch = row.small(EVENT_COLUMNS)?;
        let event = handed(&mut row, route)?;
        events.insert((event.id, epoch), event);
    }
    for due in due {
        let Place { event, epoch, .. } = due.candidate.place;
        due.event = Some(events.remove(&(event, epoch)).ok_or_else(EngineError::damaged)?);
    }
    Ok(())
}

/// The claim to a delivery that is leased.
pub(super) fn claim(due: Due, route: &Route) -> EngineResult<Claim> {
    let fence = due.fence(route);
    let event = HandedEvent { state: due.state, ..due.event.ok_or_else(EngineError::damaged)? };
    Ok(Claim { fence, attempt_limit: due.attempt_limit, parked_at: due.candidate.parked_at, event })
}
