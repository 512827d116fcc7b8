//! The text that is signed, as a template: `{ts}.{body}`.
//!
//! A template is cut once when it is loaded. Filling it gives a list of pieces, borrowed where that is possible, so
//! the body is never copied to be signed. Names in braces are replaced, everything else is literal, and `{{`, `}}`,
//! `[[` and `]]` stand for single characters. One defined input per scheme: no conditions, except that a group in
//! brackets is left out when a value in it is missing (`[id:{query:data.id};]`), and a name with a question mark
//! (`{/reference?}`) stands for nothing when its value is missing.
//!
//! | name | meaning |
//! | --- | --- |
//! | `{body}` `{method}` `{path}` | as received |
//! | `{url}` | the configured address with the query of the request |
//! | `{ts}` `{id}` | the time and the id, as the scheme says where they stand |
//! | `{header:NAME}` `{query:NAME}` `{form:NAME}` `{/json/pointer}` `{param:NAME}` | one value |
//! | `{crc32}` | the CRC-32 of the body in decimal digits |
//! | `{sorted-form}` | every field of the form, sorted, as name and value |
//! | `{special:NAME}` | what a provider builds by rules of its own; see the `special` module |

use std::borrow::Cow;

use smallvec::SmallVec;

use crate::{
    extract::Plan,
    rejection::Rejection,
    special::{self, Special},
    view::{At, Field, View},
};

/// The signed content in order.
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
    Url,
    Crc32,
    SortedForm,
    /// `true`: stands for nothing when missing.
    Field(Field, bool),
    Special(Special),
    /// Left out whole when a value in it is missing.
    Group(Vec<Part>),
}

/// What the template needs besides the request.
#[derive(Clone, Copy)]
pub(crate) struct Filling<'v, 'a> {
    pub view: &'v View<'a>,
    pub timestamp: Option<&'v str>,
    pub id: Option<&'v str>,
    /// Names of signed headers, where the signature header lists them.
    pub names: Option<&'v str>,
}

/// The signed bytes, one after another.
pub(crate) type Pieces<'a> = SmallVec<[Cow<'a, [u8]>; 8]>;

impl Template {
    /// Cuts the text of a template. JSON pointers are added to the plan.
    pub(crate) fn parse(text: &str, plan: &mut Plan) -> Result<Self, String> {
        let mut groups: Vec<Vec<Part>> = vec![Vec::new()];
        let mut literal = String::new();
        let mut rest = text;
        let flush = |literal: &mut String, groups: &mut Vec<Vec<Part>>| {
            if let (false, Some(parts)) = (literal.is_empty(), groups.last_mut()) {
                parts.push(Part::Literal(std::mem::take(literal)));
            }
        };
        while let Some(at) = rest.find(['{', '}', '[', ']']) {
            let (before, from) = rest.split_at(at);
            literal.push_str(before);
            let doubled = ["{{", "}}", "[[", "]]"].iter().find(|doubled| from.starts_with(**doubled));
            if let Some(doubled) = doubled {
                literal.extend(doubled.chars().next());
                rest = from.get(2..).unwrap_or_default();
            } else if let Some((name, after)) = from.strip_prefix('{').and_then(|inner| inner.split_once('}')) {
                flush(&mut literal, &mut groups);
                let part = Part::named(name, plan)?;
                groups.iter_mut().last().ok_or("content: a bracket is not opened")?.push(part);
                rest = after;
            } else if let (Some(after), 1) = (from.strip_prefix('['), groups.len()) {
                flush(&mut literal, &mut groups);
                groups.push(Vec::new());
                rest = after;
            } else if let (Some(after), 2) = (from.strip_prefix(']'), groups.len()) {
                flush(&mut literal, &mut groups);
                let group = groups.pop().unwrap_or_default();
                groups.iter_mut().last().ok_or("content: a bracket is not opened")?.push(Part::Group(group));
                rest = after;
            } else {
                return Err(
                    "content: a brace or bracket is not closed or not opened; double it for a literal one".to_owned()
                );
            }
        }
        literal.push_str(rest);
        flush(&mut literal, &mut groups);
        let (Some(parts), 1) = (groups.pop(), groups.len() + 1) else {
            return Err("content: a bracket is not closed".to_owned());
        };
        if parts.iter().all(|part| matches!(part, Part::Literal(_) | Part::Field(Field { at: At::Param(_), .. }, _))) {
            return Err("content signs nothing of the request".to_owned());
        }
        Ok(Self { parts })
    }

