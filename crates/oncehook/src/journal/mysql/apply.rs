//! Effects: the user's statements, each in one transaction with the record that they happened.
//!
//! A batch of a `sql` route is one transaction: its deliveries are locked (the lock is the claim; others pass over what is
//! locked), their statements run one after the other up to the first error, and one statement settles them. If one fails
//! the batch is undone and redone one by one, so that a poison event costs only itself. A delivery that failed before
//! always runs alone. A worker that freezes in the middle is ended by the server (`wait_timeout`), and its locks with it.
//!
//! Does not: count a collision with another transaction (a deadlock, a lock that was waited for too long) as an attempt. Such
//! a delivery stays due.

use std::time::{Duration, Instant};

use oncehook_verify::UnixMicros;

use super::connection::Session;
use super::engine_error::EngineError;
use super::lines::{self, Came};
use super::queue::{self, Due, Locked};
use super::settle::{self, Ended, Held};
use super::turn::{self, One, Turns};
use super::user_sql::{self, Bound, Prepared, Trouble};
use crate::delivery::{Failure, Fence, Verdict};
use crate::handler::SqlHandler;
use crate::handler::sql::ended_transaction;
use crate::journal::Progress;
use crate::ordering::{Company, Mark};
use crate::route::{Route, Tried};

/// Deliveries that run alone end after this time, so that the worker looks up now and then.
const ALONE_TIME: Duration = Duration::from_secs(2);

/// Runs due deliveries of a `sql` route.
pub(super) async fn sql(
    session: &mut Session,
    given: Option<i64>,
    route: &Route,
    handler: &SqlHandler,
    limit: usize,
    draw: impl FnMut() -> f64 + Send,
) -> Result<Progress, EngineError> {
    if route.ordering.is_serial() {
        return sql_in_turn(session, given, route, handler, limit, draw).await;
    }
    let Locked { due, count, now } = queue::due(session, given, route, limit, None).await?;
    if due.is_empty() {
        // Nothing of the user's is asked for while there is nothing to do.
        session.run("ROLLBACK").await?;
        return Ok(Progress::default());
    }
    let prepared = prepare(session, handler).await?;
    let full = count == limit || due.len() < count;
    let progress = Progress::default();
    let mut batch = Batch { session, given, route, handler, prepared, ended: false, draw, progress };
    let (fresh, failed_before): (Vec<Due>, Vec<Due>) = due.into_iter().partition(|due| due.attempt == 0);
    let left = match batch.together(&fresh, now).await? {
        Together::Done => batch.alone(ones(&failed_before).collect()).await?,
        Together::Spoilt => batch.alone(ones(&fresh).chain(ones(&failed_before)).collect()).await?,
    };
    batch.progress.more = full || left > 0;
    Ok(batch.progress)
}

/// The same for a route that looks at entities: those whose turn it is.
async fn sql_in_turn(
    session: &mut Session,
    given: Option<i64>,
    route: &Route,
    handler: &SqlHandler,
    limit: usize,
    draw: impl FnMut() -> f64 + Send,
) -> Result<Progress, EngineError> {
    let now = session.now(given).await?;
    let company = Company::OneTransaction;
    let Turns { run, alone, passed, full } =
        turn::take(session, now, route, company, (limit, usize::MAX), None).await?;
    if run.is_empty() && alone.is_empty() {
        session.run("COMMIT").await?;
        return Ok(Progress { more: full, ..passed });
    }
    let prepared = prepare(session, handler).await?;
    let due = queue::chosen(session, route, run).await?;
    let progress = Progress { more: full, ..Progress::default() };
    let mut batch = Batch { session, given, route, handler, prepared, ended: false, draw, progress };
    let left = match batch.together(&due, UnixMicros(now)).await? {
        Together::Done => {
            batch.add(passed);
            batch.alone(alone).await?
        }
        // What was settled without running is undone too, and comes again.
        Together::Spoilt => {
            batch.progress.more = true;
            batch.alone(ones(&due).chain(alone).collect()).await?
        }
    };
    batch.progress.more |= left > 0;
    Ok(batch.progress)
}

/// The user's statements, or why they cannot even be prepared.
async fn prepare(
    session: &mut Session,
    handler: &SqlHandler,
) -> Result<Result<Prepared, Failure>, EngineError> {
    match user_sql::prepare(session, handler).await {
        Ok(prepared) => Ok(Ok(prepared)),
        Err(Trouble::Failed(failure) | Trouble::Deferred(failure)) => Ok(Err(failure)),
        Err(Trouble::Collision | Trouble::Ended(_)) => {
            Err(EngineError::other("a statement could not be prepared now"))
        }
        Err(Trouble::Engine(error)) => Err(error),
    }
}

