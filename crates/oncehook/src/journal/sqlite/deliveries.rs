//! The embedded journal for workers and operators: every change is a job for the one writer.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use oncehook_verify::UnixMicros;
use rusqlite::{Connection, Transaction, TransactionBehavior};
use tokio::sync::{oneshot, watch};

use super::commands::Command;
use super::lines::{self, Waiting};
use super::queue::{self, Held};
use super::statements::{self, Statements};
use super::writer::WriterContext;
use super::{SqliteJournal, apply, forget, turn};
use crate::delivery::{Claim, DeliveryId, Fence, RouteName, Settled, Settlement, Verdict};
use crate::handler::Handler;
use crate::journal::sql::{self, operate, story};
use crate::journal::{
    Backlog, BoxFuture, Deliveries, Forgotten, Order, OrderError, Ordered, Pausable, Pause, Paused, Progress,
    Retention, Who, WorkError,
};
use crate::ordering::{Company, PEEK};
use crate::route::Route;

impl SqliteJournal {
    /// Gives the writer something to do and waits for what comes of it. The time is that of the job's beginning: waiting for
    /// the writer costs no lease.
    pub(super) fn work<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Connection, UnixMicros) -> Result<T, rusqlite::Error> + Send + 'static,
    ) -> BoxFuture<'_, Result<T, WorkError>> {
        self.work_at(|desk| work(desk.connection, desk.now))
    }

    /// The same with all that the writer has.
    pub(super) fn work_at<T: Send + 'static>(
        &self,
        work: impl FnOnce(WriterContext<'_>) -> Result<T, rusqlite::Error> + Send + 'static,
    ) -> BoxFuture<'_, Result<T, WorkError>> {
        Box::pin(async move {
            let gone = || WorkError::Unavailable("the journal is closed".to_owned());
            let (answer, outcome) = oneshot::channel();
            let job = move |desk: Result<WriterContext<'_>, &str>| {
                let desk = match desk {
                    Ok(desk) => desk,
                    Err(reason) => {
                        // Whoever asked may be gone, here and below.
                        let _ = answer.send(Err(WorkError::Unavailable(reason.to_owned())));
                        return Ok(());
                    }
                };
                match work(desk) {
                    Ok(done) => {
                        let _ = answer.send(Ok(done));
                        Ok(())
                    }
                    Err(error) => {
                        let _ = answer.send(Err(WorkError::Unavailable(error.to_string())));
                        Err(error)
                    }
                }
            };
            if !self.queue.hand_over(Command::Job(Box::new(job))).await {
                return Err(gone());
            }
            outcome.await.unwrap_or_else(|_| Err(gone()))
        })
    }

    /// As [`work`](Self::work), by what all journals share.
    pub(super) fn share<T: Send + 'static>(
        &self,
        work: impl AsyncFnOnce(&mut Statements<'_>) -> sql::Result<T> + Send + 'static,
    ) -> BoxFuture<'_, Result<T, WorkError>> {
        self.work(|connection, now| statements::run(connection, now, work))
    }

    /// As [`work`](Self::work), in one transaction, for what may make deliveries due.
    fn change<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Transaction<'_>, UnixMicros) -> Result<T, rusqlite::Error> + Send + 'static,
    ) -> BoxFuture<'_, Result<T, WorkError>> {
        let shared = Arc::clone(&self.shared);
        self.work(move |connection, now| {
            let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            let done = work(&transaction, now)?;
            transaction.commit()?;
            shared.changed();
            Ok(done)
        })
    }
}

fn later(now: UnixMicros, by: Duration) -> UnixMicros {
    UnixMicros(now.0.saturating_add(i64::try_from(by.as_micros()).unwrap_or(i64::MAX)))
}

impl Deliveries for SqliteJournal {
    fn changes(&self) -> watch::Receiver<u64> {
        self.shared.changes.subscribe()
    }

