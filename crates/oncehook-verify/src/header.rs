//! Reading one header of a scheme, with alternatives and limits.
//!
//! Some senders have two names for the same header. The rule is the same everywhere: the first name that is
//! present is used, and the others are not looked at. A header that decides about genuineness must be
//! there exactly once, short, and printable ASCII.

use http::{HeaderMap, HeaderName, HeaderValue};
use serde::Deserialize;

use crate::rejection::Rejection;

/// The longest value read from a header that the scheme uses.
pub(crate) const MAX_HEADER_BYTES: usize = 4_096;

/// One header under one or more names; never empty.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "OneOrMany")]
pub(crate) struct HeaderNames {
    first: HeaderName,
    others: Vec<HeaderName>,
}

impl HeaderNames {
    /// Reads names; at least one is needed.
    pub(crate) fn parse<'a>(names: impl IntoIterator<Item = &'a str>) -> Result<Self, String> {
        let mut parsed = names
            .into_iter()
            .map(|name| HeaderName::from_bytes(name.as_bytes()).map_err(|_| format!("`{name}` is not a header name")));
        let first = parsed.next().ok_or("a header needs a name")??;
        let others = parsed.collect::<Result<_, _>>()?;
        Ok(Self { first, others })
    }

    /// The name to write and to complain about.
    pub(crate) const fn first(&self) -> &HeaderName {
        &self.first
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &HeaderName> {
        std::iter::once(&self.first).chain(&self.others)
    }

    /// The first of the names that the request has.
    pub(crate) fn present<'n>(&'n self, headers: &HeaderMap) -> Option<&'n HeaderName> {
        self.iter().find(|name| headers.contains_key(*name))
    }

    /// The value under the first name that is present, held to the rules above.
    pub(crate) fn read<'a>(&self, headers: &'a HeaderMap) -> Result<&'a str, Rejection> {
        let Some(name) = self.present(headers) else {
            return Err(Rejection::MissingHeader { header: self.first.clone() });
        };
        read_one(name, headers)
    }
}

/// The value of one header, which must be there exactly once.
pub(crate) fn read_one<'a>(name: &HeaderName, headers: &'a HeaderMap) -> Result<&'a str, Rejection> {
    let mut values = headers.get_all(name).iter();
    let Some(value) = values.next() else {
        return Err(Rejection::MissingHeader { header: name.clone() });
    };
    if values.next().is_some() {
        return Err(Rejection::DuplicateHeader { header: name.clone() });
    }
    read_value(name, value)
}

/// One value of a header, held to the same rules.
pub(crate) fn read_value<'a>(name: &HeaderName, value: &'a HeaderValue) -> Result<&'a str, Rejection> {
    let bytes = value.as_bytes();
    if bytes.len() > MAX_HEADER_BYTES {
        return Err(Rejection::HeaderTooLong { header: name.clone() });
    }
    let printable = bytes.iter().all(|byte| matches!(byte, b' '..=b'~'));
    match std::str::from_utf8(bytes) {
        Ok(text) if printable => Ok(text),
        _ => Err(Rejection::MalformedHeader { header: name.clone() }),
    }
}

/// `"name"` or `["name", "other-name"]` in TOML.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
pub(crate) enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

impl OneOrMany {
    pub(crate) fn as_slice(&self) -> &[String] {
        match self {
            Self::One(one) => std::slice::from_ref(one),
            Self::Many(many) => many,
        }
    }
}

impl TryFrom<OneOrMany> for HeaderNames {
    type Error = String;

    fn try_from(names: OneOrMany) -> Result<Self, String> {
        Self::parse(names.as_slice().iter().map(String::as_str))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &[u8])]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (name, value) in pairs {
            map.append(*name, HeaderValue::from_bytes(value).unwrap());
        }
        map
    }

    fn names() -> HeaderNames {
        HeaderNames::parse(["x-a", "x-b"]).unwrap()
    }

    #[test]
    fn the_first_present_name_wins() {
        assert_eq!(names().read(&headers(&[("x-b", b"2"), ("x-a", b"1")])).unwrap(), "1");
        assert_eq!(names().read(&headers(&[("x-b", b"2")])).unwrap(), "2");
        assert_eq!(names().read(&headers(&[("x-c", b"2")])).unwrap_err().code(), "missing_header");
    }

    #[test]
    fn a_repeated_long_or_strange_value_is_refused() {
        let code = |pairs: &[(&'static str, &[u8])]| names().read(&headers(pairs)).unwrap_err().code();
        assert_eq!(code(&[("x-a", b"1"), ("x-a", b"1")]), "duplicate_header");
        assert_eq!(code(&[("x-a", &[b'a'; MAX_HEADER_BYTES + 1])]), "header_too_long");
        assert_eq!(code(&[("x-a", b"caf\xc3\xa9")]), "malformed_header");
        assert_eq!(code(&[("x-a", b"a\tb")]), "malformed_header");
        assert!(names().read(&headers(&[("x-a", &[b'a'; MAX_HEADER_BYTES])])).is_ok());
    }

    #[test]
    fn names_must_be_names() {
        assert!(HeaderNames::parse([]).is_err());
        assert!(HeaderNames::parse(["x a"]).is_err());
    }
}
