//! The lanes: a few tasks that append, each with a connection of its own.
//!
//! A request goes to the lane of its key, so that copies that come together meet in one batch. Group commit without a
//! timer: while one statement runs, the next batch gathers in the queue. If a row spoils a batch, the requests are stored
//! one by one, so that a bad one costs only itself.
//!
//! A lane that lost its connection refuses at once, and tries again by itself until the database is there, is the primary
//! and passes the self-test. An append whose statement was not answered may be stored or not: its sender is told to try
//! again, and the key settles it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use oncehook_verify::UnixMicros;
use tokio::sync::{mpsc, oneshot};

use super::connection::{Connector, EngineError, Purpose, Session};
use super::queries::{self, Candidate, Known};
use super::{Shared, self_test};
use crate::event::{EventId, NewEvents, SourceName};
use crate::journal::spans::LATE_MICROS;
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

/// After a batch that was taken to be new and was not, so many are stored one key at a time: a guess that fails costs its work, and a line in
/// the server's log.
const WARY_FOR: u32 = 256;

/// How often an idle lane looks whether its connection is still there.
const TICK: Duration = Duration::from_millis(100);

pub(super) struct Lane {
    pub(super) number: usize,
    pub(super) shard: i16,
    pub(super) connector: Arc<Connector>,
    pub(super) shared: Arc<Shared>,
    /// `None` while the lane is failing.
    pub(super) session: Option<Session>,
    /// For so many batches known keys are expected.
    pub(super) wary: u32,
}

