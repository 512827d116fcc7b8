//! Settling: the statements that end attempts, and what follows from that for others. Whoever calls ends the transaction.
//!
//! The fence stands in every statement: event, route, epoch, state and attempt must be what the claim said, or no row
//! changes.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

use oncehook_verify::UnixMicros;
use serde_json::json;

use super::connection::{Insert, Session};
use super::ends;
use super::engine_error::EngineError;
use super::lines::{self, Came};
use super::queue::{FENCES, all_changed, fence_list, follow};
use super::row::{count, hex, id, list};
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
/// written. `from` is the time from which the verdicts' due times are counted, `now` the transaction's.
pub(super) async fn settle(
    session: &mut Session,
    now: i64,
    from: UnixMicros,
    held: Held,
    ended: &[Ended<'_>],
) -> Result<HashSet<Fence>, EngineError> {
    // Sorted, so that two who settle wait for each other in the same order.
    let mut live: Vec<&Ended<'_>> = ended.iter().collect();
    live.sort_by_key(|ended| {
        let DeliveryId { event, route, epoch } = &ended.fence.delivery;
        (*event, route.as_str(), *epoch)
    });
    if held != Held::Lock {
        let sql = format!(
            "SELECT t.place FROM {FENCES} STRAIGHT_JOIN oncehook_deliveries d
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
    let (mut followups, mut parked) = (Vec::new(), Vec::new());
    let failed = if held == Held::LostLease { "lost" } else { "failed" };
    for Ended { fence, verdict, followups: next } in &live {
        let Columns { state, run_at, result, error, cause } = verdict.columns();
        let wait = run_at.map(|at| at.0.saturating_sub(from.0));
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
        if state == DeliveryState::Parked {
            parked.push(*fence);
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
    let ends = live.iter().map(|ended| (ended.verdict.columns().state, ended.fence.delivery.event));
    ends::write(session, ends).await?;
    write_attempts(session, now, held, written).await?;
    follow(session, now, followups).await?;
    lines::name_parked(session, &parked).await?;
    Ok(live.into_iter().map(|ended| ended.fence.clone()).collect())
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
            vec![
                id(*event),
                route,
                (*epoch).into(),
                attempt,
                now.into(),
                now.into(),
                outcome.into(),
                error.into(),
            ]
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

/// Settles leased attempts, in one transaction with what follows for others. Returns the fences that were the latest, and
/// whether something that was parked is due now.
pub(super) async fn settle_leased(
    session: &mut Session,
    given: Option<i64>,
    from: UnixMicros,
    ended: &[Ended<'_>],
    known: &KnownLines,
) -> Result<(HashSet<Fence>, bool), EngineError> {
    let done = settle_along_the_line(session, given, from, ended, known).await?;
    session.run("COMMIT").await?;
    Ok(done)
}

/// The same in the transaction that is open.
pub(super) async fn settle_along_the_line(
    session: &mut Session,
    given: Option<i64>,
    from: UnixMicros,
    ended: &[Ended<'_>],
    known: &KnownLines,
) -> Result<(HashSet<Fence>, bool), EngineError> {
    let now = session.now(given).await?;
    let about = lines::about(session, ended.iter().map(|ended| ended.fence)).await?;
    let mut routes: BTreeMap<&RouteName, (Arc<Route>, BTreeSet<&str>)> = BTreeMap::new();
    for Ended { fence, .. } in ended {
        let name = &fence.delivery.route;
        if let (Some(about), Some(route)) = (about.get(&fence.delivery.event), known.get(name)) {
            routes.entry(name).or_insert_with(|| (route, BTreeSet::new())).1.insert(&about.entity);
        }
    }
    for (name, (_, entities)) in &routes {
        lines::lock(session, name, entities).await?;
    }
    let done = settle(session, now, from, Held::Lease, ended).await?;
    let settled = || ended.iter().filter(|ended| done.contains(ended.fence));
    for (name, (route, _)) in &routes {
        let of_route = settled().filter(|ended| ended.fence.delivery.route == **name);
        let came: Vec<Came<'_>> = of_route
            .filter_map(|ended| Some(about.get(&ended.fence.delivery.event)?.came(ended.verdict)))
            .collect();
        lines::after(session, now, route, &came).await?;
    }
    let succeeded = settled().filter(|ended| matches!(ended.verdict, Verdict::Succeeded(_)));
    let entities: BTreeSet<&str> =
        succeeded.filter_map(|ended| Some(about.get(&ended.fence.delivery.event)?.entity.as_str())).collect();
    let woken = lines::wake_parked(session, now, &entities).await?;
    Ok((done, woken))
}
