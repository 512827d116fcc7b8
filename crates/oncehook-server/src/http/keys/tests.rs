//! Amazon, PayPal, Google and Plaid on this machine: TLS servers with certificates made here, which hand out keys made here.
//!
//! Names are resolved by the client of the test, so that everything else (host rules, TLS, redirects, deadlines, memory)
//! is the gateway's own. What a name must resolve to is tested apart.

use std::net::SocketAddr;
use std::sync::atomic::AtomicUsize;
use std::sync::{LazyLock, OnceLock};

use aws_lc_rs::encoding::{AsDer as _, Pkcs8V1Der, PublicKeyX509Der};
use aws_lc_rs::signature::KeyPair as _;
use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use http::HeaderMap;
use oncehook_verify::{Preset, Request, Secret, Settings, Signer, UnixMicros};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::server::TlsStream;

use super::budget::{PEER_CALLS, RESERVE_EVERY};
use super::web::{MAX_ANSWER_BYTES, builder};
use super::*;

mod floods;

const NOW: UnixMicros = UnixMicros(1_700_000_001_000_000);

/// Who sends, where it does not matter.
const PEER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));

/// Everybody who keeps keys at an address, and where.
const PROVIDERS: [(&str, &str); 4] = [
    ("aws-sns", "sns.us-east-1.amazonaws.com"),
    ("paypal", "api.paypal.com"),
    ("google-pubsub", "www.googleapis.com"),
    ("plaid", "production.plaid.com"),
];

/// Somebody's server that must not be called.
const CANARY: &str = "canary.example";

/// What a host does when it is asked.
#[derive(Clone)]
enum Manner {
    /// Hands out what is published.
    Honest,
    /// Says this, whatever the question: status line and further headers, then the body.
    Fixed(String, Vec<u8>),
    /// Takes the question and never answers.
    Silent,
    /// Answers a byte at a time and never comes to an end.
    Dripping,
}

/// A key under the name by which requests ask for it.
#[derive(Clone, Copy)]
struct Published {
    name: &'static str,
    pair: usize,
    /// Plaid: when it ended, in seconds.
    expired_at: Option<i64>,
}

const fn published(name: &'static str, pair: usize) -> Published {
    Published { name, pair, expired_at: None }
}

/// One host.
struct Host {
    address: SocketAddr,
    root: reqwest::Certificate,
    /// The questions, head and body, in their order.
    asked: Arc<Mutex<Vec<String>>>,
    /// Connections, also those that came to nothing.
    connections: Arc<AtomicUsize>,
    published: Arc<Mutex<Vec<Published>>>,
    /// It takes connections and closes them.
    away: Arc<AtomicBool>,
}

impl Host {
    /// Starts a host with a TLS certificate made out to `tls_name`.
    async fn start(preset: &'static str, tls_name: &str, manner: Manner) -> Self {
        let tls = rcgen::generate_simple_self_signed(vec![tls_name.to_owned()]).unwrap();
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let key = rustls::pki_types::PrivateKeyDer::try_from(tls.signing_key.serialize_der()).unwrap();
        let config = rustls::ServerConfig::builder()
            .with_no_client_auth()
            .with_single_cert(vec![tls.cert.der().clone()], key)
            .unwrap();
        let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let host = Self {
            address: listener.local_addr().unwrap(),
            root: reqwest::Certificate::from_pem(tls.cert.pem().as_bytes()).unwrap(),
            asked: Arc::default(),
            connections: Arc::default(),
            published: Arc::new(Mutex::new(vec![published("key-1", 0)])),
            away: Arc::default(),
        };
        let (asked, keys) = (Arc::clone(&host.asked), Arc::clone(&host.published));
        let (connections, away) = (Arc::clone(&host.connections), Arc::clone(&host.away));
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                if away.load(Ordering::SeqCst) {
                    continue;
                }
                connections.fetch_add(1, Ordering::SeqCst);
                let (acceptor, manner) = (acceptor.clone(), manner.clone());
                let (asked, keys) = (Arc::clone(&asked), Arc::clone(&keys));
                tokio::spawn(async move {
                    let Ok(mut stream) = acceptor.accept(stream).await else { return };
                    let question = read_question(&mut stream).await;
                    asked.lock().unwrap().push(question.clone());
                    let keys = keys.lock().unwrap().clone();
                    answer(&mut stream, manner, preset, &keys, &question).await;
                });
            }
        });
        host
    }

    fn calls(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }

    fn publish(&self, keys: &[Published]) {
        *self.published.lock().unwrap() = keys.to_vec();
    }
}

