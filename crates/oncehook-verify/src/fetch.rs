//! Keys that a sender keeps at an address: which one a request needs, where it may come from, and what an answer holds.
//!
//! Nothing is fetched here. A verifier says what it needs ([`KeyRequest`]), somebody who may open connections gets it, and
//! [`crate::Verifier::read_key`] makes a [`FetchedKey`] of the answer. Where a request names the address itself (Amazon
//! SNS, PayPal), the address is held to fixed hosts first: https, no port, no user, no query, the host by name.

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use serde::Deserialize;

use crate::{
    asymmetric::PublicKey,
    certificate::Certificate,
    rejection::Rejection,
    scheme::Algorithm,
    time::UnixMicros,
    view::{Field, View},
};

/// The longest address that is taken from a request.
const MAX_URL_BYTES: usize = 512;

/// The longest id of a key.
const MAX_KEY_ID_BYTES: usize = 128;

/// A key that is needed to check a request.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum KeyRequest {
    /// GET a certificate in PEM. The address was in the request and has been held to the scheme's hosts.
    Certificate {
        /// Where it is.
        url: String,
    },
    /// GET a set of JSON Web Keys from a fixed address.
    KeySet {
        /// Where it is.
        url: String,
        /// Which of the keys is needed.
        id: String,
    },
    /// POST `client_id`, `secret` and `key_id` to a fixed address, as Plaid wants it.
    KeyById {
        /// Where to ask.
        url: String,
        /// Which key is needed.
        id: String,
    },
}

impl KeyRequest {
    /// The address that is called.
    #[must_use]
    pub fn url(&self) -> &str {
        match self {
            Self::Certificate { url } | Self::KeySet { url, .. } | Self::KeyById { url, .. } => url,
        }
    }
}

/// Why the answer to a [`KeyRequest`] is no usable key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the fetched key cannot be used: {0}")]
pub struct KeyError(pub(crate) &'static str);

/// A public key that was fetched, and how long it may be used.
#[derive(Debug)]
pub struct FetchedKey {
    keys: Vec<(Algorithm, PublicKey)>,
    not_before: UnixMicros,
    not_after: UnixMicros,
}

impl FetchedKey {
    /// When the key says it ends.
    #[must_use]
    pub const fn not_after(&self) -> UnixMicros {
        self.not_after
    }

    /// The key for an algorithm, if it is valid now.
    pub(crate) fn at(&self, algorithm: Algorithm, now: UnixMicros) -> Option<&PublicKey> {
        if now < self.not_before || self.not_after < now {
            return None;
        }
        self.keys.iter().find_map(|(found, key)| (*found == algorithm).then_some(key))
    }
}

/// How a scheme's keys are fetched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum FetchRule {
    /// The request names the certificate's address.
    Certificate { from: Field, hosts: Vec<HostRule>, common_name: Option<String> },
    /// Keys by id, all at one address.
    KeySet { url: String },
    /// Keys by id, asked for one by one.
    KeyById { url: String },
}

/// A host, with `*` for one or more labels at its beginning, or for exactly one inside; and how the path begins and ends.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct HostRule {
    host: String,
    #[serde(default)]
    path_prefix: String,
    #[serde(default)]
    path_suffix: String,
}

impl FetchRule {
    /// What is needed for this request. `key_id` is that of a token.
    pub(crate) fn request(&self, view: &View<'_>, key_id: Option<&str>) -> Result<KeyRequest, Rejection> {
        let id = || {
            let id = key_id.ok_or(Rejection::KeyUnknown)?;
            let plain = id.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.'));
            if id.is_empty() || id.len() > MAX_KEY_ID_BYTES || !plain {
                return Err(Rejection::KeyUnknown);
            }
            Ok(id.to_owned())
        };
        match self {
            Self::Certificate { from, hosts, .. } => {
                let url = from.read(view)?;
                if !hosts.iter().any(|rule| rule.allows(&url)) {
                    return Err(Rejection::KeyUrlRefused);
                }
                Ok(KeyRequest::Certificate { url: url.into_owned() })
            }
            Self::KeySet { url } => Ok(KeyRequest::KeySet { url: url.clone(), id: id()? }),
            Self::KeyById { url } => Ok(KeyRequest::KeyById { url: url.clone(), id: id()? }),
        }
    }

