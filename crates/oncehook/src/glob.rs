//! Patterns for event types: `*` stands for any characters, `?` for one. Everything else is itself.
//!
//! Promises: matching takes time in proportion to pattern times text, whatever the pattern.

/// A pattern, or a plain name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Glob(Box<str>);

impl Glob {
    /// Any text is a pattern.
    pub fn new(pattern: &str) -> Self {
        Self(pattern.into())
    }

    /// The pattern as it was written.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether the whole text fits.
    pub fn matches(&self, text: &str) -> bool {
        let (mut pattern, mut text) = (self.0.chars(), text.chars());
        // Where to go on if the latest star must take one more character.
        let mut star = None;
        loop {
            let (mut pattern_rest, mut text_rest) = (pattern.clone(), text.clone());
            match (pattern_rest.next(), text_rest.next()) {
                (Some('*'), _) => {
                    star = Some((pattern_rest.clone(), text.clone()));
                    pattern = pattern_rest;
                }
                (Some(wanted), Some(found)) if wanted == '?' || wanted == found => {
                    (pattern, text) = (pattern_rest, text_rest);
                }
                (None, None) => return true,
                _ => {
                    let Some((after_star, taken)) = &mut star else { return false };
                    if taken.next().is_none() {
                        return false;
                    }
                    (pattern, text) = (after_star.clone(), taken.clone());
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
