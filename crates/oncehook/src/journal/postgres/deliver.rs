//! The way out: the statements that lock, lease and settle deliveries, and those of entity queues.
//!
//! Where a statement names the rows by their keys, it asks for `state || ''`: the indexes of the queues hold rows in certain
//! states, and for the bare column the planner would search one of those from end to end instead of looking a key up.
//!
//! Events are looked up one by one (`LATERAL … LIMIT 1`): their day is found by the id. For a plain join the planner counts the
//! price of all days for every row, and rather reads all of them.
//!
//! `(SELECT …micros())` in a list of columns is evaluated once and not for every row.

use std::time::Duration;

use super::connection::Session;
use super::user_sql::{OUR_PLANS, Prepared};
use super::{Postgres, function};
use crate::delivery::HandedEvent;
use crate::handler::Function;
use crate::journal::server::deliver::row::{EVENT_COLUMNS, due, due_with_event};
use crate::journal::server::deliver::steps::{
    DeliverSql, Delivers, Due, Locked, MoveSql, QueueSql, SettleSql, UnblockSql, Wanted,
};
use crate::journal::server::engine::Session as _;
use crate::journal::server::error::EngineResult;
use crate::journal::server::user_sql::Trouble;
use crate::journal::server::value::{Param, Row};
use crate::route::Route;

/// The columns of an event `e` that a handler is given, with the result of the route before: `d` is the delivery, `$3` the route
/// that it follows. A follow-up that is forced alone knows the result of the epoch before.
macro_rules! event {
    () => {
        "e.id, e.source, e.key, e.type, e.entity, e.occurred_at, e.received_at, e.headers, e.body,
    CASE WHEN $3::text IS NOT NULL THEN (SELECT p.result FROM oncehook.deliveries p
      WHERE p.event = d.event AND p.route = $3 AND p.epoch <= d.epoch AND p.state = 'succeeded'
      ORDER BY p.epoch DESC LIMIT 1) END, e.version"
    };
}
const EVENT: &str = event!();

/// The entity of a delivery `d` of route `$2`, locked. To be joined.
const ENTITY: &str = "
    LEFT JOIN LATERAL (SELECT n.entity FROM oncehook.entities n WHERE n.scope = $2 AND n.entity = d.entity
                          FOR UPDATE SKIP LOCKED) AS line ON true";

/// No other transaction has locked that entity: it is locked now; or there is none; or its row was never made, and no other
/// transaction is about to make it, for which this one would wait.
const ENTITY_FREE: &str = "
    AND (line.entity IS NOT NULL OR d.entity IS NULL
         OR ((SELECT true FROM oncehook.entities n WHERE n.scope = $2 AND n.entity = d.entity LIMIT 1) IS NULL
             AND pg_try_advisory_xact_lock(hashtextextended(d.entity, hashtextextended($2, 0)))))";

/// Settles what is due as succeeded. The rows are locked by the same statement, so their places are theirs; one that moved while
/// it was being locked is not found, and the count shows it.
const AHEAD: &str = ", ahead AS (
       UPDATE oncehook.deliveries d
          SET state = 'succeeded', attempt = 1, settled_at = $1::bigint, result = NULL, error = NULL, cause = NULL,
              blocked_at = NULL, parked_at = NULL
         FROM weighed w WHERE d.ctid = w.place AND w.attempt = 0 AND w.before < 8388608
       RETURNING 1
     )";

/// Locks what is due: `$1` now, `$2` route; `from` is the due time from which on is searched. The limit stands in the text: a
/// plan for any limit would be one for a tenth of the queue.
fn due_sql(route: &Route, from: &str, limit: usize) -> String {
    let (entity, free, locked) = match route.ordering.is_serial() {
        true => (ENTITY, ENTITY_FREE, "line.entity IS NOT NULL"),
        false => ("", "", "false"),
    };
    format!(
        "WITH due AS MATERIALIZED (
           SELECT d.ctid AS place, d.event, d.epoch, d.attempt, d.attempt_limit, d.run_at, d.parked_at,
                  d.entity IS NOT NULL AS queued, {locked} AS locked
             FROM oncehook.deliveries d {entity}
            WHERE d.route = $2 AND d.state IN ('ready', 'retrying') AND d.run_at BETWEEN {from} AND $1::bigint {free}
            ORDER BY d.run_at, d.event, d.epoch LIMIT {limit}
              FOR UPDATE OF d SKIP LOCKED
         )"
    )
}

