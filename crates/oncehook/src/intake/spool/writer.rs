//! The one thread that works on the spool's file.
//!
//! Group commit without a timer, as in the embedded journal: while one commit runs, the next batch gathers. After a failed
//! write or sync the connection is thrown away, and the log is read as after a crash and emptied before the next commit.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError};
use rusqlite::{Connection, TransactionBehavior};
use tokio::sync::oneshot;

use super::rows::{self, Counts};
use super::{Shared, SpoolError, SpoolOptions, Spooled};
use crate::event::{EventId, EventIds, NewEvents};
use crate::journal::sqlite::place::LockFile;
use crate::journal::sqlite::writer::{blames_the_disk, random_tail};
use crate::journal::sqlite::{OpenError, checkpoint, connection};
use crate::journal::{Appended, Receipt, Verdict};

/// What the thread can be told.
#[expect(clippy::large_enum_variant, reason = "nearly every command is an append, and it is moved once")]
pub(super) enum Command {
    Append(Work),
    Read { limit: usize, bytes: u64, answer: Answer<Vec<Spooled>> },
    Find { id: EventId, answer: Answer<Option<Spooled>> },
    Remove { seqs: Vec<i64>, answer: Answer<()> },
    SetAside { seq: i64, reason: String, answer: Answer<()> },
    Close(oneshot::Sender<()>),
}

type Answer<T> = oneshot::Sender<Result<T, SpoolError>>;

/// The events of one request, and where to send the outcome.
pub(super) struct Work {
    pub(super) events: NewEvents,
    pub(super) answer: Answer<Receipt>,
}

impl Work {
    /// What the events weigh in memory, roughly.
    pub(super) fn bytes(&self) -> usize {
        self.events.iter().map(|event| event.body.len() + event.headers.len()).sum()
    }
}

/// The thread's end of the queue. However it ends, by a panic too, nobody is left waiting for it.
pub(super) struct Post {
    pub(super) commands: Receiver<Command>,
    pub(super) shared: Arc<Shared>,
}

impl Drop for Post {
    fn drop(&mut self) {
        if std::thread::panicking() {
            *self.shared.failing() = Some("the spool's writer has died".to_owned());
        }
        self.shared.close();
        // Dropping a command tells whoever waits for it.
        while self.commands.try_recv().is_ok() {}
    }
}

/// A batch ends at this many events or bytes, whichever comes first.
const BATCH_EVENTS: usize = 512;
const BATCH_BYTES: usize = 8 << 20;

/// How often the thread wakes without work, and tries a failed file again.
const TICK: Duration = Duration::from_millis(250);

/// An empty file of more pages than this (16 MiB) is made small again.
const SHRINK_PAGES: i64 = 4_096;

pub(super) struct Writer {
    path: PathBuf,
    max_events: u64,
    max_bytes: u64,
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
    pub(super) fn open(
        path: &Path,
        options: &SpoolOptions,
        lock: LockFile,
        shared: Arc<Shared>,
    ) -> Result<Self, OpenError> {
        let (connection, counts) = open_file(path)?;
        let last = rows::last_sequence(&connection)?;
        let mut writer = Self {
            path: path.to_path_buf(),
            max_events: options.max_events,
            max_bytes: options.max_bytes,
            shared,
            connection: Some(connection),
            file: identity(path).unwrap_or_default(),
            counts: Counts::default(),
            ids: EventIds::above(last, random_tail()),
            tried: Instant::now(),
            _lock: lock,
        };
        writer.recount(counts, 0);
        writer.tell_oldest();
        Ok(writer)
    }

    /// Runs until told to close, or until the last handle is gone.
    pub(super) fn run(mut self, commands: &Receiver<Command>) {
        let mut batch = Vec::new();
        loop {
            let mut next = match commands.recv_timeout(TICK) {
                Ok(Command::Append(work)) => {
                    let next = gather(work, commands, &self.shared, &mut batch);
                    self.store(&mut batch);
                    next
                }
                Ok(other) => Some(other),
                Err(RecvTimeoutError::Timeout) => {
                    self.shrink();
                    None
                }
                Err(RecvTimeoutError::Disconnected) => return,
            };
            if let Some(Command::Close(done)) = next {
                // Nothing stands behind it: the spool refuses work from the moment on that it is closed.
                drop(self);
                // Whoever asked may be gone, here and below.
                let _ = done.send(());
                return;
            }
            if let Some(command) = next.take() {
                self.answer(command);
            }
            self.mend();
            self.tell_oldest();
        }
    }

    fn answer(&mut self, command: Command) {
        match command {
            Command::Read { limit, bytes, answer } => drop(answer.send(self.read(limit, bytes))),
            Command::Find { id, answer } => drop(answer.send(self.with(|desk| rows::find(desk, id)))),
            Command::Remove { seqs, answer } => {
                drop(answer.send(self.change(|desk, counts| rows::remove(desk, &seqs, counts))));
            }
            Command::SetAside { seq, reason, answer } => {
                tracing::error!(seq, reason, "an event in the spool cannot be drained; it was set aside");
                let set = self.change(|desk, counts| rows::set_aside(desk, &[seq], &reason, counts));
                drop(answer.send(set));
            }
            // These two are met in `run`.
            Command::Append(_) | Command::Close(_) => {}
        }
    }

