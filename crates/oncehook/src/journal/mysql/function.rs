//! Functions: Rust code of the user's that is given the open transaction, each call in one of its own with its settlement. The
//! statements of a route that fetched something first run here too: their deliveries are leased as well.
//!
//! Promises: what a function does through its transaction commits together with the record that it happened, or not at all;
//! an attempt that is not the latest commits nothing. A panic, an error, a statement that failed and a function that does
//! not come to its end are failures of the attempt; what another transaction or the server prevented is not. To the server a
//! statement that failed is over and the transaction goes on, or (after a deadlock) a new one begins in silence: so after the
//! first trouble nothing more is sent, and a statement that was given up before its answer came ends the connection.
//!
//! Does not: look into the function. What it does elsewhere (files, requests) may happen again.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use mysql_async::{Row, Value};
use oncehook_verify::UnixMicros;

use super::connection::{Pool, Session};
use super::engine_error::{EngineError, Tries};
use super::settle::{self, Ended};
use super::user_sql::{self, Trouble};
use crate::delivery::{Cause, Claim, FailedAttempt, Failure, Settled, Verdict};
use crate::handler::elsewhere::Answer;
use crate::handler::function::{MysqlTransaction, caught};
use crate::handler::sql::ended_transaction;
use crate::handler::{Function, SqlHandler};
use crate::journal::server::engine::Session as _;
use crate::route::{KnownLines, Route, Tried};

/// How often a call is repeated after a collision, and how long: whoever waited for a lock has waited long already.
const TRIES: usize = 5;
const PATIENCE: Duration = Duration::from_secs(2);

/// What every call needs.
pub(super) struct Caller<'c> {
    pub(super) pool: &'c Pool,
    pub(super) given: Option<i64>,
    /// From which the due times of verdicts are counted.
    pub(super) from: UnixMicros,
    pub(super) route: &'c Route,
    /// The rules of routes that look at entities.
    pub(super) lines: &'c KnownLines,
    pub(super) effect: Effect<'c>,
    /// How long a function may take, all in all.
    pub(super) time: Duration,
}

