//! Questions a sender asks before it sends events, and the answers: data, not code.
//!
//! A rule says what a request must look like and what is answered. Most rules run only on a verified request
//! ([`Handshakes::answer`] takes nothing else). Some senders ask without a signature; those rules are marked `unsigned`,
//! and [`Handshakes::answer_unsigned`] runs them. No answer changes anything by itself: what a reply asks for
//! ([`Action`]) is done by the caller, after verification for what reaches out, and held for a person where a secret is
//! handed over. A value is echoed only if it is short and made of harmless characters. A value is signed only if the scheme
//! declares it a challenge (see the `challenge` module), so no answer is ever a signature of a request.
//!
//! ```toml
//! [[handshake]]
//! method = "GET"                            # POST if nothing is said
//! unsigned = true
//! when = { "query:hub.mode" = "subscribe", "query:hub.verify_token" = "param:verify_token" }
//! present = ["query:hub.challenge"]         # all of them; and:
//! absent = ["/event"]                       # none of these
//! body = "$(query:hub.challenge)"           # $(hmac-hex:PLACE) and $(hmac-base64:PLACE) sign a value with the secret
//! headers = { allow = "POST" }
//! status = 200
//! content_type = "text/plain"
//! loose = true                              # values may hold spaces and punctuation, but nothing of HTML
//! secret = "header:x-hook-secret"           # hands over a secret
//! confirm = "sns"                           # the subscription must be confirmed by a call
//! ```

use std::{borrow::Cow, collections::BTreeMap};

use serde::Deserialize;

use crate::{
    challenge,
    encoding::Encoding,
    extract::Plan,
    form, hmac,
    request::Request,
    setup::SetupError,
    verifier::{Verified, Verifier},
    view::{At, Field, View},
};

/// The longest value that is echoed.
const MAX_ECHO_BYTES: usize = 512;

/// The longest value that is echoed by a loose rule.
const MAX_LOOSE_BYTES: usize = 2_048;

/// A source's handshake rules; the first that fits answers.
#[derive(Debug, Clone, Deserialize)]
#[serde(try_from = "Vec<RuleText>")]
pub struct Handshakes {
    plan: Plan,
    rules: Vec<Rule>,
}

/// What to answer instead of storing an event.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Reply {
    /// The HTTP status.
    pub status: u16,
    /// The content type, if there is a body. Send `x-content-type-options: nosniff` with it.
    pub content_type: Option<String>,
    /// More headers.
    pub headers: Vec<(String, String)>,
    /// The body, possibly empty.
    pub body: Vec<u8>,
    /// What must be done before this is answered, if anything.
    pub action: Option<Action>,
}

/// What a handshake asks for beside an answer.
#[derive(Clone, PartialEq, Eq)]
pub enum Action {
    /// GET this address, which was built from verified values and a fixed host.
    Confirm {
        /// The address.
        url: String,
    },
    /// A secret was handed over. Nobody has verified it: it must wait until a person confirms it.
    Secret(crate::Secret),
}

/// Nothing of a secret, and no address with a token in it.
impl std::fmt::Debug for Action {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Confirm { .. } => "Confirm",
            Self::Secret(_) => "Secret",
        })
    }
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

    /// Does a rule sign a value with the secret, so that the scheme must say which values those are?
    pub(crate) fn sign_challenges(&self) -> bool {
        let signs = |text: &Text| text.0.iter().any(|piece| matches!(piece, Piece::Hmac(..)));
        self.rules.iter().any(|rule| signs(&rule.body) || rule.headers.iter().any(|(_, text)| signs(text)))
    }

    /// Does a rule hand over a secret, so that a source can begin without one?
    #[must_use]
    pub fn hands_over_secret(&self) -> bool {
        self.rules.iter().any(|rule| rule.secret.is_some())
    }

    /// The methods other than POST that are answered.
    pub fn methods(&self) -> impl Iterator<Item = &str> {
        self.rules.iter().map(|rule| rule.method.as_str()).filter(|method| *method != "POST")
    }

    /// Values that the rules compare with and that a source may configure.
    #[must_use]
    pub fn params(&self) -> Vec<&str> {
        let wanted = self.rules.iter().flat_map(|rule| &rule.when).filter_map(|(_, expected)| match expected {
            Expected::Text(text) => text.strip_prefix("param:"),
            _ => None,
        });
        let mut names: Vec<&str> = wanted.collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    /// The answer, if the request is a handshake and not an event.
    #[must_use]
    pub fn answer(&self, verified: &Verified<'_>, verifier: &Verifier) -> Option<Reply> {
        self.find(verified.request(), verifier, false)
    }

    /// The answer to a question that is asked without a signature.
    #[must_use]
    pub fn answer_unsigned(&self, request: &Request<'_>, verifier: &Verifier) -> Option<Reply> {
        self.find(request, verifier, true)
    }

    fn find(&self, request: &Request<'_>, verifier: &Verifier, unsigned: bool) -> Option<Reply> {
        let mut rules =
            self.rules.iter().filter(|rule| rule.unsigned == unsigned && rule.method == request.method).peekable();
        rules.peek()?;
        let view = View::new(request, verifier.settings(), &self.plan, request.body);
        rules.find_map(|rule| rule.answer(&view, verifier))
    }
}

