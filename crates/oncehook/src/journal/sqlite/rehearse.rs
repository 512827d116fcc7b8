//! Would a route's statements run, as the tables are now? Asked at the start, so that a missing table is in the log before the
//! first event fails on it.
//!
//! Promises: the statements are prepared under the same guard as when they run, on a connection of its own that cannot
//! write; nothing is run and nothing is changed.
//!
//! Does not: refuse anything. The table may come later, and then the statements run.

use std::path::Path;
use std::time::Duration;

use rusqlite::ErrorCode;

use super::{SqliteJournal, connection, user_sql};
use crate::handler::SqlHandler;
use crate::journal::{Misfit, ReadError};

/// Preparing takes no time to speak of.
const PATIENCE: Duration = Duration::from_secs(1);

impl SqliteJournal {
    /// The statements of a handler that would fail as things are, in a file that is there. Blocking.
    pub fn rehearse_in(path: &Path, handler: &SqlHandler) -> Result<Vec<Misfit>, ReadError> {
        let engine = |error: rusqlite::Error| ReadError::Engine(error.to_string());
        let mut connection = connection::open_reader(path).map_err(engine)?;
        user_sql::guard(&mut connection).map_err(engine)?;
        let misfits = handler.statements().iter().enumerate().filter_map(|(place, statement)| {
            let prepared = user_sql::foreign(PATIENCE, || connection.prepare(statement.text()).map(drop));
            Some(Misfit { statement: place + 1, reason: reason(prepared.err()?) })
        });
        Ok(misfits.collect())
    }
}

/// In one line, without the statement that the reader knows.
fn reason(error: rusqlite::Error) -> String {
    match error {
        rusqlite::Error::SqlInputError { msg, error, .. } if error.code == ErrorCode::Unknown => msg,
        error => user_sql::failure(&error, PATIENCE, None).message,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::handler::{Dialect, Expression};

    fn rehearsed(path: &Path, texts: &[&str]) -> Vec<(usize, String)> {
        let key: Expression = Expression::parse("$key").unwrap();
        let bind = BTreeMap::from([("key".to_owned(), key)]);
        let handler = SqlHandler::new(texts, &bind, Dialect::Sqlite).unwrap();
        let misfits = SqliteJournal::rehearse_in(path, &handler).unwrap();
        misfits.into_iter().map(|misfit| (misfit.statement, misfit.reason)).collect()
    }

    #[test]
    fn statements_that_would_fail_are_named_and_nothing_is_run() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("journal.db");
        let writer = connection::open_writer(&path).unwrap();
        writer.execute_batch("CREATE TABLE orders (key TEXT); CREATE TABLE oncehook_meta (name TEXT)").unwrap();
        let insert = "INSERT INTO orders (key) VALUES (:key) RETURNING key";
        assert_eq!(rehearsed(&path, &[insert]), []);
        for (statement, reason) in [
            ("INSERT INTO later (key) VALUES (:key)", "no such table: later"),
            ("INSERT INTO orders (id) VALUES (:key)", "table orders has no column named id"),
            ("UPDATE orders SET key = :key WHERE paid", "no such column: paid"),
            ("INSERT INTO orders VALUES (:key, 2)", "table orders has 1 columns but 2 values were supplied"),
            ("DELETE FROM oncehook_meta WHERE name = :key", "a handler may only read and write rows"),
        ] {
            let found = rehearsed(&path, &[insert, statement]);
            assert!(matches!(&found[..], [(2, said)] if said.starts_with(reason)), "{statement}: {found:?}");
        }
        let rows = "SELECT count(*) FROM orders";
        assert_eq!(writer.query_row(rows, [], |row| row.get::<_, i64>(0)).unwrap(), 0);
    }
}
