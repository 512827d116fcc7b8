//! `oncehook show`: one event of the running gateway with its whole story, or just its body.

use std::process::ExitCode;

use anyhow::bail;
use serde::Deserialize;

use super::client::Client;
use super::events::{Attempt, Delivery, Event, Page};
use super::order::event_id;
use super::text::Colours;
use super::{Shared, print, print_json, text};

/// Foreign text is cut here; `--json` has it whole.
const MAX_SHOWN: usize = 400;

#[derive(Debug, clap::Args)]
pub(super) struct Show {
    /// The event's id, or the beginning of it
    #[arg(required_unless_present = "key", conflicts_with = "key")]
    id: Option<String>,
    /// The event with this key instead
    #[arg(long)]
    key: Option<String>,
    /// With --key: of this source
    #[arg(long, value_name = "NAME", requires = "key")]
    source: Option<String>,
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
    audit_total: usize,
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
        // A word that is no id needs no configuration to be told so.
        let given = self.id.as_deref().map(event_id).transpose()?;
        let client = Client::new(shared.load()?)?;
        let id = match given {
            Some(id) => id.to_owned(),
            None => self.find_by_key(&client)?,
        };
        if self.body {
            write_bytes(&client.get(&format!("/api/events/{id}/body"), &[])?);
            return Ok(ExitCode::SUCCESS);
        }
        let answer = client.get_json(&format!("/api/events/{id}"), &[])?;
        if shared.json {
            print_json(answer.text());
        } else {
            let routes: Routes = client.get_json("/api/routes", &[])?.read()?;
            print(&answer.read::<Story>()?.lines(&routes, Colours::of_stdout()).join("\n"));
        }
        Ok(ExitCode::SUCCESS)
    }

    /// The id of the one event with the key.
    fn find_by_key(&self, client: &Client) -> anyhow::Result<String> {
        let key = self.key.as_deref().unwrap_or_default();
        if let Some(source) = &self.source {
            client.check_source(source)?;
        }
        let params = [("key", Some(key)), ("source", self.source.as_deref()), ("limit", Some("10"))];
        let page: Page = client.get_json("/api/events", &params)?.read()?;
        match page.events.as_slice() {
            [only] => Ok(event_id(&only.id)?.to_owned()),
            [] => bail!("there is no event with the key `{}`", text::shown(key, 255)),
            several => {
                let sources: Vec<_> = several.iter().map(|event| text::shown(&event.source, 64)).collect();
                bail!("several sources have this key; add --source with one of: {}", sources.join(", "))
            }
        }
    }
}

/// The routes, as the API gives them.
#[derive(Deserialize)]
struct Routes {
    routes: Vec<Route>,
}

#[derive(Deserialize)]
struct Route {
    name: String,
    after: Option<String>,
}

impl Routes {
    /// The route that a route follows.
    fn before(&self, name: &str) -> Option<&str> {
        self.routes.iter().find(|route| route.name == name)?.after.as_deref()
    }
}

