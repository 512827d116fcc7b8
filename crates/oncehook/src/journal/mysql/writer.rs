//! The lanes: a few tasks that append, each with a connection of its own.
//!
//! A request goes to the lane of its key, so that copies that come together meet in one batch. Group commit without a
//! timer: while one transaction runs, the next batch gathers in the queue. If a row spoils a batch, the requests are stored
//! one by one, so that a bad one costs only itself. After any error the transaction is rolled back in so many words: a
//! deadlock has ended it already, a lock that was waited for too long has not.
//!
//! A lane that lost its connection refuses at once, and tries again by itself until the database is there, is the primary
//! and passes the self-test. An append whose commit was not answered may be stored or not: its sender is told to try
//! again, and the key settles it.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use oncehook_verify::UnixMicros;
use tokio::sync::{mpsc, oneshot};

use super::connection::{Connector, Purpose, Session};
use super::engine_error::EngineError;
use super::queries::{self, Candidate, Ruling, Witness};
use super::{Shared, search, self_test};
use crate::event::{EventId, NewEvents, SourceName};
use crate::journal::{AppendError, Appended, Layer, Receipt, Verdict};
use crate::retry::{Chance, Reconnect};

/// What a lane can be told.
#[expect(clippy::large_enum_variant, reason = "nearly every command is an append, and it is moved once")]
pub(super) enum Command {
    Append(Work),
    Close(oneshot::Sender<()>),
}

/// The events of one request, and where to send the outcome.
pub(super) struct Work {
    pub(super) events: NewEvents,
    pub(super) answer: oneshot::Sender<Result<Receipt, AppendError>>,
}

impl Work {
    /// What the events weigh in memory, roughly.
    pub(super) fn bytes(&self) -> usize {
        self.events.iter().map(|event| event.body.len() + event.headers.len()).sum()
    }
}

/// A batch ends at this many events or bytes, whichever comes first.
const BATCH_EVENTS: usize = 512;
const BATCH_BYTES: usize = 8 << 20;

/// How often an idle lane looks whether its connection is still there: the server is asked, because nobody tells.
const TICK: Duration = Duration::from_millis(250);

pub(super) struct Lane {
    pub(super) number: usize,
    pub(super) shard: u16,
    pub(super) connector: Arc<Connector>,
    pub(super) shared: Arc<Shared>,
    /// `None` while the lane is failing.
    pub(super) session: Option<Session>,
    /// A key that this lane has stored.
    pub(super) witness: Option<Called>,
}

/// A witness, and until when its key can be relied on.
pub(super) type Called = (Witness, UnixMicros);

/// A witness is not called any more this long before its key may be forgotten.
const WITNESS_MARGIN: i64 = 60_000_000;

impl Lane {
    /// Runs until told to close, or until the journal is gone.
    pub(super) async fn run(mut self, mut commands: mpsc::Receiver<Command>) {
        let mut batch = Vec::new();
        loop {
            if self.session.is_none() && self.wait_for_database(&mut commands).await {
                return;
            }
            let first = tokio::time::timeout(TICK, commands.recv()).await;
            match first {
                Err(_) => self.look_after_connection().await,
                Ok(None) => return,
                Ok(Some(Command::Close(done))) => {
                    self.drain(&mut commands).await;
                    let _ = done.send(());
                    return;
                }
                Ok(Some(Command::Append(work))) => {
                    let close = gather(work, &mut commands, &self.shared, self.batch_bytes(), &mut batch);
                    self.store(&mut batch).await;
                    if let Some(done) = close {
                        self.drain(&mut commands).await;
                        // Whoever asked may be gone.
                        let _ = done.send(());
                        return;
                    }
                }
            }
        }
    }

    /// Stores what is still queued. Nothing is queued behind a close.
    async fn drain(&mut self, commands: &mut mpsc::Receiver<Command>) {
        let mut batch = Vec::new();
        while let Ok(Command::Append(work)) = commands.try_recv() {
            gather(work, commands, &self.shared, self.batch_bytes(), &mut batch);
            self.store(&mut batch).await;
        }
    }

    /// A batch has to fit into the server's packets too.
    fn batch_bytes(&self) -> usize {
        self.session.as_ref().map_or(BATCH_BYTES, |session| session.batch_bytes().min(BATCH_BYTES))
    }

    async fn look_after_connection(&mut self) {
        let _asked = self.shared.silence.ask(self.number);
        if let Some(session) = &mut self.session
            && !session.is_alive().await
        {
            self.fail("the connection to the database was lost");
        }
    }

