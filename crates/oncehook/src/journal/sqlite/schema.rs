//! The tables: made by one migration, and compared with what this program expects before it uses them.
//!
//! The migration runs in one transaction together with the row that records it, so a process that is killed at any
//! statement leaves nothing behind and can simply be started again. A file that another version made is refused
//! (`journal::migration`).

use oncehook_verify::UnixMicros;
use rusqlite::{Connection, TransactionBehavior};

use super::OpenError;
use crate::journal::migration::{Migration, compare};

const MIGRATION: Migration = Migration { name: "001_journal", sql: include_str!("migrations/001_journal.sql") };

const MIGRATIONS_TABLE: &str = "CREATE TABLE IF NOT EXISTS oncehook_migrations (
  name       TEXT PRIMARY KEY,
  digest     TEXT    NOT NULL,
  applied_at INTEGER NOT NULL
) STRICT";

/// Makes the tables where there are none. Returns the names of the migrations that were applied now.
pub(super) fn migrate(connection: &mut Connection, now: UnixMicros) -> Result<Vec<String>, OpenError> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    transaction.execute_batch(MIGRATIONS_TABLE)?;
    let recorded: Vec<(String, String)> = transaction
        .prepare("SELECT name, digest FROM oncehook_migrations ORDER BY name")?
        .query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?
        .collect::<Result<_, _>>()?;
    let mut applied = Vec::new();
    if MIGRATION.is_due(&recorded).map_err(OpenError::Schema)? {
        transaction.execute_batch(MIGRATION.sql)?;
        transaction.execute(
            "INSERT INTO oncehook_migrations (name, digest, applied_at) VALUES (?1, ?2, ?3)",
            (MIGRATION.name, MIGRATION.digest(), now.0),
        )?;
        applied.push(MIGRATION.name.to_owned());
    }
    transaction.commit()?;
    Ok(applied)
}

/// Compares every table, view and index of ours with one freshly made in memory: columns, types, collations, keys.
///
/// This is what finds a renamed column, a dropped or changed unique key and a folding collation (fault 105) before the
/// first request.
pub(super) fn check(connection: &Connection) -> Result<(), OpenError> {
    let mut expected = Connection::open_in_memory()?;
    migrate(&mut expected, UnixMicros(0))?;
    let (expected, found) = (shape(&expected)?, shape(connection)?);
    compare(expected.iter().map(String::as_str), found.iter().map(String::as_str)).map_err(OpenError::Schema)
}

