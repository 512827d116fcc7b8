//! A million cases each over the parts that read what strangers send: header grammars, signed tokens, the text and the
//! address of certificates, paths into JSON. Nothing panics, and nothing that was not signed is accepted.
//!
//! The cases come from a fixed seed, so a failure repeats. Most of them are genuine requests with a few bytes changed,
//! because random bytes never get past the first check.

use oncehook_verify::{Identifier, Identify, KeyRequest, MissingKey, Preset, Request, Verifier};

use crate::kit::{NOW, Sent, Side, key_pairs, scheme_from, secrets};

const CASES: usize = 1_000_000;

/// xorshift64*: small, fast, the same everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }

    /// Changes one to three places: a bit, a byte from the alphabet, a cut, a repetition, an insertion.
    fn bend(&mut self, bytes: &mut Vec<u8>, alphabet: &[u8]) {
        for _ in 0..=self.below(3) {
            let at = self.below(bytes.len() + 1);
            let byte = alphabet[self.below(alphabet.len())];
            match self.below(6) {
                0 if at < bytes.len() => bytes[at] ^= 1 << self.below(8),
                1 if at < bytes.len() => bytes[at] = byte,
                2 if at < bytes.len() => drop(bytes.drain(at..(at + 1 + self.below(4)).min(bytes.len()))),
                3 => {
                    let end = (at + self.below(12)).min(bytes.len());
                    let piece = bytes[at..end].to_vec();
                    bytes.splice(at..at, piece);
                }
                4 => bytes.truncate(at),
                _ => bytes.insert(at, byte),
            }
        }
    }
}

/// Every preset whose signature stands in a header: a bent header is accepted only if the genuine signature is still in it.
#[test]
fn fuzz_header_grammars() {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let sides: Vec<(Side, Verifier, Sent, String, String)> = Side::all()
        .filter(|side| !side.preset.verify.fetches_keys() && side.preset.name != "paddle-classic")
        .filter_map(|side| {
            let name = side.preset.verify.signature_headers().next()?.to_string();
            let sent = side.genuine(0, NOW);
            let value = sent.header(&name);
            // The signature itself: the longest run of its alphabet.
            let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '+' | '/' | '_' | '-' | '.');
            let signature = value.split(|c| !is_part(c)).max_by_key(|part| part.len())?.to_owned();
            let verifier = side.verifier(&[0]);
            Some((side, verifier, sent, name, signature))
        })
        .collect();
    assert!(sides.len() > 85, "{}", sides.len());
    let (mut accepted, mut refused) = (0, 0);
    for case in 0..CASES {
        let (side, verifier, genuine, name, signature) = &sides[case % sides.len()];
        let mut value = genuine.header(name).into_bytes();
        random.bend(&mut value, b"v1at=,;.| sha256_0f-+/{}\"\\:Bearer");
        let Ok(header) = http::HeaderValue::from_bytes(&value) else { continue };
        let mut headers = genuine.headers.clone();
        headers.insert(http::HeaderName::from_bytes(name.as_bytes()).unwrap(), header);
        let request = Request { headers: &headers, ..genuine.request() };
        match verifier.verify(&request, NOW) {
            Ok(_) => {
                // Hexadecimal digits may be written in either case.
                let text = String::from_utf8_lossy(&value);
                let same = text.contains(signature.as_str()) || text.to_ascii_lowercase().contains(signature.as_str());
                assert!(same, "{}: forged {text}", side.preset.name);
                accepted += 1;
            }
            Err(_) => refused += 1,
        }
    }
    println!("header grammars: {refused} refused, {accepted} still genuine");
    assert!(refused > CASES / 2);
}

