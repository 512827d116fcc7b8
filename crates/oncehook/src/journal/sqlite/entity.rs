//! The queues of entities: which delivery comes before which, and which are let go on when one has ended. Each function runs
//! inside a transaction of its caller, and the one writer is the lock of every entity.
//!
//! Does not: decide which delivery is eligible. The rules are in `ordering`; this loads what they ask for, and carries out what
//! they say about deliveries that do not run.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use oncehook_verify::UnixMicros;
use rusqlite::{Connection, OptionalExtension, Result, params};

use super::queue::{self, Due, change};
use crate::delivery::{Claim, DeliveryId, DeliveryState, Fence, HandedEvent, RouteName, Verdict};
use crate::event::EventId;
use crate::journal::Progress;
use crate::journal::decide::outcome::Held;
use crate::ordering::{Candidate, Company, Line, Mark, NO_TIME, OnDead, Place, Standing, plan};
use crate::route::Route;

/// Blocked entities that are looked after in one go.
const LOOKED_AFTER: i64 = 1_000;

/// What is due, as the rules see it.
pub(super) fn candidate(due: &Due) -> Candidate {
    let Claim { fence, event, parked_at, .. } = &due.claim;
    Candidate {
        entity: event.entity.clone(),
        place: Place { version: event.version, event: event.id, epoch: fence.delivery.epoch },
        mark: event.mark(),
        kind: event.kind.clone(),
        parked_at: *parked_at,
    }
}

/// What a job knows of those that wait for deliveries of its route. Usually none does, and then none is looked for.
pub(super) struct Entities {
    /// The route, if it looks at entities.
    serial: Option<Arc<Route>>,
    now: UnixMicros,
    /// Whether a delivery of the route may wait until it is eligible.
    blocked: bool,
    /// Whether a delivery of any route may wait for a prerequisite.
    pub(super) parked: bool,
}

impl Entities {
    /// Looks who waits. `route` is the one of that name, if it is known; one that looks at entities always is.
    pub(super) fn look(
        connection: &Connection,
        name: &RouteName,
        route: Option<Arc<Route>>,
        now: UnixMicros,
    ) -> Result<Self> {
        let blocked = connection
            .prepare_cached(
                "SELECT 1 FROM oncehook_deliveries INDEXED BY oncehook_deliveries_blocked
                  WHERE route = ?1 AND blocked_at IS NOT NULL AND state IN ('ready', 'retrying') LIMIT 1",
            )?
            .exists([name.as_str()])?;
        let serial = route.filter(|route| route.ordering.is_serial());
        Ok(Self { serial, now, blocked, parked: anything_parked(connection)? })
    }

    /// Sorts out what is due: blocks those that are not eligible, settles those that came too late or too early, and returns the
    /// places of the others in the order in which they run, at most `room` of them.
    pub(super) fn eligible(
        &mut self,
        connection: &Connection,
        company: Company,
        room: usize,
        due: &mut [Due],
    ) -> Result<(Vec<usize>, Progress)> {
        let mut passed = Progress::default();
        let Some(route) = self.serial.clone() else { return Ok(((0..due.len().min(room)).collect(), passed)) };
        adopt(connection, due)?;
        let candidates: Vec<Candidate> = due.iter().map(candidate).collect();
        let queues = queues(connection, &route, &candidates)?;
        let plan = plan(&route.ordering, company, room, &candidates, &queues, self.now);
        for due in plan.blocked.iter().filter_map(|index| due.get(*index)) {
            self.blocked = true;
            block(connection, &due.claim.fence.delivery, self.now)?;
        }
        for (index, verdict) in &plan.passed {
            let Some(Due { claim, .. }) = due.get(*index) else { continue };
            self.settle(connection, Held::Lock, &claim.fence, Some(&claim.event), verdict, &[])?;
            passed.count(claim.event.id, claim.fence.attempt, claim.attempt_limit, verdict, self.now);
        }
        let mut run = Vec::with_capacity(plan.run.len());
        for (index, state) in plan.run {
            run.extend(due.get_mut(index).map(|due| {
                due.claim.event.state = state;
                index
            }));
        }
        Ok((run, passed))
    }

