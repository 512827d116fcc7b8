//! What is known of entities in an external database: rows beside the guards, locked while an effect happens and
//! changed in its transaction.
//!
//! Promises: rows are locked in the order of names, so that two batches do not deadlock. The transaction that holds
//! them sees what was committed last.
//!
//! Does not: decide anything (`handler::entities`), or forget: a machine's state has no age.

use std::collections::{BTreeMap, BTreeSet};

use super::super::engine::Session;
use super::super::error::EngineError;
use super::super::value::{Column, Param, Row};
use super::Guards;
use crate::handler::elsewhere::Comparison;
use crate::handler::entities::Standings;
use crate::ordering::{Mark, Standing};

/// Locks entities until the transaction ends, also those that are not known yet. Waits for a transaction that holds
/// one.
pub(super) async fn lock<'c, E: Guards>(
    session: &mut E::Session,
    journal: i64,
    comparison: &'c Comparison,
    entities: &BTreeSet<&str>,
) -> Result<Standings<'c>, EngineError> {
    if entities.is_empty() {
        return Ok(Standings::new(comparison, BTreeMap::new()));
    }
    let params = [Param::texts(entities.iter().copied()), journal.into(), (&comparison.scope).into()];
    session.change(E::GUARD.add_entities, &params).await?;
    let rows = session.rows(E::GUARD.lock_entities, &params).await?;
    if rows.len() != entities.len() {
        return Err(EngineError::other("what is known of an entity is gone that was written a moment ago"));
    }
    let known = |row: &<E::Session as Session>::Row| {
        let newest = Mark { version: row.maybe_int(1)?, at: row.maybe_time(2)? };
        Ok((row.text(0)?, Standing { newest, state: row.maybe_text(3)?, version: row.int(4)? }))
    };
    let known: Result<BTreeMap<String, Standing>, EngineError> = rows.iter().map(known).collect();
    Ok(Standings::new(comparison, known?))
}

/// Keeps what has changed. Every effect raises the version, so a row that is there is changed.
pub(super) async fn keep<E: Guards>(
    session: &mut E::Session,
    journal: i64,
    comparison: &Comparison,
    standings: &Standings<'_>,
) -> Result<(), EngineError> {
    let (entities, moved): (Vec<&str>, Vec<&Standing>) = standings.moved().unzip();
    if moved.is_empty() {
        return Ok(());
    }
    let columns = vec![
        Column::texts(entities),
        Column::ints(moved.iter().map(|known| known.version)),
        Column::Ints(moved.iter().map(|known| known.newest.version).collect()),
        Column::Ints(moved.iter().map(|known| known.newest.at.map(|at| at.0)).collect()),
        Column::Texts(moved.iter().map(|known| known.state.as_deref()).collect()),
    ];
    let params = [Param::Table(columns), journal.into(), (&comparison.scope).into()];
    let kept = session.change(E::GUARD.keep_entities, &params).await?;
    match usize::try_from(kept) {
        Ok(kept) if kept == moved.len() => Ok(()),
        _ => Err(EngineError::other("what is known of an entity is gone that was locked a moment ago")),
    }
}
