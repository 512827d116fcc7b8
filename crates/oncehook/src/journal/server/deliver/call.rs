//! Leased deliveries that run inside the journal's database: functions, which are given the open transaction, and the
//! statements of a route that fetched something first. Each call is one transaction with its settlement.
//!
//! Promises: what a call does through its transaction commits together with the record that it happened, or not at all; an
//! attempt that is not the latest commits nothing. A panic, an error, a statement that failed and a function that does not
//! come to its end are failures of the attempt; what another transaction or the server prevented is not.
//!
//! Does not: look into the function. What it does elsewhere (files, requests) may happen again.

use std::time::{Duration, Instant};

use oncehook_verify::UnixMicros;

use super::steps::{Delivers, Ended, Held, SettleTime};
use super::{entity, settle};
use crate::delivery::{Claim, FailedAttempt, Settled, Verdict};
use crate::handler::sql::ended_transaction;
use crate::handler::{Function, SqlHandler};
use crate::journal::server::engine::{Connected, Session};
use crate::journal::server::error::{EngineError, Tries};
use crate::journal::server::pool::Pool;
use crate::journal::server::user_sql::{Surroundings, Trouble};
use crate::route::{KnownLines, Route, Tried};

/// How often a call is repeated after a collision, and for how long.
const TRIES: usize = 5;
const PATIENCE: Duration = Duration::from_secs(2);

/// What every call needs.
pub(super) struct Caller<'c, E: Delivers> {
    pub(super) pool: &'c Pool<E>,
    pub(super) given: Option<i64>,
    /// The time from which the due times of verdicts are counted.
    pub(super) from: UnixMicros,
    pub(super) route: &'c Route,
    /// The rules of routes that look at entities.
    pub(super) known: &'c KnownLines,
    pub(super) effect: Effect<'c>,
    /// How long a function may take, all in all.
    pub(super) time: Duration,
}

/// What a call came to.
pub(super) struct Called {
    pub(super) settled: Settled,
    /// Whether it took effect.
    pub(super) succeeded: bool,
    /// Whether a parked delivery is due now.
    pub(super) woken: bool,
}

/// What is run.
pub(super) enum Effect<'e> {
    Function(&'e dyn Function),
    Statements(&'e SqlHandler),
}

impl<E: Delivers> Caller<'_, E> {
    /// Runs the effect for one leased delivery and settles it.
    pub(super) async fn call(&self, claim: &Claim, chance: f64) -> Result<Called, EngineError> {
        let (started, mut tries, mut anew) = (Instant::now(), 0, false);
        let failure = loop {
            match self.attempt(claim).await {
                Ok((settled, woken)) => {
                    return Ok(Called { settled, succeeded: settled == Settled::Done, woken });
                }
                // What was prepared before its tables changed is not used again, on any connection.
                Err(Trouble::Failed(failure)) if !anew && E::is_outdated(&failure) => {
                    self.pool.forget_idle();
                    anew = true;
                }
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
        Ok(Called { settled, succeeded: false, woken })
    }

    /// One transaction: the effect, then the settlement. What did not commit is rolled back explicitly, or by dropping the
    /// connection.
    async fn attempt(&self, claim: &Claim) -> Result<(Settled, bool), Trouble> {
        let mut session = self.pool.take().await.map_err(Trouble::Engine)?;
        let ran = self.transaction(&mut session, claim).await;
        let sound = match &ran {
            Ok(_) => true,
            Err(Trouble::Failed(_) | Trouble::Deferred(_) | Trouble::Collision) => {
                !session.is_retired() && session.rollback().await.is_ok()
            }
            Err(Trouble::Engine(_) | Trouble::Ended(_)) => false,
        };
        if sound {
            session.keep();
        }
        ran
    }

    async fn transaction(&self, session: &mut E::Session, claim: &Claim) -> Result<(Settled, bool), Trouble> {
        crate::crash::point(if self.route.after.is_some() { "in_follow_up" } else { "in_handler" });
        let (now, result) = match self.effect {
            Effect::Function(function) => E::call(session, self.given, function, &claim.event, self.time).await?,
            Effect::Statements(handler) => {
                let now = session.begin(self.given).await.map_err(Trouble::ours)?;
                (now, run::<E>(session, handler, claim).await?)
            }
        };
        crate::crash::point("after_effect");
        let settled = self.settle(session, now, claim, &Verdict::Succeeded(result)).await;
        // Entities are locked after what the handler has locked, so other transactions may be in the way here, too.
        let settled = settled.map_err(Trouble::ours)?;
        if settled.0 == Settled::Done {
            // A constraint that is checked late is the handler's matter.
            session.commit().await.map_err(E::trouble)?;
        } else {
            // An attempt that is not the latest leaves nothing behind.
            session.rollback().await.map_err(Trouble::Engine)?;
        }
        Ok(settled)
    }

    /// Writes down that an attempt failed, in a transaction without its effect. On another connection: the function's may still
    /// be at work.
    async fn record(&self, claim: &Claim, verdict: &Verdict) -> Result<(Settled, bool), EngineError> {
        let mut tries = Tries::default();
        loop {
            let mut session = self.pool.take().await?;
            let recorded = async {
                let now = session.begin(self.given).await?;
                let settled = self.settle(&mut session, now, claim, verdict).await?;
                session.commit().await?;
                Ok(settled)
            };
            match recorded.await {
                Ok(settled) => {
                    session.keep();
                    return Ok(settled);
                }
                Err(error) => tries.again(error)?,
            }
        }
    }

    async fn settle(
        &self,
        session: &mut E::Session,
        now: i64,
        claim: &Claim,
        verdict: &Verdict,
    ) -> Result<(Settled, bool), EngineError> {
        let ended = [Ended { fence: &claim.fence, verdict, followups: &self.route.followups }];
        let (done, woken) = if self.route.ordering.is_serial() || !E::SETTLES_ALONE {
            entity::settle_with_entities::<E>(session, now, self.from, &ended, self.known).await?
        } else {
            let time = SettleTime { now: Some(now), from: self.from };
            (settle::settle::<E>(session, time, Held::Lease, &ended).await?, false)
        };
        Ok((if done.is_empty() { Settled::Lost } else { Settled::Done }, woken))
    }
}

/// Runs the user's statements in the transaction that is open: once more, if their tables have changed since they were prepared.
async fn run<E: Delivers>(
    session: &mut E::Session,
    handler: &SqlHandler,
    claim: &Claim,
) -> Result<Option<String>, Trouble> {
    let values = handler.values(&claim.event).map_err(Trouble::Failed)?;
    let mut prepared = E::prepare(session, handler, Surroundings::Leased).await?;
    let mut anew = false;
    loop {
        let ran = match E::bind(handler, &prepared, &values) {
            Ok(bound) => {
                let about = Some(&claim.event);
                E::run(session, handler, &prepared, vec![bound], Surroundings::Leased, about).await
            }
            Err(failure) => Err(Trouble::Failed(failure)),
        };
        let renewed = match &ran {
            Err(Trouble::Failed(failure)) if !anew => E::renewed(session, handler, &prepared, failure).await,
            _ => None,
        };
        match renewed {
            Some(renewed) => (prepared, anew) = (renewed, true),
            None => return ran?.into_iter().next().unwrap_or(Ok(None)).map_err(Trouble::Deferred),
        }
    }
}
