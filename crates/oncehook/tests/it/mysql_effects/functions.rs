//! Rust functions on MariaDB: what one does through its transaction commits with the record that it happened, or not at all.
//! The server would go on after a statement that failed; a function does not.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use oncehook::delivery::{Cause, Claim, Failure, HandedEvent, Settled};
use oncehook::handler::elsewhere::Answer;
use oncehook::handler::function::MysqlValue;
use oncehook::handler::{MysqlTransaction, OnMysql};
use tokio::sync::Barrier;

use super::*;

/// What a function has; enough on a busy machine.
const TIME: Duration = Duration::from_secs(3);

/// A function whose statements are those of a transaction it cannot end.
fn insert_order<'a>(database: &'a dyn MysqlTransaction, event: &'a HandedEvent) -> Answer<'a, Result<u64, Failure>> {
    Box::pin(async move {
        let key = event.key.display().to_string();
        database.execute("INSERT INTO orders (payment, amount) VALUES (?, 1)", &[key.into()]).await
    })
}

/// A closure that takes what a function is given.
fn function<F>(function: F) -> Handler
where
    F: for<'a> Fn(&'a dyn MysqlTransaction, &'a HandedEvent) -> Answer<'a, Result<Option<serde_json::Value>, Failure>>
        + Send
        + Sync
        + 'static,
{
    Handler::Function(Arc::new(OnMysql::new(function)))
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_15_r20_r25_a_function_on_mysql_commits_with_its_record_and_a_panic_costs_an_attempt() {
    let shop = Shop::with(TIME).await;
    let calls = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&calls);
    let handler = function(move |database, event| {
        let counted = Arc::clone(&counted);
        Box::pin(async move {
            assert_eq!(insert_order(database, event).await?, 1);
            match counted.fetch_add(1, Ordering::SeqCst) {
                0 => panic!("on the first try"),
                1 => Err(Failure::retry(Cause::Handler, "on the second")),
                _ => {
                    let query = "SELECT id FROM orders WHERE payment = ?";
                    let rows = database.query(query, &["evt_1".into()]).await?;
                    let id: i64 = rows[0].get(0).unwrap();
                    Ok(Some(serde_json::json!({ "id": id })))
                }
            }
        })
    });
    let mut mail =
        route("mail", sql(&["INSERT INTO mails VALUES (:order, :key)"], &[("order", "$result/id"), ("key", "$key")]));
    mail.after = Some(name("orders"));
    let routes = Routes::new(vec![route("orders", handler), mail]).unwrap();
    let worker = Shop::work(&shop.journal, &routes);
    append(&*shop.journal, [payment(1)]).await;
    shop.drained().await;
    worker.stop().await;
    assert_eq!(routes.get("orders").unwrap().failures.noted(), 2, "both failures are reported to the log");
    let story = shop.only().await;
    let orders = story.event.deliveries.iter().find(|one| one.route == "orders").unwrap();
    let errors: Vec<_> = orders.attempts.iter().map(|one| one.error.clone().unwrap_or_default()).collect();
    assert_eq!(errors, ["the handler panicked: on the first try", "on the second", ""]);
    assert_eq!(story.event.status, EventStatus::Succeeded);
    assert_eq!((calls.load(Ordering::SeqCst), shop.count("SELECT count(*) FROM orders")), (3, 1));
    assert_eq!(shop.count("SELECT count(*) FROM mails JOIN orders ON id = order_id WHERE `key` = 'evt_1'"), 1);
    shop.journal.close().await;
}

