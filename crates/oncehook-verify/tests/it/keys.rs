//! Two keys for every preset, and what a provider would answer when it is asked for one.
//!
//! RSA and ECDSA keys are made once per run. Paddle Classic signs with SHA-1, which nothing here makes any more; its two
//! requests were signed with openssl.

use std::sync::LazyLock;

use aws_lc_rs::{
    encoding::{AsDer as _, Pkcs8V1Der, PublicKeyX509Der},
    rsa::{KeyPair, KeySize},
    signature::KeyPair as _,
};
use base64::{
    Engine as _,
    prelude::{BASE64_STANDARD, BASE64_URL_SAFE_NO_PAD},
};
use oncehook_verify::{KeyRequest, Preset};

use crate::kit::{PUBLIC_1, PUBLIC_2, SEED_1, SEED_2, Sent};

/// A private key in PEM with its public half in several forms.
pub(crate) struct Pair {
    pub(crate) private: String,
    pub(crate) public_pem: String,
    pub(crate) public_base64: String,
    /// Made out to paypal.com, valid from 2020 to 2060.
    pub(crate) certificate: String,
    /// As members of a JSON Web Key.
    pub(crate) web_key: String,
}

pub(crate) static RSA: LazyLock<[Pair; 2]> = LazyLock::new(|| [rsa(), rsa()]);
pub(crate) static P256: LazyLock<[Pair; 2]> = LazyLock::new(|| [p256(), p256()]);

fn pem(label: &str, der: &[u8]) -> String {
    let text = BASE64_STANDARD.encode(der);
    let lines: Vec<&str> = text.as_bytes().chunks(64).map(|line| std::str::from_utf8(line).unwrap()).collect();
    format!("-----BEGIN {label}-----\n{}\n-----END {label}-----\n", lines.join("\n"))
}

