//! Two builds of the gateway side by side: the same load on each, one after the other, again and again.
//!
//! A shared machine has better and worse minutes, so a rate alone says little. Every pair is measured within seconds, the
//! build that goes first alternates, and the median of the pairs' ratios is what counts: of the rates, and of the processor
//! time per event of the gateway and its database server together.
//!
//! Does not: judge latencies. They are too noisy where the load shares the cores.

use std::path::PathBuf;

use super::effects::{drain, sql_route, sustain};
use super::load::Load;
use super::report::median;
use super::stack::{Engine, Stack};
use super::throughput::{self, SIZES};
use super::{Plan, family};

/// What is measured.
const PARTS: [&str; 4] = ["accepts", "effects", "accept + effect", "ordered effects"];

/// The events of one run.
const EVENTS: usize = 30_000;

/// One run of one build.
struct Run {
    rate: f64,
    cpu_micros: f64,
    memory: f64,
}

/// Measures pairs on every journal, and returns the table of their ratios, new to old.
pub async fn run(plan: &Plan, old: PathBuf, new: PathBuf, pairs: usize) -> anyhow::Result<String> {
    let builds = [old, new].map(|binary| Plan { binary: Some(binary), ..plan.clone() });
    let wanted = |words: &[String], name: &str| words.is_empty() || words.iter().any(|word| name == word);
    let mut table = String::from(
        "| journal | part | rate, new / old | CPU per event, new / old | memory, new / old | rates of the pairs | old, new |\n\
         | --- | --- | --- | --- | --- | --- | --- |\n",
    );
    let stolen = family::stolen();
    for engine in [Engine::Sqlite, Engine::Postgres, Engine::Mariadb] {
        let stack = Stack::Gateway(engine, false);
        if !wanted(&plan.stacks, stack.name()) {
            continue;
        }
        for part in PARTS.into_iter().filter(|part| wanted(&plan.parts, part)) {
            let mut measured: [Vec<Run>; 2] = [Vec::new(), Vec::new()];
            for pair in 0..pairs {
                for turn in 0..2 {
                    let build = (pair + turn) % 2;
                    let run = one(&builds[build], engine, part).await?;
                    measured[build].push(run);
                }
            }
            let row = row(stack.name(), part, &measured);
            eprint!("{row}");
            table.push_str(&row);
        }
    }
    table.push_str(&format!(
        "\n{pairs} pairs; {:.1} % of the processor was stolen.\n",
        100.0 * family::stolen_since(stolen)
    ));
    Ok(table)
}

fn row(journal: &str, part: &str, [old, new]: &[Vec<Run>; 2]) -> String {
    let ratios = |figure: fn(&Run) -> f64| -> Vec<f64> {
        old.iter().zip(new).map(|(old, new)| figure(new) / figure(old).max(f64::MIN_POSITIVE)).collect()
    };
    let mut rates = ratios(|run| run.rate);
    rates.sort_by(f64::total_cmp);
    let shown: Vec<String> = rates.iter().map(|rate| format!("{rate:.2}")).collect();
    let rate = |runs: &[Run]| median(runs.iter().map(|run| run.rate).collect());
    format!(
        "| {journal} | {part} | {:.3} | {:.3} | {:.2} | {} | {:.0}/s, {:.0}/s |\n",
        median(rates),
        median(ratios(|run| run.cpu_micros)),
        median(ratios(|run| run.memory)),
        shown.join(" "),
        rate(old),
        rate(new)
    )
}

/// Measures one build once, on a journal of its own.
async fn one(plan: &Plan, engine: Engine, part: &str) -> anyhow::Result<Run> {
    let stack = Stack::Gateway(engine, false);
    if part == "accepts" {
        let accepts = throughput::one(plan, stack, Load::Fresh, SIZES[0]).await?;
        anyhow::ensure!(accepts.refused == 0, "{} requests were refused", accepts.refused);
        return Ok(Run { rate: accepts.rate, cpu_micros: accepts.cpu_micros, memory: accepts.gateway_memory });
    }
    let mut route = sql_route(engine);
    if part == "ordered effects" {
        // Each event makes an order of its own, although many are about one entity.
        route = route.replace("source = \"stripe\"", "source = \"stripe\"\norder = \"entity\"");
        route = route.replace("payment = \"/data/object/id\"", "payment = \"$key\"");
    }
    let running = stack.start(plan, &route)?;
    let applied = match part {
        "accept + effect" => sustain(plan, &running, EVENTS).await?,
        "ordered effects" => drain(plan, &running, Load::Entities, EVENTS).await?,
        _ => drain(plan, &running, Load::Fresh, EVENTS).await?,
    };
    Ok(Run { rate: applied.rate, cpu_micros: applied.cpu_micros, memory: running.gateway_memory() })
}
