//! The proof: a real deployment under faults, what its senders were promised, what took effect, and the difference.
//!
//! - [`disk`]: a disk whose power can be cut.
//!
//! `bin/prove.rs` runs it at length and writes `docs/PROOF.md`; a short version is part of the gateway's tests.

pub mod disk;
