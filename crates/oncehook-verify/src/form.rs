//! Fields of a form: `application/x-www-form-urlencoded` bodies, queries, and one field of a multipart body.
//!
//! Decoding follows what browsers and servers agree on: `+` is a space, `%41` is a byte, a stray `%` stands for
//! itself. The number of fields is limited, and text that is not UTF-8 has no fields. A name that occurs twice is
//! reported as such, because receivers disagree about which one counts. No files, no nesting.

use std::borrow::Cow;

/// The most fields that are read.
const MAX_FIELDS: usize = 1_000;

/// The most parts of a multipart body that are looked at.
const MAX_PARTS: usize = 64;

/// The longest boundary (RFC 2046).
const MAX_BOUNDARY: usize = 70;

/// Names and values, in the order in which they came.
pub(crate) type Pairs<'a> = Vec<(Cow<'a, str>, Cow<'a, str>)>;

/// What stands under a name.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Found<'p> {
    Nothing,
    One(&'p str),
    Several,
}

/// The fields of a form or query; nothing if there are too many, or if they are not text.
pub(crate) fn pairs(text: &[u8]) -> Option<Pairs<'_>> {
    let text = std::str::from_utf8(text).ok()?;
    let mut pairs = Vec::new();
    for pair in text.split('&').filter(|pair| !pair.is_empty()) {
        if pairs.len() == MAX_FIELDS {
            return None;
        }
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        pairs.push((decode(name)?, decode(value)?));
    }
    Some(pairs)
}

/// The value under a name.
pub(crate) fn find<'p>(pairs: &'p Pairs<'_>, name: &str) -> Found<'p> {
    let mut values = pairs.iter().filter(|(found, _)| found == name).map(|(_, value)| value.as_ref());
    match (values.next(), values.next()) {
        (None, _) => Found::Nothing,
        (Some(value), None) => Found::One(value),
        (Some(_), Some(_)) => Found::Several,
    }
}

/// Undoes the encoding of one name or value.
pub(crate) fn decode(text: &str) -> Option<Cow<'_, str>> {
    if !text.contains(['+', '%']) {
        return Some(Cow::Borrowed(text));
    }
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        rest = after;
        let escaped = match (first, after) {
            (b'%', [high, low, ..]) => hex_digit(*high).zip(hex_digit(*low)),
            _ => None,
        };
        match (first, escaped) {
            (_, Some((high, low))) => {
                bytes.push(high << 4 | low);
                rest = after.get(2..).unwrap_or_default();
            }
            (b'+', None) => bytes.push(b' '),
            (other, None) => bytes.push(*other),
        }
    }
    String::from_utf8(bytes).ok().map(Cow::Owned)
}

/// Encodes one name or value, so that [`decode`] reads it back.
pub(crate) fn encode(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len() + 16);
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => encoded.push(char::from(byte)),
            _ => encoded.push_str(&format!("%{byte:02X}")),
        }
    }
    encoded
}

const fn hex_digit(byte: u8) -> Option<u8> {
    match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        b'A'..=b'F' => Some(byte - b'A' + 10),
        _ => None,
    }
}

/// The content of the one part of a multipart body that has this name; nothing if there is none, or more than one.
pub(crate) fn multipart_field<'a>(body: &'a [u8], content_type: &str, name: &str) -> Option<&'a [u8]> {
    let boundary = boundary(content_type)?;
    let opening = format!("--{boundary}");
    let between = format!("\r\n--{boundary}");
    let mut rest = body.strip_prefix(opening.as_bytes())?;
    let mut found = None;
    for _ in 0..MAX_PARTS {
        let Some(part) = rest.strip_prefix(b"\r\n") else { break };
        let end = find_bytes(part, between.as_bytes())?;
        let (part, after) = (part.get(..end)?, part.get(end + between.len()..)?);
        let head_end = find_bytes(part, b"\r\n\r\n")?;
        let (head, content) = (part.get(..head_end)?, part.get(head_end + 4..)?);
        if part_name(head) == Some(name) && found.replace(content).is_some() {
            return None;
        }
        rest = after;
    }
    found
}

