//! Handlers: what a route does with an event.
//!
//! - [`sql`]: statements that run inside the journal's transaction, so that effect and record commit together.
//! - [`elsewhere`]: statements in another database, guarded there.
//! - [`http`]: a request to the user's application, at least once with a stable key.
//! - [`function`]: Rust code that is given the open transaction.
//!
//! Handlers say what an attempt came to. When it is tried again, and that it is recorded, is not their matter.

pub mod elsewhere;
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(crate) mod entities;
pub mod function;
pub mod http;
pub mod sql;
mod value;

use std::sync::Arc;

pub use elsewhere::{Elsewhere, Guarded};
pub use function::Function;
#[cfg(feature = "mysql")]
pub use function::{MysqlTransaction, OnMysql};
#[cfg(feature = "postgres")]
pub use function::{OnPostgres, PostgresTransaction};
pub use http::{Fetch, FetchOptions, HttpHandler, HttpOptions, OnClientError};
pub use sql::{Dialect, SqlHandler};
pub use value::{Expression, Found, HeaderTemplate, Lookup, Template};

/// What a route does.
#[derive(Clone)]
pub enum Handler {
    /// Statements in the journal's database.
    Sql(Arc<SqlHandler>),
    /// Statements in another database.
    Elsewhere(Arc<Elsewhere>),
    /// A request to the user's application.
    Http(Arc<HttpHandler>),
    /// Rust code with the open transaction.
    Function(Arc<dyn Function>),
}

impl Handler {
    /// The word for people.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Sql(_) | Self::Elsewhere(_) => "sql",
            Self::Http(_) => "http",
            Self::Function(_) => "function",
        }
    }

    /// The database, if it is another one than the journal's, without what is secret.
    pub fn database(&self) -> Option<&str> {
        match self {
            Self::Elsewhere(elsewhere) => Some(elsewhere.database.shown()),
            Self::Sql(_) | Self::Http(_) | Self::Function(_) => None,
        }
    }
}

impl std::fmt::Debug for Handler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.kind())
    }
}
