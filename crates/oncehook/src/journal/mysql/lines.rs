//! The lines of entities: who stands before whom, and who lets whom go on.
//!
//! Whoever decides whose turn it is, and whoever settles a delivery that others may wait for, first locks the row of (route,
//! entity) in `oncehook_entities`, in the order of their names, and keeps it until the end of the transaction. Statements after that
//! see what the one before has left (READ COMMITTED). So a delivery cannot be taken out of the queue while the one that it
//! waits for ends. Who takes a batch passes over lines that others are at ([`lock_free`]): two who work off a backlog nearly
//! always meet at some of them, and would take turns if they waited.
//!
//! Rows of deliveries are locked before that only with SKIP LOCKED, and only due ones; under the lock nobody waits for those. A
//! statement that walks an index and changes rows would lock whatever it walks over, and wait for it; so rows are found by
//! reading first, without locks, and then changed by their primary key, in its order.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use mysql_async::{Row, Value};
use oncehook_verify::UnixMicros;
use serde_json::json;

use super::connection::{Insert, Session};
use super::engine_error::EngineError;
use super::queue::{FENCES, Taken, attempt_limit, fence_list, route_name};
use super::row::{
    IDS, count, event, hex, id, ids, is_true, list, maybe_number, maybe_text, number, small, text,
};
use super::turn::One;
use crate::delivery::{DeliveryId, DeliveryState, Fence, RouteName, Verdict};
use crate::event::EventId;
use crate::ordering::{Candidate, Line, Mark, NO_TIME, OnDead, Place, Standing};
use crate::route::Route;

/// So many waiting ones are looked after in one go.
const LOOKED_AFTER: u64 = 1_000;

/// A list of bytes as the table that it becomes. Places are counted from 1.
const NAMES: &str = "JSON_TABLE(?, '$[*]' COLUMNS (place FOR ORDINALITY, name VARCHAR(512) PATH '$')) t";

/// Letters in front of an entity in the column `line`: those in the line, the one that is under way, what is parked.
const IN_LINE: u8 = b'l';
const RUNNING: u8 = b'r';
const PARKED: u8 = b'p';

/// What stands in the column `line`.
fn line(letter: u8, entity: &str) -> Vec<u8> {
    let mut line = Vec::with_capacity(entity.len() + 1);
    line.push(letter);
    line.extend_from_slice(entity.as_bytes());
    line
}

fn names<'e>(entities: impl IntoIterator<Item = &'e str>) -> Value {
    list(entities.into_iter().map(|entity| hex::encode(entity).into()))
}

fn lines<'e>(letter: u8, entities: impl IntoIterator<Item = &'e str>) -> Value {
    list(entities.into_iter().map(|entity| hex::encode(line(letter, entity)).into()))
}

/// A delivery that is due, without its event's body.
pub(super) struct Peeked {
    pub(super) candidate: Candidate,
    pub(super) attempt: u32,
    pub(super) attempt_limit: Option<u32>,
    pub(super) parked_at: Option<UnixMicros>,
    /// Bytes of the body.
    pub(super) size: u64,
    /// Whether it stands in the line of its entity.
    in_line: bool,
}

impl Peeked {
    /// Its row.
    pub(super) fn taken(&self) -> Taken {
        let Place { event, epoch, .. } = self.candidate.place;
        let Self { attempt, attempt_limit, parked_at, .. } = *self;
        Taken { event, epoch, attempt, attempt_limit, parked_at }
    }
}

