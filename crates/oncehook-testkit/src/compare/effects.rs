//! How fast events take effect: a backlog that is worked off, and accepting and taking effect at once.
//!
//! A backlog is made by holding the handlers back (our route is paused, a peer's workers are stopped), so that every
//! stack is asked the same.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::load::Load;
use super::report::{Effects, Report, median};
use super::stack::{Engine, Running, Stack, effect};
use super::{Plan, bare, family, throughput};
use crate::receiver::{Receiver, Reply};
use crate::workload::{Pace, run};

/// Events of ours and of a peer.
const OURS: usize = 60_000;
const THEIRS: usize = 3_000;
const OVER_HTTP: usize = 15_000;

/// The longest that a backlog may take.
const PATIENCE: Duration = Duration::from_secs(180);

pub(super) async fn measure(plan: &Plan, stacks: &[Stack], report: &mut Report) -> anyhow::Result<()> {
    let receiver = Receiver::start(|_, _| Reply::status(200, "ok")).await;
    for stack in stacks {
        let (engine, count) = match stack {
            Stack::Gateway(engine, false) => (Some(*engine), OURS),
            Stack::Peer(_) => (None, THEIRS),
            Stack::Ceiling | Stack::Gateway(_, true) => continue,
        };
        let (mut drained, mut sustained, mut posted, mut bares) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let stolen = family::stolen();
        for _ in 0..plan.rounds {
            let routes = engine.map(sql_route).unwrap_or_default();
            drained.push(drain(plan, &stack.start(plan, &routes)?, Load::Fresh, count).await?.rate);
            sustained.push(sustain(plan, &stack.start(plan, &routes)?, count).await?.rate);
            if let Some(engine) = engine {
                bares.push(bare::rate(engine, plan, OURS).await?);
                posted.push(post(plan, *stack, &receiver).await?);
            }
        }
        let effects = Effects {
            stack: *stack,
            drained_rounds: drained.clone(),
            sustained_rounds: sustained.clone(),
            bare_rounds: bares.clone(),
            stolen: family::stolen_since(stolen),
            drained: median(drained),
            sustained: median(sustained),
            posted: (!posted.is_empty()).then(|| median(posted)),
            bare: (!bares.is_empty()).then(|| median(bares)),
        };
        eprintln!(
            "effects, {}: {:.0}/s from a backlog, {:.0}/s while accepting",
            stack.name(),
            effects.drained,
            effects.sustained
        );
        report.effects.push(effects);
    }
    Ok(())
}

pub(super) fn sql_route(engine: Engine) -> String {
    format!(
        r#"
[[route]]
name = "orders"
source = "stripe"
[route.sql]
statement = "{}"
bind = {{ payment = "/data/object/id", amount = "/data/object/amount" }}
"#,
        effect(engine)
    )
}

/// Sends so many events, and returns how many were accepted. Ours accepts all of them; a peer may answer 500 when it is pressed.
async fn send(plan: &Plan, running: &Running, load: Load, count: usize) -> usize {
    let requests = load.requests(count, throughput::SIZES[0]);
    let sent = run(running.address(), plan.connections, Arc::new(requests), false, Pace::Closed, PATIENCE).await;
    let accepted = sent.statuses.get(&200).copied().unwrap_or(0);
    assert!(running.gateway().is_none() || accepted == count as u64, "{:?}", sent.statuses);
    usize::try_from(accepted).unwrap_or(count)
}

async fn all_applied(running: &Running, count: usize) -> anyhow::Result<()> {
    let begun = Instant::now();
    let first = running.orders().await?;
    let mut applied = first;
    while applied < count {
        anyhow::ensure!(begun.elapsed() < PATIENCE, "only {applied} of {count} took effect");
        // Asking is work for the database, too: it is asked again when most of the rest should be there.
        let pace = (applied - first) as f64 / begun.elapsed().as_secs_f64();
        let rest = if pace > 0.0 { 0.8 * (count - applied) as f64 / pace } else { 0.1 };
        tokio::time::sleep(Duration::from_secs_f64(rest.clamp(0.02, 0.5))).await;
        applied = running.orders().await?;
    }
    Ok(())
}

/// How many events a second took effect, and what each cost.
pub(super) struct Applied {
    pub(super) rate: f64,
    pub(super) cpu_micros: f64,
}

/// Makes a backlog, and measures how it is worked off.
pub(super) async fn drain(plan: &Plan, running: &Running, load: Load, count: usize) -> anyhow::Result<Applied> {
    running.hold(true).await;
    let count = send(plan, running, load, count).await;
    let before = running.orders().await?;
    let (begun, used) = (Instant::now(), family::used());
    running.hold(false).await;
    all_applied(running, count).await?;
    Ok(applied(count - before, begun, used))
}

/// Accepts and applies at once.
pub(super) async fn sustain(plan: &Plan, running: &Running, count: usize) -> anyhow::Result<Applied> {
    let (begun, used) = (Instant::now(), family::used());
    let count = send(plan, running, Load::Fresh, count).await;
    all_applied(running, count).await?;
    Ok(applied(count, begun, used))
}

fn applied(count: usize, begun: Instant, used: family::Used) -> Applied {
    let count = count.max(1) as f64;
    let cpu_micros = family::used().since(used).cpu_micros / count;
    Applied { rate: count / begun.elapsed().as_secs_f64(), cpu_micros }
}

/// A backlog that is posted to a receiver in this process, which answers at once.
async fn post(plan: &Plan, stack: Stack, receiver: &Receiver) -> anyhow::Result<f64> {
    let route = format!(
        "\n[[route]]\nname = \"orders\"\nsource = \"stripe\"\nconcurrency = 64\n[route.http]\nurl = \"{}\"\n",
        receiver.url("/")
    );
    let running = stack.start(plan, &route)?;
    running.hold(true).await;
    let first = receiver.count();
    send(plan, &running, Load::Fresh, OVER_HTTP).await;
    // A claim that was under way when the route was paused may have taken some.
    let early = receiver.count() - first;
    let begun = Instant::now();
    running.hold(false).await;
    while receiver.count() - first < OVER_HTTP {
        anyhow::ensure!(begun.elapsed() < PATIENCE, "only {} were posted", receiver.count() - first);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok((OVER_HTTP - early) as f64 / begun.elapsed().as_secs_f64())
}
