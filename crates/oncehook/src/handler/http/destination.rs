//! The other side of a request: the client that asks it, the deadline, and what is said of it when it does not answer.
//!
//! Promises: the client is guarded, without redirects, proxies, cookies or hidden retries, and its cryptography is named here
//! and not taken from whatever the process has installed. No error holds more of the URL than scheme, host and port.
//!
//! Does not: judge an answer. That is `answer`, and `fetch`.

use std::error::Error;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use reqwest::{Client, RequestBuilder, Response};
use rustls::{ClientConfig, RootCertStore};
use rustls_platform_verifier::BuilderVerifierExt as _;
use tokio::time::{Instant, timeout_at};
use url::Url;

use super::LONGEST_TIMEOUT;
use super::hidden::Hidden;
use crate::delivery::{Cause, Failure};
use crate::outbound::{Guard, GuardedNames, Names, Refused};

/// Connections that are kept for the next request.
const IDLE_CONNECTIONS: usize = 32;

/// How long they are kept: less than the five seconds after which common servers hang up, so that a request is seldom
/// sent into a connection that is just being closed.
const IDLE_TIME: Duration = Duration::from_secs(4);

/// This much of a foreign text is repeated in an error.
const ERROR_CHARS: usize = 200;

/// Where requests of one route go.
pub(super) struct Destination {
    /// Scheme, host and port. A path or a query may hold a token.
    pub(super) name: String,
    pub(super) client: Client,
    pub(super) timeout: Duration,
    /// What stands neither in an error nor in a result.
    pub(super) hidden: Hidden,
}

/// Why an exchange broke off: its error, or nothing if the time was up.
pub(super) type Broken = Option<reqwest::Error>;

impl Destination {
    /// The destination of a URL, which the guard has checked.
    pub(super) fn new(
        url: &Url,
        guard: Guard,
        names: Arc<dyn Names>,
        timeout: Duration,
        hidden: Hidden,
    ) -> Result<Self, String> {
        if timeout.is_zero() || timeout > LONGEST_TIMEOUT {
            return Err(format!("the timeout must be above zero and at most {} s", LONGEST_TIMEOUT.as_secs()));
        }
        let client = Client::builder()
            .user_agent(concat!("oncehook/", env!("CARGO_PKG_VERSION")))
            .redirect(reqwest::redirect::Policy::none())
            .retry(reqwest::retry::never())
            .no_proxy()
            .referer(false)
            .http1_only()
            .pool_max_idle_per_host(IDLE_CONNECTIONS)
            .pool_idle_timeout(IDLE_TIME)
            .dns_resolver(Arc::new(GuardedNames { guard, names }))
            .tls_backend_preconfigured(tls(url).map_err(|error| format!("TLS cannot be prepared: {error}"))?)
            .build()
            .map_err(|error| format!("the HTTP client cannot be prepared: {error}"))?;
        Ok(Self { name: url.origin().ascii_serialization(), client, timeout, hidden })
    }

    /// Sends a request, and waits for the head of the answer.
    pub(super) async fn send(&self, request: RequestBuilder, deadline: Instant) -> Result<Response, Failure> {
        within(deadline, request.send()).await.map_err(|broken| self.unanswered(broken))
    }

    /// No exchange at all, or one that broke off before an answer, or took too long.
    pub(super) fn unanswered(&self, broken: Broken) -> Failure {
        let Some(error) = broken else {
            let logged = format!("no answer within {:?}", self.timeout);
            return Failure::retry(Cause::Destination, format!("{} gave {logged}", self.name)).in_log(logged);
        };
        // The guard's word, if it was the guard that refused.
        let (message, logged) = if let Some(refused) = causes(&error).find_map(<dyn Error>::downcast_ref::<Refused>) {
            (format!("{} is not asked: {refused}", self.name), "its address is not allowed")
        } else if error.is_connect() {
            (format!("{} cannot be reached: {}", self.name, innermost(&error)), "it cannot be reached")
        } else {
            (format!("{} gave no answer: {}", self.name, innermost(&error)), "no answer")
        };
        let failure = Failure::retry(Cause::Destination, message);
        let kinds = causes(&error).filter_map(<dyn Error>::downcast_ref::<io::Error>).map(io::Error::kind);
        match kinds.filter(|kind| *kind != io::ErrorKind::Other).last() {
            // Such as "connection refused": words of the standard library.
            Some(kind) => failure.in_log(kind.to_string()),
            None => failure.in_log(logged),
        }
    }
}

/// The system's certificates for https. Plain HTTP trusts none, and saves reading them.
fn tls(url: &Url) -> Result<ClientConfig, rustls::Error> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let versions = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    let trusting = match url.scheme() {
        "https" => versions.with_platform_verifier()?,
        _ => versions.with_root_certificates(RootCertStore::empty()),
    };
    Ok(trusting.with_no_client_auth())
}

async fn within<T>(deadline: Instant, exchange: impl Future<Output = reqwest::Result<T>>) -> Result<T, Broken> {
    timeout_at(deadline, exchange).await.map_err(|_| None)?.map_err(Some)
}

/// Reads a body until its end, or until it has at least `enough` bytes. Returns what was read, and how that ended.
pub(super) async fn read(response: &mut Response, deadline: Instant, enough: usize) -> (Vec<u8>, Result<(), Broken>) {
    let mut body = Vec::new();
    while body.len() < enough {
        match within(deadline, response.chunk()).await {
            Ok(Some(chunk)) => body.extend_from_slice(&chunk),
            Ok(None) => break,
            Err(broken) => return (body, Err(broken)),
        }
    }
    (body, Ok(()))
}

/// An error and what it came from, the innermost last.
fn causes(error: &reqwest::Error) -> impl Iterator<Item = &(dyn Error + 'static)> {
    std::iter::successors(Some(error as &(dyn Error + 'static)), |cause| (**cause).source())
}

/// The innermost reason, such as `Connection refused`; the layers above it repeat the whole URL.
pub(super) fn innermost(error: &reqwest::Error) -> String {
    match causes(error).last() {
        Some(cause) if !cause.is::<reqwest::Error>() => shown(&cause.to_string()),
        // Without a reason inside there is only reqwest's own text, which would name the URL.
        _ => "the request failed".to_owned(),
    }
}

/// One short line without control characters.
pub(super) fn shown(text: &str) -> String {
    let line = text.split(|c: char| c.is_whitespace() || c.is_control()).filter(|word| !word.is_empty());
    let line = line.collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(ERROR_CHARS) {
        Some((end, _)) => format!("{}…", line.get(..end).unwrap_or_default()),
        None => line,
    }
}
