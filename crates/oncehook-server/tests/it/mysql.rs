//! The gateway on MariaDB: one process or many, killed at random; sockets cut around a commit; a database that goes away and
//! comes back.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use oncehook_server::config::Config;
use oncehook_testkit::chaos_proxy::{ChaosProxy, Cut, Direction, Trap};
use oncehook_testkit::gateway::{Gateway, prepare};
use oncehook_testkit::mysql::{Database, Server};
use oncehook_testkit::nodes::{self, Engine, Plan};
use oncehook_testkit::promises::{Senders, assert_is_unavailable};
use oncehook_testkit::random::Random;
use oncehook_testkit::sender::ask;
use oncehook_testkit::size::{binary, size};

use crate::hanging_up::requests_dropped_at_any_moment;
use crate::kit::not_ready_while_locked;

const BINARY: &str = env!("CARGO_BIN_EXE_oncehook");

/// A gateway whose database is named by the environment, and whose effects nothing but the journal keeps from happening
/// twice: the table has no key of its own for payments.
const CONFIG: &str = r#"
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
statement = "INSERT INTO orders (payment, `key`) VALUES (:payment, :key); SELECT LAST_INSERT_ID() AS id"
bind = { payment = "/data/object/id", key = "$key" }

[[route]]
name = "notes"
after = "orders"
[route.sql]
statement = "INSERT INTO notes (order_id) VALUES (:order)"
bind = { order = "$result/id" }
"#;

const SHOP: &str =
    "CREATE TABLE orders (id INT AUTO_INCREMENT PRIMARY KEY, payment VARCHAR(64) NOT NULL, `key` VARCHAR(64) NOT NULL);
                    CREATE TABLE notes (order_id INT NOT NULL)";

fn shop(server: &Server) -> Database<'_> {
    let database = server.database();
    database.query(SHOP);
    database
}

fn serve(url: &str, directory: &Path, roles: &[&str]) -> Gateway {
    let arguments: Vec<&str> = roles.iter().flat_map(|role| ["--role", role]).collect();
    try_serve(url, directory, &arguments).unwrap_or_else(|log| panic!("the gateway did not start:\n{log}"))
}

fn try_serve(url: &str, directory: &Path, arguments: &[&str]) -> Result<Gateway, String> {
    prepare(directory, CONFIG);
    let mut command = Command::new(BINARY);
    command.arg("serve").env("SHOP_DATABASE", url).args(arguments);
    Gateway::try_start(command, directory)
}

