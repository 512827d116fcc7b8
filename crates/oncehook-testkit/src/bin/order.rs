//! What order within an entity costs, on the embedded journal, PostgreSQL and MariaDB.
//!
//! - **throughput**: a backlog over 10,000 entities is worked off by a `sql` route, with `order = "entity"` against without,
//!   runs interleaved.
//! - **hot**: events come at a fixed rate, and one entity has 90 % of them. How long the events of the others take from their
//!   acceptance to their effect, against the same rate without a hot entity (fault 53).
//!
//! All in one process, without HTTP. Prints ratios; times say little on a shared machine.
//!
//! Does not: measure routes that leave the process. There one of an entity is under way at a time, whatever the journal does.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use bytes::Bytes;
use oncehook::clock::Clock;
use oncehook::delivery::RouteName;
use oncehook::event::{NewEvent, SourceName};
use oncehook::handler::{Dialect, Expression, Handler, SqlHandler};
use oncehook::journal::mysql::{MysqlJournal, MysqlOptions};
use oncehook::journal::postgres::{PostgresJournal, PostgresOptions};
use oncehook::journal::sqlite::{SqliteJournal, SqliteOptions};
use oncehook::journal::{Deliveries, Retention};
use oncehook::observe::Metrics;
use oncehook::ordering::Ordering;
use oncehook::route::{Route, Routes};
use oncehook::worker::Worker;
use oncehook_testkit::deliveries::WholeJournal;
use oncehook_testkit::random::Random;
use oncehook_testkit::{mysql, postgres};
use oncehook_verify::{EventKey, Integrity, UnixMicros, digest};

const ENTITIES: u64 = 10_000;
const WINDOW: usize = 256;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let (mut events, mut rounds, mut rate, mut seconds) = (50_000, 3, 1_000, 10);
    let mut engines = Vec::new();
    while let Some(argument) = arguments.next() {
        let mut number = || arguments.next().context("a number")?.parse::<u64>().context("a number");
        match argument.as_str() {
            "--events" => events = number()?,
            "--rounds" => rounds = number()?,
            "--rate" => rate = number()?,
            "--seconds" => seconds = number()?,
            "sqlite" => engines.push(Engine::Sqlite),
            "postgres" => engines.push(Engine::Postgres),
            "mysql" => engines.push(Engine::Mysql),
            other => anyhow::bail!("{other} is neither an engine nor --events, --rounds, --rate, --seconds"),
        }
    }
    if engines.is_empty() {
        engines = vec![Engine::Sqlite, Engine::Postgres, Engine::Mysql];
    }
    for engine in engines {
        throughput(engine, events, rounds).await?;
        hot(engine, rate, seconds).await?;
    }
    Ok(())
}

#[derive(Debug, Clone, Copy)]
enum Engine {
    Sqlite,
    Postgres,
    Mysql,
}

impl Engine {
    fn dialect(self) -> Dialect {
        match self {
            Self::Sqlite => Dialect::Sqlite,
            Self::Postgres => Dialect::Postgres,
            Self::Mysql => Dialect::Mysql,
        }
    }

    /// The time of the statement, in microseconds.
    fn time(self) -> &'static str {
        match self {
            Self::Sqlite => "CAST(unixepoch('now', 'subsec') * 1000000 AS INTEGER)",
            Self::Postgres => "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint",
            Self::Mysql => "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', SYSDATE(6))",
        }
    }
}

