//! Attempts of one route, run on one connection: guards, entities, the user's statements, results, commit.
//!
//! Promises: first attempts share a transaction; if one of them spoils it, and for later attempts, each has a
//! transaction of its own. A collision is no attempt. If the statements end the transaction in spite of all checks,
//! the guards of claims that did not run are void.

use std::time::{Duration, Instant};

use super::super::engine::Session;
use super::super::error::{EngineError, EngineResult};
use super::super::user_sql::{self, Surroundings, Trouble};
use super::guard::{self, Guard};
use super::{ExternalDatabase, Guards};
use crate::delivery::{Claim, DeliveryId, Failure, Fence, HandedEvent};
use crate::handler::elsewhere::{Applied, Task};
use crate::handler::entities::{self, Turn};
use crate::handler::sql::ended_transaction;

/// How long to wait for other transactions that are in the way. What is left then is not tried now.
const PATIENCE: Duration = Duration::from_secs(2);

/// Fills in an outcome for each claim. One that is left out collided, or was not reached.
pub(super) async fn apply<E: Guards>(
    database: &ExternalDatabase<E>,
    task: Task<'_>,
    claims: &[Claim],
    outcomes: &mut [Option<Applied>],
) -> EngineResult {
    let mut session = database.ready().await?;
    // Outside of a transaction: an error here must not end one. The guards are asked even if the statements cannot be
    // prepared.
    let prepared = E::prepare(&mut session, task.statements, Surroundings::External).await;
    let prepared = user_sql::prepared(prepared)?;
    session.commit_single().await?;
    let mut batch = Batch::<E> { session: &mut session, task, prepared };
    let attempts = claims.iter().zip(outcomes.iter_mut());
    let (mut first, mut later): (Vec<_>, Vec<_>) = attempts.partition(|(claim, _)| claim.fence.attempt == 1);
    if !batch.together(&mut first).await? {
        first.append(&mut later);
        later = first;
    }
    let mut waited = Duration::ZERO;
    for (claim, outcome) in later {
        // What is in the way of these claims may be in the way of all others too.
        if waited >= PATIENCE {
            break;
        }
        let started = Instant::now();
        let applied = batch.alone(claim).await?;
        if applied == Applied::Collided {
            waited += started.elapsed();
        }
        *outcome = Some(applied);
    }
    session.keep();
    Ok(())
}

struct Batch<'b, E: Guards> {
    session: &'b mut E::Session,
    task: Task<'b>,
    /// The user's statements, or why they cannot even be prepared.
    prepared: Result<E::Prepared, Failure>,
}

