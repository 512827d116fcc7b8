//! The gateway on PostgreSQL: one process or many, killed at random, and a database that goes away and comes back.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use oncehook_server::config::Config;
use oncehook_testkit::gateway::{Gateway, prepare};
use oncehook_testkit::nodes::{self, Engine, Plan};
use oncehook_testkit::postgres::{Database, Server};
use oncehook_testkit::promises::{Senders, assert_is_unavailable};
use oncehook_testkit::random::Random;
use oncehook_testkit::sender::ask;
use oncehook_testkit::size::{binary, size};

const BINARY: &str = env!("CARGO_BIN_EXE_oncehook");

/// A gateway whose database is named by the environment, and whose effects nothing but the journal keeps from happening
/// twice: the table has no key.
pub(crate) const CONFIG: &str = r#"
[server]
ingress = "127.0.0.1:0"
admin = "127.0.0.1:0"

[journal]
url = "env:SHOP_DATABASE"

[[source]]
name = "stripe"
provider = "stripe"
secrets = ["file:stripe.secret"]

[[route]]
name = "orders"
source = "stripe"
[route.sql]
statement = "INSERT INTO orders (payment, key) VALUES (:payment, :key) RETURNING id"
bind = { payment = "/data/object/id", key = "$key" }

[[route]]
name = "notes"
after = "orders"
[route.sql]
statement = "INSERT INTO notes (order_id) VALUES (:order)"
bind = { order = "$result/id" }
"#;

pub(crate) const SHOP: &str = "CREATE TABLE orders (id serial PRIMARY KEY, payment text NOT NULL, key text NOT NULL);
                    CREATE TABLE notes (order_id integer NOT NULL)";

fn serve(database: &Database<'_>, directory: &Path, roles: &[&str]) -> Gateway {
    serve_at(&database.url(), directory, roles)
}

/// The gateway of [`CONFIG`] on a database that is reached in some way.
pub(crate) fn serve_at(url: &str, directory: &Path, roles: &[&str]) -> Gateway {
    let arguments: Vec<&str> = roles.iter().flat_map(|role| ["--role", role]).collect();
    try_serve(url, directory, &arguments).unwrap_or_else(|log| panic!("the gateway did not start:\n{log}"))
}

/// The same with any arguments; an end before it is ready gives its log as the error.
pub(crate) fn try_serve(url: &str, directory: &Path, arguments: &[&str]) -> Result<Gateway, String> {
    prepare(directory, CONFIG);
    let mut command = Command::new(BINARY);
    command.arg("serve").args(arguments).env("SHOP_DATABASE", url);
    Gateway::try_start(command, directory)
}