/// Due deliveries of a route, the longest due first, locked until the transaction ends. With `only`, just that one, if it is
/// still due with that attempt.
pub(super) async fn peek(
    session: &mut Session,
    now: i64,
    route: &Route,
    limit: usize,
    only: Option<One>,
) -> Result<Vec<Peeked>, EngineError> {
    let columns =
        "SELECT event, epoch, attempt, parked_at, entity IS NOT NULL, attempt_limit FROM oncehook_deliveries";
    let name = route.name.as_str();
    let due = match only {
        None => {
            let sql = format!(
                "{columns} WHERE place = 0 AND route = ? AND place_at <= ? ORDER BY place_at, event, epoch LIMIT ?
                   FOR UPDATE SKIP LOCKED"
            );
            let limit = u64::try_from(limit).unwrap_or(u64::MAX);
            session.rows(&sql, vec![name.into(), now.into(), limit.into()]).await?
        }
        Some((event, epoch, attempt)) => {
            let sql = format!(
                "{columns} WHERE event = ? AND route = ? AND epoch = ? AND attempt = ? AND state IN ('ready', 'retrying')
                   FOR UPDATE SKIP LOCKED"
            );
            session.rows(&sql, vec![id(event), name.into(), epoch.into(), attempt.into()]).await?
        }
    };
    if due.is_empty() {
        return Ok(Vec::new());
    }
    let events: Vec<EventId> = due.iter().map(|row| event(row, 0)).collect::<Result<_, _>>()?;
    let sql = format!(
        "SELECT e.id, e.entity, e.version, e.occurred_at, e.type, e.size
           FROM {IDS} STRAIGHT_JOIN oncehook_events e ON e.id = UNHEX(t.id)"
    );
    let mut told: HashMap<EventId, Row> = HashMap::new();
    for row in session.rows(&sql, vec![ids(events)]).await? {
        told.insert(event(&row, 0)?, row);
    }
    let peeked = |row: &Row| {
        let about = told.get(&event(row, 0)?).ok_or_else(EngineError::damaged)?;
        let version = maybe_number(about, 2)?;
        Ok(Peeked {
            candidate: Candidate {
                entity: maybe_text(about, 1)?,
                place: Place { version, event: event(row, 0)?, epoch: small(row, 1)? },
                mark: Mark { version, at: maybe_number(about, 3)?.map(UnixMicros) },
                kind: maybe_text(about, 4)?,
            },
            attempt: small(row, 2)?,
            attempt_limit: attempt_limit(row, 5)?,
            parked_at: maybe_number(row, 3)?.map(UnixMicros),
            size: count(about, 5)?,
            in_line: is_true(row, 4)?,
        })
    };
    due.iter().map(peeked).collect()
}

/// A list of deliveries of one route as the table that it becomes.
const PLACES: &str =
    "JSON_TABLE(?, '$[*]' COLUMNS (event VARCHAR(32) PATH '$[0]', epoch INT UNSIGNED PATH '$[1]')) t";

/// Deliveries in the order of their rows.
fn places(places: impl Iterator<Item = Place>) -> Vec<serde_json::Value> {
    let sorted: BTreeSet<(EventId, u32)> = places.map(|place| (place.event, place.epoch)).collect();
    sorted.into_iter().map(|(event, epoch)| json!([hex(event), epoch])).collect()
}

/// Puts deliveries into the lines of their entities that were made before the route looked at them.
pub(super) async fn adopt(session: &mut Session, route: &Route, due: &[Peeked]) -> Result<(), EngineError> {
    let strange = due.iter().filter(|due| !due.in_line && due.candidate.entity.is_some());
    let strange = places(strange.map(|due| due.candidate.place));
    if strange.is_empty() {
        return Ok(());
    }
    let sql = format!(
        "UPDATE {PLACES} STRAIGHT_JOIN oncehook_events e ON e.id = UNHEX(t.event)
           STRAIGHT_JOIN oncehook_deliveries d ON d.event = e.id AND d.route = ? AND d.epoch = t.epoch
            SET d.entity = e.entity, d.version = e.version"
    );
    session.change(&sql, vec![list(strange), route.name.as_str().into()]).await?;
    Ok(())
}

