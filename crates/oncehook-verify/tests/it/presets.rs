//! Every preset loads, explains itself, and does what its provider needs.

use oncehook_verify::{
    Confidence, EventKey, Identifier, Integrity, Item, MissingKey, Preset, Signer, UnixMicros, Verifier,
};

use crate::kit::{NOW, Sent, Side, genuine, key_pairs, preset, secret, secrets};

/// The text of a preset's own file.
fn file(name: &str) -> String {
    std::fs::read_to_string(format!("{}/src/presets/{name}.toml", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

fn identified(preset: &Preset, verifying: &str, sent: &Sent) -> Item {
    let verifier = Verifier::new(&preset.verify, &secrets(&[verifying]), None).unwrap();
    let identifier = Identifier::new(&preset.identify, &preset.verify, MissingKey::Digest).unwrap();
    let request = sent.request();
    identifier.identify(&verifier.verify(&request, NOW).unwrap()).unwrap().items()[0].clone()
}

#[test]
fn r10_there_are_more_than_a_hundred_presets_and_each_says_where_its_facts_come_from() {
    let mut files: Vec<String> = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/src/presets"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap().trim_end_matches(".toml").to_owned())
        .collect();
    files.sort();
    let listed: Vec<&str> = Preset::all().iter().map(|preset| preset.name.as_str()).collect();
    assert_eq!(listed, files, "every file is listed, by name");
    let certain = Preset::all().iter().filter(|preset| !preset.experimental).count();
    assert!(certain >= 100, "{certain}");
    for preset in Preset::all() {
        let (name, text) = (&preset.name, file(&preset.name));
        let loaded: Preset = toml::from_str(&text).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(loaded.name, *name);
        assert!(name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-'), "{name}");
        let prose: String = text.lines().take_while(|line| line.starts_with('#')).collect();
        assert!(prose.contains("What is signed:"), "{name} does not say what is signed");
        assert!(prose.contains("Sources:"), "{name} has no sources");
        assert!(loaded.retry_horizon_secs > 0 && !loaded.secret_hint.is_empty() && !loaded.setup.is_empty(), "{name}");
        assert_eq!(loaded.experimental, loaded.confidence == Confidence::Memory, "{name}: memory is experimental");
        let mut known: Vec<&str> =
            loaded.params.iter().filter(|param| !param.optional).map(|param| param.name.as_str()).collect();
        known.sort_unstable();
        let mut needed = loaded.verify.params();
        if name == "plaid" {
            needed.extend(["api_secret", "client_id"]);
        }
        assert_eq!(known, needed, "{name}: params");
        for param in loaded.handshakes.params() {
            assert!(loaded.params.iter().any(|known| known.name == param), "{name}: {param}");
        }
    }
    assert!(Preset::named("nobody").is_none());
    assert_eq!(Preset::named("whatsapp").unwrap().name, "meta");
}

#[test]
fn names_and_aliases_are_unique() {
    let mut names: Vec<&str> = Preset::all()
        .iter()
        .flat_map(|preset| preset.aliases.iter().chain([&preset.name]))
        .map(String::as_str)
        .collect();
    let count = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), count);
}

#[test]
fn samples_are_events_with_an_identity() {
    for side in Side::all() {
        let (preset, name) = (side.preset, &side.preset.name);
        let items = |id: &str| side.identify(&side.genuine_named(0, id, NOW), NOW).items().to_vec();
        let first = items("evt_1");
        let [item] = first.as_slice() else { panic!("{name}: {} events", first.len()) };
        assert_eq!(item.quarantine, None, "{name}");
        assert_eq!(items("evt_1")[0].key, item.key, "{name}: the same event has the same key");
        // These samples have one body, whatever their id.
        if !["paddle-classic", "braintree", "qstash"].contains(&name.as_str()) {
            assert_ne!(items("evt_2")[0].key, item.key, "{name}: another event has another key");
        }
        let untyped = [
            "mollie-classic",
            "recurly-xml",
            "mandrill",
            "x",
            "telegram",
            "dropbox",
            "qstash",
            "replicate",
            "idempotency-key",
        ];
        if !untyped.contains(&name.as_str()) {
            assert_eq!(item.kind.as_deref(), Some(preset.sample.kind.as_str()), "{name}");
        }
        if !["mandrill", "qstash", "recurly-xml", "idempotency-key"].contains(&name.as_str()) {
            assert!(item.entity.is_some(), "{name} has no entity");
        }
        let by_digest = item.key == EventKey::of_digest(&item.digest);
        assert_eq!(by_digest, is_known_by_digest(name, &preset.sample.kind), "{name}: {}", item.key);
    }
}

/// Is the digest the key of such an event? Discord gives ids to interactions, whose types are numbers, and not to events.
fn is_known_by_digest(name: &str, kind: &str) -> bool {
    let declared = ["type", "entity"].map(|next| format!("\nkey = \"digest\"\n{next}"));
    declared.iter().any(|text| file(name).contains(text)) || name == "discord" && kind != "2"
}

/// Providers of which several types of events can be sent, beside the one that is sent by default.
const WITH_SEVERAL_TYPES: [(&str, usize); 24] = [
    ("adyen", 4),
    ("calendly", 2),
    ("discord", 3),
    ("docusign", 3),
    ("github", 2),
    ("gitlab", 3),
    ("gitlab-signed", 3),
    ("hubspot", 4),
    ("intercom", 3),
    ("linear", 3),
    ("mailgun", 3),
    ("mollie", 2),
    ("paypal", 3),
    ("razorpay", 4),
    ("sendgrid", 4),
    ("shopify", 4),
    ("slack", 2),
    ("square", 3),
    ("stripe", 3),
    ("twilio", 3),
    ("typeform", 1),
    ("woocommerce", 3),
    ("zendesk", 3),
    ("zoom", 3),
];

#[test]
fn r45_samples_of_other_types_are_genuine_events_of_that_type_with_an_identity() {
    for side in Side::all() {
        let (name, sample) = (side.preset.name.as_str(), &side.preset.sample);
        assert!(!sample.other.contains_key(&sample.kind), "{name}: {} has a body already", sample.kind);
        for kind in sample.other.keys() {
            let items = |id: &str| {
                let (headers, body) = sample.render(id, Some(kind), NOW).unwrap();
                let sent = side.sign(Sent { headers, body, ..Sent::new(b"") }, 0, id, NOW);
                assert_eq!(side.check(&[0], &sent, NOW), Ok(0), "{name} {kind}");
                side.identify(&sent, NOW).items().to_vec()
            };
            let (first, again, other) = (items("evt_7"), items("evt_7"), items("evt_8"));
            assert_eq!(first.len() > 1, kind == "batch", "{name} {kind}: {} events", first.len());
            for (index, item) in first.iter().enumerate() {
                let what = format!("{name} {kind}, event {index}");
                assert_eq!(item.quarantine, None, "{what}");
                assert_eq!(item.key, again[index].key, "{what}: the same event has the same key");
                assert_ne!(item.key, other[index].key, "{what}: another event has another key");
                let by_digest = item.key == EventKey::of_digest(&item.digest);
                assert_eq!(by_digest, is_known_by_digest(name, kind), "{what}: {}", item.key);
                if kind != "batch" {
                    assert_eq!(item.kind.as_deref(), Some(kind.as_str()), "{what}");
                }
                // A push to GitLab is about a branch, which has no number.
                assert_eq!(item.entity.is_some(), !(name.starts_with("gitlab") && kind == "push"), "{what}");
            }
            let keys: std::collections::BTreeSet<_> = first.iter().map(|item| item.key.as_bytes()).collect();
            assert_eq!(keys.len(), first.len(), "{name} {kind}: the events are different ones");
        }
    }
    for (name, types) in WITH_SEVERAL_TYPES {
        assert_eq!(preset(name).sample.other.len(), types, "{name}");
    }
}

#[test]
fn a_sample_of_another_type_may_have_headers_of_its_own() {
    let sample = &preset("gitlab").sample;
    for (kind, header) in [(None, "Issue Hook"), (Some("push"), "Push Hook"), (Some("other"), "Issue Hook")] {
        let (headers, _) = sample.render("1", kind, NOW).unwrap();
        assert_eq!(headers["x-gitlab-event"], header);
        assert_eq!(headers["idempotency-key"], "1", "the others are the sample's");
    }
}

#[test]
fn samples_take_another_type_and_a_hostile_id() {
    let sample = &preset("stripe").sample;
    let (_, body) = sample.render("a\"b$kind", Some("invoice.paid"), NOW).unwrap();
    let value: serde_json::Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(value["id"], "a\"b$kind");
    assert_eq!(value["type"], "invoice.paid");
    assert!(preset("github").sample.render("a\nb", None, NOW).is_err());
    let (headers, _) = preset("github").sample.render("1", Some("push"), NOW).unwrap();
    assert_eq!(headers["x-github-event"], "push");
}

#[test]
fn what_is_protected_is_computed() {
    for (name, integrity, key_is_signed) in [
        ("stripe", Integrity::Body, true),
        ("github", Integrity::Body, false),
        ("shopify", Integrity::Body, false),
        ("slack", Integrity::Body, true),
        ("standard-webhooks", Integrity::Body, true),
        ("svix", Integrity::Body, true),
        ("gitlab", Integrity::None, false),
        ("discord", Integrity::Body, true),
    ] {
        let preset = preset(name);
        assert_eq!(preset.verify.integrity(), integrity, "{name}");
        let identifier = Identifier::new(&preset.identify, &preset.verify, MissingKey::Digest).unwrap();
        assert_eq!(identifier.key_is_signed(), key_is_signed, "{name}");
        let by_digest = preset.identify.clone().with_key(&["digest"]).unwrap();
        let identifier = Identifier::new(&by_digest, &preset.verify, MissingKey::Digest).unwrap();
        assert_eq!(identifier.key_is_signed(), integrity == Integrity::Body, "{name}");
    }
}

#[test]
fn both_families_of_shopify_headers_are_read() {
    let preset = preset("shopify");
    let (signing, verifying) = key_pairs("shopify")[0];
    let new = genuine(preset, signing, NOW);
    let mut classic = Sent::new(&new.body);
    for (name, value) in &new.headers {
        let name = if name.as_str().starts_with("shopify-") { format!("x-{name}") } else { name.to_string() };
        classic.add(&name, value.as_bytes());
    }
    assert!(classic.headers.contains_key("x-shopify-hmac-sha256"));
    assert_eq!(identified(preset, verifying, &classic), identified(preset, verifying, &new));
    assert_eq!(identified(preset, verifying, &new).entity.as_deref(), Some("sample.myshopify.com:820982911946154508"));
}

#[test]
fn gitlab_does_not_use_the_ids_that_change() {
    let preset = preset("gitlab");
    let (signing, verifying) = key_pairs("gitlab")[0];
    let sent = genuine(preset, signing, NOW)
        .without("idempotency-key")
        .with("x-gitlab-webhook-uuid", "per-attempt")
        .with("x-gitlab-event-uuid", "shared");
    let item = identified(preset, verifying, &sent);
    assert_eq!(item.key, EventKey::of_digest(&item.digest));
}

#[test]
fn stripe_ignores_the_counter_of_pending_webhooks() {
    let preset = preset("stripe");
    let (signing, verifying) = key_pairs("stripe")[0];
    let of = |count: &str| {
        let body = format!("{{\"id\":\"evt_1\",\"pending_webhooks\":{count}}}");
        identified(preset, verifying, &Sent::new(body.as_bytes()).signed(&preset.verify, signing, "", NOW)).digest
    };
    assert_eq!(of("1"), of("12"));
}

#[test]
fn discord_events_without_an_id_are_known_by_their_content() {
    let preset = preset("discord");
    let (signing, verifying) = key_pairs("discord")[0];
    let body = br#"{"version":1,"application_id":"9","type":1,"event":{"type":"ENTITLEMENT_CREATE","timestamp":"2023-11-14T22:13:20.5Z","data":{"id":"e1"}}}"#;
    let item = identified(preset, verifying, &Sent::new(body).signed(&preset.verify, signing, "", NOW));
    assert_eq!(item.key, EventKey::of_digest(&item.digest));
    assert_eq!(item.kind.as_deref(), Some("ENTITLEMENT_CREATE"));
    assert_eq!(item.entity.as_deref(), Some("9:e1"));
    assert_eq!(item.occurred_at, Some(UnixMicros(1_700_000_000_500_000)));
    let interaction = br#"{"id":"55","application_id":"9","type":2,"data":{"id":"cmd"}}"#;
    let item = identified(preset, verifying, &Sent::new(interaction).signed(&preset.verify, signing, "", NOW));
    assert_eq!((item.key.as_bytes(), item.kind.as_deref()), (&b"55"[..], Some("2")));
}

#[test]
fn a_signer_wants_the_private_half_and_a_plain_id() {
    let scheme = &preset("standard-webhooks").verify;
    let public = secret("whpk_11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo=");
    assert!(Signer::new(scheme, &public).unwrap_err().to_string().contains("private half"));
    let signer = Signer::new(scheme, &secret("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")).unwrap();
    let sent = Sent::new(b"{}");
    for id in ["a.b", "", "a\nb"] {
        assert!(signer.sign(&sent.request(), id, NOW).is_err(), "{id:?}");
    }
}

#[test]
fn mistakes_in_an_own_identification_do_not_load() {
    for text in [
        "key = \"id\"",
        "key = []",
        "digest_if = [\"id\"]",
        "container = \"zip:a\"",
        "container = \"form:a\"\nitems = \"/b\"",
        "items = []",
        "key = \"/id?\"",
        "key = \"header:a b\"",
        "key = \"\"",
        "key = \"json:\"",
        "items = \"events\"",
        "volatile = [\"\"]",
        "time = { from = \"/t\", unit = \"min\" }",
        "ky = \"/id\"",
        "key = \"/a|id\"",
    ] {
        assert!(toml::from_str::<oncehook_verify::Identify>(text).is_err(), "{text}");
    }
    for text in [
        "key = [\"digest\", \"/id\"]",
        "key = \"json:/id\"",
        "key = \"header:a|b|/c\"",
        "key = [\"/a\", \"header:b\"]",
        "",
        "items = \"\"",
    ] {
        assert!(toml::from_str::<oncehook_verify::Identify>(text).is_ok(), "{text}");
    }
}
