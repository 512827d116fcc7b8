//! The small pools that connections wait in.
//!
//! Promises: every wait has a deadline; a connection on which anything went wrong, or whose caller went away half-way, is closed
//! and never lent again, so nothing inherits an open transaction.
//! Does not: retry. What an error means is the caller's to say.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Semaphore, SemaphorePermit};

use super::engine::{Connected, Engine, Purpose};
use super::error::EngineError;

/// The longest that a caller waits for a connection, and for an answer to one of our own statements.
pub(in crate::journal) const ANSWER_WAIT: Duration = Duration::from_secs(10);

/// Idle connections that a pool keeps.
const IDLE_KEPT: usize = 8;

/// Connections for one purpose, at most `permits` at once.
pub(in crate::journal) struct Pool<E: Engine> {
    pub(in crate::journal) engine: Arc<E>,
    purpose: Purpose,
    idle: Mutex<Vec<(E::Session, Instant)>>,
    permits: Semaphore,
}

impl<E: Engine> Pool<E> {
    pub(in crate::journal) fn new(engine: Arc<E>, purpose: Purpose, at_once: usize) -> Self {
        Self { engine, purpose, idle: Mutex::default(), permits: Semaphore::new(at_once) }
    }

    /// Lends a connection. It is closed when it is dropped, unless it is [kept](Lent::keep).
    pub(in crate::journal) async fn take(&self) -> Result<Lent<'_, E>, EngineError> {
        let permit = match tokio::time::timeout(ANSWER_WAIT, self.permits.acquire()).await {
            Ok(Ok(permit)) => permit,
            Ok(Err(_)) => return Err(EngineError::other("the journal is closed")),
            Err(_) => return Err(EngineError::other("no connection was free in time")),
        };
        loop {
            let idle = self.idle().pop();
            let session = match idle {
                None => self.engine.open(self.purpose).await?,
                Some((mut session, since)) => {
                    if !session.survived(since.elapsed()).await {
                        continue;
                    }
                    session
                }
            };
            return Ok(Lent { session, pool: self, _permit: permit });
        }
    }

    /// Refuses to lend from now on and closes what is idle.
    pub(in crate::journal) fn close(&self) {
        self.permits.close();
        self.forget_idle();
    }

    /// Closes idle connections, and with them the statements that were prepared there.
    pub(in crate::journal) fn forget_idle(&self) {
        self.idle().clear();
    }

    fn idle(&self) -> MutexGuard<'_, Vec<(E::Session, Instant)>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A connection on loan.
pub(in crate::journal) struct Lent<'p, E: Engine> {
    session: E::Session,
    pool: &'p Pool<E>,
    _permit: SemaphorePermit<'p>,
}

impl<E: Engine> Deref for Lent<'_, E> {
    type Target = E::Session;

    fn deref(&self) -> &E::Session {
        &self.session
    }
}

impl<E: Engine> DerefMut for Lent<'_, E> {
    fn deref_mut(&mut self) -> &mut E::Session {
        &mut self.session
    }
}

impl<E: Engine> Lent<'_, E> {
    /// Gives the connection back for the next caller, unless it is worn out. Only for one that is in no transaction.
    pub(in crate::journal) fn keep(self) {
        let mut idle = self.pool.idle();
        if idle.len() < IDLE_KEPT && !self.pool.permits.is_closed() && !self.session.is_retired() {
            idle.push((self.session, Instant::now()));
        }
    }
}
