//! The one thread that writes.
//!
//! Group commit without a timer: while one batch is on its way to the disk, the next one is stored. A batch is one transaction;
//! it commits when the batch before it is on the disk, and is then handed to the [`syncer`](super::syncer), which answers it.
//! If a row spoils the batch, the requests are stored one by one, so that a bad one costs only itself.
//!
//! What is done for others than senders (jobs) is on the disk before its commit returns. What is written behind the accepts
//! (counts, keys that are merged, the search index) may be lost in a power cut together with what came after it: it is made anew.
//!
//! After a failed write or sync the connection is thrown away. The kernel may have marked pages of the log as clean that
//! never reached the disk, so a later commit into the same log would prove nothing: the log is emptied into the database
//! file (a full checkpoint, which writes and syncs everything anew) before anything is accepted again. Until then
//! appends are refused at once.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::RecvTimeoutError;
use oncehook_verify::UnixMicros;
use rusqlite::{Connection, ErrorCode, TransactionBehavior};
use tokio::sync::oneshot;

use super::answered::{self, Answered};
use super::busy::{self, BUSY_WAIT};
use super::checkpoint::{Checkpointer, empty_the_log, open_emptied};
use super::commands::{BATCH_USUAL, Batch, Commands, Work, refuse};
use super::connection::Synced;
use super::groups::Gathering;
use super::ledger::{self, Ledger};
use super::place::LockFile;
use super::queries::{self, Statements};
use super::reader::Readers;
use super::syncer::{Committed, Syncer};
use super::{OpenError, Shared, connection, follower, priority, self_test, user_sql};
use crate::clock::Clock;
use crate::event::{EventIds, SourceName};
use crate::journal::{Layer, Receipt, SourceCounts, Verdict};

/// Something else to do with the connection, in transactions of its own: deliveries, orders, forgetting. It is given the reason
/// if there is no connection, and answers its caller by itself; what it returns is for the writer.
pub(super) type Job = Box<dyn FnOnce(Result<WriterContext<'_>, &str>) -> rusqlite::Result<()> + Send>;

/// What the writer works with.
pub(super) struct WriterContext<'w> {
    pub(super) connection: &'w mut Connection,
    pub(super) ledger: &'w mut Ledger,
    /// The steady time now.
    pub(super) now: UnixMicros,
    /// What the machine's clock says. It may have been set since the start.
    pub(super) wall: UnixMicros,
}

/// So many events are worth a commit as soon as the disk is free.
const BATCH_ENOUGH: usize = 64;

/// How often the thread wakes without work, and how old counts and search index may become.
const TICK: Duration = Duration::from_millis(100);
const FLUSH_EVERY: Duration = Duration::from_millis(500);
const REPLAYS_EVERY: Duration = Duration::from_millis(200);

/// How long to wait before a failed journal is tried again.
const REOPEN_EVERY: Duration = Duration::from_millis(250);

/// What the writer has from its start to its end.
pub(super) struct WriterSetup {
    pub(super) path: PathBuf,
    pub(super) clock: Clock,
    /// Held, not looked at.
    pub(super) _lock: LockFile,
    /// Where the last answered event is written down.
    pub(super) answered: Answered,
    pub(super) readers: Arc<Readers>,
    pub(super) shared: Arc<Shared>,
}

pub(super) struct Writer {
    setup: WriterSetup,
    /// `None` while the journal is failing.
    connection: Option<Connection>,
    ids: EventIds,
    ledger: Ledger,
    checkpointer: Checkpointer,
    syncer: Syncer,
    /// When commits of the connection reach the disk.
    synced: Synced,
    /// Events behind the last block of the search index.
    unsealed: u64,
    /// What is in the blocks behind the last group of the search index.
    gathering: Gathering,
    /// A block that could not be sealed is not tried again before this.
    seal_after: Instant,
    /// Whether there are events that were not looked at for replays.
    replays_pending: bool,
    replays_sought: Instant,
    flushed: Instant,
    tried: Instant,
}

