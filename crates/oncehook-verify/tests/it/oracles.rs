//! No unsigned handshake answers with a signature that could be used: every preset is driven as an oracle.
//!
//! The attacker of these tests asks each handshake that anybody may use, for many texts, and looks for anything in the answers
//! that would serve as the signature of a request which the same source accepts.

use std::collections::BTreeMap;

use base64::{Engine as _, engine::general_purpose::STANDARD_NO_PAD};
use oncehook_verify::{Reply, Request, Verifier};

use crate::kit::{NOW, Sent, Side, secret, secrets};

/// A handshake as its preset's file has it.
#[derive(Debug, serde::Deserialize)]
struct Rule {
    #[serde(default = "post")]
    method: String,
    #[serde(default)]
    unsigned: bool,
    #[serde(default)]
    when: BTreeMap<String, toml::Value>,
    #[serde(default)]
    present: Vec<String>,
    echo: Option<String>,
    body: Option<String>,
    #[serde(default)]
    headers: BTreeMap<String, String>,
}

fn post() -> String {
    "POST".to_owned()
}

/// The handshakes of a preset that anybody may use.
fn open_rules(name: &str) -> Vec<Rule> {
    #[derive(serde::Deserialize)]
    struct File {
        #[serde(default)]
        handshake: Vec<Rule>,
    }
    let path = format!("{}/src/presets/{name}.toml", env!("CARGO_MANIFEST_DIR"));
    let file: File = toml::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    file.handshake.into_iter().filter(|rule| rule.unsigned).collect()
}

impl Rule {
    /// The texts of the answer.
    fn texts(&self) -> impl Iterator<Item = &str> {
        self.body.iter().chain(self.headers.values()).map(String::as_str)
    }

    fn signs(&self) -> bool {
        self.texts().any(|text| text.contains("$(hmac-"))
    }

    /// Every place that the rule reads, with the value that it must have or else the attacker's.
    fn places(&self, side: &Side, chosen: &str) -> BTreeMap<String, String> {
        let mut places = BTreeMap::new();
        for text in self.texts() {
            for value in text.split("$(").skip(1) {
                let place = value.split(')').next().unwrap();
                let place =
                    ["hmac-hex:", "hmac-base64:"].iter().find_map(|prefix| place.strip_prefix(prefix)).unwrap_or(place);
                places.insert(place.to_owned(), chosen.to_owned());
            }
        }
        places.extend(self.present.iter().chain(&self.echo).map(|place| (place.clone(), chosen.to_owned())));
        for (place, wanted) in &self.when {
            let wanted = wanted.as_str().map_or_else(|| wanted.to_string(), str::to_owned);
            let wanted = wanted.strip_prefix("param:").map_or(wanted.as_str(), |name| &side.settings.params[name]);
            places.insert(place.clone(), wanted.to_owned());
        }
        places
    }

    /// What the handshake answers when the attacker puts a text into every place.
    fn ask(&self, side: &Side, verifier: &Verifier, chosen: &str) -> Option<Reply> {
        let (mut query, mut form, mut json) = (Vec::new(), Vec::new(), serde_json::Map::new());
        let mut sent = Sent::new(b"");
        for (place, value) in self.places(side, chosen) {
            if let Some(name) = place.strip_prefix("query:") {
                query.push(format!("{name}={}", encoded(&value)));
            } else if let Some(name) = place.strip_prefix("form:") {
                form.push(format!("{name}={}", encoded(&value)));
            } else if let Some(name) = place.strip_prefix("header:") {
                sent.headers.insert(http::HeaderName::try_from(name).unwrap(), value.parse().ok()?);
            } else if let Some(name) = place.strip_prefix('/') {
                json.insert(name.to_owned(), value.into());
            }
        }
        if !form.is_empty() {
            sent = sent.replacing("content-type", "application/x-www-form-urlencoded");
            sent.body = form.join("&").into_bytes();
        } else if !json.is_empty() {
            sent.body = serde_json::Value::Object(json).to_string().into_bytes();
        }
        let sent = sent.asking(&query.join("&"));
        let request = Request { method: &self.method, ..sent.request() };
        side.preset.handshakes.answer_unsigned(&request, verifier)
    }
}

