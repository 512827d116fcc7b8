//! Forgetting: old events, then the keys that outlive them, and the audit; a small batch at a time.
//!
//! Promises: what is pending is never forgotten, dead and quarantined events only when the operator said how long they
//! are kept; a key only after its window and when nothing more can come of its event. Each event is judged by itself:
//! one that has to stay keeps nothing behind it. Each batch is one short transaction, and of several nodes one forgets
//! at a time. An event is locked before it is looked at for the last time, so an order that comes at that moment finds
//! it whole or finds nothing.
//!
//! Nothing goes while the clock is in doubt (`decide::forget`): each batch looks at it first. The time that counts
//! is the earlier one of the database's and this node's, so one wrong clock alone forgets nothing too early.
//!
//! A round goes over the events whose ids are old. Then over those whose ids run ahead of their receipt, because a
//! clock had been set back: the search index knows the buckets in which there are such events, and what it has not
//! reached are ids in the future. Then over what only the engine has, then over the ledger. The position is kept in
//! memory; a restart begins a new round, which costs reading and nothing else.
//!
//! Each journal's own: on PostgreSQL old days are dropped as a whole. SQLite forgets no event whose key is not in the
//! ledger yet.

use std::collections::HashSet;
use std::future::{Future, ready};

use oncehook_verify::UnixMicros;

use super::Result;
use super::buckets::{AHEAD_MILLIS, Part, ahead_value, behind, bucket_of, first_of, first_of_bucket, ids};
use super::operate::{Operates, audit};
use super::value::{Column, Param, Row};
use crate::event::EventId;
use crate::journal::decide::forget::{ClockDoubt, ClockMemory, look, micros};
use crate::journal::{Forgotten, Retention, TRUST_CLOCK, Who};

/// What stands in the way of forgetting: something pending, or something that an operator may still want and that ended
/// (or, if it is held, came) not long enough ago. `$1` is now, `$2` is how long such things are kept; null is for ever.
macro_rules! kept {
    () => {
        "
    EXISTS (SELECT 1 FROM oncehook.deliveries d WHERE d.event = e.id
               AND (d.state IN ('ready', 'running', 'retrying', 'parked')
                    OR d.state = 'dead' AND coalesce(coalesce(d.settled_at, e.received_at) + $2 > $1, true)))
 OR EXISTS (SELECT 1 FROM oncehook.flags f WHERE f.event = e.id AND f.flag = 'quarantined'
               AND coalesce(e.received_at + $2 > $1, true))"
    };
}
pub(crate) use kept;

