//! Connections: how they are opened, what is checked before one is used, and the small pools they wait in.
//!
//! Promises: every connection has proved, before its first use, that it talks to a primary that syncs its log; every wait
//! has a deadline; a connection on which anything went wrong, or whose caller went away half-way, is closed and never
//! lent again, so nobody inherits an open transaction.
//!
//! Does not: retry. What an error means is the caller's to say ([`EngineError`]).

use std::borrow::Cow;
use std::collections::HashMap;
use std::future::{Future, poll_fn};
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{Semaphore, SemaphorePermit};
use tokio_postgres::error::SqlState;
use tokio_postgres::types::ToSql;
use tokio_postgres::{AsyncMessage, Client, Row, Statement};

use super::OpenError;
use super::hosts::Hosts;
use super::wrapped::Wrapped;

/// The longest that the server may take to answer one of our own statements.
pub(super) const ANSWER_WAIT: Duration = Duration::from_secs(10);

/// How long a transaction may be idle before the server ends it: as long as a lease, because the locks of a worker that
/// froze are its leases.
const IDLE_IN_TRANSACTION: Duration = Duration::from_secs(15);

/// Idle connections that a pool keeps.
const IDLE_KEPT: usize = 8;

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Appends: short statements over big batches.
    Append,
    /// Deliveries, orders, forgetting; the user's statements run here.
    Work,
    /// What people ask. Cannot write.
    Read,
    /// Waits for notifications.
    Listen,
}

impl Purpose {
    /// The settings of the session. Plans are made anew each time: a plan that was made when a table was empty would read
    /// all of it when it is big. Those of appends are made once (half a millisecond for each batch otherwise): all they look
    /// up is found by a unique key, and without scans no plan can be a wrong one.
    fn settings(self, handler_time: Duration) -> String {
        let millis = |time: Duration| time.as_millis().max(1);
        let idle = millis(IDLE_IN_TRANSACTION);
        let common = format!(
            "SET application_name = 'oncehook'; SET idle_in_transaction_session_timeout = {idle};
             SET plan_cache_mode = force_custom_plan;
             SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off';"
        );
        let own = match self {
            Self::Append => {
                "SET statement_timeout = 5000; SET lock_timeout = 3000; SET jit = off; SET work_mem = '64MB';
                 SET plan_cache_mode = force_generic_plan; SET enable_seqscan = off"
                    .to_owned()
            }
            // Quotes in the user's statements mean what the check of them takes them for.
            Self::Work => format!(
                "SET standard_conforming_strings = on; SET statement_timeout = {}",
                millis(handler_time)
            ),
            Self::Read => {
                "SET statement_timeout = 5000; SET jit = off; SET default_transaction_read_only = on"
                    .to_owned()
            }
            Self::Listen => String::new(),
        };
        common + &own
    }
}

/// What went wrong with a statement or a connection.
#[derive(Debug, Clone)]
pub(super) struct EngineError {
    /// For people and logs. Holds no values that the server quotes, and nothing that a terminal would obey.
    pub(super) told: String,
    code: Option<SqlState>,
    /// The constraint that refused, if one did.
    pub(super) constraint: Option<String>,
    /// Nobody spoke: the connection was not made, or was lost.
    silent: bool,
}

impl EngineError {
    pub(super) fn other(told: impl Into<String>) -> Self {
        let told = crate::text::printable(&told.into()).into_owned();
        Self { told, code: None, constraint: None, silent: false }
    }

    /// The database is not there.
    pub(super) fn away(told: impl Into<String>) -> Self {
        Self { silent: true, ..Self::other(told) }
    }

    fn no_answer() -> Self {
        Self::away(format!("the database did not answer within {} s", ANSWER_WAIT.as_secs()))
    }

    /// What the log says of an error in a user's statement: the code and the constraint, not the message, which may quote
    /// values.
    pub(super) fn logged(&self) -> String {
        let code = self.code.as_ref().map_or("unknown", SqlState::code);
        match &self.constraint {
            Some(constraint) => format!("SQLSTATE {code}, constraint {}", crate::text::printable(constraint)),
            None => format!("SQLSTATE {code}"),
        }
    }

    pub(super) fn code(&self) -> Option<&SqlState> {
        self.code.as_ref()
    }

    /// Nobody there, or somebody who cannot serve us now (starting, stopping, full, a replica) and may by and by.
    pub(super) fn is_away(&self) -> bool {
        let waiting = [SqlState::ADMIN_SHUTDOWN, SqlState::CRASH_SHUTDOWN, SqlState::CANNOT_CONNECT_NOW];
        let crowded = self.code.as_ref() == Some(&SqlState::TOO_MANY_CONNECTIONS);
        self.silent
            || crowded
            || self.code.as_ref().is_some_and(|code| waiting.contains(code))
            || self.class() == "08"
    }

