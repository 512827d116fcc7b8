//! The queue of deliveries: the statements that take, settle and return them. Each runs inside a transaction of its caller.
//!
//! The fence stands in every statement that ends an attempt: event, route, epoch, state and attempt must be what the
//! claim said, or no row changes.

use bytes::Bytes;
use oncehook_verify::{EventKey, UnixMicros};
use rusqlite::{Connection, Row, params};

use super::lines;
use crate::delivery::{
    Cause, Columns, DeliveryId, DeliveryState, FailedAttempt, Failure, Fence, HandedEvent, RouteName, Verdict,
};
use crate::event::{EventId, SourceName};
use crate::ordering::NO_TIME;
use crate::planted::{self, Bug};
use crate::retry::Chance;
use crate::route::Route;

/// A delivery that is due.
#[derive(Clone)]
pub(super) struct Due {
    pub(super) event: HandedEvent,
    pub(super) epoch: u32,
    /// Attempts so far.
    pub(super) attempt: u32,
    pub(super) attempt_limit: u32,
    /// Since when it has waited for a prerequisite, if it has.
    pub(super) parked_at: Option<UnixMicros>,
    /// Whether it stands in the line of its entity.
    pub(super) in_line: bool,
}

impl Due {
    pub(super) fn id(&self, route: &Route) -> DeliveryId {
        DeliveryId { event: self.event.id, route: route.name.clone(), epoch: self.epoch }
    }
}

/// Bodies of this many bytes are read at once at most, and at least one.
const DUE_BYTES: usize = 8 << 20;

/// Deliveries of a route that are due, the longest due first, and whether there may be more.
pub(super) fn due(
    connection: &Connection,
    route: &Route,
    now: UnixMicros,
    limit: usize,
) -> Result<(Vec<Due>, bool), rusqlite::Error> {
    // The index is named: without it this would walk all deliveries there ever were.
    let mut statement = connection.prepare_cached(
        "SELECT d.epoch, d.attempt, d.attempt_limit,
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
        let event = handed(row, route, 3)?;
        bytes += event.body.len();
        due.push(Due {
            epoch: row.get(0)?,
            attempt: row.get(1)?,
            attempt_limit: row.get::<_, Option<u32>>(2)?.unwrap_or(route.retry.max_attempts),
            parked_at: row.get::<_, Option<i64>>(14)?.map(UnixMicros),
            in_line: row.get(15)?,
            event,
        });
    }
    let more = due.len() == limit || bytes >= DUE_BYTES;
    Ok((due, more))
}

/// An event from the columns `id … body, result, version` that begin at `first`.
fn handed(row: &Row<'_>, route: &Route, first: usize) -> Result<HandedEvent, rusqlite::Error> {
    let source = row.get_ref(first + 1)?.as_str()?;
    let key = row.get_ref(first + 2)?.as_blob()?;
    Ok(HandedEvent {
        id: EventId::from_bytes(row.get(first)?),
        source: if source == route.source.as_str() {
            route.source.clone()
        } else {
            // The route was given another source since. The event keeps its own.
            SourceName::new(source).map_err(|_| rusqlite::Error::InvalidQuery)?
        },
        key: EventKey::from_bytes(key).ok_or(rusqlite::Error::InvalidQuery)?,
        kind: row.get(first + 3)?,
        entity: row.get(first + 4)?,
        occurred_at: row.get::<_, Option<i64>>(first + 5)?.map(UnixMicros),
        received_at: UnixMicros(row.get(first + 6)?),
        headers: Bytes::from(row.get::<_, Vec<u8>>(first + 7)?),
        body: Bytes::from(row.get::<_, Vec<u8>>(first + 8)?),
        result: row.get(first + 9)?,
        version: row.get(first + 10)?,
        state: None,
        current: None,
    })
}

