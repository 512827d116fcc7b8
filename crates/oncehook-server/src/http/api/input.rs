//! What a call that changes something brings along: a small JSON object, and who sent it.
//!
//! Promises: a body is JSON and says so, or there is none; it is small and arrives in time; a key that is not known is an
//! error, because a misspelt `dry_run` would not be one. A query is an error too: a `dry_run` there would be ignored.
//!
//! Does not: prove who somebody is. A name is what the caller says; the token says that they may.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::extract::{FromRequest, FromRequestParts, Request};
use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, StatusCode, header};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use oncehook::journal::Who;
use serde::de::DeserializeOwned;

use crate::http::admin::Admin;
use crate::http::error::HttpError;

/// The largest body of an order.
const BODY_BYTES: usize = 64 << 10;

/// The longest name and reason, in characters.
const NAME_CHARS: usize = 200;
const REASON_CHARS: usize = 1_000;

/// Where a call came from. Put into every request by the listener.
#[derive(Debug, Clone, Copy)]
pub(in crate::http) struct Peer(pub(in crate::http) SocketAddr);

/// Who gives an order: what `oncehook-who` says, or else the address.
pub(crate) struct Operator(String);

impl Operator {
    /// With the reason they gave.
    pub(super) fn because(self, reason: Option<String>) -> Result<Who, HttpError> {
        let reason = reason.map(|reason| reason.trim().to_owned()).filter(|reason| !reason.is_empty());
        match reason {
            Some(reason) if !is_line(&reason, REASON_CHARS) => Err(HttpError::bad_request(
                "reason",
                format!("a reason is one line of at most {REASON_CHARS} characters"),
            )),
            reason => Ok(Who { name: self.0, reason }),
        }
    }
}

impl<S: Sync> FromRequestParts<S> for Operator {
    type Rejection = HttpError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, HttpError> {
        let mut said = parts.headers.get_all("oncehook-who").iter();
        match (said.next(), said.next()) {
            (None, _) => {
                let peer = parts.extensions.get::<Peer>();
                Ok(Self(peer.map_or_else(|| "unknown".to_owned(), |peer| peer.0.ip().to_string())))
            }
            (Some(name), None) => std::str::from_utf8(name.as_bytes())
                .ok()
                .map(str::trim)
                .filter(|name| is_line(name, NAME_CHARS))
                .map(|name| Self(name.to_owned()))
                .ok_or_else(bad_name),
            (Some(_), Some(_)) => Err(bad_name()),
        }
    }
}

fn bad_name() -> HttpError {
    HttpError::bad_request("who", format!("oncehook-who is one name of at most {NAME_CHARS} characters"))
}

/// Whether a text is one line, not empty, and harmless to print.
fn is_line(text: &str, longest: usize) -> bool {
    !text.is_empty() && text.chars().count() <= longest && !text.chars().any(char::is_control)
}

/// A JSON object; without a body, an empty one.
pub(crate) struct Input<T>(pub(super) T);

impl<T: DeserializeOwned> FromRequest<Arc<Admin>> for Input<T> {
    type Rejection = HttpError;

    async fn from_request(request: Request, admin: &Arc<Admin>) -> Result<Self, HttpError> {
        let (parts, body) = request.into_parts();
        if parts.uri.query().is_some_and(|query| !query.is_empty()) {
            let message = "an order takes no query; send what it needs as a JSON object in the body";
            return Err(HttpError::bad_request("query", message).closing());
        }
        let reading = Limited::new(body, BODY_BYTES).collect();
        let body = match tokio::time::timeout(admin.limits.body, reading).await {
            Ok(Ok(body)) => body.to_bytes(),
            Ok(Err(error)) if error.is::<LengthLimitError>() => {
                let message = format!("the body is larger than {BODY_BYTES} bytes");
                return Err(HttpError::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", message).closing());
            }
            Ok(Err(_)) => return Err(HttpError::bad_request("body", "the body did not arrive").closing()),
            Err(_) => {
                let message = "the body did not arrive in time";
                return Err(HttpError::new(StatusCode::REQUEST_TIMEOUT, "timeout", message).closing());
            }
        };
        read(&parts.headers, &body).map(Self)
    }
}

fn read<T: DeserializeOwned>(headers: &HeaderMap, body: &Bytes) -> Result<T, HttpError> {
    let body = if body.is_empty() { b"{}" } else { body.as_ref() };
    // A form on a strange page can send text, but not JSON.
    if body != b"{}" && !is_json(headers) {
        let message = "send the body as application/json";
        return Err(HttpError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "content_type", message));
    }
    serde_json::from_slice(body).map_err(|error| HttpError::bad_request("body", error.to_string()))
}

fn is_json(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    kind.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case("application/json")
}
