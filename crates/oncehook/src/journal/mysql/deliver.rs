//! The way out: the statements that lock, lease and settle deliveries. The caller commits.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::Duration;

use mysql_async::{Row, Value};
use serde_json::json;

use super::connection::{Insert, Session};
use super::engine_error::EngineError;
use super::row::{IDS, count, event, hex, id, ids, list};
use super::user_sql::Prepared;
use super::{Mysql, entity, function};
use crate::delivery::{Cause, Claim, Columns, DeliveryId, DeliveryState, Fence, HandedEvent, RouteName};
use crate::event::EventId;
use crate::handler::Function;
use crate::journal::server::deliver::row::{EVENT_COLUMNS, due_without_event, handed};
use crate::journal::server::deliver::steps::{DeliverSql, Delivers, Due, Ended, Held, Locked, SettleTime, Wanted};
use crate::journal::server::engine::Session as _;
use crate::journal::server::user_sql::Trouble;
use crate::journal::server::value::Row as _;
use crate::ordering::{Line, Place};
use crate::route::Route;

/// A list of deliveries with their attempts, as the table that it becomes.
pub(super) const FENCES: &str = "JSON_TABLE(?, '$[*]' COLUMNS (place FOR ORDINALITY, event VARCHAR(32) PATH '$[0]', route VARCHAR(64) CHARACTER SET utf8mb4 PATH '$[1]',
                                              epoch INT UNSIGNED PATH '$[2]', attempt INT UNSIGNED PATH '$[3]')) t";

pub(super) fn fence_list<'f>(fences: impl IntoIterator<Item = &'f Fence>) -> Value {
    list(fences.into_iter().map(|Fence { delivery, attempt }| {
        json!([hex(delivery.event), delivery.route.as_str(), delivery.epoch, attempt])
    }))
}

/// At most this many bytes of bodies are read for one batch (and the body that crosses it).
const BODIES_AT_ONCE: u64 = 8 << 20;

macro_rules! fences {
    ($param:literal) => {
        concat!(
            "JSON_TABLE(",
            $param,
            ", '$[*]' COLUMNS (event VARCHAR(32) PATH '$[0]', route VARCHAR(64) CHARACTER SET utf8mb4 PATH '$[1]',
               epoch INT UNSIGNED PATH '$[2]', attempt INT UNSIGNED PATH '$[3]')) t"
        )
    };
}

macro_rules! names {
    ($param:literal) => {
        concat!("JSON_TABLE(", $param, ", '$[*]' COLUMNS (name VARCHAR(256) CHARACTER SET utf8mb4 PATH '$')) t")
    };
}

macro_rules! places {
    ($param:literal) => {
        concat!(
            "JSON_TABLE(",
            $param,
            ", '$[*]' COLUMNS (event VARCHAR(32) PATH '$[0]', epoch INT UNSIGNED PATH '$[1]')) t"
        )
    };
}

impl Delivers for Mysql {
    const SETTLES_ALONE: bool = false;

