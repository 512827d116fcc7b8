//! Claims and what they come to: who gets what, in which order, and what is written when an attempt ends.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use oncehook::delivery::{Cause, Settled, Settlement, Verdict};
use oncehook::event::NewEvent;
use oncehook::journal::{Attempt, EventQuery, EventStatus};
use oncehook_verify::Quarantine;

use super::*;

pub(super) async fn exercise<J: WholeJournal>(subject: &Subject<J>) {
    run(subject, events_come_with_their_deliveries).await;
    run(subject, a_claim_has_all_that_a_handler_needs).await;
    run(subject, what_is_due_first_comes_first).await;
    run(subject, nothing_is_claimed_twice).await;
    run(subject, every_attempt_is_kept).await;
    run(subject, success_keeps_the_result_and_clears_the_error).await;
    run(subject, the_dead_have_a_cause).await;
    run(subject, the_status_is_the_worst_of_the_deliveries).await;
    run(subject, followups_start_with_the_success_and_only_once).await;
    run(subject, settlements_are_answered_one_by_one).await;
}

async fn events_come_with_their_deliveries<J: WholeJournal>(case: Case<J>) {
    case.set_clock(7);
    let event = case.append(routed("evt_1", &["orders", "mail"])).await;
    let story = case.story(event).await.event;
    assert_eq!(story.status, EventStatus::Ready);
    let deliveries: Vec<_> = story
        .deliveries
        .iter()
        .map(|found| (found.route.as_str(), found.epoch, found.state.as_str(), found.attempt, found.run_at))
        .collect();
    assert_eq!(deliveries, [("mail", 0, "ready", 0, at(7)), ("orders", 0, "ready", 0, at(7))]);
    assert!(story.deliveries.iter().all(|found| found.attempts.is_empty() && found.settled_at.is_none()));

    // Neither a copy nor another body under the key makes further ones.
    case.append(routed("evt_1", &["orders", "more"])).await;
    case.append(NewEvent { routes: [named("more")].into_iter().collect(), ..event_with_body("evt_1", "{ }") }).await;
    assert_eq!(case.states(event).await, ["mail/0 ready", "orders/0 ready"]);

    // Nobody wants it; it is held.
    let unrouted = case.append(routed("evt_2", &[])).await;
    assert_eq!(case.story(unrouted).await.event.status, EventStatus::Unrouted);
    let held = NewEvent { quarantine: Some(Quarantine::AmbiguousJson), ..routed("evt_3", &["orders"]) };
    let held = case.append(held).await;
    assert_eq!(case.story(held).await.event.status, EventStatus::Quarantined);
    assert_eq!(case.states(held).await, [""; 0]);
    assert_eq!(case.claim(&route("orders")).await.len(), 1);
}

fn event_with_body(key: &str, body: &str) -> NewEvent {
    crate::journal::event(key, body)
}

async fn a_claim_has_all_that_a_handler_needs<J: WholeJournal>(case: Case<J>) {
    let new = NewEvent { kind: None, ..routed("evt_1", &["orders"]) };
    let event = case.append(new.clone()).await;
    let claims = case.claim(&route("orders")).await;
    let claim = &claims[0];
    assert_eq!((claim.fence.attempt, claim.attempt_limit), (1, RETRY.max_attempts));
    let delivery = &claim.fence.delivery;
    assert_eq!((delivery.event, delivery.route.as_str(), delivery.epoch), (event, "orders", 0));
    let handed = &claim.event;
    assert_eq!((handed.id, &handed.source, &handed.key), (event, &new.source, &new.key));
    assert_eq!((&handed.kind, &handed.entity), (&None, &new.entity));
    assert_eq!((handed.occurred_at, handed.received_at), (new.occurred_at, new.received_at));
    assert_eq!((&handed.headers, &handed.body, &handed.result), (&new.headers, &new.body, &None));
    let found = case.delivery(event, "orders", 0).await;
    assert_eq!((found.state.as_str(), found.attempt), ("running", 1));
    let running = Attempt { number: 1, started_at: at(0), finished_at: None, outcome: None, error: None };
    assert_eq!(found.attempts, [running]);
}

