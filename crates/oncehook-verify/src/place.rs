//! Where a value stands: in a header, in the body, in the query, or in the first of several places.
//!
//! A [`Place`] is what the operator wrote: `/id`, `header:x-id`, `header:a|b`, `/event/type|/type`, `form:MessageSid`,
//! `query:id`, `xml:kind`, `digest` for the digest of the event, with `?` at the end for a part that may be absent. A [`Part`] is the same compiled against a [`Plan`]. Looking values
//! up is the business of the `identify` module.

use http::HeaderName;
use serde::Deserialize;
use smallvec::SmallVec;

use crate::{
    extract::{Plan, Slot},
    header::HeaderNames,
    pointer::Pointer,
    scheme::{Integrity, Scheme},
    time::UnixMicros,
    view::At,
};

/// Where one part stands: alternatives in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place {
    alternatives: Vec<Alternative>,
    pub(crate) optional: bool,
}

/// A header under any of its names, or a value in the body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Alternative {
    Header(HeaderNames),
    Json(Pointer),
    Form(String),
    Query(String),
    /// The text of the first element of that name.
    Xml(String),
    /// The digest of the event itself.
    Digest,
}

/// One part of a key or name, compiled: alternatives in order.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    pub(crate) sources: SmallVec<[Source; 2]>,
    pub(crate) optional: bool,
}

/// One alternative, compiled.
#[derive(Debug, Clone)]
pub(crate) enum Source {
    Header(HeaderName),
    Json(Slot),
    Form(String),
    Query(String),
    Xml(String),
    Digest,
}

/// The unit in which a sender writes the time of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub(crate) enum TimeUnit {
    #[serde(rename = "s")]
    Seconds,
    #[serde(rename = "ms")]
    Millis,
    #[serde(rename = "rfc3339")]
    Rfc3339,
}

impl TimeUnit {
    /// A time that cannot be read is no time; the event goes on without it.
    pub(crate) fn parse(self, text: &str) -> Option<UnixMicros> {
        match self {
            // A fraction of a second (Mailgun) is cut off.
            Self::Seconds => {
                let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
                let whole = Some(whole).filter(|_| fraction.bytes().all(|byte| byte.is_ascii_digit()))?;
                Some(UnixMicros(whole.parse::<i64>().ok()?.checked_mul(1_000_000)?))
            }
            Self::Millis => Some(UnixMicros(text.parse::<i64>().ok()?.checked_mul(1_000)?)),
            // Some senders (GitLab) write "2026-11-15 02:20:17 UTC".
            Self::Rfc3339 => match text.strip_suffix(" UTC") {
                Some(time) => UnixMicros::parse_rfc3339(&format!("{time}Z")),
                None => UnixMicros::parse_rfc3339(text),
            },
        }
    }
}

