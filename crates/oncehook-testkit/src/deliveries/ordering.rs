//! Order within an entity: one at a time, in the order of the line; older ones superseded; parked ones woken; misfits put off.

use std::sync::Arc;
use std::time::Duration;

use oncehook::delivery::{Failure, Settled, Verdict};
use oncehook::event::{EventId, NewEvent};
use oncehook::journal::{Retention, Verb};
use oncehook::machine::{Machine, Misfit, Transition};
use oncehook::ordering::{OnDead, Ordering, Parking};
use oncehook::route::Route;
use oncehook_verify::UnixMicros;

use super::{Case, WholeJournal, at, dead, failed, order, order_for, route, routed, succeeded};
use crate::journal::{Subject, append, run};

/// Runs every behaviour, each on a journal of its own.
pub async fn exercise_ordering<J: WholeJournal>(subject: &Subject<J>) {
    run(subject, one_at_a_time_in_the_order_of_arrival).await;
    run(subject, the_providers_sequence_comes_before_arrival).await;
    run(subject, a_crowd_of_one_entity_stands_in_nobodys_way).await;
    run(subject, a_failing_head_holds_its_own_line_only).await;
    run(subject, a_dead_head_waits_for_an_operator).await;
    run(subject, a_dead_head_may_be_passed).await;
    run(subject, a_lost_lease_keeps_the_line).await;
    run(subject, what_is_given_back_is_next).await;
    run(subject, a_skipped_one_in_the_middle_is_passed).await;
    run(subject, a_line_is_freed_when_its_route_has_no_order_any_more).await;
    run(subject, a_crowd_hides_no_line_whose_head_was_forgotten).await;
    run(subject, older_events_are_superseded).await;
    run(subject, equal_and_unknown_versions_go_on).await;
    run(subject, parked_ones_are_woken_by_their_entity).await;
    run(subject, parked_ones_look_again_and_die_in_the_end).await;
    run(subject, a_parked_one_holds_up_nobody).await;
    run(subject, a_machine_lets_only_fitting_events_run).await;
    run(subject, misfits_can_be_superseded_or_dead).await;
}

fn with(ordering: Ordering) -> Arc<Route> {
    Arc::new(Route { ordering, ..Route::clone(&route("orders")) })
}

fn ordered() -> Arc<Route> {
    with(Ordering { by_entity: true, ..Ordering::default() })
}

/// An event about an entity.
fn about(key: &str, entity: &str) -> NewEvent {
    NewEvent { entity: Some(entity.to_owned()), by_entity: true, ..routed(key, &["orders"]) }
}

fn version(key: &str, entity: &str, version: i64) -> NewEvent {
    NewEvent { version: Some(version), ..about(key, entity) }
}

fn of_type(key: &str, entity: &str, kind: &str) -> NewEvent {
    NewEvent { kind: Some(kind.to_owned()), ..about(key, entity) }
}

impl<J: WholeJournal> Case<J> {
    /// Claims all that may run and returns the keys.
    async fn keys(&self, route: &Arc<Route>) -> Vec<String> {
        let mut keys: Vec<String> = self
            .claim(route)
            .await
            .iter()
            .map(|claim| String::from_utf8_lossy(claim.event.key.as_bytes()).into_owned())
            .collect();
        keys.sort();
        keys
    }

    /// Runs all that may run to a success, until nothing is left, and returns the keys in the order they ran.
    async fn run_out(&self, route: &Arc<Route>) -> Vec<String> {
        let mut ran = Vec::new();
        loop {
            let claims = self.claim(route).await;
            if claims.is_empty() {
                return ran;
            }
            for claim in claims {
                ran.push(String::from_utf8_lossy(claim.event.key.as_bytes()).into_owned());
                assert_eq!(self.settle(&claim.fence, succeeded()).await, Settled::Done);
            }
        }
    }

    async fn state(&self, event: EventId) -> String {
        self.delivery(event, "orders", 0).await.state
    }
}

