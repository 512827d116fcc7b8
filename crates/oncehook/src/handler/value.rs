//! Values taken from an event: for the parameters of a statement and the places of a template.
//!
//! An [`Expression`] is a JSON pointer into the body (`/data/object/id`) or one of `$key`, `$event`, `$type`, `$entity`,
//! `$time`, `$received`, `$source`, `$body`, `$result`, `$version`, `$state`, `$current`; `$result/id` points into the
//! result, `$current/id` into what was fetched.
//!
//! Promises: a pointer that leads nowhere is an error that names it, never an empty value. JSON null is a value.

use std::borrow::Cow;

use oncehook_verify::Picker;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::delivery::{Cause, Failure, HandedEvent};
use crate::json::{PLAIN_LEVELS, is_json_within};

/// Where a value comes from.
#[derive(Debug, Clone)]
pub enum Expression {
    /// A JSON pointer into the body.
    Body(String),
    /// What the delivery before this one returned; the pointer leads into it.
    Result(String),
    /// What the provider says of the entity now; the pointer leads into it.
    Current(String),
    /// Something else that is known of the event.
    Field(&'static Field),
}

/// What is known of an event besides the contents of its body, by the word for it.
#[derive(Debug)]
pub struct Field {
    word: &'static str,
    value: fn(&HandedEvent) -> Found<'_>,
}

static FIELDS: [Field; 10] = [
    // The idempotency key.
    Field { word: "$key", value: |event| text_or_bytes(event.key.as_bytes()) },
    Field { word: "$event", value: |event| text(event.id.to_string()) },
    Field { word: "$type", value: |event| event.kind.as_deref().map_or(Found::Null, text) },
    // What the event is about.
    Field { word: "$entity", value: |event| event.entity.as_deref().map_or(Found::Null, text) },
    // When it happened; where the provider does not say, when it arrived.
    Field { word: "$time", value: |event| text(event.occurred_at.unwrap_or(event.received_at).to_rfc3339()) },
    Field { word: "$received", value: |event| text(event.received_at.to_rfc3339()) },
    Field { word: "$source", value: |event| text(event.source.as_str()) },
    // The whole body as text.
    Field { word: WHOLE_BODY, value: |event| text_or_bytes(&event.body) },
    // Which version of its entity it tells about, as the provider counts.
    Field { word: "$version", value: |event| event.version.map_or(Found::Null, |version| json(version.to_string())) },
    // With a state machine: the state that it leads to.
    Field { word: STATE, value: |event| event.state.as_deref().map_or(Found::Null, text) },
];

const WHOLE_BODY: &str = "$body";

const STATE: &str = "$state";

fn text<'e>(text: impl Into<Cow<'e, str>>) -> Found<'e> {
    Found::Text(text.into())
}

fn text_or_bytes(bytes: &[u8]) -> Found<'_> {
    std::str::from_utf8(bytes).map_or(Found::Bytes(bytes), text)
}

fn json<'e>(json: impl Into<Cow<'e, str>>) -> Found<'e> {
    Found::Json(json.into())
}

impl Expression {
    /// Reads an expression. The error is for the author of the configuration.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (expression, pointer): (fn(String) -> Self, &str) = if text.starts_with('/') {
            (Self::Body, text)
        } else if let Some(pointer) = text.strip_prefix("$result") {
            (Self::Result, pointer)
        } else if let Some(pointer) = text.strip_prefix("$current") {
            (Self::Current, pointer)
        } else {
            return FIELDS.iter().find(|field| field.word == text).map(Self::Field).ok_or_else(|| {
                format!(
                    "{text:?} is neither a JSON pointer (\"/data/id\") nor one of $key, $event, $type, $entity, $time, \
                     $received, $source, $body, $result, $version, $state, $current"
                )
            });
        };
        Picker::new(&[pointer])?;
        Ok(expression(pointer.to_owned()))
    }

    /// Whether it needs the result of a delivery before.
    pub fn needs_result(&self) -> bool {
        matches!(self, Self::Result(_))
    }

    /// Whether it needs what is fetched from the provider.
    pub fn needs_current(&self) -> bool {
        matches!(self, Self::Current(_))
    }

    /// Whether it needs a state machine.
    pub fn needs_state(&self) -> bool {
        matches!(self, Self::Field(field) if field.word == STATE)
    }
}

impl std::fmt::Display for Expression {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Body(pointer) => f.write_str(pointer),
            Self::Result(pointer) => write!(f, "$result{pointer}"),
            Self::Current(pointer) => write!(f, "$current{pointer}"),
            Self::Field(field) => f.write_str(field.word),
        }
    }
}

/// A value that was found.
#[derive(Debug, Clone, PartialEq)]
pub enum Found<'e> {
    /// Text that is not JSON.
    Text(Cow<'e, str>),
    /// Bytes that are not UTF-8.
    Bytes(&'e [u8]),
    /// JSON text.
    Json(Cow<'e, str>),
    /// Nothing, where nothing is a fair answer (an event without a type).
    Null,
}

impl Found<'_> {
    /// As JSON text.
    pub fn to_json(&self) -> Cow<'_, str> {
        match self {
            Self::Text(text) => Cow::Owned(Value::from(text.as_ref()).to_string()),
            Self::Bytes(bytes) => Cow::Owned(Value::from(String::from_utf8_lossy(bytes)).to_string()),
            Self::Json(json) => Cow::Borrowed(json),
            Self::Null => Cow::Borrowed("null"),
        }
    }
}

