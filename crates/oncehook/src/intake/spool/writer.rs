//! The one thread that works on the spool's file.
//!
//! Group commit without a timer, as in the embedded journal: while one commit runs, the next batch gathers. After a failed
//! write or sync the connection is thrown away, and the log is read as after a crash and emptied before the next commit.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam_channel::RecvTimeoutError;
use oncehook_verify::UnixMicros;
use rusqlite::{Connection, TransactionBehavior};

use super::rows::{self, Counts};
use super::{Shared, SpoolError, SpoolOptions, Spooled};
use crate::event::EventIds;
use crate::journal::sqlite::commands::{Batch, Commands, Work, refuse};
use crate::journal::sqlite::place::LockFile;
use crate::journal::sqlite::writer::{blames_the_disk, random_tail};
use crate::journal::sqlite::{OpenError, checkpoint, connection};
use crate::journal::{AppendError, Appended, Receipt, Verdict};

/// Something else to do with the file. It answers its caller by itself.
pub(super) type Job = Box<dyn FnOnce(&mut Writer) + Send>;

/// How often the thread wakes without work, and tries a failed file again.
const TICK: Duration = Duration::from_millis(250);

/// An empty file of more pages than this (16 MiB) is made small again.
const SHRINK_PAGES: i64 = 4_096;

pub(super) struct Writer {
    options: SpoolOptions,
    shared: Arc<Shared>,
    /// `None` while the file cannot be used.
    connection: Option<Connection>,
    /// Device and number of the file that is open, to know whether it is still the one at the path.
    file: (u64, u64),
    counts: Counts,
    ids: EventIds,
    tried: Instant,
    _lock: LockFile,
}

impl Writer {
    pub(super) fn open(options: SpoolOptions, lock: LockFile, shared: Arc<Shared>) -> Result<Self, OpenError> {
        let (connection, counts) = open_file(&options.path)?;
        let last = rows::last_sequence(&connection)?;
        let mut writer = Self {
            shared,
            connection: Some(connection),
            file: identity(&options.path).unwrap_or_default(),
            counts: Counts::default(),
            ids: EventIds::above(last, random_tail()),
            tried: Instant::now(),
            options,
            _lock: lock,
        };
        writer.recount(counts, 0);
        writer.tell_oldest();
        Ok(writer)
    }

    /// Runs until it is asked to close, or until the last handle is gone.
    pub(super) fn run(mut self, commands: &Commands<Job>) {
        loop {
            match commands.receiver.recv_timeout(TICK) {
                Ok(command) => {
                    let mut batch = Batch::begin(command, commands);
                    while !batch.works.is_empty() && batch.take() {}
                    if !batch.works.is_empty() {
                        self.store(batch.works);
                    }
                    batch.jobs.into_iter().for_each(|job| job(&mut self));
                    if let Some(done) = batch.close {
                        // Nothing stands behind it: the spool refuses work from the moment on that it is closed.
                        drop(self);
                        // The caller may be gone.
                        let _ = done.send(());
                        return;
                    }
                }
                Err(RecvTimeoutError::Timeout) => self.shrink(),
                Err(RecvTimeoutError::Disconnected) => return,
            }
            self.mend();
            self.tell_oldest();
        }
    }

    /// Stores a batch and answers it. All branching about what can go wrong is here.
    fn store(&mut self, works: Vec<Work>) {
        let path = &self.options.path;
        if identity(path) != Some(self.file) {
            // What is in the file that was opened can still be drained; a new event would be lost at the next start.
            let reason = format!("{} was removed or replaced", path.display());
            if self.shared.queue.failing().replace(reason.clone()).is_none() {
                tracing::error!(reason, "the spool takes no more events");
            }
            return self.refuse(works, &reason);
        }
        let Some(connection) = self.connection.as_mut() else {
            return self.refuse(works, &self.shared.queue.reason());
        };
        self.ids.stay_above(self.shared.above.load(Ordering::Relaxed));
        match commit(connection, &mut self.ids, self.counts, &self.options, &works) {
            Ok((counts, outcomes)) => {
                self.recount(counts, count(&works));
                for (work, outcome) in works.into_iter().zip(outcomes) {
                    // The sender may have hung up.
                    let _ = work.answer.send(outcome);
                }
            }
            Err(error) if !blames_the_disk(&error) && works.len() > 1 => {
                works.into_iter().for_each(|work| self.store(vec![work]));
            }
            Err(error) => {
                self.refuse(works, "the file could not be written");
                self.note(&error);
            }
        }
    }

