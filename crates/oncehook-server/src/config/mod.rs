//! The configuration: what the operator wrote (`file.rs`), checked once into what the program uses (`checked.rs`).
//!
//! Promises: all problems are reported together, each with its line and column; an unknown key is a problem; a secret is
//! read from the environment or a file and never printed. Only this module reads the environment.
//!
//! Does not: start anything. `oncehook check` is exactly [`Config::load`].

mod checked;
mod duration;
mod file;
mod machine;
mod near;
mod problem;
mod reference;
mod route;

pub use checked::{Config, Limits, OnOutage, Rate, RateLimits, ServerConfig, SourceConfig, SpoolConfig, WaitConfig};
pub(crate) use duration::parse_duration;
pub(crate) use near::did_you_mean;
pub use problem::{Problem, Problems};
pub use reference::secret_from_reference;

/// The documented configuration, with every key and its default. `oncehook init` starts from it.
pub const DEFAULT_FILE: &str = include_str!("default.toml");

/// What `ONCEHOOK_LOG`, or else `RUST_LOG`, asks for. Read here because only this module reads the environment.
#[must_use]
#[expect(clippy::disallowed_methods, reason = "this is the door for the environment")]
pub fn log_filter() -> Option<String> {
    std::env::var("ONCEHOOK_LOG").or_else(|_| std::env::var("RUST_LOG")).ok()
}

/// Who gives orders on the command line: what `ONCEHOOK_WHO` says, or else the name of the user. Nothing if that is not
/// one printable word or so.
#[must_use]
#[expect(clippy::disallowed_methods, reason = "this is the door for the environment")]
pub fn operator() -> Option<String> {
    let name = std::env::var("ONCEHOOK_WHO").or_else(|_| std::env::var("USER")).ok()?;
    let fit = !name.is_empty() && name.len() <= 100 && name.bytes().all(|byte| matches!(byte, b' '..=b'~'));
    fit.then_some(name)
}

/// Whether a terminal should show colours: not if `NO_COLOR` says something, nor on a terminal that has none.
#[must_use]
#[expect(clippy::disallowed_methods, reason = "this is the door for the environment")]
pub fn colours_wanted() -> bool {
    let refused = std::env::var_os("NO_COLOR").is_some_and(|word| !word.is_empty());
    !refused && std::env::var_os("TERM").is_none_or(|terminal| terminal != "dumb")
}

/// The mistake that a test wants to be made.
#[must_use]
#[cfg(feature = "planted")]
#[expect(clippy::disallowed_methods, reason = "this is the door for the environment")]
pub fn planted_bug() -> Option<String> {
    std::env::var("ONCEHOOK_PLANTED").ok()
}

/// Where a test wants the process to end: `name` or `name:count`.
#[must_use]
#[cfg(feature = "crash-points")]
#[expect(clippy::disallowed_methods, reason = "this is the door for the environment")]
pub fn crash_point() -> Option<String> {
    std::env::var("ONCEHOOK_CRASH_POINT").ok()
}
