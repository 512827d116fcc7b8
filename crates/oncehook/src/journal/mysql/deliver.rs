//! The way out: the statements that lock, lease and settle deliveries, and those of entity queues. The caller commits.
//!
//! A worker that decides which delivery is eligible holds the row of (route, entity) in `oncehook_entities`; statements after the lock
//! see what the transaction before has left (READ COMMITTED). A worker that takes a batch skips entities that another worker
//! has locked ([`lock_free`]): two workers on one backlog nearly always meet at some of them, and would take turns if they
//! waited.
//!
//! A statement that walks an index and changes rows would lock whatever it walks over, and wait for it; so rows are found by
//! reading first, without locks, and then changed by their primary key, in its order. There are no lateral joins: one statement
//! finds the first row of many queues, and the others of a queue are read by a statement of their own.
//!
//! In the column `line` a letter stands before the entity: `l` for what is in the entity's queue, `r` for what is leased, `p`
//! for what is parked. `{…}` are fragments of `texts`. Text in lists is read as utf8mb4 whatever the database's character set.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use super::connection::Session;
use super::{Mysql, function};
use crate::delivery::{HandedEvent, RouteName};
use crate::event::EventId;
use crate::handler::Function;
use crate::journal::server::deliver::entity::lock;
use crate::journal::server::deliver::row::{candidate, due, load_events};
use crate::journal::server::deliver::steps::{
    DeliverSql, Delivers, Due, FrontSql, Locked, MoveSql, QueueSql, SettleSql, UnblockSql, Wanted,
};
use crate::journal::server::engine::Session as Statements;
use crate::journal::server::error::EngineResult;
use crate::journal::server::user_sql::Trouble;
use crate::journal::server::value::{Param, Row};
use crate::ordering::{Candidate, Place};
use crate::route::Route;

/// At most this many bytes of bodies are read for one batch (and the body that crosses it).
const BODIES_AT_ONCE: u64 = 8 << 20;

const WAKE: &str = "UPDATE {fenced|$2}
    SET d.state = IF(d.attempt > 0, 'retrying', 'ready'), d.run_at = $1 WHERE d.state = 'parked'";

