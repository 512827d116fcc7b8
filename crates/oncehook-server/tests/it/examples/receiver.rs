//! The receivers of the recipe (docs/RECEIVER.md), in Python and Node.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

use oncehook_testkit::gateway::now;
use oncehook_testkit::random::Random;
use oncehook_testkit::sender::{Answer, Provider, ask};
use oncehook_verify::UnixMicros;
use rusqlite::Connection;
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::example::{Example, NODE_BINARY, PYTHON_BINARY, blocks, root};
use super::thief::{Booty, Thief};
use super::{IN_THE_END, delivery};
use crate::kit::{Headers, Signs, raw, soon, with};

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
    let attempts: u64 = events.iter().map(|event| delivery(event, "payments")["attempt"].as_u64().unwrap()).sum();
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
    let strangers = Signs::preset("standard-webhooks", "whsec_c3RyYW5nZXItc3RyYW5nZXItc3RyYW5nZXI", "payments");
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
    let several = crate::kit::value(&genuine, "webhook-signature");
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

/// How to run the receiver in a language.
struct Language {
    binary: &'static LazyLock<PathBuf>,
    program: &'static str,
}

const PYTHON: Language = Language { binary: &PYTHON_BINARY, program: "python/receiver.py" };
const NODE: Language = Language { binary: &NODE_BINARY, program: "node/receiver.mjs" };

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
