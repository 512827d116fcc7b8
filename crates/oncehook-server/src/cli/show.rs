//! `oncehook show`: one event of the running gateway with its whole story, or just its body.

use std::process::ExitCode;

use anyhow::anyhow;
use oncehook::event::EventId;
use serde::Deserialize;

use super::client::Client;
use super::events::{Attempt, Delivery, Event};
use super::{Shared, print, text};

/// Foreign text is cut here; `--json` has it whole.
const MAX_SHOWN: usize = 400;

#[derive(Debug, clap::Args)]
pub(super) struct Show {
    /// The event's id
    id: String,
    /// Print the body, byte for byte, and nothing else
    #[arg(long, conflicts_with = "json")]
    body: bool,
}

/// An event with its story, as the API gives it.
#[derive(Deserialize)]
struct Story {
    #[serde(flatten)]
    event: Event,
    digest: String,
    headers: Vec<(String, String)>,
    duplicates_seen: Option<Duplicates>,
    conflicts: Vec<Conflict>,
    audit: Vec<Audit>,
}

/// An order, as the API gives it.
#[derive(Deserialize)]
struct Audit {
    at: String,
    who: String,
    action: String,
    reason: Option<String>,
}

#[derive(Deserialize)]
struct Duplicates {
    first_at: String,
    last_at: String,
    latest: Vec<Duplicate>,
}

#[derive(Deserialize)]
struct Duplicate {
    at: String,
    peer: String,
}

#[derive(Deserialize)]
struct Conflict {
    /// Nothing for the sum of the bodies that were not kept.
    digest: Option<String>,
    count: u64,
    first_at: String,
    last_at: String,
    size: u64,
}

impl Show {
    pub(super) fn run(self, shared: &Shared) -> anyhow::Result<ExitCode> {
        let id: EventId =
            self.id.parse().map_err(|_| anyhow!("`{}` is not an event's id", text::shown(&self.id, 64)))?;
        let client = Client::new(shared.load()?)?;
        if self.body {
            write_bytes(&client.get(&format!("/api/events/{id}/body"), &[])?);
            return Ok(ExitCode::SUCCESS);
        }
        let answer = client.get_json(&format!("/api/events/{id}"), &[])?;
        if shared.json {
            print(answer.text());
        } else {
            print(&answer.read::<Story>()?.lines().join("\n"));
        }
        Ok(ExitCode::SUCCESS)
    }
}

