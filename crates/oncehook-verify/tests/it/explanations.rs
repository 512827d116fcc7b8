//! What a person is told when a request is refused.

use oncehook_verify::{Explanation, Scheme, Settings, UnixMicros, explain, explain_with};

use crate::kit::{EVENT, NOW, Sent, Side, scheme, secrets};

const SECRET: &str = "whsec_test_secret";

fn explained(scheme: &Scheme, secret: &str, sent: &Sent) -> Explanation {
    explain(scheme, &secrets(&[secret]), None, &sent.request(), NOW).unwrap()
}

/// The findings must contain the phrase, and never a secret or a signature.
fn assert_finding(scheme: &Scheme, secret: &str, sent: &Sent, phrase: &str) {
    let explanation = explained(scheme, secret, sent);
    let text = explanation.findings.join("\n");
    assert!(explanation.verdict.is_err());
    assert!(text.contains(phrase), "wanted {phrase:?} in:\n{text}");
    assert!(!text.contains(secret.trim()), "{text}");
}

/// Signed over one body, sent with another.
fn changed(signed: &[u8], received: &[u8]) -> Sent {
    Sent { body: received.to_vec(), ..Sent::new(signed).signed(scheme("stripe"), SECRET, "", NOW) }
}

#[test]
fn a_genuine_request_is_described() {
    let sent = Sent::new(EVENT).signed(scheme("stripe"), SECRET, "", NOW);
    let explanation = explained(scheme("stripe"), SECRET, &sent);
    assert_eq!(explanation.verdict.unwrap().secret_position, 1);
    assert!(explanation.findings.join(" ").contains("whole body is signed"));
    let github = Sent::new(EVENT).signed(scheme("github"), SECRET, "", NOW);
    assert!(explained(scheme("github"), SECRET, &github).findings.join(" ").contains("No time is signed"));
}

#[test]
fn a_changed_body_is_recognised() {
    let stripe = scheme("stripe");
    let cases: &[(&[u8], &[u8], &str)] = &[
        (b"{\"a\":1}", b"{\"a\":1}\n", "something added one"),
        (b"{\"a\":1}\n", b"{\"a\":1}", "line feed at its end"),
        (b"{\"a\":1}", b"{\"a\": 1}", "compact JSON"),
        (b"{\"a\": 1, \"b\": 2}", b"{\"a\":1,\"b\":2}", "space after commas"),
        (b"{\r\n\"a\":1}", b"{\n\"a\":1}", "changed them to LF"),
        (b"{\n\"a\":\n1}", b"{\r\n\"a\":\r\n1}", "changed them to CR LF"),
        (b"x", b"\xef\xbb\xbfx", "byte order mark"),
        (b"\xef\xbb\xbfx", b"x", "byte order mark"),
    ];
    for (signed, received, phrase) in cases {
        assert_finding(stripe, SECRET, &changed(signed, received), phrase);
    }
    assert_finding(stripe, SECRET, &changed(b"one", b"two"), "No common mistake");
}

#[test]
fn a_secret_read_the_wrong_way_is_recognised() {
    let whsec = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    // Signed as Svix does, but with the text of the secret.
    let text_key = toml::from_str::<Scheme>(
        "algorithm = \"hmac-sha256\"\nkey = \"utf8\"\ncontent = \"{id}.{ts}.{body}\"\nsignature = { header = \"svix-signature\", grammar = { tagged = { sep = \" \", tag = \",\", accept = \"v1\" } }, encoding = \"base64\" }\ntimestamp = { header = \"svix-timestamp\", unit = \"s\" }\nid = { header = \"svix-id\" }",
    )
    .unwrap();
    let sent = Sent::new(EVENT).signed(&text_key, whsec, "msg_1", NOW);
    assert_finding(scheme("svix"), whsec, &sent, "as plain text, prefix and all");
    let sent = Sent::new(EVENT).signed(scheme("svix"), whsec, "msg_1", NOW);
    assert_finding(&text_key, whsec, &sent, "as base64 after its prefix");
    let sent = Sent::new(EVENT).signed(scheme("github"), "mysecret", "", NOW);
    assert_finding(scheme("github"), " mysecret ", &sent, "white space around it");
}

#[test]
fn another_encoding_is_recognised() {
    let base64 = toml::from_str::<Scheme>(
        "algorithm = \"hmac-sha256\"\nkey = \"utf8\"\ncontent = \"{body}\"\nsignature = { header = \"x-hub-signature-256\", grammar = { prefix = \"sha256=\" }, encoding = \"base64\" }",
    )
    .unwrap();
    let sent = Sent::new(EVENT).signed(&base64, "mysecret", "", NOW);
    assert_finding(scheme("github"), "mysecret", &sent, "written in base64");
}

#[test]
fn age_is_told_apart_from_forgery() {
    let old = Sent::new(EVENT).signed(scheme("stripe"), SECRET, "", UnixMicros(NOW.0 - 7_200_000_000));
    assert_finding(scheme("stripe"), SECRET, &old, "signed 7200 s ago");
    let early = Sent::new(EVENT).signed(scheme("stripe"), SECRET, "", UnixMicros(NOW.0 + 7_200_000_000));
    assert_finding(scheme("stripe"), SECRET, &early, "7200 s in the future");
}

#[test]
fn another_provider_is_recognised_by_its_header() {
    let github = Sent::new(EVENT).signed(scheme("github"), SECRET, "", NOW);
    assert_finding(scheme("stripe"), SECRET, &github, "provider = \"github\"");
    assert_finding(scheme("stripe"), SECRET, &github, "x-hub-signature-256");
    assert_finding(scheme("stripe"), SECRET, &Sent::new(EVENT), "No header of the request looks like a signature");
}

#[test]
fn a_wrong_public_address_is_recognised() {
    for (configured, actual) in [
        ("https://gateway.example/webhooks/test/", "https://gateway.example/webhooks/test"),
        ("http://gateway.example/webhooks/test", "https://gateway.example/webhooks/test"),
        ("https://gateway.example:443/webhooks/test", "https://gateway.example/webhooks/test"),
        ("https://internal.example/webhooks/test", "https://gateway.example/webhooks/test"),
    ] {
        for name in ["square", "twilio", "trello", "hubspot"] {
            let side = Side::of(name);
            assert_eq!(side.settings.url.as_deref(), Some(actual));
            let sent = side.genuine(0, NOW).with("host", "gateway.example");
            let settings = Settings { url: Some(configured.to_owned()), ..side.settings.clone() };
            let explained =
                explain_with(&side.preset.verify, &secrets(&[&side.pairs[0].1]), &settings, &sent.request(), NOW, None)
                    .unwrap();
            let text = explained.findings.join("\n");
            assert!(explained.verdict.is_err());
            assert!(text.contains(&format!("fits the address {actual}")), "{name} {configured}: {text}");
        }
    }
}

#[test]
fn a_wrong_secret_and_a_missing_header_are_named() {
    let sent = Sent::new(EVENT).signed(scheme("stripe"), "whsec_other_endpoint", "", NOW);
    assert_finding(scheme("stripe"), SECRET, &sent, "the secret belongs to another endpoint");
    let explanation = explained(scheme("stripe"), SECRET, &Sent::new(EVENT));
    assert_eq!(explanation.verdict.unwrap_err().to_string(), "the header stripe-signature is missing");
    let slack = Sent::new(EVENT).signed(scheme("slack"), SECRET, "", NOW).without("x-slack-request-timestamp");
    assert_finding(scheme("slack"), SECRET, &slack, "header x-slack-request-timestamp is missing");
}
