//! What the provider says now, for handlers that are no statements in the journal's database: Rust functions, and statements in
//! another database. (Statements in the journal's own, and requests, are in the server's tests.)
//!
//! The tables have no unique keys on purpose. Whatever happens twice stands there twice.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use oncehook::clock::Clock;
use oncehook::delivery::{Failure, HandedEvent, RouteName};
use oncehook::event::{NewEvent, SourceName};
use oncehook::handler::{
    Dialect, Elsewhere, Expression, Fetch, FetchOptions, Guarded, Handler, OnMysql, OnPostgres, SqlHandler,
};
use oncehook::journal::mysql::{MysqlElsewhere, MysqlJournal, MysqlOptions};
use oncehook::journal::postgres::{PostgresElsewhere, PostgresJournal, PostgresOptions};
use oncehook::journal::sqlite::{SqliteJournal, SqliteOptions};
use oncehook::journal::{Deliveries, Journal, JournalReader, Retention};
use oncehook::observe::Metrics;
use oncehook::retry::RetryPolicy;
use oncehook::route::{BreakerPolicy, Route, Routes};
use oncehook::worker::Worker;
use oncehook_testkit::journal::{append, event};
use oncehook_testkit::receiver::{Receiver, Reply};
use oncehook_testkit::{mysql, postgres};

const YEARS: Duration = Duration::from_secs(36_500 * 86_400);

const TABLE: &str = "CREATE TABLE seen (entity VARCHAR(32), status VARCHAR(32))";

/// What is seen of the provider's object by a function. One that is called without it must not hide that by failing.
fn status(event: &HandedEvent) -> String {
    let Some(current) = &event.current else { return "nothing".to_owned() };
    let current: serde_json::Value = serde_json::from_str(current).unwrap();
    current["status"].as_str().unwrap().to_owned()
}

/// Statements that write down the same, in another database.
fn statements(database: Arc<dyn Guarded>, dialect: Dialect) -> Handler {
    let bind = [("entity", "$entity"), ("status", "$current/status")]
        .map(|(name, from)| (name.to_owned(), Expression::parse(from).unwrap()));
    let insert = ["INSERT INTO seen (entity, status) VALUES (:entity, :status)"];
    let statements = SqlHandler::new(&insert, &BTreeMap::from(bind), dialect).unwrap();
    Handler::Elsewhere(Arc::new(Elsewhere { statements, database, keep: YEARS }))
}

