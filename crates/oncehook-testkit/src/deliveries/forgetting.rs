//! Forgetting: what is pending never, what is dead or held only if the operator said so, and keys after their events
//! (fault 40, R32, R33).

use std::time::Duration;

use oncehook::delivery::Verdict;
use oncehook::event::NewEvent;
use oncehook::journal::{EventQuery, EventStatus, Forgotten, Retention, Verdict as Decision};
use oncehook_verify::Quarantine;

use super::*;

pub(super) async fn exercise<J: WholeJournal>(subject: &Subject<J>) {
    run(subject, fault_18_a_clock_that_jumps_erases_nothing).await;
    run(subject, a_doubted_clock_is_believed_when_the_operator_says_so_or_it_has_lasted).await;
    run(subject, keys_that_are_stored_while_the_clock_is_set_back_are_remembered_as_long_as_others).await;
    run(subject, fault_18_an_event_of_a_clock_that_ran_ahead_keeps_nothing_behind_it).await;
    run(subject, what_is_done_goes_after_its_time).await;
    run(subject, what_is_pending_is_never_forgotten).await;
    run(subject, the_dead_and_the_held_stay_until_the_operator_says_otherwise).await;
    run(subject, fault_40_keys_outlive_their_events).await;
    run(subject, keys_outlive_their_window_while_an_effect_may_come).await;
    run(subject, forgetting_goes_in_small_steps).await;
    run(subject, the_audit_is_forgotten_too).await;
}

const DAY: i64 = 86_400;

const RETENTION: Retention = Retention {
    payload: Duration::from_secs(30 * DAY.unsigned_abs()),
    dead: None,
    audit: Duration::from_secs(365 * DAY.unsigned_abs()),
    batch: 1_000,
};

/// An event whose key is remembered for 35 days from the start.
fn remembered(key: &str, routes: &[&str]) -> NewEvent {
    NewEvent { expires_at: at(35 * DAY), ..routed(key, routes) }
}

/// Forgets until there is nothing more to do, however far the clock has jumped. Returns the sums.
async fn forget_all<J: WholeJournal>(case: &Case<J>, retention: Retention) -> Forgotten {
    let mut sum = Forgotten::default();
    for _ in 0..100 {
        let step = case.journal.forget(retention).await.unwrap();
        if step.stopped.is_some() {
            assert_eq!(step, Forgotten { stopped: step.stopped, ..Forgotten::default() });
            case.trust_clock().await;
            continue;
        }
        assert!(step.events <= retention.batch && step.keys <= retention.batch && step.audit <= retention.batch);
        sum.events += step.events;
        sum.keys += step.keys;
        sum.audit += step.audit;
        if !step.more {
            return sum;
        }
    }
    panic!("there is always more to forget");
}

fn forgotten(events: usize, keys: usize) -> Forgotten {
    Forgotten { events, keys, ..Forgotten::default() }
}

/// Fifty events that were forgotten by now if the clock were right about the 40 days.
async fn fifty<J: WholeJournal>(case: &Case<J>) {
    assert_eq!(forget_all(case, RETENTION).await, forgotten(0, 0));
    for number in 0..50 {
        case.append(remembered(&format!("evt_{number}"), &[])).await;
    }
}

/// Nothing is forgotten, however often the janitor comes, and every copy is a duplicate.
async fn nothing_goes<J: WholeJournal>(case: &Case<J>) {
    for _ in 0..5 {
        let step = case.journal.forget(RETENTION).await.unwrap();
        assert!(step.stopped.is_some());
        assert_eq!((step.events, step.keys, step.audit, step.more), (0, 0, 0, false));
    }
    for number in 0..50 {
        let copy = NewEvent { received_at: case.clock.now(), ..remembered(&format!("evt_{number}"), &[]) };
        assert_eq!(append_one(&*case.journal, copy).await.verdict, Decision::Duplicate);
    }
}

