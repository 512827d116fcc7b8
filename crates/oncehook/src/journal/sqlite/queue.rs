//! The queue of deliveries: the statements that take, settle and return them. Each runs inside a transaction of its caller.
//!
//! Promises: the fence stands in every statement that ends an attempt: event, route, epoch, state and attempt must be what the
//! claim said, or no row changes.
//!
//! Does not: decide what an outcome writes (`decide::outcome`), or who is let go on after it (`entity`).

use bytes::Bytes;
use oncehook_verify::{EventKey, UnixMicros};
use rusqlite::{Connection, Params, Result, Row, ToSql, Transaction, TransactionBehavior, params, params_from_iter};

use super::entity::Entities;
use crate::delivery::{Cause, Claim, DeliveryId, DeliveryState, FailedAttempt, Fence, HandedEvent, RouteName, Verdict};
use crate::event::{EventId, SourceName};
use crate::journal::decide::outcome::{Held, outcome};
use crate::ordering::NO_TIME;
use crate::retry::Chance;
use crate::route::Route;

/// Begins a transaction that may write. Dropping it undoes what was done in it.
pub(super) fn begin(connection: &mut Connection) -> Result<Transaction<'_>> {
    connection.transaction_with_behavior(TransactionBehavior::Immediate)
}

/// Runs a statement that returns no rows. Returns how many rows it changed.
pub(super) fn change(connection: &Connection, sql: &str, parameters: impl Params) -> Result<usize> {
    connection.prepare_cached(sql)?.execute(parameters)
}

/// The same for a statement about one attempt: `?1` to `?4` are its event, route, epoch and number, the others follow.
fn change_attempt(connection: &Connection, sql: &str, fence: &Fence, others: &[&dyn ToSql]) -> Result<usize> {
    let DeliveryId { event, route, epoch } = &fence.delivery;
    let (event, route) = (event.sequence(), route.as_str());
    let named: [&dyn ToSql; 4] = [&event, &route, epoch, &fence.attempt];
    change(connection, sql, params_from_iter(named.iter().chain(others)))
}

/// A delivery that is due: what its next attempt would be.
pub(super) struct Due {
    pub(super) claim: Claim,
    /// Whether it is in the queue of its entity.
    pub(super) queued: bool,
}

/// Bodies of this many bytes are read at once at most, and at least one.
const DUE_BYTES: usize = 8 << 20;

/// Deliveries of a route that are due, the longest due first, and whether there may be more.
pub(super) fn due(connection: &Connection, route: &Route, now: UnixMicros, limit: usize) -> Result<(Vec<Due>, bool)> {
    // The index is named: without it this would walk all deliveries there ever were.
    let mut statement = connection.prepare_cached(
        "SELECT d.epoch, d.attempt + 1, d.attempt_limit,
                e.id, e.source, e.key, e.type, e.entity, e.occurred_at, e.received_at, e.headers, e.body,
                -- A follow-up that is forced alone knows the result of the epoch before.
                (SELECT p.result FROM oncehook_deliveries p
                  WHERE p.event = d.event AND p.route = ?2 AND p.epoch <= d.epoch AND p.state = 'succeeded'
                  ORDER BY p.epoch DESC LIMIT 1), e.version, d.parked_at, d.entity IS NOT NULL
           FROM oncehook_deliveries d INDEXED BY oncehook_deliveries_due
           JOIN oncehook_events e ON e.seq = d.event
          WHERE d.route = ?1 AND d.state IN ('ready', 'retrying') AND d.run_at <= ?3
          ORDER BY d.run_at LIMIT ?4",
    )?;
    let after = route.after.as_ref().map(RouteName::as_str);
    let most = i64::try_from(limit).unwrap_or(i64::MAX);
    let mut rows = statement.query(params![route.name.as_str(), after, now.0, most])?;
    let (mut due, mut bytes) = (Vec::new(), 0);
    while bytes < DUE_BYTES
        && let Some(row) = rows.next()?
    {
        let event = handed(row, route)?;
        bytes += event.body.len();
        let delivery = DeliveryId { event: event.id, route: route.name.clone(), epoch: row.get(0)? };
        let claim = Claim {
            fence: Fence { delivery, attempt: row.get(1)? },
            attempt_limit: row.get::<_, Option<u32>>(2)?.unwrap_or(route.retry.max_attempts),
            parked_at: row.get::<_, Option<i64>>(14)?.map(UnixMicros),
            event,
        };
        due.push(Due { claim, queued: row.get(15)? });
    }
    let more = due.len() == limit || bytes >= DUE_BYTES;
    Ok((due, more))
}

