//! Routes: which events go to which handler, how often it is tried, and what follows.
//!
//! Promises: a [`Routes`] value is consistent: names are unique, `after` names an existing route, follow-ups form no
//! circle, and each route has one source.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use oncehook_verify::UnixMicros;
use smallvec::SmallVec;

use crate::delivery::{FailedAttempt, Failure, Remedy, RouteName, Verdict};
use crate::event::SourceName;
use crate::failures::FailureLog;
use crate::glob::Glob;
use crate::handler::{Fetch, Handler};
use crate::ordering::{Memory, Ordering};
use crate::retry::RetryPolicy;

/// One route.
#[derive(Debug, Clone)]
pub struct Route {
    /// Its name.
    pub name: RouteName,
    /// The source whose events it takes.
    pub source: SourceName,
    /// The types it takes; none means all, also events without a type.
    pub types: Vec<Glob>,
    /// The route that must have taken effect first.
    pub after: Option<RouteName>,
    /// How often and how patiently it tries.
    pub retry: RetryPolicy,
    /// How many deliveries leave the process at once.
    pub concurrency: usize,
    /// When it stops trying for a while.
    pub breaker: BreakerPolicy,
    /// What it asks about the entity of its events.
    pub ordering: Ordering,
    /// What the provider is asked before the handler runs.
    pub fetch: Option<Arc<Fetch>>,
    /// What it does.
    pub handler: Handler,
    /// Routes that start after this one. Filled by [`Routes::new`].
    pub followups: Vec<RouteName>,
    /// Its failed attempts, as the log tells them.
    pub failures: Arc<FailureLog>,
}

/// When a destination counts as down, and how long it is left alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BreakerPolicy {
    /// Failures in a row that open the breaker.
    pub failures: u32,
    /// The first rest; it doubles while the destination stays down.
    pub rest: Duration,
    /// The longest rest.
    pub longest_rest: Duration,
}

impl Default for BreakerPolicy {
    fn default() -> Self {
        Self { failures: 10, rest: Duration::from_secs(1), longest_rest: Duration::from_secs(30) }
    }
}

/// How many deliveries of a route leave the process at once, unless it says otherwise.
pub const USUAL_CONCURRENCY: usize = 16;

impl Route {
    /// A route with the usual policies.
    pub fn new(name: RouteName, source: SourceName, handler: Handler) -> Self {
        Self {
            name,
            source,
            types: Vec::new(),
            after: None,
            retry: match handler {
                Handler::Http(_) | Handler::Elsewhere(_) => RetryPolicy::patient(),
                Handler::Sql(_) | Handler::Function(_) => RetryPolicy::default(),
            },
            concurrency: USUAL_CONCURRENCY,
            breaker: BreakerPolicy::default(),
            ordering: Ordering::default(),
            fetch: None,
            handler,
            followups: Vec::new(),
            failures: Arc::default(),
        }
    }

    /// Tells the log about attempts that failed. Called once the failures are written down.
    pub(crate) fn report(&self, failed: &[FailedAttempt]) {
        let now = Instant::now();
        failed.iter().for_each(|failed| self.failures.note(self.name.as_str(), failed, now));
    }

    /// What becomes of a delivery whose lease ran out.
    ///
    /// In another database the lost attempt may still be under way, so a journal cannot declare its delivery dead by
    /// itself, whatever the limit says: one more attempt asks the guard, and declares what it finds.
    pub fn after_lost_lease(&self, attempt: u32, limit: u32, now: UnixMicros, chance: f64) -> Verdict {
        let limit = match self.handler {
            Handler::Elsewhere(_) => u32::MAX,
            Handler::Sql(_) | Handler::Http(_) | Handler::Function(_) => limit,
        };
        self.retry.after_failure(Failure::never_ended(), attempt, limit, now, chance)
    }

    /// Whether it takes events of this type.
    pub fn takes(&self, kind: Option<&str>) -> bool {
        self.types.is_empty() || kind.is_some_and(|kind| self.types.iter().any(|glob| glob.matches(kind)))
    }

