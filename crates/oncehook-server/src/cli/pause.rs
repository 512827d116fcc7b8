//! `oncehook pause` and `resume`: whether the running gateway handles the events of a source or a route. It accepts them
//! either way. `resume --forgetting` says that the clock is right after the gateway has doubted it.

use std::process::ExitCode;

use serde_json::json;

use super::client::Client;
use super::{Shared, print, print_json, text};

#[derive(Debug, clap::Args)]
pub(super) struct Pause {
    #[command(flatten)]
    what: What,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,
}

#[derive(Debug, clap::Args)]
#[group(required = true, multiple = false)]
struct What {
    /// All routes of this source
    #[arg(long, value_name = "NAME")]
    source: Option<String>,
    /// Only this route
    #[arg(long, value_name = "NAME")]
    route: Option<String>,
}

#[derive(Debug, clap::Args)]
pub(super) struct Resume {
    #[command(flatten)]
    what: Stopped,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,
}

#[derive(Debug, clap::Args)]
#[group(required = true, multiple = false)]
struct Stopped {
    /// All routes of this source
    #[arg(long, value_name = "NAME")]
    source: Option<String>,
    /// Only this route
    #[arg(long, value_name = "NAME")]
    route: Option<String>,
    /// Forgetting what is old, which stops while the clock is in doubt: you say that it is right
    #[arg(long)]
    forgetting: bool,
}

impl Pause {
    pub(super) fn run(self, shared: &Shared) -> anyhow::Result<ExitCode> {
        set(shared, self.what.source, self.what.route, "pause", self.reason.as_deref())
    }
}

impl Resume {
    pub(super) fn run(self, shared: &Shared) -> anyhow::Result<ExitCode> {
        if !self.what.forgetting {
            return set(shared, self.what.source, self.what.route, "resume", self.reason.as_deref());
        }
        order(shared, "/api/forgetting/resume", self.reason.as_deref(), "forgetting resumed")
    }
}

/// Pauses or resumes a source or a route.
fn set(
    shared: &Shared,
    source: Option<String>,
    route: Option<String>,
    verb: &str,
    reason: Option<&str>,
) -> anyhow::Result<ExitCode> {
    let (kind, name) = match (source, route) {
        (Some(name), _) => ("source", name),
        (None, name) => ("route", name.unwrap_or_default()),
    };
    // A name that needs escaping in a path is no name, and would only be looked up elsewhere.
    if !name.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_')) || name.is_empty() {
        anyhow::bail!("there is no {kind} `{}`", text::shown(&name, 64));
    }
    order(shared, &format!("/api/{kind}s/{name}/{verb}"), reason, &format!("{kind} {name} {verb}d"))
}

fn order(shared: &Shared, path: &str, reason: Option<&str>, done: &str) -> anyhow::Result<ExitCode> {
    let answer = Client::new(shared.load()?)?.post(path, &json!({ "reason": reason }))?;
    if shared.json {
        print_json(answer.text())
    } else {
        print(done)
    }
    Ok(ExitCode::SUCCESS)
}
