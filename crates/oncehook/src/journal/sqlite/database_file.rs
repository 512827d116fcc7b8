//! A handle of our own to the database file, to sync it beside the writer.
//!
//! Promises: once opened, a handle stays open until the process ends. POSIX drops *all* locks of a process on a file when
//! any of its descriptors of that file is closed, and SQLite's connections, ours and the user's, rely on these locks. So
//! this is one descriptor per database file that this process ever used, on purpose.
//! Does not: write, or read more than the header.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// Every handle ever made. Never shortened.
static OPENED: Mutex<Vec<Arc<File>>> = Mutex::new(Vec::new());

#[derive(Clone)]
pub(super) struct DatabaseFile(Arc<File>);

impl DatabaseFile {
    /// The handle to a file that exists.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
        // Asked by name: to open the file and find that it was known would mean to close it again.
        let wanted = std::fs::metadata(path)?;
        for file in opened.iter() {
            let known = file.metadata()?;
            if (known.dev(), known.ino()) == (wanted.dev(), wanted.ino()) {
                return Ok(Self(Arc::clone(file)));
            }
        }
        let file = Arc::new(File::open(path)?);
        opened.push(Arc::clone(&file));
        Ok(Self(file))
    }

    /// Whether the file says that a write-ahead log belongs to it. (Its format version for reading, in the header, is 2 then.)
    pub(super) fn is_in_wal_mode(&self) -> io::Result<bool> {
        let mut version = [0];
        Ok(self.0.read_at(&mut version, 19)? == 1 && version == [2])
    }

    /// Waits until what was written to the file, through whatever handle, is on the disk.
    pub(super) fn sync(&self) -> io::Result<()> {
        self.0.sync_data()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_one_handle_for_ever() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        assert!(DatabaseFile::open(&path).is_err());
        std::fs::write(&path, "1").unwrap();
        let first = DatabaseFile::open(&path).unwrap();
        first.sync().unwrap();
        let link = directory.path().join("link");
        std::fs::hard_link(&path, &link).unwrap();
        assert!(Arc::ptr_eq(&first.0, &DatabaseFile::open(&link).unwrap().0), "one file, two names");
        let weak = Arc::downgrade(&first.0);
        drop(first);
        assert!(weak.upgrade().is_some(), "closed");
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "2").unwrap();
        let other = DatabaseFile::open(&path).unwrap();
        assert!(!Arc::ptr_eq(&other.0, &weak.upgrade().unwrap()), "another file under the old name");
    }
}