/// The event of a due delivery.
fn handed(row: &Row<'_>, route: &Route) -> Result<HandedEvent> {
    let source = row.get_ref(4)?.as_str()?;
    let key = row.get_ref(5)?.as_blob()?;
    Ok(HandedEvent {
        id: EventId::from_bytes(row.get(3)?),
        source: if source == route.source.as_str() {
            route.source.clone()
        } else {
            // The route was given another source since. The event keeps its own.
            SourceName::new(source).map_err(|_| rusqlite::Error::InvalidQuery)?
        },
        key: EventKey::from_bytes(key).ok_or(rusqlite::Error::InvalidQuery)?,
        kind: row.get(6)?,
        entity: row.get(7)?,
        occurred_at: row.get::<_, Option<i64>>(8)?.map(UnixMicros),
        received_at: UnixMicros(row.get(9)?),
        headers: Bytes::from(row.get::<_, Vec<u8>>(10)?),
        body: Bytes::from(row.get::<_, Vec<u8>>(11)?),
        result: row.get(12)?,
        version: row.get(13)?,
        state: None,
        current: None,
    })
}

/// Makes deliveries that are due at once. Those that exist stay as they are. If others of the event are in the queue of its
/// entity, these are too.
pub(super) fn enqueue<'r>(
    connection: &Connection,
    event: EventId,
    epoch: u32,
    routes: impl IntoIterator<Item = &'r RouteName>,
    now: UnixMicros,
) -> Result<Vec<RouteName>> {
    let sql = "INSERT INTO oncehook_deliveries (event, route, epoch, state, run_at, entity, version)
               SELECT ?1, ?2, ?3, 'ready', ?4,
                      (SELECT entity FROM oncehook_deliveries WHERE event = ?1 AND entity IS NOT NULL LIMIT 1),
                      (SELECT version FROM oncehook_deliveries WHERE event = ?1 AND entity IS NOT NULL LIMIT 1)
                WHERE true
               ON CONFLICT (event, route, epoch) DO NOTHING";
    let mut made = Vec::new();
    for route in routes {
        if change(connection, sql, params![event.sequence(), route.as_str(), epoch, now.0])? == 1 {
            made.push(route.clone());
        }
    }
    Ok(made)
}

/// Leases a delivery for its next attempt, and writes the attempt down before it begins.
pub(super) fn lease(connection: &Connection, claim: &Claim, now: UnixMicros, until: UnixMicros) -> Result<bool> {
    let leased = change_attempt(
        connection,
        "UPDATE oncehook_deliveries SET state = 'running', attempt = ?4, lease_until = ?5, lease_limit = ?6,
                blocked_at = NULL
          WHERE event = ?1 AND route = ?2 AND epoch = ?3 AND state IN ('ready', 'retrying') AND attempt = ?4 - 1",
        &claim.fence,
        &[&until.0, &claim.attempt_limit],
    )?;
    if leased == 1 {
        let sql =
            "INSERT INTO oncehook_attempts (event, route, epoch, attempt, started_at) VALUES (?1, ?2, ?3, ?4, ?5)";
        change_attempt(connection, sql, &claim.fence, &[&now.0])?;
    }
    Ok(leased == 1)
}