    const DELIVER: DeliverSql = DeliverSql {
        renew: concat!(
            "UPDATE ",
            fences!("$2"),
            " STRAIGHT_JOIN oncehook_deliveries d ON d.event = UNHEX(t.event) AND d.route = t.route AND d.epoch = t.epoch
                SET d.lease_until = $1 + $3 WHERE d.attempt = t.attempt AND d.state = 'running'"
        ),
        give_back: concat!(
            "UPDATE ",
            fences!("$2"),
            " STRAIGHT_JOIN oncehook_deliveries d ON d.event = UNHEX(t.event) AND d.route = t.route AND d.epoch = t.epoch
              STRAIGHT_JOIN oncehook_attempts a
                 ON a.event = d.event AND a.route = d.route AND a.epoch = d.epoch AND a.attempt = d.attempt
               SET a.finished_at = $1, a.outcome = 'given_back', d.state = IF(d.error IS NULL, 'ready', 'retrying'),
                   d.run_at = $1, d.lease_until = NULL, d.attempt_limit = d.lease_limit + 1
             WHERE d.attempt = t.attempt AND d.state = 'running'"
        ),
        expired_entities: "SELECT DISTINCT entity FROM oncehook_deliveries
             WHERE place = 1 AND route = $2 AND place_at <= $1 AND entity IS NOT NULL",
        lock_expired: "SELECT event, epoch, attempt, attempt_limit FROM oncehook_deliveries
             WHERE place = 1 AND route = $2 AND place_at <= $1 LIMIT 1000 FOR UPDATE SKIP LOCKED",
        next_due: "SELECT place_at - $1 FROM oncehook_deliveries
             WHERE place = 0 AND route = $2 AND place_at < $3 ORDER BY place_at LIMIT 1",
        created_at: "SELECT applied_at FROM oncehook_migrations ORDER BY name LIMIT 1",
        unsettled: concat!(
            "SELECT d.event, d.route, d.epoch FROM ",
            fences!("$1"),
            " STRAIGHT_JOIN oncehook_deliveries d ON d.event = UNHEX(t.event) AND d.route = t.route AND d.epoch = t.epoch
             WHERE d.state NOT IN ('succeeded', 'superseded', 'skipped')"
        ),
        adopt: concat!(
            "UPDATE ",
            places!("$2"),
            " STRAIGHT_JOIN oncehook_events e ON e.id = UNHEX(t.event)
              STRAIGHT_JOIN oncehook_deliveries d ON d.event = e.id AND d.route = $1 AND d.epoch = t.epoch
                SET d.entity = e.entity, d.version = e.version"
        ),
        // A row that is there is locked by being found, one that is not by being made.
        lock_entities: &[concat!(
            "INSERT INTO oncehook_entities (scope, entity) SELECT $1, t.name FROM ",
            names!("$2"),
            " ON DUPLICATE KEY UPDATE version = oncehook_entities.version"
        )],
        entity_states: concat!(
            "SELECT e.entity, e.newest, e.last_at, e.state, e.version FROM ",
            names!("$2"),
            " STRAIGHT_JOIN oncehook_entities e ON e.scope = $1 AND e.entity = CONVERT(t.name USING binary)"
        ),
        keep_entity_states: "INSERT INTO oncehook_entities (scope, entity, version, last_at, state, newest)
            SELECT $1, t.entity, t.version, t.last_at, t.state, t.newest
              FROM JSON_TABLE($2, '$[*]' COLUMNS (entity VARCHAR(256) CHARACTER SET utf8mb4 PATH '$[0]', version BIGINT PATH '$[1]',
                     last_at BIGINT PATH '$[2]', state VARCHAR(256) CHARACTER SET utf8mb4 PATH '$[3]', newest BIGINT PATH '$[4]')) t
            ON DUPLICATE KEY UPDATE version = VALUES(version), last_at = VALUES(last_at), state = VALUES(state),
               newest = VALUES(newest)",
        block: concat!(
            "UPDATE ",
            places!("$3"),
            " STRAIGHT_JOIN oncehook_deliveries d ON d.event = UNHEX(t.event) AND d.route = $2 AND d.epoch = t.epoch
                SET d.run_at = $4, d.blocked_at = COALESCE(d.blocked_at, $1) WHERE d.state IN ('ready', 'retrying')"
        ),
        name_parked: concat!(
            "UPDATE ",
            fences!("$1"),
            " STRAIGHT_JOIN oncehook_events e ON e.id = UNHEX(t.event)
              STRAIGHT_JOIN oncehook_deliveries d ON d.event = e.id AND d.route = t.route AND d.epoch = t.epoch
                SET d.entity = e.entity WHERE d.state = 'parked' AND d.entity IS NULL"
        ),
        subjects: "SELECT e.id, e.entity, e.version, e.occurred_at, e.type
              FROM JSON_TABLE($1, '$[*]' COLUMNS (id VARCHAR(32) PATH '$')) t
              STRAIGHT_JOIN oncehook_events e ON e.id = UNHEX(t.id) WHERE e.entity IS NOT NULL",
        blocked_entities: "SELECT DISTINCT entity FROM oncehook_deliveries
             WHERE place = 0 AND route = $1 AND place_at = $2 AND entity IS NOT NULL LIMIT $3",
    };

