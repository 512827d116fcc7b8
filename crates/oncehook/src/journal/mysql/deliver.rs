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
//! for what is parked. Text in lists is read as utf8mb4 whatever the database's character set.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use super::connection::Session;
use super::{Mysql, function};
use crate::delivery::{HandedEvent, RouteName};
use crate::event::EventId;
use crate::handler::Function;
use crate::journal::server::deliver::entity::{lock, subjects};
use crate::journal::server::deliver::row::{due, load_events};
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

/// A list of deliveries with their attempts, as the table that it becomes, and the deliveries. Places are counted from 1.
macro_rules! fenced {
    ($param:literal) => {
        concat!(
            "JSON_TABLE(",
            $param,
            ", '$[*]' COLUMNS (place FOR ORDINALITY, event VARCHAR(32) PATH '$[0]',
               route VARCHAR(64) CHARACTER SET utf8mb4 PATH '$[1]', epoch INT UNSIGNED PATH '$[2]',
               attempt INT UNSIGNED PATH '$[3]')) t
             STRAIGHT_JOIN oncehook_deliveries d ON d.event = UNHEX(t.event) AND d.route = t.route AND d.epoch = t.epoch "
        )
    };
}

/// A list of names.
macro_rules! names {
    ($param:literal) => {
        concat!("JSON_TABLE(", $param, ", '$[*]' COLUMNS (name VARCHAR(256) CHARACTER SET utf8mb4 PATH '$')) t ")
    };
}

/// A list of deliveries of the route `route`, perhaps with their attempts, and the deliveries.
macro_rules! places {
    ($param:literal) => {
        concat!(
            "JSON_TABLE(",
            $param,
            ", '$[*]' COLUMNS (event VARCHAR(32) PATH '$[0]', epoch INT UNSIGNED PATH '$[1]',
               attempt INT UNSIGNED PATH '$[2]')) t "
        )
    };
    ($param:literal, $route:literal) => {
        concat!(
            places!($param),
            "STRAIGHT_JOIN oncehook_deliveries d ON d.event = UNHEX(t.event) AND d.route = ",
            $route,
            " AND d.epoch = t.epoch "
        )
    };
}

/// What is in the queue of an entity of that name (`l`), leased (`r`) or parked (`p`).
macro_rules! line {
    ($letter:literal) => {
        concat!("d.line = CONCAT('", $letter, "', CONVERT(t.name USING binary))")
    };
}

/// The columns of events `e`, with the result of the route before. A follow-up that is forced alone knows the result of the epoch
/// before.
macro_rules! events {
    ($before:literal) => {
        concat!(
            "SELECT e.id, e.source, e.`key`, e.type, e.entity, e.occurred_at, e.received_at, e.headers, e.body,
                    IF(",
            $before,
            " IS NULL, NULL, (SELECT p.result FROM oncehook_deliveries p WHERE p.event = e.id AND p.route = ",
            $before,
            " AND p.epoch <= t.epoch AND p.state = 'succeeded' ORDER BY p.epoch DESC LIMIT 1)), e.version, t.epoch FROM "
        )
    };
}

/// Attempts that have ended, as [`SettleSql`] lists them.
macro_rules! ended {
    () => {
        "JSON_TABLE($2, '$[*]' COLUMNS (event VARCHAR(32) PATH '$[0]', route VARCHAR(64) CHARACTER SET utf8mb4 PATH '$[1]',
           epoch INT UNSIGNED PATH '$[2]', attempt INT UNSIGNED PATH '$[3]', state VARCHAR(16) PATH '$[4]',
           wait BIGINT PATH '$[5]', result MEDIUMTEXT CHARACTER SET utf8mb4 PATH '$[6]',
           error MEDIUMTEXT CHARACTER SET utf8mb4 PATH '$[7]', cause VARCHAR(16) PATH '$[8]', counts INT PATH '$[9]',
           outcome VARCHAR(16) PATH '$[10]', row_error MEDIUMTEXT CHARACTER SET utf8mb4 PATH '$[11]')) t "
    };
}

macro_rules! settle {
    ($set:literal, $fence:literal) => {
        concat!(
            "UPDATE ",
            ended!(),
            "STRAIGHT_JOIN oncehook_deliveries d ON d.event = UNHEX(t.event) AND d.route = t.route AND d.epoch = t.epoch
               SET d.state = t.state, d.run_at = COALESCE($1 + t.wait, d.run_at), d.lease_until = NULL,
                   d.settled_at = IF(t.wait IS NULL, $1, NULL), d.result = t.result, d.error = t.error, d.cause = t.cause,
                   d.blocked_at = NULL, d.parked_at = IF(t.state = 'parked', COALESCE(d.parked_at, $1), NULL), ",
            $set,
            " WHERE ",
            $fence
        )
    };
}

