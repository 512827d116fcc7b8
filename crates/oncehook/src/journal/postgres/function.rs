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
use super::user_sql::{self, Trouble};
use crate::delivery::{Cause, Claim, Failure, Settled, Verdict};
use crate::handler::elsewhere::Answer;
use crate::handler::function::{PostgresTransaction, Row, ToSql, caught};
use crate::handler::{Function, SqlHandler};
use crate::route::{KnownLines, Route, Tried};

/// How often a call is repeated after a collision.
const TRIES: usize = 5;

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
        let mut tries = 0;
        let failure = loop {
            match self.attempt(claim).await {
                Ok(settled) => return Ok((settled, settled == Settled::Done)),
                Err(Trouble::Failed(failure) | Trouble::Deferred(failure)) => break failure,
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
        if let Verdict::Dead(failure) = &verdict {
            let (event, route) = (claim.fence.delivery.event, self.route.name.as_str());
            tracing::error!(%event, route, error = failure.message.as_str(), "a delivery is dead");
        }
        // On another connection: the function's may still be at work.
        let session = self.pool.take().await?;
        session.run("BEGIN").await?;
        let settled = self.settle(&session, claim, &verdict).await?;
        session.run("COMMIT").await?;
        session.keep();
        Ok((settled, false))
    }

    /// One transaction: the function, then the settlement. The connection is kept only after a commit; every other end
    /// closes it, and undoes what was begun.
    async fn attempt(&self, claim: &Claim) -> Result<Settled, Trouble> {
        let session = self.pool.take().await.map_err(Trouble::Engine)?;
        session.run("BEGIN; SET LOCAL plan_cache_mode = auto").await.map_err(Trouble::Engine)?;
        let open = Open { session: &session, broken: Mutex::default() };
        crate::crash::point(if self.route.after.is_some() { "in_follow_up" } else { "in_handler" });
        let result = match self.effect {
            Effect::Function(function) => returned(function, &open, claim).await?,
            Effect::Statements(handler) => ran(&session, handler, claim).await?,
        };
        crate::crash::point("after_effect");
        session.run("SET LOCAL plan_cache_mode = force_custom_plan").await.map_err(Trouble::Engine)?;
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

/// Runs the user's statements in the transaction that is open.
async fn ran(session: &Session, handler: &SqlHandler, claim: &Claim) -> Result<Option<String>, Trouble> {
    let prepared = user_sql::prepare_for_one(session, handler).await?;
    let values = handler.values(&claim.event).map_err(Trouble::Failed)?;
    let bound = user_sql::bind(handler, &prepared, &values).map_err(Trouble::Failed)?;
    let ran = user_sql::run(session, handler, &prepared, std::slice::from_ref(&bound)).await;
    let unanswered = || Err(Trouble::Engine(EngineError::other("a statement was not answered")));
    ran.into_iter().next().unwrap_or_else(unanswered)
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
        let told = error.told.clone();
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
