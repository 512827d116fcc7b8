//! What the destination said, and what it means for the delivery.
//!
//! Promises: at most [`READ_BYTES`] of an answer are read and the rest is not waited for; a stored result and an error
//! stay small; what the other side says is shown without control characters, and shown and kept without our own secrets;
//! what is kept as JSON can be read by every parser, also inside of our own JSON.

use std::borrow::Cow;
use std::error::Error;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, UNIX_EPOCH};

use http::StatusCode;
use http::header::{CONTENT_TYPE, HeaderMap, LOCATION, RETRY_AFTER};
use oncehook_verify::UnixMicros;
use tokio::time::{Instant, timeout_at};

use super::OnClientError;
use super::hidden::Hidden;
use crate::delivery::{Cause, Failure};
use crate::json::{PLAIN_LEVELS, is_json_within};
use crate::outbound::Refused;

/// A header by which a destination that cannot answer 425 says "not yet".
const RETRY_LATER: &str = "retry-later";

/// This much of an answer is read.
const READ_BYTES: usize = 64 << 10;

/// A JSON answer up to this size is the result as it is; a larger one is kept as a piece of text.
const RESULT_JSON_BYTES: usize = 4 << 10;

/// This much text is kept as a result.
const RESULT_TEXT_BYTES: usize = 1_000;

/// This much of an answer is repeated in an error.
const ERROR_CHARS: usize = 200;

/// An answer, as far as it was read.
pub(super) struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    body: Vec<u8>,
    end: End,
}

/// How reading an answer ended.
enum End {
    /// All of it was read, or as much as is ever read.
    Enough,
    /// It broke off, for this reason.
    BrokeOff(String),
}

impl Answer {
    /// Reads until the end, the limit or the deadline.
    pub(super) async fn read(mut response: reqwest::Response, deadline: Instant) -> Self {
        let status = response.status();
        let headers = std::mem::take(response.headers_mut());
        let mut body = Vec::new();
        let end = loop {
            match timeout_at(deadline, response.chunk()).await {
                Ok(Ok(Some(chunk))) => {
                    let room = READ_BYTES.saturating_sub(body.len());
                    body.extend_from_slice(chunk.get(..room).unwrap_or(&chunk));
                    if body.len() >= READ_BYTES {
                        break End::Enough;
                    }
                }
                Ok(Ok(None)) => break End::Enough,
                Ok(Err(error)) => break End::BrokeOff(innermost(&error)),
                Err(_) => break End::BrokeOff("the time was up".to_owned()),
            }
        };
        Self { status, headers, body, end }
    }

    /// `{"status":200,"body":…,"type":…}`: all that was read, with the content type, so that it can be said again. A body
    /// that is kept as a text although it is called JSON is marked with `"text":true`.
    fn to_whole_result(&self, hidden: &Hidden) -> String {
        let (body, is_text) = self.kept_body(hidden, READ_BYTES, READ_BYTES);
        let kind = self.headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
        let mark = if is_text && kind.is_some_and(|kind| kind.contains("json")) { ",\"text\":true" } else { "" };
        let kind = serde_json::Value::from(kind.map(|kind| hidden.censor(kind)));
        format!("{{\"status\":{},\"body\":{body},\"type\":{kind}{mark}}}", self.status.as_u16())
    }