/// Makes deliveries that are due at once. Those that exist stay as they are. If others of the event stand in the line of its
/// entity, these do too.
pub(super) fn enqueue<'r>(
    connection: &Connection,
    event: EventId,
    epoch: u32,
    routes: impl IntoIterator<Item = &'r RouteName>,
    now: UnixMicros,
) -> Result<Vec<RouteName>, rusqlite::Error> {
    let mut made = Vec::new();
    for route in routes {
        let inserted = connection
            .prepare_cached(
                "INSERT INTO oncehook_deliveries (event, route, epoch, state, run_at, entity, version)
                 SELECT ?1, ?2, ?3, 'ready', ?4,
                        (SELECT entity FROM oncehook_deliveries WHERE event = ?1 AND entity IS NOT NULL LIMIT 1),
                        (SELECT version FROM oncehook_deliveries WHERE event = ?1 AND entity IS NOT NULL LIMIT 1)
                  WHERE true
                 ON CONFLICT (event, route, epoch) DO NOTHING",
            )?
            .execute(params![event.sequence(), route.as_str(), epoch, now.0])?;
        if inserted == 1 {
            made.push(route.clone());
        }
    }
    Ok(made)
}

/// Leases a delivery for its next attempt, and writes the attempt down before it begins.
pub(super) fn lease(
    connection: &Connection,
    fence: &Fence,
    limit: u32,
    now: UnixMicros,
    until: UnixMicros,
) -> Result<bool, rusqlite::Error> {
    let DeliveryId { event, route, epoch } = &fence.delivery;
    let leased = connection
        .prepare_cached(
            "UPDATE oncehook_deliveries SET state = 'running', attempt = ?4, lease_until = ?5, lease_limit = ?6,
                    blocked_at = NULL
              WHERE event = ?1 AND route = ?2 AND epoch = ?3 AND state IN ('ready', 'retrying') AND attempt = ?4 - 1",
        )?
        .execute(params![event.sequence(), route.as_str(), epoch, fence.attempt, until.0, limit])?;
    if leased == 1 {
        connection
            .prepare_cached(
                "INSERT INTO oncehook_attempts (event, route, epoch, attempt, started_at) VALUES (?1, ?2, ?3, ?4, ?5)",
            )?
            .execute(params![event.sequence(), route.as_str(), epoch, fence.attempt, now.0])?;
    }
    Ok(leased == 1)
}

/// Whether an attempt to be settled was leased, or ran inside the transaction that settles it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Held {
    /// Leased: the delivery is `running` and its attempt has the fence's number.
    Lease,
    /// Not leased: the delivery is due, and the fence's number is the next one.
    Lock,
}

