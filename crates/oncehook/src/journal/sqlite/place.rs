//! Where the database file lies: one process at a time, on a disk that keeps what it is told to keep.

use std::fs::{File, OpenOptions, TryLockError};
use std::path::{Path, PathBuf};

use super::OpenError;
use crate::journal::Durability;

/// A checked place for a database file.
pub(crate) struct Place {
    directory: PathBuf,
    /// The file's one true path: links are resolved, so that two names for it share one lock.
    pub(crate) path: PathBuf,
    pub(crate) durability: Durability,
}

/// Checks that the directory exists and is not a network disk, and says what a sync means there.
pub(crate) fn check(written: &Path) -> Result<Place, OpenError> {
    let path = std::fs::canonicalize(written).unwrap_or_else(|_| written.to_path_buf());
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_path_buf(),
        _ => PathBuf::from("."),
    };
    let fail = |reason: String| OpenError::Place { path: written.to_path_buf(), reason };
    if !directory.is_dir() {
        return Err(fail(format!("the directory {} does not exist", directory.display())));
    }
    let stat = rustix::fs::statfs(&directory).map_err(|error| fail(format!("statfs: {error}")))?;
    // The numbers are the kernel's (include/uapi/linux/magic.h).
    let durability = match stat.f_type {
        0x6969 => return Err(fail(network("NFS"))),
        0x517b | 0xff53_4d42 | 0xfe53_4d42 => return Err(fail(network("SMB"))),
        0x0102_1997 => return Err(fail(network("9p"))),
        0x00c3_6400 => return Err(fail(network("Ceph"))),
        0x5346_414f => return Err(fail(network("AFS"))),
        0x6573_5546 => return Err(fail(network("FUSE"))),
        0x0102_1994 | 0x8584_58f6 => Durability::ProcessCrashOnly, // tmpfs, ramfs
        _ => Durability::DurableFsync,
    };
    Ok(Place { directory, path, durability })
}

fn network(kind: &str) -> String {
    format!(
        "it is on a network disk ({kind}), where SQLite's locks and syncs cannot be trusted; use a local disk"
    )
}

impl Place {
    /// Makes the directory entries of the database and its log durable. SQLite ignores an error here, so we ask
    /// ourselves, before the first event is accepted.
    pub(crate) fn sync_directory(&self) -> Result<(), OpenError> {
        File::open(&self.directory).and_then(|directory| directory.sync_all()).map_err(|error| {
            OpenError::Place {
                path: self.path.clone(),
                reason: format!("syncing the directory failed: {error}"),
            }
        })
    }
}

/// The lock that keeps a second process away. Held as long as the value lives; the kernel releases it at any death.
pub(crate) struct LockFile {
    file: File,
}

impl Drop for LockFile {
    fn drop(&mut self) {
        // Closing alone leaves the lock to a child that this process is starting just now, until the child's exec. What
        // cannot be unlocked is closed next anyway.
        let _ = self.file.unlock();
    }
}

impl LockFile {
    pub(crate) fn take(path: &Path) -> Result<Self, OpenError> {
        let mut name = path.as_os_str().to_owned();
        name.push(".lock");
        let lock = PathBuf::from(name);
        let place = |reason: String| OpenError::Place { path: path.to_path_buf(), reason };
        let file =
            OpenOptions::new().create(true).truncate(false).write(true).open(&lock).map_err(|error| {
                place(format!("the lock file {} cannot be opened: {error}", lock.display()))
            })?;
        match file.try_lock() {
            Ok(()) => Ok(Self { file }),
            Err(TryLockError::WouldBlock) => Err(OpenError::InUse { path: path.to_path_buf(), lock }),
            Err(TryLockError::Error(error)) => {
                Err(place(format!("locking {} failed: {error}", lock.display())))
            }
        }
    }
}
