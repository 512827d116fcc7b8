//! The verdict: is this request genuine?
//!
//! One function, [`Verifier::verify_with`], owns the order of the steps: read what the scheme names, read the time
//! strictly, check the signature, and only then judge the age. It works on the bytes as they arrived. It does not
//! remember requests (a replay inside the tolerance is caught by the event's key), fetches nothing, and has no mode in
//! which it accepts without checking.

use std::{borrow::Cow, fmt};

use smallvec::SmallVec;

use crate::{
    asymmetric::PublicKey,
    extract::{self, Elements},
    fetch::{FetchedKey, KeyError, KeyRequest},
    grammar::{Entry, GrammarError},
    header,
    hmac::{self, ConcatKey, HmacKey, TokenKey},
    identify::MAX_BATCH_ITEMS,
    jws::{JwsRule, Token},
    rejection::Rejection,
    request::Request,
    scheme::{Algorithm, Integrity, KeyRule, Location, Scheme, TimestampRule, Unit},
    secret::Secret,
    settings::{self, Settings},
    setup::SetupError,
    template::{Filling, Pieces},
    time::UnixMicros,
    view::View,
};

/// Thirteen digits of seconds reach past the year 300,000; longer numbers are not times.
const MAX_SECONDS_DIGITS: usize = 13;

/// Sixteen digits of milliseconds, for the same reason.
const MAX_MILLIS_DIGITS: usize = 16;

/// Twelve digits of milliseconds are the year 1973, and of seconds the year 5138.
const MIN_MILLIS_DIGITS: usize = 12;

/// The longest written time: nanoseconds and an offset.
const MAX_RFC3339_BYTES: usize = 40;

/// A scheme with its secrets and settings, prepared once and shared between threads.
pub struct Verifier {
    scheme: Scheme,
    keys: Vec<PreparedKey>,
    id_terminator: Option<char>,
    tolerance_secs: u64,
    settings: Settings,
}

struct PreparedKey {
    /// Which of the secrets, counted from 0.
    secret: usize,
    /// Which entries of the signature header this key checks; empty where the header has no kinds.
    kind: String,
    algorithm: Algorithm,
    key: Key,
}

enum Key {
    Hmac(HmacKey),
    Concat(ConcatKey),
    Public(PublicKey),
    Token(TokenKey),
    /// Comes with each request.
    Fetched,
}

impl Verifier {
    /// Prepares the keys of a scheme that needs nothing but secrets.
    ///
    /// `tolerance_secs` is how far the signed time may be from now, on both sides; `None` takes the
    /// scheme's own.
    ///
    /// # Errors
    ///
    /// The same as [`Verifier::with`].
    pub fn new(scheme: &Scheme, secrets: &[Secret], tolerance_secs: Option<u64>) -> Result<Self, SetupError> {
        Self::with(scheme, secrets, Settings { tolerance_secs, ..Settings::default() })
    }

    /// Prepares the keys.
    ///
    /// # Errors
    ///
    /// No secrets, unless the scheme fetches its keys; a secret that does not decode (its position is named, never its
    /// text); a tolerance for a scheme that signs no time; an address or a value that the scheme needs and that is not set.
    pub fn with(scheme: &Scheme, secrets: &[Secret], settings: Settings) -> Result<Self, SetupError> {
        if secrets.is_empty() && !scheme.fetches_keys() {
            return Err(SetupError::NoSecrets);
        }
        if !secrets.is_empty() && scheme.fetches_keys() {
            return Err(SetupError::NeedlessSecrets);
        }
        let own_tolerance = scheme.default_tolerance_secs();
        if own_tolerance.is_none() && settings.tolerance_secs.is_some() {
            return Err(SetupError::ToleranceWithoutTimestamp);
        }
        check_settings(scheme, &settings)?;
        let mut keys = Vec::with_capacity(secrets.len());
        for (index, secret) in secrets.iter().enumerate() {
            let key = PreparedKey::of(scheme, index, secret, &settings)
                .map_err(|problem| SetupError::BadSecret { position: index + 1, problem })?;
            keys.extend(key);
        }
        if scheme.fetches_keys() {
            keys.extend(scheme.keys.iter().map(|rule| PreparedKey {
                secret: 0,
                kind: rule.tag.clone(),
                algorithm: rule.algorithm,
                key: Key::Fetched,
            }));
        }
        Ok(Self {
            keys,
            id_terminator: scheme.content.as_ref().and_then(|content| content.id_terminator()),
            tolerance_secs: settings.tolerance_secs.or(own_tolerance).unwrap_or_default(),
            settings,
            scheme: scheme.clone(),
        })
    }

