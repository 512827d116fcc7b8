//! The queue of deliveries: the statements that take, settle and return them. Each is atomic by itself.
//!
//! The fence stands in every statement that ends an attempt: event, route, epoch, state and attempt must be what the
//! claim said, or no row changes. What is locked by somebody else is passed over, never waited for.
//!
//! Where a statement names the rows by their keys, it asks for `state || ''`: the indexes of the queues hold rows in certain
//! states, and for the bare column the planner would search one of those from end to end instead of looking a key up.
//!
//! Events are looked up one by one (`LATERAL … LIMIT 1`): their day is found by the id. For a plain join the planner counts the
//! price of all days for every row, and rather reads all of them.
//!
//! `(SELECT …micros())` in a list of columns is evaluated once and not for every row.
//!
//! Leases, due times and ages are of the database's clock, so nodes need not agree about the time: waits come in as
//! durations and are added there.

use bytes::Bytes;
use oncehook_verify::{EventKey, UnixMicros};
use tokio_postgres::Row;
use uuid::Uuid;

use super::connection::{EngineError, Session};
use super::front::Fronts;
use super::lines::{self, Came, Peeked};
use super::queries::{event_id, uuid};
use super::settle::{Ended, Held, settle};
use super::turn::One;
use crate::delivery::{DeliveryId, FailedAttempt, Fence, HandedEvent, RouteName, Verdict};
use crate::event::{EventId, SourceName};
use crate::ordering::{Candidate, Mark, NO_TIME, Place};
use crate::retry::Chance;
use crate::route::Route;

/// A delivery that is due.
pub(super) struct Due {
    pub(super) event: HandedEvent,
    pub(super) epoch: u32,
    /// Attempts so far.
    pub(super) attempt: u32,
    pub(super) attempt_limit: u32,
    /// Since when it has waited for a prerequisite, if it has.
    pub(super) parked_at: Option<UnixMicros>,
    /// Whether it stands in the line of its entity, and whether that is locked with it.
    in_line: bool,
    line_locked: bool,
}

impl Due {
    pub(super) fn id(&self, route: &Route) -> DeliveryId {
        DeliveryId { event: self.event.id, route: route.name.clone(), epoch: self.epoch }
    }

    pub(super) fn one(&self) -> One {
        (self.event.id, self.epoch, self.attempt)
    }

    /// As the rules see it.
    pub(super) fn peeked(&self) -> Peeked {
        let event = &self.event;
        Peeked {
            candidate: Candidate {
                entity: event.entity.clone(),
                place: Place { version: event.version, event: event.id, epoch: self.epoch },
                mark: Mark { version: event.version, at: event.occurred_at },
                kind: event.kind.clone(),
            },
            attempt: self.attempt,
            parked_at: self.parked_at,
            in_line: self.in_line,
            locked: self.line_locked,
        }
    }
}

/// When deliveries that run inside the transaction are settled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Settling {
    /// Those that never failed by the statement that locks them, as succeeded. If they do not succeed, the transaction is undone.
    Ahead,
    /// When it is known what came of them.
    Afterwards,
}

/// Deliveries that are locked until the transaction ends.
pub(super) struct Locked {
    /// As many as may be in memory at once.
    pub(super) due: Vec<Due>,
    /// How many are locked.
    pub(super) count: usize,
    /// How many are settled already.
    pub(super) ahead: usize,
    /// The transaction's time.
    pub(super) now: UnixMicros,
    /// Since when the first has been due.
    pub(super) first: Option<i64>,
}

/// A number that a column of ours holds: never negative.
pub(super) fn number(column: i32) -> u32 {
    column.unsigned_abs()
}

pub(super) fn int(number: u32) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}

/// Which deliveries are looked for.
pub(super) enum Wanted {
    /// Those that are due, from this due time on.
    From(i64),
    /// Just this one, if it is still due with that attempt.
    Only(One),
}

