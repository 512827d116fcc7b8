//! What operators order for one event. Each order is one transaction with the audit row that records it.
//!
//! The event's row and its deliveries are locked first, so that two operators, a worker and the janitor come one after the
//! other, and what an order looks at is what it changes. While a day is dropped, orders wait.

use oncehook_verify::UnixMicros;
use std::collections::BTreeSet;

use super::connection::{EngineError, Session};
use super::queries::uuid;
use super::queue::{self, number, route_name, text};
use super::{days, lines};
use crate::delivery::RouteName;
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
    /// Whether an attempt of it holds a lease that has not run out.
    leased: bool,
}

/// Carries an order out. All branching about verbs is here. After an error the transaction is still open: the caller drops
/// the connection.
pub(super) async fn carry_out(
    session: &Session,
    given: Option<i64>,
    order: &Order,
) -> Result<Ordered, Refused> {
    let no_drop = format!("SELECT pg_advisory_xact_lock_shared({})", days::ORDERS);
    session.run(&format!("BEGIN; SET LOCAL lock_timeout = 5000; {no_drop}")).await?;
    let entity = lock_lines(session, order).await?;
    let held = look(session, order).await?.ok_or(Refused::Unfit(OrderError::NoEvent))?;
    let found = deliveries(session, given, order).await?;
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
            let revived = revive(session, given, order).await?;
            if revived.is_empty() {
                return Err(unfit("nothing to retry: no delivery is dead or waits for another attempt"));
            }
            revived
        }
        Verb::Replay => {
            let mut routes = revive(session, given, order).await?;
            routes.extend(queue::enqueue(session, given, order.event, 0, new).await?);
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
            queue::enqueue(session, given, order.event, asked, again).await?.into_iter().collect()
        }
        Verb::Skip => skip(session, given, order, &found).await?,
        Verb::Release => {
            if !held {
                return Err(unfit("the event is not held"));
            }
            let sql = "DELETE FROM oncehook.flags WHERE event = $1 AND flag = 'quarantined'";
            session.change(sql, &[&uuid(order.event)]).await?;
            queue::enqueue(session, given, order.event, 0, new).await?.into_iter().collect()
        }
    };
    if let Some(entity) = &entity {
        // Whoever waited for a delivery that was changed may look again.
        for route in &routes {
            lines::let_go_on(session, given, route, &[(entity, 1)]).await?;
        }
    }
    let ordered = Ordered { routes: routes.into_iter().collect(), epoch };
    if ordered.changed_anything(order.verb) {
        let (subject, detail) = (order.event.to_string(), ordered.to_json());
        write_down(session, given, &order.who, order.verb.as_str(), &subject, Some(&detail)).await?;
    }
    session.run("COMMIT").await?;
    Ok(ordered)
}

/// The event's entity, if it has one. The lines in which its deliveries stand are locked before the deliveries, as workers do it.
async fn lock_lines(session: &Session, order: &Order) -> Result<Option<String>, EngineError> {
    let sql = "SELECT entity FROM oncehook.events WHERE id = $1";
    let entity: Option<String> = session.row(sql, &[&uuid(order.event)]).await?.and_then(|row| row.get(0));
    if let Some(entity) = &entity {
        let sql = "SELECT 1 FROM oncehook.entities
                    WHERE scope IN (SELECT route FROM oncehook.deliveries WHERE event = $1) AND entity = $2
                    ORDER BY scope FOR UPDATE";
        session.rows(sql, &[&uuid(order.event), entity]).await?;
    }
    Ok(entity)
}

/// Whether the event is held; `None` if there is no such event. Until the end of the transaction nobody else orders
/// anything for it, and nobody forgets it.
async fn look(session: &Session, order: &Order) -> Result<Option<bool>, EngineError> {
    let sql = "SELECT 1 FROM oncehook.events WHERE id = $1 FOR UPDATE";
    if session.row(sql, &[&uuid(order.event)]).await?.is_none() {
        return Ok(None);
    }
    let sql = "SELECT EXISTS (SELECT 1 FROM oncehook.flags WHERE event = $1 AND flag = 'quarantined')";
    Ok(session.row(sql, &[&uuid(order.event)]).await?.map(|row| row.get(0)))
}

async fn deliveries(session: &Session, given: Option<i64>, order: &Order) -> Result<Vec<Found>, EngineError> {
    let sql =
        "SELECT route, epoch, state = 'running' AND lease_until > coalesce($1::bigint, oncehook.micros())
                 FROM oncehook.deliveries WHERE event = $2 ORDER BY route, epoch FOR UPDATE";
    let rows = session.rows(sql, &[&given, &uuid(order.event)]).await?;
    rows.iter()
        .map(|row| {
            let leased = row.get::<_, Option<bool>>(2).unwrap_or(false);
            Ok(Found { route: route_name(row.get(0))?, epoch: number(row.get(1)), leased })
        })
        .collect()
}

