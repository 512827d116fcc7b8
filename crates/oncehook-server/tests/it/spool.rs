//! The spool, in the real program: PostgreSQL goes away and comes back, nodes are killed, disks fill up.
//!
//! Every sender has an entity of its own and sends one event after the other, so whatever order the journal ends up with can be
//! compared with the order in which events were answered.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use oncehook_testkit::chaos_proxy::{ChaosProxy, Direction, Trap};
use oncehook_testkit::gateway::{Gateway, SECRET, now, prepare};
use oncehook_testkit::postgres::{Database, Server};
use oncehook_testkit::promises::assert_is_unavailable;
use oncehook_testkit::random::Random;
use oncehook_testkit::sender::{Answer, Provider, Wire, ask};
use serde_json::json;
use tokio::task::{JoinHandle, block_in_place};

const BINARY: &str = env!("CARGO_BIN_EXE_oncehook");

/// Two sources of the same provider: one with a spool, one whose provider sends again. The table of effects has no key.
const CONFIG: &str = r#"
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

const SHOP: &str = "CREATE TABLE orders (id bigserial PRIMARY KEY, key text NOT NULL)";

fn serve(url: &str, directory: &Path) -> Gateway {
    serve_with(url, directory, CONFIG, &[])
}

fn serve_with(url: &str, directory: &Path, config: &str, environment: &[(&str, &str)]) -> Gateway {
    prepare(directory, config);
    let mut command = Command::new(BINARY);
    command.arg("serve").env("SHOP_DATABASE", url).envs(environment.iter().copied());
    Gateway::start_command(command, directory)
}

/// A signed event about an entity.
fn request(source: &str, key: &str, entity: &str) -> Vec<u8> {
    let body = format!(
        r#"{{"id":"{key}","object":"event","created":1700000000,"type":"payment_intent.succeeded","data":{{"object":{{"id":"{entity}"}}}},"padding":"{}"}}"#,
        "x".repeat(700)
    );
    Provider::new("stripe", SECRET, source).request(&Default::default(), body.as_bytes(), key, now())
}

/// What senders were told: ids, by key. A key that was spooled may have been told under another id than the journal gave.
#[derive(Default)]
struct Told {
    by_key: Mutex<HashMap<String, BTreeSet<String>>>,
    sent: [AtomicU64; 32],
    statuses: Mutex<BTreeMap<u16, u64>>,
    slowest: Mutex<Duration>,
}

struct Sending {
    stop: Arc<AtomicBool>,
    connections: Vec<JoinHandle<()>>,
}

impl Sending {
    async fn finish(self) {
        self.stop.store(true, Ordering::Relaxed);
        for connection in self.connections {
            connection.await.unwrap();
        }
    }
}

impl Told {
    /// Takes an answer down. Returns whether it is a promise.
    fn record(&self, key: &str, answer: &Answer) -> bool {
        *self.statuses.lock().unwrap().entry(answer.status).or_default() += 1;
        if answer.status != 200 {
            assert_is_unavailable(answer);
            return false;
        }
        let id = answer.json()["event"].as_str().unwrap().to_owned();
        self.by_key.lock().unwrap().entry(key.to_owned()).or_default().insert(id);
        true
    }

    fn of(&self, status: u16) -> u64 {
        self.statuses.lock().unwrap().get(&status).copied().unwrap_or(0)
    }

    fn len(&self) -> usize {
        self.by_key.lock().unwrap().len()
    }

    /// Sends over so many connections, so many events a second on all together, until it is over or nobody listens any more. One
    /// event in ten is sent twice.
    fn start(self: &Arc<Self>, address: SocketAddr, connections: usize, rate: u64) -> Sending {
        let stop = Arc::new(AtomicBool::new(false));
        let pause = Duration::from_micros(1_000_000 * connections as u64 / rate);
        let send = |sender: usize| {
            let (told, stop) = (Arc::clone(self), Arc::clone(&stop));
            tokio::spawn(async move {
                let Ok(mut wire) = Wire::connect(address).await else { return };
                let mut pace = tokio::time::interval(pause);
                while !stop.load(Ordering::Relaxed) {
                    pace.tick().await;
                    let number = told.sent[sender].fetch_add(1, Ordering::Relaxed);
                    let key = format!("evt_{sender}_{number}");
                    let request = request("stripe", &key, &format!("pi_{sender}"));
                    for _ in 0..=u8::from(number % 10 == 9) {
                        let begun = Instant::now();
                        let Ok(answer) = wire.ask(&request).await else { return };
                        let mut slowest = told.slowest.lock().unwrap();
                        *slowest = begun.elapsed().max(*slowest);
                        drop(slowest);
                        told.record(&key, &answer);
                    }
                }
            })
        };
        Sending { connections: (0..connections).map(send).collect(), stop }
    }

