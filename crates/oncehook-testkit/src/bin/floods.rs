//! `make floods`: each flood that needs no secret, at full scale, while a genuine client sends 100 events a second.
//!
//! `floods [--seconds N] [--connections N] [--only NAME]` prints a table. It fails if fewer than 99.9 % of the genuine events
//! were answered 2xx, if their p99 was 250 ms or more, or if the gateway's memory reached 256 MB. The program is the
//! `oncehook` beside this one, so a release build measures a release build.

use std::time::Duration;

use oncehook_testkit::floods::{Flood, HEAD, Plan, run};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const ACCEPTED: f64 = 0.999;
const P99_MILLIS: f64 = 250.0;
const MEMORY: u64 = 256_000_000;

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let mut plan = Plan { connections: 10_000, memory: 64 << 20, time: Duration::from_secs(60), rate: 100 };
    let mut floods = Flood::ALL.to_vec();
    for pair in arguments.chunks(2) {
        match pair {
            [name, seconds] if name == "--seconds" => plan.time = Duration::from_secs(seconds.parse()?),
            [name, connections] if name == "--connections" => plan.connections = connections.parse()?,
            [name, only] if name == "--only" => {
                floods.retain(|flood| flood.name() == only);
                anyhow::ensure!(!floods.is_empty(), "there is no flood {only}");
            }
            other => anyhow::bail!("{} is not --seconds N, --connections N or --only NAME", other.join(" ")),
        }
    }
    let binary = std::env::current_exe()?.with_file_name("oncehook");
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    println!(
        "{} places, {} MiB for bodies, {} s of {} genuine events a second\n{HEAD}",
        plan.connections,
        plan.memory >> 20,
        plan.time.as_secs(),
        plan.rate
    );
    let mut missed = Vec::new();
    for flood in floods {
        let outcome = runtime.block_on(run(&binary, flood, plan));
        println!("{}", outcome.row(flood));
        let [_, most, _] = outcome.memory;
        if outcome.accepted() < ACCEPTED || outcome.genuine.millis(0.99) >= P99_MILLIS || most >= MEMORY {
            missed.push(flood.name());
        }
    }
    anyhow::ensure!(missed.is_empty(), "not held under: {}", missed.join(", "));
    println!("held: 99.9 % accepted, p99 under {P99_MILLIS} ms, memory under {} MB", MEMORY / 1_000_000);
    Ok(())
}