fn ones(due: &[Due]) -> impl Iterator<Item = One> + '_ {
    due.iter().map(|due| (due.event.id, due.epoch, due.attempt))
}

enum Together {
    /// All were settled, and the transaction is committed.
    Done,
    /// One of them failed. The transaction is undone, nothing was settled.
    Spoilt,
}

struct Batch<'b, D> {
    session: &'b mut Session,
    given: Option<i64>,
    route: &'b Route,
    handler: &'b SqlHandler,
    /// The user's statements, or why they cannot even be prepared.
    prepared: Result<Prepared, Failure>,
    /// They have ended a transaction. What ran in it is settled, however long that takes: it must not run again.
    ended: bool,
    draw: D,
    progress: Progress,
}

/// What a delivery came to, before it is settled.
type Outcome = Result<Option<String>, Failure>;

impl<D: FnMut() -> f64 + Send> Batch<'_, D> {
    /// Whether a delivery that did not take effect has others of its entity behind it, which count on it.
    fn is_counted_on(&self, due: &[Due], outcomes: &[Outcome]) -> bool {
        self.route.ordering.is_serial()
            && due.iter().zip(outcomes).enumerate().any(|(place, (delivery, outcome))| {
                let behind = due.iter().skip(place + 1);
                let entity = delivery.event.entity.as_ref();
                outcome.is_err()
                    && entity.is_some()
                    && behind.map(|due| due.event.entity.as_ref()).any(|other| other == entity)
            })
    }

    /// Ends the transaction that was begun: all in it, or none.
    async fn together(&mut self, due: &[Due], now: UnixMicros) -> Result<Together, EngineError> {
        if due.is_empty() {
            self.session.run("COMMIT").await?;
            return Ok(Together::Done);
        }
        let Ok(prepared) = &self.prepared else {
            self.session.run("ROLLBACK").await?;
            return Ok(Together::Spoilt);
        };
        // What fails before it reaches the database spoils nothing.
        let mut outcomes: Vec<Option<Outcome>> = Vec::with_capacity(due.len());
        let mut bound = Vec::with_capacity(due.len());
        for delivery in due {
            match self.bind(delivery) {
                Ok(parameters) => {
                    bound.push(parameters);
                    outcomes.push(None);
                }
                Err(failure) => outcomes.push(Some(Err(failure))),
            }
        }
        self.crash_point();
        let mut ran = match user_sql::run(self.session, prepared, bound, None).await {
            Ok(ran) => ran.into_iter(),
            Err(Trouble::Engine(error)) => return Err(error),
            Err(Trouble::Ended(_)) => {
                self.have_ended().await?;
                return Ok(Together::Spoilt);
            }
            Err(Trouble::Failed(_) | Trouble::Deferred(_) | Trouble::Collision) => {
                self.session.run("ROLLBACK").await?;
                return Ok(Together::Spoilt);
            }
        };
        let complete = outcomes.into_iter().map(|early| early.or_else(|| ran.next()).unwrap_or(Ok(None)));
        let complete: Vec<Outcome> = complete.collect();
        if self.is_counted_on(due, &complete) {
            self.session.run("ROLLBACK").await?;
            return Ok(Together::Spoilt);
        }
        let settled = due.iter().zip(complete).collect::<Vec<_>>();
        crate::crash::point("after_effect");
        let progress = match self.settle(settled, now).await {
            Ok(progress) => progress,
            // Somebody locked a follow-up's row, or the like: one by one it may work.
            Err(error) if error.is_collision() => {
                self.session.run("ROLLBACK").await?;
                return Ok(Together::Spoilt);
            }
            Err(error) => return Err(error),
        };
        self.session.run("COMMIT").await?;
        self.add(progress);
        Ok(Together::Done)
    }

    /// The statements have ended the transaction: nothing of them runs any more, and all that may have run is settled as failed
    /// for good.
    async fn have_ended(&mut self) -> Result<(), EngineError> {
        (self.ended, self.prepared) = (true, Err(ended_transaction()));
        self.session.run("ROLLBACK").await
    }

    /// Each in its own transaction. Returns how many were left for the next time.
    async fn alone(&mut self, due: Vec<One>) -> Result<usize, EngineError> {
        let started = Instant::now();
        let mut left = 0;
        for delivery in due {
            if started.elapsed() >= ALONE_TIME && !self.ended || !self.one(delivery).await? {
                left += 1;
            }
        }
        Ok(left)
    }

    /// One delivery. `false`: another transaction was in the way, and it stays due.
    async fn one(&mut self, delivery: One) -> Result<bool, EngineError> {
        let (due, now) = if self.route.ordering.is_serial() {
            let now = self.session.now(self.given).await?;
            let company = Company::OneTransaction;
            let Turns { run, passed, .. } =
                turn::take(self.session, now, self.route, company, (1, 1), Some(delivery)).await?;
            self.add(passed);
            (queue::chosen(self.session, self.route, run).await?, UnixMicros(now))
        } else {
            let Locked { due, now, .. } =
                queue::due(self.session, self.given, self.route, 1, Some(delivery)).await?;
            (due, now)
        };
        let Some(delivery) = due.first() else {
            // Somebody else has it, or had it; or it is not its turn, or settled already.
            self.session.run("COMMIT").await?;
            return Ok(true);
        };
        let outcome = match self.effect(delivery).await {
            Ok(outcome) => outcome,
            Err(Trouble::Failed(failure) | Trouble::Deferred(failure)) => Err(failure),
            Err(Trouble::Collision) => {
                self.session.run("ROLLBACK").await?;
                return Ok(false);
            }
            Err(Trouble::Ended(_)) => {
                self.have_ended().await?;
                let again = (delivery.event.id, delivery.epoch, delivery.attempt);
                return Box::pin(self.one(again)).await;
            }
            Err(Trouble::Engine(error)) => return Err(error),
        };
        let progress = self.settle(vec![(delivery, outcome)], now).await?;
        self.session.run("COMMIT").await?;
        self.add(progress);
        Ok(true)
    }

    /// The user's statements for one delivery; if they fail, what they did is undone and the transaction goes on.
    async fn effect(&mut self, delivery: &Due) -> Result<Outcome, Trouble> {
        let prepared = self.prepared.as_ref().map_err(|failure| Trouble::Failed(failure.clone()))?;
        let bound = self.bind(delivery).map_err(Trouble::Failed)?;
        self.crash_point();
        self.session.run("SAVEPOINT oncehook_effect").await.map_err(Trouble::Engine)?;
        let about = Some((self.handler, &delivery.event));
        match user_sql::run(self.session, prepared, vec![bound], about).await {
            Ok(outcomes) => {
                crate::crash::point("after_effect");
                Ok(outcomes.into_iter().next().unwrap_or(Ok(None)))
            }
            Err(Trouble::Failed(failure) | Trouble::Deferred(failure)) => {
                // If the server has ended the transaction by itself, this fails, and nothing more is written.
                self.session.run("ROLLBACK TO SAVEPOINT oncehook_effect").await.map_err(Trouble::Engine)?;
                Err(Trouble::Failed(failure))
            }
            Err(other) => Err(other),
        }
    }

    fn bind(&self, delivery: &Due) -> Result<Bound, Failure> {
        let values = self.handler.values(&delivery.event)?;
        Ok(user_sql::bind(self.handler, &values))
    }

    fn crash_point(&self) {
        crate::crash::point(if self.route.after.is_some() { "in_follow_up" } else { "in_handler" });
    }

    async fn settle(
        &mut self,
        outcomes: Vec<(&Due, Outcome)>,
        now: UnixMicros,
    ) -> Result<Progress, EngineError> {
        let mut progress = Progress::default();
        let mut settlements = Vec::with_capacity(outcomes.len());
        let mut handed = Vec::with_capacity(outcomes.len());
        for (delivery, outcome) in outcomes {
            handed.push(&delivery.event);
            let fence = Fence { delivery: delivery.id(self.route), attempt: delivery.attempt + 1 };
            let verdict = match outcome {
                Ok(result) => Verdict::Succeeded(result),
                Err(failure) => {
                    let Due { attempt_limit: limit, parked_at, .. } = *delivery;
                    let tried = Tried { attempt: fence.attempt, limit, parked_at };
                    self.route.after_failure(failure, tried, now, (self.draw)())
                }
            };
            progress.count(delivery.event.id, fence.attempt, delivery.attempt_limit, &verdict, now);
            settlements.push((fence, verdict));
        }
        let followups = &self.route.followups;
        let ended: Vec<_> =
            settlements.iter().map(|(fence, verdict)| Ended { fence, verdict, followups }).collect();
        settle::settle(self.session, now.0, now, Held::Lock, &ended).await?;
        let came: Vec<Came<'_>> = handed
            .iter()
            .zip(&settlements)
            .filter_map(|(event, (_, verdict))| {
                let mark = Mark { version: event.version, at: event.occurred_at };
                Some(Came { entity: event.entity.as_deref()?, mark, kind: event.kind.as_deref(), verdict })
            })
            .collect();
        if self.route.ordering.is_serial() {
            lines::after(self.session, now.0, self.route, &came).await?;
        }
        let succeeded = came.iter().filter(|came| matches!(came.verdict, Verdict::Succeeded(_)));
        let entities = succeeded.map(|came| came.entity).collect();
        progress.woken = lines::wake_parked(self.session, now.0, &entities).await?;
        Ok(progress)
    }

    fn add(&mut self, progress: Progress) {
        self.progress.add(progress);
    }
}
