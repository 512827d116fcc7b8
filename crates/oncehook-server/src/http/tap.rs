//! A copy of a request's head as it came over the wire.
//!
//! hyper follows the standard for a request with both `Content-Length` and `Transfer-Encoding`: it drops the length, reads
//! chunks and closes the connection. We refuse such a request, because only somebody who plays with proxies sends one, and
//! for that we must see what hyper has dropped. The tap keeps what was read from the last answer to the end of the head, and
//! beyond that only for the rare chunked request, which is the only one that is looked at.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Usual heads are shorter. A buffer of this size is kept for the next head; a larger one is given back.
const USUAL: usize = 2 << 10;

/// The bytes of a request's head.
#[derive(Debug, Default)]
pub(super) struct Tap {
    kept: Mutex<Vec<u8>>,
    length: AtomicUsize,
    /// Whether the head is complete, and what comes now is no part of it.
    closed: AtomicBool,
}

impl Tap {
    /// Keeps bytes that were read. The listener bounds how many there can be before a head is complete.
    pub(super) fn record(&self, bytes: &[u8]) {
        if !self.closed.load(Ordering::Relaxed) {
            let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
            kept.extend_from_slice(bytes);
            self.length.store(kept.len(), Ordering::Relaxed);
        }
    }

    /// Whether a head is longer than usual and still not complete.
    pub(super) fn is_long(&self) -> bool {
        self.length.load(Ordering::Relaxed) > USUAL && !self.closed.load(Ordering::Relaxed)
    }

    /// Called when a head is complete. What was read of it is kept on only if it is `needed`.
    pub(super) fn close(&self, needed: bool) {
        self.closed.store(true, Ordering::Relaxed);
        if !needed {
            self.forget();
        }
    }

    /// Whether something has come since the last request was answered.
    pub(super) fn has_begun(&self) -> bool {
        !self.kept.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Called when a request has been answered: what comes now belongs to the next one.
    pub(super) fn reset(&self, needed: bool) {
        if needed {
            self.forget();
        }
        self.closed.store(false, Ordering::Relaxed);
    }

    fn forget(&self) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        self.length.store(0, Ordering::Relaxed);
        if kept.capacity() > USUAL {
            *kept = Vec::new();
        } else {
            kept.clear();
        }
    }

    /// Whether the current request is plainly chunked: its head is here from its first byte and names no length. A
    /// request that was sent before the last one was answered is not here in full, and counts as not plain.
    ///
    /// `headers` is how many headers hyper has found. Of a head whose beginning is not here at least one more was found
    /// than stands here, however the rest is made to look.
    pub(super) fn is_plainly_chunked(&self, method: &str, headers: usize) -> bool {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let head = kept.trim_ascii_start();
        let Some(end) = head.windows(4).position(|window| window == b"\r\n\r\n") else { return false };
        let head = head.get(..end).unwrap_or_default();
        let lines = head.split(|byte| *byte == b'\n').count();
        head.starts_with(method.as_bytes())
            && lines == headers + 1
            && !head.split(|byte| *byte == b'\n').any(|line| {
                let name = line.split(|byte| *byte == b':').next().unwrap_or_default();
                name.trim_ascii().eq_ignore_ascii_case(b"content-length")
            })
    }
}
