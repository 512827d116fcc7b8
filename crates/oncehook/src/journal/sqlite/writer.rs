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

use crossbeam_channel::{Receiver, RecvTimeoutError};
use oncehook_verify::UnixMicros;
use rusqlite::{Connection, ErrorCode, TransactionBehavior};
use tokio::sync::oneshot;

use super::answered::{self, Answered};
use super::busy::{self, BUSY_WAIT};
use super::checkpoint::{Checkpointer, Tended, empty_the_log};
use super::connection::Synced;
use super::groups::Gathering;
use super::intake::Intake;
use super::ledger::{self, Ledger};
use super::place::LockFile;
use super::queries::{self, Statements};
use super::reader::Readers;
use super::syncer::{Committed, Syncer};
use super::{OpenError, Shared, connection, follower, priority, self_test, user_sql};
use crate::clock::Clock;
use crate::event::{EventId, EventIds, NewEvents, SourceName};
use crate::journal::{AppendError, Appended, Layer, Receipt, SelfTestError, SourceCounts, Verdict};
use crate::planted::{self, Bug};

/// What the thread can be told.
pub(super) enum Command {
    /// In a box: the queue has thousands of places, and each is as large as the largest command.
    Append(Box<Work>),
    Job(Job),
    SelfTest(oneshot::Sender<Result<(), SelfTestError>>),
    Close(oneshot::Sender<()>),
}

/// Something else to do with the connection, in transactions of its own: deliveries, orders, forgetting. It is told why
/// if there is no connection, and answers whoever asked by itself; what it returns is for the writer.
pub(super) type Job = Box<dyn FnOnce(Result<Desk<'_>, &str>) -> Result<(), rusqlite::Error> + Send>;

/// What the writer works with.
pub(super) struct Desk<'w> {
    pub(super) connection: &'w mut Connection,
    pub(super) ledger: &'w mut Ledger,
    /// The steady time now.
    pub(super) now: UnixMicros,
    /// What the machine's clock says. It may have been set since the start.
    pub(super) wall: UnixMicros,
}

/// The writer's end of the queue. However the writer ends, by a panic too, nobody is left waiting for it.
pub(super) struct Post {
    pub(super) commands: Receiver<Command>,
    pub(super) shared: Arc<Shared>,
}

impl Drop for Post {
    fn drop(&mut self) {
        if std::thread::panicking() {
            *self.shared.failing() = Some("the journal's writer has died".to_owned());
        }
        self.shared.close();
        // Dropping a command tells whoever waits for it.
        while self.commands.try_recv().is_ok() {}
    }
}

/// The events of one request, and where to send the outcome.
pub(super) struct Work {
    pub(super) events: NewEvents,
    pub(super) answer: oneshot::Sender<Result<Receipt, AppendError>>,
    /// When it was put into the queue.
    pub(super) submitted: Instant,
}

impl Work {
    /// What the events weigh in memory, roughly.
    pub(super) fn bytes(&self) -> usize {
        self.events.iter().map(|event| event.body.len() + event.headers.len()).sum()
    }
}

/// Room that is made for a batch at its beginning.
const BATCH_USUAL: usize = 128;

/// How often the thread wakes without work, and how old counts and search index may become.
const TICK: Duration = Duration::from_millis(100);
const FLUSH_EVERY: Duration = Duration::from_millis(500);
const REPLAYS_EVERY: Duration = Duration::from_millis(200);

/// How long to wait before a failed journal is tried again.
const REOPEN_EVERY: Duration = Duration::from_millis(250);

/// What the writer stands on.
pub(super) struct Ground {
    pub(super) path: PathBuf,
    pub(super) clock: Clock,
    pub(super) lock: LockFile,
    pub(super) answered: Answered,
    pub(super) readers: Arc<Readers>,
    pub(super) ledger_generation: usize,
}

pub(super) struct Writer {
    path: PathBuf,
    clock: Clock,
    readers: Arc<Readers>,
    shared: Arc<Shared>,
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
    /// Where the last answered event is written down.
    answered: Answered,
    _lock: LockFile,
}

