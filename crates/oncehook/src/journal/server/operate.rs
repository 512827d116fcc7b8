//! What operators order for one event, and what they pause. Each order is one transaction with the audit row that
//! records it.
//!
//! Promises: the event's row and its deliveries are locked before they are looked at, so that two operators, a worker
//! and the janitor come one after the other, and what an order looks at is what it changes.
//!
//! Does not: decide what an order changes, or why it is refused. `decide::order` does.

use std::future::Future;

use super::ServerJournal;
use super::deliver::entity::unblock;
use super::deliver::steps::Delivers;
use super::engine::Session;
use super::error::{EngineError, Meaning, Tries};
use super::value::{Column, Param, Row};
use super::work::unavailable;
use crate::delivery::DeliveryState;
use crate::event::EventId;
use crate::journal::decide::order::{Changes, Found, decide};
use crate::journal::{Order, OrderError, Ordered, Pausable, Pause, Paused, Who};

/// The texts of these statements.
pub(in crate::journal) struct OperateSql {
    /// `$1`: event. Returns its entity (or null) with each of its routes (or null), by route. Locks nothing.
    pub(in crate::journal) entity_and_routes: &'static str,
    /// `$1`: table of routes, in order; `$2`: entity. Locks the entity's queues of these routes.
    pub(in crate::journal) lock_queues: &'static str,
    /// `$1`: event. Locks it, and returns a row if it is there.
    pub(in crate::journal) lock_event: &'static str,
    /// `$1`: event. Returns a row if it is held.
    pub(in crate::journal) is_held: &'static str,
    /// `$1`: now; `$2`: event. Locks its deliveries, and returns route, epoch, state, attempt, and whether it is
    /// leased.
    pub(in crate::journal) lock_deliveries: &'static str,
    /// `$1`: now; `$2`: event; `$3`: table of route, epoch, state, attempt limit. Makes these deliveries due now.
    pub(in crate::journal) revive: &'static str,
    /// `$1`: now; `$2`: event; `$3`: table of route, epoch. Attempts that have no end were lost.
    pub(in crate::journal) lose_attempts: &'static str,
    /// `$1`: now; `$2`: event; `$3`: table of route, epoch. Gives these deliveries up.
    pub(in crate::journal) skip: &'static str,
    /// `$1`: now; `$2`: event; `$3`: epoch; `$4`: table of routes. Makes deliveries that are due at once; those that
    /// exist stay as they are. If others of the event are in the queue of its entity, these are too.
    pub(in crate::journal) enqueue: &'static str,
    /// `$1`: event. It is held no more.
    pub(in crate::journal) release: &'static str,
    /// `$1`: now; `$2` to `$6`: who, action, subject, reason, detail.
    pub(in crate::journal) audit: &'static str,
    /// `$1`: now; `$2`: kind; `$3`: name. Changes a row if it was not paused.
    pub(in crate::journal) pause: &'static str,
    /// `$1`: kind; `$2`: name.
    pub(in crate::journal) resume: &'static str,
    /// Returns what is paused: kind, name, since when, by whom, why. Routes, then sources, by name.
    pub(in crate::journal) pauses: &'static str,
}

/// What orders ask of an engine.
pub(in crate::journal) trait Operates: Delivers {
    const OPERATE: OperateSql;

    /// Begins the transaction of an order, and returns its time.
    fn begin_order(
        session: &mut Self::Session,
        given: Option<i64>,
    ) -> impl Future<Output = Result<i64, EngineError>> + Send {
        session.begin(given)
    }
}

/// Why an order was not carried out: it did not fit, or the database failed.
pub(in crate::journal) enum Refused {
    Unfit(OrderError),
    Engine(EngineError),
}

impl From<EngineError> for Refused {
    fn from(error: EngineError) -> Self {
        Self::Engine(error)
    }
}

impl From<OrderError> for Refused {
    fn from(error: OrderError) -> Self {
        Self::Unfit(error)
    }
}

