//! A thread beside the writer, with a queue of one place.
//!
//! Promises: a helper that has failed or died is noticed ([`Helper::failure`]); [`Helper::stop`] returns when it has done what was
//! handed to it.
//! Does not: start again. The writer replaces a helper that has failed.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender};

/// Why a helper has failed, if it has. The first failure is the last word.
#[derive(Clone, Default)]
pub(super) struct Failure(Arc<Mutex<Option<String>>>);

impl Failure {
    pub(super) fn set(&self, reason: String) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(reason);
    }

    pub(super) fn get(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

pub(super) struct Helper<T> {
    queue: Option<Sender<T>>,
    failure: Failure,
    /// What to say if the thread has died.
    died: &'static str,
    pub(super) thread: Option<JoinHandle<()>>,
}

impl<T: Send + 'static> Helper<T> {
    /// Starts a thread that serves the queue until it ends.
    pub(super) fn start(
        name: &str,
        died: &'static str,
        run: impl FnOnce(Receiver<T>, Failure) + Send + 'static,
    ) -> io::Result<Self> {
        let (queue, handed_over) = crossbeam_channel::bounded(1);
        let failure = Failure::default();
        let failing = failure.clone();
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || run(handed_over, failing))?;
        Ok(Self { queue: Some(queue), failure, died, thread: Some(thread) })
    }

    /// Hands something over; waits for room. Given back if the thread has ended.
    pub(super) fn hand_over(&self, work: T) -> Result<(), T> {
        let Some(queue) = &self.queue else { return Err(work) };
        queue.send(work).map_err(|returned| returned.0)
    }

    /// Why the helper is of no use any more, if it is not.
    pub(super) fn failure(&self) -> Option<String> {
        let ended = self.thread.as_ref().is_none_or(JoinHandle::is_finished);
        self.failure.get().or_else(|| ended.then(|| self.died.to_owned()))
    }

    /// Lets the thread end, and waits for it.
    pub(super) fn stop(&mut self) {
        self.queue = None;
        if let Some(thread) = self.thread.take() {
            // A panic has been reported by its thread.
            let _ = thread.join();
        }
    }
}
