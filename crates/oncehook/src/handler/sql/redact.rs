//! Leaves values of events out of what an engine says of an error. A trigger may say anything, so the text is searched for the
//! values that the statements were given, also for those inside of JSON.
//!
//! Does not: find a value that the engine has changed. Engines' own messages that quote a value are cut by `journal`.

use std::borrow::Cow;

use serde_json::Value;

use crate::handler::Found;
use crate::text::printable;

/// Shorter values say nothing about anybody, and would tear holes into every message.
const SHORT: usize = 4;

/// The text with `…` for each of the values.
pub(super) fn without(told: &str, values: &[Found<'_>]) -> String {
    let mut found = Vec::new();
    for value in values {
        match value {
            Found::Text(text) => note(text, &mut found),
            Found::Json(json) => match serde_json::from_str(json) {
                Ok(value) => collect(&value, &mut found),
                Err(_) => note(json, &mut found),
            },
            Found::Bytes(_) | Found::Null => {}
        }
    }
    found.retain(|value| value.len() <= told.len());
    // The longest first: one may be part of another.
    found.sort_by(|one, other| other.len().cmp(&one.len()).then_with(|| one.cmp(other)));
    found.dedup();
    found.iter().fold(told.to_owned(), |told, value| replaced(&told, value))
}

/// A text as it is, as it is printed, and what is inside of it if it is JSON.
fn note(text: &str, found: &mut Vec<String>) {
    if let Some(Ok(inside)) = text.starts_with(['{', '[']).then(|| serde_json::from_str(text)) {
        collect(&inside, found);
    }
    if let Cow::Owned(printed) = printable(text) {
        found.push(printed);
    }
    found.push(text.to_owned());
}

fn collect(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::String(text) => note(text, found),
        Value::Number(number) => found.push(number.to_string()),
        Value::Array(items) => items.iter().for_each(|item| collect(item, found)),
        Value::Object(members) => members.values().for_each(|member| collect(member, found)),
        Value::Null | Value::Bool(_) => {}
    }
}

/// Short values only where they stand alone, and only if they have digits.
fn replaced(told: &str, value: &str) -> String {
    let short = value.chars().count() < SHORT;
    if !value.contains(char::is_alphanumeric)
        || short && (value.len() < 2 || !value.contains(|c: char| c.is_ascii_digit()))
    {
        return told.to_owned();
    }
    let (mut rest, mut kept) = (told, String::with_capacity(told.len()));
    while let Some((before, after)) = rest.split_once(value) {
        kept.push_str(before);
        let joined = kept.ends_with(char::is_alphanumeric) || after.starts_with(char::is_alphanumeric);
        kept.push_str(if short && joined { value } else { "…" });
        rest = after;
    }
    kept.push_str(rest);
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_left_out_wherever_they_were() {
        let text = |text: &'static str| Found::Text(Cow::Borrowed(text));
        let json = |text: &'static str| Found::Json(Cow::Borrowed(text));
        for (told, values, left) in [
            ("order 4711 of anna@example.org", vec![json("4711"), text("anna@example.org")], "order … of …"),
            ("no stock for \"blue\\nhat\"", vec![json(r#""blue\nhat""#)], "no stock for \"…\""),
            ("a@b.example, deep", vec![json(r#"{"x":[{"mail":"a@b.example"}],"y":"deep"}"#)], "…, …"),
            ("said deep", vec![text(r#"{"x":"deep"}"#)], "said …"),
            ("12 of 123 at row 1", vec![json("12"), json("1")], "… of 123 at row 1"),
            ("is it a table?", vec![text("is"), text("a"), text(" "), Found::Null], "is it a table?"),
            ("abcdef", vec![text("abcd"), text("abcdef")], "…"),
        ] {
            assert_eq!(without(told, &values), left);
        }
    }
}
