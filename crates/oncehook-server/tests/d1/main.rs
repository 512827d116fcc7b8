//! scratch: replaced by tests/it/main.rs
#[cfg(test)]
#[path = "../it/api.rs"]
mod api;
#[cfg(test)]
#[path = "../it/cli.rs"]
mod cli;
#[cfg(test)]
#[path = "../it/config.rs"]
mod config;
#[cfg(test)]
#[path = "../it/hostile.rs"]
mod hostile;
#[cfg(test)]
#[path = "../it/kit.rs"]
mod kit;
#[cfg(test)]
#[path = "../it/signature.rs"]
mod signature;
