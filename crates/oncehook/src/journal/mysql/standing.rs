//! What is known of entities in a database that is not the journal's: their rows beside the guards, locked while an effect
//! happens and changed in its transaction.
//!
//! Promises: rows are locked in the order of names, so that two batches do not deadlock; whoever holds them sees what was committed
//! last.
//!
//! Does not: decide anything (`handler::entities`), or forget: a machine's state has no age.

use std::collections::{BTreeMap, BTreeSet};

use mysql_async::{Row, Value};
use oncehook_verify::UnixMicros;

use super::connection::{Insert, Session};
use super::engine_error::EngineError;
use super::row::{list, maybe_number, maybe_text, number, text};
use crate::handler::elsewhere::Comparison;
use crate::handler::entities::Standings;
use crate::ordering::{Mark, Standing};

/// Not `oncehook_entities`: a journal may stand in the same database.
pub(super) const NAME: &str = "oncehook_applied_entities";

/// `version` counts effects, `newest` and `last_at` are those of the newest one; `journal` says whose entity it is, because several
/// gateways may use the database.
pub(super) const TABLE: &str = "CREATE TABLE IF NOT EXISTS oncehook_applied_entities (
  journal BIGINT         NOT NULL,
  scope   VARBINARY(128) NOT NULL,
  entity  VARBINARY(255) NOT NULL,
  version BIGINT         NOT NULL DEFAULT 0,
  newest  BIGINT,
  last_at BIGINT,
  state   VARBINARY(255),
  PRIMARY KEY (journal, scope, entity)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC";

/// What the catalogue says about it.
pub(super) const EXPECTED: [&str; 9] = [
    "column entity varbinary not null",
    "column journal bigint not null",
    "column last_at bigint",
    "column newest bigint",
    "column scope varbinary not null",
    "column state varbinary",
    "column version bigint not null",
    "key PRIMARY journal,scope,entity",
    "table InnoDB",
];

/// A row that is there is locked by being met, one that is not by being written.
const LOCK: Insert<'static> = Insert {
    head: "INSERT INTO oncehook_applied_entities (journal, scope, entity)",
    row: "(?, ?, ?)",
    tail: " ON DUPLICATE KEY UPDATE version = oncehook_applied_entities.version",
};

/// Locks entities until the transaction ends, those too that are not known yet. Who holds one is waited for. The key is named: if
/// it is gone, that is an error.
pub(super) async fn lock<'c>(
    session: &mut Session,
    journal: i64,
    comparison: &'c Comparison,
    entities: &BTreeSet<&str>,
) -> Result<Standings<'c>, EngineError> {
    if entities.is_empty() {
        return Ok(Standings::new(comparison, BTreeMap::new()));
    }
    let row = |entity: &&str| -> Vec<Value> {
        vec![journal.into(), comparison.scope.as_str().into(), (*entity).into()]
    };
    session.insert(LOCK, entities.iter().map(row).collect()).await?;
    let names = list(entities.iter().map(|entity| hex::encode(entity).into()));
    let sql = "SELECT e.entity, e.newest, e.last_at, e.state, e.version
                 FROM JSON_TABLE(?, '$[*]' COLUMNS (name VARCHAR(512) PATH '$')) t
                STRAIGHT_JOIN oncehook_applied_entities e FORCE INDEX (PRIMARY)
                   ON e.journal = ? AND e.scope = ? AND e.entity = UNHEX(t.name)
                  FOR UPDATE";
    let asked = vec![names, journal.into(), comparison.scope.as_str().into()];
    let rows = session.rows(sql, asked).await?;
    if rows.len() != entities.len() {
        return Err(EngineError::other("what is known of an entity is gone that was written a moment ago"));
    }
    let known = |row: &Row| {
        let newest = Mark { version: maybe_number(row, 1)?, at: maybe_number(row, 2)?.map(UnixMicros) };
        Ok((text(row, 0)?, Standing { newest, state: maybe_text(row, 3)?, version: number(row, 4)? }))
    };
    let known: Result<BTreeMap<String, Standing>, EngineError> = rows.iter().map(known).collect();
    Ok(Standings::new(comparison, known?))
}

/// Keeps what has changed. The rows are locked, and so still there.
pub(super) async fn keep(
    session: &mut Session,
    journal: i64,
    comparison: &Comparison,
    standings: &Standings<'_>,
) -> Result<(), EngineError> {
    let rows: Vec<Vec<Value>> = standings
        .moved()
        .map(|(entity, Standing { newest, state, version })| {
            vec![
                (*version).into(),
                newest.version.into(),
                newest.at.map(|at| at.0).into(),
                state.as_deref().into(),
                journal.into(),
                comparison.scope.as_str().into(),
                entity.into(),
            ]
        })
        .collect();
    let sql = "UPDATE oncehook_applied_entities SET version = ?, newest = ?, last_at = ?, state = ?
                WHERE journal = ? AND scope = ? AND entity = ?";
    for row in rows {
        // Every effect raises the version, so a row that is there is changed.
        if session.change(sql, row).await? != 1 {
            return Err(EngineError::other(
                "what is known of an entity is gone that was locked a moment ago",
            ));
        }
    }
    Ok(())
}
