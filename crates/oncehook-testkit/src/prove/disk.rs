//! A disk whose power can be cut: what was written and not synced is undone, wholly or in part.
//!
//! The gateway runs with `shim/disk.c` preloaded, which takes down every write together with what was there before. After a kill
//! [`Disk::cut`] rebuilds what a real disk could hold then: everything up to each file's last sync, and of the rest nothing,
//! some, or a torn piece. What was written before a sync that failed stays undone whatever later syncs say, as on a kernel
//! that takes such pages for clean. It also makes single calls fail and moves the wall clock of the gateway.
//!
//! Does not: model a disk that lies about syncs, or memory maps (SQLite's `-shm` is not read after a crash).

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::random::Random;

const SOURCE: &str = include_str!("../../shim/disk.c");
const MAGIC: u32 = 0x0ce4_00cd;
const HEAD: usize = 16 + 4 * 8;

/// The compiled shim. Needs a C compiler, which building SQLite needs too.
pub struct Shim {
    directory: TempDir,
}

impl Shim {
    /// Compiles it.
    #[must_use]
    pub fn build() -> Self {
        Self::build_in(&std::env::temp_dir())
    }

    /// Compiles it somewhere below a place, where its disks are held too.
    #[must_use]
    pub fn build_in(place: &Path) -> Self {
        let directory = tempfile::tempdir_in(place).unwrap();
        let source = directory.path().join("disk.c");
        std::fs::write(&source, SOURCE).unwrap();
        let built = Command::new("cc")
            .args(["-shared", "-fPIC", "-O2", "-o"])
            .arg(directory.path().join("disk.so"))
            .arg(&source)
            .arg("-ldl")
            .output()
            .expect("a C compiler is needed");
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        Self { directory }
    }

    /// A disk: everything below a directory.
    #[must_use]
    pub fn disk(&self, watched: &Path) -> Disk {
        let own = tempfile::tempdir_in(self.directory.path()).unwrap();
        let control = OpenOptions::new()
            .create(true)
            .truncate(true)
            .read(true)
            .write(true)
            .open(own.path().join("control"))
            .unwrap();
        control.set_len(4_096).unwrap();
        let watched = watched.canonicalize().unwrap();
        let disk = Disk { own, control, watched, shim: self.directory.path().join("disk.so") };
        disk.forget();
        disk
    }
}

/// Calls that can be made to fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Calls {
    /// Writes and truncations.
    Writes = 1,
    /// Syncs.
    Syncs = 2,
    /// Both.
    All = 3,
}

/// What is left of what was not synced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    /// Nothing.
    Nothing,
    /// Any of the writes, in no order.
    Some,
    /// All up to a point, and of the last one a part.
    Torn,
}

/// What a cut has done.
#[derive(Debug, Clone, Copy, Default)]
pub struct Undone {
    /// Writes that were not synced.
    pub unsynced: usize,
    /// Of them, kept.
    pub kept: usize,
    /// Whether one was torn.
    pub torn: bool,
    /// Files that vanished because their directory was not synced.
    pub vanished: usize,
}

/// See the module's text.
pub struct Disk {
    own: TempDir,
    control: File,
    watched: PathBuf,
    shim: PathBuf,
}

#[derive(Debug, Clone)]
struct Record {
    /// Where its end stands in the log.
    end: u64,
    path: PathBuf,
    what: What,
}

#[derive(Debug, Clone)]
enum What {
    Write {
        offset: u64,
        old_size: u64,
        old: Vec<u8>,
        new: Vec<u8>,
    },
    Truncate {
        size: u64,
        old_size: u64,
        old: Vec<u8>,
    },
    /// Everything before this place of the log.
    Sync(u64),
    Create,
    SyncDirectory(u64),
    Unlink,
    /// Everything before this place of the log that no sync has made durable never will be.
    SyncFailed(u64),
}

impl Disk {
    /// Puts a gateway on this disk.
    pub fn hold(&self, command: &mut Command) {
        command
            .env("LD_PRELOAD", &self.shim)
            .env("ONCEHOOK_DISK_DIRECTORY", &self.watched)
            .env("ONCEHOOK_DISK_LOG", self.log())
            .env("ONCEHOOK_DISK_CONTROL", self.own.path().join("control"));
    }

