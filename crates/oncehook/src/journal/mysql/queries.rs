//! The statements of an append, one named function each. What people ask is in `reader`, what workers do in `queue`.
//!
//! Where a statement needs the time, it is given the time of a test, or null: then the database's own clock counts.
//! Nothing here begins or ends a transaction: sessions are always in one, and the caller ends it.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::PoisonError;

use mysql_async::Value;
use oncehook_verify::{EventKey, UnixMicros};
use serde_json::json;

use super::Mysql;
use super::connection::{Insert, Session};
use super::engine_error::EngineError;
use super::row::{IDS, bytes, count, digest, event, id, ids, list, number, text};
use crate::delivery::RouteName;
use crate::event::{EventId, NewEvent, SourceName};
use crate::journal::decide::append::{Holder, Known};
use crate::journal::server::engine::{AppendContext, Candidate, Refusal, Stored};
use crate::journal::server::index;
use crate::journal::server::read::buckets::Occurrences;
use crate::journal::tally::{Tally, latest_text, parse_latest, remember};
use crate::journal::{CONFLICTS_KEPT, DuplicateSeen, PROBE_SOURCE};

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

/// Stores the candidates whose keys are new, and says of each who holds its key. The first thing is to call the lane's witness.
pub(super) async fn store_all(
    engine: &Mysql,
    session: &mut Session,
    witness: &mut Option<Witness>,
    context: AppendContext,
    candidates: &[Candidate<'_>],
) -> Result<Stored, EngineError> {
    // One of the lane's own, because a called row is held until the commit; the first time another lane's will do.
    let others = || engine.witness.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let called = witness.clone().or_else(others).filter(|called| called.until.0 > context.about_now);
    if let Some(called) = &called
        && refuses(session, called).await?.is_none()
    {
        // Another node has forgotten the witness' key. The batch is stored without one.
        session.run("ROLLBACK").await?;
    }
    let holders = append(session, context.given, context.shard, candidates).await?;
    let is_new = |holder: &Holder| matches!(holder, Holder::Stored(_));
    let new = candidates.iter().zip(&holders).filter(|(_, holder)| is_new(holder));
    let mut late = Occurrences::default();
    new.for_each(|(one, _)| late.add_late(context.about_now, one.id, one.event));
    index::add::<Mysql>(session, &late).await?;
    let stored = candidates.iter().zip(&holders).rev().find(|(_, holder)| is_new(holder));
    if let Some((Candidate { id, event }, _)) = stored {
        let until = event.remembered_until(*id).0.saturating_sub(WITNESS_MARGIN);
        let (source, key) = (event.source.clone(), event.key.clone());
        // If the commit fails after all, the next batch finds this key unknown, and goes on without a witness.
        let next = Some(Witness { source, key, until: UnixMicros(until) });
        if witness.is_none() {
            engine.witness.lock().unwrap_or_else(PoisonError::into_inner).clone_from(&next);
        }
        *witness = next;
    }
    Ok(Stored { holders, trouble: None })
}

/// A duplicate that was refused (`ER_DUP_ENTRY`), and the key that refused it: the name of a primary key is given.
const REFUSED: (&str, &str) = ("1062", "for key 'PRIMARY'");

/// A plain insert of a known key must fail, and must name the key that refused it.
pub(super) async fn refuses_by_name(session: &mut Session, key: &EventKey) -> Result<Refusal, EngineError> {
    let sql = "INSERT INTO oncehook_keys (source, `key`, event, digest, first_seen, expires_at)
               VALUES (?, ?, REPEAT(x'00', 16), REPEAT(x'00', 32), 1, 1)";
    match session.change(sql, vec![PROBE_SOURCE.into(), key.as_bytes().into()]).await {
        Ok(_) => Ok(Refusal::Stored),
        Err(error) if error.is_collision() => Err(error),
        // MySQL puts the table's name before that of the key.
        Err(error) if error.has_code(REFUSED.0) && error.message.replace("oncehook_keys.", "").contains(REFUSED.1) => {
            Ok(Refusal::ByKey)
        }
        Err(error) => Ok(Refusal::Otherwise(error.message)),
    }
}

/// The ledger refuses a known key by changing nothing. The table has one unique key, so it is that one which is meant; that
/// nobody has added another or dropped this one is what [`refuses`], the schema check and the self-test are for.
///
/// This is not `INSERT IGNORE`, which would also swallow what does not fit a column, and not `RETURNING`, which MySQL does not
/// have. A row that was inserted counts 1 and one that was there counts 0, so a batch without duplicates needs no further
/// question; otherwise [`first_ids`] reads back, in the same transaction, whose event holds each key. Rows that were there
/// are locked until the commit, so nobody can forget a key between these two.
const KEYS: Insert<'static> = Insert {
    head: "INSERT INTO oncehook_keys (source, `key`, event, digest, first_seen, expires_at)",
    row: "(?, ?, ?, ?, ?, ?)",
    tail: " ON DUPLICATE KEY UPDATE event = oncehook_keys.event",
};

