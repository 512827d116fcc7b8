//! How a sender signs, as data: algorithm, key, place and layout of the signature, signed text, time.
//!
//! A [`Scheme`] is read from TOML (a preset's `[verify]` table, or a user's own) and is checked while it is
//! read, so a `Scheme` that exists makes sense. What protects what is computed from it and never declared:
//! see [`Integrity`].
//!
//! ```toml
//! algorithm = "hmac-sha256"        # hmac-sha1 | hmac-sha256 | hmac-sha512 | sha256-concat | ed25519 | ecdsa-p256 | rsa-sha256 | token
//! key = "utf8"                     # utf8 | hex | base64 | sha1 | pem: how the secret's text becomes key bytes
//! content = "{ts}.{body}"          # what is signed; see the template module
//! signature = { header = "x-signature", grammar = { prefix = "v1=" }, encoding = "hex" }
//! timestamp = { header = "x-timestamp", unit = "s", tolerance = 300 }   # or field = "/sent_at"; s | ms | rfc3339 | auto
//! id = { header = "x-message-id" } # only when the content holds {id}
//! require = { "header:x-app" = "param:app" }   # values that must be the configured ones
//! each = "/items"                  # every item of this list is signed for itself
//! container = "multipart:json"     # pointers are followed in this field of a form
//! challenge = { chars = "hex-lower", min = 20, max = 32 }   # what the key signs for a handshake; see the challenge module
//! ```
//!
//! The signature stands in a `header` (a list gives alternative names), in all `headers` of a list that are there, in a
//! header that may be `repeated`, or in a `field` (`query:NAME`, `form:NAME`, a JSON pointer).
//!
//! Grammars are `"raw"` (the default), `{ prefix = "sha256=" }`, `{ optional_prefix = … }`, `{ list = "," }`,
//! `{ time_first = "," }`, `{ kv = { sep, eq, ts, sig } }` and `{ tagged = { sep, tag, accept } }`.
//!
//! A sender that hands out more than one kind of secret uses `keys` instead of `algorithm` and `key`. Each
//! entry says which secrets it is for (`prefix`), how they are decoded, what they check, and which
//! entries (`tag`) of a tagged signature header they look at. The configured secret picks the entry; the
//! request cannot.
//!
//! Signed tokens have a `jws` table instead of `algorithm` and `content` (see the `jws` module), and keys that are kept at
//! an address have a `fetch` table (see the `fetch` module).

mod text;

use http::HeaderName;
use serde::Deserialize;

use self::text::SchemeText;
use crate::{
    challenge::ChallengeShape,
    encoding::{Encoding, KeyEncoding},
    extract::{Plan, Slot},
    fetch::FetchRule,
    grammar::Grammar,
    header::HeaderNames,
    jws::JwsRule,
    pointer::Pointer,
    template::{Part, Template},
    view::{At, Container, Field},
};

/// How far a signed time may be from now, on both sides, where nothing else is said.
pub const DEFAULT_TOLERANCE_SECS: u64 = 300;

/// How one sender signs. Checked; see the module's text for the format.
#[derive(Debug, Clone, Deserialize)]
#[serde(try_from = "SchemeText")]
pub struct Scheme {
    /// At least one, unless keys are fetched; a secret belongs to the first that fits it.
    pub(crate) keys: Vec<KeyRule>,
    pub(crate) signature: Location,
    pub(crate) grammar: Grammar,
    /// Nothing for tokens, which are compared as text, and for signed tokens, which have their own.
    pub(crate) encoding: Option<Encoding>,
    /// Nothing for tokens and signed tokens.
    pub(crate) content: Option<Template>,
    pub(crate) timestamp: Option<TimestampRule>,
    pub(crate) id: Option<HeaderNames>,
    pub(crate) jws: Option<JwsRule>,
    pub(crate) fetch: Option<FetchRule>,
    /// Says of which kind the signature is, where the signature itself does not.
    pub(crate) kind: Option<Field>,
    pub(crate) require: Vec<(Field, String)>,
    pub(crate) container: Option<Container>,
    pub(crate) each: Option<(Plan, Slot)>,
    /// What the key signs for a handshake. Content of this shape is never accepted.
    pub(crate) challenge: Option<ChallengeShape>,
    /// Every JSON value that is read.
    pub(crate) plan: Plan,
    /// JSON values that are part of the signed text.
    signed_pointers: Vec<Pointer>,
}

