//! The one test binary of the library.

mod ledger;
mod memory;
mod sqlite;
