//! The statements of an append, one named function each. What people ask is in `reader`, what workers do in `queue`.
//!
//! Where a statement needs the time, its first parameter is the time that a test gave, or null: then the database's own
//! clock counts.

use std::collections::{HashMap, HashSet};

use oncehook_verify::UnixMicros;
use tokio_postgres::types::ToSql;
use uuid::Uuid;

use super::connection::{EngineError, Session};
use crate::event::{EventId, NewEvent};
use crate::journal::decide::append::{Holder, Known};
use crate::journal::server::engine::{AppendContext, Candidate, Refusal, Stored};
use crate::journal::server::read::buckets::Occurrences;
use crate::journal::tally::{Pending, Tally, latest_text};
use crate::journal::{CONFLICTS_KEPT, PROBE_SOURCE};

pub(super) fn uuid(id: EventId) -> Uuid {
    Uuid::from_bytes(*id.as_bytes())
}

pub(super) fn event_id(uuid: Uuid) -> EventId {
    EventId::from_bytes(*uuid.as_bytes())
}

/// How many batches are stored one key at a time, because known keys are to be expected among them.
#[derive(Debug, Default)]
pub(in crate::journal) struct Wary(u32);

impl Wary {
    /// Every batch.
    pub(super) fn always() -> Self {
        Self(u32::MAX)
    }
}

/// After a batch that was taken to be new and was not: a guess that fails costs its work, and a line in the server's log.
const WARY_FOR: u32 = 256;

/// Stores the candidates whose keys are new, and says of each who holds its key. One transaction for what is new; who holds the
/// other keys is asked afterwards, because the row of a concurrent winner is not visible to the statement that lost to it.
pub(super) async fn store(
    session: &Session,
    wary: &mut Wary,
    context: AppendContext,
    candidates: &[Candidate<'_>],
) -> Result<Stored, EngineError> {
    let AppendContext { given, about_now, shard } = context;
    let shard = i16::try_from(shard).unwrap_or(0);
    let late = Late::of(candidates, about_now);
    let mut sorted = candidates.to_vec();
    let guessed = wary.0 == 0 && late.events.is_empty() && are_plain(candidates);
    wary.0 = wary.0.saturating_sub(1);
    let won = if guessed && append_new(session, given, shard, &mut sorted).await? {
        candidates.iter().map(|candidate| candidate.id).collect()
    } else {
        if guessed {
            wary.0 = WARY_FOR;
        }
        append(session, given, shard, &late, &mut sorted).await?
    };
    session.check_replicated()?;
    let holder = |candidate: &Candidate<'_>| match won.contains(&candidate.id) {
        true => Holder::Stored(candidate.known()),
        false => Holder::Unknown,
    };
    let mut holders: Vec<Holder> = candidates.iter().map(holder).collect();
    let lost: Vec<(&mut Holder, &NewEvent)> = holders
        .iter_mut()
        .zip(candidates)
        .filter(|(holder, _)| **holder == Holder::Unknown)
        .map(|(holder, candidate)| (holder, candidate.event))
        .collect();
    let mut trouble = None;
    if !lost.is_empty() {
        let keys: Vec<(&str, &[u8])> =
            lost.iter().map(|(_, event)| (event.source.as_str(), event.key.as_bytes())).collect();
        let known = first_ids(session, &keys).await;
        match known.and_then(|known| session.check_replicated().map(|()| known)) {
            Ok(known) => {
                for (place, (holder, _)) in lost.into_iter().enumerate() {
                    if let Some(known) = known.get(&place) {
                        *holder = Holder::Known(*known);
                    }
                }
            }
            Err(error) => trouble = Some(error),
        }
    }
    Ok(Stored { holders, trouble })
}

