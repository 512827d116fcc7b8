//! Accepting while the older half of a history is being forgotten, in turns with accepting while nothing is.
//!
//! Promises: forgetting goes at the pace that a gateway has by default, in the same process. It is an error if nothing
//! was forgotten.

use std::sync::Arc;
use std::time::{Duration, Instant};

use oncehook::journal::{Deliveries, Retention};
use oncehook::observe::Metrics;
use oncehook::route::Routes;
use oncehook::worker::Worker;
use oncehook_testkit::compare::growth::Forgetting;

use super::super::store::Store;
use super::super::{Bench, rate};
use super::history::{History, SHORT};
use super::{Plan, SIZE, mariadb, middle, progress};

/// Takes the store, because it is not the same afterwards.
pub async fn measure(store: Store, plan: &Plan, history: &History) -> anyhow::Result<Forgetting> {
    let run = plan.run_on(store.engine());
    let mut bench = Bench::open(store).await?.with_size(SIZE);
    let age = bench.clock.now().0 - middle(history, history.count).0;
    let payload = Duration::from_micros(age.unsigned_abs());
    let retention = Retention { payload, dead: None, audit: payload, batch: 200 };
    let mut measured = Forgetting::default();
    for round in 0..plan.rounds {
        for forgets in [round % 2 == 1, round % 2 == 0] {
            let worker = forgets.then(|| {
                let deliveries = bench.journal.clone() as Arc<dyn Deliveries>;
                let metrics = Arc::new(Metrics::new());
                Worker::start(deliveries, &Routes::default(), retention, bench.clock.clone(), metrics)
            });
            let started = Instant::now();
            bench.append(run, false, None).await?;
            let accepted = rate(run, started);
            if let Some(worker) = worker {
                worker.stop().await;
            }
            let rates = if forgets { &mut measured.during } else { &mut measured.without };
            rates.push(accepted);
        }
        progress(&format!(
            "round {}: {:.0} accepts/s while old events are forgotten, {:.0} otherwise",
            round + 1,
            measured.during.last().copied().unwrap_or(f64::NAN),
            measured.without.last().copied().unwrap_or(f64::NAN)
        ));
    }
    bench.journal.close().await;
    measured.forgotten = forgotten(&bench.store, history)?;
    anyhow::ensure!(measured.forgotten > 0, "nothing was forgotten");
    Ok(measured)
}

/// How many events of a history are gone. The first ones are counted, because some of them are kept; of the others the oldest
/// that is left tells it.
fn forgotten(store: &Store, history: &History) -> anyhow::Result<usize> {
    let border = history.time_of(SHORT.min(history.count)).0;
    let (left, oldest) = match store {
        Store::Sqlite(_) => {
            let border = (border / 1_000) << 15;
            (
                format!("SELECT count(*) FROM oncehook_events WHERE seq < {border}"),
                format!("SELECT received_at FROM oncehook_events WHERE seq >= {border} ORDER BY seq LIMIT 1"),
            )
        }
        Store::Postgres(_) => {
            let border = format!("oncehook.first_id({border})");
            (
                format!("SELECT count(*) FROM oncehook.events WHERE id < {border}"),
                format!("SELECT received_at FROM oncehook.events WHERE id >= {border} ORDER BY id LIMIT 1"),
            )
        }
        Store::Mysql(_) => {
            let border = mariadb::first_id(border);
            (
                format!("SELECT COUNT(*) FROM oncehook_events WHERE id < {border}"),
                format!("SELECT received_at FROM oncehook_events WHERE id >= {border} ORDER BY id LIMIT 1"),
            )
        }
    };
    let first = SHORT.saturating_sub(usize::try_from(store.number(&left)?)?);
    let step = (history.time_of(1).0 - history.time_of(0).0).max(1);
    Ok(first + usize::try_from((store.number(&oldest)? - border) / step)?)
}