    async fn begin_batch(session: &mut Session, given: Option<i64>) -> Result<i64, EngineError> {
        session.begin(given).await
    }

    fn settles_ahead(_prepared: &Prepared) -> bool {
        false
    }

    async fn lock_due(
        &self,
        session: &mut Session,
        now: i64,
        route: &Route,
        wanted: Wanted,
    ) -> Result<Locked, EngineError> {
        let limit = match wanted {
            Wanted::Batch { limit, .. } | Wanted::Lease { limit } => limit,
            Wanted::Only(_) => 1,
        };
        let mut due = take(session, now, route, wanted).await?;
        let locked = due.len();
        let mut full = locked == limit;
        if route.ordering.is_serial() && !matches!(wanted, Wanted::Only(_)) {
            lock_entities(session, route, &mut due).await?;
            // If all belongs to entities of other workers it is better to wait for a moment than to look again at once.
            full &= !due.is_empty();
        }
        if !matches!(wanted, Wanted::Lease { .. }) {
            full |= weigh(session, &mut due).await?;
            if !route.ordering.is_serial() {
                Self::load_events(session, route, &mut due).await?;
            }
        }
        Ok(Locked { due, full, unseen: false, settled_ahead: 0 })
    }

    async fn load_events(session: &mut Session, route: &Route, due: &mut [Due]) -> Result<(), EngineError> {
        if due.is_empty() {
            return Ok(());
        }
        let asked = list(due.iter().map(|due| json!([hex(due.candidate.place.event), due.candidate.place.epoch])));
        let columns =
            "SELECT e.id, e.source, e.`key`, e.type, e.entity, e.occurred_at, e.received_at, e.headers, e.body";
        let from = "FROM JSON_TABLE(?, '$[*]' COLUMNS (id VARCHAR(32) PATH '$[0]', epoch INT UNSIGNED PATH '$[1]')) t
                    STRAIGHT_JOIN oncehook_events e ON e.id = UNHEX(t.id)";
        let rows = match &route.after {
            None => session.rows(&format!("{columns}, NULL, e.version, t.epoch {from}"), vec![asked]).await?,
            Some(after) => {
                // A follow-up that is forced alone knows the result of the epoch before.
                let result = "(SELECT p.result FROM oncehook_deliveries p
                                WHERE p.event = e.id AND p.route = ? AND p.epoch <= t.epoch AND p.state = 'succeeded'
                                ORDER BY p.epoch DESC LIMIT 1)";
                let sql = format!("{columns}, {result}, e.version, t.epoch {from}");
                session.rows(&sql, vec![after.as_str().into(), asked]).await?
            }
        };
        let mut events: HashMap<(EventId, u32), HandedEvent> = HashMap::new();
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

    async fn lease_due(
        &self,
        session: &mut Session,
        given: Option<i64>,
        route: &Route,
        limit: usize,
        lease: i64,
    ) -> Result<Vec<Claim>, EngineError> {
        let now = session.begin(given).await?;
        let due = take(session, now, route, Wanted::Lease { limit }).await?;
        let claims = Self::lease_locked(session, now, route, lease, due).await?;
        session.commit().await?;
        Ok(claims)
    }

