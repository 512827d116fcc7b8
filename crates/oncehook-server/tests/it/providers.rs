//! Presets at the front door: handshakes, batches, answers that providers insist on, handed-over secrets.

use oncehook_testkit::gateway::now;
use oncehook_testkit::sender::Answer;
use oncehook_verify::{Preset, Request, Secret, Settings, Signer, UnixMicros};

use crate::kit::{Rig, exchange, statuses};

const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
const HEX: &str = "DFB1EB5485895CFA84146406857104ABB4CBCABDC8AAF103A624C8F6A3EAAB00";

fn secret_of(name: &str) -> &'static str {
    if ["adyen", "adyen-platform", "onfleet"].contains(&name) { HEX } else { SECRET }
}

/// A gateway with one source of each of these presets.
fn rig(presets: &[&str]) -> Rig {
    let mut sources = String::new();
    for name in presets {
        let preset = Preset::named(name).unwrap();
        let params: Vec<String> = preset
            .params
            .iter()
            .filter(|param| param.name != "kid")
            .map(|param| format!("{} = {:?}", param.name, param.example))
            .collect();
        let secrets = if preset.verify.fetches_keys() {
            ""
        } else {
            &format!("secrets = [\"file:{}\"]", if secret_of(name) == HEX { "hex" } else { "secret" })
        };
        let params = if params.is_empty() { String::new() } else { format!("params = {{ {} }}", params.join(", ")) };
        sources.push_str(&format!(
            "[[source]]\nname = \"{name}\"\nprovider = \"{name}\"\n{secrets}\nurl = \"https://gateway.example/webhooks/{name}\"\n{params}\n"
        ));
    }
    Rig::start("", &sources, &[("secret", SECRET), ("hex", HEX)])
}

