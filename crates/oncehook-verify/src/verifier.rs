//! The verdict: is this request genuine?
//!
//! One function, [`Verifier::verify`], owns the order of the steps: read the headers, read the time
//! strictly, check the signature, and only then judge the age. It works on the bytes as they arrived. It does not
//! parse the body, does not remember requests (a replay inside the tolerance is caught by the event's key),
//! and has no mode in which it accepts without checking.

use std::fmt;

use crate::{
    asymmetric::PublicKey,
    grammar::{Entry, GrammarError},
    hmac::{self, HmacKey, TokenKey},
    rejection::Rejection,
    request::Request,
    scheme::{Algorithm, Integrity, KeyRule, Scheme, TimestampRule, Unit},
    secret::Secret,
    setup::SetupError,
    template::{Filling, Pieces},
    time::UnixMicros,
};

/// Thirteen digits of seconds reach past the year 300,000; longer numbers are not times.
const MAX_SECONDS_DIGITS: usize = 13;

/// Sixteen digits of milliseconds, for the same reason.
const MAX_MILLIS_DIGITS: usize = 16;

/// A scheme with its secrets, prepared once and shared between threads.
pub struct Verifier {
    scheme: Scheme,
    keys: Vec<PreparedKey>,
    id_terminator: Option<char>,
    tolerance_secs: u64,
}

struct PreparedKey {
    /// Which entries of the signature header this key checks; empty where the header has no kinds.
    kind: String,
    key: Key,
}

enum Key {
    Hmac(HmacKey),
    Ed25519(PublicKey),
    Token(TokenKey),
}

impl Verifier {
    /// Prepares the keys.
    ///
    /// `tolerance_secs` is how far the signed time may be from now, on both sides; `None` takes the
    /// scheme's own.
    ///
    /// # Errors
    ///
    /// No secrets; a secret that does not decode (its position is named, never its text); a tolerance for
    /// a scheme that signs no time.
    pub fn new(scheme: &Scheme, secrets: &[Secret], tolerance_secs: Option<u64>) -> Result<Self, SetupError> {
        if secrets.is_empty() {
            return Err(SetupError::NoSecrets);
        }
        let own_tolerance = scheme.default_tolerance_secs();
        if own_tolerance.is_none() && tolerance_secs.is_some() {
            return Err(SetupError::ToleranceWithoutTimestamp);
        }
        let mut keys = Vec::with_capacity(secrets.len());
        for (index, secret) in secrets.iter().enumerate() {
            let key = PreparedKey::new(&scheme.keys, secret)
                .map_err(|problem| SetupError::BadSecret { position: index + 1, problem })?;
            keys.push(key);
        }
        Ok(Self {
            scheme: scheme.clone(),
            keys,
            id_terminator: scheme.content.as_ref().and_then(|content| content.id_terminator()),
            tolerance_secs: tolerance_secs.or(own_tolerance).unwrap_or_default(),
        })
    }

    /// What a valid signature says about the request.
    #[must_use]
    pub fn integrity(&self) -> Integrity {
        self.scheme.integrity()
    }

    /// The tolerance in force; nothing if the scheme signs no time.
    #[must_use]
    pub fn tolerance_secs(&self) -> Option<u64> {
        self.scheme.timestamp.as_ref().map(|_| self.tolerance_secs)
    }