    /// Stores a batch and answers it. All branching about what can go wrong is here.
    async fn store(&mut self, batch: &mut Vec<Work>) {
        let Some(session) = &mut self.session else {
            return refuse(batch, "the database is not there");
        };
        let asked = self.shared.silence.ask(self.number);
        let now = self.shared.clock.steady();
        // One of its own, because whoever calls it holds its row until the commit; the first time another lane's will do.
        let others = || self.shared.witness.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let called = self.witness.clone().or_else(others).filter(|(_, until)| until.0 > now.0);
        let mut witness = called.map(|(witness, _)| witness);
        let mut tries = super::engine_error::Tries::default();
        let stored = loop {
            match append(session, &self.shared, self.shard, witness.as_ref(), batch).await {
                Ok(Some(outcome)) => break Ok(outcome),
                // Somebody has forgotten the witness' key. The others are asked without it.
                Ok(None) => match session.run("ROLLBACK").await {
                    Ok(()) => witness = None,
                    Err(error) => break Err(error),
                },
                // Nothing was stored.
                Err(error) => {
                    let undone = session.run("ROLLBACK").await;
                    match tries.again(error) {
                        Ok(()) => {
                            if let Err(error) = undone {
                                break Err(error);
                            }
                        }
                        Err(error) => break Err(error),
                    }
                }
            }
        };
        drop(asked);
        match stored {
            Ok(outcome) => {
                if outcome.witness.is_some() {
                    if self.witness.is_none() {
                        *self.shared.witness.lock().unwrap_or_else(PoisonError::into_inner) =
                            outcome.witness.clone();
                    }
                    self.witness = outcome.witness.clone();
                }
                self.answer(batch, outcome);
            }
            Err(error) if error.blames_a_row() && batch.len() > 1 => {
                for work in std::mem::take(batch) {
                    Box::pin(self.store(&mut vec![work])).await;
                }
            }
            Err(error) if error.blames_a_row() => {
                tracing::error!(%error, "an event could not be stored");
                refuse(batch, "the event could not be stored");
            }
            // Somebody's lock was in the way, and the transaction is undone; the connection is sound.
            Err(error) if error.is_too_slow() || error.is_collision() => {
                tracing::warn!(%error, "a batch could not be stored in time");
                refuse(batch, "the database is too slow");
            }
            Err(error) => {
                refuse(batch, "the database could not be written");
                self.fail(&error.told);
            }
        }
    }

    fn answer(&self, batch: &mut Vec<Work>, outcome: Outcome) {
        if outcome.routed {
            self.shared.changed();
        }
        if !outcome.duplicates.is_empty() {
            let mut tally = self.shared.tally();
            for duplicate in outcome.duplicates {
                tally.add(duplicate.event, &duplicate.source, duplicate.at, duplicate.peer, Layer::Journal);
            }
        }
        for (work, receipt) in batch.drain(..).zip(outcome.receipts) {
            // The sender may have hung up. The event is stored all the same.
            let _ = work.answer.send(Ok(receipt));
        }
    }

    fn fail(&mut self, reason: &str) {
        tracing::error!(lane = self.number, reason, "the journal cannot store; refusing events until it can");
        self.shared.set_failing(self.number, Some(reason.to_owned()));
        (self.session, self.witness) = (None, None);
    }

    /// Refuses what comes until there is a sound connection. Returns whether the journal was closed meanwhile.
    async fn wait_for_database(&mut self, commands: &mut mpsc::Receiver<Command>) -> bool {
        let mut reconnect = Reconnect::new(Chance::random());
        loop {
            let connector = Arc::clone(&self.connector);
            let opening = async move {
                let mut session = connector.open(Purpose::Append).await?;
                self_test::run(&mut session).await.map_err(|error| EngineError::other(error.to_string()))?;
                Ok::<_, EngineError>(session)
            };
            tokio::pin!(opening);
            let opened = loop {
                tokio::select! {
                    opened = &mut opening => break opened,
                    command = commands.recv() => if self.refuse_command(command) { return true; },
                }
            };
            match opened {
                Ok(session) => {
                    self.session = Some(session);
                    self.shared.set_failing(self.number, None);
                    tracing::info!(lane = self.number, "the journal stores again");
                    return false;
                }
                Err(error) => self.shared.set_failing(self.number, Some(error.told)),
            }
            let rest = tokio::time::sleep(reconnect.wait());
            tokio::pin!(rest);
            loop {
                tokio::select! {
                    () = &mut rest => break,
                    command = commands.recv() => if self.refuse_command(command) { return true; },
                }
            }
        }
    }

    /// Returns whether it is over.
    fn refuse_command(&self, command: Option<Command>) -> bool {
        match command {
            Some(Command::Append(work)) => {
                self.shared.queued_bytes.fetch_sub(work.bytes(), Ordering::Relaxed);
                refuse(&mut vec![work], "the database is not there");
                false
            }
            Some(Command::Close(done)) => {
                let _ = done.send(());
                true
            }
            None => true,
        }
    }
}

/// Fills the batch from the queue. Returns who asked to close, if somebody did.
fn gather(
    first: Work,
    commands: &mut mpsc::Receiver<Command>,
    shared: &Shared,
    most: usize,
    batch: &mut Vec<Work>,
) -> Option<oneshot::Sender<()>> {
    let mut events = first.events.len();
    let mut bytes = first.bytes();
    batch.push(first);
    let mut close = None;
    while events < BATCH_EVENTS && bytes < most && close.is_none() {
        match commands.try_recv() {
            Ok(Command::Append(work)) => {
                events += work.events.len();
                bytes += work.bytes();
                batch.push(work);
            }
            Ok(Command::Close(done)) => close = Some(done),
            Err(_) => break,
        }
    }
    shared.queued_bytes.fetch_sub(bytes, Ordering::Relaxed);
    close
}

