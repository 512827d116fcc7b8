//! `prove`: shows at length that nothing acknowledged is lost and nothing happens twice, whatever breaks, and that the proof
//! would notice if it were otherwise.
//!
//! Promises: the exit code is 0 only if nothing was lost, doubled or odd, every planted mistake was caught, nothing rare stayed
//! unvisited, and equal seeds gave equal histories. The last line of stdout sums it up. Ctrl-C, or a scenario that breaks off,
//! leaves no process and no directory behind.
//!
//! `prove RELEASED PLANTED [--seed N] [--scale PERCENT] [--only WORDS] [--write FILE]`: the released program, one built with the
//! features `planted` and `crash-points`, and where to write the document. `make prove` builds both and gives them. With `--only`
//! the scenarios whose name has the words (`simulation` and `planted` are names too); such a part is no proof, so nothing is
//! written, and only what it visits must have happened.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Instant;

use anyhow::{Context as _, bail};
use oncehook::planted::{Bug, plant as make};
use oncehook_testkit::gateway::now;
use oncehook_testkit::leash;
use oncehook_testkit::prove::audit::Tally;
use oncehook_testkit::prove::cluster::Engine;
use oncehook_testkit::prove::coverage::Coverage;
use oncehook_testkit::prove::disk::Shim;
use oncehook_testkit::prove::document::{Report, Row, Simulated};
use oncehook_testkit::prove::planted::{self, Search, search};
use oncehook_testkit::prove::progress::Progress;
use oncehook_testkit::prove::scenario::{self, Scenario, Stage, caught, words};
use oncehook_testkit::prove::{faults, simulation};
use oncehook_testkit::random::Random;
use tokio::signal::unix::{SignalKind, signal};

/// Simulated histories.
const SEEDS: u64 = 500;

/// Histories within which a planted mistake must show.
const SEEDS_TO_NOTICE: u64 = 60;

/// Seconds that are expected for the simulation, and for one planted mistake with its control.
const SIMULATION: u64 = 30;
const PLANTED: u64 = 20;

struct Plan {
    released: PathBuf,
    planted: PathBuf,
    seed: u64,
    scale: u64,
    only: Option<String>,
    write: Option<PathBuf>,
}

fn main() -> anyhow::Result<ExitCode> {
    let plan = Plan::read()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let place = tempfile::tempdir()?;
        end_with_us(place.path().to_path_buf())?;
        prove(&plan, place.path()).await
    })
}

/// Whoever interrupts us gets rid of all that we have started.
fn end_with_us(place: PathBuf) -> anyhow::Result<()> {
    for kind in [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()] {
        let (mut asked, place) = (signal(kind)?, place.clone());
        tokio::spawn(async move {
            asked.recv().await;
            // Servers are ended by their keepers, who notice that we are gone.
            let ended = leash::cut();
            let _ = std::fs::remove_dir_all(&place);
            eprintln!("interrupted; {ended} processes ended");
            std::process::exit(130);
        });
    }
    Ok(())
}

impl Plan {
    fn read() -> anyhow::Result<Self> {
        let mut words = std::env::args().skip(1);
        let mut places = Vec::new();
        let (mut seed, mut scale) = (now().0.unsigned_abs() / 1_000_000, 100);
        let (mut only, mut write) = (None, None);
        while let Some(word) = words.next() {
            let mut value = || words.next().with_context(|| format!("{word} needs a value"));
            match word.as_str() {
                "--seed" => seed = value()?.parse()?,
                "--scale" => scale = value()?.parse()?,
                "--only" => only = Some(value()?),
                "--write" => write = Some(PathBuf::from(value()?)),
                _ => places.push(Path::new(&word).canonicalize().with_context(|| word.clone())?),
            }
        }
        let [released, planted] = places.try_into().map_err(|_| anyhow::anyhow!("prove RELEASED PLANTED"))?;
        if only.is_some() && write.is_some() {
            bail!("a part of the proof is not written down");
        }
        Ok(Self { released, planted, seed, scale, only, write })
    }

