//! Forged requests by the hundred at a real front door, and a genuine sender beside them.
//!
//! The gate, the listener and the ring of keys are the gateway's own; only the provider's host is played, because the real
//! client refuses addresses of this machine. Senders have addresses of their own: 127.0.0.1, 127.0.0.2 and so on.

use std::net::Ipv4Addr;

use oncehook::clock::Clock;
use oncehook::journal::memory::MemoryJournal;
use oncehook::observe::Metrics;
use tokio::net::TcpSocket;
use tokio::sync::watch;

use super::*;
use crate::config::Config;
use crate::http::gate::Gate;
use crate::http::listener::serve_ingress;

const HOST: &str = "sns.us-east-1.amazonaws.com";

/// Who sends honestly, and who does not.
const GENUINE: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 1);
const FORGER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);

/// Amazon, as far as it has one certificate. It says at once that there is no other, or never answers for others.
struct Provider {
    good: String,
    answers_for_others: bool,
    calls: AtomicUsize,
}

impl KeyFetcher for Provider {
    fn fetch<'a>(&'a self, request: &'a KeyRequest, _: &'a BTreeMap<String, String>) -> Fetching<'a, Vec<u8>> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        Box::pin(async move {
            if request.url() == self.good {
                tokio::time::sleep(Duration::from_millis(20)).await;
                return Ok(RSA[0].certificate.clone().into_bytes());
            }
            if !self.answers_for_others {
                std::future::pending::<()>().await;
            }
            Err(FetchFailed { gone: true, ..FetchFailed::new("the answer was 404 Not Found") })
        })
    }

    fn confirm<'a>(&'a self, _: &'a str) -> Fetching<'a, ()> {
        Box::pin(async { Ok(()) })
    }
}

/// A gateway with an SNS source, whose keys are fetched, and a GitHub source, whose are not.
struct Door {
    address: SocketAddr,
    provider: Arc<Provider>,
    stage: Stage,
    _end: watch::Sender<bool>,
}

const SECRET: &str = "a-github-secret";

impl Door {
    async fn open(limits: &str, answers_for_others: bool) -> Self {
        let stage = Stage::of("aws-sns", HOST, Manner::Honest).await;
        let provider =
            Arc::new(Provider { good: stage.address_of("key-1"), answers_for_others, calls: AtomicUsize::new(0) });
        let secret = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(secret.path(), SECRET).unwrap();
        let config = format!(
            "[server.limits]\n{limits}\n[[source]]\nname = \"sns\"\nprovider = \"aws-sns\"\nparams = {{ topic_arn = {:?} }}\n\
             [spool]\npath = {:?}\n[[source]]\nname = \"github\"\nprovider = \"github\"\nsecrets = [\"file:{}\"]\n",
            stage.settings.params["topic_arn"],
            stage.folder.path().join("spool.db"),
            secret.path().display()
        );
        let config = Config::parse("test", &config).unwrap();
        let journal = Arc::new(MemoryJournal::new());
        let fetcher = Arc::clone(&provider) as Arc<dyn KeyFetcher>;
        let gate = Gate::with_fetcher(config, journal, Clock::manual(NOW), Arc::new(Metrics::new()), fetcher);
        gate.set_open(true);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (end, ended) = watch::channel(false);
        tokio::spawn(serve_ingress(listener, Arc::new(gate), ended));
        Self { address, provider, stage, _end: end }
    }

    /// A message of SNS under a key of this name; genuine if that is `key-1`.
    fn message(&self, key: &str) -> Vec<u8> {
        let (_, body) = self.stage.sent(if key == "key-1" { 0 } else { 2 }, key);
        raw("sns", "", &body)
    }

    fn push(&self) -> Vec<u8> {
        let preset = Preset::named("github").unwrap();
        let signer = Signer::new(&preset.verify, &Secret::new(SECRET).unwrap()).unwrap();
        let (headers, body) = preset.sample.render("m1", None, NOW).unwrap();
        let request = Request { method: "POST", path: "/webhooks/github", headers: &headers, body: &body };
        let mut all: Vec<(String, String)> = Vec::new();
        for (name, value) in headers.iter().chain(signer.sign(&request, "m1", NOW).unwrap().iter().map(|(n, v)| (n, v)))
        {
            all.push((name.to_string(), value.to_str().unwrap().to_owned()));
        }
        let lines: String = all.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        raw("github", &lines, &body)
    }

    /// The status of the answer.
    async fn send(&self, from: Ipv4Addr, request: &[u8]) -> u16 {
        send(self.address, from, request).await
    }
}

