//! Small files that only the gateway's own user may read: written whole or not at all.

use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

/// Replaces a file as a whole, with rights for its owner only. Blocks for the time of a small write. After an error the old
/// file is untouched. At most one caller at a time per path.
pub(crate) fn replace(path: &Path, content: &[u8]) -> std::io::Result<()> {
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    let new = PathBuf::from(name);
    // One that a crash left behind may have other rights.
    remove_if_there(&new)?;
    let written = write(&new, content).and_then(|()| std::fs::rename(&new, path));
    if written.is_err() {
        // On a full disk this gives the space back. If it fails too, the next attempt begins with it.
        let _ = std::fs::remove_file(&new);
    }
    written
}

fn remove_if_there(path: &Path) -> std::io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn write(path: &Path, content: &[u8]) -> std::io::Result<()> {
    let mut file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(content)?;
    file.sync_all()
}
