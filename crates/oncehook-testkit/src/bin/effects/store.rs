//! Where a journal lives while it is measured: a file, or a database on a server that this process starts.
//!
//! Promises: every store is new and has the user's table `orders`; [`Store::cost`] counts all processor time of a server, of
//! backends that have ended too.
//! Does not: remove a server's databases before the program ends (a directory goes with its store, a server with the process).
//! What a program that was killed has left behind goes when the next one makes a store.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use oncehook::clock::Clock;
use oncehook::handler::Dialect;
use oncehook::journal::mysql::{MysqlJournal, MysqlOptions};
use oncehook::journal::postgres::{PostgresJournal, PostgresOptions};
use oncehook::journal::sqlite::{SqliteJournal, SqliteOptions};
use oncehook_testkit::deliveries::WholeJournal;
use oncehook_testkit::mysql;
use oncehook_testkit::postgres::{Database, Server};
use rusqlite::Connection;

/// The user's statement.
pub const INSERT: &str =
    "INSERT INTO orders (payment, amount, event_key) VALUES (:payment, :amount, :key) ON CONFLICT (payment) DO NOTHING";

/// Which journal is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Engine {
    Sqlite,
    Postgres,
    Mysql,
}

impl Engine {
    /// As reports name it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sqlite => "SQLite",
            Self::Postgres => "PostgreSQL",
            Self::Mysql => "MariaDB",
        }
    }

    pub fn dialect(self) -> Dialect {
        match self {
            Self::Sqlite => Dialect::Sqlite,
            Self::Postgres => Dialect::Postgres,
            Self::Mysql => Dialect::Mysql,
        }
    }

    /// The user's statement in the engine's words.
    pub fn statement(self) -> &'static str {
        match self {
            Self::Sqlite | Self::Postgres => INSERT,
            Self::Mysql => {
                "INSERT INTO orders (payment, amount, event_key) VALUES (:payment, :amount, :key) ON DUPLICATE KEY UPDATE payment = payment"
            }
        }
    }

    /// The user's table.
    fn table(self) -> &'static str {
        match self {
            Self::Sqlite => {
                // Pages as a gateway makes them, which it would if the user's table were not there first.
                "PRAGMA page_size = 8192;
                 CREATE TABLE orders
                   (id INTEGER PRIMARY KEY, payment TEXT NOT NULL UNIQUE, amount INTEGER NOT NULL, event_key TEXT NOT NULL)"
            }
            Self::Postgres => {
                "CREATE TABLE orders
                   (id bigserial PRIMARY KEY, payment text NOT NULL UNIQUE, amount bigint NOT NULL, event_key text NOT NULL)"
            }
            Self::Mysql => {
                "CREATE TABLE orders
                   (id BIGINT AUTO_INCREMENT PRIMARY KEY, payment VARCHAR(64) NOT NULL UNIQUE, amount BIGINT NOT NULL, event_key VARCHAR(255) NOT NULL)"
            }
        }
    }
}

/// How the names of our directories begin; the id of their process follows.
const PREFIX: &str = "effects-";

/// Removes directories of processes that are gone.
fn sweep(target: &Path) -> anyhow::Result<()> {
    for entry in std::fs::read_dir(target)? {
        let entry = entry?;
        let name = entry.file_name();
        let owner = name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.split('-').next());
        if owner.is_some_and(|pid| pid.parse::<u32>().is_ok() && !Path::new("/proc").join(pid).exists()) {
            std::fs::remove_dir_all(entry.path())?;
        }
    }
    Ok(())
}

/// The server for MariaDB's stores: with as much memory as one that has so much to keep would have.
fn mariadb() -> &'static mysql::Server {
    static SERVER: OnceLock<mysql::Server> = OnceLock::new();
    SERVER.get_or_init(|| {
        mysql::Server::start(&["--innodb-buffer-pool-size=3G", "--innodb-log-file-size=2G", "--max-allowed-packet=64M"])
    })
}