impl Writer {
    pub(super) fn new(mut connection: Connection, ground: Ground, shared: Arc<Shared>) -> Result<Self, OpenError> {
        let mut ledger = Ledger::new(ground.ledger_generation, Arc::clone(&shared.recent));
        ledger.rebuild(&mut connection)?;
        let last = queries::last_sequence(&connection)?;
        let checkpointer = Checkpointer::start(&ground.path)?;
        let syncer = Syncer::start(&ground.path, &ground.answered)?;
        let mut writer = Self {
            path: ground.path,
            clock: ground.clock,
            readers: ground.readers,
            shared,
            connection: None,
            ids: EventIds::above(last, random_tail()),
            ledger,
            checkpointer,
            syncer,
            synced: Synced::ByThemselves,
            unsealed: follower::unsealed(&connection)?,
            gathering: Gathering::new(),
            seal_after: Instant::now(),
            replays_pending: true,
            replays_sought: Instant::now(),
            flushed: Instant::now(),
            tried: Instant::now(),
            answered: ground.answered,
            _lock: ground.lock,
        };
        writer.tell_lag();
        writer.adopt(connection)?;
        writer.ledger.load_filter(&writer.readers);
        Ok(writer)
    }

    /// Runs until told to close, or until the last handle to the journal is gone.
    pub(super) fn run(mut self, commands: &Receiver<Command>) {
        priority::raise();
        loop {
            match commands.recv_timeout(TICK) {
                Ok(Command::Append(work)) => match self.accept(*work, commands) {
                    Some(Command::SelfTest(answer)) => self.self_test(answer),
                    Some(Command::Close(done)) => return self.close(commands, done),
                    Some(Command::Append(_) | Command::Job(_)) | None => {}
                },
                Ok(Command::Job(job)) => self.work(job),
                Ok(Command::SelfTest(answer)) => self.self_test(answer),
                Ok(Command::Close(done)) => return self.close(commands, done),
                Err(RecvTimeoutError::Timeout) => {
                    self.merge_keys(commands);
                    self.catch_up(commands);
                }
                Err(RecvTimeoutError::Disconnected) => return self.flush(),
            }
            self.keep_house();
        }
    }

    /// Stores a request and those that stand behind it, then does the jobs that stood between them. Returns the first other
    /// command, if one was met.
    fn accept(&mut self, first: Work, commands: &Receiver<Command>) -> Option<Command> {
        let shared = Arc::clone(&self.shared);
        let mut intake = Intake::new(commands, &shared.queued_bytes);
        let mut batch = Vec::with_capacity(BATCH_USUAL);
        intake.put(first, &mut batch);
        self.store(batch, &mut |batch, syncer| intake.more(batch, syncer));
        let Intake { jobs, interruption, .. } = intake;
        jobs.into_iter().for_each(|job| self.work(job));
        interruption
    }

    /// Stores a batch, with what `more` adds to it meanwhile, and has it answered. All branching about what can go wrong is
    /// here.
    fn store(&mut self, mut batch: Vec<Work>, more: &mut More<'_>) {
        self.notice_failure();
        let Some(connection) = self.connection.as_mut() else {
            let reason = self.shared.failing().clone().unwrap_or_default();
            return refuse(&mut batch, &reason);
        };
        let (ids, ledger, syncer) = (&mut self.ids, &mut self.ledger, &mut self.syncer);
        // The first has waited longest: what is added to the batch came later.
        busy::until(batch.first().map(|work| work.submitted + BUSY_WAIT));
        let stored = self.synced.switch(connection, Synced::BySyncer).and_then(|()| {
            commit(connection, ids, ledger, &mut batch, |batch| more(batch, syncer), self.clock.steady())
        });
        busy::until(None);
        match stored {
            Ok(outcome) => {
                busy::passed();
                self.answer(batch, outcome);
            }
            // Another process holds the write lock. Nothing was stored and the connection is sound.
            Err(error) if is_busy(&error) => {
                refuse(&mut batch, "another process is writing to the database file");
            }
            Err(error) if batch.len() > 1 && blames_a_row(&error) => {
                for work in batch {
                    self.store(vec![work], &mut |_, _| false);
                }
            }
            Err(error) if blames_a_row(&error) => {
                tracing::error!(%error, "an event could not be stored");
                refuse(&mut batch, "the event could not be stored");
            }
            Err(error) => {
                refuse(&mut batch, "the database could not be written");
                self.fail(&error.to_string());
            }
        }
    }

    /// A log that could not be synced is the end of the connection, whoever tried.
    fn notice_failure(&mut self) {
        if self.connection.is_some()
            && let Some(reason) = self.syncer.failure()
        {
            self.fail(&reason);
        }
    }

