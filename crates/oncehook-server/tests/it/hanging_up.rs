//! Senders that hang up at any moment: in the middle of a request, before the answer, while it comes. The same on every server
//! database.

use std::sync::Arc;
use std::time::Duration;

use oncehook_testkit::gateway::Gateway;
use oncehook_testkit::promises::Senders;
use oncehook_testkit::random::Random;
use oncehook_testkit::sender::Wire;
use oncehook_testkit::size::size;

/// As many as `ONCEHOOK_HANGING_UP` says. `check_once` waits until nothing is pending, looks whether every stored event took effect
/// once, and says how many there are.
pub(crate) async fn requests_dropped_at_any_moment(gateway: &Gateway, check_once: impl AsyncFn() -> usize) {
    let mut random = Random::from_environment();
    let count = size("ONCEHOOK_HANGING_UP", 1_000);
    let senders = Senders::new(600, 0);
    let tasks: Vec<_> = (0..20)
        .map(|task| {
            let (senders, address) = (Arc::clone(&senders), gateway.ingress);
            let mut random = Random::new(random.next());
            tokio::spawn(async move {
                let mut answered = 0;
                for number in (task..count).step_by(20) {
                    let key = format!("evt_{number}");
                    let request = senders.request(&key);
                    let mut wire = Wire::connect(address).await.unwrap();
                    // Most are sent whole; what comes after that is what can go wrong.
                    let sent = match random.below(4) {
                        0 => random.below(request.len() as u64) as usize,
                        _ => request.len(),
                    };
                    // From a microsecond to half a second: every stage has its share.
                    let patience = Duration::from_micros(1 << random.below(20));
                    let asking = async {
                        wire.send(&request[..sent]).await?;
                        wire.answer().await
                    };
                    match tokio::time::timeout(patience, asking).await {
                        Ok(Ok(answer)) => {
                            answered += u64::from(senders.promises.record(&key, &answer));
                        }
                        Ok(Err(_)) | Err(_) if random.below(2) == 0 => drop(wire.reset()),
                        Ok(Err(_)) | Err(_) => drop(wire),
                    }
                }
                answered
            })
        })
        .collect();
    let mut answered = 0;
    for task in tasks {
        answered += task.await.unwrap();
    }
    let stored = check_once().await;
    eprintln!("{count} requests: {answered} answered, {stored} stored");
    assert_eq!(senders.promises.check(gateway).await.stored, stored);
    assert!(answered < count && stored > 0, "{answered} answered, {stored} stored");
    // Nothing is left behind that would keep the others out.
    let again: Vec<_> = (0..20)
        .map(|task| {
            let (senders, address) = (Arc::clone(&senders), gateway.ingress);
            tokio::spawn(async move {
                let mut wire = Wire::connect(address).await.unwrap();
                for key in (task..count).step_by(20).map(|number| format!("evt_{number}")) {
                    let answer = wire.ask(&senders.request(&key)).await.unwrap();
                    assert!(senders.promises.record(&key, &answer), "{key}: {answer:?}");
                }
            })
        })
        .collect();
    for task in again {
        task.await.unwrap();
    }
    assert_eq!(check_once().await as u64, count);
}
