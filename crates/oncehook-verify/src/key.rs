//! The idempotency key of an event: 1 to 255 bytes, compared byte by byte.
//!
//! An id is kept as it is: no trimming, no folding of case, no Unicode normalisation, and no hashing that
//! would scatter time-ordered ids. Only an id that does not fit is replaced by its digest. Different ids
//! therefore give different keys, and so do different lists of parts.

use std::{borrow::Cow, fmt};

use aws_lc_rs::digest as sha;

/// The longest key in bytes.
pub const MAX_KEY_BYTES: usize = 255;

/// Keys made from the digest of a body begin with this.
const BODY_DIGEST_PREFIX: &str = "sha256:";

/// Keys made from the digest of an id begin with this.
const ID_DIGEST_PREFIX: &str = "sha256-id:";

/// How [`EventKey::display`] marks keys that are not printable text.
const HEX_PREFIX: &str = "hex:";

/// The key that makes an event unique within its source.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EventKey(Box<[u8]>);

impl EventKey {
    /// The key of an id that consists of these parts. No part may be missing, and a lone part may not be
    /// empty: the caller decides what happens then ([`crate::MissingKey`]).
    ///
    /// One part stands as it is. Several are written with their lengths (`2:ab,1:c`), so that `ab`, `c` and
    /// `a`, `bc` differ. A result that is too long, or that looks like one of our own digests, becomes
    /// `sha256-id:` and the digest of it.
    #[must_use]
    pub fn from_parts(parts: &[&[u8]]) -> Self {
        match parts {
            [one] if !one.is_empty() => Self::fit(Cow::Borrowed(one)),
            _ => {
                let mut joined = Vec::with_capacity(parts.iter().map(|part| part.len() + 6).sum());
                for (index, part) in parts.iter().enumerate() {
                    if index > 0 {
                        joined.push(b',');
                    }
                    joined.extend_from_slice(part.len().to_string().as_bytes());
                    joined.push(b':');
                    joined.extend_from_slice(part);
                }
                if joined.is_empty() {
                    // No parts at all: still not an empty key.
                    joined.extend_from_slice(b"0:");
                }
                Self::fit(Cow::Owned(joined))
            }
        }
    }

    /// The key of an event that is known by its content only.
    #[must_use]
    pub fn of_digest(digest: &[u8; 32]) -> Self {
        Self(format!("{BODY_DIGEST_PREFIX}{}", hex::encode(digest)).into_bytes().into())
    }

    /// Whether it is one that [`of_digest`](Self::of_digest) made. No sender's id looks like that.
    #[must_use]
    pub fn is_of_digest(&self) -> bool {
        self.0.starts_with(BODY_DIGEST_PREFIX.as_bytes())
    }

    /// A key read back from storage; nothing if it is empty or too long.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let fits = !bytes.is_empty() && bytes.len() <= MAX_KEY_BYTES;
        fits.then(|| Self(bytes.into()))
    }

    /// The key's bytes, for storage and comparison.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The key for people and JSON: its text if it is printable, else `hex:` and its bytes. Different keys
    /// never look the same in bytes, and [`EventKey::from_display`] reads the text back.
    #[must_use]
    pub fn display(&self) -> Cow<'_, str> {
        match std::str::from_utf8(&self.0) {
            Ok(text) if !text.chars().any(char::is_control) && !text.starts_with(HEX_PREFIX) => Cow::Borrowed(text),
            _ => Cow::Owned(format!("{HEX_PREFIX}{}", hex::encode(&self.0))),
        }
    }

    /// Reads what [`EventKey::display`] wrote.
    #[must_use]
    pub fn from_display(text: &str) -> Option<Self> {
        match text.strip_prefix(HEX_PREFIX) {
            Some(digits) => Self::from_bytes(&hex::decode(digits).ok()?),
            None => Self::from_bytes(text.as_bytes()),
        }
    }

    fn fit(bytes: Cow<'_, [u8]>) -> Self {
        let looks_like_ours =
            bytes.starts_with(BODY_DIGEST_PREFIX.as_bytes()) || bytes.starts_with(ID_DIGEST_PREFIX.as_bytes());
        if bytes.len() <= MAX_KEY_BYTES && !looks_like_ours {
            return Self(bytes.into_owned().into());
        }
        Self(format!("{ID_DIGEST_PREFIX}{}", hex::encode(digest(&bytes))).into_bytes().into())
    }
}

