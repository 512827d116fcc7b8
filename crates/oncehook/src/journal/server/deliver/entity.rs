//! The queues of entities: which delivery comes before which, and which are let go on when one has ended.
//!
//! Before a worker decides which delivery is eligible, or settles one that others may wait for, it locks the row of (route,
//! entity), in the order of their names, until the end of its transaction. Statements after that see what the transaction
//! before has left. So a delivery cannot be blocked while the one that it waits for ends.
//!
//! Does not: decide who is eligible. `ordering` does.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use oncehook_verify::UnixMicros;

use super::row::candidate;
use super::settle::settle;
use super::steps::{Delivers, Due, FrontSql, MoveSql, QueueSql, UnblockSql};
use crate::delivery::{DeliveryState, Fence, RouteName, Settlement, Verdict};
use crate::event::EventId;
use crate::journal::Progress;
use crate::journal::decide::outcome::Held;
use crate::journal::server::engine::{Engine, Session};
use crate::journal::server::error::{EngineError, EngineResult};
use crate::journal::server::value::{Column, Param, Row};
use crate::ordering::{Candidate, Company, Line, Mark, NO_TIME, OnDead, Place, Standing, plan};
use crate::route::{KnownLines, Route};

/// Blocked entities that are looked after in one go.
const LOOKED_AFTER: i64 = 1_000;

/// An open transaction of the way out: its connection, its time, and the route that it is for.
pub(super) struct Transaction<'t, E: Delivers> {
    pub(super) session: &'t mut E::Session,
    pub(super) now: i64,
    pub(super) route: &'t Route,
}

/// A delivery, and what it came to.
type Ended<'v> = (&'v Candidate, &'v Verdict);

/// The entities of which something took effect.
fn affected<'v>(ended: &[Ended<'v>]) -> BTreeSet<&'v str> {
    let succeeded = ended.iter().filter(|(_, verdict)| matches!(verdict, Verdict::Succeeded(_)));
    succeeded.filter_map(|(candidate, _)| candidate.entity.as_deref()).collect()
}

/// Which delivery of its route it is.
fn key(candidate: &Candidate) -> (EventId, u32) {
    (candidate.place.event, candidate.place.epoch)
}

