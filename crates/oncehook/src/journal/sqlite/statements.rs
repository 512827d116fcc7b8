//! The embedded journal in the terms of `journal::sql`: statements on one connection, parameters and rows.
//!
//! Promises: each statement has run when its future is made, so no future waits ([`run`]). What was begun and not
//! committed is undone, also by a panic. SQLite's own error is kept for the writer, who judges by it whether the
//! connection can be trusted.
//!
//! How SQLite reads a common text: `oncehook.events` is `oncehook_events`. One writer needs no `FOR UPDATE`. An event is its
//! sequence, the key of its row: a parameter `$1` that is an id is bound as that, and `$1_id` as the sixteen bytes. The id
//! of an event `e` that a person names must be the same as a whole. A table is one JSON text in which ids are sequences.

use std::future::{Future, ready};
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use oncehook_verify::UnixMicros;
use rusqlite::types::{ToSqlOutput, Value, ValueRef};
use rusqlite::{CachedStatement, Connection};

use super::entity;
use crate::delivery::RouteName;
use crate::event::EventId;
use crate::journal::sql::error::EngineError;
use crate::journal::sql::operate::Operates;
use crate::journal::sql::value::{Param, Row, json};
use crate::journal::sql::{Result, Session};

/// A connection on which statements run at once.
pub(super) struct Statements<'c> {
    pub(super) connection: &'c Connection,
    /// The time of its transactions.
    now: UnixMicros,
    /// Whether it has begun a transaction.
    began: bool,
    /// What SQLite said to the statement that failed.
    error: Option<rusqlite::Error>,
}

/// Does something with a connection, at this time.
pub(super) fn run<'c, T>(
    connection: &'c Connection,
    now: UnixMicros,
    work: impl AsyncFnOnce(&mut Statements<'c>) -> Result<T>,
) -> Result<T, rusqlite::Error> {
    let mut session = Statements { connection, now, began: false, error: None };
    let done = match pin!(work(&mut session)).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(done) => done,
        Poll::Pending => Err(EngineError::other("a statement of SQLite did not end")),
    };
    done.map_err(|error| session.error.take().unwrap_or_else(|| of_engine(error)))
}

/// An error that is not SQLite's: a row is damaged.
pub(super) fn of_engine(error: EngineError) -> rusqlite::Error {
    rusqlite::Error::ToSqlConversionFailure(error.message.into())
}

impl Drop for Statements<'_> {
    fn drop(&mut self) {
        if self.began && !self.connection.is_autocommit() {
            // If this fails, too, the next transaction cannot begin, which is an error then.
            let _ = self.connection.execute_batch("ROLLBACK");
        }
    }
}

impl Statements<'_> {
    /// Keeps SQLite's own error.
    pub(super) fn noting<T>(&mut self, done: Result<T, rusqlite::Error>) -> Result<T> {
        done.map_err(|error| {
            let message = error.to_string();
            self.error = Some(error);
            EngineError::other(message)
        })
    }

    fn bound<T>(
        &mut self,
        sql: &str,
        params: &[Param<'_>],
        work: impl FnOnce(&mut CachedStatement<'_>) -> Result<T, rusqlite::Error>,
    ) -> Result<T> {
        let done = self.connection.prepare_cached(&text(sql)).and_then(|mut statement| {
            bind(&mut statement, params)?;
            work(&mut statement)
        });
        self.noting(done)
    }
}

/// A common text in SQLite's words.
fn text(sql: &str) -> String {
    let sql = sql.replace("oncehook.", "oncehook_").replace(" FOR UPDATE", "");
    sql.replace("e.id = $1", "e.seq = $1 AND e.id = $1_id").replace("= e.id", "= e.seq")
}

/// Binds the parameters that occur in the text.
fn bind(statement: &mut CachedStatement<'_>, params: &[Param<'_>]) -> Result<(), rusqlite::Error> {
    for index in 1..=statement.parameter_count() {
        let name = statement.parameter_name(index).unwrap_or_default().to_owned();
        let number = name.trim_start_matches('$').trim_end_matches("_id").parse().unwrap_or(0_usize);
        let param = params.get(number.wrapping_sub(1)).ok_or(rusqlite::Error::InvalidParameterName(name.clone()))?;
        statement.raw_bind_parameter(
            index,
            match param {
                Param::Null => ToSqlOutput::Borrowed(ValueRef::Null),
                Param::Bool(value) => ToSqlOutput::Owned(Value::from(*value)),
                Param::Int(value) => ToSqlOutput::Owned(Value::from(*value)),
                Param::Text(value) => ToSqlOutput::Borrowed(ValueRef::Text(value.as_bytes())),
                Param::Bytes(value) => ToSqlOutput::Borrowed(ValueRef::Blob(value)),
                Param::Id(value) if name.ends_with("_id") => ToSqlOutput::Borrowed(ValueRef::Blob(value.as_bytes())),
                Param::Id(value) => ToSqlOutput::Owned(Value::from(value.sequence())),
                Param::Table(columns) => ToSqlOutput::Owned(Value::from(json(columns, |id| id.sequence().into()))),
            },
        )?;
    }
    Ok(())
}