/// Where the signature stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Location {
    /// Under the first of the names that is there, once.
    Header(HeaderNames),
    /// Under every one of the names that is there, each once.
    Headers(Vec<HeaderName>),
    /// Under one name, several times.
    Repeated(HeaderName),
    /// Somewhere else.
    Field(Field),
}

/// What a valid signature says about the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Integrity {
    /// Every byte of the body is signed.
    Body,
    /// Some fields are signed, the body is not.
    Fields,
    /// The sender knew a secret; nothing of the request is signed.
    None,
}

impl Integrity {
    /// `body`, `fields` or `none`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Body => "body",
            Self::Fields => "fields",
            Self::None => "none",
        }
    }

    /// What [`as_str`](Self::as_str) wrote.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        [Self::Body, Self::Fields, Self::None].into_iter().find(|level| level.as_str() == text)
    }
}

impl Scheme {
    /// What a valid signature says about the request; computed from the algorithm and the signed text.
    #[must_use]
    pub fn integrity(&self) -> Integrity {
        match (&self.jws, &self.content) {
            (Some(JwsRule { body: Some(_), .. }), _) => Integrity::Body,
            (_, None) => Integrity::None,
            (_, Some(content)) if content.covers_body() => Integrity::Body,
            (_, Some(_)) => Integrity::Fields,
        }
    }

    /// The tolerance in force if nothing else is configured; nothing if no time is signed.
    #[must_use]
    pub fn default_tolerance_secs(&self) -> Option<u64> {
        let token = self.jws.as_ref().and_then(|jws| jws.max_age);
        self.timestamp.as_ref().map(|timestamp| timestamp.tolerance_secs).or(token)
    }

    /// The headers that may carry the signature; none if it stands elsewhere.
    pub fn signature_headers(&self) -> impl Iterator<Item = &HeaderName> {
        let (names, list): (Option<&HeaderNames>, &[HeaderName]) = match &self.signature {
            Location::Header(names) | Location::Field(Field { at: At::Header(names), .. }) => (Some(names), &[]),
            Location::Headers(list) => (None, list),
            Location::Repeated(name) => (None, std::slice::from_ref(name)),
            Location::Field(_) => (None, &[]),
        };
        names.into_iter().flat_map(HeaderNames::iter).chain(list)
    }

    /// The headers that may carry the signed time.
    pub fn time_headers(&self) -> impl Iterator<Item = &HeaderName> {
        let field = self.timestamp.as_ref().and_then(|timestamp| timestamp.field.as_ref());
        let names = field.and_then(|field| match &field.at {
            At::Header(names) => Some(names),
            _ => None,
        });
        names.into_iter().flat_map(HeaderNames::iter)
    }

    /// Where the signature stands, for people.
    #[must_use]
    pub fn signature_place(&self) -> String {
        match &self.signature {
            Location::Field(field) => field.name.clone(),
            _ => self.signature_headers().map(HeaderName::as_str).collect::<Vec<_>>().join(" or "),
        }
    }

    /// Does it sign the address that is called, so that the source must know its own?
    #[must_use]
    pub fn needs_url(&self) -> bool {
        self.content.as_ref().is_some_and(Template::needs_url) || self.jws.as_ref().is_some_and(JwsRule::needs_url)
    }

