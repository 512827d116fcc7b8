//! A pause that somebody forgot.

use oncehook_testkit::gateway::Gateway;
use serde_json::json;

use super::{line, metric, until};
use crate::kit::{BINARY, Rig};
use crate::operate::{client, deliver, order, parsed, rig, write_client_config};

#[tokio::test]
async fn fault_a_forgotten_pause_is_said_at_start_in_readyz_in_metrics_and_on_every_delivery() {
    let mut rig = rig();
    let on = |kind: &str, name: &str| format!("oncehook_paused{{kind=\"{kind}\",name=\"{name}\"}}");
    assert_eq!(rig.gateway.json("/readyz").await["paused"], json!([]));
    assert!(
        String::from_utf8(rig.gateway.get("/metrics").await.body)
            .unwrap()
            .contains(&format!("{} 0", on("route", "orders")))
    );
    order(&rig, "/api/routes/orders/pause", &json!({"reason": "the shop moves"})).await;
    let event = deliver(&rig, "evt_waits", "order.paid").await;
    check(&rig, &event, &on("route", "orders")).await;

    // Whoever starts it again next week is told.
    rig.gateway.stop();
    let Rig { directory, .. } = rig;
    let gateway = Gateway::start(BINARY.as_ref(), directory.path());
    let rig = Rig { gateway, directory };
    write_client_config(&rig, "");
    line(&rig.gateway, &["WARN", "route orders is paused since", "the shop moves", "oncehook resume"]).await;
    check(&rig, &event, &on("route", "orders")).await;

    // The source's pause holds its routes, too.
    order(&rig, "/api/routes/orders/resume", &json!({})).await;
    order(&rig, "/api/sources/stripe/pause", &json!({})).await;
    let other = deliver(&rig, "evt_other", "order.paid").await;
    check(&rig, &other, &on("source", "stripe")).await;
    assert_eq!(metric(&rig.gateway, &on("route", "orders")).await, 0.0);
    order(&rig, "/api/sources/stripe/resume", &json!({})).await;
    crate::operate::until(&rig, &other, "succeeded").await;
    let shown = rig.show(&other).await;
    assert_eq!(shown["deliveries"][0]["paused"], false, "{shown:#}");
    assert_eq!(rig.gateway.json("/readyz").await["paused"], json!([]));
}

async fn check(rig: &Rig, event: &str, gauge: &str) {
    until(gauge, &rig.gateway, async || (metric(&rig.gateway, gauge).await == 1.0).then_some(())).await;
    let answer = rig.gateway.get("/readyz").await;
    let paused = answer.json()["paused"].as_array().cloned().unwrap_or_default();
    assert_eq!((answer.status, paused.len()), (200, 1), "{}", String::from_utf8_lossy(&answer.body));
    assert!(gauge.contains(paused[0]["name"].as_str().unwrap()) && paused[0]["since"].is_string(), "{paused:?}");
    let shown = rig.show(event).await;
    assert_eq!((&shown["deliveries"][0]["state"], &shown["deliveries"][0]["paused"]), (&json!("ready"), &json!(true)));
    assert_eq!(shown["paused"], true, "{shown:#}");
    for arguments in [&["events"][..], &["show", event]] {
        let (code, out, err) = client(rig, arguments);
        assert!(code == 0 && out.contains("paused") && !out.contains("ready"), "{out}{err}");
    }
    let (_, out, _) = client(rig, &["--json", "events"]);
    assert_eq!(parsed(&out)["events"][0]["status"], "ready", "the API keeps its words: {out}");
}