/// Waits until it accepts events.
pub(crate) async fn until_ready(gateway: &Gateway) -> Duration {
    let begun = Instant::now();
    while gateway.get("/readyz").await.status != 200 {
        assert!(begun.elapsed() < Duration::from_secs(60), "{}", gateway.log());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    begun.elapsed()
}

/// Nothing is pending, and every stored event has one order and one note; no other has any. Returns how many.
pub(crate) async fn check_once(database: &Database<'_>) -> usize {
    drained(database).await;
    let stored = database.query("SELECT count(*) FROM oncehook.keys");
    for count in [
        "SELECT count(*) FROM orders",
        "SELECT count(DISTINCT key) FROM orders",
        "SELECT count(*) FROM orders o JOIN oncehook.keys k ON k.key = o.key::bytea",
        "SELECT count(*) FROM notes",
        "SELECT count(DISTINCT order_id) FROM notes",
        "SELECT count(*) FROM oncehook.deliveries WHERE route = 'orders' AND state = 'succeeded'",
    ] {
        assert_eq!(database.query(count), stored, "{count}");
    }
    stored.parse().unwrap()
}

/// Waits until nothing is pending.
pub(crate) async fn drained(database: &Database<'_>) {
    let pending = "SELECT count(*) FROM oncehook.deliveries WHERE state IN ('ready', 'running', 'retrying')";
    let begun = Instant::now();
    while database.query(pending) != "0" {
        assert!(begun.elapsed() < Duration::from_secs(120), "not drained: {}", database.query(pending));
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// As big as `ONCEHOOK_NODES_EVENTS` says.
#[tokio::test(flavor = "multi_thread")]
async fn r15_r20_r39_nodes_are_killed_at_random_and_each_event_takes_effect_once() {
    let mut random = Random::from_environment();
    let database = Server::shared().database();
    let events = size("ONCEHOOK_NODES_EVENTS", 3_000);
    let binary = binary(BINARY);
    let engine = Engine { binary: &binary, url: database.url(), query: Box::new(|sql: &str| database.query(sql)) };
    let peace = Duration::from_millis(if events > 10_000 { 2_000 } else { 400 });
    let plan = Plan { events, again: 50, connections: 8, peace };
    let report = nodes::run(&engine, plan, &mut random).await;
    eprintln!("{report:?}");
    assert_eq!(database.query("SELECT DISTINCT state FROM oncehook.deliveries"), "succeeded");
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_12_r4_r15_a_gateway_that_loses_its_database_refuses_at_once_and_recovers() {
    let server = Server::start(&[]);
    let database = server.database();
    database.query(SHOP);
    let directory = tempfile::tempdir().unwrap();
    let gateway = serve(&database, directory.path(), &[]);
    let senders = Senders::new(600, 0);
    senders.send_new(gateway.ingress, 20, 2).await;
    let readiness = gateway.get("/readyz").await;
    assert_eq!((readiness.status, &readiness.json()["journal"]), (200, &"postgres".into()));

    server.crash();
    tokio::time::sleep(Duration::from_millis(500)).await;
    let begun = Instant::now();
    assert_is_unavailable(&ask(gateway.ingress, &senders.request("evt_1000")).await.unwrap());
    assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
    assert_eq!(gateway.get("/readyz").await.status, 503);
    assert_eq!(gateway.get("/healthz").await.status, 200);

    server.restart();
    let begun = Instant::now();
    while gateway.get("/readyz").await.status != 200 {
        assert!(begun.elapsed() < Duration::from_secs(20), "{}", gateway.log());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    senders.send_new(gateway.ingress, 20, 2).await;
    senders.check_some(gateway.ingress, &mut Random::new(1), 20).await;
    drained(&database).await;
    assert_eq!(database.query("SELECT count(*), count(DISTINCT key) FROM orders"), "40|40");
}

#[tokio::test(flavor = "multi_thread")]
async fn r39_a_role_does_its_part_only() {
    let database = Server::shared().database();
    database.query(SHOP);
    let directory = tempfile::tempdir().unwrap();
    let mut worker = serve(&database, directory.path(), &["worker"]);
    for (path, status) in [("/healthz", 200), ("/readyz", 200), ("/metrics", 200), ("/api/events", 404)] {
        assert_eq!(worker.get(path).await.status, status, "{path}");
    }
    assert!(worker.log().contains("roles     worker") && !worker.log().contains("webhooks"), "{}", worker.log());
    assert!(worker.stop().success());
    // One process alone can use a file.
    prepare(directory.path(), oncehook_testkit::gateway::CONFIG);
    let mut command = Command::new(BINARY);
    command.args(["serve", "--role", "ingest"]);
    let refused = Gateway::try_start(command, directory.path()).err().unwrap();
    assert!(refused.contains("--role needs a journal on a server database"), "{refused}");
}

#[test]
fn r9_the_password_of_a_database_is_never_shown() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("stripe.secret"), "whsec_secret").unwrap();
    let secret = directory.path().join("stripe.secret");
    let source =
        format!("[[source]]\nname = \"a\"\nprovider = \"stripe\"\nsecrets = [\"file:{}\"]\n", secret.display());
    let parse = |url: &str| Config::parse("test", &format!("{source}[journal]\nurl = \"{url}\"\n"));
    let good = parse("postgres://me:hunter2@one.example:5433,two.example/shop").unwrap();
    assert_eq!(good.journal.shown(), "postgres://one.example:5433,two.example:5432/shop");
    assert!(!format!("{good:?}").contains("hunter2"));
    for bad in ["postgres://me:hunter2@host:port/shop", "postgres://me:hunter2@host/shop?sslmode=sometimes"] {
        let problems = parse(bad).unwrap_err();
        let told: Vec<String> = problems.list.iter().map(|problem| format!("{problem:?}")).collect();
        assert!(!told.join("\n").contains("hunter2"), "{told:?}");
    }
    let forbidden = format!(
        "{source}[journal]\nurl = \"postgres://localhost/shop\"\n[[route]]\nname = \"r\"\nsource = \"a\"\n[route.sql]\nstatement = \"DELETE FROM oncehook.keys\"\n"
    );
    let problems = Config::parse("test", &forbidden).unwrap_err().to_string();
    assert!(problems.contains("may not touch schema oncehook"), "{problems}");
}
