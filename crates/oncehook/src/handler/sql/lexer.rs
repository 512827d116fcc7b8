//! The pieces of a statement: words, names, texts and comments, by the rules of each engine. Cutting a text into statements and
//! checking what a statement may do both read by these rules, so neither sees a comment or a text where the other sees code.
//!
//! Promises: the pieces are those that the server sees in sessions of ours. On PostgreSQL (`scan.l`, with
//! `standard_conforming_strings`) block comments nest, a line comment ends at a carriage return too, `E'…'` has backslashes,
//! also where it goes on after a line break, `$tag$` quotes, and a `$` inside of a word does not. On MySQL (with our SQL mode)
//! a backslash escapes, double quotes are text, and two dashes are a comment only before a space.
//! Does not: know any grammar.

use super::Dialect;

/// What a piece is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Piece<'t> {
    /// A word without quotes, or a name in backticks, without them. On MySQL a number, too: a name may begin with a digit.
    Word(&'t str),
    /// A name in double quotes, without them. A quote inside is doubled.
    Name(&'t str),
    /// A name or a text with Unicode escapes (`U&"…"`, `U&'…'`): its meaning depends on what comes later (`UESCAPE`).
    Unicode,
    /// A text in quotes of any kind.
    Text,
    Comment,
    /// A comment whose text the server runs (`/*! … */`, MySQL).
    Code,
    /// Begins a variable of the session's user (`@name`, MySQL). Those of the server (`@@name`) can only be read.
    Variable,
    /// Anything else: space, a number, or one character.
    Other(&'t str),
}

/// The piece that a text begins with, and its length. The text is not empty.
pub(super) fn piece(rest: &str, dialect: Dialect) -> Result<(Piece<'_>, usize), String> {
    let (postgres, mysql) = (dialect == Dialect::Postgres, dialect == Dialect::Mysql);
    let first = rest.chars().next().unwrap_or_default();
    let from = |start: usize| rest.get(start..).unwrap_or_default();
    let inside = |length: usize| rest.get(1..length - 1).unwrap_or_default();
    let other = |length: usize| (Piece::Other(rest.get(..length).unwrap_or(rest)), length);
    let line = || {
        let end = rest.find(|c| c == '\n' || postgres && c == '\r');
        (Piece::Comment, end.unwrap_or(rest.len()))
    };
    Ok(match rest.as_bytes() {
        [b'-', b'-', after @ ..] if !mysql || after.first().is_none_or(|next| *next <= b' ') => line(),
        [b'#', ..] if mysql => line(),
        [b'/', b'*', b'!', ..] | [b'/', b'*', b'M', b'!', ..] if mysql => (Piece::Code, comment(rest, false)?),
        [b'/', b'*', ..] => (Piece::Comment, comment(rest, postgres)?),
        [b'\'', ..] => (Piece::Text, quoted(rest, '\'', mysql)?),
        [b'"', ..] if mysql => (Piece::Text, quoted(rest, '"', true)?),
        [b'"', ..] => {
            let length = quoted(rest, '"', false)?;
            (Piece::Name(inside(length)), length)
        }
        [b'`', ..] if !postgres => {
            let length = quoted(rest, '`', false)?;
            (Piece::Word(inside(length)), length)
        }
        [b'[', ..] if dialect == Dialect::Sqlite => (Piece::Text, rest.find(']').ok_or("a [name] is not closed")? + 1),
        [b'e' | b'E', b'\'', ..] if postgres => {
            let mut length = 1 + quoted(from(1), '\'', true)?;
            while let Some(gap) = continued(from(length)) {
                length += gap + quoted(from(length + gap), '\'', true)?;
            }
            (Piece::Text, length)
        }
        [b'u' | b'U', b'&', quote @ (b'\'' | b'"'), ..] if postgres => {
            (Piece::Unicode, 2 + quoted(from(2), char::from(*quote), false)?)
        }
        [b'$', ..] if postgres => match dollar_tag(rest) {
            Some(tag) => {
                let end = from(tag.len()).find(tag).ok_or("a dollar-quoted text is not closed")?;
                (Piece::Text, end + 2 * tag.len())
            }
            None => other(1),
        },
        [b'@', b'@', ..] if mysql => other(2),
        [b'@', ..] if mysql => (Piece::Variable, 1),
        [b'0'..=b'9', ..] if !mysql => other(rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len())),
        _ if is_in_word(first, dialect) && (mysql || first != '$') => {
            let length = rest.find(|c| !is_in_word(c, dialect)).unwrap_or(rest.len());
            (Piece::Word(rest.get(..length).unwrap_or(rest)), length)
        }
        _ => other(first.len_utf8()),
    })
}

/// All pieces of a statement.
pub(crate) fn pieces(text: &str, dialect: Dialect) -> Result<Vec<Piece<'_>>, String> {
    let (mut rest, mut found) = (text, Vec::new());
    while !rest.is_empty() {
        let (piece, length) = piece(rest, dialect)?;
        found.push(piece);
        rest = rest.get(length..).unwrap_or_default();
    }
    Ok(found)
}

