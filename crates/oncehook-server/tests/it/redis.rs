//! Several gateways on one PostgreSQL that share what they know of keys in Redis; and Redis stopped, frozen, emptied, full,
//! failed over, in a cluster, behind TLS. Whatever happens to it, the journal decides and nobody hears an error.

use std::net::SocketAddr;
use std::process::Command;
use std::time::{Duration, Instant};

use oncehook_testkit::gateway::{Gateway, SECRET, now, prepare};
use oncehook_testkit::postgres::{Database, Server};
use oncehook_testkit::redis::Redis;
use oncehook_testkit::sender::{Provider, Wire, ask, stripe_body};
use tempfile::TempDir;

use crate::kit::BINARY;

const CONFIG: &str = r#"
[server]
ingress = "127.0.0.1:0"
admin = "127.0.0.1:0"

[journal]
url = "env:SHOP_DATABASE"

[dedup]
redis = "env:SHOP_REDIS"

[[source]]
name = "stripe"
provider = "stripe"
secrets = ["file:stripe.secret"]
"#;

/// A gateway that accepts, with its directory.
struct Node {
    gateway: Gateway,
    _directory: TempDir,
}

impl Node {
    fn start(database: &Database<'_>, redis: &str) -> Self {
        Self::start_with(database, redis, &[])
    }

    fn start_with(database: &Database<'_>, redis: &str, environment: &[(&str, &str)]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        prepare(directory.path(), CONFIG);
        let mut command = Command::new(BINARY);
        command.args(["serve", "--role", "ingest", "--role", "admin"]);
        command.env("SHOP_DATABASE", database.url()).env("SHOP_REDIS", redis).envs(environment.iter().copied());
        Self { gateway: Gateway::start_command(command, directory.path()), _directory: directory }
    }

    /// Delivers an event: the word and the event's id. Anything but 200 is a panic.
    async fn deliver(&self, id: &str) -> (String, String) {
        let answer = ask(self.gateway.ingress, &request(id)).await.unwrap();
        assert_eq!(answer.status, 200, "{}", String::from_utf8_lossy(&answer.body));
        let json = answer.json();
        (json["status"].as_str().unwrap().to_owned(), json["event"].as_str().unwrap().to_owned())
    }

    /// Duplicates in memory, in Redis, in the journal.
    async fn layers(&self) -> [u64; 3] {
        let stats = self.gateway.json("/api/stats").await;
        ["memory", "redis", "journal"].map(|layer| stats["duplicates_by_layer"][layer].as_u64().unwrap())
    }

