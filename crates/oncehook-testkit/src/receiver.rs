//! A destination that the test controls: it records what arrives and answers as it is told, well or badly.
//!
//! Promises: every connection and every complete request is counted before it is answered, so a count of zero means
//! that nobody came. It speaks enough HTTP/1.1 for our own client; it is no server for anything else.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// A request that has arrived completely.
#[derive(Debug, Clone)]
pub struct Arrived {
    /// `POST /mail HTTP/1.1`.
    pub line: String,
    /// Names in lower case.
    pub headers: Vec<(String, String)>,
    /// The body.
    pub body: Vec<u8>,
    /// Which connection it came over, from 0.
    pub connection: usize,
}

impl Arrived {
    /// The value of a header that is there once.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        let mut values = self.headers.iter().filter(|(other, _)| other == name).map(|(_, value)| value.as_str());
        let first = values.next();
        assert!(values.next().is_none(), "`{name}` came twice");
        first
    }
}

/// How a request is answered.
#[derive(Debug, Clone)]
pub enum Reply {
    /// A proper answer; the connection stays open.
    Answer {
        /// The status.
        status: u16,
        /// Further headers.
        headers: Vec<(&'static str, String)>,
        /// The body.
        body: Vec<u8>,
    },
    /// These bytes, and the connection is closed.
    Raw(Vec<u8>),
    /// These bytes, and then nothing while the other side waits.
    Stall(Vec<u8>),
    /// These bytes, and then more bytes for as long as the other side reads.
    Endless(Vec<u8>),
    /// The connection is reset.
    Reset,
    /// Nothing until the gate opens, and then this.
    Held(watch::Receiver<bool>, Box<Reply>),
}

impl Reply {
    /// An answer with a body.
    #[must_use]
    pub fn status(status: u16, body: impl Into<Vec<u8>>) -> Self {
        Self::Answer { status, headers: Vec::new(), body: body.into() }
    }

    /// The same with one more header.
    #[must_use]
    pub fn with(mut self, name: &'static str, value: impl Into<String>) -> Self {
        if let Self::Answer { headers, .. } = &mut self {
            headers.push((name, value.into()));
        }
        self
    }

    /// The same, so much later. For scripts: needs a runtime.
    #[must_use]
    pub fn after(self, wait: std::time::Duration) -> Self {
        let (open, gate) = watch::channel(false);
        tokio::spawn(async move {
            tokio::time::sleep(wait).await;
            // Nobody waits for it if the other side has gone.
            let _ = open.send(true);
        });
        Self::Held(gate, Box::new(self))
    }
}

type Script = dyn Fn(usize, &Arrived) -> Reply + Send + Sync;

/// A listening destination. It stops when dropped.
pub struct Receiver {
    address: SocketAddr,
    seen: Arc<Seen>,
    task: JoinHandle<()>,
}

#[derive(Default)]
struct Seen {
    connections: AtomicUsize,
    requests: Mutex<Vec<Arrived>>,
}

impl Seen {
    fn requests(&self) -> MutexGuard<'_, Vec<Arrived>> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Receiver {
    /// Listens on a free port of 127.0.0.1. The script is given the number of the request, from 0.
    pub async fn start(script: impl Fn(usize, &Arrived) -> Reply + Send + Sync + 'static) -> Self {
        Self::start_at(SocketAddr::new(IpAddr::from([127, 0, 0, 1]), 0), script).await
    }

    /// The same at an address.
    pub async fn start_at(
        address: SocketAddr,
        script: impl Fn(usize, &Arrived) -> Reply + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind(address).await.expect("a free port");
        let address = listener.local_addr().expect("an address");
        let seen = Arc::new(Seen::default());
        let script: Arc<Script> = Arc::new(script);
        let task = tokio::spawn(accept(listener, Arc::clone(&seen), script));
        Self { address, seen, task }
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// A URL of it.
    #[must_use]
    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// Connections so far.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.seen.connections.load(Ordering::SeqCst)
    }