impl Writer {
    /// `ledger_generation`: how many keys gather in memory before they are merged into the table.
    pub(super) fn new(
        mut connection: Connection,
        setup: WriterSetup,
        ledger_generation: usize,
    ) -> Result<Self, OpenError> {
        let mut ledger = Ledger::new(ledger_generation, Arc::clone(&setup.shared.recent));
        ledger.rebuild(&mut connection)?;
        let mut writer = Self {
            connection: None,
            ids: EventIds::above(queries::last_sequence(&connection)?, random_tail()),
            ledger,
            checkpointer: Checkpointer::start(&setup.path)?,
            syncer: Syncer::start(&setup.path, &setup.answered)?,
            synced: Synced::ByThemselves,
            unsealed: follower::unsealed(&connection)?,
            gathering: Gathering::new(),
            seal_after: Instant::now(),
            replays_pending: true,
            replays_sought: Instant::now(),
            flushed: Instant::now(),
            tried: Instant::now(),
            setup,
        };
        writer.tell_lag();
        writer.adopt(connection)?;
        writer.ledger.load_filter(&writer.setup.readers);
        Ok(writer)
    }

    /// Runs until it is asked to close, or until the last handle to the journal is gone.
    pub(super) fn run(mut self, commands: &Commands<Job>) {
        priority::raise();
        loop {
            match commands.receiver.recv_timeout(TICK) {
                Ok(command) => {
                    if let Some(done) = self.serve(Batch::begin(command, commands)) {
                        return self.close(commands, done);
                    }
                }
                Err(RecvTimeoutError::Timeout) => {
                    self.merge_keys(commands);
                    self.catch_up(commands);
                }
                Err(RecvTimeoutError::Disconnected) => return self.flush(),
            }
            self.keep_house();
        }
    }

    /// Stores the requests of a batch, then does its jobs. Returns the caller that asked to close, if one did.
    fn serve(&mut self, mut batch: Batch<'_, Job>) -> Option<oneshot::Sender<()>> {
        if !batch.works.is_empty() {
            self.store(&mut batch);
        }
        batch.jobs.into_iter().for_each(|job| self.work(job));
        batch.close
    }

    /// Stores a batch, with what is added to it meanwhile, and has it answered. All branching about what can go wrong is here.
    fn store(&mut self, batch: &mut Batch<'_, Job>) {
        self.notice_failure();
        let Some(connection) = self.connection.as_mut() else {
            return refuse(batch.works.drain(..), &self.setup.shared.queue.reason());
        };
        let (ids, ledger, syncer) = (&mut self.ids, &mut self.ledger, &mut self.syncer);
        // The first has waited longest: what is added to the batch came later.
        busy::until(batch.works.first().map(|work| work.submitted + BUSY_WAIT));
        let stored = self
            .synced
            .switch(connection, Synced::BySyncer)
            .and_then(|()| commit(connection, ids, ledger, syncer, batch, self.setup.clock.steady()));
        busy::until(None);
        let works = std::mem::take(&mut batch.works);
        match stored {
            Ok((receipts, changed)) => {
                busy::passed();
                self.note(&works, &receipts);
                self.syncer.answer(Committed { works, receipts, changed });
            }
            // Another process holds the write lock. Nothing was stored and the connection is sound.
            Err(error) if is_busy(&error) => refuse(works, "another process is writing to the database file"),
            Err(error) if works.len() > 1 && blames_a_row(&error) => {
                works.into_iter().for_each(|work| self.store(&mut Batch::alone(work)));
            }
            Err(error) if blames_a_row(&error) => {
                tracing::error!(%error, "an event could not be stored");
                refuse(works, "the event could not be stored");
            }
            Err(error) => {
                refuse(works, "the database could not be written");
                self.fail(&error.to_string());
            }
        }
    }

    /// A log that could not be synced is the end of the connection.
    fn notice_failure(&mut self) {
        if self.connection.is_some()
            && let Some(reason) = self.syncer.failure()
        {
            self.fail(&reason);
        }
    }

    /// Does a job.
    fn work(&mut self, job: Job) {
        self.notice_failure();
        if let Some(connection) = &self.connection
            && let Err(error) = self.synced.switch(connection, Synced::ByThemselves)
        {
            self.fail(&error.to_string());
        }
        let reason = self.setup.shared.failing().clone();
        let (connection, ledger) = (self.connection.as_mut(), &mut self.ledger);
        let (now, wall) = (self.setup.clock.steady(), self.setup.clock.now());
        // A job that panics is lost, and its caller learns so. Its transaction is undone while it unwinds.
        let done = catch_unwind(AssertUnwindSafe(|| match connection {
            Some(connection) => job(Ok(WriterContext { connection, ledger, now, wall })),
            None => job(Err(reason.as_deref().unwrap_or("failing"))),
        }));
        match done {
            Ok(Ok(())) => busy::passed(),
            Ok(Err(error)) => self.fail_beside(&error, "the journal could not do a piece of work"),
            Err(_) => tracing::error!("a piece of work panicked"),
        }
    }

