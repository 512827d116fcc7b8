//! The tables: made step by step, and compared with what this program expects before it uses them.
//!
//! Each migration runs in one transaction together with the row that records it, so one that is killed at any statement
//! leaves nothing behind and can simply be run again. A migration that was recorded with another text is an error: the
//! file was made by another program.

use std::collections::BTreeMap;

use oncehook_verify::UnixMicros;
use rusqlite::{Connection, Transaction, TransactionBehavior};

use super::OpenError;

struct Migration {
    name: &'static str,
    sql: &'static str,
}

const MIGRATIONS: &[Migration] = &[
    Migration { name: "001_journal", sql: include_str!("migrations/001_journal.sql") },
    Migration { name: "002_spool_aliases", sql: include_str!("migrations/002_spool_aliases.sql") },
    Migration { name: "003_order", sql: include_str!("migrations/003_order.sql") },
    Migration { name: "004_lists", sql: include_str!("migrations/004_lists.sql") },
    Migration { name: "005_conditions", sql: include_str!("migrations/005_conditions.sql") },
];

const MIGRATIONS_TABLE: &str = "CREATE TABLE IF NOT EXISTS oncehook_migrations (
  name       TEXT PRIMARY KEY,
  digest     TEXT    NOT NULL,
  applied_at INTEGER NOT NULL
) STRICT";

/// Brings the file up to date. Returns the names of the migrations that were applied now.
pub(super) fn migrate(connection: &mut Connection, now: UnixMicros) -> Result<Vec<String>, OpenError> {
    connection.execute_batch(MIGRATIONS_TABLE)?;
    let mut applied = Vec::new();
    for migration in MIGRATIONS {
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        if apply(&transaction, migration, now)? {
            applied.push(migration.name.to_owned());
        }
        transaction.commit()?;
    }
    refuse_unknown_migrations(connection)?;
    Ok(applied)
}

fn apply(transaction: &Transaction<'_>, migration: &Migration, now: UnixMicros) -> Result<bool, OpenError> {
    let digest = hex::encode(oncehook_verify::digest(migration.sql.as_bytes()));
    let recorded = transaction
        .prepare("SELECT digest FROM oncehook_migrations WHERE name = ?1")?
        .query_map([migration.name], |row| row.get::<_, String>(0))?
        .next()
        .transpose()?;
    match recorded {
        Some(recorded) if recorded == digest => Ok(false),
        Some(_) => {
            Err(OpenError::Schema(format!("migration {} was made by another program", migration.name)))
        }
        None => {
            transaction.execute_batch(migration.sql)?;
            transaction.execute(
                "INSERT INTO oncehook_migrations (name, digest, applied_at) VALUES (?1, ?2, ?3)",
                (migration.name, &digest, now.0),
            )?;
            Ok(true)
        }
    }
}

fn refuse_unknown_migrations(connection: &Connection) -> Result<(), OpenError> {
    let mut statement = connection.prepare("SELECT name FROM oncehook_migrations ORDER BY name")?;
    for name in statement.query_map([], |row| row.get::<_, String>(0))? {
        let name = name?;
        if !MIGRATIONS.iter().any(|migration| migration.name == name) {
            return Err(OpenError::Schema(format!(
                "the file was made by a newer oncehook (migration {name})"
            )));
        }
    }
    Ok(())
}

/// Compares every table, view and index of ours with one freshly made in memory: columns, types, collations, keys.
///
/// This is what finds a renamed column, a dropped or changed unique key and a folding collation (fault 105) before the
/// first request.
pub(super) fn check(connection: &Connection) -> Result<(), OpenError> {
    let mut expected = Connection::open_in_memory()?;
    migrate(&mut expected, UnixMicros(0))?;
    let expected = shape(&expected)?;
    let found = shape(connection)?;
    for (object, wanted) in &expected {
        match found.get(object) {
            None => return Err(OpenError::Schema(format!("{object} is missing"))),
            Some(found) if found != wanted => {
                return Err(OpenError::Schema(format!(
                    "{object} is not as this program made it; found: {}",
                    found.split_whitespace().collect::<Vec<_>>().join(" ")
                )));
            }
            Some(_) => {}
        }
    }
    for object in found.keys() {
        if !expected.contains_key(object) {
            return Err(OpenError::Schema(format!("{object} is not ours, but stands on one of our tables")));
        }
    }
    Ok(())
}

