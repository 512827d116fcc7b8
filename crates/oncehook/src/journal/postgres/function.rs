//! Functions: Rust code of the user's that is given the open transaction, each call in one of its own with its settlement. The
//! statements of a route that fetched something first run here too: their deliveries are leased as well.
//!
//! Promises: what a function does through its transaction commits together with the record that it happened, or not at all;
//! an attempt that is not the latest commits nothing. A panic, an error, a statement that failed and a function that does
//! not come to its end are failures of the attempt; what another transaction or the server prevented is not.
//!
//! Does not: look into the function. What it does elsewhere (files, requests) may happen again.

use std::sync::{Mutex, PoisonError};

use oncehook_verify::UnixMicros;
use tokio_postgres::Statement;

use super::HANDLER_TIME;
use super::connection::{EngineError, Pool, Session, in_time};
use super::settle::{self, Ended, Held};
use super::user_sql::{self, RELEASE, SAVEPOINT, Settings, Trouble, UNDO};
use crate::delivery::{Cause, Claim, FailedAttempt, Failure, Settled, Verdict};
use crate::handler::elsewhere::Answer;
use crate::handler::function::{PostgresTransaction, Row, ToSql, caught};
use crate::handler::sql::ended_transaction;
use crate::handler::{Function, SqlHandler};
use crate::route::{KnownLines, Route, Tried};

/// How often a call is repeated after a collision.
const TRIES: usize = 5;

const SETTINGS: Settings = Settings {
    theirs: "SET LOCAL plan_cache_mode = auto",
    ours: "SET LOCAL plan_cache_mode = force_custom_plan",
};

/// What every call needs.
pub(super) struct Caller<'c> {
    pub(super) pool: &'c Pool,
    pub(super) given: Option<i64>,
    /// From which the due times of verdicts are counted.
    pub(super) now: UnixMicros,
    pub(super) route: &'c Route,
    /// The rules of routes that look at entities.
    pub(super) lines: &'c KnownLines,
    pub(super) effect: Effect<'c>,
}

/// What is run.
pub(super) enum Effect<'e> {
    Function(&'e dyn Function),
    Statements(&'e SqlHandler),
}

impl Caller<'_> {
    /// Calls the function for one leased delivery and settles it. Returns whether it took effect, too.
    pub(super) async fn call(&self, claim: &Claim, chance: f64) -> Result<(Settled, bool), EngineError> {
        let (mut tries, mut anew) = (0, false);
        let failure = loop {
            match self.attempt(claim).await {
                Ok(settled) => return Ok((settled, settled == Settled::Done)),
                // What was prepared before its tables changed is not used again, on any connection.
                Err(Trouble::Failed(failure)) if !anew && user_sql::is_outdated(&failure) => {
                    self.pool.forget_idle();
                    anew = true;
                }
                Err(Trouble::Failed(failure) | Trouble::Deferred(failure)) => break failure,
                Err(Trouble::Ended(_)) => break ended_transaction(),
                Err(Trouble::Engine(error)) => return Err(error),
                // Another transaction was in the way, and all of it is undone.
                Err(Trouble::Collision) if tries < TRIES => tries += 1,
                Err(Trouble::Collision) => {
                    return Err(EngineError::other("other transactions were in the way"));
                }
            }
        };
        let (attempt, limit) = (claim.fence.attempt, claim.attempt_limit);
        let tried = Tried { attempt, limit, parked_at: claim.parked_at };
        let verdict = self.route.after_failure(failure, tried, self.now, chance);
        // On another connection: the function's may still be at work.
        let session = self.pool.take().await?;
        session.run("BEGIN").await?;
        let settled = self.settle(&session, claim, &verdict).await?;
        session.run("COMMIT").await?;
        session.keep();
        if settled == Settled::Done {
            let failed = FailedAttempt::of(claim.event.id, attempt, limit, &verdict, self.now);
            self.route.report(failed.as_slice());
        }
        Ok((settled, false))
    }

    /// One transaction: the function, then the settlement. The connection is kept only after a commit; every other end
    /// closes it, and undoes what was begun.
    async fn attempt(&self, claim: &Claim) -> Result<Settled, Trouble> {
        let session = self.pool.take().await.map_err(Trouble::Engine)?;
        let begin = match self.effect {
            Effect::Function(_) => format!("BEGIN; {}; {SAVEPOINT}", SETTINGS.theirs),
            Effect::Statements(_) => "BEGIN".to_owned(),
        };
        session.run(&begin).await.map_err(Trouble::Engine)?;
        crate::crash::point(if self.route.after.is_some() { "in_follow_up" } else { "in_handler" });
        let result = match self.effect {
            Effect::Function(function) => called(&session, function, claim).await?,
            Effect::Statements(handler) => ran(&session, handler, claim).await?,
        };
        crate::crash::point("after_effect");
        let verdict = Verdict::Succeeded(result);
        let settled = match self.settle(&session, claim, &verdict).await {
            Ok(settled) => settled,
            // The line is locked behind what the handler has locked, so others may be in the way here, too.
            Err(error) if error.is_collision() => return Err(Trouble::Collision),
            Err(error) => return Err(Trouble::Engine(error)),
        };
        if settled == Settled::Done {
            // A constraint that is checked late is the function's matter.
            session.run("COMMIT").await.map_err(user_sql::trouble)?;
            session.keep();
        }
        Ok(settled)
    }

    /// In the transaction that is open.
    async fn settle(
        &self,
        session: &Session,
        claim: &Claim,
        verdict: &Verdict,
    ) -> Result<Settled, EngineError> {
        let ended = [Ended { fence: &claim.fence, verdict, followups: &self.route.followups }];
        let settled = if self.route.ordering.is_serial() {
            settle::settle_along_the_line(session, self.given, self.now, &ended, self.lines).await?
        } else {
            settle::settle(session, self.given, self.now, Held::Lease, &ended).await?
        };
        Ok(if settled.is_empty() { Settled::Lost } else { Settled::Done })
    }
}