    fn class(&self) -> &str {
        self.code.as_ref().and_then(|code| code.code().get(..2)).unwrap_or_default()
    }

    /// Two transactions stood in each other's way; the same again may work. Nobody's fault, nothing was stored.
    pub(super) fn is_collision(&self) -> bool {
        let codes = [SqlState::T_R_DEADLOCK_DETECTED, SqlState::T_R_SERIALIZATION_FAILURE];
        self.code.as_ref().is_some_and(|code| codes.contains(code))
    }

    /// A row was refused (its data, a constraint, a limit of the program): the others are not to blame.
    pub(super) fn blames_a_row(&self) -> bool {
        matches!(self.class(), "22" | "23" | "54")
    }

    /// The statement itself took too long, or waited too long for a lock.
    pub(super) fn is_too_slow(&self) -> bool {
        let codes = [SqlState::QUERY_CANCELED, SqlState::LOCK_NOT_AVAILABLE];
        self.code.as_ref().is_some_and(|code| codes.contains(code))
    }

    /// A savepoint is not there: the transaction in which it was set has ended.
    pub(super) fn is_lost_savepoint(&self) -> bool {
        let codes = [SqlState::S_E_INVALID_SPECIFICATION, SqlState::NO_ACTIVE_SQL_TRANSACTION];
        self.code.as_ref().is_some_and(|code| codes.contains(code))
    }

    /// The server spoke, and about this statement: not a lost connection, a shutdown, a full disk, or a server that became
    /// a replica.
    pub(super) fn blames_the_statement(&self) -> bool {
        let engine = ["08", "25", "53", "55", "57", "58", "F0", "XX"];
        self.code.is_some() && (self.is_too_slow() || !engine.contains(&self.class()))
    }
}

impl From<tokio_postgres::Error> for EngineError {
    fn from(error: tokio_postgres::Error) -> Self {
        match error.as_db_error() {
            // The detail, the hint and the context may quote a row, so they are left out.
            Some(said) => Self {
                code: Some(said.code().clone()),
                constraint: said.constraint().map(str::to_owned),
                ..Self::other(format!(
                    "{} ({})",
                    without_values(said.message(), said.code()),
                    said.code().code()
                ))
            },
            None => {
                let cause = std::error::Error::source(&error);
                // Everything else (TLS, a password, a protocol) was said by somebody, and stays so.
                let silent = error.is_closed() || cause.is_some_and(|cause| cause.is::<std::io::Error>());
                let told = cause.map_or_else(|| error.to_string(), |cause| format!("{error}: {cause}"));
                Self { silent, ..Self::other(told) }
            }
        }
    }
}

/// Errors about data quote the value, and nothing else: what is in quotes is left out. Other errors quote names. Servers quote
/// in the manner of their language.
fn without_values<'m>(message: &'m str, code: &SqlState) -> Cow<'m, str> {
    const QUOTES: [char; 6] = ['"', '«', '»', '„', '“', '”'];
    let about_data = code.code().starts_with("22");
    match message.find(QUOTES).zip(message.rfind(QUOTES)).filter(|_| about_data) {
        Some((from, to)) => {
            let behind = message.get(to..).map_or("", |rest| rest.trim_start_matches(QUOTES));
            Cow::Owned(format!("{}…{behind}", message.get(..from).unwrap_or_default()))
        }
        None => Cow::Borrowed(message),
    }
}

impl std::fmt::Display for EngineError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.told)
    }
}

/// Waits for an answer, but not for ever.
pub(super) async fn in_time<T, E: Into<EngineError>>(
    answer: impl Future<Output = Result<T, E>>,
) -> Result<T, EngineError> {
    match tokio::time::timeout(ANSWER_WAIT, answer).await {
        Ok(answer) => answer.map_err(Into::into),
        Err(_) => Err(EngineError::no_answer()),
    }
}

/// How to reach the database.
#[derive(Debug)]
pub(super) struct Connector {
    hosts: Hosts,
    handler_time: Duration,
}

impl Connector {
    /// Reads a URL. Several hosts may be named; the one that can be written to is taken.
    pub(super) fn new(url: &str, handler_time: Duration) -> Result<Self, OpenError> {
        Ok(Self { hosts: Hosts::new(url)?, handler_time })
    }

    /// Where it leads, without what is secret.
    pub(super) fn shown(&self) -> String {
        self.hosts.shown()
    }

    /// Opens a connection and checks the ground it stands on.
    pub(super) async fn open(&self, purpose: Purpose) -> Result<Session, EngineError> {
        self.open_hearing(purpose, |_| {}).await
    }

