//! Every way in which the front door refuses a request.

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::{line, metric, until};
use crate::kit::{Rig, Signs, check_error, raw, soon, statuses};

const SECRET: &str = "whsec_refusals_31c";

const SERVER: &str = "[server.limits]\nbody_bytes = 1000\nhead = \"1s\"\nbody = \"1s\"\ncommit = \"1s\"";

const SOURCES: &str = r#"
[[source]]
name = "stripe"
provider = "stripe"
secrets = ["file:secret"]

[[source]]
name = "listed"
provider = "stripe"
secrets = ["file:secret"]
allow_ips = ["203.0.113.0/24"]

[[source]]
name = "limited"
provider = "stripe"
secrets = ["file:secret"]
rate_limit = { per_second = 1, burst = 1 }

[[source]]
name = "by-peer"
provider = "stripe"
secrets = ["file:secret"]
rate_limit = { peer_per_second = 1, peer_burst = 1 }

[[source]]
name = "strict"
provider = "stripe"
secrets = ["file:secret"]
missing_key = "reject"

[[source]]
name = "asana"
provider = "asana"
secrets = ["file:secret"]
"#;

/// One way to be refused.
struct Refusal {
    request: Vec<u8>,
    /// Nothing where the connection just ends.
    status: Option<u16>,
    source: &'static str,
    reason: &'static str,
}

fn refusal(request: impl Into<Vec<u8>>, status: u16, source: &'static str, reason: &'static str) -> Refusal {
    Refusal { request: request.into(), status: Some(status), source, reason }
}

/// A genuine request.
fn genuine(source: &str, body: &str) -> Vec<u8> {
    Signs::preset("stripe", SECRET, source).post(&[], body.as_bytes())
}

