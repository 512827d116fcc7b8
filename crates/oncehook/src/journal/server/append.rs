//! Storing one batch of events: what is prepared, decided and counted the same way on every engine.
//!
//! Promises: copies of a key inside the batch are folded, so the ledger is asked once for each key; the ledger's unique key
//! names the holder of each key, and [`rule`] says from that what every event is; a request whose outcome is not known whole
//! gets no receipt. Rows that several nodes write are written in one order, so that nodes do not wait for each other for ever.
//!
//! Does not: retry or answer. The lane does.

use std::collections::{BTreeMap, HashMap};
use std::future::Future;

use super::engine::{AppendContext, Candidate, Session};
use super::error::{EngineError, Tries};
use super::lane::{Lane, Request};
#[cfg(feature = "planted")]
use super::planted::MistakenAppends as Steps;
use super::schema::Schema;
use super::value::{Column, Param, Row};
use crate::event::{EventId, NewEvent, SourceName};
use crate::journal::decide::append::{Holder, Known, rule};
use crate::journal::tally::Pending;
use crate::journal::{CONFLICTS_KEPT, Layer, Receipt, SourceCounts, Verdict};
#[cfg(not(feature = "planted"))]
use Appends as Steps;

/// How an engine stores events.
pub(in crate::journal) trait Appends: Schema {
    /// What a lane remembers from one batch to the next.
    type LaneMemory: Default + Send + Sync + 'static;

    /// Whether [`append`](Self::append) is a transaction of its own, which is committed when it returns.
    const APPEND_COMMITS: bool;
    const APPEND: AppendSql;

