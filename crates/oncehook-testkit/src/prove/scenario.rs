//! The scenarios of a proof, by name: what each runs on, how many rounds, and how long that takes.
//!
//! Promises: a scenario that panics is a failure of its own, told in its tally; whatever it started is ended, and the next one runs.

use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use super::audit::Tally;
use super::cluster::{self, Cluster, Engine};
use super::coverage::Coverage;
use super::disk::Shim;
use super::elsewhere::{self, Elsewhere};
use super::embedded::{self, Deployment};
use super::history::Manners;
use super::spooling;

/// One scenario.
#[derive(Debug, Clone)]
pub struct Scenario {
    /// Its name, in reports and in the table of faults.
    pub name: &'static str,
    /// What happens in it.
    pub rounds: Rounds,
    /// Seconds that it is expected to take.
    pub seconds: u64,
}

/// What happens, and how often.
#[derive(Debug, Clone, Copy)]
#[expect(missing_docs, reason = "their scenarios say what they are")]
pub enum Rounds {
    Kills(usize),
    /// At each of the named places.
    KillsAtPoints(usize),
    Cuts(usize),
    EveryCall,
    EveryCallTraced,
    Freezes(usize),
    ClockJumps,
    Races(usize),
    Calm(Duration),
    SpoolCuts(usize),
    SpoolKillsAtPoints(usize),
    ElsewhereKillsAtPoints(usize),
    NodesKilled(Engine, usize),
    NodesKilledAtPoints(Engine, usize),
}

/// All scenarios, with so many percent of their rounds.
#[must_use]
pub fn all(percent: u64) -> Vec<Scenario> {
    let times = |usual: u64| (usual * percent / 100).max(1) as usize;
    let (postgres, mariadb) = (Engine::Postgres, Engine::MariaDb);
    let list = [
        ("SQLite: kills", Rounds::Kills(times(200)), 60),
        ("SQLite: kills at crash points", Rounds::KillsAtPoints(times(10)), 22),
        ("SQLite: power cuts", Rounds::Cuts(times(201)), 60),
        ("SQLite: every call fails once", Rounds::EveryCall, 64),
        ("SQLite: every call fails once, by strace", Rounds::EveryCallTraced, 64),
        ("SQLite: freezes past a lease", Rounds::Freezes(times(5)), 15),
        ("SQLite: clock jumps", Rounds::ClockJumps, 3),
        ("SQLite: races", Rounds::Races(times(100)), 2),
        ("SQLite: load with half of it copies", Rounds::Calm(Duration::from_secs(5)), 10),
        ("spool: power cuts", Rounds::SpoolCuts(times(30)), 34),
        ("spool: kills at crash points", Rounds::SpoolKillsAtPoints(times(10)), 26),
        ("another database: kills at crash points", Rounds::ElsewhereKillsAtPoints(times(10)), 15),
        ("PostgreSQL, two nodes: kills", Rounds::NodesKilled(postgres, times(104)), 100),
        ("PostgreSQL, two nodes: kills at crash points", Rounds::NodesKilledAtPoints(postgres, times(5)), 20),
        ("MariaDB, two nodes: kills", Rounds::NodesKilled(mariadb, times(104)), 110),
        ("MariaDB, two nodes: kills at crash points", Rounds::NodesKilledAtPoints(mariadb, times(5)), 45),
    ];
    let scenario = |(name, rounds, seconds)| Scenario { name, rounds, seconds };
    list.into_iter().map(scenario).collect()
}

/// What a scenario needs.
#[derive(Clone, Copy)]
pub struct Stage<'s> {
    /// The released program.
    pub released: &'s Path,
    /// One with crash points.
    pub armed: &'s Path,
    /// Where files may be.
    pub place: &'s Path,
    /// The disk whose power can be cut.
    pub shim: &'s Shim,
    /// What is counted.
    pub coverage: &'s Coverage,
}

impl Scenario {
    /// Runs it. Returns what happened how often, in words, and what came of it.
    pub async fn run(&self, stage: Stage<'_>, seed: u64) -> (String, Tally) {
        match caught(self.play(stage, seed)).await {
            Ok(played) => played,
            Err(panic) => {
                let odd = vec![format!("{}: {panic}", self.name)];
                ("it broke off".to_owned(), Tally { odd, ..Tally::default() })
            }
        }
    }

    async fn play(&self, stage: Stage<'_>, seed: u64) -> (String, Tally) {
        match self.rounds {
            Rounds::ElsewhereKillsAtPoints(count) => {
                let mut shop = Elsewhere::new(stage.armed, stage.place, stage.coverage, seed);
                for (point, passings) in elsewhere::POINTS {
                    shop.kills_at(point, passings, count).await;
                }
                (format!("{} × {count} kills", elsewhere::POINTS.len()), shop.end().await)
            }
            Rounds::NodesKilled(engine, count) => {
                let mut cluster = stage.cluster(engine, stage.released, seed).await;
                cluster.kills(count).await;
                (format!("{count} kills"), cluster.end().await)
            }
            Rounds::NodesKilledAtPoints(engine, count) => {
                let mut cluster = stage.cluster(engine, stage.armed, seed).await;
                cluster.kills_at_points(count).await;
                (format!("{} × {count} kills", cluster::POINTS.len()), cluster.end().await)
            }
            _ => self.play_embedded(stage, seed).await,
        }
    }

