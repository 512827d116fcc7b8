//! The client that calls providers: https, no redirect, no proxy, public addresses only, a deadline and a limit.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::OnceLock;

use oncehook::outbound::Reach;
use oncehook_verify::KeyRequest;
use reqwest::StatusCode;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};

use super::{DEADLINE, FetchFailed, Fetching, KeyFetcher};

/// The largest answer: a set of keys, or a chain of certificates.
pub(super) const MAX_ANSWER_BYTES: usize = 256 << 10;

/// Calls providers over the network. The client is made on first use: most gateways never need it.
#[derive(Default)]
pub(in crate::http) struct WebFetcher {
    pub(super) client: OnceLock<Option<reqwest::Client>>,
}

impl WebFetcher {
    fn client(&self) -> Result<&reqwest::Client, FetchFailed> {
        let client = self.client.get_or_init(|| builder().dns_resolver(PublicOnly).build().ok());
        client.as_ref().ok_or_else(|| FetchFailed::new("there is no TLS client"))
    }
}

/// A client as keys are fetched with: https, no redirect, no proxy, a deadline.
pub(super) fn builder() -> reqwest::ClientBuilder {
    // Whoever was first has installed the same one.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    reqwest::Client::builder()
        .user_agent(concat!("oncehook/", env!("CARGO_PKG_VERSION")))
        .https_only(true)
        .redirect(reqwest::redirect::Policy::none())
        .no_proxy()
        .timeout(DEADLINE)
}

impl KeyFetcher for WebFetcher {
    fn fetch<'a>(&'a self, request: &'a KeyRequest, params: &'a BTreeMap<String, String>) -> Fetching<'a, Vec<u8>> {
        Box::pin(async move {
            let client = self.client()?;
            refuse_written_address(request.url())?;
            let call = match request {
                KeyRequest::Certificate { url } | KeyRequest::KeySet { url, .. } => client.get(url),
                KeyRequest::KeyById { url, id } => client.post(url).json(&serde_json::json!({
                    "client_id": params.get("client_id"),
                    "secret": params.get("api_secret"),
                    "key_id": id,
                })),
            };
            let mut response = call.send().await.map_err(|error| failed(&error))?;
            if response.status() != StatusCode::OK {
                return Err(refused(response.status()));
            }
            let mut answer = Vec::new();
            while let Some(chunk) = response.chunk().await.map_err(|error| failed(&error))? {
                if answer.len() + chunk.len() > MAX_ANSWER_BYTES {
                    return Err(FetchFailed::new("the answer is too large"));
                }
                answer.extend_from_slice(&chunk);
            }
            Ok(answer)
        })
    }

    fn confirm<'a>(&'a self, url: &'a str) -> Fetching<'a, ()> {
        Box::pin(async move {
            refuse_written_address(url)?;
            let response = self.client()?.get(url).send().await.map_err(|error| failed(&error))?;
            match response.status().is_success() {
                true => Ok(()),
                false => Err(refused(response.status())),
            }
        })
    }
}

/// The innermost reason without the address, which may hold a token.
fn failed(error: &reqwest::Error) -> FetchFailed {
    let mut cause: &dyn std::error::Error = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    FetchFailed::new(if error.is_timeout() { "no answer in time".to_owned() } else { cause.to_string() })
}

/// The provider answered, and gave nothing. Where it says that there is nothing (any more), it is believed.
fn refused(status: StatusCode) -> FetchFailed {
    let gone = matches!(status, StatusCode::NOT_FOUND | StatusCode::GONE);
    FetchFailed { gone, ..FetchFailed::new(format!("the answer was {status}")) }
}

/// An address that is written out is never looked up, so the resolver cannot judge it. Providers have names.
fn refuse_written_address(url: &str) -> Result<(), FetchFailed> {
    let host = reqwest::Url::parse(url).ok().and_then(|url| url.host_str().map(str::to_owned));
    match host {
        Some(host) if host.parse::<Ipv4Addr>().is_err() && !host.starts_with('[') => Ok(()),
        _ => Err(FetchFailed::new("keys are fetched from hosts with a name only")),
    }
}

/// Resolves names to public addresses only.
struct PublicOnly;

impl Resolve for PublicOnly {
    fn resolve(&self, name: Name) -> Resolving {
        Box::pin(async move {
            let found = tokio::net::lookup_host((name.as_str(), 0)).await?;
            let public: Vec<SocketAddr> = found.filter(|address| Reach::of(address.ip()) == Reach::Public).collect();
            if public.is_empty() {
                return Err("the name has no public address".into());
            }
            Ok(Box::new(public.into_iter()) as Addrs)
        })
    }
}