/// A list of expressions that are looked up together, in one pass over the body.
#[derive(Debug, Clone)]
pub struct Lookup {
    expressions: Vec<Expression>,
    body: Picker,
}

impl Lookup {
    /// Looks these up, in this order.
    pub fn new(expressions: Vec<Expression>) -> Result<Self, String> {
        let in_body = expressions.iter().filter_map(|expression| match expression {
            Expression::Body(pointer) => Some(pointer.as_str()),
            _ => None,
        });
        let pointers: Vec<&str> = in_body.collect();
        Ok(Self { body: Picker::new(&pointers)?, expressions })
    }

    /// Whether one of them satisfies that.
    pub fn any(&self, needs: impl Fn(&Expression) -> bool) -> bool {
        self.expressions.iter().any(needs)
    }

    /// The values, or a failure that names the first expression that leads nowhere.
    pub fn find<'e>(&self, event: &'e HandedEvent) -> Result<Vec<Found<'e>>, Failure> {
        let picked =
            self.body.pick(&event.body).map_err(|error| Failure::permanent(Cause::Poison, error.to_string()))?;
        let mut picked = picked.into_iter();
        let mut find = |expression: &Expression| {
            Some(match expression {
                Expression::Body(_) => json(picked.next()??),
                // A result of an earlier version may be nested too deep to be read: as a text.
                Expression::Result(pointer) if pointer.is_empty() => {
                    let result = event.result.as_deref()?;
                    point(result, pointer).map_or(text(result), json)
                }
                Expression::Result(pointer) => json(point(event.result.as_deref()?, pointer)?),
                Expression::Current(pointer) => json(point(event.current.as_deref()?, pointer)?),
                Expression::Field(field) => (field.value)(event),
            })
        };
        let found = |expression: &Expression| {
            find(expression).ok_or_else(|| {
                let message = format!("`{expression}` leads nowhere in this event");
                // The expression is the configuration's.
                Failure::permanent(Cause::Poison, message.clone()).in_log(message)
            })
        };
        self.expressions.iter().map(found).collect()
    }
}

/// The JSON text at a pointer in a result.
fn point(result: &str, pointer: &str) -> Option<String> {
    let value: Value = serde_json::from_str(result).ok()?;
    value.pointer(pointer).map(ToString::to_string)
}

/// A text with places (`{{/data/id}}`, `{{$key}}`). In a header they are filled with the values as plain text: a string without
/// its quotes, null as nothing, everything else as its JSON text.
///
/// Does not: make a value fit into a header. The caller refuses what does not.
#[derive(Debug, Clone)]
pub struct HeaderTemplate {
    /// What stands between the places: one more than there are places.
    pub(crate) texts: Vec<String>,
    values: Lookup,
}

impl HeaderTemplate {
    /// Reads a template. The error is for the author of the configuration.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut texts = Vec::new();
        let mut places = Vec::new();
        let mut rest = text;
        while let Some((before, after)) = rest.split_once("{{") {
            let (place, after) = after.split_once("}}").ok_or("a `{{` is not closed with `}}`")?;
            texts.push(before.to_owned());
            places.push(Expression::parse(place.trim())?);
            rest = after;
        }
        texts.push(rest.to_owned());
        Ok(Self { texts, values: Lookup::new(places)? })
    }

    /// Whether a place satisfies that.
    pub fn any(&self, needs: impl Fn(&Expression) -> bool) -> bool {
        self.values.any(needs)
    }

    /// The text with its places filled.
    pub(crate) fn fill(&self, event: &HandedEvent) -> Result<String, Failure> {
        self.fill_with(event, |expression, value| match value {
            Found::Null => Ok(String::new()),
            Found::Text(text) => Ok(text.to_string()),
            Found::Json(json) if json == "null" => Ok(String::new()),
            Found::Json(json) if json.starts_with('"') => serde_json::from_str(json).map_err(|_| {
                let message = format!("`{expression}` holds characters that are no text");
                Failure::permanent(Cause::Poison, message)
            }),
            Found::Json(json) => Ok(json.to_string()),
            Found::Bytes(_) => Err(Failure::permanent(Cause::Poison, format!("`{expression}` is not text"))),
        })
    }

    /// The text with its places filled, each as `write` says.
    fn fill_with(
        &self,
        event: &HandedEvent,
        write: impl Fn(&Expression, &Found<'_>) -> Result<String, Failure>,
    ) -> Result<String, Failure> {
        let found = self.values.find(event)?;
        let mut values = self.values.expressions.iter().zip(&found);
        let mut filled = String::new();
        for text in &self.texts {
            filled.push_str(text);
            if let Some((expression, value)) = values.next() {
                filled.push_str(&write(expression, value)?);
            }
        }
        Ok(filled)
    }
}