    fn refuse(&self, works: Vec<Work>, reason: &str) {
        self.shared.outstanding.fetch_sub(count(&works), Ordering::AcqRel);
        refuse(works, reason);
    }

    pub(super) fn read(&mut self, limit: usize, bytes: u64) -> Result<Vec<Spooled>, SpoolError> {
        loop {
            let (sound, damaged) = self.with(|connection| rows::read(connection, limit, bytes))?;
            if damaged.is_empty() {
                return Ok(sound);
            }
            for seq in &damaged {
                tracing::error!(seq, "an event in the spool is damaged; it is set aside");
            }
            self.change(|connection, counts| rows::set_aside(connection, &damaged, rows::DAMAGED, counts))?;
            // Behind nothing but damaged rows there may be others.
            if !sound.is_empty() {
                return Ok(sound);
            }
        }
    }

    pub(super) fn set_aside(&mut self, seq: i64, reason: &str) -> Result<(), SpoolError> {
        tracing::error!(seq, reason, "an event in the spool cannot be drained; it was set aside");
        self.change(|connection, counts| rows::set_aside(connection, &[seq], reason, counts))
    }

    /// Works on the file.
    pub(super) fn with<T>(
        &mut self,
        work: impl FnOnce(&mut Connection) -> rusqlite::Result<T>,
    ) -> Result<T, SpoolError> {
        let Some(connection) = &mut self.connection else {
            return Err(SpoolError::Unavailable(self.shared.queue.reason()));
        };
        work(connection).map_err(|error| {
            self.note(&error);
            SpoolError::Unavailable(error.to_string())
        })
    }

    /// Changes rows in one transaction. The work changes the counts with them.
    pub(super) fn change(
        &mut self,
        work: impl FnOnce(&Connection, &mut Counts) -> rusqlite::Result<()>,
    ) -> Result<(), SpoolError> {
        let mut counts = self.counts;
        self.with(|connection| {
            let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            work(&transaction, &mut counts)?;
            transaction.commit()
        })?;
        self.recount(counts, 0);
        Ok(())
    }

    /// An error that blames the disk ends the connection.
    fn note(&mut self, error: &rusqlite::Error) {
        if !blames_the_disk(error) {
            tracing::error!(%error, "the spool could not do a piece of work");
            return;
        }
        tracing::error!(%error, "the spool cannot be used until its file can");
        *self.shared.queue.failing() = Some(error.to_string());
        if let Some(connection) = self.connection.take() {
            connection::abandon(connection);
        }
        self.tried = Instant::now();
    }

    /// What the file holds now. So many events were on their way into it and are not any more.
    fn recount(&mut self, counts: Counts, arrived: usize) {
        let rows = |counts: Counts| usize::try_from(counts.rows).unwrap_or(usize::MAX);
        let (before, now) = (rows(self.counts).saturating_add(arrived), rows(counts));
        // In one step, which also goes down: if nothing is outstanding, the way past what is in the file is opened.
        self.shared.outstanding.fetch_add(now.wrapping_sub(before), Ordering::AcqRel);
        self.counts = counts;
        let share = |of: u64, most: u64| of.saturating_mul(100).checked_div(most).unwrap_or(100).min(100);
        let percent =
            share(counts.rows + counts.aside, self.options.max_events).max(share(counts.bytes, self.options.max_bytes));
        let mut state = self.shared.state();
        (state.events, state.bytes, state.set_aside) = (counts.rows, counts.bytes, counts.aside);
        state.percent = u8::try_from(percent).unwrap_or(100);
    }

    fn tell_oldest(&mut self) {
        let oldest = self.connection.as_ref().and_then(|connection| rows::oldest(connection).ok().flatten());
        self.shared.state().oldest = oldest.map(UnixMicros);
    }

    /// Tries a file again that cannot be used. One that was removed is let go of when it is empty.
    fn mend(&mut self) {
        let empty = self.counts.rows == 0 && self.shared.queue.failing().is_some();
        if (self.connection.is_none() || empty) && self.tried.elapsed() >= TICK {
            self.reopen();
        }
    }