    /// Stores the candidates whose keys are new, with all that belongs to them; the unique key decides. Candidates have
    /// different keys. Returns, in their order, who holds each key now. Before the first error nothing is stored, or the
    /// outcome is unknown.
    fn append(
        &self,
        session: &mut Self::Session,
        memory: &mut Self::LaneMemory,
        append: AppendContext,
        candidates: &[Candidate<'_>],
    ) -> impl Future<Output = Result<Stored, EngineError>> + Send;
    /// Commits what [`append`](Self::append) has stored for a batch, unless it has done so itself.
    fn commit(session: &mut Self::Session, _batch: &[Request]) -> impl Future<Output = Result<(), EngineError>> + Send {
        async { if Self::APPEND_COMMITS { Ok(()) } else { session.commit().await } }
    }
    /// Adds counted duplicates to what is stored, in the order of their events. Other nodes may do the same with the same
    /// events. Events that are gone are left out.
    fn store_duplicates(
        session: &mut Self::Session,
        pending: &[(EventId, &Pending)],
    ) -> impl Future<Output = Result<(), EngineError>> + Send;
    /// The memory of a lane that takes the careful way, which the self-test must try.
    fn careful() -> Self::LaneMemory {
        Self::LaneMemory::default()
    }
    /// Whether an error says that the ledger's unique key refused a row, and nothing else.
    fn is_refused_key(error: &EngineError) -> bool;
}

/// Statements of an append that need nothing but their text.
pub(in crate::journal) struct AppendSql {
    /// `$1`: table of source, key. Returns place, event, digest, expiry of those that the ledger holds.
    pub(in crate::journal) known_keys: &'static str,
    /// `$1`: source, `$2`: key. Inserts into the ledger plainly.
    pub(in crate::journal) insert_key: &'static str,
    /// `$1`: event. Locks it and returns a row if it is still there. `None`: the next two look for themselves.
    pub(in crate::journal) lock_event: Option<&'static str>,
    /// `$1`: event, `$2`: digest, `$3`: time, `$4`: headers, `$5`: body, `$6`: how many are kept. Keeps another body under a
    /// known key: one row per digest, the rest counted in a row with an empty digest.
    pub(in crate::journal) keep_conflict: &'static str,
    /// `$1`: event, `$2`: time.
    pub(in crate::journal) flag_conflict: &'static str,
    /// `$1`: shard, `$2`: table of source, events, duplicates, conflicts, quarantined.
    pub(in crate::journal) add_totals: &'static str,
}

/// What an engine's append came to.
pub(in crate::journal) struct Stored {
    /// One for each candidate, in their order.
    pub(in crate::journal) holders: Vec<Holder>,
    /// What went wrong after the events were stored.
    pub(in crate::journal) trouble: Option<EngineError>,
}

/// What a batch came to.
pub(super) struct Outcome {
    /// For each request. `None`: some of its events are stored, but not all that belongs to them is known or written.
    pub(super) receipts: Vec<Option<Receipt>>,
    /// What went wrong after the events were stored.
    pub(super) trouble: Option<EngineError>,
}

impl<E: Appends> Lane<E> {
    /// Stores a batch and commits it. After an error nothing was stored, or the outcome is unknown, and the transaction has to
    /// be undone.
    pub(super) async fn append(&mut self, batch: &[Request]) -> Result<Outcome, EngineError> {
        let Some(session) = &mut self.session else {
            return Err(EngineError::away("the database is not there"));
        };
        crate::crash::point("before_insert");
        let mut places: HashMap<(&SourceName, &[u8]), usize> = HashMap::new();
        let mut candidates = Vec::new();
        for event in batch.iter().flat_map(|request| &request.events) {
            places.entry((&event.source, event.key.as_bytes())).or_insert_with(|| {
                candidates.push(Candidate { id: self.shared.id_for(event), event });
                candidates.len() - 1
            });
        }
        let (given, about_now) = (self.shared.given_time(), self.shared.database_time());
        let context = AppendContext { given, about_now, shard: self.shard };
        let stored = Steps::append(self.engine.as_ref(), session, &mut self.memory, context, &candidates).await?;
        let Stored { mut holders, mut trouble } = stored;

        let mut receipts = Vec::with_capacity(batch.len());
        let (mut duplicates, mut conflicts, mut routed) = (Vec::new(), Vec::new(), false);
        for (request, Request { events, .. }) in batch.iter().enumerate() {
            let mut receipt = Some(Receipt::with_capacity(events.len()));
            for event in events {
                let place = places.get(&(&event.source, event.key.as_bytes())).copied().unwrap_or(usize::MAX);
                let holder = holders.get_mut(place);
                // Further copies in the batch meet a known key.
                let holder = holder.map(|holder| std::mem::replace(holder, holder.once_stored()));
                let Some(ruled) = holder.and_then(|holder| rule(event, holder)) else {
                    receipt = None;
                    continue;
                };
                match ruled.verdict {
                    Verdict::New => routed |= !event.routes.is_empty(),
                    Verdict::Quarantined => {}
                    Verdict::Duplicate => duplicates.push((ruled.id, event)),
                    Verdict::Conflict => conflicts.push((ruled.id, event, request)),
                }
                receipt.iter_mut().for_each(|receipt| receipt.push(ruled));
            }
            receipts.push(receipt);
        }
        // Those of one event stay in their order.
        conflicts.sort_by_key(|(first, ..)| *first);
        match keep_conflicts::<E>(session, context, &conflicts).await {
            Ok(()) => {}
            Err(error) if !E::APPEND_COMMITS => return Err(error),
            // The other events of the batch are stored and can be answered.
            Err(error) => {
                for (.., request) in conflicts {
                    receipts.get_mut(request).into_iter().for_each(|receipt| *receipt = None);
                }
                trouble = Some(error);
            }
        }
        <E as Steps>::commit(session, batch).await?;
        crate::crash::point("after_commit");
        if routed {
            self.shared.changed();
        }
        let mut tally = self.shared.tally();
        for (first, event) in duplicates {
            tally.add(first, &event.source, event.received_at, event.peer, Layer::Journal);
        }
        Ok(Outcome { receipts, trouble })
    }
}

/// Keeps conflicts in the transaction of the append, or in one of their own if that is committed already.
async fn keep_conflicts<E: Appends>(
    session: &mut E::Session,
    context: AppendContext,
    conflicts: &[(EventId, &NewEvent, usize)],
) -> Result<(), EngineError> {
    if conflicts.is_empty() {
        return Ok(());
    }
    if !E::APPEND_COMMITS {
        return write_conflicts::<E>(session, context.shard, conflicts).await;
    }
    let mut tries = Tries::default();
    loop {
        let kept = async {
            session.begin(context.given).await?;
            write_conflicts::<E>(session, context.shard, conflicts).await?;
            session.commit().await
        };
        match kept.await {
            Ok(()) => return Ok(()),
            Err(error) => {
                let undone = session.rollback().await;
                tries.again(error).and(undone)?;
            }
        }
    }
}

/// Keeps other bodies under known keys. The counts hold even if the event is forgotten already.
async fn write_conflicts<E: Appends>(
    session: &mut E::Session,
    shard: i64,
    conflicts: &[(EventId, &NewEvent, usize)],
) -> Result<(), EngineError> {
    let mut totals = Totals::new();
    for (first, event, _) in conflicts {
        totals.entry(event.source.as_str()).or_default().conflicts += 1;
        if let Some(lock) = E::APPEND.lock_event
            && session.row(lock, &[(*first).into()]).await?.is_none()
        {
            continue;
        }
        let (first, at) = (Param::from(*first), Param::from(event.received_at));
        let bytes = [&event.digest[..], &event.headers, &event.body].map(Param::from);
        let [digest, headers, body] = bytes;
        let kept = [first.clone(), digest, at.clone(), headers, body, CONFLICTS_KEPT.into()];
        session.change(E::APPEND.keep_conflict, &kept).await?;
        session.change(E::APPEND.flag_conflict, &[first, at]).await?;
    }
    add_totals::<E>(session, shard, &totals).await
}

/// What is added to the counts of each source.
pub(in crate::journal) type Totals<'s> = BTreeMap<&'s str, SourceCounts>;

/// Adds to the counts, source by source in their order.
pub(in crate::journal) async fn add_totals<E: Appends>(
    session: &mut E::Session,
    shard: i64,
    totals: &Totals<'_>,
) -> Result<(), EngineError> {
    let counts = |of: fn(&SourceCounts) -> u64| Column::ints(totals.values().map(|counts| of(counts).cast_signed()));
    let table = vec![
        Column::texts(totals.keys().copied()),
        counts(|counts| counts.events),
        counts(|counts| counts.duplicates),
        counts(|counts| counts.conflicts),
        counts(|counts| counts.quarantined),
    ];
    session.change(E::APPEND.add_totals, &[shard.into(), Param::Table(table)]).await?;
    Ok(())
}

/// Which events hold these keys (source and key), by place. A key that is not there was forgotten a moment ago. More than
/// one event for a key is a broken ledger, and an error.
pub(in crate::journal) async fn known_keys<'k, E: Appends>(
    session: &mut E::Session,
    keys: impl Iterator<Item = (&'k str, &'k [u8])>,
) -> Result<HashMap<usize, Known>, EngineError> {
    let (sources, keys) = keys.map(|(source, key)| (Some(source), Some(key))).unzip();
    let asked = Param::Table(vec![Column::Texts(sources), Column::Bytes(keys)]);
    let mut found = HashMap::new();
    for row in session.rows(E::APPEND.known_keys, &[asked]).await? {
        let known = Known { event: row.event(1)?, digest: row.digest(2)?, expires_at: row.time(3)? };
        if found.insert(row.place(0)?, known).is_some() {
            return Err(EngineError::unsound("the ledger holds a key twice"));
        }
    }
    Ok(found)
}

