//! Logs. Text on stderr for people, JSON lines for machines; what came from outside is escaped by the formatter.

use std::io::IsTerminal as _;

use tracing_subscriber::EnvFilter;

use crate::config::log_filter;

/// Installs the logger of this process. `json` gives one object per line.
pub(crate) fn install(json: bool) {
    let filter = log_filter().and_then(|filter| EnvFilter::try_new(filter).ok());
    let filter = filter.unwrap_or_else(|| EnvFilter::new("info"));
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        // Colour is for eyes; in a file or a pipe it is noise.
        .with_ansi(std::io::stderr().is_terminal());
    // A second installation, as in tests, keeps the first.
    let _ = if json { builder.json().try_init() } else { builder.with_target(false).try_init() };
}
