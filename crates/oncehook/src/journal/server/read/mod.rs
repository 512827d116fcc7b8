//! What people ask: lists, one event's story, counts. On connections that cannot write, time-boxed.
//!
//! `reader` is the interface and the counts, `story` is one event, `search` finds the events of a list with the index of
//! `buckets`. An engine gives the texts of the statements ([`ReadSql`]); what goes in and what comes out is written once.

pub(in crate::journal) mod buckets;
mod reader;
mod search;
mod story;

use std::future::Future;

use super::engine::Engine;
use super::error::EngineError;
use super::value::Param;
use crate::event::EventId;
use crate::journal::EventStatus;
use buckets::Part;
pub(in crate::journal) use search::ids;

/// An engine of which people can ask.
pub(in crate::journal) trait Reads: Engine {
    const READ: ReadSql;

    /// The text that walks parts of the events, given newest first: the newest `$1` events `e` of each part or of all of
    /// them, with the columns of [`ReadSql::summary`]. `conditions` begins with `AND`, or is empty. The text's own parameters go
    /// behind those that are there.
    fn scan(parts: &[Part], conditions: &str, params: &mut Vec<Param<'_>>) -> String;

    /// The newest events of a part of which a delivery is in this state, newest first. Not for a status that no index knows:
    /// succeeded, unrouted, quarantined.
    fn newest_in(
        session: &mut Self::Session,
        status: EventStatus,
        within: Part,
        limit: i64,
    ) -> impl Future<Output = Result<Vec<EventId>, EngineError>> + Send;
}

/// One text for each statement by which people read, and by which the index is filled.
pub(in crate::journal) struct ReadSql {
    /// Id, source, key, type, entity, status, integrity, occurred, received, size, duplicates, flags with reasons (`flag:reason,…`),
    /// digest, of events `e`. Ends with the table; a condition goes behind it.
    pub(in crate::journal) summary: &'static str,
    /// The status of an event `e`.
    pub(in crate::journal) status: &'static str,
    /// The beginning of a subquery for deliveries `q` of an event `e`, in which a condition or a limit goes on.
    pub(in crate::journal) delivery: &'static str,
    /// `$1`: key. Returns the events that hold it, one for each source.
    pub(in crate::journal) by_key: &'static str,
    /// `$1`: from, `$2`: to, `$3`: limit. Returns held events, newest first.
    pub(in crate::journal) held: &'static str,
    /// `$1`: from, `$2`: to, `$3`: how many. Returns the event that comes this many behind the newest one.
    pub(in crate::journal) stretch: &'static str,
    /// `$1`: value, `$2`: first bucket, `$3`: last bucket, `$4`: limit. Returns bucket, first, last; the newest bucket first.
    pub(in crate::journal) buckets: &'static str,
    /// Returns the last event that, with all before it, is in the index.
    pub(in crate::journal) indexed: &'static str,
    /// The same, and locks it. Returns nothing if another node has locked it.
    pub(in crate::journal) lock_indexed: &'static str,
    /// `$1`: event.
    pub(in crate::journal) set_indexed: &'static str,
    /// `$1`: after, `$2`: before, `$3`: limit. Returns id, source, type, entity, received, in the order of ids. Waits for those
    /// that are not committed, where the engine does not bound the time of an append.
    pub(in crate::journal) unindexed: &'static str,
    /// `$1`: from, `$2`: to. Returns the events that have deliveries.
    pub(in crate::journal) routed: &'static str,
    /// `$1`: table of value, bucket, first, last.
    pub(in crate::journal) add_to_buckets: &'static str,
    /// `$1`: table of events. Returns event, route, epoch, state, attempt, due (or since when it waits for its turn), result, error,
    /// cause, settled, blocked, parked.
    pub(in crate::journal) deliveries: &'static str,
    /// `$1`: event, `$2`: how many of each delivery. Returns route, epoch, attempt, started, finished, outcome, error.
    pub(in crate::journal) attempts: &'static str,
    /// `$1`: event. Returns first, last, and the latest as JSON.
    pub(in crate::journal) duplicates: &'static str,
    /// `$1`: subject, `$2`: limit. Returns time, who, action, reason, detail, and how many there are; newest first.
    pub(in crate::journal) audit: &'static str,
    /// `$1`: event. Returns digest, count, first, last, size.
    pub(in crate::journal) conflicts: &'static str,
    /// `$1`: event. Returns headers, body.
    pub(in crate::journal) body: &'static str,
    /// Returns source, events, duplicates, conflicts, quarantined.
    pub(in crate::journal) stats: &'static str,
    /// `$1`: table of deliveries. Returns place, state, result, error, cause.
    pub(in crate::journal) standings: &'static str,
    /// `$1`: limit. Returns source, key, event, digest, expiry; newest first.
    pub(in crate::journal) recent_keys: &'static str,
    /// Returns what (0 waits, 1 runs, 2 is dead, 3 is parked, 4 is blocked), route, how many, and since when.
    pub(in crate::journal) backlog: &'static str,
}