/// What is run.
pub(super) enum Effect<'e> {
    Function(&'e dyn Function),
    Statements(&'e SqlHandler),
}

impl Caller<'_> {
    /// Runs the effect for one leased delivery and settles it. Returns also whether something that was parked is due now.
    pub(super) async fn call(&self, claim: &Claim, chance: f64) -> Result<(Settled, bool), EngineError> {
        let (started, mut tries) = (Instant::now(), 0);
        let failure = loop {
            match self.attempt(claim).await {
                Ok(settled) => return Ok(settled),
                Err(Trouble::Failed(failure) | Trouble::Deferred(failure)) => break failure,
                Err(Trouble::Ended(_)) => break ended_transaction(),
                Err(Trouble::Engine(error)) => return Err(error),
                // Another transaction was in the way, and all of it is undone.
                Err(Trouble::Collision) if tries < TRIES && started.elapsed() < PATIENCE => tries += 1,
                Err(Trouble::Collision) => {
                    return Err(EngineError::other("other transactions were in the way"));
                }
            }
        };
        let (attempt, limit) = (claim.fence.attempt, claim.attempt_limit);
        let tried = Tried { attempt, limit, parked_at: claim.parked_at };
        let verdict = self.route.after_failure(failure, tried, self.from, chance);
        let (settled, woken) = self.record(claim, &verdict).await?;
        if settled == Settled::Done {
            let failed = FailedAttempt::of(claim.event.id, attempt, limit, &verdict, self.from);
            self.route.report(failed.as_slice());
        }
        Ok((settled, woken))
    }

    /// One transaction: the effect, then the settlement. What did not commit is undone in so many words, or else with the
    /// connection.
    async fn attempt(&self, claim: &Claim) -> Result<(Settled, bool), Trouble> {
        let mut session = self.pool.take().await.map_err(Trouble::Engine)?;
        let came = self.transaction(&mut session, claim).await;
        let sound = match &came {
            Ok(_) => true,
            Err(Trouble::Failed(_) | Trouble::Deferred(_) | Trouble::Collision) => {
                !session.is_retired() && session.run("ROLLBACK").await.is_ok()
            }
            Err(Trouble::Engine(_) | Trouble::Ended(_)) => false,
        };
        if sound {
            session.keep();
        }
        came
    }

    async fn transaction(&self, session: &mut Session, claim: &Claim) -> Result<(Settled, bool), Trouble> {
        crate::crash::point(if self.route.after.is_some() { "in_follow_up" } else { "in_handler" });
        let result = match self.effect {
            Effect::Function(function) => returned(function, session, claim, self.time).await?,
            Effect::Statements(handler) => ran(session, handler, claim).await?,
        };
        crate::crash::point("after_effect");
        let verdict = Verdict::Succeeded(result);
        let ended = [Ended { fence: &claim.fence, verdict: &verdict, followups: &self.route.followups }];
        let settled = settle::settle_along_the_line(session, self.given, self.from, &ended, self.lines).await;
        // The line is locked behind what the handler has locked, so others may be in the way here, too.
        let (done, woken) = settled.map_err(ours)?;
        // An attempt that is not the latest leaves nothing behind.
        let (end, came) = match done.is_empty() {
            true => ("ROLLBACK", (Settled::Lost, false)),
            false => ("COMMIT", (Settled::Done, woken)),
        };
        session.run(end).await.map_err(ours)?;
        Ok(came)
    }

    /// Writes down that an attempt failed, in a transaction without its effect.
    async fn record(&self, claim: &Claim, verdict: &Verdict) -> Result<(Settled, bool), EngineError> {
        let ended = [Ended { fence: &claim.fence, verdict, followups: &self.route.followups }];
        let mut tries = Tries::default();
        loop {
            let mut session = self.pool.take().await?;
            let settled =
                settle::settle_leased(&mut session, self.given, self.from, &ended, self.lines).await;
            match settled {
                Ok((done, woken)) => {
                    session.keep();
                    return Ok((if done.is_empty() { Settled::Lost } else { Settled::Done }, woken));
                }
                Err(error) => {
                    if error.is_collision() && session.run("ROLLBACK").await.is_ok() {
                        session.keep();
                    }
                    tries.again(error)?;
                }
            }
        }
    }
}

/// What an error of our own statements means: never that the attempt failed.
fn ours(error: EngineError) -> Trouble {
    if error.is_collision() { Trouble::Collision } else { Trouble::Engine(error) }
}

/// Runs the user's statements in the transaction that is open.
async fn ran(session: &mut Session, handler: &SqlHandler, claim: &Claim) -> Result<Option<String>, Trouble> {
    let prepared = user_sql::prepare(session, handler).await?;
    let values = handler.values(&claim.event).map_err(Trouble::Failed)?;
    let bound = vec![user_sql::bind(handler, &values)];
    let ran = user_sql::run(session, &prepared, bound, Some((handler, &claim.event))).await?;
    ran.into_iter().next().unwrap_or(Ok(None)).map_err(Trouble::Failed)
}

/// What the function returned in time, unless one of its statements broke.
async fn returned(
    function: &dyn Function,
    session: &mut Session,
    claim: &Claim,
    time: Duration,
) -> Result<Option<String>, Trouble> {
    // A function that asks for the id that it made is not told another delivery's.
    session.run("SELECT LAST_INSERT_ID(0)").await.map_err(ours)?;
    let open = Open { session: tokio::sync::Mutex::new(session), condition: Mutex::new(Condition::Sound) };
    let calling = caught(|| function.on_mysql(&open, &claim.event));
    let returned = match tokio::time::timeout(time, calling).await {
        Ok(returned) => returned,
        Err(_) => {
            let told = format!("the handler took longer than {} s", time.as_secs_f32());
            Err(Failure::retry(Cause::Handler, told))
        }
    };
    let Open { session, condition } = open;
    match (condition.into_inner().unwrap_or_else(PoisonError::into_inner), returned) {
        (Condition::Broken(trouble), _) => Err(trouble),
        (Condition::Sound, Ok(result)) => Ok(result.map(|result| result.to_string())),
        (Condition::Sound, Err(failure)) => Err(Trouble::Failed(failure)),
        (Condition::Asking, returned) => {
            // The answer that comes next on this connection is that of the statement nobody waits for.
            session.into_inner().retire();
            Err(Trouble::Failed(returned.err().unwrap_or_else(given_up)))
        }
    }
}

