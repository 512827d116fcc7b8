//! Parameters of statements and columns of rows, in the terms that every engine understands.
//!
//! The shared journal binds [`Param`]s and reads [`Row`]s; an engine turns them into its driver's types. So a statement's text
//! is the engine's, and what goes in and comes out is written once.
//!
//! Texts number their parameters `$1`, `$2`, …, as often and in the order that they like. A [`Param::Table`] is a list of rows:
//! PostgreSQL takes each of its columns as an array with a number of its own (`unnest($3::uuid[], $4::text[])`), MySQL takes
//! the whole as one JSON text with one number (`JSON_TABLE($3, …)`, bytes and ids in hexadecimal).

use oncehook_verify::{EventKey, UnixMicros};

use super::error::EngineError;
use crate::delivery::{DeliveryId, Fence, RouteName};
use crate::event::EventId;

/// One parameter of a statement.
#[derive(Debug, Clone)]
pub(in crate::journal) enum Param<'p> {
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
pub(in crate::journal) enum Column<'p> {
    Ids(Vec<EventId>),
    Bools(Vec<bool>),
    Ints(Vec<Option<i64>>),
    Texts(Vec<Option<&'p str>>),
    Bytes(Vec<Option<&'p [u8]>>),
}

impl<'p> Column<'p> {
    pub(in crate::journal) fn ints(values: impl IntoIterator<Item = i64>) -> Self {
        Self::Ints(values.into_iter().map(Some).collect())
    }

    pub(in crate::journal) fn texts(values: impl IntoIterator<Item = &'p str>) -> Self {
        Self::Texts(values.into_iter().map(Some).collect())
    }

    /// How many rows it has.
    pub(in crate::journal) fn len(&self) -> usize {
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
    pub(in crate::journal) fn ids(events: impl IntoIterator<Item = EventId>) -> Self {
        Self::Table(vec![Column::Ids(events.into_iter().collect())])
    }

    /// Names: one column of texts.
    pub(in crate::journal) fn texts(names: impl IntoIterator<Item = &'p str>) -> Self {
        Self::Table(vec![Column::texts(names)])
    }

    /// Deliveries of one route: event, epoch.
    pub(in crate::journal) fn places(places: impl IntoIterator<Item = (EventId, u32)>) -> Self {
        let (events, epochs): (Vec<_>, Vec<_>) =
            places.into_iter().map(|(event, epoch)| (event, Some(i64::from(epoch)))).unzip();
        Self::Table(vec![Column::Ids(events), Column::Ints(epochs)])
    }

    /// Deliveries: event, route, epoch.
    pub(in crate::journal) fn deliveries(deliveries: impl IntoIterator<Item = &'p DeliveryId>) -> Self {
        let (mut events, mut routes, mut epochs) = (Vec::new(), Vec::new(), Vec::new());
        for DeliveryId { event, route, epoch } in deliveries {
            events.push(*event);
            routes.push(Some(route.as_str()));
            epochs.push(Some(i64::from(*epoch)));
        }
        Self::Table(vec![Column::Ids(events), Column::Texts(routes), Column::Ints(epochs)])
    }

    /// Attempts: event, route, epoch, attempt.
    pub(in crate::journal) fn fences(fences: impl IntoIterator<Item = &'p Fence> + Clone) -> Self {
        let attempts = Column::ints(fences.clone().into_iter().map(|fence| i64::from(fence.attempt)));
        let deliveries = Self::deliveries(fences.into_iter().map(|fence| &fence.delivery));
        let Self::Table(mut columns) = deliveries else { return deliveries };
        columns.push(attempts);
        Self::Table(columns)
    }
}

impl From<i64> for Param<'_> {
    fn from(value: i64) -> Self {
        Self::Int(value)
    }
}

impl From<u32> for Param<'_> {
    fn from(value: u32) -> Self {
        Self::Int(i64::from(value))
    }
}

impl From<usize> for Param<'_> {
    fn from(value: usize) -> Self {
        Self::Int(i64::try_from(value).unwrap_or(i64::MAX))
    }
}

impl From<bool> for Param<'_> {
    fn from(value: bool) -> Self {
        Self::Bool(value)
    }
}

impl<'p> From<&'p str> for Param<'p> {
    fn from(value: &'p str) -> Self {
        Self::Text(value)
    }
}

