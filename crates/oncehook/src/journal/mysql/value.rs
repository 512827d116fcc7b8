//! Parameters and rows in the driver's types.
//!
//! Our texts number their parameters (`$1`); the driver wants question marks in the order of use. [`Texts`] translates, once for
//! each text and connection.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use mysql_async::{Row, Value};

use super::engine_error::EngineError;
use crate::event::EventId;
use crate::journal::server::value::{self, Column, Param};

/// The texts of a connection in the driver's form.
#[derive(Debug, Default)]
pub(super) struct Texts(HashMap<String, Arc<Text>>);

#[derive(Debug)]
struct Text {
    text: String,
    /// Which parameter each question mark stands for, counted from 0.
    order: Vec<usize>,
}

impl Texts {
    /// A text with question marks, and its values in their order.
    pub(super) fn bind(&mut self, sql: &str, params: &[Param<'_>]) -> Result<(String, Vec<Value>), EngineError> {
        let text = match self.0.get(sql) {
            Some(text) => Arc::clone(text),
            None => {
                let text = Arc::new(translate(sql));
                self.0.insert(sql.to_owned(), Arc::clone(&text));
                text
            }
        };
        let values = text.order.iter().map(|place| params.get(*place).map(value));
        let values: Option<Vec<Value>> = values.collect();
        let values = values.ok_or_else(|| EngineError::other("a statement lacks a parameter"))?;
        Ok((text.text.clone(), values))
    }
}

/// Replaces each `$n` by a question mark (`$[` is a JSON path), and the schema of a common text by the prefix of our tables.
fn translate(sql: &str) -> Text {
    let sql = sql.replace("oncehook.", "oncehook_");
    let mut pieces = sql.split('$');
    let mut text = pieces.next().unwrap_or_default().to_owned();
    let mut order = Vec::new();
    for piece in pieces {
        let digits = piece.bytes().take_while(u8::is_ascii_digit).count();
        let (number, rest) = piece.split_at(digits);
        match number.parse::<usize>() {
            Ok(number) => {
                order.push(number.saturating_sub(1));
                text.push('?');
            }
            Err(_) => text.push('$'),
        }
        text.push_str(rest);
    }
    Text { text, order }
}

fn value(param: &Param<'_>) -> Value {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::server::value::Column;

    #[test]
    fn parameters_are_bound_in_the_order_of_their_use() {
        let mut texts = Texts::default();
        let sql = "UPDATE JSON_TABLE($2, '$[*]' COLUMNS (a INT PATH '$[0]')) t SET b = $1, c = $1 + $10";
        let mut params = vec![Param::Int(7), Param::Table(vec![Column::ints([1, 2]), Column::texts(["x", "y"])])];
        params.extend((3..=10).map(Param::Int));
        let (text, values) = texts.bind(sql, &params).unwrap();
        assert_eq!(text, "UPDATE JSON_TABLE(?, '$[*]' COLUMNS (a INT PATH '$[0]')) t SET b = ?, c = ? + ?");
        let list = Value::from(r#"[[1,"x"],[2,"y"]]"#);
        assert_eq!(values, [list, Value::from(7), Value::from(7), Value::from(10)]);
        assert!(texts.bind("SELECT $1", &[]).is_err());
    }
}
