//! `oncehook serve`: runs the gateway until it is told to stop.
//!
//! Promises: the first SIGTERM or SIGINT ends it in good order; another one, half a second later or more, ends it at once, with
//! exit code 1. That loses nothing that was answered: it is what a crash does, and the next start goes on from there.

use std::future::Future;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, bail};
use oncehook::clock::Clock;
use oncehook::intake::{Spool, SpoolOptions};
use oncehook::journal::JournalState;
use oncehook::journal::open::{OpenError, OpenOptions, Opened};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::{Shared, check, failure, rehearsal, say};
use crate::app::{App, Roles};
use crate::config::{Config, OnOutage, SpoolConfig};
use crate::http::listener;
use crate::{memory, telemetry};

/// Signals that come so soon after the first mean the same: `timeout` and some supervisors tell the process and its group.
const SAID_TWICE: Duration = Duration::from_millis(500);

/// How often a database that is not there is looked for at the start.
const DATABASE_AGAIN: Duration = Duration::from_millis(500);

#[derive(Debug, clap::Args)]
pub(super) struct Serve {
    /// Log as JSON lines
    #[arg(long)]
    log_json: bool,
    /// Keys that gather in memory before they are merged into the journal's ledger. For tests.
    #[arg(long, hide = true)]
    ledger_generation: Option<usize>,
    /// Do only this part of the work; may be repeated. Others do the rest on the same server database
    #[arg(long, value_enum, value_name = "ROLE")]
    role: Vec<Role>,
    /// How many seconds to wait at the start for a server database that is not there yet
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    database_wait: u64,
    /// Start although a part of the SQLite journal is missing (its -wal file was lost). Later copies of missing events are new
    #[arg(long)]
    accept_lost_log: bool,
    /// How long a lease holds, in milliseconds. For tests that freeze the process for longer than that.
    #[arg(long, hide = true, value_name = "MILLISECONDS")]
    lease: Option<u64>,
}

/// A part of the work. Every role serves health and metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Role {
    /// Accept webhooks
    Ingest,
    /// Run what is due
    Worker,
    /// Serve the API
    Admin,
}

impl Role {
    fn as_str(self) -> &'static str {
        match self {
            Self::Ingest => "ingest",
            Self::Worker => "worker",
            Self::Admin => "admin",
        }
    }
}

impl Serve {
    pub(super) fn run(self, shared: &Shared) -> anyhow::Result<ExitCode> {
        telemetry::install(self.log_json);
        let log_json = self.log_json;
        match self.start(shared) {
            // Who reads JSON lines gets nothing else, to the end.
            Err(error) if log_json => {
                tracing::error!(error = failure(&error), "the gateway cannot run");
                Ok(ExitCode::FAILURE)
            }
            outcome => outcome,
        }
    }