fn given_up() -> Failure {
    Failure::retry(Cause::Handler, "the function gave up a statement before it was answered")
}

/// The transaction that a function is given.
struct Open<'s> {
    /// Statements follow each other, whatever the function does at once.
    session: tokio::sync::Mutex<&'s mut Session>,
    condition: Mutex<Condition>,
}

enum Condition {
    /// Every statement was answered, and well.
    Sound,
    /// One was sent, and its answer is not here yet.
    Asking,
    /// The first thing that went wrong. The transaction takes nothing more then.
    Broken(Trouble),
}

impl Open<'_> {
    fn condition(&self) -> MutexGuard<'_, Condition> {
        self.condition.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a statement may be sent: only if nothing went wrong before. Until its answer is there, none may follow.
    fn begin(&self) -> bool {
        let mut condition = self.condition();
        let sound = matches!(*condition, Condition::Sound);
        if sound {
            *condition = Condition::Asking;
        }
        sound
    }

    /// Runs a statement, if nothing went wrong before. Returns its rows and how many it changed. Dropped half-way, it leaves the
    /// transaction unusable.
    async fn run(&self, sql: &str, parameters: &[Value]) -> Result<(Vec<Row>, u64), Failure> {
        let mut session = self.session.lock().await;
        if !self.begin() {
            let told = "a statement before this one failed, and the transaction takes no more";
            return Err(Failure::retry(Cause::Handler, told));
        }
        let answer = answered(&mut session, sql, parameters).await;
        let (condition, answer) = match answer {
            Ok(answer) => (Condition::Sound, Ok(answer)),
            Err(trouble) => {
                let told = match &trouble {
                    Trouble::Failed(failure) | Trouble::Deferred(failure) => failure.clone(),
                    Trouble::Ended(_) => ended_transaction(),
                    Trouble::Collision => Failure::retry(Cause::Ours, "another transaction was in the way"),
                    Trouble::Engine(error) => Failure::retry(Cause::Ours, error.message.clone()),
                };
                (Condition::Broken(trouble), Err(told))
            }
        };
        *self.condition() = condition;
        answer
    }
}

/// Checks a statement as those of `sql` handlers are checked, and runs it.
async fn answered(
    session: &mut Session,
    sql: &str,
    parameters: &[Value],
) -> Result<(Vec<Row>, u64), Trouble> {
    if !session.has_room_for(sql, parameters) {
        let told = "a statement is larger than the server's max_allowed_packet lets in";
        return Err(Trouble::Failed(Failure::retry(Cause::Handler, told)));
    }
    let statement = user_sql::checked(session, sql).await?;
    let begun = session.is_in_transaction();
    let answer = session.answer_of(&statement, parameters.to_vec()).await.map_err(user_sql::trouble)?;
    user_sql::still_open(session, begun, 1)?;
    Ok(answer)
}

impl MysqlTransaction for Open<'_> {
    fn execute<'a>(&'a self, sql: &'a str, parameters: &'a [Value]) -> Answer<'a, Result<u64, Failure>> {
        Box::pin(async move { self.run(sql, parameters).await.map(|(_, changed)| changed) })
    }

    fn query<'a>(&'a self, sql: &'a str, parameters: &'a [Value]) -> Answer<'a, Result<Vec<Row>, Failure>> {
        Box::pin(async move { self.run(sql, parameters).await.map(|(rows, _)| rows) })
    }
}
