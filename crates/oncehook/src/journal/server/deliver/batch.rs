//! Effects: the user's statements, each in one transaction with the record that they happened.
//!
//! A batch of a `sql` route is one transaction: its deliveries are locked (the lock is the claim; other workers skip what is
//! locked), their statements run, and one step settles them. If one fails the batch is undone and redone one by one, so that a
//! poison event costs only itself. A delivery that failed before always runs alone. A worker that freezes in the middle is
//! ended by the server after a lease's time, and its locks with it.
//!
//! Does not: count a collision with another transaction as an attempt. Such a delivery stays due.

use std::time::{Duration, Instant};

use oncehook_verify::UnixMicros;

use super::entity::{Transaction, wake_parked};
use super::row::load_events;
#[cfg(not(feature = "planted"))]
use super::steps::Delivers as Steps;
use super::steps::{Delivers, Due, Locked, Wanted};
use crate::delivery::{Cause, Failure, Fence, Verdict};
use crate::handler::SqlHandler;
use crate::handler::sql::ended_transaction;
use crate::journal::Progress;
use crate::journal::decide::batch::{apart, is_counted_on};
use crate::journal::server::engine::Session;
use crate::journal::server::error::EngineResult;
#[cfg(feature = "planted")]
use crate::journal::server::planted::MistakenDelivers as Steps;
use crate::journal::server::user_sql::{self, Ran, Surroundings, Trouble, run_one};
use crate::ordering::Company;
use crate::route::{Route, Tried};

/// Deliveries that run alone end after this time, so that the worker looks up now and then.
const ALONE_TIME: Duration = Duration::from_secs(2);

/// Runs due deliveries of a `sql` route.
pub(in crate::journal::server) async fn apply<E: Delivers>(
    engine: &E,
    session: &mut E::Session,
    given: Option<i64>,
    route: &Route,
    handler: &SqlHandler,
    limit: usize,
    draw: impl FnMut() -> f64 + Send,
) -> EngineResult<Progress> {
    let prepared = user_sql::prepared(E::prepare(session, handler, Surroundings::Batch).await)?;
    let progress = Progress::default();
    let mut batch = Batch { engine, session, given, route, handler, prepared, ended: false, draw, progress };
    let mut settle_ahead = batch.may_settle_ahead();
    loop {
        let now = E::begin_batch(batch.session, given).await?;
        let wanted = Wanted::Batch { limit, settle_ahead };
        let Locked { due, full, unseen, settled_ahead } =
            Steps::lock_due(engine, batch.session, now, route, wanted).await?;
        let serial = route.ordering.is_serial();
        let (mut alone, due) = apart(due, |due| (due.attempt, due.candidate.entity.as_deref().filter(|_| serial)));
        if serial {
            // In the order of their queues, so that none is blocked by one that runs a moment later.
            alone.sort_by_key(|due| due.candidate.place);
        }
        let (run, passed) = match serial {
            true => batch.eligible(due, usize::MAX, now).await?,
            false => (due, Progress::default()),
        };
        let together = match settle_ahead && settled_ahead != run.len() {
            true => Together::NotAhead,
            false => batch.together(&run, now, settle_ahead).await?,
        };
        let left = match together {
            Together::Done => {
                batch.progress.add(passed);
                batch.alone(&alone).await?
            }
            // What was settled without running is undone too, and comes again.
            Together::Spoilt => batch.alone(run.iter().chain(&alone)).await? + usize::from(serial),
            Together::NotAhead => {
                batch.session.rollback().await?;
                settle_ahead = false;
                continue;
            }
        };
        batch.progress.more = full || unseen || left > 0;
        return Ok(batch.progress);
    }
}

/// What became of deliveries that ran in one transaction.
enum Together {
    /// All were settled, and the transaction is committed.
    Done,
    /// One of them failed. The transaction is undone, nothing was settled.
    Spoilt,
    /// They were settled ahead, and not as they should have been. The transaction is to be undone.
    NotAhead,
}

