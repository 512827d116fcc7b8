//! What people ask: lists, one event's story, counts. On connections that cannot write, time-boxed.
//!
//! `reader` is the interface, `search` finds the events of a list with the index of `buckets`. An engine gives the texts of
//! the statements ([`Reads`]); what goes in and what comes out is written once.

mod reader;
mod search;

use std::future::Future;

use super::engine::Engine;
use super::value::Param;
use crate::event::EventId;
use crate::journal::EventStatus;
use crate::journal::sql::Result;
pub(in crate::journal) use crate::journal::sql::buckets;
use buckets::Part;

/// An engine of which people can ask.
pub(in crate::journal) trait Reads: Engine {
    /// The status of an event `e`, compared with what goes on behind it.
    const STATUS_IS: &'static str;
    /// `$1`: key. Returns the events that hold it, one for each source.
    const BY_KEY: &'static str;
    /// `$1`: value, `$2`: first bucket, `$3`: last bucket, `$4`: limit. Returns bucket, first, last; the newest bucket first.
    const BUCKETS: &'static str;
    /// `$1`: table of value, bucket, first, last.
    const ADD_TO_BUCKETS: &'static str;

    /// The text that walks parts of the events, given newest first: the newest `$1` events `e` of each part or of all of
    /// them, with the columns of [`Tells::SUMMARY`](crate::journal::sql::story::Tells::SUMMARY). `conditions` begins with `AND`, or is empty.
    /// The text's own parameters go behind those that are there.
    fn scan(parts: &[Part], conditions: &str, params: &mut Vec<Param<'_>>) -> String;

    /// The newest events of a part of which a delivery is in this state, newest first. Not for a status that no index knows:
    /// succeeded, unrouted, quarantined.
    fn newest_in(
        session: &mut Self::Session,
        status: EventStatus,
        within: Part,
        limit: i64,
    ) -> impl Future<Output = Result<Vec<EventId>>> + Send;
}
