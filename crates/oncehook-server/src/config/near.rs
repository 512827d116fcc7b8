//! "Did you mean …?": the known names that are nearest to one that is not known.

/// The help for a name that is not known; nothing if no known one is near.
pub(crate) fn did_you_mean<'k>(name: &str, known: impl IntoIterator<Item = &'k str>) -> Option<String> {
    let near = nearest(name, known);
    let quoted: Vec<String> = near.iter().map(|known| format!("`{known}`")).collect();
    (!quoted.is_empty()).then(|| format!("did you mean {}?", quoted.join(" or ")))
}

/// The known names that are as near as any: by their letters, or else those that begin with what was written. At most four.
fn nearest<'k>(name: &str, known: impl IntoIterator<Item = &'k str>) -> Vec<&'k str> {
    let name = name.to_lowercase();
    let known: Vec<&str> = known.into_iter().collect();
    let by_letters = known.iter().copied().filter(|known| is_near(&name, known));
    let by_letters: Vec<(usize, &str)> = by_letters.map(|known| (distance(&name, known), known)).collect();
    let best = by_letters.iter().map(|(edits, _)| *edits).min();
    let mut near: Vec<&str> =
        by_letters.into_iter().filter(|(edits, _)| Some(*edits) == best).map(|(_, known)| known).collect();
    if near.is_empty() && name.chars().count() >= 3 {
        near = known.into_iter().filter(|known| known.starts_with(&name) || name.starts_with(*known)).collect();
    }
    near.truncate(4);
    near
}

/// Whether one of two words is probably the other, misspelt: two letters at most, one in a short word.
pub(super) fn is_near(a: &str, b: &str) -> bool {
    let shorter = a.chars().count().min(b.chars().count());
    distance(a, b) <= if shorter <= 3 { 1 } else { 2 }
}

/// Edits between two words: letters put in, left out, replaced, and neighbours that changed places.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut before: Vec<usize> = Vec::new();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    let mut last = None;
    for (i, from) in a.iter().enumerate() {
        let mut next = vec![i + 1];
        let mut beside = None;
        for (j, to) in b.iter().enumerate() {
            let at = |row: &[usize], place: usize| row.get(place).copied().unwrap_or(usize::MAX / 2);
            let mut edits = at(&row, j) + usize::from(from != to);
            edits = edits.min(at(&row, j + 1) + 1).min(at(&next, j) + 1);
            if last == Some(to) && beside == Some(from) {
                edits = edits.min(at(&before, j.saturating_sub(1)) + 1);
            }
            next.push(edits);
            beside = Some(to);
        }
        last = Some(from);
        before = std::mem::replace(&mut row, next);
    }
    row.last().copied().unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances() {
        for (a, b, edits) in [
            ("", "", 0),
            ("abc", "abc", 0),
            ("kitten", "sitting", 3),
            ("", "ab", 2),
            ("secret", "secrets", 1),
            ("gihtub", "github", 1),
            ("ba", "ab", 1),
        ] {
            assert_eq!(distance(a, b), edits, "{a} {b}");
            assert_eq!(distance(b, a), edits, "{b} {a}");
        }
    }

    #[test]
    fn the_nearest_names_come_first_and_strangers_not_at_all() {
        let known = ["stripe", "square", "shopify", "on", "to", "standard-webhooks", "custom"];
        assert_eq!(nearest("strip", known), ["stripe"]);
        assert_eq!(nearest("Stripe", known), ["stripe"]);
        assert_eq!(nearest("standard", known), ["standard-webhooks"]);
        assert_eq!(nearest("mongodb", known), [""; 0]);
        // Two letters of two are another word.
        assert_eq!(nearest("xx", known), [""; 0]);
        assert_eq!(did_you_mean("shopfy", known).as_deref(), Some("did you mean `shopify`?"));
    }
}
