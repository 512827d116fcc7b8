//! A page of the list by each single filter (`GET /api/events`), in a long history and in one of 10,000 events.
//!
//! Promises: both are asked of real gateways, in turns, on a connection of its own each time. Both histories have the same odd
//! events, so a filter finds as much in one as in the other, or it is an error.

use std::time::{Duration, Instant};

use oncehook_testkit::compare::growth::List;
use oncehook_testkit::gateway::Gateway;
use oncehook_verify::UnixMicros;

use super::super::median;
use super::super::store::Store;
use super::history::{self, History, SHORT};
use super::{backlog, indexed, made, middle, progress};

/// Pages of each kind at least.
const PAGES: usize = 21;

/// What a start leaves to the background is done by then.
const SETTLED: Duration = Duration::from_secs(8);

/// Times every list in both. Nobody else has the store open.
pub async fn measure(long: &Store, history: &History, size: usize, rounds: usize) -> anyhow::Result<Vec<List>> {
    let store = made(long.engine()).await?;
    let shorter = History { count: SHORT, ..history.clone() };
    history::load(&store, &shorter, 0, SHORT)?;
    indexed(&store).await?;
    let (mut short, mut long) = (backlog::start(&store, "")?, backlog::start(long, "")?);
    tokio::time::sleep(SETTLED).await;
    let mut lists = Vec::new();
    let of_each = queries(middle(&shorter, SHORT)).into_iter().zip(queries(middle(history, size)));
    for ((filter, in_short), (_, in_long)) in of_each {
        let (mut times, mut found) = ([Vec::new(), Vec::new()], [0, 0]);
        for _ in 0..rounds.max(PAGES) {
            for (number, (gateway, query)) in [(&short, &in_short), (&long, &in_long)].into_iter().enumerate() {
                let started = Instant::now();
                found[number] = page(gateway, query).await?;
                times[number].push(started.elapsed().as_secs_f64() * 1e3);
            }
        }
        let [few, many] = found;
        anyhow::ensure!(few == many, "{filter}: {few} events of the short history, {many} of the long");
        let [short_millis, millis] = times.map(median);
        progress(&format!(
            "list by {filter:<24} {many:>3} events, {short_millis:>7.2} ms in {SHORT}, {millis:>7.2} ms in {size}: {:.2} of the speed",
            short_millis / millis
        ));
        lists.push(List { filter: filter.to_owned(), found: many, short_millis, millis });
    }
    short.stop();
    long.stop();
    Ok(lists)
}

/// Gets a page, and returns how many events are on it.
async fn page(gateway: &Gateway, query: &str) -> anyhow::Result<usize> {
    let answer = gateway.get(&format!("/api/events?limit=50{query}")).await;
    anyhow::ensure!(answer.status == 200, "{query}: {}", String::from_utf8_lossy(&answer.body));
    Ok(answer.json()["events"].as_array().map_or(0, Vec::len))
}

/// Every filter alone: what is common, what is rare and lies deep, and what is not there at all.
fn queries(middle: UnixMicros) -> Vec<(&'static str, String)> {
    let by = |name: &str, value: &str| format!("&{name}={value}");
    let status = |status: &str| by("status", status);
    let middle = middle.to_rfc3339();
    vec![
        ("no filter", String::new()),
        ("source", by("source", "shop")),
        ("source, rare", by("source", "old-shop")),
        ("source, unknown", by("source", "nobody")),
        ("type", by("type", "payment_intent.succeeded")),
        ("type, rare", by("type", "payment_intent.old")),
        ("type, unknown", by("type", "nothing")),
        ("entity", by("entity", "pi_old_4711")),
        ("entity, 100 events", by("entity", "pi_busy")),
        ("entity, unknown", by("entity", "pi_nobody")),
        ("key", by("key", &history::scattered(1_267))),
        ("key, unknown", by("key", "evt_nothing")),
        ("status succeeded", status("succeeded")),
        ("status dead", status("dead")),
        ("status skipped", status("skipped")),
        ("status superseded", status("superseded")),
        ("status parked", status("parked")),
        ("status retrying", status("retrying")),
        ("status ready", status("ready")),
        ("status running, none", status("running")),
        ("status quarantined", status("quarantined")),
        ("status unrouted", status("unrouted")),
        ("since", by("since", &middle)),
        ("until", by("until", &middle)),
    ]
}
