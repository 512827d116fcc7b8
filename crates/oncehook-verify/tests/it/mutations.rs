//! For every preset: the genuine request is accepted, and every way of bending it is refused.
//!
//! The requests come from the presets' own samples and are signed with the presets' own data, so a new preset is in this
//! matrix as soon as its file is there.

use http::HeaderMap;
use oncehook_verify::{Integrity, Preset, Rejection, Settings, UnixMicros, Verifier};

use crate::kit::{NOW, Sent, Side, check, genuine, key_pairs, scheme, secrets};

/// A bent request and what was done to it.
type Mutation = (String, Sent);

/// The fewest mutations of a preset.
const FEWEST: usize = 25;

#[test]
fn every_preset_accepts_the_genuine_request_and_refuses_every_mutation() {
    let (mut total, mut fewest) = (0, usize::MAX);
    for side in Side::all() {
        let name = &side.preset.name;
        let sent = side.genuine(0, NOW);
        assert_eq!(side.check(&[0], &sent, NOW), Ok(0), "{name}");

        let mutations = mutations(&side, &sent);
        assert!(mutations.len() >= FEWEST, "{name}: only {} mutations", mutations.len());
        for (what, mutation) in &mutations {
            assert!(side.check(&[0], mutation, NOW).is_err(), "{name}: accepted although {what}");
        }
        assert!(side.check(&[1], &sent, NOW).is_err(), "{name}: accepted with another secret");
        total += mutations.len() + 1;
        fewest = fewest.min(mutations.len() + 1);
    }
    println!("{} presets, {total} mutations refused, at least {fewest} of each", Preset::all().len());
}

#[test]
fn every_preset_with_a_time_refuses_old_and_future_requests() {
    let mut timed = 0;
    for side in Side::all() {
        let name = &side.preset.name;
        let secs = |secs: i64| UnixMicros(NOW.0 + secs * 1_000_000);
        if let Some(tolerance) = side.preset.verify.default_tolerance_secs() {
            let tolerance = i64::try_from(tolerance).unwrap();
            let sent = side.genuine(0, NOW);
            for distance in [-tolerance - 1, tolerance + 1, 400_000_000] {
                let verdict = side.check(&[0], &sent, secs(distance));
                assert!(verdict.is_err_and(|rejection| rejection.is_genuine()), "{name}: {distance} s away");
            }
            assert_eq!(side.check(&[0], &sent, secs(tolerance)), Ok(0), "{name}: exactly at the boundary");
            assert_eq!(side.check(&[0], &sent, secs(-tolerance)), Ok(0), "{name}: exactly at the boundary");
            timed += 1;
        }
    }
    for name in ["atlassian-connect", "qstash", "livekit", "bird", "google-pubsub"] {
        let side = Side::of(name);
        let sent = side.genuine(0, NOW);
        for secs in [-20, 311, 100_000] {
            let now = UnixMicros(NOW.0 + secs * 1_000_000);
            assert!(side.check(&[0], &sent, now).is_err(), "{name}: a token judged {secs} s later");
        }
        timed += 1;
    }
    assert!(timed > 40, "{timed}");
}

#[test]
fn during_a_rotation_both_secrets_are_accepted_and_afterwards_only_the_new_one() {
    let mut rotated = 0;
    for side in Side::all().filter(|side| !side.preset.verify.fetches_keys()) {
        let name = &side.preset.name;
        let (by_old, by_new) = (side.genuine(0, NOW), side.genuine(1, NOW));
        assert_eq!(side.check(&[0, 1], &by_old, NOW), Ok(0), "{name}");
        assert_eq!(side.check(&[0, 1], &by_new, NOW), Ok(1), "{name}");
        assert_eq!(side.check(&[1, 0], &by_old, NOW), Ok(1), "{name}");
        assert_eq!(side.check(&[1], &by_new, NOW), Ok(0), "{name}");
        assert!(side.check(&[1], &by_old, NOW).is_err(), "{name}");
        rotated += 1;
    }
    assert_eq!(rotated, Preset::all().len() - 4, "all but those whose keys are fetched");
}

