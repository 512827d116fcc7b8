//! The statements of an append on PostgreSQL.
//!
//! Where a statement needs the time, its first parameter is the time that a test gave, or null: then the database's own
//! clock counts.

use std::collections::HashSet;

use uuid::Uuid;

use super::connection::{EngineError, Session};
use super::value::{bound, flat};
use super::{Postgres, days};
use crate::event::{EventId, NewEvent};
use crate::journal::decide::append::Holder;
use crate::journal::server::append::{self, AppendSql, Appends, Stored, known_keys, sort_by_key};
use crate::journal::server::engine::{AppendContext, Candidate};
use crate::journal::server::read::buckets::Occurrences;
use crate::journal::server::value::{Column, Param};
use crate::journal::tally::{Pending, latest_text};

pub(super) fn uuid(id: EventId) -> Uuid {
    Uuid::from_bytes(*id.as_bytes())
}

pub(super) fn event_id(uuid: Uuid) -> EventId {
    EventId::from_bytes(*uuid.as_bytes())
}

/// How many batches are stored one key at a time, because known keys are to be expected among them.
#[derive(Debug, Default)]
pub(in crate::journal) struct Wary(u32);

/// After a batch that was taken to be new and was not: a guess that fails costs its work, and a line in the server's log.
const WARY_FOR: u32 = 256;

/// The constraint that makes a key unique.
const UNIQUE_KEY: &str = "keys_once";

impl Appends for Postgres {
    type LaneMemory = Wary;

