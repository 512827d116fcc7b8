//! The lane of a route whose effects are in another database: its errands, and beside them the forgetting of its guards.
//!
//! Promises: a guard is forgotten only if it is old, by the earlier one of two clocks, and the journal knows that nothing can
//! come of its delivery any more. While the clock is in doubt (`journal::forgetting`) none is.
//! Guards of other gateways in the same database are left alone.

use std::sync::Arc;

use tokio::sync::watch;

use super::errand::{Away, Errand, What};
use super::lane::rest;
use super::{Pace, Shared, outside};
use crate::delivery::DeliveryId;
use crate::handler::Elsewhere;
use crate::handler::elsewhere::{Comparison, Round};
use crate::journal::WorkError;
use crate::route::Route;

/// Guards that are looked at in one go.
const BATCH: usize = 500;

/// The mark of a journal that does not know its own. Guards with it are kept.
const NO_MARK: i64 = 0;

/// Runs a route until the end.
pub(super) async fn run(
    shared: Arc<Shared>,
    route: Arc<Route>,
    elsewhere: Arc<Elsewhere>,
    mut end: watch::Receiver<bool>,
) {
    let mark = loop {
        match shared.deliveries.mark().await {
            Ok(mark) => break mark,
            Err(WorkError::Unsupported(_)) => break NO_MARK,
            Err(WorkError::Unavailable(_)) => {
                if rest(shared.after_trouble(), &mut end).await {
                    return;
                }
            }
        }
    };
    let away = Away { elsewhere: Arc::clone(&elsewhere), mark, comparison: Comparison::of(&route) };
    let errand = Errand::new(&route, What::Elsewhere(Arc::new(away)));
    let errands = outside::run(Arc::clone(&shared), Arc::clone(&route), errand, end.clone());
    if mark == NO_MARK {
        return errands.await;
    }
    tokio::join!(errands, forget(&shared, &route, &elsewhere, mark, end));
}

/// Goes round until the end.
async fn forget(shared: &Shared, route: &Route, elsewhere: &Elsewhere, mark: i64, mut end: watch::Receiver<bool>) {
    let pace = Pace::default();
    let mut behind = None;
    // Not at once: whoever starts has other things to do first.
    while !rest(if behind.is_some() { pace.busy } else { pace.idle }, &mut end).await {
        if !shared.may_forget() {
            behind = None;
            continue;
        }
        let (route_name, now) = (route.name.clone(), shared.clock.now());
        let round = Round { route: route_name, journal: mark, behind, age: elsewhere.keep, now, limit: BATCH };
        behind = match forget_some(shared, elsewhere, &round).await {
            Ok(last) => last,
            Err(reason) => {
                tracing::debug!(route = route.name.as_str(), reason, "no guards could be forgotten now");
                None
            }
        };
    }
}

/// Forgets what may be forgotten of the next guards. Returns the last one that was looked at, unless that was the end.
async fn forget_some(shared: &Shared, elsewhere: &Elsewhere, round: &Round) -> Result<Option<DeliveryId>, String> {
    let mut aged = elsewhere.database.aged(round).await?;
    let last = aged.last().cloned().filter(|_| aged.len() == round.limit);
    let unsettled = shared.deliveries.unsettled(aged.clone()).await.map_err(|error| error.to_string())?;
    aged.retain(|delivery| !unsettled.contains(delivery));
    if !aged.is_empty() {
        elsewhere.database.forget(&aged).await?;
    }
    Ok(last)
}
