//! One event's story: its deliveries and their tries, its copies, other bodies under its key, and what operators did.

use std::collections::{HashMap, VecDeque};

use super::super::engine::Session;
use super::super::error::EngineError;
use super::super::shared::Shared;
use super::super::value::{Param, Row};
use super::Reads;
use super::search::summary;
use crate::event::EventId;
use crate::journal::tally::{parse_latest, remember};
use crate::journal::{
    ATTEMPTS_SHOWN, Attempt, AuditEntry, Conflict, Delivery, EventDetail, EventSummary, ORDERS_SHOWN,
};

pub(super) async fn tell<E: Reads>(
    session: &mut E::Session,
    shared: &Shared,
    id: EventId,
) -> Result<Option<EventDetail>, EngineError> {
    let sql = format!("{} WHERE e.id = $1", E::READ.summary);
    let Some(row) = session.row(&sql, &[id.into()]).await? else { return Ok(None) };
    let mut events = [summary(&row)?];
    complete::<E>(session, shared, &mut events).await?;
    let [mut event] = events;
    add_attempts::<E>(session, &mut event).await?;
    let (mut seen, mut latest) = (None, VecDeque::new());
    if let Some(stored) = session.row(E::READ.duplicates, &[id.into()]).await? {
        seen = Some((stored.time(0)?, stored.time(1)?));
        latest = parse_latest(&stored.text(2)?);
    }
    if let Some(pending) = shared.tally().get(id) {
        let (first, last) = seen.unwrap_or((pending.first_at, pending.last_at));
        seen = Some((first, last.max(pending.last_at)));
        pending.latest.iter().for_each(|duplicate| remember(&mut latest, *duplicate));
    }
    let (audit, audit_total) = audit::<E>(session, id).await?;
    Ok(Some(EventDetail {
        event,
        digest: row.digest(12)?,
        duplicates_seen: seen,
        duplicates_latest: latest.into_iter().collect(),
        conflicts: conflicts::<E>(session, id).await?,
        audit,
        audit_total,
    }))
}

/// Adds what stands in other tables, or is still in memory.
pub(super) async fn complete<E: Reads>(
    session: &mut E::Session,
    shared: &Shared,
    events: &mut [EventSummary],
) -> Result<(), EngineError> {
    let asked = Param::ids(events.iter().map(|event| event.id));
    let mut found: HashMap<EventId, Vec<Delivery>> = HashMap::new();
    for row in session.rows(E::READ.deliveries, &[asked]).await? {
        found.entry(row.event(0)?).or_default().push(delivery(&row)?);
    }
    let tally = shared.tally();
    for event in events {
        event.duplicates += tally.get(event.id).map_or(0, |pending| pending.count());
        event.deliveries = found.remove(&event.id).unwrap_or_default();
    }
    Ok(())
}

fn delivery(row: &impl Row) -> Result<Delivery, EngineError> {
    Ok(Delivery {
        route: row.text(1)?,
        epoch: row.small(2)?,
        state: row.text(3)?,
        attempt: row.small(4)?,
        run_at: row.time(5)?,
        result: row.maybe_text(6)?,
        error: row.maybe_text(7)?,
        cause: row.maybe_text(8)?,
        settled_at: row.maybe_time(9)?,
        blocked_at: row.maybe_time(10)?,
        parked_at: row.maybe_time(11)?,
        attempts: Vec::new(),
    })
}

/// Adds the latest tries to an event's deliveries. Lists do without.
async fn add_attempts<E: Reads>(session: &mut E::Session, event: &mut EventSummary) -> Result<(), EngineError> {
    for row in session.rows(E::READ.attempts, &[event.id.into(), ATTEMPTS_SHOWN.into()]).await? {
        let (route, epoch) = (row.text(0)?, row.small(1)?);
        let attempt = Attempt {
            number: row.small(2)?,
            started_at: row.time(3)?,
            finished_at: row.maybe_time(4)?,
            outcome: row.maybe_text(5)?,
            error: row.maybe_text(6)?,
        };
        let of = |delivery: &&mut Delivery| delivery.route == route && delivery.epoch == epoch;
        if let Some(delivery) = event.deliveries.iter_mut().find(of) {
            delivery.attempts.push(attempt);
        }
    }
    for delivery in &mut event.deliveries {
        let unleased = delivery.unleased_success(delivery.attempts.last());
        delivery.attempts.extend(unleased);
    }
    Ok(())
}

/// The latest orders, oldest first, and how many there are.
async fn audit<E: Reads>(session: &mut E::Session, event: EventId) -> Result<(Vec<AuditEntry>, u64), EngineError> {
    let subject = event.to_string();
    let rows = session.rows(E::READ.audit, &[(&subject).into(), ORDERS_SHOWN.into()]).await?;
    let total = rows.first().map_or(Ok(0), |row| row.count(5))?;
    let entry = |row: &<E::Session as Session>::Row| {
        Ok(AuditEntry {
            at: row.time(0)?,
            who: row.text(1)?,
            action: row.text(2)?,
            reason: row.maybe_text(3)?,
            detail: row.maybe_text(4)?,
        })
    };
    let latest: Result<Vec<AuditEntry>, EngineError> = rows.iter().rev().map(entry).collect();
    Ok((latest?, total))
}

async fn conflicts<E: Reads>(session: &mut E::Session, event: EventId) -> Result<Vec<Conflict>, EngineError> {
    let rows = session.rows(E::READ.conflicts, &[event.into()]).await?;
    let conflict = |row: &<E::Session as Session>::Row| {
        Ok(Conflict {
            digest: row.bytes(0)?.try_into().ok(),
            count: row.count(1)?,
            first_at: row.time(2)?,
            last_at: row.time(3)?,
            size: row.count(4)?,
        })
    };
    rows.iter().map(conflict).collect()
}