/// Two batches that share keys write them in the same order.
pub(in crate::journal) fn sort_by_key(candidates: &mut [Candidate<'_>]) {
    candidates.sort_unstable_by(|a, b| a.key().cmp(&b.key()));
}

fn column<'e, T>(candidates: &[Candidate<'e>], of: impl Fn(&'e NewEvent) -> T) -> Vec<T> {
    candidates.iter().map(|candidate| of(candidate.event)).collect()
}

fn ids<'e>(candidates: &[Candidate<'_>]) -> Column<'e> {
    Column::Ids(candidates.iter().map(|candidate| candidate.id).collect())
}

/// Until when the ledger remembers the keys of candidates.
pub(in crate::journal) fn expiries<'e>(candidates: &[Candidate<'_>]) -> Column<'e> {
    Column::ints(candidates.iter().map(|candidate| candidate.known().expires_at.0))
}

/// Rows of the ledger: event, source, key, digest, first seen, expiry.
pub(in crate::journal) fn key_rows<'e>(candidates: &[Candidate<'e>]) -> Vec<Column<'e>> {
    vec![
        ids(candidates),
        Column::Texts(column(candidates, |event| Some(event.source.as_str()))),
        Column::Bytes(column(candidates, |event| Some(event.key.as_bytes()))),
        Column::Bytes(column(candidates, |event| Some(&event.digest[..]))),
        Column::ints(column(candidates, |event| event.received_at.0)),
        expiries(candidates),
    ]
}

