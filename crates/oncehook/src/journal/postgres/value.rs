//! Parameters and rows in the driver's types.

use std::error::Error;

use bytes::{Bytes, BytesMut};
use tokio_postgres::Row;
use tokio_postgres::types::{FromSql, IsNull, Kind, ToSql, Type, to_sql_checked};
use uuid::Uuid;

use super::queries::{event_id, uuid};
use crate::event::EventId;
use crate::journal::server::error::EngineError;
use crate::journal::server::value::{self, Column, Param};

/// A parameter with a number of its own: a scalar, or a column of a table.
#[derive(Debug)]
pub(super) enum Flat<'f> {
    Scalar(&'f Param<'f>),
    Column(&'f Column<'f>),
}

/// Gives every parameter and every column of a table its number.
pub(super) fn flat<'f>(params: &'f [Param<'f>]) -> Vec<Flat<'f>> {
    let mut flat = Vec::with_capacity(params.len());
    for param in params {
        match param {
            Param::Table(columns) => flat.extend(columns.iter().map(Flat::Column)),
            scalar => flat.push(Flat::Scalar(scalar)),
        }
    }
    flat
}

pub(super) fn bound<'f>(flat: &'f [Flat<'f>]) -> Vec<&'f (dyn ToSql + Sync)> {
    flat.iter().map(|param| param as &(dyn ToSql + Sync)).collect()
}

type Encoded = Result<IsNull, Box<dyn Error + Sync + Send>>;

impl ToSql for Flat<'_> {
    fn to_sql(&self, ty: &Type, out: &mut BytesMut) -> Encoded {
        match self {
            Self::Scalar(Param::Null | Param::Table(_)) => Ok(IsNull::Yes),
            Self::Scalar(Param::Bool(value)) => value.to_sql(ty, out),
            Self::Scalar(Param::Int(value)) => int(*value, ty, out),
            Self::Scalar(Param::Text(value)) => value.to_sql(ty, out),
            Self::Scalar(Param::Bytes(value)) => value.to_sql(ty, out),
            Self::Scalar(Param::Id(value)) => uuid(*value).to_sql(ty, out),
            Self::Column(Column::Ids(values)) => {
                values.iter().map(|id| uuid(*id)).collect::<Vec<Uuid>>().to_sql(ty, out)
            }
            Self::Column(Column::Bools(values)) => values.to_sql(ty, out),
            Self::Column(Column::Texts(values)) => values.to_sql(ty, out),
            Self::Column(Column::Bytes(values)) => values.to_sql(ty, out),
            Self::Column(Column::Ints(values)) => match ty.kind() {
                Kind::Array(element) if *element == Type::INT4 => values
                    .iter()
                    .map(|value| value.map(|value| i32::try_from(value).unwrap_or(i32::MAX)))
                    .collect::<Vec<Option<i32>>>()
                    .to_sql(ty, out),
                _ => values.to_sql(ty, out),
            },
        }
    }

    // The statement's texts are ours, and each parameter is of the type that the text gives it.
    fn accepts(_: &Type) -> bool {
        true
    }

    to_sql_checked!();
}

fn int(value: i64, ty: &Type, out: &mut BytesMut) -> Encoded {
    match *ty {
        Type::INT4 => i32::try_from(value)?.to_sql(ty, out),
        Type::INT2 => i16::try_from(value)?.to_sql(ty, out),
        _ => value.to_sql(ty, out),
    }
}

fn get<'r, T: FromSql<'r>>(row: &'r Row, column: usize) -> Result<T, EngineError> {
    row.try_get(column).map_err(|_| EngineError::damaged())
}

impl value::Row for Row {
    fn maybe_int(&self, column: usize) -> Result<Option<i64>, EngineError> {
        let ty = self.columns().get(column).map(|column| column.type_()).ok_or_else(EngineError::damaged)?;
        match *ty {
            Type::BOOL => Ok(get::<Option<bool>>(self, column)?.map(i64::from)),
            Type::INT4 => Ok(get::<Option<i32>>(self, column)?.map(i64::from)),
            Type::INT2 => Ok(get::<Option<i16>>(self, column)?.map(i64::from)),
            _ => get(self, column),
        }
    }

    fn maybe_bytes(&self, column: usize) -> Result<Option<&[u8]>, EngineError> {
        get(self, column)
    }

    fn maybe_text(&self, column: usize) -> Result<Option<String>, EngineError> {
        get(self, column)
    }

    fn maybe_event(&self, column: usize) -> Result<Option<EventId>, EngineError> {
        Ok(get::<Option<Uuid>>(self, column)?.map(event_id))
    }

    fn take_bytes(&mut self, column: usize) -> Result<Bytes, EngineError> {
        Ok(Bytes::copy_from_slice(get(self, column)?))
    }
}
