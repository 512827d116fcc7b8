//! What the destination said, and what it means for the delivery.
//!
//! Promises: at most [`READ_BYTES`] of an answer are read and the rest is not waited for; a stored result and an error
//! stay small; what the other side says is shown without control characters, and shown and kept without our own secrets;
//! what is kept as JSON can be read by every parser, also inside of our own JSON.

use std::borrow::Cow;
use std::sync::atomic::Ordering;
use std::time::{Duration, UNIX_EPOCH};

use http::StatusCode;
use http::header::{CONTENT_TYPE, HeaderMap, LOCATION, RETRY_AFTER};
use oncehook_verify::UnixMicros;
use serde_json::Value;
use tokio::time::Instant;

use super::destination::{innermost, read, shown};
use super::hidden::Hidden;
use super::{HttpHandler, OnClientError};
use crate::delivery::{Cause, Failure};
use crate::json::{PLAIN_LEVELS, is_json_within};

/// A header by which a destination that cannot answer 425 says "not yet".
const RETRY_LATER: &str = "retry-later";

/// This much of an answer is read.
const READ_BYTES: usize = 64 << 10;

/// A JSON answer up to this size is the result as it is; a larger one is kept as a piece of text.
const RESULT_JSON_BYTES: usize = 4 << 10;

/// This much text is kept as a result.
const RESULT_TEXT_BYTES: usize = 1_000;

/// An answer, as far as it was read.
pub(super) struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    body: Vec<u8>,
    /// Why it broke off, if it did before all of it was read, or as much as is ever read.
    broke_off: Option<String>,
}

impl Answer {
    /// Reads until the end, the limit or the deadline.
    pub(super) async fn read(mut response: reqwest::Response, deadline: Instant) -> Self {
        let (mut body, end) = read(&mut response, deadline, READ_BYTES).await;
        body.truncate(READ_BYTES);
        let broke_off = end.err().map(|broken| match broken {
            Some(error) => innermost(&error),
            None => "the time was up".to_owned(),
        });
        Self { status: response.status(), headers: std::mem::take(response.headers_mut()), body, broke_off }
    }

    /// `{"status":200,"body":…}`, with a small JSON body as it is and any other as text.
    ///
    /// Whole, it is `{"status":200,"body":…,"type":…}`: all that was read, with the content type, so that it can be said again.
    /// A body that is kept as a text although it is called JSON is marked with `"text":true`.
    fn to_result(&self, hidden: &Hidden, whole: bool) -> String {
        let status = self.status.as_u16();
        if !whole {
            let (body, _) = self.kept_body(hidden, RESULT_JSON_BYTES, RESULT_TEXT_BYTES);
            return format!("{{\"status\":{status},\"body\":{body}}}");
        }
        let (body, is_text) = self.kept_body(hidden, READ_BYTES, READ_BYTES);
        let kind = self.headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
        let mark = if is_text && kind.is_some_and(|kind| kind.contains("json")) { ",\"text\":true" } else { "" };
        let kind = Value::from(kind.map(|kind| hidden.censor(kind)));
        format!("{{\"status\":{status},\"body\":{body},\"type\":{kind}{mark}}}")
    }

    /// The body as JSON, without what is hidden, and whether it is a text. JSON that some parsers cannot read is one.
    fn kept_body(&self, hidden: &Hidden, json_bytes: usize, text_bytes: usize) -> (String, bool) {
        if self.body.is_empty() {
            return ("null".to_owned(), false);
        }
        let text = String::from_utf8_lossy(&self.body);
        let is_utf8 = matches!(text, Cow::Borrowed(_));
        let text = hidden.censor(&text);
        if is_utf8 && text.len() <= json_bytes && is_json_within(&text, PLAIN_LEVELS) {
            return (text.trim().to_owned(), false);
        }
        let (kept, _) = text.split_at(text.floor_char_boundary(text_bytes));
        (Value::from(kept).to_string(), true)
    }

    /// How long the other side wants to be left alone: a number of seconds, or a date.
    fn retry_after(&self, now: UnixMicros) -> Option<Duration> {
        let text = self.headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
        if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
            return Some(Duration::from_secs(text.parse().unwrap_or(u64::MAX)));
        }
        let date = httpdate::parse_http_date(text).ok()?.duration_since(UNIX_EPOCH).ok()?;
        let now = Duration::from_micros(u64::try_from(now.0).ok()?);
        Some(date.saturating_sub(now))
    }
}

impl HttpHandler {
    /// What an answer means. All decisions about a status are here.
    pub(super) fn judge(&self, answer: &Answer, now: UnixMicros) -> Result<Option<String>, Failure> {
        let message = || self.describe(answer);
        // In the log: the status, without a word of what it said.
        let logged = || format!("HTTP {}", answer.status.as_u16());
        let again = || {
            let failure = Failure::retry(Cause::Destination, message()).in_log(logged());
            match answer.retry_after(now) {
                Some(wait) => failure.after(wait),
                None => failure,
            }
        };
        let refused = || Failure::permanent(Cause::Destination, message()).in_log(logged()).answered();
        let result = || match &answer.broke_off {
            None => Ok(Some(answer.to_result(&self.destination.hidden, self.whole.load(Ordering::Relaxed)))),
            Some(why) => {
                let message = format!("{}, but its answer broke off: {why}", message());
                Err(Failure::retry(Cause::Destination, message).in_log("its answer broke off"))
            }
        };
        match answer.status.as_u16() {
            200..=299 => result(),
            300..=399 => {
                let failure = Failure::retry(Cause::Destination, self.describe_redirect(answer));
                Err(failure.in_log(format!("{}; redirects are not followed", logged())))
            }
            // Not yet: it works, and wants something else first.
            status if status == 425 || answer.headers.contains_key(RETRY_LATER) => {
                Err(Failure::defer(format!("{} says: not yet", message())).in_log(logged()))
            }
            408 | 429 => Err(again()),
            410 if self.on_4xx != OnClientError::Result => Err(refused()),
            400..=499 => match self.on_4xx {
                OnClientError::Retry => Err(again().answered()),
                OnClientError::Result => result(),
                OnClientError::GiveUp => Err(refused()),
            },
            _ => Err(again()),
        }
    }

    fn describe(&self, answer: &Answer) -> String {
        let said = shown(&self.destination.hidden.censor(&String::from_utf8_lossy(&answer.body)));
        let separator = if said.is_empty() { "" } else { ": " };
        format!("{} answered {}{separator}{said}", self.destination.name, answer.status)
    }

    fn describe_redirect(&self, answer: &Answer) -> String {
        let name = &self.destination.name;
        let location = answer.headers.get(LOCATION).and_then(|value| value.to_str().ok());
        let target = location.and_then(|text| url::Url::parse(name).ok()?.join(text).ok());
        // Only the origin: what follows may be a token.
        let target = match target.map(|url| url.origin()) {
            Some(origin) if origin.is_tuple() => format!(" to {}", shown(&origin.ascii_serialization())),
            _ => String::new(),
        };
        format!("{name} answered {} and redirects{target}; redirects are not followed", answer.status)
    }
}
