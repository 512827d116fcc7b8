//! What is known of entities in a database that is not the journal's: their rows beside the guards, locked while an effect
//! happens and changed in its transaction.
//!
//! Promises: rows are locked in the order of names, so that two batches do not deadlock; whoever holds them sees what was committed
//! last.
//!
//! Does not: decide anything (`handler::entities`), or forget: a machine's state has no age.

use std::collections::{BTreeMap, BTreeSet};

use oncehook_verify::UnixMicros;
use tokio_postgres::Row;

use super::connection::{EngineError, Session};
use crate::handler::elsewhere::Comparison;
use crate::handler::entities::Standings;
use crate::ordering::{Mark, Standing};

pub(super) const NAME: &str = "oncehook_guard.oncehook_applied_entities";

/// `version` counts effects, `newest` and `last_at` are those of the newest one; `journal` says whose entity it is, because several
/// gateways may use the database.
pub(super) const TABLE: &str = r#"CREATE TABLE oncehook_guard.oncehook_applied_entities (
  journal bigint NOT NULL,
  scope   text COLLATE "C" NOT NULL,
  entity  text COLLATE "C" NOT NULL,
  version bigint NOT NULL DEFAULT 0,
  newest  bigint,
  last_at bigint,
  state   text COLLATE "C",
  CONSTRAINT applied_entities_once PRIMARY KEY (journal, scope, entity)
) WITH (fillfactor = 90)"#;

/// What the catalogue says about it.
pub(super) const EXPECTED: [&str; 9] = [
    "column entity text not null collate C",
    "column journal bigint not null",
    "column last_at bigint",
    "column newest bigint",
    "column scope text not null collate C",
    "column state text collate C",
    "column version bigint not null",
    "key applied_entities_once (journal,scope,entity)",
    "table r logged",
];

/// Locks entities until the transaction ends, those too that are not known yet. Who holds one is waited for.
pub(super) async fn lock<'c>(
    session: &Session,
    journal: i64,
    comparison: &'c Comparison,
    entities: &BTreeSet<&str>,
) -> Result<Standings<'c>, EngineError> {
    let names: Vec<&str> = entities.iter().copied().collect();
    if names.is_empty() {
        return Ok(Standings::new(comparison, BTreeMap::new()));
    }
    let scope = comparison.scope.as_str();
    session
        .change(
            "INSERT INTO oncehook_guard.oncehook_applied_entities (journal, scope, entity)
             SELECT $1, $2, t.entity FROM unnest($3::text[]) AS t(entity) ORDER BY t.entity COLLATE \"C\"
             ON CONFLICT (journal, scope, entity) DO NOTHING",
            &[&journal, &scope, &names],
        )
        .await?;
    let rows = session
        .rows(
            "SELECT entity, newest, last_at, state, version FROM oncehook_guard.oncehook_applied_entities
              WHERE journal = $1 AND scope = $2 AND entity = ANY ($3) ORDER BY entity FOR UPDATE",
            &[&journal, &scope, &names],
        )
        .await?;
    if rows.len() != names.len() {
        return Err(EngineError::other("what is known of an entity is gone that was written a moment ago"));
    }
    let known = |row: &Row| {
        let newest = Mark { version: row.get(1), at: row.get::<_, Option<i64>>(2).map(UnixMicros) };
        (row.get(0), Standing { newest, state: row.get(3), version: row.get(4) })
    };
    Ok(Standings::new(comparison, rows.iter().map(known).collect()))
}

/// Keeps what has changed.
pub(super) async fn keep(
    session: &Session,
    journal: i64,
    comparison: &Comparison,
    standings: &Standings<'_>,
) -> Result<(), EngineError> {
    let moved: Vec<(&str, &Standing)> = standings.moved().collect();
    if moved.is_empty() {
        return Ok(());
    }
    let entities: Vec<&str> = moved.iter().map(|(entity, _)| *entity).collect();
    let each = || moved.iter().map(|(_, standing)| *standing);
    let versions: Vec<i64> = each().map(|known| known.version).collect();
    let newest: Vec<Option<i64>> = each().map(|known| known.newest.version).collect();
    let times: Vec<Option<i64>> = each().map(|known| known.newest.at.map(|at| at.0)).collect();
    let states: Vec<Option<&str>> = each().map(|known| known.state.as_deref()).collect();
    let kept = session
        .change(
            "UPDATE oncehook_guard.oncehook_applied_entities e
                SET version = t.version, newest = t.newest, last_at = t.last_at, state = t.state
               FROM unnest($3::text[], $4::bigint[], $5::bigint[], $6::bigint[], $7::text[])
                    AS t(entity, version, newest, last_at, state)
              WHERE e.journal = $1 AND e.scope = $2 AND e.entity = t.entity",
            &[&journal, &comparison.scope.as_str(), &entities, &versions, &newest, &times, &states],
        )
        .await?;
    match usize::try_from(kept) {
        Ok(kept) if kept == moved.len() => Ok(()),
        _ => Err(EngineError::other("what is known of an entity is gone that was locked a moment ago")),
    }
}
