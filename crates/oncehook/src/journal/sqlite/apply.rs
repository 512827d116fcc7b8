//! Effects: the user's statements and functions, each in one transaction with the record that they happened.
//!
//! A batch of a `sql` route is one transaction. If a statement fails, whatever it was, the whole batch is undone: those
//! before the failure run together once more, the failed one runs alone, and the rest goes on together. So a poison event
//! costs only itself, and nobody has to know what a failed statement has left behind. A delivery that failed before, and
//! every call of a function, always runs alone.
//!
//! On a route that looks at entities, several deliveries of one entity may run one after the other in the same transaction, each
//! as if those before it had taken effect. If one of them does not and others of its entity come after it, all run one by one.
//!
//! Promises: an effect is committed with its settlement or not at all. What another process' lock or a failing disk
//! prevents is no attempt of anybody.

use std::collections::{HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use oncehook_verify::UnixMicros;
use rusqlite::{Connection, Transaction, TransactionBehavior};
use serde_json::Value;

use super::lines::{self, Came, Waiting};
use super::queue::{self, Due, Held};
use super::turn;
use super::user_sql::{self, Ran};
use super::writer::{blames_a_row, is_busy};
use crate::delivery::{Cause, Claim, FailedAttempt, Failure, Fence, Settled, Verdict};
use crate::handler::{Function, Handler, SqlHandler};
use crate::journal::Progress;
use crate::ordering::Company;
use crate::planted::{self, Bug};
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
    route: &Route,
    handler: &SqlHandler,
    limit: usize,
    now: UnixMicros,
    chance: &mut Chance,
) -> Result<Progress, rusqlite::Error> {
    // The pages of the lines lie scattered: the more deliveries share a commit, the fewer pages are written for each.
    let limit = if route.ordering.is_serial() { limit * 2 } else { limit };
    let (due, full) = queue::due(connection, route, now, limit)?;
    let mut job = Job {
        waiting: lines::waiting(connection, &route.name)?,
        route,
        handler,
        now,
        chance,
        progress: Progress::default(),
        until: Instant::now() + JOB_TIME,
    };
    if planted::has(Bug::MarkFirst) {
        let fresh: Vec<Due> = due.into_iter().filter(|due| due.attempt == 0).collect();
        return job.mark_first(connection, &fresh);
    }
    let left = if route.ordering.is_serial() {
        job.in_turn(connection, due)?
    } else {
        let (fresh, failed_before): (Vec<Due>, Vec<Due>) = due.into_iter().partition(|due| due.attempt == 0);
        job.in_company(connection, &fresh)? + job.one_by_one(connection, failed_before)?
    };
    job.progress.more = full || left > 0;
    job.progress.woken = job.waiting.parked;
    Ok(job.progress)
}

struct Job<'j> {
    route: &'j Route,
    handler: &'j SqlHandler,
    now: UnixMicros,
    chance: &'j mut Chance,
    progress: Progress,
    /// When it should come to its end.
    until: Instant,
    waiting: Waiting,
}

/// What became of deliveries that ran together.
enum Together {
    /// This many were settled, from the first.
    Done(usize),
    /// The one at this place failed. Nothing was settled.
    Failed(usize),
    /// The commit failed for a reason that lies in the rows, such as a deferred foreign key. Nothing was settled.
    Refused,
}

/// What became of deliveries that took their turns together.
enum Turned {
    /// All but so many were settled.
    Done { left: usize },
    /// This one failed, and stood at that place. Nothing was settled.
    Failed { place: usize, failed: Box<Due> },
    /// The commit failed for a reason that lies in the rows. Nothing was settled.
    Refused,
}

/// Why the statements of a delivery did not come to their end.
enum Halt {
    /// The event does not fit the handler, or what it requires is not there. Nothing was changed.
    Unfit(Failure),
    /// A statement failed. The transaction must be undone.
    Broke(rusqlite::Error),
}

