//! The tables of a server journal: made by one migration, and compared with what this program expects before it uses them.
//!
//! Promises: of several nodes that start at once one makes the tables; a journal that another version made, or that was
//! changed since, is refused (`journal::migration`).
//!
//! Does not: know a catalogue. The texts and the locks are the engine's.

use std::future::Future;

use super::OpenError;
use super::engine::{Engine, Session};
use super::error::EngineError;
use super::value::Row;
use crate::journal::migration::{Migration, compare};

/// What an engine says about its tables.
pub(in crate::journal) trait Schema: Engine {
    const MIGRATION: Migration;
    /// Returns the names and digests of the migrations that were applied.
    const RECORDED: &'static str;
    /// `$1`: name, `$2`: digest of a migration.
    const RECORD: &'static str;
    /// Returns what the catalogue says about our tables: a line for each table, column, index, trigger and rule.
    const SHAPE: &'static str;
    /// What it says about the tables that the migration makes. A test makes a schema and compares.
    const EXPECTED: &'static str;

    /// Lets one node at a time go on, and makes the table of migrations where it is missing.
    fn begin_migration(&self, session: &mut Self::Session) -> impl Future<Output = Result<(), OpenError>> + Send;
    /// Runs the migration.
    fn make_tables(session: &mut Self::Session) -> impl Future<Output = Result<(), EngineError>> + Send;
    /// Commits, and lets other nodes go on.
    fn end_migration(session: &mut Self::Session) -> impl Future<Output = Result<(), EngineError>> + Send;
    /// Lines that must be there because of others that were found.
    fn expected_for(_found: &[String]) -> Vec<String> {
        Vec::new()
    }
}

/// Makes the tables where there are none. Safe to repeat, and safe to be killed at any moment. Returns what was applied.
pub(super) async fn migrate<E: Schema>(engine: &E, session: &mut E::Session) -> Result<Vec<String>, OpenError> {
    engine.begin_migration(session).await?;
    let rows = session.rows(E::RECORDED, &[]).await?;
    let recorded = rows.iter().map(|row| Ok((row.text(0)?, row.text(1)?))).collect::<Result<Vec<_>, EngineError>>()?;
    let due = E::MIGRATION.is_due(&recorded).map_err(OpenError::Schema)?;
    if due {
        E::make_tables(session).await?;
        session.change(E::RECORD, &[E::MIGRATION.name.into(), (&E::MIGRATION.digest()).into()]).await?;
    }
    E::end_migration(session).await?;
    Ok(due.then(|| E::MIGRATION.name.to_owned()).into_iter().collect())
}

/// Compares our part of the catalogue with what the migration makes. This is what finds a renamed column, a dropped, invalid
/// or changed unique key and a folding collation (fault 105) before the first request.
pub(super) async fn check<E: Schema>(session: &mut E::Session) -> Result<(), OpenError> {
    let found = shape::<E>(session).await?;
    let also = E::expected_for(&found);
    let expected = E::EXPECTED.lines().chain(also.iter().map(String::as_str));
    compare(expected, found.iter().map(String::as_str)).map_err(OpenError::Schema)
}

/// Our part of the catalogue.
pub(super) async fn shape<E: Schema>(session: &mut E::Session) -> Result<Vec<String>, OpenError> {
    let rows = session.rows(E::SHAPE, &[]).await?;
    session.commit_single().await?;
    let mut lines = rows.iter().map(|row| row.text(0)).collect::<Result<Vec<_>, _>>()?;
    lines.sort_unstable();
    Ok(lines)
}
