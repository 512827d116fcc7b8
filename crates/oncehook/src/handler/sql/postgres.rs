//! PostgreSQL's own rules for the pieces of a statement, as its `scan.l` has them. Cutting a text into statements and checking
//! what a statement may do both read by these rules, so neither sees a comment or a text where the other sees code.
//!
//! Promises: the pieces are those that the server sees while `standard_conforming_strings` is on (sessions of ours set it):
//! block comments nest, a line comment ends at a carriage return too, `E'…'` has backslashes, also where it goes on after a
//! line break, `$tag$` quotes, and a `$` inside of a word does not.
//! Does not: know any grammar.

/// What a piece is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Piece<'t> {
    /// A word without quotes.
    Word(&'t str),
    /// A name in double quotes, without them. A quote inside is doubled.
    Name(&'t str),
    /// A name or a text with Unicode escapes (`U&"…"`, `U&'…'`): its meaning depends on what comes later (`UESCAPE`).
    Unicode,
    /// A text in quotes of any kind.
    Text,
    Comment,
    /// Anything else: a number, or one character.
    Other,
}

/// The piece that a text begins with, and its length. The text is not empty.
pub(crate) fn piece(rest: &str) -> Result<(Piece<'_>, usize), String> {
    let first = rest.chars().next().unwrap_or_default();
    let part = |length: usize| rest.get(..length).unwrap_or(rest);
    Ok(match rest.as_bytes() {
        [b'-', b'-', ..] => (Piece::Comment, rest.find(['\n', '\r']).unwrap_or(rest.len())),
        [b'/', b'*', ..] => (Piece::Comment, comment(rest)?),
        [b'\'', ..] => (Piece::Text, quoted(rest, '\'')?),
        [b'"', ..] => {
            let length = quoted(rest, '"')?;
            (Piece::Name(rest.get(1..length - 1).unwrap_or_default()), length)
        }
        [b'e' | b'E', b'\'', ..] => (Piece::Text, 1 + escaped(rest.get(1..).unwrap_or_default())?),
        [b'u' | b'U', b'&', quote @ (b'\'' | b'"'), ..] => {
            (Piece::Unicode, 2 + quoted(rest.get(2..).unwrap_or_default(), char::from(*quote))?)
        }
        [b'$', ..] => match dollar_tag(rest) {
            Some(tag) => {
                let inner = rest.get(tag.len()..).unwrap_or_default();
                let end = inner.find(tag).ok_or("a dollar-quoted text is not closed")?;
                (Piece::Text, end + 2 * tag.len())
            }
            None => (Piece::Other, 1),
        },
        [b'0'..=b'9', ..] => (Piece::Other, rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len())),
        _ if begins_word(first) => {
            let in_word = |c: char| begins_word(c) || c.is_ascii_digit() || c == '$';
            let length = rest.find(|c| !in_word(c)).unwrap_or(rest.len());
            (Piece::Word(part(length)), length)
        }
        _ => (Piece::Other, first.len_utf8()),
    })
}

/// The server takes every byte beyond ASCII for a letter.
fn begins_word(c: char) -> bool {
    c.is_ascii_alphabetic() || c == '_' || !c.is_ascii()
}

/// The length of a block comment and all that are inside of it.
fn comment(rest: &str) -> Result<usize, String> {
    let (mut depth, mut at) = (0_usize, 0);
    while let Some(left) = rest.get(at..).filter(|left| !left.is_empty()) {
        if left.starts_with("/*") {
            (depth, at) = (depth + 1, at + 2);
        } else if left.starts_with("*/") {
            (depth, at) = (depth - 1, at + 2);
            if depth == 0 {
                return Ok(at);
            }
        } else {
            at += left.chars().next().map_or(1, char::len_utf8);
        }
    }
    Err("a comment is not closed".to_owned())
}

/// The length of a text or name in quotes. A doubled quote stands for one.
fn quoted(rest: &str, quote: char) -> Result<usize, String> {
    let mut at = 1;
    loop {
        let left = rest.get(at..).unwrap_or_default();
        at += left.find(quote).ok_or("a quote is not closed")? + 1;
        if rest.get(at..).is_some_and(|left| left.starts_with(quote)) {
            at += 1;
        } else {
            return Ok(at);
        }
    }
}

/// The length of a text in which backslashes escape, without its `E`. It goes on behind a line break.
fn escaped(rest: &str) -> Result<usize, String> {
    let mut at = 1;
    loop {
        let left = rest.get(at..).unwrap_or_default();
        let found = left.find(['\\', '\'']).ok_or("a quote is not closed")?;
        let next = left.get(found + 1..).and_then(|left| left.chars().next());
        at += found + 1;
        if left.get(found..).is_some_and(|left| left.starts_with('\\')) {
            at += next.map_or(0, char::len_utf8);
        } else if next == Some('\'') {
            at += 1;
        } else {
            let left = rest.get(at..).unwrap_or_default();
            match continued(left) {
                Some(gap) => at += gap + 1,
                None => return Ok(at),
            }
        }
    }
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
    let name = rest.strip_prefix('$')?;
    let end = name.find('$')?;
    let name = name.get(..end)?;
    let sound =
        name.chars().all(|c| begins_word(c) || c.is_ascii_digit()) && !name.starts_with(|c: char| c.is_ascii_digit());
    sound.then(|| rest.get(..end + 2)).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The words and names of a text.
    fn names(text: &str) -> Result<String, String> {
        let (mut rest, mut names) = (text, Vec::new());
        while !rest.is_empty() {
            let (piece, length) = piece(rest)?;
            assert!(length > 0, "{rest}");
            match piece {
                Piece::Word(name) | Piece::Name(name) => names.push(name),
                Piece::Unicode => names.push("U&"),
                Piece::Text | Piece::Comment | Piece::Other => {}
            }
            rest = rest.get(length..).unwrap();
        }
        Ok(names.join(" "))
    }

    #[test]
    fn pieces_are_those_that_the_server_sees() {
        for (text, expected) in [
            ("/* /* */ SELECT */ COMMIT", "COMMIT"),
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
            (r#"U&"\006f" u&'x' au&"b""#, "U& U& au b"),
            ("1from a x1", "from a x1"),
            ("größe Ж", "größe Ж"),
        ] {
            assert_eq!(names(text).as_deref(), Ok(expected), "{text}");
        }
        for text in ["/* /* */ a", "'a", "E'a\\'", "\"a", "$$ a $x$", "U&\"a", "E'a'\n'b", "/*"] {
            assert!(names(text).is_err(), "{text}");
        }
    }
}
