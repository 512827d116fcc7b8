//! The queue of deliveries: the statements that take, settle and return them. Each is atomic by itself.
//!
//! The fence stands in every statement that ends an attempt: event, route, epoch, state and attempt must be what the
//! claim said, or no row changes. What is locked by somebody else is passed over, never waited for.
//!
//! Leases, due times and ages are of the database's clock, so nodes need not agree about the time: waits come in as
//! durations and are added there.

use std::collections::HashMap;

use bytes::Bytes;
use oncehook_verify::{EventKey, UnixMicros};
use tokio_postgres::types::ToSql;
use tokio_postgres::{Row, Statement};
use uuid::Uuid;

use super::connection::{EngineError, Session, in_time};
use super::queries::{event_id, uuid};
use crate::delivery::{DeliveryId, Failure, Fence, HandedEvent, RouteName, Verdict};
use crate::event::{EventId, SourceName};
use crate::retry::Chance;
use crate::route::Route;

/// A delivery that is due.
pub(super) struct Due {
    pub(super) event: HandedEvent,
    pub(super) epoch: u32,
    /// Attempts so far.
    pub(super) attempt: u32,
    pub(super) attempt_limit: u32,
}

impl Due {
    pub(super) fn id(&self, route: &Route) -> DeliveryId {
        DeliveryId { event: self.event.id, route: route.name.clone(), epoch: self.epoch }
    }
}

/// Deliveries that are locked until the transaction ends.
pub(super) struct Locked {
    /// As many as may be in memory at once.
    pub(super) due: Vec<Due>,
    /// How many are locked.
    pub(super) count: usize,
    /// The transaction's time.
    pub(super) now: UnixMicros,
}

/// A number that a column of ours holds: never negative.
pub(super) fn number(column: i32) -> u32 {
    column.unsigned_abs()
}

fn int(number: u32) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}

/// Deliveries of a route that are due, the longest due first, locked until the transaction ends. With `only`, just that
/// one, if it is still due with that attempt.
pub(super) async fn due(
    session: &Session,
    given: Option<i64>,
    route: &Route,
    limit: usize,
    only: Option<&Due>,
) -> Result<Locked, EngineError> {
    let after = route.after.as_ref().map(RouteName::as_str);
    let rows = match only {
        None => {
            // Bodies are weighed before they are read: many big ones at once would fill the memory. The limit stands in
            // the text: a plan for any limit would be one for a tenth of the queue.
            let sql = format!("WITH due AS MATERIALIZED (
               SELECT d.event, d.epoch, d.attempt, d.attempt_limit, d.run_at FROM oncehook.deliveries d
                WHERE d.route = $2 AND d.state IN ('ready', 'retrying')
                  AND d.run_at <= coalesce($1::bigint, oncehook.micros())
                ORDER BY d.run_at, d.event, d.epoch LIMIT {limit}
                  FOR UPDATE SKIP LOCKED
             ), weighed AS (
               SELECT d.event, d.epoch, d.attempt, d.attempt_limit, d.run_at,
                      e.source, e.key, e.type, e.entity, e.occurred_at, e.received_at, e.headers, e.body,
                      sum(octet_length(e.body)) OVER (ORDER BY d.run_at, d.event, d.epoch ROWS UNBOUNDED PRECEDING)
                        - octet_length(e.body) AS before
                 FROM due d JOIN oncehook.events e ON e.id = d.event
             )
             SELECT d.epoch, d.attempt, d.attempt_limit,
                    d.event, d.source, d.key, d.type, d.entity, d.occurred_at, d.received_at, d.headers, d.body,
                    -- A follow-up that is forced alone knows the result of the epoch before.
                    CASE WHEN $3::text IS NOT NULL THEN (SELECT p.result FROM oncehook.deliveries p
                      WHERE p.event = d.event AND p.route = $3 AND p.epoch <= d.epoch AND p.state = 'succeeded'
                      ORDER BY p.epoch DESC LIMIT 1) END,
                    coalesce($1::bigint, oncehook.micros()), (SELECT count(*) FROM due)
               FROM weighed d WHERE d.before < 8388608
              ORDER BY d.run_at, d.event, d.epoch");
            session.rows(&sql, &[&given, &route.name.as_str(), &after]).await?
        }
        Some(one) => {
            let sql = "SELECT d.epoch, d.attempt, d.attempt_limit,
                    e.id, e.source, e.key, e.type, e.entity, e.occurred_at, e.received_at, e.headers, e.body,
                    (SELECT p.result FROM oncehook.deliveries p
                      WHERE p.event = d.event AND p.route = $3 AND p.epoch <= d.epoch AND p.state = 'succeeded'
                      ORDER BY p.epoch DESC LIMIT 1),
                    coalesce($1::bigint, oncehook.micros()), 1::bigint
               FROM oncehook.deliveries d
               JOIN oncehook.events e ON e.id = d.event
              WHERE d.event = $4 AND d.route = $2 AND d.epoch = $5 AND d.attempt = $6 AND d.state IN ('ready', 'retrying')
                FOR UPDATE OF d SKIP LOCKED";
            let (epoch, attempt) = (int(one.epoch), int(one.attempt));
            let event = uuid(one.event.id);
            session.rows(sql, &[&given, &route.name.as_str(), &after, &event, &epoch, &attempt]).await?
        }
    };
    let now = UnixMicros(rows.first().map_or(0, |row| row.get(13)));
    let locked = rows.first().map_or(0, |row| row.get::<_, i64>(14));
    let due = rows.iter().map(|row| {
        Ok(Due {
            epoch: number(row.get(0)),
            attempt: number(row.get(1)),
            attempt_limit: row.get::<_, Option<i32>>(2).map_or(route.retry.max_attempts, number),
            event: handed(row, route, 3)?,
        })
    });
    let due = due.collect::<Result<_, EngineError>>()?;
    Ok(Locked { due, count: usize::try_from(locked).unwrap_or(0), now })
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
    })
}

