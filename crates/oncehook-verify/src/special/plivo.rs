//! Plivo v3: the address with its query decoded and sorted, then the sorted form. The nonce is a part of the template.

use super::form;
use crate::{rejection::Rejection, view::View};

pub(super) fn canonical(view: &View<'_>) -> Result<Vec<u8>, Rejection> {
    let url = view.url();
    let base = url.split('?').next().unwrap_or_default();
    let mut query: Vec<(&str, &str)> =
        view.query().into_iter().flatten().map(|(name, value)| (name.as_ref(), value.as_ref())).collect();
    query.sort_unstable();
    let query: Vec<String> = query.iter().map(|(name, value)| format!("{name}={value}")).collect();
    let mut fields = if view.request.method == "POST" { form(view)? } else { Vec::new() };
    fields.sort_unstable();
    let mut text = base.to_owned();
    if !query.is_empty() || !fields.is_empty() {
        text.push('?');
        text.push_str(&query.join("&"));
    }
    if !query.is_empty() && !fields.is_empty() {
        text.push('.');
    }
    text.extend(fields.iter().flat_map(|(name, value)| [*name, *value]));
    Ok(text.into_bytes())
}
