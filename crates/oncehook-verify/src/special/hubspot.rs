//! HubSpot v3: the address with twelve reserved characters decoded, and nothing else.

/// What is decoded, as two hexadecimal digits and the character.
const DECODED: [(&str, char); 12] = [
    ("3A", ':'),
    ("2F", '/'),
    ("3F", '?'),
    ("40", '@'),
    ("21", '!'),
    ("24", '$'),
    ("27", '\''),
    ("28", '('),
    ("29", ')'),
    ("2A", '*'),
    ("2C", ','),
    ("3B", ';'),
];

/// One pass from left to right, so that what was decoded is not decoded again.
pub(super) fn decoded(url: &str) -> String {
    let mut text = String::with_capacity(url.len());
    let mut rest = url;
    while let Some(at) = rest.find('%') {
        let (before, from) = rest.split_at(at);
        text.push_str(before);
        let found =
            from.get(1..3).and_then(|digits| DECODED.iter().find(|(code, _)| code.eq_ignore_ascii_case(digits)));
        let (character, length) = found.map_or(('%', 1), |(_, character)| (*character, 3));
        text.push(character);
        rest = from.get(length..).unwrap_or_default();
    }
    text.push_str(rest);
    text
}

#[cfg(test)]
mod tests {
    use super::decoded;

    #[test]
    fn only_the_listed_characters_are_decoded_and_only_once() {
        assert_eq!(decoded("https://a.b/x?u=https%3A%2F%2Fc%3fd%20e%26"), "https://a.b/x?u=https://c?d%20e%26");
        assert_eq!(decoded("%253A%%3A%2"), "%253A%:%2");
        assert_eq!(decoded("https://a.b/ü%"), "https://a.b/ü%");
    }
}
