//! Floods by strangers without a secret, at a small scale: memory, places and answers that they hold must not keep a genuine
//! sender out. `make floods` does the same at full scale.

use std::path::Path;
use std::time::{Duration, Instant};

use oncehook_testkit::floods::{Flood, HEAD, Plan, forged_key, run, settled_memory};
use oncehook_testkit::sender::{Wire, post};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

use super::{event, rig};
use crate::kit::{BINARY, Rig, check_error, soon};

/// A request that was never signed, cut so many bytes before its end.
fn cut_short(body: usize, missing: usize) -> Vec<u8> {
    let mut request = post("/webhooks/stripe", &[], &vec![b'x'; body]);
    request.truncate(request.len() - missing);
    request
}

/// The genuine client is served as if there was no flood. The limit for the p99 has slack for a busy machine; `make floods` is
/// strict.
async fn check_flood(flood: Flood) {
    let plan = Plan { connections: 100, memory: 8 << 20, time: Duration::from_secs(6), rate: 100 };
    let outcome = run(Path::new(BINARY), flood, plan).await;
    println!("{HEAD}\n{}", outcome.row(flood));
    assert!(outcome.accepted() >= 0.999, "{}", outcome.row(flood));
    assert!(outcome.genuine.millis(0.99) < 3_000.0, "{}", outcome.row(flood));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fault_76_genuine_events_pass_a_flood_of_bodies_that_stop_short() {
    check_flood(Flood::StoppedBodies).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fault_76_genuine_events_pass_a_flood_of_half_bodies_on_every_place() {
    check_flood(Flood::HalfBodies).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fault_76_genuine_events_pass_a_flood_of_answers_that_nobody_reads() {
    check_flood(Flood::UnreadAnswers).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fault_76_genuine_events_pass_a_flood_of_requests_for_nothing() {
    check_flood(Flood::NothingThere).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fault_76_genuine_events_pass_a_flood_of_forged_requests_on_every_place() {
    check_flood(Flood::Forged).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fault_76_genuine_events_pass_a_flood_of_forged_key_addresses_at_another_source() {
    check_flood(Flood::ForgedKeys).await;
}

#[tokio::test]
async fn fault_76_68_bodies_that_stop_do_not_close_the_gateway() {
    let rig = rig("[server.limits]\nbody = \"60s\"\n");
    let mut held = Vec::new();
    for missing in [1; 64].into_iter().chain([900 << 10; 4]) {
        let mut wire = rig.connect().await;
        // The gateway may stop reading what it refuses.
        let _ = soon(wire.send(&cut_short(1 << 20, missing))).await;
        held.push(wire);
    }
    for number in 0..20 {
        rig.deliver(&event(&format!("\"evt_{number}\""))).await;
    }
    // A large one is served too, when those that stopped have been quiet for a moment.
    let body = oncehook_testkit::sender::stripe_body("evt_large", 900 << 10);
    let large = super::stripe().post(&[], &body);
    let served = async {
        loop {
            // Refused means sent again, as a provider would.
            match rig.connect().await.ask(&large).await {
                Ok(answer) if answer.status == 200 => return,
                Ok(_) | Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
    };
    soon(served).await;
}

#[tokio::test]
async fn fault_76_a_body_below_the_least_rate_is_ended_long_before_its_deadline() {
    let rig = rig("[server.limits]\nbody = \"300s\"\n");
    let mut dripping = rig.connect().await;
    dripping.send(&cut_short(100 << 10, 99 << 10)).await.unwrap();
    let mut silent = rig.connect().await;
    silent.send(&cut_short(100, 100)).await.unwrap();
    let started = Instant::now();
    let drip = async {
        while dripping.send(b"x").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    soon(drip).await;
    check_error(&soon(silent.answer()).await.unwrap(), 408, "body_timeout");
    assert!(started.elapsed() < Duration::from_secs(15), "{:?}", started.elapsed());
}

#[tokio::test]
async fn fault_76_a_connection_whose_answers_nobody_reads_is_closed() {
    // `write` is as `body` if it is not set.
    for limits in ["head = \"2s\"\nbody = \"2s\"", "head = \"2s\"\nbody = \"300s\"\nwrite = \"2s\""] {
        let rig = rig(&format!("[server.limits]\n{limits}\n"));
        let requests = cut_short(10, 0).repeat(100);
        let mut wires = Vec::new();
        for _ in 0..5 {
            let mut stream = TcpStream::connect(rig.gateway.ingress).await.unwrap();
            // Until both sides' buffers are full, or the gateway has seen enough.
            let stuck = async {
                let quiet = Duration::from_secs(1);
                while let Ok(Ok(())) = tokio::time::timeout(quiet, stream.write_all(&requests)).await {}
            };
            soon(stuck).await;
            wires.push(stream);
        }
        let closed = async {
            while rig.gateway.metric("oncehook_connections").await > 0.0 {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        soon(closed).await;
        drop(wires);
    }
}

#[tokio::test]
async fn fault_76_after_404_and_405_the_connection_is_closed() {
    let rig = rig("");
    let requests: [&[u8]; 3] = [
        b"GET /nothing HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"POST /webhooks/nobody HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}",
        b"PUT /webhooks/stripe HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}",
    ];
    for request in requests {
        let mut wire = rig.connect().await;
        let answer = soon(wire.ask(request)).await.unwrap();
        assert!(matches!(answer.status, 404 | 405), "{answer:?}");
        assert_eq!(answer.header("connection"), Some("close"), "{answer:?}");
        let closed = tokio::time::timeout(Duration::from_secs(5), wire.is_closed()).await;
        assert_eq!(closed, Ok(true), "{answer:?}");
    }
}

/// A stranger who is refused again and again has to connect again: with a forged signature, and with a key that cannot be had.
#[tokio::test]
async fn fault_76_a_connection_is_closed_when_eight_of_its_requests_in_a_row_were_refused() {
    let sns = "[[source]]\nname = \"sns\"\nprovider = \"aws-sns\"
        params = { topic_arn = \"arn:aws:sns:us-east-1:123456789012:MyTopic\" }\n";
    let rig = Rig::start("", &[super::SOURCES, sns].concat(), &super::SECRETS);
    for (forged, status) in [(cut_short(10, 0), 401), (forged_key(1), 503)] {
        let mut wire = rig.connect().await;
        for number in 1..=8 {
            let answer = soon(wire.ask(&forged)).await.unwrap();
            assert_eq!(answer.status, status, "{answer:?}");
            let closing = answer.header("connection") == Some("close");
            assert_eq!(closing, number == 8, "request {number}: {answer:?}");
        }
    }
}

async fn is_open(wire: &mut Wire) -> bool {
    tokio::time::timeout(Duration::from_millis(50), wire.is_closed()).await.is_err()
}

#[tokio::test]
async fn fault_76_the_idlest_connection_makes_room_and_those_of_use_stay() {
    let rig = rig("[server.limits]\nconnections = 20\nhead = \"60s\"\nbody = \"60s\"\n");
    let mut useful = Vec::new();
    for number in 0..10 {
        let mut wire = rig.connect().await;
        assert_eq!(soon(wire.ask(&event(&format!("\"evt_{number}\"")))).await.unwrap().status, 200);
        useful.push(wire);
    }
    let mut useless = Vec::new();
    for number in 0..10 {
        let mut wire = rig.connect().await;
        match number % 3 {
            0 => {}
            // An answer, but to a forged request.
            1 => assert_eq!(soon(wire.ask(&cut_short(10, 0))).await.unwrap().status, 401),
            _ => wire.send(&cut_short(100, 50)).await.unwrap(),
        }
        useless.push(wire);
    }
    let taken = async {
        while rig.gateway.metric("oncehook_connections").await < 20.0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    soon(taken).await;
    // The youngest have had the time to send something.
    tokio::time::sleep(Duration::from_millis(300)).await;
    for number in 0..10 {
        rig.deliver(&event(&format!("\"evt_new_{number}\""))).await;
    }
    // Strangers get their places too, from each other.
    for _ in 0..3 {
        for _ in 0..5 {
            useless.push(rig.connect().await);
        }
        // Those who have just come might still send a request.
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    rig.deliver(&event("\"evt_last\"")).await;
    for wire in &mut useful {
        assert!(is_open(wire).await, "a connection of use was closed before one of none");
        assert_eq!(soon(wire.ask(&event("\"evt_again\""))).await.unwrap().status, 200);
    }
}

/// The budget for bodies and the cap on long heads bound it, however many connections there are.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fault_76_half_sent_bodies_and_heads_take_bounded_memory_and_give_it_back() {
    const CONNECTIONS: u64 = 2_000;
    // The cap for 10,000 is 256 MB, of which some 30 MB are the program itself. Buffers count twice while they grow.
    const EACH: u64 = 30_000;
    let long_head = format!("POST /webhooks/stripe HTTP/1.1\r\nhost: l\r\nx-long: {}", "x".repeat(15 << 10));
    for (what, request) in [
        ("half a body of 40 KiB", cut_short(40 << 10, 20 << 10)),
        ("a body without its end", cut_short(6 << 10, 1)),
        ("a head without its end", long_head.into_bytes()),
    ] {
        let rig = rig("[server.limits]\nbody = \"60s\"\nhead = \"60s\"\nin_flight_bytes = 13421772\n");
        let before = rig.gateway.memory("VmRSS");
        let mut wires = Vec::new();
        for _ in 0..CONNECTIONS {
            let mut wire = rig.connect().await;
            // The gateway may refuse it before all of it was sent.
            let _ = soon(wire.send(&request)).await;
            wires.push(wire);
        }
        let most = settle_up(&rig).await.saturating_sub(before);
        drop(wires);
        let limit = before + (40 << 20);
        let after = settled_memory(&rig.gateway, limit).await.saturating_sub(before);
        eprintln!("{what}: {} kB, then {} kB more, at the end {} kB", before / 1_000, most / 1_000, after / 1_000);
        assert!(most < CONNECTIONS * EACH, "{what}: {most} bytes for {CONNECTIONS} connections");
        assert!(after <= 40 << 20, "{what}: {most} bytes with {CONNECTIONS} connections, {after} without");
        rig.deliver(&event("\"evt_after\"")).await;
    }
}

/// The highest memory so far, once it has not grown for a while.
async fn settle_up(rig: &Rig) -> u64 {
    let mut highest = 0;
    loop {
        tokio::time::sleep(Duration::from_millis(500)).await;
        match rig.gateway.memory("VmHWM") {
            now if now > highest => highest = now,
            now => return now,
        }
    }
}

#[tokio::test]
async fn bursts_of_a_thousand_connections_wait_in_the_backlog() {
    let rig = rig("");
    // It accepts nothing now; what connects is held by the system, as far as the backlog goes.
    rig.gateway.signal("STOP");
    for (listener, address) in [("ingress", rig.gateway.ingress), ("admin", rig.gateway.admin)] {
        let connecting: Vec<_> = (0..1_000)
            .map(|_| {
                let connect = TcpStream::connect(address);
                tokio::spawn(async move { tokio::time::timeout(Duration::from_secs(10), connect).await })
            })
            .collect();
        let mut connected = Vec::new();
        for connecting in connecting {
            connected.extend(connecting.await.unwrap().map(Result::unwrap));
        }
        assert_eq!(connected.len(), 1_000, "{listener}: the rest did not fit into the backlog");
    }
    rig.gateway.signal("CONT");
    rig.deliver(&event("\"evt_1\"")).await;
}
