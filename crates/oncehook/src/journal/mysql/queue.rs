//! The queue of deliveries: the statements that take and return them (`settle` ends them). Whoever calls ends the transaction.
//!
//! The fence stands in every statement that ends an attempt: event, route, epoch, state and attempt must be what the
//! claim said, or no row changes. What is locked by somebody else is passed over, never waited for.
//!
//! Leases, due times and ages are of the database's clock, so nodes need not agree about the time: waits come in as
//! durations and are added to the time that the transaction was told first.

use std::collections::HashMap;

use bytes::Bytes;
use mysql_async::{Row, Value};
use oncehook_verify::{EventKey, UnixMicros};
use serde_json::json;

use super::connection::{Insert, Session};
use super::engine_error::EngineError;
use super::lines::{self, Came};
use super::row::{
    self, IDS, count, event, hex, id, ids, list, maybe_number, maybe_text, number, small, text,
};
use super::settle::{Ended, Held, settle};
use super::turn::{self, One, Turns};
use crate::delivery::{DeliveryId, FailedAttempt, Fence, HandedEvent, RouteName, Verdict};
use crate::event::{EventId, SourceName};
use crate::journal::Progress;
use crate::ordering::{Company, NO_TIME, PEEK};
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
pub(super) struct Taken {
    pub(super) event: EventId,
    pub(super) epoch: u32,
    pub(super) attempt: u32,
    pub(super) attempt_limit: Option<u32>,
    pub(super) parked_at: Option<UnixMicros>,
}

/// The columns of [`taken`].
const TAKEN: &str = "SELECT d.event, d.epoch, d.attempt, d.attempt_limit, d.parked_at";

fn taken(row: &Row) -> Result<Taken, EngineError> {
    let parked_at = maybe_number(row, 4)?.map(UnixMicros);
    Ok(Taken {
        event: event(row, 0)?,
        epoch: small(row, 1)?,
        attempt: small(row, 2)?,
        attempt_limit: attempt_limit(row, 3)?,
        parked_at,
    })
}

/// How many attempts a delivery has of its own, if it has.
pub(super) fn attempt_limit(row: &Row, column: usize) -> Result<Option<u32>, EngineError> {
    Ok(maybe_number(row, column)?.map(|limit| u32::try_from(limit).unwrap_or(u32::MAX)))
}

/// At most this many bytes of bodies are read for one batch (and the body that crosses it).
pub(super) const BODIES_AT_ONCE: u64 = 8 << 20;

/// Deliveries of a route that are due, the longest due first, locked until the transaction ends.
async fn take(
    session: &mut Session,
    now: i64,
    route: &Route,
    limit: usize,
) -> Result<Vec<Taken>, EngineError> {
    let sql = format!(
        "{TAKEN} FROM oncehook_deliveries d WHERE d.place = 0 AND d.route = ? AND d.place_at <= ?
          ORDER BY d.place_at, d.event, d.epoch LIMIT ? FOR UPDATE SKIP LOCKED"
    );
    let limit = u64::try_from(limit).unwrap_or(u64::MAX);
    let rows = session.rows(&sql, vec![route.name.as_str().into(), now.into(), limit.into()]).await?;
    rows.iter().map(taken).collect()
}

/// Deliveries of a route that are due, with their events. With `only`, just that one, if it is still due with that attempt.
pub(super) async fn due(
    session: &mut Session,
    given: Option<i64>,
    route: &Route,
    limit: usize,
    only: Option<One>,
) -> Result<Locked, EngineError> {
    let now = session.now(given).await?;
    let mut taken = match only {
        None => take(session, now, route, limit).await?,
        Some((event, epoch, attempt)) => {
            let sql = format!(
                "{TAKEN} FROM oncehook_deliveries d
                  WHERE d.event = ? AND d.route = ? AND d.epoch = ? AND d.attempt = ? AND d.state IN ('ready', 'retrying')
                    FOR UPDATE SKIP LOCKED"
            );
            let fence = vec![id(event), route.name.as_str().into(), epoch.into(), attempt.into()];
            let rows = session.rows(&sql, fence).await?;
            rows.iter().map(self::taken).collect::<Result<_, _>>()?
        }
    };
    let count = taken.len();
    weigh(session, &mut taken).await?;
    let due = with_events(session, route, taken).await?;
    Ok(Locked { due, count, now: UnixMicros(now) })
}

/// Deliveries that the transaction has locked already, with their events, in this order, and the state that each leads to.
pub(super) async fn chosen(
    session: &mut Session,
    route: &Route,
    run: Vec<(Taken, Option<String>)>,
) -> Result<Vec<Due>, EngineError> {
    let (taken, states): (Vec<Taken>, Vec<Option<String>>) = run.into_iter().unzip();
    let mut due = with_events(session, route, taken).await?;
    for (due, state) in due.iter_mut().zip(states) {
        due.event.state = state;
    }
    Ok(due)
}

