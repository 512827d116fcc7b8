//! An example as its reader has it: its files in a directory of their own, commands pasted into a shell, the gateway that they start.
//!
//! Promises: dropping what was started kills it with everything that it has started, and waits for that.

use std::collections::{BTreeMap, BTreeSet};
use std::net::TcpListener;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{LazyLock, Mutex};
use std::time::{Duration, Instant};

use oncehook_testkit::gateway::{Gateway, now};
use oncehook_testkit::random::Random;
use serde_json::Value;
use tempfile::TempDir;
use tokio::time::sleep;

use super::IN_THE_END;
use crate::kit::BINARY;

/// The ports in the examples.
const PORTS: [&str; 5] = ["8080", "8081", "9000", "9001", "9002"];

pub(super) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The fenced blocks of one kind in a document.
pub(super) fn blocks(document: &str, kind: &str) -> Vec<String> {
    let fence = format!("```{kind}\n");
    let after = document.split(&fence).skip(1);
    after.map(|text| text.split_once("```").unwrap().0.to_owned()).collect()
}

/// All examples, copied, with ports of their own; one of them is where commands are pasted.
pub(super) struct Example {
    directory: TempDir,
    name: &'static str,
    pub(super) ports: BTreeMap<&'static str, u16>,
}

impl Example {
    pub(super) fn copy(name: &'static str) -> Self {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let ports = PORTS.into_iter().map(|port| (port, free_port())).collect();
        let example = Self { directory, name, ports };
        example.copy_files(&root().join("examples"), example.directory.path());
        example
    }

    /// Without what somebody who ran the example has left there.
    fn copy_files(&self, from: &Path, to: &Path) {
        for entry in std::fs::read_dir(from).unwrap() {
            let entry = entry.unwrap();
            let (path, target) = (entry.path(), to.join(entry.file_name()));
            let name = entry.file_name().into_string().unwrap();
            if path.is_dir() {
                std::fs::create_dir(&target).unwrap();
                self.copy_files(&path, &target);
            } else if name == "README.md" || name.ends_with(".toml") {
                let mut text = std::fs::read_to_string(&path).unwrap();
                // In two steps: a free port may have the digits of one that is still to be replaced.
                let places = || self.ports.iter().enumerate();
                for (place, (port, _)) in places() {
                    text = text.replace(port, &format!("<{place}>"));
                }
                for (place, (_, other)) in places() {
                    text = text.replace(&format!("<{place}>"), &other.to_string());
                }
                std::fs::write(target, text).unwrap();
            } else if [".py", ".mjs", ".sql", ".json"].iter().any(|ending| name.ends_with(ending)) {
                std::fs::copy(path, target).unwrap();
            }
        }
    }

    pub(super) fn path(&self, file: &str) -> PathBuf {
        self.directory.path().join(self.name).join(file)
    }

    /// The blocks of its README.
    pub(super) fn blocks(&self, kind: &str) -> Vec<String> {
        blocks(&std::fs::read_to_string(self.path("README.md")).unwrap(), kind)
    }

    /// A shell in its directory, with `oncehook` and a suitable `node` on the path.
    fn shell(&self, limit: &str, commands: &str) -> Command {
        let binary = Path::new(BINARY).parent().unwrap().display();
        let node = NODE_BINARY.parent().unwrap().display();
        let script = format!("set -e\nexport PATH=\"{binary}:{node}:$PATH\"\n{commands}");
        let mut shell = Command::new("timeout");
        shell.args(["--signal=KILL", limit, "bash", "-c", &script]).current_dir(self.path("."));
        shell.stdin(Stdio::null());
        shell
    }

    /// Runs commands to their end and gives what they printed. A command that fails is a panic.
    pub(super) fn paste(&self, commands: &str) -> String {
        let output = self.shell("60", commands).output().unwrap();
        let (said, complained) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{commands}\n{:?}\n{said}\n{complained}", output.status);
        said
    }

    /// Runs commands that end with the gateway, and waits until that is ready.
    pub(super) fn start(&self, commands: &str) -> Running {
        let mut shell = self.shell("300", commands);
        shell.process_group(0);
        Running { inner: Gateway::start_command(shell, &self.path(".")) }
    }
}

