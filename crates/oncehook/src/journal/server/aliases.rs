//! What else events are called: ids that a spool has answered for events that have another id here.
//!
//! An event that was spooled keeps its id if it is the first of its key. Only where another node, or an append whose outcome
//! was unknown, came before it is there an alias; it is forgotten with its event.

use super::engine::{Engine, Session};
use super::error::EngineError;
use super::value::{Column, Param, Row};
use crate::event::EventId;
use crate::journal::Alias;

/// Remembers aliases, and commits. In order, so that two nodes do not wait for each other for ever.
pub(super) async fn keep<E: Engine>(session: &mut E::Session, aliases: &[Alias]) -> Result<(), EngineError> {
    let mut pairs: Vec<(EventId, EventId)> = aliases.iter().map(|kept| (kept.alias, kept.event)).collect();
    pairs.sort_unstable();
    let (aliases, events): (Vec<EventId>, Vec<EventId>) = pairs.into_iter().unzip();
    session.begin_single(None).await?;
    session.change(E::SQL.keep_aliases, &[Param::Table(vec![Column::Ids(aliases), Column::Ids(events)])]).await?;
    session.commit_single().await
}

/// The event that an alias stands for.
pub(in crate::journal) async fn resolve<E: Engine>(
    session: &mut E::Session,
    alias: EventId,
) -> Result<Option<EventId>, EngineError> {
    let row = session.row(E::SQL.resolve_alias, &[alias.into()]).await?;
    row.map(|row| row.event(0)).transpose()
}
