//! Secrets that a provider hands over by itself (Asana, Notion): kept in a file until a person has looked at it.
//!
//! Promises: nothing that was handed over is believed. It is written to the file that the source names, readable by the
//! owner only; while that file is there, another secret is refused. The operator compares it with what the provider shows
//! and makes it a secret of the source (`secrets = ["file:…"]`).
//!
//! Does not: change the configuration, and does not accept events with a secret that nobody has confirmed.

use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use oncehook_verify::Secret;

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

/// Writes the secret, unless one waits already. Blocks for the time of a small write.
pub(super) fn keep(path: &Path, secret: &Secret) -> std::io::Result<Kept> {
    let opened = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    match opened {
        Ok(mut file) => {
            file.write_all(secret.reveal().as_bytes())?;
            file.write_all(b"\n")?;
            file.sync_all()?;
            Ok(Kept::New)
        }
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
            let waiting = std::fs::read_to_string(path)?;
            Ok(if waiting.trim_end() == secret.reveal() { Kept::Again } else { Kept::Occupied })
        }
        Err(error) => Err(error),
    }
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
}
