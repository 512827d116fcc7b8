//! The one test binary of the library.

mod memory;
mod sqlite;
