//! The way out on PostgreSQL: the user's effect happens once, together with the record that it happened, whoever else
//! works on the same database.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use oncehook::clock::Clock;
use oncehook::delivery::{Cause, Claim, Failure, HandedEvent, RouteName, Settled};
use oncehook::event::{NewEvent, SourceName};
use oncehook::handler::elsewhere::Answer;
use oncehook::handler::{Dialect, Expression, Handler, OnPostgres, PostgresTransaction, SqlHandler};
use oncehook::journal::postgres::{PostgresJournal, PostgresOptions};
use oncehook::journal::{Deliveries, EventDetail, EventQuery, EventStatus, Journal, JournalReader, Retention};
use oncehook::observe::Metrics;
use oncehook::retry::RetryPolicy;
use oncehook::route::{Route, Routes};
use oncehook::worker::Worker;
use oncehook_testkit::journal::{append, event};
use oncehook_testkit::postgres::{Database, Server};
use oncehook_testkit::random::Random;

const SHOP: &str = "CREATE SCHEMA shop;
    CREATE TABLE shop.orders (id serial PRIMARY KEY, payment text NOT NULL UNIQUE, amount numeric(12,2) NOT NULL);
    CREATE TABLE shop.mails (order_id integer NOT NULL, key text NOT NULL)";

struct Shop {
    database: Database<'static>,
    journal: Arc<PostgresJournal>,
}

impl Shop {
    async fn new() -> Self {
        let database = Server::shared().database();
        // The user's statements find the user's tables by the user's path.
        database.query(&format!(
            "{SHOP}; DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET search_path = shop', current_database()); END $$"
        ));
        let journal = Self::open(&database).await;
        Self { database, journal }
    }

    async fn open(database: &Database<'_>) -> Arc<PostgresJournal> {
        let handler_time = Duration::from_millis(500);
        let options = PostgresOptions { handler_time, ..PostgresOptions::new(database.url()) };
        Arc::new(PostgresJournal::open(&options).await.unwrap())
    }

    fn work(journal: &Arc<PostgresJournal>, routes: &Routes) -> Worker {
        // The events of the suite were received on a fixed day; they are not to be forgotten under the test's hands.
        let ages = Duration::from_secs(100 * 365 * 86_400);
        let retention = Retention { payload: ages, dead: None, audit: ages, batch: 100 };
        let deliveries = Arc::clone(journal) as Arc<dyn Deliveries>;
        Worker::start(deliveries, routes, retention, Clock::system(), Arc::new(Metrics::new()))
    }

    fn count(&self, sql: &str) -> i64 {
        self.database.query(sql).parse().unwrap()
    }