    fn log(&self) -> PathBuf {
        self.own.path().join("log")
    }

    /// All that is there now is durable.
    pub fn forget(&self) {
        std::fs::write(self.log(), b"").unwrap();
    }

    /// Moves the wall clock of whoever runs on this disk.
    pub fn shift_clock(&self, seconds: i64) {
        self.set(0, seconds * 1_000_000_000);
    }

    /// From now on calls are counted; those from `from` on (the first is 1) fail, so many of them.
    pub fn fail(&self, calls: Calls, errno: i32, from: i64, count: i64) {
        self.set(1, 0);
        self.set(5, 0);
        self.set(6, 0);
        self.set(2, errno.into());
        self.set(3, from);
        self.set(4, count);
        self.set(1, calls as i64);
    }

    /// Only counts.
    pub fn count(&self, calls: Calls) {
        self.fail(calls, 0, 0, 0);
    }

    /// Nothing fails any more. Returns how many calls were seen, and how many have failed.
    pub fn heal(&self) -> (i64, i64) {
        self.set(1, 0);
        (self.get(5), self.get(6))
    }

    /// How many calls have failed so far.
    #[must_use]
    pub fn failed(&self) -> i64 {
        self.get(6)
    }

    fn set(&self, field: u64, value: i64) {
        self.control.write_all_at(&value.to_ne_bytes(), field * 8).unwrap();
    }

    fn get(&self, field: u64) -> i64 {
        let mut bytes = [0; 8];
        self.control.read_exact_at(&mut bytes, field * 8).unwrap();
        i64::from_ne_bytes(bytes)
    }

    /// Cuts the power of a gateway that was killed: the directory is then what the disk held. All of that is durable.
    pub fn cut(&self, keep: Keep, random: &mut Random) -> Undone {
        let records = self.read().unwrap();
        let undone = undo(&records, keep, random).unwrap();
        self.forget();
        // The next start makes it anew, as after any crash.
        for entry in std::fs::read_dir(&self.watched).unwrap() {
            let path = entry.unwrap().path();
            if path.to_string_lossy().ends_with("-shm") {
                std::fs::remove_file(path).unwrap();
            }
        }
        undone
    }

    fn read(&self) -> io::Result<Vec<Record>> {
        let log = std::fs::read(self.log())?;
        let mut records = Vec::new();
        let mut at = 0;
        while let Some(head) = log.get(at..at + HEAD) {
            let word = |place: usize| u32::from_ne_bytes(head[place..place + 4].try_into().unwrap());
            let long = |place: usize| u64::from_ne_bytes(head[place..place + 8].try_into().unwrap());
            assert_eq!(word(0), MAGIC, "the log of the disk is damaged at {at}");
            let (path, old, new) = (word(8) as usize, long(32) as usize, long(40) as usize);
            // A record that the kill cut short: its write was not made.
            let Some(rest) = log.get(at + HEAD..at + HEAD + path + old + new) else { break };
            let (path, rest) = rest.split_at(path);
            let (old, new) = rest.split_at(old);
            let (offset, old_size) = (long(16), long(24));
            let what = match word(4) {
                1 => What::Write { offset, old_size, old: old.to_vec(), new: new.to_vec() },
                2 => What::Truncate { size: offset, old_size, old: old.to_vec() },
                3 => What::Sync(offset),
                4 => What::Create,
                5 => What::SyncDirectory(offset),
                6 => What::Unlink,
                7 => What::SyncFailed(offset),
                other => panic!("the log of the disk has a record of kind {other}"),
            };
            at += HEAD + path.len() + old.len() + new.len();
            let path = PathBuf::from(String::from_utf8(path.to_vec()).unwrap());
            records.push(Record { end: at as u64, path, what });
        }
        Ok(records)
    }
}

/// Whether each record has reached the disk.
fn durable(records: &[Record]) -> Vec<bool> {
    let mut durable = vec![false; records.len()];
    // Those of each file of which no sync has said anything yet.
    let mut open: BTreeMap<&Path, Vec<usize>> = BTreeMap::new();
    for (place, record) in records.iter().enumerate() {
        let open = open.entry(&record.path).or_default();
        let (up_to, reached) = match record.what {
            What::Sync(up_to) => (up_to, true),
            What::SyncFailed(up_to) => (up_to, false),
            _ => {
                open.push(place);
                continue;
            }
        };
        open.retain(|earlier| {
            let told = records[*earlier].end <= up_to;
            durable[*earlier] |= told && reached;
            !told
        });
    }
    durable
}

