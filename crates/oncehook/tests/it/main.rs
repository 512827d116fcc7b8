//! The one test binary of the library.

mod effects;
mod ledger;
mod memory;
mod sqlite;
