//! Whose turn it is among due deliveries of a route that looks at entities. Runs inside a transaction of its caller, and leaves
//! the lines of the entities locked until it ends.
//!
//! Does not: decide anything. The rules are in `ordering`; this carries out what they say about those that do not run.

use std::collections::{BTreeMap, BTreeSet};

use oncehook_verify::UnixMicros;

use super::connection::{EngineError, Session};
use super::lines::{self, Came, Peeked};
use super::settle::{self, Ended, Held};
use crate::delivery::{DeliveryId, Fence, Verdict};
use crate::event::EventId;
use crate::journal::Progress;
use crate::ordering::{Candidate, Company, Place, Step, plan};
use crate::route::Route;

/// A delivery by event, epoch and attempts so far.
pub(super) type One = (EventId, u32, u32);

/// Due deliveries, sorted out.
#[derive(Default)]
pub(super) struct Turns {
    /// To be run, in this order, with the state that each leads to.
    pub(super) run: Vec<(Place, Option<String>)>,
    /// What was settled without running.
    pub(super) passed: Progress,
}

/// Sorts out what is due: those whose turn it is not are blocked, those that came too late or too early are settled, and the
/// others are returned, at most `room` of them.
pub(super) async fn take(
    session: &Session,
    given: Option<i64>,
    route: &Route,
    company: Company,
    room: usize,
    due: &[Peeked],
    now: UnixMicros,
) -> Result<Turns, EngineError> {
    lines::adopt(session, route, due).await?;
    let candidates: Vec<Candidate> = due.iter().map(|due| due.candidate.clone()).collect();
    let mut wanted: BTreeMap<&str, i64> = BTreeMap::new();
    for entity in candidates.iter().filter_map(|candidate| candidate.entity.as_deref()) {
        *wanted.entry(entity).or_default() += 1;
    }
    let unlocked = due.iter().filter(|due| !due.locked);
    let unlocked: BTreeSet<&str> = unlocked.filter_map(|due| due.candidate.entity.as_deref()).collect();
    lines::lock(session, &route.name, &unlocked).await?;
    let known = lines::of(session, given, route, &wanted).await?;
    let plan = plan(&route.ordering, company, room, &candidates, &known);
    let blocked = plan.blocked.iter().filter_map(|index| candidates.get(*index)).map(|one| one.place);
    lines::block(session, given, route, blocked).await?;
    let (mut run, mut passed) = (Vec::new(), Vec::new());
    for (index, step) in plan.steps {
        let Some(due) = due.get(index) else { continue };
        match step {
            Step::Run(state) => run.push((due.candidate.place, state)),
            Step::Settle(verdict) => passed.push((due, verdict)),
            Step::Defer(reason) => {
                passed.push((due, route.ordering.parking.after_deferral(&reason, due.parked_at, now)));
            }
        }
    }
    let passed = pass(session, given, route, &passed, now).await?;
    Ok(Turns { run, passed })
}

/// Settles deliveries that do not run.
async fn pass(
    session: &Session,
    given: Option<i64>,
    route: &Route,
    passed: &[(&Peeked, Verdict)],
    now: UnixMicros,
) -> Result<Progress, EngineError> {
    let mut progress = Progress::default();
    if passed.is_empty() {
        return Ok(progress);
    }
    let mut fences = Vec::with_capacity(passed.len());
    for (due, verdict) in passed {
        let Place { event, epoch, .. } = due.candidate.place;
        let delivery = DeliveryId { event, route: route.name.clone(), epoch };
        let attempt = due.attempt + 1;
        fences.push(Fence { delivery, attempt });
        progress.count(event, attempt, route.retry.max_attempts, verdict, now);
    }
    let ended: Vec<Ended<'_>> = fences
        .iter()
        .zip(passed)
        .map(|(fence, (_, verdict))| Ended { fence, verdict, followups: &[] })
        .collect();
    if settle::settle(session, given, now, Held::Lock, &ended).await?.len() != ended.len() {
        return Err(EngineError::other("a delivery changed although it was locked"));
    }
    let came: Vec<Came<'_>> = passed
        .iter()
        .filter_map(|(due, verdict)| {
            let Candidate { entity, mark, kind, .. } = &due.candidate;
            Some(Came { entity: entity.as_deref()?, mark: *mark, kind: kind.as_deref(), verdict })
        })
        .collect();
    lines::after(session, given, route, &came).await?;
    Ok(progress)
}
