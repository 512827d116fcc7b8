//! Properties that hold for any input. A failing case is printed by proptest and can be repeated from its seed.

use http::{HeaderMap, HeaderValue};
use oncehook_verify::{EventKey, MissingKey, Preset, Request, UnixMicros, Verifier};
use proptest::{collection::vec, prelude::*};

use crate::kit::{NOW, Sent, genuine, identify_with, key_pairs, secrets};

/// Presets that need nothing but a secret.
const SIMPLE: [&str; 8] = ["stripe", "github", "shopify", "slack", "standard-webhooks", "svix", "gitlab", "discord"];

/// Bytes that can stand in a header, mostly the ones that grammars care about.
fn header_bytes() -> impl Strategy<Value = Vec<u8>> {
    let byte = prop_oneof![
        4 => prop::sample::select(b"v1at=,; =sha256_0f".to_vec()),
        2 => 0x20u8..0x7f,
        1 => 0x80u8..=0xff,
    ];
    vec(byte, 0..200)
}

proptest! {
    #[test]
    fn different_parts_give_different_keys(a in vec(vec(any::<u8>(), 0..6), 2..5), b in vec(vec(any::<u8>(), 0..6), 2..5)) {
        let key = |parts: &[Vec<u8>]| EventKey::from_parts(&parts.iter().map(Vec::as_slice).collect::<Vec<_>>());
        prop_assert_eq!(a == b, key(&a) == key(&b));
    }

    #[test]
    fn parts_cut_at_another_place_give_different_keys(text in "[0-9:,a]{2,12}", left in 0usize..12, right in 0usize..12) {
        let (left, right) = (left % (text.len() + 1), right % (text.len() + 1));
        let key = |at: usize| EventKey::from_parts(&[&text.as_bytes()[..at], &text.as_bytes()[at..]]);
        prop_assert_eq!(left == right, key(left) == key(right));
    }

    #[test]
    fn keys_are_bounded_and_readable_back(id in vec(any::<u8>(), 1..600)) {
        let key = EventKey::from_parts(&[&id]);
        prop_assert!((1..=255).contains(&key.as_bytes().len()));
        prop_assert_eq!(EventKey::from_display(&key.display()), Some(key.clone()));
        prop_assert_eq!(EventKey::from_bytes(key.as_bytes()), Some(key));
    }

    #[test]
    fn no_random_headers_verify(preset in 0usize..8, signature in header_bytes(), timestamp in header_bytes(), id in header_bytes(), body in vec(any::<u8>(), 0..64)) {
        let preset = Preset::named(SIMPLE[preset]).unwrap();
        let (_, verifying) = key_pairs(&preset.name)[0];
        let verifier = Verifier::new(&preset.verify, &secrets(&[verifying]), None).unwrap();
        let mut headers = HeaderMap::new();
        for name in preset.verify.signature_headers() {
            headers.insert(name, HeaderValue::from_bytes(&signature).unwrap());
        }
        for name in ["webhook-timestamp", "svix-timestamp", "x-slack-request-timestamp", "x-signature-timestamp"] {
            headers.insert(name, HeaderValue::from_bytes(&timestamp).unwrap());
        }
        for name in ["webhook-id", "svix-id"] {
            headers.insert(name, HeaderValue::from_bytes(&id).unwrap());
        }
        let request = Request { method: "POST", path: "/", headers: &headers, body: &body };
        prop_assert!(verifier.verify(&request, NOW).is_err());
    }

    #[test]
    fn whatever_is_signed_verifies_and_whatever_is_changed_does_not(preset in 0usize..8, body in vec(any::<u8>(), 1..200), at in any::<prop::sample::Index>(), bit in 0u8..8) {
        let preset = Preset::named(SIMPLE[preset]).unwrap();
        let (signing, verifying) = key_pairs(&preset.name)[0];
        let mut sent = Sent::new(&body).signed(&preset.verify, signing, "evt_1", NOW);
        let verifier = Verifier::new(&preset.verify, &secrets(&[verifying]), None).unwrap();
        prop_assert!(verifier.verify(&sent.request(), NOW).is_ok());
        let at = at.index(body.len());
        sent.body[at] ^= 1 << bit;
        let still_accepted = verifier.verify(&sent.request(), NOW).is_ok();
        prop_assert_eq!(still_accepted, preset.name == "gitlab", "only a token signs nothing");
    }

    #[test]
    fn any_time_is_judged_without_overflow(now in any::<i64>()) {
        let preset = Preset::named("stripe").unwrap();
        let (signing, verifying) = key_pairs("stripe")[0];
        let verifier = Verifier::new(&preset.verify, &secrets(&[verifying]), None).unwrap();
        let sent = genuine(preset, signing, NOW);
        let near = UnixMicros(now).as_secs().abs_diff(NOW.as_secs()) <= 300;
        prop_assert_eq!(verifier.verify(&sent.request(), UnixMicros(now)).is_ok(), near);
    }

    #[test]
    fn extraction_takes_any_body(body in vec(any::<u8>(), 0..200)) {
        identify(&body)?;
    }

    #[test]
    fn extraction_takes_anything_that_looks_like_json(body in "[\\[\\]{}\":,a-c0-9\\\\ud. ntre-]{0,60}") {
        identify(body.as_bytes())?;
    }

    #[test]
    fn the_id_found_is_the_id_a_json_parser_finds(id in "\\PC{1,40}", before in vec("[a-h]{1,3}", 0..4)) {
        let members: String = before.iter().enumerate().map(|(n, name)| format!("\"{name}{n}\":[{{\"id\":1}}],")).collect();
        let body = format!("{{{members}\"id\":{}}}", serde_json::Value::from(id.as_str()));
        let identified = identify_with("key = \"/id\"", MissingKey::Digest, Sent::new(body.as_bytes())).unwrap();
        let key = &identified.items()[0].key;
        prop_assert_eq!(key.clone(), EventKey::from_parts(&[id.as_bytes()]));
    }
}

/// Nothing panics, and every range lies inside the body.
fn identify(body: &[u8]) -> Result<(), TestCaseError> {
    for toml in [
        "key = [\"/a\", \"/b/0\"]\ntype = \"/a/b\"\nentity = \"/c\"\nvolatile = [\"/a\", \"/a/b\", \"/c\"]\ntime = { from = \"/a\", unit = \"s\" }",
        "items = \"/a\"\nkey = \"/b\"\nvolatile = [\"/c\"]",
        "items = \"\"\nkey = \"/b\"",
    ] {
        if let Ok(identified) = identify_with(toml, MissingKey::Digest, Sent::new(body)) {
            for item in identified.items() {
                prop_assert!(body.get(item.body.clone()).is_some());
                prop_assert!(!item.key.as_bytes().is_empty());
            }
        }
    }
    Ok(())
}