async fn read_question(stream: &mut TlsStream<TcpStream>) -> String {
    let mut question = String::new();
    let mut chunk = [0; 4_096];
    loop {
        let read = stream.read(&mut chunk).await.unwrap_or(0);
        question.push_str(std::str::from_utf8(&chunk[..read]).unwrap());
        let Some((head, body)) = question.split_once("\r\n\r\n") else {
            assert!(read > 0, "the question breaks off: {question}");
            continue;
        };
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
        if read == 0 || body.len() >= length.map_or(0, |length| length.parse().unwrap()) {
            return question;
        }
    }
}

async fn answer(stream: &mut TlsStream<TcpStream>, manner: Manner, preset: &str, keys: &[Published], question: &str) {
    let (head, body) = match manner {
        Manner::Honest => match honest(preset, keys, question) {
            Some(body) => ("200 OK".to_owned(), body),
            None => ("404 Not Found".to_owned(), b"{}".to_vec()),
        },
        Manner::Fixed(head, body) => (head, body),
        Manner::Silent => return std::future::pending().await,
        Manner::Dripping => {
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 4000\r\n\r\n").await;
            while stream.write_all(b"-").await.is_ok() && stream.flush().await.is_ok() {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            return;
        }
    };
    let head = format!("HTTP/1.1 {head}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", body.len());
    let _ = stream.write_all(head.as_bytes()).await;
    let _ = stream.write_all(&body).await;
    let _ = stream.shutdown().await;
}

/// What the provider says to a question; nothing where it has no such key, or was asked in the wrong way.
fn honest(preset: &str, keys: &[Published], question: &str) -> Option<Vec<u8>> {
    let named = |name: &str| keys.iter().find(|key| key.name == name);
    let path = question.strip_prefix("GET ").and_then(|rest| rest.split(' ').next());
    let certificate = |name: Option<&str>| named(name?).map(|key| RSA[key.pair].certificate.clone().into_bytes());
    match preset {
        "aws-sns" => {
            certificate(path.and_then(|path| path.strip_prefix("/SimpleNotificationService-")?.strip_suffix(".pem")))
        }
        "paypal" => certificate(path.and_then(|path| path.strip_prefix("/v1/notifications/certs/"))),
        "google-pubsub" => {
            let set: Vec<Value> = keys.iter().map(|key| with(&RSA[key.pair].web_key, "kid", json!(key.name))).collect();
            (path == Some("/oauth2/v3/certs")).then(|| json!({ "keys": set }).to_string().into_bytes())
        }
        _ => {
            let body = question.strip_prefix("POST /webhook_verification_key/get ")?.split_once("\r\n\r\n")?.1;
            let body: Value = serde_json::from_str(body).ok()?;
            let credentials = (body["client_id"].as_str()?, body["secret"].as_str()?);
            let key = named(body["key_id"].as_str()?).filter(|_| credentials == ("64b0c0ffee", "plaid-secret"))?;
            let web_key = with(&P256[key.pair].web_key, "kid", json!(key.name));
            let web_key = with(&web_key, "expired_at", json!(key.expired_at));
            Some(json!({ "key": web_key, "request_id": "1" }).to_string().into_bytes())
        }
    }
}

fn with(object: &Value, name: &str, value: Value) -> Value {
    let mut object = object.clone();
    object[name] = value;
    object
}

/// A private key and the public half as providers hand it out.
struct Pair {
    private: rcgen::KeyPair,
    certificate: String,
    web_key: Value,
}

static RSA: LazyLock<[Pair; 3]> = LazyLock::new(|| [(); 3].map(|()| rsa()));
static P256: LazyLock<[Pair; 3]> = LazyLock::new(|| [(); 3].map(|()| p256()));

fn rsa() -> Pair {
    let pair = aws_lc_rs::rsa::KeyPair::generate(aws_lc_rs::rsa::KeySize::Rsa2048).unwrap();
    let pkcs8 = aws_lc_rs::encoding::AsDer::<Pkcs8V1Der<'_>>::as_der(&pair).unwrap();
    let spki: PublicKeyX509Der<'_> = pair.public_key().as_der().unwrap();
    // 2048 bits behind 33 bytes of headers.
    let modulus = BASE64_URL_SAFE_NO_PAD.encode(&spki.as_ref()[33..289]);
    let web_key = json!({ "kty": "RSA", "use": "sig", "alg": "RS256", "n": modulus, "e": "AQAB" });
    whole(rcgen::KeyPair::try_from(pkcs8.as_ref()).unwrap(), web_key)
}

fn p256() -> Pair {
    let pair = rcgen::KeyPair::generate().unwrap();
    let spki = rcgen::PublicKeyData::subject_public_key_info(&pair);
    let (x, y) = spki[spki.len() - 64..].split_at(32);
    let part = |bytes: &[u8]| BASE64_URL_SAFE_NO_PAD.encode(bytes);
    let web_key = json!({ "kty": "EC", "crv": "P-256", "use": "sig", "alg": "ES256", "x": part(x), "y": part(y) });
    whole(pair, web_key)
}

fn whole(private: rcgen::KeyPair, web_key: Value) -> Pair {
    let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
    params.distinguished_name.push(rcgen::DnType::CommonName, "messageverificationcerts.paypal.com");
    (params.not_before, params.not_after) = (rcgen::date_time_ymd(2020, 1, 1), rcgen::date_time_ymd(2060, 1, 1));
    let certificate = params.self_signed(&private).unwrap().pem();
    Pair { private, certificate, web_key }
}

/// A provider with its host, a canary beside it, and the gateway's ring of keys.
struct Stage {
    preset: &'static Preset,
    settings: Settings,
    host: Host,
    canary: Host,
    fetcher: Arc<WebFetcher>,
    ring: Arc<KeyRing>,
    folder: tempfile::TempDir,
}

/// A ring for a preset. What it remembers lies in the folder.
fn ring(
    preset: &Preset,
    settings: &Settings,
    fetcher: Arc<dyn KeyFetcher>,
    folder: &tempfile::TempDir,
) -> Arc<KeyRing> {
    let source = KeySource {
        name: "source".to_owned(),
        verifier: Arc::new(Verifier::with(&preset.verify, &[], settings.clone()).unwrap()),
        params: settings.params.clone(),
        clock: Clock::manual(NOW),
        max_waiting_bytes: 1 << 20,
    };
    KeyRing::new(source, fetcher, RememberedKeys::open(folder.path().join("keys.json")))
}

/// The key, from memory or from its provider.
async fn key(ring: &Arc<KeyRing>, wanted: &KeyRequest) -> Result<Arc<GoodKey>, NoKey> {
    match ring.at_hand(wanted) {
        Some(known) => known,
        None => ring.fetch(wanted, PEER, 0).await,
    }
}

impl Stage {
    async fn of(preset: &'static str, host: &'static str, manner: Manner) -> Self {
        Self::with_tls_name(preset, host, manner, host).await
    }

    async fn with_tls_name(preset: &'static str, host_name: &'static str, manner: Manner, tls_name: &str) -> Self {
        let host = Host::start(preset, tls_name, manner).await;
        // The canary would give everybody a key: the one that strangers sign with.
        let canary = Host::start(preset, CANARY, Manner::Honest).await;
        canary.publish(&[published("key-1", 2)]);
        let client = builder()
            .resolve(host_name, host.address)
            .resolve(CANARY, canary.address)
            .tls_certs_only([host.root.clone(), canary.root.clone()])
            .build()
            .unwrap();
        let fetcher = Arc::new(WebFetcher { client: OnceLock::from(Some(client)) });
        let preset = Preset::named(preset).unwrap();
        let params = preset.params.iter().map(|param| (param.name.clone(), param.example.clone())).collect();
        let settings = Settings { params, ..Settings::default() };
        let folder = tempfile::tempdir().unwrap();
        let ring = ring(preset, &settings, Arc::clone(&fetcher) as Arc<dyn KeyFetcher>, &folder);
        Self { preset, settings, host, canary, fetcher, ring, folder }
    }

    /// The gateway starts again.
    fn restart(&mut self) {
        let fetcher = Arc::clone(&self.fetcher) as Arc<dyn KeyFetcher>;
        self.ring = ring(self.preset, &self.settings, fetcher, &self.folder);
    }

    fn pair(&self, pair: usize) -> &'static Pair {
        if self.preset.name == "plaid" { &P256[pair] } else { &RSA[pair] }
    }

    /// The address under which the provider would keep a key of this name, where requests say one.
    fn address_of(&self, key: &str) -> String {
        match self.preset.name.as_str() {
            "aws-sns" => format!("https://sns.us-east-1.amazonaws.com/SimpleNotificationService-{key}.pem"),
            _ => format!("https://api.paypal.com/v1/notifications/certs/{key}"),
        }
    }

    /// A request signed with a pair, saying that the key has this name.
    fn sent(&self, pair: usize, key: &str) -> (HeaderMap, Vec<u8>) {
        self.sent_from(pair, key, &self.address_of(key))
    }

    fn sent_from(&self, pair: usize, key: &str, address: &str) -> (HeaderMap, Vec<u8>) {
        let mut settings = self.settings.clone();
        settings.params.insert("kid".to_owned(), key.to_owned());
        let private = Secret::new(self.pair(pair).private.serialize_pem()).unwrap();
        let signer = Signer::with(&self.preset.verify, &private, settings).unwrap();
        let (mut headers, mut body) = self.preset.sample.render("m1", None, NOW).unwrap();
        match self.preset.name.as_str() {
            "paypal" => drop(headers.insert("paypal-cert-url", address.parse().unwrap())),
            "aws-sns" => {
                let message: Value = serde_json::from_slice(&body).unwrap();
                body = with(&message, "SigningCertURL", json!(address)).to_string().into_bytes();
            }
            _ => {}
        }
        let request = Request { method: "POST", path: "/", headers: &headers, body: &body };
        let signed = signer.sign_whole(&request, "m1", NOW).unwrap();
        for (name, value) in signed.headers {
            headers.insert(name, value);
        }
        (headers, signed.body.unwrap_or(body))
    }

    /// What the gateway makes of a request: `ok`, a rejection, or why there is no key.
    async fn verdict(&self, (headers, body): &(HeaderMap, Vec<u8>)) -> &'static str {
        let verifier = Verifier::with(&self.preset.verify, &[], self.settings.clone()).unwrap();
        let request = Request { method: "POST", path: "/", headers, body };
        let wanted = match verifier.key_request(&request) {
            Ok(wanted) => wanted.unwrap(),
            Err(rejection) => return rejection.code(),
        };
        match key(&self.ring, &wanted).await {
            Err(NoKey::Unavailable) => "unavailable",
            Err(NoKey::Unusable) => "unusable",
            Ok(key) => match verifier.verify_with(&request, NOW, Some(&key.key)) {
                Ok(_) => {
                    self.ring.prove(&key);
                    "ok"
                }
                Err(rejection) => rejection.code(),
            },
        }
    }

    async fn check(&self, pair: usize, key: &str) -> &'static str {
        self.verdict(&self.sent(pair, key)).await
    }

    /// A key that nobody has.
    fn invented(&self, number: usize) -> KeyRequest {
        let id = format!("invented-{number}");
        match self.preset.name.as_str() {
            "google-pubsub" => KeyRequest::KeySet { url: "https://www.googleapis.com/oauth2/v3/certs".to_owned(), id },
            "plaid" => {
                KeyRequest::KeyById { url: "https://production.plaid.com/webhook_verification_key/get".to_owned(), id }
            }
            _ => KeyRequest::Certificate { url: self.address_of(&id) },
        }
    }

    /// Lets so much time go by that good keys must be fetched again.
    fn be_due(&self) {
        let (mut memory, now) = (self.ring.memory(), Instant::now());
        memory.good.values_mut().for_each(|held| held.refresh_at = now);
        memory.set = None;
    }

    fn is_due(&self) -> bool {
        let soon = Instant::now() + RETRY;
        self.ring.memory().good.values().any(|held| held.refresh_at <= soon)
    }

    /// From now on nobody answers at the provider's address.
    fn lose_provider(&mut self) {
        self.host.away.store(true, Ordering::SeqCst);
    }

    /// Lets so much time go by that everything in memory is over.
    fn age(&self) {
        let (mut memory, now) = (self.ring.memory(), Instant::now());
        memory.good.values_mut().for_each(|held| held.until = now);
        memory.failed.clear();
        memory.set = None;
        memory.budget = Budget::new(now);
    }
}

