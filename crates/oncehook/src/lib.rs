//! Receive webhooks so that each one takes effect exactly once.
//!
//! This crate is the core that the gateway (`oncehook-server`) and embedding applications share. The modules stand
//! in the order of the data; each uses only those above it:
//!
//! - [`clock`], [`observe`]: time and metric names, each through one door.
//! - [`event`]: an identified, verified thing that happened, and its id.
//! - [`journal`]: where an event becomes durable and where duplicates are decided, with its backends.
//! - [`fastpath`]: copies of what is known to be durable do not reach the journal.
//!
//! What this crate does not do: read configuration or the environment, listen on sockets, verify signatures (that is
//! `oncehook-verify`, re-exported as [`verify`]).

pub mod clock;
pub mod event;
pub mod fastpath;
pub mod journal;
pub mod observe;

pub use oncehook_verify as verify;
