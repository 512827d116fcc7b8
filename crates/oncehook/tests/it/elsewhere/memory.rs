//! What a database remembers of entities, beside its guards: versions and states decide there, too.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use oncehook::delivery::{Claim, Fence, Remedy};
use oncehook::handler::elsewhere::{Applied, Comparison, Task};
use oncehook::handler::{Elsewhere, Expression, Handler, SqlHandler};
use oncehook::machine::{Machine, Misfit, Transition};
use oncehook::ordering::{Ordering, Parking};
use oncehook::route::Routes;
use oncehook_testkit::journal::append;

use super::shop::{Duel, Engine, Shop, YEARS, payment, route};

on_both!(
    r29_a_zombie_in_another_database_brings_nothing_older_back,
    r29_entities_with_unusual_names_are_told_apart_in_another_database,
    r30_what_was_superseded_in_another_database_does_not_run_when_its_state_comes_back,
    fault_41_what_waited_too_long_in_another_database_is_void_before_it_is_dead,
    fault_105_a_lost_memory_of_entities_is_an_error,
);

/// The claim of an event about an entity, on the first attempt.
async fn about(duel: &Duel, number: usize, kind: &str, version: Option<i64>) -> Claim {
    append(&*duel.shop.journal, [payment(number)]).await;
    let mut claim = duel.claim().await;
    claim.event.entity = Some("door".to_owned());
    claim.event.kind = Some(kind.to_owned());
    claim.event.version = version;
    claim.event.occurred_at = None;
    claim
}

/// The same claim on another attempt.
fn attempt(claim: &Claim, attempt: u32) -> Claim {
    Claim { fence: Fence { attempt, ..claim.fence.clone() }, ..claim.clone() }
}

async fn compare(duel: &Duel, comparison: &Comparison, claim: &Claim) -> Applied {
    let task = Task { comparison: Some(comparison), ..duel.task() };
    let database = &duel.statements.database;
    database.apply(task, std::slice::from_ref(claim)).await.pop().unwrap()
}

fn newer_only() -> Comparison {
    let rules = Ordering { newer_only: true, ..Ordering::default() };
    Comparison { scope: "orders".to_owned(), rules }
}

async fn r29_a_zombie_in_another_database_brings_nothing_older_back(engine: Engine) {
    let duel = Duel::new(engine);
    let newer_only = newer_only();
    let frozen = about(&duel, 1, "set", Some(1)).await;
    let newer = about(&duel, 2, "set", Some(2)).await;
    assert!(matches!(compare(&duel, &newer_only, &newer).await, Applied::Done(_)));
    // The zombie wakes, and so does whoever came after it.
    for number in [1, 2] {
        let late = compare(&duel, &newer_only, &attempt(&frozen, number)).await;
        assert!(matches!(&late, Applied::Superseded(why) if why.contains("version 2")), "{late:?}");
    }
    // Another entity, another route and another gateway know nothing of it.
    let mut other = about(&duel, 3, "set", Some(1)).await;
    other.event.entity = Some("window".to_owned());
    assert!(matches!(compare(&duel, &newer_only, &other).await, Applied::Done(_)));
    let other = about(&duel, 4, "set", Some(1)).await;
    let scope = Comparison { scope: "others".to_owned(), ..newer_only.clone() };
    assert!(matches!(compare(&duel, &scope, &other).await, Applied::Done(_)));
    let other = about(&duel, 5, "set", Some(1)).await;
    let task = Task { comparison: Some(&newer_only), journal: 8, ..duel.task() };
    let applied = duel.statements.database.apply(task, &[other]).await;
    assert!(matches!(applied[..], [Applied::Done(_)]), "{applied:?}");
    assert_eq!(duel.shop.database.query("SELECT amount FROM orders ORDER BY id"), "2\n3\n4\n5");
}

