//! Whose turn it is among due deliveries of a route that looks at entities. Runs inside a transaction of its caller, and leaves
//! the lines of the entities locked until it ends. Whatever stands in a line that somebody else is at stays due.
//!
//! Does not: decide anything. The rules are in `ordering`; this carries out what they say about those that do not run.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use oncehook_verify::UnixMicros;

use super::connection::Session;
use super::engine_error::EngineError;
use super::lines::{self, Came, Peeked};
use super::queue::{BODIES_AT_ONCE, Taken};
use super::settle::{self, Ended, Held};
use crate::delivery::{DeliveryId, Fence, Verdict};
use crate::event::EventId;
use crate::journal::Progress;
use crate::ordering::{Candidate, Company, Place, Step, plan};
use crate::route::Route;

/// A delivery by event, epoch and attempts so far.
pub(super) type One = (EventId, u32, u32);

/// Due deliveries, sorted out.
pub(super) struct Turns {
    /// To be run, in this order, with the state that each leads to.
    pub(super) run: Vec<(Taken, Option<String>)>,
    /// To be run alone, in this order: what failed before, and whatever is behind it. Nothing was decided about these.
    pub(super) alone: Vec<One>,
    /// What was settled without running.
    pub(super) passed: Progress,
    /// Whether there may be more that is due.
    pub(super) full: bool,
}

/// Sorts out what is due: those whose turn it is not are blocked, those that came too late or too early are settled, and the
/// others are returned, at most `room` of them.
pub(super) async fn take(
    session: &mut Session,
    now: i64,
    route: &Route,
    company: Company,
    (look, room): (usize, usize),
    only: Option<One>,
) -> Result<Turns, EngineError> {
    let due = lines::peek(session, now, route, look, only).await?;
    let mut full = due.len() == look;
    let (mut due, alone) =
        if company == Company::OneTransaction && only.is_none() { apart(due) } else { (due, Vec::new()) };
    lines::adopt(session, route, &due).await?;
    pass_over(session, route, &mut due, only).await?;
    // If all was somebody else's it is better to wait for a moment than to look again at once.
    full &= !due.is_empty() || !alone.is_empty();
    let candidates: Vec<Candidate> = due.iter().map(|due| due.candidate.clone()).collect();
    let mut wanted: BTreeMap<&str, Vec<Place>> = BTreeMap::new();
    for Candidate { entity, place, .. } in &candidates {
        if let Some(entity) = entity {
            wanted.entry(entity).or_default().push(*place);
        }
    }
    let known = lines::of(session, now, route, &wanted).await?;
    let plan = plan(&route.ordering, company, room, &candidates, &known);
    let blocked = plan.blocked.iter().filter_map(|index| candidates.get(*index)).map(|one| one.place);
    lines::block(session, now, route, blocked).await?;
    let (mut run, mut bytes) = (Vec::new(), 0);
    let mut passed = Vec::new();
    for (index, step) in plan.steps {
        let Some(due) = due.get(index) else { continue };
        if bytes >= BODIES_AT_ONCE {
            // The steps after this one may count on it, so they wait too.
            full = true;
            break;
        }
        match step {
            Step::Run(state) => {
                bytes += due.size;
                run.push((due.taken(), state));
            }
            Step::Settle(verdict) => passed.push((due, verdict)),
            Step::Defer(reason) => {
                let parking = &route.ordering.parking;
                passed.push((due, parking.after_deferral(&reason, due.parked_at, UnixMicros(now))));
            }
        }
    }
    let passed = pass(session, now, route, &passed).await?;
    Ok(Turns { run, alone, passed, full })
}

/// Locks the lines of what is due, and drops whatever stands in lines that others are at. A single one waits for them.
async fn pass_over(
    session: &mut Session,
    route: &Route,
    due: &mut Vec<Peeked>,
    only: Option<One>,
) -> Result<(), EngineError> {
    let entities: Vec<String> = due.iter().filter_map(|due| due.candidate.entity.clone()).collect();
    let entities: BTreeSet<&str> = entities.iter().map(String::as_str).collect();
    if only.is_some() {
        return lines::lock(session, &route.name, &entities).await;
    }
    let free = lines::lock_free(session, &route.name, &entities).await?;
    due.retain(|due| due.candidate.entity.as_deref().is_none_or(|entity| free.contains(entity)));
    Ok(())
}

/// Parts those that failed before, and others of the same entities, from the rest.
fn apart(due: Vec<Peeked>) -> (Vec<Peeked>, Vec<One>) {
    let troubled: HashSet<String> =
        due.iter().filter(|due| due.attempt > 0).filter_map(|due| due.candidate.entity.clone()).collect();
    let (alone, company): (Vec<Peeked>, Vec<Peeked>) =
        due.into_iter().partition(|due| match &due.candidate.entity {
            Some(entity) => troubled.contains(entity),
            None => due.attempt > 0,
        });
    let mut alone: Vec<(Place, u32)> = alone.iter().map(|due| (due.candidate.place, due.attempt)).collect();
    alone.sort_unstable();
    (company, alone.into_iter().map(|(place, attempt)| (place.event, place.epoch, attempt)).collect())
}

/// Settles deliveries that do not run.
async fn pass(
    session: &mut Session,
    now: i64,
    route: &Route,
    passed: &[(&Peeked, Verdict)],
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
        let limit = due.attempt_limit.unwrap_or(route.retry.max_attempts);
        progress.count(event, attempt, limit, verdict, UnixMicros(now));
    }
    let ended: Vec<Ended<'_>> = fences
        .iter()
        .zip(passed)
        .map(|(fence, (_, verdict))| Ended { fence, verdict, followups: &[] })
        .collect();
    settle::settle(session, now, UnixMicros(now), Held::Lock, &ended).await?;
    let came: Vec<Came<'_>> = passed
        .iter()
        .filter_map(|(due, verdict)| {
            let Candidate { entity, mark, kind, .. } = &due.candidate;
            Some(Came { entity: entity.as_deref()?, mark: *mark, kind: kind.as_deref(), verdict })
        })
        .collect();
    lines::after(session, now, route, &came).await?;
    Ok(progress)
}