    /// Settles a delivery, with what follows for others of its entity. `event` is read again if it is not at hand. `false`: the
    /// lease is lost.
    pub(super) fn settle(
        &mut self,
        connection: &Connection,
        held: Held,
        fence: &Fence,
        event: Option<&HandedEvent>,
        verdict: &Verdict,
        followups: &[RouteName],
    ) -> Result<bool> {
        if !queue::settle(connection, fence, held, verdict, followups, self.now)? {
            // We hold the write lock and are the only process: a row without a lease was read a moment ago. If it is not there
            // now, nothing here can be trusted, and the transaction is undone.
            return if held == Held::Lock { Err(rusqlite::Error::StatementChangedRows(0)) } else { Ok(false) };
        }
        self.parked |= matches!(verdict, Verdict::Parked(..));
        if self.serial.is_none() && !self.parked {
            return Ok(true);
        }
        let (entity, mark, kind) = match event {
            Some(event) => (event.entity.clone(), event.mark(), event.kind.clone()),
            None => subject(connection, fence.delivery.event)?,
        };
        let Some(entity) = entity else { return Ok(true) };
        let succeeded = matches!(verdict, Verdict::Succeeded(_));
        if let Some(route) = &self.serial {
            let (name, ordering) = (route.name.as_str(), &route.ordering);
            if succeeded && ordering.remembers() {
                let scope = ordering.scope(name);
                let mut known = standing(connection, &scope, &entity)?;
                ordering.advance(&mut known, mark, kind.as_deref());
                remember(connection, &scope, &entity, &known)?;
            }
            if self.blocked {
                let_go_on(connection, name, &entity, route.let_go_on(verdict), self.now)?;
            }
        }
        if succeeded && self.parked {
            wake_parked(connection, &entity, self.now)?;
        }
        Ok(true)
    }
}

/// What an event is about: its entity, which version of it, and its type.
fn subject(connection: &Connection, event: EventId) -> Result<(Option<String>, Mark, Option<String>)> {
    connection
        .prepare_cached("SELECT entity, version, occurred_at, type FROM oncehook_events WHERE seq = ?1")?
        .query_row([event.sequence()], |row| {
            let mark = Mark { version: row.get(1)?, at: row.get::<_, Option<i64>>(2)?.map(UnixMicros) };
            Ok((row.get(0)?, mark, row.get(3)?))
        })
}

/// Puts deliveries into the queues of their entities that were made before the route looked at them.
fn adopt(connection: &Connection, due: &[Due]) -> Result<()> {
    for Due { claim, .. } in due.iter().filter(|due| !due.queued && due.claim.event.entity.is_some()) {
        let DeliveryId { event, route, epoch } = &claim.fence.delivery;
        change(
            connection,
            "UPDATE oncehook_deliveries SET entity = ?4, version = ?5 WHERE event = ?1 AND route = ?2 AND epoch = ?3",
            params![event.sequence(), route.as_str(), epoch, claim.event.entity, claim.event.version],
        )?;
    }
    Ok(())
}

/// The queues of the entities of these candidates.
fn queues(connection: &Connection, route: &Route, candidates: &[Candidate]) -> Result<HashMap<String, Line>> {
    let mut wanted: BTreeMap<&str, usize> = BTreeMap::new();
    for entity in candidates.iter().filter_map(|candidate| candidate.entity.as_deref()) {
        *wanted.entry(entity).or_default() += 1;
    }
    let places = candidates.iter().map(|candidate| candidate.place);
    let places: HashMap<(i64, u32), Place> =
        places.map(|place| ((place.event.sequence(), place.epoch), place)).collect();
    let (name, ordering) = (route.name.as_str(), &route.ordering);
    let anything_runs = connection
        .prepare_cached(
            "SELECT 1 FROM oncehook_deliveries INDEXED BY oncehook_deliveries_busy
              WHERE route = ?1 AND entity IS NOT NULL AND state = 'running' LIMIT 1",
        )?
        .exists([name])?;
    let mut queues = HashMap::with_capacity(wanted.len());
    for (entity, count) in wanted {
        let mut queue = Line { running: anything_runs && is_busy(connection, name, entity)?, ..Line::default() };
        if ordering.remembers() {
            queue.standing = standing(connection, &ordering.scope(name), entity)?;
        }
        if ordering.by_entity && !queue.running {
            queue.front = front(connection, route, entity, count, &places)?;
        }
        queues.insert(entity.to_owned(), queue);
    }
    Ok(queues)
}

