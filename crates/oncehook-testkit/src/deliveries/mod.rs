//! What every journal promises workers and operators. A backend passes [`exercise_deliveries`] whole, and its random
//! histories ([`compare_deliveries`]) end as in the reference.
//!
//! Does not: run `sql` and `function` handlers. Those need a database, so each backend that has one proves them itself.

mod claims;
mod forgetting;
mod history;
mod leases;
mod ordering;
mod orders;

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use oncehook::delivery::{
    Cause, Claim, DeliveryId, DeliveryState, Failure, Fence, HandedEvent, RouteName, Settled, Settlement, Verdict,
};
use oncehook::event::{EventId, NewEvent, SourceName};
use oncehook::handler::Handler;
use oncehook::journal::{
    Deliveries, Delivery, EventDetail, Journal, JournalReader, Order, Pausable, Pause, Paused, Standing, Verb, Who,
};
use oncehook::retry::RetryPolicy;
use oncehook::route::Route;
use oncehook_verify::UnixMicros;

pub use history::compare_deliveries;
pub use ordering::exercise_ordering;

use crate::journal::{Case, NOW, Subject, append_one, event, run};

/// All that a journal can do.
pub trait WholeJournal: Journal + JournalReader + Deliveries {}

impl<J: Journal + JournalReader + Deliveries> WholeJournal for J {}

/// Runs every behaviour, each on a journal of its own.
pub async fn exercise_deliveries<J: WholeJournal>(subject: &Subject<J>) {
    claims::exercise(subject).await;
    leases::exercise(subject).await;
    orders::exercise(subject).await;
    forgetting::exercise(subject).await;
    run(subject, pauses_are_remembered_until_they_are_lifted).await;
    run(subject, the_backlog_adds_up).await;
    run(subject, whoever_waits_is_told_how_deliveries_stand).await;
    run(subject, changes_wake_and_looking_does_not).await;
    run(subject, a_closed_journal_takes_no_work).await;
    if subject.survives {
        work_goes_on_after_reopening(subject).await;
    }
}

/// How long a lease lasts in these tests.
const LEASE: Duration = Duration::from_secs(15);

/// Three attempts with a back-off of up to ten seconds.
const RETRY: RetryPolicy = RetryPolicy { max_attempts: 3, base: Duration::from_secs(10), cap: Duration::from_secs(60) };

fn named(name: &str) -> RouteName {
    RouteName::new(name).unwrap()
}

/// A route of source `shop`. Nothing here runs its handler.
fn route(name: &str) -> Arc<Route> {
    let never = |_: &rusqlite::Connection, _: &HandedEvent| panic!("the suite runs no handlers");
    let shop = SourceName::new("shop").unwrap();
    let route = Route::new(named(name), shop, Handler::Function(Arc::new(never)));
    Arc::new(Route { retry: RETRY, ..route })
}

/// A route that follows another.
fn route_after(name: &str, before: &str) -> Arc<Route> {
    Arc::new(Route { after: Some(named(before)), ..Route::clone(&route(name)) })
}

async fn whoever_waits_is_told_how_deliveries_stand<J: WholeJournal>(case: Case<J>) {
    let journal = &*case.journal;
    let event = append_one(journal, routed("evt_1", &["a", "b", "c", "d"])).await.id;
    let settle = async |name: &str, verdict: Verdict| {
        let claims = journal.claim(route(name), 1, LEASE).await.unwrap();
        journal.settle(vec![settlement(&claims[0].fence, verdict)]).await.unwrap();
    };
    settle("a", Verdict::Succeeded(Some("{ \"id\": 7 }".to_owned()))).await;
    settle("b", dead("no such table")).await;
    settle("c", Verdict::RetryAt(at(60), failed("not now"))).await;
    let id = |name: &str, epoch| DeliveryId { event, route: named(name), epoch };
    let strange = DeliveryId { event: EventId::from_bytes([7; 16]), ..id("a", 0) };
    let asked = vec![id("d", 0), strange, id("b", 0), id("a", 1), id("a", 0), id("e", 0), id("c", 0)];
    let told = journal.standings(asked).await.unwrap();
    let standing = |state, result: Option<&str>, error: Option<&str>, cause: Option<&str>| {
        let owned = |text: Option<&str>| text.map(str::to_owned);
        Some(Standing { state, result: owned(result), error: owned(error), cause: owned(cause) })
    };
    let expected = [
        standing(DeliveryState::Ready, None, None, None),
        None,
        standing(DeliveryState::Dead, None, Some("no such table"), Some("handler")),
        None,
        standing(DeliveryState::Succeeded, Some("{ \"id\": 7 }"), None, None),
        None,
    ];
    assert_eq!(told[..6], expected, "in the order of the question, byte for byte");
    let retrying = told[6].as_ref().unwrap();
    assert_eq!((retrying.state, retrying.error.as_deref()), (DeliveryState::Retrying, Some("not now")));
    assert_eq!(journal.standings(Vec::new()).await.unwrap(), []);
}

