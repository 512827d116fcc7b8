//! Would the user's statements work? Asked before the first event needs them, and for people who check a configuration.
//!
//! Promises: nothing is run and nothing is changed; a statement is prepared, which finds what is forbidden, misspelt or
//! missing.
//! Does not: know the tables of tomorrow. What does not fit now may fit when it is needed, and the other way round.

use std::time::Duration;

use super::connection::{Purpose, Session};
use super::engine_error::EngineError;
use super::user_sql::{self, Trouble};
use super::{Mysql, MysqlJournal, OpenError};
use crate::handler::SqlHandler;
use crate::journal::WorkError;
use crate::journal::server::engine::Engine;

/// A statement that would fail as the tables are now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Misfit {
    /// Which statement of the handler, from 1.
    pub statement: usize,
    /// Why.
    pub reason: String,
}

impl MysqlJournal {
    /// The statements of a handler that would fail as the tables are now.
    pub async fn rehearse(&self, handler: &SqlHandler) -> Result<Vec<Misfit>, WorkError> {
        let unavailable = |error: EngineError| WorkError::Unavailable(error.message);
        let mut session = self.workers.take().await.map_err(unavailable)?;
        let misfits = rehearse(&mut session, handler).await.map_err(unavailable)?;
        session.keep();
        Ok(misfits)
    }

    /// The same on a database that nobody needs to serve.
    pub async fn rehearse_in(url: &str, handler: &SqlHandler) -> Result<Vec<Misfit>, OpenError> {
        let mut session = Mysql::new(url, Duration::from_secs(10))?.open(Purpose::Work).await?;
        Ok(rehearse(&mut session, handler).await?)
    }

    /// The largest body that a database that nobody needs to serve can store.
    pub async fn largest_body_in(url: &str) -> Result<usize, OpenError> {
        let session = Mysql::new(url, Duration::from_secs(10))?.open(Purpose::Read).await?;
        Ok(session.largest_body())
    }
}

/// Why a statement may never run on this journal, whatever the tables are.
#[must_use]
pub fn forbidden(handler: &SqlHandler) -> Option<String> {
    handler.statements().iter().find_map(|statement| user_sql::refusal(statement.text()))
}

/// Whether a text can be used as the URL of a database. The error does not repeat it.
pub fn check_url(url: &str) -> Result<(), String> {
    Mysql::new(url, Duration::from_secs(1)).map(|_| ()).map_err(|error| error.to_string())
}

/// The hosts and the database that a URL leads to, without what is secret.
#[must_use]
pub fn shown_url(url: &str) -> String {
    Mysql::new(url, Duration::from_secs(1)).map_or_else(|_| "mysql".to_owned(), |known| known.shown())
}

pub(super) async fn rehearse(
    session: &mut Session,
    handler: &SqlHandler,
) -> Result<Vec<Misfit>, EngineError> {
    let mut misfits = Vec::new();
    for (place, statement) in handler.statements().iter().enumerate() {
        let reason = match user_sql::rehearse(session, statement.text()).await {
            Ok(()) => None,
            Err(Trouble::Failed(failure) | Trouble::Deferred(failure)) => Some(failure.message),
            Err(Trouble::Collision | Trouble::Ended(_)) => None,
            Err(Trouble::Engine(error)) => return Err(error),
        };
        misfits.extend(reason.map(|reason| Misfit { statement: place + 1, reason }));
    }
    session.run("COMMIT").await?;
    Ok(misfits)
}
