//! The user's own statements and functions, run on the writer's connection.
//!
//! Promises: they run inside our transaction and cannot end it, can read and write rows of their own tables and nothing
//! else (SQLite asks the [`guard`] about every statement it prepares, also when it prepares one anew), and cannot run for
//! ever. If SQLite ends the transaction by itself, whatever they write after that is refused. Values are bound, never
//! written into the text.
//!
//! Does not: settle or undo anything. What an error means for the delivery is the caller's to say.

use std::cell::Cell;
use std::time::{Duration, Instant};

use rusqlite::hooks::{AuthAction, AuthContext, Authorization};
use rusqlite::types::{Null, ToSqlOutput, ValueRef};
use rusqlite::{Connection, ErrorCode, Statement};
use serde_json::{Map, Value};

use crate::delivery::{Cause, Failure, HandedEvent};
use crate::handler::sql::{RESULT_BYTES, RESULT_ROWS, too_large};
use crate::handler::{Found, SqlHandler};

thread_local! {
    /// Until when foreign SQL may run on this thread; `None` while our own does. The hooks of the connection look at it.
    static FOREIGN_UNTIL: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// Puts the hooks on the writer's connection.
pub(super) fn guard(connection: &mut Connection) -> Result<(), rusqlite::Error> {
    connection.authorizer(Some(|context: AuthContext<'_>| {
        if FOREIGN_UNTIL.get().is_none() || is_allowed(&context.action) {
            Authorization::Allow
        } else {
            Authorization::Deny
        }
    }))?;
    // Foreign code never commits: our COMMIT comes after it. A commit while it runs means that SQLite has ended our
    // transaction (a trigger's RAISE(ROLLBACK), an interrupt), and it becomes a rollback.
    connection.commit_hook(Some(|| FOREIGN_UNTIL.get().is_some()))?;
    connection.progress_handler(5_000, Some(|| FOREIGN_UNTIL.get().is_some_and(|until| Instant::now() >= until)))
}

/// Runs foreign code: while `work` runs, the hooks are strict.
pub(super) fn foreign<T>(budget: Duration, work: impl FnOnce() -> T) -> T {
    struct Leave;
    impl Drop for Leave {
        fn drop(&mut self) {
            FOREIGN_UNTIL.set(None);
        }
    }
    FOREIGN_UNTIL.set(Some(Instant::now() + budget));
    let _leave = Leave;
    work()
}

/// Rows of the user's own tables, and what it takes to compute them. Everything else is refused.
fn is_allowed(action: &AuthAction<'_>) -> bool {
    let theirs = |table: &str| !table.get(..9).is_some_and(|start| start.eq_ignore_ascii_case("oncehook_"));
    match action {
        AuthAction::Select | AuthAction::Recursive => true,
        AuthAction::Function { function_name } => !function_name.eq_ignore_ascii_case("load_extension"),
        AuthAction::Read { table_name, .. }
        | AuthAction::Insert { table_name }
        | AuthAction::Update { table_name, .. }
        | AuthAction::Delete { table_name } => theirs(table_name),
        // Full-text tables look whether another connection has written.
        AuthAction::Pragma { pragma_name, pragma_value } => {
            pragma_name.eq_ignore_ascii_case("data_version") && pragma_value.is_none()
        }
        _ => false,
    }
}

/// Why a handler did not come to its end.
pub(super) enum Halt {
    /// The event does not fit the handler, or what it requires is not there. Its statements have changed nothing.
    Unfit(Failure),
    /// A statement failed. The transaction must be undone.
    Broke(rusqlite::Error),
}

impl From<rusqlite::Error> for Halt {
    fn from(error: rusqlite::Error) -> Self {
        Self::Broke(error)
    }
}

/// Runs the statements of a handler for an event. The result is what the last statement with rows returned: an object for one
/// row, a list for more, nothing for none.
pub(super) fn run(
    connection: &Connection,
    handler: &SqlHandler,
    event: &HandedEvent,
    budget: Duration,
) -> Result<Option<String>, Halt> {
    let values = handler.values(event).map_err(Halt::Unfit)?;
    foreign(budget, || {
        let mut result = None;
        for (place, statement) in handler.statements().iter().enumerate() {
            let mut prepared = connection.prepare_cached(statement.text())?;
            for (position, parameter) in statement.parameters().iter().enumerate() {
                let value = values.get(*parameter).map_or(Null.into(), bound);
                prepared.raw_bind_parameter(position + 1, value)?;
            }
            let found = rows(&mut prepared)?;
            if place > 0 || !handler.has_requirement() {
                result = found.or(result);
            } else if found.is_none() {
                return Err(Halt::Unfit(handler.deferral()));
            }
        }
        if connection.is_autocommit() {
            // Nothing of it is committed (see `guard`), and what our own statements wrote now would stand alone.
            return Err(carried(Failure::retry(Cause::Handler, ENDED)).into());
        }
        Ok(result)
    })
}