/// Locks those entities of a route that nobody else has locked, until the end of the transaction, and returns them. One that was
/// never locked before is made, and whoever makes it at the same time is waited for.
pub(super) async fn lock_free<'e>(
    session: &mut Session,
    route: &RouteName,
    entities: &BTreeSet<&'e str>,
) -> Result<BTreeSet<&'e str>, EngineError> {
    let there = format!(
        "SELECT t.place FROM {NAMES} STRAIGHT_JOIN oncehook_entities e FORCE INDEX (PRIMARY)
             ON e.scope = ? AND e.entity = UNHEX(t.name)"
    );
    let asked: Vec<&str> = entities.iter().copied().collect();
    let mut free = BTreeSet::new();
    if asked.is_empty() {
        return Ok(free);
    }
    let sql = format!("{there} FOR UPDATE SKIP LOCKED");
    for row in session.rows(&sql, vec![names(asked.iter().copied()), route.as_str().into()]).await? {
        free.extend(at(&asked, &row)?);
    }
    // What was not to be had is somebody else's, or was never there.
    let rest: Vec<&str> = asked.into_iter().filter(|entity| !free.contains(entity)).collect();
    if rest.is_empty() {
        return Ok(free);
    }
    let mut fresh: BTreeSet<&str> = rest.iter().copied().collect();
    for row in session.rows(&there, vec![names(rest.iter().copied()), route.as_str().into()]).await? {
        if let Some(taken) = at(&rest, &row)? {
            fresh.remove(taken);
        }
    }
    lock(session, route, &fresh).await?;
    free.extend(fresh);
    Ok(free)
}

/// Locks entities of a route until the end of the transaction; who holds one is waited for. A row that is there is locked by being
/// found, one that is not by being made.
pub(super) async fn lock(
    session: &mut Session,
    route: &RouteName,
    entities: &BTreeSet<&str>,
) -> Result<(), EngineError> {
    let lock = Insert {
        head: "INSERT INTO oncehook_entities (scope, entity)",
        row: "(?, ?)",
        tail: " ON DUPLICATE KEY UPDATE version = oncehook_entities.version",
    };
    let rows = entities.iter().map(|entity| vec![route.as_str().into(), (*entity).into()]);
    session.insert(lock, rows.collect()).await?;
    Ok(())
}

/// The lines of entities that are locked. `wanted`: the candidates of each.
pub(super) async fn of(
    session: &mut Session,
    now: i64,
    route: &Route,
    wanted: &BTreeMap<&str, Vec<Place>>,
) -> Result<HashMap<String, Line>, EngineError> {
    let entities: Vec<&str> = wanted.keys().copied().collect();
    let mut found: HashMap<String, Line> =
        entities.iter().map(|entity| ((*entity).to_owned(), Line::default())).collect();
    if entities.is_empty() {
        return Ok(found);
    }
    let busy = busy(session, route, &entities).await?;
    for entity in &busy {
        if let Some(line) = found.get_mut(*entity) {
            line.running = true;
        }
    }
    if route.ordering.by_entity {
        // Where one runs it is nobody's turn, and nobody has to be looked at.
        let idle = wanted.iter().filter(|(entity, _)| !busy.contains(*entity));
        let idle: Vec<(&str, &[Place])> =
            idle.map(|(entity, candidates)| (*entity, candidates.as_slice())).collect();
        for (entity, front) in fronts(session, now, route, &idle).await? {
            if let Some(line) = found.get_mut(entity) {
                line.due = front.iter().filter(|first| first.due).map(|first| first.place).collect();
                line.front = front.into_iter().map(|first| (first.place, first.state)).collect();
            }
        }
    }
    if route.ordering.remembers() {
        let scope = route.ordering.scope(route.name.as_str());
        for (entity, standing) in standings(session, &scope, &entities).await? {
            if let Some(line) = found.get_mut(&entity) {
                line.standing = standing;
            }
        }
    }
    Ok(found)
}

/// The entities of which a delivery is leased.
async fn busy<'e>(
    session: &mut Session,
    route: &Route,
    entities: &[&'e str],
) -> Result<BTreeSet<&'e str>, EngineError> {
    // Asked once for all: usually nothing is.
    let leased = "SELECT 1 FROM oncehook_deliveries WHERE place = 1 AND route = ? LIMIT 1";
    if session.rows(leased, vec![route.name.as_str().into()]).await?.is_empty() {
        return Ok(BTreeSet::new());
    }
    let sql = format!(
        "SELECT t.place FROM {NAMES} STRAIGHT_JOIN oncehook_deliveries d ON d.line = UNHEX(t.name) AND d.route = ?"
    );
    let asked = vec![lines(RUNNING, entities.iter().copied()), route.name.as_str().into()];
    let mut busy = BTreeSet::new();
    for row in session.rows(&sql, asked).await? {
        busy.extend(at(entities, &row)?);
    }
    Ok(busy)
}

