//! Threads for which everybody waits.
//!
//! Accepting on a busy machine takes turns: requests are read, stored, synced, answered. The threads that read requests always have
//! something to do, so the one that stores was given a processor only when they had run out of it, and then stood all requests
//! in one queue while they stood still. The few microseconds that it needs for an event are worth more than theirs.
//!
//! Promises: nothing but a hint. Does not: need the right to give it; where the process may not (no `CAP_SYS_NICE`, no
//! `LimitNICE=`), the thread is like all others.

/// How nice the threads are that others wait for.
const NICE: i32 = -10;

/// Has the calling thread go before others.
pub(super) fn raise() {
    // On Linux no process id means this thread, not its process.
    if let Err(error) = rustix::process::setpriority_process(None, NICE) {
        tracing::debug!(%error, "the journal's threads may not go before others");
    }
}
