//! The one test binary of the library.

mod effects;
mod memory;
mod sqlite;
