//! Random histories, judged by the rules said once more.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use oncehook::clock::Clock;
use oncehook::delivery::{Cause, Claim, Failure, HandedEvent, Settled, Settlement, Verdict};
use oncehook::event::{NewEvent, SourceName};
use oncehook::handler::Handler;
use oncehook::journal::memory::MemoryJournal;
use oncehook::journal::mysql::{MysqlJournal, MysqlOptions};
use oncehook::journal::postgres::{PostgresJournal, PostgresOptions};
use oncehook::journal::sqlite::{SqliteJournal, SqliteOptions};
use oncehook::journal::{Deliveries, Journal, JournalReader, Order, Verb, Who};
use oncehook::ordering::{OnDead, Ordering};
use oncehook::retry::RetryPolicy;
use oncehook::route::Route;
use oncehook_testkit::journal::{NOW, append, event};
use oncehook_testkit::mysql;
use oncehook_testkit::postgres::Server;
use oncehook_testkit::random::{Random, scale};
use oncehook_verify::UnixMicros;

use super::{STEPS, machine, name};

/// What has become of an event in a random history.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fate {
    Waits,
    Runs,
    Parked,
    Done,
    Dead,
    Gone,
}

/// A random history in a journal, against the rules said once more, as plainly as can be. Each seed has a route, entities and
/// a time of its own, so that many can be in one journal.
async fn random_history<J: Journal + Deliveries + JournalReader>(journal: &J, clock: &Clock, seed: u64) {
    let mut random = Random::new(seed);
    let orders = format!("orders{seed}");
    let ordering = Ordering {
        by_entity: random.below(2) == 0,
        newer_only: random.below(2) == 0,
        on_dead: if random.below(2) == 0 { OnDead::Block } else { OnDead::Continue },
        machine: (random.below(3) == 0).then(machine),
        ..Ordering::default()
    };
    let nothing = |_: &rusqlite::Connection, _: &HandedEvent| panic!("nobody runs it");
    let source = SourceName::new("shop").unwrap();
    let retry = RetryPolicy { max_attempts: 100, ..RetryPolicy::default() };
    let route = Route::new(name(&orders), source, Handler::Function(Arc::new(nothing)));
    let route = Arc::new(Route { ordering: ordering.clone(), retry, ..route });
    let said = format!("seed {seed}, {ordering:?}");

    let mut now = i64::try_from(seed).unwrap() * 3_600_000_000;
    let mut fates: HashMap<oncehook::event::EventId, (String, i64, Fate)> = HashMap::new();
    let mut newest: HashMap<String, i64> = HashMap::new();
    let mut reached: HashMap<String, usize> = HashMap::new();
    let mut running: Vec<Claim> = Vec::new();
    for round in 0..60 {
        now += i64::try_from(random.below(3)).unwrap() * 700_000;
        clock.set(UnixMicros(NOW.0 + now));
        match random.below(5) {
            0 | 1 if round < 30 => {
                let entity = format!("{}{seed}", random.pick(&["a", "b"]));
                let number = 1 + random.below(STEPS as u64) as usize;
                let new = NewEvent {
                    kind: Some(format!("step{number}")),
                    entity: Some(entity.clone()),
                    version: Some(number as i64),
                    by_entity: true,
                    occurred_at: None,
                    routes: [name(&orders)].into_iter().collect(),
                    expires_at: UnixMicros(i64::MAX),
                    ..event(&format!("{seed}-{round}"), "{}")
                };
                let id = append(journal, [new]).await[0].id;
                fates.insert(id, (entity, number as i64, Fate::Waits));
            }
            _ if !running.is_empty() && random.below(2) == 0 => {
                let claim = running.swap_remove(random.below(running.len() as u64) as usize);
                let failure = Failure::retry(Cause::Destination, "no");
                let (fate, verdict) = match random.below(6) {
                    0 => (Fate::Waits, Verdict::RetryAt(UnixMicros(NOW.0 + now + 500_000), failure)),
                    1 => (Fate::Dead, Verdict::Dead(failure)),
                    2 => (Fate::Parked, Verdict::Parked(UnixMicros(i64::MAX - 1), Failure::defer("later"))),
                    _ => (Fate::Done, Verdict::Succeeded(None)),
                };
                let id = claim.fence.delivery.event;
                let settlement = Settlement { fence: claim.fence, verdict, followups: Vec::new() };
                assert_eq!(journal.settle(vec![settlement]).await.unwrap(), [Settled::Done], "{said}");
                let (entity, version, _) = fates[&id].clone();
                fates.get_mut(&id).unwrap().2 = fate;
                if fate == Fate::Done {
                    let newest = newest.entry(entity.clone()).or_insert(version);
                    *newest = (*newest).max(version);
                    if ordering.machine.is_some() {
                        reached.insert(entity.clone(), version as usize);
                    }
                    // Success wakes what is parked.
                    let woken = fates.values_mut().filter(|(other, _, fate)| *other == entity && *fate == Fate::Parked);
                    woken.for_each(|(_, _, fate)| *fate = Fate::Waits);
                }
            }
            _ => {
                let waiting = fates.iter().filter(|(_, (.., fate))| *fate == Fate::Waits);
                let before: Vec<_> = waiting.map(|(id, fate)| (*id, fate.clone())).collect();
                let limit = 1 + random.below(3) as usize;
                let claims = journal.claim(Arc::clone(&route), limit, Duration::from_secs(9_000)).await.unwrap();
                for (id, (entity, version, fate)) in before {
                    let story = journal.show(id).await.unwrap().unwrap();
                    let state = story.event.deliveries[0].state.clone();
                    if fate == Fate::Waits && state == "superseded" {
                        let late = ordering.machine.is_some();
                        let old = ordering.newer_only && newest.get(&entity).is_some_and(|newest| version < *newest);
                        assert!(late || old, "{said}: superseded although it is as new as anything");
                        fates.get_mut(&id).unwrap().2 = Fate::Gone;
                    }
                    if fate == Fate::Waits && state == "parked" {
                        assert!(ordering.machine.is_some(), "{said}: parked by nobody");
                        fates.get_mut(&id).unwrap().2 = Fate::Parked;
                    }
                }
                for claim in claims {
                    let id = claim.fence.delivery.event;
                    let (entity, version, fate) = fates[&id].clone();
                    assert_eq!(fate, Fate::Waits, "{said}: {id} was not there to be taken");
                    let others = || fates.iter().filter(|(other, (of, ..))| **other != id && *of == entity);
                    let alone = others().all(|(_, (.., fate))| *fate != Fate::Runs);
                    assert!(alone || !ordering.is_serial(), "{said}: two at once");
                    if ordering.by_entity {
                        let before = |(other, (_, number, fate)): (&_, &(String, i64, Fate))| {
                            let dead = *fate == Fate::Dead && ordering.on_dead == OnDead::Block;
                            (dead || *fate == Fate::Waits) && (*number, *other) < (version, id)
                        };
                        assert!(!others().any(before), "{said}: {id} has overtaken somebody");
                    }
                    if ordering.newer_only {
                        assert!(newest.get(&entity).is_none_or(|newest| version >= *newest), "{said}: too old");
                    }
                    if ordering.machine.is_some() {
                        let state = reached.get(&entity).copied().unwrap_or(0);
                        assert_eq!(version as usize, state + 1, "{said}: it does not fit");
                        assert_eq!(claim.event.state, Some(format!("s{version}")), "{said}");
                    }
                    fates.get_mut(&id).unwrap().2 = Fate::Runs;
                    running.push(claim);
                }
            }
        }
    }
    // Nothing is stuck: whatever waits comes to its end once everything succeeds.
    for _ in 0..2 * fates.len() + 5 {
        now += 10_000_000;
        clock.set(UnixMicros(NOW.0 + now));
        let dead: Vec<_> = fates.iter().filter(|(_, (.., fate))| *fate == Fate::Dead).map(|(id, _)| *id).collect();
        for event in dead {
            let who = Who { name: "ada".to_owned(), reason: None };
            let skip = Order { event, verb: Verb::Skip, route: None, who, wanting: Vec::new(), attempts: 5 };
            journal.order(skip).await.unwrap();
            fates.get_mut(&event).unwrap().2 = Fate::Gone;
        }
        running.extend(journal.claim(Arc::clone(&route), 9, Duration::from_secs(9_000)).await.unwrap());
        let done = running.drain(..).map(|claim| Settlement {
            fence: claim.fence,
            verdict: Verdict::Succeeded(None),
            followups: Vec::new(),
        });
        journal.settle(done.collect()).await.unwrap();
    }
    let mut left = journal.backlog().await.unwrap();
    left.retain(|route| route.route == orders);
    let parked = |route: &oncehook::journal::Backlog| route.oldest.is_none() && route.blocked == 0;
    assert!(left.iter().all(|route| route.running == 0 && parked(route)), "{said}: {left:?}");
}