impl Story {
    fn lines(&self) -> Vec<String> {
        let event = &self.event;
        let mut lines = vec![
            fact("event", &event.id),
            fact("source", &event.source),
            fact("key", &event.key),
            fact("type", event.r#type.as_deref().unwrap_or("-")),
            fact("entity", event.entity.as_deref().unwrap_or("-")),
            fact("status", &event.status),
            fact("flags", &if event.flags.is_empty() { "none".to_owned() } else { event.flags.join(", ") }),
            fact("integrity", &event.integrity),
            fact("occurred", event.occurred_at.as_deref().unwrap_or("-")),
            fact("received", &event.received_at),
            fact("size", &format!("{} bytes", event.size)),
            fact("digest", &self.digest),
        ];
        self.tell_duplicates(&mut lines);
        list(&mut lines, "conflicts", self.conflicts.iter().map(Conflict::line));
        tell_deliveries(&mut lines, &event.deliveries);
        list(&mut lines, "audit", self.audit.iter().map(Audit::line));
        list(&mut lines, "headers", self.headers.iter().map(|(name, value)| format!("{name}: {value}")));
        lines
    }

    fn tell_duplicates(&self, lines: &mut Vec<String>) {
        match &self.duplicates_seen {
            // The count may be ahead of the details, which are written in batches.
            None => lines.push(fact("duplicates", &self.event.duplicates.to_string())),
            Some(seen) => {
                let count = self.event.duplicates;
                lines.push(fact(
                    "duplicates",
                    &format!("{count}, first {}, last {}", seen.first_at, seen.last_at),
                ));
                lines.extend(seen.latest.iter().map(|copy| item(&format!("{} from {}", copy.at, copy.peer))));
            }
        }
    }
}

impl Conflict {
    fn line(&self) -> String {
        let Self { count, first_at, last_at, size, .. } = self;
        let times = if *count == 1 { "once".to_owned() } else { format!("{count} times") };
        match &self.digest {
            Some(digest) => format!("{digest} {times}, {size} bytes, first {first_at}, last {last_at}"),
            None => format!("other bodies, not kept, {times}, first {first_at}, last {last_at}"),
        }
    }
}

/// Each delivery with its tries below it.
fn tell_deliveries(lines: &mut Vec<String>, deliveries: &[Delivery]) {
    if deliveries.is_empty() {
        lines.push(fact("deliveries", "none"));
        return;
    }
    lines.push("deliveries".to_owned());
    for delivery in deliveries {
        lines.push(item(&delivery_line(delivery)));
        lines.extend(delivery.attempts.iter().map(|attempt| format!("  {}", item(&attempt_line(attempt)))));
    }
}

fn delivery_line(delivery: &Delivery) -> String {
    let Delivery { route, epoch, state, attempt, .. } = delivery;
    let mut line = format!("{route}: {state}, attempt {attempt}, epoch {epoch}");
    let result = delivery.result.as_ref().map(ToString::to_string);
    // What is final is not due any more.
    let due = delivery.run_at.as_ref().filter(|_| delivery.settled_at.is_none());
    for (name, value) in [
        ("since", delivery.settled_at.as_ref()),
        ("next", due),
        ("result", result.as_ref()),
        ("cause", delivery.cause.as_ref()),
        ("error", delivery.error.as_ref()),
    ] {
        if let Some(value) = value {
            line.push_str(&format!(", {name} {value}"));
        }
    }
    line
}

fn attempt_line(attempt: &Attempt) -> String {
    let outcome = attempt.outcome.as_deref().unwrap_or("running");
    let mut line = format!("{} {outcome} {}", attempt.attempt, attempt.started_at);
    if let Some(error) = &attempt.error {
        line.push_str(&format!(": {error}"));
    }
    line
}

impl Audit {
    fn line(&self) -> String {
        let mut line = format!("{} {} by {}", self.at, self.action, self.who);
        if let Some(reason) = &self.reason {
            line.push_str(&format!(": {reason}"));
        }
        line
    }
}

/// A named fact. Everything that is printed goes through here or [`item`], and so is harmless to a terminal.
fn fact(name: &str, value: &str) -> String {
    format!("{name:<11} {}", text::shown(value, MAX_SHOWN))
}

fn item(value: &str) -> String {
    format!("  {}", text::shown(value, MAX_SHOWN))
}

fn list(lines: &mut Vec<String>, name: &str, items: impl ExactSizeIterator<Item = String>) {
    if items.len() == 0 {
        lines.push(fact(name, "none"));
    } else {
        lines.push(name.to_owned());
        lines.extend(items.map(|text| item(&text)));
    }
}

/// A body is not text: no line ending is added and nothing is escaped. It was asked for byte for byte.
fn write_bytes(bytes: &[u8]) {
    use std::io::Write as _;
    let mut stdout = std::io::stdout().lock();
    // Whoever read us has seen enough.
    let _ = stdout.write_all(bytes).and_then(|()| stdout.flush());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_whole_story_is_told_and_is_harmless() {
        let json = r#"{"id":"019a","source":"stripe","key":"evt_\u001b]0;x\u0007","type":"a.b","entity":null,"status":"unrouted",
            "flags":["conflict"],"integrity":"body","occurred_at":null,"received_at":"2026-11-15T02:20:17.123456Z","size":9,
            "duplicates":2,"deliveries":[{"route":"orders","epoch":0,"state":"dead","attempt":8,"run_at":"T","result":null,
            "error":"no\u202e","cause":"handler","settled_at":"S","attempts":[
              {"attempt":7,"started_at":"B","finished_at":"E","outcome":"failed","error":"bad\u0007"},
              {"attempt":8,"started_at":"C","finished_at":null,"outcome":null,"error":null}]}],
            "audit":[{"at":"A","who":"ada","action":"retry","reason":"fixed\u001b","detail":{"routes":["orders"]}}],"digest":"abc","headers":[["x-a","1\u001b"]],
            "duplicates_seen":{"first_at":"F","last_at":"L","latest":[{"at":"A","peer":"127.0.0.1"}]},
            "conflicts":[{"digest":"d1","count":1,"first_at":"F","last_at":"L","size":7},
                         {"digest":null,"count":5,"first_at":"F","last_at":"L","size":0}]}"#;
        let story: Story = serde_json::from_str(json).unwrap();
        let text = story.lines().join("\n");
        for line in [
            "key         evt_\\u{1b}]0;x\\u{7}",
            "entity      -",
            "size        9 bytes",
            "duplicates  2, first F, last L\n  A from 127.0.0.1",
            "conflicts\n  d1 once, 7 bytes, first F, last L\n  other bodies, not kept, 5 times, first F, last L",
            "deliveries\n  orders: dead, attempt 8, epoch 0, since S, cause handler, error no\\u{202e}\n    7 failed B: bad\\u{7}\n    8 running C\n",
            "audit\n  A retry by ada: fixed\\u{1b}",
            "headers\n  x-a: 1\\u{1b}",
        ] {
            assert!(text.contains(line), "{line:?} is not in:\n{text}");
        }
        assert!(!text.contains('\u{1b}') && !text.contains('\u{202e}'));
    }
}
