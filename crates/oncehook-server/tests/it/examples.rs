//! The examples, run as their readers would: the commands are taken from their READMEs and pasted into a shell, only the
//! ports are others. And the receivers of the recipe (docs/RECEIVER.md), killed at random while events are forwarded.
//!
//! Does not: skip anything. Python and Node are needed; `make services` installs what is missing.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead as _, BufReader};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

use oncehook_testkit::gateway::{Gateway, now};
use oncehook_testkit::mysql;
use oncehook_testkit::postgres::Server;
use oncehook_testkit::random::Random;
use oncehook_testkit::sender::{Answer, Provider, ask};
use oncehook_verify::UnixMicros;
use rusqlite::Connection;
use serde_json::Value;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::sleep;

use super::kit::{BINARY, Headers, Signs, raw, soon, with};

/// Whatever has to happen in the end has happened by then, also on a busy machine.
const IN_THE_END: Duration = Duration::from_secs(60);

/// The ports in the examples.
const PORTS: [&str; 5] = ["8080", "8081", "9000", "9001", "9002"];

#[tokio::test(flavor = "multi_thread")]
async fn r20_r25_shop_orders_11247_deliveries_make_one_order_one_mail_one_shipment() {
    let example = Example::copy("shop-orders");
    let [prepare, start, send, count] = example.blocks("sh").try_into().unwrap();
    let [expected] = example.blocks("text").try_into().unwrap();
    example.paste(&prepare);
    let gateway = example.start(&start);
    let said = example.paste(&send);
    assert!(said.contains("11246"), "{said}");
    let event = gateway.only_event("succeeded").await;
    assert_eq!(event["duplicates"], 11_246, "{event}");
    assert_eq!(routes(&event), ["confirmation-mail", "orders", "shipment"]);
    assert_eq!(example.paste(&count), expected);

    // All three programs die, and the provider goes on.
    drop(gateway);
    let gateway = example.start(&start);
    example.paste(&send.replace("11247", "500"));
    gateway.only_event("succeeded").await;
    assert_eq!(example.paste(&count), expected);

    // Another event about the same payment, as the README ends.
    let body = gateway.inner.get(&format!("/api/events/{}/body", event["id"].as_str().unwrap())).await.body;
    let body = String::from_utf8(body).unwrap().replace(r#""id":"evt_1""#, r#""id":"evt_2""#);
    std::fs::write(example.path("other.json"), body).unwrap();
    example.paste("oncehook send --source stripe --body other.json");
    let mut other = gateway.event("evt_2", "dead").await;
    // The first dead follow-up makes the event dead; the second comes to its end in its own time.
    for _ in 0..400 {
        if delivery(&other, "confirmation-mail")["state"] == delivery(&other, "shipment")["state"] {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
        other = gateway.event("evt_2", "dead").await;
    }
    let of = |route: &str| delivery(&other, route).clone();
    assert_eq!(of("orders")["state"], "succeeded", "{other}");
    for route in ["confirmation-mail", "shipment"] {
        assert_eq!(of(route)["state"], "dead", "{other}");
        assert!(of(route)["error"].to_string().contains("$result"), "{other}");
    }
    example.paste(&format!("oncehook skip {}", other["id"].as_str().unwrap()));
    gateway.event("evt_2", "skipped").await;
    assert_eq!(example.paste(&count), expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn r20_payout_fees_two_deliveries_a_second_apart_take_one_fee() {
    let example = Example::copy("payout-fees");
    let [prepare, start, send, look, send_many] = example.blocks("sh").try_into().unwrap();
    let [expected] = example.blocks("text").try_into().unwrap();
    example.paste(&prepare);
    let gateway = example.start(&start);
    example.paste(&send);
    let event = gateway.only_event("succeeded").await;
    assert_eq!(event["duplicates"], 1, "{event}");
    assert_eq!(example.paste(&look), expected);
    example.paste(&send_many);
    let event = gateway.only_event("succeeded").await;
    assert_eq!(event["duplicates"], 1_001, "{event}");
    assert_eq!(example.paste(&look), expected);

    // Another event about the same payout fails as a whole: the balance stays.
    let body = std::fs::read_to_string(example.path("payout.json")).unwrap();
    std::fs::write(example.path("other.json"), body.replace("evt_payout_1", "evt_payout_2")).unwrap();
    example.paste("oncehook send --source stripe --body other.json");
    let other = gateway.event("evt_payout_2", "retrying").await;
    assert!(delivery(&other, "payout-fee")["error"].to_string().contains("fees.payout_id"), "{other}");
    assert_eq!(example.paste(&look), expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn r20_r25_both_stories_with_the_shop_in_postgres_and_the_journal_in_a_file() {
    both_stories_on_postgres("sqlite://journal.db").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r20_r25_both_stories_with_shop_and_journal_in_one_postgres() {
    both_stories_on_postgres("$SHOP_DATABASE").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r20_r25_both_stories_with_the_shop_in_mariadb_and_the_journal_in_a_file() {
    both_stories_on_mariadb("sqlite://journal.db").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r20_r25_both_stories_with_shop_and_journal_in_one_mariadb() {
    both_stories_on_mariadb("$SHOP_DATABASE").await;
}

async fn both_stories_on_postgres(journal: &str) {
    let database = Server::shared().database();
    let places = [("postgres://localhost/shop", database.url()), (JOURNAL_IN_A_FILE, journal.to_owned())];
    both_stories(&Example::copy("postgres"), &places).await;
    let guards = database.query("SELECT count(*) FROM pg_namespace WHERE nspname = 'oncehook_guard'");
    assert_eq!(guards, if journal.contains("sqlite") { "1" } else { "0" }, "one database needs no guards");
}

async fn both_stories_on_mariadb(journal: &str) {
    let server = mysql::Server::shared();
    let database = server.database();
    let places = [
        ("SHOP_PORT=3306", format!("SHOP_PORT={}", server.port())),
        ("SHOP_NAME=shop", format!("SHOP_NAME={}", database.name())),
        (JOURNAL_IN_A_FILE, journal.to_owned()),
    ];
    both_stories(&Example::copy("mariadb"), &places).await;
    let guards = database.query("SHOW TABLES LIKE 'oncehook\\_applied'");
    assert_eq!(
        guards,
        if journal.contains("sqlite") { "oncehook_applied" } else { "" },
        "one database needs no guards"
    );
}

const JOURNAL_IN_A_FILE: &str = "sqlite://journal.db";

/// Both stories as a README tells them that begins with the places of shop and journal, which are others here.
async fn both_stories(example: &Example, places: &[(&str, String)]) {
    let [place, prepare, start, send, count, start_fees, send_fees, look] =
        example.blocks("sh").try_into().unwrap();
    let [orders, fees] = example.blocks("text").try_into().unwrap();
    let place = places.iter().fold(place, |place, (written, other)| {
        assert!(place.contains(written), "{place}");
        place.replace(written, other)
    });
    example.paste(&place);
    example.paste(&prepare);
    let gateway = example.start(&start);
    example.paste(&send);
    let event = gateway.only_event("succeeded").await;
    assert_eq!(event["duplicates"], 11_246, "{event}");
    assert_eq!(routes(&event), ["confirmation-mail", "orders", "shipment"]);
    assert_eq!(example.paste(&count), orders);
    // All three programs die, and the provider goes on.
    drop(gateway);
    let gateway = example.start(&start);
    example.paste(&send.replace("11247", "500"));
    gateway.only_event("succeeded").await;
    assert_eq!(example.paste(&count), orders);
    drop(gateway);

    let gateway = example.start(&start_fees);
    example.paste(&send_fees);
    let event = gateway.event("evt_payout_1", "succeeded").await;
    assert_eq!(event["duplicates"], 1_000, "{event}");
    assert_eq!(example.paste(&look), fees);
}

#[tokio::test(flavor = "multi_thread")]
async fn r23_the_python_receiver_runs_as_its_readme_says() {
    receiver_runs_as_its_readme_says(1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r23_the_node_receiver_runs_as_its_readme_says() {
    receiver_runs_as_its_readme_says(2).await;
}

async fn receiver_runs_as_its_readme_says(start: usize) {
    let example = Example::copy("receiver");
    let blocks: [String; 5] = example.blocks("sh").try_into().unwrap();
    let [expected] = example.blocks("text").try_into().unwrap();
    example.paste(&blocks[0]);
    let gateway = example.start(&blocks[start]);
    example.paste(&blocks[3]);
    gateway.settled(200).await;
    assert_eq!(example.paste(&blocks[4]), expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn r23_events_reach_the_python_receivers_table_once_while_it_is_killed() {
    events_arrive_once_while_the_receiver_is_killed(&PYTHON).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r23_events_reach_the_node_receivers_table_once_while_it_is_killed() {
    events_arrive_once_while_the_receiver_is_killed(&NODE).await;
}

/// Every second kill falls between the receiver's commit and its answer, the others at random moments while it works.
async fn events_arrive_once_while_the_receiver_is_killed(language: &Language) {
    const EVENTS_PER_KILL: usize = 10;
    const KILLS: usize = 24;

    let mut random = Random::from_environment();
    let example = Example::copy("receiver");
    let [prepare, ..]: [String; 5] = example.blocks("sh").try_into().unwrap();
    example.paste(&prepare);
    let mut program = Program::start(&example, language);
    let thief = Thief::start(program.address).await;
    let config = std::fs::read_to_string(example.path("oncehook.toml")).unwrap();
    let config = config.replace(&program.address.to_string(), &thief.address.to_string());
    std::fs::write(example.path("oncehook.toml"), config).unwrap();
    let gateway = example.start("exec oncehook serve");
    let secret = std::fs::read_to_string(example.path("stripe.secret")).unwrap();
    let provider = Arc::new(Provider::new("stripe", &secret, "stripe"));

    let started = Instant::now();
    let (mut sent, mut repeats) = (BTreeSet::new(), 0);
    for kill in 0..KILLS {
        let keys: Vec<String> = (0..EVENTS_PER_KILL).map(|number| format!("evt_{kill}_{number}")).collect();
        sent.extend(keys.iter().map(|key| format!("pi_{key}")));
        let sending = tokio::spawn(send_all(Arc::clone(&provider), gateway.inner.ingress, keys));
        if kill % 2 == 0 {
            thief.wait_for(Booty::Nothing).await;
            sleep(Duration::from_micros(random.below(15_000))).await;
        } else {
            thief.wait_for(Booty::Answer).await;
        }
        program.kill();
        sending.await.unwrap();
        repeats += program.said("repeat ");
        program = Program::start(&example, language);
    }
    let killing = started.elapsed();

    let events = gateway.settled(sent.len()).await;
    repeats += program.said("repeat ");
    let attempts: u64 =
        events.iter().map(|event| delivery(event, "payments")["attempt"].as_u64().unwrap()).sum();
    eprintln!(
        "{KILLS} kills in {killing:?}, all done after {:?}; {} events, {attempts} attempts, {repeats} repeats",
        started.elapsed(),
        events.len()
    );
    assert!(repeats >= KILLS / 4, "only {repeats} answers were asked for again: the keys were not needed");

    let table = Connection::open(example.path("receiver.db")).unwrap();
    let mut select = table.prepare("SELECT payment, id FROM payments").unwrap();
    let found = select.query_map([], |row| Ok((row.get::<_, String>(0)?, row.get::<_, i64>(1)?))).unwrap();
    let found: Vec<(String, i64)> = found.map(Result::unwrap).collect();
    let by_payment: BTreeMap<String, i64> = found.iter().cloned().collect();
    assert_eq!(found.len(), sent.len(), "a payment is missing or there twice");
    assert_eq!(by_payment.keys().cloned().collect::<BTreeSet<_>>(), sent);
    for event in &events {
        // Also where the answer came from the table of keys: it is the answer of the attempt that took effect.
        let result = &delivery(event, "payments")["result"];
        assert_eq!(result["status"], 200, "{event}");
        assert_eq!(result["body"]["payment"], by_payment[event["entity"].as_str().unwrap()], "{event}");
    }
}

async fn send_all(provider: Arc<Provider>, ingress: SocketAddr, keys: Vec<String>) {
    for key in keys {
        let answer = soon(ask(ingress, &provider.sample(&key, now()))).await.unwrap();
        assert_eq!(answer.status, 200, "{answer:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn r23_the_python_receiver_believes_signatures_only_and_answers_repeats_alike() {
    receiver_believes_signatures_only_and_answers_repeats_alike(&PYTHON).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r23_the_node_receiver_believes_signatures_only_and_answers_repeats_alike() {
    receiver_believes_signatures_only_and_answers_repeats_alike(&NODE).await;
}

async fn receiver_believes_signatures_only_and_answers_repeats_alike(language: &Language) {
    let example = Example::copy("receiver");
    let [prepare, ..]: [String; 5] = example.blocks("sh").try_into().unwrap();
    example.paste(&prepare);
    let program = Program::start(&example, language);
    let secret = std::fs::read_to_string(example.path("receiver.secret")).unwrap();
    let signs = Signs::preset("standard-webhooks", &secret, "payments");
    let strangers =
        Signs::preset("standard-webhooks", "whsec_c3RyYW5nZXItc3RyYW5nZXItc3RyYW5nZXI", "payments");
    let body = br#"{"data":{"object":{"id":"pi_1","amount":4200}}}"#;
    let genuine = signs.headers(&[("idempotency-key", "key_1")], body, "key_1", now());
    let post = async |headers: &Headers, body: &[u8]| -> Answer {
        soon(ask(program.address, &raw(&signs.path, headers, body))).await.unwrap()
    };

    let seconds_ago = |seconds: i64| UnixMicros(now().0 - seconds * 1_000_000);
    for (what, headers, body) in [
        ("another body", genuine.clone(), &b"{}"[..]),
        ("another secret", strangers.headers(&[], body, "key_1", now()), body),
        ("another key", with(&genuine, "webhook-id", "key_2"), body),
        ("another key beside the signed one", with(&genuine, "idempotency-key", "key_2"), body),
        ("an old signature", signs.headers(&[], body, "key_1", seconds_ago(310)), body),
        ("a signature from the future", signs.headers(&[], body, "key_1", seconds_ago(-310)), body),
        ("a time that is none", with(&genuine, "webhook-timestamp", "now"), body),
        ("no signature", with(&genuine, "webhook-signature", ""), body),
        ("no headers", Headers::new(), body),
    ] {
        let answer = post(&headers, body).await;
        assert_eq!(answer.status, 401, "{what}: {answer:?}");
    }
    let table = Connection::open(example.path("receiver.db")).unwrap();
    let count = |table_name: &str| -> i64 {
        table.query_row(&format!("SELECT count(*) FROM {table_name}"), [], |row| row.get(0)).unwrap()
    };
    assert_eq!((count("received_webhooks"), count("payments")), (0, 0), "something unsigned was written");

    // While a secret is rotated there are several signatures; one of them has to fit.
    let several = super::kit::value(&genuine, "webhook-signature");
    let several = with(&genuine, "webhook-signature", format!("v1,AAAA v2,x {several}"));
    let mut posts = JoinSet::new();
    for _ in 0..64 {
        let (address, request) = (program.address, raw(&signs.path, &several, body));
        posts.spawn(async move { soon(ask(address, &request)).await.unwrap() });
    }
    for answer in posts.join_all().await {
        assert_eq!((answer.status, answer.json()), (200, serde_json::json!({"payment": 1})), "{answer:?}");
    }
    assert_eq!((count("received_webhooks"), count("payments")), (1, 1));

    // An effect that fails leaves no key behind, and takes place when it can.
    let broken = br#"{"data":{"object":{"id":"pi_2","amount":null}}}"#;
    let whole = br#"{"data":{"object":{"id":"pi_2","amount":1}}}"#;
    let answer = post(&signs.headers(&[], broken, "key_2", now()), broken).await;
    assert_eq!(answer.status, 503, "{answer:?}");
    assert_eq!((count("received_webhooks"), count("payments")), (1, 1));
    let answer = post(&signs.headers(&[], whole, "key_2", now()), whole).await;
    assert_eq!((answer.status, answer.json()), (200, serde_json::json!({"payment": 2})), "{answer:?}");
}

/// What docs/RECEIVER.md shows for SQLite is what the programs run, and it does what it says.
#[test]
fn r23_the_documented_statements_are_those_of_the_examples() {
    let document = std::fs::read_to_string(root().join("docs/RECEIVER.md")).unwrap();
    let (_, document) = document.split_once("### SQLite").unwrap();
    let block = blocks(document, "sql").remove(0);
    let statements: Vec<String> = block
        .lines()
        .filter(|line| !line.starts_with("--"))
        .collect::<Vec<_>>()
        .join("\n")
        .split_terminator(";\n")
        .map(|statement| statement.trim_end_matches(';').to_owned())
        .collect();
    let [table, take, keep, find, forget] = &statements[..] else { panic!("{statements:#?}") };
    for program in ["python/once.py", "node/once.mjs"] {
        let text = std::fs::read_to_string(root().join("examples/receiver").join(program)).unwrap();
        for statement in [table, take, keep, find] {
            assert!(text.contains(statement.as_str()), "{program} has another statement than\n{statement}");
        }
    }
    let database = Connection::open_in_memory().unwrap();
    database.execute_batch(table).unwrap();
    assert_eq!(database.execute(take, &[(":key", "k")]).unwrap(), 1);
    assert_eq!(database.execute(keep, &[(":answer", "done"), (":key", "k")]).unwrap(), 1);
    assert_eq!(database.execute(take, &[(":key", "k")]).unwrap(), 0);
    assert_eq!(database.query_row(find, &[(":key", "k")], |row| row.get::<_, String>(0)).unwrap(), "done");
    assert_eq!(database.execute(forget, []).unwrap(), 0);
    database.execute("UPDATE received_webhooks SET received_at = received_at - 401 * 86400", []).unwrap();
    assert_eq!(database.execute(forget, []).unwrap(), 1);
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The fenced blocks of one kind in a document.
fn blocks(document: &str, kind: &str) -> Vec<String> {
    let fence = format!("```{kind}\n");
    let after = document.split(&fence).skip(1);
    after.map(|text| text.split_once("```").unwrap().0.to_owned()).collect()
}

fn routes(event: &Value) -> Vec<&str> {
    let mut routes: Vec<&str> =
        event["deliveries"].as_array().unwrap().iter().map(|one| one["route"].as_str().unwrap()).collect();
    routes.sort_unstable();
    routes
}

fn delivery<'e>(event: &'e Value, route: &str) -> &'e Value {
    let mut deliveries = event["deliveries"].as_array().unwrap().iter();
    deliveries.find(|delivery| delivery["route"] == route).unwrap_or_else(|| panic!("no {route}: {event}"))
}

/// All examples, copied, with ports of their own; one of them is where commands are pasted.
struct Example {
    directory: TempDir,
    name: &'static str,
    ports: BTreeMap<&'static str, u16>,
}

impl Example {
    fn copy(name: &'static str) -> Self {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let ports = PORTS.into_iter().map(|port| (port, free_port())).collect();
        let example = Self { directory, name, ports };
        example.copy_files(&root().join("examples"), example.directory.path());
        example
    }

    /// Without what somebody who ran the example has left there.
    fn copy_files(&self, from: &Path, to: &Path) {
        for entry in std::fs::read_dir(from).unwrap() {
            let entry = entry.unwrap();
            let (path, target) = (entry.path(), to.join(entry.file_name()));
            let name = entry.file_name().into_string().unwrap();
            if path.is_dir() {
                std::fs::create_dir(&target).unwrap();
                self.copy_files(&path, &target);
            } else if name == "README.md" || name.ends_with(".toml") {
                let mut text = std::fs::read_to_string(&path).unwrap();
                // In two steps: a free port may have the digits of one that is still to be replaced.
                let places = || self.ports.iter().enumerate();
                for (place, (port, _)) in places() {
                    text = text.replace(port, &format!("<{place}>"));
                }
                for (place, (_, other)) in places() {
                    text = text.replace(&format!("<{place}>"), &other.to_string());
                }
                std::fs::write(target, text).unwrap();
            } else if [".py", ".mjs", ".sql", ".json"].iter().any(|ending| name.ends_with(ending)) {
                std::fs::copy(path, target).unwrap();
            }
        }
    }

    fn path(&self, file: &str) -> PathBuf {
        self.directory.path().join(self.name).join(file)
    }

    /// The blocks of its README.
    fn blocks(&self, kind: &str) -> Vec<String> {
        blocks(&std::fs::read_to_string(self.path("README.md")).unwrap(), kind)
    }

    /// A shell in its directory, with `oncehook` and a suitable `node` on the path.
    fn shell(&self, limit: &str, commands: &str) -> Command {
        let binary = Path::new(BINARY).parent().unwrap().display();
        let node = NODE_BINARY.parent().unwrap().display();
        let script = format!("set -e\nexport PATH=\"{binary}:{node}:$PATH\"\n{commands}");
        let mut shell = Command::new("timeout");
        shell.args(["--signal=KILL", limit, "bash", "-c", &script]).current_dir(self.path("."));
        shell.stdin(Stdio::null());
        shell
    }

    /// Runs commands to their end and gives what they printed. A command that fails is a panic.
    fn paste(&self, commands: &str) -> String {
        let output = self.shell("60", commands).output().unwrap();
        let (said, complained) =
            (String::from_utf8(output.stdout).unwrap(), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{commands}\n{:?}\n{said}\n{complained}", output.status);
        said
    }

    /// Runs commands that end with the gateway, and waits until that is ready.
    fn start(&self, commands: &str) -> Running {
        let mut shell = self.shell("300", commands);
        shell.process_group(0);
        Running { inner: Gateway::start_command(shell, &self.path(".")) }
    }
}

/// A gateway and what was started beside it. Dropping it kills all of them.
struct Running {
    inner: Gateway,
}

impl Running {
    /// The one event there is, when it has that status.
    async fn only_event(&self, status: &str) -> Value {
        let mut events = self.until(|events| events.len() == 1 && events[0]["status"] == status).await;
        events.remove(0)
    }

    /// The event with that key, when it has that status.
    async fn event(&self, key: &str, status: &str) -> Value {
        let has = |event: &Value| event["key"] == key && event["status"] == status;
        let events = self.until(|events| events.iter().any(has)).await;
        events.into_iter().find(has).unwrap()
    }

    /// All events, when there are so many and all have succeeded.
    async fn settled(&self, count: usize) -> Vec<Value> {
        self.until(|events| {
            events.len() == count && events.iter().all(|event| event["status"] == "succeeded")
        })
        .await
    }

    /// All events, when they are as they should be.
    async fn until(&self, enough: impl Fn(&[Value]) -> bool) -> Vec<Value> {
        let deadline = Instant::now() + IN_THE_END;
        loop {
            let events = self.inner.events().await;
            if enough(&events) {
                return events;
            }
            let last = events.iter().find(|event| event["status"] != "succeeded");
            assert!(Instant::now() < deadline, "{} events, {last:?}\n{}", events.len(), self.inner.log());
            sleep(Duration::from_millis(20)).await;
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let group = self.inner.pid();
        let _ =
            Command::new("kill").args(["-KILL", "--", &format!("-{group}")]).stderr(Stdio::null()).status();
        // Whoever comes next may want the same file: a process that is told to die is not gone yet.
        let deadline = Instant::now() + Duration::from_secs(10);
        while lives(group) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Whether a process of the group still runs. One that is only waited for holds nothing any more.
fn lives(group: u32) -> bool {
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    processes.into_iter().any(|process| {
        let stat = std::fs::read_to_string(process.path().join("stat")).unwrap_or_default();
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
        fields.first().is_some_and(|state| *state != "Z")
            && fields.get(2).is_some_and(|of| *of == group.to_string())
    })
}

/// How to run the receiver in a language.
struct Language {
    binary: &'static LazyLock<PathBuf>,
    program: &'static str,
}

const PYTHON: Language = Language { binary: &PYTHON_BINARY, program: "python/receiver.py" };
const NODE: Language = Language { binary: &NODE_BINARY, program: "node/receiver.mjs" };

/// The interpreter itself: what is on the path may be a script that looks for it.
static PYTHON_BINARY: LazyLock<PathBuf> = LazyLock::new(|| {
    let found = itself("python3", &["-c", "import sqlite3, sys; print(sys.executable)"]);
    found.expect("this test needs python3 with sqlite3 (`make services` installs it)")
});

/// A Node that has `node:sqlite`: the one on the path, or the one that `make services` has put under target/tools.
static NODE_BINARY: LazyLock<PathBuf> = LazyLock::new(|| {
    let tools = root().join("target/tools/node_modules");
    let installed =
        std::fs::read_dir(tools).into_iter().flatten().map(|entry| entry.unwrap().path().join("bin/node"));
    let mut candidates = std::iter::once(PathBuf::from("node")).chain(installed);
    let found = candidates
        .find_map(|node| itself(&node, &["-e", "require('node:sqlite'); console.log(process.execPath)"]));
    found.expect("this test needs Node 22.13 or newer (`make services` installs it)")
});

fn itself(program: impl AsRef<std::ffi::OsStr>, arguments: &[&str]) -> Option<PathBuf> {
    let output = Command::new(program).args(arguments).stderr(Stdio::null()).output().ok()?;
    let path = String::from_utf8(output.stdout).unwrap();
    output.status.success().then(|| PathBuf::from(path.trim()))
}

/// The example's application, running. Dropping it kills it.
struct Program {
    child: Child,
    log: Arc<Mutex<Vec<String>>>,
    reader: Option<std::thread::JoinHandle<()>>,
    address: SocketAddr,
}

impl Program {
    /// Starts it in the example's directory and waits until it listens.
    fn start(example: &Example, language: &Language) -> Self {
        let port = example.ports["9000"];
        let mut command = Command::new(&**language.binary);
        command.arg(language.program).arg(port.to_string()).current_dir(example.path("."));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let log = Arc::new(Mutex::new(Vec::new()));
        let sink = Arc::clone(&log);
        let reader = std::thread::spawn(move || {
            lines.map_while(Result::ok).for_each(|line| sink.lock().unwrap().push(line));
        });
        let mut program = Self { child, log, reader: Some(reader), address: ([127, 0, 0, 1], port).into() };
        let deadline = Instant::now() + IN_THE_END;
        while program.said("listening") == 0 {
            let ended = program.child.try_wait().unwrap();
            let log = program.log.lock().unwrap().join("\n");
            assert!(ended.is_none() && Instant::now() < deadline, "it does not listen ({ended:?}):\n{log}");
            std::thread::sleep(Duration::from_millis(2));
        }
        program
    }

    /// kill -9, and everything that it had said before is read.
    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.reader.take().unwrap().join().unwrap();
    }

    /// How many of its lines begin so.
    fn said(&self, word: &str) -> usize {
        self.log.lock().unwrap().iter().filter(|line| line.starts_with(word)).count()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Stands between the gateway and the receiver, passes everything on, and tells when a request has gone through. It can steal
/// an answer: then the receiver has committed, and the gateway hears nothing.
struct Thief {
    address: SocketAddr,
    wanted: watch::Sender<Option<Booty>>,
    task: JoinHandle<()>,
}

/// What is stolen from the next request.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Booty {
    Nothing,
    Answer,
}

impl Thief {
    async fn start(receiver: SocketAddr) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let wanted = watch::Sender::new(None);
        let thief = wanted.clone();
        let task = tokio::spawn(async move {
            let mut passing = JoinSet::new();
            while let Ok((gateway, _)) = listener.accept().await {
                let wanted = thief.clone();
                passing.spawn(async move {
                    // The receiver may be dead at the moment; then the gateway finds its connection closed.
                    if let Ok(receiver) = TcpStream::connect(receiver).await {
                        pass(gateway, receiver, &wanted).await;
                    }
                });
                while passing.try_join_next().is_some() {}
            }
        });
        Self { address, wanted, task }
    }

    /// Waits until a request has gone through, or its answer is stolen.
    async fn wait_for(&self, booty: Booty) {
        self.wanted.send_replace(Some(booty));
        let mut done = self.wanted.subscribe();
        let done = tokio::time::timeout(IN_THE_END, done.wait_for(Option::is_none)).await;
        assert!(done.is_ok(), "no request came through");
    }
}

impl Drop for Thief {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Passes bytes on until one side is done, or an answer is stolen.
async fn pass(mut gateway: TcpStream, mut receiver: TcpStream, wanted: &watch::Sender<Option<Booty>>) {
    // Whether this was wanted; only one connection is told so.
    let take =
        |booty: Booty| wanted.send_if_modified(|wanted| wanted.take_if(|wanted| *wanted == booty).is_some());
    let (mut request, mut answer) = ([0; 4096], [0; 4096]);
    loop {
        tokio::select! {
            read = gateway.read(&mut request) => match read {
                Ok(count) if count > 0 && receiver.write_all(&request[..count]).await.is_ok() => {
                    take(Booty::Nothing);
                }
                _ => return,
            },
            read = receiver.read(&mut answer) => match read {
                Ok(count) if count > 0 && !take(Booty::Answer) => {
                    if gateway.write_all(&answer[..count]).await.is_err() {
                        return;
                    }
                }
                _ => return,
            },
        }
    }
}

/// A port that nobody listens on, and that is not of those which outgoing connections take by chance: the program that gets
/// it is killed, and must find it free when it comes back.
fn free_port() -> u16 {
    static TAKEN: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());
    let mut taken = TAKEN.lock().unwrap();
    let mut random = Random::new(now().0.unsigned_abs() ^ (u64::from(std::process::id()) << 32));
    loop {
        let port = 12_000 + random.below(20_000) as u16;
        if !taken.contains(&port) && TcpListener::bind(("127.0.0.1", port)).is_ok() {
            taken.insert(port);
            return port;
        }
    }
}
