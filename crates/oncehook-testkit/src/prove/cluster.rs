//! The proof on a server database: two nodes, Redis beside them, and proxies in between; all of them go away now and then.
//!
//! Promises: as on the embedded journal, whatever is odd is taken down and told at the [end](Cluster::end). Does not: move the clock of
//! the server, which is the one that leases are measured by.

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use oncehook::planted::Bug;
use tempfile::TempDir;

use super::audit::{Facts, Tally, audit};
use super::coverage::Coverage;
use super::disk::{Disk, Shim};
use super::history::{History, Manners, Sending};
use crate::chaos_proxy::{ChaosProxy, Cut};
use crate::days;
use crate::gateway::{CONFIG, Gateway, now, prepare};
use crate::inbox::Inbox;
use crate::mysql;
use crate::postgres;
use crate::random::Random;
use crate::redis::Redis;
use crate::shop::{ORDERS, SHIPMENTS, mails};

/// How long a backlog may take (I6).
const DRAIN: Duration = Duration::from_secs(180);

/// Memory that a node may take (I7).
const MEMORY: u64 = 256 << 20;

/// Longer than the leases that nodes are given.
const FROZEN: Duration = Duration::from_millis(2_500);

/// How far a node's clock goes wrong: less than a signature may be old, far more than a lease.
const ASTRAY: i64 = 200;

/// The places at which builds for tests can end, and after how many passings at most.
pub const POINTS: [(&str, u64); 6] = [
    ("before_insert", 15),
    ("after_commit", 15),
    ("in_handler", 20),
    ("after_effect", 20),
    ("in_follow_up", 20),
    ("before_settle", 10),
];

/// The place that a node on PostgreSQL passes when it drops a day.
pub const DAY_POINTS: [(&str, u64); 1] = [("day_dropped", 1)];

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
    /// A route to `orders` that returns nothing.
    plain: &'static str,
    events: &'static str,
    pending: &'static str,
    states: &'static str,
    unexplained: &'static str,
    orders: &'static str,
    shipments: &'static str,
    lost: &'static str,
    /// How many copies memory, Redis and the journal knew.
    layers: &'static str,
}

macro_rules! plain {
    ($key:literal) => {
        concat!(
            "\n[[route]]\nname = \"orders\"\nsource = \"stripe\"\n[route.sql]\nstatement = \"INSERT INTO orders (",
            $key,
            ", payment) VALUES (:key, :payment)\"\nbind = { key = \"$key\", payment = \"/data/object/id\" }\n"
        )
    };
}

const POSTGRES: Words = Words {
    tables: "CREATE TABLE orders (id serial PRIMARY KEY, key text NOT NULL, payment text NOT NULL);
             CREATE TABLE shipments (order_id integer NOT NULL, key text NOT NULL)",
    plain: plain!("key"),
    events: "SELECT convert_from(key, 'UTF8'), id, encode(body, 'hex') FROM oncehook.events",
    pending: "SELECT count(*) FROM oncehook.deliveries WHERE state IN ('ready', 'running', 'retrying')",
    states: "SELECT state, count(*) FROM oncehook.deliveries GROUP BY state",
    unexplained: "SELECT count(*) FROM oncehook.deliveries WHERE state = 'dead' AND (error IS NULL OR cause IS NULL)",
    orders: "SELECT key FROM orders",
    shipments: "SELECT key FROM shipments",
    lost: "SELECT count(*) FROM oncehook.attempts WHERE outcome = 'lost'",
    layers: "SELECT coalesce(sum(memory), 0), coalesce(sum(redis), 0), coalesce(sum(journal), 0) FROM oncehook.duplicates",
};