/// Deliveries of a route that are due, the longest due first, locked until the transaction ends.
pub(super) async fn due(
    session: &Session,
    given: Option<i64>,
    route: &Route,
    limit: usize,
    settling: Settling,
    wanted: Wanted,
) -> Result<Locked, EngineError> {
    let after = route.after.as_ref().map(RouteName::as_str);
    let rows = match wanted {
        Wanted::From(from) => {
            let sql = due_sql(route, limit, settling);
            session.rows(&sql, &[&given, &route.name.as_str(), &after, &from]).await?
        }
        Wanted::Only((event, epoch, attempt)) => {
            let sql = "SELECT d.epoch, d.attempt, d.attempt_limit,
                    e.id, e.source, e.key, e.type, e.entity, e.occurred_at, e.received_at, e.headers, e.body,
                    (SELECT p.result FROM oncehook.deliveries p
                      WHERE p.event = d.event AND p.route = $3 AND p.epoch <= d.epoch AND p.state = 'succeeded'
                      ORDER BY p.epoch DESC LIMIT 1),
                    coalesce($1::bigint, oncehook.micros()), 1::bigint, e.version, d.parked_at,
                    d.entity IS NOT NULL, false, 0::bigint, d.run_at
               FROM oncehook.deliveries d
               JOIN oncehook.events e ON e.id = d.event
              WHERE d.event = $4 AND d.route = $2 AND d.epoch = $5 AND d.attempt = $6 AND (d.state || '') IN ('ready', 'retrying')
                FOR UPDATE OF d SKIP LOCKED";
            let (event, epoch, attempt) = (uuid(event), int(epoch), int(attempt));
            session.rows(sql, &[&given, &route.name.as_str(), &after, &event, &epoch, &attempt]).await?
        }
    };
    let now = UnixMicros(rows.first().map_or(0, |row| row.get(13)));
    let locked = rows.first().map_or(0, |row| row.get::<_, i64>(14));
    let due: Vec<Due> = rows.iter().map(|row| due_from(row, route)).collect::<Result<_, EngineError>>()?;
    let ahead = rows.first().map_or(0, |row| row.get::<_, i64>(19));
    let count = |count: i64| usize::try_from(count).unwrap_or(0);
    let first = rows.first().map(|row| row.get(20));
    Ok(Locked { due, count: count(locked), ahead: count(ahead), now, first })
}

/// The statement that locks what is due and reads it.
///
/// Bodies are weighed before they are read: many big ones at once would fill the memory. The limit stands in the text: a plan for
/// any limit would be one for a tenth of the queue.
fn due_sql(route: &Route, limit: usize, settling: Settling) -> String {
    let (line, free, locked) = if route.ordering.is_serial() {
        (lines::LINE, lines::FREE_LINE, "line.entity IS NOT NULL")
    } else {
        ("", "", "false")
    };
    let (ahead, count) = match settling {
        Settling::Afterwards => ("", "0::bigint"),
        Settling::Ahead => (AHEAD, "(SELECT count(*) FROM ahead)"),
    };
    format!(
        "WITH due AS MATERIALIZED (
           SELECT d.ctid AS place, d.event, d.epoch, d.attempt, d.attempt_limit, d.run_at, d.parked_at,
                  d.entity IS NOT NULL AS in_line, {locked} AS locked
             FROM oncehook.deliveries d {line}
            WHERE d.route = $2 AND d.state IN ('ready', 'retrying')
              AND d.run_at BETWEEN $4 AND coalesce($1::bigint, oncehook.micros()) {free}
            ORDER BY d.run_at, d.event, d.epoch LIMIT {limit}
              FOR UPDATE OF d SKIP LOCKED
         ), weighed AS (
           SELECT d.*, e.version, e.source, e.key, e.type, e.entity, e.occurred_at, e.received_at, e.headers, e.body,
                  sum(octet_length(e.body)) OVER (ORDER BY d.run_at, d.event, d.epoch ROWS UNBOUNDED PRECEDING)
                    - octet_length(e.body) AS before
             FROM due d CROSS JOIN LATERAL (SELECT * FROM oncehook.events WHERE id = d.event LIMIT 1) e
         ){ahead}
         SELECT d.epoch, d.attempt, d.attempt_limit,
                d.event, d.source, d.key, d.type, d.entity, d.occurred_at, d.received_at, d.headers, d.body,
                -- A follow-up that is forced alone knows the result of the epoch before.
                CASE WHEN $3::text IS NOT NULL THEN (SELECT p.result FROM oncehook.deliveries p
                  WHERE p.event = d.event AND p.route = $3 AND p.epoch <= d.epoch AND p.state = 'succeeded'
                  ORDER BY p.epoch DESC LIMIT 1) END,
                (SELECT coalesce($1::bigint, oncehook.micros())), (SELECT count(*) FROM due), d.version, d.parked_at,
                d.in_line, d.locked, {count}, d.run_at
           FROM weighed d WHERE d.before < 8388608
          ORDER BY d.run_at, d.event, d.epoch"
    )
}