/// Makes deliveries that are due at once. Those that exist stay as they are.
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
            "INSERT INTO oncehook.deliveries (event, route, epoch, state, run_at)
             SELECT $2, route, $3, 'ready', coalesce($1::bigint, oncehook.micros()) FROM unnest($4::text[]) AS r(route)
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
    pub(super) event: HandedEvent,
}

/// Leases due deliveries, and writes the attempts down before they begin.
pub(super) async fn lease(
    session: &Session,
    given: Option<i64>,
    route: &Route,
    limit: usize,
    lease: i64,
) -> Result<Vec<Leased>, EngineError> {
    let after = route.after.as_ref().map(RouteName::as_str);
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let rows = session
        .rows(
            "WITH due AS MATERIALIZED (
               SELECT d.event, d.epoch FROM oncehook.deliveries d
                WHERE d.route = $2 AND d.state IN ('ready', 'retrying')
                  AND d.run_at <= coalesce($1::bigint, oncehook.micros())
                ORDER BY d.run_at, d.event, d.epoch LIMIT $4
                  FOR UPDATE SKIP LOCKED
             ), leased AS (
               UPDATE oncehook.deliveries d
                  SET state = 'running', attempt = d.attempt + 1, lease_until = coalesce($1::bigint, oncehook.micros()) + $5,
                      lease_limit = coalesce(d.attempt_limit, $6)
                 FROM due WHERE d.event = due.event AND d.route = $2 AND d.epoch = due.epoch
               RETURNING d.event, d.epoch, d.attempt, d.lease_limit, d.run_at
             ), begun AS (
               INSERT INTO oncehook.attempts (event, route, epoch, attempt, started_at)
               SELECT event, $2, epoch, attempt, coalesce($1::bigint, oncehook.micros()) FROM leased
             )
             SELECT l.epoch, l.attempt, l.lease_limit,
                    e.id, e.source, e.key, e.type, e.entity, e.occurred_at, e.received_at, e.headers, e.body,
                    -- A follow-up that is forced alone knows the result of the epoch before.
                    (SELECT p.result FROM oncehook.deliveries p
                      WHERE p.event = l.event AND p.route = $3 AND p.epoch <= l.epoch AND p.state = 'succeeded'
                      ORDER BY p.epoch DESC LIMIT 1)
               FROM leased l JOIN oncehook.events e ON e.id = l.event
              ORDER BY l.run_at, l.event, l.epoch",
            &[&given, &route.name.as_str(), &after, &limit, &lease, &int(route.retry.max_attempts)],
        )
        .await?;
    rows.iter()
        .map(|row| {
            let event = handed(row, route, 3)?;
            let delivery =
                DeliveryId { event: event.id, route: route.name.clone(), epoch: number(row.get(0)) };
            let fence = Fence { delivery, attempt: number(row.get(1)) };
            Ok(Leased { fence, attempt_limit: number(row.get(2)), event })
        })
        .collect()
}