impl Job<'_> {
    /// The mistake [`Bug::MarkFirst`]: what is settled and committed is run afterwards.
    fn mark_first(mut self, connection: &mut Connection, due: &[Due]) -> Result<Progress, rusqlite::Error> {
        for delivery in due {
            let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            let mut progress = Progress::default();
            self.settle(&transaction, delivery, Ok(Some("{\"id\":1}".to_owned())), &mut progress)?;
            transaction.commit()?;
            self.add(progress);
            let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            if self.run(&transaction, delivery, BUDGET_ALONE).is_ok() {
                transaction.commit()?;
            }
        }
        Ok(self.progress)
    }

    /// Runs deliveries that never failed. Returns how many were left for the next time.
    fn in_company(&mut self, connection: &mut Connection, due: &[Due]) -> Result<usize, rusqlite::Error> {
        let mut rest = due;
        while let Some((first, _)) = rest.split_first() {
            if Instant::now() >= self.until {
                break;
            }
            let mut count = rest.len();
            let done = loop {
                match self.together(connection, rest.get(..count).unwrap_or(rest))? {
                    Together::Done(done) => break done,
                    // Those before it once more, without it. It is the first of what is left then.
                    Together::Failed(place) if place > 0 => count = place,
                    Together::Failed(_) => {
                        self.alone(connection, first.clone())?;
                        break 1;
                    }
                    Together::Refused => return self.one_by_one(connection, rest.to_vec()),
                }
            };
            rest = rest.get(done..).unwrap_or_default();
        }
        Ok(rest.len())
    }

    /// Runs deliveries of a route that looks at entities. Returns how many were left for the next time.
    fn in_turn(&mut self, connection: &mut Connection, due: Vec<Due>) -> Result<usize, rusqlite::Error> {
        // One that failed before runs alone, and so do those behind it.
        let troubled: HashSet<String> =
            due.iter().filter(|due| due.attempt > 0).filter_map(|due| due.event.entity.clone()).collect();
        let runs_alone = |due: &Due| match &due.event.entity {
            Some(entity) => troubled.contains(entity),
            None => due.attempt > 0,
        };
        let (mut alone, company): (Vec<Due>, Vec<Due>) = due.into_iter().partition(runs_alone);
        let mut left = 0;
        let mut most = usize::MAX;
        while !company.is_empty() {
            match self.turns_together(connection, company.clone(), most)? {
                Turned::Done { left: rest } => left += rest,
                // Those before it once more, without it. Then it runs alone, and the rest comes next time.
                Turned::Failed { place, .. } if place > 0 && place < most => {
                    most = place;
                    left += 1;
                    continue;
                }
                Turned::Failed { failed, .. } => {
                    self.alone(connection, *failed)?;
                    left += 1;
                }
                Turned::Refused => alone.splice(0..0, company).for_each(drop),
            }
            break;
        }
        // In the order of the lines, so that none is blocked by one that comes a moment later.
        alone.sort_by_key(|due| lines::candidate(due).place);
        Ok(left + self.one_by_one(connection, alone)?)
    }

    /// Those whose turn it is, in one transaction, but not more than `most`.
    fn turns_together(
        &mut self,
        connection: &mut Connection,
        due: Vec<Due>,
        most: usize,
    ) -> Result<Turned, rusqlite::Error> {
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let company = Company::OneTransaction;
        let turns = turn::take(&transaction, self.route, company, most, due, &mut self.waiting, self.now)?;
        let mut progress = turns.progress(self.now);
        let run = turns.run;
        let mut behind: HashMap<&str, usize> = HashMap::new();
        for entity in run.iter().filter_map(|due| due.event.entity.as_deref()) {
            *behind.entry(entity).or_default() += 1;
        }
        let mut left = run.len();
        for (place, delivery) in run.iter().enumerate() {
            let followed = delivery.event.entity.as_deref().and_then(|entity| behind.get_mut(entity));
            let followed = followed.is_some_and(|count| {
                *count -= 1;
                *count > 0
            });
            let outcome = match self.run(&transaction, delivery, BUDGET_TOGETHER) {
                Ok(result) => Ok(result),
                Err(Halt::Unfit(failure)) if !followed => Err(failure),
                Err(Halt::Broke(error)) if is_ours(&error) => return Err(error),
                // Dropping the transaction undoes it all.
                Err(Halt::Unfit(_) | Halt::Broke(_)) => {
                    return Ok(Turned::Failed { place, failed: Box::new(delivery.clone()) });
                }
            };
            self.settle(&transaction, delivery, outcome, &mut progress)?;
            left -= 1;
            if Instant::now() >= self.until {
                break;
            }
        }
        match transaction.commit() {
            Ok(()) => {
                self.add(progress);
                Ok(Turned::Done { left })
            }
            Err(error) if blames_a_row(&error) => Ok(Turned::Refused),
            Err(error) => Err(error),
        }
    }

    /// Runs each in a transaction of its own. Returns how many were left for the next time.
    fn one_by_one(&mut self, connection: &mut Connection, due: Vec<Due>) -> Result<usize, rusqlite::Error> {
        let mut left = due.len();
        for delivery in due {
            self.alone(connection, delivery)?;
            left -= 1;
            // After the first, so that there is progress however long came before.
            if Instant::now() >= self.until {
                break;
            }
        }
        Ok(left)
    }

    fn together(&mut self, connection: &mut Connection, due: &[Due]) -> Result<Together, rusqlite::Error> {
        let mut progress = Progress::default();
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let mut count = 0;
        for (place, delivery) in due.iter().enumerate() {
            let outcome = match self.run(&transaction, delivery, BUDGET_TOGETHER) {
                Ok(result) => Ok(result),
                Err(Halt::Unfit(failure)) => Err(failure),
                Err(Halt::Broke(error)) if is_ours(&error) => return Err(error),
                // Dropping the transaction undoes it all.
                Err(Halt::Broke(_)) => return Ok(Together::Failed(place)),
            };
            self.settle(&transaction, delivery, outcome, &mut progress)?;
            count += 1;
            if Instant::now() >= self.until {
                break;
            }
        }
        match transaction.commit() {
            Ok(()) => {
                self.add(progress);
                Ok(Together::Done(count))
            }
            Err(error) if blames_a_row(&error) => Ok(Together::Refused),
            Err(error) => Err(error),
        }
    }

    fn alone(&mut self, connection: &mut Connection, delivery: Due) -> Result<(), rusqlite::Error> {
        let mut progress = Progress::default();
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let delivery = if self.route.ordering.is_serial() {
            let company = Company::OneTransaction;
            let (due, waiting) = (vec![delivery], &mut self.waiting);
            let mut turns = turn::take(&transaction, self.route, company, 1, due, waiting, self.now)?;
            let Some(delivery) = turns.run.pop() else {
                // It is settled already, or not its turn.
                transaction.commit()?;
                self.add(turns.progress(self.now));
                return Ok(());
            };
            delivery
        } else {
            delivery
        };
        let delivery = &delivery;
        let failure = match self.run(&transaction, delivery, BUDGET_ALONE) {
            Ok(result) => {
                self.settle(&transaction, delivery, Ok(result), &mut progress)?;
                match transaction.commit() {
                    Ok(()) => {
                        self.add(progress);
                        return Ok(());
                    }
                    Err(error) if blames_a_row(&error) => self.failure(&error, delivery),
                    Err(error) => return Err(error),
                }
            }
            // What it did is undone before its failure is written down.
            Err(halt) => {
                drop(transaction);
                match halt {
                    Halt::Unfit(failure) => failure,
                    Halt::Broke(error) if is_ours(&error) => return Err(error),
                    Halt::Broke(error) => self.failure(&error, delivery),
                }
            }
        };
        // If the failure cannot be written down either, the handler was not to blame.
        let mut progress = Progress::default();
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        self.settle(&transaction, delivery, Err(failure), &mut progress)?;
        transaction.commit()?;
        self.add(progress);
        Ok(())
    }

    fn failure(&self, error: &rusqlite::Error, delivery: &Due) -> Failure {
        user_sql::failure(error, BUDGET_ALONE, Some((self.handler, &delivery.event)))
    }

    /// The user's statements for one delivery.
    fn run(&self, transaction: &Transaction<'_>, delivery: &Due, budget: Duration) -> Result<Option<String>, Halt> {
        let values = self.handler.values(&delivery.event).map_err(Halt::Unfit)?;
        crate::crash::point(if self.route.after.is_some() { "in_follow_up" } else { "in_handler" });
        let result = user_sql::foreign(budget, || user_sql::run(transaction, self.handler, &values));
        let result = match result.map_err(Halt::Broke)? {
            Ran::Done(result) => result,
            Ran::Deferred => return Err(Halt::Unfit(self.handler.deferral())),
        };
        crate::crash::point("after_effect");
        Ok(result)
    }

    fn settle(
        &mut self,
        connection: &Connection,
        delivery: &Due,
        outcome: Result<Option<String>, Failure>,
        progress: &mut Progress,
    ) -> Result<(), rusqlite::Error> {
        let fence = Fence { delivery: delivery.id(self.route), attempt: delivery.attempt + 1 };
        let verdict = match outcome {
            Ok(result) => Verdict::Succeeded(result),
            Err(failure) => {
                let Due { attempt_limit: limit, parked_at, .. } = *delivery;
                let tried = Tried { attempt: fence.attempt, limit, parked_at };
                self.route.after_failure(failure, tried, self.now, self.chance.draw())
            }
        };
        progress.count(delivery.event.id, fence.attempt, delivery.attempt_limit, &verdict, self.now);
        self.waiting.parked |= matches!(verdict, Verdict::Parked(..));
        if queue::settle(connection, &fence, Held::Lock, &verdict, &self.route.followups, self.now)? {
            let Some(came) = Came::new(&delivery.event, &verdict) else { return Ok(()) };
            let serial = self.route.ordering.is_serial().then_some(self.route);
            lines::after(connection, serial, &came, self.waiting, self.now)
        } else {
            // We hold the write lock and are the only process: the row was read a moment ago. If it is not there now,
            // nothing here can be trusted, and the transaction is undone.
            Err(rusqlite::Error::StatementChangedRows(0))
        }
    }

    fn add(&mut self, progress: Progress) {
        self.progress.add(progress);
    }
}

