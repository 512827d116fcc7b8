//! The queue of deliveries: the statements that take, settle and return them. Whoever calls ends the transaction.
//!
//! The fence stands in every statement that ends an attempt: event, route, epoch, state and attempt must be what the
//! claim said, or no row changes. What is locked by somebody else is passed over, never waited for.
//!
//! Leases, due times and ages are of the database's clock, so nodes need not agree about the time: waits come in as
//! durations and are added to the time that the transaction was told first.

use std::collections::{HashMap, HashSet};

use bytes::Bytes;
use mysql_async::{Row, Value};
use oncehook_verify::{EventKey, UnixMicros};
use serde_json::json;

use super::connection::{EngineError, Insert, Session};
use super::row::{
    self, IDS, count, event, hex, id, ids, list, maybe_number, maybe_text, number, small, text,
};
use crate::delivery::{DeliveryId, Fence, HandedEvent, RouteName, Verdict};
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

/// A row of the queue that is locked.
struct Taken {
    event: EventId,
    epoch: u32,
    attempt: u32,
    attempt_limit: Option<u32>,
}

fn taken(row: &Row) -> Result<Taken, EngineError> {
    let attempt_limit = maybe_number(row, 3)?.map(|limit| u32::try_from(limit).unwrap_or(u32::MAX));
    Ok(Taken { event: event(row, 0)?, epoch: small(row, 1)?, attempt: small(row, 2)?, attempt_limit })
}

/// At most this many bytes of bodies are read for one batch (and the body that crosses it).
const BODIES_AT_ONCE: u64 = 8 << 20;

/// Deliveries of a route that are due, the longest due first, locked until the transaction ends.
async fn take(
    session: &mut Session,
    now: i64,
    route: &Route,
    limit: usize,
) -> Result<Vec<Taken>, EngineError> {
    let sql = "SELECT event, epoch, attempt, attempt_limit FROM oncehook_deliveries
                WHERE place = 0 AND route = ? AND place_at <= ?
                ORDER BY place_at, event, epoch LIMIT ? FOR UPDATE SKIP LOCKED";
    let limit = u64::try_from(limit).unwrap_or(u64::MAX);
    let rows = session.rows(sql, vec![route.name.as_str().into(), now.into(), limit.into()]).await?;
    rows.iter().map(taken).collect()
}

/// Deliveries of a route that are due, with their events. With `only`, just that one, if it is still due with that attempt.
pub(super) async fn due(
    session: &mut Session,
    given: Option<i64>,
    route: &Route,
    limit: usize,
    only: Option<&Due>,
) -> Result<Locked, EngineError> {
    let now = session.now(given).await?;
    let mut taken = match only {
        None => take(session, now, route, limit).await?,
        Some(one) => {
            let sql = "SELECT event, epoch, attempt, attempt_limit FROM oncehook_deliveries
                        WHERE event = ? AND route = ? AND epoch = ? AND attempt = ? AND state IN ('ready', 'retrying')
                          FOR UPDATE SKIP LOCKED";
            let fence =
                vec![id(one.event.id), route.name.as_str().into(), one.epoch.into(), one.attempt.into()];
            let rows = session.rows(sql, fence).await?;
            rows.iter().map(self::taken).collect::<Result<_, _>>()?
        }
    };
    let count = taken.len();
    weigh(session, &mut taken).await?;
    let mut events = handed(session, route, &taken).await?;
    let due = taken.into_iter().map(|taken| {
        let event = events.remove(&(taken.event, taken.epoch)).ok_or_else(EngineError::damaged)?;
        let attempt_limit = taken.attempt_limit.unwrap_or(route.retry.max_attempts);
        Ok(Due { event, epoch: taken.epoch, attempt: taken.attempt, attempt_limit })
    });
    Ok(Locked { due: due.collect::<Result<_, EngineError>>()?, count, now: UnixMicros(now) })
}

