//! The sixteen traps that were found while reading how providers sign. Each has a test that names it.

use oncehook_verify::{EventKey, Integrity, Preset, Signer, UnixMicros};

use crate::kit::{NOW, Sent, Side, preset, secret};

fn integrity(name: &str) -> Integrity {
    preset(name).verify.integrity()
}

/// Keys of the events in a body that is genuine for this preset.
fn keys(name: &str, body: &str, headers: &[(&str, &str)]) -> Vec<EventKey> {
    let side = Side::of(name);
    let mut sent = Sent::new(body.as_bytes());
    for (header, value) in headers {
        sent.add(header, value);
    }
    let sent = side.sign(sent, 0, "evt_1", NOW);
    side.identify(&sent, NOW).items().iter().map(|item| item.key.clone()).collect()
}

#[test]
fn trap_1_the_raw_bytes_count_and_not_what_they_mean() {
    for name in ["sentry", "webflow", "zoom", "workos", "easypost"] {
        let side = Side::of(name);
        let spaced = Sent::new(br#"{ "weight" : 1.0,"b":"\u00e9" }"#).with("x-contentful-topic", "t");
        let sent = side.sign(spaced, 0, "evt_1", NOW);
        assert_eq!(side.check(&[0], &sent, NOW), Ok(0), "{name}");
        let value: serde_json::Value = serde_json::from_slice(&sent.body).unwrap();
        let again = Sent { body: value.to_string().into_bytes(), ..sent };
        assert!(side.check(&[0], &again, NOW).is_err(), "{name} accepts JSON that was written anew");
    }
}

#[test]
fn trap_2_what_is_signed_is_computed_and_shown() {
    for name in ["adyen", "mailgun", "dropbox-sign", "mercado-pago", "paypal"] {
        assert_eq!(integrity(name), Integrity::Fields, "{name}");
    }
    for name in [
        "google-pubsub",
        "atlassian-connect",
        "microsoft-graph",
        "figma",
        "telegram",
        "gitlab",
        "chargebee",
        "postmark",
        "okta",
    ] {
        assert_eq!(integrity(name), Integrity::None, "{name}");
    }
    for name in ["stripe", "netlify", "plaid", "qstash", "contentful", "coinbase-cdp", "livekit"] {
        assert_eq!(integrity(name), Integrity::Body, "{name}");
    }
    let signed = Preset::all().iter().filter(|preset| preset.verify.integrity() == Integrity::Body).count();
    assert!(signed > 75, "{signed}");
}

#[test]
fn trap_2_a_json_body_of_twilio_is_tied_by_its_hash() {
    let side = Side::of("twilio");
    let json = || Sent::new(br#"{"property": "value"}"#).with("content-type", "application/json");
    let sent = side.sign(json(), 0, "evt_1", NOW);
    assert!(sent.path.contains("bodySHA256="), "{}", sent.path);
    assert_eq!(side.check(&[0], &sent, NOW), Ok(0));
    let other = Sent { body: br#"{"property": "other"}"#.to_vec(), ..sent.clone() };
    assert_eq!(side.check(&[0], &other, NOW).unwrap_err().code(), "body_hash_mismatch");
    // Without the hash the body would be free: it is read as a form, which the signature does not fit.
    let bare = Sent { path: "/webhooks/test".into(), ..sent };
    assert!(side.check(&[0], &bare, NOW).is_err());
}

#[test]
fn trap_3_an_unsigned_time_is_not_enforced() {
    for (name, header) in
        [("sentry", "sentry-hook-timestamp"), ("shopify", "shopify-triggered-at"), ("linear", "linear-timestamp")]
    {
        let side = Side::of(name);
        let sent = side.genuine(0, NOW).replacing(header, "1");
        assert_eq!(side.check(&[0], &sent, NOW), Ok(0), "{name}: {header} is not signed and must not decide");
    }
    // And a scheme that would rely on one does not load.
    let text = "algorithm = \"hmac-sha256\"\nkey = \"utf8\"\ncontent = \"{body}\"\nsignature = { header = \"x-sig\", encoding = \"hex\" }\ntimestamp = { header = \"sentry-hook-timestamp\", unit = \"s\" }";
    assert!(toml::from_str::<oncehook_verify::Scheme>(text).unwrap_err().to_string().contains("protects nothing"));
}

#[test]
fn trap_4_age_is_checked_on_both_sides() {
    for name in ["stripe", "mux", "workos", "elevenlabs", "hubspot", "slack", "paddle"] {
        let side = Side::of(name);
        let sent = side.genuine(0, NOW);
        let tolerance = i64::try_from(side.preset.verify.default_tolerance_secs().unwrap()).unwrap();
        let at = |secs: i64| side.check(&[0], &sent, UnixMicros(NOW.0 + secs * 1_000_000));
        assert_eq!(at(tolerance + 1).unwrap_err().code(), "too_old", "{name}");
        assert_eq!(at(-tolerance - 1).unwrap_err().code(), "in_future", "{name}");
    }
}

#[test]
fn trap_5_each_provider_has_its_own_tolerance() {
    for (name, secs) in [
        ("paddle", 5),
        ("contentful", 30),
        ("linear", 60),
        ("workos", 180),
        ("stripe", 300),
        ("twitch", 600),
        ("mailgun", 900),
        ("elevenlabs", 1_800),
    ] {
        assert_eq!(preset(name).verify.default_tolerance_secs(), Some(secs), "{name}");
    }
}

#[test]
fn trap_6_keys_outlive_the_longest_retry_and_not_the_tolerance() {
    const DAY: u64 = 86_400;
    for (name, at_least) in [
        ("adyen", 30 * DAY),
        ("google-pubsub", 7 * DAY),
        ("meta", 7 * DAY),
        ("stripe", 3 * DAY),
        ("paypal", 3 * DAY),
        ("paddle", 3 * DAY),
        ("coinbase-commerce", 3 * DAY),
        ("standard-webhooks", 75 * 3_600),
    ] {
        assert!(preset(name).retry_horizon_secs >= at_least, "{name}");
    }
    for preset in Preset::all() {
        let tolerance = preset.verify.default_tolerance_secs().unwrap_or(0);
        assert!(
            preset.retry_horizon_secs >= tolerance,
            "{}: copies are accepted for longer than keys are kept",
            preset.name
        );
        assert!(preset.retry_horizon_secs <= 35 * DAY, "{}: longer than keys are kept by default", preset.name);
    }
}

#[test]
fn trap_7_bodies_that_change_between_attempts_are_the_same_event() {
    for (name, first, second) in [
        (
            "coinbase-commerce",
            r#"{"id":1,"attempt_number":1,"scheduled_for":"a","event":{"id":"e1"}}"#,
            r#"{"id":2,"attempt_number":2,"scheduled_for":"b","event":{"id":"e1"}}"#,
        ),
        ("notion", r#"{"id":"e1","attempt_number":1}"#, r#"{"id":"e1","attempt_number":7}"#),
        (
            "hubspot",
            r#"[{"eventId":1,"subscriptionId":2,"objectId":3,"occurredAt":4,"attemptNumber":0}]"#,
            r#"[{"eventId":1,"subscriptionId":2,"objectId":3,"occurredAt":4,"attemptNumber":3}]"#,
        ),
        ("intercom", r#"{"id":"n1","delivery_attempts":1}"#, r#"{"id":"n1","delivery_attempts":2}"#),
        (
            "line",
            r#"{"events":[{"webhookEventId":"w","deliveryContext":{"isRedelivery":false}}]}"#,
            r#"{"events":[{"webhookEventId":"w","deliveryContext":{"isRedelivery":true}}]}"#,
        ),
    ] {
        let side = Side::of(name);
        let item =
            |body: &str| side.identify(&side.sign(Sent::new(body.as_bytes()), 0, "evt_1", NOW), NOW).items()[0].clone();
        let (first, second) = (item(first), item(second));
        assert_eq!(first.key, second.key, "{name}");
        assert_eq!(first.digest, second.digest, "{name}: a retry would be a conflict");
    }
}

#[test]
fn trap_8_ids_that_are_no_ids_are_not_used() {
    let woo = |body: &str| {
        keys(
            "woocommerce",
            body,
            &[
                ("x-wc-webhook-delivery-id", "same-second"),
                ("x-wc-webhook-source", "https://s/"),
                ("x-wc-webhook-id", "5"),
                ("x-wc-webhook-topic", "order.updated"),
            ],
        )
    };
    assert_ne!(woo(r#"{"id":1}"#), woo(r#"{"id":2}"#), "two events of one second share the delivery id");
    let gitlab = |uuid: &str| {
        keys(
            "gitlab",
            r#"{"object_kind":"push"}"#,
            &[("idempotency-key", "k1"), ("x-gitlab-webhook-uuid", uuid), ("x-gitlab-event-uuid", "shared")],
        )
    };
    assert_eq!(gitlab("attempt-1"), gitlab("attempt-2"));
    let sentry =
        |id: &str| keys("sentry", r#"{"action":"created"}"#, &[("sentry-hook-resource", "issue"), ("request-id", id)]);
    assert_eq!(sentry("r1"), sentry("r2"), "a repeated task makes a new request id");
    let hubspot = |object: u32| {
        keys("hubspot", &format!(r#"[{{"eventId":1,"subscriptionId":2,"objectId":{object},"occurredAt":4}}]"#), &[])
    };
    assert_ne!(hubspot(3), hubspot(4), "the event id alone is not promised to be unique");
    let recurly = |event: &str| {
        keys(
            "recurly",
            &format!(
                r#"{{"id":"a","object_type":"account","event_type":"{event}","event_time":"2022-09-13T21:18:40Z"}}"#
            ),
            &[],
        )
    };
    assert_ne!(recurly("created"), recurly("updated"));
}

/// One event through two subscriptions of an endpoint has two ids, and both are kept; sources are told apart by the journal.
#[test]
fn trap_9_two_subscriptions_give_two_events() {
    let shopify =
        |webhook: &str| keys("shopify", "{}", &[("shopify-webhook-id", webhook), ("shopify-event-id", "shared")]);
    assert_ne!(shopify("w1"), shopify("w2"));
    let github = |delivery: &str| keys("github", "{}", &[("x-github-delivery", delivery), ("x-github-hook-id", "1")]);
    assert_ne!(github("d1"), github("d2"));
}

/// What the gateway answers itself (401 for a wrong signature, 503 when it cannot store) is tested at the front door.
#[test]
fn trap_10_statuses_and_bodies_that_providers_insist_on() {
    for (name, status, body) in [
        ("adyen", 200, Some("[accepted]")),
        ("dropbox-sign", 200, Some("Hello API Event Received")),
        ("discord", 204, None),
        ("pagerduty", 202, None),
        ("microsoft-graph", 202, None),
        ("twilio", 204, None),
        ("xero", 200, Some("")),
    ] {
        let ack = &preset(name).ack;
        assert_eq!((ack.status, ack.body.as_deref()), (status, body), "{name}");
    }
    for preset in Preset::all() {
        assert!((200..300).contains(&preset.ack.status), "{}", preset.name);
    }
}

#[test]
fn trap_11_the_tightest_deadlines_are_known() {
    for (name, secs) in [
        ("sentry", 1),
        ("line", 2),
        ("slack", 3),
        ("zoom", 3),
        ("discord", 3),
        ("microsoft-graph", 3),
        ("okta", 3),
        ("shopify", 5),
        ("paddle", 5),
        ("pagerduty", 5),
        ("xero", 5),
        ("linear", 5),
    ] {
        assert_eq!(preset(name).timeout_secs, Some(secs), "{name}");
    }
}

#[test]
fn trap_12_who_never_retries_is_known() {
    let never: Vec<&str> =
        Preset::all().iter().filter(|preset| !preset.retries).map(|preset| preset.name.as_str()).collect();
    assert_eq!(never, ["github", "woocommerce"]);
}

#[test]
fn trap_14_older_versions_beside_a_signature_are_not_looked_at() {
    // HubSpot sends v1, v2 and v3 together; an attacker would offer v1, which has no time.
    let side = Side::of("hubspot");
    let v1 = Side::of("hubspot-v1");
    let body = br#"[{"eventId":1}]"#;
    let both = side.sign(v1.sign(Sent::new(body).with("x-hubspot-signature-version", "v1"), 0, "", NOW), 0, "", NOW);
    assert_eq!(side.check(&[0], &both, NOW), Ok(0));
    let only_v1 = both.clone().without("x-hubspot-signature-v3");
    assert_eq!(side.check(&[0], &only_v1, NOW).unwrap_err().code(), "missing_header");
    assert!(v1.check(&[0], &both.replacing("x-hubspot-signature-version", "v2"), NOW).is_err());
    // Stripe v0, CircleCI v2, GitHub with SHA-1, Twilio's announcement of another algorithm.
    let stripe = Side::of("stripe").genuine(0, NOW);
    let v0 = stripe.header("stripe-signature").replace("v1=", "v0=");
    assert!(Side::of("stripe").check(&[0], &stripe.replacing("stripe-signature", v0), NOW).is_err());
    let circle = Side::of("circleci").genuine(0, NOW);
    let v2 = circle.header("circleci-signature").replace("v1=", "v2=");
    assert!(Side::of("circleci").check(&[0], &circle.replacing("circleci-signature", v2), NOW).is_err());
    let github = Side::of("github").genuine(0, NOW);
    let sha1 =
        github.clone().without("x-hub-signature-256").with("x-hub-signature", github.header("x-hub-signature-256"));
    assert!(Side::of("github").check(&[0], &sha1, NOW).is_err());
    let twilio = Side::of("twilio");
    let told = twilio.genuine(0, NOW).with("x-twilio-webhooks-signature-settings", "key=x,algorithm=HMAC_SHA256");
    assert_eq!(twilio.check(&[0], &told, NOW), Ok(0), "what the header asks for is not obeyed");
}

#[test]
fn trap_15_tables_of_third_parties_were_wrong_here() {
    let length = |name: &str| {
        let side = Side::of(name);
        let header = side.preset.verify.signature_headers().next().unwrap().to_string();
        side.genuine(0, NOW).header(&header)
    };
    assert_eq!(length("vercel").len(), 40, "SHA-1, not SHA-256");
    let sanity = length("sanity");
    assert!(!sanity.ends_with('=') && !sanity.contains(['+', '/']), "URL-safe and not padded: {sanity}");
    assert!(length("elevenlabs").contains(",v0="), "not Standard Webhooks");
    // Amazon signs the token of an unsubscription as well; a library leaves it out.
    let side = Side::of("aws-sns");
    let (headers, body) = side.preset.sample.render("m1", Some("UnsubscribeConfirmation"), NOW).unwrap();
    let body = String::from_utf8(body)
        .unwrap()
        .replace("\"Message\":", "\"Token\":\"t1\",\"SubscribeURL\":\"https://u\",\"Message\":");
    let signer = Signer::with(&side.preset.verify, &secret(&side.pairs[0].0), side.settings.clone()).unwrap();
    let sent = Sent { headers, body: body.into_bytes(), ..Sent::new(b"") }.signed_with(&signer, "m1", NOW);
    assert_eq!(side.check(&[0], &sent, NOW), Ok(0));
    let text = String::from_utf8(sent.body.clone()).unwrap().replace("\"t1\"", "\"t2\"");
    assert!(side.check(&[0], &Sent { body: text.into_bytes(), ..sent }, NOW).is_err());
}

#[test]
fn trap_16_batches_are_split_and_each_event_has_its_own_key() {
    for (name, body, count) in [
        ("sendgrid", r#"[{"sg_event_id":"a"},{"sg_event_id":"b"}]"#, 2),
        (
            "hubspot",
            r#"[{"eventId":1,"subscriptionId":1,"objectId":1,"occurredAt":1},{"eventId":2,"subscriptionId":1,"objectId":1,"occurredAt":1}]"#,
            2,
        ),
        ("gocardless", r#"{"events":[{"id":"EV1"},{"id":"EV2"},{"id":"EV3"}]}"#, 3),
        ("line", r#"{"events":[{"webhookEventId":"1"},{"webhookEventId":"2"}]}"#, 2),
        ("microsoft-graph", r#"{"value":[{"id":"1","clientState":""},{"id":"2","clientState":""}]}"#, 2),
        (
            "meta",
            r#"{"entry":[{"changes":[{"value":{"messages":[{"id":"m1","type":"text"}]}},{"value":{"statuses":[{"id":"m1","status":"read"}]}}]},{"messaging":[{"message":{"mid":"x"}}]}]}"#,
            3,
        ),
        ("okta", r#"{"data":{"events":[{"uuid":"1"},{"uuid":"2"}]}}"#, 2),
        (
            "xero",
            r#"{"events":[{"resourceId":"1","eventType":"UPDATE","eventDateUtc":"2026-01-01T00:00:00Z"},{"resourceId":"2","eventType":"UPDATE","eventDateUtc":"2026-01-01T00:00:00Z"}]}"#,
            2,
        ),
        (
            "quickbooks",
            r#"{"eventNotifications":[{"realmId":"1","dataChangeEvent":{"entities":[{"name":"Customer","id":"1","operation":"Update","lastUpdated":"t"}]}},{"realmId":"2","dataChangeEvent":{"entities":[{"name":"Customer","id":"1","operation":"Update","lastUpdated":"t"}]}}]}"#,
            2,
        ),
        (
            "adyen",
            r#"{"notificationItems":[{"NotificationRequestItem":{"eventCode":"CAPTURE","pspReference":"1","success":"true","additionalData":{"hmacSignature":""}}},{"NotificationRequestItem":{"eventCode":"REFUND","pspReference":"1","success":"true","additionalData":{"hmacSignature":""}}}]}"#,
            2,
        ),
        ("auth0", r#"[{"log_id":"1"},{"log_id":"2"}]"#, 2),
        ("mailtrap", r#"{"events":[{"event_id":"1"},{"event_id":"2"}]}"#, 2),
    ] {
        let mut keys = keys(name, body, &[]);
        assert_eq!(keys.len(), count, "{name}");
        assert!(keys.iter().all(|key| !key.as_bytes().starts_with(b"sha256:")), "{name}: {keys:?}");
        keys.sort();
        keys.dedup();
        assert_eq!(keys.len(), count, "{name}: every event has its own key");
    }
}

/// A change with several messages is kept whole and known by its content, so that no message hides behind another.
#[test]
fn trap_16_nothing_hides_behind_the_first_of_several() {
    let meta = |messages: &str| {
        keys("meta", &format!(r#"{{"entry":[{{"changes":[{{"value":{{"messages":[{messages}]}}}}]}}]}}"#), &[])
    };
    let (one, both) =
        (meta(r#"{"id":"a","type":"text"}"#), meta(r#"{"id":"a","type":"text"},{"id":"b","type":"text"}"#));
    assert_ne!(one, both, "the second message would be lost as a duplicate of the first");
}

/// In Adyen's and Microsoft's batches every item is signed for itself: one forged item refuses the request.
#[test]
fn trap_16_one_forged_item_refuses_the_whole_request() {
    for (name, genuine, forged) in [("adyen", "CAPTURE", "REFUNDX"), ("microsoft-graph", "\"created\"", "\"deleted\"")]
    {
        let side = Side::of(name);
        let body = match name {
            "adyen" => {
                r#"{"notificationItems":[{"NotificationRequestItem":{"eventCode":"REFUND","pspReference":"1","additionalData":{"hmacSignature":""}}},{"NotificationRequestItem":{"eventCode":"CAPTURE","pspReference":"1","additionalData":{"hmacSignature":""}}}]}"#
            }
            _ => {
                r#"{"value":[{"id":"1","clientState":"","changeType":"updated"},{"id":"2","clientState":"","changeType":"created"}]}"#
            }
        };
        let sent = side.sign(Sent::new(body.as_bytes()), 0, "", NOW);
        assert_eq!(side.check(&[0], &sent, NOW), Ok(0), "{name}");
        let text = String::from_utf8(sent.body.clone()).unwrap();
        let bent = match name {
            "adyen" => text.replace(genuine, forged),
            // Nothing is signed here; what can be wrong is the secret itself.
            _ => text.replacen(&side.pairs[0].1, "guessed", 1),
        };
        assert_ne!(bent, text);
        assert!(side.check(&[0], &Sent { body: bent.into_bytes(), ..sent.clone() }, NOW).is_err(), "{name}");
        let none = text.split_once('[').unwrap().0.to_owned() + "[]}";
        assert!(
            side.check(&[0], &Sent { body: none.into_bytes(), ..sent }, NOW).is_err(),
            "{name}: no items prove nothing"
        );
    }
}
