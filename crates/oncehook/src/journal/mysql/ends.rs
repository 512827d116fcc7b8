//! Events of which a delivery ended without success: dead, superseded or skipped, in the order of the events, for lists.
//!
//! The queues' index has what waits; what is over has no place in it, or one in another order, and an index on the state would be
//! kept for every delivery. So whoever ends a delivery like this writes it down, in the same transaction.
//!
//! Promises: what is in such a state is written down here. Does not: promise the reverse; a list looks at the deliveries
//! themselves. What is superseded or skipped stays so; the dead are removed when an operator revives or skips them.

use super::connection::{Insert, Session};
use super::engine_error::EngineError;
use super::row::id;
use crate::delivery::DeliveryState;
use crate::event::EventId;

/// All states that are written down.
const STATES: [DeliveryState; 3] = [DeliveryState::Dead, DeliveryState::Superseded, DeliveryState::Skipped];

const ENDS: Insert<'static> = Insert {
    head: "INSERT INTO oncehook_ends (state, event)",
    row: "(?, ?)",
    tail: " ON DUPLICATE KEY UPDATE event = oncehook_ends.event",
};

/// Writes down that deliveries ended; those that ended otherwise are passed over. In the order of events, as whoever ends
/// deliveries has them.
pub(super) async fn write(
    session: &mut Session,
    ended: impl Iterator<Item = (DeliveryState, EventId)>,
) -> Result<(), EngineError> {
    let odd = ended.filter(|(state, _)| STATES.contains(state));
    let rows: Vec<_> = odd.map(|(state, event)| vec![state.as_str().into(), id(event)]).collect();
    session.insert(ENDS, rows).await?;
    Ok(())
}

/// Removes what is not true any more of an event whose deliveries an order has changed, and that is locked.
pub(super) async fn revived(session: &mut Session, event: EventId) -> Result<(), EngineError> {
    let sql = "SELECT 1 FROM oncehook_deliveries WHERE event = ? AND state = 'dead' LIMIT 1";
    if session.row(sql, vec![id(event)]).await?.is_none() {
        let sql = "DELETE FROM oncehook_ends WHERE state = 'dead' AND event = ?";
        session.change(sql, vec![id(event)]).await?;
    }
    Ok(())
}
