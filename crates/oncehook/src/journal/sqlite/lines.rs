//! The lines of entities: who stands before whom, and who lets whom go on. Each function runs inside a transaction of its
//! caller, and the one writer is the lock of every entity.

use std::collections::{BTreeMap, HashMap};

use oncehook_verify::UnixMicros;
use rusqlite::{Connection, OptionalExtension, params};

use super::queue::Due;
use crate::delivery::{DeliveryId, DeliveryState, HandedEvent, RouteName, Verdict};
use crate::event::EventId;
use crate::ordering::{Candidate, Line, Mark, NO_TIME, OnDead, Place, Standing};
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
    let places = candidates.iter().map(|candidate| candidate.place);
    let places: HashMap<(i64, u32), Place> =
        places.map(|place| ((place.event.sequence(), place.epoch), place)).collect();
    let anything_runs = exists(connection, ANYTHING_RUNS, route.name.as_str())?;
    let mut lines = HashMap::with_capacity(wanted.len());
    for (entity, count) in wanted {
        let running = anything_runs && is_busy(connection, route, entity)?;
        let standing = if route.ordering.remembers() {
            standing(connection, &route.ordering.scope(route.name.as_str()), entity)?
        } else {
            Standing::default()
        };
        let front = if route.ordering.by_entity && !running {
            front(connection, route, entity, count, &places)?
        } else {
            Vec::new()
        };
        lines.insert(entity.to_owned(), Line { standing, running, front, due: Vec::new() });
    }
    Ok(lines)
}

/// Whether a delivery of the entity is leased.
fn is_busy(connection: &Connection, route: &Route, entity: &str) -> Result<bool, rusqlite::Error> {
    connection
        .prepare_cached(
            "SELECT 1 FROM oncehook_deliveries INDEXED BY oncehook_deliveries_busy
              WHERE route = ?1 AND entity = ?2 AND state = 'running'",
        )?
        .exists(params![route.name.as_str(), entity])
}

/// The first of a line. `places` are those of the candidates, by what the table knows of them; anybody else is told by a place that
/// is none of theirs.
fn front(
    connection: &Connection,
    route: &Route,
    entity: &str,
    length: usize,
    places: &HashMap<(i64, u32), Place>,
) -> Result<Vec<(Place, DeliveryState)>, rusqlite::Error> {
    connection
        .prepare_cached(
            "SELECT event, epoch, version, state
               FROM oncehook_deliveries INDEXED BY oncehook_deliveries_line
              WHERE route = ?1 AND entity = ?2
                AND (state = 'ready' OR state = 'retrying' OR state = 'running' OR state = 'dead')
                AND (state <> 'dead' OR ?3)
              ORDER BY version, event, epoch LIMIT ?4",
        )?
        .query_map(
            params![
                route.name.as_str(),
                entity,
                route.ordering.on_dead == OnDead::Block,
                i64::try_from(length).unwrap_or(i64::MAX)
            ],
            |row| {
                let (event, epoch) = (row.get(0)?, row.get(1)?);
                let elsewhere = Place { version: row.get(2)?, event: EventId::from_bytes([0; 16]), epoch };
                let place = places.get(&(event, epoch)).copied().unwrap_or(elsewhere);
                let state = DeliveryState::parse(row.get_ref(3)?.as_str()?);
                Ok((place, state.ok_or(rusqlite::Error::InvalidQuery)?))
            },
        )?
        .collect()
}

/// What is known of an entity.
fn standing(connection: &Connection, scope: &str, entity: &str) -> Result<Standing, rusqlite::Error> {
    let found = connection
        .prepare_cached(
            "SELECT newest, last_at, state, version FROM oncehook_entities WHERE scope = ?1 AND entity = ?2",
        )?
        .query_row(params![scope, entity], |row| {
            let at = row.get::<_, Option<i64>>(1)?.map(UnixMicros);
            Ok(Standing { newest: Mark { version: row.get(0)?, at }, state: row.get(2)?, version: row.get(3)? })
        })
        .optional()?;
    Ok(found.unwrap_or_default())
}

