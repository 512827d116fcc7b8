//! Functions on two nodes that fail now and then.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use oncehook::delivery::{Cause, Failure};
use oncehook::event::{NewEvent, SourceName};
use oncehook::handler::{Handler, OnMysql, OnPostgres};
use oncehook::journal::mysql::{MysqlJournal, MysqlOptions};
use oncehook::journal::postgres::{PostgresJournal, PostgresOptions};
use oncehook::journal::{Deliveries, Journal};
use oncehook::ordering::Ordering;
use oncehook::retry::RetryPolicy;
use oncehook::route::{Route, Routes};
use oncehook_testkit::mysql;
use oncehook_testkit::postgres::Server;

use super::{STEPS, name, read, step, work_through};

/// A function that fails now and then, on two nodes: those behind it wait, and each takes effect once, in the order of the line.
async fn functions_keep_the_order<J: Journal + Deliveries>(nodes: &[Arc<J>], handler: Handler) {
    let route = Route::new(name("orders"), SourceName::new("shop").unwrap(), handler);
    let retry = RetryPolicy { max_attempts: 100, base: Duration::from_millis(1), cap: Duration::from_millis(20) };
    let ordering = Ordering { by_entity: true, newer_only: true, ..Ordering::default() };
    let routes = Routes::new(vec![Route { ordering, retry, ..route }]).unwrap();
    let events = (1..=STEPS).flat_map(|number| {
        (0..12).map(move |entity| NewEvent {
            routes: [name("orders")].into_iter().collect(),
            ..step(&format!("e{entity}"), number)
        })
    });
    work_through(nodes, &routes, events.collect()).await;
    for node in nodes {
        node.close().await;
    }
}

/// Now and then something goes wrong after the statement.
fn now_and_then(call: u64) -> Result<Option<serde_json::Value>, Failure> {
    match call % 7 {
        3 => Err(Failure::retry(Cause::Handler, "not this time")),
        5 => panic!("out of order"),
        _ => Ok(None),
    }
}

/// Twelve entities, each with all of its steps in order.
fn judge_steps(listed: &str) {
    let mut steps: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (_, entity, step) in read(listed) {
        steps.entry(entity).or_default().push(step);
    }
    assert_eq!(steps.len(), 12);
    for (entity, steps) in steps {
        assert_eq!(steps, (1..=STEPS).collect::<Vec<_>>(), "{entity}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn r13_r14_functions_on_postgres_keep_the_order_of_their_entities() {
    let database = Server::shared().database();
    database.query("CREATE TABLE effects (id bigserial PRIMARY KEY, entity text, step integer)");
    let calls = Arc::new(AtomicU64::new(0));
    let function = OnPostgres::new(move |database, event| {
        let call = calls.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        Box::pin(async move {
            let step = i32::try_from(event.version.unwrap()).unwrap();
            let insert = "INSERT INTO effects (entity, step) VALUES ($1, $2)";
            database.execute(insert, &[&event.entity, &step]).await?;
            now_and_then(call)
        })
    });
    let mut nodes = Vec::new();
    for _ in 0..2 {
        nodes.push(Arc::new(PostgresJournal::open(&PostgresOptions::new(database.url())).await.unwrap()));
    }
    functions_keep_the_order(&nodes, Handler::Function(Arc::new(function))).await;
    judge_steps(&database.query("SELECT string_agg('orders ' || entity || ' ' || step, ',' ORDER BY id) FROM effects"));
}

#[tokio::test(flavor = "multi_thread")]
async fn r13_r14_functions_on_mysql_keep_the_order_of_their_entities() {
    let database = mysql::Server::shared().database();
    database.query("CREATE TABLE effects (id BIGINT AUTO_INCREMENT PRIMARY KEY, entity VARCHAR(16), step INT)");
    let calls = Arc::new(AtomicU64::new(0));
    let function = OnMysql::new(move |database, event| {
        let call = calls.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        Box::pin(async move {
            let row = [event.entity.clone().into(), event.version.unwrap().into()];
            database.execute("INSERT INTO effects (entity, step) VALUES (?, ?)", &row).await?;
            now_and_then(call)
        })
    });
    let mut nodes = Vec::new();
    for _ in 0..2 {
        nodes.push(Arc::new(MysqlJournal::open(&MysqlOptions::new(database.url())).await.unwrap()));
    }
    functions_keep_the_order(&nodes, Handler::Function(Arc::new(function))).await;
    let listed = "SELECT GROUP_CONCAT('orders ', entity, ' ', step ORDER BY id) FROM effects";
    judge_steps(&database.query(listed));
}
