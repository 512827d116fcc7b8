//! Floods: what strangers without a secret can do to a gateway, while a genuine client goes on sending.
//!
//! Each [`Flood`] keeps its connections in a bad state for as long as it lasts: whatever the gateway closes comes again after a
//! pause. The genuine client sends signed events at a steady rate, every second one on a connection of its own. A
//! latency counts from the time at which a request was due.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpSocket;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::gateway::{Gateway, SECRET, now, prepare};
use crate::sender::{Provider, Wire, post};
use crate::workload::{Report, latencies};

/// How long a flood takes to rise, and then lasts before the genuine client begins.
const BEFORE: Duration = Duration::from_secs(1);

/// How long a flooder waits at least before it connects again.
const AGAIN: Duration = Duration::from_millis(500);

/// New connections a second, all flooders together. What is measured is what connections can hold, not how many of them two
/// cores can open: against that only rate limits in front of the machine help.
const OPENED_PER_SECOND: usize = 2_000;

/// How long a genuine client waits for an answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// A way to flood.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flood {
    /// Bodies of the largest size that stop one byte short, more than fit into memory.
    StoppedBodies,
    /// Bodies of 40 KiB that stop half-way, on more connections than there are places.
    HalfBodies,
    /// Requests one after the other on every place, whose answers nobody reads.
    UnreadAnswers,
    /// A request for nothing (404) on every place, again and again.
    NothingThere,
    /// A forged request (401) on every place, again and again.
    Forged,
    /// Messages that name a key which can only be asked for in vain.
    ForgedKeys,
}

impl Flood {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::StoppedBodies,
        Self::HalfBodies,
        Self::UnreadAnswers,
        Self::NothingThere,
        Self::Forged,
        Self::ForgedKeys,
    ];

    /// Its name on the command line and in tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::StoppedBodies => "stopped-bodies",
            Self::HalfBodies => "half-bodies",
            Self::UnreadAnswers => "unread-answers",
            Self::NothingThere => "nothing-there",
            Self::Forged => "forged",
            Self::ForgedKeys => "forged-keys",
        }
    }
}

/// How big a flood is. The gateway has its usual limits but for these.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// Places for connections, all of which the flood wants.
    pub connections: usize,
    /// Bytes for bodies, all of which the flood wants.
    pub memory: usize,
    /// How long the genuine client sends.
    pub time: Duration,
    /// Events of the genuine client, a second.
    pub rate: u32,
}

/// What came of a flood.
#[derive(Debug)]
pub struct Outcome {
    /// What the genuine client saw.
    pub genuine: Report,
    /// Connections that the flood has opened.
    pub opened: u64,
    /// The gateway's memory: before, at most, and soon after the flood has gone.
    pub memory: [u64; 3],
}

impl Outcome {
    /// The part of the genuine requests that was answered 2xx.
    #[must_use]
    pub fn accepted(&self) -> f64 {
        let answers: u64 = self.genuine.statuses.values().sum();
        let accepted: u64 = self.genuine.statuses.range(200..300).map(|(_, count)| count).sum();
        accepted as f64 / (answers + self.genuine.errors).max(1) as f64
    }

    /// One row of the table whose head is [`HEAD`].
    #[must_use]
    pub fn row(&self, flood: Flood) -> String {
        let mut others = String::new();
        for (status, count) in self.genuine.statuses.iter().filter(|(status, _)| **status != 200) {
            let _ = write!(others, " {status}:{count}");
        }
        if self.genuine.errors > 0 {
            let _ = write!(others, " none:{}", self.genuine.errors);
        }
        let [before, most, after] = self.memory.map(|bytes| bytes / 1_000_000);
        let (p50, p99, max) = (self.genuine.millis(0.5), self.genuine.millis(0.99), self.genuine.millis(1.0));
        let accepted = self.accepted() * 100.0;
        format!(
            "{:<15} {:>9} {accepted:>8.3} {p50:>8.1} {p99:>8.1} {max:>8.1} {before:>5} {most:>5} {after:>5} {others}",
            flood.name(),
            self.opened,
        )
    }
}

