//! The text that is signed, as a template: `{ts}.{body}`.
//!
//! A template is cut once when it is loaded. Filling it gives a list of borrowed pieces, so the body is
//! never copied to be signed. Names in braces are replaced, everything else is literal, and `{{` and `}}`
//! stand for single braces. A template has no conditions and no functions: one defined input per scheme.

use http::HeaderName;
use smallvec::SmallVec;

use crate::{header, rejection::Rejection, request::Request};

/// The signed content in order. Pieces of it are borrowed from the request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Template {
    parts: Vec<Part>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Part {
    Literal(String),
    Body,
    Timestamp,
    Id,
    Method,
    Path,
    Header(HeaderName),
}

/// What the template needs besides the request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Filling<'a> {
    pub request: &'a Request<'a>,
    pub timestamp: Option<&'a str>,
    pub id: Option<&'a str>,
}

/// The signed bytes, one after another.
pub(crate) type Pieces<'a> = SmallVec<[&'a [u8]; 8]>;

impl Template {
    /// Cuts the text of a template.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let mut parts = Vec::new();
        let mut literal = String::new();
        let mut rest = text;
        while let Some(brace) = rest.find(['{', '}']) {
            let (before, from_brace) = rest.split_at(brace);
            literal.push_str(before);
            if let Some(after) = from_brace.strip_prefix("{{") {
                literal.push('{');
                rest = after;
            } else if let Some(after) = from_brace.strip_prefix("}}") {
                literal.push('}');
                rest = after;
            } else if let Some((name, after)) =
                from_brace.strip_prefix('{').and_then(|inner| inner.split_once('}'))
            {
                if !literal.is_empty() {
                    parts.push(Part::Literal(std::mem::take(&mut literal)));
                }
                parts.push(Part::named(name)?);
                rest = after;
            } else {
                return Err("content: a brace is not closed or not opened; write {{ or }} for a literal one"
                    .to_owned());
            }
        }
        literal.push_str(rest);
        if !literal.is_empty() {
            parts.push(Part::Literal(literal));
        }
        if parts.iter().all(|part| matches!(part, Part::Literal(_))) {
            return Err("content signs nothing of the request".to_owned());
        }
        Ok(Self { parts })
    }

    pub(crate) fn contains(&self, wanted: &Part) -> bool {
        self.parts.contains(wanted)
    }

    /// The character that ends the id in the signed text, if a literal follows it. An id that holds this
    /// character could be read in two ways.
    pub(crate) fn id_terminator(&self) -> Option<char> {
        self.parts.windows(2).find_map(|pair| match pair {
            [Part::Id, Part::Literal(literal)] => literal.chars().next(),
            _ => None,
        })
    }

    /// The signed bytes for one request.
    pub(crate) fn fill<'a>(&'a self, filling: &Filling<'a>) -> Result<Pieces<'a>, Rejection> {
        let mut pieces = Pieces::new();
        for part in &self.parts {
            let piece = match part {
                Part::Literal(literal) => literal.as_bytes(),
                Part::Body => filling.request.body,
                Part::Timestamp => filling.timestamp.ok_or(Rejection::MissingTimestamp)?.as_bytes(),
                // A scheme with `{id}` always names the id's header, so the id has been read by now.
                Part::Id => filling.id.unwrap_or_default().as_bytes(),
                Part::Method => filling.request.method.as_bytes(),
                Part::Path => filling.request.path.as_bytes(),
                Part::Header(name) => header::read_one(name, filling.request.headers)?.as_bytes(),
            };
            pieces.push(piece);
        }
        Ok(pieces)
    }
}

impl Part {
    fn named(name: &str) -> Result<Self, String> {
        Ok(match name {
            "body" => Self::Body,
            "ts" => Self::Timestamp,
            "id" => Self::Id,
            "method" => Self::Method,
            "path" => Self::Path,
            _ => match name.strip_prefix("header:") {
                Some(header) => Self::Header(
                    HeaderName::from_bytes(header.as_bytes())
                        .map_err(|_| format!("content: `{header}` is not a header name"))?,
                ),
                None => {
                    return Err(format!(
                        "content: {{{name}}} is unknown; there are {{body}}, {{ts}}, {{id}}, {{method}}, {{path}} and {{header:NAME}}"
                    ));
                }
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(text: &str) -> String {
        let mut headers = http::HeaderMap::new();
        headers.insert("x-topic", http::HeaderValue::from_static("orders"));
        let request = Request { method: "POST", path: "/in?a=1", headers: &headers, body: b"BODY" };
        let template = Template::parse(text).unwrap();
        let pieces =
            template.fill(&Filling { request: &request, timestamp: Some("12"), id: Some("m1") }).unwrap();
        String::from_utf8(pieces.concat()).unwrap()
    }

    #[test]
    fn names_are_replaced_and_the_rest_is_literal() {
        assert_eq!(filled("{ts}.{body}"), "12.BODY");
        assert_eq!(filled("v0:{ts}:{body}"), "v0:12:BODY");
        assert_eq!(filled("{id}{ts}{body}"), "m112BODY");
        assert_eq!(filled("{method} {path} {header:X-Topic}|{body}!"), "POST /in?a=1 orders|BODY!");
        assert_eq!(filled("{{x}}{body}}}"), "{x}BODY}");
    }

    #[test]
    fn mistakes_are_found() {
        for text in ["", "fixed", "{bdy}", "{body", "body}", "{}{body}", "{header:a b}", "{header:}"] {
            assert!(Template::parse(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn the_terminator_of_the_id_is_known() {
        assert_eq!(Template::parse("{id}.{ts}.{body}").unwrap().id_terminator(), Some('.'));
        assert_eq!(Template::parse("{id}{ts}{body}").unwrap().id_terminator(), None);
        assert_eq!(Template::parse("{ts}.{body}").unwrap().id_terminator(), None);
    }
}
