//! Effects: the user's statements, each in one transaction with the record that they happened.
//!
//! A batch of a `sql` route is one transaction: its deliveries are locked (the lock is the claim; other workers skip what is
//! locked), their statements run, and one step settles them. If one fails the batch is undone and redone one by one, so that a
//! poison event costs only itself. A delivery that failed before always runs alone. A worker that freezes in the middle is
//! ended by the server after a lease's time, and its locks with it.
//!
//! Does not: count a collision with another transaction as an attempt. Such a delivery stays due.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use oncehook_verify::UnixMicros;

use super::entity::{self, Eligible, EntityOutcome};
use super::settle;
use super::steps::{Delivers, Due, Ended, Locked, SettleTime, Try, Wanted};
use crate::delivery::{Failure, Fence, Verdict};
use crate::handler::SqlHandler;
use crate::handler::sql::ended_transaction;
use crate::journal::Progress;
use crate::journal::server::engine::Session;
use crate::journal::server::error::EngineError;
use crate::journal::server::user_sql::{Ran, Surroundings, Trouble};
use crate::ordering::Company;
use crate::route::{Route, Tried};

/// Deliveries that run alone end after this time, so that the worker looks up now and then.
const ALONE_TIME: Duration = Duration::from_secs(2);

/// Runs due deliveries of a `sql` route.
pub(super) async fn apply<E: Delivers>(
    engine: &E,
    session: &mut E::Session,
    given: Option<i64>,
    route: &Route,
    handler: &SqlHandler,
    limit: usize,
    draw: impl FnMut() -> f64 + Send,
) -> Result<Progress, EngineError> {
    let prepared = match E::prepare(session, handler, Surroundings::Batch).await {
        Ok(prepared) => Ok(prepared),
        Err(Trouble::Failed(failure) | Trouble::Deferred(failure)) => Err(failure),
        Err(Trouble::Collision | Trouble::Ended(_)) => {
            return Err(EngineError::other("a statement could not be prepared now"));
        }
        Err(Trouble::Engine(error)) => return Err(error),
    };
    let progress = Progress::default();
    let mut batch = Batch { engine, session, given, route, handler, prepared, ended: false, draw, progress };
    let mut settle_ahead = batch.may_settle_ahead();
    loop {
        let now = E::begin_batch(batch.session, given).await?;
        let wanted = Wanted::Batch { limit, settle_ahead };
        let Locked { due, full, unseen, settled_ahead } = engine.lock_due(batch.session, now, route, wanted).await?;
        let left = if route.ordering.is_serial() {
            batch.in_order(due, now).await?
        } else {
            let (fresh, failed_before): (Vec<Due>, Vec<Due>) = due.into_iter().partition(|due| due.attempt == 0);
            let together = if settle_ahead && settled_ahead != fresh.len() {
                Together::NotAhead
            } else {
                batch.together(&fresh, now, settle_ahead).await?
            };
            match together {
                Together::Done => batch.alone(tries(&failed_before)).await?,
                Together::Spoilt => batch.alone(fresh.iter().chain(&failed_before).map(Due::try_of).collect()).await?,
                Together::NotAhead => {
                    batch.session.rollback().await?;
                    settle_ahead = false;
                    continue;
                }
            }
        };
        batch.progress.more = full || unseen || left > 0;
        return Ok(batch.progress);
    }
}

fn tries(due: &[Due]) -> Vec<Try> {
    due.iter().map(Due::try_of).collect()
}

