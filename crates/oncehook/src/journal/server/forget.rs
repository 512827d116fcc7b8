//! Forgetting: old events, then the keys that outlive them, and the audit; a small batch at a time.
//!
//! Promises: what is pending is never forgotten, dead and quarantined events only when the operator said how long they
//! are kept; a key only after its window and when nothing more can come of its event. Each event is judged by itself:
//! one that has to stay keeps nothing behind it. Each batch is one short transaction, and of several nodes one forgets
//! at a time. An event is locked before it is looked at for the last time, so an order that comes at that moment finds
//! it whole or finds nothing.
//!
//! Nothing goes while the clock is in doubt (`journal::forgetting`): each batch looks at it first. The time that counts
//! is the earlier one of the database's and this node's, so one wrong clock alone forgets nothing too early.
//!
//! A round goes over the events whose ids are old. Then over those whose ids run ahead of their receipt, because a
//! clock had been set back: the search index knows the buckets in which there are such events, and what it has not
//! reached are ids in the future. Then over what only the engine has, then over the ledger. The position is kept in
//! memory; a restart begins a new round, which costs reading and nothing else.

use std::future::Future;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use oncehook_verify::UnixMicros;
use uuid::Uuid;

use super::ServerJournal;
use super::engine::Session;
use super::error::EngineError;
use super::operate::{Operates, audit};
use super::read::Reads;
use super::read::buckets::{self, AHEAD_MILLIS, ahead_value, bucket_of, first_of_bucket};
use super::value::{Column, Param, Row};
use super::work::work;
use crate::event::EventId;
use crate::journal::{ClockDoubt, ClockMemory, Forgotten, Retention, TRUST_CLOCK, Who, WorkError, look};

/// The texts of these statements.
pub(in crate::journal) struct ForgetSql {
    /// `$1`, `$2`: scope and entity of the clock's memory. Returns it.
    pub(in crate::journal) clock: &'static str,
    /// Returns when the newest event was received.
    pub(in crate::journal) newest: &'static str,
    /// `$1`, `$2`: scope and entity; `$3`: the clock's memory.
    pub(in crate::journal) remember_clock: &'static str,
    /// Returns whether this node may forget now.
    pub(in crate::journal) lock: &'static str,
    /// Ends what `lock` began, if the transaction's end does not.
    pub(in crate::journal) unlock: Option<&'static str>,
    /// `$1`, `$2`: the first and the last bucket; `$3`: the value of ids that run ahead. Returns the first bucket between
    /// them with such an id, or null.
    pub(in crate::journal) bucket_ahead: &'static str,
    /// `$1`: now; `$2`: how long the dead are kept, null for ever; `$3`, `$4`: the first event and the one behind the
    /// last; `$5`: received then or earlier is old; `$6`: limit. Returns events in order, each with whether it may go.
    pub(in crate::journal) look: &'static str,
    /// `$1`: table of events. Locks those that are not locked yet, and returns them.
    pub(in crate::journal) lock_events: &'static str,
    /// `$1`, `$2`: as for `look`; `$3`: table of events. Returns those of which nothing must be kept.
    pub(in crate::journal) look_again: &'static str,
    /// Each with `$1`: table of events. Together they remove events and all that stands beside them, except their keys.
    pub(in crate::journal) delete: &'static [&'static str],
    /// `$1`, `$2`: source and key to begin behind; `$3`: limit. Returns source, key, and when it may go.
    pub(in crate::journal) keys: &'static str,
    /// `$1`: now; `$2`: table of source, key. Removes those of whose events nothing more can come, short of a forced
    /// replay. An event that is gone has neither deliveries nor flags.
    pub(in crate::journal) delete_keys: &'static str,
    /// `$1`: written then or earlier is old; `$2`: limit.
    pub(in crate::journal) delete_audit: &'static str,
}

/// What forgetting asks of an engine.
pub(in crate::journal) trait Forgets: Operates + Reads {
    /// A position in what only this engine has.
    type Place: std::fmt::Debug + Clone + Send + Sync + 'static;

    const FORGET: ForgetSql;

    /// Where the round of this process is.
    fn round(&self) -> &Mutex<Round<Self::Place>>;

    /// Before a round. Its own transactions.
    fn begin_round(
        _session: &mut Self::Session,
        _given: Option<i64>,
    ) -> impl Future<Output = Result<(), EngineError>> + Send {
        async { Ok(()) }
    }

