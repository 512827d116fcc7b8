//! `oncehook tail`: events as they come in, also over a restart of the gateway.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use oncehook_testkit::gateway::Gateway;
use serde_json::Value;

use crate::kit::{BINARY, Rig, Signs, run, text};

const SECRET: &str = "whsec_tail";
const SECRETS: [(&str, &str); 1] = [("stripe.secret", SECRET)];
const CONFIG: &str = r#"
[[source]]
name = "stripe"
provider = "stripe"
secrets = ["file:stripe.secret"]
[[source]]
name = "other"
provider = "stripe"
secrets = ["file:stripe.secret"]
[[route]]
name = "broken"
source = "stripe"
types = ["broken"]
retry = { max_attempts = 2, base = "1ms", cap = "1ms" }
[route.sql]
statement = "INSERT INTO nowhere (event) VALUES (:event)"
bind = { event = "$key" }
"#;

fn rig() -> Rig {
    let rig = Rig::start("", CONFIG, &SECRETS);
    write_client_config(&rig, rig.gateway.admin);
    rig
}

fn write_client_config(rig: &Rig, admin: std::net::SocketAddr) {
    let config = format!("[server]\nadmin = \"{admin}\"\n{CONFIG}");
    std::fs::write(rig.directory.path().join("client.toml"), config).unwrap();
}

