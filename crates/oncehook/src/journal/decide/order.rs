//! What an operator's order changes, or why it is refused.
//!
//! Promises: an order that is refused changes nothing, and the reasons are looked for in the documented order
//! ([`Deliveries::order`](crate::journal::Deliveries::order)). What each verb means stands at [`Verb`].
//!
//! Does not: look at routes. Which of them want the event stands in the order.

use std::collections::BTreeSet;

use crate::delivery::{DeliveryState, RouteName};
use crate::journal::{Order, OrderError, Ordered, Verb};

/// A delivery of the event, as it stands in the transaction of the order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) route: RouteName,
    pub(crate) epoch: u32,
    pub(crate) state: DeliveryState,
    /// Attempts so far.
    pub(crate) attempt: u32,
    /// Whether an attempt holds a lease that has not run out.
    pub(crate) leased: bool,
}

/// A delivery that is due at once, and counts as neither blocked nor parked nor settled any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Revived<'f> {
    pub(crate) route: &'f RouteName,
    pub(crate) epoch: u32,
    pub(crate) state: DeliveryState,
    /// The attempt after which it is dead.
    pub(crate) limit: u32,
}

/// What an order changes. Blocked deliveries of the event's entity look again on every route of `ordered`.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Changes<'o> {
    /// Deliveries to be made due now.
    pub(crate) revive: Vec<Revived<'o>>,
    /// Deliveries to be made, each with its epoch.
    pub(crate) make: Vec<(&'o RouteName, u32)>,
    /// Deliveries to be given up. An attempt of one that is `running` was lost.
    pub(crate) skip: Vec<&'o Found>,
    /// Whether the event is held no more.
    pub(crate) release: bool,
    /// What the operator is answered.
    pub(crate) ordered: Ordered,
    /// What the audit says that it changed; nothing if there is nothing to write down.
    pub(crate) audit: Option<String>,
}

fn unfit<T>(reason: &str) -> Result<T, OrderError> {
    Err(OrderError::Unfit(reason.to_owned()))
}

/// Decides about an order. `held`: whether the event is held; nothing if there is no such event. `found`: all of its
/// deliveries.
pub(crate) fn decide<'o>(order: &'o Order, held: Option<bool>, found: &'o [Found]) -> Result<Changes<'o>, OrderError> {
    match (held, order.verb) {
        (None, _) => return Err(OrderError::NoEvent),
        (Some(false), Verb::Release) => return unfit("the event is not held"),
        (Some(true), Verb::Retry | Verb::Replay | Verb::ForceReplay { .. }) => {
            return unfit("the event is held; release it first");
        }
        _ => {}
    }
    let mut epoch = found.iter().map(|found| found.epoch).max().unwrap_or(0);
    let (mut revive, mut make, mut skip) = (Vec::new(), Vec::new(), Vec::new());
    match order.verb {
        Verb::Retry => {
            revive = failed(order, found);
            if revive.is_empty() {
                return unfit("nothing to retry: no delivery is dead or waits for another attempt");
            }
        }
        Verb::Replay => {
            revive = failed(order, found);
            make = new(order, found);
        }
        Verb::ForceReplay { epoch: asked } => {
            if !order.who.has_reason() {
                return unfit("a forced replay needs a reason");
            }
            let next = epoch.saturating_add(1);
            if asked != next {
                return Err(OrderError::Epoch { next });
            }
            // A route that is named runs again even if it is a follow-up, or wants the event no more.
            let again: BTreeSet<&RouteName> = match &order.route {
                Some(named) => BTreeSet::from([named]),
                None => order.wanting.iter().collect(),
            };
            if again.is_empty() {
                return unfit("no route wants this event");
            }
            make = again.into_iter().map(|route| (route, asked)).collect();
            epoch = asked;
        }
        Verb::Skip => {
            skip = given_up(order, found);
            // An attempt whose lease has run out belongs to no worker any more, and its route may be gone.
            if skip.iter().any(|found| found.leased) {
                return unfit("a delivery is running; wait for it, or pause its route first");
            }
            if skip.is_empty() {
                return unfit("nothing to skip: no delivery is pending or dead");
            }
        }
        Verb::Release => make = new(order, found),
    }
    let changed = revive.iter().map(|one| one.route).chain(make.iter().map(|(route, _)| *route));
    let changed: BTreeSet<&RouteName> = changed.chain(skip.iter().map(|found| &found.route)).collect();
    let ordered = Ordered { routes: changed.into_iter().cloned().collect(), epoch };
    let release = order.verb == Verb::Release;
    let audit = ordered.changed_anything(order.verb).then(|| ordered.to_json());
    Ok(Changes { revive, make, skip, release, ordered, audit })
}

/// What failed, and is tried again.
fn failed<'o>(order: &Order, found: &'o [Found]) -> Vec<Revived<'o>> {
    let has_failed = |state| matches!(state, DeliveryState::Dead | DeliveryState::Retrying | DeliveryState::Parked);
    let failed = found.iter().filter(|found| order.is_for(&found.route) && has_failed(found.state));
    failed
        .map(|found| Revived {
            route: &found.route,
            epoch: found.epoch,
            state: if found.attempt > 0 { DeliveryState::Retrying } else { DeliveryState::Ready },
            limit: found.attempt.saturating_add(order.attempts),
        })
        .collect()
}

/// First deliveries for the routes that want the event and never had one.
fn new<'o>(order: &'o Order, found: &[Found]) -> Vec<(&'o RouteName, u32)> {
    let is_new = |route: &&RouteName| order.is_for(route) && !found.iter().any(|found| found.route == **route);
    let new: BTreeSet<&RouteName> = order.wanting.iter().filter(is_new).collect();
    new.into_iter().map(|route| (route, 0)).collect()
}

/// What is pending or dead.
fn given_up<'o>(order: &Order, found: &'o [Found]) -> Vec<&'o Found> {
    let is_open = |state: DeliveryState| state.is_pending() || state == DeliveryState::Dead;
    found.iter().filter(|found| order.is_for(&found.route) && is_open(found.state)).collect()
}
