//! HTTP as a handler: the event is posted to the user's application, at least once, with a key that stays the same.

use std::time::Duration;

use oncehook_verify::{Secret, UnixMicros};

use super::Template;
use crate::delivery::{Cause, Claim, Failure};

/// How a request is made.
#[derive(Debug)]
pub struct HttpOptions {
    /// Where to.
    pub url: String,
    /// Signs the request as Standard Webhooks does, if set.
    pub secret: Option<Secret>,
    /// How long an answer may take.
    pub timeout: Duration,
    /// What is sent; the original body if not set.
    pub body: Option<Template>,
    /// Further headers.
    pub headers: Vec<(String, String)>,
    /// Whether names that resolve to private addresses, and link-local addresses, may be reached.
    pub allow_private: bool,
    /// What an answer of 4xx means, apart from those that ask for another try and from 410.
    pub on_4xx: OnClientError,
}

/// What an answer of 4xx means.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OnClientError {
    /// Try again, up to the route's limit: most are mistakes that somebody mends.
    #[default]
    Retry,
    /// Give up at once.
    GiveUp,
}

impl HttpOptions {
    /// The usual way to ask a URL.
    #[must_use]
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            secret: None,
            timeout: Duration::from_secs(15),
            body: None,
            headers: Vec::new(),
            allow_private: false,
            on_4xx: OnClientError::default(),
        }
    }
}

/// A request to the user's application.
#[derive(Debug)]
pub struct HttpHandler {
    options: HttpOptions,
}

impl HttpHandler {
    /// Checks the options. The error is for the author of the configuration.
    pub fn new(options: HttpOptions) -> Result<Self, String> {
        Ok(Self { options })
    }

    /// Whether the body needs the result of a delivery before.
    #[must_use]
    pub fn needs_result(&self) -> bool {
        self.options.body.as_ref().is_some_and(Template::needs_result)
    }

    /// Makes one attempt. The result is JSON: the answer's status and an excerpt of its body.
    pub async fn deliver(&self, _claim: &Claim, _now: UnixMicros) -> Result<Option<String>, Failure> {
        Err(Failure::retry(Cause::Ours, "not written yet"))
    }
}
