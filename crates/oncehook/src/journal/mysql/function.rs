//! The transaction that a function of the user's is given.
//!
//! To the server a statement that failed is over and the transaction goes on, or (after a deadlock) a new one begins in silence:
//! so after the first trouble nothing more is sent, and a statement that was given up before its answer came ends the
//! connection.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use mysql_async::{Row, Value};

use super::Mysql;
use super::connection::Session;
use super::user_sql::{self, Trouble};
use crate::delivery::{Cause, Failure, HandedEvent};
use crate::handler::Function;
use crate::handler::elsewhere::Answer;
use crate::handler::function::{MysqlTransaction, caught};
use crate::journal::server::user_sql::{UserSql as _, in_time};

/// What the function returned in time, unless one of its statements broke.
pub(super) async fn call(
    session: &mut Session,
    function: &dyn Function,
    event: &HandedEvent,
    time: Duration,
) -> Result<Option<String>, Trouble> {
    // A function that asks for the id that it made gets its own, not another delivery's.
    session.run("SELECT LAST_INSERT_ID(0)").await.map_err(Trouble::ours)?;
    let open = Open { session: tokio::sync::Mutex::new(session), condition: Mutex::new(Condition::Sound) };
    let returned = in_time(time, caught(|| function.on_mysql(&open, event))).await.and_then(|returned| returned);
    let Open { session, condition } = open;
    match (condition.into_inner().unwrap_or_else(PoisonError::into_inner), returned) {
        (Condition::Broken(trouble), _) => Err(trouble),
        (Condition::Sound, returned) => returned.map_err(Trouble::Failed),
        (Condition::Asking, returned) => {
            // The answer that comes next on this connection is that of a statement that was given up.
            session.into_inner().retire();
            let given_up = "the function gave up a statement before it was answered";
            Err(Trouble::Failed(returned.err().unwrap_or_else(|| Failure::retry(Cause::Handler, given_up))))
        }
    }
}

/// The transaction that a function is given.
struct Open<'s> {
    /// Statements follow each other, whatever the function does at once.
    session: tokio::sync::Mutex<&'s mut Session>,
    condition: Mutex<Condition>,
}

enum Condition {
    /// Every statement was answered, and well.
    Sound,
    /// One was sent, and its answer is not here yet.
    Asking,
    /// The first thing that went wrong. The transaction takes nothing more then.
    Broken(Trouble),
}

impl Open<'_> {
    fn condition(&self) -> MutexGuard<'_, Condition> {
        self.condition.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a statement may be sent: only if nothing went wrong before. Until its answer is there, none may follow.
    fn begin(&self) -> bool {
        let mut condition = self.condition();
        let sound = matches!(*condition, Condition::Sound);
        if sound {
            *condition = Condition::Asking;
        }
        sound
    }

    /// Runs a statement, if nothing went wrong before. Returns its rows and how many it changed. Dropped half-way, it leaves the
    /// transaction unusable.
    async fn run(&self, sql: &str, parameters: &[Value]) -> Result<(Vec<Row>, u64), Failure> {
        let mut session = self.session.lock().await;
        if !self.begin() {
            let message = "a statement before this one failed, and the transaction takes no more";
            return Err(Failure::retry(Cause::Handler, message));
        }
        let answer = answered(&mut session, sql, parameters).await;
        answer.inspect(|_| *self.condition() = Condition::Sound).map_err(|trouble| {
            let failure = trouble.answer();
            *self.condition() = Condition::Broken(trouble);
            failure
        })
    }
}

/// Checks a statement as those of `sql` handlers are checked, and runs it.
async fn answered(session: &mut Session, sql: &str, parameters: &[Value]) -> Result<(Vec<Row>, u64), Trouble> {
    if !session.has_room_for(sql, parameters) {
        let message = "a statement is larger than the server's max_allowed_packet lets in";
        return Err(Trouble::Failed(Failure::retry(Cause::Handler, message)));
    }
    let statement = Mysql::checked(session, sql).await?;
    let begun = session.is_in_transaction();
    let answer = session.answer_of(&statement, parameters.to_vec()).await.map_err(Mysql::trouble)?;
    user_sql::still_open(session, begun, 1)?;
    Ok(answer)
}

impl MysqlTransaction for Open<'_> {
    fn execute<'a>(&'a self, sql: &'a str, parameters: &'a [Value]) -> Answer<'a, Result<u64, Failure>> {
        Box::pin(async move { self.run(sql, parameters).await.map(|(_, changed)| changed) })
    }

    fn query<'a>(&'a self, sql: &'a str, parameters: &'a [Value]) -> Answer<'a, Result<Vec<Row>, Failure>> {
        Box::pin(async move { self.run(sql, parameters).await.map(|(rows, _)| rows) })
    }
}