impl<E: Guards> Batch<'_, E> {
    /// All in one transaction. `false`: it is undone, and nothing is known of any of them.
    async fn together(&mut self, attempts: &mut [(&Claim, &mut Option<Applied>)]) -> EngineResult<bool> {
        if attempts.len() < 2 || self.prepared.is_err() {
            return Ok(false);
        }
        let claims: Vec<&Claim> = attempts.iter().map(|(claim, _)| *claim).collect();
        let applied = match self.transaction(&claims).await {
            Ok(applied) => applied,
            Err(Trouble::Ended(_)) => vec![have_ended(); claims.len()],
            Err(Trouble::Engine(error)) => return Err(error),
            Err(Trouble::Failed(_) | Trouble::Deferred(_) | Trouble::Collision) => {
                self.session.rollback().await?;
                return Ok(false);
            }
        };
        for ((_, outcome), applied) in attempts.iter_mut().zip(applied) {
            **outcome = Some(applied);
        }
        Ok(true)
    }

    /// One in a transaction of its own, again after a collision, and once more if its tables have changed since the
    /// statements were prepared.
    async fn alone(&mut self, claim: &Claim) -> EngineResult<Applied> {
        let started = Instant::now();
        let mut is_renewed = false;
        loop {
            let failure = match self.transaction(&[claim]).await {
                Ok(applied) => return Ok(applied.into_iter().next().unwrap_or(Applied::Collided)),
                Err(Trouble::Engine(error)) => return Err(error),
                Err(Trouble::Ended(_)) => return Ok(have_ended()),
                Err(Trouble::Collision) => {
                    self.session.rollback().await?;
                    if started.elapsed() >= PATIENCE {
                        return Ok(Applied::Collided);
                    }
                    continue;
                }
                Err(Trouble::Deferred(failure)) => {
                    self.session.rollback().await?;
                    return Ok(Applied::Failed(failure.answered()));
                }
                Err(Trouble::Failed(failure)) => failure,
            };
            let renewed = match &self.prepared {
                Ok(prepared) if !is_renewed => E::renewed(self.session, self.task.statements, prepared, &failure).await,
                _ => None,
            };
            self.session.rollback().await?;
            let Some(renewed) = renewed else { return Ok(Applied::Failed(failure.answered())) };
            (self.prepared, is_renewed) = (Ok(renewed), true);
        }
    }

    /// Guards, entities, statements, results, commit. After an error the caller rolls back, except after
    /// [`Trouble::Ended`].
    async fn transaction(&mut self, claims: &[&Claim]) -> Result<Vec<Applied>, Trouble> {
        let Task { statements, journal, comparison } = self.task;
        guard::begin::<E>(self.session).await.map_err(Trouble::Engine)?;
        let fences: Vec<&Fence> = claims.iter().map(|claim| &claim.fence).collect();
        let standing = guard::write::<E>(self.session, journal, false, &fences).await;
        let standing = standing.map_err(guard_trouble)?.into_iter();
        let mut outcomes: Vec<Option<Applied>> = standing.map(|guard| guard.map(known)).collect();
        let mut states = match comparison {
            Some(comparison) => {
                let taken = claims.iter().zip(&outcomes).filter(|(_, outcome)| outcome.is_none());
                let names = entities::names(taken.map(|(claim, _)| &claim.event));
                let states = guard::lock_entities::<E>(self.session, journal, comparison, &names).await;
                Some((comparison, states.map_err(guard_trouble)?))
            }
            None => None,
        };
        let (mut bound, mut run, mut passed) = (Vec::with_capacity(claims.len()), Vec::new(), Vec::new());
        for (claim, outcome) in claims.iter().zip(&mut outcomes).filter(|(_, outcome)| outcome.is_none()) {
            let turn = states.as_mut().map_or(Turn::Run(None), |(_, states)| states.judge(&claim.event));
            let state = match turn {
                Turn::Run(state) => state,
                Turn::Pass(applied) => {
                    passed.push(&claim.fence.delivery);
                    *outcome = Some(applied);
                    continue;
                }
            };
            let event = HandedEvent { state, ..claim.event.clone() };
            let values = statements.values(&event).map_err(Trouble::Failed)?;
            let prepared = self.prepared.as_ref().map_err(|failure| Trouble::Failed(failure.clone()))?;
            bound.push(E::bind(statements, prepared, &values).map_err(Trouble::Failed)?);
            run.push(&claim.fence.delivery);
        }
        // Claims that do not run leave void guards: no earlier attempt may run at a time when it would fit.
        self.give_up(passed).await.map_err(guard_trouble)?;
        crate::crash::point("guard_taken");
        let about = claims.first().filter(|_| claims.len() == 1).map(|claim| &claim.event);
        let ran = self.run(bound, &run, about).await?;
        let mut results: Vec<(&DeliveryId, String)> = Vec::new();
        let waiting = outcomes.iter_mut().filter(|outcome| outcome.is_none());
        for ((delivery, outcome), result) in run.into_iter().zip(waiting).zip(ran) {
            results.extend(result.clone().map(|result| (delivery, result)));
            *outcome = Some(Applied::Done(result));
        }
        let outcomes: Option<Vec<Applied>> = outcomes.into_iter().collect();
        let unanswered = || Trouble::Engine(EngineError::other("a statement was not answered"));
        let outcomes = outcomes.ok_or_else(unanswered)?;
        crate::crash::point("after_effect");
        guard::keep_results::<E>(self.session, &results).await.map_err(guard_trouble)?;
        if let Some((comparison, states)) = &states {
            let kept = guard::keep_entities::<E>(self.session, journal, comparison, states).await;
            kept.map_err(guard_trouble)?;
        }
        // A commit that was not answered is not known to have failed.
        self.session.commit().await.map_err(E::commit_trouble)?;
        crate::crash::point("between_commits");
        Ok(outcomes)
    }

    /// Runs the user's statements. One delivery that has to wait stops all, and its guard is undone.
    async fn run(
        &mut self,
        bound: Vec<E::Bound>,
        run: &[&DeliveryId],
        about: Option<&HandedEvent>,
    ) -> Result<Vec<Option<String>>, Trouble> {
        let Some(prepared) = self.prepared.as_ref().ok().filter(|_| !bound.is_empty()) else {
            return Ok(Vec::new());
        };
        let (statements, external) = (self.task.statements, Surroundings::External);
        match E::run(self.session, statements, prepared, bound, external, about).await {
            Ok(ran) => ran.into_iter().map(|ran| ran.map_err(Trouble::Deferred)).collect(),
            Err(Trouble::Ended(ran)) => {
                // The guards are committed, also those of claims that did not run any more. These take no effect.
                self.session.rollback().await.map_err(Trouble::Engine)?;
                let left = run.iter().skip(ran).copied().collect();
                self.give_up(left).await.map_err(guard_trouble)?;
                self.session.commit_single().await.map_err(Trouble::Engine)?;
                Err(Trouble::Ended(ran))
            }
            Err(trouble) => Err(trouble),
        }
    }

    async fn give_up(&mut self, deliveries: Vec<&DeliveryId>) -> EngineResult {
        guard::change_all::<E>(self.session, E::GUARD.give_up, deliveries).await
    }
}

/// What a guard says of an attempt that did not write it.
fn known(guard: Guard) -> Applied {
    if guard.void { Applied::Void } else { Applied::Done(guard.result) }
}

/// The statements have ended the transaction, and the guards are committed with what they did, or undone with it.
/// Before the delivery is given up, its guard is asked which of the two it was.
fn have_ended() -> Applied {
    let failure = ended_transaction();
    tracing::error!(error = failure.message.as_str(), "a handler's statements are not as they should be");
    Applied::Failed(failure.answered())
}

/// What happens to a guard is not the statements' fault.
fn guard_trouble(error: EngineError) -> Trouble {
    if error.is_collision() || error.is_too_slow() { Trouble::Collision } else { Trouble::Engine(error) }
}
