//! What senders were answered, written down beside the database: which journal, and the last event that was answered.
//!
//! The database file alone does not hold everything: what was committed since the last checkpoint is in the write-ahead log.
//! A person who copies the file without its log, or deletes the log, takes the memory of answered events away, and nothing in the
//! file shows it. Two records show it:
//!
//! - in the lock file, the last event whose sender was answered. It is written after the sync of the log and before the
//!   answer, and not synced itself: after a kill it is exact, after a power cut it may be older than the log, never newer;
//! - in the database file, `meta.in_use`, set from the start to a graceful close. It is set only once the lock file names this
//!   journal durably, so a file that says "in use" and has neither its log nor its lock file was copied alone.
//!
//! No alarm is raised after a kill or a power cut with all files in place, nor when another program has copied the log into
//! the file and removed it: then the last answered event is there.
//! Does not: notice a lost log that held no event, only what happened to events that were stored before.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use rusqlite::{Connection, OptionalExtension as _, params};

use super::database_file::DatabaseFile;
use super::place::{LockFile, beside};
use super::{OpenError, queries, queue};

/// The record in the lock file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Record {
    /// The journal's mark: when it was made.
    journal: i64,
    /// The sequence of the last answered event.
    answered: i64,
}

impl Record {
    /// Always of the same length, so that a new one covers an old one.
    fn text(self) -> String {
        format!("journal {:020} answered {:020}\n", self.journal, self.answered)
    }

    fn parse(text: &str) -> Option<Self> {
        let mut words = text.lines().next()?.split(' ');
        let mut number = |name: &str| words.next().filter(|word| *word == name).and(words.next()?.parse().ok());
        Some(Self { journal: number("journal")?, answered: number("answered")? })
    }

    fn read(file: &File) -> io::Result<Option<Self>> {
        let mut text = [0; 128];
        let length = file.read_at(&mut text, 0)?;
        let text = text.get(..length).unwrap_or_default();
        Ok(std::str::from_utf8(text).ok().and_then(Self::parse))
    }
}

/// The lock file as the record of one journal.
#[derive(Debug)]
pub(super) struct Answered {
    file: File,
    journal: i64,
}

impl Answered {
    /// Everything up to this event is on the disk, and its senders are answered next.
    pub(super) fn note(&self, last: i64) -> io::Result<()> {
        let record = Record { journal: self.journal, answered: last };
        self.file.write_all_at(record.text().as_bytes(), 0)
    }

    pub(super) fn another(&self) -> io::Result<Self> {
        Ok(Self { file: self.file.try_clone()?, journal: self.journal })
    }
}

/// What was in place before anything was opened.
pub(super) struct Found {
    record: Option<Record>,
    /// Whether the log is there, or the file needs none (`VACUUM INTO` makes such copies).
    whole: bool,
}

impl Found {
    /// Looks, under the lock and before SQLite makes or removes a log.
    pub(super) fn look(path: &Path, lock: &LockFile) -> Result<Self, OpenError> {
        let fail = OpenError::place::<io::Error>(path);
        let record = lock.handle().and_then(|file| Record::read(&file)).map_err(fail)?;
        let log = std::fs::metadata(beside(path, "-wal")).is_ok_and(|log| log.len() > 0);
        let needs_log = DatabaseFile::open(path).and_then(|file| file.is_in_wal_mode()).map_err(fail)?;
        Ok(Self { record, whole: log || !needs_log })
    }

    /// What is missing in the database that was opened, if anything is. Asked when the log has been copied into it.
    pub(super) fn missing(&self, connection: &Connection) -> Result<Option<&'static str>, rusqlite::Error> {
        let journal = queue::mark(connection)?;
        match self.record.filter(|record| record.journal == journal) {
            Some(record) => {
                let last = queries::last_sequence(connection)?;
                Ok((last < record.answered).then_some(ANSWERED_MISSING))
            }
            None if self.whole || !is_in_use(connection)? => Ok(None),
            None => Ok(Some(LOG_MISSING)),
        }
    }
}

/// Why a start is refused: events that were answered are not in the database.
const ANSWERED_MISSING: &str = "events that were answered are missing: its write-ahead log (the -wal file) was lost, or an \
                                older copy was put in its place";

/// Why a start is refused: the file was copied without its log while a gateway used it, or after one was killed.
const LOG_MISSING: &str = "events may be missing: it was in use when it was copied, and its write-ahead log (the -wal file) was \
                           not copied with it";

/// Writes both records down, from now on until [`end_use`].
pub(super) fn begin_use(connection: &Connection, path: &Path, lock: &LockFile) -> Result<Answered, OpenError> {
    let fail = OpenError::place::<io::Error>(path);
    let journal = queue::mark(connection)?;
    let answered = Answered { file: lock.handle().map_err(fail)?, journal };
    answered.note(queries::last_sequence(connection)?).map_err(fail)?;
    answered.file.sync_all().map_err(fail)?;
    Ok(answered)
}

/// Says in the database whether a gateway uses it. The first is called when [`begin_use`] and the directory are durable.
pub(super) fn set_in_use(connection: &Connection, in_use: bool) -> Result<(), rusqlite::Error> {
    let sql = "INSERT INTO oncehook_meta (name, value) VALUES ('in_use', ?1)
                ON CONFLICT (name) DO UPDATE SET value = excluded.value WHERE value <> excluded.value";
    connection.execute(sql, params![in_use]).map(|_| ())
}

fn is_in_use(connection: &Connection) -> Result<bool, rusqlite::Error> {
    let sql = "SELECT value FROM oncehook_meta WHERE name = 'in_use'";
    Ok(connection.query_row(sql, [], |row| row.get(0)).optional()?.unwrap_or(false))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_back_and_anything_else_is_none() {
        let file = tempfile::tempfile().unwrap();
        assert_eq!(Record::read(&file).unwrap(), None, "an earlier release left it empty");
        let answered = Answered { file: file.try_clone().unwrap(), journal: 17 };
        for last in [i64::MAX, 5] {
            answered.note(last).unwrap();
            assert_eq!(Record::read(&file).unwrap(), Some(Record { journal: 17, answered: last }));
        }
        file.write_all_at(b"journey", 0).unwrap();
        assert_eq!(Record::read(&file).unwrap(), None);
    }
}
