//! How long an acknowledgement takes at fixed rates. A request's time counts from when it was due, not from when the sender
//! got round to it, so a stall is not hidden by sending less.

use std::sync::Arc;
use std::time::Duration;

use super::load::Load;
use super::report::{Latency, Report, Spike, median_by};
use super::stack::Stack;
use super::{Plan, family, throughput};
use crate::workload::{Pace, run};

/// The rate of the goals.
const RATE: f64 = 10_000.0;

/// A spike: so many times the rate.
const SPIKE: f64 = 5.0;

/// What meets a spike, and how long that lasts. The first is the goal's. The ceiling shows what of it is not the storage's: where it
/// answers less than is offered, nobody can keep up. The short one is the burst after which a provider is quiet again.
const SPIKES: [(Stack, Duration); 3] = [
    (Stack::SQLITE, Duration::from_secs(1)),
    (Stack::Ceiling, Duration::from_secs(1)),
    (Stack::SQLITE, Duration::from_millis(200)),
];

pub(super) async fn measure(plan: &Plan, stacks: &[Stack], report: &mut Report) -> anyhow::Result<()> {
    let mut cells: Vec<(Stack, f64, Vec<Latency>)> =
        stacks.iter().map(|stack| (*stack, rate_for(report, *stack), Vec::new())).collect();
    for round in 1..=plan.rounds {
        for (stack, rate, measured) in &mut cells {
            let latency = one(plan, *stack, *rate).await?;
            eprintln!(
                "round {round}: {} at {rate:.0}/s: p50 {:.2}, p99 {:.2}, p99.9 {:.2} ms, {:.1} % stolen",
                stack.name(),
                latency.p50,
                latency.p99,
                latency.p999,
                latency.stolen * 100.0
            );
            measured.push(latency);
        }
    }
    for (stack, _, measured) in &cells {
        if *stack == Stack::SQLITE || *stack == Stack::Ceiling {
            report.latency_rounds.extend(measured.iter().cloned());
        }
    }
    report.latency = cells.into_iter().map(|(_, _, measured)| median_by(measured, |latency| latency.p99)).collect();
    let mut spikes = SPIKES.map(|_| Vec::new());
    for _ in 0..plan.rounds {
        for (measured, (stack, time)) in spikes.iter_mut().zip(SPIKES) {
            measured.push(spike(plan, stack, time).await?);
        }
    }
    report.spikes = Vec::from(spikes.map(|measured| {
        let rounds = measured.iter().map(Spike::judged).collect();
        Spike { rounds, ..median_by(measured, Spike::judged) }
    }));
    if plan.memory_seconds > 0 {
        report.memory = Some(throughput::memory(plan).await?);
    }
    Ok(())
}

/// The rate of the goals, or a third of what the stack can do where that is less.
fn rate_for(report: &Report, stack: Stack) -> f64 {
    let most = report.accepts(stack, Load::Fresh).map_or(RATE, |accepts| accepts.rate);
    if most >= RATE * 1.2 { RATE } else { most / 3.0 }
}

async fn one(plan: &Plan, stack: Stack, rate: f64) -> anyhow::Result<Latency> {
    let running = stack.start(plan, "")?;
    let seconds = plan.seconds.max(5);
    let requests = Load::Fresh.requests((rate * seconds as f64) as usize, throughput::SIZES[0]);
    let stolen = family::stolen();
    let wait = Duration::from_secs(seconds);
    let sent = run(running.address(), plan.connections, Arc::new(requests), false, Pace::Open(rate), wait).await;
    Ok(Latency {
        stack,
        rate,
        p50: sent.millis(0.5),
        p99: sent.millis(0.99),
        p999: sent.millis(0.999),
        max: sent.millis(1.0),
        stolen: family::stolen_since(stolen),
    })
}

/// A steady rate, then five times of it for a while. Times are of what was due in the spike.
async fn spike(plan: &Plan, stack: Stack, time: Duration) -> anyhow::Result<Spike> {
    let running = stack.start(plan, "")?;
    let steady = (RATE * 2.0) as usize;
    let many = (RATE * SPIKE * time.as_secs_f64()) as usize;
    let mut requests = Load::Fresh.requests(steady + many, throughput::SIZES[0]);
    let in_spike = requests.split_off(steady);
    let stolen = family::stolen();
    let wait = Duration::from_secs(30);
    // Many senders: while the gateway is behind, requests wait on its side and not on ours.
    let calm = run(running.address(), 256, Arc::new(requests), false, Pace::Open(RATE), wait).await;
    let sent = run(running.address(), 1_024, Arc::new(in_spike), false, Pace::Open(RATE * SPIKE), wait).await;
    let refused = |sent: &crate::workload::Report| {
        let answered: u64 = sent.statuses.values().sum();
        answered - sent.statuses.get(&200).copied().unwrap_or(0) + sent.errors
    };
    Ok(Spike {
        stack,
        rate: RATE * SPIKE,
        seconds: time.as_secs_f64(),
        p99: sent.millis(0.99),
        rounds: Vec::new(),
        max: sent.millis(1.0),
        refused: refused(&calm) + refused(&sent),
        stolen: family::stolen_since(stolen),
    })
}