    /// The names of the values that a source must configure beside its secrets.
    #[must_use]
    pub fn params(&self) -> Vec<&str> {
        let fields = self.content.iter().flat_map(Template::parts).filter_map(|part| match part {
            Part::Field(Field { at: At::Param(name), .. }, _) => Some(name.as_str()),
            _ => None,
        });
        let required = self.require.iter().filter_map(|(_, wanted)| wanted.strip_prefix("param:"));
        let tags = self.keys.iter().filter_map(|rule| rule.tag.strip_prefix("param:"));
        let mut names: Vec<&str> =
            fields.chain(required).chain(tags).chain(self.jws.iter().flat_map(JwsRule::params)).collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    /// Are keys fetched from the sender, so that no secret is configured?
    #[must_use]
    pub const fn fetches_keys(&self) -> bool {
        self.fetch.is_some()
    }

    /// Is the value of this header part of what is signed?
    pub(crate) fn signs_header(&self, names: &HeaderNames) -> bool {
        let Some(content) = &self.content else { return false };
        let as_id = self.id.as_ref() == Some(names) && content.contains(&Part::Id);
        let signs = |name: &HeaderName| {
            content.parts().any(|part| match part {
                Part::Field(Field { at: At::Header(signed), .. }, false) => {
                    signed.iter().count() == 1 && signed.first() == name
                }
                _ => false,
            })
        };
        as_id || names.iter().all(signs)
    }

    /// Is this value of the body part of what is signed?
    pub(crate) fn signs_pointer(&self, pointer: &Pointer) -> bool {
        self.integrity() == Integrity::Body || self.signed_pointers.contains(pointer)
    }

    /// Is this field of the form, or of the query, part of what is signed?
    pub(crate) fn signs_field(&self, place: &At) -> bool {
        let Some(content) = &self.content else { return false };
        let whole_form = content.parts().any(|part| match part {
            Part::SortedForm | Part::Body => true,
            Part::Special(special) => special.needs_url() || special.covers_body(),
            _ => false,
        });
        let named = content.parts().any(|part| matches!(part, Part::Field(field, false) if field.at == *place));
        named || (matches!(place, At::Form(_)) && whole_form) || (matches!(place, At::Query(_)) && self.needs_url())
    }
}

/// One kind of secret and what it checks.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct KeyRule {
    pub algorithm: Algorithm,
    pub key: KeyEncoding,
    /// Secrets of this kind begin so; it is removed before decoding.
    #[serde(default)]
    pub prefix: String,
    /// The prefix may be missing.
    #[serde(default)]
    pub optional_prefix: bool,
    /// The prefix of the private half, which signs.
    #[serde(default)]
    pub sign_prefix: Option<String>,
    /// Which entries of a tagged signature header this kind of secret checks; `param:NAME` for a configured one.
    #[serde(default)]
    pub tag: String,
}

impl KeyRule {
    /// A rule for every secret.
    fn plain(algorithm: Algorithm, key: KeyEncoding, tag: &str) -> Self {
        let (prefix, optional_prefix, sign_prefix) = (String::new(), false, None);
        Self { algorithm, key, prefix, optional_prefix, sign_prefix, tag: tag.to_owned() }
    }

    /// How a secret of this kind begins when it is there to sign.
    pub(crate) fn signing_prefix(&self) -> &str {
        self.sign_prefix.as_deref().unwrap_or(&self.prefix)
    }
}

/// How a signature is made and checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub(crate) enum Algorithm {
    #[serde(rename = "hmac-sha1")]
    HmacSha1,
    #[serde(rename = "hmac-sha256")]
    HmacSha256,
    #[serde(rename = "hmac-sha384")]
    HmacSha384,
    #[serde(rename = "hmac-sha512")]
    HmacSha512,
    /// SHA-256 of the secret followed by the text.
    #[serde(rename = "sha256-concat")]
    Sha256Concat,
    #[serde(rename = "ed25519")]
    Ed25519,
    /// SHA-256, signatures in DER.
    #[serde(rename = "ecdsa-p256")]
    EcdsaP256,
    /// SHA-256, signatures as two numbers of 32 bytes, as tokens have them.
    #[serde(rename = "ecdsa-p256-fixed")]
    EcdsaP256Fixed,
    /// PKCS #1 v1.5.
    #[serde(rename = "rsa-sha1")]
    RsaSha1,
    /// PKCS #1 v1.5.
    #[serde(rename = "rsa-sha256")]
    RsaSha256,
    /// The header is the secret.
    #[serde(rename = "token")]
    Token,
}

/// The signed time: where it stands and how far it may be off.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TimestampRule {
    /// Nothing when the signature header carries it.
    pub field: Option<Field>,
    pub unit: Unit,
    pub tolerance_secs: u64,
}

