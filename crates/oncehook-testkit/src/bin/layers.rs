//! `make layers`: what the layers before the database are worth, in one run on one machine.
//!
//! - `layers copies`: copies of one event over four nodes on PostgreSQL and Redis, beside the same four processes without storage; then
//!   with Redis stopped, emptied and stalled in the middle.
//! - `layers outage`: PostgreSQL stopped under load, before a source with a spool and one without.
//!
//! Each prints what was measured and whether it is what was asked for. Sizes are arguments (`--seconds`, `--rounds`, `--rate`,
//! `--connections`, `--senders`). The program is the `oncehook` beside this one, so a release build measures a release build.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use oncehook_testkit::gateway::{CONFIG, Gateway, SECRET, now, prepare};
use oncehook_testkit::outage;
use oncehook_testkit::postgres::{Database, Server};
use oncehook_testkit::redis::Redis;
use oncehook_testkit::sender::{Provider, stripe_body};
use oncehook_testkit::workload::{Pace, Report, run_over};
use tempfile::TempDir;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// As many as the shop had orders.
const COPIES: usize = 11_247;

/// Gateways at once.
const NODES: usize = 4;

/// Appends that are still a handful.
const HANDFUL: u64 = 8;

/// Of the rate without storage, for copies.
const CEILING_SHARE: f64 = 0.95;

/// A p99 with Redis in trouble, against the one before.
const P99_TIMES: f64 = 2.0;

/// By when the breaker must be open.
const BREAKER: Duration = Duration::from_millis(300);

/// How long Redis is in trouble after that.
const TROUBLE: Duration = Duration::from_millis(1_700);

fn main() -> anyhow::Result<()> {
    let arguments = Arguments(std::env::args().skip(1).collect());
    match arguments.0.first().map(String::as_str) {
        Some("ceiling") => oncehook_testkit::ceiling::serve(),
        Some("copies") => {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(copies(&arguments))
        }
        Some("outage") => {
            let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
            runtime.block_on(database_away(&arguments))
        }
        _ => anyhow::bail!("say which: `layers copies` or `layers outage`"),
    }
}

struct Arguments(Vec<String>);

impl Arguments {
    fn number(&self, name: &str, usual: u64) -> u64 {
        let at = self.0.iter().position(|word| word == name);
        at.and_then(|at| self.0.get(at + 1)?.parse().ok()).unwrap_or(usual)
    }
}

fn binary() -> anyhow::Result<PathBuf> {
    Ok(std::env::current_exe()?.with_file_name("oncehook"))
}

/// Says whether a goal was reached, in a line.
fn say(goal: &str, met: bool) -> bool {
    println!("{}: {goal}", if met { "met" } else { "NOT MET" });
    met
}

async fn database_away(arguments: &Arguments) -> anyhow::Result<()> {
    let plan = outage::Plan {
        seconds: arguments.number("--seconds", 60),
        rate: arguments.number("--rate", 2_000),
        senders: arguments.number("--senders", 128) as usize,
    };
    println!("PostgreSQL stopped for {} s under {} events/s from {} senders", plan.seconds, plan.rate, plan.senders);
    let stolen = Steal::now();
    let seen = outage::run(&binary()?, &plan).await;
    println!("{seen}\n{stolen}");
    let all = [
        say(
            "as many events a second as were asked for (99 in 100)",
            seen.accepted_per_second >= plan.rate as f64 * 0.99,
        ),
        say("no error at the source with a spool; nothing lost, doubled or reordered", true),
        say("503 within 50 ms at the source without one", seen.refused_within(1.0) <= Duration::from_millis(50)),
        say("ready again within 5 s", seen.ready <= Duration::from_secs(5)),
    ];
    anyhow::ensure!(all.iter().all(|met| *met), "not all of it was reached");
    Ok(())
}

/// A process that accepts, with its directory.
struct Node {
    gateway: Gateway,
    _directory: TempDir,
}

fn start(command: Command, config: &str) -> anyhow::Result<Node> {
    let directory = tempfile::tempdir()?;
    prepare(directory.path(), config);
    Ok(Node { gateway: Gateway::start_command(command, directory.path()), _directory: directory })
}

/// Four gateways on one database and one Redis.
struct Nodes {
    nodes: Vec<Node>,
    database: Database<'static>,
    redis: Redis,
}

impl Nodes {
    async fn start() -> anyhow::Result<Self> {
        let (database, redis) = (Server::shared().database(), Redis::start(&[]));
        let config = CONFIG.replace("sqlite://journal.db", &database.url());
        let config = config.replace("[[source]]", &format!("[dedup]\nredis = \"{}\"\n[[source]]", redis.url()));
        let mut nodes = Vec::new();
        for _ in 0..NODES {
            let mut command = Command::new(binary()?);
            command.args(["serve", "--role", "ingest", "--role", "admin"]);
            nodes.push(start(command, &config)?);
        }
        let nodes = Self { nodes, database, redis };
        nodes.until_redis_answers().await;
        Ok(nodes)
    }

