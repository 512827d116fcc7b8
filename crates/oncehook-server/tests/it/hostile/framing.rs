//! Requests whose length or framing can be read in two ways.

use oncehook_testkit::gateway::now;

use super::{SHORT, event, rig, stripe};
use crate::kit::{Headers, chunks, exchange, raw, soon, statuses, text, write_headers};

/// A head with a genuine signature over `body`, and whatever framing.
fn framed(framing: &str, signed: &[u8], rest: &[u8]) -> Vec<u8> {
    let mut request = b"POST /webhooks/stripe HTTP/1.1\r\nhost: localhost\r\n".to_vec();
    write_headers(&mut request, &stripe().headers(&[], signed, "", now()));
    request.extend_from_slice(framing.as_bytes());
    request.extend_from_slice(b"\r\n");
    request.extend_from_slice(rest);
    request
}

#[tokio::test]
async fn fault_81_ambiguous_lengths_are_refused_and_nothing_is_smuggled() {
    let rig = rig(SHORT);
    let body = br#"{"id":"evt_outer","type":"a"}"#;
    let smuggled = event(r#""evt_smuggled""#);
    let chunked = chunks(body, 100);
    let both = chunked.len();
    let plain = body.len();
    // The framing, and the bytes after the head up to the request that must not be processed.
    let cases: Vec<(String, &[u8])> = vec![
        (format!("content-length: {both}\r\ntransfer-encoding: chunked\r\n"), &chunked),
        (format!("transfer-encoding: chunked\r\ncontent-length: {both}\r\n"), &chunked),
        (format!("content-length: {plain}\r\ntransfer-encoding: chunked\r\n"), &chunked),
        (format!("Content-Length : {plain}\r\ntransfer-encoding: chunked\r\n"), &chunked),
        (format!("content-length: {plain}\r\ntransfer-encoding: identity\r\n"), body),
        ("transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n".into(), &chunked),
        ("transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n".into(), &chunked),
        ("transfer-encoding: identity\r\ntransfer-encoding: chunked\r\n".into(), &chunked),
        ("transfer-encoding: gzip, chunked\r\n".into(), &chunked),
        ("transfer-encoding: chunked, chunked\r\n".into(), &chunked),
        ("transfer-encoding: chunked, identity\r\n".into(), &chunked),
        ("transfer-encoding: xchunked\r\n".into(), &chunked),
        ("transfer-encoding: chunkedx\r\n".into(), &chunked),
        ("transfer-encoding: \x0bchunked\r\n".into(), &chunked),
        ("transfer-encoding:\r\n".into(), &chunked),
        ("transfer-encoding : chunked\r\n".into(), &chunked),
        ("transfer-encoding: \"chunked\"\r\n".into(), &chunked),
        (format!("content-length: {plain}\r\ncontent-length: {both}\r\n"), body),
        (format!("content-length: {plain}, {both}\r\n"), body),
        (format!("content-length: {plain}\r\nx: y\r\n folded\r\n"), body),
        (format!("content-length: {plain}\r\ntransfer-encoding:\r\n chunked\r\n"), body),
    ];
    for (framing, rest) in cases {
        let mut bytes = framed(&framing, body, rest);
        bytes.extend_from_slice(&smuggled);
        let received = exchange(rig.gateway.ingress, &bytes).await;
        let received = received.unwrap_or_else(|| panic!("{framing:?}: the connection stayed open"));
        let shown = String::from_utf8_lossy(&received);
        assert_eq!(statuses(&received), [400], "{framing:?}: {shown}");
    }
    assert_eq!(rig.stored().await, 0);
}

#[tokio::test]
async fn fault_81_the_same_on_paths_that_do_not_exist() {
    let rig = rig(SHORT);
    let smuggled = event(r#""evt_smuggled""#);
    for line in ["POST /nowhere HTTP/1.1", "GET /webhooks/stripe HTTP/1.1", "PUT /webhooks/stripe HTTP/1.1"] {
        for framing in [
            "content-length: 5\r\ntransfer-encoding: chunked\r\n",
            "transfer-encoding: chunked\r\ncontent-length: 5\r\n",
        ] {
            let mut bytes = format!("{line}\r\nhost: l\r\n{framing}\r\n0\r\n\r\n").into_bytes();
            bytes.extend_from_slice(&smuggled);
            let received = exchange(rig.gateway.ingress, &bytes).await;
            let received = received.unwrap_or_else(|| panic!("{line} {framing:?}: the connection stayed open"));
            let statuses = statuses(&received);
            assert_eq!(statuses.len(), 1, "{line} {framing:?}: {}", String::from_utf8_lossy(&received));
            assert!(matches!(statuses[0], 400 | 404 | 405), "{line} {framing:?}: {statuses:?}");
        }
    }
    assert_eq!(rig.stored().await, 0);
}

#[tokio::test]
async fn fault_81_a_pipelined_request_cannot_hide_its_length() {
    let rig = rig(SHORT);
    let body = br#"{"id":"evt_outer","type":"a"}"#;
    let chunked = chunks(body, 100);
    // The second request's length arrives together with the first request; what is read after the first answer looks
    // like the beginning of a plainly chunked one.
    let mut first = event(r#""evt_first""#);
    let hidden = framed(
        &format!(
            "content-length: {}\r\nx-a: POST /webhooks/stripe HTTP/1.1\r\ntransfer-encoding: chunked\r\n",
            body.len()
        ),
        body,
        &chunked,
    );
    let split = hidden.windows(4).position(|window| window == b"POST").map(|start| {
        let rest = &hidden[start + 4..];
        start + 4 + rest.windows(4).position(|window| window == b"POST").unwrap()
    });
    let (early, late) = hidden.split_at(split.unwrap());
    first.extend_from_slice(early);
    let mut wire = rig.connect().await;
    let answer = soon(wire.ask(&first)).await.unwrap();
    assert_eq!(answer.status, 200);
    wire.send(late).await.unwrap();
    let answer = soon(wire.answer()).await.unwrap();
    assert_eq!(answer.status, 400, "{}", String::from_utf8_lossy(&answer.body));
    assert!(soon(wire.is_closed()).await);
    assert_eq!(rig.stored().await, 1);
}

#[tokio::test]
async fn fault_81_broken_chunks_are_refused() {
    let rig = rig(SHORT);
    let body = br#"{"id":"evt_chunks","type":"a"}"#;
    let text = std::str::from_utf8(body).unwrap();
    let length = body.len();
    let smuggled = event(r#""evt_smuggled""#);
    let cases = [
        format!("-1\r\n{text}\r\n0\r\n\r\n"),
        format!("+{length:x}\r\n{text}\r\n0\r\n\r\n"),
        format!("0x{length:x}\r\n{text}\r\n0\r\n\r\n"),
        format!("zz\r\n{text}\r\n0\r\n\r\n"),
        format!("\r\n{text}\r\n0\r\n\r\n"),
        format!("fffffffffffffffff\r\n{text}\r\n0\r\n\r\n"),
        format!("10000000000000000{length:x}\r\n{text}\r\n0\r\n\r\n"),
        format!("{:x}\r\n{text}\r\n0\r\n\r\n", length - 1),
        format!("{:x}\r\n{text}0\r\n\r\n", length),
        format!("{length:x}\n{text}\n0\n\n"),
        format!("{length:x}\r{text}\r\n0\r\n\r\n"),
        format!("{length:x}; ext\n=x\r\n{text}\r\n0\r\n\r\n"),
        format!("{length:x};{}\r\n{text}\r\n0\r\n\r\n", "e".repeat(100_000)),
    ];
    for case in cases {
        let mut bytes = framed("transfer-encoding: chunked\r\n", body, case.as_bytes());
        bytes.extend_from_slice(&smuggled);
        let received = exchange(rig.gateway.ingress, &bytes).await;
        let start: String = case.chars().take(30).collect();
        let received = received.unwrap_or_else(|| panic!("{start:?}: the connection stayed open"));
        let statuses = statuses(&received);
        // Whoever breaks off in the middle may have seen his last byte.
        assert!(matches!(statuses[..], [] | [400 | 413]), "{start:?}: {}", String::from_utf8_lossy(&received));
    }
    assert_eq!(rig.stored().await, 0);
}

#[tokio::test]
async fn fault_81_honest_framing_is_accepted() {
    let rig = rig(SHORT);
    let body = br#"{"id":"evt_plain","type":"a"}"#;
    // Chunked, again and again on one connection, with all that the standard allows.
    let mut wire = rig.connect().await;
    for (number, size) in [1, 7, 1_000].into_iter().enumerate() {
        let answer = soon(wire.ask(&stripe().chunked(&[], body, size))).await.unwrap();
        assert_eq!(answer.status, 200, "chunks of {size}: {}", String::from_utf8_lossy(&answer.body));
        assert_eq!(answer.json()["status"], if number == 0 { "accepted" } else { "duplicate" });
    }
    for framing in ["Transfer-Encoding: Chunked\r\n", "TRANSFER-ENCODING:chunked\r\n"] {
        let answer = soon(wire.ask(&framed(framing, body, &chunks(body, 9)))).await.unwrap();
        assert_eq!(answer.status, 200, "{framing}");
    }
    // Trailers are read and dropped.
    let mut trailed = chunks(body, 100);
    trailed.truncate(trailed.len() - 2);
    trailed.extend_from_slice(b"stripe-signature: nonsense\r\n\r\n");
    let answer = soon(wire.ask(&framed("transfer-encoding: chunked\r\n", body, &trailed))).await.unwrap();
    assert_eq!(answer.status, 200);
    // With a length in between.
    assert_eq!(soon(wire.ask(&stripe().post(&[], body))).await.unwrap().status, 200);
    let events = rig.gateway.events().await;
    assert_eq!((events.len(), &events[0]["duplicates"]), (1, &6.into()));
}

#[tokio::test]
async fn fault_81_http_1_0_and_upgrades() {
    let rig = rig(SHORT);
    let body = br#"{"id":"evt_old","type":"a"}"#;
    let old = |framing: &str, rest: &[u8]| {
        let request = framed(framing, body, rest);
        let text = String::from_utf8(request).unwrap();
        text.replacen("HTTP/1.1", "HTTP/1.0", 1).into_bytes()
    };
    // HTTP/1.0 closes, unless it asks to go on; then the next request is answered.
    let received =
        exchange(rig.gateway.ingress, &old(&format!("content-length: {}\r\n", body.len()), body)).await.unwrap();
    assert_eq!(statuses(&received), [200]);
    let mut wire = rig.connect().await;
    let keep = old(&format!("content-length: {}\r\nconnection: keep-alive\r\n", body.len()), body);
    assert_eq!(soon(wire.ask(&keep)).await.unwrap().status, 200);
    assert_eq!(soon(wire.ask(&keep)).await.unwrap().status, 200);
    // HTTP/1.0 knows no chunks.
    let mut bytes = old("transfer-encoding: chunked\r\nconnection: keep-alive\r\n", &chunks(body, 10));
    bytes.extend_from_slice(&event(r#""evt_smuggled""#));
    assert_eq!(statuses(&exchange(rig.gateway.ingress, &bytes).await.unwrap()), [400]);
    // An upgrade that nobody offered: refused, and what follows is not read as a request.
    for upgrade in [
        "connection: upgrade\r\nupgrade: websocket\r\n",
        "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n",
        "upgrade: h2c\r\n",
    ] {
        let mut bytes = framed(&format!("content-length: {}\r\n{upgrade}", body.len()), body, body);
        bytes.extend_from_slice(&event(r#""evt_smuggled""#));
        let received = exchange(rig.gateway.ingress, &bytes).await.unwrap();
        assert_eq!(statuses(&received), [400], "{upgrade:?}");
    }
    // HTTP/2 by prior knowledge, other versions, and noise.
    let smuggled = event(r#""evt_smuggled""#);
    for bytes in [
        &b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"[..],
        b"POST /webhooks/stripe HTTP/9.9\r\n\r\n",
        b"POST /webhooks/stripe\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"CONNECT localhost:80 HTTP/1.1\r\nhost: l\r\nconnection: close\r\n\r\n",
        b"\x00\x00\x00\r\n\r\n",
    ] {
        let received = exchange(rig.gateway.ingress, &[bytes, &smuggled].concat()).await.unwrap();
        assert!(!statuses(&received).contains(&200), "{bytes:?}: {}", String::from_utf8_lossy(&received));
    }
    assert_eq!(rig.stored().await, 1);
}

#[tokio::test]
async fn fault_81_pipelined_requests_are_answered_in_order() {
    let rig = rig(SHORT);
    let mut bytes = Vec::new();
    for number in 0..20 {
        bytes.extend_from_slice(&event(&format!("\"evt_{number}\"")));
        bytes.extend_from_slice(&raw("/webhooks/stripe", &Headers::new(), b"{}"));
    }
    let mut wire = rig.connect().await;
    wire.send(&bytes).await.unwrap();
    let mut events = Vec::new();
    for number in 0..20 {
        let answer = soon(wire.answer()).await.unwrap();
        assert_eq!(answer.status, 200, "{number}");
        events.push(text(&answer.json()["event"]));
        assert_eq!(soon(wire.answer()).await.unwrap().status, 401, "{number}");
    }
    for (number, event) in events.iter().enumerate() {
        assert_eq!(rig.show(event).await["key"], format!("evt_{number}"));
    }
}