#[derive(Debug, Clone)]
struct Rule {
    method: String,
    unsigned: bool,
    when: Vec<(Field, Expected)>,
    present: Vec<Field>,
    absent: Vec<Field>,
    body: Text,
    headers: Vec<(String, Text)>,
    status: u16,
    content_type: Option<String>,
    loose: bool,
    secret: Option<Field>,
    confirm: Option<Confirm>,
}

/// Text with values in it.
#[derive(Debug, Clone, Default)]
struct Text(Vec<Piece>);

#[derive(Debug, Clone)]
enum Piece {
    Literal(String),
    Value(Field),
    Hmac(Field, Encoding),
}

#[derive(Debug, Clone)]
enum Confirm {
    Sns { topic: Field, token: Field },
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
    fn answer(&self, view: &View<'_>, verifier: &Verifier) -> Option<Reply> {
        let fits = self.when.iter().all(|(field, expected)| expected.equals(field, view))
            && self.present.iter().all(|field| field.read(view).is_ok())
            && self.absent.iter().all(|field| match &field.at {
                At::Json(slot) => view.raw(*slot).is_none(),
                _ => field.read(view).is_err_and(|error| error.is_missing()),
            });
        if !fits {
            return None;
        }
        let body = self.body.fill(view, verifier, self.loose)?.into_bytes();
        let mut headers = Vec::with_capacity(self.headers.len());
        for (name, text) in &self.headers {
            headers.push((name.clone(), text.fill(view, verifier, false)?));
        }
        let action = match (&self.secret, &self.confirm) {
            (Some(field), _) => {
                let text = field.read(view).ok().filter(|text| is_harmless(text))?;
                Some(Action::Secret(crate::Secret::new(text).ok()?))
            }
            (None, Some(Confirm::Sns { topic, token })) => {
                let (topic, token) = (topic.read(view).ok()?, token.read(view).ok()?);
                Some(Action::Confirm { url: confirm_sns(&topic, &token)? })
            }
            (None, None) => None,
        };
        Some(Reply { status: self.status, content_type: self.content_type.clone(), headers, body, action })
    }
}

/// The address that confirms a subscription, at Amazon's own host for the topic's region.
fn confirm_sns(topic: &str, token: &str) -> Option<String> {
    let mut parts = topic.split(':');
    let (Some("arn"), Some(partition), Some("sns"), Some(region)) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return None;
    };
    let plain = !region.is_empty()
        && region.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-');
    let ending = match partition {
        "aws" | "aws-us-gov" => "amazonaws.com",
        "aws-cn" => "amazonaws.com.cn",
        _ => return None,
    };
    plain.then(|| {
        format!(
            "https://sns.{region}.{ending}/?Action=ConfirmSubscription&TopicArn={}&Token={}",
            form::encode(topic),
            form::encode(token)
        )
    })
}

impl Text {
    fn parse(text: &str, plan: &mut Plan) -> Result<Self, String> {
        let mut pieces = Vec::new();
        let mut rest = text;
        while let Some((before, after)) = rest.split_once("$(") {
            let (name, after) = after.split_once(')').ok_or("a value in the answer is not closed")?;
            pieces.push(Piece::Literal(before.to_owned()));
            pieces.push(match (name.strip_prefix("hmac-hex:"), name.strip_prefix("hmac-base64:")) {
                (Some(place), _) => Piece::Hmac(Field::parse(place, plan)?, Encoding::Hex),
                (_, Some(place)) => Piece::Hmac(Field::parse(place, plan)?, Encoding::Base64),
                _ => Piece::Value(Field::parse(name, plan)?),
            });
            rest = after;
        }
        pieces.push(Piece::Literal(rest.to_owned()));
        Ok(Self(pieces))
    }

    /// The text with its values; nothing if one is missing or not harmless.
    fn fill(&self, view: &View<'_>, verifier: &Verifier, loose: bool) -> Option<String> {
        let harmless = |text: &str| if loose { is_text(text) } else { is_harmless(text) };
        let mut filled = String::new();
        for piece in &self.0 {
            match piece {
                Piece::Literal(literal) => filled.push_str(literal),
                Piece::Value(field) => filled.push_str(&field.read(view).ok().filter(|text| harmless(text))?),
                Piece::Hmac(field, encoding) => {
                    let text: Cow<'_, str> = field.read(view).ok()?;
                    filled.push_str(&encoding.encode(&verifier.sign_challenge(text.as_bytes())?));
                }
            }
        }
        Some(filled)
    }
}

impl Expected {
    fn equals(&self, field: &Field, view: &View<'_>) -> bool {
        let raw = match &field.at {
            At::Json(slot) => view.raw(*slot),
            _ => None,
        };
        match self {
            Self::Bool(expected) => raw == Some(if *expected { "true" } else { "false" }),
            Self::Number(expected) => raw == Some(expected.to_string().as_str()),
            Self::Text(expected) => {
                let expected = match expected.strip_prefix("param:") {
                    None => expected.as_str(),
                    // A value that is not configured equals nothing.
                    Some(name) => match view.settings.params.get(name) {
                        Some(value) if !value.is_empty() => value,
                        _ => return false,
                    },
                };
                raw.is_none_or(|raw| raw.starts_with('"'))
                    && field.read(view).is_ok_and(|text| hmac::equal(text.as_bytes(), expected.as_bytes()))
            }
        }
    }
}

