//! Handshakes answer after verification, and echo only what is harmless.

use oncehook_verify::{Action, Handshakes, Preset, Reply, Request, Verifier};

use crate::kit::{NOW, Sent, Side, key_pairs, preset, secrets};

/// The answer of a preset to a genuine request with this body.
fn answer(name: &str, body: &str) -> Option<Reply> {
    let preset = preset(name);
    let (signing, verifying) = key_pairs(name)[0];
    let sent = Sent::new(body.as_bytes()).signed(&preset.verify, signing, "evt_1", NOW);
    let verifier = Verifier::new(&preset.verify, &secrets(&[verifying]), None).unwrap();
    let request = sent.request();
    preset.handshakes.answer(&verifier.verify(&request, NOW).unwrap(), &verifier)
}

fn reply(status: u16, content_type: Option<&str>, body: &str) -> Option<Reply> {
    Some(Reply {
        status,
        content_type: content_type.map(str::to_owned),
        body: body.as_bytes().to_vec(),
        ..Reply::default()
    })
}

#[test]
fn slack_gets_its_challenge_back() {
    let body =
        r#"{"token":"x","challenge":"3eZbrw1aBm2rZgRNFdxV2595E9CY3gmdALWMmHkvFXO7tYXAYM8P","type":"url_verification"}"#;
    assert_eq!(
        answer("slack", body),
        reply(200, Some("text/plain"), "3eZbrw1aBm2rZgRNFdxV2595E9CY3gmdALWMmHkvFXO7tYXAYM8P")
    );
    assert_eq!(answer("slack", r#"{"type":"event_callback","challenge":"abc"}"#), None);
}

#[test]
fn only_harmless_values_are_echoed() {
    let with =
        |challenge: &str| answer("slack", &format!("{{\"type\":\"url_verification\",\"challenge\":{challenge}}}"));
    let long = |count: usize| format!("\"{}\"", "a".repeat(count));
    assert!(with("\"aZ0_.~+/=-\"").is_some());
    assert!(with(&long(512)).is_some());
    for bad in ["\"<script>\"", "\"a b\"", "\"a\\r\\nb\"", "\"\"", "null", "{}", "\"\u{e9}\"", &long(513)] {
        assert_eq!(with(bad), None, "{bad}");
    }
    assert_eq!(answer("slack", r#"{"type":"url_verification","challenge":"a","challenge":"b"}"#), None);
}

#[test]
fn discord_pings_are_told_apart_from_events() {
    assert_eq!(
        answer("discord", r#"{"id":"1","type":1,"token":"t"}"#),
        reply(200, Some("application/json"), r#"{"type":1}"#)
    );
    assert_eq!(answer("discord", r#"{"version":1,"application_id":"1","type":0}"#), reply(204, None, ""));
    assert_eq!(answer("discord", r#"{"version":1,"type":1,"event":{"type":"X"}}"#), None, "an event, not a ping");
    assert_eq!(answer("discord", r#"{"id":"1","type":2}"#), None);
    assert_eq!(answer("discord", r#"{"id":"1","type":"1"}"#), None, "text is not a number");
}

#[test]
fn the_others_have_none() {
    for name in ["stripe", "github", "shopify", "standard-webhooks", "svix", "gitlab"] {
        assert!(preset(name).handshakes.is_empty());
        assert_eq!(answer(name, r#"{"type":"url_verification","challenge":"abc"}"#), None);
    }
}

#[test]
fn a_rule_tells_text_numbers_and_booleans_apart() {
    #[derive(Debug, serde::Deserialize)]
    struct File {
        handshake: Handshakes,
    }
    let (signing, verifying) = key_pairs("github")[0];
    let scheme = &preset("github").verify;
    let verifier = Verifier::new(scheme, &secrets(&[verifying]), None).unwrap();
    let answers = |expected: &str, actual: &str| {
        let file: File = toml::from_str(&format!("[[handshake]]\nwhen = {{ \"/a\" = {expected} }}")).unwrap();
        let sent = Sent::new(format!("{{\"a\":{actual}}}").as_bytes()).signed(scheme, signing, "", NOW);
        let request = sent.request();
        file.handshake.answer(&verifier.verify(&request, NOW).unwrap(), &verifier).is_some()
    };
    let values = ["1", "\"1\"", "true", "\"true\""];
    for expected in values {
        for actual in values {
            assert_eq!(answers(expected, actual), expected == actual, "{expected} {actual}");
        }
    }
}

#[test]
fn rules_that_make_no_sense_do_not_load() {
    #[derive(Debug, serde::Deserialize)]
    struct File {
        #[expect(dead_code, reason = "only its loading matters")]
        handshake: Handshakes,
    }
    for rule in [
        "when = {}",
        "when = { \"type\" = 1 }",
        "when = { \"/type\" = 1 }\necho = \"/a\"\nbody = \"b\"",
        "when = { \"/type\" = 1 }\nstatus = 500",
        "when = { \"/type\" = 1 }\nextra = 1",
        "echo = \"/a\"",
    ] {
        assert!(toml::from_str::<File>(&format!("[[handshake]]\n{rule}")).is_err(), "{rule}");
    }
}

/// The answer to a question without a signature.
fn unsigned(
    name: &str,
    secret: &str,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> Option<Reply> {
    let side = Side::of(name);
    let verifier = Verifier::with(&side.preset.verify, &secrets(&[secret]), side.settings.clone()).unwrap();
    let mut sent = Sent::new(body);
    for (name, value) in headers {
        sent.add(name, value);
    }
    let request = Request { method, path, ..sent.request() };
    side.preset.handshakes.answer_unsigned(&request, &verifier)
}

fn text(reply: Option<Reply>) -> String {
    String::from_utf8(reply.unwrap().body).unwrap()
}

#[test]
fn challenges_are_signed_as_their_providers_do() {
    let crc = unsigned(
        "x",
        "z3ZX4v7mAAUGykl3EcmkqbartmuW8VFOOzCloLx9Q45P0hLrFu",
        "GET",
        "/webhooks/x?crc_token=9b4507b3-9040-4669-9ca3-6b94edb50553",
        &[],
        b"",
    );
    assert_eq!(text(crc), r#"{"response_token":"sha256=Cytd4Sq+NvEcV3MMrXxWJGJx5A+y/lXzzU2Maartkx8="}"#);
    let braintree = unsigned(
        "braintree",
        "integration_private_key",
        "GET",
        "/webhooks/b?bt_challenge=20f9f8ed05f77439fe955c977e4c8a53",
        &[],
        b"",
    );
    assert_eq!(text(braintree), "integration_public_key|d9b899556c966b3f06945ec21311865d35df3ce4");
    let zoom = Side { pairs: [("zoomsecret".into(), "zoomsecret".into()), Default::default()], ..Side::of("zoom") };
    let body = br#"{"event":"endpoint.url_validation","payload":{"plainToken":"qgg8vlvZRS6UYooatFL8Aw"}}"#;
    let sent = zoom.sign(Sent::new(body), 0, "", NOW);
    let (verifier, request) = (zoom.verifier(&[0]), sent.request());
    let reply = zoom.preset.handshakes.answer(&verifier.verify(&request, NOW).unwrap(), &verifier);
    assert_eq!(
        text(reply),
        r#"{"plainToken":"qgg8vlvZRS6UYooatFL8Aw","encryptedToken":"83b2a60d4bbe49dc93763ed9e727a9a7690cbe4c1f8bb0adc0ffccd09ecb1384"}"#
    );
}

#[test]
fn a_value_that_is_not_configured_equals_nothing() {
    let mut side = Side::of("meta");
    let path = "/webhooks/m?hub.mode=subscribe&hub.verify_token=&hub.challenge=1";
    side.settings.params.clear();
    let verifier = side.verifier(&[0]);
    let sent = Sent::new(b"");
    let request = Request { method: "GET", path, ..sent.request() };
    assert_eq!(side.preset.handshakes.answer_unsigned(&request, &verifier), None);
    side.settings.params.insert("verify_token".into(), String::new());
    assert_eq!(side.preset.handshakes.answer_unsigned(&request, &side.verifier(&[0])), None);
}

/// Fault 69: what changes anything comes after verification, and what comes before it changes nothing.
#[test]
fn fault_69_only_harmless_rules_run_without_a_signature() {
    for side in Side::all() {
        let name = &side.preset.name;
        let verifier = side.verifier(&[0]);
        // A genuine event is never taken for an unsigned question.
        let sent = side.genuine(0, NOW);
        let reply = side.preset.handshakes.answer_unsigned(&sent.request(), &verifier);
        assert_eq!(reply, None, "{name}: an event would be answered and lost");
    }
    let subscription = Side::of("aws-sns");
    let (headers, body) = subscription.preset.sample.render("m1", Some("SubscriptionConfirmation"), NOW).unwrap();
    let body = String::from_utf8(body)
        .unwrap()
        .replace("\"Message\":", "\"Token\":\"tok\",\"SubscribeURL\":\"https://evil.example/\",\"Message\":");
    let sent = subscription.sign(Sent { headers, body: body.into_bytes(), ..Sent::new(b"") }, 0, "m1", NOW);
    let (verifier, request) = (subscription.verifier(&[0]), sent.request());
    assert_eq!(subscription.preset.handshakes.answer_unsigned(&request, &verifier), None);
    let key = subscription.fetch(&verifier, &[0], &request).unwrap();
    let verified = verifier.verify_with(&request, NOW, key.as_ref()).unwrap();
    let reply = subscription.preset.handshakes.answer(&verified, &verifier).unwrap();
    let Some(Action::Confirm { url }) = reply.action else { panic!("nothing to confirm") };
    assert!(url.starts_with("https://sns.us-east-1.amazonaws.com/?Action=ConfirmSubscription&TopicArn="), "{url}");
}

#[test]
fn handed_over_secrets_are_told_apart_from_events() {
    let asana = unsigned("asana", "s", "POST", "/w", &[("x-hook-secret", "b537207f20cb")], b"").unwrap();
    assert!(matches!(&asana.action, Some(Action::Secret(secret)) if secret.reveal() == "b537207f20cb"));
    assert_eq!(asana.headers, [("x-hook-secret".to_owned(), "b537207f20cb".to_owned())]);
    assert!(!format!("{asana:?}").contains("Secret(b537"), "{asana:?}");
    assert_eq!(unsigned("asana", "s", "POST", "/w", &[("x-hook-secret", "a"), ("x-hook-signature", "b")], b""), None);
    let notion = unsigned("notion", "s", "POST", "/w", &[], br#"{"verification_token":"secret_tMrl"}"#).unwrap();
    assert!(matches!(notion.action, Some(Action::Secret(_))));
    assert_eq!(unsigned("notion", "s", "POST", "/w", &[], br#"{"verification_token":"x","id":"1","type":"t"}"#), None);
    let takers: Vec<&str> = Preset::all()
        .iter()
        .filter(|preset| preset.handshakes.hands_over_secret())
        .map(|preset| preset.name.as_str())
        .collect();
    assert_eq!(takers, ["asana", "notion"]);
}
