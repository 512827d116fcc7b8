//! Bodies as large as providers send them: taken, stored and forwarded byte for byte on every journal, or refused with the
//! limit in words before anything is lost in silence.

use std::path::Path;
use std::process::Command;

use oncehook_server::config::Config;
use oncehook_testkit::chaos_proxy::ChaosProxy;
use oncehook_testkit::gateway::Gateway;
use oncehook_testkit::outage::until;
use oncehook_testkit::receiver::{Receiver, Reply};
use oncehook_testkit::shop::drained;
use oncehook_testkit::{mysql, postgres};
use tempfile::TempDir;

use crate::kit::{BINARY, Signs, directory, exchange, run, soon, statuses, text};

const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

fn config(server: &str, journal: &str, github: &str, url: &str) -> String {
    format!(
        "[server]\ningress = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\n{server}\n[journal]\nurl = \"{journal}\"\n\
         [[source]]\nname = \"github\"\nprovider = \"github\"\nsecrets = [\"file:secret\"]\n{github}\n\
         [[route]]\nname = \"build\"\nsource = \"github\"\n[route.http]\nurl = \"{url}\"\n"
    )
}

fn start(config: &str) -> (TempDir, Gateway) {
    let directory = directory(config, &[("secret", SECRET)]);
    let gateway = Gateway::start(Path::new(BINARY), directory.path());
    (directory, gateway)
}

/// A push of many commits, of so many bytes.
fn push(bytes: usize) -> Vec<u8> {
    let mut body = br#"{"ref":"refs/heads/main","repository":{"id":1296269},"commits":["#.to_vec();
    let commit =
        r#"{"id":"0d1a26e67d8f5eaf1f6ba5c57fc3c7d91ac0fd1c","message":"Grüße","added":["a/b/c.rs"],"removed":[]},"#;
    while body.len() + commit.len() + 8 < bytes {
        body.extend_from_slice(commit.as_bytes());
    }
    body.resize(bytes - 4, b' ');
    body.extend_from_slice(b"{}]}");
    body
}

/// Status and body of the answer. A server that has seen enough of a body does not read the rest.
async fn send(gateway: &Gateway, delivery: &str, body: &[u8]) -> (u16, String) {
    let given = [("x-github-event", "push"), ("x-github-delivery", delivery), ("connection", "close")];
    let request = Signs::preset("github", SECRET, "github").post(&given, body);
    let received = soon(exchange(gateway.ingress, &request)).await.expect("the connection is closed");
    let said = String::from_utf8_lossy(&received);
    let (_, body) = said.split_once("\r\n\r\n").unwrap_or_default();
    (statuses(&received)[0], body.to_owned())
}

fn member(json: &str, name: &str) -> String {
    text(&serde_json::from_str::<serde_json::Value>(json).unwrap()[name])
}

