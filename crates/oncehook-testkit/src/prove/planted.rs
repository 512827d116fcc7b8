//! Mistakes made on purpose, each with the scenario that must notice it. A proof that misses one is blind, and fails.
//!
//! The same scenarios run without a mistake too, and must find nothing then: `control`.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use oncehook::clock::Clock;
use oncehook::delivery::{Cause, Failure, HandedEvent, RouteName};
use oncehook::event::{NewEvent, SourceName};
use oncehook::handler::{Dialect, Expression, Handler, SqlHandler};
use oncehook::journal::mysql::{MysqlJournal, MysqlOptions};
use oncehook::journal::postgres::{PostgresJournal, PostgresOptions};
use oncehook::journal::sqlite::{SqliteJournal, SqliteOptions};
use oncehook::journal::{Deliveries, Journal};
use oncehook::planted::{self, Bug};
use oncehook::retry::RetryPolicy;
use oncehook::route::Route;
use oncehook_verify::UnixMicros;

use super::audit::Tally;
use super::cluster::{Cluster, Engine};
use super::coverage::Coverage;
use super::disk::Shim;
use super::embedded::Deployment;
use super::history::Manners;
use crate::journal::{NOW, append_one, event};
use crate::{mysql, postgres};

/// The journals on which mistakes are made: the embedded one, and those on servers.
pub const JOURNALS: [Option<Engine>; 3] = [None, Some(Engine::Postgres), Some(Engine::MariaDb)];

/// Every mistake with each journal that can make it. Without a server there are neither other nodes nor Redis.
pub fn all() -> impl Iterator<Item = (Bug, Option<Engine>)> {
    let pairs = JOURNALS.into_iter().flat_map(|engine| Bug::ALL.into_iter().map(move |bug| (bug, engine)));
    pairs.filter(|(bug, engine)| *bug != Bug::CacheFirst || engine.is_some())
}

/// What a journal is called in reports.
#[must_use]
pub fn journal_name(engine: Option<Engine>) -> &'static str {
    match engine {
        None => "SQLite",
        Some(Engine::Postgres) => "PostgreSQL",
        Some(Engine::MariaDb) => "MariaDB",
    }
}

/// How a mistake was looked for.
#[derive(Debug)]
pub struct Search {
    /// The mistake; nothing in a control run.
    pub bug: Option<Bug>,
    /// The journal that made it.
    pub journal: &'static str,
    /// The scenario.
    pub scenario: &'static str,
    /// What it found.
    pub tally: Tally,
}

impl Search {
    /// Whether something was lost or doubled. Anything else that is odd does not count: it would be noticed for another
    /// reason than the one that is meant.
    #[must_use]
    pub fn is_caught(&self) -> bool {
        self.tally.lost + self.tally.doubled > 0
    }
}

/// The scenario for each mistake.
#[must_use]
pub fn scenario(bug: Bug, engine: Option<Engine>) -> &'static str {
    match bug {
        Bug::NormalSync if engine.is_some() => "crashes of the server",
        Bug::NormalSync => "power cuts",
        Bug::MarkFirst => "kills in the handler",
        Bug::NoFence => "a zombie and its successor",
        Bug::ShortMemory => "copies over three seconds",
        Bug::SelectThenInsert if engine.is_some() => "races between two nodes",
        Bug::SelectThenInsert => "races",
        Bug::TiedToClient => "senders that hang up",
        Bug::EarlyAnswer => "kills before the commit",
        Bug::CacheFirst => "kills before the insert, with Redis and another node",
    }
}

/// Runs the scenario for a mistake on a journal, with it or (`control`) without. The binary must have mistakes and crash points.
#[expect(clippy::too_many_arguments, reason = "a stage, and what is played on it")]
pub async fn search(
    bug: Bug,
    engine: Option<Engine>,
    control: bool,
    binary: &Path,
    place: &Path,
    shim: &Shim,
    coverage: &Coverage,
    seed: u64,
) -> Search {
    let made = (!control).then_some(bug);
    let tally = match engine {
        _ if bug == Bug::NoFence => zombie(engine, place, made).await,
        Some(engine) => {
            let cluster = Cluster::new(engine, binary, place, shim, coverage, made, seed).await;
            on_a_server(bug, cluster).await
        }
        None => {
            let deployment = Deployment::new(binary, place, shim, coverage, manners(bug), made, seed).await;
            embedded(bug, made, deployment).await
        }
    };
    Search { bug: made, journal: journal_name(engine), scenario: scenario(bug, engine), tally }
}

fn manners(bug: Bug) -> Manners {
    let usual = Manners::default();
    if bug == Bug::TiedToClient { Manners { hang_up: 40, ..usual } } else { usual }
}

async fn embedded(bug: Bug, made: Option<Bug>, mut deployment: Deployment<'_>) -> Tally {
    match bug {
        Bug::NormalSync => deployment.cuts(6).await,
        Bug::MarkFirst => deployment.kills_at("in_handler", 60, 5).await,
        Bug::ShortMemory => deployment.calm(Duration::from_secs(4)).await,
        Bug::SelectThenInsert => deployment.races(40, 16).await,
        Bug::TiedToClient => deployment.calm(Duration::from_secs(2)).await,
        Bug::EarlyAnswer => deployment.kills_at("after_insert", 30, 6).await,
        Bug::NoFence | Bug::CacheFirst => {}
    }
    // Two events with one key keep a journal from starting, which would be noticed for another reason.
    let restart = !matches!(made, Some(Bug::ShortMemory | Bug::SelectThenInsert));
    deployment.end(restart).await
}

