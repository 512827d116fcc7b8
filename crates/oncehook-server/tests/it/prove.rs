//! The short version of `make prove`: the same scenarios, a few rounds each, with every mistake that can be planted.
//!
//! `ONCEHOOK_TEST_SCALE` makes the rounds more.

use std::path::Path;

use oncehook::planted::Bug;
use oncehook_testkit::prove::audit::Tally;
use oncehook_testkit::prove::cluster::{Cluster, Engine};
use oncehook_testkit::prove::coverage::Coverage;
use oncehook_testkit::prove::disk::Shim;
use oncehook_testkit::prove::embedded::Deployment;
use oncehook_testkit::prove::history::Manners;
use oncehook_testkit::prove::planted::{all, search};
use oncehook_testkit::random::Random;

use crate::kit::BINARY;

fn place() -> &'static Path {
    Path::new(env!("CARGO_TARGET_TMPDIR"))
}

fn scale(rounds: usize) -> usize {
    #[expect(clippy::disallowed_methods, reason = "the size of a test is no configuration of the gateway")]
    let scale = std::env::var("ONCEHOOK_TEST_SCALE").ok().and_then(|scale| scale.parse().ok());
    rounds * scale.unwrap_or(1)
}

#[track_caller]
fn clean(what: &str, tally: &Tally, coverage: &Coverage) {
    eprintln!("{what}: {tally:?}\n{:?}", coverage.all());
    assert!(tally.is_clean() && tally.acked > 0, "{what}: {tally:?}");
    assert!(coverage.missing().is_empty(), "{what} never happened: {:?}", coverage.missing());
}

#[tokio::test(flavor = "multi_thread")]
async fn r47_fault_2_power_cuts_lose_nothing_and_double_nothing() {
    let (shim, coverage) = (Shim::build(), Coverage::default());
    let seed = Random::from_environment().next();
    let manners = Manners::default();
    let mut deployment = Deployment::new(Path::new(BINARY), place(), &shim, &coverage, manners, None, seed).await;
    deployment.cuts(scale(12)).await;
    clean("power cuts", &deployment.end(true).await, &coverage);
}

#[tokio::test(flavor = "multi_thread")]
async fn r47_fault_2_power_cuts_while_events_are_spooled_lose_nothing() {
    let (shim, coverage) = (Shim::build(), Coverage::default());
    let seed = Random::from_environment().next();
    let manners = Manners { changed: 0, ..Manners::default() };
    let deployment = Deployment::new(Path::new(BINARY), place(), &shim, &coverage, manners, None, seed).await;
    let mut deployment = deployment.with_spool();
    deployment.spool_cuts(scale(6)).await;
    deployment.empty_the_spool().await;
    let tally = deployment.end(true).await;
    let all = coverage.all();
    assert!(tally.is_clean() && tally.acked > 0, "{tally:?}");
    assert!(all["events spooled"] > 0 && all["power cuts that undid writes"] > 0, "{all:?}");
}