    async fn lease_locked(
        session: &mut Session,
        now: i64,
        route: &Route,
        lease: i64,
        mut due: Vec<Due>,
    ) -> Result<Vec<Claim>, EngineError> {
        if due.is_empty() {
            return Ok(Vec::new());
        }
        let fence = |due: &Due| Fence { delivery: due.delivery(route), attempt: due.attempt + 1 };
        let fences: Vec<Fence> = due.iter().map(fence).collect();
        let sql = format!(
            "UPDATE {FENCES} STRAIGHT_JOIN oncehook_deliveries d
                 ON d.event = UNHEX(t.event) AND d.route = t.route AND d.epoch = t.epoch
                SET d.state = 'running', d.attempt = t.attempt, d.lease_until = ?, d.lease_limit = COALESCE(d.attempt_limit, ?),
                    d.blocked_at = NULL
              WHERE d.attempt = t.attempt - 1 AND d.state IN ('ready', 'retrying')"
        );
        let until = now.saturating_add(lease);
        let parameters = vec![fence_list(&fences), until.into(), route.retry.max_attempts.into()];
        all_changed(session.change(&sql, parameters).await?, fences.len())?;
        let begun = fences.iter().map(|Fence { delivery, attempt }| {
            let event = id(delivery.event);
            vec![event, delivery.route.as_str().into(), delivery.epoch.into(), (*attempt).into(), now.into()]
        });
        let insert = Insert {
            head: "INSERT INTO oncehook_attempts (event, route, epoch, attempt, started_at)",
            row: "(?, ?, ?, ?, ?)",
            tail: "",
        };
        session.insert(insert, begun.collect()).await?;
        Self::load_events(session, route, &mut due).await?;
        let claim = |(due, fence): (Due, Fence)| {
            let event = due.event.ok_or_else(EngineError::damaged)?;
            Ok(Claim { fence, attempt_limit: due.attempt_limit, parked_at: due.parked_at, event })
        };
        due.into_iter().zip(fences).map(claim).collect()
    }