/// Carries an order out, and again if another transaction got in its way.
pub(in crate::journal) async fn order<E: Operates>(
    journal: &ServerJournal<E>,
    order: &Order,
) -> Result<Ordered, OrderError> {
    let given = journal.shared.given_time();
    let mut tries = Tries::default();
    loop {
        let mut session = journal.workers.take().await.map_err(unavailable)?;
        match carry_out::<E>(&mut session, given, order).await {
            Ok(ordered) => {
                session.keep();
                journal.shared.changed();
                return Ok(ordered);
            }
            Err(Refused::Unfit(error)) => {
                // At once, not when the server notices that the connection is gone: until then the deliveries are
                // locked, and workers skip them.
                if session.rollback().await.is_ok() {
                    session.keep();
                }
                return Err(error);
            }
            Err(Refused::Engine(error)) => tries.again(error).map_err(unavailable)?,
        }
    }
}

/// Carries an order out. After an error the transaction is still open: the caller rolls back, or drops the connection.
pub(in crate::journal) async fn carry_out<E: Operates>(
    session: &mut E::Session,
    given: Option<i64>,
    order: &Order,
) -> Result<Ordered, Refused> {
    let now = E::begin_order(session, given).await?;
    let entity = lock_queues::<E>(session, order.event).await?;
    let held = look::<E>(session, order.event).await?;
    let found = match held {
        Some(_) => deliveries::<E>(session, now, order.event).await?,
        None => Vec::new(),
    };
    let changes = decide(order, held, &found)?;
    write::<E>(session, now, order.event, &changes).await?;
    if let Some(entity) = &entity {
        for route in &changes.ordered.routes {
            unblock::<E>(session, now, route, &[(entity, 1)]).await?;
        }
    }
    if let Some(detail) = &changes.audit {
        let subject = order.event.to_string();
        audit::<E>(session, now, &order.who, order.verb.as_str(), &subject, Some(detail)).await?;
    }
    session.commit().await?;
    Ok(changes.ordered)
}

/// The event's entity, if it has one. The entity's queues in which its deliveries are get locked before the deliveries,
/// as workers do it.
async fn lock_queues<E: Operates>(session: &mut E::Session, event: EventId) -> Result<Option<String>, EngineError> {
    let rows = session.rows(E::OPERATE.entity_and_routes, &[event.into()]).await?;
    let Some(entity) = rows.first().map(|row| row.maybe_text(0)).transpose()?.flatten() else {
        return Ok(None);
    };
    let mut routes = Vec::with_capacity(rows.len());
    for row in &rows {
        routes.extend(row.maybe_text(1)?);
    }
    if !routes.is_empty() {
        let routes = Param::texts(routes.iter().map(String::as_str));
        session.rows(E::OPERATE.lock_queues, &[routes, (&entity).into()]).await?;
    }
    Ok(Some(entity))
}

/// Whether the event is held; `None` if there is no such event. Until the end of the transaction no one else orders
/// anything for it, and the janitor does not forget it. Two statements: the second one must see what was committed
/// before the lock.
async fn look<E: Operates>(session: &mut E::Session, event: EventId) -> Result<Option<bool>, EngineError> {
    if session.row(E::OPERATE.lock_event, &[event.into()]).await?.is_none() {
        return Ok(None);
    }
    Ok(Some(session.row(E::OPERATE.is_held, &[event.into()]).await?.is_some()))
}

async fn deliveries<E: Operates>(
    session: &mut E::Session,
    now: i64,
    event: EventId,
) -> Result<Vec<Found>, EngineError> {
    let rows = session.rows(E::OPERATE.lock_deliveries, &[now.into(), event.into()]).await?;
    let found = rows.iter().map(|row| {
        Ok(Found {
            route: row.route(0)?,
            epoch: row.small(1)?,
            state: DeliveryState::parse(&row.text(2)?).ok_or_else(EngineError::damaged)?,
            attempt: row.small(3)?,
            leased: row.is_true(4)?,
        })
    });
    found.collect()
}

