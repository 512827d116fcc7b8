//! Connections that are slow, idle, or too many.

use std::time::{Duration, Instant};

use oncehook_testkit::sender::Wire;

use super::{SHORT, event, rig};
use crate::kit::{check_error, soon};

/// Waits until the other side closes; fails if that takes longer than the deadline and a little.
async fn check_closes(wire: &mut Wire, since: Instant, what: &str) {
    let closed = tokio::time::timeout(Duration::from_secs(6), wire.is_closed()).await;
    assert_eq!(closed, Ok(true), "{what} stayed open");
    let took = since.elapsed();
    assert!(took < Duration::from_secs(4), "{what} was open for {took:?}");
}

#[tokio::test]
async fn fault_76_slow_and_idle_connections_are_closed_in_time() {
    let rig = rig(SHORT);
    let since = Instant::now();
    let mut idle = rig.connect().await;
    let mut kept = rig.connect().await;
    assert_eq!(soon(kept.ask(&event(r#""evt_kept""#))).await.unwrap().status, 200);
    let mut head = rig.connect().await;
    head.send(b"POST /webhooks/stripe HTTP/1.1\r\nhost: localhost\r\n").await.unwrap();
    let mut body = rig.connect().await;
    body.send(b"POST /webhooks/stripe HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n").await.unwrap();
    let mut in_chunks = rig.connect().await;
    let chunked = b"POST /webhooks/stripe HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n";
    in_chunks.send(chunked).await.unwrap();

    // Drip: a byte now and then must not buy more time.
    let drip = async {
        for number in 0..40 {
            let alive = head.send(format!("x-{number}: y\r\n").as_bytes()).await.is_ok();
            let alive = body.send(b" ").await.is_ok() || alive;
            let alive = in_chunks.send(b"1\r\nx\r\n").await.is_ok() || alive;
            if !alive {
                break;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    soon(drip).await;
    check_closes(&mut idle, since, "an idle connection").await;
    check_closes(&mut kept, since, "an idle connection after a request").await;
    assert!(since.elapsed() < Duration::from_secs(5), "the drip was not stopped: {:?}", since.elapsed());
    assert_eq!(rig.stored().await, 1);

    // Who waits is told why.
    let since = Instant::now();
    let mut wire = rig.connect().await;
    wire.send(b"POST /webhooks/stripe HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{").await.unwrap();
    let answer = soon(wire.answer()).await.unwrap();
    check_error(&answer, 408, "body_timeout");
    check_closes(&mut wire, since, "a slow body").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fault_76_a_thousand_slow_connections_do_not_slow_a_genuine_client() {
    let rig = rig("[server.limits]\nhead = \"4s\"\nbody = \"4s\"\n");
    let mut slow = Vec::new();
    for number in 0..1_500 {
        let mut wire = rig.connect().await;
        match number % 3 {
            0 => {}
            1 => wire.send(b"POST /webhooks/stripe HTTP/1.1\r\nhost: l").await.unwrap(),
            _ => {
                let head = b"POST /webhooks/stripe HTTP/1.1\r\nhost: l\r\ncontent-length: 1000\r\n\r\n{\"id\"";
                wire.send(head).await.unwrap();
            }
        }
        slow.push(wire);
    }
    let mut slowest = Duration::ZERO;
    for number in 0..100 {
        let started = Instant::now();
        let request = event(&format!("\"evt_{number}\""));
        // New connections and a kept one alike.
        assert_eq!(rig.deliver(&request).await.0, "accepted");
        slowest = slowest.max(started.elapsed());
    }
    assert!(slowest < Duration::from_secs(1), "{slowest:?}");
    assert!(rig.gateway.json("/readyz").await["ready"].as_bool().unwrap());
    // All of them are sent away in the end.
    let started = Instant::now();
    for wire in &mut slow {
        assert!(soon(wire.is_closed()).await);
    }
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
    assert_eq!(rig.stored().await, 100);
}

#[tokio::test]
async fn fault_76_beyond_the_cap_connections_get_503_and_places_come_back() {
    let rig = rig("[server.limits]\nconnections = 20\nhead = \"30s\"\n");
    // A foreign write transaction: nothing can be stored, so every request stays without an answer.
    let other = rusqlite::Connection::open(rig.journal()).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let mut held = Vec::new();
    for number in 0..20 {
        let mut wire = rig.connect().await;
        wire.send(&event(&format!("\"evt_{number}\""))).await.unwrap();
        held.push(wire);
    }
    let taken = async {
        while rig.gateway.metric("oncehook_in_flight").await < 20.0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    soon(taken).await;
    for _ in 0..5 {
        let mut turned_away = rig.connect().await;
        let answer = soon(turned_away.answer()).await.unwrap();
        check_error(&answer, 503, "connections");
        assert!(soon(turned_away.is_closed()).await);
    }
    other.execute_batch("ROLLBACK").unwrap();
    for wire in &mut held {
        assert!(matches!(soon(wire.answer()).await.unwrap().status, 200 | 503), "it was answered");
    }
    // Operators see it, and places come back.
    let metrics = String::from_utf8(rig.gateway.get("/metrics").await.body).unwrap();
    assert!(metrics.contains("oncehook_unavailable_total{source=\"-\",reason=\"connections\"} 5"), "{metrics}");
    rig.deliver(&event("\"evt_after\"")).await;
}

/// Dawdlers hold connections, not the places that honest senders need.
#[tokio::test]
async fn fault_76_senders_that_dawdle_in_the_body_take_no_place() {
    let rig = rig("[server.limits]\nin_flight = 5\nbody = \"30s\"\n");
    let mut dawdlers = Vec::new();
    for number in 0..20 {
        let request = event(&format!("\"evt_slow_{number}\""));
        let mut wire = rig.connect().await;
        wire.send(&request[..request.len() - 1]).await.unwrap();
        dawdlers.push((wire, request[request.len() - 1]));
    }
    tokio::time::sleep(Duration::from_millis(200)).await;
    for number in 0..10 {
        let answer = soon(rig.connect().await.ask(&event(&format!("\"evt_{number}\"")))).await.unwrap();
        assert_eq!(answer.status, 200);
    }
    // And a dawdler that ends is served like anybody.
    let (mut wire, last) = dawdlers.pop().unwrap();
    assert_eq!(soon(wire.ask(&[last])).await.unwrap().status, 200);
}
