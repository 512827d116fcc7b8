//! Guards, and what is known of entities beside them: how they are written, read and removed in a transaction that the
//! caller has begun and will end.
//!
//! Promises: guards are written, and entities locked, in one order by all gateways, so that two batches that share some
//! do not deadlock. A guard that another transaction is writing is waited for. The transaction that holds an entity sees
//! what was committed last.
//!
//! Does not: decide anything (`handler::entities`), or forget an entity: a machine's state has no age.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use super::super::deliver::entity::state;
use super::super::engine::{Connected, Session};
use super::super::error::{EngineError, EngineResult, Meaning};
use super::super::value::{Column, Param, Row};
use super::{Guards, Write};
use crate::delivery::{DeliveryId, Fence};
use crate::event::EventId;
use crate::handler::elsewhere::{Comparison, Round};
use crate::handler::entities::Standings;
use crate::ordering::Standing;

/// A guard that exists.
pub(super) struct Guard {
    attempt: u32,
    pub(super) void: bool,
    pub(super) result: Option<String>,
}

pub(super) async fn begin<E: Guards>(session: &mut E::Session) -> EngineResult {
    match E::GUARD.begin {
        Some(begin) => session.run(begin).await,
        None => Ok(()),
    }
}

/// Writes the guards of attempts. In their order: nothing for each that was written, for the others the guard that
/// stands there instead: one that took effect, or a void one of this attempt or a later one.
pub(super) async fn write<E: Guards>(
    session: &mut E::Session,
    journal: i64,
    void: bool,
    fences: &[&Fence],
) -> EngineResult<Vec<Option<Guard>>> {
    let mut sorted = fences.to_vec();
    sorted.sort_by_key(|fence| (fence.delivery.event, fence.delivery.epoch));
    let mut standing = match E::GUARD.write {
        Write::AtOnce(sql) => {
            let rows = session.rows(sql, &params(&sorted, journal, void)).await?;
            let written = rows.iter().map(|row| row.delivery(0)).collect::<Result<HashSet<_>, _>>()?;
            sorted.retain(|fence| !written.contains(&fence.delivery));
            let standing = look::<E>(session, &sorted).await?;
            if standing.len() != sorted.len() {
                let meaning = Meaning { collision: true, ..Meaning::default() };
                return Err(EngineError::with("a guard is gone that was there a moment ago", meaning));
            }
            standing
        }
        Write::AfterLook { insert, replace, met } => {
            let mut standing = look::<E>(session, &sorted).await?;
            let (known, new): (Vec<_>, Vec<_>) =
                sorted.into_iter().partition(|fence| standing.contains_key(&fence.delivery));
            if !new.is_empty() {
                session.change(insert, &params(&new, journal, void)).await.map_err(|mut error| {
                    error.meaning.collision |= error.has_code(met);
                    error
                })?;
            }
            let gives_way = |fence: &&Fence| {
                let guard = standing.get(&fence.delivery);
                guard.is_some_and(|guard| guard.void && guard.attempt < fence.attempt)
            };
            let replaced: Vec<&Fence> = known.into_iter().filter(gives_way).collect();
            if !replaced.is_empty() {
                // They are locked, and so still as they were seen.
                session.change(replace, &params(&replaced, journal, void)).await?;
            }
            standing.retain(|delivery, _| replaced.iter().all(|fence| fence.delivery != *delivery));
            standing
        }
    };
    Ok(fences.iter().map(|fence| standing.remove(&fence.delivery)).collect())
}

fn params<'f>(fences: &[&'f Fence], journal: i64, void: bool) -> [Param<'f>; 3] {
    [Param::fences(fences.iter().copied()), journal.into(), void.into()]
}

async fn look<E: Guards>(session: &mut E::Session, fences: &[&Fence]) -> EngineResult<HashMap<DeliveryId, Guard>> {
    if fences.is_empty() {
        return Ok(HashMap::new());
    }
    let deliveries = Param::deliveries(fences.iter().map(|fence| &fence.delivery));
    let rows = session.rows(E::GUARD.look, &[deliveries]).await?;
    let guard = |row: &<E::Session as Session>::Row| {
        let guard = Guard { attempt: row.small(3)?, void: row.is_true(4)?, result: row.maybe_text(5)? };
        Ok((row.delivery(0)?, guard))
    };
    rows.iter().map(guard).collect()
}