    /// How a round goes on among the events with old ids, from this one on.
    fn plan(
        _session: &mut Self::Session,
        batch: &Batch<'_>,
        from: EventId,
    ) -> impl Future<Output = Result<Plan<Self::Place>, EngineError>> + Send {
        let (from, beyond) = (uuid(from), batch.beyond_usual());
        async move { Ok(Plan::Walk { from, beyond, then: Round::ahead() }) }
    }

    /// Where a round goes on behind the events.
    fn behind_events() -> Round<Self::Place> {
        Round::keys()
    }

    /// A step in what only this engine has. Returns where the round is then.
    fn step(
        session: &mut Self::Session,
        batch: &Batch<'_>,
        place: &Self::Place,
        forgotten: &mut Forgotten,
    ) -> impl Future<Output = Result<Round<Self::Place>, EngineError>> + Send;

    /// Waits until no node is adding events to the search index, before events are locked.
    fn before_delete(session: &mut Self::Session) -> impl Future<Output = Result<(), EngineError>> + Send;

    /// Removes from the search index the buckets in which no event is left, among those of events that this transaction
    /// has removed.
    fn forget_buckets(
        session: &mut Self::Session,
        gone: &[EventId],
    ) -> impl Future<Output = Result<(), EngineError>> + Send;
}

/// Where a round is.
#[derive(Debug, Clone)]
pub(in crate::journal) enum Round<P> {
    /// Among the events whose ids are old, from this one on.
    Events(EventId),
    /// Among those whose ids run ahead, from this one on.
    Ahead(EventId),
    /// In what only the engine has.
    Own(P),
    /// In the ledger, behind this key.
    Keys(String, Vec<u8>),
}

impl<P> Round<P> {
    pub(in crate::journal) fn events(from: Uuid) -> Self {
        Self::Events(event(from))
    }

    /// The first of the events that run ahead.
    pub(in crate::journal) fn ahead() -> Self {
        Self::Ahead(event(Uuid::nil()))
    }

    /// The first of the keys.
    pub(in crate::journal) fn keys() -> Self {
        Self::Keys(String::new(), Vec::new())
    }
}

impl<P> Default for Round<P> {
    fn default() -> Self {
        Self::events(Uuid::nil())
    }
}

/// How a round goes on among the events.
pub(in crate::journal) enum Plan<P> {
    /// It looks at events one by one, up to `beyond` (excluded), and goes on with `then`.
    Walk { from: Uuid, beyond: Uuid, then: Round<P> },
    /// Somewhere else.
    At(Round<P>),
}

/// What a batch goes by.
pub(in crate::journal) struct Batch<'r> {
    pub(in crate::journal) now: i64,
    pub(in crate::journal) retention: &'r Retention,
}

impl Batch<'_> {
    /// Events that were received then or earlier are old.
    pub(in crate::journal) fn received(&self) -> i64 {
        self.now.saturating_sub(micros(self.retention.payload))
    }

    /// How long dead and held events are kept; `None` is for ever.
    pub(in crate::journal) fn dead(&self) -> Option<i64> {
        self.retention.dead.map(micros)
    }

    /// The first id that no old event has, unless its id runs ahead.
    pub(in crate::journal) fn beyond_usual(&self) -> Uuid {
        uuid(buckets::first_of(self.received() / 1_000 + AHEAD_MILLIS + 1))
    }

    /// The first id in the future. An event with such an id is not in the search index.
    fn future(&self) -> Uuid {
        uuid(buckets::first_of(self.now / 1_000 + AHEAD_MILLIS))
    }
}

/// An age. One that is longer than there has been time is as long as that.
pub(in crate::journal) fn micros(age: Duration) -> i64 {
    i64::try_from(age.as_micros()).unwrap_or(i64::MAX).min(i64::MAX / 2)
}

fn uuid(id: EventId) -> Uuid {
    Uuid::from_bytes(*id.as_bytes())
}

fn event(id: Uuid) -> EventId {
    EventId::from_bytes(*id.as_bytes())
}

/// Forgets a batch, and remembers where the round is then.
pub(in crate::journal) async fn forget<E: Forgets>(
    journal: &ServerJournal<E>,
    retention: &Retention,
) -> Result<Forgotten, WorkError> {
    let (given, wall) = (journal.shared.given_time(), journal.shared.clock.now().0);
    let round = || journal.workers.engine.round().lock().unwrap_or_else(PoisonError::into_inner);
    let at = round().clone();
    let (forgotten, next) = work!(journal, |session| batch::<E>(&mut session, given, wall, &at, retention))?;
    *round() = next;
    Ok(forgotten)
}

