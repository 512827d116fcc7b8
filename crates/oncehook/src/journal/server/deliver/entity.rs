//! The queues of entities: which delivery comes before which, and which are let go on when one has ended.
//!
//! Before a worker decides which delivery is eligible, or settles one that others may wait for, it locks the row of (route,
//! entity), in the order of their names, until the end of its transaction. Statements after that see what the transaction
//! before has left. So a delivery cannot be blocked while the one that it waits for ends.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use oncehook_verify::UnixMicros;

use super::settle;
use super::steps::{Delivers, Due, Ended, Held, SettleTime, Subject};
use crate::delivery::{Fence, RouteName, Verdict};
use crate::event::EventId;
use crate::journal::Progress;
use crate::journal::server::engine::Session;
use crate::journal::server::error::EngineError;
use crate::journal::server::value::{Column, Param, Row};
use crate::ordering::{Company, Line, Mark, NO_TIME, Place, Standing, plan};
use crate::route::{KnownLines, Route};

/// Blocked entities that are looked after in one go.
const LOOKED_AFTER: i64 = 1_000;

/// What a delivery of an entity came to.
pub(super) struct EntityOutcome<'v> {
    pub(super) entity: &'v str,
    pub(super) mark: Mark,
    pub(super) kind: Option<&'v str>,
    pub(super) verdict: &'v Verdict,
}

impl Subject {
    /// With what its delivery came to.
    pub(super) fn outcome<'v>(&'v self, verdict: &'v Verdict) -> EntityOutcome<'v> {
        EntityOutcome { entity: &self.entity, mark: self.mark, kind: self.kind.as_deref(), verdict }
    }
}

/// Due deliveries, sorted out.
#[derive(Default)]
pub(super) struct Eligible {
    /// To be run, in this order.
    pub(super) run: Vec<Due>,
    /// What was settled without running.
    pub(super) passed: Progress,
}

/// Sorts out what is due: blocks those that are not eligible, settles those that came too late or too early, and returns the
/// others, at most `room` of them. Their entities stay locked until the transaction ends.
pub(super) async fn eligible<E: Delivers>(
    session: &mut E::Session,
    now: i64,
    route: &Route,
    company: Company,
    room: usize,
    due: Vec<Due>,
) -> Result<Eligible, EngineError> {
    adopt::<E>(session, route, &due).await?;
    let unlocked = due.iter().filter(|due| !due.entity_locked);
    let unlocked: BTreeSet<&str> = unlocked.filter_map(|due| due.candidate.entity.as_deref()).collect();
    lock::<E>(session, &route.name, &unlocked).await?;
    let candidates: Vec<_> = due.iter().map(|due| due.candidate.clone()).collect();
    let mut by_entity: BTreeMap<&str, Vec<Place>> = BTreeMap::new();
    for candidate in &candidates {
        if let Some(entity) = &candidate.entity {
            by_entity.entry(entity).or_default().push(candidate.place);
        }
    }
    let queues = queues::<E>(session, now, route, &by_entity).await?;
    let plan = plan(&route.ordering, company, room, &candidates, &queues, UnixMicros(now));
    let blocked: BTreeSet<(EventId, u32)> = plan
        .blocked
        .iter()
        .filter_map(|index| candidates.get(*index))
        .map(|candidate| (candidate.place.event, candidate.place.epoch))
        .collect();
    if !blocked.is_empty() {
        let params = [now.into(), (&route.name).into(), Param::places(blocked), NO_TIME.into()];
        session.change(E::DELIVER.block, &params).await?;
    }
    let mut due: Vec<Option<Due>> = due.into_iter().map(Some).collect();
    let mut take = |index: usize| due.get_mut(index).and_then(Option::take);
    let run = plan.run.into_iter().filter_map(|(index, state)| Some(Due { state, ..take(index)? })).collect();
    let passed: Vec<_> = plan.passed.into_iter().filter_map(|(index, verdict)| Some((take(index)?, verdict))).collect();
    let passed = pass::<E>(session, now, route, &passed).await?;
    Ok(Eligible { run, passed })
}

/// Settles deliveries that do not run.
async fn pass<E: Delivers>(
    session: &mut E::Session,
    now: i64,
    route: &Route,
    passed: &[(Due, Verdict)],
) -> Result<Progress, EngineError> {
    let mut progress = Progress::default();
    if passed.is_empty() {
        return Ok(progress);
    }
    let mut fences = Vec::with_capacity(passed.len());
    for (due, verdict) in passed {
        let fence = Fence { delivery: due.delivery(route), attempt: due.attempt + 1 };
        progress.count(fence.delivery.event, fence.attempt, due.attempt_limit, verdict, UnixMicros(now));
        fences.push(fence);
    }
    let ended: Vec<Ended<'_>> =
        fences.iter().zip(passed).map(|(fence, (_, verdict))| Ended { fence, verdict, followups: &[] }).collect();
    settle::settle_locked::<E>(session, SettleTime { now: Some(now), from: UnixMicros(now) }, &ended).await?;
    let outcomes: Vec<_> = passed.iter().filter_map(|(due, verdict)| EntityOutcome::of(due, verdict)).collect();
    after::<E>(session, now, route, &outcomes).await?;
    Ok(progress)
}