    /// The same, and hands the payload of every notification on.
    pub(super) async fn open_hearing(
        &self,
        purpose: Purpose,
        heard: impl Fn(&str) + Send + 'static,
    ) -> Result<Session, EngineError> {
        let (client, mut connection) = self.hosts.connect().await?;
        let unreplicated = Arc::new(AtomicBool::new(false));
        let noted = Arc::clone(&unreplicated);
        tokio::spawn(async move {
            // It ends with its session, or with an error that the session's next statement reports.
            while let Some(Ok(message)) = poll_fn(|context| connection.poll_message(context)).await {
                match message {
                    AsyncMessage::Notification(notification) => heard(notification.payload()),
                    // Warnings come before the answer that they are about, so whoever gets the answer can ask.
                    AsyncMessage::Notice(notice) if notice.routine() == Some(REPLICAS_NOT_WAITED_FOR) => {
                        noted.store(true, Ordering::Release);
                    }
                    _ => {}
                }
            }
        });
        let session = Session {
            client,
            handler_time: self.handler_time,
            statements: Mutex::default(),
            wrapped: Mutex::default(),
            unreplicated,
        };
        session.prepare_ground(purpose).await?;
        Ok(session)
    }
}

/// One connection with its prepared statements.
pub(super) struct Session {
    client: Client,
    /// How long a statement of the user's may take.
    pub(super) handler_time: Duration,
    statements: Mutex<HashMap<String, Statement>>,
    /// What stands for statements of the user's, by their texts (`wrapped`). Nothing, where the server does not allow it.
    wrapped: Mutex<HashMap<String, Option<Arc<Wrapped>>>>,
    unreplicated: Arc<AtomicBool>,
}

impl Deref for Session {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

impl Session {
    async fn prepare_ground(&self, purpose: Purpose) -> Result<(), EngineError> {
        self.run(&purpose.settings(self.handler_time)).await?;
        let ground = in_time(self.client.simple_query(
            "SELECT current_setting('fsync'), current_setting('full_page_writes'), current_setting('synchronous_commit'),
                    pg_is_in_recovery()::text",
        ))
        .await?;
        let row = ground.iter().find_map(|message| match message {
            tokio_postgres::SimpleQueryMessage::Row(row) => Some(row),
            _ => None,
        });
        let wanted =
            [("fsync", "on"), ("full_page_writes", "on"), ("synchronous_commit", ""), ("recovery", "false")];
        for (column, (setting, want)) in wanted.into_iter().enumerate() {
            let found = row.and_then(|row| row.try_get(column).ok().flatten()).unwrap_or("unknown");
            let sound = if want.is_empty() { found != "off" && found != "unknown" } else { found == want };
            if !sound {
                let told = match setting {
                    "recovery" => "the server is a replica, not a primary".to_owned(),
                    _ => format!("{setting} is {found}, so an acknowledged event would not be durable"),
                };
                let constraint = Some(DURABILITY.to_owned());
                return Err(EngineError { constraint, ..EngineError::other(told) });
            }
        }
        Ok(())
    }

    /// An error if a commit on this connection was answered although its synchronous replicas had not confirmed it. The
    /// server does that when somebody cancels the wait, and tells it by a warning only.
    pub(super) fn check_replicated(&self) -> Result<(), EngineError> {
        match self.unreplicated.load(Ordering::Acquire) {
            true => Err(EngineError::away("a commit was not confirmed by the synchronous replicas")),
            false => Ok(()),
        }
    }

    /// Runs statements without parameters.
    pub(super) async fn run(&self, sql: &str) -> Result<(), EngineError> {
        in_time(self.client.batch_execute(sql)).await
    }

    /// The prepared form of a statement. Prepared once per connection.
    pub(super) async fn prepared(&self, sql: &str) -> Result<Statement, EngineError> {
        let known = self.statements().get(sql).cloned();
        if let Some(statement) = known {
            return Ok(statement);
        }
        self.prepared_anew(sql).await
    }

    /// The same, whatever was prepared before: as the tables are now.
    pub(super) async fn prepared_anew(&self, sql: &str) -> Result<Statement, EngineError> {
        let statement = in_time(self.client.prepare(sql)).await?;
        let mut statements = self.statements();
        // The journal's own are few, but a configuration may hold many of the user's.
        if statements.len() >= STATEMENTS_KEPT {
            statements.clear();
        }
        statements.insert(sql.to_owned(), statement.clone());
        Ok(statement)
    }

    /// Forgets prepared statements: tables that they use have changed.
    pub(super) fn forget_statements(&self) {
        self.statements().clear();
        self.wrapped().clear();
    }