const MARIADB: Words = Words {
    tables: "CREATE TABLE orders (id INT AUTO_INCREMENT PRIMARY KEY, `key` VARCHAR(64) NOT NULL, payment VARCHAR(64) NOT NULL);
             CREATE TABLE shipments (order_id INT NOT NULL, `key` VARCHAR(64) NOT NULL)",
    plain: plain!("`key`"),
    events: "SELECT CAST(`key` AS CHAR), LOWER(HEX(id)), HEX(body) FROM oncehook_events",
    pending: "SELECT count(*) FROM oncehook_deliveries WHERE state IN ('ready', 'running', 'retrying')",
    states: "SELECT state, count(*) FROM oncehook_deliveries GROUP BY state",
    unexplained: "SELECT count(*) FROM oncehook_deliveries WHERE state = 'dead' AND (error IS NULL OR cause IS NULL)",
    orders: "SELECT `key` FROM orders",
    shipments: "SELECT `key` FROM shipments",
    lost: "SELECT count(*) FROM oncehook_attempts WHERE outcome = 'lost'",
    layers: "SELECT coalesce(sum(memory), 0), coalesce(sum(redis), 0), coalesce(sum(journal), 0) FROM oncehook_duplicates",
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

    fn crash(&self) {
        match self {
            Self::Postgres(server) => server.crash(),
            Self::MariaDb(server) => server.crash(),
        }
    }

    fn restart(&self) {
        match self {
            Self::Postgres(server) => server.restart(),
            Self::MariaDb(server) => server.restart(),
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
        self.crash();
        std::thread::sleep(AWAY);
        self.restart();
    }
}

/// How long a server is away.
const AWAY: Duration = Duration::from_millis(300);

/// Two nodes and what they stand on.
pub struct Cluster<'p> {
    base: Base,
    redis: Redis,
    proxy: ChaosProxy,
    /// In front of Redis.
    side: ChaosProxy,
    /// For their clocks only: nodes keep nothing on disk.
    disks: [Disk; 2],
    inbox: Inbox,
    directory: TempDir,
    binary: PathBuf,
    bug: Option<Bug>,
    /// There is one route, to `orders`, whose statement returns nothing and which nothing follows.
    plain: bool,
    coverage: &'p Coverage,
    odd: Vec<String>,
    history: Arc<History>,
    random: Random,
}

/// What happens to a node, or to what it stands on.
#[derive(Clone, Copy)]
enum Blow {
    Cut,
    Freeze,
    Clock,
    Server,
    Redis,
    RedisCut,
    RedisFreeze,
}

/// What happens after so many kills, beside the next one.
const BLOWS: [Blow; 12] = [
    Blow::Cut,
    Blow::Server,
    Blow::Redis,
    Blow::Freeze,
    Blow::Clock,
    Blow::RedisCut,
    Blow::Cut,
    Blow::RedisFreeze,
    Blow::Freeze,
    Blow::Server,
    Blow::Clock,
    Blow::Redis,
];

impl<'p> Cluster<'p> {
    /// A new server, database and Redis. `bug` needs a binary that can make it.
    pub async fn new(
        engine: Engine,
        binary: &Path,
        place: &Path,
        shim: &Shim,
        coverage: &'p Coverage,
        bug: Option<Bug>,
        seed: u64,
    ) -> Self {
        let base = Base::start(engine);
        let (redis, inbox) = (Redis::start(&[]), Inbox::start().await);
        let (proxy, side) = (ChaosProxy::start(base.port()), ChaosProxy::start(redis.port()));
        let directory = tempfile::tempdir_in(place).unwrap();
        let disks = [shim.disk(directory.path()), shim.disk(directory.path())];
        base.query(directory.path(), base.words().tables);
        let url = base.url_at(directory.path(), proxy.port());
        let config = CONFIG.replace("sqlite://journal.db", &url);
        let dedup = format!("\n[dedup]\nredis = \"redis://127.0.0.1:{}\"\n", side.port());
        prepare(directory.path(), &[config, dedup, base.routes(), mails(&inbox)].concat());
        Self {
            base,
            redis,
            proxy,
            side,
            disks,
            inbox,
            directory,
            binary: binary.to_path_buf(),
            bug,
            plain: false,
            coverage,
            odd: Vec::new(),
            history: History::new(Manners::default()),
            random: Random::new(seed),
        }
    }

