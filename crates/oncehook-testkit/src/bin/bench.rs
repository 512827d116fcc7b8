//! `make bench`: how much of the ceiling durable accepts reach, in one run on one machine.
//!
//! Every row is a gateway of its own in a fresh directory, loaded by this process over loopback with signed requests made
//! beforehand. `--journal postgres` and `--journal mysql` measure on a server (PostgreSQL, MariaDB) that this program starts
//! itself, and how fast a backlog takes effect there; on MariaDB beside the same statement alone, in batches of the same size. The writer's CPU time per event is steadier than any rate on a shared machine. Rounds are interleaved and the median is reported, so a slow moment of the machine hits all rows alike.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use http::HeaderMap;
use oncehook::clock::Clock;
use oncehook::journal::sqlite::SqliteJournal;
use oncehook_testkit::gateway::{CONFIG, Gateway, SECRET, now, prepare};
use oncehook_testkit::random::Random;
use oncehook_testkit::sender::Provider;
use oncehook_testkit::workload::{Pace, Report, run};
use oncehook_testkit::{mysql, postgres};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Senders at once, unless `--connections` says otherwise. Group commit lives from what gathers while a commit runs.
const CONNECTIONS: usize = 256;

/// How long each measurement takes, and how many rounds there are.
struct Plan {
    connections: usize,
    seconds: u64,
    rounds: usize,
    body: usize,
    memory_seconds: u64,
    /// Keys in the ledger before the rows that start with a full one.
    ledger: usize,
    /// Open-loop measurements of each row.
    open_rounds: usize,
    directory: PathBuf,
    /// Where the journal is, if it is not a file.
    engine: Option<Engine>,
}

