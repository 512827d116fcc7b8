//! The admin API, one file per resource. The shapes here are a promise to scripts; `openapi.rs` publishes them.

pub(super) mod events;
pub(super) mod health;
pub(super) mod openapi;
pub(super) mod stats;
