//! What the tests of the front door share: a gateway with many sources, requests that are signed but otherwise made by
//! hand, and a client that reads an answer even if the other side has stopped listening.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use http::{HeaderMap, HeaderName, HeaderValue};
use oncehook_testkit::gateway::{Gateway, now};
use oncehook_testkit::promises::{Senders, assert_is_unavailable};
use oncehook_testkit::sender::{Answer, Wire, ask};
use oncehook_verify::{Preset, Request, Scheme, Secret, Signer, UnixMicros};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// The binary under test.
pub(crate) const BINARY: &str = env!("CARGO_BIN_EXE_oncehook");

/// No test waits longer for one thing.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// Headers as they go over the wire.
pub(crate) type Headers = Vec<(String, Vec<u8>)>;

/// A directory with a configuration and its secrets.
pub(crate) fn directory(config: &str, secrets: &[(&str, &str)]) -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("oncehook.toml"), config).unwrap();
    for (file, secret) in secrets {
        std::fs::write(directory.path().join(file), secret).unwrap();
    }
    directory
}

/// A running gateway in a directory of its own. The directory goes when it is dropped.
pub(crate) struct Rig {
    pub(crate) gateway: Gateway,
    pub(crate) directory: TempDir,
}

impl Rig {
    /// Starts a gateway. `server` is what stands under `[server]` beside the addresses.
    pub(crate) fn start(server: &str, sources: &str, secrets: &[(&str, &str)]) -> Self {
        Self::start_with(server, sources, secrets, &[])
    }

    /// The same with variables in its environment.
    pub(crate) fn start_with(
        server: &str,
        sources: &str,
        secrets: &[(&str, &str)],
        environment: &[(&str, &str)],
    ) -> Self {
        let config = format!(
            "[server]\ningress = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\n{server}\n[journal]\nurl = \"sqlite://journal.db\"\n{sources}"
        );
        let directory = directory(&config, secrets);
        let mut command = Command::new(BINARY);
        command.arg("serve").envs(environment.iter().copied());
        let gateway = Gateway::start_command(command, directory.path());
        Self { gateway, directory }
    }

    /// Sends bytes on a connection of their own and reads one answer.
    pub(crate) async fn send(&self, request: &[u8]) -> Answer {
        soon(ask(self.gateway.ingress, request)).await.unwrap()
    }

    /// Sends a request that must be answered 200 and gives `(status, event)` of the answer.
    pub(crate) async fn deliver(&self, request: &[u8]) -> (String, String) {
        let answer = self.send(request).await;
        assert_eq!(answer.status, 200, "{}", String::from_utf8_lossy(&answer.body));
        let json = answer.json();
        (text(&json["status"]), text(&json["event"]))
    }

    /// Sends a request and checks status and error code of the answer, and that it is an error as promised.
    pub(crate) async fn refused(&self, request: &[u8], status: u16, code: &str) -> Answer {
        let answer = self.send(request).await;
        check_error(&answer, status, code);
        answer
    }

    pub(crate) async fn connect(&self) -> Wire {
        soon(Wire::connect(self.gateway.ingress)).await.unwrap()
    }

    /// How many events are stored.
    pub(crate) async fn stored(&self) -> u64 {
        self.gateway.json("/api/stats").await["events"].as_u64().unwrap()
    }

    /// Everything that is known about an event.
    pub(crate) async fn show(&self, event: &str) -> serde_json::Value {
        self.gateway.json(&format!("/api/events/{event}")).await
    }

    /// The stored body of an event.
    pub(crate) async fn body(&self, event: &str) -> Vec<u8> {
        let answer = self.gateway.get(&format!("/api/events/{event}/body")).await;
        assert_eq!(answer.status, 200);
        answer.body
    }

    pub(crate) fn journal(&self) -> std::path::PathBuf {
        self.directory.path().join("journal.db")
    }
}

/// Errors are `{"error":{"code","message"}}` and nothing else.
#[track_caller]
pub(crate) fn check_error(answer: &Answer, status: u16, code: &str) {
    let json = answer.json();
    let said = String::from_utf8_lossy(&answer.body);
    assert_eq!(answer.status, status, "{said}");
    assert_eq!(json["error"]["code"], code, "{said}");
    assert!(json["error"]["message"].as_str().is_some_and(|message| !message.is_empty()), "{said}");
    assert_eq!(json.as_object().unwrap().len(), 1, "{said}");
    assert_eq!(json["error"].as_object().unwrap().len(), 2, "{said}");
    assert_eq!(answer.header("content-type"), Some("application/json"));
    if status == 503 {
        assert!(answer.header("retry-after").is_some(), "{}", answer.head);
    }
}

