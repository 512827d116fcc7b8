//! MariaDB and MySQL, in tables named `oncehook_…` beside the user's own.
//!
//! Promises: every connection talks to a server that can be written and syncs its log at every commit (the settings are read
//! back, not assumed). Needs MariaDB 10.6 or MySQL 8.0.16; the tests run on MariaDB, and on MySQL with `make test-mysql`.
//!
//! MySQL refuses to lock rows (`FOR UPDATE`) in a statement that reads a `JSON_TABLE` beside them. So such a statement reads the
//! list from a derived table: `FROM (SELECT * FROM JSON_TABLE(…) t) t STRAIGHT_JOIN …`.
//!
//! `queries` has the texts of an append, `deliver` those of the way out, `texts` their fragments; `user_sql`, `many_rows` and
//! `function` run the user's statements and Rust code in the transaction that settles them, `operate` and `read` have the texts for
//! operators and readers, `forget` removes what is old, `wake` looks for what other nodes did. `guard` is for routes whose effects
//! are in another database than the journal.
//!
//! Does not: decide anything. `journal::server` does.

mod connection;
mod deliver;
mod engine_error;
mod forget;
mod function;
mod ground;
mod guard;
mod incarnation;
mod many_rows;
mod operate;
#[cfg(feature = "planted")]
mod planted;
mod queries;
mod read;
mod schema;
mod texts;
mod tls;
mod user_sql;
mod value;
mod wake;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use mysql_async::Opts;
use tokio::sync::watch;

use super::BoxFuture;
use crate::journal::server::ServerJournal;
use crate::journal::server::engine::{Engine, Purpose};
use crate::journal::server::error::EngineError;
use crate::journal::server::hosts::Hosts;
use crate::journal::server::pool::Pool;
use crate::journal::server::shared::Shared;
pub use crate::journal::server::{OpenError, ServerOptions as MysqlOptions};
use connection::Session;
pub use guard::MysqlElsewhere;

/// The journal on MariaDB or MySQL.
pub type MysqlJournal = ServerJournal<Mysql>;

/// The database's time in microseconds since 1970, whatever the time zone of session and server.
const NOW: &str = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))";

/// MariaDB or MySQL, and how to reach one database of it.
pub struct Mysql {
    hosts: Hosts<Opts>,
    /// The largest packet of the server that was reached last; 0 before that.
    packet: AtomicUsize,
    handler_time: Duration,
    tls: tls::Tls,
    /// A key that some lane has stored, for lanes that have stored none yet.
    witness: Mutex<Option<queries::Witness>>,
}

impl Engine for Mysql {
    type Session = Session;

    const KIND: &'static str = "mysql";
    // A lost connection is noticed by asking.
    const IDENTITY_EVERY: Duration = Duration::from_millis(250);
    fn new(url: &str, handler_time: Duration) -> Result<Self, OpenError> {
        connection::read_url(url, handler_time)
    }

    fn shown(&self) -> String {
        let database = self.hosts.each.first().and_then(|(_, opts)| opts.db_name()).unwrap_or_default();
        format!("mysql://{}/{database}", self.hosts.names())
    }

    /// Each host has a deadline of its own.
    async fn open(&self, purpose: Purpose) -> Result<Session, EngineError> {
        self.hosts.connect(|opts| Box::pin(self.open_at(opts, purpose))).await
    }

    fn largest_body(&self) -> usize {
        match self.packet.load(Ordering::Relaxed) {
            0 => usize::MAX,
            packet => connection::largest_body(packet),
        }
    }

    async fn identity(&self, session: &mut Session) -> Result<String, EngineError> {
        incarnation::name(session).await
    }

    async fn share_changes(
        shared: Arc<Shared>,
        pool: Arc<Pool<Self>>,
        end: watch::Receiver<bool>,
    ) -> Result<BoxFuture<'static, ()>, EngineError> {
        Ok(Box::pin(wake::look(shared, pool, end)))
    }
}
