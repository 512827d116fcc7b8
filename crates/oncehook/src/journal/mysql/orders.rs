//! What operators order for one event. Each order is one transaction with the audit row that records it.
//!
//! The event's row and its deliveries are locked first, so that two operators, a worker and the janitor come one after the
//! other, and what an order looks at is what it changes.

use oncehook_verify::UnixMicros;
use std::collections::BTreeSet;

use super::connection::Session;
use super::engine_error::EngineError;
use super::queue::{self, route_name};
use super::row::{id, is_true, list, maybe_text, number, small, text};
use super::{ends, lines};
use crate::delivery::{DeliveryState, RouteName};
use crate::journal::{Order, OrderError, Ordered, Pausable, Pause, Paused, Verb, Who};

/// Why an order was not carried out: it did not fit, or the database failed.
pub(super) enum Refused {
    Unfit(OrderError),
    Engine(EngineError),
}

impl From<EngineError> for Refused {
    fn from(error: EngineError) -> Self {
        Self::Engine(error)
    }
}

fn unfit(reason: &str) -> Refused {
    Refused::Unfit(OrderError::Unfit(reason.to_owned()))
}

/// A delivery of the event, locked.
struct Found {
    route: RouteName,
    epoch: u32,
    state: String,
    /// Whether an attempt of it holds a lease that has not run out.
    leased: bool,
}

impl Found {
    fn is_one_of(&self, states: &[&str]) -> bool {
        states.contains(&self.state.as_str())
    }
}

/// Carries an order out. All branching about verbs is here. After an error the transaction is still open: the caller drops
/// the connection.
pub(super) async fn carry_out(
    session: &mut Session,
    given: Option<i64>,
    order: &Order,
) -> Result<Ordered, Refused> {
    let now = session.now(given).await?;
    let entity = lock_lines(session, order).await?;
    let held = look(session, order).await?.ok_or(Refused::Unfit(OrderError::NoEvent))?;
    let found = deliveries(session, now, order).await?;
    let latest = found.iter().map(|found| found.epoch).max().unwrap_or(0);
    if held && !matches!(order.verb, Verb::Release | Verb::Skip) {
        return Err(unfit("the event is held; release it first"));
    }
    let wanting: Vec<&RouteName> = order.wanting.iter().filter(|route| order.is_for(route)).collect();
    // Routes that never had a delivery.
    let new: Vec<&RouteName> =
        wanting.iter().copied().filter(|route| !found.iter().any(|found| found.route == **route)).collect();
    let mut epoch = latest;
    let routes: BTreeSet<RouteName> = match order.verb {
        Verb::Retry => {
            let revived = revive(session, now, order, &found).await?;
            if revived.is_empty() {
                return Err(unfit("nothing to retry: no delivery is dead or waits for another attempt"));
            }
            revived
        }
        Verb::Replay => {
            let mut routes = revive(session, now, order, &found).await?;
            routes.extend(queue::enqueue(session, now, order.event, 0, new).await?);
            routes
        }
        Verb::ForceReplay { epoch: asked } => {
            if !order.who.has_reason() {
                return Err(unfit("a forced replay needs a reason"));
            }
            if asked != latest + 1 {
                return Err(Refused::Unfit(OrderError::Epoch { next: latest + 1 }));
            }
            // A route that is named runs again even if it is a follow-up, or wants the event no more.
            let again = order.route.as_ref().map_or(wanting, |named| vec![named]);
            if again.is_empty() {
                return Err(unfit("no route wants this event"));
            }
            epoch = asked;
            queue::enqueue(session, now, order.event, asked, again).await?.into_iter().collect()
        }
        Verb::Skip => skip(session, now, order, &found).await?,
        Verb::Release => {
            if !held {
                return Err(unfit("the event is not held"));
            }
            let sql = "DELETE FROM oncehook_flags WHERE event = ? AND flag = 'quarantined'";
            session.change(sql, vec![id(order.event)]).await?;
            queue::enqueue(session, now, order.event, 0, new).await?.into_iter().collect()
        }
    };
    ends::revived(session, order.event).await?;
    if let Some(entity) = &entity {
        // Whoever waited for a delivery that was changed may look again.
        for route in &routes {
            lines::let_go_on(session, now, route, &[(entity, 1)]).await?;
        }
    }
    let ordered = Ordered { routes: routes.into_iter().collect(), epoch };
    if ordered.changed_anything(order.verb) {
        let (subject, detail) = (order.event.to_string(), ordered.to_json());
        write_down(session, now, &order.who, order.verb.as_str(), &subject, Some(&detail)).await?;
    }
    session.run("COMMIT").await?;
    Ok(ordered)
}

