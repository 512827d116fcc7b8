//! Effects in a database that is not the journal's: the guard there makes them happen once, whatever was lost in between. Each
//! scenario runs on PostgreSQL and on MariaDB.
//!
//! The tables have no unique keys on purpose. Whatever happens twice stands there twice.

/// Each scenario on both engines.
macro_rules! on_both {
    ($($scenario:ident),* $(,)?) => {
        mod on_postgres {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $scenario() {
                super::$scenario($crate::elsewhere::shop::Engine::Postgres).await;
            })*
        }
        mod on_mysql {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $scenario() {
                super::$scenario($crate::elsewhere::shop::Engine::Mysql).await;
            })*
        }
    };
}

mod memory;
mod shop;

use std::sync::Arc;
use std::time::Duration;

use oncehook::clock::Clock;
use oncehook::delivery::{Claim, DeliveryId, Fence, Settled, Verdict};
use oncehook::event::NewEvent;
use oncehook::handler::Handler;
use oncehook::handler::elsewhere::{Applied, Round, Voided};
use oncehook::journal::{Deliveries, EventQuery, JournalReader};
use oncehook::route::Routes;
use oncehook_testkit::journal::{append, event};
use oncehook_verify::UnixMicros;

use shop::{Database, Duel, Engine, LEASE, Server, Shop, name, payment, task};

on_both!(
    r20_r22_r25_an_effect_in_another_database_happens_once_and_its_follow_up_knows_its_result,
    fault_50_a_poison_event_in_another_database_costs_only_itself,
    r20_a_crash_between_the_commits_is_resolved_by_the_guard_and_the_result_is_not_lost,
    fault_17_fault_41_a_zombie_in_another_database_commits_nothing,
    fault_41_what_was_given_up_stays_without_effect_until_a_later_attempt,
    fault_41_a_zombie_in_the_middle_of_its_transaction_is_waited_for,
    r27_a_lost_last_attempt_is_looked_up_before_its_delivery_is_dead,
    r28_a_database_that_is_down_makes_no_dead_letters,
    fault_105_guards_that_were_changed_are_an_error_and_nothing_is_lost,
    r33_guards_are_forgotten_when_they_are_old_and_their_deliveries_settled,
    r20_guards_of_another_shape_are_refused_and_left_alone,
    r20_gateways_that_begin_at_once_make_the_guards_once,
    r25_large_results_of_a_batch_are_kept_in_their_guards,
);

async fn r20_r22_r25_an_effect_in_another_database_happens_once_and_its_follow_up_knows_its_result(engine: Engine) {
    let shop = Shop::shared(engine);
    let routes = Routes::new(vec![shop.orders(), shop.mails()]).unwrap();
    let worker = shop.work(&routes);
    for number in 0..300 {
        append(&*shop.journal, [payment(number)]).await;
        append(&*shop.journal, [payment(number)]).await;
    }
    shop.drained().await;
    worker.stop().await;
    assert_eq!(shop.count("SELECT count(*) FROM orders"), 300);
    assert_eq!(shop.count("SELECT count(DISTINCT payment) FROM orders WHERE concat('pi_', amount) = payment"), 300);
    let paired = "SELECT count(DISTINCT order_id) FROM mails JOIN orders ON id = order_id AND event_key = concat('evt_', amount)";
    assert_eq!((shop.count("SELECT count(*) FROM mails"), shop.count(paired)), (300, 300));
    // A batch that met another transaction's lock is given back, and its next attempt has the next number.
    assert_eq!(shop.count("SELECT count(*) FROM GUARDS WHERE NOT void AND attempt >= 1"), 600);
}

