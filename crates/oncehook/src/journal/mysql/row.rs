//! Rows, and the lists that statements are given.
//!
//! Promises: what does not have the type that the journal wrote is an error, never a panic. Lists go to the server as one
//! JSON text that `JSON_TABLE` takes apart (bytes in hexadecimal), so a statement's text does not depend on their length.

use mysql_async::{Row, Value};

use super::engine_error::EngineError;
use crate::event::EventId;

fn value(row: &Row, column: usize) -> Result<&Value, EngineError> {
    row.as_ref(column).ok_or_else(EngineError::damaged)
}

/// A number, or nothing.
pub(super) fn maybe_number(row: &Row, column: usize) -> Result<Option<i64>, EngineError> {
    match value(row, column)? {
        Value::NULL => Ok(None),
        Value::Int(number) => Ok(Some(*number)),
        Value::UInt(number) => i64::try_from(*number).map(Some).map_err(|_| EngineError::damaged()),
        Value::Bytes(text) => {
            let number = std::str::from_utf8(text).ok().and_then(|text| text.parse().ok());
            number.map(Some).ok_or_else(EngineError::damaged)
        }
        _ => Err(EngineError::damaged()),
    }
}

pub(super) fn number(row: &Row, column: usize) -> Result<i64, EngineError> {
    maybe_number(row, column)?.ok_or_else(EngineError::damaged)
}

/// A count, an epoch, an attempt: never negative.
pub(super) fn small(row: &Row, column: usize) -> Result<u32, EngineError> {
    u32::try_from(number(row, column)?).map_err(|_| EngineError::damaged())
}

pub(super) fn count(row: &Row, column: usize) -> Result<u64, EngineError> {
    u64::try_from(number(row, column)?).map_err(|_| EngineError::damaged())
}

pub(super) fn is_true(row: &Row, column: usize) -> Result<bool, EngineError> {
    Ok(maybe_number(row, column)?.is_some_and(|number| number != 0))
}

pub(super) fn maybe_bytes(row: &Row, column: usize) -> Result<Option<&[u8]>, EngineError> {
    match value(row, column)? {
        Value::NULL => Ok(None),
        Value::Bytes(bytes) => Ok(Some(bytes)),
        _ => Err(EngineError::damaged()),
    }
}

pub(super) fn bytes(row: &Row, column: usize) -> Result<&[u8], EngineError> {
    maybe_bytes(row, column)?.ok_or_else(EngineError::damaged)
}

pub(super) fn maybe_text(row: &Row, column: usize) -> Result<Option<String>, EngineError> {
    let text = maybe_bytes(row, column)?.map(|bytes| String::from_utf8(bytes.to_vec()));
    text.transpose().map_err(|_| EngineError::damaged())
}

pub(super) fn text(row: &Row, column: usize) -> Result<String, EngineError> {
    maybe_text(row, column)?.ok_or_else(EngineError::damaged)
}

pub(super) fn event(row: &Row, column: usize) -> Result<EventId, EngineError> {
    let bytes: [u8; 16] = bytes(row, column)?.try_into().map_err(|_| EngineError::damaged())?;
    Ok(EventId::from_bytes(bytes))
}

/// An id as a parameter.
pub(super) fn id(event: EventId) -> Value {
    Value::Bytes(event.as_bytes().to_vec())
}

/// An id in a list.
pub(super) fn hex(event: EventId) -> String {
    hex::encode(event.as_bytes())
}

/// A list as a parameter: one JSON array for each row.
pub(super) fn list(rows: impl IntoIterator<Item = serde_json::Value>) -> Value {
    Value::from(serde_json::Value::Array(rows.into_iter().collect()).to_string())
}

/// A list of ids as a parameter, for [`IDS`].
pub(super) fn ids(events: impl IntoIterator<Item = EventId>) -> Value {
    list(events.into_iter().map(|event| serde_json::Value::from(hex(event))))
}

/// The table that a list of ids becomes.
pub(super) const IDS: &str = "JSON_TABLE(?, '$[*]' COLUMNS (id VARCHAR(32) PATH '$')) t";
