//! `oncehook migrate`: makes the journal's tables, proves that it remembers keys, and stops.

use std::process::ExitCode;

use super::{Shared, print_json, say, wait};

pub(super) fn run(shared: &Shared) -> anyhow::Result<ExitCode> {
    let config = shared.load()?;
    let applied = wait(config.journal.migrate())??;
    if shared.json {
        print_json(&serde_json::json!({ "applied": applied }).to_string());
    } else if applied.is_empty() {
        say("the journal is up to date");
    } else {
        say(&format!("applied: {}", applied.join(", ")));
    }
    Ok(ExitCode::SUCCESS)
}
