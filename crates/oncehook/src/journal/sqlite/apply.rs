//! Effects: the user's statements and functions, each in one transaction with the record that they happened.
//!
//! A batch of a `sql` route is one transaction. If a statement fails and leaves a trace, the whole batch is undone and
//! redone one by one, so that a poison event costs only itself. A delivery that failed before always runs alone.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use oncehook_verify::UnixMicros;
use rusqlite::{Connection, TransactionBehavior};
use serde_json::Value;

use super::queue::{self, Due, Held};
use super::user_sql::{self, Trouble};
use crate::delivery::{Cause, Claim, Failure, Fence, Settled, Verdict};
use crate::handler::{Function, SqlHandler};
use crate::journal::Progress;
use crate::retry::Chance;
use crate::route::Route;

/// A batch ends after this time, so that accepting goes on beside it.
const BATCH_TIME: Duration = Duration::from_millis(20);

/// Runs due deliveries of a `sql` route.
pub(super) fn sql(
    connection: &mut Connection,
    route: &Route,
    handler: &SqlHandler,
    limit: usize,
    now: UnixMicros,
    chance: &mut Chance,
) -> Result<Progress, rusqlite::Error> {
    let due = queue::due(connection, route, now, limit)?;
    let full = due.len() == limit;
    let mut progress = Progress::default();
    let mut batch = Batch { route, handler, now, chance, progress: &mut progress };
    let (fresh, failed_before): (Vec<Due>, Vec<Due>) = due.into_iter().partition(|due| due.attempt == 0);
    let mut left = match batch.together(connection, &fresh)? {
        Together::Done(count) => fresh.len() - count,
        Together::Spoilt => batch.alone(connection, &fresh)?,
    };
    left += batch.alone(connection, &failed_before)?;
    progress.more = full || left > 0;
    Ok(progress)
}

enum Together {
    /// This many were settled, from the first.
    Done(usize),
    /// One of them left a trace and failed. Nothing was settled.
    Spoilt,
}

struct Batch<'b> {
    route: &'b Route,
    handler: &'b SqlHandler,
    now: UnixMicros,
    chance: &'b mut Chance,
    progress: &'b mut Progress,
}

impl Batch<'_> {
    /// All in one transaction.
    fn together(&mut self, connection: &mut Connection, due: &[Due]) -> Result<Together, rusqlite::Error> {
        if due.is_empty() {
            return Ok(Together::Done(0));
        }
        let started = Instant::now();
        let mut progress = Progress::default();
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let mut count = 0;
        for delivery in due {
            let mut clean = true;
            let outcome = self.run(&transaction, delivery, &mut clean)?;
            if outcome.is_err() && !clean {
                return Ok(Together::Spoilt);
            }
            self.settle(&transaction, delivery, outcome, &mut progress)?;
            count += 1;
            if started.elapsed() >= BATCH_TIME {
                break;
            }
        }
        transaction.commit()?;
        self.add(progress);
        Ok(Together::Done(count))
    }

    /// Each in its own transaction. Returns how many were left for the next time.
    fn alone(&mut self, connection: &mut Connection, due: &[Due]) -> Result<usize, rusqlite::Error> {
        let started = Instant::now();
        for (count, delivery) in due.iter().enumerate() {
            if started.elapsed() >= BATCH_TIME {
                return Ok(due.len() - count);
            }
            let mut progress = Progress::default();
            let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            let mut clean = true;
            let outcome = self.run(&transaction, delivery, &mut clean)?;
            if outcome.is_ok() || clean {
                self.settle(&transaction, delivery, outcome, &mut progress)?;
                transaction.commit()?;
            } else {
                // What it did is undone before its failure is written down.
                if !transaction.is_autocommit() {
                    transaction.rollback()?;
                } else {
                    drop(transaction);
                }
                let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
                self.settle(&transaction, delivery, outcome, &mut progress)?;
                transaction.commit()?;
            }
            self.add(progress);
        }
        Ok(0)
    }

    /// The user's statements for one delivery. The outer error is the database's, the inner one the handler's.
    fn run(
        &self,
        connection: &Connection,
        delivery: &Due,
        clean: &mut bool,
    ) -> Result<Result<Option<String>, Failure>, rusqlite::Error> {
        let values = match self.handler.values(&delivery.event) {
            Ok(values) => values,
            Err(failure) => return Ok(Err(failure)),
        };
        crate::crash::point(if self.route.after.is_some() { "in_follow_up" } else { "in_handler" });
        match user_sql::foreign(|| user_sql::run(connection, self.handler, &values, clean)) {
            Ok(result) => {
                crate::crash::point("after_effect");
                Ok(Ok(result))
            }
            Err(Trouble::Failed(failure)) => Ok(Err(failure)),
            Err(Trouble::Engine(error)) => Err(error),
        }
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
            Err(failure) => self.route.retry.after_failure(
                failure,
                fence.attempt,
                delivery.attempt_limit,
                self.now,
                self.chance.draw(),
            ),
        };
        match &verdict {
            Verdict::Succeeded(_) => progress.succeeded += 1,
            Verdict::RetryAt(..) => progress.retrying += 1,
            Verdict::Dead(failure) => progress.dead.push((delivery.event.id, failure.message.clone())),
        }
        if queue::settle(connection, &fence, Held::Lock, &verdict, &self.route.followups, self.now)? {
            Ok(())
        } else {
            // We hold the write lock and are the only process: the row was read a moment ago. If it is not there now,
            // nothing here can be trusted, and the transaction is undone.
            Err(rusqlite::Error::StatementChangedRows(0))
        }
    }

    fn add(&mut self, progress: Progress) {
        self.progress.succeeded += progress.succeeded;
        self.progress.retrying += progress.retrying;
        self.progress.dead.extend(progress.dead);
    }
}

/// Runs a function on leased deliveries: one transaction, each delivery in its own savepoint.
pub(super) fn function(
    connection: &mut Connection,
    route: &Route,
    function: &dyn Function,
    claims: &[Claim],
    now: UnixMicros,
    chance: &mut Chance,
) -> Result<Vec<Settled>, rusqlite::Error> {
    let mut settled = Vec::with_capacity(claims.len());
    let mut transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    for claim in claims {
        let savepoint = transaction.savepoint()?;
        let done = match user_sql::foreign(|| call(&savepoint, function, claim)) {
            Ok(result) => {
                let verdict = Verdict::Succeeded(result.map(|result| result.to_string()));
                let done =
                    queue::settle(&savepoint, &claim.fence, Held::Lease, &verdict, &route.followups, now)?;
                if done {
                    savepoint.commit()?;
                }
                // Otherwise the claim is lost, and dropping the savepoint undoes what the function did.
                done
            }
            Err(failure) => {
                drop(savepoint);
                let (attempt, limit) = (claim.fence.attempt, claim.attempt_limit);
                let verdict = route.retry.after_failure(failure, attempt, limit, now, chance.draw());
                queue::settle(&transaction, &claim.fence, Held::Lease, &verdict, &[], now)?
            }
        };
        settled.push(if done { Settled::Done } else { Settled::Lost });
    }
    transaction.commit()?;
    Ok(settled)
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
        return Err(Failure::permanent(Cause::Handler, "the handler ended the transaction"));
    }
    crate::crash::point("after_effect");
    Ok(result)
}
