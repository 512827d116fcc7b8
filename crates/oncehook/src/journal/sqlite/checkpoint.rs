//! Moving the write-ahead log into the database file without making acknowledgements wait.
//!
//! A helper thread with its own connection copies pages while the writer goes on (a PASSIVE checkpoint). Alone, that never
//! lets the log start over under constant load, so it would grow without bound. Therefore, once the log is long and the
//! helper has copied nearly all of it, the writer itself does one short RESTART between two commits.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender};
use rusqlite::Connection;

use super::{OpenError, connection};

/// The helper starts copying when this many pages have been logged since it last did.
const COPY_EVERY_PAGES: u64 = 16_000;

/// The log starts over once it has this many pages (64 MB) …
const RESTART_AT_PAGES: u64 = 16_000;

/// … and at most this many of them are left for the writer to copy.
const RESTART_LEFT_PAGES: u64 = 1_000;

/// A log of this size (1 GB) is restarted whatever it costs.
const RESTART_ANYWAY_PAGES: u64 = 262_144;

pub(super) struct Checkpointer {
    wake: Option<Sender<()>>,
    progress: Arc<Progress>,
    thread: Option<std::thread::JoinHandle<()>>,
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
        let progress = Arc::new(Progress::default());
        let (wake, woken) = crossbeam_channel::bounded(1);
        let helper = Helper { connection, progress: Arc::clone(&progress), woken };
        let thread = std::thread::Builder::new()
            .name("journal-checkpoint".to_owned())
            .spawn(move || helper.run())
            .map_err(|error| OpenError::Place { path: path.to_path_buf(), reason: error.to_string() })?;
        Ok(Self { wake: Some(wake), progress, thread: Some(thread) })
    }

    /// Called by the writer between commits with the length of the log.
    pub(super) fn tend(&mut self, writer: &Connection, pages: u64) {
        if self.progress.copying.load(Ordering::Acquire) {
            return;
        }
        let left = pages.saturating_sub(self.progress.copied.load(Ordering::Acquire));
        let long = pages >= RESTART_AT_PAGES;
        if (long && left <= RESTART_LEFT_PAGES) || pages >= RESTART_ANYWAY_PAGES {
            self.restart(writer);
        } else if (left >= COPY_EVERY_PAGES || long)
            && let Some(wake) = &self.wake
        {
            self.progress.copying.store(true, Ordering::Release);
            // A full channel means that the helper is about to look anyway.
            let _ = wake.try_send(());
        }
    }

    fn restart(&self, writer: &Connection) {
        match checkpoint(writer, "RESTART") {
            // The next commit starts the log over.
            Ok(Pass { busy: false, .. }) => self.progress.copied.store(0, Ordering::Release),
            // Somebody reads an old state. Reads are time-boxed: try again after the next commit.
            Ok(pass) => self.progress.copied.store(pass.copied, Ordering::Release),
            // The next commit will meet the same trouble and say so.
            Err(error) => tracing::warn!(%error, "restarting the write-ahead log failed"),
        }
    }

    /// Ends the helper. The last connection to close empties the log.
    pub(super) fn stop(&mut self) {
        self.wake = None;
        if let Some(thread) = self.thread.take() {
            // A panic of the helper has been reported by its thread.
            let _ = thread.join();
        }
    }
}

struct Helper {
    connection: Connection,
    progress: Arc<Progress>,
    woken: Receiver<()>,
}

impl Helper {
    fn run(self) {
        while self.woken.recv().is_ok() {
            match checkpoint(&self.connection, "PASSIVE") {
                Ok(pass) => self.progress.copied.store(pass.copied, Ordering::Release),
                Err(error) => {
                    tracing::warn!(%error, "copying the write-ahead log failed");
                    std::thread::sleep(Duration::from_millis(100));
                }
            }
            self.progress.copying.store(false, Ordering::Release);
        }
    }
}

struct Pass {
    busy: bool,
    copied: u64,
}

fn checkpoint(connection: &Connection, mode: &str) -> Result<Pass, rusqlite::Error> {
    connection.query_row(&format!("PRAGMA wal_checkpoint({mode})"), [], |row| {
        let busy: i64 = row.get(0)?;
        let copied: i64 = row.get(2)?;
        Ok(Pass { busy: busy != 0, copied: u64::try_from(copied).unwrap_or(0) })
    })
}

/// Writes everything in the log to the database file anew and empties it, or fails.
pub(super) fn empty_the_log(connection: &Connection) -> Result<(), OpenError> {
    let pass = checkpoint(connection, "TRUNCATE")?;
    if pass.busy {
        return Err(OpenError::Durability("the write-ahead log is in use and cannot be emptied".to_owned()));
    }
    Ok(())
}