/// Errors that no statement of a user is to blame for.
fn is_ours(error: &rusqlite::Error) -> bool {
    is_busy(error) || error.sqlite_error_code() == Some(rusqlite::ErrorCode::SystemIoFailure)
}

/// Runs a function, or statements, on leased deliveries, each in a transaction of its own.
pub(super) fn leased(
    connection: &mut Connection,
    route: &Route,
    claims: &[Claim],
    now: UnixMicros,
    chance: &mut Chance,
) -> Result<Vec<Settled>, rusqlite::Error> {
    let mut settled = Vec::with_capacity(claims.len());
    let serial = route.ordering.is_serial().then_some(route);
    let waiting = lines::waiting(connection, &route.name)?;
    for claim in claims {
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let outcome = match &route.handler {
            Handler::Function(function) => {
                let called = user_sql::foreign(BUDGET_ALONE, || call(&transaction, function.as_ref(), claim));
                called.map(|result| result.map(|result| result.to_string()))
            }
            Handler::Sql(handler) => match statements(&transaction, handler, claim) {
                Ok(result) => Ok(result),
                Err(Halt::Unfit(failure)) => Err(failure),
                Err(Halt::Broke(error)) if is_ours(&error) => return Err(error),
                Err(Halt::Broke(error)) => Err(user_sql::failure(&error, BUDGET_ALONE, Some((handler, &claim.event)))),
            },
            // Not asked for: see `call` of the journal.
            Handler::Http(_) | Handler::Elsewhere(_) => {
                Err(Failure::retry(Cause::Ours, "this does not run inside the journal"))
            }
        };
        let failure = match outcome {
            Ok(result) => {
                let verdict = Verdict::Succeeded(result);
                let fence = &claim.fence;
                if !queue::settle(&transaction, fence, Held::Lease, &verdict, &route.followups, now)? {
                    // The claim is lost, and dropping the transaction undoes what the function did.
                    settled.push(Settled::Lost);
                    continue;
                }
                if let Some(came) = Came::new(&claim.event, &verdict) {
                    lines::after(&transaction, serial, &came, waiting, now)?;
                }
                match transaction.commit() {
                    Ok(()) => {
                        settled.push(Settled::Done);
                        continue;
                    }
                    Err(error) if blames_a_row(&error) => user_sql::failure(&error, BUDGET_ALONE, None),
                    Err(error) => return Err(error),
                }
            }
            Err(failure) => {
                drop(transaction);
                failure
            }
        };
        let (attempt, limit) = (claim.fence.attempt, claim.attempt_limit);
        let tried = Tried { attempt, limit, parked_at: claim.parked_at };
        let verdict = route.after_failure(failure, tried, now, chance.draw());
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let done = queue::settle(&transaction, &claim.fence, Held::Lease, &verdict, &[], now)?;
        if done && let Some(came) = Came::new(&claim.event, &verdict) {
            lines::after(&transaction, serial, &came, waiting, now)?;
        }
        transaction.commit()?;
        if done {
            route.report(FailedAttempt::of(claim.event.id, attempt, limit, &verdict, now).as_slice());
        }
        settled.push(if done { Settled::Done } else { Settled::Lost });
    }
    Ok(settled)
}

