//! Many nodes on one server database: two that accept, two that work, one for the operator, and somebody who kills one of
//! them every now and then. The same for every engine.
//!
//! Promises: a run ends with every acknowledged event stored under the id that was promised, and with exactly one effect and
//! one follow-up for every stored event; anything else is a panic. The tables of the effects have no keys: whatever
//! happens twice stands there twice.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::gateway::{Gateway, prepare};
use crate::promises::{Answers, Kept, Senders};
use crate::random::Random;
use crate::shop::drained_within;

/// What differs between engines.
pub struct Engine<'e> {
    /// The gateway's program.
    pub binary: &'e str,
    /// The database, as `journal.url` names it.
    pub url: String,
    /// Runs a statement in that database and returns what it gives, as text.
    pub query: Box<dyn Fn(&str) -> String + 'e>,
}

/// How much happens.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// Different events.
    pub events: u64,
    /// How many of a hundred requests bring an event that was sent before.
    pub again: u64,
    /// Connections to each node that accepts.
    pub connections: usize,
    /// How long all live, on average, until one is killed.
    pub peace: Duration,
}

/// What a run came to.
#[derive(Debug)]
pub struct Report {
    /// What was acknowledged and stored.
    pub kept: Kept,
    /// What senders heard.
    pub heard: Answers,
    /// Nodes that were killed.
    pub killed: u32,
    /// How long events were sent.
    pub sending: Duration,
    /// How long it took after the last one until all was done.
    pub draining: Duration,
}

const CONFIG: &str = r#"
[server]
ingress = "127.0.0.1:0"
admin = "127.0.0.1:0"

[journal]
url = "env:NODES_DATABASE"

[[source]]
name = "stripe"
provider = "stripe"
secrets = ["file:stripe.secret"]

[[route]]
name = "orders"
source = "stripe"
[route.sql]
statement = "INSERT INTO orders (payment, event) VALUES (:payment, :event)"
bind = { payment = "/data/object/id", event = "$key" }

[[route]]
name = "notes"
after = "orders"
[route.sql]
statement = "INSERT INTO notes (event) VALUES (:event)"
bind = { event = "$key" }
"#;

const TABLES: [&str; 2] = [
    "CREATE TABLE orders (payment varchar(200) NOT NULL, event varchar(200) NOT NULL)",
    "CREATE TABLE notes (event varchar(200) NOT NULL)",
];

/// Runs the plan and checks everything.
pub async fn run(engine: &Engine<'_>, plan: Plan, random: &mut Random) -> Report {
    let directory = tempfile::tempdir().unwrap();
    prepare(directory.path(), CONFIG);
    for table in TABLES {
        (engine.query)(table);
    }
    let start = |role: &str| node(engine, directory.path(), role);
    let operator = start("admin");
    let mut doors = [start("ingest"), start("ingest")];
    let mut workers = [start("worker"), start("worker")];
    let senders = Senders::new(600, plan.again);
    let begun = Instant::now();
    let mut sending: Vec<_> = doors.iter().map(|door| senders.start(door.ingress, plan.connections, random)).collect();
    let mut heard = Answers::default();
    let mut killed = 0;
    while senders.sent() < plan.events {
        let peace = plan.peace.as_millis() as u64;
        tokio::time::sleep(Duration::from_millis(peace / 2 + random.below(peace.max(1)))).await;
        let place = random.below(2) as usize;
        if random.below(2) == 0 {
            workers[place].kill();
            workers[place] = start("worker");
        } else {
            doors[place].kill();
            doors[place] = start("ingest");
            let anew = senders.start(doors[place].ingress, plan.connections, random);
            heard.add(std::mem::replace(&mut sending[place], anew).finish().await);
        }
        killed += 1;
    }
    for sending in sending {
        heard.add(sending.finish().await);
    }
    let (sending, last) = (begun.elapsed(), Instant::now());
    let dead = drained_within(&operator, Duration::from_secs(300)).await;
    let draining = last.elapsed();
    assert_eq!(dead, 0, "deliveries were given up");
    let kept = senders.promises.check(&operator).await;
    let stored = kept.stored.to_string();
    for count in ["count(*)", "count(DISTINCT event)"] {
        for table in ["orders", "notes"] {
            assert_eq!((engine.query)(&format!("SELECT {count} FROM {table}")), stored, "{count} of {table}");
        }
    }
    let report = Report { kept, heard, killed, sending, draining };
    let answered = report.heard.of(200);
    assert!(report.kept.promised as u64 <= answered && report.killed > 0, "{report:?}");
    report
}

fn node(engine: &Engine<'_>, directory: &Path, role: &str) -> Gateway {
    let mut command = Command::new(engine.binary);
    command.args(["serve", "--role", role]).env("NODES_DATABASE", &engine.url);
    Gateway::start_command(command, directory)
}