    /// Stores a batch and answers it. All branching about what can go wrong is here.
    fn store(&mut self, batch: &mut Vec<Work>) {
        if identity(&self.path) != Some(self.file) {
            // What is in the file that was opened can still be drained; a new event would be lost at the next start.
            let reason = format!("{} was removed or replaced", self.path.display());
            if self.shared.failing().replace(reason.clone()).is_none() {
                tracing::error!(reason, "the spool takes no more events");
            }
            return self.refuse(batch, &reason);
        }
        let Some(connection) = self.connection.as_mut() else {
            let reason = self.shared.failing().clone().unwrap_or_default();
            return self.refuse(batch, &reason);
        };
        self.ids.stay_above(self.shared.above.load(Ordering::Relaxed));
        let room = Room { events: self.max_events, bytes: self.max_bytes };
        match commit(connection, &mut self.ids, self.counts, room, batch) {
            Ok((counts, outcomes)) => {
                let arrived = batch.iter().map(|work| work.events.len()).sum();
                self.recount(counts, arrived);
                for (work, outcome) in batch.drain(..).zip(outcomes) {
                    let _ = work.answer.send(outcome);
                }
            }
            Err(error) if !blames_the_disk(&error) && batch.len() > 1 => {
                for work in std::mem::take(batch) {
                    self.store(&mut vec![work]);
                }
            }
            Err(error) => {
                self.refuse(batch, "the file could not be written");
                self.note(&error);
            }
        }
    }

    fn refuse(&self, batch: &mut Vec<Work>, reason: &str) {
        for work in batch.drain(..) {
            self.shared.outstanding.fetch_sub(work.events.len(), Ordering::AcqRel);
            let _ = work.answer.send(Err(SpoolError::Unavailable(reason.to_owned())));
        }
    }

    fn read(&mut self, limit: usize, bytes: u64) -> Result<Vec<Spooled>, SpoolError> {
        loop {
            let (sound, damaged) = self.with(|desk| rows::read(desk, limit, bytes))?;
            if !damaged.is_empty() {
                for seq in &damaged {
                    tracing::error!(seq, "an event in the spool is damaged; it is set aside");
                }
                self.change(|desk, counts| rows::set_aside(desk, &damaged, rows::DAMAGED, counts))?;
            }
            // Behind nothing but damaged rows there may be others.
            if !sound.is_empty() || damaged.is_empty() {
                return Ok(sound);
            }
        }
    }

    /// Looks something up.
    fn with<T>(&mut self, work: impl FnOnce(&Connection) -> Result<T, rusqlite::Error>) -> Result<T, SpoolError> {
        let Some(connection) = &self.connection else { return Err(self.unavailable()) };
        work(connection).map_err(|error| {
            self.note(&error);
            SpoolError::Unavailable(error.to_string())
        })
    }

    /// Changes rows in one transaction. The work says what is there then, given what there was.
    fn change(
        &mut self,
        work: impl FnOnce(&Connection, Counts) -> Result<Counts, rusqlite::Error>,
    ) -> Result<(), SpoolError> {
        let before = self.counts;
        let Some(connection) = &mut self.connection else { return Err(self.unavailable()) };
        let changed = connection.transaction_with_behavior(TransactionBehavior::Immediate).and_then(|transaction| {
            let counts = work(&transaction, before)?;
            transaction.commit()?;
            Ok(counts)
        });
        match changed {
            Ok(counts) => {
                self.recount(counts, 0);
                Ok(())
            }
            Err(error) => {
                self.note(&error);
                Err(SpoolError::Unavailable(error.to_string()))
            }
        }
    }

    fn unavailable(&self) -> SpoolError {
        SpoolError::Unavailable(self.shared.failing().clone().unwrap_or_default())
    }

    /// An error that blames the disk ends the connection.
    fn note(&mut self, error: &rusqlite::Error) {
        if !blames_the_disk(error) {
            tracing::error!(%error, "the spool could not do a piece of work");
            return;
        }
        tracing::error!(%error, "the spool cannot be used until its file can");
        *self.shared.failing() = Some(error.to_string());
        if let Some(connection) = self.connection.take() {
            connection::abandon(connection);
        }
        self.tried = Instant::now();
    }

    /// What the file holds now. So many events were on their way into it and are not any more.
    fn recount(&mut self, counts: Counts, arrived: usize) {
        let rows = |counts: Counts| usize::try_from(counts.rows).unwrap_or(usize::MAX);
        let (before, now) = (rows(self.counts).saturating_add(arrived), rows(counts));
        // In one step: whoever finds nothing outstanding opens the way past what is in the file.
        if now >= before {
            self.shared.outstanding.fetch_add(now - before, Ordering::AcqRel);
        } else {
            self.shared.outstanding.fetch_sub(before - now, Ordering::AcqRel);
        }
        self.counts = counts;
        self.shared.events.store(counts.rows, Ordering::Relaxed);
        self.shared.bytes.store(counts.bytes, Ordering::Relaxed);
        self.shared.aside.store(counts.aside, Ordering::Relaxed);
    }