    /// How many of those that wait for their turn in an entity's line may look again after what one came to. If they share a
    /// transaction a whole batch of them, or a long line would take a transaction for each; else, and behind one that
    /// did not take effect, the first finds out for all.
    pub(crate) fn let_go_on(&self, came_to: &Verdict) -> usize {
        match (&self.handler, &self.fetch, came_to) {
            (Handler::Sql(_), None, Verdict::Succeeded(_)) => SQL_BATCH,
            _ => 1,
        }
    }

    /// What becomes of a delivery whose attempt failed or was put off.
    pub fn after_failure(&self, failure: Failure, tried: Tried, now: UnixMicros, chance: f64) -> Verdict {
        if failure.remedy == Remedy::Defer {
            return self.ordering.parking.after_deferral(&failure.message, tried.parked_at, now);
        }
        self.retry.after_failure(failure, tried.attempt, tried.limit, now, chance)
    }
}

/// An attempt that failed, as far as it matters for what comes next.
#[derive(Debug, Clone, Copy)]
pub struct Tried {
    /// Its number.
    pub attempt: u32,
    /// The delivery's limit.
    pub limit: u32,
    /// Since when it has waited for a prerequisite, if it has.
    pub parked_at: Option<UnixMicros>,
}

/// Deliveries of a `sql` route in one transaction: many, so that they share a commit; not more, or accepting would wait.
pub(crate) const SQL_BATCH: usize = 256;

/// Routes that look at entities, as this process last claimed from them. A claim is settled by the process that
/// made it, so a journal finds the rules of every attempt that it is asked to settle.
#[derive(Debug, Default)]
pub(crate) struct KnownLines(RwLock<HashMap<RouteName, Arc<Route>>>);

impl KnownLines {
    /// Remembers a route.
    pub(crate) fn note(&self, route: &Arc<Route>) {
        let known = self.get(&route.name).is_some_and(|known| Arc::ptr_eq(&known, route));
        if !known {
            let mut lines = self.0.write().unwrap_or_else(PoisonError::into_inner);
            lines.insert(route.name.clone(), Arc::clone(route));
        }
    }

    /// The route of that name, if it looks at entities.
    pub(crate) fn get(&self, name: &RouteName) -> Option<Arc<Route>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).get(name).cloned()
    }
}

/// Why routes do not fit together.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RouteError {
    /// Two routes of one name.
    #[error("there are two routes named `{0}`")]
    Twice(RouteName),
    /// `after` names no route.
    #[error("route `{0}` comes after `{1}`, which does not exist")]
    AfterNothing(RouteName, RouteName),
    /// A route comes after itself.
    #[error("route `{0}` comes after itself")]
    Circle(RouteName),
}

/// All routes of a gateway.
#[derive(Debug, Clone, Default)]
pub struct Routes {
    all: Vec<Arc<Route>>,
    /// Per source: the routes that start when an event arrives.
    first: HashMap<SourceName, Vec<Arc<Route>>>,
    /// Sources of which a route looks at the entity of events.
    by_entity: HashSet<SourceName>,
}