    /// A verifier without any secret, which refuses every request. It exists so that a source whose provider hands over
    /// the secret can answer that handshake and nothing else.
    ///
    /// # Errors
    ///
    /// An address or a value that the scheme needs and that is not set.
    pub fn refusing(scheme: &Scheme, settings: Settings) -> Result<Self, SetupError> {
        check_settings(scheme, &settings)?;
        let tolerance_secs = settings.tolerance_secs.or(scheme.default_tolerance_secs()).unwrap_or_default();
        Ok(Self { scheme: scheme.clone(), keys: Vec::new(), id_terminator: None, tolerance_secs, settings })
    }

    /// What a valid signature says about the request.
    #[must_use]
    pub fn integrity(&self) -> Integrity {
        self.scheme.integrity()
    }

    /// The tolerance in force; nothing if the scheme signs no time.
    #[must_use]
    pub fn tolerance_secs(&self) -> Option<u64> {
        self.scheme.default_tolerance_secs().map(|_| self.tolerance_secs)
    }

    /// What the source knows beside its secrets.
    pub(crate) const fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The MAC of a challenge with the first secret. Nothing for any other text (see the `challenge` module), and
    /// nothing if the scheme has no HMAC.
    pub(crate) fn sign_challenge(&self, text: &[u8]) -> Option<Vec<u8>> {
        self.scheme.challenge.as_ref().filter(|shape| shape.fits(&[text]))?;
        self.keys.iter().find_map(|prepared| match &prepared.key {
            Key::Hmac(key) => Some(key.mac(&[text]).as_ref().to_vec()),
            _ => None,
        })
    }

    /// The key that must be fetched before this request can be checked; nothing for most schemes.
    ///
    /// # Errors
    ///
    /// A request that does not say which key signed it, or that names an address at which its sender keeps no keys. Such
    /// a request is refused without asking anybody.
    pub fn key_request(&self, request: &Request<'_>) -> Result<Option<KeyRequest>, Rejection> {
        let Some(rule) = &self.scheme.fetch else { return Ok(None) };
        let view = View::new(request, &self.settings, &self.scheme.plan, request.body);
        if self.scheme.jws.is_none() {
            self.check_required(&view)?;
            return rule.request(&view, None).map(Some);
        }
        let texts = self.signature_texts(&view)?;
        let key_id = Token::parse(self.token_text(&texts)?)?.key_id;
        rule.request(&view, key_id.as_deref()).map(Some)
    }

    /// Makes a key of the answer to a [`KeyRequest`].
    ///
    /// # Errors
    ///
    /// An answer that holds no usable key.
    pub fn read_key(&self, request: &KeyRequest, answer: &[u8]) -> Result<FetchedKey, KeyError> {
        match &self.scheme.fetch {
            Some(rule) => rule.read(request, answer),
            None => Err(KeyError("the scheme fetches no keys")),
        }
    }

    /// Decides whether the request was signed with one of the secrets, over these bytes, about now.
    ///
    /// # Errors
    ///
    /// The first reason found, in the order of the checks. [`Rejection::TooOld`] and
    /// [`Rejection::InFuture`] come last and mean that the signature itself is good.
    pub fn verify<'a>(&self, request: &'a Request<'a>, now: UnixMicros) -> Result<Verified<'a>, Rejection> {
        self.verify_with(request, now, None)
    }

