//! What a source knows beside its secrets: its public address, and values that only its owner has.
//!
//! Some senders sign the address they call, or a number from their dashboard. Neither is taken from the request,
//! because whoever sends a request chooses what is in it.

use std::{borrow::Cow, collections::BTreeMap};

use crate::request::Request;

/// The settings of one source. Which of them a scheme needs is said by [`crate::Scheme::needs_url`] and
/// [`crate::Scheme::params`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Settings {
    /// How far a signed time may be from now, in seconds; nothing takes the scheme's own.
    pub tolerance_secs: Option<u64>,
    /// The address at which the sender calls, exactly as it was entered at the sender's. Its query is ignored: the
    /// query is read from the request, because senders add to it.
    pub url: Option<String>,
    /// Values by name, such as PayPal's `webhook_id`.
    pub params: BTreeMap<String, String>,
}

impl Settings {
    /// The address that was called: the configured one, with the query of this request.
    pub(crate) fn called(&self, request: &Request<'_>) -> Option<Cow<'_, str>> {
        let url = self.url.as_deref()?;
        let base = url.split(['?', '#']).next().unwrap_or_default();
        Some(match request.query() {
            None => Cow::Borrowed(base),
            Some(query) => Cow::Owned(format!("{base}?{query}")),
        })
    }

    /// The path of the configured address, as it is written there.
    pub(crate) fn path(&self) -> Option<&str> {
        let url = self.url.as_deref()?;
        let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
        let path = rest.find('/').and_then(|at| rest.get(at..)).unwrap_or("/");
        path.split(['?', '#']).next()
    }
}

/// Why an address cannot be one at which a sender calls; nothing if it can.
pub(crate) fn url_problem(url: &str) -> Option<&'static str> {
    let rest = url.strip_prefix("https://").or_else(|| url.strip_prefix("http://"));
    match rest {
        None => Some("it must begin with https:// or http://"),
        Some(rest) if rest.is_empty() || rest.starts_with(['/', '?', '#']) => Some("it names no host"),
        Some(_) if !url.bytes().all(|byte| byte.is_ascii_graphic()) => Some("it must be plain ASCII, percent-encoded"),
        Some(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_query_is_the_requests_own_and_the_rest_the_configured() {
        let headers = http::HeaderMap::new();
        let called = |url: &str, path: &str| {
            let settings = Settings { url: Some(url.to_owned()), ..Settings::default() };
            let request = Request { method: "POST", path, headers: &headers, body: b"" };
            settings.called(&request).unwrap().into_owned()
        };
        assert_eq!(called("https://a.example:8443/In/", "/webhooks/x"), "https://a.example:8443/In/");
        assert_eq!(called("https://a.example/in?k=1#f", "/webhooks/x?k=1&b=2"), "https://a.example/in?k=1&b=2");
        assert_eq!(called("https://a.example", "/x?"), "https://a.example?");
    }

    #[test]
    fn paths_and_bad_addresses() {
        let path = |url: &str| Settings { url: Some(url.to_owned()), ..Settings::default() }.path().map(str::to_owned);
        assert_eq!(path("https://a.example/in/x?y"), Some("/in/x".to_owned()));
        assert_eq!(path("https://a.example"), Some("/".to_owned()));
        for bad in ["", "a.example/in", "ftp://a", "https://", "https:///x", "https://a/ü", "https://a/ b"] {
            assert!(url_problem(bad).is_some(), "{bad:?}");
        }
        assert_eq!(url_problem("http://127.0.0.1:8080/webhooks/x"), None);
    }
}