/// A place for a journal and the user's table `effects`.
enum Store {
    Sqlite(tempfile::TempDir),
    Postgres(postgres::Database<'static>),
    Mysql(mysql::Database<'static>),
}

impl Store {
    fn new(engine: Engine) -> anyhow::Result<Self> {
        let table = "CREATE TABLE effects (event_key varchar(64) PRIMARY KEY, at bigint NOT NULL)";
        Ok(match engine {
            Engine::Sqlite => {
                let target = std::env::current_dir()?.join("target");
                std::fs::create_dir_all(&target)?;
                let directory = tempfile::tempdir_in(target)?;
                rusqlite::Connection::open(directory.path().join("order.db"))?.execute_batch(table)?;
                Self::Sqlite(directory)
            }
            Engine::Postgres => {
                let database = postgres::Server::shared().database();
                database.query(table);
                Self::Postgres(database)
            }
            Engine::Mysql => {
                let database = mysql::Server::shared().database();
                database.query(table);
                Self::Mysql(database)
            }
        })
    }

    async fn open(&self) -> anyhow::Result<Arc<dyn WholeJournal>> {
        Ok(match self {
            Self::Sqlite(directory) => {
                Arc::new(SqliteJournal::open(&SqliteOptions::new(directory.path().join("order.db")))?)
            }
            Self::Postgres(database) => Arc::new(PostgresJournal::open(&PostgresOptions::new(database.url())).await?),
            Self::Mysql(database) => Arc::new(MysqlJournal::open(&MysqlOptions::new(database.url())).await?),
        })
    }

    /// When each event took effect.
    fn effects(&self) -> anyhow::Result<HashMap<String, i64>> {
        let read = |text: String| {
            let mut effects = HashMap::new();
            for line in text.lines() {
                let (key, at) = line.split_once(' ').context("a key and a time")?;
                effects.insert(key.to_owned(), at.trim().parse()?);
            }
            Ok(effects)
        };
        match self {
            Self::Sqlite(directory) => {
                let database = rusqlite::Connection::open(directory.path().join("order.db"))?;
                let mut statement = database.prepare("SELECT event_key, at FROM effects")?;
                let rows = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?;
                Ok(rows.collect::<Result<_, _>>()?)
            }
            Self::Postgres(database) => read(database.query("SELECT event_key || ' ' || at FROM effects")),
            Self::Mysql(database) => read(database.query("SELECT CONCAT(event_key, ' ', at) FROM effects")),
        }
    }
}

fn work(journal: &Arc<dyn WholeJournal>, engine: Engine, ordered: bool) -> anyhow::Result<Worker> {
    let statement = format!("INSERT INTO effects (event_key, at) VALUES (:key, {})", engine.time());
    let bind = BTreeMap::from([("key".to_owned(), Expression::parse("$key").map_err(anyhow::Error::msg)?)]);
    let handler = SqlHandler::new(&[statement], &bind, engine.dialect()).map_err(anyhow::Error::msg)?;
    let (name, source) = (RouteName::new("orders")?, SourceName::new("shop")?);
    let mut route = Route::new(name, source, Handler::Sql(Arc::new(handler)));
    route.ordering = Ordering { by_entity: ordered, ..Ordering::default() };
    let year = Duration::from_secs(365 * 86_400);
    let retention = Retention { payload: year, dead: None, audit: year, batch: 200 };
    let deliveries: Arc<dyn Deliveries> = Arc::clone(journal) as Arc<dyn Deliveries>;
    let routes = Routes::new(vec![route])?;
    Ok(Worker::start(deliveries, &routes, retention, Clock::system(), Arc::new(Metrics::new())))
}

fn event(number: u64, entity: u64, ordered: bool) -> anyhow::Result<NewEvent> {
    let now = Clock::system().now();
    let key = format!("evt_{number:016x}");
    let body = format!(r#"{{"id":"{key}","padding":"{}"}}"#, "x".repeat(900));
    Ok(NewEvent {
        id: None,
        source: SourceName::new("shop")?,
        key: EventKey::from_parts(&[key.as_bytes()]),
        key_signed: true,
        kind: Some("payment_intent.succeeded".to_owned()),
        entity: Some(format!("pi_{entity:012}")),
        occurred_at: Some(now),
        version: None,
        received_at: now,
        expires_at: UnixMicros(now.0 + 35 * 86_400 * 1_000_000),
        integrity: Integrity::Body,
        headers: Bytes::from_static(b"content-type: application/json\n"),
        digest: digest(body.as_bytes()),
        body: Bytes::from(body),
        quarantine: None,
        routes: [RouteName::new("orders")?].into_iter().collect(),
        by_entity: ordered,
        peer: [127, 0, 0, 1].into(),
    })
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

async fn drained(journal: &Arc<dyn WholeJournal>) -> anyhow::Result<()> {
    while journal.backlog().await?.iter().any(|route| route.waiting + route.running > 0) {
        // Seldom: asking is work for the journal, too.
        tokio::time::sleep(Duration::from_millis(25)).await;
    }
    Ok(())
}

async fn drain(engine: Engine, events: u64, ordered: bool) -> anyhow::Result<f64> {
    let store = Store::new(engine)?;
    let journal = store.open().await?;
    let mut random = Random::new(7);
    let mut waiting = std::collections::VecDeque::new();
    for number in 0..events {
        waiting.push_back(journal.submit([event(number, random.below(ENTITIES), ordered)?].into_iter().collect())?);
        if waiting.len() >= WINDOW
            && let Some(ticket) = waiting.pop_front()
        {
            ticket.await??;
        }
    }
    for ticket in waiting {
        ticket.await??;
    }
    let started = Instant::now();
    let worker = work(&journal, engine, ordered)?;
    drained(&journal).await?;
    let rate = events as f64 / started.elapsed().as_secs_f64();
    worker.stop().await;
    journal.close().await;
    Ok(rate)
}

async fn throughput(engine: Engine, events: u64, rounds: u64) -> anyhow::Result<()> {
    let (mut free, mut ordered) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        free.push(drain(engine, events, false).await?);
        ordered.push(drain(engine, events, true).await?);
    }
    let (free, ordered) = (median(free), median(ordered));
    println!("{engine:?}: backlog, 10,000 entities, no order      {free:>8.0}/s");
    println!("{engine:?}: backlog, 10,000 entities, in order      {ordered:>8.0}/s  {:.2} of no order", ordered / free);
    Ok(())
}

/// Half and nearly all of the others' events took at most so long, in milliseconds.
async fn latency(engine: Engine, rate: u64, seconds: u64, hot: bool) -> anyhow::Result<(f64, f64)> {
    let store = Store::new(engine)?;
    let journal = store.open().await?;
    let worker = work(&journal, engine, true)?;
    let mut random = Random::new(11);
    let mut accepted: Vec<(String, i64)> = Vec::new();
    let mut waiting = std::collections::VecDeque::new();
    let started = Instant::now();
    for number in 0..rate * seconds {
        let due = Duration::from_secs_f64(number as f64 / rate as f64);
        if let Some(wait) = due.checked_sub(started.elapsed()) {
            tokio::time::sleep(wait).await;
        }
        // The same nine of ten in both runs; only whom they are about differs.
        let crowd = random.below(10) < 9;
        let own = 1 + random.below(ENTITIES);
        let new = event(number, if crowd && hot { 0 } else { own }, true)?;
        if !crowd {
            accepted.push((format!("evt_{number:016x}"), Clock::system().now().0));
        }
        waiting.push_back(journal.submit([new].into_iter().collect())?);
        while waiting.len() >= WINDOW
            && let Some(ticket) = waiting.pop_front()
        {
            ticket.await??;
        }
    }
    for ticket in waiting {
        ticket.await??;
    }
    drained(&journal).await?;
    worker.stop().await;
    journal.close().await;
    let effects = store.effects()?;
    let mut times = Vec::with_capacity(accepted.len());
    for (key, at) in accepted {
        let effect = effects.get(&key).with_context(|| format!("{key} took no effect"))?;
        times.push((effect - at) as f64 / 1_000.0);
    }
    times.sort_by(f64::total_cmp);
    let place = |share: f64| times.get((times.len() as f64 * share) as usize).copied().unwrap_or(f64::NAN);
    Ok((place(0.5), place(0.99)))
}

async fn hot(engine: Engine, rate: u64, seconds: u64) -> anyhow::Result<()> {
    let (mut normal, mut crowded) = ((Vec::new(), Vec::new()), (Vec::new(), Vec::new()));
    for _ in 0..3 {
        for (hot, times) in [(false, &mut normal), (true, &mut crowded)] {
            let (half, most) = latency(engine, rate, seconds, hot).await?;
            times.0.push(half);
            times.1.push(most);
        }
    }
    let (half, most) = (median(normal.0), median(normal.1));
    let (hot_half, hot_most) = (median(crowded.0), median(crowded.1));
    println!("{engine:?}: {rate}/s, no hot entity: others' effect after  p50 {half:.1} ms  p99 {most:.1} ms");
    println!(
        "{engine:?}: {rate}/s, one with 90 %: others' effect after  p50 {hot_half:.1} ms ({:.2} of normal)  p99 {hot_most:.1} ms ({:.2})",
        hot_half / half,
        hot_most / most
    );
    Ok(())
}
