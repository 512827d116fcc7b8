//! Signatures made by the providers themselves, or accepted by their official libraries. Each is verified and
//! made again.

use crate::kit::{EVENT, NOW, PUBLIC_1, SEED_1, Sent, Side, URL, check, scheme, scheme_from, secret as secret_of};
use oncehook_verify::{Scheme, Settings, Signer, UnixMicros, Verifier};

const SLACK_BODY: &[u8] = b"token=xyzz0WbapA4vBCDEFasx0q6G&team_id=T1DC2JH3J&team_domain=testteamnow&channel_id=G8PSS9T3V&channel_name=foobar&user_id=U2CERLKJA&user_name=roadrunner&command=%2Fwebhook-collect&text=&response_url=https%3A%2F%2Fhooks.slack.com%2Fcommands%2FT1DC2JH3J%2F397700885554%2F96rGlfmibIGlgcZRskXaIFfN&trigger_id=398738663015.47445629121.803a0bc887a14d10d2c447fce8b6703c";

/// One published signature: what was signed with what, and the headers that came out.
struct Vector<'a> {
    scheme: &'a Scheme,
    sign: &'a str,
    verify: &'a str,
    id: &'a str,
    signed_at: UnixMicros,
    body: &'a [u8],
    headers: &'a [(&'a str, &'a str)],
}

/// The published headers must verify, and signing must give exactly them.
fn check_vector(vector: &Vector<'_>) {
    let mut sent = Sent::new(vector.body);
    for (name, value) in vector.headers {
        sent.add(name, value);
    }
    let now = UnixMicros(vector.signed_at.0 + 1_000_000);
    assert_eq!(check(vector.scheme, &[vector.verify], &sent, now), Ok(0), "{:?}", vector.headers);

    let signed = Sent::new(vector.body).signed(vector.scheme, vector.sign, vector.id, vector.signed_at);
    assert_eq!(signed.headers.len(), vector.headers.len());
    for (name, value) in vector.headers {
        assert_eq!(signed.header(name), *value);
    }

    let mut changed = sent.clone();
    changed.body.push(b' ');
    assert!(check(vector.scheme, &[vector.verify], &changed, now).is_err(), "a vector must be able to fail");
}

#[test]
fn stripe_accepted_by_its_library() {
    check_vector(&Vector {
        scheme: scheme("stripe"),
        sign: "whsec_test_secret",
        verify: "whsec_test_secret",
        id: "",
        signed_at: UnixMicros::from_secs(1_700_000_000),
        body: EVENT,
        headers: &[(
            "stripe-signature",
            "t=1700000000,v1=7a99ab077e2eec1a7af80131867af854fca86be409951c51f8a9d0414748f16f",
        )],
    });
}

#[test]
fn github_published_and_accepted_by_its_library() {
    for (secret, body, signature) in [
        (
            "It's a Secret to Everybody",
            &b"Hello, World!"[..],
            "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17",
        ),
        ("mysecret", EVENT, "sha256=fec7445857b9da6782fc8fd8a8cdc96470f10caef98eeb559adeeef9761f6cac"),
    ] {
        check_vector(&Vector {
            scheme: scheme("github"),
            sign: secret,
            verify: secret,
            id: "",
            signed_at: NOW,
            body,
            headers: &[("x-hub-signature-256", signature)],
        });
    }
}

#[test]
fn slack_published() {
    check_vector(&Vector {
        scheme: scheme("slack"),
        sign: "8f742231b10e8888abcd99yyyzzz85a5",
        verify: "8f742231b10e8888abcd99yyyzzz85a5",
        id: "",
        signed_at: UnixMicros::from_secs(1_531_420_618),
        body: SLACK_BODY,
        headers: &[
            ("x-slack-request-timestamp", "1531420618"),
            ("x-slack-signature", "v0=a2114d57b48eac39b9ad189dd8316235a7b4a8d21a10bd27519666489c69b503"),
        ],
    });
}

