//! Parameters of statements and columns of rows, in the terms that every engine understands.
//!
//! The shared journal binds [`Param`]s and reads [`Row`]s; an engine turns them into its driver's types. So a statement's text
//! is the engine's, and what goes in and comes out is written once.
//!
//! Texts number their parameters `$1`, `$2`, …, as often and in the order that they like. A [`Param::Table`] is a list of rows:
//! PostgreSQL takes each of its columns as an array with a number of its own (`unnest($3::uuid[], $4::text[])`). MySQL and
//! SQLite take the whole as one JSON text with one number (`JSON_TABLE($3, …)`, `json_each($3)`).

use oncehook_verify::{EventKey, UnixMicros};

use super::Result;
use super::error::EngineError;
use crate::delivery::{DeliveryId, Fence, RouteName};
use crate::event::EventId;

/// One parameter of a statement.
#[derive(Debug, Clone)]
pub(crate) enum Param<'p> {
    Null,
    Bool(bool),
    Int(i64),
    Text(&'p str),
    Bytes(&'p [u8]),
    Id(EventId),
    /// A list of rows, column by column.
    Table(Vec<Column<'p>>),
}

/// A column of a [`Param::Table`].
#[derive(Debug, Clone)]
pub(crate) enum Column<'p> {
    Ids(Vec<EventId>),
    Bools(Vec<bool>),
    Ints(Vec<Option<i64>>),
    Texts(Vec<Option<&'p str>>),
    Bytes(Vec<Option<&'p [u8]>>),
}

impl<'p> Column<'p> {
    pub(crate) fn ints(values: impl IntoIterator<Item = i64>) -> Self {
        Self::Ints(values.into_iter().map(Some).collect())
    }

    pub(crate) fn texts(values: impl IntoIterator<Item = &'p str>) -> Self {
        Self::Texts(values.into_iter().map(Some).collect())
    }

    /// How many rows it has.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Ids(values) => values.len(),
            Self::Bools(values) => values.len(),
            Self::Ints(values) => values.len(),
            Self::Texts(values) => values.len(),
            Self::Bytes(values) => values.len(),
        }
    }
}

impl<'p> Param<'p> {
    /// Events: one column of ids.
    pub(crate) fn ids(events: impl IntoIterator<Item = EventId>) -> Self {
        Self::Table(vec![Column::Ids(events.into_iter().collect())])
    }

    /// Names: one column of texts.
    pub(crate) fn texts(names: impl IntoIterator<Item = &'p str>) -> Self {
        Self::Table(vec![Column::texts(names)])
    }

    /// Deliveries of one route: event, epoch.
    pub(crate) fn places(places: impl IntoIterator<Item = (EventId, u32)>) -> Self {
        let (events, epochs): (Vec<_>, Vec<_>) =
            places.into_iter().map(|(event, epoch)| (event, Some(i64::from(epoch)))).unzip();
        Self::Table(vec![Column::Ids(events), Column::Ints(epochs)])
    }

    /// Deliveries: event, route, epoch.
    pub(crate) fn deliveries(deliveries: impl IntoIterator<Item = &'p DeliveryId>) -> Self {
        let (mut events, mut routes, mut epochs) = (Vec::new(), Vec::new(), Vec::new());
        for DeliveryId { event, route, epoch } in deliveries {
            events.push(*event);
            routes.push(Some(route.as_str()));
            epochs.push(Some(i64::from(*epoch)));
        }
        Self::Table(vec![Column::Ids(events), Column::Texts(routes), Column::Ints(epochs)])
    }

    /// Attempts: event, route, epoch, attempt.
    pub(crate) fn fences(fences: impl IntoIterator<Item = &'p Fence> + Clone) -> Self {
        let attempts = Column::ints(fences.clone().into_iter().map(|fence| i64::from(fence.attempt)));
        Self::deliveries(fences.into_iter().map(|fence| &fence.delivery)).with([attempts])
    }

    /// Entities, and how many of each.
    pub(in crate::journal) fn counts(entities: &[(&'p str, usize)]) -> Self {
        let counts = entities.iter().map(|(_, count)| i64::try_from(*count).unwrap_or(i64::MAX));
        Self::texts(entities.iter().map(|(entity, _)| *entity)).with([Column::ints(counts)])
    }

    /// A table with more columns.
    pub(in crate::journal) fn with(mut self, more: impl IntoIterator<Item = Column<'p>>) -> Self {
        if let Self::Table(columns) = &mut self {
            columns.extend(more);
        }
        self
    }
}

/// What becomes which parameter.
macro_rules! params {
    ($($from:ty => $param:expr,)*) => {
        $(impl<'p> From<$from> for Param<'p> {
            fn from(value: $from) -> Self {
                $param(value)
            }
        })*
    };
}

params! {
    i64 => Self::Int,
    u32 => |value| Self::Int(i64::from(value)),
    usize => |value| Self::Int(i64::try_from(value).unwrap_or(i64::MAX)),
    UnixMicros => |value: UnixMicros| Self::Int(value.0),
    bool => Self::Bool,
    EventId => Self::Id,
    &'p str => Self::Text,
    &'p String => Self::Text,
    &'p RouteName => |value: &'p RouteName| Self::Text(value.as_str()),
    &'p [u8] => Self::Bytes,
    &'p EventKey => |value: &'p EventKey| Self::Bytes(value.as_bytes()),
}

impl<'p, T: Into<Param<'p>>> From<Option<T>> for Param<'p> {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self::Null, Into::into)
    }
}

/// The rows of a table as one JSON text, for engines that take it as such: a list of lists, or a list of values if there is
/// one column. Bytes are in hexadecimal, and an id is what `id` makes of it.
#[cfg(any(feature = "sqlite", feature = "mysql"))]
pub(crate) fn json(columns: &[Column<'_>], id: impl Fn(EventId) -> serde_json::Value) -> String {
    let cell = |column: &Column<'_>, row: usize| match column {
        Column::Ids(values) => values.get(row).map_or(serde_json::Value::Null, |value| id(*value)),
        Column::Bools(values) => values.get(row).copied().into(),
        Column::Ints(values) => values.get(row).copied().flatten().into(),
        Column::Texts(values) => values.get(row).copied().flatten().into(),
        Column::Bytes(values) => values.get(row).copied().flatten().map(hex::encode).into(),
    };
    let rows = (0..columns.first().map_or(0, Column::len)).map(|row| match columns {
        [only] => cell(only, row),
        columns => columns.iter().map(|column| cell(column, row)).collect(),
    });
    rows.collect::<serde_json::Value>().to_string()
}

/// A row of an answer. What does not have the type that the journal wrote is an error, never a panic.
pub(crate) trait Row: Send + Sync {
    /// An integer or a truth value (1 or 0).
    fn maybe_int(&self, column: usize) -> Result<Option<i64>>;
    fn maybe_bytes(&self, column: usize) -> Result<Option<&[u8]>>;
    fn maybe_text(&self, column: usize) -> Result<Option<String>>;
    fn maybe_event(&self, column: usize) -> Result<Option<EventId>>;
    /// Bytes that are moved out of the row where the driver allows it: for bodies.
    fn take_bytes(&mut self, column: usize) -> Result<bytes::Bytes>;

    fn int(&self, column: usize) -> Result<i64> {
        self.maybe_int(column)?.ok_or_else(EngineError::damaged)
    }

    fn is_true(&self, column: usize) -> Result<bool> {
        Ok(self.maybe_int(column)?.is_some_and(|number| number != 0))
    }

    /// An epoch, an attempt: never negative.
    fn small(&self, column: usize) -> Result<u32> {
        u32::try_from(self.int(column)?).map_err(|_| EngineError::damaged())
    }

    fn maybe_small(&self, column: usize) -> Result<Option<u32>> {
        let number = self.maybe_int(column)?;
        number.map(|number| u32::try_from(number).map_err(|_| EngineError::damaged())).transpose()
    }

    fn count(&self, column: usize) -> Result<u64> {
        u64::try_from(self.int(column)?).map_err(|_| EngineError::damaged())
    }

    fn time(&self, column: usize) -> Result<UnixMicros> {
        self.int(column).map(UnixMicros)
    }

    fn maybe_time(&self, column: usize) -> Result<Option<UnixMicros>> {
        Ok(self.maybe_int(column)?.map(UnixMicros))
    }

    fn text(&self, column: usize) -> Result<String> {
        self.maybe_text(column)?.ok_or_else(EngineError::damaged)
    }

    fn bytes(&self, column: usize) -> Result<&[u8]> {
        self.maybe_bytes(column)?.ok_or_else(EngineError::damaged)
    }

    fn digest(&self, column: usize) -> Result<[u8; 32]> {
        self.bytes(column)?.try_into().map_err(|_| EngineError::damaged())
    }

    fn event(&self, column: usize) -> Result<EventId> {
        self.maybe_event(column)?.ok_or_else(EngineError::damaged)
    }

    fn route(&self, column: usize) -> Result<RouteName> {
        RouteName::new(&self.text(column)?).map_err(|_| EngineError::damaged())
    }

    /// The place of something in a list that the statement was given, counted from 1 there and from 0 here.
    fn place(&self, column: usize) -> Result<usize> {
        usize::try_from(self.int(column)? - 1).map_err(|_| EngineError::damaged())
    }

    /// A delivery from three columns: event, route, epoch.
    fn delivery(&self, first: usize) -> Result<DeliveryId> {
        let (event, route, epoch) = (self.event(first)?, self.route(first + 1)?, self.small(first + 2)?);
        Ok(DeliveryId { event, route, epoch })
    }

    /// An attempt from four columns: event, route, epoch, attempt.
    fn fence(&self) -> Result<Fence, EngineError> {
        Ok(Fence { delivery: self.delivery(0)?, attempt: self.small(3)? })
    }
}