fn encoded(text: &str) -> String {
    text.bytes()
        .map(|byte| if byte.is_ascii_alphanumeric() { (byte as char).to_string() } else { format!("%{byte:02X}") })
        .collect()
}

/// Texts that the signed content of some scheme could be.
fn chosen_texts(side: &Side) -> Vec<String> {
    let sample = String::from_utf8(side.genuine(0, NOW).body).unwrap_or_default();
    let mut texts = vec![sample.clone()];
    // Values of the sample's form, such as a payload.
    let fields = sample.split('&').filter_map(|pair| pair.split_once('='));
    texts.extend(fields.map(|(_, value)| decoded(value)));
    texts.extend(
        ["12345", "1", "true", "user_id=1", "a=1", "abc", "[]", "{}", "{\"a\":1}", "\"a\"", "PGE+PC9hPg==", "-"]
            .map(str::to_owned),
    );
    texts.extend((1..=64).map(|length| "0123456789abcdef".repeat(4)[..length].to_owned()));
    texts.extend((0..8).map(|number| format!("{}{number}", "x".repeat(508 + number))));
    texts.push("9b4507b3-9040-4669-9ca3-6b94edb50553".to_owned());
    texts.push(format!("v0:{}:{{}}", NOW.as_secs()));
    texts.push(format!("{}.{{}}", NOW.as_secs()));
    texts
}

fn decoded(text: &str) -> String {
    let bytes = text.replace("%2B", "+").replace("%2F", "/").replace("%3D", "=");
    bytes.replace("%0A", "\n")
}

/// Requests that would have the text as their signed content, in one of the ways that schemes have, signed with the key.
fn requests_over(side: &Side, text: &str) -> Vec<Sent> {
    let sample = side.preset.sample.render("evt_1", None, NOW).unwrap();
    let body = String::from_utf8(sample.1).unwrap();
    let mut bodies = vec![text.to_owned()];
    if side.preset.sample.form {
        let names = body.split('&').filter_map(|pair| pair.split_once('=')).map(|(name, _)| name);
        bodies.extend(names.map(|name| format!("{name}={}", encoded(text))));
    }
    let signed = |body: String| {
        let sent = Sent { headers: sample.0.clone(), body: body.into_bytes(), ..Sent::new(b"") };
        let signer =
            oncehook_verify::Signer::with(&side.preset.verify, &secret(&side.pairs[0].0), side.settings.clone());
        let signed = signer.unwrap().sign_whole(&sent.request(), "evt_1", NOW).ok()?;
        let path = signed.path(&sent.path).into_owned();
        let mut sent = Sent { body: signed.body.unwrap_or(sent.body), path, headers: sent.headers };
        signed.headers.into_iter().for_each(|(name, value)| drop(sent.headers.insert(name, value)));
        Some(sent)
    };
    bodies.into_iter().filter_map(signed).collect()
}

/// Everything in a text that could be a signature or a secret: as it is written, and as bytes.
fn proofs(text: &str) -> Vec<Vec<u8>> {
    let words = text.split(|byte: char| !byte.is_ascii_alphanumeric() && !"+/_-".contains(byte));
    let mut proofs = Vec::new();
    for word in words.filter(|word| word.len() >= 16) {
        proofs.push(word.as_bytes().to_vec());
        proofs.extend(hex::decode(word).ok());
        proofs.extend(STANDARD_NO_PAD.decode(word).ok());
    }
    proofs
}

fn proofs_of_reply(side: &Side, reply: &Reply, chosen: &str) -> Vec<Vec<u8>> {
    let mut text = String::from_utf8(reply.body.clone()).unwrap();
    reply.headers.iter().for_each(|(_, value)| text.push_str(&format!(" {value}")));
    // What the attacker has sent himself is no news to him, and what is public is no proof.
    let public = side.settings.params.values().flat_map(|value| proofs(value));
    let known: Vec<Vec<u8>> = proofs(chosen).into_iter().chain(public).collect();
    proofs(&text).into_iter().filter(|proof| !known.contains(proof)).collect()
}

fn proofs_of_request(sent: &Sent) -> Vec<Vec<u8>> {
    let mut text = decoded(&String::from_utf8(sent.body.clone()).unwrap()).replace("%7C", "|");
    sent.headers.values().for_each(|value| text.push_str(&format!(" {}", value.to_str().unwrap())));
    text.push_str(&format!(" {}", sent.path));
    proofs(&text)
}

