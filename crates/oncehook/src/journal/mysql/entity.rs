//! The queues of entities: the statements that lock entities and move deliveries in and out of the queue.
//!
//! Whoever decides which delivery is eligible holds the row of (route, entity) in `oncehook_entities`; statements after the lock
//! see what the transaction before has left (READ COMMITTED). A worker that takes a batch skips entities that another worker
//! has locked ([`lock_free`]): two workers on one backlog nearly always meet at some of them, and would take turns if they
//! waited.
//!
//! A statement that walks an index and changes rows would lock whatever it walks over, and wait for it; so rows are found by
//! reading first, without locks, and then changed by their primary key, in its order.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use mysql_async::{Row, Value};
use serde_json::json;

use super::Mysql;
use super::connection::Session;
use super::deliver::{FENCES, fence_list};
use super::engine_error::EngineError;
use super::row::{event, hex, is_true, list, maybe_number, number, small, text};
use crate::delivery::{DeliveryState, Fence, RouteName};
use crate::event::EventId;
use crate::journal::server::deliver::entity::lock;
use crate::journal::server::value::Row as _;
use crate::ordering::{Line, NO_TIME, OnDead, Place};
use crate::route::Route;

/// Deliveries that are looked after in one go.
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

/// A list of deliveries of one route as the table that it becomes.
const PLACES: &str = "JSON_TABLE(?, '$[*]' COLUMNS (event VARCHAR(32) PATH '$[0]', epoch INT UNSIGNED PATH '$[1]')) t";

/// Locks those entities of a route that no other transaction has locked, until the end of this one, and returns them. The row
/// of an entity that was never locked before is made; another transaction that makes it at the same time is waited for.
pub(super) async fn lock_free<'e>(
    session: &mut Session,
    route: &RouteName,
    entities: &BTreeSet<&'e str>,
) -> Result<BTreeSet<&'e str>, EngineError> {
    let there = format!(
        "SELECT t.place FROM (SELECT * FROM {NAMES}) t STRAIGHT_JOIN oncehook_entities e FORCE INDEX (PRIMARY)
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
    // The others are locked by another transaction, or their rows were never made.
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
    lock::<Mysql>(session, route, &fresh).await?;
    free.extend(fresh);
    Ok(free)
}

