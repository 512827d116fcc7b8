//! Connections: how they are opened, and what is checked before one is used.
//!
//! Promises: every connection has proved, before its first use, that it talks to a primary that syncs its log; every wait
//! has a deadline.
//!
//! Does not: retry. What an error means is the caller's to say ([`EngineError`]).

use std::borrow::Cow;
use std::collections::HashMap;
use std::future::{Future, poll_fn};
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio_postgres::error::SqlState;
use tokio_postgres::types::ToSql;
use tokio_postgres::{AsyncMessage, Client, Row, SimpleQueryMessage, SimpleQueryRow, Statement};

use super::Postgres;
#[cfg(not(feature = "planted"))]
use super::connection as ground;
#[cfg(feature = "planted")]
use super::planted as ground;
use super::value::{bound, flat};
use super::wrapped::Wrapped;
use crate::journal::server::engine;
pub(super) use crate::journal::server::engine::Purpose;
pub(super) use crate::journal::server::error::EngineError;
use crate::journal::server::error::Meaning;
use crate::journal::server::pool::{self, ANSWER_WAIT};
use crate::journal::server::value::Param;

/// How long a transaction may be idle before the server ends it: as long as a lease, because the locks of a worker that
/// froze are its leases.
const IDLE_IN_TRANSACTION: Duration = Duration::from_secs(15);

/// The settings of the session. Plans are made anew each time: a plan that was made when a table was empty would read all of it
/// when it is big. Those of appends are made once (half a millisecond for each batch otherwise): all they look up is found by
/// a unique key, and without scans no plan can be a wrong one.
fn settings(purpose: Purpose, handler_time: Duration) -> String {
    let millis = |time: Duration| time.as_millis().max(1);
    let idle = millis(IDLE_IN_TRANSACTION);
    let common = format!(
        "SET application_name = 'oncehook'; SET idle_in_transaction_session_timeout = {idle};
         SET plan_cache_mode = force_custom_plan;
         SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off';"
    );
    let own = match purpose {
        Purpose::Append => {
            "SET statement_timeout = 5000; SET lock_timeout = 3000; SET jit = off; SET work_mem = '64MB';
             SET plan_cache_mode = force_generic_plan; SET enable_seqscan = off"
                .to_owned()
        }
        // Quotes in the user's statements mean what the check of them takes them for.
        Purpose::Work => {
            format!("SET standard_conforming_strings = on; SET statement_timeout = {}", millis(handler_time))
        }
        Purpose::Read => {
            "SET statement_timeout = 5000; SET jit = off; SET default_transaction_read_only = on".to_owned()
        }
        Purpose::Listen => String::new(),
    };
    common + &own
}

/// What an error of the server means, by its SQLSTATE.
fn meaning(code: &SqlState) -> Meaning {
    let class = code.code().get(..2).unwrap_or_default();
    let is = |codes: &[SqlState]| codes.contains(code);
    let engine = ["08", "25", "53", "55", "57", "58", "F0", "XX"];
    let slow = is(&[SqlState::QUERY_CANCELED, SqlState::LOCK_NOT_AVAILABLE]);
    Meaning {
        away: class == "08"
            || is(&[
                SqlState::ADMIN_SHUTDOWN,
                SqlState::CRASH_SHUTDOWN,
                SqlState::CANNOT_CONNECT_NOW,
                SqlState::TOO_MANY_CONNECTIONS,
            ]),
        collision: is(&[SqlState::T_R_DEADLOCK_DETECTED, SqlState::T_R_SERIALIZATION_FAILURE]),
        row: matches!(class, "22" | "23" | "54"),
        slow,
        statement: slow || !engine.contains(&class),
        lost_savepoint: is(&[SqlState::S_E_INVALID_SPECIFICATION, SqlState::NO_ACTIVE_SQL_TRANSACTION]),
        ..Meaning::default()
    }
}

