//! Whose turn it is among due deliveries of a route that looks at entities. Runs inside a transaction of its caller.
//!
//! Does not: decide anything. The rules are in `ordering`; this carries out what they say about those that do not run.

use oncehook_verify::UnixMicros;
use rusqlite::Connection;

use super::lines::{self, Came, Waiting};
use super::queue::{self, Due, Held};
use crate::delivery::{Fence, Verdict};
use crate::journal::Progress;
use crate::ordering::{Candidate, Company, Step, plan};
use crate::route::Route;

/// What is done about a delivery without running it.
pub(super) struct Passed {
    pub(super) due: Due,
    pub(super) verdict: Verdict,
}

/// Due deliveries, sorted out.
#[derive(Default)]
pub(super) struct Turns {
    /// To be run, in this order.
    pub(super) run: Vec<Due>,
    /// Settled without running.
    pub(super) passed: Vec<Passed>,
}

impl Turns {
    /// What became of those that do not run.
    pub(super) fn progress(&self, now: UnixMicros) -> Progress {
        let mut progress = Progress::default();
        for Passed { due, verdict } in &self.passed {
            progress.count(due.event.id, due.attempt + 1, due.attempt_limit, verdict, now);
        }
        progress
    }
}

/// Sorts out what is due: those whose turn it is not are blocked, those that came too late or too early are settled, and the
/// others are returned, at most `room` of them. `waiting` learns of those that are blocked. Of one entity several may run one after the other if the company is one
/// transaction.
pub(super) fn take(
    connection: &Connection,
    route: &Route,
    company: Company,
    room: usize,
    due: Vec<Due>,
    waiting: &mut Waiting,
    now: UnixMicros,
) -> Result<Turns, rusqlite::Error> {
    lines::adopt(connection, route, &due)?;
    let candidates: Vec<Candidate> = due.iter().map(lines::candidate).collect();
    let lines = lines::of(connection, route, &candidates)?;
    let plan = plan(&route.ordering, company, room, &candidates, &lines);
    waiting.blocked |= !plan.blocked.is_empty();
    for due in plan.blocked.iter().filter_map(|index| due.get(*index)) {
        lines::block(connection, route, due, now)?;
    }
    let mut due: Vec<Option<Due>> = due.into_iter().map(Some).collect();
    let mut turns = Turns::default();
    for (index, step) in plan.steps {
        let Some(mut due) = due.get_mut(index).and_then(Option::take) else { continue };
        let verdict = match step {
            Step::Run(state) => {
                due.event.state = state;
                turns.run.push(due);
                continue;
            }
            Step::Settle(verdict) => verdict,
            Step::Defer(reason) => route.ordering.parking.after_deferral(&reason, due.parked_at, now),
        };
        pass(connection, route, &due, &verdict, *waiting, now)?;
        turns.passed.push(Passed { due, verdict });
    }
    Ok(turns)
}

/// Settles a delivery that does not run.
fn pass(
    connection: &Connection,
    route: &Route,
    due: &Due,
    verdict: &Verdict,
    waiting: Waiting,
    now: UnixMicros,
) -> Result<(), rusqlite::Error> {
    let fence = Fence { delivery: due.id(route), attempt: due.attempt + 1 };
    if !queue::settle(connection, &fence, Held::Lock, verdict, &[], now)? {
        // The row was read in this transaction. If it is not there now, nothing here can be trusted.
        return Err(rusqlite::Error::StatementChangedRows(0));
    }
    let Some(came) = Came::new(&due.event, verdict) else { return Ok(()) };
    lines::after(connection, Some(route), &came, waiting, now)
}