/// Signs for one source; everything else about a request is the test's business.
pub(crate) struct Signs {
    signer: Signer,
    pub(crate) path: String,
}

impl Signs {
    pub(crate) fn preset(preset: &str, secret: &str, source: &str) -> Self {
        Self::scheme(&Preset::named(preset).unwrap().verify, secret, source)
    }

    pub(crate) fn scheme(scheme: &Scheme, secret: &str, source: &str) -> Self {
        let signer = Signer::new(scheme, &Secret::new(secret).unwrap()).unwrap();
        Self { signer, path: format!("/webhooks/{source}") }
    }

    /// All headers of a genuine request: the given ones and the signature's.
    pub(crate) fn headers(&self, given: &[(&str, &str)], body: &[u8], id: &str, at: UnixMicros) -> Headers {
        let mut map = HeaderMap::new();
        for (name, value) in given {
            map.append(HeaderName::try_from(*name).unwrap(), HeaderValue::try_from(*value).unwrap());
        }
        let request = Request { method: "POST", path: &self.path, headers: &map, body };
        let mut all: Headers =
            given.iter().map(|(name, value)| ((*name).to_owned(), value.as_bytes().to_vec())).collect();
        for (name, value) in self.signer.sign(&request, id, at).unwrap() {
            all.push((name.to_string(), value.as_bytes().to_vec()));
        }
        all
    }

    /// A genuine POST, signed now.
    pub(crate) fn post(&self, given: &[(&str, &str)], body: &[u8]) -> Vec<u8> {
        self.post_at(given, body, "msg_1", now())
    }

    pub(crate) fn post_at(&self, given: &[(&str, &str)], body: &[u8], id: &str, at: UnixMicros) -> Vec<u8> {
        raw(&self.path, &self.headers(given, body, id, at), body)
    }

    /// A genuine POST that is sent in chunks of a size.
    pub(crate) fn chunked(&self, given: &[(&str, &str)], body: &[u8], size: usize) -> Vec<u8> {
        let mut request = format!("POST {} HTTP/1.1\r\nhost: localhost\r\n", self.path).into_bytes();
        write_headers(&mut request, &self.headers(given, body, "msg_1", now()));
        request.extend_from_slice(b"transfer-encoding: chunked\r\n\r\n");
        request.extend_from_slice(&chunks(body, size));
        request
    }
}

/// A POST with a length, and headers as they are.
pub(crate) fn raw(path: &str, headers: &Headers, body: &[u8]) -> Vec<u8> {
    oncehook_testkit::sender::post(path, headers, body)
}

pub(crate) fn write_headers(request: &mut Vec<u8>, headers: &Headers) {
    for (name, value) in headers {
        request.extend_from_slice(name.as_bytes());
        request.extend_from_slice(b": ");
        request.extend_from_slice(value);
        request.extend_from_slice(b"\r\n");
    }
}

/// A body in chunks, with the last one.
pub(crate) fn chunks(body: &[u8], size: usize) -> Vec<u8> {
    let mut chunked = Vec::new();
    for chunk in body.chunks(size) {
        chunked.extend_from_slice(format!("{:x}\r\n", chunk.len()).as_bytes());
        chunked.extend_from_slice(chunk);
        chunked.extend_from_slice(b"\r\n");
    }
    chunked.extend_from_slice(b"0\r\n\r\n");
    chunked
}

/// The headers with one replaced (or added).
pub(crate) fn with(headers: &Headers, name: &str, value: impl AsRef<[u8]>) -> Headers {
    let mut changed = without(headers, name);
    changed.push((name.to_owned(), value.as_ref().to_vec()));
    changed
}

/// The headers without one.
pub(crate) fn without(headers: &Headers, name: &str) -> Headers {
    headers.iter().filter(|(found, _)| !found.eq_ignore_ascii_case(name)).cloned().collect()
}

