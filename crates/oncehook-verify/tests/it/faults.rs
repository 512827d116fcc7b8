//! One test per fault that this crate must survive; the numbers are those of the project's list of faults.

use oncehook_verify::{
    EventKey, Identified, MissingKey, Preset, Quarantine, Rejection, Secret, SetupError, Unidentified, UnixMicros,
    Verifier,
};

use crate::kit::{
    EVENT, NOW, Sent, Side, check, code, genuine, identify_with, item, item_of, key_pairs, scheme, secrets,
};

const WHSEC: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
const WHPK: &str = "whpk_11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo=";

/// A genuine Standard Webhooks request.
fn standard() -> Sent {
    Sent::new(EVENT).signed(scheme("standard-webhooks"), WHSEC, "msg_1", NOW)
}

fn standard_code(sent: &Sent) -> &'static str {
    code(scheme("standard-webhooks"), &[WHSEC], sent, NOW)
}

/// A genuine Stripe request, signed then.
fn stripe(at: UnixMicros) -> Sent {
    Sent::new(EVENT).signed(scheme("stripe"), "whsec_test_secret", "", at)
}

fn stripe_code(sent: &Sent, now: UnixMicros) -> &'static str {
    code(scheme("stripe"), &["whsec_test_secret"], sent, now)
}

#[test]
fn fault_27_ids_that_differ_in_case_space_or_form_stay_different() {
    let ids = [
        "evt_a",
        "EVT_A",
        "evt_a ",
        " evt_a",
        "\u{e9}",
        "e\u{301}",
        "evt_a\\u0000",
        &"a".repeat(256),
        &"a".repeat(257),
    ];
    let mut keys: Vec<EventKey> =
        ids.iter().map(|id| item_of("key = \"/id\"", &format!("{{\"id\":\"{id}\"}}")).key).collect();
    keys.sort();
    keys.dedup();
    assert_eq!(keys.len(), ids.len());
}

