//! Events that are held, contradicted or sent again.

use super::{line, lines, metric, until};
use crate::kit::{Rig, Signs, run};

const SECRET: &str = "whsec_events_0d4";

const SOURCES: &str = r#"
[[source]]
name = "stripe"
provider = "stripe"
secrets = ["file:secret"]

[[source]]
name = "held"
provider = "stripe"
secrets = ["file:secret"]
missing_key = "quarantine"
"#;

fn rig() -> Rig {
    let rig = Rig::start("", SOURCES, &[("secret", SECRET)]);
    let config =
        format!("[server]\ningress = \"{}\"\nadmin = \"{}\"\n{SOURCES}", rig.gateway.ingress, rig.gateway.admin);
    std::fs::write(rig.directory.path().join("client.toml"), config).unwrap();
    rig
}

fn request(source: &str, body: &str) -> Vec<u8> {
    Signs::preset("stripe", SECRET, source).post(&[], body.as_bytes())
}

#[tokio::test]
async fn fault_held_events_and_conflicts_carry_a_reason_and_have_a_log_line() {
    let rig = rig();
    for (source, body, reason) in [
        ("held", r#"{"type":"private-type"}"#, "missing_key"),
        ("stripe", r#"{"id":"evt_a","id":"evt_b","type":"private-type"}"#, "ambiguous_json"),
    ] {
        let (status, event) = rig.deliver(&request(source, body)).await;
        assert_eq!(status, "quarantined");
        line(&rig.gateway, &["WARN", &event, "held", reason, source]).await;
        let shown = rig.show(&event).await;
        let told = shown["reasons"]["quarantined"].as_str().unwrap_or_default();
        assert!(told.starts_with(reason), "{shown:#}");
        let listed = rig.gateway.json(&format!("/api/events?source={source}")).await;
        assert_eq!(listed["events"][0]["reasons"]["quarantined"], told, "{listed:#}");
        let (code, out, err) = run(rig.directory.path(), &["--config", "client.toml", "show", &event]);
        assert!(code == 0 && out.contains(reason), "{out}{err}");
    }
    let (_, event) = rig.deliver(&request("stripe", r#"{"id":"evt_c","n":"first"}"#)).await;
    for _ in 0..3 {
        let (status, same) = rig.deliver(&request("stripe", r#"{"id":"evt_c","n":"other"}"#)).await;
        assert_eq!((status.as_str(), &same), ("conflict", &event));
    }
    line(&rig.gateway, &["WARN", &event, "another body", "stripe"]).await;
    let shown = rig.show(&event).await;
    assert!(shown["reasons"]["conflict"].as_str().is_some_and(|told| told.contains("body")), "{shown:#}");
    assert_eq!(metric(&rig.gateway, "oncehook_conflicts_total{source=\"stripe\"}").await, 3.0);
    assert!(!rig.gateway.log().contains("private-type"), "{}", rig.gateway.log());
}

#[tokio::test]
async fn fault_the_first_duplicate_is_logged_and_later_ones_are_added_up() {
    let rig = rig();
    let request = request("stripe", r#"{"id":"evt_twice"}"#);
    let (_, event) = rig.deliver(&request).await;
    for _ in 0..50 {
        assert_eq!(rig.deliver(&request).await, ("duplicate".to_owned(), event.clone()));
    }
    let first = line(&rig.gateway, &["INFO", "duplicate", &event, "source=\"stripe\"", "layer="]).await;
    assert!(!first.contains("evt_twice"), "keys may be personal: {first}");
    until("the sum of the further duplicates", &rig.gateway, async || {
        let sums = lines(&rig.gateway, &["INFO", "further duplicates", "source=\"stripe\""]);
        let counts = sums.iter().filter_map(|line| line.split("count=").nth(1)?.parse::<u32>().ok());
        (counts.sum::<u32>() == 49).then_some(())
    })
    .await;
    assert_eq!(lines(&rig.gateway, &[&event]).len(), 1, "{}", rig.gateway.log());
}