/// Drops those whose bodies would be too much: they are weighed before they are read, or many big ones would fill the memory.
async fn weigh(session: &mut Session, taken: &mut Vec<Taken>) -> Result<(), EngineError> {
    if taken.len() < 2 {
        return Ok(());
    }
    let sql = format!("SELECT e.id, e.size FROM {IDS} STRAIGHT_JOIN oncehook_events e ON e.id = UNHEX(t.id)");
    let rows = session.rows(&sql, vec![ids(taken.iter().map(|taken| taken.event))]).await?;
    let sizes: HashMap<EventId, u64> =
        rows.iter().map(|row| Ok((event(row, 0)?, count(row, 1)?))).collect::<Result<_, EngineError>>()?;
    let mut before = 0;
    taken.retain(|taken| {
        let fits = before < BODIES_AT_ONCE;
        before += sizes.get(&taken.event).copied().unwrap_or(0);
        fits
    });
    Ok(())
}

/// The events of deliveries, as they are handed to the route's handler.
async fn handed(
    session: &mut Session,
    route: &Route,
    taken: &[Taken],
) -> Result<HashMap<(EventId, u32), HandedEvent>, EngineError> {
    if taken.is_empty() {
        return Ok(HashMap::new());
    }
    let asked = list(taken.iter().map(|taken| json!([hex(taken.event), taken.epoch])));
    let columns = "SELECT e.id, t.epoch, e.source, e.`key`, e.type, e.entity, e.occurred_at, e.received_at, e.headers, e.body";
    let from =
        "FROM JSON_TABLE(?, '$[*]' COLUMNS (id VARCHAR(32) PATH '$[0]', epoch INT UNSIGNED PATH '$[1]')) t
                STRAIGHT_JOIN oncehook_events e ON e.id = UNHEX(t.id)";
    let rows = match &route.after {
        None => session.rows(&format!("{columns}, NULL {from}"), vec![asked]).await?,
        Some(after) => {
            // A follow-up that is forced alone knows the result of the epoch before.
            let result = "(SELECT p.result FROM oncehook_deliveries p
                            WHERE p.event = e.id AND p.route = ? AND p.epoch <= t.epoch AND p.state = 'succeeded'
                            ORDER BY p.epoch DESC LIMIT 1)";
            let sql = format!("{columns}, {result} {from}");
            session.rows(&sql, vec![after.as_str().into(), asked]).await?
        }
    };
    let damaged = |_| EngineError::damaged();
    rows.into_iter()
        .map(|mut row| {
            let source = text(&row, 2)?;
            let event = HandedEvent {
                id: event(&row, 0)?,
                source: if source == route.source.as_str() {
                    route.source.clone()
                } else {
                    // The route was given another source since. The event keeps its own.
                    SourceName::new(&source).map_err(|_| EngineError::damaged())?
                },
                key: EventKey::from_bytes(row::bytes(&row, 3)?).ok_or_else(EngineError::damaged)?,
                kind: maybe_text(&row, 4)?,
                entity: maybe_text(&row, 5)?,
                occurred_at: maybe_number(&row, 6)?.map(UnixMicros),
                received_at: UnixMicros(number(&row, 7)?),
                result: maybe_text(&row, 10)?,
                headers: Bytes::copy_from_slice(row::bytes(&row, 8)?),
                // Moved, not copied: this is what weighs.
                body: row
                    .take_opt::<Vec<u8>, _>(9)
                    .ok_or_else(EngineError::damaged)?
                    .map_err(damaged)?
                    .into(),
            };
            Ok(((event.id, small(&row, 1)?), event))
        })
        .collect()
}

/// Those that exist stay as they are.
const ENQUEUE: Insert = Insert {
    head: "INSERT INTO oncehook_deliveries (event, route, epoch, state, run_at)",
    row: "(?, ?, ?, 'ready', ?)",
    tail: " ON DUPLICATE KEY UPDATE epoch = oncehook_deliveries.epoch",
};