impl Delivers for Mysql {
    const DELIVER: DeliverSql = DeliverSql {
        lease: &[
            "UPDATE {deliveries|$6|$2} SET d.state = 'running', d.attempt = t.attempt, d.lease_until = $1 + $4,
                    d.lease_limit = COALESCE(d.attempt_limit, $5), d.blocked_at = NULL
              WHERE d.attempt = t.attempt - 1 AND d.state IN ('ready', 'retrying')",
            "INSERT INTO oncehook_attempts (event, route, epoch, attempt, started_at)
             SELECT UNHEX(t.event), $2, t.epoch, t.attempt, $1 FROM {places|$6}",
            "{events|$3} {deliveries|$6|$2} STRAIGHT_JOIN oncehook_events e ON e.id = d.event
              WHERE d.attempt = t.attempt AND d.state = 'running'",
        ],
        renew: "UPDATE {fenced|$2} SET d.lease_until = $1 + $3 WHERE d.attempt = t.attempt AND d.state = 'running'",
        give_back: "UPDATE {fenced|$2} STRAIGHT_JOIN oncehook_attempts a
                ON a.event = d.event AND a.route = d.route AND a.epoch = d.epoch AND a.attempt = d.attempt
               SET a.finished_at = $1, a.outcome = 'given_back', d.state = IF(d.error IS NULL, 'ready', 'retrying'),
                   d.run_at = $1, d.lease_until = NULL, d.attempt_limit = d.lease_limit + 1
             WHERE d.attempt = t.attempt AND d.state = 'running'",
        expired_entities: "SELECT DISTINCT entity FROM oncehook_deliveries
             WHERE place = 1 AND route = $2 AND place_at <= $1 AND entity IS NOT NULL",
        lock_expired: "SELECT event, epoch, attempt, attempt_limit FROM oncehook_deliveries
             WHERE place = 1 AND route = $2 AND place_at <= $1 LIMIT 1000 FOR UPDATE SKIP LOCKED",
        next_due: "SELECT place_at - $1 FROM oncehook_deliveries
             WHERE place = 0 AND route = $2 AND place_at < $3 ORDER BY place_at LIMIT 1",
        created_at: "SELECT applied_at FROM oncehook_migrations ORDER BY name LIMIT 1",
        unsettled: "SELECT d.event, d.route, d.epoch FROM {fenced|$1}
             WHERE d.state NOT IN ('succeeded', 'superseded', 'skipped')",
        load_events: Some("{events|$1} {places|$2} STRAIGHT_JOIN oncehook_events e ON e.id = UNHEX(t.event)"),
        settle: SettleSql::InSteps {
            live: "SELECT t.place FROM {fenced|$1} WHERE d.attempt = t.attempt AND d.state = 'running' FOR UPDATE",
            leased: [
                "{settle} d.attempt_limit = IF(t.counts = 0, d.lease_limit + 1, d.attempt_limit)
                  WHERE d.attempt = t.attempt AND d.state = 'running'",
                "UPDATE {ended} STRAIGHT_JOIN oncehook_attempts a
                     ON a.event = UNHEX(t.event) AND a.route = t.route AND a.epoch = t.epoch AND a.attempt = t.attempt
                    SET a.finished_at = $1, a.outcome = t.outcome, a.error = t.row_error",
            ],
            locked: [
                "{settle} d.attempt = d.attempt + t.counts
                  WHERE d.attempt = t.attempt - 1 AND d.state IN ('ready', 'retrying')",
                "INSERT INTO oncehook_attempts (event, route, epoch, attempt, started_at, finished_at, outcome, error)
                 SELECT UNHEX(t.event), t.route, t.epoch, t.attempt, $1, $1, t.outcome, t.row_error
                   FROM {ended} WHERE t.outcome IS NOT NULL",
            ],
            follow: "INSERT INTO oncehook_deliveries (event, route, epoch, state, run_at, entity, version)
                SELECT d.event, t.next, d.epoch, 'ready', $1, d.entity, d.version
                  FROM JSON_TABLE($3, '$[*]' COLUMNS (event VARCHAR(32) PATH '$[0]',
                         route VARCHAR(64) CHARACTER SET utf8mb4 PATH '$[1]', epoch INT UNSIGNED PATH '$[2]',
                         next VARCHAR(64) CHARACTER SET utf8mb4 PATH '$[3]')) t
                  STRAIGHT_JOIN oncehook_deliveries d
                     ON d.event = UNHEX(t.event) AND d.route = t.route AND d.epoch = t.epoch
                ON DUPLICATE KEY UPDATE epoch = oncehook_deliveries.epoch",
        },
        name_parked: "UPDATE {fenced|$1} STRAIGHT_JOIN oncehook_events e ON e.id = d.event
               SET d.entity = e.entity WHERE d.state = 'parked' AND d.entity IS NULL",
        adopt: "UPDATE {deliveries|$2|$1} STRAIGHT_JOIN oncehook_events e ON e.id = d.event
               SET d.entity = e.entity, d.version = e.version",
        // A row that is there is locked by being found, one that is not by being made.
        lock_entities: &["INSERT INTO oncehook_entities (scope, entity) SELECT $1, t.name FROM {names|$2}
                          ON DUPLICATE KEY UPDATE version = oncehook_entities.version"],
        entity_states: "SELECT e.entity, e.newest, e.last_at, e.state, e.version FROM {names|$2}
             STRAIGHT_JOIN oncehook_entities e ON e.scope = $1 AND e.entity = CONVERT(t.name USING binary)",
        keep_entity_states: "INSERT INTO oncehook_entities (scope, entity, version, last_at, state, newest)
            SELECT $1, t.entity, t.version, t.last_at, t.state, t.newest
              FROM JSON_TABLE($2, '$[*]' COLUMNS (entity VARCHAR(256) CHARACTER SET utf8mb4 PATH '$[0]', version BIGINT PATH '$[1]',
                     last_at BIGINT PATH '$[2]', state VARCHAR(256) CHARACTER SET utf8mb4 PATH '$[3]', newest BIGINT PATH '$[4]')) t
            ON DUPLICATE KEY UPDATE version = VALUES(version), last_at = VALUES(last_at), state = VALUES(state),
               newest = VALUES(newest)",
        queues: QueueSql::InSteps {
            // Whether anything is leased is asked once for all: usually nothing is.
            leased: "SELECT d.event, d.route, d.epoch, d.attempt, d.entity, d.state, d.version, 0
                       FROM {names|$2} STRAIGHT_JOIN oncehook_deliveries d ON {line|r} AND d.route = $1
                      WHERE EXISTS (SELECT 1 FROM oncehook_deliveries WHERE place = 1 AND route = $1)",
            blocking: FrontSql { first: "{first}", more: "{more}" },
            passing: FrontSql { first: "{first|AND d.state <> 'dead'}", more: "{more|AND d.state <> 'dead'}" },
            found: "{front} {deliveries|$2|$1}",
        },
        block: "UPDATE {deliveries|$3|$2} SET d.run_at = $4, d.blocked_at = COALESCE(d.blocked_at, $1)
             WHERE d.state IN ('ready', 'retrying')",
        // Whether any is blocked is asked once for all: usually none is.
        unblock: UnblockSql::Found(FrontSql {
            first: "{first|AND d.run_at = $4 AND d.state <> 'dead'|WHERE EXISTS (
                       SELECT 1 FROM oncehook_deliveries WHERE place = 0 AND route = $1 AND place_at = $4)}",
            more: "{more|AND d.run_at = $4 AND d.state <> 'dead'}",
        }),
        unblock_all: MoveSql {
            find: Some(
                "SELECT event, route, epoch, attempt FROM oncehook_deliveries
                  WHERE place = 0 AND route = $2 AND place_at = $3 AND blocked_at IS NOT NULL LIMIT 1000",
            ),
            change: "UPDATE {fenced|$2} SET d.run_at = $1 WHERE d.run_at = $3 AND d.state IN ('ready', 'retrying')",
        },
        wake_parked: MoveSql {
            find: Some(
                "SELECT d.event, d.route, d.epoch, d.attempt
                   FROM {names|$2} STRAIGHT_JOIN oncehook_deliveries d ON {line|p}",
            ),
            change: WAKE,
        },
        wake_due_parked: MoveSql {
            find: Some(
                "SELECT event, route, epoch, attempt FROM oncehook_deliveries
                  WHERE place = 3 AND route = $2 AND place_at <= $1 ORDER BY place_at LIMIT 1000",
            ),
            change: WAKE,
        },
        subjects: "SELECT e.id, e.entity, e.version, e.occurred_at, e.type
              FROM {ids|$1} STRAIGHT_JOIN oncehook_events e ON e.id = UNHEX(t.id) WHERE e.entity IS NOT NULL",
        blocked_entities: "SELECT DISTINCT entity FROM oncehook_deliveries
             WHERE place = 0 AND route = $1 AND place_at = $2 AND entity IS NOT NULL LIMIT $3",
        stranded: "SELECT t.name FROM {names|$2}
             WHERE (SELECT 1 FROM oncehook_deliveries d WHERE {line|r} AND d.route = $1 LIMIT 1) IS NULL
               AND (SELECT d.run_at = $4 AND d.state <> 'dead' FROM oncehook_deliveries d
                     WHERE {line|l} AND d.route = $1 AND ($3 OR d.state <> 'dead')
                     ORDER BY d.version, d.event, d.epoch LIMIT 1)",
    };

    async fn lock_due(
        &self,
        session: &mut Session,
        now: i64,
        route: &Route,
        wanted: Wanted<'_>,
    ) -> EngineResult<Locked> {
        let (name, serial) = (Param::from(&route.name), route.ordering.is_serial());
        let (limit, rows) = match wanted {
            Wanted::Batch { limit, .. } | Wanted::Lease { limit } => {
                let sql =
                    "{lock_due|place = 0 AND route = $1 AND place_at <= $2 ORDER BY place_at, event, epoch LIMIT $3}";
                (limit, Statements::rows(session, sql, &[name, now.into(), limit.into()]).await?)
            }
            Wanted::Only(next) => {
                let sql = "{lock_due|event = $1 AND route = $2 AND epoch = $3 AND attempt = $4
                                     AND state IN ('ready', 'retrying')}";
                let (event, epoch) = (next.delivery.event.into(), next.delivery.epoch.into());
                (1, Statements::rows(session, sql, &[event, name, epoch, (next.attempt - 1).into()]).await?)
            }
        };
        let mut due: Vec<Due> = rows.iter().map(|row| due(row, route)).collect::<EngineResult<_>>()?;
        let (mut full, is_read) = (due.len() == limit, !matches!(wanted, Wanted::Lease { .. }));
        let mut sizes: HashMap<EventId, u64> = HashMap::new();
        if serial && !due.is_empty() || is_read && due.len() > 1 {
            let sql = "SELECT e.id, e.entity, e.version, e.occurred_at, e.type, e.size
                         FROM {ids|$1} STRAIGHT_JOIN oncehook_events e ON e.id = UNHEX(t.id)";
            let mut subjects: HashMap<EventId, Candidate> = HashMap::new();
            let ids = Param::ids(due.iter().map(|due| due.candidate.place.event));
            for row in Statements::rows(session, sql, &[ids]).await? {
                sizes.insert(row.event(0)?, row.count(5)?);
                subjects.insert(row.event(0)?, candidate(&row)?);
            }
            for due in due.iter_mut().filter(|_| serial) {
                let Candidate { place, parked_at, .. } = due.candidate;
                let subject = subjects.get(&place.event).filter(|subject| subject.entity.is_some());
                if let Some(subject) = subject {
                    let place = Place { epoch: place.epoch, ..subject.place };
                    due.candidate = Candidate { place, parked_at, ..subject.clone() };
                }
            }
        }
        if serial && !due.is_empty() && !matches!(wanted, Wanted::Only(_)) {
            lock_free(session, &route.name, &mut due).await?;
            // If all belongs to entities of other workers it is better to wait for a moment than to look again at once.
            full &= !due.is_empty();
        }
        if is_read {
            // Bodies are weighed before they are read, or many big ones would fill the memory.
            let (mut before, all) = (0, due.len());
            due.retain(|due| {
                let fits = before < BODIES_AT_ONCE;
                before += sizes.get(&due.candidate.place.event).copied().unwrap_or(0);
                fits
            });
            full |= due.len() < all;
            if !serial {
                load_events::<Self>(session, route, &mut due).await?;
            }
        }
        Ok(Locked { due, full, ..Locked::default() })
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