#[tokio::test]
async fn r2_a_key_is_fetched_once_and_checks_the_request() {
    for (name, host) in PROVIDERS {
        let stage = Stage::of(name, host, Manner::Honest).await;
        assert_eq!(stage.check(0, "key-1").await, "ok", "{name}");
        assert_eq!(stage.check(0, "key-1").await, "ok", "{name}");
        assert_eq!(stage.check(2, "key-1").await, "signature_mismatch", "{name}: signed by somebody else");
        assert_eq!(stage.host.calls(), 1, "{name}: the later requests found the key in memory");
        stage.age();
        assert_eq!(stage.check(0, "key-1").await, "ok", "{name}");
        assert_eq!(stage.host.calls(), 2, "{name}: an hour later it is fetched again");
        let asked = stage.host.asked.lock().unwrap().clone();
        assert!(asked.iter().all(|question| question.contains(&format!("host: {host}"))), "{asked:?}");
    }
}

#[tokio::test]
async fn r2_while_a_provider_rotates_both_its_keys_are_accepted() {
    for (name, host) in PROVIDERS {
        let stage = Stage::of(name, host, Manner::Honest).await;
        assert_eq!(stage.check(0, "key-1").await, "ok", "{name}");
        assert_ne!(stage.check(1, "key-2").await, "ok", "{name}: not published yet");

        stage.host.publish(&[published("key-1", 0), published("key-2", 1)]);
        stage.age();
        for _ in 0..2 {
            assert_eq!(stage.check(1, "key-2").await, "ok", "{name}: the new key");
            assert_eq!(stage.check(0, "key-1").await, "ok", "{name}: the old key");
        }
        assert_eq!(stage.check(0, "key-2").await, "signature_mismatch", "{name}: each under its own name");
        assert_eq!(stage.check(1, "key-1").await, "signature_mismatch", "{name}: each under its own name");

        stage.host.publish(&[published("key-2", 1)]);
        stage.age();
        assert_eq!(stage.check(1, "key-2").await, "ok", "{name}: the new key");
        let gone = stage.check(0, "key-1").await;
        assert!(["unusable", "unavailable"].contains(&gone), "{name}: the old key has left, but {gone}");
    }
}

