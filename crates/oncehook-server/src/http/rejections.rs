//! Refused requests in the log, added up.
//!
//! A flood of forged requests must not become a flood of log lines: refusals are counted per source, sender and reason and
//! logged about once a second. Nothing that the sender wrote is logged, only its address.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};

/// Different (source, sender, reason) held at once; the rest is summed up.
const HELD: usize = 256;

#[derive(Debug, Default)]
pub(super) struct Rejections(Mutex<Counts>);

#[derive(Debug, Default)]
struct Counts {
    by_sender: HashMap<(String, IpAddr, &'static str), u64>,
    beyond: u64,
}

impl Rejections {
    pub(super) fn count(&self, source: &str, sender: IpAddr, reason: &'static str) {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (source.to_owned(), sender, reason);
        if counts.by_sender.len() >= HELD && !counts.by_sender.contains_key(&key) {
            counts.beyond += 1;
        } else {
            *counts.by_sender.entry(key).or_default() += 1;
        }
    }

    /// Writes the log lines and starts over.
    pub(super) fn log(&self) {
        let counts = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        for ((source, sender, reason), count) in counts.by_sender {
            tracing::warn!(source, %sender, reason, count, "refused requests");
        }
        if counts.beyond > 0 {
            tracing::warn!(count = counts.beyond, "refused requests of further senders");
        }
    }
}