/// Locks the entities of what is due, and drops what belongs to entities that another worker has locked. The row of an entity
/// that was never locked before is made; another transaction that makes it at the same time is waited for.
async fn lock_free(session: &mut Session, route: &RouteName, due: &mut Vec<Due>) -> EngineResult {
    let mut rest: BTreeSet<String> = due.iter().filter_map(|due| due.candidate.entity.clone()).collect();
    let mut taken = BTreeSet::new();
    // After the first statement, the others are locked by another transaction, or their rows were never made.
    for (lock, locks) in [(" FOR UPDATE SKIP LOCKED", true), ("", false)] {
        if rest.is_empty() {
            break;
        }
        let sql = format!(
            "SELECT t.name FROM {{names|$2}} STRAIGHT_JOIN oncehook_entities e FORCE INDEX (PRIMARY)
                 ON e.scope = $1 AND e.entity = CONVERT(t.name USING binary){lock}"
        );
        let params = [route.into(), Param::texts(rest.iter().map(String::as_str))];
        for row in Statements::rows(session, &sql, &params).await? {
            let entity = row.text(0)?;
            rest.remove(&entity);
            if !locks {
                taken.insert(entity);
            }
        }
    }
    lock::<Mysql>(session, route, &rest).await?;
    due.retain_mut(|due| {
        due.entity_locked = true;
        due.candidate.entity.as_ref().is_none_or(|entity| !taken.contains(entity))
    });
    Ok(())
}
