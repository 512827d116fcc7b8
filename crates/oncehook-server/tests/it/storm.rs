//! The incident that oncehook is for: one event, delivered thousands of times.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use oncehook_testkit::gateway::{CONFIG, Gateway, SECRET, now, prepare};
use oncehook_testkit::sender::{Provider, Wire, stripe_body};
use tokio::sync::Barrier;

const BINARY: &str = env!("CARGO_BIN_EXE_oncehook");

/// As many as the shop had orders.
const COPIES: usize = 11_247;

/// What came of a storm: answers by status and word, and the events that they named.
#[derive(Debug, Default, PartialEq, Eq)]
struct Answers {
    words: BTreeMap<(u16, String), usize>,
    events: BTreeSet<String>,
}

impl Answers {
    fn of(&self, word: &str) -> usize {
        self.words.get(&(200, word.to_owned())).copied().unwrap_or(0)
    }
}

/// Delivers the same event `copies` times, each with a signature of its own moment, over connections that start together.
async fn storm(address: SocketAddr, connections: usize, copies: usize, id: &'static str) -> Answers {
    let start = Arc::new(Barrier::new(connections));
    let senders: Vec<_> = (0..connections)
        .map(|first| {
            let start = Arc::clone(&start);
            tokio::spawn(async move {
                let provider = Provider::new("stripe", SECRET, "stripe");
                let body = stripe_body(id, 1_000);
                let mut wire = Wire::connect(address).await.unwrap();
                let mut answers = Answers::default();
                start.wait().await;
                for _ in (first..copies).step_by(connections) {
                    let request = provider.request(&Default::default(), &body, id, now());
                    let answer = wire.ask(&request).await.unwrap();
                    let json = answer.json();
                    let word = json["status"].as_str().unwrap_or("none").to_owned();
                    *answers.words.entry((answer.status, word)).or_default() += 1;
                    answers.events.extend(json["event"].as_str().map(str::to_owned));
                }
                answers
            })
        })
        .collect();
    let mut all = Answers::default();
    for sender in senders {
        let answers = sender.await.unwrap();
        for (word, count) in answers.words {
            *all.words.entry(word).or_default() += count;
        }
        all.events.extend(answers.events);
    }
    all
}

/// One event in the list, with that many duplicates; the counts agree.
async fn assert_one_event(gateway: &Gateway, answers: &Answers, duplicates: usize) {
    let events = gateway.events().await;
    assert_eq!(events.len(), 1, "{events:?}");
    assert_eq!(events[0]["duplicates"], duplicates);
    assert_eq!(BTreeSet::from([events[0]["id"].as_str().unwrap().to_owned()]), answers.events);
    let stats = gateway.json("/api/stats").await;
    assert_eq!((&stats["events"], &stats["duplicates"]), (&1.into(), &duplicates.into()), "{stats}");
    assert_eq!((&stats["conflicts"], &stats["rejected"]), (&0.into(), &0.into()), "{stats}");
}

#[tokio::test(flavor = "multi_thread")]
async fn r12_the_seed_incident_11247_deliveries_make_one_event_also_after_a_restart() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    prepare(directory.path(), CONFIG);
    let mut gateway = Gateway::start(Path::new(BINARY), directory.path());
    let first = storm(gateway.ingress, 64, COPIES, "evt_of_the_incident").await;
    eprintln!("first storm: {:?}", first.words);
    assert_eq!(first.of("accepted"), 1, "{first:?}");
    assert_eq!(first.of("duplicate"), COPIES - 1, "{first:?}");
    assert_one_event(&gateway, &first, COPIES - 1).await;
    assert!((gateway.metric("oncehook_accepted_total").await - 1.0).abs() < 0.1);
    assert!(gateway.stop().success());

    let gateway = Gateway::start(Path::new(BINARY), directory.path());
    assert_one_event(&gateway, &first, COPIES - 1).await;
    let second = storm(gateway.ingress, 64, COPIES, "evt_of_the_incident").await;
    eprintln!("second storm: {:?}", second.words);
    assert_eq!(second.of("duplicate"), COPIES, "{second:?}");
    assert_eq!(second.events, first.events);
    assert_one_event(&gateway, &second, 2 * COPIES - 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_19_r12_1000_deliveries_in_parallel_make_one_event() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    prepare(directory.path(), CONFIG);
    let gateway = Gateway::start(Path::new(BINARY), directory.path());
    let answers = storm(gateway.ingress, 1_000, 1_000, "evt_in_parallel").await;
    assert_eq!((answers.of("accepted"), answers.of("duplicate")), (1, 999), "{answers:?}");
    assert_one_event(&gateway, &answers, 999).await;
}
