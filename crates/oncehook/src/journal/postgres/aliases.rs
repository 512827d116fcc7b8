//! What else events are called: ids that a spool has answered for events that have another one here.
//!
//! An event that was spooled keeps its id if it is the first of its key. Only where another node, or an append whose outcome
//! was unknown, came before it is there an alias; `forget` removes it with the event.

use uuid::Uuid;

use super::connection::{EngineError, Session};
use super::queries::{event_id, uuid};
use crate::event::EventId;
use crate::journal::Alias;

/// Remembers aliases in one statement. The first of a name stays. In order, so that two nodes do not wait for each other.
pub(super) async fn keep(session: &Session, aliases: &[Alias]) -> Result<(), EngineError> {
    let mut pairs: Vec<(Uuid, Uuid)> =
        aliases.iter().map(|kept| (uuid(kept.alias), uuid(kept.event))).collect();
    pairs.sort_unstable();
    let (aliases, events): (Vec<Uuid>, Vec<Uuid>) = pairs.into_iter().unzip();
    let sql = "INSERT INTO oncehook.spool_aliases (alias, event) SELECT * FROM unnest($1::uuid[], $2::uuid[])
               ON CONFLICT (alias) DO NOTHING";
    session.change(sql, &[&aliases, &events]).await?;
    Ok(())
}

/// The event that an alias stands for.
pub(super) async fn resolve(session: &Session, alias: EventId) -> Result<Option<EventId>, EngineError> {
    let sql = "SELECT e.id FROM oncehook.spool_aliases a JOIN oncehook.events e ON e.id = a.event WHERE a.alias = $1";
    Ok(session.row(sql, &[&uuid(alias)]).await?.map(|row| event_id(row.get(0))))
}