async fn one_at_a_time_in_the_order_of_arrival<J: WholeJournal>(case: Case<J>) {
    let route = ordered();
    for key in ["a1", "b1", "a2", "a3", "b2"] {
        case.append(about(key, &key[..1])).await;
    }
    let last = case.append(NewEvent { entity: None, ..about("x1", "x") }).await;
    case.append(NewEvent { entity: None, ..about("x2", "x") }).await;
    // One of each entity; what has none is in nobody's line.
    let claims = case.claim(&route).await;
    let keys: Vec<_> = claims.iter().map(|claim| claim.event.key.as_bytes().to_vec()).collect();
    assert_eq!(keys, [b"a1", b"b1", b"x1", b"x2"]);
    assert_eq!(case.claim(&route).await.len(), 0);
    assert_eq!(case.delivery(last, "orders", 0).await.blocked_at, None);
    let backlog = case.journal.backlog().await.unwrap();
    assert_eq!((backlog[0].waiting, backlog[0].blocked, backlog[0].blocked_since), (3, 3, Some(at(0))));
    assert_eq!(case.journal.next_due(super::named("orders")).await.unwrap(), None);
    assert_eq!(case.settle(&claims[0].fence, succeeded()).await, Settled::Done);
    assert_eq!(case.keys(&route).await, ["a2"]);
    assert_eq!(case.settle(&claims[1].fence, succeeded()).await, Settled::Done);
    assert_eq!(case.keys(&route).await, ["b2"]);
    assert_eq!(case.claim(&route).await.len(), 0);
}

async fn the_providers_sequence_comes_before_arrival<J: WholeJournal>(case: Case<J>) {
    let route = ordered();
    for (key, number) in [("e4", 4), ("e2", 2), ("e3", 3)] {
        case.append(version(key, "e", number)).await;
    }
    case.append(about("e0", "e")).await;
    let first = case.claim(&route).await;
    assert_eq!(first[0].event.key.as_bytes(), b"e0", "what has no version comes first");
    assert_eq!(first[0].event.version, None);
    // A lower one that comes late does not overtake what runs, and is next.
    case.append(version("e1", "e", 1)).await;
    assert_eq!(case.claim(&route).await.len(), 0);
    assert_eq!(case.settle(&first[0].fence, succeeded()).await, Settled::Done);
    assert_eq!(case.run_out(&route).await, ["e1", "e2", "e3", "e4"]);
}

/// Fault 53.
async fn a_crowd_of_one_entity_stands_in_nobodys_way<J: WholeJournal>(case: Case<J>) {
    let route = ordered();
    append(&*case.journal, (0..600).map(|number| about(&format!("hot{number:03}"), "hot"))).await;
    case.append(about("cold", "cold")).await;
    let mut keys = Vec::new();
    for _ in 0..4 {
        let claims = case.journal.claim(Arc::clone(&route), 2, super::LEASE).await.unwrap();
        keys.extend(claims.iter().map(|claim| claim.event.key.as_bytes().to_vec()));
    }
    assert_eq!(keys, [b"hot000".to_vec(), b"cold".to_vec()]);
    // And nobody looks at the crowd any more.
    assert_eq!(case.journal.next_due(super::named("orders")).await.unwrap(), None);
    assert_eq!(case.journal.backlog().await.unwrap()[0].blocked, 599);
}

async fn a_failing_head_holds_its_own_line_only<J: WholeJournal>(case: Case<J>) {
    let route = ordered();
    let head = case.append(about("a1", "a")).await;
    let next = case.append(about("a2", "a")).await;
    case.append(about("b1", "b")).await;
    let claims = case.claim(&route).await;
    assert_eq!(claims.len(), 2);
    let again = Verdict::RetryAt(at(30), failed("busy"));
    assert_eq!(case.settle(&claims[0].fence, again).await, Settled::Done);
    assert_eq!(case.settle(&claims[1].fence, succeeded()).await, Settled::Done);
    case.set_clock(20);
    assert_eq!(case.claim(&route).await.len(), 0);
    assert_eq!((case.state(head).await.as_str(), case.state(next).await.as_str()), ("retrying", "ready"));
    assert_eq!(case.delivery(next, "orders", 0).await.blocked_at, Some(at(0)));
    case.set_clock(30);
    assert_eq!(case.run_out(&route).await, ["a1", "a2"]);
    assert_eq!(case.delivery(next, "orders", 0).await.blocked_at, None);
}

