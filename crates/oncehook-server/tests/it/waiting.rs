//! Callers who wait for what comes of their event: one effect, and the same answer for everybody, also on another node and
//! after a restart; and an ordinary endpoint that becomes idempotent.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use oncehook_server::config::Config;
use oncehook_testkit::gateway::{Gateway, SECRET, now, prepare};
use oncehook_testkit::postgres::Server;
use oncehook_testkit::receiver::{Receiver, Reply};
use oncehook_testkit::sender::{Answer, Provider, Wire, ask, post, stripe_body};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::kit::{BINARY, check_error, soon};

const SERVER: &str = "[server]\ningress = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\n";

/// A gateway whose source waits, and whose route is what the test says.
fn config(journal: &str, wait: &str, route: &str) -> String {
    format!(
        "{SERVER}\n[journal]\nurl = \"{journal}\"\n[[source]]\nname = \"stripe\"\nprovider = \"stripe\"\n\
         secrets = [\"file:stripe.secret\"]\nwait = {wait}\n{route}"
    )
}

const ORDERS: &str = r#"
[[route]]
name = "orders"
source = "stripe"
[route.sql]
statement = "INSERT INTO orders (payment) VALUES (:payment) RETURNING id, payment"
bind = { payment = "/id" }
"#;

fn start(directory: &Path) -> Gateway {
    Gateway::start(Path::new(BINARY), directory)
}

/// A gateway on a file with a table of orders.
fn shop(wait: &str, route: &str) -> (TempDir, Gateway) {
    let directory = tempfile::tempdir().unwrap();
    prepare(directory.path(), &config("sqlite://journal.db", wait, route));
    rusqlite::Connection::open(directory.path().join("journal.db"))
        .unwrap()
        .execute_batch("CREATE TABLE orders (id INTEGER PRIMARY KEY, payment TEXT NOT NULL)")
        .unwrap();
    let gateway = start(directory.path());
    (directory, gateway)
}

fn request(id: &str) -> Vec<u8> {
    Provider::new("stripe", SECRET, "stripe").request(&Default::default(), &stripe_body(id, 500), id, now())
}

async fn send(door: SocketAddr, request: &[u8]) -> Answer {
    soon(ask(door, request)).await.unwrap()
}

/// Sends the same request over that many connections at once.
async fn together(door: SocketAddr, copies: usize, request: &[u8]) -> Vec<Answer> {
    let sending: Vec<_> = (0..copies)
        .map(|_| {
            let request = request.to_vec();
            tokio::spawn(async move { ask(door, &request).await.unwrap() })
        })
        .collect();
    let mut answers = Vec::new();
    for answer in sending {
        answers.push(soon(answer).await.unwrap());
    }
    answers
}

/// All answers are the same, byte for byte.
fn the_one_answer(answers: &[Answer]) -> (u16, Value) {
    let different: BTreeSet<_> = answers.iter().map(|answer| (answer.status, answer.body.clone())).collect();
    assert_eq!(different.len(), 1, "{different:?}");
    (answers[0].status, answers[0].json())
}

