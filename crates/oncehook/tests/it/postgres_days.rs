//! The days of the journal on PostgreSQL: made ahead of time, and forgotten by dropping them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use oncehook::clock::Clock;
use oncehook::delivery::RouteName;
use oncehook::event::{EventId, NewEvent, SourceName};
use oncehook::handler::{Dialect, Handler, SqlHandler};
use oncehook::journal::postgres::{OpenError, PostgresJournal, PostgresOptions};
use oncehook::journal::{
    Deliveries, EventQuery, EventStatus, Forgotten, Journal, JournalReader, Order, OrderError, Retention, Verb,
    Verdict, Who,
};
use oncehook::route::Route;
use oncehook_testkit::days::{self, DAY, FEW, planted};
use oncehook_testkit::journal::{NOW, append, event};
use oncehook_testkit::postgres::{Database, Server};
use oncehook_verify::UnixMicros;

/// The day of [`NOW`], and how its partitions are named.
const TODAY: i64 = NOW.0 / DAY;
const TODAYS: &str = "20260921";

const RETENTION: Retention = Retention {
    payload: Duration::from_secs(30 * 86_400),
    dead: None,
    audit: Duration::from_secs(365 * 86_400),
    batch: 1_000,
};

async fn open(database: &Database<'_>, clock: &Clock) -> PostgresJournal {
    let options = PostgresOptions { clock: clock.clone(), ..PostgresOptions::new(database.url()) };
    PostgresJournal::open(&options).await.unwrap()
}

fn noon(day: i64) -> UnixMicros {
    UnixMicros(day * DAY + DAY / 2)
}

/// The names of the days that there are.
fn there(database: &Database<'_>, table: &str) -> Vec<String> {
    let sql = format!(
        "SELECT right(c.relname, 8) FROM pg_inherits h JOIN pg_class c ON c.oid = h.inhrelid
          WHERE h.inhparent = 'oncehook.{table}'::regclass AND c.relname <> '{table}_rest' ORDER BY 1"
    );
    database.query(&sql).lines().map(str::to_owned).collect()
}

/// Where an event is stored.
fn place(database: &Database<'_>, id: EventId) -> String {
    database.query(&format!("SELECT tableoid::regclass FROM oncehook.events WHERE id = '{id}'"))
}

fn received(key: &str, at: UnixMicros) -> NewEvent {
    NewEvent { received_at: at, expires_at: UnixMicros(at.0 + 90 * DAY), ..event(key, "{}") }
}

fn named(route: &str) -> RouteName {
    RouteName::new(route).unwrap()
}

fn route() -> Arc<Route> {
    let handler = SqlHandler::new(&["SELECT 1"], &Default::default(), Dialect::Postgres).unwrap();
    Arc::new(Route::new(named("orders"), SourceName::new("shop").unwrap(), Handler::Sql(Arc::new(handler))))
}

fn order(event: EventId, verb: Verb) -> Order {
    let who = Who { name: "ada".to_owned(), reason: Some("incident 7".to_owned()) };
    Order { event, verb, route: None, who, wanting: vec![named("orders")], attempts: 5 }
}

/// An operator says that the clock is right, however far it was set.
async fn trust_clock(journal: &PostgresJournal) {
    journal.trust_clock(Who { name: "ada".to_owned(), reason: None }).await.unwrap();
}

/// Forgets until a round is over. Returns the sums.
async fn forget_all(journal: &PostgresJournal, retention: Retention) -> Forgotten {
    let mut sum = Forgotten::default();
    trust_clock(journal).await;
    loop {
        let step = journal.forget(retention).await.unwrap();
        sum.events += step.events;
        sum.keys += step.keys;
        if !step.more {
            return sum;
        }
    }
}

fn plant(database: &Database<'_>, day: i64, count: i64) {
    database.query(&days::plant(day, count));
}

/// Sets the delivery of a planted event.
fn set(database: &Database<'_>, id: EventId, columns: &str) {
    database.query(&format!("UPDATE oncehook.deliveries SET {columns} WHERE event = '{id}'"));
}