/// Plaid keeps an old key at its address and says when it ended.
#[tokio::test]
async fn r2_a_key_that_says_it_has_ended_is_not_used() {
    let stage = Stage::of("plaid", "production.plaid.com", Manner::Honest).await;
    let now = NOW.0 / 1_000_000;
    for (expired_at, verdict) in [(now + 60, "ok"), (now - 60, "key_unknown")] {
        stage.host.publish(&[Published { expired_at: Some(expired_at), ..published("key-1", 0) }]);
        stage.age();
        assert_eq!(stage.check(0, "key-1").await, verdict);
    }
}

#[tokio::test]
async fn r2_credentials_go_where_they_belong_and_nowhere_else() {
    for (name, host) in PROVIDERS {
        let stage = Stage::of(name, host, Manner::Honest).await;
        assert_eq!(stage.check(0, "key-1").await, "ok", "{name}");
        let asked = stage.host.asked.lock().unwrap().join("\n");
        assert_eq!(asked.contains("plaid-secret"), name == "plaid", "{asked}");
    }
    let mut stage = Stage::of("plaid", "production.plaid.com", Manner::Honest).await;
    stage.settings.params.insert("api_secret".to_owned(), "wrong".to_owned());
    stage.restart();
    assert_eq!(stage.check(0, "key-1").await, "unavailable", "Plaid refuses to tell");
}