/// How a lease ended.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Held {
    /// It is held: the delivery is `running` and its attempt has the fence's number.
    Lease,
    /// It ran out.
    LostLease,
}

/// An attempt that is over.
pub(super) struct Ended<'s> {
    pub(super) fence: &'s Fence,
    pub(super) verdict: &'s Verdict,
    pub(super) followups: &'s [RouteName],
}

/// Settles leased attempts, each delivery at most once. Returns the fences that were the latest; of the others nothing was
/// written. `now` is the time from which the verdicts' due times are counted.
pub(super) async fn settle(
    session: &Session,
    given: Option<i64>,
    now: UnixMicros,
    held: Held,
    ended: &[Ended<'_>],
) -> Result<HashMap<Fence, ()>, EngineError> {
    let Columns { fences, states, waits, results, errors, causes, followed } = Columns::of(ended, now);
    let failed = if held == Held::LostLease { "lost" } else { "failed" };
    let rows = session
        .rows(
            SETTLE_LEASED,
            &[
                &given,
                &fences.events,
                &fences.routes,
                &fences.epochs,
                &fences.attempts,
                &states,
                &waits,
                &results,
                &errors,
                &causes,
                &followed.events,
                &followed.routes,
                &followed.epochs,
                &followed.next,
                &failed,
            ],
        )
        .await?;
    rows.iter()
        .map(|row| {
            let delivery = DeliveryId {
                event: event_id(row.get(0)),
                route: route_name(row.get(1))?,
                epoch: number(row.get(2)),
            };
            Ok((Fence { delivery, attempt: number(row.get(3)) }, ()))
        })
        .collect()
}

/// The statements that settle what ran under a lock, prepared: so that the settlement is sent when it is asked for, and not
/// when the server has answered that it knows the statement.
pub(super) struct Settling {
    plain: Statement,
    any: Statement,
}

impl Settling {
    pub(super) async fn prepare(session: &Session) -> Result<Self, EngineError> {
        Ok(Self {
            plain: session.prepared(SETTLE_SUCCEEDED).await?,
            any: session.prepared(SETTLE_LOCKED).await?,
        })
    }

    /// Settles attempts that ran under a lock: the deliveries are due, and the fences' numbers are the next ones. Fails
    /// unless all of them are settled. At the first poll it is on its way, or has failed.
    pub(super) async fn settle(
        &self,
        session: &Session,
        given: Option<i64>,
        now: UnixMicros,
        ended: &[Ended<'_>],
    ) -> Result<(), EngineError> {
        let Columns { fences, states, waits, results, errors, causes, followed } = Columns::of(ended, now);
        let Fences { events, routes, epochs, attempts } = fences;
        let count = i64::try_from(ended.len()).unwrap_or(i64::MAX);
        let plain = followed.next.is_empty() && errors.iter().all(Option::is_none);
        let ran = if plain {
            let parameters: [&(dyn ToSql + Sync); 7] =
                [&given, &events, &routes, &epochs, &attempts, &results, &count];
            in_time(session.query(&self.plain, &parameters)).await
        } else {
            let parameters: [&(dyn ToSql + Sync); 15] = [
                &given,
                &events,
                &routes,
                &epochs,
                &attempts,
                &states,
                &waits,
                &results,
                &errors,
                &causes,
                &followed.events,
                &followed.routes,
                &followed.epochs,
                &followed.next,
                &count,
            ];
            in_time(session.query(&self.any, &parameters)).await
        };
        ran.map(|_| ())
    }
}

/// What attempts came to, as columns.
struct Columns<'s> {
    fences: Fences<'s>,
    states: Vec<&'static str>,
    /// Until the next attempt, if there is one.
    waits: Vec<Option<i64>>,
    results: Vec<Option<&'s str>>,
    errors: Vec<Option<String>>,
    /// Whose fault it is that it is dead.
    causes: Vec<Option<&'static str>>,
    followed: Followed<'s>,
}

/// The deliveries that successes release.
#[derive(Default)]
struct Followed<'s> {
    events: Vec<Uuid>,
    routes: Vec<&'s str>,
    epochs: Vec<i32>,
    next: Vec<&'s str>,
}

