//! Questions a sender asks before it sends events, and the answers: data, not code.
//!
//! A rule says what a request must look like and what is answered. Rules run only on a verified request:
//! [`Handshakes::answer`] takes nothing else. An answer changes no state, and a value is echoed only if
//! it is short and made of harmless characters. Handshakes that come unsigned, or that hand over a secret, are not
//! part of this version.
//!
//! ```toml
//! [[handshake]]
//! when = { "/type" = "url_verification" }   # all must be equal; text, integers and booleans
//! absent = ["/event"]                       # none may be present
//! echo = "/challenge"                       # answer with this value, or …
//! body = '{"type":1}'                       # … with fixed text, or with nothing
//! status = 200
//! content_type = "text/plain"
//! ```

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::{
    extract::{Extracted, Plan, Scalar, Slot},
    pointer::Pointer,
    setup::SetupError,
    verifier::Verified,
};

/// The longest value that is echoed.
const MAX_ECHO_BYTES: usize = 512;

/// A source's handshake rules; the first that fits answers.
#[derive(Debug, Clone, Deserialize)]
#[serde(try_from = "Vec<RuleText>")]
pub struct Handshakes {
    plan: Plan,
    rules: Vec<Rule>,
}

/// What to answer instead of storing an event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    /// The HTTP status.
    pub status: u16,
    /// The content type, if there is a body. Send `x-content-type-options: nosniff` with it.
    pub content_type: Option<String>,
    /// The body, possibly empty.
    pub body: Vec<u8>,
}

/// No rules: every request is an event.
impl Default for Handshakes {
    fn default() -> Self {
        Self { plan: Plan::new(), rules: Vec::new() }
    }
}

impl Handshakes {
    /// Are there no rules?
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// The answer, if the request is a handshake and not an event.
    #[must_use]
    pub fn answer(&self, verified: &Verified<'_>) -> Option<Reply> {
        if self.rules.is_empty() {
            return None;
        }
        let json = self.plan.walk(verified.request().body);
        if json.is_ambiguous() {
            return None;
        }
        self.rules.iter().find_map(|rule| rule.answer(&json))
    }
}

#[derive(Debug, Clone)]
struct Rule {
    when: Vec<(Slot, Expected)>,
    absent: Vec<Slot>,
    answer: Answer,
    status: u16,
    content_type: Option<String>,
}

#[derive(Debug, Clone)]
enum Answer {
    Echo(Slot),
    Fixed(String),
}

/// A value in the rule's own notation. A number and the same digits as text are different.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
enum Expected {
    Bool(bool),
    Number(i64),
    Text(String),
}

impl Rule {
    fn answer(&self, json: &Extracted<'_>) -> Option<Reply> {
        let fits = self.when.iter().all(|(slot, expected)| expected.equals(json, *slot))
            && self.absent.iter().all(|slot| json.raw(*slot).is_none());
        if !fits {
            return None;
        }
        let body = match &self.answer {
            Answer::Fixed(body) => body.clone().into_bytes(),
            Answer::Echo(slot) => match json.scalar(*slot) {
                Scalar::Text(text) if is_harmless(&text) => text.into_owned().into_bytes(),
                _ => return None,
            },
        };
        Some(Reply { status: self.status, content_type: self.content_type.clone(), body })
    }
}

impl Expected {
    fn equals(&self, json: &Extracted<'_>, slot: Slot) -> bool {
        let Some(raw) = json.raw(slot) else { return false };
        match self {
            Self::Bool(expected) => raw == if *expected { "true" } else { "false" },
            Self::Number(expected) => raw == expected.to_string(),
            Self::Text(expected) => {
                raw.starts_with('"')
                    && matches!(json.scalar(slot), Scalar::Text(text) if text == expected.as_str())
            }
        }
    }
}

/// Safe to reflect: nothing that a browser or a terminal could take for more than text.
fn is_harmless(text: &str) -> bool {
    text.len() <= MAX_ECHO_BYTES
        && text.bytes().all(|byte| {
            byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'~' | b'+' | b'/' | b'=' | b'-')
        })
}

/// A rule as it is written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RuleText {
    when: BTreeMap<String, Expected>,
    #[serde(default)]
    absent: Vec<String>,
    echo: Option<String>,
    body: Option<String>,
    #[serde(default = "ok")]
    status: u16,
    content_type: Option<String>,
}

const fn ok() -> u16 {
    200
}

impl TryFrom<Vec<RuleText>> for Handshakes {
    type Error = SetupError;

    fn try_from(rules: Vec<RuleText>) -> Result<Self, SetupError> {
        compile(rules).map_err(SetupError::Handshake)
    }
}

fn compile(texts: Vec<RuleText>) -> Result<Handshakes, String> {
    let mut plan = Plan::new();
    let mut rules = Vec::with_capacity(texts.len());
    for text in texts {
        if text.when.is_empty() {
            return Err("when is empty: every event would be taken for a handshake".to_owned());
        }
        if !(200..300).contains(&text.status) {
            return Err("status must be between 200 and 299".to_owned());
        }
        let mut slot = |pointer: &str| plan.add(&Pointer::parse(pointer)?);
        let mut when = Vec::with_capacity(text.when.len());
        for (pointer, expected) in text.when {
            when.push((slot(&pointer)?, expected));
        }
        let absent = text.absent.iter().map(|pointer| slot(pointer)).collect::<Result<_, _>>()?;
        let answer = match (text.echo, text.body) {
            (Some(_), Some(_)) => return Err("echo and body exclude each other".to_owned()),
            (Some(pointer), None) => Answer::Echo(slot(&pointer)?),
            (None, body) => Answer::Fixed(body.unwrap_or_default()),
        };
        rules.push(Rule { when, absent, answer, status: text.status, content_type: text.content_type });
    }
    Ok(Handshakes { plan, rules })
}