/// Rows of events: id, source, key, whether the key is signed, type, entity, when it occurred and was received, integrity,
/// digest, headers, body, version.
pub(in crate::journal) fn event_rows<'e>(candidates: &[Candidate<'e>]) -> Vec<Column<'e>> {
    vec![
        ids(candidates),
        Column::Texts(column(candidates, |event| Some(event.source.as_str()))),
        Column::Bytes(column(candidates, |event| Some(event.key.as_bytes()))),
        Column::Bools(column(candidates, |event| event.key_signed)),
        Column::Texts(column(candidates, |event| event.kind.as_deref())),
        Column::Texts(column(candidates, |event| event.entity.as_deref())),
        Column::Ints(column(candidates, |event| event.occurred_at.map(|at| at.0))),
        Column::ints(column(candidates, |event| event.received_at.0)),
        Column::Texts(column(candidates, |event| Some(event.integrity.as_str()))),
        Column::Bytes(column(candidates, |event| Some(&event.digest[..]))),
        Column::Bytes(column(candidates, |event| Some(&event.headers[..]))),
        Column::Bytes(column(candidates, |event| Some(&event.body[..]))),
        Column::Ints(column(candidates, |event| event.version)),
    ]
}

/// Rows of deliveries: event, route, entity, version. Held events have no deliveries until they are released.
pub(in crate::journal) fn delivery_rows<'e>(candidates: &[Candidate<'e>]) -> Vec<Column<'e>> {
    let (mut events, mut routes, mut entities, mut versions) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for Candidate { id, event } in candidates.iter().filter(|candidate| candidate.event.quarantine.is_none()) {
        for route in &event.routes {
            events.push(*id);
            routes.push(Some(route.as_str()));
            entities.push(event.entity.as_deref().filter(|_| event.by_entity));
            versions.push(event.version.filter(|_| event.by_entity));
        }
    }
    vec![Column::Ids(events), Column::Texts(routes), Column::Texts(entities), Column::Ints(versions)]
}

/// Rows of counted duplicates: event, counts by layer, first and last time. What comes last, the latest few, is the engine's.
pub(in crate::journal) fn duplicate_rows<'e>(pending: &[(EventId, &Pending)]) -> Vec<Column<'e>> {
    let ints = |of: fn(&Pending) -> i64| Column::ints(pending.iter().map(|(_, pending)| of(pending)));
    vec![
        Column::Ids(pending.iter().map(|(event, _)| *event).collect()),
        ints(|pending| pending.journal.cast_signed()),
        ints(|pending| pending.memory.cast_signed()),
        ints(|pending| pending.redis.cast_signed()),
        ints(|pending| pending.first_at.0),
        ints(|pending| pending.last_at.0),
    ]
}