async fn deliver(rig: &Rig, source: &str, id: &str, kind: &str) -> String {
    let body = format!(r#"{{"id":"{id}","type":"{kind}"}}"#);
    rig.deliver(&Signs::preset("stripe", SECRET, source).post(&[], body.as_bytes())).await.1
}

/// A running `tail` and what it prints. Dropping it ends it.
struct Tail {
    child: Child,
    lines: Receiver<String>,
    talk: Receiver<String>,
}

impl Tail {
    fn start(rig: &Rig, arguments: &[&str]) -> Self {
        let mut child = Command::new(BINARY)
            .args(["--config", "client.toml", "tail"])
            .args(arguments)
            .current_dir(rig.directory.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (out, lines) = channel();
        let (err, talk) = channel();
        let (stdout, stderr) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
        std::thread::spawn(move || {
            BufReader::new(stdout).lines().map_while(Result::ok).try_for_each(|line| out.send(line))
        });
        std::thread::spawn(move || {
            BufReader::new(stderr).lines().map_while(Result::ok).try_for_each(|line| err.send(line))
        });
        Self { child, lines, talk }
    }

    #[track_caller]
    fn next(&self) -> String {
        self.lines.recv_timeout(Duration::from_secs(20)).unwrap()
    }

    /// The keys of the next events.
    #[track_caller]
    fn keys(&self, count: usize) -> Vec<String> {
        (0..count).map(|_| text(&serde_json::from_str::<Value>(&self.next()).unwrap()["key"])).collect()
    }

    #[track_caller]
    fn is_quiet(&self) {
        let line = self.lines.recv_timeout(Duration::from_millis(1_200));
        assert_eq!(line, Err(RecvTimeoutError::Timeout));
    }
}

impl Drop for Tail {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test]
async fn events_are_printed_as_they_come_in() {
    let rig = rig();
    for number in 0..5 {
        deliver(&rig, "stripe", &format!("old_{number}"), "a").await;
    }
    let tail = Tail::start(&rig, &["-n", "2", "--json"]);
    assert_eq!(tail.keys(2), ["old_3", "old_4"]);
    for number in 0..20 {
        deliver(&rig, "stripe", &format!("new_{number}"), "a").await;
        // A duplicate is no event.
        deliver(&rig, "stripe", &format!("new_{number}"), "a").await;
    }
    let expected: Vec<_> = (0..20).map(|number| format!("new_{number}")).collect();
    assert_eq!(tail.keys(20), expected);
    tail.is_quiet();
    // A person's line.
    let people = Tail::start(&rig, &["-n", "1"]);
    let line = people.next();
    assert!(line.contains("unrouted") && line.contains("stripe a new_19 ×2"), "{line}");
    // None of the old ones.
    let none = Tail::start(&rig, &["-n", "0", "--json", "--source", "other"]);
    none.is_quiet();
    deliver(&rig, "stripe", "here", "a").await;
    deliver(&rig, "other", "there", "b").await;
    assert_eq!(none.keys(1), ["there"]);
    assert_eq!(tail.keys(2), ["here", "there"]);
}

#[tokio::test]
async fn filters_and_statuses() {
    let rig = rig();
    let typed = Tail::start(&rig, &["--type", "b", "--json"]);
    let dead = Tail::start(&rig, &["--status", "dead"]);
    let changes = Tail::start(&rig, &["--changes", "--json", "--type", "broken"]);
    typed.is_quiet();
    deliver(&rig, "stripe", "one", "a").await;
    deliver(&rig, "stripe", "two", "broken").await;
    deliver(&rig, "stripe", "three", "b").await;
    assert_eq!(typed.keys(1), ["three"]);
    let line = format!("{}\n{}", dead.next(), dead.next());
    assert!(
        line.contains("two") && line.contains("dead") && line.contains("broken: ") && line.contains("nowhere"),
        "{line}"
    );
    dead.is_quiet();
    // However many states were seen on the way, the last one is.
    loop {
        let event: Value = serde_json::from_str(&changes.next()).unwrap();
        assert_eq!(event["key"], "two");
        if event["status"] == "dead" {
            break;
        }
    }
    changes.is_quiet();
}

#[tokio::test]
async fn a_restart_of_the_gateway_is_waited_for() {
    let mut rig = rig();
    // A port that stays the same.
    let admin = rig.gateway.admin;
    let path = rig.directory.path().join("oncehook.toml");
    let config = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, config.replace("admin = \"127.0.0.1:0\"", &format!("admin = \"{admin}\""))).unwrap();
    deliver(&rig, "stripe", "before", "a").await;
    let tail = Tail::start(&rig, &["--json"]);
    assert_eq!(tail.keys(1), ["before"]);
    rig.gateway.kill();
    let said = tail.talk.recv_timeout(Duration::from_secs(10)).unwrap();
    assert!(said.contains("no gateway answers") && said.ends_with("; waiting"), "{said}");
    rig.gateway = Gateway::start(BINARY.as_ref(), rig.directory.path());
    deliver(&rig, "stripe", "after", "a").await;
    assert_eq!(tail.keys(1), ["after"]);
    assert_eq!(tail.talk.recv_timeout(Duration::from_secs(10)).unwrap(), "the gateway answers again");
    tail.is_quiet();
}

#[tokio::test]
async fn what_cannot_work_ends_at_once() {
    let mut rig = rig();
    let tail = |rig: &Rig, arguments: &[&str]| {
        run(rig.directory.path(), &[&["--config", "client.toml", "tail"], arguments].concat())
    };
    let (code, out, err) = tail(&rig, &["--status", "nonsense"]);
    assert!(code == 2 && out.is_empty() && err.contains("possible values: quarantined"), "{err}");
    assert_eq!(tail(&rig, &["-n", "1001"]).0, 2);
    // Nobody reads any more.
    deliver(&rig, "stripe", "one", "a").await;
    let mut quitter = Tail::start(&rig, &["--json"]);
    assert_eq!(quitter.keys(1), ["one"]);
    let piped = Command::new("timeout")
        .args(["20", "sh", "-c", &format!("{BINARY} --config client.toml tail --json | head -n 1")])
        .current_dir(rig.directory.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    for number in 0..10 {
        deliver(&rig, "stripe", &format!("more_{number}"), "a").await;
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    assert_eq!(piped.wait_with_output().unwrap().status.code(), Some(0), "a closed pipe ends it");
    assert!(quitter.child.try_wait().unwrap().is_none());
    // Nobody there from the beginning.
    rig.gateway.kill();
    let (code, _, err) = tail(&rig, &[]);
    assert!(code == 1 && err.contains("is it running?"), "{err}");
}
