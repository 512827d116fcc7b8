//! Keys that have checked genuine events, remembered over a restart in a small file beside the spool.
//!
//! Promises: the file is readable and writable by its owner only, is replaced as a whole, and one that others may write to is
//! not read. It holds what providers have answered, with the time, and nothing secret. What is read from it is checked as a
//! fresh answer is, and is trusted no longer than if the gateway had run on.
//!
//! Does not: matter for what is accepted. Without it (a folder that is not writable, a file that is lost) keys are fetched
//! again.

use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use oncehook_verify::KeyRequest;

use crate::private_file;

/// The largest file that is read. A provider has a handful of keys of a few kilobytes.
const MAX_FILE_BYTES: u64 = 16 << 20;

/// The longest answer that is remembered.
const MAX_ANSWER_BYTES: usize = 64 << 10;

/// One key, as its provider has answered.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct RememberedKey {
    pub(super) source: String,
    kind: Kind,
    url: String,
    #[serde(default)]
    id: String,
    /// Microseconds since 1970.
    pub(super) fetched_at: i64,
    pub(super) answer: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    Certificate,
    KeySet,
    KeyById,
}

impl RememberedKey {
    /// Nothing if the answer is no text, or too long to be worth remembering.
    pub(super) fn new(source: &str, request: &KeyRequest, answer: &[u8], fetched_at: i64) -> Option<Self> {
        let (kind, id) = match request {
            KeyRequest::Certificate { .. } => (Kind::Certificate, ""),
            KeyRequest::KeySet { id, .. } => (Kind::KeySet, id.as_str()),
            KeyRequest::KeyById { id, .. } => (Kind::KeyById, id.as_str()),
        };
        let answer = std::str::from_utf8(answer).ok().filter(|answer| answer.len() <= MAX_ANSWER_BYTES)?;
        Some(Self {
            source: source.to_owned(),
            kind,
            url: request.url().to_owned(),
            id: id.to_owned(),
            fetched_at,
            answer: answer.to_owned(),
        })
    }

    pub(super) fn request(&self) -> KeyRequest {
        let (url, id) = (self.url.clone(), self.id.clone());
        match self.kind {
            Kind::Certificate => KeyRequest::Certificate { url },
            Kind::KeySet => KeyRequest::KeySet { url, id },
            Kind::KeyById => KeyRequest::KeyById { url, id },
        }
    }

    fn is_same_key(&self, other: &Self) -> bool {
        (&self.source, self.kind, &self.url, &self.id) == (&other.source, other.kind, &other.url, &other.id)
    }
}

/// The file, and what it holds.
pub(in crate::http) struct RememberedKeys {
    path: PathBuf,
    keys: Mutex<Vec<RememberedKey>>,
}

impl RememberedKeys {
    /// Reads the file, if there is one. Blocks for the time of a small read.
    pub(in crate::http) fn open(path: PathBuf) -> Arc<Self> {
        Arc::new(Self { keys: Mutex::new(read(&path)), path })
    }

    pub(super) fn of(&self, source: &str) -> Vec<RememberedKey> {
        let keys = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        keys.iter().filter(|key| key.source == source).cloned().collect()
    }

    /// Remembers a key in place of what was known of it. The file is written in the background.
    pub(super) fn put(self: &Arc<Self>, key: RememberedKey) {
        self.change(move |keys| {
            keys.retain(|other| !other.is_same_key(&key));
            keys.push(key);
        });
    }

    pub(super) fn remove(self: &Arc<Self>, source: &str, request: &KeyRequest) {
        let Some(gone) = RememberedKey::new(source, request, b"", 0) else { return };
        self.change(move |keys| keys.retain(|other| !other.is_same_key(&gone)));
    }

    fn change(self: &Arc<Self>, change: impl FnOnce(&mut Vec<RememberedKey>) + Send + 'static) {
        let this = Arc::clone(self);
        tokio::task::spawn_blocking(move || {
            let mut keys = this.keys.lock().unwrap_or_else(PoisonError::into_inner);
            change(&mut keys);
            if let Err(error) = write(&this.path, &keys) {
                tracing::warn!(path = %this.path.display(), %error, "the keys of providers could not be written to their file; after a restart they are fetched again");
            }
        });
    }
}

fn read(path: &Path) -> Vec<RememberedKey> {
    let read = || -> std::io::Result<Vec<RememberedKey>> {
        let file = std::fs::File::open(path)?;
        if file.metadata()?.permissions().mode() & 0o022 != 0 {
            return Err(std::io::Error::other("users other than its owner may write to it"));
        }
        let mut text = Vec::new();
        file.take(MAX_FILE_BYTES).read_to_end(&mut text)?;
        Ok(serde_json::from_slice(&text)?)
    };
    match read() {
        Ok(keys) => keys,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "the file with the keys of providers is not used; they are fetched again");
            Vec::new()
        }
    }
}

fn write(path: &Path, keys: &[RememberedKey]) -> std::io::Result<()> {
    private_file::replace(path, &serde_json::to_vec(keys)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(id: &str) -> RememberedKey {
        let request = KeyRequest::KeyById { url: "https://a.example/".to_owned(), id: id.to_owned() };
        RememberedKey::new("plaid", &request, b"{}", 7).unwrap()
    }

    #[test]
    fn a_file_is_replaced_whole_and_belongs_to_its_owner() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("spool.keys.json");
        assert_eq!(read(&path), []);
        write(&path, &[key("a")]).unwrap();
        write(&path, &[key("a"), key("b")]).unwrap();
        assert_eq!(read(&path), [key("a"), key("b")]);
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
        assert_eq!(key("a").request(), KeyRequest::KeyById { url: "https://a.example/".into(), id: "a".into() });
    }

    #[test]
    fn a_file_that_others_may_write_to_or_that_is_broken_is_not_used() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("spool.keys.json");
        write(&path, &[key("a")]).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o660)).unwrap();
        assert_eq!(read(&path), []);
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        std::fs::write(&path, "[{").unwrap();
        assert_eq!(read(&path), []);
    }
}
