//! Leases make sure that somebody goes on; the fence makes sure that only one of them counts (faults 17 and 41, R14).

use std::sync::Arc;
use std::time::Duration;

use oncehook::delivery::{Cause, Failure, Settled, Verdict};
use oncehook::journal::{Attempt, EventStatus};

use super::*;

pub(super) async fn exercise<J: WholeJournal>(subject: &Subject<J>) {
    run(subject, fault_17_a_zombie_settles_nothing).await;
    run(subject, a_late_attempt_still_counts_while_nobody_else_began).await;
    run(subject, leases_run_out_unless_they_are_renewed).await;
    run(subject, an_attempt_that_never_ends_is_the_last_one_some_day).await;
    run(subject, what_is_given_back_is_not_held_against_it).await;
    run(subject, a_delivery_that_failed_is_given_back_as_such).await;
}

async fn fault_17_a_zombie_settles_nothing<J: WholeJournal>(case: Case<J>) {
    let orders = route("orders");
    let event = case.append(routed("evt_1", &["orders"])).await;
    let zombie = case.claim_one(&orders).await;
    assert_eq!(case.claim(&orders).await.len(), 0, "it is leased");
    case.set_clock(15);
    assert_eq!(case.claim(&orders).await.len(), 0, "a lease is taken away before it is given anew");
    assert_eq!(case.journal.reclaim(Arc::clone(&orders)).await.unwrap(), 1);
    assert_eq!(case.journal.reclaim(Arc::clone(&orders)).await.unwrap(), 0);
    // Between the two attempts, in whatever way it comes back.
    let all_of_it = async |zombie: &Fence, state: &str| {
        let before = case.delivery(event, "orders", 0).await;
        assert_eq!(before.state, state);
        assert_eq!(case.settle(zombie, succeeded()).await, Settled::Lost);
        assert_eq!(case.settle(zombie, Verdict::RetryAt(at(1), failed("busy"))).await, Settled::Lost);
        assert_eq!(case.settle(zombie, dead("no")).await, Settled::Lost);
        case.journal.renew(vec![zombie.clone()], Duration::from_secs(900)).await.unwrap();
        case.journal.give_back(vec![zombie.clone()]).await.unwrap();
        assert_eq!(case.delivery(event, "orders", 0).await, before);
    };
    all_of_it(&zombie, "retrying").await;
    case.set_clock(40);
    let second = case.claim_one(&orders).await;
    assert_eq!(second.attempt, 2);
    // Fault 41: while the second attempt runs, and after it.
    all_of_it(&zombie, "running").await;
    assert_eq!(case.settle(&second, succeeded()).await, Settled::Done);
    all_of_it(&zombie, "succeeded").await;
    assert_eq!(case.settle(&second, succeeded()).await, Settled::Lost, "once is once");
}

async fn a_late_attempt_still_counts_while_nobody_else_began<J: WholeJournal>(case: Case<J>) {
    let orders = route("orders");
    let event = case.append(routed("evt_1", &["orders"])).await;
    let late = case.claim_one(&orders).await;
    case.set_clock(600);
    assert_eq!(case.settle(&late, succeeded()).await, Settled::Done);
    assert_eq!(case.journal.reclaim(orders).await.unwrap(), 0);
    assert_eq!(case.states(event).await, ["orders/0 succeeded"]);
}

async fn leases_run_out_unless_they_are_renewed<J: WholeJournal>(case: Case<J>) {
    let (orders, mail) = (route("orders"), route("mail"));
    let [kept, lost] = [case.append(routed("kept", &["orders"])).await, case.append(routed("lost", &["orders"])).await];
    case.append(routed("other", &["mail"])).await;
    let claims = case.claim(&orders).await;
    case.claim(&mail).await;
    case.set_clock(10);
    case.journal.renew(vec![claims[0].fence.clone()], LEASE).await.unwrap();
    case.clock.set(UnixMicros(at(15).0 - 1));
    assert_eq!(case.journal.reclaim(Arc::clone(&orders)).await.unwrap(), 0);
    case.set_clock(15);
    assert_eq!(case.journal.reclaim(Arc::clone(&orders)).await.unwrap(), 1);
    assert_eq!(case.states(kept).await, ["orders/0 running"]);
    let found = case.delivery(lost, "orders", 0).await;
    assert_eq!(found.state, "retrying");
    assert!((at(15)..=at(25)).contains(&found.run_at), "{:?} is no back-off of up to ten seconds", found.run_at);
    assert_eq!(found.error.as_deref(), Some(Failure::never_ended().message.as_str()));
    assert_eq!((found.cause, found.settled_at), (None, None));
    let attempt = Attempt {
        number: 1,
        started_at: at(0),
        finished_at: Some(at(15)),
        outcome: Some("lost".to_owned()),
        error: Some(Failure::never_ended().message),
    };
    assert_eq!(found.attempts, [attempt]);
    // Ten seconds later the renewed one ends too, and so did the other route's; each route is asked for its own.
    case.set_clock(25);
    assert_eq!(case.journal.reclaim(Arc::clone(&orders)).await.unwrap(), 1);
    assert_eq!(case.journal.reclaim(mail).await.unwrap(), 1);
    case.set_clock(60);
    assert_eq!(case.claim(&orders).await.len(), 2);
}

