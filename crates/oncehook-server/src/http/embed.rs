//! Results and other JSON that is stored as text, as parts of our own answers.

use oncehook::json::{SHOWN_LEVELS, is_json_within};
use serde_json::value::{RawValue, to_raw_value};

/// The text as JSON, number for number. What is not JSON, or what would make the whole answer unreadable for common parsers,
/// is a string.
pub(super) fn embedded(text: &str) -> Box<RawValue> {
    let json = is_json_within(text, SHOWN_LEVELS).then(|| RawValue::from_string(text.trim().to_owned()));
    match json {
        Some(Ok(json)) => json,
        _ => to_raw_value(text).unwrap_or_else(|_| RawValue::NULL.to_owned()),
    }
}
