//! Order within an entity, on the real program: whatever is killed or frozen meanwhile, the events of an entity take effect in
//! their order and once. And what a route fetches before it runs.
//!
//! `ONCEHOOK_TEST_SCALE` makes the runs longer.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use http::HeaderMap;
use oncehook_testkit::gateway::{Gateway, SECRET, now, prepare};
use oncehook_testkit::random::{Random, scale};
use oncehook_testkit::receiver::{Receiver, Reply};
use oncehook_testkit::sender::{Provider, ask};
use oncehook_testkit::shop::drained_within;
use oncehook_testkit::{mysql, postgres};
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::kit::BINARY;

const PATIENCE: Duration = Duration::from_secs(240);

/// Two routes that keep the order of entities: one in the journal's database, one that leaves the process.
fn config(journal: &str, receiver: &Receiver) -> String {
    format!(
        r#"
[server]
ingress = "127.0.0.1:0"
admin = "127.0.0.1:0"
[journal]
url = "{journal}"
[[source]]
name = "stripe"
provider = "stripe"
secrets = ["file:stripe.secret"]
[[route]]
name = "ledger"
source = "stripe"
order = "entity"
[route.sql]
statement = "INSERT INTO steps (entity, number) VALUES (:entity, :number)"
bind = {{ entity = "$entity", number = "/data/object/number" }}
[[route]]
name = "forward"
source = "stripe"
order = "entity"
retry = {{ max_attempts = 100, base = "20ms", cap = "200ms" }}
[route.http]
url = "{}"
"#,
        receiver.url("/steps")
    )
}

const ENTITIES: usize = 24;

fn body(entity: usize, number: usize) -> Vec<u8> {
    let object = json!({ "id": format!("pi_{entity}"), "object": "payment_intent", "number": number });
    let id = format!("evt_{entity}_{number}");
    json!({ "id": id, "object": "event", "created": 1_700_000_000, "type": "payment_intent.updated", "data": { "object": object } })
        .to_string()
        .into_bytes()
}

/// Senders with entities of their own. Each event of an entity is sent until it is acknowledged, then the next one.
struct Senders {
    provider: Arc<Provider>,
    /// How many events of each entity were acknowledged.
    acknowledged: Arc<Vec<AtomicU64>>,
}

impl Senders {
    fn new() -> Self {
        let acknowledged = (0..ENTITIES).map(|_| AtomicU64::new(0)).collect();
        let provider = Arc::new(Provider::new("stripe", SECRET, "stripe"));
        Self { provider, acknowledged: Arc::new(acknowledged) }
    }

    /// Sends until the end is told, or the door is gone.
    fn start(&self, door: std::net::SocketAddr, end: &Arc<AtomicBool>) -> JoinSet<()> {
        let mut sending = JoinSet::new();
        for sender in 0..4 {
            let (provider, acknowledged) = (Arc::clone(&self.provider), Arc::clone(&self.acknowledged));
            let end = Arc::clone(end);
            sending.spawn(async move {
                while !end.load(Ordering::Relaxed) {
                    for entity in (sender..ENTITIES).step_by(4) {
                        let number = acknowledged[entity].load(Ordering::Relaxed);
                        let body = body(entity, number as usize);
                        let id = format!("evt_{entity}_{number}");
                        let request = provider.request(&HeaderMap::new(), &body, &id, now());
                        match ask(door, &request).await {
                            Ok(answer) if answer.status == 200 => {
                                acknowledged[entity].fetch_add(1, Ordering::Relaxed);
                            }
                            Ok(_) => sleep(Duration::from_millis(5)).await,
                            Err(_) => return,
                        }
                    }
                    sleep(Duration::from_millis(5)).await;
                }
            });
        }
        sending
    }

