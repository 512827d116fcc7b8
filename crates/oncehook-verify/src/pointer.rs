//! JSON pointers (RFC 6901): the path to one value.

/// The deepest path that is followed.
const MAX_DEPTH: usize = 32;

/// A path into a JSON document, cut into its tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pointer {
    tokens: Vec<String>,
}

impl Pointer {
    /// Reads a pointer: `/a/b`, with `~1` for a slash and `~0` for a tilde inside a name. The empty text is
    /// the whole document.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        if text.is_empty() {
            return Ok(Self { tokens: Vec::new() });
        }
        let Some(path) = text.strip_prefix('/') else {
            return Err(format!("`{text}` is not a JSON pointer; it begins with /"));
        };
        let tokens: Vec<String> = path.split('/').map(unescape).collect::<Option<_>>().ok_or_else(|| {
            format!("`{text}` is not a JSON pointer: a tilde is written ~0, and a slash inside a name ~1")
        })?;
        if tokens.len() > MAX_DEPTH {
            return Err(format!("a JSON pointer of more than {MAX_DEPTH} steps is not followed"));
        }
        Ok(Self { tokens })
    }

    pub(crate) fn tokens(&self) -> &[String] {
        &self.tokens
    }

    /// Does it mean the whole document?
    pub(crate) const fn is_root(&self) -> bool {
        self.tokens.is_empty()
    }
}

fn unescape(token: &str) -> Option<String> {
    let mut text = String::with_capacity(token.len());
    let mut chars = token.chars();
    while let Some(c) = chars.next() {
        text.push(match c {
            '~' => match chars.next()? {
                '0' => '~',
                '1' => '/',
                _ => return None,
            },
            other => other,
        });
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pointers_are_cut_and_unescaped() {
        assert_eq!(Pointer::parse("/a/b~1c/~01/").unwrap().tokens(), ["a", "b/c", "~1", ""]);
        assert!(Pointer::parse("").unwrap().is_root());
        for text in ["a", "a/b", "/~", "/~2", "#/a"] {
            assert!(Pointer::parse(text).is_err(), "{text:?}");
        }
        assert!(Pointer::parse(&"/a".repeat(MAX_DEPTH)).is_ok());
        assert!(Pointer::parse(&"/a".repeat(MAX_DEPTH + 1)).is_err());
    }
}
