//! Providers as data, built into the crate.
//!
//! Each provider is one TOML file in `presets/`. The comments in the file say what the sender signs and where
//! each fact was read. The files are parsed once, on first use, and a test parses each of them; nothing
//! is read from disk.

use std::{collections::BTreeMap, sync::LazyLock};

use http::{HeaderMap, HeaderName, HeaderValue};
use serde::Deserialize;

use crate::{form, forward::EventHeaders, handshake::Handshakes, identify::Identify, scheme::Scheme, time::UnixMicros};

mod files;

static PRESETS: LazyLock<Vec<Preset>> = LazyLock::new(|| {
    let parse = |(name, text): &(&str, &str)| match Preset::parse(text) {
        Ok(preset) => preset,
        #[expect(clippy::panic, reason = "the files are part of the crate, and a test parses each of them")]
        Err(error) => panic!("the built-in preset {name} is broken: {error}"),
    };
    files::FILES.iter().map(parse).collect()
});

/// A provider: how it signs, what identifies its events, and how it behaves.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Preset {
    /// The name in configuration: `stripe`.
    pub name: String,
    /// The name for people: `Stripe`.
    pub title: String,
    /// Other names under which it can be asked for.
    #[serde(default)]
    pub aliases: Vec<String>,
    /// How well the facts are founded.
    pub confidence: Confidence,
    /// The facts are not certain: try it before relying on it.
    #[serde(default)]
    pub experimental: bool,
    /// Steps to set it up at the provider, for people.
    #[serde(default)]
    pub setup: Vec<String>,
    /// Values that a source configures beside its secrets.
    #[serde(default, rename = "param")]
    pub params: Vec<Param>,
    /// Where to find the secret, and what it looks like.
    pub secret_hint: String,
    /// How it signs.
    pub verify: Scheme,
    /// Where an event's identity stands.
    #[serde(default)]
    pub identify: Identify,
    /// Its handshakes.
    #[serde(default, rename = "handshake")]
    pub handshakes: Handshakes,
    /// The answer it wants for an accepted event.
    #[serde(default)]
    pub ack: Ack,
    /// Does it retry by itself? If not, an unreachable gateway loses events.
    pub retries: bool,
    /// How long after the first attempt a copy may still come, in seconds. Keys must be remembered longer.
    pub retry_horizon_secs: u64,
    /// How long it waits for an answer, in seconds, where known.
    pub timeout_secs: Option<u64>,
    /// The largest body it sends, in bytes, where it is known to exceed the usual limit of a source.
    pub max_body_bytes: Option<usize>,
    /// Headers that tell about an event: they go along when it is forwarded. Never the signature, a token or a secret.
    #[serde(default)]
    pub forward: EventHeaders,
    /// An event to try things out with.
    pub sample: Sample,
}

/// Where a preset's facts come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Confidence {
    /// Read in the provider's own code.
    Sdk,
    /// Read in the provider's documentation.
    Docs,
    /// Read in somebody else's code.
    ThirdParty,
    /// From memory: not confirmed by anything that was read.
    Memory,
}

impl Confidence {
    /// `sdk`, `docs`, `third_party` or `memory`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Sdk => "sdk",
            Self::Docs => "docs",
            Self::ThirdParty => "third_party",
            Self::Memory => "memory",
        }
    }
}

/// A value that a source configures.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Param {
    /// Its name under `params`.
    pub name: String,
    /// Where to find it.
    pub hint: String,
    /// A value to try things out with.
    pub example: String,
    /// The source works without it.
    #[serde(default)]
    pub optional: bool,
}

/// The answer a provider wants for an accepted event.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ack {
    /// The HTTP status.
    pub status: u16,
    /// The content type of `body`.
    pub content_type: Option<String>,
    /// A fixed body. Nothing means that the provider does not care and the gateway may answer with its own;
    /// with status 204 there is no body at all.
    pub body: Option<String>,
}

impl Default for Ack {
    fn default() -> Self {
        Self { status: 200, content_type: None, body: None }
    }
}

/// A small, plausible event.
///
/// In `headers` and `body` these words are replaced: `$id` (the event's id), `$kind` (its type), `$event` and
/// `$action` (the type before and after its first dot), `$secs`, `$millis` and `$time` (now, as numbers and as RFC 3339).
/// In a `form` body they are percent-encoded, otherwise written as inside a JSON string.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sample {
    /// The type of the event.
    pub kind: String,
    /// Headers that belong to the event and not to its signature.
    #[serde(default)]
    pub headers: BTreeMap<String, String>,
    /// The body.
    pub body: String,
    /// The body is an urlencoded form.
    #[serde(default)]
    pub form: bool,
    /// What the provider adds to the address.
    pub query: Option<String>,
    /// What differs in events of other types. The name is the event's type, or `batch` for several events in one request.
    #[serde(default)]
    pub other: BTreeMap<String, OtherSample>,
}

