//! The proof: a real deployment under faults, what its senders were promised, what took effect, and the difference.
//!
//! - [`faults`]: what shows each of the faults that are to be survived.
//! - [`history`]: what was sent and what was answered.
//! - [`audit`]: promises against facts, as numbers.
//! - [`coverage`]: how often rare things happened.
//! - [`disk`]: a disk whose power can be cut.
//! - [`cluster`]: the scenarios on a server database, with two nodes and Redis.
//! - [`embedded`]: the scenarios on the embedded journal.
//! - [`simulation`]: nodes, senders and a destination in one thread, from a seed.
//! - [`spooling`]: what happens to a spool.
//! - [`elsewhere`]: effects in another database than the journal's.
//! - [`tracer`]: the kernel's own calls, counted and made to fail.
//! - [`progress`]: how far it is.
//! - [`document`]: the page and the last line.
//! - [`scenario`]: all of these by name.
//! - [`planted`]: the mistakes, and the scenario that must notice each.
//!
//! `bin/prove.rs` runs it at length and writes `docs/PROOF.md`; a short version is part of the gateway's tests.

pub mod audit;
pub mod cluster;
pub mod coverage;
pub mod disk;
pub mod document;
pub mod elsewhere;
pub mod embedded;
pub mod faults;
pub mod history;
pub mod planted;
pub mod progress;
pub mod scenario;
pub mod simulation;
pub mod spooling;
pub mod tracer;
