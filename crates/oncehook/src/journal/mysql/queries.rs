//! The statements of an append on MariaDB and MySQL.
//!
//! Where a statement needs the time, it is given the time of a test, or null: then the database's own clock counts.
//! Nothing here ends a transaction: sessions are always in one, and the caller ends it.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::PoisonError;

use mysql_async::Value;
use oncehook_verify::{EventKey, UnixMicros};

use super::Mysql;
use super::connection::{Insert, Session};
use super::engine_error::EngineError;
use super::value::id;
use crate::event::{EventId, SourceName};
use crate::journal::DuplicateSeen;
use crate::journal::decide::append::{Holder, Known};
use crate::journal::server::append::{self, AppendSql, Appends, Stored, Totals, add_totals, known_keys, sort_by_key};
use crate::journal::server::engine::{self, AppendContext, Candidate};
use crate::journal::server::index;
use crate::journal::server::read::buckets::Occurrences;
use crate::journal::server::value::{Column, Param, Row as _};
use crate::journal::tally::{Pending, latest_text, parse_latest, remember};

/// A key that was stored before and that must be refused now: the proof that the ledger still refuses.
#[derive(Debug, Clone)]
pub(in crate::journal) struct Witness {
    source: SourceName,
    key: EventKey,
    /// Until when the key can be relied on.
    until: UnixMicros,
}

/// A witness is not called any more this long before its key may be forgotten.
const WITNESS_MARGIN: i64 = 60_000_000;

impl Appends for Mysql {
    type LaneMemory = Option<Witness>;

    const APPEND_COMMITS: bool = false;
    const APPEND: AppendSql = AppendSql {
        known_keys: "SELECT t.place, k.event, k.digest, k.expires_at FROM {keys|$1}",
        insert_key: "INSERT INTO oncehook_keys (source, `key`, event, digest, first_seen, expires_at)
                     VALUES ($1, $2, REPEAT(x'00', 16), REPEAT(x'00', 32), 1, 1)",
        // Locked, so that two nodes count to eight together, and no node forgets the event meanwhile.
        lock_event: Some("SELECT 1 FROM oncehook_events WHERE id = $1 FOR UPDATE"),
        keep_conflict: "
            INSERT INTO oncehook_conflicts (event, digest, count, first_at, last_at, headers, body)
            SELECT CAST($1 AS BINARY(16)), IF(kept.fits, CAST($2 AS BINARY), ''), 1, $3, $3,
                   IF(kept.fits, CAST($4 AS BINARY), ''), IF(kept.fits, CAST($5 AS BINARY), '')
              FROM (SELECT COALESCE(SUM(digest = $2), 0) > 0 OR COALESCE(SUM(digest <> ''), 0) < $6 AS fits
                      FROM oncehook_conflicts WHERE event = $1) kept
            ON DUPLICATE KEY UPDATE count = oncehook_conflicts.count + 1, last_at = VALUES(last_at)",
        flag_conflict: "INSERT INTO oncehook_flags (event, flag, at) VALUES ($1, 'conflict', $2)
                        ON DUPLICATE KEY UPDATE at = oncehook_flags.at",
        add_totals: "
            INSERT INTO oncehook_totals (source, shard, events, duplicates, conflicts, quarantined)
            SELECT t.source, $1, t.fresh, t.copies, t.others, t.held
              FROM JSON_TABLE($2, '$[*]' COLUMNS (source VARCHAR(64) CHARACTER SET utf8mb4 PATH '$[0]',
                     fresh BIGINT PATH '$[1]', copies BIGINT PATH '$[2]', others BIGINT PATH '$[3]', held BIGINT PATH '$[4]')) t
            ON DUPLICATE KEY UPDATE events = events + VALUES(events), duplicates = duplicates + VALUES(duplicates),
                    conflicts = conflicts + VALUES(conflicts), quarantined = quarantined + VALUES(quarantined)",
    };

