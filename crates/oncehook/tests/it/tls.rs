//! The HTTP handler over TLS: a certificate is believed if the system trusts it and it is made out to the host, and
//! not a byte of an event leaves before that is known.
//!
//! The certificate is made out to `127.0.0.1` and `tls.test` until 2120 and signs itself. What the system trusts comes from
//! `SSL_CERT_FILE`, so the tests that need trust run in a process of their own.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use oncehook::delivery::{Cause, Failure, Remedy};
use oncehook::handler::{HttpHandler, HttpOptions};
use oncehook::outbound::{LookingUp, Names};
use oncehook::verify::UnixMicros;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer};

use crate::http::claim;

const NOW: UnixMicros = UnixMicros(1_700_000_000_000_000);

const CERTIFICATE: &str = "-----BEGIN CERTIFICATE-----
MIIBKjCB3aADAgECAgEBMAUGAytlcDAYMRYwFAYDVQQDDA1vbmNlaG9vayB0ZXN0
MCAXDTIwMDEwMTAwMDAwMFoYDzIxMjAwMTAxMDAwMDAwWjAYMRYwFAYDVQQDDA1v
bmNlaG9vayB0ZXN0MCowBQYDK2VwAyEAW6BRTYF3TA+8TnNHP1Vz/xRmLRMKL6iZ
4gu61kaOwfujSjBIMAwGA1UdEwEB/wQCMAAwGQYDVR0RBBIwEIcEfwAAAYIIdGxz
LnRlc3QwHQYDVR0OBBYEFO/G6q0fmJ3P9mGUiMR28gVeWNQ4MAUGAytlcANBAEht
JPmKf1b2nOhdSGDmu+Y2KtBBLJZU3jhXaiYCUHN1wajGNCHBFnM+02bg3kpBLvnH
qbaCmlTSZ3g19oOIhwE=
-----END CERTIFICATE-----
";

/// The key of that certificate and of nothing else.
const KEY: &str = "302e020100300506032b657004220420236585427ef6ea4d3fd4d7fda66a3f69c299a0f0d033ea8081d7c87b761fca90";

/// Every name leads to 127.0.0.1.
struct Home;

impl Names for Home {
    fn look_up(&self, _: &str) -> LookingUp {
        Box::pin(async { Ok(vec![[127, 0, 0, 1].into()]) })
    }
}

/// A TLS server for one connection. Sends what it could read of a request, if anything, and answers 200.
fn start() -> (SocketAddr, Receiver<Vec<u8>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        sender.send(serve(stream)).unwrap();
    });
    (address, receiver)
}

fn serve(stream: TcpStream) -> Vec<u8> {
    let certificate = CertificateDer::from_pem_slice(CERTIFICATE.as_bytes()).unwrap();
    let key = PrivatePkcs8KeyDer::from(hex::decode(KEY).unwrap());
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key.into())
        .unwrap();
    let connection = rustls::ServerConnection::new(Arc::new(config)).unwrap();
    let mut tls = rustls::StreamOwned::new(connection, stream);
    let mut read = Vec::new();
    let mut buffer = [0; 4_096];
    // The request is small: its head ends in what has been read, and its body is not looked at.
    while !read.windows(4).any(|bytes| bytes == b"\r\n\r\n") {
        match tls.read(&mut buffer) {
            Ok(0) | Err(_) => return read,
            Ok(length) => read.extend_from_slice(&buffer[..length]),
        }
    }
    let _ = tls.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}");
    read
}

async fn ask(host: &str) -> (Result<Option<String>, Failure>, Vec<u8>) {
    let (address, received) = start();
    let mut options = HttpOptions::new(format!("https://{host}:{}/hook", address.port()));
    options.allow_private = true;
    let handler = HttpHandler::with_names(options, Arc::new(Home)).unwrap();
    let outcome = handler.deliver(&claim(1), NOW).await;
    let received = tokio::task::spawn_blocking(move || received.recv_timeout(Duration::from_secs(20)));
    (outcome, received.await.unwrap().unwrap())
}

#[tokio::test]
async fn a_certificate_that_nobody_trusts_gets_no_event() {
    for host in ["127.0.0.1", "tls.test"] {
        let (outcome, received) = ask(host).await;
        let failure = outcome.unwrap_err();
        assert!(failure.message.contains("invalid peer certificate"), "{failure}");
        assert_eq!((failure.cause, failure.remedy), (Cause::Destination, Remedy::Retry(None)));
        assert_eq!(received, b"", "{host}");
    }
}

#[test]
fn a_trusted_certificate_is_believed_for_its_own_host_only() {
    let directory = tempfile::tempdir().unwrap();
    let trusted = directory.path().join("trusted.pem");
    std::fs::write(&trusted, CERTIFICATE).unwrap();
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "tls::with_the_certificate_trusted", "--ignored"])
        .env("SSL_CERT_FILE", trusted)
        .env_remove("SSL_CERT_DIR")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

#[tokio::test]
#[ignore = "the test above runs it, in a process that trusts the certificate"]
async fn with_the_certificate_trusted() {
    for host in ["127.0.0.1", "tls.test"] {
        let (outcome, received) = ask(host).await;
        assert_eq!(outcome.unwrap().as_deref(), Some(r#"{"status":200,"body":{}}"#));
        assert!(received.starts_with(b"POST /hook HTTP/1.1\r\n"), "{}", String::from_utf8_lossy(&received));
    }
    let (outcome, received) = ask("other.test").await;
    assert!(outcome.unwrap_err().message.contains("not valid for name"));
    assert_eq!(received, b"");
}