#[tokio::test]
async fn r2_what_is_no_key_is_refused_and_the_address_left_alone() {
    for (name, host) in PROVIDERS {
        let manner = Manner::Fixed("200 OK".to_owned(), b"<html>".to_vec());
        let stage = Stage::of(name, host, manner).await;
        assert_eq!(stage.check(0, "key-1").await, "unusable", "{name}");
        assert_eq!(stage.check(0, "key-1").await, "unusable", "{name}");
        assert_eq!(stage.host.calls(), 1, "{name}");
    }
}

#[tokio::test]
async fn fault_72_errors_redirects_floods_and_strangers_give_no_key() {
    for (name, host) in PROVIDERS {
        let redirect = |status: &str, place: &str| format!("{status}\r\nlocation: https://{place}/key-1");
        for (head, length, tls_name) in [
            ("404 Not Found".to_owned(), 10, host),
            ("500 Internal Server Error".to_owned(), 10, host),
            (redirect("302 Found", CANARY), 0, host),
            (redirect("307 Temporary Redirect", CANARY), 0, host),
            (redirect("301 Moved Permanently", host), 0, host),
            ("200 OK".to_owned(), MAX_ANSWER_BYTES + 1, host),
            ("200 OK".to_owned(), 10, "evil.example"),
        ] {
            let manner = Manner::Fixed(head.clone(), vec![b'x'; length]);
            let stage = Stage::with_tls_name(name, host, manner, tls_name).await;
            assert_eq!(stage.check(0, "key-1").await, "unavailable", "{name}: {head} {tls_name}");
            assert_eq!(stage.host.calls(), 1, "{name}: {head} {tls_name}");
            assert_eq!(stage.canary.calls(), 0, "{name}: {head} {tls_name}");
        }
    }
}

#[tokio::test]
async fn fault_72_a_request_that_names_another_address_is_refused_without_a_call() {
    for (name, host) in &PROVIDERS[..2] {
        let stage = Stage::of(name, host, Manner::Honest).await;
        let good = stage.address_of("key-1");
        let path = good.strip_prefix("https://").unwrap().strip_prefix(host).unwrap();
        for bad in [
            format!("https://{CANARY}{path}"),
            format!("https://{host}@{CANARY}{path}"),
            format!("https://user:password@{host}{path}"),
            format!("https://{host}.{CANARY}{path}"),
            format!("https://{CANARY}/{host}{path}"),
            format!("https://{CANARY}\\@{host}{path}"),
            format!("https://{host}:{}{path}", stage.canary.address.port()),
            format!("https://{}{path}", stage.canary.address),
            format!("http://{host}{path}"),
            format!("//{CANARY}{path}"),
            format!("{good}?to={CANARY}"),
            format!("{good}#{CANARY}"),
        ] {
            let sent = stage.sent_from(2, "key-1", &bad);
            assert_eq!(stage.verdict(&sent).await, "key_url_refused", "{name}: {bad}");
        }
        assert_eq!((stage.host.calls(), stage.canary.calls()), (0, 0), "{name}");
        assert_eq!(stage.check(0, "key-1").await, "ok", "{name}: the rightful address works");
    }
}

