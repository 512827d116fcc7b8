//! Moving the write-ahead log into the database file without making acknowledgements wait.
//!
//! A helper thread with its own connection copies pages while the writer goes on (a PASSIVE checkpoint). Alone, that never
//! lets the log start over under constant load, so it would grow without bound. Therefore, once the log is long and the
//! helper has copied nearly all of it, the writer itself does one short RESTART between two commits.
//!
//! A RESTART syncs the database file before the log may be overwritten. SQLite's PASSIVE pass does that only if it reaches
//! the log's end, which it never does under load, so all that was copied would be synced while acknowledgements wait.
//! The helper therefore syncs the file itself after each pass. It only makes the RESTART's own sync short: the order that
//! keeps data safe (log synced, pages copied, file synced, log overwritten) is SQLite's, and stays complete without it.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use rusqlite::Connection;

use super::database_file::DatabaseFile;
use super::helper::Helper;
use super::{OpenError, busy, connection};

/// The helper starts copying when this many pages have been logged since it last did.
const COPY_EVERY_PAGES: u64 = 250;

/// The log starts over once it has this many pages (32 MB) …
const RESTART_AT_PAGES: u64 = 4_000;

/// … and so small a part of it is left for the writer to copy: one page in 32. The longer the log, the more may be left.
const RESTART_LEFT_PART: u64 = 32;

/// A log of this size (1 GB) is restarted whatever it costs.
const RESTART_ANYWAY_PAGES: u64 = 131_072;

/// How long to leave a log alone that is being read.
const RESTART_RETRY: Duration = Duration::from_secs(1);

pub(super) struct Checkpointer {
    /// Woken with `true` to copy, with `false` to close its connection without another checkpoint.
    helper: Helper<bool>,
    progress: Arc<Progress>,
    /// A log that was being read is not tried again before this.
    restart_after: Instant,
}

#[derive(Default)]
struct Progress {
    copying: AtomicBool,
    /// How many pages of the log had been copied when the helper last looked.
    copied: AtomicU64,
}

impl Checkpointer {
    pub(super) fn start(path: &Path) -> Result<Self, OpenError> {
        let connection = connection::open_writer(path)?;
        let file = DatabaseFile::open(path).map_err(OpenError::place(path))?;
        let progress = Arc::new(Progress::default());
        let copied_to = Arc::clone(&progress);
        let died = "the thread that copies the write-ahead log has died";
        let helper = Helper::start("journal-checkpoint", died, move |woken: Receiver<bool>, failure| {
            while let Ok(copies) = woken.recv() {
                if !copies {
                    return connection::abandon(connection);
                }
                match copy(&connection, &file) {
                    Ok(copied) => copied_to.copied.store(copied, Ordering::Release),
                    Err(reason) => failure.set(reason),
                }
                copied_to.copying.store(false, Ordering::Release);
            }
        });
        let helper = helper.map_err(OpenError::place(path))?;
        Ok(Self { helper, progress, restart_after: Instant::now() })
    }

    /// Called by the writer between commits with the length of the log. Returns whether it starts over with the next commit.
    ///
    /// An error means that pages may have been counted as copied that never reached the disk. Nothing may be accepted
    /// until the log has been copied anew from its beginning.
    pub(super) fn tend(&mut self, writer: &Connection, pages: u64) -> Result<bool, String> {
        if let Some(reason) = self.helper.failure() {
            return Err(reason);
        }
        if self.progress.copying.load(Ordering::Acquire) {
            return Ok(false);
        }
        let left = pages.saturating_sub(self.progress.copied.load(Ordering::Acquire));
        let long = pages >= RESTART_AT_PAGES;
        if (long && left <= pages / RESTART_LEFT_PART) || pages >= RESTART_ANYWAY_PAGES {
            return if Instant::now() >= self.restart_after { self.restart(writer) } else { Ok(false) };
        }
        if left >= COPY_EVERY_PAGES || long {
            self.progress.copying.store(true, Ordering::Release);
            // The helper has copied what it was last woken for, so there is room. If it has died, the next call says so.
            let _ = self.helper.hand_over(true);
        }
        Ok(false)
    }

    /// Never waits for readers: an acknowledgement would wait with it.
    fn restart(&mut self, writer: &Connection) -> Result<bool, String> {
        let restarted = busy::without_waiting(|| checkpoint(writer, "RESTART"));
        let (busy, copied) = restarted.map_err(|error| format!("restarting the write-ahead log failed: {error}"))?;
        self.progress.copied.store(if busy { copied } else { 0 }, Ordering::Release);
        if busy {
            self.restart_after = Instant::now() + RESTART_RETRY;
        }
        Ok(!busy)
    }

    /// Ends the helper.
    pub(super) fn stop(&mut self) {
        self.helper.stop();
    }

    /// Ends the helper without another checkpoint.
    pub(super) fn abandon(&mut self) {
        // If the helper has died, its connection is closed.
        let _ = self.helper.hand_over(false);
        self.stop();
    }
}

/// Copies what is in the log, and sees it to the disk. Returns how much of the log is copied.
fn copy(connection: &Connection, file: &DatabaseFile) -> Result<u64, String> {
    let pass = checkpoint(connection, "PASSIVE");
    let (_, copied) = pass.map_err(|error| format!("copying the write-ahead log failed: {error}"))?;
    file.sync().map_err(|error| format!("syncing the database file failed: {error}"))?;
    Ok(copied)
}

/// One pass over the log. Returns whether a connection was in the way, and how much of the log is copied.
fn checkpoint(connection: &Connection, mode: &str) -> rusqlite::Result<(bool, u64)> {
    connection.query_row(&format!("PRAGMA wal_checkpoint({mode})"), [], |row| {
        Ok((row.get(0)?, u64::try_from(row.get::<_, i64>(2)?).unwrap_or(0)))
    })
}

/// Writes what is in the log to the database file, syncs it, and empties the log, or fails. On the only connection to the
/// file that is everything in the log; with others open, what they have not copied yet.
pub(super) fn empty_the_log(connection: &Connection) -> Result<(), OpenError> {
    match checkpoint(connection, "TRUNCATE")? {
        (false, _) => Ok(()),
        (true, _) => Err(OpenError::Durability("the write-ahead log is in use and cannot be emptied".to_owned())),
    }
}

/// Opens a file to write to it. A log left by a crash may hold commits that were written but never synced. They look stored, and
/// a retry would be answered as a duplicate: they are made durable before anything else is.
pub(crate) fn open_emptied(path: &Path) -> Result<Connection, OpenError> {
    let connection = connection::open_writer(path)?;
    empty_the_log(&connection)?;
    Ok(connection)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_helper_that_has_died_is_noticed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("journal.db");
        let writer = connection::open_writer(&path).unwrap();
        let mut checkpointer = Checkpointer::start(&path).unwrap();
        assert!(checkpointer.tend(&writer, 10).is_ok());
        checkpointer.helper.stop();
        let died = std::thread::spawn(|| {});
        while !died.is_finished() {
            std::thread::yield_now();
        }
        checkpointer.helper.thread = Some(died);
        // As it was at work when it died.
        checkpointer.progress.copying.store(true, Ordering::Release);
        assert!(checkpointer.tend(&writer, 10_000).is_err(), "the log grows and no error says so");
    }
}