    fn has(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|words| name.contains(words.as_str()))
    }
}

async fn prove(plan: &Plan, place: &Path) -> anyhow::Result<ExitCode> {
    check_release(&plan.released)?;
    if !make(None) {
        bail!("prove itself must be built with the feature `planted`");
    }
    println!("seed {} (repeat with SEED={})", plan.seed, plan.seed);
    let begun = Instant::now();
    let coverage = if plan.only.is_some() { Coverage::default() } else { Coverage::whole() };
    let shim = Shim::build_in(place);
    let scenarios: Vec<Scenario> =
        scenario::all(plan.scale).into_iter().filter(|scenario| plan.has(scenario.name)).collect();
    let (simulated, plants) = (plan.has("simulation"), plan.has("planted"));
    let bugs: Vec<_> = planted::all().filter(|(bug, engine)| plan.has(&planted_name(*bug, *engine))).collect();
    let expected = scenarios.iter().map(|scenario| scenario.seconds * plan.scale / 100).sum::<u64>()
        + u64::from(simulated) * SIMULATION
        + bugs.len() as u64 * PLANTED;
    let mut progress = Progress::new(scenarios.len() + usize::from(simulated) + bugs.len(), expected);

    let mut random = Random::new(plan.seed);
    let mut rows = Vec::new();
    let stage = Stage { released: &plan.released, armed: &plan.planted, place, shim: &shim, coverage: &coverage };
    for scenario in &scenarios {
        let (begun, seed) = (Instant::now(), random.next());
        progress.begin(scenario.name);
        let (rounds, tally) = scenario.run(stage, seed).await;
        let name = scenario.name.to_owned();
        push(&mut rows, &progress, Row { name, rounds, tally, seed, took: begun.elapsed() });
        progress.end(scenario.seconds * plan.scale / 100);
    }
    let mut histories = Simulated::default();
    if simulated {
        progress.begin("simulation");
        let begun = Instant::now();
        let (tally, played) = apart(|| simulate(plan.seed, &coverage, &progress)).unwrap_or_else(|panic| {
            (Tally { odd: vec![format!("simulation: {panic}")], ..Tally::default() }, Simulated::default())
        });
        let (name, rounds) = ("simulation: two nodes and three".to_owned(), format!("{SEEDS} seeds"));
        push(&mut rows, &progress, Row { name, rounds, tally, seed: plan.seed, took: begun.elapsed() });
        progress.end(SIMULATION);
        histories = played;
    }
    let mut searches = Vec::new();
    for (bug, engine) in bugs {
        progress.begin(&planted_name(bug, engine));
        plant((bug, engine), plan, &stage, &mut rows, &mut searches, &progress).await;
        progress.end(PLANTED);
    }
    if plants {
        let tally = apart(|| plant_in_the_simulation(plan.seed)).unwrap_or_default();
        println!("planted no-fence in the simulation: lost {} doubled {}", tally.lost, tally.doubled);
        searches.push(Search { bug: Some(Bug::NoFence), journal: "memory", scenario: "simulation", tally });
    }
    drop(progress);

    let (table, problems) = faults::table(&root());
    let mut failures: Vec<String> = rows.iter().flat_map(|row| row.tally.odd.iter().cloned()).collect();
    failures.extend(coverage.missing().iter().map(|what| format!("never happened: {what}")));
    let missed = searches.iter().filter(|search| !search.is_caught());
    failures.extend(
        missed.map(|search| format!("not noticed: {:?} on {} by {}", search.bug, search.journal, search.scenario)),
    );
    if histories.repeated < histories.played {
        let Simulated { played, repeated, .. } = histories;
        failures.push(format!("only {repeated} of {played} seeds gave the same history twice"));
    }
    failures.extend(problems);
    let report = Report {
        seed: plan.seed,
        took: begun.elapsed(),
        rows,
        searches,
        coverage: coverage.all(),
        histories,
        faults: table,
    };
    println!("\nwhat happened:");
    report.coverage.iter().for_each(|(what, count)| println!("  {count:>9} {what}"));
    if let Some(path) = &plan.write {
        std::fs::write(path, report.document()).with_context(|| format!("write {}", path.display()))?;
    }
    for failure in &failures {
        println!("FAILED: {failure}");
    }
    println!("{}", report.summary());
    let total = report.total();
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

/// On a thread of its own: the runtime would make what never waits wait for its turn. A panic is an error.
fn apart<T: Send>(work: impl FnOnce() -> T + Send) -> Result<T, String> {
    std::thread::scope(|scope| scope.spawn(work).join()).map_err(|panic| words(panic.as_ref()))
}

/// Plays every seed twice.
fn simulate(seed: u64, coverage: &Coverage, progress: &Progress) -> (Tally, Simulated) {
    let (mut tally, mut simulated) = (Tally::default(), Simulated::default());
    for seed in (seed..).take(SEEDS as usize) {
        let outcome = simulation::simulate(seed);
        simulated.played += 1;
        simulated.repeated += u64::from(simulation::simulate(seed) == outcome);
        if !outcome.tally.is_clean() {
            progress.say(&format!("  seed {seed}: {:?}", outcome.tally));
        }
        simulated.hashes.push(outcome.hash);
        tally.add(&outcome.tally);
        for (what, count) in outcome.seen {
            coverage.add(what, count);
        }
    }
    (tally, simulated)
}

/// A mistake on a journal, as `--only` names it.
fn planted_name(bug: Bug, engine: Option<Engine>) -> String {
    format!("planted {} on {}", bug.as_str(), planted::journal_name(engine))
}

/// A mistake in the scenario that is meant for it; the same scenario without it goes to the rows.
async fn plant(
    (bug, engine): (Bug, Option<Engine>),
    plan: &Plan,
    stage: &Stage<'_>,
    rows: &mut Vec<Row>,
    searches: &mut Vec<Search>,
    progress: &Progress,
) {
    // What happens for a mistake's sake is no coverage of what is released.
    let apart = Coverage::default();
    for control in [true, false] {
        let begun = Instant::now();
        let searching = search(bug, engine, control, stage.armed, stage.place, stage.shim, &apart, plan.seed);
        let found = caught(searching).await.unwrap_or_else(|panic| Search {
            bug: (!control).then_some(bug),
            journal: planted::journal_name(engine),
            scenario: "none",
            tally: Tally { odd: vec![format!("{}: {panic}", planted_name(bug, engine))], ..Tally::default() },
        });
        if control {
            let name = format!("{}: {} (control)", found.journal, found.scenario);
            let row = Row { name, rounds: String::new(), tally: found.tally, seed: plan.seed, took: begun.elapsed() };
            push(rows, progress, row);
        } else {
            let verdict = if found.is_caught() { "caught" } else { "MISSED" };
            let Tally { lost, doubled, odd, .. } = &found.tally;
            progress.say(&format!(
                "{:40} {verdict}: lost {lost} doubled {doubled} by {}, {:.0} s",
                planted_name(bug, engine),
                found.scenario,
                begun.elapsed().as_secs_f64()
            ));
            if !found.is_caught() {
                odd.iter().take(5).for_each(|odd| progress.say(&format!("  odd: {odd}")));
            }
            searches.push(found);
        }
    }
}

/// The fence is the simulation's to watch too.
fn plant_in_the_simulation(seed: u64) -> Tally {
    let mut tally = Tally::default();
    let able = make(Some(Bug::NoFence));
    for seed in (seed..).take(if able { SEEDS_TO_NOTICE as usize } else { 0 }) {
        tally.add(&simulation::simulate(seed).tally);
    }
    let _ = make(None);
    tally
}

fn push(rows: &mut Vec<Row>, progress: &Progress, row: Row) {
    row.lines().iter().for_each(|line| progress.say(line));
    rows.push(row);
}
