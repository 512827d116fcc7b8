//! The tables: made by one migration, and compared with what this program expects before it uses them.
//!
//! The server ends a transaction at every statement that makes a table. So each statement of the migration can be
//! repeated, and the migration is recorded after its last one: a node that is killed half-way starts again from the
//! first. A named lock lets one node at a time do it. A journal that another version made is refused
//! (`journal::migration`).

use super::OpenError;
use super::connection::Session;
use super::row::{maybe_number, maybe_text, number, small, text};
use crate::journal::migration::{Migration, compare};

const MIGRATION: Migration = Migration { name: "001_journal", sql: include_str!("migrations/001_journal.sql") };

/// The lock of this database's migration. Named locks belong to the whole server, and have at most 64 characters.
const LOCK: &str = "CONCAT('oncehook-', LEFT(SHA2(DATABASE(), 256), 40))";

/// How long one node waits for another's migration, in seconds.
const LOCK_WAIT: u32 = 9;

const MIGRATIONS_TABLE: &str = "CREATE TABLE IF NOT EXISTS oncehook_migrations (
  name       VARBINARY(64) NOT NULL PRIMARY KEY,
  digest     VARBINARY(64) NOT NULL,
  applied_at BIGINT        NOT NULL
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin";

/// Makes the tables where there are none. Returns the names of the migrations that were applied now.
pub(super) async fn migrate(session: &mut Session) -> Result<Vec<String>, OpenError> {
    if session.is_mariadb() {
        // The server would end the wait for the lock as a slow statement.
        session.run("SET SESSION max_statement_time = 0").await?;
    }
    let locked = session.row(&format!("SELECT GET_LOCK({LOCK}, {LOCK_WAIT})"), Vec::new()).await?;
    if locked.map(|row| number(&row, 0)).transpose()? != Some(1) {
        return Err(OpenError::Schema("another node is still making the schema".to_owned()));
    }
    session.run(MIGRATIONS_TABLE).await?;
    let mut recorded = Vec::new();
    for row in session.rows("SELECT name, digest FROM oncehook_migrations ORDER BY name", Vec::new()).await? {
        recorded.push((text(&row, 0)?, text(&row, 1)?));
    }
    let mut applied = Vec::new();
    if MIGRATION.is_due(&recorded).map_err(OpenError::Schema)? {
        apply(session).await?;
        applied.push(MIGRATION.name.to_owned());
    }
    session.row(&format!("SELECT RELEASE_LOCK({LOCK})"), Vec::new()).await?;
    session.run("COMMIT").await?;
    if session.is_mariadb() {
        session.run("SET SESSION max_statement_time = 5").await?;
    }
    Ok(applied)
}

async fn apply(session: &mut Session) -> Result<(), OpenError> {
    for statement in statements(MIGRATION.sql) {
        session.run(&statement).await?;
    }
    let sql = format!("INSERT INTO oncehook_migrations (name, digest, applied_at) VALUES (?, ?, {})", super::NOW);
    session.change(&sql, vec![MIGRATION.name.into(), MIGRATION.digest().into()]).await?;
    session.run("COMMIT").await?;
    Ok(())
}

/// The statements of a migration. Its comments are whole lines, and no text in it has a semicolon.
fn statements(sql: &str) -> Vec<String> {
    let bare: Vec<&str> = sql.lines().filter(|line| !line.trim_start().starts_with("--")).collect();
    let statements = bare.join("\n");
    statements.split(';').map(|one| one.trim().to_owned()).filter(|one| !one.is_empty()).collect()
}

/// What the catalogue says about the tables that the migration makes, a line for each table, column, index and trigger.
/// A test makes a schema and compares.
const EXPECTED: &str = include_str!("shape.txt");

/// Compares our part of the catalogue with what the migration makes: engines, columns with types and collations, keys
/// with all that could make them useless (not unique, other columns, a prefix), triggers.
///
/// This is what finds a renamed column, a dropped or changed unique key and a folding collation (fault 105) before the
/// first request.
pub(super) async fn check(session: &mut Session) -> Result<(), OpenError> {
    let found = shape(session).await?;
    compare(EXPECTED.lines(), found.iter().map(String::as_str)).map_err(OpenError::Schema)
}

/// The tables and views that are ours. Others may have names like ours: effects of another journal are recorded in
/// such.
const OURS: &str = "('oncehook_attempts', 'oncehook_audit', 'oncehook_bodies', 'oncehook_conflicts', 'oncehook_deliveries',
  'oncehook_buckets', 'oncehook_duplicates', 'oncehook_entities', 'oncehook_event_status', 'oncehook_events', 'oncehook_flags',
  'oncehook_indexed', 'oncehook_keys', 'oncehook_life', 'oncehook_migrations', 'oncehook_pauses', 'oncehook_processed_events', 'oncehook_retry_logs',
  'oncehook_spool_aliases', 'oncehook_totals')";