/// A new place for a journal.
pub enum Store {
    Sqlite(tempfile::TempDir),
    Postgres(Database<'static>),
    Mysql(mysql::Database<'static>),
}

impl Store {
    pub fn new(engine: Engine) -> anyhow::Result<Self> {
        let store = match engine {
            Engine::Sqlite => {
                let target = std::env::current_dir()?.join("target");
                std::fs::create_dir_all(&target)?;
                sweep(&target)?;
                let name = format!("{PREFIX}{}-", std::process::id());
                Self::Sqlite(tempfile::Builder::new().prefix(&name).tempdir_in(target)?)
            }
            Engine::Postgres => Self::Postgres(Server::shared().database()),
            Engine::Mysql => Self::Mysql(mariadb().database()),
        };
        store.run(engine.table())?;
        Ok(store)
    }

    pub fn engine(&self) -> Engine {
        match self {
            Self::Sqlite(_) => Engine::Sqlite,
            Self::Postgres(_) => Engine::Postgres,
            Self::Mysql(_) => Engine::Mysql,
        }
    }

    /// Opens the journal.
    pub async fn open(&self, clock: &Clock) -> anyhow::Result<Arc<dyn WholeJournal>> {
        let clock = clock.clone();
        Ok(match self {
            Self::Sqlite(directory) => {
                let path = directory.path().join("bench.db");
                Arc::new(SqliteJournal::open(&SqliteOptions { clock, ..SqliteOptions::new(path) })?)
            }
            Self::Postgres(database) => {
                let options = PostgresOptions { clock, ..PostgresOptions::new(database.url()) };
                Arc::new(PostgresJournal::open(&options).await?)
            }
            Self::Mysql(database) => {
                let options = MysqlOptions { clock, ..MysqlOptions::new(database.url()) };
                Arc::new(MysqlJournal::open(&options).await?)
            }
        })
    }

    /// What a gateway's configuration calls the journal.
    pub fn url(&self) -> String {
        match self {
            Self::Sqlite(directory) => format!("sqlite://{}", directory.path().join("bench.db").display()),
            Self::Postgres(database) => database.url(),
            Self::Mysql(database) => database.url(),
        }
    }

    /// The file of an embedded journal.
    pub fn file(&self) -> anyhow::Result<Connection> {
        match self {
            Self::Sqlite(directory) => Ok(Connection::open(directory.path().join("bench.db"))?),
            Self::Postgres(_) | Self::Mysql(_) => anyhow::bail!("this journal is not a file"),
        }
    }

    /// Runs statements.
    pub fn run(&self, sql: &str) -> anyhow::Result<()> {
        match self {
            Self::Sqlite(_) => self.file()?.execute_batch(sql)?,
            Self::Postgres(database) => {
                database.try_query(sql).map_err(anyhow::Error::msg)?;
            }
            Self::Mysql(database) => {
                database.try_query(sql).map_err(anyhow::Error::msg)?;
            }
        }
        Ok(())
    }

    /// One number.
    pub fn number(&self, sql: &str) -> anyhow::Result<i64> {
        Ok(match self {
            Self::Sqlite(_) => self.file()?.query_row(sql, [], |row| row.get(0))?,
            Self::Postgres(database) => database.try_query(sql).map_err(anyhow::Error::msg)?.parse()?,
            Self::Mysql(database) => database.try_query(sql).map_err(anyhow::Error::msg)?.parse()?,
        })
    }

    /// How many orders there are; on MariaDB how many there may be, because numbers that were not used are lost.
    pub fn applied(&self) -> anyhow::Result<usize> {
        let sql = match self {
            Self::Sqlite(_) => "SELECT coalesce(max(id), 0) FROM orders",
            // Asking a server costs the machine something; the sequence is one row.
            Self::Postgres(_) => "SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM orders_id_seq",
            Self::Mysql(_) => "SELECT COALESCE(MAX(id), 0) FROM orders",
        };
        Ok(usize::try_from(self.number(sql)?)?)
    }

    /// Whether there are so many orders, counted where their numbers do not tell. Asked when they say so.
    pub fn has_applied(&self, wanted: usize) -> anyhow::Result<bool> {
        match self {
            Self::Sqlite(_) | Self::Postgres(_) => Ok(true),
            Self::Mysql(_) => Ok(usize::try_from(self.number("SELECT COUNT(*) FROM orders")?)? >= wanted),
        }
    }

    /// What was spent so far.
    pub fn cost(&self) -> anyhow::Result<Cost> {
        let own = processor_micros(std::process::id());
        match self {
            Self::Sqlite(_) => Ok(Cost { own, server: 0.0, log: 0.0 }),
            Self::Postgres(database) => {
                let sql = "SELECT split_part(pg_read_file('postmaster.pid'), E'\\n', 1) || ' '
                               || (pg_current_wal_lsn() - '0/0'::pg_lsn)";
                let told = database.try_query(sql).map_err(anyhow::Error::msg)?;
                let (server, log) = told.split_once(' ').unwrap_or_default();
                Ok(Cost { own, server: server_micros(server.parse()?), log: log.parse()? })
            }
            Self::Mysql(_) => Ok(Cost { own, server: processor_micros(mariadb().pid()), log: 0.0 }),
        }
    }
}

/// Processor time in microseconds, and bytes of a server's log.
#[derive(Debug, Clone, Copy, Default)]
pub struct Cost {
    pub own: f64,
    pub server: f64,
    pub log: f64,
}

impl Cost {
    /// What was spent since, for each of so many.
    pub fn each(self, since: Self, count: usize) -> Self {
        let each = |now: f64, then: f64| (now - then) / count as f64;
        Self { own: each(self.own, since.own), server: each(self.server, since.server), log: each(self.log, since.log) }
    }
}

impl std::fmt::Display for Cost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CPU {:.1} µs here", self.own)?;
        if self.server > 0.0 {
            write!(f, ", {:.1} µs in the server, {:.0} bytes of log", self.server, self.log)?;
        }
        Ok(())
    }
}

/// A server's time: its own, that of children which have ended, and that of those which live.
fn server_micros(pid: u32) -> f64 {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    let living = children.split_whitespace().filter_map(|child| child.parse().ok());
    ticks(pid, 4) * 10_000.0 + living.map(processor_micros).sum::<f64>()
}

fn processor_micros(pid: u32) -> f64 {
    // The kernel counts in hundredths of a second.
    ticks(pid, 2) * 10_000.0
}

/// The sum of a process's first times: user, system, and those of its ended children.
fn ticks(pid: u32, count: usize) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let after_name = stat.rsplit(')').next().unwrap_or_default();
    after_name.split_whitespace().skip(11).take(count).filter_map(|ticks| ticks.parse::<f64>().ok()).sum()
}
