//! What a request must not reach: the log, an address that is believed, another path, a secret.

use oncehook_testkit::gateway::now;

use super::{SECRETS, SHORT, SOURCES, STRIPE, rig, stripe};
use crate::kit::{Headers, Rig, Signs, check_error, exchange, raw, soon, statuses, text, value, with};

#[tokio::test]
async fn fault_83_nothing_from_a_request_reaches_the_log() {
    let mut rig = Rig::start_with(SHORT, SOURCES, &SECRETS, &[("ONCEHOOK_LOG", "debug")]);
    const MARK: &str = "Zq7Mark";
    let nasty = [
        format!("{MARK}\u{1b}[31mred"),
        format!("{MARK}\u{202e}gnp.exe"),
        format!("{MARK}%0d%0a2026-01-01 INFO forged"),
        format!("{MARK}{}", "x".repeat(8_000)),
    ];
    for field in &nasty {
        let body = format!(r#"{{"id":"{MARK}","type":"{MARK}"}}"#);
        let mut headers = stripe().headers(&[], body.as_bytes(), "", now());
        for name in ["user-agent", "x-request-id", "x-forwarded-for", "content-type", "referer"] {
            headers = with(&headers, name, field);
            if field.len() > 1_000 {
                break;
            }
        }
        // Accepted, refused, misrouted, malformed.
        exchange(
            rig.gateway.ingress,
            &[raw("/webhooks/stripe", &with(&headers, "connection", "close"), body.as_bytes())].concat(),
        )
        .await;
        exchange(
            rig.gateway.ingress,
            &raw("/webhooks/stripe", &with(&headers, "stripe-signature", field), body.as_bytes()),
        )
        .await;
        exchange(rig.gateway.ingress, &raw(&format!("/webhooks/{field}"), &headers, body.as_bytes())).await;
        exchange(rig.gateway.ingress, format!("{field} / HTTP/1.1\r\n{field}: x\r\n\r\n").as_bytes()).await;
        exchange(rig.gateway.ingress, format!("POST / HTTP/1.1\r\nx: a\rb\nINFO {MARK}\0\r\n\r\n").as_bytes()).await;
    }
    let megabyte = format!("POST /webhooks/stripe HTTP/1.1\r\nx: {MARK}{}\r\n\r\n", "y".repeat(1 << 20));
    let received = exchange(rig.gateway.ingress, megabyte.as_bytes()).await.unwrap();
    assert!(matches!(statuses(&received)[..], [] | [431]), "{:?}", statuses(&received));
    let path = format!("POST /webhooks/{MARK}{} HTTP/1.1\r\n\r\n", "z".repeat(1 << 20));
    let received = exchange(rig.gateway.ingress, path.as_bytes()).await.unwrap();
    assert!(matches!(statuses(&received)[..], [] | [414 | 431]), "{:?}", statuses(&received));
    // The admin listener too.
    for field in &nasty {
        exchange(
            rig.gateway.admin,
            format!("GET /api/events/{field} HTTP/1.1\r\nhost: {MARK}.example\r\nconnection: close\r\n\r\n").as_bytes(),
        )
        .await;
    }
    assert!(rig.gateway.stop().success());
    let log = rig.gateway.log();
    assert!(log.contains("refused requests"), "{log}");
    assert!(!log.contains(MARK), "{log}");
    for line in log.lines() {
        assert!(line.len() < 1_000, "{line}");
        assert!(!line.chars().any(char::is_control), "{line:?}");
    }
}

#[tokio::test]
async fn fault_84_forwarded_addresses_are_believed_from_proxies_only() {
    let sources = SOURCES.replacen(
        "secrets = [\"file:stripe.secret\"]",
        "secrets = [\"file:stripe.secret\"]\nallow_ips = [\"203.0.113.0/24\", \"2001:db8::/32\"]",
        1,
    );
    let body = br#"{"id":"evt_ip"}"#;
    let request = |forwarded: &[&str]| {
        let headers: Vec<_> = forwarded.iter().map(|value| ("x-forwarded-for", *value)).collect();
        stripe().post(&headers, body)
    };
    {
        // No proxy is trusted: the peer is the loopback address, whatever it claims.
        let rig = Rig::start("", &sources, &SECRETS);
        for forwarded in [&[][..], &["203.0.113.9"], &["203.0.113.9", "203.0.113.9"], &["127.0.0.1, 203.0.113.9"]] {
            rig.refused(&request(forwarded), 403, "address").await;
        }
        let spoofed = stripe().post(
            &[("forwarded", "for=203.0.113.9"), ("x-real-ip", "203.0.113.9"), ("cf-connecting-ip", "203.0.113.9")],
            body,
        );
        rig.refused(&spoofed, 403, "address").await;
        // A forged request is not told whether its signature was right.
        rig.refused(&raw("/webhooks/stripe", &Headers::new(), body), 403, "address").await;
        // The other sources are open.
        rig.deliver(&Signs::preset("stripe", STRIPE, "held").post(&[], body)).await;
    }
    let rig = Rig::start("trusted_proxies = [\"127.0.0.0/8\", \"10.0.0.1\"]", &sources, &SECRETS);
    for forwarded in [
        &["203.0.113.9"][..],
        &["1.2.3.4, 203.0.113.9"],
        &["1.2.3.4", "203.0.113.9"],
        &["203.0.113.9, 10.0.0.1"],
        &["203.0.113.9:4711"],
        &["[2001:db8::7]:443"],
        &["2001:db8::7"],
    ] {
        rig.deliver(&request(forwarded)).await;
    }
    for forwarded in [
        &[][..],
        &["203.0.113.9, 198.51.100.1"],
        &["203.0.113.9", "198.51.100.1"],
        &["203.0.113.9, 10.0.0.2"],
        &["203.0.113.9, unknown"],
        &["203.0.113.9,"],
        &["::ffff:198.51.100.1"],
        &["2001:db9::7"],
    ] {
        rig.refused(&request(forwarded), 403, "address").await;
    }
    let event = &rig.gateway.events().await[0];
    let shown = rig.show(&text(&event["id"])).await;
    assert_eq!(shown["duplicates"], 6);
    let peers: Vec<_> =
        shown["duplicates_seen"]["latest"].as_array().unwrap().iter().map(|seen| text(&seen["peer"])).collect();
    assert_eq!(peers, ["203.0.113.9", "203.0.113.9", "203.0.113.9", "203.0.113.9", "2001:db8::7", "2001:db8::7"]);
}

#[tokio::test]
async fn fault_85_one_path_per_source_and_nothing_else() {
    let rig = rig("");
    let body = br#"{"id":"evt_path"}"#;
    let headers = stripe().headers(&[], body, "", now());
    for path in [
        "/",
        "/webhooks",
        "/webhooks/",
        "/webhooks/stripe/",
        "/webhooks//stripe",
        "//webhooks/stripe",
        "/webhooks/Stripe",
        "/WEBHOOKS/stripe",
        "/webhooks/stripe/..",
        "/webhooks/./stripe",
        "/webhooks/x/../stripe",
        "/x/../webhooks/stripe",
        "/webhooks%2fstripe",
        "/webhooks/%73tripe",
        "/webhooks/stripe%00",
        "/webhooks/stripe%20",
        "/webhooks/stripe;x",
        "/webhooks/%c0%afstripe",
        "/webhooks/..%2fwebhooks/stripe",
        "/webhooks/stripe%2f",
        "/webhooks/strip",
        "/webhooks/stripex",
        "/api/events",
        "/healthz",
        "/metrics",
        "/webhooks/oncehook",
        "/webhooks/-",
        "http://localhost/webhooks/stripe",
        "http://evil.example/webhooks/stripe",
        "*",
    ] {
        let answer = rig.send(&raw(path, &headers, body)).await;
        assert!(
            matches!(answer.status, 404 | 400),
            "{path}: {} {}",
            answer.status,
            String::from_utf8_lossy(&answer.body)
        );
        if answer.status == 404 {
            check_error(&answer, 404, "not_found");
        }
    }
    // Bytes that no URI has.
    for path in [
        "/webhooks/stripe\u{ff0f}",
        "/webhooks/\u{0}stripe",
        "/webhooks/stripe x",
        "\\webhooks\\stripe",
        "webhooks/stripe",
    ] {
        let received =
            exchange(rig.gateway.ingress, &raw(path, &with(&headers, "connection", "close"), body)).await.unwrap();
        assert!(matches!(statuses(&received)[..], [400 | 404]), "{path:?}: {}", String::from_utf8_lossy(&received));
    }
    assert_eq!(rig.stored().await, 0);
    for method in ["GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "post", "POSTX"] {
        let request = String::from_utf8(raw("/webhooks/stripe", &with(&headers, "connection", "close"), body)).unwrap();
        let request = request.replacen("POST", method, 1);
        let received = exchange(rig.gateway.ingress, request.as_bytes()).await.unwrap();
        assert_eq!(statuses(&received), [405], "{method}");
        assert!(String::from_utf8_lossy(&received).to_lowercase().contains("allow: post"), "{method}");
    }
    assert_eq!(rig.stored().await, 0);
    // A query is not part of the path.
    assert_eq!(rig.deliver(&raw("/webhooks/stripe", &headers, body)).await.0, "accepted");
    assert_eq!(rig.deliver(&raw("/webhooks/stripe?x=/../y", &headers, body)).await.0, "duplicate");
    assert_eq!(rig.deliver(&raw("/webhooks/stripe?", &headers, body)).await.0, "duplicate");
}

#[tokio::test]
async fn fault_70_a_refusal_never_tells_the_signature() {
    let mut rig = Rig::start_with(SHORT, SOURCES, &SECRETS, &[("ONCEHOOK_LOG", "trace")]);
    let body = br#"{"id":"evt_mac"}"#;
    let genuine = stripe().headers(&[], body, "", now());
    let signature = value(&genuine, "stripe-signature");
    let (_, expected) = signature.split_once("v1=").unwrap();
    let zeros = signature.replace(expected, &"0".repeat(64));
    let upper =
        signature.replace(expected, &format!("{}{}", &expected[..63], if expected.ends_with('0') { '1' } else { '0' }));
    let mut seen = String::new();
    for wrong in
        [zeros, upper, signature.replace("v1=", "v0="), signature[..signature.len() - 1].to_owned(), "t=1".to_owned()]
    {
        let answer = rig
            .refused(&raw("/webhooks/stripe", &with(&genuine, "stripe-signature", wrong), body), 401, "signature")
            .await;
        seen.push_str(&answer.head);
        seen.push_str(&String::from_utf8_lossy(&answer.body));
    }
    seen.push_str(&String::from_utf8_lossy(&rig.gateway.get("/metrics").await.body));
    assert!(rig.gateway.stop().success());
    seen.push_str(&rig.gateway.log());
    for part in [expected, &expected[..16], &expected[48..]] {
        assert!(!seen.contains(part), "{seen}");
    }
}

#[tokio::test]
async fn fault_102_secrets_show_up_nowhere() {
    const CANARY: &str = "canary5e1f0";
    let stripe_secret = format!("whsec_{CANARY}_stripe");
    let gitlab_secret = format!("gitlab-{CANARY}-token");
    let admin_token = format!("admin-{CANARY}-token");
    let sources = "[[source]]\nname = \"stripe\"\nprovider = \"stripe\"\nsecrets = [\"file:stripe.secret\"]\n\
                   [[source]]\nname = \"gitlab\"\nprovider = \"gitlab\"\nsecrets = [\"file:gitlab.secret\"]\n";
    let secrets =
        [("stripe.secret", stripe_secret.as_str()), ("gitlab.secret", &gitlab_secret), ("admin.token", &admin_token)];
    let mut rig =
        Rig::start_with("admin_token = \"file:admin.token\"", sources, &secrets, &[("ONCEHOOK_LOG", "trace")]);
    let mut seen = Vec::new();

    let gitlab = Signs::preset("gitlab", &gitlab_secret, "gitlab");
    let body = br#"{"object_kind":"issue"}"#;
    let credentials = [
        ("idempotency-key", "k1"),
        ("authorization", "Bearer canary5e1f0"),
        ("cookie", "s=canary5e1f0"),
        ("proxy-authorization", "canary5e1f0"),
    ];
    let (_, event) = rig.deliver(&gitlab.post(&credentials, body)).await;
    // The same with a conflict and a duplicate, and refusals around it.
    for request in [
        gitlab.post(&credentials, br#"{"object_kind":"push"}"#),
        gitlab.post(&credentials, body),
        Signs::preset("gitlab", &format!("{gitlab_secret}x"), "gitlab").post(&[("idempotency-key", "k1")], body),
        Signs::preset("stripe", &stripe_secret, "stripe").post(&[], br#"{"id":"evt_1"}"#),
        Signs::preset("stripe", &gitlab_secret, "stripe").post(&[], br#"{"id":"evt_1"}"#),
        raw(
            "/webhooks/gitlab",
            &vec![
                ("x-gitlab-token".into(), gitlab_secret.clone().into()),
                ("x-gitlab-token".into(), gitlab_secret.clone().into()),
            ],
            body,
        ),
        raw(&format!("/webhooks/{gitlab_secret}"), &Headers::new(), body),
    ] {
        let answer = rig.send(&request).await;
        seen.extend_from_slice(answer.head.as_bytes());
        seen.extend_from_slice(&answer.body);
    }
    let admin = rig.gateway.admin;
    for path in [
        "/api/events",
        &format!("/api/events/{event}"),
        &format!("/api/events/{event}/body"),
        "/api/stats",
        "/metrics",
        "/readyz",
        "/healthz",
        "/api/openapi.json",
        "/api/nothing",
    ] {
        for authorization in [&admin_token, &format!("{admin_token}x")] {
            let request =
                format!("GET {path} HTTP/1.1\r\nhost: {admin}\r\nauthorization: Bearer {authorization}\r\n\r\n");
            let answer = soon(oncehook_testkit::sender::ask(admin, request.as_bytes())).await.unwrap();
            seen.extend_from_slice(answer.head.as_bytes());
            seen.extend_from_slice(&answer.body);
            if path == format!("/api/events/{event}") && authorization == &admin_token {
                assert_eq!(answer.status, 200);
                let headers = answer.json()["headers"].to_string();
                assert!(headers.contains("idempotency-key") && !headers.contains("x-gitlab-token"), "{headers}");
            }
        }
    }
    assert!(rig.gateway.stop().success());
    seen.extend_from_slice(rig.gateway.log().as_bytes());
    for arguments in [&["check"][..], &["check", "--json"], &["--help"], &["events"]] {
        let (_, out, err) = crate::kit::run(rig.directory.path(), arguments);
        seen.extend_from_slice(out.as_bytes());
        seen.extend_from_slice(err.as_bytes());
    }
    // The journal itself holds what was kept, and no token.
    for file in ["journal.db", "journal.db-wal"] {
        seen.extend_from_slice(&std::fs::read(rig.directory.path().join(file)).unwrap_or_default());
    }
    assert!(seen.len() > 10_000);
    let found = seen.windows(CANARY.len()).filter(|window| *window == CANARY.as_bytes()).count();
    assert_eq!(found, 0, "a secret was shown");
}