async fn with_events(
    session: &mut Session,
    route: &Route,
    taken: Vec<Taken>,
) -> Result<Vec<Due>, EngineError> {
    let mut events = handed(session, route, &taken).await?;
    let due = taken.into_iter().map(|taken| {
        let Taken { event, epoch, attempt, attempt_limit, parked_at } = taken;
        let event = events.remove(&(event, epoch)).ok_or_else(EngineError::damaged)?;
        let attempt_limit = attempt_limit.unwrap_or(route.retry.max_attempts);
        Ok(Due { event, epoch, attempt, attempt_limit, parked_at })
    });
    due.collect()
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
    let columns = "SELECT e.id, t.epoch, e.source, e.`key`, e.type, e.entity, e.occurred_at, e.received_at, e.headers, e.body,
                          e.version";
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
                result: maybe_text(&row, 11)?,
                version: maybe_number(&row, 10)?,
                state: None,
                current: None,
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
const ENQUEUE: Insert<'static> = Insert {
    head: "INSERT INTO oncehook_deliveries (event, route, epoch, state, run_at, entity, version)",
    row: "(?, ?, ?, 'ready', ?, ?, ?)",
    tail: " ON DUPLICATE KEY UPDATE epoch = oncehook_deliveries.epoch",
};

/// Makes deliveries that are due at once. Those that exist stay as they are. Returns those that were made. If others of the
/// event stand in the line of its entity, these do too.
pub(super) async fn enqueue<'r>(
    session: &mut Session,
    now: i64,
    event: EventId,
    epoch: u32,
    routes: impl IntoIterator<Item = &'r RouteName>,
) -> Result<Vec<RouteName>, EngineError> {
    let sql =
        "SELECT entity, version FROM oncehook_deliveries WHERE event = ? AND entity IS NOT NULL LIMIT 1";
    let (entity, version) = match session.row(sql, vec![id(event)]).await? {
        Some(row) => (maybe_text(&row, 0)?, maybe_number(&row, 1)?),
        None => (None, None),
    };
    let mut made = Vec::new();
    for route in routes {
        let entity = entity.as_deref().into();
        let row = vec![id(event), route.as_str().into(), epoch.into(), now.into(), entity, version.into()];
        if session.insert(ENQUEUE, vec![row]).await? > 0 {
            made.push(route.clone());
        }
    }
    Ok(made)
}

/// Makes the deliveries that follow on settled ones, and stand where those stood. Those that exist stay as they are.
pub(super) async fn follow(
    session: &mut Session,
    now: i64,
    followups: Vec<(&Fence, &RouteName)>,
) -> Result<(), EngineError> {
    if followups.is_empty() {
        return Ok(());
    }
    let asked = list(followups.into_iter().map(|(Fence { delivery, .. }, next)| {
        json!([hex(delivery.event), delivery.route.as_str(), delivery.epoch, next.as_str()])
    }));
    let sql = "INSERT INTO oncehook_deliveries (event, route, epoch, state, run_at, entity, version)
               SELECT d.event, t.next, d.epoch, 'ready', ?, d.entity, d.version
                 FROM JSON_TABLE(?, '$[*]' COLUMNS (event VARCHAR(32) PATH '$[0]', route VARCHAR(64) CHARACTER SET utf8mb4 PATH '$[1]',
                                                    epoch INT UNSIGNED PATH '$[2]', next VARCHAR(64) CHARACTER SET utf8mb4 PATH '$[3]')) t
                 STRAIGHT_JOIN oncehook_deliveries d ON d.event = UNHEX(t.event) AND d.route = t.route AND d.epoch = t.epoch
                   ON DUPLICATE KEY UPDATE epoch = oncehook_deliveries.epoch";
    session.change(sql, vec![now.into(), asked]).await?;
    Ok(())
}

pub(super) fn route_name(text: &str) -> Result<RouteName, EngineError> {
    RouteName::new(text).map_err(|_| EngineError::damaged())
}

/// A delivery that was leased for its next attempt.
pub(super) struct Leased {
    pub(super) fence: Fence,
    pub(super) attempt_limit: u32,
    pub(super) parked_at: Option<UnixMicros>,
    pub(super) event: HandedEvent,
}

/// A list of deliveries with their attempts, as the table that it becomes.
pub(super) const FENCES: &str = "JSON_TABLE(?, '$[*]' COLUMNS (place FOR ORDINALITY, event VARCHAR(32) PATH '$[0]', route VARCHAR(64) CHARACTER SET utf8mb4 PATH '$[1]',
                                              epoch INT UNSIGNED PATH '$[2]', attempt INT UNSIGNED PATH '$[3]')) t";

pub(super) fn fence_list<'f>(fences: impl IntoIterator<Item = &'f Fence>) -> Value {
    list(fences.into_iter().map(|Fence { delivery, attempt }| {
        json!([hex(delivery.event), delivery.route.as_str(), delivery.epoch, attempt])
    }))
}

