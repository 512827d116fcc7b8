//! Handshakes answer after verification, and echo only what is harmless.

use oncehook_verify::{Handshakes, Reply, Verifier};

use crate::kit::{NOW, Sent, key_pairs, preset, secrets};

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
    let body = r#"{"token":"x","challenge":"3eZbrw1aBm2rZgRNFdxV2595E9CY3gmdALWMmHkvFXO7tYXAYM8P","type":"url_verification"}"#;
    assert_eq!(
        answer("slack", body),
        reply(200, Some("text/plain"), "3eZbrw1aBm2rZgRNFdxV2595E9CY3gmdALWMmHkvFXO7tYXAYM8P")
    );
    assert_eq!(answer("slack", r#"{"type":"event_callback","challenge":"abc"}"#), None);
}

#[test]
fn only_harmless_values_are_echoed() {
    let with = |challenge: &str| {
        answer("slack", &format!("{{\"type\":\"url_verification\",\"challenge\":{challenge}}}"))
    };
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
    assert_eq!(
        answer("discord", r#"{"version":1,"type":1,"event":{"type":"X"}}"#),
        None,
        "an event, not a ping"
    );
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