/// Takes a delivery out of the queue until somebody before it lets it go on.
pub(super) fn block(connection: &Connection, route: &Route, due: &Due, now: UnixMicros) -> Result<(), rusqlite::Error> {
    connection
        .prepare_cached(
            "UPDATE oncehook_deliveries SET run_at = ?4, blocked_at = coalesce(blocked_at, ?5)
              WHERE event = ?1 AND route = ?2 AND epoch = ?3 AND state IN ('ready', 'retrying')",
        )?
        .execute(params![due.event.id.sequence(), route.name.as_str(), due.epoch, NO_TIME.0, now.0])?;
    Ok(())
}

/// Whether anybody waits: on a route for his turn, or anywhere for a prerequisite. Usually nobody does, and then nobody is looked
/// for.
#[derive(Clone, Copy)]
pub(super) struct Waiting {
    pub(super) blocked: bool,
    pub(super) parked: bool,
}

const ANYTHING_BLOCKED: &str = "SELECT 1 FROM oncehook_deliveries INDEXED BY oncehook_deliveries_blocked
                                 WHERE route = ?1 AND blocked_at IS NOT NULL AND state IN ('ready', 'retrying') LIMIT 1";
const ANYTHING_RUNS: &str = "SELECT 1 FROM oncehook_deliveries INDEXED BY oncehook_deliveries_busy
                              WHERE route = ?1 AND entity IS NOT NULL AND state = 'running' LIMIT 1";

fn exists(connection: &Connection, sql: &str, route: &str) -> Result<bool, rusqlite::Error> {
    connection.prepare_cached(sql)?.exists([route])
}

/// Who waits, as far as deliveries of this route can end it.
pub(super) fn waiting(connection: &Connection, route: &RouteName) -> Result<Waiting, rusqlite::Error> {
    Ok(Waiting { blocked: exists(connection, ANYTHING_BLOCKED, route.as_str())?, parked: anything_parked(connection)? })
}

/// What a delivery of an entity came to.
pub(super) struct Came<'v> {
    pub(super) entity: &'v str,
    pub(super) mark: Mark,
    pub(super) kind: Option<&'v str>,
    pub(super) verdict: &'v Verdict,
}

impl<'v> Came<'v> {
    /// Nothing, if the event has no entity.
    pub(super) fn new(event: &'v HandedEvent, verdict: &'v Verdict) -> Option<Self> {
        let mark = Mark { version: event.version, at: event.occurred_at };
        Some(Self { entity: event.entity.as_deref()?, mark, kind: event.kind.as_deref(), verdict })
    }
}

/// What follows for others of the same entity from what a delivery came to. `serial`: the route, if it looks at entities.
pub(super) fn after(
    connection: &Connection,
    serial: Option<&Route>,
    came: &Came<'_>,
    waiting: Waiting,
    now: UnixMicros,
) -> Result<(), rusqlite::Error> {
    let Came { entity, mark, kind, verdict } = came;
    let succeeded = matches!(verdict, Verdict::Succeeded(_));
    if let Some(route) = serial {
        let (name, ordering) = (route.name.as_str(), &route.ordering);
        if succeeded && ordering.remembers() {
            let scope = ordering.scope(name);
            let mut known = standing(connection, &scope, entity)?;
            ordering.advance(&mut known, *mark, *kind);
            remember(connection, &scope, entity, &known)?;
        }
        if waiting.blocked {
            let_go_on(connection, name, entity, route.let_go_on(verdict), now)?;
        }
    }
    if succeeded && waiting.parked {
        wake_parked(connection, entity, now)?;
    }
    Ok(())
}