/// The words of a statement outside of texts and comments: names in double quotes as they are, all others in small letters.
/// The error says what the check of a statement cannot see through.
pub(crate) fn words(text: &str, dialect: Dialect) -> Result<Vec<String>, String> {
    let word = |piece| match piece {
        Piece::Word(word) => Some(Ok(word.to_lowercase())),
        Piece::Name(name) => Some(Ok(name.to_owned())),
        Piece::Unicode => Some(Err("write names and texts without U&".to_owned())),
        Piece::Code => Some(Err("the server runs what is in a comment (/*! … */)".to_owned())),
        Piece::Text | Piece::Comment | Piece::Variable | Piece::Other(_) => None,
    };
    pieces(text, dialect)?.into_iter().filter_map(word).collect()
}

/// The servers take a letter of any alphabet for one; PostgreSQL takes every byte beyond ASCII for a letter.
fn is_in_word(c: char, dialect: Dialect) -> bool {
    match dialect {
        Dialect::Mysql => c.is_alphanumeric() || c == '_' || c == '$',
        Dialect::Postgres => c.is_ascii_alphanumeric() || c == '_' || c == '$' || !c.is_ascii(),
        Dialect::Sqlite => c.is_ascii_alphanumeric() || c == '_' || !c.is_ascii(),
    }
}

/// The length of a block comment, and of all that are inside of it where comments nest.
fn comment(rest: &str, nests: bool) -> Result<usize, String> {
    let (mut depth, mut at) = (1_usize, 2);
    while let Some(left) = rest.get(at..).filter(|left| !left.is_empty()) {
        if left.starts_with("*/") {
            (depth, at) = (depth - 1, at + 2);
            if depth == 0 {
                return Ok(at);
            }
        } else if nests && left.starts_with("/*") {
            (depth, at) = (depth + 1, at + 2);
        } else {
            at += left.chars().next().map_or(1, char::len_utf8);
        }
    }
    Err("a comment is not closed".to_owned())
}

/// The length of a text or name in quotes. A doubled quote stands for one.
fn quoted(rest: &str, quote: char, backslash_escapes: bool) -> Result<usize, String> {
    let mut chars = rest.char_indices().skip(1).peekable();
    while let Some((at, c)) = chars.next() {
        if c == '\\' && backslash_escapes {
            chars.next();
        } else if c == quote && chars.next_if(|(_, next)| *next == quote).is_none() {
            return Ok(at + 1);
        }
    }
    Err("a quote is not closed".to_owned())
}

/// The length of what stands between a text and its continuation, if there is one: space and line comments. (The server also
/// asks for a line break. Without one it refuses the statement.)
fn continued(rest: &str) -> Option<usize> {
    let mut left = rest.trim_start();
    while left.starts_with("--") {
        left = left.get(left.find(['\n', '\r'])?..)?.trim_start();
    }
    left.starts_with('\'').then(|| rest.len() - left.len())
}

/// `$$` or `$tag$`.
fn dollar_tag(rest: &str) -> Option<&str> {
    let (name, _) = rest.strip_prefix('$')?.split_once('$')?;
    let sound = name.chars().all(|c| c != '$' && is_in_word(c, Dialect::Postgres));
    (sound && !name.starts_with(|c: char| c.is_ascii_digit())).then(|| rest.get(..name.len() + 2)).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_those_that_the_server_sees() {
        let names = |text: &str| words(text, Dialect::Postgres).map(|words| words.join(" "));
        for (text, expected) in [
            ("/* /* */ SELECT */ COMMIT", "commit"),
            ("/*/*/**/*/*/a/**/b", "a b"),
            ("-- x\ra -- y\nb", "a b"),
            (r"E'\' a ' b", "b"),
            (r"e'a'' \\' b 'c'", "b"),
            ("E'x'\n'\\' a' b", "b"),
            ("E'x' -- y\n -- z\n '\\' a' b", "b"),
            (r"'\' a ' b ' c", "a c"),
            ("'it''s' a", "a"),
            ("$$ a ' $$ b $x$ $$ c $x$ d", "b d"),
            ("a$$ ' b $$ ' c $1 $2", "a$$ c"),
            ("$ü$ a $ü$ b", "b"),
            (r#""a""b" c "d"e"#, r#"a""b c d e"#),
            (r#"au&"b""#, "au b"),
            ("1from a x1", "from a x1"),
            ("größe Ж", "größe ж"),
        ] {
            assert_eq!(names(text).as_deref(), Ok(expected), "{text}");
        }
        for text in
            ["/* /* */ a", "'a", "E'a\\'", "\"a", "$$ a $x$", "U&\"a", "E'a'\n'b", "/*", r#"U&"\006f""#, "u&'x'"]
        {
            assert!(names(text).is_err(), "{text}");
        }
    }
}
