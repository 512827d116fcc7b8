//! Keys that providers keep at an address: fetched over TLS, held for an hour, never from a private address.
//!
//! Promises: only addresses that the scheme has allowed are asked (fixed, or held to the provider's hosts by
//! `oncehook-verify`); https, no redirect, no proxy, no private or local address, written out or behind a name; every call
//! has a deadline and every answer a limit; at most a few calls at once. Forged requests cannot make the gateway hammer
//! anybody: an address that failed is left alone for a while, one answer with a set of keys serves every id that is asked
//! for shortly afterwards, and a source has so many calls in vain and no more. Nor can they push a good key out of memory.
//!
//! Does not: decide whether a request is genuine. A key that cannot be had is "try again later", never "accept".

use std::collections::{BTreeMap, HashMap};
use std::net::{Ipv4Addr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use oncehook::outbound::Reach;
use oncehook_verify::{FetchedKey, KeyRequest, Verifier};
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use tokio::sync::Semaphore;

/// How long one call may take. Providers wait for three seconds and more.
const DEADLINE: Duration = Duration::from_millis(2_500);

/// How long a key is used before it is fetched again.
const KEPT: Duration = Duration::from_secs(3_600);

/// How long an address that gave no key is left alone.
const SHUNNED: Duration = Duration::from_secs(15);

/// How many calls in vain a source has within that time. Names of keys can be invented by anybody.
const VAIN_CALLS: u32 = 16;

/// Calls at once.
const CALLS: usize = 4;

/// Keys held; a provider has a handful.
const MAX_KEYS: usize = 256;

/// The largest answer: a set of keys, or a chain of certificates.
const MAX_ANSWER_BYTES: usize = 256 << 10;

/// Something that is about to be known.
pub(super) type Fetching<'a, T> = Pin<Box<dyn Future<Output = Result<T, FetchFailed>> + Send + 'a>>;

/// Who gets keys from providers. The gateway has one that calls them; tests have others.
pub(super) trait KeyFetcher: Send + Sync {
    /// The provider's answer, byte for byte. `params` are the source's, for providers that want credentials.
    ///
    /// Dropped half-way, nothing has happened but a call.
    fn fetch<'a>(
        &'a self,
        request: &'a KeyRequest,
        params: &'a BTreeMap<String, String>,
    ) -> Fetching<'a, Vec<u8>>;

    /// Calls an address that confirms a subscription; an error unless the answer is a 2xx.
    fn confirm<'a>(&'a self, url: &'a str) -> Fetching<'a, ()>;
}

/// A call that led to nothing. The reason is for the log.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(super) struct FetchFailed(String);

/// Why there is no key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NoKey {
    /// The provider did not answer: the sender must try again.
    Unavailable,
    /// The provider answered, and there is no usable key: the request is refused.
    Unusable,
}

/// Keys at hand, and how to get more.
pub(super) struct KeyRing {
    fetcher: Arc<dyn KeyFetcher>,
    memory: Mutex<Memory>,
    calls: Semaphore,
}

/// What earlier calls have brought. Sources are the operator's and few; keys are named by requests and bounded.
#[derive(Default)]
struct Memory {
    keys: HashMap<(String, KeyRequest), Held>,
    /// The latest answer of each source whose keys come as a set.
    sets: HashMap<String, LatestSet>,
    /// Calls in vain of each source, and until when they count.
    vain: HashMap<String, (u32, Instant)>,
}

struct Held {
    key: Result<Arc<FetchedKey>, NoKey>,
    until: Instant,
}

struct LatestSet {
    answer: Arc<Vec<u8>>,
    until: Instant,
}

impl KeyRing {
    pub(super) fn new(fetcher: Arc<dyn KeyFetcher>) -> Self {
        Self { fetcher, memory: Mutex::default(), calls: Semaphore::new(CALLS) }
    }

    /// The key, from memory or from its provider.
    pub(super) async fn key(
        &self,
        source: &str,
        verifier: &Verifier,
        request: KeyRequest,
        params: &BTreeMap<String, String>,
    ) -> Result<Arc<FetchedKey>, NoKey> {
        let at = (source.to_owned(), request);
        if let Some(known) = self.recall(&at, verifier) {
            return known;
        }
        // Whoever waits here for a place may find that somebody else has fetched it meanwhile.
        let place = tokio::time::timeout(DEADLINE, self.calls.acquire()).await;
        let Ok(Ok(_place)) = place else { return Err(NoKey::Unavailable) };
        if let Some(known) = self.recall(&at, verifier) {
            return known;
        }
        let answer = match tokio::time::timeout(DEADLINE, self.fetcher.fetch(&at.1, params)).await {
            Ok(answer) => answer,
            Err(_) => Err(FetchFailed("no answer in time".to_owned())),
        };
        let key = match answer {
            Ok(answer) => {
                let key = verifier.read_key(&at.1, &answer).map(Arc::new).map_err(|error| {
                    tracing::warn!(source, url = at.1.url(), %error, "a provider's key cannot be used");
                    NoKey::Unusable
                });
                self.memory().keep_set(&at, answer, Instant::now());
                key
            }
            Err(error) => {
                tracing::warn!(source, url = at.1.url(), %error, "a provider's key could not be fetched");
                Err(NoKey::Unavailable)
            }
        };
        self.memory().hold(at, key.clone(), Instant::now());
        key
    }

    pub(super) async fn confirm(&self, url: &str) -> Result<(), FetchFailed> {
        match tokio::time::timeout(DEADLINE, self.fetcher.confirm(url)).await {
            Ok(confirmed) => confirmed,
            Err(_) => Err(FetchFailed("no answer in time".to_owned())),
        }
    }

