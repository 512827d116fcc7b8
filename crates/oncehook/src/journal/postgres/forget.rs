//! Forgetting on PostgreSQL: texts, and whole days.
//!
//! A day that is old as a whole is dropped (`days`), and what stood beside its events is swept behind it (`sweep`). Row
//! by row go: what has no day; days with few events, which costs little and keeps to the minute; events whose ids run
//! ahead; and all days if the retention is shorter than [`SHORT`]. Of other days nothing is forgotten before all of it
//! may go, so their events stay up to a day longer than the retention.
//!
//! A round makes missing days first. Behind the events it goes over the days of attempts and the sweeps.

use std::sync::Mutex;

use tokio_postgres::error::SqlState;

use super::connection::{EngineError, Session};
use super::days::{self, DAY_MICROS, Day, Dropped, When};
use super::queries::uuid;
use super::read::{self, next_id};
use super::{Postgres, sweep};
use crate::event::EventId;
use crate::journal::Forgotten;
use crate::journal::server::forget::{Batch, ForgetSql, Forgets, Plan, Round, micros};

/// Where a round is that is not among events or keys.
#[derive(Debug, Clone)]
pub(in crate::journal) enum Place {
    /// At a day of events that is to be dropped.
    Day(Day, Walked),
    /// At the days of attempts.
    Attempts,
    /// Behind days that were dropped.
    Sweep(sweep::Place),
}

/// Whether the events of a day were gone over one by one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::journal) enum Walked {
    Yes,
    No,
}

/// A day of at most this many events goes row by row.
const FEW: i64 = 10_000;

/// With a retention shorter than this, a day more or less would not be what the operator asked for (microseconds).
const SHORT: i64 = 2 * DAY_MICROS;

/// What stands in the way of forgetting: something pending, or something that an operator may still want and that ended
/// (or, if it is held, came) not long enough ago. `$1` is now, `$2` is how long such things are kept; null is for ever.
macro_rules! kept {
    () => {
        "
    EXISTS (SELECT 1 FROM oncehook.deliveries d WHERE d.event = e.id
               AND (d.state IN ('ready', 'running', 'retrying', 'parked')
                    OR d.state = 'dead' AND ($2::bigint IS NULL
                                             OR coalesce(d.settled_at, e.received_at) > $1::bigint - $2)))
 OR EXISTS (SELECT 1 FROM oncehook.flags f WHERE f.event = e.id AND f.flag = 'quarantined'
               AND ($2::bigint IS NULL OR e.received_at > $1::bigint - $2))"
    };
}

impl Forgets for Postgres {
    type Place = Place;