/// The same where the provider keeps its keys at an address: it publishes the new one beside the old one, then takes the old
/// one away. Each is good under its own name only.
#[test]
fn r2_during_a_rotation_both_published_keys_are_accepted_and_afterwards_only_the_new_one() {
    let mut rotated = Vec::new();
    for side in Side::all().filter(|side| side.preset.verify.fetches_keys()) {
        let name = side.preset.name.as_str();
        let (by_old, by_new) = (side.genuine_under(0, 0, NOW), side.genuine_under(1, 1, NOW));
        assert_eq!(side.check_published(&[0], &by_old, NOW), Ok(0), "{name}");
        assert!(side.check_published(&[0], &by_new, NOW).is_err(), "{name}: not published yet");
        for both in [[0, 1], [1, 0]] {
            assert_eq!(side.check_published(&both, &by_old, NOW), Ok(0), "{name}");
            assert_eq!(side.check_published(&both, &by_new, NOW), Ok(0), "{name}");
            for crossed in [side.genuine_under(0, 1, NOW), side.genuine_under(1, 0, NOW)] {
                let verdict = side.check_published(&both, &crossed, NOW);
                assert_eq!(verdict, Err(Rejection::SignatureMismatch), "{name}: under the other's name");
            }
        }
        assert_eq!(side.check_published(&[1], &by_new, NOW), Ok(0), "{name}");
        assert_eq!(side.check_published(&[1], &by_old, NOW), Err(Rejection::KeyUnknown), "{name}");
        rotated.push(name);
    }
    assert_eq!(rotated, ["aws-sns", "google-pubsub", "paypal", "plaid"]);
}

/// One request signed with both secrets, as Stripe and Standard Webhooks send it: a receiver with either accepts it.
#[test]
fn a_request_signed_twice_is_accepted_by_either_secret() {
    let [(old, _), (new, _)] = key_pairs("stripe");
    let preset = Preset::named("stripe").unwrap();
    let first = genuine(preset, old, NOW).header("stripe-signature");
    let second = genuine(preset, new, NOW).header("stripe-signature");
    let (_, second) = second.split_once(',').unwrap();
    let both = genuine(preset, old, NOW).replacing("stripe-signature", format!("{first},{second}"));
    assert_eq!(check(scheme("stripe"), &[old], &both, NOW), Ok(0));
    assert_eq!(check(scheme("stripe"), &[new], &both, NOW), Ok(0));
}

/// The same for senders that use one header per secret, or one header several times.
#[test]
fn a_header_per_secret_is_accepted_by_either_secret() {
    for (name, second) in [
        ("box", "box-signature-secondary"),
        ("docusign", "x-docusign-signature-2"),
        ("mollie", "x-mollie-signature"),
        ("recurly", "recurly-signature"),
    ] {
        let side = Side::of(name);
        let header = side.preset.verify.signature_headers().next().unwrap().to_string();
        let (old, new) = (side.genuine(0, NOW).header(&header), side.genuine(1, NOW).header(&header));
        let both = match name {
            "recurly" => side.genuine(0, NOW).replacing(&header, format!("{old},{}", new.split_once(',').unwrap().1)),
            _ => side.genuine(0, NOW).with(second, new),
        };
        assert_eq!(side.check(&[0], &both, NOW), Ok(0), "{name}");
        assert_eq!(side.check(&[1], &both, NOW), Ok(0), "{name}");
    }
}

#[test]
fn trap_13_the_configured_address_is_signed_where_the_sender_signs_it() {
    let mut signed = Vec::new();
    for side in Side::all().filter(|side| side.preset.verify.needs_url()) {
        let name = &side.preset.name;
        let sent = side.genuine(0, NOW);
        let at = |url: Option<&str>| {
            let settings = Settings { url: url.map(str::to_owned), ..side.settings.clone() };
            Verifier::with(&side.preset.verify, &secrets(&[&side.pairs[0].1]), settings)
        };
        assert!(at(None).is_err(), "{name} works without an address");
        for url in [
            "https://gateway.example/webhooks/test/",
            "https://gateway.example/webhooks/Test",
            "https://evil.example/webhooks/test2",
            "http://gateway.example/webhooks/te%73t",
        ] {
            let verifier = at(Some(url)).unwrap();
            // Connect tokens are bound to the path alone, and a slash at its end does not count.
            let request = sent.request();
            let verdict = verifier.verify(&request, NOW);
            assert!(
                verdict.is_err() || (name == "atlassian-connect" && url.ends_with('/')),
                "{name}: accepted at {url}"
            );
        }
        let mut asked = sent.clone();
        asked.path.push_str("?added=1");
        assert!(side.check(&[0], &asked, NOW).is_err(), "{name}: the query can be changed");
        signed.push(name.clone());
    }
    signed.sort();
    assert_eq!(
        signed,
        [
            "atlassian-connect",
            "bird",
            "contentful",
            "hubspot",
            "hubspot-v2",
            "mandrill",
            "plivo",
            "qstash",
            "square",
            "trello",
            "twilio"
        ]
    );
}

