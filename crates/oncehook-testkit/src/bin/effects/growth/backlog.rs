//! The real gateway on a store that was filled beforehand: how soon it is ready, and a backlog that it works off.
//!
//! Promises: memory is the most that the gateway's process ever had; effects per second are over the whole backlog, from the
//! moment it is ready.

use std::process::Command;
use std::time::{Duration, Instant};

use oncehook::clock::Clock;
use oncehook_testkit::compare::growth::Backlog;
use oncehook_testkit::gateway::{CONFIG, Gateway, prepare};

use super::super::rate;
use super::super::store::{Engine, Store};
use super::history::{self, History};
use super::{SIZE, gateway, indexed, made, progress};

/// The longest that a backlog may take for each thousand events.
const PATIENCE_PER_THOUSAND: Duration = Duration::from_secs(1);

/// From the start of a gateway without routes to its being ready.
pub fn start_seconds(store: &Store) -> anyhow::Result<f64> {
    let begun = Instant::now();
    let mut gateway = start(store, "")?;
    let seconds = begun.elapsed().as_secs_f64();
    gateway.stop();
    Ok(seconds)
}

/// Starts a gateway on a store.
pub fn start(store: &Store, route: &str) -> anyhow::Result<Gateway> {
    let directory = tempfile::tempdir()?;
    let config = CONFIG.replace("sqlite://journal.db", &store.url()).replace("name = \"stripe\"", "name = \"shop\"");
    prepare(directory.path(), &(config + route));
    let mut command = Command::new(gateway()?);
    command.arg("serve");
    // Its configuration is read by then.
    Gateway::try_start(command, directory.path()).map_err(anyhow::Error::msg)
}

/// Makes a backlog and lets a gateway work it off.
pub async fn drain(engine: Engine, waiting: usize) -> anyhow::Result<Backlog> {
    let store = made(engine).await?;
    let until = Clock::system().now();
    let backlog = History { count: waiting, until, over: Duration::ZERO, waiting: true, size: SIZE };
    history::load(&store, &backlog, 0, waiting)?;
    indexed(&store).await?;
    let route = format!(
        "\n[[route]]\nname = \"orders\"\nsource = \"shop\"\n[route.sql]\nstatement = \"{}\"\n\
         bind = {{ payment = \"/data/object/id\", amount = \"/data/object/amount\", key = \"$key\" }}\n",
        engine.statement()
    );
    let mut gateway = start(&store, &route)?;
    let (begun, before) = (Instant::now(), store.applied()?);
    let mut told = Instant::now();
    loop {
        let applied = store.applied()?;
        if applied >= waiting && store.has_applied(waiting)? {
            break;
        }
        let patience = Duration::from_secs(60) + PATIENCE_PER_THOUSAND * u32::try_from(waiting / 1_000)?;
        anyhow::ensure!(begun.elapsed() < patience, "only {applied} of {waiting} took effect:\n{}", gateway.log());
        if told.elapsed() > Duration::from_secs(5) {
            progress(&format!("{applied} of a backlog of {waiting} took effect"));
            told = Instant::now();
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let measured = Backlog { waiting, effects: rate(waiting - before, begun), memory: gateway.memory("VmHWM") as f64 };
    gateway.stop();
    progress(&format!(
        "a backlog of {waiting}: {:.0} effects/s, {:.0} MB of memory",
        measured.effects,
        measured.memory / 1e6
    ));
    Ok(measured)
}
