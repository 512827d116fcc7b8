//! A gateway on SQLite (or on a PostgreSQL of its own) whose effects are in another PostgreSQL database: killed between the
//! two commits, frozen, its database gone, its operator impatient. Each event takes effect once all the same.
//!
//! The shop's tables have no unique keys on purpose. Whatever happens twice stands there twice.

use std::os::unix::process::ExitStatusExt as _;
use std::process::Command;
use std::time::Duration;

use oncehook_server::config::Config;
use oncehook_testkit::gateway::{CONFIG, Gateway, prepare};
use oncehook_testkit::postgres::{Database, Server};
use oncehook_testkit::promises::{Answers, Senders};
use oncehook_testkit::random::{Random, scale};
use oncehook_testkit::shop::{delivery, drained, outcomes};
use serde_json::json;
use tempfile::TempDir;

use crate::kit::{BINARY, run, soon};

const TABLES: &str = "CREATE TABLE orders (id serial PRIMARY KEY, payment text NOT NULL, key text NOT NULL);
                      CREATE TABLE notes (order_id integer NOT NULL, key text NOT NULL)";

/// Orders and notes, and a route whose deliveries all die at once: what it looks for is in no event.
const ROUTES: &str = r#"
[[route]]
name = "orders"
source = "stripe"
retry = { max_attempts = 100, base = "10ms", cap = "50ms" }
[route.sql]
database = "env:SHOP_DATABASE"
statement = "INSERT INTO orders (payment, key) VALUES (:payment, :key) RETURNING id"
bind = { payment = "/data/object/id", key = "$key" }

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
statement = "INSERT INTO orders (payment, key) VALUES (:nothing, 'hopeless')"
bind = { nothing = "/data/there/is/no/such/thing" }
"#;

struct Shop<'s> {
    directory: TempDir,
    database: Database<'s>,
}

impl<'s> Shop<'s> {
    fn new(server: &'s Server) -> Self {
        let database = server.database();
        database.query(TABLES);
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        prepare(directory.path(), &format!("{CONFIG}{ROUTES}"));
        Self { directory, database }
    }

    fn command(&self) -> Command {
        let mut command = Command::new(BINARY);
        command.arg("serve").env("SHOP_DATABASE", self.database.url());
        command
    }

    fn start(&self) -> Gateway {
        Gateway::start_command(self.command(), self.directory.path())
    }

    fn start_armed(&self, point: &str, passing: u64) -> Gateway {
        let mut command = self.command();
        command.env("ONCEHOOK_CRASH_POINT", format!("{point}:{passing}"));
        Gateway::start_command(command, self.directory.path())
    }

    /// Every event has one order and one note, which knows its order; what was given up had no effect and never will.
    fn check_once(&self, events: usize) {
        let ask = |sql: &str| self.database.query(sql);
        let all = events.to_string();
        assert_eq!(ask("SELECT count(*) FROM orders"), all);
        assert_eq!(ask("SELECT count(DISTINCT key) FROM orders WHERE payment = 'pi_' || key"), all);
        assert_eq!(ask("SELECT count(*) FROM notes"), all);
        assert_eq!(
            ask("SELECT count(DISTINCT id) FROM orders o JOIN notes n ON n.order_id = o.id AND n.key = o.key"),
            all
        );
        let guards = "SELECT route, void, count(*) FROM oncehook_guard.oncehook_applied GROUP BY 1, 2 ORDER BY 1";
        assert_eq!(ask(guards), format!("hopeless|t|{all}\nnotes|f|{all}\norders|f|{all}"));
    }
}

