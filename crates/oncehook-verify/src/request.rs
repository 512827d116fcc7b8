//! A request as it arrived: not trusted, not parsed.

use std::fmt;

/// What the sender sent. The body is the raw bytes after HTTP framing and before any decoding.
#[derive(Clone, Copy)]
pub struct Request<'a> {
    /// The HTTP method, as received.
    pub method: &'a str,
    /// The path and, behind a `?`, the query, as received.
    pub path: &'a str,
    /// All headers.
    pub headers: &'a http::HeaderMap,
    /// The body, byte for byte.
    pub body: &'a [u8],
}

impl<'a> Request<'a> {
    /// What follows the first `?`, still encoded; nothing if there is none.
    #[must_use]
    pub fn query(&self) -> Option<&'a str> {
        self.path.split_once('?').map(|(_, query)| query)
    }
}

/// Sizes only: bodies and header values do not belong into logs.
impl fmt::Debug for Request<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Request")
            .field("headers", &self.headers.len())
            .field("body_bytes", &self.body.len())
            .finish_non_exhaustive()
    }
}