impl<'s> Columns<'s> {
    fn of(ended: &'s [Ended<'s>], now: UnixMicros) -> Self {
        let mut columns = Self {
            fences: Fences::of(ended.iter().map(|ended| ended.fence)),
            states: Vec::with_capacity(ended.len()),
            waits: Vec::with_capacity(ended.len()),
            results: Vec::with_capacity(ended.len()),
            errors: Vec::with_capacity(ended.len()),
            causes: Vec::with_capacity(ended.len()),
            followed: Followed::default(),
        };
        for Ended { fence, verdict, followups } in ended {
            let (state, wait, result, failure) = match verdict {
                Verdict::Succeeded(result) => ("succeeded", None, result.as_deref(), None),
                Verdict::RetryAt(at, failure) => {
                    ("retrying", Some(at.0.saturating_sub(now.0)), None, Some(failure))
                }
                Verdict::Dead(failure) => ("dead", None, None, Some(failure)),
            };
            columns.states.push(state);
            columns.waits.push(wait);
            columns.results.push(result);
            columns.errors.push(failure.map(|failure| text(&failure.message)));
            columns.causes.push(failure.filter(|_| wait.is_none()).map(|failure| failure.cause.as_str()));
            for followup in followups.iter().filter(|_| failure.is_none()) {
                columns.followed.events.push(uuid(fence.delivery.event));
                columns.followed.routes.push(fence.delivery.route.as_str());
                columns.followed.epochs.push(int(fence.delivery.epoch));
                columns.followed.next.push(followup.as_str());
            }
        }
        columns
    }
}

/// Attempts that were leased: their rows in `attempts` are ended.
const SETTLE_LEASED: &str = "
WITH ended AS MATERIALIZED (
  SELECT * FROM unnest($2::uuid[], $3::text[], $4::integer[], $5::integer[], $6::text[], $7::bigint[], $8::text[], $9::text[],
                       $10::text[])
    AS t(event, route, epoch, attempt, state, wait, result, error, cause)
), settled AS (
  UPDATE oncehook.deliveries d
     SET state = t.state, run_at = coalesce(coalesce($1::bigint, oncehook.micros()) + t.wait, d.run_at), lease_until = NULL,
         settled_at = CASE WHEN t.wait IS NULL THEN coalesce($1::bigint, oncehook.micros()) END,
         result = t.result, error = t.error, cause = t.cause
    FROM ended t
   WHERE d.event = t.event AND d.route = t.route AND d.epoch = t.epoch AND d.attempt = t.attempt AND d.state = 'running'
  RETURNING d.event, d.route, d.epoch, d.attempt, d.state, d.error
), written AS (
  UPDATE oncehook.attempts a
     SET finished_at = coalesce($1::bigint, oncehook.micros()), error = s.error,
         outcome = CASE WHEN s.state = 'succeeded' THEN 'succeeded' ELSE $15 END
    FROM settled s
   WHERE a.event = s.event AND a.route = s.route AND a.epoch = s.epoch AND a.attempt = s.attempt
), followed AS (
  INSERT INTO oncehook.deliveries (event, route, epoch, state, run_at)
  SELECT s.event, f.next, s.epoch, 'ready', coalesce($1::bigint, oncehook.micros())
    FROM settled s
    JOIN unnest($11::uuid[], $12::text[], $13::integer[], $14::text[]) AS f(event, route, epoch, next)
      ON f.event = s.event AND f.route = s.route AND f.epoch = s.epoch
   WHERE s.state = 'succeeded'
  ON CONFLICT (event, route, epoch) DO NOTHING
)
SELECT event, route, epoch, attempt FROM settled";

/// The usual case of the next: everything succeeded, and nothing follows.
const SETTLE_SUCCEEDED: &str = "
WITH settled AS (
  UPDATE oncehook.deliveries d
     SET state = 'succeeded', attempt = t.attempt, settled_at = coalesce($1::bigint, oncehook.micros()),
         result = t.result, error = NULL, cause = NULL
    FROM unnest($2::uuid[], $3::text[], $4::integer[], $5::integer[], $6::text[]) AS t(event, route, epoch, attempt, result)
   WHERE d.event = t.event AND d.route = t.route AND d.epoch = t.epoch AND d.attempt = t.attempt - 1
     AND d.state IN ('ready', 'retrying')
  RETURNING 1
)
SELECT 1 / (count(*) = $7)::integer FROM settled";

