//! The texts by which people read, the search index, and what removes the index with its events.
//!
//! Hints stand where the optimizer could take another way that reads everything. There are no lateral joins on all servers, so
//! several parts of the events are one statement with several ranges.

use std::collections::BTreeSet;

use super::Mysql;
use super::connection::Session;
use super::engine_error::EngineError;
use crate::event::EventId;
use crate::journal::EventStatus;
use crate::journal::server::read::Reads;
use crate::journal::sql;
use crate::journal::sql::buckets::{Part, bucket_of, first_of_bucket, ids};
use crate::journal::sql::story::{Tells, delivery_columns};
use crate::journal::sql::value::{Column, Param, Row};

impl Tells for Session {
    const SUMMARY: &'static str = "SELECT e.id, e.source, e.`key`, e.type, e.entity, {status},
           e.integrity, e.occurred_at, e.received_at, e.size,
           COALESCE((SELECT d.journal + d.memory + d.redis FROM oncehook_duplicates d WHERE d.event = e.id), 0),
           (SELECT GROUP_CONCAT(f.flag, COALESCE(CONCAT(':', f.reason), '')) FROM oncehook_flags f WHERE f.event = e.id),
           e.digest
      FROM oncehook_events e FORCE INDEX (PRIMARY)";
    const DELIVERIES: &'static str = concat!(
        "SELECT d.event",
        delivery_columns!(),
        // MySQL would sometimes scan all deliveries of a table that was filled a moment ago.
        "FROM {ids|$1} STRAIGHT_JOIN oncehook_deliveries d FORCE INDEX (PRIMARY) ON d.event = UNHEX(t.id)
         ORDER BY d.event, d.route, d.epoch"
    );
    const STANDINGS: &'static str = "SELECT t.place, d.state, d.result, d.error, d.cause FROM {fenced|$1}";
    const RECENT_KEYS: &'static str = "SELECT k.source, k.`key`, k.event, k.digest, k.expires_at
         FROM (SELECT id, source, `key` FROM oncehook_events ORDER BY id DESC LIMIT $1) e
         STRAIGHT_JOIN oncehook_keys k ON k.source = e.source AND k.`key` = e.`key` AND k.event = e.id
        ORDER BY k.event DESC";
    // Walks the part of the queues' index that is not over, so it costs what waits and not what was. What waits for its turn
    // is due at no time: the largest number.
    const BACKLOG: &'static str = "
        SELECT place, route, COUNT(*), MIN(NULLIF(place_at, 9223372036854775807)) FROM oncehook_deliveries
          WHERE place IN (0, 1, 2, 3) GROUP BY place, route
         UNION ALL
         SELECT 4, route, COUNT(*), MIN(blocked_at) FROM oncehook_deliveries
          WHERE place = 0 AND place_at = 9223372036854775807 AND blocked_at IS NOT NULL GROUP BY route";
    const KEEP_ALIASES: &'static str = "INSERT INTO oncehook_spool_aliases (alias, event)
        SELECT UNHEX(t.alias), UNHEX(t.event)
          FROM JSON_TABLE($1, '$[*]' COLUMNS (alias VARCHAR(32) PATH '$[0]', event VARCHAR(32) PATH '$[1]')) t
        ON DUPLICATE KEY UPDATE event = oncehook_spool_aliases.event";
}

impl Reads for Mysql {
    const STATUS_IS: &'static str = "{status} =";
    const BY_KEY: &'static str = "SELECT k.event FROM (SELECT DISTINCT source FROM oncehook_totals) t
        STRAIGHT_JOIN oncehook_keys k FORCE INDEX (PRIMARY) ON k.source = t.source AND k.`key` = $1";
    const BUCKETS: &'static str = "SELECT bucket, first, last FROM oncehook_buckets FORCE INDEX (PRIMARY)
        WHERE value = $1 AND bucket BETWEEN $2 AND $3 ORDER BY bucket DESC LIMIT $4";
    // Rows that are there are locked like new ones, so they are not removed before the commit.
    const ADD_TO_BUCKETS: &'static str = "INSERT INTO oncehook_buckets (value, bucket, first, last)
        SELECT t.value, t.bucket, t.first, t.last
          FROM JSON_TABLE($1, '$[*]' COLUMNS (value BIGINT PATH '$[0]', bucket BIGINT PATH '$[1]',
                                              first INT PATH '$[2]', last INT PATH '$[3]')) t
        ON DUPLICATE KEY UPDATE first = LEAST(oncehook_buckets.first, VALUES(first)),
                                last = GREATEST(oncehook_buckets.last, VALUES(last))";

    fn scan(parts: &[Part], conditions: &str, params: &mut Vec<Param<'_>>) -> String {
        // 1, 4, 16 … ranges, the last part again and again, so that a few prepared statements serve all.
        let mut ranges = Vec::new();
        let count = (0..).map(|power| 4_usize.pow(power)).find(|count| *count >= parts.len()).unwrap_or(1);
        for part in parts.iter().chain(parts.last().into_iter().cycle()).take(count) {
            params.extend([Param::Id(part.from), Param::Id(part.to)]);
            ranges.push(format!("e.id BETWEEN ${} AND ${}", params.len() - 1, params.len()));
        }
        let (summary, ranges) = (Session::SUMMARY, ranges.join(" OR "));
        format!("{summary} WHERE ({ranges}){conditions} ORDER BY e.id DESC LIMIT $1")
    }