fn orders(directory: &Path) -> i64 {
    let connection = rusqlite::Connection::open(directory.join("journal.db")).unwrap();
    connection.query_row("SELECT count(*) FROM orders", [], |row| row.get(0)).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn r19_100_copies_at_once_are_one_effect_and_100_identical_answers_also_after_a_restart() {
    let (directory, mut gateway) = shop("\"20s\"", ORDERS);
    let first = together(gateway.ingress, 100, &request("evt_1")).await;
    let (status, json) = the_one_answer(&first);
    assert_eq!(status, 200);
    let event = json["event"].as_str().unwrap().to_owned();
    let expected = json!({
        "status": "accepted", "event": event,
        "delivery": { "route": "orders", "state": "succeeded", "result": { "id": 1, "payment": "evt_1" } },
    });
    assert_eq!(json, expected);
    let accepted = first.iter().filter(|answer| answer.header("oncehook-status") == Some("accepted")).count();
    assert_eq!(accepted, 1, "the header tells the first from its copies");
    assert!(first.iter().all(|answer| answer.header("oncehook-event") == Some(event.as_str())));
    assert_eq!(orders(directory.path()), 1);

    assert!(gateway.stop().success());
    let gateway = start(directory.path());
    let again = together(gateway.ingress, 100, &request("evt_1")).await;
    assert_eq!(the_one_answer(&again), (200, expected));
    assert!(again.iter().all(|answer| answer.header("oncehook-status") == Some("duplicate")));
    assert_eq!(orders(directory.path()), 1);
    // An event that the route does not exist for yet is another matter; one more event is another order.
    assert_eq!(send(gateway.ingress, &request("evt_2")).await.json()["delivery"]["result"]["id"], 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn r19_a_copy_on_another_node_waits_for_the_same_answer() {
    let database = Server::shared().database();
    database.query("CREATE TABLE orders (id serial PRIMARY KEY, payment text NOT NULL)");
    let slow = "[[route]]\nname = \"orders\"\nsource = \"stripe\"\n[route.sql]\nstatement = [\"SELECT pg_sleep(0.7)\", \
                \"INSERT INTO orders (payment) VALUES (:payment) RETURNING id, payment\"]\nbind = { payment = \"/id\" }\n";
    let directories = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let node = |directory: &TempDir, roles: &[&str]| {
        prepare(directory.path(), &config(&database.url(), "\"20s\"", slow));
        let mut command = Command::new(BINARY);
        command.arg("serve");
        command.args(roles.iter().flat_map(|role| ["--role", *role]));
        Gateway::start_command(command, directory.path())
    };
    let doors = [node(&directories[0], &["ingest"]), node(&directories[1], &["ingest"])];
    let _worker = node(&directories[0], &["worker"]);
    let request = request("evt_1");
    let (mut one, two) =
        tokio::join!(together(doors[0].ingress, 10, &request), together(doors[1].ingress, 10, &request));
    one.extend(two);
    let (status, json) = the_one_answer(&one);
    assert_eq!((status, &json["delivery"]["result"]), (200, &json!({ "id": 1, "payment": "evt_1" })));
    assert_eq!(database.query("SELECT count(*) FROM orders"), "1");
}

fn http_route(url: &str, more: &str) -> String {
    format!("[[route]]\nname = \"orders\"\nsource = \"stripe\"\n{more}\n[route.http]\nurl = \"{url}\"\n")
}

#[tokio::test(flavor = "multi_thread")]
async fn r19_what_is_not_over_in_time_is_202_and_its_result_comes_later() {
    let receiver = Receiver::start(|number, _| match number {
        0 => Reply::status(200, r#"{"done":true}"#).after(Duration::from_millis(1_500)),
        _ => panic!("there is one event"),
    })
    .await;
    let (_directory, gateway) = shop("\"300ms\"", &http_route(&receiver.url("/"), ""));
    let begun = Instant::now();
    let early = send(gateway.ingress, &request("evt_1")).await;
    assert_eq!(early.status, 202, "{}", String::from_utf8_lossy(&early.body));
    assert!(begun.elapsed() >= Duration::from_millis(300));
    let json = early.json();
    assert_eq!((&json["status"], &json["delivery"]["route"]), (&json!("accepted"), &json!("orders")));
    let mut last = send(gateway.ingress, &request("evt_1")).await;
    while last.status == 202 {
        assert!(begun.elapsed() < Duration::from_secs(20));
        last = send(gateway.ingress, &request("evt_1")).await;
    }
    assert_eq!((last.status, &last.json()["event"]), (200, &json["event"]));
    assert_eq!(last.json()["delivery"]["result"]["body"], json!({ "done": true }));
    assert_eq!(receiver.requests().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn r19_a_first_try_that_fails_is_202_at_once_and_a_dead_one_tells_its_error() {
    let receiver = Receiver::start(|_, _| Reply::status(500, "no luck")).await;
    let route = http_route(&receiver.url("/"), "retry = { max_attempts = 2, base = \"2s\", cap = \"2s\" }");
    let (directory, mut gateway) = shop("\"15s\"", &route);
    let begun = Instant::now();
    let first = send(gateway.ingress, &request("evt_1")).await;
    assert_eq!((first.status, &first.json()["delivery"]["state"]), (202, &json!("retrying")));
    assert!(begun.elapsed() < Duration::from_secs(10), "it did not wait for the retries");
    let mut last = first;
    while last.status == 202 {
        assert!(begun.elapsed() < Duration::from_secs(30));
        tokio::time::sleep(Duration::from_millis(100)).await;
        last = send(gateway.ingress, &request("evt_1")).await;
    }
    let check = |answer: &Answer| {
        let json = answer.json();
        assert_eq!((answer.status, &json["delivery"]["state"]), (502, &json!("dead")));
        assert_eq!(json["delivery"]["cause"], "destination");
        assert!(json["delivery"]["error"].as_str().unwrap().contains("500"), "{json}");
    };
    check(&last);
    assert!(gateway.stop().success());
    let gateway = start(directory.path());
    let again = send(gateway.ingress, &request("evt_1")).await;
    check(&again);
    assert_eq!(again.body, last.body, "the same every time");
}

#[tokio::test(flavor = "multi_thread")]
async fn r5_r19_beyond_the_cap_it_is_202_at_once_and_a_caller_who_leaves_changes_nothing() {
    let served = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&served);
    let receiver = Receiver::start(move |_, _| {
        counted.fetch_add(1, Ordering::Relaxed);
        Reply::status(200, "{}").after(Duration::from_secs(2))
    })
    .await;
    let directory = tempfile::tempdir().unwrap();
    let config = config("sqlite://journal.db", "\"20s\"", &http_route(&receiver.url("/"), ""));
    let config = config.replace("[journal]", "[server.limits]\nwaiting = 2\n[journal]");
    prepare(directory.path(), &config);
    let gateway = start(directory.path());
    // Two wait, then hang up; while they do, a third is not kept.
    let mut wires = Vec::new();
    for id in ["evt_1", "evt_2"] {
        let mut wire = Wire::connect(gateway.ingress).await.unwrap();
        wire.send(&request(id)).await.unwrap();
        wires.push(wire);
    }
    let begun = Instant::now();
    while served.load(Ordering::Relaxed) < 2 {
        assert!(begun.elapsed() < Duration::from_secs(20));
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let third = send(gateway.ingress, &request("evt_3")).await;
    assert_eq!((third.status, &third.json()["delivery"]["state"]), (202, &json!("ready")));
    drop(wires);
    // All three take effect once, and say so to whoever asks.
    for id in ["evt_1", "evt_2", "evt_3"] {
        let begun = Instant::now();
        loop {
            let answer = send(gateway.ingress, &request(id)).await;
            if answer.status == 200 {
                assert_eq!(answer.json()["delivery"]["state"], "succeeded");
                break;
            }
            assert!(answer.status == 202 && begun.elapsed() < Duration::from_secs(20));
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
    assert_eq!(receiver.requests().len(), 3);
}

const TOKEN: &str = "token-of-the-endpoint";

/// An endpoint with a handler behind it.
fn endpoint(wait: &str, url: &str) -> (TempDir, Gateway) {
    let directory = tempfile::tempdir().unwrap();
    let config = format!(
        "{SERVER}[journal]\nurl = \"sqlite://journal.db\"\n[[source]]\nname = \"payouts\"\nprovider = \"idempotency-key\"\n\
         secrets = [\"file:token\"]\n{wait}\n[[route]]\nname = \"payouts\"\nsource = \"payouts\"\n[route.http]\nurl = \"{url}\"\n\
         on_4xx = \"result\"\n"
    );
    prepare(directory.path(), &config);
    std::fs::write(directory.path().join("token"), TOKEN).unwrap();
    let gateway = start(directory.path());
    (directory, gateway)
}

fn call(key: Option<&str>, body: &str) -> Vec<u8> {
    let mut headers = vec![
        ("authorization".to_owned(), format!("Bearer {TOKEN}").into_bytes()),
        ("content-type".to_owned(), b"application/json".to_vec()),
    ];
    headers.extend(key.map(|key| ("idempotency-key".to_owned(), key.as_bytes().to_vec())));
    post("/webhooks/payouts", &headers, body.as_bytes())
}

#[tokio::test(flavor = "multi_thread")]
async fn r19_an_endpoint_becomes_idempotent() {
    let big = format!(r#"{{ "id": "po_1",  "text": "{}" }}"#, "ä".repeat(20_000));
    let answer = big.clone();
    let receiver = Receiver::start(move |_, arrived| match arrived.body.as_slice() {
        br#"{"amount":0}"# => Reply::status(422, "nothing to pay").with("content-type", "text/plain"),
        _ => Reply::status(201, answer.clone())
            .with("content-type", "application/json; charset=utf-8")
            .after(Duration::from_millis(300)),
    })
    .await;
    let (directory, mut gateway) = endpoint("wait = \"20s\"", &receiver.url("/"));
    let first = together(gateway.ingress, 100, &call(Some("k-1"), r#"{"amount":5}"#)).await;
    for answer in &first {
        assert_eq!((answer.status, answer.header("content-type")), (201, Some("application/json; charset=utf-8")));
        assert!(answer.body == big.as_bytes(), "the handler's answer, byte for byte");
    }
    assert_eq!(receiver.requests().len(), 1);

    check_error(&send(gateway.ingress, &call(None, "{}")).await, 400, "missing_key");
    check_error(&send(gateway.ingress, &call(Some("k-1"), r#"{"amount":6}"#)).await, 422, "key_reused");
    let strange = String::from_utf8(call(Some("k-2"), "{}")).unwrap().replace(TOKEN, "token-of-a-stranger");
    check_error(&send(gateway.ingress, strange.as_bytes()).await, 401, "signature");
    assert_eq!(receiver.requests().len(), 1, "none of these reached the handler");

    // A refusal of the application is its answer, and stays it.
    for _ in 0..2 {
        let refused = send(gateway.ingress, &call(Some("k-3"), r#"{"amount":0}"#)).await;
        assert_eq!((refused.status, refused.body.as_slice()), (422, b"nothing to pay".as_slice()));
        assert_eq!(refused.header("content-type"), Some("text/plain"));
    }
    assert_eq!(receiver.requests().len(), 2);

    assert!(gateway.stop().success());
    let gateway = start(directory.path());
    let again = send(gateway.ingress, &call(Some("k-1"), r#"{"amount":5}"#)).await;
    assert_eq!((again.status, again.header("oncehook-status")), (201, Some("duplicate")));
    assert!(again.body == big.as_bytes());
    assert_eq!(receiver.requests().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn r19_an_endpoint_that_does_not_wait_says_409_while_it_works() {
    let receiver = Receiver::start(|_, _| Reply::status(200, r#"{"id":1}"#).after(Duration::from_secs(2))).await;
    let (_directory, gateway) = endpoint("", &receiver.url("/"));
    let request = call(Some("k-1"), r#"{"amount":5}"#);
    assert_eq!(send(gateway.ingress, &request).await.status, 202);
    let busy = send(gateway.ingress, &request).await;
    check_error(&busy, 409, "in_progress");
    assert!(busy.header("retry-after").is_some());
    let begun = Instant::now();
    loop {
        let answer = send(gateway.ingress, &request).await;
        if answer.status == 200 {
            assert_eq!(answer.json(), json!({ "id": 1 }));
            break;
        }
        check_error(&answer, 409, "in_progress");
        assert!(begun.elapsed() < Duration::from_secs(20));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(receiver.requests().len(), 1);
}

#[test]
fn r9_r19_waiting_is_checked_before_anything_starts() {
    let directory = tempfile::tempdir().unwrap();
    let secret = directory.path().join("secret");
    std::fs::write(&secret, "whsec_secret").unwrap();
    let problems = |provider: &str, wait: &str, routes: &str| {
        let text = format!(
            "[[source]]\nname = \"a\"\nprovider = \"{provider}\"\nsecrets = [\"file:{}\"]\n{wait}\n{routes}",
            secret.display()
        );
        match Config::parse("test", &text) {
            Ok(config) => format!("{:?}", config.source("a").unwrap().wait),
            Err(problems) => problems.to_string(),
        }
    };
    let route =
        |name: &str| format!("[[route]]\nname = \"{name}\"\nsource = \"a\"\n[route.sql]\nstatement = \"SELECT 1\"\n");
    let (one, two) = (route("one"), route("one") + &route("two"));
    let after = one.clone() + "[[route]]\nname = \"then\"\nafter = \"one\"\n[route.sql]\nstatement = \"SELECT 1\"\n";
    for (provider, wait, routes, told) in [
        ("stripe", "wait = \"5s\"", &one, "route: RouteName(\"one\")"),
        ("stripe", "wait = { route = \"two\", up_to = \"1s\" }", &two, "route: RouteName(\"two\")"),
        ("stripe", "wait = { route = \"then\", up_to = \"1s\" }", &after, "root: RouteName(\"one\")"),
        ("stripe", "wait = \"5s\"", &after, "route: RouteName(\"one\")"),
        ("stripe", "wait = \"5s\"", &two, "several routes"),
        ("stripe", "wait = \"5s\"", &String::new(), "no route to wait for"),
        ("stripe", "wait = { route = \"none\", up_to = \"1s\" }", &one, "has not"),
        ("stripe", "wait = \"0s\"", &one, "longer than nothing"),
        ("stripe", "wait = \"2m\"", &one, "not be longer than 60 s"),
        ("stripe", "wait = \"soon\"", &one, "`wait`"),
        ("stripe", "wait = 5", &one, "expected a time"),
        ("stripe", "wait = { rout = \"one\", up_to = \"1s\" }", &one, "expected a time"),
        ("idempotency-key", "", &one, "up_to: 0ns"),
        ("idempotency-key", "", &String::new(), "None"),
        ("idempotency-key", "", &two, "several routes"),
        ("idempotency-key", "missing_key = \"digest\"", &one, "no `missing_key` here"),
    ] {
        let found = problems(provider, wait, routes);
        assert!(found.contains(told), "{provider} {wait}: {found}");
    }
    // Whoever may call is never left open.
    let open = format!("[[source]]\nname = \"a\"\nprovider = \"idempotency-key\"\n{one}");
    assert!(Config::parse("test", &open).unwrap_err().to_string().contains("needs `secrets`"));
}