/// Tokens of every kind: what is accepted is the genuine token and nothing else.
#[test]
fn fuzz_signed_tokens() {
    let mut random = Random(0x1234_5678_9abc_def1);
    let names = ["netlify", "bird", "qstash", "livekit", "fusionauth", "atlassian-connect", "plaid", "google-pubsub"];
    let sides: Vec<_> = names
        .iter()
        .map(|name| {
            let side = Side::of(name);
            let header = side.preset.verify.signature_headers().next().unwrap().clone();
            let (sent, verifier) = (side.genuine(0, NOW), side.verifier(&[0]));
            let key = side.fetch(&verifier, &[0], &sent.request()).unwrap();
            (side, verifier, sent, header, key)
        })
        .collect();
    for case in 0..CASES {
        // Public keys are slow to check, so they get every sixteenth case.
        let (side, verifier, genuine, header, key) = &sides[if case % 16 == 0 { 6 + case / 16 % 2 } else { case % 6 }];
        let value = genuine.headers[header].as_bytes().to_vec();
        let mut bent = value.clone();
        random.bend(&mut bent, b"eyJhbGciOiJIUzI1NiJ9._-=AQ {}\"");
        let Ok(bent_header) = http::HeaderValue::from_bytes(&bent) else { continue };
        let mut headers = genuine.headers.clone();
        headers.insert(header, bent_header);
        let request = Request { headers: &headers, ..genuine.request() };
        let _ = verifier.key_request(&request);
        let verdict = verifier.verify_with(&request, NOW, key.as_ref());
        assert!(verdict.is_err() || bent == value, "{}: {}", side.preset.name, String::from_utf8_lossy(&bent));
    }
}

/// What Amazon signs. Strange bytes in other fields do not matter.
#[derive(Debug, PartialEq, serde::Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Message {
    message: String,
    message_id: String,
    subject: Option<String>,
    timestamp: String,
    topic_arn: String,
    r#type: String,
}

