//! Who may ask: tokens and the name of the host.

use oncehook_testkit::sender::{Answer, ask};

use super::{SECRETS, SOURCES};
use crate::kit::{Rig, check_error, run, soon};

async fn admin(rig: &Rig, path: &str, host: &str, authorization: Option<&str>) -> Answer {
    let authorization = authorization.map_or_else(String::new, |value| format!("authorization: {value}\r\n"));
    let request = format!("GET {path} HTTP/1.1\r\nhost: {host}\r\n{authorization}connection: close\r\n\r\n");
    soon(ask(rig.gateway.admin, request.as_bytes())).await.unwrap()
}

const GUARDED: [&str; 8] = [
    "/metrics",
    "/api/events",
    "/api/stats",
    "/api/openapi.json",
    "/api/events/x",
    "/api/events/x/body",
    "/api/nothing",
    "/",
];

#[tokio::test]
async fn fault_100_a_token_is_asked_for_on_every_call() {
    let secrets = [SECRETS[0], SECRETS[1], ("token", "s3cret-admin-token\n")];
    let rig = Rig::start("admin_token = \"file:token\"", SOURCES, &secrets);
    for path in ["/healthz", "/readyz"] {
        assert_eq!(admin(&rig, path, "localhost", None).await.status, 200, "{path}");
    }
    for path in GUARDED {
        for wrong in [
            None,
            Some("Bearer wrong"),
            Some("Bearer "),
            Some("Bearer"),
            Some("Basic czNjcmV0LWFkbWluLXRva2Vu"),
            Some("s3cret-admin-token"),
            Some("Bearer s3cret-admin-toke"),
            Some("Bearer s3cret-admin-token2"),
            Some("Bearer S3CRET-ADMIN-TOKEN"),
            Some("Bearer  s3cret-admin-token"),
        ] {
            let answer = admin(&rig, path, "localhost", wrong).await;
            check_error(&answer, 401, "token");
        }
        let right = admin(&rig, path, "localhost", Some("Bearer s3cret-admin-token")).await.status;
        assert!(matches!(right, 200 | 404), "{path}: {right}");
        assert_eq!(admin(&rig, path, "localhost", Some("bearer s3cret-admin-token")).await.status, right);
    }
    // A token in the query is no token.
    check_error(&admin(&rig, "/api/events?token=s3cret-admin-token", "localhost", None).await, 401, "token");
    // Health checks say nothing beyond health.
    let ready = admin(&rig, "/readyz", "localhost", None).await.json();
    assert!(!ready.to_string().contains("stripe"), "{ready}");
}

#[tokio::test]
async fn fault_100_a_foreign_host_is_refused_everywhere() {
    let rig = Rig::start("admin_hosts = [\"Gateway.Internal\"]", SOURCES, &SECRETS);
    let port = rig.gateway.admin.port();
    for path in GUARDED.iter().chain(&["/healthz", "/readyz"]) {
        for foreign in [
            "evil.example",
            &format!("evil.example:{port}"),
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "evil.example@localhost",
            "localhost@evil.example",
            "",
            "[::1",
            "gateway.internal.evil.example",
            "localhost.",
        ] {
            let answer = admin(&rig, path, foreign, None).await;
            assert!(matches!(answer.status, 400 | 403), "{path} at {foreign:?}: {}", answer.status);
            if answer.status == 403 {
                check_error(&answer, 403, "host");
            }
        }
        for own in [
            "localhost",
            &format!("localhost:{port}"),
            "LOCALHOST",
            "127.0.0.1",
            &format!("127.0.0.1:{port}"),
            "[::1]",
            "192.0.2.7",
            "gateway.internal",
            &format!("GATEWAY.internal:{port}"),
        ] {
            let answer = admin(&rig, path, own, None).await;
            assert!(matches!(answer.status, 200 | 404), "{path} at {own}: {}", answer.status);
        }
    }
    // None, and two.
    for hosts in ["", "host: localhost\r\nhost: evil.example\r\n", "host: evil.example\r\nhost: localhost\r\n"] {
        let request = format!("GET /api/events HTTP/1.1\r\n{hosts}connection: close\r\n\r\n");
        let answer = soon(ask(rig.gateway.admin, request.as_bytes())).await.unwrap();
        assert!(matches!(answer.status, 400 | 403), "{hosts:?}: {}", answer.status);
    }
    // An absolute form does not get around it.
    for request in [
        "GET http://localhost/api/events HTTP/1.1\r\nhost: evil.example",
        "GET http://evil.example/api/events HTTP/1.1\r\nhost: evil.example",
    ] {
        let answer =
            soon(ask(rig.gateway.admin, format!("{request}\r\nconnection: close\r\n\r\n").as_bytes())).await.unwrap();
        check_error(&answer, 403, "host");
    }
}

#[test]
fn a_public_admin_listener_needs_a_token() {
    let config = format!("[server]\ningress = \"127.0.0.1:0\"\nadmin = \"0.0.0.0:0\"\n{SOURCES}");
    let directory = crate::kit::directory(&config, &SECRETS);
    let (code, _, err) = run(directory.path(), &["serve"]);
    assert_eq!(code, 1);
    assert!(err.contains("is not on a loopback address and has no `admin_token`"), "{err}");
    assert!(!directory.path().join("oncehook.db").exists(), "nothing was started");
}
