//! `oncehook retry`, `replay`, `skip` and `release`: orders for one event of the running gateway. With a filter instead of
//! an id, `retry` and `replay` are orders for many; `bulk.rs` carries those out.

use std::process::ExitCode;

use anyhow::anyhow;
use serde::Deserialize;
use serde_json::{Value, json};

use super::bulk::{Bulk, Pacing};
use super::client::Client;
use super::events::Event;
use super::filter::Filter;
use super::{Shared, Usage, print, print_json, text};

#[derive(Debug, clap::Args)]
pub(super) struct Retry {
    #[command(flatten)]
    which: Which,
    /// Only the delivery for this route
    #[arg(long, value_name = "NAME")]
    route: Option<String>,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,
    #[command(flatten)]
    pacing: Pacing,
}

#[derive(Debug, clap::Args)]
pub(super) struct Replay {
    #[command(flatten)]
    which: Which,
    /// Run it again although it took effect; needs --reason
    #[arg(long, requires = "reason")]
    force: bool,
    /// With --force: the new epoch; read from the event if there is one, needed with a filter
    #[arg(long, value_name = "N", requires = "force", value_parser = clap::value_parser!(u32).range(1..))]
    epoch: Option<u32>,
    /// Only this route
    #[arg(long, value_name = "NAME")]
    route: Option<String>,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,
    #[command(flatten)]
    pacing: Pacing,
}

/// An order that is only ever for one event.
#[derive(Debug, clap::Args)]
pub(super) struct Plain {
    /// The event's id, or the beginning of it
    id: String,
    /// Only the delivery for this route
    #[arg(long, value_name = "NAME")]
    route: Option<String>,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,
    /// Only say what would be done; changes nothing
    #[arg(long)]
    dry_run: bool,
}

/// The options of [`Filter`], as clap knows them.
const CONDITIONS: [&str; 7] = ["source", "kind", "status", "key", "entity", "since", "until"];

/// One event, or a filter.
#[derive(Debug, clap::Args)]
#[group(skip)]
struct Which {
    /// The event's id, or the beginning of it
    #[arg(conflicts_with_all = CONDITIONS, required_unless_present_any = CONDITIONS)]
    id: Option<String>,
    #[command(flatten)]
    filter: Filter,
}

/// What an order changed, as the API gives it.
#[derive(Deserialize)]
struct Ordered {
    event: String,
    #[serde(default)]
    dry_run: bool,
    routes: Vec<String>,
    epoch: u32,
}

impl Retry {
    pub(super) fn run(self, shared: &Shared) -> anyhow::Result<ExitCode> {
        let client = Client::new(shared.load()?)?;
        match &self.which.id {
            Some(id) => {
                let dry_run = self.pacing.dry_run;
                let order = json!({ "route": self.route, "reason": self.reason, "dry_run": dry_run });
                give(&client, shared, event_id(id)?, "retry", &order)
            }
            None => {
                let bulk = Bulk { verb: "retry", epoch: None, route: self.route, reason: self.reason };
                bulk.run(&client, shared, &self.which.filter, &self.pacing)
            }
        }
    }
}

impl Replay {
    pub(super) fn run(self, shared: &Shared) -> anyhow::Result<ExitCode> {
        let client = Client::new(shared.load()?)?;
        let Some(id) = &self.which.id else {
            if self.force && self.epoch.is_none() {
                let help = "1 for events that were never replayed by force";
                return Err(anyhow!("--force with a filter needs --epoch, the same for all: {help}"));
            }
            let verb = if self.force { "force" } else { "replay" };
            let bulk = Bulk { verb, epoch: self.epoch, route: self.route, reason: self.reason };
            return bulk.run(&client, shared, &self.which.filter, &self.pacing);
        };
        let id = event_id(id)?;
        let epoch = match (self.force, self.epoch) {
            (true, None) => Some(next_epoch(&client, id)?),
            (_, epoch) => epoch,
        };
        let order = json!({
            "route": self.route,
            "reason": self.reason,
            "force": self.force,
            "epoch": epoch,
            "dry_run": self.pacing.dry_run,
        });
        give(&client, shared, id, "replay", &order)
    }
}

impl Plain {
    pub(super) fn run(self, shared: &Shared, verb: &str) -> anyhow::Result<ExitCode> {
        let client = Client::new(shared.load()?)?;
        let order = json!({ "route": self.route, "reason": self.reason, "dry_run": self.dry_run });
        give(&client, shared, event_id(&self.id)?, verb, &order)
    }
}

/// An event's id, or as much of its beginning as a list shows. The gateway finds the event, or says that several begin so.
pub(super) fn event_id(id: &str) -> anyhow::Result<&str> {
    let plain = |byte: u8| byte.is_ascii_hexdigit() || byte == b'-';
    if (8..=36).contains(&id.len()) && id.bytes().all(plain) {
        return Ok(id);
    }
    let help = "nor the beginning of one (8 characters or more; `oncehook events` shows them)";
    Err(Usage(format!("`{}` is not an event's id, {help}", text::shown(id, 64))).into())
}

/// If somebody else is faster, the gateway refuses: both meant the same replay.
fn next_epoch(client: &Client, id: &str) -> anyhow::Result<u32> {
    let event: Event = client.get_json(&format!("/api/events/{id}"), &[])?.read()?;
    let latest = event.deliveries.iter().map(|delivery| delivery.epoch).max();
    Ok(latest.unwrap_or(0).saturating_add(1))
}

fn give(client: &Client, shared: &Shared, id: &str, verb: &str, order: &Value) -> anyhow::Result<ExitCode> {
    let answer = client.post(&format!("/api/events/{id}/{verb}"), order)?;
    if shared.json {
        print_json(answer.text());
    } else {
        let Ordered { event, dry_run, routes, epoch } = answer.read()?;
        let would = if dry_run { "would " } else { "" };
        let routes = if routes.is_empty() { "nothing to do".to_owned() } else { routes.join(", ") };
        print(&text::shown(&format!("{event} {would}{verb}: {routes} (epoch {epoch})"), 2_000));
    }
    Ok(ExitCode::SUCCESS)
}