/// A server that the journal can be on.
#[derive(Clone, Copy)]
enum Engine {
    Postgres(&'static postgres::Server),
    Mysql(&'static mysql::Server),
}

/// A database of its own on that server.
enum Database {
    Postgres(postgres::Database<'static>),
    Mysql(mysql::Database<'static>),
}

impl Engine {
    fn named(name: &str) -> Option<Self> {
        match name {
            "postgres" => Some(Self::Postgres(postgres::Server::shared())),
            "mysql" | "mariadb" => Some(Self::Mysql(mysql::Server::shared())),
            _ => None,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Postgres(_) => "PostgreSQL",
            Self::Mysql(_) => "MariaDB",
        }
    }

    fn database(self) -> Database {
        match self {
            Self::Postgres(server) => Database::Postgres(server.database()),
            Self::Mysql(server) => Database::Mysql(server.database()),
        }
    }

    /// The user's table, the statement, and how many rows have been made.
    fn shop(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Self::Postgres(_) => (
                "CREATE TABLE orders (id bigserial PRIMARY KEY, payment text NOT NULL UNIQUE, amount bigint NOT NULL)",
                "INSERT INTO orders (payment, amount) VALUES (:payment, :amount) ON CONFLICT (payment) DO NOTHING",
                "SELECT last_value FROM orders_id_seq",
            ),
            Self::Mysql(_) => (
                "CREATE TABLE orders (id BIGINT AUTO_INCREMENT PRIMARY KEY, payment VARCHAR(64) NOT NULL UNIQUE, amount BIGINT NOT NULL)",
                "INSERT INTO orders (payment, amount) VALUES (:payment, :amount) ON DUPLICATE KEY UPDATE amount = amount",
                "SELECT COALESCE(MAX(id), 0) FROM orders",
            ),
        }
    }

    /// CPU time of the server so far, in microseconds.
    fn cpu_micros(self) -> f64 {
        match self {
            // Its connections are processes that come and go.
            Self::Postgres(_) => f64::NAN,
            Self::Mysql(server) => cpu_micros(server.pid()),
        }
    }
}

impl Database {
    fn url(&self) -> String {
        match self {
            Self::Postgres(database) => database.url(),
            Self::Mysql(database) => database.url(),
        }
    }

    fn query(&self, sql: &str) -> String {
        match self {
            Self::Postgres(database) => database.query(sql),
            Self::Mysql(database) => database.query(sql),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Row {
    Ceiling,
    RandomKeys,
    OrderedKeys,
    /// The same with keys in the ledger already.
    RandomKeysFull,
    OrderedKeysFull,
    Duplicates,
}

const ROWS: [Row; 6] = [
    Row::Ceiling,
    Row::RandomKeys,
    Row::OrderedKeys,
    Row::RandomKeysFull,
    Row::OrderedKeysFull,
    Row::Duplicates,
];

/// What is measured on a server: its tables are not filled beforehand.
const SERVER_ROWS: [Row; 4] = [Row::Ceiling, Row::RandomKeys, Row::OrderedKeys, Row::Duplicates];

impl Plan {
    fn rows(&self) -> &'static [Row] {
        if self.engine.is_some() { &SERVER_ROWS } else { &ROWS }
    }
}

struct Measured {
    rate: f64,
    p50: f64,
    p99: f64,
    memory: u64,
    max: f64,
    cpu_micros: f64,
    /// Of the journal's writer alone.
    writer_micros: f64,
    refused: u64,
}

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.first().is_some_and(|word| word == "ceiling") {
        return oncehook_testkit::ceiling::serve();
    }
    let number = |name: &str, usual: usize| {
        let at = arguments.iter().position(|word| word == name);
        at.and_then(|at| arguments.get(at + 1)?.parse().ok()).unwrap_or(usual)
    };
    let plan = Plan {
        connections: number("--connections", CONNECTIONS),
        seconds: number("--seconds", 8) as u64,
        rounds: number("--rounds", 3),
        body: number("--body", 1_024),
        memory_seconds: number("--memory-seconds", 60) as u64,
        ledger: number("--ledger", 1_000_000),
        open_rounds: number("--open-rounds", 1),
        directory: std::env::current_dir()?.join("target").join("bench"),
        engine: arguments
            .iter()
            .skip_while(|word| *word != "--journal")
            .nth(1)
            .and_then(|name| Engine::named(name)),
    };
    std::fs::create_dir_all(&plan.directory)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    match number("--rate", 0) {
        0 => runtime.block_on(bench(&plan)),
        rate => {
            let row = if number("--random", 0) == 0 { Row::OrderedKeys } else { Row::RandomKeys };
            runtime.block_on(open_loop(&plan, row, rate as f64))
        }
    }
}

/// `--rate N`: only the open loop with time-ordered keys (`--random 1`: random ones), as often as `--rounds` says. For
/// hunting stalls.
async fn open_loop(plan: &Plan, row: Row, rate: f64) -> anyhow::Result<()> {
    for _ in 0..plan.rounds {
        let measured = measure(plan, row, Pace::Open(rate), plan.seconds).await?;
        println!(
            "{:.0}/s, p50 {:.2} p99 {:.2} max {:.2} ms, writer {:.1} µs, all {:.1} µs, {:.0} MB",
            measured.rate,
            measured.p50,
            measured.p99,
            measured.max,
            measured.writer_micros,
            measured.cpu_micros,
            measured.memory as f64 / 1e6
        );
    }
    Ok(())
}

async fn bench(plan: &Plan) -> anyhow::Result<()> {
    println!(
        "{} connections, {} byte bodies, {} s per row, median of {} rounds",
        plan.connections, plan.body, plan.seconds, plan.rounds
    );
    println!("load generator on the same machine ({} cores)\n", std::thread::available_parallelism()?);
    let rows = plan.rows();
    let mut results: Vec<Vec<Measured>> = rows.iter().map(|_| Vec::new()).collect();
    for round in 1..=plan.rounds {
        for (row, results) in rows.iter().zip(&mut results) {
            let measured = measure(plan, *row, Pace::Closed, plan.seconds).await?;
            eprintln!("round {round}: {row:?} {:.0}/s, p99 {:.1} ms", measured.rate, measured.p99);
            results.push(measured);
        }
    }
    let medians: Vec<&Measured> = results.iter_mut().map(|row| median(row)).collect();
    let ceiling = medians[0].rate;
    println!(
        "{:<28} {:>10} {:>8} {:>9} {:>9} {:>10} {:>10} {:>9}",
        "closed loop", "accepts/s", "ratio", "p50 ms", "p99 ms", "CPU µs/req", "writer µs", "RSS MB"
    );
    for (row, measured) in rows.iter().zip(&medians) {
        println!(
            "{:<28} {:>10.0} {:>8.2} {:>9.2} {:>9.2} {:>10.1} {:>10.1} {:>9.0}",
            name(*row),
            measured.rate,
            measured.rate / ceiling,
            measured.p50,
            measured.p99,
            measured.cpu_micros,
            measured.writer_micros,
            measured.memory as f64 / 1e6
        );
        anyhow::ensure!(measured.refused == 0, "{} requests were refused", measured.refused);
    }
    println!(
        "\n{:<28} {:>10} {:>9} {:>9} {:>9} {:>9}",
        "open loop, a third of it", "offered/s", "p50 ms", "p99 ms", "max ms", "RSS MB"
    );
    for (row, closed) in rows.iter().zip(&medians) {
        let offered = closed.rate / 3.0;
        for _ in 0..plan.open_rounds {
            let measured = measure(plan, *row, Pace::Open(offered), plan.seconds).await?;
            println!(
                "{:<28} {:>10.0} {:>9.2} {:>9.2} {:>9.2} {:>9.0}",
                name(*row),
                offered,
                measured.p50,
                measured.p99,
                measured.max,
                measured.memory as f64 / 1e6
            );
        }
    }
    if let Some(engine) = plan.engine {
        effects_on_a_server(plan, engine, ceiling).await?;
    }
    if plan.memory_seconds > 0 {
        let heavy = Plan { connections: 64, body: 5_120, directory: plan.directory.clone(), ..*plan };
        let measured = measure(&heavy, Row::OrderedKeys, Pace::Closed, plan.memory_seconds).await?;
        println!(
            "\nmemory: {} connections pushed 5 KB bodies for {} s at {:.0}/s: peak RSS {:.0} MB (limit 256)",
            heavy.connections,
            plan.memory_seconds,
            measured.rate,
            measured.memory as f64 / 1e6
        );
    }
    Ok(())
}

/// How many effects are measured at once.
const EFFECTS: usize = 60_000;

/// The user's statements run in batches of this many.
const BATCH: usize = 256;

/// A backlog is accepted by one process and takes effect through another.
async fn effects_on_a_server(plan: &Plan, engine: Engine, ceiling: f64) -> anyhow::Result<()> {
    let oncehook = std::env::current_exe()?.with_file_name("oncehook");
    let (table, statement, made) = engine.shop();
    let route = format!(
        r#"
[[route]]
name = "orders"
source = "stripe"
[route.sql]
statement = "{statement}"
bind = {{ payment = "/data/object/id", amount = "/data/object/amount" }}
"#
    );
    let (mut rates, mut costs, mut bares) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..plan.rounds {
        if let Engine::Mysql(server) = engine {
            bares.push(bare_on_mysql(&server.database(), engine).await?);
        }
        let database = engine.database();
        database.query(table);
        let directory = tempfile::tempdir_in(&plan.directory)?;
        prepare(directory.path(), &(CONFIG.replace("sqlite://journal.db", &database.url()) + &route));
        let start = |role: &str| {
            let mut command = Command::new(&oncehook);
            command.args(["serve", "--role", role]);
            Gateway::start_command(command, directory.path())
        };
        let mut door = start("ingest");
        let provider = Provider::new("stripe", SECRET, "stripe");
        let requests: Vec<_> =
            (0..EFFECTS).map(|number| request(&provider, Row::RandomKeys, number, plan.body)).collect();
        let wait = Duration::from_secs(120);
        run(door.ingress, CONNECTIONS, Arc::new(requests), false, Pace::Closed, wait).await;
        door.stop();
        let deliveries = match engine {
            Engine::Postgres(_) => "SELECT count(*) FROM oncehook.deliveries",
            Engine::Mysql(_) => "SELECT COUNT(*) FROM oncehook_deliveries",
        };
        let backlog: usize = database.query(deliveries).parse()?;
        let before = engine.cpu_micros();
        let begun = std::time::Instant::now();
        let worker = start("worker");
        // Asking costs the machine something too, so it is not asked often.
        while database.query(made).parse::<usize>()? < backlog {
            tokio::time::sleep(Duration::from_millis(250)).await;
        }
        rates.push(backlog as f64 / begun.elapsed().as_secs_f64());
        costs.push((engine.cpu_micros() - before + cpu_micros(worker.pid())) / backlog as f64);
        drop(worker);
    }
    let effects = middle(&mut rates);
    println!(
        "\neffects on {}: {effects:.0}/s ({:.2} of the ceiling), the start of the worker included; {:.0} µs of CPU each, server and all",
        engine.name(),
        effects / ceiling,
        middle(&mut costs)
    );
    if !bares.is_empty() {
        let (mut rates, mut costs): (Vec<f64>, Vec<f64>) = bares.into_iter().unzip();
        let bare = middle(&mut rates);
        println!(
            "the statement alone, {BATCH} a commit, two connections: {bare:.0}/s, {:.0} µs each; effects reach {:.2} of it",
            middle(&mut costs),
            effects / bare
        );
    }
    Ok(())
}

fn middle(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The same statement without a journal: how many a second, and how much CPU of the server and of this process each.
async fn bare_on_mysql(database: &mysql::Database<'static>, engine: Engine) -> anyhow::Result<(f64, f64)> {
    use mysql_async::prelude::Queryable;
    let (table, statement, _) = engine.shop();
    database.query(table);
    let (own, before) = (cpu_micros(std::process::id()), engine.cpu_micros());
    let begun = std::time::Instant::now();
    let connections = (0..2).map(|number| {
        let url = database.url() + "?prefer_socket=false";
        let statement = statement.replace(":payment", "?").replace(":amount", "?");
        async move {
            let mut connection = mysql_async::Conn::from_url(url).await?;
            connection.query_drop("SET autocommit = 0").await?;
            for first in (number * EFFECTS / 2..(number + 1) * EFFECTS / 2).step_by(BATCH) {
                for payment in first..(first + BATCH).min((number + 1) * EFFECTS / 2) {
                    connection.exec_drop(&statement, (format!("pi_{payment}"), 1_999)).await?;
                }
                connection.query_drop("COMMIT").await?;
            }
            connection.disconnect().await?;
            anyhow::Ok(())
        }
    });
    let mut running = tokio::task::JoinSet::new();
    connections.for_each(|connection| {
        running.spawn(connection);
    });
    while let Some(done) = running.join_next().await {
        done??;
    }
    let rate = EFFECTS as f64 / begun.elapsed().as_secs_f64();
    let cpu = cpu_micros(std::process::id()) - own + engine.cpu_micros() - before;
    Ok((rate, cpu / EFFECTS as f64))
}

async fn measure(plan: &Plan, row: Row, pace: Pace, seconds: u64) -> anyhow::Result<Measured> {
    let directory = tempfile::tempdir_in(&plan.directory)?;
    let database = plan.engine.map(Engine::database);
    let url = database.as_ref().map_or_else(|| "sqlite://journal.db".to_owned(), Database::url);
    prepare(directory.path(), &CONFIG.replace("sqlite://journal.db", &url));
    if matches!(row, Row::RandomKeysFull | Row::OrderedKeysFull) {
        fill_ledger(directory.path(), plan.ledger)?;
    }
    let gateway = start(row, directory.path())?;
    let provider = Provider::new("stripe", SECRET, "stripe");
    // Enough for the fastest machine; a row that runs out ends early, which the rate allows for.
    let (count, again) = match (row, pace) {
        (Row::Duplicates, _) => (1_000, true),
        (Row::Ceiling, _) => (20_000, true),
        (_, Pace::Closed) => (60_000 * seconds as usize * 1_024 / plan.body.max(1_024), false),
        (_, Pace::Open(rate)) => ((rate * (seconds + 1) as f64) as usize, false),
    };
    let requests =
        Arc::new((0..count).map(|number| request(&provider, row, number, plan.body)).collect::<Vec<_>>());
    if row == Row::Duplicates {
        run(
            gateway.ingress,
            CONNECTIONS,
            Arc::clone(&requests),
            false,
            Pace::Closed,
            Duration::from_secs(60),
        )
        .await;
    }
    let server = |plan: &Plan| plan.engine.map_or(0.0, Engine::cpu_micros);
    let before = (cpu_micros(gateway.pid()), writer_micros(gateway.pid()), server(plan));
    let report =
        run(gateway.ingress, plan.connections, requests, again, pace, Duration::from_secs(seconds)).await;
    // What a server spends on writing stands where the writer's time stands on SQLite.
    let writer = writer_micros(gateway.pid()) - before.1 + server(plan) - before.2;
    let cpu = (cpu_micros(gateway.pid()) - before.0, writer);
    Ok(summary(&gateway, &report, cpu))
}

fn start(row: Row, directory: &Path) -> anyhow::Result<Gateway> {
    let own = std::env::current_exe()?;
    if row == Row::Ceiling {
        let mut command = Command::new(own);
        command.arg("ceiling");
        return Ok(Gateway::start_command(command, directory));
    }
    Ok(Gateway::start(&own.with_file_name("oncehook"), directory))
}

/// A signed Stripe event of about the wanted size. Random keys scatter over the ledger; ordered ones go to its end.
fn request(provider: &Provider, row: Row, number: usize, size: usize) -> Vec<u8> {
    let scattered = Random::new(number as u64).next();
    let id = match row {
        Row::OrderedKeys | Row::OrderedKeysFull => format!("evt_1PxZ{number:012}{:08x}", scattered as u32),
        _ => format!("evt_{scattered:016x}{:08x}", number as u32),
    };
    let head = format!(
        "{{\"id\":\"{id}\",\"object\":\"event\",\"type\":\"payment_intent.succeeded\",\"created\":{},\"data\":{{\"object\":{{\"id\":\"pi_{number}\",\"amount\":1999,\"note\":\"",
        now().as_secs()
    );
    let tail = "\"}},\"livemode\":true,\"pending_webhooks\":1}";
    let padding = "x".repeat(size.saturating_sub(head.len() + tail.len()));
    let mut headers = HeaderMap::new();
    headers.insert("content-type", http::HeaderValue::from_static("application/json; charset=utf-8"));
    headers.insert(
        "user-agent",
        http::HeaderValue::from_static("Stripe/1.0 (+https://stripe.com/docs/webhooks)"),
    );
    provider.request(&headers, format!("{head}{padding}{tail}").as_bytes(), &id, now())
}

fn summary(gateway: &Gateway, report: &Report, (cpu, writer): (f64, f64)) -> Measured {
    let answered: u64 = report.statuses.values().sum();
    Measured {
        rate: report.rate(),
        p50: report.millis(0.5),
        p99: report.millis(0.99),
        memory: gateway.memory("VmHWM"),
        max: report.millis(1.0),
        cpu_micros: cpu / answered.max(1) as f64,
        writer_micros: writer / answered.max(1) as f64,
        refused: answered - report.statuses.get(&200).copied().unwrap_or(0) + report.errors,
    }
}

/// CPU time of a process so far, in microseconds.
fn cpu_micros(pid: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let after_name = stat.rsplit(')').next().unwrap_or_default();
    let ticks: f64 =
        after_name.split_whitespace().skip(11).take(2).filter_map(|ticks| ticks.parse::<f64>().ok()).sum();
    // The kernel counts in hundredths of a second.
    ticks * 10_000.0
}

/// CPU time of the journal's writer thread so far, in microseconds.
fn writer_micros(pid: u32) -> f64 {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let writer = tasks.map(|task| task.path()).find(|task| {
        std::fs::read_to_string(task.join("comm")).is_ok_and(|name| name.trim() == "journal-writer")
    });
    let Some(writer) = writer else { return 0.0 };
    let times = std::fs::read_to_string(writer.join("schedstat")).unwrap_or_default();
    times.split_whitespace().next().and_then(|nanos| nanos.parse::<f64>().ok()).unwrap_or_default() / 1e3
}

/// A journal that has known so many keys for long: scattered ones, and older ones in order.
fn fill_ledger(directory: &Path, keys: usize) -> anyhow::Result<()> {
    let path = directory.join("journal.db");
    SqliteJournal::migrate(&path, &Clock::system())?;
    let connection = rusqlite::Connection::open(path)?;
    let mut ids: Vec<String> = (0..keys)
        .map(|number| match number % 2 {
            0 => format!("evt_{:016x}{number:08x}", Random::new(number as u64 | 1 << 40).next()),
            _ => format!("evt_1PxY{number:012}{:08x}", number as u32),
        })
        .collect();
    ids.sort_unstable();
    connection.execute_batch("BEGIN")?;
    let mut insert = connection.prepare(
        "INSERT INTO oncehook_keys (source, key, event, digest, first_seen, expires_at)
         VALUES ('stripe', ?1, randomblob(16), randomblob(32), ?2, ?2)",
    )?;
    for id in ids {
        insert.execute(rusqlite::params![id.as_bytes(), now().0])?;
    }
    connection.execute_batch("COMMIT; PRAGMA wal_checkpoint(TRUNCATE)")?;
    Ok(())
}

fn median(row: &mut [Measured]) -> &Measured {
    row.sort_by(|a, b| a.rate.total_cmp(&b.rate));
    &row[row.len() / 2]
}

fn name(row: Row) -> &'static str {
    match row {
        Row::Ceiling => "ceiling, no storage",
        Row::RandomKeys => "random keys",
        Row::OrderedKeys => "time-ordered keys",
        Row::RandomKeysFull => "random keys, full ledger",
        Row::OrderedKeysFull => "time-ordered, full ledger",
        Row::Duplicates => "duplicates",
    }
}