impl<E: Delivers> Transaction<'_, E> {
    /// Sorts out what is due: blocks those that are not eligible, settles those that came too late or too early, and returns
    /// the others, at most `room` of them, in the order in which they run, and what became of those that were settled. The
    /// entities stay locked until the transaction ends.
    pub(super) async fn eligible(
        &mut self,
        company: Company,
        room: usize,
        due: Vec<Due>,
    ) -> EngineResult<(Vec<Due>, Progress)> {
        let Self { now, route, .. } = *self;
        // Those that were made before the route looked at entities.
        let strange = due.iter().filter(|due| !due.queued && due.candidate.entity.is_some());
        let strange: BTreeSet<_> = strange.map(|due| key(&due.candidate)).collect();
        if !strange.is_empty() {
            self.session.change(E::DELIVER.adopt, &[(&route.name).into(), Param::places(strange)]).await?;
        }
        let unlocked = due.iter().filter(|due| !due.entity_locked);
        let unlocked: BTreeSet<&str> = unlocked.filter_map(|due| due.candidate.entity.as_deref()).collect();
        lock::<E>(self.session, &route.name, &unlocked).await?;
        let candidates: Vec<Candidate> = due.iter().map(|due| due.candidate.clone()).collect();
        let queues = self.queues(&candidates).await?;
        let plan = plan(&route.ordering, company, room, &candidates, &queues, UnixMicros(now));
        let blocked: BTreeSet<_> = plan.blocked.iter().filter_map(|index| candidates.get(*index).map(key)).collect();
        if !blocked.is_empty() {
            let params = [now.into(), (&route.name).into(), Param::places(blocked), NO_TIME.into()];
            self.session.change(E::DELIVER.block, &params).await?;
        }
        let mut due: Vec<Option<Due>> = due.into_iter().map(Some).collect();
        let mut take = |index: usize| due.get_mut(index).and_then(Option::take);
        let run = plan.run.into_iter().filter_map(|(index, state)| Some(Due { state, ..take(index)? })).collect();
        let passed = plan.passed.into_iter().filter_map(|(index, verdict)| Some((take(index)?, verdict)));
        let passed: Vec<(Due, Verdict)> = passed.collect();
        let passed = self.settle(passed.iter().map(|(due, verdict)| (due, verdict.clone())).collect()).await?;
        Ok((run, passed))
    }

    /// Settles deliveries that the transaction has locked, with what follows for others of their entities. The rows are locked
    /// since they were read: if they are not as they were, nothing that the transaction read can be trusted.
    pub(super) async fn settle(&mut self, verdicts: Vec<(&Due, Verdict)>) -> EngineResult<Progress> {
        let (mut progress, at) = (Progress::default(), UnixMicros(self.now));
        let (mut candidates, mut settlements) = (Vec::new(), Vec::new());
        for (due, verdict) in verdicts {
            let (fence, followups) = (due.fence(self.route), self.route.followups.clone());
            progress.count(fence.delivery.event, fence.attempt, due.attempt_limit, &verdict, at);
            candidates.push(&due.candidate);
            settlements.push(Settlement { fence, verdict, followups });
        }
        let done = settle::<E>(self.session, Some(self.now), at, Held::Lock, &settlements).await?;
        if done.len() != settlements.len() {
            return Err(EngineError::changed_under_lock());
        }
        let verdicts = settlements.iter().map(|settlement| &settlement.verdict);
        let ended: Vec<Ended<'_>> = candidates.into_iter().zip(verdicts).collect();
        if self.route.ordering.is_serial() {
            self.after(&ended).await?;
        }
        progress.woken = wake_parked::<E>(self.session, self.now, &affected(&ended)).await?;
        Ok(progress)
    }

    /// What is known of the entities of candidates, which are locked: the front of each queue, at least as long as its
    /// candidates; whether one of it is leased; and what is remembered.
    async fn queues(&mut self, candidates: &[Candidate]) -> EngineResult<HashMap<String, Line>> {
        let (name, ordering) = (&self.route.name, &self.route.ordering);
        let mut wanted: BTreeMap<&str, usize> = BTreeMap::new();
        for entity in candidates.iter().filter_map(|candidate| candidate.entity.as_deref()) {
            *wanted.entry(entity).or_default() += 1;
        }
        let mut queues: HashMap<String, Line> = HashMap::new();
        if wanted.is_empty() {
            return Ok(queues);
        }
        let mut wanted: Vec<(&str, usize)> = wanted.into_iter().collect();
        let entities: BTreeSet<&str> = wanted.iter().map(|(entity, _)| *entity).collect();
        let dead_blocks = ordering.on_dead == OnDead::Block;
        match E::DELIVER.queues {
            QueueSql::AtOnce(sql) => {
                let counts = Param::counts(&wanted);
                let params = [name.into(), counts, self.now.into(), dead_blocks.into(), ordering.by_entity.into()];
                add_fronts(&mut queues, &self.session.rows(sql, &params).await?)?;
            }
            QueueSql::InSteps { leased, blocking, passing, found } => {
                let params = [name.into(), Param::texts(entities.iter().copied())];
                add_fronts(&mut queues, &self.session.rows(leased, &params).await?)?;
                // While one is leased no other is eligible, and none has to be looked at.
                wanted.retain(|(entity, _)| ordering.by_entity && !queues.contains_key(*entity));
                let fronts = if dead_blocks { blocking } else { passing };
                let (first, more) = read_fronts::<E>(self.session, fronts, self.now, name, &wanted).await?;
                add_fronts(&mut queues, &more)?;
                // A candidate that is the first of its queue need not be read again.
                let known: HashMap<_, _> =
                    candidates.iter().map(|candidate| (key(candidate), candidate.place)).collect();
                let mut others = BTreeSet::new();
                for row in &first {
                    match known.get(&(row.event(0)?, row.small(2)?)) {
                        Some(place) => {
                            let queue = queues.entry(row.text(4)?).or_default();
                            (queue.front, queue.due) = (vec![(*place, DeliveryState::Ready)], vec![*place]);
                        }
                        None => _ = others.insert((row.event(0)?, row.small(2)?)),
                    }
                }
                if !others.is_empty() {
                    let params = [name.into(), Param::places(others), self.now.into()];
                    add_fronts(&mut queues, &self.session.rows(found, &params).await?)?;
                }
            }
        }
        if ordering.remembers() {
            for (entity, state) in states::<E>(self.session, &ordering.scope(name.as_str()), &entities).await? {
                queues.entry(entity).or_default().standing = state;
            }
        }
        Ok(queues)
    }

    /// What follows for others from what deliveries of the route came to, in their order. The entities are locked.
    pub(super) async fn after(&mut self, ended: &[Ended<'_>]) -> EngineResult {
        let (name, ordering) = (&self.route.name, &self.route.ordering);
        let entities = affected(ended);
        if ordering.remembers() && !entities.is_empty() {
            let scope = ordering.scope(name.as_str());
            let mut known = states::<E>(self.session, &scope, &entities).await?;
            for (candidate, verdict) in ended {
                if let (Verdict::Succeeded(_), Some(entity)) = (verdict, &candidate.entity) {
                    let state = known.entry(entity.clone()).or_default();
                    ordering.advance(state, candidate.mark, candidate.kind.as_deref());
                }
            }
            let states = || known.values();
            let table = Param::texts(known.keys().map(String::as_str)).with([
                Column::ints(states().map(|state| state.version)),
                Column::Ints(states().map(|state| state.newest.at.map(|at| at.0)).collect()),
                Column::Texts(states().map(|state| state.state.as_deref()).collect()),
                Column::Ints(states().map(|state| state.newest.version).collect()),
            ]);
            self.session.change(E::DELIVER.keep_entity_states, &[scope.as_str().into(), table]).await?;
        }
        // The last of an entity decides.
        let free: BTreeMap<&str, usize> = ended
            .iter()
            .filter_map(|(candidate, verdict)| Some((candidate.entity.as_deref()?, self.route.let_go_on(verdict))))
            .collect();
        unblock::<E>(self.session, self.now, name, &free.into_iter().collect::<Vec<_>>()).await
    }
}