/// The text of one header.
pub(crate) fn value(headers: &Headers, name: &str) -> String {
    let (_, value) = headers.iter().find(|(found, _)| found.eq_ignore_ascii_case(name)).unwrap();
    String::from_utf8(value.clone()).unwrap()
}

/// Everything that comes back until the other side closes. Sending goes on beside reading and may fail: a server that
/// has seen enough stops reading. `None` if the connection stays open.
pub(crate) async fn exchange(address: std::net::SocketAddr, request: &[u8]) -> Option<Vec<u8>> {
    let (mut reading, mut writing) = TcpStream::connect(address).await.unwrap().into_split();
    let request = request.to_vec();
    let sending = tokio::spawn(async move {
        let _ = writing.write_all(&request).await;
        writing
    });
    let mut received = Vec::new();
    let read = async {
        let mut buffer = [0; 4096];
        loop {
            match reading.read(&mut buffer).await {
                Ok(0) | Err(_) => break,
                Ok(count) => received.extend_from_slice(buffer.get(..count).unwrap()),
            }
        }
    };
    let ended = tokio::time::timeout(Duration::from_secs(5), read).await.is_ok();
    sending.abort();
    ended.then_some(received)
}

/// The statuses of all answers in a stretch of bytes.
pub(crate) fn statuses(received: &[u8]) -> Vec<u16> {
    let text = String::from_utf8_lossy(received);
    text.split("HTTP/1.").skip(1).map(|answer| answer.get(2..5).unwrap().parse().unwrap()).collect()
}

/// Waits for something that has to happen soon.
#[track_caller]
pub(crate) fn soon<F: Future>(future: F) -> impl Future<Output = F::Output> {
    let place = std::panic::Location::caller();
    async move {
        match tokio::time::timeout(PATIENCE, future).await {
            Ok(output) => output,
            Err(_) => panic!("nothing happened within {PATIENCE:?} at {place}"),
        }
    }
}

pub(crate) fn text(value: &serde_json::Value) -> String {
    value.as_str().unwrap_or_else(|| panic!("{value} is not a text")).to_owned()
}

/// Runs the binary to its end in a directory: exit code, stdout, stderr.
pub(crate) fn run(directory: &Path, arguments: &[&str]) -> (i32, String, String) {
    // A command that should have ended and did not is a failure with exit code 124, not a test that hangs.
    let output = Command::new("timeout")
        .args(["60", BINARY])
        .args(arguments)
        .current_dir(directory)
        .stdin(std::process::Stdio::null())
        .output()
        .unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

/// Sends events that the journal cannot store for as long as is said. Once they were refused for some seconds, `/readyz` must
/// say 503 whenever it is asked, with a reason, until the caller lets the journal go on.
pub(crate) async fn not_ready_while_nothing_is_stored(gateway: &Gateway, senders: &Senders, hold: Duration) {
    let begun = Instant::now();
    let sending = async {
        for number in 0.. {
            if begun.elapsed() >= hold {
                return;
            }
            let request = senders.request(&format!("evt_{}", 9_000 + number));
            assert_is_unavailable(&ask(gateway.ingress, &request).await.unwrap());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let watching = async {
        let (mut red, mut green) = (0, Vec::new());
        while begun.elapsed() < hold {
            let ready = gateway.get("/readyz").await;
            let after = begun.elapsed();
            if after > Duration::from_secs(6) {
                match ready.status {
                    503 => red += usize::from(ready.json()["failing"].is_string()),
                    _ => green.push((after, ready.json())),
                }
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        assert!(green.is_empty(), "ready {} times while nobody could store, first {:?}", green.len(), green[0]);
        assert!(red > 0, "it never says what is failing:\n{}", gateway.log());
    };
    tokio::join!(sending, watching);
}

/// The same while `lock` holds a lock on the database, for 16 seconds.
pub(crate) fn not_ready_while_locked(
    gateway: &Gateway,
    senders: &Senders,
    lock: impl FnOnce() + Send,
    is_locked: impl Fn() -> bool,
) {
    std::thread::scope(|scope| {
        let holding = scope.spawn(lock);
        while !is_locked() {
            std::thread::sleep(Duration::from_millis(10));
        }
        let seen = not_ready_while_nothing_is_stored(gateway, senders, Duration::from_secs(11));
        tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(seen));
        holding.join().unwrap();
    });
}
