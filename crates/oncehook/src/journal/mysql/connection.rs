//! Connections: how they are opened, and what is checked before one is used.
//!
//! Promises: every connection has proved, before its first use, that it talks to a server that can be written and syncs its
//! log at every commit; sessions are strict and end no transaction by themselves (`autocommit` is off); every wait has a
//! deadline.
//!
//! Does not: retry. What an error means is the caller's to say ([`EngineError`]).

use std::collections::HashSet;
use std::future::Future;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use mysql_async::consts::StatusFlags;
use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Opts, OptsBuilder, Row, Value};

use super::engine_error::{EngineError, too_big};
#[cfg(not(feature = "planted"))]
use super::ground::check;
#[cfg(feature = "planted")]
use super::planted::check;
use super::texts::Texts;
use super::tls::Tls;
use super::{Mysql, OpenError};
use crate::journal::server::engine;
pub(super) use crate::journal::server::engine::Purpose;
use crate::journal::server::hosts::Hosts;
use crate::journal::server::pool::{self, ANSWER_WAIT};
use crate::journal::server::value::{Column, Param, Row as _};

/// The longest that the server may take to be reached.
pub(super) const CONNECT_WAIT: Duration = Duration::from_secs(3);

/// How long a session may be idle before the server ends it and what it has locked is free: as long as a lease, because
/// the locks of a worker that froze are its leases.
const IDLE_SESSION: Duration = Duration::from_secs(15);

/// A connection that was idle for longer is not lent again: the server may be about to end it.
const IDLE_LENT: Duration = Duration::from_secs(8);

/// One that was idle for longer is asked whether it is still there before it is lent; and how long that may take.
const IDLE_TRUSTED: Duration = Duration::from_millis(50);
const PING_WAIT: Duration = Duration::from_secs(3);

/// Statements that a connection keeps prepared.
const STATEMENTS_KEPT: usize = 512;

/// The same on every server, whatever its own setting: what does not fit a column is an error, and quotes and backslashes
/// mean what `user_sql` takes them for.
const SQL_MODE: &str =
    "STRICT_ALL_TABLES,NO_ZERO_IN_DATE,NO_ZERO_DATE,ERROR_FOR_DIVISION_BY_ZERO,NO_ENGINE_SUBSTITUTION";

/// The settings of the session. Uniqueness is checked whatever the server's own setting says.
fn settings(purpose: Purpose, mariadb: bool, handler_time: Duration) -> Vec<String> {
    let (isolation, lock_wait, time) = match purpose {
        Purpose::Append => ("READ COMMITTED", 3, Duration::from_secs(5)),
        Purpose::Work | Purpose::Listen => ("READ COMMITTED", 5, handler_time),
        // One snapshot for all statements of an answer.
        Purpose::Read => ("REPEATABLE READ", 1, Duration::from_secs(5)),
    };
    let idle = IDLE_SESSION.as_secs();
    let mut settings = vec![
        "SET NAMES utf8mb4".to_owned(),
        format!("SET SESSION TRANSACTION ISOLATION LEVEL {isolation}"),
        format!(
            "SET SESSION sql_mode = '{SQL_MODE}', SESSION autocommit = 0, SESSION unique_checks = 1,
             SESSION foreign_key_checks = 1, SESSION innodb_lock_wait_timeout = {lock_wait}"
        ),
    ];
    // Lanes are idle as long as nobody sends, and hold nothing then; they look after their connection themselves.
    if purpose != Purpose::Append {
        settings.push(format!("SET SESSION wait_timeout = {idle}"));
    }
    settings.push(if mariadb {
        // Also ends a transaction whose session is kept alive by nothing.
        let seconds = time.as_secs_f64().max(0.001);
        format!("SET SESSION max_statement_time = {seconds:.3}, SESSION idle_transaction_timeout = {idle}")
    } else {
        // Only ends what reads. A statement that writes ends with the deadline of whoever waits for it.
        format!("SET SESSION max_execution_time = {}", time.as_millis().max(1))
    });
    settings
}

/// Waits for an answer, but not for ever.
async fn in_time<T>(
    patience: Duration,
    answer: impl Future<Output = Result<T, mysql_async::Error>>,
) -> Result<T, EngineError> {
    match tokio::time::timeout(patience, answer).await {
        Ok(answer) => answer.map_err(Into::into),
        Err(_) => Err(EngineError::no_answer(patience)),
    }
}

/// What a row has beside the body: headers, key, names. The head of a request is bounded by the front door.
const BESIDE_BODY: usize = 64 << 10;

/// The largest body whose row fits into a packet of this size.
pub(super) fn largest_body(packet: usize) -> usize {
    row_bytes(packet).saturating_sub(BESIDE_BODY)
}

