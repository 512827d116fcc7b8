//! Numbers and names in columns of ours.

use super::connection::EngineError;
use crate::delivery::RouteName;

/// A number that a column of ours holds: never negative.
pub(super) fn number(column: i32) -> u32 {
    column.unsigned_abs()
}

pub(super) fn int(number: u32) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}

pub(super) fn route_name(text: &str) -> Result<RouteName, EngineError> {
    RouteName::new(text).map_err(|_| EngineError::other("a route's name in the journal is damaged"))
}
