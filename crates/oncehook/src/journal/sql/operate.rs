//! What operators order for one event, and what they pause. Each order is one transaction with the audit row that
//! records it.
//!
//! Promises: the event's row and its deliveries are locked before they are looked at, so that two operators, a worker
//! and the janitor come one after the other, and what an order looks at is what it changes.
//!
//! Does not: decide what an order changes, or why it is refused. `decide::order` does.

use std::future::Future;

use super::error::{EngineError, Meaning};
use super::value::{Param, Row};
use super::{Result, Session};
use crate::delivery::{DeliveryState, RouteName};
use crate::event::EventId;
use crate::journal::decide::order::{Changes, Found, Revived, decide};
use crate::journal::{Order, OrderError, Ordered, Pausable, Pause, Paused, Who};

/// A session on which operators' orders are carried out.
pub(crate) trait Operates: Session {
    /// `$1`: now; `$2`, `$3`, `$4`: event, route, epoch. Makes a delivery that is due at once; one that exists stays as
    /// it is. If others of the event are in the queue of its entity, this one is too.
    const ENQUEUE: &'static str = "
        INSERT INTO oncehook.deliveries (event, route, epoch, state, run_at, entity, version)
        VALUES ($2, $3, $4, 'ready', $1,
                (SELECT entity FROM oncehook.deliveries WHERE event = $2 AND entity IS NOT NULL LIMIT 1),
                (SELECT version FROM oncehook.deliveries WHERE event = $2 AND entity IS NOT NULL LIMIT 1))
        ON CONFLICT (event, route, epoch) DO NOTHING";
    /// `$1`: now; `$2`: kind; `$3`: name. Changes a row if it was not paused.
    const PAUSE: &'static str =
        "INSERT INTO oncehook.pauses (at, kind, name) VALUES ($1, $2, $3) ON CONFLICT (kind, name) DO NOTHING";

    /// Begins the transaction of an order, and returns its time.
    fn begin_order(&mut self, given: Option<i64>) -> impl Future<Output = Result<i64>> + Send {
        self.begin(given)
    }

    /// Puts the first blocked delivery of an entity on a route back into the queue.
    fn unblock(&mut self, now: i64, route: &RouteName, entity: &str) -> impl Future<Output = Result<()>> + Send;
}

/// `$1`: event. Returns its entity (or null) with each of its routes (or null), by route. Locks nothing.
const ENTITY_AND_ROUTES: &str = "SELECT DISTINCT e.entity, d.route
   FROM oncehook.events e LEFT JOIN oncehook.deliveries d ON d.event = e.id WHERE e.id = $1 ORDER BY d.route";
const LOCK_QUEUE: &str = "SELECT 1 FROM oncehook.entities WHERE scope = $1 AND entity = $2 FOR UPDATE";
const LOCK_EVENT: &str = "SELECT 1 FROM oncehook.events e WHERE e.id = $1 FOR UPDATE";
const IS_HELD: &str = "SELECT 1 FROM oncehook.flags WHERE event = $1 AND flag = 'quarantined'";
/// `$1`: now; `$2`: event. Returns route, epoch, state, attempt, and whether it is leased.
const LOCK_DELIVERIES: &str = "SELECT route, epoch, state, attempt, state = 'running' AND lease_until > $1
   FROM oncehook.deliveries WHERE event = $2 ORDER BY route, epoch FOR UPDATE";
/// `$1`: now; `$2`, `$3`, `$4`: event, route, epoch; `$5`: state; `$6`: attempt limit. Makes this delivery due now.
const REVIVE: &str = "UPDATE oncehook.deliveries
    SET state = $5, run_at = $1, settled_at = NULL, cause = NULL, attempt_limit = $6, blocked_at = NULL, parked_at = NULL
  WHERE event = $2 AND route = $3 AND epoch = $4";