async fn a_dead_head_waits_for_an_operator<J: WholeJournal>(case: Case<J>) {
    let route = ordered();
    let mut heads = Vec::new();
    for entity in ["a", "b"] {
        heads.push(case.append(about(&format!("{entity}1"), entity)).await);
        case.append(about(&format!("{entity}2"), entity)).await;
    }
    for claim in case.claim(&route).await {
        assert_eq!(case.settle(&claim.fence, dead("no")).await, Settled::Done);
    }
    assert_eq!(case.claim(&route).await.len(), 0);
    case.set_clock(3_600);
    case.journal.reclaim(Arc::clone(&route)).await.unwrap();
    assert_eq!(case.claim(&route).await.len(), 0);
    case.journal.order(order(heads[0], Verb::Skip)).await.unwrap();
    assert_eq!(case.run_out(&route).await, ["a2"]);
    case.journal.order(order(heads[1], Verb::Retry)).await.unwrap();
    assert_eq!(case.run_out(&route).await, ["b1", "b2"]);
    let story = case.story(heads[0]).await;
    assert_eq!(story.audit.iter().map(|entry| entry.action.as_str()).collect::<Vec<_>>(), ["skip"]);
}

async fn a_dead_head_may_be_passed<J: WholeJournal>(case: Case<J>) {
    let route = with(Ordering { by_entity: true, on_dead: OnDead::Continue, ..Ordering::default() });
    let head = case.append(about("a1", "a")).await;
    case.append(about("a2", "a")).await;
    let claims = case.claim(&route).await;
    assert_eq!((claims.len(), case.claim(&route).await.len()), (1, 0));
    assert_eq!(case.settle(&claims[0].fence, dead("no")).await, Settled::Done);
    assert_eq!(case.run_out(&route).await, ["a2"]);
    // What is revived has its place, not its time.
    case.append(about("a3", "a")).await;
    case.journal.order(order(head, Verb::Retry)).await.unwrap();
    assert_eq!(case.run_out(&route).await, ["a1", "a3"]);
}

async fn a_lost_lease_keeps_the_line<J: WholeJournal>(case: Case<J>) {
    let route = ordered();
    case.append(about("a1", "a")).await;
    case.append(about("a2", "a")).await;
    let zombie = case.claim_one(&route).await;
    case.set_clock(15);
    // Nobody has taken the lease away yet.
    assert_eq!(case.claim(&route).await.len(), 0);
    assert_eq!(case.journal.reclaim(Arc::clone(&route)).await.unwrap(), 1);
    case.set_clock(40);
    let again = case.claim_one(&route).await;
    assert_eq!((again.delivery.event, again.attempt), (zombie.delivery.event, 2));
    assert_eq!(case.settle(&zombie, succeeded()).await, Settled::Lost);
    assert_eq!(case.claim(&route).await.len(), 0, "a zombie lets nobody go on");
    assert_eq!(case.settle(&again, succeeded()).await, Settled::Done);
    assert_eq!(case.run_out(&route).await, ["a2"]);
}

async fn what_is_given_back_is_next<J: WholeJournal>(case: Case<J>) {
    let route = ordered();
    case.append(about("a1", "a")).await;
    case.append(about("a2", "a")).await;
    let fence = case.claim_one(&route).await;
    assert_eq!(case.claim(&route).await.len(), 0);
    case.journal.give_back(vec![fence]).await.unwrap();
    assert_eq!(case.run_out(&route).await, ["a1", "a2"]);
}

async fn a_skipped_one_in_the_middle_is_passed<J: WholeJournal>(case: Case<J>) {
    let route = ordered();
    case.append(about("a1", "a")).await;
    let middle = case.append(about("a2", "a")).await;
    case.append(about("a3", "a")).await;
    let fence = case.claim_one(&route).await;
    case.journal.order(order(middle, Verb::Skip)).await.unwrap();
    assert_eq!(case.claim(&route).await.len(), 0);
    assert_eq!(case.settle(&fence, succeeded()).await, Settled::Done);
    assert_eq!(case.run_out(&route).await, ["a3"]);
    assert_eq!(case.state(middle).await, "skipped");
    // What is forced to run again has its place in the line too.
    case.append(about("a4", "a")).await;
    let fence = case.claim_one(&route).await;
    case.journal.order(order_for(middle, Verb::ForceReplay { epoch: 1 }, &["orders"])).await.unwrap();
    assert_eq!(case.claim(&route).await.len(), 0);
    assert_eq!(case.settle(&fence, succeeded()).await, Settled::Done);
    assert_eq!(case.run_out(&route).await, ["a2"]);
}