/// The kernel's own calls, so that nothing depends on what the shim can see.
#[tokio::test(flavor = "multi_thread")]
async fn r47_fault_3_fault_5_fault_6_calls_of_the_kernel_for_an_event_fail_once() {
    let (shim, coverage) = (Shim::build(), Coverage::default());
    let seed = Random::from_environment().next();
    let manners = Manners::default();
    let deployment = Deployment::new(Path::new(BINARY), place(), &shim, &coverage, manners, None, seed).await;
    let mut deployment = deployment.with_a_hopeless_route();
    // Not all of them each time; `make prove` leaves none out.
    let calls = deployment.every_call_traced(4).await;
    let tally = deployment.end(true).await;
    let all = coverage.all();
    assert!(calls >= 4, "an event, its effects and a dead delivery are at least four calls, not {calls}");
    assert!(tally.is_clean() && tally.dead == tally.stored && tally.acked > calls / 4, "{tally:?}");
    for error in ["EIO injected by strace", "ENOSPC injected by strace"] {
        // A call that is not made the second time cannot fail: the journal also works by itself now and then.
        assert!(all[error] >= calls / 5, "{calls} calls, {all:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn r47_fault_3_fault_5_writes_and_syncs_of_an_event_fail_once() {
    let (shim, coverage) = (Shim::build(), Coverage::default());
    let seed = Random::from_environment().next();
    let manners = Manners::default();
    let deployment = Deployment::new(Path::new(BINARY), place(), &shim, &coverage, manners, None, seed).await;
    let mut deployment = deployment.with_a_hopeless_route();
    let calls = deployment.every_call(2).await;
    assert!(calls >= 4, "an event and its three effects are at least four calls, not {calls}");
    let tally = deployment.end(true).await;
    let all = coverage.all();
    for error in ["EIO at a call", "ENOSPC at a call"] {
        assert!(all[error] >= calls / 2, "{calls} calls, {all:?}");
    }
    assert!(tally.is_clean() && tally.acked > calls / 2, "{tally:?}");
    assert!(all["journal reopened after a failed call"] > 0, "{all:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn r47_fault_17_fault_18_frozen_and_with_a_clock_that_jumps() {
    let (shim, coverage) = (Shim::build(), Coverage::default());
    let seed = Random::from_environment().next();
    let manners = Manners::default();
    let mut deployment = Deployment::new(Path::new(BINARY), place(), &shim, &coverage, manners, None, seed).await;
    deployment.clock_jumps().await;
    deployment.freezes(scale(2)).await;
    clean("freezes and clock jumps", &deployment.end(true).await, &coverage);
}

async fn planted(bug: Bug) {
    let (shim, coverage) = (Shim::build(), Coverage::default());
    let seed = Random::from_environment().next();
    for engine in all().filter(|(other, _)| *other == bug).map(|(_, engine)| engine) {
        for control in [true, false] {
            let found = search(bug, engine, control, Path::new(BINARY), place(), &shim, &coverage, seed).await;
            eprintln!("{}: {found:?}", bug.as_str());
            if control {
                assert!(found.tally.is_clean() && found.tally.acked > 0, "without the mistake: {found:?}");
            } else {
                assert!(found.is_caught(), "{} was not noticed: {found:?}", bug.as_str());
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn r47_planted_a_journal_that_does_not_sync_is_noticed() {
    planted(Bug::NormalSync).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r47_planted_a_mark_before_the_effect_is_noticed() {
    planted(Bug::MarkFirst).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r47_planted_a_missing_fence_is_noticed() {
    planted(Bug::NoFence).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r47_planted_a_memory_of_a_second_is_noticed() {
    planted(Bug::ShortMemory).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r47_planted_select_then_insert_is_noticed() {
    planted(Bug::SelectThenInsert).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r47_planted_an_append_tied_to_its_sender_is_noticed() {
    planted(Bug::TiedToClient).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r47_planted_an_answer_before_the_commit_is_noticed() {
    planted(Bug::EarlyAnswer).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r47_planted_redis_before_the_commit_is_noticed() {
    planted(Bug::CacheFirst).await;
}

async fn two_nodes(engine: Engine) {
    let (shim, coverage) = (Shim::build(), Coverage::default());
    let seed = Random::from_environment().next();
    let mut cluster = Cluster::new(engine, Path::new(BINARY), place(), &shim, &coverage, None, seed).await;
    cluster.kills(scale(8)).await;
    clean("two nodes", &cluster.end().await, &coverage);
}

#[tokio::test(flavor = "multi_thread")]
async fn r47_two_nodes_on_postgres_are_killed_and_lose_server_redis_and_network() {
    two_nodes(Engine::Postgres).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r47_two_nodes_on_mariadb_are_killed_and_lose_server_redis_and_network() {
    two_nodes(Engine::MariaDb).await;
}