/// What a function cannot do, and what it cannot talk its way out of: whatever it makes of a statement that failed, the
/// attempt has failed, and nothing of it stays.
#[tokio::test(flavor = "multi_thread")]
async fn r20_a_function_on_mysql_cannot_break_out_of_its_transaction() {
    let none: &[MysqlValue] = &[];
    let two: &[MysqlValue] = &[MysqlValue::Int(1), MysqlValue::Int(2)];
    for (statement, parameters, why) in [
        ("COMMIT", none, "may not"),
        ("ROLLBACK TO SAVEPOINT oncehook_effect", none, "may not"),
        ("SET autocommit = 1", none, "may not"),
        ("CREATE TABLE more (x INT)", none, "may not"),
        ("CALL book()", none, "may not"),
        ("UPDATE oncehook_deliveries SET state = 'succeeded'", none, "may not"),
        ("INSERT INTO old VALUES (1)", none, "table old cannot be rolled back"),
        ("SELECT missing FROM orders", none, "missing"),
        ("INSERT INTO orders (payment, amount) VALUES (NULL, 1)", none, "cannot be null"),
        ("INSERT INTO orders (payment, amount) VALUES ('evt_1', 1)", none, "Duplicate entry"),
        ("INSERT INTO orders (payment, amount) VALUES ('pi_9', ?)", two, "parameter"),
        ("INSERT INTO orders (payment, amount) VALUES (:payment, ?)", two, "param"),
        (SLOW, none, " long"),
    ] {
        let shop = Shop::with(TIME).await;
        shop.database.query("CREATE TABLE old (x INT) ENGINE = MyISAM");
        let handler = function(move |database, event| {
            Box::pin(async move {
                insert_order(database, event).await?;
                // It goes on as if nothing were wrong.
                assert!(database.query(statement, parameters).await.is_err(), "{statement}");
                let again = "INSERT INTO orders (payment, amount) VALUES ('again', 1)";
                assert!(database.execute(again, &[]).await.is_err(), "{statement}");
                Ok(Some(serde_json::json!("fine")))
            })
        });
        let mut twice = route("orders", handler);
        twice.retry.max_attempts = 2;
        let worker = Shop::work(&shop.journal, &Routes::new(vec![twice]).unwrap());
        append(&*shop.journal, [payment(1)]).await;
        shop.drained().await;
        worker.stop().await;
        let story = shop.only().await;
        let delivery = &story.event.deliveries[0];
        let error = delivery.error.clone().unwrap_or_default();
        assert!(delivery.state == "dead" && error.contains(why), "{statement}: {delivery:?}");
        assert_eq!(delivery.attempts.len(), 2, "{statement}");
        assert_eq!(shop.count("SELECT count(*) FROM orders"), 0, "{statement}");
        assert_eq!(shop.count("SELECT count(*) FROM old"), 0, "{statement}");
        shop.journal.close().await;
    }
}

/// A worker that was frozen past its lease comes back: its effect is undone, because its attempt is not the latest.
#[tokio::test(flavor = "multi_thread")]
async fn fault_17_fault_41_the_function_of_a_zombie_on_mysql_commits_nothing() {
    let shop = Shop::with(TIME).await;
    let handler = function(|database, event| {
        Box::pin(async move {
            let key = event.key.display().to_string();
            database.execute("INSERT INTO mails VALUES (1, ?)", &[key.into()]).await?;
            Ok(None)
        })
    });
    let routes = Routes::new(vec![route("orders", handler)]).unwrap();
    let route = routes.get("orders").unwrap();
    append(&*shop.journal, [payment(1)]).await;
    let claim = async |lease: Duration| shop.journal.claim(Arc::clone(route), 10, lease).await.unwrap();
    let frozen = claim(Duration::from_millis(1)).await;
    assert_eq!(frozen.len(), 1);
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(shop.journal.reclaim(Arc::clone(route)).await.unwrap(), 1);
    tokio::time::sleep(Duration::from_millis(100)).await;
    let second = claim(Duration::from_secs(60)).await;
    assert_eq!(second[0].fence.attempt, 2);
    let call = async |claims: &[Claim]| shop.journal.call(Arc::clone(route), claims.to_vec()).await.unwrap();
    // The zombie wakes before the second has settled, and again after.
    assert_eq!(call(&frozen).await, [Settled::Lost]);
    assert_eq!(call(&second).await, [Settled::Done]);
    assert_eq!(call(&frozen).await, [Settled::Lost]);
    assert_eq!(shop.count("SELECT count(*) FROM mails"), 1);
    shop.journal.close().await;
}