impl<'v> EntityOutcome<'v> {
    /// What a locked delivery came to, if its event has an entity.
    pub(super) fn of(due: &'v Due, verdict: &'v Verdict) -> Option<Self> {
        let candidate = &due.candidate;
        let entity = candidate.entity.as_deref()?;
        Some(Self { entity, mark: candidate.mark, kind: candidate.kind.as_deref(), verdict })
    }

    fn succeeded(&self) -> bool {
        matches!(self.verdict, Verdict::Succeeded(_))
    }
}

/// The entities of which something took effect.
pub(super) fn affected<'v>(outcomes: &[EntityOutcome<'v>]) -> BTreeSet<&'v str> {
    outcomes.iter().filter(|outcome| outcome.succeeded()).map(|outcome| outcome.entity).collect()
}

/// Puts deliveries into the queues of their entities that were made before the route looked at them.
async fn adopt<E: Delivers>(session: &mut E::Session, route: &Route, due: &[Due]) -> Result<(), EngineError> {
    let strange = due.iter().filter(|due| !due.queued && due.candidate.entity.is_some());
    let strange: BTreeSet<(EventId, u32)> =
        strange.map(|due| (due.candidate.place.event, due.candidate.place.epoch)).collect();
    if !strange.is_empty() {
        session.change(E::DELIVER.adopt, &[(&route.name).into(), Param::places(strange)]).await?;
    }
    Ok(())
}

/// Locks entities of a route until the end of the transaction; waits for others that hold one.
pub(in crate::journal) async fn lock<E: Delivers>(
    session: &mut E::Session,
    route: &RouteName,
    entities: &BTreeSet<&str>,
) -> Result<(), EngineError> {
    if !entities.is_empty() {
        for sql in E::DELIVER.lock_entities {
            session.change(sql, &[route.into(), Param::texts(entities.iter().copied())]).await?;
        }
    }
    Ok(())
}

/// What is known of entities that are locked.
async fn queues<E: Delivers>(
    session: &mut E::Session,
    now: i64,
    route: &Route,
    candidates: &BTreeMap<&str, Vec<Place>>,
) -> Result<HashMap<String, Line>, EngineError> {
    if candidates.is_empty() {
        return Ok(HashMap::new());
    }
    let mut queues = E::entity_queues(session, now, route, candidates).await?;
    if route.ordering.remembers() {
        let scope = route.ordering.scope(route.name.as_str());
        for (entity, state) in states::<E>(session, &scope, candidates.keys().copied()).await? {
            queues.entry(entity).or_default().standing = state;
        }
    }
    Ok(queues)
}

/// What is remembered of entities. They are locked, so no other transaction changes it.
async fn states<'e, E: Delivers>(
    session: &mut E::Session,
    scope: &str,
    entities: impl Iterator<Item = &'e str>,
) -> Result<HashMap<String, Standing>, EngineError> {
    let rows = session.rows(E::DELIVER.entity_states, &[scope.into(), Param::texts(entities)]).await?;
    let state = |row: &<E::Session as Session>::Row| {
        let newest = Mark { version: row.maybe_int(1)?, at: row.maybe_time(2)? };
        Ok((row.text(0)?, Standing { newest, state: row.maybe_text(3)?, version: row.int(4)? }))
    };
    rows.iter().map(state).collect()
}