/// Separates those that failed before, and others of the same entities, from the rest. They are in the order of their entity
/// queues.
fn apart(due: Vec<Due>) -> (Vec<Due>, Vec<Due>) {
    let troubled: HashSet<String> =
        due.iter().filter(|due| due.attempt > 0).filter_map(|due| due.candidate.entity.clone()).collect();
    let (mut alone, together): (Vec<Due>, Vec<Due>) = due.into_iter().partition(|due| match &due.candidate.entity {
        Some(entity) => troubled.contains(entity),
        None => due.attempt > 0,
    });
    alone.sort_by_key(|due| due.candidate.place);
    (alone, together)
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
            && self.prepared.as_ref().is_ok_and(E::settles_ahead)
    }

    /// The eligible ones of a route that looks at entities, in the transaction that was begun. Returns how many were left for
    /// the next time.
    async fn in_order(&mut self, due: Vec<Due>, now: i64) -> Result<usize, EngineError> {
        let (alone, together) = apart(due);
        let (run, passed) = self.eligible(together, usize::MAX, now).await?;
        match self.together(&run, now, false).await? {
            Together::Done => {
                self.progress.add(passed);
                self.alone(tries(&alone)).await
            }
            // What was settled without running is undone too, and comes again.
            Together::Spoilt | Together::NotAhead => {
                let left = self.alone(run.iter().chain(&alone).map(Due::try_of).collect()).await?;
                Ok(left + 1)
            }
        }
    }

    /// The eligible ones, with their events; and what became of those that do not run.
    async fn eligible(&mut self, due: Vec<Due>, room: usize, now: i64) -> Result<(Vec<Due>, Progress), EngineError> {
        let company = Company::OneTransaction;
        let Eligible { mut run, passed } =
            entity::eligible::<E>(self.session, now, self.route, company, room, due).await?;
        E::load_events(self.session, self.route, &mut run).await?;
        for due in &mut run {
            if let Some(event) = &mut due.event {
                event.state = due.state.take();
            }
        }
        Ok((run, passed))
    }

    /// Whether a delivery that did not take effect has others of its entity behind it, which count on it.
    fn is_counted_on(&self, due: &[Due], outcomes: &[Ran]) -> bool {
        self.route.ordering.is_serial()
            && due.iter().zip(outcomes).enumerate().any(|(place, (delivery, outcome))| {
                let entity = delivery.candidate.entity.as_ref();
                let mut behind = due.iter().skip(place + 1);
                outcome.is_err() && entity.is_some() && behind.any(|due| due.candidate.entity.as_ref() == entity)
            })
    }

    /// Ends the transaction that was begun: all in it, or none.
    async fn together(&mut self, due: &[Due], now: i64, ahead: bool) -> Result<Together, EngineError> {
        if due.is_empty() {
            self.session.commit().await?;
            return Ok(Together::Done);
        }
        let Ok(prepared) = &self.prepared else { return self.spoilt().await };
        // What fails before it reaches the database spoils nothing.
        let mut early: Vec<Option<Ran>> = Vec::with_capacity(due.len());
        let mut bound = Vec::with_capacity(due.len());
        for delivery in due {
            match self.bind(prepared, delivery) {
                Ok(parameters) => {
                    bound.push(parameters);
                    early.push(None);
                }
                Err(failure) => early.push(Some(Err(failure))),
            }
        }
        self.crash_point();
        let ran = E::run(self.session, self.handler, prepared, bound, Surroundings::Batch, None).await;
        let mut ran = match ran {
            Ok(ran) => ran.into_iter(),
            Err(Trouble::Engine(error)) => return Err(error),
            Err(Trouble::Ended(_)) => {
                self.have_ended().await?;
                return Ok(Together::Spoilt);
            }
            Err(Trouble::Failed(_) | Trouble::Deferred(_) | Trouble::Collision) => {
                return self.spoilt().await;
            }
        };
        let outcomes = early.into_iter().map(|early| early.or_else(|| ran.next()).unwrap_or(Ok(None)));
        let outcomes: Vec<Ran> = outcomes.collect();
        if self.is_counted_on(due, &outcomes) {
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
            let woken = E::wake_parked(self.session, now, &entities).await?;
            Progress { succeeded: due.len(), woken, ..Progress::default() }
        } else {
            return Ok(Together::NotAhead);
        };
        self.session.commit().await?;
        self.progress.add(progress);
        Ok(Together::Done)
    }

    async fn spoilt(&mut self) -> Result<Together, EngineError> {
        self.session.rollback().await?;
        Ok(Together::Spoilt)
    }

    /// The statements have ended the transaction: they do not run any more, and what may have run is settled as failed for good.
    async fn have_ended(&mut self) -> Result<(), EngineError> {
        (self.ended, self.prepared) = (true, Err(ended_transaction()));
        self.session.rollback().await
    }

    /// Each in its own transaction. Returns how many were left for the next time.
    async fn alone(&mut self, tries: Vec<Try>) -> Result<usize, EngineError> {
        let started = Instant::now();
        let mut left = 0;
        for delivery in tries {
            if started.elapsed() >= ALONE_TIME && !self.ended || !self.one(delivery).await? {
                left += 1;
            }
        }
        Ok(left)
    }

    /// One delivery. `false`: another transaction was in the way, and it stays due.
    async fn one(&mut self, delivery: Try) -> Result<bool, EngineError> {
        let now = E::begin_batch(self.session, self.given).await?;
        let wanted = Wanted::Only(delivery);
        let Locked { mut due, .. } = self.engine.lock_due(self.session, now, self.route, wanted).await?;
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
                return Box::pin(self.one(delivery)).await;
            }
            Err(Trouble::Engine(error)) => return Err(error),
        };
        let progress = self.settle(vec![(due, outcome)], now).await?;
        self.session.commit().await?;
        self.progress.add(progress);
        Ok(true)
    }

    /// The user's statements for one delivery; if they fail, what they did is undone and the transaction goes on. If their
    /// tables have changed since they were prepared, they are prepared anew and run once more.
    async fn effect(&mut self, due: &Due) -> Result<Ran, Trouble> {
        let prepared = self.prepared.as_ref().map_err(|failure| Trouble::Failed(failure.clone()))?;
        self.crash_point();
        let failure = match statements::<E>(self.session, self.handler, prepared, due).await {
            Err(Trouble::Failed(failure)) => failure,
            other => return other,
        };
        match E::renewed(self.session, self.handler, prepared, &failure).await {
            Some(renewed) => {
                let ran = statements::<E>(self.session, self.handler, &renewed, due).await;
                self.prepared = Ok(renewed);
                ran
            }
            None => Err(Trouble::Failed(failure)),
        }
    }

    fn bind(&self, prepared: &E::Prepared, due: &Due) -> Result<E::Bound, Failure> {
        bind::<E>(self.handler, prepared, due)
    }

    fn crash_point(&self) {
        crate::crash::point(if self.route.after.is_some() { "in_follow_up" } else { "in_handler" });
    }

    async fn settle(&mut self, outcomes: Vec<(&Due, Ran)>, now: i64) -> Result<Progress, EngineError> {
        let at = UnixMicros(now);
        let mut progress = Progress::default();
        let mut settlements = Vec::with_capacity(outcomes.len());
        for (due, outcome) in outcomes {
            let fence = Fence { delivery: due.delivery(self.route), attempt: due.attempt + 1 };
            let verdict = match outcome {
                Ok(result) => Verdict::Succeeded(result),
                Err(failure) => {
                    let Due { attempt_limit: limit, parked_at, .. } = *due;
                    let tried = Tried { attempt: fence.attempt, limit, parked_at };
                    self.route.after_failure(failure, tried, at, (self.draw)())
                }
            };
            progress.count(fence.delivery.event, fence.attempt, due.attempt_limit, &verdict, at);
            settlements.push((due, fence, verdict));
        }
        let followups = &self.route.followups;
        let ended: Vec<_> = settlements.iter().map(|(_, fence, verdict)| Ended { fence, verdict, followups }).collect();
        let time = SettleTime { now: Some(now), from: at };
        settle::settle_locked::<E>(self.session, time, &ended).await?;
        let outcomes: Vec<EntityOutcome<'_>> =
            settlements.iter().filter_map(|(due, _, verdict)| EntityOutcome::of(due, verdict)).collect();
        if self.route.ordering.is_serial() {
            entity::after::<E>(self.session, now, self.route, &outcomes).await?;
        }
        let entities = entity::affected(&outcomes);
        progress.woken = !entities.is_empty() && E::wake_parked(self.session, now, &entities).await?;
        Ok(progress)
    }
}

fn bind<E: Delivers>(handler: &SqlHandler, prepared: &E::Prepared, due: &Due) -> Result<E::Bound, Failure> {
    match &due.event {
        Some(event) => E::bind(handler, prepared, &handler.values(event)?),
        None => Err(Failure::retry(crate::delivery::Cause::Ours, "the event of a delivery was not read")),
    }
}

async fn statements<E: Delivers>(
    session: &mut E::Session,
    handler: &SqlHandler,
    prepared: &E::Prepared,
    due: &Due,
) -> Result<Ran, Trouble> {
    let bound = vec![bind::<E>(handler, prepared, due).map_err(Trouble::Failed)?];
    let about = due.event.as_ref();
    let ran = E::run(session, handler, prepared, bound, Surroundings::Batch, about).await?;
    crate::crash::point("after_effect");
    Ok(ran.into_iter().next().unwrap_or(Ok(None)))
}