    /// Each entity's numbers, as they took effect: all that were acknowledged, once, in order. (The last one may be stored
    /// without having been acknowledged.)
    fn check(&self, what: &str, effects: &BTreeMap<String, Vec<u64>>) -> u64 {
        let mut all = 0;
        for (entity, acknowledged) in self.acknowledged.iter().enumerate() {
            let acknowledged = acknowledged.load(Ordering::Relaxed);
            let numbers = effects.get(&format!("pi_{entity}")).cloned().unwrap_or_default();
            let expected: Vec<u64> = (0..numbers.len() as u64).collect();
            assert_eq!(numbers, expected, "{what}: the effects of pi_{entity} are not in order");
            assert!((acknowledged..=acknowledged + 1).contains(&(numbers.len() as u64)), "{what}: pi_{entity}");
            all += numbers.len() as u64;
        }
        all
    }
}

/// Each entity's numbers in the order in which they arrived first. What comes again under its key is no second effect.
fn arrived(receiver: &Receiver) -> BTreeMap<String, Vec<u64>> {
    let mut seen = BTreeSet::new();
    let mut effects: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    for request in receiver.requests() {
        if seen.insert(request.header("idempotency-key").unwrap().to_owned()) {
            let event: Value = serde_json::from_slice(&request.body).unwrap();
            let object = &event["data"]["object"];
            let entity = object["id"].as_str().unwrap().to_owned();
            effects.entry(entity).or_default().push(object["number"].as_u64().unwrap());
        }
    }
    effects
}

/// `pi_1 0,pi_2 0,pi_1 1`: in the order in which they were written.
fn written(listed: &str) -> BTreeMap<String, Vec<u64>> {
    let mut effects: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    for step in listed.split(',').filter(|step| !step.is_empty()) {
        let (entity, number) = step.split_once(' ').unwrap();
        effects.entry(entity.to_owned()).or_default().push(number.parse().unwrap());
    }
    effects
}

/// A destination that takes a moment, so that attempts are under way when something happens.
async fn slow_receiver() -> Receiver {
    Receiver::start(|_, _| Reply::status(200, "").after(Duration::from_millis(4))).await
}

#[tokio::test(flavor = "multi_thread")]
async fn r12_r13_killed_at_random_each_entity_keeps_its_order_on_sqlite() {
    let mut random = Random::from_environment();
    let receiver = slow_receiver().await;
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    prepare(directory.path(), &config("sqlite://journal.db", &receiver));
    let database = rusqlite::Connection::open(directory.path().join("journal.db")).unwrap();
    database.busy_timeout(Duration::from_secs(20)).unwrap();
    database.execute_batch("CREATE TABLE steps (id INTEGER PRIMARY KEY, entity TEXT, number INTEGER)").unwrap();
    let senders = Senders::new();
    let kills = 8 * scale();
    for _ in 0..kills {
        let mut gateway = start(directory.path(), &["serve", "--lease", "300"], "");
        let end = Arc::new(AtomicBool::new(false));
        let mut sending = senders.start(gateway.ingress, &end);
        sleep(Duration::from_millis(150 + random.below(400))).await;
        gateway.kill();
        end.store(true, Ordering::Relaxed);
        while sending.join_next().await.is_some() {}
    }
    let mut gateway = start(directory.path(), &["serve", "--lease", "300"], "");
    assert_eq!(drained_within(&gateway, PATIENCE).await, 0, "deliveries were given up");
    assert!(gateway.stop().success());
    let sql = "SELECT group_concat(entity || ' ' || number) FROM (SELECT entity, number FROM steps ORDER BY id)";
    let listed: Option<String> = database.query_row(sql, [], |row| row.get(0)).unwrap();
    let effects = senders.check("ledger", &written(&listed.unwrap_or_default()));
    assert_eq!(senders.check("forward", &arrived(&receiver)), effects);
    assert!(effects > ENTITIES as u64, "too little happened: {effects}");
    eprintln!("{kills} kills, {effects} effects in order, {} requests", receiver.requests().len());
}

