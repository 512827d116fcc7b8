//! Signatures made by the providers themselves, or accepted by their official libraries. Each is verified and
//! made again.

use crate::kit::{EVENT, NOW, PUBLIC_1, SEED_1, Sent, check, scheme, scheme_from};
use oncehook_verify::{Scheme, UnixMicros};

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
            (
                "x-sig",
                "H2rIDIHMzpWISXWLZPO96Je+FyF2U2rMLByk1Yfrt+7KUNEeAEvhbnDHQD9pMbqqBDslpBxEIC7ZxSg401EyCA==",
            ),
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