    pub(super) fn wrapped(&self) -> std::sync::MutexGuard<'_, HashMap<String, Option<Arc<Wrapped>>>> {
        self.wrapped.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn statements(&self) -> std::sync::MutexGuard<'_, HashMap<String, Statement>> {
        self.statements.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs one statement and returns its rows.
    pub(super) async fn rows(
        &self,
        sql: &str,
        parameters: &[&(dyn ToSql + Sync)],
    ) -> Result<Vec<Row>, EngineError> {
        let statement = self.prepared(sql).await?;
        in_time(self.client.query(&statement, parameters)).await
    }

    /// Runs one statement and returns its first row.
    pub(super) async fn row(
        &self,
        sql: &str,
        parameters: &[&(dyn ToSql + Sync)],
    ) -> Result<Option<Row>, EngineError> {
        Ok(self.rows(sql, parameters).await?.into_iter().next())
    }

    /// Runs one statement and returns how many rows it changed.
    pub(super) async fn change(
        &self,
        sql: &str,
        parameters: &[&(dyn ToSql + Sync)],
    ) -> Result<u64, EngineError> {
        let statement = self.prepared(sql).await?;
        in_time(self.client.execute(&statement, parameters)).await
    }
}

/// The part of the server that warns of a commit whose replicas were not waited for. Its text may be in any language.
const REPLICAS_NOT_WAITED_FOR: &str = "SyncRepWaitForLSN";

/// Statements that a connection keeps prepared.
const STATEMENTS_KEPT: usize = 512;

/// Marks an error of the ground checks.
pub(super) const DURABILITY: &str = "durability";

/// Connections for one purpose, at most so many at once.
pub(super) struct Pool {
    connector: Arc<Connector>,
    purpose: Purpose,
    idle: Mutex<Vec<Session>>,
    permits: Semaphore,
}

impl Pool {
    pub(super) fn new(connector: Arc<Connector>, purpose: Purpose, at_once: usize) -> Self {
        Self { connector, purpose, idle: Mutex::default(), permits: Semaphore::new(at_once) }
    }

    /// Lends a connection. It is closed when it is dropped, unless it is [kept](Lent::keep).
    pub(super) async fn take(&self) -> Result<Lent<'_>, EngineError> {
        let permit = match tokio::time::timeout(ANSWER_WAIT, self.permits.acquire()).await {
            Ok(Ok(permit)) => permit,
            Ok(Err(_)) => return Err(EngineError::other("the journal is closed")),
            Err(_) => return Err(EngineError::other("no connection was free in time")),
        };
        loop {
            let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
            let session = match idle {
                Some(session) if session.is_closed() => continue,
                Some(session) => session,
                None => self.connector.open(self.purpose).await?,
            };
            return Ok(Lent { session, pool: self, _permit: permit });
        }
    }

    /// Refuses to lend from now on and closes what is idle.
    pub(super) fn close(&self) {
        self.permits.close();
        self.forget_idle();
    }

    /// Closes what is idle, and with it what was prepared there.
    pub(super) fn forget_idle(&self) {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

/// A connection on loan.
pub(super) struct Lent<'p> {
    session: Session,
    pool: &'p Pool,
    _permit: SemaphorePermit<'p>,
}

impl Deref for Lent<'_> {
    type Target = Session;

    fn deref(&self) -> &Session {
        &self.session
    }
}

impl Lent<'_> {
    /// Gives the connection back for the next caller. Only for one that is in no transaction.
    pub(super) fn keep(self) {
        let mut idle = self.pool.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < IDLE_KEPT && !self.pool.permits.is_closed() {
            idle.push(self.session);
        }
    }
}

/// Counts collisions: the first few are worth another try.
#[derive(Default)]
pub(super) struct Tries(u32);

impl Tries {
    /// Whether to do the same again after this error; the error if not.
    pub(super) fn again(&mut self, error: EngineError) -> Result<(), EngineError> {
        self.0 += 1;
        if error.is_collision() && self.0 < 10 { Ok(()) } else { Err(error) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_left_out_of_what_is_told() {
        let data = SqlState::INVALID_TEXT_REPRESENTATION;
        for (said, told) in [
            (
                "invalid input syntax for type integer: \"a\" \"b\"",
                "invalid input syntax for type integer: …",
            ),
            (
                "value \"3000000000\" is out of range for type integer",
                "value … is out of range for type integer",
            ),
            ("ungültige Eingabesyntax für Typ integer: »x«", "ungültige Eingabesyntax für Typ integer: …"),
            ("integer out of range", "integer out of range"),
        ] {
            assert_eq!(without_values(said, &data), told);
        }
        let said = "duplicate key value violates unique constraint \"orders_pkey\"";
        assert_eq!(without_values(said, &SqlState::UNIQUE_VIOLATION), said);
    }
}
