//! Leases: taken, and taken away when they have run out.

use oncehook_verify::UnixMicros;

use super::entity::{self, Transaction};
use super::row::{claim, with_events};
use super::settle::settle;
use super::steps::{Delivers, Locked, Wanted};
use crate::delivery::{Claim, DeliveryId, FailedAttempt, Fence, Settlement};
use crate::journal::Progress;
use crate::journal::decide::outcome::Held;
use crate::journal::server::engine::Session;
use crate::journal::server::error::EngineResult;
use crate::journal::server::value::{Column, Param, Row};
use crate::ordering::{Company, PEEK};
use crate::route::Route;

/// Leases due deliveries; of a route that looks at entities, those that are eligible.
pub(in crate::journal::server) async fn lease<E: Delivers>(
    engine: &E,
    session: &mut E::Session,
    given: Option<i64>,
    route: &Route,
    limit: usize,
    lease: i64,
) -> EngineResult<Vec<Claim>> {
    let serial = route.ordering.is_serial();
    if !serial && let Some(leased) = engine.lease_at_once(session, given, route, limit, lease).await? {
        return leased.into_iter().map(|due| claim(due, route)).collect();
    }
    loop {
        let now = session.begin(given).await?;
        let wanted = Wanted::Lease { limit: if serial { limit.max(PEEK) } else { limit } };
        let Locked { due, unseen, .. } = engine.lock_due(session, now, route, wanted).await?;
        let (mut run, passed) = if serial {
            let mut transaction = Transaction::<E> { session: &mut *session, now, route };
            transaction.eligible(Company::Lease, limit, due).await?
        } else {
            (due, Progress::default())
        };
        if !run.is_empty() {
            let attempts = Column::ints(run.iter().map(|due| i64::from(due.attempt) + 1));
            let places = run.iter().map(|due| (due.candidate.place.event, due.candidate.place.epoch));
            let leased = Param::places(places).with([attempts]);
            let (before, most) = (route.after.as_ref(), route.retry.max_attempts);
            let params = [now.into(), (&route.name).into(), before.into(), lease.into(), most.into(), leased];
            let mut events = Vec::new();
            for sql in E::DELIVER.lease {
                events = session.rows(sql, &params).await?;
            }
            with_events(events, route, &mut run)?;
        }
        session.commit().await?;
        route.report(&passed.failed);
        if !(run.is_empty() && unseen) {
            return run.into_iter().map(|due| claim(due, route)).collect();
        }
    }
}

/// Takes leases away that have run out. Each is an attempt that failed.
pub(in crate::journal::server) async fn reclaim<E: Delivers>(
    session: &mut E::Session,
    given: Option<i64>,
    route: &Route,
    mut draw: impl FnMut() -> f64 + Send,
) -> EngineResult<Vec<FailedAttempt>> {
    let now = session.begin(given).await?;
    let (serial, at) = (route.ordering.is_serial(), UnixMicros(now));
    let params = [now.into(), (&route.name).into()];
    if serial {
        // The entities first, as for every settlement.
        let entities = entity::entities(&session.rows(E::DELIVER.expired_entities, &params).await?)?;
        entity::lock::<E>(session, &route.name, &entities).await?;
    }
    let (mut failed, mut expired) = (Vec::new(), Vec::new());
    for row in session.rows(E::DELIVER.lock_expired, &params).await? {
        let delivery = DeliveryId { event: row.event(0)?, route: route.name.clone(), epoch: row.small(1)? };
        let fence = Fence { delivery, attempt: row.small(2)? };
        let limit = row.maybe_small(3)?.unwrap_or(route.retry.max_attempts);
        let verdict = route.after_lost_lease(fence.attempt, limit, at, draw());
        failed.extend(FailedAttempt::of(fence.delivery.event, fence.attempt, limit, &verdict, at));
        expired.push(Settlement { fence, verdict, followups: Vec::new() });
    }
    settle::<E>(session, Some(now), at, Held::LostLease, &expired).await?;
    if serial && !expired.is_empty() {
        let events = expired.iter().map(|ended| ended.fence.delivery.event);
        let subjects = entity::subjects::<E>(session, events).await?;
        let ended =
            expired.iter().filter_map(|ended| Some((subjects.get(&ended.fence.delivery.event)?, &ended.verdict)));
        let ended: Vec<_> = ended.collect();
        Transaction::<E> { session: &mut *session, now, route }.after(&ended).await?;
    }
    session.commit().await?;
    Ok(failed)
}
