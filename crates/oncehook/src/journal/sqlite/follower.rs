//! What is written behind the accepts: the search index for people, and the hunt for suspected replays.
//!
//! Index rows per event on the accept path would cost it a third of its speed. Instead every thousand events get one row
//! that says what may be found among them ([`seal`]), and some of these are summed up once more ([`Gathering`]);
//! readers skip the groups and blocks that cannot match and look at the events of the others, and at those behind the last
//! block, so a list shows no lag.
//!
//! Promises: a block is written in one transaction with the group that it completes. Does not: hold up accepts; what is behind
//! is found without the index.
//!
//! A suspected replay is the same body under a new key that the signature does not cover ([`find_replays`]).

use std::collections::BTreeSet;

use oncehook_verify::UnixMicros;
use rusqlite::{Connection, OptionalExtension, TransactionBehavior, params};

use super::bloom::{Bloom, Item};
use super::groups::{self, Gathering};
use super::queries::{flag, raise_watermark, watermark};
use crate::event::EventId;

/// Events per block: few enough to look through in a moment, enough to make the index small.
pub(super) const BLOCK: u64 = 1_000;

/// Events looked at for replays at once.
const REPLAY_BATCH: i64 = 1_000;

/// A block with more types than this does not list them.
const TYPES_LISTED: usize = 100;

/// Seals the next block, if there are enough events behind the last one. `no_replays` says that none of them waits to be
/// looked at for replays, so that search need not walk them later. After an error the gathering must begin anew.
pub(super) fn seal(connection: &mut Connection, no_replays: bool, gathering: &mut Gathering) -> rusqlite::Result<bool> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let block = Block::read(&transaction, sealed_to(&transaction)?, i64::MAX)?;
    if block.count < BLOCK {
        return Ok(false);
    }
    let list =
        |names: &BTreeSet<String>| format!("[{}]", names.iter().map(|name| listed(name)).collect::<Vec<_>>().join(","));
    let types = (block.types.len() <= TYPES_LISTED).then(|| list(&block.types));
    let mut entities = Bloom::for_items(BLOCK as usize);
    block.entities.iter().for_each(|entity| entities.insert(*entity));
    let sql =
        "INSERT INTO oncehook_blocks (last, first, sources, types, entities, unrouted) VALUES (?1, ?2, ?3, ?4, ?5, ?6)";
    let row = params![block.last, block.first, list(&block.sources), types, entities.as_bytes(), block.unrouted];
    transaction.prepare_cached(sql)?.execute(row)?;
    if no_replays {
        raise_watermark(&transaction, REPLAYS_TO, block.last)?;
    }
    if gathering.complete {
        gathering.add(&transaction, block.first, block.last, &block.items())?;
    }
    transaction.commit()?;
    Ok(true)
}

/// Gathers a block that was sealed before this process, or its last failure. After an error the gathering must begin anew.
pub(super) fn gather(connection: &mut Connection, gathering: &mut Gathering) -> rusqlite::Result<()> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let next: Option<(i64, i64)> = transaction
        .prepare_cached("SELECT first, last FROM oncehook_blocks WHERE last > ?1 ORDER BY last LIMIT 1")?
        .query_row([gathering.reached(&transaction)?], |row| Ok((row.get(0)?, row.get(1)?)))
        .optional()?;
    let Some((first, last)) = next else {
        gathering.complete = true;
        return Ok(());
    };
    // Events of it may be forgotten by now; behind it there are others.
    let block = Block::read(&transaction, first - 1, last)?;
    gathering.add(&transaction, first, last, &block.items())?;
    transaction.commit()
}

/// What is in some events.
#[derive(Default)]
struct Block {
    first: i64,
    last: i64,
    count: u64,
    sources: BTreeSet<String>,
    types: BTreeSet<String>,
    entities: Vec<Item>,
    /// Whether one of them has no delivery.
    unrouted: bool,
}