impl Story {
    fn lines(&self, routes: &Routes, colours: Colours) -> Vec<String> {
        let event = &self.event;
        let mut lines = vec![
            fact("event", &event.id),
            fact("source", &event.source),
            fact("key", &event.key),
            fact("type", event.r#type.as_deref().unwrap_or("-")),
            fact("entity", event.entity.as_deref().unwrap_or("-")),
            fact("status", "") + &colours.status(event.shown_status(), &text::shown(event.shown_status(), MAX_SHOWN)),
            fact("flags", &if event.flags.is_empty() { "none".to_owned() } else { event.flags.join(", ") }),
            fact("integrity", &event.integrity),
            fact("occurred", event.occurred_at.as_deref().unwrap_or("-")),
            fact("received", &event.received_at),
            fact("size", &format!("{} bytes", event.size)),
            fact("digest", &self.digest),
        ];
        if !event.reasons.is_empty() {
            list(&mut lines, "reasons", event.reasons.iter().map(|(flag, reason)| format!("{flag}: {reason}")));
        }
        self.tell_duplicates(&mut lines);
        list(&mut lines, "conflicts", self.conflicts.iter().map(Conflict::line));
        tell_deliveries(&mut lines, &event.deliveries, routes, colours);
        let orders = match self.audit.len() {
            shown if shown < self.audit_total => {
                format!("audit (the latest {shown} of {})", self.audit_total)
            }
            _ => "audit".to_owned(),
        };
        list(&mut lines, &orders, self.audit.iter().map(Audit::line));
        list(&mut lines, "headers", self.headers.iter().map(|(name, value)| format!("{name}: {value}")));
        lines
    }

    fn tell_duplicates(&self, lines: &mut Vec<String>) {
        match &self.duplicates_seen {
            // The count may be ahead of the details, which are written in batches.
            None => lines.push(fact("duplicates", &self.event.duplicates.to_string())),
            Some(seen) => {
                let count = self.event.duplicates;
                lines.push(fact("duplicates", &format!("{count}, first {}, last {}", seen.first_at, seen.last_at)));
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

/// Each delivery with its tries below it, and below those what followed it.
fn tell_deliveries(lines: &mut Vec<String>, deliveries: &[Delivery], routes: &Routes, colours: Colours) {
    if deliveries.is_empty() {
        lines.push(fact("deliveries", "none"));
        return;
    }
    lines.push("deliveries".to_owned());
    let follows = |follower: &Delivery, delivery: &Delivery| {
        follower.epoch == delivery.epoch && routes.before(&follower.route) == Some(delivery.route.as_str())
    };
    // What comes first stands first; a circle is impossible, and would show nothing rather than hang.
    let mut next: Vec<(&Delivery, usize)> = deliveries
        .iter()
        .rev()
        .filter(|delivery| !deliveries.iter().any(|other| follows(delivery, other)))
        .map(|delivery| (delivery, 0))
        .collect();
    while let Some((delivery, depth)) = next.pop() {
        let indent = "  ".repeat(depth);
        lines.push(format!("{indent}  {}", delivery_line(delivery, colours)));
        let attempts = delivery.attempts.iter().map(|attempt| item(&attempt_line(attempt)));
        lines.extend(attempts.map(|line| format!("{indent}  {line}")));
        let followers = deliveries.iter().rev().filter(|follower| follows(follower, delivery));
        next.extend(followers.map(|follower| (follower, depth + 1)));
    }
}

/// Its state is coloured; everything else is cut and harmless.
fn delivery_line(delivery: &Delivery, colours: Colours) -> String {
    let Delivery { route, epoch, attempt, .. } = delivery;
    let state = colours.status(delivery.shown_state(), &text::shown(delivery.shown_state(), 20));
    let mut more = format!(", attempt {attempt}, epoch {epoch}");
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
            more.push_str(&format!(", {name} {value}"));
        }
    }
    format!("{}: {state}{}", text::shown(route, 64), text::shown(&more, MAX_SHOWN))
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
            "audit":[{"at":"A","who":"ada","action":"retry","reason":"fixed\u001b","detail":{"routes":["orders"]}}],"audit_total":51,"digest":"abc","headers":[["x-a","1\u001b"]],
            "duplicates_seen":{"first_at":"F","last_at":"L","latest":[{"at":"A","peer":"127.0.0.1"}]},
            "conflicts":[{"digest":"d1","count":1,"first_at":"F","last_at":"L","size":7},
                         {"digest":null,"count":5,"first_at":"F","last_at":"L","size":0}]}"#;
        let story: Story = serde_json::from_str(json).unwrap();
        let text = story.lines(&Routes { routes: Vec::new() }, Colours::none()).join("\n");
        for line in [
            "key         evt_\\u{1b}]0;x\\u{7}",
            "entity      -",
            "size        9 bytes",
            "duplicates  2, first F, last L\n  A from 127.0.0.1",
            "conflicts\n  d1 once, 7 bytes, first F, last L\n  other bodies, not kept, 5 times, first F, last L",
            "deliveries\n  orders: dead, attempt 8, epoch 0, since S, cause handler, error no\\u{202e}\n    7 failed B: bad\\u{7}\n    8 running C\n",
            "audit (the latest 1 of 51)\n  A retry by ada: fixed\\u{1b}",
            "headers\n  x-a: 1\\u{1b}",
        ] {
            assert!(text.contains(line), "{line:?} is not in:\n{text}");
        }
        assert!(!text.contains('\u{1b}') && !text.contains('\u{202e}'));
    }
}
