//! Text from elsewhere (a database's error, a destination's answer, a path of an event), made safe to print.
//!
//! Promises: what [`printable`] returns is one line that a terminal shows as it is: it moves no cursor, changes no colour,
//! turns no text around, and cannot look like a log line of its own.
//!
//! Does not: shorten anything, nor know which texts are secret.

use std::borrow::Cow;
use std::fmt::Write as _;

/// The text with every character escaped that a terminal or a log could take for more than text: control characters (also
/// U+0080 to U+009F), line separators, and the marks that turn the direction of writing. Escaped as in JSON (`\n`,
/// `\u001b`), so inside of JSON strings it stays the same text. What is escaped once stays as it is.
pub fn printable(text: &str) -> Cow<'_, str> {
    let Some(first) = text.find(is_unsafe) else { return Cow::Borrowed(text) };
    let (clean, rest) = text.split_at(first);
    let mut safe = String::with_capacity(text.len() + 16);
    safe.push_str(clean);
    for c in rest.chars() {
        match c {
            '\n' | '\r' | '\t' => safe.extend(c.escape_default()),
            c if is_unsafe(c) => push_escaped(&mut safe, c),
            c => safe.push(c),
        }
    }
    Cow::Owned(safe)
}

/// Appends a character as JSON escapes it: `\u001b`, or two of these for characters beyond U+FFFF.
pub fn push_escaped(text: &mut String, c: char) {
    for unit in c.encode_utf16(&mut [0; 2]) {
        // Writing to a text does not fail.
        let _ = write!(text, "\\u{unit:04x}");
    }
}

/// Whether a terminal or a log could take this character for more than text, or show nothing for it: controls, line
/// separators, marks that turn the direction of writing, and characters without a width.
pub fn is_unsafe(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_that_is_only_text_is_not_touched() {
        for text in ["", "no such table: orders", "Größe 大きい 🎉 \"quoted\" \\n"] {
            assert!(matches!(printable(text), Cow::Borrowed(same) if same == text), "{text}");
        }
    }

    #[test]
    fn what_a_terminal_or_a_log_would_obey_is_escaped() {
        for (text, safe) in [
            ("a\nERROR forged", "a\\nERROR forged"),
            ("\u{1b}[2Jgone\r\t", "\\u001b[2Jgone\\r\\t"),
            ("\u{85}\u{9b}31m\u{7f}\0", "\\u0085\\u009b31m\\u007f\\u0000"),
            ("\u{e0041}", "\\udb40\\udc41"),
            ("abc\u{202e}fdp.exe\u{2066}\u{2029}", "abc\\u202efdp.exe\\u2066\\u2029"),
        ] {
            assert_eq!(printable(text), safe);
            assert_eq!(printable(safe), safe, "what is escaped stays");
        }
    }

    #[test]
    fn no_character_that_is_escaped_is_left_in_any_text() {
        let every: String = (0..=0x10_ffff_u32).filter_map(char::from_u32).collect();
        let safe = printable(&every);
        assert!(!safe.chars().any(is_unsafe));
    }
}
