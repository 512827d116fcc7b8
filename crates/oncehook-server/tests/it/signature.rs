//! Every preset through the front door: genuine requests get in, everything else does not.

use oncehook_server::config::Config;
use oncehook_testkit::gateway::now;
use oncehook_testkit::sender::Answer;
use oncehook_verify::{Preset, Scheme, UnixMicros};

use crate::kit::{Headers, Rig, Signs, raw, value, with, without};

/// The first test of RFC 8032, and another key.
const SEED: &str = "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60";
const PUBLIC: &str = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a";
const OTHER_SEED: &str = "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb";

const TEXT: &str = "the shared secret of 2026";
const OLD_TEXT: &str = "the shared secret of 2025";
const WHSEC: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
const OLD_WHSEC: &str = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD";

const CUSTOM: &str = r#"
[source.verify]
algorithm = "hmac-sha512"
key = "hex"
content = "{method}:{path}:{ts}:{header:x-tenant}:{body}"
signature = { header = "x-acme-signature", grammar = { prefix = "v7=" }, encoding = "base64" }
timestamp = { header = "x-acme-time", unit = "ms", tolerance = 120 }
[source.identify]
key = "/id"
type = "/type"
"#;
const HEX: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";
const OLD_HEX: &str = "ffeeddccbbaa99887766554433221100ffeeddccbbaa99887766554433221100";

/// A source under test: its provider, the secret that signs, the one before it, and one that nobody knows.
struct Case {
    provider: &'static str,
    signs: &'static str,
    signed_before: Option<&'static str>,
    stranger: &'static str,
}

const CASES: [Case; 9] = [
    text_case("stripe"),
    text_case("github"),
    text_case("shopify"),
    text_case("slack"),
    text_case("gitlab"),
    Case {
        provider: "standard-webhooks",
        signs: WHSEC,
        signed_before: Some(OLD_WHSEC),
        stranger: "whsec_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA",
    },
    Case {
        provider: "svix",
        signs: WHSEC,
        signed_before: Some(OLD_WHSEC),
        stranger: "whsec_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA",
    },
    Case { provider: "discord", signs: SEED, signed_before: None, stranger: OTHER_SEED },
    Case {
        provider: "custom",
        signs: HEX,
        signed_before: Some(OLD_HEX),
        stranger: "00000000000000000000000000000000000000000000000000000000000000aa",
    },
];

const fn text_case(provider: &'static str) -> Case {
    Case { provider, signs: TEXT, signed_before: Some(OLD_TEXT), stranger: "the secret of somebody else" }
}

impl Case {
    fn scheme(&self) -> Scheme {
        match Preset::named(self.provider) {
            Some(preset) => preset.verify.clone(),
            None => {
                let path = tempfile::NamedTempFile::new().unwrap();
                std::fs::write(path.path(), HEX).unwrap();
                let config = format!(
                    "[[source]]\nname = \"custom\"\nprovider = \"custom\"\nsecrets = [\"file:{}\"]\n{CUSTOM}",
                    path.path().display()
                );
                Config::parse("custom", &config).unwrap().sources.remove(0).scheme
            }
        }
    }

    fn signer(&self, secret: &str) -> Signs {
        Signs::scheme(&self.scheme(), secret, self.provider)
    }