async fn a_line_is_freed_when_its_route_has_no_order_any_more<J: WholeJournal>(case: Case<J>) {
    for key in ["a1", "a2", "a3"] {
        case.append(about(key, "a")).await;
    }
    let fence = case.claim_one(&ordered()).await;
    assert_eq!(case.claim(&ordered()).await.len(), 0);
    let free = route("orders");
    case.journal.reclaim(Arc::clone(&free)).await.unwrap();
    assert_eq!(case.keys(&free).await, ["a2", "a3"]);
    assert_eq!(case.settle(&fence, succeeded()).await, Settled::Done);
}

fn newer_only() -> Arc<Route> {
    with(Ordering { newer_only: true, ..Ordering::default() })
}

async fn a_crowd_hides_no_line_whose_head_was_forgotten<J: WholeJournal>(case: Case<J>) {
    let route = ordered();
    case.append(about("hot", "hot")).await;
    case.run_one(&route, Verdict::RetryAt(at(1_000_000), failed("later"))).await;
    append(&*case.journal, (0..1_100).map(|number| about(&format!("hot{number:04}"), "hot"))).await;
    while case.journal.backlog().await.unwrap()[0].blocked < 1_100 {
        assert_eq!(case.claim(&route).await.len(), 0);
    }
    case.set_clock(10);
    case.append(about("cold1", "cold")).await;
    case.run_one(&route, dead("no")).await;
    case.append(about("cold2", "cold")).await;
    assert_eq!(case.claim(&route).await.len(), 0, "the dead one is before it");
    case.set_clock(5_000);
    let age = Duration::from_secs(100);
    let retention = Retention { payload: age, dead: Some(age), audit: age, batch: 100 };
    let mut forgotten = 0;
    loop {
        let batch = case.journal.forget(retention).await.unwrap();
        forgotten += batch.events;
        if !batch.more {
            break;
        }
    }
    assert_eq!(forgotten, 1);
    case.journal.reclaim(Arc::clone(&route)).await.unwrap();
    assert_eq!(case.keys(&route).await, ["cold2"]);
}

async fn older_events_are_superseded<J: WholeJournal>(case: Case<J>) {
    let route = newer_only();
    case.append(version("v5", "e", 5)).await;
    assert_eq!(case.run_out(&route).await, ["v5"]);
    let old = case.append(version("v3", "e", 3)).await;
    let other = case.append(version("other", "f", 1)).await;
    case.append(version("v6", "e", 6)).await;
    let mut ran = case.run_out(&route).await;
    ran.sort();
    assert_eq!(ran, ["other", "v6"]);
    assert_eq!((case.state(old).await.as_str(), case.state(other).await.as_str()), ("superseded", "succeeded"));
    let delivery = case.delivery(old, "orders", 0).await;
    assert_eq!((delivery.attempt, delivery.attempts.len(), delivery.settled_at), (0, 0, Some(at(0))));
    assert!(delivery.error.is_some_and(|why| why.contains("version 5")));
    // Fault 56: an old one that is run again goes by the same rule.
    case.journal.order(order_for(old, Verb::ForceReplay { epoch: 1 }, &["orders"])).await.unwrap();
    assert_eq!(case.run_out(&route).await, [""; 0]);
    assert_eq!(case.delivery(old, "orders", 1).await.state, "superseded");
    // By time where there is no version; and those that are due together are taken in order, not thrown away.
    let timed = |key: &str, second: i64| NewEvent { occurred_at: Some(at(second)), ..about(key, "t") };
    case.append(timed("t20", 20)).await;
    assert_eq!(case.run_out(&route).await, ["t20"]);
    let late = case.append(timed("t10", 10)).await;
    case.append(timed("t30", 30)).await;
    assert_eq!(case.run_out(&route).await, ["t30"]);
    assert_eq!(case.state(late).await, "superseded");
}