async fn fault_18_a_clock_that_jumps_erases_nothing<J: WholeJournal>(case: Case<J>) {
    fifty(&case).await;
    for jump in [40 * DAY, 400 * DAY, -40 * DAY] {
        case.set_clock(jump);
        nothing_goes(&case).await;
        // An event of that time is no witness for it.
        let new = NewEvent { received_at: at(jump), ..remembered(&format!("new_{jump}"), &[]) };
        case.append(new).await;
        nothing_goes(&case).await;
        // Right again.
        case.set_clock(3_600);
        let step = case.journal.forget(RETENTION).await.unwrap();
        assert_eq!((step.stopped, step.keys), (None, 0));
    }
}

async fn a_doubted_clock_is_believed_when_the_operator_says_so_or_it_has_lasted<J: WholeJournal>(case: Case<J>) {
    fifty(&case).await;
    case.set_clock(31 * DAY);
    nothing_goes(&case).await;
    case.trust_clock().await;
    assert_eq!(forget_all(&case, RETENTION).await, forgotten(50, 0));
    // Off for nine days. Three of running, and it is believed.
    let mut hours = 40 * 24;
    while case.journal.forget(RETENTION).await.unwrap().stopped.is_some() || hours == 40 * 24 {
        case.set_clock(hours * 3_600);
        hours += 1;
    }
    assert_eq!(hours, 43 * 24 + 1);
    let again = NewEvent { received_at: at(hours * 3_600), ..remembered("evt_0", &[]) };
    forget_all(&case, RETENTION).await;
    assert_eq!(append_one(&*case.journal, again).await.verdict, Decision::New, "its window is over");
}

async fn keys_that_are_stored_while_the_clock_is_set_back_are_remembered_as_long_as_others<J: WholeJournal>(
    case: Case<J>,
) {
    fifty(&case).await;
    case.set_clock(-40 * DAY);
    let window = |key: &str, received| NewEvent {
        received_at: at(received),
        expires_at: at(received + 35 * DAY),
        ..routed(key, &[])
    };
    let stored = append_one(&*case.journal, window("early", -40 * DAY)).await;
    assert!(stored.expires_at >= UnixMicros(at(35 * DAY).0 - 1_000_000), "{stored:?}");
    // The clock is right again, and the window of the key is not over.
    case.set_clock(3_600);
    assert_eq!(forget_all(&case, RETENTION).await.keys, 0);
    let copy = append_one(&*case.journal, window("early", 3_600)).await;
    assert_eq!((copy.verdict, copy.id), (Decision::Duplicate, stored.id));
}

/// Events stand in the order of their ids. Behind one that came while the clock was 40 days ahead, all others came
/// earlier than it.
async fn fault_18_an_event_of_a_clock_that_ran_ahead_keeps_nothing_behind_it<J: WholeJournal>(case: Case<J>) {
    let window = |key: &str, received| NewEvent {
        received_at: at(received),
        expires_at: at(received + 35 * DAY),
        ..routed(key, &[])
    };
    assert_eq!(forget_all(&case, RETENTION).await, forgotten(0, 0));
    case.append(window("before", 0)).await;
    let mut ahead = Vec::new();
    for (number, clock) in [40, 1, 20, 2].into_iter().enumerate() {
        case.set_clock(clock * DAY);
        let event = case.append(window(&format!("evt_{number}"), clock * DAY)).await;
        ahead.extend((clock >= 20).then_some(event));
    }
    case.set_clock(2 * DAY + 3_600);
    let pending = NewEvent { routes: [named("slow")].into_iter().collect(), ..window("pending", 2 * DAY) };
    let pending = case.append(pending).await;
    case.append(window("last", 2 * DAY)).await;
    let small = Retention { batch: 1, ..RETENTION };
    case.set_clock(33 * DAY);
    assert_eq!(forget_all(&case, small).await, forgotten(4, 0), "before, evt_1, evt_3 and last");
    for event in ahead.into_iter().chain([pending]) {
        assert!(case.journal.show(event).await.unwrap().is_some());
    }
    // What is gone still has its key: its window began by the id, which ran ahead.
    let copy = append_one(&*case.journal, window("evt_3", 33 * DAY)).await;
    assert_eq!(copy.verdict, Decision::Duplicate);
}

