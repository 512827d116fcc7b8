//! The way out on MariaDB: the user's effect happens once, together with the record that it happened, whoever else
//! works on the same database.

mod batches;
mod functions;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use oncehook::clock::Clock;
use oncehook::delivery::RouteName;
use oncehook::event::{NewEvent, SourceName};
use oncehook::handler::{Dialect, Expression, Handler, SqlHandler};
use oncehook::journal::mysql::{MysqlJournal, MysqlOptions};
use oncehook::journal::{Deliveries, EventDetail, EventQuery, EventStatus, Journal, JournalReader, Retention};
use oncehook::observe::Metrics;
use oncehook::retry::RetryPolicy;
use oncehook::route::{Route, Routes};
use oncehook::worker::Worker;
use oncehook_testkit::journal::{append, event};
use oncehook_testkit::mysql::{Database, Server, returning};
use oncehook_testkit::random::Random;

const SHOP: &str = "CREATE TABLE orders (id INT AUTO_INCREMENT PRIMARY KEY, payment VARCHAR(64) NOT NULL UNIQUE,
                                     amount DECIMAL(12,2) NOT NULL);
    CREATE TABLE mails (order_id INT NOT NULL, `key` VARCHAR(64) NOT NULL)";

/// Sleeps for every row. (MySQL ends a lone sleep early when the time is up, but not with an error.)
const SLOW: &str = "SELECT SLEEP(5) FROM information_schema.ENGINES";

struct Shop {
    database: Database<'static>,
    journal: Arc<MysqlJournal>,
}

impl Shop {
    async fn new() -> Self {
        Self::with(Duration::from_millis(500)).await
    }

    /// Handlers have that long.
    async fn with(handler_time: Duration) -> Self {
        let database = Server::shared().database();
        database.query(SHOP);
        let journal = Self::open_with(&database, handler_time).await;
        Self { database, journal }
    }

    async fn open(database: &Database<'_>) -> Arc<MysqlJournal> {
        Self::open_with(database, Duration::from_millis(500)).await
    }

    async fn open_with(database: &Database<'_>, handler_time: Duration) -> Arc<MysqlJournal> {
        let options = MysqlOptions { handler_time, ..MysqlOptions::new(database.url()) };
        Arc::new(MysqlJournal::open(&options).await.unwrap())
    }

