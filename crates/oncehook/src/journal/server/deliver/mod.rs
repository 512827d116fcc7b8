//! The server journal for workers and operators: every call takes a connection, does one atomic thing, and gives it back. A
//! call that is dropped half-way closes its connection, and the server undoes what was begun.

mod batch;
mod call;
pub(in crate::journal) mod entity;
mod lease;
pub(in crate::journal) mod row;
mod settle;
pub(in crate::journal) mod steps;

use std::collections::HashSet;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use oncehook_verify::UnixMicros;

use super::ServerJournal;
use super::engine::Session;
use super::error::EngineError;
use super::work::{unavailable, work};
use crate::delivery::{Claim, DeliveryId, Fence, RouteName, Settled, Settlement, Verdict};
use crate::event::EventId;
use crate::handler::{Handler, SqlHandler};
use crate::journal::{Progress, WorkError};
use crate::route::{KnownLines, Route};
use call::{Caller, Effect};
use steps::{Delivers, Ended, Held, SettleTime};

/// How long two connections work off a backlog before the worker looks up.
const BACKLOG_TIME: Duration = Duration::from_millis(50);

fn micros(time: Duration) -> i64 {
    // A lease of a century is long enough, and leaves room for the time itself.
    i64::try_from(time.as_micros()).unwrap_or(i64::MAX).min(100 * 365 * 86_400_000_000)
}

