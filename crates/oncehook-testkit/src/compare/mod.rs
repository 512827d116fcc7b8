//! `make bench`: oncehook on each journal beside its ceiling and beside the stack that people build today, in one run on
//! one machine.
//!
//! Every row is a deployment of its own in a fresh directory ([`Stack`]), loaded by this process over loopback with
//! requests that were signed beforehand ([`load`]). Rounds are interleaved and the median counts, so that a slow moment
//! of the machine meets all rows alike. What the hypervisor took away meanwhile is written down beside the figures.
//!
//! Does not: measure over a network, or leave the load generator's cost out. It shares the cores with what it measures.

mod bare;
mod effects;
pub mod family;
mod goals;
pub mod growth;
mod latency;
pub mod load;
mod obstacles;
pub mod pairs;
mod plot;
mod report;
mod stack;
mod throughput;

use std::path::PathBuf;
use std::time::Instant;

pub use report::{Machine, Report};
pub use stack::Stack;

/// How much is measured.
#[derive(Debug, Clone)]
pub struct Plan {
    /// How long a row is loaded, in seconds.
    pub seconds: u64,
    /// How often each row is measured.
    pub rounds: usize,
    /// Senders at once.
    pub connections: usize,
    /// Whether the stacks of `bench/peers` take part.
    pub peers: bool,
    /// Only these stacks, by a part of their names; all if there is none. For hunting: what is left out is not judged.
    pub stacks: Vec<String>,
    /// Only these parts (`accepts`, `latency`, `effects`); all if there is none.
    pub parts: Vec<String>,
    /// How long the memory row pushes, in seconds.
    pub memory_seconds: u64,
    /// Where deployments live while they run.
    pub scratch: PathBuf,
    /// The gateway that is measured; nothing: the one beside this program.
    pub binary: Option<PathBuf>,
    /// The repository: peers are started from it, the report is written into it.
    pub repository: PathBuf,
}

/// Measures everything. If something goes wrong half-way, what was measured before is in the report all the same.
pub async fn run(plan: &Plan) -> (Report, anyhow::Result<()>) {
    let (begun, stolen) = (Instant::now(), family::stolen());
    let mut report = Report::new(plan);
    let measured = measure(plan, &mut report).await;
    report.machine.seconds = begun.elapsed().as_secs();
    report.machine.stolen = family::stolen_since(stolen);
    report.judge();
    (report, measured)
}

async fn measure(plan: &Plan, report: &mut Report) -> anyhow::Result<()> {
    if plan.peers {
        stack::install_peers(plan)?;
    }
    let wanted = |words: &[String], name: &str| words.is_empty() || words.iter().any(|word| name.contains(word));
    let mut stacks = Stack::all(plan.peers);
    stacks.retain(|stack| wanted(&plan.stacks, stack.name()));
    if wanted(&plan.parts, "accepts") {
        throughput::measure(plan, &stacks, report).await?;
    }
    if wanted(&plan.parts, "latency") {
        latency::measure(plan, &stacks, report).await?;
    }
    if wanted(&plan.parts, "effects") {
        effects::measure(plan, &stacks, report).await?;
    }
    Ok(())
}
