//! The user's own statements, as the shared journal runs them.
//!
//! Promises of an engine: values are bound, never written into the text; a statement reads or changes rows, names no table of
//! ours and cannot end the transaction; if one ends it in spite of all checks, that is noticed ([`Trouble::Ended`]).
//! Does not: settle anything. What an error means for the delivery is the caller's to say.

use std::borrow::Cow;
use std::future::Future;
use std::time::Duration;

use serde_json::Value;

use super::engine::Engine;
use super::error::{EngineError, EngineResult};
use crate::delivery::{Cause, Failure, HandedEvent};
use crate::handler::sql::{RESULT_BYTES, RESULT_ROWS, ended_transaction, lexer, too_large};
use crate::handler::{Dialect, Found, SqlHandler};

/// Why the statements of a delivery did not come to an end.
#[derive(Debug)]
pub(in crate::journal) enum Trouble {
    /// They failed: an attempt of the delivery.
    Failed(Failure),
    /// What they require is not there yet. Nothing was done.
    Deferred(Failure),
    /// They ended the transaction. What they did may be committed, up to those of the delivery with this number, from 1;
    /// those of later ones did not run.
    Ended(usize),
    /// Two transactions got in each other's way: no attempt, and worth another try.
    Collision,
    /// The database failed: no attempt of the delivery.
    Engine(EngineError),
}

impl Trouble {
    /// What a function is answered whose statement came to this.
    pub(in crate::journal) fn answer(&self) -> Failure {
        match self {
            Self::Failed(failure) | Self::Deferred(failure) => failure.clone(),
            Self::Ended(_) => ended_transaction(),
            Self::Collision => Failure::retry(Cause::Ours, "another transaction was in the way"),
            Self::Engine(error) => Failure::retry(Cause::Ours, error.message.clone()),
        }
    }

    /// Statements that may not run, and why.
    pub(in crate::journal) fn refused(reason: String) -> Self {
        Self::Failed(Failure::retry(Cause::Handler, reason))
    }

    /// Whose fault an error of one of our own statements is.
    pub(in crate::journal) fn ours(error: EngineError) -> Self {
        if error.is_collision() { Self::Collision } else { Self::Engine(error) }
    }
}

/// What the statements of a delivery came to: a result, or that what it requires is not there yet. Then nothing was done.
pub(in crate::journal) type Ran = Result<Option<String>, Failure>;

/// The rows of a statement as JSON: an object for one row, a list for more, nothing for none.
pub(in crate::journal) fn result(mut rows: impl ExactSizeIterator<Item = Value>) -> Result<Option<String>, Trouble> {
    let text = match rows.len() {
        0 => None,
        1 => rows.next().map(|row| row.to_string()),
        2..=RESULT_ROWS => Some(Value::Array(rows.collect()).to_string()),
        _ => return Err(Trouble::Failed(too_large())),
    };
    if text.as_ref().is_some_and(|text| text.len() > RESULT_BYTES) {
        Err(Trouble::Failed(too_large()))
    } else {
        Ok(text)
    }
}

/// The text that a JSON string stands for.
pub(in crate::journal) fn unquoted(json: &str) -> Cow<'_, str> {
    let inner = json.get(1..json.len().saturating_sub(1)).unwrap_or_default();
    match inner.contains('\\').then(|| serde_json::from_str(json)) {
        Some(Ok(text)) => Cow::Owned(text),
        _ => Cow::Borrowed(inner),
    }
}

/// Where statements run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::journal) enum Surroundings {
    /// In the transaction that locked the deliveries and settles them. If one delivery runs alone and fails, what it did is
    /// undone and the transaction goes on.
    Batch,
    /// In the transaction that settles one leased delivery, and is undone as a whole.
    Leased,
    /// In a database of the user's, in the transaction of a guard, which is undone as a whole.
    External,
}

/// How an engine runs them.
pub(in crate::journal) trait UserSql: Engine {
    /// The statements of a handler, checked and prepared on one connection.
    type Prepared: Send + Sync;
    /// The values of one delivery for them.
    type Bound: Send + Sync;

    /// One of them.
    type Statement: Send;

