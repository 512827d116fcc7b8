//! `oncehook migrate`: makes or upgrades the journal's tables, proves that it remembers keys, and stops.

use std::process::ExitCode;

use oncehook::clock::Clock;
use oncehook::journal::sqlite::SqliteJournal;

use super::{Shared, print, say};

pub(super) fn run(shared: &Shared) -> anyhow::Result<ExitCode> {
    let config = shared.load()?;
    let applied = SqliteJournal::migrate(&config.journal.path, &Clock::system())?;
    if shared.json {
        print(&serde_json::json!({ "applied": applied }).to_string());
    } else if applied.is_empty() {
        say("the journal is up to date");
    } else {
        say(&format!("applied: {}", applied.join(", ")));
    }
    Ok(ExitCode::SUCCESS)
}