/// A plain insert of a known key must fail, and must name the constraint.
pub(super) async fn refuses_by_name(
    session: &Session,
    key: &oncehook_verify::EventKey,
) -> Result<Refusal, EngineError> {
    let sql = "INSERT INTO oncehook.keys (source, key, event, digest, first_seen, expires_at)
               VALUES ($1, $2, gen_random_uuid(), decode(repeat('00', 32), 'hex'), 1, 1)";
    match session.change(sql, &[&PROBE_SOURCE, &key.as_bytes()]).await {
        Ok(_) => Ok(Refusal::Stored),
        Err(error) if error.is_collision() => Err(error),
        Err(error) if error.has_code("23505") && error.constraint.as_deref() == Some(UNIQUE_KEY) => Ok(Refusal::ByKey),
        Err(error) => Ok(Refusal::Otherwise(error.message)),
    }
}

/// The constraint that makes a key unique.
const UNIQUE_KEY: &str = "keys_once";

/// A batch as the columns of its statement.
struct Batch<'e> {
    ids: Vec<Uuid>,
    sources: Vec<&'e str>,
    keys: Vec<&'e [u8]>,
    signed: Vec<bool>,
    types: Vec<Option<&'e str>>,
    entities: Vec<Option<&'e str>>,
    occurred: Vec<Option<i64>>,
    received: Vec<i64>,
    expires: Vec<i64>,
    integrity: Vec<&'e str>,
    digests: Vec<&'e [u8]>,
    headers: Vec<&'e [u8]>,
    bodies: Vec<&'e [u8]>,
    versions: Vec<Option<i64>>,
    /// Of each delivery.
    routed: Vec<Uuid>,
    routes: Vec<&'e str>,
    in_line: Vec<Option<&'e str>>,
    places: Vec<Option<i64>>,
}

/// The rows of the ledger, as columns.
struct Keys<'e> {
    ids: Vec<Uuid>,
    sources: Vec<&'e str>,
    keys: Vec<&'e [u8]>,
    digests: Vec<&'e [u8]>,
    received: Vec<i64>,
    expires: Vec<i64>,
}

