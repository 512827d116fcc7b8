//! Mistakes made on purpose, each with the scenario that must notice it. A proof that misses one is blind, and fails.
//!
//! The same scenarios run without a mistake too, and must find nothing then: `control`.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use oncehook::clock::Clock;
use oncehook::delivery::{HandedEvent, RouteName};
use oncehook::event::{NewEvent, SourceName};
use oncehook::handler::Handler;
use oncehook::journal::sqlite::{SqliteJournal, SqliteOptions};
use oncehook::journal::{Deliveries as _, Journal as _};
use oncehook::planted::{self, Bug};
use oncehook::retry::RetryPolicy;
use oncehook::route::Route;
use oncehook_verify::UnixMicros;

use super::audit::Tally;
use super::cluster::{Cluster, Engine};
use super::coverage::Coverage;
use super::disk::Shim;
use super::embedded::Deployment;
use super::history::Manners;
use crate::journal::{NOW, append_one, event};

/// How a mistake was looked for.
#[derive(Debug)]
pub struct Search {
    /// The mistake; nothing in a control run.
    pub bug: Option<Bug>,
    /// The scenario.
    pub scenario: &'static str,
    /// What it found.
    pub tally: Tally,
}

impl Search {
    /// Whether something was lost or doubled. Anything else that is odd does not count: it would be noticed for another
    /// reason than the one that is meant.
    #[must_use]
    pub fn is_caught(&self) -> bool {
        self.tally.lost + self.tally.doubled > 0
    }
}

/// The scenario for each mistake.
#[must_use]
pub fn scenario(bug: Bug) -> &'static str {
    match bug {
        Bug::NormalSync => "power cuts",
        Bug::MarkFirst => "kills in the handler",
        Bug::NoFence => "a zombie and its successor",
        Bug::ShortMemory => "copies over three seconds",
        Bug::SelectThenInsert => "races",
        Bug::TiedToClient => "senders that hang up",
        Bug::EarlyAnswer => "kills before the commit",
        Bug::CacheFirst => "kills before the insert, with Redis and another node",
    }
}

/// Runs the scenario for a mistake, with it or (`control`) without. The binary must have mistakes and crash points.
pub async fn search(
    bug: Bug,
    control: bool,
    binary: &Path,
    place: &Path,
    shim: &Shim,
    coverage: &Coverage,
    seed: u64,
) -> Search {
    let made = (!control).then_some(bug);
    let found = |tally| Search { bug: made, scenario: scenario(bug), tally };
    if bug == Bug::NoFence {
        return found(zombie(place, made).await);
    }
    if bug == Bug::CacheFirst {
        let mut cluster = Cluster::new(Engine::Postgres, binary, place, shim, coverage, made, seed).await;
        cluster.kills_before_the_insert(5).await;
        return found(cluster.end().await);
    }
    let manners = match bug {
        Bug::TiedToClient => Manners { hang_up: 40, ..Manners::default() },
        _ => Manners::default(),
    };
    let mut deployment = Deployment::new(binary, place, shim, coverage, manners, made, seed).await;
    match bug {
        Bug::NormalSync => deployment.cuts(6).await,
        Bug::MarkFirst => deployment.kills_at("in_handler", 60, 5).await,
        Bug::ShortMemory => deployment.calm(Duration::from_secs(4)).await,
        Bug::SelectThenInsert => deployment.races(40, 16).await,
        Bug::TiedToClient => deployment.calm(Duration::from_secs(2)).await,
        Bug::EarlyAnswer => deployment.kills_at("after_insert", 30, 6).await,
        Bug::NoFence | Bug::CacheFirst => {}
    }
    // Two events with one key keep a journal from starting, which would be noticed for another reason.
    let restart = !matches!(made, Some(Bug::ShortMemory | Bug::SelectThenInsert));
    found(deployment.end(restart).await)
}

/// Fault 17 and 41 on the real journal: a worker that was frozen comes back after another has done its work.
async fn zombie(place: &Path, bug: Option<Bug>) -> Tally {
    let able = planted::plant(bug);
    assert!(able || bug.is_none(), "this build has no mistakes");
    let directory = tempfile::tempdir_in(place).unwrap();
    let path = directory.path().join("journal.db");
    rusqlite::Connection::open(&path).unwrap().execute_batch("CREATE TABLE orders (key TEXT)").unwrap();
    let clock = Clock::manual(NOW);
    let journal = SqliteJournal::open(&SqliteOptions { clock: clock.clone(), ..SqliteOptions::new(&path) }).unwrap();
    let handler = |database: &rusqlite::Connection, event: &HandedEvent| {
        let key = String::from_utf8_lossy(event.key.as_bytes()).into_owned();
        database.execute("INSERT INTO orders VALUES (?1)", [key]).map_err(|error| {
            oncehook::delivery::Failure::retry(oncehook::delivery::Cause::Handler, error.to_string())
        })?;
        Ok(None)
    };
    let name = RouteName::new("orders").unwrap();
    let shop = SourceName::new("shop").unwrap();
    let retry = RetryPolicy { max_attempts: 5, base: Duration::ZERO, cap: Duration::ZERO };
    let route = Route { retry, ..Route::new(name.clone(), shop, Handler::Function(Arc::new(handler))) };
    let route = Arc::new(route);
    let lease = Duration::from_secs(15);
    let mut tally = Tally::default();
    for number in 0..20 {
        let key = format!("evt_{number}");
        append_one(&journal, NewEvent { routes: [name.clone()].into_iter().collect(), ..event(&key, "{}") }).await;
        let frozen = journal.claim(Arc::clone(&route), 1, lease).await.unwrap();
        clock.set(UnixMicros(clock.now().0 + 16_000_000));
        journal.reclaim(Arc::clone(&route)).await.unwrap();
        clock.set(UnixMicros(clock.now().0 + 1_000_000));
        let successor = journal.claim(Arc::clone(&route), 1, lease).await.unwrap();
        assert_eq!((frozen.len(), successor.len()), (1, 1), "there is one delivery, and it is claimed twice");
        journal.call(Arc::clone(&route), successor).await.unwrap();
        journal.call(Arc::clone(&route), frozen).await.unwrap();
        tally.acked += 1;
    }
    journal.close().await;
    let _ = planted::plant(None);
    let database = rusqlite::Connection::open(&path).unwrap();
    let count = |sql: &str| -> u64 { database.query_row(sql, [], |row| row.get::<_, i64>(0)).unwrap().unsigned_abs() };
    tally.stored = count("SELECT count(*) FROM oncehook_events");
    let (effects, distinct) = (count("SELECT count(*) FROM orders"), count("SELECT count(DISTINCT key) FROM orders"));
    tally.doubled = effects - distinct;
    tally.lost = tally.acked - distinct;
    tally
}