/// Writes what a leased attempt came to. The fence is part of it.
const SETTLE_LEASED: &str = "
    UPDATE oncehook_deliveries
       SET state = ?5, run_at = coalesce(?6, run_at), lease_until = NULL, settled_at = ?7, result = ?8,
           error = ?9, cause = ?10, blocked_at = NULL, parked_at = iif(?12, coalesce(parked_at, ?13), NULL),
           entity = iif(?12, coalesce(entity, (SELECT e.entity FROM oncehook_events e WHERE e.seq = ?1)), entity),
           attempt_limit = iif(?11, attempt_limit, lease_limit + 1)
     WHERE event = ?1 AND route = ?2 AND epoch = ?3 AND attempt = ?4 AND state = 'running'";

/// The same for an attempt that ran inside the transaction that settles it.
const SETTLE_LOCKED: &str = "
    UPDATE oncehook_deliveries
       SET state = ?5, attempt = iif(?11, ?4, attempt), run_at = coalesce(?6, run_at), settled_at = ?7, result = ?8,
           error = ?9, cause = ?10, blocked_at = NULL, parked_at = iif(?12, coalesce(parked_at, ?13), NULL),
           entity = iif(?12, coalesce(entity, (SELECT e.entity FROM oncehook_events e WHERE e.seq = ?1)), entity)
     WHERE event = ?1 AND route = ?2 AND epoch = ?3 AND attempt = ?4 - 1 AND state IN ('ready', 'retrying')";

#[cfg(not(feature = "planted"))]
fn settle_leased() -> &'static str {
    SETTLE_LEASED
}

/// With the mistake [`NoFence`](crate::planted::Bug::NoFence), any attempt settles.
#[cfg(feature = "planted")]
fn settle_leased() -> &'static str {
    match SETTLE_LEASED.split_once(" AND attempt = ?4") {
        Some((unfenced, _)) if crate::planted::has(crate::planted::Bug::NoFence) => unfenced,
        _ => SETTLE_LEASED,
    }
}

/// Ends an attempt. `false`: the fence is not the latest, and nothing was written.
pub(super) fn settle(
    connection: &Connection,
    fence: &Fence,
    held: Held,
    verdict: &Verdict,
    followups: &[RouteName],
    now: UnixMicros,
) -> Result<bool> {
    let DeliveryId { event, epoch, .. } = &fence.delivery;
    let outcome = outcome(held, verdict, followups);
    let sql = if held == Held::Lock { SETTLE_LOCKED } else { settle_leased() };
    let (run_at, settled_at) = (outcome.run_at.map(|at| at.0), outcome.run_at.is_none().then_some(now.0));
    let (state, cause) = (outcome.state.as_str(), outcome.cause.map(Cause::as_str));
    let (result, error, parked) = (&outcome.result, &outcome.error, outcome.state == DeliveryState::Parked);
    let row: [&dyn ToSql; 9] = [&state, &run_at, &settled_at, result, error, &cause, &outcome.counts, &parked, &now.0];
    if change_attempt(connection, sql, fence, &row)? == 0 {
        return Ok(false);
    }
    if let Some(end) = outcome.attempt {
        end_attempt(connection, fence, end.outcome, end.error, now)?;
    }
    enqueue(connection, *event, *epoch, outcome.followups, now)?;
    Ok(true)
}

/// Writes the end of an attempt. One that was not leased has no row yet.
fn end_attempt(
    connection: &Connection,
    fence: &Fence,
    outcome: &str,
    error: Option<&str>,
    now: UnixMicros,
) -> Result<usize> {
    change_attempt(
        connection,
        "INSERT INTO oncehook_attempts (event, route, epoch, attempt, started_at, finished_at, outcome, error)
         VALUES (?1, ?2, ?3, ?4, ?5, ?5, ?6, ?7)
         ON CONFLICT (event, route, epoch, attempt) DO UPDATE
            SET finished_at = excluded.finished_at, outcome = excluded.outcome, error = excluded.error",
        fence,
        &[&now.0, &outcome, &error],
    )
}

