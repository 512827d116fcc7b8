//! Contentful: method, encoded path with query, the headers that the request itself lists, and the body, one per line.
//!
//! The list of signed headers is itself signed, and so is the time; a list without either is refused.

use super::{MAX_SIGNED_HEADERS, header, listed_header};
use crate::{rejection::Rejection, template::Filling};

const NAMES: &str = "x-contentful-signed-headers";
const TIME: &str = "x-contentful-timestamp";

pub(super) fn canonical(filling: &Filling<'_, '_>) -> Result<Vec<u8>, Rejection> {
    let view = filling.view;
    let names = header(view, NAMES)?;
    let mut listed: Vec<&str> = names.split(',').map(str::trim).take(MAX_SIGNED_HEADERS).collect();
    listed.sort_unstable();
    listed.dedup();
    if !listed.contains(&NAMES) || !listed.contains(&TIME) {
        return Err(Rejection::AmbiguousField { field: format!("header:{NAMES}") });
    }
    let mut headers = Vec::with_capacity(listed.len());
    for name in listed {
        headers.push(format!("{}:{}", name.to_ascii_lowercase(), listed_header(view, name)?.trim()));
    }
    let path = view.settings.path().unwrap_or("/");
    let query = view.request.query().map(|query| format!("?{query}")).unwrap_or_default();
    let mut text = format!("{}\n{path}{query}\n{}\n", view.request.method, headers.join(";")).into_bytes();
    text.extend_from_slice(view.request.body);
    Ok(text)
}