    /// Waits until `/readyz` says this of Redis. It is ready all the time.
    async fn until_redis(&self, says: impl Fn(&str) -> bool) {
        let begun = Instant::now();
        loop {
            let readiness = self.gateway.get("/readyz").await;
            assert_eq!(readiness.status, 200, "Redis never makes a gateway unready");
            let said = readiness.json()["redis"].as_str().unwrap_or_default().to_owned();
            if says(&said) {
                return;
            }
            assert!(begun.elapsed() < Duration::from_secs(30), "Redis is {said}\n{}", self.gateway.log());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn until_up(&self) {
        self.until_redis(|said| said == "ok").await;
    }

    async fn until_degraded(&self) {
        self.until_redis(|said| said.starts_with("degraded: ")).await;
    }

    /// A count of the shared cache.
    async fn count(&self, count: &str) -> f64 {
        let text = String::from_utf8(self.gateway.get("/metrics").await.body).unwrap();
        let line = format!("oncehook_redis{{count=\"{count}\"}} ");
        text.lines().find_map(|found| found.strip_prefix(&line)).unwrap().parse().unwrap()
    }

    /// Waits until so many facts were written.
    async fn until_written(&self, facts: f64) {
        let begun = Instant::now();
        while self.count("written").await < facts {
            assert!(begun.elapsed() < Duration::from_secs(30), "{}", self.gateway.log());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

fn request(id: &str) -> Vec<u8> {
    let provider = Provider::new("stripe", SECRET, "stripe");
    provider.request(&Default::default(), &stripe_body(id, 1_000), id, now())
}

/// As many as the shop had orders.
const COPIES: usize = 11_247;

/// Answers by word, and how long each took.
#[derive(Default)]
struct Storm {
    accepted: usize,
    duplicates: usize,
    events: std::collections::BTreeSet<String>,
    took: Vec<Duration>,
}

impl Storm {
    fn millis(&mut self, quantile: f64) -> f64 {
        self.took.sort_unstable();
        let at = ((self.took.len() - 1) as f64 * quantile) as usize;
        self.took[at].as_secs_f64() * 1_000.0
    }
}

/// Delivers copies of `keys` events, `copies` in all, over connections to all doors, each with a pause after every answer.
/// Anything but 200 is a panic.
async fn storm(
    doors: &[SocketAddr],
    connections: usize,
    copies: usize,
    (keys, name): (usize, &str),
    pause: Duration,
) -> Storm {
    let senders: Vec<_> = (0..connections)
        .map(|first| {
            let (door, name) = (doors[first % doors.len()], name.to_owned());
            tokio::spawn(async move {
                let provider = Provider::new("stripe", SECRET, "stripe");
                let mut wire = Wire::connect(door).await.unwrap();
                let mut storm = Storm::default();
                for copy in (first..copies).step_by(connections) {
                    let id = format!("{name}_{}", (copy / connections) % keys);
                    let request = provider.request(&Default::default(), &stripe_body(&id, 1_000), &id, now());
                    let begun = Instant::now();
                    let answer = wire.ask(&request).await.unwrap();
                    storm.took.push(begun.elapsed());
                    assert_eq!(answer.status, 200, "{}", String::from_utf8_lossy(&answer.body));
                    let json = answer.json();
                    match json["status"].as_str().unwrap() {
                        "accepted" => storm.accepted += 1,
                        "duplicate" => storm.duplicates += 1,
                        other => panic!("{other}"),
                    }
                    storm.events.insert(json["event"].as_str().unwrap().to_owned());
                    if !pause.is_zero() {
                        tokio::time::sleep(pause).await;
                    }
                }
                storm
            })
        })
        .collect();
    let mut all = Storm::default();
    for sender in senders {
        let one = sender.await.unwrap();
        all.accepted += one.accepted;
        all.duplicates += one.duplicates;
        all.events.extend(one.events);
        all.took.extend(one.took);
    }
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn r16_11247_copies_over_four_nodes_are_one_append() {
    let (database, redis) = (Server::shared().database(), Redis::start(&[]));
    let nodes: Vec<Node> = (0..4).map(|_| Node::start(&database, &redis.url())).collect();
    for node in &nodes {
        node.until_up().await;
    }
    let (word, first) = nodes[0].deliver("evt_0").await;
    assert_eq!(word, "accepted");
    nodes[0].until_written(1.0).await;

    let doors: Vec<_> = nodes.iter().map(|node| node.gateway.ingress).collect();
    let answers = storm(&doors, 32, COPIES - 1, (1, "evt"), Duration::ZERO).await;
    assert_eq!((answers.accepted, answers.duplicates), (0, COPIES - 1));
    assert_eq!(answers.events, std::collections::BTreeSet::from([first]));
    let mut layers = [0; 3];
    for node in &nodes {
        let counted = node.layers().await;
        (0..3).for_each(|layer| layers[layer] += counted[layer]);
    }
    let [memory, in_redis, journal] = layers;
    eprintln!("memory {memory}, redis {in_redis}, journal {journal}");
    assert_eq!(memory + in_redis + journal, COPIES as u64 - 1, "each is counted once");
    // About one question per node; a busy machine may be too late for one, and then the journal answers.
    assert!((3..=8).contains(&(in_redis + journal)), "{layers:?}");
    // The journal's own count agrees, by layer, once it is stored.
    let sql = "SELECT coalesce(sum(memory), 0) || ' ' || coalesce(sum(redis), 0) || ' ' || coalesce(sum(journal), 0) FROM oncehook.duplicates";
    let stored = format!("{memory} {in_redis} {journal}");
    let begun = Instant::now();
    while database.query(sql) != stored {
        assert!(begun.elapsed() < Duration::from_secs(20), "{} is not {stored}", database.query(sql));
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    // However busy the machine is, Redis is heard in time at last.
    let mut heard = in_redis;
    for number in 0..100 {
        if heard > 0 {
            break;
        }
        let key = format!("evt_late_{number}");
        nodes[0].deliver(&key).await;
        tokio::time::sleep(Duration::from_millis(100)).await;
        nodes[1].deliver(&key).await;
        heard = nodes[1].layers().await[1];
    }
    assert!(heard > 0, "Redis never answered in time");
}

/// What is done to Redis for two seconds while copies of 400 events come in over three nodes, each event twelve times, so that
/// every node meets new keys all the time.
async fn in_the_middle(trouble: impl Fn(&Redis), relief: impl Fn(&Redis)) {
    let (database, redis) = (Server::shared().database(), Redis::start(&[]));
    let nodes: Vec<Node> = (0..3).map(|_| Node::start(&database, &redis.url())).collect();
    for node in &nodes {
        node.until_up().await;
    }
    let doors: Vec<_> = nodes.iter().map(|node| node.gateway.ingress).collect();
    let pause = Duration::from_millis(5);
    let mut before = storm(&doors, 12, 12 * 100, (100, "before"), pause).await;
    let sending = storm(&doors, 12, 12 * 400, (400, "during"), pause);
    let meddling = async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        trouble(&redis);
        tokio::time::sleep(Duration::from_secs(2)).await;
        relief(&redis);
    };
    let (mut during, ()) = tokio::join!(sending, meddling);
    let mut after = storm(&doors, 12, 12 * 100, (100, "after"), pause).await;
    eprintln!(
        "p50/p99/max in ms: before {:.1}/{:.1}/{:.1}, during {:.1}/{:.1}/{:.1}, after {:.1}/{:.1}/{:.1}",
        before.millis(0.5),
        before.millis(0.99),
        before.millis(1.0),
        during.millis(0.5),
        during.millis(0.99),
        during.millis(1.0),
        after.millis(0.5),
        after.millis(0.99),
        after.millis(1.0),
    );
    assert_eq!((before.accepted, during.accepted, after.accepted), (100, 400, 100), "each event once");
    assert!(during.millis(1.0) < 1_500.0, "nobody waits for Redis");
    for node in &nodes {
        // A few ask in vain; then the breaker is open, and nobody asks. (Without it there would be hundreds. On a busy machine
        // an answer is late now and then, without any trouble.)
        let unanswered = node.count("unanswered").await;
        assert!(unanswered < 150.0, "{unanswered}");
        node.until_up().await;
    }
    // Facts are shared again.
    nodes[0].deliver("evt_again").await;
    nodes[0].until_written(1.0).await;
    let before = nodes[1].layers().await[1];
    let begun = Instant::now();
    let mut number = 0;
    while nodes[1].layers().await[1] == before {
        assert!(begun.elapsed() < Duration::from_secs(30), "{}", nodes[1].gateway.log());
        number += 1;
        let written = nodes[0].count("written").await;
        nodes[0].deliver(&format!("evt_shared_{number}")).await;
        nodes[0].until_written(written + 1.0).await;
        assert_eq!(nodes[1].deliver(&format!("evt_shared_{number}")).await.0, "duplicate");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_34_r17_redis_is_stopped_in_the_middle() {
    in_the_middle(Redis::stop, Redis::restart).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_34_r17_redis_is_flushed_in_the_middle() {
    in_the_middle(|redis| drop(redis.ask(&["FLUSHALL"])), |_| {}).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_34_r17_redis_stalls_for_two_seconds_in_the_middle() {
    in_the_middle(Redis::freeze, Redis::thaw).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_33_fault_34_r17_redis_that_is_full_read_only_or_failed_over_only_forgets() {
    let database = Server::shared().database();
    let (one, two) = (Redis::start(&[]), Redis::start(&[]));
    let urls = format!("redis://127.0.0.1:{},127.0.0.1:{}", one.port(), two.port());
    let nodes = [Node::start(&database, &urls), Node::start(&database, &urls)];
    for node in &nodes {
        node.until_up().await;
    }
    let (_, first) = nodes[0].deliver("evt_1").await;
    nodes[0].until_written(1.0).await;

    // Full: what is there is read, nothing is added.
    one.ask(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]);
    one.ask(&["CONFIG", "SET", "maxmemory", "1"]);
    assert_eq!(nodes[1].deliver("evt_1").await, ("duplicate".to_owned(), first.clone()));
    let (_, second) = nodes[0].deliver("evt_2").await;
    nodes[0].until_redis(|said| said.contains("OOM")).await;
    assert_eq!(nodes[1].deliver("evt_2").await, ("duplicate".to_owned(), second.clone()));
    one.ask(&["CONFIG", "SET", "maxmemory", "0"]);

    // Read only: it became a replica under our feet. The other one is the primary now, with or without the keys.
    one.ask(&["REPLICAOF", "127.0.0.1", &two.port().to_string()]);
    let (_, third) = nodes[0].deliver("evt_3").await;
    nodes[0].until_up().await;
    for (id, event) in [("evt_1", &first), ("evt_2", &second), ("evt_3", &third)] {
        assert_eq!(nodes[1].deliver(id).await, ("duplicate".to_owned(), event.clone()));
    }

    // The primary dies, and the replica takes over by hand.
    two.stop();
    let (_, fourth) = nodes[0].deliver("evt_4").await;
    nodes[0].until_degraded().await;
    one.ask(&["REPLICAOF", "NO", "ONE"]);
    nodes[0].until_up().await;
    assert_eq!(nodes[1].deliver("evt_4").await, ("duplicate".to_owned(), fourth));
    assert_eq!(database.query("SELECT count(*) FROM oncehook.events"), "4");
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_35_r17_a_database_that_was_put_back_is_not_answered_for() {
    let (server, redis) = (Server::start(&[]), Redis::start(&[]));
    let database = server.database();
    let nodes = [Node::start(&database, &redis.url()), Node::start(&database, &redis.url())];
    for node in &nodes {
        node.until_up().await;
    }
    let (word, first) = nodes[0].deliver("evt_1").await;
    assert_eq!(word, "accepted");
    nodes[0].until_written(1.0).await;
    assert_eq!(nodes[0].deliver("evt_1").await.0, "duplicate");

    // As if the files of an hour ago had been put back: the event is gone, the cluster is the same.
    let tables = "oncehook.events, oncehook.keys, oncehook.deliveries";
    for table in tables.split(", ") {
        database.query(&format!("DELETE FROM {table}"));
    }
    server.stop();
    server.restart();
    for node in &nodes {
        let begun = Instant::now();
        while node.gateway.get("/readyz").await.status != 200 {
            assert!(begun.elapsed() < Duration::from_secs(30), "{}", node.gateway.log());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
    let answers = [until_stored(&nodes[0], "evt_1").await, until_stored(&nodes[1], "evt_1").await];
    let ids: Vec<_> = answers.iter().map(|(_, id)| id.clone()).collect();
    assert_eq!([answers[0].0.as_str(), answers[1].0.as_str()], ["accepted", "duplicate"]);
    assert!(ids[0] == ids[1] && ids[0] != first);
}

/// Delivers, again while the database is not back yet.
async fn until_stored(node: &Node, id: &str) -> (String, String) {
    let begun = Instant::now();
    loop {
        let answer = ask(node.gateway.ingress, &request(id)).await.unwrap();
        if answer.status == 200 {
            let json = answer.json();
            return (json["status"].as_str().unwrap().to_owned(), json["event"].as_str().unwrap().to_owned());
        }
        assert!(answer.status == 503 && begun.elapsed() < Duration::from_secs(30), "{}", node.gateway.log());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn r17_two_deployments_on_one_redis_do_not_know_each_other() {
    let redis = Redis::start(&[]);
    let (one, two) = (Server::shared().database(), Server::shared().database());
    let nodes = [Node::start(&one, &redis.url()), Node::start(&two, &redis.url())];
    for node in &nodes {
        node.until_up().await;
        assert_eq!(node.deliver("evt_1").await.0, "accepted");
        node.until_written(1.0).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn r18_an_empty_redis_is_warmed_from_the_journal() {
    let (database, redis) = (Server::shared().database(), Redis::start(&[]));
    let node = Node::start(&database, &redis.url());
    node.until_up().await;
    for number in 0..50 {
        node.deliver(&format!("evt_{number}")).await;
    }
    node.until_written(50.0).await;
    let keys = || redis.ask(&["DBSIZE"]).parse::<u64>().unwrap();
    let filled = async |what: &str| {
        let begun = Instant::now();
        while keys() < 51 {
            assert!(begun.elapsed() < Duration::from_secs(30), "{what}: {}", keys());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    redis.ask(&["FLUSHALL"]);
    filled("flushed").await;
    redis.stop();
    redis.restart();
    filled("restarted").await;
    // Each lives as long as its key: 35 days at most.
    let key = redis.ask(&["RANDOMKEY"]);
    let left: u64 = redis.ask(&["TTL", &key]).parse().unwrap();
    assert!((1..=35 * 86_400).contains(&left), "{left}");

    // A process that starts knows them too, and asks nobody.
    let another = Node::start(&database, &redis.url());
    let begun = Instant::now();
    loop {
        let [memory, ..] = another.layers().await;
        assert_eq!(another.deliver("evt_7").await.0, "duplicate");
        if another.layers().await[0] == memory + 1 {
            break;
        }
        assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", another.layers().await);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn r16_a_cluster_is_used_and_a_moved_slot_found() {
    let database = Server::shared().database();
    let settings = ["--cluster-enabled", "yes", "--cluster-require-full-coverage", "no"];
    let (one, two) = (Redis::start(&settings), Redis::start(&settings));
    one.ask(&["CLUSTER", "ADDSLOTSRANGE", "0", "8191"]);
    two.ask(&["CLUSTER", "ADDSLOTSRANGE", "8192", "16383"]);
    one.ask(&["CLUSTER", "MEET", "127.0.0.1", &two.port().to_string()]);
    let begun = Instant::now();
    for server in [&one, &two] {
        while !server.ask(&["CLUSTER", "SLOTS"]).contains(&one.port().to_string())
            || !server.ask(&["CLUSTER", "SLOTS"]).contains(&two.port().to_string())
        {
            assert!(begun.elapsed() < Duration::from_secs(30), "{}", server.ask(&["CLUSTER", "NODES"]));
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
    let url = format!("redis+cluster://127.0.0.1:{}", one.port());
    let nodes = [Node::start(&database, &url), Node::start(&database, &url)];
    for node in &nodes {
        node.until_up().await;
    }
    for number in 0..40 {
        nodes[0].deliver(&format!("evt_{number}")).await;
    }
    nodes[0].until_written(40.0).await;
    let sizes = [&one, &two].map(|server| server.ask(&["DBSIZE"]).parse::<u64>().unwrap());
    assert!(sizes[0] > 5 && sizes[1] > 5, "both hold some: {sizes:?}");
    for number in 0..40 {
        assert_eq!(nodes[1].deliver(&format!("evt_{number}")).await.0, "duplicate");
    }
    assert!(nodes[1].layers().await[1] > 10, "{:?}", nodes[1].layers().await);
    // All slots move to the second; the client is told MOVED, and nobody hears an error.
    let second = two.ask(&["CLUSTER", "MYID"]);
    two.ask(&["FLUSHALL"]);
    one.ask(&["FLUSHALL"]);
    for slot in 0..8_192_u32 {
        if slot % 512 == 0 {
            for server in [&one, &two] {
                server.ask(&["CLUSTER", "SETSLOT", &slot.to_string(), "NODE", &second]);
            }
        }
    }
    for number in 40..80 {
        assert_eq!(nodes[0].deliver(&format!("evt_{number}")).await.0, "accepted");
        assert_eq!(nodes[1].deliver(&format!("evt_{number}")).await.0, "duplicate");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn r8_r16_redis_over_tls_with_a_password() {
    let directory = tempfile::tempdir().unwrap();
    let signed = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(path("cert.pem"), signed.cert.pem()).unwrap();
    std::fs::write(path("key.pem"), signed.signing_key.serialize_pem()).unwrap();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let redis = Redis::start(&[
        "--tls-port",
        &port.to_string(),
        "--tls-cert-file",
        &path("cert.pem"),
        "--tls-key-file",
        &path("key.pem"),
        "--tls-auth-clients",
        "no",
        "--requirepass",
        "hunter2",
    ]);
    let database = Server::shared().database();
    let (trusted, url) = (path("cert.pem"), format!("rediss://:hunter2@localhost:{port}"));
    let trust = [("SSL_CERT_FILE", trusted.as_str())];
    let nodes = [Node::start_with(&database, &url, &trust), Node::start_with(&database, &url, &trust)];
    for node in &nodes {
        node.until_up().await;
    }
    nodes[0].deliver("evt_1").await;
    nodes[0].until_written(1.0).await;
    assert_eq!(nodes[1].deliver("evt_1").await.0, "duplicate");

    // A certificate that nobody vouches for, and a wrong password: degraded, and nothing of it is shown.
    let strange = Node::start(&database, &url);
    strange.until_degraded().await;
    let wrong = Node::start_with(&database, &format!("rediss://:hunter3@localhost:{port}"), &trust);
    wrong.until_degraded().await;
    for node in [&strange, &wrong] {
        assert_eq!(node.deliver("evt_1").await.0, "duplicate");
        assert!(!node.gateway.log().contains("hunter"), "{}", node.gateway.log());
    }
    drop(redis);
}