/// Ends the gateway at a place again and again, each time after so many passings at most, under a load with many copies;
/// then lets it finish and checks every promise and every effect.
pub(crate) async fn kill_at(point: &str, passings: u64, kills: usize) {
    let mut random = Random::from_environment();
    let shop = Shop::new(Server::shared());
    let senders = Senders::new(600, 50);
    let mut heard = Answers::default();
    for _ in 0..kills {
        let mut gateway = shop.start_armed(point, 1 + random.below(passings));
        let sending = senders.start(gateway.ingress, 2, &mut random);
        let status = tokio::task::block_in_place(|| gateway.wait(Duration::from_secs(60)));
        assert_eq!(status.signal(), Some(9), "{point}: {}", gateway.log());
        heard.add(sending.finish().await);
    }
    let mut gateway = shop.start();
    senders.send_new(gateway.ingress, 20, 2).await;
    let dead = drained(&gateway).await;
    let kept = senders.promises.check(&gateway).await;
    assert_eq!(dead as usize, kept.stored, "{}", gateway.log());
    shop.check_once(kept.stored);
    eprintln!("{point}: {kept:?}, {heard:?}");
    assert!(gateway.stop().success());
}

#[tokio::test(flavor = "multi_thread")]
async fn r20_r39_killed_at_random_each_event_takes_effect_once_in_the_other_database() {
    let mut random = Random::from_environment();
    let kills = 8 * scale();
    let shop = Shop::new(Server::shared());
    let senders = Senders::new(600, 50);
    let mut heard = Answers::default();
    for _ in 0..kills {
        let mut gateway = shop.start();
        let sending = senders.start(gateway.ingress, 4, &mut random);
        tokio::time::sleep(Duration::from_millis(100 + random.below(900))).await;
        gateway.kill();
        heard.add(sending.finish().await);
    }
    let gateway = shop.start();
    let dead = drained(&gateway).await;
    let kept = senders.promises.check(&gateway).await;
    assert!(kept.promised > 50 && heard.of(200) > kept.promised as u64, "{kept:?} {heard:?}");
    assert_eq!(dead as usize, kept.stored);
    shop.check_once(kept.stored);
    eprintln!("{kills} kills: {kept:?}, {heard:?}");
}

/// Two workers on one journal in PostgreSQL, effects in another database. Each is frozen for longer than its leases, in turn,
/// and wakes up as a zombie.
#[tokio::test(flavor = "multi_thread")]
async fn fault_17_fault_41_zombies_of_two_workers_take_no_effect_in_the_other_database() {
    let mut random = Random::from_environment();
    let shop = Shop::new(Server::shared());
    let journal = Server::shared().database();
    let config = format!("{CONFIG}{ROUTES}").replace("sqlite://journal.db", "env:JOURNAL");
    prepare(shop.directory.path(), &config);
    let start = |arguments: &[&str]| {
        let mut command = shop.command();
        command.args(arguments).args(["--lease", "600"]).env("JOURNAL", journal.url());
        Gateway::start_command(command, shop.directory.path())
    };
    let door = start(&["--role", "ingest", "--role", "admin"]);
    let workers = [start(&["--role", "worker"]), start(&["--role", "worker"])];
    let senders = Senders::new(600, 30);
    let sending = senders.start(door.ingress, 2, &mut random);
    for turn in 0..4 {
        tokio::time::sleep(Duration::from_millis(100 + random.below(200))).await;
        let frozen = &workers[turn % 2];
        frozen.signal("STOP");
        tokio::time::sleep(Duration::from_millis(1_500)).await;
        frozen.signal("CONT");
    }
    sending.finish().await;
    let dead = drained(&door).await;
    let kept = senders.promises.check(&door).await;
    assert_eq!(dead as usize, kept.stored);
    shop.check_once(kept.stored);
    let lost = journal.query("SELECT count(*) FROM oncehook.attempts WHERE outcome = 'lost'");
    assert_ne!(lost, "0", "nobody was frozen for long enough");
    eprintln!("{kept:?}, {lost} leases lost");
}

