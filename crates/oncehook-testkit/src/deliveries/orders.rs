//! Orders of operators: what each verb changes, what it refuses, and that it is written down.

use std::sync::Arc;

use oncehook::delivery::{Settled, Verdict};
use oncehook::event::NewEvent;
use oncehook::journal::{ATTEMPTS_SHOWN, AuditEntry, EventStatus, Flag, ORDERS_SHOWN, OrderError, Ordered, Retention};
use oncehook_verify::Quarantine;

use super::*;

pub(super) async fn exercise<J: WholeJournal>(subject: &Subject<J>) {
    run(subject, retry_revives_what_failed_and_nothing_else).await;
    run(subject, retry_grants_further_attempts).await;
    run(subject, retry_may_name_a_route).await;
    run(subject, retry_leaves_a_running_attempt_alone).await;
    run(subject, replay_changes_nothing_that_took_effect).await;
    run(subject, replay_finds_routes_that_are_new).await;
    run(subject, a_forced_replay_makes_the_next_epoch).await;
    run(subject, a_forced_replay_may_name_a_route).await;
    run(subject, fault_55_two_operators_who_mean_the_same_do_it_once).await;
    run(subject, a_forced_replay_leaves_earlier_epochs_alone).await;
    run(subject, skip_gives_up_what_is_pending_or_dead).await;
    run(subject, skip_waits_for_a_running_attempt).await;
    run(subject, a_held_event_is_released_first).await;
    run(subject, a_release_may_name_a_route).await;
    run(subject, what_does_not_exist_takes_no_orders).await;
    run(subject, orders_that_are_carried_out_are_written_down).await;
    run(subject, an_order_that_changes_nothing_leaves_no_row_in_the_audit).await;
    run(subject, a_pause_that_changes_nothing_leaves_no_row_in_the_audit).await;
    run(subject, only_the_latest_orders_and_attempts_of_an_event_are_shown).await;
}

fn routes(ordered: &Ordered) -> Vec<&str> {
    ordered.routes.iter().map(RouteName::as_str).collect()
}

fn assert_unfit(answer: Result<Ordered, OrderError>, says: &str) {
    match answer {
        Err(OrderError::Unfit(why)) => assert!(why.contains(says), "{why:?} does not say {says:?}"),
        other => panic!("{other:?} is not a refusal that says {says:?}"),
    }
}

async fn retry_revives_what_failed_and_nothing_else<J: WholeJournal>(case: Case<J>) {
    let event = case.append(routed("evt_1", &["a", "b", "c", "d"])).await;
    let other = case.append(routed("evt_2", &["x"])).await;
    case.run_one(&route("x"), dead("no")).await;
    case.run_one(&route("a"), succeeded()).await;
    case.run_one(&route("b"), dead("no such column: paid")).await;
    case.run_one(&route("c"), Verdict::RetryAt(at(3_600), failed("busy"))).await;
    case.set_clock(9);
    let ordered = case.journal.order(order(event, Verb::Retry)).await.unwrap();
    assert_eq!((routes(&ordered), ordered.epoch), (vec!["b", "c"], 0));
    assert_eq!(case.states(event).await, ["a/0 succeeded", "b/0 retrying", "c/0 retrying", "d/0 ready"]);
    for name in ["b", "c"] {
        let found = case.delivery(event, name, 0).await;
        assert_eq!((found.run_at, found.attempt), (at(9), 1));
        assert_eq!((found.cause, found.settled_at), (None, None));
        assert!(found.error.is_some(), "the last error stays until it is over");
        assert_eq!(found.attempts.len(), 1);
    }
    assert_eq!(case.delivery(event, "d", 0).await.run_at, at(0));
    assert_eq!(case.states(other).await, ["x/0 dead"]);
    case.run_one(&route("b"), succeeded()).await;
    case.run_one(&route("c"), succeeded()).await;
    case.run_one(&route("d"), succeeded()).await;
    assert_unfit(case.journal.order(order(event, Verb::Retry)).await, "nothing to retry");
    assert_eq!(case.story(event).await.event.status, EventStatus::Succeeded);
}