/// A token can bring a key or the address of one along (`jku`, `x5u`, `jwk`). Nobody listens.
#[tokio::test]
async fn fault_72_a_token_that_brings_its_own_key_is_refused() {
    for (name, host) in &PROVIDERS[2..] {
        let stage = Stage::of(name, host, Manner::Honest).await;
        let header_name = if *name == "plaid" { "plaid-verification" } else { "authorization" };
        let (mut headers, body) = stage.sent(2, "key-1");
        let token = headers[header_name].to_str().unwrap().to_owned();
        let (scheme, token) = token.split_once(' ').unwrap_or(("", &token));
        let payload = token.split('.').nth(1).unwrap();
        let evil = stage.pair(2);
        let head = json!({
            "alg": evil.web_key["alg"], "typ": "JWT", "kid": "key-1", "jwk": evil.web_key,
            "jku": format!("https://{CANARY}/oauth2/v3/certs"), "x5u": format!("https://{CANARY}/key-1"),
        });
        let text = format!("{}.{payload}", BASE64_URL_SAFE_NO_PAD.encode(head.to_string()));
        let token = format!("{text}.{}", BASE64_URL_SAFE_NO_PAD.encode(sign(evil, text.as_bytes())));
        let value = if scheme.is_empty() { token } else { format!("{scheme} {token}") };
        headers.insert(header_name, value.parse().unwrap());
        let sent = (headers, body);
        assert_eq!(stage.verdict(&sent).await, "signature_mismatch", "{name}");
        assert_eq!((stage.host.calls(), stage.canary.calls()), (1, 0), "{name}");

        // The same token is good where that key is published, so nothing but the key was wrong with it.
        stage.host.publish(&[published("key-1", 2)]);
        stage.age();
        assert_eq!(stage.verdict(&sent).await, "ok", "{name}");
    }
}

fn sign(pair: &Pair, text: &[u8]) -> Vec<u8> {
    let (der, random) = (pair.private.serialize_der(), aws_lc_rs::rand::SystemRandom::new());
    if pair.web_key["kty"] == "EC" {
        let rule = &aws_lc_rs::signature::ECDSA_P256_SHA256_FIXED_SIGNING;
        let key = aws_lc_rs::signature::EcdsaKeyPair::from_pkcs8(rule, &der).unwrap();
        return key.sign(&random, text).unwrap().as_ref().to_vec();
    }
    let key = aws_lc_rs::signature::RsaKeyPair::from_pkcs8(&der).unwrap();
    let mut signature = vec![0; key.public_modulus_len()];
    key.sign(&aws_lc_rs::signature::RSA_PKCS1_SHA256, &random, text, &mut signature).unwrap();
    signature
}

#[tokio::test]
async fn fault_72_the_client_itself_speaks_tls_only() {
    for (name, host) in PROVIDERS {
        let stage = Stage::of(name, host, Manner::Honest).await;
        let url = format!("http://{host}/key-1");
        for request in [
            KeyRequest::Certificate { url: url.clone() },
            KeyRequest::KeySet { url: url.clone(), id: "key-1".to_owned() },
            KeyRequest::KeyById { url: url.clone(), id: "key-1".to_owned() },
        ] {
            assert!(stage.fetcher.fetch(&request, &BTreeMap::new()).await.is_err(), "{name}");
        }
        assert!(stage.fetcher.confirm(&url).await.is_err(), "{name}");
        assert_eq!(stage.host.calls(), 0, "{name}");
    }
}

#[tokio::test]
async fn r2_a_provider_that_takes_its_time_is_waited_for_until_the_deadline() {
    let mut waits = tokio::task::JoinSet::new();
    for (name, host) in PROVIDERS {
        for manner in [Manner::Silent, Manner::Dripping] {
            waits.spawn(async move {
                let stage = Stage::of(name, host, manner).await;
                let sent = stage.sent(0, "key-1");
                let started = Instant::now();
                let verdict = stage.verdict(&sent).await;
                (name, verdict, started.elapsed(), stage.check(0, "key-1").await, stage.host.calls())
            });
        }
    }
    while let Some(wait) = waits.join_next().await {
        let (name, verdict, took, again, calls) = wait.unwrap();
        assert_eq!(verdict, "unavailable", "{name}: the sender must try again");
        assert!(took < Duration::from_secs(5), "{name}: {took:?}");
        assert_eq!((again, calls), ("unavailable", 1), "{name}: and is left alone for a while");
    }
}

