//! What else events are called: ids that a spool has answered for events that have another one here.
//!
//! An event that was spooled keeps its id if it is the first of its key. Only where another node, or an append whose outcome
//! was unknown, came before it is there an alias; `forget` removes it with the event.

use super::connection::{Insert, Session};
use super::engine_error::EngineError;
use super::row::{event, id};
use crate::event::EventId;
use crate::journal::Alias;

/// Remembers aliases. The first of a name stays. In order, so that two nodes do not wait for each other for ever.
pub(super) async fn keep(session: &mut Session, aliases: &[Alias]) -> Result<(), EngineError> {
    let mut pairs: Vec<(EventId, EventId)> = aliases.iter().map(|kept| (kept.alias, kept.event)).collect();
    pairs.sort_unstable();
    let insert = Insert {
        head: "INSERT INTO oncehook_spool_aliases (alias, event)",
        row: "(?, ?)",
        tail: " ON DUPLICATE KEY UPDATE event = oncehook_spool_aliases.event",
    };
    session
        .insert(insert, pairs.into_iter().map(|(alias, event)| vec![id(alias), id(event)]).collect())
        .await?;
    session.run("COMMIT").await
}

/// The event that an alias stands for.
pub(super) async fn resolve(session: &mut Session, alias: EventId) -> Result<Option<EventId>, EngineError> {
    let sql = "SELECT e.id FROM oncehook_spool_aliases a JOIN oncehook_events e ON e.id = a.event WHERE a.alias = ?";
    session.row(sql, vec![id(alias)]).await?.map(|row| event(&row, 0)).transpose()
}