impl From<tokio_postgres::Error> for EngineError {
    fn from(error: tokio_postgres::Error) -> Self {
        match error.as_db_error() {
            // The detail, the hint and the context may quote a row, so they are left out.
            Some(said) => {
                let (code, message) = (said.code(), without_values(said.message(), said.code()));
                Self {
                    code: Some(code.code().to_owned()),
                    constraint: said.constraint().map(str::to_owned),
                    ..Self::with(format!("{message} ({})", code.code()), meaning(code))
                }
            }
            None => {
                let cause = std::error::Error::source(&error);
                // Other errors (TLS, a password, a protocol) are final.
                let away = error.is_closed() || cause.is_some_and(|cause| cause.is::<std::io::Error>());
                let message = cause.map_or_else(|| error.to_string(), |cause| format!("{error}: {cause}"));
                Self::with(message, Meaning { away, ..Meaning::default() })
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

/// Waits for an answer, but not for ever.
pub(super) async fn in_time<T, E: Into<EngineError>>(
    answer: impl Future<Output = Result<T, E>>,
) -> Result<T, EngineError> {
    match tokio::time::timeout(ANSWER_WAIT, answer).await {
        Ok(answer) => answer.map_err(Into::into),
        Err(_) => Err(EngineError::no_answer(ANSWER_WAIT)),
    }
}

/// Connections to PostgreSQL for one purpose.
pub(super) type Pool = pool::Pool<Postgres>;

impl Postgres {
    /// Opens a connection, checks that what it commits is durable, and hands the payload of every notification on.
    pub(super) async fn open_hearing(
        &self,
        purpose: Purpose,
        heard: impl Fn(&str) + Send + 'static,
    ) -> Result<Session, EngineError> {
        let (client, mut connection) = self.place.connect().await?;
        let unreplicated = Arc::new(AtomicBool::new(false));
        let noted = Arc::clone(&unreplicated);
        tokio::spawn(async move {
            // It ends with its session, or with an error that the session's next statement reports.
            while let Some(Ok(message)) = poll_fn(|context| connection.poll_message(context)).await {
                match message {
                    AsyncMessage::Notification(notification) => heard(notification.payload()),
                    // Warnings come before the answer that they are about, so the one who gets the answer can ask.
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
            retired: false,
        };
        ground::check_ground(&session, purpose).await?;
        Ok(session)
    }
}

/// One connection with its prepared statements.
pub(in crate::journal) struct Session {
    client: Client,
    /// How long a statement of the user's may take.
    pub(super) handler_time: Duration,
    statements: Mutex<HashMap<String, Statement>>,
    /// What stands for statements of the user's, by their texts (`wrapped`). Nothing, where the server does not allow it.
    wrapped: Mutex<HashMap<String, Option<Arc<Wrapped>>>>,
    unreplicated: Arc<AtomicBool>,
    /// It is not lent again.
    retired: bool,
}

impl Deref for Session {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

impl Session {
    /// An error if a commit on this connection was answered although its synchronous replicas had not confirmed it. The
    /// server does that when somebody cancels the wait, and tells it by a warning only.
    pub(super) fn check_replicated(&self) -> Result<(), EngineError> {
        match self.unreplicated.load(Ordering::Acquire) {
            true => Err(EngineError::away("a commit was not confirmed by the synchronous replicas")),
            false => Ok(()),
        }
    }

    /// Has the connection closed after this use: something of it is still running.
    pub(super) fn retire(&mut self) {
        self.retired = true;
    }

    /// Begins a transaction with these settings and returns its time, in one round trip.
    pub(super) async fn begin_with(&self, settings: &str, given: Option<i64>) -> Result<i64, EngineError> {
        if let Some(now) = given {
            self.run(&format!("BEGIN; {settings}")).await?;
            return Ok(now);
        }
        let sql = format!("BEGIN; SELECT oncehook.micros(); {settings}");
        let answer = in_time(self.client.simple_query(&sql)).await?;
        let now = first_text(&answer).and_then(|text| text.parse().ok());
        now.ok_or_else(|| EngineError::other("the database did not say what time it is"))
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
    pub(super) async fn rows(&self, sql: &str, parameters: &[&(dyn ToSql + Sync)]) -> Result<Vec<Row>, EngineError> {
        let statement = self.prepared(sql).await?;
        in_time(self.client.query(&statement, parameters)).await
    }

    /// Runs one statement and returns its first row.
    pub(super) async fn row(&self, sql: &str, parameters: &[&(dyn ToSql + Sync)]) -> Result<Option<Row>, EngineError> {
        Ok(self.rows(sql, parameters).await?.into_iter().next())
    }

    /// Runs one statement and returns how many rows it changed.
    pub(super) async fn change(&self, sql: &str, parameters: &[&(dyn ToSql + Sync)]) -> Result<u64, EngineError> {
        let statement = self.prepared(sql).await?;
        in_time(self.client.execute(&statement, parameters)).await
    }
}

/// Makes the settings of a new connection, and checks that what it commits is durable.
pub(super) async fn check_ground(session: &Session, purpose: Purpose) -> Result<(), EngineError> {
    session.run(&settings(purpose, session.handler_time)).await?;
    let ground = in_time(session.client.simple_query(
        "SELECT current_setting('fsync'), current_setting('full_page_writes'), current_setting('synchronous_commit'),
                pg_is_in_recovery()::text",
    ))
    .await?;
    let row = first_row(&ground);
    let wanted = [("fsync", "on"), ("full_page_writes", "on"), ("synchronous_commit", ""), ("recovery", "false")];
    for (column, (setting, want)) in wanted.into_iter().enumerate() {
        let found = row.and_then(|row| row.try_get(column).ok().flatten()).unwrap_or("unknown");
        let sound = if want.is_empty() { found != "off" && found != "unknown" } else { found == want };
        if !sound {
            let told = match setting {
                "recovery" => "the server is a replica, not a primary".to_owned(),
                _ => format!("{setting} is {found}, so an acknowledged event would not be durable"),
            };
            return Err(EngineError::unsound(told));
        }
    }
    Ok(())
}

/// The part of the server that warns of a commit whose replicas were not waited for. Its text may be in any language.
const REPLICAS_NOT_WAITED_FOR: &str = "SyncRepWaitForLSN";

/// Statements that a connection keeps prepared.
const STATEMENTS_KEPT: usize = 512;

/// The first column of the first row of an answer, as text.
pub(super) fn first_text(answer: &[SimpleQueryMessage]) -> Option<&str> {
    first_row(answer)?.get(0)
}

fn first_row(answer: &[SimpleQueryMessage]) -> Option<&SimpleQueryRow> {
    answer.iter().find_map(|message| match message {
        SimpleQueryMessage::Row(row) => Some(row),
        _ => None,
    })
}

impl engine::Session for Session {
    type Row = Row;

    async fn run(&mut self, sql: &str) -> Result<(), EngineError> {
        Session::run(self, sql).await
    }

    async fn rows(&mut self, sql: &str, params: &[Param<'_>]) -> Result<Vec<Row>, EngineError> {
        Session::rows(self, sql, &bound(&flat(params))).await
    }

    async fn change(&mut self, sql: &str, params: &[Param<'_>]) -> Result<u64, EngineError> {
        Session::change(self, sql, &bound(&flat(params))).await
    }

    async fn begin(&mut self, given: Option<i64>) -> Result<i64, EngineError> {
        self.begin_with("", given).await
    }

    async fn begin_single(&mut self, given: Option<i64>) -> Result<Option<i64>, EngineError> {
        Ok(given)
    }

    async fn commit_single(&mut self) -> Result<(), EngineError> {
        Ok(())
    }
}

impl engine::Connected for Session {
    const BEGIN_READ: &'static str = "BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY";

    async fn database_time(&mut self) -> Result<i64, EngineError> {
        let row = Session::row(self, "SELECT oncehook.micros()", &[]).await?;
        row.map(|row| row.get(0)).ok_or_else(EngineError::damaged)
    }

    fn check_replicated(&self) -> Result<(), EngineError> {
        Session::check_replicated(self)
    }

    fn is_closed(&self) -> bool {
        self.client.is_closed()
    }

    fn is_retired(&self) -> bool {
        self.retired
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_left_out_of_what_is_told() {
        let data = SqlState::INVALID_TEXT_REPRESENTATION;
        for (said, told) in [
            ("invalid input syntax for type integer: \"a\" \"b\"", "invalid input syntax for type integer: …"),
            ("value \"3000000000\" is out of range for type integer", "value … is out of range for type integer"),
            ("ungültige Eingabesyntax für Typ integer: »x«", "ungültige Eingabesyntax für Typ integer: …"),
            ("integer out of range", "integer out of range"),
        ] {
            assert_eq!(without_values(said, &data), told);
        }
        let said = "duplicate key value violates unique constraint \"orders_pkey\"";
        assert_eq!(without_values(said, &SqlState::UNIQUE_VIOLATION), said);
    }
}