#[tokio::test(flavor = "multi_thread")]
async fn r27_dead_in_another_database_then_retried_takes_effect_once() {
    let shop = Shop::new(Server::shared());
    let config = format!("{CONFIG}{ROUTES}").replace("max_attempts = 100", "max_attempts = 2");
    prepare(shop.directory.path(), &config);
    shop.database.query("ALTER TABLE orders RENAME COLUMN payment TO pay");
    let gateway = shop.start();
    let senders = Senders::new(600, 0);
    senders.send_new(gateway.ingress, 1, 1).await;
    assert_eq!(drained(&gateway).await, 2);
    let event = senders.event("evt_0");
    let dead = delivery(&gateway, &event, "orders").await;
    assert_eq!((outcomes(&dead), &dead["cause"]), (vec!["failed", "failed"], &json!("handler")), "{dead}");
    assert!(dead["error"].as_str().unwrap().contains("payment"), "{dead}");
    let void = "SELECT attempt, void FROM oncehook_guard.oncehook_applied WHERE route = 'orders'";
    assert_eq!(shop.database.query(void), "2|t");

    shop.database.query("ALTER TABLE orders RENAME COLUMN pay TO payment");
    let answer = gateway.post(&format!("/api/events/{event}/retry"), &json!({ "route": "orders" })).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(drained(&gateway).await, 1);
    shop.check_once(1);
    assert_eq!(shop.database.query(void), "3|f");
}

