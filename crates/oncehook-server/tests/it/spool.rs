//! The spool, in the real program: PostgreSQL goes away and comes back, nodes are killed, disks fill up.
//!
//! Every sender has an entity of its own and sends one event after the other, so whatever order the journal ends up with can be
//! compared with the order in which events were answered.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use oncehook_testkit::chaos_proxy::{ChaosProxy, Direction, Trap};
use oncehook_testkit::gateway::{Gateway, prepare};
use oncehook_testkit::outage::{self, CONFIG, Plan, SHOP, Told, emptied, request, until, worked_off};
use oncehook_testkit::postgres::Server;
use oncehook_testkit::random::Random;
use oncehook_testkit::sender::ask;
use serde_json::json;
use tokio::task::block_in_place;

const BINARY: &str = env!("CARGO_BIN_EXE_oncehook");

fn serve(url: &str, directory: &Path) -> Gateway {
    serve_with(url, directory, CONFIG, &[])
}

fn serve_with(url: &str, directory: &Path, config: &str, environment: &[(&str, &str)]) -> Gateway {
    outage::serve(BINARY.as_ref(), url, directory, config, environment)
}

/// A figure from the environment, for longer runs by hand.
#[expect(clippy::disallowed_methods, reason = "tests are told their size")]
fn figure(name: &str, usual: u64) -> u64 {
    std::env::var(name).map_or(usual, |text| text.parse().unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn r4_postgres_stopped_under_load_is_no_error_at_a_spool_source_and_nothing_is_lost_doubled_or_reordered() {
    let plan =
        Plan { seconds: figure("ONCEHOOK_OUTAGE_SECONDS", 3), rate: figure("ONCEHOOK_OUTAGE_RATE", 200), senders: 20 };
    let seen = outage::run(BINARY.as_ref(), &plan).await;
    eprintln!("{seen}");
    // The machine may be busy with other tests; most of the time it is not.
    assert!(seen.refused_within(0.5) < Duration::from_millis(50), "{seen}");
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
    assert_eq!((&spool["events"], &spool["alarm"], &spool["failing"]), (&json!(1), &json!(false), &json!(null)));
    assert_eq!(gateway.metric("oncehook_spool_events").await, 1.0);
    assert!(gateway.metric("oncehook_spool_size_bytes").await > 700.0);
    assert_eq!(gateway.metric("oncehook_ready").await, 0.0);

    // Another process must not have the same file.
    let mut second = Command::new(BINARY);
    second.arg("serve").env("SHOP_DATABASE", database.url());
    let refused = Gateway::try_start(second, directory.path()).err().unwrap();
    assert!(refused.contains("open the spool spool.db") && refused.contains("in use by another"), "{refused}");

    gateway.signal("TERM");
    let status = block_in_place(|| gateway.wait(Duration::from_secs(31)));
    assert_eq!(status.code(), Some(1), "{}", gateway.log());
    assert!(gateway.log().contains("1 accepted events stay in the spool"), "{}", gateway.log());
    assert!(gateway.log().contains("attempts under way, 1 events in the spool; at most 30 s"), "{}", gateway.log());

    proxy.accept();
    let mut gateway = serve(&database.url_at(proxy.port()), directory.path());
    emptied(&gateway).await;
    worked_off(&gateway, &database).await;
    let shown = gateway.json(&format!("/api/events/{id}")).await;
    assert_eq!((&shown["id"], &shown["status"], &shown["duplicates"]), (&json!(id), &json!("succeeded"), &json!(1)));
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
    assert!(told.ids().values().all(|ids| ids.len() == 2));
    proxy.accept();
    for node in &nodes {
        emptied(node).await;
        worked_off(node, &database).await;
    }
    told.check_ids(&[&nodes[0], &nodes[1]], 50).await;
    assert_eq!(told.check(&database), 50);
    // An order reaches the event under either name.
    let ids = told.ids()["evt_7"].clone();
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
    let spool = gateway.json("/readyz").await["spool"].clone();
    assert_eq!((&spool["percent_full"], &spool["alarm"]), (&json!(100), &json!(true)));
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
    assert!(told.len() > 100 && killed_full > 0 && stored >= told.len(), "{} told, {killed_full}", told.len());
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
    std::fs::write(directory.path().join("spool.db"), b"ceci n'est pas une file d'attente ".repeat(200)).unwrap();
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

/// Rows of the file are changed while nobody looks: a body, and a text that is none any more.
#[tokio::test(flavor = "multi_thread")]
async fn fault_11_damaged_events_in_the_spool_raise_the_alarm_and_hold_up_nobody() {
    let database = Server::shared().database();
    database.query(SHOP);
    let proxy = ChaosProxy::start(Server::shared().port());
    let directory = tempfile::tempdir().unwrap();
    let start = || serve(&database.url_at(proxy.port()), directory.path());
    let mut gateway = start();
    proxy.down();
    let told = Told::default();
    for number in 0..6 {
        let key = format!("evt_{number}");
        assert!(told.record(&key, &ask(gateway.ingress, &request("stripe", &key, "pi")).await.unwrap()));
    }
    gateway.kill();
    let file = rusqlite::Connection::open(directory.path().join("spool.db")).unwrap();
    for change in [
        "body = CAST(replace(CAST(body AS TEXT), 'payment', 'pavment') AS BLOB) WHERE seq = 1",
        "entity = CAST(x'70ff' AS TEXT) WHERE seq = 3",
    ] {
        assert_eq!(file.execute(&format!("UPDATE oncehook_spool SET {change}"), []).unwrap(), 1);
    }
    drop(file);
    proxy.accept();
    let gateway = start();
    emptied(&gateway).await;
    worked_off(&gateway, &database).await;
    assert_eq!(database.query("SELECT string_agg(key, ' ' ORDER BY key) FROM orders"), "evt_1 evt_3 evt_4 evt_5");
    for seen in ["/readyz", "/api/stats"] {
        let spool = gateway.json(seen).await["spool"].clone();
        assert_eq!((&spool["set_aside"], &spool["alarm"]), (&json!(2), &json!(true)), "{seen}");
    }
    assert_eq!(gateway.metric("oncehook_spool_set_aside").await, 2.0);
    assert_eq!(gateway.metric("oncehook_spool_alarm").await, 1.0);
    until(&gateway, "the log says so", async || {
        gateway.log().matches("is damaged").count() == 2 && gateway.log().contains("the spool needs attention")
    })
    .await;
    // Their senders can still bring them.
    for key in ["evt_0", "evt_2"] {
        assert!(told.record(key, &ask(gateway.ingress, &request("stripe", key, "pi")).await.unwrap()));
    }
    worked_off(&gateway, &database).await;
    assert_eq!(database.query("SELECT count(*), count(DISTINCT key) FROM orders"), "6|6");
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
    until(&gateway, "it notices", async || gateway.json("/readyz").await["status"] == "degraded").await;
    other.execute_batch("COMMIT").unwrap();
    emptied(&gateway).await;
    until(&gateway, "ready", async || gateway.json("/readyz").await["status"] == "ready").await;
    told.check_ids(&[&gateway], 20).await;
    assert_eq!(gateway.events().await.len(), 20);
}
