//! Errands: what a lane that leaves the process does with the deliveries it has leased. Over HTTP one at a time; to another
//! database many at once, because they share its commit.
//!
//! Promises: a delivery to another database is declared dead only after its guard there is void, so that no attempt that
//! was forgotten can take effect afterwards. As long as that cannot be written, it is not dead: it waits.
//!
//! Where the route fetches the current state of an entity, that comes first, one delivery at a time; what then runs inside the
//! journal is settled there, in the transaction of its effect.
//!
//! Does not: settle anything else. It says what each attempt came to.

use std::sync::Arc;

use crate::clock::Clock;
use crate::delivery::{Cause, Claim, Failure, Fence, Remedy, Settled};
use crate::handler::elsewhere::{Applied, Comparison, Task, Voided};
use crate::handler::{Elsewhere, Fetch, HttpHandler};
use crate::journal::Deliveries;
use crate::route::Route;

/// Deliveries that share a transaction in another database.
const BATCH: usize = 64;

/// What the log says of a database that cannot be reached.
pub(super) const UNREACHED: &str = "the database cannot be reached";

/// Transactions of one route that are under way at once there: while one commits, the next one runs.
const BATCHES_AT_ONCE: usize = 2;

/// What an attempt came to.
pub(super) enum Came {
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

/// What a lane runs.
#[derive(Clone)]
pub(super) struct Errand {
    /// What the provider is asked first.
    fetch: Option<Arc<Fetch>>,
    what: What,
}

/// What is done with a delivery.
#[derive(Clone)]
pub(super) enum What {
    /// A request.
    Http(Arc<HttpHandler>),
    /// Statements in another database.
    Elsewhere(Arc<Away>),
    /// What runs inside the journal, in the transaction that settles it.
    Inside(Arc<dyn Deliveries>, Arc<Route>),
}

/// A route's statements in another database.
pub(super) struct Away {
    pub(super) elsewhere: Arc<Elsewhere>,
    /// The mark of the journal.
    pub(super) mark: i64,
    /// What decides whether they run.
    pub(super) comparison: Option<Comparison>,
}

impl Away {
    async fn apply(&self, claims: &[Claim]) -> Vec<Applied> {
        let Self { elsewhere, mark, comparison } = self;
        let task = Task { statements: &elsewhere.statements, journal: *mark, comparison: comparison.as_ref() };
        elsewhere.database.apply(task, claims).await
    }
}

impl Errand {
    /// For a route, behind what it fetches.
    pub(super) fn new(route: &Route, what: What) -> Self {
        Self { fetch: route.fetch.clone(), what }
    }

    /// How many deliveries go together.
    pub(super) fn batch(&self) -> usize {
        match self.what {
            What::Elsewhere(..) if self.fetch.is_none() => BATCH,
            What::Http(_) | What::Elsewhere(..) | What::Inside(..) => 1,
        }
    }

    /// How many batches may be under way, if the route says so many.
    pub(super) fn at_once(&self, concurrency: usize) -> usize {
        match self.what {
            What::Elsewhere(..) if self.fetch.is_none() => concurrency.min(BATCHES_AT_ONCE),
            What::Http(_) | What::Elsewhere(..) | What::Inside(..) => concurrency,
        }
    }

    /// What an attempt came to that panicked. Nobody has asked the guard, so in another database it is not the end.
    pub(super) fn panicked(&self, claim: &Claim, told: &str) -> Came {
        match self.what {
            What::Elsewhere(..) if claim.fence.attempt >= claim.attempt_limit => Came::Back { down: true },
            What::Http(_) | What::Elsewhere(..) | What::Inside(..) => {
                Came::Failed(Failure::retry(Cause::Ours, told.to_owned()).in_log("the attempt panicked"))
            }
        }
    }

    /// Runs a batch. One outcome per claim, in order.
    pub(super) async fn run(&self, claims: &[Claim], clock: &Clock) -> Vec<Came> {
        let Some(fetch) = &self.fetch else { return self.what.run(claims, clock).await };
        let mut came = Vec::with_capacity(claims.len());
        for claim in claims {
            came.extend(self.what.run_with(fetch, claim.clone(), clock).await);
        }
        came
    }
}

impl What {
    async fn run(&self, claims: &[Claim], clock: &Clock) -> Vec<Came> {
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
            Self::Elsewhere(away) => run_elsewhere(away, claims).await,
            Self::Inside(deliveries, route) => {
                match deliveries.call(Arc::clone(route), claims.to_vec()).await {
                    Ok(settled) => settled.into_iter().map(Came::Settled).collect(),
                    // The journal refused, and nothing was done.
                    Err(error) => {
                        tracing::debug!(route = route.name.as_str(), %error, "the journal refused work");
                        claims.iter().map(|_| Came::Back { down: false }).collect()
                    }
                }
            }
        }
    }

    /// Fetches, and goes on with what was found.
    async fn run_with(&self, fetch: &Fetch, mut claim: Claim, clock: &Clock) -> Vec<Came> {
        // An attempt beyond the limit only asks the guard of another database what came of the last one.
        if claim.fence.attempt <= claim.attempt_limit {
            match fetch.get(&claim.event).await {
                Ok(current) => claim.event.current = Some(current),
                Err(failure) => {
                    let mut came = vec![Came::Failed(failure)];
                    if let Self::Elsewhere(away) = self {
                        void_the_dead(away, &[claim], &mut came).await;
                    }
                    return came;
                }
            }
        }
        self.run(&[claim], clock).await
    }
}

async fn run_elsewhere(away: &Away, claims: &[Claim]) -> Vec<Came> {
    // An attempt beyond the limit exists because the last one was lost. It only asks what came of that.
    let beyond = |claim: &Claim| claim.fence.attempt > claim.attempt_limit;
    let within: Vec<Claim> = claims.iter().filter(|claim| !beyond(claim)).cloned().collect();
    let applied = match within.is_empty() {
        true => Vec::new(),
        false => away.apply(&within).await,
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
            Applied::Superseded(reason) => Came::Superseded(reason),
            Applied::Void => {
                let told = "the delivery was given up by a later attempt while this one ran";
                Came::Failed(Failure::retry(Cause::Ours, told))
            }
            Applied::Collided => Came::Back { down: false },
            // One of them shows what is wrong, and waits. The others are due as before, and none is ever dead of it.
            Applied::Unreached(reason) => {
                let shows = std::mem::take(&mut first_of_outage) && claim.fence.attempt < claim.attempt_limit;
                if shows {
                    Came::Failed(Failure::retry(Cause::Destination, reason).in_log(UNREACHED))
                } else {
                    Came::Back { down: true }
                }
            }
        });
    }
    void_the_dead(away, claims, &mut came).await;
    came
}

/// What would be dead is made void first. If that cannot be written it is given back; if it took effect, it is not dead. What has to
/// wait counts as such: it may have waited long enough.
async fn void_the_dead(away: &Away, claims: &[Claim], came: &mut [Came]) {
    let last = |claim: &Claim, failure: &Failure| match failure.remedy {
        Remedy::GiveUp | Remedy::Defer => true,
        Remedy::Retry(_) => claim.fence.attempt >= claim.attempt_limit,
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
    let voided = away.elsewhere.database.void(away.mark, &fences).await;
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
