//! Makes commits durable while the next batch is being written.
//!
//! A commit leaves its pages in the write-ahead log, but not yet on the disk. This thread syncs the log and only then sends
//! the answers of every commit that was in it when the sync began. The writer does not wait: syncing one batch and writing
//! the next overlap, and one sync often covers several commits.
//!
//! This is the guarantee of `synchronous=FULL` (the log is synced after a commit and before anybody hears of it) without its
//! waiting. SQLite itself runs with `synchronous=NORMAL`, in which it still syncs the log and the database file around
//! every checkpoint.
//!
//! A failed sync is final for its log: from then on every answer is a refusal, until the writer has emptied the log into the
//! database file and hands over a log to trust.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crossbeam_channel::{Receiver, Sender};
use tokio::sync::oneshot;

use super::OpenError;
use crate::journal::{AppendError, Receipt};

/// Commits that may wait for their sync. Beyond that the writer waits too.
const COMMITS_WAITING: usize = 64;

/// The answers of one commit.
pub(super) struct Committed {
    /// Whether the commit wrote anything. A batch of duplicates does not.
    pub(super) wrote: bool,
    pub(super) answers: Vec<(oneshot::Sender<Result<Receipt, AppendError>>, Receipt)>,
}

enum Step {
    Answer(Committed),
    /// A log that can be trusted from here on.
    Trust(File),
}

pub(super) struct Syncer {
    steps: Option<Sender<Step>>,
    shared: Arc<SyncState>,
    thread: Option<std::thread::JoinHandle<()>>,
}

#[derive(Default)]
struct SyncState {
    /// Commits handed over and not answered.
    waiting: AtomicUsize,
    failed: Mutex<Option<String>>,
}

impl Syncer {
    pub(super) fn start(database: &Path) -> Result<Self, OpenError> {
        let log = open_log(database)?;
        let shared = Arc::new(SyncState::default());
        let (steps, queue) = crossbeam_channel::bounded(COMMITS_WAITING);
        let state = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("journal-sync".to_owned())
            .spawn(move || run(log, &queue, &state))
            .map_err(|error| OpenError::Place { path: database.to_path_buf(), reason: error.to_string() })?;
        Ok(Self { steps: Some(steps), shared, thread: Some(thread) })
    }

    /// Sends the answers once everything committed so far is on the disk.
    pub(super) fn answer(&self, committed: Committed) {
        // Nothing was written, and nothing that was written before is still on its way: it is all durable already, or
        // its sync has failed. (The thread notes a failure before it counts down.)
        if !committed.wrote && self.shared.waiting.load(Ordering::Acquire) == 0 {
            return send(committed, self.failed().map_or(Ok(()), Err));
        }
        self.shared.waiting.fetch_add(1, Ordering::AcqRel);
        if let Some(steps) = &self.steps {
            // If the thread is gone the answers are dropped, which tells whoever waits that the outcome is unknown.
            let _ = steps.send(Step::Answer(committed));
        }
    }

    /// Why the log can no longer be trusted, if it cannot.
    pub(super) fn failed(&self) -> Option<String> {
        self.shared.failed.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Called when the log has been emptied: what is committed from here on can be synced again.
    pub(super) fn trust(&self, database: &Path) -> Result<(), OpenError> {
        let log = open_log(database)?;
        *self.shared.failed.lock().unwrap_or_else(PoisonError::into_inner) = None;
        if let Some(steps) = &self.steps {
            let _ = steps.send(Step::Trust(log));
        }
        Ok(())
    }

    /// Waits until every answer has been sent.
    pub(super) fn finish(&mut self) {
        self.steps = None;
        if let Some(thread) = self.thread.take() {
            // A panic has been reported by its thread; whoever waited was told by the dropped answers.
            let _ = thread.join();
        }
    }
}

impl Drop for Syncer {
    fn drop(&mut self) {
        self.finish();
    }
}

/// The write-ahead log as a file. Syncing it through any handle syncs it; SQLite holds no locks on it that closing ours
/// could release (in this mode they are on the `-shm` file).
fn open_log(database: &Path) -> Result<File, OpenError> {
    let mut name = database.as_os_str().to_owned();
    name.push("-wal");
    let path = PathBuf::from(name);
    File::open(&path).map_err(|error| OpenError::Durability(format!("open the log {}: {error}", path.display())))
}

fn run(mut log: File, steps: &Receiver<Step>, shared: &SyncState) {
    let mut round = Vec::new();
    let mut broken: Option<String> = None;
    while let Ok(first) = steps.recv() {
        let mut next = Some(first);
        // One sync for everything that is there, up to a change of the log.
        let mut trusted = None;
        while let Some(step) = next.take() {
            match step {
                Step::Answer(committed) => round.push(committed),
                Step::Trust(log) => {
                    trusted = Some(log);
                    break;
                }
            }
            next = steps.try_recv().ok();
        }
        if broken.is_none()
            && round.iter().any(|committed| committed.wrote)
            && let Err(error) = log.sync_data()
        {
            let reason = format!("syncing the log failed: {error}");
            *shared.failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(reason.clone());
            broken = Some(reason);
        }
        // Counted down before the answers go out: a later batch of duplicates may then be answered at once, and
        // rightly so, because these commits are durable.
        shared.waiting.fetch_sub(round.len(), Ordering::AcqRel);
        for committed in round.drain(..) {
            send(committed, broken.as_ref().map_or(Ok(()), |reason| Err(reason.clone())));
        }
        if let Some(trusted) = trusted {
            log = trusted;
            broken = None;
        }
    }
}

fn send(committed: Committed, synced: Result<(), String>) {
    for (answer, receipt) in committed.answers {
        // The sender may have hung up. The event is stored all the same.
        let _ = answer.send(synced.clone().map(|()| receipt).map_err(AppendError::Unavailable));
    }
}