/// Locks entities of a route until the end of the transaction; waits for others that hold one.
pub(in crate::journal) async fn lock<E: Delivers>(
    session: &mut E::Session,
    route: &RouteName,
    entities: &BTreeSet<impl AsRef<str> + Sync>,
) -> EngineResult {
    if !entities.is_empty() {
        let params = [route.into(), Param::texts(entities.iter().map(AsRef::as_ref))];
        for sql in E::DELIVER.lock_entities {
            session.change(sql, &params).await?;
        }
    }
    Ok(())
}

/// Entities, from the first column.
pub(super) fn entities(rows: &[impl Row]) -> EngineResult<BTreeSet<String>> {
    rows.iter().map(|row| row.text(0)).collect()
}

/// Adds what was read of queues: event, route, epoch, attempt, entity, state, version, whether it is due.
fn add_fronts(queues: &mut HashMap<String, Line>, rows: &[impl Row]) -> EngineResult {
    for row in rows {
        let state = DeliveryState::parse(&row.text(5)?).ok_or_else(EngineError::damaged)?;
        let place = Place { event: row.event(0)?, epoch: row.small(2)?, version: row.maybe_int(6)? };
        let queue = queues.entry(row.text(4)?).or_default();
        if state == DeliveryState::Running {
            queue.running = true;
            continue;
        }
        queue.front.push((place, state));
        if row.is_true(7)? {
            queue.due.push(place);
        }
    }
    queues.values_mut().for_each(|queue| queue.front.sort_unstable_by_key(|(place, _)| *place));
    Ok(())
}

type Rows<E> = Vec<<<E as Engine>::Session as Session>::Row>;