/// Rows that belong to no event.
fn left_over(database: &Database<'_>) -> String {
    database.query(&days::left_over())
}

#[tokio::test(flavor = "multi_thread")]
async fn r33_days_are_made_ahead_and_what_has_none_goes_to_the_rest() {
    let database = Server::shared().database();
    let clock = Clock::manual(NOW);
    let journal = open(&database, &clock).await;
    for table in ["events", "attempts"] {
        assert_eq!(there(&database, table), [TODAYS, "20260922", "20260923", "20260924"]);
    }
    let first = append(&journal, [received("first", NOW)]).await[0].id;
    assert_eq!(place(&database, first), format!("oncehook.events_{TODAYS}"));
    let last = UnixMicros((TODAY + 1) * DAY - 1);
    let last = append(&journal, [received("last", last)]).await[0].id;
    assert_eq!(place(&database, last), format!("oncehook.events_{TODAYS}"));
    let next = append(&journal, [received("next", UnixMicros((TODAY + 1) * DAY))]).await[0].id;
    assert_eq!(place(&database, next), "oncehook.events_20260922");
    // A day later the janitor makes one more.
    clock.set(noon(TODAY + 1));
    forget_all(&journal, RETENTION).await;
    assert_eq!(there(&database, "events").last().unwrap(), "20260925");
    // Nobody made days for a week. Nothing is refused, and the day that has begun so goes on so.
    clock.set(noon(TODAY + 10));
    let late = append(&journal, [received("late", noon(TODAY + 10))]).await[0].id;
    assert_eq!(place(&database, late), "oncehook.events_rest");
    forget_all(&journal, RETENTION).await;
    let made = there(&database, "events");
    assert!(!made.contains(&"20261001".to_owned()) && made.contains(&"20261002".to_owned()), "{made:?}");
    let later = append(&journal, [received("later", UnixMicros(noon(TODAY + 10).0 + 1))]).await[0].id;
    assert_eq!(place(&database, later), "oncehook.events_rest");
    let keys: Vec<String> = journal
        .list(EventQuery { limit: 10, ..Default::default() })
        .await
        .unwrap()
        .events
        .iter()
        .map(|event| event.key.to_string())
        .collect();
    assert_eq!(keys, ["later", "late", "next", "last", "first"], "one list, newest first");
    // What has no day is forgotten in its time, too.
    clock.set(noon(TODAY + 41));
    assert_eq!(forget_all(&journal, RETENTION).await.events, 5);
    assert_eq!(left_over(&database), "");
    journal.self_test().await.unwrap();
    journal.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r33_events_of_today_in_the_rest_are_used_like_those_of_a_day() {
    let database = Server::shared().database();
    // Makes no days.
    PostgresJournal::migrate(&database.url()).await.unwrap();
    plant(&database, TODAY, 500);
    let waiting = planted(TODAY, 7);
    set(&database, waiting, "state = 'retrying', attempt = 1, settled_at = NULL");

    let clock = Clock::manual(noon(TODAY));
    let journal = open(&database, &clock).await;
    assert_eq!(place(&database, waiting), "oncehook.events_rest");
    assert_eq!(there(&database, "events"), ["20260922", "20260923", "20260924"], "today has begun already");
    let story = journal.show(waiting).await.unwrap().unwrap();
    assert_eq!(story.event.status, EventStatus::Retrying);
    assert_eq!(story.event.deliveries[0].attempts.len(), 1);
    assert_eq!(database.query("SELECT count(*) FROM oncehook.processed_events"), "500");
    assert_eq!(database.query("SELECT count(*) FROM oncehook.retry_logs"), "999");
    let again = NewEvent { key: story.event.key.clone(), digest: story.digest, ..received("", NOW) };
    let again = append(&journal, [again]).await[0];
    assert_eq!((again.id, again.verdict), (waiting, Verdict::Duplicate));
    assert_eq!(journal.claim(route(), 10, Duration::from_secs(15)).await.unwrap().len(), 1);
    clock.set(noon(TODAY + 31));
    assert_eq!(forget_all(&journal, RETENTION).await.events, 499);
    assert_eq!(left_over(&database), "");
    journal.close().await;
}

/// Fills the rest with so much of a past day that the server would read for long.
fn fill_rest(database: &Database<'_>) {
    database.query(&format!(
        "INSERT INTO oncehook.events (id, source, key, key_signed, received_at, integrity, digest, headers, body)
         SELECT oncehook.first_id(at), 'shop', convert_to('big_' || n, 'UTF8'), true, at, 'body', sha256('x'), ''::bytea, convert_to(repeat('x', 1500), 'UTF8')
           FROM (SELECT n, ({TODAY} - 5) * {DAY} + n * 1000 AS at FROM generate_series(1::bigint, 25000) AS n) AS t"
    ));
    assert_eq!(database.query("SELECT pg_relation_size('oncehook.events_rest') > 32 << 20"), "t");
}

#[tokio::test(flavor = "multi_thread")]
async fn r33_days_are_made_beside_a_big_rest() {
    let database = Server::shared().database();
    let clock = Clock::manual(noon(TODAY));
    let journal = open(&database, &clock).await;
    fill_rest(&database);
    // A node that ended half-way.
    database.query("ALTER TABLE oncehook.attempts_rest ADD CONSTRAINT without_20260905 CHECK (event < oncehook.first_id(1)) NOT VALID");
    clock.set(noon(TODAY + 2));
    forget_all(&journal, RETENTION).await;
    assert_eq!(there(&database, "events").last().unwrap(), "20260926");
    assert_eq!(there(&database, "attempts").last().unwrap(), "20260926");
    assert_eq!(promises(&database), "0");
    for ahead in [0, 1, 4, 5, 9] {
        append(&journal, [received(&format!("evt_{ahead}"), noon(TODAY + ahead))]).await;
    }
    journal.self_test().await.unwrap();
    journal.close().await;
}

/// Makes both tables of the rest promise to hold nothing of a day, as the journal does before it makes one beside a big rest.
fn promise(database: &Database<'_>, day: i64, name: &str) {
    for (table, id) in [("events", "id"), ("attempts", "event")] {
        database.query(&format!(
            "DO $$ BEGIN EXECUTE format('ALTER TABLE oncehook.{table}_rest ADD CONSTRAINT without_{name}
               CHECK ({id} < %L OR {id} >= %L) NOT VALID', oncehook.first_id({day} * {DAY}), oncehook.first_id(({day} + 1) * {DAY}));
             END $$"
        ));
    }
}

fn promises(database: &Database<'_>) -> String {
    database.query("SELECT count(*) FROM pg_constraint WHERE conname LIKE 'without%'")
}

/// A node promised for the rest and ended, or reads the rest for long: an event of that day goes first.
#[tokio::test(flavor = "multi_thread")]
async fn r33_an_event_is_stored_while_the_rest_promises_to_hold_none_of_its_day() {
    let database = Server::shared().database();
    let clock = Clock::manual(noon(TODAY));
    let journal = open(&database, &clock).await;
    // A node that ended half-way.
    promise(&database, TODAY + 10, "20261001");
    // One after the other: ids of a node only grow, so what is received after an event of the future gets a later id.
    let today = append(&journal, [received("evt_2", noon(TODAY))]).await[0];
    let ahead = append(&journal, [received("evt_1", noon(TODAY + 10))]).await[0];
    assert_eq!((today.verdict, ahead.verdict), (Verdict::New, Verdict::New));
    assert_eq!(place(&database, today.id), format!("oncehook.events_{TODAYS}"));
    assert_eq!(place(&database, ahead.id), "oncehook.events_rest");
    assert_eq!(promises(&database), "0");

    // A node that is reading the rest.
    promise(&database, TODAY + 11, "20261002");
    let (client, connection) = tokio_postgres::connect(&database.url(), tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    client.batch_execute("SELECT pg_advisory_lock(1684109683)").await.unwrap();
    let validate = "BEGIN; ALTER TABLE oncehook.events_rest VALIDATE CONSTRAINT without_20261002";
    client.batch_execute(validate).await.unwrap();
    let reading = tokio::spawn(async move { client.batch_execute("SELECT pg_sleep(300)").await });
    let begun = Instant::now();
    let stored = append(&journal, [received("evt_3", noon(TODAY + 11))]).await[0];
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    assert_eq!(stored.verdict, Verdict::New);
    assert_eq!(place(&database, stored.id), "oncehook.events_rest");
    assert_eq!(promises(&database), "0");
    let ended = reading.await.unwrap().unwrap_err();
    assert_eq!(ended.code(), Some(&tokio_postgres::error::SqlState::QUERY_CANCELED));
    journal.self_test().await.unwrap();
    journal.close().await;
}

/// A day of which the rest holds an event gets no promise and no partition, and its neighbour gets one.
#[tokio::test(flavor = "multi_thread")]
async fn r33_a_day_of_which_a_big_rest_holds_an_event_stays_in_the_rest() {
    let database = Server::shared().database();
    let clock = Clock::manual(noon(TODAY));
    let journal = open(&database, &clock).await;
    fill_rest(&database);
    append(&journal, [received("evt_4", noon(TODAY + 4))]).await;
    clock.set(noon(TODAY + 2));
    forget_all(&journal, RETENTION).await;
    let made = there(&database, "events");
    assert!(!made.contains(&"20260925".to_owned()) && made.contains(&"20260926".to_owned()), "{made:?}");
    assert_eq!(promises(&database), "0");
    append(&journal, [received("evt_5", noon(TODAY + 4))]).await;
    journal.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r33_a_dropped_day_leaves_what_must_be_kept_and_nothing_else() {
    let database = Server::shared().database();
    let clock = Clock::manual(noon(TODAY));
    let journal = open(&database, &clock).await;
    let count = FEW + 50;
    plant(&database, TODAY, count);
    let id = |number| planted(TODAY, number);
    set(&database, id(1), "state = 'ready', settled_at = NULL");
    set(&database, id(2), "state = 'retrying', settled_at = NULL");
    set(&database, id(3), &format!("state = 'running', settled_at = NULL, lease_until = {}", i64::MAX));
    set(&database, id(4), &format!("state = 'parked', settled_at = NULL, run_at = {}", i64::MAX));
    set(&database, id(5), "state = 'dead', error = 'no', cause = 'handler'");
    let held = format!("INSERT INTO oncehook.flags (event, flag, at) VALUES ('{}', 'quarantined', 0)", id(6));
    database.query(&held);
    // Died so long ago that it may go.
    set(&database, id(7), "state = 'dead', error = 'no', cause = 'handler', settled_at = 1");
    let retention = Retention { dead: Some(Duration::from_secs(90 * 86_400)), ..RETENTION };

    // The retention is over for the first half of the day. It waits for the second.
    clock.set(UnixMicros((TODAY + 31) * DAY - 1));
    assert_eq!(forget_all(&journal, retention).await.events, 0);
    clock.set(UnixMicros((TODAY + 31) * DAY));
    let forgotten = forget_all(&journal, retention).await;
    assert_eq!(i64::try_from(forgotten.events).unwrap(), count - 6);
    assert!(!there(&database, "events").contains(&TODAYS.to_owned()));
    assert!(!there(&database, "attempts").contains(&TODAYS.to_owned()));
    assert_eq!(left_over(&database), "");
    for number in 1..=6 {
        let story = journal.show(id(number)).await.unwrap().unwrap();
        assert_eq!(place(&database, id(number)), "oncehook.events_rest");
        assert_eq!(story.event.deliveries[0].attempts.len(), if number == 6 { 2 } else { 1 }, "{number}");
        assert_eq!(journal.body(id(number)).await.unwrap().unwrap().body, "{}");
    }
    assert_eq!(database.query("SELECT count(*) FROM oncehook.attempts"), "6");
    for gone in [7, 8, count] {
        assert!(journal.show(id(gone)).await.unwrap().is_none());
        let unknown = journal.order(order(id(gone), Verb::Replay)).await;
        assert_eq!(unknown.err(), Some(OrderError::NoEvent));
    }
    // Within its window the key remembers; a copy brings nothing back.
    let copy = NewEvent {
        digest: oncehook_verify::digest(format!("{TODAY}_8").as_bytes()),
        ..received(&format!("old_{TODAY}_8"), clock.now())
    };
    let copy = append(&journal, [copy]).await[0];
    assert_eq!((copy.id, copy.verdict), (id(8), Verdict::Duplicate));
    assert!(journal.show(id(8)).await.unwrap().is_none());
    // What was kept goes on.
    journal.order(order(id(5), Verb::Retry)).await.unwrap();
    assert_eq!(journal.claim(route(), 10, Duration::from_secs(15)).await.unwrap().len(), 3);
    journal.self_test().await.unwrap();
    journal.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r33_a_day_of_which_too_much_stays_goes_row_by_row() {
    let database = Server::shared().database();
    let clock = Clock::manual(noon(TODAY));
    let journal = open(&database, &clock).await;
    plant(&database, TODAY, FEW + 200);
    database.query("UPDATE oncehook.deliveries SET state = 'ready', settled_at = NULL WHERE event IN (SELECT id FROM oncehook.events ORDER BY id OFFSET 100)");
    clock.set(noon(TODAY + 31));
    assert_eq!(forget_all(&journal, RETENTION).await.events, 100);
    assert!(there(&database, "events").contains(&TODAYS.to_owned()));
    assert_eq!(left_over(&database), "");
    database.query("UPDATE oncehook.deliveries SET state = 'succeeded' WHERE event IN (SELECT id FROM oncehook.events ORDER BY id OFFSET 10)");
    assert_eq!(i64::try_from(forget_all(&journal, RETENTION).await.events).unwrap(), FEW + 90);
    assert!(!there(&database, "events").contains(&TODAYS.to_owned()));
    assert_eq!(database.query("SELECT count(*) FROM oncehook.events_rest"), "10");
    assert_eq!(left_over(&database), "");
    journal.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r33_a_short_retention_is_kept_to_within_a_big_day() {
    let database = Server::shared().database();
    let clock = Clock::manual(noon(TODAY));
    let journal = open(&database, &clock).await;
    plant(&database, TODAY, FEW + 50);
    let retention = Retention { payload: Duration::from_secs(3_600), ..RETENTION };
    // The events came in the first seconds of the day: an hour later the first 2,000 are old enough.
    clock.set(UnixMicros(TODAY * DAY + 3_600_000_000 + 2_000_000));
    assert_eq!(forget_all(&journal, retention).await.events, 2_000);
    assert_eq!(left_over(&database), "");
    journal.close().await;
}

/// Operators order replays of a day's events while the day is dropped.
#[tokio::test(flavor = "multi_thread")]
async fn r33_an_order_that_comes_while_its_day_is_dropped_finds_the_event_whole_or_nothing() {
    let database = Server::shared().database();
    let clock = Clock::manual(noon(TODAY));
    let journal = Arc::new(open(&database, &clock).await);
    let count = FEW + 5_000;
    plant(&database, TODAY, count);
    clock.set(noon(TODAY + 31));
    let over = Arc::new(AtomicBool::new(false));
    let operators: Vec<_> = (0..3_i64)
        .map(|operator| {
            let (journal, over) = (Arc::clone(&journal), Arc::clone(&over));
            tokio::spawn(async move {
                let (mut found, mut missing, mut busy) = (Vec::new(), 0, 0);
                let mut number = operator + 1;
                while !over.load(Ordering::Relaxed) && number < count {
                    let id = planted(TODAY, number);
                    match journal.order(order(id, Verb::ForceReplay { epoch: 1 })).await {
                        Ok(ordered) => {
                            assert_eq!(ordered.epoch, 1);
                            found.push(id);
                        }
                        Err(OrderError::NoEvent) => missing += 1,
                        // It waited for too long, and nothing was done.
                        Err(OrderError::Work(_)) => busy += 1,
                        Err(other) => panic!("{other}"),
                    }
                    number += 3;
                }
                (found, missing, busy)
            })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(200)).await;
    let begun = Instant::now();
    let mut forgotten = 0;
    while there(&database, "events").contains(&TODAYS.to_owned()) {
        assert!(begun.elapsed() < Duration::from_secs(60), "the day is never dropped");
        forgotten += forget_all(&journal, RETENTION).await.events;
    }
    tokio::time::sleep(Duration::from_millis(200)).await;
    over.store(true, Ordering::Relaxed);
    let (mut found, mut missing) = (Vec::new(), 0);
    for operator in operators {
        let (some, none, busy) = operator.await.unwrap();
        println!("{} orders carried out, {none} found nothing, {busy} had to wait for too long", some.len());
        found.extend(some);
        missing += none;
    }
    assert!(!found.is_empty() && missing > 0, "{} found, {missing} missing", found.len());
    for id in &found {
        let story = journal.show(*id).await.unwrap().expect("an order was carried out for it");
        assert_eq!((story.event.deliveries.len(), story.audit.len()), (2, 1));
        assert_eq!(journal.body(*id).await.unwrap().unwrap().body, "{}");
    }
    assert_eq!(forgotten + found.len(), usize::try_from(count).unwrap());
    let left = database.query("SELECT count(*) FROM oncehook.events");
    assert_eq!(left, found.len().to_string());
    forget_all(&journal, RETENTION).await;
    assert_eq!(left_over(&database), "");
    journal.close().await;
}

/// The node that drops a day ends before it has swept behind it.
#[tokio::test(flavor = "multi_thread")]
async fn r33_what_a_dropped_day_left_behind_is_not_seen_and_swept_by_the_next_node() {
    let database = Server::shared().database();
    let clock = Clock::manual(noon(TODAY));
    let journal = open(&database, &clock).await;
    plant(&database, TODAY, FEW + 50);
    for (number, state) in [(1, "dead"), (2, "skipped"), (3, "superseded")] {
        set(&database, planted(TODAY, number), &format!("state = '{state}'"));
    }
    clock.set(noon(TODAY + 31));
    let retention = Retention { dead: Some(Duration::from_secs(30 * 86_400)), ..RETENTION };
    trust_clock(&journal).await;
    while journal.forget(retention).await.unwrap().events == 0 {}
    journal.close().await;
    assert!(left_over(&database).contains("deliveries|"), "there is nothing to sweep");

    let journal = open(&database, &clock).await;
    for status in [None, Some(EventStatus::Dead), Some(EventStatus::Skipped), Some(EventStatus::Superseded)] {
        let page = journal.list(EventQuery { status, limit: 10, ..Default::default() }).await.unwrap();
        assert_eq!(page.events, [], "{status:?}");
    }
    assert_eq!(journal.backlog().await.unwrap(), []);
    assert_eq!(journal.claim(route(), 10, Duration::from_secs(15)).await.unwrap().len(), 0);
    assert_eq!(database.query("SELECT count(*) FROM oncehook.retry_logs"), "0");
    assert_eq!(forget_all(&journal, retention).await.events, 0);
    assert_eq!(left_over(&database), "");
    journal.close().await;
}

/// Two janitors on one database, and somebody who accepts all the time.
#[tokio::test(flavor = "multi_thread")]
async fn r33_r15_two_nodes_forget_days_at_once_and_accepting_goes_on() {
    let database = Server::shared().database();
    let clock = Clock::manual(noon(TODAY));
    let one = Arc::new(open(&database, &clock).await);
    let two = Arc::new(open(&database, &clock).await);
    let count = FEW + 50;
    for day in 0..3 {
        plant(&database, TODAY + day, count);
    }
    clock.set(noon(TODAY + 40));
    let over = Arc::new(AtomicBool::new(false));
    let accepting = {
        let (one, over, now) = (Arc::clone(&one), Arc::clone(&over), clock.now());
        tokio::spawn(async move {
            let mut accepted = 0;
            while !over.load(Ordering::Relaxed) {
                let event = received(&format!("new_{accepted}"), now);
                assert_eq!(append(&*one, [event]).await[0].verdict, Verdict::New);
                accepted += 1;
            }
            accepted
        })
    };
    let begun = Instant::now();
    let mut forgotten = 0;
    // A day that somebody was in the way of is left for the next round, and the days behind it are not.
    let old = || there(&database, "events").iter().any(|day| day.as_str() <= "20260923");
    while old() || !left_over(&database).is_empty() {
        assert!(begun.elapsed() < Duration::from_secs(60), "{}", left_over(&database));
        let (first, second) = tokio::join!(forget_all(&one, RETENTION), forget_all(&two, RETENTION));
        forgotten += first.events + second.events;
    }
    over.store(true, Ordering::Relaxed);
    let accepted = accepting.await.unwrap();
    assert!(accepted > 0);
    assert_eq!(i64::try_from(forgotten).unwrap(), 3 * count);
    assert_eq!(database.query("SELECT count(*) FROM oncehook.events"), accepted.to_string());
    one.close().await;
    two.close().await;
}

/// Somebody reads the events for long: the day waits, and nobody else does for long.
#[tokio::test(flavor = "multi_thread")]
async fn r33_a_long_reader_keeps_a_day_from_being_dropped_and_nobody_from_being_accepted() {
    let database = Server::shared().database();
    let clock = Clock::manual(noon(TODAY));
    let journal = open(&database, &clock).await;
    plant(&database, TODAY, FEW + 50);
    clock.set(noon(TODAY + 31));
    let (client, connection) = tokio_postgres::connect(&database.url(), tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    client.batch_execute("BEGIN; SELECT count(*) FROM oncehook.events").await.unwrap();
    let (forgotten, accepted) = tokio::join!(forget_all(&journal, RETENTION), async {
        let mut accepted = 0;
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(2) {
            append(&journal, [received(&format!("new_{accepted}"), clock.now())]).await;
            accepted += 1;
        }
        accepted
    });
    assert_eq!(forgotten.events, 0);
    assert!(accepted > 0);
    assert!(there(&database, "events").contains(&TODAYS.to_owned()));
    client.batch_execute("COMMIT").await.unwrap();
    assert_eq!(i64::try_from(forget_all(&journal, RETENTION).await.events).unwrap(), FEW + 50);
    journal.close().await;
}

/// Another program changes a day while nobody looks: the journal must not open.
#[tokio::test(flavor = "multi_thread")]
async fn fault_105_r44_a_broken_day_is_found_before_the_first_request() {
    for change in [
        "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'oncehook.events_20260921_pkey'::regclass",
        "UPDATE pg_index SET indisunique = false WHERE indexrelid = 'oncehook.attempts_20260923_pkey'::regclass",
        "ALTER TABLE oncehook.events_20260922 SET UNLOGGED",
        "ALTER TABLE oncehook.events DETACH PARTITION oncehook.events_20260921",
        "ALTER TABLE oncehook.events DETACH PARTITION oncehook.events_rest",
        "ALTER TABLE oncehook.events DETACH PARTITION oncehook.events_20260922;
         ALTER TABLE oncehook.events ATTACH PARTITION oncehook.events_20260922
           FOR VALUES FROM (oncehook.first_id(1795000000000000)) TO (oncehook.first_id(1796000000000000))",
        "CREATE FUNCTION trick() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
         CREATE TRIGGER trick BEFORE INSERT ON oncehook.events_20260921 FOR EACH ROW EXECUTE FUNCTION trick()",
        "CREATE TABLE oncehook.events_old PARTITION OF oncehook.events
           FOR VALUES FROM (oncehook.first_id(0)) TO (oncehook.first_id(1000000))",
        "CREATE INDEX slow ON oncehook.events_20260921 (entity)",
    ] {
        let database = Server::shared().database();
        let clock = Clock::manual(NOW);
        let journal = open(&database, &clock).await;
        journal.close().await;
        database.query(change);
        let options = PostgresOptions { clock, ..PostgresOptions::new(database.url()) };
        let refused = PostgresJournal::open(&options).await.err();
        assert!(matches!(refused, Some(OpenError::Schema(_))), "{change}: {refused:?}");
    }
}