#[test]
fn r2_no_unsigned_handshake_of_any_preset_signs_what_the_same_source_would_accept() {
    let (mut asked, mut answered) = (0, BTreeMap::new());
    for side in Side::all() {
        let name = side.preset.name.clone();
        let rules = open_rules(&name);
        if rules.is_empty() {
            continue;
        }
        let verifier = side.verifier(&[0, 1]);
        for chosen in chosen_texts(&side) {
            let replies: Vec<Reply> = rules.iter().filter_map(|rule| rule.ask(&side, &verifier, &chosen)).collect();
            asked += rules.len();
            *answered.entry(name.clone()).or_insert(0) += replies.len();
            let proofs: Vec<Vec<u8>> =
                replies.iter().flat_map(|reply| proofs_of_reply(&side, reply, &chosen)).collect();
            assert!(!proofs.contains(&side.pairs[0].1.clone().into_bytes()), "{name} tells its secret");
            for sent in requests_over(&side, &chosen) {
                if verifier.verify(&sent.request(), NOW).is_err() {
                    continue;
                }
                let forged = proofs_of_request(&sent).into_iter().find(|proof| proofs.contains(proof));
                assert_eq!(forged, None, "{name}: anybody can have {chosen:?} signed and send it");
            }
        }
    }
    assert!(asked > 1_000, "{asked}");
    let silent: Vec<&String> = answered.iter().filter(|(_, count)| **count == 0).map(|(name, _)| name).collect();
    assert_eq!(silent, Vec::<&String>::new(), "an oracle that never answered was not driven: {answered:?}");
}

/// The handshakes by which anybody gets something computed with the secret. Whoever adds one must look at this page.
#[test]
fn only_two_presets_sign_anything_for_strangers() {
    let signing: Vec<String> = Side::all()
        .map(|side| side.preset.name.clone())
        .filter(|name| open_rules(name).iter().any(Rule::signs))
        .collect();
    assert_eq!(signing, ["braintree", "x"]);
}

/// What a forger would send after he has asked, and what its explanation says.
#[test]
fn r2_content_that_could_be_a_challenge_is_refused_with_its_reason() {
    let x = Side::of("x");
    for body in ["12345", "user_id=1", "true", "a"] {
        let sent = x.sign(Sent::new(body.as_bytes()), 0, "", NOW);
        assert_eq!(x.check(&[0], &sent, NOW).unwrap_err().code(), "challenge_content", "{body}");
    }
    let sent = x.sign(Sent::new(b"{}"), 0, "", NOW);
    assert_eq!(x.check(&[0], &sent, NOW), Ok(0), "a body that no challenge can be");

    let braintree = Side::of("braintree");
    let form = |payload: &str| {
        let sent = Sent::new(format!("bt_payload={payload}").as_bytes());
        braintree.sign(sent.with("content-type", "application/x-www-form-urlencoded"), 0, "", NOW)
    };
    let challenge = "20f9f8ed05f77439fe955c977e4c8a53";
    for payload in [challenge, &challenge[..20]] {
        assert_eq!(braintree.check(&[0], &form(payload), NOW).unwrap_err().code(), "challenge_content");
    }
    for payload in [&challenge[..19], &format!("{challenge}0"), &challenge.to_uppercase(), "PGE%2BPC9hPg%3D%3D"] {
        assert_eq!(braintree.check(&[0], &form(payload), NOW), Ok(0), "{payload}");
        assert_eq!(braintree_answer(payload), None, "{payload}");
    }
    assert!(braintree_answer(challenge).is_some());

    let secrets = secrets(&[&x.pairs[0].1]);
    let forged = x.sign(Sent::new(b"12345"), 0, "", NOW);
    let explained =
        oncehook_verify::explain_with(&x.preset.verify, &secrets, &x.settings, &forged.request(), NOW, None).unwrap();
    assert!(explained.findings.join(" ").contains("forged"), "{:?}", explained.findings);
}

fn braintree_answer(challenge: &str) -> Option<Reply> {
    let side = Side::of("braintree");
    let sent = Sent::new(b"").asking(&format!("bt_challenge={challenge}"));
    let request = Request { method: "GET", ..sent.request() };
    side.preset.handshakes.answer_unsigned(&request, &side.verifier(&[0]))
}
