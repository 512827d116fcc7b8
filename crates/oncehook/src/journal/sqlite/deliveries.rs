//! The embedded journal for workers and operators: every change is a job for the one writer.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use oncehook_verify::UnixMicros;
use rusqlite::{Connection, Transaction};
use tokio::sync::{oneshot, watch};

#[cfg(feature = "planted")]
use super::apply::mark_first::sql as apply_sql;
#[cfg(not(feature = "planted"))]
use super::apply::sql as apply_sql;
use super::commands::Command;
use super::entity::{self, Entities};
use super::queue::{self, Due, begin};
use super::statements::{self, Statements};
use super::writer::WriterContext;
use super::{SqliteJournal, apply, forget};
use crate::delivery::{Claim, DeliveryId, Fence, RouteName, Settled, Settlement, Verdict};
use crate::handler::{Handler, SqlHandler};
use crate::journal::decide::outcome::Held;
use crate::journal::sql::{self, operate, story};
use crate::journal::{
    Backlog, BoxFuture, Deliveries, Forgotten, Misfit, Order, OrderError, Ordered, Pausable, Pause, Paused, Progress,
    Retention, Who, WorkError,
};
use crate::ordering::{Company, PEEK};
use crate::retry::later;
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
                let (reply, outcome) = match desk.map(work) {
                    Ok(Ok(done)) => (Ok(done), Ok(())),
                    Ok(Err(error)) => (Err(error.to_string()), Err(error)),
                    Err(reason) => (Err(reason.to_owned()), Ok(())),
                };
                // The caller may be gone.
                let _ = answer.send(reply.map_err(WorkError::Unavailable));
                outcome
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

    /// As [`work`](Self::work), in one transaction. `work` also says whether it may have made deliveries due.
    fn transact<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Transaction<'_>, UnixMicros) -> Result<(T, bool), rusqlite::Error> + Send + 'static,
    ) -> BoxFuture<'_, Result<T, WorkError>> {
        let shared = Arc::clone(&self.shared);
        self.work(move |connection, now| {
            let transaction = begin(connection)?;
            let (done, changed) = work(&transaction, now)?;
            transaction.commit()?;
            if changed {
                shared.changed();
            }
            Ok(done)
        })
    }

    /// The same for what may always make deliveries due.
    fn change<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Transaction<'_>, UnixMicros) -> Result<T, rusqlite::Error> + Send + 'static,
    ) -> BoxFuture<'_, Result<T, WorkError>> {
        self.transact(move |transaction, now| Ok((work(transaction, now)?, true)))
    }
}

impl Deliveries for SqliteJournal {
    fn changes(&self) -> watch::Receiver<u64> {
        self.shared.changes.subscribe()
    }

