//! Effects: the user's statements, each in one transaction with the record that they happened.
//!
//! A batch of a `sql` route is one transaction: its deliveries are locked (the lock is the claim; others pass over what is
//! locked), all statements are sent without waiting in between, and one statement settles them; the commit is sent behind
//! it without waiting. If one fails the batch is
//! undone and redone one by one, so that a poison event costs only itself. A delivery that failed before always runs
//! alone. A worker that freezes in the middle is ended by the server (`idle_in_transaction_session_timeout`), and its
//! locks with it.
//!
//! Does not: count a collision with another transaction as an attempt. Such a delivery stays due.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;
use std::time::{Duration, Instant};

use oncehook_verify::UnixMicros;
use tokio_postgres::Statement;
use tokio_postgres::error::SqlState;

use super::connection::{EngineError, Session};
use super::queue::{self, Due, Ended, Locked, Settling};
use super::user_sql::{self, Trouble};
use crate::delivery::{Failure, Fence, Verdict};
use crate::handler::SqlHandler;
use crate::journal::Progress;
use crate::route::Route;

/// Deliveries that run alone end after this time, so that the worker looks up now and then.
const ALONE_TIME: Duration = Duration::from_secs(2);

/// Our own statements are planned once for a connection: all they look up stands in an index, row by row. Plans that read a
/// whole table (to scan, sort, hash or merge it) are not to be chosen, however small it was when they were made. The user's
/// statements are planned as the server likes.
const BEGIN: &str = "BEGIN; SET LOCAL plan_cache_mode = force_generic_plan; SET LOCAL enable_seqscan = off;
    SET LOCAL enable_bitmapscan = off; SET LOCAL enable_hashjoin = off; SET LOCAL enable_mergejoin = off";
const OUR_PLANS: &str = "SET LOCAL plan_cache_mode = force_generic_plan; SET LOCAL enable_seqscan = off;
    SET LOCAL enable_bitmapscan = off; SET LOCAL enable_hashjoin = off; SET LOCAL enable_mergejoin = off";
const USER_PLANS: &str = "SET LOCAL plan_cache_mode TO DEFAULT; SET LOCAL enable_seqscan TO DEFAULT;
    SET LOCAL enable_bitmapscan TO DEFAULT; SET LOCAL enable_hashjoin TO DEFAULT; SET LOCAL enable_mergejoin TO DEFAULT";