/// JSON with places: what stands in the braces is replaced by the value's JSON text, quotes and all, so nothing in an event can
/// break out of its place.
///
/// `{{$body}}` is the event's body: the JSON itself, if it is JSON of at most [`PLAIN_LEVELS`] levels, and a string otherwise.
#[derive(Debug, Clone)]
pub struct Template(HeaderTemplate);

impl Template {
    /// Reads a template. The error is for the author of the configuration.
    pub fn parse(text: &str) -> Result<Self, String> {
        let places = HeaderTemplate::parse(text)?;
        // Null shows a place that is no value (a name), a string one inside quotes.
        let fits = |probe: &str| serde_json::from_str::<&RawValue>(&places.texts.join(probe)).is_ok();
        if !fits("null") || !fits("\"x\"") {
            return Err("with its places filled the template is not JSON".to_owned());
        }
        Ok(Self(places))
    }

    /// Whether a place satisfies that.
    pub fn any(&self, needs: impl Fn(&Expression) -> bool) -> bool {
        self.0.any(needs)
    }

    /// The text with its places filled.
    pub fn fill(&self, event: &HandedEvent) -> Result<String, Failure> {
        self.0.fill_with(event, |expression, value| {
            Ok(match (expression, value) {
                (Expression::Field(field), Found::Text(body))
                    if field.word == WHOLE_BODY && is_json_within(body, PLAIN_LEVELS) =>
                {
                    body.trim().to_owned()
                }
                _ => value.to_json().into_owned(),
            })
        })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::event::{EventIds, SourceName};
    use bytes::Bytes;
    use oncehook_verify::{EventKey, UnixMicros};

    /// An event for tests of handlers.
    pub(crate) fn handed(body: &'static str, result: Option<&str>) -> HandedEvent {
        HandedEvent {
            id: EventIds::above(0, 1).next(UnixMicros(1_700_000_000_000_000)),
            source: SourceName::new("shop").unwrap(),
            key: EventKey::from_parts(&[b"evt_1"]),
            kind: Some("order.paid".to_owned()),
            entity: None,
            occurred_at: None,
            received_at: UnixMicros(1_700_000_000_000_000),
            headers: Bytes::from_static(b"content-type: application/json\n"),
            body: Bytes::from_static(body.as_bytes()),
            result: result.map(str::to_owned),
            version: None,
            state: None,
            current: None,
        }
    }

    fn find(expressions: &[&str], event: &HandedEvent) -> Result<Vec<String>, Failure> {
        let expressions = expressions.iter().map(|text| Expression::parse(text).unwrap()).collect();
        let lookup = Lookup::new(expressions).unwrap();
        Ok(lookup.find(event)?.iter().map(|found| found.to_json().into_owned()).collect())
    }

    #[test]
    fn values_are_found_where_they_are() {
        let event = handed(r#"{"a":{"b":1.50},"c":null,"d":"x\"y"}"#, Some(r#"{"id":7,"list":[true]}"#));
        for (expression, value) in [
            ("/a/b", "1.50"),
            ("/c", "null"),
            ("/d", r#""x\"y""#),
            ("$key", "\"evt_1\""),
            ("$type", "\"order.paid\""),
            ("$entity", "null"),
            ("$time", "\"2023-11-14T22:13:20.000000Z\""),
            ("$result/id", "7"),
            ("$result", r#"{"id":7,"list":[true]}"#),
            ("$source", "\"shop\""),
        ] {
            // Together with others: each pointer into the body has its own value.
            assert_eq!(find(&["/d", expression, "/c"], &event).unwrap(), [r#""x\"y""#, value, "null"], "{expression}");
            assert_eq!(Expression::parse(expression).unwrap().to_string(), expression);
        }
    }

    #[test]
    fn a_path_that_leads_nowhere_is_named_and_final() {
        let event = handed(r#"{"a":1}"#, None);
        for path in ["/b", "/a/b", "$result", "$result/id"] {
            let failure = find(&[path], &event).unwrap_err();
            assert!(failure.message.contains(&format!("`{path}`")), "{failure}");
            assert_eq!(failure.remedy, crate::delivery::Remedy::GiveUp);
        }
        assert!(find(&["/a"], &handed(r#"{"a":1,"a":2}"#, None)).is_err());
    }

    #[test]
    fn expressions_are_checked_when_read() {
        for text in ["a/b", "$nothing", "", "$result.id"] {
            assert!(Expression::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn templates_cannot_be_broken_out_of() {
        let template = Template::parse(r#"{"to": {{/mail}}, "key": {{$key}}, "text": "hello"}"#).unwrap();
        let filled = template.fill(&handed(r#"{"mail":"a\",\"admin\":true,\"b\":\""}"#, None)).unwrap();
        let filled: Value = serde_json::from_str(&filled).unwrap();
        assert_eq!(filled["to"], "a\",\"admin\":true,\"b\":\"");
        assert!(filled.get("admin").is_none());
        assert!(Template::parse("{{$key").is_err() && Template::parse("{\"a\": \"{{$key}}\"}").is_err());
        assert!(Template::parse("{ {{$key}}: 1 }").is_err());
    }
}
