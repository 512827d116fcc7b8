//! `oncehook events`: a page of what the running gateway has received, newest first.

use std::process::ExitCode;

use serde::Deserialize;

use super::client::Client;
use super::filter::Filter;
use super::{Shared, print, say, text};

/// Keys and types are cut here in the table; `show` and `--json` have them whole.
const MAX_SHOWN: usize = 40;

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
    pub(super) state: String,
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

impl Events {
    pub(super) fn run(self, shared: &Shared) -> anyhow::Result<ExitCode> {
        let answer =
            Client::new(shared.load()?)?.get_json("/api/events", &self.params(&self.limit.to_string()))?;
        if shared.json {
            print(answer.text());
            return Ok(ExitCode::SUCCESS);
        }
        let page: Page = answer.read()?;
        if page.events.is_empty() {
            say("no events");
        } else {
            print(&table(&page.events));
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

fn table(events: &[Event]) -> String {
    let header = ["RECEIVED", "ID", "SOURCE", "TYPE", "KEY", "STATUS", "DUPLICATES", "FLAGS"];
    let cell = |text: &str| text::shown(text, MAX_SHOWN);
    let rows = events.iter().map(|event| {
        vec![
            cell(&event.received_at),
            cell(&event.id),
            cell(&event.source),
            cell(event.r#type.as_deref().unwrap_or("-")),
            cell(&event.key),
            cell(&event.status),
            event.duplicates.to_string(),
            cell(&event.flags.join(",")),
        ]
    });
    text::table(&header, rows)
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
        let table = table(&page.events);
        assert_eq!(table.lines().count(), 2, "{table}");
        assert!(table.contains("a\\u{1b}[31m\\u{a}b") && table.ends_with("3           conflict"), "{table}");
    }
}
