//! Would the user's statements work? Asked before the first event needs them, and for people who check a configuration.
//!
//! Promises: nothing is run and nothing is changed; a statement is prepared, which finds what is forbidden, misspelt or
//! missing.
//! Does not: know the tables of tomorrow. What does not fit now may fit when it is needed, and the other way round.

use std::time::Duration;

use oncehook_verify::Secret;

use super::engine::{Engine, Purpose, Session};
use super::error::EngineError;
use super::user_sql::{Trouble, UserSql};
use super::work::unavailable;
use super::{OpenError, ServerJournal};
use crate::handler::SqlHandler;
use crate::journal::{Misfit, WorkError};

#[expect(private_bounds, reason = "engines are this crate's own")]
impl<E: UserSql> ServerJournal<E> {
    /// The statements of a handler that would fail as the tables are now.
    pub(super) async fn try_out(&self, handler: &SqlHandler) -> Result<Vec<Misfit>, WorkError> {
        let mut session = self.workers.take().await.map_err(unavailable)?;
        let misfits = rehearse::<E>(&mut session, handler).await.map_err(unavailable)?;
        session.keep();
        Ok(misfits)
    }

    /// The same on a database that no journal needs to serve.
    pub async fn rehearse_in(url: &str, handler: &SqlHandler) -> Result<Vec<Misfit>, OpenError> {
        let mut session = E::new(url, Duration::from_secs(10))?.open(Purpose::Work).await?;
        Ok(rehearse::<E>(&mut session, handler).await?)
    }

    /// The largest body that a database can store that no journal needs to serve.
    pub async fn largest_body_in(url: &str) -> Result<usize, OpenError> {
        let engine = E::new(url, Duration::from_secs(10))?;
        engine.open(Purpose::Read).await?;
        Ok(engine.largest_body())
    }
}

/// Why a statement may never run on this engine, whatever the tables are.
pub(in crate::journal) fn refusal<E: UserSql>(handler: &SqlHandler) -> Option<String> {
    handler.statements().iter().find_map(|statement| E::refusal(statement.text()))
}

/// A text that can be used as the URL of a database. The error does not repeat it.
pub(in crate::journal) fn checked_url<E: Engine>(url: &str) -> Result<Secret, String> {
    E::new(url, Duration::from_secs(1)).map_err(|error| error.to_string())?;
    Secret::new(url).map_err(|error| error.to_string())
}

/// The hosts and the database that a URL leads to, without what is secret.
pub(in crate::journal) fn shown_url<E: Engine>(url: &str) -> String {
    E::new(url, Duration::from_secs(1)).map_or_else(|_| E::KIND.to_owned(), |known| known.shown())
}

/// The statements of a handler that would fail as the tables are now.
pub(in crate::journal) async fn rehearse<E: UserSql>(
    session: &mut E::Session,
    handler: &SqlHandler,
) -> Result<Vec<Misfit>, EngineError> {
    let mut misfits = Vec::new();
    for (place, statement) in handler.statements().iter().enumerate() {
        let reason = match E::checked(session, statement.text()).await {
            Ok(_) | Err(Trouble::Collision | Trouble::Ended(_)) => None,
            Err(Trouble::Failed(failure) | Trouble::Deferred(failure)) => Some(failure.message),
            Err(Trouble::Engine(error)) => return Err(error),
        };
        misfits.extend(reason.map(|reason| Misfit { statement: place + 1, reason }));
    }
    session.commit_single().await?;
    Ok(misfits)
}