/// Runs a statement about the guards of deliveries.
pub(super) async fn change_all<E: Guards>(
    session: &mut E::Session,
    sql: &str,
    deliveries: impl IntoIterator<Item = &DeliveryId>,
) -> EngineResult {
    let deliveries: Vec<&DeliveryId> = deliveries.into_iter().collect();
    if !deliveries.is_empty() {
        session.change(sql, &[Param::deliveries(deliveries)]).await?;
    }
    Ok(())
}

/// Keeps results in the guards, for the attempt that settles after a crash.
pub(super) async fn keep_results<E: Guards>(
    session: &mut E::Session,
    results: &[(&DeliveryId, String)],
) -> EngineResult {
    // A quote or a backslash may take two bytes on the way.
    let room = session.batch_bytes() / 2;
    let mut rest = results;
    while !rest.is_empty() {
        let mut bytes = 0;
        let fits = rest.iter().take_while(|(_, result)| {
            bytes += result.len() + 128;
            bytes <= room
        });
        let (part, later) = rest.split_at(fits.count().max(1));
        let texts = Column::texts(part.iter().map(|(_, result)| result.as_str()));
        let table = Param::deliveries(part.iter().map(|(delivery, _)| *delivery)).with([texts]);
        let kept = session.change(E::GUARD.keep_results, &[table]).await?;
        if usize::try_from(kept) != Ok(part.len()) {
            return Err(EngineError::other("a guard is gone that was written a moment ago"));
        }
        rest = later;
    }
    Ok(())
}

/// Old guards behind a place. Ids of events begin with their time, so no index on time is needed.
pub(super) async fn aged<E: Guards>(session: &mut E::Session, round: &Round) -> EngineResult<Vec<DeliveryId>> {
    let behind = round.behind.as_ref();
    let event = behind.map_or(EventId::from_bytes([0; 16]), |delivery| delivery.event);
    let epoch = behind.map_or(-1, |delivery| i64::from(delivery.epoch));
    let age = i64::try_from(round.age.as_micros()).unwrap_or(i64::MAX).min(100 * 365 * 86_400_000_000);
    let params = [
        event.into(),
        (&round.route).into(),
        epoch.into(),
        age.into(),
        round.journal.into(),
        round.limit.into(),
        round.now.into(),
    ];
    session.rows(E::GUARD.aged, &params).await?.iter().map(|row| row.delivery(0)).collect()
}

/// Locks entities until the transaction ends, also those that are not known yet. Waits for a transaction that holds
/// one.
pub(super) async fn lock_entities<'c, E: Guards>(
    session: &mut E::Session,
    journal: i64,
    comparison: &'c Comparison,
    entities: &BTreeSet<&str>,
) -> EngineResult<Standings<'c>> {
    if entities.is_empty() {
        return Ok(Standings::new(comparison, BTreeMap::new()));
    }
    let params = [Param::texts(entities.iter().copied()), journal.into(), (&comparison.scope).into()];
    session.change(E::GUARD.add_entities, &params).await?;
    let rows = session.rows(E::GUARD.lock_entities, &params).await?;
    if rows.len() != entities.len() {
        return Err(EngineError::other("what is known of an entity is gone that was written a moment ago"));
    }
    let known = rows.iter().map(state).collect::<EngineResult<_>>()?;
    Ok(Standings::new(comparison, known))
}

/// Keeps what has changed. Every effect raises the version, so a row that is there is changed.
pub(super) async fn keep_entities<E: Guards>(
    session: &mut E::Session,
    journal: i64,
    comparison: &Comparison,
    standings: &Standings<'_>,
) -> EngineResult {
    let (entities, moved): (Vec<&str>, Vec<&Standing>) = standings.moved().unzip();
    if moved.is_empty() {
        return Ok(());
    }
    let table = Param::texts(entities).with([
        Column::ints(moved.iter().map(|known| known.version)),
        Column::Ints(moved.iter().map(|known| known.newest.version).collect()),
        Column::Ints(moved.iter().map(|known| known.newest.at.map(|at| at.0)).collect()),
        Column::Texts(moved.iter().map(|known| known.state.as_deref()).collect()),
    ]);
    let kept = session.change(E::GUARD.keep_entities, &[table, journal.into(), (&comparison.scope).into()]).await?;
    match usize::try_from(kept) {
        Ok(kept) if kept == moved.len() => Ok(()),
        _ => Err(EngineError::other("what is known of an entity is gone that was locked a moment ago")),
    }
}