async fn what_is_done_goes_after_its_time<J: WholeJournal>(case: Case<J>) {
    let applied = case.append(remembered("applied", &["orders"])).await;
    case.run_one(&route("orders"), Verdict::Succeeded(Some("7".to_owned()))).await;
    let skipped = case.append(remembered("skipped", &["orders"])).await;
    case.journal.order(order(skipped, Verb::Skip)).await.unwrap();
    let unrouted = case.append(remembered("unrouted", &[])).await;
    let later = NewEvent { received_at: at(1), ..remembered("later", &[]) };
    let later = case.append(later).await;
    case.clock.set(UnixMicros(at(30 * DAY).0 - 1));
    assert_eq!(forget_all(&case, RETENTION).await, forgotten(0, 0));
    case.set_clock(30 * DAY);
    assert_eq!(forget_all(&case, RETENTION).await, forgotten(3, 0));
    for event in [applied, skipped, unrouted] {
        assert!(case.journal.show(event).await.unwrap().is_none());
        assert!(case.journal.body(event).await.unwrap().is_none());
        assert!(case.journal.order(order(event, Verb::Replay)).await.is_err());
    }
    assert!(case.journal.show(later).await.unwrap().is_some());
    let query = EventQuery { limit: 10, ..Default::default() };
    assert_eq!(case.journal.list(query).await.unwrap().events.len(), 1);
    assert_eq!(case.journal.stats().await.unwrap().sources[0].events, 4, "the counts stay");
    assert_eq!(case.journal.backlog().await.unwrap(), []);
}

async fn what_is_pending_is_never_forgotten<J: WholeJournal>(case: Case<J>) {
    let ready = case.append(remembered("ready", &["slow"])).await;
    let retrying = case.append(remembered("retrying", &["orders"])).await;
    case.run_one(&route("orders"), Verdict::RetryAt(at(1), failed("busy"))).await;
    let running = case.append(remembered("running", &["mail"])).await;
    let fence = case.claim_one(&route("mail")).await;
    // One route is done, the other is not.
    let half = case.append(remembered("half", &["done", "slow"])).await;
    case.run_one(&route("done"), succeeded()).await;
    case.append(remembered("last", &[])).await;
    case.set_clock(9_999 * DAY);
    let forgetful = Retention { payload: Duration::ZERO, dead: Some(Duration::ZERO), ..RETENTION };
    assert_eq!(forget_all(&case, forgetful).await, forgotten(1, 1));
    for event in [ready, retrying, running, half] {
        assert!(case.journal.show(event).await.unwrap().is_some());
    }
    for key in ["ready", "retrying", "running", "half"] {
        let again = append_one(&*case.journal, remembered(key, &["orders"])).await;
        assert_eq!(again.verdict, Decision::Duplicate, "{key}");
    }
    // Once they are done they go.
    assert_eq!(case.settle(&fence, succeeded()).await, Settled::Done);
    case.run_one(&route("orders"), succeeded()).await;
    let slow = case.claim(&route("slow")).await;
    for claim in slow {
        case.settle(&claim.fence, succeeded()).await;
    }
    assert_eq!(forget_all(&case, forgetful).await, forgotten(4, 4));
}