/// Whether nothing more can come of an event, short of a forced replay.
macro_rules! is_done {
    ($event:literal) => {
        concat!(
            "NOT EXISTS (SELECT 1 FROM oncehook.deliveries d WHERE d.event = ",
            $event,
            " AND d.state IN ('ready', 'running', 'retrying', 'parked', 'dead'))
             AND NOT EXISTS (SELECT 1 FROM oncehook.flags f WHERE f.event = ",
            $event,
            " AND f.flag = 'quarantined')"
        )
    };
}
pub(crate) use is_done;

/// A session on which the journal forgets.
pub(crate) trait Forgets: Operates {
    /// A position in what only this engine has.
    type Place: std::fmt::Debug + Clone + Send + Sync + 'static;

    /// `$1`, `$2`: scope and entity of the clock's memory. Returns it.
    const CLOCK: &'static str = "SELECT state FROM oncehook.entities WHERE scope = $1 AND entity = $2";
    /// Returns when the newest event was received.
    const NEWEST: &'static str = "SELECT received_at FROM oncehook.events ORDER BY id DESC LIMIT 1";
    /// `$1`, `$2`: scope and entity; `$3`: the clock's memory.
    const REMEMBER_CLOCK: &'static str = "INSERT INTO oncehook.entities (scope, entity, state) VALUES ($1, $2, $3)
        ON CONFLICT (scope, entity) DO UPDATE SET state = excluded.state";
    /// Returns whether this node may forget now.
    // The number is `forget` in ASCII.
    const LOCK: &'static str = "SELECT pg_try_advisory_xact_lock(112632776975732)";
    /// Ends what `lock` began, if the transaction's end does not.
    const UNLOCK: Option<&'static str> = None;
    /// `$1`, `$2`: the first and the last bucket; `$3`: the value of ids that run ahead. Returns the first bucket between
    /// them with such an id, or null.
    const BUCKET_AHEAD: &'static str = "SELECT min(bucket) FROM oncehook.buckets /*! FORCE INDEX (PRIMARY) */
        WHERE value = $3 AND bucket BETWEEN $1 AND $2";
    /// `$1`: now; `$2`: how long the dead are kept, null for ever; `$3`, `$4`: the first event and the one behind the
    /// last; `$5`: received then or earlier is old; `$6`: limit. Returns events in order, each with whether it may go.
    const LOOK: &'static str = concat!(
        "SELECT e.id, e.received_at <= $5 AND NOT (",
        kept!(),
        ") FROM oncehook.events e WHERE e.id >= $3 AND e.id < $4 ORDER BY e.id LIMIT $6"
    );
    /// `$1`: table of events. Locks those that are not locked yet, and returns them.
    const LOCK_EVENTS: &'static str = "
        SELECT id FROM oncehook.events WHERE id = ANY($1) ORDER BY id FOR UPDATE SKIP LOCKED";
    /// `$1`: table of events. Removes what is known of their bodies.
    const DELETE_BODIES: &'static str = "DELETE FROM oncehook.bodies b USING oncehook.events e
        WHERE e.id = ANY($1) AND NOT e.key_signed
          AND b.source = e.source AND b.digest = e.digest AND b.event = e.id";
    /// `$1`: table of events. Removes what a table (`{}`) holds beside them.
    const DELETE_BESIDE: &'static str = "DELETE FROM oncehook.{} WHERE event = ANY($1)";
    /// `$1`: table of events.
    const DELETE_EVENTS: &'static str = "DELETE FROM oncehook.events WHERE id = ANY($1)";
    /// `$1`, `$2`: source and key to begin behind; `$3`: limit. Returns source, key, when it may go, and its event.
    const KEYS: &'static str = "SELECT source, key, expires_at, event FROM oncehook.keys WHERE (source, key) > ($1, $2)
        ORDER BY source, key LIMIT $3";
    /// `$1`: now; `$2`: table of source, key, event. Removes those of whose events nothing more can come, short of a
    /// forced replay. An event that is gone has neither deliveries nor flags.
    const DELETE_KEYS: &'static str = concat!(
        "DELETE FROM oncehook.keys k USING unnest($2::text[], $3::bytea[], $4::uuid[]) AS t(source, key, event)
              WHERE k.source = t.source AND k.key = t.key AND k.event = t.event AND k.expires_at <= $1 AND ",
        is_done!("k.event")
    );
    /// As for [`DELETE_KEYS`](Self::DELETE_KEYS), and before it: removes from a table (`{}`) what copies have left that came when their event was
    /// forgotten already. Nothing where the journal does not count such copies, or sweeps them up by itself.
    const DELETE_TRACES: Option<&'static str> = None;
    /// `$1`: written then or earlier is old; `$2`: limit.
    const DELETE_AUDIT: &'static str = "DELETE FROM oncehook.audit WHERE id IN (
        SELECT id FROM oncehook.audit WHERE at <= $1 ORDER BY id LIMIT $2)";

    /// Before a round. Its own transactions.
    fn begin_round(&mut self, _given: Option<i64>) -> impl Future<Output = Result<()>> + Send {
        ready(Ok(()))
    }

    /// Up to which event (excluded) a round looks at events with old ids one by one, from this one on; and where it goes on
    /// then.
    fn plan(
        &mut self,
        batch: &Batch<'_>,
        _from: EventId,
    ) -> impl Future<Output = Result<(EventId, Round<Self::Place>)>> + Send {
        ready(Ok((batch.beyond_usual(), Round::ahead())))
    }

    /// Where a round goes on behind the events.
    fn behind_events() -> Round<Self::Place> {
        Round::keys()
    }

    /// A step in what only this engine has. Returns where the round is then.
    fn step(
        &mut self,
        batch: &mut Batch<'_>,
        place: &Self::Place,
    ) -> impl Future<Output = Result<Round<Self::Place>>> + Send;

    /// Waits until no node is adding events to the search index, before events are locked.
    fn before_delete(&mut self) -> impl Future<Output = Result<()>> + Send {
        ready(Ok(()))
    }

    /// Removes from the search index the buckets in which no event is left, among those of events that this transaction
    /// has removed.
    fn forget_buckets(&mut self, gone: &[EventId]) -> impl Future<Output = Result<()>> + Send;
}

/// Where a round is.
#[derive(Debug, Clone)]
pub(crate) enum Round<P> {
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
    /// The first of the events that run ahead.
    pub(crate) fn ahead() -> Self {
        Self::Ahead(Part::all().from)
    }

    /// The first of the keys.
    pub(crate) fn keys() -> Self {
        Self::Keys(String::new(), Vec::new())
    }
}

impl<P> Default for Round<P> {
    fn default() -> Self {
        Self::Events(Part::all().from)
    }
}

/// What a batch goes by, and what it has forgotten.
pub(crate) struct Batch<'r> {
    pub(crate) now: i64,
    pub(crate) retention: &'r Retention,
    pub(crate) forgotten: Forgotten,
}

