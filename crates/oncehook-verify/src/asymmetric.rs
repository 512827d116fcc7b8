//! Signatures with a public and a private half: Ed25519, ECDSA on P-256, RSA with PKCS #1 v1.5.
//!
//! Unlike HMAC, the signed text must be in one piece, so it is copied here once per request. Ed25519 keys are raw
//! 32-byte values; the others come as SubjectPublicKeyInfo (in base64, PEM, a certificate) or as a JSON Web Key.
//! RSA keys below 2048 bits are refused. Private keys are PKCS #8 in PEM and exist for tests and for sending.

use aws_lc_rs::{
    rand::SystemRandom,
    rsa::KeyPair as RsaKeyPair,
    signature::{self, ED25519, EcdsaKeyPair, Ed25519KeyPair, ParsedPublicKey, RsaPublicKeyComponents},
};

use crate::{certificate::pem_section, scheme::Algorithm};

/// The length of an Ed25519 public key and of a private seed.
const KEY_BYTES: usize = 32;

/// The length of an Ed25519 private key that carries its public half behind the seed.
const PAIR_BYTES: usize = 64;

/// The length of an Ed25519 signature, and of an ECDSA one written as two numbers.
pub(crate) const SIGNATURE_BYTES: usize = 64;

/// The shortest and longest lengths of a signature of an algorithm; nothing if it is not asymmetric.
pub(crate) const fn signature_lengths(algorithm: Algorithm) -> Option<(usize, usize)> {
    match algorithm {
        Algorithm::Ed25519 | Algorithm::EcdsaP256Fixed => Some((SIGNATURE_BYTES, SIGNATURE_BYTES)),
        // Two numbers of up to 33 bytes with their headers.
        Algorithm::EcdsaP256 => Some((8, 72)),
        // 2048 to 4096 bits.
        Algorithm::RsaSha1 | Algorithm::RsaSha256 => Some((256, 512)),
        _ => None,
    }
}

/// A public key, prepared once, for one algorithm.
#[derive(Debug)]
pub(crate) struct PublicKey {
    key: Key,
    lengths: (usize, usize),
}

#[derive(Debug)]
enum Key {
    Parsed(ParsedPublicKey),
    Rsa { components: RsaPublicKeyComponents<Vec<u8>>, sha1: bool },
}

impl PublicKey {
    /// Takes the bytes of a key: raw for Ed25519, SubjectPublicKeyInfo or an uncompressed point otherwise.
    pub(crate) fn new(algorithm: Algorithm, bytes: &[u8]) -> Result<Self, &'static str> {
        let lengths = signature_lengths(algorithm).ok_or("its algorithm has no public keys")?;
        let parsed = match algorithm {
            Algorithm::Ed25519 if bytes.len() != KEY_BYTES => {
                return Err("an Ed25519 public key has 32 bytes");
            }
            Algorithm::Ed25519 => ParsedPublicKey::new(&ED25519, bytes),
            Algorithm::EcdsaP256 => ParsedPublicKey::new(&signature::ECDSA_P256_SHA256_ASN1, bytes),
            Algorithm::EcdsaP256Fixed => ParsedPublicKey::new(&signature::ECDSA_P256_SHA256_FIXED, bytes),
            Algorithm::RsaSha1 => ParsedPublicKey::new(&signature::RSA_PKCS1_2048_8192_SHA1_FOR_LEGACY_USE_ONLY, bytes),
            _ => ParsedPublicKey::new(&signature::RSA_PKCS1_2048_8192_SHA256, bytes),
        };
        match parsed {
            Ok(key) => Ok(Self { key: Key::Parsed(key), lengths }),
            Err(_) => Err("it is not a public key of this algorithm"),
        }
    }

    /// An RSA key as a JSON Web Key writes it.
    pub(crate) fn rsa(modulus: Vec<u8>, exponent: Vec<u8>) -> Self {
        let components = RsaPublicKeyComponents { n: modulus, e: exponent };
        Self { key: Key::Rsa { components, sha1: false }, lengths: (256, 512) }
    }

    /// Can a signature have this length?
    pub(crate) const fn fits(&self, length: usize) -> bool {
        self.lengths.0 <= length && length <= self.lengths.1
    }

    pub(crate) fn verifies(&self, message: &[u8], signature: &[u8]) -> bool {
        self.fits(signature.len())
            && match &self.key {
                Key::Parsed(key) => key.verify_sig(message, signature).is_ok(),
                Key::Rsa { components, sha1: false } => {
                    components.verify(&signature::RSA_PKCS1_2048_8192_SHA256, message, signature).is_ok()
                }
                Key::Rsa { sha1: true, .. } => false,
            }
    }
}

/// A private key, for signing only.
pub(crate) enum PrivateKey {
    Ed25519(Ed25519KeyPair),
    Ecdsa(EcdsaKeyPair),
    Rsa(RsaKeyPair),
}