#[test]
fn svix_published() {
    let secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    for secret in [secret, secret.strip_prefix("whsec_").unwrap()] {
        check_vector(&Vector {
            scheme: scheme("svix"),
            sign: secret,
            verify: secret,
            id: "msg_p5jXN8AQM9LWM0D4loKWxJek",
            signed_at: UnixMicros::from_secs(1_614_265_330),
            body: br#"{"test": 2432232314}"#,
            headers: &[
                ("svix-id", "msg_p5jXN8AQM9LWM0D4loKWxJek"),
                ("svix-timestamp", "1614265330"),
                ("svix-signature", "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="),
            ],
        });
    }
}

#[test]
fn standard_webhooks_published_and_accepted_by_its_library() {
    for (secret, id, secs, body, signature) in [
        (
            "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD",
            "msg_27UH4WbU6Z5A5EzD8u03UvzRbpk",
            "1649367553",
            &br#"{"email":"test@example.com","username":"test_user"}"#[..],
            "v1,tZ1I4/hDygAJgO5TYxiSd6Sd0kDW6hPenDe+bTa3Kkw=",
        ),
        (
            "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
            "msg_1",
            "1700000000",
            EVENT,
            "v1,4ildsyNWmj8H+uic5N+/Lwbo8YDi6V2E6uEmBplBwOI=",
        ),
    ] {
        check_vector(&Vector {
            scheme: scheme("standard-webhooks"),
            sign: secret,
            verify: secret,
            id,
            signed_at: UnixMicros::from_secs(secs.parse().unwrap()),
            body,
            headers: &[("webhook-id", id), ("webhook-timestamp", secs), ("webhook-signature", signature)],
        });
    }
}

#[test]
fn standard_webhooks_asymmetric_made_by_the_formula() {
    check_vector(&Vector {
        scheme: scheme("standard-webhooks"),
        sign: "whsk_nWGxne/9WmC6hEr0kuwsxERJxWl7MmkZcDusAxyuf2A=",
        verify: "whpk_11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo=",
        id: "msg_1",
        signed_at: UnixMicros::from_secs(1_700_000_000),
        body: EVENT,
        headers: &[
            ("webhook-id", "msg_1"),
            ("webhook-timestamp", "1700000000"),
            (
                "webhook-signature",
                "v1a,scfZ9AHLYcETo/liAAdJ+v9RHgcngmyw7hSXC/LBh+r7lSqGUryCMnkUs8AQ0DyPe/AXkFElHUQhJyYvEnxlBg==",
            ),
        ],
    });
}

#[test]
fn discord_accepted_by_its_library() {
    check_vector(&Vector {
        scheme: scheme("discord"),
        sign: SEED_1,
        verify: PUBLIC_1,
        id: "",
        signed_at: UnixMicros::from_secs(1_700_000_000),
        body: EVENT,
        headers: &[
            ("x-signature-timestamp", "1700000000"),
            (
                "x-signature-ed25519",
                "a1e7f12477678a531a668a5fbfeefa9bf5f4aea7c9cebd77c575b5a6643d2b1b6d13870e3f3ea13fb0fb98e1ad39b2b3182a69a6b863cb5f976b01a0542c1b09",
            ),
        ],
    });
}

