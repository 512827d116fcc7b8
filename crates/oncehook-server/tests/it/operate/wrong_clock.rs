//! A gateway whose clock is far away from the time that the journal has seen last forgets nothing, and says so.

use std::time::{Duration, Instant};

use oncehook_testkit::gateway::{Gateway, now};
use serde_json::json;

use super::{client, deliver, rig, write_client_config};
use crate::kit::{BINARY, PATIENCE};

#[tokio::test(flavor = "multi_thread")]
async fn fault_18_a_doubted_clock_is_told_everywhere_until_the_operator_says_that_it_is_right() {
    let mut rig = rig();
    deliver(&rig, "evt_1", "order.paid").await;
    assert_eq!(rig.gateway.metric("oncehook_forgetting_stopped").await, 0.0);
    assert!(rig.gateway.stop().success());
    // As if the machine came up with a clock that is 40 days ahead: the journal has seen an earlier time last.
    let file = rusqlite::Connection::open(rig.directory.path().join("journal.db")).unwrap();
    let seen = (now().0 - 40 * 86_400_000_000).to_string();
    let changed = file.execute("UPDATE oncehook_meta SET value = ?1 WHERE name = 'clock'", [seen]).unwrap();
    assert_eq!(changed, 1);
    drop(file);
    rig.gateway = Gateway::start(BINARY.as_ref(), rig.directory.path());
    write_client_config(&rig, "");

    let begun = Instant::now();
    while rig.gateway.metric("oncehook_forgetting_stopped").await == 0.0 {
        assert!(begun.elapsed() < PATIENCE, "{}", rig.gateway.log());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let told = json!("the clock is 40 days ahead of the time that the journal has seen last");
    let ready = rig.gateway.json("/readyz").await;
    assert_eq!((&ready["ready"], &ready["forgetting_stopped"]), (&json!(true), &told));
    assert_eq!(rig.gateway.json("/api/stats").await["forgetting_stopped"], told);
    assert!(rig.gateway.log().contains("nothing is forgotten"), "{}", rig.gateway.log());

    let (code, out, err) = client(&rig, &["resume", "--forgetting", "--reason", "it was off"]);
    assert_eq!((code, out.trim()), (0, "forgetting resumed"), "{err}");
    assert_eq!(rig.gateway.metric("oncehook_forgetting_stopped").await, 0.0);
    assert!(rig.gateway.json("/readyz").await.get("forgetting_stopped").is_none());
    assert_eq!(client(&rig, &["resume", "--forgetting", "--source", "stripe"]).0, 2);
}