/// Fault 52: nothing is dropped on equality, or because nobody knows.
async fn equal_and_unknown_versions_go_on<J: WholeJournal>(case: Case<J>) {
    let route = newer_only();
    let unknown = |key: &str| NewEvent { occurred_at: None, ..about(key, "e") };
    case.append(version("v5", "e", 5)).await;
    assert_eq!(case.run_out(&route).await, ["v5"]);
    case.append(version("again", "e", 5)).await;
    case.append(unknown("unknown")).await;
    let mut ran = case.run_out(&route).await;
    ran.sort();
    assert_eq!(ran, ["again", "unknown"]);
    // A failed one does not count as what took effect.
    let nine = case.append(version("v9", "e", 9)).await;
    let fence = case.claim_one(&route).await;
    case.append(version("v7", "e", 7)).await;
    assert_eq!(case.claim(&route).await.len(), 0, "one at a time");
    assert_eq!(case.settle(&fence, dead("no")).await, Settled::Done);
    assert_eq!(case.run_out(&route).await, ["v7"]);
    case.journal.order(order(nine, Verb::Retry)).await.unwrap();
    assert_eq!(case.run_out(&route).await, ["v9"]);
}

fn put_off(until: i64) -> Verdict {
    Verdict::Parked(at(until), Failure::defer("the order is not there yet"))
}

async fn parked_ones_are_woken_by_their_entity<J: WholeJournal>(case: Case<J>) {
    // Also across routes, and where no route looks at entities.
    let (orders, mail) = (route("orders"), route("mail"));
    let entity = |key: &str, route: &str| NewEvent { entity: Some("e".to_owned()), ..routed(key, &[route]) };
    let early = case.append(entity("early", "orders")).await;
    case.run_one(&orders, put_off(60)).await;
    let delivery = case.delivery(early, "orders", 0).await;
    assert_eq!((delivery.state.as_str(), delivery.parked_at, delivery.cause), ("parked", Some(at(0)), None));
    assert_eq!(delivery.error.as_deref(), Some("the order is not there yet"));
    assert_eq!(case.journal.backlog().await.unwrap()[0].waiting, 1);
    case.append(NewEvent { entity: Some("f".to_owned()), ..routed("other", &["mail"]) }).await;
    case.run_one(&mail, succeeded()).await;
    assert_eq!(case.claim(&orders).await.len(), 0, "another entity's success wakes nobody");
    case.append(entity("first", "mail")).await;
    case.run_one(&mail, succeeded()).await;
    case.set_clock(5);
    // Put off once more: it still waits since the first time, and no attempt is held against it.
    for round in 0..5 {
        let claims = case.claim(&orders).await;
        assert_eq!(claims.len(), 1, "round {round}");
        assert_eq!((claims[0].parked_at, claims[0].attempt_limit), (Some(at(0)), 4 + round));
        assert_eq!(case.settle(&claims[0].fence, put_off(60)).await, Settled::Done);
        case.append(entity(&format!("next{round}"), "mail")).await;
        case.run_one(&mail, succeeded()).await;
    }
    case.run_one(&orders, succeeded()).await;
    let delivery = case.delivery(early, "orders", 0).await;
    assert_eq!((delivery.state.as_str(), delivery.parked_at, delivery.error), ("succeeded", None, None));
}

async fn parked_ones_look_again_and_die_in_the_end<J: WholeJournal>(case: Case<J>) {
    let parking = Parking { longest: Duration::from_secs(100), every: Duration::from_secs(60) };
    let route = with(Ordering { parking, ..Ordering::default() });
    let event = case.append(about("early", "e")).await;
    let mut looks = Vec::new();
    for second in 0..120 {
        case.set_clock(second);
        case.journal.reclaim(Arc::clone(&route)).await.unwrap();
        for claim in case.claim(&route).await {
            looks.push(second);
            let tried = oncehook::route::Tried {
                attempt: claim.fence.attempt,
                limit: claim.attempt_limit,
                parked_at: claim.parked_at,
            };
            let verdict = route.after_failure(Failure::defer("not yet"), tried, at(second), 0.5);
            assert_eq!(case.settle(&claim.fence, verdict).await, Settled::Done);
        }
    }
    assert_eq!(looks, [0, 1, 2, 4, 8, 16, 32, 64, 100]);
    let delivery = case.delivery(event, "orders", 0).await;
    assert_eq!((delivery.state.as_str(), delivery.cause.as_deref()), ("dead", Some("prerequisite")));
    // An operator's retry begins anew.
    case.journal.order(order(event, Verb::Retry)).await.unwrap();
    let claims = case.claim(&route).await;
    assert_eq!(claims[0].parked_at, None);
}