#[expect(private_bounds, reason = "engines are this crate's own")]
impl<E: Delivers> ServerJournal<E> {
    fn draw(&self) -> impl FnMut() -> f64 + Send + '_ {
        || self.chance.lock().unwrap_or_else(PoisonError::into_inner).draw()
    }

    pub(in crate::journal) async fn apply_due(&self, route: &Route, limit: usize) -> Result<Progress, WorkError> {
        let Handler::Sql(handler) = &route.handler else {
            return Err(WorkError::Unsupported(format!("route `{}` has no statements", route.name)));
        };
        // A backlog is worked off by two connections at once: each skips what the other has locked.
        let busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner).remove(&route.name);
        let progress = if busy {
            let (one, other) =
                tokio::join!(self.apply_batches(route, handler, limit), self.apply_batches(route, handler, limit));
            match (one, other) {
                (Ok(mut one), Ok(other)) => {
                    one.add(other);
                    one
                }
                // What one of them did stays done; the other's trouble shows again soon enough.
                (Ok(one), Err(_)) | (Err(_), Ok(one)) => one,
                (Err(error), Err(_)) => return Err(error),
            }
        } else {
            self.apply_batch(route, handler, limit).await?
        };
        if progress.more {
            self.busy.lock().unwrap_or_else(PoisonError::into_inner).insert(route.name.clone());
        }
        if progress.woken || (progress.succeeded > 0 && !route.followups.is_empty()) {
            self.shared.changed();
        }
        Ok(progress)
    }

    /// Batch after batch for a moment, so that two connections need not wait for each other after each batch.
    async fn apply_batches(&self, route: &Route, handler: &SqlHandler, limit: usize) -> Result<Progress, WorkError> {
        let begun = Instant::now();
        let mut progress = self.apply_batch(route, handler, limit).await?;
        while progress.more && begun.elapsed() < BACKLOG_TIME {
            match self.apply_batch(route, handler, limit).await {
                Ok(next) => {
                    progress.more = next.more;
                    progress.add(next);
                }
                // What is done stays done; the trouble shows again soon enough.
                Err(_) => break,
            }
        }
        Ok(progress)
    }

    async fn apply_batch(&self, route: &Route, handler: &SqlHandler, limit: usize) -> Result<Progress, WorkError> {
        let (engine, given) = (self.workers.engine.as_ref(), self.shared.given_time());
        work!(self, |session| batch::apply(engine, &mut session, given, route, handler, limit, self.draw()))
    }

    pub(in crate::journal) async fn claim_due(
        &self,
        route: &Arc<Route>,
        limit: usize,
        lease: Duration,
    ) -> Result<Vec<Claim>, WorkError> {
        let (engine, given) = (self.workers.engine.as_ref(), self.shared.given_time());
        let lease = micros(lease);
        if route.ordering.is_serial() {
            self.lines.note(route);
            return work!(self, |session| lease::lease_eligible(engine, &mut session, given, route, limit, lease));
        }
        work!(self, |session| engine.lease_due(&mut session, given, route, limit, lease))
    }

    pub(in crate::journal) async fn call_all(
        &self,
        route: &Route,
        claims: &[Claim],
    ) -> Result<Vec<Settled>, WorkError> {
        let effect = match &route.handler {
            Handler::Function(function) => Effect::Function(function.as_ref()),
            Handler::Sql(handler) => Effect::Statements(handler),
            Handler::Http(_) | Handler::Elsewhere(_) => {
                let message = format!("route `{}` runs nothing inside the journal", route.name);
                return Err(WorkError::Unsupported(message));
            }
        };
        let caller = Caller {
            pool: self.workers.as_ref(),
            given: self.shared.given_time(),
            from: self.shared.clock.steady(),
            route,
            known: &self.lines,
            effect,
            time: self.function_time,
        };
        let mut settled = Vec::with_capacity(claims.len());
        let (mut woken, mut succeeded) = (false, Vec::new());
        for claim in claims {
            let chance = self.draw()();
            let called = caller.call(claim, chance).await.map_err(unavailable)?;
            settled.push(called.settled);
            woken |= called.woken;
            succeeded.extend(called.succeeded.then_some(claim.fence.delivery.event));
        }
        if E::SETTLES_ALONE && !route.ordering.is_serial() {
            woken |= self.wake_parked_behind(succeeded).await;
        }
        if woken || route.ordering.is_serial() || !route.followups.is_empty() {
            self.shared.changed();
        }
        Ok(settled)
    }

    pub(in crate::journal) async fn settle_all(&self, settlements: &[Settlement]) -> Result<Vec<Settled>, WorkError> {
        // Only the first settlement of an attempt can count; of the others nothing is written.
        let mut seen = HashSet::new();
        let first: Vec<&Settlement> = settlements.iter().filter(|settlement| seen.insert(&settlement.fence)).collect();
        let ended: Vec<Ended<'_>> =
            first.iter().map(|Settlement { fence, verdict, followups }| Ended { fence, verdict, followups }).collect();
        let (given, from) = (self.shared.given_time(), self.shared.clock.steady());
        let ordered = first.iter().any(|one| self.lines.get(&one.fence.delivery.route).is_some());
        let (mut done, woken) = if ordered || !E::SETTLES_ALONE {
            let known = &self.lines;
            work!(self, |session| settle_together::<E>(&mut session, given, from, &ended, known))?
        } else {
            let time = SettleTime { now: given, from };
            let done = work!(self, |session| settle::settle::<E>(&mut session, time, Held::Lease, &ended))?;
            let succeeded = first.iter().filter(|one| matches!(one.verdict, Verdict::Succeeded(_)));
            let succeeded = succeeded.map(|one| one.fence.delivery.event).collect();
            (done, self.wake_parked_behind(succeeded).await)
        };
        // A worker knows by itself when its own deliveries are due again.
        let followed = |one: &Settlement| matches!(one.verdict, Verdict::Succeeded(_)) && !one.followups.is_empty();
        if woken || ordered || settlements.iter().any(followed) {
            self.shared.changed();
        }
        let settled = settlements.iter().map(|settlement| match done.remove(&settlement.fence) {
            true => Settled::Done,
            false => Settled::Lost,
        });
        Ok(settled.collect())
    }

    /// Parked deliveries of the entities of events that took effect look again. Apart from the settlement: a parked delivery
    /// looks again by itself if this fails.
    async fn wake_parked_behind(&self, events: Vec<EventId>) -> bool {
        if events.is_empty() {
            return false;
        }
        let given = self.shared.given_time();
        let woken = work!(self, |session| E::wake_parked_of(&mut session, given, &events));
        woken.unwrap_or(false)
    }

    pub(in crate::journal) async fn renew_leases(&self, fences: &[Fence], lease: Duration) -> Result<(), WorkError> {
        let given = self.shared.given_time();
        work!(self, |session| lease::renew::<E>(&mut session, given, fences, micros(lease)))
    }

    pub(in crate::journal) async fn give_leases_back(&self, fences: &[Fence]) -> Result<(), WorkError> {
        let given = self.shared.given_time();
        work!(self, |session| lease::give_back::<E>(&mut session, given, fences))?;
        self.shared.changed();
        Ok(())
    }

    pub(in crate::journal) async fn reclaim_leases(&self, route: &Route) -> Result<usize, WorkError> {
        let given = self.shared.given_time();
        let woken = work!(self, |session| entity::look_again::<E>(&mut session, given, route))?;
        let reclaimed = work!(self, |session| lease::reclaim::<E>(&mut session, given, route, self.draw()))?;
        if woken || !reclaimed.is_empty() {
            self.shared.changed();
        }
        route.report(&reclaimed);
        Ok(reclaimed.len())
    }

    pub(in crate::journal) async fn next_due_of(&self, route: &RouteName) -> Result<Option<UnixMicros>, WorkError> {
        let given = self.shared.given_time();
        let wait = work!(self, |session| lease::next_due::<E>(&mut session, given, route))?;
        // In the caller's time: its clock and the database's may differ.
        Ok(wait.map(|wait| UnixMicros(self.shared.clock.steady().0.saturating_add(wait))))
    }

    pub(in crate::journal) async fn created_at(&self) -> Result<i64, WorkError> {
        work!(self, |session| lease::created_at::<E>(&mut session))
    }

    pub(in crate::journal) async fn unsettled_of(
        &self,
        deliveries: &[DeliveryId],
    ) -> Result<Vec<DeliveryId>, WorkError> {
        work!(self, |session| lease::unsettled::<E>(&mut session, deliveries))
    }
}

/// Settles leased attempts, in one transaction with what follows for others.
async fn settle_together<E: Delivers>(
    session: &mut E::Session,
    given: Option<i64>,
    from: UnixMicros,
    ended: &[Ended<'_>],
    known: &KnownLines,
) -> Result<(HashSet<Fence>, bool), EngineError> {
    let now = session.begin(given).await?;
    let done = entity::settle_with_entities::<E>(session, now, from, ended, known).await?;
    session.commit().await?;
    Ok(done)
}