impl Batch<'_> {
    /// Events that were received then or earlier are old.
    pub(crate) fn received(&self) -> i64 {
        self.now.saturating_sub(micros(self.retention.payload))
    }

    /// How long dead and held events are kept; `None` is for ever.
    pub(crate) fn dead(&self) -> Option<i64> {
        self.retention.dead.map(micros)
    }

    /// The first id that no old event has, unless its id runs ahead.
    pub(crate) fn beyond_usual(&self) -> EventId {
        first_of(self.received() / 1_000 + AHEAD_MILLIS + 1)
    }
}

/// Forgets a batch. Returns also where the round is then.
pub(crate) async fn batch<S: Forgets>(
    session: &mut S,
    given: Option<i64>,
    wall: i64,
    round: &Round<S::Place>,
    retention: &Retention,
) -> Result<(Forgotten, Round<S::Place>)> {
    if matches!(round, Round::Events(from) if *from == Part::all().from) {
        session.begin_round(given).await?;
    }
    let now = session.begin(given).await?.min(wall);
    let stopped = look_at_clock(session, now).await?;
    let may_forget = match stopped {
        Some(_) => false,
        None => session.row(S::LOCK, &[]).await?.is_some_and(|row| row.is_true(0).unwrap_or(false)),
    };
    if !may_forget {
        session.commit().await?;
        return Ok((Forgotten { stopped, ..Forgotten::default() }, round.clone()));
    }
    let mut batch = Batch { now, retention, forgotten: Forgotten::default() };
    let done = batch.forget(session, round).await;
    if let Some(unlock) = S::UNLOCK {
        if done.is_err() {
            session.rollback().await?;
        }
        session.run(unlock).await?;
    }
    Ok((batch.forgotten, done?))
}

/// Where the clock's memory stands: among the entities, under a scope that no route and no machine can have.
const CLOCK: (&str, &str) = ("clock:forgetting", "seen");

/// Compares the clock with the time that was believed last. Returns the doubt in which nothing may be forgotten.
pub(crate) async fn look_at_clock<S: Forgets>(session: &mut S, now: i64) -> Result<Option<ClockDoubt>> {
    let stored = session.row(S::CLOCK, &[CLOCK.0.into(), CLOCK.1.into()]).await?;
    let stored = stored.map(|row| row.maybe_text(0)).transpose()?.flatten();
    let stored = stored.as_deref().and_then(ClockMemory::parse);
    let newest = match stored {
        Some(_) => None,
        None => session.row(S::NEWEST, &[]).await?.map(|row| row.time(0)).transpose()?,
    };
    let (memory, doubt) = look(stored, newest, UnixMicros(now));
    if memory.is_news(stored.as_ref()) {
        remember_clock(session, &memory).await?;
    }
    Ok(doubt)
}

async fn remember_clock<S: Forgets>(session: &mut S, memory: &ClockMemory) -> Result<()> {
    let text = memory.text();
    let row = [Param::from(CLOCK.0), CLOCK.1.into(), (&text).into()];
    session.change(S::REMEMBER_CLOCK, &row).await.map(|_| ())
}

/// An operator says that the time is right.
pub(crate) async fn trust_clock<S: Forgets>(session: &mut S, given: Option<i64>, wall: i64, who: &Who) -> Result<()> {
    let now = session.begin(given).await?.min(wall);
    remember_clock(session, &ClockMemory::believing(UnixMicros(now))).await?;
    let (action, subject) = TRUST_CLOCK;
    audit(session, now, who, action, subject, None).await?;
    session.commit().await
}

/// What stands beside events, by the table; and what copies of an event leave there, also after it was forgotten.
const BESIDE: [&str; 2] = ["deliveries", "attempts"];
const TRACES: [&str; 4] = ["conflicts", "duplicates", "flags", "spool_aliases"];

