//! Rust code as a handler: it is given the open transaction, so that what it writes commits together with the record
//! that it happened.
//!
//! A panic is an error like any other: it costs an attempt, never the process. An attempt is leased before the code runs,
//! so code that ends the process is counted too. The code may be called again for the same event, when an attempt failed
//! or was undone; only what it does through the transaction it is given happens once.

use serde_json::Value;

use super::elsewhere::Answer;
use crate::delivery::{Cause, Failure, HandedEvent};

#[cfg(feature = "mysql")]
pub use on_mysql::{MysqlRow, MysqlTransaction, MysqlValue, OnMysql};
#[cfg(feature = "postgres")]
pub use on_postgres::{OnPostgres, PostgresTransaction, PostgresValues, Row, ToSql};

/// What a function is about to return.
pub type Called<'a> = Answer<'a, Result<Option<Value>, Failure>>;

/// A function for events. A closure over a `rusqlite::Connection` is one for the embedded journal; `OnPostgres` makes one for
/// PostgreSQL of a closure, `OnMysql` one for MariaDB and MySQL; one type may serve all of them. On a journal that it is not
/// written for, a function fails.
pub trait Function: Send + Sync + 'static {
    /// Handles the event on the embedded journal. Everything written through `database` is part of the transaction that
    /// also settles the delivery; do not begin or commit anything yourself. Runs on the journal's one writer thread:
    /// accepting webhooks waits while it runs.
    #[cfg(feature = "sqlite")]
    fn on_sqlite(&self, database: &rusqlite::Connection, event: &HandedEvent) -> Result<Option<Value>, Failure> {
        let _ = (database, event);
        Err(not_written_for("the embedded journal"))
    }

    /// Handles the event on PostgreSQL. Everything done through `database` is part of the transaction that also settles the
    /// delivery. It has ten seconds. After a statement that failed the attempt has failed, whatever the function makes of it:
    /// the server takes nothing more in that transaction.
    #[cfg(feature = "postgres")]
    fn on_postgres<'a>(&'a self, database: &'a dyn PostgresTransaction, event: &'a HandedEvent) -> Called<'a> {
        let _ = (database, event);
        Box::pin(async { Err(not_written_for("PostgreSQL")) })
    }

    /// Handles the event on MariaDB or MySQL. Everything done through `database` is part of the transaction that also settles
    /// the delivery. It has as long as a statement of a `sql` handler (ten seconds). After a statement that failed the attempt
    /// has failed, whatever the function makes of it, as on PostgreSQL: nothing more is sent in that transaction. The same
    /// goes for one that is dropped before its answer is there.
    #[cfg(feature = "mysql")]
    fn on_mysql<'a>(&'a self, database: &'a dyn MysqlTransaction, event: &'a HandedEvent) -> Called<'a> {
        let _ = (database, event);
        Box::pin(async { Err(not_written_for("MySQL")) })
    }
}

fn not_written_for(journal: &str) -> Failure {
    Failure::retry(Cause::Handler, format!("this function is not written for {journal}"))
}

/// Calls a function. A panic, when it is called or later, is a failure like any other.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(crate) async fn caught<'a>(call: impl FnOnce() -> Called<'a>) -> Result<Option<Value>, Failure> {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    let called = catch_unwind(AssertUnwindSafe(call));
    let mut running = called.map_err(|panic| panicked(&*panic))?;
    std::future::poll_fn(|context| {
        let polled = catch_unwind(AssertUnwindSafe(|| running.as_mut().poll(context)));
        polled.unwrap_or_else(|panic| std::task::Poll::Ready(Err(panicked(&*panic))))
    })
    .await
}

#[cfg(any(feature = "postgres", feature = "mysql"))]
fn panicked(panic: &(dyn std::any::Any + Send)) -> Failure {
    let said = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    let said = said.unwrap_or_default();
    Failure::retry(Cause::Handler, format!("the handler panicked: {said}"))
}