/// Amazon's message: whatever happens to it, only Amazon's hosts are asked, and what is accepted says the same as before.
#[test]
fn fuzz_certificate_text_and_address() {
    let mut random = Random(0x0bad_cafe_dead_beef);
    let side = Side::of("aws-sns");
    let (genuine, verifier) = (side.genuine(0, NOW), side.verifier(&[0]));
    let key = side.fetch(&verifier, &[0], &genuine.request()).unwrap().unwrap();
    let signed = |body: &[u8]| serde_json::from_slice::<Message>(body).ok();
    let (original, mut asked, mut accepted) = (signed(&genuine.body).unwrap(), 0, 0);
    let address = genuine.body.windows(8).position(|window| window == b"https://").unwrap();
    for case in 0..CASES {
        let mut body = genuine.body.clone();
        if case % 2 == 0 {
            // Aim at the address, which is what an attacker would change.
            let mut part = body[address..address + 90].to_vec();
            random.bend(&mut part, b"@:/.?#\\%[]evil.amazonaws.com-127");
            body.splice(address..address + 90, part);
        } else {
            random.bend(&mut body, b"\"\\{}:,nu0 \n/@.amazonaws");
        }
        let request = Request { body: &body, ..genuine.request() };
        let Ok(Some(wanted)) = verifier.key_request(&request) else { continue };
        asked += 1;
        let KeyRequest::Certificate { url } = &wanted else { panic!("{wanted:?}") };
        let host = url.strip_prefix("https://sns.").unwrap().split('/').next().unwrap();
        let ours = host.strip_suffix(".amazonaws.com").or_else(|| host.strip_suffix(".amazonaws.com.cn"));
        let region = ours.unwrap_or_else(|| panic!("{url}"));
        assert!(region.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-'), "{url}");
        // Checking with RSA is slow, and a change of the address alone does not change the message.
        if case % 8 == 1 && verifier.verify_with(&request, NOW, Some(&key)).is_ok() {
            assert_eq!(signed(&body).as_ref(), Some(&original), "{}", String::from_utf8_lossy(&body));
            accepted += 1;
        }
    }
    println!("certificates: {asked} asked for, {accepted} accepted with the same content");
    assert!(asked > 1_000 && accepted > 100);
}

/// Bodies that are nearly JSON: nothing panics, every range lies inside the body, and where a JSON parser is sure of a value
/// it is the same value.
#[test]
fn fuzz_paths_into_json() {
    let mut random = Random(0x00c0_ffee_1234_5677);
    let template =
        br#"{"a":{"b":[1,{"id":"x\u0041"},null]},"items":[{"id":"1","n":2},{"id":3}],"id":"evt_1","t":1700000000}"#;
    let plans = [
        "key = [\"/id\", \"/a/b/1/id\"]\ntype = \"/a/b/0\"\nentity = \"/t\"\nvolatile = [\"/a\", \"/a/b\", \"/t\"]\ntime = { from = \"/t\", unit = \"s\" }",
        "items = \"/items\"\nkey = \"/id\"\nvolatile = [\"/n\"]",
        "items = [\"/items/*/id\", \"/a/b\"]\nkey = \"/id\"\ndigest_if = [\"/n\"]",
        "key = \"/id\"",
    ];
    let scheme = scheme_from("algorithm = \"token\"\nsignature = { header = \"x-test-token\" }");
    let verifier = Verifier::new(&scheme, &secrets(&["letmein"]), None).unwrap();
    let identifiers = plans.map(|plan| {
        let identify: Identify = toml::from_str(plan).unwrap();
        Identifier::new(&identify, &scheme, MissingKey::Digest).unwrap()
    });
    let genuine = Sent::new(b"").with("x-test-token", "letmein");
    let mut same = 0;
    for case in 0..CASES {
        let mut body = template.to_vec();
        random.bend(&mut body, b"{}[]\":,\\u0 id\xff\xc3");
        let request = Request { body: &body, ..genuine.request() };
        let verified = verifier.verify(&request, NOW).unwrap();
        let Ok(identified) = identifiers[case % plans.len()].identify(&verified) else { continue };
        for item in identified.items() {
            assert!(body.get(item.body.clone()).is_some());
            assert!(!item.key.as_bytes().is_empty());
        }
        if case % 4 == 3
            && let [item] = identified.items()
            && item.quarantine.is_none()
            && let Ok(value) = serde_json::from_slice::<serde_json::Value>(&body)
            && let Some(id) = value["id"].as_str().filter(|id| !id.is_empty() && id.len() < 200)
        {
            assert_eq!(item.key.as_bytes(), id.as_bytes(), "{}", String::from_utf8_lossy(&body));
            same += 1;
        }
    }
    assert!(same > 10_000, "{same}");
}

/// Forms, queries and multipart bodies of strangers.
#[test]
fn fuzz_forms() {
    let mut random = Random(0x5151_2323_8787_0001);
    let sides: Vec<_> = ["twilio", "braintree", "dropbox-sign", "mandrill", "plivo", "mercado-pago", "mollie-classic"]
        .iter()
        .map(|name| {
            let side = Side::of(name);
            let (sent, verifier) = (side.genuine(0, NOW), side.verifier(&[0]));
            (side, sent, verifier)
        })
        .collect();
    for case in 0..CASES / 2 {
        let (side, genuine, verifier) = &sides[case % sides.len()];
        let mut sent = genuine.clone();
        random.bend(&mut sent.body, b"&=%+2Bf;-\r\n\"{}");
        let mut path = sent.path.clone().into_bytes();
        if case % 3 == 0 {
            random.bend(&mut path, b"&=%+?#/");
        }
        sent.path = String::from_utf8_lossy(&path).into_owned();
        let request = sent.request();
        if verifier.verify(&request, NOW).is_ok() {
            let _ = side.identify(&sent, NOW);
        }
    }
}

/// The simplest forgery of all: another provider's signature.
#[test]
fn a_signature_of_one_preset_is_not_accepted_by_another() {
    let (signing, _) = key_pairs("stripe")[0];
    for preset in Preset::all().iter().filter(|preset| preset.verify.params().is_empty() && !preset.verify.needs_url())
    {
        let Ok(verifier) = Verifier::new(&preset.verify, &secrets(&[signing]), None) else { continue };
        let sent = crate::kit::genuine(crate::kit::preset("stripe"), signing, NOW);
        assert_eq!(verifier.verify(&sent.request(), NOW).is_ok(), preset.name == "stripe", "{}", preset.name);
    }
}
