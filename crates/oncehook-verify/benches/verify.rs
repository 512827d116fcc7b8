//! What verification costs beside the hash itself, and how often it allocates. `cargo bench -p oncehook-verify`.
//!
//! `hash_alone` is the HMAC over the same bytes with the same library; the difference to `verify` is what this crate adds.

#![expect(clippy::unwrap_used, reason = "a benchmark that cannot be set up must stop")]

use std::hint::black_box;

use aws_lc_rs::hmac;
use http::{HeaderMap, HeaderValue};
use oncehook_verify::{Identifier, MissingKey, Preset, Request, Secret, Settings, Signer, UnixMicros, Verifier};

#[global_allocator]
static ALLOCATIONS: divan::AllocProfiler = divan::AllocProfiler::system();

const NOW: UnixMicros = UnixMicros(1_700_000_001_000_000);
const WHSEC: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
const PRESETS: [&str; 6] = ["stripe", "github", "shopify", "slack", "standard-webhooks", "netlify"];

fn main() {
    divan::main();
}

/// A request of 1 KB, signed for a preset.
struct Case {
    verifier: Verifier,
    identifier: Identifier,
    headers: HeaderMap,
    body: Vec<u8>,
}

impl Case {
    fn new(name: &str) -> Self {
        let preset = Preset::named(name).unwrap();
        let secret = Secret::new(WHSEC).unwrap();
        let padding = "x".repeat(1_024 - 96);
        let body = format!(
            r#"{{"id":"evt_1","type":"a.b","created":1700000000,"data":{{"object":{{"id":"o"}}}},"p":"{padding}"}}"#
        )
        .into_bytes();
        let signer = Signer::new(&preset.verify, &secret).unwrap();
        let mut headers = HeaderMap::new();
        headers.insert("x-github-delivery", HeaderValue::from_static("evt_1"));
        let request = Request { method: "POST", path: "/webhooks/x", headers: &headers, body: &body };
        for (name, value) in signer.sign(&request, "evt_1", NOW).unwrap() {
            headers.insert(name, value);
        }
        let verifier = Verifier::with(&preset.verify, &[secret], Settings::default()).unwrap();
        let identifier = Identifier::new(&preset.identify, &preset.verify, MissingKey::Digest).unwrap();
        Self { verifier, identifier, headers, body }
    }

    fn request(&self) -> Request<'_> {
        Request { method: "POST", path: "/webhooks/x", headers: &self.headers, body: &self.body }
    }
}

#[divan::bench]
fn hash_alone(bencher: divan::Bencher<'_, '_>) {
    let case = Case::new("stripe");
    let key = hmac::Key::new(hmac::HMAC_SHA256, WHSEC.as_bytes());
    bencher.bench(|| {
        let mut context = hmac::Context::with_key(&key);
        context.update(b"1700000001.");
        context.update(black_box(&case.body));
        context.sign()
    });
}

#[divan::bench(args = PRESETS)]
fn verify(bencher: divan::Bencher<'_, '_>, name: &str) {
    let case = Case::new(name);
    let request = case.request();
    bencher.bench(|| case.verifier.verify(black_box(&request), NOW).is_ok());
}

#[divan::bench(args = PRESETS)]
fn verify_and_identify(bencher: divan::Bencher<'_, '_>, name: &str) {
    let case = Case::new(name);
    let request = case.request();
    bencher.bench(|| {
        let verified = case.verifier.verify(black_box(&request), NOW).unwrap();
        case.identifier.identify(&verified)
    });
}