/// Every object on our tables, by kind and name, with the text that made it.
fn shape(connection: &Connection) -> Result<BTreeMap<String, String>, rusqlite::Error> {
    let mut statement = connection.prepare(
        r"SELECT type || ' ' || name, coalesce(sql, '') FROM sqlite_schema
           WHERE tbl_name LIKE 'oncehook\_%' ESCAPE '\'",
    )?;
    statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn statements(sql: &str) -> usize {
        // Good enough for our own files: every statement ends with a semicolon at the end of a line.
        sql.lines().filter(|line| line.trim_end().ends_with(';')).count()
    }

    /// The first migrations, each committed.
    fn apply_first(connection: &mut Connection, count: usize) {
        connection.execute_batch(MIGRATIONS_TABLE).unwrap();
        for migration in &MIGRATIONS[..count] {
            let transaction = connection.transaction().unwrap();
            assert!(apply(&transaction, migration, UnixMicros(0)).unwrap());
            transaction.commit().unwrap();
        }
    }

    /// Runs a migration up to a number of statements, then dies without a commit.
    fn die_after(path: &std::path::Path, place: usize, count: usize) {
        let mut connection = super::super::connection::open_writer(path).unwrap();
        apply_first(&mut connection, place);
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
        let mut done = 0;
        let mut statement = String::new();
        for line in MIGRATIONS[place].sql.lines() {
            if done == count {
                break;
            }
            statement.push_str(line);
            statement.push('\n');
            if line.trim_end().ends_with(';') {
                transaction.execute_batch(&statement).unwrap();
                statement.clear();
                done += 1;
            }
        }
        assert_eq!(done, count);
        // Neither commit nor rollback: the process is gone. Leaking keeps the connection from tidying up.
        std::mem::forget(transaction);
    }

    #[test]
    fn fault_107_a_migration_killed_at_every_statement_can_be_rerun() {
        for (place, migration) in MIGRATIONS.iter().enumerate() {
            let mut before = Connection::open_in_memory().unwrap();
            apply_first(&mut before, place);
            let whole = shape(&before).unwrap();
            for count in 0..=statements(migration.sql) {
                let directory = tempfile::tempdir().unwrap();
                let path = directory.path().join("journal.db");
                die_after(&path, place, count);
                let mut connection = super::super::connection::open_writer(&path).unwrap();
                // Without the row that records it nothing of the half-made schema may be there.
                assert_eq!(shape(&connection).unwrap(), whole, "{} after {count}", migration.name);
                migrate(&mut connection, UnixMicros(1)).unwrap();
                check(&connection).unwrap();
                assert!(migrate(&mut connection, UnixMicros(2)).unwrap().is_empty());
            }
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
    fn the_usual_row_is_written_without_temporary_tables_and_no_other_value_than_before_is_let_in() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("journal.db");
        let mut connection = super::super::connection::open_writer(&path).unwrap();
        apply_first(&mut connection, 4);
        let other = super::super::connection::open_writer(&path).unwrap();
        let made = |connection: &Connection| USUAL_ROWS.map(|sql| temporary_tables(connection, sql));
        assert!(
            made(&connection).iter().chain(&made(&other)).all(|count| *count > 0),
            "{:?}",
            made(&connection)
        );
        USUAL_ROWS.iter().for_each(|sql| assert_eq!(connection.execute(sql, []).unwrap(), 1));

        assert_eq!(migrate(&mut connection, UnixMicros(1)).unwrap(), ["005_conditions"]);
        check(&connection).unwrap();
        // The user's statements run on this connection: nobody can write the schema any more.
        assert!(connection.execute("UPDATE sqlite_schema SET sql = sql", []).is_err());
        for connection in [&connection, &other] {
            // To explain does not look at the file; to run does, and so hears of the change.
            connection.query_row("SELECT count(*) FROM oncehook_events", [], |_| Ok(())).unwrap();
            assert_eq!(made(connection), [0, 0, 0]);
            for refused in [
                "UPDATE oncehook_events SET integrity = 'some'",
                "UPDATE oncehook_deliveries SET state = 'lost'",
                "UPDATE oncehook_deliveries SET cause = 'weather'",
            ] {
                let error = connection.execute(refused, []).unwrap_err();
                assert!(error.to_string().contains("CHECK constraint failed"), "{refused}: {error}");
            }
            for state in
                ["ready", "running", "retrying", "parked", "succeeded", "dead", "superseded", "skipped"]
            {
                connection
                    .execute("UPDATE oncehook_deliveries SET state = ?1, entity = 'pi_1'", [state])
                    .unwrap();
            }
            for cause in ["destination", "handler", "ours", "poison", "prerequisite"] {
                connection.execute("UPDATE oncehook_deliveries SET cause = ?1", [cause]).unwrap();
            }
            for integrity in ["body", "fields", "none"] {
                connection.execute("UPDATE oncehook_events SET integrity = ?1", [integrity]).unwrap();
            }
            let sound: String = connection.query_row("PRAGMA integrity_check", [], |row| row.get(0)).unwrap();
            assert_eq!(sound, "ok");
        }
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
            let mut connection = Connection::open_in_memory().unwrap();
            migrate(&mut connection, UnixMicros(0)).unwrap();
            check(&connection).unwrap();
            connection.execute_batch(change).unwrap();
            assert!(matches!(check(&connection), Err(OpenError::Schema(_))), "{change}");
        }
    }
}
