//! Long lines: they go on in batches, and whoever is at their front is found.

use std::sync::Arc;
use std::time::Duration;

use oncehook::delivery::{Settled, Settlement, Verdict};
use oncehook::event::NewEvent;
use oncehook::handler::Dialect;
use oncehook::journal::mysql::{MysqlJournal, MysqlOptions};
use oncehook::journal::postgres::{PostgresJournal, PostgresOptions};
use oncehook::journal::sqlite::{SqliteJournal, SqliteOptions};
use oncehook::journal::{Deliveries, Journal};
use oncehook::ordering::Ordering;
use oncehook_testkit::journal::append;
use oncehook_testkit::mysql;
use oncehook_testkit::postgres::Server;

use super::{Place, in_the_journal, name, sql, step};

/// A long line that waited for one that was under way goes on in batches, and not one by one.
async fn a_long_line_goes_on<J: Journal + Deliveries>(journal: &J, dialect: Dialect) {
    let ordering = Ordering { by_entity: true, ..Ordering::default() };
    let route = Arc::new(sql("ordered", None, ordering, &Place(dialect, &in_the_journal)));
    let events = (1..=600).map(|number| {
        let routes = [name("ordered")].into_iter().collect();
        NewEvent { routes, ..step("long", number) }
    });
    append(journal, events.collect::<Vec<_>>()).await;
    let head = journal.claim(Arc::clone(&route), 1, Duration::from_secs(60)).await.unwrap().remove(0);
    while journal.apply(Arc::clone(&route), 256).await.unwrap().more {}
    assert_eq!(journal.backlog().await.unwrap()[0].blocked, 599);
    let verdict = Verdict::Succeeded(None);
    let settlement = Settlement { fence: head.fence, verdict, followups: Vec::new() };
    assert_eq!(journal.settle(vec![settlement]).await.unwrap(), [Settled::Done]);
    let mut batches = 0;
    while !journal.backlog().await.unwrap().is_empty() {
        journal.apply(Arc::clone(&route), 256).await.unwrap();
        batches += 1;
        assert!(batches < 20, "{:?}", journal.backlog().await.unwrap());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn r13_a_long_line_goes_on_in_batches_on_sqlite() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("shop.db");
    let database = rusqlite::Connection::open(&path).unwrap();
    database.execute_batch("CREATE TABLE effects (route TEXT, entity TEXT, step INTEGER)").unwrap();
    let journal = SqliteJournal::open(&SqliteOptions::new(&path)).unwrap();
    a_long_line_goes_on(&journal, Dialect::Sqlite).await;
    journal.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r13_a_long_line_goes_on_in_batches_on_postgres() {
    let database = Server::shared().database();
    database.query("CREATE TABLE effects (route text, entity text, step integer)");
    let journal = PostgresJournal::open(&PostgresOptions::new(database.url())).await.unwrap();
    a_long_line_goes_on(&journal, Dialect::Postgres).await;
    journal.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r13_a_long_line_goes_on_in_batches_on_mysql() {
    let database = mysql::Server::shared().database();
    database.query("CREATE TABLE effects (route varchar(32), entity varchar(32), step integer)");
    let journal = MysqlJournal::open(&MysqlOptions::new(database.url())).await.unwrap();
    a_long_line_goes_on(&journal, Dialect::Mysql).await;
    journal.close().await;
}

/// Whoever is at the front of a line has been due for less long than all that are behind, who are more than one sees at once.
async fn a_front_that_is_due_last_is_found<J: Journal + Deliveries>(
    journal: &J,
    dialect: Dialect,
    put_off: impl Fn(&str),
) {
    let ordering = Ordering { by_entity: true, ..Ordering::default() };
    let route = Arc::new(sql("ordered", None, ordering, &Place(dialect, &in_the_journal)));
    let events: Vec<NewEvent> = (1..=300)
        .map(|number| NewEvent { routes: [name("ordered")].into_iter().collect(), ..step("long", number) })
        .collect();
    let first = events[0].key.clone();
    append(journal, events).await;
    put_off(first.display().as_ref());
    for _ in 0..10 {
        let claims = journal.claim(Arc::clone(&route), 16, Duration::from_secs(60)).await.unwrap();
        if let [claim] = claims.as_slice() {
            assert_eq!(claim.event.key, first);
            return;
        }
        assert!(claims.is_empty(), "{} at once", claims.len());
    }
    panic!("nobody finds it");
}

#[tokio::test(flavor = "multi_thread")]
async fn r13_a_front_that_is_due_last_is_found_on_postgres() {
    let database = Server::shared().database();
    let journal = PostgresJournal::open(&PostgresOptions::new(database.url())).await.unwrap();
    let put_off = |key: &str| {
        let changed = database.query(&format!(
            "UPDATE oncehook.deliveries SET run_at = oncehook.micros()
              WHERE event = (SELECT event FROM oncehook.keys WHERE key = '{key}') RETURNING route"
        ));
        assert_eq!(changed, "ordered");
    };
    a_front_that_is_due_last_is_found(&journal, Dialect::Postgres, put_off).await;
    journal.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r13_a_front_that_is_due_last_is_found_on_mysql() {
    let database = mysql::Server::shared().database();
    let journal = MysqlJournal::open(&MysqlOptions::new(database.url())).await.unwrap();
    let put_off = |key: &str| {
        let changed = database.query(&format!(
            "UPDATE oncehook_deliveries SET run_at = TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))
              WHERE event = (SELECT event FROM oncehook_keys WHERE `key` = '{key}'); SELECT ROW_COUNT()"
        ));
        assert_eq!(changed, "1");
    };
    a_front_that_is_due_last_is_found(&journal, Dialect::Mysql, put_off).await;
    journal.close().await;
}