/// Runs the user's statements in the transaction that is open: once more, if their tables have changed since they were prepared.
async fn ran(session: &Session, handler: &SqlHandler, claim: &Claim) -> Result<Option<String>, Trouble> {
    let values = handler.values(&claim.event).map_err(Trouble::Failed)?;
    let mut prepared = user_sql::prepare_for_one(session, handler).await?;
    let mut anew = false;
    loop {
        let ran = match user_sql::bind(handler, &prepared, &values) {
            Ok(bound) => {
                let (bound, about) = ([bound], Some(&claim.event));
                user_sql::run(session, handler, &prepared, &bound, SETTINGS, about).await
            }
            Err(failure) => Err(Trouble::Failed(failure)),
        };
        let renewed = match &ran {
            Err(Trouble::Failed(failure)) if !anew => {
                user_sql::renewed(session, handler, &prepared, failure).await
            }
            _ => None,
        };
        match renewed {
            Some(renewed) => (prepared, anew) = (renewed, true),
            None => return ran?.into_iter().next().unwrap_or(Ok(None)).map_err(Trouble::Deferred),
        }
    }
}

/// Calls the function behind the savepoint that was set.
async fn called(
    session: &Session,
    function: &dyn Function,
    claim: &Claim,
) -> Result<Option<String>, Trouble> {
    let open = Open { session, broken: Mutex::default() };
    let result = returned(function, &open, claim).await?;
    session.run(&format!("{RELEASE}; {}", SETTINGS.ours)).await.map_err(user_sql::at_savepoint)?;
    Ok(result)
}

/// What the function returned in time, unless one of its statements broke.
async fn returned(
    function: &dyn Function,
    open: &Open<'_>,
    claim: &Claim,
) -> Result<Option<String>, Trouble> {
    let calling = caught(|| function.on_postgres(open, &claim.event));
    let returned = match tokio::time::timeout(HANDLER_TIME, calling).await {
        Ok(returned) => returned,
        Err(_) => {
            let told = format!("the handler took longer than {} s", HANDLER_TIME.as_secs());
            Err(Failure::retry(Cause::Handler, told))
        }
    };
    let broken = open.broken.lock().unwrap_or_else(PoisonError::into_inner).take();
    match (broken, returned) {
        (Some(Trouble::Failed(failure)), _) => {
            open.session.run(UNDO).await.map_err(user_sql::at_savepoint)?;
            Err(Trouble::Failed(failure))
        }
        (Some(trouble), _) => Err(trouble),
        (None, Err(failure)) => Err(Trouble::Failed(failure)),
        (None, Ok(result)) => Ok(result.map(|result| result.to_string())),
    }
}

/// The transaction that a function is given.
struct Open<'s> {
    session: &'s Session,
    /// The first thing that went wrong. The transaction takes nothing more then.
    broken: Mutex<Option<Trouble>>,
}

impl Open<'_> {
    async fn prepared(&self, sql: &str) -> Result<Statement, Failure> {
        if let Some(refused) = user_sql::refusal(sql) {
            // Nothing was sent, but what the function meant to do was not done.
            let failure = Failure::retry(Cause::Handler, refused);
            self.note(Trouble::Failed(failure.clone()));
            return Err(failure);
        }
        self.session.prepared(sql).await.map_err(|error| self.broke(error))
    }

    /// Notes what went wrong, and says it to the function.
    fn broke(&self, error: EngineError) -> Failure {
        let told = error.message.clone();
        match user_sql::trouble(error) {
            Trouble::Failed(failure) => {
                self.note(Trouble::Failed(failure.clone()));
                failure
            }
            trouble => {
                self.note(trouble);
                Failure::retry(Cause::Ours, told)
            }
        }
    }

    fn note(&self, trouble: Trouble) {
        let mut broken = self.broken.lock().unwrap_or_else(PoisonError::into_inner);
        broken.get_or_insert(trouble);
    }
}

impl PostgresTransaction for Open<'_> {
    fn execute<'a>(
        &'a self,
        sql: &'a str,
        parameters: &'a [&'a (dyn ToSql + Sync)],
    ) -> Answer<'a, Result<u64, Failure>> {
        Box::pin(async move {
            let statement = self.prepared(sql).await?;
            let changed = in_time(self.session.execute(&statement, parameters)).await;
            changed.map_err(|error| self.broke(error))
        })
    }

    fn query<'a>(
        &'a self,
        sql: &'a str,
        parameters: &'a [&'a (dyn ToSql + Sync)],
    ) -> Answer<'a, Result<Vec<Row>, Failure>> {
        Box::pin(async move {
            let statement = self.prepared(sql).await?;
            let rows = in_time(self.session.query(&statement, parameters)).await;
            rows.map_err(|error| self.broke(error))
        })
    }
}
