//! Every refusal of the front door: counted at once, logged added up.
//!
//! A flood of refused requests must not become a flood of log lines: refusals are counted per source, sender and reason and
//! logged about once a second. Nothing that the sender wrote is logged, only its address and numbers.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};

use http::StatusCode;

use super::error::HttpError;

/// Different (source, sender, reason) held at once; the rest is summed up.
const HELD: usize = 256;

/// The source of a request whose path belongs to none, in metrics and in the log.
pub(super) const NO_SOURCE: &str = "-";

/// Why a request was refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Refusal {
    /// Nothing if the connection was closed without an answer.
    pub(super) status: Option<StatusCode>,
    /// A word from a fixed set.
    pub(super) reason: &'static str,
    /// Numbers for operators, such as a size and the limit.
    pub(super) detail: Option<String>,
}

impl Refusal {
    /// Whether the request may be accepted later: `oncehook_unavailable_total` counts these.
    pub(super) fn is_unavailable(&self) -> bool {
        self.status == Some(StatusCode::SERVICE_UNAVAILABLE)
    }

    /// All places for connections are taken, and none could be freed.
    pub(super) fn no_connection() -> Self {
        Self { status: Some(StatusCode::SERVICE_UNAVAILABLE), reason: "connections", detail: None }
    }

    /// What hyper refused by itself. `begun`: whether something of a request had arrived. Nothing if the peer just left, or an
    /// idle connection was closed.
    pub(super) fn of_connection(error: &hyper::Error, begun: bool) -> Option<Self> {
        let (status, reason) = if error.is_parse_too_large() {
            (Some(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE), "head_too_large")
        } else if error.is_parse() {
            (Some(StatusCode::BAD_REQUEST), "malformed")
        } else if error.is_timeout() && begun {
            (None, "head_timeout")
        } else {
            return None;
        };
        Some(Self { status, reason, detail: None })
    }
}

impl From<&HttpError> for Refusal {
    fn from(error: &HttpError) -> Self {
        Self { status: Some(error.status), reason: error.reason, detail: error.detail.clone() }
    }
}

#[derive(Debug, Default)]
pub(super) struct Rejections(Mutex<Counts>);

#[derive(Debug, Default)]
struct Counts {
    by_sender: HashMap<(String, IpAddr, &'static str), (u64, Refusal)>,
    beyond: u64,
}

impl Rejections {
    pub(super) fn count(&self, source: &str, sender: IpAddr, refusal: Refusal) {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (source.to_owned(), sender, refusal.reason);
        if counts.by_sender.len() >= HELD && !counts.by_sender.contains_key(&key) {
            counts.beyond += 1;
        } else {
            let (count, latest) = counts.by_sender.entry(key).or_insert_with(|| (0, refusal.clone()));
            *count += 1;
            *latest = refusal;
        }
    }

    /// Writes the log lines and starts over.
    pub(super) fn log(&self) {
        let counts = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        for ((source, sender, reason), (count, refusal)) in counts.by_sender {
            let status = refusal.status.map(|status| status.as_u16());
            let detail = refusal.detail.map_or_else(String::new, |detail| format!(": {detail}"));
            tracing::warn!(source, %sender, status, reason, count, "refused requests{detail}");
        }
        if counts.beyond > 0 {
            tracing::warn!(count = counts.beyond, "refused requests of further senders");
        }
    }
}
