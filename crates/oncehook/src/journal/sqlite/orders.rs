//! What operators order for one event. Each order is one transaction with the audit row that records it.

use oncehook_verify::UnixMicros;
use rusqlite::{Connection, OptionalExtension, Transaction, params};

use super::{entity, queue};
use crate::delivery::RouteName;
use crate::event::EventId;
use crate::journal::{Order, OrderError, Ordered, Pausable, Pause, Paused, Verb, Who};

/// Why an order was not carried out: it did not fit, or the database failed.
pub(super) enum Refused {
    Unfit(OrderError),
    Engine(rusqlite::Error),
}

impl From<rusqlite::Error> for Refused {
    fn from(error: rusqlite::Error) -> Self {
        Self::Engine(error)
    }
}

fn unfit(reason: &str) -> Refused {
    Refused::Unfit(OrderError::Unfit(reason.to_owned()))
}

/// Carries an order out. All branching about verbs is here.
pub(super) fn carry_out(transaction: &Transaction<'_>, order: &Order, now: UnixMicros) -> Result<Ordered, Refused> {
    let event = order.event;
    let held = look(transaction, event)?.ok_or(Refused::Unfit(OrderError::NoEvent))?;
    let latest: Option<u32> = transaction
        .prepare_cached("SELECT max(epoch) FROM oncehook_deliveries WHERE event = ?1")?
        .query_row([event.sequence()], |row| row.get(0))?;
    let latest = latest.unwrap_or(0);
    if held && !matches!(order.verb, Verb::Release | Verb::Skip) {
        return Err(unfit("the event is held; release it first"));
    }
    let wanted = |route: &&RouteName| order.route.as_ref().is_none_or(|only| only == *route);
    let wanting: Vec<&RouteName> = order.wanting.iter().filter(wanted).collect();
    let mut epoch = latest;
    let mut routes = match order.verb {
        Verb::Retry => {
            let revived = revive(transaction, order, now)?;
            if revived.is_empty() {
                return Err(unfit("nothing to retry: no delivery is dead or waits for another attempt"));
            }
            revived
        }
        Verb::Replay => {
            let mut routes = revive(transaction, order, now)?;
            for route in wanting {
                if !has_delivery(transaction, event, route)? {
                    routes.extend(queue::enqueue(transaction, event, 0, [route], now)?);
                }
            }
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
            queue::enqueue(transaction, event, asked, again, now)?
        }
        Verb::Skip => skip(transaction, order, now)?,
        Verb::Release => {
            if !held {
                return Err(unfit("the event is not held"));
            }
            transaction
                .prepare_cached("DELETE FROM oncehook_flags WHERE event = ?1 AND flag = 'quarantined'")?
                .execute([event.sequence()])?;
            queue::enqueue(transaction, event, 0, wanting, now)?
        }
    };
    routes.sort_unstable();
    routes.dedup();
    let_others_go_on(transaction, event, &routes, now)?;
    let ordered = Ordered { routes, epoch };
    if ordered.changed_anything(order.verb) {
        let (subject, detail) = (event.to_string(), ordered.to_json());
        write_down(transaction, &order.who, order.verb.as_str(), &subject, Some(&detail), now)?;
    }
    Ok(ordered)
}

/// Whoever waited for a delivery that was changed may look again.
fn let_others_go_on(
    connection: &Connection,
    event: EventId,
    routes: &[RouteName],
    now: UnixMicros,
) -> Result<(), rusqlite::Error> {
    let entity: Option<String> = connection
        .prepare_cached("SELECT entity FROM oncehook_events WHERE seq = ?1")?
        .query_row([event.sequence()], |row| row.get(0))?;
    let Some(entity) = entity else { return Ok(()) };
    routes.iter().try_for_each(|route| entity::let_go_on(connection, route.as_str(), &entity, 1, now))
}

/// Whether the event is held; `None` if there is no such event.
fn look(connection: &Connection, event: EventId) -> Result<Option<bool>, rusqlite::Error> {
    connection
        .prepare_cached(
            "SELECT EXISTS (SELECT 1 FROM oncehook_flags WHERE event = ?1 AND flag = 'quarantined')
               FROM oncehook_events WHERE seq = ?1 AND id = ?2",
        )?
        .query_row(params![event.sequence(), event.as_bytes()], |row| row.get(0))
        .optional()
}

fn has_delivery(connection: &Connection, event: EventId, route: &RouteName) -> Result<bool, rusqlite::Error> {
    connection
        .prepare_cached("SELECT 1 FROM oncehook_deliveries WHERE event = ?1 AND route = ?2")?
        .exists(params![event.sequence(), route.as_str()])
}

/// Makes what failed due now, with fresh attempts.
fn revive(connection: &Connection, order: &Order, now: UnixMicros) -> Result<Vec<RouteName>, rusqlite::Error> {
    let only = order.route.as_ref().map(RouteName::as_str);
    changed_routes(
        connection,
        "UPDATE oncehook_deliveries
            SET state = CASE WHEN attempt > 0 THEN 'retrying' ELSE 'ready' END, run_at = ?3, settled_at = NULL,
                cause = NULL, attempt_limit = attempt + ?4, blocked_at = NULL, parked_at = NULL
          WHERE event = ?1 AND (?2 IS NULL OR route = ?2) AND state IN ('dead', 'retrying', 'parked')
        RETURNING route",
        params![order.event.sequence(), only, now.0, order.attempts],
    )
}

