//! Every way a request can fail, as one list: the status, a stable code for programs, a sentence for people.
//!
//! The sentence says whether trying again helps. Nothing of the request, a secret or an internal error stands in it.

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use http_body_util::Full;

/// A refusal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HttpError {
    pub(super) status: StatusCode,
    pub(super) code: &'static str,
    pub(super) message: String,
    /// Seconds after which to try again.
    pub(super) retry_after: Option<u32>,
    /// The methods that would be taken, for 405.
    pub(super) allow: Option<&'static str>,
    /// Whether the connection must not be used further.
    pub(super) close: bool,
    /// Why, in metrics and in the log: the code, unless one code has several reasons.
    pub(super) reason: &'static str,
    /// Numbers for the operator's log, such as a size and the limit; nothing that the sender wrote.
    pub(super) detail: Option<String>,
}

impl HttpError {
    pub(super) fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        let message = message.into();
        Self { status, code, message, retry_after: None, allow: None, close: false, reason: code, detail: None }
    }

    /// Counted and logged under another word than its code.
    #[must_use]
    pub(super) fn because(self, reason: &'static str) -> Self {
        Self { reason, ..self }
    }

    pub(super) fn not_found() -> Self {
        Self::new(StatusCode::NOT_FOUND, "not_found", "there is nothing here")
    }

    pub(super) fn method_not_allowed(allow: &'static str, message: &'static str) -> Self {
        Self { allow: Some(allow), ..Self::new(StatusCode::METHOD_NOT_ALLOWED, "method", message) }
    }

    pub(super) fn bad_request(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, code, message)
    }

    /// Not stored, or unknown whether stored: the sender must try again.
    pub(super) fn unavailable(code: &'static str) -> Self {
        let message = "the event could not be stored now; send it again";
        Self { retry_after: Some(2), ..Self::new(StatusCode::SERVICE_UNAVAILABLE, code, message) }
    }

    /// Too many requests for now: the sender must try again, and is told when.
    pub(super) fn too_many(after: std::time::Duration) -> Self {
        let seconds = u32::try_from(after.as_secs()).unwrap_or(u32::MAX).saturating_add(1);
        let message = "too many requests; send it again later";
        Self { retry_after: Some(seconds), ..Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit", message) }
    }

    /// The journal could not be asked. Reading changes nothing, so trying again is always safe.
    pub(super) fn unavailable_read(code: &'static str, message: impl Into<String>) -> Self {
        Self { retry_after: Some(2), ..Self::new(StatusCode::SERVICE_UNAVAILABLE, code, message) }
    }

    #[must_use]
    pub(super) fn closing(self) -> Self {
        Self { close: true, ..self }
    }

    /// The answer on the wire.
    #[must_use]
    pub(super) fn into_response(self) -> Response<Full<Bytes>> {
        let body = serde_json::json!({ "error": { "code": self.code, "message": self.message } }).to_string();
        let mut response = Response::new(Full::new(Bytes::from(body)));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(seconds) = self.retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if let Some(allow) = self.allow {
            headers.insert(header::ALLOW, HeaderValue::from_static(allow));
        }
        if self.close {
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }
}

impl axum::response::IntoResponse for HttpError {
    fn into_response(self) -> axum::response::Response {
        Self::into_response(self).map(axum::body::Body::new)
    }
}
