//! Forgetting on PostgreSQL: texts, and whole days.
//!
//! A day that is old as a whole is dropped (`days`), and what stood beside its events is swept behind it (`sweep`). Row
//! by row go: what has no day; days with few events, which costs little and keeps to the minute; events whose ids run
//! ahead; and all days if the retention is shorter than [`SHORT`]. Of other days nothing is forgotten before all of it
//! may go, so their events stay up to a day longer than the retention.
//!
//! A round makes missing days first. Behind the events it goes over the days of attempts and the sweeps.

use tokio_postgres::error::SqlState;

use super::connection::{EngineError, Session};
use super::days::{self, DAY_MICROS, Day, Dropped};
use super::queries::event_id;
use super::{read, sweep};
use crate::event::EventId;
use crate::journal::decide::forget::micros;
use crate::journal::sql::buckets::{behind, bucket_of};
use crate::journal::sql::forget::{Batch, Forgets, Round, kept};

/// Where a round is that is not among events or keys.
#[derive(Debug, Clone)]
pub(in crate::journal) enum Place {
    /// At a day of events that is to be dropped, and whether they were gone over one by one.
    Day { day: Day, walked: bool },
    /// At the days of attempts.
    Attempts,
    /// Behind days that were dropped.
    Sweep(sweep::Place),
}

/// A day of at most this many events goes row by row.
const FEW: i64 = 10_000;

/// With a retention shorter than this, a day more or less would not be what the operator asked for (microseconds).
const SHORT: i64 = 2 * DAY_MICROS;

impl Forgets for Session {
    type Place = Place;

    async fn begin_round(&mut self, given: Option<i64>) -> Result<(), EngineError> {
        days::make(self, given, true).await
    }

    /// How each day goes is decided here and nowhere else.
    async fn plan(&mut self, batch: &Batch<'_>, from: EventId) -> Result<(EventId, Round<Place>), EngineError> {
        let usual = (batch.beyond_usual(), Round::ahead());
        let days = days::of_events(self).await?;
        let Some(day) = days.into_iter().find(|day| event_id(day.beyond()) > from) else { return Ok(usual) };
        let (first, beyond) = (event_id(day.first()), event_id(day.beyond()));
        if from < first {
            return Ok(if first < usual.0 { (first, Round::Events(first)) } else { usual });
        }
        let whole = day.ends() <= batch.received();
        if from == first {
            if day.begins() > batch.received() {
                return Ok((from, Round::ahead()));
            }
            let short = !whole && micros(batch.retention.payload) < SHORT;
            if !short && !has_few(self, &day).await? {
                let then = if whole { Round::Own(Place::Day { day, walked: false }) } else { Round::ahead() };
                return Ok((from, then));
            }
        }
        // All that is left of a whole day then is kept.
        Ok(if whole { (beyond, Round::Own(Place::Day { day, walked: true })) } else { usual })
    }

    fn behind_events() -> Round<Place> {
        Round::Own(Place::Attempts)
    }

    async fn step(&mut self, batch: &mut Batch<'_>, place: &Place) -> Result<Round<Place>, EngineError> {
        match place {
            Place::Day { day, walked } => drop_day(self, batch, day, *walked).await,
            Place::Attempts => drop_attempts(self, batch).await,
            Place::Sweep(place) => {
                let limit = i64::try_from(batch.retention.batch).unwrap_or(i64::MAX);
                let next = sweep::batch(self, place, limit).await?;
                Ok(next.map_or_else(Round::keys, |place| Round::Own(Place::Sweep(place))))
            }
        }
    }

    async fn before_delete(&mut self) -> Result<(), EngineError> {
        // What is being indexed must not be gone before its buckets are there: they would stay for ever.
        Session::run(self, "SELECT 1 FROM oncehook.indexed FOR UPDATE").await
    }

    async fn forget_buckets(&mut self, gone: &[EventId]) -> Result<(), EngineError> {
        match (gone.first(), gone.last()) {
            // The others need not be asked for: the transaction that removes the last event of a bucket has looked at it.
            (Some(first), Some(last)) => {
                read::remove_buckets(self, bucket_of(*first), bucket_of(*last) + 1, i64::MAX).await.map(|_| ())
            }
            _ => Ok(()),
        }
    }
}

async fn drop_day(
    session: &Session,
    batch: &mut Batch<'_>,
    day: &Day,
    walked: bool,
) -> Result<Round<Place>, EngineError> {
    if !days::of_events(session).await?.contains(day) {
        // Another node was faster.
        return Ok(Round::Events(event_id(day.beyond())));
    }
    let dropped = days::drop_events(session, Some(batch.now), batch.dead(), day, kept!()).await;
    Ok(match settle(session, dropped).await? {
        Some(Dropped::Gone(events)) => {
            batch.forgotten.events = events;
            Round::Events(event_id(day.beyond()))
        }
        Some(Dropped::Crowded) if !walked => Round::Events(behind(event_id(day.first()))),
        // Another transaction is in the way, or much of the day has to stay: the next round looks again.
        Some(Dropped::Crowded) | None => Round::Events(event_id(day.beyond())),
    })
}

async fn drop_attempts(session: &Session, batch: &Batch<'_>) -> Result<Round<Place>, EngineError> {
    let alone = days::of_attempts_alone(session).await?;
    let dropped = match alone.iter().find(|day| day.ends() <= batch.received()) {
        Some(day) => settle(session, days::drop_attempts(session, day).await).await?,
        None => None,
    };
    let again = matches!(dropped, Some(Dropped::Gone(_)));
    Ok(Round::Own(if again { Place::Attempts } else { Place::Sweep(sweep::Place::default()) }))
}

/// What came of a drop; nothing if others were in the way. Then the transaction is undone, and another one begun.
async fn settle(session: &Session, dropped: Result<Dropped, EngineError>) -> Result<Option<Dropped>, EngineError> {
    match dropped {
        Ok(dropped) => Ok(Some(dropped)),
        Err(error) if error.is_too_slow() => {
            tracing::debug!(%error, "a day was not dropped now");
            session.run("ROLLBACK; BEGIN").await?;
            Ok(None)
        }
        // Made by another role. Its rows can be deleted all the same.
        Err(error) if error.has_code(SqlState::INSUFFICIENT_PRIVILEGE.code()) => {
            session.run("ROLLBACK; BEGIN").await?;
            Ok(Some(Dropped::Crowded))
        }
        Err(error) => Err(error),
    }
}

/// Whether a day has few events.
async fn has_few(session: &Session, day: &Day) -> Result<bool, EngineError> {
    let sql = "SELECT 1 FROM oncehook.events WHERE id >= $1 AND id < $2 ORDER BY id OFFSET $3 LIMIT 1";
    Ok(session.row(sql, &[&day.first(), &day.beyond(), &FEW]).await?.is_none())
}
