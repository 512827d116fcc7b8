//! A deployment that can be measured: the ceiling, oncehook on a journal with or without Redis, or a peer.
//!
//! Servers are shared by the rows of a run and each row has a database of its own; processes of ours and of peers live as
//! long as their [`Running`].

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::Context as _;

use super::{Plan, family};
use crate::gateway::{CONFIG, Gateway, prepare};
use crate::redis::Redis;
use crate::sender::get;
use crate::{mysql, postgres};

/// Where a gateway keeps its record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Engine {
    /// A file.
    Sqlite,
    /// PostgreSQL.
    Postgres,
    /// MariaDB.
    Mariadb,
}

/// The stacks of `bench/peers`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Peer {
    /// As the usual tutorial has it.
    Tutorial,
    /// The same, as fast as it can be made.
    Tuned,
}

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Stack {
    /// The same gateway with an append that returns at once.
    Ceiling,
    /// oncehook.
    Gateway(Engine, bool),
    /// Somebody else's way.
    Peer(Peer),
}

impl Stack {
    /// oncehook as it is by default.
    pub const SQLITE: Self = Self::Gateway(Engine::Sqlite, false);
    /// oncehook on PostgreSQL.
    pub const POSTGRES: Self = Self::Gateway(Engine::Postgres, false);
    /// What the goals compare with.
    pub const TUTORIAL: Self = Self::Peer(Peer::Tutorial);

    /// Every row, the ceiling first.
    #[must_use]
    pub fn all(peers: bool) -> Vec<Self> {
        let mut all = vec![Self::Ceiling];
        for engine in [Engine::Sqlite, Engine::Postgres, Engine::Mariadb] {
            all.extend([Self::Gateway(engine, false), Self::Gateway(engine, true)]);
        }
        if peers {
            all.extend([Self::Peer(Peer::Tutorial), Self::Peer(Peer::Tuned)]);
        }
        all
    }

    /// As the report names it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Ceiling => "ceiling, no storage",
            Self::Gateway(Engine::Sqlite, false) => "SQLite",
            Self::Gateway(Engine::Sqlite, true) => "SQLite + Redis",
            Self::Gateway(Engine::Postgres, false) => "PostgreSQL",
            Self::Gateway(Engine::Postgres, true) => "PostgreSQL + Redis",
            Self::Gateway(Engine::Mariadb, false) => "MariaDB",
            Self::Gateway(Engine::Mariadb, true) => "MariaDB + Redis",
            Self::Peer(Peer::Tutorial) => "FastAPI + Celery, tutorial",
            Self::Peer(Peer::Tuned) => "FastAPI + Celery, tuned",
        }
    }

    /// More than it answers in a second; so many are prepared.
    pub(super) fn requests_a_second(self) -> usize {
        match self {
            Self::Ceiling | Self::Gateway(..) => 60_000,
            Self::Peer(_) => 4_000,
        }
    }

    /// Starts it in a fresh directory; `routes` is added to a gateway's configuration.
    pub(super) fn start(self, plan: &Plan, routes: &str) -> anyhow::Result<Running> {
        family::settle();
        let directory = tempfile::tempdir_in(&plan.scratch)?;
        let own = std::env::current_exe()?;
        let (engine, with_redis) = match self {
            Self::Ceiling => {
                prepare(directory.path(), CONFIG);
                let mut command = Command::new(own);
                command.arg("ceiling");
                let gateway = Gateway::start_command(command, directory.path());
                return Ok(Running {
                    process: Process::Gateway(gateway),
                    store: Store::None,
                    _redis: None,
                    _directory: directory,
                });
            }
            Self::Peer(peer) => return start_peer(plan, peer, directory),
            Self::Gateway(engine, redis) => (engine, redis),
        };
        let store = Store::make(engine, directory.path());
        let mut config = CONFIG.replace("sqlite://journal.db", &store.url()) + routes;
        let redis = with_redis.then(|| Redis::start(&[]));
        if let Some(redis) = &redis {
            config.push_str(&format!("\n[dedup]\nredis = \"{}\"\n", redis.url()));
        }
        prepare(directory.path(), &config);
        let binary = plan.binary.clone().unwrap_or_else(|| own.with_file_name("oncehook"));
        let gateway = Gateway::start(&binary, directory.path());
        Ok(Running { process: Process::Gateway(gateway), store, _redis: redis, _directory: directory })
    }
}

/// A deployment that runs. Dropping it ends it.
pub(super) struct Running {
    process: Process,
    store: Store,
    /// These go with the deployment.
    _redis: Option<Redis>,
    _directory: tempfile::TempDir,
}

enum Process {
    Gateway(Gateway),
    Peer { serving: Child, address: SocketAddr },
}

impl Running {
    /// Where webhooks go.
    pub(super) fn address(&self) -> SocketAddr {
        match &self.process {
            Process::Gateway(gateway) => gateway.ingress,
            Process::Peer { address, .. } => *address,
        }
    }

    /// The gateway, if it is one.
    pub(super) fn gateway(&self) -> Option<&Gateway> {
        match &self.process {
            Process::Gateway(gateway) => Some(gateway),
            Process::Peer { .. } => None,
        }
    }

    /// The most memory that the gateway's own process ever had.
    pub(super) fn gateway_memory(&self) -> f64 {
        self.gateway().map_or(0.0, |gateway| gateway.memory("VmHWM") as f64)
    }

    /// How many orders there are.
    pub(super) async fn orders(&self) -> anyhow::Result<usize> {
        match &self.process {
            Process::Gateway(_) => self.store.orders(),
            Process::Peer { address, .. } => {
                let answer = get(*address, "/count").await?;
                let count = answer.json()["orders"].as_u64().context("a count")?;
                Ok(usize::try_from(count)?)
            }
        }
    }

