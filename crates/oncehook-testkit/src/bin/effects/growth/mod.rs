//! Does a long history slow anything down? One store that grows, beside stores without a history, in turns.
//!
//! At every size: how long the gateway takes to start, a page of the list by each single filter, and accepting and taking
//! effect with keys that grow with time and with scattered ones. At the last size: accepting while old events are forgotten.
//! Beside it: a backlog that a gateway finds and works off, with its memory.
//!
//! Promises: what is measured is written down after each size ([`Journal`]), so that a run that is cut short keeps what it
//! has. Stores with and without a history take turns, and who goes first changes from round to round.
//! Does not: measure accepting and taking effect over HTTP.

mod backlog;
mod forgetting;
pub mod history;
mod lists;
mod mariadb;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use oncehook::journal::sqlite::SqliteOptions;
use oncehook_testkit::compare::Machine;
use oncehook_testkit::compare::family::{settle, stolen, stolen_since};
use oncehook_testkit::compare::growth::{Growth, Journal, Pair, Rates, Step};
use oncehook_verify::UnixMicros;

use self::history::History;
use super::store::{Engine, Store};
use super::{Bench, rate};

/// How much is measured.
pub struct Plan {
    /// Sizes of the history, growing.
    pub sizes: Vec<usize>,
    /// Sizes of the backlog.
    pub backlogs: Vec<usize>,
    pub rounds: usize,
    /// What is appended and worked off in one run, if it is not what suits the journal.
    pub run: Option<usize>,
    /// Where report and figures go.
    pub out: PathBuf,
}

impl Plan {
    /// What is appended and worked off in one run. The embedded journal moves its keys into their table a generation at a
    /// time, and scattered ones cost it more there the longer the history is: each run has its share of that.
    fn run_on(&self, engine: Engine) -> usize {
        self.run.unwrap_or(match engine {
            Engine::Sqlite => SqliteOptions::new("").ledger_generation,
            Engine::Postgres | Engine::Mysql => 100_000,
        })
    }
}

/// The bytes of a body.
const SIZE: usize = 200;

/// The days over which a history is spread: a gateway that keeps them for 30, as it does by default, forgets none of it.
const DAYS: u64 = 29;

/// The longest that the search index may take to be complete.
const INDEXED: Duration = Duration::from_secs(1_800);

fn progress(text: &str) {
    eprintln!("growth: {text}");
}

/// Measures one journal, and leaves its part in the report.
pub async fn run(engine: Engine, plan: &Plan) -> anyhow::Result<()> {
    let (begun, before) = (Instant::now(), stolen());
    let mut journal = Journal {
        name: engine.name().to_owned(),
        machine: Machine::here(&std::env::current_dir()?),
        ..Journal::default()
    };
    let save = |journal: &mut Journal| {
        journal.machine.seconds = begun.elapsed().as_secs();
        journal.machine.stolen = stolen_since(before);
        let mut growth = Growth::read(&plan.out);
        growth.replace(journal.clone());
        growth.save(&plan.out)
    };
    for waiting in &plan.backlogs {
        journal.backlogs.push(backlog::drain(engine, *waiting).await?);
        save(&mut journal)?;
    }
    let mut store = made(engine).await?;
    let history = History {
        count: plan.sizes.last().copied().unwrap_or(0),
        until: oncehook::clock::Clock::system().now(),
        over: Duration::from_secs(DAYS * 86_400),
        waiting: false,
        size: SIZE,
    };
    let mut loaded = 0;
    for size in &plan.sizes {
        let (step, grown) = step(store, plan, &history, loaded, *size).await?;
        (store, loaded) = (grown, *size);
        journal.steps.push(step);
        save(&mut journal)?;
    }
    if loaded > 0 {
        journal.forgetting = Some(forgetting::measure(store, plan, &history).await?);
        save(&mut journal)?;
    }
    let report = plan.out.join("GROWTH.md");
    println!("growth: {} measured in {} s, see {}", journal.name, journal.machine.seconds, report.display());
    Ok(())
}

/// A store whose journal has been opened once, so that its tables are there.
async fn made(engine: Engine) -> anyhow::Result<Store> {
    let bench = Bench::new(engine).await?;
    bench.journal.close().await;
    Ok(bench.store)
}

