//! The proof for effects in another database than the journal's: an embedded journal, a PostgreSQL with the shop's tables, and
//! kills between the two commits. The server goes away now and then.
//!
//! Promises: one order and one note per event, and for a route that can never succeed one dead delivery per event, with its
//! reason, which has had no effect.

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rusqlite::Connection;
use tempfile::TempDir;

use super::audit::{Facts, Tally, audit};
use super::coverage::Coverage;
use super::embedded::DRAIN;
use super::history::{History, Manners};
use crate::gateway::{CONFIG, Gateway, prepare};
use crate::postgres::Server;
use crate::random::Random;

/// The places at which builds for tests can end, and after how many passings at most.
pub const POINTS: [(&str, u64); 3] = [("guard_taken", 20), ("between_commits", 20), ("after_void", 20)];

const TABLES: &str = "CREATE TABLE orders (id serial PRIMARY KEY, key text NOT NULL);
                      CREATE TABLE notes (order_id integer NOT NULL, key text NOT NULL)";

/// Orders and notes, and a route whose deliveries all die at once: what it looks for is in no event.
const ROUTES: &str = r#"
[[route]]
name = "orders"
source = "stripe"
retry = { max_attempts = 100, base = "10ms", cap = "50ms" }
[route.sql]
database = "env:SHOP_DATABASE"
statement = "INSERT INTO orders (key) VALUES (:key) RETURNING id"
bind = { key = "$key" }

[[route]]
name = "notes"
after = "orders"
retry = { max_attempts = 100, base = "10ms", cap = "50ms" }
[route.sql]
database = "env:SHOP_DATABASE"
statement = "INSERT INTO notes (order_id, key) VALUES (:order, :key)"
bind = { order = "$result/id", key = "$key" }

[[route]]
name = "hopeless"
source = "stripe"
retry = { max_attempts = 100, base = "10ms", cap = "50ms" }
[route.sql]
database = "env:SHOP_DATABASE"
statement = "INSERT INTO orders (key) VALUES (:nothing)"
bind = { nothing = "/data/there/is/no/such/thing" }
"#;

/// A shop whose tables are elsewhere.
pub struct Elsewhere<'p> {
    server: Server,
    directory: TempDir,
    binary: PathBuf,
    coverage: &'p Coverage,
    odd: Vec<String>,
    history: Arc<History>,
    random: Random,
}

impl<'p> Elsewhere<'p> {
    /// A new server, and a journal below `place`. The binary must have crash points.
    #[must_use]
    pub fn new(binary: &Path, place: &Path, coverage: &'p Coverage, seed: u64) -> Self {
        let server = Server::start(&[]);
        let directory = tempfile::tempdir_in(place).unwrap();
        server.database_of(directory.path()).query(TABLES);
        prepare(directory.path(), &[CONFIG, ROUTES].concat());
        Self {
            server,
            directory,
            binary: binary.to_path_buf(),
            coverage,
            odd: Vec::new(),
            history: History::new(Manners::default()),
            random: Random::new(seed),
        }
    }

    fn start(&mut self, environment: &[(&str, String)]) -> Option<Gateway> {
        let mut command = Command::new(&self.binary);
        command.args(["serve", "--lease", "1500"]);
        command.env("SHOP_DATABASE", self.server.database_of(self.directory.path()).url());
        command.envs(environment.iter().map(|(name, value)| (name, value)));
        match Gateway::try_start(command, self.directory.path()) {
            Ok(gateway) => Some(gateway),
            Err(log) => {
                self.odd.push(format!("the gateway does not start: {}", log.lines().last().unwrap_or("")));
                None
            }
        }
    }

