//! The way out on the embedded journal: the user's effect happens once, together with the record that it happened.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use oncehook::clock::Clock;
use oncehook::delivery::{Cause, Claim, Failure, HandedEvent, RouteName, Settled};
use oncehook::event::{NewEvent, SourceName};
use oncehook::handler::{Dialect, Expression, Handler, SqlHandler};
use oncehook::journal::sqlite::{SqliteJournal, SqliteOptions};
use oncehook::journal::{
    Deliveries, EventDetail, EventQuery, EventStatus, Journal, JournalReader, Order, Retention, Verb, Who,
};
use oncehook::observe::Metrics;
use oncehook::retry::RetryPolicy;
use oncehook::route::{Route, Routes};
use oncehook::worker::Worker;
use oncehook_testkit::journal::{append, event};
use rusqlite::Connection;

const SHOP: &str =
    "CREATE TABLE orders (id INTEGER PRIMARY KEY, payment TEXT NOT NULL UNIQUE, amount INTEGER NOT NULL);
                    CREATE TABLE mails (order_id INTEGER NOT NULL, key TEXT NOT NULL)";

struct Shop {
    directory: tempfile::TempDir,
    journal: Arc<SqliteJournal>,
    clock: Clock,
}

impl Shop {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        database(directory.path()).execute_batch(SHOP).unwrap();
        let clock = Clock::system();
        let options = SqliteOptions { clock: clock.clone(), ..SqliteOptions::new(directory.path().join("shop.db")) };
        let journal = Arc::new(SqliteJournal::open(&options).unwrap());
        Self { directory, journal, clock }
    }

    fn work(&self, routes: &Routes) -> Worker {
        // The events of these tests are years old, and the janitor must not be faster than the test.
        let century = Duration::from_secs(36_500 * 86_400);
        let retention = Retention { payload: century, dead: None, audit: century, batch: 100 };
        let deliveries = Arc::clone(&self.journal) as Arc<dyn Deliveries>;
        Worker::start(deliveries, routes, retention, self.clock.clone(), Arc::new(Metrics::new()))
    }

    fn count(&self, sql: &str) -> i64 {
        database(self.directory.path()).query_row(sql, [], |row| row.get(0)).unwrap()
    }

    /// Waits until no delivery waits or runs.
    async fn drained(&self) {
        for _ in 0..1_000 {
            let backlog = self.journal.backlog().await.unwrap();
            if backlog.iter().all(|route| route.waiting + route.running == 0) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("not drained: {:?}", self.journal.backlog().await);
    }

    async fn only(&self) -> EventDetail {
        let page = self.journal.list(EventQuery { limit: 2, ..EventQuery::default() }).await.unwrap();
        assert_eq!(page.events.len(), 1);
        self.journal.show(page.events[0].id).await.unwrap().unwrap()
    }

    async fn status(&self) -> EventStatus {
        self.only().await.event.status
    }
}

fn database(directory: &Path) -> Connection {
    let connection = Connection::open(directory.join("shop.db")).unwrap();
    connection.busy_timeout(Duration::from_secs(5)).unwrap();
    connection
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
    Handler::Sql(Arc::new(SqlHandler::new(statements, &bind, Dialect::Sqlite).unwrap()))
}

fn orders() -> Route {
    let insert = "INSERT INTO orders (payment, amount) VALUES (:payment, :amount) RETURNING id, payment";
    route("orders", sql(&[insert], &[("payment", "/payment"), ("amount", "/amount")]))
}