/// How many bytes of a packet are for rows; the rest is for the statement.
fn row_bytes(packet: usize) -> usize {
    packet.saturating_sub(packet / 4)
}

/// Reads a URL. Several hosts may be named; the first one that can be written to is taken.
pub(super) fn read_url(url: &str, handler_time: Duration) -> Result<Mysql, OpenError> {
    // The URL holds a password, so errors do not repeat it.
    let wrong = |what: &str| OpenError::Url(what.to_owned());
    let rest = ["mysql://", "mariadb://"]
        .into_iter()
        .find_map(|scheme| url.strip_prefix(scheme))
        .ok_or_else(|| wrong("it begins with mysql:// or mariadb://"))?;
    let (authority, path) = match rest.find(['/', '?']) {
        Some(at) => rest.split_at(at),
        None => (rest, ""),
    };
    let (user, hosts) = match authority.rfind('@') {
        Some(at) => authority.split_at(at + 1),
        None => ("", authority),
    };
    let (path, parameters) = path.split_once('?').unwrap_or((path, ""));
    let (tls, parameters) = Tls::of(parameters).map_err(OpenError::Url)?;
    let path = if parameters.is_empty() { path.to_owned() } else { format!("{path}?{parameters}") };
    let mut opened = Vec::new();
    for host in hosts.split(',') {
        let opts = Opts::from_url(&format!("mysql://{user}{host}{path}")).map_err(|error| match error {
            mysql_async::UrlError::UnknownParameter { param } => wrong(&format!("unknown parameter `{param}`")),
            mysql_async::UrlError::InvalidParamValue { param, .. } => {
                wrong(&format!("the value of `{param}` cannot be used"))
            }
            _ => wrong("write mysql://USER:PASSWORD@HOST:PORT/DATABASE"),
        })?;
        if opts.db_name().is_none_or(str::is_empty) {
            return Err(wrong("name a database: mysql://USER@HOST/DATABASE"));
        }
        if opts.socket().is_some() && tls.options.is_some() {
            return Err(wrong("ssl-mode is for hosts, not for sockets"));
        }
        let builder = OptsBuilder::from_opts(opts)
            .ssl_opts(tls.options.clone())
            // Where the URL leads, and not to a socket that the server names.
            .prefer_socket(Some(false))
            .tcp_keepalive(Some(Duration::from_secs(10)))
            .stmt_cache_size(Some(STATEMENTS_KEPT))
            // Rows that were changed are counted, not rows that were found: an insert is told from a duplicate by it.
            .client_found_rows(false);
        let opts = Opts::from(builder);
        opened.push((host_name(&opts), opts));
    }
    Ok(Mysql { hosts: Hosts::new(opened), packet: AtomicUsize::new(0), handler_time, tls, witness: Mutex::default() })
}

impl Mysql {
    /// Opens a connection to one host and checks the ground it stands on.
    pub(super) async fn open_at(&self, opts: &Opts, purpose: Purpose) -> Result<Session, EngineError> {
        let opening = async {
            let conn = match Conn::new(opts.clone()).await.map_err(EngineError::from) {
                // Asked for only if the server can.
                Err(error) if error.meaning.no_tls && self.tls.optional => {
                    Conn::new(OptsBuilder::from_opts(opts.clone()).ssl_opts(None)).await?
                }
                opened => opened?,
            };
            let patience = match purpose {
                Purpose::Work => ANSWER_WAIT.max(self.handler_time.saturating_add(Duration::from_secs(5))),
                Purpose::Append | Purpose::Read | Purpose::Listen => ANSWER_WAIT,
            };
            let mut session = Session {
                patience,
                conn,
                packet: 0,
                mariadb: false,
                texts: Texts::default(),
                known: HashSet::new(),
                retired: false,
                in_transaction: false,
            };
            let ground = check(&mut session).await?;
            (session.packet, session.mariadb) = (ground.packet, ground.mariadb);
            self.packet.store(ground.packet, Ordering::Relaxed);
            for setting in settings(purpose, ground.mariadb, self.handler_time) {
                session.run(&setting).await?;
            }
            Ok(session)
        };
        match tokio::time::timeout(CONNECT_WAIT, opening).await {
            Ok(opened) => opened,
            Err(_) => Err(EngineError::away("the database could not be reached in time")),
        }
    }
}

fn host_name(opts: &Opts) -> String {
    match opts.socket() {
        Some(socket) => socket.to_owned(),
        None => format!("{}:{}", opts.ip_or_hostname(), opts.tcp_port()),
    }
}

/// A statement that inserts many rows: `head VALUES row, row, … tail`.
#[derive(Clone, Copy)]
pub(super) struct Insert<'s> {
    pub(super) head: &'s str,
    /// One row, with its placeholders.
    pub(super) row: &'s str,
    pub(super) tail: &'s str,
}