    /// Senders that behave otherwise.
    #[must_use]
    pub fn with_manners(mut self, manners: Manners) -> Self {
        self.history = History::new(manners);
        self
    }

    /// Only orders, by a statement that returns nothing: a journal may settle such before it runs them.
    #[must_use]
    pub fn with_plain_orders(mut self) -> Self {
        self.plain = true;
        let url = self.base.url_at(self.directory.path(), self.proxy.port());
        prepare(
            self.directory.path(),
            &[&CONFIG.replace("sqlite://journal.db", &url), self.base.words().plain].concat(),
        );
        self
    }

    /// Starts the node in one of the two places.
    fn start(&mut self, place: usize, environment: &[(&str, String)]) -> Option<Gateway> {
        let mut command = Command::new(&self.binary);
        command.args(["serve", "--lease", "1500"]);
        self.disks[place].hold(&mut command);
        command.envs(environment.iter().map(|(name, value)| (name, value)));
        if let Some(bug) = self.bug {
            command.env("ONCEHOOK_PLANTED", bug.as_str());
        }
        match Gateway::try_start(command, self.directory.path()) {
            Ok(gateway) => Some(gateway),
            Err(log) => {
                self.odd.push(format!("a node does not start: {}", log.lines().last().unwrap_or("")));
                None
            }
        }
    }

    /// Kills one of two nodes under load, so many times; in between nodes are frozen and their clocks go wrong, connections are
    /// cut, and Redis and the server crash.
    pub async fn kills(&mut self, count: usize) {
        let (Some(first), Some(second)) = (self.start(0, &[]), self.start(1, &[])) else { return };
        let mut nodes = [first, second];
        let mut sending: Vec<Option<Sending>> =
            nodes.iter().map(|node| Some(self.history.send(&[node.ingress], 5, &mut self.random))).collect();
        for number in 0..count {
            let place = self.random.below(2) as usize;
            self.pause().await;
            nodes[place].kill();
            if let Some(sending) = sending[place].take() {
                sending.finish().await;
            }
            let Some(node) = self.start(place, &[]) else { return };
            nodes[place] = node;
            sending[place] = Some(self.history.send(&[nodes[place].ingress], 5, &mut self.random));
            self.coverage.add("nodes killed", 1);
            // Two kills, one other blow.
            if number % 2 == 1 {
                self.pause().await;
                let place = self.random.below(2) as usize;
                self.strike(BLOWS[number / 2 % BLOWS.len()], place, &nodes[place]).await;
            }
        }
        for sending in sending.into_iter().flatten() {
            sending.finish().await;
        }
        for node in &nodes {
            let most = node.memory("VmHWM");
            if most > MEMORY {
                self.odd.push(format!("a node took {} MB of memory", most >> 20));
            }
        }
    }

    async fn pause(&mut self) {
        tokio::time::sleep(Duration::from_millis(50 + self.random.below(300))).await;
    }

    async fn strike(&mut self, blow: Blow, place: usize, node: &Gateway) {
        let what = match blow {
            Blow::Cut => {
                self.proxy.cut(Cut::Reset);
                "connections to the database cut"
            }
            Blow::Freeze => {
                node.signal("STOP");
                tokio::time::sleep(FROZEN).await;
                node.signal("CONT");
                "nodes frozen past a lease"
            }
            Blow::Clock => {
                // The other one's is right, or wrong the other way.
                let astray = if self.random.below(2) == 0 { ASTRAY } else { -ASTRAY };
                self.disks[place].shift_clock(astray);
                "clocks of nodes moved"
            }
            Blow::Redis => {
                self.redis.stop();
                tokio::time::sleep(AWAY).await;
                self.redis.restart();
                "Redis restarted"
            }
            Blow::RedisCut => {
                self.side.cut(Cut::Reset);
                "connections to Redis cut"
            }
            Blow::RedisFreeze => {
                self.redis.freeze();
                tokio::time::sleep(AWAY).await;
                self.redis.thaw();
                "Redis frozen"
            }
            Blow::Server => {
                tokio::task::block_in_place(|| self.base.crash_and_restart());
                "database server crashed"
            }
        };
        self.coverage.add(what, 1);
    }