    /// Waits until no delivery waits or runs.
    async fn drained(&self) {
        for _ in 0..1_500 {
            let backlog = self.journal.backlog().await.unwrap();
            if backlog.iter().all(|route| route.waiting + route.running == 0) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("not drained: {:?}", self.journal.backlog().await);
    }

    async fn only(&self) -> EventDetail {
        let page = self.journal.list(EventQuery { limit: 2, ..EventQuery::default() }).await.unwrap();
        assert_eq!(page.events.len(), 1);
        self.journal.show(page.events[0].id).await.unwrap().unwrap()
    }
}

fn name(text: &str) -> RouteName {
    RouteName::new(text).unwrap()
}

fn route(text: &str, handler: Handler) -> Route {
    let mut route = Route::new(name(text), SourceName::new("shop").unwrap(), handler);
    route.retry = RetryPolicy { max_attempts: 3, base: Duration::from_millis(20), cap: Duration::from_millis(50) };
    route
}

fn sql(statements: &[&str], bind: &[(&str, &str)]) -> Handler {
    let bind: BTreeMap<_, _> =
        bind.iter().map(|(name, value)| ((*name).to_owned(), Expression::parse(value).unwrap())).collect();
    Handler::Sql(Arc::new(SqlHandler::new(statements, &bind, Dialect::Postgres).unwrap()))
}

fn orders() -> Route {
    let insert = "INSERT INTO orders (payment, amount) VALUES (:payment, :amount) RETURNING id, payment, amount";
    route("orders", sql(&[insert], &[("payment", "/payment"), ("amount", "/amount")]))
}

fn routed(key: &str, body: &str) -> NewEvent {
    NewEvent { routes: [name("orders")].into_iter().collect(), ..event(key, body) }
}

fn payment(number: usize) -> NewEvent {
    routed(&format!("evt_{number}"), &format!(r#"{{"payment":"pi_{number}","amount":{number}.5}}"#))
}

#[tokio::test(flavor = "multi_thread")]
async fn r20_r22_r25_an_effect_on_postgres_happens_once_and_its_follow_up_knows_its_result() {
    let shop = Shop::new().await;
    let mut mail =
        route("mail", sql(&["INSERT INTO mails VALUES (:order, :key)"], &[("order", "$result/id"), ("key", "$key")]));
    mail.after = Some(name("orders"));
    let worker = Shop::work(&shop.journal, &Routes::new(vec![orders(), mail]).unwrap());
    for _ in 0..3 {
        append(&*shop.journal, [payment(7)]).await;
    }
    shop.drained().await;
    worker.stop().await;
    assert_eq!(shop.count("SELECT count(*) FROM orders WHERE payment = 'pi_7' AND amount = 7.5"), 1);
    assert_eq!(shop.count("SELECT count(*) FROM mails JOIN orders ON id = order_id WHERE key = 'evt_7'"), 1);
    let story = shop.only().await;
    assert_eq!(story.event.status, EventStatus::Succeeded);
    let delivery = |route: &str| story.event.deliveries.iter().find(|one| one.route == route).unwrap();
    assert_eq!(delivery("orders").result.as_deref(), Some(r#"{"amount":"7.50","id":1,"payment":"pi_7"}"#));
    assert_eq!((delivery("orders").attempt, delivery("orders").attempts.len()), (1, 1));
    assert_eq!((delivery("mail").state.as_str(), delivery("mail").attempt), ("succeeded", 1));
    shop.journal.close().await;
}

/// Some of many fail in their second statement: they leave nothing, and cost the others nothing.
#[tokio::test(flavor = "multi_thread")]
async fn r20_r28_on_postgres_statements_commit_together_and_poison_costs_only_itself() {
    let shop = Shop::new().await;
    let two =
        ["INSERT INTO orders (payment, amount) VALUES (:payment, 1); INSERT INTO mails VALUES (:order, :payment)"];
    let handler = sql(&two, &[("payment", "/payment"), ("order", "/order")]);
    for number in 0..100 {
        // NOT NULL refuses one in ten, and one in ten has no such path at all.
        let body = match number % 10 {
            3 => format!(r#"{{"payment":"pi_{number}","order":null}}"#),
            7 => format!(r#"{{"payment":"pi_{number}"}}"#),
            _ => format!(r#"{{"payment":"pi_{number}","order":{number}}}"#),
        };
        append(&*shop.journal, [routed(&format!("evt_{number}"), &body)]).await;
    }
    let worker = Shop::work(&shop.journal, &Routes::new(vec![route("orders", handler)]).unwrap());
    shop.drained().await;
    worker.stop().await;
    assert_eq!(shop.count("SELECT count(*) FROM orders"), 80);
    assert_eq!(shop.count("SELECT count(*) FROM mails m JOIN orders o ON o.payment = m.key"), 80);
    let attempts = "SELECT state, attempt, cause, count(*) FROM oncehook.deliveries GROUP BY 1, 2, 3 ORDER BY 1, 2";
    assert_eq!(shop.database.query(attempts), "dead|1|poison|10\ndead|3|handler|10\nsucceeded|1||80");
    let kept = "SELECT count(*) FROM oncehook.retry_logs WHERE outcome = 'failed' AND error LIKE '%not-null%'";
    assert_eq!(shop.count(kept), 30);
    shop.journal.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r20_json_becomes_the_types_that_the_columns_have() {
    let shop = Shop::new().await;
    shop.database.query(
        "CREATE TYPE shop.colour AS ENUM ('red', 'green');
         CREATE TABLE shop.kinds (a bigint, b numeric, c boolean, d jsonb, e timestamptz, f uuid, g text, h shop.colour,
                                  i bytea, j double precision, k text[], l date)",
    );
    let insert = "INSERT INTO kinds VALUES (:a, :b, :c, :d, :e, :f, :g, :h, :i, :j, :k, :l) RETURNING *";
    let names = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"];
    let bind: Vec<(&str, String)> = names.iter().map(|name| (*name, format!("/{name}"))).collect();
    let bind: Vec<(&str, &str)> = bind.iter().map(|(name, path)| (*name, path.as_str())).collect();
    let worker = Shop::work(&shop.journal, &Routes::new(vec![route("orders", sql(&[insert], &bind))]).unwrap());
    let body = r#"{"a":9007199254740993,"b":12345678901234567890.123456789,"c":true,"d":{"x":[1,null]},
        "e":"2026-01-02T03:04:05Z","f":"00000000-0000-7000-8000-000000000001","g":"it's \"ü\"","h":"green","i":"raw",
        "j":1e-3,"k":"{x,y}","l":"2026-02-03"}"#;
    append(&*shop.journal, [routed("evt_1", body)]).await;
    shop.drained().await;
    let row = "SELECT a, b, c, d, e AT TIME ZONE 'UTC', f, g, h, encode(i, 'escape'), j, k, l FROM kinds";
    assert_eq!(
        shop.database.query(row),
        r#"9007199254740993|12345678901234567890.123456789|t|{"x": [1, null]}|2026-01-02 03:04:05|00000000-0000-7000-8000-000000000001|it's "ü"|green|raw|0.001|{x,y}|2026-02-03"#
    );
    let story = shop.only().await;
    let result: serde_json::Value = serde_json::from_str(story.event.deliveries[0].result.as_ref().unwrap()).unwrap();
    assert_eq!(result["a"], 9_007_199_254_740_993_i64);
    assert_eq!((&result["b"], &result["h"]), (&"12345678901234567890.123456789".into(), &"green".into()));
    assert_eq!((&result["e"], &result["l"]), (&"2026-01-02T03:04:05.000000Z".into(), &"2026-02-03".into()));
    worker.stop().await;
    shop.journal.close().await;
}

/// Many big bodies are not read at once, and none is left behind.
#[tokio::test(flavor = "multi_thread")]
async fn r5_big_bodies_are_taken_a_few_at_a_time() {
    let shop = Shop::new().await;
    for number in 0..20 {
        let padding = "x".repeat(1 << 20);
        let body = format!(r#"{{"payment":"pi_{number}","amount":1,"padding":"{padding}"}}"#);
        append(&*shop.journal, [routed(&format!("evt_{number}"), &body)]).await;
    }
    let route = Arc::new(orders());
    let first = shop.journal.apply(Arc::clone(&route), 256).await.unwrap();
    assert_eq!((first.succeeded, first.more), (8, true));
    while shop.journal.apply(Arc::clone(&route), 256).await.unwrap().more {}
    assert_eq!(shop.count("SELECT count(*) FROM orders"), 20);
    shop.journal.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r20_a_handler_on_postgres_cannot_reach_beyond_its_tables() {
    for (statement, told) in [
        ("COMMIT", "transactions"),
        ("UPDATE oncehook.deliveries SET state = 'ready'", "schema oncehook"),
        ("SELECT pg_sleep(5)", "too long"),
        ("INSERT INTO nowhere VALUES (1)", "nowhere"),
    ] {
        let shop = Shop::new().await;
        let worker = Shop::work(&shop.journal, &Routes::new(vec![route("orders", sql(&[statement], &[]))]).unwrap());
        append(&*shop.journal, [routed("evt_1", "{}")]).await;
        shop.drained().await;
        let delivery = shop.only().await.event.deliveries.remove(0);
        assert_eq!((delivery.state.as_str(), delivery.attempts.len()), ("dead", 3), "{statement}");
        assert!(delivery.error.as_ref().is_some_and(|error| error.contains(told)), "{:?}", delivery.error);
        worker.stop().await;
        shop.journal.close().await;
    }
}

/// Two nodes work on one database while their calls are dropped at random moments (faults 13 and 41).
#[tokio::test(flavor = "multi_thread")]
async fn fault_13_r15_r20_two_nodes_and_dropped_calls_apply_each_event_once() {
    const EVENTS: usize = 800;
    let shop = Shop::new().await;
    // Without the unique key nothing but the journal keeps an effect from happening twice.
    shop.database.query("ALTER TABLE shop.orders DROP CONSTRAINT orders_payment_key");
    let other = Shop::open(&shop.database).await;
    let route = Arc::new(orders());
    let mut workers = Vec::new();
    for (node, journal) in [&shop.journal, &other].into_iter().enumerate() {
        let (journal, route) = (Arc::clone(journal), Arc::clone(&route));
        workers.push(tokio::spawn(async move {
            let mut random = Random::new(node as u64);
            let (mut dropped, mut idle) = (0, 0);
            while idle < 20 {
                // Now and then somebody has the patience, or on a slow machine nothing would ever come to its end.
                let patience = match random.below(4) {
                    0 => Duration::from_secs(60),
                    _ => Duration::from_micros(random.below(20_000)),
                };
                match tokio::time::timeout(patience, journal.apply(Arc::clone(&route), 20)).await {
                    Ok(progress) if progress.as_ref().is_ok_and(|progress| progress.succeeded > 0) => idle = 0,
                    Ok(_) => {
                        idle += 1;
                        tokio::time::sleep(Duration::from_millis(50)).await;
                    }
                    Err(_) => dropped += 1,
                }
            }
            dropped
        }));
    }
    for number in 0..EVENTS {
        drop(shop.journal.submit([payment(number)].into_iter().collect()).unwrap());
        drop(other.submit([payment(number)].into_iter().collect()).unwrap());
        if number % 20 == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    let mut dropped = 0;
    for worker in workers {
        dropped += tokio::time::timeout(Duration::from_secs(240), worker).await.unwrap().unwrap();
    }
    assert!(dropped > 20, "{dropped} calls were dropped");
    // The last ones without haste.
    while shop.journal.apply(Arc::clone(&route), 100).await.unwrap().succeeded > 0 {}
    shop.drained().await;
    let counts = "SELECT count(*), count(DISTINCT payment) FROM orders";
    assert_eq!(shop.database.query(counts), format!("{EVENTS}|{EVENTS}"));
    let states = "SELECT state, attempt, count(*) FROM oncehook.deliveries GROUP BY 1, 2";
    assert_eq!(shop.database.query(states), format!("succeeded|1|{EVENTS}"));
    shop.journal.close().await;
    other.close().await;
}

/// A lease that one node took runs out for all of them.
#[tokio::test(flavor = "multi_thread")]
async fn r14_r15_a_lost_lease_is_taken_up_on_the_databases_clock() {
    let shop = Shop::new().await;
    append(&*shop.journal, [payment(1)]).await;
    let route = Arc::new(orders());
    // Another node, which never saw the claim.
    let other = Shop::open(&shop.database).await;
    let lease = Duration::from_secs(3);
    let claims = shop.journal.claim(Arc::clone(&route), 10, lease).await.unwrap();
    assert_eq!(claims.len(), 1);
    assert_eq!(other.reclaim(Arc::clone(&route)).await.unwrap(), 0);
    tokio::time::sleep(lease).await;
    assert_eq!(other.reclaim(Arc::clone(&route)).await.unwrap(), 1);
    let due = other.next_due(route.name.clone()).await.unwrap().unwrap();
    assert!(due.0 <= Clock::system().now().0 + 100_000, "it is told in this node's time");
    shop.journal.close().await;
    other.close().await;
}

/// Whoever waits for the journal goes away at any await: what they began is undone with its connection, or was done.
#[tokio::test(flavor = "multi_thread")]
async fn fault_14_work_on_postgres_that_is_dropped_half_way_is_done_once() {
    let mut random = Random::from_environment();
    let shop = Shop::new().await;
    // Nothing but the journal keeps an effect from happening twice.
    shop.database.query("ALTER TABLE orders DROP CONSTRAINT orders_payment_key");
    let mut orders = orders();
    orders.retry.max_attempts = 100_000;
    let orders = Arc::new(orders);
    let (mut sent, mut dropped) = (0, 0);
    for round in 0.. {
        assert!(round < 20_000, "it never ends");
        if round % 20 == 0 && shop.count("SELECT count(*) FROM orders") as usize >= sent {
            if dropped > 20 {
                break;
            }
            for number in sent..sent + 150 {
                // Nobody listens for the outcome of half of them.
                let ticket = shop.journal.submit([payment(number)].into_iter().collect()).unwrap();
                if number % 2 == 0 {
                    drop(ticket);
                } else {
                    ticket.await.unwrap().unwrap();
                }
            }
            sent += 150;
        }
        // From a microsecond to a quarter of a second: every stage has its share, whatever the machine does beside.
        let patience = Duration::from_micros(1 << random.below(19));
        let ended = match random.below(4) {
            0 => {
                let claiming = shop.journal.claim(Arc::clone(&orders), 3, Duration::from_millis(200));
                tokio::time::timeout(patience, claiming).await.is_ok()
            }
            1 => tokio::time::timeout(patience, shop.journal.reclaim(Arc::clone(&orders))).await.is_ok(),
            _ => {
                let applying = shop.journal.apply(Arc::clone(&orders), 8);
                tokio::time::timeout(patience, applying).await.is_ok_and(|progress| progress.is_ok())
            }
        };
        dropped += u32::from(!ended);
    }
    eprintln!("{dropped} calls were dropped half-way");
    // Leases whose holder went away run out.
    let routes = Routes::new(vec![Route::clone(&orders)]).unwrap();
    let worker = Shop::work(&shop.journal, &routes);
    shop.drained().await;
    worker.stop().await;
    let counts = shop.database.query("SELECT count(*), count(DISTINCT payment) FROM orders");
    assert_eq!(counts, format!("{sent}|{sent}"));
    assert_eq!(
        shop.count("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in transaction%'"),
        0
    );
    shop.journal.close().await;
}

/// A function whose statements are those of a transaction it cannot end.
fn insert_order<'a>(database: &'a dyn PostgresTransaction, event: &'a HandedEvent) -> Answer<'a, Result<u64, Failure>> {
    Box::pin(async move {
        let key = event.key.display().to_string();
        database.execute("INSERT INTO orders (payment, amount) VALUES ($1, 1)", &[&key]).await
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_15_r20_r25_a_function_on_postgres_commits_with_its_record_and_a_panic_costs_an_attempt() {
    let shop = Shop::new().await;
    let calls = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&calls);
    let function = OnPostgres::new(move |database, event| {
        let counted = Arc::clone(&counted);
        Box::pin(async move {
            insert_order(database, event).await?;
            match counted.fetch_add(1, Ordering::SeqCst) {
                0 => panic!("on the first try"),
                1 => Err(Failure::retry(Cause::Handler, "on the second")),
                _ => {
                    let rows = database.query("SELECT id FROM orders WHERE payment = $1", &[&"evt_1"]).await?;
                    let id: i32 = rows[0].get(0);
                    Ok(Some(serde_json::json!({ "id": id })))
                }
            }
        })
    });
    let mut mail =
        route("mail", sql(&["INSERT INTO mails VALUES (:order, :key)"], &[("order", "$result/id"), ("key", "$key")]));
    mail.after = Some(name("orders"));
    let routes = Routes::new(vec![route("orders", Handler::Function(Arc::new(function))), mail]).unwrap();
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
    assert_eq!(shop.count("SELECT count(*) FROM mails JOIN orders ON id = order_id WHERE key = 'evt_1'"), 1);
}

/// What a function cannot do, and what it cannot talk its way out of.
#[tokio::test(flavor = "multi_thread")]
async fn r20_a_function_on_postgres_cannot_break_out_of_its_transaction() {
    for (statement, why) in [
        ("COMMIT", "may not"),
        ("ROLLBACK TO SAVEPOINT oncehook_effect", "may not"),
        ("SET search_path = oncehook", "may not"),
        ("UPDATE oncehook.deliveries SET state = 'succeeded'", "may not"),
        ("SELECT missing FROM orders", "missing"),
        ("INSERT INTO orders (payment, amount) VALUES (NULL, 1)", "null value"),
        // The statement's time and the function's are the same here: either may end it.
        ("SELECT pg_sleep(5)", "took"),
    ] {
        let shop = Shop::new().await;
        let function = OnPostgres::new(move |database, event| {
            Box::pin(async move {
                insert_order(database, event).await?;
                // It goes on as if nothing were wrong.
                assert!(database.query(statement, &[]).await.is_err(), "{statement}");
                let _ = insert_order(database, event).await;
                Ok(Some(serde_json::json!("fine")))
            })
        });
        let mut once = route("orders", Handler::Function(Arc::new(function)));
        once.retry.max_attempts = 2;
        let worker = Shop::work(&shop.journal, &Routes::new(vec![once]).unwrap());
        append(&*shop.journal, [payment(1)]).await;
        shop.drained().await;
        worker.stop().await;
        let story = shop.only().await;
        let delivery = &story.event.deliveries[0];
        let error = delivery.error.clone().unwrap_or_default();
        assert!(delivery.state == "dead" && error.contains(why), "{statement}: {delivery:?}");
        assert_eq!(shop.count("SELECT count(*) FROM orders"), 0, "{statement}");
    }
}

/// A worker that was frozen past its lease comes back: its effect is undone, because its attempt is not the latest.
#[tokio::test(flavor = "multi_thread")]
async fn fault_17_fault_41_the_function_of_a_zombie_on_postgres_commits_nothing() {
    let shop = Shop::new().await;
    let function = OnPostgres::new(|database, event| {
        Box::pin(async move {
            let key = event.key.display().to_string();
            database.execute("INSERT INTO mails VALUES (1, $1)", &[&key]).await?;
            Ok(None)
        })
    });
    let routes = Routes::new(vec![route("orders", Handler::Function(Arc::new(function)))]).unwrap();
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
}
