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

use super::connection::{EngineError, Session};
use super::queue::{self, Due, Ended, Held, Locked};
use super::user_sql::{self, Bound, Prepared, Trouble};
use crate::delivery::{Failure, Fence, Verdict};
use crate::handler::SqlHandler;
use crate::journal::Progress;
use crate::route::Route;

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
    let Locked { due, count, now } = queue::due(session, given, route, limit, None).await?;
    if due.is_empty() {
        // Nothing of the user's is asked for while there is nothing to do.
        session.run("ROLLBACK").await?;
        return Ok(Progress::default());
    }
    let prepared = match user_sql::prepare(session, handler).await {
        Ok(prepared) => Ok(prepared),
        Err(Trouble::Failed(failure)) => Err(failure),
        Err(Trouble::Collision) => return Err(EngineError::other("a statement could not be prepared now")),
        Err(Trouble::Engine(error)) => return Err(error),
    };
    let full = count == limit || due.len() < count;
    let mut batch = Batch { session, given, route, handler, prepared, draw, progress: Progress::default() };
    let (fresh, failed_before): (Vec<Due>, Vec<Due>) = due.into_iter().partition(|due| due.attempt == 0);
    let left = match batch.together(&fresh, now).await? {
        Together::Done => batch.alone(failed_before).await?,
        Together::Spoilt => batch.alone(fresh.into_iter().chain(failed_before).collect()).await?,
    };
    batch.progress.more = full || left > 0;
    Ok(batch.progress)
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
    draw: D,
    progress: Progress,
}

/// What a delivery came to, before it is settled.
type Outcome = Result<Option<String>, Failure>;

impl<D: FnMut() -> f64 + Send> Batch<'_, D> {
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
        let mut ran = match user_sql::run(self.session, prepared, bound).await {
            Ok(ran) => ran.into_iter(),
            Err(Trouble::Engine(error)) => return Err(error),
            Err(Trouble::Failed(_) | Trouble::Collision) => {
                self.session.run("ROLLBACK").await?;
                return Ok(Together::Spoilt);
            }
        };
        let complete = outcomes.into_iter().map(|early| early.unwrap_or_else(|| Ok(ran.next().flatten())));
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

    /// Each in its own transaction. Returns how many were left for the next time.
    async fn alone(&mut self, due: Vec<Due>) -> Result<usize, EngineError> {
        let started = Instant::now();
        let mut left = 0;
        for delivery in due {
            if started.elapsed() >= ALONE_TIME || !self.one(&delivery).await? {
                left += 1;
            }
        }
        Ok(left)
    }

    /// One delivery. `false`: another transaction was in the way, and it stays due.
    async fn one(&mut self, delivery: &Due) -> Result<bool, EngineError> {
        let Locked { due, now, .. } =
            queue::due(self.session, self.given, self.route, 1, Some(delivery)).await?;
        let Some(delivery) = due.first() else {
            // Somebody else has it, or had it.
            self.session.run("COMMIT").await?;
            return Ok(true);
        };
        let outcome = match self.effect(delivery).await {
            Ok(result) => Ok(result),
            Err(Trouble::Failed(failure)) => Err(failure),
            Err(Trouble::Collision) => {
                self.session.run("ROLLBACK").await?;
                return Ok(false);
            }
            Err(Trouble::Engine(error)) => return Err(error),
        };
        let progress = self.settle(vec![(delivery, outcome)], now).await?;
        self.session.run("COMMIT").await?;
        self.add(progress);
        Ok(true)
    }

    /// The user's statements for one delivery; if they fail, what they did is undone and the transaction goes on.
    async fn effect(&mut self, delivery: &Due) -> Result<Option<String>, Trouble> {
        let prepared = self.prepared.as_ref().map_err(|failure| Trouble::Failed(failure.clone()))?;
        let bound = self.bind(delivery).map_err(Trouble::Failed)?;
        self.crash_point();
        self.session.run("SAVEPOINT oncehook_effect").await.map_err(Trouble::Engine)?;
        match user_sql::run(self.session, prepared, vec![bound]).await {
            Ok(results) => {
                crate::crash::point("after_effect");
                Ok(results.into_iter().next().flatten())
            }
            Err(Trouble::Failed(failure)) => {
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
        for (delivery, outcome) in outcomes {
            let fence = Fence { delivery: delivery.id(self.route), attempt: delivery.attempt + 1 };
            let verdict = match outcome {
                Ok(result) => Verdict::Succeeded(result),
                Err(failure) => self.route.retry.after_failure(
                    failure,
                    fence.attempt,
                    delivery.attempt_limit,
                    now,
                    (self.draw)(),
                ),
            };
            match &verdict {
                Verdict::Succeeded(_) => progress.succeeded += 1,
                Verdict::RetryAt(..) => progress.retrying += 1,
                Verdict::Dead(failure) => progress.dead.push((delivery.event.id, failure.message.clone())),
            }
            settlements.push((fence, verdict));
        }
        let followups = &self.route.followups;
        let ended: Vec<_> =
            settlements.iter().map(|(fence, verdict)| Ended { fence, verdict, followups }).collect();
        queue::settle(self.session, now.0, now, Held::Lock, &ended).await?;
        Ok(progress)
    }

    fn add(&mut self, progress: Progress) {
        self.progress.succeeded += progress.succeeded;
        self.progress.retrying += progress.retrying;
        self.progress.dead.extend(progress.dead);
    }
}
