//! The one migration that makes a journal's tables, and the refusal of a journal that it did not make.
//!
//! Until 0.1.0 the migration is edited in place, and a journal of another shape is refused: no version upgrades the
//! journal of another version. Each engine keeps the SQL, runs it and reads its own catalogue. The decisions are here.
//!
//! Promises: pure, and every refusal is one sentence that says what was found and what to do.
//! Does not: connect, read or write anything.

use std::collections::BTreeSet;

/// What an operator can do about a journal that this version cannot use.
const REMEDY: &str =
    "start it with the version that made it, or let `url` in [journal] name a new file or an empty database";

/// The migration of an engine.
pub(super) struct Migration {
    pub(super) name: &'static str,
    pub(super) sql: &'static str,
}

impl Migration {
    /// What the journal records about the text of the migration that made it.
    pub(super) fn digest(&self) -> String {
        hex::encode(oncehook_verify::digest(self.sql.as_bytes()))
    }

    /// Whether the tables are still to be made, given the names and digests that the journal has recorded. An error if
    /// another version made them.
    pub(super) fn is_due(&self, recorded: &[(String, String)]) -> Result<bool, String> {
        match recorded {
            [] => Ok(true),
            [(name, digest)] if name == self.name && *digest == self.digest() => Ok(false),
            _ => {
                let found: Vec<String> = recorded.iter().map(|(name, digest)| shown(name, digest)).collect();
                Err(format!(
                    "this journal was made by another version of oncehook (found {}; this version makes {}); {REMEDY}",
                    found.join(", "),
                    shown(self.name, &self.digest()),
                ))
            }
        }
    }
}

/// A migration for people: its name and the beginning of its digest.
fn shown(name: &str, digest: &str) -> String {
    let digest: String = digest.chars().take(8).collect();
    crate::text::printable(&format!("{name} {digest}")).into_owned()
}

/// Compares what a catalogue holds with what the migration makes, line by line.
pub(super) fn compare<'l>(
    expected: impl IntoIterator<Item = &'l str>,
    found: impl IntoIterator<Item = &'l str>,
) -> Result<(), String> {
    let (expected, found) = (expected.into_iter().collect::<BTreeSet<_>>(), found.into_iter().collect::<BTreeSet<_>>());
    let missing = expected.difference(&found).next().map(|line| ("missing or changed", line));
    let foreign = found.difference(&expected).next().map(|line| ("not part of it", line));
    match missing.or(foreign) {
        None => Ok(()),
        Some((how, line)) => Err(format!(
            "this journal is not as this version of oncehook made it ({how}: {}); undo the change, or {REMEDY}",
            line.split_whitespace().collect::<Vec<_>>().join(" "),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIGRATION: Migration = Migration { name: "001_journal", sql: "CREATE TABLE a (x INT)" };

    fn recorded(rows: &[(&str, &str)]) -> Vec<(String, String)> {
        rows.iter().map(|(name, digest)| ((*name).to_owned(), (*digest).to_owned())).collect()
    }

    #[test]
    fn a_migration_is_due_once_and_every_other_record_is_of_another_version() {
        let own = MIGRATION.digest();
        assert_eq!(MIGRATION.is_due(&[]), Ok(true));
        assert_eq!(MIGRATION.is_due(&recorded(&[("001_journal", &own)])), Ok(false));
        for others in [
            recorded(&[("001_journal", "5eed0000ffff")]),
            recorded(&[("002_order", &own)]),
            recorded(&[("001_journal", &own), ("002_order", "5eed0000ffff")]),
        ] {
            let refused = MIGRATION.is_due(&others).unwrap_err();
            assert!(refused.contains("made by another version of oncehook (found 00"), "{refused}");
            assert!(refused.contains("start it with the version that made it"), "{refused}");
        }
    }

    #[test]
    fn a_missing_line_and_a_foreign_line_are_named() {
        assert_eq!(compare(["a", "b"], ["b", "a"]), Ok(()));
        let refused = compare(["table a\n  (x)", "b"], ["b", "c"]).unwrap_err();
        assert!(refused.contains("(missing or changed: table a (x)); undo the change"), "{refused}");
        let refused = compare(["b"], ["b", "trigger c"]).unwrap_err();
        assert!(refused.contains("(not part of it: trigger c)"), "{refused}");
    }
}