    const FORGET: ForgetSql = ForgetSql {
        clock: "SELECT state FROM oncehook.entities WHERE scope = $1 AND entity = $2",
        newest: "SELECT received_at FROM oncehook.events ORDER BY id DESC LIMIT 1",
        remember_clock: "INSERT INTO oncehook.entities (scope, entity, state) VALUES ($1, $2, $3)
                         ON CONFLICT (scope, entity) DO UPDATE SET state = excluded.state",
        // The number is `forget` in ASCII.
        lock: "SELECT pg_try_advisory_xact_lock(112632776975732)",
        unlock: None,
        bucket_ahead: "SELECT min(bucket) FROM oncehook.buckets WHERE value = $3 AND bucket BETWEEN $1 AND $2",
        look: concat!(
            "SELECT e.id, e.received_at <= $5 AND NOT (",
            kept!(),
            ") FROM oncehook.events e WHERE e.id >= $3 AND e.id < $4 ORDER BY e.id LIMIT $6"
        ),
        lock_events: "SELECT id FROM oncehook.events WHERE id = ANY($1) ORDER BY id FOR UPDATE SKIP LOCKED",
        look_again: concat!(
            "SELECT e.id FROM oncehook.events e WHERE e.id = ANY($3) AND NOT (",
            kept!(),
            ") ORDER BY e.id"
        ),
        delete: &[
            "DELETE FROM oncehook.bodies b USING oncehook.events e
              WHERE e.id = ANY($1) AND NOT e.key_signed
                AND b.source = e.source AND b.digest = e.digest AND b.event = e.id",
            "DELETE FROM oncehook.deliveries WHERE event = ANY($1)",
            "DELETE FROM oncehook.attempts   WHERE event = ANY($1)",
            "DELETE FROM oncehook.conflicts  WHERE event = ANY($1)",
            "DELETE FROM oncehook.duplicates WHERE event = ANY($1)",
            "DELETE FROM oncehook.flags      WHERE event = ANY($1)",
            "DELETE FROM oncehook.spool_aliases WHERE event = ANY($1)",
            "DELETE FROM oncehook.events     WHERE id = ANY($1)",
        ],
        keys: "SELECT source, key, expires_at FROM oncehook.keys WHERE (source, key) > ($1, $2)
                ORDER BY source, key LIMIT $3",
        delete_keys: "DELETE FROM oncehook.keys k
                       USING unnest($2::text[], $3::bytea[]) AS t(source, key)
                       WHERE k.source = t.source AND k.key = t.key AND k.expires_at <= $1
                         AND NOT EXISTS (SELECT 1 FROM oncehook.deliveries d WHERE d.event = k.event
                                            AND d.state IN ('ready', 'running', 'retrying', 'parked', 'dead'))
                         AND NOT EXISTS (SELECT 1 FROM oncehook.flags f
                                          WHERE f.event = k.event AND f.flag = 'quarantined')",
        delete_audit: "DELETE FROM oncehook.audit WHERE id IN (
                         SELECT id FROM oncehook.audit WHERE at <= $1 ORDER BY id LIMIT $2)",
    };

    fn round(&self) -> &Mutex<Round<Place>> {
        &self.round
    }

    async fn begin_round(session: &mut Session, given: Option<i64>) -> Result<(), EngineError> {
        days::make(session, given, When::Round).await
    }

    /// How each day goes is decided here and nowhere else.
    async fn plan(session: &mut Session, batch: &Batch<'_>, from: EventId) -> Result<Plan<Place>, EngineError> {
        let (from, beyond) = (uuid(from), batch.beyond_usual());
        let days = days::of_events(session).await?;
        let Some(day) = days.into_iter().find(|day| day.beyond() > from) else {
            return Ok(Plan::Walk { from, beyond, then: Round::ahead() });
        };
        if from < day.first() {
            return Ok(match day.first() < beyond {
                true => Plan::Walk { from, beyond: day.first(), then: Round::events(day.first()) },
                false => Plan::Walk { from, beyond, then: Round::ahead() },
            });
        }
        let whole = day.ends() <= batch.received();
        if from == day.first() {
            if day.begins() > batch.received() {
                return Ok(Plan::At(Round::ahead()));
            }
            let short = !whole && micros(batch.retention.payload) < SHORT;
            if !short && !has_few(session, &day).await? {
                return Ok(Plan::At(if whole { Round::Own(Place::Day(day, Walked::No)) } else { Round::ahead() }));
            }
        }
        Ok(match whole {
            // All that is left of it then is kept.
            true => Plan::Walk { from, beyond: day.beyond(), then: Round::Own(Place::Day(day, Walked::Yes)) },
            false => Plan::Walk { from, beyond, then: Round::ahead() },
        })
    }

    fn behind_events() -> Round<Place> {
        Round::Own(Place::Attempts)
    }

    async fn step(
        session: &mut Session,
        batch: &Batch<'_>,
        place: &Place,
        forgotten: &mut Forgotten,
    ) -> Result<Round<Place>, EngineError> {
        match place {
            Place::Day(day, walked) => drop_day(session, batch, day, *walked, forgotten).await,
            Place::Attempts => drop_attempts(session, batch).await,
            Place::Sweep(place) => {
                let limit = i64::try_from(batch.retention.batch).unwrap_or(i64::MAX);
                let next = sweep::batch(session, place, limit).await?;
                Ok(next.map_or_else(Round::keys, |place| Round::Own(Place::Sweep(place))))
            }
        }
    }

    async fn before_delete(session: &mut Session) -> Result<(), EngineError> {
        // What is being indexed must not be gone before its buckets are there: they would stay for ever.
        session.run("SELECT 1 FROM oncehook.indexed FOR UPDATE").await
    }

    async fn forget_buckets(session: &mut Session, gone: &[EventId]) -> Result<(), EngineError> {
        match (gone.first(), gone.last()) {
            (Some(first), Some(last)) => read::forget_buckets(session, uuid(*first), uuid(*last)).await,
            _ => Ok(()),
        }
    }
}

async fn drop_day(
    session: &Session,
    batch: &Batch<'_>,
    day: &Day,
    walked: Walked,
    forgotten: &mut Forgotten,
) -> Result<Round<Place>, EngineError> {
    if !days::of_events(session).await?.contains(day) {
        // Another node was faster.
        return Ok(Round::events(day.beyond()));
    }
    let dropped = days::drop_events(session, Some(batch.now), batch.dead(), day, kept!()).await;
    Ok(match settle(session, dropped).await? {
        Some(Dropped::Gone(events)) => {
            forgotten.events = events;
            Round::events(day.beyond())
        }
        Some(Dropped::Crowded) if walked == Walked::No => Round::events(next_id(day.first())),
        // Another transaction is in the way, or much of the day has to stay: the next round looks again.
        Some(Dropped::Crowded) | None => Round::events(day.beyond()),
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