    fn start(self, shared: &Shared) -> anyhow::Result<ExitCode> {
        let config = shared.load()?;
        raise_file_limit();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .on_thread_park(memory::give_back)
            .build()
            .context("start the runtime")?;
        let left = run_to_end(runtime, self.serve(config, shared))?;
        // Accepted, durable, and not in the journal: whoever takes the machine away must know.
        Ok(if left == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }

    /// Returns how many events are left in the spool.
    async fn serve(self, config: Config, shared: &Shared) -> anyhow::Result<u64> {
        // Before the journal is opened, so that a place on the way can be chosen too.
        let crash = arm();
        plant()?;
        let clock = Clock::system();
        if self.roles().worker {
            tokio::spawn(rehearsal::warn_on_others(config.routes.clone()));
        }
        // The journal first: before it has proved itself there is no port to connect to.
        if config.journal.path().is_some() && !self.role.is_empty() {
            bail!("--role needs a journal on a server database: one process alone can use a SQLite file");
        }
        let options = OpenOptions {
            clock: clock.clone(),
            accept_lost_log: self.accept_lost_log,
            ledger_generation: self.ledger_generation,
        };
        let journal = in_patience(self.database_wait, async || config.journal.open(&options).await);
        let journal = journal.await.context("open the journal")?;
        if self.roles().worker {
            rehearsal::warn(&config, &journal).await;
        }
        self.serve_on(config, journal, clock, crash, shared).await
    }

    fn roles(&self) -> Roles {
        let has = |role: Role| self.role.is_empty() || self.role.contains(&role);
        Roles { ingest: has(Role::Ingest), worker: has(Role::Worker), admin: has(Role::Admin) }
    }

    async fn serve_on(
        self,
        config: Config,
        journal: Opened,
        clock: Clock,
        crash: Option<String>,
        shared: &Shared,
    ) -> anyhow::Result<u64> {
        let roles = self.roles();
        if roles.ingest {
            rehearsal::warn_of_small_sources(&config, journal.journal.as_ref());
        }
        let spool = match roles.ingest && config.needs_spool() {
            true => Some(open_spool(&config.spool)?),
            false => None,
        };
        let after = config.spool.after;
        let ingress = match roles.ingest {
            true => Some(listen(config.server.ingress, "server.ingress").await?),
            false => None,
        };
        let admin = listen(config.server.admin, "server.admin").await?;
        let told_to_stop = listen_for_signals()?;
        let places =
            Places { ingress: ingress.as_ref().map(TcpListener::local_addr).transpose()?, admin: admin.local_addr()? };
        let state = journal.journal.state();
        match self.log_json {
            true => log_welcome(&config, &state, &places),
            false => welcome(&config, &state, &places, &self.role, crash, shared),
        }
        let shutdown = async {
            // An error would mean that nobody listens for signals any more.
            let _ = told_to_stop.await;
        };
        let app = App::new(config, journal, clock).with_lease(self.lease.map(Duration::from_millis));
        let mut app = app.with_roles(roles);
        if let Some(spool) = spool {
            app = app.with_spool(spool, after);
        }
        Ok(app.run(ingress, admin, shutdown).await)
    }
}

/// Runs the gateway to its end, and does not wait for threads that still work for it: a database or disk that hangs may hold one
/// for ever. The process is about to end, which is what a crash does, and the next start goes on from there.
fn run_to_end<T>(runtime: Runtime, gateway: impl Future<Output = T>) -> T {
    let ended = runtime.block_on(gateway);
    runtime.shutdown_background();
    ended
}

/// Opens a journal on a server. One that is not there is waited for, so that the database and the gateway may be started in
/// any order; meanwhile no port is open. What waiting does not mend ends it at once.
async fn in_patience(seconds: u64, open: impl AsyncFn() -> Result<Opened, OpenError>) -> Result<Opened, OpenError> {
    let begun = Instant::now();
    let mut told = None;
    loop {
        let error = match open().await {
            Err(error) if error.is_away() && begun.elapsed() < Duration::from_secs(seconds) => error,
            opened => return opened,
        };
        let reason = error.to_string();
        if told.as_ref() != Some(&reason) {
            tracing::warn!(reason, "waiting up to {seconds} s for the database; no port is open yet");
            told = Some(reason);
        }
        tokio::time::sleep(DATABASE_AGAIN).await;
    }
}

fn open_spool(config: &SpoolConfig) -> anyhow::Result<Spool> {
    let options =
        SpoolOptions { path: config.path.clone(), max_events: config.max_events, max_bytes: config.max_bytes };
    Spool::open(&options).with_context(|| format!("open the spool {} (spool.path)", config.path.display()))
}

/// Listens for signals from now on. The first one is passed on; a second one ends the process.
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
        let told_at = Instant::now();
        while told_at.elapsed() < SAID_TWICE {
            next().await;
        }
        tracing::warn!("told to stop a second time: ending at once; what was under way goes on at the next start");
        std::process::exit(1);
    });
    Ok(told)
}

