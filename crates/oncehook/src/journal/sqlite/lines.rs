//! The lines of entities: who stands before whom, and who lets whom go on. Each function runs inside a transaction of its
//! caller, and the one writer is the lock of every entity.

use std::collections::{BTreeMap, HashMap};

use oncehook_verify::UnixMicros;
use rusqlite::{Connection, OptionalExtension, Row, params};

use super::queue::Due;
use crate::delivery::{DeliveryId, DeliveryState, Verdict};
use crate::event::EventId;
use crate::ordering::{Candidate, Line, Mark, NO_TIME, OnDead, Ordering, Place, Standing};
use crate::route::Route;

/// So many lines are looked after in one go.
const LOOKED_AFTER: usize = 1_000;

/// What is due, as the rules see it.
pub(super) fn candidate(due: &Due) -> Candidate {
    let event = &due.event;
    Candidate {
        entity: event.entity.clone(),
        place: Place { version: event.version, event: event.id, epoch: due.epoch },
        mark: Mark { version: event.version, at: event.occurred_at },
        kind: event.kind.clone(),
    }
}

/// Puts deliveries into the lines of their entities that were made before the route looked at them.
pub(super) fn adopt(connection: &Connection, route: &Route, due: &[Due]) -> Result<(), rusqlite::Error> {
    for due in due.iter().filter(|due| !due.in_line && due.event.entity.is_some()) {
        connection
            .prepare_cached(
                "UPDATE oncehook_deliveries SET entity = ?4, version = ?5 WHERE event = ?1 AND route = ?2 AND epoch = ?3",
            )?
            .execute(params![
                due.event.id.sequence(),
                route.name.as_str(),
                due.epoch,
                due.event.entity,
                due.event.version
            ])?;
    }
    Ok(())
}

/// The lines of the entities of these candidates.
pub(super) fn of(
    connection: &Connection,
    route: &Route,
    candidates: &[Candidate],
) -> Result<HashMap<String, Line>, rusqlite::Error> {
    let mut wanted: BTreeMap<&str, usize> = BTreeMap::new();
    for entity in candidates.iter().filter_map(|candidate| candidate.entity.as_deref()) {
        *wanted.entry(entity).or_default() += 1;
    }
    let mut lines = HashMap::with_capacity(wanted.len());
    for (entity, count) in wanted {
        lines.insert(entity.to_owned(), line(connection, route, entity, count + 1)?);
    }
    Ok(lines)
}

fn line(
    connection: &Connection,
    route: &Route,
    entity: &str,
    length: usize,
) -> Result<Line, rusqlite::Error> {
    let running = connection
        .prepare_cached(
            "SELECT 1 FROM oncehook_deliveries INDEXED BY oncehook_deliveries_busy
              WHERE route = ?1 AND entity = ?2 AND state = 'running'",
        )?
        .exists(params![route.name.as_str(), entity])?;
    let standing = if route.ordering.remembers() {
        standing(connection, &route.ordering.scope(route.name.as_str()), entity)?
    } else {
        Standing::default()
    };
    let front = if route.ordering.by_entity && !running {
        front(connection, route, entity, length)?
    } else {
        Vec::new()
    };
    Ok(Line { standing, running, front })
}

/// The first of a line.
fn front(
    connection: &Connection,
    route: &Route,
    entity: &str,
    length: usize,
) -> Result<Vec<(Place, DeliveryState)>, rusqlite::Error> {
    connection
        .prepare_cached(
            "SELECT e.id, d.epoch, d.version, d.state
               FROM oncehook_deliveries d INDEXED BY oncehook_deliveries_line
               JOIN oncehook_events e ON e.seq = d.event
              WHERE d.route = ?1 AND d.entity = ?2 AND d.state IN ('ready', 'retrying', 'running', 'dead')
                AND (d.state <> 'dead' OR ?3)
              ORDER BY d.version, d.event, d.epoch LIMIT ?4",
        )?
        .query_map(
            params![
                route.name.as_str(),
                entity,
                route.ordering.on_dead == OnDead::Block,
                i64::try_from(length).unwrap_or(i64::MAX)
            ],
            |row| {
                let state = DeliveryState::parse(row.get_ref(3)?.as_str()?);
                Ok((place(row)?, state.ok_or(rusqlite::Error::InvalidQuery)?))
            },
        )?
        .collect()
}