/// Undoes every file back to the first write that did not reach the disk, the last write first; then makes anew what did, and
/// what is kept.
fn undo(records: &[Record], keep: Keep, random: &mut Random) -> io::Result<Undone> {
    let durable = durable(records);
    let mut listed: BTreeMap<&Path, u64> = BTreeMap::new();
    let mut removed: BTreeMap<&Path, u64> = BTreeMap::new();
    let mut first: BTreeMap<&Path, u64> = BTreeMap::new();
    for record in records {
        match record.what {
            What::SyncDirectory(up_to) => drop(listed.insert(&record.path, up_to)),
            What::Unlink => drop(removed.insert(&record.path, record.end)),
            _ => {}
        }
    }
    let changes: Vec<(&Record, bool)> = records
        .iter()
        .zip(durable)
        .filter(|(record, _)| matches!(record.what, What::Write { .. } | What::Truncate { .. }))
        // What was written to a file of that name before it was removed is gone with it.
        .filter(|(record, _)| removed.get(record.path.as_path()).is_none_or(|removed| record.end > *removed))
        .collect();
    for (record, _) in changes.iter().filter(|(_, durable)| !durable) {
        first.entry(&record.path).or_insert(record.end);
    }
    let changes: Vec<(&Record, bool)> = changes
        .into_iter()
        .filter(|(record, _)| first.get(record.path.as_path()).is_some_and(|first| record.end >= *first))
        .collect();
    for (record, _) in changes.iter().rev() {
        let file = OpenOptions::new().write(true).open(&record.path)?;
        match &record.what {
            What::Write { offset: at, old_size, old, .. } | What::Truncate { size: at, old_size, old } => {
                file.write_all_at(old, *at)?;
                file.set_len(*old_size)?;
            }
            _ => {}
        }
    }
    let unsynced = changes.iter().filter(|(_, durable)| !durable).count();
    let mut undone = Undone { unsynced, ..Undone::default() };
    let (up_to, torn) = match keep {
        Keep::Torn if unsynced > 0 => (random.below(unsynced as u64) as usize, true),
        _ => (0, false),
    };
    let mut place = 0;
    for (record, durable) in changes {
        let mut torn = torn;
        if durable {
            torn = false;
        } else {
            let kept = match keep {
                Keep::Nothing => false,
                Keep::Some => random.below(2) == 0,
                Keep::Torn => place <= up_to,
            };
            torn &= place == up_to;
            place += 1;
            if !kept {
                continue;
            }
            undone.kept += 1;
        }
        let file = OpenOptions::new().write(true).open(&record.path)?;
        match &record.what {
            What::Write { offset, new, .. } => {
                // Sectors are whole; pages are not.
                let sectors = (new.len() as u64).div_ceil(512).max(1);
                let length = if torn { (random.below(sectors) * 512) as usize } else { new.len() };
                undone.torn |= length < new.len();
                file.write_all_at(&new[..length.min(new.len())], *offset)?;
            }
            What::Truncate { size, .. } => file.set_len(*size)?,
            _ => {}
        }
    }
    for record in records.iter().filter(|record| matches!(record.what, What::Create)) {
        let directory = record.path.parent().unwrap();
        let is_listed = record.end <= listed.get(directory).copied().unwrap_or(0);
        if !is_listed && keep == Keep::Nothing && record.path.exists() {
            std::fs::remove_file(&record.path)?;
            undone.vanished += 1;
        }
    }
    Ok(undone)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A small program that writes, syncs and writes again.
    const PROGRAM: &str = r#"
import os, sys
d = sys.argv[1]
fd = os.open(d + "/a", os.O_RDWR | os.O_CREAT)
df = os.open(d, os.O_RDONLY)
os.fsync(df)
os.pwrite(fd, b"durable!", 0)
os.fdatasync(fd)
os.pwrite(fd, b"VOLATILE", 4)
os.pwrite(fd, b"more", 100)
os.ftruncate(fd, 6)
os.open(d + "/b", os.O_RDWR | os.O_CREAT)
os.kill(os.getpid(), 9)
"#;

    fn run(keep: Keep) -> (Vec<u8>, Undone, bool) {
        let shim = Shim::build();
        let directory = tempfile::tempdir().unwrap();
        let disk = shim.disk(directory.path());
        let mut command = Command::new("python3");
        command.args(["-c", PROGRAM]).arg(directory.path());
        disk.hold(&mut command);
        assert!(!command.status().unwrap().success());
        assert_eq!(std::fs::read(directory.path().join("a")).unwrap(), b"duraVO", "it was written");
        let undone = disk.cut(keep, &mut Random::new(7));
        let there = directory.path().join("b").exists();
        (std::fs::read(directory.path().join("a")).unwrap(), undone, there)
    }

    #[test]
    fn fault_2_a_cut_undoes_what_was_not_synced() {
        let (left, undone, there) = run(Keep::Nothing);
        assert_eq!((left.as_slice(), there), (&b"durable!"[..], false));
        assert_eq!((undone.unsynced, undone.kept, undone.vanished), (3, 0, 1));
        // Whatever is kept, what was synced and not written over is there.
        let (left, undone, _) = run(Keep::Torn);
        assert!(left.starts_with(b"dura") && undone.unsynced == 3 && undone.kept >= 1, "{left:?} {undone:?}");
        assert!(run(Keep::Some).0.starts_with(b"dura"));
    }

    /// Writes before a sync that failed, and a later sync that succeeded.
    #[test]
    fn fault_3_what_a_failed_sync_left_is_lost_whatever_later_syncs_say() {
        let shim = Shim::build();
        let directory = tempfile::tempdir().unwrap();
        let disk = shim.disk(directory.path());
        let program = r#"
import os, sys
d = sys.argv[1]
fd = os.open(d + "/a", os.O_RDWR | os.O_CREAT)
os.fsync(os.open(d, os.O_RDONLY))
os.pwrite(fd, b"durable.", 0)
os.fdatasync(fd)
os.pwrite(fd, b"DOOMED", 0)
try:
    os.fdatasync(fd)
except OSError as e:
    print(e.errno, flush=True)
os.pwrite(fd, b"later", 3)
os.fdatasync(fd)
os.kill(os.getpid(), 9)
"#;
        let mut command = Command::new("python3");
        command.args(["-c", program]).arg(directory.path());
        disk.hold(&mut command);
        disk.fail(Calls::Syncs, 5, 3, 1);
        let output = command.output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "5\n", "{output:?}");
        let file = directory.path().join("a");
        assert_eq!(std::fs::read(&file).unwrap(), b"DOOlater");
        let undone = disk.cut(Keep::Nothing, &mut Random::new(7));
        assert_eq!(std::fs::read(&file).unwrap(), b"durlater");
        assert_eq!((undone.unsynced, undone.kept), (1, 0));
    }

    #[test]
    fn fault_3_one_chosen_call_fails_and_the_clock_moves() {
        let shim = Shim::build();
        let directory = tempfile::tempdir().unwrap();
        let disk = shim.disk(directory.path());
        let mut command = Command::new("python3");
        let program = r#"
import os, sys, time
fd = os.open(sys.argv[1] + "/a", os.O_RDWR | os.O_CREAT)
for i in range(5):
    try:
        os.pwrite(fd, b"x", i); os.fdatasync(fd); print(i, "ok")
    except OSError as e:
        print(i, e.errno)
print(int(time.time()))
"#;
        command.args(["-c", program]).arg(directory.path());
        disk.hold(&mut command);
        disk.fail(Calls::Syncs, 5, 3, 2);
        disk.shift_clock(-86_400);
        let output = command.output().unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(said.starts_with("0 ok\n1 ok\n2 5\n3 5\n4 ok\n"), "{said}{}", String::from_utf8_lossy(&output.stderr));
        let time: i64 = said.lines().last().unwrap().parse().unwrap();
        let ahead = crate::gateway::now().as_secs() - time;
        assert!((86_390..86_500).contains(&ahead), "{ahead}");
        assert_eq!(disk.heal(), (5, 2));
    }
}
