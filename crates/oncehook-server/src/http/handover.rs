//! Secrets that a provider hands over by itself (Asana, Notion): kept in a file until a person has looked at it.
//!
//! Promises: nothing that was handed over is believed. It is written to the file that the source names, readable by the
//! owner only, whole or not at all; while that file holds a secret, another one is refused. The operator compares it with what the provider shows
//! and makes it a secret of the source (`secrets = ["file:…"]`).
//!
//! Does not: change the configuration, and does not accept events with a secret that nobody has confirmed.

use std::path::Path;
use std::sync::{Mutex, PoisonError};

use oncehook_verify::Secret;

use crate::private_file;

/// What became of a secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kept {
    /// It waits in the file now.
    New,
    /// The very same one waits there already.
    Again,
    /// Another one waits there.
    Occupied,
}

/// One handover at a time: what is in the file must not change between the look and the write.
static WRITING: Mutex<()> = Mutex::new(());

/// Writes the secret, unless one waits already. Blocks for the time of a small write.
///
/// An empty file, as a full disk left it behind in earlier versions, holds no secret and is replaced. Anything else is the
/// operator's to remove: it may be the very secret that the source is configured with.
pub(super) fn keep(path: &Path, secret: &Secret) -> std::io::Result<Kept> {
    let _writing = WRITING.lock().unwrap_or_else(PoisonError::into_inner);
    match std::fs::read_to_string(path) {
        Ok(waiting) if waiting.trim().is_empty() => std::fs::remove_file(path)?,
        Ok(waiting) if waiting.trim_end() == secret.reveal() => return Ok(Kept::Again),
        Ok(_) => return Ok(Kept::Occupied),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let content = format!("{}\n", secret.reveal());
    private_file::replace(path, content.as_bytes())?;
    Ok(Kept::New)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn fault_69_a_handed_over_secret_waits_and_is_not_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pending");
        let secret = |text: &str| Secret::new(text).unwrap();
        assert_eq!(keep(&path, &secret("first")).unwrap(), Kept::New);
        assert_eq!(keep(&path, &secret("first")).unwrap(), Kept::Again);
        assert_eq!(keep(&path, &secret("evil")).unwrap(), Kept::Occupied);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "first\n");
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(keep(&directory.path().join("no/such"), &secret("x")).is_err());
    }

    /// A write that a full disk or a crash cut short must not lock the source out for ever.
    #[test]
    fn fault_69_what_is_left_of_a_failed_handover_is_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pending");
        for left_over in ["", "\n"] {
            std::fs::write(&path, left_over).unwrap();
            assert_eq!(keep(&path, &Secret::new("first").unwrap()).unwrap(), Kept::New, "{left_over:?}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), "first\n");
            assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        }
        let names = std::fs::read_dir(directory.path()).unwrap().count();
        assert_eq!(names, 1, "no temporary file stays behind");
    }
}