/// Makes deliveries that are due at once. Those that exist stay as they are. Returns those that were made.
pub(super) async fn enqueue<'r>(
    session: &mut Session,
    now: i64,
    event: EventId,
    epoch: u32,
    routes: impl IntoIterator<Item = &'r RouteName>,
) -> Result<Vec<RouteName>, EngineError> {
    let mut made = Vec::new();
    for route in routes {
        let row = vec![id(event), route.as_str().into(), epoch.into(), now.into()];
        if session.insert(ENQUEUE, vec![row]).await? > 0 {
            made.push(route.clone());
        }
    }
    Ok(made)
}

pub(super) fn route_name(text: &str) -> Result<RouteName, EngineError> {
    RouteName::new(text).map_err(|_| EngineError::damaged())
}

/// A delivery that was leased for its next attempt.
pub(super) struct Leased {
    pub(super) fence: Fence,
    pub(super) attempt_limit: u32,
    pub(super) event: HandedEvent,
}

/// A list of deliveries with their attempts, as the table that it becomes.
const FENCES: &str = "JSON_TABLE(?, '$[*]' COLUMNS (place FOR ORDINALITY, event VARCHAR(32) PATH '$[0]', route VARCHAR(64) CHARACTER SET utf8mb4 PATH '$[1]',
                                              epoch INT UNSIGNED PATH '$[2]', attempt INT UNSIGNED PATH '$[3]')) t";

fn fence_list<'f>(fences: impl IntoIterator<Item = &'f Fence>) -> Value {
    list(fences.into_iter().map(|Fence { delivery, attempt }| {
        json!([hex(delivery.event), delivery.route.as_str(), delivery.epoch, attempt])
    }))
}

/// Leases due deliveries, writes the attempts down before they begin, and commits.
pub(super) async fn lease(
    session: &mut Session,
    given: Option<i64>,
    route: &Route,
    limit: usize,
    lease: i64,
) -> Result<Vec<Leased>, EngineError> {
    let now = session.now(given).await?;
    let taken = take(session, now, route, limit).await?;
    let mut leased = Vec::with_capacity(taken.len());
    if !taken.is_empty() {
        let fence = |taken: &Taken| {
            let delivery = DeliveryId { event: taken.event, route: route.name.clone(), epoch: taken.epoch };
            Fence { delivery, attempt: taken.attempt + 1 }
        };
        let fences: Vec<Fence> = taken.iter().map(fence).collect();
        let sql = format!(
            "UPDATE {FENCES} STRAIGHT_JOIN oncehook_deliveries d
                 ON d.event = UNHEX(t.event) AND d.route = t.route AND d.epoch = t.epoch
                SET d.state = 'running', d.attempt = t.attempt, d.lease_until = ?, d.lease_limit = COALESCE(d.attempt_limit, ?)
              WHERE d.attempt = t.attempt - 1 AND d.state IN ('ready', 'retrying')"
        );
        let until = now.saturating_add(lease);
        let parameters = vec![fence_list(&fences), until.into(), route.retry.max_attempts.into()];
        let changed = session.change(&sql, parameters).await?;
        all_changed(changed, fences.len())?;
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
        let mut events = handed(session, route, &taken).await?;
        for (taken, fence) in taken.into_iter().zip(fences) {
            let event = events.remove(&(taken.event, taken.epoch)).ok_or_else(EngineError::damaged)?;
            let attempt_limit = taken.attempt_limit.unwrap_or(route.retry.max_attempts);
            leased.push(Leased { fence, attempt_limit, event });
        }
    }
    session.run("COMMIT").await?;
    Ok(leased)
}