/// Prolongs a lease that is still held.
pub(super) fn renew(connection: &Connection, fence: &Fence, until: UnixMicros) -> Result<usize> {
    let sql = "UPDATE oncehook_deliveries SET lease_until = ?5
                WHERE event = ?1 AND route = ?2 AND epoch = ?3 AND attempt = ?4 AND state = 'running'";
    change_attempt(connection, sql, fence, &[&until.0])
}

/// Gives a lease back: due at once, the attempt's number stays, and one more attempt is granted in its place.
pub(super) fn give_back(connection: &Connection, fence: &Fence, now: UnixMicros) -> Result<()> {
    let given = change_attempt(
        connection,
        "UPDATE oncehook_deliveries
            SET state = CASE WHEN error IS NULL THEN 'ready' ELSE 'retrying' END, run_at = ?5, lease_until = NULL,
                attempt_limit = lease_limit + 1
          WHERE event = ?1 AND route = ?2 AND epoch = ?3 AND attempt = ?4 AND state = 'running'",
        fence,
        &[&now.0],
    )?;
    if given == 1 {
        end_attempt(connection, fence, "given_back", None, now)?;
    }
    Ok(())
}

/// Takes leases away that have run out. Each is an attempt that failed.
pub(super) fn reclaim(
    connection: &Connection,
    route: &Route,
    entities: &mut Entities,
    now: UnixMicros,
    chance: &mut Chance,
) -> Result<Vec<FailedAttempt>> {
    let expired: Vec<(Fence, u32)> = connection
        .prepare_cached(
            "SELECT e.id, d.epoch, d.attempt, d.attempt_limit
               FROM oncehook_deliveries d INDEXED BY oncehook_deliveries_leased
               JOIN oncehook_events e ON e.seq = d.event
              WHERE d.route = ?1 AND d.state = 'running' AND d.lease_until <= ?2 LIMIT 1000",
        )?
        .query_map(params![route.name.as_str(), now.0], |row| {
            let event = EventId::from_bytes(row.get(0)?);
            let delivery = DeliveryId { event, route: route.name.clone(), epoch: row.get(1)? };
            let limit = row.get::<_, Option<u32>>(3)?.unwrap_or(route.retry.max_attempts);
            Ok((Fence { delivery, attempt: row.get(2)? }, limit))
        })?
        .collect::<Result<_>>()?;
    let mut failed = Vec::with_capacity(expired.len());
    for (fence, limit) in expired {
        let verdict = route.after_lost_lease(fence.attempt, limit, now, chance.draw());
        failed.extend(FailedAttempt::of(fence.delivery.event, fence.attempt, limit, &verdict, now));
        entities.settle(connection, Held::LostLease, &fence, None, &verdict, &[])?;
    }
    Ok(failed)
}

/// When the next delivery of a route is due.
pub(super) fn next_due(connection: &Connection, route: &RouteName) -> Result<Option<UnixMicros>> {
    connection
        .prepare_cached(
            "SELECT min(run_at) FROM oncehook_deliveries INDEXED BY oncehook_deliveries_due
              WHERE route = ?1 AND state IN ('ready', 'retrying') AND run_at < ?2",
        )?
        .query_row(params![route.as_str(), NO_TIME.0], |row| row.get::<_, Option<i64>>(0))
        .map(|at| at.map(UnixMicros))
}

/// When the journal was made.
pub(super) fn mark(connection: &Connection) -> Result<i64> {
    let sql = "SELECT applied_at FROM oncehook_migrations ORDER BY name LIMIT 1";
    connection.query_row(sql, [], |row| row.get(0))
}

