//! The mistake [`Bug::NormalSync`] on PostgreSQL. Only in builds with the feature `planted`.

use super::connection::{self, EngineError, Purpose, Session};
use crate::planted::{Bug, has};

/// Checks a new connection as [`connection::check_ground`] does, and then has its commits answered before they are synced.
pub(super) async fn check_ground(session: &Session, purpose: Purpose) -> Result<(), EngineError> {
    connection::check_ground(session, purpose).await?;
    if has(Bug::NormalSync) { session.run("SET synchronous_commit = off").await } else { Ok(()) }
}
