//! The thread that sees batches to the disk and answers them.
//!
//! A batch is committed without a sync and handed over here; the writer stores the next one while this thread waits for the
//! disk. On two cores that waiting was a seventh of the time in which events were accepted.
//!
//! Promises: an answer is sent after a sync of the log that began when everything in its batch, and in all batches before
//! it, had been written. After a sync that failed every batch is refused, for good: the writer gives the connection up and
//! starts anew with another log handle.
//! Does not: decide what is stored, or sync what the writer does for others than senders. Those commits sync by themselves.
//!
//! Why a commit without its sync is safe: SQLite's `synchronous = NORMAL` keeps the log a chain in which each commit's
//! checksum stands on those before it. A power cut leaves a beginning of that chain, and what was answered is in it. A
//! checkpoint syncs the log before it copies anything out of it.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use crossbeam_channel::{Receiver, Sender};

use super::answered::Answered;
use super::place::beside;
use super::writer::{Work, refuse};
use super::{OpenError, priority};
use crate::journal::{Receipt, Verdict};
use crate::planted::{self, Bug};

/// A batch that is committed, with what its senders will hear.
pub(super) struct Committed {
    pub(super) batch: Vec<Work>,
    pub(super) receipts: Vec<Receipt>,
    /// Whether there is something in it to sync. If not, it still waits for those before it.
    pub(super) changed: bool,
}

pub(super) struct Syncer {
    /// One batch may wait while another is synced.
    queue: Option<Sender<Committed>>,
    /// One word for each batch that was answered.
    answered: Receiver<()>,
    /// Batches that were handed over and not answered yet, as far as we know.
    under_way: usize,
    failed: Arc<Mutex<Option<String>>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Syncer {
    /// For the log of a database that is open.
    pub(super) fn start(path: &Path, answered: &Answered) -> Result<Self, OpenError> {
        LogFile::open(path)
            .and_then(|log| Self::of(log, Some(answered.another()?)))
            .map_err(|error| OpenError::Place { path: path.to_path_buf(), reason: error.to_string() })
    }

    fn of(log: LogFile, record: Option<Answered>) -> io::Result<Self> {
        let (queue, batches) = crossbeam_channel::bounded(1);
        let (tell, answered) = crossbeam_channel::unbounded();
        let failed = Arc::new(Mutex::new(None));
        let desk = Desk { log, record, batches, tell, failed: Arc::clone(&failed) };
        let thread = std::thread::Builder::new().name("journal-sync".to_owned()).spawn(move || desk.run())?;
        Ok(Self { queue: Some(queue), answered, under_way: 0, failed, thread: Some(thread) })
    }

    /// Takes a batch over: it is answered once it is on the disk. Waits if two are under way.
    pub(super) fn answer(&mut self, mut committed: Committed) {
        self.under_way += 1;
        if let Some(queue) = &self.queue {
            match queue.send(committed) {
                Ok(()) => return,
                Err(returned) => committed = returned.0,
            }
        }
        // The thread has died, and has said so.
        refuse(&mut committed.batch, "the journal's log could not be synced");
    }

    /// Whether a batch is under way.
    pub(super) fn is_busy(&mut self) -> bool {
        self.under_way -= self.answered.try_iter().count().min(self.under_way);
        self.under_way > 0
    }

    /// Waits until the next batch has been answered.
    pub(super) fn wait(&mut self) {
        match self.answered.recv() {
            Ok(()) => self.under_way = self.under_way.saturating_sub(1),
            // The thread has died.
            Err(_) => self.under_way = 0,
        }
    }

    /// Why batches are refused from now on, if they are.
    pub(super) fn failure(&self) -> Option<String> {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Answers what was handed over, and ends.
    pub(super) fn stop(&mut self) {
        self.queue = None;
        if let Some(thread) = self.thread.take() {
            // A panic has been reported by its thread.
            let _ = thread.join();
        }
    }
}

/// The thread's side.
struct Desk {
    log: LogFile,
    /// Where the last answered event is written down.
    record: Option<Answered>,
    batches: Receiver<Committed>,
    tell: Sender<()>,
    failed: Arc<Mutex<Option<String>>>,
}

impl Desk {
    fn run(self) {
        priority::raise();
        // However this ends, nothing is accepted by somebody who cannot sync.
        let _last_word = LastWord(Arc::clone(&self.failed));
        let mut taken = Vec::new();
        while let Ok(first) = self.batches.recv() {
            taken.push(first);
            taken.extend(self.batches.try_iter());
            let changed = taken.iter().any(|committed| committed.changed);
            let durable = !self.has_failed() && (!changed || self.sync());
            crate::crash::point("after_sync");
            if durable {
                self.note(&taken);
            }
            for committed in taken.drain(..) {
                answer(committed, durable);
                // Whoever asked may be gone.
                let _ = self.tell.send(());
            }
        }
    }

    /// Writes down which event is answered last.
    fn note(&self, taken: &[Committed]) {
        if planted::has(Bug::NormalSync) {
            // What that mistake loses must be found by those who look for it, not by the next start.
            return;
        }
        let appended = taken.iter().flat_map(|committed| &committed.receipts).flatten();
        let stored = appended.filter(|one| matches!(one.verdict, Verdict::New | Verdict::Quarantined));
        if let (Some(record), Some(last)) = (&self.record, stored.map(|one| one.id.sequence()).max()) {
            // Without it a lost log may go unnoticed at the next start. That is no reason to refuse what is stored.
            let _ = record.note(last);
        }
    }

    fn has_failed(&self) -> bool {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Sees to the disk what was written to the log so far. Returns whether it is there. The first failure is the last word.
    fn sync(&self) -> bool {
        let Err(error) = self.log.sync() else { return true };
        let reason = format!("syncing the write-ahead log failed: {error}");
        *self.failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(reason);
        false
    }
}

/// Says, when the thread has panicked, that nothing is synced any more.
struct LastWord(Arc<Mutex<Option<String>>>);

impl Drop for LastWord {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let mut failed = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            failed.get_or_insert_with(|| "the thread that syncs the log has died".to_owned());
        }
    }
}

fn answer(committed: Committed, durable: bool) {
    let Committed { mut batch, receipts, .. } = committed;
    if !durable {
        return refuse(&mut batch, "the database could not be written");
    }
    for (work, receipt) in batch.into_iter().zip(receipts) {
        // The sender may have hung up. The event is stored all the same.
        let _ = work.answer.send(Ok(receipt));
    }
}

/// A handle of our own to the write-ahead log. (Unlike the database file it carries no locks, so a handle may be closed.)
pub(super) struct LogFile(File);

impl LogFile {
    /// The log of a database that some connection has open.
    pub(super) fn open(database: &Path) -> io::Result<Self> {
        File::open(beside(database, "-wal")).map(Self)
    }