/// The head of the table of [`Outcome::row`]: times in milliseconds, memory in MB.
pub const HEAD: &str = "flood              opened    2xx %      p50      p99      max   RSS  most after  others";

/// Floods a fresh gateway while a genuine client sends.
pub async fn run(binary: &Path, flood: Flood, plan: Plan) -> Outcome {
    let directory = TempDir::new().unwrap();
    prepare(directory.path(), &config(plan));
    let gateway = Gateway::start(binary, directory.path());
    let before = gateway.memory("VmRSS");
    let opened = Arc::new(AtomicU64::new(0));
    let mut flooders = JoinSet::new();
    let pause = Duration::from_secs_f64(connections(flood, plan) as f64 / OPENED_PER_SECOND as f64);
    for number in 0..connections(flood, plan) {
        let (address, opened) = (gateway.ingress, Arc::clone(&opened));
        flooders.spawn(async move {
            // Not all in the same moment.
            tokio::time::sleep(BEFORE.max(pause).mul_f64(number as f64 / connections(flood, plan) as f64)).await;
            loop {
                opened.fetch_add(1, Ordering::Relaxed);
                // The gateway has closed it, or refused it. That is what it should do.
                let _ = flood_once(flood, address, number as u64).await;
                tokio::time::sleep(AGAIN.max(pause)).await;
            }
        });
    }
    tokio::time::sleep(2 * BEFORE.max(pause)).await;
    let genuine = send_genuine(gateway.ingress, plan).await;
    let most = gateway.memory("VmHWM");
    flooders.shutdown().await;
    let after = settled_memory(&gateway, before + (32 << 20)).await;
    let opened = opened.load(Ordering::Relaxed);
    Outcome { genuine, opened, memory: [before, most, after] }
}

