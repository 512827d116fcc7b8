//! Errands: what a lane that leaves the process does with the deliveries it has leased. Over HTTP one at a time; to another
//! database many at once, because they share its commit.
//!
//! Promises: a delivery to another database is declared dead only after its guard there is void, so that no attempt that
//! was forgotten can take effect afterwards. As long as that cannot be written, it is not dead: it waits.
//!
//! Does not: settle. It says what each attempt came to.

use std::sync::Arc;

use crate::clock::Clock;
use crate::delivery::{Cause, Claim, Failure, Fence, Remedy};
use crate::handler::elsewhere::{Applied, Voided};
use crate::handler::{Elsewhere, HttpHandler};

/// Deliveries that share a transaction in another database.
const BATCH: usize = 64;

/// Transactions of one route that are under way at once there: while one commits, the next one runs.
const BATCHES_AT_ONCE: usize = 2;

/// What an attempt came to.
pub(super) enum Came {
    /// It took effect, with this result.
    Took(Option<String>),
    /// It failed.
    Failed(Failure),
    /// It is given back, and not held against the delivery.
    Back {
        /// Whether that is because the destination could not be reached.
        down: bool,
    },
}

/// What a lane runs.
#[derive(Clone)]
pub(super) enum Errand {
    /// A request.
    Http(Arc<HttpHandler>),
    /// Statements in another database, for a journal of that mark.
    Elsewhere(Arc<Elsewhere>, i64),
}

impl Errand {
    /// How many deliveries go together.
    pub(super) fn batch(&self) -> usize {
        match self {
            Self::Http(_) => 1,
            Self::Elsewhere(..) => BATCH,
        }
    }

    /// How many batches may be under way, if the route says so many.
    pub(super) fn at_once(&self, concurrency: usize) -> usize {
        match self {
            Self::Http(_) => concurrency,
            Self::Elsewhere(..) => concurrency.min(BATCHES_AT_ONCE),
        }
    }

    /// What an attempt came to that panicked. Nobody has asked the guard, so in another database it is not the end.
    pub(super) fn panicked(&self, claim: &Claim, told: &str) -> Came {
        match self {
            Self::Elsewhere(..) if claim.fence.attempt >= claim.attempt_limit => Came::Back { down: true },
            Self::Http(_) | Self::Elsewhere(..) => Came::Failed(Failure::retry(Cause::Ours, told)),
        }
    }

    /// Runs a batch. One outcome per claim, in order.
    pub(super) async fn run(&self, claims: &[Claim], clock: &Clock) -> Vec<Came> {
        match self {
            Self::Http(handler) => {
                let mut came = Vec::with_capacity(claims.len());
                for claim in claims {
                    came.push(match handler.deliver(claim, clock.now()).await {
                        Ok(result) => Came::Took(result),
                        Err(failure) => Came::Failed(failure),
                    });
                }
                came
            }
            Self::Elsewhere(elsewhere, mark) => run_elsewhere(elsewhere, *mark, claims).await,
        }
    }
}

async fn run_elsewhere(elsewhere: &Elsewhere, mark: i64, claims: &[Claim]) -> Vec<Came> {
    // An attempt beyond the limit exists because the last one was lost. It only asks what came of that.
    let beyond = |claim: &Claim| claim.fence.attempt > claim.attempt_limit;
    let within: Vec<Claim> = claims.iter().filter(|claim| !beyond(claim)).cloned().collect();
    let applied = match within.is_empty() {
        true => Vec::new(),
        false => elsewhere.database.apply(&elsewhere.statements, mark, &within).await,
    };
    let mut applied = applied.into_iter();
    let mut first_of_outage = true;
    let mut came: Vec<Came> = Vec::with_capacity(claims.len());
    for claim in claims {
        if beyond(claim) {
            came.push(Came::Failed(Failure::never_ended()));
            continue;
        }
        came.push(match applied.next().unwrap_or(Applied::Collided) {
            Applied::Done(result) => Came::Took(result),
            Applied::Failed(failure) => Came::Failed(failure),
            Applied::Void => {
                let told = "the delivery was given up by a later attempt while this one ran";
                Came::Failed(Failure::retry(Cause::Ours, told))
            }
            Applied::Collided => Came::Back { down: false },
            // One of them shows what is wrong, and waits. The others are due as before, and none is ever dead of it.
            Applied::Unreached(reason) => {
                let shows = std::mem::take(&mut first_of_outage) && claim.fence.attempt < claim.attempt_limit;
                if shows {
                    Came::Failed(Failure::retry(Cause::Destination, reason))
                } else {
                    Came::Back { down: true }
                }
            }
        });
    }
    void_the_dead(elsewhere, mark, claims, &mut came).await;
    came
}

/// What would be dead is made void first. If that cannot be written it is given back; if it took effect, it is not dead.
async fn void_the_dead(elsewhere: &Elsewhere, mark: i64, claims: &[Claim], came: &mut [Came]) {
    let last = |claim: &Claim, failure: &Failure| {
        failure.remedy == Remedy::GiveUp || claim.fence.attempt >= claim.attempt_limit
    };
    let dying: Vec<(usize, Fence)> = claims
        .iter()
        .zip(&*came)
        .enumerate()
        .filter_map(|(place, (claim, came))| match came {
            Came::Failed(failure) if last(claim, failure) => Some((place, claim.fence.clone())),
            _ => None,
        })
        .collect();
    if dying.is_empty() {
        return;
    }
    let fences: Vec<Fence> = dying.iter().map(|(_, fence)| fence.clone()).collect();
    let voided = elsewhere.database.void(mark, &fences).await;
    crate::crash::point("after_void");
    let voided = voided.unwrap_or_else(|reason| {
        tracing::warn!(reason, "deliveries cannot be given up while their database cannot be reached");
        Vec::new()
    });
    let mut voided = voided.into_iter();
    for (place, _) in dying {
        let Some(came) = came.get_mut(place) else { continue };
        match voided.next() {
            Some(Voided::Done) => {}
            Some(Voided::TookEffect(result)) => *came = Came::Took(result),
            None => *came = Came::Back { down: true },
        }
    }
}
