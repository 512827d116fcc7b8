//! Rate limits at the front door of the real program.

use std::time::Duration;

use oncehook_testkit::sender::Answer;

use crate::kit::{Rig, Signs, check_error, raw, with};

const SECRET: &str = "rate limit secret";

const SOURCES: &str = r#"
[[source]]
name = "limited"
provider = "stripe"
secrets = ["file:secret"]
rate_limit = { per_second = 1, burst = 5 }

[[source]]
name = "by-peer"
provider = "stripe"
secrets = ["file:secret"]
rate_limit = { peer_per_second = 1, peer_burst = 3 }

[[source]]
name = "free"
provider = "stripe"
secrets = ["file:secret"]
"#;

fn rig() -> Rig {
    Rig::start("trusted_proxies = [\"127.0.0.1\"]", SOURCES, &[("secret", SECRET)])
}

/// A genuine request of a sender behind the proxy.
fn request(source: &str, number: u32, peer: &str) -> Vec<u8> {
    let signs = Signs::preset("stripe", SECRET, source);
    signs.post(&[("x-forwarded-for", peer)], format!(r#"{{"id":"evt_{number}"}}"#).as_bytes())
}

fn check_limited(answer: &Answer) {
    check_error(answer, 429, "rate_limit");
    let seconds: u32 = answer.header("retry-after").unwrap().parse().unwrap();
    assert!((1..=2).contains(&seconds), "{}", answer.head);
}

#[tokio::test]
async fn r6_a_source_takes_its_burst_then_429_and_forged_requests_do_not_count() {
    let rig = rig();
    for _ in 0..50 {
        let signs = Signs::preset("stripe", "another secret", "limited");
        let forged = raw(&signs.path, &signs.headers(&[], b"{}", "x", oncehook_testkit::gateway::now()), b"{}");
        rig.refused(&forged, 401, "signature").await;
    }
    let mut statuses = Vec::new();
    for number in 0..20 {
        let answer = rig.send(&request("limited", number, "192.0.2.1")).await;
        statuses.push(answer.status);
        if answer.status != 200 {
            check_limited(&answer);
        }
    }
    let accepted = statuses.iter().filter(|status| **status == 200).count();
    assert_eq!(&statuses[..5], [200; 5]);
    // One more comes back each second that the machine took for this.
    assert!(accepted < 20, "{statuses:?}");
    // Others have limits of their own, or none.
    for number in 0..20 {
        rig.deliver(&request("free", number, "192.0.2.1")).await;
    }
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    rig.deliver(&request("limited", 100, "192.0.2.1")).await;
    assert_eq!(rig.stored().await, accepted as u64 + 21);
    assert!(rig.gateway.metric("oncehook_rejected_total").await >= 50.0 + (20 - accepted) as f64);
}

#[tokio::test]
async fn r6_an_address_takes_its_burst_then_429_and_others_go_on() {
    let rig = rig();
    for peer in ["192.0.2.1", "192.0.2.2", "2001:db8::7"] {
        let mut refused = 0;
        for number in 0..12 {
            let answer = rig.send(&request("by-peer", number, peer)).await;
            if answer.status != 200 {
                check_limited(&answer);
                refused += 1;
            }
            assert!(number >= 3 || answer.status == 200, "{peer}: {answer:?}");
        }
        assert!(refused > 0, "{peer}");
    }
    // Whoever invents addresses counts as the one it has: only the proxy is believed.
    let headers = with(&vec![], "x-forwarded-for", "198.51.100.1, 192.0.2.9");
    let mut statuses = Vec::new();
    for _ in 0..12 {
        statuses.push(rig.send(&raw("/webhooks/by-peer", &headers, b"{}")).await.status);
    }
    assert_eq!(&statuses[..3], [401; 3]);
    assert!(statuses.contains(&429), "{statuses:?}");
}