    fn doors(&self) -> Vec<SocketAddr> {
        doors(&self.nodes)
    }

    async fn until_redis_answers(&self) {
        for node in &self.nodes {
            while node.gateway.json("/readyz").await["redis"] != "ok" {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }

    /// Requests that the database has seen so far, new or not.
    async fn appends(&self) -> anyhow::Result<u64> {
        let mut appends: u64 = self.database.query("SELECT count(*) FROM oncehook.events").parse()?;
        for node in &self.nodes {
            let stats = node.gateway.json("/api/stats").await;
            appends += stats["duplicates_by_layer"]["journal"].as_u64().unwrap_or(0);
        }
        Ok(appends)
    }
}

fn doors(nodes: &[Node]) -> Vec<SocketAddr> {
    nodes.iter().map(|node| node.gateway.ingress).collect()
}

/// What is done to Redis, and what ends it.
struct Trouble {
    name: &'static str,
    begin: fn(&Redis),
    end: fn(&Redis),
}

const TROUBLES: [Trouble; 3] = [
    Trouble { name: "stopped", begin: Redis::stop, end: Redis::restart },
    Trouble { name: "FLUSHALL", begin: |redis| drop(redis.ask(&["FLUSHALL"])), end: |_| {} },
    Trouble { name: "stalled 2 s", begin: Redis::freeze, end: Redis::thaw },
];

fn signed(provider: &Provider, id: &str) -> Vec<u8> {
    provider.request(&Default::default(), &stripe_body(id, 1_024), id, now())
}

/// Not answered, or answered with an error.
fn failed(report: &Report) -> u64 {
    let answered: u64 = report.statuses.values().sum();
    report.errors + answered - report.statuses.get(&200).copied().unwrap_or(0)
}

async fn copies(arguments: &Arguments) -> anyhow::Result<()> {
    let seconds = Duration::from_secs(arguments.number("--seconds", 4));
    let rounds = arguments.number("--rounds", 5);
    let connections = arguments.number("--connections", 256) as usize;
    let rate = arguments.number("--rate", 3_000) as f64;
    println!("{NODES} nodes on PostgreSQL and Redis, {connections} connections, 1 KB bodies, all on this machine");
    let stolen = Steal::now();
    let provider = Provider::new("stripe", SECRET, "stripe");
    let nodes = Nodes::start().await?;
    let mut all = Vec::new();

    let once = |key: &str, copies| Arc::new(vec![signed(&provider, key); copies]);
    let minute = Duration::from_secs(60);
    let before = nodes.appends().await?;
    let storm = run_over(&nodes.doors(), connections, once("evt_storm", COPIES), false, Pace::Closed, minute).await;
    let appends = nodes.appends().await? - before;
    println!(
        "\n{COPIES} copies of one event, all nodes at once: {:.0}/s, {} failed, {appends} appends",
        storm.rate(),
        failed(&storm)
    );
    all.push(say("a handful of appends and no error", appends <= HANDFUL && failed(&storm) == 0));

    let (mut ceilings, mut rates) = (Vec::new(), Vec::new());
    let bare: Vec<Node> = (0..NODES)
        .map(|_| {
            let mut command = Command::new(std::env::current_exe()?);
            command.arg("ceiling");
            start(command, CONFIG)
        })
        .collect::<anyhow::Result<_>>()?;
    for _ in 0..rounds {
        // Without storage every request is a new event; keys that are known would be shared by those who wait for them.
        let different = (0..20_000).map(|number| signed(&provider, &format!("evt_{number}"))).collect();
        let ceiling = run_over(&doors(&bare), connections, Arc::new(different), true, Pace::Closed, seconds).await;
        let copies = run_over(&nodes.doors(), connections, once("evt_storm", 1_000), true, Pace::Closed, seconds).await;
        anyhow::ensure!(failed(&ceiling) + failed(&copies) == 0, "a request failed");
        println!(
            "without storage {:.0}/s, p99 {:.1} ms; copies {:.0}/s, p99 {:.1} ms",
            ceiling.rate(),
            ceiling.millis(0.99),
            copies.rate(),
            copies.millis(0.99)
        );
        ceilings.push(ceiling.rate());
        rates.push(copies.rate());
    }
    drop(bare);
    let share = median(&mut rates) / median(&mut ceilings);
    all.push(say(&format!("copies at {share:.2} of the rate without storage (medians)"), share >= CEILING_SHARE));

    println!(
        "\nRedis in trouble half-way through {COPIES} copies; then under {rate:.0} requests/s, each event 12 times, medians of {rounds} rounds"
    );
    for trouble in &TROUBLES {
        all.push(in_trouble(&nodes, trouble, connections, rate, rounds).await?);
    }
    println!("{stolen}");
    anyhow::ensure!(all.iter().all(|met| *met), "not all of it was reached");
    Ok(())
}

/// Latencies in milliseconds, one of each round.
#[derive(Default)]
struct Phases {
    normal: Vec<f64>,
    breaking: Vec<f64>,
    open: Vec<f64>,
    after: Vec<f64>,
}

async fn in_trouble(
    nodes: &Nodes,
    trouble: &Trouble,
    connections: usize,
    rate: f64,
    rounds: u64,
) -> anyhow::Result<bool> {
    let provider = Provider::new("stripe", SECRET, "stripe");
    let doors = nodes.doors();
    let (mut p99, mut failures, mut most_appends) = (Phases::default(), 0, 0);
    for round in 0..rounds {
        // Two nodes have met the event when it happens, the other two have not and must ask.
        let key = format!("evt_{}_{round}", trouble.name.replace(' ', "_"));
        let storm = Arc::new(vec![signed(&provider, &key); COPIES / 2]);
        let before = nodes.appends().await?;
        let minute = Duration::from_secs(60);
        let first = run_over(&doors[..2], connections, Arc::clone(&storm), false, Pace::Closed, minute).await;
        (trouble.begin)(&nodes.redis);
        let second = run_over(&doors, connections, storm, false, Pace::Closed, minute).await;
        (trouble.end)(&nodes.redis);
        most_appends = most_appends.max(nodes.appends().await? - before);
        failures += failed(&first) + failed(&second);
        nodes.until_redis_answers().await;

        let phase = async |name: &str, time: Duration| {
            let requests = stream(&provider, &format!("{key}_{name}"), rate, time);
            run_over(&doors, connections, requests, false, Pace::Open(rate), time).await
        };
        let normal = phase("normal", Duration::from_secs(3)).await;
        (trouble.begin)(&nodes.redis);
        let breaking = phase("breaking", BREAKER).await;
        let open = phase("open", TROUBLE).await;
        (trouble.end)(&nodes.redis);
        let after = phase("after", Duration::from_secs(2)).await;
        failures += [&normal, &breaking, &open, &after].into_iter().map(failed).sum::<u64>();
        for (of, report) in [
            (&mut p99.normal, &normal),
            (&mut p99.breaking, &breaking),
            (&mut p99.open, &open),
            (&mut p99.after, &after),
        ] {
            of.push(report.millis(0.99));
        }
        nodes.until_redis_answers().await;
    }
    let [normal, breaking, open, after] =
        [&mut p99.normal, &mut p99.breaking, &mut p99.open, &mut p99.after].map(|of| median(of));
    println!(
        "{:<12} {failures} failed, at most {most_appends} appends; p99 ms: before {normal:.1}, first {} ms {breaking:.1}, then {open:.1}, afterwards {after:.1}",
        trouble.name,
        BREAKER.as_millis()
    );
    let fast = open <= P99_TIMES * normal && after <= P99_TIMES * normal;
    let quiet = failures == 0 && most_appends <= HANDFUL;
    Ok(say(
        &format!("Redis {}: no error, a handful of appends, p99 within {P99_TIMES} times", trouble.name),
        fast && quiet,
    ))
}

/// New events all the time, each twelve times with a while between its copies, so that every node meets keys that only the
/// others know.
fn stream(provider: &Provider, name: &str, rate: f64, time: Duration) -> Arc<Vec<Vec<u8>>> {
    const AGAIN: usize = 12;
    let requests = (rate * time.as_secs_f64()) as usize;
    // Copies come a thirtieth of a second apart.
    let window = (rate / 30.0) as usize;
    let events: Vec<Vec<u8>> =
        (0..requests / AGAIN + window).map(|number| signed(provider, &format!("{name}_{number}"))).collect();
    let passes = events.chunks(window).flat_map(|window| std::iter::repeat_n(window, AGAIN)).flatten();
    Arc::new(passes.take(requests).cloned().collect())
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// How much of the machine others took, since then.
struct Steal {
    stolen: f64,
    all: f64,
}

impl Steal {
    fn now() -> Self {
        let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
        let line = stat.lines().next().unwrap_or_default();
        let ticks: Vec<f64> = line.split_whitespace().skip(1).filter_map(|tick| tick.parse().ok()).collect();
        Self { stolen: ticks.get(7).copied().unwrap_or(0.0), all: ticks.iter().take(8).sum() }
    }
}

impl std::fmt::Display for Steal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let now = Self::now();
        let share = (now.stolen - self.stolen) / (now.all - self.all).max(1.0);
        write!(f, "{:.1} % of the machine was taken by others meanwhile", share * 100.0)
    }
}
