//! `make bench`: prints the table of `bench/REPORT.md`, writes it with its figures and pictures, and ends with how many
//! goals are met.
//!
//! `compare [--seconds N] [--rounds N] [--connections N] [--memory-seconds N] [--without-peers] [--stack WORD]
//! [--part accepts|latency|effects] [--out DIRECTORY]`
//!
//! `compare pairs OLD NEW [--pairs N] [--seconds N] [--stack NAME] [--part NAME]` compares two builds of the gateway instead, and
//! prints the table of their ratios.

use std::path::PathBuf;

use anyhow::Context as _;
use oncehook_testkit::compare::{self, Plan};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1).peekable();
    if arguments.next_if(|word| word == "ceiling").is_some() {
        return oncehook_testkit::ceiling::serve();
    }
    let pairs = arguments.next_if(|word| word == "pairs");
    let builds = pairs.map(|_| [(); 2].map(|()| arguments.next().map(PathBuf::from)));
    let mut pairs = 9;
    let repository = std::env::current_dir()?;
    let mut out = repository.join("bench");
    let mut plan = Plan {
        seconds: 2,
        rounds: 3,
        connections: 256,
        peers: true,
        stacks: Vec::new(),
        parts: Vec::new(),
        memory_seconds: 60,
        binary: None,
        scratch: repository.join("target/compare"),
        repository,
    };
    while let Some(word) = arguments.next() {
        let mut number = || -> anyhow::Result<usize> {
            Ok(arguments.next().with_context(|| format!("{word} wants a number"))?.parse()?)
        };
        match word.as_str() {
            "--seconds" => plan.seconds = number()? as u64,
            "--rounds" => plan.rounds = number()?.max(1),
            "--connections" => plan.connections = number()?,
            "--memory-seconds" => plan.memory_seconds = number()? as u64,
            "--stack" => plan.stacks.push(arguments.next().context("--stack wants a part of a name")?),
            "--part" => plan.parts.push(arguments.next().context("--part wants accepts, latency or effects")?),
            "--pairs" => pairs = number()?.max(1),
            "--without-peers" => plan.peers = false,
            "--out" => out = PathBuf::from(arguments.next().context("--out wants a directory")?),
            other => anyhow::bail!("unknown argument {other}"),
        }
    }
    std::fs::create_dir_all(&plan.scratch)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    if let Some([old, new]) = builds {
        let (old, new) = (old.context("pairs wants two binaries")?, new.context("pairs wants two binaries")?);
        print!("{}", runtime.block_on(compare::pairs::run(&plan, old.canonicalize()?, new.canonicalize()?, pairs))?);
        return Ok(());
    }
    let (report, measured) = runtime.block_on(compare::run(&plan));
    report.save(&out)?;
    print!("{}", report.to_markdown());
    measured
}