impl Batch<'_> {
    /// Forgets as the only node that does, and commits. Returns where the round is then.
    async fn forget<S: Forgets>(&mut self, session: &mut S, round: &Round<S::Place>) -> Result<Round<S::Place>> {
        let next = match round {
            Round::Events(from) => {
                let (beyond, then) = session.plan(self, *from).await?;
                Some(self.walk(session, *from, beyond).await?.map_or(then, Round::Events))
            }
            Round::Ahead(from) => Some(self.ahead(session, *from).await?),
            Round::Own(place) => Some(session.step(self, place).await?),
            Round::Keys(source, key) => self.keys(session, source, key).await?,
        };
        let most = self.retention.batch;
        let old = self.now.saturating_sub(micros(self.retention.audit));
        let audit = session.change(S::DELETE_AUDIT, &[old.into(), most.into()]).await?;
        session.commit().await?;
        if self.forgotten.events > 0 && matches!(round, Round::Own(_)) {
            crate::crash::point("day_dropped");
        }
        self.forgotten.audit = usize::try_from(audit).unwrap_or(usize::MAX);
        self.forgotten.more = next.is_some() || self.forgotten.audit == most;
        Ok(next.unwrap_or_default())
    }

    /// Goes on among the events whose ids run ahead of their receipt. Returns where the round is then.
    async fn ahead<S: Forgets>(&mut self, session: &mut S, from: EventId) -> Result<Round<S::Place>> {
        let from = from.max(self.beyond_usual());
        // From here on ids are in the future. An event with such an id is not in the search index.
        let future = first_of(self.now / 1_000 + AHEAD_MILLIS);
        let asked = [Param::from(bucket_of(from)), bucket_of(future).into(), ahead_value().into()];
        let found = match from < future {
            true => session.row(S::BUCKET_AHEAD, &asked).await?.map(|row| row.maybe_int(0)).transpose()?.flatten(),
            false => None,
        };
        let (from, beyond, then) = match found {
            Some(bucket) => {
                let beyond = first_of_bucket(bucket + 1);
                (from.max(first_of_bucket(bucket)), beyond, Round::Ahead(beyond))
            }
            None => (from.max(future), Part::all().to, S::behind_events()),
        };
        Ok(self.walk(session, from, beyond).await?.map_or(then, Round::Ahead))
    }

    /// Looks at events one by one, between two ids (the second excluded), and forgets those that may go. Returns where
    /// it goes on, if it did not come to the end.
    async fn walk<S: Forgets>(&mut self, session: &mut S, from: EventId, beyond: EventId) -> Result<Option<EventId>> {
        if from >= beyond {
            return Ok(None);
        }
        let (now, dead, received, most) = (self.now, self.dead(), self.received(), self.retention.batch);
        let asked = [Param::from(now), dead.into(), from.into(), beyond.into(), received.into(), most.into()];
        let rows = session.rows(S::LOOK, &asked).await?;
        let chosen = may_go(&rows)?;
        if !chosen.is_empty() {
            session.before_delete().await?;
            let locked = session.rows(S::LOCK_EVENTS, &[Param::ids(chosen)]).await?;
            let locked: HashSet<EventId> = ids(&locked)?.into_iter().collect();
            // Looked at again now that no operator can order anything for them.
            let mut gone = may_go(&session.rows(S::LOOK, &asked).await?)?;
            gone.retain(|event| locked.contains(event));
            if !gone.is_empty() {
                delete::<S>(session, &gone).await?;
            }
            self.forgotten.events = gone.len();
        }
        let last = rows.last().filter(|_| rows.len() == most);
        last.map(|last| Ok(behind(last.event(0)?))).transpose()
    }

    /// Goes on in the ledger. Returns where the round is then; nowhere if it is over.
    async fn keys<S: Forgets>(&mut self, session: &mut S, source: &str, key: &[u8]) -> Result<Option<Round<S::Place>>> {
        let most = self.retention.batch;
        let rows = session.rows(S::KEYS, &[source.into(), key.into(), most.into()]).await?;
        let (mut sources, mut keys, mut events) = (Vec::new(), Vec::new(), Vec::new());
        for row in &rows {
            if row.int(2)? <= self.now {
                sources.push(row.text(0)?);
                keys.push(Some(row.bytes(1)?));
                events.push(row.event(3)?);
            }
        }
        if !keys.is_empty() {
            let sources = Column::texts(sources.iter().map(String::as_str));
            let table = Param::Table(vec![sources, Column::Bytes(keys), Column::Ids(events)]);
            let asked = [self.now.into(), table];
            for (sql, table) in S::DELETE_TRACES.iter().flat_map(|sql| TRACES.map(|table| (sql, table))) {
                session.change(&sql.replace("{}", table), &asked).await?;
            }
            let deleted = session.change(S::DELETE_KEYS, &asked).await?;
            self.forgotten.keys = usize::try_from(deleted).unwrap_or(usize::MAX);
        }
        let last = rows.last().filter(|_| rows.len() == most);
        last.map(|last| Ok(Round::Keys(last.text(0)?, last.bytes(1)?.to_vec()))).transpose()
    }
}

/// The events that may go, of those that were looked at.
fn may_go(rows: &[impl Row]) -> Result<Vec<EventId>> {
    let mut chosen = Vec::new();
    for row in rows {
        if row.is_true(1)? {
            chosen.push(row.event(0)?);
        }
    }
    Ok(chosen)
}

/// Removes events and all that stands beside them, except their keys.
async fn delete<S: Forgets>(session: &mut S, gone: &[EventId]) -> Result<()> {
    let asked = [Param::ids(gone.iter().copied())];
    session.change(S::DELETE_BODIES, &asked).await?;
    for table in BESIDE.into_iter().chain(TRACES) {
        session.change(&S::DELETE_BESIDE.replace("{}", table), &asked).await?;
    }
    session.change(S::DELETE_EVENTS, &asked).await?;
    session.forget_buckets(gone).await
}