async fn the_dead_and_the_held_stay_until_the_operator_says_otherwise<J: WholeJournal>(case: Case<J>) {
    let letter = case.append(remembered("dead", &["orders", "mail"])).await;
    case.run_one(&route("mail"), dead("no")).await;
    case.set_clock(10 * DAY);
    case.run_one(&route("orders"), dead("no")).await;
    let hold = NewEvent { quarantine: Some(Quarantine::AmbiguousJson), ..remembered("held", &["orders"]) };
    let held = case.append(hold).await;
    let mixed = case.append(remembered("mixed", &["orders", "mail"])).await;
    case.run_one(&route("mail"), dead("no")).await;
    case.set_clock(9_999 * DAY);
    assert_eq!(forget_all(&case, RETENTION).await, forgotten(0, 0));
    for (key, event) in [("dead", letter), ("held", held), ("mixed", mixed)] {
        let again = append_one(&*case.journal, remembered(key, &["orders"])).await;
        assert_eq!((again.id, again.verdict), (event, Decision::Duplicate));
    }
    // Ninety days: from the last death, from the receipt of what is held, and never shorter than the payload.
    let ninety = Retention { dead: Some(Duration::from_secs(90 * DAY.unsigned_abs())), ..RETENTION };
    case.clock.set(UnixMicros(at(90 * DAY).0 - 1));
    assert_eq!(forget_all(&case, ninety).await, forgotten(0, 0));
    case.set_clock(90 * DAY);
    assert_eq!(forget_all(&case, ninety).await, forgotten(1, 1));
    assert!(case.journal.show(held).await.unwrap().is_none());
    case.clock.set(UnixMicros(at(100 * DAY).0 - 1));
    assert_eq!(forget_all(&case, ninety).await, forgotten(0, 0));
    case.set_clock(100 * DAY);
    assert_eq!(forget_all(&case, ninety).await, forgotten(1, 1));
    assert!(case.journal.show(letter).await.unwrap().is_none());
    assert_eq!(case.story(mixed).await.event.status, EventStatus::Dead, "a part of it is pending");
    let soon = Retention { dead: Some(Duration::ZERO), ..RETENTION };
    let young = NewEvent { received_at: at(100 * DAY), ..remembered("young", &["x"]) };
    let young = case.append(young).await;
    case.run_one(&route("x"), dead("no")).await;
    assert_eq!(forget_all(&case, soon).await, forgotten(0, 0));
    assert!(case.journal.show(young).await.unwrap().is_some());
}

async fn fault_40_keys_outlive_their_events<J: WholeJournal>(case: Case<J>) {
    let event = case.append(remembered("evt_1", &["orders"])).await;
    case.run_one(&route("orders"), succeeded()).await;
    case.set_clock(31 * DAY);
    assert_eq!(forget_all(&case, RETENTION).await, forgotten(1, 0));
    // Fault 23: the copy would be remembered for longer, if it were the first.
    let late = NewEvent { received_at: at(31 * DAY), expires_at: at(66 * DAY), ..remembered("evt_1", &["orders"]) };
    let late = append_one(&*case.journal, late).await;
    assert_eq!((late.id, late.verdict), (event, Decision::Duplicate));
    let other =
        NewEvent { routes: [named("orders")].into_iter().collect(), ..crate::journal::event("evt_1", "another body") };
    let other = append_one(&*case.journal, other).await;
    assert_eq!((other.id, other.verdict), (event, Decision::Conflict));
    assert_eq!(case.claim(&route("orders")).await.len(), 0);
    assert!(case.journal.show(event).await.unwrap().is_none(), "a copy brings nothing back");
    let counts = case.journal.stats().await.unwrap().sources.remove(0);
    assert_eq!((counts.events, counts.duplicates, counts.conflicts), (1, 1, 1));
    // The window is anchored at the first receipt: the copy did not prolong it.
    case.clock.set(UnixMicros(at(35 * DAY).0 - 1));
    assert_eq!(forget_all(&case, RETENTION).await, forgotten(0, 0));
    case.set_clock(35 * DAY);
    assert_eq!(forget_all(&case, RETENTION).await, forgotten(0, 1));
    let anew = NewEvent { received_at: at(35 * DAY), ..remembered("evt_1", &["orders"]) };
    let anew = append_one(&*case.journal, anew).await;
    assert_eq!(anew.verdict, Decision::New);
    assert_ne!(anew.id, event);
    assert_eq!(case.claim(&route("orders")).await.len(), 1);
}

