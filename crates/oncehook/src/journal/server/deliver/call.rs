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

use super::batch::crash_point;
use super::entity::settle_with_entities;
use super::settle::settle;
use super::steps::Delivers;
use crate::delivery::{Claim, FailedAttempt, Settled, Settlement, Verdict};
use crate::handler::sql::ended_transaction;
use crate::handler::{Function, SqlHandler};
use crate::journal::WorkError;
use crate::journal::decide::outcome::Held;
use crate::journal::server::ServerJournal;
use crate::journal::server::engine::{Connected, Session};
use crate::journal::server::error::{EngineError, EngineResult};
use crate::journal::server::user_sql::{Surroundings, Trouble, run_one};
use crate::journal::server::work::{unavailable, work};
use crate::route::{Route, Tried};

/// How often a call is repeated after a collision, and for how long.
const TRIES: usize = 5;
const PATIENCE: Duration = Duration::from_secs(2);

/// What every call needs.
pub(in crate::journal::server) struct Caller<'c, E: Delivers> {
    pub(in crate::journal::server) journal: &'c ServerJournal<E>,
    /// The time from which the due times of verdicts are counted.
    pub(in crate::journal::server) from: UnixMicros,
    pub(in crate::journal::server) route: &'c Route,
    pub(in crate::journal::server) effect: Effect<'c>,
}

/// What a call came to.
pub(in crate::journal::server) struct Called {
    pub(in crate::journal::server) settled: Settled,
    /// Whether it took effect.
    pub(in crate::journal::server) succeeded: bool,
    /// Whether a parked delivery is due now.
    pub(in crate::journal::server) woken: bool,
}

/// What is run.
pub(in crate::journal::server) enum Effect<'e> {
    Function(&'e dyn Function),
    Statements(&'e SqlHandler),
}

impl<E: Delivers> Caller<'_, E> {
    /// Runs the effect for one leased delivery and settles it.
    pub(in crate::journal::server) async fn call(&self, claim: &Claim, chance: f64) -> Result<Called, WorkError> {
        let (started, mut tries, mut anew) = (Instant::now(), 0, false);
        let failure = loop {
            match self.attempt(claim).await {
                Ok((settled, woken)) => return Ok(Called { settled, succeeded: settled == Settled::Done, woken }),
                // What was prepared before its tables changed is not used again, on any connection.
                Err(Trouble::Failed(failure)) if !anew && E::is_outdated(&failure) => {
                    self.journal.workers.forget_idle();
                    anew = true;
                }
                Err(Trouble::Failed(failure) | Trouble::Deferred(failure)) => break failure,
                Err(Trouble::Ended(_)) => break ended_transaction(),
                Err(Trouble::Engine(error)) => return Err(unavailable(error)),
                // Another transaction was in the way, and all of it is undone.
                Err(Trouble::Collision) if tries < TRIES && started.elapsed() < PATIENCE => tries += 1,
                Err(Trouble::Collision) => {
                    return Err(unavailable(EngineError::other("other transactions were in the way")));
                }
            }
        };
        let (attempt, limit) = (claim.fence.attempt, claim.attempt_limit);
        let tried = Tried { attempt, limit, parked_at: claim.parked_at };
        let verdict = self.route.after_failure(failure, tried, self.from, chance);
        let failed = FailedAttempt::of(claim.event.id, attempt, limit, &verdict, self.from);
        // On another connection: the function's may still be at work.
        let ended = self.settlement(claim, verdict);
        let (settled, woken) = work!(self.journal, |session| self.record(&mut session, &ended))?;
        if settled == Settled::Done {
            self.route.report(failed.as_slice());
        }
        Ok(Called { settled, succeeded: false, woken })
    }

    fn given(&self) -> Option<i64> {
        self.journal.shared.given_time()
    }

    /// One transaction: the effect, then the settlement. What did not commit is rolled back explicitly, or by dropping the
    /// connection.
    async fn attempt(&self, claim: &Claim) -> Result<(Settled, bool), Trouble> {
        let mut session = self.journal.workers.take().await.map_err(Trouble::Engine)?;
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
        crash_point(self.route);
        let (now, result) = match self.effect {
            Effect::Function(function) => {
                E::call(session, self.given(), function, &claim.event, self.journal.function_time).await?
            }
            Effect::Statements(handler) => {
                let now = session.begin(self.given()).await.map_err(Trouble::ours)?;
                let mut prepared = E::prepare(session, handler, Surroundings::Leased).await?;
                let ran = run_one::<E>(session, handler, &mut prepared, &claim.event, Surroundings::Leased).await?;
                (now, ran.map_err(Trouble::Deferred)?)
            }
        };
        crate::crash::point("after_effect");
        let ended = self.settlement(claim, Verdict::Succeeded(result));
        // Entities are locked after what the handler has locked, so other transactions may be in the way here, too.
        let settled = self.settle(session, now, &ended).await.map_err(Trouble::ours)?;
        if settled.0 == Settled::Done {
            // A constraint that is checked late is the handler's matter.
            session.commit().await.map_err(E::trouble)?;
        } else {
            // An attempt that is not the latest leaves nothing behind.
            session.rollback().await.map_err(Trouble::Engine)?;
        }
        Ok(settled)
    }

    /// Writes down that an attempt failed, in a transaction without its effect.
    async fn record(&self, session: &mut E::Session, ended: &[Settlement; 1]) -> EngineResult<(Settled, bool)> {
        let now = session.begin(self.given()).await?;
        let settled = self.settle(session, now, ended).await?;
        session.commit().await?;
        Ok(settled)
    }

    fn settlement(&self, claim: &Claim, verdict: Verdict) -> [Settlement; 1] {
        [Settlement { fence: claim.fence.clone(), verdict, followups: self.route.followups.clone() }]
    }

    async fn settle(
        &self,
        session: &mut E::Session,
        now: i64,
        ended: &[Settlement; 1],
    ) -> EngineResult<(Settled, bool)> {
        let (done, woken) = if self.route.ordering.is_serial() || !E::SETTLES_ALONE {
            settle_with_entities::<E>(session, now, self.from, ended, &self.journal.lines).await?
        } else {
            (settle::<E>(session, Some(now), self.from, Held::Lease, ended).await?, false)
        };
        Ok((if done.is_empty() { Settled::Lost } else { Settled::Done }, woken))
    }
}
