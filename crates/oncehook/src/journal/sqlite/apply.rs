//! Effects: the user's statements and functions, each in one transaction with the record that they happened.
//!
//! A batch of a `sql` route is one transaction. If a statement fails, whatever it was, the whole batch is undone: those
//! before the failure run together once more, the failed one runs alone, and the rest goes on together. So a poison event
//! costs only itself, and no code has to know what a failed statement has left behind. Which deliveries always run alone is
//! decided in `decide::batch`. Every leased delivery runs alone.
//!
//! On a route that looks at entities, several deliveries of one entity may run one after the other in the same transaction, each
//! as if those before it had taken effect. If one of them does not and others of its entity come after it, all are undone.
//!
//! Promises: an effect is committed with its settlement or not at all. What another process' lock or a failing disk
//! prevents does not count as an attempt.

#[cfg(feature = "planted")]
pub(super) mod mark_first;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use oncehook_verify::UnixMicros;
use rusqlite::{Connection, Result};
use serde_json::Value;

use super::entity::{self, Entities};
use super::queue::{self, Due, begin};
use super::user_sql::{self, Halt};
use super::writer::{blames_a_row, is_busy};
use crate::delivery::{Cause, Claim, Failure, HandedEvent, Settled, Verdict};
use crate::handler::{Function, Handler};
use crate::journal::Progress;
use crate::journal::decide::batch::{apart, is_counted_on};
use crate::journal::decide::outcome::Held;
use crate::ordering::Company;
use crate::retry::Chance;
use crate::route::{Route, Tried};

/// A job ends after this time, so that accepting goes on beside it.
const JOB_TIME: Duration = Duration::from_millis(20);

/// How long the statements of one delivery may keep the writer: in company, and alone.
const BUDGET_TOGETHER: Duration = Duration::from_millis(250);
const BUDGET_ALONE: Duration = Duration::from_secs(2);

/// Runs due deliveries of a `sql` route.
pub(super) fn sql(
    connection: &mut Connection,
    route: &Arc<Route>,
    limit: usize,
    now: UnixMicros,
    chance: &mut Chance,
) -> Result<Progress> {
    let serial = route.ordering.is_serial();
    // The pages of the entity queues lie scattered: the more deliveries share a commit, the fewer pages are written for each.
    let (due, full) = queue::due(connection, route, now, if serial { limit * 2 } else { limit })?;
    let mut job = Job::new(connection, route, Held::Lock, now, chance)?;
    let (mut alone, together) =
        apart(due, |Due { claim, .. }| (claim.fence.attempt - 1, claim.event.entity.as_deref().filter(|_| serial)));
    alone.extend(job.in_company(connection, together)?);
    if serial {
        // In the order of the entity queues, so that none is blocked by one that comes a moment later.
        alone.sort_by_key(|due| entity::candidate(due).place);
    }
    job.one_by_one(connection, alone)?;
    job.progress.more |= full;
    job.progress.woken = job.entities.parked;
    Ok(job.progress)
}

/// Runs a function, or statements, on leased deliveries, each in a transaction of its own.
pub(super) fn leased(
    connection: &mut Connection,
    route: &Arc<Route>,
    claims: Vec<Claim>,
    now: UnixMicros,
    chance: &mut Chance,
) -> Result<Vec<Settled>> {
    let mut job = Job::new(connection, route, Held::Lease, now, chance)?;
    let claims = claims.into_iter().map(|claim| Due { claim, queued: true });
    let settled = claims.map(|mut due| job.alone(connection, &mut due)).collect();
    route.report(&job.progress.failed);
    settled
}

/// Deliveries of one route that are run and settled.
struct Job<'j> {
    route: &'j Route,
    held: Held,
    now: UnixMicros,
    chance: &'j mut Chance,
    entities: Entities,
    progress: Progress,
    /// When it should come to its end.
    until: Instant,
}

/// What became of deliveries that ran together.
enum Together {
    /// This many were settled.
    Done(usize),
    /// The one at this place of the order in which they ran failed; its place in the list. Nothing was settled.
    Failed { place: usize, index: usize },
    /// The commit failed for a reason that lies in the rows, such as a deferred foreign key. Nothing was settled.
    Refused,
}

