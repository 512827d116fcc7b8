//! The fast path in front of a journal whose answers the test holds back.

use oncehook_verify::{EventKey, Integrity, UnixMicros};

use super::model::{Appending, Node, Scene};
use super::*;
use crate::event::EventId;

pub(super) const NOW: UnixMicros = UnixMicros(1_790_000_000_000_000);

pub(crate) fn event(key: &str, digest: u8) -> NewEvent {
    let key = EventKey::from_bytes(key.as_bytes()).unwrap();
    NewEvent {
        source: SourceName::new("shop").unwrap(),
        expires_at: UnixMicros(NOW.0 + 1_000),
        integrity: Integrity::Body,
        peer: [127, 0, 0, 1].into(),
        ..NewEvent::probe(&key, digest, NOW)
    }
}

/// A fact whose time is over this many microseconds after `NOW`.
pub(super) fn fact_for(life: i64) -> Fact {
    Fact { event: EventId::from_bytes([7; 16]), digest: [9; 32], expires_at: UnixMicros(NOW.0 + life) }
}

/// Lets every task run until it waits. (One thread, so this is exact.)
pub(super) async fn settle() {
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
}

struct Rig {
    scene: Scene,
    node: Node,
}

impl Rig {
    fn new() -> Self {
        let scene = Scene::default();
        Self { node: Node::alone(&scene), scene }
    }

    /// Sends a request and lets it go as far as it can.
    async fn send<const N: usize>(&self, events: [NewEvent; N]) -> Appending {
        let answer = self.node.append(events.into_iter().collect());
        settle().await;
        answer
    }

    /// Sends copies of one event.
    async fn send_copies(&self, count: usize) -> Vec<Appending> {
        let answers = (0..count).map(|_| self.node.append(NewEvents::from_elem(event("evt_1", 1), 1))).collect();
        settle().await;
        answers
    }

    fn waiting(&self) -> usize {
        self.scene.lock().steps.len()
    }

    /// Ends the oldest append, and lets everything go on as far as it can. Returns whether it was still waited for.
    async fn end(&self) -> bool {
        self.scene.go_on(0);
        let heard = self.scene.go_on(self.waiting() - 1);
        settle().await;
        heard
    }

    /// What the journal has counted: events, duplicates, conflicts.
    fn counts(&self) -> (usize, usize, usize) {
        let [new, _, duplicates, conflicts] = self.scene.lock().counts;
        (new, duplicates, conflicts)
    }
}

async fn settled(answer: Appending) -> (Verdict, Layer, EventId) {
    let settled = answer.await.unwrap().unwrap();
    (settled.receipt[0].verdict, settled.layer, settled.receipt[0].id)
}

#[tokio::test]
async fn r16_copies_that_arrive_together_share_one_append() {
    let rig = Rig::new();
    let mut answers = rig.send_copies(100).await;
    assert_eq!(rig.waiting(), 1);
    assert!(rig.end().await);
    let (verdict, layer, first) = settled(answers.remove(0)).await;
    assert_eq!((verdict, layer), (Verdict::New, Layer::Journal));
    // Later ones are known without asking.
    answers.extend(rig.send_copies(1).await);
    for answer in answers {
        assert_eq!(settled(answer).await, (Verdict::Duplicate, Layer::Memory, first));
    }
    assert_eq!((rig.waiting(), rig.counts()), (0, (1, 100, 0)), "every copy is counted");
}

#[tokio::test]
async fn r16_a_failed_append_fails_its_copies_and_is_not_remembered() {
    let rig = Rig::new();
    let answers = rig.send_copies(2).await;
    let error = AppendError::Unavailable("disk".to_owned());
    rig.scene.lock().refuses = Some(error.clone());
    rig.end().await;
    for answer in answers {
        assert_eq!(answer.await.unwrap(), Err(error.clone()));
    }
    let retry = rig.send([event("evt_1", 1)]).await;
    assert_eq!(rig.waiting(), 1, "the retry is a new append");
    rig.end().await;
    assert_eq!(settled(retry).await.0, Verdict::New);
}