/// Anybody can invent names of keys. That must cost the provider little, and the genuine sender nothing.
#[tokio::test]
async fn fault_72_invented_keys_neither_hammer_the_provider_nor_push_out_the_good_one() {
    for (name, host) in PROVIDERS {
        let stage = Stage::of(name, host, Manner::Honest).await;
        assert_eq!(stage.check(0, "key-1").await, "ok", "{name}");
        let (headers, body) = stage.sent(2, "invented-key");
        let started = Instant::now();
        for number in 0..MAX_KEYS + 50 {
            assert!(key(&stage.ring, &stage.invented(number)).await.is_err());
        }
        assert_ne!(stage.verdict(&(headers, body)).await, "ok", "{name}");
        let reserve = 1 + started.elapsed().as_secs() / RESERVE_EVERY.as_secs();
        let most = 1 + if name == "google-pubsub" { 0 } else { PEER_CALLS as usize + reserve as usize };
        assert!(stage.host.calls() <= most, "{name}: {} calls", stage.host.calls());
        let calls = stage.host.calls();
        assert_eq!(stage.check(0, "key-1").await, "ok", "{name}");
        assert_eq!(stage.host.calls(), calls, "{name}: the good key was still in memory");

        stage.host.publish(&[published("key-1", 0), published("key-2", 1)]);
        stage.age();
        assert_eq!(stage.check(1, "key-2").await, "ok", "{name}: a while later it is asked again");
    }
}

#[tokio::test]
async fn fault_72_memory_makes_room_and_keeps_the_key_that_has_checked_events() {
    let stage = Stage::of("paypal", "api.paypal.com", Manner::Honest).await;
    assert_eq!(stage.check(0, "key-1").await, "ok");
    for number in 0..MAX_KEYS * 2 {
        let wanted = stage.invented(number);
        let answer = Arc::new(RSA[1].certificate.clone().into_bytes());
        let good = stage.ring.read(&wanted, answer).unwrap();
        stage.ring.memory().hold(good, Instant::now());
        assert!(stage.ring.memory().good.len() <= MAX_KEYS);
    }
    assert_eq!(stage.check(0, "key-1").await, "ok");
    assert_eq!(stage.host.calls(), 1, "the proven key was kept");
}

