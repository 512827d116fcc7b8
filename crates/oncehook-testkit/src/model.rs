//! Random histories: every journal must decide exactly as the reference does.

use oncehook::event::{EventId, NewEvent, SourceName};
use oncehook::journal::memory::MemoryJournal;
use oncehook::journal::{EventQuery, Journal, JournalReader};
use oncehook_verify::{Quarantine, UnixMicros};
use std::collections::HashMap;

use crate::journal::{NOW, append, event};
use crate::random::Random;

/// Plays a history of appends against a journal and the reference, and compares verdicts, lists, stories and counts.
/// Panics with the seed in its text at the first difference.
pub async fn compare<J: Journal + JournalReader>(journal: &J, seed: u64, requests: usize) {
    let mut history = History::new(seed);
    history.play(journal, requests).await;
    history.end(journal).await;
}

/// As [`compare`], but the journal is closed and opened again at random moments.
pub async fn compare_reopening<J: Journal + JournalReader>(open: impl Fn() -> J, seed: u64, requests: usize) {
    let mut history = History::new(seed);
    while history.requests < requests {
        let journal = open();
        let count = 1 + history.random.below(40) as usize;
        history.play(&journal, count).await;
        journal.close().await;
    }
    let journal = open();
    history.end(&journal).await;
    journal.close().await;
}

struct History {
    seed: u64,
    random: Random,
    reference: MemoryJournal,
    /// The two give different ids to the same event.
    ids: HashMap<EventId, EventId>,
    /// Requests so far.
    requests: usize,
}

impl History {
    fn new(seed: u64) -> Self {
        let (random, reference) = (Random::new(seed), MemoryJournal::new());
        Self { seed, random, reference, ids: HashMap::new(), requests: 0 }
    }

    async fn play<J: Journal>(&mut self, journal: &J, requests: usize) {
        let Self { seed, random, reference, ids, .. } = self;
        for request in self.requests..self.requests + requests {
            let size = 1 + random.below(4);
            let events: Vec<NewEvent> = (0..size).map(|_| random_event(random, request)).collect();
            let expected = append(&*reference, events.clone()).await;
            let found = append(journal, events).await;
            assert_eq!(expected.len(), found.len(), "seed {seed}, request {request}");
            for (expected, found) in expected.iter().zip(&found) {
                assert_eq!(expected.verdict, found.verdict, "seed {seed}, request {request}");
                let id = *ids.entry(expected.id).or_insert(found.id);
                assert_eq!(id, found.id, "seed {seed}, request {request}");
            }
        }
        self.requests += requests;
    }

    async fn end<J: JournalReader>(self, journal: &J) {
        let Self { seed, reference, ids, .. } = self;
        let query = EventQuery { limit: 1_000_000, ..Default::default() };
        let expected = reference.list(query.clone()).await.unwrap().events;
        let found = journal.list(query).await.unwrap().events;
        assert_eq!(expected.len(), found.len(), "seed {seed}");
        for (expected, mut found) in expected.into_iter().zip(found) {
            assert_eq!(ids[&expected.id], found.id, "seed {seed}: order");
            let mut wanted = reference.show(expected.id).await.unwrap().unwrap();
            let mut story = journal.show(found.id).await.unwrap().unwrap();
            wanted.conflicts.sort_by_key(|conflict| conflict.digest);
            story.conflicts.sort_by_key(|conflict| conflict.digest);
            found.id = expected.id;
            story.event.id = expected.id;
            assert_eq!(expected, found, "seed {seed}");
            assert_eq!(wanted, story, "seed {seed}");
        }
        assert_eq!(reference.stats().await.unwrap(), journal.stats().await.unwrap(), "seed {seed}");
    }
}

fn random_event(random: &mut Random, request: usize) -> NewEvent {
    let source = random.pick(&["shop", "bank", "mail"]);
    let key = format!("evt_{}", random.below(40));
    let body = format!("body {}", random.below(12) * random.below(2));
    NewEvent {
        source: SourceName::new(source).unwrap(),
        received_at: UnixMicros(NOW.0 + request as i64 * 1_000),
        quarantine: (random.below(20) == 0).then_some(Quarantine::AmbiguousJson),
        routes: Default::default(),
        peer: [192, 0, 2, random.below(9) as u8].into(),
        ..event(&key, &body)
    }
}