async fn r29_entities_with_unusual_names_are_told_apart_in_another_database(engine: Engine) {
    let duel = Duel::new(engine);
    let newer_only = newer_only();
    let long = "ü".repeat(127);
    for (place, name) in
        ["a", "A", "a ", "ä", r#"'"\\\"#, "\u{1}\t\n", "🚪", "null", long.as_str()].into_iter().enumerate()
    {
        let mut first = about(&duel, 2 * place, "set", Some(2)).await;
        let mut older = about(&duel, 2 * place + 1, "set", Some(1)).await;
        for claim in [&mut first, &mut older] {
            claim.event.entity = Some(name.to_owned());
        }
        let applied = compare(&duel, &newer_only, &first).await;
        assert!(matches!(applied, Applied::Done(_)), "{name}: {applied:?}");
        let late = compare(&duel, &newer_only, &older).await;
        assert!(matches!(late, Applied::Superseded(_)), "{name}: {late:?}");
    }
    assert_eq!(duel.shop.count("SELECT count(*) FROM orders"), 9);
}

/// A door that is opened and shut: what does not fit now fits again later.
async fn r30_what_was_superseded_in_another_database_does_not_run_when_its_state_comes_back(engine: Engine) {
    let way = |on: &str, from: &str, to: &str| Transition {
        on: on.to_owned(),
        from: vec![from.to_owned()],
        to: to.to_owned(),
    };
    let ways = vec![way("open", "shut", "opened"), way("shut", "opened", "shut")];
    let states = vec!["shut".to_owned(), "opened".to_owned()];
    let machine = |misfit| Machine::new("door", states.clone(), "shut", ways.clone(), misfit).unwrap();
    for misfit in [Misfit::Supersede, Misfit::Park, Misfit::Dead] {
        let duel = Duel::new(engine);
        let rules = Ordering { machine: Some(Arc::new(machine(misfit))), ..Ordering::default() };
        let door = Comparison { scope: "machine:door".to_owned(), rules };
        let first = about(&duel, 1, "open", None).await;
        let second = about(&duel, 2, "open", None).await;
        let shuts = about(&duel, 3, "shut", None).await;
        assert!(matches!(compare(&duel, &door, &first).await, Applied::Done(_)));
        // The second attempt is told; the first one hangs.
        let told = compare(&duel, &door, &attempt(&second, 2)).await;
        match (misfit, &told) {
            (Misfit::Supersede, Applied::Superseded(_)) => {}
            (Misfit::Park, Applied::Failed(failure)) => assert_eq!(failure.remedy, Remedy::Defer),
            (Misfit::Dead, Applied::Failed(failure)) => assert_eq!(failure.remedy, Remedy::GiveUp),
            _ => panic!("{misfit:?}: {told:?}"),
        }
        assert!(matches!(compare(&duel, &door, &shuts).await, Applied::Done(_)));
        // Now it would fit. But of what was told, nothing is true if the first attempt takes effect now.
        assert_eq!(compare(&duel, &door, &second).await, Applied::Void, "{misfit:?}");
        assert_eq!(duel.shop.count("SELECT count(*) FROM orders"), 2);
        // A later attempt may: a parked one is looked at again, a dead one retried.
        assert!(matches!(compare(&duel, &door, &attempt(&second, 3)).await, Applied::Done(_)));
        assert_eq!(duel.shop.count("SELECT count(*) FROM orders"), 3);
    }
}

async fn fault_41_what_waited_too_long_in_another_database_is_void_before_it_is_dead(engine: Engine) {
    let shop = Shop::shared(engine);
    let bind = [("payment", "/payment"), ("amount", "/amount")]
        .map(|(name, from)| (name.to_owned(), Expression::parse(from).unwrap()));
    let insert = ["INSERT INTO orders (payment, amount) VALUES (:payment, :amount)"];
    let dialect = shop.database.dialect();
    let statements =
        SqlHandler::with_requirement("SELECT 1 FROM mails", &insert, &BTreeMap::from(bind), dialect).unwrap();
    let elsewhere = Elsewhere { statements, database: Arc::clone(&shop.elsewhere), keep: YEARS };
    let mut orders = route("orders", Handler::Elsewhere(Arc::new(elsewhere)));
    // Nothing is waited for, so the first look is the last.
    orders.ordering.parking = Parking { longest: Duration::ZERO, every: Duration::from_secs(1) };
    let routes = Routes::new(vec![orders]).unwrap();
    let event = append(&*shop.journal, [payment(1)]).await[0].id;
    let worker = shop.work(&routes);
    shop.drained().await;
    let dead = shop.delivery("orders").await;
    assert_eq!((dead.state.as_str(), dead.attempt), ("dead", 1), "{dead:?}");
    assert_eq!(shop.count("SELECT count(*) FROM GUARDS WHERE void AND attempt = 1"), 1);
    // What it waited for comes after all, and an operator has it tried again.
    shop.database.query("INSERT INTO mails VALUES (0, 'x')");
    shop.retry(event).await;
    shop.drained().await;
    worker.stop().await;
    assert_eq!(shop.delivery("orders").await.state, "succeeded");
    assert_eq!(shop.count("SELECT count(*) FROM orders"), 1);
}

async fn fault_105_a_lost_memory_of_entities_is_an_error(engine: Engine) {
    let duel = Duel::new(engine);
    let database = &duel.shop.database;
    let newer_only = newer_only();
    let newer = about(&duel, 2, "set", Some(2)).await;
    assert!(matches!(compare(&duel, &newer_only, &newer).await, Applied::Done(_)));
    let older = about(&duel, 1, "set", Some(1)).await;
    let (lose, find) = match engine {
        Engine::Postgres => (
            "ALTER TABLE oncehook_guard.oncehook_applied_entities RENAME TO gone",
            "ALTER TABLE oncehook_guard.gone RENAME TO oncehook_applied_entities",
        ),
        Engine::Mysql => {
            ("RENAME TABLE oncehook_applied_entities TO gone", "RENAME TABLE gone TO oncehook_applied_entities")
        }
    };
    database.query(lose);
    for _ in 0..2 {
        let lost = compare(&duel, &newer_only, &older).await;
        assert!(matches!(&lost, Applied::Unreached(why) if why.contains("oncehook_applied_entities")), "{lost:?}");
    }
    database.query(find);
    assert!(matches!(compare(&duel, &newer_only, &older).await, Applied::Superseded(_)));
    // Without its key it would remember twice, or nothing.
    database.query(match engine {
        Engine::Postgres => {
            "ALTER TABLE oncehook_guard.oncehook_applied_entities DROP CONSTRAINT applied_entities_once"
        }
        Engine::Mysql => "ALTER TABLE oncehook_applied_entities DROP PRIMARY KEY",
    });
    for database in [Arc::clone(&duel.statements.database), database.open()] {
        let task = Task { comparison: Some(&newer_only), ..duel.task() };
        let refused = database.apply(task, &[attempt(&older, 2)]).await;
        assert!(matches!(&refused[..], [Applied::Unreached(_)]), "{refused:?}");
    }
    assert_eq!(duel.shop.count("SELECT count(*) FROM orders"), 1);
}
