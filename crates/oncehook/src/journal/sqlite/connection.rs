//! Connections whose settings are read back: what SQLite says is in force, not what we asked for.
//!
//! Promises: a connection that may write is in WAL mode and syncs its commits, or it is not opened; a reader's cannot write.
//! Does not: empty the log (`checkpoint`), or know the tables.

use std::path::Path;

use rusqlite::config::DbConfig;
use rusqlite::{Connection, OpenFlags};

use super::OpenError;
use super::busy::{self, BUSY_WAIT};
#[cfg(feature = "planted")]
use super::planted::full_sync;

/// The oldest SQLite without the WAL-reset bug, which can corrupt a database that one connection writes while another
/// checkpoints: exactly our shape.
const OLDEST_SQLITE: i32 = 3_051_003;

pub(crate) fn check_library() -> Result<(), OpenError> {
    let found = rusqlite::version_number();
    if found < OLDEST_SQLITE {
        return Err(OpenError::Durability(format!(
            "SQLite {} is linked, but 3.51.3 or newer is needed (older ones can corrupt a busy database)",
            rusqlite::version()
        )));
    }
    Ok(())
}

/// Bytes of a page of a new file. An event of 1 KB fits seven times into 8 KB but not three times into 4, and half as many
/// pages are logged and copied, which seems to cost less CPU (docs/PERFORMANCE.md). A file that exists keeps its own size.
const PAGE_BYTES: i64 = 8_192;

/// A connection that may write: the writer's, and the helper's that checkpoints.
pub(crate) fn open_writer(path: &Path) -> Result<Connection, OpenError> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let mut connection = Connection::open_with_flags(path, flags)?;
    keep_plans(&connection)?;
    connection.busy_handler(Some(busy::wait))?;
    if connection.is_readonly(rusqlite::MAIN_DB)? {
        return Err(OpenError::place(path)("the file is read-only"));
    }
    // Before the log is switched on: from then on the size is settled.
    connection.pragma_update(None, "page_size", PAGE_BYTES)?;
    let mode: String = connection.pragma_update_and_check(None, "journal_mode", "WAL", |row| row.get(0))?;
    if !mode.eq_ignore_ascii_case("wal") {
        return Err(OpenError::Durability(format!("journal_mode is {mode}, not WAL")));
    }
    connection.pragma_update(None, "synchronous", full_sync().0)?;
    // The writer and its helper checkpoint; SQLite's own threshold would do it in the middle of a commit.
    connection.pragma_update(None, "wal_autocheckpoint", 0)?;
    connection.pragma_update(None, "cache_size", -32_768)?;
    connection.pragma_update(None, "temp_store", "MEMORY")?;
    connection.pragma_update(None, "foreign_keys", true)?;
    connection.pragma_update(None, "mmap_size", 0)?;
    expect(&connection, "synchronous", full_sync().1)?;
    expect(&connection, "foreign_keys", 1)?;
    Ok(connection)
}

/// `synchronous` as it is set for commits that sync by themselves, and as SQLite reads it back.
#[cfg(not(feature = "planted"))]
fn full_sync() -> (&'static str, i64) {
    ("FULL", 2)
}

/// When the commits of a connection reach the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Synced {
    /// Before they return (`synchronous = FULL`). Every connection begins like that.
    ByThemselves,
    /// When the [`syncer`](super::syncer) has synced the log (`synchronous = NORMAL`): no sender is answered before.
    BySyncer,
}

impl Synced {
    /// Shows that a connection can be switched to and fro, and leaves it as it begins.
    pub(super) fn proven(connection: &Connection) -> Result<Self, OpenError> {
        let mut synced = Self::ByThemselves;
        synced.switch(connection, Self::BySyncer)?;
        expect(connection, "synchronous", 1)?;
        synced.switch(connection, Self::ByThemselves)?;
        expect(connection, "synchronous", full_sync().1)?;
        Ok(synced)
    }

    /// Switches a connection that is in no transaction.
    pub(super) fn switch(&mut self, connection: &Connection, to: Self) -> rusqlite::Result<()> {
        if *self != to {
            let level = if to == Self::BySyncer { "NORMAL" } else { full_sync().0 };
            connection.pragma_update(None, "synchronous", level)?;
            *self = to;
        }
        Ok(())
    }
}

/// A connection for people's queries. It cannot write.
pub(super) fn open_reader(path: &Path) -> rusqlite::Result<Connection> {
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags)?;
    keep_plans(&connection)?;
    connection.busy_timeout(BUSY_WAIT)?;
    connection.pragma_update(None, "cache_size", -8_192)?;
    connection.pragma_update(None, "query_only", true)?;
    Ok(connection)
}

/// A statement is planned once, whatever is bound to it. Without this, SQLite plans anew at every run what has a bound LIMIT: 50 µs for
/// a look that takes two.
fn keep_plans(connection: &Connection) -> rusqlite::Result<()> {
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_QPSG, true).map(|_| ())
}

/// Closes a connection that is no longer trusted, without the checkpoint that closing would do.
pub(crate) fn abandon(connection: Connection) {
    // If this fails, the close does its checkpoint; the next open copies the whole log anew in either case.
    let _ = connection.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true);
    drop(connection);
}

fn expect(connection: &Connection, pragma: &str, wanted: i64) -> Result<(), OpenError> {
    let found: i64 = connection.pragma_query_value(None, pragma, |row| row.get(0))?;
    if found == wanted { Ok(()) } else { Err(OpenError::Durability(format!("{pragma} is {found}, not {wanted}"))) }
}