    /// Kills one node at every named place, so many times each; the other one goes on. Needs a binary with crash points.
    pub async fn kills_at_points(&mut self, count: usize) {
        if matches!(self.base, Base::Postgres(_)) {
            self.kills_behind_dropped_days(count).await;
        }
        let Some(other) = self.start(1, &[]) else { return };
        let sending = self.history.send(&[other.ingress], 2, &mut self.random);
        for (point, passings) in POINTS {
            for _ in 0..count {
                let armed = [("ONCEHOOK_CRASH_POINT", format!("{point}:{}", 1 + self.random.below(passings)))];
                let Some(mut node) = self.start(0, &armed) else { return };
                let sending = self.history.send(&[node.ingress], 4, &mut self.random);
                let ended = tokio::task::block_in_place(|| node.ended_within(Duration::from_secs(60)));
                match ended {
                    Some(status) if status.signal() == Some(9) => {
                        self.coverage.add("nodes killed at crash points", 1);
                    }
                    ended => self.odd.push(format!("{point}: it was not killed there, but {ended:?}")),
                }
                node.kill();
                sending.finish().await;
            }
        }
        sending.finish().await;
    }

    /// Kills a node that has dropped a day of old events and has not swept behind it, so many times; the next one does.
    async fn kills_behind_dropped_days(&mut self, count: usize) {
        let Some(mut node) = self.start(0, &[]) else { return };
        let today = now().0 / days::DAY;
        for number in 0..count {
            node.kill();
            let day = today - 40 - i64::try_from(number).unwrap();
            let believe = days::believe_clock().to_owned();
            let planting = [believe, days::make(day), days::plant(day, days::FEW + 1)];
            tokio::task::block_in_place(|| planting.iter().for_each(|sql| drop(self.query(sql))));
            for (point, passings) in DAY_POINTS {
                let armed = [("ONCEHOOK_CRASH_POINT", format!("{point}:{passings}"))];
                let Some(mut node) = self.start(0, &armed) else { return };
                match tokio::task::block_in_place(|| node.ended_within(Duration::from_secs(60))) {
                    Some(status) if status.signal() == Some(9) => {
                        self.coverage.add("nodes killed at crash points", 1);
                    }
                    ended => self.odd.push(format!("{point}: it was not killed there, but {ended:?}")),
                }
            }
            let Some(next) = self.start(0, &[]) else { return };
            node = next;
        }
        let end = Instant::now() + DRAIN;
        loop {
            let left = tokio::task::block_in_place(|| self.query(&days::left_over())).join(", ");
            if left.is_empty() {
                break;
            }
            if Instant::now() > end {
                self.odd.push(format!("behind dropped days there is still {left}"));
                break;
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        node.kill();
    }

    /// Load on one node and nothing else, for a while.
    pub async fn calm(&mut self, time: Duration) {
        let Some(node) = self.start(0, &[]) else { return };
        let sending = self.history.send(&[node.ingress], 12, &mut self.random);
        tokio::time::sleep(time).await;
        sending.finish().await;
    }

    /// Kills the only node under load, so many times. With `server` the database server crashes first.
    pub async fn crashes(&mut self, server: bool, count: usize) {
        for _ in 0..count {
            let Some(mut node) = self.start(0, &[]) else { return };
            let sending = self.history.send(&[node.ingress], 12, &mut self.random);
            tokio::time::sleep(Duration::from_millis(800 + self.random.below(400))).await;
            if server {
                tokio::task::block_in_place(|| self.base.crash());
            }
            node.kill();
            sending.finish().await;
            if server {
                tokio::task::block_in_place(|| self.base.restart());
            }
            self.coverage.add(if server { "database server crashed" } else { "nodes killed" }, 1);
        }
    }

    /// Kills the only node at a named place, so many times. Needs a binary with crash points.
    pub async fn kills_at(&mut self, point: &str, passings: u64, count: usize) {
        for _ in 0..count {
            let armed = [("ONCEHOOK_CRASH_POINT", format!("{point}:{}", 1 + self.random.below(passings)))];
            let Some(mut node) = self.start(0, &armed) else { return };
            let sending = self.history.send(&[node.ingress], 12, &mut self.random);
            match tokio::task::block_in_place(|| node.ended_within(Duration::from_secs(60))) {
                Some(status) if status.signal() == Some(9) => self.coverage.add("nodes killed at crash points", 1),
                ended => self.odd.push(format!("{point}: it was not killed there, but {ended:?}")),
            }
            node.kill();
            sending.finish().await;
        }
    }

    /// Many copies of each of so many new events, all at the same moment, half of them at each node.
    pub async fn races(&mut self, events: usize, copies: usize) {
        let (Some(first), Some(second)) = (self.start(0, &[]), self.start(1, &[])) else { return };
        for _ in 0..events {
            self.history.race(&[first.ingress, second.ingress], copies).await;
            self.coverage.add("races", 1);
        }
    }

    /// Kills a node between hearing of events and storing them, so many times; their senders go to the other node.
    pub async fn kills_before_the_insert(&mut self, count: usize) {
        let Some(other) = self.start(1, &[]) else { return };
        for _ in 0..count {
            let passing = 1 + self.random.below(10);
            let armed = [("ONCEHOOK_CRASH_POINT", format!("before_insert:{passing}"))];
            let Some(mut node) = self.start(0, &armed) else { return };
            let sending = self.history.send(&[node.ingress], 8, &mut self.random);
            if tokio::task::block_in_place(|| node.ended_within(Duration::from_secs(60))).is_none() {
                self.odd.push("it did not come to the insert in 60 s".to_owned());
                node.kill();
            }
            sending.finish().await;
            self.coverage.add("nodes killed at crash points", 1);
            for key in self.history.unpromised() {
                if !self.history.insist(other.ingress, &key, DRAIN).await {
                    self.odd.push(format!("{key} is not accepted by the other node"));
                }
            }
        }
    }

    /// Starts one node, waits until nothing is pending, and compares.
    pub async fn end(mut self) -> Tally {
        self.disks.iter().for_each(|disk| disk.shift_clock(0));
        if let Some(mut node) = self.start(0, &[]) {
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
        self.coverage.note("conflicts answered", heard.conflicts);
        self.coverage.add("senders that hung up", heard.hung_up);
        self.coverage.note("answers cut off", heard.cut);
        self.coverage.note("answers 503", heard.refused);
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
        let number = |text: &str| text.parse::<u64>().unwrap();
        self.coverage.note("attempts that ended with their process", number(&self.query(words.lost).concat()));
        let layers = self.query(words.layers).concat();
        let names = ["duplicates that memory knew", "duplicates that Redis knew", "duplicates that the journal knew"];
        names.into_iter().zip(layers.split('|')).for_each(|(name, count)| self.coverage.note(name, number(count)));
        let mut effects = BTreeMap::from([("orders", self.query(words.orders))]);
        if !self.plain {
            effects.extend([("shipments", self.query(words.shipments)), ("mails", self.inbox.applied())]);
        }
        Facts {
            events: events.iter().map(read).collect(),
            effects,
            states,
            unexplained: number(&self.query(words.unexplained).concat()),
            ..Facts::default()
        }
    }
}

/// An id as it is answered, from plain hexadecimal or from itself.
fn uuid(id: &str) -> String {
    let bytes: [u8; 16] = hex::decode(id.replace('-', "")).unwrap().try_into().unwrap();
    oncehook::event::EventId::from_bytes(bytes).to_string()
}
