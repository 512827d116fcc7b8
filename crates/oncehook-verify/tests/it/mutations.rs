//! For every preset: the genuine request is accepted, and every way of bending it is refused.

use oncehook_verify::{Integrity, Preset, UnixMicros};

use crate::kit::{NOW, Sent, check, genuine, key_pairs, scheme};

/// A bent request and what was done to it.
type Mutation = (String, Sent);

#[test]
fn every_preset_accepts_the_genuine_request_and_refuses_every_mutation() {
    for preset in Preset::all() {
        let (signing, verifying) = key_pairs(&preset.name)[0];
        let sent = genuine(preset, signing, NOW);
        assert_eq!(check(&preset.verify, &[verifying], &sent, NOW), Ok(0), "{}", preset.name);

        let mutations = mutations(preset, signing, &sent);
        assert!(mutations.len() >= 25, "{}: only {} mutations", preset.name, mutations.len());
        for (what, mutation) in mutations {
            let verdict = check(&preset.verify, &[verifying], &mutation, NOW);
            assert!(verdict.is_err(), "{}: accepted although {what}", preset.name);
        }
    }
}

#[test]
fn during_a_rotation_both_secrets_are_accepted_and_afterwards_only_the_new_one() {
    for preset in Preset::all() {
        let [(old_signs, old), (new_signs, new)] = key_pairs(&preset.name);
        let by_old = genuine(preset, old_signs, NOW);
        let by_new = genuine(preset, new_signs, NOW);
        assert_eq!(check(&preset.verify, &[old, new], &by_old, NOW), Ok(0), "{}", preset.name);
        assert_eq!(check(&preset.verify, &[old, new], &by_new, NOW), Ok(1), "{}", preset.name);
        assert_eq!(check(&preset.verify, &[new], &by_new, NOW), Ok(0), "{}", preset.name);
        assert!(check(&preset.verify, &[new], &by_old, NOW).is_err(), "{}", preset.name);
    }
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

fn mutations(preset: &Preset, signing: &str, sent: &Sent) -> Vec<Mutation> {
    let mut all = Vec::new();
    signature_mutations(preset, sent, &mut all);
    if preset.verify.integrity() == Integrity::Body {
        body_mutations(sent, &mut all);
    }
    for header in
        ["x-slack-request-timestamp", "webhook-timestamp", "svix-timestamp", "x-signature-timestamp"]
    {
        if sent.headers.contains_key(header) {
            for value in [
                "",
                "0",
                "1700000002",
                "-1700000001",
                "+1700000001",
                "1700000001.0",
                "1.7e9",
                " 1700000001",
                "1700000001 ",
                "1700000001000",
                "0x6553f101",
                "now",
            ] {
                all.push((format!("{header} is {value:?}"), sent.clone().replacing(header, value)));
            }
            all.push((format!("{header} is missing"), sent.clone().without(header)));
            all.push((format!("{header} is there twice"), sent.clone().with(header, sent.header(header))));
        }
    }
    for header in ["webhook-id", "svix-id"] {
        if sent.headers.contains_key(header) {
            for value in ["", "evt_2", "EVT_1", "evt_1 ", "evt_1.1700000001"] {
                all.push((format!("{header} is {value:?}"), sent.clone().replacing(header, value)));
            }
            all.push((format!("{header} is missing"), sent.clone().without(header)));
            all.push((format!("{header} is there twice"), sent.clone().with(header, "evt_1")));
        }
    }
    if preset.verify.default_tolerance_secs().is_some() {
        for (what, secs) in [("old", -301), ("in the future", 301), ("very old", -100_000_000)] {
            let at = UnixMicros(NOW.0 + secs * 1_000_000);
            all.push((format!("it is {what}"), genuine(preset, signing, at)));
        }
    }
    all
}

fn signature_mutations(preset: &Preset, sent: &Sent, all: &mut Vec<Mutation>) {
    let name = preset.verify.signature_headers().next().unwrap().as_str();
    let value = sent.header(name);
    let mut replace = |what: String, value: Vec<u8>| {
        if http::HeaderValue::from_bytes(&value).is_ok() {
            all.push((what, sent.clone().replacing(name, value)));
        }
    };
    for position in 0..value.len() {
        let mut bytes = value.clone().into_bytes();
        bytes[position] ^= 1;
        replace(format!("character {position} of the signature differs"), bytes);
    }
    for length in 0..value.len() {
        replace(format!("the signature is cut to {length}"), value.as_bytes()[..length].to_vec());
    }
    for (what, text) in [
        ("followed by a character", format!("{value}0")),
        ("padded", format!("{value}=")),
        ("quoted", format!("\"{value}\"")),
        ("before a semicolon", format!("{value};")),
        ("full of zeros", value.chars().map(|c| if c.is_ascii_alphanumeric() { '0' } else { c }).collect()),
        ("a word", "none".to_owned()),
        ("a star", "*".to_owned()),
        ("very long", "a".repeat(5_000)),
    ] {
        replace(format!("the signature is {what}"), text.into_bytes());
    }
    // Where the header is a list, a good entry beside a strange one is a rotation and not a mutation.
    if !["stripe", "standard-webhooks", "svix"].contains(&preset.name.as_str()) {
        for joined in [
            format!("{value} x"),
            format!("{value}{value}"),
            format!(" {value}"),
            format!("{value},{value}"),
            format!("{value};{value}"),
            format!("{value} {value}"),
        ] {
            replace("something stands beside the signature".to_owned(), joined.into_bytes());
        }
    }
    replace("the signature holds a tab".to_owned(), format!("{value}\t").into_bytes());
    replace("the signature holds a strange byte".to_owned(), [value.as_bytes(), b"\xff"].concat());
    all.push(("there is no signature".to_owned(), sent.clone().without(name)));
    all.push(("the signature is there twice".to_owned(), sent.clone().with(name, &value)));
    all.push(("a wrong signature stands beside it".to_owned(), sent.clone().with(name, "x")));
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