/// The event's entity, if it has one. The lines in which its deliveries stand are locked before the deliveries, as workers do it.
async fn lock_lines(session: &mut Session, order: &Order) -> Result<Option<String>, EngineError> {
    let sql = "SELECT entity FROM oncehook_events WHERE id = ?";
    let Some(row) = session.row(sql, vec![id(order.event)]).await? else { return Ok(None) };
    let entity = maybe_text(&row, 0)?;
    if let Some(entity) = &entity {
        let sql = "SELECT DISTINCT route FROM oncehook_deliveries WHERE event = ? ORDER BY route";
        let rows = session.rows(sql, vec![id(order.event)]).await?;
        let routes: Vec<String> = rows.iter().map(|row| text(row, 0)).collect::<Result<_, _>>()?;
        let sql = "SELECT e.scope FROM JSON_TABLE(?, '$[*]' COLUMNS (route VARCHAR(64) CHARACTER SET utf8mb4 PATH '$')) t
                    STRAIGHT_JOIN oncehook_entities e ON e.scope = t.route AND e.entity = ? FOR UPDATE";
        let routes = list(routes.into_iter().map(serde_json::Value::from));
        session.rows(sql, vec![routes, entity.as_str().into()]).await?;
    }
    Ok(entity)
}

/// Whether the event is held; `None` if there is no such event. Until the end of the transaction nobody else orders
/// anything for it, and nobody forgets it.
async fn look(session: &mut Session, order: &Order) -> Result<Option<bool>, EngineError> {
    let sql = "SELECT 1 FROM oncehook_events WHERE id = ? FOR UPDATE";
    if session.row(sql, vec![id(order.event)]).await?.is_none() {
        return Ok(None);
    }
    let sql = "SELECT 1 FROM oncehook_flags WHERE event = ? AND flag = 'quarantined'";
    Ok(Some(session.row(sql, vec![id(order.event)]).await?.is_some()))
}

async fn deliveries(session: &mut Session, now: i64, order: &Order) -> Result<Vec<Found>, EngineError> {
    let sql = "SELECT route, epoch, state, state = 'running' AND lease_until > ?
                 FROM oncehook_deliveries WHERE event = ? ORDER BY route, epoch FOR UPDATE";
    let rows = session.rows(sql, vec![now.into(), id(order.event)]).await?;
    rows.iter()
        .map(|row| {
            let route = route_name(&text(row, 0)?)?;
            Ok(Found { route, epoch: small(row, 1)?, state: text(row, 2)?, leased: is_true(row, 3)? })
        })
        .collect()
}

/// The routes of deliveries that an order is for and that are in one of these states.
fn chosen(order: &Order, found: &[Found], states: &[&str]) -> BTreeSet<RouteName> {
    let chosen = found.iter().filter(|found| order.is_for(&found.route) && found.is_one_of(states));
    chosen.map(|found| found.route.clone()).collect()
}

/// Only the route that the order names, if it names one.
fn only(order: &Order) -> Option<&str> {
    order.route.as_ref().map(RouteName::as_str)
}

/// Makes what failed due now, with fresh attempts.
async fn revive(
    session: &mut Session,
    now: i64,
    order: &Order,
    found: &[Found],
) -> Result<BTreeSet<RouteName>, EngineError> {
    let sql = "UPDATE oncehook_deliveries
                  SET state = IF(attempt > 0, 'retrying', 'ready'), run_at = ?, settled_at = NULL, cause = NULL,
                      attempt_limit = attempt + ?, blocked_at = NULL, parked_at = NULL
                WHERE event = ? AND route = COALESCE(?, route) AND state IN ('dead', 'retrying', 'parked')";
    let attempts = order.attempts.min(u32::MAX / 2);
    session.change(sql, vec![now.into(), attempts.into(), id(order.event), only(order).into()]).await?;
    Ok(chosen(order, found, &["dead", "retrying", "parked"]))
}

