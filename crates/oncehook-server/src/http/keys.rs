//! Keys that providers keep at an address: fetched over TLS, held for an hour, never from a private address.
//!
//! Promises: only addresses that the scheme has allowed are asked (fixed, or held to the provider's hosts by
//! `oncehook-verify`); https, no redirect, no proxy, no private or local address even if a name resolves to one; every call
//! has a deadline and every answer a limit; at most a few calls at once, and an address that failed is not asked again for
//! a while, so that forged requests cannot make the gateway hammer anybody.
//!
//! Does not: decide whether a request is genuine. A key that cannot be had is "try again later", never "accept".

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use oncehook_verify::{FetchedKey, KeyRequest, Verifier};
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use tokio::sync::Semaphore;

/// How long one call may take. Providers wait for three seconds and more.
const DEADLINE: Duration = Duration::from_millis(2_500);

/// How long a key is used before it is fetched again.
const KEPT: Duration = Duration::from_secs(3_600);

/// How long an address that gave no key is left alone.
const SHUNNED: Duration = Duration::from_secs(15);

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
    held: Mutex<HashMap<(String, KeyRequest), Held>>,
    calls: Semaphore,
}

#[derive(Clone)]
struct Held {
    key: Result<Arc<FetchedKey>, NoKey>,
    until: Instant,
}

impl KeyRing {
    pub(super) fn new(fetcher: Arc<dyn KeyFetcher>) -> Self {
        Self { fetcher, held: Mutex::new(HashMap::new()), calls: Semaphore::new(CALLS) }
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
        if let Some(held) = self.find(&at) {
            return held;
        }
        // Whoever waits here for a place may find that somebody else has fetched it meanwhile.
        let place = tokio::time::timeout(DEADLINE, self.calls.acquire()).await;
        let Ok(Ok(_place)) = place else { return Err(NoKey::Unavailable) };
        if let Some(held) = self.find(&at) {
            return held;
        }
        let answer = match tokio::time::timeout(DEADLINE, self.fetcher.fetch(&at.1, params)).await {
            Ok(answer) => answer,
            Err(_) => Err(FetchFailed("no answer in time".to_owned())),
        };
        let key = match answer {
            Ok(answer) => verifier.read_key(&at.1, &answer).map(Arc::new).map_err(|error| {
                tracing::warn!(source, url = at.1.url(), %error, "a provider's key cannot be used");
                NoKey::Unusable
            }),
            Err(error) => {
                tracing::warn!(source, url = at.1.url(), %error, "a provider's key could not be fetched");
                Err(NoKey::Unavailable)
            }
        };
        self.hold(at, key.clone());
        key
    }

    pub(super) async fn confirm(&self, url: &str) -> Result<(), FetchFailed> {
        match tokio::time::timeout(DEADLINE, self.fetcher.confirm(url)).await {
            Ok(confirmed) => confirmed,
            Err(_) => Err(FetchFailed("no answer in time".to_owned())),
        }
    }

    fn find(&self, at: &(String, KeyRequest)) -> Option<Result<Arc<FetchedKey>, NoKey>> {
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        held.get(at).filter(|held| Instant::now() < held.until).map(|held| held.key.clone())
    }

    fn hold(&self, at: (String, KeyRequest), key: Result<Arc<FetchedKey>, NoKey>) {
        let now = Instant::now();
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if held.len() >= MAX_KEYS {
            held.retain(|_, held| now < held.until);
        }
        if held.len() >= MAX_KEYS {
            held.clear();
        }
        let until = now + if key.is_ok() { KEPT } else { SHUNNED };
        held.insert(at, Held { key, until });
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

/// Resolves names to public addresses only.
struct PublicOnly;

impl Resolve for PublicOnly {
    fn resolve(&self, name: Name) -> Resolving {
        Box::pin(async move {
            let found = tokio::net::lookup_host((name.as_str(), 0)).await?;
            let public: Vec<SocketAddr> = found.filter(|address| is_public(address.ip())).collect();
            if public.is_empty() {
                return Err("the name has no public address".into());
            }
            Ok(Box::new(public.into_iter()) as Addrs)
        })
    }
}

/// Is this an address of the open internet? Not one of this machine, of a private network, or of a cloud's metadata.
fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => {
            let [a, b, c, _] = v4.octets();
            !(v4.is_private()
                || v4.is_loopback()
                || v4.is_link_local()
                || v4.is_unspecified()
                || v4.is_multicast()
                || v4.is_broadcast()
                || v4.is_documentation()
                || a == 0
                || a >= 240
                || (a == 100 && (64..128).contains(&b))
                || (a == 192 && b == 0 && c == 0)
                || (a == 198 && (18..20).contains(&b)))
        }
        IpAddr::V6(v6) => match embedded(v6) {
            Some(v4) => is_public(IpAddr::V4(v4)),
            None => {
                let [first, second, ..] = v6.segments();
                // Global unicast, without documentation and transition ranges.
                first & 0xe000 == 0x2000
                    && !(first == 0x2001 && (second < 0x0200 || second == 0x0db8))
                    && first != 0x3fff
            }
        },
    }
}

