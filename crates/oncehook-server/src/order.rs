//! An operator's order for one event, completed with what the configuration says about it.
//!
//! Does not: carry it out. A journal does that, and writes it down.

use oncehook::delivery::RouteName;
use oncehook::event::SourceName;
use oncehook::journal::{EventSummary, Order, Verb, Who};
use oncehook::retry::RetryPolicy;
use oncehook::route::Routes;

/// An order for an event as things are now.
pub(crate) fn order(
    routes: &Routes,
    event: &EventSummary,
    verb: Verb,
    route: Option<RouteName>,
    who: Who,
) -> Order {
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
    Order { event: event.id, verb, route, who, wanting, attempts }
}