/// The columns of the front of a queue.
macro_rules! front {
    () => {
        "SELECT d.event, d.route, d.epoch, d.attempt, d.entity, d.state, d.version, d.place = 0 AND d.place_at <= $3 FROM "
    };
}

/// The fronts of queues. The first of each is found in the index alone, where `filter` allows it. The limit has them found
/// before they are taken apart, or each would be looked for once per column.
macro_rules! fronts {
    ($filter:literal, $only_if:literal) => {
        FrontSql {
            first: concat!(
                "SELECT LEFT(f.first, 16), $1, CAST(SUBSTR(f.first, 17) AS UNSIGNED), 0, f.name FROM
                   (SELECT t.name, (SELECT CONCAT(d.event, d.epoch) FROM oncehook_deliveries d WHERE ",
                line!("l"),
                " AND d.route = $1",
                $filter,
                " ORDER BY d.version, d.event, d.epoch LIMIT 1) AS first FROM ",
                names!("$2"),
                $only_if,
                " LIMIT 1000000) f WHERE f.first IS NOT NULL"
            ),
            more: concat!(
                front!(),
                "oncehook_deliveries d WHERE d.line = CONCAT('l', CAST($2 AS BINARY)) AND d.route = $1",
                $filter,
                " ORDER BY d.version, d.event, d.epoch LIMIT $5"
            ),
        }
    };
}

/// Deliveries as `row::due` reads them: of the event nothing is known yet, and the entity is not locked.
macro_rules! lock_due {
    ($which:literal) => {
        concat!(
            "SELECT event, NULL, NULL, NULL, NULL, epoch, attempt, attempt_limit, parked_at, entity IS NOT NULL, 0
               FROM oncehook_deliveries WHERE ",
            $which,
            " FOR UPDATE SKIP LOCKED"
        )
    };
}

/// Entities of route `$1` whose rows are there.
macro_rules! there {
    ($lock:literal) => {
        concat!(
            "SELECT t.name FROM ",
            names!("$2"),
            "STRAIGHT_JOIN oncehook_entities e FORCE INDEX (PRIMARY)
                ON e.scope = $1 AND e.entity = CONVERT(t.name USING binary)",
            $lock
        )
    };
}

const WAKE: &str = concat!(
    "UPDATE ",
    fenced!("$2"),
    "SET d.state = IF(d.attempt > 0, 'retrying', 'ready'), d.run_at = $1 WHERE d.state = 'parked'"
);

impl Delivers for Mysql {
    const DELIVER: DeliverSql = DeliverSql {
        lease: &[
            concat!(
                "UPDATE ",
                places!("$6", "$2"),
                "SET d.state = 'running', d.attempt = t.attempt, d.lease_until = $1 + $4,
                     d.lease_limit = COALESCE(d.attempt_limit, $5), d.blocked_at = NULL
                 WHERE d.attempt = t.attempt - 1 AND d.state IN ('ready', 'retrying')"
            ),
            concat!(
                "INSERT INTO oncehook_attempts (event, route, epoch, attempt, started_at)
                 SELECT UNHEX(t.event), $2, t.epoch, t.attempt, $1 FROM ",
                places!("$6")
            ),
            concat!(
                events!("$3"),
                places!("$6", "$2"),
                "STRAIGHT_JOIN oncehook_events e ON e.id = d.event WHERE d.attempt = t.attempt AND d.state = 'running'"
            ),
        ],
        renew: concat!(
            "UPDATE ",
            fenced!("$2"),
            "SET d.lease_until = $1 + $3 WHERE d.attempt = t.attempt AND d.state = 'running'"
        ),
        give_back: concat!(
            "UPDATE ",
            fenced!("$2"),
            "STRAIGHT_JOIN oncehook_attempts a
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
            fenced!("$1"),
            "WHERE d.state NOT IN ('succeeded', 'superseded', 'skipped')"
        ),
        load_events: Some(concat!(
            events!("$1"),
            places!("$2"),
            "STRAIGHT_JOIN oncehook_events e ON e.id = UNHEX(t.event)"
        )),
        settle: SettleSql::InSteps {
            live: concat!(
                "SELECT t.place FROM ",
                fenced!("$1"),
                "WHERE d.attempt = t.attempt AND d.state = 'running' FOR UPDATE"
            ),
            leased: [
                settle!(
                    "d.attempt_limit = IF(t.counts = 0, d.lease_limit + 1, d.attempt_limit)",
                    "d.attempt = t.attempt AND d.state = 'running'"
                ),
                concat!(
                    "UPDATE ",
                    ended!(),
                    "STRAIGHT_JOIN oncehook_attempts a
                        ON a.event = UNHEX(t.event) AND a.route = t.route AND a.epoch = t.epoch AND a.attempt = t.attempt
                       SET a.finished_at = $1, a.outcome = t.outcome, a.error = t.row_error"
                ),
            ],
            locked: [
                settle!(
                    "d.attempt = d.attempt + t.counts",
                    "d.attempt = t.attempt - 1 AND d.state IN ('ready', 'retrying')"
                ),
                concat!(
                    "INSERT INTO oncehook_attempts (event, route, epoch, attempt, started_at, finished_at, outcome, error)
                     SELECT UNHEX(t.event), t.route, t.epoch, t.attempt, $1, $1, t.outcome, t.row_error FROM ",
                    ended!(),
                    "WHERE t.outcome IS NOT NULL"
                ),
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
        name_parked: concat!(
            "UPDATE ",
            fenced!("$1"),
            "STRAIGHT_JOIN oncehook_events e ON e.id = d.event
               SET d.entity = e.entity WHERE d.state = 'parked' AND d.entity IS NULL"
        ),
        adopt: concat!(
            "UPDATE ",
            places!("$2", "$1"),
            "STRAIGHT_JOIN oncehook_events e ON e.id = d.event SET d.entity = e.entity, d.version = e.version"
        ),
        // A row that is there is locked by being found, one that is not by being made.
        lock_entities: &[concat!(
            "INSERT INTO oncehook_entities (scope, entity) SELECT $1, t.name FROM ",
            names!("$2"),
            "ON DUPLICATE KEY UPDATE version = oncehook_entities.version"
        )],
        entity_states: concat!(
            "SELECT e.entity, e.newest, e.last_at, e.state, e.version FROM ",
            names!("$2"),
            "STRAIGHT_JOIN oncehook_entities e ON e.scope = $1 AND e.entity = CONVERT(t.name USING binary)"
        ),
        keep_entity_states: "INSERT INTO oncehook_entities (scope, entity, version, last_at, state, newest)
            SELECT $1, t.entity, t.version, t.last_at, t.state, t.newest
              FROM JSON_TABLE($2, '$[*]' COLUMNS (entity VARCHAR(256) CHARACTER SET utf8mb4 PATH '$[0]', version BIGINT PATH '$[1]',
                     last_at BIGINT PATH '$[2]', state VARCHAR(256) CHARACTER SET utf8mb4 PATH '$[3]', newest BIGINT PATH '$[4]')) t
            ON DUPLICATE KEY UPDATE version = VALUES(version), last_at = VALUES(last_at), state = VALUES(state),
               newest = VALUES(newest)",
        queues: QueueSql::InSteps {
            // Whether anything is leased is asked once for all: usually nothing is.
            leased: concat!(
                "SELECT d.event, d.route, d.epoch, d.attempt, d.entity, d.state, d.version, 0 FROM ",
                names!("$2"),
                "STRAIGHT_JOIN oncehook_deliveries d ON ",
                line!("r"),
                " AND d.route = $1 WHERE EXISTS (SELECT 1 FROM oncehook_deliveries WHERE place = 1 AND route = $1)"
            ),
            blocking: fronts!("", ""),
            passing: fronts!(" AND d.state <> 'dead'", ""),
            found: concat!(front!(), places!("$2", "$1")),
        },
        block: concat!(
            "UPDATE ",
            places!("$3", "$2"),
            "SET d.run_at = $4, d.blocked_at = COALESCE(d.blocked_at, $1) WHERE d.state IN ('ready', 'retrying')"
        ),
        // Whether any is blocked is asked once for all: usually none is.
        unblock: UnblockSql::Found(fronts!(
            " AND d.run_at = $4 AND d.state <> 'dead'",
            "WHERE EXISTS (SELECT 1 FROM oncehook_deliveries WHERE place = 0 AND route = $1 AND place_at = $4)"
        )),
        unblock_all: MoveSql {
            find: Some(
                "SELECT event, route, epoch, attempt FROM oncehook_deliveries
                  WHERE place = 0 AND route = $2 AND place_at = $3 AND blocked_at IS NOT NULL LIMIT 1000",
            ),
            change: concat!(
                "UPDATE ",
                fenced!("$2"),
                "SET d.run_at = $1 WHERE d.run_at = $3 AND d.state IN ('ready', 'retrying')"
            ),
        },
        wake_parked: MoveSql {
            find: Some(concat!(
                "SELECT d.event, d.route, d.epoch, d.attempt FROM ",
                names!("$2"),
                "STRAIGHT_JOIN oncehook_deliveries d ON ",
                line!("p")
            )),
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
              FROM JSON_TABLE($1, '$[*]' COLUMNS (id VARCHAR(32) PATH '$')) t
              STRAIGHT_JOIN oncehook_events e ON e.id = UNHEX(t.id) WHERE e.entity IS NOT NULL",
        blocked_entities: "SELECT DISTINCT entity FROM oncehook_deliveries
             WHERE place = 0 AND route = $1 AND place_at = $2 AND entity IS NOT NULL LIMIT $3",
        stranded: concat!(
            "SELECT t.name FROM ",
            names!("$2"),
            "WHERE (SELECT 1 FROM oncehook_deliveries d WHERE ",
            line!("r"),
            " AND d.route = $1 LIMIT 1) IS NULL
               AND (SELECT d.run_at = $4 AND d.state <> 'dead' FROM oncehook_deliveries d WHERE ",
            line!("l"),
            " AND d.route = $1 AND ($3 OR d.state <> 'dead') ORDER BY d.version, d.event, d.epoch LIMIT 1)"
        ),
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
                    lock_due!("place = 0 AND route = $1 AND place_at <= $2 ORDER BY place_at, event, epoch LIMIT $3");
                (limit, Statements::rows(session, sql, &[name, now.into(), limit.into()]).await?)
            }
            Wanted::Only(next) => {
                let sql = lock_due!(
                    "event = $1 AND route = $2 AND epoch = $3 AND attempt = $4 AND state IN ('ready', 'retrying')"
                );
                let (event, epoch) = (next.delivery.event.into(), next.delivery.epoch.into());
                (1, Statements::rows(session, sql, &[event, name, epoch, (next.attempt - 1).into()]).await?)
            }
        };
        let mut due: Vec<Due> = rows.iter().map(|row| due(row, route)).collect::<EngineResult<_>>()?;
        let mut full = due.len() == limit;
        if serial && !due.is_empty() {
            let subjects = subjects::<Self>(session, due.iter().map(|due| due.candidate.place.event)).await?;
            for due in &mut due {
                let place = due.candidate.place;
                if let Some(subject) = subjects.get(&place.event) {
                    due.candidate =
                        Candidate { place: Place { epoch: place.epoch, ..subject.place }, ..subject.clone() };
                }
            }
            if !matches!(wanted, Wanted::Only(_)) {
                lock_free(session, &route.name, &mut due).await?;
                // If all belongs to entities of other workers it is better to wait for a moment than to look again at once.
                full &= !due.is_empty();
            }
        }
        if !matches!(wanted, Wanted::Lease { .. }) {
            full |= weigh(session, &mut due).await?;
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
    for (sql, locks) in [(there!(" FOR UPDATE SKIP LOCKED"), true), (there!(""), false)] {
        if rest.is_empty() {
            break;
        }
        let params = [route.into(), Param::texts(rest.iter().map(String::as_str))];
        for row in Statements::rows(session, sql, &params).await? {
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

/// Drops those whose bodies would be too much: they are weighed before they are read, or many big ones would fill the memory.
/// Returns whether any were dropped.
async fn weigh(session: &mut Session, due: &mut Vec<Due>) -> EngineResult<bool> {
    if due.len() < 2 {
        return Ok(false);
    }
    let sql = "SELECT e.id, e.size FROM JSON_TABLE($1, '$[*]' COLUMNS (id VARCHAR(32) PATH '$')) t
                STRAIGHT_JOIN oncehook_events e ON e.id = UNHEX(t.id)";
    let ids = Param::ids(due.iter().map(|due| due.candidate.place.event));
    let rows = Statements::rows(session, sql, &[ids]).await?;
    let sizes = rows.iter().map(|row| Ok((row.event(0)?, row.count(1)?)));
    let sizes: HashMap<EventId, u64> = sizes.collect::<EngineResult<_>>()?;
    let (mut before, all) = (0, due.len());
    due.retain(|due| {
        let fits = before < BODIES_AT_ONCE;
        before += sizes.get(&due.candidate.place.event).copied().unwrap_or(0);
        fits
    });
    Ok(due.len() < all)
}