fn refuse(batch: &mut Vec<Work>, reason: &str) {
    for work in batch.drain(..) {
        // The sender may have hung up.
        let _ = work.answer.send(Err(AppendError::Unavailable(reason.to_owned())));
    }
}

/// What a batch came to.
pub(super) struct Outcome {
    pub(super) receipts: Vec<Receipt>,
    /// Whether there are new deliveries.
    routed: bool,
    duplicates: Vec<DuplicateOf>,
    /// A key that was stored, and until when it can be relied on.
    witness: Option<Called>,
}

struct DuplicateOf {
    event: EventId,
    source: SourceName,
    at: UnixMicros,
    peer: std::net::IpAddr,
}

/// Stores a batch in one transaction and commits it. An error before the commit means that nothing was stored; `None` that the
/// witness is not known any more. Either way the transaction has to be undone.
async fn append(
    session: &mut Session,
    shared: &Shared,
    shard: u16,
    witness: Option<&Witness>,
    batch: &[Work],
) -> Result<Option<Outcome>, EngineError> {
    crate::crash::point("before_insert");
    // Copies inside the batch are folded first: the ledger is asked once for each key.
    let mut groups: HashMap<(&SourceName, &[u8]), usize> = HashMap::new();
    let mut candidates = Vec::new();
    for event in batch.iter().flat_map(|work| &work.events) {
        groups.entry((&event.source, event.key.as_bytes())).or_insert_with(|| {
            candidates.push(Candidate { id: shared.id_for(event), event });
            candidates.len() - 1
        });
    }
    if let Some(witness) = witness
        && queries::refuses(session, witness).await?.is_none()
    {
        return Ok(None);
    }
    let rulings = queries::append(session, shared.given_time(), shard, &candidates).await?;
    let new = candidates.iter().zip(&rulings).filter(|(_, ruling)| ruling.new);
    let new = new.map(|(candidate, _)| (candidate.id, candidate.event));
    search::mark_late(session, shared.database_time(), new).await?;
    let Decided { mut outcome, conflicts } = decide(batch, &groups, &rulings)?;
    if !conflicts.is_empty() {
        let mut conflicts: Vec<_> = conflicts;
        queries::keep_conflicts(session, shard, &mut conflicts).await?;
    }
    session.run("COMMIT").await?;
    crate::crash::point("after_commit");
    let stored = candidates.iter().zip(&rulings).rev().find(|(_, ruling)| ruling.new);
    outcome.witness = stored.map(|(Candidate { event, .. }, Ruling { known, .. })| {
        let witness = Witness { source: event.source.clone(), key: event.key.clone() };
        (witness, UnixMicros(known.expires_at.0.saturating_sub(WITNESS_MARGIN)))
    });
    Ok(Some(outcome))
}

struct Decided<'b> {
    outcome: Outcome,
    /// Other bodies, each with the event that holds its key.
    conflicts: Vec<(EventId, &'b crate::event::NewEvent)>,
}

/// Says of every event what it is, given what the ledger knows of the keys.
fn decide<'b>(
    batch: &'b [Work],
    groups: &HashMap<(&SourceName, &[u8]), usize>,
    rulings: &[Ruling],
) -> Result<Decided<'b>, EngineError> {
    let mut outcome = Outcome {
        receipts: Vec::with_capacity(batch.len()),
        routed: false,
        duplicates: Vec::new(),
        witness: None,
    };
    let mut conflicts = Vec::new();
    let mut announced = vec![false; rulings.len()];
    for work in batch {
        let mut receipt = Receipt::with_capacity(work.events.len());
        for event in &work.events {
            let place = groups.get(&(&event.source, event.key.as_bytes())).copied().unwrap_or(usize::MAX);
            let (Some(Ruling { known, new }), Some(announced)) =
                (rulings.get(place), announced.get_mut(place))
            else {
                return Err(EngineError::other("an event of the batch was left out"));
            };
            let first_here = !std::mem::replace(announced, true);
            // The other case: this very event was stored before, and whoever brought it did not hear of it.
            let verdict = if first_here && (*new || event.id == Some(known.event)) {
                outcome.routed |= event.quarantine.is_none() && !event.routes.is_empty();
                if event.quarantine.is_some() { Verdict::Quarantined } else { Verdict::New }
            } else if known.digest == event.digest {
                outcome.duplicates.push(DuplicateOf {
                    event: known.event,
                    source: event.source.clone(),
                    at: event.received_at,
                    peer: event.peer,
                });
                Verdict::Duplicate
            } else {
                conflicts.push((known.event, event));
                Verdict::Conflict
            };
            receipt.push(Appended { id: known.event, verdict, expires_at: known.expires_at });
        }
        outcome.receipts.push(receipt);
    }
    Ok(Decided { outcome, conflicts })
}
