//! How many statements each operation of a server journal sends, counted by the server and compared with
//! `statements.txt`: no more than stand there. A lost pipeline, a statement per row or one more round trip shows here before it shows in a benchmark.
//!
//! BEGIN, SET and COMMIT count, also where PostgreSQL gets several of them in one round trip. Every operation runs
//! until it has sent no more than written down, and at most [`REPEATS`] times, because the journal's own background work
//! (search index, identity) sends statements too. What tells other nodes of news does not count: PostgreSQL sends it some time after an operation, MySQL
//! looks for it all the time.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use oncehook::clock::Clock;
use oncehook::delivery::{RouteName, Settlement, Verdict};
use oncehook::event::{NewEvent, NewEvents, SourceName};
use oncehook::handler::{Dialect, Expression, Handler, SqlHandler};
use oncehook::journal::mysql::{MysqlJournal, MysqlOptions};
use oncehook::journal::postgres::{PostgresJournal, PostgresOptions};
use oncehook::journal::{EventQuery, Order, Verb, Who};
use oncehook::ordering;
use oncehook::route::Route;
use oncehook_testkit::deliveries::WholeJournal;
use oncehook_testkit::journal::event;
use oncehook_testkit::{mysql, postgres};
use oncehook_verify::UnixMicros;

/// How often each operation is counted at most.
const REPEATS: usize = 40;

/// The counts that are written down, by engine and operation.
fn written_down() -> BTreeMap<String, u64> {
    let line = |line: &str| {
        let (what, count) = line.rsplit_once(": ").unwrap();
        (what.to_owned(), count.parse().unwrap())
    };
    include_str!("statements.txt").lines().map(line).collect()
}

/// The events of a batch.
const BATCH: usize = 64;

struct Counting {
    journal: Arc<dyn WholeJournal>,
    count: Box<dyn Fn() -> u64>,
    /// What counting itself sends.
    own: u64,
    engine: &'static str,
    dialect: Dialect,
    next: AtomicUsize,
    found: BTreeMap<String, u64>,
}

