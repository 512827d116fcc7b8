//! An operator's order for one event, completed with what the configuration says about it.
//!
//! Promises: a forced replay for a named route is made only if that route is configured for the event's source. A delivery for
//! any other name would wait for ever.
//!
//! Promises also: what is skipped can take effect no more, in another database either ([`void_before_skip`]).
//!
//! Does not: carry it out. A journal does that, and writes it down. [`forecast`] says what would come of it.

use oncehook::delivery::{DeliveryId, DeliveryState, Fence, RouteName};
use oncehook::event::SourceName;
use oncehook::handler::Handler;
use oncehook::handler::elsewhere::Voided;
use oncehook::journal::{Deliveries, EventSummary, Flag, Order, OrderError, Ordered, Verb, Who, WorkError};
use oncehook::retry::RetryPolicy;
use oncehook::route::Routes;

/// A route that cannot run an event again.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NoRoute {
    #[error("there is no route `{0}` in the configuration, so nothing would ever run for it")]
    Unknown(RouteName),
    #[error("route `{0}` takes events of source `{1}` only")]
    OfAnotherSource(RouteName, SourceName),
}

/// Whether a route can be made to run events of a source again; of any source, if none is given.
pub(crate) fn can_force(routes: &Routes, name: &RouteName, source: Option<&str>) -> Result<(), NoRoute> {
    match routes.get(name.as_str()) {
        None => Err(NoRoute::Unknown(name.clone())),
        Some(route) if source.is_some_and(|source| source != route.source.as_str()) => {
            Err(NoRoute::OfAnotherSource(name.clone(), route.source.clone()))
        }
        Some(_) => Ok(()),
    }
}

/// An order for an event as things are now.
pub(crate) fn order(
    routes: &Routes,
    event: &EventSummary,
    verb: Verb,
    route: Option<RouteName>,
    who: Who,
) -> Result<Order, NoRoute> {
    if let (Verb::ForceReplay { .. }, Some(named)) = (verb, &route) {
        can_force(routes, named, Some(&event.source))?;
    }
    // A source that is no longer configured has no routes.
    let wanting: Vec<RouteName> = SourceName::new(&event.source)
        .map(|source| routes.wanting(&source, event.kind.as_deref()).into_vec())
        .unwrap_or_default();
    let involved = event.deliveries.iter().map(|delivery| delivery.route.as_str());
    let involved = involved.chain(wanting.iter().map(RouteName::as_str));
    let attempts = match &route {
        Some(route) => routes.get(route.as_str()).map(|route| route.retry.max_attempts),
        // One number for the whole event: the most patient of its routes decides.
        None => involved.filter_map(|name| routes.get(name)).map(|route| route.retry.max_attempts).max(),
    };
    let attempts = attempts.unwrap_or_else(|| RetryPolicy::default().max_attempts);
    Ok(Order { event: event.id, verb, route, who, wanting, attempts })
}

/// What an order would change, for a dry run: decided from the event as it was read, without asking the journal to do
/// anything. The journals decide the same inside their transaction; a test compares the two.
pub(crate) fn forecast(event: &EventSummary, order: &Order) -> Result<Ordered, OrderError> {
    let unfit = |reason: &str| Err(OrderError::Unfit(reason.to_owned()));
    let held = event.flags.contains(&Flag::Quarantined);
    if held && !matches!(order.verb, Verb::Release | Verb::Skip) {
        return unfit("the event is held; release it first");
    }
    let latest = event.deliveries.iter().map(|delivery| delivery.epoch).max().unwrap_or(0);
    let in_state = |fits: fn(DeliveryState) -> bool| -> Vec<RouteName> {
        let deliveries = event.deliveries.iter();
        let fitting = deliveries.filter(|delivery| DeliveryState::parse(&delivery.state).is_some_and(fits));
        let routes = fitting.filter_map(|delivery| RouteName::new(&delivery.route).ok());
        routes.filter(|route| order.is_for(route)).collect()
    };
    let failed = |state| matches!(state, DeliveryState::Dead | DeliveryState::Retrying | DeliveryState::Parked);
    let wanting = || order.wanting.iter().filter(|route| order.is_for(route)).cloned();
    let mut epoch = latest;
    let mut routes = match order.verb {
        Verb::Retry => in_state(failed),
        Verb::Replay => {
            let known = |route: &RouteName| event.deliveries.iter().any(|one| one.route == route.as_str());
            in_state(failed).into_iter().chain(wanting().filter(|route| !known(route))).collect()
        }
        Verb::ForceReplay { epoch: asked } if asked != latest + 1 => {
            return Err(OrderError::Epoch { next: latest + 1 });
        }
        Verb::ForceReplay { epoch: asked } => {
            epoch = asked;
            order.route.as_ref().map_or_else(|| wanting().collect(), |named| vec![named.clone()])
        }
        Verb::Skip if !in_state(|state| state == DeliveryState::Running).is_empty() => {
            return unfit("a delivery is running; wait for it, or pause its route first");
        }
        Verb::Skip => in_state(|state| state == DeliveryState::Dead || state.is_pending()),
        Verb::Release if !held => return unfit("the event is not held"),
        Verb::Release => wanting().collect(),
    };
    routes.sort_unstable();
    routes.dedup();
    match order.verb {
        Verb::Retry if routes.is_empty() => unfit("nothing to retry: no delivery is dead or waits for another attempt"),
        Verb::Skip if routes.is_empty() => unfit("nothing to skip: no delivery is pending or dead"),
        Verb::ForceReplay { .. } if routes.is_empty() => unfit("no route wants this event"),
        _ => Ok(Ordered { routes, epoch }),
    }
}

/// Why something cannot be skipped.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotSkipped {
    #[error("route `{0}` took effect already, in its own database; `retry` it, and that is recorded")]
    TookEffect(RouteName),
    #[error("the database of route `{0}` cannot be reached, and an attempt there may still be under way")]
    Unreached(RouteName, String),
    #[error(transparent)]
    Journal(#[from] WorkError),
}

/// Before deliveries to other databases are skipped, their guards there are made void: an attempt that was lost could take
/// effect afterwards otherwise. What runs is left to the journal, which refuses to skip it.
pub(crate) async fn void_before_skip(
    routes: &Routes,
    deliveries: &dyn Deliveries,
    event: &EventSummary,
    order: &Order,
) -> Result<(), NotSkipped> {
    let skipped = |state: &str| match DeliveryState::parse(state) {
        Some(DeliveryState::Running) | None => false,
        Some(state) => state == DeliveryState::Dead || state.is_pending(),
    };
    for delivery in event.deliveries.iter().filter(|one| one.attempt > 0 && skipped(&one.state)) {
        let Some(route) = routes.get(&delivery.route).filter(|route| order.is_for(&route.name)) else {
            continue;
        };
        let Handler::Elsewhere(elsewhere) = &route.handler else { continue };
        let id = DeliveryId { event: event.id, route: route.name.clone(), epoch: delivery.epoch };
        // Guards of a journal that does not know its mark are never forgotten.
        let mark = match deliveries.mark().await {
            Err(WorkError::Unsupported(_)) => 0,
            mark => mark?,
        };
        let voided = elsewhere.database.void(mark, &[Fence { delivery: id, attempt: delivery.attempt }]).await;
        let voided = voided.map_err(|reason| NotSkipped::Unreached(route.name.clone(), reason))?;
        if voided.iter().any(|voided| matches!(voided, Voided::TookEffect(_))) {
            return Err(NotSkipped::TookEffect(route.name.clone()));
        }
    }
    Ok(())
}