/// Reads the fronts of queues, as long as wanted. Returns the first of each where one is wanted, and all of the others.
async fn read_fronts<E: Delivers>(
    session: &mut E::Session,
    sql: FrontSql,
    now: i64,
    route: &RouteName,
    wanted: &[(&str, usize)],
) -> EngineResult<(Rows<E>, Rows<E>)> {
    let (mut firsts, mut more) = (Vec::new(), Vec::new());
    if wanted.is_empty() {
        return Ok((firsts, more));
    }
    let lengths: HashMap<&str, usize> = wanted.iter().copied().collect();
    let params = [route.into(), Param::texts(lengths.keys().copied()), now.into(), NO_TIME.into()];
    for first in session.rows(sql.first, &params).await? {
        let entity = first.text(4)?;
        match lengths.get(entity.as_str()) {
            // Where there is a first there may be more.
            Some(length @ 2..) => {
                let params = [route.into(), (&entity).into(), now.into(), NO_TIME.into(), (*length).into()];
                more.extend(session.rows(sql.more, &params).await?);
            }
            _ => firsts.push(first),
        }
    }
    Ok((firsts, more))
}

/// What is remembered of entities. They are locked, so no other transaction changes it.
async fn states<E: Delivers>(
    session: &mut E::Session,
    scope: &str,
    entities: &BTreeSet<&str>,
) -> EngineResult<BTreeMap<String, Standing>> {
    let params = [scope.into(), Param::texts(entities.iter().copied())];
    session.rows(E::DELIVER.entity_states, &params).await?.iter().map(state).collect()
}

/// What is remembered of an entity: entity, newest, last_at, state, version.
pub(in crate::journal) fn state(row: &impl Row) -> EngineResult<(String, Standing)> {
    let newest = Mark { version: row.maybe_int(1)?, at: row.maybe_time(2)? };
    Ok((row.text(0)?, Standing { newest, state: row.maybe_text(3)?, version: row.int(4)? }))
}

/// Puts the first blocked deliveries of each entity back into the queue, at most as many as are given. Those that are not
/// eligible after all are blocked again when they are looked at.
pub(in crate::journal) async fn unblock<E: Delivers>(
    session: &mut E::Session,
    now: i64,
    route: &RouteName,
    entities: &[(&str, usize)],
) -> EngineResult {
    match E::DELIVER.unblock {
        _ if entities.is_empty() => {}
        UnblockSql::AtOnce(sql) => {
            session.change(sql, &[now.into(), route.into(), Param::counts(entities), NO_TIME.into()]).await?;
        }
        UnblockSql::Found(fronts) => {
            let (mut found, more) = read_fronts::<E>(session, fronts, now, route, entities).await?;
            found.extend(more);
            change_found::<E>(session, E::DELIVER.unblock_all.change, now, &found).await?;
        }
    }
    Ok(())
}

/// Something of these entities took effect: parked deliveries look again. Returns whether there was any.
pub(super) async fn wake_parked<E: Delivers>(
    session: &mut E::Session,
    now: i64,
    entities: &BTreeSet<&str>,
) -> EngineResult<bool> {
    let params = [now.into(), Param::texts(entities.iter().copied())];
    Ok(!entities.is_empty() && move_all::<E>(session, E::DELIVER.wake_parked, now, &params).await?)
}