    async fn settle(
        session: &mut Session,
        time: SettleTime,
        held: Held,
        ended: &[Ended<'_>],
    ) -> Result<HashSet<Fence>, EngineError> {
        let now = time.now.ok_or_else(EngineError::damaged)?;
        // Sorted, so that two who settle wait for each other in the same order.
        let mut live: Vec<&Ended<'_>> = ended.iter().collect();
        live.sort_by_key(|ended| {
            let DeliveryId { event, route, epoch } = &ended.fence.delivery;
            (*event, route.as_str(), *epoch)
        });
        if held != Held::Lock {
            let sql = format!(
                "SELECT t.place FROM (SELECT * FROM {FENCES}) t STRAIGHT_JOIN oncehook_deliveries d
                     ON d.event = UNHEX(t.event) AND d.route = t.route AND d.epoch = t.epoch
                  WHERE d.attempt = t.attempt AND d.state = 'running' FOR UPDATE"
            );
            let rows = session.rows(&sql, vec![fence_list(live.iter().map(|ended| ended.fence))]).await?;
            let places: HashSet<u64> = rows.iter().map(|row| count(row, 0)).collect::<Result<_, _>>()?;
            let mut place = 0;
            live.retain(|_| {
                place += 1;
                places.contains(&place)
            });
        }
        if live.is_empty() {
            return Ok(HashSet::new());
        }
        let mut outcomes = Vec::with_capacity(live.len());
        let mut written = Vec::new();
        let mut followups = Vec::new();
        let failed = if held == Held::LostLease { "lost" } else { "failed" };
        for Ended { fence, verdict, followups: next } in &live {
            let Columns { state, run_at, result, error, cause } = verdict.columns();
            let wait = run_at.map(|at| at.0.saturating_sub(time.from.0));
            let DeliveryId { event, route, epoch } = &fence.delivery;
            outcomes.push(json!([
                hex(*event),
                route.as_str(),
                epoch,
                fence.attempt,
                state.as_str(),
                wait,
                result,
                error,
                cause.map(Cause::as_str)
            ]));
            let (outcome, error) = match state {
                DeliveryState::Succeeded => ("succeeded", None),
                // What was put off is not held against the delivery.
                DeliveryState::Parked => ("given_back", error),
                DeliveryState::Superseded => ("given_back", None),
                _ => (failed, error),
            };
            // What ran under a lock and did not fail stands in the delivery itself.
            if held != Held::Lock || outcome == failed {
                written.push((*fence, outcome, error));
            }
            if state == DeliveryState::Succeeded {
                followups.extend(next.iter().map(|next| (*fence, next)));
            }
        }
        let fence = if held == Held::Lock {
            "d.attempt = t.attempt - 1 AND d.state IN ('ready', 'retrying')"
        } else {
            "d.attempt = t.attempt AND d.state = 'running'"
        };
        let granted = if held == Held::Lock { GRANTED_LOCKED } else { GRANTED_LEASED };
        let sql = format!("{SETTLE}, {granted} WHERE {fence}");
        let changed = session.change(&sql, vec![list(outcomes), now.into(), now.into(), now.into()]).await?;
        all_changed(changed, live.len())?;
        write_attempts(session, now, held, written).await?;
        follow(session, now, followups).await?;
        Ok(live.into_iter().map(|ended| ended.fence.clone()).collect())
    }

    async fn entity_queues(
        session: &mut Session,
        now: i64,
        route: &Route,
        candidates: &BTreeMap<&str, Vec<Place>>,
    ) -> Result<HashMap<String, Line>, EngineError> {
        entity::queues(session, now, route, candidates).await
    }

    async fn unblock(
        session: &mut Session,
        now: i64,
        route: &RouteName,
        entities: &[(&str, usize)],
    ) -> Result<(), EngineError> {
        entity::unblock(session, now, route, entities).await
    }

    async fn wake_parked(session: &mut Session, now: i64, entities: &BTreeSet<&str>) -> Result<bool, EngineError> {
        entity::wake_parked(session, now, entities).await
    }

    async fn wake_parked_of(
        _session: &mut Session,
        _given: Option<i64>,
        _events: &[EventId],
    ) -> Result<bool, EngineError> {
        // Settling is never alone here, and wakes by itself.
        Ok(false)
    }

    async fn wake_due_parked(session: &mut Session, now: i64, route: &RouteName) -> Result<bool, EngineError> {
        entity::wake_due_parked(session, now, route).await
    }

    async fn unblock_all(session: &mut Session, now: i64, route: &RouteName) -> Result<bool, EngineError> {
        entity::unblock_all(session, now, route).await
    }

    async fn stranded(
        session: &mut Session,
        route: &Route,
        entities: &BTreeSet<&str>,
    ) -> Result<Vec<String>, EngineError> {
        let entities: Vec<&str> = entities.iter().copied().collect();
        let stranded = entity::stranded(session, route, &entities).await?;
        Ok(stranded.into_iter().map(str::to_owned).collect())
    }

    async fn call(
        session: &mut Session,
        given: Option<i64>,
        function: &dyn Function,
        event: &HandedEvent,
        time: Duration,
    ) -> Result<(i64, Option<String>), Trouble> {
        let now = session.begin(given).await.map_err(Trouble::ours)?;
        Ok((now, function::call(session, function, event, time).await?))
    }
}

/// Locks due deliveries and reads what the rules of ordering need of their events.
async fn take(session: &mut Session, now: i64, route: &Route, wanted: Wanted) -> Result<Vec<Due>, EngineError> {
    // `due_without_event` reads these, the entity as not locked, and what is null until the events are asked.
    let columns =
        "SELECT event, epoch, attempt, attempt_limit, parked_at, entity IS NOT NULL, 0, NULL, NULL, NULL, NULL
                     FROM oncehook_deliveries";
    let name = route.name.as_str();
    let rows = match wanted {
        Wanted::Batch { limit, .. } | Wanted::Lease { limit } => {
            let sql = format!(
                "{columns} WHERE place = 0 AND route = ? AND place_at <= ? ORDER BY place_at, event, epoch LIMIT ?
                   FOR UPDATE SKIP LOCKED"
            );
            let limit = u64::try_from(limit).unwrap_or(u64::MAX);
            session.rows(&sql, vec![name.into(), now.into(), limit.into()]).await?
        }
        Wanted::Only(one) => {
            let sql = format!(
                "{columns} WHERE event = ? AND route = ? AND epoch = ? AND attempt = ? AND state IN ('ready', 'retrying')
                   FOR UPDATE SKIP LOCKED"
            );
            session.rows(&sql, vec![id(one.event), name.into(), one.epoch.into(), one.attempt.into()]).await?
        }
    };
    let mut due: Vec<Due> = rows.iter().map(|row| due_without_event(row, route)).collect::<Result<_, _>>()?;
    if route.ordering.is_serial() && !due.is_empty() {
        let sql = format!(
            "SELECT e.id, e.entity, e.version, e.occurred_at, e.type
               FROM {IDS} STRAIGHT_JOIN oncehook_events e ON e.id = UNHEX(t.id)"
        );
        let mut subjects: HashMap<EventId, Row> = HashMap::new();
        for row in session.rows(&sql, vec![ids(due.iter().map(|due| due.candidate.place.event))]).await? {
            subjects.insert(event(&row, 0)?, row);
        }
        for due in &mut due {
            let candidate = &mut due.candidate;
            let row = subjects.get(&candidate.place.event).ok_or_else(EngineError::damaged)?;
            candidate.entity = row.maybe_text(1)?;
            candidate.place.version = row.maybe_int(2)?;
            candidate.mark.version = candidate.place.version;
            candidate.mark.at = row.maybe_time(3)?;
            candidate.kind = row.maybe_text(4)?;
        }
    }
    Ok(due)
}

/// Locks the entities of what is due, and drops what belongs to entities that another worker has locked.
async fn lock_entities(session: &mut Session, route: &Route, due: &mut Vec<Due>) -> Result<(), EngineError> {
    let entities: Vec<String> = due.iter().filter_map(|due| due.candidate.entity.clone()).collect();
    let entities: BTreeSet<&str> = entities.iter().map(String::as_str).collect();
    let free = entity::lock_free(session, &route.name, &entities).await?;
    due.retain_mut(|due| {
        due.entity_locked = true;
        due.candidate.entity.as_deref().is_none_or(|entity| free.contains(entity))
    });
    Ok(())
}

/// Drops those whose bodies would be too much: they are weighed before they are read, or many big ones would fill the memory.
/// Returns whether any were dropped.
async fn weigh(session: &mut Session, due: &mut Vec<Due>) -> Result<bool, EngineError> {
    if due.len() < 2 {
        return Ok(false);
    }
    let sql = format!("SELECT e.id, e.size FROM {IDS} STRAIGHT_JOIN oncehook_events e ON e.id = UNHEX(t.id)");
    let rows = session.rows(&sql, vec![ids(due.iter().map(|due| due.candidate.place.event))]).await?;
    let sizes: HashMap<EventId, u64> =
        rows.iter().map(|row| Ok((event(row, 0)?, count(row, 1)?))).collect::<Result<_, EngineError>>()?;
    let (mut before, all) = (0, due.len());
    due.retain(|due| {
        let fits = before < BODIES_AT_ONCE;
        before += sizes.get(&due.candidate.place.event).copied().unwrap_or(0);
        fits
    });
    Ok(due.len() < all)
}

/// Rows that are locked since they were read must be as they were.
fn all_changed(changed: u64, wanted: usize) -> Result<(), EngineError> {
    if u64::try_from(wanted) == Ok(changed) { Ok(()) } else { Err(EngineError::changed_under_lock()) }
}

/// Makes the deliveries that follow on settled ones, and stand where those stood. Those that exist stay as they are.
async fn follow(session: &mut Session, now: i64, followups: Vec<(&Fence, &RouteName)>) -> Result<(), EngineError> {
    if followups.is_empty() {
        return Ok(());
    }
    let asked = list(followups.into_iter().map(|(Fence { delivery, .. }, next)| {
        json!([hex(delivery.event), delivery.route.as_str(), delivery.epoch, next.as_str()])
    }));
    let sql = "INSERT INTO oncehook_deliveries (event, route, epoch, state, run_at, entity, version)
               SELECT d.event, t.next, d.epoch, 'ready', ?, d.entity, d.version
                 FROM JSON_TABLE(?, '$[*]' COLUMNS (event VARCHAR(32) PATH '$[0]', route VARCHAR(64) CHARACTER SET utf8mb4 PATH '$[1]',
                                                    epoch INT UNSIGNED PATH '$[2]', next VARCHAR(64) CHARACTER SET utf8mb4 PATH '$[3]')) t
                 STRAIGHT_JOIN oncehook_deliveries d ON d.event = UNHEX(t.event) AND d.route = t.route AND d.epoch = t.epoch
                   ON DUPLICATE KEY UPDATE epoch = oncehook_deliveries.epoch";
    session.change(sql, vec![now.into(), asked]).await?;
    Ok(())
}

/// What a list of outcomes makes of their deliveries. The fence is added. Text is read as utf8mb4 whatever the database's
/// character set.
const SETTLE: &str = "
UPDATE JSON_TABLE(?, '$[*]' COLUMNS (event VARCHAR(32) PATH '$[0]', route VARCHAR(64) CHARACTER SET utf8mb4 PATH '$[1]', epoch INT UNSIGNED PATH '$[2]',
                                     attempt INT UNSIGNED PATH '$[3]', state VARCHAR(16) PATH '$[4]', wait BIGINT PATH '$[5]',
                                     result MEDIUMTEXT CHARACTER SET utf8mb4 PATH '$[6]',
                                     error MEDIUMTEXT CHARACTER SET utf8mb4 PATH '$[7]', cause VARCHAR(16) PATH '$[8]')) t
  STRAIGHT_JOIN oncehook_deliveries d ON d.event = UNHEX(t.event) AND d.route = t.route AND d.epoch = t.epoch
   SET d.state = t.state, d.run_at = COALESCE(? + t.wait, d.run_at), d.lease_until = NULL,
       d.settled_at = IF(t.wait IS NULL, ?, NULL), d.result = t.result, d.error = t.error, d.cause = t.cause, d.blocked_at = NULL,
       d.parked_at = IF(t.state = 'parked', COALESCE(d.parked_at, ?), NULL)";

/// What was put off is not held against the delivery: under a lock it is no attempt, under a lease another one is granted.
const GRANTED_LOCKED: &str = "d.attempt = IF(t.state IN ('parked', 'superseded'), d.attempt, t.attempt)";
const GRANTED_LEASED: &str =
    "d.attempt_limit = IF(t.state IN ('parked', 'superseded'), d.lease_limit + 1, d.attempt_limit)";

/// Ends the rows of attempts that were leased; writes down those that were not.
async fn write_attempts(
    session: &mut Session,
    now: i64,
    held: Held,
    written: Vec<(&Fence, &str, Option<&str>)>,
) -> Result<(), EngineError> {
    if written.is_empty() {
        return Ok(());
    }
    if held == Held::Lock {
        let rows = written.into_iter().map(|(fence, outcome, error)| {
            let DeliveryId { event, route, epoch } = &fence.delivery;
            let (attempt, route) = (fence.attempt.into(), route.as_str().into());
            vec![id(*event), route, (*epoch).into(), attempt, now.into(), now.into(), outcome.into(), error.into()]
        });
        let insert = Insert {
            head: "INSERT INTO oncehook_attempts (event, route, epoch, attempt, started_at, finished_at, outcome, error)",
            row: "(?, ?, ?, ?, ?, ?, ?, ?)",
            tail: "",
        };
        session.insert(insert, rows.collect()).await?;
    } else {
        let rows = written.into_iter().map(|(fence, outcome, error)| {
            let DeliveryId { event, route, epoch } = &fence.delivery;
            json!([hex(*event), route.as_str(), epoch, fence.attempt, outcome, error])
        });
        let sql = "UPDATE JSON_TABLE(?, '$[*]' COLUMNS (event VARCHAR(32) PATH '$[0]', route VARCHAR(64) CHARACTER SET utf8mb4 PATH '$[1]',
                                       epoch INT UNSIGNED PATH '$[2]', attempt INT UNSIGNED PATH '$[3]',
                                       outcome VARCHAR(16) PATH '$[4]', error MEDIUMTEXT CHARACTER SET utf8mb4 PATH '$[5]')) t
                     STRAIGHT_JOIN oncehook_attempts a
                        ON a.event = UNHEX(t.event) AND a.route = t.route AND a.epoch = t.epoch AND a.attempt = t.attempt
                      SET a.finished_at = ?, a.outcome = t.outcome, a.error = t.error";
        session.change(sql, vec![list(rows), now.into()]).await?;
    }
    Ok(())
}
