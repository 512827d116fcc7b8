//! `make bench-rows`: how much of the ceiling durable accepts reach on the embedded journal, in one run on one machine.
//!
//! Every row is a gateway of its own in a fresh directory, loaded by this process over loopback with signed requests made
//! beforehand. The writer's CPU time per event is steadier than any rate on a shared machine. Rounds are interleaved and the
//! median is reported, so a slow moment of the machine hits all rows alike; beside latencies stands what the hypervisor took
//! away meanwhile. Other journals and other stacks: `compare`.
//!
//! `bench [--connections N] [--seconds N] [--rounds N] [--open-rounds N] [--body BYTES] [--ledger KEYS] [--memory-seconds N]
//! [--rate N [--random 1]]`

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use oncehook::clock::Clock;
use oncehook::journal::sqlite::SqliteJournal;
use oncehook_testkit::compare::{family, load::request};
use oncehook_testkit::gateway::{CONFIG, Gateway, SECRET, now, prepare};
use oncehook_testkit::random::Random;
use oncehook_testkit::sender::Provider;
use oncehook_testkit::workload::{Pace, Report, run};

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

const ROWS: [Row; 6] =
    [Row::Ceiling, Row::RandomKeys, Row::OrderedKeys, Row::RandomKeysFull, Row::OrderedKeysFull, Row::Duplicates];

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
    /// The part of the processors' time that the hypervisor gave to others.
    stolen: f64,
}

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.first().is_some_and(|word| word == "ceiling") {
        return oncehook_testkit::ceiling::serve();
    }
    let known = [
        "--connections",
        "--seconds",
        "--rounds",
        "--open-rounds",
        "--body",
        "--ledger",
        "--memory-seconds",
        "--rate",
        "--random",
    ];
    for pair in arguments.chunks(2) {
        let fits = matches!(pair, [name, number] if known.contains(&name.as_str()) && number.parse::<usize>().is_ok());
        anyhow::ensure!(fits, "{} is not one of {} with a number", pair.join(" "), known.join(", "));
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
    let rows = ROWS;
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
        "\n{:<28} {:>10} {:>9} {:>9} {:>9} {:>9} {:>9}",
        "open loop, a third of it", "offered/s", "p50 ms", "p99 ms", "max ms", "RSS MB", "stolen %"
    );
    for (row, closed) in rows.iter().zip(&medians) {
        let offered = closed.rate / 3.0;
        for _ in 0..plan.open_rounds {
            let measured = measure(plan, *row, Pace::Open(offered), plan.seconds).await?;
            println!(
                "{:<28} {:>10.0} {:>9.2} {:>9.2} {:>9.2} {:>9.0} {:>9.1}",
                name(*row),
                offered,
                measured.p50,
                measured.p99,
                measured.max,
                measured.memory as f64 / 1e6,
                measured.stolen * 100.0
            );
        }
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

async fn measure(plan: &Plan, row: Row, pace: Pace, seconds: u64) -> anyhow::Result<Measured> {
    let directory = tempfile::tempdir_in(&plan.directory)?;
    prepare(directory.path(), CONFIG);
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
    let ordered = matches!(row, Row::OrderedKeys | Row::OrderedKeysFull);
    let requests =
        Arc::new((0..count).map(|number| request(&provider, number, ordered, plan.body, now())).collect::<Vec<_>>());
    if row == Row::Duplicates {
        run(gateway.ingress, CONNECTIONS, Arc::clone(&requests), false, Pace::Closed, Duration::from_secs(60)).await;
    }
    let (cpu, writer) = (cpu_micros(gateway.pid()), writer_micros(gateway.pid()));
    let stolen = family::stolen();
    let report = run(gateway.ingress, plan.connections, requests, again, pace, Duration::from_secs(seconds)).await;
    let used = (cpu_micros(gateway.pid()) - cpu, writer_micros(gateway.pid()) - writer);
    Ok(Measured { stolen: family::stolen_since(stolen), ..summary(&gateway, &report, used) })
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
        stolen: 0.0,
    }
}

/// CPU time of a process so far, in microseconds.
fn cpu_micros(pid: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let after_name = stat.rsplit(')').next().unwrap_or_default();
    let ticks: f64 = after_name.split_whitespace().skip(11).take(2).filter_map(|ticks| ticks.parse::<f64>().ok()).sum();
    // The kernel counts in hundredths of a second.
    ticks * 10_000.0
}

/// CPU time of the journal's writer thread so far, in microseconds.
fn writer_micros(pid: u32) -> f64 {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let writer = tasks
        .map(|task| task.path())
        .find(|task| std::fs::read_to_string(task.join("comm")).is_ok_and(|name| name.trim() == "journal-writer"));
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