/// Lets the history grow to a size, and measures.
async fn step(
    store: Store,
    plan: &Plan,
    history: &History,
    loaded: usize,
    size: usize,
) -> anyhow::Result<(Step, Store)> {
    let before = stolen();
    let mut step = Step { stored: size, ..Step::default() };
    let begun = Instant::now();
    history::load(&store, history, loaded, size)?;
    step.load_seconds = begun.elapsed().as_secs_f64();
    step.index_seconds = indexed(&store).await?;
    // Gigabytes were loaded. What is measured must not wait for the disk to take them.
    settle();
    let engine = store.engine();
    let empty = made(engine).await?;
    for _ in 0..3 {
        step.empty_start_seconds.push(backlog::start_seconds(&empty)?);
        step.start_seconds.push(backlog::start_seconds(&store)?);
    }
    drop(empty);
    let start = |times: &[f64]| super::median(times.to_vec());
    progress(&format!(
        "the gateway is ready after {:.2} s, without a history after {:.2} s",
        start(&step.start_seconds),
        start(&step.empty_start_seconds)
    ));
    step.lists = lists::measure(&store, history, size, plan.rounds).await?;
    let mut full = Bench::open(store).await?.with_size(SIZE);
    for random in [false, true] {
        step.rates.push(rates(engine, &mut full, plan, random).await?);
    }
    full.journal.close().await;
    let store = full.store;
    let begun = Instant::now();
    history::trim(&store, history.time_of(size - 1))?;
    progress(&format!("what was accepted is removed again after {:.0} s", begun.elapsed().as_secs_f64()));
    step.stolen = stolen_since(before);
    Ok((step, store))
}

/// Opens the journal and waits until its search index is complete, as that of an accepted history would be. Returns how long
/// that took.
async fn indexed(store: &Store) -> anyhow::Result<f64> {
    let clock = oncehook::clock::Clock::system();
    let (begun, mut told) = (Instant::now(), Instant::now());
    let journal = store.open(&clock).await?;
    loop {
        let lag = journal.state().index_lag;
        if lag <= 1_000 && grouped(store)? {
            break;
        }
        anyhow::ensure!(begun.elapsed() < INDEXED, "{lag} events are still not in the search index");
        if told.elapsed() > Duration::from_secs(5) {
            progress(&format!("{lag} events are not in the search index yet"));
            told = Instant::now();
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    journal.close().await;
    Ok(begun.elapsed().as_secs_f64())
}

/// Whether the blocks of an embedded journal's search index are in groups, but for the last few.
fn grouped(store: &Store) -> anyhow::Result<bool> {
    let sql = "SELECT count(*) FROM oncehook_blocks WHERE last > (SELECT coalesce(max(last), 0) FROM oncehook_groups WHERE cell = 0)";
    Ok(store.engine() != Engine::Sqlite || store.number(sql)? < 64)
}

/// Accepting and taking effect, in turns with a store without a history.
async fn rates(engine: Engine, full: &mut Bench, plan: &Plan, random: bool) -> anyhow::Result<Rates> {
    let mut empty = Bench::new(engine).await?.with_size(SIZE);
    let mut rates = Rates { random, ..Rates::default() };
    let keys = if random { "random" } else { "time-ordered" };
    // The first round does not count: it is that of journals which were just opened.
    for round in 0..=plan.rounds {
        let (mut accepts, mut effects) = (Pair::default(), Pair::default());
        for turn in 0..2 {
            let with_history = (round + turn) % 2 == 1;
            let bench = if with_history { &mut *full } else { &mut empty };
            let (accepted, applied) = one(bench, plan.run_on(engine), random).await?;
            if with_history {
                (accepts.stored, effects.stored) = (accepted, applied);
            } else {
                (accepts.empty, effects.empty) = (accepted, applied);
            }
        }
        progress(&format!(
            "{keys} keys, round {round}: {:.0} accepts/s against {:.0}, {:.0} effects/s against {:.0}",
            accepts.stored, accepts.empty, effects.stored, effects.empty
        ));
        if round == 0 {
            rates.first = Some(accepts);
        } else {
            rates.accepts.push(accepts);
            rates.effects.push(effects);
        }
    }
    empty.journal.close().await;
    Ok(rates)
}

/// Accepts so many events, then works them off. Returns both rates.
async fn one(bench: &mut Bench, count: usize, random: bool) -> anyhow::Result<(f64, f64)> {
    let started = Instant::now();
    bench.append(count, random, None).await?;
    let accepted = rate(count, started);
    let started = Instant::now();
    let worker = bench.work();
    bench.applied(bench.made).await?;
    let applied = rate(count, started);
    worker.stop().await;
    Ok((accepted, applied))
}

/// The middle of a history of some size.
fn middle(history: &History, size: usize) -> UnixMicros {
    history.time_of(size / 2)
}

/// Where the gateway's binary is: beside this one.
fn gateway() -> anyhow::Result<PathBuf> {
    let path = std::env::current_exe()?.with_file_name("oncehook");
    anyhow::ensure!(Path::new(&path).exists(), "{} is not built", path.display());
    Ok(path)
}