    /// How many requests have arrived.
    #[must_use]
    pub fn count(&self) -> usize {
        self.seen.requests().len()
    }

    /// Complete requests so far.
    #[must_use]
    pub fn requests(&self) -> Vec<Arrived> {
        self.seen.requests().clone()
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn accept(listener: TcpListener, seen: Arc<Seen>, script: Arc<Script>) {
    let mut serving = tokio::task::JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        let connection = seen.connections.fetch_add(1, Ordering::SeqCst);
        serving.spawn(serve(stream, connection, Arc::clone(&seen), Arc::clone(&script)));
        while serving.try_join_next().is_some() {}
    }
}

/// Answers request after request. Whatever goes wrong ends the connection: the other side is the one under test.
async fn serve(mut stream: TcpStream, connection: usize, seen: Arc<Seen>, script: Arc<Script>) {
    let mut buffer = Vec::new();
    while let Some(arrived) = read_request(&mut stream, &mut buffer, connection).await {
        let number = {
            let mut requests = seen.requests();
            requests.push(arrived.clone());
            requests.len() - 1
        };
        let mut reply = script(number, &arrived);
        while let Reply::Held(mut gate, then) = reply {
            // A gate that nobody can open any more is open, or belongs to a test that is over.
            if gate.wait_for(|open| *open).await.is_err() {
                return;
            }
            reply = *then;
        }
        let (bytes, then) = match reply {
            Reply::Answer { status, headers, body } => (proper(status, &headers, &body), Then::Next),
            Reply::Raw(bytes) => (bytes, Then::Close),
            Reply::Stall(bytes) => (bytes, Then::Wait),
            Reply::Endless(bytes) => (bytes, Then::Pour),
            Reply::Reset => {
                let _ = stream.set_zero_linger();
                return;
            }
            Reply::Held(..) => return,
        };
        if stream.write_all(&bytes).await.is_err() {
            return;
        }
        match then {
            Then::Next => {}
            Then::Close => return,
            Then::Wait => {
                let _ = stream.read(&mut [0; 1]).await;
                return;
            }
            Then::Pour => while stream.write_all(&[b'x'; 8_192]).await.is_ok() {},
        }
    }
}

enum Then {
    Next,
    Close,
    Wait,
    Pour,
}

fn proper(status: u16, headers: &[(&'static str, String)], body: &[u8]) -> Vec<u8> {
    let mut bytes = format!("HTTP/1.1 {status} As Told\r\ncontent-length: {}\r\n", body.len()).into_bytes();
    for (name, value) in headers {
        bytes.extend_from_slice(format!("{name}: {value}\r\n").as_bytes());
    }
    bytes.extend_from_slice(b"\r\n");
    bytes.extend_from_slice(body);
    bytes
}

/// The next request, or nothing when the other side is done or speaks nonsense.
async fn read_request(stream: &mut TcpStream, buffer: &mut Vec<u8>, connection: usize) -> Option<Arrived> {
    let head_end = loop {
        if let Some(at) = buffer.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
            break at;
        }
        read_more(stream, buffer).await?;
    };
    let head = String::from_utf8_lossy(&buffer[..head_end]).into_owned();
    let mut lines = head.split("\r\n");
    let line = lines.next()?.to_owned();
    let headers: Vec<(String, String)> = lines
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
        .collect();
    let length = headers.iter().find(|(name, _)| name == "content-length");
    let length: usize = length.map_or(Some(0), |(_, value)| value.parse().ok())?;
    let end = head_end + 4 + length;
    while buffer.len() < end {
        read_more(stream, buffer).await?;
    }
    let body = buffer[head_end + 4..end].to_vec();
    buffer.drain(..end);
    Some(Arrived { line, headers, body, connection })
}

async fn read_more(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> Option<()> {
    let read = stream.read_buf(buffer).await.ok()?;
    (read > 0).then_some(())
}