/// Waits until it accepts events.
async fn until_ready(gateway: &Gateway) {
    let begun = Instant::now();
    while gateway.get("/readyz").await.status != 200 {
        assert!(begun.elapsed() < Duration::from_secs(60), "{}", gateway.log());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Nothing is pending, and every stored event has one order and one note; no other has any. Returns how many.
async fn check_once(database: &Database<'_>) -> usize {
    let pending = "SELECT COUNT(*) FROM oncehook_deliveries WHERE place IN (0, 1)";
    let begun = Instant::now();
    while database.query(pending) != "0" {
        assert!(begun.elapsed() < Duration::from_secs(180), "not drained: {}", database.query(pending));
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let stored = database.query("SELECT COUNT(*) FROM oncehook_keys");
    for count in [
        "SELECT COUNT(*) FROM orders",
        "SELECT COUNT(DISTINCT `key`) FROM orders",
        "SELECT COUNT(*) FROM orders o JOIN oncehook_keys k ON k.source = 'stripe' AND k.`key` = o.`key`",
        "SELECT COUNT(*) FROM notes",
        "SELECT COUNT(DISTINCT order_id) FROM notes",
        "SELECT COUNT(*) FROM oncehook_deliveries WHERE route = 'orders' AND state = 'succeeded'",
    ] {
        assert_eq!(database.query(count), stored, "{count}");
    }
    stored.parse().unwrap()
}

/// As big as `ONCEHOOK_NODES_EVENTS` says.
#[tokio::test(flavor = "multi_thread")]
async fn r15_r20_r39_nodes_on_mysql_are_killed_at_random_and_each_event_takes_effect_once() {
    let mut random = Random::from_environment();
    let database = Server::shared().database();
    let events = size("ONCEHOOK_NODES_EVENTS", 3_000);
    let binary = binary(BINARY);
    let engine = Engine { binary: &binary, url: database.url(), query: Box::new(|sql: &str| database.query(sql)) };
    let peace = Duration::from_millis(if events > 10_000 { 2_000 } else { 400 });
    let plan = Plan { events, again: 50, connections: 8, peace };
    let report = nodes::run(&engine, plan, &mut random).await;
    eprintln!("{report:?}");
    assert_eq!(database.query("SELECT DISTINCT state FROM oncehook_deliveries"), "succeeded");
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_13_requests_on_mysql_that_are_dropped_at_any_moment_are_stored_once_or_not_at_all() {
    let database = shop(Server::shared());
    let directory = tempfile::tempdir().unwrap();
    let gateway = serve(&database.url(), directory.path(), &[]);
    requests_dropped_at_any_moment(&gateway, async || check_once(&database).await).await;
    // Nobody's transaction stays open. Other databases of the server have their own.
    let open = format!(
        "SELECT COUNT(*) FROM information_schema.INNODB_TRX t JOIN information_schema.PROCESSLIST p ON p.ID = t.trx_mysql_thread_id
          WHERE p.DB = '{}' AND t.trx_started < NOW() - INTERVAL 5 SECOND",
        database.name()
    );
    assert_eq!(database.query(&open), "0");
}

/// Sends a key until it is promised. Returns what the promise said.
async fn until_promised(gateway: &Gateway, senders: &Senders, key: &str) -> String {
    let begun = Instant::now();
    loop {
        let answer = ask(gateway.ingress, &senders.request(key)).await.unwrap();
        if senders.promises.record(key, &answer) {
            return answer.json()["status"].as_str().unwrap().to_owned();
        }
        assert_is_unavailable(&answer);
        assert!(begun.elapsed() < Duration::from_secs(60), "{key} is never promised:\n{}", gateway.log());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_12_a_socket_to_mysql_cut_around_an_append_is_503_and_the_key_settles_it() {
    let database = shop(Server::shared());
    let proxy = ChaosProxy::start(Server::shared().port());
    let directory = tempfile::tempdir().unwrap();
    // What only accepts commits appends, and seldom something else.
    let gateway = serve(&database.url_at(proxy.port()), directory.path(), &["ingest", "admin"]);
    let worker = serve(&database.url(), directory.path(), &["worker"]);
    let senders = Senders::new(600, 0);
    let mut shown = 0;
    for round in 0..9 {
        let key = format!("evt_{}", 1_000 + round);
        let (trap, then) = match round % 3 {
            // Its rows have not arrived, its commit has not, or it has and was not answered.
            0 => (Trap::on(Direction::ToServer, &key), "accepted"),
            1 => (Trap::on(Direction::ToServer, "COMMIT"), "accepted"),
            _ => (Trap::on(Direction::ToServer, "COMMIT").swallowing_the_answer(), "duplicate"),
        };
        let trap = proxy.set(trap.ending([Cut::Reset, Cut::Finish][round % 2]));
        let answer = ask(gateway.ingress, &senders.request(&key)).await.unwrap();
        trap.wait();
        if round % 3 > 0 && senders.promises.record(&key, &answer) {
            // Counts of duplicates are committed too, now and then; such a round shows nothing.
            continue;
        }
        shown += 1;
        assert_is_unavailable(&answer);
        assert_eq!(until_promised(&gateway, &senders, &key).await, then, "round {round}");
    }
    assert!(shown >= 6, "only {shown} rounds met an append");
    assert_eq!(check_once(&database).await, 9);
    assert_eq!(senders.promises.check(&gateway).await.promised, 9);
    drop(worker);
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_12_a_socket_to_mysql_cut_around_the_commit_of_an_effect_applies_it_once() {
    let database = shop(Server::shared());
    let proxy = ChaosProxy::start(Server::shared().port());
    let directory = tempfile::tempdir().unwrap();
    let door = serve(&database.url(), directory.path(), &["ingest", "admin"]);
    let worker = serve(&database.url_at(proxy.port()), directory.path(), &["worker"]);
    let senders = Senders::new(600, 0);
    let orders = || database.query("SELECT COUNT(*) FROM orders").parse::<usize>().unwrap();
    let (mut unsent, mut unheard) = (0, 0);
    for round in 0..40 {
        until_ready(&worker).await;
        let before = orders();
        let commit = Trap::on(Direction::ToServer, "COMMIT");
        let trap = proxy.set(if round % 2 == 0 { commit } else { commit.swallowing_the_answer() });
        senders.send_new(door.ingress, 1, 1).await;
        trap.wait();
        // A worker may commit something else; such a round shows nothing.
        match (round % 2, orders() - before) {
            (0, 0) => unsent += 1,
            (1, 1) => unheard += 1,
            _ => {}
        }
        let begun = Instant::now();
        while orders() != before + 1 {
            assert!(begun.elapsed() < Duration::from_secs(60), "{}", worker.log());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        if unsent >= 4 && unheard >= 4 {
            break;
        }
    }
    assert!(unsent >= 4 && unheard >= 4, "{unsent} commits were not sent, {unheard} not answered");
    let once = check_once(&database).await;
    assert_eq!(senders.promises.check(&door).await.promised, once);
    let failed = database.query("SELECT COUNT(*) FROM oncehook_attempts");
    assert_eq!(failed, "0", "a lost connection is nobody's failed attempt");
}

/// Connections are cut and bytes held at random while everything runs.
#[tokio::test(flavor = "multi_thread")]
async fn fault_12_r20_a_bad_network_to_mysql_loses_and_doubles_nothing() {
    let mut random = Random::from_environment();
    let database = shop(Server::shared());
    let proxy = ChaosProxy::start(Server::shared().port());
    let directory = tempfile::tempdir().unwrap();
    let gateway = serve(&database.url_at(proxy.port()), directory.path(), &[]);
    let senders = Senders::new(600, 40);
    let sending = senders.start(gateway.ingress, 8, &mut random);
    for _ in 0..25 {
        match random.below(6) {
            0 => proxy.cut(Cut::Reset),
            1 => proxy.cut(Cut::Finish),
            2 => drop(proxy.set(Trap::after(Direction::ToServer, random.below(200_000)))),
            3 => drop(proxy.set(Trap::after(Direction::ToClient, random.below(20_000)))),
            4 => drop(proxy.set(
                Trap::on(Direction::ToServer, "COMMIT").sparing(random.below(5) as usize).swallowing_the_answer(),
            )),
            _ => {
                proxy.stall();
                tokio::time::sleep(Duration::from_millis(random.below(300))).await;
                proxy.resume();
            }
        }
        tokio::time::sleep(Duration::from_millis(random.below(300))).await;
    }
    // What is asked at the end must not be what springs the last of them.
    proxy.disarm();
    let heard = sending.finish().await;
    until_ready(&gateway).await;
    let once = check_once(&database).await;
    let kept = senders.promises.check(&gateway).await;
    eprintln!("{kept:?} {heard:?}");
    assert_eq!(kept.stored, once);
    assert!(heard.of(200) > 50 && heard.of(503) > 0, "{heard:?}");
}

/// The first host is away, or cannot be written to: the second one is taken. A server that dies is a refusal at once.
#[tokio::test(flavor = "multi_thread")]
async fn fault_12_r4_r15_a_gateway_that_loses_mysql_refuses_at_once_and_finds_the_host_that_can_be_written() {
    let server = Server::start(&[]);
    let database = shop(&server);
    let directory = tempfile::tempdir().unwrap();
    let (one, two) = (ChaosProxy::start(server.port()), ChaosProxy::start(server.port()));
    one.down();
    let url = format!("mysql://root@127.0.0.1:{},127.0.0.1:{}/{}", one.port(), two.port(), database.name());
    let gateway = serve(&url, directory.path(), &[]);
    let senders = Senders::new(600, 0);
    senders.send_new(gateway.ingress, 20, 2).await;
    let readiness = gateway.get("/readyz").await;
    assert_eq!((readiness.status, &readiness.json()["journal"]), (200, &"mysql".into()));
    // The other way in.
    one.up();
    two.down();
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(30) && two.connections() > 0 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    until_ready(&gateway).await;
    senders.send_new(gateway.ingress, 20, 2).await;

    server.crash();
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    let begun = Instant::now();
    assert_is_unavailable(&ask(gateway.ingress, &senders.request("evt_9000")).await.unwrap());
    assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
    assert_eq!(gateway.get("/readyz").await.status, 503);
    assert_eq!(gateway.get("/healthz").await.status, 200);

    // A server that only reads is no place for events, however well it answers.
    one.down();
    server.restart();
    database.query("SET GLOBAL read_only = 1");
    one.up();
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(gateway.get("/readyz").await.status, 503, "{}", gateway.log());
    database.query("SET GLOBAL read_only = 0");
    until_ready(&gateway).await;
    senders.send_new(gateway.ingress, 20, 2).await;
    senders.check_some(gateway.ingress, &mut Random::new(1), 20).await;
    assert_eq!(check_once(&database).await, 60);
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_12_a_mysql_server_that_comes_later_than_the_gateway_is_waited_for() {
    let server = Server::start(&[]);
    let database = shop(&server);
    let directory = tempfile::tempdir().unwrap();
    let proxy = ChaosProxy::start(server.port());
    let url = format!("mysql://root@127.0.0.1:{}/{}", proxy.port(), database.name());
    proxy.down();
    let gone = try_serve(&url, directory.path(), &["--database-wait", "1"]).err().unwrap();
    assert!(gone.contains("waiting up to 1 s for the database"), "{gone}");
    assert!(gone.contains("the database is not there"), "{gone}");
    // What waiting does not mend is told at once.
    proxy.up();
    let unknown = url.replace(database.name(), "no_such_database");
    let refused = try_serve(&unknown, directory.path(), &[]).err().unwrap();
    assert!(refused.contains("no_such_database") && !refused.contains("waiting"), "{refused}");

    proxy.down();
    let gateway = std::thread::scope(|scope| {
        let starting = scope.spawn(|| serve(&url, directory.path(), &[]));
        std::thread::sleep(Duration::from_secs(1));
        assert!(!starting.is_finished(), "there is nothing to serve on");
        proxy.up();
        starting.join().unwrap()
    });
    let senders = Senders::new(600, 0);
    senders.send_new(gateway.ingress, 10, 2).await;
    assert_eq!(check_once(&database).await, 10);
}

#[test]
fn r9_the_password_of_a_mysql_database_is_never_shown() {
    let directory = tempfile::tempdir().unwrap();
    let secret = directory.path().join("stripe.secret");
    std::fs::write(&secret, "whsec_secret").unwrap();
    let source =
        format!("[[source]]\nname = \"a\"\nprovider = \"stripe\"\nsecrets = [\"file:{}\"]\n", secret.display());
    let parse = |url: &str| Config::parse("test", &format!("{source}[journal]\nurl = \"{url}\"\n"));
    let good = parse("mysql://me:hunter2@one.example:3307,two.example/shop").unwrap();
    assert_eq!(good.journal.shown(), "mysql://one.example:3307,two.example:3306/shop");
    assert!(!format!("{good:?}").contains("hunter2"));
    for bad in
        ["mysql://me:hunter2@host:port/shop", "mariadb://me:hunter2@host/shop?tls=sometimes", "mysql://me:hunter2@host"]
    {
        let problems = parse(bad).unwrap_err();
        let told: Vec<String> = problems.list.iter().map(|problem| format!("{problem:?}")).collect();
        assert!(!told.join("\n").contains("hunter2"), "{told:?}");
    }
    let forbidden = format!(
        "{source}[journal]\nurl = \"mysql://localhost/shop\"\n[[route]]\nname = \"r\"\nsource = \"a\"\n[route.sql]\nstatement = \"DELETE FROM oncehook_keys\"\n"
    );
    let problems = Config::parse("test", &forbidden).unwrap_err().to_string();
    assert!(problems.contains("may not touch tables named oncehook_"), "{problems}");
}

#[tokio::test(flavor = "multi_thread")]
async fn r39_migrate_and_check_know_mysql() {
    let database = Server::shared().database();
    let directory = tempfile::tempdir().unwrap();
    prepare(directory.path(), CONFIG);
    let run = |arguments: &[&str]| {
        let mut command = Command::new(BINARY);
        command.args(arguments).env("SHOP_DATABASE", database.url()).current_dir(directory.path());
        let ran = command.output().unwrap();
        let said = [ran.stdout, ran.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
        (ran.status.success(), said)
    };
    let (made, said) = run(&["migrate"]);
    assert!(made && said.contains("001_journal"), "{said}");
    let (made, said) = run(&["migrate"]);
    assert!(made && said.contains("up to date"), "{said}");
    let (_, said) = run(&["check", "--database"]);
    assert!(said.contains("orders"), "the table is missing, and nobody says so: {said}");
    database.query(SHOP);
    let (fits, said) = run(&["check", "--database"]);
    assert!(fits, "{said}");
    database.query("ALTER TABLE oncehook_keys DROP PRIMARY KEY");
    let (made, said) = run(&["migrate"]);
    assert!(!made && said.contains("PRIMARY on oncehook_keys"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_12_while_a_table_on_mysql_is_locked_the_gateway_is_not_ready_and_afterwards_it_is() {
    let database = shop(Server::shared());
    let directory = tempfile::tempdir().unwrap();
    let gateway = serve(&database.url(), directory.path(), &["ingest", "admin"]);
    let senders = Senders::new(600, 0);
    senders.send_new(gateway.ingress, 10, 2).await;
    let lock = || drop(database.query("LOCK TABLES oncehook_keys WRITE; SELECT SLEEP(16); UNLOCK TABLES"));
    let held = "SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE DB = DATABASE() AND STATE = 'User sleep'";
    not_ready_while_locked(&gateway, &senders, lock, || database.query(held) == "1");
    until_ready(&gateway).await;
    senders.send_new(gateway.ingress, 10, 2).await;
}
