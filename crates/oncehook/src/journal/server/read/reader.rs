//! The reader's interface: lists, stories, bodies and counts.
//!
//! Each answer is one snapshot, with the counts that are still in this node's memory added. Those in the memory of other
//! nodes show half a second later.

use super::super::ServerJournal;
use super::super::engine::{Connected as _, Session as _};
use super::super::error::EngineError;
use super::{Reads, search};
use crate::delivery::DeliveryId;
use crate::event::EventId;
use crate::journal::sql::{aliases, story};
use crate::journal::{
    Backlog, BoxFuture, EventDetail, EventPage, EventQuery, JournalReader, ReadError, RecentKey, Standing, Stats,
    StoredBody,
};

/// Reads in one snapshot, while nothing moves from memory into the tables. What is in memory is added by `$counted`.
macro_rules! read {
    ($journal:expr, |$session:ident| $read:expr $(, $counted:expr)?) => {{
        let _still = $journal.shared.moving.read().await;
        let mut $session = $journal.readers.take().await.map_err(read_error)?;
        $session.run(E::Session::BEGIN_READ).await.map_err(read_error)?;
        let answer = $read.await.map_err(read_error)?;
        $session.commit().await.map_err(read_error)?;
        $session.check_replicated().map_err(read_error)?;
        $session.keep();
        $(let answer = $counted(answer, &$journal.shared.tally());)?
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
            read!(self, |session| page::<E>(&mut session, &query), EventPage::with_pending)
        })
    }

    fn show(&self, id: EventId) -> BoxFuture<'_, Result<Option<EventDetail>, ReadError>> {
        Box::pin(async move { read!(self, |session| story::show(&mut *session, id), EventDetail::with_pending) })
    }

    fn body(&self, id: EventId) -> BoxFuture<'_, Result<Option<StoredBody>, ReadError>> {
        Box::pin(async move { read!(self, |session| story::body(&mut *session, id)) })
    }

    fn resolve(&self, alias: EventId) -> BoxFuture<'_, Result<Option<EventId>, ReadError>> {
        Box::pin(async move { read!(self, |session| aliases::resolve(&mut *session, alias)) })
    }

    fn stats(&self) -> BoxFuture<'_, Result<Stats, ReadError>> {
        Box::pin(async move { read!(self, |session| story::stats(&mut *session), Stats::with_pending) })
    }

    fn standings(&self, deliveries: Vec<DeliveryId>) -> BoxFuture<'_, Result<Vec<Option<Standing>>, ReadError>> {
        Box::pin(async move { read!(self, |session| story::standings(&mut *session, &deliveries)) })
    }

    fn recent_keys(&self, limit: usize) -> BoxFuture<'_, Result<Vec<RecentKey>, ReadError>> {
        Box::pin(async move { read!(self, |session| story::recent_keys(&mut *session, limit)) })
    }
}

#[expect(private_bounds, reason = "engines are this crate's own")]
impl<E: Reads> ServerJournal<E> {
    /// What waits, per route.
    pub(in crate::journal) async fn read_backlog(&self) -> Result<Vec<Backlog>, ReadError> {
        read!(self, |session| story::backlog(&mut *session))
    }
}

async fn page<E: Reads>(session: &mut E::Session, query: &EventQuery) -> Result<EventPage, EngineError> {
    let events = search::find::<E>(session, query).await?;
    story::page(session, events, query.limit).await
}