    const APPEND_COMMITS: bool = true;
    const APPEND: AppendSql = AppendSql {
        // With synchronous replicas, a row can be seen here that no replica has yet: its own commit was interrupted while it
        // waited for them. The sender that is answered by it is promised that it is safe. So the statement leaves a mark in the
        // log behind all rows that it has seen, and its commit waits until the replicas have that. The limit keeps the planner
        // from reading the whole ledger for many keys.
        known_keys: "SELECT t.place, k.event, k.digest, k.expires_at,
                            (SELECT CASE WHEN current_setting('synchronous_standby_names') <> ''
                                         THEN pg_logical_emit_message(true, 'oncehook', '') END)
                       FROM unnest($1::text[], $2::bytea[]) WITH ORDINALITY AS t(source, key, place)
                      CROSS JOIN LATERAL (SELECT event, digest, expires_at FROM oncehook.keys k
                                           WHERE k.source = t.source AND k.key = t.key LIMIT 1) k",
        insert_key: "INSERT INTO oncehook.keys (source, key, event, digest, first_seen, expires_at)
                     VALUES ($1, $2, gen_random_uuid(), decode(repeat('00', 32), 'hex'), 1, 1)",
        lock_event: None,
        keep_conflict: "
            INSERT INTO oncehook.conflicts AS c (event, digest, count, first_at, last_at, headers, body)
            SELECT $1, CASE WHEN keep THEN $2 ELSE ''::bytea END, 1, $3, $3, CASE WHEN keep THEN $4 ELSE ''::bytea END,
                   CASE WHEN keep THEN $5 ELSE ''::bytea END
              FROM (SELECT coalesce(bool_or(digest = $2), false)
                           OR count(*) FILTER (WHERE digest <> ''::bytea) < $6 AS keep
                      FROM oncehook.conflicts WHERE event = $1) kept
             WHERE EXISTS (SELECT 1 FROM oncehook.events WHERE id = $1)
            ON CONFLICT (event, digest) DO UPDATE SET count = c.count + 1, last_at = excluded.last_at",
        flag_conflict: "INSERT INTO oncehook.flags (event, flag, at)
                        SELECT $1, 'conflict', $2 WHERE EXISTS (SELECT 1 FROM oncehook.events WHERE id = $1)
                        ON CONFLICT (event, flag) DO NOTHING",
        add_totals: "INSERT INTO oncehook.totals AS t (source, shard, events, duplicates, conflicts, quarantined)
                     SELECT s.source, $1, s.events, s.duplicates, s.conflicts, s.quarantined
                       FROM unnest($2::text[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[])
                         AS s(source, events, duplicates, conflicts, quarantined)
                     ON CONFLICT (source, shard) DO UPDATE
                        SET events = t.events + excluded.events, duplicates = t.duplicates + excluded.duplicates,
                            conflicts = t.conflicts + excluded.conflicts, quarantined = t.quarantined + excluded.quarantined",
    };

    async fn append(
        &self,
        session: &mut Session,
        wary: &mut Wary,
        context: AppendContext,
        candidates: &[Candidate<'_>],
    ) -> Result<Stored, EngineError> {
        match store(session, wary, context, candidates).await {
            Err(error) => Err(days::give_way(session, error).await),
            stored => stored,
        }
    }

    async fn store_duplicates(session: &mut Session, pending: &[(EventId, &Pending)]) -> Result<(), EngineError> {
        let latest: Vec<String> = pending.iter().map(|(_, pending)| latest_text(&pending.latest)).collect();
        let mut rows = append::duplicate_rows(pending);
        rows.push(Column::texts(latest.iter().map(String::as_str)));
        session.change(DUPLICATES, &bound(&flat(&[Param::Table(rows)]))).await?;
        Ok(())
    }

    /// Every batch takes the careful way.
    fn careful() -> Wary {
        Wary(u32::MAX)
    }

    fn is_refused_key(error: &EngineError) -> bool {
        error.has_code("23505") && error.constraint.as_deref() == Some(UNIQUE_KEY)
    }
}

/// Stores the candidates whose keys are new, and says of each who holds its key. One transaction for what is new; who holds the
/// other keys is asked afterwards, because the row of a concurrent winner is not visible to the statement that lost to it.
async fn store(
    session: &mut Session,
    wary: &mut Wary,
    context: AppendContext,
    candidates: &[Candidate<'_>],
) -> Result<Stored, EngineError> {
    let late = late_rows(candidates, context.about_now);
    let mut sorted = candidates.to_vec();
    let are_plain = candidates.len() > 1 && !candidates.iter().any(|candidate| is_odd(candidate.event));
    let guessed = wary.0 == 0 && late.is_none() && are_plain;
    wary.0 = wary.0.saturating_sub(1);
    let won = if guessed && append_new(session, context, &mut sorted).await? {
        candidates.iter().map(|candidate| candidate.id).collect()
    } else {
        if guessed {
            wary.0 = WARY_FOR;
        }
        append(session, context, late, &mut sorted).await?
    };
    session.check_replicated()?;
    let mut stored = Stored { holders: vec![Holder::Unknown; candidates.len()], trouble: None };
    let (mut lost, mut places) = (Vec::new(), Vec::new());
    for (candidate, holder) in candidates.iter().zip(&mut stored.holders) {
        if won.contains(&candidate.id) {
            *holder = Holder::Stored(candidate.known());
        } else {
            lost.push(candidate.key());
            places.push(holder);
        }
    }
    if !lost.is_empty() {
        let known = known_keys::<Postgres>(session, lost.into_iter()).await;
        match known.and_then(|known| session.check_replicated().map(|()| known)) {
            Ok(known) => {
                let found =
                    places.into_iter().enumerate().filter_map(|(place, holder)| Some((holder, known.get(&place)?)));
                found.for_each(|(holder, known)| *holder = Holder::Known(*known));
            }
            Err(error) => stored.trouble = Some(error),
        }
    }
    Ok(stored)
}

/// Whether an event is held, or has a key that its provider did not sign.
fn is_odd(event: &NewEvent) -> bool {
    !event.key_signed || event.quarantine.is_some()
}

/// What late candidates add to the search index: event, value, bucket, milliseconds. `None`: none of them is late.
fn late_rows<'p>(candidates: &[Candidate<'_>], now: i64) -> Option<Param<'p>> {
    let (mut events, mut rows) = (Vec::new(), Vec::new());
    for Candidate { id, event } in candidates {
        let mut found = Occurrences::default();
        found.add_late(now, *id, event);
        rows.extend(found.rows());
        events.resize(rows.len(), *id);
    }
    let ints = |of: fn(&[i64; 4]) -> i64| Column::ints(rows.iter().map(of));
    let columns = [
        Column::Ids(events),
        ints(|[value, ..]| *value),
        ints(|[_, bucket, ..]| *bucket),
        ints(|[.., millis, _]| *millis),
    ];
    (!rows.is_empty()).then(|| Param::Table(columns.into()))
}

