//! A shop in a database that is not the journal's, on either engine, and two who hold attempts of the same delivery.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use oncehook::clock::Clock;
use oncehook::delivery::{Claim, RouteName, Settled, Settlement, Verdict};
use oncehook::event::{NewEvent, SourceName};
use oncehook::handler::elsewhere::{Applied, Task, Voided};
use oncehook::handler::{Dialect, Elsewhere, Expression, Guarded, Handler, SqlHandler};
use oncehook::journal::mysql::MysqlElsewhere;
use oncehook::journal::postgres::PostgresElsewhere;
use oncehook::journal::sqlite::{SqliteJournal, SqliteOptions};
use oncehook::journal::{Deliveries, Delivery, EventQuery, JournalReader, Order, Retention, Verb, Who};
use oncehook::observe::Metrics;
use oncehook::retry::RetryPolicy;
use oncehook::route::{BreakerPolicy, Route, Routes};
use oncehook::worker::Worker;
use oncehook_testkit::journal::event;
use oncehook_testkit::{mysql, postgres};
use oncehook_verify::UnixMicros;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Engine {
    Postgres,
    Mysql,
}

/// A server of the test's own, to be stopped.
pub(super) enum Server {
    Postgres(&'static postgres::Server),
    Mysql(&'static mysql::Server),
}

impl Server {
    pub(super) fn shared(engine: Engine) -> Self {
        match engine {
            Engine::Postgres => Self::Postgres(postgres::Server::shared()),
            Engine::Mysql => Self::Mysql(mysql::Server::shared()),
        }
    }

    pub(super) fn start(engine: Engine) -> Self {
        match engine {
            Engine::Postgres => Self::Postgres(Box::leak(Box::new(postgres::Server::start(&[])))),
            Engine::Mysql => Self::Mysql(Box::leak(Box::new(mysql::Server::start(&[])))),
        }
    }

    pub(super) fn database(&self) -> Database {
        match self {
            Self::Postgres(server) => Database::Postgres(server.database()),
            Self::Mysql(server) => Database::Mysql(server.database()),
        }
    }

    pub(super) fn crash(&self) {
        match self {
            Self::Postgres(server) => server.crash(),
            Self::Mysql(server) => server.crash(),
        }
    }

    pub(super) fn restart(&self) {
        match self {
            Self::Postgres(server) => server.restart(),
            Self::Mysql(server) => server.restart(),
        }
    }
}

/// The shop's database.
#[derive(Clone)]
pub(super) enum Database {
    Postgres(postgres::Database<'static>),
    Mysql(mysql::Database<'static>),
}

impl Database {
    /// Runs statements in which GUARDS stands for the table of the guards.
    pub(super) fn query(&self, sql: &str) -> String {
        match self {
            Self::Postgres(database) => database.query(&sql.replace("GUARDS", "oncehook_guard.oncehook_applied")),
            Self::Mysql(database) => database.query(&sql.replace("GUARDS", "oncehook_applied")),
        }
    }

    /// As a process sees it that starts now.
    pub(super) fn open(&self) -> Arc<dyn Guarded> {
        match self {
            Self::Postgres(database) => Arc::new(PostgresElsewhere::new(&database.url()).unwrap()),
            Self::Mysql(database) => Arc::new(MysqlElsewhere::new(&database.url()).unwrap()),
        }
    }

    pub(super) fn dialect(&self) -> Dialect {
        match self {
            Self::Postgres(_) => Dialect::Postgres,
            Self::Mysql(_) => Dialect::Mysql,
        }
    }

    pub(super) fn make_tables(&self) {
        let id = match self {
            Self::Postgres(_) => "serial",
            Self::Mysql(_) => "integer AUTO_INCREMENT",
        };
        self.query(&format!(
            "CREATE TABLE orders (id {id} PRIMARY KEY, payment varchar(100) NOT NULL, amount integer NOT NULL);
             CREATE TABLE mails (order_id integer NOT NULL, event_key varchar(100) NOT NULL)"
        ));
    }
}

pub(super) const LEASE: Duration = Duration::from_secs(15);

pub(super) const YEARS: Duration = Duration::from_secs(36_500 * 86_400);

/// A journal in a file, a shop in a database.
pub(super) struct Shop {
    _directory: tempfile::TempDir,
    pub(super) journal: Arc<SqliteJournal>,
    pub(super) clock: Clock,
    pub(super) database: Database,
    pub(super) elsewhere: Arc<dyn Guarded>,
}

impl Shop {
    pub(super) fn new(server: &Server, clock: Clock) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("journal.db");
        let options = SqliteOptions { clock: clock.clone(), ..SqliteOptions::new(path) };
        let journal = Arc::new(SqliteJournal::open(&options).unwrap());
        let database = server.database();
        database.make_tables();
        let elsewhere = database.open();
        Self { _directory: directory, journal, clock, database, elsewhere }
    }

    pub(super) fn shared(engine: Engine) -> Self {
        Self::new(&Server::shared(engine), Clock::system())
    }

    /// An insert of an order that returns columns of it.
    pub(super) fn returning(&self, insert: &str, columns: &str) -> Vec<String> {
        match self.database {
            Database::Postgres(_) => vec![format!("{insert} RETURNING {columns}")],
            Database::Mysql(_) => mysql::returning(insert, columns, "orders WHERE id = LAST_INSERT_ID()"),
        }
    }

    pub(super) fn handler<S: AsRef<str>>(&self, statements: &[S], bind: &[(&str, &str)]) -> Handler {
        let bind: BTreeMap<_, _> =
            bind.iter().map(|(name, value)| ((*name).to_owned(), Expression::parse(value).unwrap())).collect();
        let statements: Vec<&str> = statements.iter().map(AsRef::as_ref).collect();
        Handler::Elsewhere(Arc::new(Elsewhere {
            statements: SqlHandler::new(&statements, &bind, self.database.dialect()).unwrap(),
            database: self.elsewhere.clone(),
            keep: YEARS,
        }))
    }

    pub(super) fn orders(&self) -> Route {
        let insert = "INSERT INTO orders (payment, amount) VALUES (:payment, :amount)";
        let statements = self.returning(insert, "id, payment");
        route("orders", self.handler(&statements, &[("payment", "/payment"), ("amount", "/amount")]))
    }

    pub(super) fn mails(&self) -> Route {
        let insert = "INSERT INTO mails VALUES (:order, :key)";
        let mut mails = route("mails", self.handler(&[insert], &[("order", "$result/id"), ("key", "$key")]));
        mails.after = Some(name("orders"));
        mails
    }

    pub(super) fn work(&self, routes: &Routes) -> Worker {
        let retention = Retention { payload: YEARS, dead: None, audit: YEARS, batch: 100 };
        let deliveries = Arc::clone(&self.journal) as Arc<dyn Deliveries>;
        Worker::start(deliveries, routes, retention, self.clock.clone(), Arc::new(Metrics::new()))
    }

    pub(super) fn count(&self, sql: &str) -> i64 {
        self.database.query(sql).parse().unwrap()
    }

    /// Waits until no delivery waits or runs.
    pub(super) async fn drained(&self) {
        for _ in 0..3_000 {
            let backlog = self.journal.backlog().await.unwrap();
            if backlog.iter().all(|route| route.waiting + route.running == 0) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("not drained: {:?}", self.journal.backlog().await);
    }

    /// The delivery of a route, of the only event.
    pub(super) async fn delivery(&self, route: &str) -> Delivery {
        let page = self.journal.list(EventQuery { limit: 2, ..EventQuery::default() }).await.unwrap();
        assert_eq!(page.events.len(), 1);
        let story = self.journal.show(page.events[0].id).await.unwrap().unwrap();
        story.event.deliveries.into_iter().find(|one| one.route == route).unwrap()
    }

    pub(super) async fn retry(&self, event: oncehook::event::EventId) {
        let who = Who { name: "test".to_owned(), reason: None };
        let (verb, wanting) = (Verb::Retry, Vec::new());
        let order = Order { event, verb, route: None, who, wanting, attempts: 3 };
        self.journal.order(order).await.unwrap();
    }
}

pub(super) fn name(text: &str) -> RouteName {
    RouteName::new(text).unwrap()
}

pub(super) fn route(text: &str, handler: Handler) -> Route {
    let mut route = Route::new(name(text), SourceName::new("shop").unwrap(), handler);
    route.retry = RetryPolicy { max_attempts: 3, base: Duration::from_millis(20), cap: Duration::from_millis(50) };
    let short = Duration::from_millis(20);
    route.breaker = BreakerPolicy { failures: 3, rest: short, longest_rest: short * 5 };
    route
}

pub(super) fn payment(number: usize) -> NewEvent {
    let body = format!(r#"{{"payment":"pi_{number}","amount":{number}}}"#);
    NewEvent { routes: [name("orders")].into_iter().collect(), ..event(&format!("evt_{number}"), &body) }
}

pub(super) fn task(statements: &SqlHandler) -> Task<'_> {
    Task { statements, journal: 7, comparison: None }
}

/// Two who hold attempts of the same delivery, as after a freeze, and a journal to settle them.
pub(super) struct Duel {
    pub(super) shop: Shop,
    pub(super) route: Arc<Route>,
    pub(super) statements: Arc<Elsewhere>,
}

impl Duel {
    pub(super) fn new(engine: Engine) -> Self {
        let shop = Shop::new(&Server::shared(engine), Clock::manual(UnixMicros(1_700_000_000_000_000)));
        let routes = Routes::new(vec![shop.orders(), shop.mails()]).unwrap();
        let route = Arc::clone(routes.get("orders").unwrap());
        let Handler::Elsewhere(statements) = route.handler.clone() else { panic!() };
        Self { shop, route, statements }
    }

    /// What is done for claims of the journal with mark 7.
    pub(super) fn task(&self) -> Task<'_> {
        task(&self.statements.statements)
    }

    pub(super) async fn claim(&self) -> Claim {
        let mut claims = self.shop.journal.claim(Arc::clone(&self.route), 10, LEASE).await.unwrap();
        assert_eq!(claims.len(), 1);
        claims.pop().unwrap()
    }

    /// The lease of the latest attempt runs out, and its back-off passes.
    pub(super) async fn lose(&self) {
        let clock = &self.shop.clock;
        clock.set(UnixMicros(clock.now().0 + 20_000_000));
        assert_eq!(self.shop.journal.reclaim(Arc::clone(&self.route)).await.unwrap(), 1);
        clock.set(UnixMicros(clock.now().0 + 20_000_000));
    }

    pub(super) async fn apply(&self, claim: &Claim) -> Applied {
        let claims = std::slice::from_ref(claim);
        let mut applied = self.statements.database.apply(self.task(), claims).await;
        assert_eq!(applied.len(), 1);
        applied.pop().unwrap()
    }

    pub(super) async fn void(&self, claim: &Claim) -> Voided {
        let fences = std::slice::from_ref(&claim.fence);
        self.statements.database.void(7, fences).await.unwrap().pop().unwrap()
    }

    pub(super) async fn settle(&self, claim: &Claim, verdict: Verdict) -> Settled {
        let followups = self.route.followups.clone();
        let settlement = Settlement { fence: claim.fence.clone(), verdict, followups };
        self.shop.journal.settle(vec![settlement]).await.unwrap()[0]
    }
}
