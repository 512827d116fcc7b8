//! `oncehook check`: reads the configuration and reports every problem at once.

use std::process::ExitCode;

use super::{Shared, print, say};
use crate::config::Config;

pub(super) fn run(shared: &Shared) -> anyhow::Result<ExitCode> {
    match Config::load(&shared.config) {
        Ok(config) if shared.json => {
            let sources: Vec<_> = config.sources.iter().map(|source| source.name.as_str()).collect();
            print(&serde_json::json!({ "ok": true, "sources": sources, "problems": [] }).to_string());
            Ok(ExitCode::SUCCESS)
        }
        Ok(config) => {
            let count = config.sources.len();
            let sources = if count == 1 { "1 source".to_owned() } else { format!("{count} sources") };
            say(&format!("{} is fine: {sources}", shared.config.display()));
            Ok(ExitCode::SUCCESS)
        }
        Err(problems) if shared.json => {
            print(&serde_json::json!({ "ok": false, "problems": problems.list }).to_string());
            Ok(ExitCode::FAILURE)
        }
        Err(problems) => Err(problems.into()),
    }
}