impl<'e> Keys<'e> {
    fn of(candidates: &[Candidate<'e>]) -> Self {
        let events = || candidates.iter().map(|candidate| candidate.event);
        Self {
            ids: candidates.iter().map(|candidate| uuid(candidate.id)).collect(),
            sources: events().map(|event| event.source.as_str()).collect(),
            keys: events().map(|event| event.key.as_bytes()).collect(),
            digests: events().map(|event| event.digest.as_slice()).collect(),
            received: events().map(|event| event.received_at.0).collect(),
            expires: candidates.iter().map(|one| one.event.remembered_until(one.id).0).collect(),
        }
    }
}

/// Two batches that share keys wait for each other in the same order instead of for ever.
fn sort_by_key(candidates: &mut [Candidate<'_>]) {
    candidates.sort_unstable_by(|a, b| {
        (a.event.source.as_str(), a.event.key.as_bytes()).cmp(&(b.event.source.as_str(), b.event.key.as_bytes()))
    });
}

impl<'e> Batch<'e> {
    fn of(candidates: &[Candidate<'e>]) -> Self {
        let events = || candidates.iter().map(|candidate| candidate.event);
        let mut batch = Self {
            ids: candidates.iter().map(|candidate| uuid(candidate.id)).collect(),
            sources: events().map(|event| event.source.as_str()).collect(),
            keys: events().map(|event| event.key.as_bytes()).collect(),
            signed: events().map(|event| event.key_signed).collect(),
            types: events().map(|event| event.kind.as_deref()).collect(),
            entities: events().map(|event| event.entity.as_deref()).collect(),
            occurred: events().map(|event| event.occurred_at.map(|at| at.0)).collect(),
            received: events().map(|event| event.received_at.0).collect(),
            expires: candidates.iter().map(|one| one.event.remembered_until(one.id).0).collect(),
            integrity: events().map(|event| event.integrity.as_str()).collect(),
            digests: events().map(|event| event.digest.as_slice()).collect(),
            headers: events().map(|event| event.headers.as_ref()).collect(),
            bodies: events().map(|event| event.body.as_ref()).collect(),
            versions: events().map(|event| event.version).collect(),
            routed: Vec::new(),
            routes: Vec::new(),
            in_line: Vec::new(),
            places: Vec::new(),
        };
        // Held events have no deliveries until they are released.
        for Candidate { id, event } in candidates.iter().filter(|one| one.event.quarantine.is_none()) {
            for route in &event.routes {
                batch.routed.push(uuid(*id));
                batch.routes.push(route.as_str());
                batch.in_line.push(event.entity.as_deref().filter(|_| event.by_entity));
                batch.places.push(event.version.filter(|_| event.by_entity));
            }
        }
        batch
    }
}

/// Whether an event is held, or has a key that nobody signed.
fn is_odd(event: &NewEvent) -> bool {
    !event.key_signed || event.quarantine.is_some()
}

/// What late candidates add to the search index, as columns.
#[derive(Default)]
struct Late {
    events: Vec<Uuid>,
    values: Vec<i64>,
    buckets: Vec<i64>,
    millis: Vec<i64>,
}

impl Late {
    fn of(candidates: &[Candidate<'_>], now: i64) -> Self {
        let mut late = Self::default();
        for Candidate { id, event } in candidates {
            let mut found = Occurrences::default();
            found.add_late(now, *id, event);
            for [value, bucket, millis, _] in found.rows() {
                late.events.push(uuid(*id));
                late.values.push(value);
                late.buckets.push(bucket);
                late.millis.push(millis);
            }
        }
        late
    }
}

/// Stores the candidates whose keys are new, all in one statement that is its own transaction, and returns their ids. The
/// candidates have different keys.
///
/// - The unique key decides; its columns are named, so without a valid unique index on exactly these this is an error.
/// - The row of a concurrent winner is not visible to this statement; [`first_ids`] asks afterwards.
async fn append(
    session: &Session,
    given: Option<i64>,
    shard: i16,
    late: &Late,
    candidates: &mut [Candidate<'_>],
) -> Result<HashSet<EventId>, EngineError> {
    sort_by_key(candidates);
    let batch = Batch::of(candidates);
    let events = || candidates.iter().map(|candidate| candidate.event);
    let held: Vec<Option<&str>> = events().map(|event| event.quarantine.map(|reason| reason.as_str())).collect();
    let odd = if events().any(is_odd) { APPEND_ODD } else { "" };
    let sql = [APPEND, odd, if late.events.is_empty() { "" } else { APPEND_LATE }, APPENDED].concat();
    let Batch { ids, sources, keys, signed, types, entities, occurred, received, expires, integrity, .. } = &batch;
    let Batch { digests, headers, bodies, routed, routes, in_line, places, versions, .. } = &batch;
    let mut parameters: Vec<&(dyn ToSql + Sync)> = vec![
        &given, &shard, ids, sources, keys, signed, types, entities, occurred, received, expires, integrity, digests,
        headers, bodies, &held, routed, routes, in_line, places, versions,
    ];
    if !late.events.is_empty() {
        parameters.extend([&late.events as &(dyn ToSql + Sync), &late.values, &late.buckets, &late.millis]);
    }
    let won = session.rows(&sql, &parameters).await?;
    Ok(won.iter().map(|row| event_id(row.get(0))).collect())
}

/// Stores candidates of which all are taken to be new, and returns whether they were: if one was not, nothing is stored. That
/// costs the server a quarter less than [`append`]. Not for held events, unsigned keys or late ones.
///
/// The unique key decides here, too. The first key is inserted with its columns named, so that without a valid unique index on exactly
/// these this is an error; the others are refused by that index.
pub(super) async fn append_new(
    session: &Session,
    given: Option<i64>,
    shard: i16,
    candidates: &mut [Candidate<'_>],
) -> Result<bool, EngineError> {
    sort_by_key(candidates);
    let by_key = Keys::of(candidates);
    // Everything else goes to the end of its index, in the order of ids.
    candidates.sort_unstable_by_key(|candidate| candidate.id);
    let batch = Batch::of(candidates);
    let Batch { ids, sources, keys, signed, types, entities, occurred, received, integrity, .. } = &batch;
    let Batch { digests, headers, bodies, routed, routes, in_line, places, versions, .. } = &batch;
    let stored = session
        .rows(
            APPEND_NEW,
            &[
                &given,
                &shard,
                &by_key.ids,
                &by_key.sources,
                &by_key.keys,
                &by_key.digests,
                &by_key.received,
                &by_key.expires,
                ids,
                sources,
                keys,
                signed,
                types,
                entities,
                occurred,
                received,
                integrity,
                digests,
                headers,
                bodies,
                versions,
                routed,
                routes,
                in_line,
                places,
            ],
        )
        .await;
    match stored {
        Ok(first) => Ok(!first.is_empty()),
        Err(error) if error.constraint.as_deref() == Some(UNIQUE_KEY) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Whether [`append_new`] can store these.
pub(super) fn are_plain(candidates: &[Candidate<'_>]) -> bool {
    candidates.len() > 1 && !candidates.iter().any(|candidate| is_odd(candidate.event))
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
                       $10::bigint[], $11::bigint[], $12::text[], $13::bytea[], $14::bytea[], $15::bytea[], $16::text[],
                       $21::bigint[])
    AS t(id, source, key, key_signed, type, entity, occurred_at, received_at, expires_at, integrity, digest, headers, body,
         held, version)
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
    FROM unnest($17::uuid[], $18::text[], $19::text[], $20::bigint[]) AS r(event, route, entity, version)
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

const APPENDED: &str = " SELECT event FROM won";

/// Which events hold these keys, by place. A key that is not there was forgotten a moment ago.
///
/// With synchronous replicas, a row can be seen here that no replica has yet: its own commit was interrupted while it waited
/// for them. Whoever is told of it is told that it is safe. So the statement leaves a mark in the log behind all rows that
/// it has seen, and its commit waits until the replicas have that.
pub(super) async fn first_ids(session: &Session, keys: &[(&str, &[u8])]) -> Result<HashMap<usize, Known>, EngineError> {
    let sources: Vec<&str> = keys.iter().map(|(source, _)| *source).collect();
    let keys: Vec<&[u8]> = keys.iter().map(|(_, key)| *key).collect();
    // The limit keeps the planner from reading the whole ledger for many keys.
    let rows = session
        .rows(
            "SELECT t.place, k.event, k.digest, k.expires_at,
                    (SELECT CASE WHEN current_setting('synchronous_standby_names') <> ''
                                 THEN pg_logical_emit_message(true, 'oncehook', '') END)
               FROM unnest($1::text[], $2::bytea[]) WITH ORDINALITY AS t(source, key, place)
              CROSS JOIN LATERAL (SELECT event, digest, expires_at FROM oncehook.keys k
                                   WHERE k.source = t.source AND k.key = t.key LIMIT 1) k",
            &[&sources, &keys],
        )
        .await?;
    rows.iter()
        .map(|row| {
            let place = usize::try_from(row.get::<_, i64>(0) - 1).unwrap_or(usize::MAX);
            Ok((
                place,
                Known { event: event_id(row.get(1)), digest: digest(row.get(2))?, expires_at: UnixMicros(row.get(3)) },
            ))
        })
        .collect()
}

pub(super) fn digest(bytes: &[u8]) -> Result<[u8; 32], EngineError> {
    bytes.try_into().map_err(|_| EngineError::other("a digest in the journal is damaged"))
}

/// See [`Engine::keep_conflicts`](crate::journal::server::engine::Engine::keep_conflicts).
pub(super) async fn keep_conflicts(
    session: &Session,
    shard: i64,
    conflicts: &[(EventId, &NewEvent)],
) -> Result<(), EngineError> {
    let kept_at_most = i64::try_from(CONFLICTS_KEPT).unwrap_or(i64::MAX);
    let shard = i16::try_from(shard).unwrap_or(0);
    for (first, event) in conflicts.iter() {
        session
            .change(
                "INSERT INTO oncehook.conflicts AS c (event, digest, count, first_at, last_at, headers, body)
                 SELECT $1, CASE WHEN keep THEN $2 ELSE ''::bytea END, 1, $3, $3, CASE WHEN keep THEN $4 ELSE ''::bytea END,
                        CASE WHEN keep THEN $5 ELSE ''::bytea END
                   FROM (SELECT coalesce(bool_or(digest = $2), false)
                                OR count(*) FILTER (WHERE digest <> ''::bytea) < $6 AS keep
                           FROM oncehook.conflicts WHERE event = $1) kept
                  WHERE EXISTS (SELECT 1 FROM oncehook.events WHERE id = $1)
                 ON CONFLICT (event, digest) DO UPDATE SET count = c.count + 1, last_at = excluded.last_at",
                &[
                    &uuid(*first),
                    &&event.digest[..],
                    &event.received_at.0,
                    &&event.headers[..],
                    &&event.body[..],
                    &kept_at_most,
                ],
            )
            .await?;
        session
            .change(
                "INSERT INTO oncehook.flags (event, flag, at)
                 SELECT $1, 'conflict', $2 WHERE EXISTS (SELECT 1 FROM oncehook.events WHERE id = $1)
                 ON CONFLICT (event, flag) DO NOTHING",
                &[&uuid(*first), &event.received_at.0],
            )
            .await?;
    }
    let sources: Vec<&str> = conflicts.iter().map(|(_, event)| event.source.as_str()).collect();
    session
        .change(
            "INSERT INTO oncehook.totals AS t (source, shard, conflicts)
             SELECT source, $1, count(*) FROM unnest($2::text[]) AS s(source) GROUP BY source ORDER BY source
             ON CONFLICT (source, shard) DO UPDATE SET conflicts = t.conflicts + excluded.conflicts",
            &[&shard, &sources],
        )
        .await?;
    Ok(())
}

/// Adds counted duplicates to what is stored.
pub(super) async fn store_duplicates(session: &Session, shard: i64, tally: &Tally) -> Result<(), EngineError> {
    let mut pending: Vec<_> = tally.iter().collect();
    pending.sort_unstable_by_key(|(event, _)| **event);
    let events: Vec<Uuid> = pending.iter().map(|(event, _)| uuid(**event)).collect();
    let column = |of: fn(&Pending) -> u64| -> Vec<i64> {
        pending.iter().map(|(_, pending)| of(pending).cast_signed()).collect()
    };
    let (journal, memory) = (column(|pending| pending.journal), column(|pending| pending.memory));
    let (redis, counts) = (column(|pending| pending.redis), column(Pending::count));
    let first: Vec<i64> = pending.iter().map(|(_, pending)| pending.first_at.0).collect();
    let last: Vec<i64> = pending.iter().map(|(_, pending)| pending.last_at.0).collect();
    let latest: Vec<String> = pending.iter().map(|(_, pending)| latest_text(&pending.latest)).collect();
    let sources: Vec<&str> = pending.iter().map(|(_, pending)| pending.source.as_str()).collect();
    let shard = i16::try_from(shard).unwrap_or(0);
    session
        .change(
            "INSERT INTO oncehook.duplicates AS d (event, journal, memory, redis, first_at, last_at, latest)
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
                                        ORDER BY place DESC LIMIT 8) latest)",
            &[&events, &journal, &memory, &redis, &first, &last, &latest],
        )
        .await?;
    session
        .change(
            "INSERT INTO oncehook.totals AS t (source, shard, duplicates)
             SELECT source, $1, sum(count)::bigint FROM unnest($2::text[], $3::bigint[]) AS s(source, count)
              GROUP BY source ORDER BY source
             ON CONFLICT (source, shard) DO UPDATE SET duplicates = t.duplicates + excluded.duplicates",
            &[&shard, &sources, &counts],
        )
        .await?;
    Ok(())
}

/// The highest id that is stored, so that new ids stay above it. (If there are no events left, nothing is in the order
/// that they could disturb.)
pub(super) async fn last_id(session: &Session) -> Result<Option<EventId>, EngineError> {
    let row = session.row("SELECT id FROM oncehook.events ORDER BY id DESC LIMIT 1", &[]).await?;
    Ok(row.map(|row| event_id(row.get(0))))
}
