//! Leases: taken, prolonged, given back, and taken away when they have run out.

use std::collections::{BTreeSet, HashMap};

use oncehook_verify::UnixMicros;

use super::entity::{self, Eligible};
use super::settle;
use super::steps::{Delivers, Ended, Held, Locked, SettleTime, Wanted};
use crate::delivery::{Claim, DeliveryId, FailedAttempt, Fence, RouteName, Verdict};
use crate::event::EventId;
use crate::journal::server::engine::Session;
use crate::journal::server::error::EngineError;
use crate::journal::server::value::{Param, Row};
use crate::ordering::{Company, NO_TIME, PEEK};
use crate::route::Route;

/// Leases eligible deliveries of a route that looks at entities.
pub(super) async fn lease_eligible<E: Delivers>(
    engine: &E,
    session: &mut E::Session,
    given: Option<i64>,
    route: &Route,
    limit: usize,
    lease: i64,
) -> Result<Vec<Claim>, EngineError> {
    loop {
        let now = session.begin(given).await?;
        let wanted = Wanted::Lease { limit: limit.max(PEEK) };
        let Locked { due, unseen, .. } = engine.lock_due(session, now, route, wanted).await?;
        let Eligible { run, passed } = entity::eligible::<E>(session, now, route, Company::Lease, limit, due).await?;
        let states: HashMap<(EventId, u32), Option<String>> =
            run.iter().map(|due| ((due.candidate.place.event, due.candidate.place.epoch), due.state.clone())).collect();
        let mut claims = match run.is_empty() {
            true => Vec::new(),
            false => E::lease_locked(session, now, route, lease, run).await?,
        };
        for claim in &mut claims {
            let DeliveryId { event, epoch, .. } = claim.fence.delivery;
            claim.event.state = states.get(&(event, epoch)).cloned().flatten();
        }
        session.commit().await?;
        route.report(&passed.failed);
        if !(claims.is_empty() && unseen) {
            return Ok(claims);
        }
    }
}

/// Prolongs leases that are still held.
pub(super) async fn renew<E: Delivers>(
    session: &mut E::Session,
    given: Option<i64>,
    fences: &[Fence],
    lease: i64,
) -> Result<(), EngineError> {
    let now = session.begin_single(given).await?;
    session.change(E::DELIVER.renew, &[now.into(), Param::fences(fences), lease.into()]).await?;
    session.commit_single().await
}

/// Gives leases back.
pub(super) async fn give_back<E: Delivers>(
    session: &mut E::Session,
    given: Option<i64>,
    fences: &[Fence],
) -> Result<(), EngineError> {
    let now = session.begin_single(given).await?;
    session.change(E::DELIVER.give_back, &[now.into(), Param::fences(fences)]).await?;
    session.commit_single().await
}

/// Takes leases away that have run out. Each is an attempt that failed.
pub(super) async fn reclaim<E: Delivers>(
    session: &mut E::Session,
    given: Option<i64>,
    route: &Route,
    mut draw: impl FnMut() -> f64 + Send,
) -> Result<Vec<FailedAttempt>, EngineError> {
    let now = session.begin(given).await?;
    let serial = route.ordering.is_serial();
    let params = [now.into(), (&route.name).into()];
    if serial {
        // The entities first, as for every settlement.
        let rows = session.rows(E::DELIVER.expired_entities, &params).await?;
        let entities: Vec<String> = rows.iter().map(|row| row.text(0)).collect::<Result<_, _>>()?;
        let entities: BTreeSet<&str> = entities.iter().map(String::as_str).collect();
        entity::lock::<E>(session, &route.name, &entities).await?;
    }
    let rows = session.rows(E::DELIVER.lock_expired, &params).await?;
    let mut failed = Vec::with_capacity(rows.len());
    let mut expired: Vec<(Fence, Verdict)> = Vec::with_capacity(rows.len());
    for row in &rows {
        let delivery = DeliveryId { event: row.event(0)?, route: route.name.clone(), epoch: row.small(1)? };
        let fence = Fence { delivery, attempt: row.small(2)? };
        let limit = row.maybe_small(3)?.unwrap_or(route.retry.max_attempts);
        let verdict = route.after_lost_lease(fence.attempt, limit, UnixMicros(now), draw());
        failed.extend(FailedAttempt::of(fence.delivery.event, fence.attempt, limit, &verdict, UnixMicros(now)));
        expired.push((fence, verdict));
    }
    let ended: Vec<Ended<'_>> =
        expired.iter().map(|(fence, verdict)| Ended { fence, verdict, followups: &[] }).collect();
    let time = SettleTime { now: Some(now), from: UnixMicros(now) };
    settle::settle::<E>(session, time, Held::LostLease, &ended).await?;
    if serial && !expired.is_empty() {
        let events = expired.iter().map(|(fence, _)| fence.delivery.event);
        let subjects = entity::subjects::<E>(session, events).await?;
        let outcomes: Vec<_> = expired
            .iter()
            .filter_map(|(fence, verdict)| Some(subjects.get(&fence.delivery.event)?.outcome(verdict)))
            .collect();
        entity::after::<E>(session, now, route, &outcomes).await?;
    }
    session.commit().await?;
    Ok(failed)
}

/// How long until the next delivery of a route is due, in microseconds; negative if one is due already.
pub(super) async fn next_due<E: Delivers>(
    session: &mut E::Session,
    given: Option<i64>,
    route: &RouteName,
) -> Result<Option<i64>, EngineError> {
    let now = session.begin_single(given).await?;
    let row = session.row(E::DELIVER.next_due, &[now.into(), route.into(), NO_TIME.into()]).await?;
    session.commit_single().await?;
    row.map_or(Ok(None), |row| row.maybe_int(0))
}

/// When the journal was made.
pub(super) async fn created_at<E: Delivers>(session: &mut E::Session) -> Result<i64, EngineError> {
    let row = session.row(E::DELIVER.created_at, &[]).await?;
    session.commit_single().await?;
    row.ok_or_else(|| EngineError::other("the journal does not know when it was made"))?.int(0)
}

/// Those of these deliveries that are pending or dead.
pub(super) async fn unsettled<E: Delivers>(
    session: &mut E::Session,
    deliveries: &[DeliveryId],
) -> Result<Vec<DeliveryId>, EngineError> {
    let rows = session.rows(E::DELIVER.unsettled, &[Param::deliveries(deliveries)]).await?;
    session.commit_single().await?;
    rows.iter().map(|row| row.delivery(0)).collect()
}
