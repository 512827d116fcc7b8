//! How a sender signs, as data: algorithm, key, place and layout of the signature, signed text, time.
//!
//! A [`Scheme`] is read from TOML (a preset's `[verify]` table, or a user's own) and is checked while it is
//! read, so a `Scheme` that exists makes sense. What protects what is computed from it and never declared:
//! see [`Integrity`].
//!
//! ```toml
//! algorithm = "hmac-sha256"        # hmac-sha1 | hmac-sha256 | hmac-sha512 | ed25519 | token
//! key = "utf8"                     # utf8 | hex | base64: how the secret's text becomes key bytes
//! content = "{ts}.{body}"          # what is signed; see the template module
//! signature = { header = "x-signature", grammar = { prefix = "v1=" }, encoding = "hex" }
//! timestamp = { header = "x-timestamp", unit = "s", tolerance = 300 }
//! id = { header = "x-message-id" } # only when the content holds {id}
//! ```
//!
//! Grammars are `"raw"` (the default), `{ prefix = "sha256=" }`, `{ kv = { sep, eq, ts, sig } }` and
//! `{ tagged = { sep, tag, accept } }`. A header may be a list of alternative names.
//!
//! A sender that hands out more than one kind of secret uses `keys` instead of `algorithm` and `key`. Each
//! entry says which secrets it is for (`prefix`), how they are decoded, what they check, and which
//! entries (`tag`) of a tagged signature header they look at. The configured secret picks the entry; the
//! request cannot.

use serde::Deserialize;

use crate::{
    encoding::{Encoding, KeyEncoding},
    grammar::{Grammar, Tagged},
    header::HeaderNames,
    setup::SetupError,
    template::{Part, Template},
};

/// How far a signed time may be from now, on both sides, where nothing else is said.
pub const DEFAULT_TOLERANCE_SECS: u64 = 300;

/// How one sender signs. Checked; see the module's text for the format.
#[derive(Debug, Clone, Deserialize)]
#[serde(try_from = "SchemeText")]
pub struct Scheme {
    /// At least one; a secret belongs to the first that fits it.
    pub(crate) keys: Vec<KeyRule>,
    pub(crate) header: HeaderNames,
    pub(crate) grammar: Grammar,
    /// Nothing only for `token`, where the header is the secret itself.
    pub(crate) encoding: Option<Encoding>,
    /// Nothing only for `token`.
    pub(crate) content: Option<Template>,
    pub(crate) timestamp: Option<TimestampRule>,
    pub(crate) id: Option<HeaderNames>,
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
}

impl Scheme {
    /// What a valid signature says about the request; computed from the algorithm and the signed text.
    #[must_use]
    pub fn integrity(&self) -> Integrity {
        match &self.content {
            None => Integrity::None,
            Some(content) if content.contains(&Part::Body) => Integrity::Body,
            Some(_) => Integrity::Fields,
        }
    }

    /// The tolerance in force if nothing else is configured; nothing if no time is signed.
    #[must_use]
    pub fn default_tolerance_secs(&self) -> Option<u64> {
        self.timestamp.as_ref().map(|timestamp| timestamp.tolerance_secs)
    }

    /// The header that carries the signature, under each of its names.
    pub fn signature_headers(&self) -> impl Iterator<Item = &http::HeaderName> {
        self.header.iter()
    }

    /// Is the value of this header part of what is signed?
    pub(crate) fn signs_header(&self, names: &HeaderNames) -> bool {
        let Some(content) = &self.content else { return false };
        let as_id = self.id.as_ref() == Some(names) && content.contains(&Part::Id);
        as_id || names.iter().all(|name| content.contains(&Part::Header(name.clone())))
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
    /// Which entries of a tagged signature header this kind of secret checks.
    #[serde(default)]
    pub tag: String,
}

impl KeyRule {
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
    #[serde(rename = "hmac-sha512")]
    HmacSha512,
    #[serde(rename = "ed25519")]
    Ed25519,
    /// The header is the secret.
    #[serde(rename = "token")]
    Token,
}

/// The signed time: where it stands and how far it may be off.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TimestampRule {
    /// Nothing when the signature header carries it.
    pub header: Option<HeaderNames>,
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
}

