//! The texts by which people read, the search index, and what removes the index with its events.
//!
//! A limit in a subquery keeps the planner from reading a whole table where one row is asked for.

use uuid::Uuid;

use super::Postgres;
use super::connection::{EngineError, Session};
use super::queries::{event_id, uuid};
use crate::event::EventId;
use crate::journal::EventStatus;
use crate::journal::server::engine;
use crate::journal::server::read::buckets::{Part, behind, bucket_of, first_of_bucket};
use crate::journal::server::read::{ReadSql, Reads, ids};
use crate::journal::server::value::{Column, Param};

/// An event's status, derived: quarantined, else unrouted, else the worst of its deliveries.
macro_rules! status {
    () => {
        "CASE WHEN EXISTS (SELECT 1 FROM oncehook.flags f WHERE f.event = e.id AND f.flag = 'quarantined') THEN 'quarantined'
              ELSE coalesce((SELECT w.state FROM oncehook.deliveries w WHERE w.event = e.id
                              ORDER BY CASE w.state WHEN 'dead' THEN 0 WHEN 'parked' THEN 1 WHEN 'retrying' THEN 2
                                                    WHEN 'running' THEN 3 WHEN 'ready' THEN 4 WHEN 'superseded' THEN 5
                                                    WHEN 'skipped' THEN 6 ELSE 7 END
                              LIMIT 1), 'unrouted') END"
    };
}

impl Reads for Postgres {
    const READ: ReadSql = ReadSql {
        summary: concat!(
            "SELECT e.id, e.source, e.key, e.type, e.entity, ",
            status!(),
            ", e.integrity, e.occurred_at, e.received_at, octet_length(e.body)::bigint,
               coalesce((SELECT d.journal + d.memory + d.redis FROM oncehook.duplicates d WHERE d.event = e.id), 0),
               (SELECT string_agg(f.flag || coalesce(':' || f.reason, ''), ',') FROM oncehook.flags f WHERE f.event = e.id),
               e.digest
          FROM oncehook.events e"
        ),
        status: status!(),
        delivery: "(SELECT 1 FROM oncehook.deliveries q WHERE q.event = e.id",
        by_key: "SELECT k.event FROM (SELECT DISTINCT source FROM oncehook.totals) t
                  CROSS JOIN LATERAL (SELECT event FROM oncehook.keys k WHERE k.source = t.source AND k.key = $1 LIMIT 1) k",
        held: "SELECT event FROM oncehook.flags WHERE flag = 'quarantined' AND event BETWEEN $1 AND $2
                ORDER BY event DESC LIMIT $3",
        stretch: "SELECT id FROM oncehook.events WHERE id BETWEEN $1 AND $2 ORDER BY id DESC OFFSET $3 LIMIT 1",
        buckets: "SELECT bucket, min(first), max(last) FROM oncehook.buckets WHERE value = $1 AND bucket BETWEEN $2 AND $3
                   GROUP BY bucket ORDER BY bucket DESC LIMIT $4",
        indexed: "SELECT last FROM oncehook.indexed",
        lock_indexed: "SELECT last FROM oncehook.indexed FOR UPDATE SKIP LOCKED",
        set_indexed: "UPDATE oncehook.indexed SET last = $1",
        unindexed: "SELECT id, source, type, entity, received_at FROM oncehook.events WHERE id > $1 AND id < $2
                     ORDER BY id LIMIT $3",
        routed: "SELECT DISTINCT event FROM oncehook.deliveries WHERE event BETWEEN $1 AND $2",
        add_to_buckets: "INSERT INTO oncehook.buckets (value, bucket, first, last)
                         SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::int[], $4::int[])",
        deliveries: "SELECT event, route, epoch, state, attempt,
                            CASE WHEN run_at = 9223372036854775807 THEN coalesce(blocked_at, run_at) ELSE run_at END,
                            result, error, cause, settled_at, blocked_at, parked_at
                       FROM oncehook.deliveries WHERE event = ANY($1) ORDER BY event, route, epoch",
        attempts: "SELECT a.route, a.epoch, a.attempt, a.started_at, a.finished_at, a.outcome, a.error
                     FROM oncehook.attempts a JOIN oncehook.deliveries d USING (event, route, epoch)
                    WHERE a.event = $1 AND a.attempt + $2 > d.attempt ORDER BY a.route, a.epoch, a.attempt",
        duplicates: "SELECT first_at, last_at, latest::text FROM oncehook.duplicates WHERE event = $1",
        audit: "SELECT at, who, action, reason, detail, count(*) OVER () FROM oncehook.audit
                 WHERE subject = $1 ORDER BY id DESC LIMIT $2",
        conflicts: "SELECT digest, count, first_at, last_at, octet_length(body)::bigint FROM oncehook.conflicts
                     WHERE event = $1 ORDER BY first_at, digest",
        body: "SELECT headers, body FROM oncehook.events WHERE id = $1",
        stats: "SELECT source, sum(events)::bigint, sum(duplicates)::bigint, sum(conflicts)::bigint, sum(quarantined)::bigint
                  FROM oncehook.totals GROUP BY source ORDER BY source",
        standings: "SELECT w.place, d.state, d.result, d.error, d.cause
                      FROM unnest($1::uuid[], $2::text[], $3::int[]) WITH ORDINALITY AS w(event, route, epoch, place)
                      JOIN oncehook.deliveries d ON d.event = w.event AND d.route = w.route AND d.epoch = w.epoch",
        // Copies of these will be answered without asking the journal again. So, as in `first_ids`, a message in the log makes
        // the commit wait until the synchronous replicas have all that was seen.
        recent_keys: "SELECT k.source, k.key, k.event, k.digest, k.expires_at,
                             (SELECT CASE WHEN current_setting('synchronous_standby_names') <> ''
                                          THEN pg_logical_emit_message(true, 'oncehook', '') END)
                        FROM (SELECT id, source, key FROM oncehook.events ORDER BY id DESC LIMIT $1) e
                        JOIN oncehook.keys k ON k.source = e.source AND k.key = e.key AND k.event = e.id
                       ORDER BY k.event DESC",
        // Each part walks one of the partial indexes, so it costs what waits and not what was. What waits for its turn is due at
        // no time: the largest number.
        backlog: "SELECT 0, route, count(*), nullif(min(run_at), 9223372036854775807)
                    FROM oncehook.deliveries WHERE state IN ('ready', 'retrying') GROUP BY route
                  UNION ALL SELECT 1, route, count(*), NULL FROM oncehook.deliveries WHERE state = 'running' GROUP BY route
                  UNION ALL SELECT 2, route, count(*), NULL FROM oncehook.deliveries WHERE state = 'dead' GROUP BY route
                  UNION ALL SELECT 3, route, count(*), NULL FROM oncehook.deliveries WHERE state = 'parked' GROUP BY route
                  UNION ALL SELECT 4, route, count(*), min(blocked_at) FROM oncehook.deliveries
                   WHERE blocked_at IS NOT NULL AND state IN ('ready', 'retrying') AND run_at = 9223372036854775807 GROUP BY route",
    };

    fn scan(parts: &[Part], conditions: &str, params: &mut Vec<Param<'_>>) -> String {
        let (first, last, summary) = (params.len() + 1, params.len() + 2, Self::READ.summary);
        if let [Part { from, to }] = parts {
            params.extend([Param::Id(*from), Param::Id(*to)]);
            return format!(
                "{summary} WHERE e.id BETWEEN ${first} AND ${last}{conditions} ORDER BY e.id DESC LIMIT $1"
            );
        }
        let (from, to): (Vec<EventId>, Vec<EventId>) = parts.iter().map(|part| (part.from, part.to)).unzip();
        params.push(Param::Table(vec![Column::Ids(from), Column::Ids(to)]));
        format!(
            "SELECT f.* FROM unnest(${first}::uuid[], ${last}::uuid[]) AS p(first, last) CROSS JOIN LATERAL (
               {summary} WHERE e.id BETWEEN p.first AND p.last{conditions} ORDER BY e.id DESC LIMIT $1) f"
        )
    }

    async fn newest_in(
        session: &mut Session,
        status: EventStatus,
        within: Part,
        limit: i64,
    ) -> Result<Vec<EventId>, EngineError> {
        // The first condition is that of a partial index.
        let indexed = match status {
            EventStatus::Ready | EventStatus::Retrying => "state IN ('ready', 'retrying')",
            EventStatus::Parked | EventStatus::Superseded | EventStatus::Skipped => {
                "state IN ('parked', 'superseded', 'skipped')"
            }
            _ => "true",
        };
        let sql = format!(
            "SELECT event FROM oncehook.deliveries WHERE {indexed} AND state = '{}' AND event BETWEEN $1 AND $2
              GROUP BY event ORDER BY event DESC LIMIT $3",
            status.as_str()
        );
        let asked = [Param::from(within.from), within.to.into(), limit.into()];
        ids(&engine::Session::rows(session, &sql, &asked).await?)
    }
}

