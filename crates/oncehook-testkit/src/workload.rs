//! Load: many connections, requests prepared beforehand, latencies in a histogram.
//!
//! Two ways to send. *Closed*: each connection sends its next request when the last was answered; this finds the highest
//! rate. *Open*: requests are due at fixed times whether or not earlier ones were answered, and a latency counts from the
//! time a request was due, so a stall is not hidden by sending less (coordinated omission).

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// How requests are sent.
#[derive(Debug, Clone, Copy)]
pub enum Pace {
    /// As fast as answers come.
    Closed,
    /// So many per second.
    Open(f64),
}

/// What came of it.
#[derive(Debug)]
pub struct Report {
    /// Answers by status.
    pub statuses: BTreeMap<u16, u64>,
    /// Requests without an answer.
    pub errors: u64,
    /// From sending (closed) or being due (open) to the answer, in microseconds.
    pub latency: Histogram<u64>,
    /// How long it took.
    pub elapsed: Duration,
}

impl Report {
    /// Answers of 200 per second.
    #[must_use]
    pub fn rate(&self) -> f64 {
        self.statuses.get(&200).copied().unwrap_or(0) as f64 / self.elapsed.as_secs_f64()
    }

    /// A quantile in milliseconds.
    #[must_use]
    pub fn millis(&self, quantile: f64) -> f64 {
        self.latency.value_at_quantile(quantile) as f64 / 1_000.0
    }
}

/// Nothing yet, in the shape of a report's latencies.
#[must_use]
pub fn latencies() -> Histogram<u64> {
    Histogram::new_with_bounds(1, 120_000_000, 3).unwrap()
}

/// Sends the requests in turn over `connections` until the time is up or none is left; with `again`, from the start.
///
/// The time runs from when all are connected. Connecting is no part of an acknowledgement, and 256 connections at once
/// held up the first requests by some 100 ms: enough to decide a p99.
pub async fn run(
    address: SocketAddr,
    connections: usize,
    requests: Arc<Vec<Vec<u8>>>,
    again: bool,
    pace: Pace,
    time: Duration,
) -> Report {
    run_over(&[address], connections, requests, again, pace, time).await
}

/// The same over several doors, to each of which as many connections lead.
pub async fn run_over(
    doors: &[SocketAddr],
    connections: usize,
    requests: Arc<Vec<Vec<u8>>>,
    again: bool,
    pace: Pace,
    time: Duration,
) -> Report {
    let next = Arc::new(AtomicUsize::new(0));
    let mut ready = Vec::new();
    for &address in doors.iter().cycle().take(connections) {
        ready.push((address, connect(address).await));
    }
    let start = Instant::now() + Duration::from_millis(50);
    let mut tasks = Vec::new();
    for (address, stream) in ready {
        let sender = Sender {
            stream,
            address,
            requests: Arc::clone(&requests),
            again,
            pace,
            next: Arc::clone(&next),
            start,
            time,
        };
        tasks.push(tokio::spawn(sender.run()));
    }
    let mut report = Report { statuses: BTreeMap::new(), errors: 0, latency: latencies(), elapsed: Duration::ZERO };
    for task in tasks {
        let sent = task.await.unwrap();
        for (status, micros) in sent.answers {
            *report.statuses.entry(status).or_default() += 1;
            report.latency.saturating_record(micros.into());
        }
        report.errors += sent.errors;
        report.elapsed = report.elapsed.max(sent.elapsed);
    }
    report
}

/// What one connection has seen: a status and the microseconds of each answer. Counted when all is over: a histogram for each of a
/// thousand connections is so large that recording would cost a page of fresh memory nearly every time.
#[derive(Default)]
struct Sent {
    answers: Vec<(u16, u32)>,
    errors: u64,
    elapsed: Duration,
}

async fn connect(address: SocketAddr) -> Option<TcpStream> {
    let connected = TcpStream::connect(address).await;
    connected.ok().inspect(|stream| stream.set_nodelay(true).unwrap_or(()))
}

struct Sender {
    stream: Option<TcpStream>,
    address: SocketAddr,
    requests: Arc<Vec<Vec<u8>>>,
    again: bool,
    pace: Pace,
    next: Arc<AtomicUsize>,
    start: Instant,
    time: Duration,
}

impl Sender {
    async fn run(self) -> Sent {
        let (mut sent, mut stream) = (Sent::default(), self.stream);
        let mut buffer = Vec::with_capacity(4_096);
        tokio::time::sleep_until(self.start.into()).await;
        loop {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            if number >= self.requests.len() && !self.again {
                break;
            }
            let request = &self.requests[number % self.requests.len()];
            let due = match self.pace {
                Pace::Closed => Instant::now(),
                Pace::Open(rate) => {
                    let due = self.start + Duration::from_secs_f64(number as f64 / rate);
                    if due > Instant::now() {
                        tokio::time::sleep_until(due.into()).await;
                    }
                    due
                }
            };
            if due.duration_since(self.start) >= self.time {
                break;
            }
            if stream.is_none() {
                stream = connect(self.address).await;
            }
            let status = match &mut stream {
                Some(stream) => exchange(stream, request, &mut buffer).await,
                None => None,
            };
            match status {
                Some(status) => {
                    let micros = u32::try_from(due.elapsed().as_micros()).unwrap_or(u32::MAX);
                    sent.answers.push((status, micros));
                }
                None => {
                    sent.errors += 1;
                    stream = None;
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            }
        }
        sent.elapsed = self.start.elapsed();
        sent
    }
}

/// Sends a request and reads the answer's status; the body is read and dropped.
async fn exchange(stream: &mut TcpStream, request: &[u8], buffer: &mut Vec<u8>) -> Option<u16> {
    stream.write_all(request).await.ok()?;
    buffer.clear();
    let (head, length) = loop {
        if stream.read_buf(buffer).await.ok()? == 0 {
            return None;
        }
        if let Some(end) = buffer.windows(4).position(|window| window == b"\r\n\r\n") {
            break (end + 4, content_length(&buffer[..end]));
        }
    };
    while buffer.len() < head + length {
        if stream.read_buf(buffer).await.ok()? == 0 {
            return None;
        }
    }
    std::str::from_utf8(buffer.get(9..12)?).ok()?.parse().ok()
}

fn content_length(head: &[u8]) -> usize {
    let name = b"content-length: ";
    let at = head.windows(name.len()).position(|window| window.eq_ignore_ascii_case(name));
    let digits = at.map_or(&[][..], |at| &head[at + name.len()..]);
    digits.iter().take_while(|byte| byte.is_ascii_digit()).fold(0, |sum, digit| sum * 10 + usize::from(digit - b'0'))
}