/// Stores the candidates whose keys are new, all in one statement that is its own transaction, and returns their ids. The
/// candidates have different keys.
///
/// - The unique key decides; its columns are named, so without a valid unique index on exactly these this is an error.
/// - The row of a concurrent winner is not visible to this statement; [`known_keys`] asks afterwards.
async fn append(
    session: &Session,
    context: AppendContext,
    late: Option<Param<'_>>,
    candidates: &mut [Candidate<'_>],
) -> Result<HashSet<EventId>, EngineError> {
    sort_by_key(candidates);
    let events = || candidates.iter().map(|candidate| candidate.event);
    let held = events().map(|event| event.quarantine.map(|reason| reason.as_str())).collect();
    let odd = if events().any(is_odd) { APPEND_ODD } else { "" };
    let sql = [APPEND, odd, if late.is_some() { APPEND_LATE } else { "" }, " SELECT event FROM won"].concat();
    let mut params = vec![
        context.given.into(),
        context.shard.into(),
        Param::Table(append::event_rows(candidates)),
        Param::Table(vec![append::expiries(candidates), Column::Texts(held)]),
        Param::Table(append::delivery_rows(candidates)),
    ];
    params.extend(late);
    let won = session.rows(&sql, &bound(&flat(&params))).await?;
    Ok(won.iter().map(|row| event_id(row.get(0))).collect())
}

/// Stores candidates of which all are taken to be new, and returns whether they were: if one was not, nothing is stored. That
/// costs the server a quarter less than [`append`]. Not for held events, unsigned keys or late ones.
///
/// The unique key decides here, too. The first key is inserted with its columns named, so that without a valid unique index on exactly
/// these this is an error; the others are refused by that index.
async fn append_new(
    session: &Session,
    context: AppendContext,
    candidates: &mut [Candidate<'_>],
) -> Result<bool, EngineError> {
    sort_by_key(candidates);
    let keys = append::key_rows(candidates);
    // Everything else goes to the end of its index, in the order of ids.
    candidates.sort_unstable_by_key(|candidate| candidate.id);
    let params = [
        context.given.into(),
        context.shard.into(),
        Param::Table(keys),
        Param::Table(append::event_rows(candidates)),
        Param::Table(append::delivery_rows(candidates)),
    ];
    match session.rows(APPEND_NEW, &bound(&flat(&params))).await {
        Ok(first) => Ok(!first.is_empty()),
        Err(error) if error.constraint.as_deref() == Some(UNIQUE_KEY) => Ok(false),
        Err(error) => Err(error),
    }
}

const APPEND_NEW: &str = "
WITH first AS (
  INSERT INTO oncehook.keys (event, source, key, digest, first_seen, expires_at)
  SELECT * FROM unnest($3::uuid[], $4::text[], $5::bytea[], $6::bytea[], $7::bigint[], $8::bigint[]) LIMIT 1
  ON CONFLICT (source, key) DO NOTHING
  RETURNING event
), others AS (
  INSERT INTO oncehook.keys (event, source, key, digest, first_seen, expires_at)
  SELECT * FROM unnest($3::uuid[], $4::text[], $5::bytea[], $6::bytea[], $7::bigint[], $8::bigint[])
   WHERE EXISTS (SELECT 1 FROM first) OFFSET 1
), stored AS (
  INSERT INTO oncehook.events (id, source, key, key_signed, type, entity, occurred_at, received_at, integrity, digest,
                               headers, body, version)
  SELECT * FROM unnest($9::uuid[], $10::text[], $11::bytea[], $12::boolean[], $13::text[], $14::text[], $15::bigint[],
                       $16::bigint[], $17::text[], $18::bytea[], $19::bytea[], $20::bytea[], $21::bigint[])
   WHERE EXISTS (SELECT 1 FROM first)
), delivered AS (
  INSERT INTO oncehook.deliveries (event, route, state, run_at, entity, version)
  SELECT r.event, r.route, 'ready', (SELECT coalesce($1::bigint, oncehook.micros())), r.entity, r.version
    FROM unnest($22::uuid[], $23::text[], $24::text[], $25::bigint[]) AS r(event, route, entity, version)
   WHERE EXISTS (SELECT 1 FROM first)
), counted AS (
  INSERT INTO oncehook.totals AS t (source, shard, events)
  SELECT source, $2, count(*) FROM unnest($4::text[]) AS s(source) WHERE EXISTS (SELECT 1 FROM first)
   GROUP BY source ORDER BY source
  ON CONFLICT (source, shard) DO UPDATE SET events = t.events + excluded.events
)
SELECT event FROM first";

/// What every new event needs.
const APPEND: &str = "
WITH input AS MATERIALIZED (
  SELECT * FROM unnest($3::uuid[], $4::text[], $5::bytea[], $6::boolean[], $7::text[], $8::text[], $9::bigint[],
                       $10::bigint[], $11::text[], $12::bytea[], $13::bytea[], $14::bytea[], $15::bigint[], $16::bigint[],
                       $17::text[])
    AS t(id, source, key, key_signed, type, entity, occurred_at, received_at, integrity, digest, headers, body, version,
         expires_at, held)
), won AS (
  INSERT INTO oncehook.keys (source, key, event, digest, first_seen, expires_at)
  SELECT source, key, id, digest, received_at, expires_at FROM input
  ON CONFLICT (source, key) DO NOTHING
  RETURNING event
), stored AS (
  INSERT INTO oncehook.events (id, source, key, key_signed, type, entity, occurred_at, received_at, integrity, digest,
                               headers, body, version)
  SELECT id, source, key, key_signed, type, entity, occurred_at, received_at, integrity, digest, headers, body, version
    FROM input WHERE id IN (SELECT event FROM won)
), delivered AS (
  -- The event is new, so its deliveries are: a conflict here is a broken journal, and an error.
  INSERT INTO oncehook.deliveries (event, route, state, run_at, entity, version)
  SELECT r.event, r.route, 'ready', (SELECT coalesce($1::bigint, oncehook.micros())), r.entity, r.version
    FROM unnest($18::uuid[], $19::text[], $20::text[], $21::bigint[]) AS r(event, route, entity, version)
   WHERE r.event IN (SELECT event FROM won)
), counted AS (
  INSERT INTO oncehook.totals AS t (source, shard, events, quarantined)
  SELECT source, $2, count(*), count(held) FROM input WHERE id IN (SELECT event FROM won)
   GROUP BY source ORDER BY source
  ON CONFLICT (source, shard) DO UPDATE
     SET events = t.events + excluded.events, quarantined = t.quarantined + excluded.quarantined
)";

/// What is needed besides if some of the batch are held, or have keys that nobody signed. Batches without such do without
/// it: every part of a statement costs, also where it finds nothing to do.
const APPEND_ODD: &str = ", first_bodies AS (
  -- The first event with a body owns the row; in the order of ids where one batch holds several.
  INSERT INTO oncehook.bodies (source, digest, event)
  SELECT source, digest, id FROM input WHERE NOT key_signed AND id IN (SELECT event FROM won)
   ORDER BY source, digest, id
  ON CONFLICT (source, digest) DO NOTHING
  RETURNING event
), flagged AS (
  INSERT INTO oncehook.flags (event, flag, at, reason)
  SELECT id, 'quarantined', received_at, held FROM input WHERE held IS NOT NULL AND id IN (SELECT event FROM won)
  UNION ALL
  SELECT id, 'suspected_replay', received_at, NULL FROM input
   WHERE id IN (SELECT event FROM won)
     AND (held = 'suspected_replay' OR NOT key_signed AND id NOT IN (SELECT event FROM first_bodies))
)";

/// What is needed besides if some of the batch are late: the search index may have passed their buckets already.
const APPEND_LATE: &str = ", late AS (
  INSERT INTO oncehook.buckets (value, bucket, first, last)
  SELECT value, bucket, millis, millis
    FROM unnest($22::uuid[], $23::bigint[], $24::bigint[], $25::bigint[]) AS l(event, value, bucket, millis)
   WHERE event IN (SELECT event FROM won)
)";

const DUPLICATES: &str = "
INSERT INTO oncehook.duplicates AS d (event, journal, memory, redis, first_at, last_at, latest)
SELECT t.event, t.journal, t.memory, t.redis, t.first_at, t.last_at, t.latest::jsonb
  FROM unnest($1::uuid[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[], $7::text[])
    AS t(event, journal, memory, redis, first_at, last_at, latest)
 -- Looked up one by one, in its day; EXISTS might read all days.
 WHERE (SELECT true FROM oncehook.events e WHERE e.id = t.event LIMIT 1)
ON CONFLICT (event) DO UPDATE
   SET journal = d.journal + excluded.journal,
       memory  = d.memory + excluded.memory,
       redis   = d.redis + excluded.redis,
       last_at = greatest(d.last_at, excluded.last_at),
       -- The latest eight of both.
       latest  = (SELECT jsonb_agg(seen ORDER BY place)
                    FROM (SELECT seen, place
                            FROM jsonb_array_elements(d.latest || excluded.latest) WITH ORDINALITY AS j(seen, place)
                           ORDER BY place DESC LIMIT 8) latest)";