fn place(row: &Row<'_>) -> Result<Place, rusqlite::Error> {
    Ok(Place { event: EventId::from_bytes(row.get(0)?), epoch: row.get(1)?, version: row.get(2)? })
}

/// What is known of an entity.
fn standing(connection: &Connection, scope: &str, entity: &str) -> Result<Standing, rusqlite::Error> {
    let found = connection
        .prepare_cached(
            "SELECT newest, last_at, state, version FROM oncehook_entities WHERE scope = ?1 AND entity = ?2",
        )?
        .query_row(params![scope, entity], |row| {
            let at = row.get::<_, Option<i64>>(1)?.map(UnixMicros);
            Ok(Standing {
                newest: Mark { version: row.get(0)?, at },
                state: row.get(2)?,
                version: row.get(3)?,
            })
        })
        .optional()?;
    Ok(found.unwrap_or_default())
}

/// Takes a delivery out of the queue until somebody before it lets it go on.
pub(super) fn block(
    connection: &Connection,
    route: &Route,
    due: &Due,
    now: UnixMicros,
) -> Result<(), rusqlite::Error> {
    connection
        .prepare_cached(
            "UPDATE oncehook_deliveries SET run_at = ?4, blocked_at = coalesce(blocked_at, ?5)
              WHERE event = ?1 AND route = ?2 AND epoch = ?3 AND state IN ('ready', 'retrying')",
        )?
        .execute(params![due.event.id.sequence(), route.name.as_str(), due.epoch, NO_TIME.0, now.0])?;
    Ok(())
}

/// What follows for others of the same entity from what a delivery came to. `parked` says whether anything is.
pub(super) fn after(
    connection: &Connection,
    ordering: Option<&Ordering>,
    delivery: &DeliveryId,
    verdict: &Verdict,
    parked: bool,
    now: UnixMicros,
) -> Result<(), rusqlite::Error> {
    let succeeded = matches!(verdict, Verdict::Succeeded(_));
    if ordering.is_none() && !(succeeded && parked) {
        return Ok(());
    }
    let (entity, mark, kind) = connection
        .prepare_cached("SELECT entity, version, occurred_at, type FROM oncehook_events WHERE seq = ?1")?
        .query_row([delivery.event.sequence()], |row| {
            let at = row.get::<_, Option<i64>>(2)?.map(UnixMicros);
            let mark = Mark { version: row.get(1)?, at };
            Ok((row.get::<_, Option<String>>(0)?, mark, row.get::<_, Option<String>>(3)?))
        })?;
    let Some(entity) = entity else { return Ok(()) };
    if let Some(ordering) = ordering {
        if succeeded && ordering.remembers() {
            let scope = ordering.scope(delivery.route.as_str());
            let mut known = standing(connection, &scope, &entity)?;
            ordering.advance(&mut known, mark, kind.as_deref());
            remember(connection, &scope, &entity, &known)?;
        }
        let_go_on(connection, delivery.route.as_str(), &entity, now)?;
    }
    if succeeded && parked {
        wake_parked(connection, &entity, now)?;
    }
    Ok(())
}

fn remember(
    connection: &Connection,
    scope: &str,
    entity: &str,
    known: &Standing,
) -> Result<(), rusqlite::Error> {
    connection
        .prepare_cached(
            "INSERT INTO oncehook_entities (scope, entity, version, last_at, state, newest)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6)
             ON CONFLICT (scope, entity) DO UPDATE
                SET version = excluded.version, last_at = excluded.last_at, state = excluded.state, newest = excluded.newest",
        )?
        .execute(params![
            scope,
            entity,
            known.version,
            known.newest.at.map(|at| at.0),
            known.state,
            known.newest.version
        ])?;
    Ok(())
}

/// Puts the first of those that wait for their turn back into the queue. If it is not its turn after all, it is taken out
/// again when it is looked at.
pub(super) fn let_go_on(
    connection: &Connection,
    route: &str,
    entity: &str,
    now: UnixMicros,
) -> Result<(), rusqlite::Error> {
    connection
        .prepare_cached(
            "UPDATE oncehook_deliveries SET run_at = ?4
              WHERE (event, route, epoch) IN
                    (SELECT event, route, epoch FROM oncehook_deliveries INDEXED BY oncehook_deliveries_line
                      WHERE route = ?1 AND entity = ?2 AND state IN ('ready', 'retrying', 'running', 'dead')
                        AND state IN ('ready', 'retrying') AND run_at = ?3
                      ORDER BY version, event, epoch LIMIT 1)",
        )?
        .execute(params![route, entity, NO_TIME.0, now.0])?;
    Ok(())
}