/// `$1`: now; `$2`, `$3`, `$4`: event, route, epoch. Attempts that have no end were lost.
const LOSE_ATTEMPTS: &str = "UPDATE oncehook.attempts SET finished_at = $1, outcome = 'lost'
  WHERE event = $2 AND route = $3 AND epoch = $4 AND finished_at IS NULL";
/// `$1`: now; `$2`, `$3`, `$4`: event, route, epoch. Gives this delivery up.
const SKIP: &str = "UPDATE oncehook.deliveries
    SET state = 'skipped', settled_at = $1, lease_until = NULL, blocked_at = NULL, parked_at = NULL,
        run_at = CASE WHEN run_at = 9223372036854775807 THEN $1 ELSE run_at END
  WHERE event = $2 AND route = $3 AND epoch = $4";
const RELEASE: &str = "DELETE FROM oncehook.flags WHERE event = $1 AND flag = 'quarantined'";
/// `$1`: now; `$2` to `$6`: who, action, subject, reason, detail.
const AUDIT: &str =
    "INSERT INTO oncehook.audit (at, who, action, subject, reason, detail) VALUES ($1, $2, $3, $4, $5, $6)";
const RESUME: &str = "DELETE FROM oncehook.pauses WHERE kind = $1 AND name = $2";
/// Returns kind, name, since when, by whom, why. Routes, then sources, by name.
const PAUSES: &str = "SELECT p.kind, p.name, p.at, a.who, a.reason
   FROM oncehook.pauses p
   LEFT JOIN oncehook.audit a ON a.id = (SELECT min(b.id) FROM oncehook.audit b
      WHERE b.subject = concat(p.kind, ':', p.name) AND b.action = 'pause' AND b.at >= p.at)
  ORDER BY p.kind = 'source', p.name";

/// Carries an order out, and commits. An order that does not fit is undone.
pub(crate) async fn order<S: Operates>(
    session: &mut S,
    given: Option<i64>,
    order: &Order,
) -> Result<Result<Ordered, OrderError>> {
    let now = session.begin_order(given).await?;
    let entity = lock_queues(session, order.event).await?;
    let held = look(session, order.event).await?;
    let found = match held {
        Some(_) => deliveries(session, now, order.event).await?,
        None => Vec::new(),
    };
    let changes = match decide(order, held, &found) {
        Ok(changes) => changes,
        Err(unfit) => {
            // At once, not when the server notices that the connection is gone: until then the deliveries are locked,
            // and workers skip them.
            session.rollback().await?;
            return Ok(Err(unfit));
        }
    };
    write(session, now, order.event, &changes).await?;
    if let Some(entity) = &entity {
        for route in &changes.ordered.routes {
            session.unblock(now, route, entity).await?;
        }
    }
    if let Some(detail) = &changes.audit {
        audit(session, now, &order.who, order.verb.as_str(), &order.event.to_string(), Some(detail)).await?;
    }
    session.commit().await?;
    Ok(Ok(changes.ordered))
}

/// The event's entity, if it has one. The entity's queues in which its deliveries are get locked before the deliveries,
/// as workers do it.
async fn lock_queues<S: Operates>(session: &mut S, event: EventId) -> Result<Option<String>> {
    let rows = session.rows(ENTITY_AND_ROUTES, &[event.into()]).await?;
    let Some(entity) = rows.first().map(|row| row.maybe_text(0)).transpose()?.flatten() else { return Ok(None) };
    for row in &rows {
        if let Some(route) = row.maybe_text(1)? {
            session.row(LOCK_QUEUE, &[(&route).into(), (&entity).into()]).await?;
        }
    }
    Ok(Some(entity))
}

/// Whether the event is held; `None` if there is no such event. Until the end of the transaction no one else orders
/// anything for it, and the janitor does not forget it. Two statements: the second one must see what was committed
/// before the lock.
async fn look<S: Operates>(session: &mut S, event: EventId) -> Result<Option<bool>> {
    if session.row(LOCK_EVENT, &[event.into()]).await?.is_none() {
        return Ok(None);
    }
    Ok(Some(session.row(IS_HELD, &[event.into()]).await?.is_some()))
}