/// Writes what the order changes.
async fn write<E: Operates>(
    session: &mut E::Session,
    now: i64,
    event: EventId,
    changes: &Changes<'_>,
) -> Result<(), EngineError> {
    let Changes { revive, make, skip, .. } = changes;
    if !revive.is_empty() {
        let table = Param::Table(vec![
            Column::texts(revive.iter().map(|revived| revived.route.as_str())),
            Column::ints(revive.iter().map(|revived| i64::from(revived.epoch))),
            Column::texts(revive.iter().map(|revived| revived.state.as_str())),
            Column::ints(revive.iter().map(|revived| i64::from(revived.limit))),
        ]);
        session.change(E::OPERATE.revive, &[now.into(), event.into(), table]).await?;
    }
    if !skip.is_empty() {
        let table = Param::Table(vec![
            Column::texts(skip.iter().map(|found| found.route.as_str())),
            Column::ints(skip.iter().map(|found| i64::from(found.epoch))),
        ]);
        let given_up = [Param::from(now), event.into(), table];
        session.change(E::OPERATE.lose_attempts, &given_up).await?;
        session.change(E::OPERATE.skip, &given_up).await?;
    }
    if changes.release {
        session.change(E::OPERATE.release, &[event.into()]).await?;
    }
    if let Some((_, epoch)) = make.first() {
        let routes = Param::texts(make.iter().map(|(route, _)| route.as_str()));
        let made = session.change(E::OPERATE.enqueue, &[now.into(), event.into(), (*epoch).into(), routes]).await?;
        if usize::try_from(made).is_ok_and(|made| made < make.len()) {
            // Looked at again, what it made is among the event's deliveries.
            let meaning = Meaning { collision: true, ..Meaning::default() };
            return Err(EngineError::with("a worker made a follow-up of the event at this moment", meaning));
        }
    }
    Ok(())
}

/// One row of the audit.
pub(in crate::journal) async fn audit<E: Operates>(
    session: &mut E::Session,
    now: i64,
    who: &Who,
    action: &str,
    subject: &str,
    detail: Option<&str>,
) -> Result<(), EngineError> {
    // PostgreSQL's texts have no zero characters.
    let text = |text: &String| text.replace('\0', "\u{fffd}");
    let (name, reason) = (text(&who.name), who.reason.as_ref().map(text));
    let row = [Param::from(now), (&name).into(), action.into(), subject.into(), reason.as_ref().into(), detail.into()];
    session.change(E::OPERATE.audit, &row).await.map(|_| ())
}

/// Pauses or resumes a source or route, in one transaction with its row in the audit; there is none if it is so
/// already.
pub(in crate::journal) async fn set_paused<E: Operates>(
    session: &mut E::Session,
    given: Option<i64>,
    pause: &Pause,
    who: &Who,
) -> Result<(), EngineError> {
    let (kind, name) = pause.what.parts();
    let now = session.begin(given).await?;
    let changed = match pause.paused {
        true => session.change(E::OPERATE.pause, &[now.into(), kind.into(), name.into()]).await?,
        false => session.change(E::OPERATE.resume, &[kind.into(), name.into()]).await?,
    };
    if changed > 0 {
        audit::<E>(session, now, who, pause.as_str(), &format!("{kind}:{name}"), None).await?;
    }
    session.commit().await
}

/// What is paused, since when, by whom and why.
pub(in crate::journal) async fn pauses<E: Operates>(session: &mut E::Session) -> Result<Vec<Paused>, EngineError> {
    let rows = session.rows(E::OPERATE.pauses, &[]).await?;
    session.commit_single().await?;
    let paused = rows.iter().map(|row| {
        let what = Pausable::from_parts(&row.text(0)?, row.text(1)?);
        Ok(Paused { what, since: row.time(2)?, who: row.maybe_text(3)?, reason: row.maybe_text(4)? })
    });
    paused.collect()
}

/// What is paused.
pub(in crate::journal) async fn paused<E: Operates>(session: &mut E::Session) -> Result<Vec<Pausable>, EngineError> {
    Ok(pauses::<E>(session).await?.into_iter().map(|paused| paused.what).collect())
}
