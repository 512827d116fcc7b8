//! Whether an event takes effect in another database, by what is known there of its entity.
//!
//! Promises: the rules are those of `ordering`, the same as in the journals. Pure: whoever asks holds the locks of the
//! entities' rows, and keeps what [`Standings::moved`] says in the transaction of the effects.
//!
//! Does not: compare events without an entity. They run.

use std::collections::{BTreeMap, BTreeSet};

use super::elsewhere::{Applied, Comparison};
use crate::delivery::{Failure, HandedEvent, Verdict};
use crate::ordering::{Mark, Standing, Step};

/// Entities as they stand in the middle of a transaction.
pub(crate) struct Standings<'c> {
    comparison: &'c Comparison,
    known: BTreeMap<String, Standing>,
    moved: BTreeSet<String>,
}

/// What to do with an event.
pub(crate) enum Turn {
    /// Run it. With a machine, it leads to this state.
    Run(Option<String>),
    /// Do not.
    Pass(Applied),
}

impl<'c> Standings<'c> {
    /// As they were found.
    pub(crate) fn new(comparison: &'c Comparison, known: BTreeMap<String, Standing>) -> Self {
        Self { comparison, known, moved: BTreeSet::new() }
    }

    /// Decides about an event. What runs is taken to take effect: if it does not, the whole transaction is undone.
    pub(crate) fn judge(&mut self, event: &HandedEvent) -> Turn {
        let Some(entity) = &event.entity else { return Turn::Run(None) };
        let (mark, kind) = (Mark { version: event.version, at: event.occurred_at }, event.kind.as_deref());
        let standing = self.known.entry(entity.clone()).or_default();
        match self.comparison.rules.judge(standing, mark, kind) {
            Step::Run(state) => {
                self.comparison.rules.advance(standing, mark, kind);
                self.moved.insert(entity.clone());
                Turn::Run(state)
            }
            Step::Defer(reason) => Turn::Pass(Applied::Failed(Failure::defer(reason))),
            Step::Settle(Verdict::Superseded(reason)) => Turn::Pass(Applied::Superseded(reason)),
            Step::Settle(Verdict::Dead(failure) | Verdict::RetryAt(_, failure) | Verdict::Parked(_, failure)) => {
                Turn::Pass(Applied::Failed(failure.answered()))
            }
            // Nothing is done without running.
            Step::Settle(Verdict::Succeeded(_)) => Turn::Pass(Applied::Collided),
        }
    }

    /// What has changed, in the order of names.
    pub(crate) fn moved(&self) -> impl Iterator<Item = (&str, &Standing)> {
        self.moved.iter().filter_map(|entity| Some((entity.as_str(), self.known.get(entity)?)))
    }
}

/// The entities of events, in the order in which their rows are locked.
pub(crate) fn names<'e>(events: impl Iterator<Item = &'e HandedEvent>) -> BTreeSet<&'e str> {
    events.filter_map(|event| event.entity.as_deref()).collect()
}