async fn what_is_due_first_comes_first<J: WholeJournal>(case: Case<J>) {
    let orders = route("orders");
    // Due at 0 to 4, stored in that order; the first three then fail and are due at 30, 20 and 20.
    let mut events = Vec::new();
    for number in 0..5 {
        case.set_clock(number);
        events.push(case.append(routed(&format!("evt_{number}"), &["orders", "mail"])).await);
    }
    let claims = case.journal.claim(Arc::clone(&orders), 3, LEASE).await.unwrap();
    assert_eq!(claims.iter().map(|claim| claim.event.id).collect::<Vec<_>>(), events[..3]);
    for (claim, due) in claims.iter().zip([30, 20, 20]) {
        case.settle(&claim.fence, Verdict::RetryAt(at(due), failed("busy"))).await;
    }
    assert_eq!(case.journal.claim(Arc::clone(&orders), 0, LEASE).await.unwrap().len(), 0);
    // A delivery is due at its very time, and not before.
    case.clock.set(UnixMicros(at(20).0 - 1));
    let claims = case.claim(&orders).await;
    assert_eq!(claims.iter().map(|claim| claim.event.id).collect::<Vec<_>>(), events[3..]);
    case.set_clock(20);
    assert_eq!(case.journal.next_due(named("orders")).await.unwrap(), Some(at(20)));
    let one = case.journal.claim(Arc::clone(&orders), 1, LEASE).await.unwrap();
    assert_eq!((one[0].event.id, one[0].fence.attempt), (events[1], 2), "of equals the older event");
    case.set_clock(30);
    let claims = case.claim(&orders).await;
    assert_eq!(claims.iter().map(|claim| claim.event.id).collect::<Vec<_>>(), [events[2], events[0]]);
    // The other route's deliveries are untouched.
    assert_eq!(case.claim(&route("mail")).await.len(), 5);
}

async fn nothing_is_claimed_twice<J: WholeJournal>(case: Case<J>) {
    const EVENTS: usize = 300;
    for number in 0..EVENTS {
        case.append(routed(&format!("evt_{number}"), &["orders"])).await;
    }
    let workers = (0..8).map(|_| {
        let journal = Arc::clone(&case.journal);
        tokio::spawn(async move {
            let mut fences = Vec::new();
            loop {
                let claims = journal.claim(route("orders"), 7, LEASE).await.unwrap();
                assert!(claims.len() <= 7);
                if claims.is_empty() {
                    return fences;
                }
                fences.extend(claims.into_iter().map(|claim| claim.fence));
                tokio::task::yield_now().await;
            }
        })
    });
    let mut fences = Vec::new();
    for worker in workers.collect::<Vec<_>>() {
        fences.extend(worker.await.unwrap());
    }
    assert_eq!(fences.len(), EVENTS);
    assert!(fences.iter().all(|fence| fence.attempt == 1));
    assert_eq!(fences.iter().collect::<HashSet<_>>().len(), EVENTS);
    // The same attempt settled from many sides is settled once.
    let racing = (0..8).map(|_| {
        let (journal, fence) = (Arc::clone(&case.journal), fences[0].clone());
        tokio::spawn(async move { journal.settle(vec![settlement(&fence, succeeded())]).await.unwrap()[0] })
    });
    let mut done = 0;
    for settled in racing.collect::<Vec<_>>() {
        done += usize::from(settled.await.unwrap() == Settled::Done);
    }
    assert_eq!(done, 1);
}

async fn every_attempt_is_kept<J: WholeJournal>(case: Case<J>) {
    let orders = route("orders");
    let event = case.append(routed("evt_1", &["orders"])).await;
    for (attempt, start) in [(1, 0), (2, 10), (3, 20)] {
        case.set_clock(start);
        let claims = case.claim(&orders).await;
        assert_eq!((claims[0].fence.attempt, claims[0].attempt_limit), (attempt, RETRY.max_attempts));
        case.set_clock(start + 1);
        let verdict = match attempt {
            1 => Verdict::RetryAt(at(10), failed("first")),
            2 => Verdict::RetryAt(at(20), failed("second")),
            _ => Verdict::Dead(failed("third")),
        };
        case.settle(&claims[0].fence, verdict).await;
        let found = case.delivery(event, "orders", 0).await;
        if attempt < 3 {
            assert_eq!((found.state.as_str(), found.run_at), ("retrying", at(start + 10)));
            assert_eq!((found.cause, found.settled_at), (None, None));
        }
    }
    let found = case.delivery(event, "orders", 0).await;
    assert_eq!((found.state.as_str(), found.attempt, found.error.as_deref()), ("dead", 3, Some("third")));
    let failure = |number: u32, start: i64, error: &str| Attempt {
        number,
        started_at: at(start),
        finished_at: Some(at(start + 1)),
        outcome: Some("failed".to_owned()),
        error: Some(error.to_owned()),
    };
    assert_eq!(found.attempts, [failure(1, 0, "first"), failure(2, 10, "second"), failure(3, 20, "third")]);
    let query = EventQuery { limit: 1, ..Default::default() };
    let listed = &case.journal.list(query).await.unwrap().events[0].deliveries[0];
    assert_eq!((listed.attempt, listed.attempts.len()), (3, 0), "a list does without the log");
    assert_eq!(case.claim(&orders).await.len(), 0, "the dead do not run");
}

