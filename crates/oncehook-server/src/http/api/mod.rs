//! The admin API, one file per resource. The shapes here are a promise to scripts; `openapi.rs` publishes them.

pub(super) mod events;
pub(super) mod health;
pub(super) mod input;
pub(super) mod openapi;
pub(super) mod orders;
pub(super) mod replays;
pub(super) mod routes;
pub(super) mod stats;