    /// The same with a key that was fetched for this request.
    ///
    /// # Errors
    ///
    /// The same as [`Verifier::verify`].
    pub fn verify_with<'a>(
        &self,
        request: &'a Request<'a>,
        now: UnixMicros,
        fetched: Option<&FetchedKey>,
    ) -> Result<Verified<'a>, Rejection> {
        let verdict = match (&self.scheme.each, &self.scheme.container) {
            (None, None) => self.check(request, request.body, now, fetched)?,
            (None, Some(container)) => {
                let missing = || Rejection::MissingField { field: "the field that holds the document".to_owned() };
                let document = container.open(request).ok_or_else(missing)?;
                self.check(request, &document, now, fetched)?
            }
            (Some((plan, slot)), _) => {
                let unreadable = || Rejection::AmbiguousField { field: "the list of items".to_owned() };
                let Elements::Found(items) = extract::elements(plan, *slot, request.body, MAX_BATCH_ITEMS) else {
                    return Err(unreadable());
                };
                // One forged item spoils the request, and a request without items proves nothing.
                let mut verdict = None;
                for item in items {
                    verdict = Some(self.check(request, item.get().as_bytes(), now, fetched)?);
                }
                verdict.ok_or_else(unreadable)?
            }
        };
        Ok(Verified { request, signed_at: verdict.signed_at, secret_index: verdict.secret_index })
    }

    /// One signature: that of the request, or that of one item.
    fn check(
        &self,
        request: &Request<'_>,
        document: &[u8],
        now: UnixMicros,
        fetched: Option<&FetchedKey>,
    ) -> Result<Verdict, Rejection> {
        let scheme = &self.scheme;
        let view = View::new(request, &self.settings, &scheme.plan, document);
        let texts = self.signature_texts(&view)?;
        if let Some(jws) = &scheme.jws {
            return self.check_token(jws, &view, self.token_text(&texts)?, now, fetched);
        }
        let kind = scheme.kind.as_ref().map(|kind| kind.read(&view)).transpose()?;
        let mut entries: SmallVec<[Entry<'_>; 4]> = SmallVec::new();
        let (mut timestamp, mut names) = (None, None);
        for text in &texts {
            let parsed = scheme.grammar.parse(text).map_err(|error| match error {
                GrammarError::TooManyEntries => Rejection::TooManySignatures,
                GrammarError::TwoTimestamps => match scheme.signature_headers().next() {
                    Some(header) => Rejection::MalformedHeader { header: header.clone() },
                    None => Rejection::MalformedTimestamp,
                },
            })?;
            (timestamp, names) = (parsed.timestamp, parsed.names);
            entries.extend(parsed.entries);
        }
        if let Some(kind) = &kind {
            entries.iter_mut().for_each(|entry| entry.kind = kind);
        }
        self.check_required(&view)?;

        let own_time = match scheme.timestamp.as_ref().and_then(|rule| rule.field.as_ref()) {
            None => None,
            Some(field) => Some(field.read(&view)?),
        };
        let timestamp = own_time.as_deref().or(timestamp);
        let signed_at = match &scheme.timestamp {
            None => None,
            Some(rule) => Some(rule.parse(timestamp.ok_or(Rejection::MissingTimestamp)?)?),
        };
        let id = match &scheme.id {
            None => None,
            Some(names) => Some(names.read(request.headers)?),
        };
        if let (Some(id), Some(names)) = (id, &scheme.id) {
            if id.is_empty() {
                return Err(Rejection::MalformedHeader { header: names.first().clone() });
            }
            if self.id_terminator.is_some_and(|terminator| id.contains(terminator)) {
                return Err(Rejection::IdAmbiguous);
            }
        }

        let secret_index = match &scheme.content {
            None => self.match_tokens(&entries)?,
            Some(content) => {
                let pieces = content.fill(&Filling { view: &view, timestamp, id, names })?;
                self.refuse_challenge(&pieces)?;
                self.match_signatures(&entries, &pieces, now, fetched)?
            }
        };
        if let Some(signed_at) = signed_at {
            self.judge_age(signed_at, now)?;
        }
        Ok(Verdict { signed_at, secret_index })
    }

    /// A signed token: its signature, then its claims, then its age.
    fn check_token(
        &self,
        jws: &JwsRule,
        view: &View<'_>,
        text: &str,
        now: UnixMicros,
        fetched: Option<&FetchedKey>,
    ) -> Result<Verdict, Rejection> {
        let token = Token::parse(text)?;
        if !jws.algorithms.contains(&token.algorithm) {
            return Err(Rejection::NoKnownSignature);
        }
        self.check_required(view)?;
        let pieces: Pieces<'_> = [Cow::Borrowed(token.signed.as_bytes())].into_iter().collect();
        self.refuse_challenge(&pieces)?;
        let wanted = token.algorithm.algorithm();
        let mut secret_index = None;
        for prepared in self.keys.iter().filter(|prepared| prepared.algorithm == wanted) {
            if prepared.matches(&pieces, &token.signature, now, fetched)? {
                secret_index = Some(prepared.secret);
                break;
            }
        }
        let secret_index = secret_index.ok_or(Rejection::SignatureMismatch)?;
        let signed_at = jws.judge(&token.claims()?, view, now)?;
        if jws.max_age.is_some() {
            self.judge_age(signed_at.ok_or(Rejection::MissingTimestamp)?, now)?;
        }
        Ok(Verdict { signed_at, secret_index })
    }

    /// The one token of a request, without what stands before it.
    fn token_text<'t>(&self, texts: &'t [Cow<'_, str>]) -> Result<&'t str, Rejection> {
        let entry = texts.first().and_then(|text| self.scheme.grammar.parse(text).ok()?.entries.first().copied());
        entry.map(|entry| entry.text).ok_or(Rejection::NoKnownSignature)
    }

    /// Everything that stands where the signature stands.
    fn signature_texts<'v>(&self, view: &'v View<'_>) -> Result<SmallVec<[Cow<'v, str>; 2]>, Rejection> {
        let headers = view.request.headers;
        let mut texts = SmallVec::new();
        match &self.scheme.signature {
            Location::Header(names) => texts.push(Cow::Borrowed(names.read(headers)?)),
            Location::Headers(names) => {
                for name in names.iter().filter(|name| headers.contains_key(*name)) {
                    texts.push(Cow::Borrowed(header::read_one(name, headers)?));
                }
                if let (true, Some(header)) = (texts.is_empty(), names.first()) {
                    return Err(Rejection::MissingHeader { header: header.clone() });
                }
            }
            Location::Repeated(name) => {
                for value in headers.get_all(name) {
                    if texts.len() == crate::grammar::MAX_ENTRIES {
                        return Err(Rejection::TooManySignatures);
                    }
                    texts.push(Cow::Borrowed(header::read_value(name, value)?));
                }
                if texts.is_empty() {
                    return Err(Rejection::MissingHeader { header: name.clone() });
                }
            }
            Location::Field(field) => texts.push(field.read(view)?),
        }
        Ok(texts)
    }

    /// Values that must be the configured ones.
    fn check_required(&self, view: &View<'_>) -> Result<(), Rejection> {
        for (field, wanted) in &self.scheme.require {
            let wanted = match wanted.strip_prefix("param:") {
                Some(name) => self.settings.params.get(name).map(String::as_str).unwrap_or_default(),
                None => wanted,
            };
            if !hmac::equal(field.read(view)?.as_bytes(), wanted.as_bytes()) {
                return Err(Rejection::WrongField { field: field.name.clone() });
            }
        }
        Ok(())
    }

    /// Refuses signed content that could be a challenge: anybody can have those signed.
    fn refuse_challenge(&self, pieces: &Pieces<'_>) -> Result<(), Rejection> {
        match &self.scheme.challenge {
            Some(shape) if shape.fits(pieces) => Err(Rejection::ChallengeContent),
            _ => Ok(()),
        }
    }

    /// The index of the first secret that made one of the signatures.
    fn match_signatures(
        &self,
        entries: &[Entry<'_>],
        pieces: &Pieces<'_>,
        now: UnixMicros,
        fetched: Option<&FetchedKey>,
    ) -> Result<usize, Rejection> {
        let mut known = false;
        let mut well_formed = false;
        for prepared in &self.keys {
            let mut signatures = entries.iter().filter(|entry| entry.kind == prepared.kind).peekable();
            if signatures.peek().is_none() {
                continue;
            }
            known = true;
            let mut expected = None;
            for entry in signatures {
                // A bad entry never matches, and does not spoil the good one beside it.
                let Some(offered) = self.scheme.encoding.and_then(|encoding| encoding.decode(entry.text)) else {
                    continue;
                };
                let offered = offered.as_slice();
                if !prepared.fits(offered.len()) {
                    continue;
                }
                well_formed = true;
                let expected = expected.get_or_insert_with(|| prepared.key.expect(pieces));
                if prepared.compare(expected, offered, now, fetched)? {
                    return Ok(prepared.secret);
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
        for prepared in &self.keys {
            let Key::Token(token) = &prepared.key else { continue };
            for entry in entries.iter().filter(|entry| entry.kind == prepared.kind) {
                known = true;
                let matches = match self.scheme.encoding {
                    None => token.matches(entry.text.as_bytes()),
                    Some(encoding) => encoding.decode(entry.text).is_some_and(|bytes| token.matches(bytes.as_slice())),
                };
                if matches {
                    return Ok(prepared.secret);
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

/// Is everything set that the scheme needs?
pub(crate) fn check_settings(scheme: &Scheme, settings: &Settings) -> Result<(), SetupError> {
    match &settings.url {
        None if scheme.needs_url() => return Err(SetupError::MissingUrl),
        Some(url) => {
            if let Some(problem) = settings::url_problem(url) {
                return Err(SetupError::BadUrl(problem));
            }
        }
        None => {}
    }
    for name in scheme.params() {
        if settings.params.get(name).is_none_or(|value| value.trim().is_empty()) {
            return Err(SetupError::MissingParam(name.to_owned()));
        }
    }
    Ok(())
}

/// What was found about one signature.
struct Verdict {
    signed_at: Option<UnixMicros>,
    secret_index: usize,
}

/// Counts, never keys.
impl fmt::Debug for Verifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Verifier").field("secrets", &self.keys.len()).finish_non_exhaustive()
    }
}

/// A request whose signature was checked. Only [`Verifier::verify_with`] makes one, so whoever asks for a
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
    /// Digits and nothing else (no sign, no exponent, no space), or a written time with its offset.
    fn parse(&self, text: &str) -> Result<UnixMicros, Rejection> {
        let max_digits = match self.unit {
            Unit::Seconds => MAX_SECONDS_DIGITS,
            Unit::Millis | Unit::Auto => MAX_MILLIS_DIGITS,
            Unit::Rfc3339 => {
                let time = Some(text).filter(|text| text.len() <= MAX_RFC3339_BYTES && !text.contains(' '));
                return time.and_then(UnixMicros::parse_rfc3339).ok_or(Rejection::MalformedTimestamp);
            }
        };
        if text.is_empty() || text.len() > max_digits || !text.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(Rejection::MalformedTimestamp);
        }
        let number: i64 = text.parse().map_err(|_| Rejection::MalformedTimestamp)?;
        Ok(match self.unit {
            Unit::Millis => UnixMicros::from_millis(number),
            Unit::Auto if text.len() >= MIN_MILLIS_DIGITS => UnixMicros::from_millis(number),
            Unit::Seconds | Unit::Auto | Unit::Rfc3339 => UnixMicros::from_secs(number),
        })
    }

    /// The time as this scheme writes it.
    pub(crate) fn render(&self, time: UnixMicros) -> String {
        match self.unit {
            Unit::Seconds | Unit::Auto => time.as_secs().to_string(),
            Unit::Millis => time.0.div_euclid(1_000).to_string(),
            Unit::Rfc3339 => time.to_rfc3339(),
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

    /// The tag, with the configured value where it stands for one.
    pub(crate) fn tag_for(&self, settings: &Settings) -> String {
        let configured = self.tag.strip_prefix("param:").and_then(|name| settings.params.get(name));
        configured.unwrap_or(&self.tag).clone()
    }
}

impl PreparedKey {
    /// The keys that a secret is: one, or for signed tokens one per algorithm.
    fn of(scheme: &Scheme, index: usize, secret: &Secret, settings: &Settings) -> Result<Vec<Self>, &'static str> {
        let rules = &scheme.keys;
        let text = secret.reveal();
        let is_private = |rule: &KeyRule| rule.sign_prefix.as_deref().is_some_and(|prefix| text.starts_with(prefix));
        if rules.iter().any(is_private) {
            return Err("it is a private signing key; to verify, configure its public half");
        }
        if scheme.jws.is_some() {
            return rules.iter().map(|rule| Self::new(rule, text, index, settings)).collect();
        }
        let (rule, text) = KeyRule::for_secret(rules, text, |rule| rule.prefix.as_str())?;
        Ok(vec![Self::new(rule, text, index, settings)?])
    }

    fn new(rule: &KeyRule, text: &str, secret: usize, settings: &Settings) -> Result<Self, &'static str> {
        let bytes = rule.key.decode(text)?;
        let key = match rule.algorithm {
            Algorithm::Token => Key::Token(TokenKey::new(&bytes)),
            Algorithm::Sha256Concat => Key::Concat(ConcatKey::new(&bytes)),
            algorithm => match HmacKey::new(algorithm, &bytes) {
                Some(key) => Key::Hmac(key),
                None => Key::Public(PublicKey::new(algorithm, &bytes)?),
            },
        };
        Ok(Self { secret, kind: rule.tag_for(settings), algorithm: rule.algorithm, key })
    }

    /// Can a signature have this length?
    fn fits(&self, length: usize) -> bool {
        match &self.key {
            Key::Hmac(key) => length == key.mac_len(),
            Key::Concat(_) => length == 32,
            Key::Public(key) => key.fits(length),
            Key::Token(_) => false,
            Key::Fetched => crate::asymmetric::signature_lengths(self.algorithm)
                .is_some_and(|(shortest, longest)| (shortest..=longest).contains(&length)),
        }
    }

    fn compare(
        &self,
        expected: &Expected,
        offered: &[u8],
        now: UnixMicros,
        fetched: Option<&FetchedKey>,
    ) -> Result<bool, Rejection> {
        Ok(match (&self.key, expected) {
            (Key::Hmac(_), Expected::Mac(mac)) => hmac::equal(mac.as_ref(), offered),
            (Key::Concat(_), Expected::Hash(hash)) => hmac::equal(hash, offered),
            (Key::Public(key), Expected::Message(message)) => key.verifies(message, offered),
            (Key::Fetched, Expected::Message(message)) => {
                let key = fetched.and_then(|fetched| fetched.at(self.algorithm, now)).ok_or(Rejection::KeyUnknown)?;
                key.verifies(message, offered)
            }
            _ => false,
        })
    }

    fn matches(
        &self,
        pieces: &Pieces<'_>,
        offered: &[u8],
        now: UnixMicros,
        fetched: Option<&FetchedKey>,
    ) -> Result<bool, Rejection> {
        Ok(self.fits(offered.len()) && self.compare(&self.key.expect(pieces), offered, now, fetched)?)
    }
}

/// What is computed once per key and request, however many signatures there are.
enum Expected {
    Mac(aws_lc_rs::hmac::Tag),
    Hash([u8; 32]),
    Message(Vec<u8>),
}

impl Key {
    fn expect(&self, pieces: &Pieces<'_>) -> Expected {
        match self {
            Self::Hmac(key) => Expected::Mac(key.mac(pieces)),
            Self::Concat(key) => Expected::Hash(key.hash(pieces)),
            Self::Public(_) | Self::Token(_) | Self::Fetched => Expected::Message(pieces.concat()),
        }
    }
}