    const DIALECT: Dialect;
    /// The words with which statements begin that read or change rows, and do nothing else.
    const ALLOWED: &'static [&'static str];
    /// What the log calls the codes of the server's errors.
    const CODE: &'static str;

    /// Why a statement may not have this word, if it may not.
    fn forbidden(word: &str) -> Option<String>;

    /// Prepares a statement that is not refused.
    fn prepare_one(
        session: &mut Self::Session,
        statement: &str,
    ) -> impl Future<Output = Result<Self::Statement, Trouble>> + Send;

    /// Checks and prepares. Outside of a transaction where an error would end one.
    fn prepare(
        session: &mut Self::Session,
        handler: &SqlHandler,
        surroundings: Surroundings,
    ) -> impl Future<Output = Result<Self::Prepared, Trouble>> + Send;

    fn bind(handler: &SqlHandler, prepared: &Self::Prepared, values: &[Found<'_>]) -> Result<Self::Bound, Failure>;

    /// Runs the statements of several deliveries in order, and returns what each came to, or what stopped them: then the
    /// transaction is spoilt, except as [`Surroundings::Batch`] says. `about` is the event of the only delivery: errors are
    /// repeated without its values. Those of several deliveries are not kept.
    fn run(
        session: &mut Self::Session,
        handler: &SqlHandler,
        prepared: &Self::Prepared,
        deliveries: Vec<Self::Bound>,
        surroundings: Surroundings,
        about: Option<&HandedEvent>,
    ) -> impl Future<Output = Result<Vec<Ran>, Trouble>> + Send;

    /// The statements prepared anew after a failure, if that makes a difference: their tables have changed since.
    /// A server that does so by itself needs no help.
    fn renewed(
        _session: &mut Self::Session,
        _handler: &SqlHandler,
        _prepared: &Self::Prepared,
        _failure: &Failure,
    ) -> impl Future<Output = Option<Self::Prepared>> + Send {
        std::future::ready(None)
    }

    /// Whether a failure says that what was prepared does not fit its tables any more.
    fn is_outdated(_failure: &Failure) -> bool {
        false
    }

    /// Whose fault an error of a user's statement is. The log gets the code and the constraint: the message may quote values.
    fn trouble(error: EngineError) -> Trouble {
        let EngineError { message, code, constraint, meaning } = error;
        if meaning.collision {
            Trouble::Collision
        } else if meaning.slow {
            let message = format!("the statement took too long: {message}");
            Trouble::Failed(Failure::retry(Cause::Handler, message).in_log("the statement took too long"))
        } else if meaning.statement {
            let code = code.map_or_else(|| "the statement failed".to_owned(), |code| format!("{} {code}", Self::CODE));
            let constraint = constraint.map(|name| format!(", constraint {}", crate::text::printable(&name)));
            let logged = code + &constraint.unwrap_or_default();
            Trouble::Failed(Failure::retry(Cause::Handler, message).in_log(logged))
        } else {
            Trouble::Engine(EngineError { message, code, constraint, meaning })
        }
    }

    /// The same. If the statement ran for one event alone, the message is repeated without its values.
    fn trouble_about(mut error: EngineError, handler: &SqlHandler, about: Option<&HandedEvent>) -> Trouble {
        if let Some(event) = about {
            error.message = handler.without_values(&error.message, event);
        }
        Self::trouble(error)
    }

    /// Why a statement may never run, whatever the tables are.
    fn refusal(statement: &str) -> Option<String> {
        let words = match lexer::words(statement, Self::DIALECT) {
            Ok(words) => words,
            Err(reason) => return Some(format!("a handler may not run what cannot be read: {reason}")),
        };
        let first = words.first().map(String::as_str).unwrap_or_default();
        if !Self::ALLOWED.contains(&first) {
            let call = if Self::ALLOWED.contains(&"call") { "" } else { "call procedures, " };
            return Some(format!(
                "a handler may read and change rows; it may not begin or end transactions, {call}change settings or tables \
                 (`{first}`)"
            ));
        }
        words.iter().find_map(|word| Self::forbidden(word))
    }

    /// Checks one statement, and prepares it.
    fn checked(
        session: &mut Self::Session,
        statement: &str,
    ) -> impl Future<Output = Result<Self::Statement, Trouble>> + Send {
        async move {
            match Self::refusal(statement) {
                Some(reason) => Err(Trouble::refused(reason)),
                None => Self::prepare_one(session, statement).await,
            }
        }
    }
}

/// Statements that were prepared, or why they cannot be: a failure of each delivery. An error means that the database could not
/// prepare them now.
pub(in crate::journal) fn prepared<P>(prepared: Result<P, Trouble>) -> EngineResult<Result<P, Failure>> {
    match prepared {
        Ok(prepared) => Ok(Ok(prepared)),
        Err(Trouble::Failed(failure) | Trouble::Deferred(failure)) => Ok(Err(failure)),
        Err(Trouble::Collision | Trouble::Ended(_)) => Err(EngineError::other("a statement could not be prepared now")),
        Err(Trouble::Engine(error)) => Err(error),
    }
}

/// What a function returned in time, as JSON; or that it took too long.
pub(in crate::journal) async fn in_time(
    time: Duration,
    calling: impl Future<Output = Result<Option<Value>, Failure>>,
) -> Result<Ran, Failure> {
    let late = |_| Failure::retry(Cause::Handler, format!("the handler took longer than {} s", time.as_secs_f32()));
    let returned = tokio::time::timeout(time, calling).await.map_err(late)?;
    Ok(returned.map(|result| result.map(|result| result.to_string())))
}

/// Runs the statements of one delivery. If their tables have changed since they were prepared, they are prepared anew and run
/// once more.
pub(in crate::journal) async fn run_one<E: UserSql>(
    session: &mut E::Session,
    handler: &SqlHandler,
    prepared: &mut E::Prepared,
    event: &HandedEvent,
    surroundings: Surroundings,
) -> Result<Ran, Trouble> {
    let values = handler.values(event).map_err(Trouble::Failed)?;
    let mut anew = false;
    loop {
        let ran = match E::bind(handler, prepared, &values) {
            Ok(bound) => E::run(session, handler, prepared, vec![bound], surroundings, Some(event)).await,
            Err(failure) => Err(Trouble::Failed(failure)),
        };
        let renewed = match &ran {
            Err(Trouble::Failed(failure)) if !anew => E::renewed(session, handler, prepared, failure).await,
            _ => None,
        };
        match renewed {
            Some(renewed) => (*prepared, anew) = (renewed, true),
            None => return Ok(ran?.into_iter().next().unwrap_or(Ok(None))),
        }
    }
}
