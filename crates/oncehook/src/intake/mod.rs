//! The intake: where an accepted event first becomes durable. That is the journal, or the [`Spool`] while the journal cannot.
//!
//! Promises: an event is accepted only when one of the two has it on disk. Whatever was accepted into the spool reaches the
//! journal through the same append as everything else, in the order of acceptance, and the key settles what was there before.
//! While events wait in the spool, later ones go behind them, so the events of one entity keep their order on this node. The
//! way back to the journal is bounded: when little is left, new events are held for a moment, until the spool is empty.
//!
//! Does not: know which sources may be spooled; the caller does. Nor does it keep order between nodes, or with an event
//! that the spool had to refuse and the journal took: being durable is worth more.

mod drain;
mod spool;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use crate::event::NewEvents;
use crate::fastpath::{FastPath, NotStored, Settled};
use crate::journal::{AppendError, Journal, Receipt};
use crate::observe::Metrics;
pub use spool::{Spool, SpoolError, SpoolOptions, SpoolState, Spooled};

/// Who has the events now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Taken {
    /// The journal.
    Journal(Settled),
    /// The spool. Of a duplicate or a conflict the id is that of the first event that waits there.
    Spool(Receipt),
}

/// Why neither has them, or why that is unknown. The sender must try again.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The journal could not, or did not answer in time, and it was asked last.
    #[error(transparent)]
    Journal(#[from] NotStored),
    /// The spool could not, and the journal is away.
    #[error(transparent)]
    Spool(#[from] SpoolError),
}

/// Which way new events go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum IntakeMode {
    /// To the journal: nothing waits in the spool.
    Journal,
    /// Behind those that wait.
    Spool,
    /// Nowhere for a moment: the last of those that wait are on their way into the journal.
    Held,
}

/// How long new events may be held; and for how long none are held after that was not enough to empty the spool.
const HOLD: Duration = Duration::from_millis(500);
const NOT_HELD: Duration = Duration::from_secs(1);

struct Door {
    mode: IntakeMode,
    hold_after: Instant,
}

/// The journal with a spool beside it. One per gateway.
pub struct Intake {
    spool: Spool,
    /// How long the journal may take before the spool takes over.
    patience: Duration,
    door: Mutex<Door>,
    /// Wakes those who are held when the mode has changed.
    changed: Notify,
    /// Wakes the drain when there is something to drain.
    filled: Notify,
    metrics: Arc<Metrics>,
}

impl Intake {
    /// A spool beside a journal that is waited for so long.
    pub fn new(spool: Spool, patience: Duration, metrics: Arc<Metrics>) -> Self {
        // What an earlier process has left comes first.
        let mode = if spool.outstanding() > 0 { IntakeMode::Spool } else { IntakeMode::Journal };
        let (changed, filled) = (Notify::new(), Notify::new());
        let door = Mutex::new(Door { mode, hold_after: Instant::now() });
        Self { spool, patience, door, changed, filled, metrics }
    }

    /// The spool, to look at.
    pub fn spool(&self) -> &Spool {
        &self.spool
    }

    /// Makes the events of one request durable, in the journal or in the spool. `usable` says whether the journal is known
    /// to be well. All branching of the intake is here.
    ///
    /// If the future is dropped half-way, what was submitted goes on.
    pub async fn append(
        &self,
        fast_path: &FastPath,
        journal: &dyn Journal,
        events: NewEvents,
        usable: bool,
    ) -> Result<Taken, Refused> {
        let mut tried = None;
        if self.may_pass(usable).await {
            match self.ask_journal(fast_path, journal, events.clone()).await {
                Ok(settled) => return Ok(Taken::Journal(settled)),
                // The outcome is unknown. If it was stored, the drain will find the key.
                Err(refused) => tried = Some(refused),
            }
        } else if let Some(settled) = fast_path.recall(journal, &events) {
            return Ok(Taken::Journal(settled));
        }
        match self.take_over(events.clone()).await {
            Ok(receipt) => Ok(Taken::Spool(receipt)),
            Err(_) if usable && tried.is_none() => {
                self.ask_journal(fast_path, journal, events).await.map(Taken::Journal)
            }
            Err(error) => Err(tried.unwrap_or(Refused::Spool(error))),
        }
    }

    async fn ask_journal(
        &self,
        fast_path: &FastPath,
        journal: &dyn Journal,
        events: NewEvents,
    ) -> Result<Settled, Refused> {
        let settled = fast_path.append_within(self.patience, journal, events).await?;
        settled.receipt.iter().for_each(|appended| self.spool.stay_above(appended.id));
        Ok(settled)
    }

    /// Whether the event may go to the journal. Waits while events are held.
    async fn may_pass(&self, usable: bool) -> bool {
        let changed = self.changed.notified();
        tokio::pin!(changed);
        changed.as_mut().enable();
        let mode = self.door().mode;
        if mode != IntakeMode::Held {
            return usable && mode == IntakeMode::Journal;
        }
        if tokio::time::timeout(HOLD, changed).await.is_err() {
            self.let_go();
            self.door().hold_after = Instant::now() + NOT_HELD;
        }
        usable && self.door().mode == IntakeMode::Journal
    }

    async fn take_over(&self, events: NewEvents) -> Result<Receipt, SpoolError> {
        let ticket = {
            // Under the lock: the spool cannot be found empty between the look at the mode and the submission.
            let mut door = self.door();
            let ticket = self.spool.submit(events)?;
            if door.mode == IntakeMode::Journal {
                door.mode = IntakeMode::Spool;
            }
            ticket
        };
        self.filled.notify_one();
        Ok(ticket.await.unwrap_or(Err(AppendError::Gone))?)
    }

    fn door(&self) -> MutexGuard<'_, Door> {
        self.door.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Holds new events, if so few wait that the spool is soon empty.
    fn hold(&self, few: usize) {
        let mut door = self.door();
        let soon = self.spool.outstanding() <= few && Instant::now() >= door.hold_after;
        if door.mode == IntakeMode::Spool && soon {
            door.mode = IntakeMode::Held;
        }
    }

    /// Lets those go who are held: behind the ones that wait.
    fn let_go(&self) {
        let mut door = self.door();
        if door.mode == IntakeMode::Held {
            door.mode = IntakeMode::Spool;
            drop(door);
            self.changed.notify_waiters();
        }
    }

    /// Opens the way to the journal, if nothing waits any more.
    fn open_if_empty(&self) -> bool {
        let mut door = self.door();
        let empty = self.spool.outstanding() == 0;
        if empty && door.mode != IntakeMode::Journal {
            door.mode = IntakeMode::Journal;
            drop(door);
            self.changed.notify_waiters();
        }
        empty
    }
}
