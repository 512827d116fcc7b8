//! How signature bytes are written as text, and how secrets are.
//!
//! Signatures are read strictly: exact alphabet, exact padding, no white space. There is one defined
//! form per scheme; no second form is tried. Secrets are configuration, so a missing `=` at their end is
//! forgiven.

use base64::{
    Engine as _,
    alphabet::STANDARD as STANDARD_ALPHABET,
    engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
    prelude::{BASE64_STANDARD, BASE64_URL_SAFE_NO_PAD},
};
use serde::Deserialize;
use zeroize::Zeroizing;

use crate::certificate::pem_section;

/// Room for the longest signature (RSA with 4096 bits), rounded up to what the base64 decoder asks for.
const DECODED_ROOM: usize = 516;

/// Longer text cannot be a signature that any algorithm here makes.
const MAX_SIGNATURE_TEXT: usize = 1_024;

const BASE64_FORGIVING_PADDING: GeneralPurpose = GeneralPurpose::new(
    &STANDARD_ALPHABET,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// How the signature's bytes are written in its header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Encoding {
    /// Two hexadecimal digits per byte, either case.
    Hex,
    /// Standard alphabet, padded.
    Base64,
    /// URL-safe alphabet, not padded.
    Base64Url,
}

/// The bytes of one signature, on the stack.
pub(crate) struct SignatureBytes {
    room: [u8; DECODED_ROOM],
    len: usize,
}

impl SignatureBytes {
    pub(crate) fn as_slice(&self) -> &[u8] {
        self.room.get(..self.len).unwrap_or_default()
    }
}

impl Encoding {
    /// Reads a signature; nothing if the text is not exactly of this encoding.
    pub(crate) fn decode(self, text: &str) -> Option<SignatureBytes> {
        if text.is_empty() || text.len() > MAX_SIGNATURE_TEXT {
            return None;
        }
        let mut room = [0; DECODED_ROOM];
        let len = match self {
            Self::Hex => {
                let len = text.len() / 2;
                hex::decode_to_slice(text, room.get_mut(..len)?).ok()?;
                len
            }
            Self::Base64 => BASE64_STANDARD.decode_slice(text, &mut room).ok()?,
            Self::Base64Url => BASE64_URL_SAFE_NO_PAD.decode_slice(text, &mut room).ok()?,
        };
        Some(SignatureBytes { room, len })
    }

    /// Writes a signature.
    pub(crate) fn encode(self, bytes: &[u8]) -> String {
        match self {
            Self::Hex => hex::encode(bytes),
            Self::Base64 => BASE64_STANDARD.encode(bytes),
            Self::Base64Url => BASE64_URL_SAFE_NO_PAD.encode(bytes),
        }
    }
}

/// How the text of a secret becomes the bytes of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum KeyEncoding {
    /// The text's own bytes.
    Utf8,
    /// Hexadecimal digits.
    Hex,
    /// Standard base64; padding may be missing.
    Base64,
    /// The SHA-1 of the text (Braintree).
    Sha1,
    /// A public key in PEM; for signing, a private one.
    Pem,
}

impl KeyEncoding {
    /// The key's bytes, or what is wrong with the text.
    pub(crate) fn decode(self, text: &str) -> Result<Zeroizing<Vec<u8>>, &'static str> {
        let bytes = match self {
            Self::Utf8 => text.as_bytes().to_vec(),
            Self::Hex => hex::decode(text).map_err(|_| "it is not hexadecimal")?,
            Self::Base64 => BASE64_FORGIVING_PADDING.decode(text).map_err(|_| "it is not base64")?,
            Self::Sha1 => aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA1_FOR_LEGACY_USE_ONLY, text.as_bytes())
                .as_ref()
                .to_vec(),
            Self::Pem => pem_section(text.as_bytes(), "PUBLIC KEY").ok_or("it is not a public key in PEM")?,
        };
        if bytes.is_empty() {
            return Err("it is empty");
        }
        Ok(Zeroizing::new(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoded(encoding: Encoding, text: &str) -> Option<Vec<u8>> {
        encoding.decode(text).map(|bytes| bytes.as_slice().to_vec())
    }

    #[test]
    fn hex_takes_either_case_and_whole_bytes_only() {
        assert_eq!(decoded(Encoding::Hex, "00fF"), Some(vec![0, 255]));
        for text in ["", "0", "000", "0g", "0x00", " 00", "00 "] {
            assert_eq!(decoded(Encoding::Hex, text), None, "{text:?}");
        }
    }

    #[test]
    fn base64_is_strict() {
        assert_eq!(decoded(Encoding::Base64, "+/8="), Some(vec![0xfb, 0xff]));
        for text in ["+/8", "-_8=", "+/9=", "+/8==", " +/8=", "+/8=\n", "=", "+/8=+/8="] {
            assert_eq!(decoded(Encoding::Base64, text), None, "{text:?}");
        }
        assert_eq!(decoded(Encoding::Base64Url, "-_8"), Some(vec![0xfb, 0xff]));
        assert_eq!(decoded(Encoding::Base64Url, "-_8="), None);
    }

    #[test]
    fn long_text_is_refused_before_decoding() {
        for encoding in [Encoding::Hex, Encoding::Base64, Encoding::Base64Url] {
            assert_eq!(decoded(encoding, &"a".repeat(4_096)), None);
            let longest = encoding.encode(&[7; 512]);
            assert_eq!(decoded(encoding, &longest), Some(vec![7; 512]));
        }
    }

    #[test]
    fn keys_forgive_missing_padding() {
        assert_eq!(*KeyEncoding::Base64.decode("+/8").unwrap(), vec![0xfb, 0xff]);
        assert!(KeyEncoding::Base64.decode("").is_err());
        assert!(KeyEncoding::Base64.decode("not base64!").is_err());
        assert!(KeyEncoding::Hex.decode("abc").is_err());
    }
}