    /// Every part, groups opened.
    pub(crate) fn parts(&self) -> impl Iterator<Item = &Part> {
        self.parts.iter().flat_map(|part| match part {
            Part::Group(parts) => parts.as_slice(),
            other => std::slice::from_ref(other),
        })
    }

    pub(crate) fn contains(&self, wanted: &Part) -> bool {
        self.parts().any(|part| part == wanted)
    }

    /// Is every byte of the body signed?
    pub(crate) fn covers_body(&self) -> bool {
        self.parts().any(|part| match part {
            Part::Body => true,
            Part::Special(special) => special.covers_body(),
            _ => false,
        })
    }

    /// Is the configured address signed?
    pub(crate) fn needs_url(&self) -> bool {
        self.parts().any(|part| match part {
            Part::Url => true,
            Part::Special(special) => special.needs_url(),
            _ => false,
        })
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
    pub(crate) fn fill<'v>(&'v self, filling: &Filling<'v, '_>) -> Result<Pieces<'v>, Rejection> {
        let mut pieces = Pieces::new();
        fill(&self.parts, filling, &mut pieces)?;
        Ok(pieces)
    }
}

fn fill<'v>(parts: &'v [Part], filling: &Filling<'v, '_>, pieces: &mut Pieces<'v>) -> Result<(), Rejection> {
    let view = filling.view;
    for part in parts {
        let piece: Cow<'v, [u8]> = match part {
            Part::Literal(literal) => Cow::Borrowed(literal.as_bytes()),
            Part::Body => Cow::Borrowed(view.request.body),
            Part::Timestamp => Cow::Borrowed(filling.timestamp.ok_or(Rejection::MissingTimestamp)?.as_bytes()),
            // A scheme with `{id}` always names the id's header, so the id has been read by now.
            Part::Id => Cow::Borrowed(filling.id.unwrap_or_default().as_bytes()),
            Part::Method => Cow::Borrowed(view.request.method.as_bytes()),
            Part::Path => Cow::Borrowed(view.request.path.as_bytes()),
            Part::Url => bytes(view.url()),
            Part::Crc32 => Cow::Owned(special::crc32(view.request.body).to_string().into_bytes()),
            Part::SortedForm => Cow::Owned(special::sorted_form(view)?),
            Part::Special(special) => Cow::Owned(special.build(filling)?),
            Part::Field(field, optional) => match field.read(view) {
                Err(missing) if *optional && missing.is_missing() => Cow::Borrowed(&[]),
                read => bytes(read?),
            },
            Part::Group(inner) => {
                let before = pieces.len();
                match fill(inner, filling, pieces) {
                    Err(missing) if missing.is_missing() => pieces.truncate(before),
                    filled => filled?,
                }
                continue;
            }
        };
        pieces.push(piece);
    }
    Ok(())
}