/// Settles what is due as succeeded. The rows are locked by the same statement, so their places are theirs; one that moved while it was
/// being locked is not found, and the count tells.
const AHEAD: &str = ", ahead AS (
           UPDATE oncehook.deliveries d
              SET state = 'succeeded', attempt = 1, settled_at = (SELECT coalesce($1::bigint, oncehook.micros())), result = NULL,
                  error = NULL, cause = NULL, blocked_at = NULL, parked_at = NULL
             FROM weighed w WHERE d.ctid = w.place AND w.attempt = 0 AND w.before < 8388608
           RETURNING 1
         )";

fn due_from(row: &Row, route: &Route) -> Result<Due, EngineError> {
    let mut event = handed(row, route, 3)?;
    event.version = row.get(15);
    Ok(Due {
        epoch: number(row.get(0)),
        attempt: number(row.get(1)),
        attempt_limit: row.get::<_, Option<i32>>(2).map_or(route.retry.max_attempts, number),
        parked_at: row.get::<_, Option<i64>>(16).map(UnixMicros),
        in_line: row.get(17),
        line_locked: row.get(18),
        event,
    })
}

/// An event from the columns `id … body, result` that begin at `first`.
fn handed(row: &Row, route: &Route, first: usize) -> Result<HandedEvent, EngineError> {
    let damaged = || EngineError::other("an event in the journal is damaged");
    let source: &str = row.get(first + 1);
    Ok(HandedEvent {
        id: event_id(row.get(first)),
        source: if source == route.source.as_str() {
            route.source.clone()
        } else {
            // The route was given another source since. The event keeps its own.
            SourceName::new(source).map_err(|_| damaged())?
        },
        key: EventKey::from_bytes(row.get(first + 2)).ok_or_else(damaged)?,
        kind: row.get(first + 3),
        entity: row.get(first + 4),
        occurred_at: row.get::<_, Option<i64>>(first + 5).map(UnixMicros),
        received_at: UnixMicros(row.get(first + 6)),
        headers: Bytes::copy_from_slice(row.get(first + 7)),
        body: Bytes::copy_from_slice(row.get(first + 8)),
        result: row.get(first + 9),
        version: None,
        state: None,
        current: None,
    })
}

/// Makes deliveries that are due at once. Those that exist stay as they are. If others of the event stand in the line of its
/// entity, these do too.
pub(super) async fn enqueue<'r>(
    session: &Session,
    given: Option<i64>,
    event: EventId,
    epoch: u32,
    routes: impl IntoIterator<Item = &'r RouteName>,
) -> Result<Vec<RouteName>, EngineError> {
    let routes: Vec<&str> = routes.into_iter().map(RouteName::as_str).collect();
    let made = session
        .rows(
            "INSERT INTO oncehook.deliveries (event, route, epoch, state, run_at, entity, version)
             SELECT $2, r.route, $3, 'ready', coalesce($1::bigint, oncehook.micros()), l.entity, l.version
               FROM unnest($4::text[]) AS r(route)
               LEFT JOIN (SELECT entity, version FROM oncehook.deliveries
                           WHERE event = $2 AND entity IS NOT NULL LIMIT 1) l ON true
             ON CONFLICT (event, route, epoch) DO NOTHING
             RETURNING route",
            &[&given, &uuid(event), &int(epoch), &routes],
        )
        .await?;
    made.iter().map(|row| route_name(row.get(0))).collect()
}

pub(super) fn route_name(text: &str) -> Result<RouteName, EngineError> {
    RouteName::new(text).map_err(|_| EngineError::other("a route's name in the journal is damaged"))
}

