//! What is needed of an X.509 certificate: its public key, its validity, and the name it was made out to.
//!
//! A strict walk over the DER encoding, with every length checked. Whether the certificate may be believed is decided
//! by where it came from (a fixed host over verified TLS, which the caller guarantees); this module builds no chains
//! and checks no issuer.

use base64::{Engine as _, prelude::BASE64_STANDARD};

use crate::time::UnixMicros;

/// The largest certificate that is read.
const MAX_CERTIFICATE_BYTES: usize = 64 << 10;

const SEQUENCE: u8 = 0x30;
const SET: u8 = 0x31;
const INTEGER: u8 = 0x02;
const OBJECT_IDENTIFIER: u8 = 0x06;
const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;
const VERSION: u8 = 0xa0;

/// 2.5.4.3
const COMMON_NAME: &[u8] = &[0x55, 0x04, 0x03];

/// The parts of a certificate that matter here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Certificate {
    /// The `SubjectPublicKeyInfo` in DER.
    pub(crate) public_key: Vec<u8>,
    pub(crate) not_before: UnixMicros,
    pub(crate) not_after: UnixMicros,
    pub(crate) common_name: Option<String>,
}

impl Certificate {
    /// Reads the first certificate of a PEM file.
    pub(crate) fn from_pem(pem: &[u8]) -> Result<Self, &'static str> {
        Self::from_der(&pem_section(pem, "CERTIFICATE").ok_or("it is not a PEM certificate")?)
    }

    fn from_der(der: &[u8]) -> Result<Self, &'static str> {
        read(der).ok_or("it is not an X.509 certificate")
    }
}

/// The bytes of the first section with this label; nothing if there is none or its base64 is broken.
pub(crate) fn pem_section(pem: &[u8], label: &str) -> Option<Vec<u8>> {
    if pem.len() > MAX_CERTIFICATE_BYTES {
        return None;
    }
    let text = std::str::from_utf8(pem).ok()?;
    let (_, after) = text.split_once(&format!("-----BEGIN {label}-----"))?;
    let (inside, _) = after.split_once(&format!("-----END {label}-----"))?;
    let packed: String = inside.chars().filter(|c| !c.is_ascii_whitespace()).collect();
    BASE64_STANDARD.decode(packed).ok()
}

fn read(der: &[u8]) -> Option<Certificate> {
    let mut certificate = Der(der).only(SEQUENCE)?;
    let mut tbs = certificate.take(SEQUENCE)?;
    tbs.take_if(VERSION);
    tbs.take(INTEGER)?;
    tbs.take(SEQUENCE)?; // the signature's algorithm
    tbs.take(SEQUENCE)?; // the issuer
    let mut validity = tbs.take(SEQUENCE)?;
    let (not_before, not_after) = (validity.time()?, validity.time()?);
    let subject = tbs.take(SEQUENCE)?;
    let before = tbs.0;
    tbs.take(SEQUENCE)?;
    let public_key = before.get(..before.len() - tbs.0.len())?.to_vec();
    Some(Certificate { public_key, not_before, not_after, common_name: common_name(subject) })
}

/// The last common name of a subject, as text.
fn common_name(mut subject: Der<'_>) -> Option<String> {
    let mut name = None;
    while !subject.0.is_empty() {
        let mut set = subject.take(SET)?;
        let mut attribute = set.take(SEQUENCE)?;
        if attribute.take(OBJECT_IDENTIFIER)?.0 == COMMON_NAME {
            let (_, value) = attribute.any()?;
            name = std::str::from_utf8(value.0).ok().map(str::to_owned);
        }
    }
    name
}

/// The rest of some DER.
#[derive(Debug, Clone, Copy)]
struct Der<'a>(&'a [u8]);

