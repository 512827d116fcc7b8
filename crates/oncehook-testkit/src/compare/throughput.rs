//! How many requests a second a stack answers, as fast as answers come, and what each costs.

use std::sync::Arc;
use std::time::Duration;

use super::Plan;
use super::family;
use super::load::Load;
use super::report::{Accepts, Report, median_by};
use super::stack::{Running, Stack};
use crate::workload::{Pace, run};

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
                LOADS
                    .into_iter()
                    .filter(|load| has(*stack, *load, size))
                    .map(|load| (*stack, load, Vec::new())),
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
            report.accepts.push(Accepts { rounds, ..median_by(measured, |accepts| accepts.rate) });
        }
    }
    Ok(())
}

/// The ceiling keeps nothing, so every load is the same to it; it is measured beside those that are compared with it. The order of keys
/// matters to stores only.
fn has(stack: Stack, load: Load, size: usize) -> bool {
    match (stack, load) {
        (Stack::Ceiling, load) => load == Load::Fresh || load == Load::Storm && size == SIZES[0],
        (Stack::Peer(_), Load::Ordered) => false,
        (_, Load::Ordered) => size == SIZES[0],
        _ => true,
    }
}

async fn one(plan: &Plan, stack: Stack, load: Load, size: usize) -> anyhow::Result<Accepts> {
    let running = stack.start(plan, "")?;
    let again = stack == Stack::Ceiling || load == Load::Storm;
    let count = if again {
        20_000
    } else {
        stack.requests_a_second() * plan.seconds as usize * 1_024 / size.max(1_024)
    };
    let requests = Arc::new(load.requests(count, size));
    if load == Load::Storm {
        let wait = Duration::from_secs(60);
        run(running.address(), plan.connections, Arc::clone(&requests), false, Pace::Closed, wait).await;
    }
    let (before, stolen, generator) = (family::used(), family::stolen(), family::generator_micros());
    let wait = Duration::from_secs(plan.seconds);
    let sent = run(running.address(), plan.connections, requests, again, Pace::Closed, wait).await;
    let used = family::used().since(before);
    let generator = family::generator_micros() - generator;
    let answered: u64 = sent.statuses.values().sum();
    let per_request = 1.0 / answered.max(1) as f64;
    Ok(Accepts {
        stack,
        load,
        size,
        rate: sent.rate(),
        rounds: Vec::new(),
        generator_micros: generator * per_request,
        p50: sent.millis(0.5),
        p99: sent.millis(0.99),
        cpu_micros: used.cpu_micros * per_request,
        written: used.written * per_request,
        gateway_memory: running.gateway_memory(),
        refused: answered - sent.statuses.get(&200).copied().unwrap_or(0) + sent.errors,
        stolen: family::stolen_since(stolen),
    })
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