fn boundary(content_type: &str) -> Option<&str> {
    let (kind, parameters) = content_type.split_once(';')?;
    if !kind.trim().eq_ignore_ascii_case("multipart/form-data") {
        return None;
    }
    let value = parameters.split(';').find_map(|parameter| parameter.trim().strip_prefix("boundary="))?;
    let value = value.trim_matches('"');
    (!value.is_empty() && value.len() <= MAX_BOUNDARY).then_some(value)
}

/// The `name` of a part's `Content-Disposition`.
fn part_name(head: &[u8]) -> Option<&str> {
    let head = std::str::from_utf8(head).ok()?;
    let disposition = head.split("\r\n").find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-disposition").then_some(value)
    })?;
    disposition.split(';').find_map(|parameter| parameter.trim().strip_prefix("name="))?.trim_matches('"').into()
}

fn find_bytes(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack.windows(needle.len().max(1)).position(|window| window == needle)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoded(text: &str) -> Vec<(String, String)> {
        let pairs = pairs(text.as_bytes()).unwrap();
        pairs.into_iter().map(|(name, value)| (name.into_owned(), value.into_owned())).collect()
    }

    #[test]
    fn fields_are_decoded_like_everywhere() {
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(
            decoded("a=1&b=x+y%2Bz&c&=d&&e=%zz%4"),
            [pair("a", "1"), pair("b", "x y+z"), pair("c", ""), pair("", "d"), pair("e", "%zz%4")]
        );
        assert_eq!(decoded("n%C3%A9=%c3%a9"), [pair("né", "é")]);
        assert!(pairs(b"a=%ff").is_none(), "not UTF-8");
        assert!(pairs(b"a=\xff").is_none());
        assert!(pairs("a=1&".repeat(MAX_FIELDS + 1).as_bytes()).is_none());
    }

    #[test]
    fn what_is_encoded_decodes_to_the_same() {
        for text in ["", "a b", "50% + é&=?\n", "plain-_.~"] {
            assert_eq!(decode(&encode(text)).unwrap(), text);
        }
    }

    #[test]
    fn a_name_that_occurs_twice_is_not_one() {
        let pairs = pairs(b"a=1&b=2&a=3").unwrap();
        assert_eq!(find(&pairs, "b"), Found::One("2"));
        assert_eq!(find(&pairs, "a"), Found::Several);
        assert_eq!(find(&pairs, "c"), Found::Nothing);
    }

    #[test]
    fn one_part_of_a_multipart_body() {
        let body = b"--xx\r\nContent-Disposition: form-data; name=\"json\"\r\n\r\n{\"a\":\r\n1}\r\n--xx\r\nContent-Disposition: form-data; name=\"other\"\r\nContent-Type: text/plain\r\n\r\n\r\n--xx--\r\n";
        let kind = "multipart/form-data; boundary=xx";
        assert_eq!(multipart_field(body, kind, "json").unwrap(), b"{\"a\":\r\n1}");
        assert_eq!(multipart_field(body, kind, "other").unwrap(), b"");
        assert_eq!(multipart_field(body, kind, "third"), None);
        assert_eq!(multipart_field(body, "application/json", "json"), None);
        assert_eq!(multipart_field(body, "multipart/form-data; boundary=\"yy\"", "json"), None);
        let twice =
            [&body[..body.len() - 4], b"\r\nContent-Disposition: form-data; name=\"json\"\r\n\r\n1\r\n--xx--"].concat();
        assert_eq!(multipart_field(&twice, kind, "json"), None, "two parts of one name");
        for cut in 0..body.len() {
            let _ = multipart_field(&body[..cut], kind, "json");
        }
    }
}
