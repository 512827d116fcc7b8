//! Where the database file lies: one process at a time, on a disk that keeps what is synced to it, and closed to other
//! users of the machine: bodies are in it, and a user that holds the lock file keeps the gateway from starting.

use std::ffi::OsString;
use std::fs::{File, Metadata, OpenOptions, Permissions, TryLockError};
use std::io;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use super::{OpenError, connection};
use crate::journal::Durability;

/// A checked place for a database file.
pub(crate) struct Place {
    directory: PathBuf,
    /// The file's one true path: links are resolved, so that two names for it share one lock.
    pub(crate) path: PathBuf,
    pub(crate) durability: Durability,
}

/// Checks that the directory exists and is not a network disk, and says what a sync means there.
fn check(written: &Path) -> Result<Place, OpenError> {
    let path = std::fs::canonicalize(written).unwrap_or_else(|_| written.to_path_buf());
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_path_buf(),
        _ => PathBuf::from("."),
    };
    let fail = OpenError::place(written);
    if !directory.is_dir() {
        return Err(fail(format!("the directory {} does not exist", directory.display())));
    }
    let stat = rustix::fs::statfs(&directory).map_err(|error| fail(format!("statfs: {error}")))?;
    // The numbers are the kernel's (include/uapi/linux/magic.h).
    let network = match stat.f_type {
        0x6969 => Some("NFS"),
        0x517b | 0xff53_4d42 | 0xfe53_4d42 => Some("SMB"),
        0x0102_1997 => Some("9p"),
        0x00c3_6400 => Some("Ceph"),
        0x5346_414f => Some("AFS"),
        0x6573_5546 => Some("FUSE"),
        _ => None,
    };
    if let Some(kind) = network {
        return Err(fail(format!(
            "it is on a network disk ({kind}), where SQLite's locks and syncs cannot be trusted; use a local disk"
        )));
    }
    let in_memory = matches!(stat.f_type, 0x0102_1994 | 0x8584_58f6); // tmpfs, ramfs
    let durability = if in_memory { Durability::ProcessCrashOnly } else { Durability::DurableFsync };
    Ok(Place { directory, path, durability })
}

/// Read and written by the user that runs the gateway, and by no other.
const PRIVATE: u32 = 0o600;

/// What SQLite and we keep beside a database file.
const BESIDE: [&str; 3] = ["-wal", "-shm", ".lock"];

/// The name of a file beside the database file.
pub(super) fn beside(database: &Path, ending: &str) -> PathBuf {
    let mut name = OsString::from(database);
    name.push(ending);
    PathBuf::from(name)
}

impl Place {
    /// Checks the place, takes the lock, and closes the files to other users.
    pub(crate) fn claim(path: &Path) -> Result<(Self, LockFile), OpenError> {
        connection::check_library()?;
        let place = check(path)?;
        let lock = LockFile::take(&place.path)?;
        place.keep_private()?;
        Ok((place, lock))
    }

    /// Makes the database file if there is none, so that SQLite gives its log the same mode, and takes the rights of other
    /// users from files that an earlier release left open to them. Warns of a folder in which every user may replace them.
    fn keep_private(&self) -> Result<(), OpenError> {
        let fail = OpenError::place(&self.path);
        // Only a new file is opened and closed here: closing one that a connection uses would drop its locks.
        match OpenOptions::new().write(true).create_new(true).mode(PRIVATE).open(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(fail(error)),
            _ => {}
        }
        tighten(&self.path).map_err(fail)?;
        for ending in BESIDE {
            tighten(&beside(&self.path, ending)).map_err(fail)?;
        }
        let folder = std::fs::metadata(&self.directory).map_err(fail)?;
        if folder.permissions().mode() & 0o1002 == 0o002 {
            tracing::warn!(
                folder = %self.directory.display(),
                "every user may write this folder and so replace the database file; take that right away (chmod o-w)"
            );
        }
        Ok(())
    }