    /// Notes what a batch that was committed means for the work behind the accepts.
    fn note(&mut self, works: &[Work], receipts: &[Receipt]) {
        let (mut routed, mut tally) = (false, None);
        for (event, appended) in works.iter().flat_map(|work| &work.events).zip(receipts.iter().flatten()) {
            self.replays_pending |= !event.key_signed;
            self.unsealed += u64::from(matches!(appended.verdict, Verdict::New | Verdict::Quarantined));
            routed |= appended.verdict == Verdict::New && !event.routes.is_empty();
            if appended.verdict == Verdict::Duplicate {
                let tally = tally.get_or_insert_with(|| self.setup.shared.tally());
                tally.add(appended.id, &event.source, event.received_at, event.peer, Layer::Journal);
            }
        }
        drop(tally);
        self.tell_lag();
        if routed {
            self.setup.shared.changed();
        }
    }

    fn fail(&mut self, reason: &str) {
        tracing::error!(reason, "the journal cannot store; refusing events until it can");
        *self.setup.shared.failing() = Some(reason.to_owned());
        // With every connection closed, the next one finds the log as after a crash and copies all of it anew.
        if let Some(connection) = self.connection.take() {
            connection::abandon(connection);
        }
        self.syncer.stop();
        self.checkpointer.abandon();
        self.setup.readers.close_idle();
        self.tried = Instant::now();
    }

    /// Takes a sound connection into use.
    fn adopt(&mut self, mut connection: Connection) -> Result<(), OpenError> {
        // Our own statements, and those of the user's routes.
        connection.set_prepared_statement_cache_capacity(256);
        user_sql::guard(&mut connection)?;
        let shared = Arc::clone(&self.setup.shared);
        connection.wal_hook(Some(move |_: &mut rusqlite::hooks::Wal, pages: std::ffi::c_int| {
            shared.wal_pages.store(u64::try_from(pages).unwrap_or(0), Ordering::Relaxed);
            Ok(())
        }))?;
        self.synced = Synced::proven(&connection)?;
        self.connection = Some(connection);
        Ok(())
    }

    fn reopen(&mut self) {
        self.tried = Instant::now();
        // See the module's text: never commit into a log whose sync has failed.
        let opened = open_emptied(&self.setup.path).and_then(|mut connection| {
            self.setup.shared.wal_pages.store(0, Ordering::Relaxed);
            self_test::run(&mut connection, self.setup.clock.now())??;
            // A commit that failed may be in the log all the same: memory starts from what is stored.
            self.ledger.rebuild(&mut connection)?;
            self.ledger.load_filter(&self.setup.readers);
            self.checkpointer = Checkpointer::start(&self.setup.path)?;
            self.syncer = Syncer::start(&self.setup.path, &self.setup.answered)?;
            self.adopt(connection)
        });
        match opened {
            Ok(()) => {
                *self.setup.shared.failing() = None;
                tracing::info!("the journal stores again");
            }
            Err(error) => *self.setup.shared.failing() = Some(error.to_string()),
        }
    }

    /// What has to happen now and then.
    fn keep_house(&mut self) {
        self.notice_failure();
        if self.connection.is_none() {
            if self.tried.elapsed() >= REOPEN_EVERY {
                self.reopen();
            }
            return;
        }
        if self.is_behind() {
            self.seal();
        }
        if self.replays_pending && self.replays_sought.elapsed() >= REPLAYS_EVERY {
            self.find_replays();
        }
        if self.flushed.elapsed() >= FLUSH_EVERY || self.setup.shared.tally().is_full() {
            self.flush();
        }
        self.ledger.adopt_filter();
        self.ledger.freeze_if_due();
        self.tend_the_log();
    }

    fn tend_the_log(&mut self) {
        let Some(connection) = &self.connection else { return };
        match self.checkpointer.tend(connection, self.setup.shared.wal_pages.load(Ordering::Relaxed)) {
            Ok(false) => {}
            Ok(true) => self.setup.shared.wal_pages.store(0, Ordering::Relaxed),
            Err(reason) => self.fail(&reason),
        }
    }

