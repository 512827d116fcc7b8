//! What the tests of lists have in common: a mixed history, and filters that look for all that is in it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use oncehook::delivery::{Cause, Failure, RouteName, Settlement, Verdict};
use oncehook::event::{EventId, NewEvent, SourceName};
use oncehook::handler::{Dialect, Handler, SqlHandler};
use oncehook::journal::{Deliveries, EventQuery, EventStatus, JournalReader, Order, Verb, Who};
use oncehook::route::Route;
use oncehook_testkit::deliveries::WholeJournal;
use oncehook_testkit::journal::{NOW, append, event};
use oncehook_verify::{Quarantine, UnixMicros};

pub(crate) fn second(number: i64) -> UnixMicros {
    UnixMicros(NOW.0 + number * 1_000_000)
}

/// Sources, types, entities, routes and states, mixed.
pub(crate) fn mixed(number: i64) -> NewEvent {
    let source = ["shop", "bank", "mail"][(number % 3) as usize];
    let routes: &[&str] = if number % 4 == 0 { &[] } else { &["orders"] };
    NewEvent {
        source: SourceName::new(source).unwrap(),
        kind: (number % 7 != 0).then(|| format!("type-{}", number % 5)),
        entity: (number % 6 != 0).then(|| format!("entity-{}", number % 40)),
        received_at: second(number),
        quarantine: (number % 29 == 0).then_some(Quarantine::AmbiguousJson),
        routes: routes.iter().map(|route| RouteName::new(route).unwrap()).collect(),
        ..event(&format!("evt_{number}"), "{}")
    }
}

/// What the filters look for.
pub(crate) fn filters() -> Vec<EventQuery> {
    let text = |text: &str| Some(text.to_owned());
    let mut filters = vec![EventQuery::default()];
    for source in ["shop", "bank", "late", "nobody"] {
        filters.push(EventQuery { source: text(source), ..Default::default() });
    }
    for kind in ["type-0", "type-3", "late", "none"] {
        filters.push(EventQuery { kind: text(kind), ..Default::default() });
    }
    for entity in ["entity-1", "entity-39", "late", "none"] {
        filters.push(EventQuery { entity: text(entity), ..Default::default() });
    }
    for status in [
        EventStatus::Ready,
        EventStatus::Running,
        EventStatus::Retrying,
        EventStatus::Parked,
        EventStatus::Superseded,
        EventStatus::Skipped,
        EventStatus::Unrouted,
        EventStatus::Quarantined,
        EventStatus::Dead,
        EventStatus::Succeeded,
    ] {
        filters.push(EventQuery { status: Some(status), ..Default::default() });
        filters.push(EventQuery { status: Some(status), source: text("bank"), ..Default::default() });
    }
    filters.push(EventQuery { source: text("bank"), since: Some(second(50)), ..Default::default() });
    filters.push(EventQuery { entity: text("entity-7"), until: Some(second(99)), ..Default::default() });
    // One came when the clock had been set back: its id is of later.
    filters.push(EventQuery { until: Some(second(31)), ..Default::default() });
    filters.push(EventQuery { until: Some(second(99)), source: text("late"), ..Default::default() });
    filters.push(EventQuery { until: Some(second(99)), status: Some(EventStatus::Ready), ..Default::default() });
    filters
}

/// The keys that a query finds, page by page.
pub(crate) async fn keys(journal: &impl JournalReader, query: &EventQuery) -> Vec<String> {
    let mut found = Vec::new();
    let mut query = EventQuery { limit: 7, ..query.clone() };
    loop {
        let page = journal.list(query.clone()).await.unwrap();
        found.extend(page.events.iter().map(|event| format!("{:?}", event.key)));
        match page.next {
            Some(next) => query.after = Some(next),
            None => return found,
        }
    }
}

async fn order(journal: &impl Deliveries, verb: Verb, event: EventId) {
    let who = Who { name: "test".to_owned(), reason: None };
    let order = Order { event, verb, route: None, wanting: Vec::new(), attempts: 1, who };
    journal.order(order).await.unwrap();
}

/// The route of the mixed history.
pub(crate) fn orders(dialect: Dialect) -> Arc<Route> {
    let handler = SqlHandler::new(&["SELECT 1"], &BTreeMap::new(), dialect).unwrap();
    let (name, source) = (RouteName::new("orders").unwrap(), SourceName::new("shop").unwrap());
    Arc::new(Route::new(name, source, Handler::Sql(Arc::new(handler))))
}

/// Has deliveries end in every way there is: of seven in a row each differs.
pub(crate) async fn work(journal: &impl Deliveries, route: Arc<Route>, many: usize) {
    let year = Duration::from_secs(365 * 86_400);
    let claims = journal.claim(route, many, year).await.unwrap();
    let mut revived = Vec::new();
    for (number, claim) in claims.into_iter().enumerate() {
        let failure = || Failure::permanent(Cause::Handler, "no");
        let later = UnixMicros(second(0).0 + 31_536_000_000_000);
        let verdict = match number % 7 {
            0 => Verdict::Dead(failure()),
            1 => Verdict::Parked(later, failure()),
            2 => Verdict::Superseded("a newer one took effect".to_owned()),
            3 => Verdict::RetryAt(later, failure()),
            4 => Verdict::Succeeded(None),
            5 => {
                revived.push(claim.event.id);
                Verdict::Dead(failure())
            }
            // Still running.
            _ => continue,
        };
        let settlement = Settlement { fence: claim.fence, verdict, followups: Vec::new() };
        journal.settle(vec![settlement]).await.unwrap();
    }
    for (number, event) in revived.into_iter().enumerate() {
        order(journal, if number % 2 == 0 { Verb::Retry } else { Verb::Skip }, event).await;
    }
}

pub(crate) async fn fill(journal: &impl WholeJournal) {
    for number in 1..=200 {
        let id = append(journal, [mixed(number)]).await[0].id;
        if number % 11 == 0 && number % 4 != 0 && number % 29 != 0 {
            order(journal, Verb::Skip, id).await;
        }
    }
    let back = NewEvent { received_at: second(30), ..mixed(201) };
    append(journal, [back]).await;
}