/// A function that never comes to its end, one that waits for the server when its time is up, and one that stops waiting for a
/// statement by itself: each costs an attempt, undoes what it did, and disturbs nobody on its connection.
#[tokio::test(flavor = "multi_thread")]
async fn r20_a_function_on_mysql_that_does_not_come_to_its_end_costs_an_attempt() {
    for (way, why) in [("sleeps", "longer than 3 s"), ("asks", " long"), ("gives up", "gave up")] {
        let shop = Shop::with(TIME).await;
        let calls = Arc::new(AtomicU32::new(0));
        let handler = function(move |database, event| {
            let first = calls.fetch_add(1, Ordering::SeqCst) == 0;
            Box::pin(async move {
                insert_order(database, event).await?;
                if first && way == "sleeps" {
                    tokio::time::sleep(Duration::from_secs(60)).await;
                }
                if first && way == "asks" {
                    database.query("SELECT SLEEP(5) AS slept", &[]).await?;
                }
                if first && way == "gives up" {
                    let asking = database.query("SELECT 42, SLEEP(0.2)", &[]);
                    assert!(tokio::time::timeout(Duration::from_millis(50), asking).await.is_err());
                    // It would be given the answer to the one before.
                    tokio::time::sleep(Duration::from_millis(250)).await;
                    assert!(database.query("SELECT 43", &[]).await.is_err());
                }
                let rows = database.query("SELECT 44", &[]).await;
                let found = rows.map(|rows| rows[0].get::<i64, _>(0));
                Ok(Some(serde_json::json!(found.ok())))
            })
        });
        let worker = Shop::work(&shop.journal, &Routes::new(vec![route("orders", handler)]).unwrap());
        let begun = Instant::now();
        append(&*shop.journal, [payment(1)]).await;
        shop.drained().await;
        worker.stop().await;
        assert!(begun.elapsed() < Duration::from_secs(30), "{way}");
        let delivery = shop.only().await.event.deliveries.remove(0);
        let errors: Vec<_> = delivery.attempts.iter().map(|one| one.error.clone().unwrap_or_default()).collect();
        assert!(errors.len() == 2 && errors[0].contains(why) && errors[1].is_empty(), "{way}: {errors:?}");
        assert_eq!(delivery.result.as_deref(), Some("44"), "{way}");
        assert_eq!(shop.count("SELECT count(*) FROM orders"), 1, "{way}");
        shop.journal.close().await;
    }
}

/// Two calls at once lock the same rows in opposite order: one of them is undone by the server and repeated. It is nobody's
/// attempt, and both take effect once.
#[tokio::test(flavor = "multi_thread")]
async fn r20_two_functions_on_mysql_that_collide_take_effect_once_each_in_one_attempt() {
    let shop = Shop::with(TIME).await;
    shop.database.query(
        "CREATE TABLE stock (name VARCHAR(16) PRIMARY KEY, sold INT NOT NULL) ENGINE = InnoDB;
         INSERT INTO stock VALUES ('a', 0), ('b', 0)",
    );
    let (meeting, calls) = (Arc::new(Barrier::new(2)), Arc::new(AtomicU32::new(0)));
    let counted = Arc::clone(&calls);
    let handler = function(move |database, event| {
        let meeting = Arc::clone(&meeting);
        // The first two calls meet when each has locked a row that the other wants next.
        let meets = counted.fetch_add(1, Ordering::SeqCst) < 2;
        Box::pin(async move {
            insert_order(database, event).await?;
            let first = if event.key.display() == "evt_1" { ["a", "b"] } else { ["b", "a"] };
            for (place, name) in first.into_iter().enumerate() {
                let sell = "UPDATE stock SET sold = sold + 1 WHERE name = ?";
                // A function that swallows what went wrong makes no difference.
                let _ = database.execute(sell, &[name.into()]).await;
                if place == 0 && meets {
                    meeting.wait().await;
                }
            }
            Ok(None)
        })
    });
    let route = Arc::new(route("orders", handler));
    append(&*shop.journal, [payment(1), payment(2)]).await;
    let claims = shop.journal.claim(Arc::clone(&route), 10, Duration::from_secs(60)).await.unwrap();
    assert_eq!(claims.len(), 2);
    let call = |claim: &Claim| shop.journal.call(Arc::clone(&route), vec![claim.clone()]);
    let (one, other) = tokio::join!(call(&claims[0]), call(&claims[1]));
    assert_eq!((one.unwrap(), other.unwrap()), (vec![Settled::Done], vec![Settled::Done]));
    assert!(calls.load(Ordering::SeqCst) > 2, "nothing collided, so nothing was shown");
    assert_eq!(shop.count("SELECT SUM(sold) FROM stock"), 4);
    assert_eq!(shop.count("SELECT count(*) FROM orders"), 2);
    let states = "SELECT state, attempt, COUNT(*) FROM oncehook_deliveries GROUP BY 1, 2";
    assert_eq!(shop.database.query(states), "succeeded|1|2");
    shop.journal.close().await;
}