    /// Makes keys of an answer.
    pub(crate) fn read(&self, request: &KeyRequest, answer: &[u8]) -> Result<FetchedKey, KeyError> {
        match (self, request) {
            (Self::Certificate { common_name, .. }, KeyRequest::Certificate { .. }) => {
                certificate_key(answer, common_name.as_deref())
            }
            (Self::KeySet { .. }, KeyRequest::KeySet { id, .. }) => {
                let set: KeySet =
                    serde_json::from_slice(answer).map_err(|_| KeyError("it is not a set of JSON Web Keys"))?;
                let mut named = set.keys.into_iter().filter(|key| key.kid.as_deref() == Some(id));
                match (named.next(), named.next()) {
                    (Some(key), None) => key.into_fetched(),
                    (None, _) => Err(KeyError("no key has the wanted id")),
                    (Some(_), Some(_)) => Err(KeyError("two keys have the wanted id")),
                }
            }
            (Self::KeyById { .. }, KeyRequest::KeyById { id, .. }) => {
                let one: OneKey = serde_json::from_slice(answer).map_err(|_| KeyError("it is not a JSON Web Key"))?;
                if one.key.kid.as_deref() != Some(id) {
                    return Err(KeyError("it has another id than the wanted one"));
                }
                one.key.into_fetched()
            }
            _ => Err(KeyError("it answers another question")),
        }
    }
}

impl HostRule {
    /// Checks what is written in a preset.
    pub(crate) fn check(&self) -> Result<(), String> {
        let labels: Vec<&str> = self.host.split('.').collect();
        let fixed = labels.iter().rev().take_while(|label| **label != "*").count();
        if fixed < 2 || labels.iter().any(|label| label.is_empty()) {
            return Err("fetch.hosts: at least the last two labels of a host must be fixed".to_owned());
        }
        Ok(())
    }

    fn allows(&self, url: &str) -> bool {
        let Some(rest) = url.strip_prefix("https://").filter(|_| url.len() <= MAX_URL_BYTES) else {
            return false;
        };
        let Some(slash) = rest.find('/') else { return false };
        let (host, path) = rest.split_at(slash);
        let plain_path =
            path.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'/' | b'-' | b'_' | b'.'));
        self.allows_host(host)
            && plain_path
            && !path.contains("..")
            && !path.contains("//")
            && path.len() >= self.path_prefix.len() + self.path_suffix.len()
            && path.starts_with(&self.path_prefix)
            && path.ends_with(&self.path_suffix)
    }

    /// Label by label, so that nothing but a name can match: no port, no user, no number of an address.
    fn allows_host(&self, host: &str) -> bool {
        let is_label = |label: &str| {
            let plain = label.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-');
            (1..=63).contains(&label.len()) && plain
        };
        let labels: Vec<&str> = host.split('.').collect();
        if !labels.iter().all(|label| is_label(label)) {
            return false;
        }
        match self.host.strip_prefix("*.") {
            Some(tail) => {
                let tail: Vec<&str> = tail.split('.').collect();
                labels.len() > tail.len() && labels.ends_with(&tail)
            }
            None => {
                let wanted: Vec<&str> = self.host.split('.').collect();
                wanted.len() == labels.len()
                    && wanted.iter().zip(&labels).all(|(wanted, label)| *wanted == "*" || wanted == label)
            }
        }
    }
}

/// The key of a certificate, for both hashes of RSA: which one is used is said by the scheme, not by the key.
fn certificate_key(pem: &[u8], common_name: Option<&str>) -> Result<FetchedKey, KeyError> {
    let certificate = Certificate::from_pem(pem).map_err(KeyError)?;
    if let Some(ending) = common_name {
        let name = certificate.common_name.as_deref().unwrap_or_default().to_ascii_lowercase();
        if !name.ends_with(ending) {
            return Err(KeyError("the certificate is made out to somebody else"));
        }
    }
    let mut keys = Vec::new();
    for algorithm in [Algorithm::RsaSha256, Algorithm::RsaSha1] {
        keys.push((algorithm, PublicKey::new(algorithm, &certificate.public_key).map_err(KeyError)?));
    }
    Ok(FetchedKey { keys, not_before: certificate.not_before, not_after: certificate.not_after })
}

#[derive(Deserialize)]
struct KeySet {
    keys: Vec<WebKey>,
}

#[derive(Deserialize)]
struct OneKey {
    key: WebKey,
}

/// A JSON Web Key. Unknown members are ignored, as the standard asks.
#[derive(Deserialize)]
struct WebKey {
    kty: String,
    kid: Option<String>,
    crv: Option<String>,
    n: Option<String>,
    e: Option<String>,
    x: Option<String>,
    y: Option<String>,
    /// Plaid: when the key ended, in seconds.
    expired_at: Option<i64>,
}

