//! Signed tokens (compact JWS): a token is checked, and then what it says about this request.
//!
//! The algorithms are a fixed list of the scheme, and each goes with one kind of key; what the token asks for can only
//! narrow the choice. Some tokens hold a hash of the body, which then counts as signed; some only say who sent them.
//!
//! ```toml
//! jws = { algorithms = ["HS256"], claims = { iss = "netlify" }, body = { claim = "sha256", encoding = "hex" } }
//! ```
//!
//! `claims` are compared with fixed values, with `param:NAME`, or with the configured address (`url`). `url_hash` and
//! `query_hash` name claims that hold a hash of the address. `exp` and `nbf` are obeyed with `leeway` seconds wherever
//! they stand; `expires = true` refuses a token without `exp`; with `max_age`, `iat` must be there and about now.
//! No nesting, no encryption, no critical extensions.

use std::collections::BTreeMap;

use base64::{
    Engine as _,
    prelude::{BASE64_STANDARD, BASE64_URL_SAFE_NO_PAD},
};
use serde::Deserialize;

use crate::{
    encoding::Encoding, hmac, key, rejection::Rejection, scheme::Algorithm, special, time::UnixMicros, view::View,
};

/// The longest token; headers are limited anyway.
const MAX_TOKEN_BYTES: usize = 8_192;

/// How long a token made by us is valid, where the scheme wants an end.
const LIFE_SECS: i64 = 300;

/// What a token must say.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct JwsRule {
    /// The first is used for signing.
    pub algorithms: Vec<JwsAlgorithm>,
    #[serde(default)]
    claims: BTreeMap<String, Expected>,
    pub body: Option<BodyClaim>,
    /// The claim with the hexadecimal SHA-256 of the address.
    url_hash: Option<String>,
    /// The claim with Atlassian's hash of method, path and query.
    query_hash: Option<String>,
    #[serde(default)]
    expires: bool,
    /// These must be there, whatever they say.
    #[serde(default)]
    present: Vec<String>,
    #[serde(default)]
    leeway: i64,
    /// How many seconds from now `iat` may be, on both sides; then it must be there.
    pub max_age: Option<u64>,
}

/// Algorithms by their names in tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub(crate) enum JwsAlgorithm {
    HS256,
    HS384,
    HS512,
    RS256,
    ES256,
}

/// Where a token holds the body's hash.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct BodyClaim {
    claim: String,
    encoding: Encoding,
    /// Padding at the end does not matter (QStash).
    #[serde(default)]
    any_padding: bool,
    /// May be missing if the body is empty.
    #[serde(default)]
    unless_empty: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
enum Expected {
    Bool(bool),
    Text(String),
}

/// A token, cut and decoded but not believed.
#[derive(Debug)]
pub(crate) struct Token<'t> {
    pub algorithm: JwsAlgorithm,
    pub key_id: Option<String>,
    /// The two parts that are signed, with the dot.
    pub signed: &'t str,
    pub signature: Vec<u8>,
    payload: &'t str,
}

#[derive(Deserialize)]
struct Header {
    alg: String,
    kid: Option<String>,
    /// Extensions that must be understood; none are.
    crit: Option<serde::de::IgnoredAny>,
}

/// The claims of a token whose signature has been checked.
pub(crate) type Claims = serde_json::Map<String, serde_json::Value>;

impl JwsAlgorithm {
    pub(crate) const ALL: [Self; 5] = [Self::HS256, Self::HS384, Self::HS512, Self::RS256, Self::ES256];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::HS256 => "HS256",
            Self::HS384 => "HS384",
            Self::HS512 => "HS512",
            Self::RS256 => "RS256",
            Self::ES256 => "ES256",
        }
    }

    pub(crate) const fn algorithm(self) -> Algorithm {
        match self {
            Self::HS256 => Algorithm::HmacSha256,
            Self::HS384 => Algorithm::HmacSha384,
            Self::HS512 => Algorithm::HmacSha512,
            Self::RS256 => Algorithm::RsaSha256,
            Self::ES256 => Algorithm::EcdsaP256Fixed,
        }
    }

    /// Is the key a shared secret?
    pub(crate) const fn is_shared(self) -> bool {
        matches!(self, Self::HS256 | Self::HS384 | Self::HS512)
    }
}

impl<'t> Token<'t> {
    /// Cuts a token. Anything but three parts of strict base64url is refused.
    pub(crate) fn parse(text: &'t str) -> Result<Self, Rejection> {
        let malformed = Rejection::MalformedToken;
        if text.len() > MAX_TOKEN_BYTES {
            return Err(malformed);
        }
        let (signed, signature) = text.rsplit_once('.').ok_or(Rejection::MalformedToken)?;
        let (header, payload) = signed.split_once('.').ok_or(Rejection::MalformedToken)?;
        if payload.contains('.') {
            return Err(malformed);
        }
        let decode = |part: &str| BASE64_URL_SAFE_NO_PAD.decode(part).map_err(|_| Rejection::MalformedToken);
        let header: Header = serde_json::from_slice(&decode(header)?).map_err(|_| Rejection::MalformedToken)?;
        if header.crit.is_some() {
            return Err(malformed);
        }
        let known = JwsAlgorithm::ALL.into_iter().find(|algorithm| algorithm.name() == header.alg);
        Ok(Self {
            algorithm: known.ok_or(Rejection::NoKnownSignature)?,
            key_id: header.kid,
            signed,
            signature: decode(signature)?,
            payload,
        })
    }