/// Locks what is due and reads it: `$1` now, `$2` route, `$3` the route before, `$4` from this due time on. Bodies are weighed
/// before they are read: many big ones at once would fill the memory.
fn batch_sql(route: &Route, limit: usize, settle_ahead: bool) -> String {
    let (ahead, settled) = if settle_ahead { (AHEAD, "(SELECT count(*) FROM ahead)") } else { ("", "0::bigint") };
    format!(
        "{due}, weighed AS (
           SELECT d.*, e.id, e.source, e.key, e.type, e.entity, e.occurred_at, e.received_at, e.headers, e.body, e.version,
                  sum(octet_length(e.body)) OVER (ORDER BY d.run_at, d.event, d.epoch ROWS UNBOUNDED PRECEDING)
                    - octet_length(e.body) AS before
             FROM due d CROSS JOIN LATERAL (SELECT * FROM oncehook.events WHERE id = d.event LIMIT 1) e
         ){ahead}
         SELECT {columns}, d.epoch, d.attempt, d.attempt_limit, d.parked_at, d.queued, d.locked,
                d.run_at, (SELECT count(*) FROM due), {settled}
           FROM weighed d WHERE d.before < 8388608
          ORDER BY d.run_at, d.event, d.epoch",
        due = due_sql(route, "$4", limit),
        columns = EVENT.replace("e.", "d.")
    )
}

/// The same for leases, without the events: `$1` now, `$2` route, `$3` from this due time on.
fn lease_view_sql(route: &Route, limit: usize) -> String {
    format!(
        "{due}
         SELECT d.event, e.entity, e.version, e.occurred_at, e.type,
                d.epoch, d.attempt, d.attempt_limit, d.parked_at, d.queued, d.locked, d.run_at
           FROM due d CROSS JOIN LATERAL (SELECT * FROM oncehook.events WHERE id = d.event LIMIT 1) e
          ORDER BY d.run_at, d.event, d.epoch",
        due = due_sql(route, "$3", limit)
    )
}

/// One delivery: `$1` now (not used), `$2` route, `$3` the route before, `$4` event, `$5` epoch, `$6` attempt.
fn only_sql() -> String {
    format!(
        "SELECT {EVENT}, d.epoch, d.attempt, d.attempt_limit, d.parked_at, d.entity IS NOT NULL, false
           FROM oncehook.deliveries d JOIN oncehook.events e ON e.id = d.event
          WHERE d.event = $4 AND d.route = $2 AND d.epoch = $5 AND d.attempt = $6 AND $1::bigint IS NOT NULL
            AND (d.state || '') IN ('ready', 'retrying')
            FOR UPDATE OF d SKIP LOCKED"
    )
}

/// Leases deliveries and writes the attempts down before they begin: `$1` now, `$2` route, `$3` the route before, `$4` the lease,
/// `$5` the most attempts; `due` names the rows, `fence` is what they must be.
macro_rules! lease {
    ($due:literal, $fence:literal) => {
        concat!(
            "WITH due AS MATERIALIZED (",
            $due,
            "), leased AS (
           UPDATE oncehook.deliveries d
              SET state = 'running', attempt = d.attempt + 1, lease_until = coalesce($1::bigint, oncehook.micros()) + $4,
                  lease_limit = coalesce(d.attempt_limit, $5), blocked_at = NULL
             FROM due WHERE d.event = due.event AND d.route = $2 AND d.epoch = due.epoch",
            $fence,
            " RETURNING d.event, d.epoch, d.attempt, d.lease_limit, d.run_at, d.parked_at
         ), begun AS (
           INSERT INTO oncehook.attempts (event, route, epoch, attempt, started_at)
           SELECT event, $2, epoch, attempt, coalesce($1::bigint, oncehook.micros()) FROM leased
         )
         SELECT ",
            event!(),
            ", d.epoch, d.attempt - 1, d.lease_limit, d.parked_at, false, false, d.run_at
           FROM leased d CROSS JOIN LATERAL (SELECT * FROM oncehook.events WHERE id = d.event LIMIT 1) e
          ORDER BY d.run_at, d.event, d.epoch"
        )
    };
}

/// `$6` from this due time on, `$7` limit.
const LEASE_DUE: &str = lease!(
    "SELECT d.event, d.epoch FROM oncehook.deliveries d
            WHERE d.route = $2 AND d.state IN ('ready', 'retrying')
              AND d.run_at BETWEEN $6::bigint AND coalesce($1::bigint, oncehook.micros())
            ORDER BY d.run_at, d.event, d.epoch LIMIT $7
              FOR UPDATE SKIP LOCKED",
    ""
);