    async fn newest_in(
        session: &mut Session,
        status: EventStatus,
        within: Part,
        limit: i64,
    ) -> Result<Vec<EventId>, EngineError> {
        let place = match status {
            EventStatus::Running => 1,
            EventStatus::Dead => 2,
            EventStatus::Parked => 3,
            EventStatus::Superseded => 4,
            EventStatus::Skipped => 5,
            _ => 0,
        };
        if !matches!(status, EventStatus::Dead | EventStatus::Superseded | EventStatus::Skipped) {
            // Sorts what the queues hold in this state.
            let sql = format!(
                "SELECT DISTINCT event FROM oncehook_deliveries FORCE INDEX (oncehook_deliveries_place)
                  WHERE place = {place} AND state = '{}' AND event BETWEEN $1 AND $2 ORDER BY event DESC LIMIT $3",
                status.as_str()
            );
            let asked = [Param::from(within.from), within.to.into(), limit.into()];
            return ids(&sql::Session::rows(session, &sql, &asked).await?);
        }
        // The index has these by route, and there in the order of events. Each route is found behind the one before, because
        // MariaDB would read all entries to list the routes.
        let next = format!(
            "SELECT MIN(route) FROM oncehook_deliveries FORCE INDEX (oncehook_deliveries_place)
              WHERE place = {place} AND route > $1"
        );
        let newest = format!(
            "SELECT event FROM oncehook_deliveries FORCE INDEX (oncehook_deliveries_place)
              WHERE place = {place} AND route = $4 AND place_at IS NULL AND event BETWEEN $1 AND $2
              ORDER BY event DESC LIMIT $3"
        );
        let (mut route, mut found) = (String::new(), BTreeSet::new());
        loop {
            let row = sql::Session::row(session, &next, &[(&route).into()]).await?;
            let Some(name) = row.map(|row| row.maybe_text(0)).transpose()?.flatten() else { break };
            let (from, to) = (within.from.into(), within.to.into());
            let rows = sql::Session::rows(session, &newest, &[from, to, limit.into(), (&name).into()]).await?;
            found.extend(ids(&rows)?);
            route = name;
        }
        Ok(found.into_iter().rev().take(usize::try_from(limit).unwrap_or(0)).collect())
    }
}

/// Waits until no node fills the index, and keeps it so until the transaction ends: the node that fills it has events locked,
/// which forgetting would skip. If that takes too long (it waits for an append that hangs), goes on without.
pub(super) async fn wait_for_index(session: &mut Session) -> Result<(), EngineError> {
    match session.row("SELECT last FROM oncehook_indexed WHERE one = 1 FOR UPDATE", Vec::new()).await {
        Err(error) if error.is_collision() => Ok(()),
        other => other.map(|_| ()),
    }
}

/// Rows that are removed by one statement.
const REMOVED_AT_ONCE: usize = 2_000;

/// Removes from the index the buckets in which no event is left, among those of events that this transaction has removed. The
/// others need not be asked for: the transaction that removes the last event of a bucket has looked at it.
///
/// Locks the rows first, and looks for events then. A late event that needs such a row is committed, and seen; or has the row
/// locked, and the row is skipped; or comes now, waits, and writes the row anew.
pub(super) async fn forget_buckets(session: &mut Session, gone: &[EventId]) -> Result<(), EngineError> {
    let touched: BTreeSet<i64> = gone.iter().map(|event| bucket_of(*event)).collect();
    let (Some(first), Some(last)) = (touched.first(), touched.last()) else { return Ok(()) };
    let sql = "SELECT b.value, b.bucket FROM (SELECT * FROM JSON_TABLE($1, '$[*]' COLUMNS (bucket BIGINT PATH '$')) t) t
                STRAIGHT_JOIN oncehook_buckets b FORCE INDEX (oncehook_buckets_bucket) ON b.bucket = t.bucket FOR UPDATE SKIP LOCKED";
    let asked = Param::Table(vec![Column::ints(touched.iter().copied())]);
    let rows = sql::Session::rows(session, sql, &[asked]).await?;
    let locked: Vec<(i64, i64)> =
        rows.iter().map(|row| Ok((row.int(0)?, row.int(1)?))).collect::<Result<_, EngineError>>()?;
    let left = occupied(session, *first, *last).await?;
    let empty: Vec<(i64, i64)> = locked.into_iter().filter(|(_, bucket)| !left.contains(bucket)).collect();
    let sql = "DELETE b FROM JSON_TABLE($1, '$[*]' COLUMNS (value BIGINT PATH '$[0]', bucket BIGINT PATH '$[1]')) t
                STRAIGHT_JOIN oncehook_buckets b FORCE INDEX (PRIMARY) ON b.value = t.value AND b.bucket = t.bucket";
    for some in empty.chunks(REMOVED_AT_ONCE) {
        let (values, buckets): (Vec<_>, Vec<_>) =
            some.iter().map(|(value, bucket)| (Some(*value), Some(*bucket))).unzip();
        let asked = Param::Table(vec![Column::Ints(values), Column::Ints(buckets)]);
        sql::Session::change(session, sql, &[asked]).await?;
    }
    Ok(())
}

/// Those of some neighbouring buckets in which there are events. Forgetting has just been through all but the last and left few
/// events there; the last may hold thousands, of which one is read.
async fn occupied(session: &mut Session, first: i64, last: i64) -> Result<BTreeSet<i64>, EngineError> {
    let sql = "SELECT id FROM oncehook_events FORCE INDEX (PRIMARY) WHERE id >= $1 AND id < $2
               UNION ALL
               (SELECT id FROM oncehook_events FORCE INDEX (PRIMARY) WHERE id >= $2 AND id < $3 LIMIT 1)";
    let asked = [first, last, last + 1].map(|bucket| Param::Id(first_of_bucket(bucket)));
    let found = ids(&sql::Session::rows(session, sql, &asked).await?)?;
    Ok(found.into_iter().map(bucket_of).collect())
}