    /// Stops the handling of what is accepted, or lets it go on.
    pub(super) async fn hold(&self, held: bool) {
        match &self.process {
            Process::Gateway(gateway) => {
                let verb = if held { "pause" } else { "resume" };
                let answer = gateway.post(&format!("/api/routes/orders/{verb}"), &serde_json::json!({})).await;
                assert_eq!(answer.status, 200, "{verb}");
            }
            Process::Peer { .. } => {
                let signal = if held { "-STOP" } else { "-CONT" };
                for pid in family::named("celery") {
                    let told = Command::new("kill").args([signal, &pid.to_string()]).status();
                    assert!(told.is_ok_and(|status| status.success()), "kill {signal}");
                }
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let Process::Peer { serving, .. } = &mut self.process else { return };
        // Its input ends, and it takes its processes along.
        drop(serving.stdin.take());
        let _ = serving.wait();
    }
}

/// Where a gateway of ours keeps its record, and the user's orders.
enum Store {
    None,
    Sqlite(PathBuf),
    Postgres(postgres::Database<'static>),
    Mariadb(mysql::Database<'static>),
}

/// The statement of the `orders` route, per engine.
pub(super) fn effect(engine: Engine) -> &'static str {
    match engine {
        Engine::Sqlite | Engine::Postgres => {
            "INSERT INTO orders (payment, amount) VALUES (:payment, :amount) ON CONFLICT (payment) DO NOTHING"
        }
        Engine::Mariadb => {
            "INSERT INTO orders (payment, amount) VALUES (:payment, :amount) ON DUPLICATE KEY UPDATE payment = payment"
        }
    }
}

/// The user's table, per engine.
pub(super) fn orders_table(engine: Engine) -> &'static str {
    match engine {
        Engine::Sqlite => {
            "CREATE TABLE orders (id INTEGER PRIMARY KEY, payment TEXT NOT NULL UNIQUE, amount INTEGER NOT NULL)"
        }
        Engine::Postgres => {
            "CREATE TABLE orders (id bigserial PRIMARY KEY, payment text NOT NULL UNIQUE, amount bigint NOT NULL)"
        }
        Engine::Mariadb => {
            "CREATE TABLE orders (id BIGINT AUTO_INCREMENT PRIMARY KEY, payment VARCHAR(255) NOT NULL UNIQUE, amount BIGINT NOT NULL)"
        }
    }
}

impl Store {
    fn make(engine: Engine, directory: &std::path::Path) -> Self {
        let table = orders_table(engine);
        match engine {
            Engine::Sqlite => {
                let path = directory.join("journal.db");
                // As the gateway makes its file, which it would if the user's table were not there first.
                let made = format!("PRAGMA page_size = 8192; {table}");
                rusqlite::Connection::open(&path).unwrap().execute_batch(&made).unwrap();
                Self::Sqlite(path)
            }
            Engine::Postgres => {
                let database = postgres::Server::shared().database();
                database.query(table);
                Self::Postgres(database)
            }
            Engine::Mariadb => {
                let database = mysql::Server::shared().database();
                database.query(table);
                Self::Mariadb(database)
            }
        }
    }

    fn url(&self) -> String {
        match self {
            Self::None | Self::Sqlite(_) => "sqlite://journal.db".to_owned(),
            Self::Postgres(database) => database.url(),
            Self::Mariadb(database) => database.url(),
        }
    }

    fn orders(&self) -> anyhow::Result<usize> {
        const COUNT: &str = "SELECT count(*) FROM orders";
        Ok(match self {
            Self::None => 0,
            Self::Sqlite(path) => {
                let connection = rusqlite::Connection::open(path)?;
                let last: i64 =
                    connection.query_row("SELECT coalesce(max(id), 0) FROM orders", [], |row| row.get(0))?;
                usize::try_from(last)?
            }
            Self::Postgres(database) => database.query(COUNT).parse()?,
            Self::Mariadb(database) => database.query(COUNT).parse()?,
        })
    }
}

/// Installs what the peers need into an environment of its own.
pub(super) fn install_peers(plan: &Plan) -> anyhow::Result<()> {
    let environment = plan.scratch.join("peers");
    let python = environment.join("bin/python");
    let wanted = plan.repository.join("bench/peers/requirements.txt");
    if !python.exists() {
        told(Command::new("python3").args(["-m", "venv"]).arg(&environment))?;
    }
    eprintln!("installing the peers' packages");
    told(Command::new(&python).args(["-m", "pip", "install", "--quiet", "--requirement"]).arg(wanted))
}

fn told(command: &mut Command) -> anyhow::Result<()> {
    let status = command.status().with_context(|| format!("{command:?}"))?;
    anyhow::ensure!(status.success(), "{command:?} failed");
    Ok(())
}

fn start_peer(plan: &Plan, peer: Peer, directory: tempfile::TempDir) -> anyhow::Result<Running> {
    let variant = match peer {
        Peer::Tutorial => "tutorial",
        Peer::Tuned => "tuned",
    };
    let mut serving = Command::new(plan.scratch.join("peers/bin/python"))
        .arg(plan.repository.join("bench/peers/serve.py"))
        .arg(variant)
        .arg(directory.path().join("stack"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut line = String::new();
    BufReader::new(serving.stdout.take().context("its output")?).read_line(&mut line)?;
    let address =
        line.trim().strip_prefix("ready http://").with_context(|| format!("a peer said {line:?}"))?.parse()?;
    // Celery is ready a little after the receiver.
    std::thread::sleep(Duration::from_secs(3));
    Ok(Running { process: Process::Peer { serving, address }, store: Store::None, _redis: None, _directory: directory })
}