/// Settles attempts, as [`SettleSql`] says: `set` is what is written beside the outcome, `fence` what the row must be, `written`
/// writes the row of the attempt.
macro_rules! settle {
    ($set:literal, $fence:literal, $written:literal) => {
        concat!(
            "
WITH ended AS MATERIALIZED (
  SELECT * FROM unnest($2::uuid[], $3::text[], $4::integer[], $5::integer[], $6::text[], $7::bigint[], $8::text[], $9::text[],
                       $10::text[], $11::integer[], $12::text[], $13::text[])
    AS t(event, route, epoch, attempt, state, wait, result, error, cause, counts, outcome, row_error)
), settled AS (
  UPDATE oncehook.deliveries d
     SET state = t.state, run_at = coalesce(coalesce($1::bigint, oncehook.micros()) + t.wait, d.run_at), lease_until = NULL,
         settled_at = CASE WHEN t.wait IS NULL THEN coalesce($1::bigint, oncehook.micros()) END,
         result = t.result, error = t.error, cause = t.cause, blocked_at = NULL,
         parked_at = CASE WHEN t.state = 'parked' THEN coalesce(d.parked_at, $1::bigint, oncehook.micros()) END, ",
            $set,
            " FROM ended t WHERE d.event = t.event AND d.route = t.route AND d.epoch = t.epoch AND ",
            $fence,
            " RETURNING d.event, d.route, d.epoch, t.attempt, t.state, t.outcome, t.row_error, d.entity, d.version
), written AS (",
            $written,
            "), followed AS (
  INSERT INTO oncehook.deliveries (event, route, epoch, state, run_at, entity, version)
  SELECT s.event, f.next, s.epoch, 'ready', coalesce($1::bigint, oncehook.micros()), s.entity, s.version
    FROM settled s
    JOIN unnest($14::uuid[], $15::text[], $16::integer[], $17::text[]) AS f(event, route, epoch, next)
      ON f.event = s.event AND f.route = s.route AND f.epoch = s.epoch
   WHERE s.state = 'succeeded'
  ON CONFLICT (event, route, epoch) DO NOTHING
)
SELECT event, route, epoch, attempt FROM settled"
        )
    };
}

