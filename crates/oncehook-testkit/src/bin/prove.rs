//! `prove`: shows at length that nothing acknowledged is lost and nothing happens twice, whatever breaks, and that the proof
//! would notice if it were otherwise.
//!
//! Promises: the exit code is 0 only if nothing was lost, doubled or odd, every planted mistake was caught, nothing rare stayed
//! unvisited, and equal seeds gave equal histories. The last line of stdout sums it up.
//!
//! `prove RELEASED PLANTED [--seed N] [--scale PERCENT] [--write FILE]`: the released program, one built with the features `planted`
//! and `crash-points`, and where to write the document. `make prove` builds both and gives them.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use oncehook::planted::{self, Bug};
use oncehook_testkit::gateway::now;
use oncehook_testkit::prove::audit::Tally;
use oncehook_testkit::prove::cluster::{Cluster, Engine};
use oncehook_testkit::prove::coverage::Coverage;
use oncehook_testkit::prove::disk::Shim;
use oncehook_testkit::prove::embedded::{Deployment, POINTS};
use oncehook_testkit::prove::history::Manners;
use oncehook_testkit::prove::planted::{Search, search};
use oncehook_testkit::prove::{faults, simulation};
use oncehook_testkit::random::Random;

/// Simulated histories, and how many of them are played twice.
const SEEDS: u64 = 500;
const REPEATED: u64 = 25;

/// Histories within which a planted mistake must show.
const SEEDS_TO_NOTICE: u64 = 60;

struct Plan {
    released: PathBuf,
    planted: PathBuf,
    seed: u64,
    scale: u64,
    write: Option<PathBuf>,
}

/// One row of the figures.
struct Row {
    name: String,
    rounds: String,
    tally: Tally,
    seed: u64,
    took: Duration,
}

fn main() -> anyhow::Result<ExitCode> {
    let plan = Plan::read()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(prove(&plan))
}

impl Plan {
    fn read() -> anyhow::Result<Self> {
        let mut words = std::env::args().skip(1);
        let mut places = Vec::new();
        let (mut seed, mut scale, mut write) = (now().0.unsigned_abs() / 1_000_000, 100, None);
        while let Some(word) = words.next() {
            let mut value = || words.next().with_context(|| format!("{word} needs a value"));
            match word.as_str() {
                "--seed" => seed = value()?.parse()?,
                "--scale" => scale = value()?.parse()?,
                "--write" => write = Some(PathBuf::from(value()?)),
                _ => places.push(Path::new(&word).canonicalize().with_context(|| word.clone())?),
            }
        }
        let [released, planted] = places.try_into().map_err(|_| anyhow::anyhow!("prove RELEASED PLANTED"))?;
        Ok(Self { released, planted, seed, scale, write })
    }

    fn rounds(&self, usual: u64) -> usize {
        (usual * self.scale / 100).max(1) as usize
    }
}