    fn work(journal: &Arc<MysqlJournal>, routes: &Routes) -> Worker {
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

fn sql<S: AsRef<str>>(statements: &[S], bind: &[(&str, &str)]) -> Handler {
    let bind: BTreeMap<_, _> =
        bind.iter().map(|(name, value)| ((*name).to_owned(), Expression::parse(value).unwrap())).collect();
    let statements: Vec<&str> = statements.iter().map(AsRef::as_ref).collect();
    Handler::Sql(Arc::new(SqlHandler::new(&statements, &bind, Dialect::Mysql).unwrap()))
}

fn orders() -> Route {
    let insert = "INSERT INTO orders (payment, amount) VALUES (:payment, :amount)";
    let statements = returning(insert, "id, payment, amount", "orders WHERE id = LAST_INSERT_ID()");
    route("orders", sql(&statements, &[("payment", "/payment"), ("amount", "/amount")]))
}

fn routed(key: &str, body: &str) -> NewEvent {
    NewEvent { routes: [name("orders")].into_iter().collect(), ..event(key, body) }
}

fn payment(number: usize) -> NewEvent {
    routed(&format!("evt_{number}"), &format!(r#"{{"payment":"pi_{number}","amount":{number}.5}}"#))
}

#[tokio::test(flavor = "multi_thread")]
async fn r20_r22_r25_an_effect_on_mysql_happens_once_and_its_follow_up_knows_its_result() {
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
    assert_eq!(shop.count("SELECT count(*) FROM mails JOIN orders ON id = order_id WHERE `key` = 'evt_7'"), 1);
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
async fn r20_r28_on_mysql_statements_commit_together_and_poison_costs_only_itself() {
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
    assert_eq!(shop.count("SELECT count(*) FROM mails m JOIN orders o ON o.payment = m.`key`"), 80);
    let attempts = "SELECT state, attempt, cause, count(*) FROM oncehook_deliveries GROUP BY 1, 2, 3 ORDER BY CAST(state AS CHAR), 2";
    assert_eq!(shop.database.query(attempts), "dead|1|poison|10\ndead|3|handler|10\nsucceeded|1||80");
    let kept = "SELECT count(*) FROM oncehook_retry_logs WHERE outcome = 'failed' AND error LIKE '%cannot be null%'";
    assert_eq!(shop.count(kept), 30);
    shop.journal.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r20_json_becomes_the_types_that_the_columns_on_mysql_have() {
    let shop = Shop::new().await;
    shop.database.query(
        "CREATE TABLE kinds (a BIGINT, b DECIMAL(40,9), c BOOLEAN, d LONGTEXT CHECK (JSON_VALID(d)), e DATETIME(6), f BIGINT UNSIGNED,
                             g VARCHAR(64) CHARACTER SET utf8mb4, h ENUM('red', 'green'), i VARBINARY(16), j DOUBLE,
                             k VARCHAR(16) CHARACTER SET latin1, l DATE, m TIME, n INT)",
    );
    let insert =
        "INSERT INTO kinds VALUES (:a, :b, :c, :d, TRIM(TRAILING 'Z' FROM :e), :f, :g, :h, :i, :j, :k, :l, :m, :n)";
    let names = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m", "n"];
    let bind: Vec<(&str, String)> = names.iter().map(|name| (*name, format!("/{name}"))).collect();
    let bind: Vec<(&str, &str)> = bind.iter().map(|(name, path)| (*name, path.as_str())).collect();
    let worker = Shop::work(
        &shop.journal,
        &Routes::new(vec![route("orders", sql(&returning(insert, "*", "kinds"), &bind))]).unwrap(),
    );
    let body = r#"{"a":9007199254740993,"b":12345678901234567890.123456789,"c":true,"d":{"x":[1,null]},
        "e":"2026-01-02T03:04:05Z","f":18446744073709551615,"g":"it's \"ü\" 😀","h":"green","i":"raw",
        "j":1e-3,"k":"für","l":"2026-02-03","m":"-12:34:56","n":null}"#;
    append(&*shop.journal, [routed("evt_1", body)]).await;
    shop.drained().await;
    let row = "SELECT a, b, c, d, e, f, g, h, i, j, k, l, m, n FROM kinds";
    assert_eq!(
        shop.database.query(row),
        r#"9007199254740993|12345678901234567890.123456789|1|{"x":[1,null]}|2026-01-02 03:04:05.000000|18446744073709551615|it's "ü" 😀|green|raw|0.001|für|2026-02-03|-12:34:56|"#
    );
    let story = shop.only().await;
    let result: serde_json::Value = serde_json::from_str(story.event.deliveries[0].result.as_ref().unwrap()).unwrap();
    assert_eq!((&result["a"], &result["f"]), (&9_007_199_254_740_993_i64.into(), &u64::MAX.into()));
    assert_eq!((&result["b"], &result["h"]), (&"12345678901234567890.123456789".into(), &"green".into()));
    assert_eq!((&result["e"], &result["l"]), (&"2026-01-02T03:04:05.000000".into(), &"2026-02-03".into()));
    assert_eq!((&result["g"], &result["k"]), (&"it's \"ü\" 😀".into(), &"für".into()));
    assert_eq!((&result["i"], &result["m"]), (&"726177".into(), &"-12:34:56.000000".into()));
    assert_eq!((&result["c"], &result["n"]), (&1.into(), &serde_json::Value::Null));
    worker.stop().await;
    shop.journal.close().await;
}

/// Many big bodies are not read at once, and none is left behind.
#[tokio::test(flavor = "multi_thread")]
async fn r5_big_bodies_on_mysql_are_taken_a_few_at_a_time() {
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
async fn r20_a_handler_on_mysql_cannot_reach_beyond_its_tables() {
    for (statement, told) in [
        ("COMMIT", "transactions"),
        ("TRUNCATE orders", "tables"),
        ("CALL book()", "procedures"),
        ("UPDATE oncehook_deliveries SET state = 'ready'", "oncehook_"),
        (SLOW, "too long"),
        ("INSERT INTO nowhere VALUES (1)", "nowhere"),
        ("INSERT INTO old VALUES (1)", "table old cannot be rolled back"),
    ] {
        let shop = Shop::new().await;
        shop.database.query("CREATE TABLE old (x INT) ENGINE = MyISAM");
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
async fn fault_13_r15_r20_two_nodes_and_dropped_calls_on_mysql_apply_each_event_once() {
    const EVENTS: usize = 800;
    let shop = Shop::new().await;
    // Without the unique key nothing but the journal keeps an effect from happening twice.
    shop.database.query("ALTER TABLE orders DROP KEY payment");
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
    let states = "SELECT state, attempt, count(*) FROM oncehook_deliveries GROUP BY 1, 2";
    assert_eq!(shop.database.query(states), format!("succeeded|1|{EVENTS}"));
    shop.journal.close().await;
    other.close().await;
}

/// A lease that one node took runs out for all of them.
#[tokio::test(flavor = "multi_thread")]
async fn r14_r15_a_lost_lease_on_mysql_is_taken_up_on_the_databases_clock() {
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

/// A handler that asks for the id that it made gets its own, and never that of a delivery before it.
#[tokio::test(flavor = "multi_thread")]
async fn r20_on_mysql_the_last_id_is_the_deliverys_own() {
    let shop = Shop::new().await;
    shop.database.query("INSERT INTO orders (id, payment, amount) VALUES (7, 'pi_2', 1)");
    let statements = [
        "INSERT INTO orders (payment, amount) VALUES (:payment, 1) ON DUPLICATE KEY UPDATE amount = amount",
        "SELECT LAST_INSERT_ID() AS id",
    ];
    for number in 1..=3 {
        append(&*shop.journal, [payment(number)]).await;
    }
    let route = Arc::new(route("orders", sql(&statements, &[("payment", "/payment")])));
    assert_eq!(shop.journal.apply(route, 100).await.unwrap().succeeded, 3);
    let results =
        "SELECT e.`key`, d.result FROM oncehook_deliveries d JOIN oncehook_events e ON e.id = d.event ORDER BY e.`key`";
    assert_eq!(shop.database.query(results), "evt_1|{\"id\":8}\nevt_2|{\"id\":0}\nevt_3|{\"id\":10}");
    shop.journal.close().await;
}

/// Two batches lock the same rows in opposite order, again and again: no attempt is counted, and every effect happens once.
/// After a deadlock the transaction is gone, and a statement that went on would stand alone.
#[tokio::test(flavor = "multi_thread")]
async fn r20_on_mysql_deadlocks_are_nobodys_attempt_and_leave_nothing_behind() {
    const EVENTS: usize = 300;
    let shop = Shop::new().await;
    shop.database.query(
        "CREATE TABLE stock (name VARCHAR(16) PRIMARY KEY, sold INT NOT NULL) ENGINE = InnoDB;
         INSERT INTO stock VALUES ('a', 0), ('b', 0), ('c', 0), ('d', 0)",
    );
    let other = Shop::open(&shop.database).await;
    for number in 0..EVENTS {
        let names = ["a", "b", "c", "d"];
        let (one, two) = (names[number % 4], names[(number * 3 + 1 + number / 4) % 4]);
        let body = format!(r#"{{"one":"{one}","two":"{two}","payment":"pi_{number}"}}"#);
        append(&*shop.journal, [routed(&format!("evt_{number}"), &body)]).await;
    }
    let statements = [
        "INSERT INTO orders (payment, amount) VALUES (:payment, 1)",
        "UPDATE stock SET sold = sold + 1 WHERE name = :one",
        "UPDATE stock SET sold = sold + 1 WHERE name = :two",
    ];
    let bind = [("one", "/one"), ("two", "/two"), ("payment", "/payment")];
    let route = Arc::new(route("orders", sql(&statements, &bind)));
    let mut workers = Vec::new();
    for journal in [&shop.journal, &other, &shop.journal, &other] {
        let (journal, route) = (Arc::clone(journal), Arc::clone(&route));
        workers.push(tokio::spawn(async move {
            let mut idle = 0;
            while idle < 5 {
                let done = journal.apply(Arc::clone(&route), 10).await.is_ok_and(|progress| progress.succeeded > 0);
                idle = if done { 0 } else { idle + 1 };
                tokio::time::sleep(Duration::from_millis(if done { 0 } else { 50 })).await;
            }
        }));
    }
    for worker in workers {
        tokio::time::timeout(Duration::from_secs(240), worker).await.unwrap().unwrap();
    }
    shop.drained().await;
    let deadlocks = "SELECT COUNT FROM information_schema.INNODB_METRICS WHERE NAME = 'lock_deadlocks'";
    assert!(shop.count(deadlocks) > 0, "nothing collided, so nothing was shown");
    assert_eq!(shop.count("SELECT SUM(sold) FROM stock"), 2 * EVENTS as i64);
    assert_eq!(shop.count("SELECT COUNT(*) FROM orders"), EVENTS as i64);
    let states = "SELECT state, attempt, COUNT(*) FROM oncehook_deliveries GROUP BY 1, 2";
    assert_eq!(shop.database.query(states), format!("succeeded|1|{EVENTS}"));
    shop.journal.close().await;
    other.close().await;
}