    /// Merges keys into the table until a command arrives.
    fn merge_keys(&mut self, commands: &Commands<Job>) {
        while commands.receiver.is_empty() && self.ledger.is_merging() {
            let Some(connection) = self.connection.as_mut() else { return };
            match self.ledger.merge_alone(connection, ledger::MERGED_ALONE) {
                Ok(_) => self.tend_the_log(),
                Err(error) if is_busy(&error) => return,
                Err(error) => return self.fail(&error.to_string()),
            }
        }
    }

    /// Stores the counts of duplicates.
    fn flush(&mut self) {
        self.flushed = Instant::now();
        let Some(connection) = self.connection.as_mut() else { return };
        if self.setup.shared.tally().is_empty() {
            return;
        }
        let flushing = self.setup.shared.flushing.lock().unwrap_or_else(PoisonError::into_inner);
        // Taken out, not locked: to count a duplicate must not wait for the disk.
        let taken = self.setup.shared.tally().take();
        let Err(error) = queries::store_duplicates(connection, &taken) else {
            self.setup.shared.flushes.fetch_add(1, Ordering::Release);
            return;
        };
        self.setup.shared.tally().give_back(taken);
        drop(flushing);
        if !is_busy(&error) {
            self.fail(&error.to_string());
        }
    }

    /// Whether there is something to do for the search index.
    fn is_behind(&self) -> bool {
        (self.unsealed >= follower::BLOCK || !self.gathering.complete) && Instant::now() >= self.seal_after
    }

    /// Goes on with the search index until a command arrives.
    fn catch_up(&mut self, commands: &Commands<Job>) {
        while commands.receiver.is_empty() && self.connection.is_some() && self.is_behind() {
            self.seal();
            self.tend_the_log();
        }
    }

    /// Adds blocks to the search index, a few at a time, and gathers them into groups.
    fn seal(&mut self) {
        if let Err(error) = self.seal_some() {
            self.seal_after = Instant::now() + Duration::from_secs(1);
            self.gathering = Gathering::new();
            return self.fail_beside(&error, NOT_INDEXED);
        }
        self.tell_lag();
    }

    /// Only what could be in the index lags behind: the events after the last full block are found without it.
    fn tell_lag(&self) {
        let lag = self.unsealed - self.unsealed % follower::BLOCK;
        self.setup.shared.index_lag.store(lag, Ordering::Relaxed);
    }

    fn seal_some(&mut self) -> rusqlite::Result<()> {
        let Some(connection) = self.connection.as_mut() else { return Ok(()) };
        for _ in 0..4 {
            if !self.gathering.complete {
                follower::gather(connection, &mut self.gathering)?;
            }
        }
        // Gathering must get ahead of sealing, or it would never come to an end.
        let blocks = if self.gathering.complete { 4 } else { 1 };
        for _ in 0..blocks {
            if self.unsealed >= follower::BLOCK {
                let sealed = follower::seal(connection, !self.replays_pending, &mut self.gathering)?;
                self.unsealed = if sealed { self.unsealed.saturating_sub(follower::BLOCK) } else { 0 };
            }
        }
        Ok(())
    }

    fn find_replays(&mut self) {
        let Some(connection) = self.connection.as_mut() else { return };
        let found = follower::find_replays(connection, self.setup.clock.now());
        // After a full batch, the rest comes after the next commit.
        if !matches!(found, Ok(true)) {
            self.replays_sought = Instant::now();
        }
        match found {
            Ok(more) => self.replays_pending = more,
            Err(error) => self.fail_beside(&error, NOT_INDEXED),
        }
    }

    /// Something that is not an append failed. Accepting goes on unless the disk is the trouble.
    fn fail_beside(&mut self, error: &rusqlite::Error, message: &str) {
        if blames_the_disk(error) {
            self.fail(&error.to_string());
        } else if !is_busy(error) {
            tracing::error!(%error, "{message}");
        }
    }

    fn close(mut self, commands: &Commands<Job>, done: oneshot::Sender<()>) {
        self.setup.shared.queue.close();
        while let Ok(command) = commands.receiver.try_recv() {
            // A caller that asks once more to close learns that the writer is gone.
            let _ = self.serve(Batch::begin(command, commands));
        }
        self.flush();
        self.ledger.await_filter();
        self.syncer.stop();
        self.checkpointer.stop();
        if let Err(reason) = self.leave_nothing_in_the_log() {
            tracing::warn!(
                reason,
                "the write-ahead log could not be emptied at the stop: whoever copies the database file must copy the -wal file too"
            );
        }
        drop(self);
        // The caller may be gone.
        let _ = done.send(());
    }