/// Waits until something holds.
async fn soon(what: &str, holds: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !holds() {
        assert!(Instant::now() < end, "{what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn r2_a_good_key_is_fetched_again_before_it_is_old_and_used_meanwhile() {
    for (name, host) in PROVIDERS {
        let stage = Stage::of(name, host, Manner::Honest).await;
        assert_eq!(stage.check(0, "key-1").await, "ok", "{name}");
        stage.be_due();
        assert_eq!(stage.check(0, "key-1").await, "ok", "{name}: the known key");
        soon("it is fetched in the background", || stage.host.calls() == 2).await;
        soon("it is fresh again", || !stage.is_due()).await;
        assert_eq!(stage.check(0, "key-1").await, "ok", "{name}");
        assert_eq!(stage.host.calls(), 2, "{name}");

        // The provider has taken it back.
        stage.host.publish(&[published("key-2", 1)]);
        stage.be_due();
        assert_eq!(stage.check(0, "key-1").await, "ok", "{name}: it is not known yet");
        soon("it is gone", || stage.ring.memory().good.is_empty()).await;
        assert_ne!(stage.check(0, "key-1").await, "ok", "{name}");
    }
}

#[tokio::test]
async fn r2_a_good_key_outlives_an_outage_of_its_provider_for_a_day_and_no_longer() {
    for (name, host) in PROVIDERS {
        let mut stage = Stage::of(name, host, Manner::Honest).await;
        assert_eq!(stage.check(0, "key-1").await, "ok", "{name}");
        stage.lose_provider();
        stage.be_due();
        for _ in 0..3 {
            assert_eq!(stage.check(0, "key-1").await, "ok", "{name}: the provider is away");
        }
        soon("it was asked for in vain", || !stage.ring.memory().failed.is_empty()).await;
        assert_eq!(stage.check(0, "key-1").await, "ok", "{name}: the provider is away");
        stage.ring.memory().good.values_mut().for_each(|held| held.until = Instant::now());
        assert_eq!(stage.check(0, "key-1").await, "unavailable", "{name}: a day later");
    }
}

#[tokio::test]
async fn r2_a_key_that_has_checked_events_is_remembered_over_a_restart() {
    for (name, host) in PROVIDERS {
        let mut stage = Stage::of(name, host, Manner::Honest).await;
        let path = stage.folder.path().join("keys.json");
        assert_ne!(stage.check(2, "key-1").await, "ok", "{name}: forged");
        assert!(!path.exists(), "{name}: the key has proved nothing yet");
        assert_eq!(stage.check(0, "key-1").await, "ok", "{name}");
        soon("it is written", || path.exists()).await;
        let calls = stage.host.calls();
        stage.lose_provider();
        stage.restart();
        assert_eq!(stage.check(0, "key-1").await, "ok", "{name}: after a restart, with the provider away");
        assert_eq!(stage.check(2, "key-1").await, "signature_mismatch", "{name}");
        assert_eq!(stage.host.calls(), calls, "{name}");

        // What is remembered is trusted no longer than if the gateway had run on, nor if it comes from the future.
        let text = std::fs::read_to_string(&path).unwrap();
        for fetched_at in [NOW.0 - i64::try_from(USABLE.as_micros()).unwrap() - 1, NOW.0 + 60_000_000] {
            std::fs::write(&path, text.replace(&NOW.0.to_string(), &fetched_at.to_string())).unwrap();
            stage.restart();
            assert_eq!(stage.check(0, "key-1").await, "unavailable", "{name}");
        }
    }
}

/// However many forgers have spent the budget, a key that has checked events may be fetched again.
#[tokio::test]
async fn fault_72_a_proven_key_is_fetched_again_whatever_forgers_have_spent() {
    let stage = Stage::of("aws-sns", "sns.us-east-1.amazonaws.com", Manner::Honest).await;
    assert_eq!(stage.check(0, "key-1").await, "ok");
    stage.ring.memory().good.values_mut().for_each(|held| held.until = Instant::now());
    for number in 0..40 {
        assert!(key(&stage.ring, &stage.invented(number)).await.is_err());
    }
    assert_eq!(stage.check(0, "key-1").await, "ok");
}

#[tokio::test]
async fn fault_72_few_requests_wait_for_a_key_and_with_few_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let stage = Stage::of("aws-sns", "sns.us-east-1.amazonaws.com", Manner::Honest).await;
    let ring = ring(stage.preset, &stage.settings, Arc::new(Silent), &folder);
    let wanted = stage.invented(0);
    let wait = |peer: u8, bytes: usize| {
        let (ring, wanted) = (Arc::clone(&ring), wanted.clone());
        tokio::spawn(async move { ring.fetch(&wanted, IpAddr::from([192, 0, 2, peer]), bytes).await.is_ok() })
    };
    let started = Instant::now();
    let mut waits: Vec<_> = (0..200).map(|_| wait(1, 1)).collect();
    waits.extend((0..200).map(|_| wait(2, 1)));
    waits.extend((0..200).map(|_| wait(3, 1)));
    let waiting = || ring.memory().waiting.by_peer.values().sum::<usize>();
    soon("they wait", || waiting() == MAX_WAITING).await;
    assert_eq!(ring.memory().waiting.by_peer.values().max(), Some(&MAX_WAITING_OF_PEER));
    for wait in waits {
        assert!(!wait.await.unwrap());
    }
    assert!(started.elapsed() < DEADLINE * 3, "{:?}", started.elapsed());
    assert_eq!((waiting(), ring.memory().waiting.bytes), (0, 0), "all places are given back");
    let too_much = ring.fetch(&stage.invented(1), PEER, (1 << 20) + 1).await;
    assert_eq!(too_much.err(), Some(NoKey::Unavailable));
}

#[tokio::test]
async fn r43_a_name_or_an_address_of_this_machine_is_not_called() {
    let canary = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = canary.local_addr().unwrap().port();
    for host in ["localhost", "127.0.0.1", "2130706433", "0x7f.1", "[::1]", "[::ffff:127.0.0.1]"] {
        let url = format!("https://{host}:{port}/key.pem");
        let fetcher = WebFetcher::default();
        let request = KeyRequest::Certificate { url: url.clone() };
        for error in
            [fetcher.fetch(&request, &BTreeMap::new()).await.unwrap_err(), fetcher.confirm(&url).await.unwrap_err()]
        {
            let reason = if host == "localhost" { "no public address" } else { "with a name only" };
            assert!(error.to_string().contains(reason), "{host}: {error}");
        }
    }
    let nobody = tokio::time::timeout(Duration::from_millis(50), canary.accept()).await;
    assert!(nobody.is_err(), "the canary was called");
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
async fn every_wait_has_an_end_whatever_the_fetcher_does() {
    let preset = Preset::named("google-pubsub").unwrap();
    let params = preset.params.iter().map(|param| (param.name.clone(), param.example.clone())).collect();
    let settings = Settings { params, ..Settings::default() };
    let ring = ring(preset, &settings, Arc::new(Silent), &tempfile::tempdir().unwrap());
    let wanted = KeyRequest::KeySet { url: "https://k.example/".to_owned(), id: "k".to_owned() };
    let both =
        async { tokio::join!(ring.confirm("https://sns.us-east-1.amazonaws.com/"), ring.fetch(&wanted, PEER, 0)) };
    let (confirmed, key) = tokio::time::timeout(Duration::from_secs(10), both).await.unwrap();
    assert!(confirmed.is_err());
    assert_eq!(key.err(), Some(NoKey::Unavailable));
}
