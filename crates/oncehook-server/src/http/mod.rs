//! HTTP: the front door for providers and the admin listener for operators, on two sockets.
//!
//! Front door (`ingest.rs`, on hyper itself because it is hot):
//! - `POST /webhooks/{source}`; other methods where a provider asks before it sends
//!
//! Admin (`admin.rs`, axum):
//! - `GET /healthz`, `/readyz`, `/metrics`
//! - `GET /api/events`, `/api/events/{id}`, `/api/events/{id}/body`, `/api/routes`, `/api/stats`, `/api/openapi.json`
//! - `POST /api/events/{id}/retry`, `/replay`, `/skip`, `/release`
//! - `POST /api/replays`, `GET` and `DELETE /api/replays/{id}`
//! - `POST /api/sources/{name}/pause`, `/resume`, and the same for `/api/routes/{name}`
//!
//! Both go through one accept loop (`listener.rs`) with deadlines and caps.

mod address;
pub mod admin;
mod api;
mod arrivals;
mod bodies;
mod connections;
mod embed;
mod error;
pub mod gate;
mod handover;
mod ingest;
mod keys;
pub mod listener;
mod rate;
mod rejections;
mod result;
mod site;
mod tap;
mod used_once;
mod wire;