/// It may be what ends the process, every time: it is counted before it begins, so it dies like any other failure.
async fn an_attempt_that_never_ends_is_the_last_one_some_day<J: WholeJournal>(case: Case<J>) {
    let orders = route("orders");
    let event = case.append(routed("evt_1", &["orders"])).await;
    let mut time = 0;
    for attempt in 1..=RETRY.max_attempts {
        assert_eq!(case.claim_one(&orders).await.attempt, attempt);
        time += 15;
        case.set_clock(time);
        assert_eq!(case.journal.reclaim(Arc::clone(&orders)).await.unwrap(), 1);
        time += 60;
        case.set_clock(time);
    }
    assert_eq!(case.claim(&orders).await.len(), 0);
    assert_eq!(orders.failures.noted(), u64::from(RETRY.max_attempts), "each is reported to the log");
    let found = case.delivery(event, "orders", 0).await;
    assert_eq!((found.state.as_str(), found.cause.as_deref()), ("dead", Some(Cause::Poison.as_str())));
    assert_eq!(found.settled_at, Some(at(time - 60)));
    assert!(found.error.unwrap().starts_with("the attempt never ended"));
    assert!(found.attempts.iter().all(|attempt| attempt.outcome.as_deref() == Some("lost")));
    assert_eq!((found.attempts.len(), found.attempt), (3, 3));
    assert_eq!(case.story(event).await.event.status, EventStatus::Dead);
}

async fn what_is_given_back_is_not_held_against_it<J: WholeJournal>(case: Case<J>) {
    let orders = route("orders");
    let event = case.append(routed("evt_1", &["orders"])).await;
    for round in 0..5 {
        case.set_clock(i64::from(round));
        let claims = case.claim(&orders).await;
        assert_eq!(claims[0].fence.attempt, round + 1);
        assert_eq!(claims[0].attempt_limit, RETRY.max_attempts + round);
        case.journal.give_back(vec![claims[0].fence.clone()]).await.unwrap();
        let found = case.delivery(event, "orders", 0).await;
        assert_eq!((found.state.as_str(), found.run_at), ("ready", at(i64::from(round))));
        let last = found.attempts.last().unwrap();
        assert_eq!((last.outcome.as_deref(), last.error.as_deref()), (Some("given_back"), None));
        assert_eq!(last.finished_at, Some(at(i64::from(round))));
        assert_eq!(case.settle(&claims[0].fence, succeeded()).await, Settled::Lost);
    }
    // Five given back; the next three may still be lost before it is dead.
    let mut time = 5;
    for left in (0..RETRY.max_attempts).rev() {
        case.claim_one(&orders).await;
        time += 15;
        case.set_clock(time);
        case.journal.reclaim(Arc::clone(&orders)).await.unwrap();
        let state = if left == 0 { "dead" } else { "retrying" };
        assert_eq!(case.delivery(event, "orders", 0).await.state, state);
        time += 60;
        case.set_clock(time);
    }
}

async fn a_delivery_that_failed_is_given_back_as_such<J: WholeJournal>(case: Case<J>) {
    let orders = route("orders");
    let event = case.append(routed("evt_1", &["orders"])).await;
    case.run_one(&orders, Verdict::RetryAt(at(5), failed("busy"))).await;
    case.set_clock(5);
    let fence = case.claim_one(&orders).await;
    case.set_clock(6);
    case.journal.give_back(vec![fence]).await.unwrap();
    let found = case.delivery(event, "orders", 0).await;
    assert_eq!((found.state.as_str(), found.run_at), ("retrying", at(6)));
    assert_eq!((found.error.as_deref(), found.attempt), (Some("busy"), 2));
    let claims = case.claim(&orders).await;
    assert_eq!((claims[0].fence.attempt, claims[0].attempt_limit), (3, RETRY.max_attempts + 1));
}
