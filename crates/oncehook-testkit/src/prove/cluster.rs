//! The proof on a server database: two nodes, Redis beside them, and a proxy in between; all of them go away now and then.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use oncehook::planted::Bug;
use tempfile::TempDir;

use super::audit::{Facts, Tally, audit};
use super::coverage::Coverage;
use super::history::{History, Manners, Sending};
use crate::chaos_proxy::{ChaosProxy, Cut};
use crate::gateway::{CONFIG, Gateway, prepare};
use crate::inbox::Inbox;
use crate::postgres::Server;
use crate::random::Random;
use crate::redis::Redis;
use crate::shop::{ORDERS, SHIPMENTS, mails};

/// How long a backlog may take (I6).
const DRAIN: Duration = Duration::from_secs(180);

/// The shop's tables. No unique keys, on purpose.
const TABLES: &str = "CREATE TABLE orders (id serial PRIMARY KEY, key text NOT NULL, payment text NOT NULL);
                      CREATE TABLE shipments (order_id integer NOT NULL, key text NOT NULL)";

/// Two nodes and what they stand on.
pub struct Cluster<'p> {
    server: Server,
    redis: Redis,
    proxy: ChaosProxy,
    inbox: Inbox,
    directory: TempDir,
    binary: PathBuf,
    bug: Option<Bug>,
    coverage: &'p Coverage,
    odd: Vec<String>,
    history: Arc<History>,
    random: Random,
}

/// What happens to a node, or to what it stands on.
enum Blow {
    Kill,
    Cut,
    Server,
    Redis,
}

impl<'p> Cluster<'p> {
    /// A new server, database and Redis. `bug` needs a binary that can make it.
    pub async fn new(binary: &Path, coverage: &'p Coverage, bug: Option<Bug>, seed: u64) -> Self {
        let server = Server::start(&[]);
        let (redis, inbox) = (Redis::start(&[]), Inbox::start().await);
        let proxy = ChaosProxy::start(server.port());
        let directory = tempfile::tempdir().unwrap();
        let database = server.database_of(directory.path());
        database.query(TABLES);
        let config = CONFIG.replace("sqlite://journal.db", &database.url_at(proxy.port()));
        let dedup = format!("\n[dedup]\nredis = \"{}\"\n", redis.url());
        prepare(directory.path(), &[&config, &dedup, ORDERS, SHIPMENTS, &mails(&inbox)].concat());
        Self {
            server,
            redis,
            proxy,
            inbox,
            directory,
            binary: binary.to_path_buf(),
            bug,
            coverage,
            odd: Vec::new(),
            history: History::new(Manners::default()),
            random: Random::new(seed),
        }
    }

    fn start(&mut self, environment: &[(&str, String)]) -> Option<Gateway> {
        let mut command = Command::new(&self.binary);
        command.args(["serve", "--lease", "1500"]);
        command.envs(environment.iter().map(|(name, value)| (name, value)));
        if let Some(bug) = self.bug {
            command.env("ONCEHOOK_PLANTED", bug.name());
        }
        match Gateway::try_start(command, self.directory.path()) {
            Ok(gateway) => Some(gateway),
            Err(log) => {
                self.odd.push(format!("a node does not start: {}", log.lines().last().unwrap_or("")));
                None
            }
        }
    }

    /// Kills one of two nodes under load, so many times; in between connections are cut, and Redis and the server crash.
    pub async fn kills(&mut self, count: usize) {
        let (Some(first), Some(second)) = (self.start(&[]), self.start(&[])) else { return };
        let mut nodes = [first, second];
        let mut sending: Vec<Option<Sending>> =
            nodes.iter().map(|node| Some(self.history.send(&[node.ingress], 5, &mut self.random))).collect();
        let mut blows = Vec::new();
        for number in 0..count {
            blows.push(Blow::Kill);
            match number % 8 {
                1 | 5 => blows.push(Blow::Cut),
                3 => blows.push(Blow::Redis),
                6 => blows.push(Blow::Server),
                _ => {}
            }
        }
        for blow in blows {
            tokio::time::sleep(Duration::from_millis(100 + self.random.below(400))).await;
            match blow {
                Blow::Kill => {
                    let place = self.random.below(2) as usize;
                    nodes[place].kill();
                    if let Some(sending) = sending[place].take() {
                        sending.finish().await;
                    }
                    let Some(node) = self.start(&[]) else { return };
                    nodes[place] = node;
                    sending[place] = Some(self.history.send(&[nodes[place].ingress], 5, &mut self.random));
                    self.coverage.add("nodes killed", 1);
                }
                Blow::Cut => {
                    self.proxy.cut(Cut::Reset);
                    self.coverage.add("connections to the database cut", 1);
                }
                Blow::Redis => {
                    self.redis.stop();
                    tokio::time::sleep(Duration::from_millis(300)).await;
                    self.redis.restart();
                    self.coverage.add("Redis restarted", 1);
                }
                Blow::Server => {
                    tokio::task::block_in_place(|| {
                        self.server.crash();
                        std::thread::sleep(Duration::from_millis(300));
                        self.server.restart();
                    });
                    self.coverage.add("database server crashed", 1);
                }
            }
        }
        for sending in sending.into_iter().flatten() {
            sending.finish().await;
        }
    }