/// Rows that are locked since they were read must be as they were. If not, nothing here can be trusted, and the transaction
/// is undone with its connection.
fn all_changed(changed: u64, wanted: usize) -> Result<(), EngineError> {
    if u64::try_from(wanted) == Ok(changed) {
        Ok(())
    } else {
        Err(EngineError::other("a delivery changed although it was locked"))
    }
}

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
    let mut followups = Vec::new();
    let failed = if held == Held::LostLease { "lost" } else { "failed" };
    for Ended { fence, verdict, followups: next } in &live {
        let (state, wait, result, failure) = match verdict {
            Verdict::Succeeded(result) => ("succeeded", None, result.as_deref(), None),
            Verdict::RetryAt(at, failure) => {
                ("retrying", Some(at.0.saturating_sub(from.0)), None, Some(failure))
            }
            Verdict::Dead(failure) => ("dead", None, None, Some(failure)),
        };
        let DeliveryId { event, route, epoch } = &fence.delivery;
        let error = failure.map(|failure| failure.message.as_str());
        // Whose fault it is that it is dead.
        let cause = failure.filter(|_| wait.is_none()).map(|failure| failure.cause.as_str());
        outcomes.push(json!([
            hex(*event),
            route.as_str(),
            epoch,
            fence.attempt,
            state,
            wait,
            result,
            error,
            cause
        ]));
        let outcome = if failure.is_none() { "succeeded" } else { failed };
        // A success that ran under a lock stands in the delivery itself.
        if held != Held::Lock || failure.is_some() {
            written.push((*fence, outcome, error));
        }
        for route in next.iter().filter(|_| failure.is_none()) {
            followups.push(vec![id(*event), route.as_str().into(), (*epoch).into(), now.into()]);
        }
    }
    let fence = if held == Held::Lock {
        "d.attempt = t.attempt - 1 AND d.state IN ('ready', 'retrying')"
    } else {
        "d.attempt = t.attempt AND d.state = 'running'"
    };
    let sql = format!("{SETTLE} WHERE {fence}");
    let changed = session.change(&sql, vec![list(outcomes), now.into(), now.into()]).await?;
    all_changed(changed, live.len())?;
    write_attempts(session, now, held, written).await?;
    session.insert(ENQUEUE, followups).await?;
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
   SET d.state = t.state, d.attempt = t.attempt, d.run_at = COALESCE(? + t.wait, d.run_at), d.lease_until = NULL,
       d.settled_at = IF(t.wait IS NULL, ?, NULL), d.result = t.result, d.error = t.error, d.cause = t.cause";

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

/// Prolongs leases that are still held, and commits.
pub(super) async fn renew(
    session: &mut Session,
    given: Option<i64>,
    fences: &[Fence],
    lease: i64,
) -> Result<(), EngineError> {
    let until = session.now(given).await?.saturating_add(lease);
    let sql = format!(
        "UPDATE {FENCES} STRAIGHT_JOIN oncehook_deliveries d
             ON d.event = UNHEX(t.event) AND d.route = t.route AND d.epoch = t.epoch
            SET d.lease_until = ? WHERE d.attempt = t.attempt AND d.state = 'running'"
    );
    session.change(&sql, vec![fence_list(fences), until.into()]).await?;
    session.run("COMMIT").await
}

/// Gives leases back: due at once, the attempt's number stays, and one more attempt is granted in its place. Commits.
pub(super) async fn give_back(
    session: &mut Session,
    given: Option<i64>,
    fences: &[Fence],
) -> Result<(), EngineError> {
    let now = session.now(given).await?;
    // The attempts first: they are ended only where the delivery is still held.
    let sql = format!(
        "UPDATE {FENCES}
           STRAIGHT_JOIN oncehook_deliveries d ON d.event = UNHEX(t.event) AND d.route = t.route AND d.epoch = t.epoch
           STRAIGHT_JOIN oncehook_attempts a
              ON a.event = d.event AND a.route = d.route AND a.epoch = d.epoch AND a.attempt = d.attempt
            SET a.finished_at = ?, a.outcome = 'given_back', d.state = IF(d.error IS NULL, 'ready', 'retrying'),
                d.run_at = ?, d.lease_until = NULL, d.attempt_limit = d.lease_limit + 1
          WHERE d.attempt = t.attempt AND d.state = 'running'"
    );
    session.change(&sql, vec![fence_list(fences), now.into(), now.into()]).await?;
    session.run("COMMIT").await
}