/// Forgets a batch. Returns also where the round is then.
async fn batch<E: Forgets>(
    session: &mut E::Session,
    given: Option<i64>,
    wall: i64,
    round: &Round<E::Place>,
    retention: &Retention,
) -> Result<(Forgotten, Round<E::Place>), EngineError> {
    if matches!(round, Round::Events(from) if uuid(*from).is_nil()) {
        E::begin_round(session, given).await?;
    }
    let now = session.begin(given).await?.min(wall);
    let stopped = look_at_clock::<E>(session, now).await?;
    let may_forget = match stopped {
        Some(_) => false,
        None => session.row(E::FORGET.lock, &[]).await?.is_some_and(|row| row.is_true(0).unwrap_or(false)),
    };
    if !may_forget {
        session.commit().await?;
        return Ok((Forgotten { stopped, ..Forgotten::default() }, round.clone()));
    }
    let done = locked_batch::<E>(session, &Batch { now, retention }, round).await;
    if let Some(unlock) = E::FORGET.unlock {
        if done.is_err() {
            session.rollback().await?;
        }
        session.run(unlock).await?;
    }
    done
}

/// Forgets a batch as the only node that does, and commits.
async fn locked_batch<E: Forgets>(
    session: &mut E::Session,
    batch: &Batch<'_>,
    round: &Round<E::Place>,
) -> Result<(Forgotten, Round<E::Place>), EngineError> {
    let mut forgotten = Forgotten::default();
    let next = match round {
        Round::Events(from) => match E::plan(session, batch, *from).await? {
            Plan::At(round) => Some(round),
            Plan::Walk { from, beyond, then } => {
                let on = walk::<E>(session, batch, (from, beyond), &mut forgotten).await?;
                Some(on.map_or(then, Round::Events))
            }
        },
        Round::Ahead(from) => Some(ahead::<E>(session, batch, *from, &mut forgotten).await?),
        Round::Own(place) => Some(E::step(session, batch, place, &mut forgotten).await?),
        Round::Keys(source, key) => keys::<E>(session, batch, (source, key), &mut forgotten).await?,
    };
    let most = batch.retention.batch;
    let old = batch.now.saturating_sub(micros(batch.retention.audit));
    let audit = session.change(E::FORGET.delete_audit, &[old.into(), most.into()]).await?;
    session.commit().await?;
    if forgotten.events > 0 && matches!(round, Round::Own(_)) {
        crate::crash::point("day_dropped");
    }
    forgotten.audit = usize::try_from(audit).unwrap_or(usize::MAX);
    forgotten.more = next.is_some() || forgotten.audit == most;
    Ok((forgotten, next.unwrap_or_default()))
}

/// Where the clock's memory stands: among the entities, under a scope that no route and no machine can have.
const CLOCK: (&str, &str) = ("clock:forgetting", "seen");

/// Compares the clock with the time that was believed last. Returns the doubt in which nothing may be forgotten.
async fn look_at_clock<E: Forgets>(session: &mut E::Session, now: i64) -> Result<Option<ClockDoubt>, EngineError> {
    let stored = session.row(E::FORGET.clock, &[CLOCK.0.into(), CLOCK.1.into()]).await?;
    let stored = stored.map(|row| row.maybe_text(0)).transpose()?.flatten();
    let stored = stored.as_deref().and_then(ClockMemory::parse);
    let newest = match stored {
        Some(_) => None,
        None => session.row(E::FORGET.newest, &[]).await?.map(|row| row.time(0)).transpose()?,
    };
    let (memory, doubt) = look(stored, newest, UnixMicros(now));
    if memory.is_news(stored.as_ref()) {
        remember_clock::<E>(session, &memory).await?;
    }
    Ok(doubt)
}

async fn remember_clock<E: Forgets>(session: &mut E::Session, memory: &ClockMemory) -> Result<(), EngineError> {
    let text = memory.text();
    let row = [Param::from(CLOCK.0), CLOCK.1.into(), (&text).into()];
    session.change(E::FORGET.remember_clock, &row).await.map(|_| ())
}

/// An operator says that the time is right.
pub(in crate::journal) async fn trust_clock<E: Forgets>(
    session: &mut E::Session,
    given: Option<i64>,
    wall: i64,
    who: &Who,
) -> Result<(), EngineError> {
    let now = session.begin(given).await?.min(wall);
    remember_clock::<E>(session, &ClockMemory::believing(UnixMicros(now))).await?;
    let (action, subject) = TRUST_CLOCK;
    audit::<E>(session, now, who, action, subject, None).await?;
    session.commit().await
}

