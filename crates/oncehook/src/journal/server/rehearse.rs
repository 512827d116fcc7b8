//! Would the user's statements work? Asked before the first event needs them, and for people who check a configuration.
//!
//! Promises: nothing is run and nothing is changed; a statement is prepared, which finds what is forbidden, misspelt or
//! missing.
//! Does not: know the tables of tomorrow. What does not fit now may fit when it is needed, and the other way round.

use std::time::Duration;

use super::engine::{Purpose, Session};
use super::error::EngineError;
use super::user_sql::{Trouble, UserSql};
use super::{OpenError, ServerJournal, work};
use crate::handler::SqlHandler;
use crate::journal::WorkError;

/// A statement that would fail as the tables are now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Misfit {
    /// Which statement of the handler, from 1.
    pub statement: usize,
    /// Why.
    pub reason: String,
}

#[expect(private_bounds, reason = "engines are this crate's own")]
impl<E: UserSql> ServerJournal<E> {
    /// The statements of a handler that would fail as the tables are now.
    pub async fn rehearse(&self, handler: &SqlHandler) -> Result<Vec<Misfit>, WorkError> {
        let mut session = self.workers.take().await.map_err(work::unavailable)?;
        let misfits = misfits::<E>(&mut session, handler).await.map_err(work::unavailable)?;
        session.keep();
        Ok(misfits)
    }

    /// The same on a database that is not served.
    pub async fn rehearse_in(url: &str, handler: &SqlHandler) -> Result<Vec<Misfit>, OpenError> {
        let mut session = E::new(url, Duration::from_secs(10))?.open(Purpose::Work).await?;
        Ok(misfits::<E>(&mut session, handler).await?)
    }
}

/// On a connection that is in no transaction.
pub(super) async fn misfits<E: UserSql>(
    session: &mut E::Session,
    handler: &SqlHandler,
) -> Result<Vec<Misfit>, EngineError> {
    let mut misfits = Vec::new();
    for (place, statement) in handler.statements().iter().enumerate() {
        let reason = match E::rehearse(session, statement.text()).await {
            Ok(()) | Err(Trouble::Collision | Trouble::Ended(_)) => None,
            Err(Trouble::Failed(failure) | Trouble::Deferred(failure)) => Some(failure.message),
            Err(Trouble::Engine(error)) => return Err(error),
        };
        misfits.extend(reason.map(|reason| Misfit { statement: place + 1, reason }));
    }
    session.commit_single().await?;
    Ok(misfits)
}