#[test]
fn values_that_must_be_configured_decide() {
    for side in Side::all() {
        for param in side.preset.verify.params() {
            let name = &side.preset.name;
            let mut other = side.settings.clone();
            other.params.insert(param.to_owned(), "somebody-else".to_owned());
            let sent = side.genuine(0, NOW);
            let wrong = Side { settings: other.clone(), ..Side::of(name) };
            assert!(wrong.check(&[0], &sent, NOW).is_err(), "{name}: {param} does not matter");
            other.params.remove(param);
            let without = Verifier::with(&side.preset.verify, &[], other);
            assert!(without.is_err(), "{name} works without {param}");
        }
    }
}

/// Signed fields of bodies that are not signed whole: each of these texts may not be changed.
#[test]
fn fields_that_are_signed_cannot_be_changed() {
    for (name, texts) in [
        ("adyen", &["evt_1", "TestMerchant", "order-1", "4200", "EUR", "AUTHORISATION", "true"][..]),
        ("mailgun", &["50-evt_1-aaa"]),
        ("dropbox-sign", &["signature_request_viewed"]),
        ("aws-sns", &["evt_1", "MyTopic", "My First Message", "Hello world!", "Notification", "2023-11-14"]),
        ("braintree", &["PG5vdGlmaWNhdGlvbj48", "b25fY2hhcmdlZF"]),
        ("twilio", &["AC0000", "MessageStatus", "delivered", "%2B1555"]),
        ("plivo", &["14155551234", "evt_1", "Units=1"]),
        ("mandrill", &["mandrill_events", "evt_1"]),
        ("paddle-classic", &["evt_1", "subscription_created", "active"]),
        ("paypal", &["evt_1", "42.00", "COMPLETED", "{"]),
    ] {
        let side = Side::of(name);
        let sent = side.genuine(0, NOW);
        assert_eq!(side.preset.verify.integrity(), Integrity::Fields, "{name}");
        for text in texts {
            let at = find(&sent.body, text.as_bytes()).unwrap_or_else(|| panic!("{name} has no {text}"));
            for position in at..at + text.len() {
                let mut bent = sent.clone();
                bent.body[position] ^= 1;
                assert!(side.check(&[0], &bent, NOW).is_err(), "{name}: {text} was changed at {position}");
            }
        }
    }
}

fn mutations(side: &Side, sent: &Sent) -> Vec<Mutation> {
    let mut all = Vec::new();
    let (plain_headers, plain_body) = plain(side);
    for name in sent.headers.keys().filter(|name| !plain_headers.contains_key(*name)) {
        header_mutations(side, sent, name.as_str(), &mut all);
    }
    if side.preset.verify.integrity() == Integrity::Body {
        body_mutations(sent, &mut all);
    }
    if sent.body != plain_body {
        written_mutations(sent, &plain_body, &mut all);
    }
    if let Some((path, query)) =
        sent.path.split_once('?').filter(|_| side.preset.verify.signature_place().starts_with("query:"))
    {
        for position in 0..query.len() {
            let mut bytes = query.as_bytes().to_vec();
            bytes[position] ^= 1;
            let query = String::from_utf8(bytes).unwrap();
            all.push((
                format!("character {position} of the query differs"),
                Sent { path: format!("{path}?{query}"), ..sent.clone() },
            ));
        }
        all.push(("there is no query".to_owned(), Sent { path: path.to_owned(), ..sent.clone() }));
        all.push((
            "the query is there twice".to_owned(),
            Sent { path: format!("{path}?{query}&{query}"), ..sent.clone() },
        ));
    }
    all
}

/// The sample before it is signed.
fn plain(side: &Side) -> (HeaderMap, Vec<u8>) {
    if side.preset.name == "paddle-classic" {
        let sent = side.genuine(0, NOW);
        let body = find(&sent.body, b"&p_signature").map(|at| sent.body[..at].to_vec()).unwrap();
        return (sent.headers, body);
    }
    side.preset.sample.render("evt_1", None, NOW).unwrap()
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack.windows(needle.len()).position(|window| window == needle)
}

