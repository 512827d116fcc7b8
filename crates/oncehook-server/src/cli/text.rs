//! Text for a terminal: foreign text made harmless, tables, small words.
//!
//! Keys, types, headers and bodies come from strangers, and a terminal obeys what it is shown. [`shown`] is the one place
//! where such text is made fit to print: control characters, escape sequences and characters that reorder or hide text
//! become `\u{…}`, and long text is cut. JSON output does not pass through here, because JSON has escapes of its own.

use comfy_table::{Cell, Table};

/// A text on one line, at most `longest` characters of it.
pub(super) fn shown(text: &str, longest: usize) -> String {
    let mut line = String::with_capacity(text.len().min(longest));
    let mut chars = text.chars();
    for char in chars.by_ref().take(longest) {
        if is_harmful(char) {
            line.extend(char.escape_unicode());
        } else {
            line.push(char);
        }
    }
    if chars.next().is_some() {
        line.push('…');
    }
    line
}

/// A text that may have several lines, at most `longest` characters of it.
pub(super) fn shown_lines(text: &str, longest: usize) -> String {
    let mut left = longest;
    let mut lines = Vec::new();
    for line in text.lines() {
        lines.push(shown(line, left));
        let length = line.chars().count();
        if length >= left {
            break;
        }
        left -= length;
    }
    lines.join("\n")
}

/// Characters that make a terminal do something, or that make text look like other text.
fn is_harmful(char: char) -> bool {
    char.is_control()
        || matches!(char,
            '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

/// Rows under a header, in columns of blanks, so that other programs can read them too.
pub(super) fn table(header: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header(header.iter().map(Cell::new));
    for row in rows {
        table.add_row(row);
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table.trim_fmt()
}

/// `3 d`, `75 h 35 min`, `90 s`: the two largest units that matter to a person.
pub(super) fn duration(seconds: u64) -> String {
    const UNITS: [(u64, &str); 4] = [(86_400, "d"), (3_600, "h"), (60, "min"), (1, "s")];
    let mut left = seconds;
    let mut words = Vec::new();
    for (size, unit) in UNITS {
        let count = left / size;
        left %= size;
        if count > 0 {
            words.push(format!("{count} {unit}"));
        }
    }
    words.truncate(2);
    if words.is_empty() { "0 s".to_owned() } else { words.join(" ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terminals_are_not_given_orders() {
        assert_eq!(shown("evt_1", 20), "evt_1");
        assert_eq!(shown("a\x1b[2Jb", 20), "a\\u{1b}[2Jb");
        assert_eq!(shown("a\r\nb\tc\0", 20), "a\\u{d}\\u{a}b\\u{9}c\\u{0}");
        assert_eq!(shown("\u{9b}31m", 20), "\\u{9b}31m");
        assert_eq!(shown("user\u{202e}gpj.exe", 20), "user\\u{202e}gpj.exe");
        assert_eq!(shown("a\u{200b}b\u{2066}c\u{feff}", 20), "a\\u{200b}b\\u{2066}c\\u{feff}");
        assert_eq!(shown("\u{e0041}", 20), "\\u{e0041}");
        assert_eq!(shown("Zürich ⚡ 東京", 20), "Zürich ⚡ 東京");
    }

    #[test]
    fn long_text_is_cut_between_characters() {
        assert_eq!(shown("äöü", 3), "äöü");
        assert_eq!(shown("äöüß", 3), "äöü…");
        assert_eq!(shown("", 0), "");
    }

    #[test]
    fn lines_stay_lines() {
        assert_eq!(shown_lines("{\r\n \x07\n}", 99), "{\n \\u{7}\n}");
        assert_eq!(shown_lines("abc\ndef\nghi", 5), "abc\nde…");
    }

    #[test]
    fn durations_in_two_units() {
        for (seconds, text) in
            [(0, "0 s"), (90, "1 min 30 s"), (259_200, "3 d"), (272_105, "3 d 3 h"), (14_400, "4 h")]
        {
            assert_eq!(duration(seconds), text);
        }
    }

    #[test]
    fn tables_have_no_frames() {
        let text = table(&["a", "long"], [vec!["xyz".to_owned(), "1".to_owned()]]);
        assert_eq!(text, "a    long\nxyz  1");
    }
}
