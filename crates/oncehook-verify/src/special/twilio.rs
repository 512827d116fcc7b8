//! Twilio: the address and, for a form, its sorted fields. Any other body is tied to the address by its hash there.
//!
//! The address is the configured one. Libraries that rebuild it from the request try it with and without its port; here
//! there is one form.

use super::sorted_form;
use crate::{
    form::{self, Found},
    hmac, key,
    rejection::Rejection,
    view::View,
};

/// The parameter that ties a body to the address.
pub(crate) const BODY_HASH: &str = "bodySHA256";

pub(super) fn signed_text(view: &View<'_>) -> Result<Vec<u8>, Rejection> {
    let mut text = view.url().into_owned().into_bytes();
    match view.query().map_or(Found::Nothing, |query| form::find(query, BODY_HASH)) {
        Found::Several => Err(Rejection::AmbiguousField { field: format!("query:{BODY_HASH}") }),
        Found::One(claimed) => {
            let actual = hex::encode(key::digest(view.request.body));
            if hmac::equal(claimed.to_ascii_lowercase().as_bytes(), actual.as_bytes()) {
                Ok(text)
            } else {
                Err(Rejection::BodyHashMismatch)
            }
        }
        Found::Nothing => {
            text.extend(sorted_form(view)?);
            Ok(text)
        }
    }
}
