//! HTTP as a handler: the event is posted to the user's application, at least once, with a key that stays the same.
//!
//! Promises: the original body goes out byte for byte, with the provider's own event headers (or the filled template, without
//! them); `Idempotency-Key` and `webhook-id` are the
//! same for every attempt of a delivery, `webhook-timestamp` and `webhook-signature` fresh for each. One deadline holds for
//! the whole exchange, and of an answer only a bounded part is read. No redirect is followed, no proxy is asked, no cookie
//! is kept, and the guard of `outbound` stands before every connection. Neither an error nor a result holds a configured
//! secret, and no error more of the URL than scheme, host and port.
//!
//! A 2xx whose body breaks off counts as a failure: the other side may have died in the middle of its work. Trying again is
//! safe because of the key.
//!
//! Does not: make it exactly once on the other side. The key is there for that.

mod answer;
mod destination;
mod fetch;
mod headers;
mod hidden;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use oncehook_verify::{EventHeaders, Secret, UnixMicros};
use tokio::time::Instant;
use url::Url;

use super::{HeaderTemplate, Template};
use crate::delivery::{Claim, Failure};
use crate::outbound::{Guard, Names, SystemNames};
use answer::Answer;
use destination::Destination;
pub use fetch::{Fetch, FetchOptions};
use headers::Headers;
pub use headers::may_be_forwarded;

/// No exchange may take longer: a request that waits holds one of the route's few places.
pub const LONGEST_TIMEOUT: Duration = Duration::from_secs(300);

/// How a request is made.
pub struct HttpOptions {
    /// Where to.
    pub url: String,
    /// Signs the request as Standard Webhooks does, if set.
    pub secret: Option<Secret>,
    /// How long the exchange may take, from connecting to the end of the answer. At most five minutes.
    pub timeout: Duration,
    /// What is sent; the original body if not set.
    pub body: Option<Template>,
    /// Further headers with these values. They are taken for secrets: never filled from an event, and hidden where the
    /// destination repeats them.
    pub headers: Vec<(String, String)>,
    /// Further headers that are filled from the event.
    pub header_templates: Vec<(String, HeaderTemplate)>,
    /// Whether names that resolve to private addresses, and link-local addresses, may be reached.
    pub allow_private: bool,
    /// What an answer of 4xx means, apart from those that ask for another try and from 410.
    pub on_4xx: OnClientError,
}

/// What an answer of 4xx means.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OnClientError {
    /// Try again, up to the route's limit: most are mistakes that people mend.
    #[default]
    Retry,
    /// Give up at once.
    GiveUp,
    /// It is what the application has to say: the delivery has succeeded, with this answer as its result.
    Result,
}

impl HttpOptions {
    /// The usual way to ask a URL.
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            secret: None,
            timeout: Duration::from_secs(15),
            body: None,
            headers: Vec::new(),
            header_templates: Vec::new(),
            allow_private: false,
            on_4xx: OnClientError::default(),
        }
    }
}

/// Neither URL nor headers: both may hold secrets.
impl fmt::Debug for HttpOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpOptions").field("timeout", &self.timeout).finish_non_exhaustive()
    }
}

/// A request to the user's application.
pub struct HttpHandler {
    url: Url,
    headers: Headers,
    body: Option<Template>,
    on_4xx: OnClientError,
    /// Whether answers are kept whole.
    whole: AtomicBool,
    destination: Destination,
}

/// Scheme, host and port.
impl fmt::Debug for HttpHandler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("HttpHandler").field(&self.destination.name).finish()
    }
}

impl HttpHandler {
    /// Checks the options. The error is for the author of the configuration.
    pub fn new(options: HttpOptions) -> Result<Self, String> {
        Self::with_names(options, Arc::new(SystemNames))
    }

    /// The same, with names looked up elsewhere than in the operating system. The guard judges these addresses too.
    pub fn with_names(options: HttpOptions, names: Arc<dyn Names>) -> Result<Self, String> {
        let guard = Guard { allow_private: options.allow_private };
        let url = guard.check_url(&options.url).map_err(|refused| refused.to_string())?;
        let hidden = headers::credentials(&options, &url);
        let destination = Destination::new(&url, guard, names, options.timeout, hidden)?;
        let (headers, whole) = (Headers::new(&options)?, AtomicBool::new(false));
        Ok(Self { url, headers, body: options.body, on_4xx: options.on_4xx, whole, destination })
    }

    /// Sends these of the provider's headers along with the original body. Credentials and names that are ours are left
    /// out. A second list is not taken.
    pub fn forward(&self, headers: EventHeaders) {
        let _ = self.headers.forwarded.set(headers);
    }

    /// Keeps answers whole, as far as they are read: a client waits for them.
    pub fn keep_whole_answers(&self) {
        self.whole.store(true, Ordering::Relaxed);
    }

    /// Makes one attempt. The result is JSON: the answer's status and an excerpt of its body.
    ///
    /// `now` is the wall clock's time; it is signed. If the future is dropped half-way, the request may or may not have
    /// arrived.
    pub async fn deliver(&self, claim: &Claim, now: UnixMicros) -> Result<Option<String>, Failure> {
        let body = match &self.body {
            Some(template) => Bytes::from(template.fill(&claim.event)?),
            None => claim.event.body.clone(),
        };
        let headers = self.headers.of_attempt(claim, &body, now)?;
        let deadline = Instant::now() + self.destination.timeout;
        let request = self.destination.client.post(self.url.clone()).headers(headers).body(body);
        let response = self.destination.send(request, deadline).await?;
        self.judge(&Answer::read(response, deadline).await, now)
    }
}