    /// What the token says. Only to be believed after its signature was checked.
    pub(crate) fn claims(&self) -> Result<Claims, Rejection> {
        let bytes = BASE64_URL_SAFE_NO_PAD.decode(self.payload).map_err(|_| Rejection::MalformedToken)?;
        serde_json::from_slice(&bytes).map_err(|_| Rejection::MalformedToken)
    }
}

impl JwsRule {
    pub(crate) fn check(&self) -> Result<(), String> {
        let shared = self.algorithms.iter().filter(|algorithm| algorithm.is_shared()).count();
        if self.algorithms.is_empty() || (shared > 0 && shared < self.algorithms.len()) {
            return Err("jws.algorithms: some, and either all with a shared secret or all with a public key".to_owned());
        }
        Ok(())
    }

    /// Is the configured address compared with a claim?
    pub(crate) fn needs_url(&self) -> bool {
        self.url_hash.is_some()
            || self.query_hash.is_some()
            || self.claims.values().any(|expected| matches!(expected, Expected::Text(text) if text == "url"))
    }

    /// Params that are compared with claims.
    pub(crate) fn params(&self) -> impl Iterator<Item = &str> {
        self.claims.values().filter_map(|expected| match expected {
            Expected::Text(text) => text.strip_prefix("param:"),
            Expected::Bool(_) => None,
        })
    }

    /// Do the claims fit the request and the time? Returns when the token was made, if it says so.
    pub(crate) fn judge(
        &self,
        claims: &Claims,
        view: &View<'_>,
        now: UnixMicros,
    ) -> Result<Option<UnixMicros>, Rejection> {
        let mismatch = |claim: &str| Rejection::ClaimMismatch { claim: claim.to_owned() };
        for name in &self.present {
            if claims.get(name).is_none_or(serde_json::Value::is_null) {
                return Err(mismatch(name));
            }
        }
        for (name, expected) in &self.claims {
            let fits = match (expected, claims.get(name)) {
                (Expected::Bool(expected), Some(serde_json::Value::Bool(found))) => expected == found,
                (Expected::Text(expected), Some(serde_json::Value::String(found))) => self
                    .expected_text(expected, view)
                    .is_some_and(|expected| hmac::equal(expected.as_bytes(), found.as_bytes())),
                _ => false,
            };
            if !fits {
                return Err(mismatch(name));
            }
        }
        let text = |name: &str| claims.get(name).and_then(serde_json::Value::as_str);
        if let Some(name) = &self.url_hash {
            let expected = hex::encode(key::digest(view.url().as_bytes()));
            if !text(name).is_some_and(|found| hmac::equal(found.as_bytes(), expected.as_bytes())) {
                return Err(mismatch(name));
            }
        }
        if let Some(name) = &self.query_hash {
            let expected = special::query_hash(view);
            if !text(name).is_some_and(|found| hmac::equal(found.as_bytes(), expected.as_bytes())) {
                return Err(mismatch(name));
            }
        }
        if let Some(body) = &self.body {
            let may_be_missing = body.unless_empty && view.request.body.is_empty() && !claims.contains_key(&body.claim);
            if !may_be_missing && !text(&body.claim).is_some_and(|found| body.matches(found, view.request.body)) {
                return Err(Rejection::BodyHashMismatch);
            }
        }
        self.judge_time(claims, now)
    }

    fn judge_time(&self, claims: &Claims, now: UnixMicros) -> Result<Option<UnixMicros>, Rejection> {
        let now = now.as_secs();
        let time = |name: &str| match claims.get(name) {
            None => Ok(None),
            Some(value) => numeric_date(value).map(Some).ok_or(Rejection::MalformedTimestamp),
        };
        let tolerance_secs = self.leeway.unsigned_abs();
        match time("exp")? {
            None if self.expires => return Err(Rejection::MissingTimestamp),
            Some(end) if now > end.saturating_add(self.leeway) => {
                return Err(Rejection::TooOld { age_secs: now.abs_diff(end), tolerance_secs });
            }
            _ => {}
        }
        if let Some(start) = time("nbf")?.filter(|start| now < start.saturating_sub(self.leeway)) {
            return Err(Rejection::InFuture { ahead_secs: start.abs_diff(now), tolerance_secs });
        }
        Ok(time("iat")?.map(UnixMicros::from_secs))
    }