    /// Waits until what was written to the log, through whatever handle, is on the disk.
    pub(super) fn sync(&self) -> io::Result<()> {
        if planted::has(Bug::NormalSync) {
            return Ok(());
        }
        self.0.sync_data()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::NewEvents;
    use crate::journal::AppendError;
    use tokio::sync::oneshot;

    type Heard = oneshot::Receiver<Result<Receipt, AppendError>>;

    /// A batch of one request, and what its sender hears.
    fn batch(changed: bool) -> (Committed, Heard) {
        let (answer, heard) = oneshot::channel();
        let batch = vec![Work { events: NewEvents::new(), answer, submitted: std::time::Instant::now() }];
        (Committed { batch, receipts: vec![Receipt::new()], changed }, heard)
    }

    #[test]
    fn batches_are_answered_and_the_writer_learns_of_it() {
        let mut syncer = Syncer::of(LogFile(tempfile::tempfile().unwrap()), None).unwrap();
        assert!(!syncer.is_busy());
        let (first, heard) = batch(true);
        let (second, heard_too) = batch(false);
        syncer.answer(first);
        syncer.answer(second);
        syncer.wait();
        syncer.wait();
        assert!(!syncer.is_busy());
        assert!(heard.blocking_recv().unwrap().is_ok());
        assert!(heard_too.blocking_recv().unwrap().is_ok());
        assert_eq!(syncer.failure(), None);
    }

    #[test]
    fn after_a_failed_sync_everything_is_refused() {
        // What cannot be synced says so (EINVAL).
        let mut syncer = Syncer::of(LogFile(File::open("/dev/null").unwrap()), None).unwrap();
        let (harmless, heard) = batch(false);
        syncer.answer(harmless);
        assert!(heard.blocking_recv().unwrap().is_ok(), "there was nothing to sync");
        for changed in [true, false, true] {
            let (committed, heard) = batch(changed);
            syncer.answer(committed);
            assert!(matches!(heard.blocking_recv().unwrap(), Err(AppendError::Unavailable(_))));
        }
        assert!(syncer.failure().is_some_and(|reason| reason.contains("syncing the write-ahead log failed")));
    }

    #[test]
    fn what_was_handed_over_is_answered_before_the_end() {
        let mut syncer = Syncer::of(LogFile(tempfile::tempfile().unwrap()), None).unwrap();
        let (committed, mut heard) = batch(true);
        syncer.answer(committed);
        syncer.stop();
        assert!(heard.try_recv().unwrap().is_ok());
        let (late, heard) = batch(true);
        syncer.answer(late);
        assert!(heard.blocking_recv().unwrap().is_err(), "nobody is there to sync it");
    }
}