    /// Decides whether the request was signed with one of the secrets, over these bytes, about now.
    ///
    /// # Errors
    ///
    /// The first reason found, in the order of the checks. [`Rejection::TooOld`] and
    /// [`Rejection::InFuture`] come last and mean that the signature itself is good.
    pub fn verify<'a>(&self, request: &'a Request<'a>, now: UnixMicros) -> Result<Verified<'a>, Rejection> {
        let header = self.scheme.header.read(request.headers)?;
        let parsed = self.scheme.grammar.parse(header).map_err(|error| match error {
            GrammarError::TooManyEntries => Rejection::TooManySignatures,
            GrammarError::TwoTimestamps => {
                Rejection::MalformedHeader { header: self.scheme.header.first().clone() }
            }
        })?;

        let (timestamp, signed_at) = match &self.scheme.timestamp {
            None => (None, None),
            Some(rule) => {
                let text = match &rule.header {
                    Some(names) => names.read(request.headers)?,
                    None => parsed.timestamp.ok_or(Rejection::MissingTimestamp)?,
                };
                (Some(text), Some(rule.parse(text)?))
            }
        };
        let id = match &self.scheme.id {
            None => None,
            Some(names) => Some(names.read(request.headers)?),
        };
        if let (Some(id), Some(names)) = (id, &self.scheme.id) {
            if id.is_empty() {
                return Err(Rejection::MalformedHeader { header: names.first().clone() });
            }
            if self.id_terminator.is_some_and(|terminator| id.contains(terminator)) {
                return Err(Rejection::IdAmbiguous);
            }
        }

        let secret_index = match &self.scheme.content {
            None => self.match_tokens(&parsed.entries)?,
            Some(content) => {
                let pieces = content.fill(&Filling { request, timestamp, id })?;
                self.match_signatures(&parsed.entries, &pieces)?
            }
        };
        if let Some(signed_at) = signed_at {
            self.judge_age(signed_at, now)?;
        }
        Ok(Verified { request, signed_at, secret_index })
    }

    /// The index of the first secret that made one of the signatures.
    fn match_signatures(&self, entries: &[Entry<'_>], pieces: &Pieces<'_>) -> Result<usize, Rejection> {
        let mut known = false;
        let mut well_formed = false;
        for (index, prepared) in self.keys.iter().enumerate() {
            let mut signatures = entries.iter().filter(|entry| entry.kind == prepared.kind).peekable();
            if signatures.peek().is_none() {
                continue;
            }
            known = true;
            let mut expected = None;
            for entry in signatures {
                // A bad entry never matches, and does not spoil the good one beside it.
                let Some(offered) = self.scheme.encoding.and_then(|encoding| encoding.decode(entry.text))
                else {
                    continue;
                };
                let offered = offered.as_slice();
                if offered.len() != prepared.key.signature_len() {
                    continue;
                }
                well_formed = true;
                let expected = expected.get_or_insert_with(|| prepared.key.expect(pieces));
                if prepared.key.matches(expected, offered) {
                    return Ok(index);
                }
            }
        }
        Err(match (known, well_formed) {
            (false, _) => Rejection::NoKnownSignature,
            (true, false) => Rejection::MalformedSignature,
            (true, true) => Rejection::SignatureMismatch,
        })
    }

    /// The index of the first secret that is the token.
    fn match_tokens(&self, entries: &[Entry<'_>]) -> Result<usize, Rejection> {
        let mut known = false;
        for (index, prepared) in self.keys.iter().enumerate() {
            let Key::Token(token) = &prepared.key else { continue };
            for entry in entries.iter().filter(|entry| entry.kind == prepared.kind) {
                known = true;
                if token.matches(entry.text.as_bytes()) {
                    return Ok(index);
                }
            }
        }
        Err(if known { Rejection::SignatureMismatch } else { Rejection::NoKnownSignature })
    }

    /// Exact at the boundary on both sides, in whole seconds.
    fn judge_age(&self, signed_at: UnixMicros, now: UnixMicros) -> Result<(), Rejection> {
        let (signed, now) = (signed_at.as_secs(), now.as_secs());
        let distance = now.abs_diff(signed);
        let tolerance_secs = self.tolerance_secs;
        if distance <= tolerance_secs {
            Ok(())
        } else if signed < now {
            Err(Rejection::TooOld { age_secs: distance, tolerance_secs })
        } else {
            Err(Rejection::InFuture { ahead_secs: distance, tolerance_secs })
        }
    }
}

/// Counts, never keys.
impl fmt::Debug for Verifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Verifier").field("secrets", &self.keys.len()).finish_non_exhaustive()
    }
}

/// A request whose signature was checked. Only [`Verifier::verify`] makes one, so whoever asks for a
/// `Verified` cannot be handed anything else.
#[derive(Debug, Clone, Copy)]
pub struct Verified<'a> {
    request: &'a Request<'a>,
    signed_at: Option<UnixMicros>,
    secret_index: usize,
}

impl<'a> Verified<'a> {
    /// The request, as it arrived.
    #[must_use]
    pub const fn request(&self) -> &'a Request<'a> {
        self.request
    }