/// An event that these routes want.
fn routed(key: &str, routes: &[&str]) -> NewEvent {
    NewEvent { routes: routes.iter().map(|name| named(name)).collect(), ..event(key, "{}") }
}

fn succeeded() -> Verdict {
    Verdict::Succeeded(None)
}

fn failed(message: impl Into<Cow<'static, str>>) -> Failure {
    Failure::retry(Cause::Destination, message)
}

fn dead(message: impl Into<Cow<'static, str>>) -> Verdict {
    Verdict::Dead(Failure::permanent(Cause::Handler, message))
}

fn settlement(fence: &Fence, verdict: Verdict) -> Settlement {
    Settlement { fence: fence.clone(), verdict, followups: Vec::new() }
}

/// An order by an operator who gives a reason.
fn order(event: EventId, verb: Verb) -> Order {
    let who = Who { name: "ada".to_owned(), reason: Some("incident 7".to_owned()) };
    Order { event, verb, route: None, who, wanting: Vec::new(), attempts: 5 }
}

/// The same order with routes that want the event.
fn order_for(event: EventId, verb: Verb, wanting: &[&str]) -> Order {
    Order { wanting: wanting.iter().map(|name| named(name)).collect(), ..order(event, verb) }
}

fn at(seconds: i64) -> UnixMicros {
    UnixMicros(NOW.0 + seconds * 1_000_000)
}

impl<J: WholeJournal> Case<J> {
    async fn append(&self, event: NewEvent) -> EventId {
        append_one(&*self.journal, event).await.id
    }

    /// Moves the clock to that many seconds after the start.
    fn set_clock(&self, seconds: i64) {
        self.clock.set(at(seconds));
    }

    async fn claim(&self, route: &Arc<Route>) -> Vec<Claim> {
        self.journal.claim(Arc::clone(route), 1_000, LEASE).await.unwrap()
    }

    /// The fence of the one delivery that is due.
    async fn claim_one(&self, route: &Arc<Route>) -> Fence {
        let claims = self.claim(route).await;
        assert_eq!(claims.len(), 1);
        claims[0].fence.clone()
    }

    async fn settle(&self, fence: &Fence, verdict: Verdict) -> Settled {
        let settled = self.journal.settle(vec![settlement(fence, verdict)]).await.unwrap();
        assert_eq!(settled.len(), 1);
        settled[0]
    }

    /// Claims the one delivery that is due and settles it.
    async fn run_one(&self, route: &Arc<Route>, verdict: Verdict) {
        let fence = self.claim_one(route).await;
        assert_eq!(self.settle(&fence, verdict).await, Settled::Done);
    }

    async fn story(&self, event: EventId) -> EventDetail {
        self.journal.show(event).await.unwrap().unwrap()
    }

    async fn delivery(&self, event: EventId, route: &str, epoch: u32) -> Delivery {
        let deliveries = self.story(event).await.event.deliveries;
        deliveries.into_iter().find(|found| found.route == route && found.epoch == epoch).unwrap()
    }

    /// `route/epoch state` of every delivery.
    async fn states(&self, event: EventId) -> Vec<String> {
        let deliveries = self.story(event).await.event.deliveries;
        deliveries.iter().map(|found| format!("{}/{} {}", found.route, found.epoch, found.state)).collect()
    }

    /// An operator says that the clock is right.
    async fn trust_clock(&self) {
        let who = Who { name: "ada".to_owned(), reason: Some("it is".to_owned()) };
        self.journal.trust_clock(who).await.unwrap();
    }