async fn deliveries<S: Operates>(session: &mut S, now: i64, event: EventId) -> Result<Vec<Found>> {
    let rows = session.rows(LOCK_DELIVERIES, &[now.into(), event.into()]).await?;
    let found = rows.iter().map(|row| {
        let state = DeliveryState::parse(&row.text(2)?).ok_or_else(EngineError::damaged)?;
        let (route, epoch, attempt, leased) = (row.route(0)?, row.small(1)?, row.small(3)?, row.is_true(4)?);
        Ok(Found { route, epoch, state, attempt, leased })
    });
    found.collect()
}

/// Writes what the order changes. An event has few routes, so each delivery is a statement.
async fn write<S: Operates>(session: &mut S, now: i64, event: EventId, changes: &Changes<'_>) -> Result<()> {
    for Revived { route, epoch, state, limit } in &changes.revive {
        let asked =
            [Param::from(now), event.into(), (*route).into(), (*epoch).into(), state.as_str().into(), (*limit).into()];
        session.change(REVIVE, &asked).await?;
    }
    for Found { route, epoch, .. } in &changes.skip {
        let asked = [Param::from(now), event.into(), route.into(), (*epoch).into()];
        session.change(LOSE_ATTEMPTS, &asked).await?;
        session.change(SKIP, &asked).await?;
    }
    if changes.release {
        session.change(RELEASE, &[event.into()]).await?;
    }
    for (route, epoch) in &changes.make {
        let asked = [Param::from(now), event.into(), (*route).into(), (*epoch).into()];
        if session.change(S::ENQUEUE, &asked).await? == 0 {
            // Looked at again, what it made is among the event's deliveries.
            let meaning = Meaning { collision: true, ..Meaning::default() };
            return Err(EngineError::with("a worker made a follow-up of the event at this moment", meaning));
        }
    }
    Ok(())
}

/// One row of the audit.
pub(super) async fn audit<S: Operates>(
    session: &mut S,
    now: i64,
    who: &Who,
    action: &str,
    subject: &str,
    detail: Option<&str>,
) -> Result<()> {
    // PostgreSQL's texts have no zero characters.
    let text = |text: &String| text.replace('\0', "\u{fffd}");
    let (name, reason) = (text(&who.name), who.reason.as_ref().map(text));
    let row = [Param::from(now), (&name).into(), action.into(), subject.into(), reason.as_ref().into(), detail.into()];
    session.change(AUDIT, &row).await.map(|_| ())
}

/// Pauses or resumes a source or route, in one transaction with its row in the audit; there is none if it is so
/// already.
pub(crate) async fn set_paused<S: Operates>(
    session: &mut S,
    given: Option<i64>,
    pause: &Pause,
    who: &Who,
) -> Result<()> {
    let (kind, name) = pause.what.parts();
    let now = session.begin(given).await?;
    let changed = match pause.paused {
        true => session.change(S::PAUSE, &[now.into(), kind.into(), name.into()]).await?,
        false => session.change(RESUME, &[kind.into(), name.into()]).await?,
    };
    if changed > 0 {
        audit(session, now, who, pause.as_str(), &format!("{kind}:{name}"), None).await?;
    }
    session.commit().await
}

/// What is paused, since when, by whom and why.
pub(crate) async fn pauses<S: Operates>(session: &mut S) -> Result<Vec<Paused>> {
    let rows = session.rows(PAUSES, &[]).await?;
    session.commit_single().await?;
    let paused = rows.iter().map(|row| {
        let what = Pausable::from_parts(&row.text(0)?, row.text(1)?);
        Ok(Paused { what, since: row.time(2)?, who: row.maybe_text(3)?, reason: row.maybe_text(4)? })
    });
    paused.collect()
}

/// What is paused.
pub(crate) async fn paused<S: Operates>(session: &mut S) -> Result<Vec<Pausable>> {
    Ok(pauses(session).await?.into_iter().map(|paused| paused.what).collect())
}