/// What has the place in a list that is the first column.
fn at<T: Copy>(list: &[T], row: &Row) -> Result<Option<T>, EngineError> {
    let place = usize::try_from(number(row, 0)?).unwrap_or(0).wrapping_sub(1);
    Ok(list.get(place).copied())
}

/// One of the first in a line.
struct First {
    place: Place,
    state: DeliveryState,
    due: bool,
}

/// The fronts of lines, as long as there are candidates. Entities with a single candidate, which are the most, are asked for
/// together; there are no lateral joins, so each of the others is asked for by itself.
async fn fronts<'e>(
    session: &mut Session,
    now: i64,
    route: &Route,
    wanted: &[(&'e str, &[Place])],
) -> Result<Vec<(&'e str, Vec<First>)>, EngineError> {
    let in_the_way = if route.ordering.on_dead == OnDead::Block { "" } else { "AND d.state <> 'dead'" };
    let name = route.name.as_str();
    let first = |row: &Row| -> Result<First, EngineError> {
        let state = DeliveryState::parse(&text(row, 3)?).ok_or_else(EngineError::damaged)?;
        let place = Place { event: event(row, 0)?, epoch: small(row, 1)?, version: maybe_number(row, 2)? };
        Ok(First { place, state, due: is_true(row, 4)? })
    };
    let columns = "SELECT d.event, d.epoch, d.version, d.state, d.place = 0 AND d.place_at <= ? FROM";
    let mut fronts = Vec::with_capacity(wanted.len());
    let mut single: Vec<(&str, Place)> = Vec::new();
    let sql = format!(
        "{columns} oncehook_deliveries d
          WHERE d.line = ? AND d.route = ? {in_the_way} ORDER BY d.version, d.event, d.epoch LIMIT ?"
    );
    for (entity, candidates) in wanted {
        if let [candidate] = candidates {
            single.push((*entity, *candidate));
            continue;
        }
        let asked = vec![now.into(), line(IN_LINE, entity).into(), name.into(), candidates.len().into()];
        let rows = session.rows(&sql, asked).await?;
        fronts.push((*entity, rows.iter().map(first).collect::<Result<_, _>>()?));
    }
    if single.is_empty() {
        return Ok(fronts);
    }
    // Whoever is at the front has his turn, and that is all that is asked of a single one. It is found in the index alone.
    let key = format!(
        "(SELECT CONCAT(d.event, d.epoch) FROM oncehook_deliveries d
           WHERE d.line = UNHEX(t.name) AND d.route = ? {in_the_way} ORDER BY d.version, d.event, d.epoch LIMIT 1)"
    );
    let sql = format!("SELECT t.place, {key} FROM {NAMES}");
    let asked = vec![name.into(), lines(IN_LINE, single.iter().map(|(entity, _)| *entity))];
    let mut before: HashMap<(EventId, u32), &str> = HashMap::new();
    for row in session.rows(&sql, asked).await? {
        let Some((entity, candidate)) = at(&single, &row)? else { continue };
        match delivery(&row, 1)? {
            Some(key) if key == (candidate.event, candidate.epoch) => {
                let first = First { place: candidate, state: DeliveryState::Ready, due: true };
                fronts.push((entity, vec![first]));
            }
            Some(key) => {
                before.insert(key, entity);
            }
            None => {}
        }
    }
    if !before.is_empty() {
        let sql = format!(
            "{columns} {PLACES} STRAIGHT_JOIN oncehook_deliveries d
                 ON d.event = UNHEX(t.event) AND d.route = ? AND d.epoch = t.epoch"
        );
        let asked = list(before.keys().map(|(event, epoch)| json!([hex(*event), epoch])));
        for row in session.rows(&sql, vec![now.into(), asked, name.into()]).await? {
            let first = first(&row)?;
            let key = (first.place.event, first.place.epoch);
            fronts.extend(before.get(&key).map(|entity| (*entity, vec![first])));
        }
    }
    Ok(fronts)
}