/// At most this many rows in one statement.
const ROWS_AT_ONCE: usize = 256;

/// One connection with its prepared statements.
pub(in crate::journal) struct Session {
    conn: Conn,
    /// The largest packet that the server takes.
    packet: usize,
    pub(super) mariadb: bool,
    /// How long an answer may take: longer than the server may take for it.
    patience: Duration,
    texts: Texts,
    /// Statements of the user's that were looked at.
    known: HashSet<String>,
    /// It is not lent again.
    retired: bool,
    in_transaction: bool,
}

impl Session {
    /// Whether a statement was looked at on this connection before.
    pub(super) fn is_known(&self, statement: &str) -> bool {
        self.known.contains(statement)
    }

    pub(super) fn make_known(&mut self, statement: &str) {
        if self.known.len() >= STATEMENTS_KEPT {
            self.known.clear();
        }
        self.known.insert(statement.to_owned());
    }

    /// Has the connection closed after this use: something of it would show in the next.
    pub(super) fn retire(&mut self) {
        self.retired = true;
    }

    /// Whether a statement and its parameters fit into a packet.
    pub(super) fn has_room_for(&self, sql: &str, parameters: &[Value]) -> bool {
        sql.len().saturating_add(weight(parameters)) <= row_bytes(self.packet)
    }

    /// Runs a statement without parameters.
    pub(super) async fn run(&mut self, sql: &str) -> Result<(), EngineError> {
        self.answered(async |conn| conn.query_drop(sql).await).await
    }

    /// Runs a statement without parameters that cannot be prepared, and returns its rows.
    pub(super) async fn ask(&mut self, sql: &str) -> Result<Vec<Row>, EngineError> {
        self.answered(async |conn| conn.query(sql).await).await
    }

    /// Whether the server said, when it last ran a statement, that a transaction is open.
    pub(super) fn is_in_transaction(&self) -> bool {
        self.in_transaction
    }

    /// Waits for the answer to a statement that runs, and notes what it says of the transaction. (What the driver keeps of
    /// preparing says nothing of it.)
    async fn answered<T>(
        &mut self,
        ask: impl AsyncFnOnce(&mut Conn) -> Result<T, mysql_async::Error>,
    ) -> Result<T, EngineError> {
        let answer = in_time(self.patience, ask(&mut self.conn)).await?;
        let said = self.conn.last_ok_packet();
        self.in_transaction =
            said.is_some_and(|said| said.status_flags().contains(StatusFlags::SERVER_STATUS_IN_TRANS));
        Ok(answer)
    }

    /// The prepared form of a statement. Prepared once per connection.
    pub(super) async fn prepared(&mut self, sql: &str) -> Result<mysql_async::Statement, EngineError> {
        in_time(self.patience, self.conn.prep(sql)).await
    }

    /// Runs one statement and returns its rows.
    pub(super) async fn rows(&mut self, sql: &str, parameters: Vec<Value>) -> Result<Vec<Row>, EngineError> {
        self.answered(async |conn| conn.exec(sql, parameters).await).await
    }

    /// The same for a statement that is prepared already.
    pub(super) async fn rows_of(
        &mut self,
        statement: &mysql_async::Statement,
        parameters: Vec<Value>,
    ) -> Result<Vec<Row>, EngineError> {
        self.answered(async |conn| conn.exec(statement, parameters).await).await
    }

    /// The same; also tells how many rows it changed.
    pub(super) async fn answer_of(
        &mut self,
        statement: &mysql_async::Statement,
        parameters: Vec<Value>,
    ) -> Result<(Vec<Row>, u64), EngineError> {
        let rows = self.rows_of(statement, parameters).await?;
        Ok((rows, self.conn.affected_rows()))
    }

    /// Runs one statement and returns its first row.
    pub(super) async fn row(&mut self, sql: &str, parameters: Vec<Value>) -> Result<Option<Row>, EngineError> {
        Ok(self.rows(sql, parameters).await?.into_iter().next())
    }

    /// Runs one statement and returns how many rows it changed.
    pub(super) async fn change(&mut self, sql: &str, parameters: Vec<Value>) -> Result<u64, EngineError> {
        self.answered(async |conn| conn.exec_drop(sql, parameters).await).await?;
        Ok(self.conn.affected_rows())
    }