impl Block {
    /// Reads the events behind one, not beyond another, and not more than a block has.
    fn read(connection: &Connection, after: i64, to: i64) -> rusqlite::Result<Self> {
        let mut block = Self::default();
        let mut statement = connection.prepare_cached(
            "SELECT seq, source, type, entity FROM oncehook_events WHERE seq > ?1 AND seq <= ?2 ORDER BY seq LIMIT ?3",
        )?;
        let mut rows = statement.query([after, to, BLOCK.cast_signed()])?;
        while let Some(row) = rows.next()? {
            block.last = row.get(0)?;
            block.first = if block.count == 0 { block.last } else { block.first };
            block.count += 1;
            insert_new(&mut block.sources, row.get_ref(1)?.as_str()?);
            if let Some(kind) = row.get_ref(2)?.as_str_or_null()? {
                insert_new(&mut block.types, kind);
            }
            block.entities.extend(row.get_ref(3)?.as_str_or_null()?.map(groups::entity));
        }
        let sql =
            "SELECT count(*) FROM (SELECT 1 FROM oncehook_deliveries WHERE event BETWEEN ?1 AND ?2 GROUP BY event)";
        let routed = connection
            .prepare_cached(sql)?
            .query_row([block.first, block.last], |row| row.get::<_, i64>(0).map(i64::unsigned_abs))?;
        block.unrouted = routed < block.count;
        Ok(block)
    }

    /// Everything that a list may look for.
    fn items(&self) -> Vec<Item> {
        let mut items = self.entities.clone();
        items.extend(self.sources.iter().map(|source| groups::source(source)));
        items.extend(self.types.iter().map(|kind| groups::kind(kind)));
        items.extend(self.unrouted.then(groups::unrouted));
        items
    }
}

/// A name as it stands in the list of a block: in quotes, as in JSON.
pub(super) fn listed(name: &str) -> String {
    serde_json::Value::from(name).to_string()
}

fn insert_new(names: &mut BTreeSet<String>, name: &str) {
    if !names.contains(name) {
        names.insert(name.to_owned());
    }
}

/// The last event that is in a block.
pub(super) fn sealed_to(connection: &Connection) -> rusqlite::Result<i64> {
    connection.prepare_cached("SELECT coalesce(max(last), 0) FROM oncehook_blocks")?.query_row([], |row| row.get(0))
}

/// How many events are behind the last block. Counts rows: for start-up only.
pub(super) fn unsealed(connection: &Connection) -> rusqlite::Result<u64> {
    let sql = "SELECT count(*) FROM oncehook_events WHERE seq > ?1";
    connection.query_row(sql, [sealed_to(connection)?], |row| row.get::<_, i64>(0).map(i64::unsigned_abs))
}

/// Looks at the next events whose keys are unsigned. Returns whether there may be more.
pub(super) fn find_replays(connection: &mut Connection, now: UnixMicros) -> rusqlite::Result<bool> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let mut reached = watermark(&transaction, REPLAYS_TO)?;
    let mut seen = 0;
    {
        let mut next = transaction.prepare_cached(
            "SELECT id, source, digest, key_signed FROM oncehook_events WHERE seq > ?1 ORDER BY seq LIMIT ?2",
        )?;
        // The first event with a body owns the row; the conflict target is named.
        let mut claim = transaction.prepare_cached(
            "INSERT INTO oncehook_bodies (source, digest, event) VALUES (?1, ?2, ?3)
             ON CONFLICT (source, digest) DO NOTHING",
        )?;
        let mut rows = next.query([reached, REPLAY_BATCH])?;
        while let Some(row) = rows.next()? {
            let event = EventId::from_bytes(row.get(0)?);
            reached = event.sequence();
            seen += 1;
            let (source, digest) = (row.get_ref(1)?.as_str()?, row.get_ref(2)?.as_blob()?);
            let signed: bool = row.get(3)?;
            if !signed && claim.execute(params![source, digest, event.sequence()])? == 0 {
                flag(&transaction, event, "suspected_replay", now, None)?;
            }
        }
    }
    if seen > 0 {
        raise_watermark(&transaction, REPLAYS_TO, reached)?;
    }
    transaction.commit()?;
    Ok(seen == REPLAY_BATCH)
}

/// Up to which event there is nothing left to look at for replays.
const REPLAYS_TO: &str = "replays_to";
