//! An operator's order for one event, completed with what the configuration says about it.
//!
//! Promises: a forced replay for a named route is made only if that route is configured for the event's source. A delivery for
//! any other name would wait for ever.
//!
//! Does not: carry it out. A journal does that, and writes it down.

use oncehook::delivery::RouteName;
use oncehook::event::SourceName;
use oncehook::journal::{EventSummary, Order, Verb, Who};
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