const EVENTS: Insert<'static> = Insert {
    head: "INSERT INTO oncehook_events (id, source, `key`, key_signed, type, entity, occurred_at, received_at, integrity, digest,
                                        size, headers, body, version)",
    row: "(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
    tail: "",
};

/// The event is new, so its deliveries are: a duplicate here is a broken journal, and an error.
const DELIVERIES: Insert<'static> = Insert {
    head: "INSERT INTO oncehook_deliveries (event, route, state, run_at, entity, version)",
    row: "(?, ?, 'ready', COALESCE(?, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))), ?, ?)",
    tail: "",
};

const TOTALS: Insert<'static> = Insert {
    head: "INSERT INTO oncehook_totals (source, shard, events, duplicates, conflicts, quarantined)",
    row: "(?, ?, ?, ?, ?, ?)",
    tail: " ON DUPLICATE KEY UPDATE events = events + VALUES(events), duplicates = duplicates + VALUES(duplicates),
            conflicts = conflicts + VALUES(conflicts), quarantined = quarantined + VALUES(quarantined)",
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

/// Stores the candidates whose keys are new, and returns for each, in their order, what the ledger knows of its key: its own
/// event if it was new. The candidates have different keys.
///
/// Keys go in sorted: two batches that share keys wait for each other in the same order instead of for ever.
async fn append(
    session: &mut Session,
    given: Option<i64>,
    shard: i64,
    candidates: &[Candidate<'_>],
) -> Result<Vec<Holder>, EngineError> {
    let before = held_before(session, candidates).await?;
    let mut sorted: Vec<&Candidate<'_>> = candidates.iter().collect();
    sorted.sort_unstable_by_key(|candidate| (candidate.event.source.as_str(), candidate.event.key.as_bytes()));
    let row = |candidate: &&Candidate<'_>| {
        let event = candidate.event;
        vec![
            event.source.as_str().into(),
            event.key.as_bytes().into(),
            id(candidate.id),
            Value::from(&event.digest[..]),
            event.received_at.0.into(),
            event.remembered_until(candidate.id).0.into(),
        ]
    };
    let stored = session.insert(KEYS, sorted.iter().map(row).collect()).await?;
    let known: Vec<Known> = if usize::try_from(stored) == Ok(candidates.len()) {
        candidates.iter().map(Candidate::known).collect()
    } else {
        let keys = candidates.iter().map(|one| (one.event.source.as_str(), one.event.key.as_bytes()));
        let found = first_ids(session, keys).await?;
        let known = (0..candidates.len()).map(|place| found.get(&place).copied());
        known.collect::<Option<_>>().ok_or_else(|| EngineError::other("a key was stored and is not there"))?
    };
    let is_new = |(candidate, known): (&Candidate<'_>, Known)| {
        let new = candidate.id == known.event && !before.contains(&candidate.id);
        if new { Holder::Stored(known) } else { Holder::Known(known) }
    };
    let holders: Vec<Holder> = candidates.iter().zip(known).map(is_new).collect();
    let stored = candidates.iter().zip(&holders).filter(|(_, holder)| matches!(holder, Holder::Stored(_)));
    let new: Vec<&Candidate<'_>> = stored.map(|(candidate, _)| candidate).collect();
    if !new.is_empty() {
        store(session, given, &new).await?;
        let mut totals: BTreeMap<&str, Totals> = BTreeMap::new();
        for candidate in &new {
            let totals = totals.entry(candidate.event.source.as_str()).or_default();
            totals.events += 1;
            totals.quarantined += u64::from(candidate.event.quarantine.is_some());
        }
        add_up(session, shard, totals).await?;
    }
    Ok(holders)
}