    fn apply(&self, route: Arc<Route>, limit: usize) -> BoxFuture<'_, Result<Progress, WorkError>> {
        if !matches!(route.handler, Handler::Sql(_)) {
            let message = format!("route `{}` has no statements", route.name);
            return Box::pin(async move { Err(WorkError::Unsupported(message)) });
        }
        let (chance, shared) = (Arc::clone(&self.chance), Arc::clone(&self.shared));
        self.work(move |connection, now| {
            let mut chance = chance.lock().unwrap_or_else(PoisonError::into_inner);
            let progress = apply_sql(connection, &route, limit, now, &mut chance)?;
            // What waited for these effects may be on another lane.
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
            let (mut due, _) = queue::due(connection, &route, now, if serial { limit.max(PEEK) } else { limit })?;
            if due.is_empty() {
                return Ok(Vec::new());
            }
            let transaction = begin(connection)?;
            let (run, passed) = if serial {
                lines.note(&route);
                let mut entities = Entities::look(&transaction, &route.name, Some(Arc::clone(&route)), now)?;
                entities.eligible(&transaction, Company::Lease, limit, &mut due)?
            } else {
                ((0..due.len()).collect(), Progress::default())
            };
            let mut claims = Vec::with_capacity(run.len());
            for Due { claim, .. } in run.into_iter().filter_map(|index| due.get(index)) {
                if queue::lease(&transaction, claim, now, later(now, lease))? {
                    claims.push(claim.clone());
                }
            }
            transaction.commit()?;
            route.report(&passed.failed);
            Ok(claims)
        })
    }

    fn call(&self, route: Arc<Route>, claims: Vec<Claim>) -> BoxFuture<'_, Result<Vec<Settled>, WorkError>> {
        if matches!(route.handler, Handler::Http(_) | Handler::Elsewhere(_)) {
            let message = format!("route `{}` runs nothing inside the journal", route.name);
            return Box::pin(async move { Err(WorkError::Unsupported(message)) });
        }
        let (chance, shared) = (Arc::clone(&self.chance), Arc::clone(&self.shared));
        self.work(move |connection, now| {
            let mut chance = chance.lock().unwrap_or_else(PoisonError::into_inner);
            let settled = apply::leased(connection, &route, claims, now, &mut chance)?;
            if !route.followups.is_empty() || entity::anything_parked(connection)? {
                shared.changed();
            }
            Ok(settled)
        })
    }

    fn settle(&self, settlements: Vec<Settlement>) -> BoxFuture<'_, Result<Vec<Settled>, WorkError>> {
        let lines = Arc::clone(&self.lines);
        self.transact(move |transaction, now| {
            let mut known: HashMap<&RouteName, Entities> = HashMap::new();
            let mut settled = Vec::with_capacity(settlements.len());
            for Settlement { fence, verdict, followups } in &settlements {
                let name = &fence.delivery.route;
                let entities = match known.entry(name) {
                    Entry::Occupied(known) => known.into_mut(),
                    Entry::Vacant(new) => new.insert(Entities::look(transaction, name, lines.get(name), now)?),
                };
                let done = entities.settle(transaction, Held::Lease, fence, None, verdict, followups)?;
                settled.push(if done { Settled::Done } else { Settled::Lost });
            }
            // A lane knows by itself when its own deliveries are due again.
            let followed = |one: &Settlement| matches!(one.verdict, Verdict::Succeeded(_)) && !one.followups.is_empty();
            let woken = known.values().any(|entities| entities.parked) || settlements.iter().any(followed);
            Ok((settled, woken))
        })
    }

    fn renew(&self, fences: Vec<Fence>, lease: Duration) -> BoxFuture<'_, Result<(), WorkError>> {
        self.transact(move |transaction, now| {
            fences.iter().try_for_each(|fence| queue::renew(transaction, fence, later(now, lease)).map(drop))?;
            Ok(((), false))
        })
    }

    fn give_back(&self, fences: Vec<Fence>) -> BoxFuture<'_, Result<(), WorkError>> {
        self.change(move |transaction, now| {
            fences.iter().try_for_each(|fence| queue::give_back(transaction, fence, now))
        })
    }

    fn reclaim(&self, route: Arc<Route>) -> BoxFuture<'_, Result<usize, WorkError>> {
        let (chance, shared) = (Arc::clone(&self.chance), Arc::clone(&self.shared));
        self.work(move |connection, now| {
            let mut chance = chance.lock().unwrap_or_else(PoisonError::into_inner);
            let transaction = begin(connection)?;
            let woken = entity::look_again(&transaction, &route, now)?;
            let mut entities = Entities::look(&transaction, &route.name, Some(Arc::clone(&route)), now)?;
            let reclaimed = queue::reclaim(&transaction, &route, &mut entities, now, &mut chance)?;
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

    fn rehearse(&self, handler: Arc<SqlHandler>) -> BoxFuture<'_, Result<Vec<Misfit>, String>> {
        let misfits = self.read(move |readers| Self::rehearse_in(readers.path(), &handler));
        Box::pin(async { misfits.await.map_err(|error| error.to_string()) })
    }

    fn unsettled(&self, deliveries: Vec<DeliveryId>) -> BoxFuture<'_, Result<Vec<DeliveryId>, WorkError>> {
        self.work(move |connection, _| queue::unsettled(connection, deliveries))
    }
}
