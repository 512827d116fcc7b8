//! A shop whose statements run in each place there is: in the journal's own database (SQLite, PostgreSQL, MariaDB), or in
//! another one (PostgreSQL, MariaDB) beside a journal in a file.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use oncehook::clock::Clock;
use oncehook::delivery::RouteName;
use oncehook::event::{NewEvent, SourceName};
use oncehook::handler::{Dialect, Elsewhere, Expression, Guarded, Handler, SqlHandler};
use oncehook::journal::mysql::{MysqlElsewhere, MysqlJournal, MysqlOptions};
use oncehook::journal::postgres::{PostgresElsewhere, PostgresJournal, PostgresOptions};
use oncehook::journal::sqlite::{SqliteJournal, SqliteOptions};
use oncehook::journal::{Deliveries, Delivery, EventQuery, Retention};
use oncehook::observe::Metrics;
use oncehook::retry::RetryPolicy;
use oncehook::route::{BreakerPolicy, Route, Routes};
use oncehook::worker::Worker;
use oncehook_testkit::deliveries::WholeJournal;
use oncehook_testkit::journal::event;
use oncehook_testkit::{mysql, postgres};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    Sqlite,
    Postgres,
    Mysql,
    PostgresElsewhere,
    MysqlElsewhere,
}

impl Place {
    pub(super) fn dialect(self) -> Dialect {
        match self {
            Self::Sqlite => Dialect::Sqlite,
            Self::Postgres | Self::PostgresElsewhere => Dialect::Postgres,
            Self::Mysql | Self::MysqlElsewhere => Dialect::Mysql,
        }
    }

    pub(super) fn is_elsewhere(self) -> bool {
        matches!(self, Self::PostgresElsewhere | Self::MysqlElsewhere)
    }
}

enum Database {
    Sqlite(std::path::PathBuf),
    Postgres(postgres::Database<'static>),
    Mysql(mysql::Database<'static>),
}

impl Database {
    fn query(&self, sql: &str) -> String {
        match self {
            Self::Sqlite(path) => {
                let connection = rusqlite::Connection::open(path).unwrap();
                connection.busy_timeout(Duration::from_secs(5)).unwrap();
                if sql.starts_with("SELECT") {
                    let value: rusqlite::types::Value = connection.query_row(sql, [], |row| row.get(0)).unwrap();
                    return match value {
                        rusqlite::types::Value::Integer(number) => number.to_string(),
                        rusqlite::types::Value::Text(text) => text,
                        other => format!("{other:?}"),
                    };
                }
                connection.execute_batch(sql).unwrap();
                String::new()
            }
            Self::Postgres(database) => database.query(sql),
            Self::Mysql(database) => database.query(sql),
        }
    }

    /// Where it is reached, by way of the line if there is one.
    fn url(&self, line: Option<&Line>) -> String {
        match (self, line) {
            (Self::Sqlite(_), _) => String::new(),
            (Self::Postgres(database), None) => database.url(),
            (Self::Postgres(database), Some(line)) => database.url_at(line.port),
            (Self::Mysql(database), None) => database.url(),
            (Self::Mysql(database), Some(line)) => database.url_at(line.port),
        }
    }

    fn port(&self) -> u16 {
        let url = self.url(None);
        let port = url.rsplit(':').next().and_then(|rest| rest.split('/').next()).unwrap();
        port.parse().unwrap()
    }
}

/// Stands between the journal and its server. What is said can be changed on the way, and connections can be refused.
pub(super) struct Line {
    port: u16,
    /// From now on every connection is closed as soon as it is made.
    pub(super) cut: Arc<AtomicBool>,
    /// Connections that were made.
    pub(super) made: Arc<AtomicUsize>,
}

impl Line {
    /// To the server at `port`. Where `from` is said, `to` is heard.
    async fn new(port: u16, from: &'static str, to: &'static str) -> Self {
        assert!(from.len() == to.len() && !from.is_empty(), "they have the same length");
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let own = listener.local_addr().unwrap().port();
        let (cut, made) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let line = Self { port: own, cut: Arc::clone(&cut), made: Arc::clone(&made) };
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                made.fetch_add(1, Ordering::SeqCst);
                if !cut.load(Ordering::SeqCst) {
                    tokio::spawn(carry(client, port, from, to, Arc::clone(&cut)));
                }
            }
        });
        line
    }
}

