//! A page of the list by each single filter, in a long history and in one of 10,000 events.
//!
//! Promises: both histories have the same odd events, so a filter finds as much in one as in the other, or it is an error.

use std::time::Instant;

use oncehook::journal::{EventQuery, EventStatus};
use oncehook_testkit::compare::growth::List;
use oncehook_verify::{EventKey, UnixMicros};

use super::super::{Bench, median};
use super::history::{self, History, SHORT};
use super::{indexed, made, middle, progress};

/// Pages of each kind at least.
const PAGES: usize = 21;

/// Times every list in both.
pub async fn measure(
    long: &Bench,
    history: &History,
    size: usize,
    rounds: usize,
) -> anyhow::Result<Vec<List>> {
    let store = made(long.store.engine()).await?;
    let shorter = History { count: SHORT, ..history.clone() };
    history::load(&store, &shorter, 0, SHORT)?;
    indexed(&store).await?;
    let short = Bench::open(store).await?;
    let mut lists = Vec::new();
    let of_each = queries(middle(&shorter, SHORT)).into_iter().zip(queries(middle(history, size)));
    for ((filter, in_short), (_, in_long)) in of_each {
        let (mut times, mut found) = ([Vec::new(), Vec::new()], [0, 0]);
        for _ in 0..rounds.max(PAGES) {
            for (number, (bench, query)) in [(&short, &in_short), (long, &in_long)].into_iter().enumerate() {
                let started = Instant::now();
                found[number] = bench.journal.list(query.clone()).await?.events.len();
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
    short.journal.close().await;
    Ok(lists)
}

/// Every filter alone: what is common, what is rare and lies deep, and what is not there at all.
fn queries(middle: UnixMicros) -> Vec<(&'static str, EventQuery)> {
    let page = || EventQuery { limit: 50, ..EventQuery::default() };
    let status = |status| EventQuery { status: Some(status), ..page() };
    let source = |name: &str| EventQuery { source: Some(name.to_owned()), ..page() };
    let kind = |name: &str| EventQuery { kind: Some(name.to_owned()), ..page() };
    let entity = |name: &str| EventQuery { entity: Some(name.to_owned()), ..page() };
    let key = |text: &str| EventQuery { key: Some(EventKey::from_parts(&[text.as_bytes()])), ..page() };
    vec![
        ("no filter", page()),
        ("source", source("shop")),
        ("source, rare", source("old-shop")),
        ("source, unknown", source("nobody")),
        ("type", kind("payment_intent.succeeded")),
        ("type, rare", kind("payment_intent.old")),
        ("type, unknown", kind("nothing")),
        ("entity", entity("pi_old_4711")),
        ("entity, 100 events", entity("pi_busy")),
        ("entity, unknown", entity("pi_nobody")),
        ("key", key(&history::scattered(1_267))),
        ("key, unknown", key("evt_nothing")),
        ("status succeeded", status(EventStatus::Succeeded)),
        ("status dead", status(EventStatus::Dead)),
        ("status skipped", status(EventStatus::Skipped)),
        ("status superseded", status(EventStatus::Superseded)),
        ("status parked", status(EventStatus::Parked)),
        ("status retrying", status(EventStatus::Retrying)),
        ("status ready", status(EventStatus::Ready)),
        ("status running, none", status(EventStatus::Running)),
        ("status quarantined", status(EventStatus::Quarantined)),
        ("status unrouted", status(EventStatus::Unrouted)),
        ("since", EventQuery { since: Some(middle), ..page() }),
        ("until", EventQuery { until: Some(middle), ..page() }),
    ]
}
