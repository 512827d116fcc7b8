//! The front of all journals that last: one URL says which engine it is, and everything behind it is reached through
//! traits.
//!
//! Promises: a program that uses this front names no engine. Errors and [`Location::shown`] do not repeat a URL, which
//! may hold a password.
//! Does not: wait for a server that is away ([`OpenError::is_away`]); how long to wait is the caller's to decide.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use oncehook_verify::Secret;

#[cfg(any(feature = "postgres", feature = "mysql"))]
use super::server::{self, rehearse::checked_url, rehearse::refusal, rehearse::shown_url};
use super::{Deliveries, Journal, JournalReader, Misfit, ReadError};
use crate::clock::Clock;
use crate::handler::{Dialect, Guarded, SqlHandler};

#[cfg(feature = "mysql")]
use super::mysql::{Mysql, MysqlElsewhere, MysqlJournal};
#[cfg(feature = "postgres")]
use super::postgres::{Postgres, PostgresElsewhere, PostgresJournal};
#[cfg(feature = "sqlite")]
use super::sqlite::{self, SqliteJournal, SqliteOptions};

/// Where a journal is: in a file, or in a database on a server.
#[derive(Debug, Clone)]
pub struct Location(Kind);

#[derive(Debug, Clone)]
enum Kind {
    #[cfg(feature = "sqlite")]
    Sqlite(PathBuf),
    #[cfg(feature = "postgres")]
    Postgres(Secret),
    #[cfg(feature = "mysql")]
    Mysql(Secret),
}

/// How a journal is opened. What an engine does not know it ignores.
#[derive(Debug, Clone)]
pub struct OpenOptions {
    /// Where time comes from.
    pub clock: Clock,
    /// Open a file of which a part is missing all the same: what the operator has to say, once.
    pub accept_lost_log: bool,
    /// How many keys gather in memory before they are merged into the table. For tests; the usual value is best.
    #[doc(hidden)]
    pub ledger_generation: Option<usize>,
}

/// An open journal, by its three traits.
#[derive(Clone)]
pub struct Opened {
    /// For the front door.
    pub journal: Arc<dyn Journal>,
    /// For workers and operators.
    pub deliveries: Arc<dyn Deliveries>,
    /// For people.
    pub reader: Arc<dyn JournalReader>,
}

impl std::fmt::Debug for Opened {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Opened").field("journal", &self.journal.state()).finish_non_exhaustive()
    }
}

impl<J: Journal + Deliveries + JournalReader> From<Arc<J>> for Opened {
    fn from(journal: Arc<J>) -> Self {
        Self { journal: journal.clone(), deliveries: journal.clone(), reader: journal }
    }
}