    /// Kills at a named place, so many times; every third time the server crashes too.
    pub async fn kills_at(&mut self, point: &'static str, passings: u64, count: usize) {
        for number in 0..count {
            let armed = [("ONCEHOOK_CRASH_POINT", format!("{point}:{}", 1 + self.random.below(passings)))];
            let Some(mut gateway) = self.start(&armed) else { return };
            let sending = self.history.send(&[gateway.ingress], 2, &mut self.random);
            let ended = tokio::task::block_in_place(|| gateway.ended_within(Duration::from_secs(60)));
            match ended {
                Some(status) if status.signal() == Some(9) => self.coverage.add("kills at crash points", 1),
                ended => self.odd.push(format!("{point}: it was not killed there, but {ended:?}")),
            }
            gateway.kill();
            sending.finish().await;
            if number % 3 == 2 {
                tokio::task::block_in_place(|| {
                    self.server.crash();
                    self.server.restart();
                });
                self.coverage.add("database server crashed", 1);
            }
        }
    }

    /// Starts it once more, waits until nothing is pending, and compares.
    pub async fn end(mut self) -> Tally {
        // Without a start there is perhaps no journal to ask.
        let Some(mut gateway) = self.start(&[]) else { return Tally { odd: self.odd, ..Tally::default() } };
        let end = Instant::now() + DRAIN;
        loop {
            let left =
                self.number("SELECT count(*) FROM oncehook_deliveries WHERE state IN ('ready', 'running', 'retrying')");
            if left == 0 {
                break;
            }
            if Instant::now() > end {
                self.odd.push(format!("{left} deliveries are still pending after {} s", DRAIN.as_secs()));
                break;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        if !gateway.stop().success() {
            self.odd.push("it does not stop in good order".to_owned());
        }
        let heard = self.history.heard();
        let facts = tokio::task::block_in_place(|| self.facts());
        let effects: usize = facts.effects.values().map(Vec::len).sum();
        self.coverage.add("effects in another database", effects as u64);
        let dead = facts.states.get("dead").copied().unwrap_or(0);
        self.coverage.add("dead deliveries with a reason", dead - facts.unexplained.min(dead));
        let mut tally = audit(&heard, &facts);
        tally.odd.append(&mut self.odd);
        tally
    }

    fn journal(&self) -> Connection {
        let journal = Connection::open(self.directory.path().join("journal.db")).unwrap();
        journal.busy_timeout(Duration::from_secs(30)).unwrap();
        journal
    }

    fn number(&self, sql: &str) -> u64 {
        self.journal().query_row(sql, [], |row| row.get::<_, i64>(0)).unwrap().unsigned_abs()
    }

    fn facts(&self) -> Facts {
        let journal = self.journal();
        let mut events = journal.prepare("SELECT CAST(key AS TEXT), id, body FROM oncehook_events").unwrap();
        let events = events.query_map([], |row| {
            let (id, body): ([u8; 16], Vec<u8>) = (row.get(1)?, row.get(2)?);
            let id = oncehook::event::EventId::from_bytes(id).to_string();
            Ok((row.get(0)?, id, oncehook_verify::digest(&body)))
        });
        let mut states = journal.prepare("SELECT state, count(*) FROM oncehook_deliveries GROUP BY state").unwrap();
        let states = states.query_map([], |row| Ok((row.get(0)?, row.get::<_, i64>(1)?.unsigned_abs()))).unwrap();
        let shop = self.server.database_of(self.directory.path());
        let keys = |sql: &str| shop.query(sql).lines().map(str::to_owned).collect();
        Facts {
            events: events.unwrap().collect::<Result<_, _>>().unwrap(),
            effects: BTreeMap::from([
                ("orders elsewhere", keys("SELECT key FROM orders")),
                ("notes elsewhere", keys("SELECT n.key FROM notes n JOIN orders o ON o.id = n.order_id")),
            ]),
            states: states.collect::<Result<_, _>>().unwrap(),
            unexplained: self.number(
                "SELECT count(*) FROM oncehook_deliveries WHERE state = 'dead' AND (error IS NULL OR cause IS NULL)",
            ),
            hopeless: true,
            ..Facts::default()
        }
    }
}
