//! Watches which life of the database this is. See [`Incarnation`](crate::journal::Incarnation); what its name is made of
//! stands in the engine.
//!
//! A connection of its own is asked now and then, and is looked at more often. While it is gone or silent the identity is in
//! doubt, and nothing that receipts said before is believed. What that leaves: a server that is replaced by another one is
//! noticed when the connection breaks, within a few seconds if it just falls silent.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::time::timeout;

use super::engine::{Connected, Engine, Purpose};
use super::error::EngineError;
use super::shared::Shared;
use crate::retry::{Chance, Reconnect};

/// How often the connection is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// The longest that the answer may take.
const ANSWER: Duration = Duration::from_secs(2);

/// The name of the present life.
pub(super) async fn name<E: Engine>(engine: &E, session: &mut E::Session) -> Result<String, EngineError> {
    match timeout(ANSWER, engine.identity(session)).await {
        Ok(name) => name,
        Err(_) => Err(EngineError::away("no answer about the database's identity in time")),
    }
}

/// Keeps asking until the journal is closed or gone.
pub(super) async fn watch<E: Engine>(shared: Arc<Shared>, engine: Arc<E>, mut end: watch::Receiver<bool>) {
    let mut session: Option<E::Session> = None;
    let mut asked: Option<Instant> = None;
    let mut reconnect = Reconnect::new(Chance::random());
    loop {
        let mut wait = LOOK_EVERY;
        if session.as_ref().is_some_and(Connected::is_closed) {
            session = None;
            shared.incarnation.doubt();
        }
        if session.is_none() || asked.is_none_or(|at| at.elapsed() >= E::IDENTITY_EVERY) {
            let answer = match &mut session {
                Some(session) => name(engine.as_ref(), session).await,
                None => match engine.open(Purpose::Work).await {
                    Ok(anew) => name(engine.as_ref(), session.insert(anew)).await,
                    Err(error) => Err(error),
                },
            };
            match answer {
                Ok(name) => {
                    shared.incarnation.confirm(&name);
                    asked = Some(Instant::now());
                    reconnect.is_back();
                }
                Err(_) => {
                    session = None;
                    shared.incarnation.doubt();
                    wait = reconnect.wait().max(LOOK_EVERY);
                }
            }
        }
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            _ = end.changed() => return,
        }
    }
}