/// The same, where the event is not at hand.
pub(super) fn after_lease(
    connection: &Connection,
    serial: Option<&Route>,
    delivery: &DeliveryId,
    verdict: &Verdict,
    waiting: Waiting,
    now: UnixMicros,
) -> Result<(), rusqlite::Error> {
    if serial.is_none() && !waiting.parked {
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
    let came = Came { entity: &entity, mark, kind: kind.as_deref(), verdict };
    after(connection, serial, &came, waiting, now)
}

fn remember(connection: &Connection, scope: &str, entity: &str, known: &Standing) -> Result<(), rusqlite::Error> {
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

/// Puts the first of those that wait for their turn back into the queue, at most so many. If it is not their turn after all,
/// they are taken out again when they are looked at.
pub(super) fn let_go_on(
    connection: &Connection,
    route: &str,
    entity: &str,
    count: usize,
    now: UnixMicros,
) -> Result<(), rusqlite::Error> {
    connection
        .prepare_cached(
            "UPDATE oncehook_deliveries SET run_at = ?4
              WHERE (event, route, epoch) IN
                    (SELECT event, route, epoch FROM oncehook_deliveries INDEXED BY oncehook_deliveries_line
                      WHERE route = ?1 AND entity = ?2
                        AND (state = 'ready' OR state = 'retrying' OR state = 'running' OR state = 'dead')
                        AND state IN ('ready', 'retrying') AND run_at = ?3
                      ORDER BY version, event, epoch LIMIT ?5)",
        )?
        .execute(params![route, entity, NO_TIME.0, now.0, i64::try_from(count).unwrap_or(i64::MAX)])?;
    Ok(())
}

/// Whether anything waits for a prerequisite.
pub(super) fn anything_parked(connection: &Connection) -> Result<bool, rusqlite::Error> {
    let sql = "SELECT 1 FROM oncehook_deliveries INDEXED BY oncehook_deliveries_parked WHERE state = 'parked' LIMIT 1";
    connection.prepare_cached(sql)?.exists([])
}

/// Something of the entity took effect: whatever waits for a prerequisite looks again. Mostly others are parked, and to look first
/// costs less than an update that finds nothing.
fn wake_parked(connection: &Connection, entity: &str, now: UnixMicros) -> Result<(), rusqlite::Error> {
    let parked = "SELECT 1 FROM oncehook_deliveries INDEXED BY oncehook_deliveries_parked_entity
                   WHERE entity = ?1 AND state = 'parked'";
    if !connection.prepare_cached(parked)?.exists([entity])? {
        return Ok(());
    }
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
pub(super) fn look_again(connection: &Connection, route: &Route, now: UnixMicros) -> Result<bool, rusqlite::Error> {
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
        .query_map(params![name, NO_TIME.0, i64::try_from(LOOKED_AFTER).unwrap_or(i64::MAX)], |row| row.get(0))?
        .collect::<Result<_, _>>()?;
    for entity in waiting {
        if is_stranded(connection, route, &entity)? {
            let_go_on(connection, name, &entity, 1, now)?;
            woken += 1;
        }
    }
    Ok(woken > 0)
}

/// Whether everybody in the line waits for his turn, and nobody has it.
fn is_stranded(connection: &Connection, route: &Route, entity: &str) -> Result<bool, rusqlite::Error> {
    let passes_dead = !route.ordering.by_entity || route.ordering.on_dead == OnDead::Continue;
    if is_busy(connection, route, entity)? {
        return Ok(false);
    }
    let first_is_blocked = connection
        .prepare_cached(
            "SELECT run_at = ?4 FROM oncehook_deliveries INDEXED BY oncehook_deliveries_line
              WHERE route = ?1 AND entity = ?2
                AND (state = 'ready' OR state = 'retrying' OR state = 'running' OR state = 'dead')
                AND (state <> 'dead' OR NOT ?3)
              ORDER BY version, event, epoch LIMIT 1",
        )?
        .query_row(params![route.name.as_str(), entity, passes_dead, NO_TIME.0], |row| row.get::<_, bool>(0))
        .optional()?;
    Ok(first_is_blocked.unwrap_or(false))
}