    /// When the sender signed it; nothing if the scheme signs no time.
    #[must_use]
    pub const fn signed_at(&self) -> Option<UnixMicros> {
        self.signed_at
    }

    /// Which of the configured secrets matched, counted from 0. Tells when an old secret is out of use.
    #[must_use]
    pub const fn secret_index(&self) -> usize {
        self.secret_index
    }
}

impl TimestampRule {
    /// Digits and nothing else: no sign, no exponent, no space.
    fn parse(&self, text: &str) -> Result<UnixMicros, Rejection> {
        let max_digits = match self.unit {
            Unit::Seconds => MAX_SECONDS_DIGITS,
            Unit::Millis => MAX_MILLIS_DIGITS,
        };
        if text.is_empty() || text.len() > max_digits || !text.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(Rejection::MalformedTimestamp);
        }
        let number: i64 = text.parse().map_err(|_| Rejection::MalformedTimestamp)?;
        Ok(match self.unit {
            Unit::Seconds => UnixMicros::from_secs(number),
            Unit::Millis => UnixMicros::from_millis(number),
        })
    }

    /// The time as this scheme writes it.
    pub(crate) fn render(&self, time: UnixMicros) -> String {
        match self.unit {
            Unit::Seconds => time.as_secs().to_string(),
            Unit::Millis => time.0.div_euclid(1_000).to_string(),
        }
    }
}

impl KeyRule {
    /// The kind of secret a text is, and the text without the kind's prefix. A prefix decides; a text
    /// without a known prefix belongs to the one kind that may do without.
    pub(crate) fn for_secret<'r, 't>(
        rules: &'r [Self],
        text: &'t str,
        prefix_of: impl Fn(&'r Self) -> &'r str,
    ) -> Result<(&'r Self, &'t str), &'static str> {
        let by_prefix = rules.iter().find_map(|rule| {
            let prefix = prefix_of(rule);
            if prefix.is_empty() { None } else { text.strip_prefix(prefix).map(|rest| (rule, rest)) }
        });
        let open = || rules.iter().find(|rule| rule.prefix.is_empty() || rule.optional_prefix);
        match by_prefix {
            Some(found) => Ok(found),
            None => open().map(|rule| (rule, text)).ok_or("it has none of the prefixes this scheme knows"),
        }
    }
}

impl PreparedKey {
    fn new(rules: &[KeyRule], secret: &Secret) -> Result<Self, &'static str> {
        let text = secret.reveal();
        let is_private =
            |rule: &KeyRule| rule.sign_prefix.as_deref().is_some_and(|prefix| text.starts_with(prefix));
        if rules.iter().any(is_private) {
            return Err("it is a private signing key; to verify, configure its public half");
        }
        let (rule, text) = KeyRule::for_secret(rules, text, |rule| rule.prefix.as_str())?;
        let bytes = rule.key.decode(text)?;
        let key = match rule.algorithm {
            Algorithm::Ed25519 => Key::Ed25519(PublicKey::new(&bytes)?),
            Algorithm::Token => Key::Token(TokenKey::new(&bytes)),
            hmac => Key::Hmac(HmacKey::new(hmac, &bytes).ok_or("its algorithm is not an HMAC")?),
        };
        Ok(Self { kind: rule.tag.clone(), key })
    }
}

/// What is computed once per key and request, however many signatures there are.
enum Expected {
    Mac(aws_lc_rs::hmac::Tag),
    Message(Vec<u8>),
}

impl Key {
    fn signature_len(&self) -> usize {
        match self {
            Self::Hmac(key) => key.mac_len(),
            Self::Ed25519(_) => crate::asymmetric::SIGNATURE_BYTES,
            Self::Token(_) => 0,
        }
    }

    fn expect(&self, pieces: &Pieces<'_>) -> Expected {
        match self {
            Self::Hmac(key) => Expected::Mac(key.mac(pieces)),
            Self::Ed25519(_) | Self::Token(_) => Expected::Message(pieces.concat()),
        }
    }

    fn matches(&self, expected: &Expected, offered: &[u8]) -> bool {
        match (self, expected) {
            (Self::Hmac(_), Expected::Mac(mac)) => hmac::equal(mac.as_ref(), offered),
            (Self::Ed25519(key), Expected::Message(message)) => key.verifies(message, offered),
            _ => false,
        }
    }
}
