//! Lists on PostgreSQL: the search index that is filled behind the accepts finds what a walk finds, and spares the walk.

use std::time::{Duration, Instant};

use oncehook::clock::Clock;
use oncehook::event::{NewEvent, SourceName};
use oncehook::handler::Dialect;
use oncehook::journal::memory::MemoryJournal;
use oncehook::journal::postgres::{PostgresJournal, PostgresOptions};
use oncehook::journal::{EventQuery, EventStatus, Journal, JournalReader};
use oncehook_testkit::journal::{NOW, append, event};
use oncehook_testkit::postgres::{Database, Server};
use oncehook_verify::UnixMicros;

use crate::lists::{fill, filters, keys, orders, second, work};

/// Waits until everything up to this time is marked.
async fn marked(database: &Database<'_>, to: UnixMicros) {
    let begun = Instant::now();
    while database.query("SELECT span FROM oncehook.marked").parse::<i64>().unwrap() < (to.0 / 1_000) >> 12 {
        assert!(begun.elapsed() < Duration::from_secs(60), "nothing is marked");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn r34_lists_on_postgres_find_with_the_index_what_the_reference_finds() {
    let database = Server::shared().database();
    let clock = Clock::manual(NOW);
    let reference = MemoryJournal::with_clock(clock.clone());
    let options = PostgresOptions { clock: clock.clone(), ..PostgresOptions::new(database.url()) };
    let journal = PostgresJournal::open(&options).await.unwrap();
    fill(&reference).await;
    fill(&journal).await;
    work(&reference, orders(Dialect::Postgres), 60).await;
    work(&journal, orders(Dialect::Postgres), 60).await;
    let agree = async |when: &str| {
        for filter in filters() {
            assert_eq!(keys(&journal, &filter).await, keys(&reference, &filter).await, "{when}: {filter:?}");
        }
    };
    agree("before anything is marked").await;
    clock.set(second(100));
    marked(&database, second(60)).await;
    agree("half of it marked").await;
    clock.set(second(3_600));
    marked(&database, second(3_500)).await;
    agree("all of it marked").await;
    // Stored when its span is marked already.
    let late = NewEvent {
        source: SourceName::new("late").unwrap(),
        kind: Some("late".to_owned()),
        entity: Some("late".to_owned()),
        received_at: second(60),
        ..event("late", "{}")
    };
    append(&reference, [late.clone()]).await;
    append(&journal, [late]).await;
    let entity = EventQuery { entity: Some("late".to_owned()), ..Default::default() };
    assert_eq!(keys(&journal, &entity).await.len(), 1);
    agree("with one that came late").await;
    journal.close().await;
}

/// How many rows of the events were read so far. Only what ended sessions report is counted for sure.
fn read(database: &Database<'_>) -> i64 {
    let sql =
        "SELECT sum(coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0))::bigint FROM pg_stat_user_tables
                WHERE schemaname = 'oncehook' AND relname ~ '^events_'";
    database.query(sql).parse().unwrap()
}

/// Waits until the sessions of a closed journal have reported, and returns what was read since.
async fn read_since(database: &Database<'_>, before: i64) -> i64 {
    let mut last = -1;
    loop {
        let sessions = database.query("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'oncehook' AND datname = current_database()");
        let now = read(database);
        if sessions == "0" && now == last {
            return now - before;
        }
        last = now;
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn r34_a_rare_value_in_a_long_history_on_postgres_is_found_without_a_walk() {
    let database = Server::shared().database();
    PostgresJournal::migrate(&database.url()).await.unwrap();
    // One event a second, long ago; the odd ones are the oldest.
    database.query(&format!(
        "INSERT INTO oncehook.events (id, source, key, key_signed, type, entity, received_at, integrity, digest, headers, body)
         SELECT oncehook.first_id(at), CASE WHEN n < 100 THEN 'rare' ELSE 'shop' END, convert_to('evt_' || n, 'UTF8'), true,
                CASE WHEN n < 100 THEN 'rare' ELSE 'usual' END, 'entity-' || n, at, 'body', sha256('x'), ''::bytea, ''::bytea
           FROM (SELECT n, {} + n * 1000000 AS at FROM generate_series(1::bigint, 60000) AS n) AS t;
         INSERT INTO oncehook.deliveries (event, route, state, attempt, run_at)
         SELECT id, 'orders', CASE WHEN received_at < {} THEN 'dead' ELSE 'succeeded' END, 1, received_at FROM oncehook.events
          WHERE received_at > {};
         ANALYZE oncehook.events; ANALYZE oncehook.deliveries",
        NOW.0,
        second(100).0,
        second(5).0
    ));
    let journal = PostgresJournal::open(&PostgresOptions::new(database.url())).await.unwrap();
    marked(&database, second(60_001)).await;
    journal.close().await;
    drop(journal);
    let before = read(&database) + read_since(&database, read(&database)).await;
    let text = |text: &str| Some(text.to_owned());
    let journal = PostgresJournal::open(&PostgresOptions::new(database.url())).await.unwrap();
    for (query, wanted) in [
        (EventQuery { source: text("rare"), ..Default::default() }, 50),
        (EventQuery { kind: text("rare"), ..Default::default() }, 50),
        (EventQuery { entity: text("entity-3"), ..Default::default() }, 1),
        (EventQuery { status: Some(EventStatus::Dead), ..Default::default() }, 50),
        (EventQuery { status: Some(EventStatus::Unrouted), ..Default::default() }, 5),
        (EventQuery { source: text("shop"), ..Default::default() }, 50),
        (EventQuery { until: Some(second(30_000)), ..Default::default() }, 50),
    ] {
        let page = journal.list(EventQuery { limit: 50, ..query.clone() }).await.unwrap();
        assert_eq!(page.events.len(), wanted, "{query:?}");
    }
    journal.close().await;
    drop(journal);
    let read = read_since(&database, before).await;
    assert!(read < 6_000, "{read} rows of 60,000 were read for seven pages");
}
