//! strace on a running gateway: counts the writes and syncs of chosen files, and lets one of them fail.
//!
//! Promises: the calls are the kernel's, whoever makes them and however; calls on other files and sockets are left alone. Threads
//! that start later are traced too. Does not: count over threads or kinds of calls; strace counts each thread's writes and each
//! thread's syncs for themselves.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::gateway::Gateway;
use crate::leash;

/// Every call that changes a file or makes it durable.
const CALLS: &str = "write,pwrite64,writev,pwritev,pwritev2,ftruncate,fallocate,fsync,fdatasync";

/// The longest that strace may take to attach or to let go.
const PATIENCE: Duration = Duration::from_secs(30);

/// Where strace writes what it sees.
pub struct Log(PathBuf);

/// What it saw.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Seen {
    /// Calls that were made to fail.
    pub injected: u64,
    /// The most calls of each kind that one thread made.
    pub calls: BTreeMap<String, u64>,
}

impl Log {
    /// A file in this directory.
    #[must_use]
    pub fn new(directory: &Path) -> Self {
        Self(directory.join("trace"))
    }

    /// What it says so far.
    #[must_use]
    pub fn read(&self) -> Seen {
        let text = std::fs::read_to_string(&self.0).unwrap_or_default();
        let mut threads: HashMap<(&str, &str), u64> = HashMap::new();
        for line in text.lines() {
            let Some((thread, call)) = line.split_once(' ') else { continue };
            // What another thread has interrupted comes in two parts; the second has no bracket after its name.
            let name = call.trim_start().split('(').next().unwrap_or_default();
            if CALLS.split(',').any(|call| call == name) {
                *threads.entry((thread, name)).or_default() += 1;
            }
        }
        let mut calls: BTreeMap<String, u64> = BTreeMap::new();
        for ((_, name), count) in threads {
            let most = calls.entry(name.to_owned()).or_default();
            *most = count.max(*most);
        }
        Seen { injected: text.matches("(INJECTED)").count() as u64, calls }
    }
}

/// strace at work. Dropping it ends it.
pub struct Tracer<'l> {
    strace: Child,
    log: &'l Log,
}

impl<'l> Tracer<'l> {
    /// Attaches to all threads; each thread's call of that kind and number fails with an error, if one is given.
    #[must_use]
    pub fn attach(gateway: &Gateway, files: &[PathBuf], failure: Option<(&str, &str, u64)>, log: &'l Log) -> Self {
        let mut command = Command::new("strace");
        command.args(["-f", "-q", "-e", &format!("trace={CALLS}")]);
        if let Some((error, call, number)) = failure {
            command.args(["-e", &format!("inject={call}:error={error}:when={number}")]);
        }
        files.iter().for_each(|file| {
            command.arg("-P").arg(file);
        });
        command.arg("-o").arg(&log.0).args(["-p", &gateway.pid().to_string()]);
        let spawned = command.stderr(Stdio::null()).stdout(Stdio::null()).stdin(Stdio::null()).spawn();
        let strace = spawned.expect("strace is not installed: run `make services` first");
        leash::hold(strace.id());
        let tracer = Self { strace, log };
        let end = Instant::now() + PATIENCE;
        while !is_traced(gateway.pid()) {
            assert!(Instant::now() < end, "strace does not attach");
            std::thread::sleep(Duration::from_millis(5));
        }
        tracer
    }

    /// Lets go. Returns what it saw.
    #[must_use]
    pub fn detach(mut self) -> Seen {
        let _ = Command::new("kill").args(["-INT", &self.strace.id().to_string()]).status();
        let end = Instant::now() + PATIENCE;
        while self.strace.try_wait().unwrap().is_none() {
            assert!(Instant::now() < end, "strace does not let go");
            std::thread::sleep(Duration::from_millis(5));
        }
        self.log.read()
    }
}

impl Drop for Tracer<'_> {
    fn drop(&mut self) {
        let _ = self.strace.kill();
        let _ = self.strace.wait();
        leash::release(self.strace.id());
    }
}

/// Whether every thread has a tracer.
fn is_traced(pid: u32) -> bool {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return false };
    threads.flatten().all(|thread| {
        let status = std::fs::read_to_string(thread.path().join("status")).unwrap_or_default();
        // One that has ended meanwhile says nothing.
        status.is_empty() || !status.contains("TracerPid:\t0\n")
    })
}
