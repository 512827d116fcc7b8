//! The texts that a source's key signs for a handshake, told apart from everything that its sender signs.
//!
//! Some providers ask a gateway to sign a challenge, without a signature of their own (Braintree, X). The answer is a MAC
//! with the key that also checks webhooks, and anybody can ask. So a scheme says which texts may be a challenge, and the
//! verifier keeps two promises with one rule: it signs nothing of another shape, and it refuses every request whose signed
//! content has that shape. An answer to a challenge is therefore never a signature of a request.
//!
//! ```toml
//! challenge = { chars = "hex-lower", min = 20, max = 32 }   # in [verify]; chars: hex-lower | plain
//! ```

use serde::Deserialize;

/// The longest challenge that a scheme may allow.
const MAX_BYTES: usize = 512;

/// Which texts are challenges.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ChallengeShape {
    chars: Chars,
    /// In bytes, as `max`; both included.
    min: usize,
    max: usize,
}

/// The characters of a challenge. Each set leaves out what a genuine signed content always holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Chars {
    /// `0-9a-f`
    HexLower,
    /// Letters, digits and `_ . ~ + / = -`.
    Plain,
}

impl ChallengeShape {
    /// Checks what is written in a scheme.
    pub(crate) fn check(&self) -> Result<(), String> {
        match (1..=MAX_BYTES).contains(&self.min) && (self.min..=MAX_BYTES).contains(&self.max) {
            true => Ok(()),
            false => Err(format!("challenge: write 1 <= min <= max <= {MAX_BYTES}")),
        }
    }

    /// Do the pieces, one after another, make a text of this shape?
    pub(crate) fn fits<P: AsRef<[u8]>>(&self, pieces: &[P]) -> bool {
        let length: usize = pieces.iter().map(|piece| piece.as_ref().len()).sum();
        // The length comes first: a body is usually longer than any challenge, and then none of it is looked at.
        (self.min..=self.max).contains(&length)
            && pieces.iter().flat_map(|piece| piece.as_ref()).all(|byte| self.chars.contain(*byte))
    }
}

impl Chars {
    const fn contain(self, byte: u8) -> bool {
        match self {
            Self::HexLower => matches!(byte, b'0'..=b'9' | b'a'..=b'f'),
            Self::Plain => is_plain(byte),
        }
    }
}

/// Letters, digits and what stands in tokens and base64: nothing that a browser, a terminal or a JSON reader could take
/// for more than text.
pub(crate) const fn is_plain(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'~' | b'+' | b'/' | b'=' | b'-')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(text: &str) -> ChallengeShape {
        toml::from_str(text).unwrap()
    }

    #[test]
    fn pieces_are_one_text() {
        let hex = shape("chars = \"hex-lower\"\nmin = 4\nmax = 6");
        assert!(hex.fits(&["ab", "", "12"]));
        assert!(hex.fits(&["abcdef"]));
        for other in ["abc", "abcdefa", "ABCD", "abc-", "abcg", "", "ab\n12"] {
            assert!(!hex.fits(&[other]), "{other:?}");
        }
        let plain = shape("chars = \"plain\"\nmin = 1\nmax = 512");
        assert!(plain.fits(&["aZ0_.~+/=-"]));
        for other in ["{}", "a b", "\"a\"", "", "a:b", "a&b", &"a".repeat(513)] {
            assert!(!plain.fits(&[other]), "{other:?}");
        }
    }

    #[test]
    fn a_shape_that_makes_no_sense_is_refused() {
        for text in ["min = 0\nmax = 3", "min = 4\nmax = 3", "min = 1\nmax = 513"] {
            assert!(shape(&format!("chars = \"plain\"\n{text}")).check().is_err(), "{text}");
        }
    }
}