    async fn pause(&self, what: Pausable, paused: bool) {
        let who = Who { name: "ada".to_owned(), reason: None };
        self.journal.set_paused(Pause { what, paused }, who).await.unwrap();
    }
}

async fn pauses_are_remembered_until_they_are_lifted<J: WholeJournal>(case: Case<J>) {
    let source = Pausable::Source("shop".to_owned());
    let orders = Pausable::Route("orders".to_owned());
    // A source and a route may have the same name.
    let namesake = Pausable::Route("shop".to_owned());
    assert_eq!(case.journal.paused().await.unwrap(), []);
    for what in [&source, &namesake, &orders, &orders] {
        case.pause(what.clone(), true).await;
    }
    assert_eq!(case.journal.paused().await.unwrap(), [orders.clone(), namesake.clone(), source.clone()]);
    case.pause(namesake, false).await;
    case.pause(Pausable::Route("never-paused".to_owned()), false).await;
    assert_eq!(case.journal.paused().await.unwrap(), [orders.clone(), source]);
    // Since when and by whom: who pauses it once more does not change that.
    case.pause(orders.clone(), false).await;
    for (second, name, reason) in [(7, "ada", Some("the shop moves")), (9, "bob", None)] {
        case.set_clock(second);
        let who = Who { name: name.to_owned(), reason: reason.map(str::to_owned) };
        case.journal.set_paused(Pause { what: orders.clone(), paused: true }, who).await.unwrap();
    }
    let pauses = case.journal.pauses().await.unwrap();
    let Some(Paused { what, since, who, reason }) = pauses.first() else { panic!("{pauses:?}") };
    assert_eq!((pauses.len(), what, *since), (2, &orders, at(7)));
    assert_eq!((who.as_deref(), reason.as_deref()), (Some("ada"), Some("the shop moves")));
    // Accepting goes on.
    case.append(routed("evt_1", &["orders"])).await;
}

async fn the_backlog_adds_up<J: WholeJournal>(case: Case<J>) {
    assert_eq!(case.journal.backlog().await.unwrap(), []);
    let orders = route("orders");
    for number in 0..6 {
        case.set_clock(number);
        case.append(routed(&format!("evt_{number}"), &["orders", "mail"])).await;
    }
    let claims = case.journal.claim(Arc::clone(&orders), 4, LEASE).await.unwrap();
    assert_eq!(case.settle(&claims[0].fence, succeeded()).await, Settled::Done);
    assert_eq!(case.settle(&claims[1].fence, dead("no")).await, Settled::Done);
    assert_eq!(case.settle(&claims[2].fence, Verdict::RetryAt(at(60), failed("busy"))).await, Settled::Done);
    let backlog = case.journal.backlog().await.unwrap();
    let counts: Vec<_> = backlog
        .iter()
        .map(|route| (route.route.as_str(), route.waiting, route.running, route.dead, route.oldest))
        .collect();
    assert_eq!(counts, [("mail", 6, 0, 0, Some(at(0))), ("orders", 3, 1, 1, Some(at(4)))]);
    assert_eq!(case.journal.next_due(named("orders")).await.unwrap(), Some(at(4)));
    assert_eq!(case.journal.next_due(named("mail")).await.unwrap(), Some(at(0)));
    assert_eq!(case.journal.next_due(named("nothing")).await.unwrap(), None);
    // What is done is no backlog.
    let mail = case.claim(&route("mail")).await;
    assert_eq!(case.journal.next_due(named("mail")).await.unwrap(), None);
    let settlements = mail.iter().map(|claim| settlement(&claim.fence, succeeded())).collect();
    assert_eq!(case.journal.settle(settlements).await.unwrap(), [Settled::Done; 6]);
    let left = case.journal.backlog().await.unwrap();
    assert_eq!(left.iter().map(|route| route.route.as_str()).collect::<Vec<_>>(), ["orders"]);
}