impl WebKey {
    fn into_fetched(self) -> Result<FetchedKey, KeyError> {
        let part = |text: Option<&String>| {
            let text = text.ok_or(KeyError("a part of it is missing"))?;
            BASE64_URL_SAFE_NO_PAD.decode(text).map_err(|_| KeyError("a part of it is not base64url"))
        };
        let keys = match (self.kty.as_str(), self.crv.as_deref()) {
            ("RSA", _) => {
                let modulus = part(self.n.as_ref())?;
                if modulus.len() < 256 {
                    return Err(KeyError("RSA keys below 2048 bits are refused"));
                }
                vec![(Algorithm::RsaSha256, PublicKey::rsa(modulus, part(self.e.as_ref())?))]
            }
            ("EC", Some("P-256")) => {
                let point = [vec![4], part(self.x.as_ref())?, part(self.y.as_ref())?].concat();
                let key = PublicKey::new(Algorithm::EcdsaP256Fixed, &point).map_err(KeyError)?;
                vec![(Algorithm::EcdsaP256Fixed, key)]
            }
            _ => return Err(KeyError("its type is not known")),
        };
        let not_after = self.expired_at.map_or(UnixMicros(i64::MAX), UnixMicros::from_secs);
        Ok(FetchedKey { keys, not_before: UnixMicros(i64::MIN), not_after })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(host: &str, path_prefix: &str, path_suffix: &str) -> HostRule {
        HostRule { host: host.into(), path_prefix: path_prefix.into(), path_suffix: path_suffix.into() }
    }

    #[test]
    fn fault_72_only_the_providers_own_hosts_are_asked() {
        let sns = rule("sns.*.amazonaws.com", "/SimpleNotificationService-", ".pem");
        assert!(sns.allows("https://sns.us-east-1.amazonaws.com/SimpleNotificationService-abc.pem"));
        for bad in [
            "http://sns.us-east-1.amazonaws.com/SimpleNotificationService-abc.pem",
            "https://sns.us-east-1.amazonaws.com.evil.example/SimpleNotificationService-abc.pem",
            "https://evil.example/sns.us-east-1.amazonaws.com/SimpleNotificationService-abc.pem",
            "https://sns.a.b.amazonaws.com/SimpleNotificationService-abc.pem",
            "https://sns.us-east-1.amazonaws.com:8443/SimpleNotificationService-abc.pem",
            "https://u:p@sns.us-east-1.amazonaws.com/SimpleNotificationService-abc.pem",
            "https://sns.us-east-1.amazonaws.com/SimpleNotificationService-abc.pem?x=1",
            "https://sns.us-east-1.amazonaws.com/SimpleNotificationService-abc.pem#",
            "https://sns.us-east-1.amazonaws.com/x/../SimpleNotificationService-abc.pem",
            "https://sns.us-east-1.amazonaws.com/SimpleNotificationService-/../../bucket/evil.pem",
            "https://sns.us-east-1.amazonaws.com/SimpleNotificationService-%2e%2e.pem",
            "https://sns..amazonaws.com/SimpleNotificationService-abc.pem",
            "https://SNS.us-east-1.amazonaws.com/SimpleNotificationService-abc.pem",
            "https://sns.us-east-1.amazonaws.com\\@evil.example/SimpleNotificationService-abc.pem",
            "https://sns.us-east-1.amazonaws.com",
            "https://127.0.0.1/SimpleNotificationService-abc.pem",
            "",
        ] {
            assert!(!sns.allows(bad), "{bad}");
        }
        let paypal = rule("*.paypal.com", "/", "");
        assert!(paypal.allows("https://api.sandbox.paypal.com/v1/notifications/certs/CERT-360caa42"));
        assert!(!paypal.allows("https://paypal.com/x"));
        assert!(!paypal.allows("https://evilpaypal.com/x"));
        assert!(!paypal.allows("https://a.paypal.com.evil.example/x"));
    }

    #[test]
    fn rules_that_allow_too_much_are_refused() {
        for host in ["*", "*.com", "sns.*", "a.*.com", ""] {
            assert!(rule(host, "", "").check().is_err(), "{host}");
        }
        assert!(rule("*.paypal.com", "", "").check().is_ok());
        assert!(rule("sns.*.amazonaws.com", "", "").check().is_ok());
    }

    #[test]
    fn a_set_of_keys_must_hold_the_wanted_one_once() {
        let rule = FetchRule::KeySet { url: "https://k.example/certs".into() };
        let request = KeyRequest::KeySet { url: "https://k.example/certs".into(), id: "k1".into() };
        let modulus = BASE64_URL_SAFE_NO_PAD.encode([0xd1; 256]);
        let key = |id: &str| format!(r#"{{"kty":"RSA","kid":"{id}","n":"{modulus}","e":"AQAB","use":"sig"}}"#);
        let read = |keys: &[String]| rule.read(&request, format!("{{\"keys\":[{}]}}", keys.join(",")).as_bytes());
        assert!(read(&[key("k0"), key("k1")]).is_ok());
        assert!(read(&[key("k0")]).is_err());
        assert!(read(&[key("k1"), key("k1")]).is_err());
        assert!(read(&[key("k1").replace("RSA", "oct")]).is_err());
        assert!(read(&[key("k1").replace(&modulus, &modulus[..170])]).is_err(), "1024 bits");
        assert!(rule.read(&request, b"<html>").is_err());
        assert!(rule.read(&KeyRequest::Certificate { url: "x".into() }, b"").is_err());
    }
}
