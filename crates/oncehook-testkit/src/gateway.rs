//! The real binary, on free ports, with its own directory: to start, ask, kill and start again.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use oncehook::clock::Clock;
use oncehook_verify::UnixMicros;
use serde_json::Value;

use crate::leash;
use crate::sender::{Answer, ask, get, post};

/// The secret of the `stripe` source in [`CONFIG`].
pub const SECRET: &str = "whsec_test_secret_of_the_gateway";

/// A configuration with one Stripe source, on free ports, journal in the working directory.
pub const CONFIG: &str = r#"
[server]
ingress = "127.0.0.1:0"
admin = "127.0.0.1:0"

[journal]
url = "sqlite://journal.db"

[[source]]
name = "stripe"
provider = "stripe"
secrets = ["file:stripe.secret"]
"#;

/// A running gateway. Dropping it kills it.
pub struct Gateway {
    child: Child,
    log: Arc<Mutex<Vec<String>>>,
    /// Where webhooks go.
    pub ingress: SocketAddr,
    /// Where the API is.
    pub admin: SocketAddr,
}

/// Writes a configuration and its secret into a directory.
pub fn prepare(directory: &Path, config: &str) {
    std::fs::write(directory.join("oncehook.toml"), config).unwrap();
    std::fs::write(directory.join("stripe.secret"), SECRET).unwrap();
}

/// The time now.
#[must_use]
pub fn now() -> UnixMicros {
    Clock::system().now()
}

impl Gateway {
    /// Starts `binary serve` in a prepared directory and waits until it is ready.
    #[must_use]
    pub fn start(binary: &Path, directory: &Path) -> Self {
        let mut command = Command::new(binary);
        command.arg("serve");
        Self::start_command(command, directory)
    }

    /// Starts a command that behaves like `serve`.
    #[must_use]
    pub fn start_command(command: Command, directory: &Path) -> Self {
        match Self::try_start(command, directory) {
            Ok(gateway) => gateway,
            Err(log) => panic!("the gateway did not start:\n{log}"),
        }
    }

    /// Starts a command; an exit before it is ready gives its log as the error.
    pub fn try_start(mut command: Command, directory: &Path) -> Result<Self, String> {
        command.current_dir(directory).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        leash::hold(child.id());
        let log = Arc::new(Mutex::new(Vec::new()));
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let sink = Arc::clone(&log);
        let mut reading = Some(std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                sink.lock().unwrap().push(line);
            }
        }));
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let ended = child.try_wait().unwrap().is_some();
            // One that ended was perhaps ready before: all that it said counts.
            if let Some(reading) = reading.take_if(|_| ended) {
                reading.join().unwrap();
            }
            let text = log.lock().unwrap().join("\n");
            // One that accepts nothing says so, and has no address for it.
            let welcomed = text.contains("Send a signed webhook") || text.contains("  roles ");
            if let Some(admin) = address(&text, "admin").filter(|_| welcomed) {
                let ingress = address(&text, "webhooks").unwrap_or_else(|| ([0, 0, 0, 0], 0).into());
                return Ok(Self { child, log, ingress, admin });
            }
            if ended || Instant::now() > deadline {
                let _ = child.kill();
                let _ = child.wait();
                leash::release(child.id());
                return Err(text);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Ends it as a power switch would, as far as the process is concerned.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        self.child.wait().unwrap();
        leash::release(self.pid());
    }

    /// Asks it to stop and waits.
    pub fn stop(&mut self) -> ExitStatus {
        self.signal("TERM");
        self.wait(Duration::from_secs(30))
    }

    /// Sends a signal by its name, such as `TERM`.
    pub fn signal(&self, name: &str) {
        let (option, pid) = (format!("-{name}"), self.pid().to_string());
        assert!(Command::new("kill").args([option, pid]).status().unwrap().success());
    }

    /// Waits for its end; a longer wait than `limit` is a panic.
    pub fn wait(&mut self, limit: Duration) -> ExitStatus {
        self.ended_within(limit).unwrap_or_else(|| panic!("the gateway did not stop:\n{}", self.log()))
    }

    /// Waits for its end; nothing if it lives on.
    pub fn ended_within(&mut self, limit: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                leash::release(self.pid());
                return Some(status);
            }
            if Instant::now() > deadline {
                return None;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it has logged.
    #[must_use]
    pub fn log(&self) -> String {
        self.log.lock().unwrap().join("\n")
    }

    /// A figure of `/proc/PID/status` in bytes, such as `VmRSS` or `VmHWM`.
    #[must_use]
    pub fn memory(&self, field: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':')).unwrap_or("0");
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap_or(0) * 1024
    }

    /// Asks the admin API.
    pub async fn get(&self, path: &str) -> Answer {
        get(self.admin, path).await.unwrap()
    }

    /// Gives an order over the admin API.
    pub async fn post(&self, path: &str, order: &Value) -> Answer {
        let headers = [("content-type".to_owned(), b"application/json".to_vec())];
        ask(self.admin, &post(path, &headers, order.to_string().as_bytes())).await.unwrap()
    }

    /// Asks the admin API for JSON; anything but 200 is a panic.
    pub async fn json(&self, path: &str) -> Value {
        let answer = self.get(path).await;
        assert_eq!(answer.status, 200, "{path}: {}", String::from_utf8_lossy(&answer.body));
        answer.json()
    }

    /// The sum of a metric over all its labels.
    pub async fn metric(&self, name: &str) -> f64 {
        let text = String::from_utf8(self.get("/metrics").await.body).unwrap();
        let values = text.lines().filter_map(|line| {
            let (labelled, value) = line.rsplit_once(' ')?;
            (labelled.split('{').next()? == name).then(|| value.parse::<f64>().unwrap())
        });
        values.reduce(|sum, value| sum + value).unwrap_or_else(|| panic!("there is no metric {name}"))
    }

    /// All events, newest first, over as many pages as it takes.
    pub async fn events(&self) -> Vec<Value> {
        let mut events = Vec::new();
        let mut cursor = String::new();
        loop {
            let page = self.json(&format!("/api/events?limit=1000{cursor}")).await;
            events.extend(page["events"].as_array().unwrap().iter().cloned());
            match page["next"].as_str() {
                Some(next) => cursor = format!("&cursor={next}"),
                None => return events,
            }
        }
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        leash::release(self.pid());
    }
}

/// The address on the welcome line that starts with a word.
fn address(text: &str, word: &str) -> Option<SocketAddr> {
    let line = text.lines().find(|line| line.trim_start().starts_with(word))?;
    let url = line.split("http://").nth(1)?;
    url.split('/').next()?.parse().ok()
}
