//! The server journal for workers and operators: what [`Deliveries`] asks for. Every call takes a connection, does one atomic
//! thing, and gives it back. A call that is dropped half-way closes its connection, and the server undoes what was begun.

use std::collections::HashSet;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use oncehook_verify::UnixMicros;
use tokio::sync::watch;

use super::deliver::call::{Caller, Effect};
use super::deliver::entity::{look_again, settle_with_entities};
use super::deliver::settle::settle;
use super::deliver::steps::{Delivers, SettleSql};
use super::deliver::{batch, lease};
use super::engine::Session as _;
use super::error::{EngineError, EngineResult};
use super::read::Reads;
use super::value::{Param, Row};
use super::work::work;
use super::{ServerJournal, operate};
use crate::delivery::{Claim, DeliveryId, Fence, RouteName, Settled, Settlement, Verdict};
use crate::event::EventId;
use crate::handler::{Handler, SqlHandler};
use crate::journal::decide::outcome::Held;
use crate::journal::sql;
use crate::journal::{
    Backlog, BoxFuture, Deliveries, Forgotten, Misfit, Order, OrderError, Ordered, Pausable, Pause, Paused, Progress,
    Retention, Who, WorkError,
};
use crate::ordering::NO_TIME;
use crate::route::Route;

/// How long two connections work off a backlog before the worker looks up.
const BACKLOG_TIME: Duration = Duration::from_millis(50);

fn micros(time: Duration) -> i64 {
    // A lease of a century is long enough, and leaves room for the time itself.
    i64::try_from(time.as_micros()).unwrap_or(i64::MAX).min(100 * 365 * 86_400_000_000)
}

impl<E: Delivers + Reads> Deliveries for ServerJournal<E> {
    fn changes(&self) -> watch::Receiver<u64> {
        self.shared.changes.subscribe()
    }

