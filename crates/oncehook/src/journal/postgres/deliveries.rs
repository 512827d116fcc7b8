//! The journal on PostgreSQL for workers and operators: every call takes a connection, does one atomic thing, and gives it
//! back. A call that is dropped half-way closes its connection, and the server undoes what was begun.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use oncehook_verify::UnixMicros;
use tokio::sync::watch;

use super::connection::{EngineError, Session, Tries};
use super::front::Fronts;
use super::function::{Caller, Effect};
use super::lines::Peek;
use super::orders::{self, Refused};
use super::queue::{self, Choice};
use super::settle::{self, Ended, Held};
use super::{PostgresJournal, apply, forget, lines, turn};
use crate::delivery::{Claim, DeliveryId, Fence, RouteName, Settled, Settlement, Verdict};
use crate::handler::{Handler, SqlHandler};
use crate::journal::server::engine::Session as _;
use crate::journal::server::work::{unavailable, work};
use crate::journal::{
    Backlog, BoxFuture, Deliveries, Forgotten, Order, OrderError, Ordered, Pausable, Pause, Paused, Progress,
    Retention, Who, WorkError,
};
use crate::ordering::{Company, PEEK};
use crate::route::Route;

/// How long two connections work off a backlog before somebody looks up.
const TURN: Duration = Duration::from_millis(50);

/// What two batches came to.
fn sum(mut one: Progress, other: Progress) -> Progress {
    one.add(other);
    one
}

/// Leases those whose turn it is, in one transaction.
async fn lease_in_turn(
    session: &Session,
    given: Option<i64>,
    fronts: &Fronts,
    route: &Route,
    limit: usize,
    lease: i64,
) -> Result<Vec<queue::Leased>, EngineError> {
    loop {
        session.run("BEGIN").await?;
        let (wanted, from) = (limit.max(PEEK), fronts.of(&route.name));
        let Peek { due, now, first } = lines::peek(session, given, route, wanted, from).await?;
        let unseen = fronts.found(&route.name, from, first, due.len() == wanted);
        let turns = turn::take(session, given, route, Company::Lease, limit, &due, now).await?;
        let leased = if turns.run.is_empty() {
            Vec::new()
        } else {
            queue::lease(session, given, route, limit, lease, Choice::These(&turns.run)).await?
        };
        session.run("COMMIT").await?;
        route.report(&turns.passed.failed);
        if !(leased.is_empty() && unseen) {
            return Ok(leased);
        }
    }
}

impl PostgresJournal {
    /// Batch after batch for a moment, so that two connections which do this need not wait for each other after each of them.
    async fn apply_batches(
        &self,
        route: &Route,
        handler: &SqlHandler,
        limit: usize,
    ) -> Result<Progress, WorkError> {
        let begun = Instant::now();
        let mut progress = self.apply_batch(route, handler, limit).await?;
        while progress.more && begun.elapsed() < TURN {
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

    async fn apply_batch(
        &self,
        route: &Route,
        handler: &SqlHandler,
        limit: usize,
    ) -> Result<Progress, WorkError> {
        let given = self.shared.given_time();
        work!(self, |session| apply::sql(
            &session,
            given,
            &self.workers.engine.fronts,
            route,
            handler,
            limit,
            queue::drawing(&self.chance)
        ))
    }
}

fn micros(time: Duration) -> i64 {
    // A lease of a century is long enough, and leaves room for the time itself.
    i64::try_from(time.as_micros()).unwrap_or(i64::MAX).min(100 * 365 * 86_400_000_000)
}

impl Deliveries for PostgresJournal {
    fn changes(&self) -> watch::Receiver<u64> {
        self.shared.changes.subscribe()
    }

    fn apply(&self, route: Arc<Route>, limit: usize) -> BoxFuture<'_, Result<Progress, WorkError>> {
        Box::pin(async move {
            let Handler::Sql(handler) = &route.handler else {
                return Err(WorkError::Unsupported(format!("route `{}` has no statements", route.name)));
            };
            // A backlog is worked off by two connections at once: what one has locked the other passes over.
            let busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner).remove(&route.name);
            let progress = if busy {
                let (one, other) = tokio::join!(
                    self.apply_batches(&route, handler, limit),
                    self.apply_batches(&route, handler, limit)
                );
                match (one, other) {
                    (Ok(one), Ok(other)) => sum(one, other),
                    // What one of them did stays done; the other's trouble shows again soon enough.
                    (Ok(one), Err(_)) | (Err(_), Ok(one)) => one,
                    (Err(error), Err(_)) => return Err(error),
                }
            } else {
                self.apply_batch(&route, handler, limit).await?
            };
            if progress.more {
                self.busy.lock().unwrap_or_else(PoisonError::into_inner).insert(route.name.clone());
            }
            if progress.woken || (progress.succeeded > 0 && !route.followups.is_empty()) {
                self.shared.changed();
            }
            Ok(progress)
        })
    }

