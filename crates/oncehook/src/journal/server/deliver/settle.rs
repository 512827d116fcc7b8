//! Settling attempts: what is written of each, and how.
//!
//! Promises: the fence stands in every statement. Of an attempt that is not the latest nothing is written. Rows are written
//! in the order of their keys where an engine needs several statements, so that two that settle wait for each other in the
//! same order.
//!
//! Does not: decide what an outcome writes. `decide::outcome` does.

use std::collections::HashSet;

use oncehook_verify::UnixMicros;

#[cfg(not(feature = "planted"))]
use super::steps::Delivers as Steps;
use super::steps::{Delivers, SettleSql};
use crate::delivery::{Cause, DeliveryState, Fence, Settlement};
use crate::journal::decide::outcome::{Held, Outcome, outcome};
use crate::journal::server::engine::Session;
use crate::journal::server::error::{EngineError, EngineResult};
#[cfg(feature = "planted")]
use crate::journal::server::planted::MistakenDelivers as Steps;
use crate::journal::server::value::{Column, Param, Row};

/// An attempt that has ended, and what it writes.
type Ended<'s> = (&'s Fence, Outcome<'s>);

/// Settles attempts. Only the first settlement of an attempt counts. Returns the fences that were the latest; of the others
/// nothing was written. `now` is the transaction's time, or none if the statement may read the database's clock. The due times
/// of the verdicts are counted from `from`.
pub(in crate::journal::server) async fn settle<E: Delivers>(
    session: &mut E::Session,
    now: Option<i64>,
    from: UnixMicros,
    held: Held,
    settlements: &[Settlement],
) -> EngineResult<HashSet<Fence>> {
    let mut seen = HashSet::new();
    let first = settlements.iter().filter(|ended| seen.insert(&ended.fence));
    let mut ended: Vec<Ended<'_>> =
        first.map(|ended| (&ended.fence, outcome(held, &ended.verdict, &ended.followups))).collect();
    let done: HashSet<Fence> = match <E as Steps>::settle_sql() {
        _ if ended.is_empty() => HashSet::new(),
        SettleSql::AtOnce { leased, locked, succeeded, .. } => {
            let plain =
                |(_, outcome): &Ended<'_>| outcome.state == DeliveryState::Succeeded && outcome.followups.is_empty();
            let rows = if held == Held::Lock && ended.iter().all(plain) {
                let results = Column::Texts(ended.iter().map(|(_, outcome)| outcome.result).collect());
                session.rows(succeeded, &[now.into(), fences(&ended).with([results])]).await?
            } else {
                let (sql, errors) = (if held == Held::Lock { locked } else { leased }, errors(&ended));
                session.rows(sql, &params(now, from, &ended, &errors)).await?
            };
            rows.iter().map(Row::fence).collect::<EngineResult<_>>()?
        }
        SettleSql::InSteps { live, leased, locked, follow } => {
            ended.sort_by_key(|(fence, _)| *fence);
            if held != Held::Lock {
                let rows = session.rows(live, &[fences(&ended)]).await?;
                let live: HashSet<usize> = rows.iter().map(|row| row.place(0)).collect::<EngineResult<_>>()?;
                let mut place = 0..;
                ended.retain(|_| place.next().is_some_and(|place| live.contains(&place)));
            }
            if !ended.is_empty() {
                let [deliveries, attempts] = if held == Held::Lock { locked } else { leased };
                let errors = errors(&ended);
                let params = params(now, from, &ended, &errors);
                if usize::try_from(session.change(deliveries, &params).await?) != Ok(ended.len()) {
                    return Err(EngineError::changed_under_lock());
                }
                if ended.iter().any(|(_, outcome)| outcome.attempt.is_some()) {
                    session.change(attempts, &params).await?;
                }
                if ended.iter().any(|(_, outcome)| !outcome.followups.is_empty()) {
                    session.change(follow, &params).await?;
                }
            }
            ended.iter().map(|(fence, _)| (*fence).clone()).collect()
        }
    };
    let parked = ended.iter().filter(|(fence, outcome)| outcome.state == DeliveryState::Parked && done.contains(fence));
    let parked: Vec<&Fence> = parked.map(|(fence, _)| *fence).collect();
    if !parked.is_empty() {
        session.change(E::DELIVER.name_parked, &[Param::fences(parked)]).await?;
    }
    Ok(done)
}

fn fences<'s>(ended: &[Ended<'s>]) -> Param<'s> {
    Param::fences(ended.iter().map(|(fence, _)| *fence))
}

/// The error texts. A database takes no zero characters.
fn errors(ended: &[Ended<'_>]) -> Vec<Option<String>> {
    ended.iter().map(|(_, outcome)| outcome.error.map(|error| error.replace('\0', "\u{fffd}"))).collect()
}

/// The parameters of [`SettleSql`].
fn params<'s>(now: Option<i64>, from: UnixMicros, ended: &[Ended<'s>], errors: &'s [Option<String>]) -> [Param<'s>; 3] {
    let outcomes = || ended.iter().map(|(_, outcome)| outcome);
    let rows = || outcomes().map(|outcome| outcome.attempt);
    let wait = |at: UnixMicros| at.0.saturating_sub(from.0);
    let row_errors = rows().zip(errors).map(|(row, error)| row?.error.and(error.as_deref()));
    let table = fences(ended).with([
        Column::texts(outcomes().map(|outcome| outcome.state.as_str())),
        Column::Ints(outcomes().map(|outcome| outcome.run_at.map(wait)).collect()),
        Column::Texts(outcomes().map(|outcome| outcome.result).collect()),
        Column::Texts(errors.iter().map(Option::as_deref).collect()),
        Column::Texts(outcomes().map(|outcome| outcome.cause.map(Cause::as_str)).collect()),
        Column::ints(outcomes().map(|outcome| i64::from(outcome.counts))),
        Column::Texts(rows().map(|row| row.map(|row| row.outcome)).collect()),
        Column::Texts(row_errors.collect()),
    ]);
    let followups =
        ended.iter().flat_map(|(fence, outcome)| outcome.followups.iter().map(|next| (&fence.delivery, next)));
    let next = Column::texts(followups.clone().map(|(_, next)| next.as_str()));
    [now.into(), table, Param::deliveries(followups.map(|(delivery, _)| delivery)).with([next])]
}
