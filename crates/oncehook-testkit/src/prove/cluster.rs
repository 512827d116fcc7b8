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
use crate::mysql;
use crate::postgres;
use crate::random::Random;
use crate::redis::Redis;
use crate::shop::{ORDERS, SHIPMENTS, mails};

/// How long a backlog may take (I6).
const DRAIN: Duration = Duration::from_secs(180);

/// The server that the journal is on.
enum Base {
    Postgres(postgres::Server),
    MariaDb(mysql::Server),
}

/// Which server a cluster stands on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Engine {
    /// PostgreSQL.
    Postgres,
    /// MariaDB.
    MariaDb,
}

/// What is asked of a database, in its own words.
struct Words {
    /// The shop's tables. No unique keys, on purpose.
    tables: &'static str,
    events: &'static str,
    pending: &'static str,
    states: &'static str,
    unexplained: &'static str,
    orders: &'static str,
    shipments: &'static str,
}

const POSTGRES: Words = Words {
    tables: "CREATE TABLE orders (id serial PRIMARY KEY, key text NOT NULL, payment text NOT NULL);
             CREATE TABLE shipments (order_id integer NOT NULL, key text NOT NULL)",
    events: "SELECT convert_from(key, 'UTF8'), id, encode(body, 'hex') FROM oncehook.events",
    pending: "SELECT count(*) FROM oncehook.deliveries WHERE state IN ('ready', 'running', 'retrying')",
    states: "SELECT state, count(*) FROM oncehook.deliveries GROUP BY state",
    unexplained: "SELECT count(*) FROM oncehook.deliveries WHERE state = 'dead' AND (error IS NULL OR cause IS NULL)",
    orders: "SELECT key FROM orders",
    shipments: "SELECT key FROM shipments",
};

const MARIADB: Words = Words {
    tables: "CREATE TABLE orders (id INT AUTO_INCREMENT PRIMARY KEY, `key` VARCHAR(64) NOT NULL, payment VARCHAR(64) NOT NULL);
             CREATE TABLE shipments (order_id INT NOT NULL, `key` VARCHAR(64) NOT NULL)",
    events: "SELECT CAST(`key` AS CHAR), LOWER(HEX(id)), HEX(body) FROM oncehook_events",
    pending: "SELECT count(*) FROM oncehook_deliveries WHERE state IN ('ready', 'running', 'retrying')",
    states: "SELECT state, count(*) FROM oncehook_deliveries GROUP BY state",
    unexplained: "SELECT count(*) FROM oncehook_deliveries WHERE state = 'dead' AND (error IS NULL OR cause IS NULL)",
    orders: "SELECT `key` FROM orders",
    shipments: "SELECT `key` FROM shipments",
};

/// The route to `orders` where an insert returns nothing, and the one that follows it.
const MARIADB_ROUTES: &str = r#"
[[route]]
name = "orders"
source = "stripe"
retry = { max_attempts = 3, base = "20ms", cap = "100ms" }
[route.sql]
statement = "INSERT INTO orders (`key`, payment) VALUES (:key, :payment); SELECT LAST_INSERT_ID() AS id"
bind = { key = "$key", payment = "/data/object/id" }

[[route]]
name = "shipments"
after = "orders"
retry = { max_attempts = 3, base = "20ms", cap = "100ms" }
[route.sql]
statement = "INSERT INTO shipments (order_id, `key`) VALUES (:order, :key)"
bind = { key = "$key", order = "$result/id" }
"#;

impl Base {
    fn start(engine: Engine) -> Self {
        match engine {
            Engine::Postgres => Self::Postgres(postgres::Server::start(&[])),
            Engine::MariaDb => Self::MariaDb(mysql::Server::start(&[])),
        }
    }

    fn words(&self) -> &'static Words {
        match self {
            Self::Postgres(_) => &POSTGRES,
            Self::MariaDb(_) => &MARIADB,
        }
    }

    fn routes(&self) -> String {
        match self {
            Self::Postgres(_) => [ORDERS, SHIPMENTS].concat(),
            Self::MariaDb(_) => MARIADB_ROUTES.to_owned(),
        }
    }

    fn port(&self) -> u16 {
        match self {
            Self::Postgres(server) => server.port(),
            Self::MariaDb(server) => server.port(),
        }
    }

    fn url_at(&self, directory: &Path, port: u16) -> String {
        match self {
            Self::Postgres(server) => server.database_of(directory).url_at(port),
            Self::MariaDb(server) => server.database_of(directory).url_at(port),
        }
    }

    fn query(&self, directory: &Path, sql: &str) -> String {
        match self {
            Self::Postgres(server) => server.database_of(directory).query(sql),
            Self::MariaDb(server) => server.database_of(directory).query(sql),
        }
    }

    fn crash_and_restart(&self) {
        match self {
            Self::Postgres(server) => {
                server.crash();
                std::thread::sleep(AWAY);
                server.restart();
            }
            Self::MariaDb(server) => {
                server.crash();
                std::thread::sleep(AWAY);
                server.restart();
            }
        }
    }
}

/// How long a server is away.
const AWAY: Duration = Duration::from_millis(300);

/// Two nodes and what they stand on.
pub struct Cluster<'p> {
    base: Base,
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
    pub async fn new(
        engine: Engine,
        binary: &Path,
        coverage: &'p Coverage,
        bug: Option<Bug>,
        seed: u64,
    ) -> Self {
        let base = Base::start(engine);
        let (redis, inbox) = (Redis::start(&[]), Inbox::start().await);
        let proxy = ChaosProxy::start(base.port());
        let directory = tempfile::tempdir().unwrap();
        base.query(directory.path(), base.words().tables);
        let url = base.url_at(directory.path(), proxy.port());
        let config = CONFIG.replace("sqlite://journal.db", &url);
        let dedup = format!("\n[dedup]\nredis = \"{}\"\n", redis.url());
        prepare(directory.path(), &[config, dedup, base.routes(), mails(&inbox)].concat());
        Self {
            base,
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
                    tokio::task::block_in_place(|| self.base.crash_and_restart());
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
            loop {
                let left = tokio::task::block_in_place(|| self.query(self.base.words().pending)).concat();
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
        self.base.query(self.directory.path(), sql).lines().map(str::to_owned).collect()
    }

    fn facts(&self) -> Facts {
        let words = self.base.words();
        let events = self.query(words.events);
        let read = |line: &String| {
            let mut parts = line.split('|');
            let mut next = || parts.next().unwrap().to_owned();
            let (key, id) = (next(), uuid(&next()));
            (key, id, oncehook_verify::digest(&hex::decode(next()).unwrap()))
        };
        let mut states = BTreeMap::new();
        for line in self.query(words.states) {
            let (state, count) = line.split_once('|').unwrap();
            states.insert(state.to_owned(), count.parse().unwrap());
        }
        Facts {
            events: events.iter().map(read).collect(),
            effects: BTreeMap::from([
                ("orders", self.query(words.orders)),
                ("shipments", self.query(words.shipments)),
                ("mails", self.inbox.applied()),
            ]),
            states,
            unexplained: self.query(words.unexplained).concat().parse().unwrap(),
        }
    }
}

/// An id as it is answered, from plain hexadecimal or from itself.
fn uuid(id: &str) -> String {
    let bytes: [u8; 16] = hex::decode(id.replace('-', "")).unwrap().try_into().unwrap();
    oncehook::event::EventId::from_bytes(bytes).to_string()
}