/// A gateway and what was started beside it. Dropping it kills all of them.
pub(super) struct Running {
    pub(super) inner: Gateway,
}

impl Running {
    /// The one event there is, when it has that status.
    pub(super) async fn only_event(&self, status: &str) -> Value {
        let mut events = self.until(|events| events.len() == 1 && events[0]["status"] == status).await;
        events.remove(0)
    }

    /// The event with that key, when it has that status.
    pub(super) async fn event(&self, key: &str, status: &str) -> Value {
        let has = |event: &Value| event["key"] == key && event["status"] == status;
        let events = self.until(|events| events.iter().any(has)).await;
        events.into_iter().find(has).unwrap()
    }

    /// All events, when there are so many and all have succeeded.
    pub(super) async fn settled(&self, count: usize) -> Vec<Value> {
        self.until(|events| events.len() == count && events.iter().all(|event| event["status"] == "succeeded")).await
    }

    /// All events, when they are as they should be.
    async fn until(&self, enough: impl Fn(&[Value]) -> bool) -> Vec<Value> {
        let deadline = Instant::now() + IN_THE_END;
        loop {
            let events = self.inner.events().await;
            if enough(&events) {
                return events;
            }
            let last = events.iter().find(|event| event["status"] != "succeeded");
            assert!(Instant::now() < deadline, "{} events, {last:?}\n{}", events.len(), self.inner.log());
            sleep(Duration::from_millis(20)).await;
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let group = self.inner.pid();
        let _ = Command::new("kill").args(["-KILL", "--", &format!("-{group}")]).stderr(Stdio::null()).status();
        // Whoever comes next may want the same file: a process that is told to die is not gone yet.
        let deadline = Instant::now() + Duration::from_secs(10);
        while lives(group) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Whether a process of the group still runs. One that is only waited for holds nothing any more.
fn lives(group: u32) -> bool {
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    processes.into_iter().any(|process| {
        let stat = std::fs::read_to_string(process.path().join("stat")).unwrap_or_default();
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
        fields.first().is_some_and(|state| *state != "Z") && fields.get(2).is_some_and(|of| *of == group.to_string())
    })
}

/// The interpreter itself: what is on the path may be a script that looks for it.
pub(super) static PYTHON_BINARY: LazyLock<PathBuf> = LazyLock::new(|| {
    let found = itself("python3", &["-c", "import sqlite3, sys; print(sys.executable)"]);
    found.expect("this test needs python3 with sqlite3 (`make services` installs it)")
});

/// A Node that has `node:sqlite`: the one on the path, or the one that `make services` has put under target/tools.
pub(super) static NODE_BINARY: LazyLock<PathBuf> = LazyLock::new(|| {
    let tools = root().join("target/tools/node_modules");
    let installed = std::fs::read_dir(tools).into_iter().flatten().map(|entry| entry.unwrap().path().join("bin/node"));
    let mut candidates = std::iter::once(PathBuf::from("node")).chain(installed);
    let found =
        candidates.find_map(|node| itself(&node, &["-e", "require('node:sqlite'); console.log(process.execPath)"]));
    found.expect("this test needs Node 22.13 or newer (`make services` installs it)")
});

fn itself(program: impl AsRef<std::ffi::OsStr>, arguments: &[&str]) -> Option<PathBuf> {
    let output = Command::new(program).args(arguments).stderr(Stdio::null()).output().ok()?;
    let path = String::from_utf8(output.stdout).unwrap();
    output.status.success().then(|| PathBuf::from(path.trim()))
}

/// A port that nobody listens on, and that is not of those which outgoing connections take by chance: the program that gets
/// it is killed, and must find it free when it comes back.
fn free_port() -> u16 {
    static TAKEN: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());
    let mut taken = TAKEN.lock().unwrap();
    let mut random = Random::new(now().0.unsigned_abs() ^ (u64::from(std::process::id()) << 32));
    loop {
        let port = 12_000 + random.below(20_000) as u16;
        if !taken.contains(&port) && TcpListener::bind(("127.0.0.1", port)).is_ok() {
            taken.insert(port);
            return port;
        }
    }
}
