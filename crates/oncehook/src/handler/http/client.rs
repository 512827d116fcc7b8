//! The HTTP client of one route: guarded, without redirects, proxies, cookies or hidden retries.
//!
//! Promises: cryptography is named here and not taken from whatever the process has installed.

use std::sync::Arc;
use std::time::Duration;

use rustls::{ClientConfig, RootCertStore};
use rustls_platform_verifier::BuilderVerifierExt as _;
use url::Url;

use crate::outbound::{Guard, GuardedNames, Names};

/// Connections that are kept for the next request.
const IDLE_CONNECTIONS: usize = 32;

/// How long they are kept: less than the five seconds after which common servers hang up, so that a request is seldom
/// sent into a connection that is just being closed.
const IDLE_TIME: Duration = Duration::from_secs(4);

/// A client for this URL, which the guard has checked.
pub(super) fn guarded(url: &Url, guard: Guard, names: Arc<dyn Names>) -> Result<reqwest::Client, String> {
    reqwest::Client::builder()
        .user_agent(concat!("oncehook/", env!("CARGO_PKG_VERSION")))
        .redirect(reqwest::redirect::Policy::none())
        .retry(reqwest::retry::never())
        .no_proxy()
        .referer(false)
        .http1_only()
        .pool_max_idle_per_host(IDLE_CONNECTIONS)
        .pool_idle_timeout(IDLE_TIME)
        .dns_resolver(Arc::new(GuardedNames::new(guard, names)))
        .tls_backend_preconfigured(tls(url)?)
        .build()
        .map_err(|error| format!("the HTTP client cannot be prepared: {error}"))
}

/// The system's certificates for https. Plain HTTP trusts none, and saves reading them.
fn tls(url: &Url) -> Result<ClientConfig, String> {
    let unusable = |error: rustls::Error| format!("TLS cannot be prepared: {error}");
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let versions =
        ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().map_err(unusable)?;
    let trusting = if url.scheme() == "https" {
        versions.with_platform_verifier().map_err(unusable)?
    } else {
        versions.with_root_certificates(RootCertStore::empty())
    };
    Ok(trusting.with_no_client_auth())
}