#[cfg(feature = "sqlite")]
impl<F> Function for F
where
    F: Fn(&rusqlite::Connection, &HandedEvent) -> Result<Option<Value>, Failure> + Send + Sync + 'static,
{
    fn on_sqlite(&self, database: &rusqlite::Connection, event: &HandedEvent) -> Result<Option<Value>, Failure> {
        self(database, event)
    }
}

#[cfg(feature = "postgres")]
mod on_postgres {
    pub use tokio_postgres::Row;
    pub use tokio_postgres::types::ToSql;

    use super::{Answer, Called, Failure, Function, HandedEvent};

    /// Values for the parameters of a statement.
    pub type PostgresValues<'a> = &'a [&'a (dyn ToSql + Sync)];

    /// The open transaction, as a function may use it: statements that read and change rows of the user's own tables. It
    /// cannot begin or end anything, change settings, or reach the journal's tables; such a statement is refused. Parameters are
    /// `$1`, `$2` and so on. A [`Failure`] may be handed on as it is.
    pub trait PostgresTransaction: Sync {
        /// Runs a statement. Returns how many rows it changed.
        fn execute<'a>(&'a self, sql: &'a str, parameters: PostgresValues<'a>) -> Answer<'a, Result<u64, Failure>>;

        /// Runs a statement. Returns its rows.
        fn query<'a>(&'a self, sql: &'a str, parameters: PostgresValues<'a>) -> Answer<'a, Result<Vec<Row>, Failure>>;
    }

    /// A closure that handles events on PostgreSQL: `OnPostgres::new(|database, event| Box::pin(async move { … }))`.
    pub struct OnPostgres<F>(F);

    impl<F> OnPostgres<F>
    where
        F: for<'a> Fn(&'a dyn PostgresTransaction, &'a HandedEvent) -> Called<'a>,
    {
        /// Takes the closure. Its types are known here, so that they need not be written out.
        pub fn new(function: F) -> Self {
            Self(function)
        }
    }

    impl<F> Function for OnPostgres<F>
    where
        F: for<'a> Fn(&'a dyn PostgresTransaction, &'a HandedEvent) -> Called<'a> + Send + Sync + 'static,
    {
        fn on_postgres<'a>(&'a self, database: &'a dyn PostgresTransaction, event: &'a HandedEvent) -> Called<'a> {
            (self.0)(database, event)
        }
    }
}

#[cfg(feature = "mysql")]
mod on_mysql {
    pub use mysql_async::{Row as MysqlRow, Value as MysqlValue};

    use super::{Answer, Called, Failure, Function, HandedEvent};

    /// The open transaction, as a function may use it: statements that read and change rows of the user's own tables. It
    /// cannot begin or end anything, call procedures, make tables, write to one that cannot be rolled back, or reach the journal's
    /// tables; such a statement is refused. Parameters are `?`, one after the other. A [`Failure`] may be handed on as it is.
    pub trait MysqlTransaction: Sync {
        /// Runs a statement. Returns how many rows it changed.
        fn execute<'a>(&'a self, sql: &'a str, parameters: &'a [MysqlValue]) -> Answer<'a, Result<u64, Failure>>;

        /// Runs a statement. Returns its rows.
        fn query<'a>(
            &'a self,
            sql: &'a str,
            parameters: &'a [MysqlValue],
        ) -> Answer<'a, Result<Vec<MysqlRow>, Failure>>;
    }

    /// A closure that handles events on MariaDB and MySQL: `OnMysql::new(|database, event| Box::pin(async move { … }))`.
    pub struct OnMysql<F>(F);

    impl<F> OnMysql<F>
    where
        F: for<'a> Fn(&'a dyn MysqlTransaction, &'a HandedEvent) -> Called<'a>,
    {
        /// Takes the closure. Its types are known here, so that they need not be written out.
        pub fn new(function: F) -> Self {
            Self(function)
        }
    }

    impl<F> Function for OnMysql<F>
    where
        F: for<'a> Fn(&'a dyn MysqlTransaction, &'a HandedEvent) -> Called<'a> + Send + Sync + 'static,
    {
        fn on_mysql<'a>(&'a self, database: &'a dyn MysqlTransaction, event: &'a HandedEvent) -> Called<'a> {
            (self.0)(database, event)
        }
    }
}