    /// Kills a node between hearing of events and storing them, so many times; their senders go to the other node.
    pub async fn kills_before_the_insert(&mut self, count: usize) {
        let Some(other) = self.start(&[]) else { return };
        for _ in 0..count {
            let passing = 1 + self.random.below(10);
            let armed = [("ONCEHOOK_CRASH_POINT", format!("before_insert:{passing}"))];
            let Some(mut node) = self.start(&armed) else { return };
            let sending = self.history.send(&[node.ingress], 8, &mut self.random);
            tokio::task::block_in_place(|| node.wait(Duration::from_secs(60)));
            sending.finish().await;
            self.coverage.add("nodes killed before the insert", 1);
            for key in self.history.unpromised() {
                if !self.history.insist(other.ingress, &key, DRAIN).await {
                    self.odd.push(format!("{key} is not accepted by the other node"));
                }
            }
        }
    }

    /// Starts one node, waits until nothing is pending, and compares.
    pub async fn end(mut self) -> Tally {
        if let Some(mut node) = self.start(&[]) {
            let end = Instant::now() + DRAIN;
            let pending =
                "SELECT count(*) FROM oncehook.deliveries WHERE state IN ('ready', 'running', 'retrying')";
            loop {
                let left = tokio::task::block_in_place(|| self.query(pending)).concat();
                if left == "0" {
                    break;
                }
                if Instant::now() > end {
                    self.odd.push(format!("{left} deliveries are still pending after {} s", DRAIN.as_secs()));
                    break;
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            if !node.stop().success() {
                self.odd.push("a node does not stop in good order".to_owned());
            }
        }
        let heard = self.history.heard();
        let facts = tokio::task::block_in_place(|| self.facts());
        self.coverage.add("duplicates answered", heard.duplicates);
        self.coverage.add("senders that hung up", heard.hung_up);
        let mut tally = audit(&heard, &facts);
        tally.odd.append(&mut self.odd);
        tally
    }

    fn query(&self, sql: &str) -> Vec<String> {
        let database = self.server.database_of(self.directory.path());
        database.query(sql).lines().map(str::to_owned).collect()
    }

    fn facts(&self) -> Facts {
        let events =
            self.query("SELECT convert_from(key, 'UTF8'), id, encode(body, 'hex') FROM oncehook.events");
        let read = |line: &String| {
            let mut parts = line.split('|');
            let mut next = || parts.next().unwrap().to_owned();
            let (key, id) = (next(), next());
            (key, id, oncehook_verify::digest(&hex::decode(next()).unwrap()))
        };
        let mut states = BTreeMap::new();
        for line in self.query("SELECT state, count(*) FROM oncehook.deliveries GROUP BY state") {
            let (state, count) = line.split_once('|').unwrap();
            states.insert(state.to_owned(), count.parse().unwrap());
        }
        let unexplained = "SELECT count(*) FROM oncehook.deliveries WHERE state = 'dead' AND (error IS NULL OR cause IS NULL)";
        Facts {
            events: events.iter().map(read).collect(),
            effects: BTreeMap::from([
                ("orders", self.query("SELECT key FROM orders")),
                ("shipments", self.query("SELECT key FROM shipments")),
                ("mails", self.inbox.applied()),
            ]),
            states,
            unexplained: self.query(unexplained).concat().parse().unwrap(),
        }
    }
}
