//! What operators can do with the real binary: over the admin API and on the command line, with routes that write into the
//! journal's own file.

mod replays;
mod strangers;
mod terminal;
mod wrong_clock;

use std::time::{Duration, Instant};

use oncehook_testkit::gateway::Gateway;
use oncehook_testkit::sender::{Answer, ask};
use serde_json::{Value, json};

use crate::kit::{BINARY, Rig, Signs, check_error, directory, run, soon, text};

const SECRET: &str = "whsec_operate";
const SECRETS: [(&str, &str); 1] = [("stripe.secret", SECRET)];

/// Two routes, one after the other. `orders` refuses an order that is already there; `gone` needs a table that is not.
pub(crate) const CONFIG: &str = r#"
[[source]]
name = "stripe"
provider = "stripe"
secrets = ["file:stripe.secret"]

[[route]]
name = "orders"
source = "stripe"
types = ["order.*"]
retry = { max_attempts = 2, base = "1ms", cap = "1ms" }
[route.sql]
statement = "INSERT INTO orders (event, amount) VALUES (:event, :amount) RETURNING id, amount"
bind = { event = "$key", amount = "/amount" }

[[route]]
name = "mails"
after = "orders"
[route.sql]
statement = "INSERT INTO mails (order_id) VALUES (:order)"
bind = { order = "$result/id" }

[[route]]
name = "gone"
source = "stripe"
types = ["gone"]
retry = { max_attempts = 2, base = "1ms", cap = "1ms" }
[route.sql]
statement = "INSERT INTO later (event) VALUES (:event)"
bind = { event = "$key" }
"#;

const TABLES: &str = "CREATE TABLE orders (id INTEGER PRIMARY KEY, event TEXT, amount NUMERIC);
                      CREATE TABLE mails (order_id INTEGER)";

/// A gateway with its user's tables, and beside it a configuration for the command line.
pub(crate) fn rig() -> Rig {
    rig_with("", CONFIG)
}

pub(crate) fn rig_with(server: &str, config: &str) -> Rig {
    let whole = format!(
        "[server]\ningress = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\n{server}\n[journal]\nurl = \"sqlite://journal.db\"\n{config}"
    );
    let directory = directory(&whole, &SECRETS);
    rusqlite::Connection::open(directory.path().join("journal.db")).unwrap().execute_batch(TABLES).unwrap();
    let gateway = Gateway::start(BINARY.as_ref(), directory.path());
    let rig = Rig { gateway, directory };
    write_client_config(&rig, server);
    rig
}

pub(crate) fn write_client_config(rig: &Rig, server: &str) {
    let (ingress, admin) = (rig.gateway.ingress, rig.gateway.admin);
    let config = format!("[server]\ningress = \"{ingress}\"\nadmin = \"{admin}\"\n{server}\n{CONFIG}");
    std::fs::write(rig.directory.path().join("client.toml"), config).unwrap();
}

pub(crate) fn client(rig: &Rig, arguments: &[&str]) -> (i32, String, String) {
    run(rig.directory.path(), &[&["--config", "client.toml"], arguments].concat())
}

pub(crate) fn parsed(out: &str) -> Value {
    serde_json::from_str(out).unwrap_or_else(|error| panic!("{error}: {out}"))
}

