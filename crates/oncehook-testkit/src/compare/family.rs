//! What a deployment costs: CPU time and bytes handed to the disk of every process that this one has started, whoever started it in
//! turn. A database server and its connections are part of what is measured. Memory is not: servers of other rows stay up.

use std::collections::{HashMap, HashSet};

/// What the processes have used so far.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Used {
    pub(super) cpu_micros: f64,
    pub(super) written: f64,
}

impl Used {
    pub(super) fn and(self, other: Self) -> Self {
        Self { cpu_micros: self.cpu_micros + other.cpu_micros, written: self.written + other.written }
    }

    pub(super) fn since(self, before: Self) -> Self {
        Self { cpu_micros: self.cpu_micros - before.cpu_micros, written: self.written - before.written }
    }
}

/// Of all that descend from this process.
pub(super) fn used() -> Used {
    let mut used = Used::default();
    for pid in descendants() {
        used.cpu_micros += stat(pid).map_or(0.0, |stat| stat.ticks * 10_000.0);
        let io = std::fs::read_to_string(format!("/proc/{pid}/io")).unwrap_or_default();
        used.written += field(&io, "write_bytes");
    }
    used
}

/// The processor time of this process alone: the load generator.
pub(super) fn generator_micros() -> f64 {
    let line = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = line.rsplit(')').next().unwrap_or_default().split_whitespace();
    fields.skip(11).take(2).filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() * 10_000.0
}

/// The processes whose command line has this word.
pub(super) fn named(word: &str) -> Vec<u32> {
    let has = |pid: &u32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(word)
    };
    descendants().into_iter().filter(has).collect()
}

/// Everything that this process has started, and what that has started.
fn descendants() -> Vec<u32> {
    let pids = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let parents: HashMap<u32, u32> = pids.filter_map(|pid| Some((pid, stat(pid)?.parent))).collect();
    let own = std::process::id();
    let descends = |pid: u32| {
        let mut seen = HashSet::new();
        let mut at = pid;
        while let Some(parent) = parents.get(&at).filter(|_| seen.insert(at)) {
            if *parent == own {
                return true;
            }
            at = *parent;
        }
        false
    };
    parents.keys().copied().filter(|pid| descends(*pid)).collect()
}

struct Stat {
    parent: u32,
    /// Hundredths of a second in user and system mode, of ended children too.
    ticks: f64,
}

fn stat(pid: u32) -> Option<Stat> {
    let line = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let fields: Vec<&str> = line.rsplit(')').next()?.split_whitespace().collect();
    let ticks = fields.get(11..15)?.iter().filter_map(|ticks| ticks.parse::<f64>().ok()).sum();
    Some(Stat { parent: fields.get(1)?.parse().ok()?, ticks })
}

fn field(text: &str, name: &str) -> f64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let number = line.and_then(|rest| rest.split_whitespace().next()?.parse().ok());
    number.unwrap_or(0.0)
}

/// Lets the disk finish what earlier rows have left to it. Whoever syncs next would wait for that, too.
pub fn settle() {
    let synced = std::process::Command::new("sync").status();
    assert!(synced.is_ok_and(|status| status.success()), "sync");
}

/// Time of all cores so far, in ticks, and how much of it the hypervisor gave to others.
pub fn stolen() -> (f64, f64) {
    let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let line = stat.lines().next().unwrap_or_default();
    let ticks: Vec<f64> = line.split_whitespace().skip(1).filter_map(|ticks| ticks.parse().ok()).collect();
    (ticks.iter().take(8).sum(), ticks.get(7).copied().unwrap_or(0.0))
}

/// The share of time that was stolen since.
pub fn stolen_since(before: (f64, f64)) -> f64 {
    let now = stolen();
    (now.1 - before.1) / (now.0 - before.0).max(1.0)
}