impl<'j> Job<'j> {
    fn new(
        connection: &Connection,
        route: &'j Arc<Route>,
        held: Held,
        now: UnixMicros,
        chance: &'j mut Chance,
    ) -> Result<Self> {
        let entities = Entities::look(connection, &route.name, Some(Arc::clone(route)), now)?;
        let (progress, until) = (Progress::default(), Instant::now() + JOB_TIME);
        Ok(Self { route, held, now, chance, entities, progress, until })
    }

    /// Runs deliveries that never failed. Returns those that cannot share a transaction.
    fn in_company(&mut self, connection: &mut Connection, mut due: Vec<Due>) -> Result<Vec<Due>> {
        let mut room = due.len();
        while !due.is_empty() && Instant::now() < self.until {
            match self.together(connection, &mut due, room)? {
                // What is left of the entity queues comes next time.
                Together::Done(_) if self.route.ordering.is_serial() => return Ok(Vec::new()),
                Together::Done(count) => due.drain(..count).for_each(drop),
                // Those before it once more, without it. It is the first of what is left then.
                Together::Failed { place, .. } if place > 0 => {
                    room = place;
                    continue;
                }
                Together::Failed { index, .. } => {
                    self.alone(connection, &mut due.remove(index))?;
                }
                Together::Refused => return Ok(due),
            }
            room = due.len();
        }
        self.progress.more |= !due.is_empty();
        Ok(Vec::new())
    }

    /// Runs those that are eligible in one transaction, at most `room` of them.
    fn together(&mut self, connection: &mut Connection, due: &mut [Due], room: usize) -> Result<Together> {
        let transaction = begin(connection)?;
        let (run, mut progress) = self.entities.eligible(&transaction, Company::OneTransaction, room, due)?;
        let mut count = 0;
        for (place, index) in run.iter().enumerate() {
            let Some(Due { claim, .. }) = due.get(*index) else { continue };
            let outcome = match self.effect(&transaction, claim, BUDGET_TOGETHER) {
                Ok(result) => Ok(result),
                Err(Halt::Unfit(failure)) if !self.has_others_behind(due, &run, place) => Err(failure),
                Err(Halt::Broke(error)) if is_ours(&error) => return Err(error),
                // Dropping the transaction undoes it all.
                Err(_) => return Ok(Together::Failed { place, index: *index }),
            };
            self.settle(&transaction, claim, outcome, &mut progress)?;
            count += 1;
            if Instant::now() >= self.until {
                break;
            }
        }
        progress.more = count < run.len() || room < due.len();
        match transaction.commit() {
            Ok(()) => {
                self.progress.add(progress);
                Ok(Together::Done(count))
            }
            Err(error) if blames_a_row(&error) => Ok(Together::Refused),
            Err(error) => Err(error),
        }
    }

    /// Whether others of its entity count on the delivery at this place.
    fn has_others_behind(&self, due: &[Due], run: &[usize], place: usize) -> bool {
        let entities = run.iter().skip(place).filter_map(|index| Some(due.get(*index)?.claim.event.entity.as_deref()));
        let ran = entities.enumerate().map(|(behind, entity)| (entity, behind > 0));
        self.route.ordering.is_serial() && is_counted_on(ran)
    }

    /// Runs each in a transaction of its own.
    fn one_by_one(&mut self, connection: &mut Connection, due: Vec<Due>) -> Result<()> {
        let mut due = due.into_iter();
        for mut delivery in due.by_ref() {
            self.alone(connection, &mut delivery)?;
            // After the first, so that there is progress however long came before.
            if Instant::now() >= self.until {
                break;
            }
        }
        self.progress.more |= due.len() > 0;
        Ok(())
    }