/// Delivers an event of a type and gives its id.
pub(crate) async fn deliver(rig: &Rig, id: &str, kind: &str) -> String {
    let body = format!(r#"{{"id":"{id}","type":"{kind}","amount":12.50}}"#);
    rig.deliver(&Signs::preset("stripe", SECRET, "stripe").post(&[], body.as_bytes())).await.1
}

/// Waits until an event is in a status, and gives its whole story.
pub(crate) async fn until(rig: &Rig, event: &str, status: &str) -> Value {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let shown = rig.show(event).await;
        if shown["status"] == status {
            return shown;
        }
        assert!(Instant::now() < deadline, "{event} is not {status}: {shown:#}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// A number from the user's tables.
pub(crate) fn number(rig: &Rig, sql: &str) -> i64 {
    let connection = rusqlite::Connection::open(rig.journal()).unwrap();
    connection.busy_timeout(Duration::from_secs(5)).unwrap();
    connection.query_row(sql, [], |row| row.get(0)).unwrap()
}

pub(crate) fn execute(rig: &Rig, sql: &str) {
    let connection = rusqlite::Connection::open(rig.journal()).unwrap();
    connection.busy_timeout(Duration::from_secs(5)).unwrap();
    connection.execute_batch(sql).unwrap();
}

async fn call(rig: &Rig, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Answer {
    let admin = rig.gateway.admin;
    let mut request = format!("{method} {path} HTTP/1.1\r\nhost: {admin}\r\ncontent-length: {}\r\n", body.len());
    for (name, value) in headers {
        request.push_str(&format!("{name}: {value}\r\n"));
    }
    soon(ask(admin, format!("{request}\r\n{body}").as_bytes())).await.unwrap()
}

pub(crate) async fn post(rig: &Rig, path: &str, body: &Value) -> Answer {
    call(rig, "POST", path, &[("content-type", "application/json")], &body.to_string()).await
}

/// A call that must succeed.
pub(crate) async fn order(rig: &Rig, path: &str, body: &Value) -> Value {
    let answer = post(rig, path, body).await;
    assert_eq!(answer.status, 200, "{path}: {}", String::from_utf8_lossy(&answer.body));
    answer.json()
}

/// Follows a replay to its end.
pub(crate) async fn finished(rig: &Rig, replay: &str) -> Value {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let progress = rig.gateway.json(&format!("/api/replays/{replay}")).await;
        if progress["state"] != "running" {
            return progress;
        }
        assert!(Instant::now() < deadline, "{progress}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn r20_an_event_takes_effect_and_its_story_is_told() {
    let rig = rig();
    let event = deliver(&rig, "evt_1", "order.paid").await;
    let shown = until(&rig, &event, "succeeded").await;
    let deliveries = shown["deliveries"].as_array().unwrap();
    let routes: Vec<_> = deliveries.iter().map(|delivery| text(&delivery["route"])).collect();
    assert_eq!(routes, ["mails", "orders"]);
    let orders = &deliveries[1];
    // A result is JSON, number for number.
    assert_eq!(orders["result"]["amount"].to_string(), "12.5");
    assert_eq!((&orders["state"], &orders["attempt"], &orders["epoch"]), (&json!("succeeded"), &json!(1), &json!(0)));
    assert_eq!((&orders["error"], &orders["cause"]), (&Value::Null, &Value::Null));
    assert_eq!(orders["attempts"][0]["outcome"], "succeeded");
    assert!(orders["settled_at"].is_string() && orders["run_at"].is_string());
    assert_eq!(shown["audit"], json!([]));
    assert_eq!((number(&rig, "SELECT count(*) FROM orders"), number(&rig, "SELECT count(*) FROM mails")), (1, 1));
    // In a list deliveries have no attempts.
    let listed = rig.gateway.json("/api/events?status=succeeded").await;
    assert_eq!(listed["events"][0]["deliveries"][0].get("attempts"), None);
    // An event that no route wants waits for one.
    let other = deliver(&rig, "evt_2", "something.else").await;
    assert_eq!(rig.show(&other).await["status"], "unrouted");
}

#[tokio::test]
async fn r27_a_dead_letter_is_retried_after_the_fix_and_applied_once() {
    let rig = rig();
    let event = deliver(&rig, "evt_1", "gone").await;
    let shown = until(&rig, &event, "dead").await;
    let delivery = &shown["deliveries"][0];
    assert!(text(&delivery["error"]).contains("later"), "{delivery}");
    assert_eq!(delivery["cause"], "handler");
    let (code, out, err) = client(&rig, &["show", &event]);
    assert!(
        code == 0 && out.contains("gone: dead") && out.contains("cause handler") && out.contains("failed"),
        "{out}{err}"
    );

    execute(&rig, "CREATE TABLE later (event TEXT)");
    let (code, out, err) = client(&rig, &["retry", &event, "--reason", "made the table"]);
    assert_eq!((code, err.as_str()), (0, ""), "{out}");
    assert_eq!(out, format!("{event} retry: gone (epoch 0)\n"));
    let shown = until(&rig, &event, "succeeded").await;
    assert_eq!(number(&rig, "SELECT count(*) FROM later"), 1);
    let entry = &shown["audit"][0];
    assert_eq!((&entry["action"], &entry["reason"]), (&json!("retry"), &json!("made the table")), "{shown:#}");
    assert_eq!(entry["detail"]["routes"], json!(["gone"]));
    let (_, out, _) = client(&rig, &["show", &event]);
    assert!(out.contains("retry by ") && out.contains("made the table"), "{out}");
    // Once more there is nothing to do, and that is said.
    let answer = post(&rig, &format!("/api/events/{event}/retry"), &json!({})).await;
    check_error(&answer, 409, "unfit");
    let (code, out, err) = client(&rig, &["retry", &event]);
    assert!(code == 1 && out.is_empty() && err.contains("[unfit]"), "{err}");
    assert_eq!(number(&rig, "SELECT count(*) FROM later"), 1);
}

#[tokio::test]
async fn fault_55_a_forced_replay_runs_once_per_epoch() {
    let rig = rig();
    let event = deliver(&rig, "evt_1", "order.paid").await;
    until(&rig, &event, "succeeded").await;
    let path = format!("/api/events/{event}/replay");
    // Without force: nothing happens to what took effect.
    let answer = order(&rig, &path, &json!({})).await;
    assert_eq!(answer, json!({ "event": event, "routes": [], "epoch": 0 }));
    // With it, but not knowing what one does.
    for (body, code) in [
        (json!({ "force": true }), "epoch"),
        (json!({ "force": true, "epoch": 1 }), "reason"),
        (json!({ "force": true, "epoch": 1, "reason": "  " }), "reason"),
        (json!({ "force": true, "epoch": 0, "reason": "x" }), "epoch"),
        (json!({ "force": false, "epoch": 1, "reason": "x" }), "epoch"),
        (json!({ "epoch": 1 }), "epoch"),
        (json!({ "forced": true }), "body"),
        (json!({ "force": "yes" }), "body"),
        (json!({ "reason": "a\nb" }), "reason"),
        (json!({ "reason": "x".repeat(1_001) }), "reason"),
        (json!({ "route": "No Such" }), "route"),
    ] {
        check_error(&post(&rig, &path, &body).await, 400, code);
    }
    let answer = post(&rig, &path, &json!({ "force": true, "epoch": 2, "reason": "x" })).await;
    check_error(&answer, 409, "epoch");
    assert!(text(&answer.json()["error"]["message"]).contains("next epoch is 1"));
    assert_eq!(number(&rig, "SELECT count(*) FROM orders"), 1);
    // Two operators mean the same replay.
    let body = json!({ "force": true, "epoch": 1, "reason": "the mail was lost" });
    let (one, two) = tokio::join!(post(&rig, &path, &body), post(&rig, &path, &body));
    let mut statuses = [one.status, two.status];
    statuses.sort_unstable();
    assert_eq!(statuses, [200, 409]);
    until(&rig, &event, "succeeded").await;
    assert_eq!((number(&rig, "SELECT count(*) FROM orders"), number(&rig, "SELECT count(*) FROM mails")), (2, 2));
    // The command line reads the epoch itself.
    let (code, _, err) = client(&rig, &["replay", &event, "--force"]);
    assert!(code == 2 && err.contains("--reason"), "{err}");
    let (code, out, _) = client(&rig, &["replay", &event, "--force", "--reason", "again", "--json"]);
    assert_eq!((code, parsed(&out)["epoch"].clone()), (0, json!(2)), "{out}");
    let shown = until(&rig, &event, "succeeded").await;
    assert_eq!(number(&rig, "SELECT count(*) FROM orders"), 3);
    let actions: Vec<_> = shown["audit"].as_array().unwrap().iter().map(|entry| text(&entry["action"])).collect();
    assert_eq!(actions, ["force_replay", "force_replay"], "a replay that changed nothing is not written down");
    assert_eq!(shown["audit_total"], 2);
}

#[tokio::test]
async fn skip_and_release() {
    let rig = rig();
    let event = deliver(&rig, "evt_1", "gone").await;
    until(&rig, &event, "dead").await;
    let (code, out, _) = client(&rig, &["skip", &event, "--route", "gone", "--reason", "a test", "--json"]);
    assert_eq!((code, parsed(&out)["routes"].clone()), (0, json!(["gone"])), "{out}");
    assert_eq!(rig.show(&event).await["status"], "skipped");
    check_error(&post(&rig, &format!("/api/events/{event}/skip"), &json!({})).await, 409, "unfit");
    check_error(&post(&rig, &format!("/api/events/{event}/release"), &json!({})).await, 409, "unfit");
    // An event whose type is ambiguous is held, whatever its route.
    let body = br#"{"id":"evt_2","type":"order.paid","type":"order.paid","amount":1}"#;
    let (status, held) = rig.deliver(&Signs::preset("stripe", SECRET, "stripe").post(&[], body)).await;
    assert_eq!(status, "quarantined");
    check_error(&post(&rig, &format!("/api/events/{held}/retry"), &json!({})).await, 409, "unfit");
    let (code, out, err) = client(&rig, &["release", &held]);
    assert_eq!((code, err.as_str()), (0, ""), "{out}");
    assert_ne!(rig.show(&held).await["status"], "quarantined");
    // It is let go, and still has no key of its own.
    assert_eq!(rig.show(&held).await["flags"], json!(["key_missing"]));
}

#[tokio::test]
async fn orders_for_nothing_are_404() {
    let rig = rig();
    let nobody = "0199d2a0-0000-7000-8000-000000000000";
    for verb in ["retry", "replay", "skip", "release"] {
        for id in [nobody, "nonsense"] {
            check_error(&post(&rig, &format!("/api/events/{id}/{verb}"), &json!({})).await, 404, "no_event");
        }
        let (code, out, err) = match verb {
            "release" | "skip" | "retry" | "replay" => client(&rig, &[verb, nobody]),
            _ => unreachable!(),
        };
        assert!(code == 1 && out.is_empty() && err.contains("[no_event]"), "{verb}: {err}");
        assert_eq!(client(&rig, &[verb, "nonsense"]).0, 2);
        assert_eq!(client(&rig, &[verb]).0, 2, "{verb} needs to know which");
    }
    for (method, path, code) in [
        ("POST", "/api/sources/nobody/pause", "no_source"),
        ("POST", "/api/sources/nobody/resume", "no_source"),
        ("POST", "/api/routes/nobody/pause", "no_route"),
        ("POST", "/api/routes/nobody/resume", "no_route"),
        ("GET", "/api/replays/nobody", "no_replay"),
        ("DELETE", "/api/replays/nobody", "no_replay"),
    ] {
        check_error(&call(&rig, method, path, &[], "").await, 404, code);
    }
    // What is there, but takes another method.
    for (method, path, allowed) in [
        ("GET", "/api/replays", "POST"),
        ("GET", "/api/routes/orders/pause", "POST"),
        ("POST", "/api/routes", "GET"),
        ("PUT", "/api/replays/x", "DELETE"),
    ] {
        let answer = call(&rig, method, path, &[], "").await;
        check_error(&answer, 405, "method");
        assert!(answer.header("allow").is_some_and(|allow| allow.contains(allowed)), "{}", answer.head);
    }
}

#[tokio::test]
async fn r48_paused_routes_and_sources_accept_and_wait() {
    let mut rig = rig();
    let (code, out, err) = client(&rig, &["pause", "--route", "mails", "--reason", "mail server moves"]);
    assert_eq!((code, out.as_str(), err.as_str()), (0, "route mails paused\n", ""));
    let event = deliver(&rig, "evt_1", "order.paid").await;
    let states = async || {
        let shown = rig.show(&event).await;
        let deliveries = shown["deliveries"].as_array().unwrap().clone();
        deliveries.iter().map(|delivery| text(&delivery["state"])).collect::<Vec<_>>()
    };
    let ordered = async {
        while states().await.len() < 2 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    soon(ordered).await;
    tokio::time::sleep(Duration::from_millis(1_200)).await;
    assert_eq!(states().await, ["ready", "succeeded"], "mails wait, orders do not");
    let routes = rig.gateway.json("/api/routes").await;
    let of = |routes: &Value, name: &str| {
        routes["routes"].as_array().unwrap().iter().find(|route| route["name"] == name).unwrap().clone()
    };
    let mails = of(&routes, "mails");
    assert_eq!((&mails["paused"], &mails["source_paused"]), (&json!(true), &json!(false)));
    assert_eq!(mails["backlog"]["waiting"], 1);
    assert!(mails["backlog"]["oldest_seconds"].as_f64().is_some_and(|age| (0.0..60.0).contains(&age)), "{mails}");
    assert_eq!(
        (&mails["after"], &mails["handler"], &mails["breaker"]),
        (&json!("orders"), &json!("sql"), &json!("closed"))
    );
    assert_eq!(of(&routes, "orders")["paused"], false);
    assert_eq!(of(&routes, "orders")["types"], json!(["order.*"]));
    // Over a restart too.
    assert!(rig.gateway.stop().success());
    rig.gateway = Gateway::start(BINARY.as_ref(), rig.directory.path());
    write_client_config(&rig, "");
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    assert_eq!(number(&rig, "SELECT count(*) FROM mails"), 0);
    assert_eq!(client(&rig, &["resume", "--route", "mails", "--json"]).0, 0);
    until(&rig, &event, "succeeded").await;

    // A whole source.
    let answer = order(&rig, "/api/sources/stripe/pause", &json!({ "reason": "audit" })).await;
    assert_eq!(answer, json!({ "source": "stripe", "paused": true }));
    let waiting = deliver(&rig, "evt_2", "order.paid").await;
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    assert_eq!(rig.show(&waiting).await["status"], "ready");
    let routes = rig.gateway.json("/api/routes").await;
    assert!(
        routes["routes"]
            .as_array()
            .unwrap()
            .iter()
            .all(|route| route["source_paused"] == true && route["paused"] == true)
    );
    let stats = rig.gateway.json("/api/stats").await;
    let orders = stats["routes"].as_array().unwrap().iter().find(|route| route["route"] == "orders").unwrap();
    assert_eq!((&orders["waiting"], &orders["configured"]), (&json!(1), &json!(true)), "{stats:#}");
    // An empty body will do.
    assert_eq!(call(&rig, "POST", "/api/sources/stripe/resume", &[], "").await.status, 200);
    until(&rig, &waiting, "succeeded").await;
    for wrong in [&["pause"][..], &["pause", "--source", "a", "--route", "b"], &["resume"]] {
        assert_eq!(client(&rig, wrong).0, 2, "{wrong:?}");
    }
    let (code, _, err) = client(&rig, &["pause", "--route", "../events"]);
    assert!(code == 1 && err.contains("there is no route"), "{err}");
}

#[tokio::test]
async fn a_route_that_was_taken_out_leaves_its_backlog_in_sight() {
    let mut rig = rig();
    order(&rig, "/api/routes/gone/pause", &json!({})).await;
    deliver(&rig, "evt_1", "gone").await;
    assert!(rig.gateway.stop().success());
    let path = rig.directory.path().join("oncehook.toml");
    let config = std::fs::read_to_string(&path).unwrap();
    let (config, _) = config.split_once("[[route]]\nname = \"gone\"").unwrap();
    std::fs::write(&path, config).unwrap();
    rig.gateway = Gateway::start(BINARY.as_ref(), rig.directory.path());
    let stats = rig.gateway.json("/api/stats").await;
    let gone = stats["routes"].as_array().unwrap().iter().find(|route| route["route"] == "gone").unwrap();
    assert_eq!((&gone["configured"], &gone["waiting"]), (&json!(false), &json!(1)), "{gone}");
    let routes = rig.gateway.json("/api/routes").await;
    let of =
        |name: &str| routes["routes"].as_array().unwrap().iter().find(|route| route["name"] == name).unwrap().clone();
    let gone = of("gone");
    assert_eq!((&gone["configured"], &gone["backlog"]["waiting"]), (&json!(false), &json!(1)), "{gone}");
    assert_eq!((&gone["source"], &gone["handler"]), (&Value::Null, &Value::Null), "{gone}");
    assert_eq!(of("orders")["configured"], true);
    // And it is said once, at the start.
    let said = async {
        while !rig.gateway.log().contains("not in the configuration") {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    soon(said).await;
    let log = rig.gateway.log();
    let lines: Vec<_> = log.lines().filter(|line| line.contains("not in the configuration")).collect();
    assert!(matches!(lines[..], [line] if line.contains("route=\"gone\" waiting=1 dead=0")), "{log}");
    // It cannot be paused any more, but resumed, once.
    check_error(&post(&rig, "/api/routes/gone/pause", &json!({})).await, 404, "no_route");
    order(&rig, "/api/routes/gone/resume", &json!({})).await;
    check_error(&post(&rig, "/api/routes/gone/resume", &json!({})).await, 404, "no_route");
}