/// A delivery that was leased for its next attempt.
pub(super) struct Leased {
    pub(super) fence: Fence,
    pub(super) attempt_limit: u32,
    pub(super) parked_at: Option<UnixMicros>,
    pub(super) event: HandedEvent,
    run_at: i64,
}

/// Leases what is due.
pub(super) async fn lease_due(
    session: &Session,
    given: Option<i64>,
    fronts: &Fronts,
    route: &Route,
    limit: usize,
    time: i64,
) -> Result<Vec<Leased>, EngineError> {
    loop {
        let from = fronts.of(&route.name);
        let leased = lease(session, given, route, limit, time, Choice::From(from)).await?;
        let first = leased.first().map(|leased| leased.run_at);
        let unseen = fronts.found(&route.name, from, first, leased.len() == limit);
        if !(leased.is_empty() && unseen) {
            return Ok(leased);
        }
    }
}

/// Which deliveries are leased.
pub(super) enum Choice<'c> {
    /// Those that are due, from this due time on.
    From(i64),
    /// These, which the transaction has locked.
    These(&'c [(Place, Option<String>)]),
}

/// Leases deliveries, and writes the attempts down before they begin.
pub(super) async fn lease(
    session: &Session,
    given: Option<i64>,
    route: &Route,
    limit: usize,
    time: i64,
    choice: Choice<'_>,
) -> Result<Vec<Leased>, EngineError> {
    let after = route.after.as_ref().map(RouteName::as_str);
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let (due, from, chosen): (_, _, &[_]) = match choice {
        Choice::These(chosen) => (
            "SELECT event, epoch FROM unnest($7::uuid[], $8::integer[]) AS t(event, epoch) WHERE $9::bigint IS NULL LIMIT $4",
            None,
            chosen,
        ),
        Choice::From(from) => (
            "SELECT d.event, d.epoch FROM oncehook.deliveries d
                WHERE d.route = $2 AND d.state IN ('ready', 'retrying')
                  AND d.run_at BETWEEN $9::bigint AND coalesce($1::bigint, oncehook.micros())
                  AND $7::uuid[] IS NOT NULL AND $8::integer[] IS NOT NULL
                ORDER BY d.run_at, d.event, d.epoch LIMIT $4
                  FOR UPDATE SKIP LOCKED",
            Some(from),
            &[],
        ),
    };
    let (events, epochs): (Vec<Uuid>, Vec<i32>) =
        chosen.iter().map(|(place, _)| (uuid(place.event), int(place.epoch))).unzip();
    let rows = session
        .rows(
            &format!("WITH due AS MATERIALIZED (
               {due}
             ), leased AS (
               UPDATE oncehook.deliveries d
                  SET state = 'running', attempt = d.attempt + 1, lease_until = coalesce($1::bigint, oncehook.micros()) + $5,
                      lease_limit = coalesce(d.attempt_limit, $6), blocked_at = NULL
                 FROM due WHERE d.event = due.event AND d.route = $2 AND d.epoch = due.epoch
               RETURNING d.event, d.epoch, d.attempt, d.lease_limit, d.run_at, d.parked_at
             ), begun AS (
               INSERT INTO oncehook.attempts (event, route, epoch, attempt, started_at)
               SELECT event, $2, epoch, attempt, coalesce($1::bigint, oncehook.micros()) FROM leased
             )
             SELECT l.epoch, l.attempt, l.lease_limit,
                    e.id, e.source, e.key, e.type, e.entity, e.occurred_at, e.received_at, e.headers, e.body,
                    -- A follow-up that is forced alone knows the result of the epoch before.
                    (SELECT p.result FROM oncehook.deliveries p
                      WHERE p.event = l.event AND p.route = $3 AND p.epoch <= l.epoch AND p.state = 'succeeded'
                      ORDER BY p.epoch DESC LIMIT 1), e.version, l.parked_at, l.run_at
               FROM leased l CROSS JOIN LATERAL (SELECT * FROM oncehook.events WHERE id = l.event LIMIT 1) e
              ORDER BY l.run_at, l.event, l.epoch"),
            &[
                &given,
                &route.name.as_str(),
                &after,
                &limit,
                &time,
                &int(route.retry.max_attempts),
                &events,
                &epochs,
                &from,
            ],
        )
        .await?;
    rows.iter()
        .map(|row| {
            let mut event = handed(row, route, 3)?;
            let epoch = number(row.get(0));
            let is_it = |(place, _): &&(Place, _)| place.event == event.id && place.epoch == epoch;
            let state = chosen.iter().find(is_it).and_then(|(_, state)| state.clone());
            (event.version, event.state) = (row.get(13), state);
            let delivery = DeliveryId { event: event.id, route: route.name.clone(), epoch };
            let fence = Fence { delivery, attempt: number(row.get(1)) };
            let parked_at = row.get::<_, Option<i64>>(14).map(UnixMicros);
            Ok(Leased { fence, attempt_limit: number(row.get(2)), parked_at, event, run_at: row.get(15) })
        })
        .collect()
}