/// The unit of a signed time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub(crate) enum Unit {
    #[serde(rename = "s")]
    Seconds,
    #[serde(rename = "ms")]
    Millis,
    #[serde(rename = "rfc3339")]
    Rfc3339,
    /// Seconds or milliseconds, told apart by the number of digits.
    #[serde(rename = "auto")]
    Auto,
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"
        algorithm = "hmac-sha256"
        key = "utf8"
        content = "{ts}.{body}"
        signature = { header = "x-sig", grammar = { kv = { sep = ",", eq = "=", ts = "t", sig = "v1" } }, encoding = "hex" }
        timestamp = { unit = "s" }
    "#;

    fn error(text: &str) -> String {
        toml::from_str::<Scheme>(text).unwrap_err().to_string()
    }

    #[test]
    fn a_good_scheme_loads_with_the_default_tolerance() {
        let scheme: Scheme = toml::from_str(GOOD).unwrap();
        assert_eq!(scheme.default_tolerance_secs(), Some(300));
        assert_eq!(scheme.integrity(), Integrity::Body);
    }

    #[test]
    fn an_unsigned_timestamp_is_refused() {
        let text = GOOD.replace("{ts}.{body}", "{body}");
        assert!(error(&text).contains("an unsigned timestamp protects nothing"), "{}", error(&text));
    }

    #[test]
    fn contradictions_are_refused() {
        let cases = [
            (GOOD.replace("timestamp = { unit = \"s\" }", ""), "no timestamp"),
            (GOOD.replace(", ts = \"t\"", ""), "timestamp.header is missing"),
            (GOOD.replace("unit = \"s\"", "unit = \"s\", header = \"x-ts\""), "choose one"),
            (GOOD.replace("{ts}.", "{id}{ts}."), "no id"),
            (format!("{GOOD}\nid = {{ header = \"x-id\" }}"), "does not hold {id}"),
            (GOOD.replace("{ts}.", "{time}{ts}."), "unknown"),
            (format!("{GOOD}\neach = \"/items\""), "cannot hold {body}"),
            (GOOD.replace("header = \"x-sig\"", "header = \"x-sig\", field = \"/a\""), "needs one of"),
            (format!("{GOOD}\ncontainer = \"zip:a\""), "no container"),
            (format!("{GOOD}\nfetch = {{ key_set = \"http://a/\" }}"), "https only"),
            (GOOD.replace(", encoding = \"hex\"", ""), "encoding is missing"),
            (GOOD.replace("hmac-sha256", "token"), "a token signs nothing"),
            (GOOD.replace("hmac-sha256", "md5"), "md5"),
            (GOOD.replace("key = \"utf8\"", ""), "key is missing"),
            (GOOD.replace("sep = \",\"", "sep = \"\""), "must not be empty"),
            (GOOD.replace("unit = \"s\"", "unit = \"s\", leeway = 3"), "leeway"),
            (format!("{GOOD}\nextra = 1"), "extra"),
            (GOOD.replace("x-sig", "x sig"), "not a header name"),
        ];
        for (text, expected) in cases {
            assert!(error(&text).contains(expected), "wanted {expected:?} in: {}", error(&text));
        }
    }

    #[test]
    fn integrity_follows_from_what_is_signed() {
        let fields = GOOD.replace("{ts}.{body}", "{ts}.{path}");
        assert_eq!(toml::from_str::<Scheme>(&fields).unwrap().integrity(), Integrity::Fields);
        let token = "algorithm = \"token\"\nsignature = { header = \"x-token\" }";
        assert_eq!(toml::from_str::<Scheme>(token).unwrap().integrity(), Integrity::None);
    }

    #[test]
    fn keys_and_tags_must_fit_together() {
        let keys = |grammar: &str, keys: &str| {
            format!(
                "content = \"{{body}}\"\nsignature = {{ header = \"s\", grammar = {grammar}, encoding = \"hex\" }}\n{keys}"
            )
        };
        let tagged = "{ tagged = { sep = \" \", tag = \",\" } }";
        let accept = "{ tagged = { sep = \" \", tag = \",\", accept = \"v1\" } }";
        let one = "keys = [{ prefix = \"a_\", key = \"hex\", algorithm = \"hmac-sha256\", tag = \"v1\" }]";
        let bare = "keys = [{ prefix = \"a_\", key = \"hex\", algorithm = \"hmac-sha256\" }]";
        let open = "keys = [{ key = \"hex\", algorithm = \"hmac-sha256\", tag = \"v1\" }, { key = \"hex\", algorithm = \"ed25519\", tag = \"v2\" }]";
        assert!(toml::from_str::<Scheme>(&keys(tagged, one)).is_ok());
        assert!(error(&keys(tagged, bare)).contains("needs a tag"));
        assert!(error(&keys(accept, one)).contains("say the same"));
        assert!(error(&keys("\"raw\"", one)).contains("needs a tagged"));
        assert!(error(&keys(tagged, open)).contains("without a prefix"));
        assert!(error(&keys(tagged, "algorithm = \"ed25519\"\nkey = \"hex\"")).contains("accept"));
    }
}