async fn retry_grants_further_attempts<J: WholeJournal>(case: Case<J>) {
    let orders = route("orders");
    let event = case.append(routed("evt_1", &["orders"])).await;
    for attempt in 1..=3 {
        case.set_clock(attempt);
        case.run_one(&orders, Verdict::RetryAt(at(attempt + 1), failed("busy"))).await;
    }
    let ordered = Order { attempts: 2, ..order(event, Verb::Retry) };
    case.journal.order(ordered).await.unwrap();
    let claims = case.claim(&orders).await;
    assert_eq!((claims[0].fence.attempt, claims[0].attempt_limit), (4, 5), "the count goes on");
    // Two more, then it is dead: a lease that runs out counts as well.
    case.set_clock(100);
    case.journal.reclaim(Arc::clone(&orders)).await.unwrap();
    assert_eq!(case.states(event).await, ["orders/0 retrying"]);
    case.set_clock(200);
    case.claim_one(&orders).await;
    case.set_clock(300);
    case.journal.reclaim(Arc::clone(&orders)).await.unwrap();
    assert_eq!(case.states(event).await, ["orders/0 dead"]);
}

async fn retry_may_name_a_route<J: WholeJournal>(case: Case<J>) {
    let event = case.append(routed("evt_1", &["a", "b"])).await;
    case.run_one(&route("a"), dead("no")).await;
    case.run_one(&route("b"), dead("no")).await;
    let only = |name: &str| Order { route: Some(named(name)), ..order(event, Verb::Retry) };
    assert_unfit(case.journal.order(only("c")).await, "nothing to retry");
    let ordered = case.journal.order(only("b")).await.unwrap();
    assert_eq!(routes(&ordered), ["b"]);
    assert_eq!(case.states(event).await, ["a/0 dead", "b/0 retrying"]);
}

async fn retry_leaves_a_running_attempt_alone<J: WholeJournal>(case: Case<J>) {
    let orders = route("orders");
    let event = case.append(routed("evt_1", &["orders"])).await;
    let fence = case.claim_one(&orders).await;
    assert_unfit(case.journal.order(order(event, Verb::Retry)).await, "nothing to retry");
    let replayed = case.journal.order(order_for(event, Verb::Replay, &["orders"])).await.unwrap();
    assert_eq!(routes(&replayed), [""; 0]);
    assert_eq!(case.settle(&fence, succeeded()).await, Settled::Done);
}

async fn replay_changes_nothing_that_took_effect<J: WholeJournal>(case: Case<J>) {
    let event = case.append(routed("evt_1", &["a", "b"])).await;
    case.run_one(&route("a"), succeeded()).await;
    case.run_one(&route("b"), dead("no")).await;
    case.set_clock(4);
    let again = || order_for(event, Verb::Replay, &["a", "b"]);
    assert_eq!(routes(&case.journal.order(again()).await.unwrap()), ["b"], "as a retry");
    assert_eq!(case.delivery(event, "b", 0).await.run_at, at(4));
    case.run_one(&route("b"), succeeded()).await;
    let before = case.story(event).await.event;
    for _ in 0..3 {
        let ordered = case.journal.order(again()).await.unwrap();
        assert_eq!((routes(&ordered), ordered.epoch), (vec![], 0));
    }
    assert_eq!(case.story(event).await.event, before);
    for name in ["a", "b"] {
        assert_eq!(case.claim(&route(name)).await.len(), 0);
    }
}

async fn replay_finds_routes_that_are_new<J: WholeJournal>(case: Case<J>) {
    let event = case.append(routed("evt_1", &[])).await;
    let replay = |wanting: &[&str], only: Option<&str>| Order {
        route: only.map(named),
        ..order_for(event, Verb::Replay, wanting)
    };
    assert_eq!(routes(&case.journal.order(replay(&[], None)).await.unwrap()), [""; 0]);
    assert_eq!(case.story(event).await.event.status, EventStatus::Unrouted);
    case.set_clock(5);
    let ordered = case.journal.order(replay(&["late", "b", "a"], None)).await.unwrap();
    assert_eq!(routes(&ordered), ["a", "b", "late"]);
    assert_eq!(case.states(event).await, ["a/0 ready", "b/0 ready", "late/0 ready"]);
    assert_eq!(case.delivery(event, "late", 0).await.run_at, at(5));
    case.run_one(&route("late"), succeeded()).await;

    let ordered = case.journal.order(replay(&["a", "late", "new", "newer"], Some("new"))).await.unwrap();
    assert_eq!(routes(&ordered), ["new"]);
    assert_eq!(case.states(event).await, ["a/0 ready", "b/0 ready", "late/0 succeeded", "new/0 ready"]);
    // A route that has a delivery in a later epoch only has had its turn.
    let force = order_for(event, Verb::ForceReplay { epoch: 1 }, &["forced"]);
    case.journal.order(force).await.unwrap();
    let ordered = case.journal.order(replay(&["forced"], None)).await.unwrap();
    assert_eq!((routes(&ordered), ordered.epoch), (vec![], 1));
}