/// When the journal was made.
pub(super) async fn mark(session: &mut Session) -> Result<i64, EngineError> {
    let made =
        session.row("SELECT applied_at FROM oncehook_migrations ORDER BY name LIMIT 1", Vec::new()).await?;
    session.run("ROLLBACK").await?;
    made.as_ref().map_or_else(|| Err(EngineError::damaged()), |row| super::row::number(row, 0))
}

/// Those of these deliveries that are pending or dead.
pub(super) async fn unsettled(
    session: &mut Session,
    deliveries: &[DeliveryId],
) -> Result<Vec<DeliveryId>, EngineError> {
    let asked = list(deliveries.iter().map(|one| json!([hex(one.event), one.route.as_str(), one.epoch, 0])));
    let sql = format!(
        "SELECT t.place FROM {FENCES}
          STRAIGHT_JOIN oncehook_deliveries d ON d.event = UNHEX(t.event) AND d.route = t.route AND d.epoch = t.epoch
          WHERE d.state NOT IN ('succeeded', 'superseded', 'skipped') ORDER BY t.place"
    );
    let rows = session.rows(&sql, vec![asked]).await?;
    session.run("ROLLBACK").await?;
    let mut unsettled = Vec::with_capacity(rows.len());
    for row in &rows {
        // Places are counted from 1.
        let place = usize::try_from(super::row::small(row, 0)?).unwrap_or(0).wrapping_sub(1);
        unsettled.extend(deliveries.get(place).cloned());
    }
    Ok(unsettled)
}

/// Takes leases away that have run out, in one transaction.
pub(super) async fn reclaim(
    session: &mut Session,
    given: Option<i64>,
    route: &Route,
    mut draw: impl FnMut() -> f64,
) -> Result<usize, EngineError> {
    let now = session.now(given).await?;
    let sql = "SELECT event, epoch, attempt, attempt_limit FROM oncehook_deliveries
                WHERE place = 1 AND route = ? AND place_at <= ? LIMIT 1000 FOR UPDATE SKIP LOCKED";
    let rows = session.rows(sql, vec![route.name.as_str().into(), now.into()]).await?;
    let expired: Vec<(Fence, Verdict)> = rows
        .iter()
        .map(|row| {
            let taken = taken(row)?;
            let delivery = DeliveryId { event: taken.event, route: route.name.clone(), epoch: taken.epoch };
            let fence = Fence { delivery, attempt: taken.attempt };
            let limit = taken.attempt_limit.unwrap_or(route.retry.max_attempts);
            let verdict = route.after_lost_lease(fence.attempt, limit, UnixMicros(now), draw());
            Ok((fence, verdict))
        })
        .collect::<Result<_, EngineError>>()?;
    let ended: Vec<_> =
        expired.iter().map(|(fence, verdict)| Ended { fence, verdict, followups: &[] }).collect();
    let taken = settle(session, now, UnixMicros(now), Held::LostLease, &ended).await?.len();
    session.run("COMMIT").await?;
    Ok(taken)
}

/// How long until the next delivery of a route is due, in microseconds; negative if one is due already.
pub(super) async fn next_due(
    session: &mut Session,
    given: Option<i64>,
    route: &RouteName,
) -> Result<Option<i64>, EngineError> {
    let now = session.now(given).await?;
    let sql =
        "SELECT place_at FROM oncehook_deliveries WHERE place = 0 AND route = ? ORDER BY place_at LIMIT 1";
    let row = session.row(sql, vec![route.as_str().into()]).await?;
    session.run("ROLLBACK").await?;
    let at = row.map(|row| number(&row, 0)).transpose()?;
    Ok(at.map(|at| at.saturating_sub(now)))
}

/// A draw from a shared source of chances.
pub(super) fn drawing(chance: &std::sync::Mutex<Chance>) -> impl FnMut() -> f64 + '_ {
    || chance.lock().unwrap_or_else(std::sync::PoisonError::into_inner).draw()
}
