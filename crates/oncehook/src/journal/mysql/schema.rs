//! The tables, in the words of MariaDB and MySQL.
//!
//! The server ends a transaction at every statement that makes a table. So each statement of the migration can be
//! repeated, and the migration is recorded after its last one: a node that is killed half-way starts again from the
//! first. A named lock lets one node at a time do it.

use super::connection::Session;
use super::engine_error::EngineError;
use super::{Mysql, OpenError};
use crate::journal::migration::Migration;
use crate::journal::server::schema::Schema;
use crate::journal::server::value::Row;

const MIGRATIONS_TABLE: &str = "CREATE TABLE IF NOT EXISTS oncehook_migrations (
  name       VARBINARY(64) NOT NULL PRIMARY KEY,
  digest     VARBINARY(64) NOT NULL,
  applied_at BIGINT        NOT NULL
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin";

impl Schema for Mysql {
    const MIGRATION: Migration = Migration { name: "001_journal", sql: include_str!("migrations/001_journal.sql") };
    const RECORDED: &'static str = "SELECT name, digest FROM oncehook_migrations ORDER BY name";
    const RECORD: &'static str = "INSERT INTO oncehook_migrations (name, digest, applied_at)
                                  VALUES ($1, $2, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)))";
    const SHAPE: &'static str = SHAPE;
    const EXPECTED: &'static str = include_str!("shape.txt");

    async fn begin_migration(&self, session: &mut Session) -> Result<(), OpenError> {
        if session.mariadb {
            // The server would end the wait for the lock as a slow statement.
            session.run("SET SESSION max_statement_time = 0").await?;
        }
        // Named locks belong to the whole server, and have at most 64 characters. Waits for nine seconds.
        let lock = "SELECT GET_LOCK(CONCAT('oncehook-', LEFT(SHA2(DATABASE(), 256), 40)), 9)";
        let locked = session.row(lock, Vec::new()).await?;
        if locked.map(|row| row.maybe_int(0)).transpose()?.flatten() != Some(1) {
            return Err(OpenError::Schema("another node is still making the schema".to_owned()));
        }
        Ok(session.run(MIGRATIONS_TABLE).await?)
    }

    async fn make_tables(session: &mut Session) -> Result<(), EngineError> {
        for statement in statements(Self::MIGRATION.sql) {
            session.run(&statement).await?;
        }
        Ok(())
    }

    async fn end_migration(session: &mut Session) -> Result<(), EngineError> {
        session.run("COMMIT").await?;
        session.row("SELECT RELEASE_LOCK(CONCAT('oncehook-', LEFT(SHA2(DATABASE(), 256), 40)))", Vec::new()).await?;
        session.run("COMMIT").await?;
        if session.mariadb {
            session.run("SET SESSION max_statement_time = 5").await?;
        }
        Ok(())
    }
}

/// The statements of a migration. Its comments are whole lines, and no text in it has a semicolon.
fn statements(sql: &str) -> Vec<String> {
    let bare: Vec<&str> = sql.lines().filter(|line| !line.trim_start().starts_with("--")).collect();
    let statements = bare.join("\n");
    statements.split(';').map(|one| one.trim().to_owned()).filter(|one| !one.is_empty()).collect()
}

/// Engines, columns with types and collations, keys with all that could make them useless (not unique, other columns, a
/// prefix), triggers. Only of the tables and views that are ours: others may have names like ours, because effects of another
/// journal are recorded in such.
///
/// The types in a view are what the server makes of its expressions, and how wide a number would be printed (MariaDB shows it,
/// MySQL does not) means nothing: both are left out.
const SHAPE: &str = "
WITH ours AS (
  SELECT TABLE_NAME AS name, TABLE_TYPE AS kind, ENGINE AS engine FROM information_schema.TABLES
   WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME IN (
     'oncehook_attempts', 'oncehook_audit', 'oncehook_bodies', 'oncehook_buckets', 'oncehook_conflicts', 'oncehook_deliveries',
     'oncehook_duplicates', 'oncehook_entities', 'oncehook_event_status', 'oncehook_events', 'oncehook_flags', 'oncehook_indexed',
     'oncehook_keys', 'oncehook_life', 'oncehook_migrations', 'oncehook_pauses', 'oncehook_processed_events',
     'oncehook_retry_logs', 'oncehook_spool_aliases', 'oncehook_totals')
)
SELECT CONCAT('table ', name, ' engine ', COALESCE(engine, '')) FROM ours WHERE kind = 'BASE TABLE'
UNION ALL
SELECT CONCAT('column ', c.TABLE_NAME, '.', c.COLUMN_NAME, IF(o.kind = 'VIEW', '', CONCAT(
         ' ', IF(c.DATA_TYPE IN ('tinyint', 'smallint', 'int', 'bigint') AND LOCATE(')', c.COLUMN_TYPE) > 0,
                 CONCAT(c.DATA_TYPE, SUBSTRING(c.COLUMN_TYPE, LOCATE(')', c.COLUMN_TYPE) + 1)), c.COLUMN_TYPE),
         IF(c.IS_NULLABLE = 'YES', '', ' not null'), COALESCE(CONCAT(' collate ', c.COLLATION_NAME), ''))))
  FROM information_schema.COLUMNS c JOIN ours o ON o.name = c.TABLE_NAME WHERE c.TABLE_SCHEMA = DATABASE()
UNION ALL
SELECT CONCAT('index ', s.INDEX_NAME, ' on ', s.TABLE_NAME, ' (',
         GROUP_CONCAT(COALESCE(s.COLUMN_NAME, '?'), COALESCE(CONCAT('(', s.SUB_PART, ')'), '')
                      ORDER BY s.SEQ_IN_INDEX SEPARATOR ', '), ')', IF(s.NON_UNIQUE = 0, ' unique', ''))
  FROM information_schema.STATISTICS s JOIN ours o ON o.name = s.TABLE_NAME WHERE s.TABLE_SCHEMA = DATABASE()
 GROUP BY s.TABLE_NAME, s.INDEX_NAME, s.NON_UNIQUE
UNION ALL
SELECT CONCAT('trigger ', g.TRIGGER_NAME, ' on ', g.EVENT_OBJECT_TABLE)
  FROM information_schema.TRIGGERS g JOIN ours o ON o.name = g.EVENT_OBJECT_TABLE
 WHERE g.EVENT_OBJECT_SCHEMA = DATABASE()";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_migration_is_cut_into_statements() {
        let parts = statements("-- a; b\nCREATE TABLE a (\n  -- c; d\n  x INT);\n\nCREATE TABLE b (y INT);\n");
        assert_eq!(parts, ["CREATE TABLE a (\n  x INT)", "CREATE TABLE b (y INT)"]);
        assert!(statements(Mysql::MIGRATION.sql).len() > 10);
    }
}