fn bytes(text: Cow<'_, str>) -> Cow<'_, [u8]> {
    match text {
        Cow::Borrowed(text) => Cow::Borrowed(text.as_bytes()),
        Cow::Owned(text) => Cow::Owned(text.into_bytes()),
    }
}

impl Part {
    fn named(name: &str, plan: &mut Plan) -> Result<Self, String> {
        Ok(match name {
            "body" => Self::Body,
            "ts" => Self::Timestamp,
            "id" => Self::Id,
            "method" => Self::Method,
            "path" => Self::Path,
            "url" => Self::Url,
            "crc32" => Self::Crc32,
            "sorted-form" => Self::SortedForm,
            _ => match name.strip_prefix("special:") {
                Some(special) => Self::Special(Special::named(special)?),
                None => {
                    let (place, optional) = match name.strip_suffix('?') {
                        Some(place) => (place, true),
                        None => (name, false),
                    };
                    let field = Field::parse(place, plan).map_err(|_| {
                        format!(
                            "content: {{{name}}} is unknown; there are {{body}}, {{ts}}, {{id}}, {{method}}, {{path}}, {{url}}, {{crc32}}, {{sorted-form}}, {{header:NAME}}, {{query:NAME}}, {{form:NAME}}, {{param:NAME}} and {{/json/pointer}}"
                        )
                    })?;
                    Self::Field(field, optional)
                }
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{request::Request, settings::Settings};

    fn filled_at(text: &str, path: &str, body: &[u8]) -> Result<String, Rejection> {
        let mut headers = http::HeaderMap::new();
        headers.insert("x-topic", http::HeaderValue::from_static("orders"));
        let request = Request { method: "POST", path, headers: &headers, body };
        let mut plan = Plan::new();
        let template = Template::parse(text, &mut plan).unwrap();
        let settings = Settings {
            url: Some("https://a.example/in".into()),
            params: [("p".into(), "P".into())].into(),
            ..Settings::default()
        };
        let view = View::new(&request, &settings, &plan, body);
        let filling = Filling { view: &view, timestamp: Some("12"), id: Some("m1"), names: None };
        Ok(String::from_utf8(template.fill(&filling)?.concat()).unwrap())
    }

    fn filled(text: &str) -> String {
        filled_at(text, "/in?a=1", b"BODY").unwrap()
    }

    #[test]
    fn names_are_replaced_and_the_rest_is_literal() {
        assert_eq!(filled("{ts}.{body}"), "12.BODY");
        assert_eq!(filled("v0:{ts}:{body}"), "v0:12:BODY");
        assert_eq!(filled("{id}{ts}{body}"), "m112BODY");
        assert_eq!(filled("{method} {path} {header:X-Topic}|{body}!"), "POST /in?a=1 orders|BODY!");
        assert_eq!(filled("{{x}}{body}}}[[]]"), "{x}BODY}[]");
        assert_eq!(filled("{url}|{param:p}|{query:a}|{crc32}"), "https://a.example/in?a=1|P|1|3980256774");
        assert_eq!(filled_at("{/a}:{/b?}:{/c}", "/", br#"{"a":"x","c":7}"#).unwrap(), "x::7");
    }

    #[test]
    fn groups_are_left_out_whole() {
        assert_eq!(filled("[id:{query:id};]ts:{ts};"), "ts:12;");
        assert_eq!(filled("[id:{query:a};]ts:{ts};"), "id:1;ts:12;");
        assert_eq!(filled("{ts}[a{query:a}b{query:b}]"), "12");
        assert!(filled_at("[{query:a}]{body}", "/?a=1&a=2", b"").is_err(), "twice is not missing");
    }

    #[test]
    fn mistakes_are_found() {
        for text in [
            "",
            "fixed",
            "{bdy}",
            "{body",
            "body}",
            "{}{body}",
            "{header:a b}",
            "{header:}",
            "[{body}",
            "{body}]",
            "[[{body}]",
            "[{ts}[{body}]]",
            "{param:a}",
            "{special:nothing}",
        ] {
            assert!(Template::parse(text, &mut Plan::new()).is_err(), "{text:?}");
        }
    }

    #[test]
    fn the_terminator_of_the_id_is_known() {
        let terminator = |text: &str| Template::parse(text, &mut Plan::new()).unwrap().id_terminator();
        assert_eq!(terminator("{id}.{ts}.{body}"), Some('.'));
        assert_eq!(terminator("{id}{ts}{body}"), None);
        assert_eq!(terminator("{ts}.{body}"), None);
    }
}