impl<'a> Der<'a> {
    /// The next value with its tag.
    fn any(&mut self) -> Option<(u8, Der<'a>)> {
        let (tag, rest) = self.0.split_first()?;
        let (first, rest) = rest.split_first()?;
        let (length, rest) = match first {
            0..=0x7f => (usize::from(*first), rest),
            0x81..=0x83 => {
                let count = usize::from(first & 0x7f);
                let (digits, rest) = rest.split_at_checked(count)?;
                (digits.iter().fold(0, |length, digit| length << 8 | usize::from(*digit)), rest)
            }
            // Indefinite or enormous: not DER, or not a certificate.
            _ => return None,
        };
        let (value, rest) = rest.split_at_checked(length)?;
        self.0 = rest;
        Some((*tag, Der(value)))
    }

    fn take(&mut self, wanted: u8) -> Option<Der<'a>> {
        let (tag, value) = self.any()?;
        (tag == wanted).then_some(value)
    }

    fn take_if(&mut self, wanted: u8) {
        if self.0.first() == Some(&wanted) {
            self.any();
        }
    }

    /// The one value that everything is.
    fn only(mut self, wanted: u8) -> Option<Der<'a>> {
        let value = self.take(wanted)?;
        self.0.is_empty().then_some(value)
    }

    fn time(&mut self) -> Option<UnixMicros> {
        let (tag, value) = self.any()?;
        let text = std::str::from_utf8(value.0).ok()?;
        let digits = text.strip_suffix('Z').filter(|digits| digits.bytes().all(|byte| byte.is_ascii_digit()))?;
        let (year, rest) = match (tag, digits.len()) {
            (UTC_TIME, 12) => {
                let year = digits.get(..2)?;
                let century = if year < "50" { "20" } else { "19" };
                (format!("{century}{year}"), digits.get(2..)?)
            }
            (GENERALIZED_TIME, 14) => (digits.get(..4)?.to_owned(), digits.get(4..)?),
            _ => return None,
        };
        let part = |at: usize| rest.get(at..at + 2);
        UnixMicros::parse_rfc3339(&format!("{year}-{}-{}T{}:{}:{}Z", part(0)?, part(2)?, part(4)?, part(6)?, part(8)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_is_read() {
        let rcgen::CertifiedKey { cert, signing_key } = made();
        let read = Certificate::from_pem(cert.pem().as_bytes()).unwrap();
        assert_eq!(read.public_key, rcgen::PublicKeyData::subject_public_key_info(&signing_key));
        assert_eq!(read.common_name.as_deref(), Some("messageverificationcerts.paypal.com"));
        assert_eq!(read.not_before, UnixMicros::parse_rfc3339("2020-01-02T00:00:00Z").unwrap());
        assert_eq!(read.not_after, UnixMicros::parse_rfc3339("2060-03-04T00:00:00Z").unwrap());
    }

    #[test]
    fn every_truncation_is_refused() {
        let der = made().cert.der().to_vec();
        assert!(Certificate::from_der(&der).is_ok());
        for length in 0..der.len() {
            assert!(Certificate::from_der(&der[..length]).is_err(), "{length}");
        }
        assert!(Certificate::from_der(&[&der[..], b"\0"].concat()).is_err());
        assert!(Certificate::from_pem(b"-----BEGIN CERTIFICATE-----\n%%%\n-----END CERTIFICATE-----").is_err());
        assert!(Certificate::from_pem(b"").is_err());
    }

    fn made() -> rcgen::CertifiedKey<rcgen::KeyPair> {
        let signing_key = rcgen::KeyPair::generate().unwrap();
        let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name.push(rcgen::DnType::OrganizationName, "PayPal");
        params.distinguished_name.push(rcgen::DnType::CommonName, "messageverificationcerts.paypal.com");
        params.not_before = rcgen::date_time_ymd(2020, 1, 2);
        params.not_after = rcgen::date_time_ymd(2060, 3, 4);
        let cert = params.self_signed(&signing_key).unwrap();
        rcgen::CertifiedKey { cert, signing_key }
    }
}