async fn on_a_server(bug: Bug, cluster: Cluster<'_>) -> Tally {
    let mut cluster = cluster.with_manners(manners(bug));
    match bug {
        Bug::NormalSync => cluster.crashes(true, 3).await,
        Bug::MarkFirst => {
            cluster = cluster.with_plain_orders();
            cluster.kills_at("in_handler", 20, 4).await;
        }
        Bug::ShortMemory => cluster.calm(Duration::from_secs(3)).await,
        Bug::SelectThenInsert => cluster.races(30, 8).await,
        Bug::TiedToClient => cluster.calm(Duration::from_secs(2)).await,
        // No crash point stands between the moment at which an answer has left and the next append.
        Bug::EarlyAnswer => cluster.crashes(false, 4).await,
        Bug::CacheFirst => cluster.kills_before_the_insert(5).await,
        Bug::NoFence => {}
    }
    cluster.end().await
}

/// Fault 17 and 41 on the real journals: a worker that was frozen comes back after another has done its work.
async fn zombie(engine: Option<Engine>, place: &Path, bug: Option<Bug>) -> Tally {
    let able = planted::plant(bug);
    assert!(able || bug.is_none(), "this build has no mistakes");
    let directory = tempfile::tempdir_in(place).unwrap();
    let path = directory.path().join("journal.db");
    let clock = Clock::manual(NOW);
    let count = |database: &dyn Fn(&str) -> String, what: &str, table: &str| -> u64 {
        database(&format!("SELECT count({what}) FROM {table}")).trim().parse().unwrap()
    };
    let tally = |acked: u64, database: &dyn Fn(&str) -> String, events: &str| {
        let (effects, distinct) = (count(database, "*", "orders"), count(database, "DISTINCT name", "orders"));
        let stored = count(database, "*", events);
        Tally { acked, stored, doubled: effects - distinct, lost: acked - distinct, ..Tally::default() }
    };
    let table = "CREATE TABLE orders (name VARCHAR(64))";
    let found = match engine {
        None => {
            let query = |sql: &str| {
                let database = rusqlite::Connection::open(&path).unwrap();
                database.query_row(sql, [], |row| row.get::<_, i64>(0)).unwrap().to_string()
            };
            rusqlite::Connection::open(&path).unwrap().execute_batch(table).unwrap();
            let options = SqliteOptions { clock: clock.clone(), ..SqliteOptions::new(&path) };
            let handler = |database: &rusqlite::Connection, event: &HandedEvent| {
                let key = String::from_utf8_lossy(event.key.as_bytes()).into_owned();
                let stored = database.execute("INSERT INTO orders VALUES (?1)", [key]);
                stored.map(|_| None).map_err(|error| Failure::retry(Cause::Handler, error.to_string()))
            };
            let acked =
                freeze(&SqliteJournal::open(&options).unwrap(), &clock, Handler::Function(Arc::new(handler))).await;
            tally(acked, &query, "oncehook_events")
        }
        Some(Engine::Postgres) => {
            let server = postgres::Server::start(&[]);
            let database = server.database();
            database.query(table);
            let options = PostgresOptions { clock: clock.clone(), ..PostgresOptions::new(database.url()) };
            let journal = PostgresJournal::open(&options).await.unwrap();
            let acked = freeze(&journal, &clock, insert(Dialect::Postgres)).await;
            tally(acked, &|sql| database.query(sql), "oncehook.events")
        }
        Some(Engine::MariaDb) => {
            let server = mysql::Server::start(&[]);
            let database = server.database();
            database.query(table);
            let options = MysqlOptions { clock: clock.clone(), ..MysqlOptions::new(database.url()) };
            let journal = MysqlJournal::open(&options).await.unwrap();
            let acked = freeze(&journal, &clock, insert(Dialect::Mysql)).await;
            tally(acked, &|sql| database.query(sql), "oncehook_events")
        }
    };
    let _ = planted::plant(None);
    found
}

/// What a delivery does on a server.
fn insert(dialect: Dialect) -> Handler {
    let bind = [("name".to_owned(), Expression::parse("$key").unwrap())].into();
    Handler::Sql(Arc::new(SqlHandler::new(&["INSERT INTO orders VALUES (:name)"], &bind, dialect).unwrap()))
}

/// Appends events, lets two workers claim each, and has the one whose lease is over come back last. Returns how many there were.
async fn freeze(journal: &(impl Journal + Deliveries), clock: &Clock, handler: Handler) -> u64 {
    let (name, shop) = (RouteName::new("orders").unwrap(), SourceName::new("shop").unwrap());
    let retry = RetryPolicy { max_attempts: 5, base: Duration::ZERO, cap: Duration::ZERO };
    let route = Arc::new(Route { retry, ..Route::new(name.clone(), shop, handler) });
    let lease = Duration::from_secs(15);
    let wait = |micros| clock.set(UnixMicros(clock.now().0 + micros));
    let count = 20;
    for number in 0..count {
        let key = format!("evt_{number}");
        append_one(journal, NewEvent { routes: [name.clone()].into_iter().collect(), ..event(&key, "{}") }).await;
        let frozen = journal.claim(Arc::clone(&route), 1, lease).await.unwrap();
        wait(16_000_000);
        journal.reclaim(Arc::clone(&route)).await.unwrap();
        wait(1_000_000);
        let successor = journal.claim(Arc::clone(&route), 1, lease).await.unwrap();
        assert_eq!((frozen.len(), successor.len()), (1, 1), "there is one delivery, and it is claimed twice");
        journal.call(Arc::clone(&route), successor).await.unwrap();
        wait(1_000_000);
        journal.call(Arc::clone(&route), frozen).await.unwrap();
    }
    journal.close().await;
    count
}