/// What is known of entities. Their line is locked, so nobody else changes it.
async fn standings(
    session: &mut Session,
    scope: &str,
    entities: &[&str],
) -> Result<HashMap<String, Standing>, EngineError> {
    let sql = format!(
        "SELECT e.entity, e.newest, e.last_at, e.state, e.version
           FROM {NAMES} STRAIGHT_JOIN oncehook_entities e ON e.scope = ? AND e.entity = UNHEX(t.name)"
    );
    let rows = session.rows(&sql, vec![names(entities.iter().copied()), scope.into()]).await?;
    let known = |row: &Row| {
        let newest = Mark { version: maybe_number(row, 1)?, at: maybe_number(row, 2)?.map(UnixMicros) };
        Ok((text(row, 0)?, Standing { newest, state: maybe_text(row, 3)?, version: number(row, 4)? }))
    };
    rows.iter().map(known).collect()
}

/// Takes deliveries out of the queue until somebody before them lets them go on.
pub(super) async fn block(
    session: &mut Session,
    now: i64,
    route: &Route,
    blocked: impl Iterator<Item = Place>,
) -> Result<(), EngineError> {
    let blocked = places(blocked);
    if blocked.is_empty() {
        return Ok(());
    }
    let sql = format!(
        "UPDATE {PLACES} STRAIGHT_JOIN oncehook_deliveries d ON d.event = UNHEX(t.event) AND d.route = ? AND d.epoch = t.epoch
            SET d.run_at = ?, d.blocked_at = COALESCE(d.blocked_at, ?) WHERE d.state IN ('ready', 'retrying')"
    );
    session
        .change(&sql, vec![list(blocked), route.name.as_str().into(), NO_TIME.0.into(), now.into()])
        .await?;
    Ok(())
}

/// What a delivery of an entity came to.
pub(super) struct Came<'v> {
    pub(super) entity: &'v str,
    pub(super) mark: Mark,
    pub(super) kind: Option<&'v str>,
    pub(super) verdict: &'v Verdict,
}

/// What follows for others from what deliveries of a route came to, in their order. The lines are locked.
pub(super) async fn after(
    session: &mut Session,
    now: i64,
    route: &Route,
    came: &[Came<'_>],
) -> Result<(), EngineError> {
    let ordering = &route.ordering;
    let succeeded = |came: &&Came<'_>| matches!(came.verdict, Verdict::Succeeded(_));
    if ordering.remembers() {
        let scope = ordering.scope(route.name.as_str());
        let effects: Vec<&Came<'_>> = came.iter().filter(succeeded).collect();
        let entities: BTreeSet<&str> = effects.iter().map(|came| came.entity).collect();
        let entities: Vec<&str> = entities.into_iter().collect();
        if !entities.is_empty() {
            let mut known = standings(session, &scope, &entities).await?;
            for effect in effects {
                let standing = known.entry(effect.entity.to_owned()).or_default();
                ordering.advance(standing, effect.mark, effect.kind);
            }
            remember(session, &scope, &known).await?;
        }
    }
    // The last of an entity tells.
    let free: BTreeMap<&str, usize> =
        came.iter().map(|came| (came.entity, route.let_go_on(came.verdict))).collect();
    let_go_on(session, now, &route.name, &free.into_iter().collect::<Vec<_>>()).await
}

const REMEMBER: Insert<'static> = Insert {
    head: "INSERT INTO oncehook_entities (scope, entity, version, last_at, state, newest)",
    row: "(?, ?, ?, ?, ?, ?)",
    tail:
        " ON DUPLICATE KEY UPDATE version = VALUES(version), last_at = VALUES(last_at), state = VALUES(state),
            newest = VALUES(newest)",
};

