//! What one batch takes from the writer's queue, and when it has enough.
//!
//! Promises: a batch is bounded in events, bytes and in the jobs that wait for it; what is taken is no longer counted as queued.
//! Does not: store anything, or look at what it takes.

use std::sync::atomic::{AtomicUsize, Ordering};

use crossbeam_channel::Receiver;

use super::syncer::Syncer;
use super::writer::{Command, Job, Work};

/// A batch ends at this many events or bytes, whichever comes first.
const BATCH_EVENTS: usize = 512;
const BATCH_BYTES: usize = 8 << 20;

/// So many events are worth a commit as soon as the disk is free, and so many are stored before it is asked again whether it is.
const BATCH_ENOUGH: usize = 64;
const TAKEN_AT_ONCE: usize = 32;

/// Jobs that wait for a batch at most.
const BATCH_JOBS: usize = 64;

/// What one batch takes from the queue. Jobs that stand between the appends are set aside: they come after the batch.
pub(super) struct Intake<'i> {
    commands: &'i Receiver<Command>,
    queued_bytes: &'i AtomicUsize,
    pub(super) jobs: Vec<Job>,
    /// The first other command, if one was met. The batch ends there.
    pub(super) interruption: Option<Command>,
    events: usize,
    bytes: usize,
}

impl<'i> Intake<'i> {
    pub(super) fn new(commands: &'i Receiver<Command>, queued_bytes: &'i AtomicUsize) -> Self {
        let (jobs, interruption) = (Vec::new(), None);
        Self { commands, queued_bytes, jobs, interruption, events: 0, bytes: 0 }
    }

    /// Adds what waits, a little at a time, for as long as the batch before is on its way to the disk. The disk is not kept
    /// waiting for a larger batch than is worth a commit.
    pub(super) fn more(&mut self, batch: &mut Vec<Work>, syncer: &mut Syncer) -> bool {
        loop {
            let busy = syncer.is_busy();
            if !busy && self.events >= BATCH_ENOUGH {
                return false;
            }
            if self.take(batch) {
                return true;
            }
            if !busy || !self.has_room() {
                return false;
            }
            syncer.wait();
        }
    }

    /// Adds some of what waits in the queue. Returns whether that was anything.
    fn take(&mut self, batch: &mut Vec<Work>) -> bool {
        let (had, end) = (batch.len(), self.events + TAKEN_AT_ONCE);
        while self.has_room() && self.events < end {
            match self.commands.try_recv() {
                Ok(Command::Append(work)) => self.put(*work, batch),
                Ok(Command::Job(job)) => self.jobs.push(job),
                Ok(other) => self.interruption = Some(other),
                Err(_) => break,
            }
        }
        batch.len() > had
    }

    pub(super) fn put(&mut self, work: Work, batch: &mut Vec<Work>) {
        let bytes = work.bytes();
        self.queued_bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.events += work.events.len();
        self.bytes += bytes;
        batch.push(work);
    }

    fn has_room(&self) -> bool {
        self.events < BATCH_EVENTS
            && self.bytes < BATCH_BYTES
            && self.jobs.len() < BATCH_JOBS
            && self.interruption.is_none()
    }
}
