//! The same schemes the other way: signing, for tests, for sending by hand and for forwarding.
//!
//! A signer reads the same data as the verifier, so a sender made from a preset and a receiver made from it
//! cannot disagree. It produces one signature with one secret (per item, where items are signed). Signatures that stand in
//! a body are written over the value that stands in their place, so a body must have one there.

use std::{borrow::Cow, fmt};

use http::{HeaderMap, HeaderName, HeaderValue, header::CONTENT_TYPE};

use crate::{
    asymmetric::PrivateKey,
    extract::{self, Elements},
    form,
    hmac::{ConcatKey, HmacKey},
    identify::MAX_BATCH_ITEMS,
    key,
    rejection::Rejection,
    request::Request,
    scheme::{Algorithm, KeyRule, Location, Scheme},
    secret::Secret,
    settings::Settings,
    setup::SetupError,
    special::Special,
    template::{Filling, Part, Pieces},
    time::UnixMicros,
    verifier::check_settings,
    view::{At, Field, View},
};

/// A scheme with the secret that signs.
pub struct Signer {
    scheme: Scheme,
    kind: String,
    key: SigningKey,
    settings: Settings,
}

enum SigningKey {
    Hmac(HmacKey),
    Concat(ConcatKey),
    Private(PrivateKey),
    Token(Secret),
}

/// What makes a request genuine.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Signed {
    /// Headers to add.
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// The body to send instead, where the signature or its time stands in it.
    pub body: Option<Vec<u8>>,
    /// What to add to the query, where the signature stands there.
    pub query: Option<String>,
}

impl Signer {
    /// Prepares the key of a scheme that needs nothing but a secret.
    ///
    /// # Errors
    ///
    /// The same as [`Signer::with`].
    pub fn new(scheme: &Scheme, secret: &Secret) -> Result<Self, SetupError> {
        Self::with(scheme, secret, Settings::default())
    }

    /// Prepares the key. For RSA, ECDSA and Ed25519 the secret is a private key in PEM (PKCS #8). For Ed25519 it may also be
    /// the seed in the scheme's own key encoding, under the private prefix where the scheme has one (`whsk_`).
    ///
    /// # Errors
    ///
    /// A secret that does not decode, or that can only verify; an address or a value that the scheme needs and that is
    /// not set.
    pub fn with(scheme: &Scheme, secret: &Secret, settings: Settings) -> Result<Self, SetupError> {
        check_settings(scheme, &settings)?;
        let (rule, key) =
            signing_key(&scheme.keys, secret).map_err(|problem| SetupError::BadSecret { position: 1, problem })?;
        Ok(Self { kind: rule.tag_for(&settings), key, scheme: scheme.clone(), settings })
    }

    /// The headers that make the request genuine: signature, time and id, as far as the scheme has them.
    ///
    /// `request` is the request without them. `id` is used only by schemes that sign an id.
    ///
    /// # Errors
    ///
    /// The same as [`Signer::sign_whole`]; and a scheme whose signature does not stand in a header.
    pub fn sign(
        &self,
        request: &Request<'_>,
        id: &str,
        now: UnixMicros,
    ) -> Result<Vec<(HeaderName, HeaderValue)>, SetupError> {
        let signed = self.sign_whole(request, id, now)?;
        if signed.body.is_some() || signed.query.is_some() {
            return Err(cannot("the signature does not stand in a header"));
        }
        Ok(signed.headers)
    }

