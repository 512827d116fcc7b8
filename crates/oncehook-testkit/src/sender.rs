//! Requests as providers send them, and a small HTTP client that can also misbehave: it sends whatever bytes it is given.

use std::io;
use std::net::SocketAddr;

use http::HeaderMap;
use oncehook_verify::{Preset, Request, Secret, Signer, UnixMicros};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// A provider with a secret, ready to sign.
pub struct Provider {
    preset: &'static Preset,
    signer: Signer,
    path: String,
}

impl Provider {
    /// A preset that delivers to a source.
    #[must_use]
    pub fn new(preset: &str, secret: &str, source: &str) -> Self {
        let preset = Preset::named(preset).unwrap();
        let signer = Signer::new(&preset.verify, &Secret::new(secret).unwrap()).unwrap();
        Self { preset, signer, path: format!("/webhooks/{source}") }
    }

    /// The preset's sample event with this id, signed now, as bytes for the wire.
    #[must_use]
    pub fn sample(&self, id: &str, now: UnixMicros) -> Vec<u8> {
        let (headers, body) = self.preset.sample.render(id, None, now).unwrap();
        self.request(&headers, &body, id, now)
    }

    /// Any body, signed.
    #[must_use]
    pub fn request(&self, headers: &HeaderMap, body: &[u8], id: &str, now: UnixMicros) -> Vec<u8> {
        let request = Request { method: "POST", path: &self.path, headers, body };
        let signed = self.signer.sign(&request, id, now).unwrap();
        let mut all: Vec<(String, Vec<u8>)> =
            headers.iter().map(|(name, value)| (name.to_string(), value.as_bytes().to_vec())).collect();
        all.extend(signed.into_iter().map(|(name, value)| (name.to_string(), value.as_bytes().to_vec())));
        post(&self.path, &all, body)
    }
}

/// A Stripe event with this id and about so many bytes: the same bytes each time, unlike a sample, which carries the time.
#[must_use]
pub fn stripe_body(id: &str, bytes: usize) -> Vec<u8> {
    let mut body = format!(
        r#"{{"id":"{id}","object":"event","created":1700000000,"type":"payment_intent.succeeded","data":{{"object":{{"id":"pi_{id}"}}}},"padding":""#
    );
    // Not one letter over and over: a part that went missing or came twice shows.
    while body.len() + 2 < bytes {
        body.push_str(&format!("{:x}.", body.len()));
    }
    body.push_str("\"}");
    body.into_bytes()
}

/// A POST with a length.
#[must_use]
pub fn post(path: &str, headers: &[(String, Vec<u8>)], body: &[u8]) -> Vec<u8> {
    let mut request =
        format!("POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n", body.len()).into_bytes();
    for (name, value) in headers {
        request.extend_from_slice(name.as_bytes());
        request.extend_from_slice(b": ");
        request.extend_from_slice(value);
        request.extend_from_slice(b"\r\n");
    }
    request.extend_from_slice(b"\r\n");
    request.extend_from_slice(body);
    request
}

/// An answer off the wire.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// The status.
    pub status: u16,
    /// The head, as text.
    pub head: String,
    /// The body.
    pub body: Vec<u8>,
}

impl Answer {
    /// The body as JSON.
    #[must_use]
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or(serde_json::Value::Null)
    }

    /// A header's value.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| {
            let (found, value) = line.split_once(':')?;
            found.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }
}

/// One connection.
pub struct Wire {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Wire {
    /// Connects.
    pub async fn connect(address: SocketAddr) -> io::Result<Self> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, buffer: Vec::with_capacity(4096) })
    }

    /// Sends bytes as they are.
    pub async fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes).await
    }

    /// Ends the connection with a reset, as a client that crashed; dropping it says goodbye.
    pub fn reset(self) -> io::Result<()> {
        self.stream.set_zero_linger()
    }

    /// Reads one answer. The end of the connection before it is an error of kind `UnexpectedEof`.
    pub async fn answer(&mut self) -> io::Result<Answer> {
        loop {
            if let Some(end) = find(&self.buffer, b"\r\n\r\n") {
                let head = String::from_utf8_lossy(&self.buffer[..end]).into_owned();
                let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
                let mut answer = Answer { status, head, body: Vec::new() };
                let length = answer.header("content-length").and_then(|length| length.parse().ok()).unwrap_or(0);
                let whole = end + 4 + length;
                while self.buffer.len() < whole {
                    self.fill().await?;
                }
                answer.body = self.buffer[end + 4..whole].to_vec();
                self.buffer.drain(..whole);
                return Ok(answer);
            }
            self.fill().await?;
        }
    }

    /// Sends a request and reads its answer.
    pub async fn ask(&mut self, request: &[u8]) -> io::Result<Answer> {
        self.send(request).await?;
        self.answer().await
    }

    /// Whether the other side has closed the connection, waiting for it.
    pub async fn is_closed(&mut self) -> bool {
        let mut byte = [0; 1024];
        loop {
            match self.stream.read(&mut byte).await {
                Ok(0) | Err(_) => return true,
                Ok(_) => {}
            }
        }
    }

    async fn fill(&mut self) -> io::Result<()> {
        if self.stream.read_buf(&mut self.buffer).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(())
    }
}

/// One request on a connection of its own.
pub async fn ask(address: SocketAddr, request: &[u8]) -> io::Result<Answer> {
    Wire::connect(address).await?.ask(request).await
}

/// A GET on a connection of its own.
pub async fn get(address: SocketAddr, path: &str) -> io::Result<Answer> {
    ask(address, format!("GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n").as_bytes()).await
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack.windows(needle.len()).position(|window| window == needle)
}