fn rsa() -> Pair {
    let pair = KeyPair::generate(KeySize::Rsa2048).unwrap();
    let pkcs8 = aws_lc_rs::encoding::AsDer::<Pkcs8V1Der<'_>>::as_der(&pair).unwrap();
    let spki: PublicKeyX509Der<'_> = pair.public_key().as_der().unwrap();
    // 2048 bits behind 33 bytes of headers, and 65537 behind two more.
    let modulus = BASE64_URL_SAFE_NO_PAD.encode(&spki.as_ref()[33..289]);
    let web_key = format!(r#""kty":"RSA","n":"{modulus}","e":"AQAB""#);
    whole(pem("PRIVATE KEY", pkcs8.as_ref()), spki.as_ref(), web_key)
}

fn p256() -> Pair {
    let pair = rcgen::KeyPair::generate().unwrap();
    let spki = rcgen::PublicKeyData::subject_public_key_info(&pair);
    let point = &spki[spki.len() - 64..];
    let part = |bytes: &[u8]| BASE64_URL_SAFE_NO_PAD.encode(bytes);
    let web_key = format!(r#""kty":"EC","crv":"P-256","x":"{}","y":"{}""#, part(&point[..32]), part(&point[32..]));
    whole(pair.serialize_pem(), &spki, web_key)
}

fn whole(private: String, spki: &[u8], web_key: String) -> Pair {
    let key = rcgen::KeyPair::from_pem(&private).unwrap();
    let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
    params.distinguished_name.push(rcgen::DnType::CommonName, "messageverificationcerts.paypal.com");
    params.not_before = rcgen::date_time_ymd(2020, 1, 1);
    params.not_after = rcgen::date_time_ymd(2060, 1, 1);
    let certificate = params.self_signed(&key).unwrap().pem();
    Pair {
        private,
        public_pem: pem("PUBLIC KEY", spki),
        public_base64: BASE64_STANDARD.encode(spki),
        certificate,
        web_key,
    }
}

/// Two secrets of a preset: what signs and what verifies.
pub(crate) fn pairs(preset: &Preset) -> [(String, String); 2] {
    let both = |first: (&str, &str), second: (&str, &str)| {
        [first, second].map(|(signs, verifies)| (signs.to_owned(), verifies.to_owned()))
    };
    let same = |first: &str, second: &str| both((first, first), (second, second));
    match preset.name.as_str() {
        "discord" => both((SEED_1, PUBLIC_1), (SEED_2, PUBLIC_2)),
        "telnyx" => {
            let base64 = |digits: &str| BASE64_STANDARD.encode(hex::decode(digits).unwrap());
            both((&base64(SEED_1), &base64(PUBLIC_1)), (&base64(SEED_2), &base64(PUBLIC_2)))
        }
        "sendgrid" => {
            let [a, b] = &*P256;
            both((&a.private, &a.public_base64), (&b.private, &b.public_base64))
        }
        "plaid" => {
            let [a, b] = &*P256;
            both((&a.private, ""), (&b.private, ""))
        }
        "wise" | "paypal" | "aws-sns" | "google-pubsub" => {
            let [a, b] = &*RSA;
            both((&a.private, &a.public_pem), (&b.private, &b.public_pem))
        }
        "paddle-classic" => both(("", PADDLE_KEYS[0]), ("", PADDLE_KEYS[1])),
        "adyen" | "adyen-platform" | "onfleet" => same(
            "11223344D785FBAE710E7F943F307971BB61B21281C98C9129B3D4018A57B2EB",
            "00727DB817A85C8503AD29EAD1523DB869AF0E536893BB3046C92DE7CB045CB1",
        ),
        _ if preset.secret_hint.contains("whsec_") && preset.name != "stripe" || preset.name == "gitlab-signed" => {
            same("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD")
        }
        _ if preset.secret_hint.starts_with("user:password") => same("gateway:s3cr:et", "gateway:other"),
        _ => same("whsec_first_secret", "another-secret-1"),
    }
}

/// The name of a fetched key, as requests say it: its address, or its id.
pub(crate) fn name(preset: &str, number: usize) -> String {
    match preset {
        "paypal" => format!("https://api.paypal.com/v1/notifications/certs/CERT-{number}"),
        "aws-sns" => format!("https://sns.us-east-1.amazonaws.com/SimpleNotificationService-{number}.pem"),
        _ => format!("6c5516e1-92dc-479e-a8ff-5a51992e000{number}"),
    }
}

/// What the provider answers when it is asked for a key; nothing where it has none of that name.
pub(crate) fn answer(published: &[(String, usize)], request: &KeyRequest) -> Option<Vec<u8>> {
    let named = |name: &str| published.iter().find(|(known, _)| known == name).map(|(_, pair)| *pair);
    match request {
        KeyRequest::Certificate { url } => Some(RSA[named(url)?].certificate.clone().into_bytes()),
        KeyRequest::KeySet { .. } => {
            let keys: Vec<String> = published
                .iter()
                .map(|(name, pair)| format!(r#"{{"kid":"{name}","use":"sig",{}}}"#, RSA[*pair].web_key))
                .collect();
            Some(format!(r#"{{"keys":[{}]}}"#, keys.join(",")).into_bytes())
        }
        KeyRequest::KeyById { id, .. } => Some(
            format!(
                r#"{{"key":{{"kid":"{id}","use":"sig","alg":"ES256","expired_at":null,{}}}}}"#,
                P256[named(id)?].web_key
            )
            .into_bytes(),
        ),
    }
}

const PADDLE_KEYS: [&str; 2] =
    [include_str!("fixtures/paddle-classic-1.pub.pem"), include_str!("fixtures/paddle-classic-2.pub.pem")];
const PADDLE_BODIES: [&str; 2] =
    [include_str!("fixtures/paddle-classic-1.body"), include_str!("fixtures/paddle-classic-2.body")];

pub(crate) fn paddle_classic(which: usize) -> Sent {
    Sent::new(PADDLE_BODIES[which].trim_end().as_bytes()).with("content-type", "application/x-www-form-urlencoded")
}