impl Routes {
    /// Puts routes together. Follow-ups take source and types of the route they come after; what is remembered of entities
    /// is kept where the effects are.
    pub fn new(routes: Vec<Route>) -> Result<Self, RouteError> {
        let mut names = HashSet::new();
        if let Some(twice) = routes.iter().find(|route| !names.insert(&route.name)) {
            return Err(RouteError::Twice(twice.name.clone()));
        }
        let mut complete = routes.clone();
        for route in &mut complete {
            let (mut at, mut passed) = (route.after.as_ref(), HashSet::new());
            while let Some(name) = at {
                let before = routes.iter().find(|other| other.name == *name);
                let before = before.ok_or_else(|| RouteError::AfterNothing(route.name.clone(), name.clone()))?;
                if !passed.insert(name) {
                    return Err(RouteError::Circle(route.name.clone()));
                }
                route.source = before.source.clone();
                route.types.clone_from(&before.types);
                at = before.after.as_ref();
            }
            if matches!(route.handler, Handler::Elsewhere(_)) {
                route.ordering.memory = Memory::Effect;
            }
            let follows = |other: &&Route| other.after.as_ref() == Some(&route.name);
            route.followups = routes.iter().filter(follows).map(|other| other.name.clone()).collect();
        }
        let all: Vec<Arc<Route>> = complete.into_iter().map(Arc::new).collect();
        let mut first: HashMap<SourceName, Vec<Arc<Route>>> = HashMap::new();
        for route in all.iter().filter(|route| route.after.is_none()) {
            first.entry(route.source.clone()).or_default().push(Arc::clone(route));
        }
        let looks = all.iter().filter(|route| route.ordering.is_serial());
        let by_entity = looks.map(|route| route.source.clone()).collect();
        Ok(Self { all, first, by_entity })
    }

    /// The routes that start when such an event arrives.
    pub fn wanting(&self, source: &SourceName, kind: Option<&str>) -> SmallVec<[RouteName; 2]> {
        let of_source = self.first.get(source).map(Vec::as_slice).unwrap_or_default();
        of_source.iter().filter(|route| route.takes(kind)).map(|route| route.name.clone()).collect()
    }

    /// Whether a route of that source, or one that follows it, looks at the entity of events.
    pub fn look_at_entities(&self, source: &SourceName) -> bool {
        self.by_entity.contains(source)
    }

    /// The route of that name.
    pub fn get(&self, name: &str) -> Option<&Arc<Route>> {
        self.all.iter().find(|route| route.name.as_str() == name)
    }

    /// Every route, in the order of the configuration.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Route>> {
        self.all.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::delivery::HandedEvent;

    fn route(name: &str, source: &str, types: &[&str], after: Option<&str>) -> Route {
        let nothing = |_: &rusqlite::Connection, _: &HandedEvent| Ok::<_, Failure>(None);
        let mut route = Route::new(
            RouteName::new(name).unwrap(),
            SourceName::new(source).unwrap(),
            Handler::Function(Arc::new(nothing)),
        );
        route.types = types.iter().map(|glob| Glob::new(glob)).collect();
        route.after = after.map(|name| RouteName::new(name).unwrap());
        route
    }

    #[test]
    fn events_find_the_routes_that_want_them() {
        let routes = Routes::new(vec![
            route("paid", "shop", &["order.paid", "invoice.*"], None),
            route("all", "shop", &[], None),
            route("other", "bank", &["order.paid"], None),
            route("mail", "ignored", &[], Some("paid")),
        ])
        .unwrap();
        let wanting = |source: &str, kind: Option<&str>| {
            let names = routes.wanting(&SourceName::new(source).unwrap(), kind);
            names.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(wanting("shop", Some("order.paid")), ["paid", "all"]);
        assert_eq!(wanting("shop", Some("order.lost")), ["all"]);
        assert_eq!(wanting("shop", None), ["all"]);
        assert_eq!(wanting("bank", Some("order.paid")), ["other"]);
        assert_eq!(routes.get("paid").unwrap().followups, [RouteName::new("mail").unwrap()]);
        assert_eq!(routes.get("mail").unwrap().source.as_str(), "shop");
    }

    #[test]
    fn routes_that_do_not_fit_are_refused() {
        let error = |routes| Routes::new(routes).unwrap_err().to_string();
        assert!(error(vec![route("a", "s", &[], None), route("a", "s", &[], None)]).contains("two routes"));
        assert!(error(vec![route("a", "s", &[], Some("b"))]).contains("does not exist"));
        let circle = vec![route("a", "s", &[], Some("b")), route("b", "s", &[], Some("a"))];
        assert!(error(circle).contains("after itself"));
    }
}