/// The user's statements for a leased delivery.
fn statements(transaction: &Transaction<'_>, handler: &SqlHandler, claim: &Claim) -> Result<Option<String>, Halt> {
    let values = handler.values(&claim.event).map_err(Halt::Unfit)?;
    crate::crash::point("in_handler");
    let ran = user_sql::foreign(BUDGET_ALONE, || user_sql::run(transaction, handler, &values));
    let result = match ran.map_err(Halt::Broke)? {
        Ran::Done(result) => result,
        Ran::Deferred => return Err(Halt::Unfit(handler.deferral())),
    };
    crate::crash::point("after_effect");
    Ok(result)
}

/// Calls the function. A panic is a failure like any other.
fn call(connection: &Connection, function: &dyn Function, claim: &Claim) -> Result<Option<Value>, Failure> {
    crate::crash::point("in_handler");
    let returned = catch_unwind(AssertUnwindSafe(|| function.on_sqlite(connection, &claim.event)));
    let result = returned.unwrap_or_else(|panic| {
        let said = panic
            .downcast_ref::<&str>()
            .map(|text| (*text).to_owned())
            .or_else(|| panic.downcast_ref::<String>().cloned())
            .unwrap_or_default();
        Err(Failure::retry(Cause::Handler, format!("the handler panicked: {said}")))
    })?;
    if connection.is_autocommit() {
        // What it wrote after that was refused, statement by statement.
        return Err(Failure::retry(Cause::Handler, "the transaction ended while the handler ran"));
    }
    crate::crash::point("after_effect");
    Ok(result)
}