#[tokio::test]
async fn r13_r29_random_histories_of_entities_keep_the_rules() {
    for seed in 1..=10_000 {
        let clock = Clock::manual(NOW);
        random_history(&MemoryJournal::with_clock(clock.clone()), &clock, seed).await;
    }
}

/// Histories in each of the databases. `ONCEHOOK_TEST_SCALE=10` makes it some hundreds.
fn some() -> std::ops::RangeInclusive<u64> {
    1..=30 * scale() as u64
}

#[tokio::test(flavor = "multi_thread")]
async fn r13_r29_random_histories_of_entities_on_sqlite_keep_the_rules() {
    let directory = tempfile::tempdir().unwrap();
    let clock = Clock::manual(NOW);
    let options = SqliteOptions { clock: clock.clone(), ..SqliteOptions::new(directory.path().join("shop.db")) };
    let journal = SqliteJournal::open(&options).unwrap();
    for seed in some() {
        random_history(&journal, &clock, seed).await;
    }
    journal.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r13_r29_random_histories_of_entities_on_postgres_keep_the_rules() {
    let database = Server::shared().database();
    let clock = Clock::manual(NOW);
    let options = PostgresOptions { clock: clock.clone(), ..PostgresOptions::new(database.url()) };
    let journal = PostgresJournal::open(&options).await.unwrap();
    for seed in some() {
        random_history(&journal, &clock, seed).await;
    }
    journal.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r13_r29_random_histories_of_entities_on_mysql_keep_the_rules() {
    let database = mysql::Server::shared().database();
    let clock = Clock::manual(NOW);
    let options = MysqlOptions { clock: clock.clone(), ..MysqlOptions::new(database.url()) };
    let journal = MysqlJournal::open(&options).await.unwrap();
    for seed in some() {
        random_history(&journal, &clock, seed).await;
    }
    journal.close().await;
}