/// What follows for others from what deliveries of a route came to, in their order. The entities are locked.
pub(super) async fn after<E: Delivers>(
    session: &mut E::Session,
    now: i64,
    route: &Route,
    outcomes: &[EntityOutcome<'_>],
) -> Result<(), EngineError> {
    let ordering = &route.ordering;
    let entities = affected(outcomes);
    if ordering.remembers() && !entities.is_empty() {
        let scope = ordering.scope(route.name.as_str());
        let mut known = states::<E>(session, &scope, entities.into_iter()).await?;
        for outcome in outcomes.iter().filter(|outcome| outcome.succeeded()) {
            let state = known.entry(outcome.entity.to_owned()).or_default();
            ordering.advance(state, outcome.mark, outcome.kind);
        }
        keep_states::<E>(session, &scope, &known).await?;
    }
    // The last of an entity decides.
    let free: BTreeMap<&str, usize> =
        outcomes.iter().map(|outcome| (outcome.entity, route.let_go_on(outcome.verdict))).collect();
    if free.is_empty() {
        return Ok(());
    }
    E::unblock(session, now, &route.name, &free.into_iter().collect::<Vec<_>>()).await
}

async fn keep_states<E: Delivers>(
    session: &mut E::Session,
    scope: &str,
    known: &HashMap<String, Standing>,
) -> Result<(), EngineError> {
    let known: BTreeMap<&String, &Standing> = known.iter().collect();
    let states = || known.values();
    let table = Param::Table(vec![
        Column::texts(known.keys().map(|entity| entity.as_str())),
        Column::ints(states().map(|state| state.version)),
        Column::Ints(states().map(|state| state.newest.at.map(|at| at.0)).collect()),
        Column::Texts(states().map(|state| state.state.as_deref()).collect()),
        Column::Ints(states().map(|state| state.newest.version).collect()),
    ]);
    session.change(E::DELIVER.keep_entity_states, &[scope.into(), table]).await?;
    Ok(())
}

/// What leased deliveries are about, where their events have an entity.
pub(super) async fn subjects<E: Delivers>(
    session: &mut E::Session,
    events: impl Iterator<Item = EventId>,
) -> Result<HashMap<EventId, Subject>, EngineError> {
    let rows = session.rows(E::DELIVER.subjects, &[Param::ids(events)]).await?;
    let subject = |row: &<E::Session as Session>::Row| {
        let mark = Mark { version: row.maybe_int(2)?, at: row.maybe_time(3)? };
        Ok((row.event(0)?, Subject { entity: row.text(1)?, mark, kind: row.maybe_text(4)? }))
    };
    rows.iter().map(subject).collect()
}

/// Settles leased attempts whose subjects are known, with what follows for others of their entities. Returns the fences that
/// were the latest, and whether a parked delivery is due now.
pub(super) async fn settle_with_entities<E: Delivers>(
    session: &mut E::Session,
    now: i64,
    from: UnixMicros,
    ended: &[Ended<'_>],
    known: &KnownLines,
) -> Result<(HashSet<Fence>, bool), EngineError> {
    let subjects = subjects::<E>(session, ended.iter().map(|ended| ended.fence.delivery.event)).await?;
    let mut routes: BTreeMap<&RouteName, (Arc<Route>, BTreeSet<&str>)> = BTreeMap::new();
    for Ended { fence, .. } in ended {
        let name = &fence.delivery.route;
        if let (Some(subject), Some(route)) = (subjects.get(&fence.delivery.event), known.get(name)) {
            routes.entry(name).or_insert_with(|| (route, BTreeSet::new())).1.insert(&subject.entity);
        }
    }
    for (name, (_, entities)) in &routes {
        lock::<E>(session, name, entities).await?;
    }
    let time = SettleTime { now: Some(now), from };
    let done = settle::settle::<E>(session, time, Held::Lease, ended).await?;
    let outcomes = |wanted: Option<&RouteName>| -> Vec<EntityOutcome<'_>> {
        let settled = ended.iter().filter(|ended| done.contains(ended.fence));
        let of = settled.filter(|ended| wanted.is_none_or(|route| ended.fence.delivery.route == *route));
        of.filter_map(|ended| Some(subjects.get(&ended.fence.delivery.event)?.outcome(ended.verdict))).collect()
    };
    for (name, (route, _)) in &routes {
        after::<E>(session, now, route, &outcomes(Some(name))).await?;
    }
    let entities = affected(&outcomes(None));
    let woken = !entities.is_empty() && E::wake_parked(session, now, &entities).await?;
    Ok((done, woken))
}

/// Looks after deliveries that wait for others: parked ones whose time has come, and the first of an entity's queue when
/// nothing is before it any more. Returns whether something is due now. Its own transactions.
pub(super) async fn look_again<E: Delivers>(
    session: &mut E::Session,
    given: Option<i64>,
    route: &Route,
) -> Result<bool, EngineError> {
    let now = session.begin(given).await?;
    let mut woken = E::wake_due_parked(session, now, &route.name).await?;
    if !route.ordering.is_serial() {
        woken |= E::unblock_all(session, now, &route.name).await?;
        session.commit().await?;
        return Ok(woken);
    }
    let params = [(&route.name).into(), NO_TIME.into(), LOOKED_AFTER.into()];
    let rows = session.rows(E::DELIVER.blocked_entities, &params).await?;
    // The locks below wait for others, and must not hold what was woken meanwhile.
    session.commit().await?;
    let blocked: Vec<String> = rows.iter().map(|row| row.text(0)).collect::<Result<_, _>>()?;
    let blocked: BTreeSet<&str> = blocked.iter().map(String::as_str).collect();
    if blocked.is_empty() {
        return Ok(woken);
    }
    let now = session.begin(given).await?;
    lock::<E>(session, &route.name, &blocked).await?;
    let stranded = E::stranded(session, route, &blocked).await?;
    let first: Vec<(&str, usize)> = stranded.iter().map(|entity| (entity.as_str(), 1)).collect();
    if !first.is_empty() {
        E::unblock(session, now, &route.name, &first).await?;
    }
    session.commit().await?;
    Ok(woken || !stranded.is_empty())
}
