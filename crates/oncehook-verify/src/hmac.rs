//! HMAC and plain tokens: symmetric secrets.
//!
//! The MAC is fed piece by piece, so the body is not copied. Comparison happens on decoded bytes, after the
//! length, in constant time; there is no comparison of prefixes.

use aws_lc_rs::{constant_time, hmac};
use zeroize::Zeroizing;

use crate::{key, scheme::Algorithm};

/// A key for HMAC, prepared once. Boxed because it holds both inner hash states.
pub(crate) struct HmacKey(Box<hmac::Key>);

impl HmacKey {
    /// Nothing if the algorithm is not an HMAC.
    pub(crate) fn new(algorithm: Algorithm, key: &[u8]) -> Option<Self> {
        let algorithm = match algorithm {
            Algorithm::HmacSha1 => hmac::HMAC_SHA1_FOR_LEGACY_USE_ONLY,
            Algorithm::HmacSha256 => hmac::HMAC_SHA256,
            Algorithm::HmacSha384 => hmac::HMAC_SHA384,
            Algorithm::HmacSha512 => hmac::HMAC_SHA512,
            _ => return None,
        };
        Some(Self(Box::new(hmac::Key::new(algorithm, key))))
    }

    /// The length of this key's MACs in bytes.
    pub(crate) fn mac_len(&self) -> usize {
        self.0.algorithm().tag_len()
    }

    /// The MAC over the pieces, one after another.
    pub(crate) fn mac<P: AsRef<[u8]>>(&self, pieces: &[P]) -> hmac::Tag {
        let mut context = hmac::Context::with_key(&self.0);
        for piece in pieces {
            context.update(piece.as_ref());
        }
        context.sign()
    }
}

/// A secret that is hashed before the text, without HMAC (HubSpot v1 and v2). Weaker than HMAC by construction; it is
/// here because the sender has nothing else.
pub(crate) struct ConcatKey(Zeroizing<Vec<u8>>);

impl ConcatKey {
    pub(crate) fn new(key: &[u8]) -> Self {
        Self(Zeroizing::new(key.to_vec()))
    }

    pub(crate) fn hash<P: AsRef<[u8]>>(&self, pieces: &[P]) -> [u8; 32] {
        let all: Vec<&[u8]> = std::iter::once(self.0.as_slice()).chain(pieces.iter().map(AsRef::as_ref)).collect();
        key::digest_of(&all)
    }
}

/// Are the two equal? Takes the same time wherever they differ; different lengths are never equal.
pub(crate) fn equal(left: &[u8], right: &[u8]) -> bool {
    left.len() == right.len() && constant_time::verify_slices_are_equal(left, right).is_ok()
}

/// A token is kept and compared as its digest, so that neither its length nor its text shows in the time
/// a comparison takes.
pub(crate) struct TokenKey([u8; 32]);

impl TokenKey {
    pub(crate) fn new(token: &[u8]) -> Self {
        Self(key::digest(token))
    }

    pub(crate) fn matches(&self, offered: &[u8]) -> bool {
        equal(&self.0, &key::digest(offered))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_one_message() {
        let key = HmacKey::new(Algorithm::HmacSha256, b"key").unwrap();
        assert_eq!(key.mac(&[&b"ab"[..], b"", b"c"]).as_ref(), key.mac(&[b"abc"]).as_ref());
        assert_eq!(key.mac_len(), 32);
    }

    #[test]
    fn prefixes_are_not_equal() {
        assert!(equal(b"abc", b"abc"));
        assert!(!equal(b"abc", b"ab"));
        assert!(!equal(b"ab", b"abc"));
        assert!(!equal(b"abc", b"abd"));
        assert!(!equal(b"abc", b""));
    }

    #[test]
    fn tokens_match_whole() {
        let token = TokenKey::new(b"glpat");
        assert!(token.matches(b"glpat"));
        assert!(!token.matches(b"glpa"));
        assert!(!token.matches(b"GLPAT"));
    }
}