/// The memory of a gateway once it is below a limit, or after 15 seconds.
pub async fn settled_memory(gateway: &Gateway, limit: u64) -> u64 {
    let deadline = Instant::now() + Duration::from_secs(15);
    loop {
        let memory = gateway.memory("VmRSS");
        if memory <= limit || Instant::now() > deadline {
            return memory;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

fn config(plan: Plan) -> String {
    format!(
        r#"
[server]
ingress = "127.0.0.1:0"
admin = "127.0.0.1:0"
[server.limits]
connections = {}
in_flight_bytes = {}
[journal]
url = "sqlite://journal.db"
[[source]]
name = "stripe"
provider = "stripe"
secrets = ["file:stripe.secret"]
[[source]]
name = "sns"
provider = "aws-sns"
params = {{ topic_arn = "arn:aws:sns:us-east-1:123456789012:MyTopic" }}
"#,
        plan.connections, plan.memory
    )
}

/// How many connections a flood holds.
fn connections(flood: Flood, plan: Plan) -> usize {
    match flood {
        Flood::StoppedBodies => plan.memory / (1 << 20) * 5 / 4,
        Flood::HalfBodies | Flood::UnreadAnswers | Flood::NothingThere | Flood::Forged => plan.connections,
        // They need no place for long; what they want is the gateway's time for calls.
        Flood::ForgedKeys => plan.connections / 2,
    }
}

/// One connection of a flood, until the gateway ends it.
async fn flood_once(flood: Flood, address: SocketAddr, number: u64) -> io::Result<()> {
    const LARGEST: usize = 1 << 20;
    let forged = |body: usize| post("/webhooks/stripe", &[], &vec![b'x'; body]);
    if flood == Flood::UnreadAnswers {
        return write_only(address, &forged(10).repeat(100)).await;
    }
    let mut wire = Wire::connect(address).await?;
    match flood {
        Flood::StoppedBodies => {
            let request = forged(LARGEST);
            wire.send(&request[..request.len() - 1]).await?;
            wire.is_closed().await;
        }
        Flood::HalfBodies => {
            let request = forged(40 << 10);
            wire.send(&request[..request.len() - (20 << 10)]).await?;
            wire.is_closed().await;
        }
        Flood::NothingThere => {
            let request = b"GET /nothing HTTP/1.1\r\nhost: localhost\r\n\r\n";
            loop {
                wire.ask(request).await?;
                tokio::time::sleep(Duration::from_secs(2)).await;
            }
        }
        Flood::Forged => {
            let request = forged(100);
            loop {
                wire.ask(&request).await?;
                tokio::time::sleep(Duration::from_secs(2)).await;
            }
        }
        Flood::UnreadAnswers | Flood::ForgedKeys => {
            for round in 0_u64.. {
                wire.ask(&forged_key(number * 1_000_000 + round)).await?;
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
    Ok(())
}

/// Sends requests and reads nothing, until the gateway closes the connection.
async fn write_only(address: SocketAddr, requests: &[u8]) -> io::Result<()> {
    let socket = TcpSocket::new_v4()?;
    // The less room for answers here, the sooner the gateway is stuck. Requests that it does not read need no room: on one
    // machine it would come out of the memory that the system has for all connections.
    socket.set_recv_buffer_size(4 << 10)?;
    socket.set_send_buffer_size(16 << 10)?;
    let mut stream = socket.connect(address).await?;
    loop {
        stream.write_all(requests).await?;
    }
}

/// A message that names a certificate which was never seen before.
#[must_use]
pub fn forged_key(number: u64) -> Vec<u8> {
    let body = serde_json::json!({
        "Type": "Notification",
        "MessageId": number.to_string(),
        "TopicArn": "arn:aws:sns:us-east-1:123456789012:MyTopic",
        "Message": "forged",
        "Timestamp": now().to_rfc3339(),
        "SignatureVersion": "2",
        "Signature": "AAAA",
        "SigningCertURL": format!("https://sns.us-east-1.amazonaws.com/SimpleNotificationService-{number}.pem"),
    });
    post("/webhooks/sns", &[], body.to_string().as_bytes())
}

/// Sends at a steady rate, whatever becomes of the requests before.
async fn send_genuine(address: SocketAddr, plan: Plan) -> Report {
    let provider = Arc::new(Provider::new("stripe", SECRET, "stripe"));
    let kept: Arc<Mutex<Vec<Wire>>> = Arc::default();
    let (answered, mut answers) = mpsc::unbounded_channel();
    let start = Instant::now();
    let step = Duration::from_secs(1) / plan.rate;
    let count = (plan.time.as_secs_f64() * f64::from(plan.rate)) as u32;
    for number in 0..count {
        let due = start + step * number;
        tokio::time::sleep_until(due.into()).await;
        let (provider, kept, answered) = (Arc::clone(&provider), Arc::clone(&kept), answered.clone());
        tokio::spawn(async move {
            let asking = async {
                let request = provider.sample(&format!("evt_{number}"), now());
                if number % 2 == 0 {
                    return Wire::connect(address).await?.ask(&request).await;
                }
                let free = kept.lock().unwrap().pop();
                let mut wire = match free {
                    Some(wire) => wire,
                    None => Wire::connect(address).await?,
                };
                let answer = wire.ask(&request).await?;
                if answer.header("connection") != Some("close") {
                    kept.lock().unwrap().push(wire);
                }
                Ok(answer)
            };
            let answer = tokio::time::timeout(PATIENCE, asking).await;
            let status = answer.ok().and_then(Result::ok).map(|answer| answer.status);
            // The receiver is there until all have answered.
            let _ = answered.send((status, due.elapsed()));
        });
    }
    drop(answered);
    let mut report = Report { statuses: BTreeMap::new(), errors: 0, latency: latencies(), elapsed: Duration::ZERO };
    while let Some((status, took)) = answers.recv().await {
        report.latency.saturating_record(took.as_micros() as u64);
        match status {
            Some(status) => *report.statuses.entry(status).or_default() += 1,
            None => report.errors += 1,
        }
    }
    report.elapsed = start.elapsed();
    report
}
