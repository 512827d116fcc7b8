//! Attempts of a leased route: what is done with the deliveries that its lane has leased. Over HTTP one at a time; in an
//! external database many at once, because they share its commit; in the journal (functions, and statements that need what
//! was fetched) one after the other, so that accepting goes on in between.
//!
//! Promises: a delivery to an external database is declared dead only after its guard there is void, so that no attempt that
//! was forgotten can take effect afterwards. As long as that cannot be written, it is not dead: it waits.
//!
//! Where the route fetches the current state of an entity, that comes first, one delivery at a time; what then runs inside the
//! journal is settled there, in the transaction of its effect.
//!
//! Does not: settle anything else. It says what each attempt came to.

use std::sync::Arc;

use tokio::task::JoinError;

use super::Shared;
use crate::delivery::{Cause, Claim, Failure, Fence, Remedy, Settled};
use crate::handler::elsewhere::{Applied, Comparison, Task, Voided};
use crate::handler::{Elsewhere, Handler};
use crate::route::Route;

/// Deliveries that share a transaction in an external database.
const EXTERNAL_BATCH: usize = 64;

/// Transactions of one route that are under way at once there: while one commits, the next one runs.
const EXTERNAL_BATCHES: usize = 2;

/// Calls of a function that are leased together.
const FUNCTION_BATCH: usize = 16;

/// What the log says of a database that cannot be reached.
pub(super) const UNREACHED: &str = "the database cannot be reached";

/// What an attempt came to.
pub(super) enum Outcome {
    /// It took effect, with this result.
    Took(Option<String>),
    /// It failed.
    Failed(Failure),
    /// It did not run, and will not: it came too late.
    Superseded(String),
    /// It ran inside the journal, which has settled it, or found that it was not the latest attempt any more.
    Settled(Settled),
    /// It is given back, and not held against the delivery.
    Back {
        /// Whether that is because the destination could not be reached.
        down: bool,
    },
}

/// How a leased route makes its attempts.
pub(super) struct Attempts {
    pub(super) shared: Arc<Shared>,
    pub(super) route: Arc<Route>,
    /// The mark of the journal, which its guards in an external database carry.
    pub(super) mark: i64,
    /// What decides there whether statements run.
    pub(super) comparison: Option<Comparison>,
}

/// An attempt beyond the limit exists because the last one was lost. It only asks the guard what came of that.
fn is_beyond(claim: &Claim) -> bool {
    claim.fence.attempt > claim.attempt_limit
}

impl Attempts {
    /// How many deliveries go together, and how many such batches may be under way.
    pub(super) fn limits(&self) -> (usize, usize) {
        match (&self.route.handler, &self.route.fetch) {
            (Handler::Elsewhere(_), None) => (EXTERNAL_BATCH, self.route.concurrency.min(EXTERNAL_BATCHES)),
            (Handler::Function(_), None) => (FUNCTION_BATCH, 1),
            _ => (1, self.route.concurrency),
        }
    }

    /// What an attempt came to that panicked. In an external database it is not the end: the guard has not been asked.
    pub(super) fn panicked(&self, claim: &Claim, panic: &JoinError) -> Outcome {
        match self.route.handler {
            Handler::Elsewhere(_) if claim.fence.attempt >= claim.attempt_limit => Outcome::Back { down: true },
            _ => {
                let failure = Failure::retry(Cause::Ours, format!("the attempt panicked: {panic}"));
                Outcome::Failed(failure.in_log("the attempt panicked"))
            }
        }
    }

    /// Runs a batch. One outcome per claim, in order.
    pub(super) async fn run(&self, mut claims: Vec<Claim>) -> Vec<Outcome> {
        if let Some(fetch) = &self.route.fetch {
            for claim in claims.iter_mut().filter(|claim| !is_beyond(claim)) {
                match fetch.get(&claim.event).await {
                    Ok(current) => claim.event.current = Some(current),
                    // A route that fetches has batches of one delivery.
                    Err(failure) => {
                        let failed = claims.iter().map(|_| Outcome::Failed(failure.clone())).collect();
                        return self.void_dead(&claims, failed).await;
                    }
                }
            }
        }
        match &self.route.handler {
            Handler::Http(handler) => {
                let mut outcomes = Vec::with_capacity(claims.len());
                for claim in &claims {
                    let delivered = handler.deliver(claim, self.shared.clock.now()).await;
                    outcomes.push(delivered.map_or_else(Outcome::Failed, Outcome::Took));
                }
                outcomes
            }
            Handler::Elsewhere(external) => {
                let outcomes = self.run_external(external, &claims).await;
                self.void_dead(&claims, outcomes).await
            }
            Handler::Sql(_) | Handler::Function(_) => self.run_inside(claims).await,
        }
    }

