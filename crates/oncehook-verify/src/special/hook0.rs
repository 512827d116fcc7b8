//! Hook0, which Coinbase CDP sends through: time, the names of the signed headers, their values, and the body, with
//! dots between them. The names stand in the signature header, separated by spaces.

use super::{MAX_SIGNED_HEADERS, listed_header};
use crate::{rejection::Rejection, template::Filling};

pub(super) fn payload(filling: &Filling<'_, '_>) -> Result<Vec<u8>, Rejection> {
    let time = filling.timestamp.ok_or(Rejection::MissingTimestamp)?;
    let names =
        filling.names.ok_or_else(|| Rejection::MissingField { field: "the list of signed headers".to_owned() })?;
    let mut values = Vec::new();
    for name in names.split(' ').take(MAX_SIGNED_HEADERS) {
        values.push(listed_header(filling.view, name)?);
    }
    let mut text = format!("{time}.{names}.{}.", values.join(".")).into_bytes();
    text.extend_from_slice(filling.view.request.body);
    Ok(text)
}