impl PrivateKey {
    /// Takes the text of a PEM file; for Ed25519 also a seed (32 bytes, or 64 with the public key).
    pub(crate) fn new(algorithm: Algorithm, bytes: &[u8]) -> Result<Self, &'static str> {
        let pkcs8 = || pem_section(bytes, "PRIVATE KEY").ok_or("to sign, a private key in PEM (PKCS #8) is needed");
        match algorithm {
            Algorithm::Ed25519 => {
                let pair = match (bytes.len(), pkcs8()) {
                    (KEY_BYTES, _) => Ed25519KeyPair::from_seed_unchecked(bytes),
                    (PAIR_BYTES, _) => Ed25519KeyPair::from_seed_unchecked(bytes.get(..KEY_BYTES).unwrap_or_default()),
                    (_, Ok(pkcs8)) => Ed25519KeyPair::from_pkcs8_maybe_unchecked(&pkcs8),
                    _ => return Err("an Ed25519 private key has 32 bytes (or 64 with its public key)"),
                };
                pair.map(Self::Ed25519).map_err(|_| "it is not an Ed25519 private key")
            }
            Algorithm::EcdsaP256 => EcdsaKeyPair::from_pkcs8(&signature::ECDSA_P256_SHA256_ASN1_SIGNING, &pkcs8()?)
                .map(Self::Ecdsa)
                .map_err(|_| "it is not a private key on P-256"),
            Algorithm::EcdsaP256Fixed => {
                EcdsaKeyPair::from_pkcs8(&signature::ECDSA_P256_SHA256_FIXED_SIGNING, &pkcs8()?)
                    .map(Self::Ecdsa)
                    .map_err(|_| "it is not a private key on P-256")
            }
            Algorithm::RsaSha256 => {
                RsaKeyPair::from_pkcs8(&pkcs8()?).map(Self::Rsa).map_err(|_| "it is not an RSA private key")
            }
            Algorithm::RsaSha1 => Err("signatures with SHA-1 are checked, but no longer made"),
            _ => Err("its algorithm has no private keys"),
        }
    }

    /// The signature; nothing if the system has no randomness to give.
    pub(crate) fn sign(&self, message: &[u8]) -> Option<Vec<u8>> {
        let random = SystemRandom::new();
        match self {
            Self::Ed25519(key) => Some(key.sign(message).as_ref().to_vec()),
            Self::Ecdsa(key) => Some(key.sign(&random, message).ok()?.as_ref().to_vec()),
            Self::Rsa(key) => {
                let mut signature = vec![0; key.public_modulus_len()];
                key.sign(&signature::RSA_PKCS1_SHA256, &random, message, &mut signature).ok()?;
                Some(signature)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEED: &str = "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60";
    const PUBLIC: &str = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a";

    fn seed() -> PrivateKey {
        PrivateKey::new(Algorithm::Ed25519, &hex::decode(SEED).unwrap()).unwrap()
    }

    #[test]
    fn signs_like_the_first_test_of_rfc_8032() {
        let signature = seed().sign(b"").unwrap();
        assert_eq!(
            hex::encode(&signature),
            "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b"
        );
        let public = PublicKey::new(Algorithm::Ed25519, &hex::decode(PUBLIC).unwrap()).unwrap();
        assert!(public.verifies(b"", &signature));
        assert!(!public.verifies(b"x", &signature));
        assert!(!public.verifies(b"", &signature[..63]));
        assert!(!public.verifies(b"", b""));
    }

    #[test]
    fn seed_and_public_key_together_are_the_same_key() {
        let pair = hex::decode(format!("{SEED}{PUBLIC}")).unwrap();
        let pair = PrivateKey::new(Algorithm::Ed25519, &pair).unwrap();
        assert_eq!(pair.sign(b"m"), seed().sign(b"m"));
    }

    #[test]
    fn a_pem_file_holds_the_same_key() {
        // As openssl writes it: sixteen bytes of headers, then the seed.
        let der = hex::decode(format!("302e020100300506032b657004220420{SEED}")).unwrap();
        let pem = format!(
            "-----BEGIN PRIVATE KEY-----\n{}\n-----END PRIVATE KEY-----\n",
            base64::Engine::encode(&base64::prelude::BASE64_STANDARD, der)
        );
        let key = PrivateKey::new(Algorithm::Ed25519, pem.as_bytes()).unwrap();
        assert_eq!(key.sign(b"m"), seed().sign(b"m"));
        let p256 = rcgen::KeyPair::generate().unwrap().serialize_pem();
        assert!(PrivateKey::new(Algorithm::Ed25519, p256.as_bytes()).is_err());
    }

    #[test]
    fn keys_have_one_length() {
        assert!(PublicKey::new(Algorithm::Ed25519, &[1; 31]).is_err());
        assert!(PublicKey::new(Algorithm::Ed25519, &[1; 33]).is_err());
        assert!(PrivateKey::new(Algorithm::Ed25519, &[1; 33]).is_err());
        assert!(PrivateKey::new(Algorithm::Ed25519, &[]).is_err());
    }

    #[test]
    fn a_key_of_another_kind_is_refused() {
        let p256 = rcgen::KeyPair::generate().unwrap();
        let spki = rcgen::PublicKeyData::subject_public_key_info(&p256);
        let public = PublicKey::new(Algorithm::EcdsaP256, &spki).unwrap();
        let private = PrivateKey::new(Algorithm::EcdsaP256, p256.serialize_pem().as_bytes()).unwrap();
        let signature = private.sign(b"m").unwrap();
        assert!(public.verifies(b"m", &signature) && !public.verifies(b"n", &signature));
        assert!(PublicKey::new(Algorithm::RsaSha256, &spki).is_err());
        assert!(PrivateKey::new(Algorithm::RsaSha256, p256.serialize_pem().as_bytes()).is_err());
        assert!(PrivateKey::new(Algorithm::RsaSha1, b"x").is_err());
        assert!(PublicKey::new(Algorithm::HmacSha256, &spki).is_err());
    }
}
