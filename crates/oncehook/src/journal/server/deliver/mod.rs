//! The way out of a server journal: what is due is locked or leased, run, and settled. `deliveries` calls it.
//!
//! Promises: effect and settlement commit in one transaction that the fence guards. A call that is dropped half-way closes its
//! connection, and the server undoes what was begun.

pub(super) mod batch;
pub(super) mod call;
pub(in crate::journal) mod entity;
pub(super) mod lease;
pub(in crate::journal) mod row;
pub(super) mod settle;
pub(in crate::journal) mod steps;
