//! The decisions that every journal makes the same way.
//!
//! Promises: pure functions. A journal loads what they ask for, inside its transaction, and carries out what they
//! answer. No SQL, no clock, no randomness and no IO is in here: times and chances are arguments.

pub(crate) mod append;
#[cfg(any(feature = "sqlite", feature = "postgres", feature = "mysql"))]
pub(crate) mod batch;
pub(crate) mod forget;
pub(crate) mod order;
pub(crate) mod outcome;
