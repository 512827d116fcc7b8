//! MariaDB and MySQL, in tables named `oncehook_…` beside the user's own.
//!
//! Promises: every connection talks to a server that can be written and syncs its log at every commit (the settings are read
//! back, not assumed). Needs MariaDB 10.6 or MySQL 8.0.16; the tests run on MariaDB, and on MySQL with `make test-mysql`.
//!
//! MySQL refuses to lock rows (`FOR UPDATE`) in a statement that reads a `JSON_TABLE` beside them. So such a statement reads the
//! list from a derived table: `FROM (SELECT * FROM JSON_TABLE(…) t) t STRAIGHT_JOIN …`.
//!
//! On the way out, `deliveries` is what workers and operators call: `queue` takes and settles deliveries, `apply` runs the
//! user's statements (`user_sql`) in the transaction that settles them and `function` the user's Rust functions, `operate` has the texts of what operators ask, `forget` removes
//! what is old, `wake` looks for what other nodes did. Where order matters, `turn` says whose turn it is and `lines` knows who
//! stands where.

mod connection;
mod deliver;
mod engine_error;
mod entity;
mod forget;
mod function;
mod ground;
mod guard;
mod incarnation;
mod many_rows;
mod operate;
mod queries;
mod read;
mod row;
mod schema;
mod tls;
mod user_sql;
mod value;
mod wake;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use mysql_async::Opts;
use oncehook_verify::EventKey;
use tokio::sync::watch;

use super::BoxFuture;
use super::tally::Tally;
use crate::event::{EventId, NewEvent};
use crate::handler::SqlHandler;
use crate::journal::server::engine::{AppendContext, Candidate, Engine, Purpose, Refusal, Stored};
use crate::journal::server::error::EngineError;
use crate::journal::server::forget::Round;
use crate::journal::server::pool::Pool;
use crate::journal::server::rehearse;
use crate::journal::server::shared::Shared;
use crate::journal::server::sql::Sql;
use crate::journal::server::{OpenError as ServerOpenError, ServerJournal, ServerOptions};
use connection::Session;
pub use guard::MysqlElsewhere;

/// The journal on MariaDB or MySQL.
pub type MysqlJournal = ServerJournal<Mysql>;

/// Why a statement may never run on this journal, whatever the tables are.
#[must_use]
pub fn forbidden(handler: &SqlHandler) -> Option<String> {
    rehearse::forbidden::<Mysql>(handler)
}

/// Whether a text can be used as the URL of a database. The error does not repeat it.
pub fn check_url(url: &str) -> Result<(), String> {
    rehearse::check_url::<Mysql>(url)
}

/// The hosts and the database that a URL leads to, without what is secret.
#[must_use]
pub fn shown_url(url: &str) -> String {
    rehearse::shown_url::<Mysql>(url)
}

/// How the journal on MariaDB or MySQL is set up.
pub type MysqlOptions = ServerOptions;

/// Why the journal did not open.
pub type OpenError = ServerOpenError;

/// The database's time in microseconds since 1970, whatever the time zone of session and server.
const NOW: &str = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))";

/// MariaDB or MySQL, and how to reach one database of it.
pub struct Mysql {
    /// One for each host, in the order they were named.
    hosts: Vec<Opts>,
    /// The one that let us in last.
    good: AtomicUsize,
    /// The largest packet of the server that was reached last; 0 before that.
    packet: AtomicUsize,
    handler_time: Duration,
    tls: tls::Tls,
    /// A key that some lane has stored, for lanes that have stored none yet.
    witness: Mutex<Option<queries::Witness>>,
    /// Where forgetting has come to.
    round: Mutex<Round<std::convert::Infallible>>,
}

impl Engine for Mysql {
    type Session = Session;
    type LaneMemory = Option<queries::Witness>;

    const KIND: &'static str = "mysql";
    // A lost connection is noticed by asking.
    const IDENTITY_EVERY: Duration = Duration::from_millis(250);
    const APPEND_COMMITS: bool = false;
    const SQL: Sql = Sql {
        keep_aliases: "INSERT INTO oncehook_spool_aliases (alias, event)
                       SELECT UNHEX(t.alias), UNHEX(t.event)
                         FROM JSON_TABLE($1, '$[*]' COLUMNS (alias VARCHAR(32) PATH '$[0]', event VARCHAR(32) PATH '$[1]')) t
                       ON DUPLICATE KEY UPDATE event = oncehook_spool_aliases.event",
        resolve_alias: "SELECT e.id FROM oncehook_spool_aliases a JOIN oncehook_events e ON e.id = a.event
                         WHERE a.alias = $1",
    };

    fn new(url: &str, handler_time: Duration) -> Result<Self, OpenError> {
        connection::read_url(url, handler_time)
    }

    fn shown(&self) -> String {
        let hosts: Vec<String> = self.hosts.iter().map(connection::host_name).collect();
        let database = self.hosts.first().and_then(|opts| opts.db_name()).unwrap_or_default();
        format!("mysql://{}/{database}", hosts.join(","))
    }

    async fn open(&self, purpose: Purpose) -> Result<Session, EngineError> {
        self.connect(purpose).await
    }

    fn largest_body(&self) -> usize {
        match self.packet.load(Ordering::Relaxed) {
            0 => usize::MAX,
            packet => connection::largest_body(packet),
        }
    }

    async fn migrate(&self, session: &mut Session) -> Result<Vec<String>, OpenError> {
        schema::migrate(session).await
    }

    async fn check_schema(session: &mut Session) -> Result<(), OpenError> {
        schema::check(session).await
    }

    async fn shape(session: &mut Session) -> Result<Vec<String>, OpenError> {
        schema::shape(session).await
    }

    async fn make_ready(_session: &mut Session, _given: Option<i64>) -> Result<(), EngineError> {
        Ok(())
    }

    async fn last_id(session: &mut Session) -> Result<Option<EventId>, EngineError> {
        queries::last_id(session).await
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

    async fn append(
        &self,
        session: &mut Session,
        memory: &mut Option<queries::Witness>,
        context: AppendContext,
        candidates: &[Candidate<'_>],
    ) -> Result<Stored, EngineError> {
        queries::store_all(self, session, memory, context, candidates).await
    }

    async fn keep_conflicts(
        session: &mut Session,
        shard: i64,
        conflicts: &[(EventId, &NewEvent)],
    ) -> Result<(), EngineError> {
        queries::keep_conflicts(session, shard, conflicts).await
    }

    async fn store_duplicates(session: &mut Session, shard: i64, tally: &Tally) -> Result<(), EngineError> {
        queries::store_duplicates(session, shard, tally).await
    }

    fn careful() -> Option<queries::Witness> {
        None
    }

    async fn refuses_by_name(session: &mut Session, key: &EventKey) -> Result<Refusal, EngineError> {
        queries::refuses_by_name(session, key).await
    }
}
