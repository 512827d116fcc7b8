//! `oncehook tail`: events of the running gateway as they come in, one line each, and one more for what failed.
//!
//! Promises: no event is printed twice and none that arrives while it runs is left out, in the order of arrival; a gateway
//! that is restarted is waited for. If more than 100,000 came between two looks, the latest of them are printed, and that is
//! said. With `--status` an event is printed when it gets there, if it is among the latest 1,000
//! that are there.
//!
//! Does not: show an event again when its status changes later, unless `--changes` asks for it (then for the latest 1,000).

use std::collections::{HashMap, VecDeque};
use std::io::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use serde::Deserialize;
use serde_json::value::RawValue;

use super::client::{Client, may_pass};
use super::events::{Event, cells};
use super::filter::statuses;
use super::text::Colours;
use super::{Shared, say, text};

/// How often the gateway is asked.
const ASK_EVERY: Duration = Duration::from_millis(300);

/// How often while it does not answer.
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// Events in one answer.
const PAGE: usize = 1_000;

/// Events that are remembered as printed, so that one that changes is recognised.
const REMEMBERED: usize = 100_000;

/// Answers that are fetched to find one that is known. Where none is, this is the end.
const MOST_PAGES: usize = REMEMBERED / PAGE;

/// How much of an id is shown: its time and its number, which tell events of one node apart.
const ID_LENGTH: usize = 21;

/// The longest of the usual statuses, so that what follows stands in one column.
const STATUS_WIDTH: usize = 11;

#[derive(Debug, clap::Args)]
pub(super) struct Tail {
    /// Begin with the latest so many
    #[arg(short = 'n', long = "lines", default_value_t = 10, value_name = "N",
          value_parser = clap::value_parser!(u16).range(0..=1000))]
    lines: u16,
    /// Only events of this source
    #[arg(long, value_name = "NAME")]
    source: Option<String>,
    /// Only events of exactly this type
    #[arg(long = "type", value_name = "TYPE")]
    kind: Option<String>,
    /// Only events that are in this status, or get into it
    #[arg(long, value_parser = statuses())]
    status: Option<String>,
    /// Print an event again when its status changes
    #[arg(long)]
    changes: bool,
}

/// A page with its events as they were written, so that `--json` passes them on untouched.
#[derive(Deserialize)]
struct Page {
    events: Vec<Box<RawValue>>,
    next: Option<String>,
}

/// An event and its text.
struct Line {
    event: Event,
    json: Box<RawValue>,
}

/// What was printed.
#[derive(Default)]
struct Seen {
    statuses: HashMap<String, String>,
    order: VecDeque<String>,
    /// Nothing at or below this id is new.
    floor: Option<String>,
}