/// Raw HTTP.
fn raw(method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Vec<u8> {
    let mut text = format!("{method} {path} HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\n");
    for (name, value) in headers {
        text.push_str(&format!("{name}: {value}\r\n"));
    }
    if method == "POST" {
        text.push_str(&format!("content-length: {}\r\n", body.len()));
    }
    text.push_str("\r\n");
    [text.as_bytes(), body].concat()
}

/// Every preset whose secret is shared, at one gateway: its sample is accepted, and a copy of it is a duplicate.
#[tokio::test(flavor = "multi_thread")]
async fn r2_the_sample_of_every_preset_is_accepted_once_at_the_front_door() {
    let halves = ["discord", "telnyx", "sendgrid", "wise", "paddle-classic"];
    let presets: Vec<&Preset> = Preset::all()
        .iter()
        .filter(|preset| !preset.verify.fetches_keys() && !halves.contains(&preset.name.as_str()))
        .collect();
    assert!(presets.len() > 100, "{}", presets.len());
    let names: Vec<&str> = presets.iter().map(|preset| preset.name.as_str()).collect();
    let rig = rig(&names);
    let at = now();
    for preset in &presets {
        let name = &preset.name;
        let (headers, body) = preset.sample.render("evt_1", None, at).unwrap();
        let headers: Vec<(String, String)> =
            headers.iter().map(|(name, value)| (name.to_string(), value.to_str().unwrap().to_owned())).collect();
        let headers: Vec<(&str, &str)> = headers.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        let query = preset.sample.query.as_ref().map(|query| format!("?{query}")).unwrap_or_default();
        let request = signed_at(name, &query, &headers, &body, at);
        for copy in ["first", "second"] {
            let answer = rig.send(&request).await;
            assert_eq!(answer.status, preset.ack.status, "{name}, {copy} copy: {}", text(&answer));
        }
    }
    assert_eq!(rig.stored().await, presets.len() as u64, "one event of each");
}

/// A body, signed for a preset now.
fn signed(name: &str, headers: &[(&str, &str)], body: &str) -> Vec<u8> {
    signed_at(name, "", headers, body.as_bytes(), now())
}

fn signed_at(name: &str, query: &str, headers: &[(&str, &str)], body: &[u8], at: UnixMicros) -> Vec<u8> {
    let preset = Preset::named(name).unwrap();
    let params = preset.params.iter().map(|param| (param.name.clone(), param.example.clone())).collect();
    let settings =
        Settings { tolerance_secs: None, url: Some(format!("https://gateway.example/webhooks/{name}")), params };
    let signer = Signer::with(&preset.verify, &Secret::new(secret_of(name)).unwrap(), settings).unwrap();
    let mut map = http::HeaderMap::new();
    for (name, value) in headers {
        map.insert(http::HeaderName::from_bytes(name.as_bytes()).unwrap(), value.parse().unwrap());
    }
    let path = format!("/webhooks/{name}{query}");
    let request = Request { method: "POST", path: &path, headers: &map, body };
    let signed = signer.sign_whole(&request, "evt_1", at).unwrap();
    let path = signed.path(&path).into_owned();
    map.extend(signed.headers.into_iter().map(|(name, value)| (Some(name), value)));
    let headers: Vec<(&str, &str)> = map.iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect();
    raw("POST", &path, &headers, signed.body.as_deref().unwrap_or(body))
}

/// The status of a HEAD request, whose answer has a length and no body.
async fn head(rig: &Rig, path: &str) -> u16 {
    let answer = exchange(rig.gateway.ingress, &raw("HEAD", path, &[], b"")).await.unwrap();
    statuses(&answer)[0]
}

fn text(answer: &Answer) -> String {
    String::from_utf8(answer.body.clone()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn questions_without_a_signature_are_answered_and_change_nothing() {
    let rig = rig(&["meta", "x", "dropbox", "braintree", "okta", "cloudevents", "microsoft-graph", "trello", "stripe"]);
    let ask = |method: &'static str, path: &'static str, headers: &'static [(&'static str, &'static str)]| {
        raw(method, path, headers, b"")
    };

    let meta = "/webhooks/meta?hub.mode=subscribe&hub.verify_token=meta-verify-token&hub.challenge=1158201444";
    let answer = rig.send(&ask("GET", meta, &[])).await;
    assert_eq!((answer.status, text(&answer).as_str()), (200, "1158201444"));
    assert_eq!(answer.header("x-content-type-options"), Some("nosniff"));
    let wrong = "/webhooks/meta?hub.mode=subscribe&hub.verify_token=guess&hub.challenge=1";
    assert_eq!(rig.send(&ask("GET", wrong, &[])).await.status, 405);
    let script = "/webhooks/meta?hub.mode=subscribe&hub.verify_token=meta-verify-token&hub.challenge=%3Cscript%3E";
    assert_eq!(rig.send(&ask("GET", script, &[])).await.status, 405, "nothing that could be a page is echoed");

    let answer = rig.send(&ask("GET", "/webhooks/x?crc_token=9b4507b3-9040-4669-9ca3-6b94edb50553", &[])).await;
    assert!(text(&answer).starts_with("{\"response_token\":\"sha256="), "{}", text(&answer));
    let answer = rig.send(&ask("GET", "/webhooks/dropbox?challenge=abc123", &[])).await;
    assert_eq!((answer.status, text(&answer).as_str()), (200, "abc123"));
    let answer = rig.send(&ask("GET", "/webhooks/braintree?bt_challenge=20f9f8ed05f77439fe955c977e4c8a53", &[])).await;
    assert!(text(&answer).starts_with("integration_public_key|"), "{}", text(&answer));
    let answer = rig.send(&ask("GET", "/webhooks/okta", &[("x-okta-verification-challenge", "chal-1")])).await;
    assert_eq!(text(&answer), "{\"verification\":\"chal-1\"}");
    let answer =
        rig.send(&ask("OPTIONS", "/webhooks/cloudevents", &[("webhook-request-origin", "events.example.com")])).await;
    assert_eq!((answer.status, answer.header("webhook-allowed-origin")), (200, Some("events.example.com")));
    let answer =
        rig.send(&ask("POST", "/webhooks/microsoft-graph?validationToken=Validation%3A+Testing+client", &[])).await;
    assert_eq!((answer.status, text(&answer).as_str()), (200, "Validation: Testing client"));
    assert_eq!(head(&rig, "/webhooks/trello").await, 200);

    // Who asks nothing of the kind gets nothing of the kind.
    for (method, path) in [("GET", "/webhooks/stripe"), ("GET", "/webhooks/trello"), ("OPTIONS", "/webhooks/meta")] {
        assert_eq!(rig.send(&raw(method, path, &[], b"")).await.status, 405, "{method} {path}");
    }
    assert_eq!(head(&rig, "/webhooks/x").await, 405);
    assert_eq!(rig.stored().await, 0, "no question is an event");
}

#[tokio::test(flavor = "multi_thread")]
async fn signed_questions_are_answered_after_verification_only() {
    let rig = rig(&["slack", "zoom", "twitch"]);
    let zoom = r#"{"event":"endpoint.url_validation","payload":{"plainToken":"qgg8vlvZRS6UYooatFL8Aw"}}"#;
    let answer = rig.send(&signed("zoom", &[], zoom)).await;
    assert_eq!(answer.status, 200);
    let json = answer.json();
    assert_eq!(json["plainToken"], "qgg8vlvZRS6UYooatFL8Aw");
    assert_eq!(json["encryptedToken"].as_str().unwrap().len(), 64);
    assert_eq!(rig.send(&raw("POST", "/webhooks/zoom", &[], zoom.as_bytes())).await.status, 401);

    let twitch = [("twitch-eventsub-message-type", "webhook_callback_verification")];
    let body = r#"{"challenge":"pogchamp-kappa-360noscope-vohiyo","subscription":{"type":"channel.follow"}}"#;
    let answer = rig.send(&signed("twitch", &twitch, body)).await;
    assert_eq!(text(&answer), "pogchamp-kappa-360noscope-vohiyo");
    assert_eq!(rig.send(&raw("POST", "/webhooks/twitch", &twitch, body.as_bytes())).await.status, 401);

    let slack = r#"{"type":"url_verification","challenge":"3eZbrw1aBm2rZgRNFdxV"}"#;
    assert_eq!(text(&rig.send(&signed("slack", &[], slack)).await), "3eZbrw1aBm2rZgRNFdxV");
    assert_eq!(rig.stored().await, 0);
}

/// What an attacker would do: have the payload signed by the handshake, and send it as an event.
#[tokio::test(flavor = "multi_thread")]
async fn r2_the_answer_to_a_challenge_is_never_the_signature_of_an_event() {
    let rig = rig(&["braintree", "x"]);
    let escaped = |text: &str| text.replace('+', "%2B").replace('/', "%2F").replace('=', "%3D");
    let (_, sample) = Preset::named("braintree").unwrap().sample.render("evt_1", None, now()).unwrap();
    let sample = String::from_utf8(sample).unwrap().replace("%2B", "+").replace("%2F", "/").replace("%3D", "=");
    let sample = sample.strip_prefix("bt_payload=").unwrap();
    for payload in [sample, "PGE+PC9hPg==", "20f9f8ed05f77439fe955c977e4c8a53"] {
        let payload = escaped(payload);
        let answer = rig.send(&raw("GET", &format!("/webhooks/braintree?bt_challenge={payload}"), &[], b"")).await;
        let signature = if answer.status == 200 { text(&answer) } else { "integration_public_key|00".to_owned() };
        let body = format!("bt_payload={payload}&bt_signature={}", signature.replace('|', "%7C"));
        let form = [("content-type", "application/x-www-form-urlencoded")];
        let forged = rig.send(&raw("POST", "/webhooks/braintree", &form, body.as_bytes())).await;
        assert_eq!(forged.status, 401, "{payload}: {}", text(&forged));
    }
    for body in ["12345", "user_id=1", "true"] {
        let answer = rig.send(&raw("GET", &format!("/webhooks/x?crc_token={}", escaped(body)), &[], b"")).await;
        let signature = answer.json()["response_token"].as_str().unwrap().to_owned();
        let signed = [("x-twitter-webhooks-signature", signature.as_str())];
        let forged = rig.send(&raw("POST", "/webhooks/x", &signed, body.as_bytes())).await;
        assert_eq!(forged.status, 401, "{body}: {}", text(&forged));
    }
    assert_eq!(rig.stored().await, 0, "nothing of it is stored");
}

/// Mailgun signs a time and a token, and nothing of the event. Whoever has seen one request can put another event into it.
#[tokio::test(flavor = "multi_thread")]
async fn r11_a_token_that_was_used_for_another_event_is_held_as_a_suspected_replay() {
    let rig = rig(&["mailgun"]);
    let (_, sample) = Preset::named("mailgun").unwrap().sample.render("evt_1", None, now()).unwrap();
    let request = String::from_utf8(signed("mailgun", &[], &String::from_utf8(sample).unwrap())).unwrap();
    let (status, event) = rig.deliver(request.as_bytes()).await;
    assert_eq!(status, "accepted");
    assert_eq!(rig.deliver(request.as_bytes()).await, ("duplicate".to_owned(), event), "a copy is a copy");

    // The same length, so that the head still fits.
    let forged = request.replace("\"event-data\":{\"id\":\"evt_1\"", "\"event-data\":{\"id\":\"evt_2\"");
    assert_ne!(forged, request);
    let (status, held) = rig.deliver(forged.as_bytes()).await;
    assert_eq!(status, "quarantined");
    let shown = rig.show(&held).await;
    let flags = shown["flags"].as_array().unwrap();
    assert!(["quarantined", "suspected_replay"].iter().all(|flag| flags.contains(&(*flag).into())), "{shown}");

    // Another token is another event.
    let (_, other) = Preset::named("mailgun").unwrap().sample.render("evt_3", None, now()).unwrap();
    let (status, _) = rig.deliver(&signed("mailgun", &[], &String::from_utf8(other).unwrap())).await;
    assert_eq!(status, "accepted");
}

#[tokio::test(flavor = "multi_thread")]
async fn trap_16_a_batch_is_durable_before_it_is_answered_and_deduplicated_item_by_item() {
    let rig = rig(&["gocardless", "line", "xero"]);
    let first = r#"{"events":[{"id":"EV1","resource_type":"payments","action":"confirmed"},{"id":"EV2","resource_type":"payments","action":"failed"}]}"#;
    let answer = rig.send(&signed("gocardless", &[], first)).await;
    let verdicts = |answer: &Answer| -> Vec<String> {
        answer.json()["events"]
            .as_array()
            .unwrap()
            .iter()
            .map(|event| event["status"].as_str().unwrap().to_owned())
            .collect()
    };
    assert_eq!(verdicts(&answer), ["accepted", "accepted"]);
    assert_eq!(rig.stored().await, 2);
    // The second batch overlaps the first.
    let second = r#"{"events":[{"id":"EV2","resource_type":"payments","action":"failed"},{"id":"EV3","resource_type":"payments","action":"paid_out"}]}"#;
    assert_eq!(verdicts(&rig.send(&signed("gocardless", &[], second)).await), ["duplicate", "accepted"]);
    assert_eq!(rig.stored().await, 3);
    // The verify button of LINE and the intent to receive of Xero: signed, and nothing in it.
    assert_eq!(rig.send(&signed("line", &[], r#"{"destination":"x","events":[]}"#)).await.status, 200);
    let xero = r#"{"events":[],"firstEventSequence":0,"lastEventSequence":0,"entropy":"e"}"#;
    assert_eq!(rig.send(&signed("xero", &[], xero)).await.status, 200);
    assert_eq!(
        rig.send(&raw("POST", "/webhooks/xero", &[("x-xero-signature", "AAAA")], xero.as_bytes())).await.status,
        401
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn trap_10_answers_are_those_that_providers_insist_on() {
    let rig = rig(&["pagerduty", "twilio", "xero", "woocommerce"]);
    let answer = rig.send(&signed("pagerduty", &[("x-webhook-id", "w1")], r#"{"event":{"id":"1"}}"#)).await;
    assert_eq!(answer.status, 202);
    let form = [("content-type", "application/x-www-form-urlencoded"), ("i-twilio-idempotency-token", "t1")];
    let answer = rig.send(&signed("twilio", &form, "MessageSid=SM1&MessageStatus=sent")).await;
    assert_eq!((answer.status, answer.body.len()), (204, 0));
    // An unsigned ping of WooCommerce is not an event.
    let ping = [("content-type", "application/x-www-form-urlencoded")];
    assert_eq!(rig.send(&raw("POST", "/webhooks/woocommerce", &ping, b"webhook_id=5")).await.status, 200);
    assert_eq!(rig.stored().await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_69_a_handed_over_secret_waits_for_a_person() {
    let sources = "[[source]]\nname = \"asana\"\nprovider = \"asana\"\nhandover = \"asana.pending\"\n[[source]]\nname = \"notion\"\nprovider = \"notion\"\nsecrets = [\"file:secret\"]\n";
    let rig = Rig::start("", sources, &[("secret", SECRET)]);
    let hello = raw("POST", "/webhooks/asana", &[("x-hook-secret", "b537207f20cbfa02357cf448134da559")], b"");
    let answer = rig.send(&hello).await;
    assert_eq!((answer.status, answer.header("x-hook-secret")), (200, Some("b537207f20cbfa02357cf448134da559")));
    let pending = rig.directory.path().join("asana.pending");
    assert_eq!(std::fs::read_to_string(&pending).unwrap().trim(), "b537207f20cbfa02357cf448134da559");
    // Nothing is accepted with it before a person has said so, and nobody can replace it.
    let events = r#"{"events":[]}"#;
    let signer =
        Signer::new(&Preset::named("asana").unwrap().verify, &Secret::new("b537207f20cbfa02357cf448134da559").unwrap())
            .unwrap();
    let headers = http::HeaderMap::new();
    let request = Request { method: "POST", path: "/webhooks/asana", headers: &headers, body: events.as_bytes() };
    let signature = signer.sign(&request, "", now()).unwrap().remove(0).1;
    let forged =
        raw("POST", "/webhooks/asana", &[("x-hook-signature", signature.to_str().unwrap())], events.as_bytes());
    assert_eq!(rig.send(&forged).await.status, 401);
    assert_eq!(rig.send(&raw("POST", "/webhooks/asana", &[("x-hook-secret", "evil")], b"")).await.status, 409);
    assert_eq!(rig.send(&hello).await.status, 200, "the same one again is a retry");
    // A source that does not ask for one takes none.
    let token = raw(
        "POST",
        "/webhooks/notion",
        &[],
        br#"{"verification_token":"secret_tMrlL1qK5vuQAh1b6cZGhFChZTSYJlce98V0pYn7yBl"}"#,
    );
    assert_eq!(rig.send(&token).await.status, 403);
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_72_a_certificate_elsewhere_is_refused_without_asking() {
    let rig = rig(&["aws-sns", "paypal", "google-pubsub", "plaid"]);
    let body = r#"{"Type":"Notification","MessageId":"1","TopicArn":"arn:aws:sns:us-east-1:123456789012:MyTopic","Message":"m","Timestamp":"2026-01-01T00:00:00Z","SignatureVersion":"2","Signature":"AAAA","SigningCertURL":"https://evil.example/SimpleNotificationService-1.pem"}"#;
    assert_eq!(rig.send(&raw("POST", "/webhooks/aws-sns", &[], body.as_bytes())).await.status, 401);
    let other_topic = body.replace("MyTopic", "Other").replace("evil.example", "sns.us-east-1.amazonaws.com");
    assert_eq!(rig.send(&raw("POST", "/webhooks/aws-sns", &[], other_topic.as_bytes())).await.status, 401);
    let paypal = [
        ("paypal-cert-url", "https://paypal.com.evil.example/cert"),
        ("paypal-transmission-id", "1"),
        ("paypal-transmission-time", "2026-01-01T00:00:00Z"),
        ("paypal-transmission-sig", "AAAA"),
    ];
    assert_eq!(rig.send(&raw("POST", "/webhooks/paypal", &paypal, b"{}")).await.status, 401);
    for path in ["/webhooks/google-pubsub", "/webhooks/plaid"] {
        assert_eq!(
            rig.send(&raw("POST", path, &[("authorization", "Bearer x.y.z"), ("plaid-verification", "x.y.z")], b"{}"))
                .await
                .status,
            401
        );
    }
    assert_eq!(rig.stored().await, 0);
}