    /// Does a job. An error that blames the disk ends the connection, as it does for appends.
    fn work(&mut self, job: Job) {
        self.notice_failure();
        if let Some(connection) = &self.connection
            && let Err(error) = self.synced.switch(connection, Synced::ByThemselves)
        {
            self.fail(&error.to_string());
        }
        let reason = self.shared.failing().clone();
        let (connection, ledger) = (self.connection.as_mut(), &mut self.ledger);
        let (now, wall) = (self.clock.steady(), self.clock.now());
        // A job that panics is lost, and whoever waits for it is told so. Its transaction is undone while it unwinds.
        let done = catch_unwind(AssertUnwindSafe(|| match connection {
            Some(connection) => job(Ok(Desk { connection, ledger, now, wall })),
            None => job(Err(reason.as_deref().unwrap_or("failing"))),
        }));
        let Ok(done) = done else {
            tracing::error!("a piece of work panicked");
            return;
        };
        match done {
            Ok(()) => busy::passed(),
            Err(error) if blames_the_disk(&error) => self.fail(&error.to_string()),
            Err(error) if is_busy(&error) => {}
            Err(error) => tracing::error!(%error, "the journal could not do a piece of work"),
        }
    }

    fn answer(&mut self, batch: Vec<Work>, outcome: Outcome) {
        self.unsealed += outcome.stored;
        self.tell_lag();
        self.replays_pending |= outcome.unsigned;
        if outcome.routed {
            self.shared.changed();
        }
        if !outcome.duplicates.is_empty() {
            let mut tally = self.shared.tally();
            for duplicate in outcome.duplicates {
                tally.add(duplicate.event, &duplicate.source, duplicate.at, duplicate.peer, Layer::Journal);
            }
        }
        self.syncer.answer(Committed { batch, receipts: outcome.receipts, changed: outcome.changed });
    }

    fn fail(&mut self, reason: &str) {
        tracing::error!(reason, "the journal cannot store; refusing events until it can");
        *self.shared.failing() = Some(reason.to_owned());
        // With every connection closed, the next one finds the log as after a crash and copies all of it anew.
        if let Some(connection) = self.connection.take() {
            connection::abandon(connection);
        }
        self.syncer.stop();
        self.checkpointer.abandon();
        self.readers.close_idle();
        self.tried = Instant::now();
    }