    /// The headers, beside the signature's, and the body of an event.
    fn event(&self, id: &str) -> (Vec<(String, String)>, Vec<u8>) {
        match Preset::named(self.provider) {
            Some(preset) => {
                let (headers, body) = preset.sample.render(id, None, UnixMicros::from_secs(1_700_000_000)).unwrap();
                let headers =
                    headers.iter().map(|(name, value)| (name.to_string(), value.to_str().unwrap().to_owned()));
                (headers.collect(), body)
            }
            None => (vec![("x-tenant".into(), "t1".into())], format!(r#"{{"id":"{id}","type":"a.b"}}"#).into_bytes()),
        }
    }

    fn headers(&self, secret: &str, id: &str, at: UnixMicros) -> (Headers, Vec<u8>) {
        let (headers, body) = self.event(id);
        let given: Vec<_> = headers.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        (self.signer(secret).headers(&given, &body, id, at), body)
    }

    fn request(&self, secret: &str, id: &str, at: UnixMicros) -> Vec<u8> {
        let (headers, body) = self.headers(secret, id, at);
        self.raw(&headers, &body)
    }

    fn raw(&self, headers: &Headers, body: &[u8]) -> Vec<u8> {
        raw(&format!("/webhooks/{}", self.provider), headers, body)
    }

    /// What the gateway said, wherever this provider wants it.
    fn said(&self, answer: &Answer) -> (String, String) {
        if self.provider == "discord" {
            assert_eq!((answer.status, answer.body.len()), (204, 0), "{}", answer.head);
            let header = |name| answer.header(name).unwrap().to_owned();
            return (header("oncehook-status"), header("oncehook-event"));
        }
        assert_eq!(answer.status, 200, "{}: {}", self.provider, String::from_utf8_lossy(&answer.body));
        let json = answer.json();
        (json["status"].as_str().unwrap().to_owned(), json["event"].as_str().unwrap().to_owned())
    }
}

fn rig() -> Rig {
    let mut sources = String::new();
    let mut secrets = Vec::new();
    for case in &CASES {
        let (old, new) = (format!("{}.old", case.provider), format!("{}.new", case.provider));
        let verifies = if case.provider == "discord" { PUBLIC } else { case.signs };
        secrets.push((new.clone(), verifies));
        let mut references = vec![new];
        if let Some(before) = case.signed_before {
            secrets.push((old.clone(), before));
            references.push(old);
        }
        let references: Vec<_> = references.iter().map(|file| format!("\"file:{file}\"")).collect();
        sources.push_str(&format!(
            "[[source]]\nname = \"{0}\"\nprovider = \"{0}\"\nsecrets = [{1}]\n",
            case.provider,
            references.join(", ")
        ));
        if case.provider == "custom" {
            sources.push_str(CUSTOM);
        }
    }
    let secrets: Vec<_> = secrets.iter().map(|(file, secret)| (file.as_str(), *secret)).collect();
    Rig::start("", &sources, &secrets)
}

fn secs(offset: i64) -> UnixMicros {
    UnixMicros(now().0 + offset * 1_000_000)
}

#[tokio::test]
async fn genuine_events_are_accepted_once() {
    let rig = rig();
    for case in &CASES {
        let (first, event) = case.said(&rig.send(&case.request(case.signs, "id_1", now())).await);
        assert_eq!(first, "accepted", "{}", case.provider);
        // A retry is signed anew, a little later.
        let again = case.said(&rig.send(&case.request(case.signs, "id_1", secs(3))).await);
        assert_eq!(again, ("duplicate".to_owned(), event.clone()), "{}", case.provider);
        let shown = rig.show(&event).await;
        // Discord's webhook events carry no id; their digest is the key.
        let digest = case.provider == "discord" && shown["key"].as_str().unwrap().starts_with("sha256:");
        assert!(shown["key"] == "id_1" || digest, "{shown}");
        assert_eq!(shown["source"], case.provider);
        assert!(shown["type"].is_string(), "{shown}");
        let (_, body) = case.event("id_1");
        assert_eq!(rig.body(&event).await, body);
    }
    assert_eq!(rig.stored().await, CASES.len() as u64);
}

#[tokio::test]
async fn both_secrets_of_a_rotation_are_live() {
    let rig = rig();
    for case in &CASES {
        let Some(before) = case.signed_before else { continue };
        assert_eq!(case.said(&rig.send(&case.request(before, "old", now())).await).0, "accepted", "{}", case.provider);
        assert_eq!(
            case.said(&rig.send(&case.request(case.signs, "new", now())).await).0,
            "accepted",
            "{}",
            case.provider
        );
    }
}

#[tokio::test]
async fn forged_requests_of_every_preset_are_401() {
    let rig = rig();
    for case in &CASES {
        let (genuine, body) = case.headers(case.signs, "id_1", now());
        let name = case.scheme().signature_headers().next().unwrap().to_string();
        // Somebody else's secret.
        rig.refused(&case.request(case.stranger, "id_1", now()), 401, "signature").await;
        // No signature, an empty one, the same twice.
        rig.refused(&case.raw(&without(&genuine, &name), &body), 401, "signature").await;
        rig.refused(&case.raw(&with(&genuine, &name, ""), &body), 401, "signature").await;
        let mut twice = genuine.clone();
        twice.push((name.clone(), value(&genuine, &name).into_bytes()));
        rig.refused(&case.raw(&twice, &body), 401, "signature").await;
        let mut second = genuine.clone();
        second.insert(0, (name.clone(), b"nonsense".to_vec()));
        rig.refused(&case.raw(&second, &body), 401, "signature").await;
        // Bytes that are no text.
        rig.refused(&case.raw(&with(&genuine, &name, b"\xff\xfe"), &body), 401, "signature").await;
        // The signature of something else; a token signs nothing, which its integrity level says.
        if case.provider != "gitlab" {
            for altered in alterations(&body) {
                rig.refused(&case.raw(&genuine, &altered), 401, "signature").await;
            }
        }
        // A cut and a prolonged one.
        let signature = value(&genuine, &name);
        rig.refused(&case.raw(&with(&genuine, &name, &signature[..signature.len() - 2]), &body), 401, "signature")
            .await;
        rig.refused(&case.raw(&with(&genuine, &name, format!("{signature}00")), &body), 401, "signature").await;
    }
    assert_eq!(rig.stored().await, 0);
    // The other way round, everything signed but for the signed header of the custom source.
    let custom = &CASES[8];
    let (genuine, body) = custom.headers(custom.signs, "id_1", now());
    rig.refused(&custom.raw(&with(&genuine, "x-tenant", "t2"), &body), 401, "signature").await;
    rig.refused(&raw("/webhooks/custom?x", &without(&genuine, "x-tenant"), &body), 401, "signature").await;
    assert_eq!(rig.stored().await, 0);
}

/// The body with one thing changed.
fn alterations(body: &[u8]) -> Vec<Vec<u8>> {
    let text = std::str::from_utf8(body).unwrap();
    let mut flipped = body.to_vec();
    flipped[body.len() / 2] ^= 1;
    let parsed: serde_json::Value = serde_json::from_slice(body).unwrap();
    vec![
        flipped,
        [b"\xef\xbb\xbf", body].concat(),
        [body, b"\n"].concat(),
        [body, b"\0"].concat(),
        [b" ", body].concat(),
        body[..body.len() - 1].to_vec(),
        text.replacen(',', ",\r\n", 1).into_bytes(),
        serde_json::to_vec_pretty(&parsed).unwrap(),
        Vec::new(),
    ]
}

#[tokio::test]
async fn fault_64_old_and_future_requests_are_401_on_both_sides_of_the_tolerance() {
    let rig = rig();
    for case in &CASES {
        let Some(tolerance) = case.scheme().default_tolerance_secs() else { continue };
        let tolerance = i64::try_from(tolerance).unwrap();
        // A few seconds inside: the clock goes on while we test. The exact boundary is tested without a clock.
        for inside in [5 - tolerance, tolerance - 5] {
            let id = format!("in_{}", inside + 1_000);
            assert_eq!(case.said(&rig.send(&case.request(case.signs, &id, secs(inside))).await).0, "accepted");
        }
        for outside in [-tolerance - 2, tolerance + 5, -86_400, 86_400] {
            let answer = rig.refused(&case.request(case.signs, "out", secs(outside)), 401, "signature").await;
            let said = String::from_utf8_lossy(&answer.body).into_owned();
            assert!(said.contains("genuine but was signed"), "{said}");
        }
    }
}

#[tokio::test]
async fn fault_65_a_source_may_have_its_own_tolerance() {
    let sources = "[[source]]\nname = \"stripe\"\nprovider = \"stripe\"\nsecrets = [\"file:s\"]\ntolerance = \"2d\"\n";
    let rig = Rig::start("", sources, &[("s", TEXT)]);
    let case = &CASES[0];
    assert_eq!(case.said(&rig.send(&case.request(TEXT, "late", secs(-86_400))).await).0, "accepted");
    rig.refused(&case.request(TEXT, "later", secs(-3 * 86_400)), 401, "signature").await;
}

#[tokio::test]
async fn fault_58_to_62_stripe_signature_lists() {
    let rig = rig();
    let case = &CASES[0];
    let (genuine, body) = case.headers(case.signs, "evt_list", now());
    let header = value(&genuine, "stripe-signature");
    let (time, mac) = header.split_once(",v1=").unwrap();
    let other = case.headers(case.stranger, "evt_list", now()).0;
    let other = value(&other, "stripe-signature");
    let other = other.split_once(",v1=").unwrap().1;
    for refused in [
        format!("{time},v1="),
        format!("{time},v1"),
        time.to_owned(),
        format!("v1={mac}"),
        format!("{time},v0={mac}"),
        format!("{time},v9={mac}"),
        format!("{time},none={mac}"),
        format!("{time},V1={mac}"),
        format!("{time},v1={}", &mac[..32]),
        format!("{time},v1={mac}{mac}"),
        format!("{time},v1={mac}="),
        format!("{time},v1= {mac}"),
        format!("{time};v1={mac}"),
        format!("{time},v1=\"{mac}\""),
        format!("{time},v1=0x{mac}"),
        format!("{time},v1={other}"),
        format!("{time},{time},v1={mac}"),
        format!("t=1,{time},v1={mac}"),
        ",".repeat(100),
        "=".to_owned(),
    ] {
        rig.refused(&case.raw(&with(&genuine, "stripe-signature", &refused), &body), 401, "signature").await;
    }
    // Too many, in a header that hyper still takes, and in one that it does not.
    for count in [40, 100, 10_000] {
        let many = format!("{time}{},v1={mac}", format!(",v1={other}").repeat(count));
        let request = case.raw(&with(&with(&genuine, "stripe-signature", many), "connection", "close"), &body);
        let statuses = crate::kit::statuses(&crate::kit::exchange(rig.gateway.ingress, &request).await.unwrap());
        assert!(matches!(statuses[..], [401 | 431]), "{count} signatures: {statuses:?}");
    }
    assert_eq!(rig.stored().await, 0);
    // What the scheme does allow: a few signatures, unknown kinds beside them.
    for (number, accepted) in [
        format!("{time},v1={other},v1={mac}"),
        format!("{time},v1={mac},v1={other}"),
        format!("{time},v0={other},v1={mac},v9=zz"),
        format!("{time},v1=,v1=zz,v1={mac}"),
    ]
    .into_iter()
    .enumerate()
    {
        let (status, _) = case.said(&rig.send(&case.raw(&with(&genuine, "stripe-signature", &accepted), &body)).await);
        assert_eq!(status, if number == 0 { "accepted" } else { "duplicate" }, "{accepted}");
    }
}

#[tokio::test]
async fn fault_58_to_62_standard_webhooks_signature_lists() {
    let rig = rig();
    for case in [&CASES[5], &CASES[6]] {
        let (genuine, body) = case.headers(case.signs, "msg_list", now());
        let name = if case.provider == "svix" { "svix-signature" } else { "webhook-signature" };
        let header = value(&genuine, name);
        let mac = header.strip_prefix("v1,").unwrap();
        let url_safe = mac.replace('+', "-").replace('/', "_");
        let mut refused = vec![
            "v1,".to_owned(),
            "v1".to_owned(),
            mac.to_owned(),
            format!("v1,{}", &mac[..4]),
            format!("v1,{}", mac.trim_end_matches('=')),
            format!("v1,{mac}="),
            format!("v1,{mac}{mac}"),
            format!("v1a,{mac}"),
            format!("v2,{mac}"),
            format!("none,{mac}"),
            format!("V1,{mac}"),
            format!("v1={mac}"),
            format!("v1,\"{mac}\""),
            format!("v1, {mac}"),
            format!("{} {}", "v1,", "v1,"),
        ];
        if url_safe != mac {
            refused.push(format!("v1,{url_safe}"));
        }
        for refused in refused {
            rig.refused(&case.raw(&with(&genuine, name, &refused), &body), 401, "signature").await;
        }
        for count in [40, 10_000] {
            let many = format!("{}v1,{mac}", "v1,AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA= ".repeat(count));
            let request = case.raw(&with(&with(&genuine, name, many), "connection", "close"), &body);
            let statuses = crate::kit::statuses(&crate::kit::exchange(rig.gateway.ingress, &request).await.unwrap());
            assert!(matches!(statuses[..], [401 | 431]), "{count} signatures: {statuses:?}");
        }
        let stored = rig.stored().await;
        for accepted in [header.clone(), format!("v1,AAAA {header}"), format!("v1a,{mac} {header} v9,x")] {
            case.said(&rig.send(&case.raw(&with(&genuine, name, &accepted), &body)).await);
        }
        assert_eq!(rig.stored().await, stored + 1);
    }
}

/// Signs any text in the place of time and id, as a careless sender with the right secret would.
fn careless(secret: &str, key: &str, content: &str, encoding: &str) -> Signs {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), secret).unwrap();
    let config = format!(
        "[[source]]\nname = \"x\"\nprovider = \"custom\"\nsecrets = [\"file:{}\"]\n[source.verify]\nalgorithm = \"hmac-sha256\"\n\
         key = \"{key}\"\ncontent = \"{content}\"\nsignature = {{ header = \"x-mac\", encoding = \"{encoding}\" }}\n",
        file.path().display()
    );
    let config = Config::parse("careless", &config).unwrap_or_else(|problems| panic!("{problems}"));
    Signs::scheme(&config.sources[0].scheme, secret, "x")
}