async fn a_forced_replay_makes_the_next_epoch<J: WholeJournal>(case: Case<J>) {
    let (a, b) = (route("a"), route("b"));
    let event = case.append(routed("evt_1", &["a", "b"])).await;
    case.run_one(&a, Verdict::Succeeded(Some("1".to_owned()))).await;
    case.run_one(&b, succeeded()).await;
    let force = |epoch: u32, wanting: &[&str]| order_for(event, Verb::ForceReplay { epoch }, wanting);
    for wrong in [0, 2, u32::MAX] {
        let answer = case.journal.order(force(wrong, &["a", "b"])).await;
        assert_eq!(answer, Err(OrderError::Epoch { next: 1 }));
    }
    for reason in [None, Some(String::new()), Some("  ".to_owned())] {
        let who = Who { name: "ada".to_owned(), reason };
        let answer = case.journal.order(Order { who, ..force(1, &["a"]) }).await;
        assert_unfit(answer, "reason");
    }
    assert_unfit(case.journal.order(force(1, &[])).await, "no route");
    assert_eq!(case.states(event).await, ["a/0 succeeded", "b/0 succeeded"]);

    case.set_clock(8);
    let ordered = case.journal.order(force(1, &["b", "a"])).await.unwrap();
    assert_eq!((routes(&ordered), ordered.epoch), (vec!["a", "b"], 1));
    assert_eq!(case.states(event).await, ["a/0 succeeded", "a/1 ready", "b/0 succeeded", "b/1 ready"]);
    let claims = case.claim(&a).await;
    assert_eq!(claims.len(), 1);
    assert_eq!((claims[0].fence.attempt, claims[0].attempt_limit), (1, RETRY.max_attempts));
    let keys = [0, 1].map(|epoch| {
        let delivery = oncehook::delivery::DeliveryId { epoch, ..claims[0].fence.delivery.clone() };
        delivery.idempotency_key()
    });
    assert_ne!(keys[0], keys[1]);
    case.settle(&claims[0].fence, Verdict::Succeeded(Some("2".to_owned()))).await;
    let results = [case.delivery(event, "a", 0).await.result, case.delivery(event, "a", 1).await.result];
    assert_eq!(results, [Some("1".to_owned()), Some("2".to_owned())]);
    let ordered = case.journal.order(force(2, &["a"])).await.unwrap();
    assert_eq!(ordered.epoch, 2);
    assert_eq!(case.journal.order(force(2, &["a"])).await, Err(OrderError::Epoch { next: 3 }));
}

async fn a_forced_replay_may_name_a_route<J: WholeJournal>(case: Case<J>) {
    let event = case.append(routed("evt_1", &["orders"])).await;
    let fence = case.claim_one(&route("orders")).await;
    let verdict = Verdict::Succeeded(Some("7".to_owned()));
    let done = Settlement { fence, verdict, followups: vec![named("mail")] };
    case.journal.settle(vec![done]).await.unwrap();
    let mail = route_after("mail", "orders");
    case.run_one(&mail, succeeded()).await;
    // A follow-up alone, which no event wants by itself: it gets the result that it follows.
    let force = order_for(event, Verb::ForceReplay { epoch: 1 }, &["orders"]);
    let ordered = case.journal.order(Order { route: Some(named("mail")), ..force }).await.unwrap();
    assert_eq!(routes(&ordered), ["mail"]);
    assert_eq!(case.states(event).await, ["mail/0 succeeded", "mail/1 ready", "orders/0 succeeded"]);
    let claims = case.claim(&mail).await;
    assert_eq!(claims[0].event.result.as_deref(), Some("7"));
    // The number counts for the whole event, not for each route.
    let force = order_for(event, Verb::ForceReplay { epoch: 1 }, &["orders"]);
    assert_eq!(case.journal.order(force).await, Err(OrderError::Epoch { next: 2 }));
}