impl Counting {
    /// New events for a route.
    fn events(&self, count: usize, route: &Route) -> NewEvents {
        let first = self.next.fetch_add(count, Ordering::Relaxed);
        let one = |number: usize| {
            let body = format!(r#"{{"payment":"pi_{number}"}}"#);
            let routes = [route.name.clone()].into_iter().collect();
            let by_entity = route.ordering.is_serial();
            let received_at = Clock::system().now();
            let expires_at = UnixMicros(received_at.0 + 86_400_000_000);
            let event = event(&format!("evt_{number}"), &body);
            NewEvent { routes, by_entity, received_at, expires_at, ..event }
        };
        (first..first + count).map(one).collect()
    }

    async fn append(&self, events: NewEvents) {
        self.journal.submit(events).unwrap().await.unwrap().unwrap();
    }

    fn route(&self, name: &str) -> Route {
        let bind = BTreeMap::from([("payment".to_owned(), Expression::parse("/payment").unwrap())]);
        let insert = "INSERT INTO orders (payment) VALUES (:payment)";
        let handler = Handler::Sql(Arc::new(SqlHandler::new(&[insert], &bind, self.dialect).unwrap()));
        Route::new(RouteName::new(name).unwrap(), SourceName::new("shop").unwrap(), handler)
    }

    /// Counts the statements of an operation. What `prepare` sends does not count.
    async fn operation<T>(
        &mut self,
        name: &str,
        prepare: impl AsyncFn(&Self) -> T,
        operate: impl AsyncFn(&Self, T) -> (),
    ) {
        let name = format!("{} {name}", self.engine);
        let most = written_down().get(&name).copied().unwrap_or(0);
        let mut least = u64::MAX;
        for _ in 0..REPEATS {
            let prepared = prepare(self).await;
            let before = (self.count)();
            operate(self, prepared).await;
            least = least.min(((self.count)() - before).saturating_sub(self.own));
            if least <= most {
                break;
            }
        }
        self.found.insert(name, least);
    }

    async fn all(mut self) -> BTreeMap<String, u64> {
        let mut own = u64::MAX;
        for _ in 0..REPEATS {
            let before = (self.count)();
            own = own.min((self.count)() - before);
        }
        self.own = own;
        let orders = Arc::new(self.route("orders"));
        let mut ordered = self.route("ordered");
        ordered.ordering = ordering::Ordering { by_entity: true, ..ordering::Ordering::default() };
        let ordered = Arc::new(ordered);

        let fresh = async |counting: &Self| counting.events(BATCH, &orders);
        let stored = async |counting: &Self, events: NewEvents| counting.append(events).await;
        self.operation("accepts 64 new events", fresh, stored).await;
        let known = async |counting: &Self| {
            let events = counting.events(BATCH, &orders);
            counting.append(events.clone()).await;
            events
        };
        self.operation("accepts 64 copies", known, stored).await;
        let apply = async |counting: &Self, route: &Arc<Route>| {
            while counting.journal.apply(Arc::clone(route), 256).await.unwrap().more {}
        };
        apply(&self, &orders).await;

        let waiting = async |counting: &Self| {
            counting.append(counting.events(BATCH, &orders)).await;
        };
        let applied = async |counting: &Self, (): ()| {
            let progress = counting.journal.apply(Arc::clone(&orders), 256).await.unwrap();
            assert_eq!(progress.succeeded, BATCH);
        };
        self.operation("applies 64 effects", waiting, applied).await;
        let in_queues = async |counting: &Self| {
            counting.append(counting.events(BATCH, &ordered)).await;
        };
        let applied = async |counting: &Self, (): ()| {
            let progress = counting.journal.apply(Arc::clone(&ordered), 256).await.unwrap();
            assert_eq!(progress.succeeded, BATCH);
        };
        self.operation("applies 64 ordered effects", in_queues, applied).await;

        let lease = Duration::from_secs(15);
        let claimed = async |counting: &Self, (): ()| {
            let claims = counting.journal.claim(Arc::clone(&orders), BATCH, lease).await.unwrap();
            assert_eq!(claims.len(), BATCH);
        };
        self.operation("claims 64", waiting, claimed).await;
        let to_settle = async |counting: &Self| {
            waiting(counting).await;
            let claims = counting.journal.claim(Arc::clone(&orders), BATCH, lease).await.unwrap();
            let settlement = |fence| Settlement { fence, verdict: Verdict::Succeeded(None), followups: Vec::new() };
            claims.into_iter().map(|claim| settlement(claim.fence)).collect::<Vec<_>>()
        };
        let settled = async |counting: &Self, settlements| {
            counting.journal.settle(settlements).await.unwrap();
        };
        self.operation("settles 64 leased attempts", to_settle, settled).await;

        let to_skip = async |counting: &Self| {
            waiting(counting).await;
            counting.journal.list(EventQuery { limit: 1, ..EventQuery::default() }).await.unwrap().events[0].id
        };
        let skipped = async |counting: &Self, event| {
            let who = Who { name: "test".to_owned(), reason: None };
            let order = Order { event, verb: Verb::Skip, route: None, wanting: Vec::new(), attempts: 1, who };
            counting.journal.order(order).await.unwrap();
        };
        self.operation("skips one event", to_skip, skipped).await;
        let nothing = async |_: &Self| ();
        let listed = async |counting: &Self, (): ()| {
            let query = EventQuery { limit: 20, ..EventQuery::default() };
            assert_eq!(counting.journal.list(query).await.unwrap().events.len(), 20);
        };
        self.operation("lists 20 events", nothing, listed).await;
        let shown = async |counting: &Self, event| assert!(counting.journal.show(event).await.unwrap().is_some());
        self.operation("shows one event", to_skip, shown).await;
        self.found
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn operations_send_no_more_statements_than_are_written_down() {
    let preload = "shared_preload_libraries=pg_stat_statements";
    let server: &'static _ = Box::leak(Box::new(postgres::Server::start(&[preload])));
    let database = server.database();
    database.query("CREATE EXTENSION pg_stat_statements; CREATE TABLE orders (payment text NOT NULL)");
    let journal = Arc::new(PostgresJournal::open(&PostgresOptions::new(database.url())).await.unwrap());
    let count = move || {
        let sql = "SELECT sum(calls) FROM pg_stat_statements
                    WHERE query NOT LIKE '%pg_stat_statements%' AND query NOT LIKE '%pg_notify%'";
        database.query(sql).parse().unwrap()
    };
    let counting = |journal, count, engine, dialect| Counting {
        journal,
        count,
        own: 0,
        engine,
        dialect,
        next: AtomicUsize::new(0),
        found: BTreeMap::new(),
    };
    let mut found = counting(journal, Box::new(count), "postgres", Dialect::Postgres).all().await;

    let server: &'static _ = Box::leak(Box::new(mysql::Server::start(&[])));
    let database = server.database();
    database.query("CREATE TABLE orders (payment VARCHAR(64) NOT NULL)");
    let journal = Arc::new(MysqlJournal::open(&MysqlOptions::new(database.url())).await.unwrap());
    database.query("SET GLOBAL log_output = 'TABLE', general_log = ON");
    let count = move || {
        let sql = "SELECT COUNT(*) FROM mysql.general_log WHERE command_type IN ('Query', 'Execute')
                      AND argument <> 'ROLLBACK' AND argument NOT LIKE '%general_log%'
                      AND argument NOT LIKE '%MAX(id) FROM oncehook_audit%'";
        database.query(sql).parse().unwrap()
    };
    found.extend(counting(journal, Box::new(count), "mysql", Dialect::Mysql).all().await);
    let most = written_down();
    let more: Vec<_> = found.iter().filter(|(what, sent)| most.get(*what).is_none_or(|most| *sent > most)).collect();
    assert!(more.is_empty() && most.len() == found.len(), "more than before: {more:?}; all: {found:#?}");
}