/// A Stripe header with a right signature over whatever time.
fn stripe_header(time: &str, body: &[u8]) -> String {
    let headers = careless(TEXT, "utf8", "{header:x-time}.{body}", "hex").headers(&[("x-time", time)], body, "", now());
    format!("t={time},v1={}", value(&headers, "x-mac"))
}

/// The headers of a Standard Webhook with a right signature over whatever id and time.
fn standard_headers(id: &str, time: &str, body: &[u8]) -> Headers {
    let bare = WHSEC.strip_prefix("whsec_").unwrap();
    let signs = careless(bare, "base64", "{header:x-id}.{header:x-time}.{body}", "base64");
    let mac = value(&signs.headers(&[("x-id", id), ("x-time", time)], body, "", now()), "x-mac");
    vec![
        ("webhook-id".into(), id.into()),
        ("webhook-timestamp".into(), time.into()),
        ("webhook-signature".into(), format!("v1,{mac}").into()),
    ]
}

#[tokio::test]
async fn fault_63_malformed_timestamps_are_401_even_if_they_are_signed() {
    let rig = rig();
    let body = br#"{"id":"evt_time","type":"a"}"#;
    let (stripe, standard) = (&CASES[0], &CASES[5]);
    let good = now().as_secs().to_string();
    let stripe_request = |time: &str| {
        let headers: Headers = vec![("stripe-signature".into(), stripe_header(time, body).into())];
        stripe.raw(&headers, body)
    };
    let malformed = [
        format!("-{good}"),
        format!("+{good}"),
        format!("{good}.0"),
        format!("{good}s"),
        format!("0x{good}"),
        format!("{good}e0"),
        format!("{good}_"),
        "-1".into(),
        "1e10".into(),
        "NaN".into(),
        "now".into(),
        "99999999999999999999".into(),
        "9223372036854775807".into(),
    ];
    for time in &malformed {
        for request in [stripe_request(time), standard.raw(&standard_headers("msg_time", time, body), body)] {
            let answer = rig.refused(&request, 401, "signature").await;
            assert_eq!(answer.json()["error"]["message"], "the timestamp is malformed", "{time}");
        }
    }
    // Well-formed, but another unit or another age: genuine and still refused.
    for time in ["0".to_owned(), format!("{good}000"), "1".into()] {
        for request in [stripe_request(&time), standard.raw(&standard_headers("msg_time", &time, body), body)] {
            let answer = rig.refused(&request, 401, "signature").await;
            let said = answer.json()["error"]["message"].to_string();
            assert!(said.contains("genuine but was signed"), "{time}: {said}");
        }
    }
    // None, an empty one, two.
    let mac = stripe_header(&good, body);
    let mac = mac.split_once(",v1=").unwrap().1;
    for header in [format!("v1={mac}"), format!("t=,v1={mac}"), format!("t={good},t={good},v1={mac}")] {
        rig.refused(&stripe.raw(&vec![("stripe-signature".into(), header.into())], body), 401, "signature").await;
    }
    let headers = standard_headers("msg_time", &good, body);
    rig.refused(&standard.raw(&without(&headers, "webhook-timestamp"), body), 401, "signature").await;
    rig.refused(&standard.raw(&with(&headers, "webhook-timestamp", ""), body), 401, "signature").await;
    let mut twice = headers.clone();
    twice.push(("webhook-timestamp".into(), good.clone().into()));
    rig.refused(&standard.raw(&twice, body), 401, "signature").await;
    assert_eq!(rig.stored().await, 0);
    // The careless sender's signatures are right: with a good time he gets in.
    stripe.said(&rig.send(&stripe_request(&good)).await);
    standard.said(&rig.send(&standard.raw(&headers, body)).await);
    assert_eq!(rig.stored().await, 2);
}