    async fn play_embedded(&self, stage: Stage<'_>, seed: u64) -> (String, Tally) {
        // Crash points are not in the release.
        let armed = matches!(self.rounds, Rounds::KillsAtPoints(_) | Rounds::SpoolKillsAtPoints(_));
        let binary = if armed { stage.armed } else { stage.released };
        let spooling = matches!(self.rounds, Rounds::SpoolKillsAtPoints(_) | Rounds::SpoolCuts(_));
        let manners = Manners { changed: if spooling { 0 } else { 4 }, ..Manners::default() };
        let (place, shim, coverage) = (stage.place, stage.shim, stage.coverage);
        let mut deployment = Deployment::new(binary, place, shim, coverage, manners, None, seed).await;
        if spooling {
            deployment = deployment.with_spool();
        }
        if matches!(self.rounds, Rounds::EveryCall | Rounds::EveryCallTraced) {
            deployment = deployment.with_a_hopeless_route();
        }
        let rounds = match self.rounds {
            Rounds::Kills(count) => {
                deployment.kills(count).await;
                format!("{count} kills")
            }
            Rounds::KillsAtPoints(count) => {
                for (point, passings) in embedded::POINTS {
                    deployment.kills_at(point, passings, count).await;
                }
                format!("{} × {count} kills", embedded::POINTS.len())
            }
            Rounds::Cuts(count) => {
                deployment.cuts(count).await;
                format!("{count} cuts")
            }
            Rounds::EveryCall => format!("{} calls × 2 errors", deployment.every_call(1).await),
            Rounds::EveryCallTraced => format!("{} calls × 2 errors", deployment.every_call_traced(1).await),
            Rounds::Freezes(count) => {
                deployment.freezes(count).await;
                format!("{count} freezes")
            }
            Rounds::ClockJumps => {
                deployment.clock_jumps().await;
                "6 jumps".to_owned()
            }
            Rounds::Races(count) => {
                deployment.races(count, 32).await;
                format!("{count} × 32 copies")
            }
            Rounds::Calm(time) => {
                deployment.calm(time).await;
                format!("{} s", time.as_secs())
            }
            Rounds::SpoolCuts(count) => {
                deployment.spool_cuts(count).await;
                deployment.empty_the_spool().await;
                format!("{count} cuts")
            }
            Rounds::SpoolKillsAtPoints(count) => {
                for (point, passings) in spooling::POINTS {
                    deployment.spool_kills_at(point, passings, count).await;
                }
                deployment.empty_the_spool().await;
                format!("{} × {count} kills", spooling::POINTS.len())
            }
            Rounds::ElsewhereKillsAtPoints(_) | Rounds::NodesKilled(..) | Rounds::NodesKilledAtPoints(..) => {
                unreachable!("these are not embedded")
            }
        };
        (rounds, deployment.end(true).await)
    }
}

impl<'s> Stage<'s> {
    async fn cluster(&self, engine: Engine, binary: &Path, seed: u64) -> Cluster<'s> {
        Cluster::new(engine, binary, self.place, self.shim, self.coverage, None, seed).await
    }
}

/// Runs something to its end; a panic of it is an error with the panic's words.
pub async fn caught<T>(future: impl Future<Output = T>) -> Result<T, String> {
    let mut future = pin!(future);
    std::future::poll_fn(|context| {
        let polled = std::panic::catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(context)));
        match polled {
            Ok(Poll::Pending) => Poll::Pending,
            Ok(Poll::Ready(output)) => Poll::Ready(Ok(output)),
            Err(panic) => Poll::Ready(Err(words(panic.as_ref()))),
        }
    })
    .await
}

/// What a panic said.
#[must_use]
pub fn words(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    let text = text.unwrap_or("a panic without words");
    format!("it broke off: {}", text.chars().take(500).collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn r47_a_scenario_that_panics_is_told_and_ends_nothing_else() {
        let fails = async {
            tokio::task::yield_now().await;
            assert_eq!(std::process::id(), 0, "the {} things", 3);
        };
        let told = caught(fails).await.unwrap_err();
        assert!(told.contains("the 3 things"), "{told}");
        assert_eq!(caught(async { 7 }).await, Ok(7));
    }

    #[test]
    fn r47_the_whole_proof_is_as_long_as_it_says() {
        let count = |found: fn(&Rounds) -> Option<usize>| -> usize {
            all(100).iter().filter_map(|scenario| found(&scenario.rounds)).sum()
        };
        let on = |engine: Engine| {
            all(100).iter().any(
                |scenario| matches!(scenario.rounds, Rounds::NodesKilled(on, kills) if on == engine && kills >= 100),
            )
        };
        assert!(count(|rounds| if let Rounds::Kills(count) = rounds { Some(*count) } else { None }) >= 200);
        assert!(count(|rounds| if let Rounds::Cuts(count) = rounds { Some(*count) } else { None }) >= 200);
        assert!(on(Engine::Postgres) && on(Engine::MariaDb));
        let seconds: u64 = all(100).iter().map(|scenario| scenario.seconds).sum();
        assert!(seconds < 25 * 60, "{seconds}");
    }
}
