//! A database that goes away under load, in front of a gateway with a spool: what senders are told is written down, and
//! compared with what is stored and took effect in the end.
//!
//! Every sender has an entity of its own and sends one event after the other, so whatever order the journal ends up with can be
//! compared with the order in which events were answered.
//!
//! [`run`] is one outage from beginning to end, at any size: a test runs a small one, `layers outage` the one that is asked for.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::task::{JoinHandle, block_in_place};

use crate::gateway::{Gateway, SECRET, now, prepare};
use crate::postgres::{Database, Server};
use crate::promises::assert_is_unavailable;
use crate::sender::{Answer, Provider, Wire};

/// Two sources of the same provider: one with a spool, one whose provider sends again. The table of effects has no key.
pub const CONFIG: &str = r#"
[server]
ingress = "127.0.0.1:0"
admin = "127.0.0.1:0"

[journal]
url = "env:SHOP_DATABASE"

[spool]
path = "spool.db"
after = "1s"

[[source]]
name = "stripe"
provider = "stripe"
secrets = ["file:stripe.secret"]
on_outage = "spool"

[[source]]
name = "plain"
provider = "stripe"
secrets = ["file:stripe.secret"]

[[route]]
name = "orders"
source = "stripe"
[route.sql]
statement = "INSERT INTO orders (key) VALUES (:key)"
bind = { key = "$key" }
"#;

/// The user's table.
pub const SHOP: &str = "CREATE TABLE orders (id bigserial PRIMARY KEY, key text NOT NULL)";

/// Starts a gateway in a directory with this configuration.
#[must_use]
pub fn serve(binary: &Path, url: &str, directory: &Path, config: &str, environment: &[(&str, &str)]) -> Gateway {
    prepare(directory, config);
    let mut command = Command::new(binary);
    command.arg("serve").env("SHOP_DATABASE", url).envs(environment.iter().copied());
    Gateway::start_command(command, directory)
}

/// A signed event about an entity.
#[must_use]
pub fn request(source: &str, key: &str, entity: &str) -> Vec<u8> {
    let body = format!(
        r#"{{"id":"{key}","object":"event","created":1700000000,"type":"payment_intent.succeeded","data":{{"object":{{"id":"{entity}"}}}},"padding":"{}"}}"#,
        "x".repeat(700)
    );
    Provider::new("stripe", SECRET, source).request(&Default::default(), body.as_bytes(), key, now())
}

/// What senders were told: ids, by key. A key that was spooled may have been told under another id than the journal gave.
#[derive(Default)]
pub struct Told {
    by_key: Mutex<HashMap<String, BTreeSet<String>>>,
    /// By sender: the number of its next event.
    sent: Mutex<BTreeMap<usize, u64>>,
    statuses: Mutex<BTreeMap<u16, u64>>,
    took: Mutex<Vec<Duration>>,
}

/// Senders at work.
pub struct Sending {
    stop: Arc<AtomicBool>,
    connections: Vec<JoinHandle<()>>,
}

impl Sending {
    /// Lets every sender hear its last answer.
    pub async fn finish(self) {
        self.stop.store(true, Ordering::Relaxed);
        for connection in self.connections {
            connection.await.unwrap();
        }
    }
}

impl Told {
    /// Takes an answer down. Returns whether it is a promise.
    pub fn record(&self, key: &str, answer: &Answer) -> bool {
        *self.statuses.lock().unwrap().entry(answer.status).or_default() += 1;
        if answer.status != 200 {
            assert_is_unavailable(answer);
            return false;
        }
        let id = answer.json()["event"].as_str().unwrap().to_owned();
        self.by_key.lock().unwrap().entry(key.to_owned()).or_default().insert(id);
        true
    }

    fn next_number(&self, sender: usize) -> u64 {
        let mut sent = self.sent.lock().unwrap();
        let next = sent.entry(sender).or_default();
        *next += 1;
        *next - 1
    }

    /// The ids that were told, by key.
    #[must_use]
    pub fn ids(&self) -> HashMap<String, BTreeSet<String>> {
        self.by_key.lock().unwrap().clone()
    }

    /// Answers with this status.
    pub fn of(&self, status: u16) -> u64 {
        self.statuses.lock().unwrap().get(&status).copied().unwrap_or(0)
    }

    /// Keys that were promised.
    #[expect(clippy::len_without_is_empty, reason = "nobody asks whether nothing was promised")]
    pub fn len(&self) -> usize {
        self.by_key.lock().unwrap().len()
    }

