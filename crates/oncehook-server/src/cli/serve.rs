//! `oncehook serve`: runs the gateway until it is told to stop.
//!
//! Promises: the first SIGTERM or SIGINT ends it in good order; a second one ends it at once, with exit code 1. That loses
//! nothing that was answered: it is what a crash does, and the next start goes on from there.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use oncehook::clock::Clock;
use oncehook::journal::Journal as _;
use oncehook::journal::sqlite::{SqliteJournal, SqliteOptions};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

use super::{Shared, check, rehearsal, say};
use crate::app::App;
use crate::config::Config;
use crate::telemetry;

#[derive(Debug, clap::Args)]
pub(super) struct Serve {
    /// Log as JSON lines
    #[arg(long)]
    log_json: bool,
    /// Keys that gather in memory before they are merged into the journal's ledger. For tests.
    #[arg(long, hide = true)]
    ledger_generation: Option<usize>,
    /// How long a lease holds, in milliseconds. For tests that freeze the process for longer than that.
    #[arg(long, hide = true, value_name = "MILLISECONDS")]
    lease: Option<u64>,
}

impl Serve {
    pub(super) fn run(self, shared: &Shared) -> anyhow::Result<ExitCode> {
        telemetry::install(self.log_json);
        let config = shared.load()?;
        raise_file_limit();
        let runtime =
            tokio::runtime::Builder::new_multi_thread().enable_all().build().context("start the runtime")?;
        runtime.block_on(self.serve(config, shared))?;
        Ok(ExitCode::SUCCESS)
    }

    async fn serve(self, config: Config, shared: &Shared) -> anyhow::Result<()> {
        // Before the journal is opened, so that a place on the way can be chosen too.
        let crash = arm();
        let clock = Clock::system();
        let mut options = SqliteOptions { clock: clock.clone(), ..SqliteOptions::new(&config.journal.path) };
        options.ledger_generation = self.ledger_generation.unwrap_or(options.ledger_generation);
        // The journal first: before it has proved itself there is no port to connect to.
        let journal = SqliteJournal::open(&options).context("open the journal")?;
        let ingress = listen(config.server.ingress, "server.ingress").await?;
        let admin = listen(config.server.admin, "server.admin").await?;
        let told_to_stop = listen_for_signals()?;
        rehearsal::warn(&config, &journal).await;
        welcome(&config, &journal, ingress.local_addr()?, admin.local_addr()?, crash, shared);
        let shutdown = async {
            // An error would mean that nobody listens for signals any more.
            let _ = told_to_stop.await;
        };
        let app =
            App::new(config, Arc::new(journal), clock).with_lease(self.lease.map(Duration::from_millis));
        app.run(ingress, admin, shutdown).await;
        Ok(())
    }
}

/// Listens for signals from now on. The first one is passed on; the second one is not waited with.
fn listen_for_signals() -> anyhow::Result<oneshot::Receiver<()>> {
    let mut terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("listen for SIGINT")?;
    let (tell, told) = oneshot::channel();
    tokio::spawn(async move {
        let mut next = async || {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
        };
        next().await;
        // Nobody listens if it is ending already.
        let _ = tell.send(());
        next().await;
        say("told to stop a second time: ending at once; what was under way goes on at the next start");
        std::process::exit(1);
    });
    Ok(told)
}

/// Builds for tests end at the place that the environment names. Returns its name.
#[cfg(feature = "crash-points")]
fn arm() -> Option<String> {
    let plan = crate::config::crash_point()?;
    oncehook::crash::arm(&plan);
    Some(plan)
}

/// Other builds have no such places.
#[cfg(not(feature = "crash-points"))]
fn arm() -> Option<String> {
    None
}

async fn listen(address: SocketAddr, key: &str) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address).await.with_context(|| format!("listen on {address} ({key})"))
}

/// What a person needs to go on.
fn welcome(
    config: &Config,
    journal: &SqliteJournal,
    ingress: SocketAddr,
    admin: SocketAddr,
    crash: Option<String>,
    shared: &Shared,
) {
    let state = journal.state();
    let mut lines = vec![format!("oncehook {} is ready", env!("CARGO_PKG_VERSION"))];
    for source in &config.sources {
        lines.push(format!("  webhooks  http://{ingress}/webhooks/{} ({})", source.name, source.provider));
    }
    for route in config.routes.iter() {
        lines.push(format!("  route     {}", check::line(route)));
    }
    lines.push(format!("  admin     http://{admin}/api/events"));
    lines.push(format!(
        "  journal   {} ({}, {})",
        config.journal.path.display(),
        state.kind,
        state.durability.as_str()
    ));
    if let Some(plan) = crash {
        lines.push(format!("  crash     at {plan}: this build is for tests"));
    }
    if let Some(source) = config.sources.first() {
        lines.push("Send a signed webhook from another terminal:".to_owned());
        lines.push(format!("  {} send --source {}", this_program(shared), source.name));
    }
    say(&lines.join("\n"));
}

/// How to call this program from any directory with the same configuration. (Its paths are relative to where it runs.)
fn this_program(shared: &Shared) -> String {
    let program = std::env::current_exe().map_or_else(|_| "oncehook".to_owned(), |path| quoted(&path));
    let directory = std::env::current_dir().map_or_else(|_| ".".to_owned(), |path| quoted(&path));
    let config = if shared.config.as_os_str() == "oncehook.toml" {
        String::new()
    } else {
        format!(" --config {}", quoted(&shared.config))
    };
    format!("cd {directory} && {program}{config}")
}

/// A path as a shell takes it.
fn quoted(path: &std::path::Path) -> String {
    let text = path.display().to_string();
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+@".contains(c);
    if text.chars().all(plain) { text } else { format!("'{}'", text.replace('\'', "'\\''")) }
}

/// Many connections need many file descriptors; the usual soft limit is meant for other programs.
fn raise_file_limit() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%error, "the limit on open files could not be raised");
    }
}