/// The next id.
pub(super) fn next_id(id: Uuid) -> Uuid {
    uuid(behind(event_id(id)))
}

/// Removes from the index the buckets in which no event is left, among those of events that were just looked at. The others
/// need not be asked for: the transaction that removes the last event of a bucket has looked at it.
pub(super) async fn forget_buckets(session: &Session, first: Uuid, last: Uuid) -> Result<(), EngineError> {
    let (first, last) = (bucket_of(event_id(first)), bucket_of(event_id(last)));
    remove_buckets(session, first, last + 1, i64::MAX).await?;
    Ok(())
}

/// Removes rows of buckets in which no event is left, from one bucket to another (excluded), at most `limit` rows. Returns how
/// many. A late event adds rows of its own, which this statement does not see before they are committed with the event.
async fn remove_buckets(session: &Session, from: i64, to: i64, limit: i64) -> Result<u64, EngineError> {
    let sql = "DELETE FROM oncehook.buckets WHERE ctid = ANY (ARRAY (
                 SELECT b.ctid FROM oncehook.buckets b
                  WHERE b.bucket >= $1 AND b.bucket < $2
                    AND (SELECT true FROM oncehook.events e WHERE e.id >= oncehook.first_id(b.bucket * 4096000)
                            AND e.id < oncehook.first_id((b.bucket + 1) * 4096000) LIMIT 1) IS NULL
                  LIMIT $3))";
    session.change(sql, &[&from, &to, &limit]).await
}

/// Buckets that are looked at by one statement.
const BUCKETS_SWEPT: i64 = 512;

/// Removes rows of buckets in which no event is left, between two ids. Returns from which id on there may be more.
pub(super) async fn sweep_buckets(
    session: &Session,
    (from, beyond): (Uuid, Uuid),
    limit: i64,
) -> Result<Option<Uuid>, EngineError> {
    let (bucket, end) = (bucket_of(event_id(from)), bucket_of(event_id(beyond)));
    // A day does not begin with a bucket; one that two days share goes with the later day.
    let next = (bucket + BUCKETS_SWEPT).min(end);
    let gone = remove_buckets(session, bucket, next, limit).await?;
    if i64::try_from(gone).unwrap_or(i64::MAX) >= limit {
        return Ok(Some(from));
    }
    Ok((next < end).then(|| uuid(first_of_bucket(next))))
}