/// Gives up what is pending or dead. What runs cannot be called back, unless its lease has run out: then nobody has it, and
/// its route may be gone.
fn skip(connection: &Connection, order: &Order, now: UnixMicros) -> Result<Vec<RouteName>, Refused> {
    let only = order.route.as_ref().map(RouteName::as_str);
    let running = connection
        .prepare_cached(
            "SELECT 1 FROM oncehook_deliveries WHERE event = ?1 AND (?2 IS NULL OR route = ?2) AND state = 'running'
                AND lease_until > ?3",
        )?
        .exists(params![order.event.sequence(), only, now.0])?;
    if running {
        return Err(unfit("a delivery is running; wait for it, or pause its route first"));
    }
    // An attempt that nobody holds any more never ended.
    connection
        .prepare_cached(
            "UPDATE oncehook_attempts SET finished_at = ?3, outcome = 'lost'
              WHERE event = ?1 AND (?2 IS NULL OR route = ?2) AND finished_at IS NULL",
        )?
        .execute(params![order.event.sequence(), only, now.0])?;
    let skipped = changed_routes(
        connection,
        "UPDATE oncehook_deliveries SET state = 'skipped', settled_at = ?3, lease_until = NULL, blocked_at = NULL, parked_at = NULL,
                run_at = iif(run_at = 9223372036854775807, ?3, run_at)
          WHERE event = ?1 AND (?2 IS NULL OR route = ?2) AND state IN ('ready', 'running', 'retrying', 'parked', 'dead')
        RETURNING route",
        params![order.event.sequence(), only, now.0],
    )?;
    if skipped.is_empty() { Err(unfit("nothing to skip: no delivery is pending or dead")) } else { Ok(skipped) }
}

fn changed_routes(
    connection: &Connection,
    sql: &str,
    parameters: impl rusqlite::Params,
) -> Result<Vec<RouteName>, rusqlite::Error> {
    let mut routes: Vec<RouteName> = connection
        .prepare_cached(sql)?
        .query_map(parameters, |row| {
            RouteName::new(row.get_ref(0)?.as_str()?).map_err(|_| rusqlite::Error::InvalidQuery)
        })?
        .collect::<Result<_, _>>()?;
    routes.sort_unstable();
    routes.dedup();
    Ok(routes)
}

/// One row of the audit.
pub(super) fn write_down(
    connection: &Connection,
    who: &Who,
    action: &str,
    subject: &str,
    detail: Option<&str>,
    now: UnixMicros,
) -> Result<(), rusqlite::Error> {
    connection
        .prepare_cached(
            "INSERT INTO oncehook_audit (at, who, action, subject, reason, detail) VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
        )?
        .execute(params![now.0, who.name, action, subject, who.reason, detail])?;
    Ok(())
}

/// Pauses or resumes a source or route, and writes it down unless it is so already.
pub(super) fn set_paused(
    transaction: &Transaction<'_>,
    pause: &Pause,
    who: &Who,
    now: UnixMicros,
) -> Result<(), rusqlite::Error> {
    let (kind, name) = pause.what.parts();
    let sql = if pause.paused {
        "INSERT INTO oncehook_pauses (kind, name, at) VALUES (?1, ?2, ?3) ON CONFLICT (kind, name) DO NOTHING"
    } else {
        "DELETE FROM oncehook_pauses WHERE kind = ?1 AND name = ?2 AND ?3 IS NOT NULL"
    };
    if transaction.prepare_cached(sql)?.execute(params![kind, name, now.0])? == 0 {
        return Ok(());
    }
    write_down(transaction, who, pause.as_str(), &format!("{kind}:{name}"), None, now)
}

/// What is paused, since when, by whom and why.
pub(super) fn pauses(connection: &Connection) -> Result<Vec<Paused>, rusqlite::Error> {
    connection
        .prepare_cached(
            "SELECT p.kind, p.name, p.at, a.who, a.reason
               FROM oncehook_pauses p
               LEFT JOIN oncehook_audit a ON a.id = (SELECT min(b.id) FROM oncehook_audit b
                  WHERE b.subject = p.kind || ':' || p.name AND b.action = 'pause' AND b.at >= p.at)
              ORDER BY p.kind, p.name",
        )?
        .query_map([], |row| {
            let what = Pausable::from_parts(row.get_ref(0)?.as_str()?, row.get(1)?);
            Ok(Paused { what, since: UnixMicros(row.get(2)?), who: row.get(3)?, reason: row.get(4)? })
        })?
        .collect()
}

/// What is paused.
pub(super) fn paused(connection: &Connection) -> Result<Vec<Pausable>, rusqlite::Error> {
    connection
        .prepare_cached("SELECT kind, name FROM oncehook_pauses ORDER BY kind, name")?
        .query_map([], |row| {
            let name: String = row.get(1)?;
            Ok(if row.get_ref(0)?.as_str()? == "source" { Pausable::Source(name) } else { Pausable::Route(name) })
        })?
        .collect()
}
