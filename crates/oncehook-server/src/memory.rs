//! Gives memory back to the system after a crowd of connections has left.
//!
//! The allocator takes freed memory of a thread back when that thread has asked for so much more. Threads of a gateway from which a
//! crowd has gone ask for little, and what the crowd took would stay. So each thread asks once, for memory that it does not touch.
//!
//! Does not: run while there is work. A thread looks only when it has nothing to do.

use std::cell::Cell;
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};

/// Requests after which the allocator collects a thread's memory (mimalloc's `generic_collect`).
const REQUESTS: usize = 10_000;

/// Larger than anything that the allocator serves without counting.
const LARGE: usize = 1 << 20;

static CROWDS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static SEEN: Cell<u64> = const { Cell::new(0) };
}

/// A crowd has left: every thread gives back what it can the next time it has nothing to do.
pub(crate) fn crowd_has_left() {
    CROWDS.fetch_add(1, Ordering::Relaxed);
}

/// Called by a thread that has nothing to do.
pub(crate) fn give_back() {
    let crowds = CROWDS.load(Ordering::Relaxed);
    if SEEN.replace(crowds) != crowds {
        for _ in 0..REQUESTS {
            drop(black_box(Vec::<u8>::with_capacity(LARGE)));
        }
    }
}