/// Large pushes and small ones in between arrive whole, once, at the destination and at whoever looks.
async fn large_pushes_arrive(journal: &str) {
    let receiver = Receiver::start(|_, _| Reply::status(200, "")).await;
    let (_directory, gateway) = start(&config("", journal, "", &receiver.url("/")));
    for (number, bytes) in [24_000_000, 500, 24_000_000, 2 << 20].into_iter().enumerate() {
        let mut body = push(bytes);
        body.extend_from_slice(number.to_string().as_bytes());
        let (status, said) = send(&gateway, &format!("d{number}"), &body).await;
        assert_eq!(status, 200, "{said}");
        let event = member(&said, "event");
        assert_eq!(member(&send(&gateway, &format!("d{number}"), &body).await.1, "status"), "duplicate");
        assert_eq!(drained(&gateway).await, 0);
        assert!(receiver.requests()[number].body == body, "the body of push {number} is another one");
        assert!(
            gateway.get(&format!("/api/events/{event}/body")).await.body == body,
            "push {number} is stored otherwise"
        );
    }
    assert_eq!(receiver.requests().len(), 4);
    let (status, said) = send(&gateway, "over", &push((25 << 20) + 1)).await;
    assert!(status == 413 && said.contains("26214400"), "{status} {said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_77_pushes_of_24_mb_from_github_arrive_on_sqlite() {
    large_pushes_arrive("sqlite://journal.db").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_77_pushes_of_24_mb_from_github_arrive_on_postgresql() {
    let database = postgres::Server::shared().database();
    large_pushes_arrive(&database.url()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_77_pushes_of_24_mb_from_github_arrive_on_mariadb() {
    let server = mysql::Server::start(&["--max-allowed-packet=64M"]);
    let database = server.database();
    large_pushes_arrive(&database.url()).await;
}

/// GitHub never sends again, so its events go into the spool while the database is away, however large they are.
#[tokio::test(flavor = "multi_thread")]
async fn fault_77_a_push_of_24_mb_waits_in_the_spool_while_the_database_is_away() {
    let database = postgres::Server::shared().database();
    let proxy = ChaosProxy::start(postgres::Server::shared().port());
    let receiver = Receiver::start(|_, _| Reply::status(200, "")).await;
    let journal = database.url_at(proxy.port());
    let (_directory, gateway) = start(&config("", &journal, "", &receiver.url("/")));
    proxy.down();
    until(&gateway, "it notices", async || gateway.json("/readyz").await["status"] == "degraded").await;
    let body = push(24_000_000);
    let (status, said) = send(&gateway, "d1", &body).await;
    assert_eq!(status, 200, "{said}");
    proxy.up();
    until(&gateway, "it arrives", async || receiver.requests().len() == 1).await;
    assert!(receiver.requests()[0].body == body);
}

/// With MariaDB's own default of 16 MB a push of 24 MB cannot be stored. It is refused for good, with the reason, and not
/// again and again with 503.
#[tokio::test(flavor = "multi_thread")]
async fn fault_77_what_the_database_cannot_take_is_refused_with_413_and_said_beforehand() {
    let server = mysql::Server::start(&["--max-allowed-packet=16M"]);
    let database = server.database();
    let receiver = Receiver::start(|_, _| Reply::status(200, "")).await;
    let (directory, gateway) = start(&config("", &database.url(), "", &receiver.url("/")));
    let log = gateway.log();
    assert!(log.contains("max_allowed_packet") && log.contains("github"), "{log}");
    let (status, said) = send(&gateway, "d1", &push(24_000_000)).await;
    assert!(status == 413 && said.contains("body_too_large"), "{status} {said}");
    // Up to the limit that it names everything is taken.
    let limit: usize =
        said.split(|c: char| !c.is_ascii_digit()).filter_map(|number| number.parse().ok()).max().unwrap();
    assert!((11 << 20..16 << 20).contains(&limit), "{said}");
    assert_eq!(send(&gateway, "d2", &push(limit + 1)).await.0, 413);
    let (status, said) = send(&gateway, "d3", &push(limit)).await;
    assert_eq!(status, 200, "{said}");
    assert_eq!(drained(&gateway).await, 0);
    assert_eq!(receiver.requests().len(), 1);
    let (_, _, said) = run(directory.path(), &["check", "--database"]);
    assert!(said.contains("max_allowed_packet"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_77_the_limit_of_a_source_is_what_the_operator_wrote_or_what_the_provider_sends() {
    // What stands under [server] and in the source, and the limit that is in force.
    for (server, github, limit) in [
        ("", "", 25 << 20),
        ("", "body_bytes = 4096", 4096),
        ("[server.limits]\nbody_bytes = 8192", "", 8192),
        ("[server.limits]\nbody_bytes = 8192", "body_bytes = 16384", 16384),
        ("[server.limits]\nin_flight_bytes = 4194304", "", 2 << 20),
    ] {
        let (_directory, gateway) = start(&config(server, "sqlite://journal.db", github, "http://127.0.0.1:9/"));
        let (status, said) = send(&gateway, "d1", &push(limit + 1)).await;
        assert!(status == 413 && said.contains(&limit.to_string()), "{server} {github}: {status} {said}");
        assert_eq!(send(&gateway, "d2", &push(limit)).await.0, 200, "{server} {github}");
    }
}

#[test]
fn fault_77_check_says_when_a_source_takes_less_than_its_provider_sends() {
    let warnings = |server: &str, github: &str| {
        let config = config(server, "sqlite://journal.db", github, "http://127.0.0.1:9/");
        let directory = directory(&config, &[("secret", SECRET)]);
        let output = Command::new(BINARY).arg("check").current_dir(directory.path()).output().unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(!warnings("", "").contains("warning"), "{}", warnings("", ""));
    for (server, github) in [
        ("[server.limits]\nin_flight_bytes = 4194304", ""),
        ("[server.limits]\nbody_bytes = 8192", ""),
        ("", "body_bytes = 4096"),
    ] {
        let said = warnings(server, github);
        assert!(said.contains("warning: source github") && said.contains("26214400"), "{server} {github}: {said}");
    }
    let config = config(
        "[server.limits]\nin_flight_bytes = 4194304",
        "sqlite://a.db",
        "body_bytes = 4194305",
        "http://127.0.0.1:9/",
    );
    let directory = directory("", &[("secret", SECRET)]);
    let config = config.replace("file:secret", &format!("file:{}/secret", directory.path().display()));
    let problems = Config::parse("oncehook.toml", &config).unwrap_err().to_string();
    assert!(problems.contains("in_flight_bytes"), "{problems}");
}