    fn apply(&self, route: Arc<Route>, limit: usize) -> BoxFuture<'_, Result<Progress, WorkError>> {
        Box::pin(async move {
            let Handler::Sql(handler) = &route.handler else {
                return Err(WorkError::Unsupported(format!("route `{}` has no statements", route.name)));
            };
            // A backlog is worked off by two connections at once: each skips what the other has locked.
            let busy = || self.busy.lock().unwrap_or_else(PoisonError::into_inner);
            let is_busy = busy().remove(&route.name);
            let progress = if is_busy {
                let batches = || self.apply_batches(&route, handler, limit);
                match tokio::join!(batches(), batches()) {
                    (Ok(mut one), Ok(other)) => {
                        one.add(other);
                        one
                    }
                    // What one of them did stays done; the other's trouble shows again soon enough.
                    (Ok(one), Err(_)) | (Err(_), Ok(one)) => one,
                    (Err(error), Err(_)) => return Err(error),
                }
            } else {
                self.apply_batch(&route, handler, limit).await?
            };
            if progress.more {
                busy().insert(route.name.clone());
            }
            if progress.woken || (progress.succeeded > 0 && !route.followups.is_empty()) {
                self.shared.changed();
            }
            Ok(progress)
        })
    }

    fn claim(&self, route: Arc<Route>, limit: usize, lease: Duration) -> BoxFuture<'_, Result<Vec<Claim>, WorkError>> {
        Box::pin(async move {
            let (engine, given) = (self.workers.engine.as_ref(), self.shared.given_time());
            if route.ordering.is_serial() {
                self.lines.note(&route);
            }
            work!(self, |session| lease::lease(engine, &mut session, given, &route, limit, micros(lease)))
        })
    }

    fn call(&self, route: Arc<Route>, claims: Vec<Claim>) -> BoxFuture<'_, Result<Vec<Settled>, WorkError>> {
        Box::pin(async move {
            let effect = match &route.handler {
                Handler::Function(function) => Effect::Function(function.as_ref()),
                Handler::Sql(handler) => Effect::Statements(handler),
                Handler::Http(_) | Handler::Elsewhere(_) => {
                    let message = format!("route `{}` runs nothing inside the journal", route.name);
                    return Err(WorkError::Unsupported(message));
                }
            };
            let caller = Caller { journal: self, from: self.shared.clock.steady(), route: &route, effect };
            let mut settled = Vec::with_capacity(claims.len());
            let (mut woken, mut succeeded) = (false, Vec::new());
            for claim in &claims {
                let chance = self.draw()();
                let called = caller.call(claim, chance).await?;
                settled.push(called.settled);
                woken |= called.woken;
                succeeded.extend(called.succeeded.then_some(claim.fence.delivery.event));
            }
            if !route.ordering.is_serial() {
                woken |= self.wake_parked_behind(succeeded).await;
            }
            if woken || route.ordering.is_serial() || !route.followups.is_empty() {
                self.shared.changed();
            }
            Ok(settled)
        })
    }

    fn settle(&self, settlements: Vec<Settlement>) -> BoxFuture<'_, Result<Vec<Settled>, WorkError>> {
        Box::pin(async move {
            let ended = settlements.as_slice();
            let ordered = ended.iter().any(|ended| self.lines.get(&ended.fence.delivery.route).is_some());
            let succeeded = || ended.iter().filter(|ended| matches!(ended.verdict, Verdict::Succeeded(_)));
            let (mut done, woken) = if ordered || !E::SETTLES_ALONE {
                work!(self, |session| self.settle_together(&mut session, ended))?
            } else {
                let (given, from) = (self.shared.given_time(), self.shared.clock.steady());
                let done = work!(self, |session| settle::<E>(&mut session, given, from, Held::Lease, ended))?;
                let events = succeeded().map(|ended| ended.fence.delivery.event).collect();
                (done, self.wake_parked_behind(events).await)
            };
            // A worker knows by itself when its own deliveries are due again.
            if woken || ordered || succeeded().any(|ended| !ended.followups.is_empty()) {
                self.shared.changed();
            }
            let settled = ended.iter().map(|ended| match done.remove(&ended.fence) {
                true => Settled::Done,
                false => Settled::Lost,
            });
            Ok(settled.collect())
        })
    }

    fn renew(&self, fences: Vec<Fence>, lease: Duration) -> BoxFuture<'_, Result<(), WorkError>> {
        Box::pin(async move {
            let params = [Param::fences(&fences), micros(lease).into()];
            work!(self, |session| self.change_single(&mut session, E::DELIVER.renew, &params))
        })
    }

    fn give_back(&self, fences: Vec<Fence>) -> BoxFuture<'_, Result<(), WorkError>> {
        Box::pin(async move {
            let params = [Param::fences(&fences)];
            work!(self, |session| self.change_single(&mut session, E::DELIVER.give_back, &params))?;
            self.shared.changed();
            Ok(())
        })
    }

    fn reclaim(&self, route: Arc<Route>) -> BoxFuture<'_, Result<usize, WorkError>> {
        Box::pin(async move {
            let given = self.shared.given_time();
            let woken = work!(self, |session| look_again::<E>(&mut session, given, &route))?;
            let reclaimed = work!(self, |session| lease::reclaim::<E>(&mut session, given, &route, self.draw()))?;
            if woken || !reclaimed.is_empty() {
                self.shared.changed();
            }
            route.report(&reclaimed);
            Ok(reclaimed.len())
        })
    }

    fn next_due(&self, route: RouteName) -> BoxFuture<'_, Result<Option<UnixMicros>, WorkError>> {
        Box::pin(async move {
            let wait = work!(self, |session| async {
                let now = session.begin_single(self.shared.given_time()).await?;
                let params = [now.into(), (&route).into(), NO_TIME.into()];
                let row = session.row(E::DELIVER.next_due, &params).await?;
                session.commit_single().await?;
                row.map_or(Ok(None), |row| row.maybe_int(0))
            })?;
            // In the caller's time: its clock and the database's may differ.
            Ok(wait.map(|wait| UnixMicros(self.shared.clock.steady().0.saturating_add(wait))))
        })
    }

    fn backlog(&self) -> BoxFuture<'_, Result<Vec<Backlog>, WorkError>> {
        Box::pin(async {
            let backlog = self.read_backlog().await;
            backlog.map_err(|error| WorkError::Unavailable(error.to_string()))
        })
    }

    fn order(&self, order: Order) -> BoxFuture<'_, Result<Ordered, OrderError>> {
        Box::pin(async move { operate::order(self, &order).await })
    }

    fn set_paused(&self, pause: Pause, who: Who) -> BoxFuture<'_, Result<(), WorkError>> {
        Box::pin(async move {
            let given = self.shared.given_time();
            work!(self, |session| sql::operate::set_paused(&mut *session, given, &pause, &who))?;
            self.shared.changed();
            Ok(())
        })
    }

    fn paused(&self) -> BoxFuture<'_, Result<Vec<Pausable>, WorkError>> {
        Box::pin(async move { work!(self, |session| sql::operate::paused(&mut *session)) })
    }

    fn pauses(&self) -> BoxFuture<'_, Result<Vec<Paused>, WorkError>> {
        Box::pin(async move { work!(self, |session| sql::operate::pauses(&mut *session)) })
    }

    fn forget(&self, retention: Retention) -> BoxFuture<'_, Result<Forgotten, WorkError>> {
        Box::pin(async move { operate::forget(self, &retention).await })
    }

    fn trust_clock(&self, who: Who) -> BoxFuture<'_, Result<(), WorkError>> {
        Box::pin(async move {
            let (given, wall) = (self.shared.given_time(), self.shared.clock.now().0);
            work!(self, |session| sql::forget::trust_clock(&mut *session, given, wall, &who))
        })
    }

    fn mark(&self) -> BoxFuture<'_, Result<i64, WorkError>> {
        Box::pin(async move {
            work!(self, |session| async {
                let row = session.row(E::DELIVER.created_at, &[]).await?;
                session.commit_single().await?;
                row.ok_or_else(|| EngineError::other("the journal does not know when it was made"))?.int(0)
            })
        })
    }

    fn rehearse(&self, handler: Arc<SqlHandler>) -> BoxFuture<'_, Result<Vec<Misfit>, String>> {
        Box::pin(async move { self.try_out(&handler).await.map_err(|error| error.to_string()) })
    }

    fn unsettled(&self, deliveries: Vec<DeliveryId>) -> BoxFuture<'_, Result<Vec<DeliveryId>, WorkError>> {
        Box::pin(async move {
            work!(self, |session| async {
                let rows = session.rows(E::DELIVER.unsettled, &[Param::deliveries(&deliveries)]).await?;
                session.commit_single().await?;
                rows.iter().map(|row| row.delivery(0)).collect::<EngineResult<_>>()
            })
        })
    }
}