const ENDED: &str = "a statement ended the transaction; all of it is undone";

/// A failure of our own words as an error of the engine; [`failure`] takes it out again.
fn carried(failure: Failure) -> rusqlite::Error {
    rusqlite::Error::ToSqlConversionFailure(Box::new(failure))
}

/// A value as SQLite takes it. Whole numbers beyond 64 bits stay text, so that no digit is lost.
fn bound<'f>(found: &'f Found<'_>) -> ToSqlOutput<'f> {
    let text = |text: &'f str| ToSqlOutput::Borrowed(ValueRef::Text(text.as_bytes()));
    match found {
        Found::Null => Null.into(),
        Found::Text(found) => text(found),
        Found::Bytes(bytes) => ToSqlOutput::Borrowed(ValueRef::Blob(bytes)),
        Found::Json(json) => match json.as_bytes().first() {
            Some(b'"') => match serde_json::from_str(json) {
                Ok(plain) => text(plain),
                // It has escapes, so it cannot be borrowed.
                Err(_) => serde_json::from_str::<String>(json).unwrap_or_default().into(),
            },
            Some(b't' | b'f') => json.starts_with('t').into(),
            Some(b'n') => Null.into(),
            Some(b'-' | b'0'..=b'9') => match json.parse::<i64>() {
                Ok(whole) => whole.into(),
                Err(_) if json.contains(['.', 'e', 'E']) => {
                    json.parse::<f64>().map_or_else(|_| text(json), ToSqlOutput::from)
                }
                Err(_) => text(json),
            },
            _ => text(json),
        },
    }
}

/// Steps a statement to its end. `None` if it is not of the kind that returns rows, or returned none.
fn rows(statement: &mut Statement<'_>) -> Result<Option<String>, rusqlite::Error> {
    let names: Vec<String> = statement.column_names().map(str::to_owned).collect();
    let (mut found, mut bytes) = (Vec::new(), 0);
    let mut rows = statement.raw_query();
    while let Some(row) = rows.next()? {
        if names.is_empty() {
            continue;
        }
        let mut object = Map::new();
        for (column, name) in names.iter().enumerate() {
            let value = row.get_ref(column)?;
            bytes += match value {
                ValueRef::Text(text) => text.len(),
                ValueRef::Blob(bytes) => bytes.len() * 2,
                ValueRef::Null | ValueRef::Integer(_) | ValueRef::Real(_) => 8,
            };
            if found.len() == RESULT_ROWS || bytes > RESULT_BYTES {
                return Err(carried(too_large()));
            }
            let value = match value {
                ValueRef::Null => Value::Null,
                ValueRef::Integer(whole) => Value::from(whole),
                ValueRef::Real(real) => Value::from(real),
                ValueRef::Text(text) => Value::from(String::from_utf8_lossy(text)),
                ValueRef::Blob(bytes) => Value::from(hex::encode(bytes)),
            };
            object.insert(name.clone(), value);
        }
        found.push(Value::Object(object));
    }
    let last = found.pop();
    let result = if found.is_empty() { last } else { Some(found.into_iter().chain(last).collect()) };
    Ok(result.map(|result: Value| result.to_string()))
}

/// An error of a user's statement as a failure of the attempt. `about`: whose statement, and for which event, whose values are left
/// out.
pub(super) fn failure(
    error: &rusqlite::Error,
    budget: Duration,
    about: Option<(&SqlHandler, &HandedEvent)>,
) -> Failure {
    if let rusqlite::Error::ToSqlConversionFailure(reason) = error
        && let Some(failure) = reason.downcast_ref::<Failure>()
    {
        return failure.clone();
    }
    let message = match error.sqlite_error_code() {
        Some(ErrorCode::OperationInterrupted) => format!("the statements took longer than {budget:?}"),
        Some(ErrorCode::AuthorizationForStatementDenied) => {
            "a handler may only read and write rows, and may not touch oncehook's tables".to_owned()
        }
        _ => without_quoted(error),
    };
    let message = about.map_or(message.clone(), |(handler, event)| handler.without_values(&message, event));
    let failure = Failure::retry(Cause::Handler, message);
    match error {
        // The engine's words for the code, such as "constraint failed"; not the message, which may quote a value.
        rusqlite::Error::SqliteFailure(code, _) => failure.in_log(code.to_string()),
        _ => failure,
    }
}

/// What SQLite says. Errors at run time quote values (a path that is none), those of constraints and of preparing names only.
fn without_quoted(error: &rusqlite::Error) -> String {
    const QUOTES: [char; 2] = ['\'', '"'];
    let message = error.to_string();
    let at_run_time = matches!(error, rusqlite::Error::SqliteFailure(said, _) if said.code == ErrorCode::Unknown);
    match message.find(QUOTES).zip(message.rfind(QUOTES)) {
        Some((from, to)) if at_run_time => {
            format!("{}…{}", message.get(..from).unwrap_or_default(), message.get(to + 1..).unwrap_or_default())
        }
        _ => message,
    }
}
