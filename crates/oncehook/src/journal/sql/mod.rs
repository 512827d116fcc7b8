//! What the journals in databases have in common, SQLite's with those on servers: orders, pauses, the audit, one event's
//! story, counts, aliases and forgetting, each written once.
//!
//! The code here binds [`Param`](value::Param)s and reads [`Row`](value::Row)s of a [`Session`]. An engine gives the texts
//! of the statements. The common texts are PostgreSQL's, in words that all engines know. MySQL and SQLite translate the
//! names (`oncehook.events` is `oncehook_events` there) and replace the texts that they must say otherwise. A hint between
//! `/*!` and `*/` is MySQL's alone.
//!
//! Does not: accept events, deliver them, or find the events of a list.

pub(crate) mod aliases;
pub(crate) mod buckets;
pub(crate) mod error;
pub(crate) mod forget;
pub(crate) mod operate;
pub(crate) mod story;
pub(crate) mod value;

use std::future::Future;

use error::EngineError;
use value::{Param, Row};

pub(crate) type Result<T, E = EngineError> = std::result::Result<T, E>;

/// A connection on which statements run, one after the other.
pub(crate) trait Session: Sized {
    type Row: Row;

    /// Runs a statement without parameters.
    fn run(&mut self, sql: &str) -> impl Future<Output = Result<()>> + Send;
    /// Runs one statement and returns its rows.
    fn rows(&mut self, sql: &str, params: &[Param<'_>]) -> impl Future<Output = Result<Vec<Self::Row>>> + Send;
    /// Runs one statement and returns how many rows it changed.
    fn change(&mut self, sql: &str, params: &[Param<'_>]) -> impl Future<Output = Result<u64>> + Send;
    /// Runs one statement and returns its first row.
    fn row(&mut self, sql: &str, params: &[Param<'_>]) -> impl Future<Output = Result<Option<Self::Row>>> + Send {
        let rows = self.rows(sql, params);
        async move { Ok(rows.await?.into_iter().next()) }
    }

    /// Begins a transaction and returns its time: `given`, or else the database's. One round trip.
    fn begin(&mut self, given: Option<i64>) -> impl Future<Output = Result<i64>> + Send;
    fn commit(&mut self) -> impl Future<Output = Result<()>> + Send {
        self.run("COMMIT")
    }
    /// Undoes what was begun. Nothing, if nothing was.
    fn rollback(&mut self) -> impl Future<Output = Result<()>> + Send {
        self.run("ROLLBACK")
    }
    /// Prepares for a transaction of one statement. Returns the time that the statement is given; `None`: it reads the
    /// database's clock itself. No round trip where the engine can do without.
    fn begin_single(&mut self, given: Option<i64>) -> impl Future<Output = Result<Option<i64>>> + Send;
    /// Ends it.
    fn commit_single(&mut self) -> impl Future<Output = Result<()>> + Send;
}