impl<'p> From<&'p String> for Param<'p> {
    fn from(value: &'p String) -> Self {
        Self::Text(value)
    }
}

impl<'p> From<&'p [u8]> for Param<'p> {
    fn from(value: &'p [u8]) -> Self {
        Self::Bytes(value)
    }
}

impl<'p> From<&'p EventKey> for Param<'p> {
    fn from(value: &'p EventKey) -> Self {
        Self::Bytes(value.as_bytes())
    }
}

impl<'p> From<&'p RouteName> for Param<'p> {
    fn from(value: &'p RouteName) -> Self {
        Self::Text(value.as_str())
    }
}

impl From<EventId> for Param<'_> {
    fn from(value: EventId) -> Self {
        Self::Id(value)
    }
}

impl From<UnixMicros> for Param<'_> {
    fn from(value: UnixMicros) -> Self {
        Self::Int(value.0)
    }
}

impl<'p, T: Into<Param<'p>>> From<Option<T>> for Param<'p> {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self::Null, Into::into)
    }
}

/// A row of an answer. What does not have the type that the journal wrote is an error, never a panic.
pub(in crate::journal) trait Row: Send + Sync {
    /// An integer or a truth value (1 or 0).
    fn maybe_int(&self, column: usize) -> Result<Option<i64>, EngineError>;
    fn maybe_bytes(&self, column: usize) -> Result<Option<&[u8]>, EngineError>;
    fn maybe_text(&self, column: usize) -> Result<Option<String>, EngineError>;
    fn maybe_event(&self, column: usize) -> Result<Option<EventId>, EngineError>;
    /// Bytes that are moved out of the row where the driver allows it: for bodies.
    fn take_bytes(&mut self, column: usize) -> Result<bytes::Bytes, EngineError>;

    fn int(&self, column: usize) -> Result<i64, EngineError> {
        self.maybe_int(column)?.ok_or_else(EngineError::damaged)
    }

    fn is_true(&self, column: usize) -> Result<bool, EngineError> {
        Ok(self.maybe_int(column)?.is_some_and(|number| number != 0))
    }

    /// An epoch, an attempt: never negative.
    fn small(&self, column: usize) -> Result<u32, EngineError> {
        u32::try_from(self.int(column)?).map_err(|_| EngineError::damaged())
    }

    fn maybe_small(&self, column: usize) -> Result<Option<u32>, EngineError> {
        let number = self.maybe_int(column)?;
        number.map(|number| u32::try_from(number).map_err(|_| EngineError::damaged())).transpose()
    }

    fn count(&self, column: usize) -> Result<u64, EngineError> {
        u64::try_from(self.int(column)?).map_err(|_| EngineError::damaged())
    }

    fn time(&self, column: usize) -> Result<UnixMicros, EngineError> {
        self.int(column).map(UnixMicros)
    }

    fn maybe_time(&self, column: usize) -> Result<Option<UnixMicros>, EngineError> {
        Ok(self.maybe_int(column)?.map(UnixMicros))
    }

    fn text(&self, column: usize) -> Result<String, EngineError> {
        self.maybe_text(column)?.ok_or_else(EngineError::damaged)
    }

    fn bytes(&self, column: usize) -> Result<&[u8], EngineError> {
        self.maybe_bytes(column)?.ok_or_else(EngineError::damaged)
    }

    fn digest(&self, column: usize) -> Result<[u8; 32], EngineError> {
        self.bytes(column)?.try_into().map_err(|_| EngineError::damaged())
    }

    fn event(&self, column: usize) -> Result<EventId, EngineError> {
        self.maybe_event(column)?.ok_or_else(EngineError::damaged)
    }

    fn route(&self, column: usize) -> Result<RouteName, EngineError> {
        RouteName::new(&self.text(column)?).map_err(|_| EngineError::damaged())
    }

    /// The place of something in a list that the statement was given, counted from 1 there and from 0 here.
    fn place(&self, column: usize) -> Result<usize, EngineError> {
        usize::try_from(self.int(column)? - 1).map_err(|_| EngineError::damaged())
    }

    /// A delivery from three columns: event, route, epoch.
    fn delivery(&self, first: usize) -> Result<DeliveryId, EngineError> {
        let (event, route, epoch) = (self.event(first)?, self.route(first + 1)?, self.small(first + 2)?);
        Ok(DeliveryId { event, route, epoch })
    }
}