impl Place {
    /// Reads a place as it is written in TOML.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let (text, optional) = match text.strip_suffix('?') {
            Some(text) => (text, true),
            None => (text, false),
        };
        let mut alternatives: Vec<Alternative> = Vec::new();
        let mut names: Vec<&str> = Vec::new();
        for piece in text.split('|') {
            let pointer = piece.strip_prefix("json:").or_else(|| piece.starts_with('/').then_some(piece));
            if let Some(pointer) = pointer {
                push_header(&mut alternatives, &mut names)?;
                let pointer = Pointer::parse(pointer)?;
                if pointer.is_root() {
                    return Err("the whole document cannot be a value".to_owned());
                }
                alternatives.push(Alternative::Json(pointer));
            } else if piece == "digest" && names.is_empty() {
                alternatives.push(Alternative::Digest);
            } else if let Some((kind, name)) = piece
                .split_once(':')
                .filter(|(kind, name)| matches!(*kind, "form" | "query" | "xml") && !name.is_empty())
            {
                push_header(&mut alternatives, &mut names)?;
                let name = name.to_owned();
                alternatives.push(match kind {
                    "form" => Alternative::Form(name),
                    "query" => Alternative::Query(name),
                    _ => Alternative::Xml(name),
                });
            } else if let Some(name) = piece.strip_prefix("header:") {
                push_header(&mut alternatives, &mut names)?;
                names.push(name);
            } else if names.is_empty() {
                return Err(format!("`{piece}` is neither a JSON pointer (/id) nor a header (header:x-id)"));
            } else {
                names.push(piece);
            }
        }
        push_header(&mut alternatives, &mut names)?;
        Ok(Self { alternatives, optional })
    }

    /// Adds the wanted pointers to the plan.
    pub(crate) fn compile(&self, plan: &mut Plan) -> Result<Part, String> {
        let mut sources = SmallVec::new();
        for alternative in &self.alternatives {
            match alternative {
                Alternative::Header(names) => sources.extend(names.iter().cloned().map(Source::Header)),
                Alternative::Json(pointer) => sources.push(Source::Json(plan.add(pointer)?)),
                Alternative::Form(name) => sources.push(Source::Form(name.clone())),
                Alternative::Query(name) => sources.push(Source::Query(name.clone())),
                Alternative::Xml(name) => sources.push(Source::Xml(name.clone())),
                Alternative::Digest => sources.push(Source::Digest),
            }
        }
        Ok(Part { sources, optional: self.optional })
    }

    /// The headers that it may be read from.
    pub(crate) fn headers(&self) -> impl Iterator<Item = &HeaderName> {
        self.alternatives.iter().flat_map(|alternative| match alternative {
            Alternative::Header(names) => Some(names.iter()).into_iter().flatten(),
            _ => None.into_iter().flatten(),
        })
    }

    /// Is the value covered by the signature, whichever alternative is used?
    pub(crate) fn is_signed(&self, scheme: &Scheme) -> bool {
        self.alternatives.iter().all(|alternative| match alternative {
            Alternative::Header(names) => scheme.signs_header(names),
            Alternative::Json(pointer) => scheme.signs_pointer(pointer),
            Alternative::Form(name) => scheme.signs_field(&At::Form(name.clone())),
            Alternative::Query(name) => scheme.signs_field(&At::Query(name.clone())),
            Alternative::Xml(_) | Alternative::Digest => scheme.integrity() == Integrity::Body,
        })
    }
}

fn push_header(alternatives: &mut Vec<Alternative>, names: &mut Vec<&str>) -> Result<(), String> {
    if !names.is_empty() {
        alternatives.push(Alternative::Header(HeaderNames::parse(names.drain(..))?));
    }
    Ok(())
}

/// The parts of a key; nothing for `digest`.
pub(crate) fn key_places(places: &[&str]) -> Result<Option<Vec<Place>>, String> {
    match places {
        [] => return Err("key must not be an empty list".to_owned()),
        ["digest"] => return Ok(None),
        _ => {}
    }
    let places = places.iter().map(|place| Place::parse(place)).collect::<Result<Vec<_>, _>>()?;
    if places.iter().any(|place| place.optional) {
        return Err("no part of a key can be optional; missing_key says what happens without one".to_owned());
    }
    Ok(Some(places))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alternatives_keep_their_order_and_kind() {
        let place = Place::parse("header:a|b|/c/d|json:/e?").unwrap();
        assert!(place.optional);
        assert_eq!(
            place.alternatives,
            [
                Alternative::Header(HeaderNames::parse(["a", "b"]).unwrap()),
                Alternative::Json(Pointer::parse("/c/d").unwrap()),
                Alternative::Json(Pointer::parse("/e").unwrap()),
            ]
        );
    }

    #[test]
    fn what_is_no_place_is_refused() {
        for text in ["", "id", "header:", "header:a|", "/a|b", "json:", "json:a", "?", "|/a", "form:", "xml:", "file:a"]
        {
            assert!(Place::parse(text).is_err(), "{text:?}");
        }
    }
}