/// Ends an attempt. `false`: the fence is not the latest, and nothing was written.
pub(super) fn settle(
    connection: &Connection,
    fence: &Fence,
    held: Held,
    verdict: &Verdict,
    followups: &[RouteName],
    now: UnixMicros,
) -> Result<bool, rusqlite::Error> {
    let DeliveryId { event, route, epoch } = &fence.delivery;
    let Columns { state, run_at, result, error, cause } = verdict.columns();
    let parked = state == DeliveryState::Parked;
    // One statement for each way of holding it: the fence is part of both.
    let sql = match held {
        Held::Lease if planted::has(Bug::NoFence) => {
            "UPDATE oncehook_deliveries
                SET state = ?5, run_at = coalesce(?6, run_at), lease_until = NULL, settled_at = ?7, result = ?8,
                    error = ?9, cause = ?10
              WHERE event = ?1 AND route = ?2 AND epoch = ?3 AND ?4 > 0 AND (?11 OR ?12 OR ?13)"
        }
        Held::Lease => {
            "UPDATE oncehook_deliveries
                SET state = ?5, run_at = coalesce(?6, run_at), lease_until = NULL, settled_at = ?7, result = ?8,
                    error = ?9, cause = ?10, blocked_at = NULL, parked_at = iif(?12, coalesce(parked_at, ?13), NULL),
                    entity = iif(?12, coalesce(entity, (SELECT e.entity FROM oncehook_events e WHERE e.seq = ?1)), entity),
                    attempt_limit = iif(?11, attempt_limit, lease_limit + 1)
              WHERE event = ?1 AND route = ?2 AND epoch = ?3 AND attempt = ?4 AND state = 'running'"
        }
        Held::Lock => {
            "UPDATE oncehook_deliveries
                SET state = ?5, attempt = iif(?11, ?4, attempt), run_at = coalesce(?6, run_at), settled_at = ?7, result = ?8,
                    error = ?9, cause = ?10, blocked_at = NULL, parked_at = iif(?12, coalesce(parked_at, ?13), NULL),
                    entity = iif(?12, coalesce(entity, (SELECT e.entity FROM oncehook_events e WHERE e.seq = ?1)), entity)
              WHERE event = ?1 AND route = ?2 AND epoch = ?3 AND attempt = ?4 - 1 AND state IN ('ready', 'retrying')"
        }
    };
    let settled = connection.prepare_cached(sql)?.execute(params![
        event.sequence(),
        route.as_str(),
        epoch,
        fence.attempt,
        state.as_str(),
        run_at.map(|at| at.0),
        run_at.is_none().then_some(now.0),
        result,
        error,
        cause.map(Cause::as_str),
        verdict.is_attempt(),
        parked,
        now.0,
    ])?;
    if settled == 0 {
        return Ok(false);
    }
    let succeeded = matches!(verdict, Verdict::Succeeded(_));
    let outcome = match verdict {
        Verdict::Succeeded(_) => "succeeded",
        Verdict::RetryAt(..) | Verdict::Dead(_) => "failed",
        Verdict::Parked(..) | Verdict::Superseded(_) => "given_back",
    };
    match held {
        Held::Lease => {
            let error = error.filter(|_| !matches!(verdict, Verdict::Superseded(_)));
            end_attempt(connection, fence, outcome, error, now)?;
        }
        // A success that was never leased stands in the delivery itself; what was put off is no attempt.
        Held::Lock if verdict.is_attempt() && !succeeded => {
            connection
                .prepare_cached(
                    "INSERT INTO oncehook_attempts (event, route, epoch, attempt, started_at, finished_at, outcome, error)
                     VALUES (?1, ?2, ?3, ?4, ?5, ?5, ?6, ?7)",
                )?
                .execute(params![event.sequence(), route.as_str(), epoch, fence.attempt, now.0, outcome, error])?;
        }
        Held::Lock => {}
    }
    if succeeded && !followups.is_empty() {
        enqueue(connection, *event, *epoch, followups, now)?;
    }
    Ok(true)
}

fn end_attempt(
    connection: &Connection,
    fence: &Fence,
    outcome: &str,
    error: Option<&str>,
    now: UnixMicros,
) -> Result<(), rusqlite::Error> {
    let DeliveryId { event, route, epoch } = &fence.delivery;
    connection
        .prepare_cached(
            "UPDATE oncehook_attempts SET finished_at = ?5, outcome = ?6, error = ?7
              WHERE event = ?1 AND route = ?2 AND epoch = ?3 AND attempt = ?4",
        )?
        .execute(params![event.sequence(), route.as_str(), epoch, fence.attempt, now.0, outcome, error])?;
    Ok(())
}

/// Prolongs a lease that is still held.
pub(super) fn renew(connection: &Connection, fence: &Fence, until: UnixMicros) -> Result<(), rusqlite::Error> {
    let DeliveryId { event, route, epoch } = &fence.delivery;
    connection
        .prepare_cached(
            "UPDATE oncehook_deliveries SET lease_until = ?5
              WHERE event = ?1 AND route = ?2 AND epoch = ?3 AND attempt = ?4 AND state = 'running'",
        )?
        .execute(params![event.sequence(), route.as_str(), epoch, fence.attempt, until.0])?;
    Ok(())
}