    fn tell_oldest(&mut self) {
        let oldest = self.connection.as_ref().and_then(|connection| rows::oldest(connection).ok().flatten());
        self.shared.oldest.store(oldest.unwrap_or(i64::MIN), Ordering::Relaxed);
    }

    /// Tries a file again that cannot be used. One that was removed is let go of when it is empty.
    fn mend(&mut self) {
        let empty = self.counts.rows == 0 && self.shared.failing().is_some();
        if (self.connection.is_none() || empty) && self.tried.elapsed() >= TICK {
            self.reopen();
        }
    }

    fn reopen(&mut self) {
        self.tried = Instant::now();
        if let Some(connection) = self.connection.take() {
            connection::abandon(connection);
        }
        match open_file(&self.path) {
            Ok((connection, counts)) => {
                self.connection = Some(connection);
                self.file = identity(&self.path).unwrap_or_default();
                self.recount(counts, 0);
                *self.shared.failing() = None;
                tracing::info!("the spool can be used again");
            }
            Err(error) => *self.shared.failing() = Some(error.to_string()),
        }
    }

    /// Gives the disk back what a long outage took.
    fn shrink(&mut self) {
        let Some(connection) = self.connection.as_ref().filter(|_| self.counts == Counts::default()) else {
            return;
        };
        let pages = connection.pragma_query_value(None, "page_count", |row| row.get::<_, i64>(0));
        if pages.is_ok_and(|pages| pages > SHRINK_PAGES)
            && let Err(error) = connection.execute_batch("VACUUM; PRAGMA wal_checkpoint(TRUNCATE)")
        {
            self.note(&error);
        }
    }
}

/// A sound connection, and what the file holds.
fn open_file(path: &Path) -> Result<(Connection, Counts), OpenError> {
    let mut connection = connection::open_writer(path)?;
    // A log left by a crash may hold commits that were written but never synced.
    checkpoint::empty_the_log(&connection)?;
    rows::prepare(&mut connection)?;
    // Nobody reads beside the writer, so SQLite's own checkpoints do.
    connection.pragma_update(None, "wal_autocheckpoint", 2_000)?;
    let counts = rows::counts(&connection)?;
    Ok((connection, counts))
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    std::fs::metadata(path).ok().map(|file| (file.dev(), file.ino()))
}

/// Fills the batch from the queue. Returns the first other command, if one was met.
fn gather(first: Work, commands: &Receiver<Command>, shared: &Shared, batch: &mut Vec<Work>) -> Option<Command> {
    let (mut events, mut bytes) = (first.events.len(), first.bytes());
    batch.push(first);
    let mut other = None;
    while events < BATCH_EVENTS && bytes < BATCH_BYTES && other.is_none() {
        match commands.try_recv() {
            Ok(Command::Append(work)) => {
                events += work.events.len();
                bytes += work.bytes();
                batch.push(work);
            }
            Ok(command) => other = Some(command),
            Err(_) => break,
        }
    }
    shared.queued_bytes.fetch_sub(bytes, Ordering::Relaxed);
    other
}

/// How much the file may hold.
#[derive(Clone, Copy)]
struct Room {
    events: u64,
    bytes: u64,
}

type Outcomes = Vec<Result<Receipt, SpoolError>>;

/// One batch, one transaction. A request for which there is no room costs only itself.
fn commit(
    connection: &mut Connection,
    ids: &mut EventIds,
    mut counts: Counts,
    room: Room,
    batch: &[Work],
) -> Result<(Counts, Outcomes), rusqlite::Error> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let mut outcomes = Vec::with_capacity(batch.len());
    for work in batch {
        let mut wanted = counts;
        for event in &work.events {
            if !rows::recall(&transaction, event)?.is_held() {
                wanted.rows += 1;
                wanted.bytes += rows::weight(event);
            }
        }
        if wanted.rows > counts.rows && (wanted.rows + wanted.aside > room.events || wanted.bytes > room.bytes) {
            outcomes.push(Err(SpoolError::Full));
            continue;
        }
        outcomes.push(Ok(put(&transaction, ids, &mut counts, work)?));
    }
    crate::crash::point("spooling");
    transaction.commit()?;
    crate::crash::point("spooled");
    Ok((counts, outcomes))
}

fn put(
    connection: &Connection,
    ids: &mut EventIds,
    counts: &mut Counts,
    work: &Work,
) -> Result<Receipt, rusqlite::Error> {
    let mut receipt = Receipt::with_capacity(work.events.len());
    for event in &work.events {
        let known = rows::recall(connection, event)?;
        // What was damaged is replaced by this copy of it, under the id that was answered then.
        let own = match known.damaged {
            Some((row, id)) if !known.is_held() => {
                *counts = rows::discard(connection, row, *counts)?;
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
