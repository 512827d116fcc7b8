//! The fast path in front of a journal whose answers the test holds back.

use std::net::IpAddr;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use oncehook_verify::{EventKey, Integrity, UnixMicros};
use tokio::sync::oneshot;

use super::*;
use crate::event::{EventId, SourceName};
use crate::journal::memory::MemoryJournal;
use crate::journal::{BoxFuture, JournalReader, JournalState, SelfTestError, Ticket};

pub(super) const NOW: UnixMicros = UnixMicros(1_790_000_000_000_000);

pub(crate) fn event(key: &str, digest: u8) -> NewEvent {
    NewEvent {
        id: None,
        source: SourceName::new("shop").unwrap(),
        key: EventKey::from_bytes(key.as_bytes()).unwrap(),
        key_signed: true,
        kind: None,
        entity: None,
        occurred_at: None,
        version: None,
        received_at: NOW,
        expires_at: UnixMicros(NOW.0 + 1_000),
        integrity: Integrity::Body,
        headers: Bytes::new(),
        body: Bytes::new(),
        digest: [digest; 32],
        quarantine: None,
        routes: Default::default(),
        by_entity: false,
        peer: [127, 0, 0, 1].into(),
    }
}

/// An id that no journal has given.
pub(crate) fn guessed_id() -> EventId {
    crate::event::EventIds::above(0, 0).next(NOW)
}

type Waiting = (NewEvents, oneshot::Sender<Result<Receipt, AppendError>>);

/// The reference journal, but an append waits until the test lets it happen, or fail.
#[derive(Default)]
struct SlowJournal {
    inner: MemoryJournal,
    waiting: Mutex<Vec<Waiting>>,
    /// So many duplicates can be counted, if the test says so.
    room: Mutex<Option<usize>>,
}

impl SlowJournal {
    fn waiting(&self) -> usize {
        self.waiting.lock().unwrap().len()
    }

    /// Ends the oldest append. Returns whether anybody was still waiting for it.
    async fn end(&self, outcome: Result<(), AppendError>) -> bool {
        let (events, answer) = self.waiting.lock().unwrap().remove(0);
        let outcome = match outcome {
            Ok(()) => self.inner.submit(events).unwrap().await.unwrap(),
            Err(error) => Err(error),
        };
        answer.send(outcome).is_ok()
    }
}

impl Journal for SlowJournal {
    fn submit(&self, events: NewEvents) -> Result<Ticket, AppendError> {
        let (answer, ticket) = oneshot::channel();
        self.waiting.lock().unwrap().push((events, answer));
        Ok(ticket)
    }

    fn note_duplicate(&self, event: EventId, source: &SourceName, at: UnixMicros, peer: IpAddr, layer: Layer) -> bool {
        self.note_duplicates(&[KnownCopy { event, source, at, peer, layer }])
    }

    fn note_duplicates(&self, copies: &[KnownCopy<'_>]) -> bool {
        let mut room = self.room.lock().unwrap();
        let enough = room.is_none_or(|room| room >= copies.len());
        *room = room.map(|room| room.saturating_sub(copies.len()));
        enough && self.inner.note_duplicates(copies)
    }

    fn state(&self) -> JournalState {
        self.inner.state()
    }

    fn self_test(&self) -> BoxFuture<'_, Result<(), SelfTestError>> {
        self.inner.self_test()
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        self.inner.close()
    }
}

type Answer = tokio::task::JoinHandle<Result<Settled, AppendError>>;

struct Rig {
    path: Arc<FastPath>,
    journal: Arc<SlowJournal>,
}

impl Rig {
    fn new() -> Self {
        Self { path: Arc::default(), journal: Arc::default() }
    }

    /// Sends a request and lets it go as far as it can.
    async fn send(&self, events: &[NewEvent]) -> Answer {
        let (path, journal) = (Arc::clone(&self.path), Arc::clone(&self.journal));
        let events = events.iter().cloned().collect();
        let answer = tokio::spawn(async move { path.append(&*journal, events).await });
        settle().await;
        answer
    }

