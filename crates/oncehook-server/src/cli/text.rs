//! Text for a terminal: foreign text made harmless, tables, small words.
//!
//! Keys, types, headers and bodies come from strangers, and a terminal obeys what it is shown. [`shown`] is the one place
//! where such text is made fit to print: control characters, escape sequences and characters that reorder or hide text
//! become `\u{…}`, and long text is cut. JSON has escapes of its own: [`harmless_json`].

use std::borrow::Cow;
use std::io::IsTerminal as _;

use oncehook::text::{is_unsafe, push_escaped};
use unicode_width::{UnicodeWidthChar as _, UnicodeWidthStr as _};

use crate::config::colours_wanted;

/// A text on one line, at most `longest` characters of it.
pub(super) fn shown(text: &str, longest: usize) -> String {
    let mut line = String::with_capacity(text.len().min(longest));
    let mut chars = text.chars();
    for char in chars.by_ref().take(longest) {
        if is_unsafe(char) {
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

/// JSON whose strings do nothing to a terminal: what would is escaped, which means the same to every reader of JSON.
pub(super) fn harmless_json(json: &str) -> Cow<'_, str> {
    // Outside of strings JSON has no such characters but line ends.
    let escaped = |char: char| is_unsafe(char) && !matches!(char, '\n' | '\r' | '\t');
    if !json.contains(escaped) {
        return Cow::Borrowed(json);
    }
    let mut text = String::with_capacity(json.len());
    for char in json.chars() {
        if escaped(char) {
            push_escaped(&mut text, char);
        } else {
            text.push(char);
        }
    }
    Cow::Owned(text)
}

/// The columns of a usual terminal.
const COLUMNS: usize = 100;

/// A column is not cut to less than this.
const NARROWEST: usize = 6;

/// Rows under a header, in columns of blanks, so that other programs can read them too.
pub(super) fn table(header: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let rows = std::iter::once(header.iter().map(|name| (*name).to_owned()).collect()).chain(rows);
    let rows: Vec<Vec<String>> = rows.collect();
    lines(&rows, &widths(&rows)).join("\n")
}

/// The same, no wider than a usual terminal: the columns that are named are cut where they must be, the widest first. The
/// words of the column `status` are coloured.
pub(super) fn narrow_table(
    header: &[&str],
    rows: impl IntoIterator<Item = Vec<String>>,
    flexible: &[usize],
    status: (usize, Colours),
) -> String {
    let rows = std::iter::once(header.iter().map(|name| (*name).to_owned()).collect()).chain(rows);
    let mut rows: Vec<Vec<String>> = rows.collect();
    let mut widths = widths(&rows);
    narrow(&mut widths, flexible, 2);
    for row in &mut rows {
        cut_cells(row, &widths, flexible);
        let (column, colours) = status;
        if let (Some(cell), Some(width)) = (row.get_mut(column), widths.get(column)) {
            *cell = colours.status(cell, &padded(cell, *width));
        }
    }
    lines(&rows, &widths).join("\n")
}

/// Cells with a blank between them, no wider together than a usual terminal.
pub(super) fn narrow_line(mut cells: Vec<String>, flexible: &[usize], status: (usize, Colours)) -> String {
    cells.retain(|cell| !cell.is_empty());
    let mut widths: Vec<usize> = cells.iter().map(|cell| cell.width()).collect();
    narrow(&mut widths, flexible, 1);
    cut_cells(&mut cells, &widths, flexible);
    let (column, colours) = status;
    if let Some(cell) = cells.get_mut(column) {
        *cell = colours.status(cell.trim_end(), cell);
    }
    cells.join(" ")
}

fn widths(rows: &[Vec<String>]) -> Vec<usize> {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.width()).max();
    (0..columns).map(|column| width(column).unwrap_or(0)).collect()
}

/// Takes from the widest of the flexible columns until all fit.
fn narrow(widths: &mut [usize], flexible: &[usize], gap: usize) {
    let mut wide = widths.iter().sum::<usize>() + gap * widths.len().saturating_sub(1);
    while wide > COLUMNS {
        let candidates = widths.iter_mut().enumerate().filter(|(column, _)| flexible.contains(column));
        let Some((_, widest)) = candidates.max_by_key(|(_, width)| **width) else { return };
        if *widest <= NARROWEST {
            return;
        }
        *widest -= 1;
        wide -= 1;
    }
}

fn cut_cells(cells: &mut [String], widths: &[usize], flexible: &[usize]) {
    for (column, (cell, width)) in cells.iter_mut().zip(widths).enumerate() {
        if flexible.contains(&column) {
            *cell = cut(cell, *width);
        }
    }
}

/// A harmless text in so many columns of a terminal at most. What is left out is marked.
pub(super) fn cut(text: &str, columns: usize) -> String {
    if text.width() <= columns {
        return text.to_owned();
    }
    let mut kept = String::new();
    let mut room = columns.saturating_sub(1);
    for char in text.chars() {
        let wide = char.width().unwrap_or(0);
        if wide > room {
            break;
        }
        room -= wide;
        kept.push(char);
    }
    kept.push('…');
    kept
}

fn padded(text: &str, width: usize) -> String {
    let missing = width.saturating_sub(text.width());
    format!("{text}{}", " ".repeat(missing))
}

fn lines(rows: &[Vec<String>], widths: &[usize]) -> Vec<String> {
    let line = |row: &Vec<String>| {
        let cells: Vec<String> = row.iter().zip(widths).map(|(cell, width)| padded(cell, *width)).collect();
        cells.join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

/// Whether words are coloured.
#[derive(Debug, Clone, Copy)]
pub(super) struct Colours(bool);

impl Colours {
    /// Only for eyes: at a terminal, unless the environment says otherwise.
    pub(super) fn of_stdout() -> Self {
        Self(std::io::stdout().is_terminal() && colours_wanted())
    }

    #[cfg(test)]
    pub(super) fn none() -> Self {
        Self(false)
    }

    /// Text about a status in the status's colour: red for what somebody must look at, yellow for what may mend itself.
    pub(super) fn status(self, status: &str, text: &str) -> String {
        let colour = match status {
            "dead" => "31",
            "retrying" => "33",
            _ => return text.to_owned(),
        };
        if self.0 { format!("\u{1b}[{colour}m{text}\u{1b}[0m") } else { text.to_owned() }
    }
}

/// `11-16 22:40:45`: a time of the API as a person's clock shows it. What is no time stays as it is.
pub(super) fn local_time(time: &str) -> String {
    let Ok(time) = time.parse::<jiff::Timestamp>() else { return shown(time, 27) };
    time.to_zoned(jiff::tz::TimeZone::system()).strftime("%m-%d %H:%M:%S").to_string()
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
        for (seconds, text) in [(0, "0 s"), (90, "1 min 30 s"), (259_200, "3 d"), (272_105, "3 d 3 h"), (14_400, "4 h")]
        {
            assert_eq!(duration(seconds), text);
        }
    }

    #[test]
    fn json_stays_the_same_json() {
        let text = "{\"a\":\"\u{9b}1m\u{85}\u{202e}\u{7f}\u{e0041} ü 東\"}";
        let harmless = harmless_json(text);
        assert_eq!(harmless, "{\"a\":\"\\u009b1m\\u0085\\u202e\\u007f\\udb40\\udc41 ü 東\"}");
        let parsed = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
        assert_eq!(parsed(&harmless), parsed(text));
        assert!(matches!(harmless_json("{\n\t\"a\": 1}"), Cow::Borrowed(_)));
    }

    #[test]
    fn what_is_too_wide_is_cut_where_it_is_widest() {
        let row = |long: &str| vec!["id".to_owned(), "dead".to_owned(), long.to_owned(), "evt_1".to_owned()];
        let text = narrow_table(&["A", "B", "C", "D"], [row(&"東".repeat(80))], &[2, 3], (1, Colours::none()));
        assert!(text.lines().all(|line| line.width() <= COLUMNS), "{text}");
        assert!(text.contains("東…") && text.ends_with("evt_1"), "{text}");
        let text = narrow_table(&["A", "B", "C", "D"], [row("short")], &[2, 3], (1, Colours(true)));
        assert_eq!(text, "A   B     C      D\nid  \u{1b}[31mdead\u{1b}[0m  short  evt_1");
        assert_eq!(cut("abc", 3), "abc");
        assert_eq!(cut("abcd", 3), "ab…");
        assert_eq!(cut("東京都", 4), "東…");
    }

    #[test]
    fn times_are_short() {
        let shown = local_time("2026-11-15T02:20:17.123456Z");
        assert!(shown.len() == 14 && shown.ends_with(":17"), "{shown}");
        assert_eq!(local_time("T"), "T");
    }

    #[test]
    fn tables_have_no_frames() {
        let text = table(&["a", "long"], [vec!["xyz".to_owned(), "1".to_owned()]]);
        assert_eq!(text, "a    long\nxyz  1");
    }
}