/// Runs due deliveries of a `sql` route.
pub(super) async fn sql(
    session: &Session,
    given: Option<i64>,
    route: &Route,
    handler: &SqlHandler,
    limit: usize,
    draw: impl FnMut() -> f64 + Send,
) -> Result<Progress, EngineError> {
    let prepared = match user_sql::prepare(session, handler).await {
        Ok(prepared) => Ok(prepared),
        Err(Trouble::Failed(failure)) => Err(failure),
        Err(Trouble::Collision) => return Err(EngineError::other("a statement could not be prepared now")),
        Err(Trouble::Engine(error)) => return Err(error),
    };
    let settling = Settling::prepare(session).await?;
    let progress = Progress::default();
    let mut batch = Batch { session, given, route, handler, prepared, settling, draw, progress };
    let (begun, locked) =
        tokio::join!(biased; session.run(BEGIN), queue::due(session, given, route, limit, None));
    begun?;
    let Locked { due, count, now } = locked?;
    let full = count == limit || due.len() < count;
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
    session: &'b Session,
    given: Option<i64>,
    route: &'b Route,
    handler: &'b SqlHandler,
    /// The user's statements, or why they cannot even be prepared.
    prepared: Result<Vec<Statement>, Failure>,
    settling: Settling,
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
            match self.bind(prepared, delivery) {
                Ok(parameters) => {
                    bound.push(parameters);
                    outcomes.push(None);
                }
                Err(failure) => outcomes.push(Some(Err(failure))),
            }
        }
        self.crash_point();
        let (planned, ran) = tokio::join!(biased;
            self.session.run(USER_PLANS),
            user_sql::run(self.session, prepared, &bound)
        );
        planned?;
        let mut ran = ran.into_iter();
        let mut complete = Vec::with_capacity(due.len());
        for failed_early in outcomes {
            complete.push(match failed_early {
                Some(outcome) => outcome,
                None => match ran.next() {
                    Some(Ok(result)) => Ok(result),
                    Some(Err(Trouble::Engine(error))) => return Err(error),
                    Some(Err(_)) | None => {
                        self.session.run("ROLLBACK").await?;
                        return Ok(Together::Spoilt);
                    }
                },
            });
        }
        crate::crash::point("after_effect");
        self.settle(due.iter().zip(complete).collect(), now).await?;
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
        let (begun, locked) = tokio::join!(biased;
            self.session.run(BEGIN),
            queue::due(self.session, self.given, self.route, 1, Some(delivery))
        );
        begun?;
        let Locked { due, now, .. } = locked?;
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
        self.settle(vec![(delivery, outcome)], now).await?;
        Ok(true)
    }

    /// The user's statements for one delivery; if they fail, what they did is undone and the transaction goes on.
    async fn effect(&self, delivery: &Due) -> Result<Option<String>, Trouble> {
        let prepared = self.prepared.as_ref().map_err(|failure| Trouble::Failed(failure.clone()))?;
        let bound = self.bind(prepared, delivery).map_err(Trouble::Failed)?;
        self.crash_point();
        self.session
            .run(&format!("{USER_PLANS}; SAVEPOINT oncehook_effect"))
            .await
            .map_err(Trouble::Engine)?;
        let ran = user_sql::run(self.session, prepared, std::slice::from_ref(&bound)).await;
        match ran.into_iter().next() {
            Some(Ok(result)) => {
                crate::crash::point("after_effect");
                Ok(result)
            }
            Some(Err(Trouble::Failed(failure))) => {
                self.session.run("ROLLBACK TO SAVEPOINT oncehook_effect").await.map_err(Trouble::Engine)?;
                if failure.message.contains(SqlState::FEATURE_NOT_SUPPORTED.code()) {
                    // A plan that does not fit the table any more; the next attempt prepares anew.
                    self.session.forget_statements();
                }
                Err(Trouble::Failed(failure))
            }
            Some(Err(other)) => Err(other),
            None => Err(Trouble::Engine(EngineError::other("a statement was not answered"))),
        }
    }

    fn bind(&self, prepared: &[Statement], delivery: &Due) -> Result<user_sql::Bound, Failure> {
        let values = self.handler.values(&delivery.event)?;
        user_sql::bind(self.handler, prepared, &values)
    }

    fn crash_point(&self) {
        crate::crash::point(if self.route.after.is_some() { "in_follow_up" } else { "in_handler" });
    }

    /// Settles and commits. The statement fails unless it settles every one of them (they are locked since they were read),
    /// and a failed statement makes the commit behind it undo the transaction.
    async fn settle(&mut self, outcomes: Vec<(&Due, Outcome)>, now: UnixMicros) -> Result<(), EngineError> {
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
        self.session.run(OUR_PLANS).await?;
        // Dangerous: a commit that overtakes the settlement commits effects that nobody knows of. So it is not even sent
        // before the settlement is on its way; then the server does one after the other, or undoes both.
        let mut settling = pin!(self.settling.settle(self.session, self.given, now, &ended));
        let sent = poll_fn(|context| Poll::Ready(settling.as_mut().poll(context))).await;
        let committed = match sent {
            Poll::Ready(settled) => {
                settled?;
                self.session.run("COMMIT").await
            }
            Poll::Pending => {
                let (settled, committed) = tokio::join!(biased; settling, self.session.run("COMMIT"));
                settled?;
                committed
            }
        };
        committed?;
        self.progress.succeeded += progress.succeeded;
        self.progress.retrying += progress.retrying;
        self.progress.dead.extend(progress.dead);
        Ok(())
    }
}