/// The candidates that have an id already and are stored under it: whoever brings them did not hear of it. (Should one be stored
/// between this and the insert, by a transaction whose sender is gone, its event is there already, and its key refuses it.)
async fn held_before(session: &mut Session, candidates: &[Candidate<'_>]) -> Result<HashSet<EventId>, EngineError> {
    let named: Vec<&Candidate<'_>> = candidates.iter().filter(|one| one.event.id.is_some()).collect();
    if named.is_empty() {
        return Ok(HashSet::new());
    }
    let keys = named.iter().map(|one| (one.event.source.as_str(), one.event.key.as_bytes()));
    let found = first_ids(session, keys).await?;
    let held =
        named.iter().enumerate().filter(|(place, one)| found.get(place).is_some_and(|known| known.event == one.id));
    Ok(held.map(|(_, one)| one.id).collect())
}

/// Stores new events with all that belongs to them.
async fn store(session: &mut Session, given: Option<i64>, new: &[&Candidate<'_>]) -> Result<(), EngineError> {
    // In the order of their ids, so that the table grows at its end.
    let mut new = new.to_vec();
    new.sort_unstable_by_key(|candidate| candidate.id);
    let rows = new.iter().map(|Candidate { id: own, event }| {
        vec![
            id(*own),
            event.source.as_str().into(),
            event.key.as_bytes().into(),
            event.key_signed.into(),
            event.kind.as_deref().into(),
            event.entity.as_deref().into(),
            event.occurred_at.map(|at| at.0).into(),
            event.received_at.0.into(),
            event.integrity.as_str().into(),
            Value::from(&event.digest[..]),
            u64::try_from(event.body.len()).unwrap_or(u64::MAX).into(),
            Value::from(&event.headers[..]),
            Value::from(&event.body[..]),
            event.version.into(),
        ]
    });
    session.insert(EVENTS, rows.collect()).await?;
    // Held events have no deliveries until they are released.
    let wanted = new.iter().filter(|candidate| candidate.event.quarantine.is_none());
    let routed = wanted.flat_map(|candidate| {
        let event = candidate.event;
        let entity = event.entity.as_deref().filter(|_| event.by_entity);
        let version = event.version.filter(|_| event.by_entity);
        let row = move |route: &RouteName| {
            vec![id(candidate.id), route.as_str().into(), given.into(), entity.into(), version.into()]
        };
        event.routes.iter().map(row)
    });
    session.insert(DELIVERIES, routed.collect()).await?;
    let mut flags: Vec<Vec<Value>> = Vec::new();
    for Candidate { id: own, event } in &new {
        if let Some(reason) = event.quarantine {
            flags.push(vec![id(*own), "quarantined".into(), event.received_at.0.into(), reason.as_str().into()]);
        }
    }
    let unsigned: Vec<&Candidate<'_>> = new.iter().copied().filter(|one| !one.event.key_signed).collect();
    let first = first_bodies(session, &unsigned).await?;
    let repeats = |one: &Candidate<'_>| !one.event.key_signed && !first.contains(&one.id);
    for Candidate { id: own, event } in new.iter().filter(|one| one.event.is_replay() || repeats(one)) {
        flags.push(vec![id(*own), "suspected_replay".into(), event.received_at.0.into(), Value::NULL]);
    }
    session.insert(FLAGS, flags).await?;
    Ok(())
}

/// Which of these events are the first with their bodies; in the order of ids where a batch holds several.
async fn first_bodies(session: &mut Session, events: &[&Candidate<'_>]) -> Result<HashSet<EventId>, EngineError> {
    if events.is_empty() {
        return Ok(HashSet::new());
    }
    let mut sorted = events.to_vec();
    sorted.sort_unstable_by_key(|one| (one.event.source.as_str(), one.event.digest, one.id));
    let row =
        |one: &&Candidate<'_>| vec![one.event.source.as_str().into(), Value::from(&one.event.digest[..]), id(one.id)];
    session.insert(BODIES, sorted.iter().map(row).collect()).await?;
    let asked = sorted.iter().map(|one| json!([one.event.source.as_str(), hex::encode(one.event.digest)]));
    let sql = "SELECT b.event
                 FROM JSON_TABLE(?, '$[*]' COLUMNS (source VARCHAR(64) CHARACTER SET utf8mb4 PATH '$[0]', digest VARCHAR(64) PATH '$[1]')) t
                 STRAIGHT_JOIN oncehook_bodies b ON b.source = t.source AND b.digest = UNHEX(t.digest)";
    let rows = session.rows(sql, vec![list(asked)]).await?;
    rows.iter().map(|row| event(row, 0)).collect()
}

/// What is added to the counts of a source.
#[derive(Default)]
pub(super) struct Totals {
    events: u64,
    duplicates: u64,
    conflicts: u64,
    quarantined: u64,
}

/// Adds to the counts, source by source in their order.
async fn add_up(session: &mut Session, shard: i64, totals: BTreeMap<&str, Totals>) -> Result<(), EngineError> {
    let rows = totals.into_iter().map(|(source, totals)| {
        let Totals { events, duplicates, conflicts, quarantined } = totals;
        vec![source.into(), shard.into(), events.into(), duplicates.into(), conflicts.into(), quarantined.into()]
    });
    session.insert(TOTALS, rows.collect()).await?;
    Ok(())
}

/// Which events hold these keys, by place. More than one for a key is a broken ledger, and an error.
pub(super) async fn first_ids<'k>(
    session: &mut Session,
    keys: impl Iterator<Item = (&'k str, &'k [u8])>,
) -> Result<HashMap<usize, Known>, EngineError> {
    let keys = keys.map(|(source, key)| json!([source, hex::encode(key)]));
    let sql = "SELECT t.place, k.event, k.digest, k.expires_at
                 FROM JSON_TABLE(?, '$[*]' COLUMNS (place FOR ORDINALITY, source VARCHAR(64) CHARACTER SET utf8mb4 PATH '$[0]',
                                                    name VARCHAR(510) PATH '$[1]')) t
                 STRAIGHT_JOIN oncehook_keys k ON k.source = t.source AND k.`key` = UNHEX(t.name)";
    let mut found = HashMap::new();
    for row in session.rows(sql, vec![list(keys)]).await? {
        let place = usize::try_from(number(&row, 0)? - 1).map_err(|_| EngineError::damaged())?;
        let known =
            Known { event: event(&row, 1)?, digest: digest(&row, 2)?, expires_at: UnixMicros(number(&row, 3)?) };
        if found.insert(place, known).is_some() {
            return Err(EngineError::unsound("the ledger holds a key twice"));
        }
    }
    Ok(found)
}

/// Whether the ledger still refuses a key that it holds. `None`: it does not hold the key any more, which proves nothing,
/// and this transaction has to be undone.
///
/// Every batch begins with this, because without its unique key the ledger would take every duplicate without a word.
async fn refuses(session: &mut Session, witness: &Witness) -> Result<Option<()>, EngineError> {
    let row = vec![
        witness.source.as_str().into(),
        witness.key.as_bytes().into(),
        Value::from(&[0_u8; 16][..]),
        Value::from(&[0_u8; 32][..]),
        0_i64.into(),
        0_i64.into(),
    ];
    if session.insert(KEYS, vec![row]).await? == 0 {
        return Ok(Some(()));
    }
    // Fails if there are two now.
    first_ids(session, std::iter::once((witness.source.as_str(), witness.key.as_bytes()))).await?;
    Ok(None)
}

/// See [`Engine::keep_conflicts`](crate::journal::server::engine::Engine::keep_conflicts).
pub(super) async fn keep_conflicts(
    session: &mut Session,
    shard: i64,
    conflicts: &[(EventId, &NewEvent)],
) -> Result<(), EngineError> {
    for (first, conflict) in conflicts.iter() {
        // Locked, so that two nodes count to eight together, and nobody forgets the event meanwhile.
        let sql = "SELECT 1 FROM oncehook_events WHERE id = ? FOR UPDATE";
        if session.row(sql, vec![id(*first)]).await?.is_none() {
            continue;
        }
        let sql = "SELECT COALESCE(SUM(digest = ?), 0), COALESCE(SUM(digest <> ''), 0) FROM oncehook_conflicts WHERE event = ?";
        let own = Value::from(&conflict.digest[..]);
        let row = session.row(sql, vec![own.clone(), id(*first)]).await?.ok_or_else(EngineError::damaged)?;
        let keep = count(&row, 0)? > 0 || count(&row, 1)? < CONFLICTS_KEPT as u64;
        let kept = |bytes: &[u8]| Value::from(if keep { bytes } else { &[] });
        let at = Value::from(conflict.received_at.0);
        let row = vec![
            id(*first),
            kept(&conflict.digest),
            1_i64.into(),
            at.clone(),
            at.clone(),
            kept(&conflict.headers),
            kept(&conflict.body),
        ];
        let insert = Insert {
            head: "INSERT INTO oncehook_conflicts (event, digest, count, first_at, last_at, headers, body)",
            row: "(?, ?, ?, ?, ?, ?, ?)",
            tail: " ON DUPLICATE KEY UPDATE count = count + 1, last_at = VALUES(last_at)",
        };
        session.insert(insert, vec![row]).await?;
        session.insert(FLAGS, vec![vec![id(*first), "conflict".into(), at, Value::NULL]]).await?;
    }
    let mut totals: BTreeMap<&str, Totals> = BTreeMap::new();
    for (_, conflict) in conflicts.iter() {
        totals.entry(conflict.source.as_str()).or_default().conflicts += 1;
    }
    add_up(session, shard, totals).await
}

/// Adds counted duplicates to what is stored, in one transaction. Other nodes may do the same with the same events.
pub(super) async fn store_duplicates(session: &mut Session, shard: i64, tally: &Tally) -> Result<(), EngineError> {
    let mut pending: Vec<_> = tally.iter().collect();
    pending.sort_unstable_by_key(|(event, _)| **event);
    let all = || pending.iter().map(|(event, _)| **event);
    // Only of events that are still there.
    let sql = format!("SELECT e.id FROM {IDS} STRAIGHT_JOIN oncehook_events e ON e.id = UNHEX(t.id)");
    let rows = session.rows(&sql, vec![ids(all())]).await?;
    let there: HashSet<EventId> = rows.iter().map(|row| event(row, 0)).collect::<Result<_, _>>()?;
    let counted = || pending.iter().filter(|(event, _)| there.contains(event));
    // The rows are made or locked first, so that the latest few are read as they are when they are written.
    let locks = counted().map(|(event, pending)| {
        vec![
            id(**event),
            0.into(),
            0.into(),
            0.into(),
            pending.first_at.0.into(),
            pending.last_at.0.into(),
            "[]".into(),
        ]
    });
    session
        .insert(
            Insert { tail: " ON DUPLICATE KEY UPDATE event = oncehook_duplicates.event", ..DUPLICATES },
            locks.collect(),
        )
        .await?;
    let sql =
        format!("SELECT d.event, d.latest FROM {IDS} STRAIGHT_JOIN oncehook_duplicates d ON d.event = UNHEX(t.id)");
    let mut stored: HashMap<EventId, VecDeque<DuplicateSeen>> = HashMap::new();
    for row in session.rows(&sql, vec![ids(counted().map(|(event, _)| **event))]).await? {
        stored.insert(event(&row, 0)?, parse_latest(&text(&row, 1)?));
    }
    let rows = counted().map(|(event, pending)| {
        let mut latest = stored.remove(event).unwrap_or_default();
        pending.latest.iter().for_each(|seen| remember(&mut latest, *seen));
        vec![
            id(**event),
            pending.journal.into(),
            pending.memory.into(),
            pending.redis.into(),
            pending.first_at.0.into(),
            pending.last_at.0.into(),
            latest_text(&latest).into(),
        ]
    });
    let rows: Vec<Vec<Value>> = rows.collect();
    session.insert(DUPLICATES, rows).await?;
    let mut totals: BTreeMap<&str, Totals> = BTreeMap::new();
    for (_, pending) in &pending {
        totals.entry(pending.source.as_str()).or_default().duplicates += pending.count();
    }
    add_up(session, shard, totals).await
}

const DUPLICATES: Insert<'static> = Insert {
    head: "INSERT INTO oncehook_duplicates (event, journal, memory, redis, first_at, last_at, latest)",
    row: "(?, ?, ?, ?, ?, ?, ?)",
    tail: " ON DUPLICATE KEY UPDATE journal = journal + VALUES(journal), memory = memory + VALUES(memory), redis = redis + VALUES(redis),
            last_at = GREATEST(last_at, VALUES(last_at)), latest = VALUES(latest)",
};

/// The highest id that is stored, so that new ids stay above it. (If there are no events left, nothing is in the order
/// that they could disturb.)
pub(super) async fn last_id(session: &mut Session) -> Result<Option<EventId>, EngineError> {
    let row = session.row("SELECT id FROM oncehook_events ORDER BY id DESC LIMIT 1", Vec::new()).await?;
    session.run("ROLLBACK").await?;
    row.map(|row| bytes(&row, 0).and_then(|_| event(&row, 0))).transpose()
}