/// The body of another type of event and, where the provider tells them apart there, its headers.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(from = "OtherText")]
pub struct OtherSample {
    /// Instead of the sample's body.
    pub body: String,
    /// Instead of the sample's headers of the same names.
    pub headers: BTreeMap<String, String>,
}

/// As it is written: the body alone, or with headers.
#[derive(Deserialize)]
#[serde(untagged)]
enum OtherText {
    Body(String),
    Whole { body: String, headers: BTreeMap<String, String> },
}

impl From<OtherText> for OtherSample {
    fn from(text: OtherText) -> Self {
        match text {
            OtherText::Body(body) => Self { body, headers: BTreeMap::new() },
            OtherText::Whole { body, headers } => Self { body, headers },
        }
    }
}

/// A sample that cannot be rendered: the id or type cannot stand in a header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the sample's id or type cannot stand in a header")]
pub struct SampleError;

impl Preset {
    /// Reads a preset. A handshake may sign only what its scheme declares a challenge.
    fn parse(text: &str) -> Result<Self, String> {
        let preset: Self = toml::from_str(text).map_err(|error| error.to_string())?;
        match preset.handshakes.sign_challenges() && preset.verify.challenge.is_none() {
            true => Err("a handshake signs a value: say in verify.challenge which ones".to_owned()),
            false => Ok(preset),
        }
    }

    /// All providers.
    #[must_use]
    pub fn all() -> &'static [Self] {
        &PRESETS
    }

    /// The provider of that name or alias.
    #[must_use]
    pub fn named(name: &str) -> Option<&'static Self> {
        Self::all().iter().find(|preset| preset.name == name || preset.aliases.iter().any(|alias| alias == name))
    }
}

impl Sample {
    /// The headers and body of an event with this id and type; its own type if none is given.
    ///
    /// # Errors
    ///
    /// An id or type that cannot stand in a header.
    pub fn render(&self, id: &str, kind: Option<&str>, now: UnixMicros) -> Result<(HeaderMap, Vec<u8>), SampleError> {
        let kind = kind.unwrap_or(&self.kind);
        let (event, action) = kind.split_once('.').unwrap_or((kind, ""));
        let (secs, millis, time) = (now.as_secs().to_string(), now.0.div_euclid(1_000).to_string(), now.to_rfc3339());
        let other = self.other.get(kind);
        let body = other.map_or(&self.body, |other| &other.body);
        let words = [
            ("$id", id),
            ("$kind", kind),
            ("$event", event),
            ("$action", action),
            ("$secs", &secs),
            ("$millis", &millis),
            ("$time", &time),
        ];
        let mut headers = HeaderMap::new();
        let own_headers = other.iter().flat_map(|other| &other.headers);
        for (name, template) in self.headers.iter().chain(own_headers) {
            let name = HeaderName::from_bytes(name.as_bytes()).map_err(|_| SampleError)?;
            let value = HeaderValue::from_str(&replace(template, &words, str::to_owned)).map_err(|_| SampleError)?;
            headers.insert(name, value);
        }
        let write = if self.form { form::encode } else { json_text };
        Ok((headers, replace(body, &words, write).into_bytes()))
    }
}

/// Replaces each word once, from left to right, so that a replacement is never searched again.
fn replace(template: &str, words: &[(&str, &str)], write: impl Fn(&str) -> String) -> String {
    let mut text = String::with_capacity(template.len());
    let mut rest = template;
    while let Some(at) = rest.find('$') {
        let (before, from_word) = rest.split_at(at);
        text.push_str(before);
        let found = words.iter().find_map(|(word, value)| from_word.strip_prefix(word).map(|after| (value, after)));
        match found {
            Some((value, after)) => {
                text.push_str(&write(value));
                rest = after;
            }
            None => {
                text.push('$');
                rest = from_word.strip_prefix('$').unwrap_or_default();
            }
        }
    }
    text.push_str(rest);
    text
}

/// The inside of a JSON string.
fn json_text(text: &str) -> String {
    let quoted = serde_json::Value::from(text).to_string();
    quoted.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')).unwrap_or_default().to_owned()
}
