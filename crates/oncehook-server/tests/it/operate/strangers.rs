//! Orders that come from somebody who may not give them; and what the API says about itself.

use serde_json::json;

use super::{CONFIG, SECRETS, call, client, deliver, post, rig, until, write_client_config};
use crate::kit::{Rig, check_error};

#[tokio::test]
async fn fault_100_strange_pages_cannot_give_orders() {
    let rig = rig();
    let event = deliver(&rig, "evt_1", "gone").await;
    until(&rig, &event, "dead").await;
    let (path, admin) = (format!("/api/events/{event}/skip"), rig.gateway.admin);
    let json_type = ("content-type", "application/json");
    for headers in [
        &[("origin", "http://evil.example"), json_type][..],
        &[("origin", "null")],
        &[("origin", "http://127.0.0.1:1")],
        &[("sec-fetch-site", "cross-site")],
        &[("sec-fetch-site", "same-site"), json_type],
    ] {
        for (method, path) in [
            ("POST", path.as_str()),
            ("POST", "/api/replays"),
            ("POST", "/api/sources/stripe/pause"),
            ("DELETE", "/api/replays/x"),
        ] {
            check_error(&call(&rig, method, path, headers, "").await, 403, "cross_site");
        }
        // Looking is harmless: the answer cannot be read over there.
        assert_eq!(call(&rig, "GET", "/api/routes", headers, "").await.status, 200);
    }
    for kind in ["text/plain", "application/x-www-form-urlencoded", "application/json-seq", ""] {
        let answer = call(&rig, "POST", &path, &[("content-type", kind)], "{\"reason\":\"x\"}").await;
        check_error(&answer, 415, "content_type");
    }
    check_error(&call(&rig, "POST", &path, &[], "{\"reason\":\"x\"}").await, 415, "content_type");
    check_error(&call(&rig, "POST", &path, &[json_type], "{").await, 400, "body");
    let large = format!("{{\"reason\":\"{}\"}}", "x".repeat(70_000));
    check_error(&call(&rig, "POST", &path, &[json_type], &large).await, 413, "too_large");
    assert_eq!(rig.show(&event).await["status"], "dead", "none of it did anything");
    // From here it works, and who it was is written down.
    let ours = format!("http://{admin}");
    let headers = [
        ("origin", ours.as_str()),
        ("sec-fetch-site", "same-origin"),
        ("oncehook-who", "ada"),
        ("content-type", "application/json; charset=utf-8"),
    ];
    assert_eq!(call(&rig, "POST", &path, &headers, "{\"reason\":\"x\"}").await.status, 200);
    assert_eq!(rig.show(&event).await["audit"][0]["who"], "ada");
    let replay = format!("/api/events/{event}/replay");
    assert_eq!(call(&rig, "POST", &replay, &[], "").await.status, 200);
    let force = r#"{"force":true,"epoch":1,"reason":"x"}"#;
    assert_eq!(call(&rig, "POST", &replay, &[json_type], force).await.status, 200);
    assert_eq!(rig.show(&event).await["audit"][1]["who"], "127.0.0.1");
    for who in ["", "a\u{85}b", &"x".repeat(201)] {
        check_error(&call(&rig, "POST", &replay, &[("oncehook-who", who)], "").await, 400, "who");
    }
    check_error(&call(&rig, "POST", &replay, &[("oncehook-who", "a"), ("oncehook-who", "b")], "").await, 400, "who");
}

#[tokio::test]
async fn fault_100_orders_need_the_token() {
    let token = "file:admin.token";
    let directory_secrets = [SECRETS[0], ("admin.token", "an admin token")];
    let rig = Rig::start(&format!("admin_token = \"{token}\""), CONFIG, &directory_secrets);
    write_client_config(&rig, &format!("admin_token = \"{token}\""));
    for path in ["/api/replays", "/api/sources/stripe/pause", "/api/routes/orders/pause", "/api/events/x/retry"] {
        check_error(&post(&rig, path, &json!({})).await, 401, "token");
    }
    let (code, out, err) = client(&rig, &["pause", "--source", "stripe"]);
    assert_eq!((code, out.as_str()), (0, "source stripe paused\n"), "{err}");
    write_client_config(&rig, "");
    let (code, _, err) = client(&rig, &["resume", "--source", "stripe"]);
    assert!(code == 1 && err.contains("server.admin_token"), "{err}");
}

#[tokio::test]
async fn every_call_is_described() {
    let rig = rig();
    let document = rig.gateway.json("/api/openapi.json").await;
    for (method, path) in [
        ("post", "/api/events/{id}/retry"),
        ("post", "/api/events/{id}/replay"),
        ("post", "/api/events/{id}/skip"),
        ("post", "/api/events/{id}/release"),
        ("post", "/api/replays"),
        ("get", "/api/replays/{id}"),
        ("delete", "/api/replays/{id}"),
        ("get", "/api/routes"),
        ("post", "/api/routes/{name}/pause"),
        ("post", "/api/routes/{name}/resume"),
        ("post", "/api/sources/{name}/pause"),
        ("post", "/api/sources/{name}/resume"),
        ("post", "/api/forgetting/resume"),
    ] {
        assert!(document["paths"][path][method]["responses"].is_object(), "{method} {path} is not described");
        let path = path.replace("{id}", "x").replace("{name}", "x");
        let answer = call(&rig, &method.to_uppercase(), &path, &[], "").await;
        assert!(
            answer.status != 405 && answer.json()["error"]["code"] != "not_found",
            "{method} {path} is described but not there"
        );
    }
}