/// Changes rows, which are found before where the engine needs it. Returns whether there was any.
async fn move_all<E: Delivers>(
    session: &mut E::Session,
    sql: MoveSql,
    now: i64,
    params: &[Param<'_>],
) -> EngineResult<bool> {
    match sql.find {
        None => Ok(session.change(sql.change, params).await? > 0),
        Some(find) => {
            let found = session.rows(find, params).await?;
            change_found::<E>(session, sql.change, now, &found).await
        }
    }
}

/// Changes deliveries that were found, in the order of their keys. Returns whether there was any.
async fn change_found<E: Delivers>(
    session: &mut E::Session,
    sql: &str,
    now: i64,
    found: &[impl Row],
) -> EngineResult<bool> {
    let found: BTreeSet<Fence> = found.iter().map(Row::fence).collect::<EngineResult<_>>()?;
    let params = [now.into(), Param::fences(&found), NO_TIME.into()];
    Ok(!found.is_empty() && session.change(sql, &params).await? > 0)
}

/// What leased deliveries are about, where their events have an entity.
pub(in crate::journal) async fn subjects<E: Delivers>(
    session: &mut E::Session,
    events: impl IntoIterator<Item = EventId>,
) -> EngineResult<HashMap<EventId, Candidate>> {
    let rows = session.rows(E::DELIVER.subjects, &[Param::ids(events)]).await?;
    let subjects = rows.iter().map(|row| candidate(row).map(|subject| (subject.place.event, subject)));
    subjects.collect()
}

/// Settles leased attempts, with what follows for others of their entities. Returns the fences that were the latest, and
/// whether a parked delivery is due now.
pub(in crate::journal::server) async fn settle_with_entities<E: Delivers>(
    session: &mut E::Session,
    now: i64,
    from: UnixMicros,
    settlements: &[Settlement],
    known: &KnownLines,
) -> EngineResult<(HashSet<Fence>, bool)> {
    let subjects = subjects::<E>(session, settlements.iter().map(|ended| ended.fence.delivery.event)).await?;
    let mut routes: BTreeMap<&RouteName, (Arc<Route>, BTreeSet<&str>)> = BTreeMap::new();
    for Settlement { fence, .. } in settlements {
        let (subject, name) = (subjects.get(&fence.delivery.event), &fence.delivery.route);
        if let (Some(entity), Some(route)) = (subject.and_then(|subject| subject.entity.as_deref()), known.get(name)) {
            routes.entry(name).or_insert_with(|| (route, BTreeSet::new())).1.insert(entity);
        }
    }
    for (name, (_, entities)) in &routes {
        lock::<E>(session, name, entities).await?;
    }
    let done = settle::<E>(session, Some(now), from, Held::Lease, settlements).await?;
    let ended = |wanted: Option<&RouteName>| -> Vec<Ended<'_>> {
        let done = settlements.iter().filter(|ended| done.contains(&ended.fence));
        let of = done.filter(|ended| wanted.is_none_or(|route| ended.fence.delivery.route == *route));
        of.filter_map(|ended| Some((subjects.get(&ended.fence.delivery.event)?, &ended.verdict))).collect()
    };
    for (name, (route, _)) in &routes {
        Transaction::<E> { session: &mut *session, now, route }.after(&ended(Some(name))).await?;
    }
    let woken = wake_parked::<E>(session, now, &affected(&ended(None))).await?;
    Ok((done, woken))
}

/// Looks after deliveries that wait for others: parked ones whose time has come, and the first of an entity's queue when
/// nothing is before it any more. Returns whether something is due now. Its own transactions.
pub(in crate::journal::server) async fn look_again<E: Delivers>(
    session: &mut E::Session,
    given: Option<i64>,
    route: &Route,
) -> EngineResult<bool> {
    let (now, name, ordering) = (session.begin(given).await?, &route.name, &route.ordering);
    let params = [now.into(), name.into(), NO_TIME.into()];
    let mut woken = move_all::<E>(session, E::DELIVER.wake_due_parked, now, &params[..2]).await?;
    if !ordering.is_serial() {
        woken |= move_all::<E>(session, E::DELIVER.unblock_all, now, &params).await?;
        session.commit().await?;
        return Ok(woken);
    }
    let params = [name.into(), NO_TIME.into(), LOOKED_AFTER.into()];
    let blocked = entities(&session.rows(E::DELIVER.blocked_entities, &params).await?)?;
    // The locks below wait for others, and must not hold what was woken meanwhile.
    session.commit().await?;
    if blocked.is_empty() {
        return Ok(woken);
    }
    let now = session.begin(given).await?;
    lock::<E>(session, name, &blocked).await?;
    let dead_blocks = ordering.by_entity && ordering.on_dead == OnDead::Block;
    let params = [name.into(), Param::texts(blocked.iter().map(String::as_str)), dead_blocks.into(), NO_TIME.into()];
    let stranded = entities(&session.rows(E::DELIVER.stranded, &params).await?)?;
    let first: Vec<(&str, usize)> = stranded.iter().map(|entity| (entity.as_str(), 1)).collect();
    unblock::<E>(session, now, name, &first).await?;
    session.commit().await?;
    Ok(woken || !stranded.is_empty())
}