    /// Every id that was told leads to the event with its key, on every one of these nodes, and all ids of a key to the same.
    async fn check_ids(&self, nodes: &[&Gateway], most: usize) {
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
    fn check(&self, database: &Database<'_>) -> usize {
        let rows =
            database.query("SELECT entity, convert_from(key, 'UTF8') FROM oncehook.events ORDER BY id");
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
async fn emptied(gateway: &Gateway) -> Duration {
    until(gateway, "the spool is empty", async || gateway.json("/readyz").await["spool"]["events"] == 0).await
}

async fn until(gateway: &Gateway, what: &str, mut done: impl AsyncFnMut() -> bool) -> Duration {
    let begun = Instant::now();
    while !done().await {
        assert!(begun.elapsed() < Duration::from_secs(180), "not yet: {what}\n{}", gateway.log());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    begun.elapsed()
}

/// Waits until nothing is pending.
async fn worked_off(gateway: &Gateway, database: &Database<'_>) {
    let pending = "SELECT count(*) FROM oncehook.deliveries WHERE state IN ('ready', 'running', 'retrying')";
    until(gateway, "the deliveries are done", async || block_in_place(|| database.query(pending)) == "0")
        .await;
}

/// A figure from the environment, for longer runs by hand.
#[expect(clippy::disallowed_methods, reason = "tests are told their size")]
fn figure(name: &str, usual: u64) -> u64 {
    std::env::var(name).map_or(usual, |text| text.parse().unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn r4_postgres_stopped_under_load_is_no_error_at_a_spool_source_and_nothing_is_lost_doubled_or_reordered()
 {
    let (seconds, rate) = (figure("ONCEHOOK_OUTAGE_SECONDS", 3), figure("ONCEHOOK_OUTAGE_RATE", 200));
    let server = Server::start(&[]);
    let database = server.database();
    database.query(SHOP);
    let directory = tempfile::tempdir().unwrap();
    let gateway = serve(&database.url(), directory.path());
    let told = Arc::new(Told::default());
    let sending = told.start(gateway.ingress, 20, rate);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(gateway.json("/readyz").await["status"], "ready");

    block_in_place(|| server.stop());
    let stopped = Instant::now();
    until(&gateway, "it notices", async || gateway.json("/readyz").await["status"] == "degraded").await;
    let mut refusals = Vec::new();
    for number in 0..20 {
        let request = request("plain", &format!("plain_{number}"), "plain");
        let begun = Instant::now();
        assert_is_unavailable(&ask(gateway.ingress, &request).await.unwrap());
        refusals.push(begun.elapsed());
    }
    refusals.sort();
    // The machine may be busy with other tests; most of the time it is not.
    assert!(refusals[10] < Duration::from_millis(50), "{refusals:?}");
    tokio::time::sleep(Duration::from_secs(seconds).saturating_sub(stopped.elapsed())).await;
    let waiting = gateway.json("/readyz").await["spool"]["events"].as_u64().unwrap();
    assert!(waiting > 0);

    block_in_place(|| server.restart());
    let back = Instant::now();
    until(&gateway, "ready again", async || gateway.json("/readyz").await["status"] == "ready").await;
    let ready = back.elapsed();
    // Still under load.
    emptied(&gateway).await;
    let drained = back.elapsed();
    tokio::time::sleep(Duration::from_secs(1)).await;
    sending.finish().await;
    emptied(&gateway).await;
    worked_off(&gateway, &database).await;
    assert_eq!(told.statuses.lock().unwrap().keys().collect::<Vec<_>>(), [&200], "{:?}", told.statuses);
    let stored = told.check(&database);
    assert_eq!(stored, told.len());
    told.check_ids(&[&gateway], 300).await;
    assert!(gateway.metric("oncehook_spooled_total").await >= waiting as f64);
    let again = ask(gateway.ingress, &request("plain", "plain_0", "plain")).await.unwrap();
    assert_eq!(again.status, 200);
    eprintln!(
        "{stored} events, {:?}; {waiting} waited after {seconds} s; refused elsewhere in {:?}; ready again after {ready:?}, empty \
         after {drained:?}; slowest answer {:?}",
        told.statuses.lock().unwrap(),
        refusals[10],
        told.slowest.lock().unwrap(),
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn r4_a_spooled_event_is_shown_before_and_after_it_is_drained_and_an_end_with_a_full_spool_is_told() {
    let database = Server::shared().database();
    database.query(SHOP);
    let proxy = ChaosProxy::start(Server::shared().port());
    let directory = tempfile::tempdir().unwrap();
    let mut gateway = serve(&database.url_at(proxy.port()), directory.path());
    proxy.down();
    until(&gateway, "it notices", async || gateway.json("/readyz").await["status"] == "degraded").await;
    let told = ask(gateway.ingress, &request("stripe", "evt_1", "pi_1")).await.unwrap();
    assert_eq!((told.status, &told.json()["status"]), (200, &json!("accepted")));
    let id = told.json()["event"].as_str().unwrap().to_owned();
    let copy = ask(gateway.ingress, &request("stripe", "evt_1", "pi_1")).await.unwrap();
    assert_eq!((&copy.json()["status"], copy.json()["event"].as_str()), (&json!("duplicate"), Some(&*id)));

    let shown = gateway.json(&format!("/api/events/{id}")).await;
    for (field, value) in [
        ("id", json!(id)),
        ("key", json!("evt_1")),
        ("source", json!("stripe")),
        ("entity", json!("pi_1")),
        ("status", json!("spooled")),
        ("duplicates", json!(1)),
        ("deliveries", json!([])),
    ] {
        assert_eq!(shown[field], value, "{shown}");
    }
    let body = gateway.get(&format!("/api/events/{id}/body")).await.body;
    assert!(String::from_utf8(body).unwrap().contains("\"id\":\"evt_1\""));
    let order = gateway.post(&format!("/api/events/{id}/retry"), &json!({})).await;
    assert_eq!((order.status, &order.json()["error"]["code"]), (409, &json!("spooled")));
    let spool = gateway.json("/readyz").await["spool"].clone();
    assert_eq!(
        (&spool["events"], &spool["alarm"], &spool["failing"]),
        (&json!(1), &json!(false), &json!(null))
    );
    assert_eq!(gateway.metric("oncehook_spool_events").await, 1.0);
    assert!(gateway.metric("oncehook_spool_size_bytes").await > 700.0);
    assert_eq!(gateway.metric("oncehook_ready").await, 0.0);

    // Another process must not have the same file.
    let mut second = Command::new(BINARY);
    second.arg("serve").env("SHOP_DATABASE", database.url());
    let refused = Gateway::try_start(second, directory.path()).err().unwrap();
    assert!(
        refused.contains("open the spool spool.db") && refused.contains("in use by another"),
        "{refused}"
    );

    gateway.signal("TERM");
    let status = block_in_place(|| gateway.wait(Duration::from_secs(90)));
    assert_eq!(status.code(), Some(1), "{}", gateway.log());
    assert!(gateway.log().contains("1 accepted events stay in the spool"), "{}", gateway.log());

    proxy.accept();
    let mut gateway = serve(&database.url_at(proxy.port()), directory.path());
    emptied(&gateway).await;
    worked_off(&gateway, &database).await;
    let shown = gateway.json(&format!("/api/events/{id}")).await;
    assert_eq!(
        (&shown["id"], &shown["status"], &shown["duplicates"]),
        (&json!(id), &json!("succeeded"), &json!(1))
    );
    assert_eq!(database.query("SELECT key FROM orders"), "evt_1");
    assert_eq!(gateway.metric("oncehook_spool_drained_total").await, 1.0);
    assert!(gateway.stop().success(), "{}", gateway.log());
}

/// Both nodes take the key while the database is away. One id becomes the event's, the other one its alias.
#[tokio::test(flavor = "multi_thread")]
async fn r4_r15_two_nodes_spool_one_key_and_both_ids_lead_to_one_event() {
    let database = Server::shared().database();
    database.query(SHOP);
    let proxy = ChaosProxy::start(Server::shared().port());
    let directories = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let url = database.url_at(proxy.port());
    let nodes = [serve(&url, directories[0].path()), serve(&url, directories[1].path())];
    proxy.down();
    let told = Told::default();
    for number in 0..50 {
        let key = format!("evt_{number}");
        for node in &nodes {
            let answer = ask(node.ingress, &request("stripe", &key, "pi")).await.unwrap();
            assert!(told.record(&key, &answer), "{answer:?}");
            assert_eq!(answer.json()["status"], "accepted");
        }
    }
    assert!(told.by_key.lock().unwrap().values().all(|ids| ids.len() == 2));
    proxy.accept();
    for node in &nodes {
        emptied(node).await;
        worked_off(node, &database).await;
    }
    told.check_ids(&[&nodes[0], &nodes[1]], 50).await;
    assert_eq!(told.check(&database), 50);
    // An order reaches the event under either name.
    let ids = told.by_key.lock().unwrap()["evt_7"].clone();
    for (epoch, id) in ids.iter().enumerate() {
        let order = json!({ "force": true, "epoch": epoch + 1, "reason": "r" });
        assert_eq!(nodes[0].post(&format!("/api/events/{id}/replay"), &order).await.status, 200);
    }
    worked_off(&nodes[0], &database).await;
    assert_eq!(database.query("SELECT count(*) FROM orders WHERE key = 'evt_7'"), "3");
    // What is forgotten takes its other names along; what is kept keeps them.
    assert_eq!(database.query("SELECT count(*) FROM oncehook.spool_aliases"), "50");
}

/// The database commits, and its answer never arrives.
#[tokio::test(flavor = "multi_thread")]
async fn fault_12_r4_an_append_whose_answer_was_cut_is_spooled_and_drains_to_the_event_that_is_there() {
    let database = Server::shared().database();
    database.query(SHOP);
    let proxy = ChaosProxy::start(Server::shared().port());
    let directory = tempfile::tempdir().unwrap();
    let gateway = serve(&database.url_at(proxy.port()), directory.path());
    let told = Told::default();
    for number in 0..5 {
        let key = format!("evt_{number}");
        // The statement that stores it names the event's type, and is its own transaction.
        let trap = proxy.set(Trap::on(Direction::ToServer, key.as_bytes()).swallowing_the_answer());
        let answer = ask(gateway.ingress, &request("stripe", &key, "pi")).await.unwrap();
        assert!(told.record(&key, &answer), "{answer:?}");
        block_in_place(|| trap.wait());
        emptied(&gateway).await;
    }
    worked_off(&gateway, &database).await;
    told.check_ids(&[&gateway], 5).await;
    assert_eq!(told.check(&database), 5);
}

/// A database that says nothing at all is an outage too.
#[tokio::test(flavor = "multi_thread")]
async fn r4_a_database_that_is_silent_is_waited_for_a_moment_and_then_not_at_all() {
    let database = Server::shared().database();
    database.query(SHOP);
    let proxy = ChaosProxy::start(Server::shared().port());
    let directory = tempfile::tempdir().unwrap();
    let gateway = serve(&database.url_at(proxy.port()), directory.path());
    proxy.stall();
    let told = Told::default();
    for number in 0..20 {
        let key = format!("evt_{number}");
        let begun = Instant::now();
        assert!(told.record(&key, &ask(gateway.ingress, &request("stripe", &key, "pi")).await.unwrap()));
        // One second is configured; only those wait that come before the first has waited in vain.
        let most = if number == 0 { 10 } else { 5 };
        assert!(begun.elapsed() < Duration::from_secs(most), "{key}: {:?}", begun.elapsed());
    }
    proxy.resume();
    emptied(&gateway).await;
    worked_off(&gateway, &database).await;
    assert_eq!(told.check(&database), 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn r4_r5_a_full_spool_is_503_and_makes_room_when_the_database_is_back() {
    let database = Server::shared().database();
    database.query(SHOP);
    let proxy = ChaosProxy::start(Server::shared().port());
    let directory = tempfile::tempdir().unwrap();
    let config = CONFIG.replace("after = \"1s\"", "after = \"1s\"\nmax_events = 25");
    let gateway = serve_with(&database.url_at(proxy.port()), directory.path(), &config, &[]);
    proxy.down();
    let told = Told::default();
    for number in 0..40 {
        let key = format!("evt_{number}");
        told.record(&key, &ask(gateway.ingress, &request("stripe", &key, "pi")).await.unwrap());
    }
    assert_eq!((told.of(200), told.of(503)), (25, 15));
    assert!(gateway.metric("oncehook_unavailable_total").await >= 15.0);
    proxy.accept();
    emptied(&gateway).await;
    until(&gateway, "ready", async || gateway.json("/readyz").await["status"] == "ready").await;
    for number in 0..40 {
        let key = format!("evt_{number}");
        assert!(told.record(&key, &ask(gateway.ingress, &request("stripe", &key, "pi")).await.unwrap()));
    }
    emptied(&gateway).await;
    worked_off(&gateway, &database).await;
    assert_eq!(told.len(), 40);
    let rows = database.query("SELECT count(*), count(DISTINCT key) FROM orders");
    assert_eq!(rows, "40|40");
}

/// The node is killed at random while its spool fills and while it is drained, again and again.
#[tokio::test(flavor = "multi_thread")]
async fn fault_1_r4_killed_while_it_spools_and_while_it_drains_a_node_loses_and_doubles_nothing() {
    let mut random = Random::from_environment();
    let kills = figure("ONCEHOOK_SPOOL_KILLS", 12);
    let database = Server::shared().database();
    database.query(SHOP);
    let proxy = ChaosProxy::start(Server::shared().port());
    let directory = tempfile::tempdir().unwrap();
    let told = Arc::new(Told::default());
    let start = || serve(&database.url_at(proxy.port()), directory.path());
    let mut killed_full = 0;
    for _ in 0..kills {
        // It needs the database to start.
        let mut gateway = start();
        let sending = told.start(gateway.ingress, 8, 1_000);
        tokio::time::sleep(Duration::from_millis(random.below(100))).await;
        proxy.down();
        tokio::time::sleep(Duration::from_millis(200 + random.below(300))).await;
        if random.below(2) == 0 {
            proxy.accept();
            tokio::time::sleep(Duration::from_millis(random.below(700))).await;
        }
        killed_full += u64::from(gateway.json("/readyz").await["spool"]["events"] != 0);
        gateway.kill();
        sending.finish().await;
        proxy.accept();
    }
    let gateway = start();
    emptied(&gateway).await;
    worked_off(&gateway, &database).await;
    let stored = told.check(&database);
    told.check_ids(&[&gateway], 500).await;
    assert!(
        told.len() > 100 && killed_full > 0 && stored >= told.len(),
        "{} told, {killed_full}",
        told.len()
    );
    eprintln!(
        "{} told, {stored} stored, killed {kills} times, {killed_full} of them with events in the spool",
        told.len()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_11_a_spool_that_is_damaged_or_cannot_be_made_is_told_at_the_start() {
    let database = Server::shared().database();
    database.query(SHOP);
    let directory = tempfile::tempdir().unwrap();
    prepare(directory.path(), CONFIG);
    std::fs::write(directory.path().join("spool.db"), b"ceci n'est pas une file d'attente ".repeat(200))
        .unwrap();
    let attempt = || {
        let mut command = Command::new(BINARY);
        command.arg("serve").env("SHOP_DATABASE", database.url());
        Gateway::try_start(command, directory.path()).err().unwrap()
    };
    let refused = attempt();
    assert!(
        refused.contains("open the spool spool.db (spool.path)") && refused.contains("not a database"),
        "{refused}"
    );
    prepare(directory.path(), &CONFIG.replace("spool.db", "missing/spool.db"));
    let refused = attempt();
    assert!(refused.contains("missing/spool.db") && refused.contains("does not exist"), "{refused}");
    // Only who accepts events needs it.
    let mut worker = Command::new(BINARY);
    worker.args(["serve", "--role", "worker"]).env("SHOP_DATABASE", database.url());
    assert!(Gateway::start_command(worker, directory.path()).stop().success());
}

/// The journal's own file, locked by another process: the spool beside it takes over.
#[tokio::test(flavor = "multi_thread")]
async fn r4_beside_a_locked_sqlite_journal_the_spool_takes_over() {
    let directory = tempfile::tempdir().unwrap();
    let config = r#"
[server]
ingress = "127.0.0.1:0"
admin = "127.0.0.1:0"
[journal]
url = "sqlite://journal.db"
[spool]
after = "200ms"
[[source]]
name = "stripe"
provider = "stripe"
secrets = ["file:stripe.secret"]
on_outage = "spool"
"#;
    let gateway = serve_with("", directory.path(), config, &[]);
    assert!(directory.path().join("journal-spool.db").exists(), "{}", gateway.log());
    let other = rusqlite::Connection::open(directory.path().join("journal.db")).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let told = Told::default();
    for number in 0..20 {
        let key = format!("evt_{number}");
        assert!(told.record(&key, &ask(gateway.ingress, &request("stripe", &key, "pi")).await.unwrap()));
    }
    assert!(gateway.json("/readyz").await["spool"]["events"].as_u64().unwrap() > 0);
    other.execute_batch("COMMIT").unwrap();
    emptied(&gateway).await;
    told.check_ids(&[&gateway], 20).await;
    assert_eq!(gateway.events().await.len(), 20);
}