#[tokio::test]
async fn fault_66_67_only_the_raw_bytes_count() {
    let rig = rig();
    for case in [&CASES[0], &CASES[5]] {
        // What is signed with CRLF, a BOM or odd spacing is accepted as it is, and in no other form.
        let bodies: [&[u8]; 4] = [
            b"{\"id\":\"crlf\",\r\n\"type\":\"a\"}\r\n",
            b"\xef\xbb\xbf{\"id\":\"bom\"}",
            b"{ \"type\" : \"a\" , \"id\" : \"odd\" }",
            b"\xff\x00\xfe",
        ];
        for (number, body) in bodies.into_iter().enumerate() {
            let id = format!("raw_{number}");
            let headers = case.signer(case.signs).headers(&[], body, &id, now());
            let text = String::from_utf8_lossy(body);
            for altered in [
                text.replace("\r\n", "\n"),
                text.trim_start_matches('\u{feff}').to_owned(),
                text.replace(' ', ""),
                text.trim_end().to_owned(),
            ] {
                if altered.as_bytes() != body {
                    rig.refused(&case.raw(&headers, altered.as_bytes()), 401, "signature").await;
                }
            }
            let (status, event) = case.said(&rig.send(&case.raw(&headers, body)).await);
            assert_eq!(status, "accepted");
            assert_eq!(rig.body(&event).await, body);
        }
    }
}