async fn remember(
    session: &mut Session,
    scope: &str,
    known: &HashMap<String, Standing>,
) -> Result<(), EngineError> {
    let known: BTreeMap<&String, &Standing> = known.iter().collect();
    let rows = known.into_iter().map(|(entity, standing)| {
        let Standing { newest, state, version } = standing;
        vec![
            scope.into(),
            entity.as_str().into(),
            (*version).into(),
            newest.at.map(|at| at.0).into(),
            state.as_deref().into(),
            newest.version.into(),
        ]
    });
    session.insert(REMEMBER, rows.collect()).await?;
    Ok(())
}

/// Puts the first of those that wait for their turn in each line back into the queue, at most as many as are said. If it is not
/// their turn after all, they are taken out again when they are looked at.
pub(super) async fn let_go_on(
    session: &mut Session,
    now: i64,
    route: &RouteName,
    entities: &[(&str, usize)],
) -> Result<(), EngineError> {
    if entities.is_empty() {
        return Ok(());
    }
    // Asked once for all: usually nobody waits.
    let blocked = "SELECT 1 FROM oncehook_deliveries WHERE place = 0 AND route = ? AND place_at = ? LIMIT 1";
    if session.rows(blocked, vec![route.as_str().into(), NO_TIME.0.into()]).await?.is_empty() {
        return Ok(());
    }
    let first = "(SELECT CONCAT(d.event, d.epoch) FROM oncehook_deliveries d
                   WHERE d.line = UNHEX(t.name) AND d.route = ? AND d.run_at = ? AND d.state <> 'dead'
                   ORDER BY d.version, d.event, d.epoch LIMIT 1)";
    let sql = format!("SELECT t.place, {first} FROM {NAMES}");
    let asked = lines(IN_LINE, entities.iter().map(|(entity, _)| *entity));
    let asked = vec![route.as_str().into(), NO_TIME.0.into(), asked];
    let mut next = BTreeSet::new();
    for row in session.rows(&sql, asked).await? {
        let Some(first) = delivery(&row, 1)? else { continue };
        next.insert(first);
        // Where somebody waits there may be more of them.
        if let Some((entity, count @ 2..)) = at(entities, &row)? {
            let sql = "SELECT event, epoch FROM oncehook_deliveries
                        WHERE line = ? AND route = ? AND run_at = ? AND state <> 'dead' ORDER BY version, event, epoch LIMIT ?";
            let line = line(IN_LINE, entity).into();
            let asked = vec![line, route.as_str().into(), NO_TIME.0.into(), count.into()];
            for row in session.rows(sql, asked).await? {
                next.insert((event(&row, 0)?, small(&row, 1)?));
            }
        }
    }
    if next.is_empty() {
        return Ok(());
    }
    let next = list(next.into_iter().map(|(event, epoch)| json!([hex(event), epoch])));
    let sql = format!(
        "UPDATE {PLACES} STRAIGHT_JOIN oncehook_deliveries d ON d.event = UNHEX(t.event) AND d.route = ? AND d.epoch = t.epoch
            SET d.run_at = ? WHERE d.run_at = ? AND d.state IN ('ready', 'retrying')"
    );
    session.change(&sql, vec![next, route.as_str().into(), now.into(), NO_TIME.0.into()]).await?;
    Ok(())
}

/// A delivery's event and epoch out of one value: 16 bytes, then digits. Nothing out of null.
fn delivery(row: &Row, column: usize) -> Result<Option<(EventId, u32)>, EngineError> {
    let Some(bytes) = super::row::maybe_bytes(row, column)? else { return Ok(None) };
    let (event, epoch) = bytes.split_first_chunk::<16>().ok_or_else(EngineError::damaged)?;
    let epoch = std::str::from_utf8(epoch).ok().and_then(|digits| digits.parse().ok());
    Ok(Some((EventId::from_bytes(*event), epoch.ok_or_else(EngineError::damaged)?)))
}

/// Something of these entities took effect: whatever waits for a prerequisite looks again. Returns whether there was any.
pub(super) async fn wake_parked(
    session: &mut Session,
    now: i64,
    entities: &BTreeSet<&str>,
) -> Result<bool, EngineError> {
    if entities.is_empty() {
        return Ok(false);
    }
    let sql = format!(
        "SELECT d.event, d.route, d.epoch, d.attempt
           FROM {NAMES} STRAIGHT_JOIN oncehook_deliveries d ON d.line = UNHEX(t.name)"
    );
    let rows = session.rows(&sql, vec![lines(PARKED, entities.iter().copied())]).await?;
    wake(session, now, rows).await
}

