//! Settling: what attempts came to, written by one statement for all of them.
//!
//! The fence stands in each: event, route, epoch, state and attempt must be what the claim said, or no row changes. Those of a
//! line are settled under its lock, and what follows for others of the entity in the same transaction.
//!
//! Does not: settle ahead what is claimed and run in one transaction (`queue`).

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use oncehook_verify::UnixMicros;
use tokio_postgres::types::ToSql;
use uuid::Uuid;

use super::connection::{EngineError, Session};
use super::lines::{self, Came};
use super::queries::{event_id, uuid};
use super::queue::{Fences, int, number, route_name, text};
use crate::delivery::{Cause, Columns, DeliveryId, DeliveryState, Fence, RouteName, Verdict};
use crate::route::{KnownLines, Route};

/// Whether attempts to be settled were leased, or ran inside the transaction that settles them.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Held {
    /// Leased: the delivery is `running` and its attempt has the fence's number.
    Lease,
    /// Leased, and the lease ran out.
    LostLease,
    /// Not leased: the delivery is due and locked, and the fence's number is the next one.
    Lock,
}

/// An attempt that is over.
pub(super) struct Ended<'s> {
    pub(super) fence: &'s Fence,
    pub(super) verdict: &'s Verdict,
    pub(super) followups: &'s [RouteName],
}