/// Safe to reflect: nothing that a browser or a terminal could take for more than text.
fn is_harmless(text: &str) -> bool {
    text.len() <= MAX_ECHO_BYTES && text.bytes().all(challenge::is_plain)
}

/// Plain text, without anything that could begin an element, an entity or an attribute.
fn is_text(text: &str) -> bool {
    text.len() <= MAX_LOOSE_BYTES
        && text
            .bytes()
            .all(|byte| matches!(byte, b' '..=b'~') && !matches!(byte, b'<' | b'>' | b'&' | b'"' | b'\'' | b'`'))
}

/// A rule as it is written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RuleText {
    #[serde(default = "post")]
    method: String,
    #[serde(default)]
    unsigned: bool,
    #[serde(default)]
    when: BTreeMap<String, Expected>,
    #[serde(default)]
    present: Vec<String>,
    #[serde(default)]
    absent: Vec<String>,
    echo: Option<String>,
    body: Option<String>,
    #[serde(default)]
    headers: BTreeMap<String, String>,
    #[serde(default = "ok")]
    status: u16,
    content_type: Option<String>,
    #[serde(default)]
    loose: bool,
    secret: Option<String>,
    confirm: Option<String>,
}

const fn ok() -> u16 {
    200
}

fn post() -> String {
    "POST".to_owned()
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
        rules.push(rule(text, &mut plan)?);
    }
    Ok(Handshakes { plan, rules })
}

fn rule(text: RuleText, plan: &mut Plan) -> Result<Rule, String> {
    if text.when.is_empty() && text.present.is_empty() && text.method != "HEAD" {
        return Err("when and present are empty: every event would be taken for a handshake".to_owned());
    }
    if !(200..300).contains(&text.status) {
        return Err("status must be between 200 and 299".to_owned());
    }
    if !["GET", "HEAD", "OPTIONS", "POST"].contains(&text.method.as_str()) {
        return Err("method must be GET, HEAD, OPTIONS or POST".to_owned());
    }
    if text.method != "POST" && !text.unsigned {
        return Err("only POST is signed: set unsigned = true".to_owned());
    }
    if text.unsigned && text.confirm.is_some() {
        return Err("nothing is confirmed for a stranger: confirm needs a signed request".to_owned());
    }
    let mut when = Vec::with_capacity(text.when.len());
    for (place, expected) in text.when {
        when.push((Field::parse(&place, plan)?, expected));
    }
    let body = match (text.echo, text.body) {
        (Some(_), Some(_)) => return Err("echo and body exclude each other".to_owned()),
        (Some(place), None) => Text(vec![Piece::Value(Field::parse(&place, plan)?)]),
        (None, body) => Text::parse(&body.unwrap_or_default(), plan)?,
    };
    let mut headers = Vec::new();
    for (name, value) in text.headers {
        headers.push((name, Text::parse(&value, plan)?));
    }
    let mut fields = |places: &[String]| -> Result<Vec<Field>, String> {
        places.iter().map(|place| Field::parse(place, plan)).collect()
    };
    let (present, absent) = (fields(&text.present)?, fields(&text.absent)?);
    let secret = text.secret.as_deref().map(|place| Field::parse(place, plan)).transpose()?;
    let confirm = match text.confirm.as_deref() {
        None => None,
        Some("sns") => {
            Some(Confirm::Sns { topic: Field::parse("/TopicArn", plan)?, token: Field::parse("/Token", plan)? })
        }
        Some(other) => return Err(format!("confirm: `{other}` is not known")),
    };
    Ok(Rule {
        method: text.method,
        unsigned: text.unsigned,
        when,
        present,
        absent,
        body,
        headers,
        status: text.status,
        content_type: text.content_type,
        loose: text.loose,
        secret,
        confirm,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_subscription_is_confirmed_at_amazon_and_nowhere_else() {
        assert_eq!(
            confirm_sns("arn:aws:sns:eu-west-1:123:my-topic", "a&b").unwrap(),
            "https://sns.eu-west-1.amazonaws.com/?Action=ConfirmSubscription&TopicArn=arn%3Aaws%3Asns%3Aeu-west-1%3A123%3Amy-topic&Token=a%26b"
        );
        assert!(
            confirm_sns("arn:aws-cn:sns:cn-north-1:1:t", "a")
                .unwrap()
                .starts_with("https://sns.cn-north-1.amazonaws.com.cn/")
        );
        for bad in [
            "",
            "arn:aws:sqs:eu-west-1:1:t",
            "arn:evil:sns:eu-west-1:1:t",
            "arn:aws:sns:evil.example/:1:t",
            "arn:aws:sns::1:t",
        ] {
            assert_eq!(confirm_sns(bad, "a"), None, "{bad}");
        }
    }
}