impl Tail {
    pub(super) fn run(self, shared: &Shared) -> anyhow::Result<ExitCode> {
        let client = Client::new(shared.load()?)?;
        if let Some(source) = &self.source {
            client.check_source(source)?;
        }
        let mut seen = Seen::default();
        // Nobody there at the beginning is a mistake; nobody there later is a restart.
        let latest = self.fetch(&client, 1, &seen)?.lines;
        seen.start(&latest);
        let skipped = latest.len().saturating_sub(usize::from(self.lines));
        if !write_lines(latest.iter().skip(skipped), shared.json) {
            return Ok(ExitCode::SUCCESS);
        }
        let mut away = false;
        loop {
            if client.wait(if away { ASK_AGAIN } else { ASK_EVERY }) {
                return Ok(ExitCode::SUCCESS);
            }
            match self.fetch(&client, MOST_PAGES, &seen) {
                Ok(Fetched { lines, all }) => {
                    if std::mem::take(&mut away) {
                        say("the gateway answers again");
                    }
                    let fresh: Vec<&Line> = lines.iter().filter(|line| seen.note(&line.event, self.changes)).collect();
                    if !all {
                        say(&format!("more events than can be followed; the latest {} are shown", fresh.len()));
                        seen.leave_out_before(lines.first());
                    }
                    if !write_lines(fresh.into_iter(), shared.json) {
                        return Ok(ExitCode::SUCCESS);
                    }
                }
                Err(error) if may_pass(&error) => {
                    if !std::mem::replace(&mut away, true) {
                        say(&format!("{error:#}; waiting"));
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// The latest events, oldest first: at most so many pages, and no further back than what is known.
    fn fetch(&self, client: &Client, pages: usize, seen: &Seen) -> anyhow::Result<Fetched> {
        let limit = PAGE.to_string();
        seen.fetch_unknown(pages, |cursor| {
            let params = [
                ("source", self.source.as_deref()),
                ("type", self.kind.as_deref()),
                ("status", self.status.as_deref()),
                ("limit", Some(limit.as_str())),
                ("cursor", cursor),
            ];
            client.get_json("/api/events", &params)?.read()
        })
    }
}

/// Events, oldest first, and whether these are all up to what is known.
struct Fetched {
    lines: Vec<Line>,
    all: bool,
}

impl Seen {
    /// Fetches pages, newest event first, until one has a known event.
    fn fetch_unknown(
        &self,
        pages: usize,
        mut fetch: impl FnMut(Option<&str>) -> anyhow::Result<Page>,
    ) -> anyhow::Result<Fetched> {
        let mut lines = Vec::new();
        let mut cursor: Option<String> = None;
        let mut all = false;
        for _ in 0..pages {
            let page = fetch(cursor.as_deref())?;
            let mut reached = false;
            for json in page.events {
                let event: Event = serde_json::from_str(json.get())?;
                reached |= self.knows(&event);
                lines.push(Line { event, json });
            }
            cursor = page.next;
            // Without a status an event's place in the list never changes, so what comes after a known one is known.
            all = cursor.is_none() || reached;
            if all {
                break;
            }
        }
        lines.reverse();
        Ok(Fetched { lines, all })
    }

    /// What is older than a line that was noted is not looked for again.
    fn leave_out_before(&mut self, first: Option<&Line>) {
        let first = first.map(|line| line.event.id.clone());
        // Nothing is less than something.
        self.floor = self.floor.take().max(first);
    }

    /// Takes the first page as known. What is older than a full page is not new when it comes into sight later.
    fn start(&mut self, lines: &[Line]) {
        if lines.len() >= PAGE {
            self.floor = lines.first().map(|line| line.event.id.clone());
        }
        for line in lines {
            self.note(&line.event, false);
        }
    }

    fn knows(&self, event: &Event) -> bool {
        self.statuses.contains_key(&event.id) || self.floor.as_ref().is_some_and(|floor| event.id <= *floor)
    }

    /// Notes an event. Returns whether it is to be printed.
    fn note(&mut self, event: &Event, changes: bool) -> bool {
        if let Some(status) = self.statuses.get_mut(&event.id) {
            let changed = *status != event.status;
            status.clone_from(&event.status);
            return changed && changes;
        }
        if self.knows(event) {
            return false;
        }
        self.statuses.insert(event.id.clone(), event.status.clone());
        self.order.push_back(event.id.clone());
        if self.order.len() > REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.statuses.remove(&oldest);
            self.floor = Some(self.floor.take().map_or(oldest.clone(), |floor| floor.max(oldest)));
        }
        true
    }
}

/// Prints lines. `false` if nobody reads them any more.
fn write_lines<'l>(lines: impl Iterator<Item = &'l Line>, json: bool) -> bool {
    let colours = Colours::of_stdout();
    let mut stdout = std::io::stdout().lock();
    let write = || -> std::io::Result<()> {
        for line in lines {
            let text = match json {
                true => text::harmless_json(line.json.get()).into_owned(),
                false => human(&line.event, colours),
            };
            writeln!(stdout, "{text}")?;
        }
        stdout.flush()
    };
    write().is_ok()
}

fn human(event: &Event, colours: Colours) -> String {
    let mut cells = cells(event, ID_LENGTH);
    if let Some(status) = cells.get_mut(2) {
        *status = format!("{status:<STATUS_WIDTH$}");
    }
    let mut line = text::narrow_line(cells, &[3, 4, 5, 6], (2, colours));
    let failing = event.deliveries.iter().find_map(|delivery| Some((&delivery.route, delivery.error.as_ref()?)));
    if let Some((route, error)) = failing {
        let failed = text::shown(&format!("{route}: {error}"), 400);
        line.push_str(&format!("\n    {}", text::cut(&failed, 96)));
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(id: &str, status: &str) -> Event {
        serde_json::from_value(raw(id, status)).unwrap()
    }

    fn raw(id: &str, status: &str) -> serde_json::Value {
        serde_json::json!({
            "id": id, "source": "s", "key": "k\u{1b}[2J", "type": null, "entity": null, "status": status,
            "flags": ["conflict"], "integrity": "body", "occurred_at": null, "received_at": "T", "size": 1,
            "duplicates": 2, "deliveries": [{"route": "r", "epoch": 0, "state": status, "attempt": 1, "run_at": "T",
            "result": null, "error": "no\nway", "cause": null, "settled_at": null}],
        })
    }

    #[test]
    fn an_event_is_printed_once_unless_its_changes_are_wanted() {
        let mut seen = Seen::default();
        assert!(seen.note(&event("a", "ready"), true));
        assert!(!seen.note(&event("a", "ready"), true));
        assert!(seen.note(&event("a", "dead"), true));
        assert!(!seen.note(&event("a", "dead"), true));
        assert!(!seen.note(&event("a", "ready"), false));
    }

    #[test]
    fn what_was_forgotten_as_printed_is_not_printed_again() {
        let mut seen = Seen::default();
        for number in 0..REMEMBERED + 10 {
            assert!(seen.note(&event(&format!("{number:08}"), "ready"), false));
        }
        assert!(seen.statuses.len() <= REMEMBERED);
        assert!(!seen.note(&event("00000003", "dead"), true));
        assert!(seen.note(&event("99999999", "ready"), true));
    }

    #[test]
    fn a_list_in_which_nothing_is_known_is_not_followed_for_ever() {
        let mut seen = Seen::default();
        let asked = std::cell::Cell::new(0);
        let page = |cursor: Option<&str>| {
            asked.set(asked.get() + 1);
            let newest: u64 = cursor.map_or(99_999_999, |cursor| cursor.parse().unwrap());
            let json = |number: u64| serde_json::value::to_raw_value(&raw(&format!("{number:08}"), "dead")).unwrap();
            let events = (0..10).map(|older| json(newest - older)).collect();
            Ok(Page { events, next: Some((newest - 10).to_string()) })
        };
        let fetched = seen.fetch_unknown(MOST_PAGES, page).unwrap();
        assert_eq!((asked.take(), fetched.lines.len(), fetched.all), (MOST_PAGES, MOST_PAGES * 10, false));
        assert!(fetched.lines.iter().all(|line| seen.note(&line.event, false)));
        seen.leave_out_before(fetched.lines.first());
        // From here on it is known where to stop, whatever came to light before that.
        let fetched = seen.fetch_unknown(MOST_PAGES, page).unwrap();
        assert_eq!((asked.take(), fetched.lines.len(), fetched.all), (1, 10, true));
        assert!(!seen.note(&event("00000007", "dead"), false));
    }

    #[test]
    fn a_line_is_harmless_and_what_failed_stands_below() {
        let line = human(&event("019a", "dead"), Colours::none());
        assert_eq!(line, "T 019a dead        s - k\\u{1b}[2J ×3 [conflict]\n    r: no\\u{a}way");
    }
}
