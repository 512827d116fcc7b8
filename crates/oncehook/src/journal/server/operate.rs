//! Orders and forgetting on a database server: a connection, and again after a collision.

use std::sync::PoisonError;

use super::ServerJournal;
use super::engine::{Engine, Session as _};
use super::work::work;
use crate::journal::sql::{forget, operate};
use crate::journal::{Forgotten, Order, OrderError, Ordered, Retention, WorkError};

/// Carries an order out, and again if another transaction got in its way.
pub(super) async fn order<E: Engine>(journal: &ServerJournal<E>, order: &Order) -> Result<Ordered, OrderError> {
    let given = journal.shared.given_time();
    let ordered = work!(journal, |session| operate::order(&mut *session, given, order))??;
    journal.shared.changed();
    Ok(ordered)
}

/// Forgets a batch, and remembers where the round is then.
pub(super) async fn forget<E: Engine>(
    journal: &ServerJournal<E>,
    retention: &Retention,
) -> Result<Forgotten, WorkError> {
    let (given, wall) = (journal.shared.given_time(), journal.shared.clock.now().0);
    let round = || journal.round.lock().unwrap_or_else(PoisonError::into_inner);
    let at = round().clone();
    let (forgotten, next) = work!(journal, |session| forget::batch(&mut *session, given, wall, &at, retention))?;
    *round() = next;
    Ok(forgotten)
}