/// Whether anything waits for a prerequisite.
pub(super) fn anything_parked(connection: &Connection) -> Result<bool, rusqlite::Error> {
    let sql = "SELECT 1 FROM oncehook_deliveries INDEXED BY oncehook_deliveries_parked WHERE state = 'parked' LIMIT 1";
    connection.prepare_cached(sql)?.exists([])
}

/// Something of the entity took effect: whatever waits for a prerequisite looks again.
fn wake_parked(connection: &Connection, entity: &str, now: UnixMicros) -> Result<(), rusqlite::Error> {
    connection
        .prepare_cached(
            "UPDATE oncehook_deliveries INDEXED BY oncehook_deliveries_parked_entity
                SET state = CASE WHEN attempt > 0 THEN 'retrying' ELSE 'ready' END, run_at = ?2
              WHERE entity = ?1 AND state = 'parked'",
        )?
        .execute(params![entity, now.0])?;
    Ok(())
}

/// Looks after those that wait for others: parked ones whose time has come, and the first of a line that nobody is before
/// any more. Returns whether something is due now.
pub(super) fn look_again(
    connection: &Connection,
    route: &Route,
    now: UnixMicros,
) -> Result<bool, rusqlite::Error> {
    let name = route.name.as_str();
    let mut woken = connection
        .prepare_cached(
            "UPDATE oncehook_deliveries INDEXED BY oncehook_deliveries_parked
                SET state = CASE WHEN attempt > 0 THEN 'retrying' ELSE 'ready' END, run_at = ?2
              WHERE route = ?1 AND state = 'parked' AND run_at <= ?2",
        )?
        .execute(params![name, now.0])?;
    if !route.ordering.is_serial() {
        woken += connection
            .prepare_cached(
                "UPDATE oncehook_deliveries INDEXED BY oncehook_deliveries_blocked SET run_at = ?2
                  WHERE route = ?1 AND blocked_at IS NOT NULL AND state IN ('ready', 'retrying') AND run_at = ?3",
            )?
            .execute(params![name, now.0, NO_TIME.0])?;
        return Ok(woken > 0);
    }
    let waiting: Vec<String> = connection
        .prepare_cached(
            "SELECT DISTINCT entity FROM oncehook_deliveries INDEXED BY oncehook_deliveries_blocked
              WHERE route = ?1 AND blocked_at IS NOT NULL AND state IN ('ready', 'retrying') AND run_at = ?2
                AND entity IS NOT NULL
              LIMIT ?3",
        )?
        .query_map(params![name, NO_TIME.0, i64::try_from(LOOKED_AFTER).unwrap_or(i64::MAX)], |row| {
            row.get(0)
        })?
        .collect::<Result<_, _>>()?;
    for entity in waiting {
        if is_stranded(connection, route, &entity)? {
            let_go_on(connection, name, &entity, now)?;
            woken += 1;
        }
    }
    Ok(woken > 0)
}

/// Whether everybody in the line waits for his turn, and nobody has it.
fn is_stranded(connection: &Connection, route: &Route, entity: &str) -> Result<bool, rusqlite::Error> {
    let passes_dead = !route.ordering.by_entity || route.ordering.on_dead == OnDead::Continue;
    let running = connection
        .prepare_cached(
            "SELECT 1 FROM oncehook_deliveries INDEXED BY oncehook_deliveries_busy
              WHERE route = ?1 AND entity = ?2 AND state = 'running'",
        )?
        .exists(params![route.name.as_str(), entity])?;
    if running {
        return Ok(false);
    }
    let first_is_blocked = connection
        .prepare_cached(
            "SELECT run_at = ?4 FROM oncehook_deliveries INDEXED BY oncehook_deliveries_line
              WHERE route = ?1 AND entity = ?2 AND state IN ('ready', 'retrying', 'running', 'dead')
                AND (state <> 'dead' OR NOT ?3)
              ORDER BY version, event, epoch LIMIT 1",
        )?
        .query_row(params![route.name.as_str(), entity, passes_dead, NO_TIME.0], |row| row.get::<_, bool>(0))
        .optional()?;
    Ok(first_is_blocked.unwrap_or(false))
}
