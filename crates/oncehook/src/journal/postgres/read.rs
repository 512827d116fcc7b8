//! The texts by which people read, the search index, and what removes the index with its events.
//!
//! A limit in a subquery keeps the planner from reading a whole table where one row is asked for.

use uuid::Uuid;

use super::Postgres;
use super::connection::{EngineError, Session};
use super::queries::{event_id, uuid};
use crate::event::EventId;
use crate::journal::EventStatus;
use crate::journal::server::read::Reads;
use crate::journal::sql;
use crate::journal::sql::buckets::{Part, behind, bucket_of, first_of_bucket, ids};
use crate::journal::sql::story::{Tells, status};
use crate::journal::sql::value::{Column, Param};

impl Tells for Session {}

impl Reads for Postgres {
    const STATUS_IS: &'static str = concat!(status!(), " =");
    const BY_KEY: &'static str = "SELECT k.event FROM (SELECT DISTINCT source FROM oncehook.totals) t
        CROSS JOIN LATERAL (SELECT event FROM oncehook.keys k WHERE k.source = t.source AND k.key = $1 LIMIT 1) k";
    const BUCKETS: &'static str = "
        SELECT bucket, min(first), max(last) FROM oncehook.buckets WHERE value = $1 AND bucket BETWEEN $2 AND $3
         GROUP BY bucket ORDER BY bucket DESC LIMIT $4";
    const ADD_TO_BUCKETS: &'static str = "INSERT INTO oncehook.buckets (value, bucket, first, last)
        SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::int[], $4::int[])";

    fn scan(parts: &[Part], conditions: &str, params: &mut Vec<Param<'_>>) -> String {
        let (first, last, summary) = (params.len() + 1, params.len() + 2, Session::SUMMARY);
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
        ids(&sql::Session::rows(session, &sql, &asked).await?)
    }
}

/// The next id.
pub(super) fn next_id(id: Uuid) -> Uuid {
    uuid(behind(event_id(id)))
}

/// Removes rows of buckets in which no event is left, from one bucket to another (excluded), at most `limit` rows. Returns how
/// many. A late event adds rows of its own, which this statement does not see before they are committed with the event.
pub(super) async fn remove_buckets(session: &Session, from: i64, to: i64, limit: i64) -> Result<u64, EngineError> {
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