fn payment(number: usize) -> NewEvent {
    let body = format!(r#"{{"payment":"pi_{number}","amount":{number}}}"#);
    NewEvent { routes: [name("orders")].into_iter().collect(), ..event(&format!("evt_{number}"), &body) }
}

#[tokio::test(flavor = "multi_thread")]
async fn r20_r22_r25_an_effect_happens_once_and_its_follow_up_knows_its_result() {
    let shop = Shop::new();
    let mut mail =
        route("mail", sql(&["INSERT INTO mails VALUES (:order, :key)"], &[("order", "$result/id"), ("key", "$key")]));
    mail.after = Some(name("orders"));
    let worker = shop.work(&Routes::new(vec![orders(), mail]).unwrap());
    for _ in 0..3 {
        append(&*shop.journal, [payment(7)]).await;
    }
    shop.drained().await;
    worker.stop().await;
    assert_eq!(shop.count("SELECT count(*) FROM orders WHERE payment = 'pi_7' AND amount = 7"), 1);
    assert_eq!(shop.count("SELECT count(*) FROM mails JOIN orders ON id = order_id WHERE key = 'evt_7'"), 1);
    let story = shop.only().await;
    assert_eq!(story.event.status, EventStatus::Succeeded);
    let delivery = |route: &str| story.event.deliveries.iter().find(|one| one.route == route).unwrap();
    assert_eq!(delivery("orders").result.as_deref(), Some(r#"{"id":1,"payment":"pi_7"}"#));
    assert_eq!((delivery("orders").attempt, delivery("orders").attempts.len()), (1, 1));
    assert_eq!((delivery("mail").state.as_str(), delivery("mail").attempt), ("succeeded", 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn r20_statements_of_one_delivery_commit_together_or_not_at_all() {
    let shop = Shop::new();
    let two =
        ["INSERT INTO orders (payment, amount) VALUES (:payment, 1); INSERT INTO mails VALUES (:order, :payment)"];
    let worker = shop
        .work(&Routes::new(vec![route("orders", sql(&two, &[("payment", "/payment"), ("order", "/order")]))]).unwrap());
    let routed =
        |key: &str, body: &str| NewEvent { routes: [name("orders")].into_iter().collect(), ..event(key, body) };
    // The second statement of the odd ones fails: NOT NULL.
    let events = (0..50).map(|number| {
        let order = if number % 2 == 1 { "null" } else { "1" };
        routed(&format!("evt_{number}"), &format!(r#"{{"payment":"pi_{number}","order":{order}}}"#))
    });
    append(&*shop.journal, events).await;
    shop.drained().await;
    worker.stop().await;
    assert_eq!(shop.count("SELECT count(*) FROM orders"), 25);
    assert_eq!(shop.count("SELECT count(*) FROM mails"), 25);
    assert_eq!(shop.count("SELECT count(*) FROM oncehook_deliveries WHERE state = 'dead' AND attempt = 3"), 25);
    assert_eq!(shop.count("SELECT count(*) FROM oncehook_attempts WHERE outcome = 'failed'"), 75);
}

/// The seed incident turned harmless: the column was renamed under the running handler.
#[tokio::test(flavor = "multi_thread")]
async fn r27_a_renamed_column_ends_dead_and_one_retry_applies_it_once() {
    let shop = Shop::new();
    let worker = shop.work(&Routes::new(vec![orders()]).unwrap());
    database(shop.directory.path()).execute_batch("ALTER TABLE orders RENAME COLUMN amount TO cents").unwrap();
    let id = append(&*shop.journal, [payment(1)]).await[0].id;
    shop.drained().await;
    let story = shop.only().await;
    let delivery = &story.event.deliveries[0];
    assert_eq!((story.event.status, delivery.attempt, delivery.attempts.len()), (EventStatus::Dead, 3, 3));
    assert!(delivery.error.as_deref().unwrap().contains("no column named amount"), "{delivery:?}");
    assert_eq!(delivery.cause.as_deref(), Some("handler"));
    assert_eq!(shop.count("SELECT count(*) FROM orders"), 0);

    database(shop.directory.path()).execute_batch("ALTER TABLE orders RENAME COLUMN cents TO amount").unwrap();
    let order = Order {
        event: id,
        verb: Verb::Retry,
        route: None,
        who: Who { name: "test".to_owned(), reason: None },
        wanting: Vec::new(),
        attempts: 3,
    };
    shop.journal.order(order.clone()).await.unwrap();
    shop.drained().await;
    assert_eq!(shop.status().await, EventStatus::Succeeded);
    assert_eq!(shop.count("SELECT count(*) FROM orders"), 1);
    // Again: there is nothing to retry, and nothing happens.
    assert!(shop.journal.order(order).await.is_err());
    shop.drained().await;
    worker.stop().await;
    assert_eq!(shop.count("SELECT count(*) FROM orders"), 1);
    assert_eq!(shop.only().await.event.deliveries[0].attempts.len(), 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_50_a_poison_event_costs_only_itself() {
    let shop = Shop::new();
    let worker = shop.work(&Routes::new(vec![orders()]).unwrap());
    let poison = |key: &str, body: &str| NewEvent { routes: payment(0).routes, ..event(key, body) };
    let mut events: Vec<NewEvent> = (0..500).map(payment).collect();
    events.insert(100, poison("none", r#"{"amount":1}"#));
    events.insert(200, poison("null", r#"{"payment":null,"amount":1}"#));
    events.insert(300, poison("text", "not json"));
    events.insert(400, poison("twice", r#"{"payment":"a","payment":"b","amount":1}"#));
    for event in events {
        append(&*shop.journal, [event]).await;
    }
    shop.drained().await;
    worker.stop().await;
    assert_eq!(shop.count("SELECT count(*) FROM orders"), 500);
    assert_eq!(shop.count("SELECT count(*) FROM oncehook_deliveries WHERE state = 'dead'"), 4);
    // What leads nowhere is final at once; what the database refuses is tried again.
    assert_eq!(shop.count("SELECT count(*) FROM oncehook_deliveries WHERE state = 'dead' AND attempt = 1"), 3);
    let errors = shop.count("SELECT count(*) FROM oncehook_deliveries WHERE error LIKE '%leads nowhere%'");
    assert_eq!(errors, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn r20_a_handler_cannot_break_out_of_its_transaction() {
    for (statement, why) in [
        ("COMMIT", "may not"),
        ("ROLLBACK", "may not"),
        ("SAVEPOINT x", "may not"),
        ("PRAGMA synchronous = OFF", "may not"),
        ("ATTACH ':memory:' AS other", "may not"),
        ("DELETE FROM oncehook_keys", "may not"),
        ("UPDATE oncehook_deliveries SET state = 'succeeded'", "may not"),
        ("INSERT INTO mails SELECT 1, key FROM oncehook_events", "may not"),
        ("CREATE TRIGGER t AFTER INSERT ON oncehook_events BEGIN SELECT 1; END", "may not"),
        ("DROP TABLE OnceHook_audit", "may not"),
        ("WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n", "took longer"),
        ("SELECT missing FROM orders", "no such column"),
    ] {
        let shop = Shop::new();
        let mut once = route("orders", sql(&["INSERT INTO mails VALUES (1, 'trace')", statement], &[]));
        if statement.starts_with("CREATE") {
            // The splitter would cut the trigger's body; it is refused at its first part all the same.
            once =
                route("orders", sql(&["INSERT INTO mails VALUES (1, 'trace')", "DROP VIEW oncehook_retry_logs"], &[]));
        }
        once.retry.max_attempts = 1;
        let worker = shop.work(&Routes::new(vec![once]).unwrap());
        append(&*shop.journal, [payment(1)]).await;
        shop.drained().await;
        worker.stop().await;
        let story = shop.only().await;
        let error = story.event.deliveries[0].error.clone().unwrap_or_default();
        assert!(story.event.status == EventStatus::Dead && error.contains(why), "{statement}: {error}");
        assert_eq!(shop.count("SELECT count(*) FROM mails"), 0, "{statement}");
        shop.journal.self_test().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_15_a_panic_in_a_function_costs_an_attempt_and_nothing_else() {
    let shop = Shop::new();
    let calls = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&calls);
    let function = move |database: &Connection, event: &HandedEvent| {
        let insert = "INSERT INTO orders (payment, amount) VALUES (?1, 1)";
        database
            .execute(insert, [event.key.display()])
            .map_err(|error| Failure::retry(Cause::Handler, error.to_string()))?;
        match counted.fetch_add(1, Ordering::SeqCst) {
            0 => panic!("on the first try"),
            1 => Err(Failure::retry(Cause::Handler, "on the second")),
            _ => Ok(Some(serde_json::json!({ "try": 3 }))),
        }
    };
    let routes = Routes::new(vec![route("orders", Handler::Function(Arc::new(function)))]).unwrap();
    let worker = shop.work(&routes);
    append(&*shop.journal, [payment(1)]).await;
    shop.drained().await;
    worker.stop().await;
    assert_eq!(routes.get("orders").unwrap().failures.noted(), 2, "both failures are reported to the log");
    let story = shop.only().await;
    let attempts: Vec<_> =
        story.event.deliveries[0].attempts.iter().map(|one| one.error.clone().unwrap_or_default()).collect();
    assert_eq!(story.event.status, EventStatus::Succeeded);
    assert_eq!(attempts, ["the handler panicked: on the first try", "on the second", ""]);
    assert_eq!((calls.load(Ordering::SeqCst), shop.count("SELECT count(*) FROM orders")), (3, 1));
}

/// A worker that was frozen past its lease comes back: its effect is undone, because its attempt is not the latest.
#[tokio::test(flavor = "multi_thread")]
async fn fault_17_fault_41_a_zombie_commits_nothing() {
    let directory = tempfile::tempdir().unwrap();
    database(directory.path()).execute_batch(SHOP).unwrap();
    let clock = Clock::manual(oncehook_verify::UnixMicros(1_700_000_000_000_000));
    let options = SqliteOptions { clock: clock.clone(), ..SqliteOptions::new(directory.path().join("shop.db")) };
    let journal = SqliteJournal::open(&options).unwrap();
    let insert = |database: &Connection, event: &HandedEvent| {
        let insert = "INSERT INTO mails VALUES (1, ?1)";
        let inserted = database.execute(insert, [event.key.display()]);
        inserted.map(|_| None).map_err(|error| Failure::retry(Cause::Handler, error.to_string()))
    };
    let route = Routes::new(vec![route("orders", Handler::Function(Arc::new(insert)))]).unwrap();
    let route = route.get("orders").unwrap();
    append(&journal, [payment(1)]).await;
    let lease = Duration::from_secs(15);
    let claim = async || -> Vec<Claim> { journal.claim(Arc::clone(route), 10, lease).await.unwrap() };
    let frozen = claim().await;
    assert_eq!((frozen.len(), claim().await.len()), (1, 0));
    clock.set(oncehook_verify::UnixMicros(clock.now().0 + 20_000_000));
    assert_eq!(journal.reclaim(Arc::clone(route)).await.unwrap(), 1);
    clock.set(oncehook_verify::UnixMicros(clock.now().0 + 20_000_000));
    let second = claim().await;
    assert_eq!(second[0].fence.attempt, 2);
    // The zombie wakes before the second has settled, and again after.
    assert_eq!(journal.call(Arc::clone(route), frozen.clone()).await.unwrap(), [Settled::Lost]);
    assert_eq!(journal.call(Arc::clone(route), second).await.unwrap(), [Settled::Done]);
    assert_eq!(journal.call(Arc::clone(route), frozen).await.unwrap(), [Settled::Lost]);
    let mails: i64 = database(directory.path()).query_row("SELECT count(*) FROM mails", [], |row| row.get(0)).unwrap();
    assert_eq!(mails, 1);
}

/// Runs 20 events through one `sql` route of several statements; every fourth has `bad: true`. Gives the number of rows
/// in `mails` and the errors of the dead.
async fn among_good_ones(schema: &str, statements: &[&str]) -> (i64, Vec<String>) {
    let shop = Shop::new();
    database(shop.directory.path()).execute_batch(schema).unwrap();
    let mut once = route("orders", sql(statements, &[("bad", "/bad"), ("key", "$key")]));
    once.retry.max_attempts = 2;
    let events = (0..20).map(|number| {
        let body = format!(r#"{{"bad":{}}}"#, i32::from(number % 4 == 3));
        NewEvent { routes: [name("orders")].into_iter().collect(), ..event(&format!("evt_{number}"), &body) }
    });
    append(&*shop.journal, events).await;
    let worker = shop.work(&Routes::new(vec![once]).unwrap());
    shop.drained().await;
    worker.stop().await;
    let page = shop.journal.list(EventQuery { limit: 100, ..EventQuery::default() }).await.unwrap();
    let dead = page.events.iter().filter(|event| event.status == EventStatus::Dead);
    let errors = dead.map(|event| event.deliveries[0].error.clone().unwrap_or_default()).collect();
    // Whatever a handler did, events are accepted.
    append(&*shop.journal, [event("after", "{}")]).await;
    (shop.count("SELECT count(*) FROM mails"), errors)
}

fn all_say(errors: &[String], words: &str) {
    assert!(errors.len() == 5 && errors.iter().all(|error| error.contains(words)), "{words}: {errors:?}");
}

/// A statement that fails may have left rows behind; a transaction may fail at its commit, or be ended by a trigger. None of
/// it may stay, and the neighbours take effect once.
#[tokio::test(flavor = "multi_thread")]
async fn r20_nothing_of_a_failed_delivery_stays_whatever_way_it_failed() {
    let list = "INSERT OR FAIL INTO mails SELECT value, :key FROM json_each('[1,2,null]') WHERE :bad OR value = 1";
    let (mails, errors) = among_good_ones("", &[list]).await;
    assert_eq!(mails, 15);
    all_say(&errors, "NOT NULL");

    let schema = "CREATE TABLE parent (id INTEGER PRIMARY KEY); INSERT INTO parent VALUES (0);
                  CREATE TABLE child (parent REFERENCES parent DEFERRABLE INITIALLY DEFERRED)";
    let (mails, errors) =
        among_good_ones(schema, &["INSERT INTO child VALUES (:bad)", "INSERT INTO mails VALUES (1, :key)"]).await;
    assert_eq!(mails, 15);
    all_say(&errors, "FOREIGN KEY");

    let schema = "CREATE TABLE t (bad INTEGER);
                  CREATE TRIGGER tr BEFORE INSERT ON t WHEN NEW.bad BEGIN SELECT RAISE(ROLLBACK, 'over'); END";
    let (mails, errors) =
        among_good_ones(schema, &["INSERT INTO mails VALUES (1, :key)", "INSERT INTO t VALUES (:bad)"]).await;
    assert_eq!(mails, 15);
    all_say(&errors, "over");

    // A full table is the handler's trouble, not the disk's.
    let schema = "CREATE TABLE full (id INTEGER PRIMARY KEY AUTOINCREMENT, x);
                  INSERT INTO full VALUES (9223372036854775807, 0)";
    let full = "INSERT INTO full (x) SELECT 1 WHERE :bad";
    let (mails, errors) = among_good_ones(schema, &["INSERT INTO mails VALUES (1, :key)", full]).await;
    assert_eq!(mails, 15);
    all_say(&errors, "full");
}

/// A function that goes on writing after SQLite has ended the transaction writes nothing.
#[tokio::test(flavor = "multi_thread")]
async fn r20_a_function_writes_nothing_outside_its_transaction() {
    let shop = Shop::new();
    let schema = "CREATE TABLE t (x); CREATE TRIGGER tr BEFORE INSERT ON t BEGIN SELECT RAISE(ROLLBACK, 'over'); END";
    database(shop.directory.path()).execute_batch(schema).unwrap();
    let stubborn = |database: &Connection, _: &HandedEvent| {
        let _ = database.execute("INSERT INTO mails VALUES (1, 'before')", []);
        assert!(database.execute("INSERT INTO t VALUES (1)", []).is_err());
        let after = database.execute("INSERT INTO mails VALUES (2, 'after')", []);
        assert!(after.is_err(), "a write outside the transaction went through");
        Ok(None)
    };
    let mut once = route("orders", Handler::Function(Arc::new(stubborn)));
    once.retry.max_attempts = 2;
    let worker = shop.work(&Routes::new(vec![once]).unwrap());
    append(&*shop.journal, [payment(1)]).await;
    shop.drained().await;
    worker.stop().await;
    let story = shop.only().await;
    assert_eq!(story.event.status, EventStatus::Dead);
    assert!(story.event.deliveries[0].error.as_deref().unwrap().contains("transaction ended"), "{story:?}");
    assert_eq!(shop.count("SELECT count(*) FROM mails"), 0);
}

/// The clock was ahead when the process began, and is right again at the next start: nothing waits for the old time.
#[tokio::test(flavor = "multi_thread")]
async fn fault_18_what_is_due_does_not_wait_for_a_clock_that_was_ahead() {
    let directory = tempfile::tempdir().unwrap();
    let at = |seconds: i64| oncehook_verify::UnixMicros(seconds * 1_000_000);
    let open = |clock: &Clock| {
        let path = directory.path().join("shop.db");
        SqliteJournal::open(&SqliteOptions { clock: clock.clone(), ..SqliteOptions::new(path) }).unwrap()
    };
    let ahead = open(&Clock::manual(at(2_000_000_000)));
    append(&ahead, [payment(1)]).await;
    ahead.close().await;
    let clock = Clock::manual(at(1_700_000_000));
    let journal = open(&clock);
    let routes = Routes::new(vec![orders()]).unwrap();
    let route = Arc::clone(routes.get("orders").unwrap());
    let claims = journal.claim(route, 10, Duration::from_secs(15)).await.unwrap();
    assert_eq!(claims.len(), 1);
    journal.close().await;
}
