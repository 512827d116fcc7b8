//! `oncehook storm` finds the hole of each handler in `examples/naive`, names the right hazard, and finds none in oncehook.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use oncehook_testkit::gateway::{CONFIG, Gateway, SECRET, prepare};
use oncehook_testkit::mysql;
use oncehook_testkit::postgres::Server;
use oncehook_testkit::receiver::{Receiver, Reply};
use oncehook_testkit::shop::{ORDERS, SHIPMENTS, Shop};
use serde_json::Value;

use crate::kit::{BINARY, run};

/// A handler of the examples, listening.
struct Naive {
    process: Child,
    url: String,
}

impl Naive {
    fn start(name: &str, database: &Path) -> Self {
        let program = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../examples/naive/{name}.py"));
        let mut process = Command::new("python3")
            .arg(program)
            .args(["0", database.to_str().unwrap()])
            .env("STRIPE_SECRET", SECRET)
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let url = line.strip_prefix("listening on ").unwrap_or_else(|| panic!("{name}: {line}")).trim().to_owned();
        Self { process, url }
    }
}

impl Drop for Naive {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A storm from a directory with the secret: exit code and what it printed.
fn storm(directory: &Path, url: &str, options: &[&str]) -> (i32, Value, String) {
    std::fs::write(directory.join("stripe.secret"), SECRET).unwrap();
    let output = Command::new("timeout")
        .args(["300", BINARY, "storm", "--json", "--provider", "stripe", "--secret", "file:stripe.secret"])
        .args(["--url", url, "--events", "4", "--copies", "8"])
        .args(options)
        .current_dir(directory)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    let json = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
    (output.status.code().unwrap(), json, said)
}

/// The hazards that were not stood, with their verdicts.
fn holes(report: &Value) -> Vec<(&str, &str)> {
    let hazards = report["hazards"].as_array().unwrap();
    let bad = hazards.iter().filter(|hazard| hazard["ok"] == false);
    bad.map(|hazard| (hazard["hazard"].as_str().unwrap(), hazard["verdict"].as_str().unwrap())).collect()
}

const ALL: [&str; 7] = ["race", "partial", "slow", "replay", "resigned", "reordered", "conflict"];

fn names(report: &Value) -> Vec<&str> {
    report["hazards"].as_array().unwrap().iter().map(|hazard| hazard["hazard"].as_str().unwrap()).collect()
}

#[test]
fn r46_the_hole_of_every_naive_handler_is_found_and_named() {
    let expected = [
        ("check_then_insert", "race", "doubled"),
        ("mark_after", "partial", "doubled"),
        ("mark_before", "partial", "lost"),
        ("lock_without_fence", "slow", "doubled"),
        ("short_ttl", "replay", "doubled"),
    ];
    std::thread::scope(|scope| {
        for (handler, hazard, verdict) in expected {
            scope.spawn(move || {
                let directory = tempfile::tempdir().unwrap();
                let naive = Naive::start(handler, &directory.path().join("shop.db"));
                let count = ["--count-sql", "SELECT count(*) FROM orders WHERE event = '{key}'"];
                let options = [&count[..], &["--database", "sqlite://shop.db", "--junit", "storm.xml"]].concat();
                let (code, report, said) = storm(directory.path(), &naive.url, &options);
                assert_eq!(names(&report), ALL, "{handler}: {said}");
                assert_eq!((code, holes(&report)), (1, vec![(hazard, verdict)]), "{handler}: {report:#}");
                let xml = std::fs::read_to_string(directory.path().join("storm.xml")).unwrap();
                assert!(xml.contains("tests=\"7\" failures=\"1\""), "{handler}: {xml}");
                let case = format!("name=\"{hazard}\"");
                let line = xml.lines().find(|line| line.contains(&case)).unwrap();
                assert!(line.contains("<failure type="), "{handler}: {line}");
            });
        }
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn r46_oncehook_on_sqlite_stands_every_hazard_and_a_retry_schedule() {
    let shop = Shop::new(BINARY, env!("CARGO_TARGET_TMPDIR"), &[ORDERS, SHIPMENTS]);
    let gateway = shop.start();
    let url = format!("http://{}/webhooks/stripe", gateway.ingress);
    let options = [
        ["--count-sql", "SELECT count(*) FROM shipments WHERE key = '{key}'"],
        ["--database", "sqlite://journal.db"],
        ["--profile", "stripe"],
        ["--within", "5s"],
    ];
    let (code, report, said) = tokio::task::block_in_place(|| storm(shop.path(), &url, &options.concat()));
    assert_eq!((code, holes(&report)), (0, vec![]), "{report:#}\n{said}");
    assert_eq!(names(&report), [&ALL[..], &["schedule"]].concat());
    let schedule = report["hazards"].as_array().unwrap().last().unwrap();
    assert_eq!(schedule["attempts"], 4 * 8, "{schedule}");
    // The other bodies were kept aside, not dropped.
    assert_eq!(gateway.json("/api/stats").await["conflicts"], 2 * 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn r46_oncehook_on_postgres_stands_every_hazard() {
    let database = Server::shared().database();
    database.query("CREATE TABLE orders (key text NOT NULL)");
    let directory = tempfile::tempdir().unwrap();
    let config = CONFIG.replace("sqlite://journal.db", &database.url());
    let route = r#"
[[route]]
name = "orders"
source = "stripe"
[route.sql]
statement = "INSERT INTO orders (key) VALUES (:key)"
bind = { key = "$key" }
"#;
    prepare(directory.path(), &format!("{config}{route}"));
    let gateway = Gateway::start(Path::new(BINARY), directory.path());
    let url = format!("http://{}/webhooks/stripe", gateway.ingress);
    let at = database.url();
    let options = ["--count-sql", "SELECT count(*) FROM orders WHERE key = '{key}'", "--database", at.as_str()];
    let (code, report, said) = tokio::task::block_in_place(|| storm(directory.path(), &url, &options));
    assert_eq!((code, holes(&report)), (0, vec![]), "{report:#}\n{said}");
    assert_eq!(names(&report), ALL);
}

#[tokio::test(flavor = "multi_thread")]
async fn r46_oncehook_on_mariadb_stands_every_hazard() {
    let database = mysql::Server::shared().database();
    database.query("CREATE TABLE orders (event VARCHAR(64) NOT NULL)");
    let directory = tempfile::tempdir().unwrap();
    let config = CONFIG.replace("sqlite://journal.db", &database.url());
    let route = r#"
[[route]]
name = "orders"
source = "stripe"
[route.sql]
statement = "INSERT INTO orders (event) VALUES (:key)"
bind = { key = "$key" }
"#;
    prepare(directory.path(), &format!("{config}{route}"));
    let gateway = Gateway::start(Path::new(BINARY), directory.path());
    let url = format!("http://{}/webhooks/stripe", gateway.ingress);
    let at = database.url();
    let options = ["--count-sql", "SELECT count(*) FROM orders WHERE event = '{key}'", "--database", at.as_str()];
    let (code, report, said) = tokio::task::block_in_place(|| storm(directory.path(), &url, &options));
    assert_eq!((code, holes(&report)), (0, vec![]), "{report:#}\n{said}");
    assert_eq!(names(&report), ALL);
}

#[tokio::test(flavor = "multi_thread")]
async fn r46_what_cannot_be_counted_is_not_judged() {
    let directory = tempfile::tempdir().unwrap();
    let naive = Naive::start("check_then_insert", &directory.path().join("shop.db"));
    let check = |options: &[&str], expected: &str| {
        let (code, report, said) = storm(directory.path(), &naive.url, options);
        assert_eq!((code, report), (1, Value::Null), "{said}");
        assert!(said.contains(expected), "{said}");
    };
    tokio::task::block_in_place(|| {
        check(&["--count-cmd", "echo 0", "--patience", "1s"], "0 effects of it were counted");
        check(&["--count-cmd", "echo many"], "this is not a number");
        check(&["--count-cmd", "exit 3"], "--count-cmd failed");
        check(&["--count-sql", "SELECT 1", "--database", "oracle://x"], "ask others with --count-cmd");
        check(&["--count-cmd", "echo 1", "--hazards", "schedule"], "needs --profile");
        let wrong = directory.path().join("other.secret");
        std::fs::write(&wrong, "whsec_other").unwrap();
        let (code, out, said) = run(
            directory.path(),
            &[
                "storm",
                "--provider",
                "stripe",
                "--secret",
                "file:other.secret",
                "--url",
                &naive.url,
                "--count-cmd",
                "echo 0",
            ],
        );
        assert!(code == 1 && out.is_empty() && said.contains("was not acknowledged"), "{said}");
        let (code, _, said) = run(directory.path(), &["storm", "--provider", "stripe", "--url", &naive.url]);
        assert!(code == 2 && said.contains("--count-cmd"), "{said}");
    });
}

/// A sum over all events, asked of a command and of a URL.
#[tokio::test(flavor = "multi_thread")]
async fn r46_effects_are_counted_by_a_command_or_a_url_too() {
    let directory = tempfile::tempdir().unwrap();
    let file: PathBuf = directory.path().join("shop.db");
    let naive = Naive::start("check_then_insert", &file);
    let database = file.clone();
    let counter = Receiver::start(move |_, _| {
        let connection = rusqlite::Connection::open(&database).unwrap();
        let count: i64 = connection.query_row("SELECT count(*) FROM orders", [], |row| row.get(0)).unwrap();
        Reply::status(200, format!("{{\"count\": {count}}}"))
    })
    .await;
    let url = format!("http://{}/count", counter.address());
    let command = "python3 -c \"import sqlite3; print(sqlite3.connect('shop.db').execute('SELECT count(*) FROM orders').fetchone()[0])\"";
    tokio::task::block_in_place(|| {
        for count in [["--count-cmd", command], ["--count-url", &url]] {
            let (code, report, said) =
                storm(directory.path(), &naive.url, &[&count[..], &["--hazards", "race,conflict"]].concat());
            assert_eq!((code, holes(&report)), (1, vec![("race", "doubled")]), "{report:#}\n{said}");
            assert_eq!(report["counted"], "sum");
        }
    });
}