#[expect(private_bounds, reason = "engines are this crate's own")]
impl<E: Delivers> ServerJournal<E> {
    fn draw(&self) -> impl FnMut() -> f64 + Send + '_ {
        || self.chance.lock().unwrap_or_else(PoisonError::into_inner).draw()
    }

    /// Batch after batch for a moment, so that two connections need not wait for each other after each batch.
    async fn apply_batches(&self, route: &Route, handler: &SqlHandler, limit: usize) -> Result<Progress, WorkError> {
        let begun = Instant::now();
        let mut progress = self.apply_batch(route, handler, limit).await?;
        while progress.more && begun.elapsed() < BACKLOG_TIME {
            // What is done stays done; trouble shows again soon enough.
            let Ok(next) = self.apply_batch(route, handler, limit).await else { break };
            progress.more = next.more;
            progress.add(next);
        }
        Ok(progress)
    }

    async fn apply_batch(&self, route: &Route, handler: &SqlHandler, limit: usize) -> Result<Progress, WorkError> {
        let (engine, given) = (self.workers.engine.as_ref(), self.shared.given_time());
        work!(self, |session| batch::apply(engine, &mut session, given, route, handler, limit, self.draw()))
    }

    /// Settles leased attempts, in one transaction with what follows for others.
    async fn settle_together(
        &self,
        session: &mut E::Session,
        ended: &[Settlement],
    ) -> EngineResult<(HashSet<Fence>, bool)> {
        let from = self.shared.clock.steady();
        let now = session.begin(self.shared.given_time()).await?;
        let done = settle_with_entities::<E>(session, now, from, ended, &self.lines).await?;
        session.commit().await?;
        Ok(done)
    }

    /// Parked deliveries of the entities of events that took effect look again. Apart from the settlement: a parked delivery
    /// looks again by itself if this fails. Where settling takes several statements, it wakes them itself.
    async fn wake_parked_behind(&self, events: Vec<EventId>) -> bool {
        let SettleSql::AtOnce { wake_parked, .. } = E::DELIVER.settle else { return false };
        let params = [self.shared.given_time().into(), Param::ids(events.iter().copied())];
        !events.is_empty() && work!(self, |session| session.change(wake_parked, &params)).is_ok_and(|woken| woken > 0)
    }

    /// Runs a statement as a transaction of its own. The time is its first parameter.
    async fn change_single(&self, session: &mut E::Session, sql: &str, params: &[Param<'_>]) -> EngineResult {
        let now = session.begin_single(self.shared.given_time()).await?;
        let params: Vec<Param<'_>> = std::iter::once(now.into()).chain(params.iter().cloned()).collect();
        session.change(sql, &params).await?;
        session.commit_single().await
    }
}