#[tokio::test]
async fn fault_68_an_id_with_the_separator_is_refused_even_if_it_is_signed() {
    let rig = rig();
    let case = &CASES[5];
    let time = now().as_secs().to_string();
    let body = br#"{"type":"a"}"#;
    // "msg_1" + "." + time + "." + body can also be read as the id "msg_1.TIME" with the body's beginning as its time.
    for id in ["msg.1", "msg_1.", ".", &format!("msg_1.{time}")] {
        let answer = rig.refused(&case.raw(&standard_headers(id, &time, body), body), 401, "signature").await;
        assert!(answer.json()["error"]["message"].to_string().contains("separator"), "{id}");
    }
    let genuine = standard_headers("msg_1", &time, body);
    rig.refused(&case.raw(&with(&genuine, "webhook-id", ""), body), 401, "signature").await;
    rig.refused(&case.raw(&without(&genuine, "webhook-id"), body), 401, "signature").await;
    rig.refused(&case.raw(&with(&genuine, "webhook-id", "msg_2"), body), 401, "signature").await;
    assert_eq!(rig.stored().await, 0);
    // The id of another family of headers cannot stand in for the signed one.
    let mut both = genuine.clone();
    both.push(("svix-id".into(), b"msg_other".to_vec()));
    let (_, event) = case.said(&rig.send(&case.raw(&both, body)).await);
    assert_eq!(rig.show(&event).await["key"], "msg_1");
}