#[test]
fn fault_28_strange_ids_are_kept_as_bytes() {
    assert_eq!(item_of("key = \"/id\"", r#"{"id":"a\u0000b"}"#).key.as_bytes(), b"a\0b");
    assert_eq!(
        item_of("key = \"/id\"", r#"{"id":"'; DROP TABLE events; --"}"#).key.as_bytes(),
        b"'; DROP TABLE events; --"
    );
    let long = item_of("key = \"/id\"", &format!("{{\"id\":\"{}\"}}", "x".repeat(65_536)));
    assert!(long.key.as_bytes().starts_with(b"sha256-id:"));
    let header = item("key = \"header:x-id\"", Sent::new(b"{}").with("x-id", b"\xff\xfe"));
    assert_eq!(header.key.as_bytes(), b"\xff\xfe");
    assert_eq!(header.key.display(), "hex:fffe");
}

#[test]
fn fault_29_a_missing_id_follows_the_policy_and_is_never_empty() {
    let toml = "key = [\"/id\", \"header:x-part\"]";
    for body in ["{}", r#"{"id":""}"#, r#"{"id":null}"#, r#"{"id":{}}"#, "not json", ""] {
        for part in [None, Some(""), Some("p")] {
            let sent = || match part {
                None => Sent::new(body.as_bytes()),
                Some(part) => Sent::new(body.as_bytes()).with("x-part", part),
            };
            let digested = item(toml, sent());
            assert_eq!(digested.key, EventKey::of_digest(&digested.digest), "{body} {part:?}");
            assert_eq!(digested.quarantine, None);

            let Ok(Identified::One(waiting)) = identify_with(toml, MissingKey::Quarantine, sent()) else { panic!() };
            assert_eq!(waiting.quarantine, Some(Quarantine::MissingKey));
            assert_eq!(waiting.key, EventKey::of_digest(&waiting.digest));

            assert_eq!(identify_with(toml, MissingKey::Reject, sent()), Err(Unidentified::MissingKey));
        }
    }
    let incomplete = item(toml, Sent::new(br#"{"id":"a"}"#));
    assert_eq!(incomplete.key, EventKey::of_digest(&incomplete.digest), "one part missing, the whole key missing");
    assert_eq!(item(toml, Sent::new(br#"{"id":"a"}"#).with("x-part", "b")).key.as_bytes(), b"1:a,1:b");
}

#[test]
fn fault_30_composite_keys_are_unambiguous() {
    let key = |a: &str, b: &str| item_of("key = [\"/a\", \"/b\"]", &format!("{{\"a\":\"{a}\",\"b\":\"{b}\"}}")).key;
    assert_ne!(key("ab", "c"), key("a", "bc"));
    assert_ne!(key("1:a", "b"), key("1", "a,1:b"));
    assert_eq!(key("ab", "c"), key("ab", "c"));
}

#[test]
fn fault_58_empty_signature_after_version_is_rejected() {
    for value in ["v1,", "v1, ", "v1,=", "v1,v1,", ",", "v1", ""] {
        let sent = standard().replacing("webhook-signature", value);
        assert!(matches!(standard_code(&sent), "malformed_signature" | "no_known_signature"), "{value:?}");
    }
    assert_eq!(stripe_code(&stripe(NOW).replacing("stripe-signature", "t=1700000001,v1="), NOW), "malformed_signature");
}

#[test]
fn fault_59_a_signature_of_wrong_length_or_alphabet_is_rejected() {
    let good = standard().header("webhook-signature");
    let text = good.strip_prefix("v1,").unwrap();
    let url_safe = text.replace('+', "-").replace('/', "_");
    let mut cases = vec![
        text[..text.len() - 4].to_owned(),
        text.trim_end_matches('=').to_owned(),
        format!("{text}="),
        format!("{text}AAAA"),
        format!("{text}{text}"),
        format!("{text}\t"),
    ];
    if url_safe != text {
        cases.push(url_safe);
    }
    for text in cases {
        let sent = standard().replacing("webhook-signature", format!("v1,{text}"));
        assert_ne!(standard_code(&sent), "ok", "{text:?}");
    }
    // Well-formed base64 of a prefix of the right bytes: refused for its length, before any comparison.
    let prefix = standard().replacing("webhook-signature", format!("v1,{}", &text[..40]));
    assert_eq!(standard_code(&prefix), "malformed_signature");
    let sent = standard().replacing("webhook-signature", [good.as_bytes(), "é".as_bytes()].concat());
    assert_eq!(standard_code(&sent), "malformed_header");
    assert!(http::HeaderValue::from_bytes(b"v1,\0").is_err(), "NUL cannot even be in a header");
}

#[test]
fn fault_60_a_missing_empty_duplicated_or_joined_header_is_rejected() {
    let good = stripe(NOW).header("stripe-signature");
    assert_eq!(stripe_code(&stripe(NOW).without("stripe-signature"), NOW), "missing_header");
    assert_eq!(stripe_code(&stripe(NOW).replacing("stripe-signature", ""), NOW), "missing_timestamp");
    assert_eq!(stripe_code(&stripe(NOW).with("stripe-signature", "t=1,v1=00"), NOW), "duplicate_header");
    assert_eq!(stripe_code(&stripe(NOW).with("stripe-signature", &good), NOW), "duplicate_header");
    assert_eq!(
        stripe_code(&stripe(NOW).replacing("stripe-signature", format!("{good}, {good}")), NOW),
        "ok",
        "an unknown ` t` and a repeated v1 are a list"
    );
    assert_eq!(
        stripe_code(&stripe(NOW).replacing("stripe-signature", format!("{good},{good}")), NOW),
        "malformed_header"
    );

    let github = Sent::new(EVENT).signed(scheme("github"), "mysecret", "", NOW);
    let good = github.header("x-hub-signature-256");
    for joined in [format!("{good}, {good}"), format!("{good},{good}"), format!("{good} {good}")] {
        let sent = github.clone().replacing("x-hub-signature-256", joined);
        assert_eq!(code(scheme("github"), &["mysecret"], &sent, NOW), "malformed_signature");
    }
}

#[test]
fn fault_61_no_empty_or_placeholder_secret_and_none_at_all_is_an_error() {
    for text in ["", " ", "\n", "changeme", "whsec_", "whsec_...", "${SECRET}"] {
        assert!(Secret::new(text).is_err(), "{text:?}");
    }
    for side in Side::all().filter(|side| !side.preset.verify.fetches_keys()) {
        let error = Verifier::with(&side.preset.verify, &[], side.settings.clone()).unwrap_err();
        assert_eq!(error, SetupError::NoSecrets, "{}", side.preset.name);
        // Only a source that waits for its secret does without one, and that refuses everything.
        let refusing = Verifier::refusing(&side.preset.verify, side.settings.clone()).unwrap();
        let sent = side.genuine(0, NOW);
        assert!(refusing.verify(&sent.request(), NOW).is_err(), "{}", side.preset.name);
    }
    let error =
        |name: &str, texts: &[&str]| Verifier::new(scheme(name), &secrets(texts), None).unwrap_err().to_string();
    for text in ["whsec_!!not-base64!!", "whpk_AAAA", "whsk_nWGxne/9WmC6hEr0kuwsxERJxWl7MmkZcDusAxyuf2A=", "whpk_!"] {
        let message = error("standard-webhooks", &[WHSEC, text]);
        assert!(message.contains("secret 2"), "{message}");
        assert!(!message.contains(text) && !message.contains("nWGxne"), "{message}");
    }
    assert!(
        error("standard-webhooks", &["whsk_nWGxne/9WmC6hEr0kuwsxERJxWl7MmkZcDusAxyuf2A="])
            .contains("private signing key")
    );
    assert!(error("discord", &["abcd"]).contains("32 bytes"));
    assert!(error("discord", &["not hex"]).contains("hexadecimal"));
}

#[test]
fn fault_62_unknown_versions_are_ignored_and_the_algorithm_is_not_chosen_by_the_request() {
    let good = standard().header("webhook-signature");
    let with = |value: String| standard().replacing("webhook-signature", value);
    assert_eq!(standard_code(&with(format!("v9,xx none,yy {good}"))), "ok");
    assert_eq!(standard_code(&with(good.replace("v1,", "v9,"))), "no_known_signature");
    assert_eq!(standard_code(&with(good.replace("v1,", "none,"))), "no_known_signature");
    assert_eq!(standard_code(&with(vec!["v1,xx"; 33].join(" "))), "too_many_signatures");
    assert_eq!(standard_code(&with(vec!["v1,xx"; 10_000].join(" "))), "header_too_long");
    assert_eq!(
        code(scheme("standard-webhooks"), &[WHPK], &standard(), NOW),
        "no_known_signature",
        "v1 is not for a public key"
    );
    // The classic confusion: an HMAC made with the public key's bytes.
    let forged =
        Sent::new(EVENT).signed(scheme("standard-webhooks"), WHPK.strip_prefix("whpk_").unwrap(), "msg_1", NOW);
    for tag in ["v1,", "v1a,"] {
        let value = forged.header("webhook-signature").replace("v1,", tag);
        let sent = forged.clone().replacing("webhook-signature", value);
        assert_ne!(code(scheme("standard-webhooks"), &[WHPK], &sent, NOW), "ok");
    }
    let stripe_v0 = stripe(NOW).header("stripe-signature").replace("v1=", "v0=");
    assert_eq!(stripe_code(&stripe(NOW).replacing("stripe-signature", stripe_v0), NOW), "no_known_signature");
}

#[test]
fn fault_63_a_timestamp_is_digits_and_nothing_else() {
    for text in [
        "",
        "-1",
        "+1700000001",
        "1e10",
        "1.0",
        "0x1",
        " 1700000001",
        "1700000001 ",
        "seventeen",
        "17000000010000",
        "٣",
    ] {
        let sent = standard().replacing("webhook-timestamp", text);
        let expected = if text.is_ascii() { "malformed_timestamp" } else { "malformed_header" };
        assert_eq!(standard_code(&sent), expected, "{text:?}");
        if text.is_ascii() && !text.is_empty() {
            let header = stripe(NOW).header("stripe-signature").replace("1700000001", text);
            assert_eq!(
                stripe_code(&stripe(NOW).replacing("stripe-signature", header), NOW),
                "malformed_timestamp",
                "{text:?}"
            );
        }
    }
    assert_eq!(standard_code(&standard().without("webhook-timestamp")), "missing_header");
    let millis =
        Sent::new(EVENT).signed(scheme("stripe"), "whsec_test_secret", "", UnixMicros::from_secs(1_700_000_001_000));
    assert_eq!(stripe_code(&millis, NOW), "in_future", "milliseconds taken for seconds");
}

#[test]
fn fault_64_the_tolerance_is_exact_on_both_sides() {
    let signed_at = UnixMicros::from_secs(1_700_000_000);
    let sent = stripe(signed_at);
    let at = |micros: i64| stripe_code(&sent, UnixMicros(signed_at.0 + micros));
    assert_eq!(at(300_999_999), "ok");
    assert_eq!(at(301_000_000), "too_old");
    assert_eq!(at(-300_000_000), "ok");
    assert_eq!(at(-300_000_001), "in_future");
    let verdict = check(scheme("stripe"), &["whsec_test_secret"], &sent, UnixMicros(signed_at.0 + 400_000_000));
    assert_eq!(verdict, Err(Rejection::TooOld { age_secs: 400, tolerance_secs: 300 }));
    // Extremes do not overflow.
    assert_eq!(stripe_code(&sent, UnixMicros(i64::MAX)), "too_old");
    assert_eq!(stripe_code(&sent, UnixMicros(i64::MIN)), "in_future");
}

#[test]
fn fault_64_a_forgery_is_a_forgery_however_old() {
    let mut forged = stripe(UnixMicros::from_secs(1));
    forged.body.push(b' ');
    assert_eq!(stripe_code(&forged, NOW), "signature_mismatch");
}

#[test]
fn fault_65_the_tolerance_can_be_set_per_source() {
    let sent = stripe(UnixMicros(NOW.0 - 6 * 3_600 * 1_000_000));
    let verify = |tolerance| {
        let verifier = Verifier::new(scheme("stripe"), &secrets(&["whsec_test_secret"]), tolerance).unwrap();
        verifier.verify(&sent.request(), NOW).map(|_| ()).map_err(|rejection| rejection.code())
    };
    assert_eq!(verify(None), Err("too_old"));
    assert_eq!(verify(Some(6 * 3_600)), Ok(()));
    assert_eq!(verify(Some(6 * 3_600 - 1)), Err("too_old"));
    assert_eq!(verify(Some(u64::MAX)), Ok(()));
    let error = Verifier::new(scheme("github"), &secrets(&["mysecret"]), Some(300)).unwrap_err();
    assert_eq!(error, SetupError::ToleranceWithoutTimestamp);
}

#[test]
fn fault_66_a_changed_body_is_rejected_whatever_it_means() {
    let same_meaning = [
        &b"{\"id\":\"evt_1\",\"type\":\"demo.created\",\"data\":{\"object\":{\"id\":\"obj_1\"}}} "[..],
        b"{\"id\": \"evt_1\", \"type\": \"demo.created\", \"data\": {\"object\": {\"id\": \"obj_1\"}}}",
        b"{\"type\":\"demo.created\",\"id\":\"evt_1\",\"data\":{\"object\":{\"id\":\"obj_1\"}}}",
        b"\xef\xbb\xbf{\"id\":\"evt_1\",\"type\":\"demo.created\",\"data\":{\"object\":{\"id\":\"obj_1\"}}}",
        b"{\"id\":\"evt_1\",\"type\":\"demo.created\",\"data\":{\"object\":{\"id\":\"obj_1\"}}}\r\n",
        b"{\"\\u0069d\":\"evt_1\",\"type\":\"demo.created\",\"data\":{\"object\":{\"id\":\"obj_1\"}}}",
    ];
    for body in same_meaning {
        let sent = Sent { body: body.to_vec(), ..stripe(NOW) };
        assert_eq!(stripe_code(&sent, NOW), "signature_mismatch");
    }
}

#[test]
fn fault_67_no_second_form_of_the_input_is_tried() {
    // A signature over the compact form does not carry over to the spaced form, nor one over the decoded secret to its text.
    let spaced = br#"{"test": 2432232314}"#;
    let compact = br#"{"test":2432232314}"#;
    let sent =
        Sent { body: spaced.to_vec(), ..Sent::new(compact).signed(scheme("stripe"), "whsec_test_secret", "", NOW) };
    assert_eq!(stripe_code(&sent, NOW), "signature_mismatch");
    let by_svix = Sent::new(EVENT).signed(scheme("svix"), WHSEC, "msg_1", NOW);
    let by_text = Sent::new(EVENT).signed(scheme("stripe"), WHSEC, "", NOW);
    assert_eq!(code(scheme("svix"), &[WHSEC], &by_svix, NOW), "ok");
    assert_eq!(code(scheme("svix"), &[WHSEC], &by_text, NOW), "missing_header");
}

#[test]
fn fault_68_an_id_with_the_separator_is_rejected() {
    // The same signed text, cut differently: "a.1700000001" + "." … against "a" + "." + "1700000001" + …
    let sent = Sent::new(b"1700000001.{}").signed(scheme("standard-webhooks"), WHSEC, "a", NOW);
    let recut = Sent { body: b"{}".to_vec(), ..sent }.replacing("webhook-id", "a.1700000001");
    assert_eq!(standard_code(&recut), "id_ambiguous");
    assert_eq!(standard_code(&standard().replacing("webhook-id", "")), "malformed_header");
}

#[test]
fn fault_70_no_text_reveals_a_secret_or_a_signature() {
    let expected = stripe(NOW).header("stripe-signature");
    let (_, mac) = expected.split_once("v1=").unwrap();
    let forged = "00".repeat(32);
    let sent = stripe(NOW).replacing("stripe-signature", format!("t=1700000001,v1={forged}"));
    let verifier = Verifier::new(scheme("stripe"), &secrets(&["whsec_test_secret"]), None).unwrap();
    let request = sent.request();
    let rejection = verifier.verify(&request, NOW).unwrap_err();
    let texts = [
        rejection.to_string(),
        format!("{rejection:?}"),
        format!("{verifier:?}"),
        format!("{request:?}"),
        format!("{:?}", secrets(&["whsec_test_secret"])),
    ];
    for text in texts {
        for hidden in [mac, forged.as_str(), "whsec_test_secret", "evt_1", "1700000001"] {
            assert!(!text.contains(hidden), "{text}");
        }
    }
}

#[test]
fn fault_70_every_code_is_listed() {
    for (sent, now) in [(stripe(NOW), UnixMicros(0)), (stripe(NOW).without("stripe-signature"), NOW)] {
        assert!(Rejection::CODES.contains(&stripe_code(&sent, now)));
    }
}

#[test]
fn fault_79_hostile_json_is_bounded_and_ambiguity_waits_for_a_person() {
    let toml = "key = \"/id\"\ntype = \"/type\"\nentity = \"/data/id\"";
    let (open, close) = ("{\"a\":".repeat(100_000), "}".repeat(100_000));
    let deep = format!("{{\"x\":{open}1{close},\"id\":\"e\"}}");
    assert_eq!(item_of(toml, &deep).key.as_bytes(), b"e");
    let members: String = (0..100_000).map(|n| format!("\"k{n}\":{n},")).collect();
    assert_eq!(item_of(toml, &format!("{{{members}\"id\":\"e\"}}")).key.as_bytes(), b"e");
    assert_eq!(item_of(toml, r#"{"id":9007199254740993}"#).key.as_bytes(), b"9007199254740993");
    for body in [
        r#"{"id":"a","id":"b"}"#,
        r#"{"id":"a","\u0069d":"b"}"#,
        r#"{"id":"a","data":{"id":1},"data":{"id":2}}"#,
        r#"{"id":"\ud800"}"#,
        r#"{"id":"a","type":"\udc00"}"#,
    ] {
        let item = item_of(toml, body);
        assert_eq!(item.quarantine, Some(Quarantine::AmbiguousJson), "{body}");
        assert_eq!(item.key, EventKey::of_digest(&item.digest), "{body}");
    }
    assert_eq!(item_of(toml, r#"{"id":"a","x":1,"x":2}"#).quarantine, None, "off the path it does not matter");
}

#[test]
fn fault_79_unusable_names_are_not_stored() {
    let toml = "key = \"/id\"\ntype = \"/type\"\nentity = \"/entity\"";
    let long = "x".repeat(256);
    for bad in ["a\\u0000b", "a\\nb", "\\u009b", long.as_str()] {
        let by_type = item_of(toml, &format!("{{\"id\":\"a\",\"type\":\"{bad}\"}}"));
        assert_eq!((by_type.kind, by_type.quarantine), (None, Some(Quarantine::UnusableType)));
        assert_eq!(by_type.key.as_bytes(), b"a", "the key itself is good");
        let by_entity = item_of(toml, &format!("{{\"id\":\"a\",\"entity\":\"{bad}\"}}"));
        assert_eq!((by_entity.entity, by_entity.quarantine), (None, Some(Quarantine::UnusableEntity)));
    }
    assert_eq!(item_of(toml, &format!("{{\"type\":\"{}\"}}", &long[1..])).quarantine, None);
}

#[test]
fn an_identity_header_given_twice_waits_for_a_person() {
    let twice = Sent::new(b"{}").with("x-id", "a").with("x-id", "b");
    let item = item("key = \"header:x-id\"", twice);
    assert_eq!(item.quarantine, Some(Quarantine::AmbiguousHeader));
    assert_eq!(item.key, EventKey::of_digest(&item.digest));
}

#[test]
fn an_empty_identity_header_is_not_replaced_by_its_alternative() {
    let sent = Sent::new(b"{}").with("x-id", "").with("x-other-id", "smuggled");
    let item = item("key = \"header:x-id|x-other-id\"", sent);
    assert_eq!(item.key, EventKey::of_digest(&item.digest));
}

#[test]
fn headers_of_two_families_follow_one_rule() {
    // A svix-id smuggled beside a signed webhook-id must not become the key.
    let preset = Preset::named("standard-webhooks").unwrap();
    let (signing, verifying) = key_pairs("standard-webhooks")[0];
    let sent = genuine(preset, signing, NOW).with("svix-id", "smuggled");
    let verifier = Verifier::new(&preset.verify, &secrets(&[verifying]), None).unwrap();
    let identifier = oncehook_verify::Identifier::new(&preset.identify, &preset.verify, MissingKey::Digest).unwrap();
    let request = sent.request();
    let identified = identifier.identify(&verifier.verify(&request, NOW).unwrap()).unwrap();
    assert_eq!(identified.items()[0].key.as_bytes(), b"evt_1");
    assert!(check(&preset.verify, &[verifying], &sent.clone().without("webhook-id"), NOW).is_err());
}

#[test]
fn fault_72_a_request_cannot_choose_where_its_key_comes_from() {
    let sns = Side::of("aws-sns");
    let genuine = sns.genuine(0, NOW);
    let at = |from: &str, to: &str| {
        let text = String::from_utf8(genuine.body.clone()).unwrap();
        assert!(text.contains(from));
        sns.check(&[0], &Sent { body: text.replace(from, to).into_bytes(), ..genuine.clone() }, NOW)
    };
    for host in
        ["sns.evil.example", "sns.us-east-1.amazonaws.com.evil.example", "127.0.0.1", "u@sns.us-east-1.amazonaws.com"]
    {
        let url = format!("https://{host}/SimpleNotificationService-");
        let verdict = at("https://sns.us-east-1.amazonaws.com/SimpleNotificationService-", &url);
        assert_eq!(verdict.unwrap_err().code(), "key_url_refused", "{host}");
    }
    let paypal = Side::of("paypal");
    for url in [
        "http://api.paypal.com/cert",
        "https://evilpaypal.com/cert",
        "https://api.paypal.com:8443/cert",
        "https://api.paypal.com/cert?x=1",
    ] {
        let sent = paypal.genuine(0, NOW).replacing("paypal-cert-url", url);
        assert_eq!(paypal.check(&[0], &sent, NOW).unwrap_err().code(), "key_url_refused", "{url}");
    }
}