/// A scheme as it is written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct SchemeText {
    algorithm: Option<Algorithm>,
    key: Option<KeyEncoding>,
    #[serde(default)]
    keys: Vec<KeyRule>,
    signature: SignatureText,
    content: Option<String>,
    timestamp: Option<TimestampText>,
    id: Option<IdText>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct SignatureText {
    header: HeaderNames,
    #[serde(default = "raw_grammar")]
    grammar: Grammar,
    encoding: Option<Encoding>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TimestampText {
    header: Option<HeaderNames>,
    unit: Unit,
    tolerance: Option<u64>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct IdText {
    header: HeaderNames,
}

const fn raw_grammar() -> Grammar {
    Grammar::Raw
}

impl TryFrom<SchemeText> for Scheme {
    type Error = SetupError;

    fn try_from(text: SchemeText) -> Result<Self, SetupError> {
        checked(text).map_err(SetupError::Scheme)
    }
}

fn checked(text: SchemeText) -> Result<Scheme, String> {
    let SignatureText { header, grammar, encoding } = text.signature;
    grammar.check()?;
    let keys = key_rules(text.algorithm, text.key, text.keys, &grammar)?;
    let timestamp = text.timestamp.map(|timestamp| TimestampRule {
        header: timestamp.header,
        unit: timestamp.unit,
        tolerance_secs: timestamp.tolerance.unwrap_or(DEFAULT_TOLERANCE_SECS),
    });
    let id = text.id.map(|id| id.header);

    if keys.iter().any(|rule| rule.algorithm == Algorithm::Token) {
        // A token proves that the sender knows it and nothing more; pretending otherwise is the mistake.
        if text.content.is_some() || timestamp.is_some() || id.is_some() || encoding.is_some() {
            return Err(
                "a token signs nothing: remove content, timestamp, id and signature.encoding".to_owned()
            );
        }
        if keys.iter().any(|rule| rule.algorithm != Algorithm::Token || rule.key != KeyEncoding::Utf8) {
            return Err(
                "a token is compared as text: key must be \"utf8\", and no other algorithm beside it"
                    .to_owned(),
            );
        }
        return Ok(Scheme {
            keys,
            header,
            grammar,
            encoding: None,
            content: None,
            timestamp: None,
            id: None,
        });
    }

    let encoding = encoding.ok_or("signature.encoding is missing: hex, base64 or base64url")?;
    let content =
        Template::parse(&text.content.ok_or("content is missing: what is signed, such as \"{body}\"")?)?;
    check_timestamp(timestamp.as_ref(), &grammar, &content)?;
    match (content.contains(&Part::Id), id.is_some()) {
        (true, false) => return Err("content holds {id}, but there is no id = { header = … }".to_owned()),
        (false, true) => return Err("id is read but content does not hold {id}".to_owned()),
        _ => {}
    }
    Ok(Scheme { keys, header, grammar, encoding: Some(encoding), content: Some(content), timestamp, id })
}

fn check_timestamp(
    timestamp: Option<&TimestampRule>,
    grammar: &Grammar,
    content: &Template,
) -> Result<(), String> {
    let signed = content.contains(&Part::Timestamp);
    let Some(timestamp) = timestamp else {
        return if signed {
            Err("content holds {ts}, but there is no timestamp = { … }".to_owned())
        } else if grammar.carries_timestamp() {
            Err("signature.grammar.kv names a ts, but there is no timestamp = { … }".to_owned())
        } else {
            Ok(())
        };
    };
    if !signed {
        return Err(
            "timestamp is set, but content does not hold {ts}: an unsigned timestamp protects nothing"
                .to_owned(),
        );
    }
    match (timestamp.header.is_some(), grammar.carries_timestamp()) {
        (true, true) => {
            Err("the timestamp is in the signature header and in a header of its own: choose one".to_owned())
        }
        (false, false) => {
            Err("timestamp.header is missing, and the signature header does not carry one".to_owned())
        }
        _ => Ok(()),
    }
}

fn key_rules(
    algorithm: Option<Algorithm>,
    key: Option<KeyEncoding>,
    keys: Vec<KeyRule>,
    grammar: &Grammar,
) -> Result<Vec<KeyRule>, String> {
    let accepted = match grammar {
        Grammar::Tagged(Tagged { accept, .. }) => Some(accept.as_deref()),
        _ => None,
    };
    if keys.is_empty() {
        let algorithm = algorithm.ok_or("algorithm is missing (or keys, for several kinds of secrets)")?;
        let key = match (algorithm, key) {
            (_, Some(key)) => key,
            (Algorithm::Token, None) => KeyEncoding::Utf8,
            (_, None) => return Err("key is missing: utf8, hex or base64".to_owned()),
        };
        let tag = match accepted {
            None => String::new(),
            Some(Some(tag)) if !tag.is_empty() => tag.to_owned(),
            Some(_) => return Err("signature.grammar.tagged needs accept = \"…\"".to_owned()),
        };
        let (prefix, optional_prefix, sign_prefix) = (String::new(), false, None);
        return Ok(vec![KeyRule { algorithm, key, prefix, optional_prefix, sign_prefix, tag }]);
    }
    if algorithm.is_some() || key.is_some() {
        return Err("keys replaces algorithm and key: use one or the other".to_owned());
    }
    if accepted == Some(None) {
        if keys.iter().any(|rule| rule.tag.is_empty()) {
            return Err("each of keys needs a tag, because the signature header is tagged".to_owned());
        }
    } else if accepted.is_some() {
        return Err(
            "signature.grammar.tagged.accept and keys[].tag say the same thing: use the tags".to_owned()
        );
    } else if keys.iter().any(|rule| !rule.tag.is_empty()) {
        return Err("keys[].tag needs a tagged signature header".to_owned());
    }
    let open = keys.iter().filter(|rule| rule.prefix.is_empty() || rule.optional_prefix).count();
    if open > 1 {
        return Err("only one of keys may do without a prefix".to_owned());
    }
    Ok(keys)
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
