//! Parameters and rows in the driver's types.

use bytes::Bytes;
use mysql_async::{Row, Value};

use super::engine_error::EngineError;
use crate::event::EventId;
use crate::journal::server::value::{self, Column, Param};

pub(super) fn value(param: &Param<'_>) -> Value {
    match param {
        Param::Null => Value::NULL,
        Param::Bool(value) => Value::from(*value),
        Param::Int(value) => Value::from(*value),
        Param::Text(value) => Value::from(*value),
        Param::Bytes(value) => Value::from(*value),
        Param::Id(value) => id(*value),
        Param::Table(columns) => Value::from(value::json(columns, |id| hex::encode(id.as_bytes()).into())),
    }
}

/// A list of rows as the values of a statement that names each of them.
pub(super) fn rows(columns: &[Column<'_>]) -> Vec<Vec<Value>> {
    let cell = |column: &Column<'_>, row: usize| match column {
        Column::Ids(values) => values.get(row).map(|id| self::id(*id)).into(),
        Column::Bools(values) => values.get(row).into(),
        Column::Ints(values) => values.get(row).copied().flatten().into(),
        Column::Texts(values) => values.get(row).copied().flatten().into(),
        Column::Bytes(values) => values.get(row).copied().flatten().into(),
    };
    let rows = 0..columns.first().map_or(0, Column::len);
    rows.map(|row| columns.iter().map(|column| cell(column, row)).collect()).collect()
}

/// An id as a parameter.
pub(super) fn id(event: EventId) -> Value {
    Value::Bytes(event.as_bytes().to_vec())
}

fn cell(row: &Row, column: usize) -> Result<&Value, EngineError> {
    row.as_ref(column).ok_or_else(EngineError::damaged)
}

impl value::Row for Row {
    fn maybe_int(&self, column: usize) -> Result<Option<i64>, EngineError> {
        match cell(self, column)? {
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

    fn maybe_bytes(&self, column: usize) -> Result<Option<&[u8]>, EngineError> {
        match cell(self, column)? {
            Value::NULL => Ok(None),
            Value::Bytes(bytes) => Ok(Some(bytes)),
            _ => Err(EngineError::damaged()),
        }
    }

    fn maybe_text(&self, column: usize) -> Result<Option<String>, EngineError> {
        let text = self.maybe_bytes(column)?.map(|bytes| String::from_utf8(bytes.to_vec()));
        text.transpose().map_err(|_| EngineError::damaged())
    }

    fn maybe_event(&self, column: usize) -> Result<Option<EventId>, EngineError> {
        let bytes = self.maybe_bytes(column)?;
        let id = bytes.map(|bytes| bytes.try_into().map(EventId::from_bytes));
        id.transpose().map_err(|_| EngineError::damaged())
    }

    fn take_bytes(&mut self, column: usize) -> Result<Bytes, EngineError> {
        let bytes = self.take_opt::<Vec<u8>, _>(column).ok_or_else(EngineError::damaged)?;
        bytes.map(Bytes::from).map_err(|_| EngineError::damaged())
    }
}