    /// Everything that makes the request genuine, wherever it stands.
    ///
    /// # Errors
    ///
    /// An id that cannot stand in a header or that holds the separator of the signed text; a request without
    /// a value that the scheme signs, or without room for what it writes.
    pub fn sign_whole(&self, request: &Request<'_>, id: &str, now: UnixMicros) -> Result<Signed, SetupError> {
        let scheme = &self.scheme;
        let mut headers = Vec::with_capacity(3);
        if let Some(names) = &scheme.id {
            let terminator = scheme.content.as_ref().and_then(|content| content.id_terminator());
            if id.is_empty() || terminator.is_some_and(|terminator| id.contains(terminator)) {
                return Err(cannot(Rejection::IdAmbiguous));
            }
            headers.push((names.first().clone(), value(id)?));
        }
        let timestamp = scheme.timestamp.as_ref().map(|rule| rule.render(now));
        let time_field = scheme.timestamp.as_ref().and_then(|rule| rule.field.as_ref());
        if let (Some(Field { at: At::Header(names), .. }), Some(text)) = (time_field, &timestamp) {
            headers.push((names.first().clone(), value(text)?));
        }

        let mut body = Cow::Borrowed(request.body);
        let query = self.body_hash(request);
        let path = match &query {
            Some(added) => Cow::Owned(add_query(request.path, added)),
            None => Cow::Borrowed(request.path),
        };
        let mut all_headers = request.headers.clone();
        all_headers.extend(headers.iter().map(|(name, value)| (Some(name.clone()), value.clone())));

        let mut from = 0;
        for index in 0.. {
            let now_request = Request { path: &path, headers: &all_headers, body: &body, ..*request };
            let Some(item) = self.item(&now_request, index)? else { break };
            let at = offset(&body, &item).unwrap_or(from);
            let time_here = time_field.filter(|field| matches!(field.at, At::Json(_)));
            let document = match (time_here, &timestamp) {
                (Some(field), Some(text)) => Cow::Owned(self.overwrite(&now_request, &item, field, text)?),
                _ => Cow::Borrowed(item.as_ref()),
            };
            let whole = splice(&body, at, item.len(), &document);
            let again = Request { body: &whole, ..now_request };
            let text = self.signature(&again, &document, &all_headers, timestamp.as_deref(), id, now)?;
            let finished = match &scheme.signature {
                Location::Header(names) | Location::Field(Field { at: At::Header(names), .. }) => {
                    headers.push((names.first().clone(), sensitive(&text)?));
                    whole
                }
                Location::Headers(names) => {
                    let name = names.first().ok_or_else(|| cannot("the signature has no header"))?;
                    headers.push((name.clone(), sensitive(&text)?));
                    whole
                }
                Location::Repeated(name) => {
                    headers.push((name.clone(), sensitive(&text)?));
                    whole
                }
                Location::Field(field @ Field { at: At::Json(_), .. }) => {
                    let signed = self.overwrite(&again, &document, field, &text)?;
                    splice(&whole, at, document.len(), &signed)
                }
                Location::Field(Field { at: At::Form(name), .. }) => {
                    let pair = format!("{}={}", form::encode(name), form::encode(&text));
                    let between: &[u8] = if whole.is_empty() { b"" } else { b"&" };
                    [&whole, between, pair.as_bytes()].concat()
                }
                Location::Field(Field { at: At::Query(name), .. }) => {
                    let query = Some(format!("{}={}", form::encode(name), form::encode(&text)));
                    return Ok(Signed { headers, body: None, query });
                }
                Location::Field(_) => return Err(cannot("the signature has no place in a request")),
            };
            from = at;
            body = Cow::Owned(finished);
            if scheme.each.is_none() {
                break;
            }
        }
        let body = (body.as_ref() != request.body).then(|| body.into_owned());
        Ok(Signed { headers, body, query })
    }

    /// The document in which pointers are followed: of the whole request, or of one item.
    fn item<'r>(&self, request: &Request<'r>, index: usize) -> Result<Option<Cow<'r, [u8]>>, SetupError> {
        match (&self.scheme.each, &self.scheme.container) {
            (None, None) => Ok(Some(Cow::Borrowed(request.body))),
            (None, Some(container)) => {
                container.open(request).map(Some).ok_or_else(|| cannot("the field that holds the document is missing"))
            }
            (Some((plan, slot)), _) => match extract::elements(plan, *slot, request.body, MAX_BATCH_ITEMS) {
                Elements::Found(items) => Ok(items.get(index).map(|item| Cow::Borrowed(item.get().as_bytes()))),
                _ => Err(cannot("the list of items is missing")),
            },
        }
    }

    /// The text that stands where the signature stands.
    fn signature(
        &self,
        request: &Request<'_>,
        document: &[u8],
        headers: &HeaderMap,
        timestamp: Option<&str>,
        id: &str,
        now: UnixMicros,
    ) -> Result<String, SetupError> {
        let scheme = &self.scheme;
        let view = View::new(request, &self.settings, &scheme.plan, document);
        if let Some(jws) = &scheme.jws {
            let unsigned = jws.unsigned(&view, id, now).ok_or_else(|| cannot("a claim has no value"))?;
            let pieces: Pieces<'_> = [Cow::Borrowed(unsigned.as_bytes())].into_iter().collect();
            let signature = self.key.sign(&pieces)?.ok_or_else(|| cannot("a token is signed with a key"))?;
            let token = format!("{unsigned}.{}", crate::encoding::Encoding::Base64Url.encode(&signature));
            return Ok(scheme.grammar.render(&self.kind, None, None, &token));
        }
        // Where the sender lists signed headers, list all that the request has.
        let names: Vec<&str> = headers.keys().map(HeaderName::as_str).collect();
        let names = (!names.is_empty()).then(|| names.join(" "));
        let names = names.as_deref();
        let bytes = match &scheme.content {
            None => None,
            Some(content) => {
                let filling = Filling { view: &view, timestamp, id: Some(id), names };
                self.key.sign(&content.fill(&filling).map_err(cannot)?)?
            }
        };
        let text = match (&self.key, bytes, scheme.encoding) {
            (SigningKey::Token(token), None, None) => token.reveal().to_owned(),
            (SigningKey::Token(token), None, Some(encoding)) => encoding.encode(token.reveal().as_bytes()),
            (_, Some(bytes), Some(encoding)) => encoding.encode(&bytes),
            _ => return Err(cannot("the scheme has no encoding")),
        };
        Ok(scheme.grammar.render(&self.kind, timestamp, names, &text))
    }

    /// A document with the value at one place replaced. A number stays a number.
    fn overwrite(
        &self,
        request: &Request<'_>,
        document: &[u8],
        field: &Field,
        text: &str,
    ) -> Result<Vec<u8>, SetupError> {
        let view = View::new(request, &self.settings, &self.scheme.plan, document);
        let At::Json(slot) = field.at else { return Err(cannot("the place is not in the document")) };
        let raw = view.raw(slot).ok_or_else(|| cannot(format!("the body has no {}", field.name)))?;
        let at = (raw.as_ptr() as usize).saturating_sub(document.as_ptr() as usize);
        let written = if raw.starts_with('"') { serde_json::Value::from(text).to_string() } else { text.to_owned() };
        Ok(splice(document, at, raw.len(), written.as_bytes()))
    }

    /// Twilio ties a body that is no form to the address by its hash there.
    fn body_hash(&self, request: &Request<'_>) -> Option<String> {
        let content = self.scheme.content.as_ref()?;
        let kind = request.headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
        let wanted = content.contains(&Part::Special(Special::Twilio)) && kind.starts_with("application/json");
        wanted.then(|| format!("{}={}", Special::BODY_HASH, hex::encode(key::digest(request.body))))
    }
}

