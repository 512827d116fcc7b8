//! The one test binary of the library.

mod effects;
mod http;
mod ledger;
mod memory;
mod outbound;
mod postgres;
mod postgres_effects;
mod sqlite;
mod tls;