/// Builds for proofs make the mistake that the environment names.
#[cfg(feature = "planted")]
fn plant() -> anyhow::Result<()> {
    let Some(name) = crate::config::planted_bug() else { return Ok(()) };
    let bug = oncehook::planted::Bug::parse(&name).with_context(|| format!("there is no mistake `{name}`"))?;
    say(&format!("planted   {}", bug.as_str()));
    if oncehook::planted::plant(Some(bug)) { Ok(()) } else { bail!("this build has no mistakes") }
}

/// Other builds make none on purpose.
#[cfg(not(feature = "planted"))]
fn plant() -> anyhow::Result<()> {
    Ok(())
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
    listener::bind(address).await.with_context(|| format!("listen on {address} ({key})"))
}

/// Where the gateway listens.
struct Places {
    ingress: Option<SocketAddr>,
    admin: SocketAddr,
}

/// What a person needs to go on.
fn welcome(
    config: &Config,
    state: &JournalState,
    places: &Places,
    roles: &[Role],
    crash: Option<String>,
    shared: &Shared,
) {
    let mut lines = vec![format!("oncehook {} is ready", env!("CARGO_PKG_VERSION"))];
    for (source, ingress) in config.sources.iter().zip(places.ingress.iter().cycle()) {
        lines.push(format!("  webhooks  http://{ingress}/webhooks/{} ({})", source.name, source.provider));
    }
    for route in config.routes.iter() {
        lines.push(format!("  route     {}", check::line(route)));
    }
    lines.push(format!("  admin     http://{}/api/events", places.admin));
    lines.push(format!("  journal   {} ({}, {})", config.journal.shown(), state.kind, state.durability.as_str()));
    if places.ingress.is_some() && config.needs_spool() {
        let spooled = config.sources.iter().filter(|source| source.on_outage == OnOutage::Spool);
        let names: Vec<&str> = spooled.map(|source| source.name.as_str()).collect();
        lines.push(format!("  spool     {} (for {})", config.spool.path.display(), names.join(", ")));
    }
    if let Some(redis) = config.dedup_redis.as_ref().filter(|_| places.ingress.is_some()) {
        lines.push(format!("  redis     {} (a cache; it may be away)", redis.shown()));
    }
    if let Some(plan) = crash {
        lines.push(format!("  crash     at {plan}: this build is for tests"));
    }
    if !roles.is_empty() {
        let roles: Vec<&str> = roles.iter().map(|role| role.as_str()).collect();
        lines.push(format!("  roles     {}", roles.join(", ")));
    }
    if let Some(source) = config.sources.first().filter(|_| places.ingress.is_some()) {
        lines.push("Send a signed webhook from another terminal:".to_owned());
        lines.push(format!("  {} send --source {}", this_program(shared), source.name));
    }
    say(&lines.join("\n"));
}

/// The same as one line of the log, for machines.
fn log_welcome(config: &Config, state: &JournalState, places: &Places) {
    let urls = config.sources.iter().zip(places.ingress.iter().cycle());
    let urls: Vec<_> = urls.map(|(source, ingress)| format!("http://{ingress}/webhooks/{}", source.name)).collect();
    let routes: Vec<&str> = config.routes.iter().map(|route| route.name.as_str()).collect();
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        webhooks = urls.join(" "),
        routes = routes.join(" "),
        admin = format!("http://{}", places.admin),
        journal = config.journal.shown(),
        kind = state.kind,
        durability = state.durability.as_str(),
        "oncehook is ready"
    );
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

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn the_end_does_not_wait_for_a_thread_that_hangs() {
        let (release, hanging) = mpsc::channel::<()>();
        let (done, ended) = mpsc::channel();
        std::thread::spawn(move || {
            let runtime = Runtime::new().unwrap();
            let (begun, has_begun) = oneshot::channel();
            let gateway = async {
                tokio::task::spawn_blocking(move || {
                    let _ = begun.send(());
                    hanging.recv()
                });
                has_begun.await
            };
            let _ = done.send(run_to_end(runtime, gateway));
        });
        assert!(ended.recv_timeout(Duration::from_secs(30)).is_ok(), "it waits for the thread");
        drop(release);
    }
}