    async fn counts(&self) -> (u64, u64, u64) {
        let stats = self.journal.inner.stats().await.unwrap();
        let counts = stats.sources.first().cloned().unwrap_or_default();
        (counts.events, counts.duplicates, counts.conflicts)
    }
}

/// Lets every task run until it waits. (One thread, so this is exact.)
pub(super) async fn settle() {
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
}

async fn settled(answer: Answer) -> (Verdict, Layer, EventId) {
    let settled = answer.await.unwrap().unwrap();
    (settled.receipt[0].verdict, settled.layer, settled.receipt[0].id)
}

#[tokio::test]
async fn r16_copies_that_arrive_together_share_one_append() {
    let rig = Rig::new();
    let mut answers = Vec::new();
    for _ in 0..100 {
        answers.push(rig.send(&[event("evt_1", 1)]).await);
    }
    assert_eq!(rig.journal.waiting(), 1);
    assert!(rig.journal.end(Ok(())).await);
    let (verdict, layer, first) = settled(answers.remove(0)).await;
    assert_eq!((verdict, layer), (Verdict::New, Layer::Journal));
    for answer in answers {
        assert_eq!(settled(answer).await, (Verdict::Duplicate, Layer::Memory, first));
    }
    // Later ones are known without asking.
    assert_eq!(settled(rig.send(&[event("evt_1", 1)]).await).await, (Verdict::Duplicate, Layer::Memory, first));
    assert_eq!(rig.journal.waiting(), 0);
    assert_eq!(rig.counts().await, (1, 100, 0), "every copy is counted");
}

#[tokio::test]
async fn r16_a_failed_append_fails_its_copies_and_is_not_remembered() {
    let rig = Rig::new();
    let answers = [rig.send(&[event("evt_1", 1)]).await, rig.send(&[event("evt_1", 1)]).await];
    let error = AppendError::Unavailable("disk".to_owned());
    rig.journal.end(Err(error.clone())).await;
    for answer in answers {
        assert_eq!(answer.await.unwrap(), Err(error.clone()));
    }
    let retry = rig.send(&[event("evt_1", 1)]).await;
    assert_eq!(rig.journal.waiting(), 1, "the retry is a new append");
    rig.journal.end(Ok(())).await;
    assert_eq!(settled(retry).await.0, Verdict::New);
}

#[tokio::test]
async fn fault_13_a_leader_that_hangs_up_takes_nobody_along_and_one_of_the_others_leads() {
    let rig = Rig::new();
    let leader = rig.send(&[event("evt_1", 1)]).await;
    let mut followers = Vec::new();
    for _ in 0..50 {
        followers.push(rig.send(&[event("evt_1", 1)]).await);
    }
    leader.abort();
    settle().await;
    assert_eq!(rig.journal.waiting(), 2, "one of the followers asks, and not all of them");
    assert!(!rig.journal.end(Ok(())).await, "nobody listens, and it is stored all the same");
    assert!(rig.journal.end(Ok(())).await);
    let mut asked = 0;
    for follower in followers {
        let (verdict, layer, _) = settled(follower).await;
        assert_eq!(verdict, Verdict::Duplicate);
        asked += usize::from(layer == Layer::Journal);
    }
    assert_eq!((asked, rig.counts().await), (1, (1, 50, 0)));
}