    /// Everything goes into the database file, which says then that it is whole. Waits for readers as long as for a lock.
    fn leave_nothing_in_the_log(&mut self) -> Result<(), String> {
        let Some(connection) = &self.connection else {
            return Err(self.setup.shared.queue.reason());
        };
        self.setup.readers.close_idle();
        let closed = self.synced.switch(connection, Synced::ByThemselves);
        let closed = closed.and_then(|()| answered::set_in_use(connection, false));
        closed.map_err(OpenError::from).and_then(|()| empty_the_log(connection)).map_err(|error| error.to_string())
    }
}

const NOT_INDEXED: &str = "the search index could not be brought up to date";

/// Adds what waits, a little at a time, for as long as the batch before is on its way to the disk. The disk is not kept waiting
/// for a larger batch than is worth a commit.
fn more(batch: &mut Batch<'_, Job>, syncer: &mut Syncer) -> bool {
    loop {
        let busy = syncer.is_busy();
        if !busy && batch.events >= BATCH_ENOUGH {
            return false;
        }
        if batch.take() {
            return true;
        }
        if !busy || !batch.has_room() {
            return false;
        }
        syncer.wait();
    }
}

/// One batch, one transaction, to which [`more`] is added. Returns what its senders will hear, and whether anything was written.
fn commit(
    connection: &mut Connection,
    ids: &mut EventIds,
    ledger: &mut Ledger,
    syncer: &mut Syncer,
    batch: &mut Batch<'_, Job>,
    now: UnixMicros,
) -> rusqlite::Result<(Vec<Receipt>, bool)> {
    crate::crash::point("before_insert");
    let changes = connection.total_changes();
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let mut receipts = Vec::with_capacity(BATCH_USUAL);
    let mut counts: HashMap<SourceName, SourceCounts> = HashMap::new();
    ledger.begin();
    let mut statements = Statements::prepare(&transaction)?;
    loop {
        for work in batch.works.iter().skip(receipts.len()) {
            let mut receipt = Receipt::with_capacity(work.events.len());
            for event in &work.events {
                let appended = statements.append(ids, ledger, event, now)?;
                if appended.verdict != Verdict::Duplicate {
                    let counts = counts.entry(event.source.clone()).or_default();
                    counts.events += u64::from(appended.verdict != Verdict::Conflict);
                    counts.conflicts += u64::from(appended.verdict == Verdict::Conflict);
                    counts.quarantined += u64::from(appended.verdict == Verdict::Quarantined);
                }
                receipt.push(appended);
            }
            receipts.push(receipt);
        }
        if !more(batch, syncer) {
            break;
        }
    }
    drop(statements);
    for (source, counts) in &counts {
        queries::add_totals(&transaction, source.as_str(), counts)?;
    }
    ledger.merge_along(&transaction, receipts.iter().map(|receipt| receipt.len()).sum())?;
    #[cfg(feature = "planted")]
    super::planted::answer_early(&mut batch.works, &receipts);
    crate::crash::point("after_insert");
    #[cfg(feature = "planted")]
    super::planted::tie_to_client(&transaction, &batch.works)?;
    transaction.commit()?;
    crate::crash::point("after_commit");
    let changed = connection.total_changes() != changes;
    ledger.committed();
    Ok((receipts, changed))
}

pub(crate) fn is_busy(error: &rusqlite::Error) -> bool {
    matches!(error.sqlite_error_code(), Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked))
}

/// Errors that one row causes and that leave the connection sound.
pub(super) fn blames_a_row(error: &rusqlite::Error) -> bool {
    matches!(
        error.sqlite_error_code(),
        Some(ErrorCode::ConstraintViolation | ErrorCode::TooBig | ErrorCode::TypeMismatch)
    )
}

/// Errors after which nothing that this connection says can be trusted.
pub(crate) fn blames_the_disk(error: &rusqlite::Error) -> bool {
    matches!(
        error.sqlite_error_code(),
        Some(
            ErrorCode::SystemIoFailure
                | ErrorCode::DiskFull
                | ErrorCode::DatabaseCorrupt
                | ErrorCode::NotADatabase
                | ErrorCode::CannotOpen
                | ErrorCode::ReadOnly
        )
    )
}

pub(crate) fn random_tail() -> u64 {
    let mut bytes = [0; 8];
    // Without random bytes, ids stay unique within this journal by their sequence alone.
    let _ = aws_lc_rs::rand::fill(&mut bytes);
    u64::from_ne_bytes(bytes)
}