/// Nothing of the key.
impl fmt::Debug for Signer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Signer").field("kind", &self.kind).finish_non_exhaustive()
    }
}

impl Signed {
    /// The path and query to send the request to.
    #[must_use]
    pub fn path<'p>(&self, path: &'p str) -> Cow<'p, str> {
        match &self.query {
            None => Cow::Borrowed(path),
            Some(query) => Cow::Owned(add_query(path, query)),
        }
    }
}

fn add_query(path: &str, added: &str) -> String {
    let between = if path.contains('?') { '&' } else { '?' };
    format!("{path}{between}{added}")
}

/// Where a part stands in the whole, if it is borrowed from it.
fn offset(whole: &[u8], part: &[u8]) -> Option<usize> {
    let at = (part.as_ptr() as usize).checked_sub(whole.as_ptr() as usize)?;
    (at + part.len() <= whole.len()).then_some(at)
}

fn splice(whole: &[u8], at: usize, length: usize, with: &[u8]) -> Vec<u8> {
    let (before, after) = (whole.get(..at).unwrap_or_default(), whole.get(at + length..).unwrap_or_default());
    [before, with, after].concat()
}

impl SigningKey {
    /// The bytes of a signature; nothing for tokens.
    fn sign(&self, pieces: &Pieces<'_>) -> Result<Option<Vec<u8>>, SetupError> {
        match self {
            Self::Hmac(key) => Ok(Some(key.mac(pieces).as_ref().to_vec())),
            Self::Concat(key) => Ok(Some(key.hash(pieces).to_vec())),
            Self::Private(key) => {
                key.sign(&pieces.concat()).map(Some).ok_or_else(|| cannot("the system has no randomness"))
            }
            Self::Token(_) => Ok(None),
        }
    }
}

fn signing_key<'r>(rules: &'r [KeyRule], secret: &Secret) -> Result<(&'r KeyRule, SigningKey), &'static str> {
    let text = secret.reveal();
    let is_public = |rule: &KeyRule| {
        rule.sign_prefix.is_some() && !rule.prefix.is_empty() && text.starts_with(rule.prefix.as_str())
    };
    if rules.iter().any(is_public) {
        return Err("it is a public key; to sign, its private half is needed");
    }
    let (mut rule, text) = KeyRule::for_secret(rules, text, KeyRule::signing_prefix)?;
    if rule.algorithm == Algorithm::RsaSha1 {
        // Still checked where senders use it, but no longer made.
        rule = rules.iter().find(|rule| rule.algorithm == Algorithm::RsaSha256).unwrap_or(rule);
    }
    let key = match rule.algorithm {
        Algorithm::Token => SigningKey::Token(secret.clone()),
        Algorithm::EcdsaP256 | Algorithm::EcdsaP256Fixed | Algorithm::RsaSha1 | Algorithm::RsaSha256 => {
            SigningKey::Private(PrivateKey::new(rule.algorithm, text.as_bytes())?)
        }
        Algorithm::Ed25519 if text.contains("PRIVATE KEY") => {
            SigningKey::Private(PrivateKey::new(rule.algorithm, text.as_bytes())?)
        }
        Algorithm::Ed25519 => SigningKey::Private(PrivateKey::new(rule.algorithm, &rule.key.decode(text)?)?),
        Algorithm::Sha256Concat => SigningKey::Concat(ConcatKey::new(&rule.key.decode(text)?)),
        hmac => SigningKey::Hmac(HmacKey::new(hmac, &rule.key.decode(text)?).ok_or("its algorithm is not an HMAC")?),
    };
    Ok((rule, key))
}

fn cannot(why: impl fmt::Display) -> SetupError {
    SetupError::CannotSign(why.to_string())
}

fn value(text: &str) -> Result<HeaderValue, SetupError> {
    HeaderValue::from_str(text).map_err(|_| cannot("a value cannot stand in a header"))
}

fn sensitive(text: &str) -> Result<HeaderValue, SetupError> {
    let mut value = value(text)?;
    value.set_sensitive(true);
    Ok(value)
}
