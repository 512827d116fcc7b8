//! `oncehook pause` and `resume`: whether the running gateway handles the events of a source or a route. It accepts them
//! either way.

use std::process::ExitCode;

use serde_json::json;

use super::client::Client;
use super::{Shared, print, text};

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

impl Pause {
    pub(super) fn run(self, shared: &Shared, paused: bool) -> anyhow::Result<ExitCode> {
        let (kind, name) = match (&self.what.source, &self.what.route) {
            (Some(name), _) => ("source", name.as_str()),
            (None, name) => ("route", name.as_deref().unwrap_or_default()),
        };
        let verb = if paused { "pause" } else { "resume" };
        // A name that needs escaping in a path is no name, and would only be looked up elsewhere.
        if !name.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_'))
            || name.is_empty()
        {
            anyhow::bail!("there is no {kind} `{}`", text::shown(name, 64));
        }
        let client = Client::new(shared.load()?)?;
        let answer =
            client.post(&format!("/api/{kind}s/{name}/{verb}"), &json!({ "reason": self.reason }))?;
        if shared.json {
            print(answer.text());
        } else {
            print(&format!("{kind} {name} {verb}d"));
        }
        Ok(ExitCode::SUCCESS)
    }
}
