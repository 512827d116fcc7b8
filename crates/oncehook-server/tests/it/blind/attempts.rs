//! Failed attempts, dead deliveries and destinations that are down, on every journal.

use std::process::Command;

use oncehook_testkit::gateway::Gateway;
use oncehook_testkit::receiver::{Receiver, Reply};
use oncehook_testkit::sender::ask;
use oncehook_testkit::{mysql, postgres};
use tempfile::TempDir;

use super::{line, lines, until};
use crate::kit::{BINARY, Signs, directory, soon, text};

const SECRET: &str = "whsec_attempts_7aa";

/// What stands in the body, and what the destination says. Neither may ever be logged.
const PRIVATE: &str = "4242-private-card";
const SAID: &str = "the-destinations-own-words";

fn config(url: &str, http: &str) -> String {
    format!(
        r#"[server]
ingress = "127.0.0.1:0"
admin = "127.0.0.1:0"
[journal]
url = "{url}"
[[source]]
name = "stripe"
provider = "stripe"
secrets = ["file:secret"]
[[route]]
name = "rows"
source = "stripe"
retry = {{ max_attempts = 2, base = "1ms", cap = "1ms" }}
[route.sql]
statement = "INSERT INTO numbers (amount) VALUES (:amount)"
bind = {{ amount = "/card" }}
[[route]]
name = "calls"
source = "stripe"
retry = {{ max_attempts = 2, base = "1ms", cap = "1ms" }}
[route.http]
url = "{http}"
"#
    )
}

async fn start(url: &str, receiver: &Receiver) -> (Gateway, TempDir) {
    let directory = directory(&config(url, &receiver.url("/")), &[("secret", SECRET)]);
    if url.starts_with("sqlite:") {
        let file = rusqlite::Connection::open(directory.path().join("journal.db")).unwrap();
        file.execute_batch(
            "CREATE TABLE numbers (amount TEXT);
             CREATE TRIGGER refuse BEFORE INSERT ON numbers BEGIN SELECT raise(ABORT, 'bad value ' || NEW.amount); END",
        )
        .unwrap();
    }
    let mut command = Command::new(BINARY);
    command.arg("serve");
    (Gateway::start_command(command, directory.path()), directory)
}

async fn deliver(gateway: &Gateway, id: &str) -> String {
    let body = format!(r#"{{"id":"{id}","type":"a","card":"{PRIVATE}"}}"#);
    let request = Signs::preset("stripe", SECRET, "stripe").post(&[], body.as_bytes());
    let answer = soon(ask(gateway.ingress, &request)).await.unwrap();
    assert_eq!(answer.status, 200);
    text(&answer.json()["event"])
}

/// Each failed attempt has a line with its number, its cause and the next try; a dead delivery says what to do; an
/// operator can read what happened, and the log has none of it.
async fn check(url: &str) {
    let receiver = Receiver::start(|_, _| Reply::status(500, format!("{SAID} {PRIVATE}"))).await;
    let (gateway, _directory) = start(url, &receiver).await;
    let event = deliver(&gateway, "evt_fails").await;
    for route in ["rows", "calls"] {
        let route = format!("route {route}");
        line(&gateway, &["WARN", &event, &route, "attempt 1 of 2 failed", "next try in"]).await;
        let retry = format!("oncehook retry {event}");
        line(&gateway, &["ERROR", "a delivery is dead", &event, &route, "attempt 2", &retry]).await;
    }
    line(&gateway, &["route calls", "HTTP 500"]).await;
    let shown = until("both deliveries dead", &gateway, async || {
        let shown = gateway.json(&format!("/api/events/{event}")).await;
        let dead = shown["deliveries"].as_array()?.iter().all(|delivery| delivery["state"] == "dead");
        dead.then_some(shown)
    })
    .await;
    assert!(shown["deliveries"].to_string().contains(SAID), "operators see what the destination said: {shown}");
    let log = gateway.log();
    assert!(!log.contains(PRIVATE) && !log.contains(SAID), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_failed_attempts_and_dead_deliveries_are_logged_without_foreign_words_on_sqlite() {
    check("sqlite://journal.db").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_failed_attempts_and_dead_deliveries_are_logged_without_foreign_words_on_postgres() {
    let database = postgres::Server::shared().database();
    database.query("CREATE TABLE numbers (amount integer)");
    check(&database.url()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_failed_attempts_and_dead_deliveries_are_logged_without_foreign_words_on_mysql() {
    let database = mysql::Server::shared().database();
    database.query("CREATE TABLE numbers (amount integer)");
    check(&database.url()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_a_destination_that_is_down_is_logged_with_cause_next_try_and_what_waits() {
    let down = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = down.local_addr().unwrap();
    drop(down);
    let config = config("sqlite://journal.db", &format!("http://{address}/")).replace(
        "[route.http]",
        "breaker = { failures = 2, rest = \"100ms\", longest_rest = \"200ms\" }\n[route.http]",
    );
    let config = config.replace(
        "max_attempts = 2, base = \"1ms\", cap = \"1ms\"",
        "max_attempts = 100, base = \"10ms\", cap = \"10ms\"",
    );
    let directory = directory(&config, &[("secret", SECRET)]);
    let mut command = Command::new(BINARY);
    command.arg("serve");
    let gateway = Gateway::start_command(command, directory.path());
    for number in 0..10 {
        deliver(&gateway, &format!("evt_{number}")).await;
    }
    let opened =
        line(&gateway, &["WARN", "route calls: destination failing", "(connection refused)", "next try in 100 ms"])
            .await;
    assert!(opened.contains("wait"), "{opened}");
    line(&gateway, &["route calls: destination still failing (connection refused); next try in 200 ms"]).await;
    // It goes on failing for some probes, and says no more of it than that.
    let probes = gateway.metric("oncehook_attempt_seconds_count").await;
    until("further probes", &gateway, async || {
        (gateway.metric("oncehook_attempt_seconds_count").await >= probes + 4.0).then_some(())
    })
    .await;
    assert_eq!(lines(&gateway, &["route calls: destination"]).len(), 2, "{}", gateway.log());
    assert!(lines(&gateway, &["the breaker changed"]).is_empty(), "{}", gateway.log());
    let _receiver = Receiver::start_at(address, |_, _| Reply::status(200, "")).await;
    line(&gateway, &["INFO", "route calls: destination works again after"]).await;
}