async fn changes_wake_and_looking_does_not<J: WholeJournal>(case: Case<J>) {
    let orders = route("orders");
    let mut changes = case.journal.changes();
    let woken = async |changes: &mut tokio::sync::watch::Receiver<u64>, by: &str| {
        let change = tokio::time::timeout(Duration::from_secs(10), changes.changed()).await;
        assert!(matches!(change, Ok(Ok(()))), "nobody was told of {by}");
        changes.mark_unchanged();
    };
    let event = case.append(routed("evt_1", &["orders"])).await;
    woken(&mut changes, "an append").await;
    let fence = case.claim_one(&orders).await;
    case.journal.renew(vec![fence.clone()], LEASE).await.unwrap();
    assert_eq!(case.claim(&orders).await.len(), 0);
    assert_eq!(case.journal.reclaim(Arc::clone(&orders)).await.unwrap(), 0);
    case.journal.next_due(named("orders")).await.unwrap();
    case.journal.backlog().await.unwrap();
    assert!(!changes.has_changed().unwrap(), "a worker that looks for work wakes itself");
    case.journal.give_back(vec![fence]).await.unwrap();
    woken(&mut changes, "a lease given back").await;
    case.claim_one(&orders).await;
    case.set_clock(15);
    assert_eq!(case.journal.reclaim(Arc::clone(&orders)).await.unwrap(), 1);
    woken(&mut changes, "a lease taken away").await;
    case.set_clock(60);
    let fence = case.claim_one(&orders).await;
    let done = Settlement { fence, verdict: succeeded(), followups: vec![named("mail")] };
    case.journal.settle(vec![done]).await.unwrap();
    woken(&mut changes, "a follow-up").await;
    case.journal.order(order_for(event, Verb::Replay, &["orders", "late"])).await.unwrap();
    woken(&mut changes, "an order").await;
    case.pause(Pausable::Route("orders".to_owned()), false).await;
    woken(&mut changes, "a resumed route").await;
}

async fn a_closed_journal_takes_no_work<J: WholeJournal>(case: Case<J>) {
    let orders = route("orders");
    let event = case.append(routed("evt_1", &["orders"])).await;
    let fence = case.claim_one(&orders).await;
    case.journal.close().await;
    assert!(case.journal.claim(Arc::clone(&orders), 1, LEASE).await.is_err());
    assert!(case.journal.settle(vec![settlement(&fence, succeeded())]).await.is_err());
    assert!(case.journal.order(order(event, Verb::Skip)).await.is_err());
    drop(case.directory);
}

/// What waits, what was leased and what is paused is there after closing and opening again (R48).
async fn work_goes_on_after_reopening<J: WholeJournal>(subject: &Subject<J>) {
    let (orders, mail) = (route("orders"), route("mail"));
    let directory = tempfile::tempdir().unwrap();
    let open = |directory: tempfile::TempDir, clock: &oncehook::clock::Clock| {
        let journal = (subject.open)(directory.path(), clock.clone());
        Case { journal, clock: clock.clone(), directory }
    };
    let clock = oncehook::clock::Clock::manual(NOW);
    let case = open(directory, &clock);
    let first = case.append(routed("evt_1", &["orders", "mail"])).await;
    let zombie = case.claim_one(&orders).await;
    case.run_one(&mail, Verdict::RetryAt(at(40), failed("busy"))).await;
    case.pause(Pausable::Source("shop".to_owned()), true).await;
    let before = case.story(first).await;
    case.journal.close().await;
    let Case { journal, directory, .. } = case;
    drop(journal);

    let case = open(directory, &clock);
    assert_eq!(case.journal.paused().await.unwrap(), [Pausable::Source("shop".to_owned())]);
    assert_eq!(case.delivery(first, "mail", 0).await, before.event.deliveries[0]);
    // Long enough for the lease and for the back-off.
    case.set_clock(40);
    case.journal.reclaim(Arc::clone(&orders)).await.unwrap();
    case.set_clock(60);
    let fence = case.claim_one(&orders).await;
    assert_eq!(fence.attempt, 2);
    assert_eq!(case.settle(&zombie, succeeded()).await, Settled::Lost);
    assert_eq!(case.settle(&fence, succeeded()).await, Settled::Done);
    case.run_one(&mail, succeeded()).await;
    assert_eq!(case.states(first).await, ["mail/0 succeeded", "orders/0 succeeded"]);
    case.journal.close().await;
}