/// Puts parked deliveries back into the queue.
async fn wake(session: &mut Session, now: i64, rows: Vec<Row>) -> Result<bool, EngineError> {
    let mut parked = rows.iter().map(fence).collect::<Result<Vec<Fence>, _>>()?;
    if parked.is_empty() {
        return Ok(false);
    }
    parked.sort_unstable_by(|a, b| {
        let key = |fence: &Fence| {
            (fence.delivery.event, fence.delivery.route.as_str().to_owned(), fence.delivery.epoch)
        };
        key(a).cmp(&key(b))
    });
    let sql = format!(
        "UPDATE {FENCES} STRAIGHT_JOIN oncehook_deliveries d
             ON d.event = UNHEX(t.event) AND d.route = t.route AND d.epoch = t.epoch
            SET d.state = IF(d.attempt > 0, 'retrying', 'ready'), d.run_at = ? WHERE d.state = 'parked'"
    );
    Ok(session.change(&sql, vec![fence_list(&parked), now.into()]).await? > 0)
}

/// A delivery with its attempts, from the columns event, route, epoch, attempt.
fn fence(row: &Row) -> Result<Fence, EngineError> {
    let delivery =
        DeliveryId { event: event(row, 0)?, route: route_name(&text(row, 1)?)?, epoch: small(row, 2)? };
    Ok(Fence { delivery, attempt: small(row, 3)? })
}

/// A parked delivery is found by its entity.
pub(super) async fn name_parked(session: &mut Session, parked: &[&Fence]) -> Result<(), EngineError> {
    if parked.is_empty() {
        return Ok(());
    }
    let sql = format!(
        "UPDATE {FENCES} STRAIGHT_JOIN oncehook_events e ON e.id = UNHEX(t.event)
           STRAIGHT_JOIN oncehook_deliveries d ON d.event = e.id AND d.route = t.route AND d.epoch = t.epoch
            SET d.entity = e.entity WHERE d.state = 'parked' AND d.entity IS NULL"
    );
    session.change(&sql, vec![fence_list(parked.iter().copied())]).await?;
    Ok(())
}

/// What a leased delivery is about.
pub(super) struct About {
    pub(super) entity: String,
    pub(super) mark: Mark,
    pub(super) kind: Option<String>,
}

impl About {
    /// With what it came to.
    pub(super) fn came<'v>(&'v self, verdict: &'v Verdict) -> Came<'v> {
        Came { entity: &self.entity, mark: self.mark, kind: self.kind.as_deref(), verdict }
    }
}

/// What leased deliveries are about, where their events have an entity.
pub(super) async fn about(
    session: &mut Session,
    fences: impl Iterator<Item = &Fence>,
) -> Result<HashMap<EventId, About>, EngineError> {
    let sql = format!(
        "SELECT e.id, e.entity, e.version, e.occurred_at, e.type
           FROM {IDS} STRAIGHT_JOIN oncehook_events e ON e.id = UNHEX(t.id) WHERE e.entity IS NOT NULL"
    );
    let rows = session.rows(&sql, vec![ids(fences.map(|fence| fence.delivery.event))]).await?;
    let about = |row: &Row| {
        let mark = Mark { version: maybe_number(row, 2)?, at: maybe_number(row, 3)?.map(UnixMicros) };
        Ok((event(row, 0)?, About { entity: text(row, 1)?, mark, kind: maybe_text(row, 4)? }))
    };
    rows.iter().map(about).collect()
}