/// Every object on our tables: its kind, its name and the text that made it.
fn shape(connection: &Connection) -> rusqlite::Result<Vec<String>> {
    let mut statement = connection.prepare(
        r"SELECT type || ' ' || name || ' ' || coalesce(sql, '') FROM sqlite_schema
           WHERE tbl_name LIKE 'oncehook\_%' ESCAPE '\'",
    )?;
    statement.query_map([], |row| row.get(0))?.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The statements of the migration. Every one ends with a semicolon at the end of a line.
    fn statements() -> Vec<&'static str> {
        let statements: Vec<&str> = MIGRATION.sql.split_inclusive(";\n").collect();
        assert!(statements.iter().all(|statement| statement.ends_with(";\n")));
        statements
    }

    /// The tables as they are made now.
    fn fresh() -> Connection {
        let mut connection = Connection::open_in_memory().unwrap();
        migrate(&mut connection, UnixMicros(0)).unwrap();
        connection
    }

    /// Runs the first statements of the migration, then dies without a commit.
    fn die_after(path: &std::path::Path, statements: &[&str]) {
        let mut connection = super::super::connection::open_writer(path).unwrap();
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
        transaction.execute_batch(MIGRATIONS_TABLE).unwrap();
        statements.iter().for_each(|statement| transaction.execute_batch(statement).unwrap());
        // Neither commit nor rollback: the process is gone. Leaking keeps the connection from tidying up.
        std::mem::forget(transaction);
    }

    #[test]
    fn fault_107_a_migration_killed_at_every_statement_can_be_rerun() {
        let statements = statements();
        assert!(statements.len() > 20, "{}", statements.len());
        for count in 0..=statements.len() {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("journal.db");
            die_after(&path, &statements[..count]);
            let mut connection = super::super::connection::open_writer(&path).unwrap();
            // Without the row that records it nothing of the half-made schema may be there.
            assert_eq!(shape(&connection).unwrap(), [""; 0], "after {count}");
            assert_eq!(migrate(&mut connection, UnixMicros(1)).unwrap(), [MIGRATION.name]);
            check(&connection).unwrap();
            assert!(migrate(&mut connection, UnixMicros(2)).unwrap().is_empty());
        }
    }

    /// The records of a newer version, of an older one with several migrations, and of one with another text.
    #[test]
    fn a_journal_that_another_version_made_is_refused_and_left_as_it_is() {
        for change in [
            "INSERT INTO oncehook_migrations VALUES ('002_order', '', 0)",
            "UPDATE oncehook_migrations SET digest = 'other'",
            "DROP TABLE oncehook_groups; ALTER TABLE oncehook_events DROP COLUMN version;
             UPDATE oncehook_migrations SET digest = 'older'",
            "DELETE FROM oncehook_migrations; INSERT INTO oncehook_migrations VALUES ('900_journal', '', 0)",
        ] {
            let mut connection = fresh();
            connection.execute_batch(change).unwrap();
            let before = shape(&connection).unwrap();
            let refused = migrate(&mut connection, UnixMicros(1)).unwrap_err().to_string();
            assert!(refused.contains("made by another version of oncehook"), "{change}: {refused}");
            assert!(refused.contains("start it with the version that made it"), "{change}: {refused}");
            assert_eq!(shape(&connection).unwrap(), before, "{change}");
        }
    }

    /// What an accept and a success write, one row each.
    const USUAL_ROWS: [&str; 3] = [
        "INSERT INTO oncehook_events VALUES (1, zeroblob(16), 'shop', x'31', 1, NULL, NULL, NULL, 0, 0, 'body', zeroblob(32), x'', x'', NULL)",
        "INSERT INTO oncehook_deliveries (event, route, state, run_at, entity) VALUES (1, 'orders', 'ready', 0, 'pi_1')",
        "UPDATE oncehook_deliveries SET state = 'succeeded', cause = NULL, entity = NULL WHERE event = 1 AND route = 'orders' AND epoch = 0",
    ];

    /// How many temporary tables a statement makes each time it runs.
    fn temporary_tables(connection: &Connection, sql: &str) -> usize {
        let mut statement = connection.prepare(&format!("EXPLAIN {sql}")).unwrap();
        let steps = statement.query_map([], |row| row.get::<_, String>(1)).unwrap();
        steps.filter(|step| step.as_deref() == Ok("OpenEphemeral")).count()
    }

    #[test]
    fn the_usual_row_is_written_without_temporary_tables_and_no_unknown_value_is_let_in() {
        let connection = fresh();
        connection.execute_batch("CREATE TABLE slow (x TEXT CHECK (x IN ('a', 'b', 'c')))").unwrap();
        assert_eq!(temporary_tables(&connection, "INSERT INTO slow VALUES ('a')"), 1);
        assert_eq!(USUAL_ROWS.map(|sql| temporary_tables(&connection, sql)), [0, 0, 0]);
        USUAL_ROWS.iter().for_each(|sql| assert_eq!(connection.execute(sql, []).unwrap(), 1));
        for refused in [
            "UPDATE oncehook_events SET integrity = 'some'",
            "UPDATE oncehook_deliveries SET state = 'lost'",
            "UPDATE oncehook_deliveries SET cause = 'weather'",
        ] {
            let error = connection.execute(refused, []).unwrap_err();
            assert!(error.to_string().contains("CHECK constraint failed"), "{refused}: {error}");
        }
        for (sql, values) in [
            (
                "UPDATE oncehook_deliveries SET state = ?1, entity = 'pi_1'",
                &["ready", "running", "retrying", "parked", "succeeded", "dead", "superseded", "skipped"][..],
            ),
            (
                "UPDATE oncehook_deliveries SET cause = ?1",
                &["destination", "handler", "ours", "poison", "prerequisite"],
            ),
            ("UPDATE oncehook_events SET integrity = ?1", &["body", "fields", "none"]),
        ] {
            values.iter().for_each(|value| assert_eq!(connection.execute(sql, [value]).unwrap(), 1));
        }
        let sound: String = connection.query_row("PRAGMA integrity_check", [], |row| row.get(0)).unwrap();
        assert_eq!(sound, "ok");
    }

    #[test]
    fn fault_105_any_change_to_the_ledger_is_found() {
        for change in [
            "ALTER TABLE oncehook_keys RENAME COLUMN key TO idempotency_key",
            "ALTER TABLE oncehook_keys RENAME TO oncehook_old_keys",
            "DROP TABLE oncehook_keys",
            "DROP TABLE oncehook_keys; CREATE TABLE oncehook_keys (source TEXT, key BLOB, event BLOB, digest BLOB, first_seen INTEGER, expires_at INTEGER)",
            "CREATE UNIQUE INDEX oncehook_extra ON oncehook_events (source)",
            "CREATE TRIGGER oncehook_trick BEFORE INSERT ON oncehook_keys BEGIN DELETE FROM oncehook_keys; END",
        ] {
            let connection = fresh();
            check(&connection).unwrap();
            connection.execute_batch(change).unwrap();
            assert!(matches!(check(&connection), Err(OpenError::Schema(_))), "{change}");
        }
    }
}