/// Two workers on one database. One of them is killed, or frozen past its leases and thawed, while the other goes on.
#[tokio::test(flavor = "multi_thread")]
async fn fault_17_fault_41_r13_killed_and_frozen_workers_on_postgres_keep_the_order_of_entities() {
    let database = postgres::Server::shared().database();
    database.query("CREATE TABLE steps (id bigserial PRIMARY KEY, entity text, number bigint)");
    let listed = "SELECT string_agg(entity || ' ' || number, ',' ORDER BY id) FROM steps";
    killed_and_frozen(&database.url(), || database.query(listed)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_17_fault_41_r13_killed_and_frozen_workers_on_mysql_keep_the_order_of_entities() {
    let database = mysql::Server::shared().database();
    database.query("CREATE TABLE steps (id BIGINT AUTO_INCREMENT PRIMARY KEY, entity VARCHAR(32), number BIGINT)");
    let listed = "SET SESSION group_concat_max_len = 10000000;
                  SELECT GROUP_CONCAT(CONCAT(entity, ' ', number) ORDER BY id SEPARATOR ',') FROM steps";
    killed_and_frozen(&database.url(), || database.query(listed)).await;
}

async fn killed_and_frozen(url: &str, listed: impl Fn() -> String) {
    let mut random = Random::from_environment();
    let receiver = slow_receiver().await;
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    prepare(directory.path(), &config("env:STEPS_DATABASE", &receiver));
    let door = start(directory.path(), &["serve", "--role", "ingest", "--role", "admin"], url);
    let worker = || start(directory.path(), &["serve", "--role", "worker", "--lease", "600"], url);
    let mut workers = [worker(), worker()];
    let senders = Senders::new();
    let end = Arc::new(AtomicBool::new(false));
    let mut sending = senders.start(door.ingress, &end);
    let rounds = 4 * scale();
    for round in 0..rounds {
        sleep(Duration::from_millis(200 + random.below(300))).await;
        let place = random.below(2) as usize;
        if round % 2 == 0 {
            workers[place].kill();
            workers[place] = worker();
        } else {
            workers[place].signal("STOP");
            sleep(Duration::from_millis(2_000)).await;
            workers[place].signal("CONT");
        }
    }
    end.store(true, Ordering::Relaxed);
    while sending.join_next().await.is_some() {}
    assert_eq!(drained_within(&door, PATIENCE).await, 0, "deliveries were given up");
    let effects = senders.check("ledger", &written(&listed()));
    assert_eq!(senders.check("forward", &arrived(&receiver)), effects);
    assert!(effects > ENTITIES as u64, "too little happened: {effects}");
    eprintln!("{rounds} rounds, {effects} effects in order, {} requests", receiver.requests().len());
}

fn start(directory: &Path, arguments: &[&str], url: &str) -> Gateway {
    let mut command = Command::new(BINARY);
    command.args(arguments).env("STEPS_DATABASE", url);
    Gateway::start_command(command, directory)
}

/// A route that asks the provider first, in the journal's database, and one that sends on what it heard.
fn fetching(journal: &str, provider: &Receiver, receiver: &Receiver) -> String {
    let fetch = format!(
        r#"fetch = {{ url = "{}", auth = "file:token" }}
retry = {{ max_attempts = 20, base = "10ms", cap = "50ms" }}"#,
        provider.url("/v1/payouts/{entity}")
    );
    format!(
        r#"
[server]
ingress = "127.0.0.1:0"
admin = "127.0.0.1:0"
[journal]
url = "{journal}"
[[source]]
name = "stripe"
provider = "stripe"
secrets = ["file:stripe.secret"]
[[route]]
name = "ledger"
source = "stripe"
order = "entity"
{fetch}
[route.sql]
statement = "INSERT INTO seen (entity, status, total) VALUES (:entity, :status, :total)"
bind = {{ entity = "$entity", status = "$current/status", total = "$current/total" }}
[[route]]
name = "forward"
source = "stripe"
{fetch}
[route.http]
url = "{}"
body = '{{"now": {{{{$current}}}}}}'
"#,
        receiver.url("/now")
    )
}

async fn fetches(journal: &str, url: &str, directory: &Path, seen: impl Fn() -> String) {
    let asked = AtomicU64::new(0);
    let provider = Receiver::start(move |_, request| match request.line.as_str() {
        "GET /v1/payouts/po_1 HTTP/1.1" => match asked.fetch_add(1, Ordering::SeqCst) {
            0 | 1 => Reply::status(503, "not now"),
            2 => Reply::status(200, "<html>"),
            3 => Reply::status(200, vec![b' '; (1 << 20) + 1]),
            4 => Reply::Raw(b"HTTP/1.1 302 Found\r\nlocation: /elsewhere\r\ncontent-length: 0\r\n\r\n".to_vec()),
            _ => Reply::status(200, r#"{"status":"paid","total":42}"#),
        },
        _ => Reply::status(404, ""),
    })
    .await;
    let receiver = Receiver::start(|_, _| Reply::status(200, "")).await;
    prepare(directory, &fetching(journal, &provider, &receiver));
    std::fs::write(directory.join("token"), "sk_secret_token").unwrap();
    let gateway = start(directory, &["serve"], url);
    let body = json!({ "id": "evt_1", "object": "event", "created": 1_700_000_000, "type": "payout.updated",
                       "data": { "object": { "id": "po_1", "object": "payout", "status": "pending" } } });
    let stripe = Provider::new("stripe", SECRET, "stripe");
    let request = stripe.request(&HeaderMap::new(), body.to_string().as_bytes(), "evt_1", now());
    let answer = ask(gateway.ingress, &request).await.unwrap();
    assert_eq!(answer.status, 200);
    assert_eq!(drained_within(&gateway, PATIENCE).await, 0, "deliveries were given up");
    // What counts is what the provider says, not what the event said; and it happens once.
    assert_eq!(seen(), "po_1 paid 42");
    let forwarded = receiver.requests();
    assert_eq!(forwarded.len(), 1);
    assert_eq!(forwarded[0].body, br#"{"now": {"status":"paid","total":42}}"#);
    let event = gateway.events().await[0]["id"].as_str().unwrap().to_owned();
    let story = gateway.json(&format!("/api/events/{event}")).await;
    let attempts: usize =
        story["deliveries"].as_array().unwrap().iter().map(|one| one["attempts"].as_array().unwrap().len()).sum();
    assert_eq!(attempts, provider.requests().len(), "one request for each attempt: {story}");
    assert_eq!(attempts, 7, "{story}");
    for request in provider.requests() {
        assert_eq!(request.header("authorization"), Some("Bearer sk_secret_token"));
    }
    let told = story.to_string();
    assert!(told.contains("503") && told.contains("not JSON") && told.contains("more than 1048576 bytes"), "{told}");
    assert!(!told.contains("sk_secret_token") && !gateway.log().contains("sk_secret_token"));
}

#[tokio::test(flavor = "multi_thread")]
async fn r31_the_current_state_is_fetched_before_a_route_runs_on_sqlite() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let database = rusqlite::Connection::open(directory.path().join("journal.db")).unwrap();
    database.execute_batch("CREATE TABLE seen (entity TEXT, status TEXT, total INTEGER)").unwrap();
    let seen = || {
        let sql = "SELECT group_concat(entity || ' ' || status || ' ' || total) FROM seen";
        database.query_row(sql, [], |row| row.get(0)).unwrap()
    };
    fetches("sqlite://journal.db", "", directory.path(), seen).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r31_the_current_state_is_fetched_before_a_route_runs_on_postgres() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let database = postgres::Server::shared().database();
    database.query("CREATE TABLE seen (entity text, status text, total integer)");
    let sql = "SELECT string_agg(entity || ' ' || status || ' ' || total, ',') FROM seen";
    fetches("env:STEPS_DATABASE", &database.url(), directory.path(), || database.query(sql)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r31_the_current_state_is_fetched_before_a_route_runs_on_mysql() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let database = mysql::Server::shared().database();
    database.query("CREATE TABLE seen (entity VARCHAR(32), status VARCHAR(32), total INT)");
    let sql = "SELECT GROUP_CONCAT(CONCAT(entity, ' ', status, ' ', total)) FROM seen";
    fetches("env:STEPS_DATABASE", &database.url(), directory.path(), || database.query(sql)).await;
}

/// The payouts of the example, in every order and with duplicates, on one of the engines.
async fn payouts(journal: &str, url: &str, directory: &Path, query: impl Fn(&str) -> String) {
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/payout-fees");
    let config = std::fs::read_to_string(example.join("states.toml")).unwrap();
    assert!(config.contains("sqlite://payouts.db") && config.contains("127.0.0.1:8080"));
    let config = config.replace("sqlite://payouts.db", journal);
    prepare(directory, &config.replace("127.0.0.1:8080", "127.0.0.1:0").replace("127.0.0.1:8081", "127.0.0.1:0"));
    for statement in std::fs::read_to_string(example.join("states.sql")).unwrap().split(';') {
        if !statement.trim().is_empty() {
            query(statement);
        }
    }
    let gateway = start(directory, &["serve"], url);
    let stripe = Provider::new("stripe", SECRET, "stripe");
    let mut random = Random::from_environment();
    let kinds = ["payout.created", "payout.updated", "payout.paid"];
    let orders = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
    for (number, order) in orders.iter().enumerate() {
        for place in order {
            let object = json!({ "id": format!("po_{number}"), "object": "payout", "amount": 250_000 });
            // Each comes up to three times; and sometimes once more as another event, which the machine finds late.
            for copy in 0..=random.below(3) {
                let again = if copy == 2 { "b" } else { "" };
                let id = format!("evt_{number}_{place}{again}");
                let body = json!({ "id": id, "object": "event", "created": 1_700_000_000, "type": kinds[*place],
                                   "account": "acct_kettles", "data": { "object": object } });
                let request = stripe.request(&HeaderMap::new(), body.to_string().as_bytes(), &id, now());
                assert_eq!(ask(gateway.ingress, &request).await.unwrap().status, 200);
            }
            if random.below(2) == 0 {
                sleep(Duration::from_millis(random.below(60))).await;
            }
        }
    }
    assert_eq!(drained_within(&gateway, PATIENCE).await, 0, "deliveries were given up");
    assert_eq!(query("SELECT count(*) FROM payouts WHERE state = 'completed'"), "6");
    assert_eq!(query("SELECT count(*) FROM payouts"), "6");
    // 0.5 % of 2,500.00, six times, from 1,000.00.
    assert_eq!(query("SELECT count(*) FROM fees WHERE cents = 1250"), "6");
    assert_eq!(query("SELECT count(*) FROM fees"), "6");
    assert_eq!(query("SELECT cents FROM balances WHERE account = 'acct_kettles'"), "92500");
}

#[tokio::test(flavor = "multi_thread")]
async fn r30_payouts_in_every_order_take_one_fee_on_sqlite() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let database = rusqlite::Connection::open(directory.path().join("payouts.db")).unwrap();
    database.busy_timeout(Duration::from_secs(20)).unwrap();
    let query = |sql: &str| match sql.trim_start().starts_with("SELECT") {
        true => database.query_row(sql, [], |row| row.get::<_, i64>(0)).unwrap().to_string(),
        false => database.execute_batch(sql).map(|()| String::new()).unwrap(),
    };
    payouts("sqlite://payouts.db", "", directory.path(), query).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r30_payouts_in_every_order_take_one_fee_on_postgres() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let database = postgres::Server::shared().database();
    payouts("env:STEPS_DATABASE", &database.url(), directory.path(), |sql| database.query(sql)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r30_payouts_in_every_order_take_one_fee_on_mysql() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let database = mysql::Server::shared().database();
    payouts("env:STEPS_DATABASE", &database.url(), directory.path(), |sql| database.query(sql)).await;
}

/// Payouts whose machine stands in another database than the journal, while the gateway is ended between the commit there and
/// its own, again and again. All orders of the three events, with copies.
async fn payouts_elsewhere(url: &str, query: impl Fn(&str) -> String) -> usize {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/payout-fees");
    let config = std::fs::read_to_string(example.join("states.toml")).unwrap();
    let config = config.replace("127.0.0.1:8080", "127.0.0.1:0").replace("127.0.0.1:8081", "127.0.0.1:0");
    assert!(config.contains("[route.sql]\n"));
    prepare(directory.path(), &config.replace("[route.sql]\n", "[route.sql]\ndatabase = \"env:STEPS_DATABASE\"\n"));
    for statement in std::fs::read_to_string(example.join("states.sql")).unwrap().split(';') {
        if !statement.trim().is_empty() {
            query(statement);
        }
    }
    let stripe = Provider::new("stripe", SECRET, "stripe");
    let kinds = ["payout.created", "payout.updated", "payout.paid"];
    let orders = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
    let request = |payout: &str, place: usize, again: &str| {
        let object = json!({ "id": format!("po_{payout}"), "object": "payout", "amount": 250_000 });
        let id = format!("evt_{payout}_{place}{again}");
        let body = json!({ "id": id, "object": "event", "created": 1_700_000_000, "type": kinds[place],
                           "account": "acct_kettles", "data": { "object": object } });
        stripe.request(&HeaderMap::new(), body.to_string().as_bytes(), &id, now())
    };
    let mut random = Random::from_environment();
    let points = ["between_commits", "guard_taken", "after_effect", "before_settle"];
    let (kills, mut ended) = (12 * scale(), 0);
    for kill in 0..kills {
        let mut command = Command::new(BINARY);
        let point = format!("{}:{}", points[kill % points.len()], 1 + random.below(3));
        command.arg("serve").env("STEPS_DATABASE", url).env("ONCEHOOK_CRASH_POINT", point);
        let mut gateway = Gateway::start_command(command, directory.path());
        // Six payouts of this round, each in an order of its own, until it ends.
        let until = tokio::time::Instant::now() + Duration::from_secs(30);
        while tokio::time::Instant::now() < until {
            let turn = random.below(18) as usize;
            let (number, place) = (turn / 3, orders[turn / 3][turn % 3]);
            if ask(gateway.ingress, &request(&format!("{kill}_{number}"), place, "")).await.is_err() {
                ended += 1;
                break;
            }
        }
        gateway.kill();
    }
    assert_eq!(ended, kills, "it did not come to every place at which it was to end");
    let gateway = start(directory.path(), &["serve"], url);
    for payout in (0..kills).flat_map(|kill| (0..6).map(move |number| format!("{kill}_{number}"))) {
        for place in orders[random.below(6) as usize] {
            // Once more as it was, and as another event, which the machine finds late.
            for again in ["", "b"] {
                let answer = ask(gateway.ingress, &request(&payout, place, again)).await.unwrap();
                assert_eq!(answer.status, 200);
            }
        }
    }
    assert_eq!(drained_within(&gateway, PATIENCE).await, 0, "deliveries were given up");
    let all = (6 * kills).to_string();
    assert_eq!(query("SELECT count(*) FROM payouts WHERE state = 'completed'"), all);
    assert_eq!(query("SELECT count(*) FROM payouts"), all);
    assert_eq!(query("SELECT count(*) FROM fees WHERE cents = 1250"), all);
    assert_eq!(query("SELECT count(*) FROM fees"), all);
    let balance = query("SELECT cents FROM balances WHERE account = 'acct_kettles'");
    assert_eq!(balance, (100_000 - 6 * 1_250 * kills as i64).to_string());
    let states: Vec<Value> = gateway.events().await.into_iter().map(|event| event["status"].clone()).collect();
    let count = |status: &str| states.iter().filter(|state| **state == status).count();
    assert_eq!((count("succeeded"), count("superseded")), (18 * kills, 18 * kills), "{states:?}");
    kills
}

#[tokio::test(flavor = "multi_thread")]
async fn r20_r30_killed_between_the_commits_a_machine_in_another_postgres_takes_one_fee() {
    let database = postgres::Server::shared().database();
    let kills = payouts_elsewhere(&database.url(), |sql| database.query(sql)).await;
    let states =
        "SELECT scope, state, version, count(*) FROM oncehook_guard.oncehook_applied_entities GROUP BY 1, 2, 3";
    assert_eq!(database.query(states), format!("machine:payout|completed|3|{}", 6 * kills));
}

#[tokio::test(flavor = "multi_thread")]
async fn r20_r30_killed_between_the_commits_a_machine_in_another_mariadb_takes_one_fee() {
    let database = mysql::Server::shared().database();
    let kills = payouts_elsewhere(&database.url(), |sql| database.query(sql)).await;
    let states = "SELECT scope, state, version, count(*) FROM oncehook_applied_entities GROUP BY 1, 2, 3";
    assert_eq!(database.query(states), format!("machine:payout|completed|3|{}", 6 * kills));
}