async fn fault_55_two_operators_who_mean_the_same_do_it_once<J: WholeJournal>(case: Case<J>) {
    let orders = route("orders");
    let event = case.append(routed("evt_1", &["orders"])).await;
    case.run_one(&orders, succeeded()).await;
    for epoch in 1..=10 {
        let racing = (0..4).map(|_| {
            let journal = Arc::clone(&case.journal);
            let force = order_for(event, Verb::ForceReplay { epoch }, &["orders"]);
            tokio::spawn(async move { journal.order(force).await })
        });
        let mut done = 0;
        for answer in racing.collect::<Vec<_>>() {
            match answer.await.unwrap() {
                Ok(ordered) => done += usize::from(ordered.epoch == epoch),
                Err(error) => assert_eq!(error, OrderError::Epoch { next: epoch + 1 }),
            }
        }
        assert_eq!(done, 1);
        case.run_one(&orders, succeeded()).await;
    }
    assert_eq!(case.story(event).await.audit.len(), 10);
}

async fn a_forced_replay_leaves_earlier_epochs_alone<J: WholeJournal>(case: Case<J>) {
    let event = case.append(routed("evt_1", &["a", "b", "c"])).await;
    case.run_one(&route("b"), dead("no")).await;
    let running = case.claim_one(&route("c")).await;
    let before = case.story(event).await.event.deliveries;
    let force = order_for(event, Verb::ForceReplay { epoch: 1 }, &["a", "b", "c"]);
    case.journal.order(force).await.unwrap();
    let mut after = case.story(event).await.event.deliveries;
    after.retain(|found| found.epoch == 0);
    assert_eq!(after, before);
    assert_eq!(case.claim(&route("a")).await.len(), 2, "both are due, the older epoch first");
    assert_eq!(case.settle(&running, succeeded()).await, Settled::Done);
    // A retry is for every epoch.
    case.run_one(&route("b"), dead("no")).await;
    let ordered = case.journal.order(order(event, Verb::Retry)).await.unwrap();
    assert_eq!(routes(&ordered), ["b"]);
    let claims = case.claim(&route("b")).await;
    let epochs: Vec<_> = claims.iter().map(|claim| claim.fence.delivery.epoch).collect();
    assert_eq!(epochs, [0, 1]);
}

async fn skip_gives_up_what_is_pending_or_dead<J: WholeJournal>(case: Case<J>) {
    let event = case.append(routed("evt_1", &["a", "b", "c", "d"])).await;
    case.run_one(&route("a"), succeeded()).await;
    case.run_one(&route("b"), dead("no")).await;
    case.run_one(&route("c"), Verdict::RetryAt(at(60), failed("busy"))).await;
    case.set_clock(3);
    let only = |name: &str| Order { route: Some(named(name)), ..order(event, Verb::Skip) };
    assert_eq!(routes(&case.journal.order(only("b")).await.unwrap()), ["b"]);
    let found = case.delivery(event, "b", 0).await;
    assert_eq!((found.state.as_str(), found.settled_at), ("skipped", Some(at(3))));
    assert_unfit(case.journal.order(only("a")).await, "nothing to skip");
    assert_eq!(routes(&case.journal.order(order(event, Verb::Skip)).await.unwrap()), ["c", "d"]);
    assert_eq!(case.states(event).await, ["a/0 succeeded", "b/0 skipped", "c/0 skipped", "d/0 skipped"]);
    assert_unfit(case.journal.order(order(event, Verb::Skip)).await, "nothing to skip");
    // What was given up stays so.
    assert_unfit(case.journal.order(order(event, Verb::Retry)).await, "nothing to retry");
    let replay = order_for(event, Verb::Replay, &["a", "b", "c", "d"]);
    assert_eq!(routes(&case.journal.order(replay).await.unwrap()), [""; 0]);
    case.set_clock(100);
    for name in ["b", "c", "d"] {
        assert_eq!(case.claim(&route(name)).await.len(), 0);
    }
}

