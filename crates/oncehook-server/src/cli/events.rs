//! `oncehook events`: a page of what the running gateway has received, newest first.

use std::collections::{BTreeMap, HashSet};
use std::process::ExitCode;

use serde::Deserialize;

use super::client::Client;
use super::filter::Filter;
use super::text::Colours;
use super::{Shared, print, print_json, say, text};

/// Longer text than a line can have. The table is cut to the terminal's width; `show` and `--json` have everything whole.
const MAX_SHOWN: usize = 200;

/// How much of an id is shown: its time, its time and most of its number, its time and its number, all of it. The first
/// that tells all events of a list apart.
const ID_LENGTHS: [usize; 4] = [13, 18, 21, 36];

#[derive(Debug, clap::Args)]
pub(super) struct Events {
    #[command(flatten)]
    filter: Filter,
    /// At most this many
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u16).range(1..=1000))]
    limit: u16,
    /// Go on where the page before ended
    #[arg(long)]
    cursor: Option<String>,
}

/// A page, as the API gives it.
#[derive(Deserialize)]
pub(super) struct Page {
    pub(super) events: Vec<Event>,
    pub(super) next: Option<String>,
}

/// An event, as the API gives it.
#[derive(Deserialize)]
pub(super) struct Event {
    pub(super) id: String,
    pub(super) source: String,
    pub(super) key: String,
    pub(super) r#type: Option<String>,
    pub(super) entity: Option<String>,
    pub(super) status: String,
    pub(super) flags: Vec<String>,
    /// Why it has these flags. A gateway of an earlier release does not say.
    #[serde(default)]
    pub(super) reasons: BTreeMap<String, String>,
    /// Whether a pause holds a delivery of it.
    #[serde(default)]
    paused: bool,
    pub(super) integrity: String,
    pub(super) occurred_at: Option<String>,
    pub(super) received_at: String,
    pub(super) size: u64,
    pub(super) duplicates: u64,
    pub(super) deliveries: Vec<Delivery>,
}

/// A delivery, as the API gives it.
#[derive(Deserialize)]
pub(super) struct Delivery {
    pub(super) route: String,
    pub(super) epoch: u32,
    state: String,
    /// Whether a pause holds it.
    #[serde(default)]
    paused: bool,
    pub(super) attempt: u32,
    pub(super) run_at: Option<String>,
    pub(super) result: Option<serde_json::Value>,
    pub(super) error: Option<String>,
    pub(super) cause: Option<String>,
    pub(super) settled_at: Option<String>,
    /// Only where one event is shown.
    #[serde(default)]
    pub(super) attempts: Vec<Attempt>,
}

/// One try, as the API gives it.
#[derive(Deserialize)]
pub(super) struct Attempt {
    pub(super) attempt: u32,
    pub(super) started_at: String,
    pub(super) outcome: Option<String>,
    pub(super) error: Option<String>,
}

impl Event {
    /// Its status as it is printed: what a pause holds is paused, not about to run.
    pub(super) fn shown_status(&self) -> &str {
        shown(&self.status, self.paused)
    }
}

impl Delivery {
    /// Its state as it is printed, likewise.
    pub(super) fn shown_state(&self) -> &str {
        shown(&self.state, self.paused)
    }
}

fn shown(word: &str, paused: bool) -> &str {
    if paused && matches!(word, "ready" | "retrying") { "paused" } else { word }
}

impl Events {
    pub(super) fn run(self, shared: &Shared) -> anyhow::Result<ExitCode> {
        let client = Client::new(shared.load()?)?;
        self.filter.check(&client)?;
        let answer = client.get_json("/api/events", &self.params(&self.limit.to_string()))?;
        if shared.json {
            print_json(answer.text());
            return Ok(ExitCode::SUCCESS);
        }
        let page: Page = answer.read()?;
        if page.events.is_empty() {
            say("no events");
        } else {
            print(&table(&page.events, Colours::of_stdout()));
        }
        if let Some(next) = &page.next {
            say(&format!("there are more: add --cursor {}", text::shown(next, 200)));
        }
        Ok(ExitCode::SUCCESS)
    }

    fn params<'a>(&'a self, limit: &'a str) -> Vec<(&'static str, Option<&'a str>)> {
        let mut params = self.filter.conditions().to_vec();
        params.extend([("limit", Some(limit)), ("cursor", self.cursor.as_deref())]);
        params
    }
}

fn table(events: &[Event], colours: Colours) -> String {
    let header = ["RECEIVED", "ID", "STATUS", "SOURCE", "TYPE", "KEY", "NOTES"];
    let apart = |length: &&usize| {
        let mut ids = HashSet::new();
        events.iter().all(|event| ids.insert(short_id(&event.id, **length)))
    };
    let length = ID_LENGTHS.iter().find(apart).copied().unwrap_or(36);
    let rows = events.iter().map(|event| cells(event, length));
    text::narrow_table(&header, rows, &[3, 4, 5, 6], (2, colours))
}

/// The beginning of an id. Commands that take an id take this too.
pub(super) fn short_id(id: &str, length: usize) -> String {
    text::shown(id.get(..length).unwrap_or(id), MAX_SHOWN)
}

/// An event in one line: when, which, how it stands, from where, what, its key, and what is special about it.
pub(super) fn cells(event: &Event, id_length: usize) -> Vec<String> {
    let cell = |text: &str| text::shown(text, MAX_SHOWN);
    vec![
        text::local_time(&event.received_at),
        short_id(&event.id, id_length),
        cell(event.shown_status()),
        cell(&event.source),
        cell(event.r#type.as_deref().unwrap_or("-")),
        cell(&event.key),
        notes(event),
    ]
}

/// How often it came, and its flags.
fn notes(event: &Event) -> String {
    let copies = (event.duplicates > 0).then(|| format!("×{}", event.duplicates.saturating_add(1)));
    let flags = event.flags.iter().map(|flag| format!("[{}]", text::shown(flag, MAX_SHOWN)));
    copies.into_iter().chain(flags).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strangers_cannot_draw_in_the_table() {
        let json = r#"{"events":[{"id":"019a","source":"s","key":"a\u001b[31m\nb","type":null,"entity":null,"status":"unrouted",
            "flags":["conflict"],"integrity":"body","occurred_at":null,"received_at":"2026-11-15T02:20:17.123456Z","size":2,
            "duplicates":3,"deliveries":[]}],"next":null}"#;
        let page: Page = serde_json::from_str(json).unwrap();
        let table = table(&page.events, Colours::none());
        assert_eq!(table.lines().count(), 2, "{table}");
        assert!(table.contains("a\\u{1b}[31m\\u{a}b") && table.ends_with("×4 [conflict]"), "{table}");
    }
}
