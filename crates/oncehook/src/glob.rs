//! Patterns for event types: `*` stands for any characters, `?` for one. Everything else is itself.
//!
//! Promises: matching takes time in proportion to pattern times text, whatever the pattern.

/// A pattern, or a plain name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Glob(Box<str>);

impl Glob {
    /// Any text is a pattern.
    #[must_use]
    pub fn new(pattern: &str) -> Self {
        Self(pattern.into())
    }

    /// The pattern as it was written.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether the whole text fits.
    #[must_use]
    pub fn matches(&self, text: &str) -> bool {
        let mut pattern = self.0.chars();
        let mut text = text.chars();
        // Where to go on if the latest star must take one more character.
        let mut star: Option<(std::str::Chars<'_>, std::str::Chars<'_>)> = None;
        loop {
            let mut rest = pattern.clone();
            match (rest.next(), text.clone().next()) {
                (Some('*'), _) => {
                    star = Some((rest.clone(), text.clone()));
                    pattern = rest;
                }
                (Some(wanted), Some(found)) if wanted == '?' || wanted == found => {
                    pattern = rest;
                    text.next();
                }
                (None, None) => return true,
                _ => {
                    let Some((after_star, mut taken)) = star.take() else { return false };
                    if taken.next().is_none() {
                        return false;
                    }
                    pattern = after_star.clone();
                    text = taken.clone();
                    star = Some((after_star, taken));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Glob;

    #[test]
    fn patterns() {
        for (pattern, text, fits) in [
            ("payment_intent.succeeded", "payment_intent.succeeded", true),
            ("payment_intent.succeeded", "payment_intent.succeeded2", false),
            ("payment_intent.*", "payment_intent.succeeded", true),
            ("payment_intent.*", "payment_intent.", true),
            ("payment_intent.*", "payment_intent", false),
            ("*.paid", "invoice.paid", true),
            ("*.paid", "invoice.paid.late", false),
            ("*a*b*", "xxaxxbxx", true),
            ("*a*b*", "xxbxxaxx", false),
            ("a?c", "abc", true),
            ("a?c", "ac", false),
            ("?", "é", true),
            ("*", "", true),
            ("", "", true),
            ("", "a", false),
            ("[ab]", "a", false),
        ] {
            assert_eq!(Glob::new(pattern).matches(text), fits, "{pattern} {text}");
        }
    }

    #[test]
    fn a_spiteful_pattern_costs_little() {
        let text = "a".repeat(2_000);
        assert!(!Glob::new("*a*a*a*a*a*a*a*a*a*a*b").matches(&text));
    }
}