    async fn run_inside(&self, claims: Vec<Claim>) -> Vec<Outcome> {
        let count = claims.len();
        let mut outcomes = Vec::with_capacity(count);
        for claim in claims {
            match self.shared.deliveries.call(Arc::clone(&self.route), vec![claim]).await {
                Ok(settled) => outcomes.extend(settled.into_iter().map(Outcome::Settled)),
                // The journal refused, and nothing was done. It is left alone for a moment before the next claim.
                Err(error) => {
                    tracing::debug!(route = self.route.name.as_str(), %error, "the journal refused work");
                    tokio::time::sleep(self.shared.after_trouble()).await;
                    outcomes.resize_with(count, || Outcome::Back { down: false });
                    break;
                }
            }
        }
        outcomes
    }

    async fn run_external(&self, external: &Elsewhere, claims: &[Claim]) -> Vec<Outcome> {
        let within: Vec<Claim> = claims.iter().filter(|claim| !is_beyond(claim)).cloned().collect();
        let task = Task { statements: &external.statements, journal: self.mark, comparison: self.comparison.as_ref() };
        let mut applied = match within.is_empty() {
            true => Vec::new(),
            false => external.database.apply(task, &within).await,
        }
        .into_iter();
        let mut first_of_outage = true;
        let outcome = |claim: &Claim| {
            if is_beyond(claim) {
                return Outcome::Failed(Failure::never_ended());
            }
            match applied.next().unwrap_or(Applied::Collided) {
                Applied::Done(result) => Outcome::Took(result),
                Applied::Failed(failure) => Outcome::Failed(failure),
                Applied::Superseded(reason) => Outcome::Superseded(reason),
                Applied::Void => {
                    let given_up = "the delivery was given up by a later attempt while this one ran";
                    Outcome::Failed(Failure::retry(Cause::Ours, given_up))
                }
                Applied::Collided => Outcome::Back { down: false },
                // One of them shows what is wrong, and waits. The others are due as before, and none is ever dead of it.
                Applied::Unreached(reason)
                    if std::mem::take(&mut first_of_outage) && claim.fence.attempt < claim.attempt_limit =>
                {
                    Outcome::Failed(Failure::retry(Cause::Destination, reason).in_log(UNREACHED))
                }
                Applied::Unreached(_) => Outcome::Back { down: true },
            }
        };
        claims.iter().map(outcome).collect()
    }

    /// In an external database, what would be dead is made void first. If that cannot be written it is given back; if it took
    /// effect, it is not dead. What has to wait counts as such: it may have waited long enough.
    async fn void_dead(&self, claims: &[Claim], mut outcomes: Vec<Outcome>) -> Vec<Outcome> {
        let Handler::Elsewhere(external) = &self.route.handler else { return outcomes };
        let is_last = |claim: &Claim, outcome: &Outcome| match outcome {
            Outcome::Failed(Failure { remedy: Remedy::Retry(_), .. }) => claim.fence.attempt >= claim.attempt_limit,
            Outcome::Failed(_) => true,
            _ => false,
        };
        let (fences, dying): (Vec<Fence>, Vec<&mut Outcome>) = claims
            .iter()
            .zip(&mut outcomes)
            .filter(|(claim, outcome)| is_last(claim, outcome))
            .map(|(claim, outcome)| (claim.fence.clone(), outcome))
            .unzip();
        if fences.is_empty() {
            return outcomes;
        }
        let voided = external.database.void(self.mark, &fences).await;
        crate::crash::point("after_void");
        let voided = voided.unwrap_or_else(|reason| {
            tracing::warn!(reason, "deliveries cannot be given up while their database cannot be reached");
            Vec::new()
        });
        let mut voided = voided.into_iter();
        for outcome in dying {
            match voided.next() {
                Some(Voided::Done) => {}
                Some(Voided::TookEffect(result)) => *outcome = Outcome::Took(result),
                None => *outcome = Outcome::Back { down: true },
            }
        }
        outcomes
    }
}