/// Why a journal did not open, or its database could not be asked.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The file.
    #[cfg(feature = "sqlite")]
    #[error(transparent)]
    Sqlite(#[from] sqlite::OpenError),
    /// The database on a server.
    #[cfg(any(feature = "postgres", feature = "mysql"))]
    #[error(transparent)]
    Server(#[from] server::OpenError),
    /// Reading.
    #[error(transparent)]
    Read(#[from] ReadError),
}

impl OpenError {
    /// Whether the server cannot be reached, or cannot serve yet. Later it may.
    pub fn is_away(&self) -> bool {
        match self {
            #[cfg(any(feature = "postgres", feature = "mysql"))]
            Self::Server(server::OpenError::Away(_)) => true,
            _ => false,
        }
    }
}

impl Location {
    /// Reads a URL: `sqlite://PATH`, `postgres://…`, `mysql://…`, `mariadb://…`. The error does not repeat the URL of a
    /// server.
    pub fn parse(url: &str) -> Result<Self, String> {
        match url.split_once("://") {
            #[cfg(feature = "sqlite")]
            Some(("sqlite", "")) => {
                Err("what follows sqlite:// is the path of the file, such as sqlite://oncehook.db".to_owned())
            }
            #[cfg(feature = "sqlite")]
            Some(("sqlite", path)) => Ok(Self::file(path)),
            #[cfg(feature = "postgres")]
            Some(("postgres" | "postgresql", _)) => checked_url::<Postgres>(url).map(Kind::Postgres).map(Self),
            #[cfg(feature = "mysql")]
            Some(("mysql" | "mariadb", _)) => checked_url::<Mysql>(url).map(Kind::Mysql).map(Self),
            _ => Err("this is not a journal; write sqlite://PATH, postgres://USER@HOST/DATABASE or \
                      mysql://USER@HOST/DATABASE"
                .to_owned()),
        }
    }

    /// A file.
    #[cfg(feature = "sqlite")]
    pub fn file(path: impl Into<PathBuf>) -> Self {
        Self(Kind::Sqlite(path.into()))
    }

    /// The file, if it is one. One process alone can use a file.
    pub fn path(&self) -> Option<&Path> {
        match &self.0 {
            #[cfg(feature = "sqlite")]
            Kind::Sqlite(path) => Some(path),
            #[cfg(any(feature = "postgres", feature = "mysql"))]
            _ => None,
        }
    }

    /// The URL of its server. It may hold a password.
    pub fn url(&self) -> Option<&str> {
        match &self.0 {
            #[cfg(feature = "sqlite")]
            Kind::Sqlite(_) => None,
            #[cfg(feature = "postgres")]
            Kind::Postgres(url) => Some(url.reveal()),
            #[cfg(feature = "mysql")]
            Kind::Mysql(url) => Some(url.reveal()),
        }
    }

    /// How its engine writes parameters.
    pub fn dialect(&self) -> Dialect {
        match &self.0 {
            #[cfg(feature = "sqlite")]
            Kind::Sqlite(_) => Dialect::Sqlite,
            #[cfg(feature = "postgres")]
            Kind::Postgres(_) => Dialect::Postgres,
            #[cfg(feature = "mysql")]
            Kind::Mysql(_) => Dialect::Mysql,
        }
    }

    /// Where it is, for people: without what is secret.
    pub fn shown(&self) -> String {
        match &self.0 {
            #[cfg(feature = "sqlite")]
            Kind::Sqlite(path) => path.display().to_string(),
            #[cfg(feature = "postgres")]
            Kind::Postgres(url) => shown_url::<Postgres>(url.reveal()),
            #[cfg(feature = "mysql")]
            Kind::Mysql(url) => shown_url::<Mysql>(url.reveal()),
        }
    }

    /// Opens the journal, which has passed its self-test then. Must be called inside a tokio runtime. A file is opened
    /// by the calling thread.
    pub async fn open(&self, options: &OpenOptions) -> Result<Opened, OpenError> {
        let OpenOptions { clock, accept_lost_log, ledger_generation } = options.clone();
        Ok(match &self.0 {
            #[cfg(feature = "sqlite")]
            Kind::Sqlite(path) => {
                let mut options = SqliteOptions { clock, accept_lost_log, ..SqliteOptions::new(path) };
                options.ledger_generation = ledger_generation.unwrap_or(options.ledger_generation);
                Arc::new(SqliteJournal::open(&options)?).into()
            }
            #[cfg(feature = "postgres")]
            Kind::Postgres(url) => {
                let options = server::ServerOptions { clock, ..server::ServerOptions::new(url.reveal()) };
                Arc::new(PostgresJournal::open(&options).await?).into()
            }
            #[cfg(feature = "mysql")]
            Kind::Mysql(url) => {
                let options = server::ServerOptions { clock, ..server::ServerOptions::new(url.reveal()) };
                Arc::new(MysqlJournal::open(&options).await?).into()
            }
        })
    }

    /// Makes or upgrades the tables, proves that keys are remembered, and stops. Returns what was applied.
    pub async fn migrate(&self) -> Result<Vec<String>, OpenError> {
        Ok(match &self.0 {
            #[cfg(feature = "sqlite")]
            Kind::Sqlite(path) => SqliteJournal::migrate(path, &Clock::system())?,
            #[cfg(feature = "postgres")]
            Kind::Postgres(url) => PostgresJournal::migrate(url.reveal()).await?,
            #[cfg(feature = "mysql")]
            Kind::Mysql(url) => MysqlJournal::migrate(url.reveal()).await?,
        })
    }

    /// The statements of a handler that would fail as the tables are now. For a journal that is not open.
    pub async fn rehearse(&self, handler: &SqlHandler) -> Result<Vec<Misfit>, OpenError> {
        Ok(match &self.0 {
            #[cfg(feature = "sqlite")]
            Kind::Sqlite(path) => SqliteJournal::rehearse_in(path, handler)?,
            #[cfg(feature = "postgres")]
            Kind::Postgres(url) => PostgresJournal::rehearse_in(url.reveal(), handler).await?,
            #[cfg(feature = "mysql")]
            Kind::Mysql(url) => MysqlJournal::rehearse_in(url.reveal(), handler).await?,
        })
    }

    /// The largest body that its database stores. Only where the server has a say in that is it asked.
    pub async fn largest_body(&self) -> Result<usize, OpenError> {
        match &self.0 {
            #[cfg(feature = "mysql")]
            Kind::Mysql(url) => Ok(MysqlJournal::largest_body_in(url.reveal()).await?),
            #[cfg(any(feature = "sqlite", feature = "postgres"))]
            _ => Ok(usize::MAX),
        }
    }
}

/// A database for the effects of routes that is not the journal's, and how it writes parameters. The error does not
/// repeat the URL.
pub fn external(url: &str) -> Result<(Arc<dyn Guarded>, Dialect), String> {
    match url.split_once("://") {
        #[cfg(feature = "postgres")]
        Some(("postgres" | "postgresql", _)) => {
            let database = PostgresElsewhere::new(url).map_err(|error| error.to_string())?;
            Ok((Arc::new(database), Dialect::Postgres))
        }
        #[cfg(feature = "mysql")]
        Some(("mysql" | "mariadb", _)) => {
            let database = MysqlElsewhere::new(url).map_err(|error| error.to_string())?;
            Ok((Arc::new(database), Dialect::Mysql))
        }
        Some(("sqlite", _)) => {
            Err("another SQLite file cannot be guarded; leave `database` out and keep your tables in \
                                    the journal's file"
                .to_owned())
        }
        _ => Err("a database is a URL such as postgres://user@host/name or mysql://user@host/name".to_owned()),
    }
}

/// Why a statement of a handler may never run on an engine, whatever the tables are.
pub fn forbidden(handler: &SqlHandler, dialect: Dialect) -> Option<String> {
    match dialect {
        #[cfg(feature = "postgres")]
        Dialect::Postgres => refusal::<Postgres>(handler),
        #[cfg(feature = "mysql")]
        Dialect::Mysql => refusal::<Mysql>(handler),
        _ => None,
    }
}