    /// Makes the directory entries of the database and its log durable. SQLite ignores an error here, so we ask
    /// ourselves, before the first event is accepted.
    pub(crate) fn sync_directory(&self) -> Result<(), OpenError> {
        let synced = File::open(&self.directory).and_then(|directory| directory.sync_all());
        synced.map_err(|error| OpenError::place(&self.path)(format!("syncing the directory failed: {error}")))
    }
}

/// Takes the rights of other users from a file, if it is there, is wider than it should be and is ours to change.
fn tighten(path: &Path) -> io::Result<()> {
    let found = match std::fs::symlink_metadata(path) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    let mode = found.permissions().mode() & 0o777;
    if !found.is_file() || mode & !PRIVATE == 0 {
        return Ok(());
    }
    let shown = path.display();
    if !is_ours(&found) {
        tracing::warn!(file = %shown, owner = found.uid(), "other users can reach this file, which is not ours to change");
        return Ok(());
    }
    std::fs::set_permissions(path, Permissions::from_mode(PRIVATE))?;
    tracing::warn!(file = %shown, "this file had mode {mode:o} and could be read by other users; it has 600 now");
    Ok(())
}

/// Whether a file belongs to the user that runs this process.
fn is_ours(file: &Metadata) -> bool {
    file.uid() == rustix::process::geteuid().as_raw()
}

/// The lock that keeps a second process away. Held as long as the value lives; the kernel releases it at any death.
pub(crate) struct LockFile(File);

impl Drop for LockFile {
    fn drop(&mut self) {
        // Closing alone leaves the lock to a child that this process is starting just now, until the child's exec. What
        // cannot be unlocked is closed next anyway.
        let _ = self.0.unlock();
    }
}

impl LockFile {
    fn take(path: &Path) -> Result<Self, OpenError> {
        let lock = beside(path, ".lock");
        let place = OpenError::place(path);
        // Not through a link: what is written to the lock file would end up in a file that another user chose.
        let opened = OpenOptions::new()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .mode(PRIVATE)
            .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits().cast_signed())
            .open(&lock);
        let file = opened.map_err(|error| {
            let owner = stranger(&lock);
            place(format!("the lock file {} cannot be opened{owner}: {error}", lock.display()))
        })?;
        match file.try_lock() {
            Ok(()) => Ok(Self(file)),
            Err(TryLockError::WouldBlock) => {
                Err(OpenError::InUse { path: path.to_path_buf(), owner: stranger(&lock), lock })
            }
            Err(TryLockError::Error(error)) => Err(place(format!("locking {} failed: {error}", lock.display()))),
        }
    }

    /// Another handle to the file, which takes no part in the locking.
    pub(super) fn handle(&self) -> io::Result<File> {
        self.0.try_clone()
    }
}

/// What to say about a lock file that belongs to another user; nothing if it is ours.
fn stranger(lock: &Path) -> String {
    match std::fs::symlink_metadata(lock) {
        Ok(found) if !is_ours(&found) => format!(" (it belongs to user id {}, not to this one)", found.uid()),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_file_of_another_user_or_behind_a_link_is_named_as_the_cause() {
        let directory = tempfile::tempdir().unwrap();
        let (path, lock) = (directory.path().join("journal.db"), directory.path().join("journal.db.lock"));
        let elsewhere = directory.path().join("elsewhere");
        std::os::unix::fs::symlink(&elsewhere, &lock).unwrap();
        assert!(matches!(LockFile::take(&path), Err(OpenError::Place { .. })));
        assert!(!elsewhere.exists());
        std::fs::remove_file(&lock).unwrap();
        let _held = LockFile::take(&path).unwrap();
        let refused = LockFile::take(&path).err().unwrap().to_string();
        assert!(refused.contains("in use by another oncehook process") && !refused.contains("belongs to"), "{refused}");
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&lock, Some(4_711), None).unwrap();
            let refused = LockFile::take(&path).err().unwrap().to_string();
            assert!(refused.contains("belongs to user id 4711"), "{refused}");
        }
    }
}
