//! The same schemes the other way: signing, for tests, for sending by hand and for forwarding.
//!
//! A signer reads the same data as the verifier, so a sender made from a preset and a receiver made from it
//! cannot disagree. It produces one signature with one secret.

use std::fmt;

use http::{HeaderName, HeaderValue};

use crate::{
    asymmetric::PrivateKey,
    hmac::HmacKey,
    rejection::Rejection,
    request::Request,
    scheme::{Algorithm, KeyRule, Scheme},
    secret::Secret,
    setup::SetupError,
    template::{Filling, Pieces},
    time::UnixMicros,
};

/// A scheme with the secret that signs.
pub struct Signer {
    scheme: Scheme,
    kind: String,
    key: SigningKey,
}

enum SigningKey {
    Hmac(HmacKey),
    Ed25519(PrivateKey),
    Token(Secret),
}

impl Signer {
    /// Prepares the key. For Ed25519 the secret is the private key: the seed in the scheme's own key
    /// encoding, under the private prefix where the scheme has one (`whsk_`).
    ///
    /// # Errors
    ///
    /// A secret that does not decode, or that can only verify.
    pub fn new(scheme: &Scheme, secret: &Secret) -> Result<Self, SetupError> {
        let (kind, key) = signing_key(&scheme.keys, secret)
            .map_err(|problem| SetupError::BadSecret { position: 1, problem })?;
        Ok(Self { scheme: scheme.clone(), kind, key })
    }

    /// The headers that make the request genuine: signature, time and id, as far as the scheme has them.
    ///
    /// `request` is the request without them. `id` is used only by schemes that sign an id.
    ///
    /// # Errors
    ///
    /// An id that cannot stand in a header or that holds the separator of the signed text; a request without
    /// a header that the scheme signs.
    pub fn sign(
        &self,
        request: &Request<'_>,
        id: &str,
        now: UnixMicros,
    ) -> Result<Vec<(HeaderName, HeaderValue)>, SetupError> {
        let mut headers = Vec::with_capacity(3);
        let timestamp = self.scheme.timestamp.as_ref().map(|rule| (rule, rule.render(now)));
        if let Some((rule, text)) = &timestamp
            && let Some(names) = &rule.header
        {
            headers.push((names.first().clone(), value(text)?));
        }
        let timestamp = timestamp.as_ref().map(|(_, text)| text.as_str());
        if let Some(names) = &self.scheme.id {
            let terminator = self.scheme.content.as_ref().and_then(|content| content.id_terminator());
            if id.is_empty() || terminator.is_some_and(|terminator| id.contains(terminator)) {
                return Err(SetupError::CannotSign(Rejection::IdAmbiguous.to_string()));
            }
            headers.push((names.first().clone(), value(id)?));
        }
        let signature = match &self.scheme.content {
            None => self.key.sign(&Pieces::new()),
            Some(content) => {
                let pieces = content
                    .fill(&Filling { request, timestamp, id: Some(id) })
                    .map_err(|missing| SetupError::CannotSign(missing.to_string()))?;
                self.key.sign(&pieces)
            }
        };
        let text = match (self.scheme.encoding, signature) {
            (Some(encoding), Signature::Bytes(bytes)) => encoding.encode(&bytes),
            (None, Signature::Bytes(_)) => {
                return Err(SetupError::CannotSign("the scheme has no encoding".to_owned()));
            }
            (_, Signature::Text(text)) => text.to_owned(),
        };
        let mut value = value(&self.scheme.grammar.render(&self.kind, timestamp, &text))?;
        value.set_sensitive(true);
        headers.push((self.scheme.header.first().clone(), value));
        Ok(headers)
    }
}

/// Nothing of the key.
impl fmt::Debug for Signer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Signer").field("kind", &self.kind).finish_non_exhaustive()
    }
}

enum Signature<'a> {
    Bytes(Vec<u8>),
    Text(&'a str),
}

impl SigningKey {
    fn sign(&self, pieces: &Pieces<'_>) -> Signature<'_> {
        match self {
            Self::Hmac(key) => Signature::Bytes(key.mac(pieces).as_ref().to_vec()),
            Self::Ed25519(key) => Signature::Bytes(key.sign(&pieces.concat())),
            Self::Token(token) => Signature::Text(token.reveal()),
        }
    }
}

fn signing_key(rules: &[KeyRule], secret: &Secret) -> Result<(String, SigningKey), &'static str> {
    let text = secret.reveal();
    let is_public = |rule: &KeyRule| {
        rule.sign_prefix.is_some() && !rule.prefix.is_empty() && text.starts_with(rule.prefix.as_str())
    };
    if rules.iter().any(is_public) {
        return Err("it is a public key; to sign, its private half is needed");
    }
    let (rule, text) = KeyRule::for_secret(rules, text, KeyRule::signing_prefix)?;
    let bytes = rule.key.decode(text)?;
    let key = match rule.algorithm {
        Algorithm::Ed25519 => SigningKey::Ed25519(PrivateKey::new(&bytes)?),
        Algorithm::Token => SigningKey::Token(secret.clone()),
        hmac => SigningKey::Hmac(HmacKey::new(hmac, &bytes).ok_or("its algorithm is not an HMAC")?),
    };
    Ok((rule.tag.clone(), key))
}

fn value(text: &str) -> Result<HeaderValue, SetupError> {
    HeaderValue::from_str(text)
        .map_err(|_| SetupError::CannotSign("a value cannot stand in a header".to_owned()))
}
