//! The transaction that a function of the user's is given.
//!
//! The first thing that goes wrong in it is noted: the transaction takes nothing more then.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio_postgres::Statement;

use super::Postgres;
use super::connection::{EngineError, Session, in_time};
use super::user_sql::{self, RELEASE, SAVEPOINT, Trouble, UNDO};
use crate::delivery::{Cause, Failure, HandedEvent};
use crate::handler::Function;
use crate::handler::elsewhere::Answer;
use crate::handler::function::{PostgresTransaction, Row, ToSql, caught};
use crate::journal::server::user_sql::{Surroundings, UserSql as _, in_time as user_code_in_time};

/// Begins a transaction and calls the function behind a savepoint. Returns what it returned in time, unless one of its
/// statements broke.
pub(super) async fn call(
    session: &mut Session,
    given: Option<i64>,
    function: &dyn Function,
    event: &HandedEvent,
    time: Duration,
) -> Result<(i64, Option<String>), Trouble> {
    let settings = user_sql::settings(Surroundings::Leased);
    let begin = format!("{}; {SAVEPOINT}", settings.theirs);
    let now = session.begin_with(&begin, given).await.map_err(Trouble::Engine)?;
    let open = Open { session, broken: Mutex::default() };
    let returned = user_code_in_time(time, caught(|| function.on_postgres(&open, event))).await;
    let broken = open.broken.into_inner().unwrap_or_else(PoisonError::into_inner);
    if returned.is_err() {
        // Its last statement may still be running.
        session.retire();
    }
    let result = match (broken, returned.and_then(|returned| returned)) {
        (Some(Trouble::Failed(failure)), _) => {
            session.run(UNDO).await.map_err(user_sql::at_savepoint)?;
            return Err(Trouble::Failed(failure));
        }
        (Some(trouble), _) => return Err(trouble),
        (None, returned) => returned.map_err(Trouble::Failed)?,
    };
    session.run(&format!("{RELEASE}; {}", settings.ours)).await.map_err(user_sql::at_savepoint)?;
    Ok((now, result))
}

/// The transaction that a function is given.
struct Open<'s> {
    session: &'s Session,
    /// The first thing that went wrong. The transaction takes nothing more then.
    broken: Mutex<Option<Trouble>>,
}

impl Open<'_> {
    async fn prepared(&self, sql: &str) -> Result<Statement, Failure> {
        match Postgres::refusal(sql) {
            // Nothing was sent, but what the function meant to do was not done.
            Some(refused) => Err(self.note(Trouble::Failed(Failure::retry(Cause::Handler, refused)))),
            None => self.answered(self.session.prepared(sql).await),
        }
    }

    /// Notes what went wrong, and says it to the function.
    fn answered<T>(&self, answer: Result<T, EngineError>) -> Result<T, Failure> {
        answer.map_err(|error| self.note(Postgres::trouble(error)))
    }

    fn note(&self, trouble: Trouble) -> Failure {
        let answer = trouble.answer();
        self.broken.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(trouble);
        answer
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
            self.answered(in_time(self.session.execute(&statement, parameters)).await)
        })
    }

    fn query<'a>(
        &'a self,
        sql: &'a str,
        parameters: &'a [&'a (dyn ToSql + Sync)],
    ) -> Answer<'a, Result<Vec<Row>, Failure>> {
        Box::pin(async move {
            let statement = self.prepared(sql).await?;
            self.answered(in_time(self.session.query(&statement, parameters)).await)
        })
    }
}