impl Delivers for Postgres {
    const DELIVER: DeliverSql = DeliverSql {
        lease: &[lease!(
            "SELECT * FROM unnest($6::uuid[], $7::integer[], $8::integer[]) AS t(event, epoch, attempt)",
            " AND d.attempt = due.attempt - 1"
        )],
        renew: "UPDATE oncehook.deliveries d SET lease_until = coalesce($1::bigint, oncehook.micros()) + $6
                  FROM unnest($2::uuid[], $3::text[], $4::integer[], $5::integer[]) AS t(event, route, epoch, attempt)
                 WHERE d.event = t.event AND d.route = t.route AND d.epoch = t.epoch AND d.attempt = t.attempt
                   AND (d.state || '') = 'running'",
        give_back: "WITH given AS (
              UPDATE oncehook.deliveries d
                 SET state = CASE WHEN d.error IS NULL THEN 'ready' ELSE 'retrying' END,
                     run_at = coalesce($1::bigint, oncehook.micros()), lease_until = NULL, attempt_limit = d.lease_limit + 1
                FROM unnest($2::uuid[], $3::text[], $4::integer[], $5::integer[]) AS t(event, route, epoch, attempt)
               WHERE d.event = t.event AND d.route = t.route AND d.epoch = t.epoch AND d.attempt = t.attempt
                 AND (d.state || '') = 'running'
              RETURNING d.event, d.route, d.epoch, d.attempt
            )
            UPDATE oncehook.attempts a
               SET finished_at = coalesce($1::bigint, oncehook.micros()), outcome = 'given_back'
              FROM given g
             WHERE a.event = g.event AND a.route = g.route AND a.epoch = g.epoch AND a.attempt = g.attempt",
        expired_entities: "SELECT DISTINCT entity FROM oncehook.deliveries
             WHERE route = $2 AND state = 'running' AND lease_until <= $1 AND entity IS NOT NULL",
        lock_expired: "SELECT event, epoch, attempt, attempt_limit FROM oncehook.deliveries
             WHERE route = $2 AND state = 'running' AND lease_until <= $1 LIMIT 1000 FOR UPDATE SKIP LOCKED",
        next_due: "SELECT min(run_at) - coalesce($1::bigint, oncehook.micros()) FROM oncehook.deliveries
             WHERE route = $2 AND state IN ('ready', 'retrying') AND run_at < $3",
        created_at: "SELECT applied_at FROM oncehook.migrations ORDER BY name LIMIT 1",
        unsettled: "SELECT d.event, d.route, d.epoch
              FROM unnest($1::uuid[], $2::text[], $3::integer[]) AS t(event, route, epoch)
              JOIN oncehook.deliveries d ON d.event = t.event AND d.route = t.route AND d.epoch = t.epoch
             WHERE d.state NOT IN ('succeeded', 'superseded', 'skipped')",
        load_events: None,
        settle: SettleSql::AtOnce {
            leased: settle!(
                "attempt_limit = CASE WHEN t.counts = 0 THEN d.lease_limit + 1 ELSE d.attempt_limit END",
                "d.attempt = t.attempt AND (d.state || '') = 'running'",
                "UPDATE oncehook.attempts a
                    SET finished_at = coalesce($1::bigint, oncehook.micros()), outcome = s.outcome, error = s.row_error
                   FROM settled s
                  WHERE a.event = s.event AND a.route = s.route AND a.epoch = s.epoch AND a.attempt = s.attempt"
            ),
            locked: settle!(
                "attempt = d.attempt + t.counts",
                "d.attempt = t.attempt - 1 AND (d.state || '') IN ('ready', 'retrying')",
                "INSERT INTO oncehook.attempts (event, route, epoch, attempt, started_at, finished_at, outcome, error)
                 SELECT event, route, epoch, attempt, coalesce($1::bigint, oncehook.micros()),
                        coalesce($1::bigint, oncehook.micros()), outcome, row_error
                   FROM settled WHERE outcome IS NOT NULL"
            ),
            // Parts of a statement cost time where they find nothing to do, too.
            succeeded: "UPDATE oncehook.deliveries d
                SET state = 'succeeded', attempt = t.attempt, settled_at = (SELECT coalesce($1::bigint, oncehook.micros())),
                    result = t.result, error = NULL, cause = NULL, blocked_at = NULL, parked_at = NULL
               FROM unnest($2::uuid[], $3::text[], $4::integer[], $5::integer[], $6::text[])
                    AS t(event, route, epoch, attempt, result)
              WHERE d.event = t.event AND d.route = t.route AND d.epoch = t.epoch AND d.attempt = t.attempt - 1
                AND (d.state || '') IN ('ready', 'retrying')
             RETURNING d.event, d.route, d.epoch, t.attempt",
            wake_parked: "UPDATE oncehook.deliveries
                    SET state = CASE WHEN attempt > 0 THEN 'retrying' ELSE 'ready' END,
                        run_at = coalesce($1::bigint, oncehook.micros())
                  WHERE state = 'parked' AND entity IN (SELECT entity FROM oncehook.events WHERE id = ANY ($2))",
        },
        adopt: "UPDATE oncehook.deliveries d SET entity = e.entity, version = e.version
              FROM unnest($2::uuid[], $3::integer[]) AS t(event, epoch)
             CROSS JOIN LATERAL (SELECT entity, version FROM oncehook.events WHERE id = t.event LIMIT 1) e
             WHERE d.event = t.event AND d.route = $1 AND d.epoch = t.epoch",
        lock_entities: &[
            "INSERT INTO oncehook.entities (scope, entity) SELECT $1, entity FROM unnest($2::text[]) AS t(entity)
             ON CONFLICT (scope, entity) DO NOTHING",
            "SELECT 1 FROM unnest($2::text[]) AS t(entity) -- in their order
              CROSS JOIN LATERAL (SELECT 1 FROM oncehook.entities n WHERE n.scope = $1 AND n.entity = t.entity FOR UPDATE) line",
        ],
        entity_states: "SELECT entity, newest, last_at, state, version FROM oncehook.entities
             WHERE scope = $1 AND entity = ANY ($2)",
        keep_entity_states: "INSERT INTO oncehook.entities (scope, entity, version, last_at, state, newest)
            SELECT $1, * FROM unnest($2::text[], $3::bigint[], $4::bigint[], $5::text[], $6::bigint[])
            ON CONFLICT (scope, entity) DO UPDATE
               SET version = excluded.version, last_at = excluded.last_at, state = excluded.state, newest = excluded.newest",
        queues: QueueSql::AtOnce(
            "SELECT d.event, d.route, d.epoch, d.attempt, d.entity, d.state, d.version, false
               FROM oncehook.deliveries d WHERE d.route = $1 AND d.entity = ANY ($2) AND d.state = 'running'
                -- Asked once for all: usually nothing is.
                AND EXISTS (SELECT 1 FROM oncehook.deliveries WHERE route = $1 AND entity IS NOT NULL AND state = 'running')
             UNION ALL
             SELECT d.event, d.route, d.epoch, d.attempt, u.entity, d.state, d.version,
                    d.state IN ('ready', 'retrying') AND d.run_at <= $4
               FROM unnest($2::text[], $3::bigint[]) AS u(entity, length)
              CROSS JOIN LATERAL (
                SELECT event, route, epoch, attempt, version, state, run_at FROM oncehook.deliveries
                 WHERE route = $1 AND entity = u.entity AND state IN ('ready', 'retrying', 'running', 'dead')
                   AND (state <> 'dead' OR $5) AND $6
                 ORDER BY version NULLS FIRST, event, epoch LIMIT u.length) d",
        ),
        block: "UPDATE oncehook.deliveries d SET run_at = $5, blocked_at = coalesce(d.blocked_at, $1)
              FROM unnest($3::uuid[], $4::integer[]) AS t(event, epoch)
             WHERE d.event = t.event AND d.route = $2 AND d.epoch = t.epoch AND (d.state || '') IN ('ready', 'retrying')",
        name_parked: "UPDATE oncehook.deliveries d SET entity = e.entity
              FROM unnest($1::uuid[], $2::text[], $3::integer[], $4::integer[]) AS t(event, route, epoch, attempt)
             CROSS JOIN LATERAL (SELECT entity FROM oncehook.events WHERE id = t.event LIMIT 1) e
             WHERE d.event = t.event AND d.route = t.route AND d.epoch = t.epoch AND d.state = 'parked' AND d.entity IS NULL",
        unblock: UnblockSql::AtOnce(
            "UPDATE oncehook.deliveries d SET run_at = $1
               FROM (SELECT f.event, f.epoch FROM unnest($3::text[], $4::bigint[]) AS u(entity, count)
                      CROSS JOIN LATERAL (
                        SELECT event, epoch FROM oncehook.deliveries
                         WHERE route = $2 AND entity = u.entity AND state IN ('ready', 'retrying')
                           AND run_at + 0 = $5 -- by the entity, not by the due time
                         ORDER BY version NULLS FIRST, event, epoch LIMIT u.count) f) AS n
              WHERE d.event = n.event AND d.route = $2 AND d.epoch = n.epoch AND d.run_at = $5
                -- Asked once for all: usually none is blocked.
                AND EXISTS (SELECT 1 FROM oncehook.deliveries
                             WHERE route = $2 AND blocked_at IS NOT NULL AND state IN ('ready', 'retrying'))",
        ),
        unblock_all: at_once(
            "UPDATE oncehook.deliveries SET run_at = $1
              WHERE route = $2 AND blocked_at IS NOT NULL AND state IN ('ready', 'retrying') AND run_at = $3",
        ),
        wake_parked: at_once(
            "UPDATE oncehook.deliveries
                SET state = CASE WHEN attempt > 0 THEN 'retrying' ELSE 'ready' END, run_at = $1
              WHERE state = 'parked' AND entity = ANY ($2)
                -- Asked once for all: usually none is.
                AND EXISTS (SELECT 1 FROM oncehook.deliveries WHERE state = 'parked' AND entity IS NOT NULL)",
        ),
        wake_due_parked: at_once(
            "UPDATE oncehook.deliveries
                SET state = CASE WHEN attempt > 0 THEN 'retrying' ELSE 'ready' END, run_at = $1
              WHERE route = $2 AND state = 'parked' AND run_at <= $1",
        ),
        subjects: "SELECT id, entity, version, occurred_at, type FROM oncehook.events
             WHERE id = ANY ($1) AND entity IS NOT NULL",
        blocked_entities: "SELECT DISTINCT entity FROM oncehook.deliveries
             WHERE route = $1 AND blocked_at IS NOT NULL AND state IN ('ready', 'retrying') AND run_at = $2
               AND entity IS NOT NULL LIMIT $3",
        stranded: "SELECT u.entity FROM unnest($2::text[]) AS u(entity)
              CROSS JOIN LATERAL (
                SELECT run_at FROM oncehook.deliveries
                 WHERE route = $1 AND entity = u.entity AND state IN ('ready', 'retrying', 'dead') AND (state <> 'dead' OR $3)
                 ORDER BY version NULLS FIRST, event, epoch LIMIT 1) f
              WHERE f.run_at = $4
                AND NOT EXISTS (SELECT 1 FROM oncehook.deliveries r
                                 WHERE r.route = $1 AND r.entity = u.entity AND r.state = 'running')",
    };

    async fn begin_batch(session: &mut Session, given: Option<i64>) -> EngineResult<i64> {
        session.begin_with(OUR_PLANS, given).await
    }

    fn settles_ahead(prepared: &Prepared) -> bool {
        prepared.tells_nothing()
    }

    async fn lock_due(
        &self,
        session: &mut Session,
        now: i64,
        route: &Route,
        wanted: Wanted<'_>,
    ) -> EngineResult<Locked> {
        let (name, before) = (Param::from(&route.name), Param::from(route.after.as_ref()));
        let from = self.fronts.of(&route.name);
        match wanted {
            Wanted::Batch { limit, settle_ahead } => {
                let sql = batch_sql(route, limit, settle_ahead);
                let mut rows = session.rows(&sql, &[now.into(), name, before, from.into()]).await?;
                let column = |at: usize| rows.first().map(|row| row.int(EVENT_COLUMNS + 6 + at)).transpose();
                let count = |number: Option<i64>| number.and_then(|number| usize::try_from(number).ok()).unwrap_or(0);
                let (first, locked, settled_ahead) = (column(0)?, count(column(1)?), count(column(2)?));
                let full = locked == limit || rows.len() < locked;
                let unseen = self.fronts.found(&route.name, from, first, full);
                let due = rows.iter_mut().map(|row| due_with_event(row, route)).collect::<EngineResult<_>>()?;
                Ok(Locked { due, full, unseen, settled_ahead })
            }
            Wanted::Lease { limit } => {
                let rows = session.rows(&lease_view_sql(route, limit), &[now.into(), name, from.into()]).await?;
                let full = rows.len() == limit;
                let first = rows.first().map(|row| row.int(11)).transpose()?;
                let unseen = self.fronts.found(&route.name, from, first, full);
                let due = rows.iter().map(|row| due(row, route)).collect::<EngineResult<_>>()?;
                Ok(Locked { due, full, unseen, settled_ahead: 0 })
            }
            Wanted::Only(next) => {
                let (event, epoch) = (next.delivery.event.into(), next.delivery.epoch.into());
                let params = [now.into(), name, before, event, epoch, (next.attempt - 1).into()];
                let mut rows = session.rows(&only_sql(), &params).await?;
                let due = rows.iter_mut().map(|row| due_with_event(row, route)).collect::<EngineResult<_>>()?;
                Ok(Locked { due, ..Locked::default() })
            }
        }
    }

    async fn lease_at_once(
        &self,
        session: &mut Session,
        given: Option<i64>,
        route: &Route,
        limit: usize,
        lease: i64,
    ) -> EngineResult<Option<Vec<Due>>> {
        let (name, before) = (Param::from(&route.name), Param::from(route.after.as_ref()));
        let most = route.retry.max_attempts.into();
        let mut params = [given.into(), name, before, lease.into(), most, Param::Null, limit.into()];
        loop {
            let from = self.fronts.of(&route.name);
            params[5] = from.into();
            let mut rows = session.rows(LEASE_DUE, &params).await?;
            let first = rows.first().map(|row| row.int(EVENT_COLUMNS + 6)).transpose()?;
            let unseen = self.fronts.found(&route.name, from, first, rows.len() == limit);
            if !(rows.is_empty() && unseen) {
                return rows.iter_mut().map(|row| due_with_event(row, route)).collect::<EngineResult<_>>().map(Some);
            }
        }
    }

    async fn call(
        session: &mut Session,
        given: Option<i64>,
        function: &dyn Function,
        event: &HandedEvent,
        time: Duration,
    ) -> Result<(i64, Option<String>), Trouble> {
        function::call(session, given, function, event, time).await
    }
}

/// A change of rows that one statement finds and changes.
const fn at_once(change: &'static str) -> MoveSql {
    MoveSql { find: None, change }
}