/// Goes on among the events whose ids run ahead of their receipt. Returns where the round is then.
async fn ahead<E: Forgets>(
    session: &mut E::Session,
    batch: &Batch<'_>,
    from: EventId,
    forgotten: &mut Forgotten,
) -> Result<Round<E::Place>, EngineError> {
    let (from, future) = (uuid(from).max(batch.beyond_usual()), batch.future());
    let found = match from < future {
        true => {
            let (first, last) = (bucket_of(event(from)), bucket_of(event(future)));
            session
                .row(E::FORGET.bucket_ahead, &[first.into(), last.into(), ahead_value().into()])
                .await?
                .map(|row| row.maybe_int(0))
                .transpose()?
                .flatten()
        }
        false => None,
    };
    let (part, then) = match found {
        Some(bucket) => {
            let beyond = first_of_bucket(bucket + 1);
            ((from.max(uuid(first_of_bucket(bucket))), uuid(beyond)), Round::Ahead(beyond))
        }
        None => ((from.max(future), Uuid::max()), E::behind_events()),
    };
    Ok(walk::<E>(session, batch, part, forgotten).await?.map_or(then, Round::Ahead))
}

/// Looks at events one by one, between two ids (the second excluded), and forgets those that may go. Returns where it
/// goes on, if it did not come to the end.
async fn walk<E: Forgets>(
    session: &mut E::Session,
    batch: &Batch<'_>,
    (from, beyond): (Uuid, Uuid),
    forgotten: &mut Forgotten,
) -> Result<Option<EventId>, EngineError> {
    if from >= beyond {
        return Ok(None);
    }
    let (now, dead, most) = (batch.now, batch.dead(), batch.retention.batch);
    let asked =
        [Param::from(now), dead.into(), event(from).into(), event(beyond).into(), batch.received().into(), most.into()];
    let rows = session.rows(E::FORGET.look, &asked).await?;
    let mut chosen = Vec::new();
    for row in &rows {
        if row.is_true(1)? {
            chosen.push(row.event(0)?);
        }
    }
    if !chosen.is_empty() {
        E::before_delete(session).await?;
        let locked = events::<E>(session, E::FORGET.lock_events, &[Param::ids(chosen)]).await?;
        // Looked at again now that no operator can order anything for them.
        let asked = [Param::from(now), dead.into(), Param::ids(locked)];
        let gone = events::<E>(session, E::FORGET.look_again, &asked).await?;
        if !gone.is_empty() {
            let asked = [Param::ids(gone.iter().copied())];
            for sql in E::FORGET.delete {
                session.change(sql, &asked).await?;
            }
            E::forget_buckets(session, &gone).await?;
        }
        forgotten.events = gone.len();
    }
    match rows.last() {
        Some(last) if rows.len() == most => Ok(Some(buckets::behind(last.event(0)?))),
        _ => Ok(None),
    }
}

async fn events<E: Forgets>(
    session: &mut E::Session,
    sql: &str,
    params: &[Param<'_>],
) -> Result<Vec<EventId>, EngineError> {
    session.rows(sql, params).await?.iter().map(|row| row.event(0)).collect()
}

/// Goes on in the ledger. Returns where the round is then; nowhere if it is over.
async fn keys<E: Forgets>(
    session: &mut E::Session,
    batch: &Batch<'_>,
    (source, key): (&str, &[u8]),
    forgotten: &mut Forgotten,
) -> Result<Option<Round<E::Place>>, EngineError> {
    let most = batch.retention.batch;
    let rows = session.rows(E::FORGET.keys, &[source.into(), key.into(), most.into()]).await?;
    let mut expired = Vec::new();
    for row in &rows {
        if row.int(2)? <= batch.now {
            expired.push((row.text(0)?, row.bytes(1)?));
        }
    }
    if !expired.is_empty() {
        let table = Param::Table(vec![
            Column::texts(expired.iter().map(|(source, _)| source.as_str())),
            Column::Bytes(expired.iter().map(|(_, key)| Some(*key)).collect()),
        ]);
        let deleted = session.change(E::FORGET.delete_keys, &[batch.now.into(), table]).await?;
        forgotten.keys = usize::try_from(deleted).unwrap_or(usize::MAX);
    }
    match rows.last() {
        Some(last) if rows.len() == most => Ok(Some(Round::Keys(last.text(0)?, last.bytes(1)?.to_vec()))),
        _ => Ok(None),
    }
}