impl Session for Statements<'_> {
    type Row = Cells;

    fn run(&mut self, sql: &str) -> impl Future<Output = Result<()>> + Send {
        let done = self.connection.execute_batch(sql);
        ready(self.noting(done))
    }

    fn rows(&mut self, sql: &str, params: &[Param<'_>]) -> impl Future<Output = Result<Vec<Cells>>> + Send {
        ready(self.bound(sql, params, |statement| {
            let (mut rows, mut found) = (statement.raw_query(), Vec::new());
            while let Some(row) = rows.next()? {
                found.push(Cells::of(row)?);
            }
            Ok(found)
        }))
    }

    fn change(&mut self, sql: &str, params: &[Param<'_>]) -> impl Future<Output = Result<u64>> + Send {
        ready(self.bound(sql, params, |statement| statement.raw_execute().map(|rows| rows as u64)))
    }

    fn begin(&mut self, given: Option<i64>) -> impl Future<Output = Result<i64>> + Send {
        let begun = self.connection.execute_batch("BEGIN IMMEDIATE");
        self.began |= begun.is_ok();
        ready(self.noting(begun).map(|()| given.unwrap_or(self.now.0)))
    }

    fn begin_single(&mut self, given: Option<i64>) -> impl Future<Output = Result<Option<i64>>> + Send {
        ready(Ok(given.or(Some(self.now.0))))
    }

    fn commit_single(&mut self) -> impl Future<Output = Result<()>> + Send {
        ready(Ok(()))
    }
}

impl Operates for Statements<'_> {
    fn unblock(&mut self, now: i64, route: &RouteName, entity: &str) -> impl Future<Output = Result<()>> + Send {
        let done = entity::let_go_on(self.connection, route.as_str(), entity, 1, UnixMicros(now));
        ready(self.noting(done))
    }
}

/// A row, read whole.
pub(super) struct Cells(Vec<Value>);

impl Cells {
    pub(super) fn of(row: &rusqlite::Row<'_>) -> Result<Self, rusqlite::Error> {
        (0..row.as_ref().column_count()).map(|column| row.get(column)).collect::<Result<_, _>>().map(Self)
    }
}

/// The value of a column, if it is of this type; nothing if it is null.
macro_rules! cell {
    ($cells:expr, $column:expr, $kind:path, |$value:ident| $as:expr) => {
        match $cells.0.get($column) {
            Some($kind($value)) => Ok(Some($as)),
            Some(Value::Null) => Ok(None),
            _ => Err(EngineError::damaged()),
        }
    };
}

impl Row for Cells {
    fn maybe_int(&self, column: usize) -> Result<Option<i64>> {
        cell!(self, column, Value::Integer, |value| *value)
    }

    fn maybe_bytes(&self, column: usize) -> Result<Option<&[u8]>> {
        cell!(self, column, Value::Blob, |value| value.as_slice())
    }

    fn maybe_text(&self, column: usize) -> Result<Option<String>> {
        cell!(self, column, Value::Text, |value| value.clone())
    }

    fn maybe_event(&self, column: usize) -> Result<Option<EventId>> {
        let id = self.maybe_bytes(column)?.map(|bytes| bytes.try_into().map(EventId::from_bytes));
        id.transpose().map_err(|_| EngineError::damaged())
    }

    fn take_bytes(&mut self, column: usize) -> Result<bytes::Bytes> {
        match self.0.get_mut(column) {
            Some(Value::Blob(bytes)) => Ok(std::mem::take(bytes).into()),
            _ => Err(EngineError::damaged()),
        }
    }
}
