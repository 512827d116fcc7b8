//! Searches in a queue on PostgreSQL begin where the last one found something, and nothing before that place is forgotten.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use oncehook::delivery::RouteName;
use oncehook::event::{NewEvent, SourceName};
use oncehook::handler::{Dialect, Expression, Handler, SqlHandler};
use oncehook::journal::postgres::{PostgresJournal, PostgresOptions};
use oncehook::journal::{Deliveries, Journal};
use oncehook::ordering::Ordering;
use oncehook::route::Route;
use oncehook_testkit::journal::{append, event};
use oncehook_testkit::postgres::{Database, Server};

const EVENTS: usize = 600;

struct Queue {
    database: Database<'static>,
    journal: PostgresJournal,
    route: Route,
}

impl Queue {
    async fn new() -> Self {
        let database = Server::shared().database();
        database.query("CREATE TABLE applied (key text)");
        let bind: BTreeMap<_, _> = [("key".to_owned(), Expression::parse("$key").unwrap())].into();
        let handler = SqlHandler::new(&["INSERT INTO applied VALUES (:key)"], &bind, Dialect::Postgres).unwrap();
        let (name, source) = (RouteName::new("orders").unwrap(), SourceName::new("shop").unwrap());
        let route = Route::new(name, source, Handler::Sql(Arc::new(handler)));
        let journal = PostgresJournal::open(&PostgresOptions::new(database.url())).await.unwrap();
        for number in 0..EVENTS {
            let routes = [route.name.clone()].into_iter().collect();
            append(&journal, [NewEvent { routes, ..event(&format!("evt_{number:03}"), "{}") }]).await;
        }
        Self { database, journal, route }
    }

    /// As if a transaction that began long ago had committed only now.
    fn comes_late(&self, key: &str) {
        let changed = self.database.query(&format!(
            "UPDATE oncehook.deliveries SET state = 'ready', settled_at = NULL, run_at = 1
              WHERE event = (SELECT event FROM oncehook.keys WHERE key = '{key}') RETURNING route"
        ));
        assert_eq!(changed, "orders");
    }

    fn applied(&self) -> String {
        self.database.query("SELECT count(*), count(DISTINCT key) FROM applied")
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn r20_what_becomes_due_before_the_front_is_applied_before_the_queue_is_empty() {
    let queue = Queue::new().await;
    let route = Arc::new(queue.route.clone());
    assert_eq!(queue.journal.apply(Arc::clone(&route), 100).await.unwrap().succeeded, 100);
    queue.comes_late("evt_007");
    while queue.journal.apply(Arc::clone(&route), 100).await.unwrap().more {}
    assert_eq!(queue.applied(), "601|600");
    queue.journal.close().await;
}

/// A queue that never runs empty is looked at from its beginning all the same.
#[tokio::test(flavor = "multi_thread")]
async fn r20_what_becomes_due_before_the_front_is_applied_although_the_queue_stays_full() {
    let queue = Queue::new().await;
    let route = Arc::new(queue.route.clone());
    assert_eq!(queue.journal.apply(Arc::clone(&route), 5).await.unwrap().succeeded, 5);
    queue.comes_late("evt_002");
    tokio::time::sleep(Duration::from_millis(1_100)).await;
    let next = queue.journal.apply(Arc::clone(&route), 5).await.unwrap();
    assert!(next.more && next.succeeded >= 5);
    assert_eq!(queue.database.query("SELECT count(*) FROM applied WHERE key = 'evt_002'"), "2");
    queue.journal.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r14_what_becomes_due_before_the_front_is_leased_before_the_queue_is_empty() {
    for by_entity in [false, true] {
        let ordering = Ordering { by_entity, ..Ordering::default() };
        let queue = Queue::new().await;
        let route = Arc::new(Route { ordering, ..queue.route.clone() });
        let lease = Duration::from_secs(60);
        let mut leased = queue.journal.claim(Arc::clone(&route), 500, lease).await.unwrap();
        assert_eq!(leased.len(), 500, "{by_entity}");
        let late = leased.remove(3);
        queue.comes_late(&String::from_utf8_lossy(late.event.key.as_bytes()));
        loop {
            let next = queue.journal.claim(Arc::clone(&route), 50, lease).await.unwrap();
            if next.is_empty() {
                break;
            }
            leased.extend(next);
        }
        let events: HashSet<_> = leased.iter().map(|claim| claim.event.id).collect();
        assert_eq!((leased.len(), events.len()), (EVENTS, EVENTS), "{by_entity}");
        queue.journal.close().await;
    }
}