#[tokio::test]
async fn fault_69_handshakes_are_answered_after_the_signature_and_never_stored() {
    let rig = rig();
    let (slack, discord) = (&CASES[3], &CASES[7]);
    let question = br#"{"token":"x","challenge":"3eZbrw1aBm2rZgRNFdxV2595E9CY3gmdALWMmHkvFXO7tYXAYM8P","type":"url_verification"}"#;
    let answer = rig.send(&slack.signer(slack.signs).post(&[], question)).await;
    assert_eq!(
        (answer.status, answer.body.as_slice()),
        (200, &b"3eZbrw1aBm2rZgRNFdxV2595E9CY3gmdALWMmHkvFXO7tYXAYM8P"[..])
    );
    assert_eq!(answer.header("content-type"), Some("text/plain"));
    assert_eq!(answer.header("x-content-type-options"), Some("nosniff"));
    for (ping, status, reply) in
        [(&br#"{"type":1,"id":"1"}"#[..], 200, &b"{\"type\":1}"[..]), (br#"{"type":0,"version":1}"#, 204, b"")]
    {
        let answer = rig.send(&discord.signer(discord.signs).post(&[], ping)).await;
        assert_eq!((answer.status, answer.body.as_slice()), (status, reply));
        assert_eq!(answer.header("oncehook-event"), None);
    }
    // Nothing is echoed to whoever cannot sign, or that a browser could take for a page.
    rig.refused(&raw("/webhooks/slack", &Headers::new(), question), 401, "signature").await;
    rig.refused(&slack.signer(slack.stranger).post(&[], question), 401, "signature").await;
    rig.refused(&raw("/webhooks/discord", &Headers::new(), br#"{"type":1}"#), 401, "signature").await;
    rig.refused(&discord.signer(discord.stranger).post(&[], br#"{"type":1}"#), 401, "signature").await;
    assert_eq!(rig.stored().await, 0);
    let page = br#"{"challenge":"<script>alert(1)</script>","type":"url_verification"}"#;
    let answer = rig.send(&slack.signer(slack.signs).post(&[], page)).await;
    assert!(!String::from_utf8_lossy(&answer.body).contains("<script>"));
}