async fn skip_waits_for_a_running_attempt<J: WholeJournal>(case: Case<J>) {
    let event = case.append(routed("evt_1", &["a", "b"])).await;
    let fence = case.claim_one(&route("a")).await;
    assert_unfit(case.journal.order(order(event, Verb::Skip)).await, "running");
    assert_eq!(case.states(event).await, ["a/0 running", "b/0 ready"], "all or nothing");
    // The other route's delivery is not in the way of a narrower order.
    let only = Order { route: Some(named("b")), ..order(event, Verb::Skip) };
    assert_eq!(routes(&case.journal.order(only).await.unwrap()), ["b"]);
    assert_eq!(case.settle(&fence, succeeded()).await, Settled::Done);
}

async fn a_held_event_is_released_first<J: WholeJournal>(case: Case<J>) {
    let held = NewEvent { quarantine: Some(Quarantine::AmbiguousJson), ..routed("evt_1", &["orders"]) };
    let event = case.append(held).await;
    let orders = route("orders");
    for verb in [Verb::Retry, Verb::Replay, Verb::ForceReplay { epoch: 1 }, Verb::ForceReplay { epoch: 9 }] {
        assert_unfit(case.journal.order(order_for(event, verb, &["orders"])).await, "held");
    }
    assert_unfit(case.journal.order(order(event, Verb::Skip)).await, "nothing to skip");
    assert_eq!(case.claim(&orders).await.len(), 0);
    case.set_clock(6);
    // As things are now, not as they were when it came.
    let release = || order_for(event, Verb::Release, &["mail"]);
    assert_eq!(routes(&case.journal.order(release()).await.unwrap()), ["mail"]);
    let story = case.story(event).await.event;
    assert_eq!((story.status, story.flags), (EventStatus::Ready, Vec::<Flag>::new()));
    assert_eq!(case.delivery(event, "mail", 0).await.run_at, at(6));
    assert_unfit(case.journal.order(release()).await, "not held");
    assert_eq!(case.claim(&orders).await.len(), 0);
    case.run_one(&route("mail"), succeeded()).await;
    assert_eq!(case.story(event).await.event.status, EventStatus::Succeeded);
    assert_eq!(case.journal.stats().await.unwrap().sources[0].quarantined, 1, "it was held at arrival");
    // Nobody may want it: it is free all the same.
    let held = NewEvent { quarantine: Some(Quarantine::AmbiguousJson), ..routed("evt_2", &[]) };
    let event = case.append(held).await;
    assert_eq!(routes(&case.journal.order(order(event, Verb::Release)).await.unwrap()), [""; 0]);
    assert_eq!(case.story(event).await.event.status, EventStatus::Unrouted);
}

async fn a_release_may_name_a_route<J: WholeJournal>(case: Case<J>) {
    let held = NewEvent { quarantine: Some(Quarantine::AmbiguousJson), ..routed("evt_1", &[]) };
    let event = case.append(held).await;
    let release = order_for(event, Verb::Release, &["a", "b"]);
    let ordered = case.journal.order(Order { route: Some(named("b")), ..release }).await.unwrap();
    assert_eq!(routes(&ordered), ["b"]);
    let replay = order_for(event, Verb::Replay, &["a", "b"]);
    assert_eq!(routes(&case.journal.order(replay).await.unwrap()), ["a"]);
}

async fn what_does_not_exist_takes_no_orders<J: WholeJournal>(case: Case<J>) {
    let nobody = "00000000-0000-7000-8000-000000000000".parse().unwrap();
    for verb in [Verb::Retry, Verb::Replay, Verb::ForceReplay { epoch: 1 }, Verb::Skip, Verb::Release] {
        let answer = case.journal.order(order_for(nobody, verb, &["orders"])).await;
        assert_eq!(answer, Err(OrderError::NoEvent));
    }
    assert_eq!(case.claim(&route("orders")).await.len(), 0);
}