/// Text as the database takes it: it has no zero characters.
pub(super) fn text(text: &str) -> String {
    text.replace('\0', "\u{fffd}")
}

/// Fences as columns.
pub(super) struct Fences<'f> {
    pub(super) events: Vec<Uuid>,
    pub(super) routes: Vec<&'f str>,
    pub(super) epochs: Vec<i32>,
    pub(super) attempts: Vec<i32>,
}

impl<'f> Fences<'f> {
    pub(super) fn of(fences: impl IntoIterator<Item = &'f Fence>) -> Self {
        let mut columns =
            Self { events: Vec::new(), routes: Vec::new(), epochs: Vec::new(), attempts: Vec::new() };
        for fence in fences {
            columns.events.push(uuid(fence.delivery.event));
            columns.routes.push(fence.delivery.route.as_str());
            columns.epochs.push(int(fence.delivery.epoch));
            columns.attempts.push(int(fence.attempt));
        }
        columns
    }
}

/// Prolongs leases that are still held.
pub(super) async fn renew(
    session: &Session,
    given: Option<i64>,
    fences: &[Fence],
    lease: i64,
) -> Result<(), EngineError> {
    let fences = Fences::of(fences);
    session
        .change(
            "UPDATE oncehook.deliveries d SET lease_until = coalesce($1::bigint, oncehook.micros()) + $6
               FROM unnest($2::uuid[], $3::text[], $4::integer[], $5::integer[]) AS t(event, route, epoch, attempt)
              WHERE d.event = t.event AND d.route = t.route AND d.epoch = t.epoch AND d.attempt = t.attempt
                AND (d.state || '') = 'running'",
            &[&given, &fences.events, &fences.routes, &fences.epochs, &fences.attempts, &lease],
        )
        .await?;
    Ok(())
}

/// Gives leases back: due at once, the attempt's number stays, and one more attempt is granted in its place.
pub(super) async fn give_back(
    session: &Session,
    given: Option<i64>,
    fences: &[Fence],
) -> Result<(), EngineError> {
    let fences = Fences::of(fences);
    session
        .change(
            "WITH given AS (
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
            &[&given, &fences.events, &fences.routes, &fences.epochs, &fences.attempts],
        )
        .await?;
    Ok(())
}

