//! A secret's text, kept out of logs and wiped when dropped.
//!
//! An empty or forgotten secret is the commonest way to lose webhook security, so a `Secret` cannot be
//! empty, blank, or one of the placeholders people leave in examples. How the text becomes key bytes is
//! the scheme's business, not this module's. The strength of a real secret is not judged.

use std::fmt;

use zeroize::Zeroizing;

/// Prefixes that name the kind of a secret. A secret that is nothing but its prefix is a placeholder.
const KIND_PREFIXES: [&str; 3] = ["whsec_", "whpk_", "whsk_"];

/// Text that stands where a secret should be, compared without case.
const PLACEHOLDERS: [&str; 10] = [
    "changeme",
    "change-me",
    "change_me",
    "placeholder",
    "todo",
    "tbd",
    "fixme",
    "replaceme",
    "replace-me",
    "replace_me",
];

/// Openings of placeholders such as `your-secret-here`, compared without case.
const PLACEHOLDER_OPENINGS: [&str; 6] =
    ["your-secret", "your_secret", "yoursecret", "your secret", "your-webhook-secret", "your_webhook_secret"];

/// The text of one secret. Its memory is wiped on drop, and `Debug` shows nothing of it.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Zeroizing<String>);

impl Secret {
    /// Takes a secret's text. One line ending at the end is removed, because files end with one; nothing
    /// else is changed.
    ///
    /// # Errors
    ///
    /// Empty or blank text, and obvious placeholders (`changeme`, `<secret>`, `${SECRET}`, `whsec_...`).
    pub fn new(text: impl Into<String>) -> Result<Self, SecretError> {
        let mut text = Zeroizing::new(text.into());
        if text.ends_with('\n') {
            text.pop();
            if text.ends_with('\r') {
                text.pop();
            }
        }
        if text.trim().is_empty() {
            return Err(SecretError::Empty);
        }
        if is_placeholder(text.trim()) {
            return Err(SecretError::Placeholder);
        }
        Ok(Self(text))
    }

    /// The text itself. Named so that every use can be found.
    #[must_use]
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// Why a text cannot be a secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SecretError {
    /// Nothing there, or only white space.
    #[error("the secret is empty")]
    Empty,
    /// Text from an example that was never replaced.
    #[error("the secret is a placeholder; put the real one there")]
    Placeholder,
}

fn is_placeholder(text: &str) -> bool {
    let lower = Zeroizing::new(text.to_ascii_lowercase());
    let is_fill = |text: &str| text.chars().all(|c| matches!(c, 'x' | '.' | '…' | '*' | '_' | '-'));
    let bracketed = (lower.starts_with('<') && lower.ends_with('>'))
        || (lower.starts_with("${") && lower.ends_with('}'))
        || (lower.starts_with("{{") && lower.ends_with("}}"));
    bracketed
        || PLACEHOLDERS.contains(&lower.as_str())
        || PLACEHOLDER_OPENINGS.iter().any(|opening| lower.starts_with(opening))
        || (lower.chars().count() >= 3 && is_fill(&lower))
        || KIND_PREFIXES.iter().any(|prefix| lower.strip_prefix(prefix).is_some_and(is_fill))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn real_secrets_are_taken_even_short_ones() {
        for text in ["secret", "test", "mysecret", "whsec_test_secret", "It's a Secret to Everybody", "xx", "12345"] {
            assert_eq!(Secret::new(text).unwrap().reveal(), text);
        }
    }

    #[test]
    fn nothing_and_placeholders_are_refused() {
        for text in ["", "\n", " ", "\t \r\n"] {
            assert_eq!(Secret::new(text).unwrap_err(), SecretError::Empty, "{text:?}");
        }
        for text in [
            "changeme",
            "CHANGE-ME",
            "your-secret",
            "your_secret_here",
            "xxx",
            "XXXXXXXX",
            "placeholder",
            "TODO",
            "<stripe secret>",
            "${STRIPE_SECRET}",
            "{{ secret }}",
            "whsec_...",
            "whsec_xxxxxxxx",
            "whsec_",
            "whsec_…",
            "...",
            "changeme\n",
        ] {
            assert_eq!(Secret::new(text).unwrap_err(), SecretError::Placeholder, "{text:?}");
        }
    }

    #[test]
    fn one_line_ending_goes_and_nothing_else() {
        assert_eq!(Secret::new("abcd\n").unwrap().reveal(), "abcd");
        assert_eq!(Secret::new("abcd\r\n").unwrap().reveal(), "abcd");
        assert_eq!(Secret::new("abcd\n\n").unwrap().reveal(), "abcd\n");
        assert_eq!(Secret::new(" abcd ").unwrap().reveal(), " abcd ");
    }

    #[test]
    fn debug_shows_nothing() {
        assert_eq!(format!("{:?}", Secret::new("hunter2").unwrap()), "Secret(…)");
    }
}
