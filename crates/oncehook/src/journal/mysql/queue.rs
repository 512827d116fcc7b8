//! Makes deliveries for an operator's order.

use super::connection::{Insert, Session};
use super::engine_error::EngineError;
use super::row::{id, maybe_number, maybe_text};
use crate::delivery::RouteName;
use crate::event::EventId;

/// Those that exist stay as they are.
const ENQUEUE: Insert<'static> = Insert {
    head: "INSERT INTO oncehook_deliveries (event, route, epoch, state, run_at, entity, version)",
    row: "(?, ?, ?, 'ready', ?, ?, ?)",
    tail: " ON DUPLICATE KEY UPDATE epoch = oncehook_deliveries.epoch",
};

/// Makes deliveries that are due at once. Those that exist stay as they are. Returns those that were made. If others of the
/// event stand in the line of its entity, these do too.
pub(super) async fn enqueue<'r>(
    session: &mut Session,
    now: i64,
    event: EventId,
    epoch: u32,
    routes: impl IntoIterator<Item = &'r RouteName>,
) -> Result<Vec<RouteName>, EngineError> {
    let sql =
        "SELECT entity, version FROM oncehook_deliveries WHERE event = ? AND entity IS NOT NULL LIMIT 1";
    let (entity, version) = match session.row(sql, vec![id(event)]).await? {
        Some(row) => (maybe_text(&row, 0)?, maybe_number(&row, 1)?),
        None => (None, None),
    };
    let mut made = Vec::new();
    for route in routes {
        let entity = entity.as_deref().into();
        let row = vec![id(event), route.as_str().into(), epoch.into(), now.into(), entity, version.into()];
        if session.insert(ENQUEUE, vec![row]).await? > 0 {
            made.push(route.clone());
        }
    }
    Ok(made)
}

pub(super) fn route_name(text: &str) -> Result<RouteName, EngineError> {
    RouteName::new(text).map_err(|_| EngineError::damaged())
}