struct Batch<'b, E: Delivers, D> {
    engine: &'b E,
    session: &'b mut E::Session,
    given: Option<i64>,
    route: &'b Route,
    handler: &'b SqlHandler,
    /// The user's statements, or why they cannot even be prepared.
    prepared: Result<E::Prepared, Failure>,
    /// They have ended a transaction. What ran in it is settled, however long that takes: it must not run again.
    ended: bool,
    draw: D,
    progress: Progress,
}

impl<E: Delivers, D: FnMut() -> f64 + Send> Batch<'_, E, D> {
    /// Statements that can only succeed without a result, or fail, may be settled before they run: it spares a look at each row.
    fn may_settle_ahead(&self) -> bool {
        !self.route.ordering.is_serial()
            && self.route.followups.is_empty()
            && !self.handler.has_requirement()
            && self.prepared.as_ref().is_ok_and(<E as Steps>::settles_ahead)
    }

    fn transaction(&mut self, now: i64) -> Transaction<'_, E> {
        Transaction { session: &mut *self.session, now, route: self.route }
    }

    /// The eligible ones of a route that looks at entities, with their events; and what became of those that do not run.
    async fn eligible(&mut self, due: Vec<Due>, room: usize, now: i64) -> EngineResult<(Vec<Due>, Progress)> {
        let (mut run, passed) = self.transaction(now).eligible(Company::OneTransaction, room, due).await?;
        load_events::<E>(self.session, self.route, &mut run).await?;
        for due in &mut run {
            if let Some(event) = &mut due.event {
                event.state = due.state.take();
            }
        }
        Ok((run, passed))
    }

    /// Ends the transaction that was begun: all in it, or none.
    async fn together(&mut self, due: &[Due], now: i64, ahead: bool) -> EngineResult<Together> {
        if due.is_empty() {
            self.session.commit().await?;
            return Ok(Together::Done);
        }
        let Ok(prepared) = &self.prepared else { return self.spoilt().await };
        // What fails before it reaches the database spoils nothing.
        let mut early: Vec<Option<Failure>> = Vec::with_capacity(due.len());
        let mut bound = Vec::with_capacity(due.len());
        for delivery in due {
            match self.bind(prepared, delivery) {
                Ok(parameters) => {
                    bound.push(parameters);
                    early.push(None);
                }
                Err(failure) => early.push(Some(failure)),
            }
        }
        crash_point(self.route);
        let mut ran = match E::run(self.session, self.handler, prepared, bound, Surroundings::Batch, None).await {
            Ok(ran) => ran.into_iter(),
            Err(Trouble::Engine(error)) => return Err(error),
            Err(Trouble::Ended(_)) => {
                self.have_ended().await?;
                return Ok(Together::Spoilt);
            }
            Err(Trouble::Failed(_) | Trouble::Deferred(_) | Trouble::Collision) => return self.spoilt().await,
        };
        let outcomes: Vec<Ran> =
            early.into_iter().map(|early| early.map_or_else(|| ran.next().unwrap_or(Ok(None)), Err)).collect();
        let took_effect = due.iter().zip(&outcomes).map(|(due, ran)| (due.candidate.entity.as_deref(), ran.is_ok()));
        if self.route.ordering.is_serial() && is_counted_on(took_effect) {
            return self.spoilt().await;
        }
        crate::crash::point("after_effect");
        let progress = if !ahead {
            match self.settle(due.iter().zip(outcomes).collect(), now).await {
                Ok(progress) => progress,
                // Another transaction holds a row that is settled here. One by one it may work.
                Err(error) if error.is_collision() => return self.spoilt().await,
                Err(error) => return Err(error),
            }
        } else if outcomes.iter().all(|outcome| matches!(outcome, Ok(None))) {
            let entities = due.iter().filter_map(|due| due.candidate.entity.as_deref()).collect();
            let woken = wake_parked::<E>(self.session, now, &entities).await?;
            Progress { succeeded: due.len(), woken, ..Progress::default() }
        } else {
            return Ok(Together::NotAhead);
        };
        self.session.commit().await?;
        self.progress.add(progress);
        Ok(Together::Done)
    }

    async fn spoilt(&mut self) -> EngineResult<Together> {
        self.session.rollback().await?;
        Ok(Together::Spoilt)
    }

    /// The statements have ended the transaction: they do not run any more, and what may have run is settled as failed for good.
    async fn have_ended(&mut self) -> EngineResult {
        (self.ended, self.prepared) = (true, Err(ended_transaction()));
        self.session.rollback().await
    }

    /// Each in its own transaction. Returns how many were left for the next time.
    async fn alone(&mut self, due: impl IntoIterator<Item = &Due>) -> EngineResult<usize> {
        let started = Instant::now();
        let fences: Vec<Fence> = due.into_iter().map(|due| due.fence(self.route)).collect();
        let mut left = 0;
        for fence in &fences {
            if started.elapsed() >= ALONE_TIME && !self.ended || !self.one(fence).await? {
                left += 1;
            }
        }
        Ok(left)
    }

    /// One delivery. `false`: another transaction was in the way, and it stays due.
    async fn one(&mut self, fence: &Fence) -> EngineResult<bool> {
        let now = E::begin_batch(self.session, self.given).await?;
        let Locked { mut due, .. } =
            Delivers::lock_due(self.engine, self.session, now, self.route, Wanted::Only(fence)).await?;
        if self.route.ordering.is_serial() {
            let (run, passed) = self.eligible(due, 1, now).await?;
            self.progress.add(passed);
            due = run;
        }
        let Some(due) = due.first() else {
            // Another worker has it, or had it; or it is not eligible, or settled already.
            self.session.commit().await?;
            return Ok(true);
        };
        let outcome = match self.effect(due).await {
            Ok(outcome) => outcome,
            Err(Trouble::Failed(failure) | Trouble::Deferred(failure)) => Err(failure),
            Err(Trouble::Collision) => {
                self.session.rollback().await?;
                return Ok(false);
            }
            Err(Trouble::Ended(_)) => {
                self.have_ended().await?;
                return Box::pin(self.one(fence)).await;
            }
            Err(Trouble::Engine(error)) => return Err(error),
        };
        let progress = self.settle(vec![(due, outcome)], now).await?;
        self.session.commit().await?;
        self.progress.add(progress);
        Ok(true)
    }

    /// The user's statements for one delivery; if they fail, what they did is undone and the transaction goes on.
    async fn effect(&mut self, due: &Due) -> Result<Ran, Trouble> {
        let prepared = self.prepared.as_mut().map_err(|failure| Trouble::Failed(failure.clone()))?;
        crash_point(self.route);
        let event = due.event.as_ref().ok_or_else(|| Trouble::Failed(unread()))?;
        let ran = run_one::<E>(self.session, self.handler, prepared, event, Surroundings::Batch).await?;
        crate::crash::point("after_effect");
        Ok(ran)
    }

    fn bind(&self, prepared: &E::Prepared, due: &Due) -> Result<E::Bound, Failure> {
        let event = due.event.as_ref().ok_or_else(unread)?;
        E::bind(self.handler, prepared, &self.handler.values(event)?)
    }

    async fn settle(&mut self, outcomes: Vec<(&Due, Ran)>, now: i64) -> EngineResult<Progress> {
        let verdicts = outcomes.into_iter().map(|(due, outcome)| {
            let verdict = match outcome {
                Ok(result) => Verdict::Succeeded(result),
                Err(failure) => {
                    let tried = Tried {
                        attempt: due.attempt + 1,
                        limit: due.attempt_limit,
                        parked_at: due.candidate.parked_at,
                    };
                    self.route.after_failure(failure, tried, UnixMicros(now), (self.draw)())
                }
            };
            (due, verdict)
        });
        let verdicts = verdicts.collect();
        self.transaction(now).settle(verdicts).await
    }
}

pub(super) fn crash_point(route: &Route) {
    crate::crash::point(if route.after.is_some() { "in_follow_up" } else { "in_handler" });
}

fn unread() -> Failure {
    Failure::retry(Cause::Ours, "the event of a delivery was not read")
}
