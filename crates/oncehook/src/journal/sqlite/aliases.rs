//! What else events are called: ids that a spool has answered before the journal knew the event.
//!
//! The row key of an event grows in the order of the table, so an id from earlier cannot be given to a later row. Here
//! every event that was spooled has an alias; `forget` removes it with the event.

use rusqlite::{Connection, OptionalExtension, TransactionBehavior, params};

use crate::event::EventId;
use crate::journal::Alias;

/// Remembers aliases in one transaction. The first of a name stays.
pub(super) fn keep(connection: &mut Connection, aliases: &[Alias]) -> Result<(), rusqlite::Error> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    for Alias { alias, event } in aliases {
        transaction
            .prepare_cached(
                "INSERT INTO oncehook_spool_aliases (alias, event) VALUES (?1, ?2) ON CONFLICT (alias) DO NOTHING",
            )?
            .execute(params![alias.as_bytes(), event.sequence()])?;
    }
    transaction.commit()
}

/// The event that an alias stands for.
pub(super) fn resolve(connection: &Connection, alias: EventId) -> Result<Option<EventId>, rusqlite::Error> {
    connection
        .prepare_cached(
            "SELECT e.id FROM oncehook_spool_aliases a JOIN oncehook_events e ON e.seq = a.event WHERE a.alias = ?1",
        )?
        .query_row([alias.as_bytes()], |row| row.get(0).map(EventId::from_bytes))
        .optional()
}
