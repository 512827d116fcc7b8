//! Keeps our credentials out of what a destination says: a server that repeats the request it was sent repeats them too.
//!
//! Promises: a credential is replaced wherever an answer holds it: as it is, in base64, and inside strings of JSON however
//! their characters are escaped, also JSON within strings of JSON. JSON stays JSON, and everything else in it stays as it
//! was written, number for number.
//!
//! Does not: find credentials that were changed otherwise (encrypted, hashed, cut in two), or words that are too short to be
//! told from other text.

use std::borrow::Cow;

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD, URL_SAFE_NO_PAD};

/// Words shorter than this are not worth hiding, and hiding them would spoil every other text.
const LEAST_CHARS: usize = 8;

/// What stands in their place.
const HIDDEN: &str = "(hidden)";

/// JSON within strings of JSON is followed this far.
const NESTED: u32 = 3;

/// Words that parts of names are made of, where a name belongs to a credential.
const CREDENTIAL_NAMES: [&str; 9] =
    ["auth", "token", "secret", "key", "cookie", "password", "signature", "credential", "session"];

/// What must not be seen in answers.
pub(super) struct Hidden {
    /// The longest first, so that none leaves a part of a longer one behind.
    words: Vec<String>,
}

/// Does a header or a parameter of this name hold a credential?
pub(super) fn is_credential(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    CREDENTIAL_NAMES.iter().any(|part| name.contains(part))
}

impl Hidden {
    /// Hides these values: whole, word for word (`Bearer x`), the parts of basic authentication, and in base64. Also those
    /// parameters in the query of the URL whose names say that they are credentials.
    pub(super) fn new<'v>(url: &'v url::Url, values: impl IntoIterator<Item = &'v str>) -> Self {
        let in_url = url.query_pairs().filter(|(name, _)| is_credential(name)).map(|(_, value)| value);
        let mut words: Vec<String> = Vec::new();
        for value in values.into_iter().map(Cow::Borrowed).chain(in_url) {
            words.push(value.trim().to_owned());
            for word in value.split_whitespace() {
                let word = word.trim_matches([';', ',']);
                words.push(word.to_owned());
                words.extend(word.split_once('=').map(|(_, behind)| behind.to_owned()));
                if let Some(plain) = STANDARD.decode(word).ok().and_then(|bytes| String::from_utf8(bytes).ok()) {
                    words.extend(plain.split_once(':').map(|(_, password)| password.to_owned()));
                    words.push(plain);
                }
            }
        }
        let encoded: Vec<String> =
            words.iter().flat_map(|word| [STANDARD_NO_PAD.encode(word), URL_SAFE_NO_PAD.encode(word)]).collect();
        words.retain(|word| word.chars().count() >= LEAST_CHARS);
        words.extend(encoded.into_iter().filter(|word| word.len() > LEAST_CHARS));
        words.sort_by(|a, b| b.len().cmp(&a.len()).then_with(|| a.cmp(b)));
        words.dedup();
        Self { words }
    }

    /// The text without them.
    pub(super) fn censor<'t>(&self, text: &'t str) -> Cow<'t, str> {
        self.censor_nested(text, NESTED)
    }

    fn censor_nested<'t>(&self, text: &'t str, nested: u32) -> Cow<'t, str> {
        let mut censored = Cow::Borrowed(text);
        for word in &self.words {
            if censored.contains(word.as_str()) {
                censored = Cow::Owned(censored.replace(word.as_str(), HIDDEN));
            }
        }
        // Without an escape there is no other way to write a character.
        if self.words.is_empty() || nested == 0 || !censored.contains('\\') {
            return censored;
        }
        match self.censor_strings(&censored, nested) {
            Some(changed) => Cow::Owned(changed),
            None => censored,
        }
    }

    /// Looks at what the strings of a JSON text mean, not at how they are written. Nothing if none of them is changed.
    fn censor_strings(&self, text: &str, nested: u32) -> Option<String> {
        let mut changed = String::new();
        let (mut kept, mut from) = (0, 0);
        while let Some(start) = text.get(from..)?.find('"').map(|at| from + at) {
            let Some(end) = string_end(text, start) else { break };
            from = end + 1;
            let inside = text.get(start + 1..end)?;
            if !inside.contains('\\') {
                continue;
            }
            let meant = unescape(inside);
            if let Cow::Owned(censored) = self.censor_nested(&meant, nested - 1) {
                changed.push_str(text.get(kept..start)?);
                changed.push_str(&serde_json::Value::from(censored).to_string());
                kept = from;
            }
        }
        changed.push_str(text.get(kept..)?);
        (kept > 0).then_some(changed)
    }
}