/// Settles attempts, each delivery at most once. Returns the fences that were the latest; of the others nothing was
/// written. `now` is the time from which the verdicts' due times are counted.
pub(super) async fn settle(
    session: &Session,
    given: Option<i64>,
    now: UnixMicros,
    held: Held,
    ended: &[Ended<'_>],
) -> Result<HashMap<Fence, ()>, EngineError> {
    let fences = Fences::of(ended.iter().map(|ended| ended.fence));
    let mut states = Vec::with_capacity(ended.len());
    let mut waits: Vec<Option<i64>> = Vec::with_capacity(ended.len());
    let mut results: Vec<Option<&str>> = Vec::with_capacity(ended.len());
    let mut errors: Vec<Option<String>> = Vec::with_capacity(ended.len());
    let mut causes: Vec<Option<&str>> = Vec::with_capacity(ended.len());
    let (mut after, mut before, mut epochs, mut next) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for Ended { fence, verdict, followups } in ended {
        let Columns { state, run_at, result, error, cause } = verdict.columns();
        states.push(state.as_str());
        waits.push(run_at.map(|at| at.0.saturating_sub(now.0)));
        results.push(result);
        errors.push(error.map(text));
        causes.push(cause.map(Cause::as_str));
        for followup in followups.iter().filter(|_| state == DeliveryState::Succeeded) {
            after.push(uuid(fence.delivery.event));
            before.push(fence.delivery.route.as_str());
            epochs.push(int(fence.delivery.epoch));
            next.push(followup.as_str());
        }
    }
    let failed = if held == Held::LostLease { "lost" } else { "failed" };
    let plain = held == Held::Lock
        && next.is_empty()
        && ended.iter().all(|ended| matches!(ended.verdict, Verdict::Succeeded(_)));
    let rows = if plain {
        let Fences { events, routes, epochs, attempts } = &fences;
        session.rows(SETTLE_SUCCEEDED, &[&given, events, routes, epochs, attempts, &results]).await?
    } else {
        let sql = if held == Held::Lock { SETTLE_LOCKED } else { SETTLE_LEASED };
        let parameters: [&(dyn ToSql + Sync); 15] = [
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
            &after,
            &before,
            &epochs,
            &next,
            &failed,
        ];
        session.rows(sql, &parameters).await?
    };
    let parked = ended.iter().filter(|ended| matches!(ended.verdict, Verdict::Parked(..)));
    let parked: Vec<Uuid> = parked.map(|ended| uuid(ended.fence.delivery.event)).collect();
    if !parked.is_empty() {
        lines::name_parked(session, &parked).await?;
    }
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

/// What ran under a lock, in the usual case: everything succeeded, and nothing follows. Parts of a statement cost time where
/// they find nothing to do, too.
const SETTLE_SUCCEEDED: &str = "
UPDATE oncehook.deliveries d
   SET state = 'succeeded', attempt = t.attempt, settled_at = (SELECT coalesce($1::bigint, oncehook.micros())), result = t.result,
       error = NULL, cause = NULL, blocked_at = NULL, parked_at = NULL
  FROM unnest($2::uuid[], $3::text[], $4::integer[], $5::integer[], $6::text[]) AS t(event, route, epoch, attempt, result)
 WHERE d.event = t.event AND d.route = t.route AND d.epoch = t.epoch AND d.attempt = t.attempt - 1
   AND (d.state || '') IN ('ready', 'retrying')
RETURNING d.event, d.route, d.epoch, t.attempt";

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
         result = t.result, error = t.error, cause = t.cause, blocked_at = NULL,
         parked_at = CASE WHEN t.state = 'parked' THEN coalesce(d.parked_at, $1::bigint, oncehook.micros()) END,
         -- What was put off is not held against the delivery.
         attempt_limit = CASE WHEN t.state IN ('parked', 'superseded') THEN d.lease_limit + 1 ELSE d.attempt_limit END
    FROM ended t
   WHERE d.event = t.event AND d.route = t.route AND d.epoch = t.epoch AND d.attempt = t.attempt AND (d.state || '') = 'running'
  RETURNING d.event, d.route, d.epoch, d.attempt, d.state, d.error, d.entity, d.version
), written AS (
  UPDATE oncehook.attempts a
     SET finished_at = coalesce($1::bigint, oncehook.micros()),
         error = CASE WHEN s.state <> 'superseded' THEN s.error END,
         outcome = CASE WHEN s.state = 'succeeded' THEN 'succeeded'
                        WHEN s.state IN ('parked', 'superseded') THEN 'given_back' ELSE $15 END
    FROM settled s
   WHERE a.event = s.event AND a.route = s.route AND a.epoch = s.epoch AND a.attempt = s.attempt
), followed AS (
  INSERT INTO oncehook.deliveries (event, route, epoch, state, run_at, entity, version)
  SELECT s.event, f.next, s.epoch, 'ready', coalesce($1::bigint, oncehook.micros()), s.entity, s.version
    FROM settled s
    JOIN unnest($11::uuid[], $12::text[], $13::integer[], $14::text[]) AS f(event, route, epoch, next)
      ON f.event = s.event AND f.route = s.route AND f.epoch = s.epoch
   WHERE s.state = 'succeeded'
  ON CONFLICT (event, route, epoch) DO NOTHING
)
SELECT event, route, epoch, attempt FROM settled";

/// Attempts that ran under a lock: a failure gets its row in `attempts` now; a success stands in the delivery itself.
const SETTLE_LOCKED: &str = "
WITH ended AS MATERIALIZED (
  SELECT * FROM unnest($2::uuid[], $3::text[], $4::integer[], $5::integer[], $6::text[], $7::bigint[], $8::text[], $9::text[],
                       $10::text[])
    AS t(event, route, epoch, attempt, state, wait, result, error, cause)
), settled AS (
  UPDATE oncehook.deliveries d
     SET state = t.state, attempt = CASE WHEN t.state IN ('parked', 'superseded') THEN d.attempt ELSE t.attempt END,
         run_at = coalesce(coalesce($1::bigint, oncehook.micros()) + t.wait, d.run_at),
         settled_at = CASE WHEN t.wait IS NULL THEN coalesce($1::bigint, oncehook.micros()) END,
         result = t.result, error = t.error, cause = t.cause, blocked_at = NULL,
         parked_at = CASE WHEN t.state = 'parked' THEN coalesce(d.parked_at, $1::bigint, oncehook.micros()) END
    FROM ended t
   WHERE d.event = t.event AND d.route = t.route AND d.epoch = t.epoch AND d.attempt = t.attempt - 1
     AND (d.state || '') IN ('ready', 'retrying')
  RETURNING d.event, d.route, d.epoch, t.attempt, d.state, d.error, d.entity, d.version
), written AS (
  INSERT INTO oncehook.attempts (event, route, epoch, attempt, started_at, finished_at, outcome, error)
  SELECT event, route, epoch, attempt, coalesce($1::bigint, oncehook.micros()), coalesce($1::bigint, oncehook.micros()), $15, error
    FROM settled WHERE state NOT IN ('succeeded', 'parked', 'superseded')
), followed AS (
  INSERT INTO oncehook.deliveries (event, route, epoch, state, run_at, entity, version)
  SELECT s.event, f.next, s.epoch, 'ready', coalesce($1::bigint, oncehook.micros()), s.entity, s.version
    FROM settled s
    JOIN unnest($11::uuid[], $12::text[], $13::integer[], $14::text[]) AS f(event, route, epoch, next)
      ON f.event = s.event AND f.route = s.route AND f.epoch = s.epoch
   WHERE s.state = 'succeeded'
  ON CONFLICT (event, route, epoch) DO NOTHING
)
SELECT event, route, epoch, attempt FROM settled";

/// Settles leased attempts of routes that look at entities, in one transaction with what follows for others. Returns the fences
/// that were the latest.
pub(super) async fn settle_in_line(
    session: &Session,
    given: Option<i64>,
    now: UnixMicros,
    ended: &[Ended<'_>],
    known: &KnownLines,
) -> Result<HashMap<Fence, ()>, EngineError> {
    session.run("BEGIN").await?;
    let done = settle_along_the_line(session, given, now, ended, known).await?;
    session.run("COMMIT").await?;
    Ok(done)
}

/// The same in the transaction that is open.
pub(super) async fn settle_along_the_line(
    session: &Session,
    given: Option<i64>,
    now: UnixMicros,
    ended: &[Ended<'_>],
    known: &KnownLines,
) -> Result<HashMap<Fence, ()>, EngineError> {
    let fences: Vec<&Fence> = ended.iter().map(|ended| ended.fence).collect();
    let about = lines::about(session, &fences).await?;
    let mut routes: BTreeMap<&RouteName, (Arc<Route>, BTreeSet<&str>)> = BTreeMap::new();
    for fence in &fences {
        let name = &fence.delivery.route;
        if let (Some(about), Some(route)) = (about.get(&fence.delivery.event), known.get(name)) {
            routes.entry(name).or_insert_with(|| (route, BTreeSet::new())).1.insert(&about.entity);
        }
    }
    for (name, (_, entities)) in &routes {
        lines::lock(session, name, entities).await?;
    }
    let done = settle(session, given, now, Held::Lease, ended).await?;
    let settled = || ended.iter().filter(|ended| done.contains_key(ended.fence));
    for (name, (route, _)) in &routes {
        let of_route = settled().filter(|ended| ended.fence.delivery.route == **name);
        let came: Vec<Came<'_>> = of_route
            .filter_map(|ended| Some(about.get(&ended.fence.delivery.event)?.came(ended.verdict)))
            .collect();
        lines::after(session, given, route, &came).await?;
    }
    let succeeded = settled().filter(|ended| matches!(ended.verdict, Verdict::Succeeded(_)));
    let entities: BTreeSet<&str> =
        succeeded.filter_map(|ended| Some(about.get(&ended.fence.delivery.event)?.entity.as_str())).collect();
    lines::wake_parked(session, given, &entities.into_iter().collect::<Vec<_>>()).await?;
    Ok(done)
}
