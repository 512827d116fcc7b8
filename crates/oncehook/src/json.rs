//! JSON that others wrote, before it becomes part of ours.
//!
//! Parsers stop at some depth (serde_json at 128 levels, others at 64), at numbers beyond their range and at halves of
//! surrogate pairs. Whoever puts such a text into a larger one makes the larger one unreadable. So it is asked first, and
//! what does not pass is carried as a string.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};

/// What is stored and sent on as JSON has at most so many levels: every common parser reads that, also inside of our own.
pub const PLAIN_LEVELS: usize = 32;

/// What is shown as JSON has at most so many levels: results that are stored already may have more than [`PLAIN_LEVELS`].
pub const SHOWN_LEVELS: usize = 100;

/// Is this a JSON text that every parser can read, with at most so many arrays and objects inside of each other?
///
/// Copies nothing, however large the text is.
pub fn is_json_within(text: &str, levels: usize) -> bool {
    let mut json = serde_json::Deserializer::from_str(text);
    Levels(levels).deserialize(&mut json).is_ok() && json.end().is_ok()
}

/// Reads a value whole and keeps nothing of it.
#[derive(Clone, Copy)]
struct Levels(usize);

impl Levels {
    fn inside<E: Error>(self) -> Result<Self, E> {
        self.0.checked_sub(1).map(Self).ok_or_else(|| E::custom("too many levels"))
    }
}

impl<'de> DeserializeSeed<'de> for Levels {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Levels {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E: Error>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_bool<E: Error>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E: Error>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E: Error>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E: Error>(self, _: &str) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        let inside = self.inside()?;
        while items.next_element_seed(inside)?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<(), A::Error> {
        let inside = self.inside()?;
        while entries.next_entry_seed(inside, inside)?.is_some() {}
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_every_parser_reads_passes() {
        let arrays = |levels: usize| format!("{}1{}", "[".repeat(levels), "]".repeat(levels));
        let objects = |levels: usize| format!("{}1{}", "{\"a\":".repeat(levels), "}".repeat(levels));
        for levels in [0, 1, 31, 32] {
            assert!(is_json_within(&arrays(levels), 32) && is_json_within(&objects(levels), 32), "{levels}");
        }
        for levels in [33, 126, 127, 128, 1_000, 100_000] {
            assert!(!is_json_within(&arrays(levels), 32) && !is_json_within(&objects(levels), 32), "{levels}");
        }
        for text in ["null", " [1.50, \"a\\u0041\", true, {\"a\":1,\"a\":-2e5}] \n", "12345678901234567890123"] {
            assert!(is_json_within(text, 32), "{text}");
        }
        for text in ["", "1 2", "[1,]", "1e999", "\"\\ud800\"", "{\"\\udfff\":1}", "\u{feff}1", "nul", "\"\n\""] {
            assert!(!is_json_within(text, 32), "{text}");
        }
    }
}
