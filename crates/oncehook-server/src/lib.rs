//! The oncehook gateway: configuration, HTTP, command line. The binary `oncehook` is [`cli`] and nothing more.
//!
//! `app` puts the parts together and keeps asking whether the memory of keys still works; `config` says how; `http` is what
//! the world sees; `backlog` tells what waits; `spool` drains what was accepted while the journal was away; `order` and
//! `replay` are what operators want done; `waiting` is for callers who want to hear what came of their event.

pub mod app;
mod backlog;
pub mod cli;
pub mod config;
pub mod http;
mod memory;
mod order;
mod pauses;
mod private_file;
mod replay;
mod spool;
mod telemetry;
mod waiting;