    /// Takes a sound connection into use.
    fn adopt(&mut self, mut connection: Connection) -> Result<(), OpenError> {
        // Our own statements, and those of the user's routes.
        connection.set_prepared_statement_cache_capacity(256);
        user_sql::guard(&mut connection)?;
        let shared = Arc::clone(&self.shared);
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
        let opened = connection::open_writer(&self.path).and_then(|mut connection| {
            // See the module's text: never commit into a log whose sync has failed.
            empty_the_log(&connection)?;
            self.shared.wal_pages.store(0, Ordering::Relaxed);
            self_test::run(&mut connection, self.clock.now())?;
            // A commit that failed may be in the log all the same: memory starts from what is stored.
            self.ledger.rebuild(&mut connection)?;
            self.ledger.load_filter(&self.readers);
            self.checkpointer = Checkpointer::start(&self.path)?;
            self.syncer = Syncer::start(&self.path, &self.answered)?;
            self.adopt(connection)
        });
        match opened {
            Ok(()) => {
                *self.shared.failing() = None;
                tracing::info!("the journal stores again");
            }
            Err(error) => *self.shared.failing() = Some(error.to_string()),
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
        if self.flushed.elapsed() >= FLUSH_EVERY || self.shared.tally().is_full() {
            self.flush();
        }
        self.ledger.adopt_filter();
        self.ledger.freeze_if_due();
        self.tend_the_log();
    }

    fn tend_the_log(&mut self) {
        let Some(connection) = &self.connection else { return };
        match self.checkpointer.tend(connection, self.shared.wal_pages.load(Ordering::Relaxed)) {
            Ok(Tended::Continues) => {}
            Ok(Tended::StartsOver) => self.shared.wal_pages.store(0, Ordering::Relaxed),
            Err(reason) => self.fail(&reason),
        }
    }

    /// Nobody waits: merges keys into the table until somebody does.
    fn merge_keys(&mut self, commands: &Receiver<Command>) {
        while commands.is_empty() && self.ledger.is_merging() {
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
        if self.shared.tally().is_empty() {
            return;
        }
        let flushing = self.shared.flushing.lock().unwrap_or_else(PoisonError::into_inner);
        // Taken out, not locked: whoever counts a duplicate must not wait for the disk.
        let taken = self.shared.tally().take();
        let Err(error) = queries::store_duplicates(connection, &taken) else {
            self.shared.flushes.fetch_add(1, Ordering::Release);
            return;
        };
        self.shared.tally().give_back(taken);
        drop(flushing);
        if !is_busy(&error) {
            self.fail(&error.to_string());
        }
    }

    /// Whether there is something to do for the search index.
    fn is_behind(&self) -> bool {
        (self.unsealed >= follower::BLOCK || !self.gathering.is_complete()) && Instant::now() >= self.seal_after
    }

    /// Goes on with the search index while nobody wants anything.
    fn catch_up(&mut self, commands: &Receiver<Command>) {
        while commands.is_empty() && self.connection.is_some() && self.is_behind() {
            self.seal();
            self.tend_the_log();
        }
    }

    /// Adds blocks to the search index, a few at a time, and gathers them into groups.
    fn seal(&mut self) {
        if let Err(error) = self.seal_some() {
            self.seal_after = Instant::now() + Duration::from_secs(1);
            self.gathering = Gathering::new();
            return self.fail_behind(&error);
        }
        self.tell_lag();
    }

    /// Only what could be in the index lags behind: the events after the last full block are found without it.
    fn tell_lag(&self) {
        let lag = self.unsealed - self.unsealed % follower::BLOCK;
        self.shared.index_lag.store(lag, Ordering::Relaxed);
    }

    fn seal_some(&mut self) -> Result<(), rusqlite::Error> {
        let Some(connection) = self.connection.as_mut() else { return Ok(()) };
        for _ in 0..4 {
            if !self.gathering.is_complete() {
                follower::gather(connection, &mut self.gathering)?;
            }
        }
        // Gathering must get ahead of sealing, or it would never come to an end.
        let blocks = if self.gathering.is_complete() { 4 } else { 1 };
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
        match follower::find_replays(connection, self.clock.now()) {
            // A full batch: the rest comes after the next commit.
            Ok(more) => {
                self.replays_pending = more;
                if !more {
                    self.replays_sought = Instant::now();
                }
            }
            Err(error) => {
                self.replays_sought = Instant::now();
                self.fail_behind(&error);
            }
        }
    }

    /// Something written behind the accepts failed. Accepting goes on unless the disk is the trouble.
    fn fail_behind(&mut self, error: &rusqlite::Error) {
        if is_busy(error) {
            return;
        }
        if blames_the_disk(error) {
            self.fail(&error.to_string());
        } else {
            tracing::error!(%error, "the search index could not be brought up to date");
        }
    }

    fn self_test(&mut self, answer: oneshot::Sender<Result<(), SelfTestError>>) {
        if answer.is_closed() {
            return;
        }
        let verdict = match self.connection.as_mut() {
            Some(connection) => self_test::run(connection, self.clock.now()),
            None => Err(SelfTestError(self.shared.failing().clone().unwrap_or_default())),
        };
        // Whoever asked may be gone; the verdict is theirs to use.
        let _ = answer.send(verdict);
    }

    fn close(mut self, commands: &Receiver<Command>, done: oneshot::Sender<()>) {
        self.shared.close();
        while let Ok(command) = commands.try_recv() {
            match command {
                Command::Append(work) => {
                    // Whoever asks for a self-test, or once more to close, is told that nobody is here.
                    let _ = self.accept(*work, commands);
                }
                Command::Job(job) => self.work(job),
                Command::SelfTest(_) | Command::Close(_) => {}
            }
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
        // Whoever asked may be gone.
        let _ = done.send(());
    }

    /// Everything goes into the database file, which says then that it is whole. Waits for readers as long as for a lock.
    fn leave_nothing_in_the_log(&mut self) -> Result<(), String> {
        let Some(connection) = &self.connection else {
            return Err(self.shared.failing().clone().unwrap_or_default());
        };
        self.readers.close_idle();
        let closed = self.synced.switch(connection, Synced::ByThemselves);
        let closed = closed.and_then(|()| answered::set_in_use(connection, false));
        closed.map_err(OpenError::from).and_then(|()| empty_the_log(connection)).map_err(|error| error.to_string())
    }
}

/// Adds to a batch; whether there was something.
type More<'m> = dyn FnMut(&mut Vec<Work>, &mut Syncer) -> bool + 'm;

pub(super) fn refuse(batch: &mut Vec<Work>, reason: &str) {
    for work in batch.drain(..) {
        // The sender may have hung up.
        let _ = work.answer.send(Err(AppendError::Unavailable(reason.to_owned())));
    }
}

/// What a committed batch decided.
struct Outcome {
    receipts: Vec<Receipt>,
    /// How many events are new.
    stored: u64,
    /// Whether one of the events has an unsigned key.
    unsigned: bool,
    /// Whether there are new deliveries.
    routed: bool,
    /// Whether anything was written at all.
    changed: bool,
    duplicates: Vec<DuplicateOf>,
}

struct DuplicateOf {
    event: EventId,
    source: SourceName,
    at: UnixMicros,
    peer: std::net::IpAddr,
}

/// One batch, one transaction. `more` adds to it while there is something to wait for.
fn commit(
    connection: &mut Connection,
    ids: &mut EventIds,
    ledger: &mut Ledger,
    batch: &mut Vec<Work>,
    mut more: impl FnMut(&mut Vec<Work>) -> bool,
    now: UnixMicros,
) -> Result<Outcome, rusqlite::Error> {
    crate::crash::point("before_insert");
    let changes = connection.total_changes();
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let mut outcome = Outcome {
        receipts: Vec::with_capacity(BATCH_USUAL),
        stored: 0,
        unsigned: false,
        routed: false,
        changed: false,
        duplicates: Vec::new(),
    };
    let mut counts: HashMap<SourceName, SourceCounts> = HashMap::new();
    ledger.begin();
    {
        let mut statements = Statements::prepare(&transaction)?;
        let mut done = 0;
        loop {
            for work in batch.iter().skip(done) {
                let mut receipt = Receipt::with_capacity(work.events.len());
                for event in &work.events {
                    let appended: Appended = statements.append(ids, ledger, event, now)?;
                    outcome.unsigned |= !event.key_signed;
                    outcome.routed |= appended.verdict == Verdict::New && !event.routes.is_empty();
                    match appended.verdict {
                        Verdict::Duplicate => outcome.duplicates.push(DuplicateOf {
                            event: appended.id,
                            source: event.source.clone(),
                            at: event.received_at,
                            peer: event.peer,
                        }),
                        verdict => {
                            let counts = counts.entry(event.source.clone()).or_default();
                            match verdict {
                                Verdict::Conflict => counts.conflicts += 1,
                                Verdict::Quarantined => {
                                    counts.events += 1;
                                    counts.quarantined += 1;
                                }
                                Verdict::New | Verdict::Duplicate => counts.events += 1,
                            }
                        }
                    }
                    receipt.push(appended);
                }
                outcome.receipts.push(receipt);
            }
            done = batch.len();
            if !more(batch) {
                break;
            }
        }
        for (source, counts) in &counts {
            outcome.stored += counts.events;
            queries::add_totals(&transaction, source.as_str(), counts)?;
        }
    }
    ledger.merge_along(&transaction, batch.iter().map(|work| work.events.len()).sum())?;
    if planted::has(Bug::EarlyAnswer) {
        answer_early(batch, &outcome.receipts);
    }
    crate::crash::point("after_insert");
    if planted::has(Bug::TiedToClient) && batch.iter().any(|work| work.answer.is_closed()) {
        transaction.rollback()?;
    } else {
        transaction.commit()?;
    }
    crate::crash::point("after_commit");
    outcome.changed = connection.total_changes() != changes;
    ledger.committed();
    Ok(outcome)
}

/// The mistake [`Bug::EarlyAnswer`]: answers, waits until the answers have left, and commits afterwards.
fn answer_early(batch: &mut [Work], receipts: &[Receipt]) {
    for (work, receipt) in batch.iter_mut().zip(receipts) {
        let answer = std::mem::replace(&mut work.answer, oneshot::channel().0);
        let _ = answer.send(Ok(receipt.clone()));
    }
    std::thread::sleep(Duration::from_millis(5));
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
    match aws_lc_rs::rand::fill(&mut bytes) {
        Ok(()) => u64::from_ne_bytes(bytes),
        // Ids stay unique within this journal by their sequence alone.
        Err(_) => 0,
    }
}