async fn keys_outlive_their_window_while_an_effect_may_come<J: WholeJournal>(case: Case<J>) {
    let patient = Retention { payload: Duration::from_secs(90 * DAY.unsigned_abs()), ..RETENTION };
    let applied = case.append(remembered("applied", &["orders"])).await;
    case.run_one(&route("orders"), succeeded()).await;
    let letter = case.append(remembered("dead", &["orders"])).await;
    case.run_one(&route("orders"), dead("no")).await;
    let hold = NewEvent { quarantine: Some(Quarantine::AmbiguousJson), ..remembered("held", &["orders"]) };
    case.append(hold).await;
    case.append(remembered("pending", &["slow"])).await;
    case.set_clock(40 * DAY);
    // The window is over and nothing more can come of the first: its key goes, though its body is still kept.
    assert_eq!(forget_all(&case, patient).await, forgotten(0, 1));
    assert!(case.journal.show(applied).await.unwrap().is_some());
    assert_eq!(append_one(&*case.journal, remembered("applied", &[])).await.verdict, Decision::New);
    for key in ["dead", "held", "pending"] {
        assert_eq!(append_one(&*case.journal, remembered(key, &[])).await.verdict, Decision::Duplicate, "{key}");
    }
    // A dead letter that is tried again and succeeds lets its key go.
    case.journal.order(order(letter, Verb::Retry)).await.unwrap();
    let young = NewEvent { expires_at: at(99 * DAY), ..remembered("young", &[]) };
    case.append(young).await;
    assert_eq!(forget_all(&case, patient).await, forgotten(0, 1), "only the second key of that name");
    case.run_one(&route("orders"), succeeded()).await;
    assert_eq!(forget_all(&case, patient).await, forgotten(0, 1));
}

async fn forgetting_goes_in_small_steps<J: WholeJournal>(case: Case<J>) {
    // Old ones that stay stand before, between and after the ones that go.
    for number in 0..30 {
        let routes: &[&str] = if number % 3 == 0 || number < 8 { &["slow"] } else { &[] };
        case.append(remembered(&format!("evt_{number:02}"), routes)).await;
    }
    let gone = (8..30).filter(|number| number % 3 != 0).count();
    let small = Retention { batch: 4, ..RETENTION };
    // First the events, and later their keys.
    for (day, events, keys) in [(31, gone, 0), (40, 0, gone)] {
        case.set_clock(day * DAY);
        case.trust_clock().await;
        let step = case.journal.forget(small).await.unwrap();
        assert!(step.events <= 4 && step.keys <= 4 && step.more, "{step:?}");
        let rest = forget_all(&case, small).await;
        assert_eq!((step.events + rest.events, step.keys + rest.keys), (events, keys));
    }
    let query = EventQuery { limit: 100, ..Default::default() };
    let left = case.journal.list(query).await.unwrap().events;
    assert_eq!(left.len(), 30 - gone);
    assert!(left.iter().all(|event| event.status == EventStatus::Ready));
}

async fn the_audit_is_forgotten_too<J: WholeJournal>(case: Case<J>) {
    let event = case.append(remembered("evt_1", &[])).await;
    for day in 0..=10 {
        case.set_clock(day * DAY);
        assert_eq!(case.journal.forget(RETENTION).await.unwrap().stopped, None, "a day is no jump");
        let late: &[&str] = match day {
            0 => &["a", "b"],
            10 => &["c"],
            _ => &[],
        };
        for route in late {
            case.journal.order(order_for(event, Verb::Replay, &[route])).await.unwrap();
        }
    }
    case.pause(Pausable::Route("orders".to_owned()), true).await;
    let keep = |days: u64| Retention { audit: Duration::from_secs(days * DAY.unsigned_abs()), ..RETENTION };
    assert_eq!(forget_all(&case, keep(11)).await.audit, 0);
    assert_eq!(forget_all(&case, keep(10)).await.audit, 2);
    assert_eq!(case.story(event).await.audit.len(), 1);
    let pause_and_order = Retention { batch: 1, ..keep(0) };
    assert_eq!(forget_all(&case, pause_and_order).await.audit, 2);
    assert_eq!(case.story(event).await.audit, []);
    assert_eq!(case.journal.paused().await.unwrap().len(), 1, "what is paused stays so");
}