/// Those of these deliveries that are pending or dead.
pub(super) fn unsettled(connection: &Connection, deliveries: Vec<DeliveryId>) -> Result<Vec<DeliveryId>> {
    let mut statement = connection.prepare_cached(
        "SELECT 1 FROM oncehook_deliveries
          WHERE event = ?1 AND route = ?2 AND epoch = ?3 AND state NOT IN ('succeeded', 'superseded', 'skipped')",
    )?;
    let mut unsettled = Vec::new();
    for delivery in deliveries {
        if statement.exists(params![delivery.event.sequence(), delivery.route.as_str(), delivery.epoch])? {
            unsettled.push(delivery);
        }
    }
    Ok(unsettled)
}

/// What a new process makes of what an earlier one has left: no lease outlives the process that took it, because this is the
/// only one that may use the file; and what was due, or would be within a day, by a clock that has been set back since
/// does not wait for that clock.
///
/// What is settled is never looked at: a history of millions must not make the start longer.
pub(super) fn begin_anew(connection: &Connection, now: UnixMicros) -> Result<()> {
    connection.execute(
        "UPDATE oncehook_deliveries INDEXED BY oncehook_deliveries_leased SET lease_until = 0 WHERE state = 'running'",
        [],
    )?;
    let tomorrow = now.0.saturating_add(86_400 * 1_000_000);
    connection.execute(
        "UPDATE oncehook_deliveries INDEXED BY oncehook_deliveries_due SET run_at = iif(state = 'ready', ?1, ?2)
          WHERE state IN ('ready', 'retrying') AND run_at > iif(state = 'ready', ?1, ?2) AND run_at < ?3",
        [now.0, tomorrow, NO_TIME.0],
    )?;
    connection.execute(
        "UPDATE oncehook_deliveries INDEXED BY oncehook_deliveries_parked SET run_at = ?1
          WHERE state = 'parked' AND run_at > ?1 AND run_at < ?2",
        [tomorrow, NO_TIME.0],
    )?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::sqlite::schema;

    const HOUR: i64 = 3_600 * 1_000_000;
    const NOW: i64 = 1_000 * HOUR;

    #[test]
    fn after_a_clock_was_set_back_what_was_due_is_due_and_nothing_waits_longer_than_a_day() {
        let mut connection = Connection::open_in_memory().unwrap();
        schema::migrate(&mut connection, UnixMicros(0)).unwrap();
        let (soon, late) = (NOW + HOUR, NOW + 48 * HOUR);
        let (tomorrow, never) = (NOW + 24 * HOUR, NO_TIME.0);
        // When it was to run, and when it is to run now.
        let cases = [
            ("ready", NOW - HOUR, NOW - HOUR),
            ("ready", late, NOW),
            ("ready", never, never),
            ("retrying", soon, soon),
            ("retrying", late, tomorrow),
            ("parked", soon, soon),
            ("parked", late, tomorrow),
            ("parked", never, never),
            ("running", late, late),
            ("succeeded", late, late),
            ("dead", late, late),
        ];
        let mut insert = connection
            .prepare(
                "INSERT INTO oncehook_deliveries (event, route, state, run_at, lease_until) VALUES (?1, 'orders', ?2, ?3, ?4)",
            )
            .unwrap();
        for (event, (state, run_at, _)) in cases.iter().enumerate() {
            let lease = (*state == "running").then_some(late);
            insert.execute(params![i64::try_from(event).unwrap(), state, run_at, lease]).unwrap();
        }
        begin_anew(&connection, UnixMicros(NOW)).unwrap();
        let found: Vec<(i64, Option<i64>)> = connection
            .prepare("SELECT run_at, lease_until FROM oncehook_deliveries ORDER BY event")
            .unwrap()
            .query_map([], |row| Ok((row.get(0)?, row.get(1)?)))
            .unwrap()
            .collect::<Result<_>>()
            .unwrap();
        for ((state, before, after), (run_at, lease)) in cases.iter().zip(&found) {
            assert_eq!(run_at, after, "{state} at {before}");
            assert_eq!(*lease, (*state == "running").then_some(0), "{state}");
        }
    }
}
