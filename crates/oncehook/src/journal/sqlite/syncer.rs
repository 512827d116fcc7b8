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

use crossbeam_channel::Receiver;

use super::answered::Answered;
use super::commands::{Work, refuse};
use super::helper::Helper;
use super::place::beside;
use super::{OpenError, priority};
use crate::journal::{Receipt, Verdict};

/// A batch that is committed, with what its senders will hear.
pub(super) struct Committed {
    pub(super) works: Vec<Work>,
    pub(super) receipts: Vec<Receipt>,
    /// Whether there is something in it to sync. If not, it still waits for those before it.
    pub(super) changed: bool,
}

pub(super) struct Syncer {
    /// One batch may wait while another is synced.
    helper: Helper<Committed>,
    /// One word for each batch that was answered.
    answered: Receiver<()>,
    /// Batches that were handed over and not answered yet, as far as we know.
    under_way: usize,
}

impl Syncer {
    /// For the log of a database that is open.
    pub(super) fn start(path: &Path, answered: &Answered) -> Result<Self, OpenError> {
        LogFile::open(path).and_then(|log| Self::of(log, Some(answered.another()?))).map_err(OpenError::place(path))
    }

    /// `record`: where the last answered event is written down.
    fn of(log: LogFile, record: Option<Answered>) -> io::Result<Self> {
        let (tell, answered) = crossbeam_channel::unbounded();
        let died = "the thread that syncs the log has died";
        let helper = Helper::start("journal-sync", died, move |batches: Receiver<Committed>, failure| {
            priority::raise();
            let mut taken = Vec::new();
            while let Ok(first) = batches.recv() {
                taken.push(first);
                taken.extend(batches.try_iter());
                if failure.get().is_none()
                    && taken.iter().any(|committed| committed.changed)
                    && let Err(error) = log.sync()
                {
                    failure.set(format!("syncing the write-ahead log failed: {error}"));
                }
                let durable = failure.get().is_none();
                crate::crash::point("after_sync");
                if durable && let Some(record) = &record {
                    note(record, &taken);
                }
                for committed in taken.drain(..) {
                    answer(committed, durable);
                    // The writer may be gone.
                    let _ = tell.send(());
                }
            }
        })?;
        Ok(Self { helper, answered, under_way: 0 })
    }

    /// Takes a batch over: it is answered once it is on the disk. Waits if two are under way.
    pub(super) fn answer(&mut self, committed: Committed) {
        self.under_way += 1;
        if let Err(committed) = self.helper.hand_over(committed) {
            // The thread has died, and has said so.
            refuse(committed.works, "the journal's log could not be synced");
        }
    }

    /// Whether a batch is under way.
    pub(super) fn is_busy(&mut self) -> bool {
        self.under_way -= self.answered.try_iter().count().min(self.under_way);
        self.under_way > 0
    }

    /// Waits until the next batch has been answered.
    pub(super) fn wait(&mut self) {
        // An error means that the thread has died.
        self.under_way = self.answered.recv().map_or(0, |()| self.under_way.saturating_sub(1));
    }

    /// Why batches are refused from now on, if they are.
    pub(super) fn failure(&self) -> Option<String> {
        self.helper.failure()
    }

    /// Answers what was handed over, and ends.
    pub(super) fn stop(&mut self) {
        self.helper.stop();
    }
}

/// Writes down which event is answered last.
fn note(record: &Answered, taken: &[Committed]) {
    #[cfg(feature = "planted")]
    if super::planted::skips_sync() {
        return;
    }
    let appended = taken.iter().flat_map(|committed| &committed.receipts).flatten();
    let stored = appended.filter(|appended| matches!(appended.verdict, Verdict::New | Verdict::Quarantined));
    if let Some(last) = stored.map(|appended| appended.id.sequence()).max() {
        // Without it a lost log may go unnoticed at the next start. That is no reason to refuse what is stored.
        let _ = record.note(last);
    }
}

fn answer(committed: Committed, durable: bool) {
    if !durable {
        return refuse(committed.works, "the database could not be written");
    }
    for (work, receipt) in committed.works.into_iter().zip(committed.receipts) {
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
        #[cfg(feature = "planted")]
        if super::planted::skips_sync() {
            return Ok(());
        }
        self.0.sync_data()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::NewEvents;
    use crate::journal::{AppendError, Ticket};
    use tokio::sync::oneshot;

    fn syncer(log: File) -> Syncer {
        Syncer::of(LogFile(log), None).unwrap()
    }

    /// Hands a batch of one request over. Returns what its sender hears.
    fn hand_over(syncer: &mut Syncer, changed: bool) -> Ticket {
        let (answer, heard) = oneshot::channel();
        let works = vec![Work { events: NewEvents::new(), answer, submitted: std::time::Instant::now() }];
        syncer.answer(Committed { works, receipts: vec![Receipt::new()], changed });
        heard
    }

    #[test]
    fn batches_are_answered_and_the_writer_learns_of_it() {
        let mut syncer = syncer(tempfile::tempfile().unwrap());
        assert!(!syncer.is_busy());
        let heard = [true, false].map(|changed| hand_over(&mut syncer, changed));
        syncer.wait();
        syncer.wait();
        assert!(!syncer.is_busy());
        heard.into_iter().for_each(|heard| assert!(heard.blocking_recv().unwrap().is_ok()));
        assert_eq!(syncer.failure(), None);
    }

    #[test]
    fn after_a_failed_sync_everything_is_refused() {
        // What cannot be synced says so (EINVAL).
        let mut syncer = syncer(File::open("/dev/null").unwrap());
        let heard = hand_over(&mut syncer, false);
        assert!(heard.blocking_recv().unwrap().is_ok(), "there was nothing to sync");
        for changed in [true, false, true] {
            let heard = hand_over(&mut syncer, changed);
            assert!(matches!(heard.blocking_recv().unwrap(), Err(AppendError::Unavailable(_))));
        }
        assert!(syncer.failure().is_some_and(|reason| reason.contains("syncing the write-ahead log failed")));
    }

    #[test]
    fn what_was_handed_over_is_answered_before_the_end() {
        let mut syncer = syncer(tempfile::tempfile().unwrap());
        let mut heard = hand_over(&mut syncer, true);
        syncer.stop();
        assert!(heard.try_recv().unwrap().is_ok());
        let late = hand_over(&mut syncer, true);
        assert!(late.blocking_recv().unwrap().is_err(), "nothing is left to sync it");
    }
}