    /// Inserts rows, in their order, and returns how many rows were changed.
    ///
    /// Statements have 1, 2, 4 … rows, so that a few prepared ones serve every batch, and each fits into a packet.
    pub(super) async fn insert(&mut self, insert: Insert<'_>, rows: Vec<Vec<Value>>) -> Result<u64, EngineError> {
        let room = row_bytes(self.packet);
        let weights: Vec<usize> = rows.iter().map(|row| weight(row)).collect();
        if weights.iter().any(|weight| *weight > room) {
            return Err(too_big(self.packet));
        }
        let (mut rows, mut weights) = (rows.into_iter(), weights.as_slice());
        let mut changed = 0;
        while !weights.is_empty() {
            let mut count = 1;
            while count < ROWS_AT_ONCE
                && weights.get(..2 * count).is_some_and(|weights| weights.iter().sum::<usize>() <= room)
            {
                count *= 2;
            }
            weights = weights.get(count..).unwrap_or_default();
            let sql = format!("{} VALUES {}{}", insert.head, vec![insert.row; count].join(", "), insert.tail);
            changed += self.change(&sql, rows.by_ref().take(count).flatten().collect()).await?;
        }
        Ok(changed)
    }

    /// The same, with the rows column by column.
    pub(super) async fn insert_columns(
        &mut self,
        insert: Insert<'_>,
        columns: &[Column<'_>],
    ) -> Result<u64, EngineError> {
        self.insert(insert, super::value::rows(columns)).await
    }

    /// The database's time, or the one that was given.
    pub(super) async fn now(&mut self, given: Option<i64>) -> Result<i64, EngineError> {
        if let Some(now) = given {
            return Ok(now);
        }
        let row = self.row(&format!("SELECT {}", super::NOW), Vec::new()).await?;
        row.ok_or_else(EngineError::damaged)?.int(0)
    }
}

/// The bytes of a row in a packet, and some.
fn weight(row: &[Value]) -> usize {
    let bytes = |value: &Value| match value {
        Value::Bytes(bytes) => bytes.len() + 12,
        _ => 12,
    };
    row.iter().map(bytes).sum()
}

/// Connections to MariaDB or MySQL for one purpose.
pub(super) type Pool = pool::Pool<Mysql>;

impl engine::Session for Session {
    type Row = Row;

    async fn run(&mut self, sql: &str) -> Result<(), EngineError> {
        Session::run(self, sql).await
    }

    async fn rows(&mut self, sql: &str, params: &[Param<'_>]) -> Result<Vec<Row>, EngineError> {
        let (text, values) = self.texts.bind(sql, params)?;
        Session::rows(self, &text, values).await
    }

    async fn change(&mut self, sql: &str, params: &[Param<'_>]) -> Result<u64, EngineError> {
        let (text, values) = self.texts.bind(sql, params)?;
        // The server would end the connection. The row with the body is to blame, not the batch.
        if text.len().saturating_add(weight(&values)) > self.packet {
            return Err(too_big(self.packet));
        }
        Session::change(self, &text, values).await
    }

    async fn begin(&mut self, given: Option<i64>) -> Result<i64, EngineError> {
        self.now(given).await
    }

    async fn begin_single(&mut self, given: Option<i64>) -> Result<Option<i64>, EngineError> {
        self.now(given).await.map(Some)
    }

    async fn commit_single(&mut self) -> Result<(), EngineError> {
        Session::run(self, "COMMIT").await
    }
}

impl engine::Connected for Session {
    const BEGIN_READ: &'static str = "START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY";

    async fn database_time(&mut self) -> Result<i64, EngineError> {
        let now = self.now(None).await?;
        Session::run(self, "ROLLBACK").await?;
        Ok(now)
    }

    async fn survived(&mut self, idle: Duration) -> bool {
        // The connection does not tell when it was cut.
        idle <= IDLE_LENT && !self.conn.is_disconnected() && (idle <= IDLE_TRUSTED || self.is_alive().await)
    }

    fn is_closed(&self) -> bool {
        self.conn.is_disconnected()
    }

    async fn is_alive(&mut self) -> bool {
        in_time(PING_WAIT, self.conn.ping()).await.is_ok()
    }

    fn is_retired(&self) -> bool {
        self.retired
    }

    fn batch_bytes(&self) -> usize {
        self.packet / 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_name_hosts_and_a_database() {
        let time = Duration::from_secs(1);
        let shown = |url: &str| {
            read_url(url, time)
                .map(|known| crate::journal::server::engine::Engine::shown(&known))
                .map_err(|error| error.to_string())
        };
        assert_eq!(shown("mysql://me:p%40ss@one:3307,two/shop").unwrap(), "mysql://one:3307,two:3306/shop");
        assert_eq!(shown("mariadb://me@[::1]:3307/shop").unwrap(), "mysql://[::1]:3307/shop");
        for bad in
            ["mysql://me:hunter2@host", "mysql://me:hunter2@host:port/shop", "mysql://me:hunter2@host/shop?tsl=1"]
        {
            let told = shown(bad).unwrap_err();
            assert!(!told.contains("hunter2"), "{told}");
        }
    }
}