/// Two events of an entity, each delivered by a route with that handler. The provider fails three times, each time otherwise, and
/// then answers; at the second event the object has changed.
async fn deliver<J: Journal + Deliveries + JournalReader>(journal: &Arc<J>, handler: Handler) {
    let asked = AtomicUsize::new(0);
    let provider = Receiver::start(move |_, request| {
        assert_eq!(request.line, "GET /payouts/po_1 HTTP/1.1");
        match asked.fetch_add(1, Ordering::SeqCst) {
            0 => Reply::status(503, "not now"),
            1 => Reply::Reset,
            2 => Reply::status(200, "<html>"),
            3 => Reply::status(200, r#"{"status":"pending"}"#),
            _ => Reply::status(200, r#"{"status":"paid"}"#),
        }
    })
    .await;
    let name = RouteName::new("payouts").unwrap();
    let mut route = Route::new(name.clone(), SourceName::new("shop").unwrap(), handler);
    route.fetch = Some(Arc::new(Fetch::new(&FetchOptions::new(provider.url("/payouts/{entity}"))).unwrap()));
    route.retry = RetryPolicy { max_attempts: 10, base: Duration::from_millis(10), cap: Duration::from_millis(20) };
    route.breaker = BreakerPolicy { failures: 100, ..BreakerPolicy::default() };
    let routes = Routes::new(vec![route]).unwrap();
    let retention = Retention { payload: YEARS, dead: None, audit: YEARS, batch: 100 };
    let deliveries = Arc::clone(journal) as Arc<dyn Deliveries>;
    let worker = Worker::start(deliveries, &routes, retention, Clock::system(), Arc::new(Metrics::new()));
    let mut attempts = Vec::new();
    for key in ["evt_1", "evt_2"] {
        let payout = NewEvent {
            entity: Some("po_1".to_owned()),
            routes: [name.clone()].into_iter().collect(),
            ..event(key, r#"{"status":"as it was"}"#)
        };
        let id = append(&**journal, [payout]).await[0].id;
        let mut state = String::new();
        for _ in 0..3_000 {
            let story = journal.show(id).await.unwrap().unwrap();
            let delivery = &story.event.deliveries[0];
            state.clone_from(&delivery.state);
            assert_ne!(state, "dead", "{:?}", delivery.error);
            if state == "succeeded" {
                attempts.push(delivery.attempt);
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert_eq!(state, "succeeded");
    }
    worker.stop().await;
    assert_eq!(attempts, [4, 1], "every failure to fetch is one attempt");
    assert_eq!(provider.requests().len(), 5, "one request for each attempt");
}

const SEEN: &str = "po_1|pending\npo_1|paid";

#[tokio::test(flavor = "multi_thread")]
async fn r31_a_function_on_sqlite_is_given_what_was_fetched() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("shop.db");
    let database = rusqlite::Connection::open(&path).unwrap();
    database.execute_batch(TABLE).unwrap();
    let journal = Arc::new(SqliteJournal::open(&SqliteOptions::new(&path)).unwrap());
    let write = |database: &rusqlite::Connection, event: &HandedEvent| {
        let row = (&event.entity, status(event));
        database
            .execute("INSERT INTO seen VALUES (?1, ?2)", row)
            .map_err(|error| Failure::retry(oncehook::delivery::Cause::Handler, error.to_string()))?;
        Ok(None)
    };
    deliver(&journal, Handler::Function(Arc::new(write))).await;
    journal.close().await;
    let seen: String = database
        .query_row(
            "SELECT group_concat(line, char(10)) FROM (SELECT entity || '|' || status AS line FROM seen ORDER BY rowid)",
            [],
            |row| row.get(0),
        )
        .unwrap();
    assert_eq!(seen, SEEN);
}

async fn postgres_journal(database: &postgres::Database<'_>) -> Arc<PostgresJournal> {
    Arc::new(PostgresJournal::open(&PostgresOptions::new(database.url())).await.unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn r31_a_function_on_postgres_is_given_what_was_fetched() {
    let database = postgres::Server::shared().database();
    database.query(TABLE);
    let journal = postgres_journal(&database).await;
    let write = OnPostgres::new(|database, event| {
        Box::pin(async move {
            let status = status(event);
            database.execute("INSERT INTO seen VALUES ($1, $2)", &[&event.entity, &status]).await?;
            Ok(None)
        })
    });
    deliver(&journal, Handler::Function(Arc::new(write))).await;
    journal.close().await;
    assert_eq!(database.query("SELECT entity, status FROM seen ORDER BY ctid"), SEEN);
}

#[tokio::test(flavor = "multi_thread")]
async fn r31_a_function_on_mysql_is_given_what_was_fetched() {
    let database = mysql::Server::shared().database();
    database.query(TABLE);
    let journal = Arc::new(MysqlJournal::open(&MysqlOptions::new(database.url())).await.unwrap());
    let write = OnMysql::new(|database, event| {
        Box::pin(async move {
            let row = [event.entity.clone().into(), status(event).into()];
            database.execute("INSERT INTO seen VALUES (?, ?)", &row).await?;
            Ok(None)
        })
    });
    deliver(&journal, Handler::Function(Arc::new(write))).await;
    journal.close().await;
    assert_eq!(database.query("SELECT entity, status FROM seen"), SEEN);
}

#[tokio::test(flavor = "multi_thread")]
async fn r31_statements_in_another_postgres_are_given_what_was_fetched_from_a_journal_on_sqlite() {
    let directory = tempfile::tempdir().unwrap();
    let journal = Arc::new(SqliteJournal::open(&SqliteOptions::new(directory.path().join("journal.db"))).unwrap());
    let shop = postgres::Server::shared().database();
    shop.query(TABLE);
    let elsewhere = Arc::new(PostgresElsewhere::new(&shop.url()).unwrap());
    deliver(&journal, statements(elsewhere, Dialect::Postgres)).await;
    journal.close().await;
    assert_eq!(shop.query("SELECT entity, status FROM seen ORDER BY ctid"), SEEN);
}

#[tokio::test(flavor = "multi_thread")]
async fn r31_statements_in_another_mariadb_are_given_what_was_fetched_from_a_journal_on_postgres() {
    let database = postgres::Server::shared().database();
    let journal = postgres_journal(&database).await;
    let shop = mysql::Server::shared().database();
    shop.query(TABLE);
    let elsewhere = Arc::new(MysqlElsewhere::new(&shop.url()).unwrap());
    deliver(&journal, statements(elsewhere, Dialect::Mysql)).await;
    journal.close().await;
    assert_eq!(shop.query("SELECT entity, status FROM seen"), SEEN);
}
