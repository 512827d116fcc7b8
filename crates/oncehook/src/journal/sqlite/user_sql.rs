//! The user's own statements and functions, run on the writer's connection.
//!
//! Promises: they run inside our transaction and cannot end it, cannot touch our tables, attach files or change settings
//! (SQLite asks the [`guard`] about every statement it prepares, also when it prepares one anew), and cannot run for
//! ever. Values are bound, never written into the text.
//!
//! Does not: settle anything. What an error means for the delivery is the caller's to say.

use std::cell::Cell;
use std::time::{Duration, Instant};

use rusqlite::hooks::{AuthAction, AuthContext, Authorization};
use rusqlite::types::{ToSqlOutput, Value as SqlValue, ValueRef};
use rusqlite::{Connection, Row, Statement};
use serde_json::{Map, Value};

use super::writer::{blames_the_disk, is_busy};
use crate::delivery::{Cause, Failure};
use crate::handler::{Found, SqlHandler};

/// How long the statements of one delivery, or one function, may keep the writer.
const BUDGET: Duration = Duration::from_secs(2);

/// A result beyond this many rows or bytes is an error: it would be kept for every event.
const RESULT_ROWS: usize = 100;
const RESULT_BYTES: usize = 64 << 10;

thread_local! {
    /// Until when foreign SQL may run on this thread; `None` while our own does. The hooks of the connection look at it.
    static FOREIGN_UNTIL: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// Why foreign code did not come to an end.
#[derive(Debug)]
pub(super) enum Trouble {
    /// It failed: an attempt of the delivery.
    Failed(Failure),
    /// The database failed: no attempt, nobody's fault but ours.
    Engine(rusqlite::Error),
}

/// Puts the hooks on the writer's connection.
pub(super) fn guard(connection: &mut Connection) -> Result<(), rusqlite::Error> {
    connection.authorizer(Some(|context: AuthContext<'_>| {
        if FOREIGN_UNTIL.get().is_some() && is_forbidden(&context.action) {
            Authorization::Deny
        } else {
            Authorization::Allow
        }
    }))?;
    connection
        .progress_handler(5_000, Some(|| FOREIGN_UNTIL.get().is_some_and(|until| Instant::now() >= until)))
}

/// Runs foreign code: while `work` runs, the hooks are strict.
pub(super) fn foreign<T>(work: impl FnOnce() -> T) -> T {
    struct Leave;
    impl Drop for Leave {
        fn drop(&mut self) {
            FOREIGN_UNTIL.set(None);
        }
    }
    FOREIGN_UNTIL.set(Some(Instant::now() + BUDGET));
    let _leave = Leave;
    work()
}

fn is_forbidden(action: &AuthAction<'_>) -> bool {
    let ours = |table: &str| table.get(..9).is_some_and(|start| start.eq_ignore_ascii_case("oncehook_"));
    match action {
        AuthAction::Transaction { .. }
        | AuthAction::Savepoint { .. }
        | AuthAction::Attach { .. }
        | AuthAction::Detach { .. }
        | AuthAction::Pragma { .. }
        | AuthAction::Unknown { .. } => true,
        AuthAction::Read { table_name, .. }
        | AuthAction::Insert { table_name }
        | AuthAction::Update { table_name, .. }
        | AuthAction::Delete { table_name }
        | AuthAction::CreateTable { table_name }
        | AuthAction::DropTable { table_name }
        | AuthAction::AlterTable { table_name, .. }
        | AuthAction::CreateIndex { table_name, .. }
        | AuthAction::DropIndex { table_name, .. }
        | AuthAction::CreateTrigger { table_name, .. }
        | AuthAction::DropTrigger { table_name, .. } => ours(table_name),
        AuthAction::CreateView { view_name } | AuthAction::DropView { view_name } => ours(view_name),
        _ => false,
    }
}

