//! What came back from `oncehook send`: counts, event ids and times, as text and as JSON.
//!
//! Promises: every request is counted exactly once, as an answer or as an error. What an answer's body may add is bounded,
//! because it comes from whoever answered.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use http::{HeaderMap, StatusCode};
use serde::Deserialize;
use serde_json::json;

use super::client::ErrorBody;
use super::text;

/// How many ids are listed.
const MAX_LISTED: usize = 10;

/// How many different words are counted; a gateway has four.
const MAX_WORDS: usize = 32;

/// The longest id or word that is looked at.
const MAX_WORD_BYTES: usize = 64;

/// One answer.
pub(super) struct Answer {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    pub(super) body: Vec<u8>,
}

/// All answers so far.
#[derive(Default)]
pub(super) struct Tally {
    requests: u64,
    answers: u64,
    statuses: BTreeMap<u16, u64>,
    verdicts: BTreeMap<String, u64>,
    /// The codes of refusals, with the sentence of the first of each.
    refusals: BTreeMap<String, (u64, String)>,
    listed: Vec<String>,
    events: HashSet<String>,
    errors: u64,
    first_error: Option<String>,
    /// Of the answered ones, in microseconds.
    latencies: Vec<u32>,
}

/// What the gateway did with one event.
#[derive(Debug, PartialEq, Eq, Deserialize)]
struct Verdict {
    status: String,
    event: String,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum AnswerBody {
    Batch { events: Vec<Verdict> },
    One(Verdict),
}

impl Answer {
    /// From our own body, or from the headers that stand beside a body which a provider insists on.
    fn verdicts(&self) -> Vec<Verdict> {
        match serde_json::from_slice(&self.body) {
            Ok(AnswerBody::Batch { events }) => events,
            Ok(AnswerBody::One(verdict)) => vec![verdict],
            Err(_) => self.header_verdict().into_iter().collect(),
        }
    }

    fn header_verdict(&self) -> Option<Verdict> {
        let text = |name: &str| Some(self.headers.get(name)?.to_str().ok()?.to_owned());
        Some(Verdict { status: text("oncehook-status")?, event: text("oncehook-event")? })
    }

    /// Status and body; where there is no body, what the gateway said in headers.
    pub(super) fn lines(&self) -> String {
        let mut lines = vec![self.status.to_string()];
        if let Some(verdict) = self.header_verdict() {
            lines.push(format!(
                "{} {}",
                text::shown(&verdict.status, MAX_WORD_BYTES),
                text::shown(&verdict.event, MAX_WORD_BYTES)
            ));
        }
        let body = text::shown_lines(&String::from_utf8_lossy(&self.body), 4_000);
        if !body.is_empty() {
            lines.push(body);
        }
        lines.join("\n")
    }
}

impl Tally {
    /// Counts an answer.
    pub(super) fn answer(&mut self, answer: &Answer, took: Duration) {
        self.requests += 1;
        self.answers += 1;
        *self.statuses.entry(answer.status.as_u16()).or_default() += 1;
        self.latencies.push(u32::try_from(took.as_micros()).unwrap_or(u32::MAX));
        for Verdict { status, event } in answer.verdicts() {
            self.count_verdict(status);
            self.note_event(event);
        }
        if !answer.status.is_success()
            && let Ok(ErrorBody { error }) = serde_json::from_slice(&answer.body)
            && (self.refusals.len() < MAX_WORDS || self.refusals.contains_key(&error.code))
        {
            self.refusals.entry(error.code).or_insert((0, error.message)).0 += 1;
        }
    }

    /// Counts a request that got no answer.
    pub(super) fn error(&mut self, cause: String) {
        self.requests += 1;
        self.errors += 1;
        self.first_error.get_or_insert(cause);
    }

    /// Has anybody answered yet?
    pub(super) fn has_answers(&self) -> bool {
        self.answers > 0
    }

    /// Did all of this many requests get a 2xx?
    pub(super) fn is_success(&self, requests: u64) -> bool {
        self.requests == requests && self.errors == 0 && self.statuses.keys().all(|status| (200..300).contains(status))
    }

    fn count_verdict(&mut self, word: String) {
        let fits = word.len() <= MAX_WORD_BYTES;
        if fits && (self.verdicts.len() < MAX_WORDS || self.verdicts.contains_key(&word)) {
            *self.verdicts.entry(word).or_default() += 1;
        }
    }

    fn note_event(&mut self, id: String) {
        if id.len() > MAX_WORD_BYTES || self.events.contains(&id) {
            return;
        }
        if self.listed.len() < MAX_LISTED {
            self.listed.push(id.clone());
        }
        self.events.insert(id);
    }

    /// Milliseconds within which this share of the answers came.
    fn percentile_ms(&mut self, percent: usize) -> Option<f64> {
        self.latencies.sort_unstable();
        percentile(&self.latencies, percent).map(|micros| f64::from(micros) / 1_000.0)
    }

    /// The one object of `--json`.
    pub(super) fn json(&mut self, elapsed: Duration) -> serde_json::Value {
        let (p50, p99) = (self.percentile_ms(50), self.percentile_ms(99));
        let statuses: BTreeMap<_, _> =
            self.statuses.iter().map(|(status, count)| (status.to_string(), count)).collect();
        json!({
            "requests": self.requests,
            "statuses": statuses,
            "verdicts": self.verdicts,
            "events": self.listed,
            "distinct_events": self.events.len(),
            "errors": self.errors,
            "elapsed_seconds": elapsed.as_secs_f64(),
            "p50_ms": p50,
            "p99_ms": p99,
        })
    }

