//! `oncehook migrate`: makes the journal's tables, proves that it remembers keys, and stops.

use std::process::ExitCode;

use oncehook::clock::Clock;
use oncehook::journal::mysql::MysqlJournal;
use oncehook::journal::postgres::PostgresJournal;
use oncehook::journal::sqlite::SqliteJournal;

use super::{Shared, print_json, say, wait};
use crate::config::JournalConfig;

pub(super) fn run(shared: &Shared) -> anyhow::Result<ExitCode> {
    let config = shared.load()?;
    let applied = match &config.journal {
        JournalConfig::Sqlite(path) => SqliteJournal::migrate(path, &Clock::system())?,
        JournalConfig::Mysql(url) => wait(MysqlJournal::migrate(url.reveal()))??,
        JournalConfig::Postgres(url) => wait(PostgresJournal::migrate(url.reveal()))??,
    };
    if shared.json {
        print_json(&serde_json::json!({ "applied": applied }).to_string());
    } else if applied.is_empty() {
        say("the journal is up to date");
    } else {
        say(&format!("applied: {}", applied.join(", ")));
    }
    Ok(ExitCode::SUCCESS)
}