/// Our part of the catalogue.
pub(super) async fn shape(session: &mut Session) -> Result<Vec<String>, OpenError> {
    let mut lines = Vec::new();
    let sql = format!(
        "SELECT TABLE_NAME, ENGINE FROM information_schema.TABLES
          WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME IN {OURS} AND TABLE_TYPE = 'BASE TABLE'"
    );
    for row in session.rows(&sql, Vec::new()).await? {
        lines.push(format!("table {} engine {}", text(&row, 0)?, maybe_text(&row, 1)?.unwrap_or_default()));
    }
    let sql = format!(
        "SELECT c.TABLE_NAME, c.COLUMN_NAME, CAST(c.COLUMN_TYPE AS CHAR), c.IS_NULLABLE, c.COLLATION_NAME, t.TABLE_TYPE
           FROM information_schema.COLUMNS c
           JOIN information_schema.TABLES t ON t.TABLE_SCHEMA = c.TABLE_SCHEMA AND t.TABLE_NAME = c.TABLE_NAME
          WHERE c.TABLE_SCHEMA = DATABASE() AND c.TABLE_NAME IN {OURS}"
    );
    for row in session.rows(&sql, Vec::new()).await? {
        let place = format!("column {}.{}", text(&row, 0)?, text(&row, 1)?);
        // The types in a view are what the server makes of its expressions.
        if text(&row, 5)? == "VIEW" {
            lines.push(place);
            continue;
        }
        let null = if text(&row, 3)? == "YES" { "" } else { " not null" };
        let collation = maybe_text(&row, 4)?.map(|name| format!(" collate {name}")).unwrap_or_default();
        lines.push(format!("{place} {}{null}{collation}", without_width(&text(&row, 2)?)));
    }
    let sql = format!(
        "SELECT TABLE_NAME, INDEX_NAME, COLUMN_NAME, SUB_PART, NON_UNIQUE, SEQ_IN_INDEX FROM information_schema.STATISTICS
          WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME IN {OURS} ORDER BY TABLE_NAME, INDEX_NAME, SEQ_IN_INDEX"
    );
    let mut indexes: Vec<(String, Vec<String>, bool)> = Vec::new();
    for row in session.rows(&sql, Vec::new()).await? {
        let name = format!("index {} on {}", text(&row, 1)?, text(&row, 0)?);
        let prefix = maybe_number(&row, 3)?.map(|length| format!("({length})")).unwrap_or_default();
        let column = format!("{}{prefix}", maybe_text(&row, 2)?.unwrap_or_else(|| "?".to_owned()));
        let unique = number(&row, 4)? == 0;
        if small(&row, 5)? == 1 {
            indexes.push((name, vec![column], unique));
        } else if let Some((_, columns, _)) = indexes.last_mut() {
            columns.push(column);
        }
    }
    lines.extend(indexes.into_iter().map(|(name, columns, unique)| {
        format!("{name} ({}){}", columns.join(", "), if unique { " unique" } else { "" })
    }));
    let sql = format!(
        "SELECT TRIGGER_NAME, EVENT_OBJECT_TABLE FROM information_schema.TRIGGERS
          WHERE EVENT_OBJECT_SCHEMA = DATABASE() AND EVENT_OBJECT_TABLE IN {OURS}"
    );
    for row in session.rows(&sql, Vec::new()).await? {
        lines.push(format!("trigger {} on {}", text(&row, 0)?, text(&row, 1)?));
    }
    session.run("ROLLBACK").await?;
    lines.sort_unstable();
    Ok(lines)
}

/// MariaDB shows how wide a number would be printed, MySQL does not: it means nothing.
fn without_width(kind: &str) -> String {
    let whole = ["tinyint(", "smallint(", "int(", "bigint("].iter().any(|name| kind.starts_with(name));
    match (whole, kind.split_once('('), kind.split_once(')')) {
        (true, Some((name, _)), Some((_, rest))) => format!("{name}{rest}"),
        _ => kind.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_migration_is_cut_into_statements() {
        let parts = statements("-- a; b\nCREATE TABLE a (\n  -- c; d\n  x INT);\n\nCREATE TABLE b (y INT);\n");
        assert_eq!(parts, ["CREATE TABLE a (\n  x INT)", "CREATE TABLE b (y INT)"]);
        assert!(statements(MIGRATION.sql).len() > 10);
    }

    #[test]
    fn widths_mean_nothing() {
        for (shown, kind) in [
            ("int(10) unsigned", "int unsigned"),
            ("bigint(20)", "bigint"),
            ("bigint", "bigint"),
            ("varbinary(64)", "varbinary(64)"),
            ("enum('int(1)')", "enum('int(1)')"),
        ] {
            assert_eq!(without_width(shown), kind);
        }
    }
}