    fn claim(
        &self,
        route: Arc<Route>,
        limit: usize,
        lease: Duration,
    ) -> BoxFuture<'_, Result<Vec<Claim>, WorkError>> {
        Box::pin(async move {
            let given = self.shared.given_time();
            let lease = micros(lease);
            let leased = if route.ordering.is_serial() {
                self.lines.note(&route);
                work!(self, |session| lease_in_turn(
                    &session,
                    given,
                    &self.workers.engine.fronts,
                    &route,
                    limit,
                    lease
                ))?
            } else {
                work!(self, |session| queue::lease_due(
                    &session,
                    given,
                    &self.workers.engine.fronts,
                    &route,
                    limit,
                    lease
                ))?
            };
            let claim = |leased: queue::Leased| Claim {
                fence: leased.fence,
                attempt_limit: leased.attempt_limit,
                parked_at: leased.parked_at,
                event: leased.event,
            };
            Ok(leased.into_iter().map(claim).collect())
        })
    }

    fn call(&self, route: Arc<Route>, claims: Vec<Claim>) -> BoxFuture<'_, Result<Vec<Settled>, WorkError>> {
        Box::pin(async move {
            let effect = match &route.handler {
                Handler::Function(function) => Effect::Function(function.as_ref()),
                Handler::Sql(handler) => Effect::Statements(handler),
                Handler::Http(_) | Handler::Elsewhere(_) => {
                    let told = format!("route `{}` runs nothing inside the journal", route.name);
                    return Err(WorkError::Unsupported(told));
                }
            };
            let caller = Caller {
                pool: &self.workers,
                given: self.shared.given_time(),
                now: self.shared.clock.steady(),
                route: &route,
                lines: &self.lines,
                effect,
            };
            let given = caller.given;
            let mut settled = Vec::with_capacity(claims.len());
            let mut succeeded = Vec::new();
            for claim in &claims {
                let chance = queue::drawing(&self.chance)();
                let (came, took_effect) = caller.call(claim, chance).await.map_err(unavailable)?;
                settled.push(came);
                succeeded.extend(took_effect.then(|| super::queries::uuid(claim.fence.delivery.event)));
            }
            let mut woken = false;
            if !succeeded.is_empty() {
                // As for `settle`: what is parked looks again by itself if this does not come to pass.
                let waking = work!(self, |session| lines::wake_parked_of(&session, given, &succeeded));
                woken = waking.unwrap_or(false);
            }
            if woken || route.ordering.is_serial() || !route.followups.is_empty() {
                self.shared.changed();
            }
            Ok(settled)
        })
    }

    fn settle(&self, settlements: Vec<Settlement>) -> BoxFuture<'_, Result<Vec<Settled>, WorkError>> {
        Box::pin(async move {
            // Only the first settlement of an attempt can count; of the others nothing is written.
            let mut first: Vec<&Settlement> = Vec::with_capacity(settlements.len());
            let mut seen = std::collections::HashSet::new();
            first.extend(settlements.iter().filter(|settlement| seen.insert(&settlement.fence)));
            let ended: Vec<Ended<'_>> = first
                .iter()
                .map(|Settlement { fence, verdict, followups }| Ended { fence, verdict, followups })
                .collect();
            let (given, now) = (self.shared.given_time(), self.shared.clock.steady());
            let in_line = first.iter().any(|one| self.lines.get(&one.fence.delivery.route).is_some());
            let succeeded = first.iter().filter(|one| matches!(one.verdict, Verdict::Succeeded(_)));
            let succeeded: Vec<uuid::Uuid> =
                succeeded.map(|one| super::queries::uuid(one.fence.delivery.event)).collect();
            let mut done = if in_line {
                let lines = &self.lines;
                work!(self, |session| settle::settle_in_line(&session, given, now, &ended, lines))?
            } else {
                let done = work!(self, |session| settle::settle(&session, given, now, Held::Lease, &ended))?;
                if !succeeded.is_empty() {
                    // Apart from the settlement: what is parked looks again by itself if this does not come to pass.
                    let woken = work!(self, |session| lines::wake_parked_of(&session, given, &succeeded));
                    if woken.unwrap_or(false) {
                        self.shared.changed();
                    }
                }
                done
            };
            // A lane knows by itself when its own deliveries are due again.
            let followed =
                |one: &Settlement| matches!(one.verdict, Verdict::Succeeded(_)) && !one.followups.is_empty();
            if in_line || settlements.iter().any(followed) {
                self.shared.changed();
            }
            let settled = settlements.iter().map(|settlement| match done.remove(&settlement.fence) {
                Some(()) => Settled::Done,
                None => Settled::Lost,
            });
            Ok(settled.collect())
        })
    }

    fn renew(&self, fences: Vec<Fence>, lease: Duration) -> BoxFuture<'_, Result<(), WorkError>> {
        Box::pin(async move {
            let given = self.shared.given_time();
            work!(self, |session| queue::renew(&session, given, &fences, micros(lease)))
        })
    }

    fn give_back(&self, fences: Vec<Fence>) -> BoxFuture<'_, Result<(), WorkError>> {
        Box::pin(async move {
            let given = self.shared.given_time();
            work!(self, |session| queue::give_back(&session, given, &fences))?;
            self.shared.changed();
            Ok(())
        })
    }

    fn reclaim(&self, route: Arc<Route>) -> BoxFuture<'_, Result<usize, WorkError>> {
        Box::pin(async move {
            let given = self.shared.given_time();
            let woken = work!(self, |session| lines::look_again(&session, given, &route))?;
            let reclaimed =
                work!(self, |session| queue::reclaim(&session, given, &route, queue::drawing(&self.chance)))?;
            if woken || !reclaimed.is_empty() {
                self.shared.changed();
            }
            route.report(&reclaimed);
            Ok(reclaimed.len())
        })
    }

    fn next_due(&self, route: RouteName) -> BoxFuture<'_, Result<Option<UnixMicros>, WorkError>> {
        Box::pin(async move {
            let given = self.shared.given_time();
            let wait = work!(self, |session| queue::next_due(&session, given, &route))?;
            // Told in the caller's time: its clock and the database's may differ.
            Ok(wait.map(|wait| UnixMicros(self.shared.clock.steady().0.saturating_add(wait))))
        })
    }

    fn backlog(&self) -> BoxFuture<'_, Result<Vec<Backlog>, WorkError>> {
        Box::pin(async {
            let backlog = self.readers().backlog().await;
            backlog.map_err(|error| WorkError::Unavailable(error.to_string()))
        })
    }

    fn order(&self, order: Order) -> BoxFuture<'_, Result<Ordered, OrderError>> {
        Box::pin(async move {
            let given = self.shared.given_time();
            let mut tries = Tries::default();
            loop {
                let session = self.workers.take().await.map_err(unavailable)?;
                match orders::carry_out(&session, given, &order).await {
                    Ok(ordered) => {
                        session.keep();
                        self.shared.changed();
                        return Ok(ordered);
                    }
                    Err(Refused::Unfit(error)) => {
                        // At once, not when the server notices that the connection is gone: until then the deliveries are
                        // locked, and workers pass over them.
                        if session.run("ROLLBACK").await.is_ok() {
                            session.keep();
                        }
                        return Err(error);
                    }
                    Err(Refused::Engine(error)) => tries.again(error).map_err(unavailable)?,
                }
            }
        })
    }

    fn set_paused(&self, pause: Pause, who: Who) -> BoxFuture<'_, Result<(), WorkError>> {
        Box::pin(async move {
            let given = self.shared.given_time();
            work!(self, |session| orders::set_paused(&session, given, &pause, &who))?;
            self.shared.changed();
            Ok(())
        })
    }

    fn paused(&self) -> BoxFuture<'_, Result<Vec<Pausable>, WorkError>> {
        Box::pin(async move { work!(self, |session| orders::paused(&session)) })
    }

    fn pauses(&self) -> BoxFuture<'_, Result<Vec<Paused>, WorkError>> {
        Box::pin(async move { work!(self, |session| orders::pauses(&session)) })
    }

    fn forget(&self, retention: Retention) -> BoxFuture<'_, Result<Forgotten, WorkError>> {
        Box::pin(async move {
            let (given, wall) = (self.shared.given_time(), self.shared.clock.now().0);
            let round = self.workers.engine.round.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let (forgotten, next) =
                work!(self, |session| forget::batch(&session, given, wall, &round, &retention))?;
            *self.workers.engine.round.lock().unwrap_or_else(PoisonError::into_inner) = next;
            Ok(forgotten)
        })
    }

    fn trust_clock(&self, who: Who) -> BoxFuture<'_, Result<(), WorkError>> {
        Box::pin(async move {
            let (given, wall) = (self.shared.given_time(), self.shared.clock.now().0);
            work!(self, |session| forget::trust_clock(&session, given, wall, &who))
        })
    }

    fn mark(&self) -> BoxFuture<'_, Result<i64, WorkError>> {
        Box::pin(async move { work!(self, |session| queue::mark(&session)) })
    }

    fn unsettled(&self, deliveries: Vec<DeliveryId>) -> BoxFuture<'_, Result<Vec<DeliveryId>, WorkError>> {
        Box::pin(async move { work!(self, |session| queue::unsettled(&session, &deliveries)) })
    }
}