/// The connection is cut under the function's hands. The server undoes what was begun, nobody is blamed, and the effect
/// happens once.
#[tokio::test(flavor = "multi_thread")]
async fn fault_12_a_function_on_mysql_whose_connection_is_killed_takes_effect_once() {
    let shop = Shop::with(TIME).await;
    shop.database.query("ALTER TABLE orders DROP INDEX payment");
    let calls = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&calls);
    let database = shop.database.clone();
    let handler = function(move |transaction, event| {
        let killed = counted.fetch_add(1, Ordering::SeqCst) < 3;
        let database = database.clone();
        Box::pin(async move {
            insert_order(transaction, event).await?;
            if killed {
                let rows = transaction.query("SELECT CONNECTION_ID()", &[]).await?;
                database.query(&format!("KILL {}", rows[0].get::<u64, _>(0).unwrap()));
                // It looks as if all were well, unless somebody asks.
                let _ = insert_order(transaction, event).await;
                let _ = insert_order(transaction, event).await;
            }
            Ok(None)
        })
    });
    let worker = Shop::work(&shop.journal, &Routes::new(vec![route("orders", handler)]).unwrap());
    append(&*shop.journal, [payment(1)]).await;
    shop.drained().await;
    worker.stop().await;
    assert_eq!(shop.count("SELECT count(*) FROM orders"), 1);
    assert_eq!(calls.load(Ordering::SeqCst), 4);
    let delivery = shop.only().await.event.deliveries.remove(0);
    assert_eq!(delivery.state, "succeeded");
    assert!(delivery.attempts.iter().all(|one| one.error.is_none()), "{:?}", delivery.attempts);
    shop.journal.close().await;
}

/// What a function leaves in its session is not there for the next: variables, locks by name, the last id.
#[tokio::test(flavor = "multi_thread")]
async fn r20_nothing_of_a_functions_session_is_left_for_the_next() {
    let shop = Shop::with(TIME).await;
    let handler = function(|database, event| {
        Box::pin(async move {
            let seen =
                "SELECT IFNULL(@mine, 0), IFNULL(IS_USED_LOCK(CONCAT('mine ', DATABASE())), 0), LAST_INSERT_ID()";
            let rows = database.query(seen, &[]).await?;
            let seen: Vec<i64> = (0..3).map(|place| rows[0].get(place).unwrap()).collect();
            insert_order(database, event).await?;
            database.query("SELECT @mine := 7", &[]).await?;
            database.query("SELECT GET_LOCK(CONCAT('mine ', DATABASE()), 0)", &[]).await?;
            let rows = database.query("SELECT LAST_INSERT_ID() > 0", &[]).await?;
            assert_eq!(rows[0].get::<i64, _>(0), Some(1));
            Ok(Some(serde_json::json!(seen)))
        })
    });
    let route = Arc::new(route("orders", handler));
    for number in 1..=4 {
        append(&*shop.journal, [payment(number)]).await;
    }
    let claims = shop.journal.claim(Arc::clone(&route), 10, Duration::from_secs(60)).await.unwrap();
    for claim in claims {
        assert_eq!(shop.journal.call(Arc::clone(&route), vec![claim]).await.unwrap(), [Settled::Done]);
        // The server lets a lock go when it notices that the connection is closed.
        for _ in 0..500 {
            let free = format!("SELECT IS_FREE_LOCK('mine {}')", shop.database.name());
            if shop.count(&free) == 1 {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
    let results = "SELECT DISTINCT result FROM oncehook_deliveries";
    assert_eq!(shop.database.query(results), "[0,0,0]");
    shop.journal.close().await;
}

/// A function without statements that leave something keeps its connection, and still is not told another's last id.
#[tokio::test(flavor = "multi_thread")]
async fn r20_the_last_id_that_a_function_on_mysql_sees_is_its_own() {
    let shop = Shop::with(TIME).await;
    let handler = function(|database, event| {
        Box::pin(async move {
            let rows = database.query("SELECT LAST_INSERT_ID(), CONNECTION_ID()", &[]).await?;
            let (before, connection): (i64, i64) = (rows[0].get(0).unwrap(), rows[0].get(1).unwrap());
            insert_order(database, event).await?;
            Ok(Some(serde_json::json!([before, connection])))
        })
    });
    let route = Arc::new(route("orders", handler));
    append(&*shop.journal, [payment(1), payment(2), payment(3)]).await;
    let claims = shop.journal.claim(Arc::clone(&route), 10, Duration::from_secs(60)).await.unwrap();
    assert_eq!(shop.journal.call(route, claims).await.unwrap(), [Settled::Done; 3]);
    let ids =
        "SELECT COUNT(DISTINCT JSON_VALUE(result, '$[1]')), MAX(JSON_VALUE(result, '$[0]')) FROM oncehook_deliveries";
    assert_eq!(shop.database.query(ids), "1|0");
    shop.journal.close().await;
}