    /// `{"status":200,"body":…}`, with a small JSON body as it is and any other as text.
    fn to_result(&self, hidden: &Hidden) -> String {
        let (body, _) = self.kept_body(hidden, RESULT_JSON_BYTES, RESULT_TEXT_BYTES);
        format!("{{\"status\":{},\"body\":{body}}}", self.status.as_u16())
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
        (serde_json::Value::from(cut(&text, text_bytes)).to_string(), true)
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

/// Who was asked, as errors name it, and how its refusals are taken.
pub(super) struct Destination {
    /// Scheme, host and port. A path or a query may hold a token.
    pub(super) name: String,
    pub(super) on_4xx: OnClientError,
    /// What stands neither in an error nor in a result.
    pub(super) hidden: Hidden,
    /// Whether answers are kept whole.
    pub(super) whole: AtomicBool,
}

impl Destination {
    /// What an answer means. All decisions about a status are here.
    pub(super) fn judge(&self, answer: Answer, now: UnixMicros) -> Result<Option<String>, Failure> {
        let message = || self.describe(&answer);
        let again = || {
            let failure = Failure::retry(Cause::Destination, message()).in_log(logged(&answer));
            match answer.retry_after(now) {
                Some(wait) => failure.after(wait),
                None => failure,
            }
        };
        let refused = || Failure::permanent(Cause::Destination, message()).in_log(logged(&answer)).answered();
        let result = || match &answer.end {
            End::Enough if self.whole.load(Ordering::Relaxed) => Ok(Some(answer.to_whole_result(&self.hidden))),
            End::Enough => Ok(Some(answer.to_result(&self.hidden))),
            End::BrokeOff(why) => {
                let message = format!("{}, but its answer broke off: {why}", message());
                Err(Failure::retry(Cause::Destination, message).in_log("its answer broke off"))
            }
        };
        match answer.status.as_u16() {
            200..=299 => result(),
            300..=399 => {
                let failure = Failure::retry(Cause::Destination, self.describe_redirect(&answer));
                Err(failure.in_log(format!("{}; redirects are not followed", logged(&answer))))
            }
            // Not yet: it works, and wants something else first.
            425 => Err(self.deferred(&answer)),
            _ if answer.headers.contains_key(RETRY_LATER) && !answer.status.is_success() => Err(self.deferred(&answer)),
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

    fn deferred(&self, answer: &Answer) -> Failure {
        Failure::defer(format!("{} says: not yet", self.describe(answer))).in_log(logged(answer))
    }

    /// No answer in time.
    pub(super) fn too_slow(&self, timeout: Duration) -> Failure {
        let logged = format!("no answer within {timeout:?}");
        Failure::retry(Cause::Destination, format!("{} gave {logged}", self.name)).in_log(logged)
    }

    /// No exchange at all, or one that broke off before an answer.
    pub(super) fn unreachable(&self, error: &reqwest::Error) -> Failure {
        let (message, logged) = if let Some(refused) = refused(error) {
            (format!("{} is not asked: {refused}", self.name), "its address is not allowed")
        } else if error.is_connect() {
            (format!("{} cannot be reached: {}", self.name, innermost(error)), "it cannot be reached")
        } else {
            (format!("{} gave no answer: {}", self.name, innermost(error)), "no answer")
        };
        let failure = Failure::retry(Cause::Destination, message);
        match io_kind(error) {
            // Such as "connection refused": words of the standard library.
            Some(kind) => failure.in_log(kind.to_string()),
            None => failure.in_log(logged),
        }
    }

    fn describe(&self, answer: &Answer) -> String {
        let Self { name, hidden, .. } = self;
        let mut text = format!("{name} answered {}", answer.status);
        let said = shown(&hidden.censor(&String::from_utf8_lossy(&answer.body)));
        if !said.is_empty() {
            text.push_str(": ");
            text.push_str(&said);
        }
        text
    }

    fn describe_redirect(&self, answer: &Answer) -> String {
        let location = answer.headers.get(LOCATION).and_then(|value| value.to_str().ok());
        let target = location.and_then(|text| url::Url::parse(&self.name).ok()?.join(text).ok());
        // Only the origin: what follows may be a token.
        let target = match target.map(|url| url.origin()) {
            Some(origin) if origin.is_tuple() => format!(" to {}", shown(&origin.ascii_serialization())),
            _ => String::new(),
        };
        format!("{} answered {} and redirects{target}; redirects are not followed", self.name, answer.status)
    }
}

/// The guard's word, if it was the guard that refused.
fn refused(error: &reqwest::Error) -> Option<&Refused> {
    let mut at: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(error) = at {
        if let Some(refused) = error.downcast_ref() {
            return Some(refused);
        }
        at = error.source();
    }
    None
}

/// An answer in the log: its status without a word of what it said.
fn logged(answer: &Answer) -> String {
    format!("HTTP {}", answer.status.as_u16())
}

/// What the operating system said, if the failure came from there.
fn io_kind(error: &reqwest::Error) -> Option<io::ErrorKind> {
    let causes = std::iter::successors(error.source(), |cause| (**cause).source());
    let kinds = causes.filter_map(|cause| cause.downcast_ref::<io::Error>()).map(io::Error::kind);
    kinds.filter(|kind| *kind != io::ErrorKind::Other).last()
}

/// The innermost reason, such as `Connection refused`; the layers above it repeat the whole URL.
fn innermost(error: &reqwest::Error) -> String {
    let mut at: &dyn Error = error;
    while let Some(inner) = at.source() {
        at = inner;
    }
    // Without a reason inside there is only reqwest's own text, which would name the URL.
    if at.is::<reqwest::Error>() { "the request failed".to_owned() } else { shown(&at.to_string()) }
}

/// One short line without control characters.
fn shown(text: &str) -> String {
    let line = text.split(|c: char| c.is_whitespace() || c.is_control()).filter(|word| !word.is_empty());
    let line = line.collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(ERROR_CHARS) {
        Some((end, _)) => format!("{}…", line.get(..end).unwrap_or_default()),
        None => line,
    }
}

/// At most so many bytes, cut between characters.
fn cut(text: &str, bytes: usize) -> &str {
    if text.len() <= bytes {
        return text;
    }
    let end = (0..=bytes).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
    text.get(..end).unwrap_or_default()
}