    /// Sends over so many connections, so many events a second on all together, until it is over or nobody listens any more. One
    /// event in ten is sent twice.
    pub fn start(self: &Arc<Self>, address: SocketAddr, connections: usize, rate: u64) -> Sending {
        let stop = Arc::new(AtomicBool::new(false));
        let pause = Duration::from_micros(1_000_000 * connections as u64 / rate);
        let send = |sender: usize| {
            let (told, stop) = (Arc::clone(self), Arc::clone(&stop));
            tokio::spawn(async move {
                let Ok(mut wire) = Wire::connect(address).await else { return };
                let mut pace = tokio::time::interval(pause);
                while !stop.load(Ordering::Relaxed) {
                    pace.tick().await;
                    let number = told.next_number(sender);
                    let key = format!("evt_{sender}_{number}");
                    let request = request("stripe", &key, &format!("pi_{sender}"));
                    for _ in 0..=u8::from(number % 10 == 9) {
                        let begun = Instant::now();
                        let Ok(answer) = wire.ask(&request).await else { return };
                        told.took.lock().unwrap().push(begun.elapsed());
                        told.record(&key, &answer);
                    }
                }
            })
        };
        Sending { connections: (0..connections).map(send).collect(), stop }
    }

    /// Every id that was told leads to the event with its key, on every one of these nodes, and all ids of a key to the same.
    pub async fn check_ids(&self, nodes: &[&Gateway], most: usize) {
        let by_key = self.by_key.lock().unwrap().clone();
        for (key, ids) in by_key.iter().take(most) {
            let mut events = BTreeSet::new();
            for (id, node) in ids.iter().flat_map(|id| nodes.iter().map(move |node| (id, node))) {
                let event = node.json(&format!("/api/events/{id}")).await;
                assert_eq!(event["key"].as_str(), Some(key.as_str()), "{id}");
                assert_ne!(event["status"], "spooled", "{key}");
                events.insert(event["id"].as_str().unwrap().to_owned());
            }
            assert_eq!(events.len(), 1, "{key} leads to {events:?}");
        }
    }

    /// Everything that was answered is there, once, in the order of its entity, and took effect once.
    pub fn check(&self, database: &Database<'_>) -> usize {
        let rows = database
            .query("SELECT entity, convert_from(key, 'UTF8') FROM oncehook.events WHERE source = 'stripe' ORDER BY id");
        let mut by_entity: HashMap<&str, Vec<u64>> = HashMap::new();
        let mut stored = BTreeSet::new();
        for (entity, key) in rows.lines().map(|row| row.split_once('|').unwrap()) {
            assert!(stored.insert(key), "{key} is there twice");
            let number = key.rsplit('_').next().unwrap().parse().unwrap();
            by_entity.entry(entity).or_default().push(number);
        }
        let by_key = self.by_key.lock().unwrap();
        let lost: Vec<_> = by_key.keys().filter(|key| !stored.contains(key.as_str())).collect();
        assert!(lost.is_empty(), "{} of {} answered events are lost: {lost:?}", lost.len(), by_key.len());
        for (entity, numbers) in by_entity {
            assert!(numbers.is_sorted(), "{entity} is out of order: {numbers:?}");
        }
        let effects = database.query("SELECT count(*), count(DISTINCT key) FROM orders");
        assert_eq!(effects, format!("{0}|{0}", stored.len()));
        stored.len()
    }
}

/// Waits until the spool of a node is empty. Returns how long that took.
pub async fn emptied(gateway: &Gateway) -> Duration {
    until(gateway, "the spool is empty", async || gateway.json("/readyz").await["spool"]["events"] == 0).await
}

/// Waits until something is so. Returns how long that took.
pub async fn until(gateway: &Gateway, what: &str, mut done: impl AsyncFnMut() -> bool) -> Duration {
    let begun = Instant::now();
    while !done().await {
        assert!(begun.elapsed() < Duration::from_secs(180), "not yet: {what}\n{}", gateway.log());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    begun.elapsed()
}

/// Waits until nothing is pending.
pub async fn worked_off(gateway: &Gateway, database: &Database<'_>) {
    let pending = "SELECT count(*) FROM oncehook.deliveries WHERE state IN ('ready', 'running', 'retrying')";
    until(gateway, "the deliveries are done", async || block_in_place(|| database.query(pending)) == "0").await;
}

/// How long the database is away, and what comes in meanwhile.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// For so long.
    pub seconds: u64,
    /// Events a second.
    pub rate: u64,
    /// From so many senders.
    pub senders: usize,
}

/// What an outage came to. Whatever must hold has been checked already.
#[derive(Debug)]
pub struct Seen {
    /// Events that are stored, and took effect, once each.
    pub stored: usize,
    /// Events a second that were answered while the database was away.
    pub accepted_per_second: f64,
    /// Events that waited in the spool when it came back.
    pub waited: u64,
    /// How long each answer took, sorted: at the source with a spool, while the database was away.
    pub answered: Vec<Duration>,
    /// How long each 503 took, sorted: at the source without a spool.
    pub refused: Vec<Duration>,
    /// From the database's return until the gateway was ready.
    pub ready: Duration,
    /// From then until nothing waited in the spool, under the same load.
    pub emptied: Duration,
}