    /// The first thing is to call the lane's witness.
    async fn append(
        &self,
        session: &mut Session,
        witness: &mut Option<Witness>,
        context: AppendContext,
        candidates: &[Candidate<'_>],
    ) -> Result<Stored, EngineError> {
        // One of the lane's own, because a called row is held until the commit; the first time another lane's will do.
        let others = || self.witness.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let called = witness.clone().or_else(others).filter(|called| called.until.0 > context.about_now);
        if let Some(called) = &called
            && !refuses(session, called).await?
        {
            // Another node has forgotten the witness' key. The batch is stored without one.
            session.run("ROLLBACK").await?;
        }
        let holders = take_keys(session, candidates).await?;
        let new = candidates.iter().zip(&holders).filter(|(_, holder)| matches!(holder, Holder::Stored(_)));
        let mut new: Vec<Candidate<'_>> = new.map(|(candidate, _)| *candidate).collect();
        let stored = Stored { holders, trouble: None };
        let Some(last) = new.last().copied() else { return Ok(stored) };
        // In the order of their ids, so that the table grows at its end.
        new.sort_unstable_by_key(|candidate| candidate.id);
        store(session, context, &new).await?;
        let until = UnixMicros(last.known().expires_at.0.saturating_sub(WITNESS_MARGIN));
        // If the commit fails after all, the next batch finds this key unknown, and goes on without a witness.
        let next = Some(Witness { source: last.event.source.clone(), key: last.event.key.clone(), until });
        if witness.is_none() {
            self.witness.lock().unwrap_or_else(PoisonError::into_inner).clone_from(&next);
        }
        *witness = next;
        Ok(stored)
    }

    async fn store_duplicates(session: &mut Session, pending: &[(EventId, &Pending)]) -> Result<(), EngineError> {
        let mut rows = append::duplicate_rows(pending);
        // The rows are made or locked first, so that the latest few are read as they are when they are written.
        engine::Session::change(session, MAKE_DUPLICATES, &[Param::Table(rows.clone())]).await?;
        let sql = "SELECT d.event, d.latest FROM {ids|$1}
                   STRAIGHT_JOIN oncehook_duplicates d ON d.event = UNHEX(t.id)";
        let mut stored: HashMap<EventId, VecDeque<DuplicateSeen>> = HashMap::new();
        for row in engine::Session::rows(session, sql, &[Param::ids(pending.iter().map(|(event, _)| *event))]).await? {
            stored.insert(row.event(0)?, parse_latest(&row.text(1)?));
        }
        let merged = |(event, pending): &(EventId, &Pending)| {
            let mut latest = stored.remove(event).unwrap_or_default();
            pending.latest.iter().for_each(|seen| remember(&mut latest, *seen));
            latest_text(&latest)
        };
        let latest: Vec<String> = pending.iter().map(merged).collect();
        rows.push(Column::texts(latest.iter().map(String::as_str)));
        engine::Session::change(session, ADD_DUPLICATES, &[Param::Table(rows)]).await?;
        Ok(())
    }

    /// The name of a primary key is given. MySQL puts the table's name before that of the key.
    fn is_refused_key(error: &EngineError) -> bool {
        error.has_code("1062") && error.message.replace("oncehook_keys.", "").contains("for key 'PRIMARY'")
    }
}

/// The ledger refuses a known key by changing nothing. The table has one unique key, so it is that one which is meant; that
/// no one has added another or dropped this one is what [`refuses`], the schema check and the self-test are for.
///
/// This is not `INSERT IGNORE`, which would also swallow what does not fit a column, and not `RETURNING`, which MySQL does not
/// have. A row that was inserted counts 1 and one that was there counts 0, so a batch without duplicates needs no further
/// question; otherwise [`known_keys`] reads back, in the same transaction, whose event holds each key. Rows that were there
/// are locked until the commit, so no node can forget a key between these two.
const KEYS: Insert<'static> = Insert {
    head: "INSERT INTO oncehook_keys (event, source, `key`, digest, first_seen, expires_at)",
    row: "(?, ?, ?, ?, ?, ?)",
    tail: " ON DUPLICATE KEY UPDATE event = oncehook_keys.event",
};

const EVENTS: Insert<'static> = Insert {
    head: "INSERT INTO oncehook_events (id, source, `key`, key_signed, type, entity, occurred_at, received_at, integrity, digest,
                                        headers, body, version, size)",
    row: "(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
    tail: "",
};

