//! What stands in the way of a goal: written by people in docs/PERFORMANCE.md, copied into the report where the goal is missed.
//!
//! Promises: nothing is made up here. Under the heading `What is in the way` every line `- MEASURE: text` belongs to the
//! goal of that name, with the lines that continue it.

use std::path::Path;

const DOCUMENT: &str = "docs/PERFORMANCE.md";
const HEADING: &str = "## What is in the way";

/// The text of each measure.
#[derive(Debug, Default)]
pub(super) struct Obstacles(Vec<(String, String)>);

impl Obstacles {
    /// As the document of a repository has them; none if there is no such document.
    pub(super) fn read(repository: &Path) -> Self {
        Self::parse(&std::fs::read_to_string(repository.join(DOCUMENT)).unwrap_or_default())
    }

    fn parse(document: &str) -> Self {
        let section = document.lines().skip_while(|line| *line != HEADING).skip(1);
        let mut items: Vec<String> = Vec::new();
        for line in section.take_while(|line| !line.starts_with("## ")) {
            if let Some(begun) = line.strip_prefix("- ") {
                items.push(begun.to_owned());
            } else if let Some(item) = items.last_mut().filter(|_| line.starts_with("  ")) {
                item.push(' ');
                item.push_str(line.trim());
            }
        }
        let parted = items.iter().filter_map(|item| item.split_once(": "));
        Self(parted.map(|(measure, text)| (measure.to_owned(), text.to_owned())).collect())
    }

    /// What stands in the way of this.
    pub(super) fn of(&self, measure: &str) -> Option<&str> {
        self.0.iter().find(|(name, _)| name == measure).map(|(_, text)| text.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::super::goals::MEASURES;
    use super::*;

    #[test]
    fn lines_go_on_until_the_next_heading() {
        let text = "## What is in the way\n\nIntro.\n\n- one: a\n  b: c\n- two: d\n\n## Next\n- three: e\n";
        let obstacles = Obstacles::parse(text);
        assert_eq!(obstacles.of("one"), Some("a b: c"));
        assert_eq!(obstacles.of("two"), Some("d"));
        assert_eq!(obstacles.of("three"), None);
    }

    #[test]
    fn the_document_speaks_of_goals_that_exist() {
        let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let obstacles = Obstacles::read(&repository);
        assert!(!obstacles.0.is_empty());
        for (measure, _) in obstacles.0 {
            assert!(MEASURES.contains(&measure.as_str()), "{measure}");
        }
    }
}