    /// The same for people.
    pub(super) fn lines(&mut self, elapsed: Duration) -> String {
        let ms = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |ms| format!("{ms:.1} ms"));
        let (p50, p99) = (ms(self.percentile_ms(50)), ms(self.percentile_ms(99)));
        let seconds = elapsed.as_secs_f64();
        let rate = self.answers as f64 / seconds.max(1e-6);
        let mut lines =
            vec![format!("{} requests in {seconds:.2} s, {rate:.0} answers/s, p50 {p50}, p99 {p99}", self.requests)];
        let mut fact = |name: &str, value: String| lines.push(format!("  {name:<10} {value}"));
        fact("status", counts(&self.statuses));
        if !self.verdicts.is_empty() {
            fact("verdict", counts(&self.verdicts));
        }
        if !self.events.is_empty() {
            let listed: Vec<_> = self.listed.iter().map(|id| text::shown(id, MAX_WORD_BYTES)).collect();
            let more = if self.events.len() > listed.len() { ", …" } else { "" };
            fact("events", format!("{} distinct: {}{more}", self.events.len(), listed.join(", ")));
        }
        for (code, (count, message)) in &self.refusals {
            fact("refused", format!("{count} × {}: {}", text::shown(code, MAX_WORD_BYTES), text::shown(message, 200)));
        }
        if let Some(error) = &self.first_error {
            fact("no answer", format!("{} ×; the first: {error}", self.errors));
        }
        lines.join("\n")
    }
}

/// `accepted × 1, duplicate × 99`
fn counts<K: ToString>(counts: &BTreeMap<K, u64>) -> String {
    let words =
        counts.iter().map(|(word, count)| format!("{} × {count}", text::shown(&word.to_string(), MAX_WORD_BYTES)));
    let words: Vec<_> = words.collect();
    if words.is_empty() { "none".to_owned() } else { words.join(", ") }
}

/// The smallest value that is not below this share of the sorted values (nearest rank).
fn percentile(sorted: &[u32], percent: usize) -> Option<u32> {
    let rank = (sorted.len() * percent).div_ceil(100);
    sorted.get(rank.saturating_sub(1)).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(status: u16, body: &str) -> Answer {
        let status = StatusCode::from_u16(status).unwrap();
        Answer { status, headers: HeaderMap::new(), body: body.as_bytes().to_vec() }
    }

    #[test]
    fn percentiles_by_nearest_rank() {
        let hundred: Vec<u32> = (1..=100).collect();
        for (sorted, percent, expected) in [
            (hundred.as_slice(), 50, Some(50)),
            (&hundred, 99, Some(99)),
            (&hundred, 100, Some(100)),
            (&hundred, 0, Some(1)),
            (&[7], 99, Some(7)),
            (&[1, 2], 50, Some(1)),
            (&[1, 2, 3], 50, Some(2)),
            (&[], 50, None),
        ] {
            assert_eq!(percentile(sorted, percent), expected, "{percent} of {} values", sorted.len());
        }
    }

    #[test]
    fn every_request_is_counted_once() {
        let mut tally = Tally::default();
        let took = Duration::from_millis(2);
        assert!(!tally.has_answers());
        tally.answer(&answer(200, r#"{"status":"accepted","event":"e1"}"#), took);
        tally.answer(&answer(200, r#"{"status":"duplicate","event":"e1"}"#), took);
        tally.answer(
            &answer(200, r#"{"events":[{"status":"accepted","event":"e2"},{"status":"duplicate","event":"e1"}]}"#),
            took,
        );
        assert!(tally.is_success(3) && !tally.is_success(4));
        tally.answer(&answer(401, r#"{"error":{"code":"signature","message":"no\u001b"}}"#), took);
        tally.error("refused".to_owned());
        assert!(!tally.is_success(5));
        let json = tally.json(Duration::from_secs(1));
        assert_eq!(
            json,
            json!({ "requests": 5, "statuses": { "200": 3, "401": 1 }, "verdicts": { "accepted": 2, "duplicate": 2 },
                "events": ["e1", "e2"], "distinct_events": 2, "errors": 1, "elapsed_seconds": 1.0, "p50_ms": 2.0, "p99_ms": 2.0 })
        );
        assert_eq!(
            tally.lines(Duration::from_secs(1)),
            "5 requests in 1.00 s, 4 answers/s, p50 2.0 ms, p99 2.0 ms\n  \
             status     200 × 3, 401 × 1\n  \
             verdict    accepted × 2, duplicate × 2\n  \
             events     2 distinct: e1, e2\n  \
             refused    1 × signature: no\\u{1b}\n  \
             no answer  1 ×; the first: refused"
        );
    }

    #[test]
    fn a_verdict_may_stand_in_headers() {
        let mut answer = answer(204, "");
        answer.headers.insert("oncehook-status", "accepted".parse().unwrap());
        answer.headers.insert("oncehook-event", "e1".parse().unwrap());
        assert_eq!(answer.verdicts(), [Verdict { status: "accepted".to_owned(), event: "e1".to_owned() }]);
        assert_eq!(answer.lines(), "204 No Content\naccepted e1");
    }

    #[test]
    fn foreign_answers_cannot_fill_the_memory() {
        let mut tally = Tally::default();
        for number in 0..100 {
            let body = format!(r#"{{"status":"word{number}","event":"{}"}}"#, "x".repeat(65));
            tally.answer(&answer(200, &body), Duration::ZERO);
        }
        assert_eq!((tally.verdicts.len(), tally.events.len()), (MAX_WORDS, 0));
    }
}