    fn expected_text(&self, expected: &str, view: &View<'_>) -> Option<String> {
        match expected.strip_prefix("param:") {
            Some(name) => view.settings.params.get(name).cloned(),
            None if expected == "url" => Some(view.url().into_owned()),
            None => Some(expected.to_owned()),
        }
    }

    /// Header and claims of a token for this request, encoded and ready to be signed.
    pub(crate) fn unsigned(&self, view: &View<'_>, id: &str, now: UnixMicros) -> Option<String> {
        let now = now.as_secs();
        let mut claims = Claims::new();
        for (name, expected) in &self.claims {
            let value = match expected {
                Expected::Bool(value) => (*value).into(),
                Expected::Text(text) => self.expected_text(text, view)?.into(),
            };
            claims.insert(name.clone(), value);
        }
        for name in &self.present {
            claims.insert(name.clone(), id.into());
        }
        if let Some(name) = &self.url_hash {
            claims.insert(name.clone(), hex::encode(key::digest(view.url().as_bytes())).into());
        }
        if let Some(name) = &self.query_hash {
            claims.insert(name.clone(), special::query_hash(view).into());
        }
        if let Some(body) = &self.body {
            claims.insert(body.claim.clone(), body.encoding.encode(&key::digest(view.request.body)).into());
        }
        claims.insert("iat".to_owned(), now.into());
        if self.expires {
            claims.insert("nbf".to_owned(), now.into());
            claims.insert("exp".to_owned(), now.saturating_add(LIFE_SECS).into());
        }
        let algorithm = self.algorithms.first()?.name();
        let mut header = serde_json::json!({ "alg": algorithm, "typ": "JWT" });
        if let (Some(key_id), Some(header)) = (view.settings.params.get("kid"), header.as_object_mut()) {
            header.insert("kid".to_owned(), key_id.as_str().into());
        }
        let encode = |value: String| BASE64_URL_SAFE_NO_PAD.encode(value);
        Some(format!("{}.{}", encode(header.to_string()), encode(serde_json::Value::from(claims).to_string())))
    }
}

impl BodyClaim {
    fn matches(&self, found: &str, body: &[u8]) -> bool {
        let digest = key::digest(body);
        let (found, expected) = match self.encoding {
            Encoding::Hex => (found.to_ascii_lowercase(), hex::encode(digest)),
            Encoding::Base64 => (found.to_owned(), BASE64_STANDARD.encode(digest)),
            Encoding::Base64Url => (found.to_owned(), BASE64_URL_SAFE_NO_PAD.encode(digest)),
        };
        let found = if self.any_padding { found.trim_end_matches('=') } else { &found };
        hmac::equal(found.as_bytes(), expected.as_bytes())
    }
}

/// Seconds since the epoch; a fraction is cut off.
fn numeric_date(value: &serde_json::Value) -> Option<i64> {
    match value.as_i64() {
        Some(secs) => Some(secs),
        None => value.as_f64().filter(|secs| secs.abs() < 1e15).map(|secs| secs.floor() as i64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(header: &str, payload: &str) -> String {
        let encode = |text: &str| BASE64_URL_SAFE_NO_PAD.encode(text);
        format!("{}.{}.{}", encode(header), encode(payload), encode("signature"))
    }

    #[test]
    fn tokens_are_cut_strictly() {
        let good = token(r#"{"alg":"HS256","kid":"k"}"#, "{}");
        let parsed = Token::parse(&good).unwrap();
        assert_eq!(
            (parsed.algorithm, parsed.key_id.as_deref(), &parsed.signature[..]),
            (JwsAlgorithm::HS256, Some("k"), &b"signature"[..])
        );
        for bad in [
            "".to_owned(),
            "..".to_owned(),
            "a.b".to_owned(),
            format!("{good}.x"),
            format!("{good}="),
            format!(" {good}"),
            token(r#"{"alg":"HS256","alg":"none"}"#, "{}"),
            token(r#"{"alg":"HS256","crit":["b64"]}"#, "{}"),
            token("{}", "{}"),
            "a".repeat(MAX_TOKEN_BYTES + 1),
        ] {
            assert_eq!(Token::parse(&bad).unwrap_err().code(), "malformed_token", "{bad}");
        }
        for unknown in ["none", "None", "hs256", "HS1", "PS256", ""] {
            let text = token(&format!(r#"{{"alg":"{unknown}"}}"#), "{}");
            assert_eq!(Token::parse(&text).unwrap_err().code(), "no_known_signature", "{unknown}");
        }
    }

    #[test]
    fn dates_may_have_fractions_but_not_be_text() {
        assert_eq!(numeric_date(&1_700_000_000.into()), Some(1_700_000_000));
        assert_eq!(numeric_date(&serde_json::json!(1.9)), Some(1));
        assert_eq!(numeric_date(&serde_json::json!("1700000000")), None);
        assert_eq!(numeric_date(&serde_json::json!(1e300)), None);
    }
}