/// Providers without a preset, described with the same tables: the axes are not made for eight providers only.
#[test]
fn other_providers_as_own_schemes() {
    let body_hmac = |encoding: &str, grammar: &str| {
        scheme_from(&format!(
            "algorithm = \"hmac-sha256\"\nkey = \"utf8\"\ncontent = \"{{body}}\"\nsignature = {{ header = \"x-sig\", grammar = {grammar}, encoding = \"{encoding}\" }}"
        ))
    };
    let timed = |content: &str, grammar: &str, encoding: &str, unit: &str| {
        scheme_from(&format!(
            "algorithm = \"hmac-sha256\"\nkey = \"utf8\"\ncontent = \"{content}\"\nsignature = {{ header = \"x-sig\", grammar = {grammar}, encoding = \"{encoding}\" }}\ntimestamp = {{ unit = \"{unit}\" }}"
        ))
    };
    let kv = |sep: &str, ts: &str, sig: &str| {
        format!("{{ kv = {{ sep = \"{sep}\", eq = \"=\", ts = \"{ts}\", sig = \"{sig}\" }} }}")
    };
    let secs = UnixMicros::from_secs(1_700_000_000);
    let vectors: &[(Scheme, &str, &[u8], &str)] = &[
        // Razorpay, LINE, Pusher, Notion, CircleCI
        (
            body_hmac("hex", "\"raw\""),
            "123456",
            br#"{"a":1,"b":2,"c":{"d":3}}"#,
            "2fe04e22977002e6c7cb553adab8b460cb9e2a4970d5953cb27a8472752e3bbc",
        ),
        (
            body_hmac("base64", "\"raw\""),
            "channel_secret",
            b"bodybodybodybody",
            "/gg9a+LvFevTH1sd7XCQycD7tsWclCsInj7MhBHxN7k=",
        ),
        (
            body_hmac("hex", "\"raw\""),
            "tofu",
            br#"{"time_ms":1403175510755,"events":[{"channel":"test_channel","name":"channel_vacated"}]}"#,
            "c17257e92037cd7de407ebc1ed174ceb7b2e518db127f44411b9ffc4f5b28cc5",
        ),
        (
            body_hmac("hex", "{ prefix = \"sha256=\" }"),
            "secret_tok",
            EVENT,
            "sha256=b77a397bb4636e4ad667063347e257751eb7928d2e9dd5040e5efa00e2da9a0a",
        ),
        (
            body_hmac("hex", "{ kv = { sep = \",\", eq = \"=\", sig = \"v1\" } }"),
            "secret",
            b"foo",
            "v1=773ba44693c7553d6ee20f61ea5d2757a9a4f4a44d2841ae4e95b52e4cd62db4",
        ),
        // Paddle, Mux, WorkOS, ElevenLabs, Sanity
        (
            timed("{ts}:{body}", &kv(";", "ts", "h1"), "hex", "s"),
            "pdl_ntf_test",
            EVENT,
            "ts=1700000000;h1=8aad5f86b4ac3861aa3956ff29ac65a604dd4b5305f58bce6e408e6728214847",
        ),
        (
            timed("{ts}.{body}", &kv(",", "t", "v1"), "hex", "s"),
            "muxsecret",
            EVENT,
            "t=1700000000,v1=d73fee9760108e1da46ee227d2666076ca814534509266907562d3c1a616e924",
        ),
        (
            timed("{ts}.{body}", &kv(", ", "t", "v1"), "hex", "ms"),
            "wsecret",
            EVENT,
            "t=1700000000000, v1=6c1cc49dce79337123b400a569a002a4019ed848ab9bb9ccbff1ab637ba23aaf",
        ),
        (
            timed("{ts}.{body}", &kv(",", "t", "v0"), "hex", "s"),
            "elsecret",
            EVENT,
            "t=1700000000,v0=ef3bc714611570d08505f0b2cd4985146ae40bcf34a3a1489c86c62456fa7704",
        ),
        (
            timed("{ts}.{body}", &kv(",", "t", "v1"), "base64url", "ms"),
            "sanitysecret",
            EVENT,
            "t=1700000000000,v1=DMhw6VlnaevM5h3DwXVbQSwpD4NIh8mfwtD3UFi7pII",
        ),
    ];
    for (scheme, secret, body, signature) in vectors {
        check_vector(&Vector {
            scheme,
            sign: secret,
            verify: secret,
            id: "",
            signed_at: secs,
            body,
            headers: &[("x-sig", signature)],
        });
    }
}