/// Whether a delivery of the entity is leased.
fn is_busy(connection: &Connection, route: &str, entity: &str) -> Result<bool> {
    connection
        .prepare_cached(
            "SELECT 1 FROM oncehook_deliveries INDEXED BY oncehook_deliveries_busy
              WHERE route = ?1 AND entity = ?2 AND state = 'running'",
        )?
        .exists([route, entity])
}

/// The first deliveries of an entity's queue. `places` are those of the candidates, by what the table knows of them; any other
/// delivery gets a place that is none of theirs.
fn front(
    connection: &Connection,
    route: &Route,
    entity: &str,
    length: usize,
    places: &HashMap<(i64, u32), Place>,
) -> Result<Vec<(Place, DeliveryState)>> {
    let length = i64::try_from(length).unwrap_or(i64::MAX);
    connection
        .prepare_cached(
            "SELECT event, epoch, version, state
               FROM oncehook_deliveries INDEXED BY oncehook_deliveries_line
              WHERE route = ?1 AND entity = ?2
                AND (state = 'ready' OR state = 'retrying' OR state = 'running' OR state = 'dead')
                AND (state <> 'dead' OR ?3)
              ORDER BY version, event, epoch LIMIT ?4",
        )?
        .query_map(params![route.name.as_str(), entity, route.ordering.on_dead == OnDead::Block, length], |row| {
            let (event, epoch) = (row.get(0)?, row.get(1)?);
            let other = Place { version: row.get(2)?, event: EventId::from_bytes([0; 16]), epoch };
            let place = places.get(&(event, epoch)).copied().unwrap_or(other);
            let state = DeliveryState::parse(row.get_ref(3)?.as_str()?);
            Ok((place, state.ok_or(rusqlite::Error::InvalidQuery)?))
        })?
        .collect()
}

/// What is known of an entity.
fn standing(connection: &Connection, scope: &str, entity: &str) -> Result<Standing> {
    let found = connection
        .prepare_cached(
            "SELECT newest, last_at, state, version FROM oncehook_entities WHERE scope = ?1 AND entity = ?2",
        )?
        .query_row([scope, entity], |row| {
            let at = row.get::<_, Option<i64>>(1)?.map(UnixMicros);
            Ok(Standing { newest: Mark { version: row.get(0)?, at }, state: row.get(2)?, version: row.get(3)? })
        })
        .optional()?;
    Ok(found.unwrap_or_default())
}

fn remember(connection: &Connection, scope: &str, entity: &str, known: &Standing) -> Result<usize> {
    let Standing { newest, state, version } = known;
    change(
        connection,
        "INSERT INTO oncehook_entities (scope, entity, version, last_at, state, newest)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6)
         ON CONFLICT (scope, entity) DO UPDATE
            SET version = excluded.version, last_at = excluded.last_at, state = excluded.state, newest = excluded.newest",
        params![scope, entity, version, newest.at.map(|at| at.0), state, newest.version],
    )
}

/// Takes a delivery out of the queue until one before it lets it go on.
fn block(connection: &Connection, delivery: &DeliveryId, now: UnixMicros) -> Result<usize> {
    let DeliveryId { event, route, epoch } = delivery;
    change(
        connection,
        "UPDATE oncehook_deliveries SET run_at = ?4, blocked_at = coalesce(blocked_at, ?5)
          WHERE event = ?1 AND route = ?2 AND epoch = ?3 AND state IN ('ready', 'retrying')",
        params![event.sequence(), route.as_str(), epoch, NO_TIME.0, now.0],
    )
}

/// Puts the first blocked deliveries of an entity back into the queue, at most `count`. If one is not eligible after all, it is
/// blocked again when it is looked at.
pub(super) fn let_go_on(
    connection: &Connection,
    route: &str,
    entity: &str,
    count: usize,
    now: UnixMicros,
) -> Result<()> {
    change(
        connection,
        "UPDATE oncehook_deliveries SET run_at = ?4
          WHERE (event, route, epoch) IN
                (SELECT event, route, epoch FROM oncehook_deliveries INDEXED BY oncehook_deliveries_line
                  WHERE route = ?1 AND entity = ?2
                    AND (state = 'ready' OR state = 'retrying' OR state = 'running' OR state = 'dead')
                    AND state IN ('ready', 'retrying') AND run_at = ?3
                  ORDER BY version, event, epoch LIMIT ?5)",
        params![route, entity, NO_TIME.0, now.0, i64::try_from(count).unwrap_or(i64::MAX)],
    )?;
    Ok(())
}