/// An operator skips what may still be under way somewhere: its guard is made void first, or the order is refused.
#[tokio::test(flavor = "multi_thread")]
async fn fault_41_what_is_skipped_can_take_no_effect_in_another_database() {
    let server = Server::start(&[]);
    let shop = Shop::new(&server);
    let patient = r#"max_attempts = 100, base = "1h", cap = "1h""#;
    let config = format!("{CONFIG}{ROUTES}").replace(r#"max_attempts = 100, base = "10ms", cap = "50ms""#, patient);
    prepare(shop.directory.path(), &config);
    shop.database.query("ALTER TABLE orders RENAME COLUMN payment TO pay");
    let gateway = shop.start();
    let senders = Senders::new(600, 0);
    senders.send_new(gateway.ingress, 2, 1).await;
    let of = |key: &str| senders.event(key);
    let skip =
        async |key: &str| gateway.post(&format!("/api/events/{}/skip", of(key)), &json!({ "route": "orders" })).await;
    for key in ["evt_0", "evt_1"] {
        soon(async {
            while delivery(&gateway, &of(key), "orders").await["state"] != "retrying" {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        })
        .await;
    }
    // The first one's attempt was lost, and has committed meanwhile.
    shop.database.query(&format!(
        "INSERT INTO oncehook_guard.oncehook_applied VALUES ('{}', 'orders', 0, 1, false, '{{\"id\": 77}}', 1, now())",
        of("evt_0")
    ));
    let refused = skip("evt_0").await;
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (409, &json!("took_effect")), "{refused:?}");

    server.stop();
    let refused = skip("evt_1").await;
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (503, &json!("database")), "{refused:?}");
    assert_eq!(delivery(&gateway, &of("evt_1"), "orders").await["state"], "retrying");
    server.restart();
    let skipped = skip("evt_1").await;
    assert_eq!(skipped.status, 200, "{skipped:?}");
    let void = format!(
        "SELECT void FROM oncehook_guard.oncehook_applied WHERE event = '{}' AND route = 'orders'",
        of("evt_1")
    );
    assert_eq!(shop.database.query(&void), "t");

    // What took effect is recorded by one more attempt, which runs nothing.
    let retried = gateway.post(&format!("/api/events/{}/retry", of("evt_0")), &json!({ "route": "orders" })).await;
    assert_eq!(retried.status, 200, "{retried:?}");
    soon(async {
        while shop.database.query("SELECT count(*) FROM notes") == "0" {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    assert_eq!(shop.database.query("SELECT order_id, key FROM notes"), "77|evt_0");
    assert_eq!(shop.database.query("SELECT count(*) FROM orders"), "0");
}

#[tokio::test(flavor = "multi_thread")]
async fn r28_the_other_database_may_be_away_from_the_start() {
    let server = Server::start(&[]);
    let shop = Shop::new(&server);
    server.stop();
    let gateway = shop.start();
    let senders = Senders::new(600, 0);
    senders.send_new(gateway.ingress, 30, 2).await;
    assert_eq!(gateway.get("/readyz").await.status, 200);
    tokio::time::sleep(Duration::from_secs(1)).await;
    server.restart();
    assert_eq!(drained(&gateway).await, 30);
    shop.check_once(30);
}

#[test]
fn r46_check_looks_into_the_other_database() {
    let shop = Shop::new(Server::shared());
    let path = shop.directory.path();
    let routes = ROUTES.replace("env:SHOP_DATABASE", &shop.database.url());
    prepare(path, &format!("{CONFIG}{routes}"));
    assert_eq!(run(path, &["migrate"]).0, 0);
    let (code, _, said) = run(path, &["check", "--database"]);
    assert_eq!(code, 0, "{said}");
    assert!(said.contains("orders: stripe (all types) to sql in postgres://127.0.0.1:"), "{said}");
    shop.database.query("ALTER TABLE notes RENAME COLUMN key TO event");
    let (code, _, said) = run(path, &["check", "--database"]);
    assert!(code == 1 && said.contains("route notes: statement 1 would fail"), "{said}");
    // Nothing was made for it.
    assert_eq!(shop.database.query("SELECT count(*) FROM pg_namespace WHERE nspname = 'oncehook_guard'"), "0");
}

#[test]
fn r14_another_database_is_named_in_the_configuration() {
    let directory = tempfile::tempdir().unwrap();
    let secret = directory.path().join("stripe.secret");
    std::fs::write(&secret, "whsec_secret").unwrap();
    let parse = |journal: &str, database: &str, statement: &str| {
        Config::parse(
            "test",
            &format!(
                "[journal]\nurl = \"{journal}\"\n[[source]]\nname = \"a\"\nprovider = \"stripe\"\nsecrets = [\"file:{}\"]\n
                 [[route]]\nname = \"r\"\nsource = \"a\"\n[route.sql]\ndatabase = \"{database}\"\nstatement = \"{statement}\"\n",
                secret.display()
            ),
        )
    };
    let shop = "postgres://me:hunter2@shop.example/shop";
    let handler = |config: Config| {
        let route = config.routes.get("r").unwrap().clone();
        (route.handler.kind(), route.handler.database().map(str::to_owned), route.retry.max_attempts)
    };
    let apart = parse("sqlite://a.db", shop, "SELECT '{}'::jsonb ? 'a'").unwrap();
    assert!(!format!("{apart:?}").contains("hunter2"));
    assert_eq!(handler(apart), ("sql", Some("postgres://shop.example:5432/shop".to_owned()), 16));
    let mysql = parse("sqlite://a.db", "mariadb://me:hunter2@shop.example/shop", "SELECT 1").unwrap();
    assert_eq!(handler(mysql), ("sql", Some("mysql://shop.example:3306/shop".to_owned()), 16));
    // The journal's own database needs no guard.
    assert_eq!(handler(parse(shop, shop, "SELECT 1").unwrap()), ("sql", None, 8));
    for (database, statement, told) in [
        ("sqlite://other.db", "SELECT 1", "cannot be guarded"),
        ("shop", "SELECT 1", "is a URL"),
        ("postgres://me:hunter2@host:port/shop", "SELECT 1", "database URL"),
        ("env:NOT_SET_ANYWHERE", "SELECT 1", "NOT_SET_ANYWHERE is not set"),
        (shop, "DELETE FROM oncehook_guard.oncehook_applied", "may not touch schema oncehook_guard"),
    ] {
        let problems = parse("sqlite://a.db", database, statement).unwrap_err();
        let problems: Vec<String> = problems.list.iter().map(|problem| format!("{problem:?}")).collect();
        let problems = problems.join("\n");
        assert!(problems.contains(told) && !problems.contains("hunter2"), "{database}: {problems}");
    }
}