#[test]
fn telnyx_and_adyen_as_own_schemes() {
    let telnyx = scheme_from(
        "algorithm = \"ed25519\"\nkey = \"base64\"\ncontent = \"{ts}|{body}\"\nsignature = { header = \"x-sig\", encoding = \"base64\" }\ntimestamp = { header = \"x-ts\", unit = \"s\" }",
    );
    check_vector(&Vector {
        scheme: &telnyx,
        sign: "nWGxne/9WmC6hEr0kuwsxERJxWl7MmkZcDusAxyuf2A=",
        verify: "11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo=",
        id: "",
        signed_at: UnixMicros::from_secs(1_700_000_000),
        body: EVENT,
        headers: &[
            ("x-ts", "1700000000"),
            ("x-sig", "H2rIDIHMzpWISXWLZPO96Je+FyF2U2rMLByk1Yfrt+7KUNEeAEvhbnDHQD9pMbqqBDslpBxEIC7ZxSg401EyCA=="),
        ],
    });
    let adyen_platform = scheme_from(
        "algorithm = \"hmac-sha256\"\nkey = \"hex\"\ncontent = \"{body}\"\nsignature = { header = \"x-sig\", encoding = \"base64\" }",
    );
    check_vector(&Vector {
        scheme: &adyen_platform,
        sign: "11223344D785FBAE710E7F943F307971BB61B21281C98C9129B3D4018A57B2EB",
        verify: "11223344D785FBAE710E7F943F307971BB61B21281C98C9129B3D4018A57B2EB",
        id: "",
        signed_at: NOW,
        body: EVENT,
        headers: &[("x-sig", "G95iBYdwQQRfZ+AihlejNweVt3XT65VvldQFBmcqNbo=")],
    });
}

/// Paddle publishes a header with one wrong and one right signature.
#[test]
fn paddle_rotation_published() {
    let paddle = scheme_from(
        "algorithm = \"hmac-sha256\"\nkey = \"utf8\"\ncontent = \"{ts}:{body}\"\nsignature = { header = \"paddle-signature\", grammar = { kv = { sep = \";\", eq = \"=\", ts = \"ts\", sig = \"h1\" } }, encoding = \"hex\" }\ntimestamp = { unit = \"s\", tolerance = 5 }",
    );
    let sent = Sent::new(b"hello-world").with(
        "paddle-signature",
        "ts=1696195954;h1=dummy;h1=d96299976a6eb066f484d7fde011ac56fc32b38fc9940bc419d6e537fdc6ef02",
    );
    let now = UnixMicros::from_secs(1_696_195_956);
    let right = "pdl_ntf_01hbpjmytsa32fhr36nqgc3kgb_WvRO0eL4Bj9rgYYIBZY6wZhG4EHy9jzh";
    assert_eq!(check(&paddle, &[right], &sent, now), Ok(0));
    assert_eq!(check(&paddle, &["pdl_ntf_01hbpjmytsa32fhr36nqgc3kgb_other", right], &sent, now), Ok(1));
    assert!(check(&paddle, &["pdl_ntf_01hbpjmytsa32fhr36nqgc3kgb_other"], &sent, now).is_err());
}