#[tokio::test]
async fn fault_13_a_leader_that_hangs_up_takes_nobody_along_and_one_of_the_others_leads() {
    let rig = Rig::new();
    let mut followers = rig.send_copies(51).await;
    followers.remove(0).abort();
    settle().await;
    assert_eq!(rig.waiting(), 2, "one of the followers asks, and not all of them");
    assert!(!rig.end().await, "its sender is gone, and it is stored all the same");
    assert!(rig.end().await);
    let mut asked = 0;
    for follower in followers {
        let (verdict, layer, _) = settled(follower).await;
        assert_eq!(verdict, Verdict::Duplicate);
        asked += usize::from(layer == Layer::Journal);
    }
    assert_eq!((asked, rig.counts()), (1, (1, 50, 0)));
}

#[tokio::test]
async fn another_body_always_goes_to_the_journal() {
    let rig = Rig::new();
    let first = rig.send([event("evt_1", 1)]).await;
    let other = rig.send([event("evt_1", 2)]).await;
    assert_eq!(rig.waiting(), 2, "while the first is under way");
    rig.end().await;
    rig.end().await;
    let first = settled(first).await.2;

    let others = [rig.send([event("evt_1", 2)]).await, rig.send([event("evt_1", 2)]).await];
    assert_eq!(rig.waiting(), 1, "known, and one leads");
    rig.end().await;
    assert_eq!(rig.waiting(), 1, "the copy of a conflict is counted by the journal");
    rig.end().await;
    for other in others.into_iter().chain([other]) {
        assert_eq!(settled(other).await, (Verdict::Conflict, Layer::Journal, first));
    }
    assert_eq!(rig.counts(), (1, 0, 3));
    let again = settled(rig.send([event("evt_1", 1)]).await).await;
    assert_eq!(again, (Verdict::Duplicate, Layer::Memory, first), "the conflict has not replaced the first");
}

#[tokio::test]
async fn a_request_of_several_events_is_answered_only_if_all_are_known() {
    let rig = Rig::new();
    let both = || [event("evt_1", 1), event("evt_2", 1)];
    let answer = rig.send(both()).await;
    rig.end().await;
    let mut first = answer.await.unwrap().unwrap().receipt;
    let again = rig.send(both()).await.await.unwrap().unwrap();
    first.iter_mut().for_each(|appended| appended.verdict = Verdict::Duplicate);
    assert_eq!(again, Settled { receipt: first, layer: Layer::Memory });
    let mixed = rig.send([event("evt_1", 1), event("evt_3", 1)]).await;
    assert_eq!(rig.waiting(), 1);
    rig.end().await;
    let mixed = mixed.await.unwrap().unwrap();
    let verdicts = [mixed.receipt[0].verdict, mixed.receipt[1].verdict];
    assert_eq!((mixed.layer, verdicts), (Layer::Journal, [Verdict::Duplicate, Verdict::New]));
    // Without room for all of them, the journal counts both.
    rig.scene.lock().room = Some(1);
    let again = rig.send(both()).await;
    assert_eq!(rig.waiting(), 1);
    rig.end().await;
    assert_eq!(settled(again).await.1, Layer::Journal);
    assert_eq!(rig.counts(), (3, 5, 0));
}

#[tokio::test]
async fn r32_a_key_whose_time_is_over_is_asked_for_again() {
    let rig = Rig::new();
    let first = rig.send([event("evt_1", 1)]).await;
    rig.end().await;
    settled(first).await;
    let late = NewEvent { received_at: UnixMicros(NOW.0 + 1_000), ..event("evt_1", 1) };
    let late = rig.send([late]).await;
    assert_eq!(rig.waiting(), 1);
    rig.end().await;
    assert_eq!(settled(late).await.1, Layer::Journal);
}

#[tokio::test]
async fn a_duplicate_that_cannot_be_counted_here_goes_to_the_journal() {
    let rig = Rig::new();
    let mut answers = rig.send_copies(2).await;
    rig.scene.lock().room = Some(0);
    rig.end().await;
    answers.extend(rig.send_copies(1).await);
    assert_eq!(rig.waiting(), 2);
    rig.end().await;
    rig.end().await;
    for answer in answers {
        assert_eq!(settled(answer).await.1, Layer::Journal);
    }
    assert_eq!(rig.counts(), (1, 2, 0));
}