    /// Runs one delivery in a transaction of its own.
    fn alone(&mut self, connection: &mut Connection, due: &mut Due) -> Result<Settled> {
        let transaction = begin(connection)?;
        if self.held == Held::Lock {
            let due = std::slice::from_mut(due);
            let (run, passed) = self.entities.eligible(&transaction, Company::OneTransaction, 1, due)?;
            if run.is_empty() {
                transaction.commit()?;
                self.progress.add(passed);
                return Ok(Settled::Done);
            }
        }
        let (claim, mut progress) = (&due.claim, Progress::default());
        let failure = match self.effect(&transaction, claim, BUDGET_ALONE) {
            Ok(result) => {
                if self.settle(&transaction, claim, Ok(result), &mut progress)? == Settled::Lost {
                    // Dropping the transaction undoes what was done.
                    return Ok(Settled::Lost);
                }
                match transaction.commit() {
                    Ok(()) => {
                        self.progress.add(progress);
                        return Ok(Settled::Done);
                    }
                    Err(error) if blames_a_row(&error) => self.failure(&error, &claim.event),
                    Err(error) => return Err(error),
                }
            }
            Err(Halt::Broke(error)) if is_ours(&error) => return Err(error),
            Err(halt) => {
                drop(transaction);
                match halt {
                    Halt::Unfit(failure) => failure,
                    Halt::Broke(error) => self.failure(&error, &claim.event),
                }
            }
        };
        // What it did is undone. If the failure cannot be written down either, the handler was not to blame.
        let transaction = begin(connection)?;
        let mut progress = Progress::default();
        let settled = self.settle(&transaction, claim, Err(failure), &mut progress)?;
        transaction.commit()?;
        self.progress.add(progress);
        Ok(settled)
    }

    fn failure(&self, error: &rusqlite::Error, event: &HandedEvent) -> Failure {
        let about = match &self.route.handler {
            Handler::Sql(handler) => Some((handler.as_ref(), event)),
            Handler::Function(_) | Handler::Http(_) | Handler::Elsewhere(_) => None,
        };
        user_sql::failure(error, BUDGET_ALONE, about)
    }

    /// Runs the handler for one delivery.
    fn effect(&self, connection: &Connection, claim: &Claim, budget: Duration) -> Result<Option<String>, Halt> {
        crate::crash::point(if self.route.after.is_some() { "in_follow_up" } else { "in_handler" });
        let result = match &self.route.handler {
            Handler::Sql(handler) => user_sql::run(connection, handler, &claim.event, budget)?,
            Handler::Function(function) => {
                let called = user_sql::foreign(budget, || call(connection, function.as_ref(), &claim.event));
                called.map_err(Halt::Unfit)?.map(|result| result.to_string())
            }
            // Not asked for: see `call` of the journal.
            Handler::Http(_) | Handler::Elsewhere(_) => {
                return Err(Halt::Unfit(Failure::retry(Cause::Ours, "this does not run inside the journal")));
            }
        };
        crate::crash::point("after_effect");
        Ok(result)
    }

    fn settle(
        &mut self,
        connection: &Connection,
        claim: &Claim,
        outcome: Result<Option<String>, Failure>,
        progress: &mut Progress,
    ) -> Result<Settled> {
        let Claim { fence, attempt_limit: limit, parked_at, event } = claim;
        let (attempt, limit, followups) = (fence.attempt, *limit, &self.route.followups);
        let verdict = match outcome {
            Ok(result) => Verdict::Succeeded(result),
            Err(failure) => {
                let tried = Tried { attempt, limit, parked_at: *parked_at };
                self.route.after_failure(failure, tried, self.now, self.chance.draw())
            }
        };
        if !self.entities.settle(connection, self.held, fence, Some(event), &verdict, followups)? {
            return Ok(Settled::Lost);
        }
        progress.count(event.id, attempt, limit, &verdict, self.now);
        Ok(Settled::Done)
    }
}

/// Errors that no statement of a user is to blame for.
fn is_ours(error: &rusqlite::Error) -> bool {
    is_busy(error) || error.sqlite_error_code() == Some(rusqlite::ErrorCode::SystemIoFailure)
}

/// Calls the function. A panic is a failure like any other.
fn call(connection: &Connection, function: &dyn Function, event: &HandedEvent) -> Result<Option<Value>, Failure> {
    let returned = catch_unwind(AssertUnwindSafe(|| function.on_sqlite(connection, event)));
    let result = returned.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let said = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        Err(Failure::retry(Cause::Handler, format!("the handler panicked: {said}")))
    })?;
    if connection.is_autocommit() {
        // What it wrote after that was refused, statement by statement.
        return Err(Failure::retry(Cause::Handler, "the transaction ended while the handler ran"));
    }
    Ok(result)
}