/// Whether anything waits for a prerequisite.
pub(super) fn anything_parked(connection: &Connection) -> Result<bool> {
    let sql = "SELECT 1 FROM oncehook_deliveries INDEXED BY oncehook_deliveries_parked WHERE state = 'parked' LIMIT 1";
    connection.prepare_cached(sql)?.exists([])
}

/// Something of the entity took effect: deliveries that wait for a prerequisite look again. Mostly others are parked, and to look
/// first costs less than an update that finds nothing.
fn wake_parked(connection: &Connection, entity: &str, now: UnixMicros) -> Result<()> {
    let parked = "SELECT 1 FROM oncehook_deliveries INDEXED BY oncehook_deliveries_parked_entity
                   WHERE entity = ?1 AND state = 'parked'";
    if connection.prepare_cached(parked)?.exists([entity])? {
        change(
            connection,
            "UPDATE oncehook_deliveries INDEXED BY oncehook_deliveries_parked_entity
                SET state = CASE WHEN attempt > 0 THEN 'retrying' ELSE 'ready' END, run_at = ?2
              WHERE entity = ?1 AND state = 'parked'",
            params![entity, now.0],
        )?;
    }
    Ok(())
}

/// Looks after deliveries that wait for others: parked ones whose time has come, and the first of an entity's queue when nothing
/// is before it any more. Returns whether something is due now.
pub(super) fn look_again(connection: &Connection, route: &Route, now: UnixMicros) -> Result<bool> {
    let name = route.name.as_str();
    let mut woken = change(
        connection,
        "UPDATE oncehook_deliveries INDEXED BY oncehook_deliveries_parked
            SET state = CASE WHEN attempt > 0 THEN 'retrying' ELSE 'ready' END, run_at = ?2
          WHERE route = ?1 AND state = 'parked' AND run_at <= ?2",
        params![name, now.0],
    )?;
    if !route.ordering.is_serial() {
        woken += change(
            connection,
            "UPDATE oncehook_deliveries INDEXED BY oncehook_deliveries_blocked SET run_at = ?2
              WHERE route = ?1 AND blocked_at IS NOT NULL AND state IN ('ready', 'retrying') AND run_at = ?3",
            params![name, now.0, NO_TIME.0],
        )?;
        return Ok(woken > 0);
    }
    let waiting: Vec<String> = connection
        .prepare_cached(
            "SELECT DISTINCT entity FROM oncehook_deliveries INDEXED BY oncehook_deliveries_blocked
              WHERE route = ?1 AND blocked_at IS NOT NULL AND state IN ('ready', 'retrying') AND run_at = ?2
                AND entity IS NOT NULL
              LIMIT ?3",
        )?
        .query_map(params![name, NO_TIME.0, LOOKED_AFTER], |row| row.get(0))?
        .collect::<Result<_>>()?;
    for entity in waiting {
        if is_stranded(connection, route, &entity)? {
            let_go_on(connection, name, &entity, 1, now)?;
            woken += 1;
        }
    }
    Ok(woken > 0)
}

/// Whether all in the queue of an entity are blocked, and none is eligible.
fn is_stranded(connection: &Connection, route: &Route, entity: &str) -> Result<bool> {
    if is_busy(connection, route.name.as_str(), entity)? {
        return Ok(false);
    }
    let passes_dead = route.ordering.passes(DeliveryState::Dead);
    let first_is_blocked = connection
        .prepare_cached(
            "SELECT run_at = ?4 FROM oncehook_deliveries INDEXED BY oncehook_deliveries_line
              WHERE route = ?1 AND entity = ?2
                AND (state = 'ready' OR state = 'retrying' OR state = 'running' OR state = 'dead')
                AND (state <> 'dead' OR NOT ?3)
              ORDER BY version, event, epoch LIMIT 1",
        )?
        .query_row(params![route.name.as_str(), entity, passes_dead, NO_TIME.0], |row| row.get(0))
        .optional()?;
    Ok(first_is_blocked.unwrap_or(false))
}
