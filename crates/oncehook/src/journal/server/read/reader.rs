//! The reader's interface: lists, stories, bodies and counts.
//!
//! Each answer is one snapshot, with the counts that are still in this node's memory added. Those in the memory of other
//! nodes show half a second later.

use std::collections::BTreeMap;

use oncehook_verify::EventKey;

use super::super::engine::Session;
use super::super::error::EngineError;
use super::super::value::{Param, Row};
use super::super::{ServerJournal, aliases};
use super::{Reads, search, story};
use crate::delivery::{DeliveryId, DeliveryState};
use crate::event::EventId;
use crate::journal::{
    Backlog, BoxFuture, EventDetail, EventPage, EventQuery, JournalReader, ReadError, RecentKey, SourceCounts,
    Standing, Stats, StoredBody,
};

/// Reads in one snapshot, while nothing moves from memory into the tables.
macro_rules! read {
    ($journal:expr, |$session:ident| $read:expr) => {{
        let _still = $journal.shared.moving.read().await;
        let mut $session = $journal.readers.take().await.map_err(read_error)?;
        $session.begin_read().await.map_err(read_error)?;
        let answer = $read.await.map_err(read_error)?;
        $session.commit().await.map_err(read_error)?;
        $session.check_replicated().map_err(read_error)?;
        $session.keep();
        Ok(answer)
    }};
}

fn read_error(error: EngineError) -> ReadError {
    if error.is_too_slow() { ReadError::TooSlow } else { ReadError::Engine(error.message) }
}

impl<E: Reads> JournalReader for ServerJournal<E> {
    fn list(&self, query: EventQuery) -> BoxFuture<'_, Result<EventPage, ReadError>> {
        Box::pin(async move {
            // No text of ours has a zero character, and PostgreSQL takes none.
            let names = [&query.source, &query.kind, &query.entity];
            if names.into_iter().flatten().any(|name| name.contains('\0')) {
                return Ok(EventPage::default());
            }
            read!(self, |session| self.page(&mut session, &query))
        })
    }

    fn show(&self, id: EventId) -> BoxFuture<'_, Result<Option<EventDetail>, ReadError>> {
        Box::pin(async move { read!(self, |session| story::tell::<E>(&mut session, &self.shared, id)) })
    }

    fn body(&self, id: EventId) -> BoxFuture<'_, Result<Option<StoredBody>, ReadError>> {
        Box::pin(async move { read!(self, |session| body::<E>(&mut session, id)) })
    }

    fn resolve(&self, alias: EventId) -> BoxFuture<'_, Result<Option<EventId>, ReadError>> {
        Box::pin(async move { read!(self, |session| aliases::resolve::<E>(&mut session, alias)) })
    }

    fn stats(&self) -> BoxFuture<'_, Result<Stats, ReadError>> {
        Box::pin(async move { read!(self, |session| self.counts(&mut session)) })
    }

    fn standings(&self, deliveries: Vec<DeliveryId>) -> BoxFuture<'_, Result<Vec<Option<Standing>>, ReadError>> {
        Box::pin(async move { read!(self, |session| standings::<E>(&mut session, &deliveries)) })
    }

    fn recent_keys(&self, limit: usize) -> BoxFuture<'_, Result<Vec<RecentKey>, ReadError>> {
        Box::pin(async move { read!(self, |session| recent_keys::<E>(&mut session, limit)) })
    }
}

#[expect(private_bounds, reason = "engines are this crate's own")]
impl<E: Reads> ServerJournal<E> {
    /// What waits, per route.
    pub(in crate::journal) async fn read_backlog(&self) -> Result<Vec<Backlog>, ReadError> {
        read!(self, |session| backlog::<E>(&mut session))
    }

    async fn page(&self, session: &mut E::Session, query: &EventQuery) -> Result<EventPage, EngineError> {
        let mut events = search::find::<E>(session, query).await?;
        let more = events.len() > query.limit;
        events.truncate(query.limit);
        story::complete::<E>(session, &self.shared, &mut events).await?;
        let next = events.last().filter(|_| more).map(|event| event.id);
        Ok(EventPage { events, next })
    }

    async fn counts(&self, session: &mut E::Session) -> Result<Stats, EngineError> {
        let counts = |row: &<E::Session as Session>::Row| {
            Ok(SourceCounts {
                source: row.text(0)?,
                events: row.count(1)?,
                duplicates: row.count(2)?,
                conflicts: row.count(3)?,
                quarantined: row.count(4)?,
            })
        };
        let rows = session.rows(E::READ.stats, &[]).await?;
        let mut sources: Vec<SourceCounts> = rows.iter().map(counts).collect::<Result<_, EngineError>>()?;
        for (_, pending) in self.shared.tally().iter() {
            if let Some(counts) = sources.iter_mut().find(|counts| counts.source == pending.source.as_str()) {
                counts.duplicates += pending.count();
            }
        }
        Ok(Stats { sources })
    }
}

async fn body<E: Reads>(session: &mut E::Session, id: EventId) -> Result<Option<StoredBody>, EngineError> {
    let row = session.row(E::READ.body, &[id.into()]).await?;
    row.map(|mut row| Ok(StoredBody { headers: row.take_bytes(0)?, body: row.take_bytes(1)? })).transpose()
}

/// How deliveries stand, all in one statement.
async fn standings<E: Reads>(
    session: &mut E::Session,
    deliveries: &[DeliveryId],
) -> Result<Vec<Option<Standing>>, EngineError> {
    let mut standings = vec![None; deliveries.len()];
    for row in session.rows(E::READ.standings, &[Param::deliveries(deliveries)]).await? {
        let state = DeliveryState::parse(&row.text(1)?);
        if let (Some(standing), Some(state)) = (standings.get_mut(row.place(0)?), state) {
            let (result, error, cause) = (row.maybe_text(2)?, row.maybe_text(3)?, row.maybe_text(4)?);
            *standing = Some(Standing { state, result, error, cause });
        }
    }
    Ok(standings)
}

/// Keys of the latest events, as the ledger has them.
async fn recent_keys<E: Reads>(session: &mut E::Session, limit: usize) -> Result<Vec<RecentKey>, EngineError> {
    let rows = session.rows(E::READ.recent_keys, &[limit.into()]).await?;
    let mut keys = Vec::with_capacity(rows.len());
    for row in &rows {
        let Some(key) = EventKey::from_bytes(row.bytes(1)?) else { continue };
        let (source, event, digest) = (row.text(0)?, row.event(2)?, row.digest(3)?);
        keys.push(RecentKey { source, key, event, digest, expires_at: row.time(4)? });
    }
    Ok(keys)
}

async fn backlog<E: Reads>(session: &mut E::Session) -> Result<Vec<Backlog>, EngineError> {
    let mut routes: BTreeMap<String, Backlog> = BTreeMap::new();
    for row in session.rows(E::READ.backlog, &[]).await? {
        let (route, many, since) = (row.text(1)?, row.count(2)?, row.maybe_time(3)?);
        let backlog = routes.entry(route.clone()).or_insert_with(|| Backlog::none(route));
        match row.int(0)? {
            0 => (backlog.waiting, backlog.oldest) = (backlog.waiting + many, since),
            1 => backlog.running = many,
            2 => backlog.dead = many,
            3 => backlog.waiting += many,
            _ => (backlog.blocked, backlog.blocked_since) = (many, since),
        }
    }
    Ok(routes.into_values().collect())
}