/// Published by providers, or accepted by their libraries, and now checked with the presets themselves: secret, body, query,
/// headers, seconds. What the preset signs must be exactly the published headers, wherever the signature is the same each time.
#[test]
fn presets_reproduce_what_providers_publish() {
    let secs = 1_700_000_000;
    let twilio = "https://mycompany.com/myapp.php";
    let form = "CallSid=CA1234567890ABCDE&Caller=%2B14158675309&Digits=1234&From=%2B14158675309&To=%2B18005551212";
    let event = std::str::from_utf8(EVENT).unwrap();
    let gocardless = r#"{"events":[{"id":"EV00BD05S5VM2T","created_at":"2018-07-05T09:13:51.404Z","resource_type":"subscriptions","action":"created","links":{"subscription":"SB0003JJQ2MR06"},"details":{"origin":"api","cause":"subscription_created","description":"Subscription created via the API."},"metadata":{}},{"id":"EV00BD05TB8K63","created_at":"2018-07-05T09:13:56.893Z","resource_type":"mandates","action":"created","links":{"mandate":"MD000AMA19XGEC"},"details":{"origin":"api","cause":"mandate_created","description":"Mandate created via the API."},"metadata":{}}]}"#;
    let recurly = r#"{"id":"rjxwmwedwqug","object_type":"account","site_id":"qc326l1hl8k9","event_type":"created","event_time":"2022-09-13T21:18:40Z","account_code":"adfas23zzz14123"}"#;
    let hubspot = "yyyyyyyy-yyyy-yyyy-yyyy-yyyyyyyyyyyy";
    let v1_body = r#"[{"eventId":1,"subscriptionId":12345,"portalId":62515,"occurredAt":1564113600000,"subscriptionType":"contact.creation","attemptNumber":0,"objectId":123,"changeSource":"CRM","changeFlag":"NEW","appId":54321}]"#;
    for (name, secret, url, query, given, body, micros, header, expected) in [
        (
            "razorpay",
            "123456",
            "",
            "",
            "",
            r#"{"a":1,"b":2,"c":{"d":3}}"#,
            secs * 1_000_000,
            "x-razorpay-signature",
            "2fe04e22977002e6c7cb553adab8b460cb9e2a4970d5953cb27a8472752e3bbc",
        ),
        (
            "circleci",
            "secret",
            "",
            "",
            "",
            "foo",
            secs * 1_000_000,
            "circleci-signature",
            "v1=773ba44693c7553d6ee20f61ea5d2757a9a4f4a44d2841ae4e95b52e4cd62db4",
        ),
        (
            "line",
            "channel_secret",
            "",
            "",
            "",
            "bodybodybodybody",
            secs * 1_000_000,
            "x-line-signature",
            "/gg9a+LvFevTH1sd7XCQycD7tsWclCsInj7MhBHxN7k=",
        ),
        (
            "jira",
            "It's a Secret to Everybody",
            "",
            "",
            "",
            "Hello World!",
            secs * 1_000_000,
            "x-hub-signature",
            "sha256=a4771c39fbe90f317c7824e83ddef3caae9cb3d976c214ace1f2937e133263c9",
        ),
        (
            "twilio",
            "12345",
            twilio,
            "foo=1&bar=2",
            "",
            form,
            secs * 1_000_000,
            "x-twilio-signature",
            "RSOYDt4T1cUTdK1PDd93/VVr8B8=",
        ),
        (
            "twilio",
            "12345",
            "https://mycompany.com:443/myapp.php",
            "foo=1&bar=2",
            "",
            form,
            secs * 1_000_000,
            "x-twilio-signature",
            "kvajT1Ptam85bY51eRf/AJRuM3w=",
        ),
        (
            "twilio",
            "12345",
            "http://mycompany.com:1234/myapp.php",
            "foo=1&bar=2",
            "",
            form,
            secs * 1_000_000,
            "x-twilio-signature",
            "Zmvh+3yNM1Phv2jhDCwEM3q5ebU=",
        ),
        (
            "twilio",
            "12345",
            twilio,
            "foo=1&bar=2",
            "",
            "Sid=CA123&SidAccount=AC123&Digits=5678&Digits=1234&Digits=1234",
            secs * 1_000_000,
            "x-twilio-signature",
            "IK+Dwps556ElfBT0I3Rgjkr1wJU=",
        ),
        (
            "gocardless",
            "ED7D658C-D8EB-4941-948B-3973214F2D49",
            "",
            "",
            "",
            gocardless,
            secs * 1_000_000,
            "webhook-signature",
            "2693754819d3e32d7e8fcb13c729631f316c6de8dc1cf634d6527f1c07276e7e",
        ),
        (
            "recurly",
            "354fab5bd35f5a0d50845ee7e30165244468b13c2c343f104e4e730a59326d9d",
            "",
            "",
            "",
            recurly,
            1_663_103_925_004_000,
            "recurly-signature",
            "1663103925004,ad24699f3beaa24c9af2cc7ada3ce4c835da0090194241b9d3add83d27f14bc3",
        ),
        (
            "hubspot-v1",
            hubspot,
            "",
            "",
            "x-hubspot-signature-version: v1",
            v1_body,
            secs * 1_000_000,
            "x-hubspot-signature",
            "232db2615f3d666fe21a8ec971ac7b5402d33b9a925784df3ca654d05f4817de",
        ),
        (
            "hubspot-v2",
            hubspot,
            "https://www.example.com/webhook_uri",
            "",
            "x-hubspot-signature-version: v2",
            r#"{"example_field":"example_value"}"#,
            secs * 1_000_000,
            "x-hubspot-signature",
            "9569219f8ba981ffa6f6f16aa0f48637d35d728c7e4d93d0d52efaa512af7900",
        ),
        (
            "hubspot",
            hubspot,
            "https://example.com/hooks/hubspot",
            "",
            "",
            event,
            secs * 1_000_000,
            "x-hubspot-signature-v3",
            "rtA4wHHiPoOCtSmhWnINnmEdmRgQPGOxht3YC85BgvY=",
        ),
        (
            "pusher",
            "tofu",
            "",
            "",
            "x-pusher-key: 123456789",
            r#"{"time_ms":1403175510755,"events":[{"channel":"test_channel","name":"channel_vacated"}]}"#,
            secs * 1_000_000,
            "x-pusher-signature",
            "c17257e92037cd7de407ebc1ed174ceb7b2e518db127f44411b9ffc4f5b28cc5",
        ),
        (
            "square",
            "sq_sig_key",
            "https://example.com/hooks/square",
            "",
            "",
            event,
            secs * 1_000_000,
            "x-square-hmacsha256-signature",
            "+VjElWHAxYBQSneOfwILZFHhOBoNAoqB2/1mStZiqJw=",
        ),
        (
            "adyen-platform",
            "11223344D785FBAE710E7F943F307971BB61B21281C98C9129B3D4018A57B2EB",
            "",
            "",
            "",
            event,
            secs * 1_000_000,
            "hmacsignature",
            "G95iBYdwQQRfZ+AihlejNweVt3XT65VvldQFBmcqNbo=",
        ),
        (
            "notion",
            "secret_tok",
            "",
            "",
            "",
            event,
            secs * 1_000_000,
            "x-notion-signature",
            "sha256=b77a397bb4636e4ad667063347e257751eb7928d2e9dd5040e5efa00e2da9a0a",
        ),
        (
            "paddle",
            "pdl_ntf_test",
            "",
            "",
            "",
            event,
            secs * 1_000_000,
            "paddle-signature",
            "ts=1700000000;h1=8aad5f86b4ac3861aa3956ff29ac65a604dd4b5305f58bce6e408e6728214847",
        ),
        (
            "mux",
            "muxsecret",
            "",
            "",
            "",
            event,
            secs * 1_000_000,
            "mux-signature",
            "t=1700000000,v1=d73fee9760108e1da46ee227d2666076ca814534509266907562d3c1a616e924",
        ),
        (
            "workos",
            "wsecret",
            "",
            "",
            "",
            event,
            secs * 1_000_000,
            "workos-signature",
            "t=1700000000000, v1=6c1cc49dce79337123b400a569a002a4019ed848ab9bb9ccbff1ab637ba23aaf",
        ),
        (
            "elevenlabs",
            "elsecret",
            "",
            "",
            "",
            event,
            secs * 1_000_000,
            "elevenlabs-signature",
            "t=1700000000,v0=ef3bc714611570d08505f0b2cd4985146ae40bcf34a3a1489c86c62456fa7704",
        ),
        (
            "sanity",
            "sanitysecret",
            "",
            "",
            "",
            event,
            secs * 1_000_000,
            "sanity-webhook-signature",
            "t=1700000000000,v1=DMhw6VlnaevM5h3DwXVbQSwpD4NIh8mfwtD3UFi7pII",
        ),
        (
            "mercado-pago",
            "mpsecret",
            "",
            "data.id=123456",
            "x-request-id: req-1",
            "{}",
            secs * 1_000_000,
            "x-signature",
            "ts=1700000000,v1=3e02d245c4903596aef74a86864f7e9fbbc5aaa79f4d7669a5e409fd4dd53ae6",
        ),
        (
            "linear",
            "lin_wh_secret",
            "",
            "",
            "",
            r#"{"type":"Issue","action":"create","webhookTimestamp":1700000000000,"webhookId":"w1","data":{"id":"i1"}}"#,
            secs * 1_000_000,
            "linear-signature",
            "24ac6843664b98defd3c13186706deceeda469fe20597e5496db9374387e9ccf",
        ),
        (
            "zoom",
            "zoomsecret",
            "",
            "",
            "",
            event,
            secs * 1_000_000,
            "x-zm-signature",
            "v0=2cf671ce4c8b2a50f95d132b4077e6fbda578291a0754a37699b65f692166844",
        ),
        (
            "telnyx",
            "nWGxne/9WmC6hEr0kuwsxERJxWl7MmkZcDusAxyuf2A=",
            "",
            "",
            "",
            event,
            secs * 1_000_000,
            "telnyx-signature-ed25519",
            "H2rIDIHMzpWISXWLZPO96Je+FyF2U2rMLByk1Yfrt+7KUNEeAEvhbnDHQD9pMbqqBDslpBxEIC7ZxSg401EyCA==",
        ),
    ] {
        let side = Side::of(name);
        let url = if url.is_empty() { URL } else { url };
        let settings = Settings { url: Some(url.to_owned()), ..side.settings.clone() };
        let signer = Signer::with(&side.preset.verify, &secret_of(secret), settings).unwrap();
        let mut sent = Sent::new(body.as_bytes());
        if !query.is_empty() {
            sent = sent.asking(query);
        }
        if let Some((name, value)) = given.split_once(": ") {
            sent.add(name, value);
        }
        let sent = sent.signed_with(&signer, "", UnixMicros(micros));
        assert_eq!(sent.header(header), expected, "{name} {url}");
    }
}

