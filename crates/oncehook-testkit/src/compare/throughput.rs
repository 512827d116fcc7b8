//! How many requests a second a stack answers, as fast as answers come, and what each costs.

use std::sync::Arc;
use std::time::Duration;

use super::Plan;
use super::family::{self, Used};
use super::load::Load;
use super::report::{Accepts, Report, median_by};
use super::stack::{Running, Stack};
use crate::workload::{self, Pace, run};

/// Bodies in bytes; the second size is measured once, to show the trend.
pub(super) const SIZES: [usize; 2] = [1_024, 5_120];

/// The loads of the table. Keys that grow with time are measured beside it, where they make a difference.
const LOADS: [Load; 4] = [Load::Fresh, Load::Ordered, Load::Half, Load::Storm];

pub(super) async fn measure(plan: &Plan, stacks: &[Stack], report: &mut Report) -> anyhow::Result<()> {
    for size in SIZES {
        let rounds = if size == SIZES[0] { plan.rounds } else { 1 };
        let mut cells: Vec<(Stack, Load, Vec<Accepts>)> = Vec::new();
        for stack in stacks {
            cells.extend(
                LOADS.into_iter().filter(|load| has(*stack, *load, size)).map(|load| (*stack, load, Vec::new())),
            );
        }
        // Load by load, so that what is compared is measured soon one after the other: the machine has better and worse minutes.
        let mut turns: Vec<usize> = (0..cells.len()).collect();
        turns.sort_by_key(|place| LOADS.iter().position(|load| *load == cells[*place].1));
        for round in 1..=rounds {
            for place in &turns {
                let (stack, load, measured) = &mut cells[*place];
                let accepts = one(plan, *stack, *load, size).await?;
                eprintln!(
                    "round {round}: {} B, {}, {}: {:.0}/s, {:.0} µs CPU",
                    size,
                    stack.name(),
                    load.name(),
                    accepts.rate,
                    accepts.cpu_micros
                );
                measured.push(accepts);
            }
        }
        for (_, _, measured) in cells {
            let rounds = measured.iter().map(|accepts| accepts.rate).collect();
            let ceiling_rounds = measured.iter().filter_map(|accepts| accepts.ceiling).collect();
            let middle = median_by(measured, |accepts| accepts.rate);
            report.accepts.push(Accepts { rounds, ceiling_rounds, ..middle });
        }
    }
    Ok(())
}

/// The ceiling keeps nothing, so every load is the same to it. The order of keys matters to stores only.
fn has(stack: Stack, load: Load, size: usize) -> bool {
    match (stack, load) {
        (Stack::Ceiling, load) => load == Load::Fresh,
        (Stack::Peer(_), Load::Ordered) => false,
        (_, Load::Ordered) => size == SIZES[0],
        _ => true,
    }
}

/// A storm is answered from memory, as the ceiling answers everything, and is judged by so small a difference that the two take turns:
/// the machine has better and worse seconds. What stores must not rest like that, or it would clear up unseen.
const STORM_TURNS: u32 = 8;

pub(super) async fn one(plan: &Plan, stack: Stack, load: Load, size: usize) -> anyhow::Result<Accepts> {
    let running = stack.start(plan, "")?;
    let again = stack == Stack::Ceiling || load == Load::Storm;
    let count =
        if again { 20_000 } else { stack.requests_a_second() * plan.seconds as usize * 1_024 / size.max(1_024) };
    let requests = Arc::new(load.requests(count, size));
    let send = async |to: &Running, again: bool, time: Duration| {
        run(to.address(), plan.connections, Arc::clone(&requests), again, Pace::Closed, time).await
    };
    let time = Duration::from_secs(plan.seconds);
    let stolen = family::stolen();
    let mut loaded = Loaded::default();
    let mut beside = Vec::new();
    if load == Load::Storm && matches!(stack, Stack::Gateway(..)) {
        let ceiling = Stack::Ceiling.start(plan, "")?;
        for to in [&running, &ceiling] {
            send(to, false, Duration::from_secs(60)).await;
        }
        for turn in 0..STORM_TURNS {
            for place in 0..2 {
                if (turn + place) % 2 == 0 {
                    beside.push(send(&ceiling, again, time / STORM_TURNS).await.rate());
                } else {
                    loaded.add(send(&running, again, time / STORM_TURNS)).await;
                }
            }
        }
    } else {
        if load == Load::Storm {
            send(&running, false, Duration::from_secs(60)).await;
        }
        loaded.add(send(&running, again, time)).await;
    }
    let answered = loaded.answered();
    let per_request = 1.0 / answered.max(1) as f64;
    Ok(Accepts {
        stack,
        load,
        size,
        rate: loaded.rate(),
        rounds: Vec::new(),
        ceiling: (!beside.is_empty()).then(|| beside.iter().sum::<f64>() / beside.len() as f64),
        ceiling_rounds: Vec::new(),
        generator_micros: loaded.generator * per_request,
        p50: loaded.millis(0.5),
        p99: loaded.millis(0.99),
        cpu_micros: loaded.used.cpu_micros * per_request,
        written: loaded.used.written * per_request,
        gateway_memory: running.gateway_memory(),
        refused: loaded.refused(),
        stolen: family::stolen_since(stolen),
    })
}

/// What turns of load gave, and what they cost.
#[derive(Default)]
struct Loaded {
    turns: Vec<workload::Report>,
    used: Used,
    generator: f64,
}

impl Loaded {
    async fn add(&mut self, turn: impl Future<Output = workload::Report>) {
        let (before, generator) = (family::used(), family::generator_micros());
        self.turns.push(turn.await);
        self.used = self.used.and(family::used().since(before));
        self.generator += family::generator_micros() - generator;
    }

    fn rate(&self) -> f64 {
        self.turns.iter().map(workload::Report::rate).sum::<f64>() / self.turns.len() as f64
    }

    /// A quantile in milliseconds.
    fn millis(&self, quantile: f64) -> f64 {
        let mut all = workload::latencies();
        self.turns.iter().for_each(|turn| all.add(&turn.latency).expect("histograms of one shape"));
        all.value_at_quantile(quantile) as f64 / 1_000.0
    }

    fn answered(&self) -> u64 {
        self.turns.iter().flat_map(|turn| turn.statuses.values()).sum()
    }

    fn refused(&self) -> u64 {
        let good: u64 = self.turns.iter().filter_map(|turn| turn.statuses.get(&200)).sum();
        self.answered() - good + self.turns.iter().map(|turn| turn.errors).sum::<u64>()
    }
}

/// 64 connections push 5 KB bodies; and a gateway that nobody calls.
pub(super) async fn memory(plan: &Plan) -> anyhow::Result<(f64, f64)> {
    let running = Stack::SQLITE.start(plan, "")?;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let idle = gateway(&running).memory("VmRSS") as f64;
    let load = Load::Fresh.requests(22_000 * plan.memory_seconds as usize, 5_120);
    let wait = Duration::from_secs(plan.memory_seconds);
    run(running.address(), 64, Arc::new(load), false, Pace::Closed, wait).await;
    Ok((idle, running.gateway_memory()))
}

fn gateway(running: &Running) -> &crate::gateway::Gateway {
    running.gateway().expect("a gateway")
}
