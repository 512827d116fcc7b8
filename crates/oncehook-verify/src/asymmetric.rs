//! Ed25519: a public key checks what a private key signed.
//!
//! Unlike HMAC, the signed text must be in one piece, so it is copied here once per request. Keys are
//! raw 32-byte values; no certificates and no key URLs.

use aws_lc_rs::signature::{ED25519, Ed25519KeyPair, ParsedPublicKey};

/// The length of a public key and of a private seed.
const KEY_BYTES: usize = 32;

/// The length of a private key that carries its public half behind the seed.
const PAIR_BYTES: usize = 64;

/// The length of a signature.
pub(crate) const SIGNATURE_BYTES: usize = 64;

/// A public key, prepared once.
pub(crate) struct PublicKey(ParsedPublicKey);

impl PublicKey {
    pub(crate) fn new(bytes: &[u8]) -> Result<Self, &'static str> {
        if bytes.len() != KEY_BYTES {
            return Err("an Ed25519 public key has 32 bytes");
        }
        ParsedPublicKey::new(&ED25519, bytes).map(Self).map_err(|_| "it is not an Ed25519 public key")
    }

    pub(crate) fn verifies(&self, message: &[u8], signature: &[u8]) -> bool {
        signature.len() == SIGNATURE_BYTES && self.0.verify_sig(message, signature).is_ok()
    }
}

/// A private key, for signing only.
pub(crate) struct PrivateKey(Ed25519KeyPair);

impl PrivateKey {
    /// Takes a seed of 32 bytes, or the 64 bytes of seed and public key.
    pub(crate) fn new(bytes: &[u8]) -> Result<Self, &'static str> {
        let seed = match bytes.len() {
            KEY_BYTES => bytes,
            PAIR_BYTES => bytes.get(..KEY_BYTES).unwrap_or_default(),
            _ => return Err("an Ed25519 private key has 32 bytes (or 64 with its public key)"),
        };
        Ed25519KeyPair::from_seed_unchecked(seed).map(Self).map_err(|_| "it is not an Ed25519 private key")
    }

    pub(crate) fn sign(&self, message: &[u8]) -> Vec<u8> {
        self.0.sign(message).as_ref().to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEED: &str = "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60";
    const PUBLIC: &str = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a";

    #[test]
    fn signs_like_the_first_test_of_rfc_8032() {
        let private = PrivateKey::new(&hex::decode(SEED).unwrap()).unwrap();
        let signature = private.sign(b"");
        assert_eq!(
            hex::encode(&signature),
            "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b"
        );
        let public = PublicKey::new(&hex::decode(PUBLIC).unwrap()).unwrap();
        assert!(public.verifies(b"", &signature));
        assert!(!public.verifies(b"x", &signature));
        assert!(!public.verifies(b"", &signature[..63]));
        assert!(!public.verifies(b"", b""));
    }

    #[test]
    fn seed_and_public_key_together_are_the_same_key() {
        let pair = hex::decode(format!("{SEED}{PUBLIC}")).unwrap();
        let seed = hex::decode(SEED).unwrap();
        assert_eq!(PrivateKey::new(&pair).unwrap().sign(b"m"), PrivateKey::new(&seed).unwrap().sign(b"m"));
    }

    #[test]
    fn keys_have_one_length() {
        assert!(PublicKey::new(&[1; 31]).is_err());
        assert!(PublicKey::new(&[1; 33]).is_err());
        assert!(PrivateKey::new(&[1; 33]).is_err());
        assert!(PrivateKey::new(&[]).is_err());
    }
}