async fn orders_that_are_carried_out_are_written_down<J: WholeJournal>(case: Case<J>) {
    let event = case.append(routed("evt_1", &["b", "a"])).await;
    let other = case.append(routed("evt_2", &["x"])).await;
    assert!(case.journal.order(order(event, Verb::Retry)).await.is_err());
    case.run_one(&route("a"), dead("no")).await;
    case.set_clock(1);
    case.journal.order(order(event, Verb::Retry)).await.unwrap();
    case.set_clock(2);
    let who = Who { name: "10.0.0.7".to_owned(), reason: None };
    let replay = Order { who, route: Some(named("c")), ..order_for(event, Verb::Replay, &["c"]) };
    case.journal.order(replay).await.unwrap();
    case.set_clock(3);
    case.journal.order(order_for(event, Verb::ForceReplay { epoch: 1 }, &["b", "a"])).await.unwrap();
    case.journal.order(order(event, Verb::Skip)).await.unwrap();
    let entry = |seconds: i64, who: &str, reason: Option<&str>, action: &str, detail: &str| AuditEntry {
        at: at(seconds),
        who: who.to_owned(),
        action: action.to_owned(),
        reason: reason.map(str::to_owned),
        detail: Some(detail.to_owned()),
    };
    let why = Some("incident 7");
    assert_eq!(
        case.story(event).await.audit,
        [
            entry(1, "ada", why, "retry", r#"{"epoch":0,"routes":["a"]}"#),
            entry(2, "10.0.0.7", None, "replay", r#"{"epoch":0,"routes":["c"]}"#),
            entry(3, "ada", why, "force_replay", r#"{"epoch":1,"routes":["a","b"]}"#),
            entry(3, "ada", why, "skip", r#"{"epoch":1,"routes":["a","b","c"]}"#),
        ]
    );
    assert_eq!(case.story(other).await.audit, []);
}

async fn an_order_that_changes_nothing_leaves_no_row_in_the_audit<J: WholeJournal>(case: Case<J>) {
    let event = case.append(routed("evt_1", &["a", "b"])).await;
    case.run_one(&route("a"), succeeded()).await;
    case.journal.order(Order { route: Some(named("b")), ..order(event, Verb::Skip) }).await.unwrap();
    for _ in 0..5 {
        let replayed = case.journal.order(order_for(event, Verb::Replay, &["a", "b"])).await.unwrap();
        assert_eq!(routes(&replayed), [""; 0]);
        for verb in [Verb::Retry, Verb::Skip, Verb::Release] {
            assert!(case.journal.order(order_for(event, verb, &["a", "b"])).await.is_err());
        }
    }
    let story = case.story(event).await;
    assert_eq!(story.audit.iter().map(|entry| entry.action.as_str()).collect::<Vec<_>>(), ["skip"]);
}

async fn a_pause_that_changes_nothing_leaves_no_row_in_the_audit<J: WholeJournal>(case: Case<J>) {
    for what in [Pausable::Route("orders".to_owned()), Pausable::Source("shop".to_owned())] {
        for paused in [false, true, true, true, false, false, true] {
            case.pause(what.clone(), paused).await;
        }
    }
    case.set_clock(10);
    let second = std::time::Duration::from_secs(1);
    let everything = Retention { payload: second, dead: None, audit: second, batch: 100 };
    let forgotten = case.journal.forget(everything).await.unwrap();
    assert_eq!(forgotten.audit, 6, "paused, resumed and paused again, both of them");
    assert_eq!(case.journal.paused().await.unwrap().len(), 2);
}

async fn only_the_latest_orders_and_attempts_of_an_event_are_shown<J: WholeJournal>(case: Case<J>) {
    let (orders, event) = (route("orders"), case.append(routed("evt_1", &["orders"])).await);
    let (tries, retries) = (ATTEMPTS_SHOWN + 3, u64::from(ORDERS_SHOWN) + 5);
    for _ in 0..tries {
        case.run_one(&orders, Verdict::RetryAt(at(0), failed("busy"))).await;
    }
    for _ in 0..retries {
        case.journal.order(order(event, Verb::Retry)).await.unwrap();
    }
    case.journal.order(order(event, Verb::Skip)).await.unwrap();
    let story = case.story(event).await;
    let actions: Vec<&str> = story.audit.iter().map(|entry| entry.action.as_str()).collect();
    assert_eq!((actions.len(), story.audit_total), (ORDERS_SHOWN as usize, retries + 1));
    assert!(actions.ends_with(&["retry", "skip"]), "the latest, oldest first: {actions:?}");
    let shown = &story.event.deliveries[0];
    assert_eq!(shown.attempt, tries);
    let numbers: Vec<u32> = shown.attempts.iter().map(|attempt| attempt.number).collect();
    let latest: Vec<u32> = (4..=shown.attempt).collect();
    assert_eq!(numbers, latest);
}