/// Looks after those that wait for others: parked ones whose time has come, and the first of a line that nobody is before any
/// more. Returns whether something is due now. One transaction.
pub(super) async fn look_again(
    session: &mut Session,
    given: Option<i64>,
    route: &Route,
) -> Result<bool, EngineError> {
    let now = session.now(given).await?;
    let name = route.name.as_str();
    let sql = "SELECT event, route, epoch, attempt FROM oncehook_deliveries
                WHERE place = 3 AND route = ? AND place_at <= ? ORDER BY place_at LIMIT ?";
    let rows = session.rows(sql, vec![name.into(), now.into(), LOOKED_AFTER.into()]).await?;
    let mut woken = wake(session, now, rows).await?;
    // In steps: these need not be done together with what is above, and hold no lock while others are waited for.
    session.run("COMMIT").await?;
    if !route.ordering.is_serial() {
        let sql = "SELECT event, epoch FROM oncehook_deliveries
                    WHERE place = 0 AND route = ? AND place_at = ? AND blocked_at IS NOT NULL LIMIT ?";
        let rows = session.rows(sql, vec![name.into(), NO_TIME.0.into(), LOOKED_AFTER.into()]).await?;
        let freed: BTreeSet<(EventId, u32)> = rows
            .iter()
            .map(|row| Ok((event(row, 0)?, small(row, 1)?)))
            .collect::<Result<_, EngineError>>()?;
        if !freed.is_empty() {
            let freed = list(freed.into_iter().map(|(event, epoch)| json!([hex(event), epoch])));
            let sql = format!(
                "UPDATE {PLACES} STRAIGHT_JOIN oncehook_deliveries d
                     ON d.event = UNHEX(t.event) AND d.route = ? AND d.epoch = t.epoch
                    SET d.run_at = ? WHERE d.run_at = ? AND d.state IN ('ready', 'retrying')"
            );
            session.change(&sql, vec![freed, name.into(), now.into(), NO_TIME.0.into()]).await?;
            woken = true;
        }
        session.run("COMMIT").await?;
        return Ok(woken);
    }
    let sql = "SELECT DISTINCT entity FROM oncehook_deliveries
                WHERE place = 0 AND route = ? AND place_at = ? AND entity IS NOT NULL LIMIT ?";
    let rows = session.rows(sql, vec![name.into(), NO_TIME.0.into(), LOOKED_AFTER.into()]).await?;
    let waiting: Vec<String> = rows.iter().map(|row| text(row, 0)).collect::<Result<_, _>>()?;
    let waiting: BTreeSet<&str> = waiting.iter().map(String::as_str).collect();
    let mut stranded = Vec::new();
    if !waiting.is_empty() {
        lock(session, &route.name, &waiting).await?;
        stranded = free(session, route, &waiting.iter().copied().collect::<Vec<_>>()).await?;
        let first: Vec<(&str, usize)> = stranded.iter().map(|entity| (*entity, 1)).collect();
        let_go_on(session, now, &route.name, &first).await?;
    }
    session.run("COMMIT").await?;
    Ok(woken || !stranded.is_empty())
}

/// The entities in whose lines everybody waits for his turn, and nobody has it.
async fn free<'e>(
    session: &mut Session,
    route: &Route,
    waiting: &[&'e str],
) -> Result<Vec<&'e str>, EngineError> {
    let busy = busy(session, route, waiting).await?;
    let idle: Vec<&str> = waiting.iter().copied().filter(|entity| !busy.contains(entity)).collect();
    let in_the_way = if route.ordering.by_entity && route.ordering.on_dead == OnDead::Block {
        ""
    } else {
        "AND d.state <> 'dead'"
    };
    // Whether the first of the line waits for nothing but his turn.
    let sql = format!(
        "SELECT t.place, (SELECT d.run_at = ? AND d.state <> 'dead' FROM oncehook_deliveries d
                           WHERE d.line = UNHEX(t.name) AND d.route = ? {in_the_way}
                           ORDER BY d.version, d.event, d.epoch LIMIT 1) FROM {NAMES}"
    );
    let asked = vec![NO_TIME.0.into(), route.name.as_str().into(), lines(IN_LINE, idle.iter().copied())];
    let mut stranded = Vec::new();
    for row in session.rows(&sql, asked).await? {
        if is_true(&row, 1)? {
            stranded.extend(at(&idle, &row)?);
        }
    }
    Ok(stranded)
}