/// The IPv4 address that an IPv6 address stands for, if it does.
fn embedded(v6: Ipv6Addr) -> Option<std::net::Ipv4Addr> {
    let [a, b, c, d, e, f, high, low] = v6.segments();
    let v4 = |high: u16, low: u16| {
        let ([a, b], [c, d]) = (high.to_be_bytes(), low.to_be_bytes());
        std::net::Ipv4Addr::new(a, b, c, d)
    };
    match (a, b, c, d, e, f) {
        (0, 0, 0, 0, 0, 0xffff) | (0x64, 0xff9b, 0, 0, 0, 0) => Some(v4(high, low)),
        (0x2002, ..) => Some(v4(b, c)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use http::HeaderMap;
    use oncehook_verify::{Preset, Rejection, Request, Secret, Settings, Signer, UnixMicros};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    const NOW: UnixMicros = UnixMicros(1_700_000_001_000_000);
    const HOST: &str = "sns.us-east-1.amazonaws.com";

    #[test]
    fn r43_only_public_addresses_are_called() {
        for public in ["8.8.8.8", "52.94.76.1", "2600:1f18::1", "2001:4860:4860::8888", "64:ff9b::808:808"] {
            assert!(is_public(public.parse().unwrap()), "{public}");
        }
        for private in [
            "127.0.0.1",
            "10.0.0.1",
            "172.16.0.1",
            "192.168.1.1",
            "169.254.169.254",
            "100.64.0.1",
            "0.0.0.0",
            "192.0.0.8",
            "198.18.0.1",
            "224.0.0.1",
            "255.255.255.255",
            "192.0.2.1",
            "240.0.0.1",
            "::1",
            "::",
            "fe80::1",
            "fc00::1",
            "fd00:ec2::254",
            "::ffff:127.0.0.1",
            "::ffff:169.254.169.254",
            "64:ff9b::a00:1",
            "2002:7f00:1::",
            "2001:db8::1",
            "ff02::1",
            "2001::1",
        ] {
            assert!(!is_public(private.parse().unwrap()), "{private}");
        }
    }

    #[tokio::test]
    async fn r43_a_name_that_resolves_to_this_machine_is_not_called() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("https://localhost:{}/key.pem", listener.local_addr().unwrap().port());
        let error = WebFetcher::default()
            .fetch(&KeyRequest::Certificate { url }, &BTreeMap::new())
            .await
            .unwrap_err();
        assert!(error.0.contains("no public address"), "{error}");
    }

    /// Amazon's host on this machine: a TLS server with a certificate made here, and a key pair that signs messages.
    struct Amazon {
        fetcher: WebFetcher,
        calls: Arc<AtomicUsize>,
        private: String,
    }

    /// What the server answers: status line and further headers, then the body.
    async fn amazon(head: &'static str, body: Option<Vec<u8>>, name: &str) -> Amazon {
        let rsa = aws_lc_rs::rsa::KeyPair::generate(aws_lc_rs::rsa::KeySize::Rsa2048).unwrap();
        let pkcs8 = aws_lc_rs::encoding::AsDer::<aws_lc_rs::encoding::Pkcs8V1Der<'_>>::as_der(&rsa).unwrap();
        let signing = rcgen::KeyPair::try_from(pkcs8.as_ref()).unwrap();
        let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
        (params.not_before, params.not_after) =
            (rcgen::date_time_ymd(2020, 1, 1), rcgen::date_time_ymd(2060, 1, 1));
        let message_certificate = params.self_signed(&signing).unwrap().pem().into_bytes();

        let tls = rcgen::generate_simple_self_signed(vec![name.to_owned()]).unwrap();
        let root = reqwest::Certificate::from_pem(tls.cert.pem().as_bytes()).unwrap();
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let key = rustls::pki_types::PrivateKeyDer::try_from(tls.signing_key.serialize_der()).unwrap();
        let config = rustls::ServerConfig::builder()
            .with_no_client_auth()
            .with_single_cert(vec![tls.cert.der().clone()], key)
            .unwrap();
        let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (calls, body) = (Arc::new(AtomicUsize::new(0)), body.unwrap_or(message_certificate));
        let counted = Arc::clone(&calls);
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                counted.fetch_add(1, Ordering::SeqCst);
                let Ok(mut stream) = acceptor.accept(stream).await else { continue };
                let mut request = [0; 4_096];
                let _ = stream.read(&mut request).await;
                let head =
                    format!("HTTP/1.1 {head}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", body.len());
                let _ = stream.write_all(head.as_bytes()).await;
                let _ = stream.write_all(&body).await;
                let _ = stream.shutdown().await;
            }
        });
        let client = builder().resolve(HOST, address).tls_certs_only([root]).build().unwrap();
        Amazon {
            fetcher: WebFetcher { client: OnceLock::from(Some(client)) },
            calls,
            private: signing.serialize_pem(),
        }
    }

    fn settings() -> Settings {
        let topic = ("topic_arn".to_owned(), "arn:aws:sns:us-east-1:123456789012:MyTopic".to_owned());
        Settings { params: [topic].into(), ..Settings::default() }
    }

    /// A message signed with the private key, and whether it is genuine with what the ring holds.
    async fn check(ring: &KeyRing, private: &str) -> Result<Result<(), Rejection>, NoKey> {
        let preset = Preset::named("aws-sns").unwrap();
        let verifier = Verifier::with(&preset.verify, &[], settings()).unwrap();
        let signer = Signer::with(&preset.verify, &Secret::new(private).unwrap(), settings()).unwrap();
        let (headers, body): (HeaderMap, Vec<u8>) = preset.sample.render("m1", None, NOW).unwrap();
        let request = Request { method: "POST", path: "/", headers: &headers, body: &body };
        let body = signer.sign_whole(&request, "m1", NOW).unwrap().body.unwrap();
        let request = Request { body: &body, ..request };
        let wanted = verifier.key_request(&request).unwrap().unwrap();
        let key = ring.key("sns", &verifier, wanted, &settings().params).await?;
        Ok(verifier.verify_with(&request, NOW, Some(&key)).map(|_| ()))
    }

    #[tokio::test]
    async fn r2_a_certificate_is_fetched_once_and_checks_the_message() {
        let Amazon { fetcher, calls, private } = amazon("200 OK", None, HOST).await;
        let ring = KeyRing::new(Arc::new(fetcher));
        assert_eq!(check(&ring, &private).await, Ok(Ok(())));
        assert_eq!(check(&ring, &private).await, Ok(Ok(())));
        assert_eq!(calls.load(Ordering::SeqCst), 1, "the second message found the key in memory");
        let other = amazon("200 OK", None, HOST).await.private;
        assert_eq!(
            check(&ring, &other).await,
            Ok(Err(Rejection::SignatureMismatch)),
            "signed by somebody else"
        );
    }

    #[tokio::test]
    async fn r2_what_is_no_key_is_refused_and_the_address_left_alone() {
        let Amazon { fetcher, calls, private } = amazon("200 OK", Some(b"<html>".to_vec()), HOST).await;
        let ring = KeyRing::new(Arc::new(fetcher));
        assert_eq!(check(&ring, &private).await, Err(NoKey::Unusable));
        assert_eq!(check(&ring, &private).await, Err(NoKey::Unusable));
        assert_eq!(calls.load(Ordering::SeqCst), 1);
    }

    #[tokio::test]
    async fn fault_72_errors_redirects_floods_and_strangers_give_no_key() {
        for (head, body, name) in [
            ("404 Not Found", None, HOST),
            ("302 Found\r\nlocation: https://sns.us-east-1.amazonaws.com/other.pem", None, HOST),
            ("200 OK", Some(vec![b'x'; MAX_ANSWER_BYTES + 1]), HOST),
            ("200 OK", None, "evil.example"),
        ] {
            let Amazon { fetcher, private, .. } = amazon(head, body, name).await;
            let ring = KeyRing::new(Arc::new(fetcher));
            assert_eq!(check(&ring, &private).await, Err(NoKey::Unavailable), "{head} {name}");
        }
    }

    /// Somebody who never answers.
    struct Silent;

    impl KeyFetcher for Silent {
        fn fetch<'a>(&'a self, _: &'a KeyRequest, _: &'a BTreeMap<String, String>) -> Fetching<'a, Vec<u8>> {
            Box::pin(std::future::pending())
        }

        fn confirm<'a>(&'a self, _: &'a str) -> Fetching<'a, ()> {
            Box::pin(std::future::pending())
        }
    }

    #[tokio::test]
    async fn every_wait_has_an_end_and_memory_too() {
        let ring = KeyRing::new(Arc::new(Silent));
        assert!(ring.confirm("https://sns.us-east-1.amazonaws.com/").await.is_err());
        for number in 0..MAX_KEYS * 2 {
            ring.hold(
                (number.to_string(), KeyRequest::Certificate { url: String::new() }),
                Err(NoKey::Unavailable),
            );
        }
        assert!(ring.held.lock().unwrap().len() <= MAX_KEYS);
    }
}