async fn success_keeps_the_result_and_clears_the_error<J: WholeJournal>(case: Case<J>) {
    let orders = route("orders");
    let event = case.append(routed("evt_1", &["orders"])).await;
    case.run_one(&orders, Verdict::RetryAt(at(5), failed("busy"))).await;
    assert_eq!(case.delivery(event, "orders", 0).await.error.as_deref(), Some("busy"));
    case.set_clock(6);
    case.run_one(&orders, Verdict::Succeeded(Some("{\"id\":7}".to_owned()))).await;
    let found = case.delivery(event, "orders", 0).await;
    assert_eq!((found.state.as_str(), found.attempt), ("succeeded", 2));
    assert_eq!((found.result.as_deref(), found.error, found.cause), (Some("{\"id\":7}"), None, None));
    assert_eq!(found.settled_at, Some(at(6)));
    let outcomes: Vec<_> = found.attempts.iter().map(|attempt| attempt.outcome.as_deref()).collect();
    assert_eq!(outcomes, [Some("failed"), Some("succeeded")]);
    assert_eq!(found.attempts[0].error.as_deref(), Some("busy"), "the log keeps it");
    assert_eq!(case.claim(&orders).await.len(), 0);
}

async fn the_dead_have_a_cause<J: WholeJournal>(case: Case<J>) {
    for cause in [Cause::Destination, Cause::Handler, Cause::Ours, Cause::Poison] {
        let event = case.append(routed(cause.as_str(), &["orders"])).await;
        case.set_clock(3);
        case.run_one(&route("orders"), Verdict::Dead(Failure::permanent(cause, "no such column: paid"))).await;
        let found = case.delivery(event, "orders", 0).await;
        assert_eq!((found.state.as_str(), found.cause.as_deref()), ("dead", Some(cause.as_str())));
        assert_eq!((found.error.as_deref(), found.settled_at), (Some("no such column: paid"), Some(at(3))));
    }
}

async fn the_status_is_the_worst_of_the_deliveries<J: WholeJournal>(case: Case<J>) {
    let names = ["a", "b", "c", "d"];
    let event = case.append(routed("evt_1", &names)).await;
    let check = async |wanted: EventStatus| {
        assert_eq!(case.story(event).await.event.status, wanted);
        for status in EventStatus::ALL {
            let query = EventQuery { status: Some(status), limit: 10, ..Default::default() };
            let found = case.journal.list(query).await.unwrap().events;
            assert_eq!(found.len(), usize::from(status == wanted), "listed by {}", status.as_str());
            assert!(found.iter().all(|found| found.status == wanted && found.deliveries.len() == 4));
        }
    };
    check(EventStatus::Ready).await;
    case.run_one(&route("a"), succeeded()).await;
    check(EventStatus::Ready).await;
    let running = case.claim_one(&route("b")).await;
    check(EventStatus::Running).await;
    case.run_one(&route("c"), Verdict::RetryAt(at(9), failed("busy"))).await;
    check(EventStatus::Retrying).await;
    case.run_one(&route("d"), dead("no")).await;
    check(EventStatus::Dead).await;
    case.settle(&running, succeeded()).await;
    case.journal.order(order(event, Verb::Skip)).await.unwrap();
    check(EventStatus::Skipped).await;
}