impl fmt::Debug for EventKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EventKey({:?})", self.display())
    }
}

impl fmt::Display for EventKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.display())
    }
}

/// SHA-256.
#[must_use]
pub fn digest(bytes: &[u8]) -> [u8; 32] {
    digest_of(&[bytes])
}

/// SHA-256 over several pieces, one after another.
pub(crate) fn digest_of(pieces: &[&[u8]]) -> [u8; 32] {
    let mut context = sha::Context::new(&sha::SHA256);
    for piece in pieces {
        context.update(piece);
    }
    let mut bytes = [0; 32];
    // SHA-256 gives 32 bytes, always.
    bytes.copy_from_slice(context.finish().as_ref());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_part_stays_as_it_is() {
        for id in [&b"evt_1"[..], b"EVT_1", b"evt_1 ", b"\0", b"\xff\xfe", "\u{e9}".as_bytes(), "e\u{301}".as_bytes()] {
            assert_eq!(EventKey::from_parts(&[id]).as_bytes(), id);
        }
    }

    #[test]
    fn parts_carry_their_lengths() {
        assert_eq!(EventKey::from_parts(&[b"ab", b"c"]).as_bytes(), b"2:ab,1:c");
        assert_ne!(EventKey::from_parts(&[b"ab", b"c"]), EventKey::from_parts(&[b"a", b"bc"]));
        assert_ne!(EventKey::from_parts(&[b"a", b""]), EventKey::from_parts(&[b"", b"a"]));
    }

    #[test]
    fn long_ids_are_hashed_and_never_cut() {
        let longest = vec![b'a'; MAX_KEY_BYTES];
        assert_eq!(EventKey::from_parts(&[&longest]).as_bytes(), longest);
        let longer = vec![b'a'; MAX_KEY_BYTES + 1];
        let longer_still = vec![b'a'; MAX_KEY_BYTES + 2];
        assert!(EventKey::from_parts(&[&longer]).as_bytes().starts_with(b"sha256-id:"));
        assert_ne!(EventKey::from_parts(&[&longer]), EventKey::from_parts(&[&longer_still]));
    }

    #[test]
    fn an_id_cannot_pose_as_a_digest() {
        let of_body = EventKey::of_digest(&digest(b"body"));
        assert_ne!(EventKey::from_parts(&[of_body.as_bytes()]), of_body);
        let of_long_id = EventKey::from_parts(&[&[b'a'; 300]]);
        assert_ne!(EventKey::from_parts(&[of_long_id.as_bytes()]), of_long_id);
    }

    #[test]
    fn display_reads_back() {
        for id in [&b"evt_1"[..], b"\0", b"\xff", b"hex:00", b"a\nb", b"hex:", "\u{9c}".as_bytes()] {
            let key = EventKey::from_parts(&[id]);
            assert_eq!(EventKey::from_display(&key.display()), Some(key));
        }
        assert_eq!(EventKey::from_parts(&[b"\x00\xff"]).display(), "hex:00ff");
    }

    #[test]
    fn keys_from_storage_are_checked() {
        assert_eq!(EventKey::from_bytes(b""), None);
        assert_eq!(EventKey::from_bytes(&[0; MAX_KEY_BYTES + 1]), None);
        assert!(EventKey::from_bytes(&[0; MAX_KEY_BYTES]).is_some());
    }

    #[test]
    fn the_digest_is_sha_256() {
        assert_eq!(hex::encode(digest(b"")), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
        assert_eq!(digest_of(&[b"a", b"bc"]), digest(b"abc"));
    }
}
