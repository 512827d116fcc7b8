//! Receive webhooks so that each one takes effect exactly once.
//!
//! This crate is the core that the gateway (`oncehook-server`) and embedding applications share. The modules stand
//! in the order of the data; each uses only those above it:
//!
//! - [`clock`], [`observe`], [`text`]: time, metric names and foreign text in logs, each through one door.
//! - [`event`]: an identified, verified thing that happened, and its id.
//! - [`delivery`], [`retry`]: one event for one route, what an attempt came to, and when the next one is.
//! - [`failures`]: failed attempts in the log, added up when they are many.
//! - [`machine`], [`ordering`]: whose turn it is among the events of an entity, and which of them fit.
//! - [`outbound`]: which addresses a request may go to.
//! - [`handler`], [`route`]: what is done with an event, and which events go where.
//! - [`journal`]: where an event becomes durable, where duplicates are decided and effects are recorded, with its backends.
//! - [`fastpath`]: copies of what is known to be durable do not reach the journal.
//! - [`intake`]: the journal, or a file of this node's own while the journal is away.
//! - [`worker`]: takes what is due and sees that it takes effect.
//!
//! What this crate does not do: read configuration or the environment, listen on sockets, verify signatures (that is
//! `oncehook-verify`, re-exported as [`verify`]).

#[macro_use]
mod words;

pub mod clock;
pub mod crash;
pub mod delivery;
pub mod event;
pub mod failures;
pub mod fastpath;
pub mod glob;
pub mod handler;
#[cfg(feature = "sqlite")]
pub mod intake;
pub mod journal;
pub mod json;
pub mod machine;
pub mod observe;
pub mod ordering;
pub mod outbound;
pub mod planted;
pub mod retry;
pub mod route;
pub mod text;
pub mod worker;

pub use oncehook_verify as verify;