impl Lane {
    /// Runs until told to close, or until the journal is gone.
    pub(super) async fn run(mut self, mut commands: mpsc::Receiver<Command>) {
        let mut batch = Vec::new();
        loop {
            if self.session.as_ref().is_none_or(|session| session.is_closed()) {
                if self.session.is_some() {
                    self.fail("the connection to the database was lost");
                }
                if self.wait_for_database(&mut commands).await {
                    return;
                }
            }
            let first = tokio::time::timeout(TICK, commands.recv()).await;
            match first {
                Err(_) => {}
                Ok(None) => return,
                Ok(Some(Command::Close(done))) => {
                    self.drain(&mut commands).await;
                    let _ = done.send(());
                    return;
                }
                Ok(Some(Command::Append(work))) => {
                    let close = gather(work, &mut commands, &self.shared, &mut batch);
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
            gather(work, commands, &self.shared, &mut batch);
            self.store(&mut batch).await;
        }
    }

    /// Stores a batch and answers it. All branching about what can go wrong is here.
    async fn store(&mut self, batch: &mut Vec<Work>) {
        let Some(session) = &self.session else {
            return refuse(batch, "the database is not there");
        };
        let asked = self.shared.silence.ask(self.number);
        let mut tries = super::connection::Tries::default();
        let stored = loop {
            match append(session, &self.shared, self.shard, &mut self.wary, batch).await {
                Ok(outcome) => break Ok(outcome),
                // Nothing was stored.
                Err(error) => match tries.again(error) {
                    Ok(()) => {}
                    Err(error) => break Err(error),
                },
            }
        };
        drop(asked);
        match stored {
            Ok(outcome) => {
                let trouble = outcome.trouble.clone();
                self.answer(batch, outcome);
                if let Some(error) = trouble {
                    self.fail(&error.told);
                }
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
            // Somebody's lock was in the way; the connection is sound.
            Err(error) if error.is_too_slow() => {
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
            let unknown = || AppendError::Unavailable("the outcome is unknown".to_owned());
            // The sender may have hung up. The event is stored all the same.
            let _ = work.answer.send(receipt.ok_or_else(unknown));
        }
    }

    fn fail(&mut self, reason: &str) {
        tracing::error!(lane = self.number, reason, "the journal cannot store; refusing events until it can");
        self.shared.set_failing(self.number, Some(reason.to_owned()));
        self.session = None;
    }

    /// Refuses what comes until there is a sound connection. Returns whether the journal was closed meanwhile.
    async fn wait_for_database(&mut self, commands: &mut mpsc::Receiver<Command>) -> bool {
        let mut reconnect = Reconnect::new(Chance::random());
        loop {
            let connector = Arc::clone(&self.connector);
            let opening = async move {
                let session = connector.open(Purpose::Append).await?;
                self_test::run(&session).await.map_err(|error| EngineError::other(error.to_string()))?;
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
    batch: &mut Vec<Work>,
) -> Option<oneshot::Sender<()>> {
    let mut events = first.events.len();
    let mut bytes = first.bytes();
    batch.push(first);
    let mut close = None;
    while events < BATCH_EVENTS && bytes < BATCH_BYTES && close.is_none() {
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
    /// `None`: some of the request's events are stored, but not all that belongs to them is known or written.
    pub(super) receipts: Vec<Option<Receipt>>,
    /// Whether there are new deliveries.
    routed: bool,
    duplicates: Vec<DuplicateOf>,
    /// What went wrong after the events were stored.
    pub(super) trouble: Option<EngineError>,
}

struct DuplicateOf {
    event: EventId,
    source: SourceName,
    at: UnixMicros,
    peer: std::net::IpAddr,
}

/// What is known of a key of the batch.
enum Fate {
    /// The first event of this key in the batch was stored.
    Stored(Known),
    /// Another event holds the key.
    Held(Known),
    Unknown,
}

/// Stores a batch. An error means that nothing was stored, or that nobody can know.
pub(super) async fn append(
    session: &Session,
    shared: &Shared,
    shard: i16,
    wary: &mut u32,
    batch: &[Work],
) -> Result<Outcome, EngineError> {
    crate::crash::point("before_insert");
    // Copies inside the batch are folded first: in the statement they would vanish without an answer.
    let mut groups: HashMap<(&SourceName, &[u8]), usize> = HashMap::new();
    let mut candidates = Vec::new();
    for event in batch.iter().flat_map(|work| &work.events) {
        groups.entry((&event.source, event.key.as_bytes())).or_insert_with(|| {
            let id = shared.id_for(event);
            candidates.push(Candidate { id, event });
            candidates.len() - 1
        });
    }
    let given = shared.given_time();
    let late_before = (shared.database_time() - LATE_MICROS) / 1_000;
    let late = candidates.iter().any(|candidate| candidate.id.sequence() >> 15 < late_before);
    let ids: Vec<EventId> = candidates.iter().map(|candidate| candidate.id).collect();
    let firsts: Vec<_> = candidates.iter().map(|candidate| candidate.event).collect();
    let guessed = *wary == 0 && !late && queries::are_plain(&candidates);
    *wary = wary.saturating_sub(1);
    let won = if guessed && queries::append_new(session, given, shard, &mut candidates).await? {
        ids.iter().copied().collect()
    } else {
        if guessed {
            *wary = WARY_FOR;
        }
        queries::append(session, given, shard, late, &mut candidates).await?
    };
    session.check_replicated()?;
    crate::crash::point("after_commit");

    let mut trouble = None;
    let mut fates: Vec<Fate> = ids
        .iter()
        .zip(&firsts)
        .map(|(id, event)| match won.contains(id) {
            true => {
                let expires_at = event.remembered_until(*id);
                Fate::Stored(Known { event: *id, digest: event.digest, expires_at })
            }
            false => Fate::Unknown,
        })
        .collect();
    let lost: Vec<usize> =
        (0..fates.len()).filter(|place| matches!(fates.get(*place), Some(Fate::Unknown))).collect();
    if !lost.is_empty() {
        let keys: Vec<(&str, &[u8])> = lost
            .iter()
            .filter_map(|place| firsts.get(*place))
            .map(|event| (event.source.as_str(), event.key.as_bytes()))
            .collect();
        let known = queries::first_ids(session, &keys).await;
        match known.and_then(|known| session.check_replicated().map(|()| known)) {
            Ok(known) => {
                for (place, known) in known {
                    if let Some(fate) = lost.get(place).and_then(|place| fates.get_mut(*place)) {
                        *fate = Fate::Held(known);
                    }
                }
            }
            Err(error) => trouble = Some(error),
        }
    }
    let mut decided = decide(batch, &groups, &fates);
    if !decided.conflicts.is_empty() {
        let mut tries = super::connection::Tries::default();
        let kept = loop {
            let mut conflicts: Vec<_> =
                decided.conflicts.iter().map(|conflict| (conflict.first, conflict.event)).collect();
            match queries::keep_conflicts(session, shard, &mut conflicts).await {
                Ok(()) => break Ok(()),
                Err(error) => {
                    // After an error the transaction is over, but the session has to be told.
                    let collision = error.is_collision() && session.run("ROLLBACK").await.is_ok();
                    match tries.again(error) {
                        Ok(()) if collision => {}
                        Ok(()) => break Err(EngineError::other("a conflict could not be kept")),
                        Err(error) => break Err(error),
                    }
                }
            }
        };
        if let Err(error) = kept {
            for conflict in &decided.conflicts {
                if let Some(receipt) = decided.outcome.receipts.get_mut(conflict.request) {
                    *receipt = None;
                }
            }
            trouble = Some(error);
        }
    }
    decided.outcome.trouble = trouble;
    Ok(decided.outcome)
}

struct Decided<'b> {
    outcome: Outcome,
    conflicts: Vec<ConflictOf<'b>>,
}

struct ConflictOf<'b> {
    /// Which request of the batch.
    request: usize,
    first: EventId,
    event: &'b crate::event::NewEvent,
}

/// Says of every event what it is, given what is known of the keys.
fn decide<'b>(
    batch: &'b [Work],
    groups: &HashMap<(&SourceName, &[u8]), usize>,
    fates: &[Fate],
) -> Decided<'b> {
    let mut outcome = Outcome {
        receipts: Vec::with_capacity(batch.len()),
        routed: false,
        duplicates: Vec::new(),
        trouble: None,
    };
    let mut conflicts = Vec::new();
    let mut announced = vec![false; fates.len()];
    for (request, work) in batch.iter().enumerate() {
        let mut receipt = Some(Receipt::with_capacity(work.events.len()));
        for event in &work.events {
            let place = groups.get(&(&event.source, event.key.as_bytes())).copied().unwrap_or(usize::MAX);
            let first_here = announced.get_mut(place).is_some_and(|known| !std::mem::replace(known, true));
            let (known, verdict) = match fates.get(place) {
                Some(Fate::Stored(known)) if first_here => {
                    outcome.routed |= event.quarantine.is_none() && !event.routes.is_empty();
                    let held = event.quarantine.is_some();
                    (known, if held { Verdict::Quarantined } else { Verdict::New })
                }
                // This very event was stored before, and whoever brought it did not hear of it.
                Some(Fate::Held(known)) if event.id == Some(known.event) => {
                    let held = event.quarantine.is_some();
                    (known, if held { Verdict::Quarantined } else { Verdict::New })
                }
                Some(Fate::Stored(known) | Fate::Held(known)) if known.digest == event.digest => {
                    outcome.duplicates.push(DuplicateOf {
                        event: known.event,
                        source: event.source.clone(),
                        at: event.received_at,
                        peer: event.peer,
                    });
                    (known, Verdict::Duplicate)
                }
                Some(Fate::Stored(known) | Fate::Held(known)) => {
                    conflicts.push(ConflictOf { request, first: known.event, event });
                    (known, Verdict::Conflict)
                }
                Some(Fate::Unknown) | None => {
                    receipt = None;
                    continue;
                }
            };
            if let Some(receipt) = &mut receipt {
                receipt.push(Appended { id: known.event, verdict, expires_at: known.expires_at });
            }
        }
        outcome.receipts.push(receipt);
    }
    Decided { outcome, conflicts }
}
