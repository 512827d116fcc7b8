//! Makes deliveries for an operator's order.

use super::connection::{EngineError, Session};
use super::queries::uuid;
use crate::delivery::RouteName;
use crate::event::EventId;

/// A number that a column of ours holds: never negative.
pub(super) fn number(column: i32) -> u32 {
    column.unsigned_abs()
}

pub(super) fn int(number: u32) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}

/// Text as the database takes it: it has no zero characters.
pub(super) fn text(text: &str) -> String {
    text.replace('\0', "\u{fffd}")
}

/// Makes deliveries that are due at once. Those that exist stay as they are. If others of the event stand in the line of its
/// entity, these do too.
pub(super) async fn enqueue<'r>(
    session: &Session,
    given: Option<i64>,
    event: EventId,
    epoch: u32,
    routes: impl IntoIterator<Item = &'r RouteName>,
) -> Result<Vec<RouteName>, EngineError> {
    let routes: Vec<&str> = routes.into_iter().map(RouteName::as_str).collect();
    let made = session
        .rows(
            "INSERT INTO oncehook.deliveries (event, route, epoch, state, run_at, entity, version)
             SELECT $2, r.route, $3, 'ready', coalesce($1::bigint, oncehook.micros()), l.entity, l.version
               FROM unnest($4::text[]) AS r(route)
               LEFT JOIN (SELECT entity, version FROM oncehook.deliveries
                           WHERE event = $2 AND entity IS NOT NULL LIMIT 1) l ON true
             ON CONFLICT (event, route, epoch) DO NOTHING
             RETURNING route",
            &[&given, &uuid(event), &int(epoch), &routes],
        )
        .await?;
    made.iter().map(|row| route_name(row.get(0))).collect()
}

pub(super) fn route_name(text: &str) -> Result<RouteName, EngineError> {
    RouteName::new(text).map_err(|_| EngineError::other("a route's name in the journal is damaged"))
}