/// All of them. A new reason to refuse belongs here.
fn refusals() -> Vec<Refusal> {
    let post = |path: &str, headers: &str, body: &str| {
        format!("POST {path} HTTP/1.1\r\nhost: x\r\n{headers}\r\n{body}").into_bytes()
    };
    let forged = Signs::preset("stripe", "another secret", "stripe").post(&[], br#"{"id":"evt_f"}"#);
    let stale = {
        let (signs, at) = (Signs::preset("stripe", SECRET, "stripe"), oncehook_verify::UnixMicros(1_000_000));
        raw(&signs.path, &signs.headers(&[], b"{}", "x", at), b"{}")
    };
    let chunked = format!("7d0\r\n{}\r\n0\r\n\r\n", "a".repeat(2_000));
    vec![
        refusal(post("/webhooks/nope", "content-length: 2\r\n", "{}"), 404, "-", "unknown_source"),
        refusal(post("/webhooks/stripe/", "content-length: 2\r\n", "{}"), 404, "-", "unknown_source"),
        refusal("GET /wp-login.php HTTP/1.1\r\nhost: x\r\n\r\n", 404, "-", "not_found"),
        refusal("PUT /webhooks/stripe HTTP/1.1\r\nhost: x\r\n\r\n", 405, "stripe", "method"),
        refusal(
            post("/webhooks/stripe", "transfer-encoding: chunked\r\ncontent-length: 5\r\n", "0\r\n\r\n"),
            400,
            "stripe",
            "framing",
        ),
        refusal(post("/webhooks/stripe", "upgrade: h2c\r\ncontent-length: 0\r\n", ""), 400, "stripe", "upgrade"),
        refusal(
            post("/webhooks/stripe", "content-encoding: gzip\r\ncontent-length: 2\r\n", "{}"),
            415,
            "stripe",
            "content_encoding",
        ),
        refusal(post("/webhooks/stripe", "content-length: 26214400\r\n", ""), 413, "stripe", "body_too_large"),
        refusal(post("/webhooks/strict", "transfer-encoding: chunked\r\n", &chunked), 413, "strict", "body_too_large"),
        refusal(post("/webhooks/stripe", "content-length: 9\r\n", "{"), 408, "stripe", "body_timeout"),
        refusal(post("/webhooks/stripe", "content-length: 2\r\n", "{}"), 401, "stripe", "missing_header"),
        refusal(forged, 401, "stripe", "signature_mismatch"),
        refusal(stale, 401, "stripe", "too_old"),
        refusal(post("/webhooks/listed", "content-length: 2\r\n", "{}"), 403, "listed", "address"),
        refusal(genuine("strict", r#"{"type":"a"}"#), 400, "strict", "missing_key"),
        refusal(
            post("/webhooks/asana", "x-hook-secret: 0123456789abcdef0123456789abcdef\r\ncontent-length: 0\r\n", ""),
            403,
            "asana",
            "handover",
        ),
        refusal("\u{1}\u{2} nonsense\r\n\r\n", 400, "-", "malformed"),
        refusal(
            post("/webhooks/stripe", &format!("x: {}\r\ncontent-length: 0\r\n", "a".repeat(40_000)), ""),
            431,
            "-",
            "head_too_large",
        ),
        Refusal {
            request: b"POST /webhooks/stripe HTTP/1.1\r\nhost: x".to_vec(),
            status: None,
            source: "-",
            reason: "head_timeout",
        },
    ]
}

/// Sends a request and reads until the first answer, or until the other side closes.
async fn first_status(rig: &Rig, request: &[u8]) -> Option<u16> {
    let mut stream = TcpStream::connect(rig.gateway.ingress).await.unwrap();
    // A server that has seen enough stops reading.
    let _ = stream.write_all(request).await;
    let (mut received, mut buffer) = (Vec::new(), [0; 4096]);
    while statuses_of(&received).is_empty() {
        match stream.read(&mut buffer).await {
            Ok(0) | Err(_) => break,
            Ok(count) => received.extend_from_slice(&buffer[..count]),
        }
    }
    statuses_of(&received).first().copied()
}

fn statuses_of(received: &[u8]) -> Vec<u16> {
    if received.len() < 12 { Vec::new() } else { statuses(received) }
}

#[tokio::test]
async fn fault_every_refusal_is_answered_counted_and_logged_with_its_reason() {
    let rig = Rig::start(SERVER, SOURCES, &[("secret", SECRET)]);
    // What uses up the limits.
    rig.deliver(&genuine("limited", r#"{"id":"evt_1"}"#)).await;
    rig.deliver(&genuine("by-peer", r#"{"id":"evt_1"}"#)).await;
    let mut refusals = refusals();
    refusals.push(refusal(genuine("limited", r#"{"id":"evt_2"}"#), 429, "limited", "rate_limit"));
    refusals.push(refusal(genuine("by-peer", r#"{"id":"evt_2"}"#), 429, "by-peer", "rate_limit_peer"));
    // The limits first, before they have time to refill.
    refusals.reverse();
    let mut missing = Vec::new();
    for Refusal { request, status, source, reason } in &refusals {
        let counter = format!("oncehook_rejected_total{{source=\"{source}\",reason=\"{reason}\"}}");
        let before = metric(&rig.gateway, &counter).await;
        let answered = soon(first_status(&rig, request)).await;
        if answered != *status {
            missing.push(format!("{source} {reason}: answered {answered:?} and not {status:?}"));
        }
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(3);
        while metric(&rig.gateway, &counter).await != before + 1.0 {
            if std::time::Instant::now() > deadline {
                missing.push(format!("{source} {reason}: not counted"));
                break;
            }
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    }
    // Lines are added up for a second. What is refused now comes last, so all earlier lines are written before its line.
    rig.refused(b"GET /last HTTP/1.1\r\nhost: x\r\n\r\n", 404, "not_found").await;
    tokio::time::sleep(std::time::Duration::from_millis(2_500)).await;
    let log = rig.gateway.log();
    for Refusal { source, reason, status, .. } in &refusals {
        let status = status.map_or(String::new(), |status| format!("status={status}"));
        let parts = [format!("source=\"{source}\""), format!("reason=\"{reason}\""), status];
        let logged = log.lines().any(|line| {
            line.contains("refused") && line.contains("127.0.0.1") && parts.iter().all(|part| line.contains(part))
        });
        if !logged {
            missing.push(format!("{source} {reason}: no log line"));
        }
    }
    assert!(missing.is_empty(), "{}\n{log}", missing.join("\n"));
    // The size that was declared and the limit stand beside each other.
    let large = log.lines().find(|line| line.contains("body_too_large") && line.contains("stripe")).unwrap();
    assert!(large.contains("26214400") && large.contains("1000"), "{large}");
    // And nothing that a sender wrote, apart from its address.
    assert!(!log.contains("wp-login") && !log.contains("/webhooks/nope"), "{log}");
}

#[tokio::test]
async fn fault_an_unavailable_journal_and_a_full_house_are_counted_and_logged() {
    let server = "[server.limits]\nconnections = 3\nhead = \"30s\"";
    let rig = Rig::start(server, SOURCES, &[("secret", SECRET)]);
    let locked = rusqlite::Connection::open(rig.journal()).unwrap();
    locked.execute_batch("BEGIN IMMEDIATE").unwrap();
    // Requests that are being stored hold every place. Idle connections would make room.
    let mut held = Vec::new();
    for number in 0..3 {
        let mut wire = rig.connect().await;
        wire.send(&genuine("stripe", &format!(r#"{{"id":"evt_{number}"}}"#))).await.unwrap();
        held.push(wire);
    }
    until("three requests under way", &rig.gateway, async || {
        (metric(&rig.gateway, "oncehook_in_flight").await >= 3.0).then_some(())
    })
    .await;
    check_error(&soon(rig.connect().await.answer()).await.unwrap(), 503, "connections");
    for wire in &mut held {
        let answer = soon(wire.answer()).await.unwrap();
        assert_eq!(answer.status, 503, "{}", String::from_utf8_lossy(&answer.body));
    }
    locked.execute_batch("ROLLBACK").unwrap();
    line(&rig.gateway, &["refused", "source=\"stripe\"", "status=503", "reason=\"journal_"]).await;
    line(&rig.gateway, &["refused", "source=\"-\"", "status=503", "reason=\"connections\"", "127.0.0.1"]).await;
    until("the count of connections", &rig.gateway, async || {
        let counter = "oncehook_unavailable_total{source=\"-\",reason=\"connections\"}";
        (metric(&rig.gateway, counter).await >= 1.0).then_some(())
    })
    .await;
}