/// Where the string that begins with the quote at `start` ends: the place of its closing quote.
fn string_end(text: &str, start: usize) -> Option<usize> {
    let mut escaped = false;
    let is_end = |byte: &u8| {
        let ends = *byte == b'"' && !escaped;
        escaped = *byte == b'\\' && !escaped;
        ends
    };
    text.as_bytes().iter().skip(start + 1).position(is_end).map(|inside| start + 1 + inside)
}

/// What the inside of a JSON string means. Escapes that mean nothing become U+FFFD.
fn unescape(text: &str) -> String {
    let mut units: Vec<u16> = Vec::with_capacity(text.len());
    let mut chars = text.chars();
    while let Some(letter) = chars.next() {
        let meant = match (letter == '\\').then(|| chars.next()).flatten() {
            Some('u') => {
                let code: String = chars.by_ref().take(4).collect();
                units.push(u16::from_str_radix(&code, 16).unwrap_or(0xfffd));
                continue;
            }
            Some('n') => '\n',
            Some('r') => '\r',
            Some('t') => '\t',
            Some('b') => '\u{8}',
            Some('f') => '\u{c}',
            Some(other) => other,
            None => letter,
        };
        units.extend_from_slice(meant.encode_utf16(&mut [0; 2]));
    }
    String::from_utf16_lossy(&units)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKEN: &str = "tok/0123456789\"x";

    fn hidden(values: &[&'static str]) -> Hidden {
        Hidden::new(&"http://127.0.0.1/".parse().unwrap(), values.iter().copied())
    }

    #[test]
    fn a_credential_is_found_however_it_is_written() {
        let hidden = hidden(&["Bearer tok/0123456789\"x", "Basic dXNlcjpodW50ZXIyaHVudGVyMg=="]);
        let escaped: String = TOKEN.encode_utf16().map(|unit| format!("\\u{unit:04X}")).collect();
        let inner = serde_json::Value::from(format!("{{\"a\":\"{escaped}\"}}")).to_string();
        for (text, wanted) in [
            (format!("Bearer {TOKEN}, {TOKEN}."), "(hidden), (hidden).".to_owned()),
            (format!("{{\"a\": \"{escaped}\", \"b\":1.0}}"), "{\"a\": \"(hidden)\", \"b\":1.0}".to_owned()),
            (r#"["tok\/0123456789\"x"]"#.to_owned(), r#"["(hidden)"]"#.to_owned()),
            (format!("[{inner}]"), r#"["{\"a\":\"(hidden)\"}"]"#.to_owned()),
            (format!("[\"{escaped}\\ud800\"]"), "[\"(hidden)\u{fffd}\"]".to_owned()),
            ("hunter2hunter2 user:hunter2hunter2".to_owned(), "(hidden) (hidden)".to_owned()),
            (STANDARD.encode(TOKEN), "(hidden)==".to_owned()),
        ] {
            assert_eq!(hidden.censor(&text), wanted, "{text}");
        }
    }

    #[test]
    fn everything_else_stays_as_it_was_written() {
        for text in [
            r#"{"a":"\u0041\/","n":12345678901234567890.10,"n":1e999}"#,
            r#"["\ud800", "not closed"#,
            "Bearer",
            "\\",
            "\"\\",
            "",
        ] {
            assert!(matches!(hidden(&[TOKEN]).censor(text), Cow::Borrowed(same) if same == text), "{text}");
        }
        assert!(hidden(&["short", ""]).words.is_empty());
    }

    #[test]
    fn names_of_credentials_are_known() {
        for name in ["Authorization", "x-api-key", "Cookie", "X-Shop-Token"] {
            assert!(is_credential(name), "{name}");
        }
        for name in ["x-team", "content-type", "accept"] {
            assert!(!is_credential(name), "{name}");
        }
    }
}