/// The front of each entity's queue. The entities are locked.
pub(super) async fn queues(
    session: &mut Session,
    now: i64,
    route: &Route,
    candidates: &BTreeMap<&str, Vec<Place>>,
) -> Result<HashMap<String, Line>, EngineError> {
    let entities: Vec<&str> = candidates.keys().copied().collect();
    let busy = busy(session, route, &entities).await?;
    let mut queues: HashMap<String, Line> =
        busy.iter().map(|entity| ((*entity).to_owned(), Line { running: true, ..Line::default() })).collect();
    if route.ordering.by_entity {
        // While one is leased no other is eligible, and none has to be looked at.
        let idle = candidates.iter().filter(|(entity, _)| !busy.contains(*entity));
        let idle: Vec<(&str, &[Place])> = idle.map(|(entity, places)| (*entity, places.as_slice())).collect();
        for (entity, front) in fronts(session, now, route, &idle).await? {
            let queue = queues.entry(entity.to_owned()).or_default();
            queue.due = front.iter().filter(|first| first.due).map(|first| first.place).collect();
            queue.front = front.into_iter().map(|first| (first.place, first.state)).collect();
        }
    }
    Ok(queues)
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

/// One of the first in a queue.
struct First {
    place: Place,
    state: DeliveryState,
    due: bool,
}

/// The fronts of queues, as long as there are candidates. Entities with a single candidate, which are the most, are asked for
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
    // A single candidate is eligible if it is the first of its queue. That is found in the index alone.
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

/// Puts the first blocked deliveries of each entity back into the queue, at most as many as are given. Those that are not
/// eligible after all are blocked again when they are looked at.
pub(super) async fn unblock(
    session: &mut Session,
    now: i64,
    route: &RouteName,
    entities: &[(&str, usize)],
) -> Result<(), EngineError> {
    // Asked once for all: usually none is blocked.
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
        // Where one is blocked there may be more.
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
    put_back(session, now, route, next).await?;
    Ok(())
}

/// A delivery's event and epoch out of one value: 16 bytes, then digits. Nothing out of null.
fn delivery(row: &Row, column: usize) -> Result<Option<(EventId, u32)>, EngineError> {
    let Some(bytes) = super::row::maybe_bytes(row, column)? else { return Ok(None) };
    let (event, epoch) = bytes.split_first_chunk::<16>().ok_or_else(EngineError::damaged)?;
    let epoch = std::str::from_utf8(epoch).ok().and_then(|digits| digits.parse().ok());
    Ok(Some((EventId::from_bytes(*event), epoch.ok_or_else(EngineError::damaged)?)))
}

/// Parked deliveries of these entities look again. Returns whether there was any.
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

/// Parked deliveries of a route whose time has come look again. Returns whether there was any.
pub(super) async fn wake_due_parked(session: &mut Session, now: i64, route: &RouteName) -> Result<bool, EngineError> {
    let sql = "SELECT event, route, epoch, attempt FROM oncehook_deliveries
                WHERE place = 3 AND route = ? AND place_at <= ? ORDER BY place_at LIMIT ?";
    let rows = session.rows(sql, vec![route.as_str().into(), now.into(), LOOKED_AFTER.into()]).await?;
    wake(session, now, rows).await
}

/// Puts every blocked delivery of a route back into the queue. Returns whether there was any.
pub(super) async fn unblock_all(session: &mut Session, now: i64, route: &RouteName) -> Result<bool, EngineError> {
    let sql = "SELECT event, epoch FROM oncehook_deliveries
                WHERE place = 0 AND route = ? AND place_at = ? AND blocked_at IS NOT NULL LIMIT ?";
    let rows = session.rows(sql, vec![route.as_str().into(), NO_TIME.0.into(), LOOKED_AFTER.into()]).await?;
    let freed: BTreeSet<(EventId, u32)> =
        rows.iter().map(|row| Ok((event(row, 0)?, small(row, 1)?))).collect::<Result<_, EngineError>>()?;
    put_back(session, now, route, freed).await
}

/// Puts blocked deliveries back into the queue. Returns whether there was any.
async fn put_back(
    session: &mut Session,
    now: i64,
    route: &RouteName,
    blocked: BTreeSet<(EventId, u32)>,
) -> Result<bool, EngineError> {
    if blocked.is_empty() {
        return Ok(false);
    }
    let blocked = list(blocked.into_iter().map(|(event, epoch)| json!([hex(event), epoch])));
    let sql = format!(
        "UPDATE {PLACES} STRAIGHT_JOIN oncehook_deliveries d ON d.event = UNHEX(t.event) AND d.route = ? AND d.epoch = t.epoch
            SET d.run_at = ? WHERE d.run_at = ? AND d.state IN ('ready', 'retrying')"
    );
    session.change(&sql, vec![blocked, route.as_str().into(), now.into(), NO_TIME.0.into()]).await?;
    Ok(true)
}

/// Puts parked deliveries back into the queue.
async fn wake(session: &mut Session, now: i64, rows: Vec<Row>) -> Result<bool, EngineError> {
    let mut parked = rows.iter().map(fence).collect::<Result<Vec<Fence>, EngineError>>()?;
    if parked.is_empty() {
        return Ok(false);
    }
    parked.sort_unstable_by(|a, b| {
        let key =
            |fence: &Fence| (fence.delivery.event, fence.delivery.route.as_str().to_owned(), fence.delivery.epoch);
        key(a).cmp(&key(b))
    });
    let sql = format!(
        "UPDATE {FENCES} STRAIGHT_JOIN oncehook_deliveries d
             ON d.event = UNHEX(t.event) AND d.route = t.route AND d.epoch = t.epoch
            SET d.state = IF(d.attempt > 0, 'retrying', 'ready'), d.run_at = ? WHERE d.state = 'parked'"
    );
    Ok(session.change(&sql, vec![fence_list(&parked), now.into()]).await? > 0)
}

fn fence(row: &Row) -> Result<Fence, EngineError> {
    Ok(Fence { delivery: row.delivery(0)?, attempt: row.small(3)? })
}

/// Those of these entities in whose queues every delivery is blocked and none is leased.
pub(super) async fn stranded<'e>(
    session: &mut Session,
    route: &Route,
    waiting: &[&'e str],
) -> Result<Vec<&'e str>, EngineError> {
    let busy = busy(session, route, waiting).await?;
    let idle: Vec<&str> = waiting.iter().copied().filter(|entity| !busy.contains(entity)).collect();
    let in_the_way =
        if route.ordering.by_entity && route.ordering.on_dead == OnDead::Block { "" } else { "AND d.state <> 'dead'" };
    // Whether the first of the queue is blocked.
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
