//! Paddle Classic: every field but the signature, sorted by name, as PHP's `serialize()` writes an array of strings.

use super::form;
use crate::{rejection::Rejection, view::View};

const SIGNATURE: &str = "p_signature";

pub(super) fn serialized(view: &View<'_>) -> Result<Vec<u8>, Rejection> {
    let mut pairs = form(view)?;
    pairs.retain(|(name, _)| *name != SIGNATURE);
    pairs.sort_unstable();
    // PHP keeps the last of several values; which one was meant is anybody's guess.
    if pairs.windows(2).any(|two| matches!(two, [(first, _), (second, _)] if first == second)) {
        return Err(Rejection::AmbiguousField { field: "form".to_owned() });
    }
    let mut text = format!("a:{}:{{", pairs.len());
    for part in pairs.iter().flat_map(|(name, value)| [name, value]) {
        text.push_str(&format!("s:{}:\"{part}\";", part.len()));
    }
    text.push('}');
    Ok(text.into_bytes())
}