/// The event is new, so its deliveries are: a duplicate here is a broken journal, and an error.
const DELIVERIES: Insert<'static> = Insert {
    head: "INSERT INTO oncehook_deliveries (event, route, entity, version, run_at, state)",
    row: "(?, ?, ?, ?, COALESCE(?, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))), 'ready')",
    tail: "",
};

/// The first event with a body owns the row.
const BODIES: Insert<'static> = Insert {
    head: "INSERT INTO oncehook_bodies (source, digest, event)",
    row: "(?, ?, ?)",
    tail: " ON DUPLICATE KEY UPDATE event = oncehook_bodies.event",
};

const FLAGS: Insert<'static> = Insert {
    head: "INSERT INTO oncehook_flags (event, flag, at, reason)",
    row: "(?, ?, ?, ?)",
    tail: " ON DUPLICATE KEY UPDATE at = oncehook_flags.at",
};

/// Puts the keys that are new into the ledger, and returns for each candidate, in their order, who holds its key.
async fn take_keys(session: &mut Session, candidates: &[Candidate<'_>]) -> Result<Vec<Holder>, EngineError> {
    let before = held_before(session, candidates).await?;
    let mut sorted = candidates.to_vec();
    sort_by_key(&mut sorted);
    let stored = session.insert_columns(KEYS, &append::key_rows(&sorted)).await?;
    let known: Vec<Known> = if usize::try_from(stored) == Ok(candidates.len()) {
        candidates.iter().map(Candidate::known).collect()
    } else {
        let found = known_keys::<Mysql>(session, candidates.iter().map(Candidate::key)).await?;
        let known = (0..candidates.len()).map(|place| found.get(&place).copied());
        known.collect::<Option<_>>().ok_or_else(|| EngineError::other("a key was stored and is not there"))?
    };
    let holder = |(candidate, known): (&Candidate<'_>, Known)| {
        let new = candidate.id == known.event && !before.contains(&candidate.id);
        if new { Holder::Stored(known) } else { Holder::Known(known) }
    };
    Ok(candidates.iter().zip(known).map(holder).collect())
}

/// The candidates that have an id already and are stored under it: the answer to an earlier append got lost. (Should one be
/// stored between this and the insert, by a transaction whose sender is gone, its event is there already, and its key refuses
/// it.)
async fn held_before(session: &mut Session, candidates: &[Candidate<'_>]) -> Result<HashSet<EventId>, EngineError> {
    let named: Vec<&Candidate<'_>> = candidates.iter().filter(|candidate| candidate.event.id.is_some()).collect();
    if named.is_empty() {
        return Ok(HashSet::new());
    }
    let found = known_keys::<Mysql>(session, named.iter().map(|candidate| candidate.key())).await?;
    let is_held = |place: usize, id: EventId| found.get(&place).is_some_and(|known| known.event == id);
    let ids = named.iter().map(|candidate| candidate.id).enumerate();
    Ok(ids.filter(|(place, id)| is_held(*place, *id)).map(|(_, id)| id).collect())
}

/// Stores new events with all that belongs to them, and counts them.
async fn store(session: &mut Session, context: AppendContext, new: &[Candidate<'_>]) -> Result<(), EngineError> {
    let mut events = append::event_rows(new);
    events.push(Column::ints(new.iter().map(|new| i64::try_from(new.event.body.len()).unwrap_or(i64::MAX))));
    session.insert_columns(EVENTS, &events).await?;
    let mut deliveries = append::delivery_rows(new);
    let count = deliveries.first().map_or(0, Column::len);
    deliveries.push(Column::Ints(vec![context.given; count]));
    session.insert_columns(DELIVERIES, &deliveries).await?;
    let first = first_bodies(session, new).await?;
    let mut flags: Vec<Vec<Value>> = Vec::new();
    let (mut totals, mut late) = (Totals::new(), Occurrences::default());
    for Candidate { id: own, event } in new {
        let flag = |name: &str, reason: Value| vec![id(*own), name.into(), event.received_at.0.into(), reason];
        flags.extend(event.quarantine.map(|reason| flag("quarantined", reason.as_str().into())));
        if event.is_replay() || !event.key_signed && !first.contains(own) {
            flags.push(flag("suspected_replay", Value::NULL));
        }
        let totals = totals.entry(event.source.as_str()).or_default();
        totals.events += 1;
        totals.quarantined += u64::from(event.quarantine.is_some());
        late.add_late(context.about_now, *own, event);
    }
    session.insert(FLAGS, flags).await?;
    add_totals::<Mysql>(session, context.shard, &totals).await?;
    index::add::<Mysql>(session, &late).await
}

/// Which events with unsigned keys are the first with their bodies; in the order of ids where a batch holds several.
async fn first_bodies(session: &mut Session, new: &[Candidate<'_>]) -> Result<HashSet<EventId>, EngineError> {
    let mut sorted: Vec<&Candidate<'_>> = new.iter().filter(|candidate| !candidate.event.key_signed).collect();
    if sorted.is_empty() {
        return Ok(HashSet::new());
    }
    sorted.sort_unstable_by_key(|candidate| (candidate.event.source.as_str(), candidate.event.digest, candidate.id));
    let sources = Column::texts(sorted.iter().map(|candidate| candidate.event.source.as_str()));
    let digests = Column::Bytes(sorted.iter().map(|candidate| Some(&candidate.event.digest[..])).collect());
    let mut rows = vec![sources, digests, Column::Ids(sorted.iter().map(|candidate| candidate.id).collect())];
    session.insert_columns(BODIES, &rows).await?;
    rows.pop();
    let sql = "SELECT b.event
                 FROM JSON_TABLE($1, '$[*]' COLUMNS (source VARCHAR(64) CHARACTER SET utf8mb4 PATH '$[0]', digest VARCHAR(64) PATH '$[1]')) t
                 STRAIGHT_JOIN oncehook_bodies b ON b.source = t.source AND b.digest = UNHEX(t.digest)";
    let rows = engine::Session::rows(session, sql, &[Param::Table(rows)]).await?;
    rows.iter().map(|row| row.event(0)).collect()
}

/// Whether the ledger still refuses a key that it holds. `false`: it does not hold the key any more, which proves nothing,
/// and this transaction has to be undone.
///
/// Every batch begins with this, because without its unique key the ledger would take every duplicate without a word.
async fn refuses(session: &mut Session, witness: &Witness) -> Result<bool, EngineError> {
    let (source, key) = (witness.source.as_str(), witness.key.as_bytes());
    let bytes = |count: usize| Value::from(vec![0_u8; count]);
    let row = vec![bytes(16), source.into(), key.into(), bytes(32), 0_i64.into(), 0_i64.into()];
    let refused = session.insert(KEYS, vec![row]).await? == 0;
    if !refused {
        // Fails if there are two now.
        known_keys::<Mysql>(session, std::iter::once((source, key))).await?;
    }
    Ok(refused)
}

/// Only of events that are still there.
const MAKE_DUPLICATES: &str = "
INSERT INTO oncehook_duplicates (event, first_at, last_at, latest)
SELECT e.id, t.first_at, t.last_at, '[]'
  FROM JSON_TABLE($1, '$[*]' COLUMNS (event VARCHAR(32) PATH '$[0]', first_at BIGINT PATH '$[4]', last_at BIGINT PATH '$[5]')) t
  STRAIGHT_JOIN oncehook_events e ON e.id = UNHEX(t.event)
ON DUPLICATE KEY UPDATE event = oncehook_duplicates.event";

const ADD_DUPLICATES: &str = "
UPDATE JSON_TABLE($1, '$[*]' COLUMNS (event VARCHAR(32) PATH '$[0]', journal BIGINT PATH '$[1]', memory BIGINT PATH '$[2]',
         redis BIGINT PATH '$[3]', last_at BIGINT PATH '$[5]', latest TEXT CHARACTER SET utf8mb4 PATH '$[6]')) t
  STRAIGHT_JOIN oncehook_duplicates d ON d.event = UNHEX(t.event)
   SET d.journal = d.journal + t.journal, d.memory = d.memory + t.memory, d.redis = d.redis + t.redis,
       d.last_at = GREATEST(d.last_at, t.last_at), d.latest = t.latest";
