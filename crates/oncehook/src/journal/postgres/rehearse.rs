//! Questions about a configuration that need no journal.

use std::time::Duration;

use super::{Postgres, user_sql};
use crate::handler::SqlHandler;
use crate::journal::server::engine::Engine;
pub use crate::journal::server::rehearse::Misfit;

/// Why a statement may never run on this journal, whatever the tables are.
#[must_use]
pub fn forbidden(handler: &SqlHandler) -> Option<String> {
    handler.statements().iter().find_map(|statement| user_sql::refusal(statement.text()))
}

/// Whether a text can be used as the URL of a database. The error does not repeat it.
pub fn check_url(url: &str) -> Result<(), String> {
    Postgres::new(url, Duration::from_secs(1)).map(|_| ()).map_err(|error| error.to_string())
}

/// The hosts and the database that a URL leads to, without what is secret.
#[must_use]
pub fn shown_url(url: &str) -> String {
    Postgres::new(url, Duration::from_secs(1)).map_or_else(|_| "postgres".to_owned(), |known| known.shown())
}
