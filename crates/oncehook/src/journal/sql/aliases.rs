//! What else events are called: ids that a spool has answered for events that have another id here.
//!
//! On a server, an event that was spooled keeps its id if it is the first of its key. Only where another node, or an append
//! whose outcome was unknown, came before it is there an alias. In SQLite the row key of an event grows in the order of
//! the table, so an id from earlier cannot be given to a later row: there every event that was spooled has an alias.
//! `forget` removes it with the event.

use super::Result;
use super::story::Tells;
use super::value::{Column, Param, Row};
use crate::event::EventId;
use crate::journal::Alias;

/// Remembers aliases in one transaction. In order, so that two nodes do not wait for each other for ever. The first of a
/// name stays.
pub(crate) async fn keep<S: Tells>(session: &mut S, aliases: &[Alias]) -> Result<()> {
    let mut pairs: Vec<(&[u8], EventId)> =
        aliases.iter().map(|kept| (kept.alias.as_bytes().as_slice(), kept.event)).collect();
    pairs.sort_unstable();
    let (aliases, events) = pairs.into_iter().map(|(alias, event)| (Some(alias), event)).unzip();
    session.begin_single(None).await?;
    session.change(S::KEEP_ALIASES, &[Param::Table(vec![Column::Bytes(aliases), Column::Ids(events)])]).await?;
    session.commit_single().await
}

/// The event that an alias stands for.
pub(crate) async fn resolve<S: Tells>(session: &mut S, alias: EventId) -> Result<Option<EventId>> {
    session.row(S::RESOLVE_ALIAS, &[alias.into()]).await?.map(|row| row.event(0)).transpose()
}
