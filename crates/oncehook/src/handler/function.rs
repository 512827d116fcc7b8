//! Rust code as a handler: it is given the open transaction, so that what it writes commits together with the record
//! that it happened.
//!
//! A panic is an error like any other: it costs an attempt, never the process. An attempt is leased before the code runs,
//! so code that ends the process is counted too.

use serde_json::Value;

use crate::delivery::{Failure, HandedEvent};

/// A function for events. Implemented by closures too, for the embedded journal.
pub trait Function: Send + Sync + 'static {
    /// Handles the event on the embedded journal. Everything written through `database` is part of the transaction that
    /// also settles the delivery; do not begin or commit anything yourself. Runs on the journal's one writer thread:
    /// accepting webhooks waits while it runs.
    #[cfg(feature = "sqlite")]
    fn on_sqlite(
        &self,
        database: &rusqlite::Connection,
        event: &HandedEvent,
    ) -> Result<Option<Value>, Failure>;
}

#[cfg(feature = "sqlite")]
impl<F> Function for F
where
    F: Fn(&rusqlite::Connection, &HandedEvent) -> Result<Option<Value>, Failure> + Send + Sync + 'static,
{
    fn on_sqlite(
        &self,
        database: &rusqlite::Connection,
        event: &HandedEvent,
    ) -> Result<Option<Value>, Failure> {
        self(database, event)
    }
}
