//! TLS to the database: what `ssl-mode`, `ssl-ca`, `ssl-cert` and `ssl-key` in the URL mean.
//!
//! Promises: the words mean what they mean to MySQL's own clients, in capital letters or small ones. `DISABLED`, as when
//! nothing is said: plain. `PREFERRED`: encrypted if the server can, believing any certificate, else plain. `REQUIRED`: encrypted
//! or not at all, believing any certificate. `VERIFY_IDENTITY`: and the certificate comes from an authority that is trusted and is
//! made out to the host. Trusted are the authorities in the file `ssl-ca`; without one those that the system trusts. Nothing
//! of a password is sent before the connection is as it was asked for.
//!
//! Does not: check the authority without the name (`VERIFY_CA` is refused; the driver cannot), or guess: a parameter that
//! would have no effect is an error.

use mysql_async::{ClientIdentity, SslOpts};
use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::journal::server::hosts::{certificates, take_parameters};

/// Whether connections are encrypted, and whom they believe.
#[derive(Debug, Clone, Default)]
pub(super) struct Tls {
    /// How, if they are.
    pub(super) options: Option<SslOpts>,
    /// A server that cannot is taken without.
    pub(super) optional: bool,
}

impl Tls {
    /// Takes what a URL says about TLS out of its parameters (what stands behind the `?`). Returns the others, too.
    pub(super) fn of(parameters: &str) -> Result<(Self, String), String> {
        let (mut mode, mut authority, mut certificate, mut key) = (None, None, None, None);
        let others = take_parameters(parameters, |name, value| {
            match name {
                "ssl-mode" => mode = Some(value.to_ascii_uppercase()),
                "ssl-ca" => authority = Some(value),
                "ssl-cert" => certificate = Some(value),
                "ssl-key" => key = Some(value),
                // The driver's own words for it.
                "require_ssl" | "verify_ca" | "verify_identity" | "built_in_roots" => {
                    return Err(format!("`{name}` is not known; write ssl-mode=REQUIRED or ssl-mode=VERIFY_IDENTITY"));
                }
                _ => return Ok(false),
            }
            Ok(true)
        })?;
        let mode = mode.as_deref().unwrap_or("DISABLED");
        let encrypted = match mode {
            "DISABLED" => None,
            // Built-in authorities are asked for because the driver wants some; nobody is checked against them.
            "PREFERRED" | "REQUIRED" => Some(SslOpts::default().with_danger_accept_invalid_certs(true)),
            "VERIFY_IDENTITY" => {
                let roots = match &authority {
                    Some(file) => certificates("ssl-ca", file)?,
                    None => system()?,
                };
                let roots = roots.iter().map(|root| root.as_ref().to_vec().into()).collect();
                Some(SslOpts::default().with_disable_built_in_roots(true).with_root_certs(roots))
            }
            "VERIFY_CA" => {
                return Err(
                    "ssl-mode=VERIFY_CA is not supported; write VERIFY_IDENTITY, which also checks the name".to_owned()
                );
            }
            _ => return Err("ssl-mode is DISABLED, PREFERRED, REQUIRED or VERIFY_IDENTITY".to_owned()),
        };
        if authority.is_some() && mode != "VERIFY_IDENTITY" {
            return Err("ssl-ca needs ssl-mode=VERIFY_IDENTITY".to_owned());
        }
        let options = match (encrypted, certificate, key) {
            (encrypted, None, None) => encrypted,
            (Some(options), Some(certificate), Some(key)) if mode != "PREFERRED" => {
                certificates("ssl-cert", &certificate)?;
                PrivateKeyDer::from_pem_file(&key).map_err(|error| format!("ssl-key {key}: {error}"))?;
                let path = |file: String| std::path::PathBuf::from(file).into();
                Some(options.with_client_identity(Some(ClientIdentity::new(path(certificate), path(key)))))
            }
            (_, Some(_), Some(_)) => {
                return Err("ssl-cert and ssl-key need ssl-mode=REQUIRED or VERIFY_IDENTITY".to_owned());
            }
            _ => return Err("ssl-cert and ssl-key are given together".to_owned()),
        };
        if options.is_some() && rustls::crypto::CryptoProvider::get_default().is_none() {
            // The driver takes the process's. Whoever installs one at the same moment is as good.
            let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        }
        Ok((Self { options, optional: mode == "PREFERRED" }, others))
    }
}

/// The authorities that the system trusts. One that cannot be read does not count.
fn system() -> Result<Vec<CertificateDer<'static>>, String> {
    let mut known = RootCertStore::empty();
    let found = rustls_native_certs::load_native_certs().certs;
    let found: Vec<_> = found.into_iter().filter(|one| known.add(one.clone()).is_ok()).collect();
    if found.is_empty() {
        return Err("the system trusts no authority; name yours: ssl-ca=FILE".to_owned());
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_would_have_no_effect_is_refused() {
        let told = |parameters: &str| Tls::of(parameters).unwrap_err();
        assert!(told("ssl-mode=sometimes").contains("ssl-mode is"));
        assert!(told("ssl-mode=VERIFY_CA").contains("VERIFY_IDENTITY"));
        assert!(told("ssl-ca=%2Fa.pem").contains("ssl-ca needs"));
        assert!(told("ssl-mode=REQUIRED&ssl-ca=a.pem").contains("ssl-ca needs"));
        assert!(told("ssl-mode=VERIFY_IDENTITY&ssl-ca=%2Fnowhere.pem").contains("ssl-ca /nowhere.pem"));
        assert!(told("ssl-mode=REQUIRED&ssl-cert=a.pem").contains("together"));
        assert!(told("ssl-cert=a.pem&ssl-key=b.pem").contains("need ssl-mode"));
        assert!(told("require_ssl=true").contains("ssl-mode"));
        let (tls, others) = Tls::of("a=1&ssl-mode=required&b=2").unwrap();
        assert!(tls.options.is_some() && !tls.optional);
        assert_eq!(others, "a=1&b=2");
        assert!(Tls::of("ssl-mode=disabled").unwrap().0.options.is_none());
        assert!(Tls::of("").unwrap().0.options.is_none());
        assert!(Tls::of("ssl-mode=PREFERRED").unwrap().0.optional);
    }
}