/// Leases due deliveries, writes the attempts down before they begin, and commits. Of a route that looks at entities, those
/// whose turn it is.
pub(super) async fn lease(
    session: &mut Session,
    given: Option<i64>,
    route: &Route,
    limit: usize,
    lease: i64,
) -> Result<Vec<Leased>, EngineError> {
    let now = session.now(given).await?;
    let mut states: HashMap<(EventId, u32), Option<String>> = HashMap::new();
    let mut passed = Progress::default();
    let taken = if route.ordering.is_serial() {
        let look = (limit.max(PEEK), limit);
        let Turns { run, passed: settled, .. } =
            turn::take(session, now, route, Company::Lease, look, None).await?;
        passed = settled;
        states.extend(run.iter().map(|(taken, state)| ((taken.event, taken.epoch), state.clone())));
        run.into_iter().map(|(taken, _)| taken).collect()
    } else {
        take(session, now, route, limit).await?
    };
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
                SET d.state = 'running', d.attempt = t.attempt, d.lease_until = ?, d.lease_limit = COALESCE(d.attempt_limit, ?),
                    d.blocked_at = NULL
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
            let place = (taken.event, taken.epoch);
            let mut event = events.remove(&place).ok_or_else(EngineError::damaged)?;
            event.state = states.remove(&place).flatten();
            let attempt_limit = taken.attempt_limit.unwrap_or(route.retry.max_attempts);
            leased.push(Leased { fence, attempt_limit, parked_at: taken.parked_at, event });
        }
    }
    session.run("COMMIT").await?;
    route.report(&passed.failed);
    Ok(leased)
}

/// Rows that are locked since they were read must be as they were. If not, nothing here can be trusted, and the transaction
/// is undone with its connection.
pub(super) fn all_changed(changed: u64, wanted: usize) -> Result<(), EngineError> {
    if u64::try_from(wanted) == Ok(changed) {
        Ok(())
    } else {
        Err(EngineError::other("a delivery changed although it was locked"))
    }
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

/// Takes leases away that have run out, in one transaction. Each is an attempt that failed.
pub(super) async fn reclaim(
    session: &mut Session,
    given: Option<i64>,
    route: &Route,
    mut draw: impl FnMut() -> f64,
) -> Result<Vec<FailedAttempt>, EngineError> {
    let now = session.now(given).await?;
    let serial = route.ordering.is_serial();
    let due = || vec![route.name.as_str().into(), now.into()];
    if serial {
        // The lines first, as everybody does who settles.
        let sql = "SELECT DISTINCT entity FROM oncehook_deliveries
                    WHERE place = 1 AND route = ? AND place_at <= ? AND entity IS NOT NULL";
        let rows = session.rows(sql, due()).await?;
        let entities: Vec<String> = rows.iter().map(|row| text(row, 0)).collect::<Result<_, _>>()?;
        lines::lock(session, &route.name, &entities.iter().map(String::as_str).collect()).await?;
    }
    let sql = format!(
        "{TAKEN} FROM oncehook_deliveries d WHERE d.place = 1 AND d.route = ? AND d.place_at <= ? LIMIT 1000 FOR UPDATE SKIP LOCKED"
    );
    let rows = session.rows(&sql, due()).await?;
    let mut failed = Vec::with_capacity(rows.len());
    let expired: Vec<(Fence, Verdict)> = rows
        .iter()
        .map(|row| {
            let taken = taken(row)?;
            let delivery = DeliveryId { event: taken.event, route: route.name.clone(), epoch: taken.epoch };
            let fence = Fence { delivery, attempt: taken.attempt };
            let limit = taken.attempt_limit.unwrap_or(route.retry.max_attempts);
            let verdict = route.after_lost_lease(fence.attempt, limit, UnixMicros(now), draw());
            let event = fence.delivery.event;
            failed.extend(FailedAttempt::of(event, fence.attempt, limit, &verdict, UnixMicros(now)));
            Ok((fence, verdict))
        })
        .collect::<Result<_, EngineError>>()?;
    let ended: Vec<_> =
        expired.iter().map(|(fence, verdict)| Ended { fence, verdict, followups: &[] }).collect();
    settle(session, now, UnixMicros(now), Held::LostLease, &ended).await?;
    if serial && !expired.is_empty() {
        let about = lines::about(session, expired.iter().map(|(fence, _)| fence)).await?;
        let came: Vec<Came<'_>> = expired
            .iter()
            .filter_map(|(fence, verdict)| Some(about.get(&fence.delivery.event)?.came(verdict)))
            .collect();
        lines::after(session, now, route, &came).await?;
    }
    session.run("COMMIT").await?;
    Ok(failed)
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
    // What waits for its turn is due at no time.
    let at = row.map(|row| number(&row, 0)).transpose()?.filter(|at| *at != NO_TIME.0);
    Ok(at.map(|at| at.saturating_sub(now)))
}

/// A draw from a shared source of chances.
pub(super) fn drawing(chance: &std::sync::Mutex<Chance>) -> impl FnMut() -> f64 + '_ {
    || chance.lock().unwrap_or_else(std::sync::PoisonError::into_inner).draw()
}
