//! Draining: what waits in the spool goes into the journal, in order, and leaves the spool when the journal has it.
//!
//! Promises: a crash at any moment loses nothing, because a row is removed only after the journal's receipt and the alias of its
//! id are committed; it doubles nothing, because a row that is brought again meets its own key. An event that the journal refuses
//! although it is well is set aside after a few tries and holds up no other.
//!
//! Does not: run beside another drain of the same spool. The caller starts one.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use super::{Intake, Spooled};
use crate::event::NewEvents;
use crate::journal::{Alias, Appended, Journal, Layer, Receipt, Verdict};

/// How much goes into the journal at once: one request of at most this many events or bytes.
const BATCH_EVENTS: usize = 512;
const BATCH_BYTES: u64 = 4 << 20;

/// New events are held once so few wait.
const FEW: usize = 512;

/// How long the journal may take for a batch. It has deadlines of its own.
const ANSWER: Duration = Duration::from_secs(30);

/// How long to rest after a failure: first, and at most.
const REST: Duration = Duration::from_millis(50);
const LONGEST_REST: Duration = Duration::from_secs(2);

const A_MOMENT: Duration = Duration::from_millis(2);

/// How often an event is offered to a journal that is well before it is set aside.
const TRIES: u32 = 3;

/// Copies that were recognised in the spool are counted one by one, up to this many per event.
const COPIES_COUNTED: u64 = 10_000;

/// Why a batch did not come through.
struct Stopped(String);

impl<E: std::error::Error> From<E> for Stopped {
    fn from(error: E) -> Self {
        Self(error.to_string())
    }
}

impl Intake {
    /// Drains until it is asked to end. `usable` says whether the journal is known to be well.
    pub async fn drain(
        self: Arc<Self>,
        journal: Arc<dyn Journal>,
        usable: impl Fn() -> bool + Send,
        mut end: watch::Receiver<bool>,
    ) {
        let mut refused: HashMap<i64, u32> = HashMap::new();
        let mut rest = REST;
        loop {
            if *end.borrow() {
                return self.let_go();
            }
            if self.open_if_empty() {
                refused.clear();
                tokio::select! {
                    () = self.filled.notified() => {}
                    _ = end.wait_for(|end| *end) => return,
                }
                continue;
            }
            let moved = if usable() {
                self.hold(FEW);
                self.move_batch(&*journal, &usable, &mut refused).await
            } else {
                Err(Stopped("the journal is away".to_owned()))
            };
            match moved {
                Ok(()) => rest = REST,
                Err(Stopped(reason)) => {
                    self.let_go();
                    tracing::debug!(reason, "the spool could not be drained");
                    tokio::select! {
                        () = tokio::time::sleep(rest) => rest = (rest * 2).min(LONGEST_REST),
                        _ = end.wait_for(|end| *end) => return,
                    }
                }
            }
        }
    }

    /// Moves what stands first.
    async fn move_batch(
        &self,
        journal: &dyn Journal,
        usable: &(impl Fn() -> bool + Send),
        refused: &mut HashMap<i64, u32>,
    ) -> Result<(), Stopped> {
        let batch = self.spool.read(BATCH_EVENTS, BATCH_BYTES).await?;
        if batch.is_empty() {
            // What is outstanding is still on its way into the file.
            tokio::time::sleep(A_MOMENT).await;
            return Ok(());
        }
        match bring(journal, &batch).await {
            Ok(receipt) => self.landed(journal, &batch, receipt).await,
            Err(Stopped(reason)) if !usable() => Err(Stopped(reason)),
            // The journal is well, so it may be one of them: each for itself.
            Err(_) => {
                for spooled in batch {
                    self.move_alone(journal, spooled, refused).await?;
                }
                Ok(())
            }
        }
    }

    /// Moves one event, or sets it aside if the journal is well and does not want it.
    async fn move_alone(
        &self,
        journal: &dyn Journal,
        spooled: Spooled,
        refused: &mut HashMap<i64, u32>,
    ) -> Result<(), Stopped> {
        let batch = [spooled];
        let Stopped(reason) = match bring(journal, &batch).await {
            Ok(receipt) => return self.landed(journal, &batch, receipt).await,
            Err(stopped) => stopped,
        };
        journal.self_test().await?;
        let [spooled] = batch;
        let tries = refused.entry(spooled.seq).or_default();
        *tries += 1;
        if *tries < TRIES {
            return Err(Stopped(reason));
        }
        refused.remove(&spooled.seq);
        tracing::error!(event = %spooled.id, reason, "the journal does not take event {}; it stays in the spool", spooled.id);
        Ok(self.spool.set_aside(spooled.seq, reason).await?)
    }

    /// The journal has them: remembers what they were called, and removes them here.
    async fn landed(&self, journal: &dyn Journal, batch: &[Spooled], receipt: Receipt) -> Result<(), Stopped> {
        if receipt.len() != batch.len() {
            return Err(Stopped("the journal's receipt is not for what it was brought".to_owned()));
        }
        let renamed = batch.iter().zip(&receipt).filter(|(spooled, appended)| spooled.id != appended.id);
        let aliases: Vec<Alias> =
            renamed.map(|(spooled, appended)| Alias { alias: spooled.id, event: appended.id }).collect();
        crate::crash::point("drained");
        if !aliases.is_empty() {
            journal.keep_aliases(aliases).await?;
        }
        crate::crash::point("aliased");
        let seqs = batch.iter().map(|spooled| spooled.seq).collect();
        self.spool.remove(seqs).await?;
        crate::crash::point("cleared");
        for (spooled, appended) in batch.iter().zip(&receipt) {
            self.count(journal, spooled, appended);
        }
        Ok(())
    }

    fn count(&self, journal: &dyn Journal, spooled: &Spooled, appended: &Appended) {
        let outcome = match appended.verdict {
            Verdict::New | Verdict::Quarantined => "new",
            Verdict::Duplicate => "duplicate",
            Verdict::Conflict => "conflict",
        };
        self.metrics.drained(outcome);
        if appended.verdict == Verdict::Conflict {
            return;
        }
        let event = &spooled.event;
        for _ in 0..spooled.copies.min(COPIES_COUNTED) {
            // Without room, a count is lost and nothing else.
            if !journal.note_duplicate(appended.id, &event.source, event.received_at, event.peer, Layer::Memory) {
                return;
            }
        }
    }
}

/// Appends a batch as one request: all of it is durable, or the outcome is unknown.
async fn bring(journal: &dyn Journal, batch: &[Spooled]) -> Result<Receipt, Stopped> {
    let events: NewEvents = batch.iter().map(|spooled| spooled.event.clone()).collect();
    let appending = async {
        let outcome = journal.submit(events)?.await.map_err(|_| Stopped("the journal is gone".to_owned()))?;
        Ok(outcome?)
    };
    let appended = tokio::time::timeout(ANSWER, appending).await;
    appended.unwrap_or_else(|_| Err(Stopped("the journal does not answer".to_owned())))
}