fn quantile(sorted: &[Duration], quantile: f64) -> Duration {
    let at = (sorted.len().saturating_sub(1) as f64 * quantile) as usize;
    sorted.get(at).copied().unwrap_or_default()
}

impl Seen {
    /// So many of the 503s took no longer.
    #[must_use]
    pub fn refused_within(&self, share: f64) -> Duration {
        quantile(&self.refused, share)
    }
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let answered = |share| quantile(&self.answered, share);
        writeln!(
            f,
            "while it was away: {:.0} events/s accepted, no error; answered in {:?} (p50), {:?} (p99), {:?} (slowest); {} waited at its end",
            self.accepted_per_second,
            answered(0.5),
            answered(0.99),
            answered(1.0),
            self.waited
        )?;
        writeln!(
            f,
            "without a spool: {} times 503, in {:?} (p50), {:?} (p99), {:?} (slowest)",
            self.refused.len(),
            self.refused_within(0.5),
            self.refused_within(0.99),
            self.refused_within(1.0)
        )?;
        write!(
            f,
            "after its return: ready in {:?}, the spool empty in {:?}; {} events stored and applied once each, in order",
            self.ready, self.emptied, self.stored
        )
    }
}

/// Stops PostgreSQL under load, starts it again, and checks that nobody at the source with a spool heard an error, and that
/// everything answered is stored and applied once, in order. Needs a runtime with several threads.
pub async fn run(binary: &Path, plan: &Plan) -> Seen {
    let server = Server::start(&[]);
    let database = server.database();
    database.query(SHOP);
    let directory = tempfile::tempdir().unwrap();
    let gateway = serve(binary, &database.url(), directory.path(), CONFIG, &[]);
    let told = Arc::new(Told::default());
    let sending = told.start(gateway.ingress, plan.senders, plan.rate);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(gateway.json("/readyz").await["status"], "ready");
    let stop = Arc::new(AtomicBool::new(false));
    let prober = tokio::spawn(probe(gateway.ingress, Arc::clone(&stop)));

    let stopped = Instant::now();
    block_in_place(|| server.stop());
    let (before, answers_before) = (told.len(), told.took.lock().unwrap().len());
    until(&gateway, "it notices", async || gateway.json("/readyz").await["status"] == "degraded").await;
    tokio::time::sleep(Duration::from_secs(plan.seconds).saturating_sub(stopped.elapsed())).await;
    let accepted = told.len() - before;
    let away = stopped.elapsed();
    let mut answered = told.took.lock().unwrap()[answers_before..].to_vec();
    let waited = gateway.json("/readyz").await["spool"]["events"].as_u64().unwrap();
    assert!(waited > 0);

    block_in_place(|| server.restart());
    let back = Instant::now();
    until(&gateway, "ready again", async || gateway.json("/readyz").await["status"] == "ready").await;
    let ready = back.elapsed();
    // Still under load.
    emptied(&gateway).await;
    let emptied_after = back.elapsed();
    tokio::time::sleep(Duration::from_secs(1)).await;
    stop.store(true, Ordering::Relaxed);
    let (mut refused, last) = prober.await.unwrap();
    sending.finish().await;
    emptied(&gateway).await;
    worked_off(&gateway, &database).await;
    let statuses = told.statuses.lock().unwrap().clone();
    assert_eq!(statuses.keys().collect::<Vec<_>>(), [&200], "{statuses:?}");
    let stored = told.check(&database);
    assert_eq!(stored, told.len());
    told.check_ids(&[&gateway], 300).await;
    assert!(gateway.metric("oncehook_spooled_total").await >= waited as f64);
    assert_eq!(last, 200, "the source without a spool accepts again");
    answered.sort_unstable();
    refused.sort_unstable();
    Seen {
        stored,
        accepted_per_second: accepted as f64 / away.as_secs_f64(),
        waited,
        answered,
        refused,
        ready,
        emptied: emptied_after,
    }
}

/// Sends an event to the source without a spool every 20 ms. Returns how long each 503 took, and the last status.
async fn probe(ingress: SocketAddr, stop: Arc<AtomicBool>) -> (Vec<Duration>, u16) {
    let mut wire = Wire::connect(ingress).await.unwrap();
    let (mut refused, mut last) = (Vec::new(), 0);
    let mut pace = tokio::time::interval(Duration::from_millis(20));
    pace.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    for number in 0.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        pace.tick().await;
        let request = request("plain", &format!("plain_{number}"), "plain");
        let begun = Instant::now();
        let answer = wire.ask(&request).await.unwrap();
        last = answer.status;
        if last != 200 {
            assert_is_unavailable(&answer);
            refused.push(begun.elapsed());
        }
    }
    (refused, last)
}