/// Every character, every length, and every number of a header that belongs to the signature.
fn header_mutations(side: &Side, sent: &Sent, name: &str, all: &mut Vec<Mutation>) {
    let value = sent.header(name);
    let mut replace = |what: String, value: Vec<u8>| {
        if http::HeaderValue::from_bytes(&value).is_ok() {
            all.push((what, sent.clone().replacing(name, value)));
        }
    };
    for position in 0..value.len() {
        let mut bytes = value.clone().into_bytes();
        bytes[position] ^= 1;
        replace(format!("character {position} of {name} differs"), bytes);
    }
    for length in 0..value.len() {
        replace(format!("{name} is cut to {length}"), value.as_bytes()[..length].to_vec());
    }
    for (what, text) in [
        ("followed by a character", format!("{value}0")),
        ("padded", format!("{value}=")),
        ("quoted", format!("\"{value}\"")),
        ("full of zeros", value.chars().map(|c| if c.is_ascii_alphanumeric() { '0' } else { c }).collect()),
        ("a word", "none".to_owned()),
        ("a star", "*".to_owned()),
        ("a negative number", "-1700000001".to_owned()),
        ("a number with a sign", "+1700000001".to_owned()),
        ("a number with an exponent", "1.7e9".to_owned()),
        ("very long", "a".repeat(5_000)),
    ] {
        replace(format!("{name} is {what}"), text.into_bytes());
    }
    // In a list a broken entry does not spoil the good one beside it; anywhere else it does.
    let is_list = ["circleci", "pagerduty", "revolut", "plivo"].contains(&side.preset.name.as_str());
    if !is_list && !value.contains([',', ';', '|']) {
        replace(format!("{name} is after a space"), format!(" {value}").into_bytes());
        for between in ["", ",", ";", " "] {
            replace(format!("{name} is doubled"), format!("{value}{between}{value}").into_bytes());
        }
    }
    replace(format!("{name} holds a tab"), format!("{value}\t").into_bytes());
    replace(format!("{name} holds a strange byte"), [value.as_bytes(), b"\xff"].concat());
    all.push((format!("there is no {name}"), sent.clone().without(name)));
    // Mollie sends the header once per secret, so twice is not wrong there.
    if side.preset.name != "mollie" {
        all.push((format!("{name} is there twice"), sent.clone().with(name, &value)));
        all.push((format!("a wrong {name} stands beside it"), sent.clone().with(name, "x")));
    }
}

fn body_mutations(sent: &Sent, all: &mut Vec<Mutation>) {
    let body = &sent.body;
    for position in (0..body.len()).step_by(7).chain([body.len() - 1]) {
        let mut bent = sent.clone();
        bent.body[position] ^= 1;
        all.push((format!("byte {position} of the body differs"), bent));
    }
    for (what, bytes) in [
        ("empty", Vec::new()),
        ("one byte shorter", body[..body.len() - 1].to_vec()),
        ("one byte longer", [body, &b"x"[..]].concat()),
        ("followed by a line feed", [body, &b"\n"[..]].concat()),
        ("followed by CR LF", [body, &b"\r\n"[..]].concat()),
        ("followed by NUL", [body, &b"\0"[..]].concat()),
        ("after a byte order mark", [&b"\xef\xbb\xbf"[..], body].concat()),
        ("after a space", [&b" "[..], body].concat()),
        ("doubled", [&body[..], body].concat()),
    ] {
        all.push((format!("the body is {what}"), Sent { body: bytes, ..sent.clone() }));
    }
}

/// What signing wrote into the body: the signature, and the time where it stands there.
fn written_mutations(sent: &Sent, plain: &[u8], all: &mut Vec<Mutation>) {
    let body = &sent.body;
    let start = body.iter().zip(plain).take_while(|(left, right)| left == right).count();
    let end = body.iter().rev().zip(plain.iter().rev()).take_while(|(left, right)| left == right).count();
    let end = body.len().saturating_sub(end).max(start);
    assert!(end - start > 8, "nothing was written");
    for position in start..end {
        let mut bent = sent.clone();
        bent.body[position] ^= 1;
        all.push((format!("byte {position} of the signature in the body differs"), bent));
        let mut cut = sent.clone();
        cut.body.remove(position);
        all.push((format!("byte {position} of the signature in the body is missing"), cut));
    }
    all.push(("the body is not signed".to_owned(), Sent { body: plain.to_vec(), ..sent.clone() }));
    all.push(("the body is empty".to_owned(), Sent { body: Vec::new(), ..sent.clone() }));
    all.push(("the body is cut".to_owned(), Sent { body: body[..body.len() / 2].to_vec(), ..sent.clone() }));
}