/// Gives a lease back: due at once, the attempt's number stays, and one more attempt is granted in its place.
pub(super) fn give_back(connection: &Connection, fence: &Fence, now: UnixMicros) -> Result<bool, rusqlite::Error> {
    let DeliveryId { event, route, epoch } = &fence.delivery;
    let given = connection
        .prepare_cached(
            "UPDATE oncehook_deliveries
                SET state = CASE WHEN error IS NULL THEN 'ready' ELSE 'retrying' END, run_at = ?5, lease_until = NULL,
                    attempt_limit = lease_limit + 1
              WHERE event = ?1 AND route = ?2 AND epoch = ?3 AND attempt = ?4 AND state = 'running'",
        )?
        .execute(params![event.sequence(), route.as_str(), epoch, fence.attempt, now.0])?;
    if given == 1 {
        end_attempt(connection, fence, "given_back", None, now)?;
    }
    Ok(given == 1)
}

/// Takes leases away that have run out. Each is an attempt that failed.
pub(super) fn reclaim(
    connection: &Connection,
    route: &Route,
    now: UnixMicros,
    chance: &mut Chance,
) -> Result<Vec<FailedAttempt>, rusqlite::Error> {
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
        .collect::<Result<_, _>>()?;
    let waiting = lines::waiting(connection, &route.name)?;
    let mut failed = Vec::with_capacity(expired.len());
    for (fence, limit) in &expired {
        let message = Failure::never_ended().message;
        let verdict = route.after_lost_lease(fence.attempt, *limit, now, chance.draw());
        settle(connection, fence, Held::Lease, &verdict, &[], now)?;
        let serial = route.ordering.is_serial().then_some(route);
        lines::after_lease(connection, serial, &fence.delivery, &verdict, waiting, now)?;
        end_attempt(connection, fence, "lost", Some(&message), now)?;
        failed.extend(FailedAttempt::of(fence.delivery.event, fence.attempt, *limit, &verdict, now));
    }
    Ok(failed)
}

/// When the next delivery of a route is due.
pub(super) fn next_due(connection: &Connection, route: &RouteName) -> Result<Option<UnixMicros>, rusqlite::Error> {
    connection
        .prepare_cached(
            "SELECT min(run_at) FROM oncehook_deliveries INDEXED BY oncehook_deliveries_due
              WHERE route = ?1 AND state IN ('ready', 'retrying') AND run_at < ?2",
        )?
        .query_row(params![route.as_str(), NO_TIME.0], |row| row.get::<_, Option<i64>>(0))
        .map(|at| at.map(UnixMicros))
}

/// When the journal was made.
pub(super) fn mark(connection: &Connection) -> Result<i64, rusqlite::Error> {
    let sql = "SELECT applied_at FROM oncehook_migrations ORDER BY name LIMIT 1";
    connection.query_row(sql, [], |row| row.get(0))
}

/// Those of these deliveries that are pending or dead.
pub(super) fn unsettled(
    connection: &Connection,
    deliveries: Vec<DeliveryId>,
) -> Result<Vec<DeliveryId>, rusqlite::Error> {
    let mut statement = connection.prepare_cached(
        "SELECT count(*) FROM oncehook_deliveries
          WHERE event = ?1 AND route = ?2 AND epoch = ?3 AND state NOT IN ('succeeded', 'superseded', 'skipped')",
    )?;
    let mut unsettled = Vec::new();
    for delivery in deliveries {
        let key = params![delivery.event.sequence(), delivery.route.as_str(), delivery.epoch];
        if statement.query_row(key, |row| row.get::<_, i64>(0))? > 0 {
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
pub(super) fn begin_anew(connection: &Connection, now: UnixMicros) -> Result<(), rusqlite::Error> {
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
            .collect::<Result<_, _>>()
            .unwrap();
        for ((state, before, after), (run_at, lease)) in cases.iter().zip(&found) {
            assert_eq!(run_at, after, "{state} at {before}");
            assert_eq!(*lease, (*state == "running").then_some(0), "{state}");
        }
    }
}