    fn reopen(&mut self) {
        self.tried = Instant::now();
        if let Some(connection) = self.connection.take() {
            connection::abandon(connection);
        }
        match open_file(&self.options.path) {
            Ok((connection, counts)) => {
                self.connection = Some(connection);
                self.file = identity(&self.options.path).unwrap_or_default();
                self.recount(counts, 0);
                *self.shared.queue.failing() = None;
                tracing::info!("the spool can be used again");
            }
            Err(error) => *self.shared.queue.failing() = Some(error.to_string()),
        }
    }

    /// Gives the disk back what a long outage took.
    fn shrink(&mut self) {
        if let Some(connection) = self.connection.as_ref().filter(|_| self.counts == Counts::default())
            && let Ok(pages) = connection.pragma_query_value(None, "page_count", |row| row.get::<_, i64>(0))
            && pages > SHRINK_PAGES
            && let Err(error) = connection.execute_batch("VACUUM; PRAGMA wal_checkpoint(TRUNCATE)")
        {
            self.note(&error);
        }
    }
}

/// A sound connection, and what the file holds.
fn open_file(path: &Path) -> Result<(Connection, Counts), OpenError> {
    let mut connection = checkpoint::open_emptied(path)?;
    rows::prepare(&mut connection)?;
    // There are no readers beside the writer, so SQLite's own checkpoints are enough.
    connection.pragma_update(None, "wal_autocheckpoint", 2_000)?;
    let counts = rows::counts(&connection)?;
    Ok((connection, counts))
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    std::fs::metadata(path).ok().map(|file| (file.dev(), file.ino()))
}

fn count(works: &[Work]) -> usize {
    works.iter().map(|work| work.events.len()).sum()
}

type Outcomes = Vec<Result<Receipt, AppendError>>;

/// One batch, one transaction. A request for which there is no room costs only itself.
fn commit(
    connection: &mut Connection,
    ids: &mut EventIds,
    mut counts: Counts,
    room: &SpoolOptions,
    works: &[Work],
) -> rusqlite::Result<(Counts, Outcomes)> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let mut outcomes = Vec::with_capacity(works.len());
    for work in works {
        let mut wanted = counts;
        for event in &work.events {
            if rows::recall(&transaction, event)?.row.is_none() {
                wanted.rows += 1;
                wanted.bytes += rows::weight(event);
            }
        }
        if wanted.rows > counts.rows && (wanted.rows + wanted.aside > room.max_events || wanted.bytes > room.max_bytes)
        {
            outcomes.push(Err(AppendError::Full));
            continue;
        }
        outcomes.push(Ok(put(&transaction, ids, &mut counts, work)?));
    }
    crate::crash::point("spooling");
    transaction.commit()?;
    crate::crash::point("spooled");
    Ok((counts, outcomes))
}

fn put(connection: &Connection, ids: &mut EventIds, counts: &mut Counts, work: &Work) -> rusqlite::Result<Receipt> {
    let mut receipt = Receipt::with_capacity(work.events.len());
    for event in &work.events {
        let known = rows::recall(connection, event)?;
        // What was damaged is replaced by this copy of it, under the id that was answered then.
        let own = match known.damaged {
            Some((row, id)) if known.row.is_none() => {
                rows::delete(connection, &[row], counts)?;
                id
            }
            _ => None,
        };
        let mut own_id = || own.unwrap_or_else(|| ids.next(event.received_at));
        let (id, verdict) = match known.first {
            None if event.quarantine.is_some() => (own_id(), Verdict::Quarantined),
            None => (own_id(), Verdict::New),
            Some((first, true)) => (first, Verdict::Duplicate),
            Some((first, false)) => (first, Verdict::Conflict),
        };
        match known.row {
            Some(row) => rows::count_copy(connection, row)?,
            None => {
                // Another body under a key that waits needs an id of its own to travel: the journal will keep it as a conflict.
                let row_id = if known.first.is_none() { id } else { own_id() };
                rows::insert(connection, row_id, event)?;
                counts.rows += 1;
                counts.bytes += rows::weight(event);
            }
        }
        receipt.push(Appended { id, verdict, expires_at: event.expires_at });
    }
    Ok(receipt)
}