    /// What can be said without a call; nothing if one is due.
    fn recall(
        &self,
        at: &(String, KeyRequest),
        verifier: &Verifier,
    ) -> Option<Result<Arc<FetchedKey>, NoKey>> {
        let now = Instant::now();
        let set = {
            let memory = self.memory();
            if let Some(held) = memory.keys.get(at).filter(|held| now < held.until) {
                return Some(held.key.clone());
            }
            match memory.latest_set(at, now) {
                Some(set) => set,
                None => return memory.is_exhausted(&at.0, now).then_some(Err(NoKey::Unavailable)),
            }
        };
        // An id that the set lacks is not held: it costs nothing to look again, and anybody can invent ids.
        let Ok(key) = verifier.read_key(&at.1, &set) else { return Some(Err(NoKey::Unusable)) };
        let key = Ok(Arc::new(key));
        self.memory().hold(at.clone(), key.clone(), now);
        Some(key)
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Memory {
    /// Keeps an outcome. Room is made by forgetting what is over, then failures, and good keys only if nothing else is left:
    /// requests can name any number of keys, but only providers have good ones.
    fn hold(&mut self, at: (String, KeyRequest), key: Result<Arc<FetchedKey>, NoKey>, now: Instant) {
        if self.keys.len() >= MAX_KEYS {
            self.keys.retain(|_, held| now < held.until);
        }
        if self.keys.len() >= MAX_KEYS {
            self.keys.retain(|_, held| held.key.is_ok());
        }
        if self.keys.len() >= MAX_KEYS {
            self.keys.clear();
        }
        let until = now + if key.is_ok() { KEPT } else { SHUNNED };
        if key.is_err() {
            self.count_vain(&at.0, now);
        }
        self.keys.insert(at, Held { key, until });
    }

    fn keep_set(&mut self, at: &(String, KeyRequest), answer: Vec<u8>, now: Instant) {
        if let (source, KeyRequest::KeySet { .. }) = at {
            let set = LatestSet { answer: Arc::new(answer), until: now + SHUNNED };
            self.sets.insert(source.clone(), set);
        }
    }

    fn latest_set(&self, at: &(String, KeyRequest), now: Instant) -> Option<Arc<Vec<u8>>> {
        let (source, KeyRequest::KeySet { .. }) = at else { return None };
        self.sets.get(source).filter(|set| now < set.until).map(|set| Arc::clone(&set.answer))
    }

    fn count_vain(&mut self, source: &str, now: Instant) {
        let (count, until) = self.vain.entry(source.to_owned()).or_insert((0, now + SHUNNED));
        if *until <= now {
            (*count, *until) = (0, now + SHUNNED);
        }
        *count = count.saturating_add(1);
    }

    /// Has this source called in vain so often that it must rest? The sender is asked to try again later.
    fn is_exhausted(&self, source: &str, now: Instant) -> bool {
        self.vain.get(source).is_some_and(|(count, until)| *count >= VAIN_CALLS && now < *until)
    }
}

/// Calls providers over the network. The client is made on first use: most gateways never need it.
#[derive(Default)]
pub(super) struct WebFetcher {
    client: OnceLock<Option<reqwest::Client>>,
}

impl WebFetcher {
    fn client(&self) -> Result<&reqwest::Client, FetchFailed> {
        let client = self.client.get_or_init(|| builder().dns_resolver(PublicOnly).build().ok());
        client.as_ref().ok_or_else(|| FetchFailed("there is no TLS client".to_owned()))
    }
}

/// A client as keys are fetched with: https, no redirect, no proxy, a deadline.
fn builder() -> reqwest::ClientBuilder {
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
    fn fetch<'a>(
        &'a self,
        request: &'a KeyRequest,
        params: &'a BTreeMap<String, String>,
    ) -> Fetching<'a, Vec<u8>> {
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
            if response.status() != reqwest::StatusCode::OK {
                return Err(FetchFailed(format!("the answer was {}", response.status())));
            }
            let mut answer = Vec::new();
            while let Some(chunk) = response.chunk().await.map_err(|error| failed(&error))? {
                if answer.len() + chunk.len() > MAX_ANSWER_BYTES {
                    return Err(FetchFailed("the answer is too large".to_owned()));
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
                false => Err(FetchFailed(format!("the answer was {}", response.status()))),
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
    FetchFailed(if error.is_timeout() { "no answer in time".to_owned() } else { cause.to_string() })
}

/// An address that is written out is never looked up, so the resolver cannot judge it. Providers have names.
fn refuse_written_address(url: &str) -> Result<(), FetchFailed> {
    let host = reqwest::Url::parse(url).ok().and_then(|url| url.host_str().map(str::to_owned));
    match host {
        Some(host) if host.parse::<Ipv4Addr>().is_err() && !host.starts_with('[') => Ok(()),
        _ => Err(FetchFailed("keys are fetched from hosts with a name only".to_owned())),
    }
}

/// Resolves names to public addresses only.
struct PublicOnly;

impl Resolve for PublicOnly {
    fn resolve(&self, name: Name) -> Resolving {
        Box::pin(async move {
            let found = tokio::net::lookup_host((name.as_str(), 0)).await?;
            let public: Vec<SocketAddr> =
                found.filter(|address| Reach::of(address.ip()) == Reach::Public).collect();
            if public.is_empty() {
                return Err("the name has no public address".into());
            }
            Ok(Box::new(public.into_iter()) as Addrs)
        })
    }
}

#[cfg(test)]
mod tests;