async fn fault_50_a_poison_event_in_another_database_costs_only_itself(engine: Engine) {
    let shop = Shop::shared(engine);
    let mut events: Vec<NewEvent> = (0..200).map(payment).collect();
    let poison = |key: &str, body: &str| NewEvent { routes: payment(0).routes, ..event(key, body) };
    events.insert(10, poison("nowhere", r#"{"amount":1}"#));
    events.insert(90, poison("null", r#"{"payment":null,"amount":1}"#));
    events.insert(150, poison("text", r#"{"payment":"x","amount":"many"}"#));
    append(&*shop.journal, events).await;
    let worker = shop.work(&Routes::new(vec![shop.orders()]).unwrap());
    shop.drained().await;
    worker.stop().await;
    assert_eq!(shop.count("SELECT count(*) FROM orders"), 200);
    assert_eq!(shop.count("SELECT count(DISTINCT payment) FROM orders"), 200);
    let page = shop.journal.list(EventQuery { limit: 1_000, ..EventQuery::default() }).await.unwrap();
    let mut dead: Vec<(String, u32)> = page
        .events
        .iter()
        .filter(|event| event.deliveries[0].state == "dead")
        .map(|event| (event.key.display().to_string(), event.deliveries[0].attempt))
        .collect();
    dead.sort();
    let dead: Vec<(&str, u32)> = dead.iter().map(|(key, attempt)| (key.as_str(), *attempt)).collect();
    assert_eq!(dead, [("nowhere", 1), ("null", 3), ("text", 3)]);
    // None of them can come back by an attempt that was forgotten.
    assert_eq!(shop.count("SELECT count(*) FROM GUARDS WHERE void"), 3);
}

async fn r20_a_crash_between_the_commits_is_resolved_by_the_guard_and_the_result_is_not_lost(engine: Engine) {
    let duel = Duel::new(engine);
    append(&*duel.shop.journal, [payment(7)]).await;
    let first = duel.claim().await;
    let result = Some(r#"{"id":1,"payment":"pi_7"}"#.to_owned());
    assert_eq!(duel.apply(&first).await, Applied::Done(result.clone()));
    // The process dies here. Meanwhile somebody changes the table so that the statement cannot even be prepared.
    duel.lose().await;
    duel.shop.database.query("ALTER TABLE orders RENAME COLUMN amount TO cents");
    let fresh = duel.shop.database.open();
    let second = duel.claim().await;
    let claims = std::slice::from_ref(&second);
    assert_eq!(fresh.apply(duel.task(), claims).await, [Applied::Done(result.clone())]);
    assert_eq!(duel.settle(&second, Verdict::Succeeded(result.clone())).await, Settled::Done);
    let worker = duel.shop.work(&Routes::new(vec![duel.shop.orders(), duel.shop.mails()]).unwrap());
    duel.shop.drained().await;
    worker.stop().await;
    assert_eq!(duel.shop.database.query("SELECT order_id, event_key FROM mails"), "1|evt_7");
    assert_eq!(duel.shop.count("SELECT count(*) FROM orders"), 1);
}

async fn fault_17_fault_41_a_zombie_in_another_database_commits_nothing(engine: Engine) {
    let duel = Duel::new(engine);
    append(&*duel.shop.journal, [payment(1)]).await;
    let frozen = duel.claim().await;
    duel.lose().await;
    let second = duel.claim().await;
    let Applied::Done(result) = duel.apply(&second).await else { panic!() };
    // It wakes before the second has settled, and again after.
    assert_eq!(duel.apply(&frozen).await, Applied::Done(result.clone()));
    assert_eq!(duel.settle(&frozen, Verdict::Succeeded(result.clone())).await, Settled::Lost);
    assert_eq!(duel.settle(&second, Verdict::Succeeded(result.clone())).await, Settled::Done);
    assert_eq!(duel.apply(&frozen).await, Applied::Done(result));
    assert_eq!(duel.shop.count("SELECT count(*) FROM orders"), 1);
}

async fn fault_41_what_was_given_up_stays_without_effect_until_a_later_attempt(engine: Engine) {
    let duel = Duel::new(engine);
    append(&*duel.shop.journal, [payment(1)]).await;
    let zombie = duel.claim().await;
    duel.lose().await;
    let second = duel.claim().await;
    assert_eq!(duel.void(&second).await, Voided::Done);
    // Neither the one that gave up, nor one before it.
    assert_eq!(duel.apply(&zombie).await, Applied::Void);
    assert_eq!(duel.apply(&second).await, Applied::Void);
    assert_eq!(duel.void(&zombie).await, Voided::Done);
    assert_eq!(duel.apply(&second).await, Applied::Void);
    assert_eq!(duel.shop.count("SELECT count(*) FROM orders"), 0);
    // An operator's retry is a later attempt.
    duel.lose().await;
    let third = duel.claim().await;
    let Applied::Done(result) = duel.apply(&third).await else { panic!() };
    assert_eq!(duel.void(&third).await, Voided::TookEffect(result.clone()));
    assert_eq!(duel.apply(&zombie).await, Applied::Done(result));
    assert_eq!(duel.shop.count("SELECT count(*) FROM orders"), 1);
}

/// A zombie whose transaction is open: whoever comes later waits for it, and neither does it twice.
async fn fault_41_a_zombie_in_the_middle_of_its_transaction_is_waited_for(engine: Engine) {
    let duel = Duel::new(engine);
    append(&*duel.shop.journal, [payment(1)]).await;
    let first = duel.claim().await;
    let delivery = &first.fence.delivery;
    let (event, now, sleep) = match engine {
        Engine::Postgres => (format!("'{}'", delivery.event), "now()", "pg_sleep"),
        Engine::Mysql => (format!("UNHEX(REPLACE('{}', '-', ''))", delivery.event), "0", "sleep"),
    };
    let (route, epoch) = (&delivery.route, delivery.epoch);
    let guard = format!("INSERT INTO GUARDS VALUES ({event}, '{route}', {epoch}, 1, false, '{{\"id\":0}}', 7, {now})");
    // Makes the table.
    duel.statements.database.apply(duel.task(), &[]).await;
    let held = |seconds: u32| format!("BEGIN; {guard}; SELECT {sleep}({seconds}); COMMIT");
    let holder = |seconds: u32| {
        let (database, sql) = (duel.shop.database.clone(), held(seconds));
        tokio::task::spawn_blocking(move || database.query(&sql))
    };
    duel.lose().await;
    let second = duel.claim().await;
    // Longer than anybody waits: it is nobody's failure, and nothing happened.
    let zombie = holder(20);
    wait_for_sleeper(&duel.shop.database).await;
    assert_eq!(duel.apply(&second).await, Applied::Collided);
    assert!(duel.shop.database.open().void(7, std::slice::from_ref(&second.fence)).await.is_err());
    zombie.await.unwrap();
    assert_eq!(duel.apply(&second).await, Applied::Done(Some("{\"id\":0}".to_owned())));
    assert_eq!(duel.shop.count("SELECT count(*) FROM orders"), 0);
}

async fn wait_for_sleeper(database: &Database) {
    let sleeping = match database {
        Database::Postgres(_) => {
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND datname = current_database()"
        }
        Database::Mysql(_) => {
            "SELECT count(*) FROM information_schema.PROCESSLIST WHERE STATE = 'User sleep' AND DB = DATABASE()"
        }
    };
    while database.query(sleeping) == "0" {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// The last attempt is lost, so nobody knows what came of it: the next one asks, and only then is it dead.
async fn r27_a_lost_last_attempt_is_looked_up_before_its_delivery_is_dead(engine: Engine) {
    for took_effect in [true, false] {
        let duel = Duel::new(engine);
        let id = append(&*duel.shop.journal, [payment(1)]).await[0].id;
        for _ in 0..2 {
            duel.claim().await;
            duel.lose().await;
        }
        let last = duel.claim().await;
        assert_eq!((last.fence.attempt, last.attempt_limit), (3, 3));
        if took_effect {
            assert!(matches!(duel.apply(&last).await, Applied::Done(Some(_))));
        }
        duel.lose().await;
        assert_eq!(duel.shop.delivery("orders").await.state, "retrying");
        let worker = duel.shop.work(&Routes::new(vec![duel.shop.orders(), duel.shop.mails()]).unwrap());
        duel.shop.drained().await;
        let delivery = duel.shop.delivery("orders").await;
        let expected = if took_effect { "succeeded" } else { "dead" };
        assert_eq!((delivery.state.as_str(), delivery.attempt), (expected, 4), "{delivery:?}");
        assert_eq!(duel.shop.count("SELECT count(*) FROM orders"), i64::from(took_effect));
        // What is dead takes no effect by whom it was lost, and an operator can still have it.
        assert_eq!(duel.shop.count("SELECT count(*) FROM GUARDS WHERE void"), i64::from(!took_effect));
        if !took_effect {
            assert_eq!(duel.apply(&last).await, Applied::Void);
            duel.shop.retry(id).await;
            duel.shop.drained().await;
            assert_eq!(duel.shop.delivery("orders").await.state, "succeeded");
        }
        worker.stop().await;
        assert_eq!(duel.shop.count("SELECT count(*) FROM orders"), 1);
        assert_eq!(duel.shop.count("SELECT count(*) FROM mails"), 1);
    }
}

/// The database is away for longer than all attempts would last: nothing is dead, and it goes on by itself.
async fn r28_a_database_that_is_down_makes_no_dead_letters(engine: Engine) {
    let server = Server::start(engine);
    let shop = Shop::new(&server, Clock::system());
    let routes = Routes::new(vec![shop.orders(), shop.mails()]).unwrap();
    let worker = shop.work(&routes);
    append(&*shop.journal, (0..20).map(payment)).await;
    shop.drained().await;
    server.crash();
    append(&*shop.journal, (20..220).map(payment)).await;
    // All attempts of a delivery take 150 ms at most, and the breaker rests for 100.
    for _ in 0..100 {
        tokio::time::sleep(Duration::from_millis(50)).await;
        let backlog = shop.journal.backlog().await.unwrap();
        let orders = backlog.iter().find(|route| route.route == "orders").unwrap();
        assert_eq!((orders.waiting + orders.running, orders.dead), (200, 0));
        if worker.handle().breaker("orders") != "closed" {
            break;
        }
    }
    assert_ne!(worker.handle().breaker("orders"), "closed");
    tokio::time::sleep(Duration::from_secs(2)).await;
    // What is wrong can be seen.
    let page = shop.journal.list(EventQuery { limit: 1_000, ..EventQuery::default() }).await.unwrap();
    let told = page.events.iter().filter_map(|event| event.deliveries[0].error.clone()).next().unwrap();
    let (place, user) = match engine {
        Engine::Postgres => ("postgres://127.0.0.1", "postgres@"),
        Engine::Mysql => ("mysql://127.0.0.1", "root@"),
    };
    assert!(told.contains(place) && !told.contains(user), "{told}");
    server.restart();
    shop.drained().await;
    worker.stop().await;
    assert_eq!(shop.count("SELECT count(*) FROM orders"), 220);
    assert_eq!(shop.count("SELECT count(DISTINCT payment) FROM orders"), 220);
    assert_eq!(shop.count("SELECT count(*) FROM mails"), 220);
}

async fn fault_105_guards_that_were_changed_are_an_error_and_nothing_is_lost(engine: Engine) {
    // What is done to the table, how it is undone, and what one that starts says about it. The last one is found by those
    // that start only.
    let postgres = [
        ("ALTER TABLE GUARDS RENAME TO gone", "ALTER TABLE oncehook_guard.gone RENAME TO oncehook_applied", ""),
        (
            "ALTER TABLE GUARDS DROP CONSTRAINT applied_once",
            "ALTER TABLE GUARDS ADD CONSTRAINT applied_once PRIMARY KEY (event, route, epoch)",
            "key applied_once (event,route,epoch)",
        ),
        (
            "ALTER TABLE GUARDS RENAME COLUMN result TO x",
            "ALTER TABLE GUARDS RENAME COLUMN x TO result",
            "column result text",
        ),
        ("ALTER TABLE GUARDS SET UNLOGGED", "ALTER TABLE GUARDS SET LOGGED", "table r logged"),
    ];
    let mysql = [
        ("RENAME TABLE GUARDS TO gone", "RENAME TABLE gone TO GUARDS", ""),
        (
            "ALTER TABLE GUARDS DROP PRIMARY KEY",
            "ALTER TABLE GUARDS ADD PRIMARY KEY (event, route, epoch)",
            "key PRIMARY event,route,epoch",
        ),
        (
            "ALTER TABLE GUARDS RENAME COLUMN result TO x",
            "ALTER TABLE GUARDS RENAME COLUMN x TO result",
            "column result mediumtext",
        ),
        ("ALTER TABLE GUARDS ENGINE = MyISAM", "ALTER TABLE GUARDS ENGINE = InnoDB", "table InnoDB"),
    ];
    let (changes, unknown_table) = match engine {
        Engine::Postgres => (postgres, "42P01"),
        Engine::Mysql => (mysql, "1146"),
    };
    for (place, (change, back, told)) in changes.into_iter().enumerate() {
        let shop = Shop::shared(engine);
        let routes = Routes::new(vec![shop.orders()]).unwrap();
        append(&*shop.journal, (0..5).map(payment)).await;
        let worker = shop.work(&routes);
        shop.drained().await;
        worker.stop().await;
        // A running process meets it, and one that starts.
        let running = Arc::clone(&shop.elsewhere);
        shop.database.query(change);
        let starting = shop.database.open();
        append(&*shop.journal, [payment(5)]).await;
        let route = routes.get("orders").unwrap();
        let Handler::Elsewhere(handler) = &route.handler else { panic!() };
        let claims = shop.journal.claim(Arc::clone(route), 1, LEASE).await.unwrap();
        let unreached = |applied: &[Applied], told: &str| {
            let said = matches!(applied, [Applied::Unreached(reason)] if reason.contains(told));
            assert!(said, "{change}: {applied:?}");
        };
        if told.is_empty() {
            // Whoever starts would make a new table; the running one knows that there was one.
            unreached(&running.apply(task(&handler.statements), &claims).await, unknown_table);
            unreached(&running.apply(task(&handler.statements), &claims).await, "is gone");
        } else {
            unreached(&starting.apply(task(&handler.statements), &claims).await, told);
            if place < 3 {
                unreached(&running.apply(task(&handler.statements), &claims).await, "");
            }
        }
        assert_eq!(shop.count("SELECT count(*) FROM orders"), 5, "{change}");
        shop.database.query(back);
        assert!(matches!(running.apply(task(&handler.statements), &claims).await[..], [Applied::Done(_)]), "{change}");
        assert_eq!(shop.count("SELECT count(*) FROM orders"), 6, "{change}");
    }
}

async fn r33_guards_are_forgotten_when_they_are_old_and_their_deliveries_settled(engine: Engine) {
    let duel = Duel::new(engine);
    let (shop, database) = (&duel.shop, &duel.statements.database);
    append(&*shop.journal, (0..6).map(payment)).await;
    let claims = shop.journal.claim(Arc::clone(&duel.route), 10, LEASE).await.unwrap();
    assert!(database.apply(duel.task(), &claims).await.iter().all(|one| matches!(one, Applied::Done(_))));
    for claim in &claims[..3] {
        assert_eq!(duel.settle(claim, Verdict::Succeeded(None)).await, Settled::Done);
    }
    let ids: Vec<DeliveryId> = claims.iter().map(|claim| claim.fence.delivery.clone()).collect();
    let gone = DeliveryId { epoch: 9, ..ids[0].clone() };
    let asked = ids.iter().cloned().chain([gone]).collect();
    assert_eq!(shop.journal.unsettled(asked).await.unwrap(), ids[3..]);

    let second = Duration::from_secs(1);
    let round = |behind: Option<&DeliveryId>, journal: i64, age: Duration, limit: usize| Round {
        route: name("orders"),
        journal,
        behind: behind.cloned(),
        age,
        now: Clock::system().now(),
        limit,
    };
    // Young ones, and those of another gateway, are not old guards.
    assert_eq!(database.aged(&round(None, 7, second * 3_600, 10)).await.unwrap(), []);
    tokio::time::sleep(second * 2).await;
    assert_eq!(database.aged(&round(None, 8, second, 10)).await.unwrap(), []);
    let first = database.aged(&round(None, 7, second, 4)).await.unwrap();
    assert_eq!(first, ids[..4]);
    assert_eq!(database.aged(&round(first.last(), 7, second, 4)).await.unwrap(), ids[4..]);
    // Old by the database's clock only, or by ours only: somebody's clock is wrong.
    let earlier = UnixMicros(Clock::system().now().0 - 40 * 86_400_000_000);
    for (now, age) in [(earlier, second), (UnixMicros(earlier.0 + 400 * 86_400_000_000), second * 40 * 86_400)] {
        let round = Round { now, ..round(None, 7, age, 10) };
        assert_eq!(database.aged(&round).await.unwrap(), []);
    }
    database.forget(&ids[..3]).await.unwrap();
    assert_eq!(database.aged(&round(None, 7, second, 10)).await.unwrap(), ids[3..]);
    // A zombie of one that still has its guard.
    let zombie = Claim { fence: Fence { attempt: 1, ..claims[4].fence.clone() }, ..claims[4].clone() };
    assert!(matches!(duel.apply(&zombie).await, Applied::Done(Some(_))));
    assert_eq!(shop.count("SELECT count(*) FROM orders"), 6);
}

/// Tables that another version made in another way are refused, and left as they are.
async fn r20_guards_of_another_shape_are_refused_and_left_alone(engine: Engine) {
    let duel = Duel::new(engine);
    let database = &duel.shop.database;
    database.query(match engine {
        Engine::Postgres => {
            "CREATE SCHEMA oncehook_guard; CREATE TABLE GUARDS (event integer PRIMARY KEY); INSERT INTO GUARDS VALUES (1)"
        }
        Engine::Mysql => "CREATE TABLE GUARDS (event integer PRIMARY KEY); INSERT INTO GUARDS VALUES (1)",
    });
    append(&*duel.shop.journal, [payment(7)]).await;
    let claim = duel.claim().await;
    for database in [Arc::clone(&duel.statements.database), database.open()] {
        let refused = database.apply(duel.task(), std::slice::from_ref(&claim)).await;
        let said = matches!(&refused[..], [Applied::Unreached(why)] if why.contains("has another shape"));
        assert!(said, "{refused:?}");
    }
    assert_eq!((duel.shop.count("SELECT event FROM GUARDS"), duel.shop.count("SELECT count(*) FROM orders")), (1, 0));
    // The user takes it away, and starts the gateway anew.
    database.query("DROP TABLE GUARDS");
    let applied = database.open().apply(duel.task(), &[claim]).await;
    assert!(matches!(applied[..], [Applied::Done(_)]), "{applied:?}");
}

/// They meet at the making of the tables, and at the guard.
async fn r20_gateways_that_begin_at_once_make_the_guards_once(engine: Engine) {
    let duel = Duel::new(engine);
    append(&*duel.shop.journal, [payment(7)]).await;
    let claims = [duel.claim().await];
    let gateway = async || duel.shop.database.open().apply(duel.task(), &claims).await;
    let (one, two, three, four) = tokio::join!(gateway(), gateway(), gateway(), gateway());
    let applied = [one, two, three, four].concat();
    let done = applied.iter().filter(|applied| matches!(applied, Applied::Done(Some(_)))).count();
    let collided = applied.iter().filter(|applied| **applied == Applied::Collided).count();
    assert!(done > 0 && done + collided == 4, "{applied:?}");
    assert_eq!(
        (duel.shop.count("SELECT count(*) FROM orders"), duel.shop.count("SELECT count(*) FROM GUARDS")),
        (1, 1)
    );
}

/// Together they are more than one statement may carry on MariaDB.
async fn r25_large_results_of_a_batch_are_kept_in_their_guards(engine: Engine) {
    let shop = Shop::shared(engine);
    let insert = "INSERT INTO orders (payment, amount) VALUES (:payment, 1)";
    let statements = shop.returning(insert, r#"id, repeat('"', 30000) AS much"#);
    let orders = shop::route("orders", shop.handler(&statements, &[("payment", "/payment")]));
    let routes = Routes::new(vec![orders]).unwrap();
    let route = routes.get("orders").unwrap();
    let Handler::Elsewhere(handler) = &route.handler else { panic!() };
    append(&*shop.journal, (0..120).map(payment)).await;
    let claims = shop.journal.claim(Arc::clone(route), 120, LEASE).await.unwrap();
    assert_eq!(claims.len(), 120);
    let applied = shop.elsewhere.apply(task(&handler.statements), &claims).await;
    assert!(applied.iter().all(|one| matches!(one, Applied::Done(Some(result)) if result.len() > 60_000)));
    assert_eq!(shop.database.open().apply(task(&handler.statements), &claims).await, applied);
    assert_eq!(shop.count("SELECT count(*) FROM orders"), 120);
}