async fn a_parked_one_holds_up_nobody<J: WholeJournal>(case: Case<J>) {
    let route = ordered();
    for key in ["a1", "a2", "a3"] {
        case.append(about(key, "a")).await;
    }
    let first = case.claim_one(&route).await;
    assert_eq!(case.claim(&route).await.len(), 0);
    assert_eq!(case.settle(&first, put_off(60)).await, Settled::Done);
    let second = case.claim_one(&route).await;
    assert_ne!(second.delivery.event, first.delivery.event);
    assert_eq!(case.settle(&second, succeeded()).await, Settled::Done);
    // Woken, and back at its place.
    assert_eq!(case.run_out(&route).await, ["a1", "a3"]);
}

fn machine(misfit: Misfit) -> Arc<Route> {
    let way = |on: &str, from: &str, to: &str| Transition {
        on: on.to_owned(),
        from: vec![from.to_owned()],
        to: to.to_owned(),
    };
    let ways = vec![
        way("created", "new", "pending"),
        way("processing", "pending", "processing"),
        way("completed", "processing", "completed"),
    ];
    let states = ["new", "pending", "processing", "completed"].map(str::to_owned).to_vec();
    let machine = Machine::new("payout", states, "new", ways, misfit).unwrap();
    with(Ordering { machine: Some(Arc::new(machine)), ..Ordering::default() })
}

async fn a_machine_lets_only_fitting_events_run<J: WholeJournal>(case: Case<J>) {
    let route = machine(Misfit::Park);
    let completed = case.append(of_type("completed", "p", "completed")).await;
    assert_eq!(case.claim(&route).await.len(), 0);
    assert_eq!(case.state(completed).await, "parked");
    let delivery = case.delivery(completed, "orders", 0).await;
    assert_eq!((delivery.attempt, delivery.attempts.len()), (0, 0));
    case.append(of_type("created", "p", "created")).await;
    let claims = case.claim(&route).await;
    assert_eq!((claims.len(), claims[0].event.state.as_deref()), (1, Some("pending")));
    // Failed, so nothing has moved.
    let again = Verdict::RetryAt(at(10), failed("busy"));
    assert_eq!(case.settle(&claims[0].fence, again).await, Settled::Done);
    let processing = case.append(of_type("processing", "p", "processing")).await;
    assert_eq!(case.claim(&route).await.len(), 0);
    assert_eq!(case.state(processing).await, "parked");
    case.set_clock(10);
    assert_eq!(case.run_out(&route).await, ["created", "processing", "completed"]);
    // Once: another of the same kind comes too late, whatever its key.
    let twice = case.append(of_type("completed2", "p", "completed")).await;
    assert_eq!(case.run_out(&route).await, [""; 0]);
    assert_eq!(case.state(twice).await, "superseded");
    // Every entity has its own state.
    case.append(of_type("q", "q", "created")).await;
    assert_eq!(case.run_out(&route).await, ["q"]);
}

async fn misfits_can_be_superseded_or_dead<J: WholeJournal>(case: Case<J>) {
    let early = case.append(of_type("early", "p", "completed")).await;
    assert_eq!(case.run_out(&machine(Misfit::Supersede)).await, [""; 0]);
    assert_eq!(case.state(early).await, "superseded");
    let early = case.append(of_type("early2", "p", "completed")).await;
    let strict = machine(Misfit::Dead);
    assert_eq!(case.run_out(&strict).await, [""; 0]);
    assert_eq!(strict.failures.noted(), 1, "it died without running, and that is reported to the log");
    let delivery = case.delivery(early, "orders", 0).await;
    assert_eq!((delivery.state.as_str(), delivery.cause.as_deref()), ("dead", Some("prerequisite")));
    assert_eq!(UnixMicros(delivery.run_at.0), at(0));
}