    fn apply(&self, route: Arc<Route>, limit: usize) -> BoxFuture<'_, Result<Progress, WorkError>> {
        let Handler::Sql(handler) = route.handler.clone() else {
            return Box::pin(async move {
                Err(WorkError::Unsupported(format!("route `{}` has no statements", route.name)))
            });
        };
        let (chance, shared) = (Arc::clone(&self.chance), Arc::clone(&self.shared));
        self.work(move |connection, now| {
            let mut chance = chance.lock().unwrap_or_else(PoisonError::into_inner);
            let progress = apply::sql(connection, &route, &handler, limit, now, &mut chance)?;
            // Whoever waited for what happened may be on another lane.
            if progress.succeeded > 0 && (!route.followups.is_empty() || progress.woken) {
                shared.changed();
            }
            Ok(progress)
        })
    }

    fn claim(&self, route: Arc<Route>, limit: usize, lease: Duration) -> BoxFuture<'_, Result<Vec<Claim>, WorkError>> {
        let lines = Arc::clone(&self.lines);
        self.work(move |connection, now| {
            let serial = route.ordering.is_serial();
            let most = if serial { limit.max(PEEK) } else { limit };
            let (mut due, _) = queue::due(connection, &route, now, most)?;
            if due.is_empty() {
                return Ok(Vec::new());
            }
            let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            let mut passed = Progress::default();
            if serial {
                lines.note(&route);
                let mut waiting = lines::waiting(&transaction, &route.name)?;
                let turns = turn::take(&transaction, &route, Company::Lease, limit, due, &mut waiting, now)?;
                passed = turns.progress(now);
                due = turns.run;
            }
            let mut claims = Vec::with_capacity(due.len());
            for delivery in due {
                let fence = Fence { delivery: delivery.id(&route), attempt: delivery.attempt + 1 };
                let attempt_limit = delivery.attempt_limit;
                if queue::lease(&transaction, &fence, attempt_limit, now, later(now, lease))? {
                    let parked_at = delivery.parked_at;
                    claims.push(Claim { fence, attempt_limit, parked_at, event: delivery.event });
                }
            }
            transaction.commit()?;
            route.report(&passed.failed);
            Ok(claims)
        })
    }

    fn call(&self, route: Arc<Route>, claims: Vec<Claim>) -> BoxFuture<'_, Result<Vec<Settled>, WorkError>> {
        if matches!(route.handler, Handler::Http(_) | Handler::Elsewhere(_)) {
            let told = format!("route `{}` runs nothing inside the journal", route.name);
            return Box::pin(async move { Err(WorkError::Unsupported(told)) });
        }
        let (chance, shared) = (Arc::clone(&self.chance), Arc::clone(&self.shared));
        self.work(move |connection, now| {
            let mut chance = chance.lock().unwrap_or_else(PoisonError::into_inner);
            let settled = apply::leased(connection, &route, &claims, now, &mut chance)?;
            if !route.followups.is_empty() || lines::anything_parked(connection)? {
                shared.changed();
            }
            Ok(settled)
        })
    }

    fn settle(&self, settlements: Vec<Settlement>) -> BoxFuture<'_, Result<Vec<Settled>, WorkError>> {
        let (shared, lines) = (Arc::clone(&self.shared), Arc::clone(&self.lines));
        self.work(move |connection, now| {
            let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            let mut waiting: HashMap<&RouteName, Waiting> = HashMap::new();
            let mut settled = Vec::with_capacity(settlements.len());
            for Settlement { fence, verdict, followups } in &settlements {
                let done = queue::settle(&transaction, fence, Held::Lease, verdict, followups, now)?;
                if done {
                    let name = &fence.delivery.route;
                    let waiting = match waiting.get(name) {
                        Some(known) => *known,
                        None => *waiting.entry(name).or_insert(lines::waiting(&transaction, name)?),
                    };
                    let route = lines.get(name);
                    let serial = route.as_deref();
                    lines::after_lease(&transaction, serial, &fence.delivery, verdict, waiting, now)?;
                }
                settled.push(if done { Settled::Done } else { Settled::Lost });
            }
            transaction.commit()?;
            // A lane knows by itself when its own deliveries are due again.
            let followed = |one: &Settlement| matches!(one.verdict, Verdict::Succeeded(_)) && !one.followups.is_empty();
            if waiting.values().any(|waiting| waiting.parked) || settlements.iter().any(followed) {
                shared.changed();
            }
            Ok(settled)
        })
    }

    fn renew(&self, fences: Vec<Fence>, lease: Duration) -> BoxFuture<'_, Result<(), WorkError>> {
        self.work(move |connection, now| {
            let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            fences.iter().try_for_each(|fence| queue::renew(&transaction, fence, later(now, lease)))?;
            transaction.commit()
        })
    }

    fn give_back(&self, fences: Vec<Fence>) -> BoxFuture<'_, Result<(), WorkError>> {
        self.change(move |transaction, now| {
            fences.iter().try_for_each(|fence| queue::give_back(transaction, fence, now).map(|_| ()))
        })
    }

    fn reclaim(&self, route: Arc<Route>) -> BoxFuture<'_, Result<usize, WorkError>> {
        let (chance, shared) = (Arc::clone(&self.chance), Arc::clone(&self.shared));
        self.work(move |connection, now| {
            let mut chance = chance.lock().unwrap_or_else(PoisonError::into_inner);
            let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            let woken = lines::look_again(&transaction, &route, now)?;
            let reclaimed = queue::reclaim(&transaction, &route, now, &mut chance)?;
            transaction.commit()?;
            if woken || !reclaimed.is_empty() {
                shared.changed();
            }
            route.report(&reclaimed);
            Ok(reclaimed.len())
        })
    }

    fn next_due(&self, route: RouteName) -> BoxFuture<'_, Result<Option<UnixMicros>, WorkError>> {
        self.work(move |connection, _| queue::next_due(connection, &route))
    }

    fn backlog(&self) -> BoxFuture<'_, Result<Vec<Backlog>, WorkError>> {
        Box::pin(async {
            let backlog = self.read(|readers| readers.ask(async |session| story::backlog(session).await)).await;
            backlog.map_err(|error| WorkError::Unavailable(error.to_string()))
        })
    }

    fn order(&self, order: Order) -> BoxFuture<'_, Result<Ordered, OrderError>> {
        let shared = Arc::clone(&self.shared);
        let done = self.share(async move |session| {
            let ordered = operate::order(session, None, &order).await?;
            if ordered.is_ok() {
                shared.changed();
            }
            Ok(ordered)
        });
        Box::pin(async move { done.await? })
    }

    fn set_paused(&self, pause: Pause, who: Who) -> BoxFuture<'_, Result<(), WorkError>> {
        let shared = Arc::clone(&self.shared);
        self.share(async move |session| {
            operate::set_paused(session, None, &pause, &who).await?;
            shared.changed();
            Ok(())
        })
    }

    fn paused(&self) -> BoxFuture<'_, Result<Vec<Pausable>, WorkError>> {
        self.share(async |session| operate::paused(session).await)
    }

    fn pauses(&self) -> BoxFuture<'_, Result<Vec<Paused>, WorkError>> {
        self.share(async |session| operate::pauses(session).await)
    }

    fn forget(&self, retention: Retention) -> BoxFuture<'_, Result<Forgotten, WorkError>> {
        let round = Arc::clone(&self.round);
        self.work_at(move |desk| {
            let mut round = round.lock().unwrap_or_else(PoisonError::into_inner);
            forget::batch(desk.connection, desk.ledger, &mut round, &retention, desk.now.min(desk.wall))
        })
    }

    fn trust_clock(&self, who: Who) -> BoxFuture<'_, Result<(), WorkError>> {
        self.work_at(move |desk| {
            statements::run(desk.connection, desk.now, async |session| {
                sql::forget::trust_clock(session, None, desk.wall.0, &who).await
            })
        })
    }

    fn mark(&self) -> BoxFuture<'_, Result<i64, WorkError>> {
        self.work(|connection, _| queue::mark(connection))
    }

    fn unsettled(&self, deliveries: Vec<DeliveryId>) -> BoxFuture<'_, Result<Vec<DeliveryId>, WorkError>> {
        self.work(move |connection, _| queue::unsettled(connection, deliveries))
    }
}
