//! What an operator sees at three in the morning: every refusal, every failed attempt and every pause of the real program has
//! a log line, a reason and a count; and no line holds a word of a body, a destination or a database.

mod attempts;
mod events;
mod pauses;
mod refusals;

use std::time::{Duration, Instant};

use oncehook_testkit::gateway::Gateway;

/// How long a line, a count or a state may take to show.
const PATIENCE: Duration = Duration::from_secs(20);

/// Waits until something is there.
async fn until<T>(what: &str, gateway: &Gateway, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(Instant::now() < deadline, "not there: {what}\n{}", gateway.log());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Waits for a log line that holds all of these.
async fn line(gateway: &Gateway, parts: &[&str]) -> String {
    until(&format!("a log line with {parts:?}"), gateway, async || {
        gateway.log().lines().find(|line| parts.iter().all(|part| line.contains(part))).map(str::to_owned)
    })
    .await
}

/// The log lines that hold all of these, so far.
fn lines(gateway: &Gateway, parts: &[&str]) -> Vec<String> {
    let log = gateway.log();
    log.lines().filter(|line| parts.iter().all(|part| line.contains(part))).map(str::to_owned).collect()
}

/// The value of a metric with these labels, as `/metrics` writes them; 0 if it is not there.
async fn metric(gateway: &Gateway, labelled: &str) -> f64 {
    let text = String::from_utf8(gateway.get("/metrics").await.body).unwrap();
    let value = text.lines().find_map(|line| line.strip_prefix(labelled)?.strip_prefix(' '));
    value.map_or(0.0, |value| value.parse().unwrap())
}
