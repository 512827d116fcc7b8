//! Atlassian Connect: the hash of method, path and sorted query that a token is bound to.

use crate::{form, key, view::View};

/// The parameter that may carry the token itself and is not part of the hash.
const TOKEN: &str = "jwt";

/// Hexadecimal SHA-256 of `METHOD&path&query`.
pub(crate) fn query_hash(view: &View<'_>) -> String {
    let path = view.settings.path().unwrap_or("/");
    let path = if path == "/" { path } else { path.trim_end_matches('/') }.replace('&', "%26");
    let mut query: Vec<(String, String)> = Vec::new();
    for (name, value) in view.query().into_iter().flatten().filter(|(name, _)| name != TOKEN) {
        query.push((form::encode(name), form::encode(value)));
    }
    query.sort();
    let mut text = format!("{}&{path}&", view.request.method);
    let mut last: Option<&str> = None;
    for (name, value) in &query {
        match last {
            // Values of one name are joined by commas.
            Some(before) if before == name => text.push_str(&format!(",{value}")),
            Some(_) => text.push_str(&format!("&{name}={value}")),
            None => text.push_str(&format!("{name}={value}")),
        }
        last = Some(name);
    }
    hex::encode(key::digest(text.as_bytes()))
}