/// Published for Twilio's JSON requests and for Bird's tokens, and verified as they are.
#[test]
fn published_requests_are_accepted_as_they_are() {
    let twilio = Side::of("twilio");
    let settings = Settings { url: Some("https://mycompany.com/myapp.php".into()), ..twilio.settings.clone() };
    let verifier = Verifier::with(&twilio.preset.verify, &[secret_of("12345")], settings).unwrap();
    let sent = Sent::new(br#"{"property": "value", "boolean": true}"#)
        .asking("foo=1&bar=2&bodySHA256=0a1ff7634d9ab3b95db5c9a2dfe9416e41502b283a80c7cf19632632f96e6620")
        .with("x-twilio-signature", "a9nBmqA0ju/hNViExpshrM61xv4=");
    assert!(verifier.verify(&sent.request(), NOW).is_ok());

    let bird = Side::of("bird");
    let settings = Settings { url: Some("https://example.com/path".into()), ..bird.settings.clone() };
    let secret = secret_of("36efdd1aace2e26cd490f0d951138253bef2f7c6d34d18981da781555cc4cebb");
    let verifier = Verifier::with(&bird.preset.verify, &[secret], settings).unwrap();
    let token = "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJpc3MiOiJNZXNzYWdlQmlyZCIsIm5iZiI6MTYyNTQ3OTIwMCwiZXhwIjoxNjI1NDc5MjYwLCJqdGkiOiI5M2U1NTAwNi1hMGU4LTQ1MjYtYTE5MC1mYTVmZjAwZWExMTYiLCJ1cmxfaGFzaCI6IjQxZjA1ZjBkZGQwYTIyYWIyMDlhYzQ2ZjQ3YzQ1NzJkOWNlZmEyNTdlZDc0YjI0MDA0YmFlNzUzZWNlNmMyNjAiLCJwYXlsb2FkX2hhc2giOiJkZmZkNjAyMWJiMmJkNWIwYWY2NzYyOTA4MDllYzNhNTMxOTFkZDgxYzdmNzBhNGIyODY4OGEzNjIxODI5ODZmIn0._H--TOuYFLpeEH39-rg5E3IHVkjHozBcaKVWPRC5m9I";
    let sent = Sent::new(b"Hello, World!").asking("bar=1&foo=2").with("messagebird-signature-jwt", token);
    let now = UnixMicros::parse_rfc3339("2021-07-05T12:00:00+02:00").unwrap();
    assert!(verifier.verify(&sent.request(), now).is_ok());
    assert!(verifier.verify(&sent.request(), UnixMicros(now.0 + 66_000_000)).is_err(), "the token has ended");

    let sendgrid = Side::of("sendgrid");
    let key = "MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAE83T4O/n84iotIvIW4mdBgQ/7dAfSmpqIM8kF9mN1flpVKS3GRqe62gw+2fNNRaINXvVpiglSI8eNEc6wEA3F+g==";
    let body = b"[{\"email\":\"hello@world.com\",\"event\":\"dropped\",\"reason\":\"Bounced Address\",\"sg_event_id\":\"ZHJvcC0xMDk5NDkxOS1MUnpYbF9OSFN0T0doUTRrb2ZTbV9BLTA\",\"sg_message_id\":\"LRzXl_NHStOGhQ4kofSm_A.filterdrecv-p3mdw1-756b745b58-kmzbl-18-5F5FC76C-9.0\",\"smtp-id\":\"<LRzXl_NHStOGhQ4kofSm_A@ismtpd0039p1iad1.sendgrid.net>\",\"timestamp\":1600112492}]\r\n";
    let sent = Sent::new(body).with("x-twilio-email-event-webhook-timestamp", "1600112502").with(
        "x-twilio-email-event-webhook-signature",
        "MEUCIGHQVtGj+Y3LkG9fLcxf3qfI10QysgDWmMOVmxG0u6ZUAiEAyBiXDWzM+uOe5W0JuG+luQAbPIqHh89M15TluLtEZtM=",
    );
    let now = UnixMicros::from_secs(1_600_112_503);
    assert_eq!(check(&sendgrid.preset.verify, &[key], &sent, now), Ok(0));
    let trimmed = Sent { body: sent.body[..sent.body.len() - 2].to_vec(), ..sent };
    assert!(check(&sendgrid.preset.verify, &[key], &trimmed, now).is_err(), "the line ending is signed");

    let adyen = Side::of("adyen");
    let item = r#"{"notificationItems":[{"NotificationRequestItem":{"pspReference":"pspReference","originalReference":"originalReference","merchantAccountCode":"merchantAccount","merchantReference":"reference","amount":{"value":1000,"currency":"EUR"},"eventCode":"CAPTURE","success":"true","additionalData":{"hmacSignature":"xhpHvYq2u2Np0rstbZ6QjLGu7JWhvf7Iwaa6EviJSX0="}}}]}"#;
    let key = "DFB1EB5485895CFA84146406857104ABB4CBCABDC8AAF103A624C8F6A3EAAB00";
    assert_eq!(check(&adyen.preset.verify, &[key], &Sent::new(item.as_bytes()), NOW), Ok(0));

    let mailgun = Side::of("mailgun");
    let body = format!(
        r#"{{"signature":{{"timestamp":"1700000000","token":"{}","signature":"fb3005267934f301440a1fdee8e31c612d48a02f747043dc4cccce20b4a97ede"}}}}"#,
        "a".repeat(50)
    );
    assert_eq!(check(&mailgun.preset.verify, &["key-mg"], &Sent::new(body.as_bytes()), NOW), Ok(0));
}