/// Attempts that ran under a lock: a failure gets its row in `attempts` now; a success stands in the delivery itself.
/// A delivery that is not as it was read although it was locked ends the transaction (by a division by zero): nothing in it
/// could be trusted.
const SETTLE_LOCKED: &str = "
WITH ended AS MATERIALIZED (
  SELECT * FROM unnest($2::uuid[], $3::text[], $4::integer[], $5::integer[], $6::text[], $7::bigint[], $8::text[], $9::text[],
                       $10::text[])
    AS t(event, route, epoch, attempt, state, wait, result, error, cause)
), settled AS (
  UPDATE oncehook.deliveries d
     SET state = t.state, attempt = t.attempt, run_at = coalesce(coalesce($1::bigint, oncehook.micros()) + t.wait, d.run_at),
         settled_at = CASE WHEN t.wait IS NULL THEN coalesce($1::bigint, oncehook.micros()) END,
         result = t.result, error = t.error, cause = t.cause
    FROM ended t
   WHERE d.event = t.event AND d.route = t.route AND d.epoch = t.epoch AND d.attempt = t.attempt - 1
     AND d.state IN ('ready', 'retrying')
  RETURNING d.event, d.route, d.epoch, d.attempt, d.state, d.error
), written AS (
  INSERT INTO oncehook.attempts (event, route, epoch, attempt, started_at, finished_at, outcome, error)
  SELECT event, route, epoch, attempt, coalesce($1::bigint, oncehook.micros()), coalesce($1::bigint, oncehook.micros()), 'failed', error
    FROM settled WHERE state <> 'succeeded'
), followed AS (
  INSERT INTO oncehook.deliveries (event, route, epoch, state, run_at)
  SELECT s.event, f.next, s.epoch, 'ready', coalesce($1::bigint, oncehook.micros())
    FROM settled s
    JOIN unnest($11::uuid[], $12::text[], $13::integer[], $14::text[]) AS f(event, route, epoch, next)
      ON f.event = s.event AND f.route = s.route AND f.epoch = s.epoch
   WHERE s.state = 'succeeded'
  ON CONFLICT (event, route, epoch) DO NOTHING
)
SELECT 1 / (count(*) = $15)::integer FROM settled";

/// Text as the database takes it: it has no zero characters.
pub(super) fn text(text: &str) -> String {
    text.replace('\0', "\u{fffd}")
}

/// Fences as columns.
struct Fences<'f> {
    events: Vec<Uuid>,
    routes: Vec<&'f str>,
    epochs: Vec<i32>,
    attempts: Vec<i32>,
}

impl<'f> Fences<'f> {
    fn of(fences: impl IntoIterator<Item = &'f Fence>) -> Self {
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
                AND d.state = 'running'",
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
                  AND d.state = 'running'
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

/// Takes leases away that have run out, in one transaction.
pub(super) async fn reclaim(
    session: &Session,
    given: Option<i64>,
    route: &Route,
    mut draw: impl FnMut() -> f64,
) -> Result<usize, EngineError> {
    session.run("BEGIN").await?;
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
            let verdict =
                route.retry.after_failure(Failure::never_ended(), fence.attempt, limit, now, draw());
            (fence, verdict)
        })
        .collect();
    let mut taken = 0;
    if !expired.is_empty() {
        let ended: Vec<_> =
            expired.iter().map(|(fence, verdict)| Ended { fence, verdict, followups: &[] }).collect();
        taken = settle(session, given, now, Held::LostLease, &ended).await?.len();
    }
    session.run("COMMIT").await?;
    Ok(taken)
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
              WHERE route = $2 AND state IN ('ready', 'retrying')",
            &[&given, &route.as_str()],
        )
        .await?;
    Ok(row.and_then(|row| row.get(0)))
}

/// A draw from a shared source of chances.
pub(super) fn drawing(chance: &std::sync::Mutex<Chance>) -> impl FnMut() -> f64 + '_ {
    || chance.lock().unwrap_or_else(std::sync::PoisonError::into_inner).draw()
}