fn raw(source: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let head = format!(
        "POST /webhooks/{source} HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\n{headers}content-length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

async fn send(to: SocketAddr, from: Ipv4Addr, request: &[u8]) -> u16 {
    answer(to, from, request).await.split(' ').nth(1).unwrap().parse().unwrap()
}

/// The whole answer, to tell what went wrong.
async fn answer(to: SocketAddr, from: Ipv4Addr, request: &[u8]) -> String {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind((from, 0).into()).unwrap();
    let mut stream = socket.connect(to).await.unwrap();
    stream.write_all(request).await.unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.unwrap();
    String::from_utf8_lossy(&answer).into_owned()
}

/// Sends so many forged messages at once, each under a key of its own.
async fn forge(door: &Door, from: Ipv4Addr, count: usize) {
    let mut flood = tokio::task::JoinSet::new();
    for number in 0..count {
        let (to, request) = (door.address, door.message(&format!("forged-{from}-{number}")));
        flood.spawn(async move { send(to, from, &request).await });
    }
    for status in flood.join_all().await {
        assert!([401, 503].contains(&status), "{status}");
    }
}

async fn genuine_accepted(door: &Door, from: Ipv4Addr, count: usize) -> usize {
    let message = door.message("key-1");
    let mut accepted = 0;
    for _ in 0..count {
        accepted += usize::from(door.send(from, &message).await == 200);
    }
    accepted
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_72_forged_key_addresses_do_not_starve_a_genuine_sender_after_a_start() {
    let door = Door::open("", true).await;
    forge(&door, FORGER, 64).await;
    assert_eq!(genuine_accepted(&door, GENUINE, 48).await, 48, "of 48 genuine messages");
}

/// Behind a balancer that the operator has not listed, everybody has one address. The genuine sender may have to send once
/// more, as it does after a 503.
#[tokio::test(flavor = "multi_thread")]
async fn fault_72_forged_key_addresses_do_not_starve_a_genuine_sender_at_the_same_address() {
    let door = Door::open("", true).await;
    forge(&door, GENUINE, 64).await;
    let started = Instant::now();
    while genuine_accepted(&door, GENUINE, 1).await == 0 {
        assert!(started.elapsed() < Duration::from_secs(8), "its key was never fetched");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(genuine_accepted(&door, GENUINE, 48).await, 48, "of 48 genuine messages");
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_72_requests_that_wait_for_a_key_do_not_block_another_source() {
    let door = Door::open("in_flight = 32", false).await;
    let push = door.push();
    assert_eq!(door.send(GENUINE, &push).await, 200);
    let flood = forge(&door, FORGER, 200);
    let beside = async {
        let mut accepted = 0;
        while door.provider.calls.load(Ordering::SeqCst) == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        // The flood waits for a provider that never answers; until the deadline it would hold every place.
        tokio::time::sleep(Duration::from_millis(300)).await;
        for _ in 0..24 {
            accepted += usize::from(door.send(GENUINE, &push).await == 200);
        }
        accepted
    };
    let ((), accepted) = tokio::join!(flood, beside);
    assert_eq!(accepted, 24, "of 24 genuine requests to the other source");
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_72_a_flood_of_forged_keys_costs_genuine_senders_nothing() {
    flood_for(5).await;
}

/// The same for a minute, with the time that answers may take. Part of `make floods`, on a machine that does nothing else.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "a benchmark of a minute: make floods"]
async fn fault_72_a_minute_of_forged_keys() {
    let slow = flood_for(60).await;
    assert!(slow < Duration::from_millis(250), "p99 {slow:?}");
}

/// A flood of forged keys for some seconds, from a few addresses, against a genuine sender of 100 messages a second to the
/// same source and one to another. The gateway has just started: it knows no key. Returns the p99 of genuine answers.
async fn flood_for(seconds: u64) -> Duration {
    let door = Arc::new(Door::open("in_flight = 64", false).await);
    // Signed once and before the start: that work must not take the machine from the gateway.
    let forged = Arc::new(String::from_utf8(door.message("forged-00000")).unwrap());
    let honest = [door.message("key-1"), door.push()];
    let end = Instant::now() + Duration::from_secs(seconds);
    let mut flood = tokio::task::JoinSet::new();
    for forger in 0..64_u8 {
        let (door, message) = (Arc::clone(&door), Arc::clone(&forged));
        flood.spawn(async move {
            let mut sent = 0_usize;
            while Instant::now() < end {
                let name = format!("forged-{:05}", usize::from(forger) * 1_000 + sent % 1_000);
                let message = message.replace("forged-00000", &name);
                let status = door.send(Ipv4Addr::new(127, 0, 1, forger % 4), message.as_bytes()).await;
                assert!([401, 503].contains(&status), "{status}");
                sent += 1;
            }
            sent
        });
    }
    let mut genuine = tokio::task::JoinSet::new();
    let mut pace = tokio::time::interval(Duration::from_millis(10));
    pace.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    for request in honest.into_iter().cycle() {
        pace.tick().await;
        if Instant::now() >= end {
            break;
        }
        let door = Arc::clone(&door);
        genuine.spawn(async move {
            let sent = Instant::now();
            (answer(door.address, GENUINE, &request).await, sent.elapsed())
        });
    }
    let answers = genuine.join_all().await;
    let refused: Vec<_> = answers.iter().filter(|(answer, _)| !answer.starts_with("HTTP/1.1 200")).collect();
    let forged: usize = flood.join_all().await.into_iter().sum();
    assert!(answers.len() >= 10 && forged >= 100, "{} genuine, {forged} forged", answers.len());
    let of = answers.len();
    assert!(refused.len() * 1_000 <= of, "{} of {of} refused beside {forged}: {:?}", refused.len(), refused.first());
    let mut took: Vec<Duration> = answers.iter().map(|(_, took)| *took).collect();
    took.sort_unstable();
    let slow = took[took.len() * 99 / 100];
    println!("forged keys: {of} genuine beside {forged} forged, {} refused, p99 {slow:?}", refused.len());
    slow
}