async fn followups_start_with_the_success_and_only_once<J: WholeJournal>(case: Case<J>) {
    let (orders, mail) = (route("orders"), route_after("mail", "orders"));
    let followups = || vec![named("mail"), named("ship")];
    let event = case.append(routed("evt_1", &["orders"])).await;
    let fence = case.claim_one(&orders).await;
    let failure = Verdict::RetryAt(at(1), failed("busy"));
    let settled = case.journal.settle(vec![Settlement { fence, verdict: failure, followups: followups() }]);
    assert_eq!(settled.await.unwrap(), [Settled::Done]);
    assert_eq!(case.states(event).await, ["orders/0 retrying"], "a failure starts nothing");

    case.set_clock(20);
    let lost = case.claim_one(&orders).await;
    case.set_clock(35);
    case.journal.reclaim(Arc::clone(&orders)).await.unwrap();
    let success = |fence: &Fence| Settlement {
        fence: fence.clone(),
        verdict: Verdict::Succeeded(Some("{\"order\":7}".to_owned())),
        followups: followups(),
    };
    assert_eq!(case.journal.settle(vec![success(&lost)]).await.unwrap(), [Settled::Lost]);
    assert_eq!(case.states(event).await, ["orders/0 retrying"], "neither does a lost claim");

    case.set_clock(80);
    let fence = case.claim_one(&orders).await;
    let twice = vec![success(&fence), success(&fence)];
    assert_eq!(case.journal.settle(twice).await.unwrap(), [Settled::Done, Settled::Lost]);
    assert_eq!(case.states(event).await, ["mail/0 ready", "orders/0 succeeded", "ship/0 ready"]);
    assert_eq!(case.delivery(event, "mail", 0).await.run_at, at(80));

    // The follow-up knows what came of the first; what becomes of it changes nothing there.
    let claims = case.claim(&mail).await;
    assert_eq!(claims[0].event.result.as_deref(), Some("{\"order\":7}"));
    case.settle(&claims[0].fence, dead("no such address")).await;
    assert_eq!(case.states(event).await, ["mail/0 dead", "orders/0 succeeded", "ship/0 ready"]);

    // In a new epoch the follow-ups are new too, but those that exist already are left as they are.
    let again = order_for(event, Verb::ForceReplay { epoch: 1 }, &["orders", "ship"]);
    case.journal.order(again).await.unwrap();
    let ship = case.claim(&route_after("ship", "orders")).await;
    let seen: Vec<_> = ship.iter().map(|claim| claim.event.result.as_deref()).collect();
    assert_eq!(seen, [Some("{\"order\":7}"); 2], "the result of the epoch before, until there is one");
    let fence = case.claim_one(&orders).await;
    assert_eq!(fence.delivery.epoch, 1);
    let second = Settlement { verdict: Verdict::Succeeded(None), ..success(&fence) };
    assert_eq!(case.journal.settle(vec![second]).await.unwrap(), [Settled::Done]);
    assert_eq!(
        case.states(event).await,
        ["mail/0 dead", "mail/1 ready", "orders/0 succeeded", "orders/1 succeeded", "ship/0 running", "ship/1 running"]
    );
    assert_eq!(case.claim(&mail).await[0].event.result, None, "the result of its own epoch");
}

async fn settlements_are_answered_one_by_one<J: WholeJournal>(case: Case<J>) {
    for number in 0..4 {
        case.append(routed(&format!("evt_{number}"), &["orders"])).await;
    }
    let claims = case.claim(&route("orders")).await;
    let fences: Vec<_> = claims.into_iter().map(|claim| claim.fence).collect();
    let fence_of = |change: &dyn Fn(&mut Fence)| {
        let mut fence = fences[3].clone();
        change(&mut fence);
        fence
    };
    let nobody = "00000000-0000-7000-8000-000000000000".parse().unwrap();
    let settlements = vec![
        settlement(&fences[2], succeeded()),
        settlement(&fence_of(&|fence| fence.attempt = 2), succeeded()),
        settlement(&fences[0], Verdict::RetryAt(at(1), failed("busy"))),
        settlement(&fence_of(&|fence| fence.attempt = 0), succeeded()),
        settlement(&fence_of(&|fence| fence.delivery.epoch = 1), succeeded()),
        settlement(&fence_of(&|fence| fence.delivery.route = named("mail")), succeeded()),
        settlement(&fence_of(&|fence| fence.delivery.event = nobody), succeeded()),
        settlement(&fences[0], succeeded()),
        settlement(&fences[1], dead("no")),
    ];
    let (done, lost) = (Settled::Done, Settled::Lost);
    assert_eq!(case.journal.settle(settlements).await.unwrap(), [done, lost, done, lost, lost, lost, lost, lost, done]);
    let mut states = Vec::new();
    for fence in &fences {
        states.extend(case.states(fence.delivery.event).await);
    }
    assert_eq!(states, ["orders/0 retrying", "orders/0 dead", "orders/0 succeeded", "orders/0 running"]);
    assert_eq!(case.journal.settle(Vec::new()).await.unwrap(), []);
    let moment = Duration::from_micros(1);
    case.journal.renew(Vec::new(), moment).await.unwrap();
    case.journal.give_back(Vec::new()).await.unwrap();
}