/// Makes what failed due now, with fresh attempts.
async fn revive(
    session: &Session,
    given: Option<i64>,
    order: &Order,
) -> Result<BTreeSet<RouteName>, EngineError> {
    let only = order.route.as_ref().map(RouteName::as_str);
    let attempts = i32::try_from(order.attempts).unwrap_or(i32::MAX / 2);
    let rows = session
        .rows(
            "UPDATE oncehook.deliveries
                SET state = CASE WHEN attempt > 0 THEN 'retrying' ELSE 'ready' END,
                    run_at = coalesce($1::bigint, oncehook.micros()), settled_at = NULL, cause = NULL,
                    attempt_limit = attempt + $4, blocked_at = NULL, parked_at = NULL
              WHERE event = $2 AND ($3::text IS NULL OR route = $3) AND state IN ('dead', 'retrying', 'parked')
             RETURNING route",
            &[&given, &uuid(order.event), &only, &attempts],
        )
        .await?;
    rows.iter().map(|row| route_name(row.get(0))).collect()
}

/// Gives up what is pending or dead. What runs cannot be called back, unless its lease has run out: then nobody has it, and
/// its route may be gone.
async fn skip(
    session: &Session,
    given: Option<i64>,
    order: &Order,
    found: &[Found],
) -> Result<BTreeSet<RouteName>, Refused> {
    let mut chosen = found.iter().filter(|found| order.is_for(&found.route));
    if chosen.any(|found| found.leased) {
        return Err(unfit("a delivery is running; wait for it, or pause its route first"));
    }
    let only = order.route.as_ref().map(RouteName::as_str);
    // An attempt that nobody holds any more never ended.
    session
        .change(
            "UPDATE oncehook.attempts SET finished_at = coalesce($1::bigint, oncehook.micros()), outcome = 'lost'
              WHERE event = $2 AND ($3::text IS NULL OR route = $3) AND finished_at IS NULL",
            &[&given, &uuid(order.event), &only],
        )
        .await?;
    let rows = session
        .rows(
            "UPDATE oncehook.deliveries
                SET state = 'skipped', settled_at = coalesce($1::bigint, oncehook.micros()), lease_until = NULL,
                    blocked_at = NULL, parked_at = NULL,
                    run_at = CASE WHEN run_at = 9223372036854775807 THEN coalesce($1::bigint, oncehook.micros()) ELSE run_at END
              WHERE event = $2 AND ($3::text IS NULL OR route = $3)
                AND state IN ('ready', 'running', 'retrying', 'parked', 'dead')
             RETURNING route",
            &[&given, &uuid(order.event), &only],
        )
        .await?;
    if rows.is_empty() {
        return Err(unfit("nothing to skip: no delivery is pending or dead"));
    }
    Ok(rows.iter().map(|row| route_name(row.get(0))).collect::<Result<_, _>>()?)
}

/// One row of the audit.
pub(super) async fn write_down(
    session: &Session,
    given: Option<i64>,
    who: &Who,
    action: &str,
    subject: &str,
    detail: Option<&str>,
) -> Result<(), EngineError> {
    let (name, reason) = (text(&who.name), who.reason.as_deref().map(text));
    session
        .change(
            "INSERT INTO oncehook.audit (at, who, action, subject, reason, detail)
             VALUES (coalesce($1::bigint, oncehook.micros()), $2, $3, $4, $5, $6)",
            &[&given, &name, &action, &subject, &reason, &detail],
        )
        .await?;
    Ok(())
}

/// Pauses or resumes a source or route, in one transaction with its row in the audit; there is none if it is so already.
pub(super) async fn set_paused(
    session: &Session,
    given: Option<i64>,
    pause: &Pause,
    who: &Who,
) -> Result<(), EngineError> {
    let (kind, name) = pause.what.parts();
    session.run("BEGIN").await?;
    let changed = if pause.paused {
        let sql = "INSERT INTO oncehook.pauses (kind, name, at) VALUES ($2, $3, coalesce($1::bigint, oncehook.micros()))
                   ON CONFLICT (kind, name) DO NOTHING";
        session.change(sql, &[&given, &kind, &name]).await?
    } else {
        session.change("DELETE FROM oncehook.pauses WHERE kind = $1 AND name = $2", &[&kind, &name]).await?
    };
    if changed > 0 {
        write_down(session, given, who, pause.as_str(), &format!("{kind}:{name}"), None).await?;
    }
    session.run("COMMIT").await
}

/// What is paused, since when, by whom and why.
pub(super) async fn pauses(session: &Session) -> Result<Vec<Paused>, EngineError> {
    let sql = "SELECT p.kind, p.name, p.at, a.who, a.reason
                 FROM oncehook.pauses p
                 LEFT JOIN LATERAL (SELECT b.who, b.reason FROM oncehook.audit b
                    WHERE b.subject = p.kind || ':' || p.name AND b.action = 'pause' AND b.at >= p.at
                    ORDER BY b.id LIMIT 1) a ON true
                ORDER BY p.kind, p.name";
    let rows = session.rows(sql, &[]).await?;
    let paused = |row: &tokio_postgres::Row| {
        let what = Pausable::from_parts(row.get(0), row.get(1));
        Paused { what, since: UnixMicros(row.get(2)), who: row.get(3), reason: row.get(4) }
    };
    Ok(rows.iter().map(paused).collect())
}

/// What is paused.
pub(super) async fn paused(session: &Session) -> Result<Vec<Pausable>, EngineError> {
    let rows = session.rows("SELECT kind, name FROM oncehook.pauses ORDER BY kind, name", &[]).await?;
    let pausable = |row: &tokio_postgres::Row| match row.get::<_, &str>(0) {
        "source" => Pausable::Source(row.get(1)),
        _ => Pausable::Route(row.get(1)),
    };
    Ok(rows.iter().map(pausable).collect())
}
