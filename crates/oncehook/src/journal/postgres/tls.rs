//! TLS to the database: what `sslmode` and `sslrootcert` in the URL mean, and the adapter between the driver and rustls.
//!
//! Promises: the words mean what they mean to PostgreSQL's own clients. `disable`: plain. `prefer` (as when nothing is said):
//! encrypted if the server can, believing any certificate. `require`: encrypted or not at all, believing any certificate,
//! or only those of `sslrootcert` if that is given. `verify-ca`: the certificate comes from an authority that is
//! trusted. `verify-full`: and is made out to the host. Trusted are the authorities in the file `sslrootcert`; without one (or
//! with `sslrootcert=system`) those that the system trusts.
//!
//! Does not: present a certificate of our own, bind passwords to the channel, or take a server's own certificate for an
//! authority.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_postgres::config::SslMode;
use tokio_postgres::tls::{ChannelBinding, MakeTlsConnect, TlsConnect, TlsStream};
use tokio_rustls::TlsConnector;

use crate::journal::server::hosts::certificates;

/// How connections are encrypted and whom they believe.
#[derive(Clone)]
pub(super) struct Tls {
    pub(super) mode: SslMode,
    config: Arc<ClientConfig>,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tls").field("mode", &self.mode).finish_non_exhaustive()
    }
}

impl Tls {
    /// Reads what the URL says (`sslmode`, `sslrootcert`), and the file that it names.
    pub(super) fn new(mode: Option<&str>, roots: Option<&str>) -> Result<Self, String> {
        let file = roots.filter(|roots| *roots != "system");
        let (mode, trust) = match mode {
            Some("disable") => (SslMode::Disable, Trust::Anybody),
            None | Some("prefer") => (SslMode::Prefer, Trust::Anybody),
            Some("require") if file.is_none() => (SslMode::Require, Trust::Anybody),
            Some("require" | "verify-ca") => (SslMode::Require, Trust::Issuer),
            Some("verify-full") => (SslMode::Require, Trust::IssuerAndName),
            _ => return Err("sslmode is disable, prefer, require, verify-ca or verify-full".to_owned()),
        };
        Ok(Self { mode, config: Arc::new(trust.config(file)?) })
    }
}

/// Whose certificates are believed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Trust {
    Anybody,
    Issuer,
    IssuerAndName,
}

impl Trust {
    /// The authorities are those of a file, or the system's.
    fn config(self, file: Option<&str>) -> Result<ClientConfig, String> {
        let unusable = |error: rustls::Error| format!("TLS cannot be prepared: {error}");
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let issuer: Option<Arc<dyn ServerCertVerifier>> = match file {
            _ if self == Self::Anybody => None,
            Some(file) => {
                let roots = Arc::new(read(file)?);
                let builder = WebPkiServerVerifier::builder_with_provider(roots, Arc::clone(&provider));
                Some(builder.build().map_err(|error| format!("TLS cannot be prepared: {error}"))?)
            }
            None => Some(Arc::new(rustls_platform_verifier::Verifier::new(Arc::clone(&provider)).map_err(unusable)?)),
        };
        let builder = ClientConfig::builder_with_provider(Arc::clone(&provider));
        let verifier = match issuer {
            Some(issuer) if self == Self::IssuerAndName => issuer,
            inner => Arc::new(Lenient { inner, provider }),
        };
        let builder = builder.with_safe_default_protocol_versions().map_err(unusable)?;
        Ok(builder.dangerous().with_custom_certificate_verifier(verifier).with_no_client_auth())
    }
}

/// The authorities in a PEM file.
fn read(file: &str) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates("sslrootcert", file)? {
        roots.add(certificate).map_err(|error| format!("sslrootcert {file}: {error}"))?;
    }
    Ok(roots)
}

/// Believes a certificate whatever name it is made out to, and without `inner` whoever made it: what the operator asked for by
/// `require` and `verify-ca`. That the server holds its key is checked all the same.
#[derive(Debug)]
struct Lenient {
    inner: Option<Arc<dyn ServerCertVerifier>>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Lenient {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let Some(inner) = &self.inner else { return Ok(ServerCertVerified::assertion()) };
        // The name is looked at last, so whoever is refused for it alone has passed everything else.
        match inner.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now) {
            Err(rustls::Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) => Ok(ServerCertVerified::assertion()),
            verdict => verdict,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signed, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signed, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// The error is not that of a lost connection: waiting does not mend what TLS could not agree on.
impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> MakeTlsConnect<S> for Tls {
    type Stream = Encrypted<S>;
    type TlsConnect = Handshake;
    type Error = String;

    fn make_tls_connect(&mut self, host: &str) -> Result<Handshake, String> {
        Ok(Handshake { host: host.to_owned(), config: Arc::clone(&self.config) })
    }
}

/// A handshake with one host.
pub(super) struct Handshake {
    host: String,
    config: Arc<ClientConfig>,
}

impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> TlsConnect<S> for Handshake {
    type Stream = Encrypted<S>;
    type Error = String;
    type Future = Pin<Box<dyn Future<Output = Result<Encrypted<S>, String>> + Send>>;

    fn connect(self, stream: S) -> Self::Future {
        Box::pin(async move {
            let name = ServerName::try_from(self.host).map_err(|error| error.to_string())?;
            let encrypted = TlsConnector::from(self.config).connect(name, stream).await;
            encrypted.map(|stream| Encrypted(Box::new(stream))).map_err(|error| error.to_string())
        })
    }
}

/// An encrypted connection.
pub(super) struct Encrypted<S>(Box<tokio_rustls::client::TlsStream<S>>);

impl<S: AsyncRead + AsyncWrite + Unpin> TlsStream for Encrypted<S> {
    fn channel_binding(&self) -> ChannelBinding {
        ChannelBinding::none()
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for Encrypted<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0).poll_read(context, buffer)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Encrypted<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut *self.0).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0).poll_shutdown(context)
    }
}