/// Runs the statements of a handler. The result is what the last statement with rows returned: an object for one row, a
/// list for more, nothing for none. `clean` tells the caller whether an error has left no trace in the transaction.
pub(super) fn run(
    connection: &Connection,
    handler: &SqlHandler,
    values: &[Found<'_>],
    clean: &mut bool,
) -> Result<Option<String>, Trouble> {
    let mut result = None;
    *clean = true;
    for (number, statement) in handler.statements().iter().enumerate() {
        let ran = connection.prepare_cached(statement.text()).and_then(|mut prepared| {
            for (place, parameter) in statement.parameters().iter().enumerate() {
                let value = values.get(*parameter).map_or(ToSqlOutput::Owned(SqlValue::Null), bound);
                prepared.raw_bind_parameter(place + 1, value)?;
            }
            rows(&mut prepared)
        });
        match ran {
            Ok(rows) => result = rows.or(result),
            Err(error) => {
                // SQLite undoes a failed statement by itself; what the statements before it did stays.
                *clean = number == 0 && !connection.is_autocommit();
                return Err(trouble(error));
            }
        }
    }
    match result {
        Some(result) if result.len() > RESULT_BYTES => {
            *clean = false;
            let message = format!("the result has more than {RESULT_BYTES} bytes");
            Err(Trouble::Failed(Failure::permanent(Cause::Handler, message)))
        }
        result => Ok(result),
    }
}

/// A value as SQLite takes it. Whole numbers beyond 64 bits stay text, so that no digit is lost.
fn bound<'f>(found: &'f Found<'_>) -> ToSqlOutput<'f> {
    let text = |text: &'f str| ToSqlOutput::Borrowed(ValueRef::Text(text.as_bytes()));
    match found {
        Found::Null => ToSqlOutput::Owned(SqlValue::Null),
        Found::Text(found) => text(found),
        Found::Bytes(bytes) => ToSqlOutput::Borrowed(ValueRef::Blob(bytes)),
        Found::Json(json) => match json.as_bytes().first() {
            Some(b'"') => {
                let inner = json.get(1..json.len() - 1).unwrap_or_default();
                if inner.contains('\\') {
                    let parsed = serde_json::from_str::<String>(json).unwrap_or_else(|_| inner.to_owned());
                    ToSqlOutput::Owned(SqlValue::Text(parsed))
                } else {
                    text(inner)
                }
            }
            Some(b't') => ToSqlOutput::Owned(SqlValue::Integer(1)),
            Some(b'f') => ToSqlOutput::Owned(SqlValue::Integer(0)),
            Some(b'n') => ToSqlOutput::Owned(SqlValue::Null),
            Some(b'-' | b'0'..=b'9') => match json.parse::<i64>() {
                Ok(whole) => ToSqlOutput::Owned(SqlValue::Integer(whole)),
                Err(_) if json.contains(['.', 'e', 'E']) => json
                    .parse::<f64>()
                    .map_or_else(|_| text(json), |real| ToSqlOutput::Owned(SqlValue::Real(real))),
                Err(_) => text(json),
            },
            _ => text(json),
        },
    }
}

/// Steps a statement to its end. `None` if it is not of the kind that returns rows, or returned none.
fn rows(statement: &mut Statement<'_>) -> Result<Option<String>, rusqlite::Error> {
    let names: Vec<String> = statement.column_names().map(str::to_owned).collect();
    let mut found = Vec::new();
    let mut rows = statement.raw_query();
    while let Some(row) = rows.next()? {
        if found.len() < RESULT_ROWS && !names.is_empty() {
            found.push(object(&names, row)?);
        }
    }
    let result = match found.len() {
        0 => return Ok(None),
        1 => found.pop().unwrap_or_default(),
        _ => Value::Array(found),
    };
    Ok(Some(result.to_string()))
}

fn object(names: &[String], row: &Row<'_>) -> Result<Value, rusqlite::Error> {
    let mut object = Map::new();
    for (column, name) in names.iter().enumerate() {
        let value = match row.get_ref(column)? {
            ValueRef::Null => Value::Null,
            ValueRef::Integer(whole) => Value::from(whole),
            ValueRef::Real(real) => Value::from(real),
            ValueRef::Text(text) => Value::from(String::from_utf8_lossy(text)),
            ValueRef::Blob(bytes) => Value::from(hex::encode(bytes)),
        };
        object.insert(name.clone(), value);
    }
    Ok(Value::Object(object))
}

/// Whose fault an error is.
pub(super) fn trouble(error: rusqlite::Error) -> Trouble {
    use rusqlite::ErrorCode;
    if is_busy(&error) || blames_the_disk(&error) {
        return Trouble::Engine(error);
    }
    let message = match error.sqlite_error_code() {
        Some(ErrorCode::OperationInterrupted) => {
            format!("the statements took longer than {} s", BUDGET.as_secs())
        }
        Some(ErrorCode::AuthorizationForStatementDenied) => {
            "a handler may not touch oncehook's tables, end the transaction, attach files or change settings"
                .to_owned()
        }
        _ => error.to_string(),
    };
    Trouble::Failed(Failure::retry(Cause::Handler, message))
}