async fn prove(plan: &Plan) -> anyhow::Result<ExitCode> {
    check_release(&plan.released)?;
    if !planted::plant(None) {
        bail!("prove itself must be built with the feature `planted`");
    }
    println!("seed {} (repeat with --seed {})", plan.seed, plan.seed);
    let begun = Instant::now();
    let coverage = Coverage::default();
    let shim = Shim::build();
    let place = tempfile::tempdir()?;
    let mut rows = Vec::new();
    embedded(plan, &shim, place.path(), &coverage, &mut rows).await;
    clusters(plan, &coverage, &mut rows).await;
    let (histories, repeated, hashes) = simulate(plan, &coverage, &mut rows);
    let searches = plant(plan, &shim, place.path(), &mut rows).await;

    let mut total = Tally::default();
    rows.iter().for_each(|row| total.add(&row.tally));
    let caught = searches.iter().filter(|search| search.is_caught()).count();
    let missing = coverage.missing();
    println!("\nwhat happened: {:?}", coverage.all());
    let mut failures = Vec::new();
    failures.extend(total.odd.iter().cloned());
    failures.extend(missing.iter().map(|what| format!("never happened: {what}")));
    failures.extend(
        searches
            .iter()
            .filter(|search| !search.is_caught())
            .map(|search| format!("not noticed: {:?} by {}", search.bug, search.scenario)),
    );
    if repeated < REPEATED {
        failures.push(format!("only {repeated} of {REPEATED} seeds gave the same history twice"));
    }
    let (faults, problems) = faults::table(&root().join("crates"));
    failures.extend(problems);
    let summary = format!(
        "prove: acked {} lost {} doubled {} planted {caught}/{} seeds {histories}",
        total.acked,
        total.lost,
        total.doubled,
        searches.len()
    );
    if let Some(path) = &plan.write {
        let took = begun.elapsed();
        let text = document(plan, &rows, &searches, &coverage.all(), &faults, &hashes, &summary, took);
        std::fs::write(path, text).with_context(|| format!("write {}", path.display()))?;
    }
    for failure in &failures {
        println!("FAILED: {failure}");
    }
    println!("{summary}");
    let good = failures.is_empty() && total.lost + total.doubled == 0;
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The released program has neither mistakes nor crash points in it.
fn check_release(released: &Path) -> anyhow::Result<()> {
    for word in ["ONCEHOOK_PLANTED", "ONCEHOOK_CRASH_POINT"] {
        let found = Command::new("grep").args(["-q", "-a", "-F", word]).arg(released).status()?;
        match found.code() {
            Some(0) => bail!("{} reads {word}: it is no release", released.display()),
            Some(1) => {}
            _ => bail!("{} cannot be searched", released.display()),
        }
    }
    Ok(())
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

impl Row {
    fn print(&self) {
        let Tally { acked, lost, doubled, conflicted, dead, .. } = &self.tally;
        println!(
            "{:42} {:>14}: acked {acked} lost {lost} doubled {doubled} conflicted {conflicted} dead {dead}, seed {}, {:.0} s",
            self.name,
            self.rounds,
            self.seed,
            self.took.as_secs_f64()
        );
        for odd in self.tally.odd.iter().take(5) {
            println!("  odd: {odd}");
        }
    }
}

/// What a scenario on the embedded journal does.
enum Scenario {
    Kills(usize),
    KillsAt(&'static str, u64, usize),
    Cuts(usize),
    EveryCall,
    Freezes(usize),
    ClockJumps,
    Races(usize),
    Calm,
}

async fn embedded(plan: &Plan, shim: &Shim, place: &Path, coverage: &Coverage, rows: &mut Vec<Row>) {
    let mut scenarios = vec![
        ("SQLite: kills".to_owned(), Scenario::Kills(plan.rounds(200)), 1),
        ("SQLite: power cuts".to_owned(), Scenario::Cuts(plan.rounds(201)), 1),
        ("SQLite: every call fails once".to_owned(), Scenario::EveryCall, 1),
        ("SQLite: freezes past a lease".to_owned(), Scenario::Freezes(plan.rounds(5)), 1),
        ("SQLite: clock jumps".to_owned(), Scenario::ClockJumps, 1),
        ("SQLite: races".to_owned(), Scenario::Races(plan.rounds(100)), 1),
        ("SQLite: load with half of it copies".to_owned(), Scenario::Calm, 1),
    ];
    for (point, passings) in POINTS {
        let kills = Scenario::KillsAt(point, passings, plan.rounds(10));
        scenarios.push((format!("SQLite: kills at {point}"), kills, 0));
    }
    let mut random = Random::new(plan.seed);
    for (name, scenario, released) in scenarios {
        let (begun, seed) = (Instant::now(), random.next());
        // Crash points are not in the release.
        let binary = if released == 1 { &plan.released } else { &plan.planted };
        let mut deployment =
            Deployment::new(binary, place, shim, coverage, Manners::default(), None, seed).await;
        let rounds = match scenario {
            Scenario::Kills(count) => {
                deployment.kills(count).await;
                format!("{count} kills")
            }
            Scenario::KillsAt(point, passings, count) => {
                deployment.kills_at(point, passings, count).await;
                format!("{count} kills")
            }
            Scenario::Cuts(count) => {
                deployment.cuts(count).await;
                format!("{count} cuts")
            }
            Scenario::EveryCall => format!("{} calls × 2", deployment.every_call().await),
            Scenario::Freezes(count) => {
                deployment.freezes(count).await;
                format!("{count} freezes")
            }
            Scenario::ClockJumps => {
                deployment.clock_jumps().await;
                "6 jumps".to_owned()
            }
            Scenario::Races(count) => {
                deployment.races(count, 32).await;
                format!("{count} × 32 copies")
            }
            Scenario::Calm => {
                deployment.calm(Duration::from_secs(5)).await;
                "5 s".to_owned()
            }
        };
        let tally = deployment.end(true).await;
        push(rows, Row { name, rounds, tally, seed, took: begun.elapsed() });
    }
}

async fn clusters(plan: &Plan, coverage: &Coverage, rows: &mut Vec<Row>) {
    let mut random = Random::new(plan.seed ^ 0x5eed);
    for (engine, name) in [(Engine::Postgres, "PostgreSQL"), (Engine::MariaDb, "MariaDB")] {
        let (begun, seed) = (Instant::now(), random.next());
        let mut cluster = Cluster::new(engine, &plan.released, coverage, None, seed).await;
        let count = plan.rounds(104);
        cluster.kills(count).await;
        let tally = cluster.end().await;
        let (name, rounds) = (format!("{name}, two nodes, Redis: kills"), format!("{count} kills"));
        push(rows, Row { name, rounds, tally, seed, took: begun.elapsed() });
    }
}

/// Returns how many histories were played, how many repeated themselves, and the first hashes.
fn simulate(plan: &Plan, coverage: &Coverage, rows: &mut Vec<Row>) -> (u64, u64, Vec<String>) {
    let begun = Instant::now();
    let (mut tally, mut repeated, mut hashes) = (Tally::default(), 0, Vec::new());
    for number in 0..SEEDS {
        let outcome = simulation::simulate(plan.seed + number);
        if number < REPEATED {
            repeated += u64::from(simulation::simulate(plan.seed + number) == outcome);
            hashes.push(outcome.hash.clone());
        }
        if !outcome.tally.is_clean() {
            println!("  seed {}: {:?}", plan.seed + number, outcome.tally);
        }
        tally.add(&outcome.tally);
        for (what, count) in outcome.seen {
            coverage.add(what, count);
        }
    }
    let name = "simulation: two nodes and three".to_owned();
    push(rows, Row { name, rounds: format!("{SEEDS} seeds"), tally, seed: plan.seed, took: begun.elapsed() });
    (SEEDS, repeated, hashes)
}

/// Every mistake, in the scenario that is meant for it and in the simulation; the same scenario without it goes to the rows.
async fn plant(plan: &Plan, shim: &Shim, place: &Path, rows: &mut Vec<Row>) -> Vec<Search> {
    let apart = Coverage::default();
    let mut searches = Vec::new();
    for bug in Bug::ALL {
        for control in [true, false] {
            let begun = Instant::now();
            let found = search(bug, control, &plan.planted, place, shim, &apart, plan.seed).await;
            if control {
                let (name, tally) = (format!("control: {}", found.scenario), found.tally);
                push(
                    rows,
                    Row { name, rounds: String::new(), tally, seed: plan.seed, took: begun.elapsed() },
                );
            } else {
                println!(
                    "planted {:18} {}: lost {} doubled {} by {}",
                    bug.name(),
                    if found.is_caught() { "caught" } else { "MISSED" },
                    found.tally.lost,
                    found.tally.doubled,
                    found.scenario
                );
                searches.push(found);
            }
        }
    }
    let mut tally = Tally::default();
    let able = planted::plant(Some(Bug::NoFence));
    for number in 0..if able { SEEDS_TO_NOTICE } else { 0 } {
        tally.add(&simulation::simulate(plan.seed + number).tally);
    }
    let _ = planted::plant(None);
    println!("planted no-fence in the simulation: lost {} doubled {}", tally.lost, tally.doubled);
    searches.push(Search { bug: Some(Bug::NoFence), scenario: "simulation", tally });
    searches
}

fn push(rows: &mut Vec<Row>, row: Row) {
    row.print();
    rows.push(row);
}

#[expect(clippy::too_many_arguments, reason = "it is all that is known")]
fn document(
    plan: &Plan,
    rows: &[Row],
    searches: &[Search],
    coverage: &BTreeMap<&'static str, u64>,
    faults: &str,
    hashes: &[String],
    summary: &str,
    took: Duration,
) -> String {
    let mut text = include_str!("../prove/PROOF.head.md").to_owned();
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let _ = writeln!(
        text,
        "## The latest run\n\n{}, {cores} cores, {} MB of memory, {:.0} minutes without building, seed {}.\n",
        processor(),
        memory_megabytes(),
        took.as_secs_f64() / 60.0,
        plan.seed
    );
    text.push_str("| scenario | rounds | acked | lost | doubled | conflicted | dead | seed |\n| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |\n");
    for Row { name, rounds, tally, seed, .. } in rows {
        let Tally { acked, lost, doubled, conflicted, dead, .. } = tally;
        let _ = writeln!(
            text,
            "| {name} | {rounds} | {acked} | {lost} | {doubled} | {conflicted} | {dead} | {seed} |"
        );
    }
    text.push_str("\n### Planted mistakes\n\n| mistake | scenario | noticed | lost | doubled |\n| --- | --- | --- | ---: | ---: |\n");
    for search in searches {
        let name = search.bug.map_or("", Bug::name);
        let noticed = if search.is_caught() { "yes" } else { "NO" };
        let _ = writeln!(
            text,
            "| {name} | {} | {noticed} | {} | {} |",
            search.scenario, search.tally.lost, search.tally.doubled
        );
    }
    text.push_str("\n### Rare things, and how often they happened\n\n| what | times |\n| --- | ---: |\n");
    for (what, count) in coverage {
        let _ = writeln!(text, "| {what} | {count} |");
    }
    let _ = writeln!(
        text,
        "\n### Histories\n\nThe first simulated histories of this seed have the hashes {}, each played twice.\n\n```\n{summary}\n```\n",
        hashes.iter().take(5).map(|hash| format!("`{hash}`")).collect::<Vec<_>>().join(", ")
    );
    text.push_str("## Faults 1 to 57\n\n");
    text.push_str(faults);
    text
}

fn processor() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    name.map_or_else(|| "an unknown processor".to_owned(), |(_, name)| name.trim().to_owned())
}

fn memory_megabytes() -> u64 {
    let info = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = info
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:")?.trim().split(' ').next()?.parse::<u64>().ok());
    total.unwrap_or(0) / 1_024
}