#[tokio::test]
async fn another_body_always_goes_to_the_journal() {
    let rig = Rig::new();
    let first = rig.send(&[event("evt_1", 1)]).await;
    let other = rig.send(&[event("evt_1", 2)]).await;
    assert_eq!(rig.journal.waiting(), 2, "while the first is under way");
    rig.journal.end(Ok(())).await;
    rig.journal.end(Ok(())).await;
    let first = settled(first).await.2;
    assert_eq!(settled(other).await, (Verdict::Conflict, Layer::Journal, first));

    let others = [rig.send(&[event("evt_1", 2)]).await, rig.send(&[event("evt_1", 2)]).await];
    assert_eq!(rig.journal.waiting(), 1, "known, and one leads");
    rig.journal.end(Ok(())).await;
    settle().await;
    assert_eq!(rig.journal.waiting(), 1, "the copy of a conflict is counted by the journal");
    rig.journal.end(Ok(())).await;
    for other in others {
        assert_eq!(settled(other).await, (Verdict::Conflict, Layer::Journal, first));
    }
    assert_eq!(rig.counts().await, (1, 0, 3));
    let again = settled(rig.send(&[event("evt_1", 1)]).await).await;
    assert_eq!(again, (Verdict::Duplicate, Layer::Memory, first), "the conflict has not replaced the first");
}

#[tokio::test]
async fn a_request_of_several_events_is_answered_only_if_all_are_known() {
    let rig = Rig::new();
    let both = [event("evt_1", 1), event("evt_2", 1)];
    let answer = rig.send(&both).await;
    rig.journal.end(Ok(())).await;
    let first = answer.await.unwrap().unwrap().receipt;
    let again = rig.send(&both).await.await.unwrap().unwrap();
    assert_eq!(again.layer, Layer::Memory);
    assert!(
        again
            .receipt
            .iter()
            .zip(&first)
            .all(|(again, first)| { *again == Appended { verdict: Verdict::Duplicate, ..*first } })
    );
    let mixed = rig.send(&[event("evt_1", 1), event("evt_3", 1)]).await;
    assert_eq!(rig.journal.waiting(), 1);
    rig.journal.end(Ok(())).await;
    let mixed = mixed.await.unwrap().unwrap();
    assert_eq!(mixed.layer, Layer::Journal);
    assert_eq!([mixed.receipt[0].verdict, mixed.receipt[1].verdict], [Verdict::Duplicate, Verdict::New]);
    assert_eq!(rig.counts().await, (3, 3, 0));
}

#[tokio::test]
async fn r32_a_key_whose_time_is_over_is_asked_for_again() {
    let rig = Rig::new();
    let answer = rig.send(&[event("evt_1", 1)]).await;
    rig.journal.end(Ok(())).await;
    settled(answer).await;
    let late = NewEvent { received_at: UnixMicros(NOW.0 + 1_000), ..event("evt_1", 1) };
    let late = rig.send(&[late]).await;
    assert_eq!(rig.journal.waiting(), 1);
    rig.journal.end(Ok(())).await;
    settled(late).await;
}

#[tokio::test]
async fn a_duplicate_that_cannot_be_counted_here_goes_to_the_journal() {
    let rig = Rig::new();
    let answers = [rig.send(&[event("evt_1", 1)]).await, rig.send(&[event("evt_1", 1)]).await];
    *rig.journal.room.lock().unwrap() = Some(0);
    rig.journal.end(Ok(())).await;
    let third = rig.send(&[event("evt_1", 1)]).await;
    assert_eq!(rig.journal.waiting(), 2);
    rig.journal.end(Ok(())).await;
    rig.journal.end(Ok(())).await;
    for answer in answers.into_iter().chain([third]) {
        assert_eq!(settled(answer).await.1, Layer::Journal);
    }
    assert_eq!(rig.counts().await, (1, 2, 0));
}

#[tokio::test]
async fn duplicates_of_a_request_without_room_for_all_of_them_are_counted_once() {
    let rig = Rig::new();
    let both = [event("evt_1", 1), event("evt_2", 1)];
    let answer = rig.send(&both).await;
    rig.journal.end(Ok(())).await;
    answer.await.unwrap().unwrap();
    *rig.journal.room.lock().unwrap() = Some(1);
    let again = rig.send(&both).await;
    assert_eq!(rig.journal.waiting(), 1, "the journal counts both");
    rig.journal.end(Ok(())).await;
    again.await.unwrap().unwrap();
    assert_eq!(rig.counts().await, (2, 2, 0));
}