async fn carry(client: TcpStream, port: u16, from: &str, to: &str, cut: Arc<AtomicBool>) {
    let server = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let up = async {
        let mut bytes = vec![0; 1 << 20];
        while let Ok(count @ 1..) = from_client.read(&mut bytes).await {
            let said = &mut bytes[..count];
            while let Some(at) = said.windows(from.len()).position(|part| part == from.as_bytes()) {
                said[at..at + from.len()].copy_from_slice(to.as_bytes());
            }
            if to_server.write_all(said).await.is_err() {
                break;
            }
        }
    };
    let down = tokio::io::copy(&mut from_server, &mut to_client);
    let severed = async {
        while !cut.load(Ordering::SeqCst) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::select! {
        () = up => {}
        _ = down => {}
        () = severed => {}
    }
}

pub(super) struct Shop {
    _directory: tempfile::TempDir,
    pub(super) place: Place,
    database: Database,
    pub(super) journal: Arc<dyn WholeJournal>,
    elsewhere: Option<Arc<dyn Guarded>>,
    pub(super) line: Option<Line>,
    sent: AtomicUsize,
}

impl Shop {
    /// With these tables.
    pub(super) async fn new(place: Place, tables: &str) -> Self {
        Self::open(place, tables, None).await
    }

    /// Where `from` is sent to the server, `to` arrives.
    pub(super) async fn with_line(place: Place, tables: &str, from: &'static str, to: &'static str) -> Self {
        Self::open(place, tables, Some((from, to))).await
    }

    async fn open(place: Place, tables: &str, changed: Option<(&'static str, &'static str)>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let database = match place.dialect() {
            Dialect::Sqlite => Database::Sqlite(directory.path().join("journal.db")),
            Dialect::Postgres => Database::Postgres(postgres::Server::shared().database()),
            Dialect::Mysql => Database::Mysql(mysql::Server::shared().database()),
        };
        let file = SqliteOptions::new(directory.path().join("journal.db"));
        database.query(tables);
        let line = match changed {
            Some((from, to)) => Some(Line::new(database.port(), from, to).await),
            None => None,
        };
        let url = database.url(line.as_ref());
        let journal: Arc<dyn WholeJournal> = match place {
            Place::Sqlite | Place::PostgresElsewhere | Place::MysqlElsewhere => {
                Arc::new(SqliteJournal::open(&file).unwrap())
            }
            Place::Postgres => Arc::new(PostgresJournal::open(&PostgresOptions::new(url.clone())).await.unwrap()),
            Place::Mysql => Arc::new(MysqlJournal::open(&MysqlOptions::new(url.clone())).await.unwrap()),
        };
        let elsewhere: Option<Arc<dyn Guarded>> = match place {
            Place::PostgresElsewhere => Some(Arc::new(PostgresElsewhere::new(&url).unwrap())),
            Place::MysqlElsewhere => Some(Arc::new(MysqlElsewhere::new(&url).unwrap())),
            Place::Sqlite | Place::Postgres | Place::Mysql => None,
        };
        Self { _directory: directory, place, database, journal, elsewhere, line, sent: AtomicUsize::new(0) }
    }

    pub(super) fn query(&self, sql: &str) -> String {
        self.database.query(sql)
    }

    /// A route with these statements.
    pub(super) fn sql(&self, statements: &[&str], bind: &[(&str, &str)]) -> Route {
        let bind: BTreeMap<_, _> =
            bind.iter().map(|(name, value)| ((*name).to_owned(), Expression::parse(value).unwrap())).collect();
        let statements = SqlHandler::new(statements, &bind, self.place.dialect()).unwrap();
        self.route(match &self.elsewhere {
            Some(database) => {
                let keep = Duration::from_secs(36_500 * 86_400);
                Handler::Elsewhere(Arc::new(Elsewhere { statements, database: Arc::clone(database), keep }))
            }
            None => Handler::Sql(Arc::new(statements)),
        })
    }

    pub(super) fn route(&self, handler: Handler) -> Route {
        let mut route = Route::new(route_name(), SourceName::new("shop").unwrap(), handler);
        let short = Duration::from_millis(20);
        route.retry = RetryPolicy { max_attempts: 3, base: short, cap: short * 2 };
        route.breaker = BreakerPolicy { failures: 3, rest: short, longest_rest: short * 5 };
        route
    }

    pub(super) fn work(&self, route: Route) -> Worker {
        let ages = Duration::from_secs(36_500 * 86_400);
        let retention = Retention { payload: ages, dead: None, audit: ages, batch: 100 };
        let deliveries: Arc<dyn Deliveries> = Arc::clone(&self.journal) as Arc<dyn Deliveries>;
        let routes = Routes::new(vec![route]).unwrap();
        Worker::start(deliveries, &routes, retention, Clock::system(), Arc::new(Metrics::new()))
    }

    /// New events with these bodies, all stored at once.
    pub(super) async fn send(&self, bodies: &[&str]) {
        let routed = |body: &&str| {
            let number = self.sent.fetch_add(1, Ordering::SeqCst);
            let routes = [route_name()].into_iter().collect();
            NewEvent { routes, ..event(&format!("evt_{number}"), body) }
        };
        let events = bodies.iter().map(routed).collect();
        self.journal.submit(events).unwrap().await.unwrap().unwrap();
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
        panic!("{:?}: not drained: {:?}", self.place, self.journal.backlog().await);
    }

    /// What became of all events' deliveries.
    pub(super) async fn deliveries(&self) -> Vec<Delivery> {
        let page = self.journal.list(EventQuery { limit: 100, ..EventQuery::default() }).await.unwrap();
        let mut deliveries = Vec::new();
        for event in page.events {
            deliveries.extend(self.journal.show(event.id).await.unwrap().unwrap().event.deliveries);
        }
        deliveries
    }
}

fn route_name() -> RouteName {
    RouteName::new("orders").unwrap()
}