/// Takes leases away that have run out, in one transaction. Each is an attempt that failed.
pub(super) async fn reclaim(
    session: &Session,
    given: Option<i64>,
    route: &Route,
    mut draw: impl FnMut() -> f64,
) -> Result<Vec<FailedAttempt>, EngineError> {
    session.run("BEGIN").await?;
    let serial = route.ordering.is_serial();
    if serial {
        // The lines first, as everybody does who settles.
        let entities = session
            .rows(
                "SELECT DISTINCT d.entity FROM oncehook.deliveries d
                  WHERE d.route = $2 AND d.state = 'running' AND d.lease_until <= coalesce($1::bigint, oncehook.micros())
                    AND d.entity IS NOT NULL",
                &[&given, &route.name.as_str()],
            )
            .await?;
        lines::lock(session, &route.name, &entities.iter().map(|row| row.get(0)).collect()).await?;
    }
    let rows = session
        .rows(
            "SELECT d.event, d.epoch, d.attempt, d.attempt_limit, coalesce($1::bigint, oncehook.micros())
               FROM oncehook.deliveries d
              WHERE d.route = $2 AND d.state = 'running' AND d.lease_until <= coalesce($1::bigint, oncehook.micros())
              LIMIT 1000 FOR UPDATE SKIP LOCKED",
            &[&given, &route.name.as_str()],
        )
        .await?;
    let now = UnixMicros(rows.first().map_or(0, |row| row.get(4)));
    let mut failed = Vec::with_capacity(rows.len());
    let expired: Vec<(Fence, Verdict)> = rows
        .iter()
        .map(|row| {
            let delivery = DeliveryId {
                event: event_id(row.get(0)),
                route: route.name.clone(),
                epoch: number(row.get(1)),
            };
            let fence = Fence { delivery, attempt: number(row.get(2)) };
            let limit = row.get::<_, Option<i32>>(3).map_or(route.retry.max_attempts, number);
            let verdict = route.after_lost_lease(fence.attempt, limit, now, draw());
            failed.extend(FailedAttempt::of(fence.delivery.event, fence.attempt, limit, &verdict, now));
            (fence, verdict)
        })
        .collect();
    if !expired.is_empty() {
        let ended: Vec<_> =
            expired.iter().map(|(fence, verdict)| Ended { fence, verdict, followups: &[] }).collect();
        settle(session, given, now, Held::LostLease, &ended).await?;
        if serial {
            let fences: Vec<&Fence> = expired.iter().map(|(fence, _)| fence).collect();
            let about = lines::about(session, &fences).await?;
            let came: Vec<Came<'_>> = expired
                .iter()
                .filter_map(|(fence, verdict)| Some(about.get(&fence.delivery.event)?.came(verdict)))
                .collect();
            lines::after(session, given, route, &came).await?;
        }
    }
    session.run("COMMIT").await?;
    Ok(failed)
}

/// How long until the next delivery of a route is due, in microseconds; negative if one is due already.
pub(super) async fn next_due(
    session: &Session,
    given: Option<i64>,
    route: &RouteName,
) -> Result<Option<i64>, EngineError> {
    let row = session
        .row(
            "SELECT min(run_at) - coalesce($1::bigint, oncehook.micros()) FROM oncehook.deliveries
              WHERE route = $2 AND state IN ('ready', 'retrying') AND run_at < $3",
            &[&given, &route.as_str(), &NO_TIME.0],
        )
        .await?;
    Ok(row.and_then(|row| row.get(0)))
}

/// When the journal was made.
pub(super) async fn mark(session: &Session) -> Result<i64, EngineError> {
    let sql = "SELECT applied_at FROM oncehook.migrations ORDER BY name LIMIT 1";
    let made = session.row(sql, &[]).await?;
    made.map(|row| row.get(0)).ok_or_else(|| EngineError::other("the journal does not know when it was made"))
}

/// Those of these deliveries that are pending or dead.
pub(super) async fn unsettled(
    session: &Session,
    deliveries: &[DeliveryId],
) -> Result<Vec<DeliveryId>, EngineError> {
    let events: Vec<Uuid> = deliveries.iter().map(|delivery| uuid(delivery.event)).collect();
    let routes: Vec<&str> = deliveries.iter().map(|delivery| delivery.route.as_str()).collect();
    let epochs: Vec<i32> = deliveries.iter().map(|delivery| int(delivery.epoch)).collect();
    let rows = session
        .rows(
            "SELECT d.event, d.route, d.epoch FROM unnest($1::uuid[], $2::text[], $3::integer[]) AS t(event, route, epoch)
               JOIN oncehook.deliveries d ON d.event = t.event AND d.route = t.route AND d.epoch = t.epoch
              WHERE d.state NOT IN ('succeeded', 'superseded', 'skipped')",
            &[&events, &routes, &epochs],
        )
        .await?;
    let id = |row: &Row| {
        let (event, epoch) = (event_id(row.get(0)), number(row.get(2)));
        Ok(DeliveryId { event, route: route_name(row.get(1))?, epoch })
    };
    rows.iter().map(id).collect()
}

/// A draw from a shared source of chances.
pub(super) fn drawing(chance: &std::sync::Mutex<Chance>) -> impl FnMut() -> f64 + '_ {
    || chance.lock().unwrap_or_else(std::sync::PoisonError::into_inner).draw()
}