/// Gives up what is pending or dead. What runs cannot be called back, unless its lease has run out: then nobody has it, and
/// its route may be gone.
async fn skip(
    session: &mut Session,
    now: i64,
    order: &Order,
    found: &[Found],
) -> Result<BTreeSet<RouteName>, Refused> {
    if found.iter().any(|found| order.is_for(&found.route) && found.leased) {
        return Err(unfit("a delivery is running; wait for it, or pause its route first"));
    }
    let routes = chosen(order, found, &["ready", "running", "retrying", "parked", "dead"]);
    if routes.is_empty() {
        return Err(unfit("nothing to skip: no delivery is pending or dead"));
    }
    // An attempt that nobody holds any more never ended.
    let sql = "UPDATE oncehook_attempts SET finished_at = ?, outcome = 'lost'
                WHERE event = ? AND route = COALESCE(?, route) AND finished_at IS NULL";
    session.change(sql, vec![now.into(), id(order.event), only(order).into()]).await?;
    let sql = "UPDATE oncehook_deliveries
                  SET state = 'skipped', settled_at = ?, lease_until = NULL, blocked_at = NULL, parked_at = NULL,
                      run_at = IF(run_at = 9223372036854775807, ?, run_at)
                WHERE event = ? AND route = COALESCE(?, route)
                  AND state IN ('ready', 'running', 'retrying', 'parked', 'dead')";
    session.change(sql, vec![now.into(), now.into(), id(order.event), only(order).into()]).await?;
    ends::write(session, std::iter::once((DeliveryState::Skipped, order.event))).await?;
    Ok(routes)
}

/// One row of the audit.
pub(super) async fn write_down(
    session: &mut Session,
    now: i64,
    who: &Who,
    action: &str,
    subject: &str,
    detail: Option<&str>,
) -> Result<(), EngineError> {
    let sql =
        "INSERT INTO oncehook_audit (at, who, action, subject, reason, detail) VALUES (?, ?, ?, ?, ?, ?)";
    let (name, reason) = (who.name.as_str().into(), who.reason.as_deref().into());
    session.change(sql, vec![now.into(), name, action.into(), subject.into(), reason, detail.into()]).await?;
    Ok(())
}

/// Pauses or resumes a source or route, in one transaction with its row in the audit; there is none if it is so already.
pub(super) async fn set_paused(
    session: &mut Session,
    given: Option<i64>,
    pause: &Pause,
    who: &Who,
) -> Result<(), EngineError> {
    let (kind, name) = pause.what.parts();
    let now = session.now(given).await?;
    let changed = if pause.paused {
        // A row that stays as it is does not count as affected.
        let sql = "INSERT INTO oncehook_pauses (kind, name, at) VALUES (?, ?, ?)
                   ON DUPLICATE KEY UPDATE at = oncehook_pauses.at";
        session.change(sql, vec![kind.into(), name.into(), now.into()]).await?
    } else {
        let sql = "DELETE FROM oncehook_pauses WHERE kind = ? AND name = ?";
        session.change(sql, vec![kind.into(), name.into()]).await?
    };
    if changed > 0 {
        write_down(session, now, who, pause.as_str(), &format!("{kind}:{name}"), None).await?;
    }
    session.run("COMMIT").await
}

/// What is paused, since when, by whom and why: routes, then sources.
pub(super) async fn pauses(session: &mut Session) -> Result<Vec<Paused>, EngineError> {
    let sql = "SELECT p.kind, p.name, p.at, a.who, a.reason
                 FROM oncehook_pauses p
                 LEFT JOIN oncehook_audit a ON a.id = (SELECT MIN(b.id) FROM oncehook_audit b
                    WHERE b.subject = CONCAT(p.kind, ':', p.name) AND b.action = 'pause' AND b.at >= p.at)
                ORDER BY p.kind = 'source', p.name";
    let rows = session.rows(sql, Vec::new()).await?;
    session.run("ROLLBACK").await?;
    let paused = |row: &mysql_async::Row| {
        let what = Pausable::from_parts(&text(row, 0)?, text(row, 1)?);
        let since = UnixMicros(number(row, 2)?);
        Ok(Paused { what, since, who: maybe_text(row, 3)?, reason: maybe_text(row, 4)? })
    };
    rows.iter().map(paused).collect()
}

/// What is paused: routes, then sources.
pub(super) async fn paused(session: &mut Session) -> Result<Vec<Pausable>, EngineError> {
    let sql = "SELECT kind, name FROM oncehook_pauses ORDER BY kind = 'source', name";
    let rows = session.rows(sql, Vec::new()).await?;
    session.run("ROLLBACK").await?;
    let pausable = |row: &mysql_async::Row| {
        let name = text(row, 1)?;
        Ok(if text(row, 0)? == "source" { Pausable::Source(name) } else { Pausable::Route(name) })
    };
    rows.iter().map(pausable).collect()
}
